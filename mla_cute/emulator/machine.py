"""The machine: memory, barriers and warps of one launch, and the scheduler that runs them. It finds what hardware hides.

    Launch ──► Grid ──► Cluster ──► Cta ──► Warp (32 lanes, registers, clock)
                          │           ├─ Shared  bytes, and who wrote and read each of them last
                          │           └─ barriers: named, mbarrier
                          └─ asynchronous operations in flight

Instructions are closures made by `decode` (handlers in the `ops_*` files): closure(warp) runs one instruction for the
active lanes, and returns None or a `Wait`.

Happens-before is kept as vector clocks (the idea is FastTrack's). An agent is a warp, or the asynchronous writes that one
mbarrier signals. Every access to shared memory is compared with the last write and the reads of these bytes: when the warp
does not know of them, through a barrier, it is a race. A second clock says what of it the asynchronous proxy (TMA, tensor
cores) may rely on: generic stores enter it by `fence.proxy.async` only. So neither check depends on the schedule, which is
random: the order of warps, how long each runs, and when asynchronous work is done (at once, late, or at any time between).
"""

from __future__ import annotations

import bisect
import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .global_order import PLACES, Event, GlobalOrder
from .taint import Tainted, plain

LANES = 32
RESERVED = 1024  # bytes of shared memory below the kernel's own, as on hardware
RANK_SHIFT = 24  # shared::cluster address = rank of the CTA in its cluster << 24 | offset
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_WINDOW, PARAM_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61, 1 << 62  # generic addresses of the other spaces
GRANULE = 2  # bytes that share one record of who accessed them
UNFINISHED = np.int32(2**31 - 1)  # epoch of a read that is still going on
NOBODY = 0  # agent of memory that was never written
MBARRIERS = 128  # at most, in one CTA
ALL_LANES = np.ones(LANES, bool)
MAX_FINDINGS = 50
POLICIES = ("eager", "lazy", "random")
NEAR = 1 << 24  # bytes from a tensor at which an address outside is still told as its
MAX_EARLY = 32  # clusters of a dependent launch that end before the launch ahead of it starts


@dataclass(frozen=True)
class Place:
    """An instruction of a kernel, and who ran it."""

    kernel: str
    cta: tuple[int, int, int]
    warp: int
    ptx_line: int
    text: str
    source: tuple[str, int] | None  # Python file and line

    def __str__(self) -> str:
        where = f"{self.source[0].rpartition('/')[2]}:{self.source[1]}, " if self.source else ""
        text = self.text if len(self.text) < 90 else self.text[:87] + "..."
        return f"{self.kernel} cta {self.cta} warp {self.warp}: {where}PTX line {self.ptx_line}: {text}"


@dataclass(frozen=True)
class Finding:
    """Something a correct kernel does not do. kind is one word of a fixed list, see README of the emulator."""

    kind: str
    message: str
    place: Place | None = None
    other: Place | None = None  # of a race: the earlier access

    def __str__(self) -> str:
        text = f"{self.kind}: {self.message}" + (f"\n    at {self.place}" if self.place else "")
        return text + (f"\n    against {self.other}" if self.other else "")


class Fault(Exception):
    """Raised by a handler: the launch cannot go on."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class EmulationError(RuntimeError):
    """A launch was stopped; `findings` says why, the last one being the reason."""

    def __init__(self, findings: list[Finding]):
        super().__init__(str(findings[-1]))
        self.findings = findings


@dataclass(frozen=True)
class Options:
    """How a launch is run. The seed decides everything random; `policy` when asynchronous work is done."""

    seed: int = 0
    policy: str = "random"  # one of POLICIES
    resident: int = 2  # clusters that run at the same time
    max_idle: int = 4_000_000  # instructions without progress that mean a livelock; a kernel may long keep all in registers

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy: must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.resident < 1:
            raise ValueError(f"resident: must be at least 1, got {self.resident}")

    @classmethod
    def schedule(cls, n: int) -> Options:
        """The n-th schedule: the first three are eager, lazy and random, the others random with other seeds."""
        return cls(seed=n, policy=POLICIES[min(n, 2)], resident=1 + n % 3)


# ----- values that are not there --------------------------------------------------------------------------------------


class Missing:
    """In place of a register's array: reading it is a fault."""

    def __init__(self, kind: str, message: str):
        self.kind, self.message = kind, message

    def __array__(self, *args, **kwargs):
        raise Fault(self.kind, self.message)

    def __getattr__(self, name):
        raise Fault(self.kind, self.message)

    def _fault(self, *args):
        raise Fault(self.kind, self.message)

    # Python looks operators up in the class, not by __getattr__.
    __getitem__ = __invert__ = __neg__ = __add__ = __sub__ = __mul__ = __and__ = __or__ = __xor__ = _fault
    __lshift__ = __rshift__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = _fault


class Renamed(Missing):
    """In place of a register's array: moves of registers that are still to be written. Compilers make them early, by name only.

    pieces: of 2 bytes each, (what is in the register, its number, which half word of it).
    """

    def __init__(self, pieces: list[tuple]):
        first = next(source for source, _, _ in pieces if isinstance(source, Missing))
        super().__init__(first.kind, first.message)
        self.pieces = pieces

    def value(self, result: Callable[[object, int], np.ndarray | None]) -> np.ndarray | None:
        """The array, when result(source, register) knows all of the sources."""
        halves = []
        for source, register, half in self.pieces:
            v = result(source, register) if isinstance(source, Missing) else source
            if v is None:
                return None
            halves.append(np.ascontiguousarray(v).view(np.uint16).reshape(LANES, -1)[:, half])
        return np.stack(halves, axis=1).view(f"u{2 * len(halves)}")[:, 0]


