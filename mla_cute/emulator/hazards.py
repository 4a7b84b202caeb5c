"""A load of shared memory that an asynchronous copy, issued behind it by the same warp, may overtake.

A load is done for certain when an instruction has read one of its registers, or when the warp has run a fence, a barrier
or an arrival, which no load passes. Until then a copy into the bytes it reads may come first: nothing in the program
orders the two, and hardware does run them the other way round.

`plan` looks at the control flow alone, and finds the loads from which a copy is reached before any use. There are none in
most kernels; only those that it finds, and the instructions that end the wait for them, are watched while the kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .ptx import Instruction, Kernel, Label, Memory, Not, Pair, Reg, Vector

# Opcodes without a result.
STORES = {"st", "red", "bar", "barrier", "bra", "brx", "cp", "prefetch", "stmatrix", "fence", "wgmma", "nanosleep"}


@dataclass
class Plan:
    loads: set[int] = field(default_factory=set)  # instructions to watch
    uses: dict[int, set[int]] = field(default_factory=dict)  # instruction -> loads that are done once it has run
    orders: set[int] = field(default_factory=set)  # instructions behind which all loads are done


def plan(kernel: Kernel) -> Plan:
    """The loads that a copy might overtake, by the number of the instruction."""
    result, code = Plan(), kernel.instructions
    copies = {i for i, ins in enumerate(code) if _copies(ins)}
    if not copies:
        return result
    reads, writes = zip(*(_registers(ins) for ins in code))
    moves = [i for i, ins in enumerate(code) if ins.parts[0] == "mov"]
    for i, ins in enumerate(code):
        if not _loads(ins):
            continue
        registers = set(writes[i])
        grown = True
        while grown:  # a move may be no instruction at all on hardware
            more = {r for m in moves if reads[m] & registers for r in writes[m]} - registers
            registers |= more
            grown = bool(more)
        reached, uses, orders, todo, seen = False, set(), set(), _next(code, i), set()
        while todo:
            at = todo.pop()
            if at in seen or at == i or at >= len(code):
                continue
            seen.add(at)
            other = code[at]
            ends = False
            if _orders(other):
                orders.add(at)
                ends = other.guard is None
            elif other.parts[0] != "mov" and (reads[at] | writes[at]) & registers:
                uses.add(at)
                ends = other.guard is None
            elif at in copies:
                reached = True
            if not ends:
                todo += _next(code, at)
        if reached:
            result.loads.add(i)
            result.orders |= orders
            for use in uses:
                result.uses.setdefault(use, set()).add(i)
    return result


def _copies(ins: Instruction) -> bool:
    """Does it start an asynchronous write to shared memory?"""
    head = ".".join(ins.parts[:2])
    if head == "st.async":
        return True
    target = next((p for p in ins.parts if p.startswith(("shared", "global"))), "")
    return ins.opcode.startswith("cp.async.bulk.") and target.startswith("shared") and "prefetch" not in ins.parts


def _loads(ins: Instruction) -> bool:
    if ins.parts[0] == "ldmatrix":
        return True
    generic = not any(p in ("global", "param", "const", "local") for p in ins.parts)
    return ins.parts[0] == "ld" and generic


def _orders(ins: Instruction) -> bool:
    kind = ins.parts[0]
    if kind in ("atom", "red"):
        return bool({"release", "acq_rel"} & set(ins.parts))
    if kind == "bar":
        return ins.parts[1] != "warp"
    if kind == "mbarrier":  # not that with expect_tx: it belongs to the copy, and hardware has shown it to be no obstacle
        return ins.parts[1].startswith("arrive") and "expect_tx" not in ins.parts
    return kind in ("barrier", "fence", "membar")


def _next(code: list[Instruction], i: int) -> list[int]:
    ins = code[i]
    kind = ins.parts[0]
    after = [i + 1] if ins.guard is not None or kind not in ("bra", "brx", "ret", "exit", "trap") else []
    if kind in ("bra", "brx"):
        after += [o.target for o in _flat(ins.operands) if isinstance(o, Label)]
    return after


def _flat(operands) -> list:
    out = []
    for o in operands:
        if isinstance(o, Vector):
            out += _flat(o.items)
        elif isinstance(o, Pair):
            out += _flat((o.first, o.second))
        elif isinstance(o, Not):
            out.append(o.operand)
        elif isinstance(o, Memory):
            out += _flat((o.base, *o.coords))
        else:
            out.append(o)
    return out


def _registers(ins: Instruction) -> tuple[set[int], set[int]]:
    """(read, written) registers by number."""
    operands = ins.operands
    writes = []
    if operands and ins.parts[0] not in STORES and not isinstance(operands[0], Memory):
        writes, operands = _flat(operands[:1]), operands[1:]
    reads = _flat(operands) + ([ins.guard] if ins.guard is not None else [])
    return {o.index for o in reads if isinstance(o, Reg)}, {o.index for o in writes if isinstance(o, Reg)}


# ----- while the kernel runs ------------------------------------------------------------------------------------------


def watched(body, pc: int, plan: Plan, accessed):
    """The instruction's closure, with what the plan asks for. accessed(warp) -> (CTA, granules) of a load, or None."""
    if pc in plan.orders:

        def ordering(w):
            w.loads.clear()
            return body(w)

        return ordering
    done = plan.uses.get(pc, ())
    if pc not in plan.loads and not done:
        return body

    def run(w):
        for load in done:
            w.loads.pop(load, None)
        wait = body(w)
        if pc in plan.loads:
            place = accessed(w)
            if place:
                w.loads[pc] = place
        return wait

    return run


def check_copy(w, cta, granules: np.ndarray) -> None:
    """Called for a copy into `granules` that warp `w` issues, when there are loads that may not be done."""
    for pc, (where, read) in w.loads.items():
        both = np.intersect1d(read, granules) if where is cta else ()
        if len(both):
            text = f"a copy into shared {int(both[0]) * 2:#x} may overtake the load of it: nothing has used what was loaded yet"
            w.report("race", text, w.agent, pc)
