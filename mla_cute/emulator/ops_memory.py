"""Loads, stores and atomics of the threads themselves (the generic proxy); ldmatrix and stmatrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import UINT, Closure, Decoder, UnsupportedInstruction, op
from .machine import (
    GRANULE,
    LANES,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    Fault,
    Warp,
)
from .ptx import TYPE_BYTES, Instruction, Memory, Reg, Symbol, Vector
from .taint import plain, tainted

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "local", "const")
HINTS = {"nc", "volatile", "relaxed", "acquire", "release", "weak", "mmio", "cta", "cluster", "gpu", "sys", "ca", "cg", "cs"}
HINTS |= {"lu", "cv", "wb", "wt", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L1::no_allocate"}
HINTS |= {"L1::evict_unchanged", "L2::cache_hint", "L2::evict_last", "L2::evict_first", "L2::evict_normal", "L2::64B"}
HINTS |= {"L2::128B", "L2::256B", "unified"}
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
    """From the parameters, which are the same for all lanes."""
    m: Memory = ins.operands[1]
    size = TYPE_BYTES[kind]
    if isinstance(m.base, Symbol):
        number = d.params[m.base.name][0]

        def run(w: Warp):
            data = w.machine.launch.params[number]
            for i, out in enumerate(outs):
                at = m.offset + i * size
                if at + size > len(data):
                    raise Fault("out_of_bounds", f"parameter {number} has {len(data)} bytes, reads {at}..{at + size}")
                value = np.frombuffer(data, UINT[size], 1, at)
                w.write(out, store[i](np.broadcast_to(value, LANES)))

        return run
    at = d.address(m)

    def run_generic(w: Warp):
        values = read_param(w, at(w), size, count)
        for i, out in enumerate(outs):
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
    dtype = UINT[size]

    def run(w: Warp):
        r = w.regs
        if len(idx) == 1:
            values = r[idx[0]].astype(dtype, copy=False)[:, None]
        else:
            values = np.stack([r[i].astype(dtype, copy=False) for i in idx], axis=1)
        write(w, at(w), size, values)
        w.cta.cluster.progress += 1

    return run


# ----- by state space: read(warp, addresses [32], bytes an element, elements) -> [32, elements] --------------------------


def _granules(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    if nbytes <= GRANULE:
        return offsets // GRANULE
    return (offsets // GRANULE)[:, None] + np.arange(nbytes // GRANULE)


def read_shared(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    cta, offsets = w.shared_index(addresses, size * count)
    unwritten = w.note_read(cta, _granules(offsets, size * count))
    data = cta.shared.data.view(UINT[size])
    values = data[(offsets // size)[:, None] + np.arange(count)]
    if unwritten is None:
        return values
    lanes = unwritten.reshape(LANES, count, -1).any(2) if unwritten.size % (LANES * count) == 0 else unwritten.reshape(LANES, -1)
    return tainted(values, lanes & w.mask[:, None], f"shared memory that nothing was written to, loaded at {w.place()}")


def write_shared(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    count = values.shape[1]
    cta, offsets = w.shared_index(addresses, size * count)
    w.need_defined(values, "a store")
    values = plain(values)
    if not w.full:
        offsets, values = offsets[w.mask], values[w.mask]
    w.note_write(cta, _granules(offsets, size * count))
    data = cta.shared.data.view(UINT[size])
    data[(offsets // size)[:, None] + np.arange(count)] = values


def read_global(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    w.need_defined(addresses, "an address")
    addresses = plain(addresses)
    if not w.full:
        addresses = np.where(w.mask, addresses, addresses[w.first()])
    _aligned(addresses, size * count)
    array, index = w.machine.memory.index(_elements(addresses, size, count), size)
    return array[index]


def write_global(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    w.need_defined(values, "a store")
    w.need_defined(addresses, "an address")
    values, addresses = plain(values), plain(addresses)
    if not w.full:
        addresses, values = addresses[w.mask], values[w.mask]
    _aligned(addresses, size * values.shape[1])
    array, index = w.machine.memory.index(_elements(addresses, size, values.shape[1]), size)
    array[index] = values


def _elements(addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    return addresses[:, None] + np.arange(0, size * count, size)


def _aligned(addresses: np.ndarray, nbytes: int) -> None:
    if (addresses & (nbytes - 1)).any():
        bad = int(addresses[(addresses & (nbytes - 1)) != 0][0])
        raise Fault("misaligned", f"global access of {nbytes} bytes at {bad:#x}")


def read_param(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    d = w.machine.program.decoder
    offset = int(addresses[w.first()]) - PARAM_WINDOW
    for number, start in d.params.values():
        data = w.machine.launch.params[number]
        if start <= offset and offset + size * count <= start + len(data):
            return np.broadcast_to(np.frombuffer(data, UINT[size], count, offset - start), (LANES, count))
    raise Fault("out_of_bounds", f"reads bytes {offset}..{offset + size * count} of the parameters")


def _local(w: Warp) -> np.ndarray:
    """Bytes of the warp's local memory [32, n], and which were written."""
    if "data" not in w.local:
        n = (w.machine.program.decoder.local_bytes + 15) & ~15
        w.local["data"], w.local["written"] = np.zeros((LANES, n), np.uint8), np.zeros((LANES, n), bool)
    return w.local["data"]


