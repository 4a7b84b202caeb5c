"""Arithmetic, moves, votes, shuffles and control flow."""

from __future__ import annotations

import numpy as np

from . import numeric
from .decode import UINT, Closure, Decoder, UnsupportedInstruction, guard_lanes, op
from .machine import (
    ALL_LANES,
    LANES,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    UNDEFINED,
    Fault,
    Missing,
    Warp,
    pieces_of,
)
from .ptx import TYPE_BYTES, Instruction, Label, Not, Pair, Reg, Special, Vector
from .taint import plain, tainted

LANE = np.arange(LANES)
ALU = [
    "abs", "add", "addc", "and", "bfe", "bfi", "bfind", "bmsk", "brev", "clz", "cnot", "copysign", "cos", "cvt", "div",
    "dp2a", "dp4a", "ex2", "fma", "fns", "lg2", "lop3", "mad", "mad24", "madc", "max", "min", "mul", "mul24", "neg",
    "not", "or", "popc", "prmt", "rcp", "rem", "rsqrt", "sad", "selp", "set", "setp", "shf", "shl", "shr", "sin",
    "slct", "sqrt", "sub", "subc", "szext", "tanh", "testp", "xor",
]  # fmt: skip


@op(*ALU)
def arithmetic(ins: Instruction, d: Decoder) -> Closure:
    spec = numeric.scalar(ins.opcode)
    if spec is None:
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode} ({ins.text})")
    operands = [item for o in ins.operands[1:] for item in (o.items if isinstance(o, Vector) else (o,))]
    kinds = spec.sources + spec.optional
    carries_in = kinds[-1] == "cc"
    if carries_in:
        operands.append(None)
    if not len(spec.sources) <= len(operands) <= len(kinds):
        raise ValueError(f"{len(operands)} source operands, {len(spec.sources)} expected")
    sources = list(zip(operands, kinds))
    idx = [d.carry() if kind == "cc" else d.reg(o.operand if isinstance(o, Not) else o, kind) for o, kind in sources]
    negated = [isinstance(o, Not) for o in operands]
    target = ins.operands[0]
    outs = [d.out(o) for o in ((target.first, target.second) if isinstance(target, Pair) else (target,))]
    if "cc" in spec.results:
        outs.append(d.carry())
    adapt = [_adapted(o, kind) for o, kind in sources]
    widen = _widened(target, spec.result)
    if len(outs) > 1 or any(negated) or any(adapt) or widen or len(idx) > 3:
        fn_all = spec.fn_all

        def run_any(w: Warp):
            values = [w.regs[i] if k == "cc" else _garbage(w.regs[i], numeric.dtype_of(k)) for i, (_, k) in zip(idx, sources)]
            values = [~v if n else v for v, n in zip(values, negated)]
            values = [f(v) if f else v for v, f in zip(values, adapt)]
            for out, value in zip(outs, fn_all(*values)):
                if out >= 0:
                    w.write(out, widen(value) if widen else value)

        return run_any
    return _plain(spec.fn, idx, outs[0], [numeric.dtype_of(kind) for kind in kinds])


def _adapted(operand, kind: str):
    """A source register wider than the type that is read: its low bits. None where nothing is to be done."""
    if not isinstance(operand, Reg) or kind in ("pred", "cc"):
        return None
    dtype = numeric.dtype_of(kind)
    return None if TYPE_BYTES[operand.type] == dtype.itemsize else lambda v: v.astype(dtype)


def _widened(operand, kind: str):
    """A destination register wider than the result: its sign, or zeros, above it."""
    if not isinstance(operand, Reg) or kind in ("pred", "cc"):
        return None
    size, width = numeric.dtype_of(kind).itemsize, TYPE_BYTES[operand.type]
    if size == width:
        return None
    if kind[0] == "s":
        return lambda v: v.view(f"i{size}").astype(f"i{width}").view(UINT[width])
    return lambda v: v.astype(UINT[width])


