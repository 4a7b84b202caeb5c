"""tcgen05 of sm_100a: tensor memory and the tensor core behind it.

mma, cp and shift are asynchronous: a CTA (with cta_group::2 a pair of CTAs) does them one after another in the order of
their issue, some time until the arrival of a tcgen05.commit behind them. A st is done some time until tcgen05.wait::st; a
ld is done at once, but what it read counts as being read until tcgen05.wait::ld, or until one of its registers is used:
PTX respects these dependencies, and kernels rely on it.

Who may rely on what is kept as for shared memory, in cells of 16 lanes and one column. What the tensor core does for a warp
is an agent of its own (`Warp.tensor_agent`), its clock counts the warp's mma, cp and shift; a commit's arrival passes it on.
A warp may use what is known to it through acquire and release, or through relaxed barriers between tcgen05.fences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from . import hazards, matrix
from .decode import Closure, Decoder, UnsupportedInstruction, op
from .machine import (
    GRANULE,
    LANES,
    NOBODY,
    OFFSET_MASK,
    RESERVED,
    UNDEFINED,
    UNFINISHED,
    Async,
    Cta,
    Fault,
    Finding,
    Mbarrier,
    Wait,
    Warp,
)
from .matrix import TMEM_COLUMNS, TMEM_LANES, TmemMap
from .ops_memory import write_shared
from .ops_sync import shared_address
from .ptx import Const, Instruction, Kernel, Memory, Vector
from .taint import Tainted, plain, taint_of, tainted

CELL_LANES = 16
CELLS = TMEM_LANES // CELL_LANES * TMEM_COLUMNS
ADDRESS_MASK = (1 << 32) - 1
SCALE_ADDRESS_MASK = (1 << 30) - 1  # the two bits above are a scale factor id to software, not part of the address


# ----- tensor memory --------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A collective tcgen05.alloc or dealloc of cta_group::2: complete when both CTAs of the pair have come."""

    columns: int
    ranks: set[int] = field(default_factory=set)
    base: int | None = None


class Tmem:
    """Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, its allocations and its accesses."""

    def __init__(self, cta: Cta):
        rng = cta.cluster.grid.rng
        self.cta = cta
        self.data = np.full(TMEM_LANES * TMEM_COLUMNS, rng.randrange(1 << 32), np.uint32)
        self.written = np.zeros(TMEM_LANES * TMEM_COLUMNS, bool)
        self.allocated = np.zeros(TMEM_COLUMNS, bool)
        self.allocations: dict[int, int] = {}  # first column -> columns
        self.relinquished = False
        self.last_size = TMEM_COLUMNS  # of the allocation before: sizes may not grow
        self.allocs: list[Request] = []  # of the pair, kept by its even CTA
        self.deallocs: list[Request] = []
        self.last: Async | None = None  # the tensor core's last operation
        self.write_agent = np.zeros(CELLS, np.int16)  # NOBODY
        self.write_epoch = np.zeros(CELLS, np.int32)
        self.write_pc = np.zeros(CELLS, np.int32)
        self.read_by = np.zeros(CELLS, bool)  # somebody read it since the last write
        self.reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # agent -> epoch and pc of its last read

    def reader(self, agent: int) -> tuple[np.ndarray, np.ndarray]:
        if agent not in self.reads:
            self.reads[agent] = np.zeros(CELLS, np.int32), np.zeros(CELLS, np.int32)
        return self.reads[agent]

    # --- allocation

    def take(self, base: int, columns: int) -> None:
        self.allocated[base : base + columns] = True
        self.allocations[base] = columns

    def free(self, base: int) -> None:
        """What comes next at these columns starts as if nobody had written there."""
        columns = self.allocations.pop(base)
        self.allocated[base : base + columns] = False
        self.written.reshape(TMEM_LANES, -1)[:, base : base + columns] = False
        for array in (self.write_agent, self.write_epoch, self.read_by):
            array.reshape(-1, TMEM_COLUMNS)[:, base : base + columns] = 0

    def check_allocated(self, columns: np.ndarray, what: str) -> None:
        """columns: of an access, sorted or not."""
        if not self.allocated[columns].all():
            bad = int(columns[~self.allocated[columns]][0])
            raise Fault("out_of_bounds", f"{what} accesses tensor memory column {bad}, which is not allocated")

    def at_exit(self, warp: Warp) -> None:
        if self.allocations:
            left = ", ".join(f"{n} columns at {base}" for base, n in self.allocations.items())
            warp.machine.add(Finding("tcgen05", f"the CTA ends without tcgen05.dealloc of {left}", warp.place()))

    # --- accesses

    def note_read(self, w: Warp, cells: np.ndarray, agent: int, epoch: int) -> None:
        """Check and record a read of `cells` by `agent`, which is the warp or what the tensor core does for it."""
        self._check_known(w, cells, agent, "reads")
        epochs, pcs = self.reader(agent)
        epochs[cells] = epoch
        pcs[cells] = w.pc - 1
        self.read_by[cells] = True

    def note_write(self, w: Warp, cells: np.ndarray, agent: int, epoch: int, verb: str = "overwrites") -> None:
        self._check_known(w, cells, agent, verb)
        if self.read_by[cells].any():
            for reader, (epochs, pcs) in self.reads.items():
                late = epochs[cells] > known(w)[reader]
                if late.any():
                    late = self._not_in_order(w, agent, reader, epochs[cells], late)
                if late.any():
                    cell = int(cells[late][0])
                    self._report(
                        w, cell, f"{verb} {{}}, which {_work(w, reader, 'may still read')}", reader, int(pcs[cell])
                    )
                epochs[cells] = 0
            self.read_by[cells] = False
        self.write_agent[cells] = agent
        self.write_epoch[cells] = epoch
        self.write_pc[cells] = w.pc - 1

    def _check_known(self, w: Warp, cells: np.ndarray, agent: int, verb: str) -> None:
        agents, epochs = self.write_agent[cells], self.write_epoch[cells]
        behind = known(w)[agents] < epochs
        if not behind.any():
            return
        for other in np.unique(agents[behind]).tolist():
            late = self._not_in_order(w, agent, other, epochs, behind & (agents == other))
            if late.any():
                cell = int(cells[late][0])
                if self.write_epoch[cell] == UNFINISHED:
                    text = (
                        f"{verb} {{}} while a tcgen05.st to it may be in flight: no tcgen05.wait::st stands behind that"
                    )
                else:
                    text = f"{verb} {{}} without knowing that {_work(w, other, 'wrote it')}"
                self._report(w, cell, text, other, int(self.write_pc[cell]))

    def _not_in_order(self, w: Warp, agent: int, other: int, epochs: np.ndarray, late: np.ndarray) -> np.ndarray:
        """`late` without what the tensor core does before its operation for `agent` anyway, as it keeps their order."""
        if agent != w.tensor_agent:
            return late
        if other == agent:
            return np.zeros_like(late)
        owner = _owner(w, other)
        if owner is None or owner.tcgen05 is None or pipeline(owner) is not pipeline(w):
            return late
        issued = np.array(owner.tcgen05.issued, np.int32)[np.where(late, epochs, 0)]
        return late & (issued > known(w)[owner.agent])

    def _report(self, w: Warp, cell: int, text: str, other: int, pc: int) -> None:
        lane, column = cell // TMEM_COLUMNS * CELL_LANES, cell % TMEM_COLUMNS
        w.report("race", text.format(f"tensor memory lane {lane}, column {column}"), other, pc)


