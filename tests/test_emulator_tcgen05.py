"""The tensor memory instructions of sm_100a on small hand-written kernels, and on kernels of the CuTe DSL.

The oracles are written here a second time, from the tables of the PTX ISA: nothing of `matrix` is used.
"""

import re
from types import ModuleType

import cutlass
import cutlass.memory
import cutlass.utils.blackwell_helpers as sm100
import ml_dtypes
import numpy as np
import pytest
import torch
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from mla_cute import jit
from mla_cute.emulator.host import compile_for_emulation
from mla_cute.emulator.machine import Options
from mla_cute.emulator.run import Emulated, run_ptx, session
from mla_cute.emulator.tensormap import Swizzle, TensorMap
from mla_cute.validate import Problem

SCHEDULES = [Options.schedule(n) for n in range(3)]  # eager, lazy, random
DATA = 1024  # bytes of alignment of what kernels keep in shared memory

# ----- a kernel around the instructions under test --------------------------------------------------------------------


class Kernel:
    """PTX of a kernel of 4 warps that loads `data` [CTAs, bytes] into shared memory, allocates tensor memory at %base,
    runs what is emitted, and frees it. `dump` stores what tensor memory holds to the output.

    Names for the text: %tid, %warp, %lane, %leader (thread 0; of CTA 0 with group 2), %base, %smem (address of the data),
    %bar (of four mbarriers with count 1), %out (of the CTA's output), %window (the warp's first lane, << 16), %first
    (thread 0), %rank (of the CTA), %map (address of the tensor map, if there is one: of `source`).
    """

    def __init__(
        self, data: np.ndarray | bytes = b"", group: int = 1, columns: int = 512, free: bool = True, source=None
    ):
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        self.data = np.array(data).reshape(group if data.ndim > 1 else 1, -1)
        if group == 2 and len(self.data) == 1:
            self.data = np.repeat(self.data, 2, 0)
        self.group, self.columns, self.free = group, columns, free
        self.source = source  # (array, its TensorMap)
        self.lines: list[str] = []
        self.dumps: list[int] = []  # words a thread
        self.phases = [0] * 4
        self.names = 0

    def __call__(self, text: str) -> None:
        self.lines.append(text)

    def elected(self, text: str) -> None:
        self(f"@%leader {text}" if "\n" not in text else "\n".join(f"@%leader {t}" for t in text.strip().split("\n")))

    def sync(self) -> None:
        self("bar.sync 0;")
        if self.group == 2:
            self("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;")

    def vector(self, n: int, kind: str = "b32") -> list[str]:
        self.names += 1
        self(f".reg .{kind} %v{self.names}_<{n}>;")
        return [f"%v{self.names}_{i}" for i in range(n)]

    def mbarrier_wait(self, i: int = 0, how: str = "") -> None:
        self.names += 1
        self(f".reg .pred %w{self.names};\nW{self.names}:")
        at = f"[%bar+{8 * i}]"
        self(f"mbarrier.try_wait.parity{how}.shared::cta.b64 %w{self.names}, {at}, {self.phases[i]};")
        self(f"@!%w{self.names} bra W{self.names};")
        self.phases[i] ^= 1

    def commit_and_wait(self, i: int = 0) -> None:
        if self.group == 1:
            self.elected(f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar+{8 * i}];")
        else:
            self.elected(
                "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                f"[%bar+{8 * i}], 3;"
            )
        self.mbarrier_wait(i)
        self("tcgen05.fence::after_thread_sync;")

    def st(self, values: list[str], column: int = 0, shape: str = "32x32b", lane: int = 0, extra: str = "", unpack=""):
        num = len(values) // {"16x128b": 2, "16x256b": 4}.get(shape, 1)
        self(f"add.u32 %t, %base, {(lane << 16) + column};\nadd.u32 %t, %t, %window;")
        self(f"tcgen05.st.sync.aligned.{shape}.x{num}{unpack}.b32 [%t]{extra}, {{{', '.join(values)}}};")

    def fill(self, columns: int, value: int = 0) -> None:
        """Set all lanes of the first `columns` columns."""
        v = self.vector(1)[0]
        self(f"mov.b32 {v}, {value};")
        at = 0
        while at < columns:
            self.st([v] * min(32, 1 << (columns - at).bit_length() - 1), at)
            at += min(32, 1 << (columns - at).bit_length() - 1)
        self("tcgen05.wait::st.sync.aligned;")
        self.sync()

    def ld(
        self, n: int, column: int = 0, shape: str = "32x32b", lane: int = 0, extra: str = "", pack: str = ""
    ) -> list[str]:
        values = self.vector(n)
        num = n // {"16x128b": 2, "16x256b": 4}.get(shape, 1)
        self(f"add.u32 %t, %base, {(lane << 16) + column};\nadd.u32 %t, %t, %window;")
        self(f"tcgen05.ld.sync.aligned.{shape}.x{num}{pack}.b32 {{{', '.join(values)}}}, [%t]{extra};")
        return values

    def output(self, values: list[str]) -> None:
        n, at = len(values), sum(self.dumps) * 512
        self(f"mad.wide.u32 %q, %tid, {4 * n}, %out;")
        for i, v in enumerate(values):
            self(f"st.global.b32 [%q+{at + 4 * i}], {v};")
        self.dumps.append(n)

    def dump(self, n: int, column: int = 0, **form) -> None:
        values = self.ld(n, column, **form)
        self("tcgen05.wait::ld.sync.aligned;")
        self.output(values)

    def text(self) -> str:
        n, g = self.data.shape[1], self.group
        copy = f"""
            mad.wide.u32 %q, %cta, {n}, %in;
            mov.u32 %i, %tid;
            C: setp.lt.u32 %p, %i, {n // 16};
            @!%p bra D;
            shl.b32 %t, %i, 4;
            cvt.u64.u32 %a, %t;
            add.u64 %a, %a, %q;
            ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%a];
            add.u32 %t, %t, %smem;
            st.shared.v4.b32 [%t], {{%x0, %x1, %x2, %x3}};
            add.u32 %i, %i, 128;
            bra C;
            D: fence.proxy.async.shared::cta;
        """
        sync = "bar.sync 0;"
        if g == 2:
            sync += "\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
        body = "\n".join(self.lines)
        alloc = f"""
            tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%slot], {self.columns};
            tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned;
        """
        params = ", .param .u64 p_source, .param .align 64 .b8 p_map[128]" if self.source else ""
        free = f"@%zero tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 %base, {self.columns};" if self.free else ""
        return f"""
        .version 8.7
        .target sm_100a
        .address_size 64
        .visible .entry k(.param .u64 p_in, .param .u64 p_out{params})
        {{
            .reg .b32 %tid, %warp, %lane, %base, %smem, %bar, %slot, %window, %cta, %i, %t, %x<4>;
            .reg .b32 %rank;
            .reg .b64 %in, %out, %q, %a, %map;
            .reg .pred %p, %first, %leader, %zero, %yes, %no;
            .shared .align {DATA} .b8 data[{max(n, 16)}];
            .shared .align 8 .b8 bars[32];
            .shared .align 4 .b8 slot[4];
            ld.param.u64 %in, [p_in];
            ld.param.u64 %out, [p_out];
            mov.u32 %tid, %tid.x;
            mov.u32 %cta, %ctaid.x;
            shr.u32 %warp, %tid, 5;
            and.b32 %lane, %tid, 31;
            mov.u32 %smem, data;
            mov.u32 %bar, bars;
            mov.u32 %slot, slot;
            shl.b32 %window, %warp, 21;
            setp.eq.u32 %zero, %warp, 0;
            setp.eq.u32 %leader, %tid, 0;
            setp.eq.u32 %first, %tid, 0;
            mov.u32 %rank, %cluster_ctarank;
            {"mov.b64 %map, p_map;" if self.source else ""}
            setp.eq.and.u32 %leader, %cta, 0, %leader;
            setp.eq.u32 %yes, 0, 0;
            setp.ne.u32 %no, 0, 0;
            {copy if n else ""}
            setp.eq.u32 %p, %tid, 0;
            @!%p bra A;
            mbarrier.init.shared.b64 [%bar], 1;
            mbarrier.init.shared.b64 [%bar+8], 1;
            mbarrier.init.shared.b64 [%bar+16], 1;
            mbarrier.init.shared.b64 [%bar+24], 1;
            fence.mbarrier_init.release.cluster;
            A: bar.sync 0;
            @!%zero bra B;
            {alloc}
            B: {sync}
            ld.shared.b32 %base, [%slot];
            mad.wide.u32 %out, %cta, {sum(self.dumps) * 512}, %out;
            {body}
            tcgen05.fence::before_thread_sync;
            {sync}
            {free}
            ret;
        }}
        """

    def run(self, options: Options | None = None) -> tuple[list, list[np.ndarray]]:
        """(findings, outputs): uint32 [CTAs, 128 threads, words] of each dump."""
        out = np.full((self.group, sum(self.dumps) * 128), 0xDEADBEEF, np.uint32)
        data = self.data if self.data.size else np.zeros((1, 16), np.uint8)
        findings = run_ptx(
            self.text(),
            [data, out, *([self.source[0], self.source[1].encode()] if self.source else [])],
            grid=(self.group, 1, 1),
            block=(128, 1, 1),
            cluster=(self.group, 1, 1),
            options=options,
        )
        pieces = np.split(out, np.cumsum([128 * n for n in self.dumps])[:-1], axis=1)
        return findings, [p.reshape(self.group, 128, n) for p, n in zip(pieces, self.dumps)]

    def good(self, options: Options | None = None) -> list[np.ndarray]:
        findings, out = self.run(options)
        assert not findings, "\n".join(map(str, findings))
        return out


