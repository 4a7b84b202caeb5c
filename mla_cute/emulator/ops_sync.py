"""Barriers, mbarriers, fences and the order of launches."""

from __future__ import annotations

import numpy as np

from .decode import Closure, Decoder, UnsupportedInstruction, op
from .global_order import WIDE
from .machine import DEPENDENCY, LANES, OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW, Fault, Mbarrier, Wait, Warp
from .ptx import Instruction, Memory

# ----- barriers of the CTA and of the cluster -------------------------------------------------------------------------


@op("bar.sync", "bar.arrive", "bar.red", "barrier.sync", "barrier.arrive", "barrier.red")
@op("barrier.cta.sync", "barrier.cta.arrive", "barrier.cta.red", "bar.cta.sync", "bar.cta.arrive", "bar.cta.red")
def bar(ins: Instruction, d: Decoder) -> Closure:
    kind = next(p for p in ins.parts if p in ("sync", "arrive", "red"))
    aligned = ins.parts[0] == "bar" or "aligned" in ins.parts
    operands = list(ins.operands)
    out = None
    if kind == "red":
        out, predicate = d.out(operands.pop(0)), d.predicate(operands.pop())
        how = next(p for p in ins.parts if p in ("popc", "and", "or"))
    number = d.uniform(operands[0])
    threads = d.uniform(operands[1]) if len(operands) > 1 else None

    def run(w: Warp):
        if aligned:
            w.need_all(ins.opcode)
        elif not w.full and not (w.mask == w.live).all():
            raise Fault("unsupported", f"{ins.opcode} by a part of the warp ({int(w.mask.sum())} of {int(w.live.sum())})")
        i = number(w)
        if i > 15:
            raise Fault("barrier", f"barrier {i}; there are 16")
        barrier = w.cta.named[i]
        if threads:
            expected = threads(w)
            if not 0 < expected <= 1024 or expected % LANES:
                raise Fault("barrier", f"barrier {i} with {expected} threads; must be a multiple of {LANES}")
            ended = None
        else:
            expected = len(w.cta.warps) * LANES
            ended = sum(other.done for other in w.cta.warps) * LANES
        if kind == "red":
            flags, values = barrier.flags, predicate(w)[w.mask]
            barrier.flags = [flags[0] + int(values.sum()), flags[1] and bool(values.all()), flags[2] or bool(values.any())]
        mine = barrier.arrive(LANES, expected, w.release(), i, ended)
        w.cta.cluster.progress += 1
        if kind == "arrive":
            return None

        def then(w: Warp):
            w.acquire(barrier.done)
            if out is not None:
                result = barrier.result[("popc", "and", "or").index(how)]
                w.write(out, np.full(LANES, result, np.uint32 if how == "popc" else bool))

        def text():
            return f"waits for barrier {i}: {barrier.arrived} of {barrier.expected} threads are there"

        return Wait(lambda: barrier.round > mine, text, then)

    return run


@op("bar.warp.sync")
def bar_warp(ins: Instruction, d: Decoder) -> Closure:
    members = d.reg(ins.operands[0])

    def run(w: Warp):
        wanted = (int(w.regs[members][w.first()]) >> np.arange(LANES) & 1).astype(bool) & w.live
        missing = wanted & ~w.mask
        if not missing.any():
            return
        for i, (pc, lanes) in enumerate(w.groups):
            if lanes[missing].any() and pc != w.pc:
                # The others are on their way here: wait for them with this instruction.
                w.pc -= 1
                w.meet = min(w.meet, pc)
                return _let_others_come(w, i)

    return run


def _let_others_come(w: Warp, i: int) -> None:
    pc, lanes = w.groups.pop(i)
    w.groups.append((w.pc, w.mask))
    w.pc, w.mask, w.full = pc, lanes, False
    w.meet = min(group[0] for group in w.groups)


@op("barrier.cluster")
def barrier_cluster(ins: Instruction, d: Decoder) -> Closure:
    arrive, relaxed = ins.parts[2] == "arrive", "relaxed" in ins.parts

    def run(w: Warp):
        cluster = w.cta.cluster
        barrier = cluster.barrier
        if arrive:
            if "aligned" in ins.parts:
                w.need_all(ins.opcode)
            if w.cluster_round is not None:
                raise Fault("barrier", "barrier.cluster.arrive twice without a wait")
            clock = w.fenced if relaxed else w.release()
            w.cluster_round = barrier.arrive(1, len(cluster.warps), clock, -1, cluster.left)
            cluster.progress += 1
            return None
        if w.cluster_round is None:
            raise Fault("barrier", "barrier.cluster.wait without an arrive")
        mine, w.cluster_round = w.cluster_round, None

        def text():
            return f"waits for the cluster: {barrier.arrived} of {barrier.expected} warps are there"

        return Wait(lambda: barrier.round > mine, text, lambda w: w.acquire(barrier.done))

    return run


# ----- mbarriers ------------------------------------------------------------------------------------------------------


