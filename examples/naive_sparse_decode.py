"""The smallest complete implementation of sparse decode: where to start when you write a kernel variant of your own.

    out, lse = mla_cute.sparse_decode(q, kv_cache, indices, impl="examples/naive_sparse_decode.py")

An implementation is a module with `Config`, `default_config` and `compile`; checks, plan, cache and launch come with
mla_cute. Here one warp does one head of one query token and walks over the listed tokens one after the other: no tensor
cores, no shared memory, no splits. Far from fast, but it runs wherever the GPU converts FP8 (sm_89 and later).

    lane l holds latent columns 16 l ... 16 l + 15 and RoPE columns 2 l, 2 l + 1 of q and k, and the same 16 of O
    x = scale q·k: 18 products a lane, summed over the warp;  row_max, row_sum, O: online softmax, all in registers

As a script it compares itself with the reference or, on a machine without a GPU, compiles for sm_90a and says so.
"""

import math
from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr, cute

from mla_cute import V32, jit
from mla_cute.validate import Problem

WARP = 32
NOPE = V32.d_nope // WARP  # 16 latent columns a lane: one 16-byte load of codes, all under one scale (tiles of 128)
ROPE = V32.d_rope // WARP  # 2 RoPE columns a lane
LOG2_E, LN_2, INF = math.log2(math.e), math.log(2), math.inf


