"""The device kernel behind `schedule.plan_decode`: one CTA turns the requests' lengths into a DecodePlan's two tensors.

The time is latency, not bandwidth, so the serial part is kept to the P steps that are serial by nature.

 1. all threads   cost[i] = sum over requests j < i of (blocks_j + fixed_overhead), i = 0 ... b: one prefix sum
 2. warp 0        the cuts x_0 = 0 < x_1 < ... on the cost axis, one part a step; a part takes `payload` of cost:
                    y       = x_p + payload
                    e       = the last i with cost[i] <= y                 32 entries live in the lanes: one ballot
                    x_{p+1} = min(max(y - fixed_overhead, cost[e]), cost[b])
                  x_{p+1} > cost[e]: request e is cut after x_{p+1} - cost[e] of its blocks; else part p ends with e - 1
 3. all threads   the records [P, 8] and num_splits [b + 1] from the cuts, in parallel

Step 2 is FlashMLA's walk over requests and blocks in closed form. The walk gives a part `payload`
of cost, takes whole requests while they fit, and gives the rest, less the overhead, to a piece of the next one: on the
cost axis that is the three lines above, and a search replaces the walk over requests. So the time grows with P, hardly
with b.

All arithmetic is 32-bit: the host makes sure that twice the total cost fits (`schedule._plan_by_kernel`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.memory
from cutlass import Int32, Uint32, const_expr, cute

from . import jit

NUM_THREADS = 1024
NUM_WARPS = NUM_THREADS // 32  # 32: step 1 lets the lanes of a warp stand for the warps of the CTA
SMEM_REQUESTS = 16384  # cost in shared memory up to this b: 64 KiB, any Hopper or Blackwell has it
SMEM_PARTS = 1024  # cuts in shared memory up to this P: 20 KiB; P is at most the number of SMs with the shipped configs
ABOVE_ALL = 2**31 - 1  # a cost above every y, for entries past cost[b]

# What step 2 leaves for step 3 about part p (rows of a [CUT_FIELDS, P + 1] tensor).
CUT_REQ, CUT_BLOCK, CUT_SPLIT, CUT_COUNT, CUT_SLOT = range(5)
CUT_FIELDS = 5


@dataclass(frozen=True)
class PlanProblem:
    """What changes the planner's code; `use_workspace`: cost and cuts lie in global instead of shared memory."""

    has_topk_length: bool
    use_workspace: bool
    has_extra_topk_length: bool = False  # without, every request has extra_topk extra keys


def needs_workspace(b: int, num_parts: int) -> bool:
    """Whether a plan of b requests in num_parts parts is too large for shared memory."""
    return b > SMEM_REQUESTS or num_parts > SMEM_PARTS


def workspace_size(b: int, num_parts: int) -> int:
    """int32 elements of the workspace of such a plan: cost [b + 1], cuts [CUT_FIELDS, P + 1]."""
    return b + 1 + CUT_FIELDS * (num_parts + 1)


class Lengths(NamedTuple):
    """How many keys the requests have."""

    topk_length: cute.Tensor | None  # [b] int32
    topk: Int32
    extra_topk_length: cute.Tensor | None  # [b] int32
    extra_topk: Int32