def _local_index(w: Warp, addresses: np.ndarray, nbytes: int) -> np.ndarray:
    if not w.full:
        addresses = np.where(w.mask, addresses, addresses[w.first()])
    low, high = int(addresses.min()), int(addresses.max()) + nbytes
    if low < 0 or high > _local(w).shape[1]:
        raise Fault("out_of_bounds", f"local access to {low}..{high}; there are {_local(w).shape[1]} bytes")
    return addresses[:, None] + np.arange(nbytes)


def read_local(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    index = _local_index(w, addresses, size * count)
    lanes = LANE[:, None]
    if not w.local["written"][lanes, index][w.mask].all():
        raise Fault("uninitialised", "reads local memory that nothing was written to")
    return np.ascontiguousarray(_local(w)[lanes, index]).view(UINT[size])


def write_local(w: Warp, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
    index = _local_index(w, addresses, size * values.shape[1])[w.mask]
    lanes = LANE[w.mask][:, None]
    _local(w)[lanes, index] = np.ascontiguousarray(values[w.mask]).view(np.uint8).reshape(len(index), -1)
    w.local["written"][lanes, index] = True


def read_const(w: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    at = int(addresses[w.first()])
    for name, array in w.machine.program.decoder.constants.items():
        base = array.ctypes.data
        if base <= at < base + len(array):
            index = addresses[:, None] - base + np.arange(size * count)
            if index[w.mask].max() >= len(array) or index[w.mask].min() < 0:
                raise Fault("out_of_bounds", f"reads past {name}")
            return np.ascontiguousarray(array[np.where(w.mask[:, None], index, 0)]).view(UINT[size])
    raise Fault("out_of_bounds", f"constant access at {at:#x}")


def _space(w: Warp, addresses: np.ndarray) -> tuple[str, int]:
    at = int(addresses[w.first()])
    if at >= LOCAL_WINDOW:
        return "local", LOCAL_WINDOW
    if at >= PARAM_WINDOW:
        return "param", 0
    if at >= SHARED_WINDOW:
        return "shared", SHARED_WINDOW
    constants = w.machine.program.decoder.constants.values()
    if any(a.ctypes.data <= at < a.ctypes.data + len(a) for a in constants):
        return "const", 0
    return "global", 0


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
    if len(names) != 1 or count > 1:
        raise ValueError(f"modifiers {sorted(names)}, vector {count}")
    (name,) = names
    operands = ins.operands[1:] if returns else ins.operands
    out = d.out(ins.operands[0]) if returns else -1
    at = d.address(operands[0])
    values = [d.reg(o, kind) for o in operands[1:3]]
    change = _changes(name, kind)
    size = TYPE_BYTES[kind]

    def run(w: Warp):
        addresses = at(w)
        space_now, window = (space.partition("::")[0], 0) if space else _space(w, addresses)
        old = np.zeros(LANES, UINT[size])
        for lane in w.lanes():
            address = int(addresses[lane]) - window
            array, i = _word(w, space_now, address, size)
            old[lane] = array[i]
            array[i] = change(array[i], *[w.regs[v][lane] for v in values])
        w.cta.cluster.progress += 1
        if returns and out >= 0:
            w.write(out, old)

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
    clocks = cta.cluster.__dict__.setdefault("atomics", {})
    key = cta.rank, offset
    if key in clocks:
        w.acquire(clocks[key])
    granules = np.arange(granule, granule + max(size // GRANULE, 1))
    w.note_read(cta, granules)
    w.note_write(cta, granules)
    s.read_mask[granules] = 0
    clocks[key] = np.maximum(clocks.get(key, 0), w.release())
    return s.data.view(UINT[size]), offset // size


def _changes(name: str, kind: str):
    size = TYPE_BYTES[kind]
    view = {"s": f"i{size}", "f": f"f{size}"}.get(kind[0], f"u{size}")
    if kind in ("bf16", "f16x2", "bf16x2"):
        raise ValueError(f"atomics of {kind}")

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


# ----- matrices -------------------------------------------------------------------------------------------------------


@op("ldmatrix")
def ldmatrix(ins: Instruction, d: Decoder) -> Closure:
    """8 x 8 tiles of 16 bits: lane l gives the address of row l % 8 of tile l / 8, and gets elements of row l / 4."""
    count, trans = _tiles(ins)
    outs, at = d.outs(ins.operands[0]), d.address(ins.operands[1])

    def run(w: Warp):
        w.need_all("ldmatrix")
        rows = read_shared_rows(w, at(w)[: 8 * count]).view(np.uint16).reshape(count, 8, 8)
        if trans:
            rows = rows.transpose(0, 2, 1)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(count, LANES)
        for i, out in enumerate(outs):
            w.write(out, words[i].copy())

    return run


@op("stmatrix")
def stmatrix(ins: Instruction, d: Decoder) -> Closure:
    count, trans = _tiles(ins)
    at, idx = d.address(ins.operands[0]), d.regs(ins.operands[1])

    def run(w: Warp):
        w.need_all("stmatrix")
        tiles = np.stack([w.regs[i] for i in idx]).view(np.uint16).reshape(count, 8, 8)
        if trans:
            tiles = tiles.transpose(0, 2, 1)
        rows = np.ascontiguousarray(tiles).reshape(count * 8, 8).view(np.uint8)
        addresses = at(w)[: 8 * count]
        cta, offsets = _rows(w, addresses)
        w.note_write(cta, _granules(offsets, 16))
        cta.shared.data[offsets[:, None] + np.arange(16)] = rows
        w.cta.cluster.progress += 1

    return run


def _tiles(ins: Instruction) -> tuple[int, bool]:
    rest = set(ins.parts[1:]) - {"sync", "aligned", "shared", "shared::cta", "m8n8", "b16", "trans", "x1", "x2", "x4"}
    if rest or "m8n8" not in ins.parts:
        raise ValueError(f"modifiers {sorted(rest)}")
    count = next(int(p[1]) for p in ins.parts if p in ("x1", "x2", "x4"))
    return count, "trans" in ins.parts


def _rows(w: Warp, addresses: np.ndarray):
    cta = w.shared(int(addresses[0]))
    offsets = addresses & ((1 << RANK_SHIFT) - 1)
    w.check_range(cta, int(offsets.min()), int(offsets.max()) + 16)
    if (offsets & 15).any():
        raise Fault("misaligned", "a matrix row must be 16-byte aligned")
    return cta, offsets


def read_shared_rows(w: Warp, addresses: np.ndarray) -> np.ndarray:
    """uint8 [rows, 16]"""
    cta, offsets = _rows(w, addresses)
    w.note_read(cta, _granules(offsets, 16))
    return cta.shared.data[offsets[:, None] + np.arange(16)]


@op("movmatrix")
def movmatrix(ins: Instruction, d: Decoder) -> Closure:
    out, i = d.out(ins.operands[0]), d.reg(ins.operands[1])

    def run(w: Warp):
        w.need_all("movmatrix")
        tile = np.ascontiguousarray(w.regs[i]).view(np.uint16).reshape(8, 8).T
        w.write(out, np.ascontiguousarray(tile).view(np.uint32).reshape(LANES))

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
