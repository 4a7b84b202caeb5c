"""Merges the pieces of every request split in three or more: the kernel that runs behind the main kernel of an op.

A piece is one part's softmax average over its share of a request's keys, o_partial, with its base-2 log-sum,
lse_partial. With m the largest lse_partial of a row, S = sum 2^(lse_i - m) and G = log2(S) + m (+inf if S is 0):

    lse = G ln 2                             the sink never enters it
    G  := log2(2^G + 2^(sink log2 e))        the sink counts once, here; without anything attended G = sink log2 e
    out = sum of 2^(lse_i - G) o_i           in an order that plan and shape alone decide: the same bits every time

Two pieces the main kernel merges itself, in whichever part ends last; for three or more that would be a chain. Blackwell's
leaves all to this one (`fewest`), and keeps all its pieces in fp16.

O is kept in *fragment order*, as the warps of the main kernel hold it in accumulators: lane 4 g + c has of the j-th 8 columns
heads g + 8 r and columns 2 c + e (r, e = 0, 1). o_partial [slots, s_q, groups of 16 heads, 2 halves of 256 columns, 16 KiB]
holds of one of two pieces fp32 [32 (j), 32 lanes, 2 (r), 2 (e)]. Of three pieces or more it holds fp16, because writing and
reading them back is what takes the time: [16, 32 lanes, 2 (j % 2), 2 (r), 2 (e)] and behind that, at 8 KiB, [16] fp32: a power
of two for each head, so that its largest value stands at 2^14 and more (an error of 2^-12 beside out's 2^-9). So every access
is 16 bytes a lane and 512 contiguous bytes a warp; those are the unit of work.

The maths, and the programmatic dependent launch behind the main kernel, are FlashMLA's combine. Three things differ. The plan
numbers the pieces itself (record fields 4 and 7), so the work is found from the parts, not from all b requests. The grid is at
most two CTAs an SM, which share all units: CTAs without work would cost more than the work. And a warp does two units with the
same weights and keeps 8 loads a lane in flight; of many pieces several warps take a share each: latency sets the pace.
"""

import math

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr, cute

from . import jit
from .validate import Problem

GROUP = 16  # heads of a warp's accumulator
HALF = 256  # and its columns: those of a math warpgroup
UNITS = 2 * HALF // 16  # of 512 bytes, in the 512 columns of a group
SCALES = 8192  # bytes from the beginning of half a group to its heads' powers of two
WARPS = 8
THREADS = 32 * WARPS
BLOCK = 2  # units of a warp, which share the weights
PIECES = 4  # in a lane's registers: with BLOCK units of each 8 loads are in flight
MAX_SHARES = 8  # warps among which the pieces are divided
CTAS_PER_SM = 2  # what registers allow
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
INF = float("inf")