class Planner:
    """The kernel and its host function, specialised for one PlanProblem."""

    def __init__(self, problem: PlanProblem):
        self.has_topk_length = problem.has_topk_length
        self.has_extra_topk_length = problem.has_extra_topk_length
        self.use_workspace = problem.use_workspace

    @cute.jit
    def __call__(
        self,
        topk_length: cute.Tensor | None,  # [b] int32
        topk: Int32,
        extra_topk_length: cute.Tensor | None,  # [b] int32
        extra_topk: Int32,  # 0: no extra keys
        tile_n: Int32,
        fixed_overhead: Int32,
        workspace: cute.Tensor | None,  # [workspace_size] int32
        metadata: cute.Tensor,  # [P, 8] int32
        num_splits: cute.Tensor,  # [b + 1] int32
        stream,
    ):
        lengths = Lengths(topk_length, topk, extra_topk_length, extra_topk)
        self.kernel(lengths, tile_n, fixed_overhead, workspace, metadata, num_splits).launch(
            grid=[1, 1, 1], block=[NUM_THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        lengths: Lengths,
        tile_n: Int32,
        fixed_overhead: Int32,
        workspace: cute.Tensor | None,
        metadata: cute.Tensor,
        num_splits: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        b = Int32(cute.size(num_splits)) - 1
        num_parts = Int32(cute.size(metadata, mode=[0]))

        smem = cutlass.memory.SmemAllocator()
        s_warp_cost = smem.allocate_tensor(Int32, cute.make_layout(NUM_WARPS), 16)  # of a warp's requests together
        s_num_used = smem.allocate_tensor(Int32, cute.make_layout(1), 4)  # parts with work
        if const_expr(self.use_workspace):
            cost = cute.make_tensor(workspace.iterator, cute.make_layout(b + 1))
            cuts = cute.make_tensor(
                workspace.iterator + (b + 1), cute.make_layout((CUT_FIELDS, num_parts + 1), stride=(num_parts + 1, 1))
            )
        else:
            cost = smem.allocate_tensor(Int32, cute.make_layout(SMEM_REQUESTS + 1), 16)
            cuts = smem.allocate_tensor(
                Int32, cute.make_layout((CUT_FIELDS, SMEM_PARTS + 1), stride=(SMEM_PARTS + 1, 1)), 16
            )

        if const_expr(self.has_topk_length or self.has_extra_topk_length):
            self.sum_costs(lengths, tile_n, fixed_overhead, b, s_warp_cost, cost)
        else:
            each = self.num_blocks(lengths, Int32(0), tile_n) + fixed_overhead
            for i in cutlass.range(tid, b + 1, NUM_THREADS, unroll=1):
                cost[i] = i * each
        cute.arch.sync_threads()  # every thread's entries of cost -> warp 0's search

        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            self.cut(cost, fixed_overhead, b, num_parts, cuts, s_num_used)
        cute.arch.sync_threads()  # warp 0's cuts -> every thread

        num_used = s_num_used[0]
        self.write_metadata(cost, cuts, fixed_overhead, b, num_used, metadata)
        self.write_num_splits(cuts, num_used, num_splits)

    @cute.jit
    def num_blocks(self, lengths: Lengths, r: Int32, tile_n: Int32) -> Int32:
        """Key blocks of request r: those of its keys, clamped to [0, topk], at least one, to write the empty row; and
        those of its extra keys, clamped to [0, extra_topk], which begin with a block of their own."""
        n, extra = lengths.topk, lengths.extra_topk
        if const_expr(self.has_topk_length):
            n = min(max(lengths.topk_length[r], Int32(1)), n)
        if const_expr(self.has_extra_topk_length):
            extra = min(max(lengths.extra_topk_length[r], Int32(0)), extra)
        tile = Uint32(tile_n)  # unsigned: the sums below pass 2^31
        return Int32((Uint32(n) + tile - 1) // tile + (Uint32(extra) + tile - 1) // tile)

    @cute.jit
    def sum_costs(
        self,
        lengths: Lengths,
        tile_n: Int32,
        fixed_overhead: Int32,
        b: Int32,
        s_warp_cost: cute.Tensor,
        cost: cute.Tensor,
    ):
        """Step 1, all threads: cost[0 ... b]. A warp owns rows of 32 consecutive requests, a lane one request a row."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        rows = (b + NUM_THREADS - 1) // NUM_THREADS  # of 32 requests, in each warp
        first = warp * rows * 32 + lane

        # The warp's sum, then the sum of all warps before it.
        mine = Int32(0)
        for i in cutlass.range(rows, unroll=4):
            r = first + i * 32
            if r < b:
                mine += self.num_blocks(lengths, r, tile_n) + fixed_overhead
        mine = cute.arch.warp_redux_sync(mine, "add")
        if lane == 0:
            s_warp_cost[warp] = mine
        cute.arch.sync_threads()  # lane 0 of every warp -> all warps; written once, so no second barrier
        of_warp = s_warp_cost[lane]
        before = cute.arch.warp_redux_sync(of_warp if lane < warp else Int32(0), "add")
        total = cute.arch.warp_redux_sync(of_warp, "add")
        if warp == 0 and lane == 0:
            cost[b] = total

        # The lengths again (now in L1): an inclusive scan of each row, shifted by the lane's own cost.
        for i in cutlass.range(rows, unroll=2):
            r = first + i * 32
            own = Int32(0)
            if r < b:
                own = self.num_blocks(lengths, r, tile_n) + fixed_overhead
            upto = own
            for s in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(upto, 1 << s, mask_and_clamp=0)  # 0: shfl.up clamps at lane 0
                if lane >= (1 << s):
                    upto += lower
            if r < b:
                cost[r] = before + upto - own
            before += cute.arch.shuffle_sync(upto, 31)

    @cute.jit
    def cut(
        self,
        cost: cute.Tensor,
        fixed_overhead: Int32,
        b: Int32,
        num_parts: Int32,
        cuts: cute.Tensor,
        s_num_used: cute.Tensor,
    ):
        """Step 2, warp 0: where each part begins. Every lane keeps the same state; lane 0 writes it down.

        The last state written is the end: request b, block 0, behind the parts with work. They are at most P, as a part
        advances by at least payload - fixed_overhead >= cost[b] / P.
        """
        lane = cute.arch.lane_idx()
        total = cost[b]
        payload = Int32(Uint32(total + num_parts - 1) // Uint32(num_parts)) + fixed_overhead

        p = Int32(0)
        x = Int32(0)  # the cut on the cost axis
        req = Int32(0)  # the request it falls in, i.e. cost[req] <= x < cost[req + 1]
        block = Int32(0)  # x - cost[req], < blocks of req; > 0: req is cut here
        split = Int32(0)  # cuts of req up to here
        count = Int32(0)  # cuts of all requests up to here
        num_cut = Int32(0)  # requests with a cut up to here
        base = Int32(0)  # the lanes hold cost[base ... base + 31], base <= req
        window = self.load_window(cost, b, base, lane)
        while req < b:
            y = x + payload
            taken = window <= y
            num_taken = cute.arch.popc(cute.arch.vote_ballot_sync(taken))  # >= 1: cost[base] <= x < y
            floor = cute.arch.warp_redux_sync(window if taken else Int32(0), "max")  # cost[next_req]
            next_req = base + num_taken - 1
            if lane == 0:
                self.write_cut(cuts, p, req, block, split, count, num_cut)
            if num_taken == 32:  # y may lie beyond the window
                next_req = self.search(cost, b, y, next_req, lane)
                base = next_req
                window = self.load_window(cost, b, base, lane)
                floor = cute.arch.shuffle_sync(window, 0)

            x = min(max(y - fixed_overhead, floor), total)  # total: y may lie beyond the end
            block = x - floor
            is_cut = Int32(1) if block > 0 else Int32(0)
            split = split + 1 if next_req == req else is_cut  # next_req == req: cut again, as x has grown
            count += is_cut
            if split == 1:
                num_cut += 1
            req = next_req
            p += 1
        if lane == 0:
            self.write_cut(cuts, p, req, block, split, count, num_cut)
            s_num_used[0] = p

    @cute.jit
    def write_cut(
        self,
        cuts: cute.Tensor,
        p: Int32,
        req: Int32,
        block: Int32,
        split: Int32,
        count: Int32,
        num_cut: Int32,
    ):
        cuts[CUT_REQ, p] = req
        cuts[CUT_BLOCK, p] = block
        cuts[CUT_SPLIT, p] = split
        cuts[CUT_COUNT, p] = count
        # Pieces behind the cut: a request with m cuts has m + 1 pieces, but the last piece of req is still to come.
        cuts[CUT_SLOT, p] = count + num_cut - (Int32(1) if block > 0 else Int32(0))

    @cute.jit
    def load_window(self, cost: cute.Tensor, b: Int32, base: Int32, lane: Int32) -> Int32:
        """cost[base + lane], ABOVE_ALL past the end."""
        value = Int32(ABOVE_ALL)
        if base + lane <= b:
            value = cost[base + lane]
        return value

    @cute.jit
    def search(self, cost: cute.Tensor, b: Int32, y: Int32, start: Int32, lane: Int32) -> Int32:
        """The last i with cost[i] <= y, given cost[start] <= y: one warp, 32 probes a round, the stride first grows."""
        i = start
        stride = Int32(1)
        hits = self.count_hits(cost, b, y, i, stride, lane)
        while hits == 32:  # ends at stride 32^5 at the latest: that spans more requests than the 32-bit cost allows
            i += 31 * stride
            stride *= 32
            hits = self.count_hits(cost, b, y, i, stride, lane)
        i += (hits - 1) * stride
        while stride > 1:  # the answer is in [i, i + stride)
            stride >>= 5
            hits = self.count_hits(cost, b, y, i, stride, lane)
            i += (hits - 1) * stride
        return i

    @cute.jit
    def count_hits(self, cost: cute.Tensor, b: Int32, y: Int32, i: Int32, stride: Int32, lane: Int32) -> Int32:
        """Of cost[i], cost[i + stride], ..., cost[i + 31 stride] (ascending), how many are <= y; at least one."""
        at = i + lane * stride
        value = Int32(ABOVE_ALL)
        if at <= b:
            value = cost[at]
        return cute.arch.popc(cute.arch.vote_ballot_sync(value <= y))

    @cute.jit
    def write_metadata(
        self,
        cost: cute.Tensor,
        cuts: cute.Tensor,
        fixed_overhead: Int32,
        b: Int32,
        num_used: Int32,
        metadata: cute.Tensor,
    ):
        """Step 3, a thread a part: metadata[p] from the cut before the part and the one behind it."""
        tid, _, _ = cute.arch.thread_idx()
        num_parts = Int32(cute.size(metadata, mode=[0]))
        for p in cutlass.range(tid, num_parts, NUM_THREADS, unroll=1):
            record = cute.make_rmem_tensor(8, Int32)
            record.fill(0)
            record[0] = b  # no work
            record[1] = b - 1
            record[7] = cuts[CUT_SLOT, min(p, num_used)]
            if p < num_used:
                req, block = cuts[CUT_REQ, p], cuts[CUT_BLOCK, p]
                next_req, next_block = cuts[CUT_REQ, p + 1], cuts[CUT_BLOCK, p + 1]
                first_cut = Int32(1) if block > 0 else Int32(0)
                last_cut = Int32(1) if next_block > 0 else Int32(0)
                end_req = next_req - 1 + last_cut
                end_block = next_block
                if next_block == 0:  # all blocks of next_req - 1 (>= req: a part never ends where it begins)
                    end_block = cost[next_req] - cost[end_req] - fixed_overhead
                if req == end_req:  # one request only: cut at either side
                    first_cut = first_cut | last_cut
                    last_cut = first_cut
                record[0] = req
                record[1] = end_req
                record[2] = block
                record[3] = end_block
                record[4] = cuts[CUT_SPLIT, p]
                record[5] = first_cut
                record[6] = last_cut
            cute.autovec_copy(record, metadata[p, None])

    @cute.jit
    def write_num_splits(self, cuts: cute.Tensor, num_used: Int32, num_splits: cute.Tensor):
        """Step 3, a warp a part: num_splits[r] = r + cuts below cost[r], for r past this cut's req up to the next's."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if tid == 0:
            num_splits[0] = 0
        for p in cutlass.range(warp, num_used, NUM_WARPS, unroll=1):
            count = cuts[CUT_COUNT, p]
            for r in cutlass.range(cuts[CUT_REQ, p] + 1 + lane, cuts[CUT_REQ, p + 1] + 1, 32, unroll=1):
                num_splits[r] = r + count


def compile(problem: PlanProblem, config: None, arch: str):
    """The compiled planner; takes (topk_length, topk, extra_topk_length, extra_topk, tile_n, fixed_overhead, workspace,
    metadata, num_splits)."""
    Planner.kernel.set_name_prefix(
        "mla_schedule_" + arch.replace("_", "").rstrip("af"), remove_cutlass_symbol=True, keep_mangled_name=False
    )
    sym, sym64 = cute.sym_int, cute.sym_int64

    def lengths(present: bool):
        return jit.fake_tensor(Int32, (sym(),), stride=(sym64(),), align=4) if present else None

    return jit.build(
        Planner(problem),
        lengths(problem.has_topk_length),
        Int32(0),
        lengths(problem.has_extra_topk_length),
        Int32(0),
        Int32(0),
        Int32(0),
        jit.fake_tensor(Int32, (sym(),), align=16) if problem.use_workspace else None,
        jit.fake_tensor(Int32, (sym(), 8), align=16),
        jit.fake_tensor(Int32, (sym(),), align=4),
        jit.fake_stream(),
        arch=arch,
        name="schedule",
    )
