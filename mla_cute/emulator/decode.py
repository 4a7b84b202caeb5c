"""A parsed kernel -> `Program`: one closure an instruction. The handlers register themselves under opcode prefixes.

    @op("mbarrier.arrive")
    def arrive(ins: Instruction, d: Decoder) -> Callable[[Warp], Wait | None]: ...

Immediates and special registers get numbers behind the kernel's registers, so that every operand is an index into
`warp.regs`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np

from . import hazards, machine, ptx
from .machine import LANES, RANK_SHIFT, RESERVED, UNDEFINED, Fault, Wait, Warp
from .ptx import Const, Instruction, Kernel, Memory, Module, Not, Reg, Special, Symbol, Vector
from .taint import Tainted, plain

Closure = Callable[[Warp], "Wait | None"]
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FILES = ("ops_scalar", "ops_memory", "ops_sync", "ops_tma", "ops_mma", "ops_wgmma", "ops_tcgen05")
TARGETS = {"wgmma": "sm_90a", "tcgen05": "sm_10"}  # instructions that one architecture alone has

_handlers: dict[str, Callable[[Instruction, Decoder], Closure]] = {}


class UnsupportedInstruction(NotImplementedError):
    """The emulator does not know an instruction; names it and its PTX line."""


def op(*prefixes: str):
    """Register a handler for opcodes that begin with one of `prefixes`; the longest prefix wins."""

    def register(make):
        for prefix in prefixes:
            _handlers[prefix] = make
        return make

    return register


class Decoder:
    """What handlers need to know of the kernel while they make their closures."""

    def __init__(self, module: Module, kernel: Kernel):
        self.module, self.kernel = module, kernel
        self.pool: list[tuple[str, object]] = []  # ("const", array) or ("special", name), behind the registers
        self._known: dict[tuple, int] = {}
        self.before: dict[int, list[Callable[[Warp], None]]] = {}  # instruction -> what to do in front of it
        self.shared: dict[str, int] = {}  # name -> offset
        self.locals: dict[str, int] = {}
        at = RESERVED
        variables = {**module.variables, **kernel.variables}
        for v in variables.values():
            if v.space == "shared" and not v.extern:
                at = -(-at // v.align) * v.align
                self.shared[v.name] = at
                at += v.size
        for v in variables.values():
            if v.space == "shared" and v.extern:
                at = -(-at // v.align) * v.align
        self.dynamic_offset = at
        self.shared |= {v.name: at for v in variables.values() if v.space == "shared" and v.extern}
        self.local_bytes = 0
        for v in kernel.variables.values():
            if v.space == "local":
                self.local_bytes = -(-self.local_bytes // v.align) * v.align
                self.locals[v.name] = self.local_bytes
                self.local_bytes += v.size
        self.constants: dict[str, np.ndarray] = {
            v.name: np.frombuffer(bytearray(v.data or bytes(v.size)), np.uint8)
            for v in variables.values()
            if v.space in ("global", "const")
        }
        self.params: dict[str, tuple[int, int]] = {}  # name -> number and offset in the parameter space
        offset = 0
        for i, p in enumerate(kernel.params):
            offset = -(-offset // p.align) * p.align
            self.params[p.name] = i, offset
            offset += p.size

    # --- operands

    def reg(self, operand, kind: str = "b32") -> int:
        """The index of a source operand, read as a value of PTX type `kind`."""
        if isinstance(operand, Reg):
            return operand.index
        if isinstance(operand, Const):
            return self._pooled(("const", operand, kind), lambda: _constant(operand, kind))
        if isinstance(operand, Special):
            return self._pooled(("special", operand.name, kind), None)
        if isinstance(operand, Symbol):
            return self._pooled(("symbol", operand.name, kind), None)
        raise ValueError(f"cannot read operand {operand}")

    def _pooled(self, key: tuple, value) -> int:
        if key not in self._known:
            self._known[key] = len(self.kernel.registers) + len(self.pool)
            self.pool.append((key[0], value() if value else key[1:]))
        return self._known[key]

    def carry(self) -> int:
        """The index of the carry flag, a bool [32]."""
        return self._pooled(("const", "carry"), lambda: np.zeros(LANES, bool))

    def regs(self, operand, kind: str = "b32") -> list[int]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.reg(item, kind) for item in items]

    def out(self, operand) -> int:
        """The index of a destination; -1 for `_`."""
        if isinstance(operand, Reg):
            return operand.index
        if isinstance(operand, Symbol) and operand.name == "_":
            return -1
        if isinstance(operand, Special | Symbol):
            raise ValueError(f"{operand.name} is no declared register")
        raise ValueError(f"cannot write operand {operand}")

    def outs(self, operand) -> list[int]:
        return [self.out(item) for item in (operand.items if isinstance(operand, Vector) else (operand,))]

    def address(self, m: Memory) -> Callable[[Warp], np.ndarray]:
        """closure(warp) -> int64 [32], the address in the instruction's state space."""
        offset = m.offset
        if m.base is None:
            fixed = np.full(LANES, offset, np.int64)
            return lambda w: fixed
        i = self.reg(m.base, "b64")
        if offset:
            return lambda w: w.regs[i].astype(np.int64) + offset
        return lambda w: w.regs[i].astype(np.int64)

    def uniform(self, operand, kind: str = "b32") -> Callable[[Warp], int]:
        """closure(warp) -> the value in the first active lane, as an unsigned integer."""
        if isinstance(operand, Const):
            value = int(_constant(operand, kind)[0])
            return lambda w: value
        if isinstance(operand, Memory):
            at = self.address(operand)
            return lambda w: int(at(w)[w.first()])
        i = self.reg(operand, kind)
        return lambda w: int(w.regs[i][w.first()])

    def uniform_each(self, operand, kind: str = "b32") -> Callable[[Warp, int], int]:
        """closure(warp, lane) -> the value in that lane, as an unsigned integer."""
        if isinstance(operand, Const):
            value = int(_constant(operand, kind)[0])
            return lambda w, lane: value
        if isinstance(operand, Memory):
            if operand.base is None:
                return lambda w, lane: operand.offset
            i, offset = self.reg(operand.base, "b64"), operand.offset
            return lambda w, lane: int(w.regs[i][lane]) + offset
        i = self.reg(operand, kind)
        return lambda w, lane: int(w.regs[i][lane])

    def predicate(self, operand) -> Callable[[Warp], np.ndarray]:
        """closure(warp) -> bool [32], of a predicate operand that may be negated or constant."""
        if isinstance(operand, Not):
            i = operand.operand.index
            return lambda w: ~w.regs[i]
        i = self.reg(operand, "pred")
        return lambda w: w.regs[i]


