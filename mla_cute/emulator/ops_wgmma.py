"""wgmma of sm_90a. Each warp of a warpgroup computes its 16 rows of the 64 x N tile.

The reads of shared memory, and the results, come at any time between mma_async and the wait for its group. Until then the
accumulators are `Accumulator`s: to use them is a fault.

An mma is one operation of the warpgroup: it is complete for a warp, with what it reads for the other warps, not before all
four have issued it. So its reads are those of one agent, the first warp's `tensor_agent`, which counts the mmas.
"""

from __future__ import annotations

import numpy as np

from . import matrix
from .decode import Closure, Decoder, op
from .machine import GRANULE, RESERVED, Fault, Missing, Renamed, Wait, Warp
from .ptx import Instruction


class Accumulator(Missing):
    """The registers of a D tile while wgmmas are in flight."""

    may_move = True

    def __init__(self, index: list[int], n: int, bits: int, values: np.ndarray | None):
        super().__init__("in_flight", "a register of a wgmma that is still in flight is used; wgmma.wait_group is missing")
        self.index, self.fragment, self.bits = index, matrix.fragment_c(n, bits), bits
        self.values = values  # raw bits [16, n]
        self.results: dict[int, np.ndarray] = {}  # register -> its array, once it has been waited for

    def now(self) -> dict[int, np.ndarray]:
        return dict(zip(self.index, matrix.to_registers(self.values, self.fragment, self.bits)))


class Operation:
    def __init__(self, serial: int, accumulator: Accumulator, a_registers: list[tuple[int, np.ndarray]], run):
        self.serial, self.accumulator, self.a_registers, self.run = serial, accumulator, a_registers, run
        self.done = False


class Pipeline:
    """A warp's wgmmas in order: committed groups, the oldest first, and the open one."""

    def __init__(self):
        self.groups: list[list[Operation]] = []
        self.open: list[Operation] = []
        self.issued = 0  # mmas so far
        self.fenced: list | None = None  # the registers' arrays at the last wgmma.fence
        self.copies: dict[int, object] | None = None  # id -> array: what is the same as those, moves included

    def set_fence(self, regs: list) -> None:
        self.fenced, self.copies = list(regs), None

    def is_copy(self, value) -> bool:
        """Was it in a register at the fence? Compilers put moves, also of constants, behind it."""
        if self.copies is None:
            self.copies = {id(x): x for x in self.fenced}
        return id(value) in self.copies

    def note_move(self, sources: list, results: list) -> None:
        """A move that packs or unpacks, and so makes new arrays."""
        if self.fenced is not None and all(self.is_copy(x) for x in sources):
            self.copies |= {id(x): x for x in results}

    def all(self) -> list[Operation]:
        return [o for group in [*self.groups, self.open] for o in group]


def pipeline(w: Warp) -> Pipeline:
    if w.wgmma is None:
        w.wgmma = Pipeline()
    return w.wgmma


def warpgroup(w: Warp) -> list[Warp]:
    first = w.index // 4 * 4
    return w.cta.warps[first : first + 4]