def pieces_of(value, register: int, nbytes: int) -> list[tuple]:
    """As in `Renamed`, of a register of `nbytes` bytes. Fault when the value is missing for good."""
    if type(value) is Renamed:
        return value.pieces
    if (type(value) is not np.ndarray and not getattr(type(value), "may_move", False)) or nbytes < 2:
        value._fault()
    return [(value, register, half) for half in range(nbytes // 2)]


UNDEFINED = Missing("uninitialised", "reads a register that nothing was written to")


@dataclass
class Wait:
    """Why a warp does not go on: until ready(); then `then(warp)` and the next instruction."""

    ready: Callable[[], bool]
    text: Callable[[], str]
    then: Callable[[Warp], None] | None = None
    give_up: Callable[[Warp], None] | None = None  # instead of `then`, where the instruction may time out


# ----- memory ---------------------------------------------------------------------------------------------------------


class GlobalMemory:
    """The address ranges that kernels may touch: those of the tensors that were passed, at their real addresses."""

    def __init__(self):
        self.starts: list[int] = []
        self.ranges: list[tuple[int, int, np.ndarray, str]] = []  # start, end, bytes from start & ~15, name
        self.keep: list = []

    def add(self, address: int, size: int, name: str, keep=None) -> None:
        """[address, address + size) may be accessed; overlapping ranges become one, those that only touch do not."""
        if size <= 0:
            return
        if not address:
            raise ValueError(f"{name}: must have memory, got {size} bytes at address 0")
        end, names = address + size, [name]
        for start, stop, _, other in list(self.ranges):
            if start < end and address < stop:
                address, end = min(start, address), max(stop, end)
                names.append(other)
                i = self.starts.index(start)
                del self.starts[i], self.ranges[i]
        low = address & ~15
        array = np.frombuffer((ctypes.c_uint8 * ((end - low + 15) & ~15)).from_address(low), np.uint8)
        i = bisect.bisect(self.starts, address)
        self.starts.insert(i, address)
        self.ranges.insert(i, (address, end, array, ", ".join(dict.fromkeys(names))))
        self.keep.append(keep)

    def find(self, low: int, high: int) -> tuple[int, np.ndarray]:
        """(address of the array's first byte, array) of the range that holds [low, high). Fault when there is none."""
        i = bisect.bisect(self.starts, low) - 1
        if i >= 0:
            _, end, array, _ = self.ranges[i]
            if high <= end:
                return self.starts[i] & ~15, array
        raise Fault("out_of_bounds", f"global access to {self.describe(low, high)}")

    def describe(self, low: int, high: int) -> str:
        text = f"{low:#x}..{high:#x}, in no tensor"
        distances = [max(start - low, low - end, 0) for start, end, _, _ in self.ranges]
        distance = min(distances, default=NEAR)
        if distance >= NEAR:
            return text
        start, end, _, name = self.ranges[distances.index(distance)]
        at = f"{name} + {low - start}" if low >= start else f"{start - low} bytes before {name}"
        return f"{text} ({at}, which has {end - start} bytes)"

    def index(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(array of `size`-byte elements, index of each address into it); all in ranges, and aligned.

        addresses: [lanes], or [lanes, elements] with the elements of a lane one behind the other.
        """
        low, high = int(addresses.min()), int(addresses.max()) + size
        try:
            base, array = self.find(low, high)
        except Fault:
            base, array = self._several(addresses, size, low, high)
        offset = addresses - base
        if size > 1 and (offset & (size - 1)).any():
            bad = int(addresses[(offset & (size - 1)) != 0][0])
            raise Fault("misaligned", f"global access of {size} bytes at {bad:#x}")
        return array.view(f"u{size}"), offset // size

    def _several(self, addresses: np.ndarray, size: int, low: int, high: int) -> tuple[int, np.ndarray]:
        """As find, of lanes that may address different ranges: the array has all of them, and what lies between."""
        for lane in np.unique(addresses.reshape(len(addresses), -1), axis=0):
            self.find(int(lane[0]), int(lane[-1]) + size)
        low &= ~15
        return low, np.frombuffer((ctypes.c_uint8 * ((high - low + 15) & ~15)).from_address(low), np.uint8)


class Shared:
    """Shared memory of one CTA, with its accesses. `size` counts from offset 0 on, reserved bytes included."""

    def __init__(self, size: int, rng: random.Random):
        self.size = size
        self.data = np.full((size + 15) & ~15, rng.randrange(256), np.uint8)
        n = len(self.data) // GRANULE
        self.write_agent = np.zeros(n, np.int16)  # NOBODY
        self.write_epoch = np.ones(n, np.int32)  # nobody's epoch 1: no clock knows it
        self.write_pc = np.zeros(n, np.int32)
        self.read_mask = np.zeros(n, np.uint64)  # bit agent % 64: it read since the last write
        self.reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # agent -> epoch and pc of its last read

    def reader(self, agent: int) -> tuple[np.ndarray, np.ndarray]:
        if agent not in self.reads:
            n = len(self.write_agent)
            self.reads[agent] = np.zeros(n, np.int32), np.zeros(n, np.int32)
        return self.reads[agent]


class Mbarrier:
    """An mbarrier object in shared memory; its phase n is complete when pending and tx have come down to 0."""

    def __init__(self, offset: int, count: int, agent: int, clock_size: int):
        self.offset, self.agent = offset, agent
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self.clock = np.zeros((2, clock_size), np.int32)  # of the arrivals, generic and asynchronous proxy
        self.done = np.zeros((2, clock_size), np.int32)  # of the phases that are complete
        self.init_agent = self.init_epoch = 0
        self.fenced = False  # initialisation made visible to the asynchronous proxy
        self.in_flight = 0  # bytes of the copies under way that complete_tx here
        self.tensor_clock = np.zeros(clock_size, np.int32)  # of tcgen05.fence in front of relaxed arrivals

    def arrive(self, clock: np.ndarray | None, count: int = 1) -> None:
        """Counts `count` arrivals that release `clock` [2, agents]."""
        if clock is not None:
            np.maximum(self.clock, clock, out=self.clock)
        self.pending -= count
        if self.pending < 0:
            raise Fault("barrier", f"{self} got more arrivals than the {self.expected} it was initialised with")
        self.check()

    def check(self) -> None:
        if self.pending == 0 and self.tx == 0:
            if self.in_flight:
                text = f"phase {self.phase} of the {self} is complete while {self.in_flight} bytes of its copies are under way"
                raise Fault("barrier", f"{text}; expect_tx is too small")
            self.phase += 1
            self.pending = self.expected
            np.maximum(self.done, self.clock, out=self.done)
            self.done[:, self.agent] = self.phase

    def complete_tx(self, count: int) -> None:
        self.tx -= count
        self.check()

    def __str__(self) -> str:
        return f"mbarrier at shared {self.offset:#x}"

    def state(self) -> str:
        size = f"{self.tx} bytes missing" if self.tx >= 0 else f"{-self.tx} bytes more than expect_tx said"
        return f"phase {self.phase}, {self.pending} of {self.expected} arrivals missing, {size}"


class NamedBarrier:
    """bar.sync / bar.arrive: complete when `expected` threads have come."""

    def __init__(self, clock_size: int):
        self.expected = 0
        self.given = 0  # as the instruction says: `expected` is less by the warps that have ended, when it gives no count
        self.whole = False  # no arrival gave a count: it is for the threads of the CTA that have not ended
        self.arrived = 0
        self.round = 0
        self.clock = np.zeros((2, clock_size), np.int32)
        self.done = np.zeros((2, clock_size), np.int32)
        self.flags = [0, True, False]  # bar.red: popc, and, or
        self.result = (0, True, False)

    def arrive(self, threads: int, expected: int, clock: np.ndarray, number: int, ended: int | None = None) -> int:
        """Returns the round that completes with this arrival or a later one.

        ended: of the expected threads, for a barrier of the whole CTA, those that have ended and are not waited for.
        """
        if self.arrived and expected != self.given:
            raise Fault("barrier", f"barrier {number} is used with {expected} threads while {self.given} are expected")
        self.whole = ended is not None and (self.whole or not self.arrived)
        self.given = expected
        self.expected = expected - ended if self.whole else expected
        np.maximum(self.clock, clock, out=self.clock)
        self.arrived += threads
        mine = self.round
        if self.arrived > self.expected:
            raise Fault("barrier", f"barrier {number} got {self.arrived} threads, {self.expected} were expected")
        self.check()
        return mine

    def leave(self, threads: int) -> None:
        """Threads of the CTA end: a barrier of all of them does not wait for these."""
        if self.arrived and self.whole:
            self.expected -= threads
            self.check()

    def check(self) -> None:
        if self.arrived == self.expected:
            self.arrived = 0
            self.round += 1
            self.done = self.clock.copy()
            self.result, self.flags = tuple(self.flags), [0, True, False]


# ----- threads --------------------------------------------------------------------------------------------------------


class Warp:
    """32 lanes with one program counter, or several while they have diverged (`groups`)."""

    def __init__(self, cta: Cta, index: int):
        self.cta, self.index = cta, index
        self.machine = cta.cluster.grid
        self.agent = 1 + cta.rank * cta.cluster.warps_per_cta + index
        self.bit = np.uint64(1 << (self.agent % 64))
        # What the tensor core does for this warp: an agent with its own clock, behind those of warps and mbarriers.
        self.tensor_agent = self.agent + len(cta.cluster.ctas) * (cta.cluster.warps_per_cta + MBARRIERS)
        self.clock = np.zeros((2, cta.cluster.clock_size), np.int32)  # generic and asynchronous proxy
        self.clock[0, self.agent] = 1
        threads = cta.threads
        self.live = np.arange(LANES) + index * LANES < threads
        self.mask = self.live
        self.full = bool(self.live.all())  # every lane is active
        self.pc = 0
        self.groups: list[tuple[int, np.ndarray]] = []  # the other lanes, when they have diverged
        self.meet = UNREACHED  # the smallest pc among `groups`
        self.wait: Wait | None = None
        self.done = False
        self.count = 0  # instructions run
        self.weight = 1.0  # of the scheduler's choice
        self.registers_limit = 0
        self.bulk_groups: dict[int, list[list]] = {}  # lane -> groups of bulk operations, the last one open
        self.cp_async: list[list] = [[]]
        self.wgmma = None  # state of the warp's wgmma pipeline, see ops_wgmma
        self.cluster_round: int | None = None  # of barrier.cluster, between arrive and wait
        self.fenced = self.clock.copy()  # what a relaxed arrival releases: the clock at the last fence
        self.fenced_wide = self.fenced  # the same of a fence that other clusters may rely on
        self.relaxed: np.ndarray | None = None  # what relaxed waits have seen; a fence acquires it
        self.seen: list[Event] = []  # and relaxed loads of global memory
        self.loads: dict[int, tuple[Cta, np.ndarray]] = {}  # pc -> granules of loads that may not be done, see hazards
        self.met: set[int] = set()  # ranks of the CTAs that are known to have started
        self.renamed: set[int] = set()  # registers that hold a Renamed
        self.tcgen05 = None  # the warp's tensor memory accesses, see ops_tcgen05
        self.waited_relaxed = np.zeros(cta.cluster.clock_size, np.int32)  # clock of relaxed waits, for tcgen05.fence
        self.local: dict[str, np.ndarray] = {}
        self.hits = self.machine.hits.setdefault(index, [0] * len(self.machine.program.code))
        self.regs = self.machine.program.registers_of(self)

    # --- lanes

    def lanes(self) -> np.ndarray:
        return np.flatnonzero(self.mask)

    def first(self) -> int:
        return int(self.mask.argmax())

    def write(self, index: int, value: np.ndarray) -> None:
        """Set a register in the active lanes."""
        self.regs[index] = value if self.full else self.merged(self.regs[index], value)

    def merged(self, old, value: np.ndarray) -> np.ndarray:
        if type(old) is Missing:
            old = np.zeros((), value.dtype)
        mask = self.mask if value.ndim == 1 else self.mask[:, None]
        return np.where(mask, value, old)

    def need_all(self, what: str) -> None:
        """For .aligned instructions: the whole warp must be here."""
        if not self.full and not (self.mask == self.live).all():
            raise Fault("divergence", f"{what} by a part of the warp ({int(self.mask.sum())} of {int(self.live.sum())})")

    def jump(self, target: int, taken: np.ndarray | None = None) -> None:
        """Go to `target`: all active lanes, or those of `taken` while the others go on at the next instruction."""
        if taken is None:
            self.pc = target
            return
        self.park(self.pc, self.mask & ~taken)
        self.pc, self.mask, self.full = target, taken, False
        self.regroup()

    def park(self, pc: int, mask: np.ndarray) -> None:
        for i, (other, lanes) in enumerate(self.groups):
            if other == pc:
                self.groups[i] = pc, lanes | mask
                return
        self.groups.append((pc, mask))
        self.meet = min(self.meet, pc)

    def regroup(self) -> None:
        """The lanes that are farthest behind go on; those at the same place go together."""
        if self.mask is not None:
            self.park(self.pc, self.mask)
        self.groups.sort(key=lambda group: group[0])
        self.pc, self.mask = self.groups.pop(0)
        self.meet = self.groups[0][0] if self.groups else UNREACHED
        self.full = bool(self.mask.all())

    def exit(self) -> None:
        self.live = self.live & ~self.mask
        if self.groups:
            self.mask = None
            self.regroup()
        else:
            self.done = True
            self.check_left()
            self.cta.warp_done(self)

    def check_left(self) -> None:
        """No wgmma may be under way when a warp ends. Bulk stores may: memory is not given away before they have read it."""
        if self.wgmma is not None and self.wgmma.all():
            self.machine.add(Finding("in_flight", "ends while wgmmas are in flight; wgmma.wait_group is missing", self.place()))

    def rename(self, out: int, pieces: list[tuple]) -> None:
        self.regs[out] = Renamed(pieces)
        self.renamed.add(out)

    def settle(self, result: Callable[[object, int], np.ndarray | None]) -> list[int]:
        """Give the moved registers whose sources are known now their values; returns which."""
        settled = []
        for i in list(self.renamed):
            value = self.regs[i]
            if type(value) is Renamed:
                value = value.value(result)
                if value is None:
                    continue
                self.regs[i] = value
                settled.append(i)
            self.renamed.discard(i)
        return settled

    def need_defined(self, value: np.ndarray, use: str) -> None:
        """Fault when an active lane's value comes from memory that nothing was written to."""
        if type(value) is Tainted:
            taint = value.taint.reshape(LANES, -1).any(1)
            if taint[self.mask].any():
                raise Fault("uninitialised", f"{use} depends on {value.origin}")

    # --- happens-before

    def release(self) -> np.ndarray:
        """The clock that an arrival passes on; what this warp does from now on is not in it."""
        clock = self.clock.copy()
        self.clock[0, self.agent] += 1
        return clock

    def acquire(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def fence_proxy_async(self) -> None:
        np.maximum(self.clock[1], self.clock[0], out=self.clock[1])
        self.clock[0, self.agent] += 1

    def fence(self, is_wide: bool = False) -> None:
        """A fence of the generic proxy: relaxed arrivals behind it release, relaxed waits before it acquire.

        is_wide: its scope is more than the cluster.
        """
        if self.relaxed is not None:
            self.acquire(self.relaxed)
        if is_wide:
            for event in self.seen:
                self.machine.order.learn(self, event)
            self.seen = []
        self.fenced = self.release()
        if is_wide:
            self.fenced_wide = self.fenced

    # --- shared memory

    def shared(self, address: int) -> Cta:
        """The CTA of the cluster that a shared address belongs to."""
        rank = address >> RANK_SHIFT
        ctas = self.cta.cluster.ctas
        if not 0 <= rank < len(ctas):
            raise Fault("out_of_bounds", f"shared address {address:#x} is of CTA {rank} of a cluster of {len(ctas)}")
        if rank != self.cta.rank and rank not in self.met:
            self.meet_cta(ctas[rank])
        return ctas[rank]

    def meet_cta(self, cta: Cta) -> None:
        """Before the first access to shared memory of another CTA of the cluster: it must have started."""
        first = 1 + cta.rank * cta.cluster.warps_per_cta
        if not self.clock[0, first : first + cta.cluster.warps_per_cta].any():
            text = f"accesses shared memory of CTA {cta.rank} without knowing that it has started; barrier.cluster is missing"
            self.machine.add(Finding("race", text, self.place()))
        self.met.add(cta.rank)

    def visit(self, cta: Cta, agent: int, epoch: int) -> None:
        """Note that `cta` must not end before it knows `epoch` of `agent`."""
        if cta.done:
            raise Fault("race", f"accesses shared memory of CTA {cta.rank}, which has ended")
        cta.visitors[agent] = max(int(epoch), cta.visitors.get(agent, (0,))[0]), self.agent, self.pc - 1

    def visit_barrier(self, cta: Cta, barrier: Mbarrier) -> None:
        """Of an arrival: `cta` must know, before it ends, that the phase is complete or what this warp has done so far."""
        if cta.done:
            raise Fault("race", f"arrives at a barrier of CTA {cta.rank}, which has ended")
        cta.arrivals[barrier.agent, self.agent] = barrier.phase + 1, int(self.clock[0, self.agent]), self.pc - 1

    def shared_index(self, addresses: np.ndarray, size: int) -> tuple[Cta, np.ndarray]:
        """(CTA, offsets) of accesses of `size` bytes; all in one CTA, in bounds and aligned. Inactive lanes are ignored."""
        if type(addresses) is Tainted:
            self.need_defined(addresses, "an address")
            addresses = plain(addresses)
        if not self.full:
            addresses = np.where(self.mask, addresses, addresses[self.first()])
        low, high = int(addresses.min()), int(addresses.max())
        cta = self.cta if low >> RANK_SHIFT == self.cta.rank else self.shared(low)
        if low >> RANK_SHIFT != high >> RANK_SHIFT:
            raise SeveralCtas("unsupported", "one instruction accesses shared memory of two CTAs")
        offsets = addresses & OFFSET_MASK
        self.check_range(cta, low & OFFSET_MASK, (high & OFFSET_MASK) + size)
        if (offsets & (size - 1)).any():
            bad = int(offsets[(offsets & (size - 1)) != 0][0])
            raise Fault("misaligned", f"shared access of {size} bytes at {bad:#x}")
        return cta, offsets

    def check_range(self, cta: Cta, low: int, high: int) -> None:
        if low < RESERVED or high > cta.shared.size:
            raise Fault(
                "out_of_bounds",
                f"shared access to {low:#x}..{high:#x}; the CTA has {RESERVED:#x}..{cta.shared.size:#x}",
            )

    def note_read(self, cta: Cta, granules: np.ndarray, epoch=None, agent: int | None = None) -> np.ndarray | None:
        """Check and record a read; returns which of the granules nobody wrote, None if there are none of these.

        epoch: that of a read by the tensor core or TMA, UNFINISHED until it is done; these also need the proxy fence, and
        what they read must have been written. agent: whose read it is, by default the warp's.
        """
        agent, bit = (self.agent, self.bit) if agent is None else (agent, np.uint64(1 << (agent % 64)))
        s, asynchronous = cta.shared, epoch is not None
        agents = s.write_agent[granules]
        behind = self.clock[1 if asynchronous else 0, agents] < s.write_epoch[granules]
        unwritten = None
        if behind.any():
            unwritten = agents == NOBODY
            if asynchronous and unwritten.any():
                g = granules[unwritten].flat[0]
                raise Fault("uninitialised", f"reads shared {g * GRANULE:#x}, which nothing was written to")
            behind &= ~unwritten
            if behind.any():
                self.report_read(cta, granules[behind], asynchronous)
            if not unwritten.any():
                unwritten = None
        epochs, pcs = s.reader(agent)
        if agent == self.agent:
            epochs[granules] = self.clock[0, agent] if epoch is None else epoch
        else:  # of a warpgroup: another warp may be ahead
            epochs[granules] = np.maximum(epochs[granules], epoch)
        pcs[granules] = self.pc - 1
        s.read_mask[granules] |= bit
        if cta is not self.cta:
            self.visit(cta, agent, self.clock[0, agent] if epoch is None else epoch)
        return unwritten

    def report_read(self, cta: Cta, granules: np.ndarray, asynchronous: bool) -> None:
        s, g = cta.shared, granules.flat[0]
        cta.need_no_mbarrier(granules, "reads")
        agent, pc = int(s.write_agent[g]), int(s.write_pc[g])
        at = f"shared {g * GRANULE:#x}"
        if asynchronous and self.clock[0, agent] >= s.write_epoch[g]:
            self.report("proxy", f"the asynchronous proxy reads {at}, written by the generic proxy without a fence", agent, pc)
        else:
            self.report("race", f"reads {at} without knowing that the write is done", agent, pc)

    def note_write(
        self, cta: Cta, granules: np.ndarray, agent: int | None = None, epoch: int | None = None, generic: bool = False
    ) -> None:
        """Check and record a write by this warp; by `agent`, done in `epoch`, when it is asynchronous.

        generic: it is of the generic proxy although it is asynchronous.
        """
        s = cta.shared
        asynchronous = agent is not None and not generic
        agents, epochs = s.write_agent[granules], s.write_epoch[granules]
        behind = (self.clock[1 if asynchronous else 0, agents] < epochs) & (agents != NOBODY)
        if behind.any():
            cta.need_no_mbarrier(granules[behind], "overwrites")
            g = granules[behind].flat[0]
            other, at = int(s.write_agent[g]), f"shared {g * GRANULE:#x}"
            if asynchronous and self.clock[0, other] >= s.write_epoch[g]:
                text = f"the asynchronous proxy overwrites {at}, written by the generic proxy without a fence"
                self.report("proxy", text, other, int(s.write_pc[g]))
            else:
                self.report("race", f"overwrites {at} without knowing that the other write is done", other, int(s.write_pc[g]))
        mask = np.bitwise_or.reduce(s.read_mask[granules], axis=None)
        if mask:
            for reader, (read_epochs, pcs) in s.reads.items():
                if mask & np.uint64(1 << (reader % 64)):
                    late = read_epochs[granules] > self.clock[0, reader]
                    if late.any():
                        g = granules[late].flat[0]
                        text = f"overwrites shared {g * GRANULE:#x}, which may still be read"
                        self.report("race", text, reader, int(pcs[g]))
                    read_epochs[granules] = 0
            s.read_mask[granules] = 0
        s.write_agent[granules] = self.agent if agent is None else agent
        s.write_epoch[granules] = self.clock[0, self.agent] if epoch is None else epoch
        s.write_pc[granules] = self.pc - 1
        if agent is not None:
            if cta.owns(agent):
                self.visit(cta, agent, epoch)
        elif cta is not self.cta:
            self.visit(cta, self.agent, self.clock[0, self.agent])

    def report(self, kind: str, message: str, other_agent: int, other_pc: int) -> None:
        """A finding that does not stop the launch."""
        self.report_place(kind, message, self.machine.place(*self.cta.cluster.agent_home(other_agent), other_pc))

    def report_place(self, kind: str, message: str, other: Place) -> None:
        self.machine.add(Finding(kind, message, self.place(), other))

    def place(self) -> Place:
        return self.machine.place(self.cta, self.index, self.pc - 1)

    def mbarrier(self, address: int) -> Mbarrier:
        cta = self.shared(address)
        barrier = cta.mbarriers.get(address & OFFSET_MASK)
        if barrier is None:
            raise Fault("barrier", f"no mbarrier was initialised at shared {address & OFFSET_MASK:#x} of CTA {cta.rank}")
        if self.clock[0, barrier.init_agent] < barrier.init_epoch:
            raise Fault("barrier", f"{barrier} is used without knowing that its initialisation is done")
        return barrier


class SeveralCtas(Fault):
    """The lanes' addresses are of several CTAs."""


UNREACHED = 1 << 40


class Cta:
    """A block: its warps, shared memory and barriers."""

    def __init__(self, cluster: Cluster, index: tuple[int, int, int], rank: int):
        grid = cluster.grid
        self.cluster, self.index, self.rank = cluster, index, rank
        self.threads = grid.launch.block[0] * grid.launch.block[1] * grid.launch.block[2]
        self.shared = Shared(grid.program.dynamic_offset + grid.launch.smem_bytes, grid.rng)
        self.named = [NamedBarrier(cluster.clock_size) for _ in range(16)]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.slots: dict[int, int] = {}  # offset -> slot of its agent
        self.phases: dict[int, int] = {}  # offset -> phases of the mbarriers that were there before
        self.visitors: dict[int, tuple[int, int, int]] = {}  # agent -> epoch to know before the end, who said so, its pc
        self.arrivals: dict[tuple[int, int], tuple[int, int, int]] = {}  # (mbarrier's agent, warp's) -> epochs of both, pc
        self.done = False
        self.tmem = None  # see ops_tcgen05
        self.warps: list[Warp] = []
        self.warps = [Warp(self, i) for i in range(-(-self.threads // LANES))]

    def init_mbarrier(self, offset: int, count: int, warp: Warp) -> None:
        slot = self.slots.setdefault(offset, len(self.slots))
        if slot >= MBARRIERS:
            raise Fault("unsupported", f"more than {MBARRIERS} mbarriers in a CTA")
        cluster = self.cluster
        agent = 1 + len(cluster.ctas) * cluster.warps_per_cta + self.rank * MBARRIERS + slot
        new = Mbarrier(offset, count, agent, cluster.clock_size)
        phase = self.phases.get(offset, 0)  # there was one before: epochs of its agent go on
        new.phase = phase + (phase & 1)  # an even number of phases, as parity starts anew
        new.done[:, agent] = new.phase
        new.init_agent, new.init_epoch = warp.agent, int(warp.clock[0, warp.agent])
        granules = np.arange(offset // GRANULE, (offset + 8) // GRANULE)
        warp.note_write(self, granules)
        self.mbarriers[offset] = new
        self.shared.write_agent[granules], self.shared.write_epoch[granules] = agent, UNFINISHED  # for nobody to access

    def drop_mbarrier(self, barrier: Mbarrier) -> None:
        del self.mbarriers[barrier.offset]
        self.phases[barrier.offset] = barrier.phase + 1
        granules = np.arange(barrier.offset // GRANULE, (barrier.offset + 8) // GRANULE)
        self.shared.write_agent[granules], self.shared.write_epoch[granules] = NOBODY, 1

    def need_no_mbarrier(self, granules: np.ndarray, does: str) -> None:
        for g in granules.flat:
            barrier = self.mbarriers.get(int(g) * GRANULE & ~7)
            if barrier:
                raise Fault("barrier", f"{does} shared {int(g) * GRANULE:#x}, which is part of the {barrier}")

    def owns(self, agent: int) -> bool:
        """Is it the agent of one of this CTA's mbarriers?"""
        n = agent - 1 - len(self.cluster.ctas) * self.cluster.warps_per_cta
        return n >= 0 and n // MBARRIERS == self.rank

    def warp_done(self, warp: Warp) -> None:
        self.cluster.leave(warp)
        for barrier in self.named:
            barrier.leave(LANES)
        if not all(w.done for w in self.warps):
            return
        if self.tmem is not None:
            self.tmem.at_exit(warp)
        self.done = True
        known = np.maximum.reduce([w.clock[0] for w in self.warps])
        text = "the last warp of the CTA ends without knowing that {} to its shared memory is done"
        for agent, (epoch, by, pc) in self.visitors.items():
            if known[agent] < epoch:
                what = "a copy" if self.owns(agent) else "an access from elsewhere"
                warp.report("race", text.format(what), by, pc)
        for (barrier, by), (phase, epoch, pc) in self.arrivals.items():
            if known[barrier] < phase and known[by] < epoch:
                warp.report("race", text.format("an arrival from elsewhere"), by, pc)


class Cluster:
    """CTAs that may access each other's shared memory; one without a cluster is alone."""

    def __init__(self, grid: Grid, ctas: list[tuple[int, int, int]]):
        self.grid = grid
        block = grid.launch.block
        self.warps_per_cta = -(-block[0] * block[1] * block[2] // LANES)
        self.clock_size = 1 + len(ctas) * (2 * self.warps_per_cta + MBARRIERS) + PLACES
        self.number = grid.started  # in its launch
        grid.started += 1
        self.foreign: list[Event] = []  # what warps of it have acquired from other clusters, see global_order
        self.asyncs: list[Async] = []
        self.progress = 0
        self.left = 0  # warps that have ended
        self.atomics: dict[tuple[int, int], np.ndarray] = {}  # see ops_memory
        self.barrier = NamedBarrier(self.clock_size)  # barrier.cluster
        self.ctas: list[Cta] = [None] * len(ctas)  # clock sizes need their number
        for rank, index in enumerate(ctas):
            self.ctas[rank] = Cta(self, index, rank)
        self.warps = [w for cta in self.ctas for w in cta.warps]
        style = grid.rng.choice(("even", "uneven"))
        for w in self.warps:
            w.weight = 1.0 if style == "even" else 10 ** grid.rng.uniform(-2, 0)

    def agent_home(self, agent: int) -> tuple[Cta, int]:
        """(CTA, warp) of an agent; warp -1: the agent is an mbarrier."""
        n, warps = agent - 1, len(self.ctas) * self.warps_per_cta
        if warps <= n < warps + len(self.ctas) * MBARRIERS:
            return self.ctas[(n - warps) // MBARRIERS], -1
        n -= (warps + len(self.ctas) * MBARRIERS) * (n >= warps)  # the tensor core's agent of a warp
        return self.ctas[n // self.warps_per_cta], n % self.warps_per_cta

    def leave(self, warp: Warp) -> None:
        """barrier.cluster waits for those that have not ended."""
        barrier = self.barrier
        self.left += 1
        if barrier.arrived:
            if warp.cluster_round == barrier.round:
                barrier.arrived -= 1
            barrier.expected = len(self.warps) - self.left
            if barrier.arrived:
                barrier.check()
        self.progress += 1

    @property
    def done(self) -> bool:
        return all(w.done for w in self.warps) and not self.asyncs

    # --- asynchronous work

    def start(self, run: Callable[[], None], name: str, after: Async | None = None) -> Async:
        """Do `run` some time from now on: at once, late or between, and never before `after` is done."""
        warp = self.grid.current
        op = Async(run, name, after, warp, warp.pc - 1 if warp else 0)
        if self.grid.trace is not None:
            self.grid.trace.issued(self, op)
        if self.grid.options.policy == "eager" and (after is None or after.done):
            self.finish(op)
        else:
            self.asyncs.append(op)
        return op

    def finish_one(self) -> bool:
        """Do one of the asynchronous operations, any of those that can be done."""
        can = [op for op in self.asyncs if op.after is None or op.after.done]
        if not can:
            return False
        op = self.grid.rng.choice(can)
        self.asyncs.remove(op)
        try:
            self.finish(op)
        except Fault as e:
            self.grid.fail(op.warp, e, op.pc)
        return True

    def finish(self, op: Async) -> None:
        op.finish()
        self.progress += 1
        if self.grid.trace is not None:
            self.grid.trace.finished(self, op)


class Spin:
    """Finds warps that go round in a loop in which nothing changes: same place, same registers, and no progress since."""

    AFTER = 20_000  # instructions without progress before it looks

    def __init__(self):
        self.seen: dict[Warp, tuple[int, int, np.ndarray, list]] = {}  # idle, pc, mask, registers
        self.found: set[Warp] = set()

    def clear(self) -> None:
        if self.seen:
            self.seen.clear()
            self.found.clear()

    def all(self, warps: list[Warp]) -> bool:
        return bool(self.found) and all(w in self.found for w in warps)

    def look(self, w: Warp, idle: int) -> None:
        since, pc, mask, registers = self.seen.get(w, (0, -1, w.mask, ()))
        same = pc == w.pc and not w.done and (mask == w.mask).all()
        if same and all(a is b or (type(a) is type(b) is np.ndarray and (a == b).all()) for a, b in zip(registers, w.regs)):
            self.found.add(w)
        elif idle > 2 * since:
            self.seen[w] = idle, w.pc, w.mask, list(w.regs)


class Async:
    """An operation in flight."""

    def __init__(self, run: Callable[[], None], name: str, after: Async | None, warp: Warp | None, pc: int):
        self.run, self.name, self.after, self.done = run, name, after, False
        self.warp, self.pc = warp, pc  # that started it
        self.epoch = int(UNFINISHED)  # of a cp.async: the warp's, from which on it is known to be done

    def finish(self) -> None:
        self.run()
        self.done = True
        self.after = None


# ----- a launch -------------------------------------------------------------------------------------------------------


class Grid:
    """One launch: makes its clusters, a few at a time, and runs them to their end."""

    def __init__(self, program, launch, memory: GlobalMemory, options: Options, findings: list[Finding], trace=None):
        self.program, self.launch, self.memory, self.options = program, launch, memory, options
        self.findings, self.trace = findings, trace
        self.rng = random.Random(f"{options.seed} {launch.kernel}")
        self.dependency_met = True  # griddepcontrol.wait: the launch before has ended
        self.cta_group: int | None = None  # of the kernel's tcgen05 instructions
        self.active: list[Cluster] = []
        self.started = 0  # clusters so far
        self.order = GlobalOrder()
        self.current: Warp | None = None  # the warp that runs
        self.time = 0  # instructions run so far
        size = launch.cluster if launch.cluster != (1, 1, 1) else program.cluster
        if launch.preferred and not any(g % c for g, c in zip(launch.grid, launch.preferred)):
            # Hardware may mix both sizes in one launch; here all clusters are of one of them.
            size = {"eager": size, "lazy": launch.preferred}.get(options.policy) or self.rng.choice((size, launch.preferred))
        self.cluster_dims = size
        if any(g % c for g, c in zip(launch.grid, size)):
            self.refuse(Fault("launch", f"grid {launch.grid} is no multiple of the cluster {size}"))
        blocks = [range(0, g, c) for g, c in zip(launch.grid, size)]
        order = [(x, y, z) for z in blocks[2] for y in blocks[1] for x in blocks[0]]
        self.rng.shuffle(order)
        self.waiting = [
            [
                (x + dx, y + dy, z + dz)
                for dz in range(size[2])
                for dy in range(size[1])
                for dx in range(size[0])
            ]
            for x, y, z in order
        ]
        self.hits: dict[int, list[int]] = {}  # warp of a CTA -> how often it ran each instruction, in all CTAs together
        self._seen: set[tuple] = set()
        for name, data in program.decoder.constants.items():
            memory.add(data.ctypes.data, len(data), name, data)
        if trace is not None:
            trace.launched(self)

    def place(self, cta: Cta, warp: int, pc: int) -> Place:
        return self.place_of(cta.index, warp, pc)

    def place_of(self, cta: tuple[int, int, int], warp: int, pc: int) -> Place:
        ins = self.program.kernel.instructions[min(pc, len(self.program.kernel.instructions) - 1)]
        return Place(self.launch.kernel, cta, warp, ins.line, ins.text, ins.source)

    def add(self, finding: Finding) -> None:
        """Keep a finding, once for each pair of instructions."""
        other = finding.other.ptx_line if finding.other else 0
        key = finding.kind, finding.place and finding.place.ptx_line, other
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(finding)
            if len(self.findings) >= MAX_FINDINGS:
                raise EmulationError(self.findings)

    def run(self, early: int = 0) -> None:
        """Run everything; with early > 0 only so much that that many clusters wait for the launch before this one."""
        if early:
            self.dependency_met = False
            for _ in range(MAX_EARLY):  # clusters that do not wait at all
                self.fill(early)
                if self.active:
                    self.loop()
                if len(self.active) == early:
                    break
            return
        self.dependency_met = True
        while self.waiting or self.active:
            self.fill(self.options.resident)
            self.loop()

    def fill(self, n: int) -> None:
        while self.waiting and len(self.active) < n:
            try:
                self.active.append(Cluster(self, self.waiting.pop()))
            except Fault as e:
                self.refuse(e)

    def loop(self) -> None:
        """Until a cluster ends, or nothing can go on before the launch ahead has ended."""
        rng, lazy = self.rng, self.options.policy == "lazy"
        idle, progress, gave_up, spin = 0, -1, False, Spin()
        warps = [w for c in self.active for w in c.warps if not w.done]
        while True:
            ready = []
            for w in warps:
                if w.wait is None:
                    ready.append(w)
                elif w.wait.ready():
                    self.resume(w, w.wait.then)
                    ready.append(w)
            now = sum(c.progress for c in self.active)
            if now != progress:
                idle, progress, gave_up = 0, now, False
                spin.clear()
            if ready and lazy and idle > 2000 and self.finish_async():  # nothing else makes progress
                continue
            if ready and idle <= self.options.max_idle and not spin.all(ready):
                w = rng.choices(ready, [w.weight for w in ready])[0] if len(ready) > 1 else ready[0]
                n = self.run_warp(w, rng.choice((1, 4, 16, 64, 256)))
                idle += n
                if w.done:
                    warps.remove(w)
                    if all(x.done for x in w.cta.cluster.warps):
                        cluster = w.cta.cluster
                        while cluster.finish_one():
                            pass
                        self.active.remove(cluster)
                        return
                if not lazy and rng.random() < 0.3:
                    self.finish_async()
                elif idle > Spin.AFTER:
                    spin.look(w, idle)
            elif self.finish_async():
                idle = 0
            elif not warps or (not self.dependency_met and (ready or any(map(_depends, warps)))):
                return
            elif not gave_up and any(w.wait and w.wait.give_up for w in warps):
                for w in warps:  # instructions with a time limit may return without success
                    if w.wait and w.wait.give_up:
                        self.resume(w, w.wait.give_up)
                gave_up = True
            elif self.waiting and len(self.active) < 8:
                self.fill(len(self.active) + 1)  # perhaps it waits for another block
                warps = [w for c in self.active for w in c.warps if not w.done]
                idle = 0
                spin.clear()
            elif ready:
                self.stuck(warps, "livelock", f"{idle} instructions without progress")
            else:
                self.stuck(warps, "deadlock", "no warp can go on")

    def resume(self, w: Warp, how: Callable[[Warp], None] | None) -> None:
        wait, w.wait = w.wait, None
        if self.trace is not None:
            self.trace.resumed(self, w)
        if how:
            self.guarded(w, lambda: how(w))
        del wait

    def finish_async(self) -> bool:
        clusters = [c for c in self.active if c.asyncs]
        return bool(clusters) and self.rng.choice(clusters).finish_one()

    def run_warp(self, w: Warp, quantum: int) -> int:
        """Up to `quantum` instructions of a warp; returns how many."""
        code, hits, n = self.program.code, w.hits, 0
        self.current = w
        try:
            while n < quantum:
                n += 1
                pc = w.pc
                w.pc = pc + 1
                hits[pc] += 1
                wait = code[pc](w)
                if wait is not None:
                    if not wait.ready():
                        w.wait = wait
                        if self.trace is not None:
                            self.trace.blocked(self, w, wait)
                        break
                    if wait.then:
                        wait.then(w)
                if w.pc >= w.meet and not w.done:
                    w.regroup()
                if w.done:
                    break
        except Fault as e:
            self.fail(w, e)
        w.count += n
        self.time += n
        return n

    def guarded(self, w: Warp, do: Callable[[], None]) -> None:
        self.current = w
        try:
            do()
        except Fault as e:
            self.fail(w, e)

    def fail(self, w: Warp, fault: Fault, pc: int | None = None) -> None:
        """Stop at what warp `w` does; pc: of the instruction, when it is not the one that runs."""
        place = w.place() if pc is None else self.place(w.cta, w.index, pc)
        self.findings.append(Finding(fault.kind, str(fault), place))
        raise EmulationError(self.findings) from fault

    def refuse(self, fault: Fault) -> None:
        """Stop before an instruction has run."""
        self.findings.append(Finding(fault.kind, f"kernel {self.launch.kernel}: {fault}"))
        raise EmulationError(self.findings) from fault

    def stuck(self, warps: list[Warp], kind: str, message: str) -> None:
        lines = [f"{message}; {len(warps)} warps are left:"]
        for w in warps:
            why = w.wait.text() if w.wait else "runs"
            lines.append(f"      warp {w.index} of cta {w.cta.index}: {why}\n        {w.place()}")
        self.findings.append(Finding(kind, "\n".join(lines), warps[0].place() if warps else None))
        raise EmulationError(self.findings)


DEPENDENCY = "waits for the launch before this one"


def _depends(w: Warp) -> bool:
    return w.wait is not None and w.wait.text() == DEPENDENCY


def run_launches(pairs: list[tuple], memory: GlobalMemory, options: Options, trace=None) -> tuple[list[Finding], list[Grid]]:
    """Run (program, launch) pairs in stream order; a programmatic dependent launch starts before the one ahead has ended.

    Returns the findings and the finished grids. Raises EmulationError when a launch had to be stopped.
    """
    findings: list[Finding] = []
    grids = [Grid(program, launch, memory, options, findings, trace) for program, launch in pairs]
    started = -1
    for i, grid in enumerate(grids):
        follower = grids[i + 1] if i + 1 < len(grids) else None
        if follower and follower.launch.pdl and grid.program.triggers_early and options.policy != "lazy":
            follower.run(early=1 + options.seed % 4)
            started = i + 1
        if i == started:
            grid.dependency_met = True
        grid.run()
    return findings, grids