def _constant(c: Const, kind: str) -> np.ndarray:
    size = ptx.TYPE_BYTES[kind]
    value = c.value
    if kind == "pred":
        return np.full(LANES, bool(value))
    if c.float_bits == 64 and kind in ("f32", "b32") and size == 4:
        value = int(np.array(value, np.uint64).view(np.float64).astype(np.float32).view(np.uint32))
    elif c.float_bits == 32 and size == 8:
        value = int(np.array(value, np.uint32).view(np.float32).astype(np.float64).view(np.uint64))
    elif not c.float_bits and kind in ("f32", "f64"):
        value = int(np.array(float(value), f"f{size}").view(UINT[size]))
    return np.full(LANES, value & (256**size - 1), UINT[size])


class Program:
    """A kernel that can be run: its closures, and what its warps start with."""

    def __init__(self, module: Module, name: str):
        for file in FILES:
            importlib.import_module(f".{file}", __package__)
        self.module, self.kernel = module, module.kernels[name]
        self.decoder = d = Decoder(module, self.kernel)
        plan = hazards.plan(self.kernel)
        self.code = [decode(ins, d, pc, plan) for pc, ins in enumerate(self.kernel.instructions)]
        for pc, hooks in d.before.items():
            self.code[pc] = preceded(self.code[pc], hooks)
        self.code.append(_end)
        self.dynamic_offset = d.dynamic_offset
        dims = self.kernel.directives.get("reqnctapercluster") or ()
        self.cluster = (*dims, 1, 1, 1)[:3]
        # Only then may the launch behind this one start before it has ended.
        self.triggers_early = any(i.opcode.startswith("griddepcontrol.launch") for i in self.kernel.instructions)

    def registers_of(self, warp: Warp) -> list:
        """What the registers, constants and special registers of a warp hold at the start."""
        pool = [value if kind == "const" else special(kind, value, warp, self) for kind, value in self.decoder.pool]
        return [UNDEFINED] * len(self.kernel.registers) + pool


def _end(w: Warp) -> None:
    w.exit()


def decode(ins: Instruction, d: Decoder, pc: int, plan: hazards.Plan) -> Closure:
    make = find(ins)
    family, target = ins.parts[0], d.module.target
    if not target.startswith(TARGETS.get(family, "")):
        raise UnsupportedInstruction(f"PTX line {ins.line}: {ins.opcode} does not exist on {target}, the PTX's target")
    try:
        body = make(ins, d)
    except UnsupportedInstruction:
        raise
    except (ValueError, KeyError, IndexError, AttributeError, NotImplementedError) as e:
        raise UnsupportedInstruction(f"PTX line {ins.line}: {ins.text}: {type(e).__name__}: {e}") from e
    if pc in plan.loads:
        from .ops_memory import load_accesses

        body = hazards.watched(body, pc, plan, load_accesses(ins, d))
    else:
        body = hazards.watched(body, pc, plan, None)
    return body if ins.guard is None else guarded(body, ins.guard.index, ins.guard_not)


def preceded(body: Closure, hooks: list[Callable[[Warp], None]]) -> Closure:
    def run(w: Warp):
        for hook in hooks:
            hook(w)
        return body(w)

    return run


