"""The cache writer: bytes of `quantize_kv_cache`, nothing else touched; the kernel's bits are the torch version's."""

import re

import pytest
import torch

from mla_cute import emulator, jit
from mla_cute.bench import KINDS, measure_write
from mla_cute.cache_writer import write_kv_cache
from mla_cute.emulator import Options
from mla_cute.kv_cache import FORMATS, MODEL1, V32, quantize_by_torch, quantize_kv_cache
from mla_cute.testing import assert_bitwise

kinds = pytest.mark.parametrize(("fmt", "scales"), KINDS, ids=[f"{f.name}-{s}" for f, s in KINDS])
POISON = 0xFF
SCHEDULES = 4


def make_tokens(fmt, n, seed=0, device="cpu", wide=0):
    """latent, rope: sizes from 2^-140 to 2^100 and zeros of both signs; some tiles with NaN or Inf. wide: columns between."""
    g = torch.Generator().manual_seed(seed)
    d = fmt.d_nope + fmt.d_rope
    exponent = torch.randint(-140, 100, (n, fmt.num_scales, 1), generator=g) * (torch.rand(n, 1, 1, generator=g) < 0.3)
    nope = torch.randn(n, fmt.num_scales, fmt.quant_tile, generator=g).double() * 2.0**exponent
    nope = nope.masked_fill(torch.rand(nope.shape, generator=g) < 0.05, 0.0)
    nope = nope.masked_fill(torch.rand(nope.shape, generator=g) < 0.05, -0.0)
    special = torch.rand(n, fmt.num_scales, generator=g)
    some = torch.rand(nope.shape, generator=g) < 0.02
    for i, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        nope = torch.where(((special < 0.03 * (i + 1)) & (special >= 0.03 * i))[:, :, None] & some, value, nope)
    nope[:, 0] = torch.where(special[:, :1] > 0.95, 0.0, nope[:, 0])  # a tile of zeros
    tokens = torch.randn(n, d + 2 * wide, generator=g).to(torch.bfloat16)
    tokens[:, wide : wide + fmt.d_nope] = nope.flatten(1).to(torch.bfloat16)
    tokens[n // 2 :, -fmt.d_rope :][:2] = float("nan")
    tokens = tokens.to(device)
    return tokens[:, wide : wide + fmt.d_nope], tokens[:, -fmt.d_rope :]


def make_cache(fmt, num_blocks, page, gap=0, device="cpu"):
    """(cache full of POISON, all of its memory): `gap` bytes behind each page."""
    size = page * fmt.bytes_per_token
    stride = -(-size // 16) * 16 + gap
    pool = torch.full((num_blocks, stride), POISON, dtype=torch.uint8, device=device)
    return pool.as_strided((num_blocks, page, 1, fmt.bytes_per_token), (stride, fmt.bytes_per_token, size, 1)), pool


def make_slots(n, capacity, seed=0, dtype=torch.int64, device="cpu", skipped=0.2):
    """Distinct slots; some are negative, and some past the cache."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(max(capacity, n), generator=g)[:n]
    limits = torch.iinfo(dtype)
    wild = torch.tensor([-1, -capacity, limits.min, capacity, capacity + 5, limits.max])
    pick = wild[torch.randint(0, len(wild), (n,), generator=g)]
    return torch.where(torch.rand(n, generator=g) < skipped, pick, slots).to(dtype).to(device)


def expected(fmt, scales, latent, rope, slots, num_blocks, page, gap=0):
    """All of the memory of a cache that was written, made another way: a whole cache quantised, then poisoned again."""
    latent, rope, slots = latent.cpu(), rope.cpu(), slots.cpu().long()
    keys = torch.zeros(num_blocks * page, 1, fmt.d_qk, dtype=torch.bfloat16)
    keep = (slots >= 0) & (slots < len(keys))
    keys[slots[keep], 0] = torch.cat([latent, rope], -1)[keep]
    cache, pool = make_cache(fmt, num_blocks, page, gap)
    quantize_kv_cache(keys.view(num_blocks, page, 1, -1), kv_format=fmt, scales=scales, out=cache)
    written = torch.zeros(num_blocks, page, dtype=torch.bool)
    written.view(-1)[slots[keep]] = True
    row, plane = fmt.row_bytes, fmt.scale_row_bytes
    for p, t in (~written).nonzero().tolist():
        pool[p, t * row : (t + 1) * row] = POISON
        pool[p, page * row + t * plane : page * row + (t + 1) * plane] = POISON
    return pool


# ----- cpu ------------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize(("num_blocks", "page", "gap"), [(5, 16, 0), (9, 1, 48), (3, 61, 16), (1, 64, 0)])
def test_writes_the_records_and_nothing_else(fmt, scales, num_blocks, page, gap):
    for dtype in (torch.int64, torch.int32):
        n = min(40, num_blocks * page)
        latent, rope = make_tokens(fmt, n, wide=8)
        slots = make_slots(n, num_blocks * page, dtype=dtype)
        cache, pool = make_cache(fmt, num_blocks, page, gap)
        assert write_kv_cache(cache, latent, rope, slots, scales=scales) is None
        assert_bitwise(pool, expected(fmt, scales, latent, rope, slots, num_blocks, page, gap), name="kv_cache")
        assert (pool != POISON).any() and (pool == POISON).any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_format_dtype_and_nothing_to_do(fmt):
    latent, rope = make_tokens(fmt, 4)
    slots = torch.tensor([3, -1, 0, 99])
    first, _ = make_cache(fmt, 2, 4)
    write_kv_cache(first, latent, rope, slots, kv_format=fmt)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        cache, _ = make_cache(fmt, 2, 4)
        write_kv_cache(cache.view(dtype), latent, rope, slots)
        assert_bitwise(cache, first, name="kv_cache")
    cache, pool = make_cache(fmt, 2, 4)
    write_kv_cache(cache, latent[:0], rope[:0], slots[:0])
    write_kv_cache(cache, latent, rope, torch.full((4,), -1))
    write_kv_cache(cache[:0], latent, rope, slots)
    assert (pool == POISON).all()


def call(fmt=V32, n=4, **change):
    """A call that passes, with changed arguments; the changes are functions of what passes."""
    latent, rope = make_tokens(fmt, n)
    args = {"kv_cache": make_cache(fmt, 3, 8)[0], "latent": latent, "rope": rope, "slots": torch.arange(n)}
    args |= {name: make(args.get(name)) if callable(make) else make for name, make in change.items()}
    return write_kv_cache(**args)


BAD = [
    ({"kv_cache": 3}, TypeError, "kv_cache: must be a torch.Tensor, got int"),
    (
        {"kv_cache": lambda t: t.float()},
        TypeError,
        "kv_cache: dtype must be uint8 or int8 or float8_e4m3fn, got torch.float32",
    ),
    (
        {"kv_cache": lambda t: t[:, :, 0]},
        ValueError,
        "kv_cache: must be [num_blocks, page_block_size >= 1, 1, 656 (V32)",
    ),
    (
        {"kv_cache": lambda t: t[..., :600]},
        ValueError,
        "must be the bytes of a token, 656 (V32) or 584 (MODEL1), got 600",
    ),
    ({"kv_cache": lambda t: t[:, ::2]}, ValueError, "kv_cache: token stride (dim 1) must be 656 bytes, got 1312"),
    ({"kv_cache": lambda t: t[:1].expand(3, 8, 1, 656)}, ValueError, "kv_cache: elements must not share memory"),
    (
        {
            "kv_cache": lambda t: torch.zeros(3 * 8 * 656 + 9 * 3, dtype=torch.uint8).as_strided(
                t.shape, (5257, 656, 656, 1)
            )
        },
        ValueError,
        "kv_cache: page stride (dim 0) must be a multiple of 16 bytes, got 5257",
    ),
    (
        {"kv_cache": lambda t: torch.zeros(8 * 656 + 1, dtype=torch.uint8)[1:].view(1, 8, 1, 656)},
        ValueError,
        "kv_cache: first element must be 16-byte aligned, got an address 1 bytes past one",
    ),
    (
        {"kv_cache": lambda t: torch.empty(2**25, 64, 1, 656, dtype=torch.uint8, device="meta")},
        ValueError,
        "kv_cache: device",
    ),
    (
        {"kv_cache": lambda t: t[:1].expand(2**26, 8, 1, 656)[:, :1].expand(2**26, 64, 1, 656)},
        ValueError,
        "num_blocks * page_block_size must be at most 2147483647, got 67108864 * 64 = 4294967296",
    ),
    ({"latent": None}, TypeError, "latent: must be a torch.Tensor, got NoneType"),
    ({"latent": lambda t: t.half()}, TypeError, "latent: dtype must be bfloat16, got torch.float16"),
    ({"latent": lambda t: t[:, :448]}, ValueError, "latent: must be [n, 512], the NoPE values of V32, got [4, 448]"),
    ({"latent": lambda t: t.t().contiguous().t()}, ValueError, "latent: last dim must be contiguous"),
    (
        {"latent": lambda t: torch.zeros(4, 513, dtype=torch.bfloat16)[:, :512]},
        ValueError,
        "latent: stride of dim 0 must be a multiple of 16 bytes (8 elements), got 513 elements",
    ),
    (
        {"rope": lambda t: torch.zeros(4, 72, dtype=torch.bfloat16)[:, 1:65]},
        ValueError,
        "rope: first element must be 16-byte aligned, got an address 2 bytes past one",
    ),
    ({"rope": lambda t: t[:, :32]}, ValueError, "rope: must be [n, 64], the RoPE values of V32, got [4, 32]"),
    ({"rope": lambda t: t[:3]}, ValueError, "rope: must have 4 rows as latent, got 3"),
    ({"slots": lambda t: t.float()}, TypeError, "slots: dtype must be int64 or int32, got torch.float32"),
    (
        {"slots": lambda t: t[:3]},
        ValueError,
        "slots: shape must be [n] = [4], an entry for each row of latent, got [3]",
    ),
    ({"slots": lambda t: t.to("meta")}, ValueError, "slots: must be on the device of kv_cache (cpu), got meta"),
    ({"scales": "exact"}, ValueError, 'scales: must be "pow2" or "amax", got "exact"'),
    ({"scales": torch.ones(1)}, TypeError, 'scales: must be "pow2" or "amax", got Tensor'),
    (
        {"fmt": MODEL1, "scales": "amax"},
        ValueError,
        'scales: must be "pow2" for MODEL1, whose scales are e8m0, got "amax"',
    ),
    ({"kv_format": MODEL1}, ValueError, "kv_format: must be V32 for a cache of 656 bytes a token, got MODEL1"),
    ({"kv_format": "v32"}, TypeError, "kv_format: must be a KVFormat"),
    ({"backend": "gpu"}, ValueError, "backend: must be None or"),
    (
        {"latent": lambda t: t.requires_grad_()},
        ValueError,
        "latent: must not require grad: write_kv_cache has no backward",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m[:50] for _, _, m in BAD])
def test_bad_input(change, error, message):
    call(fmt=change.get("fmt", V32))  # this metadata passes: what is looked at in every call must not hide behind it
    with pytest.raises(error, match=re.escape(message)):
        call(**change)


def test_sources_in_the_cache_are_refused():
    cache = torch.zeros(4, 8, 1, 656, dtype=torch.uint8)
    latent = cache.view(-1)[656 * 8 :][: 2 * 1024].view(torch.bfloat16).view(2, 512)
    _, rope = make_tokens(V32, 2)
    with pytest.raises(
        ValueError, match="latent: must not overlap kv_cache from first to last byte, got 2048 bytes at"
    ):
        write_kv_cache(cache, latent, rope, torch.arange(2))


# ----- compile --------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@kinds
@pytest.mark.parametrize("slot_bytes", [8, 4, 0])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiles_without_spills(arch, slot_bytes, fmt, scales):
    from mla_cute import cache_writer_kernel as module

    problem = module.WriteProblem(fmt.name, scales, slot_bytes)
    config = module.default_config(problem)
    found = jit.inspect(module, problem, config, arch)
    (name, usage), *others = found.resources.items()
    assert name.startswith("mla_write_kv_cache") and not others
    assert usage["REG"] <= 80 and usage["STACK"] == 0 and usage["LOCAL"] == 0  # 80: 24 warps an SM, 55 KB of loads
    assert found.spill_bytes == 0 and not found.advisories
    ptx = found.ptx[0]
    assert "ld.local" not in ptx and ".ftz" not in ptx and "approx" not in ptx
    assert ptx.count("ld.global.v4.b32") == 3 * config.tokens_in_flight
    assert ptx.count("st.global.v4.b32") == 2 * config.tokens_in_flight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 100}, "config.threads"),
        ({"tokens_in_flight": 0}, "tokens_in_flight"),
        ({"threads": 64.0}, "an int"),
    ],
)
def test_config(change, message):
    from mla_cute import cache_writer_kernel as module

    with pytest.raises(ValueError, match=message):
        module.Config(**change).check()


# ----- emulate --------------------------------------------------------------------------------------------------------

EMULATED = [  # n, num_blocks, page, gap, columns around the latent, slots
    (37, 5, 16, 0, 0, torch.int64),
    (1, 1, 1, 0, 0, torch.int64),
    (23, 3, 61, 32, 8, torch.int32),
    (16, 40, 1, 16, 16, torch.int64),
    (9, 2, 69, 0, 776, torch.int32),
]


@pytest.mark.emulate
@kinds
@pytest.mark.parametrize(("n", "num_blocks", "page", "gap", "wide", "dtype"), EMULATED)
def test_emulated_kernel(fmt, scales, n, num_blocks, page, gap, wide, dtype):
    latent, rope = make_tokens(fmt, n, seed=n, wide=wide)
    slots = make_slots(n, num_blocks * page, seed=n, dtype=dtype)
    if n == 1:
        slots[0] = 0
    else:  # the first that is past the cache, and the last that is not
        slots[slots == num_blocks * page - 1] = -1
        slots[3:5] = torch.tensor([num_blocks * page, num_blocks * page - 1])
    spread = torch.zeros(n, 3, dtype=dtype)  # slots need not be contiguous
    spread[:, 1] = slots
    by_torch, pool = make_cache(fmt, num_blocks, page, gap)
    write_kv_cache(by_torch, latent, rope, slots, scales=scales)
    for i in range(SCHEDULES):
        cache, ours = make_cache(fmt, num_blocks, page, gap)
        with emulator.session(options=Options.schedule(i), arch=("sm_90a", "sm_100a")[i % 2]) as s:
            write_kv_cache(cache, latent, rope, spread[:, 1] if i == 1 else slots, scales=scales, backend="emulator")
        assert s.findings == [] and len(s.grids) == 1
        assert_bitwise(ours, pool, name=f"kv_cache, schedule {i}")


@pytest.mark.emulate
@kinds
def test_emulated_kernel_on_every_bf16(fmt, scales):
    """All 65,536 numbers, in tiles of one exponent and in tiles that mix them."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    n = -(-(2**16) // fmt.d_nope)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    finite = shuffled[shuffled.isfinite()]
    for values in (every, shuffled, finite):
        padded = torch.zeros(n * fmt.d_nope, dtype=torch.bfloat16)
        padded[: len(values)] = values
        latent, rope, slots = padded.view(n, -1), every[: n * 64].view(n, 64), torch.arange(n)
        a, b = (make_cache(fmt, n, 1)[0] for _ in range(2))
        write_kv_cache(a, latent, rope, slots, scales=scales)
        with emulator.session():
            write_kv_cache(b, latent, rope, slots, scales=scales, backend="emulator")
        assert_bitwise(b, a, name="kv_cache")


def make_keys(fmt, num_blocks, page, seed=0, device="cpu"):
    """[num_blocks, page, 1, d_qk] of `make_tokens`."""
    return torch.cat(make_tokens(fmt, num_blocks * page, seed), -1).view(num_blocks, page, 1, fmt.d_qk).to(device)


def spaced(kv, tokens=0, values=0, offset=0):
    """The same keys with `tokens` rows between pages and `values` between rows, `offset` values into their memory."""
    num_blocks, page, _, d_qk = kv.shape
    row = d_qk + values
    pool = torch.full((offset + num_blocks * (page + tokens) * row,), float("nan"), dtype=kv.dtype, device=kv.device)
    return pool.as_strided(kv.shape, ((page + tokens) * row, row, row, 1), offset).copy_(kv)


def column_major(kv):
    return kv.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


LAYOUTS = {  # of keys: what the kernel reads as they are, and what is copied first
    "contiguous": (lambda kv: kv, True),
    "rows apart": (lambda kv: spaced(kv, values=64, offset=8), True),
    "pages apart": (lambda kv: spaced(kv, tokens=3), False),
    "rows at odd places": (lambda kv: spaced(kv, values=1), False),
    "at an odd address": (lambda kv: spaced(kv, offset=3), False),
    "last dim apart": (column_major, False),
    "one row for all": (lambda kv: kv[:1, :1].expand(kv.shape), True),
}
PAGES = [(1, 1), (5, 16), (40, 1), (2, 61), (1, 67)]  # 67 tokens and more: no multiple of what a CTA takes


@pytest.mark.emulate
@kinds
@pytest.mark.parametrize(("num_blocks", "page"), PAGES)
def test_emulated_kernel_quantizes_a_cache(fmt, scales, num_blocks, page):
    kv = make_keys(fmt, num_blocks, page, seed=page)
    for i, gap in enumerate((0, 48)):
        by_torch, expected_pool = make_cache(fmt, num_blocks, page, gap)
        quantize_by_torch(kv, fmt, scales, by_torch)
        out, pool = make_cache(fmt, num_blocks, page, gap)
        out = out.view((torch.uint8, torch.float8_e4m3fn)[i])
        with emulator.session(options=Options.schedule(i), arch=("sm_90a", "sm_100a")[i]) as s:
            assert quantize_kv_cache(kv, kv_format=fmt, scales=scales, out=out, backend="emulator") is out
        assert s.findings == [] and len(s.grids) == 1
        assert_bitwise(pool, expected_pool, name="out")
    with emulator.session() as s:
        new = quantize_kv_cache(kv, kv_format=fmt, scales=scales, backend="emulator")
    plain = quantize_kv_cache(kv, kv_format=fmt, scales=scales)
    assert (new.stride(), new.dtype) == (plain.stride(), plain.dtype)
    assert_bitwise(new, plain, name="new cache")


@pytest.mark.emulate
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_any_strides(layout, fmt, monkeypatch):
    from mla_cute import cache_writer

    read, inner = [], cache_writer._write_by_kernel
    monkeypatch.setattr(cache_writer, "_write_by_kernel", lambda *a: read.append(a[1].data_ptr()) or inner(*a))
    arrange, as_it_is = LAYOUTS[layout]
    kv = arrange(make_keys(fmt, 3, 7))
    by_torch = quantize_kv_cache(kv, kv_format=fmt)
    assert read == []
    with emulator.session() as s:
        got = quantize_kv_cache(kv, kv_format=fmt, backend="emulator")
    assert len(s.grids) == 1 and (read == [kv.data_ptr()]) == as_it_is
    assert_bitwise(got, by_torch, name="new cache")


@pytest.mark.emulate
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_out_at_any_address(fmt, dtype):
    """Where the kernel cannot write, the bytes are the same and so are the gaps."""
    kv, size = make_keys(fmt, 3, 7), 7 * fmt.bytes_per_token
    for offset, stride in ((0, size + 24), (8, size + 16 - size % 16), (3, size)):
        pools = []
        for backend in (None, "emulator"):
            pool = torch.full((offset + 3 * stride,), POISON, dtype=torch.uint8)
            out = pool.view(dtype).as_strided(
                (3, 7, 1, fmt.bytes_per_token), (stride, fmt.bytes_per_token, 1, 1), offset
            )
            with emulator.session() as s:
                assert quantize_kv_cache(kv, kv_format=fmt, out=out, backend=backend) is out
            assert len(s.grids) == (backend is not None)
            pools.append(pool)
        assert_bitwise(pools[1], pools[0], name="out")


@pytest.mark.emulate
def test_quantize_by_the_kernel_takes_what_torch_takes():
    kv = make_keys(V32, 2, 3)
    with emulator.session() as s:
        grad = quantize_kv_cache(kv.clone().requires_grad_(), backend="emulator")
        empty = quantize_kv_cache(kv[:0], backend="emulator")
    assert_bitwise(grad, quantize_kv_cache(kv), name="of keys that require grad")
    assert empty.shape == (0, 3, 1, 656) and len(s.grids) == 1
    for change in ({"kv": kv.float()}, {"scales": torch.ones(4)}):
        with pytest.raises(
            ValueError, match='backend: must be None but for bfloat16 keys with scales "pow2" or "amax", got'
        ):
            quantize_kv_cache(**({"kv": kv, "backend": "emulator"} | change))
    with pytest.raises(ValueError, match="backend: must be None or"):
        quantize_kv_cache(kv, backend="gpu")


def test_gpus_before_hopper_have_no_kernel():
    from mla_cute.cache_writer import has_kernel

    assert not any(map(has_kernel, ("cpu", "sm_75a", "sm_80a", "sm_89a")))
    assert all(map(has_kernel, ("sm_90a", "sm_100a", "sm_103a", "sm_120a")))


# Bits of (largest, other) bf16 of a tile. Of the first ten the code is another one if x / scale is taken as x * (1 / scale), of
# the others only if products of that may be subnormal. All there are, of 5e8 pairs: 34,065 and 103.
HARD = """0e0a0dcf 1644134b 1e781d3a 26bf1ebf 2ed02d1c 372630f9 3f4c3b99 4fc44ccb 603f583f 70a66a79
          04f8005d 0578023a 06180072 06d0004e 077801ba 082a0055 08990099 095b015b 05180039 0a310231"""


@pytest.mark.emulate
def test_emulated_division_is_exact():
    pairs = torch.tensor([[int(word[:4], 16), int(word[4:], 16)] for word in HARD.split()])
    x = torch.zeros(5, 4, 128, dtype=torch.uint16)
    x[..., :2] = pairs.view(5, 4, 2).to(torch.uint16)
    x[..., 70] = (pairs[:, 1] + 0x8000).view(5, 4).to(torch.uint16)
    latent, slots = x.flatten(1).view(torch.bfloat16), torch.arange(5)
    (a, _), (b, _) = make_cache(V32, 1, 5), make_cache(V32, 1, 5)
    write_kv_cache(a, latent, latent[:, :64], slots, scales="amax")
    with emulator.session():
        write_kv_cache(b, latent, latent[:, :64], slots, scales="amax", backend="emulator")
    assert_bitwise(b, a, name="kv_cache")


@pytest.mark.emulate
@pytest.mark.parametrize("tokens_in_flight", [1, 4])
def test_other_configs(tokens_in_flight):
    from mla_cute import cache_writer_kernel as module
    from mla_cute.emulator import run

    latent, rope = make_tokens(V32, 11)
    slots = make_slots(11, 32)
    (a, _), (b, _) = make_cache(V32, 4, 8), make_cache(V32, 4, 8)
    write_kv_cache(a, latent, rope, slots)
    config = module.Config(threads=64, tokens_in_flight=tokens_in_flight)
    with emulator.session():
        run.load(module, module.WriteProblem("v32", "pow2", 8), config, "sm_90a")(b, latent, rope, slots)
    assert_bitwise(b, a, name="kv_cache")


# ----- gpu ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("n", [1, 7, 128, 4099, 65536])
def test_kernel_is_the_torch_version(fmt, scales, n):
    num_blocks, page, gap = -(-n // 61) + 3, 61, 48
    latent, rope = make_tokens(fmt, n, device="cuda", wide=64)
    for dtype in (torch.int64, torch.int32):
        slots = make_slots(n, num_blocks * page, dtype=dtype, skipped=0.01, device="cuda")
        cache, pool = make_cache(fmt, num_blocks, page, gap, device="cuda")
        write_kv_cache(cache, latent, rope, slots, scales=scales)
        by_torch, expected_pool = make_cache(fmt, num_blocks, page, gap)
        write_kv_cache(by_torch, latent.cpu(), rope.cpu(), slots.cpu(), scales=scales)
        assert_bitwise(pool.cpu(), expected_pool, name="kv_cache")


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize(("num_blocks", "page"), [*PAGES, (1025, 64)])
def test_quantize_is_the_torch_version(fmt, scales, num_blocks, page):
    """NaN and Inf among the keys; the gaps between pages stay as they are."""
    kv = make_keys(fmt, num_blocks, page, seed=page)
    for gap, dtype in ((0, torch.uint8), (48, torch.int8), (16, torch.float8_e4m3fn)):
        by_torch, expected_pool = make_cache(fmt, num_blocks, page, gap)
        quantize_kv_cache(kv, kv_format=fmt, scales=scales, out=by_torch)
        out, pool = make_cache(fmt, num_blocks, page, gap, device="cuda")
        out = out.view(dtype)
        assert quantize_kv_cache(kv.cuda(), kv_format=fmt, scales=scales, out=out) is out
        assert_bitwise(pool.cpu(), expected_pool, name="out")
    new, plain = (quantize_kv_cache(x, kv_format=fmt, scales=scales) for x in (kv.cuda(), kv))
    assert (new.stride(), new.dtype) == (plain.stride(), plain.dtype)
    assert_bitwise(new.cpu(), plain, name="new cache")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_quantize_takes_any_strides_and_addresses(fmt):
    kv = make_keys(fmt, 3, 7)
    plain = quantize_kv_cache(kv, kv_format=fmt)
    for arrange, _ in LAYOUTS.values():
        got = quantize_kv_cache(arrange(kv.cuda()), kv_format=fmt)
        assert_bitwise(got.cpu(), quantize_kv_cache(arrange(kv), kv_format=fmt), name="new cache")
    stride = 7 * fmt.bytes_per_token + 5
    pool = torch.full((3 + 3 * stride,), POISON, dtype=torch.uint8, device="cuda")
    out = pool.as_strided((3, 7, 1, fmt.bytes_per_token), (stride, fmt.bytes_per_token, 1, 1), 3)
    quantize_kv_cache(kv.cuda(), kv_format=fmt, out=out)
    assert_bitwise(out.cpu(), plain, name="out")
    assert (pool[:3] == POISON).all() and (pool[3:].view(3, stride)[:, -5:] == POISON).all()


@pytest.mark.gpu
@kinds
def test_quantize_is_one_launch(fmt, scales):
    """No other kernel, no copy, no wait for the GPU; and in a graph."""
    kv = make_keys(fmt, 50, 61, device="cuda")
    out = quantize_kv_cache(kv, kv_format=fmt, scales=scales)  # compiles
    wanted = out.clone()
    out.zero_()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            quantize_kv_cache(kv, kv_format=fmt, scales=scales, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu = [name for name in on_gpu if not name.lower().startswith(("activity", "context"))]
    assert len(on_gpu) == 1 and on_gpu[0].startswith("mla_write_kv_cache"), on_gpu
    assert_bitwise(out, wanted, name="out")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_kv_cache(kv, kv_format=fmt, scales=scales, out=out)
    kv.copy_(make_keys(fmt, 50, 61, seed=1))
    graph.replay()
    assert_bitwise(out.cpu(), quantize_kv_cache(kv.cpu(), kv_format=fmt, scales=scales), name="replayed")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_addresses_past_32_bits(fmt):
    """A cache of more than 2^32 bytes, latent rows more than 2^32 bytes apart from first to last."""
    n, page = 4096, 64
    num_blocks = 5 * 2**30 // (page * fmt.bytes_per_token)
    capacity = num_blocks * page
    wide = torch.empty(n, 2**19 + 2**17, dtype=torch.bfloat16, device="cuda")
    latent, rope = wide[:, -fmt.d_nope - 64 : -64], wide[:, -64:]
    for target, source in zip((latent, rope), make_tokens(fmt, n)):
        target.copy_(source)
    # The first and last tokens, and those on both sides of 2^31 and 2^32 bytes.
    q = n // 4
    starts = (0, 2**31 // fmt.bytes_per_token - q // 2, 2**32 // fmt.bytes_per_token - q // 2, capacity - q)
    slots = torch.cat([start + torch.arange(q) for start in starts])
    assert len(slots.unique()) == n
    cache = torch.full((num_blocks, page * fmt.bytes_per_token), POISON, dtype=torch.uint8, device="cuda")
    cache = cache.view(num_blocks, page, 1, fmt.bytes_per_token)
    write_kv_cache(cache, latent, rope, slots.cuda())

    pages, compact = (slots // page).unique(return_inverse=True)
    small = torch.full((len(pages), page, 1, fmt.bytes_per_token), POISON, dtype=torch.uint8)
    write_kv_cache(small, latent.cpu(), rope.cpu(), compact * page + slots % page)
    assert_bitwise(cache[pages.cuda()].cpu(), small, name="kv_cache")
    others = torch.ones(num_blocks, dtype=torch.bool, device="cuda")
    others[pages.cuda()] = False
    for part, keep in zip(cache.split(4096), others.split(4096)):
        assert (part[keep] == POISON).all()


@pytest.mark.gpu
@kinds
def test_graph_capture(fmt, scales):
    n = 300
    latent, rope = make_tokens(fmt, n, device="cuda")
    slots = make_slots(n, 640, device="cuda")
    cache, pool = make_cache(fmt, 10, 64, 16, device="cuda")
    write_kv_cache(cache, latent, rope, slots, scales=scales)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv_cache(cache, latent, rope, slots, scales=scales)
    for seed in (1, 2):
        for old, new in zip((latent, rope), make_tokens(fmt, n, seed=seed)):
            old.copy_(new)
        slots.copy_(make_slots(n, 640, seed=seed))
        pool.fill_(POISON)
        graph.replay()
        assert_bitwise(pool.cpu(), expected(fmt, scales, latent, rope, slots, 10, 64, 16), name="kv_cache")


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("n", [16384, 65536])
def test_bandwidth(fmt, scales, n):
    """Beside a copy of as many bytes, cold L2, profiler times."""
    record, _ = measure_write(fmt, scales, n)
    assert record["copy_share"] >= 0.7, record
