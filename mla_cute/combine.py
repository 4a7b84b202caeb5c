"""Merges the pieces of every split request into its output: the kernel that runs behind the main kernel of an op.

A piece is one part's softmax average over its share of a request's keys, o_partial [512] fp32, with its base-2 log-sum,
lse_partial. With m the largest lse_partial of a row, S = sum 2^(lse_i - m) and G = log2(S) + m (+inf if S is 0):

    lse = G ln 2                             the sink never enters it
    G  := log2(2^G + 2^(sink log2 e))        the sink counts once, here; without anything attended G = sink log2 e
    out = sum of 2^(lse_i - G) o_i           in slot order, so the result is the same bits every time

The maths, and the programmatic dependent launch behind the main kernel, are FlashMLA's combine. Two things differ. The
plan numbers the pieces themselves (record field 7), so the work is found from the parts, not from all b requests: the
part that holds split 1 of a request owns its merge. And the loads set the pace, 2 KiB a piece and row from L2: every
thread keeps 8 of them in flight (32 splits x 128 rows in 128 CTAs on an H200: 6.6 us with one, 2.5 us with eight).
"""

import math

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute

from . import jit
from .validate import Problem

VECTOR = 4  # fp32 of a thread: one 16-byte load a piece
HEADS_PER_CTA = 2  # 256 threads at d_v 512
LOADS_IN_FLIGHT = 8  # pieces in registers, 4 each; 16 gain nothing (measured, H200)
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
INF = float("inf")


class Combine:
    """The combine of one problem, launched by a host function that has just launched the main kernel on `stream`."""

    def __init__(self, problem: Problem):
        self.h_q, self.d_v = problem.h_q, problem.d_v
        self.threads_per_head = problem.d_v // VECTOR
        self.head_groups = -(-problem.h_q // HEADS_PER_CTA)

    @cute.jit
    def launch(
        self,
        metadata: cute.Tensor,  # [P, 8] int32, as num_splits from a launch before the main kernel's
        num_splits: cute.Tensor,  # [b + 1] int32
        o_partial: cute.Tensor,  # [slots, s_q, h_q, d_v] fp32, contiguous, 16-byte aligned
        lse_partial: cute.Tensor,  # [slots, s_q, h_q] fp32, contiguous, base 2; -inf: an empty piece, o_partial unused
        attn_sink: cute.Tensor | None,  # [h_q] fp32, natural-log units
        out: cute.Tensor,  # [b, s_q, h_q, d_v] bf16, last dim contiguous, rows 8-byte aligned
        lse: cute.Tensor,  # [b, s_q, h_q] fp32, natural log
        stream,
    ):
        """Writes out and lse of the requests that are split; the others are left as the main kernel wrote them.

        Programmatic dependent launch: the main kernel must be launched without it, and may trigger early.
        """
        s_q, num_parts = out.shape[1], metadata.shape[0]
        if num_parts > 1:  # one part alone splits nothing
            self.kernel(metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse).launch(
                grid=[s_q * self.head_groups, num_parts - 1, 1],
                block=[HEADS_PER_CTA * self.threads_per_head, 1, 1],
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
    ):
        tid, _, _ = cute.arch.thread_idx()
        column, row, _ = cute.arch.block_idx()
        part = row + 1  # part 0 begins with split 0 of request 0: it owns nothing
        s_idx = column // self.head_groups
        head = column % self.head_groups * HEADS_PER_CTA + tid // self.threads_per_head  # the same in a warp

        # The plan and the sink are older than the main kernel: they may be read while that one still runs.
        if metadata[part, 4] == 1:  # begin_split; 0 in a part without work
            req = metadata[part, 0]
            n = num_splits[req + 1] - num_splits[req]
            first_slot = metadata[part, 7] - 1  # field 7 is the slot of split 1; the pieces stand in split order
            sink_log2 = Float32(-INF)
            if const_expr(attn_sink is not None):
                sink_log2 = attn_sink[min(head, self.h_q - 1)] * LOG2_E
            cute.arch.griddepcontrol_wait()  # the main kernel's o_partial and lse_partial -> the loads of merge()
            if head < self.h_q:
                self.merge(o_partial, lse_partial, sink_log2, out, lse, req, s_idx, head, first_slot, n)
        elif column == 0 and row == 0:
            # Even when nothing is split, this grid must not end before the main kernel does, or the kernel behind it
            # could start early: one CTA always waits.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def merge(
        self,
        o_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        sink_log2: Float32,
        out: cute.Tensor,
        lse: cute.Tensor,
        req: Int32,
        s_idx: Int32,
        head: Int32,
        first_slot: Int32,
        n: Int32,
    ):
        """One row of 512 from its n pieces. Thread t does columns 4 t ... 4 t + 3; lane l weighs pieces l + 32 i."""
        tid, _, _ = cute.arch.thread_idx()
        t, lane = tid % self.threads_per_head, cute.arch.lane_idx()
        # Offsets in 64 bits; a step leads from one piece to the next.
        step = Int64(out.shape[1]) * self.h_q
        row = Int64(first_slot) * step + Int64(s_idx) * self.h_q + head
        p_lse = lse_partial.iterator + row
        step_o = step * (self.d_v * 4)  # bytes
        address = o_partial.iterator.toint() + row * (self.d_v * 4) + Int64(t) * 16

        # The first pieces are under way while the weights are computed.
        rO = cute.make_rmem_tensor((VECTOR, LOADS_IN_FLIGHT), Float32)
        rO.fill(0.0)
        self.load_pieces(address, step_o, n, rO)

        mine = self.load_lse(p_lse, step, lane, n)
        top = mine
        for i in cutlass.range(lane + 32, n, 32, unroll=1):
            top = cute.arch.fmax(top, self.load_lse(p_lse, step, i, n))
        top = cute.arch.warp_reduction_max(top)
        top = Float32(0) if top == -INF else top  # nothing attended: -inf - -inf would be NaN
        total = cute.math.exp2(mine - top, fastmath=True)
        for i in cutlass.range(lane + 32, n, 32, unroll=1):
            total += cute.math.exp2(self.load_lse(p_lse, step, i, n) - top, fastmath=True)
        total = cute.arch.warp_reduction_sum(total)
        merged = Float32(INF) if total == 0.0 else cute.math.log2(total, fastmath=True) + top  # base 2
        if t == 0:
            lse[Int64(req), s_idx, head] = merged * LN_2
        if merged == INF:
            merged = Float32(INF) if sink_log2 == -INF else sink_log2
        else:
            merged += cute.math.log2(1.0 + cute.math.exp2(sink_log2 - merged, fastmath=True), fastmath=True)

        weight = cute.math.exp2(mine - merged, fastmath=True)  # 0 past the last piece
        acc = cute.make_rmem_tensor(VECTOR, Float32)
        acc.fill(0.0)
        for i in cutlass.range(0, n, LOADS_IN_FLIGHT, unroll=1):
            source = i % 32  # the lane that holds the weight of piece i
            if source == 0 and i > 0:
                weight = cute.math.exp2(self.load_lse(p_lse, step, i + lane, n) - merged, fastmath=True)
            for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                w = cute.arch.shuffle_sync(weight, source + j)
                if w != 0.0:  # an empty piece may hold anything: 0 * NaN must not enter
                    for c in cutlass.range_constexpr(VECTOR):
                        acc[c] = acc[c] + w * rO[c, j]
            address += LOADS_IN_FLIGHT * step_o
            self.load_pieces(address, step_o, n - (i + LOADS_IN_FLIGHT), rO)

        r_out = cute.make_rmem_tensor(VECTOR, BFloat16)
        r_out.store(acc.load().to(BFloat16))
        cute.autovec_copy(r_out, cute.zipped_divide(out[Int64(req), s_idx, head, None], (VECTOR,))[None, t])

    @cute.jit
    def load_pieces(self, address: Int64, step: Int64, left: Int32, rO: cute.Tensor):
        """rO[:, j] = 16 bytes of the j-th piece from `address`, step bytes apart, while there are any left."""
        for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            if j < left:
                p = cute.make_ptr(Float32, address + j * step, cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(p, cute.make_layout(VECTOR)), rO[None, j])

    @cute.jit
    def load_lse(self, p_lse: cute.Pointer, step: Int64, i: Int32, n: Int32) -> Float32:
        """lse of piece i in base 2, -inf past the last."""
        value = Float32(-INF)
        if i < n:
            value = cute.make_tensor(p_lse + Int64(i) * step, cute.make_layout(1))[0]
        return value


