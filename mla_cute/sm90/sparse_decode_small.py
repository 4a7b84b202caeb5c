"""Sparse MLA decode of small batches on an FP8 KV cache, V3.2 or MODEL1, for Hopper: the time of one call counts, not bytes.

A cluster of CTAs serves one request, query token and tile of 32 (or 16) heads; each CTA takes its share of the key blocks, and
the cluster merges the pieces through its shared memories. There is no plan, no scratch, no combine, and one role: each of
the four warpgroups has a quarter of the columns. Everything is transposed: keys or columns of V are the M of a product, the
heads its N, so that few heads cost little. A block of 64 keys (t: key, h: head, x(t): `keys.py`):

| phase   | what a warpgroup does                                                              | ends with      |
|---------|------------------------------------------------------------------------------------|----------------|
| load    | each warp 8 records of every second block, as they lie: bulk copies, two ahead      | a wait for them |
| scores  | its 128 columns: e4m3 * scale in fp16 -> V; S^T = K Q^T, K from registers           | barrier of all |
| softmax | of 8 heads: sum of the four parts of S, maxima, P^T                                 | barrier of all |
| values  | O^T = V^T P^T for its 128 columns, whose V no other warpgroup touches               | -              |

 1. K'[t] = codes * scale / 2^x(t) in fp16; V32's rope, which is not of V, as bf16 / 2^x(t)
 2. S[t, h] = K'[t] (Q[h] / 16), over a quarter of the columns; each warpgroup adds up the parts of its heads
 3. z = S * 16 * 2^x(t) * softmax_scale * log2(e) + x(t), -inf for keys that do not count
 4. m' = max(m, max over the block's keys of z - 7), alpha = exp2(m - m')
 5. P = exp2(z - m') <= 2^7 in fp16; l = l * alpha + sum over t of P / 2^x(t)
 6. O = alpha * O + P V: the exponents of P and V cancel
Once a CTA knows its last m it tells the whole cluster, which also says that its place for records is free. With all of
them each CTA knows what its piece counts, exp2(m - max m), and sends its l, weighted so, to all while the last product
runs. The columns are dealt out, 16 at a time: each CTA sends its piece of them to the CTA that merges them, straight from
registers, in fp16 over a power of two for each head, and with it what that power stands for, weight included. A merge adds
products. A CTA waits for what is sent to it, so none ends before.

Why: for two blocks a CTA the kernel of large batches (sparse_decode.py) takes 14 us on an H200, this one 11. There one
warpgroup converts, a chain of 2,000 cycles a block, and 64 heads make 64 KB a piece; here four convert, and of 32 heads a piece
is 32 KB, spread over twice as many CTAs. But its phases follow one another: from four blocks a CTA on, with few heads from
eight or so on, the other one is faster. In cycles: records asked for 3,600, there 5,700; a block 3,700; then 5,000, of which
32 KB take 3,000 to the other CTAs.

Shared memory (bytes, V32, 32 heads): V [64, 512], where Q comes in first, 65,536; records 2 x 45,056, later pieces; Q 36,864;
parts of S 24,576; P 4,096; 4 K of small things. Sources of the ideas: FlashAttention (online softmax), FlashMLA (the op, the
formats); the rest is ours.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .. import jit
from ..decode_kernel import (
    LN_2,
    LOG2_E,
    PlanReader,
    check_config,
    fake_arguments,
    global_tensor,
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
    bulk_copy_to_smem,
    copy_async_8b,
    divide,
    e4m3_to_fp16,
    fp16_pair,
    store_to_peer,
    wait_for_peers,
)
from .keys import Q_SCALE, KeyConversion, over_keys

INF = float("inf")
WARPGROUP = 128
THREADS = 4 * WARPGROUP
TILE = 64  # keys of a block, the M of a WGMMA; columns of a tile of Q, K and V: a 128-byte swizzle row
D_V = 512
QUARTER = D_V // 4  # columns of a warpgroup, two tiles
STAGES = 2  # blocks whose records are on their way
RAISED_BITS = 7.0  # of the largest P
UNIT = 16  # columns that are sent and merged at once: those of a warp in a product
MAX_CLUSTER = 16  # CTAs; more than 8 is up to the device
MAX_GRID_Z = 65_535  # of a launch, in CTAs
MAX_ARRIVING = 45  # units that a CTA receives: units of its own times CTAs, whatever the cluster's size
# In the time that the kernel of large batches takes for a block, 2.1 us on an H200: what a call takes, and each block more.
CALL, BLOCK = 3.0, 1.15
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
        """(what to compile for such a call, CTAs of a cluster)."""
        if b > MAX_GRID_Z:
            raise ValueError(f"q: must have at most {MAX_GRID_Z} requests for sm90.sparse_decode_small, got {b}")
        how = problem, b, s_q, topk, extra_topk, num_sms, max_clusters
        if self.cluster is not None and self.time(self.cluster, *how) == INF:
            raise ValueError(f"config: cluster must be of a size that this GPU runs, got {self.cluster} for {b} requests")
        return replace(self, cluster=None), self.cluster or self.fastest(*how)[1]

    def fastest(self, *how) -> tuple[float, int]:
        """(`time`, CTAs of a cluster): of equally fast sizes the largest, whose CTAs merge less. how: as for `settle`."""
        time, size = min((self.time(size, *how), -size) for size in range(1, MAX_CLUSTER + 1))
        return time, -size

    def time(
        self, size: int, problem: Problem, b: int, s_q: int, topk: int, extra_topk: int, num_sms: int,
        max_clusters: Callable[[int], int],
    ) -> float:  # fmt: skip
        """Of a call with clusters of `size` CTAs, see `CALL`; inf where there is no such launch.

        `max_clusters` of a size run at once.
        """
        tiles, blocks = b * s_q * self.head_tiles(problem), -(-topk // self.tile_n) + -(-extra_topk // self.tile_n)
        at_once = num_sms if size == 1 else max_clusters(size)
        if not at_once or b * size > MAX_GRID_Z:
            return INF
        return -(-tiles // at_once) * (CALL + BLOCK * -(-max(blocks, 1) // size))

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

    def record_pitch(self, fmt: KVFormat) -> int:
        """Bytes of a record's place: 64 modulo 128, so that what 8 lanes read of two records lies in different banks."""
        return (fmt.row_bytes + 63) // 128 * 128 + 64

    def stage_bytes(self, fmt: KVFormat) -> int:
        """Of a block's records; behind them MODEL1's scales, 8 bytes each, which lie elsewhere in a page."""
        return TILE * (self.record_pitch(fmt) + (8 if fmt.scale_bytes == 1 else 0))

    def smem_bytes(self, fmt: KVFormat, heads: int) -> int:
        v = TILE * D_V * 2
        p = TILE * heads * 2
        q = heads * fmt.d_qk * 2
        exchange = heads // 8 * 3 * WARPGROUP * 16
        small = heads * (2 * 4 * 4 + 2 * 4 + MAX_CLUSTER * 4) + TILE * 4 + STAGES * 8 * 4 + (4 + STAGES) * 8 + 2 * 4
        return v + p + q + STAGES * self.stage_bytes(fmt) + exchange + small + 1024  # an alignment

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
    """Who a thread is."""

    tid: Int32
    t: Int32  # in the warpgroup
    wg: Int32  # 128 columns of K, V and O; V32: 16 of rope; in softmax: 8 heads
    w: Int32  # warp of the warpgroup: keys 16 w ... 16 w + 15 of a block
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
    """Registers of a lane: a quarter of the columns of its two keys as they lie in memory, zeros for keys that do not count."""

    codes: list  # [r][2] x [4] words: 16 codes of a column tile; of MODEL1's rope tile the first 8 values
    rope: list  # [r] x [2] words: 4 values of V32's rope; x [4]: of MODEL1's rope tile the other 8
    scales: list  # [r] x [4] or [2] words: all of the key's


