"""FP8 KV-cache records: the byte layout as data, a quantiser, a dequantiser, and logical-to-physical indices.

A cache is a tensor [num_blocks, page_block_size, 1, bytes_per_token] of one-byte elements. Pages may lie further apart
than their bytes need (stride(0) free); what lies between them is never read or written. Everything here is plain torch,
on any device, but for `quantize_kv_cache` on a GPU. The layouts and the quantiser are those of DeepSeek's FlashMLA:

    V32     656 bytes a token  DeepSeek V3, V3.1, V3.2: 512 e4m3, 4 fp32 scales, 64 bf16 RoPE in one row
    MODEL1  584 bytes a token  DeepSeek V4: rows of 448 e4m3 and 64 bf16 RoPE; behind a page's rows its e8m0 scales
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from .target import is_recorded, is_traced, target
from .validate import INT32_MAX, check_has_memory, check_plain, check_writable, num_bytes_of

E4M3_MAX = 448.0  # largest finite e4m3fn value
E4M3_NAN = 0x7F  # the one NaN code the quantiser writes
POW2_FLOOR = 1e-4  # floor of amax/448 before the power of two: no scale is below 2^-13
FP32_TINY = torch.finfo(torch.float32).tiny  # smallest normal fp32, 2^-126
FP32_E8M0_ZERO = 0x00400000  # fp32 bits of e8m0's code 0: 2^-127, its only subnormal
E8M0_NAN = 0xFF

CACHE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
CHUNK_VALUES = 1 << 25  # values converted at once: bounds the fp32 temporaries to a few times 128 MiB


@dataclass(frozen=True)
class KVFormat:
    """Byte layout of one cached token; all offsets and sizes in bytes unless a name says otherwise.

    Token t of a page is a row, `row_bytes` apart; its scales are in the row, or `scale_row_bytes` apart in a plane of their
    own behind the rows of the page:

        codes:  t * row_bytes + nope_offset    d_nope bytes of e4m3
        RoPE:   t * row_bytes + rope_offset    d_rope bf16
        scales: t * row_bytes + scale_offset   num_scales fp32 or e8m0, or
                page_block_size * row_bytes + t * scale_row_bytes + scale_offset

    With a plane, the tensor's last dim and stride(1) still say `bytes_per_token`, though nothing lies at multiples of it.
    """

    name: str
    d_qk: int  # values of one key: NoPE then RoPE
    d_v: int  # values of one value row: the first d_v of the key (of MODEL1 all, RoPE included)
    d_nope: int
    d_rope: int
    quant_tile: int  # consecutive NoPE values sharing one scale
    bytes_per_token: int  # last dim of the cache tensor
    row_bytes: int
    nope_offset: int
    rope_offset: int
    scale_bytes: int  # one scale: 4 = fp32, 1 = e8m0 (2^(code - 127), 0xFF = NaN)
    scale_offset: int
    scale_plane: bool = False  # scales lie behind the page's rows
    scale_row_bytes: int = 0  # bytes a token in that plane

    @property
    def num_scales(self) -> int:
        """Scales of one token."""
        return self.d_nope // self.quant_tile

    @property
    def rope_bytes(self) -> int:
        return 2 * self.d_rope  # bf16

    def page_bytes(self, page_block_size: int) -> int:
        """Bytes between pages in a new cache: with a scale plane whole rows, as FlashMLA wants them on Blackwell."""
        size = page_block_size * self.bytes_per_token
        return -(-size // self.row_bytes) * self.row_bytes


V32 = KVFormat(
    name="v32",
    d_qk=576,
    d_v=512,
    d_nope=512,
    d_rope=64,
    quant_tile=128,
    bytes_per_token=656,
    row_bytes=656,
    nope_offset=0,
    rope_offset=528,
    scale_bytes=4,
    scale_offset=512,
)

MODEL1 = KVFormat(
    name="model1",
    d_qk=512,
    d_v=512,
    d_nope=448,
    d_rope=64,
    quant_tile=64,
    bytes_per_token=584,
    row_bytes=576,
    nope_offset=0,
    rope_offset=448,
    scale_bytes=1,
    scale_offset=0,
    scale_plane=True,
    scale_row_bytes=8,  # 7 scales and a byte of padding: written 0, never looked at
)

FORMATS = {fmt.name: fmt for fmt in (V32, MODEL1)}


def quantize_kv_cache(
    kv: torch.Tensor,
    *,
    kv_format: KVFormat = V32,
    scales: str | torch.Tensor = "pow2",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Pack keys into the FP8 cache format: code = e4m3(x / scale), rounded to nearest even, at most ±448; RoPE as bf16.

    On a GPU from Hopper on, bf16 keys with scales "pow2" or "amax" take one launch of `write_kv_cache`'s kernel, without a
    temporary; the first such call compiles it, which takes seconds. Everything else is plain torch. The bytes are the same.

    Args:
        kv: [num_blocks, page_block_size, 1, d_qk] bf16, fp16 or fp32, any strides; NoPE values first, RoPE last.
        kv_format: V32 or MODEL1.
        scales: for each tile of `quant_tile` values,
            "pow2": 2^ceil(log2(max(amax/448, 1e-4))), exact (no floating-point log);
            "amax": amax/448 in fp32, at least the smallest normal fp32 (what vLLM's writer stores); not for MODEL1;
            or a fp32 tensor that broadcasts to [num_blocks, page_block_size, 1, num_scales], positive or NaN (poison);
            for MODEL1, whose scales are e8m0, powers of two from 2^-127 on.
        out: where to write, [num_blocks, page_block_size, 1, bytes_per_token] of uint8, int8 or float8_e4m3fn; its
            pages may be strided (`pool[:, :page]`) but not overlap, the gaps are not touched. Default: a new uint8
            tensor; V32's is contiguous, pages of MODEL1 are padded to a multiple of 576 bytes. It may not overlap kv, from
            first to last byte.
        backend: "emulator" runs the kernel on CPU tensors.

    The kernel reads rows of keys (any distance apart, the same between all) and writes pages at addresses and strides that
    are multiples of 16 bytes: other `kv`, and an `out` that is not so, cost a copy. Work is queued on torch's current stream
    of kv's device, and only a tensor of scales is waited for. With the kernel the call may be captured in a CUDA graph.
    In torch.compile, torch.export and make_fx the call is an op, whose format is V32 or MODEL1.

    Returns: `out`.

    A tile that holds a NaN gets a NaN scale and NaN codes throughout (0x7F); one that holds an Inf gets scale +inf (NaN in
    e8m0), codes 0 for its finite values and NaN for the infinite ones (an explicit scale saturates them instead). RoPE is
    copied as it is.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, stride, device or scale.
    """
    if is_dynamo_compiling() or is_recorded(("kv", "scales", "out"), (kv, scales, out)):  # an op of a graph
        from . import torch_ops

        return torch_ops.quantize_kv_cache(kv, kv_format=kv_format, scales=scales, out=out, backend=backend)
    kv, scales, out = check_quantize(kv, kv_format, scales, out)
    from . import cache_writer  # not at the top: it imports this module

    where = target(kv.device, backend) if backend is not None or kv.device.type in ("cpu", "cuda") else None
    if where is not None and cache_writer.has_kernel(where.arch):
        if isinstance(scales, str) and kv.dtype == torch.bfloat16:
            cache_writer.write_all(out, kv, kv_format, scales, where)
            return out
        if backend is not None:
            got = f"{kv.dtype} and scales {scales if isinstance(scales, str) else 'in a tensor'}"
            raise ValueError(f'backend: must be None but for bfloat16 keys with scales "pow2" or "amax", got {got}')
    quantize_by_torch(kv, kv_format, scales, out)
    return out