class CombineOnly:
    """Host function of the combine alone, for tests: the partials are made by something else."""

    def __init__(self, problem: Problem):
        self.problem = problem

    @cute.jit
    def __call__(
        self,
        metadata: cute.Tensor,
        num_splits: cute.Tensor,
        o_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        attn_sink: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        stream,
    ):
        Combine(self.problem).launch(metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse, stream)


Combine.kernel.set_name_prefix("mla_combine", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: None, arch: str):
    """The combine alone; takes (metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse) as in `launch`."""
    sym, sym64 = cute.sym_int, cute.sym_int64
    b, s_q, slots, h_q, d_v = sym(), sym(), sym(), problem.h_q, problem.d_v
    return jit.build(
        CombineOnly(problem),
        jit.fake_tensor(Int32, (sym(), 8), align=16),
        jit.fake_tensor(Int32, (sym(),), align=4),
        jit.fake_tensor(Float32, (slots, s_q, h_q, d_v), align=16),
        jit.fake_tensor(Float32, (slots, s_q, h_q), align=4),
        jit.fake_tensor(Float32, (h_q,), align=4) if problem.has_attn_sink else None,
        jit.fake_tensor(BFloat16, (b, s_q, h_q, d_v), stride=(*(sym64(divisibility=8) for _ in range(3)), 1), align=16),
        jit.fake_tensor(Float32, (b, s_q, h_q), stride=tuple(sym64() for _ in range(3)), align=4),
        jit.fake_stream(),
        arch=arch,
        name="combine",
    )
