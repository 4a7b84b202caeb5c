"""What the main kernels of sparse decode share on every architecture: reading the plan, the compiled function's arguments,
memory by address. `shared` and `params` are a kernel's own tuples. Roles and all that orders them stand in the kernels.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from . import jit
from .kv_cache import FORMATS
from .validate import Problem, check_int

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class Part(NamedTuple):
    """One partition of the plan: requests begin_req..end_req inclusive.

    The rest of its record is read from shared memory once a request, rather than held in registers.
    """

    record: cute.Tensor  # [8] int32
    begin_req: Int32
    end_req: Int32


class Work(NamedTuple):
    """What one partition does for one request: key blocks first..last-1."""

    first_block: Int32
    last_block: Int32
    length: Int32  # selected tokens of the request in the main cache
    extra_length: Int32  # and in the extra cache, whose blocks begin behind those
    num_main_blocks: Int32


class PlanReader:
    """The only place that turns plan and lengths into block ranges. self.tile_n: keys of a block."""

    tile_n: int

    def load_part(self, shared) -> Part:
        """The partition's requests. Idle partitions have begin_req > end_req: every loop is empty."""
        record = cute.make_tensor(shared.record, 8)
        return Part(record, record[0], record[1])

    @cute.jit
    def work_range(self, params, part: Part, req: Int32) -> Work:
        """The key blocks of `req` in this partition. A request without tokens still has one block, wholly masked."""
        length, extra_length, num_main_blocks, num_blocks = self.lengths_of(params, req)
        begin_block, end_block = part.record[2], part.record[3]
        is_begin, is_end = req == part.begin_req, req == part.end_req
        first = cutlass.select_(is_begin, begin_block, Int32(0))
        # At least one block, though the plan may be older than the lengths: all roles and barriers count on it.
        last = cutlass.max(cutlass.select_(is_end, end_block, num_blocks), first + 1)
        return Work(first, last, length, extra_length, num_main_blocks)

    @cute.jit
    def lengths_of(self, params, req: Int32):
        """Of a request: selected tokens in the main cache and in the extra one, key blocks in the main one and in both."""
        length = params.indices.shape[2]
        if const_expr(params.topk_length is not None):
            length = cutlass.max(cutlass.min(params.topk_length[req], length), 0)
        num_main_blocks = self.num_blocks(length)
        num_blocks, extra_length = num_main_blocks, Int32(0)
        if const_expr(params.extra_indices is not None):
            extra_length = params.extra_indices.shape[2]
            if const_expr(params.extra_topk_length is not None):
                extra_length = cutlass.max(cutlass.min(params.extra_topk_length[req], extra_length), 0)
            num_blocks += (extra_length + self.tile_n - 1) // self.tile_n
        return length, extra_length, num_main_blocks, num_blocks

    def num_blocks(self, length: Int32) -> Int32:
        """Key blocks of so many tokens in the main cache, at least one."""
        return (cutlass.max(length, 1) + self.tile_n - 1) // self.tile_n

    def split_of(self, part: Part, req: Int32):
        """Is the request split; the slot of this partition's piece."""
        begin_is_split, end_is_split = part.record[5] != 0, part.record[6] != 0
        is_begin, is_end = req == part.begin_req, req == part.end_req
        is_split = (is_begin & begin_is_split) | (is_end & end_is_split)
        # A part that begins and ends in two different split requests writes two pieces, the second behind the first.
        return is_split, part.record[7] + cutlass.select_((~is_begin) & begin_is_split, Int32(1), Int32(0))


def check_config(name: str, config: Any, problem: Problem, tile_n: int) -> None:
    """What every implementation's `Config.check` begins with; name: the implementation's, tile_n: the one that it has."""
    if problem.op != "sparse_decode" or problem.kv_format not in FORMATS:
        raise NotImplementedError(
            f"config: {name} runs sparse_decode on a cache of {' or '.join(FORMATS)}, got {problem.op} on {problem.kv_format}"
        )
    check_int("config: tile_n", config.tile_n)
    if config.tile_n != tile_n:
        raise ValueError(f"config: tile_n must be {tile_n}, got {config.tile_n}")
    if config.fixed_overhead_blocks is not None:
        check_int("config: fixed_overhead_blocks", config.fixed_overhead_blocks)
        if config.fixed_overhead_blocks < 1:
            raise ValueError(f"config: fixed_overhead_blocks must be at least 1, got {config.fixed_overhead_blocks}")


def fake_arguments(problem: Problem) -> list:
    """The arguments of the compiled function, but for the stream, as `jit.build` wants them: see `Params` and `compile` of
    a kernel."""
    sym, sym64 = cute.sym_int, cute.sym_int64
    b, s_q, topk, parts = sym(), sym(), sym(), sym()

    def rows(dtype, shape, divisibility, align):  # last dim contiguous, the other strides free
        strides = tuple(sym64(divisibility=divisibility) for _ in shape[:-1]) + (1,)
        return jit.fake_tensor(dtype, shape, stride=strides, align=align)

    fmt = FORMATS[problem.kv_format]
    return [
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
        Int32(0),
        Int64(0),
    ]


def smem_tensor(addr: Int32, dtype, count: int) -> cute.Tensor:
    """`count` elements of 32 bits at the shared address `addr`, aligned to their size, as a tensor that vectorises."""
    ptr = cute.make_ptr(dtype, addr, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(ptr, cute.make_layout(count))


def global_tensor(addr: Int64, dtype, count: int) -> cute.Tensor:
    """The same at an address of global memory."""
    ptr = cute.make_ptr(dtype, addr, cute.AddressSpace.gmem, assumed_align=4 * count)
    return cute.make_tensor(ptr, cute.make_layout(count))


def load_smem_16b(addr: Int32, dtype=Uint32) -> cute.Tensor:
    """16 bytes of shared memory into registers [4] of a 32-bit type (ld.shared.v4)."""
    r = cute.make_rmem_tensor(4, dtype)
    cute.autovec_copy(smem_tensor(addr, dtype, 4), r)
    return r


def load_smem_8b(addr: Int32, dtype=Uint32) -> cute.Tensor:
    """The same of 8 bytes, into registers [2]."""
    r = cute.make_rmem_tensor(2, dtype)
    cute.autovec_copy(smem_tensor(addr, dtype, 2), r)
    return r


def store_smem_16b(addr: Int32, r: cute.Tensor) -> None:
    """Registers [4] of a 32-bit type to 16 bytes of shared memory (st.shared.v4)."""
    cute.autovec_copy(r, smem_tensor(addr, r.element_type, 4))


def max_abs(x: Float32, y: Float32) -> Float32:
    """max(x, |y|); a NaN in y is left out."""
    code = "{ .reg .f32 a; abs.f32 a, {$r1}; max.f32 {$w0}, {$r0}, a; }"
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[x, y])


def set_registers(count: int) -> None:
    """Gives the calling warpgroup `count` registers a thread; 384 threads enter with 168 each."""
    if count > 168:
        cute.arch.setmaxregister_increase(count)
    else:
        cute.arch.setmaxregister_decrease(count)