def _owner(w: Warp, agent: int) -> Warp | None:
    """The warp that the tensor core works for as `agent`."""
    first = w.tensor_agent - w.agent  # both are numbered alike
    n = agent - first - 1
    return w.cta.cluster.warps[n] if n >= 0 else None


def _work(w: Warp, agent: int, verb: str) -> str:
    if _owner(w, agent) is None:
        return f"a tcgen05.ld {verb}" if verb == "may still read" else f"the tcgen05.st that {verb} is done"
    return f"the tensor core {verb}" if verb == "may still read" else f"the tensor core's operation that {verb} is done"


def free_place(memories: list[Tmem], columns: int) -> int | None:
    """Where `columns` columns are free in all of `memories`: the first place, or any under the random policy."""
    taken = np.any([m.allocated for m in memories], axis=0).reshape(-1, columns).any(1)
    places = np.flatnonzero(~taken) * columns
    if not len(places):
        return None
    grid = memories[0].cta.cluster.grid
    return int(grid.rng.choice(places.tolist()) if grid.options.policy == "random" else places[0])


def tmem(cta: Cta) -> Tmem:
    if cta.tmem is None:
        cta.tmem = Tmem(cta)
    return cta.tmem


def pair(w: Warp, group: int, running: bool = True) -> list[Cta]:
    """The CTAs that an operation works on, the even one first. running: they must not have ended."""
    grid = w.machine
    used = grid.cta_group = grid.cta_group or group
    if used != group:
        grid.add(
            Finding("tcgen05", f"tcgen05 with cta_group::{group} in a kernel that uses cta_group::{used}", w.place())
        )
    if group == 1:
        return [w.cta]
    ctas = w.cta.cluster.ctas[w.cta.rank & ~1 :][:2]
    if len(ctas) < 2:
        raise Fault("tcgen05", f"cta_group::2 in a cluster of {len(w.cta.cluster.ctas)}")
    for cta in ctas:
        if running and all(x.done for x in cta.warps):
            raise Fault("tcgen05", f"cta_group::2 while CTA {cta.rank} of the pair has ended")
    return ctas