def shared_address(d: Decoder, m: Memory, ins: Instruction):
    """closure(warp) -> addresses [32] in the shared window, of an operand that may be generic."""
    at = d.address(m)
    if any(p.startswith("shared") for p in ins.parts):
        return at

    def generic(w: Warp):
        addresses = at(w) - SHARED_WINDOW
        if (addresses[w.mask] < 0).any():
            raise Fault("out_of_bounds", "the address is not in shared memory")
        return addresses

    return generic


@op("mbarrier.init")
def mbarrier_init(ins: Instruction, d: Decoder) -> Closure:
    at, count = shared_address(d, ins.operands[0], ins), d.reg(ins.operands[1])

    def run(w: Warp):
        for lane in w.lanes():
            address, n = int(at(w)[lane]), int(w.regs[count][lane])
            cta, offset = w.shared(address), address & OFFSET_MASK
            if offset % 8:
                raise Fault("misaligned", f"mbarrier at shared {offset:#x}")
            if not 0 < n < 1 << 20:
                raise Fault("barrier", f"mbarrier with an arrival count of {n}")
            if offset in cta.mbarriers:
                raise Fault("barrier", f"{cta.mbarriers[offset]} is initialised twice without mbarrier.inval")
            w.check_range(cta, offset, offset + 8)
            cta.init_mbarrier(offset, n, w)
            w.cta.cluster.progress += 1

    return run


@op("mbarrier.inval")
def mbarrier_inval(ins: Instruction, d: Decoder) -> Closure:
    at = shared_address(d, ins.operands[0], ins)

    def run(w: Warp):
        for lane in w.lanes():
            address = int(at(w)[lane])
            w.shared(address).drop_mbarrier(w.mbarrier(address))

    return run


