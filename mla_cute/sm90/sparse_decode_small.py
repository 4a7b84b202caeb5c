"""Sparse MLA decode of small batches on an FP8 KV cache, V3.2 or MODEL1, for Hopper: the time of one call counts, not bytes.

A cluster of CTAs serves one request, query token and tile of 32 (or 16) heads; each CTA takes its share of the key blocks, and
the cluster merges the pieces through its shared memories. There is no plan, no scratch, no combine, and one role: all four
warpgroups do the same, one phase behind the other. Everything is transposed: keys or columns of V are the M of a product, the
heads its N, so that few heads cost little. Two blocks of 64 keys are a step:

| phase   | who does what                                                                    | ends with      |
|---------|----------------------------------------------------------------------------------|----------------|
| load    | a warpgroup: half of the columns of one block, from global memory into registers | -              |
| scores  | the same half: e4m3 * scale in fp16 -> V; S^T = K Q^T, K from registers          | barrier of two |
| softmax | the block's 64 keys, half of the heads: sum of both halves, maxima, P^T          | barrier of all |
| values  | 128 columns: O^T = V^T P^T over the step's 128 keys                              | barrier of all |

The next step's records are on their way while `values` runs. One step (t: key, h: head, x(t): `keys.py`):
 1. K'[t] = codes * scale / 2^x(t) in fp16; V32's rope, which is not of V, as bf16 / 2^x(t)
 2. S[t, h] = K'[t] (Q[h] / 16), over half of the columns; the halves are exchanged and added
 3. z = S * 16 * 2^x(t) * softmax_scale * log2(e) + x(t), -inf for keys that do not count
 4. m' = max(m, max over the step's keys of z - 7), alpha = exp2(m - m')
 5. P = exp2(z - m') <= 2^7 in fp16; l = l * alpha + sum over t of P / 2^x(t)
 6. O = alpha * O + P V: the exponents of P and V cancel
At the end the columns are dealt out, 16 at a time: each CTA sends its piece of them to the CTA that merges them, straight from
registers, in fp16 over a power of two for each head, and its m and l to all. A CTA waits for what is sent to it, so none
ends before; nothing is sent before all of the cluster are done with Q and the exchange, in whose place it arrives.

Why: at batch 1 the kernel of large batches (sparse_decode.py) takes 14 us on an H200 for two blocks a CTA. Its one
converting warpgroup is a chain of 2,000 cycles a block, the copy engine takes 24 cycles a record, 64 heads make 64 KB a piece.
Here four warpgroups share the conversion, loads into registers have no engine in their way (memory's latency is paid once a
step), and of 32 heads a piece is 32 KB, spread over four times as many CTAs.

Shared memory (bytes, 32 heads): V [128, 512] 131,072; P 8,192; Q 36,864 and exchange 16,384, later pieces; what comes beside
them 9.9 K; maxima, sums, indices 4 K. Sources of the ideas: FlashAttention (online softmax), FlashMLA (the op, the formats);
the rest is ours.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .. import jit
from ..decode_kernel import (
    LN_2,
    LOG2_E,
    PlanReader,
    check_config,
    fake_arguments,
    load_smem_8b,
    load_smem_16b,
    max_abs,
    smem_tensor,
    store_smem_16b,
)
from ..kv_cache import FORMATS, KVFormat
from ..validate import Problem, check_int
from .helpers import (
    bf16_to_fp16,
    copy_async_4b,
    divide,
    e4m3_to_fp16,
    fp16_pair,
    load_global_if,
    opaque,
    store_to_peer,
    wait_for_peers,
)
from .keys import Q_SCALE, KeyConversion, over_keys

INF = float("inf")
WARPGROUP = 128
THREADS = 4 * WARPGROUP
TILE = 64  # keys of a block, the M of a WGMMA; columns of a tile of Q, K and V: a 128-byte swizzle row
STEP = 2 * TILE
D_V = 512
RAISED_BITS = 7.0  # of the largest P
KNOWN = 5  # numbers that a CTA's threads leave in shared memory for later
UNIT = 16  # columns that are sent and merged at once: those of a warp in a product
MAX_CLUSTER = 16  # CTAs; more than 8 is up to the device
MAX_GRID_Z = 65_535  # of a launch, in CTAs
MAX_ARRIVING = 45  # units that a CTA receives: units of its own times CTAs, whatever the cluster's size
SMEM_LIMIT = 232_448  # bytes a CTA may ask for on compute capability 9.0


@dataclass(frozen=True)
class Config:
    """Every number that may be tuned; `check` raises with the arithmetic."""

    tile_n: int = 64  # keys of a block
    fixed_overhead_blocks: int | None = None  # of a plan, which nothing reads here
    tile_h: int | None = None  # heads of a cluster, 16 or 32; None: 16 for up to 16 heads
    cluster: int | None = None  # CTAs; None: by the load, see `settle`

    def settle(
        self, problem: Problem, b: int, s_q: int, topk: int, extra_topk: int, num_sms: int, max_clusters: Callable[[int], int]
    ) -> tuple["Config", int]:
        """(what to compile for such a call, CTAs of a cluster).

        Of the sizes the one with the least time for all clusters, of which `max_clusters` (of a size) run at once: a step, two
        blocks, is counted 1, all that is not steps 2. Of equally good ones the largest: its CTAs merge less.
        """
        tiles, blocks = b * s_q * self.head_tiles(problem), -(-topk // self.tile_n) + -(-extra_topk // self.tile_n)
        if b > MAX_GRID_Z:
            raise ValueError(f"q: must have at most {MAX_GRID_Z} requests for sm90.sparse_decode_small, got {b}")

        def cost(size: int) -> float:
            at_once = num_sms if size == 1 else max_clusters(size)
            if not at_once or b * size > MAX_GRID_Z:
                return INF
            return -(-tiles // at_once) * (2 + -(-max(blocks, 1) // (2 * size)))

        if self.cluster is not None:
            if cost(self.cluster) == INF:
                raise ValueError(f"config: cluster must be of a size that this GPU runs, got {self.cluster} for {b} requests")
            return replace(self, cluster=None), self.cluster
        return self, min(range(1, MAX_CLUSTER + 1), key=lambda size: (cost(size), -size))

    def kernels(self) -> list["Config"]:
        """All that `settle` may choose to compile: the size of a cluster is an argument of the launch."""
        return [replace(self, cluster=None)]

    def num_parts(self, problem: Problem, s_q: int, num_sms: int) -> int:
        """Of a plan, which nothing reads."""
        return 1

    def heads(self, problem: Problem) -> int:
        """Heads of a cluster."""
        return self.tile_h or (16 if problem.h_q <= 16 else 32)

    def head_tiles(self, problem: Problem) -> int:
        return -(-problem.h_q // self.heads(problem))

    def smem_bytes(self, fmt: KVFormat, heads: int) -> int:
        v = STEP * D_V * 2
        p = STEP * heads * 2
        q_and_exchange = heads * fmt.d_qk * 2 + THREADS * heads
        pieces = MAX_ARRIVING * heads * 4 + MAX_CLUSTER * heads * 8
        small = heads * (8 * 4 + 8 * 4 + 4 + 4 + 4) + 3 * STEP * 4 + 8 + KNOWN * 4
        return v + p + q_and_exchange + pieces + small + 1024  # an alignment

    def check(self, problem: Problem) -> None:
        """Raises ValueError naming the field and the arithmetic when this Config cannot run `problem`."""
        check_config("sm90.sparse_decode_small", self, problem, TILE)
        if type(self.tile_h) not in (int, type(None)) or self.tile_h not in (None, 16, 32):
            raise ValueError(f"config: tile_h must be None, 16 or 32, got {self.tile_h!r}")
        if self.cluster is not None:
            check_int("config: cluster", self.cluster)
            if not 1 <= self.cluster <= MAX_CLUSTER:
                raise ValueError(f"config: cluster must be None or 1 to {MAX_CLUSTER}, got {self.cluster}")
        needed = self.smem_bytes(FORMATS[problem.kv_format], self.heads(problem))
        if needed > SMEM_LIMIT:
            raise ValueError(f"config: shared memory needs {needed} bytes, the limit is {SMEM_LIMIT}")


def default_config(problem: Problem) -> Config:
    """The shipped choice, the same for every head count and format."""
    return Config()


class Params(NamedTuple):
    """Kernel arguments."""

    q: cute.Tensor  # [b, s_q, h_q, d_qk] bf16
    kv_cache: cute.Tensor  # [num_blocks, page_block_size, 1, bytes_per_token] uint8
    indices: cute.Tensor  # [b, s_q, topk] int32
    topk_length: cute.Tensor | None  # [b] int32
    extra_kv_cache: cute.Tensor | None  # [extra_num_blocks, extra_page_block_size, 1, bytes_per_token] uint8
    extra_indices: cute.Tensor | None  # [b, s_q, extra_topk] int32
    extra_topk_length: cute.Tensor | None  # [b] int32
    attn_sink: cute.Tensor | None  # [h_q] fp32, natural log
    out: cute.Tensor  # [b, s_q, h_q, 512] bf16
    lse: cute.Tensor  # [b, s_q, h_q] fp32, natural log
    scale_log2: Float32  # softmax_scale * log2(e)


class Thread(NamedTuple):
    """Who a thread is. Warpgroup: block `kb` of a step and half `ch` of its columns (or heads); 128 columns of O."""

    tid: Int32
    t: Int32  # in the warpgroup
    wg: Int32
    kb: Int32
    ch: Int32
    w: Int32  # warp of the warpgroup: keys 16 w ... 16 w + 15 of the block
    lane: Int32
    g: Int32  # lane / 4: keys g and g + 8 of these
    pc: Int32  # lane % 4: 16 columns of a tile; heads 2 pc and 2 pc + 1 of 8


class Lengths(NamedTuple):
    """Of a request."""

    main: Int32  # selected tokens in the main cache
    extra: Int32  # and in the extra cache
    main_blocks: Int32  # the extra cache's come behind them


class Request(NamedTuple):
    """The CTA's share of a request."""

    req: Int32
    s_idx: Int32
    head_tile: Int32
    lengths: Lengths
    first_block: Int32
    last_block: Int32  # behind the last; first_block: none
    blocks: Int32  # of the request
    each: Int32  # of a CTA, fewer of the last one
    size: Uint32  # CTAs of the cluster
    rank: Uint32


