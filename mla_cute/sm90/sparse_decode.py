"""Sparse MLA decode on an FP8 KV cache, V3.2 or MODEL1, for Hopper. Figures are V3.2's, for a block of 64 keys.

Three warpgroups in two roles. Products are transposed where that saves traffic: S^T = K Q^T takes K straight from the
registers in which it was dequantised, so that shared memory, one port of 128 B/cycle that all of this competes for, carries
K once (as V) and Q once.

| role    | warps | registers | consumes                            | produces                                            |
|---------|-------|-----------|-------------------------------------|-----------------------------------------------------|
| math    | 0-7   | 160       | P, V, alpha, l, m (p_full); indices | O, 256 columns each, lse; copies of the raw records |
| convert | 8-11  | 184       | raw records (raw_full), Q (q_ready) | V, P, alpha; l and m of a request                   |

 indices -> [math] bulk copies of records, in two parts -> raw ring -> [convert] e4m3 * scale in fp16 -> registers, V
   -> [convert] S^T = K Q^T -> softmax over keys -> P^T
   -> [math 0] O[:, 256:] += P V, at once; [math 1] O[:, :256] += P V, during the next softmax -> out

A CTA owns one partition of the plan (a run of key blocks, perhaps of several requests) for one query token and one tile of
64 heads; or, of a small batch, its share of one request's blocks, in a cluster of CTAs (below). One block (t: key, h: head):
 1. K'[t] = codes * scale / 2^x(t) in fp16, exact up to one rounding (none for scales that are powers of two): x(t), a power
    of two for each key, keeps every value in fp16's range. Rope of V32, which is not of V, is bf16 / 2^x(t)         [convert]
 2. S[t, h] = K'[t] (Q[h] / 16), 36 steps of 16 dims, K' from registers; K' also to shared memory, as V              [convert]
 3. z = S * 16 * 2^x(t) * softmax_scale * log2(e) + x(t)                                                             [convert]
 4. m[h] stays, unless some z - m exceeds 15: then m' = max(m, max z - 7) for all heads, alpha = exp2(m - m')         [convert]
 5. P = exp2(z - m) in fp16 -> shared memory; l = l * alpha + sum over t of P / 2^x(t)                               [convert]
 6. O = alpha * O + P V: the exponents of P and V cancel                                                             [math]
After a request's last block, lse = m ln 2 + ln(l), and O / (l + sink) goes by way of the V it was made of last, as one tile, to
global memory, while convert goes on; the next request's Q is converted by whatever warp is free, mostly convert's. Of a request
in two pieces, each math warpgroup merges its 256 columns in the CTA that ends last: the other one has left its piece in
scratch. Only requests in three or more need the combine kernel.

Small batches (`Config.clustered`, a kernel of its own): a cluster of up to 16 CTAs for each request, query token and tile of
heads, and neither plan nor scratch nor combine. Each CTA leaves its piece of O, in fp16 over a power of two for each head,
where Q was; heads are dealt out too, and each CTA sends each of the others its piece of their heads, by bulk copies into what
was V, and merges its own. 64 KB a CTA at 19 bytes a cycle set the time of it, half of what scratch and combine take. Where a
CTA would have few blocks, three or so, with few heads up to eight, `settle` chooses sparse_decode_small.py.

Why it is built so, in SM cycles measured on an H200 (docs/tuning-sm90.md): the convert warps are the chain that sets the pace,
about 3,800 a block; matrix units are busy 2,176 of them. fp16 takes 19 instructions a token where bf16 takes 43. Records are
released in two parts, because 64 copies take the copy engine 1,500 and memory 1,000 more: the right part is in registers
before the block begins, loaded behind the exponentials of the one before. Math 1's product is held back until convert has
issued its own: the two then share the matrix units with the softmax, not with each other. Code that runs once a request is
cold each time (7 ns an instruction): short loops, and O by TMA rather than by many stores.

Formats differ in three places: MODEL1's rope is a tile of V (fp16 too), its scales come by loads, prepared by math behind the
record, and V32's rope tile comes first. Keys of an extra cache are blocks behind the main ones: only the filling of the raw
ring knows.

Shared memory (bytes): Q 73,728; V three halves of [64 keys, 256] 98,304; P 8,192; raw records 64 x 656 = 41,984; maxima,
sums, sinks, barriers 4.2 K. Sources of the ideas: FlashMLA (plan, split and combine), FlashAttention (online softmax; its 4th
version's threshold for rescaling). Ours: K as the register operand, keys with exponents of their own in fp16, one product
delayed into the softmax, records in two parts.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.memory
from cutlass import (
    BFloat16,
    Boolean,
    Float16,
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint32,
    const_expr,
    cute,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .. import jit
from ..combine import GROUP, HALF, SCALES, Combine, normalise, partials
from ..decode_kernel import (
    LN_2,
    LOG2_E,
    Part,
    PlanReader,
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
from ..validate import Problem
from . import sparse_decode_small as small
from .helpers import (
    add_product,
    add_shared,
    barrier_any,
    bf16_to_fp16,
    bulk_copy_to_peer,
    bulk_copy_to_smem,
    e4m3_to_fp16,
    exchange_gpu,
    fp16_pair,
    fragment_row,
    load_acquire_gpu,
    mul_fp16x2,
    opaque,
    quad_transpose,
    store_matrices,
    store_relaxed_gpu,
    store_to_peer,
)
from .keys import Q_SCALE, KeyConversion, over_keys

INF = float("inf")
TILE_N = 64  # keys of a block
TILE_M = 64  # heads of a CTA: the M of a WGMMA
SW128_COLUMNS = 64  # bf16 columns of one 128-byte swizzle row: the width of a K or Q "tile"
WARPGROUP = 128
V_SLOTS = 3  # halves of V in shared memory: two of a block, and one ahead of math 1, whose product is a block late
P_BITS = 15.0  # P stays below 2 ** 15: it is fp16, normal from 2 ** -14 on
RAISED_BITS = 7.0  # of the largest P when m has just been raised
MERGE_ROUNDS = (1, 1, 2, 2, 2)  # of 8 groups of columns of the other piece: what registers allow
MAX_CLUSTER = 16  # CTAs; more than 8 is up to the device
MAX_PIECE_ROWS = 80  # that a CTA of a cluster receives: pieces times its share of 64 heads, at most 75
# What a call takes beside its longest run of blocks, in the time of one, 2.1 us on an H200: with a plan, the same where no
# request is split, with clusters.
PLANNED, UNSPLIT, CLUSTERED = 6.7, 3.3, 4.7
SMALL_BLOCKS = 8  # that a CTA has at most in the other kernel; with more it gains nothing, by arithmetic
MAX_GRID_Z = 65_535  # of a launch, in CTAs
SMEM_LIMIT = 232_448  # bytes a CTA may ask for on compute capability 9.0


@dataclass(frozen=True)
class Config:
    """Every number that may be tuned. Sizes derived from them are properties; `check` raises with the arithmetic."""

    tile_n: int = 64  # keys of a block; the plan counts in it
    fixed_overhead_blocks: int | None = None  # what the plan charges for beginning a request; None: `schedule.overhead`
    registers: tuple[int, int] = (160, 184)  # each math warpgroup, convert; the pool of 384 threads is 3 * 168
    clustered: bool | None = None  # a cluster of CTAs for each request instead of a plan; None: what is fastest, see `settle`

    def settle(
        self, problem: Problem, b: int, s_q: int, topk: int, extra_topk: int, num_sms: int, max_clusters: Callable[[int], int]
    ) -> tuple["Config | small.Config", int]:
        """(what to compile for such a call, CTAs of a cluster; 0: none, the kernel takes a plan).

        The fastest by measured times: this kernel with a plan, with clusters, or `sparse_decode_small`, unless this Config asks
        for something of this kernel. A cluster serves a request, query token and tile of heads; all must run at once:
        `max_clusters` says how many of a size can.
        """
        tiles, blocks = b * s_q * problem.head_tiles, -(-topk // self.tile_n) + -(-extra_topk // self.tile_n)
        if self.clustered is False or (self.clustered is None and not 0 < tiles <= num_sms):
            return self, 0
        size, longest = 1, blocks  # of the parts; of equally long ones more, as they share the merge
        for more in range(2, min(MAX_CLUSTER, num_sms // max(tiles, 1)) + 1):
            if -(-blocks // more) <= longest and max_clusters(more) >= tiles:
                size, longest = more, -(-blocks // more)
        if self.clustered:
            if b * size > MAX_GRID_Z:
                raise ValueError(
                    f"config: clustered must be None or False for more than {MAX_GRID_Z} requests, got True and b {b}"
                )
            return self, size
        planned = -(-tiles * blocks // num_sms) + (PLANNED if blocks > 1 else UNSPLIT)
        clustered = longest + CLUSTERED if size > 1 else INF
        if self == Config():
            other = small.Config()
            time, of_other = other.fastest(problem, b, s_q, topk, extra_topk, num_sms, max_clusters)
            if time < min(planned, clustered) and blocks <= SMALL_BLOCKS * of_other:
                return other, of_other
        return (replace(self, clustered=True), size) if clustered < planned else (self, 0)

    def kernels(self) -> list["Config | small.Config"]:
        """All that `settle` may choose to compile."""
        own = [self, replace(self, clustered=True)] if self.clustered is None else [self]
        return own + [small.Config()] * (self == Config())

    def num_parts(self, problem: Problem, s_q: int, num_sms: int) -> int:
        """Partitions of the plan: one CTA per SM over head tiles and query tokens, at least one."""
        return max(num_sms // (s_q * problem.head_tiles), 1)

    def raw_pitch(self, fmt: KVFormat) -> int:
        """Bytes of a slot of the raw ring: a record, and behind MODEL1's 7 pairs of fp16 and an exponent (`prepare_scales`).

        An odd multiple of 16: slots 4 apart lie 64 bytes apart modulo 128, so that the 64-byte pieces of two rows fall
        into different banks.
        """
        return (fmt.row_bytes + 32 * (fmt.scale_bytes == 1) + 15) // 32 * 32 + 16

    def smem_bytes(self, fmt: KVFormat) -> int:
        q = TILE_M * fmt.d_qk * 2
        v = V_SLOTS * self.tile_n * HALF * 2
        p = self.tile_n * TILE_M * 2
        raw = self.tile_n * self.raw_pitch(fmt)
        small = 3 * 4 * TILE_M * 4 + 3 * TILE_M * 4 + 76 + 8 * (6 + 8 + 8 + V_SLOTS + 4)
        return q + v + p + raw + small + 1024  # an alignment

    def check(self, problem: Problem) -> None:
        """Raises ValueError naming the field and the arithmetic when this Config cannot run `problem`."""
        check_config("sm90.sparse_decode", self, problem, TILE_N)
        if not isinstance(self.registers, tuple) or [type(r) for r in self.registers] != [int] * 2:
            raise ValueError(f"config: registers must be a tuple of 2 ints, got {self.registers!r}")
        if not isinstance(self.clustered, (bool, type(None))):
            raise ValueError(f"config: clustered must be None, True or False, got {self.clustered!r}")
        pool = 2 * self.registers[0] + self.registers[1]
        if any(r % 8 or not 24 <= r <= 240 for r in self.registers) or pool > 504:
            raise ValueError(
                "config: registers must be multiples of 8 in 24..240, twice the first and the second at most 504, "
                f"got {self.registers}"
            )
        needed = self.smem_bytes(FORMATS[problem.kv_format])
        if needed > SMEM_LIMIT:
            raise ValueError(f"config: shared memory needs {needed} bytes, the limit is {SMEM_LIMIT}")


def default_config(problem: Problem) -> Config:
    """The shipped choice, the same for every head count and format."""
    return Config()


class NamedBarriers(enum.IntEnum):
    """Hardware barriers (0 is sync_threads)."""

    CONVERT = 1  # the 128 threads of convert among themselves
    MERGE = 2  # and 3: the 128 threads of a math warpgroup among themselves; in a cluster 2: all 256 of math


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
    num_splits: cute.Tensor  # [b + 1] int32
    o_partial: cute.Tensor  # [2 * num_parts, s_q, groups of 16 heads, 2, 4096] fp32, in fragment order: see combine.py
    lse_partial: cute.Tensor  # [2 * num_parts, s_q, h_q, 2] fp32, base 2: by math warpgroup; combine reads the first's
    flags: cute.Tensor  # [2 * num_parts, s_q, head tiles, 2] int64: `nonce` once the request in two has a piece there
    nonce: Int64  # another one in every launch: flags begin as they are
    out: cute.Tensor  # [b, s_q, h_q, 512] bf16
    lse: cute.Tensor  # [b, s_q, h_q] fp32, natural log
    scale_log2: Float32  # softmax_scale * log2(e)


class Shared(NamedTuple):
    """Pointers and tensors in shared memory."""

    q_full: cute.Pointer  # [5] two column tiles of Q have arrived (the last: one, of 9)
    q_ready: cute.Pointer  # Q is converted
    q_taken: cute.Pointer  # [2] int32 by parity of the request: how often a warp has asked for rows of Q to convert
    raw_full: cute.Pointer  # [2, 4] a convert warp's 16 records have arrived: their right parts, their left parts
    raw_empty: cute.Pointer  # [2, 4] and are read
    v_empty: cute.Pointer  # [3] a half of V is read
    p_full: cute.Pointer  # [2] by math warpgroup: P, alpha and its half of V may be read
    p_empty: cute.Pointer  # P and alpha are read
    pieces_full: cute.Pointer  # in a cluster: this CTA's share of every piece has arrived
    sQ: cute.Tensor  # [64, d_qk] bf16
    sQ_tiles: cute.Tensor  # the same by column tiles: [64, 64, d_qk / 64]
    sQ16: cute.Tensor  # the same bytes as fp16
    sV: cute.Tensor  # [256, 64, 3]: columns first
    sP: cute.Tensor  # [64 heads, 64 keys]
    sO: cute.Tensor  # [64, 64, 4, 3]: in the bytes of a half of V, half of O on its way out, by column tiles
    raw: cute.Pointer  # [4 warps, 16 records]
    valid: cute.Pointer  # [4] uint32: a bit a record, of the warp's 16
    alpha: cute.Pointer  # [64] fp32: by head, the factor of O before this block
    sums: cute.Pointer  # [4, 64] fp32: a request's l by convert warp and head
    last_top: cute.Pointer  # [64] fp32: and its m
    sink: cute.Pointer  # [64] fp32: by head, base 2; where there are sinks
    record: cute.Pointer  # [8] int32: the partition's record of the plan
    last_pieces: cute.Pointer  # int32: of the partition's last request, in all partitions
    owes: cute.Pointer  # [2] int32 by math warpgroup: a merge of the part's first request is left
    top: cute.Pointer  # [4, 64] fp32: m by head, a copy for each convert warp
    is_raised: cute.Pointer  # uint32: alpha holds something
    exchange: cute.Pointer  # [4, 64] fp32: a block's maxima by warp and head


class Block(NamedTuple):
    """Where math is with its copies: a block of the partition, or past its end (req > end_req)."""

    req: Int32
    block: Int32
    last: Int32  # behind the request's last block in this partition
    length: Int32  # selected tokens of the request in the main cache
    extra_length: Int32  # and in the extra cache


class Ahead(NamedTuple):
    """Registers of convert with the right part of the next block: loaded during the softmax of this one."""

    codes: dict[int, list]  # column tiles 4 to 7: for both of the lane's keys, what `load_codes` returns
    k: list[cute.Tensor]  # K as the register operand, two column tiles; the first one takes V32's rope ahead
    scales: cute.Tensor  # [2, num_scales] pairs of fp16, over 2 ** exponent
    exponents: cute.Tensor  # [2] by key
    valid: cute.Tensor  # [1] the warp's mask of keys to attend


class SparseDecode(KeyConversion, PlanReader):
    """The kernel and its host function, specialised for one (Problem, Config)."""

    def __init__(self, problem: Problem, config: Config):
        self.problem = problem
        self.config = config
        self.h_q = problem.h_q
        self.head_tiles = problem.head_tiles
        self.tile_n = config.tile_n
        self.clustered = config.clustered is True  # else by a plan
        self.fmt = FORMATS[problem.kv_format]
        self.num_tiles = self.fmt.d_qk // SW128_COLUMNS  # column tiles of Q and K, 9 or 8; the last is rope
        self.q_loads = (self.num_tiles + 1) // 2  # two tiles each
        self.v_tiles = self.fmt.d_v // SW128_COLUMNS  # those that are V too: the first 8
        self.raw_pitch = config.raw_pitch(self.fmt)

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
        max_splits: Int32,  # or the CTAs of a cluster
        nonce: Int64,
        stream,
    ):
        mma_qk = cute.make_tiled_mma(  # S^T [64 keys, 64 heads]: K from registers, Q from shared memory
            warpgroup.MmaF16BF16Op(
                Float16, Float32, (self.tile_n, TILE_M, 16), warpgroup.OperandSource.RMEM,
                OperandMajorMode.K, OperandMajorMode.K,
            )
        )  # fmt: skip
        mma_rope = cute.make_tiled_mma(  # the same, of V32's rope, which keeps bf16's range
            warpgroup.MmaF16BF16Op(
                BFloat16, Float32, (self.tile_n, TILE_M, 16), warpgroup.OperandSource.RMEM,
                OperandMajorMode.K, OperandMajorMode.K,
            )
        )  # fmt: skip
        mma_pv = cute.make_tiled_mma(  # O [64 heads, 256]: P^T and V both as they lie, keys outermost
            warpgroup.MmaF16BF16Op(
                Float16, Float32, (TILE_M, HALF, 16), warpgroup.OperandSource.SMEM,
                OperandMajorMode.MN, OperandMajorMode.MN,
            )
        )  # fmt: skip

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        layout_q = cute.tile_to_shape(atom, (TILE_M, self.fmt.d_qk), order=(0, 1))
        layout_q_tiles = cute.tile_to_shape(atom, (TILE_M, SW128_COLUMNS, self.num_tiles), order=(0, 1, 2))
        layout_v = cute.tile_to_shape(atom, (self.tile_n, HALF, V_SLOTS), order=(0, 1, 2))
        layout_p = cute.tile_to_shape(atom, (self.tile_n, TILE_M), order=(0, 1))

        # TMA view with heads and columns first: [h_q, d, s_q, b]; a copy takes a column tile. Rows past h_q read as zero.
        tma_q, tma_mQ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(q.iterator, cute.select(q.layout, mode=[2, 3, 1, 0])),
            cute.select(layout_q_tiles, mode=[0, 1]),
            (TILE_M, SW128_COLUMNS),
        )

        @cute.struct
        class Smem:
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_v)], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_p)], 1024]
            raw: cute.struct.Align[cute.struct.MemRange[Uint8, self.tile_n * self.raw_pitch], 128]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, 4 * TILE_M], 16]
            sums: cute.struct.MemRange[Float32, 4 * TILE_M]
            top: cute.struct.MemRange[Float32, 4 * TILE_M]
            alpha: cute.struct.MemRange[Float32, TILE_M]
            last_top: cute.struct.MemRange[Float32, TILE_M]
            sink: cute.struct.MemRange[Float32, TILE_M]
            q_full: cute.struct.MemRange[Int64, self.q_loads]
            q_ready: cute.struct.MemRange[Int64, 1]
            q_taken: cute.struct.MemRange[Int32, 2]
            is_raised: cute.struct.MemRange[Uint32, 2]
            raw_full: cute.struct.MemRange[Int64, 8]
            raw_empty: cute.struct.MemRange[Int64, 8]
            v_empty: cute.struct.MemRange[Int64, V_SLOTS]
            p_full: cute.struct.MemRange[Int64, 2]
            p_empty: cute.struct.MemRange[Int64, 1]
            valid: cute.struct.MemRange[Uint32, 4]
            record: cute.struct.MemRange[Int32, 8]
            last_pieces: cute.struct.MemRange[Int32, 1]
            owes: cute.struct.MemRange[Int32, 2]
            pieces_full: cute.struct.MemRange[Int64, 1]

        self.Smem = Smem
        # Scratch: the pieces' O, behind them their lse and the flags. One part alone splits nothing and needs none.
        s_q, slots = q.shape[1], 2 * metadata.shape[0]
        o_partial, lse_partial = partials(scratch.iterator, slots, s_q, self.h_q)
        num_lse = Int64(slots) * s_q * self.h_q
        lse_copies = cute.make_tensor(
            lse_partial.iterator, cute.append(lse_partial.layout, cute.make_layout(2, stride=num_lse))
        )
        flags = cute.make_tensor(
            cute.recast_ptr(lse_partial.iterator + 2 * num_lse, dtype=Int64),
            cute.make_layout((slots, s_q, self.head_tiles, 2), stride=(s_q * self.head_tiles * 2, self.head_tiles * 2, 2, 1)),
        )
        params = Params(
            q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink, metadata,
            num_splits, o_partial, lse_copies, flags, nonce, out, lse, softmax_scale * LOG2_E,
        )  # fmt: skip
        # The same of the output: a copy takes 64 columns of a tile of heads; rows past h_q are left out.
        layout_o = cute.tile_to_shape(atom, (TILE_M, SW128_COLUMNS, HALF // SW128_COLUMNS, V_SLOTS), order=(0, 1, 2, 3))
        tma_out, tma_mO = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            cute.make_tensor(out.iterator, cute.select(out.layout, mode=[2, 3, 1, 0])),
            cute.select(layout_o, mode=[0, 1]),
            (TILE_M, SW128_COLUMNS),
        )

        num_parts, cluster = metadata.shape[0], None
        if const_expr(self.clustered):
            num_parts, cluster = q.shape[0] * max_splits, [1, 1, max_splits]
        # Head tiles of one query token are neighbours in the grid, so that the second gather of a record hits L2.
        self.kernel(
            params, mma_qk, mma_rope, mma_pv, tma_q, tma_mQ, tma_out, tma_mO, layout_q, layout_q_tiles, layout_v, layout_o,
            layout_p,
        ).launch(
            grid=[self.head_tiles, q.shape[1], num_parts],
            cluster=cluster,
            block=[3 * WARPGROUP, 1, 1],
            smem=Smem.size_in_bytes(),
            min_blocks_per_mp=1,  # without it ptxas drops setmaxnreg
            use_pdl=self.clustered,
            stream=stream,
        )
        if const_expr(not self.clustered):
            Combine(self.problem).launch(
                metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse, max_splits, stream
            )

    @cute.kernel
    def kernel(
        self,
        params: Params,
        mma_qk: cute.TiledMma,
        mma_rope: cute.TiledMma,
        mma_pv: cute.TiledMma,
        tma_q: cute.CopyAtom,
        tma_mQ: cute.Tensor,
        tma_out: cute.CopyAtom,
        tma_mO: cute.Tensor,
        layout_q: cute.ComposedLayout,
        layout_q_tiles: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_o: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        head_tile, s_idx, part_idx = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tid // WARPGROUP)
        storage = cutlass.memory.SmemAllocator().allocate(self.Smem)
        sKV = storage.sV.get_tensor(layout_v.outer, swizzle=layout_v.inner)  # [64, 256, 3]
        sPT = storage.sP.get_tensor(layout_p.outer, swizzle=layout_p.inner)  # [64 keys, 64 heads]
        shared = Shared(
            storage.q_full.data_ptr(), storage.q_ready.data_ptr(), storage.q_taken.data_ptr(), storage.raw_full.data_ptr(),
            storage.raw_empty.data_ptr(), storage.v_empty.data_ptr(), storage.p_full.data_ptr(), storage.p_empty.data_ptr(),
            storage.pieces_full.data_ptr(), storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner),
            storage.sQ.get_tensor(layout_q_tiles.outer, swizzle=layout_q_tiles.inner),
            storage.sQ.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=Float16),
            cute.make_tensor(sKV.iterator, cute.select(sKV.layout, mode=[1, 0, 2])),
            cute.make_tensor(sPT.iterator, cute.select(sPT.layout, mode=[1, 0])),
            storage.sV.get_tensor(layout_o.outer, swizzle=layout_o.inner, dtype=BFloat16),
            storage.raw.data_ptr(), storage.valid.data_ptr(), storage.alpha.data_ptr(), storage.sums.data_ptr(),
            storage.last_top.data_ptr(), storage.sink.data_ptr(), storage.record.data_ptr(), storage.last_pieces.data_ptr(),
            storage.owes.data_ptr(), storage.top.data_ptr(), storage.is_raised.data_ptr(), storage.exchange.data_ptr(),
        )  # fmt: skip

        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_q)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.q_loads):
                    cute.arch.mbarrier_init(shared.q_full + i, 1)  # the arrive.expect_tx of the Q load
                cute.arch.mbarrier_init(shared.q_ready, 2 * self.num_tiles)  # halves of tiles
                for i in cutlass.range_constexpr(8):
                    cute.arch.mbarrier_init(shared.raw_full + i, 1)  # the arrive.expect_tx of the filling warp
                    cute.arch.mbarrier_init(shared.raw_empty + i, 1)  # the convert warp
                for i in cutlass.range_constexpr(V_SLOTS):
                    cute.arch.mbarrier_init(shared.v_empty + i, 4)  # the warps of the half's math warpgroup
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(shared.p_full + i, 4)  # the convert warps
                cute.arch.mbarrier_init(shared.p_empty, 8)  # the math warps
                if const_expr(self.clustered):
                    cute.arch.mbarrier_init(shared.pieces_full, 1)  # the arrive.expect_tx of math
        if const_expr(self.clustered):
            # A small batch's kernel is short: it is set up while the one ahead of it still runs, and lets the next one.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
            if tid == 0:
                self.deal(params, shared)
        else:
            if tid < 8:
                cute.make_tensor(shared.record, 8)[tid] = params.metadata[part_idx, tid]
        if tid < 2:
            cute.make_tensor(shared.owes, 2)[tid] = Int32(0)
            cute.make_tensor(shared.q_taken, 2)[tid] = Int32(0)
        if const_expr(params.attn_sink is not None):  # noqa: SIM102  one is decided at compile time
            if tid >= 2 * WARPGROUP + TILE_M:  # here, as at a request's end the load would be waited for
                row = tid - (2 * WARPGROUP + TILE_M)
                sink = params.attn_sink[cutlass.min(head_tile * TILE_M + row, self.h_q - 1)]
                cute.make_tensor(shared.sink, TILE_M)[row] = sink * LOG2_E
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # When every CTA has come here, combine's are set up wherever there is room; they read behind the whole grid's end.
        if const_expr(not self.clustered):
            cute.arch.griddepcontrol_launch_dependents()
        if wg < 2:
            set_registers(self.config.registers[0])
            self.math(params, s_idx, head_tile, tid % WARPGROUP, wg, mma_pv, tma_out, tma_mO, shared)
        else:
            set_registers(self.config.registers[1])
            self.convert(params, s_idx, head_tile, tid % WARPGROUP, mma_qk, mma_rope, tma_q, tma_mQ, shared)
            if const_expr(self.clustered):
                cute.arch.cluster_arrive()  # see `merge_in_cluster`
                cute.arch.cluster_wait()
                cute.arch.mbarrier_wait(shared.pieces_full, 0)
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()  # for math too: a CTA ends with its last warp

    @cute.jit
    def deal(self, params: Params, shared: Shared):
        """The record of a CTA of a cluster: its share of the request's blocks, none for the last ones of short requests."""
        _, _, req = cute.arch.cluster_idx()
        blocks, size = Uint32(self.lengths_of(params, req)[3]), Uint32(cute.arch.cluster_size())
        each = (blocks + size - 1) // size
        first = each * Uint32(cute.arch.block_idx_in_cluster())
        record = cute.make_tensor(shared.record, 8)
        record[0], record[1] = req, cutlass.select_(first < blocks, req, req - 1)
        record[2], record[3] = Int32(first), Int32(cutlass.min(first + each, blocks))
        record[4] = Int32((blocks + each - 1) // each)  # pieces

    @cute.jit
    def next_block(self, params: Params, part: Part, ahead: Block) -> Block:
        """The block behind `ahead` in this partition. Only with a new request its lengths are loaded."""
        req, block, last = ahead.req, ahead.block + 1, ahead.last
        length, extra_length = ahead.length, ahead.extra_length
        if block >= last:
            req += 1
            block = Int32(0)
            if req <= part.end_req:
                work = self.work_range(params, part, req)
                last, length, extra_length = work.last_block, work.length, work.extra_length
        return Block(req, block, last, length, extra_length)

    # ---- roles, in the order of the data ----

    @cute.jit
    def math(
        self, params: Params, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32,
        mma_pv: cute.TiledMma, tma_out: cute.CopyAtom, tma_mO: cute.Tensor, shared: Shared,
    ):  # fmt: skip
        """Half of O: warpgroup 0 has the right one, columns 256 on, which convert makes first; warpgroup 1 the left one.

        Consumes P, V, alpha, l, m (p_full); releases V and P. Its warp w also copies one part of the records of convert's
        warp w, two or three blocks ahead of its products.
        """
        lane, w = t % 32, cute.arch.make_warp_uniform(t // 32)
        thr_pv = mma_pv.get_slice(t)
        rP = mma_pv.make_fragment_A(thr_pv.partition_A(shared.sP))  # (MMA, 1, 4): descriptors
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(shared.sV))  # (MMA, 1, 4, 3)
        accO = cute.make_rmem_tensor(thr_pv.partition_shape_C((TILE_M, HALF)), Float32)  # ((2,2,32),1,1)
        row = fragment_row(t)
        sAlpha = cute.make_tensor(shared.alpha, TILE_M)

        part = self.load_part(shared)
        block, last, length, extra_length = Int32(0), Int32(0), Int32(0), Int32(0)
        if part.begin_req <= part.end_req:
            work = self.work_range(params, part, part.begin_req)
            block, last, length, extra_length = work.first_block, work.last_block, work.length, work.extra_length
        ahead = Block(part.begin_req, block, last, length, extra_length)
        index, is_extra = self.load_index(params, part, s_idx, ahead, w, lane)
        ahead, index, is_extra, zeros = self.fill(
            params, shared, part, s_idx, w, half, lane, Int32(0), ahead, index, is_extra, Uint32(0), True
        )
        n, slot = Int32(0), half  # blocks done; the slot of this half of V
        for r in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            self.convert_q(shared, r - part.begin_req, lane)
            # What the end of the last request has left, for now convert can go on; before the first one all that is ahead.
            left = cutlass.select_(r == part.begin_req, 1 + half, Int32(1))
            for i in cutlass.range(n + 2 + half - left, n + 2 + half, unroll=1):
                ahead, index, is_extra, zeros = self.fill(
                    params, shared, part, s_idx, w, half, lane, i, ahead, index, is_extra, zeros
                )
            work = self.work_range(params, part, r)
            first_block, last_block = work.first_block, work.last_block
            accO.fill(0.0)
            for i in cutlass.range(first_block, last_block, unroll=1):
                cute.arch.mbarrier_wait(shared.p_full + half, n & 1)
                if cute.make_tensor(shared.is_raised, 1)[0] != 0:
                    alpha_0, alpha_1 = sAlpha[row], sAlpha[row + 8]
                    for j in cutlass.range_constexpr(cute.size(accO)):
                        accO[j] = accO[j] * (alpha_0, alpha_1)[j // 2 % 2]
                warpgroup.fence()
                mma_pv.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(self.tile_n // 16):
                    cute.gemm(mma_pv, accO, rP[None, None, k], rV[None, None, k, slot], accO)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if i + 1 == last_block:
                    if const_expr(self.clustered):
                        self.release(shared.p_empty)  # convert tells the cluster that V is free
                    else:
                        factor_0, factor_1 = self.finish(params, shared, part, r, s_idx, head_tile, half, t)
                        self.release(shared.p_empty)  # behind it convert may write the next request's sums
                        for j in cutlass.range_constexpr(cute.size(accO)):
                            accO[j] = accO[j] * (factor_0, factor_1)[j // 2 % 2]
                        if r < part.end_req:
                            self.hand_in(params, shared, part, r, s_idx, head_tile, t, half, accO, tma_out, tma_mO, slot)
                        self.release(shared.v_empty + slot)
                else:
                    self.release(shared.v_empty + slot)
                    self.release(shared.p_empty)
                    ahead, index, is_extra, zeros = self.fill(
                        params, shared, part, s_idx, w, half, lane, n + 2 + half, ahead, index, is_extra, zeros
                    )
                n += 1
                slot += 2
                slot = cutlass.select_(slot >= V_SLOTS, slot - V_SLOTS, slot)
        if const_expr(self.clustered):
            self.merge_in_cluster(params, shared, part, s_idx, head_tile, t, half, accO)
        else:
            if part.begin_req <= part.end_req:
                slot = cutlass.select_(slot == V_SLOTS - 1, Int32(0), slot + 1)  # that of the last block
                self.hand_in_last(params, shared, part, s_idx, head_tile, t, half, accO, tma_out, tma_mO, slot)

    @cute.jit
    def load_index(self, params: Params, part: Part, s_idx: Int32, ahead: Block, w: Int32, lane: Int32):
        """Lane l < 16 gets the index of token 16 w + l of the block, -1 past the request's tokens or the partition; and
        whether the block is one of the extra cache."""
        index, is_extra, token = Int32(-1), Boolean(False), ahead.block * self.tile_n + 16 * w + lane
        length, extra_length = ahead.length, ahead.extra_length
        if const_expr(params.topk_length is None):
            length = params.indices.shape[2]
        if const_expr(params.extra_indices is not None and params.extra_topk_length is None):
            extra_length = params.extra_indices.shape[2]
        if ahead.req <= part.end_req:
            if const_expr(params.extra_indices is not None):
                first_extra = self.num_blocks(length)
                is_extra = ahead.block >= first_extra
                if is_extra:
                    token -= first_extra * self.tile_n
                    if (lane < 16) & (token < extra_length):
                        index = params.extra_indices[Int64(ahead.req), s_idx, token]
                elif (lane < 16) & (token < length):
                    index = params.indices[Int64(ahead.req), s_idx, token]
            else:
                if (lane < 16) & (token < length):
                    index = params.indices[Int64(ahead.req), s_idx, token]
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
                cute.autovec_copy(global_tensor(address, Uint32, 2), packed)
                low, high = packed[0], packed[1]
        mask = Uint32(cute.arch.vote_ballot_sync(is_valid))
        return start + Int64(offset) * self.fmt.row_bytes, mask, low, high

    @cute.jit
    def fill(
        self, params: Params, shared: Shared, part: Part, s_idx: Int32, w: Int32, half: Int32, lane: Int32, count: Int32,
        ahead: Block, index: Int32, is_extra: Boolean, zeros: Uint32, is_first: cutlass.Constexpr = False,
    ):  # fmt: skip
        """The `count`-th block, if the partition has it: copies its records for convert's warp w; the indices of the next."""
        if ahead.req <= part.end_req:
            src, mask, low, high = self.resolve(params, index, is_extra)
            if const_expr(is_first):
                self.copy_records(shared, w, half, lane, count, src, mask, zeros, low, high)
            ahead = self.next_block(params, part, ahead)
            index, is_extra = self.load_index(params, part, s_idx, ahead, w, lane)
            if const_expr(not is_first):  # which may wait for room: the indices come meanwhile
                self.copy_records(shared, w, half, lane, count, src, mask, zeros, low, high)
            zeros = ~mask & 0xFFFF
        return ahead, index, is_extra, zeros

    @cute.jit
    def copy_records(
        self, shared: Shared, w: Int32, half: Int32, lane: Int32, count: Int32, src: Int64, mask: Uint32, zeros: Uint32,
        low: Uint32, high: Uint32,
    ):  # fmt: skip
        """Starts the copies of one part of 16 records, when convert's warp w has read what was there.

        Part 0, the columns from 256 on with rope and scales, is read first and refilled first: by warpgroup 1, which has
        nothing else to do then. Row r lies in slot r / 2 % 4 + 4 (r % 2) + 8 (r / 8). A skipped token's slot is filled with
        zeros, unless it still is (bit in `zeros`): its P is 0, and 0 * NaN must not reach O.
        """
        piece = 1 - half
        cute.arch.mbarrier_wait(shared.raw_empty + (4 * piece + w), (count & 1) ^ 1)
        full = shared.raw_full + (4 * piece + w)
        first = Int32(shared.raw.toint()) + 16 * w * self.raw_pitch
        start = cutlass.select_(piece == 0, Int32(HALF), Int32(0))
        size = cutlass.select_(piece == 0, Int32(self.fmt.row_bytes - HALF), Int32(HALF))
        slot = lane // 2 % 4 + 4 * (lane & 1) + lane // 8 * 8
        to_clear = ~(mask | zeros) & 0xFFFF
        if to_clear != 0:
            for i in cutlass.range(16, unroll=1):
                if (to_clear >> i) & 1 == 1:
                    zero = cute.make_rmem_tensor(4, Uint32)
                    zero.fill(0)
                    record = first + (i // 2 % 4 + 4 * (i & 1) + i // 8 * 8) * self.raw_pitch + start
                    for j in cutlass.range(lane, size // 16, 32, unroll=1):
                        store_smem_16b(record + j * 16, zero)
            cute.arch.fence_proxy("async.shared", space="cta")  # zeros before a later fill's copy into the slot
        if (mask >> lane) & 1 == 1:
            bulk_copy_to_smem(first + slot * self.raw_pitch + start, src + start, size, Int32(full.toint()))
        if const_expr(self.fmt.scale_bytes == 1):  # noqa: SIM102  one is decided at compile time
            if (lane < 16) & (piece == 0):
                scales = self.prepare_scales(low, high)
                for i in cutlass.range_constexpr(2):
                    words = cute.make_tensor(scales.iterator + 4 * i, 4)
                    store_smem_16b(first + slot * self.raw_pitch + self.fmt.row_bytes + 16 * i, words)
        cute.arch.sync_warp()  # every lane's stores before the arrival
        if lane == 0:
            if piece == 0:
                cute.make_tensor(shared.valid, 4)[w] = mask
            cute.arch.mbarrier_arrive_and_expect_tx(full, Int32(cute.arch.popc(mask)) * size)

    @cute.jit
    def convert(
        self, params: Params, s_idx: Int32, head_tile: Int32, t: Int32, mma_qk: cute.TiledMma,
        mma_rope: cute.TiledMma, tma_q: cute.CopyAtom, tma_mQ: cute.Tensor, shared: Shared,
    ):  # fmt: skip
        """K in fp16: into registers for S^T = K Q^T, into shared memory as V; softmax over keys.

        Consumes the raw records (raw_full), Q (q_ready); waits for v_empty and p_empty. Produces V, P, alpha and, of a request,
        l and m (p_full). Warp w owns keys 16w..16w+15 of a block, a lane columns 16 pc..16 pc + 15 of each tile of keys g
        and g + 8.
        """
        lane, w = cute.arch.lane_idx(), cute.arch.make_warp_uniform(t // 32)
        g, pc = lane // 4, lane % 4
        thr_qk = mma_qk.get_slice(t)
        rQ = mma_qk.make_fragment_B(thr_qk.partition_B(shared.sQ16))  # (MMA, 1, 4 * num_tiles): descriptors
        rQ_rope = mma_rope.make_fragment_B(mma_rope.get_slice(t).partition_B(shared.sQ))
        accS = cute.make_rmem_tensor(thr_qk.partition_shape_C((self.tile_n, TILE_M)), Float32)  # ((2,2,8),1,1)
        sPT = cute.make_tensor(shared.sP.iterator, cute.select(shared.sP.layout, mode=[1, 0]))  # [keys, heads]
        copy_p = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), Float16), mma_qk
        ).get_slice(t)
        rP = cute.make_rmem_tensor(accS.layout, Float16)
        ahead = self.make_ahead()
        exchange = Int32(shared.exchange.toint())
        top_warp = self.of_warp(Int32(shared.top.toint()), w)
        top = cute.make_rmem_tensor(16, Float32)  # base 2, of heads 8 j + 2 pc + e at 2 j + e, as row_sum
        row_sum = cute.make_rmem_tensor(16, Float32)  # of heads 8 j + 2 pc + e at 2 j + e, over this lane's keys

        part = self.load_part(shared)
        last_pieces = Int32(0)
        if part.begin_req <= part.end_req:
            self.load_q(part.begin_req, s_idx, head_tile, w, tma_q, tma_mQ, shared)
            if const_expr(not self.clustered):
                last_pieces = params.num_splits[part.end_req + 1] - params.num_splits[part.end_req]
        zero = Uint32(params.metadata.shape[0]) >> 31  # which the compiler does not know
        n, v_slot, v_phase = Int32(0), Int32(0), Int32(1)
        for req in cutlass.range(part.begin_req, part.end_req + 1, unroll=1):
            work = self.work_range(params, part, req)
            first_block, last_block = work.first_block, work.last_block
            # Finite: -inf - -inf is NaN.
            self.store_pair(top_warp, lane, (Float32(-1e30), Float32(-1e30)))
            self.convert_q(shared, req - part.begin_req, lane)
            cute.arch.mbarrier_wait(shared.q_ready, (req - part.begin_req) & 1)
            if req == part.begin_req:
                cute.arch.mbarrier_wait(shared.raw_full + w, 0)
                loaded = self.load_ahead(shared, ahead, w, lane)
                self.cover_rope(ahead)
                self.release_raw(shared.raw_empty + w, lane, loaded, zero)
                if const_expr(not self.clustered):  # noqa: SIM102  one is decided at compile time
                    if t == 0:  # has arrived meanwhile; p_full makes it visible to math
                        cute.make_tensor(shared.last_pieces, 1)[0] = last_pieces
            row_sum.fill(0.0)
            for block in cutlass.range(first_block, last_block, unroll=1):
                if (block + 1 == last_block) & (req < part.end_req):
                    self.prefetch_q(req + 1, s_idx, head_tile, w, tma_q, tma_mQ, shared)
                v_slot, v_phase = self.scores(
                    shared, mma_qk, mma_rope, rQ, rQ_rope, accS, ahead, w, lane, v_slot, v_phase, n & 1, block > first_block,
                    block < first_block + 2, zero,
                )  # fmt: skip
                exponents = (ahead.exponents[0], ahead.exponents[1])
                valid = ahead.valid[0]
                for j in cutlass.range_constexpr(8):  # while the last products run
                    pair = smem_tensor(top_warp + (8 * j + 2 * pc) * 4, Float32, 2)
                    top[2 * j], top[2 * j + 1] = pair[0], pair[1]
                warpgroup.wait_group(0)
                # accS -> base-2 logits plus the exponent of the key: V is smaller by just that.
                for i in cutlass.range_constexpr(cute.size(accS)):
                    r = i // 2 % 2
                    power = (exponents[r] << 23).bitcast(Float32)
                    accS[i] = accS[i] * (power * (params.scale_log2 * Q_SCALE)) + (Float32(Int32(exponents[r])) - 127.0)

                # Masked by select and after the product: adding -inf to a NaN would stay NaN.
                if valid != 0xFFFF:
                    for i in cutlass.range_constexpr(cute.size(accS)):
                        key = g + 8 * (i // 2 % 2)  # element e + 2 r + 4 j: key g + 8 r, head 8 j + 2 pc + e
                        accS[i] = cutlass.select_((valid >> key) & 1 == 1, accS[i], Float32(-INF))
                # m is raised only when some P would exceed 2 ** 15; then to 7 below the maximum, for all heads.
                excess = Float32(-INF)
                for j in cutlass.range_constexpr(8):
                    for e in cutlass.range_constexpr(2):
                        i = 2 * j + e
                        excess = cute.arch.fmax(excess, cute.arch.fmax(accS[4 * j + e], accS[4 * j + 2 + e]) - top[i])
                is_raised = barrier_any(NamedBarriers.CONVERT, WARPGROUP, excess > P_BITS)
                if (block + 1 == last_block) & (req < part.end_req):  # all four warps are done with Q
                    self.load_q(req + 1, s_idx, head_tile, w, tma_q, tma_mQ, shared)
                if is_raised != 0:
                    self.raise_maxima(shared, accS, top, row_sum, top_warp, exchange, w, lane, n)
                has_next = (block + 1 < last_block) | (req < part.end_req)
                self.wait_if(shared.raw_full + w, (n & 1) ^ 1, has_next)
                loaded = self.load_ahead(shared, ahead, w, lane)  # without a next block of what is left there
                for i in cutlass.range_constexpr(16):
                    j, e = i // 2, i % 2
                    for r in cutlass.range_constexpr(2):
                        p = cute.math.exp2(accS[4 * j + 2 * r + e] - top[i], fastmath=True)
                        accS[4 * j + 2 * r + e] = p
                        row_sum[i] = row_sum[i] + p * ((254 - exponents[r]) << 23).bitcast(Float32)
                rP.store(accS.load().to(Float16))
                if has_next:
                    self.release_raw(shared.raw_empty + w, lane, loaded, zero)
                self.cover_rope(ahead)
                cute.arch.mbarrier_wait(shared.p_empty, (n & 1) ^ 1)
                if (w == 0) & (lane == 0):
                    cute.make_tensor(shared.is_raised, 1)[0] = is_raised
                cute.copy(copy_p, copy_p.retile(rP), copy_p.partition_D(sPT))
                if block + 1 == last_block:
                    sums = self.of_warp(Int32(shared.sums.toint()), w)
                    self.store_pair(sums, lane, over_keys([row_sum[i] for i in range(16)], lane, lambda a, b: a + b))
                    if w == 0:
                        self.store_pair(Int32(shared.last_top.toint()), lane, self.load_pair(top_warp, lane))
                cute.arch.fence_proxy("async.shared", space="cta")  # V and P become visible to the products of math
                self.release(shared.p_full)
                if block + 1 == last_block:
                    self.release(shared.p_full + 1)
                n += 1
        if const_expr(self.clustered):
            cute.arch.mbarrier_wait(shared.p_empty, (n & 1) ^ 1)  # math is done with V

    # ---- steps of convert ----

    def make_ahead(self) -> Ahead:
        tiles = range(self.v_tiles // 2, self.v_tiles)
        is_rope = [tile * SW128_COLUMNS >= self.fmt.d_nope for tile in tiles]
        return Ahead(
            {t: [[cute.make_rmem_tensor(4, Uint32) for _ in range(1 + r)] for _ in (0, 1)] for t, r in zip(tiles, is_rope)},
            [cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 4)), Float16) for _ in (0, 1)],
            cute.make_rmem_tensor((2, self.fmt.num_scales), Uint32),
            cute.make_rmem_tensor(2, Uint32),
            cute.make_rmem_tensor(1, Uint32),
        )

    def records(self, shared: Shared, w: Int32, lane: Int32) -> tuple[Int32, Int32]:
        """Shared addresses of the raw records of lane 4 g + pc: keys g and g + 8 of the warp's 16."""
        g = lane // 4
        record = Int32(shared.raw.toint()) + (16 * w + g // 2 + 4 * (g & 1)) * self.raw_pitch
        return record, record + 8 * self.raw_pitch

    def load_ahead(self, shared: Shared, ahead: Ahead, w: Int32, lane: Int32) -> Uint32:
        """The right part of a block's records into registers: codes, scales, V32's rope as K. Returns a word that depends on
        every load."""
        pc = lane % 4
        words = []
        ahead.valid[0] = cute.make_tensor(shared.valid, 4)[w]
        for r, record in enumerate(self.records(shared, w, lane)):
            rope = self.load_codes(record, self.num_tiles - 1, pc)
            raw_scales = self.load_scales(record)
            for tile, codes in ahead.codes.items():
                loads = rope if tile == self.num_tiles - 1 else self.load_codes(record, tile, pc)
                for to, load in zip(codes[r], loads):
                    to.store(load.load())
                words += [load[3] for load in loads]
            words += [load[3] for load in [*rope, *raw_scales]]
            scales, ahead.exponents[r] = self.scales_of(raw_scales)
            for i, scale in enumerate(scales):
                ahead.scales[r, i] = scale
            if self.num_tiles > self.v_tiles:
                self.to_fragment(ahead.k[0], r, self.rope_to_bf16(rope, ahead.exponents[r]))
        every = ahead.valid[0]
        for word in words:
            every = every | word
        return every

    def scores(
        self, shared: Shared, mma_qk: cute.TiledMma, mma_rope: cute.TiledMma, rQ: cute.Tensor, rQ_rope: cute.Tensor,
        accS: cute.Tensor, ahead: Ahead, w: Int32, lane: Int32, v_slot: Int32, v_phase: Int32, raw_phase: Int32,
        has_waiting: Boolean, is_early: Boolean, zero: Uint32,
    ):  # fmt: skip
        """Starts accS = K Q^T for the block's 64 keys, and V: tile by tile of 64 columns, converted, stored, multiplied.

        is_early: of the request's first two blocks. The right tiles lie in registers (`ahead`), the left ones are loaded two
        tiles ahead. Lane 4 g + pc has 16 columns of each tile of its two keys. Whole at trace time.
        """
        g, pc = lane // 4, lane % 4
        tile_bytes = self.tile_n * SW128_COLUMNS * 2
        v_row = Int32(shared.sV.iterator.toint()) + (16 * w + g) * 128
        stored = self.v_tiles
        right, left = range(stored // 2, stored), range(stored // 2)
        order = [*range(stored, self.num_tiles), *right, *left]  # V32's rope, which is not of V, first
        codes = dict(ahead.codes)
        exponents = [ahead.exponents[r] for r in (0, 1)]

        for i, tile in enumerate(order):
            is_stored = tile < stored
            if tile == right[0]:
                # Else math 1, which had this slot with block n - 2, has released P behind it, and for that this warp has
                # waited in block n - 1. But with a request's last block P is released first, and then the slot takes O.
                self.wait_if(shared.v_empty + v_slot, v_phase, is_early)
            if tile == left[0]:
                cute.arch.mbarrier_wait(shared.v_empty + v_slot, v_phase)
            for next_tile in [t for t in order[i : i + 3] if t not in codes and t in left]:
                if next_tile == left[0]:
                    cute.arch.mbarrier_wait(shared.raw_full + (4 + w), raw_phase)
                codes[next_tile] = [self.load_codes(r, next_tile, pc) for r in self.records(shared, w, lane)]
                if next_tile == left[-1]:
                    loaded = codes[next_tile][0][0][3] | codes[next_tile][1][0][3]
            if i >= 2:
                warpgroup.wait_group(1)  # the tile before the last one: its registers are free
            fragment = ahead.k[i % 2]
            if is_stored:
                v_tile = v_row + v_slot * (self.tile_n * HALF * 2) + tile % 4 * tile_bytes
                chunks = (2 * pc, 2 * pc + 1) if tile * SW128_COLUMNS < self.fmt.d_nope else (pc, pc + 4)
                for r in (0, 1):
                    k = self.to_fp16(codes[tile][r], ahead.scales, r, exponents[r], tile)
                    self.to_fragment(fragment, r, k)
                    for part in (0, 1):  # the row's 16-byte chunk j lies at j ^ (row % 8)
                        words = cute.make_tensor(k.iterator + 4 * part, 4)
                        store_smem_16b(v_tile + r * 1024 + ((chunks[part] ^ g) * 16), words)
            warpgroup.fence()
            for s in range(4):
                if is_stored:
                    mma_qk.set(warpgroup.Field.ACCUMULATE, i + s > 0)
                    cute.gemm(mma_qk, accS, fragment[None, None, s], rQ[None, None, 4 * tile + s], accS)
                else:
                    mma_rope.set(warpgroup.Field.ACCUMULATE, s > 0)
                    a = cute.recast_tensor(fragment, BFloat16)
                    cute.gemm(mma_rope, accS, a[None, None, s], rQ_rope[None, None, 4 * tile + s], accS)
            warpgroup.commit_group()
            if i == len(order) - 1:
                self.release_if(shared.p_full + 1, has_waiting)
            if tile == left[-3]:
                self.release_raw(shared.raw_empty + (4 + w), lane, loaded, zero)
            if is_stored and tile % 4 == 3:
                v_slot += 1
                wraps = v_slot == V_SLOTS
                v_slot = cutlass.select_(wraps, Int32(0), v_slot)
                v_phase = cutlass.select_(wraps, v_phase ^ 1, v_phase)
        return v_slot, v_phase

    def load_codes(self, record: Int32, tile: int, pc: Int32) -> list[cute.Tensor]:
        """A lane's part of column tile `tile` of a record: 16 codes, or of rope 8 values and the 8 that lie 32 further."""
        if tile * SW128_COLUMNS < self.fmt.d_nope:
            return [load_smem_16b(record + self.fmt.nope_offset + tile * SW128_COLUMNS + pc * 16)]
        return [load_smem_16b(record + self.fmt.rope_offset + 64 * i + pc * 16) for i in (0, 1)]

    def load_scales(self, record: Int32) -> list[cute.Tensor]:
        """A record's scales as they lie in shared memory: V32's 4 fp32, or what `prepare_scales` has made of MODEL1's."""
        if self.fmt.scale_bytes == 4:
            return [load_smem_16b(record + self.fmt.scale_offset)]
        return [load_smem_16b(record + self.fmt.row_bytes + 16 * i) for i in (0, 1)]

    def prepare_scales(self, low: Uint32, high: Uint32) -> cute.Tensor:
        """MODEL1's scales (bytes of e8m0) over 2 ** (exponent - 127), as 7 pairs of fp16; then that exponent.

        Powers of two from 2 ** -24 on, exactly; smaller ones are 0.
        """
        fields = [((low, high)[i // 4] >> (8 * (i % 4))) & 255 for i in range(self.fmt.num_scales)]
        exponent = self.exponent_of(fields)
        words = cute.make_rmem_tensor(8, Uint32)
        for i, field in enumerate(fields):
            words[i] = self.fp16_scale(field, exponent)
        words[7] = exponent
        return words

    def scales_of(self, raw: list[cute.Tensor]):
        """Scales of a key's quantisation tiles over 2 ** (exponent - 127), each as a pair of fp16; and that exponent."""
        if self.fmt.scale_bytes == 4:
            words = raw[0]
            exponent = self.exponent_of([(words[i] & 0x7FFFFFFF) >> 23 for i in range(4)])
            inverse = ((254 - exponent) << 23).bitcast(Float32)
            return [fp16_pair(words[i].bitcast(Float32) * inverse) for i in range(4)], exponent
        return [raw[i // 4][i % 4] for i in range(7)], raw[1][3]

    def cover_rope(self, ahead: Ahead):
        """MODEL1, whose rope is part of V: its values must stay in fp16's range too."""
        if self.num_tiles > self.v_tiles:
            return
        for r in (0, 1):
            words = [half[i] for half in ahead.codes[self.v_tiles - 1][r] for i in range(4)]
            self.raise_exponent(ahead.exponents, ahead.scales, r, words)

    @cute.jit
    def raise_exponent(self, exponents: cute.Tensor, scales: cute.Tensor, r: cutlass.Constexpr, words: list):
        """Raises key r's exponent until its rope / 2 ** (exponent - 127) stays below 2 ** 16, and lowers its scales: a bound
        first, the maximum where it fails."""
        every = Uint32(0)
        for word in words:
            every = every | word
        bound = ((every | (every << 16)) >> 23) & 255  # an exponent at least as large as each of them
        if cute.arch.vote_any_sync(bound > exponents[r] + 15):
            exponent = cutlass.max(exponents[r], self.rope_exponent(words))
            by = exponent - exponents[r]
            exponents[r] = exponent
            for part in cutlass.range_constexpr(2):  # in two steps, of 2 ** -24 at least: fp16's least number
                factor = fp16_pair(((127 - cutlass.min((by + part) // 2, Uint32(25))) << 23).bitcast(Float32))
                for i in cutlass.range_constexpr(self.fmt.num_scales):
                    scales[r, i] = mul_fp16x2(scales[r, i], factor)

    def to_fp16(self, codes: list[cute.Tensor], scales: cute.Tensor, r: int, exponent: Uint32, tile: int) -> cute.Tensor:
        """Registers [8] of fp16 pairs of key r, over 2 ** (exponent - 127), from what `load_codes` returns."""
        if len(codes) == 1:
            return e4m3_to_fp16(codes[0], scales[r, tile * SW128_COLUMNS // self.fmt.quant_tile])
        words = cute.make_rmem_tensor(8, Uint32)
        for i, pair in enumerate(self.rope_to_bf16(codes, exponent)):
            words[i] = pair
        bf16_to_fp16(words, words)
        return words

    @cute.jit
    def wait_if(self, barrier: cute.Pointer, phase: Int32, condition: Boolean):
        if condition:
            cute.arch.mbarrier_wait(barrier, phase)

    @cute.jit
    def release_if(self, barrier: cute.Pointer, condition: Boolean):
        """The second math warpgroup's products with the last block's V: they fill the matrix units during the softmax."""
        if condition:
            self.release(barrier)

    @cute.jit
    def release_raw(self, barrier: cute.Pointer, lane: Int32, last: Uint32, zero: Uint32):
        """The warp's records are in registers. `last` was loaded last: the address depends on it (by nothing, `zero` is 0 at
        run time), because an arrival alone does not wait for loads that are still queued."""
        cute.arch.sync_warp()
        if lane == 0:
            address = Int32(barrier.toint()) + Int32(last & zero)
            cute.arch.mbarrier_arrive(cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8))

    def maxima_of_all(self, buffer: Int32, lane: Int32):
        """[2] of heads 2 lane, 2 lane + 1: the largest of the four warps'."""
        total = None
        for i in range(4):
            values = self.load_pair(self.of_warp(buffer, i), lane)
            pair = (values[0], values[1])
            total = pair if total is None else tuple(cute.arch.fmax(a, b) for a, b in zip(total, pair))
        return total

    def of_warp(self, array: Int32, w) -> Int32:
        """Where a convert warp's part of an array [4, 64] of fp32 begins."""
        return array + w * (TILE_M * 4)

    def store_pair(self, array: Int32, lane: Int32, pair):
        """[2] of heads 2 lane, 2 lane + 1 into an array [64] of fp32."""
        values = cute.make_rmem_tensor(2, Float32)
        values[0], values[1] = pair[0], pair[1]
        cute.autovec_copy(values, smem_tensor(array + lane * 8, Float32, 2))

    def load_pair(self, array: Int32, lane: Int32):
        values = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(smem_tensor(array + lane * 8, Float32, 2), values)
        return values

    @cute.jit
    def raise_maxima(
        self, shared: Shared, accS: cute.Tensor, top: cute.Tensor, row_sum: cute.Tensor, top_warp: Int32,
        exchange: Int32, w: Int32, lane: Int32, n: Int32,
    ):  # fmt: skip
        """New m of all heads into `top` and the warp's copy of it; sums and (by way of alpha) O follow."""
        pc = lane % 4
        maxima = cute.make_rmem_tensor(16, Float32)
        for i in cutlass.range_constexpr(16):
            j, e = i // 2, i % 2
            maxima[i] = cute.arch.fmax(accS[4 * j + e], accS[4 * j + 2 + e])
        self.store_pair(self.of_warp(exchange, w), lane, over_keys([maxima[i] for i in range(16)], lane, cute.arch.fmax))
        cute.arch.barrier(barrier_id=NamedBarriers.CONVERT, number_of_threads=WARPGROUP)
        block_max = self.maxima_of_all(exchange, lane)
        old = self.load_pair(top_warp, lane)
        new, alpha = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for e in cutlass.range_constexpr(2):
            new[e] = cute.arch.fmax(old[e], block_max[e] - RAISED_BITS)
            alpha[e] = cute.math.exp2(old[e] - new[e], fastmath=True)
        cute.arch.sync_warp()  # every lane has read the old ones
        self.store_pair(top_warp, lane, new)
        if w == 0:
            cute.arch.mbarrier_wait(shared.p_empty, (n & 1) ^ 1)
            self.store_pair(Int32(shared.alpha.toint()), lane, alpha)
        for i in cutlass.range_constexpr(16):  # lane 4 j + pc has heads 8 j + 2 pc and the next
            top[i] = cute.arch.shuffle_sync(new[i % 2], 4 * (i // 2) + pc)
            row_sum[i] = row_sum[i] * cute.arch.shuffle_sync(alpha[i % 2], 4 * (i // 2) + pc)
        cute.arch.sync_warp()  # the new ones before the next block's loads

    def partition_q(
        self, req: Int32, s_idx: Int32, head_tile: Int32, tma_q: cute.CopyAtom, tma_mQ: cute.Tensor, shared: Shared
    ):  # fmt: skip
        """Q of a request as TMA copies take it, a column tile each: (shared, global), tiles last."""
        gQ = cute.local_tile(tma_mQ[None, None, s_idx, req], (TILE_M, SW128_COLUMNS), (head_tile, None))
        return cpasync.tma_partition(
            tma_q, 0, cute.make_layout(1), cute.group_modes(shared.sQ_tiles, 0, 2), cute.group_modes(gQ, 0, 2)
        )

    @cute.jit
    def load_q(
        self, req: Int32, s_idx: Int32, head_tile: Int32, w: Int32, tma_q: cute.CopyAtom, tma_mQ: cute.Tensor,
        shared: Shared,
    ):  # fmt: skip
        """TMA load of Q [64, d_qk] by the first warp of the calling warpgroup."""
        if w == 0:
            tQsQ, tQgQ = self.partition_q(req, s_idx, head_tile, tma_q, tma_mQ, shared)
            for i in cutlass.range(self.q_loads, unroll=1):  # rolled, as code that runs once a request is cold
                tiles = cutlass.min(2, self.num_tiles - 2 * i)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full + i, tiles * (TILE_M * SW128_COLUMNS * 2))
                for tile in cutlass.range(2 * i, 2 * i + tiles, unroll=1):
                    cute.copy(tma_q, tQgQ[None, tile], tQsQ[None, tile], tma_bar_ptr=shared.q_full + i)

    @cute.jit
    def prefetch_q(
        self, req: Int32, s_idx: Int32, head_tile: Int32, w: Int32, tma_q: cute.CopyAtom, tma_mQ: cute.Tensor,
        shared: Shared,
    ):  # fmt: skip
        """Q of a later request into L2."""
        if w == 0:
            _, tQgQ = self.partition_q(req, s_idx, head_tile, tma_q, tma_mQ, shared)
            with cute.arch.elect_one():  # unlike a copy it does not elect by itself
                for tile in cutlass.range(self.num_tiles, unroll=1):
                    cute.prefetch(tma_q, tQgQ[None, tile])

    @cute.jit
    def convert_q(self, shared: Shared, k: Int32, lane: Int32):
        """Q / Q_SCALE in fp16 (V32's rope stays bf16), columns in the order of K's in its registers; in place, 32 rows of a
        tile at a time, by whatever warp is free: at the part's first request (k = 0) all are, later math still stores O.

        Numbers are given out by a counter: with each request that uses it, it goes up by these units and once more for each
        of the 12 warps, which find nothing left. There are two, as a warp of math may come late: when convert needs the same
        one again, two requests on, all of math has asked it for the last time, or P would not have been free since.

        The order of the columns is `query_words`'.
        """
        phase, units = k & 1, 2 * self.num_tiles
        taken, first = shared.q_taken + phase, k // 2 * (units + 3 * WARPGROUP // 32)
        unit = self.take(taken, lane) - first
        while unit < units:
            tile = unit // 2
            is_rope, swizzle = tile == self.num_tiles - 1, lane & 7
            address = Int32(shared.sQ.iterator.toint()) + unit * (TILE_M // 2 * 128) + lane * 128
            cute.arch.mbarrier_wait(shared.q_full + tile // 2, phase)
            chunks = []  # [2 i + j]: that of 8 columns for k-steps 2 i, 2 i + 1 and lane j
            for i in (0, 1):
                for j in (0, 1, 2, 3):
                    c = cutlass.select_(is_rope, Int32(4 * i + j), Int32(2 * j + i))
                    chunks.append(load_smem_16b(address + ((c ^ swizzle) * 16)))
            is_bf16 = is_rope if self.num_tiles > self.v_tiles else False
            for s in (0, 1, 2, 3):
                for h in (0, 1):
                    words = self.query_words(chunks[s // 2 * 4 : s // 2 * 4 + 4], 2 * (s % 2) + h, is_bf16)
                    store_smem_16b(address + (((2 * s + h) ^ swizzle) * 16), words)
            cute.arch.fence_proxy("async.shared", space="cta")  # Q's generic stores become visible to WGMMA
            self.release(shared.q_ready)
            unit = self.take(taken, lane) - first

    @cute.jit
    def take(self, counter: cute.Pointer, lane: Int32) -> Int32:
        """The next number of a counter in shared memory, for the warp."""
        number = Int32(0)
        if lane == 0:
            number = add_shared(Int32(counter.toint()), Int32(1))
        return cute.arch.shuffle_sync(number, 0)

    # ---- steps of math ----

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """One arrival a warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def finish(
        self, params: Params, shared: Shared, part: Part, req: Int32, s_idx: Int32, head_tile: Int32, half: Int32, t: Int32,
    ):  # fmt: skip
        """lse (natural log, or base 2 for a piece) and, for this thread's rows, the factors that turn O into the output.

        Nothing attended: factor 0, lse +inf (a piece: -inf). The sink counts once: here for a whole request, in the merge
        for a split one.
        """
        is_split, slot = Boolean(True), Int32(0)
        if const_expr(not self.clustered):
            is_split, slot = self.split_of(part, req)
        factor = [Float32(0), Float32(0)]
        for r in cutlass.range_constexpr(2):
            row = fragment_row(t) + 8 * r
            head = head_tile * TILE_M + row
            total, top = Float32(0), cute.make_tensor(shared.last_top, TILE_M)[row]
            for i in cutlass.range_constexpr(4):
                total += cute.make_tensor(shared.sums, 4 * TILE_M)[i * TILE_M + row]
            # As log2(1) + the maximum, rather than the difference of two larger numbers.
            lse_log2 = cute.math.log2(total * 2.0**-RAISED_BITS, fastmath=True) + (top + RAISED_BITS)
            denominator = total
            if const_expr(params.attn_sink is not None):
                sink_log2 = cute.make_tensor(shared.sink, TILE_M)[row]
                sink = cute.math.exp2(sink_log2 - top, fastmath=True)
                denominator += cutlass.select_(is_split, Float32(0), sink)
            is_empty = total == 0.0
            factor[r] = cutlass.select_(is_empty, Float32(0), cute.arch.rcp_approx(denominator))
            if const_expr(self.clustered):
                to = smem_tensor(Int32(shared.exchange.toint()) + row * 16 + 8, Float32, 1)
                if (half == 0) & (t % 4 == 0):
                    to[0] = cutlass.select_(is_empty, Float32(-INF), lse_log2)
            elif (head < self.h_q) & (t % 4 == 0):
                if is_split:  # by both warpgroups: each one's flag stands for its copy
                    params.lse_partial[Int64(slot), s_idx, head, half] = cutlass.select_(is_empty, Float32(-INF), lse_log2)
                elif half == 0:
                    params.lse[Int64(req), s_idx, head] = cutlass.select_(is_empty, Float32(INF), lse_log2 * LN_2)
        return factor[0], factor[1]

    # In a cluster the heads are dealt out too: every CTA sends each of the others its piece of their heads, and merges its own.

    @cute.jit
    def merge_in_cluster(
        self, params: Params, shared: Shared, part: Part, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32,
        accO: cute.Tensor,
    ):  # fmt: skip
        """out and lse of this CTA's share of the heads, from the pieces of all.

        Pieces arrive where V was: not before every CTA of the cluster is done with its V (the first cluster barrier). None may
        end before what it has sent has arrived (the second one). A release costs a thousand cycles, so convert's warps, which
        have time, make it for math too: p_empty and pieces_full tell them when.
        """
        size, rank = Uint32(cute.arch.cluster_size()), Uint32(cute.arch.block_idx_in_cluster())
        heads = Uint32(cutlass.min(self.h_q - head_tile * TILE_M, Int32(TILE_M)))
        rows = (heads + size - 1) // size  # of a CTA; fewer of the last one
        pieces = Uint32(cute.arch.make_warp_uniform(part.record[4]))
        arrived = Int32(shared.sV.iterator.toint())  # [pieces, rows] of 512 fp16
        arrived_beside = arrived + MAX_PIECE_ROWS * 1024  # [pieces, rows] of 16 bytes
        cute.arch.cluster_arrive_relaxed()
        piece, beside = Int32(shared.sQ.iterator.toint()), Int32(shared.exchange.toint())
        if part.begin_req <= part.end_req:
            self.leave_piece(params, shared, part, s_idx, head_tile, t, half, accO, piece, beside)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarriers.MERGE, number_of_threads=2 * WARPGROUP)
        cute.arch.cluster_wait()
        full = Int32(shared.pieces_full.toint())
        tid = t + half * WARPGROUP
        mine = cutlass.min(heads - cutlass.min(rank * rows, heads), rows)
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(shared.pieces_full, Int32(pieces * mine * (1024 + 16)))
        if part.begin_req <= part.end_req:
            peer = Uint32(tid) + rank + 1  # each begins with another one
            peer = cutlass.select_(peer >= size, peer - size, peer)
            if (tid < size) & (peer * rows < heads):
                count = cutlass.min(heads - peer * rows, rows)
                to = arrived + Int32(rank * rows * 1024)
                bulk_copy_to_peer(to, piece + Int32(peer * rows * 1024), Int32(count * 1024), full, Int32(peer))
            row = tid - WARPGROUP
            if (row >= 0) & (row < heads):
                to = arrived_beside + Int32((rank * rows + Uint32(row) % rows) * 16)
                words = load_smem_16b(beside + row * 16)
                store_to_peer(to, words, full, Int32(Uint32(row) // rows))
        cute.arch.mbarrier_wait(shared.pieces_full, 0)
        cute.arch.cluster_arrive_relaxed()
        self.merge_pieces(
            params, shared, s_idx, head_tile, tid, Int32(rank * rows), Int32(mine), Int32(rows), Int32(pieces), arrived,
            arrived_beside,
        )

    @cute.jit
    def leave_piece(
        self, params: Params, shared: Shared, part: Part, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32,
        accO: cute.Tensor, piece: Int32, beside: Int32,
    ):  # fmt: skip
        """Half of O in fp16 over a power of two for each head to `piece`, [64, 512], where Q was: 16-byte chunk c of a row lies
        at c ^ (row % 8). To `beside`, [64, 4] fp32, where convert had its maxima: factors of right and left half, lse."""
        factors = self.finish(params, shared, part, part.end_req, s_idx, head_tile, half, t)
        lane, inverse = t % 32, []
        for r, exponent in enumerate(self.exponents_of(accO)):
            inverse.append(((268 - exponent) << 23).bitcast(Float32))
            if t % 4 == 0:
                to = smem_tensor(beside + (fragment_row(t) + 8 * r) * 16 + half * 4, Float32, 1)
                to[0] = factors[r] * ((exponent - 14) << 23).bitcast(Float32)
        row = piece + (t // 32 * 16 + lane % 16) * 1024 + (1 - half) * (HALF * 2)
        for jj in cutlass.range_constexpr(HALF // 16):
            words = self.fp16_of(accO, jj, inverse)
            chunk = (2 * (jj % 4) + lane // 16) ^ (lane & 7)
            store_matrices(row + jj // 4 * 128 + chunk * 16, words)

    def exponents_of(self, accO: cute.Tensor) -> list[Uint32]:
        """[r] of the thread's rows: x, biased, so that O * 2 ** (141 - x) is below 2 ** 15. Both powers are normal numbers."""
        largest = [Float32(0), Float32(0)]
        for i in range(cute.size(accO)):
            largest[i // 2 % 2] = max_abs(largest[i // 2 % 2], accO[i])
        exponents = []
        for x in largest:
            for offset in (1, 2):
                x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
            exponents.append(cutlass.max(x.bitcast(Uint32) >> 23, Uint32(30)))
        return exponents

    def fp16_of(self, accO: cute.Tensor, i: int, inverse: list[Float32]) -> cute.Tensor:
        """Elements 8 i ... 8 i + 7 of O's fragment, times `inverse` [r] of their rows, as fp16: registers [4]."""
        values = cute.make_rmem_tensor(8, Float32)
        for k in range(8):
            values[k] = accO[8 * i + k] * inverse[k // 2 % 2]
        fp16 = cute.make_rmem_tensor(8, Float16)
        fp16.store(values.load().to(Float16))
        return cute.recast_tensor(fp16, Uint32)

    @cute.jit
    def merge_pieces(
        self, params: Params, shared: Shared, s_idx: Int32, head_tile: Int32, tid: Int32, first_row: Int32, mine: Int32,
        rows: Int32, pieces: Int32, piece: Int32, beside: Int32,
    ):  # fmt: skip
        """Weighted sums of pieces [pieces, rows, 512], of which `mine` rows count: 64 threads a head, 8 columns each."""
        lane, chunk = tid % 32, tid % 64
        _, _, req = cute.arch.cluster_idx()
        for i in cutlass.range(cute.arch.make_warp_uniform(tid // 64), mine, 4, unroll=1):
            row = first_row + i
            head = head_tile * TILE_M + row
            # Lane p has the weight of piece p.
            p = cutlass.min(lane, pieces - 1)
            of_piece = load_smem_16b(beside + (p * rows + i) * 16, Float32)
            factor = cutlass.select_(chunk < 32, of_piece[1], of_piece[0])
            lse = cutlass.select_(lane < pieces, of_piece[2], Float32(-INF))
            top = lse
            for offset in (8, 4, 2, 1):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            top = cute.arch.fmax(top, Float32(-1e30))  # finite: -inf - -inf is NaN
            total = cute.math.exp2(lse - top, fastmath=True)
            for offset in (8, 4, 2, 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
            sink_log2 = None
            if const_expr(params.attn_sink is not None):
                sink_log2 = cute.make_tensor(shared.sink, TILE_M)[row]
            merged_lse, exponent = normalise(top, total, sink_log2)
            if chunk == 0:
                params.lse[Int64(req), s_idx, head] = merged_lse * LN_2
            weight = factor * cute.math.exp2(lse - exponent, fastmath=True)
            sums = cute.make_rmem_tensor(8, Float32)
            sums.fill(0.0)
            address = piece + i * 1024 + (chunk ^ (row & 7)) * 16
            for j in cutlass.range(pieces, unroll=4):
                w = cute.arch.shuffle_sync(weight, j)
                values = cute.make_rmem_tensor(8, Float32)
                words = load_smem_16b(address + j * rows * 1024)
                values.store(cute.recast_tensor(words, Float16).load().to(Float32))
                for k in cutlass.range_constexpr(8):
                    sums[k] = sums[k] + values[k] * w
            bf16 = cute.make_rmem_tensor(8, BFloat16)
            bf16.store(sums.load().to(BFloat16))
            row_out = params.out[Int64(req), s_idx, head, None].iterator.toint() + chunk * 16
            cute.autovec_copy(cute.recast_tensor(bf16, Uint32), global_tensor(row_out, Uint32, 4))

    # A request in two pieces is merged by the part that is the second to have its piece ready; nobody waits, so the two CTAs
    # need not run at the same time. The flag's exchange makes the piece and the lse of the whole warpgroup visible.
    # Merges come behind all other work of a CTA.

    @cute.jit
    def hand_in(
        self, params: Params, shared: Shared, part: Part, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32,
        half: Int32, accO: cute.Tensor, tma_out: cute.CopyAtom, tma_mO: cute.Tensor, v_slot: Int32,
    ):  # fmt: skip
        """Half of O of any but the part's last request to out; or, of one that began in other parts, to scratch."""
        if (req == part.begin_req) & (part.record[5] != 0):
            slot = part.record[7]
            if part.record[4] == 1:  # as the last piece, of two
                self.store_piece(params, slot, s_idx, head_tile, t, half, accO)
                cute.arch.barrier(barrier_id=NamedBarriers.MERGE + half, number_of_threads=WARPGROUP)
                if t == 0:
                    found = exchange_gpu(self.flag(params, slot - 1, s_idx, head_tile, half), params.nonce)
                    cute.make_tensor(shared.owes, 2)[half] = Int32(found == params.nonce)
            else:
                self.store_piece_fp16(params, slot, s_idx, head_tile, t, half, accO)
        else:
            self.store_o(shared, req, s_idx, head_tile, t, half, accO, tma_out, tma_mO, v_slot)

    @cute.jit
    def hand_in_last(
        self, params: Params, shared: Shared, part: Part, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32,
        accO: cute.Tensor, tma_out: cute.CopyAtom, tma_mO: cute.Tensor, v_slot: Int32,
    ):  # fmt: skip
        """The same of the last request, whose O need not leave the registers if the other one of two pieces is ready; then
        the merge that `hand_in` has left."""
        is_split, slot = self.split_of(part, part.end_req)
        if is_split:
            is_pair = cute.make_tensor(shared.last_pieces, 1)[0] == 2
            # Pieces stand in split order; only the part's first request can have some before it.
            piece = cutlass.select_(part.end_req == part.begin_req, part.record[4], Int32(0))
            flag = self.flag(params, slot - piece, s_idx, head_tile, half)
            is_second = Uint32(0)
            if is_pair:
                found = Int64(0)  # which no nonce is
                if t == 0:
                    found = load_acquire_gpu(flag)
                is_second = barrier_any(NamedBarriers.MERGE + half, WARPGROUP, found == params.nonce)
                if is_second == 0:
                    self.store_piece(params, slot, s_idx, head_tile, t, half, accO)
                    cute.arch.barrier(barrier_id=NamedBarriers.MERGE + half, number_of_threads=WARPGROUP)
                    found = Int64(0)
                    if t == 0:
                        found = exchange_gpu(flag, params.nonce)
                    is_second = barrier_any(NamedBarriers.MERGE + half, WARPGROUP, found == params.nonce)
            else:
                self.store_piece_fp16(params, slot, s_idx, head_tile, t, half, accO)
            if is_second != 0:
                if t == 0:
                    store_relaxed_gpu(flag, Int64(0))  # a replay of a CUDA graph has the same nonce
                other = slot + 1 - 2 * piece
                self.merge_pair(params, shared, slot, other, part.end_req, s_idx, head_tile, t, half, accO)
        else:
            self.store_o(shared, part.end_req, s_idx, head_tile, t, half, accO, tma_out, tma_mO, v_slot)

        owes = Int32(0)
        if t == 0:
            owes = cute.make_tensor(shared.owes, 2)[half]
        if barrier_any(NamedBarriers.MERGE + half, WARPGROUP, owes != 0) != 0:
            slot = part.record[7]
            if t == 0:
                store_relaxed_gpu(self.flag(params, slot - 1, s_idx, head_tile, half), Int64(0))
            self.merge_stored(params, shared, slot, slot - 1, part.begin_req, s_idx, head_tile, t, half)

    def flag(self, params: Params, first_slot: Int32, s_idx: Int32, head_tile: Int32, half: Int32) -> Int64:
        """Address of the flag of a request in two pieces, for half of a head tile."""
        return params.flags[Int64(first_slot), s_idx, head_tile, None].iterator.toint() + half * 8

    def piece_of(self, params: Params, slot: Int32, s_idx: Int32, group: Int32, half: Int32, lane: Int32) -> Int64:
        """Address of this lane's first 16 bytes of a warp's piece in scratch; the others follow 512 bytes apart."""
        return params.o_partial[Int64(slot), s_idx, group, 1 - half, None].iterator.toint() + lane * 16

    @cute.jit
    def store_piece(
        self, params: Params, slot: Int32, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32, accO: cute.Tensor
    ):  # fmt: skip
        """Half of O as it is to scratch."""
        group = head_tile * (TILE_M // GROUP) + t // 32
        if group * GROUP < self.h_q:
            piece = self.piece_of(params, slot, s_idx, group, half, t % 32)
            for j in cutlass.range_constexpr(HALF // 8):
                cute.autovec_copy(cute.make_tensor(accO.iterator + 4 * j, 4), global_tensor(piece + j * 512, Float32, 4))

    @cute.jit
    def store_piece_fp16(
        self, params: Params, slot: Int32, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32, accO: cute.Tensor
    ):  # fmt: skip
        """The same for combine, of three pieces or more: in fp16, over a power of two for each head."""
        group = head_tile * (TILE_M // GROUP) + t // 32
        if group * GROUP < self.h_q:
            piece = self.piece_of(params, slot, s_idx, group, half, t % 32)
            inverse = []
            for r, exponent in enumerate(self.exponents_of(accO)):
                inverse.append(((268 - exponent) << 23).bitcast(Float32))  # x * inverse is in 2 ** 14 ... 2 ** 15
                if t % 4 == 0:
                    address = piece - t % 32 * 16 + (SCALES + (t % 32 // 4 + 8 * r) * 4)
                    global_tensor(address, Float32, 1)[0] = ((exponent - 14) << 23).bitcast(Float32)
            for i in cutlass.range_constexpr(HALF // 16):
                cute.autovec_copy(self.fp16_of(accO, i, inverse), global_tensor(piece + i * 512, Uint32, 4))

    @cute.jit
    def merge_weights(
        self, params: Params, shared: Shared, slot: Int32, other_slot: Int32, req: Int32, s_idx: Int32, head_tile: Int32,
        t: Int32, half: Int32,
    ):  # fmt: skip
        """For two pieces the weights of this thread's rows r = 0, 1: [r] of [2]. By the maths of combine.py; lse with it."""
        weights = Int32(shared.exchange.toint()) + half * (TILE_M * 8)  # [64, 2] fp32; convert has done all its work
        row = head_tile * TILE_M + t
        if (t < TILE_M) & (row < self.h_q):
            mine = params.lse_partial[Int64(slot), s_idx, row, half]
            other = params.lse_partial[Int64(other_slot), s_idx, row, half]
            top = cute.arch.fmax(cute.arch.fmax(mine, other), Float32(-1e30))  # finite: -inf - -inf is NaN
            total = cute.math.exp2(mine - top, fastmath=True) + cute.math.exp2(other - top, fastmath=True)
            sink_log2 = None
            if const_expr(params.attn_sink is not None):
                sink_log2 = cute.make_tensor(shared.sink, TILE_M)[t]
            lse, exponent = normalise(top, total, sink_log2)
            if half == 0:
                params.lse[Int64(req), s_idx, row] = lse * LN_2
            self.store_pair(
                weights, t, (cute.math.exp2(mine - exponent, fastmath=True), cute.math.exp2(other - exponent, fastmath=True))
            )
        cute.arch.barrier(barrier_id=NamedBarriers.MERGE + half, number_of_threads=WARPGROUP)
        return [self.load_pair(weights, fragment_row(t) + 8 * r) for r in (0, 1)]

    @cute.jit
    def merge_pair(
        self, params: Params, shared: Shared, slot: Int32, other_slot: Int32, req: Int32, s_idx: Int32, head_tile: Int32,
        t: Int32, half: Int32, accO: cute.Tensor,
    ):  # fmt: skip
        """out of a request from its piece in accO and the other one in scratch."""
        weights = self.merge_weights(params, shared, slot, other_slot, req, s_idx, head_tile, t, half)
        group = head_tile * (TILE_M // GROUP) + t // 32
        if group * GROUP < self.h_q:
            other = self.piece_of(params, other_slot, s_idx, group, half, t % 32)
            for step in cutlass.range_constexpr(len(MERGE_ROUNDS)):
                first, count = 4 * sum(MERGE_ROUNDS[:step]), 4 * MERGE_ROUNDS[step]
                mine = [cute.make_tensor(accO.iterator + 4 * (first + j), 4) for j in range(count)]
                values = self.merged(mine, self.load_16b(other, first, count), weights)
                self.store_columns(params, req, s_idx, head_tile, t, half, first, values)

    @cute.jit
    def merge_stored(
        self, params: Params, shared: Shared, slot: Int32, other_slot: Int32, req: Int32, s_idx: Int32, head_tile: Int32,
        t: Int32, half: Int32,
    ):  # fmt: skip
        """The same from two pieces in scratch."""
        weights = self.merge_weights(params, shared, slot, other_slot, req, s_idx, head_tile, t, half)
        group = head_tile * (TILE_M // GROUP) + t // 32
        if group * GROUP < self.h_q:
            mine = self.piece_of(params, slot, s_idx, group, half, t % 32)
            other = self.piece_of(params, other_slot, s_idx, group, half, t % 32)
            for first in cutlass.range(0, HALF // 8, 4, unroll=1):
                values = self.merged(self.load_16b(mine, first, 4), self.load_16b(other, first, 4), weights)
                self.store_columns(params, req, s_idx, head_tile, t, half, first, values)

    def load_16b(self, piece: Int64, first, count: int) -> list[cute.Tensor]:
        """Elements 4 j ... 4 j + 3 of a piece from j = first on."""
        loads = [cute.make_rmem_tensor(4, Float32) for _ in range(count)]
        for j, load in enumerate(loads):
            cute.autovec_copy(global_tensor(piece + (first + j) * 512, Float32, 4), load)
        return loads

    def merged(self, mine: list[cute.Tensor], other: list[cute.Tensor], weights: list) -> list[cute.Tensor]:
        """The weighted sum in place of the other piece. Both products are rounded: it is the same whoever makes it."""
        for x, y in zip(mine, other):
            for i in range(4):
                weight = weights[i // 2]
                y[i] = add_product(x[i] * weight[0], y[i], weight[1])
        return other

    @cute.jit
    def store_o(
        self, shared: Shared, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32, accO: cute.Tensor,
        tma_out: cute.CopyAtom, tma_mO: cute.Tensor, v_slot: Int32,
    ):  # fmt: skip
        """Half of O from registers to out, bf16: by TMA, through the memory of the V that it was made of last.

        Little code, as it is cold. Element e + 2 r + 4 j of accO is row + 8 r, column 8 j + 2 pc + e: stmatrix takes both r of
        j and j + 1, and lane l the address of row l % 8 of the (l / 8)-th of these four matrices.
        """
        lane, w = t % 32, cute.arch.make_warp_uniform(t // 32)
        # No warp's product reads V any more.
        cute.arch.barrier(barrier_id=NamedBarriers.MERGE + half, number_of_threads=WARPGROUP)
        tile = Int32(shared.sO.iterator.toint()) + v_slot * (TILE_M * HALF * 2)  # [4, 64 rows, 64 columns], swizzled
        row = tile + (16 * w + lane % 16) * 128
        for jj in cutlass.range_constexpr(HALF // 16):
            values = cute.make_tensor(accO.iterator + 8 * jj, 8)
            bf16 = cute.make_rmem_tensor(8, BFloat16)
            bf16.store(values.load().to(BFloat16))
            chunk = (2 * (jj % 4) + lane // 16) ^ (lane & 7)  # of 8 columns
            store_matrices(row + jj // 4 * (TILE_M * 128) + chunk * 16, cute.recast_tensor(bf16, Uint32))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarriers.MERGE + half, number_of_threads=WARPGROUP)
        if w == 0:
            gO = cute.local_tile(tma_mO[None, None, s_idx, req], (TILE_M, SW128_COLUMNS), (head_tile, None))
            sO = cute.group_modes(shared.sO[None, None, None, v_slot], 0, 2)
            from_smem, to_out = cpasync.tma_partition(tma_out, 0, cute.make_layout(1), sO, cute.group_modes(gO, 0, 2))
            with cute.arch.elect_one():  # unlike a load it does not elect by itself
                for i in cutlass.range(HALF // SW128_COLUMNS, unroll=1):
                    cute.copy(tma_out, from_smem[None, i], to_out[None, (1 - half) * (HALF // SW128_COLUMNS) + i])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # then it may be V again

    @cute.jit
    def store_columns(
        self, params: Params, req: Int32, s_idx: Int32, head_tile: Int32, t: Int32, half: Int32, first, values: list,
    ):  # fmt: skip
        """32 columns for every four `values`: elements 4 j ... 4 j + 3 of O's fragment from j = first on, to out as bf16."""
        pc = t % 4
        for r in cutlass.range_constexpr(2):
            head = head_tile * TILE_M + fragment_row(t) + 8 * r
            row = params.out[Int64(req), s_idx, cutlass.min(head, self.h_q - 1), None].iterator
            address = opaque(row.toint() + (1 - half) * (HALF * 2) + pc * 16)  # or it is computed for every store again
            for group in cutlass.range_constexpr(len(values) // 4):
                pairs = []
                for j in (0, 1, 2, 3):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for e in (0, 1):
                        pair[e] = values[4 * group + j][2 * r + e]
                    bf16 = cute.make_rmem_tensor(2, BFloat16)
                    bf16.store(pair.load().to(BFloat16))
                    pairs.append(cute.recast_tensor(bf16, Uint32)[0])
                words = cute.make_rmem_tensor(4, Uint32)
                words[0], words[1], words[2], words[3] = quad_transpose(pairs, pc)
                if head < self.h_q:
                    cute.autovec_copy(words, global_tensor(address + (first + 4 * group) * 16, Uint32, 4))


SparseDecode.kernel.set_name_prefix("mla_sparse_decode_sm90", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: Problem, config: Config | small.Config, arch: str):
    """Compiles split kernel and combine into one launchable function; fake tensors in, nothing is launched.

    Returns a function of (q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length, attn_sink,
    softmax_scale, metadata, num_splits, scratch, out, lse, max_splits, nonce): shapes as in `Params`, scratch fp32
    [schedule.scratch_size(num_parts, s_q, h_q)], uninitialised, out [b, s_q, h_q, 512] bf16. max_splits: the most pieces that
    a request may be in, at most 2 saves the combine's launch; nonce: not 0, and another one in each call. With
    config.clustered there is no combine, metadata, num_splits, scratch and nonce are not read, and max_splits are the CTAs of
    a cluster. A Config of `sparse_decode_small`: that kernel.
    """
    if isinstance(config, small.Config):
        return small.compile(problem, config, arch)
    config.check(problem)
    return jit.build(
        SparseDecode(problem, config), *fake_arguments(problem), jit.fake_stream(), arch=arch, name="sparse_decode"
    )
