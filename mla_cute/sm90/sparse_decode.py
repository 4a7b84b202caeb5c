"""Sparse MLA decode on an FP8 KV cache, V3.2 or MODEL1, for Hopper. Figures are V3.2's.

Bound: a token costs 34 tensor-core cycles per 64 heads (2 * 64 * (576 + 512) FLOP at 4096 a cycle), and some 77 cycles
of the shared-memory port: 656 B read and 1152 B written at the 18 and 27 B/cycle that the port leaves to one warpgroup
while QK streams Q and K through it. So dequantisation sets the pace, by its traffic rather than by its arithmetic.

Formats differ in three places: K and Q have 9 or 8 column tiles; MODEL1's V includes rope, so its K stage has a ninth tile
that only takes P; and its scales, a plane of bytes behind a page's rows, come by a load beside the index. Keys of an extra
cache are blocks behind the main ones: only `dequant` knows.

A CTA owns one partition of the plan (a run of key blocks, perhaps of several requests) for one query token and one tile
of 64 heads.

| role    | warps | registers | consumes                  | produces                                              |
|---------|-------|-----------|---------------------------|-------------------------------------------------------|
| math0   | 0-3   | 160       | K (full), Q               | S, softmax, P -> smem, row factors, O[:, :128], lse   |
| math1   | 4-7   | 232       | P and V (P ready)         | O[:, 128:]; loads Q of the next request               |
| dequant | 8-11  | 112       | raw records (bulk copies) | K in bf16, zeros for skipped tokens, the valid mask   |

 indices -> [dequant] bulk copy of 656-byte records -> raw ring -> [dequant] e4m3 * scale -> K stage
   -> [math0] S = Q K^T -> softmax -> P (over the rope tile of its own K stage)
   -> [math0] O_left += P V_left, [math1] O_right += P V_right -> out

One block of 64 keys (stage = block parity):
 1. raw records of the warp's 16 tokens arrive; codes * scale -> bf16 -> K stage, rope copied           [dequant]
 2. S = Q K^T, 36 steps of 16 dims; 28 with Q from shared memory, the last 8 with Q from registers      [math0]
 3. m' = max(m, rowmax(S) * scale_log2), P = exp2(S * scale_log2 - m'), alpha = exp2(m - m')            [math0]
 4. l = l * alpha + rowsum(P); P in bf16 -> registers and smem; alpha -> smem                           [math0]
 5. O_left = alpha * O_left + P V_left                                                                  [math0]
    O_right = alpha * O_right + P V_right                                                               [math1]
 6. both release the stage; after a request's last block it first serves as the staging buffer of O     [math0, math1]

Shared memory (bytes): Q 7 tiles of 64 x 64 bf16 57,344; K 2 x 73,728; raw ring 32 x 704; factors and barriers 1.2 K.
V is the transposed view of K's first 512 columns. Sources of the ideas: FlashMLA (roles, plan, split and combine),
FlashAttention (online softmax). Ours: one bulk copy a record, P over the dead rope tile, two Q tiles in registers, and
O split 128 : 384 so that the warpgroup with QK and softmax has the smaller half.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.memory
from cutlass import (
    BFloat16,
    Boolean,
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    const_expr,
    cute,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .. import jit
from ..combine import Combine
from ..kv_cache import MODEL1, V32, KVFormat
from ..validate import Problem, check_int
from .helpers import (
    LN_2,
    LOG2_E,
    bulk_copy_to_smem,
    e4m3_to_bf16,
    e8m0_to_fp32,
    fragment_row,
    load_smem_16b,
    quad_max,
    quad_sum,
    ring,
    set_registers,
    store_smem_16b,
)

INF = float("inf")
FORMATS = {fmt.name: fmt for fmt in (V32, MODEL1)}
TILE_M = 64  # heads of a CTA: the M of a WGMMA
SW128_COLUMNS = 64  # bf16 columns of one 128-byte swizzle row: the width of a K or Q "tile"
WARPGROUP = 128
STAGE_COLUMNS = 576  # of a K stage: V32's keys; MODEL1's are 512 wide, and the last tile of 64 only takes P
SMEM_LIMIT = 232_448  # bytes a CTA may ask for on compute capability 9.0


@dataclass(frozen=True)
class Config:
    """Every number that may be tuned. Sizes derived from them are properties; `check` raises with the arithmetic."""

    tile_n: int = 64  # keys of a block; the plan counts in it
    num_stages: int = 2  # K buffers
    q_tiles_in_registers: int = 2  # of Q's 9 column tiles: 8 KB more for the raw ring, 16 registers each
    raw_slots: int = 2  # ring slots of a dequant warp, 4 records each: 20 KB in flight cover a gather's latency
    fixed_overhead_blocks: int = 5  # a request's prologue and epilogue as the plan charges them, in blocks (FlashMLA's)
    math0_columns: int = 128  # of O's 512; math1, which has no QK and no softmax to do, takes the rest
    registers: tuple[int, int, int] = (160, 232, 112)  # math0, math1, dequant; the pool of 384 threads is 3 * 168

    def num_parts(self, problem: Problem, s_q: int, num_sms: int) -> int:
        """Partitions of the plan: one CTA per SM over head tiles and query tokens, at least one."""
        return max(num_sms // (s_q * problem.head_tiles), 1)

    def raw_pitch(self, fmt: KVFormat) -> int:
        """Bytes between raw records: 64 mod 128, so that two rows' 64-byte pieces fall into different banks."""
        return (fmt.row_bytes + 63) // 128 * 128 + 64

    def smem_bytes(self, fmt: KVFormat) -> int:
        q = TILE_M * (fmt.d_qk - SW128_COLUMNS * self.q_tiles_in_registers) * 2
        k = self.num_stages * self.tile_n * STAGE_COLUMNS * 2
        raw = 4 * self.raw_slots * 4 * self.raw_pitch(fmt)
        barriers = 8 * (1 + 2 * self.num_stages + 4 * self.raw_slots)
        small = barriers + self.num_stages * (2 * TILE_M * 4 + self.tile_n // 8)
        return q + k + raw + small + 2 * 1024  # two 1024-byte alignments

    def check(self, problem: Problem) -> None:
        """Raises ValueError naming the field and the arithmetic when this Config cannot run `problem`."""
        if problem.op != "sparse_decode" or problem.kv_format not in FORMATS:
            raise NotImplementedError(
                f"config: sm90.sparse_decode runs sparse_decode on a cache of {' or '.join(FORMATS)}, "
                f"got {problem.op} on {problem.kv_format}"
            )
        numbers = "tile_n num_stages q_tiles_in_registers raw_slots fixed_overhead_blocks math0_columns"
        for name in numbers.split():
            check_int(f"config: {name}", getattr(self, name))
        if not isinstance(self.registers, tuple) or [type(r) for r in self.registers] != [int] * 3:
            raise ValueError(f"config: registers must be a tuple of 3 ints, got {self.registers!r}")
        if self.tile_n != 64:
            raise ValueError(f"config: tile_n must be 64, got {self.tile_n}")
        if self.num_stages not in (1, 2):
            raise ValueError(f"config: num_stages must be 1 or 2, got {self.num_stages}")
        if self.q_tiles_in_registers not in (0, 1, 2):
            raise ValueError(f"config: q_tiles_in_registers must be 0, 1 or 2, got {self.q_tiles_in_registers}")
        if self.raw_slots not in (1, 2, 4):
            raise ValueError(f"config: raw_slots must divide the 4 groups of a warp (1, 2 or 4), got {self.raw_slots}")
        if self.math0_columns not in (128, 256):
            raise ValueError(f"config: math0_columns must be 128 or 256, got {self.math0_columns}")
        if self.fixed_overhead_blocks < 1:
            raise ValueError(f"config: fixed_overhead_blocks must be at least 1, got {self.fixed_overhead_blocks}")
        if any(r % 8 or not 24 <= r <= 240 for r in self.registers) or sum(self.registers) > 504:
            raise ValueError(f"config: registers must be multiples of 8 in 24..240, sum <= 504, got {self.registers}")
        needed = self.smem_bytes(FORMATS[problem.kv_format])
        if needed > SMEM_LIMIT:
            raise ValueError(f"config: shared memory needs {needed} bytes, the limit is {SMEM_LIMIT}")


def default_config(problem: Problem) -> Config:
    """The shipped choice, the same for every head count. MODEL1's Q is a tile shorter: one in registers is enough."""
    return Config(q_tiles_in_registers=2 if problem.kv_format == V32.name else 1)


class NamedBarriers(enum.IntEnum):
    """Hardware barriers (0 is sync_threads); the pairs are indexed by stage so that math0 may run one block ahead."""

    P_READY = 1  # 1, 2: math0 arrives when P and alpha of a block are in smem, math1 waits
    FACTOR_READY = 3  # 3, 4: math0 arrives when the output factors of a request are in smem, math1 waits
    MATH0 = 5  # the 128 threads of math0 among themselves
    MATH1 = 6  # the 128 threads of math1 among themselves


class Part(NamedTuple):
    """One partition of the plan: requests begin_req..end_req inclusive.

    The rest of its record is read again once a request, rather than held in registers.
    """

    index: Int32
    begin_req: Int32
    end_req: Int32


class Work(NamedTuple):
    """What one partition does for one request: key blocks first..last-1, and where the result goes."""

    first_block: Int32
    last_block: Int32
    length: Int32  # selected tokens of the request in the main cache
    extra_length: Int32  # and in the extra cache, whose blocks begin behind those
    num_main_blocks: Int32
    is_split: Boolean
    slot: Int32


class Params(NamedTuple):
    """Kernel arguments that several roles read."""

    q: cute.Tensor  # [b, s_q, h_q, d_qk] bf16
    kv_cache: cute.Tensor  # [num_blocks, page_block_size, 1, bytes_per_token] uint8
    indices: cute.Tensor  # [b, s_q, topk] int32
    topk_length: cute.Tensor | None  # [b] int32
    extra_kv_cache: cute.Tensor | None  # [extra_num_blocks, extra_page_block_size, 1, bytes_per_token] uint8
    extra_indices: cute.Tensor | None  # [b, s_q, extra_topk] int32
    extra_topk_length: cute.Tensor | None  # [b] int32
    attn_sink: cute.Tensor | None  # [h_q] fp32, natural log
    metadata: cute.Tensor  # [num_parts, 8] int32
    o_partial: cute.Tensor  # [2 * num_parts, s_q, h_q, 512] fp32
    lse_partial: cute.Tensor  # [2 * num_parts, s_q, h_q] fp32, base 2
    lse: cute.Tensor  # [b, s_q, h_q] fp32, natural log
    scale_log2: Float32  # softmax_scale * log2(e)


class SparseDecode:
    """The kernel and its host function, specialised for one (Problem, Config)."""

    def __init__(self, problem: Problem, config: Config):
        self.problem = problem
        self.config = config
        self.h_q = problem.h_q
        self.head_tiles = problem.head_tiles
        self.tile_n = config.tile_n
        self.fmt = FORMATS[problem.kv_format]
        self.num_tiles = self.fmt.d_qk // SW128_COLUMNS  # column tiles of K, 9 or 8; the last is rope
        self.raw_pitch = config.raw_pitch(self.fmt)
        self.q_smem_tiles = self.num_tiles - config.q_tiles_in_registers
        self.stages = config.num_stages
        # Columns of O per math warpgroup, and the N of their WGMMAs (at most 256).
        self.columns = (config.math0_columns, self.fmt.d_v - config.math0_columns)
        self.first_column = (0, config.math0_columns)
        self.pv_n = tuple(c if c <= 256 else c // 2 for c in self.columns)

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
        stream,
    ):
        def wgmma(n, a_source, b_major):
            op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (TILE_M, n, 16), a_source, OperandMajorMode.K, b_major)
            return cute.make_tiled_mma(op)

        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma_qk = wgmma(self.tile_n, smem, OperandMajorMode.K)
        mma_qk_rs = wgmma(self.tile_n, rmem, OperandMajorMode.K)
        mma_pv_rs = wgmma(self.pv_n[0], rmem, OperandMajorMode.MN)
        mma_pv = wgmma(self.pv_n[1], smem, OperandMajorMode.MN)

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        q_columns = self.q_smem_tiles * SW128_COLUMNS
        layout_q = cute.tile_to_shape(atom, (TILE_M, q_columns), order=(0, 1))
        layout_k = cute.tile_to_shape(atom, (self.tile_n, STAGE_COLUMNS, self.stages), order=(0, 1, 2))
        layout_o = cute.tile_to_shape(atom, (TILE_M, SW128_COLUMNS), order=(0, 1))

        # TMA views with heads and columns first: [h_q, d, s_q, b]. Rows past h_q read as zero and are not written.
        by_head = [2, 3, 1, 0]
        tma_q, tma_mQ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(q.iterator, cute.select(q.layout, mode=by_head)),
            layout_q,
            (TILE_M, q_columns),
        )
        tma_o, tma_mO = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            cute.make_tensor(out.iterator, cute.select(out.layout, mode=by_head)),
            layout_o,
            (TILE_M, SW128_COLUMNS),
        )

        stages, raw_bytes = self.stages, 4 * self.config.raw_slots * 4 * self.raw_pitch

        @cute.struct
        class Smem:
            q_full: cute.struct.MemRange[Int64, 1]
            k_full: cute.struct.MemRange[Int64, stages]
            k_empty: cute.struct.MemRange[Int64, stages]
            raw_full: cute.struct.MemRange[Int64, 4 * self.config.raw_slots]
            # One bit a token, one word a dequant warp.
            valid: cute.struct.Align[cute.struct.MemRange[Uint16, stages * 4], 8]
            # By row: rescale factors of the block in a stage, output factors of the request that ended in it.
            alpha: cute.struct.MemRange[Float32, stages * TILE_M]
            factor: cute.struct.MemRange[Float32, stages * TILE_M]
            raw: cute.struct.Align[cute.struct.MemRange[Uint8, raw_bytes], 128]
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_k)], 1024]

        self.Smem = Smem
        # Scratch: the pieces' O, behind them their lse. One part alone splits nothing and needs none.
        s_q, slots = q.shape[1], 2 * metadata.shape[0]
        rows = cute.make_layout((slots, s_q, self.h_q), stride=(s_q * self.h_q, self.h_q, 1))
        lse_partial = cute.make_tensor(scratch.iterator + Int64(cute.size(rows)) * self.fmt.d_v, rows)
        d_v = self.fmt.d_v
        o_strides = (s_q * self.h_q * d_v, self.h_q * d_v, d_v, 1)
        o_partial = cute.make_tensor(scratch.iterator, cute.make_layout((*rows.shape, d_v), stride=o_strides))
        params = Params(
            q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink, metadata,
            o_partial, lse_partial, lse, softmax_scale * LOG2_E,
        )  # fmt: skip
        # Head tiles of one query token are neighbours in the grid, so that the second gather of a record hits L2.
        self.kernel(
            params, mma_qk, mma_qk_rs, mma_pv, mma_pv_rs, tma_q, tma_mQ, tma_o, tma_mO, layout_q, layout_k
        ).launch(
            grid=[self.head_tiles, q.shape[1], metadata.shape[0]],
            block=[3 * WARPGROUP, 1, 1],
            smem=Smem.size_in_bytes(),
            min_blocks_per_mp=1,  # without it ptxas drops setmaxnreg
            stream=stream,
        )
        Combine(self.problem).launch(metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse, stream)

    @cute.kernel
    def kernel(
        self,
        params: Params,
        mma_qk: cute.TiledMma,
        mma_qk_rs: cute.TiledMma,
        mma_pv: cute.TiledMma,
        mma_pv_rs: cute.TiledMma,
        tma_q: cute.CopyAtom,
        tma_mQ: cute.Tensor,
        tma_o: cute.CopyAtom,
        tma_mO: cute.Tensor,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        head_tile, s_idx, part_idx = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tid // WARPGROUP)
        storage = cutlass.memory.SmemAllocator().allocate(self.Smem)
        q_full, k_full, k_empty = storage.q_full.data_ptr(), storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        raw_full = storage.raw_full.data_ptr()
        sQ = storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner)  # [64, 448]
        sK = storage.sK.get_tensor(layout_k.outer, swizzle=layout_k.inner)  # [64, 576, stages]
        sV = cute.make_tensor(sK.iterator, cute.select(sK.layout, mode=[1, 0, 2]))  # [576, 64, stages], the same bytes
        sP = cute.local_tile(sK, (TILE_M, self.tile_n), (0, STAGE_COLUMNS // SW128_COLUMNS - 1, None))  # a stage's last tile
        factors = cute.make_layout((TILE_M, self.stages))
        sAlpha, sFactor = storage.alpha.get_tensor(factors), storage.factor.get_tensor(factors)

        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_o)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_full, 1)  # the arrive.expect_tx of the Q load
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(k_full + i, 4)  # the dequant warps
                    cute.arch.mbarrier_init(k_empty + i, 8)  # the math warps
                for i in cutlass.range_constexpr(4 * self.config.raw_slots):
                    cute.arch.mbarrier_init(raw_full + i, 1)  # the arrive.expect_tx of the group's copies
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if wg == 0:
            set_registers(self.config.registers[0])
            self.math0(
                params, part_idx, s_idx, head_tile, tid, mma_qk, mma_qk_rs, mma_pv_rs, tma_o, tma_mO,
                sQ, sK, sV, sP, sAlpha, sFactor, storage.valid.data_ptr(), q_full, k_full, k_empty,
            )  # fmt: skip
        elif wg == 1:
            set_registers(self.config.registers[1])
            self.math1(
                params, part_idx, s_idx, head_tile, tid % WARPGROUP, mma_pv, tma_q, tma_mQ, tma_o, tma_mO,
                sQ, sK, sV, sP, sAlpha, sFactor, q_full, k_empty,
            )  # fmt: skip
        else:
            set_registers(self.config.registers[2])
            self.dequant(
                params, part_idx, s_idx, tid % WARPGROUP, sK, storage.raw.data_ptr(), storage.valid.data_ptr(),
                raw_full, k_full, k_empty,
            )  # fmt: skip
        # Lets combine's CTAs be set up while the last ones here still run; it waits for the whole grid before it reads.
        cute.arch.griddepcontrol_launch_dependents()

    # ---- the plan: the only place that turns plan and lengths into block ranges ----

    @cute.jit
    def load_part(self, metadata: cute.Tensor, index: Int32) -> Part:
        """Record `index` of the plan. Idle partitions have begin_req > end_req: every loop is empty."""
        return Part(index, metadata[index, 0], metadata[index, 1])

    @cute.jit
    def work_range(self, params: Params, part: Part, req: Int32) -> Work:
        """The key blocks of `req` in this partition. A request without tokens still has one block, wholly masked."""
        length = params.indices.shape[2]
        if const_expr(params.topk_length is not None):
            length = cutlass.max(cutlass.min(params.topk_length[req], length), 0)
        num_main_blocks = (cutlass.max(length, 1) + self.tile_n - 1) // self.tile_n
        num_blocks, extra_length = num_main_blocks, Int32(0)
        if const_expr(params.extra_indices is not None):
            extra_length = params.extra_indices.shape[2]
            if const_expr(params.extra_topk_length is not None):
                extra_length = cutlass.max(cutlass.min(params.extra_topk_length[req], extra_length), 0)
            num_blocks += (extra_length + self.tile_n - 1) // self.tile_n
        record = params.metadata[part.index, None]
        begin_block, end_block, partial_slot = record[2], record[3], record[7]
        begin_is_split, end_is_split = record[5] != 0, record[6] != 0
        is_begin, is_end = req == part.begin_req, req == part.end_req
        first = cutlass.select_(is_begin, begin_block, Int32(0))
        last = cutlass.select_(is_end, end_block, num_blocks)
        is_split = (is_begin & begin_is_split) | (is_end & end_is_split)
        # A part that begins and ends in two different split requests writes two pieces, the second behind the first.
        slot = partial_slot + cutlass.select_((~is_begin) & begin_is_split, Int32(1), Int32(0))
        return Work(first, last, length, extra_length, num_main_blocks, is_split, slot)

    # ---- roles, in the order of the data ----

    @cute.jit
    def dequant(
        self, params: Params, part_idx: Int32, s_idx: Int32, t: Int32, sK: cute.Tensor, raw: cute.Pointer,
        valid: cute.Pointer, raw_full: cute.Pointer, k_full: cute.Pointer, k_empty: cute.Pointer,
    ):  # fmt: skip
        """Gathers the selected records, dequantises them and writes K; warp w owns tokens 16w..16w+15 of every block.

        Consumes indices, kv_cache, k_empty. Produces K, its valid mask, k_full. The copies run `raw_slots` groups
        of four tokens ahead of the conversion, across blocks and requests; the indices one block ahead of the copies.
        """
        part = self.load_part(params.metadata, part_idx)
        lane, w = t % 32, t // 32
        slots, pitch, fmt = self.config.raw_slots, self.raw_pitch, self.fmt
        groups = 4  # of 4 tokens, per warp and block
        # Conversion: lanes 4 rows x 2 column tiles x 4 pieces of 16 codes. Rope: 4 rows x 8 pieces of 8 values.
        row, odd_tile, piece = lane // 4 % 4, lane // 16, lane % 4
        rope_row, rope_piece = lane // 8, lane % 8
        raw_warp = Int32(raw.toint()) + w * (slots * 4 * pitch)
        full_warp = raw_full + w * slots
        k_base = Int32(sK.iterator.toint())
        tile_bytes, stage_bytes = self.tile_n * 128, self.tile_n * STAGE_COLUMNS * 2

        req, block, last = part.begin_req, Int32(0), Int32(0)
        if req <= part.end_req:
            work = self.work_range(params, part, req)
            block, last = work.first_block, work.last_block
        index, is_extra = self.load_index(params, part, s_idx, req, block, w, lane)
        src, mask, scales_low, scales_high = self.resolve(params, index, is_extra)
        for slot in cutlass.range_constexpr(slots):
            self.fill(raw_warp, full_warp, Int32(slot), Int32(slot), lane, src, mask)
        req, block, last = self.next_block(params, part, req, block, last)
        index, is_extra = self.load_index(params, part, s_idx, req, block, w, lane)

        n = Int32(0)  # blocks done by this CTA: stage and phase follow from it
        for r in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, r)
            for _ in cutlass.range(work.first_block, work.last_block, unroll=1):
                stage, phase = ring(n, self.stages)
                stage_base = k_base + stage * stage_bytes
                next_src, next_mask, next_low, next_high = self.resolve(params, index, is_extra)
                req, block, last = self.next_block(params, part, req, block, last)
                index, is_extra = self.load_index(params, part, s_idx, req, block, w, lane)
                for g in cutlass.range(groups, unroll=1):
                    slot, slot_phase = ring(n * groups + g, slots)
                    base = raw_warp + slot * (4 * pitch)
                    cute.arch.mbarrier_wait(full_warp + slot, slot_phase)
                    scales = self.load_scales(base + row * pitch, scales_low, scales_high, 4 * g + row, odd_tile)
                    codes = cute.make_rmem_tensor((4, 4), Uint32)  # 16 codes, of tile 2c + odd_tile
                    for c in cutlass.range_constexpr(4):
                        piece_addr = base + row * pitch + (2 * c + odd_tile) * SW128_COLUMNS + piece * 16
                        codes[None, c].store(load_smem_16b(piece_addr).load())
                    rope = load_smem_16b(base + rope_row * pitch + fmt.rope_offset + rope_piece * 16)
                    if g == 0:
                        cute.arch.mbarrier_wait(k_empty + stage, phase ^ 1)
                    # Skipped tokens become zero rows: P is 0 there, and 0 * NaN must not reach O.
                    if (mask >> (4 * g)) & 15 != 15:
                        if (mask >> (4 * g + row)) & 1 == 0:
                            scales.fill(0.0)
                            codes.fill(0)
                        if (mask >> (4 * g + rope_row)) & 1 == 0:
                            rope.fill(0)
                    # Row r of a tile is 128 bytes; its 16-byte chunk j lies at j ^ (r % 8).
                    swizzle = ((2 * piece) ^ (row + 4 * (g & 1))) * 16
                    row_base = stage_base + odd_tile * tile_bytes + (16 * w + 4 * g + row) * 128
                    for c in cutlass.range_constexpr(4):
                        bf16 = e4m3_to_bf16(codes[None, c], scales[c])
                        tile_base = row_base + 2 * c * tile_bytes
                        # MODEL1's eighth tile is rope: what was read as its codes is dropped.
                        if (2 * c + 1) * SW128_COLUMNS < fmt.d_nope or odd_tile == 0:
                            store_smem_16b(tile_base + swizzle, cute.make_tensor(bf16.iterator, 4))
                            store_smem_16b(tile_base + (swizzle ^ 16), cute.make_tensor(bf16.iterator + 4, 4))
                    rope_swizzle = (rope_piece ^ (rope_row + 4 * (g & 1))) * 16
                    rope_tile = stage_base + (self.num_tiles - 1) * tile_bytes
                    store_smem_16b(rope_tile + (16 * w + 4 * g + rope_row) * 128 + rope_swizzle, rope)
                    # The refill comes behind the stores: they need what every lane read from the slot, so those reads are
                    # over. Issued right behind the reads it overtook some, queued behind WGMMA's (seen on an H200).
                    cute.arch.sync_warp()
                    ahead = g + slots
                    if ahead < groups:
                        self.fill(raw_warp, full_warp, slot, ahead, lane, src, mask)
                    else:
                        self.fill(raw_warp, full_warp, slot, ahead - groups, lane, next_src, next_mask)
                if lane == 0:
                    cute.make_tensor(valid + stage * 4, 4)[w] = Uint16(mask)
                cute.arch.fence_proxy("async.shared", space="cta")  # K's generic stores become visible to WGMMA
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(k_full + stage)
                src, mask, scales_low, scales_high = next_src, next_mask, next_low, next_high
                n += 1

    @cute.jit
    def next_block(self, params: Params, part: Part, req: Int32, block: Int32, last: Int32):
        """The block after (req, block) in this partition; req > end_req past its end."""
        block += 1
        if block >= last:
            req += 1
            block = Int32(0)
            if req <= part.end_req:
                last = self.work_range(params, part, req).last_block
        return req, block, last

    @cute.jit
    def load_index(self, params: Params, part: Part, s_idx: Int32, req: Int32, block: Int32, w: Int32, lane: Int32):
        """Lane l < 16 gets the index of token 16w + l of the block, -1 past the request's tokens or the partition; and
        whether the block is one of the extra cache."""
        index, is_extra = Int32(-1), Boolean(False)
        if req <= part.end_req:
            work = self.work_range(params, part, req)
            token = block * self.tile_n + 16 * w + lane
            if const_expr(params.extra_indices is not None):
                is_extra = block >= work.num_main_blocks
                if is_extra:
                    token -= work.num_main_blocks * self.tile_n
                    if (lane < 16) & (token < work.extra_length):
                        index = params.extra_indices[Int64(req), s_idx, token]
                elif (lane < 16) & (token < work.length):
                    index = params.indices[Int64(req), s_idx, token]
            else:
                if (lane < 16) & (token < work.length):
                    index = params.indices[Int64(req), s_idx, token]
        return index, is_extra

    @cute.jit
    def resolve(self, params: Params, index: Int32, is_extra: Boolean):
        """For each lane's token the record's global address; the warp's mask of tokens to attend (bit l: lane l), an index
        below 0 or past the cache is none; the token's scales when they lie outside of the record (MODEL1: 8 x e8m0)."""
        page_block_size, num_blocks = Uint32(params.kv_cache.shape[1]), Uint32(params.kv_cache.shape[0])
        base, page_stride = params.kv_cache.iterator.toint(), Int64(params.kv_cache.stride[0])
        if const_expr(params.extra_indices is not None):
            extra = params.extra_kv_cache
            if is_extra:
                page_block_size, num_blocks = Uint32(extra.shape[1]), Uint32(extra.shape[0])
                base, page_stride = extra.iterator.toint(), Int64(extra.stride[0])
        page = Uint32(index) // page_block_size
        offset = Uint32(index) - page * page_block_size
        is_valid = (index >= 0) & (page < num_blocks)
        start = base + Int64(page) * page_stride
        low, high = Uint32(0), Uint32(0)
        if const_expr(self.fmt.scale_bytes == 1):  # noqa: SIM102  one is decided at compile time
            if is_valid:  # a plane of 8 bytes a token behind the page's rows
                address = start + Int64(page_block_size) * self.fmt.row_bytes + Int64(offset) * 8
                packed = cute.make_rmem_tensor(2, Uint32)
                scales = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(scales, cute.make_layout(2)), packed)
                low, high = packed[0], packed[1]
        mask = Uint32(cute.arch.vote_ballot_sync(is_valid))
        return start + Int64(offset) * self.fmt.row_bytes, mask, low, high

    @cute.jit
    def load_scales(self, record: Int32, low: Uint32, high: Uint32, token: Int32, odd_tile: Int32) -> cute.Tensor:
        """fp32 [4]: the scales of column tiles odd_tile, 2 + odd_tile, ... of the warp's token `token`."""
        if const_expr(self.fmt.scale_bytes == 4):  # one for two tiles, in the record
            scales = load_smem_16b(record + self.fmt.scale_offset, Float32)
        else:  # one byte a tile, in the registers of the token's lane
            scales = cute.make_rmem_tensor(4, Float32)
            for half in cutlass.range_constexpr(2):
                word = cute.arch.shuffle_sync((low, high)[half], token) >> (8 * odd_tile)
                scales[2 * half] = e8m0_to_fp32(word & 255)
                scales[2 * half + 1] = e8m0_to_fp32((word >> 16) & 255)
        return scales

    @cute.jit
    def fill(
        self, raw_warp: Int32, full_warp: cute.Pointer, slot: Int32, group: Int32, lane: Int32,
        src: Int64, mask: Uint32,
    ):  # fmt: skip
        """Starts the copies of one group of four tokens into a ring slot; skipped tokens copy nothing."""
        if lane == 0:
            num_bytes = Int32(cute.arch.popc((mask >> (4 * group)) & 15)) * self.fmt.row_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(full_warp + slot, num_bytes)
        if (lane // 4 == group) & ((mask >> lane) & 1 == 1):
            dst = raw_warp + (slot * 4 + lane % 4) * self.raw_pitch
            bulk_copy_to_smem(dst, src, self.fmt.row_bytes, Int32((full_warp + slot).toint()))

    @cute.jit
    def math0(
        self, params: Params, part_idx: Int32, s_idx: Int32, head_tile: Int32, t: Int32,
        mma_qk: cute.TiledMma, mma_qk_rs: cute.TiledMma, mma_pv: cute.TiledMma, tma_o: cute.CopyAtom,
        tma_mO: cute.Tensor,
        sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, sP: cute.Tensor, sAlpha: cute.Tensor, sFactor: cute.Tensor,
        valid: cute.Pointer, q_full: cute.Pointer, k_full: cute.Pointer, k_empty: cute.Pointer,
    ):  # fmt: skip
        """S = Q K^T, online softmax, the left half of O, lse.

        Consumes q_full, k_full. Produces P_READY (P, alpha), FACTOR_READY, O[:, :128], lse; releases k_empty.
        """
        thr_qk, thr_pv = mma_qk.get_slice(t), mma_pv.get_slice(t)
        rQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))  # (MMA, 1, 4 * q_smem_tiles): descriptors
        rK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))  # (MMA, 1, 36, stages); MODEL1 uses 32
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(self.columns_of(sV, 0, mode=0)))  # (MMA, 1, 4, stages)
        accS = cute.make_rmem_tensor(thr_qk.partition_shape_C((TILE_M, self.tile_n)), Float32)  # ((2,2,8),1,1)
        accO = cute.make_rmem_tensor(thr_pv.partition_shape_C((TILE_M, self.columns[0])), Float32)  # ((2,2,16),1,1)
        # P as the register operand of PV: the accumulator's order is the operand's.
        rP = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, self.tile_n // 16)), BFloat16)
        rP_as_acc = cute.make_tensor(rP.iterator, accS.layout)
        rQ_reg = cute.make_rmem_tensor(
            cute.make_layout(((2, 2, 2), 1, 4 * max(self.config.q_tiles_in_registers, 1))), BFloat16
        )  # the last Q tiles, as the register operand of QK
        copy_p = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16), mma_qk
        ).get_slice(t)
        row = fragment_row(t)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        alpha = cute.make_rmem_tensor(2, Float32)

        part = self.load_part(params.metadata, part_idx)
        n, q_phase = Int32(0), Int32(0)
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            self.load_q_registers(params, req, s_idx, head_tile, t, rQ_reg)
            row_max.fill(-1e30)  # finite: -inf - -inf is NaN
            row_sum.fill(0.0)
            accO.fill(0.0)
            cute.arch.mbarrier_wait(q_full, q_phase)
            q_phase ^= 1
            for block in cutlass.range(work.first_block, work.last_block, unroll=1):
                stage, phase = ring(n, self.stages)
                cute.arch.mbarrier_wait(k_full + stage, phase)
                warpgroup.fence()
                mma_qk.set(warpgroup.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(4 * self.q_smem_tiles):
                    cute.gemm(mma_qk, accS, rQ[None, None, k], rK[None, None, k, stage], accS)
                    mma_qk.set(warpgroup.Field.ACCUMULATE, True)
                mma_qk_rs.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(4 * self.config.q_tiles_in_registers):
                    cute.gemm(
                        mma_qk_rs, accS, rQ_reg[None, None, k], rK[None, None, 4 * self.q_smem_tiles + k, stage], accS
                    )
                warpgroup.commit_group()
                warpgroup.wait_group(0)

                self.softmax(params.scale_log2, valid, stage, t, accS, row_max, row_sum, alpha)
                rP_as_acc.store(accS.load().to(BFloat16))
                if t % 4 == 0:
                    sAlpha[row, stage] = alpha[0]
                    sAlpha[row + 8, stage] = alpha[1]
                # All four warps have read the rope tile through their WGMMAs before P overwrites it.
                cute.arch.barrier(barrier_id=NamedBarriers.MATH0, number_of_threads=WARPGROUP)
                cute.copy(copy_p, copy_p.retile(rP_as_acc), copy_p.partition_D(sP[None, None, stage]))
                cute.arch.fence_proxy("async.shared", space="cta")  # P's generic stores become visible to math1's WGMMA
                cute.arch.barrier_arrive(barrier_id=NamedBarriers.P_READY + stage, number_of_threads=2 * WARPGROUP)

                self.rescale(accO, alpha)
                warpgroup.fence()
                mma_pv.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(self.tile_n // 16):
                    cute.gemm(mma_pv, accO, rP[None, None, k], rV[None, None, k, stage], accO)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if block + 1 < work.last_block:  # the last stage of a request is released behind the epilogue
                    self.release(k_empty + stage)
                n += 1

            stage, _ = ring(n - 1, self.stages)
            work = self.work_range(params, part, req)  # again, rather than held in registers through the loop
            factor = self.finish_rows(params, work, req, s_idx, head_tile, row, t, row_max, row_sum)
            if t % 4 == 0:
                sFactor[row, stage] = factor[0]
                sFactor[row + 8, stage] = factor[1]
            cute.arch.barrier_arrive(barrier_id=NamedBarriers.FACTOR_READY + stage, number_of_threads=2 * WARPGROUP)
            self.store_o(params, work, req, s_idx, head_tile, t, 0, stage, mma_pv, tma_o, tma_mO, sK, accO, factor)
            self.release(k_empty + stage)

    @cute.jit
    def math1(
        self, params: Params, part_idx: Int32, s_idx: Int32, head_tile: Int32, t: Int32, mma_pv: cute.TiledMma,
        tma_q: cute.CopyAtom, tma_mQ: cute.Tensor, tma_o: cute.CopyAtom, tma_mO: cute.Tensor,
        sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, sP: cute.Tensor, sAlpha: cute.Tensor, sFactor: cute.Tensor,
        q_full: cute.Pointer, k_empty: cute.Pointer,
    ):  # fmt: skip
        """The right half of O; loads Q, because it is the role that knows when math0 is done with the old one.

        Consumes P_READY (behind which K is visible too), FACTOR_READY. Produces Q, O[:, 128:]; releases k_empty.
        """
        thr_pv = mma_pv.get_slice(t)
        rP = mma_pv.make_fragment_A(thr_pv.partition_A(sP))  # (MMA, 1, 4, stages)
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(self.columns_of(sV, 1, mode=0)))  # (MMA, 2, 4, stages)
        accO = cute.make_rmem_tensor(thr_pv.partition_shape_C((TILE_M, self.columns[1])), Float32)  # ((2,2,24),1,2)
        alpha, factor = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        row = fragment_row(t)

        part = self.load_part(params.metadata, part_idx)
        if part.begin_req <= part.end_req:
            self.load_q(part.begin_req, s_idx, head_tile, t, tma_q, tma_mQ, sQ, q_full)
        n = Int32(0)
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            accO.fill(0.0)
            for block in cutlass.range(work.first_block, work.last_block, unroll=1):
                stage, _ = ring(n, self.stages)
                cute.arch.barrier(barrier_id=NamedBarriers.P_READY + stage, number_of_threads=2 * WARPGROUP)
                if (block + 1 == work.last_block) & (req < part.end_req):  # math0's last QK of this request is done
                    self.load_q(req + 1, s_idx, head_tile, t, tma_q, tma_mQ, sQ, q_full)
                alpha[0], alpha[1] = sAlpha[row, stage], sAlpha[row + 8, stage]
                self.rescale(accO, alpha)
                warpgroup.fence()
                mma_pv.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(self.tile_n // 16):
                    cute.gemm(mma_pv, accO, rP[None, None, k, stage], rV[None, None, k, stage], accO)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if block + 1 < work.last_block:
                    self.release(k_empty + stage)
                n += 1

            stage, _ = ring(n - 1, self.stages)
            cute.arch.barrier(barrier_id=NamedBarriers.FACTOR_READY + stage, number_of_threads=2 * WARPGROUP)
            factor[0], factor[1] = sFactor[row, stage], sFactor[row + 8, stage]
            work = self.work_range(params, part, req)
            self.store_o(params, work, req, s_idx, head_tile, t, 1, stage, mma_pv, tma_o, tma_mO, sK, accO, factor)
            self.release(k_empty + stage)

    # ---- steps of the roles ----

    def columns_of(self, tensor: cute.Tensor, math: int, mode: int) -> cute.Tensor:
        """The part of V (mode 0) or of O's staging (mode 1) whose columns belong to warpgroup `math`."""
        origin = [0] * cute.rank(tensor)
        origin[mode] = self.first_column[math]
        tiler = (self.columns[math], self.tile_n) if mode == 0 else (TILE_M, self.columns[math])
        coord = (0, 0) if cute.rank(tensor) == 2 else (0, 0, None)
        return cute.local_tile(cute.domain_offset(tuple(origin), tensor), tiler, coord)

    @cute.jit
    def load_q(
        self, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, tma_q: cute.CopyAtom, tma_mQ: cute.Tensor,
        sQ: cute.Tensor, q_full: cute.Pointer,
    ):  # fmt: skip
        """TMA load of Q's shared-memory tiles [64, 448] by the first warp of the calling warpgroup."""
        if cute.arch.make_warp_uniform(t // 32) == 0:
            gQ = cute.local_tile(tma_mQ[None, None, s_idx, req], cute.product_each(sQ.shape), (head_tile, 0))
            tQsQ, tQgQ = cpasync.tma_partition(
                tma_q, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2)
            )
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, TILE_M * self.q_smem_tiles * SW128_COLUMNS * 2)
            cute.copy(tma_q, tQgQ, tQsQ, tma_bar_ptr=q_full)

    @cute.jit
    def load_q_registers(
        self, params: Params, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, rQ_reg: cute.Tensor
    ):
        """The last Q tiles from global memory straight into operand fragments, 4 bytes (two columns) a load.

        Rows past h_q repeat the last head: they are computed and never stored.
        """
        for half in cutlass.range_constexpr(2):
            head = cutlass.min(head_tile * TILE_M + fragment_row(t) + 8 * half, self.h_q - 1)
            gQ = cute.zipped_divide(params.q[Int64(req), s_idx, head, None], (2,))  # ((2), 288)
            for k in cutlass.range_constexpr(4 * self.config.q_tiles_in_registers):
                for side in cutlass.range_constexpr(2):  # columns 2j, 2j+1 and 2j+8, 2j+9 of the 16, j = t % 4
                    pair = (self.q_smem_tiles * SW128_COLUMNS + 16 * k + 8 * side) // 2 + t % 4
                    cute.autovec_copy(gQ[None, pair], rQ_reg[(None, half, side), 0, k])

    @cute.jit
    def softmax(
        self, scale_log2: Float32, valid: cute.Pointer, stage: Int32, t: Int32, accS: cute.Tensor,
        row_max: cute.Tensor, row_sum: cute.Tensor, alpha: cute.Tensor,
    ):  # fmt: skip
        """accS: raw scores -> unnormalised probabilities. Updates row_max (scaled, base 2), row_sum (own columns)."""
        words = cute.make_tensor(cute.recast_ptr(valid + stage * 4, dtype=Uint32), 2)
        low, high = words[0], words[1]
        if (low & high) != Uint32(0xFFFFFFFF):
            # By select and after the product: adding -inf to a NaN would stay NaN.
            # Element i of a thread is in column 8 (i / 4) + 2 (t % 4) + i % 2.
            low, high = low >> (2 * (t % 4)), high >> (2 * (t % 4))
            for i in cutlass.range_constexpr(cute.size(accS)):
                word, bit = (low, high)[i // 16], 8 * (i // 4 % 4) + i % 2
                accS[i] = cutlass.select_((word >> bit) & 1 == 1, accS[i], Float32(-INF))
        for half in cutlass.range_constexpr(2):
            block_max = accS[2 * half]
            for i in cutlass.range_constexpr(cute.size(accS)):
                if const_expr(i // 2 % 2 == half):
                    block_max = cute.arch.fmax(block_max, accS[i])
            new_max = cute.arch.fmax(row_max[half], quad_max(block_max) * scale_log2)
            alpha[half] = cute.math.exp2(row_max[half] - new_max, fastmath=True)
            row_max[half] = new_max
            block_sum = Float32(0)
            for i in cutlass.range_constexpr(cute.size(accS)):
                if const_expr(i // 2 % 2 == half):
                    accS[i] = cute.math.exp2(accS[i] * scale_log2 - new_max, fastmath=True)
                    block_sum += accS[i]
            row_sum[half] = row_sum[half] * alpha[half] + block_sum

    @cute.jit
    def rescale(self, accO: cute.Tensor, alpha: cute.Tensor):
        """O *= alpha by row; nothing to do for a warp whose maxima stood still."""
        if cute.arch.vote_any_sync((alpha[0] != 1.0) | (alpha[1] != 1.0)):
            for i in cutlass.range_constexpr(cute.size(accO)):
                accO[i] = accO[i] * alpha[i // 2 % 2]

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """One arrival a warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def finish_rows(
        self, params: Params, work: Work, req: Int32, s_idx: Int32, head_tile: Int32, row: Int32, t: Int32,
        row_max: cute.Tensor, row_sum: cute.Tensor,
    ):  # fmt: skip
        """Writes lse (natural log, or base 2 for a piece) and returns the factors [2] that turn accO into the output.

        Nothing attended: factor 0, lse +inf (a piece: -inf). The sink counts once: here for a whole request, in combine
        for a split one.
        """
        factor = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(2):
            head = head_tile * TILE_M + row + 8 * half
            total = quad_sum(row_sum[half])
            lse_log2 = cute.math.log2(total, fastmath=True) + row_max[half]
            denominator = total
            if const_expr(params.attn_sink is not None):
                sink_log2 = params.attn_sink[cutlass.min(head, self.h_q - 1)] * LOG2_E
                sink = cute.math.exp2(sink_log2 - row_max[half], fastmath=True)
                denominator += cutlass.select_(work.is_split, Float32(0), sink)
            is_empty = total == 0.0
            factor[half] = cutlass.select_(is_empty, Float32(0), cute.arch.rcp_approx(denominator))
            if (t % 4 == 0) & (head < self.h_q):
                if work.is_split:
                    piece_lse = cutlass.select_(is_empty, Float32(-INF), lse_log2)
                    params.lse_partial[Int64(work.slot), s_idx, head] = piece_lse
                else:
                    params.lse[Int64(req), s_idx, head] = cutlass.select_(is_empty, Float32(INF), lse_log2 * LN_2)
        return factor

    @cute.jit
    def store_o(
        self, params: Params, work: Work, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, math: cutlass.Constexpr,
        stage: Int32, mma_pv: cute.TiledMma, tma_o: cute.CopyAtom, tma_mO: cute.Tensor, sK: cute.Tensor,
        accO: cute.Tensor, factor: cute.Tensor,
    ):  # fmt: skip
        """Warpgroup `math`'s columns of O: bf16 through the request's last K stage and TMA, or fp32 from registers.

        The staging tiles are the V tiles that only this warpgroup has read.
        """
        for i in cutlass.range_constexpr(cute.size(accO)):
            accO[i] = accO[i] * factor[i // 2 % 2]
        if work.is_split:
            for half in cutlass.range_constexpr(2):
                head = head_tile * TILE_M + fragment_row(t) + 8 * half
                if head < self.h_q:
                    gO = cute.zipped_divide(params.o_partial[Int64(work.slot), s_idx, head, None], (2,))  # ((2), 256)
                    for j in cutlass.range_constexpr(self.columns[math] // 8):  # a quad fills a 32-byte sector
                        per_mma = self.pv_n[math] // 8
                        pair = accO[(None, half, j % per_mma), 0, j // per_mma]
                        cute.autovec_copy(pair, gO[None, self.first_column[math] // 2 + 4 * j + t % 4])
        else:
            barrier = NamedBarriers.MATH0 + math
            rO = cute.make_rmem_tensor(accO.layout, BFloat16)
            rO.store(accO.load().to(BFloat16))
            sO = self.columns_of(sK[None, None, stage], math, mode=1)  # [64, columns]
            copy_o = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16), mma_pv
            ).get_slice(t)
            # All four warps have finished their WGMMAs on V before O overwrites it.
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
            cute.copy(copy_o, copy_o.retile(rO), copy_o.partition_D(sO))
            cute.arch.fence_proxy("async.shared", space="cta")  # O's generic stores become visible to the TMA store
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
            if cute.arch.make_warp_uniform(t // 32) == 0:
                for i in cutlass.range_constexpr(self.columns[math] // SW128_COLUMNS):
                    tile = self.first_column[math] // SW128_COLUMNS + i
                    sO_tile = cute.local_tile(sO, (TILE_M, SW128_COLUMNS), (0, i))
                    gO = cute.local_tile(tma_mO[None, None, s_idx, req], (TILE_M, SW128_COLUMNS), (head_tile, tile))
                    tOsO, tOgO = cpasync.tma_partition(
                        tma_o, 0, cute.make_layout(1), cute.group_modes(sO_tile, 0, 2), cute.group_modes(gO, 0, 2)
                    )
                    cute.copy(tma_o, tOsO, tOgO)
                cute.arch.cp_async_bulk_commit_group()
                # The stage is released, and the CTA may end, only when the store has read it.
                cute.arch.cp_async_bulk_wait_group(0, read=True)


SparseDecode.kernel.set_name_prefix("mla_sparse_decode_sm90", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: Config, arch: str):
    """Compiles split kernel and combine into one launchable function; fake tensors in, nothing is launched.

    Returns a function of (q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink,
    softmax_scale, metadata, num_splits, scratch, out, lse): shapes as in `Params`, scratch fp32
    [2 * num_parts * s_q * h_q * 513] or empty for one part, out [b, s_q, h_q, 512] bf16.
    """
    config.check(problem)
    sym, sym64 = cute.sym_int, cute.sym_int64
    b, s_q, topk, parts = sym(), sym(), sym(), sym()

    def rows(dtype, shape, divisibility, align):  # last dim contiguous, the other strides free
        strides = tuple(sym64(divisibility=divisibility) for _ in shape[:-1]) + (1,)
        return jit.fake_tensor(dtype, shape, stride=strides, align=align)

    fmt = FORMATS[problem.kv_format]
    return jit.build(
        SparseDecode(problem, config),
        rows(BFloat16, (b, s_q, problem.h_q, fmt.d_qk), 8, 16),
        rows(Uint8, (sym(), sym(), 1, fmt.bytes_per_token), 1, 16),
        rows(Int32, (b, s_q, topk), 1, 4),
        jit.fake_tensor(Int32, (b,)) if problem.has_topk_length else None,
        rows(Uint8, (sym(), sym(), 1, fmt.bytes_per_token), 1, 16) if problem.has_extra else None,
        rows(Int32, (b, s_q, sym()), 1, 4) if problem.has_extra else None,
        jit.fake_tensor(Int32, (b,)) if problem.has_extra_topk_length else None,
        jit.fake_tensor(Float32, (problem.h_q,)) if problem.has_attn_sink else None,
        Float32(0),
        jit.fake_tensor(Int32, (parts, 8), align=16),
        jit.fake_tensor(Int32, (sym(),)),
        jit.fake_tensor(Float32, (sym(),), align=16),
        rows(BFloat16, (b, s_q, problem.h_q, fmt.d_v), 8, 16),
        rows(Float32, (b, s_q, problem.h_q), 1, 4),
        jit.fake_stream(),
        arch=arch,
        name="sparse_decode",
    )