def _plain(fn, idx: list[int], out: int, dtypes: list) -> Closure:
    """Of one to three registers; the hot path."""

    def again(r: list):
        """The result when it was a fault: one that may not be used, if it is registers without a value that are missing."""
        return fn(*[_garbage(r[i], dtype) for i, dtype in zip(idx, dtypes)])

    if len(idx) == 1:
        (a,) = idx

        def run(w: Warp):
            r = w.regs
            try:
                v = fn(r[a])
            except Fault:
                v = again(r)
            r[out] = v if w.full else w.merged(r[out], v)
    elif len(idx) == 2:
        a, b = idx

        def run(w: Warp):
            r = w.regs
            try:
                v = fn(r[a], r[b])
            except Fault:
                v = again(r)
            r[out] = v if w.full else w.merged(r[out], v)
    else:
        a, b, c = idx

        def run(w: Warp):
            r = w.regs
            try:
                v = fn(r[a], r[b], r[c])
            except Fault:
                v = again(r)
            r[out] = v if w.full else w.merged(r[out], v)

    return run


class Packed(Missing):
    """Registers packed into one, some of them without a value: compilers do so."""

    def __init__(self, parts: list):
        super().__init__(UNDEFINED.kind, UNDEFINED.message)
        self.parts = parts


def _garbage(value, dtype):
    """A register without a value as one that depends on what nobody wrote: it may be computed with, but not be used."""
    if dtype is None:  # 128 bits
        return value
    if value is UNDEFINED:
        return tainted(np.zeros(LANES, dtype), np.ones(LANES, bool), "a register that nothing was written to")
    if type(value) is Packed:
        part = f"u{np.dtype(dtype).itemsize // len(value.parts)}"
        return np.stack([_garbage(p, part) for p in value.parts], axis=1).view(dtype)[:, 0]
    return value


