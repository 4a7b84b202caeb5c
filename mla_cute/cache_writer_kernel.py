"""The device kernel behind `write_kv_cache` and `quantize_kv_cache`: tokens in bf16 become records of a paged FP8 cache.

A warp takes `tokens_in_flight` tokens at once, and all of their loads are under way before the first is looked at. Lane l
holds the NoPE values 16 l ... 16 l + 15 of each, 32 bytes, so that its codes are one store of 16 bytes; V32 has 32 such
lanes a token, MODEL1 28. One more load and store of 8 lanes carries the RoPE. Nothing goes through shared memory.

    slots[token]   the record's address; without slots: token   negative, or past the cache: no stores
    latent, rope   3 loads of 16 bytes a lane and token         also of skipped tokens: the slot is still on its way
    |x|            max over 16 values, then over the tile's lanes (shuffles)
    scale, codes   as `kv_cache.quantize_by_torch`, bit for bit
    record         1 store of 16 bytes a lane, the RoPE, the scales

The time is that of the bytes, d_qk * 2 read and bytes_per_token written a token.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute

from . import jit
from .kv_cache import E4M3_MAX, FORMATS, FP32_TINY
from .validate import check_int

VALUES = 16  # NoPE values of a lane: 16 bytes of codes
VECTOR = 8  # bf16 of a 16-byte load or store
ROPE_LANES = 8  # 16 bytes each

FP32_INF, FP32_NAN = 0x7F800000, 0x7FC00000  # bits
MANTISSA_BITS, MANTISSA_448 = 23, 0x600000  # 448 = 1.75 * 2^8; its mantissa field
POW2_FLOOR_EXPONENT = 127 - 13  # the smallest scale is 2^-13: kv_cache.POW2_FLOOR rounded up to a power of two
SMALL_SCALE = 2.0**-62  # below it, products of the exact division could be subnormal
ENLARGE = 2.0**64


@dataclass(frozen=True)
class WriteProblem:
    """What changes the writer's code."""

    kv_format: str  # a key of kv_cache.FORMATS
    scales: str  # "pow2" or "amax"
    slot_bytes: int  # 4 or 8; 0: no slots, token i goes into slot i

    @property
    def op(self) -> str:
        return "write_kv_cache" if self.slot_bytes else "quantize_kv_cache"


@dataclass(frozen=True)
class Config:
    threads: int = 128  # of a CTA: small, so that few tokens spread over many SMs
    tokens_in_flight: int = 2  # a warp; 12 registers each

    def check(self) -> None:
        """Raise ValueError naming the field that cannot be."""
        check_int("config.threads", self.threads)
        check_int("config.tokens_in_flight", self.tokens_in_flight)
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"config.threads: must be a multiple of 32 from 32 to 1024, got {self.threads}")
        if not 1 <= self.tokens_in_flight <= 8:
            raise ValueError(f"config.tokens_in_flight: must be 1 to 8, got {self.tokens_in_flight}")


def default_config(problem: WriteProblem) -> Config:
    return Config()


