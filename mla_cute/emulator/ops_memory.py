"""Loads, stores and atomics of the threads themselves (the generic proxy); ldmatrix and stmatrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import matrix, numeric
from .decode import UINT, Closure, Decoder, UnsupportedInstruction, op, with_lanes
from .global_order import active
from .machine import (
    GRANULE,
    LANES,
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    Cta,
    Fault,
    SeveralCtas,
    Warp,
)
from .ptx import TYPE_BYTES, Instruction, Memory, Reg, Symbol, Vector
from .taint import plain, tainted

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "local", "const")
HINTS = {"nc", "volatile", "relaxed", "acquire", "release", "weak", "mmio", "cta", "cluster", "gpu", "sys", "ca", "cg", "cs"}
HINTS |= {"lu", "cv", "wb", "wt", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L1::no_allocate"}
HINTS |= {"L1::evict_unchanged", "L2::cache_hint", "L2::evict_last", "L2::evict_first", "L2::evict_normal", "L2::64B"}
HINTS |= {"L2::128B", "L2::256B", "unified"}
STRONG = {"volatile", "relaxed", "acquire", "release", "mmio"}  # accesses that may race with each other
LANE = np.arange(LANES)


def shape_of(ins: Instruction, skip: int = 1) -> tuple[str, int, str, set[str]]:
    """(state space or "", vector length, element type, other modifiers) of a load, store or atomic."""
    space, count, kind, rest = "", 1, ins.parts[-1], set()
    for part in ins.parts[skip:-1]:
        if part in SPACES:
            space = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
        else:
            rest.add(part)
    return space, count, kind, rest


@op("ld", "ldu")
def load(ins: Instruction, d: Decoder) -> Closure:
    space, count, kind, rest = shape_of(ins)
    _no_others(ins, rest)
    size = TYPE_BYTES[kind]
    outs = d.outs(ins.operands[0])
    store = [_widened(o, kind) for o in (ins.operands[0].items if isinstance(ins.operands[0], Vector) else ins.operands[:1])]
    source: Memory = ins.operands[1]
    if space == "param" or (space == "" and isinstance(source.base, Symbol) and source.base.name in d.params):
        return _load_param(ins, d, outs, store, kind, count)
    at = d.address(source)
    read = READERS[space.partition("::")[0]]
    if rest & STRONG and space.partition("::")[0] in ("", "shared", "global"):
        read = _strong_reader(space, rest)
    if kind == "b128":
        return lambda w: w.write(outs[0], read(w, at(w), 8, 2))

    def run(w: Warp):
        values = read(w, at(w), size, count)  # [32, count] of size-byte integers
        for i, out in enumerate(outs):
            if out >= 0:
                w.write(out, store[i](values[:, i]))

    return run


def _no_others(ins: Instruction, rest: set[str]) -> None:
    if rest - HINTS:
        raise ValueError(f"modifiers {sorted(rest - HINTS)}")


def _widened(target, kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """To the width of the destination register: signed types extend their sign."""
    size = TYPE_BYTES[kind]
    width = TYPE_BYTES[target.type] if isinstance(target, Reg) else size
    if width == size:
        return lambda v: v.copy()  # a column
    if kind[0] == "s":
        return lambda v: v.copy().view(f"i{size}").astype(f"i{width}").view(UINT[width])
    return lambda v: v.astype(UINT[width])


def _load_param(ins: Instruction, d: Decoder, outs, store, kind: str, count: int) -> Closure:
    """From the parameters; what a name gives is the same for all lanes."""
    m: Memory = ins.operands[1]
    size = TYPE_BYTES[kind]
    if isinstance(m.base, Symbol):
        number = d.params[m.base.name][0]

        def run(w: Warp):
            data = w.machine.launch.params[number]
            for i, out in enumerate(outs):
                at = m.offset + i * size
                if at < 0 or at + size > len(data):
                    raise Fault("out_of_bounds", f"parameter {number} has {len(data)} bytes, reads {at}..{at + size}")
                if out < 0:
                    continue
                value = np.frombuffer(data, UINT[size], 1, at)
                w.write(out, store[i](np.full(LANES, value[0])))

        return run
    at = d.address(m)

    def run_generic(w: Warp):
        values = read_param(w, at(w), size, count)
        for i, out in enumerate(outs):
            if out >= 0:
                w.write(out, store[i](values[:, i]))

    return run_generic


@op("st")
def store(ins: Instruction, d: Decoder) -> Closure:
    space, count, kind, rest = shape_of(ins)
    if "async" in rest:
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")
    _no_others(ins, rest)
    size = TYPE_BYTES[kind]
    idx = d.regs(ins.operands[1], kind)
    at = d.address(ins.operands[0])
    write = WRITERS[space.partition("::")[0]]
    if rest & STRONG and space.partition("::")[0] in ("", "shared", "global"):
        write = _strong_writer(space, rest)
    dtype = UINT.get(size)

    def run(w: Warp):
        r = w.regs
        if kind == "b128":
            write(w, at(w), 8, r[idx[0]])
            w.cta.cluster.progress += 1
            return
        if len(idx) == 1:
            values = r[idx[0]].astype(dtype, copy=False)[:, None]
        else:
            values = np.stack([r[i].astype(dtype, copy=False) for i in idx], axis=1)
        write(w, at(w), size, values)
        w.cta.cluster.progress += 1

    return run


@op("st.bulk")
def store_bulk(ins: Instruction, d: Decoder) -> Closure:
    """Zeros to a part of the CTA's own shared memory."""
    at, count = d.uniform_each(ins.operands[0]), d.uniform_each(ins.operands[1], "b64")
    window = 0 if "shared::cta" in ins.parts else SHARED_WINDOW

    def run(w: Warp):
        for lane in w.lanes():
            address, n = at(w, lane) - window, count(w, lane)
            if address % 8 or n % 8:
                raise Fault("misaligned", f"st.bulk of {n} bytes at {address:#x}: must be multiples of 8")
            if n and w.shared(address) is not w.cta:
                raise Fault("out_of_bounds", f"st.bulk at {address:#x}, not in the CTA's own shared memory")
            if n:
                low = address & OFFSET_MASK
                w.check_range(w.cta, low, low + n)
                w.note_write(w.cta, np.arange(low // GRANULE, (low + n) // GRANULE))
                w.cta.shared.data[low : low + n] = 0
        w.cta.cluster.progress += 1

    return run


# ----- by state space: read(warp, addresses [32], bytes an element, elements) -> [32, elements] --------------------------


def _granules(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    if nbytes <= GRANULE:
        return offsets // GRANULE
    return (offsets // GRANULE)[:, None] + np.arange(nbytes // GRANULE)


def read_shared(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    try:
        cta, offsets = w.shared_index(addresses, size * count)
    except SeveralCtas:
        values = np.zeros((LANES, count), UINT[size])
        for lanes in _by_cta(w, addresses):
            part = with_lanes(w, lanes, lambda w: read_shared(w, addresses, size, count))
            values = np.where(lanes[:, None], part, values)
        return values
    unwritten = w.note_read(cta, _granules(offsets, size * count))
    data = cta.shared.data.view(UINT[size])
    values = data[(offsets // size)[:, None] + np.arange(count)]
    if unwritten is None:
        return values
    per_item = unwritten.size % (LANES * count) == 0
    lanes = unwritten.reshape(LANES, count, -1).any(2) if per_item else unwritten.reshape(LANES, -1)
    return tainted(values, lanes & w.mask[:, None], f"shared memory that nothing was written to, loaded at {w.place()}")


def write_shared(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    count = values.shape[1]
    try:
        cta, offsets = w.shared_index(addresses, size * count)
    except SeveralCtas:
        for lanes in _by_cta(w, addresses):
            with_lanes(w, lanes, lambda w: write_shared(w, addresses, size, values))
        return
    w.need_defined(values, "a store")
    values = plain(values)
    if not w.full:
        offsets, values = offsets[w.mask], values[w.mask]
    w.note_write(cta, _granules(offsets, size * count))
    data = cta.shared.data.view(UINT[size])
    data[(offsets // size)[:, None] + np.arange(count)] = values


def _by_cta(w: Warp, addresses: np.ndarray) -> list[np.ndarray]:
    """The active lanes, bool [32], by the CTA that their shared addresses are of."""
    ranks = plain(addresses) >> RANK_SHIFT
    return [w.mask & (ranks == rank) for rank in np.unique(ranks[w.mask])]


def _strong_reader(space: str, modifiers: set[str]):
    """Loads that may race with other strong accesses and atomics; on shared memory all of them acquire."""

    def read(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        space_now, window = (space.partition("::")[0], 0) if space else _space(w, addresses)
        if space_now == "global":
            values = _load_global(w, addresses, size, count)
            for at in active(w, addresses):
                w.machine.order.acquire(w, int(at), modifiers)
            return values
        if space_now != "shared":
            return READERS[space_now](w, addresses - window, size, count)
        places = []
        for lane in w.lanes():
            at = int(addresses[lane]) - window
            clock = _clocks(w).get((at >> RANK_SHIFT, at & OFFSET_MASK))
            if clock is not None:
                w.acquire(clock)
            s = w.shared(at).shared
            granules = slice((at & OFFSET_MASK) // GRANULE, ((at & OFFSET_MASK) + size * count + 1) // GRANULE)
            epochs, _ = s.reader(w.agent)
            places.append((s, granules, s.read_mask[granules].copy(), epochs, epochs[granules].copy()))
        values = read_shared(w, addresses - window, size, count)
        for s, granules, mask, epochs, before in places:  # for plain writes it is as if it had not been
            s.read_mask[granules], epochs[granules] = mask, before
        return values

    return read


def _strong_writer(space: str, modifiers: set[str]):
    """Stores that may race with other strong accesses and atomics; on shared memory all of them release."""

    def write(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        space_now, window = (space.partition("::")[0], 0) if space else _space(w, addresses)
        if space_now == "global":
            _store_global(w, addresses, size, values)
            for at in active(w, addresses):
                w.machine.order.release(w, int(at), modifiers, is_atomic=False)
            return None
        if space_now != "shared":
            return WRITERS[space_now](w, addresses - window, size, values)
        clocks, known = _clocks(w), w.clock.copy()
        keys = [(at >> RANK_SHIFT, at & OFFSET_MASK) for at in (int(addresses[lane]) - window for lane in w.lanes())]
        for key in keys:
            if key in clocks:
                w.acquire(clocks[key])  # for the check only
        write_shared(w, addresses - window, size, values)
        w.clock[:] = known
        mine = w.release()
        for key in keys:
            clocks[key] = np.maximum(clocks.get(key, 0), mine)

    return write


def _clocks(w: Warp) -> dict[tuple[int, int], np.ndarray]:
    """(CTA's rank, offset) -> what the strong stores and atomics there have released."""
    return w.cta.cluster.atomics


def load_accesses(ins: Instruction, d: Decoder) -> Callable[[Warp], tuple[Cta, np.ndarray] | None]:
    """closure(warp) -> (CTA, granules) that a load of shared memory reads; None when it is of another space."""
    at = d.address(ins.operands[1])
    if ins.parts[0] == "ldmatrix":
        size, lanes, space = 16, 8 * matrix_move(ins, "ldmatrix").source.shape[0], "shared"
    else:
        space, count, kind, _ = shape_of(ins)
        size, lanes = TYPE_BYTES[kind] * count, LANES

    def accesses(w: Warp):
        addresses = at(w)
        space_now, window = (space, 0) if space else _space(w, addresses)
        if not space_now.startswith("shared"):
            return None
        offsets = (addresses - window)[:lanes][w.mask[:lanes]]
        cta = w.shared(int(offsets[0]))
        return cta, np.unique(_granules(offsets & OFFSET_MASK, size))

    return accesses


def read_global(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    values = _load_global(w, addresses, size, count)
    w.machine.order.read(w, active(w, addresses), size * count)
    return values


def write_global(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    changes = _store_global(w, addresses, size, values)
    w.machine.order.write(w, active(w, addresses), size * values.shape[1], changes)


def _load_global(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    w.need_defined(addresses, "an address")
    addresses = plain(addresses)
    if not w.full:
        addresses = np.where(w.mask, addresses, addresses[w.first()])
    _aligned(addresses, size * count)
    array, index = w.machine.memory.index(_elements(addresses, size, count), size)
    return array[index]


def _store_global(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> bool:
    """Returns whether anything changed."""
    w.need_defined(values, "a store")
    w.need_defined(addresses, "an address")
    values, addresses = plain(values), plain(addresses)
    if not w.full:
        addresses, values = addresses[w.mask], values[w.mask]
    _aligned(addresses, size * values.shape[1])
    array, index = w.machine.memory.index(_elements(addresses, size, values.shape[1]), size)
    changes = not np.array_equal(array[index], values)
    array[index] = values
    return changes


def _elements(addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    return addresses[:, None] + np.arange(0, size * count, size)


def _aligned(addresses: np.ndarray, nbytes: int) -> None:
    if (addresses & (nbytes - 1)).any():
        bad = int(addresses[(addresses & (nbytes - 1)) != 0][0])
        raise Fault("misaligned", f"global access of {nbytes} bytes at {bad:#x}")


def read_param(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    w.need_defined(addresses, "an address")
    addresses = plain(addresses)
    values = np.zeros((LANES, count), UINT[size])
    for at in np.unique(addresses[w.mask]):
        values[addresses == at] = _parameter(w, int(at) - PARAM_WINDOW, size, count)
    return values


def _parameter(w: Warp, offset: int, size: int, count: int) -> np.ndarray:
    for number, start in w.machine.program.decoder.params.values():
        data = w.machine.launch.params[number]
        if start <= offset and offset + size * count <= start + len(data):
            return np.frombuffer(data, UINT[size], count, offset - start)
    raise Fault("out_of_bounds", f"reads bytes {offset}..{offset + size * count} of the parameters")


def _local(w: Warp) -> np.ndarray:
    """Bytes of the warp's local memory [32, n], and which were written."""
    if "data" not in w.local:
        n = w.machine.program.decoder.local_bytes
        w.local["data"], w.local["written"] = np.zeros((LANES, n), np.uint8), np.zeros((LANES, n), bool)
    return w.local["data"]


def _local_index(w: Warp, addresses: np.ndarray, nbytes: int) -> np.ndarray:
    w.need_defined(addresses, "an address")
    addresses = plain(addresses)
    if not w.full:
        addresses = np.where(w.mask, addresses, addresses[w.first()])
    low, high = int(addresses.min()), int(addresses.max()) + nbytes
    if low < 0 or high > _local(w).shape[1]:
        raise Fault("out_of_bounds", f"local access to {low}..{high}; there are {_local(w).shape[1]} bytes")
    if (addresses & (nbytes - 1)).any():
        raise Fault("misaligned", f"local access of {nbytes} bytes")
    return addresses[:, None] + np.arange(nbytes)


def read_local(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    index = _local_index(w, addresses, size * count)
    lanes = LANE[:, None]
    if not w.local["written"][lanes, index][w.mask].all():
        raise Fault("uninitialised", "reads local memory that nothing was written to")
    return np.ascontiguousarray(_local(w)[lanes, index]).view(UINT[size])


def write_local(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    w.need_defined(values, "a store")
    values = plain(values)
    index = _local_index(w, addresses, size * values.shape[1])[w.mask]
    lanes = LANE[w.mask][:, None]
    _local(w)[lanes, index] = np.ascontiguousarray(values[w.mask]).view(np.uint8).reshape(len(index), -1)
    w.local["written"][lanes, index] = True


def read_const(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    w.need_defined(addresses, "an address")
    addresses = plain(addresses)
    values, left = np.zeros((LANES, count), UINT[size]), w.mask
    for name, array in w.machine.program.decoder.constants.items():
        index = addresses - array.ctypes.data
        lanes = left & (index >= 0) & (index < len(array))
        if not lanes.any():
            continue
        if index[lanes].max() + size * count > len(array):
            raise Fault("out_of_bounds", f"reads past {name}")
        values[lanes] = np.ascontiguousarray(array[index[lanes][:, None] + np.arange(size * count)]).view(UINT[size])
        left = left & ~lanes
        if not left.any():
            return values
    raise Fault("out_of_bounds", f"constant access at {int(addresses[left.argmax()]):#x}")


def _space(w: Warp, addresses: np.ndarray) -> tuple[str, int]:
    """(state space of generic addresses, what to subtract from them). Those of constants are global ones here."""
    w.need_defined(addresses, "an address")
    active = plain(addresses) if w.full else plain(addresses)[w.mask]
    low, high = (_space_of(int(at)) for at in (active.min(), active.max()))
    if low != high:
        text = f"the lanes' generic addresses are of two state spaces, {low[0]} and {high[0]}"
        raise Fault("unsupported", text)
    return low


def _space_of(at: int) -> tuple[str, int]:
    if at >= LOCAL_WINDOW:
        return "local", LOCAL_WINDOW
    if at >= PARAM_WINDOW:
        return "param", 0
    return ("shared", SHARED_WINDOW) if at >= SHARED_WINDOW else ("global", 0)


def read_generic(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    space, window = _space(w, addresses)
    return READERS[space](w, addresses - window, size, count)


def write_generic(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    space, window = _space(w, addresses)
    WRITERS[space](w, addresses - window, size, values)


READERS = {
    "": read_generic,
    "shared": read_shared,
    "global": read_global,
    "param": read_param,
    "local": read_local,
    "const": read_const,
}
WRITERS = {"": write_generic, "shared": write_shared, "global": write_global, "local": write_local}


@op("prefetch", "prefetchu")
def prefetch(ins: Instruction, d: Decoder) -> Closure:
    """Reads nothing; the address of a tensor map must be one."""
    if "tensormap" not in ins.parts:
        return lambda w: None
    from .ops_tma import tensor_map

    at = d.uniform(ins.operands[0], "b64")

    def run(w: Warp):
        tensor_map(w, at(w))

    return run


# ----- atomics --------------------------------------------------------------------------------------------------------


@op("atom", "red")
def atomic(ins: Instruction, d: Decoder) -> Closure:
    """Lane after lane. On shared memory it also orders the warps that use the same word, as acquire and release do."""
    returns = ins.parts[0] == "atom"
    space, count, kind, rest = shape_of(ins)
    names = rest - HINTS - {"noftz", "acq_rel"}
    if len(names) != 1:
        raise ValueError(f"modifiers {sorted(names)}")
    (name,) = names
    operands = ins.operands[1:] if returns else ins.operands
    outs = d.outs(ins.operands[0]) if returns else [-1] * count
    at = d.address(operands[0])
    values = [d.regs(o, kind) for o in operands[1 : 3 if name == "cas" else 2]]  # [operands][vector]
    change = _changes(name, kind)
    size = TYPE_BYTES[kind]

    def run(w: Warp):
        addresses = at(w)
        for i in (i for vector in values for i in vector):
            w.need_defined(w.regs[i], "an atomic")
        w.need_defined(addresses, "an address")
        space_now, window = (space.partition("::")[0], 0) if space else _space(w, addresses)
        changed = False  # a loop around one that changes nothing makes no progress
        for n, out in enumerate(outs):
            old = np.zeros(LANES, UINT[size])
            for lane in w.lanes():
                address = int(addresses[lane]) - window + n * size
                array, i = _word(w, space_now, address, size)
                old[lane] = array[i]
                array[i] = change(array[i], *[w.regs[v[n]][lane] for v in values])
                changed = changed or array[i] != old[lane]
                if space_now == "global":
                    w.machine.order.acquire(w, address, rest)
                    w.machine.order.release(w, address, rest, is_atomic=True)
            if out >= 0:
                w.write(out, old)
        w.cta.cluster.progress += changed

    return run


def _word(w: Warp, space: str, address: int, size: int) -> tuple[np.ndarray, int]:
    if space == "global":
        array, index = w.machine.memory.index(np.array([address]), size)
        return array, int(index[0])
    if space != "shared":
        raise Fault("unsupported", f"atomic on {space} memory")
    cta, offset = w.shared(address), address & ((1 << RANK_SHIFT) - 1)
    w.check_range(cta, offset, offset + size)
    if offset % size:
        raise Fault("misaligned", f"atomic of {size} bytes at shared {offset:#x}")
    s, granule = cta.shared, offset // GRANULE
    clocks = cta.cluster.atomics
    key = cta.rank, offset
    if key in clocks:
        w.acquire(clocks[key])
    granules = np.arange(granule, granule + max(size // GRANULE, 1))
    unwritten = w.note_read(cta, granules)
    if unwritten is not None:
        raise Fault("uninitialised", f"atomic on shared {offset:#x}, which nothing was written to")
    w.note_write(cta, granules)
    s.read_mask[granules] = 0
    clocks[key] = np.maximum(clocks.get(key, 0), w.release())
    return s.data.view(UINT[size]), offset // size


def _changes(name: str, kind: str):
    size = TYPE_BYTES[kind]
    view = {"s": f"i{size}", "f": f"f{size}"}.get(kind[0], f"u{size}")
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _changes_half(name, kind[:-2] if kind.endswith("x2") else kind)

    def typed(f):
        def change(old, *args):
            with np.errstate(over="ignore"):
                result = f(*[np.asarray(x, f"u{size}").reshape(1).view(view) for x in (old, *args)])
            return np.asarray(result, view).reshape(1).view(f"u{size}")[0]

        return change

    table = {
        "add": typed(lambda a, b: a + b),
        "min": typed(np.minimum),
        "max": typed(np.maximum),
        "and": typed(np.bitwise_and) if kind[0] != "f" else None,
        "or": typed(np.bitwise_or) if kind[0] != "f" else None,
        "xor": typed(np.bitwise_xor) if kind[0] != "f" else None,
        "exch": lambda old, b: b,
        "cas": lambda old, compare, b: b if old == compare else old,
        "inc": lambda old, b: old.dtype.type(0) if old >= b else old + old.dtype.type(1),
        "dec": lambda old, b: b if old == 0 or old > b else old - old.dtype.type(1),
    }
    if table.get(name) is None:
        raise ValueError(f"operation {name}.{kind}")
    return table[name]


def _changes_half(name: str, kind: str):
    """Of one or two 16-bit floats in a word."""
    f = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]

    def change(old, new):
        a, b = (numeric.to_float(np.asarray(x).reshape(1).view(np.uint16), kind) for x in (old, new))
        return numeric.from_float(f(a, b), kind).view(old.dtype)[0]

    return change


# ----- matrices -------------------------------------------------------------------------------------------------------


@op("ldmatrix")
def ldmatrix(ins: Instruction, d: Decoder) -> Closure:
    """Lane l gives the address of a row of 16 bytes; where its items go, matrix.py says."""
    move = matrix_move(ins, "ldmatrix")
    outs, at = d.outs(ins.operands[0]), d.address(ins.operands[1])
    if len(outs) != len(move.source):
        raise ValueError(f"{len(outs)} registers, {len(move.source)} expected")
    count = int(move.source.max()) + 1

    def run(w: Warp):
        w.need_all("ldmatrix")
        data = np.zeros((LANES, 16), np.uint8)
        data[:count], unwritten = read_shared_rows(w, at(w)[:count])
        words = matrix.ldmatrix(data, move)
        taint = None
        if unwritten is not None:
            bad = np.zeros((LANES, 16), bool)
            bad[:count] = np.repeat(unwritten, GRANULE, axis=1)
            taint = bad[move.source, move.byte].any(1)
        for i, out in enumerate(outs):
            value = words[i].copy()
            if taint is not None:
                value = tainted(value, taint[i], f"shared memory that nothing was written to, loaded at {w.place()}")
            w.write(out, value)

    return run


@op("stmatrix")
def stmatrix(ins: Instruction, d: Decoder) -> Closure:
    move = matrix_move(ins, "stmatrix")
    at, idx = d.address(ins.operands[0]), d.regs(ins.operands[1])
    if len(idx) != len(move.source):
        raise ValueError(f"{len(idx)} registers, {len(move.source)} expected")

    def run(w: Warp):
        w.need_all("stmatrix")
        for i in idx:
            w.need_defined(w.regs[i], "stmatrix")
        rows = matrix.stmatrix(np.stack([plain(w.regs[i]) for i in idx]), move)
        addresses = at(w)[: len(rows)]
        cta, offsets = _rows(w, addresses)
        w.note_write(cta, _granules(offsets, 16))
        cta.shared.data[offsets[:, None] + np.arange(16)] = rows
        w.cta.cluster.progress += 1

    return run


def matrix_move(ins: Instruction, kind: str) -> matrix.MatrixMove:
    shapes = {"m8n8": "b16", "m16n16": "b8", "m16n8": "b8"}
    rest = set(ins.parts[1:]) - {"sync", "aligned", "shared", "shared::cta", "trans", "x1", "x2", "x4"}
    shape = next((s for s in shapes if s in rest), "")
    if rest != {shape, shapes.get(shape)}:
        raise ValueError(f"modifiers {sorted(rest)}")
    count = next(int(p[1]) for p in ins.parts if p in ("x1", "x2", "x4"))
    make = matrix.ldmatrix_map if kind == "ldmatrix" else matrix.stmatrix_map
    return make(shape, count, "trans" in ins.parts)


def _rows(w: Warp, addresses: np.ndarray):
    w.need_defined(addresses, "an address")
    addresses = plain(addresses)
    cta = w.shared(int(addresses[0]))
    offsets = addresses & OFFSET_MASK
    w.check_range(cta, int(offsets.min()), int(offsets.max()) + 16)
    if (offsets & 15).any():
        raise Fault("misaligned", "a matrix row must be 16-byte aligned")
    return cta, offsets


def read_shared_rows(w: Warp, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(uint8 [rows, 16], which granules of them nobody wrote, bool [rows, 8], or None)"""
    cta, offsets = _rows(w, addresses)
    unwritten = w.note_read(cta, _granules(offsets, 16))
    return cta.shared.data[offsets[:, None] + np.arange(16)], unwritten


@op("movmatrix")
def movmatrix(ins: Instruction, d: Decoder) -> Closure:
    out, i = d.out(ins.operands[0]), d.reg(ins.operands[1])

    def run(w: Warp):
        w.need_all("movmatrix")
        w.write(out, matrix.movmatrix(np.ascontiguousarray(w.regs[i])))

    return run


@op("mapa")
def mapa(ins: Instruction, d: Decoder) -> Closure:
    """The address of the same place in another CTA of the cluster."""
    generic = "shared" not in ins.parts[1]
    kind = ins.parts[-1].replace("u", "b")
    out, a, rank = d.out(ins.operands[0]), d.reg(ins.operands[1], kind), d.reg(ins.operands[2])
    window = SHARED_WINDOW if generic else 0

    def run(w: Warp):
        offset = (w.regs[a].astype(np.int64) - window) & ((1 << RANK_SHIFT) - 1)
        value = offset + (w.regs[rank].astype(np.int64) << RANK_SHIFT) + window
        w.write(out, value.astype(UINT[TYPE_BYTES[kind]]))

    return run


@op("getctarank")
def getctarank(ins: Instruction, d: Decoder) -> Closure:
    window = SHARED_WINDOW if "shared" not in ins.parts[1] else 0
    out, a = d.out(ins.operands[0]), d.reg(ins.operands[1], "b64")
    return lambda w: w.write(out, ((w.regs[a].astype(np.int64) - window) >> RANK_SHIFT).astype(np.uint32))