@op("mov")
def mov(ins: Instruction, d: Decoder) -> Closure:
    target, source = ins.operands
    kind = ins.parts[-1]
    if isinstance(source, Vector):  # pack: the first item is the lowest
        items, out = d.regs(source, {2: "b8", 4: "b16", 8: "b32", 16: "b64"}[TYPE_BYTES[kind]]), d.out(target)
        if len(items) == 4:
            items = d.regs(source, {4: "b8", 8: "b16", 16: "b32"}[TYPE_BYTES[kind]])

        item_bytes = TYPE_BYTES[kind] // len(items)

        def pack(w: Warp):
            if w.full and any(w.regs[i] is UNDEFINED for i in items):
                w.regs[out] = Packed([w.regs[i] for i in items])
                return
            try:
                parts = np.stack([w.regs[i] if w.full else _garbage(w.regs[i], f"u{item_bytes}") for i in items], axis=1)
            except Fault:
                if not w.full or kind == "b128":
                    raise
                return w.rename(out, [p for i in items for p in pieces_of(w.regs[i], i, item_bytes)])
            w.write(out, parts.view(np.uint64) if kind == "b128" else parts.view(UINT[TYPE_BYTES[kind]])[:, 0])
            if w.wgmma is not None:
                w.wgmma.note_move([w.regs[i] for i in items], [w.regs[out]])

        return pack
    if isinstance(target, Vector):  # unpack
        outs, i = d.outs(target), d.reg(source, kind)
        width = UINT[TYPE_BYTES[kind] // len(outs)]

        def unpack(w: Warp):
            if type(w.regs[i]) is Packed and w.full and len(w.regs[i].parts) == len(outs):
                for out, part in zip(outs, w.regs[i].parts):
                    if out >= 0:
                        w.regs[out] = part
                return
            if w.regs[i] is UNDEFINED and w.full:
                for out in outs:
                    if out >= 0:
                        w.regs[out] = UNDEFINED
                return
            if isinstance(w.regs[i], Missing) and w.full and type(w.regs[i]) is not Packed:
                pieces, n = pieces_of(w.regs[i], i, TYPE_BYTES[kind]), np.dtype(width).itemsize // 2
                for k, out in enumerate(outs):
                    if out >= 0:
                        w.rename(out, pieces[k * n : k * n + n])
                return
            parts = _garbage(w.regs[i], UINT.get(TYPE_BYTES[kind])).reshape(LANES, -1).view(width)
            for n, out in enumerate(outs):
                if out >= 0:
                    w.write(out, parts[:, n].copy())  # keeps a taint
            if w.wgmma is not None:
                w.wgmma.note_move([w.regs[i]], [w.regs[o] for o in outs if o >= 0])

        return unpack
    if isinstance(source, Special) and source.name.startswith(("%clock", "%globaltimer")):
        return _clock(source.name, kind, d.out(target))
    i, out = d.reg(source, kind), d.out(target)
    dtype = np.dtype(bool) if kind == "pred" else None if kind == "b128" else np.dtype(UINT[TYPE_BYTES[kind]])

    def move(w: Warp):
        v = w.regs[i]
        if (v is UNDEFINED or type(v) is Packed) and w.full:  # a copy is no use of it
            w.regs[out] = v
            return
        if isinstance(v, Missing) and w.full and dtype is not None:
            return w.rename(out, pieces_of(v, i, dtype.itemsize))
        if v.dtype != dtype and dtype is not None:
            v = v.astype(dtype)
        w.regs[out] = v if w.full else w.merged(w.regs[out], v)

    return move


def _clock(name: str, kind: str, out: int) -> Closure:
    """Time goes by the instructions that have run in the launch."""
    dtype, shift = UINT[TYPE_BYTES[kind]], 32 if name.endswith("_hi") else 0
    mask = (1 << 8 * TYPE_BYTES[kind]) - 1

    def run(w: Warp):
        time = (w.machine.time + sum(x.count for x in w.cta.warps)) >> shift
        w.write(out, np.full(LANES, time & mask, dtype))

    return run


@op("cvta")
def cvta(ins: Instruction, d: Decoder) -> Closure:
    """Between the address of a state space and the generic address."""
    to = ins.parts[1] == "to"
    space = ins.parts[2 if to else 1].partition("::")[0]
    # Parameter addresses are generic ones already.
    window = {"global": 0, "const": 0, "param": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW}[space]
    i, out = d.reg(ins.operands[1], "b64"), d.out(ins.operands[0])
    window = np.uint64((-window if to else window) & (2**64 - 1))

    def run(w: Warp):
        w.write(out, w.regs[i].astype(np.uint64) + window)

    return run


@op("isspacep")
def isspacep(ins: Instruction, d: Decoder) -> Closure:
    space, i, out = ins.parts[1].partition("::")[0], d.reg(ins.operands[1], "b64"), d.out(ins.operands[0])
    low, high = {
        "global": (0, SHARED_WINDOW),
        "const": (0, 0),
        "shared": (SHARED_WINDOW, PARAM_WINDOW),
        "param": (PARAM_WINDOW, LOCAL_WINDOW),
        "local": (LOCAL_WINDOW, 2**64 - 1),
    }[space]
    return lambda w: w.write(out, (w.regs[i] >= np.uint64(low)) & (w.regs[i] < np.uint64(high)))


# ----- control flow ---------------------------------------------------------------------------------------------------


@op("bra")
def bra(ins: Instruction, d: Decoder) -> Closure:
    label = ins.operands[0]
    if not isinstance(label, Label):
        raise ValueError(f"unknown label {label}")
    target = label.target

    if ins.guard is None:

        def always(w: Warp):
            w.pc = target

        return always

    def guard(p: int, negated: bool) -> Closure:
        def branch(w: Warp):
            taken = guard_lanes(w, p, negated, "a branch")
            if not taken.any():
                return
            if taken.all() if w.full else (taken == w.mask).all():
                w.pc = target
                return
            w.jump(target, taken)

        return branch

    guard.takes_guard = True
    return guard


@op("brx")
def brx(ins: Instruction, d: Decoder) -> Closure:
    """To the label of a table that the index says; lanes may go to different ones."""
    i, table = d.reg(ins.operands[0]), ins.operands[1]
    if not isinstance(table, Vector) or not all(isinstance(label, Label) for label in table.items):
        raise ValueError(f"unknown table of labels {table}")
    targets = np.array([label.target for label in table.items])

    def run(w: Warp, lanes: np.ndarray | None = None):
        if lanes is not None:
            w.park(w.pc, w.mask & ~lanes)
            w.mask, w.full = lanes, False
        w.need_defined(w.regs[i], "a branch")
        index = plain(w.regs[i])
        if (index[w.mask] >= len(targets)).any():
            raise Fault("out_of_bounds", f"brx.idx with index {int(index[w.mask].max())} into {len(targets)} labels")
        to = targets[np.where(w.mask, index, 0)]
        for target in np.unique(to[w.mask]):
            w.park(int(target), w.mask & (to == target))
        w.mask = None
        w.regroup()

    def guard(p: int, negated: bool) -> Closure:
        def guarded(w: Warp):
            lanes = (~w.regs[p] if negated else w.regs[p]) & w.mask
            if lanes.any():
                run(w, lanes if (lanes != w.mask).any() else None)

        return guarded

    if ins.guard is not None:
        guard.takes_guard = True
        return guard
    return run


@op("ret", "exit")
def ret(ins: Instruction, d: Decoder) -> Closure:
    def leave(w: Warp, lanes: np.ndarray) -> None:
        rest = w.mask & ~lanes
        if rest.any():
            w.live = w.live & ~lanes
            w.mask, w.full = rest, False
        else:
            w.exit()

    def guard(p: int, negated: bool) -> Closure:
        def run(w: Warp):
            lanes = guard_lanes(w, p, negated, "an exit")
            if lanes.any():
                leave(w, lanes)

        return run

    if ins.guard is not None:
        guard.takes_guard = True
        return guard
    return lambda w: w.exit()


@op("trap", "brkpt")
def trap(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        raise Fault("trap", f"{ins.opcode} was executed")

    return run


@op("nanosleep", "pmevent", "discard", "applypriority")
def nothing(ins: Instruction, d: Decoder) -> Closure:
    return lambda w: None


# ----- across lanes ---------------------------------------------------------------------------------------------------


@op("elect")
def elect(ins: Instruction, d: Decoder) -> Closure:
    pair, members = ins.operands[0], d.reg(ins.operands[1])
    leader, chosen = (d.out(pair.first), d.out(pair.second)) if isinstance(pair, Pair) else (-1, d.out(pair))

    def run(w: Warp):
        lanes = _members(w, w.regs[members], "elect.sync")
        lane = int(lanes.argmax())
        if leader >= 0:
            w.write(leader, np.full(LANES, lane, np.uint32))
        if chosen >= 0:
            w.write(chosen, lane == LANE)

    return run


def _members(w: Warp, mask: np.ndarray, what: str) -> np.ndarray:
    """bool [32] of a member mask; all live members must be active."""
    value = int(mask[w.first()])
    lanes = ALL_LANES if value == 0xFFFFFFFF else (value >> LANE & 1).astype(bool)
    if not w.full and (lanes & w.live & ~w.mask).any():
        raise Fault("divergence", f"{what} names lanes that are not here (member mask {value:#x})")
    return lanes & w.live


@op("vote.sync", "vote")
def vote(ins: Instruction, d: Decoder) -> Closure:
    mode, out = ins.parts[2], d.out(ins.operands[0])
    get, members = d.predicate(ins.operands[1]), d.reg(ins.operands[2])

    def run(w: Warp):
        lanes = _members(w, w.regs[members], ins.opcode)
        flags = get(w)
        w.need_defined(flags, "a vote")
        flags = plain(flags)
        values = flags[lanes]
        if mode == "ballot":
            bits = int((flags & lanes).astype(np.uint64) @ (np.uint64(1) << LANE.astype(np.uint64)))
            w.write(out, np.full(LANES, bits, np.uint32))
        else:
            result = {
                "any": values.any(),
                "all": values.all(),
                "uni": values.all() or not values.any(),
            }[mode]
            w.write(out, np.full(LANES, result))

    return run


@op("activemask")
def activemask(ins: Instruction, d: Decoder) -> Closure:
    out = d.out(ins.operands[0])
    return lambda w: w.write(out, np.full(LANES, int((w.mask * (1 << LANE)).sum()), np.uint32))


@op("match.any.sync", "match.all.sync", "match")
def match(ins: Instruction, d: Decoder) -> Closure:
    target, i, members = ins.operands[0], d.reg(ins.operands[1], ins.parts[-1]), d.reg(ins.operands[2])
    out, flag = (d.out(target.first), d.out(target.second)) if isinstance(target, Pair) else (d.out(target), -1)

    def run(w: Warp):
        lanes, v = _members(w, w.regs[members], ins.opcode), w.regs[i]
        same = (v[:, None] == v) & lanes
        bits = (same * (1 << LANE)).sum(1)
        if ins.parts[1] == "all":
            whole = same[lanes].all() if lanes.any() else False
            bits = np.where(whole, (lanes * (1 << LANE)).sum(), 0) + 0 * bits
            if flag >= 0:
                w.write(flag, np.full(LANES, bool((same | ~lanes).all(1)[lanes].all())))
        w.write(out, bits.astype(np.uint32))

    return run


@op("redux.sync", "redux")
def redux(ins: Instruction, d: Decoder) -> Closure:
    name, kind = ins.parts[2], ins.parts[-1]
    out, i, members = d.out(ins.operands[0]), d.reg(ins.operands[1]), d.reg(ins.operands[2])
    if name not in ("add", "min", "max", "and", "or", "xor"):
        raise ValueError(f"operation {name}")
    view = {"s32": np.int32, "f32": np.float32}.get(kind, np.uint32)
    if kind == "f32" and set(ins.parts[3:-1]) - {"NaN", "abs"}:
        raise ValueError(f"modifiers {ins.parts[3:-1]}")

    def run(w: Warp):
        w.need_defined(w.regs[i], "redux")
        v = plain(w.regs[i]).view(view)[_members(w, w.regs[members], ins.opcode)]
        if "abs" in ins.parts:
            v = np.abs(v)
        if kind == "f32":
            f = {"min": np.fmin, "max": np.fmax} if "NaN" not in ins.parts else {"min": np.minimum, "max": np.maximum}
            result = f[name].reduce(v)
        else:
            f = {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
            result = v.sum(dtype=view) if name == "add" else f[name].reduce(v)
        w.write(out, np.full(LANES, result, view).view(np.uint32))

    return run


@op("shfl.sync", "shfl")
def shfl(ins: Instruction, d: Decoder) -> Closure:
    mode, target = ins.parts[2], ins.operands[0]
    out, flag = (d.out(target.first), d.out(target.second)) if isinstance(target, Pair) else (d.out(target), -1)
    value, by, clamp, members = (d.reg(o) for o in ins.operands[1:5])

    def run(w: Warp):
        r = w.regs
        lanes = _members(w, r[members], "shfl.sync")
        c = r[clamp].astype(np.int64)
        b = (r[by] & np.uint32(31)).astype(np.int64)
        segment = c >> 8 & 31
        top = (LANE & segment) | (c & 31 & ~segment)
        if mode == "up":
            source = LANE - b
            valid = source >= top
        elif mode == "down":
            source = LANE + b
            valid = source <= top
        elif mode == "bfly":
            source = LANE ^ b
            valid = source <= top
        else:
            source = (LANE & segment) | (b & ~segment)
            valid = source <= top
        source = np.where(valid, source, LANE)
        if not lanes[source[w.mask]].all():
            raise Fault("divergence", "shfl.sync reads a lane that does not take part")
        w.write(out, r[value][source])
        if flag >= 0:
            w.write(flag, valid)

    return run


@op("createpolicy")
def createpolicy(ins: Instruction, d: Decoder) -> Closure:
    """Cache policies are hints."""
    out = d.out(ins.operands[0])
    return lambda w: w.write(out, np.zeros(LANES, np.uint64))


@op("setmaxnreg")
def setmaxnreg(ins: Instruction, d: Decoder) -> Closure:
    """Checked against the register file: the warps of a CTA may hold 65,536 registers together."""
    count = ins.operands[0].value
    if not 24 <= count <= 256 or count % 8:
        raise ValueError(f"{count} registers; must be a multiple of 8 in 24..256")

    def run(w: Warp):
        w.need_all("setmaxnreg")
        w.registers_limit = count
        known = [x.registers_limit for x in w.cta.warps if x.registers_limit]
        if sum(known) * LANES > 65536:
            raise Fault("registers", f"the warps of the CTA ask for {sum(known) * LANES} registers, the SM has 65536")

    return run


@op("call")
def call(ins: Instruction, d: Decoder) -> Closure:
    raise UnsupportedInstruction(f"PTX line {ins.line}: functions cannot be called: {ins.text}")
