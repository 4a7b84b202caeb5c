"""Hand-written PTX kernels for the emulator's tests.

`text` puts a body between declarations and a prologue:

    %p0..  .pred    %h0..  .b16    %r0..  .b32    %d0..  .b64    %f0..  .f32
    %a0..  the addresses of array parameters, %n0.. the values of integer ones (p0, p1, ...: their names)
    %t     %tid.x         %e     %a0 + 4 * %t         %s     address of the dynamic shared memory, 1,024-byte aligned
"""

from __future__ import annotations

import numpy as np
import torch

from mla_cute.emulator import ptx
from mla_cute.emulator.decode import Program
from mla_cute.emulator.host import Launch
from mla_cute.emulator.machine import Finding, GlobalMemory, Options, run_launches
from mla_cute.emulator.run import run_ptx
from mla_cute.emulator.tensormap import Swizzle, TensorMap

PROLOGUE = """
    .reg .pred %p<20>; .reg .b16 %h<40>; .reg .b32 %r<200>; .reg .b64 %d<60>; .reg .f32 %f<80>; .reg .b128 %q<4>;
    .reg .b64 %a<8>; .reg .b32 %n<8>; .reg .b32 %t, %s; .reg .b64 %e;
    mov.u32 %t, %tid.x;
    mov.u32 %s, sm;
"""


def text(
    body: str, args=(), *, target: str = "sm_90a", directives: str = "", globals_: str = "", name: str = "k"
) -> str:
    params, loads = [], []
    for i, arg in enumerate(args):
        if isinstance(arg, (np.ndarray, torch.Tensor)):
            params.append(f".param .u64 p{i}")
            loads.append(f"ld.param.u64 %a{i}, [p{i}];")
        elif isinstance(arg, bytes):
            params.append(f".param .align 64 .b8 p{i}[{len(arg)}]")
        elif isinstance(arg, float):
            params.append(f".param .f32 p{i}")
        else:
            params.append(f".param .u32 p{i}")
            loads.append(f"ld.param.u32 %n{i}, [p{i}];")
    if args and isinstance(args[0], (np.ndarray, torch.Tensor)):
        loads.append("mad.wide.u32 %e, %t, 4, %a0;")
    return (
        f".version 8.6\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 sm[];\n{globals_}\n"
        f".visible .entry {name}({', '.join(params)}) {directives}\n{{{PROLOGUE}{' '.join(loads)}\n{body}\nret;\n}}\n"
    )


def run(body: str, args=(), *, threads: int = 32, smem: int = 0, options: Options | None = None, **kw) -> list[Finding]:
    """The findings of one launch. kw: of `text`, and grid, cluster of run_ptx."""
    launch = {key: kw.pop(key) for key in ("grid", "cluster") if key in kw}
    return run_ptx(text(body, args, **kw), args, block=(threads, 1, 1), smem_bytes=smem, options=options, **launch)


def lanes(body: str, *args, threads: int = 32, dtype=np.uint32, width: int = 1, schedules=(2,), **kw) -> np.ndarray:
    """What the threads leave in %a0, an array of `dtype` [threads of all CTAs, width] ([threads] for width 1).

    args: parameters from the second on. The run must have no finding, under each of the schedules.
    """
    count = threads * int(np.prod(kw.get("grid", (1, 1, 1))))
    for n in schedules:
        out = np.zeros((count, width) if width > 1 else count, dtype)
        findings = run(body, (out, *args), threads=threads, options=Options.schedule(n), **kw)
        assert not findings, "\n".join(map(str, findings))
    return out


def run_two(first: tuple, second: tuple, *, options: Options, pdl: bool = True, threads: int = 32) -> list[Finding]:
    """Findings of two launches in a row, each (body, arrays); pdl: the second one may start early."""
    memory, pairs = GlobalMemory(), []
    for i, (body, args) in enumerate((first, second)):
        for array in args:
            memory.add(array.ctypes.data, array.nbytes, "array", array)
        name = f"k{i}"
        program = Program(ptx.parse(text(body, args, name=name)), name)
        params = tuple(array.ctypes.data.to_bytes(8, "little") for array in args)
        pairs.append((program, Launch(name, (2, 1, 1), (threads, 1, 1), (1, 1, 1), 0, pdl and i == 1, False, params)))
    return run_launches(pairs, memory, options)[0]


