"""wgmma of sm_90a. Each warp of a warpgroup computes its 16 rows of the 64 x N tile.

The reads of shared memory, and the results, come at any time between mma_async and the wait for its group. Until then the
accumulators are `Accumulator`s: to read or write them is a fault.
"""

from __future__ import annotations

import numpy as np

from . import matrix
from .decode import Closure, Decoder, op
from .machine import GRANULE, RESERVED, UNFINISHED, Cta, Fault, Missing, Warp
from .ptx import Instruction


class Accumulator(Missing):
    """The registers of a D tile while wgmmas are in flight."""

    def __init__(self, index: list[int], n: int, bits: int, values: np.ndarray | None):
        super().__init__("in_flight", "a register of a wgmma that is still in flight is used; wgmma.wait_group is missing")
        self.index, self.fragment, self.bits = index, matrix.fragment_c(n, bits), bits
        self.values = values  # raw bits [16, n]


class Operation:
    def __init__(self, accumulator: Accumulator, a_registers: list[tuple[int, np.ndarray]], run):
        self.accumulator, self.a_registers, self.run = accumulator, a_registers, run
        self.reads: list[tuple[Cta, np.ndarray]] = []
        self.done = False


class Pipeline:
    """A warp's wgmmas in order: committed groups, the oldest first, and the open one."""

    def __init__(self):
        self.groups: list[list[Operation]] = []
        self.open: list[Operation] = []
        self.fenced: list | None = None  # the registers' arrays at the last wgmma.fence

    def all(self) -> list[Operation]:
        return [o for group in [*self.groups, self.open] for o in group]


def pipeline(w: Warp) -> Pipeline:
    if w.wgmma is None:
        w.wgmma = Pipeline()
    return w.wgmma


@op("wgmma.fence")
def fence(ins: Instruction, d: Decoder) -> Closure:
    def run(w: Warp):
        w.need_all("wgmma.fence")
        pipeline(w).fenced = list(w.regs)

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

        operation = Operation(acc, a_registers, compute)
        for operand in (a, b):
            if operand:
                w.note_read(operand.cta, operand.granules, UNFINISHED)
                operation.reads.append((operand.cta, operand.granules))
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
        for i in index:
            check_fence(w, p, i)
        registers = np.stack([w.regs[i] for i in index])
        values = matrix.from_registers(registers, matrix.fragment_c(n, bits), bits, (16, n))
    acc = Accumulator(index, n, bits, values)
    for i in index:
        if isinstance(w.regs[i], Accumulator):
            raise Fault("in_flight", "wgmma uses registers of another wgmma that is in flight")
        w.regs[i] = acc
    return acc


def check_fence(w: Warp, p: Pipeline, i: int) -> None:
    if p.fenced[i] is not w.regs[i]:
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
        p.groups = p.groups[len(complete) :]
        operations = [o for group in complete for o in group]
        finish(w, operations)
        left = p.all()
        epoch = w.clock[0, w.agent]
        for operation in operations:
            for i, value in operation.a_registers:
                if w.regs[i] is not value:
                    raise Fault("in_flight", "a register of A was written while the wgmma was in flight")
            for cta, granules in operation.reads:
                epochs, _ = cta.shared.reader(w.agent)
                epochs[granules] = np.where(epochs[granules] == UNFINISHED, epoch, epochs[granules])
        for operation in left:  # what they read, some of the finished ones may have read too
            for cta, granules in operation.reads:
                cta.shared.reader(w.agent)[0][granules] = UNFINISHED
        busy = {id(o.accumulator) for o in left}
        for acc in {id(o.accumulator): o.accumulator for o in operations}.values():
            if id(acc) not in busy:
                values = matrix.to_registers(acc.values, acc.fragment, acc.bits)
                for i, value in zip(acc.index, values):
                    w.regs[i] = value
                    p.fenced[i] = value  # written by wgmma itself: needs no fence
        w.cta.cluster.progress += 1

    return run