def partials(iterator: cute.Pointer, slots: Int32, s_q: Int32, h_q: int) -> tuple[cute.Tensor, cute.Tensor]:
    """(o_partial [slots, s_q, groups, 2, 4096], lse_partial [slots, s_q, h_q]): one behind the other in scratch."""
    groups = -(-h_q // GROUP)
    shape = (slots, s_q, groups, 2, GROUP * HALF)
    row = 2 * GROUP * HALF
    strides = (Int64(s_q) * (groups * row), groups * row, row, GROUP * HALF, 1)
    o_partial = cute.make_tensor(iterator, cute.make_layout(shape, stride=strides))
    lse_shape = cute.make_layout((slots, s_q, h_q), stride=(Int64(s_q) * h_q, h_q, 1))
    return o_partial, cute.make_tensor(iterator + Int64(slots) * s_q * (groups * row), lse_shape)


def normalise(top: Float32, total: Float32, sink_log2: Float32 | None) -> tuple[Float32, Float32]:
    """(lse, G), both base 2, from m and S: +inf where nothing is attended; G as it enters the weights."""
    lse = cutlass.select_(total == 0.0, Float32(INF), cute.math.log2(total, fastmath=True) + top)
    if sink_log2 is None:
        return lse, lse
    with_sink = lse + cute.math.log2(1.0 + cute.math.exp2(sink_log2 - lse, fastmath=True), fastmath=True)
    alone = cutlass.select_(sink_log2 == -INF, Float32(INF), sink_log2)
    return lse, cutlass.select_(lse == INF, alone, with_sink)


class Combine:
    """The combine of one problem, launched by a host function that has just launched the main kernel on `stream`.

    fewest: pieces of a request that it takes, 2 or 3; of fewer the main kernel makes the result.
    """

    def __init__(self, problem: Problem, fewest: int = 3):
        self.fewest = fewest
        self.h_q, self.d_v = problem.h_q, problem.d_v
        self.groups, self.head_tiles = -(-problem.h_q // GROUP), problem.head_tiles

    @cute.jit
    def launch(
        self,
        metadata: cute.Tensor,  # [P, 8] int32, as num_splits from a launch before the main kernel's
        num_splits: cute.Tensor,  # [b + 1] int32
        o_partial: cute.Tensor,  # as lse_partial of `partials`, 16-byte aligned
        lse_partial: cute.Tensor,  # base 2; -inf: an empty piece, o_partial unused
        attn_sink: cute.Tensor | None,  # [h_q] fp32, natural-log units
        out: cute.Tensor,  # [b, s_q, h_q, d_v] bf16, last dim contiguous, rows 16-byte aligned
        lse: cute.Tensor,  # [b, s_q, h_q] fp32, natural log
        max_splits: Int32,  # the most pieces that a request may be in
        stream,
    ):
        """Writes out and lse of the requests in `fewest` pieces or more; the others are left as the main kernel wrote them.

        Programmatic dependent launch: the main kernel must be launched without it, and may trigger early.
        """
        # Each of these requests begins in one part and has at least one for itself, or one to end in.
        most = min(out.shape[0], (metadata.shape[0] - 1) // (self.fewest - 1))
        shares = Int32(1)
        if max_splits >= 32:
            shares = Int32(MAX_SHARES)
        elif max_splits >= 16:
            shares = Int32(4)
        elif max_splits >= 8:
            shares = Int32(2)
        sms = metadata.shape[0] * out.shape[1] * self.head_tiles  # of the main kernel: a CTA each
        ctas = min(most * out.shape[1] * (self.groups * UNITS // BLOCK) * shares // WARPS, CTAS_PER_SM * sms)
        if (max_splits >= self.fewest) & (ctas > 0):
            self.kernel(metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse, shares).launch(
                grid=[ctas, 1, 1],
                block=[THREADS, 1, 1],
                use_pdl=True,
                stream=stream,
            )

    @cute.kernel
    def kernel(
        self,
        metadata: cute.Tensor,
        num_splits: cute.Tensor,
        o_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        attn_sink: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        shares: Int32,  # warps to a block, so that each has about four pieces
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Smem:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * BLOCK * 256], 16]  # of the shares
            works: cute.struct.Align[cute.struct.MemRange[Int32, THREADS // 2 * 4], 16]  # req, first slot, pieces
            counts: cute.struct.MemRange[Int32, WARPS]  # of each warp's parts: those that own a merge

        storage = cutlass.memory.SmemAllocator().allocate(Smem)
        sums = cute.make_tensor(storage.sums.data_ptr(), cute.make_layout((8, 32, BLOCK, WARPS)))
        works = cute.make_tensor(storage.works.data_ptr(), cute.make_layout((4, THREADS // 2)))
        counts = cute.make_tensor(storage.counts.data_ptr(), WARPS)

        num_parts = metadata.shape[0]
        for first in cutlass.range(0, num_parts, THREADS, unroll=1):  # once, but for plans larger than any GPU's
            # The plan is older than the main kernel: it may be read while that one still runs. A part that holds split 1 of
            # a request, and, if two pieces are too few, has split 2 behind it, owns the merge.
            part = first + tid
            split, next_split = Int32(0), Int32(0)
            if part < num_parts:
                split = metadata[part, 4]
            if part + 1 < num_parts:
                next_split = metadata[part + 1, 4]
            is_owner = split == 1
            if const_expr(self.fewest > 2):
                is_owner = is_owner & (next_split == 2)
            owners = cute.arch.vote_ballot_sync(is_owner)
            if first > 0:
                cute.arch.sync_threads()  # the last round's are read
            if lane == 0:
                counts[warp] = cute.arch.popc(owners)
            cute.arch.sync_threads()
            num_works, rank = Int32(0), cute.arch.popc(owners & ((1 << lane) - 1))
            for w in cutlass.range_constexpr(WARPS):
                rank += cutlass.select_(w < warp, counts[w], Int32(0))
                num_works += counts[w]
            if num_works > 0:
                if is_owner:
                    req = metadata[part, 0]
                    works[0, rank] = req
                    works[1, rank] = metadata[part, 7] - 1  # field 7 is the slot of split 1; the pieces stand in split order
                    works[2, rank] = num_splits[req + 1] - num_splits[req]
                cute.arch.sync_threads()
                cute.arch.griddepcontrol_wait()  # the main kernel's o_partial and lse_partial -> the loads of merge()
                blocks = WARPS // shares  # a CTA does at a time
                rounds = out.shape[1] * (self.groups * UNITS // BLOCK) // blocks  # of a request: no rest, UNITS // BLOCK is 16
                for i in cutlass.range(cta, num_works * rounds, num_ctas, unroll=1):
                    work = i // rounds
                    req, first_slot, n = works[0, work], works[1, work], works[2, work]
                    item = i % rounds * blocks + warp // shares
                    self.merge(
                        o_partial, lse_partial, attn_sink, out, lse, sums, lane, warp, req, first_slot, n, item,
                        warp % shares, shares,
                    )  # fmt: skip
        if cta == 0:
            # Even when nothing is split, this grid must not end before the main kernel does, or the kernel behind it
            # could start early: one CTA always waits.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def merge(
        self, o_partial: cute.Tensor, lse_partial: cute.Tensor, attn_sink: cute.Tensor | None, out: cute.Tensor,
        lse: cute.Tensor, sums: cute.Tensor, lane: Int32, warp: Int32, req: Int32, first_slot: Int32, n: Int32,
        item: Int32, share: Int32, shares: Int32,
    ):  # fmt: skip
        """BLOCK units of one request from n pieces: this warp sums up pieces share, share + shares, ..."""
        first = item % (UNITS // BLOCK) * BLOCK  # unit of the group
        group, s_idx = item // (UNITS // BLOCK) % self.groups, item // (UNITS // BLOCK * self.groups)
        g, c = lane // 4, lane % 4
        # Offsets in 64 bits and bytes; a step leads from one piece to the next.
        step_o = Int64(out.shape[1]) * (self.groups * 2 * GROUP * HALF * 4)
        step_lse = Int64(out.shape[1]) * (self.h_q * 4)
        heads = [cutlass.min(GROUP * group + g + 8 * r, self.h_q - 1) for r in (0, 1)]
        piece_lse = [cute.domain_offset((Int64(first_slot), s_idx, head), lse_partial).iterator.toint() for head in heads]
        half, first = first // (UNITS // 2), first % (UNITS // 2)
        piece = o_partial[Int64(first_slot), s_idx, group, half, None].iterator.toint()
        piece_scale = [piece + (SCALES + (g + 8 * r) * 4) for r in (0, 1)]
        address = piece + share * step_o + (first * 512 + lane * 16)
        left = (n - share + shares - 1) // shares

        # The first pieces are under way while m and S are computed.
        rO = cute.make_rmem_tensor((4, BLOCK, PIECES), Uint32)
        lses, scales = cute.make_rmem_tensor((2, PIECES), Float32), cute.make_rmem_tensor((2, PIECES), Float32)
        rO.fill(0)
        self.load_pieces(address, shares * step_o, left, rO)
        self.load_by_head(piece_lse, step_lse, share, shares, n, lses)
        self.load_by_head(piece_scale, step_o, share, shares, n, scales)

        # Over pieces c + 4 k, then over the quad. Finite: -inf - -inf is NaN.
        top, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        top.fill(-1e30)
        total.fill(0.0)
        some = cute.make_rmem_tensor((2, 4), Float32)
        for i in cutlass.range(c, n, 16, unroll=1):
            self.load_by_head(piece_lse, step_lse, i, 4, n, some)
            for r in cutlass.range_constexpr(2):
                new = cute.arch.fmax(
                    cute.arch.fmax(cute.arch.fmax(some[r, 0], some[r, 1]), cute.arch.fmax(some[r, 2], some[r, 3])), top[r]
                )
                total[r] = total[r] * cute.math.exp2(top[r] - new, fastmath=True)
                for k in cutlass.range_constexpr(4):
                    total[r] = total[r] + cute.math.exp2(some[r, k] - new, fastmath=True)
                top[r] = new
        merged, exponent = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)  # lse and G, base 2
        for r in cutlass.range_constexpr(2):
            new = cute.arch.warp_reduction_max(top[r], threads_in_group=4)
            total[r] = total[r] * cute.math.exp2(top[r] - new, fastmath=True)
            sink_log2 = None
            if const_expr(attn_sink is not None):
                sink_log2 = attn_sink[heads[r]] * LOG2_E
            total_quad = cute.arch.warp_reduction_sum(total[r], threads_in_group=4)
            merged[r], exponent[r] = normalise(new, total_quad, sink_log2)

        acc = cute.make_rmem_tensor((8, BLOCK), Float32)  # e + 2 r + 4 (j % 2)
        acc.fill(0.0)
        for i in cutlass.range(0, left, PIECES, unroll=1):
            for k in cutlass.range_constexpr(PIECES):
                weight, is_empty = [], []
                for r in (0, 1):
                    w = cute.math.exp2(lses[r, k] - exponent[r], fastmath=True)
                    is_empty.append(lses[r, k] == -INF)  # or past the last piece
                    weight.append(cutlass.select_(is_empty[r], Float32(0), w * scales[r, k]))
                for u in cutlass.range_constexpr(BLOCK):
                    words, values = cute.make_rmem_tensor(4, Uint32), cute.make_rmem_tensor(8, Float32)
                    for j in (0, 1, 2, 3):  # an empty piece may hold anything: 0 * NaN must not enter
                        words[j] = cutlass.select_(is_empty[j % 2], Uint32(0), rO[j, u, k])
                    values.store(cute.recast_tensor(words, Float16).load().to(Float32))
                    for j in cutlass.range_constexpr(8):
                        acc[j, u] = acc[j, u] + weight[j // 2 % 2] * values[j]
            address += (PIECES * shares) * step_o
            self.load_pieces(address, shares * step_o, left - (i + PIECES), rO)
            self.load_by_head(piece_lse, step_lse, share + (i + PIECES) * shares, shares, n, lses)
            self.load_by_head(piece_scale, step_o, share + (i + PIECES) * shares, shares, n, scales)

        cute.arch.sync_threads()  # the last item's sums are read
        for u in cutlass.range_constexpr(BLOCK):
            cute.autovec_copy(acc[None, u], sums[None, lane, u, warp])
        cute.arch.sync_threads()
        for u in cutlass.range(share, BLOCK, shares, unroll=1):
            total_o = cute.make_rmem_tensor(8, Float32)
            total_o.fill(0.0)
            for other in cutlass.range(warp - share, warp - share + shares, unroll=1):
                for e in cutlass.range_constexpr(8):
                    total_o[e] = total_o[e] + sums[e, lane, u, other]
            for r in cutlass.range_constexpr(2):
                head = GROUP * group + g + 8 * r
                if head < self.h_q:
                    pairs = cute.zipped_divide(out[Int64(req), s_idx, head, None], (2,))  # ((2), 256)
                    for j in cutlass.range_constexpr(2):
                        pair, bf16 = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, BFloat16)
                        pair[0], pair[1] = total_o[4 * j + 2 * r], total_o[4 * j + 2 * r + 1]
                        bf16.store(pair.load().to(BFloat16))
                        cute.autovec_copy(bf16, pairs[None, half * (HALF // 2) + 4 * (2 * (first + u) + j) + c])
                    if half + first + u + c == 0:
                        lse[Int64(req), s_idx, head] = merged[r] * LN_2

    @cute.jit
    def load_pieces(self, address: Int64, step: Int64, left: Int32, rO: cute.Tensor):
        """rO[:, u, k] = 16 bytes of unit u of the k-th piece from `address`, step bytes apart, while there are any left."""
        for k in cutlass.range_constexpr(PIECES):
            if k < left:
                for u in cutlass.range_constexpr(BLOCK):
                    p = cute.make_ptr(Uint32, address + (k * step + u * 512), cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(cute.make_tensor(p, cute.make_layout(4)), rO[None, u, k])

    @cute.jit
    def load_by_head(self, first: list, step: Int64, i: Int32, by: Int32, n: Int32, values: cute.Tensor):
        """values[r, k] = what stands for piece i + k by, `step` bytes apart from the first piece's at `first`[r]; -inf past the
        last piece."""
        for k in cutlass.range_constexpr(values.shape[1]):
            for r in cutlass.range_constexpr(2):
                value = Float32(-INF)
                if i + k * by < n:
                    p = cute.make_ptr(Float32, first[r] + (i + k * by) * step, cute.AddressSpace.gmem, assumed_align=4)
                    value = cute.make_tensor(p, cute.make_layout(1))[0]
                values[r, k] = value


class CombineOnly:
    """Host function of the combine alone, for tests: the partials are made by something else."""

    def __init__(self, problem: Problem):
        self.problem = problem

    @cute.jit
    def __call__(
        self,
        metadata: cute.Tensor,
        num_splits: cute.Tensor,
        scratch: cute.Tensor,
        attn_sink: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        max_splits: Int32,
        stream,
    ):
        pieces = partials(scratch.iterator, 2 * metadata.shape[0], out.shape[1], self.problem.h_q)
        Combine(self.problem).launch(metadata, num_splits, *pieces, attn_sink, out, lse, max_splits, stream)


Combine.kernel.set_name_prefix("mla_combine", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: None, arch: str):
    """The combine alone; takes (metadata, num_splits, scratch, attn_sink, out, lse, max_splits): scratch as the main kernel's,
    without flags, and the others as in `launch`."""
    sym, sym64 = cute.sym_int, cute.sym_int64
    b, s_q, h_q, d_v = sym(), sym(), problem.h_q, problem.d_v
    return jit.build(
        CombineOnly(problem),
        jit.fake_tensor(Int32, (sym(), 8), align=16),
        jit.fake_tensor(Int32, (sym(),), align=4),
        jit.fake_tensor(Float32, (sym64(),), align=16),
        jit.fake_tensor(Float32, (h_q,), align=4) if problem.has_attn_sink else None,
        jit.fake_tensor(BFloat16, (b, s_q, h_q, d_v), stride=(*(sym64(divisibility=8) for _ in range(3)), 1), align=16),
        jit.fake_tensor(Float32, (b, s_q, h_q), stride=tuple(sym64() for _ in range(3)), align=4),
        Int32(0),
        jit.fake_stream(),
        arch=arch,
        name="combine",
    )
