"""Copies by the asynchronous proxy: bulk copies, TMA tiles, cp.async, st.async.

A load writes shared memory some time between its issue and the phase of its mbarrier, a store reads it until its bulk group
has been waited for. Both are entered into shared memory's records at the issue, so what overlaps is found whenever they run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import hazards, numeric
from .decode import UINT, Closure, Decoder, UnsupportedInstruction, op, with_lanes
from .machine import GRANULE, LANES, OFFSET_MASK, PARAM_WINDOW, UNFINISHED, Async, Cta, Fault, Wait, Warp
from .ops_memory import READERS, WRITERS, read_global, read_param
from .ops_sync import initialised_for_async, shared_address
from .ptx import TYPE_BYTES, Instruction, Memory, Not, Vector
from .taint import plain
from .tensormap import SMEM_ALIGNMENT, TensorMap, Tile, gather4, replaced

_maps: dict[bytes, TensorMap] = {}


def tensor_map(w: Warp, address: int) -> TensorMap:
    """The tensor map at a generic address: in the parameters, or in global memory."""
    if address % 64:
        raise Fault("misaligned", f"tensor map at {address:#x}, must be 64-byte aligned")
    at = np.full(LANES, address, np.int64)
    words = read_param(w, at, 8, 8) if address >= PARAM_WINDOW else read_global(w, at, 8, 8)
    raw = np.ascontiguousarray(words[w.first()]).tobytes()  # the rest is unused
    if raw not in _maps:
        try:
            _maps[raw] = TensorMap.decode(raw)
        except ValueError as e:
            raise Fault("tensor_map", str(e)) from e
    return _maps[raw]


# ----- what all of them share -----------------------------------------------------------------------------------------


def granules_of(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """Records of runs of `nbytes` bytes at `offsets` [n] -> [n, nbytes / GRANULE]."""
    return offsets[:, None] // GRANULE + np.arange(-(-nbytes // GRANULE))


def load(
    w: Warp,
    name: str,
    targets: list[tuple[Cta, int]],
    spots: np.ndarray,
    run: int,
    fetch: Callable[[], np.ndarray],
    nbytes: int,
    generic: bool = False,
) -> None:
    """Start a copy into shared memory: runs of `run` bytes at offsets `spots` of each target's CTA.

    targets: (CTA, offset of its mbarrier, which may lie in another CTA of the cluster: (CTA, (CTA, offset))).
    fetch() -> uint8 [runs, run], called when the copy is done. nbytes: what complete_tx counts for each. generic: it is not
    of the asynchronous proxy.
    """
    barriers = []
    for cta, where in targets:
        home, offset = where if isinstance(where, tuple) else (cta, where)
        barrier = home.mbarriers.get(offset)
        if barrier is None:
            raise Fault("barrier", f"no mbarrier was initialised at shared {offset:#x} of CTA {home.rank}")
        for other in (cta, home):
            if other is not w.cta and other.rank not in w.met:
                w.meet_cta(other)
        if not generic:
            initialised_for_async(barrier, w)
        barriers.append(barrier)
        if len(spots):
            w.check_range(cta, int(spots.min()), int(spots.max()) + run)
            granules, epoch = granules_of(spots, run), barrier.phase + 1
            w.note_write(cta, granules, barrier.agent, epoch, generic)
            if w.loads:
                hazards.check_copy(w, cta, granules)
    for barrier in barriers:
        barrier.in_flight += nbytes

    def do():
        data = fetch()
        for (cta, _), barrier in zip(targets, barriers):
            cta.shared.data[spots[:, None] + np.arange(run)] = data
            barrier.in_flight -= nbytes
            barrier.complete_tx(nbytes)

    w.cta.cluster.start(do, name)


class Store:
    """A bulk store: reads shared memory, and writes global memory some time later."""

    def __init__(self, reading: Async, writing: Async, granules: np.ndarray):
        self.reading, self.writing, self.granules = reading, writing, granules
        self.known = False  # the lane has waited for the reading


def store(w: Warp, name: str, lane: int, spots: np.ndarray, run: int, put: Callable[[np.ndarray], None]) -> None:
    """Start a copy out of the CTA's shared memory; it belongs to the lane's open bulk group."""
    cta = w.cta
    granules = granules_of(spots, run)
    if len(spots):
        w.check_range(cta, int(spots.min()), int(spots.max()) + run)
        w.note_read(cta, granules, UNFINISHED)
    groups = w.bulk_groups.setdefault(lane, [[]])
    held = []
    reading = cta.cluster.start(lambda: held.append(cta.shared.data[spots[:, None] + np.arange(run)]), name)
    writing = cta.cluster.start(lambda: put(held.pop()), f"{name} (writes)", reading)
    groups[-1].append(Store(reading, writing, granules))


def mbarrier_places(w: Warp, address: int, ctas: list[Cta], pair: bool) -> list[tuple[Cta, object]]:
    """(CTA, where its mbarrier is) for each destination.

    pair: cta_group::2, the mbarrier is in the even or in the odd CTA of the destination's pair, as `address` is.
    """
    home, offset = w.shared(address), address & OFFSET_MASK
    if len(ctas) == 1 and not pair:
        return [(ctas[0], (home, offset))]
    if not pair:
        return [(cta, offset) for cta in ctas]
    return [(cta, (w.cta.cluster.ctas[cta.rank & ~1 | home.rank & 1], offset)) for cta in ctas]


def multicast(w: Warp, mask: int) -> list[Cta]:
    ctas = [cta for cta in w.cta.cluster.ctas if mask >> cta.rank & 1]
    if mask >> len(w.cta.cluster.ctas) or not ctas:
        raise Fault("multicast", f"mask {mask:#x} in a cluster of {len(w.cta.cluster.ctas)}")
    return ctas


# ----- bulk copies ----------------------------------------------------------------------------------------------------


@op("cp.async.bulk.shared::cluster.global", "cp.async.bulk.shared::cta.global")
def bulk_load(ins: Instruction, d: Decoder) -> Closure:
    target, source, size, bar = ins.operands[:4]
    extra = list(ins.operands[4:])
    at, frm, count, barrier = d.uniform_each(target), d.uniform_each(source), d.uniform_each(size), d.uniform_each(bar)
    mask = d.uniform_each(extra[0], "b16") if "multicast::cluster" in ins.parts else None

    def run(w: Warp):
        for lane in w.lanes():
            address, start, n = at(w, lane), frm(w, lane), count(w, lane)
            check_bulk(address, start, n)
            if not n:
                w.mbarrier(barrier(w, lane))
                continue
            ctas = multicast(w, mask(w, lane)) if mask else [w.shared(address)]
            w.machine.memory.find(start, start + n)
            spots = (address & OFFSET_MASK) + np.arange(0, n, 16)
            fetch = _fetcher(w, start, n)
            load(w, "bulk load", mbarrier_places(w, barrier(w, lane), ctas, False), spots, 16, fetch, n)

    return run


def check_bulk(address: int, other: int, n: int) -> None:
    if address % 16 or other % 16 or n % 16:
        raise Fault("misaligned", f"bulk copy of {n} bytes between {address:#x} and {other:#x}: all must be multiples of 16")


def _fetcher(w: Warp, start: int, n: int) -> Callable[[], np.ndarray]:
    memory = w.machine.memory

    def fetch() -> np.ndarray:
        base, array = memory.find(start, start + n)
        return array[start - base : start - base + n].reshape(-1, 16).copy()

    return fetch


@op("cp.async.bulk.shared::cluster.shared::cta")
def bulk_to_cluster(ins: Instruction, d: Decoder) -> Closure:
    target, source, size, bar = (d.uniform_each(o) for o in ins.operands[:4])

    def run(w: Warp):
        for lane in w.lanes():
            address, start, n = target(w, lane), source(w, lane), size(w, lane)
            check_bulk(address, start, n)
            barrier = w.mbarrier(bar(w, lane))
            if not n:
                continue
            spots = (start & OFFSET_MASK) + np.arange(0, n, 16)
            w.check_range(w.cta, int(spots.min()), int(spots.max()) + 16)
            w.note_read(w.cta, granules_of(spots, 16), barrier.phase + 1, barrier.agent)
            w.visit(w.cta, barrier.agent, barrier.phase + 1)
            cta = w.cta
            load(
                w,
                "bulk copy",
                mbarrier_places(w, bar(w, lane), [w.shared(address)], False),
                (address & OFFSET_MASK) + np.arange(0, n, 16),
                16,
                lambda cta=cta, spots=spots: cta.shared.data[spots[:, None] + np.arange(16)],
                n,
            )

    return run


@op("cp.async.bulk.global.shared::cta", "cp.reduce.async.bulk.global.shared::cta")
def bulk_store(ins: Instruction, d: Decoder) -> Closure:
    target, source, size = (d.uniform_each(o) for o in ins.operands[:3])
    combine = _reduction(ins, ins.parts[-1]) if ins.parts[1] == "reduce" else None
    if "cp_mask" in ins.parts:
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")

    def run(w: Warp):
        for lane in w.lanes():
            address, start, n = target(w, lane), source(w, lane), size(w, lane)
            check_bulk(address, start, n)
            w.machine.memory.find(address, address + n)
            memory = w.machine.memory

            def put(data: np.ndarray, address=address, n=n, memory=memory):
                base, array = memory.find(address, address + n)
                place = array[address - base : address - base + n]
                place[:] = combine(place, data.reshape(-1)) if combine else data.reshape(-1)

            store(w, "bulk store", lane, (start & OFFSET_MASK) + np.arange(0, n, 16), 16, put)

    return run


def _reduction(ins: Instruction, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(old bytes, new bytes) -> bytes of an elementwise reduction."""
    name = next((p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor")), None)
    if name is None:
        raise ValueError("reduction operation")
    if kind in ("bf16", "f16"):
        f = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]

        def half(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            a, b = (numeric.to_float(np.ascontiguousarray(x).view(np.uint16), kind) for x in (old, new))
            return numeric.from_float(f(a, b), kind).view(np.uint8)

        return half
    size = TYPE_BYTES[kind]
    view = {"s": f"i{size}", "f": f"f{size}"}.get(kind[0], f"u{size}")
    f = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]
    return lambda old, new: f(np.ascontiguousarray(old).view(view), np.ascontiguousarray(new).view(view)).view(np.uint8)


@op("cp.async.bulk.commit_group")
def bulk_commit(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        for lane in w.lanes():
            w.bulk_groups.setdefault(int(lane), [[]]).append([])

    return run


@op("cp.async.bulk.wait_group")
def bulk_wait(ins: Instruction, d: Decoder) -> Closure:
    keep, which = ins.operands[0].value, "reading" if "read" in ins.parts else "writing"

    def run(w: Warp):
        waited = []
        for lane in w.lanes():
            groups = w.bulk_groups.get(int(lane))
            if groups:
                waited += groups[: max(len(groups) - 1 - keep, 0)]
        stores = [s for group in waited for s in group]
        if not stores:
            return None

        def then(w: Warp):
            epochs, _ = w.cta.shared.reader(w.agent)
            for s in stores:
                if not s.known:
                    epochs[s.granules] = np.where(epochs[s.granules] == UNFINISHED, w.clock[0, w.agent], epochs[s.granules])
                    s.known = True
            for groups in w.bulk_groups.values():
                while len(groups) > 1 and all(s.known and s.writing.done for s in groups[0]):
                    groups.pop(0)
                for group in groups:
                    for s in group:
                        if not s.known:
                            epochs[s.granules] = UNFINISHED

        text = lambda: f"waits for {sum(not getattr(s, which).done for s in stores)} bulk stores"  # noqa: E731
        return Wait(lambda: all(getattr(s, which).done for s in stores), text, then)

    return run


# ----- TMA tiles ------------------------------------------------------------------------------------------------------


@op("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(ins: Instruction, d: Decoder) -> Closure:
    mode = next((p for p in ins.parts if p.startswith(("tile", "im2col"))), "tile")
    if mode not in ("tile", "tile::gather4", "tile::scatter4"):
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")
    where = [p for p in ins.parts if p.startswith(("shared", "global"))]
    if where[0] == "global":
        return _tensor_store(ins, d, mode)
    target, source, bar = ins.operands[:3]
    extra = list(ins.operands[3:])
    at, barrier = d.uniform_each(target), d.uniform_each(bar)
    map_at, coords = d.uniform_each(Memory(source.base, source.offset), "b64"), _coords(d, source)
    mask = d.uniform_each(extra[0], "b16") if "multicast::cluster" in ins.parts else None
    pair = "cta_group::2" in ins.parts

    def run(w: Warp):
        for lane in w.lanes():
            tile = _tile(tensor_map(w, map_at(w, lane)), mode, coords(w, lane))
            address = at(w, lane)
            ctas = multicast(w, mask(w, lane)) if mask else [w.shared(address)]
            places = mbarrier_places(w, barrier(w, lane), ctas, pair)
            find = _checked(w, tile)
            load(w, "TMA load", places, _spots(tile, address), 16, lambda t=tile, f=find: t.load(f), tile.nbytes)

    return run


def _coords(d: Decoder, m: Memory):
    items = m.coords[0].items if isinstance(m.coords[0], Vector) else m.coords
    get = [d.uniform_each(o) for o in items]
    return lambda w, lane: [(g(w, lane) + 2**31) % 2**32 - 2**31 for g in get]


def _tile(tm: TensorMap, mode: str, coords: list[int]) -> Tile:
    try:
        return tm.tile(coords) if mode == "tile" else gather4(tm, coords[0], coords[1:])
    except (ValueError, NotImplementedError) as e:
        raise Fault("tensor_map", str(e)) from e


def _spots(tile: Tile, address: int) -> np.ndarray:
    """Offsets of the tile's 16-byte chunks in shared memory, swizzled."""
    if address % SMEM_ALIGNMENT:
        raise Fault("misaligned", f"TMA tile at shared {address:#x}, must be {SMEM_ALIGNMENT}-byte aligned")
    return tile.shared(address & OFFSET_MASK)


def _checked(w: Warp, tile: Tile) -> Callable:
    """GlobalMemory.find, after the tile's addresses have been looked up: what is wrong is found at the instruction."""
    find, span = w.machine.memory.find, tile.span()
    if span:
        find(*span)
    return find


def _tensor_store(ins: Instruction, d: Decoder, mode: str) -> Closure:
    target, source = ins.operands[:2]
    map_at, coords = d.uniform_each(Memory(target.base, target.offset), "b64"), _coords(d, target)
    frm = d.uniform_each(source)
    reduce = ins.parts[1] == "reduce"

    def run(w: Warp):
        for lane in w.lanes():
            tm = tensor_map(w, map_at(w, lane))
            tile = _tile(tm, mode, coords(w, lane))
            find = _checked(w, tile)
            combine = _reduction(ins, tm.element) if reduce else None

            def put(data: np.ndarray, tile=tile, find=find, combine=combine):
                if combine:
                    data = combine(tile.raw(find).reshape(-1), data.reshape(-1)).reshape(-1, 16)
                tile.store(find, data)

            store(w, "TMA store", lane, _spots(tile, frm(w, lane)), 16, put)

    return run


@op("tensormap.replace")
def tensormap_replace(ins: Instruction, d: Decoder) -> Closure:
    """Changes one field of a tensor map in global or shared memory."""
    field, kind = ins.parts[3], ins.parts[-1]
    space = next((p.partition("::")[0] for p in ins.parts[4:] if p.startswith(("global", "shared"))), "")
    at, value = d.uniform_each(ins.operands[0]), d.uniform_each(ins.operands[-1], kind)
    ordinal = d.uniform_each(ins.operands[1]) if len(ins.operands) > 2 else lambda w, lane: 0

    def run(w: Warp):
        for lane in w.lanes():
            address = at(w, lane)
            raw = _map_bytes(w, lane, space, address)
            try:
                raw = replaced(raw + bytes(64), field, value(w, lane), ordinal(w, lane))[:64]
            except ValueError as e:
                raise Fault("tensor_map", str(e)) from e
            _put_map_bytes(w, lane, space, address, raw)

    return run


@op("tensormap.cp_fenceproxy")
def tensormap_copy(ins: Instruction, d: Decoder) -> Closure:
    """From shared to global memory, and a fence for those who use the map."""
    target, source = d.uniform_each(ins.operands[0]), d.uniform_each(ins.operands[1])
    if ins.operands[2].value != 128:
        raise ValueError(f"{ins.operands[2].value} bytes; a tensor map has 128")

    def run(w: Warp):
        w.need_all("tensormap.cp_fenceproxy")
        lane = w.first()
        # The second half of a map is unused, and the DSL leaves it unwritten.
        _put_map_bytes(w, lane, "global", target(w, lane), _map_bytes(w, lane, "shared", source(w, lane)))

    return run


def _map_bytes(w: Warp, lane: int, space: str, address: int) -> bytes:
    """The 64 bytes that one lane reads."""
    at = np.full(LANES, address, np.int64)
    values = with_lanes(w, np.arange(LANES) == lane, lambda w: READERS[space](w, at, 8, 8))
    w.need_defined(values, "a tensor map")
    return np.ascontiguousarray(plain(values)[lane]).tobytes()


def _put_map_bytes(w: Warp, lane: int, space: str, address: int, raw: bytes) -> None:
    at, values = np.full(LANES, address, np.int64), np.tile(np.frombuffer(raw, np.uint64), (LANES, 1))
    with_lanes(w, np.arange(LANES) == lane, lambda w: WRITERS[space](w, at, 8, values))


@op("cp.async.bulk.prefetch")
def bulk_prefetch(ins: Instruction, d: Decoder) -> Closure:
    return lambda w: None


# ----- cp.async and st.async ------------------------------------------------------------------------------------------


@op("cp.async.ca", "cp.async.cg")
def cp_async(ins: Instruction, d: Decoder) -> Closure:
    """4, 8 or 16 bytes a lane, in the lane's generic proxy but asynchronous: done when its group has been waited for."""
    at, frm = shared_address(d, ins.operands[0], ins), d.address(ins.operands[1])
    size = ins.operands[2].value
    rest = ins.operands[3:-1] if "L2::cache_hint" in ins.parts else ins.operands[3:]
    ignore = d.predicate(rest[0]) if rest and (isinstance(rest[0], Not) or getattr(rest[0], "type", "") == "pred") else None
    have = d.reg(rest[0]) if rest and ignore is None else None
    if size not in (4, 8, 16):
        raise ValueError(f"copies of {size} bytes")

    def run(w: Warp):
        cta, offsets = w.shared_index(at(w), size)
        lanes = w.lanes()
        valid = np.full(LANES, size) if have is None else w.regs[have].astype(np.int64)
        if ignore is not None:
            valid = np.where(ignore(w), 0, size)
        addresses, memory = frm(w), w.machine.memory
        for lane in lanes:
            if addresses[lane] % size:
                raise Fault("misaligned", f"cp.async of {size} bytes from {int(addresses[lane]):#x}")
            if not 0 <= valid[lane] <= size:
                raise Fault("out_of_bounds", f"cp.async of {size} bytes with {int(valid[lane])} bytes of source")
            if valid[lane]:
                memory.find(int(addresses[lane]), int(addresses[lane] + valid[lane]))
        granules = granules_of(offsets[lanes], size)
        w.note_write(cta, granules)
        cta.shared.write_epoch[granules] = UNFINISHED

        def do():
            for lane in lanes:
                data = np.zeros(size, np.uint8)
                n = int(valid[lane])
                if n:
                    base, array = memory.find(int(addresses[lane]), int(addresses[lane]) + n)
                    start = int(addresses[lane]) - base
                    data[:n] = array[start : start + n]
                cta.shared.data[offsets[lane] : offsets[lane] + size] = data

        operation = w.cta.cluster.start(do, "cp.async")
        w.cp_async[-1].append((operation, cta, granules))

    return run


@op("cp.async.commit_group")
def cp_commit(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        w.cp_async.append([])

    return run


@op("cp.async.wait_group", "cp.async.wait_all")
def cp_wait(ins: Instruction, d: Decoder) -> Closure:
    keep = ins.operands[0].value if ins.operands else -1

    def run(w: Warp):
        groups = w.cp_async if keep < 0 else w.cp_async[: max(len(w.cp_async) - 1 - keep, 0)]
        operations = [o for group in groups for o in group]

        def then(w: Warp):
            for operation, cta, granules in operations:
                _done(operation, cta, granules, w.agent, w.clock[0, w.agent])
            for group in groups:
                group.clear()
            while len(w.cp_async) > 1 and not w.cp_async[0]:
                w.cp_async.pop(0)

        text = lambda: f"waits for {sum(not o[0].done for o in operations)} cp.async"  # noqa: E731
        return Wait(lambda: all(o[0].done for o in operations), text, then)

    return run


def _done(operation: Async, cta: Cta, granules: np.ndarray, agent: int, epoch: int) -> None:
    """The agent's cp.async into these bytes is done, for those who know `epoch` of it; the least of several counts."""
    s, before = cta.shared, operation.epoch
    if epoch < before:
        mine = (s.write_agent[granules] == agent) & (s.write_epoch[granules] == before)
        s.write_epoch[granules] = np.where(mine, epoch, s.write_epoch[granules])
        operation.epoch = int(epoch)


@op("cp.async.mbarrier.arrive")
def cp_mbarrier(ins: Instruction, d: Decoder) -> Closure:
    """Arrives when the lane's cp.asyncs so far are done; with .noinc the arrival was counted at the initialisation."""
    at, noinc = shared_address(d, ins.operands[0], ins), "noinc" in ins.parts

    def run(w: Warp):
        barrier = w.mbarrier(int(at(w)[w.first()]))
        operations = [o for group in w.cp_async for o in group]
        count = int(w.mask.sum())
        if not noinc:
            barrier.pending += count
        clock = w.release()

        def do():
            for operation, cta, granules in operations:
                _done(operation, cta, granules, w.agent, clock[0, w.agent])
            barrier.arrive(clock, count)

        w.cta.cluster.start(do, "cp.async arrival", _All([o[0] for o in operations]))

    return run


class _All:
    """Done when all of some operations are."""

    def __init__(self, operations: list[Async]):
        self.operations = operations

    @property
    def done(self) -> bool:
        return all(o.done for o in self.operations)


@op("st.async")
def st_async(ins: Instruction, d: Decoder) -> Closure:
    """A store into a CTA of the cluster that counts its bytes at an mbarrier there."""
    kind = ins.parts[-1]
    size = TYPE_BYTES[kind]
    idx, at, bar = d.regs(ins.operands[1], kind), d.address(ins.operands[0]), d.address(ins.operands[2])

    def run(w: Warp):
        for lane in w.lanes():
            address = int(at(w)[lane])
            data = np.array([w.regs[i][lane] for i in idx], UINT[size]).view(np.uint8)
            cta = w.shared(address)
            offset = address & OFFSET_MASK
            if offset % len(data):
                raise Fault("misaligned", f"st.async of {len(data)} bytes at shared {offset:#x}")
            places = mbarrier_places(w, int(bar(w)[lane]), [cta], False)
            spots = np.array([offset])
            load(w, "st.async", places, spots, len(data), lambda data=data: data[None], len(data), generic=True)

    return run