class Shared(NamedTuple):
    """Pointers and tensors in shared memory."""

    q_full: cute.Pointer  # Q has arrived in V's place
    raw_full: cute.Pointer  # [2] a block's records have arrived
    tops_full: cute.Pointer  # m of all CTAs that have blocks has arrived, and all are done with their records
    sums_full: cute.Pointer  # and their l
    pieces_full: cute.Pointer  # and their O, of this CTA's columns
    known: cute.Pointer  # [2] int32: CTAs that have blocks, the first ones; 2^16 / size
    sQ: cute.Tensor  # [heads, d_qk] fp16
    sQ_rope: cute.Tensor  # the same as bf16, for V32's rope
    sV: cute.Tensor  # [512, 64]: columns first
    sP: cute.Tensor  # [heads, 64 keys]
    raw: Int32  # [2 stages, 64 records]; behind each stage MODEL1's scales [64] of 8 bytes
    valid: Int32  # [2 stages, 8] uint32: a bit for each of 8 keys, if it counts
    exchange: Int32  # [warpgroup that receives, 3, 128 threads] of 4 fp32: its heads' S of the others
    arrived: Int32  # in the place of records: [unit of this CTA, piece] of O, for every 16 heads 16 bytes a lane, see `slot`
    powers: Int32  # [unit of this CTA, piece, heads] fp32: what its fp16 stand for
    arrived_sums: Int32  # [piece, heads] fp32: l, weighted
    tops: Int32  # [piece, heads] fp32: m
    maxima: Int32  # [heads, 4 warps] fp32
    sums: Int32  # [heads, 4 warps] fp32: l
    alpha: Int32  # [heads] fp32
    sink: Int32  # [heads] fp32, base 2; where there are sinks
    rope_exponents: Int32  # [64 keys] uint32, of MODEL1: what its rope asks of a key's exponent