def find(ins: Instruction):
    parts = ins.parts
    for n in range(len(parts), 0, -1):
        make = _handlers.get(".".join(parts[:n]))
        if make:
            return make
    raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode} ({ins.text[:120]})")


def guard_lanes(w: Warp, p: int, negated: bool, use: str = "a predicate") -> np.ndarray:
    """bool [32]: the active lanes whose predicate holds."""
    lanes = ~w.regs[p] if negated else w.regs[p]
    if type(lanes) is Tainted:
        w.need_defined(lanes, use)
        lanes = plain(lanes)
    return lanes if w.full else lanes & w.mask


def guarded(body: Closure, p: int, negated: bool) -> Closure:
    """The instruction for the active lanes whose predicate holds."""
    if getattr(body, "takes_guard", False):  # a branch: it splits the warp itself
        return body(p, negated)

    def run(w: Warp):
        lanes = guard_lanes(w, p, negated)
        if w.full and lanes.all():
            return body(w)
        if not lanes.any():
            return None
        mask, full = w.mask, w.full
        w.mask, w.full = lanes, False
        wait = body(w)
        if w.mask is lanes:
            w.mask, w.full = mask, full
        if wait is not None:  # what it does later is for these lanes too
            then, give_up = wait.then, wait.give_up
            wait.then = then and (lambda w: with_lanes(w, lanes, then))
            wait.give_up = give_up and (lambda w: with_lanes(w, lanes, give_up))
        return wait

    return run


def with_lanes(w: Warp, lanes: np.ndarray, do):
    """do(warp) for some of the active lanes."""
    mask, full = w.mask, w.full
    w.mask, w.full = lanes, False
    result = do(w)
    w.mask, w.full = mask, full
    return result


def special(kind: str, value, w: Warp, program: Program) -> np.ndarray:
    """A special register, or the address of a symbol, as the warp sees it."""
    name, ptx_type = value
    dtype = UINT[ptx.TYPE_BYTES[ptx_type]]
    d = program.decoder
    if kind == "symbol":
        if name in d.shared:
            return np.full(LANES, (w.cta.rank << RANK_SHIFT) + d.shared[name], dtype)
        if name in d.params:
            return np.full(LANES, machine.PARAM_WINDOW + d.params[name][1], np.uint64)
        if name in d.constants:
            return np.full(LANES, d.constants[name].ctypes.data, np.uint64)
        if name in d.locals:
            return np.full(LANES, d.locals[name], np.uint64)
        raise Fault("unsupported", f"{name} is not declared: no register, variable or parameter has this name")
    launch, cta = w.machine.launch, w.cta
    thread = np.arange(LANES) + w.index * LANES
    bx, by, _ = launch.block
    axis = name[-1]
    base = name[: name.rfind(".")] if "." in name else name
    number = "xyz".find(axis)
    if number < 0 and "." in name:
        raise Fault("unsupported", f"{name} is no declared register, and no special register that the emulator knows")
    size = w.machine.cluster_dims
    if base == "%tid":
        value = (thread % bx, thread // bx % by, thread // (bx * by))[number]
    elif base == "%ntid":
        value = launch.block[number]
    elif base == "%ctaid":
        value = cta.index[number]
    elif base == "%nctaid":
        value = launch.grid[number]
    elif base == "%clusterid":
        value = cta.index[number] // size[number]
    elif base == "%nclusterid":
        value = launch.grid[number] // size[number]
    elif base == "%cluster_ctaid":
        value = cta.index[number] % size[number]
    elif base == "%cluster_nctaid":
        value = size[number]
    elif name == "%cluster_ctarank":
        value = cta.rank
    elif name == "%cluster_nctarank":
        value = size[0] * size[1] * size[2]
    elif name == "%laneid":
        value = np.arange(LANES)
    elif name == "%warpid":
        value = w.index
    elif name == "%nwarpid":
        value = cta.cluster.warps_per_cta
    elif name == "%smid":
        value = cta.index[0] % launch.num_sms
    elif name == "%nsmid":
        value = launch.num_sms
    elif name == "%gridid":
        value = 0
    elif name.startswith("%lanemask_"):
        bits = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
        value = {
            "eq": bits,
            "lt": bits - np.uint64(1),
            "le": bits * np.uint64(2) - np.uint64(1),
            "gt": np.uint64(2**32) - bits * np.uint64(2),
            "ge": np.uint64(2**32) - bits,
        }[name[10:]]
    elif name in ("%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size"):
        value = launch.smem_bytes if name.startswith("%d") else cta.shared.size
    elif name == "%is_explicit_cluster":
        value = size != (1, 1, 1)
    elif name in ("%clock", "%clock64", "%globaltimer", "%clock_hi", "%globaltimer_lo", "%globaltimer_hi"):
        value = w.machine.time  # read once at the start: enough for what kernels measure here
    else:
        raise Fault("unsupported", f"{name} is no declared register, and no special register that the emulator knows")
    dtype = np.bool_ if ptx_type == "pred" else dtype
    return np.broadcast_to(np.asarray(value), LANES).astype(dtype)