# An mbarrier at %s + OFFSET for COUNT arrivals, initialised by thread 0, that all threads of the CTA then know.
def mbarriers(*counts: int, offset: int = 0) -> str:
    inits = "".join(f"mbarrier.init.shared.b64 [%s+{offset + 8 * i}], {n};\n" for i, n in enumerate(counts))
    return f"""
    {{ .reg .pred %first;
    setp.ne.u32 %first, %t, 0;
    @%first bra NO_INIT;
    {inits}
    fence.mbarrier_init.release.cluster;
    NO_INIT: bar.sync 0; }}
    """


def wait(offset: int, parity: int | str, space: str = "shared::cta") -> str:
    """Until the phase of `parity` of the mbarrier at %s + offset is complete."""
    return f"""
    {{ .reg .pred %done;
    AGAIN: mbarrier.try_wait.parity.{space}.b64 %done, [%s+{offset}], {parity};
    @%done bra DONE;
    bra.uni AGAIN;
    DONE: }}
    """


CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


# ----- copies and operands of the tensor core -----


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn}
FLOATS |= {"e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8}


def operand(shape: tuple, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(raw bits, values) of small integers."""
    values = rng(seed).integers(0 if kind == "u8" else -4, 5, shape).astype(np.float64)
    t = torch.from_numpy(values).to(FLOATS[kind])
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]).numpy(), values


def tensor_map(array: np.ndarray, box: tuple, swizzle=Swizzle.NONE, element: str = "", **kw) -> bytes:
    """Of an array; box as numpy has it, outermost dim first."""
    kind = element or {"u1": "u8", "u2": "u16", "u4": "u32", "f4": "f32"}[array.dtype.str[1:]]
    dims = tuple(reversed(array.shape))
    return TensorMap(
        array.ctypes.data,
        kind,
        dims,
        tuple(reversed(array.strides)),
        tuple(reversed(box)),
        (1,) * len(dims),
        swizzle,
        **kw,
    ).encode()


def swizzled(rows: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [rows, width] -> as the hardware's swizzle of 16 << bits bytes stores them from a 1,024-byte boundary on."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    at = np.arange(flat.size)
    out = np.empty_like(flat)
    out[at ^ ((at >> 7 & (1 << bits) - 1) << 4)] = flat
    return out


def descriptor(lbo: int, sbo: int, layout: int) -> int:
    """All but the address. layout: 0 none, 1 128 bytes, 2 64, 3 32."""
    return (lbo >> 4) << 16 | (sbo >> 4) << 32 | layout << 62


def smem_operand(raw: np.ndarray, form: str) -> tuple[np.ndarray, int]:
    """raw [rows, K bits] as bytes of shared memory, and its descriptor. form: K128, K0 (K-major), MN128 (16 bits)."""
    rows, k = raw.shape
    size = raw.itemsize
    if form == "K128":  # rows of 128 bytes, what is behind K unused
        wide = np.zeros((rows, 128 // size), raw.dtype)
        wide[:, :k] = raw
        return swizzled(wide.view(np.uint8), 3), descriptor(16, 1024, 1)
    if form == "K0":  # cores of 8 rows x 16 bytes, K first
        cores = raw.view(np.uint8).reshape(rows // 8, 8, k * size // 16, 16).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(cores).reshape(-1), descriptor(128, 128 * (k * size // 16), 0)
    blocks = [swizzled(np.ascontiguousarray(raw[i : i + 64].T).view(np.uint8), 3) for i in range(0, rows, 64)]
    return np.concatenate(blocks), descriptor(len(blocks[0]), 1024, 1)


LOAD_SMEM = """
    setp.ne.u32 %p0, %t, 0; @%p0 bra LOADED; mbarrier.arrive.expect_tx.shared.b64 _, [%s+{bar}], {n};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%a1], {n}, [%s+{bar}]; LOADED: """


def wgmma_body(
    n: int, k: int, kind: str, d_type: str, a_desc: int | None, b_desc: int, b_at: int, flags: str, scale_d: str
) -> str:
    count = n // (4 if d_type == "f16" else 2)
    d = "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"
    a = "%d20" if a_desc is not None else "{%r150, %r151, %r152, %r153}"
    return f"""shr.u32 %r190, %s, 4; cvt.u64.u32 %d22, %r190; add.u64 %d20, %d22, {a_desc or 0};
    add.u64 %d21, %d22, {b_desc + (b_at >> 4)};
    wgmma.fence.sync.aligned; setp.ne.b32 %p9, {scale_d}, 0;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{kind}.{kind} {d}, {a}, %d21, %p9{flags};"""