class SmallDecode(KeyConversion, PlanReader):
    """The kernel and its host function, specialised for one (Problem, Config)."""

    def __init__(self, problem: Problem, config: Config):
        self.h_q = problem.h_q
        self.heads = config.heads(problem)  # of a cluster
        self.log2_heads = self.heads.bit_length() - 1
        self.groups = self.heads // 8  # of 8 heads
        self.head_tiles = config.head_tiles(problem)
        self.tile_n = config.tile_n
        self.fmt = FORMATS[problem.kv_format]
        self.rope_is_v = self.fmt.d_qk == D_V
        self.unit_bytes = UNIT * self.heads * 2
        self.stage_bytes = config.stage_bytes(self.fmt)
        self.record_pitch = config.record_pitch(self.fmt)
        self.q_pitch = self.fmt.d_qk * 2 + 32  # bytes, where Q arrives: four rows lie in different banks

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
        layout_v = cute.tile_to_shape(atom, (TILE, D_V), order=(0, 1))
        layout_p = cute.tile_to_shape(row_of_p, (TILE, self.heads), order=(0, 1))

        @cute.struct
        class Smem:
            sV: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_v)], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_p)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_q)], 1024]
            raw: cute.struct.Align[cute.struct.MemRange[Uint8, STAGES * self.stage_bytes], 128]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, self.groups * 3 * WARPGROUP * 4], 16]
            tops: cute.struct.Align[cute.struct.MemRange[Float32, MAX_CLUSTER * self.heads], 16]
            maxima: cute.struct.Align[cute.struct.MemRange[Float32, 4 * self.heads], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 4 * self.heads], 16]
            alpha: cute.struct.Align[cute.struct.MemRange[Float32, self.heads], 16]
            sink: cute.struct.Align[cute.struct.MemRange[Float32, self.heads], 16]
            rope_exponents: cute.struct.Align[cute.struct.MemRange[Uint32, TILE], 16]
            valid: cute.struct.Align[cute.struct.MemRange[Uint32, STAGES * 8], 16]
            q_full: cute.struct.MemRange[Int64, 1]
            raw_full: cute.struct.MemRange[Int64, STAGES]
            tops_full: cute.struct.MemRange[Int64, 1]
            sums_full: cute.struct.MemRange[Int64, 1]
            pieces_full: cute.struct.MemRange[Int64, 1]
            known: cute.struct.MemRange[Int32, 2]

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
        sKV = storage.sV.get_tensor(layout_v.outer, swizzle=layout_v.inner)  # [64, 512]
        sPT = storage.sP.get_tensor(layout_p.outer, swizzle=layout_p.inner)  # [64 keys, heads]
        sQ = storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        raw = Int32(storage.raw.data_ptr().toint())
        powers = raw + MAX_ARRIVING * self.unit_bytes
        shared = Shared(
            storage.q_full.data_ptr(), storage.raw_full.data_ptr(), storage.tops_full.data_ptr(), storage.sums_full.data_ptr(),
            storage.pieces_full.data_ptr(), storage.known.data_ptr(), sQ,
            storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=BFloat16),
            cute.make_tensor(sKV.iterator, cute.select(sKV.layout, mode=[1, 0])),
            cute.make_tensor(sPT.iterator, cute.select(sPT.layout, mode=[1, 0])),
            raw, Int32(storage.valid.data_ptr().toint()), Int32(storage.exchange.data_ptr().toint()), raw, powers,
            powers + MAX_ARRIVING * self.heads * 4,
            *(Int32(x.data_ptr().toint()) for x in (
                storage.tops, storage.maxima, storage.sums, storage.alpha, storage.sink, storage.rope_exponents,
            )),
        )  # fmt: skip
        if tid == 0:
            cute.arch.mbarrier_init(shared.q_full, 1)
            for stage in cutlass.range_constexpr(STAGES):  # eight warps; MODEL1: and every key's scales
                cute.arch.mbarrier_init(shared.raw_full + stage, 8 + TILE * self.rope_is_v)
            cute.arch.mbarrier_init(shared.tops_full, Int32(cute.arch.cluster_size()) + 1)
            cute.arch.mbarrier_init(shared.sums_full, 1)
            cute.arch.mbarrier_init(shared.pieces_full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()  # they may be written to; the fence has released them
        # The kernel is short: it is set up while the one ahead of it still runs, and lets the next one.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        share = self.share(params)
        blocks = share.last_block - share.first_block

        # ---- load ----
        index = cute.make_rmem_tensor(1, Int32)
        index[0] = self.load_index(params, share, me, me.wg >> 1)
        cute.arch.sync_threads()  # the barriers are set up
        sink = Float32(0)
        if const_expr(params.attn_sink is not None):
            sink = params.attn_sink[cutlass.min(share.head_tile * self.heads + tid % self.heads, self.h_q - 1)]
        if blocks > 0:
            self.copy_q(params, share, me, shared)
        if tid == THREADS - 1:
            self.begin(share, shared)
        if (me.wg >> 1) < blocks:
            self.copy_records(params, share, me, shared, me.wg >> 1, index)
        if blocks > 0:
            self.convert_q(share, me, shared)

        thr_qk, thr_pv = mma_qk.get_slice(me.t), mma_pv.get_slice(me.t)
        quarter = cute.local_tile(shared.sQ, (self.heads, QUARTER), (0, me.wg))
        rQ = mma_qk.make_fragment_B(thr_qk.partition_B(quarter))  # (MMA, 1, 8): descriptors
        rope_of_q = cute.local_tile(shared.sQ_rope, (self.heads, 16), (0, D_V // 16 + me.wg))
        rQ_rope = mma_rope.make_fragment_B(mma_rope.get_slice(me.t).partition_B(rope_of_q))  # (MMA, 1, 1); V32
        rV = [  # by tile of 64 columns, (MMA, 1, 4)
            mma_pv.make_fragment_A(thr_pv.partition_A(cute.local_tile(shared.sV, (TILE, TILE), (2 * me.wg + i, 0))))
            for i in (0, 1)
        ]
        rP = mma_pv.make_fragment_B(thr_pv.partition_B(shared.sP))  # (MMA, 1, 4)
        accS = cute.make_rmem_tensor(thr_qk.partition_shape_C((TILE, self.heads)), Float32)  # ((2,2,heads/8),1,1)
        accO = [cute.make_rmem_tensor(thr_pv.partition_shape_C((TILE, self.heads)), Float32) for _ in (0, 1)]
        for tile in (0, 1):
            accO[tile].fill(0.0)
        top, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)  # of heads 2 pc + e: m, l
        top.fill(-1e30)  # finite: -inf - -inf is NaN
        sums.fill(0.0)
        if const_expr(params.attn_sink is not None):  # noqa: SIM102  one is decided at compile time
            if tid < self.heads:  # only the merge needs it
                smem_tensor(shared.sink + tid * 4, Float32, 1)[0] = sink * LOG2_E
        cute.arch.sync_threads()  # Q
        cute.arch.cluster_wait()  # all have their barriers set up
        if (blocks == 0) & (tid < Int32(share.size)):
            cute.arch.mbarrier_arrive(shared.tops_full, tid)

        for n in cutlass.range(blocks, unroll=1):
            warpgroup.wait_group(0)  # for O of the block before
            cute.arch.barrier(barrier_id=1 + me.wg, number_of_threads=WARPGROUP)  # its V may be written again
            cute.arch.mbarrier_wait(shared.raw_full + (n & 1), phase=(n >> 1) & 1)

            # ---- scores ----
            exponents = self.scores(me, shared, mma_qk, mma_rope, rQ, rQ_rope, accS, n)
            logits = self.exchange(me, shared, accS)

            # ---- softmax ----
            if const_expr(self.groups == 4) or me.wg < self.groups:
                self.softmax(params, share, me, shared, logits, exponents, top, sums, n + 1 == blocks)
            cute.arch.fence_proxy("async.shared", space="cta")  # V and P become visible to the products
            cute.arch.sync_threads()

            # ---- values ----
            if n > 0:
                for j in cutlass.range_constexpr(self.groups):
                    pair = load_smem_8b(shared.alpha + (8 * j + 2 * me.pc) * 4, Float32)
                    for tile in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(4):
                            accO[tile][4 * j + i] = accO[tile][4 * j + i] * pair[i % 2]
            warpgroup.fence()
            mma_pv.set(warpgroup.Field.ACCUMULATE, True)
            for k in cutlass.range_constexpr(TILE // 16):
                for tile in cutlass.range_constexpr(2):
                    cute.gemm(mma_pv, accO[tile], rV[tile][None, None, k], rP[None, None, k], accO[tile])
            warpgroup.commit_group()
            if ((me.wg >> 1) == (n & 1)) & (n + STAGES < blocks):  # all have read the records of block n
                self.copy_records(params, share, me, shared, n + STAGES, index)

        # ---- merge ----
        wait_for_peers(Int32(shared.tops_full.toint()))
        known = cute.make_tensor(shared.known, 2)
        pieces, inverse = known[0], known[1]
        head, weight = self.head_of(me, 2 * self.groups), Float32(0)  # the lane's
        top = Float32(-1e30)
        for p in cutlass.range(pieces, unroll=4):
            top = cute.arch.fmax(top, smem_tensor(shared.tops + (p * self.heads + head) * 4, Float32, 1)[0])
        if blocks > 0:
            own = smem_tensor(shared.tops + (Int32(share.rank) * self.heads + head) * 4, Float32, 1)[0]
            weight = cute.math.exp2(own - top, fastmath=True)
            self.send_sums(share, me, shared, head, weight)
        warpgroup.wait_group(0)
        if blocks > 0:
            self.send(share, me, shared, pieces, inverse, head, accO, weight)
        factor = self.finish_heads(params, share, me, shared, pieces, head, top)
        self.merge(params, share, me, shared, pieces, inverse, factor)

    def thread(self, tid: Int32) -> Thread:
        wg, t, lane = cute.arch.make_warp_uniform(tid >> 7), tid & 127, tid & 31  # `//` would allow for negative numbers
        return Thread(tid, t, wg, cute.arch.make_warp_uniform(t >> 5), lane, lane >> 2, lane & 3)

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
        """By one thread: what the merge needs to know, and what this CTA waits for."""
        pieces = Int32(divide(Uint32(share.blocks + share.each - 1), Uint32(share.each)))
        inverse = Int32(divide(share.size + 65535, share.size))
        known = cute.make_tensor(shared.known, 2)
        known[0], known[1] = pieces, inverse
        cute.arch.mbarrier_arrive_and_expect_tx(shared.tops_full, pieces * (self.heads * 4))
        cute.arch.mbarrier_arrive_and_expect_tx(shared.sums_full, pieces * (self.heads * 4))
        of_piece = self.units(share, inverse) * (self.unit_bytes + self.heads * 4)
        cute.arch.mbarrier_arrive_and_expect_tx(shared.pieces_full, pieces * of_piece)

    # ---- load ----

    @cute.jit
    def copy_q(self, params: Params, share: Request, me: Thread, shared: Shared):
        """Rows of Q into V's place, a warp two (or one) of them."""
        first = share.head_tile * self.heads
        rows, row_bytes = cutlass.min(self.h_q - first, self.heads), self.fmt.d_qk * 2
        if me.tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full, rows * row_bytes)
        row = self.heads // 16 * (4 * me.wg + me.w) + me.lane
        if (me.lane < self.heads // 16) & (row < rows):
            source = params.q[Int64(share.req), share.s_idx, first + row, None].iterator.toint()
            to = Int32(shared.sV.iterator.toint()) + row * self.q_pitch
            bulk_copy_to_smem(to, source, Int32(row_bytes), Int32(shared.q_full.toint()))

    @cute.jit
    def load_index(self, params: Params, share: Request, me: Thread, n: Int32) -> Int32:
        """Of a lane's key in block n, of which the warp has an eighth; -1 past the request's tokens or the CTA's blocks."""
        block = share.first_block + n
        token, length = block * self.tile_n + self.first_key(me) + me.lane, share.lengths.main
        row = params.indices[Int64(share.req), share.s_idx, None].iterator.toint()
        if const_expr(params.extra_indices is not None):  # noqa: SIM102  one is decided at compile time
            if block >= share.lengths.main_blocks:
                token, length = token - share.lengths.main_blocks * self.tile_n, share.lengths.extra
                row = params.extra_indices[Int64(share.req), share.s_idx, None].iterator.toint()
        index = Int32(-1)
        if (me.lane < 8) & (block < share.last_block) & (token < length):
            index = global_tensor(row + Int64(token) * 4, Int32, 1)[0]
        return index

    def first_key(self, me: Thread) -> Int32:
        """Of the eight in a block that the warp copies."""
        return 32 * (me.wg & 1) + 8 * me.w

    @cute.jit
    def copy_records(self, params: Params, share: Request, me: Thread, shared: Shared, n: Int32, index: cute.Tensor):
        """Starts the copies of the warp's part of block n, a record a lane, and fetches the indices for the next time.

        An index below 0 or past the cache is none: its P is 0, and 0 * NaN must not reach O, so its place gets zeros.
        """
        page_block_size, num_blocks = Uint32(params.kv_cache.shape[1]), Uint32(params.kv_cache.shape[0])
        base, page_stride = params.kv_cache.iterator.toint(), Int64(params.kv_cache.stride[0])
        if const_expr(params.extra_indices is not None):
            extra = params.extra_kv_cache
            if share.first_block + n >= share.lengths.main_blocks:
                page_block_size, num_blocks = Uint32(extra.shape[1]), Uint32(extra.shape[0])
                base, page_stride = extra.iterator.toint(), Int64(extra.stride[0])
        page = divide(Uint32(index[0]), page_block_size)
        offset = Uint32(index[0]) - page * page_block_size
        is_valid = (index[0] >= 0) & (page < num_blocks)
        mask = Uint32(cute.arch.vote_ballot_sync(is_valid))
        start = base + Int64(page) * page_stride
        key, stage = self.first_key(me), n & 1
        first, full = self.stage(shared, n) + key * self.record_pitch, shared.raw_full + stage
        if mask != 0xFF:
            self.clear(me, first, ~mask)
        cute.arch.sync_warp()
        if me.lane == 0:
            smem_tensor(shared.valid + (8 * stage + key // 8) * 4, Uint32, 1)[0] = mask
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.arch.popc(mask) * self.fmt.row_bytes)
        if is_valid:
            record = start + Int64(offset) * self.fmt.row_bytes
            to = first + me.lane * self.record_pitch
            bulk_copy_to_smem(to, record, Int32(self.fmt.row_bytes), Int32(full.toint()))
        if const_expr(self.rope_is_v):
            scales = start + Int64(page_block_size) * self.fmt.row_bytes + Int64(offset) * self.fmt.scale_row_bytes
            if me.lane < 8:
                copy_async_8b(self.scales_at(shared, n, key + me.lane), scales, Uint32(is_valid) * 8)
                cute.arch.cp_async_mbarrier_arrive_noinc(full)
        index[0] = self.load_index(params, share, me, n + STAGES)

    @cute.jit
    def clear(self, me: Thread, first: Int32, mask: Uint32):
        """Zeros for the records of `mask`, of eight. The fence behind P orders them before the next copy to that place."""
        zeros = cute.make_rmem_tensor(4, Uint32)
        zeros.fill(0)
        for i in cutlass.range(8, unroll=1):
            if (mask >> Uint32(i)) & 1 == 1:
                for at in cutlass.range(me.lane * 16, self.fmt.row_bytes, 512, unroll=1):
                    store_smem_16b(first + i * self.record_pitch + at, zeros)

    def stage(self, shared: Shared, n: Int32) -> Int32:
        return shared.raw + (n & 1) * self.stage_bytes

    def scales_at(self, shared: Shared, n: Int32, key: Int32) -> Int32:
        if self.rope_is_v:
            return self.stage(shared, n) + TILE * self.record_pitch + key * 8
        return self.stage(shared, n) + key * self.record_pitch + self.fmt.scale_offset

    @cute.jit
    def convert_q(self, share: Request, me: Thread, shared: Shared):
        """Q from V's place to its own, converted: 32 columns of a row at a time, V32's rope by the threads that begin again.

        Heads past h_q are zeros. A lane has chunks 2 j + i of a tile's 8, of rope 4 i + j (`query_words`).
        """
        tile = me.tid >> (self.log2_heads + 1)
        cute.arch.mbarrier_wait(shared.q_full, phase=0)
        if tile < 8:
            self.convert_tile(share, me, shared, tile, False)
        if const_expr(not self.rope_is_v):  # noqa: SIM102  one is decided at compile time
            if tile == 0:
                self.convert_tile(share, me, shared, Int32(8), True)
        cute.arch.fence_proxy("async.shared", space="cta")  # becomes visible to WGMMA

    @cute.jit
    def convert_tile(self, share: Request, me: Thread, shared: Shared, tile: Int32, is_rope: cutlass.Constexpr):
        i, row = me.tid & 1, (me.tid >> 1) & (self.heads - 1)
        source = Int32(shared.sV.iterator.toint()) + row * self.q_pitch + tile * 128
        chunks = [cute.make_rmem_tensor(4, Uint32) for _ in range(4)]
        for j in cutlass.range_constexpr(4):
            c = 4 * i + j if is_rope else 2 * j + i
            if const_expr(self.rope_is_v):
                c = cutlass.select_(tile == 7, 4 * i + j, c)
            chunks[j].fill(0)
            if share.head_tile * self.heads + row < self.h_q:
                cute.autovec_copy(smem_tensor(source + c * 16, Uint32, 4), chunks[j])
        to = Int32(shared.sQ.iterator.toint()) + row * 128 + tile * (self.heads * 128)
        for k in cutlass.range_constexpr(4):  # k-step 2 i + k / 2
            words = self.rope_words(chunks, k) if is_rope else self.query_words(chunks, k, False)
            store_smem_16b(to + ((4 * i + k) ^ (row & 7)) * 16, words)

    def rope_words(self, chunks: list[cute.Tensor], k: int) -> cute.Tensor:
        """Registers [4]: V32's rope of Q / Q_SCALE in bf16, as `query_words`, in the order in which a lane holds 4 columns of K
        for each of the four k-steps: position 16 s + 8 h + 2 j + e gets column 16 s + 4 j + 2 h + e. chunks [4]: 32 columns."""
        pairs = [[chunks[2 * (k // 2) + j // 2][j % 2 * 2 + k % 2]] for j in (0, 1, 2, 3)]
        return self.query_words(pairs, 0, True)

    # ---- scores ----

    @cute.jit
    def read_records(self, me: Thread, shared: Shared, n: Int32) -> Records:
        """Of block n."""
        records = Records(
            [[cute.make_rmem_tensor(4, Uint32) for _ in (0, 1)] for _ in (0, 1)],
            [cute.make_rmem_tensor(4 if self.rope_is_v else 2, Uint32) for _ in (0, 1)],
            [cute.make_rmem_tensor(2 if self.rope_is_v else 4, Uint32) for _ in (0, 1)],
        )
        key, fmt = 16 * me.w + me.g, self.fmt
        record = self.stage(shared, n) + key * self.record_pitch
        for r in cutlass.range_constexpr(2):
            mine = record + r * 8 * self.record_pitch + me.pc * 16
            for tile in (0, 1):
                codes = mine + (fmt.nope_offset + QUARTER * me.wg + TILE * tile)
                cute.autovec_copy(smem_tensor(codes, Uint32, 4), records.codes[r][tile])
            scales = self.scales_at(shared, n, key + 8 * r)
            cute.autovec_copy(smem_tensor(scales, Uint32, cute.size(records.scales[r])), records.scales[r])
            if const_expr(self.rope_is_v):
                cute.autovec_copy(smem_tensor(mine + (fmt.rope_offset + 64), Uint32, 4), records.rope[r])
            else:
                rope = mine - me.pc * 8 + (fmt.rope_offset + 32 * me.wg)
                cute.autovec_copy(smem_tensor(rope, Uint32, 2), records.rope[r])
        return records

    def scores(
        self, me: Thread, shared: Shared, mma_qk: cute.TiledMma, mma_rope: cute.TiledMma, rQ: cute.Tensor, rQ_rope: cute.Tensor,
        accS: cute.Tensor, n: Int32,
    ) -> cute.Tensor:  # fmt: skip
        """accS = K Q^T over the warpgroup's columns, and these columns of V. Returns the exponents of the lane's keys [2],
        0 for those that do not count."""
        records = self.read_records(me, shared, n)
        scales, exponents = self.scales_of(me, shared, records)
        v_row = Int32(shared.sV.iterator.toint()) + 2 * me.wg * (TILE * 128) + (16 * me.w + me.g) * 128
        # In halves of a tile, two k-steps: what a lane has as 16-byte chunk `part` of V's columns, for its two keys.
        fragments = [cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 2)), Float16) for _ in (0, 1)]
        order = [(tile, part) for tile in (0, 1) for part in (0, 1)]
        if not self.rope_is_v:
            order = [None, *order]
        for i, unit in enumerate(order):
            fragment = fragments[i % 2]
            if i >= 2:
                warpgroup.wait_group(1)  # the unit before the last one: its registers are free
            if unit is None:
                step = cute.recast_tensor(fragment, BFloat16)[None, None, 0]
                for r in (0, 1):
                    self.to_fragment(step, r, self.rope_to_bf16([records.rope[r]], exponents[r]))
                warpgroup.fence()
                mma_rope.set(warpgroup.Field.ACCUMULATE, False)
                cute.gemm(mma_rope, accS, step, rQ_rope[None, None, 0], accS)
            else:
                tile, part = unit
                if part == 0:
                    of_tile = [self.scale_of(scales, exponents, r, tile) for r in (0, 1)]
                for r in (0, 1):
                    k, chunk = self.to_fp16(me, records, of_tile[r], exponents[r], r, tile, part)
                    self.to_fragment(fragment, r, k)
                    # a row's chunk j lies at j ^ (row % 8)
                    store_smem_16b(v_row + tile * (TILE * 128) + r * 1024 + ((chunk ^ me.g) * 16), k)
                warpgroup.fence()
                for s in (0, 1):
                    mma_qk.set(warpgroup.Field.ACCUMULATE, i + s > 0)
                    b = rQ[None, None, 4 * tile + 2 * part + s]
                    cute.gemm(mma_qk, accS, fragment[None, None, s], b, accS)
            warpgroup.commit_group()
        valid = load_smem_8b(shared.valid + ((n & 1) * 8 + 2 * me.w) * 4)
        for r in (0, 1):
            counts = (valid[r] >> Uint32(me.g)) & 1
            exponents[r] = cutlass.select_(counts == 1, exponents[r], Uint32(0))
        warpgroup.wait_group(0)
        return exponents

    def scales_of(self, me: Thread, shared: Shared, records: Records) -> tuple[cute.Tensor, cute.Tensor]:
        """By key: the scale of the warpgroup's columns (V32's over 2 ** (exponent - 127), a pair of fp16; MODEL1's two bytes);
        exponents."""
        scales, exponents = cute.make_rmem_tensor(2, Uint32), cute.make_rmem_tensor(2, Uint32)
        if self.rope_is_v:
            self.exchange_rope(me, shared, records, exponents)
        for r in (0, 1):
            words = records.scales[r]
            if self.rope_is_v:  # bytes of e8m0; the eighth is padding
                fields = [(words[i // 4] >> (8 * (i % 4))) & 255 for i in range(7)]
                exponents[r] = cutlass.max(exponents[r], self.exponent_of(fields))
                scales[r] = Uint32(cutlass.select_(me.wg < 2, words[0], words[1])) >> Uint32((me.wg & 1) * 16)
            else:
                exponents[r] = self.exponent_of([(words[i] & 0x7FFFFFFF) >> 23 for i in range(4)])
                inverse = ((254 - exponents[r]) << 23).bitcast(Float32)
                mine = Uint32(cutlass.select_(me.wg < 2, *(
                    Uint32(cutlass.select_((me.wg & 1) == 0, words[i], words[i + 1])) for i in (0, 2)
                )))  # fmt: skip
                scales[r] = fp16_pair(mine.bitcast(Float32) * inverse)
        return scales, exponents

    def scale_of(self, scales: cute.Tensor, exponents: cute.Tensor, r: int, tile: int) -> Uint32:
        """Of the warpgroup's column tile, from what `scales_of` returns."""
        if self.rope_is_v:
            return self.fp16_scale((scales[r] >> (8 * tile)) & 255, exponents[r])
        return scales[r]

    @cute.jit
    def exchange_rope(self, me: Thread, shared: Shared, records: Records, exponents: cute.Tensor):
        """MODEL1's rope is part of V: the least exponents of the two keys so that it stays in fp16's range, below 2 ** 16. The
        last warpgroup has it."""
        keys = shared.rope_exponents + (16 * me.w + me.g) * 4
        slots = [smem_tensor(keys + 32 * r, Uint32, 1) for r in (0, 1)]
        if me.wg == 3:
            for r in cutlass.range_constexpr(2):
                words = [half[i] for half in (records.codes[r][1], records.rope[r]) for i in (0, 1, 2, 3)]
                exponent = self.rope_exponent(words)
                if me.pc == 0:
                    slots[r][0] = exponent
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(2):
            exponents[r] = slots[r][0]

    def to_fp16(self, me: Thread, records: Records, scale: Uint32, exponent: Uint32, r: int, tile: int, part: int):
        """8 columns of key r in the warpgroup's `tile`, over 2 ** (exponent - 127): [4] fp16 pairs; which 16-byte chunk."""
        k = e4m3_to_fp16(cute.make_tensor(records.codes[r][tile].iterator + 2 * part, 2), scale)
        chunk = 2 * me.pc + part
        if self.rope_is_v and tile == 1:
            self.replace_by_rope(me, k, records.rope[r] if part else records.codes[r][1], exponent)
            chunk = cutlass.select_(me.wg < 3, chunk, me.pc + 4 * part)
        return k, chunk

    @cute.jit
    def replace_by_rope(self, me: Thread, k: cute.Tensor, rope: cute.Tensor, exponent: Uint32):
        """MODEL1's last tile, which the last warpgroup has."""
        if me.wg == 3:
            words = cute.make_rmem_tensor(4, Uint32)
            for i, pair in enumerate(self.rope_to_bf16([rope], exponent)):
                words[i] = pair
            bf16_to_fp16(words, k)

    @cute.jit
    def exchange(self, me: Thread, shared: Shared, accS: cute.Tensor) -> cute.Tensor:
        """S of the warpgroup's 8 heads over all columns: element e + 2 r is key g + 8 r, head 2 pc + e of these."""
        mine = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            mine[i] = accS[i]
        for j in cutlass.range_constexpr(self.groups):
            part = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                part[i] = accS[4 * j + i]
                mine[i] = cutlass.select_(me.wg == j, part[i], mine[i])
            if me.wg != j:
                slot = me.wg - Int32(me.wg > j)
                store_smem_16b(shared.exchange + ((3 * j + slot) * WARPGROUP + me.t) * 16, part)
        cute.arch.sync_threads()
        if me.wg < self.groups:
            for i in cutlass.range_constexpr(3):
                got = load_smem_16b(shared.exchange + ((3 * me.wg + i) * WARPGROUP + me.t) * 16, Float32)
                for k in cutlass.range_constexpr(4):
                    mine[k] = mine[k] + got[k]
        return mine

    # ---- softmax ----

    # Of n values of a lane (n heads, 8 j + 2 pc + e at 2 j + e) `over_keys` leaves it one, by its upper bits.

    def lane_of(self, i: int, pc: Int32, n: int) -> Int32:
        """The lane that has value i of the heads of the lanes with `pc`."""
        return i * (32 // n) + pc

    def head_of(self, me: Thread, n: int) -> Int32:
        """The head that the lane has."""
        i = me.lane // (32 // n)
        return i // 2 * 8 + 2 * me.pc + i % 2

    @cute.jit
    def softmax(
        self, params: Params, share: Request, me: Thread, shared: Shared, logits: cute.Tensor, exponents: cute.Tensor,
        top: cute.Tensor, sums: cute.Tensor, is_last,
    ):  # fmt: skip
        """P^T of the warpgroup's 8 heads and what O is scaled by; of the last block m to the whole cluster, and l."""
        for i in cutlass.range_constexpr(4):
            r = i // 2
            power = (exponents[r] << 23).bitcast(Float32)
            z = logits[i] * (power * (params.scale_log2 * Q_SCALE)) + (Float32(Int32(exponents[r])) - 127.0)
            # Masked by select and after the product: adding -inf to a NaN would stay NaN.
            logits[i] = cutlass.select_(exponents[r] != 0, z, Float32(-INF))
        maxima = [cute.arch.fmax(logits[e], logits[2 + e]) for e in (0, 1)]
        self.store_of_head(me, shared.maxima, over_keys(maxima, me.lane, cute.arch.fmax)[0])
        cute.arch.barrier(barrier_id=1 + me.wg, number_of_threads=WARPGROUP)
        alpha = cute.make_rmem_tensor(2, Float32)
        first = 8 * me.wg + 2 * me.pc  # head
        for e in cutlass.range_constexpr(2):
            of_warps, old = load_smem_16b(shared.maxima + (first + e) * 16, Float32), top[e]
            largest = cute.arch.fmax(cute.arch.fmax(of_warps[0], of_warps[1]), cute.arch.fmax(of_warps[2], of_warps[3]))
            top[e] = cute.arch.fmax(old, largest - RAISED_BITS)
            alpha[e] = cute.math.exp2(old - top[e], fastmath=True)
            total = Float32(0)
            for r in cutlass.range_constexpr(2):
                p = cute.math.exp2(logits[2 * r + e] - top[e], fastmath=True)
                logits[2 * r + e] = p
                total += p * ((254 - exponents[r]) << 23).bitcast(Float32)
            sums[e] = sums[e] * alpha[e] + total
        if (me.w == 0) & (me.g == 0):
            cute.autovec_copy(alpha, smem_tensor(shared.alpha + first * 4, Float32, 2))
        self.store_p(me, shared, logits)
        if is_last:
            peer = 8 * me.w + me.g
            if peer < Int32(share.size):
                to = shared.tops + (Int32(share.rank) * self.heads + first) * 4
                store_to_peer(to, cute.recast_tensor(top, Uint32), Int32(shared.tops_full.toint()), peer)
                if (me.wg == 0) & (me.pc == 0):  # all warps have read their records: see `exchange`
                    cute.arch.mbarrier_arrive(shared.tops_full, peer)
            self.store_of_head(me, shared.sums, over_keys([sums[e] for e in (0, 1)], me.lane, lambda x, y: x + y)[0])

    @cute.jit
    def store_of_head(self, me: Thread, array: Int32, value: Float32):
        """The warp's, in an array [heads, 4 warps]."""
        to = smem_tensor(array + (8 * me.wg + self.head_of(me, 2)) * 16 + me.w * 4, Float32, 1)
        if me.g % 4 == 0:  # the others have the same
            to[0] = value

    def store_p(self, me: Thread, shared: Shared, p: cute.Tensor) -> None:
        """P^T in fp16, as the products read it: 16-byte chunks of a row of heads swizzled over the rows of 128 bytes."""
        fp16 = cute.make_rmem_tensor(4, Float16)
        fp16.store(p.load().to(Float16))
        words = cute.recast_tensor(fp16, Uint32)
        row = Int32(shared.sP.iterator.toint()) + (16 * me.w + me.g) * (2 * self.heads) + me.pc * 4
        chunk = me.wg ^ (me.g // (64 // self.heads))  # g * 2 * heads / 128, of 2 or 4 chunks
        for r in (0, 1):
            smem_tensor(row + r * (16 * self.heads) + chunk * 16, Uint32, 1)[0] = words[r]

    # ---- merge ----

    def is_first(self, me: Thread):
        """Of the lanes with the same head."""
        return me.g % (32 // self.heads) == 0

    @cute.jit
    def send_sums(self, share: Request, me: Thread, shared: Shared, head: Int32, weight: Float32):
        """l to all, each warp to one CTA. head, weight: the lane's."""
        word, peer = cute.make_rmem_tensor(1, Float32), 4 * me.wg + me.w
        of_warps = load_smem_16b(shared.sums + head * 16, Float32)
        word[0] = ((of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3])) * weight
        if (peer < Int32(share.size)) & self.is_first(me):
            to = shared.arrived_sums + (Int32(share.rank) * self.heads + head) * 4
            store_to_peer(to, cute.recast_tensor(word, Uint32), Int32(shared.sums_full.toint()), peer)

    def powers(self, me: Thread, accO: list[cute.Tensor]) -> tuple[list[Float32], Float32]:
        """What makes the largest of a head's values, in the warp's 32 columns, 2 ** 14 to 2 ** 15: [2 j + e] for the lane's
        heads; and what undoes it, of `head_of`'s."""
        n, maxima = 2 * self.groups, []
        for i in range(n):
            largest = Float32(0)
            for tile in (0, 1):
                for r in (0, 1):
                    largest = max_abs(largest, accO[tile][i // 2 * 4 + 2 * r + i % 2])
            maxima.append(largest)
        (largest,) = over_keys(maxima, me.lane, cute.arch.fmax)
        exponent = cutlass.max(largest.bitcast(Uint32) >> 23, Uint32(30))  # then both powers are normal numbers
        factor, power = (((x << 23).bitcast(Float32)) for x in (268 - exponent, exponent - 14))
        return [cute.arch.shuffle_sync(factor, self.lane_of(i, me.pc, n)) for i in range(n)], power

    @cute.jit
    def send(
        self, share: Request, me: Thread, shared: Shared, pieces: Int32, inverse: Int32, head: Int32, accO: list[cute.Tensor],
        weight: Float32,
    ):  # fmt: skip
        """O by units of 16 columns to the CTAs that merge them, unit u to CTA u % size.

        A warp has two. head, weight: the lane's.
        """
        full, word = Int32(shared.pieces_full.toint()), cute.make_rmem_tensor(1, Float32)
        factors, power = self.powers(me, accO)
        word[0] = power * weight
        for tile in cutlass.range_constexpr(2):
            unit = 4 * (2 * me.wg + tile) + me.w
            slot = unit * inverse >> 16
            at, peer = slot * pieces + Int32(share.rank), unit - slot * Int32(share.size)
            for c in cutlass.range_constexpr(self.heads // 16):  # 16 heads: element e + 2 r + 4 j
                values, fp16 = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, Float16)
                for i in cutlass.range_constexpr(8):
                    values[i] = accO[tile][8 * c + i] * factors[4 * c + i // 4 * 2 + i % 2]
                fp16.store(values.load().to(Float16))
                to = shared.arrived + at * self.unit_bytes + c * 512 + self.slot(me.g, me.pc)
                store_to_peer(to, cute.recast_tensor(fp16, Uint32), full, peer)
            if self.is_first(me):
                to = shared.powers + (at * self.heads + head) * 4
                store_to_peer(to, cute.recast_tensor(word, Uint32), full, peer)

    def slot(self, g: Int32, pc: Int32) -> Int32:
        """Where a lane's 16 bytes of 512 arrive: eight neighbours fill 128 bytes, and eight lanes with the same pc lie in
        different banks."""
        return (g >> 1) * 128 + (((g & 1) * 4 + pc) ^ (g >> 1)) * 16

    @cute.jit
    def finish_heads(
        self, params: Params, share: Request, me: Thread, shared: Shared, pieces: Int32, head: Int32, top: Float32
    ) -> Float32:  # fmt: skip
        """What the sum of all pieces of O is multiplied by, of the lane's head; lse by one warp of the first CTA.

        Nothing attended: 0, lse +inf. The sink counts here.
        """
        wait_for_peers(Int32(shared.sums_full.toint()))
        total = Float32(0)
        for p in cutlass.range(pieces, unroll=4):
            total += smem_tensor(shared.arrived_sums + (p * self.heads + head) * 4, Float32, 1)[0]
        is_empty, denominator = total == 0.0, total
        if const_expr(params.attn_sink is not None):
            denominator += cute.math.exp2(smem_tensor(shared.sink + head * 4, Float32, 1)[0] - top, fastmath=True)
        of_all = share.head_tile * self.heads + head
        if (share.rank == 0) & (me.wg == 0) & (me.w == 0) & self.is_first(me) & (of_all < self.h_q):
            # As log2(1) + the maximum, rather than the difference of two larger numbers.
            lse = cute.math.log2(total * 2.0**-RAISED_BITS, fastmath=True) + (top + RAISED_BITS)
            params.lse[Int64(share.req), share.s_idx, of_all] = cutlass.select_(is_empty, Float32(INF), lse * LN_2)
        return cutlass.select_(is_empty, Float32(0), cute.arch.rcp_approx(denominator))

    @cute.jit
    def merge(
        self, params: Params, share: Request, me: Thread, shared: Shared, pieces: Int32, inverse: Int32, factor: Float32
    ):  # fmt: skip
        """out of this CTA's columns. factor: of the lane's head.

        A warp takes 4 heads of 16 in a unit, 16 c + 8 j + 2 q + e, a lane (j, r) = pc and column g + 8 r of them.
        """
        j, r, log2_items = me.pc >> 1, me.pc & 1, self.log2_heads - 2  # of a unit
        wait_for_peers(Int32(shared.pieces_full.toint()))
        for item in cutlass.range(
            4 * me.wg + me.w, self.units(share, inverse) << log2_items, THREADS // 32, unroll=1
        ):  # fmt: skip
            slot, c, q = item >> log2_items, (item >> 2) & (self.heads // 16 - 1), item & 3
            sums = cute.make_rmem_tensor(2, Float32)
            sums.fill(0.0)
            piece = shared.arrived + slot * pieces * self.unit_bytes + c * 512 + self.slot(me.g, q) + me.pc * 4
            power = shared.powers + (slot * pieces * self.heads + 16 * c + 8 * j + 2 * q) * 4
            for p in cutlass.range(pieces, unroll=8):
                values, fp16 = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float16)
                word = cute.recast_tensor(fp16, Uint32)
                word[0] = smem_tensor(piece + p * self.unit_bytes, Uint32, 1)[0]
                values.store(fp16.load().to(Float32))
                powers = load_smem_8b(power + p * (self.heads * 4), Float32)
                for e in cutlass.range_constexpr(2):
                    sums[e] = sums[e] + values[e] * powers[e]
            column = (Int32(share.rank) + slot * Int32(share.size)) * UNIT + me.g + 8 * r
            for e in cutlass.range_constexpr(2):
                head = share.head_tile * self.heads + 16 * c + 8 * j + 2 * q + e
                mine = cute.arch.shuffle_sync(factor, self.lane_of(4 * c + 2 * j + e, q, 2 * self.groups))
                if head < self.h_q:
                    params.out[Int64(share.req), share.s_idx, head, None][column] = BFloat16(sums[e] * mine)


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