class CacheWriter:
    """The kernel and its host function, specialised for one WriteProblem and Config."""

    def __init__(self, problem: WriteProblem, config: Config):
        self.fmt = FORMATS[problem.kv_format]
        self.quantize_tile = self.quantize_pow2 if problem.scales == "pow2" else self.quantize_amax
        self.threads, self.tokens = config.threads, config.tokens_in_flight
        self.lanes = self.fmt.d_nope // VALUES  # with NoPE values
        self.tile_lanes = self.fmt.quant_tile // VALUES  # that share a scale

    @cute.jit
    def __call__(
        self,
        kv_cache: cute.Tensor,  # [num_blocks, page_block_size, 1, bytes_per_token] bytes; only stride 0 is looked at
        latent: cute.Tensor,  # [n, d_nope] bf16
        rope: cute.Tensor,  # [n, d_rope] bf16
        slots: cute.Tensor | None,  # [n] int32 or int64
        stream,
    ):
        tokens_per_cta = self.threads // 32 * self.tokens
        self.kernel(kv_cache, latent, rope, slots).launch(
            grid=[(latent.shape[0] + tokens_per_cta - 1) // tokens_per_cta, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,  # else ptxas saves registers and puts half of the loads behind the uses of others
            stream=stream,
        )

    @cute.kernel
    def kernel(self, kv_cache: cute.Tensor, latent: cute.Tensor, rope: cute.Tensor, slots: cute.Tensor | None):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        first = (cta * (self.threads // 32) + tid // 32) * self.tokens
        n = latent.shape[0]

        # Loads have no branches: behind the last token its row is read again, lanes without values of their own read
        # those of others, from lines that the warp reads anyway.
        latent_lane, rope_lane = min(lane, self.lanes - 1), lane % ROPE_LANES
        r_slot = cute.make_rmem_tensor(self.tokens, Int64)
        r_nope = cute.make_rmem_tensor((VECTOR, VALUES // VECTOR, self.tokens), BFloat16)
        r_rope = cute.make_rmem_tensor((VECTOR, self.tokens), BFloat16)
        for u in cutlass.range_constexpr(self.tokens):
            row = Int64(min(first + u, n - 1))
            r_slot[u] = row if const_expr(slots is None) else Int64(slots[row])
            at = latent.iterator.toint() + row * (latent.stride[0] * 2) + latent_lane * (2 * VALUES)
            for i in cutlass.range_constexpr(VALUES // VECTOR):
                cute.autovec_copy(gmem(BFloat16, at + i * 16, VECTOR), r_nope[None, i, u])
            at = rope.iterator.toint() + row * (rope.stride[0] * 2) + rope_lane * 16
            cute.autovec_copy(gmem(BFloat16, at, VECTOR), r_rope[None, u])

        num_blocks, page_block_size = kv_cache.shape[0], kv_cache.shape[1]
        for u in cutlass.range_constexpr(self.tokens):
            codes, scale = self.quantize(cute.make_tensor(r_nope[None, None, u].iterator, cute.make_layout(VALUES)))
            slot = r_slot[u]
            is_written = first + u < n and slot >= 0 and slot < Int64(num_blocks) * page_block_size
            index = Int32(slot)  # the host sees to it that all slots of the cache fit; of others any page will do
            page = index // page_block_size
            page_at = kv_cache.iterator.toint() + Int64(page) * kv_cache.stride[0]
            offset = index - page * page_block_size
            self.store(is_written, page_at, page_block_size, offset, lane, codes, scale, r_rope[None, u])

    @cute.jit
    def quantize(self, r_nope: cute.Tensor):
        """16 values of every lane -> their codes, and the bits of their tile's scale."""
        x = cute.make_rmem_tensor(VALUES, Float32)
        x.store(r_nope.load().to(Float32))
        codes = cute.make_rmem_tensor(VALUES, Float8E4M3FN)
        amax = self.tile_amax(x)
        return codes, self.quantize_tile(x, amax, codes)

    @cute.jit
    def store(
        self,
        is_written: Boolean,
        page_at: Int64,
        page_block_size: Int32,
        offset: Int32,
        lane: Int32,
        codes: cute.Tensor,
        scale: Uint32,
        r_rope: cute.Tensor,
    ):
        """One record, by a warp. The branches hold nothing but a store each, and become predicates.

        Were anything else behind a branch that waits for the slot, ptxas would move the loads there, too: two latencies in a
        row instead of one.
        """
        fmt = self.fmt
        row_at = page_at + Int64(offset) * fmt.row_bytes
        if const_expr(fmt.scale_plane):
            scales_at = page_at + Int64(page_block_size) * fmt.row_bytes + Int64(offset) * fmt.scale_row_bytes
        else:
            scales_at = row_at
        tile = lane // self.tile_lanes
        scales_at += fmt.scale_offset + tile * fmt.scale_bytes
        # e8m0 is fp32's exponent field: of a power of two, of NaN and +inf (255); behind the last tile is padding, 0.
        code = cutlass.select_(tile < fmt.num_scales, scale >> MANTISSA_BITS, Uint32(0))

        if is_written and lane < self.lanes:
            cute.autovec_copy(codes, gmem(Float8E4M3FN, row_at + fmt.nope_offset + lane * VALUES, VALUES))
        if is_written and lane < ROPE_LANES:
            cute.autovec_copy(r_rope, gmem(BFloat16, row_at + fmt.rope_offset + lane * 16, VECTOR))
        if is_written and lane % self.tile_lanes == 0:
            if const_expr(fmt.scale_bytes == 4):
                gmem(Uint32, scales_at, 1, align=4)[0] = scale
            else:
                gmem(Uint8, scales_at, 1, align=1)[0] = Uint8(code)

    @cute.jit
    def tile_amax(self, x: cute.Tensor) -> Uint32:
        """max |x| over the tile as fp32 bits, NaN above all: bits of numbers without a sign order as integers do."""
        top = Float32(0)
        for i in cutlass.range_constexpr(VALUES):
            top = cute.arch.fmax(top, Uint32(x[i].bitcast(Uint32) & 0x7FFFFFFF).bitcast(Float32), nan=True)
        bits = top.bitcast(Int32)
        offset = self.tile_lanes // 2
        while const_expr(offset > 0):
            bits = max(bits, cute.arch.shuffle_sync_bfly(bits, offset=offset))
            offset //= 2
        return Uint32(bits)

    @cute.jit
    def quantize_pow2(self, x: cute.Tensor, amax: Uint32, codes: cute.Tensor) -> Uint32:
        """The codes, and the scale's bits: 2^k, the smallest with amax <= 448 * 2^k = 1.75 * 2^(k + 8), k >= -13.

        Exact: amax is a bf16 number, so amax/448 that is no power of two does not round to one. 1 / scale is a power of
        two in fp32's normal range, so the product is the quotient.
        """
        carry = (1 << MANTISSA_BITS) - 1 - MANTISSA_448  # into the exponent if the mantissa is above 448's
        exponent = max(Int32((amax + carry) >> MANTISSA_BITS) - 8, Int32(POW2_FLOOR_EXPONENT))
        scale = Uint32(exponent) << MANTISSA_BITS
        inverse = Uint32(254 << MANTISSA_BITS) - scale
        if amax >= FP32_INF:
            scale = Uint32(FP32_INF)
            inverse = Uint32(0)
            if amax > FP32_INF:
                scale = Uint32(FP32_NAN)
                inverse = Uint32(FP32_NAN)
        codes.store((x.load() * inverse.bitcast(Float32)).to(Float8E4M3FN))
        return scale

    @cute.jit
    def quantize_amax(self, x: cute.Tensor, amax: Uint32, codes: cute.Tensor) -> Uint32:
        """The codes, and the scale's bits: amax/448 in fp32, at least FP32_TINY.

        x / scale as IEEE rounds it, one division a tile and Markstein's correction a value: with r = 1 / s and q = x * r,
        rounded, q - r * (q * s - x) is the quotient rounded, if q * s - x is exact. It is, unless it falls below 2^-149:
        therefore tiny tiles are enlarged. (Quotients below 2^-10 may then still be off: their code is 0 either way.) In
        this form x = -0 keeps its sign. Compared with the division over all pairs of bf16 numbers amax >= x >= 0: codes and
        quotients from 2^-10 on are the same.
        """
        s = amax.bitcast(Float32) / Float32(E4M3_MAX)
        if s < FP32_TINY:  # not so NaN
            s = Float32(FP32_TINY)
        factor = Float32(ENLARGE) if s < SMALL_SCALE else Float32(1)
        divisor = s * factor
        r = Float32(1) / divisor
        if amax == FP32_INF:
            divisor = Float32(0)  # r is 0: x * r is the quotient, and q * inf would be NaN
        y = cute.make_rmem_tensor(VALUES, Float32)
        for i in cutlass.range_constexpr(VALUES):
            value = x[i] * factor
            q = value * r
            y[i] = cute.math.fma(-r, cute.math.fma(q, divisor, -value), q)
        codes.store(y.load().to(Float8E4M3FN))
        scale = s.bitcast(Uint32)
        if amax > FP32_INF:
            scale = Uint32(FP32_NAN)
        return scale


def gmem(dtype, address: Int64, count: int, align: int = 16) -> cute.Tensor:
    """`count` elements of global memory."""
    ptr = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(ptr, cute.make_layout(count))


CacheWriter.kernel.set_name_prefix("mla_write_kv_cache", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile(problem: WriteProblem, config: Config, arch: str):
    """The compiled writer; takes (kv_cache, latent, rope, slots) as in `CacheWriter.__call__`, the cache as uint8.

    Where the problem has no slots, n must be the tokens of the cache.
    """
    config.check()
    fmt = FORMATS[problem.kv_format]
    sym, sym64 = cute.sym_int, cute.sym_int64
    n = sym()

    def rows(width):
        return jit.fake_tensor(BFloat16, (n, width), stride=(sym64(divisibility=8), 1), align=16)

    slots = None
    if problem.slot_bytes:
        dtype = Int32 if problem.slot_bytes == 4 else Int64
        slots = jit.fake_tensor(dtype, (n,), stride=(sym64(),), align=problem.slot_bytes)
    return jit.build(
        CacheWriter(problem, config),
        jit.fake_tensor(
            Uint8,
            (sym(), sym(), 1, fmt.bytes_per_token),
            stride=(sym64(divisibility=16), sym64(), sym64(), 1),
            align=16,
        ),
        rows(fmt.d_nope),
        rows(fmt.d_rope),
        slots,
        jit.fake_stream(),
        arch=arch,
        name=problem.op,
    )