@op("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(ins: Instruction, d: Decoder) -> Closure:
    operands = list(ins.operands)
    out = -1
    if not isinstance(operands[0], Memory):
        out = d.out(operands.pop(0))
    at = shared_address(d, operands[0], ins)
    expect, drop = "expect_tx" in ins.parts, ins.parts[1] == "arrive_drop"
    extra = d.reg(operands[1]) if len(operands) > 1 else None
    if "noComplete" in ins.parts:
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")
    relaxed = "relaxed" in ins.parts

    def run(w: Warp):
        addresses = at(w)
        for lane in w.lanes():
            if int(addresses[lane]) >> RANK_SHIFT != w.cta.rank:
                w.visit_barrier(w.shared(int(addresses[lane])), w.mbarrier(int(addresses[lane])))
        clock = w.fenced if relaxed else w.release()
        state = np.zeros(LANES, np.uint64)
        for lane in w.lanes():
            barrier = w.mbarrier(int(addresses[lane]))
            state[lane] = barrier.phase
            count = 1
            if expect:
                barrier.tx += int(w.regs[extra][lane])
            elif extra is not None:
                count = int(w.regs[extra][lane])
            if drop:
                barrier.expected -= count
            if relaxed and w.tcgen05 is not None:
                w.tcgen05.arrive_relaxed(barrier)
            barrier.arrive(clock, count)
        w.cta.cluster.progress += 1
        if out >= 0:
            w.write(out, state)

    return run


@op("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(ins: Instruction, d: Decoder) -> Closure:
    at, amount = shared_address(d, ins.operands[0], ins), d.reg(ins.operands[1])
    sign = 1 if ins.parts[1] == "expect_tx" else -1

    def run(w: Warp):
        addresses = at(w)
        for lane in w.lanes():
            barrier = w.mbarrier(int(addresses[lane]))
            barrier.tx += sign * int(w.regs[amount][lane])
            barrier.check()
        w.cta.cluster.progress += 1

    return run


@op("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(ins: Instruction, d: Decoder) -> Closure:
    """Waits until the phase is complete. test_wait, and try_wait after some time, return without: when nothing else runs."""
    out, at = d.out(ins.operands[0]), shared_address(d, ins.operands[1], ins)
    parity, state = "parity" in ins.parts, d.reg(ins.operands[2], "b32" if "parity" in ins.parts else "b64")
    relaxed = "relaxed" in ins.parts

    def run(w: Warp):
        addresses, lane = at(w), w.first()
        barrier = w.mbarrier(int(addresses[lane]))
        value = int(w.regs[state][lane])
        if len({int(a) for a in addresses[w.mask]}) > 1:
            raise Fault("unsupported", "the lanes of a warp wait for different mbarriers")
        # The phase in progress has parity phase & 1: the other parity is that of the phase before it.
        wanted = barrier.phase + ((barrier.phase & 1) == (value & 1)) if parity else value + 1

        def success(w: Warp):
            if not relaxed:
                w.acquire(barrier.done)
            else:
                w.relaxed = barrier.done.copy() if w.relaxed is None else np.maximum(w.relaxed, barrier.done)
                w.waited_relaxed = np.maximum(w.waited_relaxed, np.maximum(barrier.done[0], barrier.tensor_clock))
            w.write(out, np.ones(LANES, bool))

        def text():
            return f"waits for phase {wanted - 1} (parity {wanted - 1 & 1}) of the {barrier}: {barrier.state()}"

        if barrier.phase >= wanted:
            return success(w)

        def failure(w: Warp):
            w.write(out, np.zeros(LANES, bool))

        return Wait(lambda: barrier.phase >= wanted, text, success, failure)

    return run


@op("mbarrier.pending_count")
def mbarrier_pending(ins: Instruction, d: Decoder) -> Closure:
    raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")


def initialised_for_async(barrier: Mbarrier, w: Warp) -> None:
    """An mbarrier that asynchronous work signals must have been made visible to the asynchronous proxy."""
    if not barrier.fenced and w.clock[1, barrier.init_agent] < barrier.init_epoch:
        raise Fault(
            "proxy", f"{barrier} is used by asynchronous work, but no fence.mbarrier_init stands behind its initialisation"
        )


# ----- fences ---------------------------------------------------------------------------------------------------------


@op("fence", "membar")
def fence(ins: Instruction, d: Decoder) -> Closure:
    parts = set(ins.parts[1:])
    if "mbarrier_init" in parts:

        def init(w: Warp):
            for cta in w.cta.cluster.ctas:
                for barrier in cta.mbarriers.values():
                    if barrier.init_agent == w.agent:
                        barrier.fenced = True
            w.fence()

        return init
    if any(p.startswith("proxy") for p in parts):
        if any("async" in p for p in parts):
            # A fence of global memory only says nothing about shared memory.
            if "global" in parts:
                return lambda w: None
            return lambda w: w.fence_proxy_async()
        if "tensormap::generic" in ins.opcode or "alias" in parts:
            return lambda w: None
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")
    known = {"sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "gl", "sys", "sync_restrict::shared::cta"}
    known |= {"sync_restrict::shared::cluster"}
    if parts - known:
        raise UnsupportedInstruction(f"PTX line {ins.line}: the emulator does not know {ins.opcode}")
    is_wide = bool(parts & WIDE)
    return lambda w: w.fence(is_wide)


# ----- between launches -----------------------------------------------------------------------------------------------


@op("griddepcontrol")
def griddepcontrol(ins: Instruction, d: Decoder) -> Closure:
    if ins.parts[1] != "wait":
        return lambda w: None

    def run(w: Warp):
        grid = w.machine
        return Wait(lambda: grid.dependency_met, lambda: DEPENDENCY)

    return run


# ----- cluster launch control -----------------------------------------------------------------------------------------


@op("clusterlaunchcontrol")
def clusterlaunchcontrol(ins: Instruction, d: Decoder) -> Closure:
    """try_cancel: take over the next cluster that has not started. The 16-byte answer: x, y, z of its first CTA, and a flag."""
    if ins.parts[1] == "try_cancel":
        at, bar_at = shared_address(d, ins.operands[0], ins), d.uniform(ins.operands[1])
        multicast = any(p.startswith("multicast") for p in ins.parts)

        def cancel(w: Warp):
            cluster, grid = w.cta.cluster, w.machine
            offset, bar_offset = int(at(w)[w.first()]) & OFFSET_MASK, bar_at(w) & OFFSET_MASK
            ctas = cluster.ctas if multicast else [w.cta]
            if offset % 16:
                raise Fault("misaligned", f"clusterlaunchcontrol.try_cancel: its answer at shared {offset:#x} takes 16 bytes")
            for cta in ctas:
                w.check_range(cta, offset, offset + 16)

            def answer():
                taken = grid.waiting.pop() if grid.waiting else None
                words = [*taken[0], 1] if taken else [0, 0, 0, 0]
                for cta in ctas:
                    barrier = cta.mbarriers[bar_offset]
                    cta.shared.data[offset : offset + 16] = np.array(words, np.uint32).view(np.uint8)
                    barrier.complete_tx(16)

            for cta in ctas:
                barrier = cta.mbarriers.get(bar_offset)
                if barrier is None:
                    raise Fault("barrier", f"no mbarrier at shared {bar_offset:#x} of CTA {cta.rank}")
                granules = np.arange(offset // 2, offset // 2 + 8)
                w.note_write(cta, granules, barrier.agent, barrier.phase + 1)
            cluster.start(answer, "clusterlaunchcontrol")

        return cancel
    what = ins.parts[2] if ins.parts[1] == "query_cancel" else ""
    out, handle = d.outs(ins.operands[0]), d.reg(ins.operands[1], "b128")

    def query(w: Warp):
        words = np.ascontiguousarray(w.regs[handle]).view(np.uint32).reshape(LANES, 4)
        if what == "is_canceled":
            w.write(out[0], words[:, 3] != 0)
            return
        names = [p.rpartition("::")[2] for p in ins.parts]
        columns = [next(i for i, n in enumerate("xyz") if n in names)] if any(n in "xyz" for n in names) else [0, 1, 2, 3]
        for i, column in zip(out, columns):
            if i >= 0:
                w.write(i, np.ascontiguousarray(words[:, column]))

    return query