class Records(NamedTuple):
    """Registers of a lane: half of the columns of its two keys, as they lie in memory. Zeros for keys that do not count."""

    codes: list  # [r][4] x [4] words: 16 codes of a column tile; of MODEL1's rope tile the first 8 values
    rope: list  # [r] x [4] words: 8 values of V32's half of rope; of MODEL1's rope tile the other 8
    scales: list  # [r] x [4] or [2] words: all of the key's
    valid: cute.Tensor  # [1] uint32: bit r if the key counts


class Shared(NamedTuple):
    """Pointers and tensors in shared memory."""

    pieces_full: cute.Pointer  # all that is sent to this CTA has arrived
    known: cute.Pointer  # [5] int32: lengths of the request; its pieces, in the first CTAs of the cluster; 2^16 / size
    sQ: cute.Tensor  # [heads, d_qk] fp16
    sQ_rope: cute.Tensor  # the same as bf16, for V32's rope
    sV: cute.Tensor  # [512, 128]: columns first
    sP: cute.Tensor  # [heads, 128 keys]
    exchange: Int32  # [4 warpgroups, heads / 16, 128 threads] of 4 fp32: S for the partner
    arrived: Int32  # in place of Q and exchange: [unit of this CTA, piece] of O, as its lanes hold it
    powers: Int32  # [unit of this CTA, piece, heads] fp32: what its fp16 stand over
    arrived_beside: Int32  # [piece, heads, 2] fp32: m, l
    maxima: Int32  # [heads, 8 warps] fp32
    sums: Int32  # [heads, 8 warps] fp32: l
    top: Int32  # [heads] fp32: m
    alpha: Int32  # [heads] fp32
    sink: Int32  # [heads] fp32, base 2; where there are sinks
    indices: Int32  # [2, 128 keys] int32, of this step and the next
    rope_exponents: Int32  # [128 keys] uint32, of MODEL1: what its rope asks of a key's exponent