def pipeline(w: Warp) -> Tmem:
    """Whose `last` the warp's operations queue behind."""
    return tmem(w.cta.cluster.ctas[w.cta.rank & ~1] if w.machine.cta_group == 2 else w.cta)


# ----- what a warp has in flight --------------------------------------------------------------------------------------


class State:
    """What a warp has under way in tensor memory, and what it knows through tcgen05.fence."""

    def __init__(self, w: Warp):
        self.warp = w
        self.loads: list[tuple[int, np.ndarray]] = []  # pc and cells of tcgen05.lds that may not be done
        self.stores: list[tuple[Async, np.ndarray]] = []  # and their cells
        self.serial = 0  # of the last mma, cp or shift
        self.last: dict[int, int] = {}  # lane -> serial of its last one: commit is for those of its thread only
        self.issued = [0]  # serial -> the warp's epoch then
        self.fenced = np.zeros_like(w.clock[0])  # known to tensor memory accesses, through after_thread_sync
        self.released: np.ndarray | None = None  # the clock at before_thread_sync

    def arrive_relaxed(self, barrier: Mbarrier) -> None:
        if self.released is not None:
            np.maximum(barrier.tensor_clock, self.released, out=barrier.tensor_clock)


def state(w: Warp) -> State:
    if w.tcgen05 is None:
        w.tcgen05 = State(w)
    return w.tcgen05


def known(w: Warp) -> np.ndarray:
    """The clock that tensor memory accesses of a warp go by."""
    s = state(w)
    return np.maximum(w.clock[0], s.fenced)