@dataclass(frozen=True)
class Config:
    """Numbers to tune: `sparse_decode(..., impl=module, config=module.Config(heads_per_cta=8))`."""

    tile_n: int = 64  # this and the next are for the planner: keys a block,
    fixed_overhead_blocks: int = 5  # and what beginning a request costs, in blocks
    heads_per_cta: int = 4  # warps of a CTA; they read the same records, so most of them hit L1

    def num_parts(self, problem: Problem, s_q: int, num_sms: int) -> int:
        """One part: no request is split, and no partial results are allocated."""
        return 1

    def check(self, problem: Problem) -> None:
        """Raises, before anything is compiled, when this implementation cannot run `problem`."""
        if (problem.op, problem.kv_format) != ("sparse_decode", "v32"):
            raise NotImplementedError(f"problem: must be sparse_decode on v32, got {problem.op} on {problem.kv_format}")
        if problem.has_extra:
            raise NotImplementedError("problem: must be without extra keys, got has_extra=True")
        for name, low in (("tile_n", 1), ("fixed_overhead_blocks", 0), ("heads_per_cta", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"config: {name} must be an int, {low} or more, got {value!r}")
        if self.heads_per_cta > 32:
            raise ValueError(f"config: heads_per_cta must be 1 to 32, got {self.heads_per_cta}")


def default_config(problem: Problem) -> Config:
    return Config()


class NaiveSparseDecode:
    """Kernel and host function of one problem; optional tensors it does not have are None, which `const_expr` asks."""

    def __init__(self, problem: Problem, config: Config):
        self.h_q, self.heads_per_cta = problem.h_q, config.heads_per_cta
        self.head_groups = -(-problem.h_q // config.heads_per_cta)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, kv_cache: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor | None,
        extra_kv_cache: None, extra_indices: None, extra_topk_length: None, attn_sink: cute.Tensor | None,
        softmax_scale: Float32, metadata: cute.Tensor, num_splits: cute.Tensor, scratch: cute.Tensor,
        out: cute.Tensor, lse: cute.Tensor, max_splits: Int32, nonce: Int64, stream,
    ):  # fmt: skip
        """The arguments of every implementation; this one has no extra keys (`Config.check`) and ignores the plan:
        metadata, num_splits, max_splits, the partials and the nonce of their flags."""
        # Head groups of a query token are neighbours in the grid: all but the first find the records in L2.
        self.kernel(q, kv_cache, indices, topk_length, attn_sink, softmax_scale * LOG2_E, out, lse).launch(
            grid=[q.shape[0] * self.head_groups, q.shape[1], 1],
            block=[WARP * self.heads_per_cta, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, kv_cache: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor | None,
        attn_sink: cute.Tensor | None, scale_log2: Float32, out: cute.Tensor, lse: cute.Tensor,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        column, s_idx, _ = cute.arch.block_idx()
        req, head = column // self.head_groups, column % self.head_groups * self.heads_per_cta + tid // WARP
        lane = tid % WARP
        if head < self.h_q:  # any h_q: warps of the last group that have no head do nothing
            q_row = q[Int64(req), s_idx, head, None]  # [576]; Int64 because tensors may exceed 2^31 elements
            rQ = cute.make_rmem_tensor(NOPE + ROPE, Float32)
            for c in cutlass.range_constexpr(NOPE):
                rQ[c] = q_row[lane * NOPE + c].to(Float32)
            for c in cutlass.range_constexpr(ROPE):
                rQ[NOPE + c] = q_row[V32.d_nope + lane * ROPE + c].to(Float32)

            length = indices.shape[2]
            if const_expr(topk_length is not None):  # what stands behind topk_length is never looked at
                length = cutlass.min(topk_length[req], length)
            num_tokens = kv_cache.shape[0] * kv_cache.shape[1]  # below 2^31
            row_max, row_sum = Float32(-INF), Float32(0)  # row_max: of the logits in base 2
            rO = cute.make_rmem_tensor(NOPE, Float32)
            rO.fill(0.0)
            for i in cutlass.range(length, unroll=1):  # no iteration if length <= 0
                token = indices[Int64(req), s_idx, i]  # the same in the whole warp, so the shuffles below are safe
                # What is no token of the cache may stand anywhere; a skipped token is not read, it may hold NaN.
                if token >= 0 and token < num_tokens:
                    rK = self.load_key(kv_cache, token, lane)
                    dot = Float32(0)
                    for c in cutlass.range_constexpr(NOPE + ROPE):
                        dot += rQ[c] * rK[c]
                    x = cute.arch.warp_reduction_sum(dot) * scale_log2  # every lane gets the sum
                    new_max = cute.arch.fmax(row_max, x)
                    alpha = cute.math.exp2(row_max - new_max, fastmath=True)  # 0 at the first token: row_max is -inf
                    p = cute.math.exp2(x - new_max, fastmath=True)
                    row_max, row_sum = new_max, row_sum * alpha + p
                    for c in cutlass.range_constexpr(NOPE):  # V is the latent part of K
                        rO[c] = rO[c] * alpha + p * rK[c]

            # The sink is one more logit, without a value: -inf adds 0, +inf makes the factor 0. lse does not know it.
            denominator = row_sum
            if const_expr(attn_sink is not None):
                denominator += cute.math.exp2(attn_sink[head] * LOG2_E - row_max, fastmath=True)
            row_lse = (cute.math.log2(row_sum, fastmath=True) + row_max) * LN_2
            is_empty = row_sum == 0.0  # nothing attended: out 0 and lse +inf, whatever the sink
            factor = cutlass.select_(is_empty, Float32(0), 1.0 / denominator)
            for c in cutlass.range_constexpr(NOPE):
                out[Int64(req), s_idx, head, lane * NOPE + c] = (rO[c] * factor).to(BFloat16)
            if lane == 0:
                lse[Int64(req), s_idx, head] = cutlass.select_(is_empty, Float32(INF), row_lse)

    @cute.jit
    def load_key(self, kv_cache: cute.Tensor, token: Int32, lane: Int32):
        """This lane's columns of one token's record: fp32 [16 + 2] = bf16(code * scale), and RoPE as it is."""
        page_block_size = kv_cache.shape[1]
        # Records of a page are 656 bytes apart, its pages at least as far as they are long: the stride says how far.
        record = kv_cache.iterator.toint() + Int64(token // page_block_size) * Int64(kv_cache.stride[0])
        record += Int64(token % page_block_size) * V32.bytes_per_token
        codes = load(record + V32.nope_offset + lane * NOPE, Float8E4M3FN, NOPE)
        tile = lane * NOPE // V32.quant_tile
        scale = load(record + V32.scale_offset + tile * V32.scale_bytes, Float32, 1)[0]
        rope = load(record + V32.rope_offset + lane * (2 * ROPE), BFloat16, ROPE)
        latent = (codes.load().to(Float32) * scale).to(BFloat16).to(Float32)  # K is in bf16: mla_cute.sparse_decode
        rK = cute.make_rmem_tensor(NOPE + ROPE, Float32)
        for c in cutlass.range_constexpr(NOPE):
            rK[c] = latent[c]
        for c in cutlass.range_constexpr(ROPE):
            rK[NOPE + c] = rope[c].to(Float32)
        return rK


def load(address: Int64, dtype, count: int) -> cute.Tensor:
    """`count` elements at a global address into registers, in one load: the address is a multiple of their size."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=count * dtype.width // 8)
    r = cute.make_rmem_tensor(count, dtype)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), r)
    return r


NaiveSparseDecode.kernel.set_name_prefix("mla_naive_sparse_decode", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: Config, arch: str):
    """The compiled host function, from fake tensors: their numbers are fixed, their symbols may vary from call to call."""
    config.check(problem)
    if arch == "cpu":
        raise NotImplementedError("q: must be on a CUDA GPU for the naive kernel, got a CPU tensor")
    sym, sym64 = cute.sym_int, cute.sym_int64
    b, s_q, h_q = sym(), sym(), problem.h_q

    def rows(dtype, shape, divisibility, align):  # last dim contiguous, the other strides free
        strides = tuple(sym64(divisibility=divisibility) for _ in shape[:-1])
        return jit.fake_tensor(dtype, shape, stride=(*strides, 1), align=align)

    return jit.build(
        NaiveSparseDecode(problem, config),
        rows(BFloat16, (b, s_q, h_q, V32.d_qk), 8, 16),  # q
        rows(Uint8, (sym(), sym(), 1, V32.bytes_per_token), 1, 16),  # kv_cache [num_blocks, page_block_size, 1, 656]
        rows(Int32, (b, s_q, sym()), 1, 4),  # indices [b, s_q, topk]
        jit.fake_tensor(Int32, (b,)) if problem.has_topk_length else None,
        *(None, None, None),  # extra_kv_cache, extra_indices, extra_topk_length
        jit.fake_tensor(Float32, (h_q,)) if problem.has_attn_sink else None,
        Float32(0),  # softmax_scale
        jit.fake_tensor(Int32, (sym(), 8)),  # metadata
        jit.fake_tensor(Int32, (sym(),)),  # num_splits
        jit.fake_tensor(Float32, (sym(),)),  # scratch
        rows(BFloat16, (b, s_q, h_q, V32.d_v), 8, 16),  # out
        rows(Float32, (b, s_q, h_q), 1, 4),  # lse
        Int32(0),  # max_splits
        Int64(0),  # nonce
        jit.fake_stream(),
        arch=arch,
    )


def main() -> None:
    import torch

    from mla_cute import reference, select_impl, sparse_decode, testing

    if not torch.cuda.is_available():
        found = jit.inspect(select_impl("cpu", __file__), Problem(), Config(), "sm_90a")
        print(f"No GPU here: compiled for sm_90a in {found.seconds:.1f} s, {found.spill_bytes} bytes spilled, not run.")
        return
    for more in ({}, {"h_q": 5, "s_q": 3, "page_block_size": 61, "holes": True, "sink": True, "topk_length": True}):
        case = testing.Case(**more)
        x = testing.make_inputs(case, "cuda")
        out, lse = sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=__file__)
        ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        testing.assert_close(out, ref_out, **testing.SPARSE_DECODE_OUT, name="out")
        testing.assert_close(lse, ref_lse, **testing.SPARSE_DECODE_LSE, name="lse")
        print(f"{case}: agrees with the reference on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
