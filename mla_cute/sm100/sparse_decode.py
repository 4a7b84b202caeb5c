"""Sparse MLA decode on an FP8 KV cache, V3.2 or MODEL1, for Blackwell. Figures are V3.2's, for a block of 64 keys.

Compiled for sm_100a and sm_103a and executed by the emulator; not yet run on hardware: no cycle below is measured.

| role    | warps | registers | consumes                      | produces                                     |
|---------|-------|-----------|-------------------------------|----------------------------------------------|
| index   | 7     | 104       | indices                       | coords, valid, some scales (index_full)      |
| load    | 5, 6  | 104       | coords, valid                 | raw records (raw_full), rope and Q (rope_full) |
| dequant | 8-11  | 192       | raw records, scales           | K, which is V (k_full)                       |
| mma     | 4     | 104       | Q, K, rope, P                 | S (s_full), O (o_full), free slots (k_empty) |
| softmax | 0-3   | 208       | S, valid, O                   | P (p_full), out, lse                         |

 indices -> [index] rows, 4 blocks ahead -> [load] gather4: raw e4m3 to a ring, rope straight into K; Q once a request
   -> [dequant] e4m3 * scale in bf16 -> K -> [mma] S = Q K^T in tensor memory -> [softmax] P -> [mma] O += P V -> out

A CTA owns one partition of the plan (a run of key blocks, perhaps of several requests) for one query token and one tile of
64 heads. Load and mma are one thread each. One block (t: key, h: head):
 1. row[t] = page * rows a page + offset, -1 for what does not count: TMA then writes zeros                         [index]
 2. K[t] = codes * scale, rounded once to bf16: q * high + round(q * low) with scale = high + low, two bf16         [dequant]
 3. S[h, t] = Q[h] K[t], of two halves of the dims apart (below), before O takes in the block before this one       [mma]
 4. z = S * softmax_scale * log2(e), masked; m[h] stays unless z of some head of the warp exceeds it by 8: then it
    becomes the maximum, and O *= exp2(m - m') in tensor memory                                                     [softmax]
 5. P = exp2(z - m) in bf16 -> shared memory; l = l * exp2(m - m') + sum P, of P before it is rounded               [softmax]
 6. O += P V, V being K's first 512 columns                                                                         [mma]
After a request's last block lse = m ln 2 + ln(l), and O / (l + sink) goes through shared memory to out by TMA; of a split
request O / l goes to scratch, for combine (2 pieces or more).

Up to 64 heads, one CTA. M = 64 fills half of tensor memory's 128 lanes, and half of the tensor core: 4,096 FLOP a cycle.
`tcgen05.mma.ws` with M = 64 has two groups of B's rows side by side in lanes, each with a copy of A of its own, at the full
8,192. So QK multiplies two halves of Q's dims (lanes 0-63: even tiles, 64-127: odd ones) with a tile of K each, as FlashMLA
does: Q takes 144 columns, and two lanes share a head, whose halves they add over shared memory. The same rate without that sum
would need Q twice, 288 columns, which do not fit beside O's 256. A further form, two plain M = 64 products in lanes 0-15 and
16-31 of each warp, would add the halves by shuffles: half rate, which shared memory would hide; to be tried on hardware. PV
has different columns of V in the two halves of lanes, and nothing to add.

More heads: a pair of CTAs, each with 64 heads of Q and of O and half of the dims of K: 256 columns of every record, half of
rope (of MODEL1 the second CTA has all of it). One MMA of cta_group::2 with M = 128 multiplies both CTAs' heads with both
halves, in the same two groups of lanes: each key is gathered, converted and read once for 128 heads. The first CTA's mma warp
issues; what it waits for arrives from both (`release_mma`), what it commits goes to both. Config.ctas = 1 would make of 128
heads two tiles, each with all of the work on the keys: 2,650 cycles instead of 1,560.

Budget of a block in SM cycles, B200: 148 SMs, 8,192 FLOP a cycle (2,250 TFLOPS at 1.86 GHz), 128 B a cycle for all of shared
memory, TMA's writes and the tensor core's reads included; 8 TB/s are 29 B a cycle for an SM. Instructions are PTX's, of one
warp, counted by the emulator from 4 to 12 blocks; a scheduler has one warp of softmax, one of dequant and one of the others.

| what | one CTA, 64 heads | cycles | each of a pair, 64 heads | cycles |
|---|---|---|---|---|
| tensor core | QK 18 x 64 x 128 x 16, PV 8 x 64 x 256 x 16 multiply-adds / 4,096 | 1,088 | the same | 1,088 |
| gather | 656 B x 64 / 29, unless L2 has it | 1,448 | half | 724 |
| shared memory: TMA, raw read | 42 K + 33 K | | 22 K + 17 K | |
| K written; read by QK, PV | 64 K + 72 K + 64 K | | 32 K + 36 K + 32 K | |
| P; halves of S | 24 K + 32 K; sum / 128 | 2,650 | 24 K + 32 K | 1,560 |
| tensor memory | S, 128 x 64 x 4 B / 512; O twice 4 times that when rescaled | 64 | the same | 64 |
| softmax | 408 instructions; exp2 4,224 / 16 | 408; 264 | the same | 408; 264 |
| dequant | 619; conversions 16 K / 64, bf16x2 products 32 K / 128 | 619; 256 | half; 357 instructions | 357; 128 |
| others | raw 172, rope 190, index 69, mma 152 | 190 | 172, 160, 91, 160 | 172 |

Shared memory bounds both: 8.9 MFLOP in 2,650 cycles are 41 % of the peak, 925 TFLOPS, in 1,560 70 %, 1,570 TFLOPS (MODEL1:
2,450 and 1,490 cycles, 940 and 1,550). FlashMLA reports 350 (2026-04) and 1,024 (2026-09, records of 528 B), flash_attn/cute's
sparse kernel about 900 to 950.

Shared memory (bytes): K, 2 slots of 73,728 (a pair: 4 of 36,864) = 147,456, where Q of the next request and rope arrive too;
raw records 3 x 32 x 544 = 52,224 (5 x 32 x 288 = 46,080); halves of S, also the way out of O, 16,384; P 8,192; rows, masks,
scales, barriers 2.4 K (4.5 K). Tensor memory (columns): O 256, Q 144, S 64 of 512. Sources of the ideas: FlashMLA (plan,
split and combine, gather4, halves of dims in one CTA and in two, lazy rescaling). Ours: exact scales at three instructions
for two values, Q as a tenant of K's ring, pieces in combine's order straight from tensor memory, any page stride.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.experimental.cuda as xcuda
import cutlass.memory
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute

from .. import jit
from ..combine import GROUP, SCALES, Combine, partials
from ..decode_kernel import (
    LN_2,
    LOG2_E,
    Part,
    PlanReader,
    Work,
    check_config,
    fake_arguments,
    global_tensor,
    load_smem_16b,
    max_abs,
    set_registers,
    smem_tensor,
    store_smem_16b,
)
from ..kv_cache import FORMATS, KVFormat
from ..validate import Problem, check_int
from .helpers import (
    SWIZZLE_64B,
    SWIZZLE_128B,
    advance,
    arrive_leader,
    bf16_pair,
    commit,
    copy_to_tmem,
    e4m3_to_bf16,
    expect_leader,
    fma_bf16x2,
    fp16_pair,
    gather4,
    in_leader,
    instruction_descriptor,
    mma,
    mul_bf16x2,
    opaque,
    prefetch_map,
    smem_descriptor,
    tile_load,
    tile_store,
    tmem_alloc,
    tmem_fence_after,
    tmem_fence_before,
    tmem_free,
    tmem_load,
    tmem_store,
    tmem_wait_load,
    tmem_wait_store,
    wait_cluster,
)

INF = float("inf")
TILE_M = 64  # heads of a CTA: the M of an MMA
TILE_N = 64  # keys of a block
SW128_COLUMNS = 64  # bf16 columns of one 128-byte swizzle row: the width of a K, Q or O "tile"
TILE_BYTES = TILE_M * SW128_COLUMNS * 2  # of 64 heads or keys
WARPGROUP = 128
RAW_TOKENS = 32  # records of a slot of the raw ring
SMEM_LIMIT = 232_448  # bytes a CTA may ask for on compute capability 10.0
MAX_ROWS = 2**31 - 1  # of a tensor map: gather4's coordinates are int32
# Columns of tensor memory: O at 0, two of its four quarters of d_v side by side in lanes; then Q, then S.
TMEM_Q = 256
TMEM_S = 400


@dataclass(frozen=True)
class Config:
    """Every number that may be tuned. Sizes derived from them are properties; `check` raises with the arithmetic."""

    tile_n: int = TILE_N  # keys of a block; the plan counts in it
    fixed_overhead_blocks: int | None = None  # what the plan charges for beginning a request; None: `schedule.overhead`
    registers: tuple[int, int, int] = (208, 104, 192)  # softmax, the four single warps, dequant; 504 are there
    ctas: int = 1  # that share a query token's keys: 2 for two tiles of heads, each with half of the dims
    k_slots: int = 2  # blocks of K
    raw_slots: int = 3  # of RAW_TOKENS raw records
    index_slots: int = 4  # blocks whose rows are looked up ahead
    rescale_bits: int = 8  # O is rescaled when a row's maximum has grown by more than a factor of 2 to this

    def num_parts(self, problem: Problem, s_q: int, num_sms: int) -> int:
        """Partitions of the plan: one CTA per SM over head tiles and query tokens, at least one."""
        return max(num_sms // (s_q * problem.head_tiles), 1)

    def raw_pitch(self, fmt: KVFormat) -> int:
        """Bytes of a raw record in shared memory: e4m3 and the 32 bytes behind them (of a whole V32 record they begin with the
        scales).

        An odd multiple of 32: 16-byte pieces of two columns in four rows then fall into different banks.
        """
        return (fmt.d_nope if self.ctas == 1 else fmt.d_v // 2) + 32

    def scale_bytes(self, fmt: KVFormat) -> int:
        """Bytes of scales that the index warp looks up for a token, because they are not in what is gathered; or 0."""
        return 8 if fmt.scale_plane or self.ctas == 2 else 0

    def k_bytes(self, fmt: KVFormat) -> int:
        """Bytes of a slot of K."""
        return TILE_N * fmt.d_qk * 2 // self.ctas

    def q_parts(self, fmt: KVFormat) -> list[list[int]]:
        """Pieces of Q (two column tiles, or V32's rope) by the slot of K in which they arrive."""
        pieces = list(range(4 + (fmt.d_qk > fmt.d_v)))
        return [pieces] if self.ctas == 1 else [pieces[i : i + 2] for i in range(0, len(pieces), 2)]

    def smem_bytes(self, fmt: KVFormat) -> int:
        k = self.k_slots * self.k_bytes(fmt)
        p = TILE_M * TILE_N * 2
        exchange = TILE_M * TILE_N * 4
        raw = self.raw_slots * RAW_TOKENS * self.raw_pitch(fmt)
        index = self.index_slots * (TILE_N * (4 + self.scale_bytes(fmt)) + 8 + 2 * 8)
        small = 2 * 4 * WARPGROUP + 20 * self.raw_slots + 32 * self.k_slots + 8 * 8 + 48
        return k + p + exchange + raw + index + small + 1024  # an alignment

    def check(self, problem: Problem) -> None:
        """Raises ValueError naming the field and the arithmetic when this Config cannot run `problem`."""
        check_config("sm100.sparse_decode", self, problem, TILE_N)
        for name in ("ctas", "k_slots", "raw_slots", "index_slots", "rescale_bits"):
            check_int(f"config: {name}", getattr(self, name))
        if not isinstance(self.registers, tuple) or [type(r) for r in self.registers] != [int] * 3:
            raise ValueError(f"config: registers must be a tuple of 3 ints, got {self.registers!r}")
        if any(r % 8 or not 24 <= r <= 256 for r in self.registers) or sum(self.registers) > 504:
            raise ValueError(
                f"config: registers must be multiples of 8 in 24..256, together at most 504, got {self.registers}"
            )
        if self.ctas not in (1, 2) or self.ctas > problem.head_tiles:
            raise ValueError(f"config: ctas must be 1, or 2 for more than {TILE_M} heads, got {self.ctas} for {problem.h_q}")
        for name in ("raw_slots", "index_slots"):
            if getattr(self, name) < 2:
                raise ValueError(f"config: {name} must be at least 2, got {getattr(self, name)}")
        q_slots = len(self.q_parts(FORMATS[problem.kv_format]))
        if self.k_slots <= q_slots:  # or dequant, which does not fill those, would lose count of a slot's phases
            raise ValueError(f"config: k_slots must be at least {q_slots + 1}, {q_slots} of them for Q, got {self.k_slots}")
        if not 0 <= self.rescale_bits <= 64:
            raise ValueError(f"config: rescale_bits must be 0..64, got {self.rescale_bits}")
        needed = self.smem_bytes(FORMATS[problem.kv_format])
        if needed > SMEM_LIMIT:
            raise ValueError(f"config: shared memory needs {needed} bytes, the limit is {SMEM_LIMIT}")


def default_config(problem: Problem) -> Config:
    """Pairs of CTAs for two tiles of heads, and as many raw slots as shared memory then holds."""
    is_model1 = problem.kv_format == "model1"
    if problem.head_tiles == 2:
        return Config(ctas=2, k_slots=4, raw_slots=7 if is_model1 else 5)
    return Config(raw_slots=4 if is_model1 else 3)


def check_caches(kv_cache, extra_kv_cache=None) -> None:
    """Raises ValueError naming a cache whose records gather4 cannot reach: it counts rows in int32, and rows lie as far
    apart as the largest number of bytes that divides both record and page stride."""
    for name, cache in (("kv_cache", kv_cache), ("extra_kv_cache", extra_kv_cache)):
        if cache is None or cache.shape[0] < 2:
            continue
        record = next(fmt.row_bytes for fmt in FORMATS.values() if fmt.bytes_per_token == cache.shape[3])
        pages, tokens, stride = cache.shape[0] - 1, cache.shape[1] - 1, cache.stride(0)
        pitch = math.gcd(record, stride)
        if pages * (stride // pitch) + tokens * (record // pitch) >= MAX_ROWS:
            largest = (MAX_ROWS - 1 - tokens) // pages * record
            needed = f"a multiple of {record} bytes (a record), at most {largest}"
            if -(-stride // record) * record <= largest:
                needed = f"a multiple of {record} bytes (a record), such as {-(-stride // record) * record}"
            raise ValueError(
                f"{name}: page stride (dim 0) must be {needed}, in a cache of {pages + 1} pages: TMA reaches 2**31 - 1 rows, "
                f"of {pitch} bytes with this stride, got {stride}"
            )


class NamedBarriers(enum.IntEnum):
    """Hardware barriers (0 is sync_threads), 64 threads of softmax each."""

    PAIR = 1  # and 2: warps w and w + 2, which have two halves of the same heads' scores
    STORE = 3  # and 4: warps 2 i and 2 i + 1, whose columns of O go to the same staging buffer


class Rows(NamedTuple):
    """A cache as rows of a tensor map: token t of page p is row p * page + t * token."""

    page: Int32
    token: Int32


class Params(NamedTuple):
    """Kernel arguments that several roles read."""

    kv_cache: cute.Tensor  # [num_blocks, page_block_size, 1, bytes_per_token] uint8
    rows: Rows
    indices: cute.Tensor  # [b, s_q, topk] int32
    topk_length: cute.Tensor | None  # [b] int32
    extra_kv_cache: cute.Tensor | None  # [extra_num_blocks, extra_page_block_size, 1, bytes_per_token] uint8
    extra_rows: Rows | None
    extra_indices: cute.Tensor | None  # [b, s_q, extra_topk] int32
    extra_topk_length: cute.Tensor | None  # [b] int32
    attn_sink: cute.Tensor | None  # [h_q] fp32, natural log
    metadata: cute.Tensor  # [num_parts, 8] int32
    o_partial: cute.Tensor  # [2 * num_parts, s_q, groups of 16 heads, 2, 4096] fp32: see combine.py
    lse_partial: cute.Tensor  # [2 * num_parts, s_q, h_q] fp32, base 2
    lse: cute.Tensor  # [b, s_q, h_q] fp32, natural log
    scale_log2: Float32  # softmax_scale * log2(e)


class Maps(NamedTuple):
    """Addresses of the tensor maps; raw and rope by cache: main, extra."""

    q: Int64
    q_rope: Int64
    raw: tuple
    rope: tuple
    out: Int64


class Shared(NamedTuple):
    """Addresses in shared memory. Barriers are pointers; of a ring, one a slot."""

    index_full: cute.Pointer  # [index_slots] coords, valid and scales of a block are there
    index_empty: cute.Pointer  # [index_slots] and are read
    raw_full: cute.Pointer  # [raw_slots] raw records have arrived
    raw_empty: cute.Pointer  # [raw_slots] and are read
    k_full: cute.Pointer  # [k_slots] K but for rope is there
    rope_full: cute.Pointer  # [k_slots] rope has arrived, or a part of Q
    k_empty: cute.Pointer  # [k_slots] the tensor core has read them
    s_full: cute.Pointer  # S is in tensor memory
    s_empty: cute.Pointer  # and in registers
    p_full: cute.Pointer  # P is in shared memory, O is rescaled
    o_full: cute.Pointer  # P V is added to O; P is read
    k: Int32  # [k_slots][column tiles][64 keys, 64] bf16; then V32's rope, [64 keys, 32] twice (a pair: each one)
    p: Int32  # [64 heads, 64 keys] bf16
    exchange: Int32  # [2 halves of keys][8][64 heads] 4 fp32 each; and tiles of out
    raw: Int32  # [raw_slots][32 tokens] raw_pitch bytes each
    coords: Int32  # [index_slots][64] int32: row of the tensor map, -1: none
    valid: Int32  # [index_slots][2] uint32, a bit a token
    scales: Int32  # [index_slots][64] 8 bytes: scales that are not in raw records
    row: Int32  # [2][128] fp32: a value by row and half of the keys (or columns), twice
    zeros: Int32  # [raw_slots] uint32, then [k_slots][2]: groups of 4 tokens that are zeros, at bit 4 g
    tmem: Int32  # address of tensor memory
    record: cute.Pointer  # [8] int32: the partition's record of the plan


class SparseDecode(PlanReader):
    """The kernel and its host function, specialised for one (Problem, Config)."""

    def __init__(self, problem: Problem, config: Config):
        self.problem = problem
        self.config = config
        self.h_q = problem.h_q
        self.head_tiles = problem.head_tiles
        self.tile_n = config.tile_n
        self.fmt = FORMATS[problem.kv_format]
        self.ctas = config.ctas
        self.v_tiles = self.fmt.d_v // SW128_COLUMNS // self.ctas  # column tiles of K, in this CTA, that are V too: 8 or 4
        self.rope_apart = self.fmt.d_qk > self.fmt.d_v  # V32: rope is a tile behind those, of two of 32 columns
        self.raw_pitch = config.raw_pitch(self.fmt)
        self.k_bytes = config.k_bytes(self.fmt)
        self.scales_apart = config.scale_bytes(self.fmt) > 0
        # QK has two halves of the dims side by side, in five pieces of Q: four of two tiles, the last is V32's rope. One CTA
        # pairs neighbours, two CTAs tile i of the first with tile i of the second. Parts: the pieces in one slot of K.
        self.piece_tiles = [(2 * i, 2 * i + 1) if self.ctas == 1 else (i, i + 4) for i in range(4)]
        self.q_parts = config.q_parts(self.fmt)
        self.mma_qk = instruction_descriptor(TILE_M * self.ctas, 2 * TILE_N, b_is_mn_major=False)
        self.mma_pv = instruction_descriptor(TILE_M * self.ctas, 256, b_is_mn_major=True)

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
        max_splits: Int32,
        nonce: Int64,  # for kernels that leave flags in scratch: not here
        stream,
    ):
        fmt, config = self.fmt, self.config
        s128b, s64b = xcuda.TensorMapSwizzle.s128b, xcuda.TensorMapSwizzle.s64b
        # Of q and out a box is 64 heads of one query token; heads past h_q read as zero and are not written.
        map_q = self.tile_map(q, SW128_COLUMNS, s128b)
        map_q_rope = self.tile_map(q, SW128_COLUMNS // 2, s64b) if const_expr(self.rope_apart) else map_q
        map_out = self.tile_map(out, SW128_COLUMNS, s128b)
        rows, map_raw, map_rope = self.cache_maps(kv_cache)
        extra_rows, map_extra_raw, map_extra_rope = None, map_raw, map_rope
        if const_expr(extra_kv_cache is not None):
            extra_rows, map_extra_raw, map_extra_rope = self.cache_maps(extra_kv_cache)

        @cute.struct
        class Smem:
            k: cute.struct.Align[cute.struct.MemRange[Uint8, config.k_slots * self.k_bytes], 1024]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, TILE_M * TILE_N], 1024]
            p: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE_M * TILE_N], 1024]
            raw: cute.struct.Align[cute.struct.MemRange[Uint8, config.raw_slots * RAW_TOKENS * self.raw_pitch], 128]
            coords: cute.struct.Align[cute.struct.MemRange[Int32, config.index_slots * TILE_N], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Uint8, config.index_slots * TILE_N * config.scale_bytes(fmt) + 8], 8]
            valid: cute.struct.Align[cute.struct.MemRange[Uint32, config.index_slots * 2], 8]
            index_full: cute.struct.MemRange[Int64, config.index_slots]
            index_empty: cute.struct.MemRange[Int64, config.index_slots]
            raw_full: cute.struct.MemRange[Int64, config.raw_slots]
            raw_empty: cute.struct.MemRange[Int64, config.raw_slots]
            k_full: cute.struct.MemRange[Int64, config.k_slots]
            rope_full: cute.struct.MemRange[Int64, config.k_slots]
            k_empty: cute.struct.MemRange[Int64, config.k_slots]
            s_full: cute.struct.MemRange[Int64, 1]
            s_empty: cute.struct.MemRange[Int64, 1]
            p_full: cute.struct.MemRange[Int64, 1]
            o_full: cute.struct.MemRange[Int64, 1]
            row: cute.struct.MemRange[Float32, 2 * WARPGROUP]
            record: cute.struct.MemRange[Int32, 8]
            zeros: cute.struct.MemRange[Uint32, config.raw_slots + 2 * config.k_slots]
            tmem: cute.struct.MemRange[Int32, 1]

        self.Smem = Smem
        s_q, slots = q.shape[1], 2 * metadata.shape[0]
        o_partial, lse_partial = partials(scratch.iterator, slots, s_q, self.h_q)
        params = Params(
            kv_cache, rows, indices, topk_length, extra_kv_cache, extra_rows, extra_indices, extra_topk_length, attn_sink,
            metadata, o_partial, lse_partial, lse, softmax_scale * LOG2_E,
        )  # fmt: skip
        # Head tiles of one query token are neighbours in the grid, so that the second gather of a record hits L2.
        self.kernel(params, map_q, map_q_rope, map_raw, map_rope, map_extra_raw, map_extra_rope, map_out).launch(
            grid=[self.head_tiles, q.shape[1], metadata.shape[0]],
            block=[3 * WARPGROUP, 1, 1],
            cluster=[self.ctas, 1, 1],
            smem=Smem.size_in_bytes(),
            min_blocks_per_mp=1,  # without it ptxas drops setmaxnreg
            stream=stream,
        )
        Combine(self.problem, fewest=2).launch(
            metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse, max_splits, stream
        )

    def tile_map(self, t: cute.Tensor, columns: int, swizzle) -> xcuda.TensorMap:
        """Of [b, s_q, h_q, d] bf16: boxes of [64 heads, columns]."""
        return xcuda.create_tensor_map_tiled(
            global_address=t.iterator.toint(),
            dtype=BFloat16,
            global_dims=[t.shape[3], t.shape[2], t.shape[1], t.shape[0]],
            global_strides=[Int64(t.stride[i]) * 2 // 16 for i in (2, 1, 0)],
            box_dims=[columns, TILE_M, 1, 1],
            swizzle=swizzle,
        )

    @cute.jit
    def cache_maps(self, cache: cute.Tensor):
        """A cache as rows that begin where any of its records may: (Rows, map of raw records, map of rope).

        Rows lie gcd(record, page stride) bytes apart: whole records if pages are that far apart (FlashMLA's rule), else a
        part of one, and the rows overlap. Nothing in TMA's documentation forbids that; hardware has not been asked yet.
        """
        fmt = self.fmt
        page_stride = Int64(0)  # of one page alone it may be anything
        if cache.shape[0] > 1:
            page_stride = Int64(cache.stride[0])
        pitch, rest = Int64(fmt.row_bytes), page_stride
        while rest != 0:
            pitch, rest = rest, pitch % rest
        last = Int64(cache.shape[0] - 1) * page_stride + Int64(cache.shape[1] - 1) * fmt.row_bytes
        num_rows = Int32(last // pitch + 1)
        raw = xcuda.create_tensor_map_tiled(
            global_address=cache.iterator.toint() + fmt.nope_offset,
            dtype=Int64,  # a box has at most 256 elements
            global_dims=[fmt.row_bytes // 8, num_rows],
            global_strides=[pitch // 16],
            box_dims=[self.raw_pitch // 8, 1],
            swizzle=xcuda.TensorMapSwizzle.none,
        )
        # A box of V32's rope is a half of it.
        swizzle = xcuda.TensorMapSwizzle.s64b if self.rope_apart else xcuda.TensorMapSwizzle.s128b
        rope = xcuda.create_tensor_map_tiled(
            global_address=cache.iterator.toint() + fmt.rope_offset,
            dtype=BFloat16,
            global_dims=[fmt.d_rope, num_rows],
            global_strides=[pitch // 16],
            box_dims=[fmt.d_rope // (1 + self.rope_apart), 1],
            swizzle=swizzle,
        )
        return Rows(Int32(page_stride // pitch), Int32(fmt.row_bytes // pitch)), raw, rope

    @cute.kernel
    def kernel(
        self,
        params: Params,
        map_q: cutlass.GridConstant[xcuda.TensorMap],
        map_q_rope: cutlass.GridConstant[xcuda.TensorMap],
        map_raw: cutlass.GridConstant[xcuda.TensorMap],
        map_rope: cutlass.GridConstant[xcuda.TensorMap],
        map_extra_raw: cutlass.GridConstant[xcuda.TensorMap],
        map_extra_rope: cutlass.GridConstant[xcuda.TensorMap],
        map_out: cutlass.GridConstant[xcuda.TensorMap],
    ):
        tid, _, _ = cute.arch.thread_idx()
        head_tile, s_idx, part_idx = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        st = cutlass.memory.SmemAllocator().allocate(self.Smem)
        at = lambda member: Int32(member.data_ptr().toint())  # noqa: E731
        shared = Shared(
            st.index_full.data_ptr(), st.index_empty.data_ptr(), st.raw_full.data_ptr(), st.raw_empty.data_ptr(),
            st.k_full.data_ptr(), st.rope_full.data_ptr(), st.k_empty.data_ptr(),
            st.s_full.data_ptr(), st.s_empty.data_ptr(), st.p_full.data_ptr(), st.o_full.data_ptr(),
            at(st.k), at(st.p), at(st.exchange), at(st.raw), at(st.coords), at(st.valid), at(st.scales), at(st.row),
            at(st.zeros), at(st.tmem), st.record.data_ptr(),
        )  # fmt: skip
        address = lambda tensor_map: Int64(tensor_map.get_ptr().toint())  # noqa: E731
        maps = Maps(
            address(map_q), address(map_q_rope), (address(map_raw), address(map_extra_raw)),
            (address(map_rope), address(map_extra_rope)), address(map_out),
        )  # fmt: skip

        if warp == 0:
            with cute.arch.elect_one():
                for tensor_map in (maps.q, maps.raw[0], maps.rope[0], maps.out):
                    prefetch_map(tensor_map)
                for i in cutlass.range_constexpr(self.config.index_slots):
                    cute.arch.mbarrier_init(shared.index_full + i, 1)
                    # Warps: softmax, raw, rope, and dequant if it reads scales there.
                    cute.arch.mbarrier_init(shared.index_empty + i, 4 + 2 + 4 * self.scales_apart)
                for i in cutlass.range_constexpr(self.config.raw_slots):
                    cute.arch.mbarrier_init(shared.raw_full + i, 1)  # the arrive.expect_tx of the raw warp
                    cute.arch.mbarrier_init(shared.raw_empty + i, 4)  # the dequant warps
                # What the mma warp waits for comes from all CTAs to the first one, what it commits goes to all.
                for i in cutlass.range_constexpr(self.config.k_slots):
                    cute.arch.mbarrier_init(shared.k_full + i, 4 * self.ctas)  # the dequant warps
                    cute.arch.mbarrier_init(shared.rope_full + i, self.ctas)  # the arrive.expect_tx of the rope warp
                    cute.arch.mbarrier_init(shared.k_empty + i, 1)  # a commit
                cute.arch.mbarrier_init(shared.s_full, 1)  # a commit
                cute.arch.mbarrier_init(shared.s_empty, 4 * self.ctas)  # the softmax warps
                cute.arch.mbarrier_init(shared.p_full, 4 * self.ctas)  # the softmax warps
                cute.arch.mbarrier_init(shared.o_full, 1)  # a commit
        if warp == 4:
            tmem_alloc(shared.tmem, self.ctas)
            tmem_fence_before()  # the address reaches the other warps through sync_threads
        if tid < 8:
            cute.make_tensor(shared.record, 8)[tid] = params.metadata[part_idx, tid]
        if tid < self.config.raw_slots + 2 * self.config.k_slots:
            smem_tensor(shared.zeros + tid * 4, Uint32, 1)[0] = Uint32(0)
        cute.arch.mbarrier_init_fence()
        self.sync_ctas()
        tmem_fence_after()
        tmem = smem_tensor(shared.tmem, Int32, 1)[0]

        # When every CTA has come here, combine's are set up wherever there is room; they read behind the whole grid's end.
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            set_registers(self.config.registers[0])
            self.softmax(params, maps, s_idx, head_tile, tid, tmem, shared)
        elif warp < 8:
            set_registers(self.config.registers[1])
            if warp == 4:
                if (head_tile == 0) | (self.ctas == 1):
                    with cute.arch.elect_one():
                        self.mma(params, tmem, shared)
            elif warp == 5:
                with cute.arch.elect_one():
                    self.load_raw(params, maps, head_tile, shared)
            elif warp == 6:
                with cute.arch.elect_one():
                    self.load_rope(params, maps, s_idx, head_tile, shared)
            else:
                self.index(params, s_idx, head_tile, tid % 32, shared)
        else:
            set_registers(self.config.registers[2])
            self.dequant(params, head_tile, tid % WARPGROUP, shared)

        # Tensor memory goes back when the last warp has read it; and no CTA ends before the other one has signalled it.
        cute.arch.sync_warp()  # roles of one thread: the barrier is one for whole warps
        tmem_fence_before()
        self.sync_ctas()
        tmem_fence_after()
        if warp == 4:
            tmem_free(tmem, self.ctas)

    @cute.jit
    def sync_ctas(self):
        """All threads, of both CTAs of a pair."""
        if const_expr(self.ctas == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ---- roles, in the order of the data ----

    @cute.jit
    def index(self, params: Params, s_idx: Int32, head_tile: Int32, lane: Int32, shared: Shared):
        """Rows of the tensor maps for the 64 tokens of a block, which of them count, and scales that lie outside of records.

        Waits for index_empty. Produces coords, valid, scales (index_full), index_slots blocks ahead.
        """
        part = self.load_part(shared)
        slot, phase = Int32(0), Int32(0)
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            for block in cutlass.range(work.first_block, work.last_block, unroll=1):
                index = cute.make_rmem_tensor(2, Int32)
                is_extra = self.load_index(params, work, req, s_idx, block, lane, index)
                cute.arch.mbarrier_wait(shared.index_empty + slot, phase ^ 1)
                for i in cutlass.range_constexpr(2):
                    place = slot * TILE_N + 32 * i + lane
                    self.resolve(params, index[i], is_extra, head_tile, place, slot * 2 + i, lane, shared)
                self.release(shared.index_full + slot)
                slot, phase = advance(slot, phase, self.config.index_slots)

    @cute.jit
    def load_index(
        self, params: Params, work: Work, req: Int32, s_idx: Int32, block: Int32, lane: Int32, index: cute.Tensor
    ) -> Boolean:
        """index[i] = that of the block's token 32 i + lane, -1 past the request's; is the block one of the extra cache?"""
        is_extra = Boolean(False)
        for i in cutlass.range_constexpr(2):
            token = block * TILE_N + 32 * i + lane
            index[i] = Int32(-1)
            if const_expr(params.extra_indices is not None):
                is_extra = block >= work.num_main_blocks
                if is_extra:
                    token -= work.num_main_blocks * TILE_N
                    if token < work.extra_length:
                        index[i] = params.extra_indices[Int64(req), s_idx, token]
                elif token < work.length:
                    index[i] = params.indices[Int64(req), s_idx, token]
            else:
                if token < work.length:
                    index[i] = params.indices[Int64(req), s_idx, token]
        return is_extra

    @cute.jit
    def resolve(
        self, params: Params, index: Int32, is_extra: Boolean, head_tile: Int32, place: Int32, word: Int32, lane: Int32,
        shared: Shared,
    ):  # fmt: skip
        """A token's row to coords, its bit to valid, its scales to scales if need be; an index that is no token is row -1."""
        cache, rows = params.kv_cache, params.rows
        page_block_size, num_blocks = Uint32(cache.shape[1]), Uint32(cache.shape[0])
        page_rows, token_rows = rows.page, rows.token
        base, page_stride = cache.iterator.toint(), Int64(cache.stride[0])
        if const_expr(params.extra_indices is not None):
            extra, extra_rows = params.extra_kv_cache, params.extra_rows
            if is_extra:
                page_block_size, num_blocks = Uint32(extra.shape[1]), Uint32(extra.shape[0])
                page_rows, token_rows = extra_rows.page, extra_rows.token
                base, page_stride = extra.iterator.toint(), Int64(extra.stride[0])
        page = Uint32(index) // page_block_size
        offset = Uint32(index) - page * page_block_size
        is_valid = (index >= 0) & (page < num_blocks)
        row = Int32(page) * page_rows + Int32(offset) * token_rows
        smem_tensor(shared.coords + place * 4, Int32, 1)[0] = cutlass.select_(is_valid, row, Int32(-1))
        if const_expr(self.scales_apart):
            scales = cute.make_rmem_tensor(2, Uint32)
            scales.fill(0)  # of an invalid token, whose codes are zeros
            if is_valid:
                start = base + Int64(page) * page_stride
                if const_expr(self.fmt.scale_plane):  # 8 bytes a token behind the page's rows
                    start += Int64(page_block_size) * self.fmt.row_bytes + Int64(offset) * self.fmt.scale_row_bytes
                else:  # two of the record's four fp32 for each CTA
                    start += Int64(offset) * self.fmt.row_bytes + (self.fmt.scale_offset + 8 * head_tile)
                cute.autovec_copy(global_tensor(start, Uint32, 2), scales)
            cute.autovec_copy(scales, smem_tensor(shared.scales + place * 8, Uint32, 2))
        mask = Uint32(cute.arch.vote_ballot_sync(is_valid))
        if lane == 0:
            smem_tensor(shared.valid + word * 4, Uint32, 1)[0] = mask

    @cute.jit
    def load_raw(self, params: Params, maps: Maps, head_tile: Int32, shared: Shared):
        """Raw records by gather4, 32 tokens a slot. One thread.

        Consumes coords, valid; waits for raw_empty. Produces raw records (raw_full): zeros for tokens that do not count.
        """
        column = 0 if self.ctas == 1 else head_tile * (self.fmt.d_v // 2 // 8)  # the map's elements are 8 bytes
        part = self.load_part(shared)
        slot, phase, index_slot, index_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            for block in cutlass.range(work.first_block, work.last_block, unroll=1):
                tensor_map = self.of_cache(params, work, block, maps.raw)
                cute.arch.mbarrier_wait(shared.index_full + index_slot, index_phase)
                for half in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_wait(shared.raw_empty + slot, phase ^ 1)
                    to_copy = self.groups_to_copy(shared.valid + (2 * index_slot + half) * 4, shared.zeros + slot * 4)
                    full = shared.raw_full + slot
                    num_bytes = Int32(cute.arch.popc(to_copy)) * (4 * self.raw_pitch)
                    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                    to = shared.raw + slot * (RAW_TOKENS * self.raw_pitch)
                    coords = shared.coords + (index_slot * TILE_N + half * RAW_TOKENS) * 4
                    for g in cutlass.range_constexpr(RAW_TOKENS // 4):
                        if (to_copy >> (4 * g)) & 1 == 1:
                            rows = load_smem_16b(coords + g * 16, Int32)
                            gather4(to + g * (4 * self.raw_pitch), tensor_map, column, rows, Int32(full.toint()))
                    slot, phase = advance(slot, phase, self.config.raw_slots)
                cute.arch.mbarrier_arrive(shared.index_empty + index_slot)
                index_slot, index_phase = advance(index_slot, index_phase, self.config.index_slots)

    @cute.jit
    def load_rope(self, params: Params, maps: Maps, s_idx: Int32, head_tile: Int32, shared: Shared):
        """Q of every request, by TMA, and rope of every block, by gather4, into slots of K. One thread.

        Consumes coords, valid; waits for k_empty. Produces parts of Q, rope (rope_full): zeros for tokens that do not count.
        """
        part = self.load_part(shared)
        slot, phase, index_slot, index_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        # Rope of V32 lies behind the tiles, in halves of 32 columns (in a pair one each); MODEL1's is the last tile.
        pieces = 2 if self.rope_apart and self.ctas == 1 else 1
        piece_bytes = self.fmt.rope_bytes // (1 + self.rope_apart)
        first_column = 0 if pieces == 2 or not self.rope_apart else head_tile * (SW128_COLUMNS // 2)
        has_rope = (head_tile == 1) | (self.ctas == 1) | self.rope_apart
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            for q_pieces in cutlass.range_constexpr(len(self.q_parts)):
                cute.arch.mbarrier_wait(shared.k_empty + slot, phase ^ 1)
                self.load_q(maps, req, s_idx, head_tile, self.q_parts[q_pieces], shared, slot)
                slot, phase = advance(slot, phase, self.config.k_slots)
            for block in cutlass.range(work.first_block, work.last_block, unroll=1):
                tensor_map = self.of_cache(params, work, block, maps.rope)
                cute.arch.mbarrier_wait(shared.index_full + index_slot, index_phase)
                cute.arch.mbarrier_wait(shared.k_empty + slot, phase ^ 1)
                masks = []
                for half in (0, 1):
                    valid = shared.valid + (2 * index_slot + half) * 4
                    to_copy = self.groups_to_copy(valid, self.rope_zeros(shared, slot, half))
                    masks.append(cutlass.select_(has_rope, to_copy, Uint32(0)))
                num_groups = Int32(cute.arch.popc(masks[0])) + Int32(cute.arch.popc(masks[1]))
                self.expect(shared.rope_full + slot, num_groups * (4 * pieces * piece_bytes))
                full = self.mma_barrier(shared.rope_full + slot)
                to = shared.k + slot * self.k_bytes + (self.v_tiles - 1 + self.rope_apart) * TILE_BYTES
                coords = shared.coords + index_slot * (TILE_N * 4)
                for g in cutlass.range_constexpr(TILE_N // 4):
                    if (masks[g // 8] >> (4 * (g % 8))) & 1 == 1:
                        rows = load_smem_16b(coords + g * 16, Int32)
                        for i in cutlass.range_constexpr(pieces):
                            to_rows = to + i * (TILE_N * piece_bytes) + g * (4 * piece_bytes)
                            gather4(to_rows, tensor_map, first_column + i * piece_bytes // 2, rows, full, self.ctas)
                cute.arch.mbarrier_arrive(shared.index_empty + index_slot)
                index_slot, index_phase = advance(index_slot, index_phase, self.config.index_slots)
                slot, phase = advance(slot, phase, self.config.k_slots)
        for _ in cutlass.range_constexpr(self.config.k_slots):  # no CTA ends before the last commits have arrived in it
            cute.arch.mbarrier_wait(shared.k_empty + slot, phase ^ 1)
            slot, phase = advance(slot, phase, self.config.k_slots)

    def load_q(
        self, maps: Maps, req: Int32, s_idx: Int32, head_tile: Int32, pieces: list, shared: Shared, slot: Int32
    ) -> None:
        """Pieces of Q into a slot of K: each 64 heads of one half of the dims, then of the other."""
        self.expect(shared.rope_full + slot, sum(TILE_BYTES * (2 if piece < 4 else 1) for piece in pieces))
        full = self.mma_barrier(shared.rope_full + slot)
        for i, piece in enumerate(pieces):
            for side in (0, 1):
                to = shared.k + slot * self.k_bytes + i * (2 * TILE_BYTES)
                if piece < 4:
                    tensor_map, column, to = maps.q, self.piece_tiles[piece][side] * SW128_COLUMNS, to + side * TILE_BYTES
                else:
                    tensor_map, column = maps.q_rope, self.fmt.d_v + side * (SW128_COLUMNS // 2)
                    to = to + side * (TILE_BYTES // 2)
                tile_load(to, tensor_map, [column, head_tile * TILE_M, s_idx, req], full, self.ctas)
        for half in (0, 1):  # where rope's zeros may have been there is Q
            smem_tensor(self.rope_zeros(shared, slot, half), Uint32, 1)[0] = Uint32(0)

    @cute.jit
    def dequant(self, params: Params, head_tile: Int32, t: Int32, shared: Shared):
        """K but for rope: e4m3 * scale in bf16, rounded once, in the swizzled layout of the tensor core.

        Consumes raw records and scales; waits for k_empty. Produces K (k_full). Warp w has rows 8 w ... 8 w + 7 of 32. A
        lane has one row and 16 columns of every tile, so chosen that any 8 lanes in order read and write different banks.
        """
        lane, w = t % 32, cute.arch.make_warp_uniform(t // 32)
        row = 4 * (lane // 8 % 2) + lane % 4
        side = lane // 16
        column = cutlass.select_(lane // 4 % 2 == 0, side, 3 - side)  # of 4 pieces of 16 columns
        chunks = [((2 * column + i) ^ row) * 16 for i in (0, 1)]  # 16-byte chunk j of row r lies at j ^ (r % 8)
        part = self.load_part(shared)
        slot, phase, raw_slot, raw_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        index_slot, index_phase = Int32(0), Int32(0)
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            for _ in cutlass.range_constexpr(len(self.q_parts)):
                slot, phase = advance(slot, phase, self.config.k_slots)
            for _ in cutlass.range(work.first_block, work.last_block, unroll=1):
                cute.arch.mbarrier_wait(shared.k_empty + slot, phase ^ 1)
                for half in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_wait(shared.raw_full + raw_slot, raw_phase)
                    token = RAW_TOKENS * half + 8 * w + row
                    record = shared.raw + (raw_slot * RAW_TOKENS + 8 * w + row) * self.raw_pitch
                    to = shared.k + slot * self.k_bytes + token * 128
                    # Behind raw_full, which the raw warp has armed behind index_full: the scales are there too.
                    scales = self.load_scales(record, shared.scales + (index_slot * TILE_N + token) * 8, head_tile)
                    from_codes = record + column * 16
                    for tile in cutlass.range_constexpr(self.v_tiles - 1):
                        self.convert(from_codes, to, tile, scales, chunks)
                    # MODEL1's last tile is rope: of one CTA, or of the second one.
                    if ((head_tile == 0) & (self.ctas == 2)) | self.rope_apart:
                        self.convert(from_codes, to, self.v_tiles - 1, scales, chunks)
                    self.release(shared.raw_empty + raw_slot)
                    raw_slot, raw_phase = advance(raw_slot, raw_phase, self.config.raw_slots)
                cute.arch.fence_proxy("async.shared", space="cta")  # K becomes visible to the tensor core
                self.release_mma(shared.k_full + slot)
                if const_expr(self.scales_apart):
                    self.release(shared.index_empty + index_slot)
                    index_slot, index_phase = advance(index_slot, index_phase, self.config.index_slots)
                slot, phase = advance(slot, phase, self.config.k_slots)

    def convert(self, codes: Int32, to: Int32, tile: int, scales: list, chunks: list) -> None:
        """16 codes of a column tile, times their scale, into two chunks of 8 bf16."""
        words = load_smem_16b(codes + tile * SW128_COLUMNS)
        scale = scales[tile * SW128_COLUMNS // self.fmt.quant_tile]
        for i in (0, 1):
            k = cute.make_rmem_tensor(4, Uint32)
            for j in (0, 1):
                for e, pair in enumerate(e4m3_to_bf16(words[2 * i + j])):
                    k[2 * j + e] = self.scaled(pair, scale)
            store_smem_16b(to + tile * TILE_BYTES + chunks[i], k)

    @cute.jit
    def mma(self, params: Params, tmem: Int32, shared: Shared):
        """All that the tensor core does: Q to tensor memory, S = Q K^T a block ahead, O += P V. One thread, for all CTAs.

        Consumes Q, K, rope, P; waits for s_empty. Produces S (s_full), O (o_full), free slots of K (k_empty).
        """
        part = self.load_part(shared)
        slot, phase, n = Int32(0), Int32(0), Int32(0)  # n: blocks whose S has been issued
        uses = Int32(0)  # parities of k_full, a bit a slot: for Q, which has slots too, dequant does not arrive
        of_last = Int32(0)  # slot of the block before
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            for i in cutlass.range_constexpr(len(self.q_parts)):
                self.wait_mma(shared.rope_full + slot, phase)
                # Nothing reads the last Q any more: softmax has had its last S, or its last P would not have come.
                self.copy_q(tmem, shared.k + slot * self.k_bytes, self.q_parts[i])
                commit(shared.k_empty + slot, self.ctas)
                slot, phase = advance(slot, phase, self.config.k_slots)
            for block in cutlass.range(work.first_block, work.last_block + 1, unroll=1):
                before = of_last
                if block < work.last_block:
                    self.wait_mma(shared.rope_full + slot, phase)
                    self.wait_mma(shared.k_full + slot, (uses >> slot) & 1)
                    self.wait_mma(shared.s_empty, (n & 1) ^ 1)
                    tmem_fence_after()  # softmax's reads of S before it is written again
                    self.multiply_qk(tmem, shared.k + slot * self.k_bytes)
                    commit(shared.s_full, self.ctas)
                    uses ^= 1 << slot
                    of_last = slot
                    slot, phase = advance(slot, phase, self.config.k_slots)
                    n += 1
                if block > work.first_block:
                    done = n - 1 - Int32(block < work.last_block)  # blocks whose P V has been issued
                    self.wait_mma(shared.p_full, done & 1)
                    tmem_fence_after()  # softmax's reads and stores of O before it is added to
                    self.multiply_pv(tmem, shared.p, shared.k + before * self.k_bytes, block - 1 > work.first_block)
                    commit(shared.k_empty + before, self.ctas)
                    commit(shared.o_full, self.ctas)

    @cute.jit
    def softmax(
        self, params: Params, maps: Maps, s_idx: Int32, head_tile: Int32, t: Int32, tmem: Int32, shared: Shared
    ):
        """S to P, online; O's rescaling; a request's results. Thread t: head t % 64, half t / 64 of a block's keys and of O's
        columns.

        Consumes S (s_full), valid, O (o_full). Produces P (p_full), out, lse, or a piece of them.
        """
        w = cute.arch.make_warp_uniform(t // 32)
        half, head = cute.arch.make_warp_uniform(w // 2), t % TILE_M
        tmem = tmem + (w << 21)  # its 32 lanes: a warp reaches no other ones
        part = self.load_part(shared)
        index_slot, index_phase, n = Int32(0), Int32(0), Int32(0)
        p_row = shared.p + head * 128
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            row_max, row_sum = Float32(-1e30), Float32(0)  # base 2, finite: -inf - -inf is NaN
            for block in cutlass.range(work.first_block, work.last_block, unroll=1):
                cute.arch.mbarrier_wait(shared.s_full, n & 1)
                tmem_fence_after()  # the tensor core's S before it is read
                others = tmem_load(tmem + TMEM_S + 32 * (1 - half), 32)  # of the keys of the lane with the other half
                s = tmem_load(tmem + TMEM_S + 32 * half, 32)
                tmem_wait_load()
                tmem_fence_before()
                self.release_mma(shared.s_empty)
                self.sum_halves(s, others, head, half, shared)
                # Long since, for S comes of it; but only this wait promises that valid is seen.
                cute.arch.mbarrier_wait(shared.index_full + index_slot, index_phase)
                valid = smem_tensor(shared.valid + (index_slot * 2 + half) * 4, Uint32, 1)[0]
                top = Float32(-INF)
                for i in cutlass.range_constexpr(TILE_N // 2):
                    # Masked by select and after the product: adding -inf to a NaN would stay NaN.
                    s[i] = cutlass.select_((valid >> i) & 1 == 1, s[i] * params.scale_log2, Float32(-INF))
                    top = cute.arch.fmax(top, s[i])
                top = cute.arch.fmax(top, self.of_other_half(shared.row, top, head, half))
                # The maximum stays unless some row of the warp has outgrown it; the two warps of these heads see the same.
                grown = top - row_max > self.config.rescale_bits
                is_raised = cute.arch.vote_any_sync(grown)
                new_max = row_max
                if is_raised:
                    new_max = cute.arch.fmax(row_max, top)
                alpha = cute.math.exp2(row_max - new_max, fastmath=True)
                row_max = new_max
                sums = cute.make_rmem_tensor(4, Float32)  # of 8 keys each: one sum of 32 would be a long chain
                sums.fill(0.0)
                for i in cutlass.range_constexpr(TILE_N // 2):
                    s[i] = cute.math.exp2(s[i] - row_max, fastmath=True)
                    sums[i % 4] = sums[i % 4] + s[i]
                row_sum = row_sum * alpha + ((sums[0] + sums[1]) + (sums[2] + sums[3]))
                self.release(shared.index_empty + index_slot)  # valid has been used
                index_slot, index_phase = advance(index_slot, index_phase, self.config.index_slots)
                cute.arch.mbarrier_wait(shared.o_full, (n & 1) ^ 1)  # the last block's P is read, its O complete
                if is_raised & (block > work.first_block):
                    tmem_fence_after()
                    self.rescale(tmem, alpha)
                for j in cutlass.range_constexpr(4):
                    p = cute.make_rmem_tensor(4, Uint32)
                    for i in cutlass.range_constexpr(4):
                        p[i] = bf16_pair(s[8 * j + 2 * i], s[8 * j + 2 * i + 1])
                    store_smem_16b(p_row + ((4 * half + j) ^ (head % 8)) * 16, p)
                cute.arch.fence_proxy("async.shared", space="cta")  # P becomes visible to the tensor core
                tmem_fence_before()
                self.release_mma(shared.p_full)
                n += 1
            row_sum += self.of_other_half(shared.row + WARPGROUP * 4, row_sum, head, half)
            cute.arch.mbarrier_wait(shared.o_full, (n & 1) ^ 1)
            tmem_fence_after()  # the tensor core's O before it is read
            self.finish(params, maps, part, req, s_idx, head_tile, t, tmem, row_max, row_sum, shared)

    # ---- steps of the roles ----

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """One arrival a warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    # A pair's mma warp is that of the first CTA.

    @cute.jit
    def release_mma(self, barrier: cute.Pointer):
        """One arrival a warp, where the mma warp waits."""
        if const_expr(self.ctas == 1):
            self.release(barrier)
        else:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                arrive_leader(barrier)

    def expect(self, barrier: cute.Pointer, num_bytes) -> None:
        """One thread's arrival there, behind which so many bytes of its CTA are to come."""
        if self.ctas == 1:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)
        else:
            expect_leader(barrier, Int32(num_bytes))

    def mma_barrier(self, barrier: cute.Pointer) -> Int32:
        """What copies name to signal there."""
        return Int32(barrier.toint()) if self.ctas == 1 else in_leader(barrier)

    @cute.jit
    def wait_mma(self, barrier: cute.Pointer, parity: Int32):
        if const_expr(self.ctas == 1):
            cute.arch.mbarrier_wait(barrier, parity)
        else:
            wait_cluster(barrier, parity)

    @cute.jit
    def of_cache(self, params: Params, work: Work, block: Int32, maps: tuple) -> Int64:
        """The tensor map of the cache that a block's tokens are in."""
        tensor_map = maps[0]
        if const_expr(params.extra_indices is not None):
            tensor_map = cutlass.select_(block >= work.num_main_blocks, maps[1], maps[0])
        return tensor_map

    def groups_to_copy(self, valid: Int32, zeros: Int32) -> Uint32:
        """Groups of 4 tokens, of 32, that a slot needs: bit 4 g. Not those without a valid token where zeros lie already.

        Copies of rows that are all out of bounds are slow, and skipping them must leave finite values: the zeros of earlier
        ones, not what other tokens have left, which may be NaN.
        """
        mask = smem_tensor(valid, Uint32, 1)[0]
        some = mask | (mask >> 1)
        some = (some | (some >> 2)) & 0x11111111
        are_zeros = smem_tensor(zeros, Uint32, 1)
        to_copy = some | (~are_zeros[0] & 0x11111111)
        are_zeros[0] = ~some & 0x11111111
        return to_copy

    def rope_zeros(self, shared: Shared, slot: Int32, half: int) -> Int32:
        return shared.zeros + (self.config.raw_slots + 2 * slot + half) * 4

    def load_scales(self, record: Int32, scales: Int32, head_tile: Int32) -> list:
        """A token's scales as (high, low), pairs of one bf16: high + low is the scale to 2 ** -17; low None: high is."""
        count = self.v_tiles * SW128_COLUMNS // self.fmt.quant_tile  # MODEL1's eighth is a pad byte
        if self.fmt.scale_plane:
            first = scales if self.ctas == 1 else scales + 4 * head_tile  # four bytes for each of two CTAs
            words = [smem_tensor(first + 4 * i, Uint32, 1)[0] for i in range(-(-count // 4))]
            fields = [(words[i // 4] >> (8 * (i % 4))) & 255 for i in range(count)]
            bits = [cutlass.select_(f == 255, Uint32(0x7FC0), cutlass.max(f << 7, Uint32(0x40))) for f in fields]
            return [(x | (x << 16), None) for x in bits]
        first = scales if self.scales_apart else record + self.fmt.scale_offset
        pairs = []
        for i in range(count):
            scale = smem_tensor(first + 4 * i, Float32, 1)[0]
            high = bf16_pair(scale, scale)
            low = scale - (high << 16).bitcast(Float32)
            pairs.append((high, bf16_pair(low, low)))
        return pairs

    def scaled(self, pair: Uint32, scale: tuple) -> Uint32:
        """A pair of bf16, times a scale of `load_scales`."""
        high, low = scale
        if low is None:
            return mul_bf16x2(pair, high)
        return fma_bf16x2(pair, high, mul_bf16x2(pair, low))

    def copy_q(self, tmem: Int32, q: Int32, pieces: list) -> None:
        """Pieces of Q from their slot: lanes 0-63 get one half of the dims of the heads, lanes 64-127 the other."""
        for i, piece in enumerate(pieces):
            is_rope = piece == 4
            swizzle, rows_8 = (SWIZZLE_64B, 512) if is_rope else (SWIZZLE_128B, 1024)
            source = smem_descriptor(q + i * (2 * TILE_BYTES), swizzle, 16, rows_8)
            for k in range(2 if is_rope else 4):
                copy_to_tmem(tmem + (TMEM_Q + 32 * piece + 8 * k), source + 2 * k, self.ctas)

    def multiply_qk(self, tmem: Int32, k: Int32) -> None:
        """S = Q K^T in two halves of the dims: B's rows are the keys twice, with a tile of each half. One CTA has both, one
        behind the other, two CTAs one each."""
        for piece in range(4 + self.rope_apart):
            is_rope = piece == 4
            swizzle, rows_8 = (SWIZZLE_64B, 512) if is_rope else (SWIZZLE_128B, 1024)
            b = smem_descriptor(k + piece * (2 * TILE_BYTES // self.ctas), swizzle, 16, rows_8)
            for i in range(2 if is_rope else 4):
                q = tmem + (TMEM_Q + 32 * piece + 8 * i)
                mma(tmem + TMEM_S, q, b + 2 * i, self.mma_qk, piece + i > 0, self.ctas)

    def multiply_pv(self, tmem: Int32, p: Int32, k: Int32, accumulate: Boolean) -> None:
        """O (+)= P V, 256 columns at a time: of these lanes 0-63 have the left half, or the first CTA's, lanes 64-127 the
        other one."""
        a = smem_descriptor(p, SWIZZLE_128B, 16, 1024)
        for step in range(2):
            b = smem_descriptor(k + step * (4 * TILE_BYTES // self.ctas), SWIZZLE_128B, TILE_BYTES, 1024)
            for i in range(TILE_N // 16):  # of 16 keys, 2048 bytes of a tile
                first = accumulate if i == 0 else True
                mma(tmem + 128 * step, a + 2 * i, b + 128 * i, self.mma_pv, first, self.ctas)

    @cute.jit
    def sum_halves(self, s: cute.Tensor, others: cute.Tensor, head: Int32, half: Int32, shared: Shared):
        """S of this thread's 32 keys in `s`. Lanes l and l + 64 have the products over two halves of the dims, of all 64 keys:
        each gives the other what it has of the other's keys."""
        step = TILE_M * 16
        to, of = [shared.exchange + h * (8 * step) + head * 16 for h in (1 - half, half)]
        for j in cutlass.range_constexpr(8):
            store_smem_16b(to + j * step, cute.make_tensor(others.iterator + 4 * j, 4))
        self.sync_pair(head)
        for j in cutlass.range_constexpr(8):
            other = load_smem_16b(of + j * step, Float32)
            for i in cutlass.range_constexpr(4):
                s[4 * j + i] = s[4 * j + i] + other[i]

    @cute.jit
    def of_other_half(self, row: Int32, value: Float32, head: Int32, half: Int32) -> Float32:
        """What the thread with the other half of this head gives, for `value`."""
        smem_tensor(row + (half * TILE_M + head) * 4, Float32, 1)[0] = value
        self.sync_pair(head)
        return smem_tensor(row + ((1 - half) * TILE_M + head) * 4, Float32, 1)[0]

    def sync_pair(self, head: Int32) -> None:
        """The two warps with both halves of these heads: their stores to shared memory before their loads."""
        cute.arch.barrier(barrier_id=NamedBarriers.PAIR + head // 32, number_of_threads=64)

    @cute.jit
    def rescale(self, tmem: Int32, alpha: Float32):
        """O of this warp's lanes times a factor for each."""
        for i in cutlass.range(256 // 32, unroll=1):
            o = tmem_load(tmem + 32 * i, 32)
            tmem_wait_load()
            for j in cutlass.range_constexpr(32):
                o[j] = o[j] * alpha
            tmem_store(tmem + 32 * i, o)
        tmem_wait_store()

    @cute.jit
    def finish(
        self, params: Params, maps: Maps, part: Part, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, tmem: Int32,
        row_max: Float32, row_sum: Float32, shared: Shared,
    ):  # fmt: skip
        """lse, and O normalised: to out, or of a split request to scratch, where the sink does not count yet."""
        # Or all addresses of the way out are computed before the first request, kept in registers, and spill.
        t, head_tile = opaque(t), opaque(head_tile)
        half, head = t // TILE_M, head_tile * TILE_M + t % TILE_M
        is_split, slot = self.split_of(part, req)
        sink_log2 = None
        if const_expr(params.attn_sink is not None):
            sink_log2 = params.attn_sink[cutlass.min(head, self.h_q - 1)] * LOG2_E
        is_empty = row_sum == 0.0
        lse_log2 = cute.math.log2(row_sum, fastmath=True) + row_max
        if is_split:
            if (half == 0) & (head < self.h_q):
                params.lse_partial[Int64(slot), s_idx, head] = cutlass.select_(is_empty, Float32(-INF), lse_log2)
            factor = cutlass.select_(is_empty, Float32(0), cute.arch.rcp_approx(row_sum))
            self.store_piece(params, slot, s_idx, head_tile, t, tmem, factor, shared)
        else:
            if (half == 0) & (head < self.h_q):
                params.lse[Int64(req), s_idx, head] = cutlass.select_(is_empty, Float32(INF), lse_log2 * LN_2)
            # Not by way of lse: beside a large maximum it would have lost the sum's bits.
            denominator = row_sum
            if const_expr(params.attn_sink is not None):
                denominator += cute.math.exp2(sink_log2 - row_max, fastmath=True)
            factor = cutlass.select_(is_empty, Float32(0), cute.arch.rcp_approx(denominator))
            self.store_out(maps, req, s_idx, head_tile, t, tmem, factor, shared)

    @cute.jit
    def store_out(
        self, maps: Maps, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, tmem: Int32, factor: Float32,
        shared: Shared,
    ):  # fmt: skip
        """O to out as bf16, by TMA: in four rounds each half of the threads makes a tile of 64 columns."""
        w, row = cute.arch.make_warp_uniform(t // 32), t % TILE_M
        half = w // 2
        # That half of the exchange buffer to which these two warps give their scores: all four warps are done with it, or the
        # last P would not have been multiplied; and nobody else writes there next.
        staging = shared.exchange + (1 - half) * TILE_BYTES
        for i in cutlass.range(4, unroll=1):
            for k in cutlass.range_constexpr(2):
                o = tmem_load(tmem + (64 * i + 32 * k), 32)
                tmem_wait_load()
                for j in cutlass.range_constexpr(4):
                    words = cute.make_rmem_tensor(4, Uint32)
                    for e in cutlass.range_constexpr(4):
                        c = 8 * j + 2 * e
                        words[e] = bf16_pair(o[c] * factor, o[c + 1] * factor)
                    store_smem_16b(staging + row * 128 + ((4 * k + j) ^ (row % 8)) * 16, words)
            cute.arch.fence_proxy("async.shared", space="cta")  # the tile becomes visible to TMA
            self.sync_store(half)
            if w % 2 == 0:
                with cute.arch.elect_one():
                    column = half * 256 + i * 64 if self.ctas == 2 else (i // 2) * 256 + half * 128 + (i % 2) * 64
                    tile_store(maps.out, [column, head_tile * TILE_M, s_idx, req], staging)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()  # the barrier is one for whole warps
            self.sync_store(half)  # the tile is read: the next one, or the next block's scores, may overwrite it

    def sync_store(self, half: Int32) -> None:
        cute.arch.barrier(barrier_id=NamedBarriers.STORE + half, number_of_threads=64)

    @cute.jit
    def store_piece(
        self, params: Params, slot: Int32, s_idx: Int32, head_tile: Int32, t: Int32, tmem: Int32, factor: Float32,
        shared: Shared,
    ):  # fmt: skip
        """O to scratch for combine: fp16 over a power of two for each head and 256 columns, in fragment order."""
        lane, half, row = t % 32, cute.arch.make_warp_uniform(t // TILE_M), t % TILE_M
        head = head_tile * TILE_M + row
        largest = cute.make_rmem_tensor(2, Float32)  # of this thread's two times 128 columns
        for run in cutlass.range_constexpr(2):
            largest[run] = Float32(0)
            for i in cutlass.range_constexpr(4):
                columns = tmem_load(tmem + (128 * run + 32 * i), 32)
                tmem_wait_load()
                for j in cutlass.range_constexpr(32):
                    largest[run] = max_abs(largest[run], columns[j] * factor)
        for run in cutlass.range_constexpr(2):
            if const_expr(self.ctas == 1):  # the other 128 columns of a side of d_v are in the other half of the threads
                side, first = run, half * 8
                row_at = shared.row + run * (WARPGROUP * 4)  # two places in turn: the last one may still be read
                top = cute.arch.fmax(largest[run], self.of_other_half(row_at, largest[run], row, half))
                writes_scale = half == run
            else:
                side, first = half, 8 * run
                top = cute.arch.fmax(largest[0], largest[1])
                writes_scale = run == 0
            exponent = cutlass.max(top.bitcast(Uint32) >> 23, Uint32(30))  # biased; both powers of two are normal numbers
            if writes_scale & (head < self.h_q):
                at = self.piece_of(params, slot, s_idx, head // GROUP, side) + (SCALES + head % GROUP * 4)
                global_tensor(at, Float32, 1)[0] = ((exponent - 14) << 23).bitcast(Float32)
            inverse = factor * ((268 - exponent) << 23).bitcast(Float32)  # O * inverse is in 2 ** 14 ... 2 ** 15
            for u in cutlass.range_constexpr(2):
                group = head_tile * (TILE_M // GROUP) + row // 32 * 2 + u
                if group * GROUP < self.h_q:
                    by_row = [cute.arch.shuffle_sync(inverse, 16 * u + lane // 4 + 8 * r) for r in (0, 1)]
                    piece = self.piece_of(params, slot, s_idx, group, side) + (first * 512 + lane * 16)
                    for i in cutlass.range_constexpr(4):
                        fragment = tmem_load(tmem + (u << 20) + (128 * run + 32 * i), 16, "16x256b")
                        tmem_wait_load()
                        for j in cutlass.range_constexpr(2):
                            words = cute.make_rmem_tensor(4, Uint32)
                            for e in cutlass.range_constexpr(4):
                                c = 8 * j + 2 * e
                                words[e] = fp16_pair(fragment[c] * by_row[e % 2], fragment[c + 1] * by_row[e % 2])
                            cute.autovec_copy(words, global_tensor(piece + (2 * i + j) * 512, Uint32, 4))

    def piece_of(self, params: Params, slot: Int32, s_idx: Int32, group: Int32, side) -> Int64:
        """Address of 16 heads and 256 columns of a piece in scratch."""
        return params.o_partial[Int64(slot), s_idx, group, side, None].iterator.toint()


SparseDecode.kernel.set_name_prefix("mla_sparse_decode_sm100", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: Config, arch: str):
    """Compiles split kernel and combine into one launchable function; fake tensors in, nothing is launched.

    Returns a function of (q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink,
    softmax_scale, metadata, num_splits, scratch, out, lse, max_splits, nonce): shapes as in `Params`, scratch fp32
    [schedule.scratch_size(num_parts, s_q, h_q)], uninitialised, out [b, s_q, h_q, 512] bf16. max_splits: the most pieces that
    a request may be in, 1 saves the combine's launch; nonce is not looked at.
    """
    config.check(problem)
    return jit.build(
        SparseDecode(problem, config), *fake_arguments(problem), jit.fake_stream(), arch=arch, name="sparse_decode"
    )
