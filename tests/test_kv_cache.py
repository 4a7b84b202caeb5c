"""The cache format byte by byte, against numbers worked out by hand or by this file's own e4m3."""

import math
import struct

import pytest
import torch

from mla_cute.kv_cache import MODEL1, V32, dequantize_kv_cache, gather_tokens, quantize_kv_cache, to_cache_indices

CACHE_DTYPES = [torch.uint8, torch.int8, torch.float8_e4m3fn]


def e4m3_value(code: int) -> float:
    """e4m3fn: sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinity, 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e4m3_code(x: float) -> int:
    """Nearest finite code, ties to the even one, saturating."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    return sign | min(range(0x7F), key=lambda c: (abs(e4m3_value(c) - min(abs(x), 448.0)), c & 1))


def bf16_bytes(x: float) -> bytes:
    return struct.pack("<f", x)[2:]  # x must be a bf16 number


def record(cache: torch.Tensor, page: int, token: int) -> bytes:
    return bytes(cache[page, token, 0].view(torch.uint8).tolist())


def packed(codes: bytes, scales: tuple[float, ...], rope: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A cache of one token [1, 1, 1, 656] from its bytes."""
    raw = codes + struct.pack("<4f", *scales) + rope
    assert len(raw) == 656
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(1, 1, 1, 656)


def random_kv(num_blocks: int, page: int, seed: int = 0, d_qk: int = 576) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(num_blocks, page, 1, 1, generator=g))
    return (torch.randn(num_blocks, page, 1, d_qk, generator=g) * size).to(torch.bfloat16)


def test_golden_bytes():
    """One token, every byte by hand. Tile 0: amax 448, scale 1. Tile 1: amax 450, scale 2. Tile 2: amax 2^-13 * 448,
    the smallest scale. Tile 3: zeros, the smallest scale."""
    kv = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
    tile0 = [448, 1, -2, 0.5, 17, 19, 2**-9, 2**-10, 1.5 * 2**-9, -240, 3 * 2**-11]
    want0 = [0x7E, 0x38, 0xC0, 0x30, 0x58, 0x5A, 0x01, 0x00, 0x02, 0xF7, 0x01]  # 17, 19, 2^-10, 1.5*2^-9: ties to even
    kv[0, 0, 0, : len(tile0)] = torch.tensor(tile0)
    kv[0, 0, 0, 128:131] = torch.tensor([450.0, -256.0, 1.0])
    want1 = [0x76, 0xF0, 0x30]  # 225 -> 224, -128, 0.5
    kv[0, 0, 0, 256 + 127] = -(2.0**-13) * 448
    kv[0, 0, 0, 384] = -0.0
    kv[0, 0, 0, 512:516] = torch.tensor([1.0, -1.5, math.inf, 2.0**-133])
    kv[0, 0, 0, 575] = 3.0
    want = bytearray(656)
    want[0 : len(want0)] = bytes(want0)
    want[128:131] = bytes(want1)
    want[383] = 0xFE
    want[384] = 0x80
    want[512:528] = bytes.fromhex("0000803f 00000040 00000039 00000039")  # 1, 2, 2^-13, 2^-13, little endian
    want[528:536] = bytes.fromhex("803f c0bf 807f 0100")
    want[654:656] = bytes.fromhex("4040")
    assert record(quantize_kv_cache(kv), 0, 0) == bytes(want)


def test_golden_bytes_of_model1():
    """A page of two tokens, every byte by hand: two rows of 576, then two of 8 scales."""
    kv = torch.zeros(1, 2, 1, 512, dtype=torch.bfloat16)
    kv[0, 0, 0, 0:3] = torch.tensor([448.0, 17.0, -2.0])  # tile 0: scale 1 = code 127
    kv[0, 0, 0, 64:66] = torch.tensor([450.0, -256.0])  # tile 1: scale 2
    kv[0, 0, 0, 128 + 63] = -(2.0**-13) * 448  # tile 2: the smallest scale, as of zeros: 2^-13 = code 114
    kv[0, 0, 0, 192] = math.nan  # tile 3
    kv[0, 0, 0, 256:258] = torch.tensor([math.inf, 1.0])  # tile 4: +inf has no code
    kv[0, 0, 0, 320] = 448 * 2.0**100  # tile 5: 2^100 = code 227
    kv[0, 0, 0, 448:450] = torch.tensor([1.0, -1.5])  # RoPE
    kv[0, 1, 0, 447] = 448 * 2.0**-5  # tile 6 of token 1: code 122
    kv[0, 1, 0, 511] = 3.0
    want = bytearray(2 * 584)
    want[0:3] = bytes([0x7E, 0x58, 0xC0])
    want[64:66] = bytes([0x76, 0xF0])
    want[191] = 0xFE
    want[192:256] = bytes([0x7F]) * 64
    want[256:258] = bytes([0x7F, 0x00])  # inf/inf, 1/inf
    want[320] = 0x7E
    want[448:452] = bytes.fromhex("803f c0bf")
    want[576 + 447] = 0x7E
    want[576 + 574 : 576 + 576] = bytes.fromhex("4040")
    want[1152:1160] = bytes([127, 128, 114, 255, 255, 227, 114, 0])  # the last is padding
    want[1160:1168] = bytes([114] * 6 + [122, 0])
    cache = quantize_kv_cache(kv, kv_format=MODEL1)
    assert cache.shape == (1, 2, 1, 584) and cache.dtype == torch.uint8
    assert bytes(cache.flatten().tolist()) == bytes(want)
    back = dequantize_kv_cache(cache, kv_format=MODEL1)
    assert back.shape == (1, 2, 1, 512) and back.dtype == torch.bfloat16
    assert back[0, 0, 0, :3].tolist() == [448.0, 16.0, -2.0] and back[0, 0, 0, 64:66].tolist() == [448.0, -256.0]
    assert back[0, 0, 0, 192:320].isnan().all() and int(back.isnan().sum()) == 128
    assert back[0, 0, 0, 320] == 448 * 2.0**100 and back[0, 1, 0, 447] == 14 and back[0, 1, 0, 511] == 3


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_all_e8m0_codes_decode(dtype):
    """Every scale code under every value code: 2^(code - 127), 0x00 too, 0xFF NaN; the padding may be anything."""
    page = torch.zeros(256 * 584, dtype=torch.uint8)
    page[: 256 * 576].view(256, 576)[:, :256] = torch.arange(256, dtype=torch.uint8)
    page[: 256 * 576].view(256, 576)[:, 256:448] = 0x38  # 1
    page[256 * 576 :].view(256, 8)[:] = torch.arange(256, dtype=torch.uint8)[:, None]
    cache = page.view(dtype).view(1, 256, 1, 584)
    got = dequantize_kv_cache(cache, kv_format=MODEL1)[0, :, 0]
    values = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)
    scales = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [math.nan], dtype=torch.float64)
    want = (values * scales[:, None]).float().to(torch.bfloat16)  # exact in fp64, and in fp32 but for an overflow
    assert torch.equal(got[:, :256].isnan(), want.isnan())
    assert torch.equal(got[:, :256].nan_to_num(), want.nan_to_num())
    assert torch.equal(got[:255, 256:448].double(), scales[:255, None].expand(-1, 192))
    assert got[0, 256] == 2.0**-127 and got[255, 256:448].isnan().all() and (got[:, 448:] == 0).all()
    page[256 * 576 :].view(256, 8)[:, 7] ^= 0x55
    assert torch.equal(dequantize_kv_cache(cache, kv_format=MODEL1)[0, :, 0].nan_to_num(), got.nan_to_num())


def test_model1_scales_are_powers_of_two():
    kv = random_kv(2, 3, d_qk=512)
    scales = 2.0 ** torch.randint(-12, 4, (2, 3, 1, 7), generator=torch.Generator().manual_seed(0)).float()
    scales[0, 0, 0, 0], scales[0, 0, 0, 1] = 2.0**-127, 2.0**127
    cache = quantize_kv_cache(kv, kv_format=MODEL1, scales=scales)
    for page in range(2):
        rows = bytes(cache[page].flatten().tolist())
        for token in range(3):
            assert rows[3 * 576 + 8 * token : 3 * 576 + 8 * token + 8] == bytes(
                [int(math.log2(s)) + 127 for s in scales[page, token, 0].tolist()] + [0]
            )
            for j in range(0, 448, 5):
                y = kv[page, token, 0, j].item() / scales[page, token, 0, j // 64].item()
                assert rows[576 * token + j] == e4m3_code(y)
    for bad in (0.3, 1.5, 2.0**-128, 3.0 * 2.0**-127, 2.0**-149):
        scales[1, 2, 0, 3] = bad
        with pytest.raises(ValueError, match=r"scales: must be powers of two from 2\^-127 on for MODEL1, whose .* got"):
            quantize_kv_cache(kv, kv_format=MODEL1, scales=scales)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 2, 53, 61, 64])
def test_model1_pages(page, dtype):
    """Pages apart, at an offset: the same bytes as in new ones, whose stride is FlashMLA's; the gaps stay as they are."""
    kv = random_kv(5, page, seed=page, d_qk=512)
    plain = quantize_kv_cache(kv, kv_format=MODEL1)
    assert plain.stride() == (-(-page * 584 // 576) * 576, 584, 584, 1)
    stride = -(-page * 584 // 16) * 16 + 48
    pool = torch.full((16 + 5 * stride,), 0xFF, dtype=torch.uint8)
    out = pool.view(dtype).as_strided((5, page, 1, 584), (stride, 584, 584, 1), 16)
    assert quantize_kv_cache(kv, kv_format=MODEL1, out=out) is out
    for i in range(5):
        begin = 16 + i * stride
        assert torch.equal(pool[begin : begin + page * 584], plain[i].flatten())
        assert (pool[begin + page * 584 : begin + stride] == 0xFF).all()
    assert (pool[:16] == 0xFF).all()
    got = dequantize_kv_cache(out, kv_format=MODEL1)
    assert got.is_contiguous() and torch.equal(got, dequantize_kv_cache(plain, kv_format=MODEL1))
    x, y = kv[..., :448].float().unflatten(-1, (7, 64)), got[..., :448].float().unflatten(-1, (7, 64))
    assert ((x - y).abs().amax(-1) <= x.abs().amax(-1) * 2**-4).all() and not torch.equal(x, y)
    assert torch.equal(got[..., 448:], kv[..., 448:])
    tokens = torch.randint(0, 5 * page, (40,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gather_tokens(out, tokens, kv_format=MODEL1), got.view(-1, 512)[tokens])


def test_model1_may_start_at_any_byte():
    want = quantize_kv_cache(random_kv(2, 4, d_qk=512), kv_format=MODEL1)
    for offset in range(8):
        for cache in (want[:1], want):
            pool = torch.zeros(6000, dtype=torch.uint8)
            moved = pool[offset : offset + cache.numel()].view(cache.shape).copy_(cache)
            assert torch.equal(
                dequantize_kv_cache(moved, kv_format=MODEL1), dequantize_kv_cache(cache.clone(), kv_format=MODEL1)
            )


def test_golden_amax_scale():
    kv = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
    kv[..., 0], kv[..., 1] = 3.0, -1.0
    raw = record(quantize_kv_cache(kv, scales="amax"), 0, 0)
    assert raw[512:516] == struct.pack("<f", 3.0 / 448)
    assert raw[516:520] == struct.pack("<f", 2.0**-126)  # a tile of zeros: the smallest normal number
    assert (raw[0], raw[1], raw[2], raw[128]) == (0x7E, e4m3_code(-448 / 3), 0, 0)


def test_pow2_scale_is_the_rounded_up_power_of_two():
    """Over many magnitudes, at the powers themselves and one fp32 step beside them; in exact arithmetic."""
    amax = []
    for e in range(-20, 20):
        x = torch.tensor(448 * 2.0**e)
        amax += [x.item(), torch.nextafter(x, torch.tensor(math.inf)).item(), torch.nextafter(x, x * 0).item()]
    kv = torch.zeros(len(amax), 1, 1, 576)  # fp32 input: bf16 has no such neighbours
    kv[:, 0, 0, 5] = torch.tensor(amax)
    kv[:, 0, 0, 6] = -kv[:, 0, 0, 5] / 2
    cache = quantize_kv_cache(kv)
    for i, a in enumerate(amax):
        ratio = struct.unpack("<f", struct.pack("<f", a / 448))[
            0
        ]  # amax / 448 in fp32, as the format's definition has it
        want = 2.0**-13
        while want < max(ratio, struct.unpack("<f", struct.pack("<f", 1e-4))[0]):
            want *= 2
        assert struct.unpack("<f", record(cache, i, 0)[512:516])[0] == want, a


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("scales", [(1.0, 2.0, 0.25, 2.0**-13), (0.3, 1.7e-3, 123.456, 1.1)], ids=["pow2", "any"])
def test_all_codes_decode(dtype, scales):
    """All 256 codes under every scale: the fp32 product, rounded once to bf16."""
    codes = bytes(range(256)) * 2
    for shift in (0, 128):  # both halves of the codes meet all four scales
        shifted = codes[shift:] + codes[:shift]
        rope = b"".join(bf16_bytes(i - 31.5) for i in range(64))
        kv = dequantize_kv_cache(packed(shifted, scales, rope, dtype))
        assert kv.dtype == torch.bfloat16 and kv.shape == (1, 1, 1, 576)
        got = kv.flatten().double().tolist()
        s32 = struct.unpack("<4f", struct.pack("<4f", *scales))
        for i, code in enumerate(shifted):
            product = e4m3_value(code) * s32[i // 128]  # exact in fp64: 4 + 24 bits
            want = torch.tensor(product, dtype=torch.float64).float().to(torch.bfloat16).item()
            assert math.isnan(got[i]) if math.isnan(want) else got[i] == want, (i, code)
            assert math.copysign(1, got[i]) == math.copysign(1, want) or math.isnan(want)
        assert got[512:] == [i - 31.5 for i in range(64)]


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_all_codes_survive_a_round_trip(dtype):
    scale = torch.tensor([1.0, 2.0, 0.25, 2.0**-13])
    codes = bytes(c for c in range(256) if c not in (0x7F, 0xFF)) * 2 + bytes(4)
    cache = packed(codes, tuple(scale.tolist()), bytes(range(128)), dtype)
    again = quantize_kv_cache(dequantize_kv_cache(cache), scales=scale, out=torch.zeros_like(cache))
    assert record(again, 0, 0) == record(cache, 0, 0)


@pytest.mark.parametrize("scales", ["pow2", "amax", "tensor"])
def test_codes_are_the_nearest(scales):
    """Against this file's own e4m3 by search, for one tile of random values each."""
    kv = random_kv(2, 3)
    if scales == "tensor":  # some of these saturate
        scales = torch.exp(torch.randn(2, 3, 1, 4, generator=torch.Generator().manual_seed(1))) / 300
    cache = quantize_kv_cache(kv, scales=scales)
    saturated = 0
    for page in range(2):
        for token in range(3):
            raw = record(cache, page, token)
            for tile in range(4):
                (s,) = struct.unpack_from("<f", raw, 512 + 4 * tile)
                if isinstance(scales, torch.Tensor):
                    assert s == scales[page, token, 0, tile].item()
                for j in range(128 * tile, 128 * tile + 128, 5):
                    y = (kv[page, token, 0, j].float() / torch.tensor(s)).item()  # one fp32 division
                    assert raw[j] == e4m3_code(y), (page, token, j, y)
                    saturated += abs(y) > 464
    assert (saturated > 0) == isinstance(scales, torch.Tensor)


def test_round_trip_error():
    """|x - dequantised| is at most half an e4m3 step of the tile's largest binade, plus bf16's rounding."""
    kv = random_kv(3, 53)
    for scales in ("pow2", "amax"):
        got = dequantize_kv_cache(quantize_kv_cache(kv, scales=scales))
        x, y = kv[..., :512].float().unflatten(-1, (4, 128)), got[..., :512].float().unflatten(-1, (4, 128))
        err, amax = (x - y).abs().amax(-1), x.abs().amax(-1)
        assert (err <= amax * (2**-4 + 2**-8)).all()
        assert (err > 0).any()
        assert torch.equal(got[..., 512:], kv[..., 512:])


@pytest.mark.parametrize("scales", ["pow2", "amax"])
def test_nan_and_inf(scales):
    kv = torch.ones(1, 1, 1, 576, dtype=torch.bfloat16)
    kv[..., 3] = -math.nan  # tile 0
    kv[..., 128], kv[..., 129] = math.inf, -math.inf  # tile 1
    kv[..., 512 + 7] = math.nan
    raw = record(quantize_kv_cache(kv, scales=scales), 0, 0)
    s = struct.unpack("<4f", raw[512:528])
    assert math.isnan(s[0]) and s[1] == math.inf and 0 < s[2] == s[3] < 1
    assert raw[:128] == bytes([0x7F]) * 128
    assert raw[128:256] == bytes([0x7F, 0x7F]) + bytes(126)
    assert raw[256] == e4m3_code(1 / s[2])
    back = dequantize_kv_cache(quantize_kv_cache(kv, scales=scales)).flatten()
    assert back[:256].isnan().all() and not back[256:512].isnan().any()  # 0 * inf is NaN too
    assert back[512 + 7].isnan() and int(back[512:].isnan().sum()) == 1


def test_poisoned_token_is_nan_in_every_group():
    kv = torch.full((1, 1, 1, 576), math.nan, dtype=torch.bfloat16)
    cache = quantize_kv_cache(kv)
    assert record(cache, 0, 0)[:512] == bytes([0x7F]) * 512
    assert cache[0, 0, 0, 512:528].clone().view(torch.float32).isnan().all()
    assert cache[0, 0, 0, 528:].clone().view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 53, 64])
def test_strided_pages(page, dtype):
    """Pages one row and 48 bytes apart, at an offset: same bytes as packed; the gaps are neither written nor read."""
    kv = random_kv(5, page, seed=page)
    plain = quantize_kv_cache(kv)
    stride = (page + 1) * 656 + 48
    pool = torch.full((16 + 5 * stride,), 0xFF, dtype=torch.uint8)
    out = pool.view(dtype).as_strided((5, page, 1, 656), (stride, 656, 656, 1), 16)
    assert quantize_kv_cache(kv, out=out) is out
    for i in range(5):
        begin = 16 + i * stride
        assert torch.equal(pool[begin : begin + page * 656], plain[i].flatten())
        assert (pool[begin + page * 656 : begin + stride] == 0xFF).all()
    assert (pool[:16] == 0xFF).all()
    got = dequantize_kv_cache(out)
    assert got.is_contiguous() and torch.equal(got, dequantize_kv_cache(plain)) and not got.isnan().any()
    tokens = torch.randint(0, 5 * page, (40,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gather_tokens(out, tokens), got.view(-1, 576)[tokens])


@pytest.mark.parametrize("offset", range(8))
def test_a_cache_may_start_at_any_byte(offset):
    """One token, several, and one of many: where the parts of a record are contiguous they start where they start."""
    want = quantize_kv_cache(random_kv(2, 3))
    for cache in (want[:1, :1], want[:, :1], want):
        pool = torch.zeros(5000, dtype=torch.uint8)
        moved = pool[offset : offset + cache.numel()].view(cache.shape).copy_(cache)
        assert torch.equal(dequantize_kv_cache(moved), dequantize_kv_cache(cache.clone()))
        token = torch.tensor([0])
        assert torch.equal(gather_tokens(moved, token), gather_tokens(cache.clone(), token))


def test_chunks_join(monkeypatch):
    kv = random_kv(7, 4)
    whole = quantize_kv_cache(kv, scales="amax")
    dequantized = dequantize_kv_cache(whole)
    scales = whole[..., 512:528].contiguous().view(torch.float32)
    monkeypatch.setattr("mla_cute.kv_cache.CHUNK_VALUES", 2 * 4 * 576)
    assert torch.equal(quantize_kv_cache(kv, scales="amax"), whole)
    assert torch.equal(quantize_kv_cache(kv, scales=scales), whole)
    assert torch.equal(dequantize_kv_cache(whole), dequantized)


def test_empty_cache():
    cache = quantize_kv_cache(torch.empty(0, 64, 1, 512, dtype=torch.bfloat16), kv_format=MODEL1)
    assert cache.shape == (0, 64, 1, 584) and dequantize_kv_cache(cache, kv_format=MODEL1).shape == (0, 64, 1, 512)
    cache = quantize_kv_cache(torch.empty(0, 64, 1, 576, dtype=torch.bfloat16))
    assert cache.shape == (0, 64, 1, 656) and dequantize_kv_cache(cache).shape == (0, 64, 1, 576)


def test_format_constants():
    assert (MODEL1.bytes_per_token, MODEL1.d_qk, MODEL1.d_v, MODEL1.num_scales) == (584, 512, 512, 7)
    assert MODEL1.rope_offset + MODEL1.rope_bytes == MODEL1.row_bytes == 576
    assert MODEL1.row_bytes + MODEL1.scale_row_bytes == MODEL1.bytes_per_token
    pages = {2: 1728, 61: 35712, 64: 37440, 69: 40320, 256: 149760, 576: 336384}  # FlashMLA's padded strides
    assert {page: MODEL1.page_bytes(page) for page in pages} == pages
    assert V32.page_bytes(64) == 64 * 656
    assert (V32.bytes_per_token, V32.d_qk, V32.d_v, V32.num_scales) == (656, 576, 512, 4)
    assert V32.rope_offset + V32.rope_bytes == V32.bytes_per_token == V32.row_bytes
    assert V32.scale_offset + V32.num_scales * V32.scale_bytes == V32.rope_offset


def test_to_cache_indices():
    table = torch.tensor([[7, 3, 2147480000], [0, -5, 2147480000]], dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        pos = torch.tensor([[[0, 4, 5, 9, -1]], [[4, -1, -7, 0, 2]]], dtype=dtype)
        got = to_cache_indices(pos, table, 5)
        assert got.dtype == torch.int32
        assert got.tolist() == [[[35, 39, 15, 19, -1]], [[4, -1, -1, 0, 2]]]
    # "None" in a request without any page: entry 0 is garbage too.
    garbage = torch.full((2, 1), 2147480000, dtype=torch.int32)
    assert to_cache_indices(torch.full((2, 1, 3), -1), garbage, 64).tolist() == [[[-1] * 3]] * 2
    # A page that is not there has no tokens, whatever its number and the offset.
    for page in (-1, -5, -(2**31)):
        pos = torch.tensor([[[0, 7, 63, 64, 127]]])
        got = to_cache_indices(pos, torch.tensor([[page, 3]], dtype=torch.int32), 64)
        assert got.tolist() == [[[-1, -1, -1, 192, 255]]]
    # Physical indices stay exact where fp32 would not.
    assert (
        to_cache_indices(torch.tensor([[[63]]]), torch.tensor([[33554430]], dtype=torch.int32), 64).item() == 2147483583
    )


def kv_ok() -> torch.Tensor:
    return torch.zeros(2, 3, 1, 576, dtype=torch.bfloat16)


def cache_ok() -> torch.Tensor:
    return torch.zeros(2, 3, 1, 656, dtype=torch.uint8)


BAD_CALLS = {
    "kv type": (lambda: quantize_kv_cache([1.0]), TypeError, "kv: must be a torch.Tensor, got list"),
    "kv dtype": (lambda: quantize_kv_cache(kv_ok().double()), TypeError, "kv: dtype must be .* got torch.float64"),
    "kv shape": (
        lambda: quantize_kv_cache(kv_ok()[..., :512]),
        ValueError,
        r"kv: must be .* 576\], got \[2, 3, 1, 512",
    ),
    "scales word": (lambda: quantize_kv_cache(kv_ok(), scales="fp8"), ValueError, 'scales: must be .* got "fp8"'),
    "scales type": (lambda: quantize_kv_cache(kv_ok(), scales=1.0), TypeError, "scales: must be .* got float"),
    "scales dtype": (
        lambda: quantize_kv_cache(kv_ok(), scales=torch.ones(4, dtype=torch.float64)),
        TypeError,
        "scales: dtype must be torch.float32, got torch.float64",
    ),
    "scales shape": (
        lambda: quantize_kv_cache(kv_ok(), scales=torch.ones(5)),
        ValueError,
        r"scales: must broadcast to \[2, 3, 1, 4\], got \[5\]",
    ),
    "scales sign": (
        lambda: quantize_kv_cache(kv_ok(), scales=torch.tensor([1.0, 1.0, 0.0, 1.0])),
        ValueError,
        "scales: must be positive, got 0",
    ),
    "out dtype": (lambda: quantize_kv_cache(kv_ok(), out=cache_ok().int()), TypeError, "out: dtype must be .*int32"),
    "out shape": (
        lambda: quantize_kv_cache(kv_ok(), out=cache_ok()[:1]),
        ValueError,
        r"out: must have 2 blocks of 3 tokens .* got \[1, 3, 1, 656\]",
    ),
    "cache last": (
        lambda: dequantize_kv_cache(cache_ok()[..., :576]),
        ValueError,
        "cache: last dim must be 656 bytes for V32, got 576",
    ),
    "cache of MODEL1": (
        lambda: dequantize_kv_cache(torch.zeros(2, 3, 1, 584, dtype=torch.uint8)),
        ValueError,
        "cache: last dim must be 656 bytes for V32, got 584: kv_format=mla_cute.MODEL1 reads that",
    ),
    "amax for MODEL1": (
        lambda: quantize_kv_cache(kv_ok()[..., :512], kv_format=MODEL1, scales="amax"),
        ValueError,
        'scales: must be "pow2" or a fp32 tensor for MODEL1, whose scales are e8m0, got "amax"',
    ),
    "cache rank": (lambda: dequantize_kv_cache(cache_ok()[0]), ValueError, r"cache: must be .* got \[3, 1, 656\]"),
    "cache stride": (
        lambda: dequantize_kv_cache(torch.zeros(2, 3, 1, 672, dtype=torch.uint8)[..., :656]),
        ValueError,
        r"cache: stride\(1\) must be 656, got 672",
    ),
    "positions rank": (
        lambda: to_cache_indices(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32), 4),
        ValueError,
        r"token_positions: must be \[b, s_q, topk\], got \[2, 3\]",
    ),
    "positions dtype": (
        lambda: to_cache_indices(torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=torch.int32), 4),
        TypeError,
        "token_positions: dtype must be .* got torch.float32",
    ),
    "positions range": (
        lambda: to_cache_indices(torch.full((2, 1, 3), 8), torch.zeros(2, 2, dtype=torch.int32), 4),
        ValueError,
        "token_positions: must be below .* = 8, got 8",
    ),
    "table dtype": (
        lambda: to_cache_indices(torch.zeros(2, 1, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int64), 4),
        TypeError,
        "block_table: dtype must be torch.int32, got torch.int64",
    ),
    "table shape": (
        lambda: to_cache_indices(torch.zeros(2, 1, 3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32), 4),
        ValueError,
        r"block_table: must be \[b = 2, max_blocks >= 1\], got \[3, 1\]",
    ),
    "table overflow": (
        lambda: to_cache_indices(torch.zeros(1, 1, 1, dtype=torch.int32), torch.tensor([[2147480000]]).int(), 64),
        ValueError,
        "block_table: physical index must fit in int32, got 137438720000",
    ),
    "page": (
        lambda: to_cache_indices(torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), 0),
        ValueError,
        "page_block_size: must be at least 1, got 0",
    ),
    **{
        f"page {page}": (
            lambda page=page: to_cache_indices(torch.zeros(1, 1, 1).int(), torch.zeros(1, 1).int(), page),
            ValueError,
            f"page_block_size: must be at most 2147483647, got {page}",
        )
        for page in (2**31, 2**63, 2**70)
    },
    "out pages overlap": (
        lambda: quantize_kv_cache(
            kv_ok(), out=torch.zeros(9999, dtype=torch.uint8).as_strided((2, 3, 1, 656), (656, 656, 1, 1))
        ),
        ValueError,
        "out: elements must not share memory, got shape .* with strides",
    ),
    "out expanded": (
        lambda: quantize_kv_cache(kv_ok(), out=cache_ok()[:1].expand(2, -1, -1, -1)),
        ValueError,
        "out: elements must not share memory",
    ),
    "out over kv": (
        lambda: quantize_kv_cache((x := kv_ok()), out=x.view(torch.uint8).as_strided((2, 3, 1, 656), (1968, 656, 656, 1))),
        ValueError,
        "out: must not overlap kv from first to last byte, got 3936 bytes at 0x[0-9a-f]+ and 6912 bytes at 0x",
    ),
    "quantize format": (
        lambda: quantize_kv_cache(kv_ok(), kv_format="v32"),
        TypeError,
        "kv_format: must be a KVFormat.* got 'v32'",
    ),
    "dequantize format": (
        lambda: dequantize_kv_cache(cache_ok(), kv_format=None),
        TypeError,
        "kv_format: must be .* got None",
    ),
    "gather format": (
        lambda: gather_tokens(cache_ok(), torch.zeros(1).int(), kv_format="v32"),
        TypeError,
        "kv_format: must be .* got 'v32'",
    ),
    "kv sparse": (
        lambda: quantize_kv_cache(kv_ok().to_sparse()),
        TypeError,
        r"kv: must be a dense \(strided\) tensor, got torch.sparse_coo",
    ),
    "kv nested": (
        lambda: quantize_kv_cache(torch.nested.nested_tensor(list(kv_ok()))),
        TypeError,
        r"kv: must be a dense \(strided\) tensor, got a nested tensor",
    ),
    "positions sparse": (
        lambda: to_cache_indices(torch.zeros(2, 1, 3).int().to_sparse(), torch.zeros(2, 1).int(), 4),
        TypeError,
        r"token_positions: must be a dense \(strided\) tensor, got torch.sparse_coo",
    ),
    "table nested": (
        lambda: to_cache_indices(torch.zeros(2, 1, 3).int(), torch.nested.nested_tensor([torch.zeros(1).int()] * 2), 4),
        TypeError,
        r"block_table: must be a dense \(strided\) tensor, got a nested tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_name_the_argument(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call()