def kinds(findings) -> set[str]:
    return {f.kind for f in findings}


# ----- descriptors and layouts, from the tables of the PTX ISA --------------------------------------------------------

FORMATS = {"f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
RESULTS = {"f16": 0, "f32": 1, "s32": 2}


def idesc(m, n, a="bf16", b=None, d="f32", a_mn=0, b_mn=0, extra=0) -> int:
    b = b or a
    bits = RESULTS[d] << 4 | FORMATS[a] << 7 | FORMATS[b] << 10 | a_mn << 15 | b_mn << 16
    return bits | n >> 3 << 17 | m >> 4 << 24 | extra


def descriptor(k: Kernel, offset: int, lbo: int = 0, sbo: int = 0, swizzle: int = 0) -> str:
    """A register with the shared-memory descriptor of the data at an offset."""
    r, (x,) = k.vector(1, "b64")[0], k.vector(1)
    k(f"add.u32 {x}, %smem, {offset};\nand.b32 {x}, {x}, 0x3ffff;\nshr.u32 {x}, {x}, 4;\ncvt.u64.u32 {r}, {x};")
    k(f"or.b64 {r}, {r}, {lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | swizzle << 61};")
    return r


def core_matrices(rows: np.ndarray) -> np.ndarray:
    """Bytes [rows, width] -> K-major without swizzle: 8 x 16 byte core matrices one after another, along K first."""
    r, width = rows.shape
    return rows.reshape(r // 8, 8, width // 16, 16).transpose(0, 2, 1, 3).reshape(-1)  # LBO 128, SBO 8 * width


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Bytes [rows, 128] -> K-major with the 128-byte swizzle."""
    chunks = rows.reshape(-1, 8, 16)
    order = np.arange(8) ^ np.arange(len(rows))[:, None] % 8
    return np.take_along_axis(chunks, order[:, :, None], 1).reshape(-1)


def raw(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)


RNG = np.random.default_rng(5)


def small(rows: int, columns: int, dtype) -> np.ndarray:
    """Small integers: sums of their products are exact."""
    return RNG.integers(-4, 5, (rows, columns)).astype(dtype)


def mma(
    k: Kernel, kind: str, d: int, a: str, b: str, desc: int, enable: str, ws="", tail: str = "", at: int = 0
) -> None:
    """d, and `at` (a lane << 16), relative to %base; a: a descriptor, or [register] of an address."""
    x = k.vector(1)[0]
    k(f"add.u32 {x}, %base, {d + at};")
    k.elected(f"tcgen05.mma{ws}.cta_group::{k.group}.kind::{kind} [{x}], {a}, {b}, {desc}, {enable}{tail};")


def d_lanes(m: int, n: int, group: int = 1, ws: bool = False):
    """(CTA, lane, column) [m, n] of each element of D."""
    row, col = np.mgrid[0:m, 0:n]
    if group == 2:
        cta, row = row // (m // 2), row % (m // 2)
        return (cta, row, col) if m == 256 else (cta, row + col // (n // 2) * 64, col % (n // 2))
    if m == 128:
        return 0 * row, row, col
    if ws:
        pieces = 128 // m
        return 0 * row, row + col // (n // pieces) * m, col % (n // pieces)
    return 0 * row, row // 16 * 32 + row % 16, col


# ----- ld and st ------------------------------------------------------------------------------------------------------


def fragment(shape: str, registers: int, half: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) [registers, 32 threads] of ld and st, from the figures of the PTX ISA."""
    i, t = np.mgrid[0:registers, 0:32]
    if shape == "32x32b":
        return t, i
    if shape == "16x32bx2":
        return t % 16, i + t // 16 * half
    if shape == "16x64b":  # thread 0: row 0, thread 1: row 8, thread 2: row 0 of the next column
        return t // 4 + 8 * (t % 2), 2 * i + t % 4 // 2
    if shape == "16x128b":
        return t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
@pytest.mark.parametrize(
    ("shape", "registers", "lane", "half"),
    [
        ("32x32b", 1, 0, 0), ("32x32b", 16, 0, 0), ("32x32b", 128, 0, 0), ("16x64b", 4, 16, 0), ("16x64b", 32, 0, 0),
        ("16x128b", 2, 0, 0), ("16x128b", 16, 16, 0), ("16x256b", 4, 0, 0), ("16x256b", 32, 16, 0),
        ("16x32bx2", 8, 0, 24), ("16x32bx2", 1, 16, 5),
    ],
)  # fmt: skip
def test_ld_and_st(shape, registers, lane, half, options):
    k = Kernel()
    k.fill(128, 7)
    values = k.vector(registers)
    for i, v in enumerate(values):
        k(f"mad.lo.u32 {v}, %tid, 1000, {i};")
    extra = f", {half}" if shape == "16x32bx2" else ""
    k.st(values, 3 if registers < 128 else 0, shape, lane, extra)
    k("tcgen05.wait::st.sync.aligned;")
    k.dump(128)
    k.dump(registers, 3 if registers < 128 else 0, shape=shape, lane=lane, extra=extra)
    whole, back = k.good(options)
    want = np.full((128, 128), 7)
    lanes, columns = fragment(shape, registers, half)
    for warp in range(4):
        thread = warp * 32 + np.arange(32)
        want[warp * 32 + lane + lanes, (3 if registers < 128 else 0) + columns] = (
            thread * 1000 + np.arange(registers)[:, None]
        )
    np.testing.assert_array_equal(whole[0], want)
    np.testing.assert_array_equal(back[0], np.arange(128)[:, None] * 1000 + np.arange(registers))


def test_pack_and_unpack():
    k = Kernel()
    k.fill(32)
    values = k.vector(4)
    for i, v in enumerate(values):
        k(f"mad.lo.u32 {v}, %tid, 65539, {i << 20 | 5};")
    k.st(values, unpack=".unpack::16b")
    k("tcgen05.wait::st.sync.aligned;")
    k.dump(8)
    k.dump(4, pack=".pack::16b")
    words, packed = k.good()
    want = np.arange(128)[:, None] * 65539 + (np.arange(4) << 20) + 5
    np.testing.assert_array_equal(packed[0], want)
    np.testing.assert_array_equal(words[0], np.stack([want & 0xFFFF, want >> 16], 2).reshape(128, 8))


# ----- mma ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
@pytest.mark.parametrize(("m", "n"), [(128, 64), (64, 24), (128, 256)])
def test_mma_f16_from_shared_memory(m, n, options):
    """K = 64 in four steps through rows of 128 swizzled bytes."""
    a, b = small(m, 64, ml_dtypes.bfloat16), small(n, 64, ml_dtypes.bfloat16)
    k = Kernel(np.concatenate([swizzled(raw(a)), swizzled(raw(b))]))
    k.fill(n, 99)
    for step in range(4):
        left = descriptor(k, 32 * step, 16, 1024, 2)
        right = descriptor(k, m * 128 + 32 * step, 16, 1024, 2)
        mma(k, "f16", 0, left, right, idesc(m, n), "%yes" if step else "%no")
    k.commit_and_wait()
    for column in range(0, n, 8):
        k.dump(8, column)
    got = np.concatenate(k.good(options), axis=2).view(np.float32)
    cta, lane, column = d_lanes(m, n)
    np.testing.assert_array_equal(got[cta, lane, column], a.astype(np.float32) @ b.astype(np.float32).T)
    if m == 64:
        assert (got.view(np.uint32)[0, 16:32] == 99).all()  # lanes between are left alone


CASES = {
    "f16": ("f16", np.float16, 16, "f32"),
    "half": ("f16", np.float16, 16, "f16"),
    "tf32": ("tf32", np.float32, 8, "f32"),
    "e4m3": ("f8f6f4", ml_dtypes.float8_e4m3fn, 32, "f32"),
    "e5m2": ("f8f6f4", ml_dtypes.float8_e5m2, 32, "f16"),
    "s8": ("i8", np.int8, 32, "s32"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", ["shared", "tensor"])
def test_mma_kinds(name, where):
    """One step, A from shared or from tensor memory, twice: the second adds to the first."""
    kind, dtype, depth, result = CASES[name]
    m, n = 128, 32
    a, b = small(m, depth, dtype), small(n, depth, dtype)
    k = Kernel(np.concatenate([core_matrices(raw(a)), core_matrices(raw(b))]))
    k.fill(64)
    left = descriptor(k, 0, 128, 256)
    right = descriptor(k, raw(a).size, 128, 256)
    if where == "tensor":
        put_rows(k, raw(a), 256)
        left = "[%ta]"
    form = idesc(m, n, {"half": "f16"}.get(name, name), d=result)
    mma(k, kind, 0, left, right, form, "%no")
    mma(k, kind, 0, left, right, form, "%yes")
    k.commit_and_wait()
    k.dump(32)
    got = k.good()[0][0]
    if result == "f16":
        got = got.astype(np.uint16).view(np.float16)
    got = got.view({"s32": np.int32, "f32": np.float32}[result]) if result != "f16" else got
    np.testing.assert_array_equal(got, 2 * (a.astype(np.float64) @ b.astype(np.float64).T))


def put_rows(k: Kernel, rows: np.ndarray, column: int) -> None:
    """Every thread stores its row (of 32 bytes, from the data's beginning) into its lane of tensor memory; %ta: address."""
    values = k.vector(8)
    k("mov.u32 %t, %tid;\nshr.u32 %i, %t, 3;\nand.b32 %t, %t, 7;\nshl.b32 %t, %t, 4;\nmad.lo.u32 %t, %i, 256, %t;")
    k("add.u32 %t, %t, %smem;")
    for i, v in enumerate(values):
        k(f"ld.shared.b32 {v}, [%t+{i // 4 * 128 + i % 4 * 4}];")
    k.st(values, column)
    k("tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;")
    k(f".reg .b32 %ta;\nadd.u32 %ta, %base, {column};")
    k.sync()
    k("tcgen05.fence::after_thread_sync;")


def test_mma_from_six_and_four_bit_elements():
    """e3m2 times e2m1: 16 elements to 16 bytes, their codes packed at the beginning."""
    a = RNG.integers(0, 64, (128, 32)).astype(np.uint8)
    b = RNG.integers(0, 16, (16, 32)).astype(np.uint8)

    def padded(codes, bits):
        stream = (codes.reshape(-1, 16, 1) >> np.arange(bits) & 1).reshape(-1, 16 * bits)
        return np.pad(np.packbits(stream, axis=1, bitorder="little"), ((0, 0), (0, 16 - 2 * bits))).reshape(
            len(codes), -1
        )

    k = Kernel(np.concatenate([core_matrices(padded(a, 6)), core_matrices(padded(b, 4))]))
    mma(
        k, "f8f6f4", 0, descriptor(k, 0, 128, 256), descriptor(k, 4096, 128, 256), idesc(128, 16, "e3m2", "e2m1"), "%no"
    )
    k.commit_and_wait()
    k.dump(16)
    x = a.view(ml_dtypes.float6_e3m2fn).astype(np.float64)
    y = b.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(k.good()[0][0].view(np.float32), (x @ y.T).astype(np.float32))


def test_mma_transposed_b():
    """B with N contiguous, 128-byte swizzle: 64 columns to a row of K."""
    a, b = small(128, 16, np.float16), small(64, 16, np.float16)
    k = Kernel(np.concatenate([core_matrices(raw(a)), swizzled(raw(b.T))]))
    mma(
        k,
        "f16",
        0,
        descriptor(k, 0, 128, 256),
        descriptor(k, 4096, 2048, 1024, 2),
        idesc(128, 64, "f16", b_mn=1),
        "%no",
    )
    k.commit_and_wait()
    k.dump(64)
    np.testing.assert_array_equal(k.good()[0][0].view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("where", ["shared", "tensor"])
def test_mma_ws(m, where):
    """With M = 64 and 32 the columns of D lie in 2 and 4 groups of lanes, each with its own copy of A."""
    n = 64
    a, b = small(m, 16, ml_dtypes.bfloat16), small(n, 16, ml_dtypes.bfloat16)
    lanes = np.tile(a, (128 // m, 1))
    k = Kernel(np.concatenate([core_matrices(raw(lanes)), core_matrices(raw(b))]))
    k.fill(n)
    left = descriptor(k, 0, 128, 256)
    if where == "tensor":
        put_rows(k, raw(lanes), 256)
        left = "[%ta]"
    right = descriptor(k, 4096, 128, 256)
    mma(k, "f16", 0, left, right, idesc(m, n), "%no", ".ws")
    # The second one without B's columns 8..15, 24..31, ... : use 8, skip 8.
    zero = k.vector(1, "b64")[0]
    k(f"mov.b64 {zero}, {1 << 39 | 7 << 40 | 7 << 48};")
    mma(k, "f16.collector::b1::discard", 0, left, right, idesc(m, n), "%yes", ".ws", f", {zero}")
    k.commit_and_wait()
    k.dump(64)
    got = k.good()[0].view(np.float32)
    product = a.astype(np.float32) @ b.astype(np.float32).T
    pieces = 128 // m
    keep = np.tile(np.arange(n // pieces) % 16 < 8, pieces)
    cta, lane, column = d_lanes(m, n, ws=True)
    np.testing.assert_array_equal(got[cta, lane, column], product + product * keep)


def test_output_lanes_and_scale_of_d():
    """Lanes 0-7 of each 32 are not written; then D / 8 + A B, with a D of 99."""
    a, b = small(128, 8, np.float32), small(16, 8, np.float32)
    k = Kernel(np.concatenate([core_matrices(raw(a)), core_matrices(raw(b))]))
    k.fill(16, int(np.float32(16).view(np.uint32)))
    left, right = descriptor(k, 0, 128, 256), descriptor(k, 4096, 128, 256)
    masks = k.vector(4)
    for v in masks:
        k(f"mov.b32 {v}, 255;")
    form = idesc(128, 16, "tf32")
    x = k.vector(1)[0]
    k(f"mov.b32 {x}, {form};")
    k.elected(f"tcgen05.mma.cta_group::1.kind::tf32 [%base], {left}, {right}, {x}, {{{', '.join(masks)}}}, %yes, 3;")
    k.commit_and_wait()
    k.dump(16)
    want = a.astype(np.float32) @ b.astype(np.float32).T + 2
    want[np.arange(128) % 32 < 8] = 16
    np.testing.assert_array_equal(k.good()[0][0].view(np.float32), want)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
@pytest.mark.parametrize(("m", "where"), [(256, "shared"), (128, "shared"), (256, "tensor"), (128, "tensor")])
def test_mma_of_a_pair(m, where, options):
    """cta_group::2: each CTA has half of the rows of A and of B, the even one issues."""
    n = 32
    a, b = small(m, 16, np.float16), small(n, 16, np.float16)
    rows = m // 2
    per_cta = [
        np.concatenate(
            [
                core_matrices(raw(np.tile(a[r * rows :][:rows], (128 // rows, 1)))),
                core_matrices(raw(b[r * n // 2 :][: n // 2])),
            ]
        )
        for r in range(2)
    ]
    k = Kernel(np.stack(per_cta), group=2)
    left, right = descriptor(k, 0, 128, 256), descriptor(k, 4096, 128, 256)
    if where == "tensor":
        put_rows(k, raw(a), 256)
        left = "[%ta]"
    mma(k, "f16", 0, left, right, idesc(m, n, "f16"), "%no")
    mma(k, "f16", 0, left, right, idesc(m, n, "f16"), "%yes")
    k.commit_and_wait()
    k.dump(n if m == 256 else n // 2)
    got = k.good(options)[0].view(np.float32)
    cta, lane, column = d_lanes(m, n, 2)
    np.testing.assert_array_equal(got[cta, lane, column], 2 * a.astype(np.float32) @ b.astype(np.float32).T)


SCALED = {
    "mxf8f6f4": ("e4m3", 32, 1, "mxf8f6f4.block_scale.scale_vec::1X"),
    "mxf4": ("e2m1", 64, 2, "mxf4.block_scale"),
    "nvf4": ("e2m1", 64, 4, "mxf4nvf4.block_scale.scale_vec::4X"),
    "nvf4 2X": ("e2m1", 64, 2, "mxf4nvf4.block_scale.block32"),
}


@pytest.mark.parametrize("name", SCALED)
def test_block_scaled_mma(name):
    """Scale factors come by tcgen05.cp.32x128b.warpx4: row r in lane r % 32, column r // 32 of each group of 32 lanes."""
    element, depth, factors, text = SCALED[name]
    m, n = 128, 64
    ue4m3 = name == "nvf4"
    dtype = ml_dtypes.float8_e4m3fn if element == "e4m3" else ml_dtypes.float4_e2m1fn
    a, b = small(m, depth, dtype), small(n, depth, dtype)
    codes = [RNG.integers(0x30, 0x40, (128, 4)) if ue4m3 else RNG.integers(125, 130, (128, 4)) for _ in range(2)]
    sa, sb = (c.astype(np.uint8) for c in codes)
    first = 2 if factors == 2 else 1 if factors == 1 else 0  # scale factor id

    def packed(x):
        codes = raw(x)
        return codes if element == "e4m3" else codes[:, ::2] | codes[:, 1::2] << 4

    # 32 rows of 16 bytes: the words of rows l, l + 32, l + 64 and l + 96, core matrices of 8 rows one after another.
    factor_tile = lambda s: s.reshape(4, 32, 4).transpose(1, 0, 2).reshape(-1)  # noqa: E731
    k = Kernel(np.concatenate([core_matrices(packed(a)), core_matrices(packed(b)), factor_tile(sa), factor_tile(sb)]))
    at = [0, m * 32, (m + n) * 32, (m + n) * 32 + 512]
    for i, column in ((2, 256), (3, 260)):
        d, x = descriptor(k, at[i], 128, 128), k.vector(1)[0]
        k(f"add.u32 {x}, %base, {column};")
        k.elected(f"tcgen05.cp.cta_group::1.32x128b.warpx4 [{x}], {d};")
    form = n >> 3 << 17 | m >> 7 << 27 | (0 if ue4m3 else 1) << 23 | first << 29 | first << 4
    form |= (1 << 7 | 1 << 10) if element == "e2m1" else 0
    left, right = descriptor(k, at[0], 128, 256), descriptor(k, at[1], 128, 256)
    x, y, z = k.vector(3)
    k(f"add.u32 {x}, %base, 256;\nadd.u32 {y}, %base, 260;\nmov.b32 {z}, {form};")
    k.elected(f"tcgen05.mma.cta_group::1.kind::{text} [%base], {left}, {right}, {z}, [{x}], [{y}], %no;")
    k.commit_and_wait()
    k.dump(64)

    def values(x, s):
        s = s[: len(x), first : first + factors]
        f = s.view(ml_dtypes.float8_e4m3fn).astype(np.float64) if ue4m3 else 2.0 ** (s.astype(int) - 127)
        return x.astype(np.float64) * np.repeat(f, depth // factors, 1)

    want = (values(a, sa) @ values(b, sb).T).astype(np.float32)
    np.testing.assert_array_equal(k.good()[0][0].view(np.float32), want)


# ----- cp and shift ---------------------------------------------------------------------------------------------------

COPIES = {
    "128x256b": (128, 8, lambda r: [r]),
    "128x128b": (128, 4, lambda r: [r]),
    "4x256b": (4, 8, lambda r: [32 * r]),
    "64x128b.warpx2::02_13": (64, 4, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 4, lambda r: [r % 32 + r // 32 * 64, r % 32 + r // 32 * 64 + 32]),
    "32x128b.warpx4": (32, 4, lambda r: [r, r + 32, r + 64, r + 96]),
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", COPIES)
def test_cp(shape, group):
    rows, words, lanes = COPIES[shape]
    source = RNG.integers(0, 1 << 32, (group, max(rows, 8), words), dtype=np.uint32)
    k = Kernel(np.stack([core_matrices(raw(s)) for s in source]), group)
    k.fill(32, 5)
    d, x = descriptor(k, 0, 128, 32 * words), k.vector(1)[0]
    k(f"add.u32 {x}, %base, 8;")
    k.elected(f"tcgen05.cp.cta_group::{group}.{shape} [{x}], {d};")
    k.commit_and_wait()
    k.dump(32)
    want = np.full((group, 128, 32), 5, np.uint32)
    for r in range(rows):
        for lane in lanes(r):
            want[:, lane, 8 : 8 + words] = source[:, r]
    np.testing.assert_array_equal(k.good()[0], want)


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_cp_that_unpacks(source, bits):
    codes = RNG.integers(0, 1 << bits, (128, 16)).astype(np.uint8)
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(128, -1)
    chunks = np.pad(np.packbits(stream, axis=1, bitorder="little"), ((0, 0), (0, 16 - 2 * bits)))
    k = Kernel(core_matrices(chunks))
    k.elected(f"tcgen05.cp.cta_group::1.128x128b.b8x16.{source} [%base], {descriptor(k, 0, 128, 128)};")
    k.commit_and_wait()
    k.dump(4)
    np.testing.assert_array_equal(raw(k.good()[0][0]), codes << 2 if bits == 4 else codes)


@pytest.mark.parametrize("group", [1, 2])
def test_shift(group):
    k = Kernel(group=group)
    values = k.vector(16)
    for i, v in enumerate(values):
        k(f"mad.lo.u32 {v}, %tid, 100, {i};")
    k.st(values)
    k("tcgen05.wait::st.sync.aligned;")
    k.sync()
    x = k.vector(1)[0]
    k(f"add.u32 {x}, %base, {(32 << 16) + 4};")
    k.elected(f"tcgen05.shift.cta_group::{group}.down [{x}];")
    k.commit_and_wait()
    k.dump(16)
    want = np.arange(128)[:, None] * 100 + np.arange(16)
    want[32:63, 4:12] = want[33:64, 4:12].copy()
    for got in k.good()[0]:
        np.testing.assert_array_equal(got, want)


# ----- allocation -----------------------------------------------------------------------------------------------------


def bare(body: str, group: int = 1, threads: int = 128) -> tuple[str, dict]:
    text = f"""
    .version 8.7
    .target sm_100a
    .address_size 64
    .visible .entry k()
    {{
        .reg .b32 %tid, %warp, %a, %b, %c, %slot;
        .reg .pred %p, %q;
        .shared .align 4 .b8 slots[64];
        mov.u32 %tid, %tid.x;
        shr.u32 %warp, %tid, 5;
        mov.u32 %slot, slots;
        setp.eq.u32 %p, %warp, 0;
        setp.eq.u32 %q, %warp, 1;
        {body}
        ret;
    }}
    """
    return text, {"grid": (group, 1, 1), "block": (threads, 1, 1), "cluster": (group, 1, 1)}


def alloc(slot: int, columns: int, group: int = 1) -> str:
    return f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%slot+{slot}], {columns};"


def dealloc(register: str, columns: int, group: int = 1) -> str:
    return f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {register}, {columns};"


RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
ALLOCATIONS = {
    "two at a time": (
        f"@%p {alloc(0, 256)}\n@%p {alloc(4, 256)}\n@!%p bra E;\nld.shared.b32 %a, [%slot];\nld.shared.b32 %b, [%slot+4];"
        f"xor.b32 %c, %a, %b;\nsetp.ne.u32 %q, %c, 256;\n@%q trap;\n{dealloc('%a', 256)}\n{dealloc('%b', 256)}\nE:",
        set(),
    ),
    "one waits for the other": (
        f"@!%p bra F;\n{alloc(0, 512)}\nld.shared.b32 %a, [%slot];\nbar.sync 1, 64;\n{dealloc('%a', 512)}\n"
        f"F: @!%q bra E;\nbar.sync 1, 64;\n{alloc(4, 64)}\nld.shared.b32 %a, [%slot+4];\n{dealloc('%a', 64)}\nE:",
        set(),
    ),
    "waits for ever": (f"@!%p bra E;\n{alloc(0, 512)}\n{alloc(4, 32)}\nE:", {"deadlock"}),
    "not freed": (f"@%p {alloc(0, 64)}", {"tcgen05"}),
    "not what was allocated": (
        f"@!%p bra E;\n{alloc(0, 64)}\nld.shared.b32 %a, [%slot];\n{dealloc('%a', 32)}\nE:", {"tcgen05"}
    ),
    "freed twice": (
        f"@!%p bra E;\n{alloc(0, 64)}\nld.shared.b32 %a, [%slot];\n{dealloc('%a', 64)}\n{dealloc('%a', 64)}\nE:", {"tcgen05"}
    ),
    "no such size": (f"@%p {alloc(0, 96)}", {"tcgen05"}),
    "grows": (
        f"@!%p bra E;\n{alloc(0, 32)}\n{alloc(4, 64)}\nld.shared.b32 %a, [%slot];\nld.shared.b32 %b, [%slot+4];\n"
        f"{dealloc('%a', 32)}\n{dealloc('%b', 64)}\nE:",
        {"tcgen05"},
    ),
    "behind relinquish": (f"@%p {RELINQUISH}\n@%p {alloc(0, 32)}", {"tcgen05"}),
    "by part of a warp": (f"setp.lt.u32 %p, %tid, 16;\n@%p {alloc(0, 32)}", {"divergence"}),
    "slot read without a barrier": (f"@%p {alloc(0, 32)}\n@%q ld.shared.b32 %a, [%slot];\n@%q add.u32 %a, %a, 1;", {"race"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocation(name):
    body, expected = ALLOCATIONS[name]
    text, launch = bare(body)
    for options in [*SCHEDULES, Options.schedule(3)]:
        found = kinds(run_ptx(text, [], **launch, options=options))
        if expected == {"race"}:  # the slot may be read first
            found -= {"tcgen05", "uninitialised"}
            expected = found and expected
        assert found == expected


def test_allocation_by_a_pair():
    """Both CTAs get the same columns; one alone waits for the other for ever."""
    body = f"@!%p bra E;\n{alloc(0, 128, 2)}\nld.shared.b32 %a, [%slot];\n"
    text, launch = bare(f"{body}{dealloc('%a', 128, 2)}\nE:", 2)
    for options in SCHEDULES:
        assert not run_ptx(text, [], **launch, options=options)
    alone = "mov.u32 %b, %cluster_ctarank;\nsetp.eq.and.u32 %p, %b, 0, %p;\nbarrier.cluster.arrive;\n"
    text, launch = bare(
        f"{alone}@%p {alloc(0, 128, 2)}\nbarrier.cluster.wait;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;", 2
    )
    (finding,) = run_ptx(text, [], **launch)
    assert finding.kind == "deadlock" and "other CTA of the pair" in finding.message


# ----- planted faults -------------------------------------------------------------------------------------------------


def example(wait: bool = True, commit: bool = True, how: str = "", fence: bool = True, **options) -> Kernel:
    """D = A B from shared memory, and its D to the output."""
    a, b = small(128, 16, np.float16), small(16, 16, np.float16)
    k = Kernel(np.concatenate([core_matrices(raw(a)), core_matrices(raw(b))]), **options)
    mma(k, "f16", 0, descriptor(k, 0, 128, 256), descriptor(k, 4096, 128, 256), idesc(128, 16, "f16"), "%no")
    if commit:
        k.elected("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];")
    if wait:
        k.mbarrier_wait(0, how)
    if fence:
        k("tcgen05.fence::after_thread_sync;")
    return k


def commit_by(thread: int) -> Kernel:
    k = example(wait=False, commit=False, fence=False)
    k(f"setp.eq.u32 %leader, %tid, {thread};")
    k.commit_and_wait()
    return k


def finish(k: Kernel) -> Kernel:
    k.dump(16)
    return k


def without(k: Kernel, pattern: str) -> Kernel:
    """The kernel with the lines that match taken out."""
    text = k.text()
    changed = re.sub(rf"(?m)^(\s*\w+:)?.*{pattern}.*$", lambda m: m[1] or "", text)  # labels stay
    assert changed != text
    k.text = lambda: changed
    return k


def overwrite_operand(k: Kernel) -> Kernel:
    """Behind the mma: another warp stores into what it reads."""
    k("setp.eq.u32 %p, %tid, 33;\n@%p st.shared.b32 [%smem+64], %tid;")
    return k


def overwrite_result(k: Kernel, sync: str) -> Kernel:
    """Warp 0 issues another mma into D, which the other warps load."""
    finish(k)
    k(sync)
    mma(k, "f16", 0, "%v1_0", "%v3_0", idesc(128, 16, "f16"), "%no")
    k.commit_and_wait(1)
    return k


def tensor_operand(wait: str = "tcgen05.wait::st.sync.aligned;") -> Kernel:
    a, b = small(128, 16, np.float16), small(16, 16, np.float16)
    k = Kernel(np.concatenate([core_matrices(raw(a)), core_matrices(raw(b))]))
    right = descriptor(k, 4096, 128, 256)
    put_rows(k, raw(a), 64)
    if not wait:
        k.lines = [line.replace("tcgen05.wait::st.sync.aligned;", "") for line in k.lines]
    mma(k, "f16", 0, "[%ta]", right, idesc(128, 16, "f16"), "%no")
    k.commit_and_wait()
    return finish(k)


def two_issuers(sync: bool) -> Kernel:
    """Warp 1 adds to the D of warp 0; their order is enough, nobody waits in between."""
    k = example(wait=False, commit=False, fence=False)
    if sync:
        k("tcgen05.fence::before_thread_sync;\nbar.sync 1;\ntcgen05.fence::after_thread_sync;")
    k("setp.eq.u32 %leader, %tid, 32;")
    mma(k, "f16", 0, "%v1_0", "%v3_0", idesc(128, 16, "f16"), "%yes")
    k.commit_and_wait()
    return finish(k)


def short_wait_ld(use: bool) -> Kernel:
    """What the registers depend on is done without tcgen05.wait::ld, but not what only moves have touched."""
    k = example()
    values = k.ld(16)
    moved = k.vector(1, "b64")[0]
    k(f"mov.b64 {moved}, {{{values[0]}, {values[1]}}};\nmov.b64 {{{values[0]}, {values[1]}}}, {moved};")
    if use:
        k.output(values)
    return k


def st_then_ld(wait: bool) -> Kernel:
    k = Kernel()
    k.st(["%tid"] * 8)
    k("tcgen05.wait::st.sync.aligned;" if wait else "")
    k.dump(8)
    return k


def ld_then_st(wait: bool) -> Kernel:
    k = Kernel()
    k.fill(32)
    k.ld(8)
    k("tcgen05.wait::ld.sync.aligned;" if wait else "")
    k.st(["%tid"] * 8)
    k("tcgen05.wait::st.sync.aligned;\ntcgen05.wait::ld.sync.aligned;")
    return k


def unsynced_free() -> Kernel:
    """Warp 0 frees what the other warps may still load."""
    k = finish(example())
    text = re.sub(r"(?s)bar\.sync 0;(?=\s*@%zero tcgen05\.dealloc)", "", k.text())
    k.text = lambda: text
    return k


FENCES = "tcgen05.fence::before_thread_sync;\nbar.sync 1;\ntcgen05.fence::after_thread_sync;"
FAULTS = {
    "correct": (lambda: finish(example()), set()),
    "result read without a wait": (lambda: finish(example(wait=False)), {"race"}),
    "no commit": (lambda: finish(example(wait=False, commit=False)), {"race"}),
    "commit by another thread": (lambda: finish(commit_by(1)), {"race"}),
    "commit by the thread that issued": (lambda: finish(commit_by(0)), set()),
    "wait without a commit": (lambda: finish(example(commit=False)), {"deadlock"}),
    "relaxed wait": (lambda: finish(example(how=".relaxed.cluster")), set()),
    "relaxed wait without a fence": (lambda: finish(example(how=".relaxed.cluster", fence=False)), {"race"}),
    "acquiring wait without a fence": (lambda: finish(example(fence=False)), set()),
    "no proxy fence": (lambda: without(finish(example()), r"fence\.proxy\.async"), {"proxy"}),
    "no dealloc": (lambda: finish(example(free=False)), {"tcgen05"}),
    "operand overwritten without a wait": (lambda: overwrite_operand(example(False)), {"race"}),
    "operand overwritten": (lambda: overwrite_operand(finish(example())), set()),
    "D overwritten": (lambda: overwrite_result(example(), FENCES), set()),
    "D overwritten without a barrier": (lambda: overwrite_result(example(), ""), {"race"}),
    "A from tensor memory": (tensor_operand, set()),
    "A from tensor memory without wait::st": (lambda: tensor_operand(""), {"race"}),
    "two issuers": (lambda: two_issuers(True), set()),
    "two issuers without a barrier": (lambda: two_issuers(False), {"race"}),
    "freed behind a ld that is used": (lambda: short_wait_ld(True), set()),
    "freed behind a ld without wait::ld": (lambda: short_wait_ld(False), {"race"}),
    "ld behind st": (lambda: st_then_ld(True), set()),
    "ld behind st without wait::st": (lambda: st_then_ld(False), {"race"}),
    "st behind ld": (lambda: ld_then_st(True), set()),
    "st behind ld without wait::ld": (lambda: ld_then_st(False), {"race"}),
    "freed without a barrier": (unsynced_free, {"race"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name):
    make, expected = FAULTS[name]
    union = set()
    for n in range(6):
        findings, _ = make().run(Options.schedule(n))
        found = kinds(findings)
        # Without order, what is read may also not be there yet, or no more.
        extra = {"uninitialised", "out_of_bounds"} if expected == {"race"} else set()
        assert found <= expected | extra and bool(found) == bool(expected), (n, list(map(str, findings)))
        union |= found
        races = [f for f in findings if f.kind == "race"]
        if name == "result read without a wait" and races:
            both = races[0].place.text, races[0].other.text
            assert any("tcgen05.ld" in t for t in both) and any("tcgen05.mma" in t for t in both)
    assert union >= expected


def once(*lines: str, **options) -> set[str]:
    """Kinds of findings of a kernel of some lines."""
    k = Kernel(bytes(8192), **options)
    for line in lines:
        if callable(line):
            line(k)
        else:
            k(line)
    return kinds(k.run()[0])


def simple_mma(form: int, kind: str = "f16", enable: str = "%no", a: int = 0, **rest):
    return lambda k: mma(k, kind, 0, descriptor(k, a, 128, 256), descriptor(k, 4096, 128, 256), form, enable, **rest)


def test_what_is_refused():
    good = idesc(128, 16, "f16")
    commit = lambda k: k.commit_and_wait()  # noqa: E731
    assert once(simple_mma(good), commit) == set()
    assert once(simple_mma(good, enable="%yes"), commit) == {"uninitialised"}  # D was never written
    assert once(simple_mma(idesc(128, 20, "f16")), commit) == set()  # N is in units of 8
    assert once(simple_mma(idesc(32, 16, "f16")), commit) == {"tcgen05"}  # no such M
    assert once(simple_mma(good | 1 << 23), commit) == {"tcgen05"}  # a reserved bit
    assert once(simple_mma(good | 1 << 2), commit) == {"unsupported"}  # sparse
    assert once(simple_mma(good, a=1 << 17), commit) == {"out_of_bounds"}  # beyond shared memory
    assert once(simple_mma(good), commit, columns=32) == set()
    assert once(simple_mma(idesc(128, 64, "f16")), commit, columns=32) == {"out_of_bounds"}
    assert once(lambda k: k.dump(8), columns=32) == {"uninitialised"}
    assert once(lambda k: k.dump(8, 24), lambda k: k.ld(8, 32), columns=32) <= {"uninitialised", "out_of_bounds"}
    assert once(lambda k: k.ld(8, 32), columns=32) == {"out_of_bounds"}
    assert once(lambda k: k.ld(8, lane=32)) == {"tcgen05"}  # the lanes of another warp
    assert once("add.u32 %t, %base, %lane;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%t}, [%t];") == {"tcgen05"}
    assert once("@%leader tcgen05.wait::ld.sync.aligned;") == {"divergence"}
    assert once(simple_mma(good), "@%leader tcgen05.shift.cta_group::2.down [%base];") == {"tcgen05"}
    assert once("add.u32 %t, %base, 0x100000;\n@%leader tcgen05.shift.cta_group::1.down [%t];") == {"tcgen05"}
    many = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], 2;"
    assert once(f"@%leader {many}") == {"multicast"}
    assert once("@%leader tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%smem];") == {
        "barrier"
    }


@pytest.mark.parametrize(
    "line",
    [
        "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%x0, %x1}, %x2, [%base];",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%base], %a, %a, [%t], %x0, %yes;",
        "tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::lastuse [%base], [%t], %a, %x0, %yes;",
        "tcgen05.ld.sync.aligned.32x32b.x3.b32 {%x0, %x1, %x2}, [%base];",
        "tcgen05.something.cta_group::1 [%base];",
    ],
)
def test_unsupported_instructions_are_named(line):
    k = Kernel()
    k(line)
    with pytest.raises(NotImplementedError, match=re.escape(line.split()[0])):
        k.run()


def test_collector_hints_change_nothing():
    a, b = small(128, 16, np.float16), small(16, 16, np.float16)
    k = Kernel(np.concatenate([core_matrices(raw(a)), core_matrices(raw(b))]))
    left, right = descriptor(k, 0, 128, 256), descriptor(k, 4096, 128, 256)
    mma(k, "f16.collector::a::fill", 0, left, right, idesc(128, 16, "f16"), "%no")
    mma(k, "f16.collector::a::lastuse", 16, left, right, idesc(128, 16, "f16"), "%no")
    k.commit_and_wait()
    k.dump(32)
    got, want = k.good()[0][0].view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(got, np.tile(want, 2))


def test_undefined_values_in_tensor_memory():
    """They may be stored and loaded, but not used: neither by a thread nor by an mma."""
    for use in ("", "thread", "mma"):
        k = Kernel(bytes(8192))
        values = k.vector(8)
        moved = k.vector(1, "b64")[0]
        k("\n".join(f"mov.b32 {v}, 0;" for v in values[1:]))
        k(
            f"mov.b64 {moved}, {{{values[1]}, {values[0]}}};\nmov.b64 {{{values[1]}, {values[0]}}}, {moved};"
        )  # 0: never set
        k.st(values)
        k("tcgen05.wait::st.sync.aligned;")
        k.sync()
        loaded = k.ld(8)
        k("tcgen05.wait::ld.sync.aligned;")
        k.output(loaded[use != "thread" :])
        if use == "mma":
            mma(k, "f16", 32, "[%base]", descriptor(k, 4096, 128, 256), idesc(128, 16, "f16"), "%no")
            k.commit_and_wait()
        for options in SCHEDULES:
            assert kinds(k.run(options)[0]) == ({"uninitialised"} if use else set())


def test_cp_async_that_two_arrivals_cover():
    """Whichever arrival is done first: who waits for the first one knows of the first copy."""
    data = RNG.integers(0, 256, 1024, dtype=np.uint8)
    for n in range(8):
        k = Kernel(bytes(1024))
        k(
            "@!%zero bra Z;\nmov.u64 %q, %in;\ncvt.u64.u32 %a, %tid;\nmad.wide.u32 %q, %tid, 4, %q;\nshl.b32 %t, %tid, 2;"
        )
        k("add.u32 %t, %t, %smem;")
        for i in range(2):
            k(f"cp.async.ca.shared.global [%t+{128 * i}], [%q+{128 * i}], 4;")
            k(f"cp.async.mbarrier.arrive.noinc.shared.b64 [%bar+{8 * i}];")
        k("Z:")
        text = None
        for i in range(2):
            k.mbarrier_wait(i)
            k(f"ld.shared.b32 %x{i}, [%smem+{128 * i}];")
        k.output(["%x0", "%x1"])
        text = k.text().replace("[%bar], 1;", "[%bar], 32;", 1).replace("[%bar+8], 1;", "[%bar+8], 32;", 1)
        k.text, k.data = lambda text=text: text, data[None]
        (got,) = k.good(Options.schedule(n))
        np.testing.assert_array_equal(got[0, 0], data.view(np.uint32)[[0, 32]])


def test_relaxed_arrivals_between_fences():
    """Warp 0 stores to its lanes; warp 4 would load them: through relaxed arrive and wait, with and without the fences."""
    for before, after in ((1, 1), (0, 1), (1, 0)):
        k = Kernel()
        k("setp.eq.u32 %p, %warp, 0;\n@!%p bra Z;")
        k.st(["%tid"] * 4)
        k("tcgen05.wait::st.sync.aligned;" + before * "\ntcgen05.fence::before_thread_sync;")
        k("@%leader mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%bar];\nZ:")
        k("setp.eq.u32 %p, %warp, 4;\n@!%p bra Y;")
        k.mbarrier_wait(0, ".relaxed.cluster")
        k(after * "tcgen05.fence::after_thread_sync;")
        k("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%x0, %x1, %x2, %x3}, [%base];\ntcgen05.wait::ld.sync.aligned;")
        k("add.u32 %x0, %x0, %x3;\nY:")
        text = k.text().replace("%i, 128;", "%i, 256;")
        for options in SCHEDULES:
            findings = run_ptx(
                text, [np.zeros(16, np.uint8), np.zeros(64, np.uint32)], block=(256, 1, 1), options=options
            )
            assert kinds(findings) == (set() if before and after else {"race"})


# ----- gather4 and scatter4 -------------------------------------------------------------------------------------------


def rows_source(rows: int = 40) -> tuple[np.ndarray, TensorMap]:
    """A matrix of `rows` x 96 bf16 and its map with boxes of 64 columns of one row."""
    array = small(rows, 96, ml_dtypes.bfloat16).view(np.uint16)
    size = {"dims": (96, rows), "strides": (2, 192), "box": (64, 1), "element_strides": (1, 1)}
    return array, TensorMap(array.ctypes.data, "bf16", **size, swizzle=Swizzle.B128)


def picked(array: np.ndarray, column: int, rows: list[int]) -> np.ndarray:
    """64 columns of some rows, 0 where there are none."""
    padded = np.pad(array, ((0, 1), (0, 64)))
    return padded[[r if 0 <= r < len(array) else -1 for r in rows], column : column + 64]


def gather4(target: int, column: int, rows: list[int], bar: str = "%bar", extra: str = "", mask: str = "") -> str:
    coordinates = ", ".join(map(str, (column, *rows)))
    return (
        f"@%first cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes{extra} "
        f"[%smem+{target}], [%map, {{{coordinates}}}], [{bar}]{mask};"
    )


def expect(bytes_: int, who: str = "%first") -> str:
    return f"@{who} mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {bytes_};"


def dump_shared(k: Kernel, offset: int, n: int) -> None:
    """Words of shared memory, 128 threads x n."""
    values = k.vector(n)
    k(f"mad.lo.u32 %t, %tid, {4 * n}, %smem;")
    for i, v in enumerate(values):
        k(f"ld.shared.b32 {v}, [%t+{offset + 4 * i}];")
    k.output(values)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
def test_gather4(options):
    """Eight rows, some twice or out of bounds, two of the columns beyond the matrix."""
    array, tensor_map = rows_source()
    k = Kernel(bytes(1024), source=(array, tensor_map))
    k(expect(1024))
    k(gather4(0, 34, [3, 39, 3, 17]))
    k(gather4(512, 34, [40, -1, 0, 21]))
    k.mbarrier_wait()
    dump_shared(k, 0, 2)
    want = picked(array, 34, [3, 39, 3, 17, 40, -1, 0, 21])
    np.testing.assert_array_equal(k.good(options)[0].reshape(-1), swizzled(raw(want)).view(np.uint32))


def test_gather4_faults():
    source = rows_source()
    for column, size, wait, expected in (
        (32, 512, True, set()),
        (32, 512, False, {"race"}),
        (32, 500, True, {"barrier"}),
        (32, 768, True, {"deadlock"}),
    ):
        k = Kernel(bytes(1024), source=source)
        k(expect(size))
        k(gather4(0, column, [1, 2, 3, 4]))
        if wait:
            k.mbarrier_wait()
        dump_shared(k, 0, 1)
        union = set().union(*(kinds(k.run(Options.schedule(n))[0]) for n in range(4)))
        assert union == expected or (expected == {"barrier"} and union & {"barrier", "deadlock"})


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
def test_gather4_into_both_ctas(options):
    """.multicast::cluster from CTA 0; each CTA waits for its own mbarrier."""
    array, tensor_map = rows_source()
    k = Kernel(bytes(1024), group=2, source=(array, tensor_map))
    k(expect(512))
    k("setp.eq.and.u32 %first, %rank, 0, %first;")
    k(gather4(0, 0, [5, 4, 3, 2], extra=".multicast::cluster", mask=", 3"))
    k.mbarrier_wait()
    dump_shared(k, 0, 1)
    want = swizzled(raw(np.tile(picked(array, 0, [5, 4, 3, 2]), (2, 1))))[:512].view(np.uint32)
    for got in k.good(options)[0]:
        np.testing.assert_array_equal(got.reshape(-1), want)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
@pytest.mark.parametrize("issuer", [0, 1])
def test_gather4_into_both_ctas_for_the_even_one(issuer, options):
    """.multicast::cluster with cta_group::2: for both destinations the mbarrier is the even CTA's."""
    array, tensor_map = rows_source()
    k = Kernel(bytes(1024), group=2, source=(array, tensor_map))
    k(expect(1024, "%leader"))
    k.sync()
    home = k.vector(1)[0]
    k(f"and.b32 {home}, %bar, 0xfeffffff;\nsetp.eq.and.u32 %first, %rank, {issuer}, %first;")
    k(gather4(0, 0, [9, 8, 7, 6], home, ".cta_group::2.multicast::cluster", ", 3"))
    k("setp.eq.u32 %p, %rank, 0;\n@!%p bra Z;")
    k.mbarrier_wait()
    k("Z:")
    k.sync()
    dump_shared(k, 0, 1)
    want = swizzled(raw(np.tile(picked(array, 0, [9, 8, 7, 6]), (2, 1))))[:512].view(np.uint32)
    for got in k.good(options)[0]:
        np.testing.assert_array_equal(got.reshape(-1), want)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.policy)
def test_gather4_for_a_pair(options):
    """cta_group::2: both CTAs load their halves of B and signal the even CTA's mbarrier, whose thread issues the mma."""
    array, tensor_map = rows_source()
    a = small(256, 16, ml_dtypes.bfloat16)
    rows = RNG.integers(0, 40, (2, 8)).tolist()
    data = [np.concatenate([np.zeros(1024, np.uint8), core_matrices(raw(half))]) for half in (a[:128], a[128:])]
    k = Kernel(np.stack(data), group=2, source=(array, tensor_map))
    k(expect(2048, "%leader"))
    k.sync()
    home = k.vector(1)[0]
    k(f"and.b32 {home}, %bar, 0xfeffffff;")  # in the even CTA
    for r in range(2):
        k(f"setp.eq.u32 %first, %tid, 0;\nsetp.eq.and.u32 %first, %rank, {r}, %first;")
        for part in range(2):
            k(gather4(512 * part, 32, rows[r][4 * part :][:4], home, ".cta_group::2"))
    k("@!%zero bra Z;\nsetp.eq.u32 %p, %rank, 0;\n@!%p bra Z;")
    k.mbarrier_wait()
    k("Z:")
    right = descriptor(k, 0, 16, 1024, 2)
    mma(k, "f16", 0, descriptor(k, 1024, 128, 256), right, idesc(256, 16), "%no")
    k.commit_and_wait(1)
    k.dump(16)
    b = np.concatenate([picked(array, 32, r)[:, :16] for r in rows]).view(ml_dtypes.bfloat16)
    got = k.good(options)[0].view(np.float32).reshape(256, 16)
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)


def test_scatter4():
    array, tensor_map = rows_source()
    before = array.copy()
    rows = small(8, 64, ml_dtypes.bfloat16).view(np.uint16)
    k = Kernel(swizzled(raw(rows)), source=(array, tensor_map))
    for part, targets in enumerate(([7, 0, 39, 12], [40, 20, -2, 21])):  # two of them are nowhere
        coordinates = ", ".join(map(str, (32, *targets)))
        k(
            "@%first cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
            f"[%map, {{{coordinates}}}], [%smem+{512 * part}];"
        )
    k("@%first cp.async.bulk.commit_group;\n@%first cp.async.bulk.wait_group 0;")
    k.dumps.append(1)
    k.good()
    before[[7, 0, 39, 12, 20, 21], 32:] = rows[[0, 1, 2, 3, 5, 7]]
    np.testing.assert_array_equal(array, before)


# ----- cluster launch control -----------------------------------------------------------------------------------------

PERSISTENT = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p_out)
{
    .reg .b32 %tid, %rank, %cta, %first, %more, %phase, %t, %x, %y, %z, %bar, %at;
    .reg .b64 %out, %a, %lo, %hi;
    .reg .b128 %handle;
    .reg .pred %p, %q, %yes;
    .shared .align 16 .b8 answer[16];
    .shared .align 8 .b8 bar[8];
    ld.param.u64 %out, [p_out];
    mov.u32 %tid, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %bar, bar;
    mov.u32 %at, answer;
    mov.u32 %phase, 0;
    setp.eq.u32 %p, %tid, 0;
    setp.eq.and.u32 %q, %rank, 0, %p;
    @%p mbarrier.init.shared.b64 [%bar], 1;
    @%p fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
NEXT:
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
    @%q clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytesMULTICAST.b128 [%at], [%bar];
    mul.wide.u32 %a, %cta, 4;
    add.u64 %a, %a, %out;
    @%p red.global.add.u32 [%a], 1;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %yes, [%bar], %phase;
    @!%yes bra WAIT;
    xor.b32 %phase, %phase, 1;
    ld.shared.b128 %handle, [%at];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %yes, %handle;
    @!%yes bra END;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %x, %handle;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%t, %y, %z, _}, %handle;
    xor.b32 %t, %t, %x;
    or.b32 %t, %t, %y;
    or.b32 %t, %t, %z;
    add.u32 %x, %x, %t;
    add.u32 %cta, %x, %rank;
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    bra NEXT;
END:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}
"""


@pytest.mark.parametrize("size", [1, 2])
def test_cluster_launch_control(size):
    """Clusters that take over others: every CTA's work is done once, whoever does it."""
    text = PERSISTENT.replace("MULTICAST", ".multicast::cluster::all" if size == 2 else "")
    taken = set()
    for n in range(4):
        out = np.zeros(12, np.uint32)
        options = Options.schedule(n)
        findings = run_ptx(text, [out], grid=(12, 1, 1), block=(64, 1, 1), cluster=(size, 1, 1), options=options)
        assert not findings, list(map(str, findings))
        assert out.tolist() == [1] * 12
        taken.add(options.resident)
    assert len(taken) > 1


def test_cluster_launch_control_faults():
    text = PERSISTENT.replace("MULTICAST", "")
    wait = "mbarrier.try_wait.parity.shared::cta.b64 %yes, [%bar], %phase;"
    for change, expected in (
        ((wait, "setp.eq.u32 %yes, 0, 0;"), {"race"}),  # the answer read without waiting for it
        (("fence.proxy.async.shared::cta;", ""), set()),  # what is read generically needs a barrier, not a fence
        (("[%bar], 16;", "[%bar], 32;"), {"deadlock"}),
        (("[%at], [%bar]", "[%at+8], [%bar]"), {"misaligned"}),
    ):
        found = set()
        for n in range(4):
            changed = text.replace(*change)
            assert changed != text
            options = Options.schedule(n)
            found |= kinds(
                run_ptx(changed, [np.zeros(6, np.uint32)], grid=(6, 1, 1), block=(64, 1, 1), options=options)
            )
        assert (found >= expected) if expected else not found, (change, found)


def test_st_bulk():
    k = Kernel(bytes(range(256)) * 4)
    k(
        "bar.sync 0;\nsetp.eq.u32 %p, %tid, 5;\nadd.u32 %t, %smem, 8;\n@%p st.bulk.weak.shared::cta [%t], 504, 0;\nbar.sync 0;"
    )
    dump_shared(k, 0, 2)
    want = np.array(list(range(256)) * 4, np.uint8)
    want[8:512] = 0
    np.testing.assert_array_equal(k.good()[0].reshape(-1), want.view(np.uint32))
    k = Kernel(bytes(1024))
    k("@%first st.bulk.weak.shared::cta [%smem], 512, 0;")
    dump_shared(k, 0, 2)
    assert kinds(k.run()[0]) == {"race"}


# ----- kernels of the CuTe DSL ----------------------------------------------------------------------------------------

S, DEPTH = 128, 128  # rows of Q and K, and their length


class Attention:
    """O = 2^(Q K^T * scale) K: SS into tensor memory, through registers to a bf16 P in tensor memory, TS with K again."""

    @cute.jit
    def __call__(self, q: cute.Tensor, kv: cute.Tensor, o: cute.Tensor, scale: Float32, stream):
        one, major = tcgen05.CtaGroup.ONE, OperandMajorMode
        op = tcgen05.MmaF16BF16Op
        qk = cute.make_tiled_mma(op(BFloat16, Float32, (S, S, 16), one, tcgen05.OperandSource.SMEM, major.K, major.K))
        pv = cute.make_tiled_mma(
            op(BFloat16, Float32, (S, DEPTH, 16), one, tcgen05.OperandSource.TMEM, major.K, major.MN)
        )
        layout_q = sm100.make_smem_layout_a(qk, (S, S, DEPTH), BFloat16, 1)
        layout_k = sm100.make_smem_layout_b(qk, (S, S, DEPTH), BFloat16, 1)
        layout_v = sm100.make_smem_layout_b(pv, (S, DEPTH, S), BFloat16, 1)
        layout_p = sm100.make_smem_layout_a(pv, (S, DEPTH, S), BFloat16, 1)
        load = cpasync.CopyBulkTensorTileG2SOp(one)
        of_stage = lambda layout: cute.select(layout, mode=[0, 1, 2])  # noqa: E731
        tma_q, gq = cute.nvgpu.make_tiled_tma_atom_A(load, q, of_stage(layout_q), (S, S, DEPTH), qk)
        tma_k, gk = cute.nvgpu.make_tiled_tma_atom_B(load, kv, of_stage(layout_k), (S, S, DEPTH), qk)
        self.kernel(qk, pv, tma_q, gq, tma_k, gk, o, layout_q, layout_k, layout_v, layout_p, scale).launch(
            grid=[1, 1, 1], block=[192, 1, 1], cluster=[1, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        tma_q: cute.CopyAtom,
        gq: cute.Tensor,
        tma_k: cute.CopyAtom,
        gk: cute.Tensor,
        o: cute.Tensor,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
        scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Shared:
            bars: cute.struct.MemRange[Int64, 3]
            slot: Int32
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_k)], 1024]

        shared = cutlass.memory.SmemAllocator().allocate(Shared)
        bar, slot = shared.bars.data_ptr(), shared.slot.ptr
        sq = shared.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sk = shared.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sv = cute.make_tensor(cute.recast_ptr(sk.iterator, layout_v.inner), layout_v.outer)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(3):
                    cute.arch.mbarrier_init(bar + i, 1)
            cute.arch.alloc_tmem(256, slot)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=slot)
        thr_qk, thr_pv = qk.get_slice(0), pv.get_slice(0)
        # S in columns 0-127, its first half later P; O in columns 128-255.
        ts = cute.make_tensor(base, thr_qk.make_fragment_C(thr_qk.partition_shape_C((S, S))).layout)
        to = cute.make_tensor(base + 128, thr_pv.make_fragment_C(thr_pv.partition_shape_C((S, DEPTH))).layout)
        p_pointer = cute.recast_ptr(base, dtype=BFloat16)
        tp = pv.make_fragment_A(cute.make_tensor(p_pointer, layout_p.outer))[None, None, None, 0]
        tp = cute.make_tensor(p_pointer, tp.layout)
        rq, rk, rv = qk.make_fragment_A(sq), qk.make_fragment_B(sk), pv.make_fragment_B(sv)
        if warp == 5:
            flat = lambda t: cute.group_modes(t, 0, 3)  # noqa: E731
            one = cute.make_layout(1)
            part = thr_qk.partition_A(cute.local_tile(gq, (S, DEPTH), (0, 0)))
            s_q, g_q = cpasync.tma_partition(tma_q, 0, one, flat(sq), flat(part))
            part = thr_qk.partition_B(cute.local_tile(gk, (S, DEPTH), (0, 0)))
            s_k, g_k = cpasync.tma_partition(tma_k, 0, one, flat(sk), flat(part))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * S * DEPTH * 2)
            cute.copy(tma_q, g_q, s_q[None, 0], tma_bar_ptr=bar)
            cute.copy(tma_k, g_k, s_k[None, 0], tma_bar_ptr=bar)
        if warp == 4:
            cute.arch.mbarrier_wait(bar, 0)
            for i in cutlass.range_constexpr(cute.size(rq, mode=[2])):
                qk.set(tcgen05.Field.ACCUMULATE, i != 0)
                cute.gemm(qk, ts, rq[None, None, i, 0], rk[None, None, i, 0], ts)
            with cute.arch.elect_one():
                tcgen05.commit(bar + 1)
        if warp < 4:
            cute.arch.mbarrier_wait(bar + 1, 0)
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(32)), Float32)
            copy = tcgen05.make_tmem_copy(atom, ts[(None, None), 0, 0])
            mine = copy.get_slice(tid)
            r = cute.make_rmem_tensor(mine.partition_D(cute.make_identity_tensor((S, S))).shape, Float32)
            cute.copy(copy, mine.partition_S(ts[(None, None), 0, 0]), r)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(cute.size(r)):
                r[i] = cute.math.exp2(r[i] * scale, fastmath=True)
            p = cute.make_rmem_tensor(cute.make_layout(cute.size(r)), BFloat16)
            p.store(cute.make_tensor(r.iterator, p.layout).load().to(BFloat16))
            columns = cute.make_tensor(base, cute.make_layout((S, S // 2), stride=(1 << 16, 1)))  # pairs of P
            atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(32)), Float32)
            copy = tcgen05.make_tmem_copy(atom, columns)
            mine = copy.get_slice(tid)
            shape = mine.partition_S(cute.make_identity_tensor((S, S // 2))).shape
            pairs = cute.make_tensor(cute.recast_ptr(p.iterator, dtype=Float32), shape)
            cute.copy(copy, pairs, mine.partition_D(columns))
            cute.arch.fence_view_async_tmem_store()
        cute.arch.sync_threads()
        if warp == 4:
            for i in cutlass.range_constexpr(cute.size(rv, mode=[2])):
                pv.set(tcgen05.Field.ACCUMULATE, i != 0)
                cute.gemm(pv, to, tp[None, None, i], rv[None, None, i, 0], to)
            with cute.arch.elect_one():
                tcgen05.commit(bar + 2)
        if warp < 4:
            cute.arch.mbarrier_wait(bar + 2, 0)
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(64)), Float32)
            copy = tcgen05.make_tmem_copy(atom, to[(None, None), 0, 0])
            mine = copy.get_slice(tid)
            go = mine.partition_D(o)
            ro = cute.make_rmem_tensor(go.shape, Float32)
            cute.copy(copy, mine.partition_S(to[(None, None), 0, 0]), ro)
            cute.arch.fence_view_async_tmem_load()
            cute.autovec_copy(ro, go)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(base, 256)


M, N, K, STEP = 256, 64, 192, 64  # of the matrices; a stage has STEP of K


class PairGemm:
    """C = A B^T by a pair of CTAs with tcgen05.mma.cta_group::2: each loads its halves, a ring of two stages, the even one
    issues."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        two = tcgen05.CtaGroup.TWO
        op = tcgen05.MmaF16BF16Op(
            BFloat16, Float32, (M, N, 16), two, tcgen05.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
        )
        mma = cute.make_tiled_mma(op)
        layout_a = sm100.make_smem_layout_a(mma, (M, N, STEP), BFloat16, 2)
        layout_b = sm100.make_smem_layout_b(mma, (M, N, STEP), BFloat16, 2)
        load = cpasync.CopyBulkTensorTileG2SOp(two)
        of_stage = lambda layout: cute.select(layout, mode=[0, 1, 2])  # noqa: E731
        pair = (2, 1, 1, 1)
        tma_a, ga = cute.nvgpu.make_tiled_tma_atom_A(load, a, of_stage(layout_a), (M, N, STEP), mma, pair)
        tma_b, gb = cute.nvgpu.make_tiled_tma_atom_B(load, b, of_stage(layout_b), (M, N, STEP), mma, pair)
        self.kernel(mma, tma_a, ga, tma_b, gb, c, layout_a, layout_b).launch(
            grid=[2, 1, 1], block=[192, 1, 1], cluster=[2, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        ga: cute.Tensor,
        tma_b: cute.CopyAtom,
        gb: cute.Tensor,
        c: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, 2]
            empty: cute.struct.MemRange[Int64, 2]
            done: Int64
            slot: Int32
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_b)], 1024]

        shared = cutlass.memory.SmemAllocator().allocate(Shared)
        full, empty, done = shared.full.data_ptr(), shared.empty.data_ptr(), shared.done.ptr
        sa = shared.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        sb = shared.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 1)
                cute.arch.mbarrier_init(done, 1)
            cute.arch.alloc_tmem(64, shared.slot.ptr, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        base = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=shared.slot.ptr)
        mine = mma.get_slice(rank)
        acc = cute.make_tensor(base, mma.make_fragment_C(mma.partition_shape_C((M, N))).layout)
        ra, rb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        if warp == 5:
            flat = lambda t: cute.group_modes(t, 0, 3)  # noqa: E731
            one = cute.make_layout(1)
            part = mine.partition_A(cute.local_tile(ga, (M, STEP), (0, None)))
            s_a, g_a = cpasync.tma_partition(tma_a, 0, one, flat(sa), flat(part))
            part = mine.partition_B(cute.local_tile(gb, (N, STEP), (0, None)))
            s_b, g_b = cpasync.tma_partition(tma_b, 0, one, flat(sb), flat(part))
            for i in cutlass.range_constexpr(K // STEP):
                if const_expr(i >= 2):
                    cute.arch.mbarrier_wait(empty + i % 2, 0)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + i % 2, (M + N) * STEP * 2)
                cute.copy(tma_a, g_a[None, i], s_a[None, i % 2], tma_bar_ptr=full + i % 2)
                cute.copy(tma_b, g_b[None, i], s_b[None, i % 2], tma_bar_ptr=full + i % 2)
        if warp == 4 and rank == 0:
            for i in cutlass.range_constexpr(K // STEP):
                cute.arch.mbarrier_wait(full + i % 2, i // 2)
                for j in cutlass.range_constexpr(STEP // 16):
                    mma.set(tcgen05.Field.ACCUMULATE, i + j != 0)
                    cute.gemm(mma, acc, ra[None, None, j, i % 2], rb[None, None, j, i % 2], acc)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + i % 2, 3, tcgen05.CtaGroup.TWO)
            with cute.arch.elect_one():
                tcgen05.commit(done, 3, tcgen05.CtaGroup.TWO)
        if warp < 4:
            cute.arch.mbarrier_wait(done, 0)
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(64)), Float32)
            copy = tcgen05.make_tmem_copy(atom, acc[(None, None), 0, 0])
            thread = copy.get_slice(tid)
            gc = thread.partition_D(cute.local_tile(c, (M // 2, N), (rank, 0)))
            rc = cute.make_rmem_tensor(gc.shape, Float32)
            cute.copy(copy, thread.partition_S(acc[(None, None), 0, 0]), rc)
            cute.arch.fence_view_async_tmem_load()
            cute.autovec_copy(rc, gc)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.dealloc_tmem(base, 64, is_two_cta=True)


def emulated(make, *shapes, extra=()) -> Emulated:
    """A DSL kernel, compiled for the emulator. shapes: (type, rows, columns) of its arguments, row-major."""
    module = ModuleType(type(make).__name__)

    def compile_(problem, config, arch):
        fakes = [jit.fake_tensor(t, (r, c), stride=(c, 1), align=16) for t, r, c in shapes]
        return jit.build(make, *fakes, *extra, jit.fake_stream(), arch=arch)

    module.compile = compile_
    compiled = compile_for_emulation(module, Problem(op="sparse_decode", h_q=64), None, "sm_100a")
    return Emulated(compiled, "sm_100a")


@pytest.mark.compile
def test_attention_of_the_dsl():
    kernel = emulated(Attention(), (BFloat16, S, DEPTH), (BFloat16, S, DEPTH), (Float32, S, DEPTH), extra=(Float32(1),))
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(S, DEPTH, generator=generator).bfloat16() for _ in range(2))
    p = torch.exp2(q.float() @ k.float().T * 0.05).bfloat16().float()
    for n in range(5):
        o = torch.full((S, DEPTH), torch.nan)
        with session(arch="sm_100a", options=Options.schedule(n)):
            kernel(q, k, o, 0.05)
        torch.testing.assert_close(o, p @ k.float(), rtol=2e-3, atol=2e-2)


@pytest.mark.compile
def test_gemm_of_a_pair_of_the_dsl():
    kernel = emulated(PairGemm(), (BFloat16, M, K), (BFloat16, N, K), (Float32, M, N))
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-3, 4, (rows, K), generator=generator).bfloat16() for rows in (M, N))
    for n in range(5):
        c = torch.full((M, N), torch.nan)
        with session(arch="sm_100a", options=Options.schedule(n)):
            kernel(a, b, c)
        assert torch.equal(c, a.float() @ b.float().T)