def check_quantize(kv, kv_format, scales, out) -> tuple[torch.Tensor, str | torch.Tensor, torch.Tensor]:
    """The checks of `quantize_kv_cache`: (kv, scales of their full shape, out, made if it was None).

    Of tensors without memory, fake ones and those on the meta device, neither addresses nor scales are looked at.
    """
    check_format(kv_format)
    if isinstance(kv, torch.Tensor) and kv.is_neg():
        kv = kv.resolve_neg()
    _check_tensor("kv", kv, (torch.bfloat16, torch.float16, torch.float32))
    if kv.ndim != 4 or kv.shape[2] != 1 or kv.shape[3] != kv_format.d_qk or kv.shape[1] < 1:
        raise ValueError(f"kv: must be [num_blocks, page_block_size >= 1, 1, {kv_format.d_qk}], got {list(kv.shape)}")
    num_blocks, page = kv.shape[:2]
    has_memory = kv.device.type != "meta" and not is_traced(kv)
    if has_memory:
        check_has_memory("kv", kv, kv.data_ptr(), num_bytes_of(kv))
    if isinstance(scales, torch.Tensor):
        if scales.is_neg():
            scales = scales.resolve_neg()
        _check_tensor("scales", scales, (torch.float32,), device=kv.device)
        shape = (num_blocks, page, 1, kv_format.num_scales)
        try:
            scales = scales.broadcast_to(shape)
        except RuntimeError:
            raise ValueError(f"scales: must broadcast to {list(shape)}, got {list(scales.shape)}") from None
        if has_memory and bool((scales <= 0).any()):
            raise ValueError(f"scales: must be positive, got {float(scales[scales <= 0][0])}")
        if has_memory and kv_format.scale_bytes == 1:
            bits = scales.view(torch.int32)
            other = (bits & 0x7FFFFF != 0) & (bits != FP32_E8M0_ZERO) & ~scales.isnan()
            if bool(other.any()):
                needed = f"must be powers of two from 2^-127 on for {kv_format.name.upper()}, whose scales are e8m0"
                raise ValueError(f"scales: {needed}, got {float(scales[other][0])}")
    elif not isinstance(scales, str):
        raise TypeError(f'scales: must be "pow2", "amax" or a fp32 tensor, got {type(scales).__name__}')
    elif scales not in ("pow2", "amax"):
        raise ValueError(f'scales: must be "pow2", "amax" or a fp32 tensor, got "{scales}"')
    elif scales == "amax" and kv_format.scale_bytes == 1:
        needed = f'must be "pow2" or a fp32 tensor for {kv_format.name.upper()}, whose scales are e8m0'
        raise ValueError(f'scales: {needed}, got "amax"')
    given = out is not None
    if not given:
        out = new_cache(num_blocks, page, kv_format, kv.device)
    _check_cache("out", out, kv_format)
    if out.shape[:2] != kv.shape[:2]:
        raise ValueError(f"out: must have {num_blocks} blocks of {page} tokens as kv has, got {list(out.shape)}")
    if out.device != kv.device:
        raise ValueError(f"out: must be on kv's device {kv.device}, got {out.device}")
    check_writable("out", out)
    if given and has_memory:
        at, at_out, size, size_out = kv.data_ptr(), out.data_ptr(), num_bytes_of(kv), num_bytes_of(out)
        check_has_memory("out", out, at_out, size_out)
        if at < at_out + size_out and at_out < at + size:
            got = f"{size_out} bytes at {at_out:#x} and {size} bytes at {at:#x}"
            raise ValueError(f"out: must not overlap kv from first to last byte, got {got}")
    return kv, scales, out