@op("wgmma.fence")
def fence(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        w.need_all("wgmma.fence")
        pipeline(w).set_fence(w.regs)

    return run


@op("wgmma.mma_async")
def mma_async(ins: Instruction, d: Decoder) -> Closure:
    operands = list(ins.operands)
    form = matrix.parse_wgmma(ins.parts, operands)
    d_index = d.outs(operands[0])
    a_index = d.regs(operands[1]) if form.a_in_registers else []
    a_desc = None if form.a_in_registers else d.uniform(operands[1], "b64")
    b_desc = d.uniform(operands[2], "b64")
    scale_d = d.predicate(operands[3])
    bits = 16 if form.d_type == "f16" else 32

    def run(w: Warp):
        w.need_all("wgmma.mma_async")
        p = pipeline(w)
        if p.fenced is None:
            raise Fault("wgmma", "wgmma.mma_async without a wgmma.fence before it")
        accumulate = bool(scale_d(w)[0])
        acc = take_accumulator(w, p, d_index, form.n, bits, accumulate)
        a_registers = [(i, w.regs[i]) for i in a_index]
        for _, value in a_registers:
            w.need_defined(value, "A of wgmma")
        for _, value in a_registers:  # no check_fence: compilers move what computes A behind the fence, and ptxas copes
            value.dtype  # noqa: B018  a fault if it is missing
        quarter = w.index % 4 * 16
        b = Operand(w, b_desc(w), form.n, form.k, form.b_type, form.b_major)
        a = None
        if a_desc:
            a = Operand(w, a_desc(w), 64, form.k, form.a_type, form.a_major, quarter)
        a_bits = matrix.TYPE_BITS[form.a_type]

        def compute():
            if a is None:
                registers = np.stack([value for _, value in a_registers])
                left = matrix.from_registers(registers, matrix.fragment_a(a_bits, form.k), a_bits, (16, form.k))
            else:
                left = a.read()[quarter : quarter + 16]
            acc.values = matrix.mma(
                left,
                form.a_type,
                b.read(),
                form.b_type,
                acc.values if accumulate else None,
                d_type=form.d_type,
                negate_a=form.negate_a,
                negate_b=form.negate_b,
                saturate=form.saturate,
            )

        p.issued += 1
        operation = Operation(p.issued, acc, a_registers, compute)
        for operand in (a, b):
            if operand:
                w.note_read(operand.cta, operand.granules, p.issued, warpgroup(w)[0].tensor_agent)
        p.open.append(operation)
        policy = w.machine.options.policy
        if policy == "eager" or (policy == "random" and w.machine.rng.random() < 0.5):
            finish(w, p.all())

    return run


class Operand:
    """A matrix in shared memory that a descriptor tells of."""

    def __init__(self, w: Warp, descriptor: int, rows: int, k: int, type_name: str, major: str, quarter: int | None = None):
        self.desc = matrix.SmemDescriptor.decode_wgmma(descriptor)
        self.rows, self.k, self.type_name, self.major = rows, k, type_name, major
        # Descriptors hold 18 bits of address: always of the own CTA.
        self.cta = w.cta
        chunks = matrix.operand_chunks(self.desc, rows, k, matrix.TYPE_BITS[type_name], major)
        if quarter is not None:  # this warp's 16 rows
            per = 1 if major == "K" else 128 // matrix.TYPE_BITS[type_name]
            chunks = chunks[quarter // per : (quarter + 16) // per]
        low, high = int(chunks.min()), int(chunks.max()) + 16
        if low < RESERVED or high > self.cta.shared.size:
            raise Fault("out_of_bounds", f"a wgmma operand lies at shared {low:#x}..{high:#x}")
        self.granules = (chunks.reshape(-1, 1) // GRANULE + np.arange(16 // GRANULE)).reshape(-1)

    def read(self) -> np.ndarray:
        data = self.cta.shared.data
        return matrix.read_operand(data, self.desc, self.rows, self.k, self.type_name, self.major)


def take_accumulator(w: Warp, p: Pipeline, index: list[int], n: int, bits: int, accumulate: bool) -> Accumulator:
    first = w.regs[index[0]]
    if isinstance(first, Accumulator):
        if first.index != index:
            raise Fault("in_flight", "wgmma uses registers of another wgmma that is in flight")
        return first
    values = None
    if accumulate:
        registers = np.stack([_moved(w, p, i) for i in index])
        values = matrix.from_registers(registers, matrix.fragment_c(n, bits), bits, (16, n))
    acc = Accumulator(index, n, bits, values)
    for i in index:
        if isinstance(w.regs[i], Accumulator):
            raise Fault("in_flight", "wgmma uses registers of another wgmma that is in flight")
        w.regs[i] = acc
    return acc


def _moved(w: Warp, p: Pipeline, i: int) -> np.ndarray:
    """A register of D: what another wgmma is computing, when it was moved here, as ptxas makes that the same register."""
    value = w.regs[i]
    if type(value) is not Renamed:
        check_fence(w, p, i)
        return value
    finish(w, p.all())
    return value.value(lambda acc, register: (acc.results or acc.now())[register])


def check_fence(w: Warp, p: Pipeline, i: int) -> None:
    if p.fenced[i] is not w.regs[i] and not p.is_copy(w.regs[i]):
        raise Fault("wgmma", "a register of wgmma.mma_async was written behind the last wgmma.fence")


def finish(w: Warp, operations: list[Operation]) -> None:
    """Compute what has not been computed, in order."""
    for operation in operations:
        if not operation.done:
            operation.run()
            operation.done = True


@op("wgmma.commit_group")
def commit(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        w.need_all("wgmma.commit_group")
        p = pipeline(w)
        p.groups.append(p.open)
        p.open = []

    return run


@op("wgmma.wait_group")
def wait(ins: Instruction, d: Decoder) -> Closure:
    keep = ins.operands[0].value

    def run(w: Warp):
        w.need_all("wgmma.wait_group")
        p = pipeline(w)
        complete = p.groups[: max(len(p.groups) - keep, 0)]
        operations = [o for group in complete for o in group]
        if not operations:
            p.groups = p.groups[len(complete) :]
            return None
        last, warps = operations[-1].serial, warpgroup(w)

        def text() -> str:
            missing = [x.index for x in warps if pipeline(x).issued < last]
            return f"waits for a wgmma that has not been issued by warps {missing} of the warpgroup"

        return Wait(lambda: all(pipeline(x).issued >= last for x in warps), text, lambda w: complete_groups(w, p, complete))

    return run


def complete_groups(w: Warp, p: Pipeline, complete: list[list[Operation]]) -> None:
    p.groups = p.groups[len(complete) :]
    operations = [o for group in complete for o in group]
    finish(w, operations)
    agent = warpgroup(w)[0].tensor_agent
    w.clock[0, agent] = max(w.clock[0, agent], operations[-1].serial)
    for operation in operations:
        for i, value in operation.a_registers:
            if w.regs[i] is not value:
                raise Fault("in_flight", "a register of A was written while the wgmma was in flight")
    busy = {id(o.accumulator) for o in p.all()}
    for acc in {id(o.accumulator): o.accumulator for o in operations}.values():
        if id(acc) not in busy:
            values = matrix.to_registers(acc.values, acc.fragment, acc.bits)
            acc.results = dict(zip(acc.index, values))
            for i, value in acc.results.items():
                if w.regs[i] is acc:  # else it was moved to, or written since
                    w.regs[i] = value
                    p.fenced[i] = value  # written by wgmma itself: needs no fence
    p.copies = None
    for i in w.settle(lambda acc, register: acc.results.get(register)) if w.renamed else ():
        p.fenced[i] = w.regs[i]
    w.cta.cluster.progress += 1