@op("tcgen05.fence::before_thread_sync")
def fence_before(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        state(w).released = known(w)
        w.clock[0, w.agent] += 1

    return run


@op("tcgen05.fence::after_thread_sync")
def fence_after(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        s = state(w)
        np.maximum(s.fenced, w.waited_relaxed, out=s.fenced)

    return run


# ----- allocation -----------------------------------------------------------------------------------------------------


def group_of(ins: Instruction) -> int:
    return 2 if "cta_group::2" in ins.parts else 1


def check_columns(columns: int) -> None:
    if columns not in (32, 64, 128, 256, 512):
        raise Fault("tcgen05", f"{columns} columns of tensor memory: must be a power of two from 32 to 512")


@op("tcgen05.alloc")
def alloc(ins: Instruction, d: Decoder) -> Closure:
    at, count, group = shared_address(d, ins.operands[0], ins), d.uniform(ins.operands[1]), group_of(ins)

    def run(w: Warp):
        w.need_all("tcgen05.alloc")
        columns, address = count(w), int(at(w)[w.first()])
        check_columns(columns)
        memories = [tmem(cta) for cta in pair(w, group)]
        mine = tmem(w.cta)
        if mine.relinquished:
            raise Fault("tcgen05", "tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > mine.last_size:
            w.machine.add(
                Finding("tcgen05", f"allocates {columns} columns after {mine.last_size}: sizes may not grow", w.place())
            )
        mine.last_size = columns
        request = _collective(memories[0].allocs, w, columns, "alloc")

        def ready() -> bool:
            if request.base is None and len(request.ranks) == len(memories):
                request.base = free_place(memories, columns)
                if request.base is not None:
                    for memory in memories:
                        memory.take(request.base, columns)
            return request.base is not None

        def then(w: Warp):
            write_shared(w, np.full(LANES, address), 4, np.full((LANES, 1), request.base, np.uint32))
            w.cta.cluster.progress += 1

        def text() -> str:
            if len(request.ranks) < len(memories):
                return "waits for tcgen05.alloc of the other CTA of the pair"
            return f"waits for {columns} columns of tensor memory; {int((~memories[0].allocated).sum())} are free"

        return Wait(ready, text, then)

    return run


def _collective(requests: list[Request], w: Warp, columns: int, what: str) -> Request:
    """The request of the pair's other CTA that this one joins, or a new one. With one CTA: always complete at once."""
    for request in requests:
        if w.cta.rank not in request.ranks:
            if request.columns != columns:
                raise Fault("tcgen05", f"the CTAs of a pair {what} {request.columns} and {columns} columns")
            break
    else:
        request = Request(columns)
        requests.append(request)
    request.ranks.add(w.cta.rank)
    requests[:] = [r for r in requests if len(r.ranks) < (2 if w.machine.cta_group == 2 else 1)]
    w.cta.cluster.progress += 1
    return request


@op("tcgen05.dealloc")
def dealloc(ins: Instruction, d: Decoder) -> Closure:
    base_of, count, group = d.uniform(ins.operands[0]), d.uniform(ins.operands[1]), group_of(ins)

    def run(w: Warp):
        w.need_all("tcgen05.dealloc")
        base, columns = base_of(w), count(w)
        check_columns(columns)
        memories = [tmem(cta) for cta in pair(w, group, running=False)]
        mine = tmem(w.cta)
        if mine.allocations.get(base) != columns:
            has = ", ".join(f"{n} at {b}" for b, n in mine.allocations.items()) or "nothing"
            raise Fault("tcgen05", f"tcgen05.dealloc of {columns} columns at {base:#x}, allocated is {has}")
        cells = (np.arange(CELLS // TMEM_COLUMNS)[:, None] * TMEM_COLUMNS + np.arange(base, base + columns)).reshape(-1)
        mine.note_write(w, cells, w.agent, 0, "frees")
        mine.free(base)
        request = _collective(memories[0].deallocs, w, columns, "dealloc")
        w.cta.cluster.progress += 1
        grid = w.machine
        # It may wait for the other CTA of the pair, and it may not.
        if (
            group == 1
            or grid.options.policy == "eager"
            or (grid.options.policy == "random" and grid.rng.random() < 0.5)
        ):
            return None
        return Wait(
            lambda: len(request.ranks) == 2, lambda: "waits for tcgen05.dealloc of the other CTA of the pair", None
        )

    return run


@op("tcgen05.relinquish_alloc_permit")
def relinquish(ins: Instruction, d: Decoder) -> Closure:
    group = group_of(ins)

    def run(w: Warp):
        w.need_all("tcgen05.relinquish_alloc_permit")
        pair(w, group, running=False)
        tmem(w.cta).relinquished = True

    return run


# ----- between registers and tensor memory ----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def cells_of(words: TmemMap, address: int) -> tuple[np.ndarray, np.ndarray]:
    """(cells, columns) of the words of a map at an address."""
    return _cells(words.flat(address).reshape(-1))


def _cells(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    touched = np.zeros(CELLS, bool)
    touched[flat // (TMEM_COLUMNS * CELL_LANES) * TMEM_COLUMNS + flat % TMEM_COLUMNS] = True
    cells = np.flatnonzero(touched)
    return cells, np.flatnonzero(touched.reshape(-1, TMEM_COLUMNS).any(0))


def place(words: TmemMap, address: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(flat indices, cells, columns); Fault when the words lie outside of tensor memory."""
    try:
        return words.flat(address), *cells_of(words, address)
    except ValueError as e:
        raise Fault("out_of_bounds", str(e)) from e


def valid(check: Callable, *args):
    """check(*args) of `matrix`; what it does not like is a fault."""
    try:
        return check(*args)
    except ValueError as e:
        raise Fault("tcgen05", str(e)) from e
    except NotImplementedError as e:
        raise Fault("unsupported", str(e)) from e


def _move(ins: Instruction, d: Decoder):
    """Of ld and st: the form, its map, and closure(warp) -> (address, flat, cells), checked."""
    form = matrix.parse_tcgen05_ld(ins.parts)
    is_load = ins.parts[1] == "ld"
    where = ins.operands[1 if is_load else 0]
    at = d.address(where)
    half = 0
    if form.shape == "16x32bx2":
        half = ins.operands[2 if is_load else 1].value
    words = matrix.tcgen05_ld_map(form.shape, form.num, form.pack, half)

    def locate(w: Warp) -> tuple[np.ndarray, np.ndarray]:
        w.need_all(f"tcgen05.{ins.parts[1]}")
        addresses = at(w)
        w.need_defined(addresses, "an address of tensor memory")
        address = int(addresses[w.first()]) & ADDRESS_MASK
        if (addresses[w.mask] != addresses[w.first()]).any():
            raise Fault("tcgen05", "the lanes of a warp have different tensor memory addresses")
        valid(matrix.check_ld_lanes, address, form.shape, w.index)
        flat, cells, columns = place(words, address)
        tmem(w.cta).check_allocated(columns, f"tcgen05.{ins.parts[1]}")
        return flat, cells

    return form, locate


@op("tcgen05.ld")
def load(ins: Instruction, d: Decoder) -> Closure:
    form, locate = _move(ins, d)
    outs = d.outs(ins.operands[0])
    if len(outs) != form.registers:
        raise ValueError(f"{len(outs)} registers, the shape has {form.registers}")
    pc = next(i for i, other in enumerate(d.kernel.instructions) if other is ins)
    for use in first_uses(d.kernel, pc):
        d.before.setdefault(use, []).append(lambda w: loads_done(w, pc))

    def run(w: Warp):
        flat, cells = locate(w)
        memory = tmem(w.cta)
        memory.note_read(w, cells, w.agent, int(UNFINISHED))
        values, taint = memory.data[flat], ~memory.written[flat]
        if form.pack:
            values, taint = matrix.pack_words(values), taint.any(1)
        if taint.any():
            origin = f"tensor memory that nothing was written to, loaded at {w.place()}"
            values = [tainted(v, t, origin) for v, t in zip(values, taint)]
        for i, value in zip(outs, values):
            if i >= 0:
                w.regs[i] = value
        state(w).loads.append((pc, cells))

    return run


def first_uses(kernel: Kernel, load: int) -> list[int]:
    """Instructions that read a register of a tcgen05.ld first, on ways without tcgen05.wait::ld.

    Moves are no use: they may be no instruction at all on hardware.
    """
    code, uses = kernel.instructions, []
    registers = hazards._registers(code[load])[1]
    todo, seen = hazards._next(code, load), set()
    while todo:
        at = todo.pop()
        if at in seen or at >= len(code):
            continue
        seen.add(at)
        ins = code[at]
        reads, writes = hazards._registers(ins)
        done = ins.parts[1:2] == ("wait::ld",)
        if reads & registers and ins.parts[0] == "mov":
            registers = registers | writes
        elif reads & registers:
            uses.append(at)
            done = True
        if not done or ins.guard is not None:
            todo += hazards._next(code, at)
    return uses


def loads_done(w: Warp, pc: int | None = None) -> None:
    """All tcgen05.lds of the warp have read, or those of the instruction at `pc`."""
    s = w.tcgen05
    if s is None or not s.loads:
        return
    epochs, _ = tmem(w.cta).reader(w.agent)
    done = [load for load in s.loads if pc is None or load[0] == pc]
    s.loads = [load for load in s.loads if pc is not None and load[0] != pc]
    for _, cells in done:
        mine = epochs[cells]
        epochs[cells] = np.where(mine == UNFINISHED, w.clock[0, w.agent], mine)
    for _, cells in s.loads:  # some of the cells that others of them read too
        epochs[cells] = UNFINISHED


@op("tcgen05.st")
def store(ins: Instruction, d: Decoder) -> Closure:
    form, locate = _move(ins, d)
    sources = d.regs(ins.operands[-1])
    if len(sources) != form.registers:
        raise ValueError(f"{len(sources)} registers, the shape has {form.registers}")
    nothing = tainted(np.zeros(LANES, np.uint32), np.ones(LANES, bool), UNDEFINED.message)

    def run(w: Warp):
        flat, cells = locate(w)
        memory = tmem(w.cta)
        registers = [nothing if w.regs[i] is UNDEFINED else w.regs[i] for i in sources]
        values = np.stack([plain(r) for r in registers]).view(np.uint32)
        defined = True  # undefined values may be stored, but not be used by those who load them
        if any(type(r) is Tainted for r in registers):
            defined = ~np.stack([np.broadcast_to(taint_of(r), LANES) for r in registers])
            defined = defined[:, None] if form.pack else defined
        if form.pack:
            values = matrix.unpack_words(values)
        memory.note_write(w, cells, w.agent, int(UNFINISHED))

        def do():
            memory.data[flat] = values
            memory.written[flat] = defined

        state(w).stores.append((w.cta.cluster.start(do, "tcgen05.st"), cells))

    return run


@op("tcgen05.wait::ld")
def wait_load(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        w.need_all("tcgen05.wait::ld")
        loads_done(w)

    return run


@op("tcgen05.wait::st")
def wait_store(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        w.need_all("tcgen05.wait::st")
        stores = state(w).stores
        if not stores:
            return None

        def then(w: Warp):
            memory = tmem(w.cta)
            for _, cells in stores:
                mine = (memory.write_agent[cells] == w.agent) & (memory.write_epoch[cells] == UNFINISHED)
                memory.write_epoch[cells] = np.where(mine, w.clock[0, w.agent], memory.write_epoch[cells])
            state(w).stores = []

        text = lambda: f"waits for {sum(not o.done for o, _ in stores)} tcgen05.st"  # noqa: E731
        return Wait(lambda: all(o.done for o, _ in stores), text, then)

    return run


# ----- the tensor core's operations -----------------------------------------------------------------------------------


class Operation:
    """An mma, cp or shift being issued by a lane: its checks, in the name of the warp's tensor agent."""

    def __init__(self, w: Warp, lane: int, what: str):
        s = state(w)
        s.serial += 1
        s.last[int(lane)] = s.serial
        s.issued.append(int(w.clock[0, w.agent]))
        self.w, self.what, self.serial = w, what, s.serial

    def read_shared(self, cta: Cta, chunks: np.ndarray, nbytes: int = 16) -> None:
        """chunks: byte addresses of 16-byte pieces, `nbytes` of each are used."""
        low, high = int(chunks.min()), int(chunks.max()) + 16
        if low < RESERVED or high > cta.shared.size:
            raise Fault("out_of_bounds", f"an operand of {self.what} lies at shared {low:#x}..{high:#x}")
        granules = (chunks.reshape(-1, 1) // GRANULE + np.arange(nbytes // GRANULE)).reshape(-1)
        self.w.note_read(cta, granules, self.serial, self.w.tensor_agent)

    def read(self, cta: Cta, words: TmemMap, address: int) -> Callable[[], np.ndarray]:
        """Check a read of tensor memory; returns what reads it, uint32 of the map's shape."""
        memory = tmem(cta)
        flat, cells, columns = place(words, address)
        memory.check_allocated(columns, self.what)
        memory.note_read(self.w, cells, self.w.tensor_agent, self.serial)
        self.need_written(memory, cells)

        def values() -> np.ndarray:
            self.need_defined(memory, flat)
            return memory.data[flat]

        return values

    def need_written(self, memory: Tmem, cells: np.ndarray) -> None:
        """At the issue: somebody wrote there, or will have, an operation of the tensor core or a store in flight."""
        unwritten = memory.write_agent[cells] == NOBODY
        if unwritten.any():
            cell = int(cells[unwritten][0])
            lane, column = cell // TMEM_COLUMNS * CELL_LANES, cell % TMEM_COLUMNS
            raise Fault(
                "uninitialised",
                f"{self.what} reads tensor memory lane {lane}, column {column}, which nothing was written to",
            )

    def need_defined(self, memory: Tmem, flat: np.ndarray) -> None:
        """When the operation is done: every word has a value."""
        defined = memory.written[flat]
        if not defined.all():
            lane, column = divmod(int(flat[~defined][0]), TMEM_COLUMNS)
            text = f"{self.what} reads tensor memory lane {lane}, column {column}, which nothing was written to"
            raise Fault("uninitialised", text)

    def write(self, cta: Cta, words: TmemMap, address: int, lanes: np.ndarray | None = None) -> np.ndarray:
        """Check a write; returns the flat indices. lanes: bool [128], those that are written, None for all."""
        memory = tmem(cta)
        flat, cells, columns = place(words, address)
        memory.check_allocated(columns, self.what)
        if lanes is not None:
            cells = _cells(flat[lanes[flat // TMEM_COLUMNS]])[0]
        memory.note_write(self.w, cells, self.w.tensor_agent, self.serial)
        return flat

    def start(self, do: Callable[[], None]) -> None:
        queue = pipeline(self.w)
        queue.last = self.w.cta.cluster.start(do, self.what, queue.last)


def put(cta: Cta, flat: np.ndarray, values: np.ndarray) -> None:
    cta.tmem.data[flat] = values
    cta.tmem.written[flat] = True


class SharedMatrix:
    """An operand in the shared memory of one CTA."""

    def __init__(self, operation: Operation, cta: Cta, descriptor: int, rows: int, idesc, side: str):
        self.type_name, self.major = (idesc.a_type, idesc.a_major) if side == "a" else (idesc.b_type, idesc.b_major)
        self.cta, self.rows, self.k = cta, rows, idesc.k
        self.packed = idesc.kind in ("mxf4", "mxf4nvf4")
        self.desc = valid(matrix.SmemDescriptor.decode_tcgen05, descriptor)
        valid(matrix.check_tcgen05_swizzle, idesc, self.desc, self.major)
        bits = matrix.TYPE_BITS[self.type_name]
        padded = bits < 8 and not self.packed
        chunks = valid(matrix.operand_chunks, self.desc, rows, idesc.k, 8 if padded else bits, self.major)
        operation.read_shared(cta, chunks, 2 * bits if padded else 16)

    def read(self) -> np.ndarray:
        data = self.cta.shared.data
        return matrix.read_operand(data, self.desc, self.rows, self.k, self.type_name, self.major, packed=self.packed)


@op("tcgen05.mma")
def mma(ins: Instruction, d: Decoder) -> Closure:
    form = matrix.parse_tcgen05_mma(ins.parts)
    scaled = form.scale_factors > 0
    operands = list(ins.operands)
    d_at, a_at = d.uniform_each(operands[0]), d.uniform_each(operands[1], "b64")
    a_in_tmem = isinstance(operands[1], Memory)
    b_at, idesc_at = d.uniform_each(operands[2], "b64"), d.uniform_each(operands[3])
    rest = operands[4:]
    disabled = [d.uniform_each(o) for o in rest.pop(0).items] if rest and isinstance(rest[0], Vector) else []
    if disabled and (len(disabled) != 4 * form.cta_group or form.ws or scaled):
        raise ValueError(f"{len(disabled)} registers of disable-output-lane")
    scales = [d.uniform_each(rest.pop(0)) for _ in range(2)] if scaled else []
    accumulate = d.predicate(rest.pop(0))
    exponent, zero_mask = 0, None
    if rest and form.ws:
        zero_mask = d.uniform_each(rest.pop(0), "b64")
    elif rest and isinstance(rest[0], Const):
        exponent = rest.pop(0).value
        if form.kind not in ("f16", "tf32") or not 0 <= exponent <= 15:
            raise ValueError(f"scale-input-d {exponent}")
    if rest:
        raise ValueError(f"operand {rest[0]}")

    def run(w: Warp):
        for lane in w.lanes():
            mask = None
            if disabled:
                bits = np.array([get(w, lane) for get in disabled], np.uint32)
                mask = ~np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool).reshape(form.cta_group, -1)
            issue(
                w,
                lane,
                form,
                idesc_at(w, lane),
                d_at(w, lane) & ADDRESS_MASK,
                a_at(w, lane),
                a_in_tmem,
                b_at(w, lane),
                bool(accumulate(w)[lane]),
                exponent=exponent,
                lanes=mask,
                zero_mask=zero_mask(w, lane) if zero_mask else None,
                scales=[get(w, lane) & SCALE_ADDRESS_MASK for get in scales],
            )

    return run


def issue(
    w: Warp,
    lane: int,
    form: matrix.Tcgen05Mma,
    idesc_bits: int,
    d_address: int,
    a: int,
    a_in_tmem: bool,
    b: int,
    accumulate: bool,
    *,
    exponent: int,
    lanes: np.ndarray | None,
    zero_mask: int | None,
    scales: list[int],
) -> None:
    """Check an mma and queue it. a: descriptor or tensor memory address. lanes: bool [CTAs, 128], which D lanes to write."""
    group, ws = form.cta_group, form.ws
    ctas = pair(w, group)
    idesc = valid(matrix.decode_instruction, idesc_bits, form.kind)
    valid(matrix.check_tcgen05_shape, idesc, group, ws)
    valid(matrix.check_tmem_lane, d_address, idesc.m, group, ws)
    operation = Operation(w, lane, "tcgen05.mma")
    zeros, shift = None, 0
    if zero_mask is not None:
        zeros, shift = valid(matrix.zero_column_mask, zero_mask, idesc.m, idesc.n)
    rows_a, rows_b = matrix.operand_rows(idesc.m, idesc.n, group)
    d_map = valid(matrix.tcgen05_d_map, idesc.m, idesc.n, group, ws)
    packed = idesc.kind in ("mxf4", "mxf4nvf4")
    b_matrices = [SharedMatrix(operation, cta, b, rows_b + shift, idesc, "b") for cta in ctas]
    parts = []
    for i, cta in enumerate(ctas):
        if a_in_tmem:
            valid(matrix.check_tmem_lane, a & ADDRESS_MASK, idesc.m, group, ws)
            words = matrix.tcgen05_a_map(idesc.m, 8, group, ws)
            read_a = _from_tmem(operation.read(cta, words, a & ADDRESS_MASK), idesc.a_type, packed)
        else:
            read_a = SharedMatrix(operation, cta, a, rows_a, idesc, "a").read
        scale_a = scale_b = None
        if scales:
            split = group == 2 and idesc.m == 128
            read = operation.read(cta, matrix.scale_factor_map(rows_a), scales[0])
            scale_a = _scale(read, form.scale_factors, idesc.scale_a_id)
            read = operation.read(cta, matrix.scale_factor_map(idesc.n, split), scales[1])
            scale_b = _scale(read, form.scale_factors, idesc.scale_b_id)
        if accumulate:
            flat, cells, _ = place(d_map, d_address)
            if lanes is not None:
                cells = _cells(flat[lanes[i][flat // TMEM_COLUMNS]])[0]
            operation.need_written(tmem(cta), cells)
        flat = operation.write(cta, d_map, d_address, None if lanes is None else lanes[i])
        keep = None if lanes is None else lanes[i][flat // TMEM_COLUMNS]
        parts.append((cta, flat, keep, read_a, scale_a, scale_b))

    def do():
        right = np.concatenate([m.read() for m in b_matrices])[shift:]
        results = []
        for cta, flat, keep, read_a, scale_a, scale_b in parts:
            c = None
            if accumulate:
                operation.need_defined(cta.tmem, flat if keep is None else flat[keep])
                c = cta.tmem.data[flat]
                c = c.astype(np.uint16) if idesc.d_type == "f16" else c
            results.append(
                matrix.mma(
                    read_a(),
                    idesc.a_type,
                    right,
                    idesc.b_type,
                    c,
                    d_type=idesc.d_type,
                    negate_a=idesc.negate_a,
                    negate_b=idesc.negate_b,
                    saturate=idesc.saturate,
                    scale_c_exponent=exponent,
                    scale_a=scale_a() if scale_a else None,
                    scale_b=scale_b() if scale_b else None,
                    scale_type=idesc.scale_type or "ue8m0",
                    zero_columns=zeros,
                ).astype(np.uint32, copy=False)
            )
        for (cta, flat, keep, *_), values in zip(parts, results):
            put(cta, flat if keep is None else flat[keep], values if keep is None else values[keep])

    operation.start(do)


def _from_tmem(read: Callable[[], np.ndarray], type_name: str, packed: bool) -> Callable[[], np.ndarray]:
    def elements() -> np.ndarray:
        a = matrix.tmem_a_elements(read(), type_name, packed=packed)
        return a[0] if len(a) == 1 else a

    return elements


def _scale(read: Callable[[], np.ndarray], factors: int, factor_id: int) -> Callable[[], np.ndarray]:
    """All groups of lanes should hold the same factors; those of the first are taken."""
    return lambda: valid(matrix.scale_factors, read()[0], factors, factor_id)


@op("tcgen05.cp")
def copy(ins: Instruction, d: Decoder) -> Closure:
    form = matrix.parse_tcgen05_cp(ins.parts)
    at, source = d.uniform_each(ins.operands[0]), d.uniform_each(ins.operands[1], "b64")
    used = {"b4x16_p64": 8, "b6x16_p32": 12}.get(form.source_format, 16)

    def run(w: Warp):
        for lane in w.lanes():
            ctas = pair(w, form.cta_group)
            operation = Operation(w, lane, "tcgen05.cp")
            desc = valid(matrix.SmemDescriptor.decode_tcgen05, source(w, lane))
            chunks = valid(matrix.operand_chunks, desc, form.rows, form.row_bytes, 8, "K")
            flats = []
            for cta in ctas:  # each from its own shared memory
                operation.read_shared(cta, chunks, used)
                flats.append(operation.write(cta, form.words, at(w, lane) & ADDRESS_MASK))

            def do(ctas=ctas, flats=flats, chunks=chunks):
                for cta, flat in zip(ctas, flats):
                    data = cta.shared.data.reshape(-1, 16)[chunks >> 4]
                    if form.source_format:
                        data = matrix.decompress(data, form.source_format, central=True)
                    words = np.ascontiguousarray(data).view(np.uint32).reshape(form.rows, -1)
                    put(cta, flat, np.broadcast_to(words, flat.shape))

            operation.start(do)

    return run


@op("tcgen05.shift")
def shift(ins: Instruction, d: Decoder) -> Closure:
    at, group = d.uniform_each(ins.operands[0]), group_of(ins)
    target, source = matrix.tcgen05_shift_map()

    def run(w: Warp):
        for lane in w.lanes():
            address = at(w, lane) & ADDRESS_MASK
            if (address >> 16) % LANES:
                raise Fault("tcgen05", f"tcgen05.shift at lane {address >> 16}, must be a multiple of 32")
            operation = Operation(w, lane, "tcgen05.shift")
            moves = [
                (cta, operation.read(cta, source, address), operation.write(cta, target, address))
                for cta in pair(w, group)
            ]

            def do(moves=moves):
                for cta, read, flat in moves:
                    put(cta, flat, read())

            operation.start(do)

    return run


@op("tcgen05.commit")
def commit(ins: Instruction, d: Decoder) -> Closure:
    at, group = shared_address(d, ins.operands[0], ins), group_of(ins)
    mask = d.uniform_each(ins.operands[1], "b16") if "multicast::cluster" in ins.parts else None

    def run(w: Warp):
        addresses = at(w)
        for lane in w.lanes():
            pair(w, group)
            address, s = int(addresses[lane]), state(w)
            ctas = w.cta.cluster.ctas
            targets = [w.shared(address)]
            if mask:
                bits = mask(w, lane)
                targets = [cta for cta in ctas if bits >> cta.rank & 1]
                if bits >> len(ctas) or not bits:
                    raise Fault("multicast", f"mask {bits:#x} in a cluster of {len(ctas)}")
            barriers = [w.mbarrier(cta.rank << 24 | address & OFFSET_MASK) for cta in targets]
            clock = w.release()
            np.maximum(clock[0], s.fenced, out=clock[0])
            clock[:, w.tensor_agent] = s.last.get(int(lane), 0)

            def arrive(barriers=barriers, clock=clock):
                for barrier in barriers:
                    barrier.arrive(clock)

            queue = pipeline(w)
            # Not the tensor core's `last`: what comes behind does not wait for an arrival.
            w.cta.cluster.start(arrive, "tcgen05.commit", queue.last)

    return run


@op("tcgen05.mma.sp", "tcgen05.mma.ws.sp")
def sparse(ins: Instruction, d: Decoder) -> Closure:
    raise UnsupportedInstruction(f"PTX line {ins.line}: sparse matrices are not emulated: {ins.opcode}")