def new_cache(num_blocks: int, page: int, fmt: KVFormat, device: torch.device) -> torch.Tensor:
    """An uninitialised uint8 [num_blocks, page, 1, bytes_per_token] with the page stride of a new cache."""
    pool = torch.empty(num_blocks, fmt.page_bytes(page), dtype=torch.uint8, device=device)
    return pool[:, : page * fmt.bytes_per_token].view(num_blocks, page, 1, fmt.bytes_per_token)


def quantize_by_torch(kv: torch.Tensor, fmt: KVFormat, scales: str | torch.Tensor, out: torch.Tensor) -> None:
    """`quantize_kv_cache` of checked arguments, scales of their full shape: what the bytes are, by definition."""
    codes_out, scales_out, rope_out = planes(out, fmt)  # each uint8 [num_blocks, page, bytes]
    num_blocks, page = kv.shape[:2]
    step = max(1, CHUNK_VALUES // (page * fmt.d_qk))
    for i in range(0, num_blocks, step):
        chunk = slice(i, i + step)
        x = kv[chunk, :, 0, : fmt.d_nope].float()
        x = x.unflatten(-1, (fmt.num_scales, fmt.quant_tile))  # [n, page, num_scales, quant_tile]
        s = _tile_scales(x, scales) if isinstance(scales, str) else scales[chunk, :, 0]  # [n, page, num_scales]
        y = x / s.unsqueeze(-1)
        # Not every torch saturates: older ones make NaN of an overflow. Clamp keeps NaN; masked_fill drops its sign.
        codes = y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(y.isnan(), E4M3_NAN)
        codes_out[chunk] = codes.flatten(-2)
        scales_out[chunk] = _scale_bytes(s, fmt)
        rope_out[chunk] = kv[chunk, :, 0, fmt.d_nope :].to(torch.bfloat16).contiguous().view(torch.uint8)


def dequantize_kv_cache(cache: torch.Tensor, *, kv_format: KVFormat = V32) -> torch.Tensor:
    """Unpack a whole FP8 cache: bf16(float(code) * scale), rounded once; RoPE as stored.

    Args:
        cache: [num_blocks, page_block_size, 1, bytes_per_token] of uint8, int8 or float8_e4m3fn; pages may be strided.

    Returns: [num_blocks, page_block_size, 1, d_qk] bf16, contiguous.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or stride.
    """
    _check_cache("cache", cache, kv_format)
    num_blocks, page = cache.shape[:2]
    raw = planes(cache, kv_format)
    kv = torch.empty(num_blocks, page, 1, kv_format.d_qk, dtype=torch.bfloat16, device=cache.device)
    step = max(1, CHUNK_VALUES // (page * kv_format.d_qk))
    for i in range(0, num_blocks, step):
        kv[i : i + step, :, 0] = _decode(*(plane[i : i + step] for plane in raw), kv_format)
    return kv


def gather_tokens(cache: torch.Tensor, tokens: torch.Tensor, *, kv_format: KVFormat = V32) -> torch.Tensor:
    """Unpack only the named tokens of a cache, as `dequantize_kv_cache` would.

    Args:
        cache: as for `dequantize_kv_cache`.
        tokens: int32 or int64 [n], physical token numbers page * page_block_size + offset, each inside the cache.

    Returns: [n, d_qk] bf16.
    """
    _check_cache("cache", cache, kv_format)
    _check_tensor("tokens", tokens, (torch.int32, torch.int64), device=cache.device)
    page_idx, offset = tokens.long() // cache.shape[1], tokens.long() % cache.shape[1]
    return _decode(*(plane[page_idx, offset] for plane in planes(cache, kv_format)), kv_format)


def to_cache_indices(token_positions: torch.Tensor, block_table: torch.Tensor, page_block_size: int) -> torch.Tensor:
    """Turn token positions inside each request into the physical indices sparse decode takes.

    Args:
        token_positions: int32 or int64 [b, s_q, topk], position in the request; negative = none.
        block_table: int32 [b, max_blocks], physical page of each logical page; negative = none, and so are the
            positions on it. Entries that no position needs may be anything: they do not reach the result.
        page_block_size: tokens a page.

    Returns: int32 [b, s_q, topk]: block_table[r, pos // page] * page + pos % page, and -1 for none.

    Raises TypeError for wrong types or dtypes, ValueError for wrong shapes; on the CPU also ValueError for a position
    behind the table's last page or a result beyond int32 (on other devices, and in torch.compile, torch.export and make_fx,
    values are trusted: checking them would stall the stream or the trace).
    """
    _check_tensor("token_positions", token_positions, (torch.int32, torch.int64))
    _check_tensor("block_table", block_table, (torch.int32,), device=token_positions.device)
    if isinstance(page_block_size, bool) or not isinstance(page_block_size, int):
        raise TypeError(f"page_block_size: must be an int, got {type(page_block_size).__name__}")
    if page_block_size < 1:
        raise ValueError(f"page_block_size: must be at least 1, got {page_block_size}")
    if page_block_size > INT32_MAX:  # the products below stay within int64
        raise ValueError(f"page_block_size: must be at most {INT32_MAX}, got {page_block_size}")
    if token_positions.ndim != 3:
        raise ValueError(f"token_positions: must be [b, s_q, topk], got {list(token_positions.shape)}")
    b = token_positions.shape[0]
    if block_table.ndim != 2 or block_table.shape[0] != b or block_table.shape[1] < 1:
        raise ValueError(f"block_table: must be [b = {b}, max_blocks >= 1], got {list(block_table.shape)}")
    pos = token_positions.long()
    # A graph holds for values that are not there yet.
    is_graph = is_dynamo_compiling() or is_recorded(("token_positions", "block_table"), (token_positions, block_table))
    on_cpu = not is_graph and pos.device.type == "cpu" and pos.numel() > 0
    capacity = block_table.shape[1] * page_block_size
    if on_cpu and int(pos.max()) >= capacity:
        raise ValueError(
            f"token_positions: must be below max_blocks * page_block_size = {capacity}, got {int(pos.max())}"
        )
    # "None" looks up entry 0, which may be garbage, and the result is dropped.
    logical = (pos.clamp(min=0) // page_block_size).flatten(1)  # [b, s_q * topk]
    physical = block_table.long().gather(1, logical).view_as(pos)
    valid = (pos >= 0) & (physical >= 0)
    index = torch.where(valid, physical * page_block_size + pos % page_block_size, -1)
    if on_cpu and int(index.max()) > INT32_MAX:
        raise ValueError(f"block_table: physical index must fit in int32, got {int(index.max())}")
    return index.to(torch.int32)


def _tile_scales(x: torch.Tensor, rule: str) -> torch.Tensor:
    """The scale of each tile, fp32 [...], from x fp32 [..., quant_tile]."""
    amax = x.abs().amax(-1)  # NaN if any value is
    v = amax / torch.full_like(amax, E4M3_MAX)  # by a tensor: torch multiplies CUDA tensors by a number's rounded inverse
    if rule == "amax":
        s = v.clamp(min=FP32_TINY)
    else:
        v = v.clamp(min=POW2_FLOOR)
        mantissa, exponent = torch.frexp(v)  # v = mantissa * 2^exponent, 0.5 <= mantissa < 1
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)  # ceil(log2(v))
        # The power of two is put together from its bits: exp2 and pow need not be exact on every device.
        s = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
        s = torch.where(v.isinf(), v, s)
    return torch.where(amax.isnan(), torch.nan, s)


def _scale_bytes(s: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """uint8 [..., bytes of a token's scales, with padding] from fp32 [..., num_scales]."""
    if fmt.scale_bytes == 4:
        return s.contiguous().view(torch.uint8)
    # The exponent field of fp32 is e8m0: of a power of two, of 2^-127 (a subnormal: 0), of NaN and +inf (255).
    codes = (s.view(torch.int32) >> 23).to(torch.uint8)
    return torch.nn.functional.pad(codes, (0, fmt.scale_row_bytes - fmt.num_scales))


def _scale_values(raw: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """fp32 [..., num_scales] from what `_scale_bytes` makes; padding may be anything."""
    if fmt.scale_bytes == 4:
        return _packed(raw).view(torch.float32)
    codes = raw[..., : fmt.num_scales].to(torch.int32)
    values = torch.where(codes == 0, FP32_E8M0_ZERO, codes << 23).view(torch.float32)
    return values.masked_fill(codes == E8M0_NAN, torch.nan)


def planes(cache: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a checked cache without the gaps: codes, scales and RoPE, each uint8 [num_blocks, page, bytes]."""
    num_blocks, page = cache.shape[:2]
    raw = cache.view(torch.uint8)[:, :, 0]
    if not fmt.scale_plane:
        rows, scales, scale_bytes = raw, raw, fmt.num_scales * fmt.scale_bytes
    else:
        raw = raw.view(num_blocks, page * fmt.bytes_per_token)  # the bytes of a page are next to one another
        rows, scales = raw.split([page * fmt.row_bytes, page * fmt.scale_row_bytes], 1)
        rows, scales = rows.unflatten(1, (page, fmt.row_bytes)), scales.unflatten(1, (page, fmt.scale_row_bytes))
        scale_bytes = fmt.scale_row_bytes  # with the padding
    return (
        rows[..., fmt.nope_offset : fmt.nope_offset + fmt.d_nope],
        scales[..., fmt.scale_offset : fmt.scale_offset + scale_bytes],
        rows[..., fmt.rope_offset : fmt.rope_offset + fmt.rope_bytes],
    )


def _decode(codes: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """bf16 [..., d_qk] from the byte planes of the same leading shape."""
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (fmt.num_scales, fmt.quant_tile))
    s = _scale_values(scales, fmt).unsqueeze(-1)  # [..., num_scales, 1]
    nope = (values * s).flatten(-2).to(torch.bfloat16)
    return torch.cat([nope, _packed(rope).view(torch.bfloat16)], dim=-1)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """A copy that can be viewed as a wider dtype: x itself, though contiguous, may start at any byte of its storage."""
    return x.clone(memory_format=torch.contiguous_format)


def _check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None) -> None:
    check_plain(name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: dtype must be {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: must be on {device}, got {x.device}")


def check_format(kv_format: object) -> None:
    if not isinstance(kv_format, KVFormat):
        raise TypeError(f"kv_format: must be a KVFormat, such as mla_cute.V32, got {kv_format!r}")


def _check_cache(name: str, cache: object, fmt: KVFormat) -> None:
    check_format(fmt)
    _check_tensor(name, cache, CACHE_DTYPES)
    if cache.ndim != 4 or cache.shape[1] < 1 or cache.shape[2] != 1:
        raise ValueError(
            f"{name}: must be [num_blocks, page_block_size >= 1, 1, {fmt.bytes_per_token}], got {list(cache.shape)}"
        )
    if cache.shape[3] != fmt.bytes_per_token:
        got = str(cache.shape[3])
        for other in FORMATS.values():
            if cache.shape[3] == other.bytes_per_token:
                got += f": kv_format=mla_cute.{other.name.upper()} reads that"
        raise ValueError(f"{name}: last dim must be {fmt.bytes_per_token} bytes for {fmt.name.upper()}, got {got}")
    if cache.stride(3) != 1:
        raise ValueError(f"{name}: stride(3) must be 1, got {cache.stride(3)}")
    if cache.shape[1] > 1 and cache.stride(1) != fmt.bytes_per_token:
        raise ValueError(f"{name}: stride(1) must be {fmt.bytes_per_token}, got {cache.stride(1)}")