class SmallDecode(KeyConversion, PlanReader):
    """The kernel and its host function, specialised for one (Problem, Config)."""

    def __init__(self, problem: Problem, config: Config):
        self.h_q = problem.h_q
        self.heads = config.heads(problem)  # of a cluster
        self.log2_heads = self.heads.bit_length() - 1
        self.head_tiles = config.head_tiles(problem)
        self.tile_n = config.tile_n
        self.fmt = FORMATS[problem.kv_format]
        self.num_tiles = self.fmt.d_qk // TILE  # column tiles of Q and K, 9 or 8; the last is rope
        self.rope_is_v = self.fmt.d_qk == D_V
        self.q_rounds = -(-2 * self.heads * self.num_tiles // THREADS)
        self.sent = self.heads // 16  # groups of 8 heads that a warpgroup keeps of its S, and that it sends
        self.unit_bytes = UNIT * self.heads * 2

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        indices: cute.Tensor,
        topk_length: cute.Tensor | None,
        extra_kv_cache: cute.Tensor | None,
        extra_indices: cute.Tensor | None,
        extra_topk_length: cute.Tensor | None,
        attn_sink: cute.Tensor | None,
        softmax_scale: Float32,
        metadata: cute.Tensor,
        num_splits: cute.Tensor,
        scratch: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        cluster: Int32,
        nonce: Int64,
        stream,
    ):
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        rmem, smem = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
        shape = (TILE, self.heads, 16)
        # S^T [64 keys, heads]: K from registers, Q from shared memory; V32's rope keeps bf16's range
        mma_qk = cute.make_tiled_mma(warpgroup.MmaF16BF16Op(Float16, Float32, shape, rmem, K, K))
        mma_rope = cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, shape, rmem, K, K))
        # O^T [64 columns, heads]: V and P both as they lie, keys outermost
        mma_pv = cute.make_tiled_mma(warpgroup.MmaF16BF16Op(Float16, Float32, shape, smem, MN, MN))

        kind = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kind.K_SW128, Float16)
        row_of_p = warpgroup.make_smem_layout_atom({16: kind.K_SW32, 32: kind.K_SW64}[self.heads], Float16)
        layout_q = cute.tile_to_shape(atom, (self.heads, self.fmt.d_qk), order=(0, 1))
        layout_v = cute.tile_to_shape(atom, (STEP, D_V), order=(0, 1))
        layout_p = cute.tile_to_shape(row_of_p, (STEP, self.heads), order=(0, 1))

        @cute.struct
        class Smem:
            sV: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_v)], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_p)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_q)], 1024]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, THREADS * self.heads // 4], 16]
            maxima: cute.struct.Align[cute.struct.MemRange[Float32, 8 * self.heads], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 8 * self.heads], 16]
            top: cute.struct.Align[cute.struct.MemRange[Float32, self.heads], 16]
            alpha: cute.struct.Align[cute.struct.MemRange[Float32, self.heads], 16]
            sink: cute.struct.Align[cute.struct.MemRange[Float32, self.heads], 16]
            indices: cute.struct.Align[cute.struct.MemRange[Int32, 2 * STEP], 16]
            rope_exponents: cute.struct.Align[cute.struct.MemRange[Uint32, STEP], 16]
            powers: cute.struct.Align[cute.struct.MemRange[Float32, MAX_ARRIVING * self.heads], 16]
            arrived_beside: cute.struct.Align[cute.struct.MemRange[Float32, MAX_CLUSTER * self.heads * 2], 16]
            pieces_full: cute.struct.MemRange[Int64, 1]
            known: cute.struct.MemRange[Int32, KNOWN]

        self.Smem = Smem
        params = Params(
            q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink, out, lse,
            softmax_scale * LOG2_E,
        )  # fmt: skip
        # Head tiles of one query token are neighbours in the grid, so that the next gathers of a record hit L2.
        self.kernel(params, mma_qk, mma_rope, mma_pv, layout_q, layout_v, layout_p).launch(
            grid=[self.head_tiles, q.shape[1], q.shape[0] * cluster],
            cluster=[1, 1, cluster],
            block=[THREADS, 1, 1],
            smem=Smem.size_in_bytes(),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        params: Params,
        mma_qk: cute.TiledMma,
        mma_rope: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        me = self.thread(tid)
        storage = cutlass.memory.SmemAllocator().allocate(self.Smem)
        sKV = storage.sV.get_tensor(layout_v.outer, swizzle=layout_v.inner)  # [128, 512]
        sPT = storage.sP.get_tensor(layout_p.outer, swizzle=layout_p.inner)  # [128 keys, heads]
        sQ = storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        shared = Shared(
            storage.pieces_full.data_ptr(), storage.known.data_ptr(), sQ,
            storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=BFloat16),
            cute.make_tensor(sKV.iterator, cute.select(sKV.layout, mode=[1, 0])),
            cute.make_tensor(sPT.iterator, cute.select(sPT.layout, mode=[1, 0])),
            *(Int32(x.toint()) for x in (
                storage.exchange.data_ptr(), sQ.iterator, storage.powers.data_ptr(), storage.arrived_beside.data_ptr(),
                storage.maxima.data_ptr(), storage.sums.data_ptr(), storage.top.data_ptr(), storage.alpha.data_ptr(),
                storage.sink.data_ptr(), storage.indices.data_ptr(), storage.rope_exponents.data_ptr(),
            )),
        )  # fmt: skip
        if tid == 0:
            cute.arch.mbarrier_init(shared.pieces_full, 1)
            cute.arch.mbarrier_init_fence()
        # The kernel is short: it is set up while the one ahead of it still runs, and lets the next one.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        share = self.share(params)

        # ---- load ----
        steps = (share.last_block - share.first_block + 1) >> 1
        records = self.make_records()
        if tid < 2 * STEP:
            self.copy_index(params, share, share.lengths, shared, tid >> 7, tid & (STEP - 1))
        sink = Float32(0)
        if const_expr(params.attn_sink is not None):
            sink = params.attn_sink[cutlass.min(share.head_tile * self.heads + tid % self.heads, self.h_q - 1)]
        if tid == 0:
            self.begin(share, shared)
        of_head = [smem_tensor(array + tid * 4, Float32, 1) for array in (shared.top, shared.sums, shared.sink)]
        if tid < self.heads:
            of_head[0][0] = Float32(-1e30)  # finite: -inf - -inf is NaN
        if tid < 8 * self.heads:
            of_head[1][0] = Float32(0)
        if steps > 0:
            self.load_first(params, share, me, shared, records)
        else:
            self.clear(records)

        thr_qk, thr_pv = mma_qk.get_slice(me.t), mma_pv.get_slice(me.t)
        half = cute.local_tile(shared.sQ, (self.heads, D_V // 2), (0, me.ch))
        rQ = mma_qk.make_fragment_B(thr_qk.partition_B(half))  # (MMA, 1, 16): descriptors
        rQ_rope = mma_rope.make_fragment_B(mma_rope.get_slice(me.t).partition_B(shared.sQ_rope))
        rV = [  # by tile of 64 columns, (MMA, 1, 8)
            mma_pv.make_fragment_A(thr_pv.partition_A(cute.local_tile(shared.sV, (TILE, STEP), (2 * me.wg + i, 0))))
            for i in (0, 1)
        ]
        rP = mma_pv.make_fragment_B(thr_pv.partition_B(shared.sP))  # (MMA, 1, 8)
        accS = cute.make_rmem_tensor(thr_qk.partition_shape_C((TILE, self.heads)), Float32)  # ((2,2,heads/8),1,1)
        accO = [cute.make_rmem_tensor(thr_pv.partition_shape_C((TILE, self.heads)), Float32) for _ in (0, 1)]
        for tile in (0, 1):
            accO[tile].fill(0.0)
        cute.arch.sync_threads()  # Q, the first m and l
        if const_expr(params.attn_sink is not None):  # noqa: SIM102  one is decided at compile time
            if tid < self.heads:  # has arrived meanwhile; only the merge needs it
                of_head[2][0] = sink * LOG2_E

        for step in cutlass.range(steps, unroll=1):
            me = self.thread(opaque(tid))  # or all addresses are computed once, and there are no registers to keep them
            # ---- scores ----
            exponents = self.scores(me, shared, mma_qk, mma_rope, rQ, rQ_rope, accS, records)
            logits = self.exchange_halves(me, shared, accS)

            # ---- softmax ----
            for i in cutlass.range_constexpr(4 * self.sent):
                r = i // 2 % 2
                power = (exponents[r] << 23).bitcast(Float32)
                z = logits[i] * (power * (params.scale_log2 * Q_SCALE)) + (Float32(Int32(exponents[r])) - 127.0)
                # Masked by select and after the product: adding -inf to a NaN would stay NaN.
                logits[i] = cutlass.select_(exponents[r] != 0, z, Float32(-INF))
            old, new = self.raise_maximum(me, shared, logits)  # of one of the half's heads
            alpha = cute.math.exp2(old - new, fastmath=True)
            if (me.kb == 0) & (me.w == 0):
                self.store_of_head(me, shared.top, 4, new)
                self.store_of_head(me, shared.alpha, 4, alpha)
            sums = [Float32(0) for _ in range(2 * self.sent)]
            for i in cutlass.range_constexpr(2 * self.sent):
                m = cute.arch.shuffle_sync(new, self.lane_of(me, i, 2 * self.sent))
                for r in cutlass.range_constexpr(2):
                    k = i // 2 * 4 + 2 * r + i % 2
                    p = cute.math.exp2(logits[k] - m, fastmath=True)
                    logits[k] = p
                    sums[i] += p * ((254 - exponents[r]) << 23).bitcast(Float32)
            self.add_sum(me, shared, over_keys(sums, me.lane, lambda x, y: x + y)[0], alpha)
            self.store_p(me, shared, logits)
            cute.arch.fence_proxy("async.shared", space="cta")  # V and P become visible to the products
            if step + 1 < steps:  # behind the fence, which might wait for loads
                in_smem = cute.make_tensor(shared.known, KNOWN)  # registers are short
                lengths = Lengths(in_smem[0], in_smem[1], in_smem[2])
                self.load_records(params, share, lengths, me, shared, step + 1, records)
                if tid < STEP:
                    self.copy_index(params, share, lengths, shared, step + 2, tid)
            else:  # or the old ones would need their registers all the time
                self.clear(records)
            cute.arch.sync_threads()

            # ---- values ----
            if step > 0:
                for j in cutlass.range_constexpr(self.heads // 8):
                    pair = load_smem_8b(shared.alpha + (8 * j + 2 * me.pc) * 4, Float32)
                    for tile in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(4):
                            accO[tile][4 * j + i] = accO[tile][4 * j + i] * pair[i % 2]
            warpgroup.fence()
            mma_pv.set(warpgroup.Field.ACCUMULATE, True)
            for k in cutlass.range_constexpr(STEP // 16):
                for tile in cutlass.range_constexpr(2):
                    cute.gemm(mma_pv, accO[tile], rV[tile][None, None, k], rP[None, None, k], accO[tile])
            warpgroup.commit_group()
            if step + 1 == steps:  # while the products run
                cute.arch.cluster_arrive()  # done with Q and exchange
            warpgroup.wait_group(0)
            if step + 1 < steps:
                cute.arch.cp_async_wait_group(0)  # the indices
                cute.arch.sync_threads()  # V, P and alpha may be written again

        # ---- merge ----
        if steps == 0:
            cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if steps > 0:
            self.send(share, me, shared, accO)
        self.merge(params, share, me, shared)

    def thread(self, tid: Int32) -> Thread:
        wg, t, lane = cute.arch.make_warp_uniform(tid >> 7), tid & 127, tid & 31  # `//` would allow for negative numbers
        return Thread(tid, t, wg, wg >> 1, wg & 1, cute.arch.make_warp_uniform(t >> 5), lane, lane >> 2, lane & 3)

    @cute.jit
    def share(self, params: Params) -> Request:
        """The blocks of this CTA: equal shares, none for the last CTAs of short requests."""
        head_tile, s_idx, _ = cute.arch.block_idx()
        _, _, req = cute.arch.cluster_idx()
        length, extra_length, num_main_blocks, num_blocks = self.lengths_of(params, req)
        blocks, size = Uint32(num_blocks), Uint32(cute.arch.cluster_size())
        rank = Uint32(cute.arch.block_idx_in_cluster())
        each = divide(blocks + size - 1, size)
        first = cutlass.min(each * rank, blocks)
        return Request(
            req, s_idx, head_tile, Lengths(Int32(length), Int32(extra_length), Int32(num_main_blocks)), Int32(first),
            Int32(cutlass.min(first + each, blocks)), Int32(num_blocks), Int32(each), size, rank,
        )  # fmt: skip

    def units(self, share: Request, inverse: Int32) -> Int32:
        """Units of 16 columns that the CTA merges. inverse: 2^16 / size, rounded up, which divides small numbers exactly."""
        return (D_V // UNIT - Int32(share.rank) + Int32(share.size) - 1) * inverse >> 16

    @cute.jit
    def begin(self, share: Request, shared: Shared):
        """By one thread: what a request's CTAs know, for later; and what this one waits for at the end."""
        pieces = Int32(divide(Uint32(share.blocks + share.each - 1), Uint32(share.each)))
        inverse = Int32(divide(share.size + 65535, share.size))
        known = cute.make_tensor(shared.known, KNOWN)
        for i, value in enumerate((*share.lengths, pieces, inverse)):
            known[i] = value
        size = pieces * (self.units(share, inverse) * (self.unit_bytes + self.heads * 4) + self.heads * 8)
        cute.arch.mbarrier_arrive_and_expect_tx(shared.pieces_full, size)

    # ---- load ----

    def make_records(self) -> Records:
        return Records(
            [[cute.make_rmem_tensor(4, Uint32) for _ in range(4)] for _ in (0, 1)],
            [cute.make_rmem_tensor(4, Uint32) for _ in (0, 1)],
            [cute.make_rmem_tensor(2 if self.rope_is_v else 4, Uint32) for _ in (0, 1)],
            cute.make_rmem_tensor(1, Uint32),
        )

    def clear(self, records: Records) -> None:
        for r in (0, 1):
            for words in (*records.codes[r], records.rope[r], records.scales[r]):
                words.fill(0)
        records.valid[0] = Uint32(0)

    def index_at(self, shared: Shared, step: Int32, key: Int32) -> Int32:
        """Where the index of one of a step's 128 keys lies."""
        return shared.indices + ((step & 1) * STEP + key) * 4

    @cute.jit
    def copy_index(
        self, params: Params, share: Request, lengths: Lengths, shared: Shared, step: Int32, key: Int32
    ):  # fmt: skip
        """Starts the copy of a key's index; -1 past the request's tokens or the CTA's blocks."""
        block, to = share.first_block + 2 * step + (key >> 6), self.index_at(shared, step, key)
        token, length = block * self.tile_n + (key & (TILE - 1)), lengths.main
        row = params.indices[Int64(share.req), share.s_idx, None].iterator.toint()
        if const_expr(params.extra_indices is not None):  # noqa: SIM102  one is decided at compile time
            if block >= lengths.main_blocks:
                token, length = token - lengths.main_blocks * self.tile_n, lengths.extra
                row = params.extra_indices[Int64(share.req), share.s_idx, None].iterator.toint()
        none = smem_tensor(to, Int32, 1)
        if (block < share.last_block) & (token < length):
            copy_async_4b(to, row + Int64(token) * 4)
        else:
            none[0] = Int32(-1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_records(
        self, params: Params, share: Request, lengths: Lengths, me: Thread, shared: Shared, step: Int32, records: Records
    ):  # fmt: skip
        """An index below 0 or past the cache is none: its P is 0, and 0 * NaN must not reach O, so it gets zeros."""
        page_block_size, num_blocks = Uint32(params.kv_cache.shape[1]), Uint32(params.kv_cache.shape[0])
        base, page_stride = params.kv_cache.iterator.toint(), Int64(params.kv_cache.stride[0])
        if const_expr(params.extra_indices is not None):
            extra = params.extra_kv_cache
            if share.first_block + 2 * step + me.kb >= lengths.main_blocks:
                page_block_size, num_blocks = Uint32(extra.shape[1]), Uint32(extra.shape[0])
                base, page_stride = extra.iterator.toint(), Int64(extra.stride[0])
        fmt = self.fmt
        for r in cutlass.range_constexpr(2):
            at = self.index_at(shared, step, TILE * me.kb + 16 * me.w + me.g + 8 * r)
            index = smem_tensor(at, Int32, 1)[0]
            page = divide(Uint32(index), page_block_size)
            offset = Uint32(index) - page * page_block_size
            is_valid = (index >= 0) & (page < num_blocks)
            records.valid[0] = Uint32(is_valid) if r == 0 else records.valid[0] | (Uint32(is_valid) << 1)
            start = base + Int64(page) * page_stride
            record = start + Int64(offset) * fmt.row_bytes
            mine = record + (me.ch * (4 * TILE) + me.pc * 16)
            for i in cutlass.range_constexpr(4):
                load_global_if(records.codes[r][i], mine + (fmt.nope_offset + TILE * i), is_valid)
            rope = record + (fmt.rope_offset + me.pc * 16)
            if const_expr(self.rope_is_v):
                load_global_if(records.rope[r], rope + 64, is_valid & (me.ch == 1))
                plane = start + Int64(page_block_size) * fmt.row_bytes + Int64(offset) * fmt.scale_row_bytes
                load_global_if(records.scales[r], plane, is_valid)
            else:
                load_global_if(records.rope[r], rope + me.ch * 64, is_valid)
                load_global_if(records.scales[r], record + fmt.scale_offset, is_valid)

    def q_unit(self, me: Thread, n: int):
        """What of Q the thread converts in round n: half i of a row's tile; whether there is such a tile."""
        unit = me.tid + THREADS * n
        tile = unit >> (self.log2_heads + 1)
        return unit & 1, (unit >> 1) & (self.heads - 1), cutlass.min(tile, self.num_tiles - 1), tile < self.num_tiles

    def is_rope(self, n: int, tile: Int32):
        """Is it of rope; True or False if that is so for all threads of the round."""
        first, last = THREADS * n // (2 * self.heads), (THREADS * (n + 1) - 1) // (2 * self.heads)
        if last < self.num_tiles - 1:
            return False
        return True if first == self.num_tiles - 1 else tile == self.num_tiles - 1

    @cute.jit
    def load_first(
        self, params: Params, share: Request, me: Thread, shared: Shared, records: Records
    ):  # fmt: skip
        """The first step's records, and meanwhile Q to shared memory, converted: 32 columns of a row at a time.

        Heads past h_q are zeros. A lane has chunks 2 j + i of a tile's 8, of rope 4 i + j (`query_words`).
        """
        chunks = [[] for _ in range(self.q_rounds)]
        for n in cutlass.range_constexpr(self.q_rounds):
            i, row, tile, is_wanted = self.q_unit(me, n)
            is_rope, head = self.is_rope(n, tile), share.head_tile * self.heads + row
            is_wanted = is_wanted & (head < self.h_q)
            source = params.q[Int64(share.req), share.s_idx, cutlass.min(head, self.h_q - 1), None].iterator.toint()
            for j in (0, 1, 2, 3):
                c = 4 * i + j if is_rope is True else 2 * j + i
                if const_expr(not isinstance(is_rope, bool)):
                    c = cutlass.select_(is_rope, 4 * i + j, c)
                chunk = cute.make_rmem_tensor(4, Uint32)
                load_global_if(chunk, source + (tile * 128 + c * 16), is_wanted)
                chunks[n].append(chunk)
        cute.arch.sync_threads()  # or the compiler waits for the indices before it asks for Q
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.load_records(params, share, share.lengths, me, shared, Int32(0), records)
        for n in cutlass.range_constexpr(self.q_rounds):
            i, row, tile, is_wanted = self.q_unit(me, n)
            is_bf16 = False if self.rope_is_v else self.is_rope(n, tile)
            to = Int32(shared.sQ.iterator.toint()) + tile * (self.heads * 128) + row * 128
            if is_wanted:
                for k in cutlass.range_constexpr(4):  # k-step 2 i + k / 2
                    store_smem_16b(to + ((4 * i + k) ^ (row & 7)) * 16, self.query_words(chunks[n], k, is_bf16))
        cute.arch.fence_proxy("async.shared", space="cta")  # becomes visible to WGMMA

    # ---- scores ----

    def scores(
        self, me: Thread, shared: Shared, mma_qk: cute.TiledMma, mma_rope: cute.TiledMma, rQ: cute.Tensor,
        rQ_rope: cute.Tensor, accS: cute.Tensor, records: Records,
    ) -> cute.Tensor:  # fmt: skip
        """accS = K Q^T over the warpgroup's half of the columns, and these columns of V. Returns the exponents of the
        keys [2], 0 for those that do not count."""
        scales, exponents = self.scales_of(me, shared, records)
        v_row = Int32(shared.sV.iterator.toint()) + (TILE * me.kb + 16 * me.w + me.g) * 128
        # In halves of a tile, two k-steps: what a lane has as 16-byte chunk `part` of V's columns, for its two keys.
        fragments = [cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 2)), Float16) for _ in (0, 1)]
        order = [(tile, part) for tile in range(4) for part in (0, 1)]
        if not self.rope_is_v:
            order = [None, *order]
        for n, unit in enumerate(order):
            fragment = fragments[n % 2]
            if n >= 2:
                warpgroup.wait_group(1)  # the unit before the last one: its registers are free
            if unit is None:
                for r in (0, 1):
                    self.to_fragment(fragment, r, self.rope_to_bf16([records.rope[r]], exponents[r]))
                warpgroup.fence()
                a, first = cute.recast_tensor(fragment, BFloat16), 4 * (self.num_tiles - 1) + 2 * me.ch
                for s in (0, 1):
                    mma_rope.set(warpgroup.Field.ACCUMULATE, s > 0)
                    cute.gemm(mma_rope, accS, a[None, None, s], rQ_rope[None, None, first + s], accS)
            else:
                tile, part = unit
                if part == 0:
                    of_tile = [self.scale_of(scales, exponents, r, tile) for r in (0, 1)]
                to = v_row + (4 * me.ch + tile) * (STEP * 128)
                for r in (0, 1):
                    k, chunk = self.to_fp16(me, records, of_tile[r], exponents[r], r, tile, part)
                    self.to_fragment(fragment, r, k)
                    store_smem_16b(to + r * 1024 + ((chunk ^ me.g) * 16), k)  # a row's chunk j lies at j ^ (row % 8)
                warpgroup.fence()
                for s in (0, 1):
                    mma_qk.set(warpgroup.Field.ACCUMULATE, n + s > 0)
                    b = rQ[None, None, 4 * tile + 2 * part + s]
                    cute.gemm(mma_qk, accS, fragment[None, None, s], b, accS)
            warpgroup.commit_group()
        for r in (0, 1):
            exponents[r] = cutlass.select_((records.valid[0] >> r) & 1 == 1, exponents[r], Uint32(0))
        warpgroup.wait_group(0)
        return exponents

    def scales_of(self, me: Thread, shared: Shared, records: Records) -> tuple[cute.Tensor, cute.Tensor]:
        """By key: scales of the half's columns (V32's two over 2 ** (exponent - 127), as pairs of fp16; MODEL1's four bytes);
        exponents."""
        scales = cute.make_rmem_tensor((2, 2), Uint32)
        exponents = cute.make_rmem_tensor(2, Uint32)
        if self.rope_is_v:
            self.exchange_rope(me, shared, records, exponents)
        for r in (0, 1):
            words = records.scales[r]
            if self.rope_is_v:  # bytes of e8m0; the eighth is padding
                fields = [(words[i // 4] >> (8 * (i % 4))) & 255 for i in range(7)]
                exponents[r] = cutlass.max(exponents[r], self.exponent_of(fields))
                scales[r, 0] = Uint32(cutlass.select_(me.ch == 0, words[0], words[1]))
            else:
                exponents[r] = self.exponent_of([(words[i] & 0x7FFFFFFF) >> 23 for i in range(4)])
                inverse = ((254 - exponents[r]) << 23).bitcast(Float32)
                for i in range(2):
                    mine = Uint32(cutlass.select_(me.ch == 0, words[i], words[2 + i]))
                    scales[r, i] = fp16_pair(mine.bitcast(Float32) * inverse)
        return scales, exponents

    def scale_of(self, scales: cute.Tensor, exponents: cute.Tensor, r: int, tile: int) -> Uint32:
        """Of column tile 4 ch + `tile`, from what `scales_of` returns."""
        if self.rope_is_v:
            return self.fp16_scale((scales[r, 0] >> (8 * tile)) & 255, exponents[r])
        return scales[r, tile // 2]

    @cute.jit
    def exchange_rope(self, me: Thread, shared: Shared, records: Records, exponents: cute.Tensor):
        """MODEL1's rope is part of V: the least exponents of the two keys so that it stays in fp16's range, below 2 ** 16. The
        right half's warpgroup has it."""
        keys = shared.rope_exponents + (TILE * me.kb + 16 * me.w + me.g) * 4
        slots = [smem_tensor(keys + 32 * r, Uint32, 1) for r in (0, 1)]
        if me.ch == 1:
            for r in cutlass.range_constexpr(2):
                words = [half[i] for half in (records.codes[r][3], records.rope[r]) for i in (0, 1, 2, 3)]
                exponent = self.rope_exponent(words)
                if me.pc == 0:
                    slots[r][0] = exponent
        cute.arch.barrier(barrier_id=1 + me.kb, number_of_threads=2 * WARPGROUP)
        for r in cutlass.range_constexpr(2):
            exponents[r] = slots[r][0]

    def to_fp16(self, me: Thread, records: Records, scale: Uint32, exponent: Uint32, r: int, tile: int, part: int):
        """8 columns of key r in tile 4 ch + `tile`, over 2 ** (exponent - 127): [4] fp16 pairs; which 16-byte chunk it is."""
        k = e4m3_to_fp16(cute.make_tensor(records.codes[r][tile].iterator + 2 * part, 2), scale)
        chunk = 2 * me.pc + part
        if self.rope_is_v and tile == 3:
            self.replace_by_rope(me, k, records.rope[r] if part else records.codes[r][3], exponent)
            chunk = cutlass.select_(me.ch == 0, chunk, me.pc + 4 * part)
        return k, chunk

    @cute.jit
    def replace_by_rope(self, me: Thread, k: cute.Tensor, rope: cute.Tensor, exponent: Uint32):
        """MODEL1's last tile of the right half."""
        if me.ch == 1:
            words = cute.make_rmem_tensor(4, Uint32)
            for i, pair in enumerate(self.rope_to_bf16([rope], exponent)):
                words[i] = pair
            bf16_to_fp16(words, k)

    def exchange_halves(self, me: Thread, shared: Shared, accS: cute.Tensor) -> cute.Tensor:
        """S of this warpgroup's half of the heads over all columns: element e + 2 r + 4 j is key g + 8 r, head 8 j + 2 pc + e
        of these."""
        mine, n = cute.make_rmem_tensor(4 * self.sent, Float32), 4 * self.sent
        to = shared.exchange + (me.wg * self.sent * WARPGROUP + me.t) * 16
        for j in range(self.sent):
            sent = cute.make_rmem_tensor(4, Float32)
            for i in range(4):
                left, right = accS[4 * j + i], accS[n + 4 * j + i]
                mine[4 * j + i] = cutlass.select_(me.ch == 0, left, right)
                sent[i] = cutlass.select_(me.ch == 0, right, left)
            store_smem_16b(to + j * (WARPGROUP * 16), sent)
        cute.arch.barrier(barrier_id=1 + me.kb, number_of_threads=2 * WARPGROUP)
        other = shared.exchange + ((me.wg ^ 1) * self.sent * WARPGROUP + me.t) * 16
        for j in range(self.sent):
            got = load_smem_16b(other + j * (WARPGROUP * 16), Float32)
            for i in range(4):
                mine[4 * j + i] = mine[4 * j + i] + got[i]
        return mine

    # ---- softmax ----

    # Of n values of a lane (n heads, 8 j + 2 pc + e at 2 j + e) `over_keys` leaves it one, by its upper bits.

    def lane_of(self, me: Thread, i: int, n: int) -> Int32:
        """The lane that has value i of this lane's heads."""
        return i * (32 // n) + me.pc

    def head_of(self, me: Thread, n: int) -> Int32:
        """The head that the lane has."""
        i = me.lane // (32 // n)
        return i // 2 * 8 + 2 * me.pc + i % 2

    def half_head(self, me: Thread) -> Int32:
        """The same where warpgroups have half of the heads each: of the cluster's."""
        return me.ch * (self.heads // 2) + self.head_of(me, 2 * self.sent)

    @cute.jit
    def store_of_head(self, me: Thread, array: Int32, pitch: cutlass.Constexpr, value: Float32):
        to = smem_tensor(array + self.half_head(me) * pitch, Float32, 1)
        if me.g % (4 // self.sent) == 0:  # the others have the same
            to[0] = value

    def raise_maximum(self, me: Thread, shared: Shared, logits: cute.Tensor) -> tuple[Float32, Float32]:
        """m before and after this step, whose 128 keys lie in eight warps."""
        maxima = [
            cute.arch.fmax(logits[i // 2 * 4 + i % 2], logits[i // 2 * 4 + 2 + i % 2]) for i in range(2 * self.sent)
        ]
        (of_warp,) = over_keys(maxima, me.lane, cute.arch.fmax)
        self.store_of_head(me, self.of_warp(me, shared.maxima), 32, of_warp)
        old = smem_tensor(shared.top + self.half_head(me) * 4, Float32, 1)[0]
        cute.arch.barrier(barrier_id=3 + me.ch, number_of_threads=2 * WARPGROUP)
        new = old
        for i in (0, 1):
            four = load_smem_16b(shared.maxima + self.half_head(me) * 32 + 16 * i, Float32)
            for k in range(4):
                new = cute.arch.fmax(new, four[k] - RAISED_BITS)
        return old, new

    def add_sum(self, me: Thread, shared: Shared, value: Float32, alpha: Float32) -> None:
        """A step's part of l, over the warp's keys."""
        of_warp = self.of_warp(me, shared.sums)
        old = smem_tensor(of_warp + self.half_head(me) * 32, Float32, 1)[0]
        self.store_of_head(me, of_warp, 32, old * alpha + value)

    def of_warp(self, me: Thread, array: Int32) -> Int32:
        """Of an array [heads, 8 warps] what belongs to the warp: with the same half of the heads there are eight."""
        return array + (4 * me.kb + me.w) * 4

    def store_p(self, me: Thread, shared: Shared, p: cute.Tensor) -> None:
        """P^T in fp16, as the products read it: 16-byte chunks of a row of heads swizzled over the rows of 128 bytes."""
        fp16 = cute.make_rmem_tensor(4 * self.sent, Float16)
        fp16.store(p.load().to(Float16))
        words = cute.recast_tensor(fp16, Uint32)
        row = Int32(shared.sP.iterator.toint()) + (TILE * me.kb + 16 * me.w + me.g) * (2 * self.heads) + me.pc * 4
        swizzle = me.g // (64 // self.heads)  # g * 2 * heads / 128, of 2 or 4 chunks
        for j in range(self.sent):
            chunk = (me.ch * self.sent + j) ^ swizzle
            for r in (0, 1):
                smem_tensor(row + r * (16 * self.heads) + chunk * 16, Uint32, 1)[0] = words[2 * j + r]

    # ---- merge ----

    def powers(self, me: Thread, accO: list[cute.Tensor]) -> tuple[list[Float32], Float32]:
        """What makes the largest of a head's values, in the warp's 32 columns, 2 ** 14 to 2 ** 15: [2 j + e] for the lane's
        heads; and what undoes it, of `head_of`'s."""
        n, maxima = self.heads // 4, []
        for i in range(n):
            largest = Float32(0)
            for tile in (0, 1):
                for r in (0, 1):
                    largest = max_abs(largest, accO[tile][i // 2 * 4 + 2 * r + i % 2])
            maxima.append(largest)
        (largest,) = over_keys(maxima, me.lane, cute.arch.fmax)
        exponent = cutlass.max(largest.bitcast(Uint32) >> 23, Uint32(30))  # then both powers are normal numbers
        factor, power = (((x << 23).bitcast(Float32)) for x in (268 - exponent, exponent - 14))
        return [cute.arch.shuffle_sync(factor, self.lane_of(me, i, n)) for i in range(n)], power

    @cute.jit
    def send(self, share: Request, me: Thread, shared: Shared, accO: list[cute.Tensor]):
        """O by units of 16 columns to the CTAs that merge them, unit u to CTA u % size; m and l to all.

        A warp has two units.
        """
        full, known = Int32(shared.pieces_full.toint()), cute.make_tensor(shared.known, KNOWN)
        pieces, inverse = known[3], known[4]
        factors, power = self.powers(me, accO)
        for tile in cutlass.range_constexpr(2):
            unit = 4 * (2 * me.wg + tile) + me.w
            slot = unit * inverse >> 16
            at, peer = slot * pieces + Int32(share.rank), unit - slot * Int32(share.size)
            for c in cutlass.range_constexpr(self.heads // 16):  # 16 heads: element e + 2 r + 4 j
                values, fp16 = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, Float16)
                for i in cutlass.range_constexpr(8):
                    values[i] = accO[tile][8 * c + i] * factors[4 * c + i // 4 * 2 + i % 2]
                fp16.store(values.load().to(Float16))
                to = shared.arrived + at * self.unit_bytes + me.lane * 16 + c * 512
                store_to_peer(to, cute.recast_tensor(fp16, Uint32), full, peer)
            to = shared.powers + (at * self.heads + self.head_of(me, self.heads // 4)) * 4
            if me.g % (32 // self.heads) == 0:  # the others have the same
                word = cute.make_rmem_tensor(1, Float32)
                word[0] = power
                store_to_peer(to, cute.recast_tensor(word, Uint32), full, peer)
        pair, peer = me.tid & (self.heads // 2 - 1), me.tid >> (self.log2_heads - 1)  # of heads
        if peer < Int32(share.size):
            beside = cute.make_rmem_tensor(4, Float32)  # m, l of two heads
            for e in cutlass.range_constexpr(2):
                at = (2 * pair + e) * 32
                first = load_smem_16b(shared.sums + at, Float32)
                second = load_smem_16b(shared.sums + at + 16, Float32)
                beside[2 * e] = smem_tensor(shared.top + (2 * pair + e) * 4, Float32, 1)[0]
                beside[2 * e + 1] = ((first[0] + first[1]) + (first[2] + first[3])) + (
                    (second[0] + second[1]) + (second[2] + second[3])
                )
            to = shared.arrived_beside + Int32(share.rank) * (self.heads * 8) + pair * 16
            store_to_peer(to, cute.recast_tensor(beside, Uint32), full, peer)

    @cute.jit
    def merge(self, params: Params, share: Request, me: Thread, shared: Shared):
        """out of this CTA's columns, of CTA 0 lse: a warp takes 8 heads of a unit, a lane heads 2 pc + e, columns g + 8 r.

        Nothing attended: out 0, lse +inf. The sink counts here.
        """
        known = cute.make_tensor(shared.known, KNOWN)
        pieces, units = known[3], self.units(share, known[4])
        wait_for_peers(Int32(shared.pieces_full.toint()))
        for item in cutlass.range(4 * me.wg + me.w, units * (self.heads // 8), THREADS // 32, unroll=1):
            slot, j = item >> (self.log2_heads - 3), item & (self.heads // 8 - 1)  # j: a group of 8 heads
            beside = shared.arrived_beside + (8 * j + 2 * me.pc) * 8
            top = cute.make_rmem_tensor(2, Float32)
            top.fill(-1e30)
            for p in cutlass.range(pieces, unroll=4):
                of_piece = load_smem_16b(beside + p * (self.heads * 8), Float32)
                for e in cutlass.range_constexpr(2):
                    top[e] = cute.arch.fmax(top[e], of_piece[2 * e])
            total, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
            total.fill(0.0)
            sums.fill(0.0)
            piece = shared.arrived + slot * pieces * self.unit_bytes + (j >> 1) * 512 + me.lane * 16 + (j & 1) * 8
            power = shared.powers + (slot * pieces * self.heads + 8 * j + 2 * me.pc) * 4
            for p in cutlass.range(pieces, unroll=4):
                of_piece = load_smem_16b(beside + p * (self.heads * 8), Float32)
                powers = load_smem_8b(power + p * (self.heads * 4), Float32)
                words, values = load_smem_8b(piece + p * self.unit_bytes), cute.make_rmem_tensor(4, Float32)
                values.store(cute.recast_tensor(words, Float16).load().to(Float32))
                for e in cutlass.range_constexpr(2):
                    weight = cute.math.exp2(of_piece[2 * e] - top[e], fastmath=True)
                    total[e] = total[e] + of_piece[2 * e + 1] * weight
                    weight *= powers[e]
                    for r in cutlass.range_constexpr(2):
                        sums[2 * r + e] = sums[2 * r + e] + values[2 * r + e] * weight
            for e in cutlass.range_constexpr(2):
                row = 8 * j + 2 * me.pc + e
                head = share.head_tile * self.heads + row
                is_empty, denominator = total[e] == 0.0, total[e]
                if const_expr(params.attn_sink is not None):
                    sink = smem_tensor(shared.sink + row * 4, Float32, 1)[0]
                    denominator += cute.math.exp2(sink - top[e], fastmath=True)
                factor = cutlass.select_(is_empty, Float32(0), cute.arch.rcp_approx(denominator))
                if head < self.h_q:
                    out = params.out[Int64(share.req), share.s_idx, head, None]
                    column = (Int32(share.rank) + slot * Int32(share.size)) * UNIT + me.g
                    for r in cutlass.range_constexpr(2):
                        out[column + 8 * r] = BFloat16(sums[2 * r + e] * factor)
                    if (slot == 0) & (share.rank == 0) & (me.g == 0):
                        # As log2(1) + the maximum, rather than the difference of two larger numbers.
                        lse = cute.math.log2(total[e] * 2.0**-RAISED_BITS, fastmath=True) + (top[e] + RAISED_BITS)
                        params.lse[Int64(share.req), share.s_idx, head] = cutlass.select_(is_empty, Float32(INF), lse * LN_2)


SmallDecode.kernel.set_name_prefix("mla_sparse_decode_small_sm90", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: Config, arch: str):
    """Compiles the kernel into a launchable function; fake tensors in, nothing is launched.

    Returns a function of (q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink,
    softmax_scale, metadata, num_splits, scratch, out, lse, cluster, nonce): shapes as in `Params`, out [b, s_q, h_q, 512] bf16;
    cluster: CTAs of a cluster. metadata, num_splits, scratch and nonce are not read.
    """
    config.check(problem)
    return jit.build(
        SmallDecode(problem, config), *fake_arguments(problem), jit.fake_stream(), arch=arch, name="sparse_decode"
    )
