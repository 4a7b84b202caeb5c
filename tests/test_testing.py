"""The test tools themselves: do the comparisons notice what is wrong, do the inputs hold the poison they promise?"""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_cute import reference
from mla_cute.kv_cache import MODEL1, dequantize_kv_cache
from mla_cute.testing import (
    INT_MAX,
    SPARSE_DECODE_LSE,
    SPARSE_DECODE_OUT,
    WILD_INDICES,
    Case,
    assert_bitwise,
    assert_close,
    make_inputs,
)

# ---- assert_close


def sample() -> torch.Tensor:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = math.inf, -math.inf, math.nan
    return x


def rejects(ans, ref, *patterns, **tol):
    with pytest.raises(AssertionError) as error:
        assert_close(ans, ref, **{**SPARSE_DECODE_OUT, **tol})
    for pattern in patterns:
        assert re.search(pattern, str(error.value)), str(error.value)


def test_tolerances_are_flashmlas():
    assert SPARSE_DECODE_OUT == {"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}
    assert SPARSE_DECODE_LSE == {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536, "cos_tol": 1e-7}


def test_close_accepts_rounding():
    ref = sample()
    assert_close(ref.clone(), ref, **SPARSE_DECODE_LSE)
    assert_close(ref.to(torch.bfloat16), (ref * (1 + 1e-4)).to(torch.bfloat16), **SPARSE_DECODE_OUT)
    noise = 1 + 4e-3 * (torch.rand(ref.shape, generator=torch.Generator().manual_seed(1)) - 0.5)
    assert_close(ref * noise, ref, **SPARSE_DECODE_OUT)
    assert_close(ref + 9e-4, ref, **SPARSE_DECODE_OUT)
    assert_close(torch.zeros(4), torch.full((4,), 1e-7), **SPARSE_DECODE_OUT)  # too small for the cosine figure
    assert_close(torch.empty(0, 3), torch.empty(0, 3), **SPARSE_DECODE_OUT)
    assert_close(ref.mT, ref.mT.contiguous(), **SPARSE_DECODE_LSE)


def test_close_sees_one_element():
    ref = sample()
    ans = ref.clone()
    ans[1, 2, 33] += 1 + 0.02 * abs(ref[1, 2, 33].item())
    ans[2, 0, 7] += 0.01 + 0.02 * abs(ref[2, 0, 7].item())
    got, want = f"{ans[1, 2, 33].item():.8g},", f"{ref[1, 2, 33].item():.8g},"
    rejects(ans, ref, r"ans: 2 of 960 ", r"worst at \(1, 2, 33\)", re.escape(f"got {got} reference {want}"))
    with pytest.raises(AssertionError, match="^lse: "):
        assert_close(ans, ref, **SPARSE_DECODE_LSE, name="lse")


def test_close_element_rule_is_abs_or_rel():
    ref = torch.tensor([100.0, 0.0, 1.0])
    tol = {"abs_tol": 1e-3, "rel_tol": 1e-2, "cos_tol": 1.0}
    assert_close(torch.tensor([100.9, 0.0009, 1.0]), ref, **tol)
    for bad, at in (([101.1, 0, 1], 0), ([100, 0.0011, 1], 1), ([100, 0, 1.02], 2)):
        with pytest.raises(AssertionError, match=rf"1 of 3 .* worst at \({at},\)"):
            assert_close(torch.tensor(bad), ref, **tol)


def test_close_sees_a_wrong_scale():
    """1 % off passes element by element; only the cosine figure sees it. 0.2 % is within rounding."""
    ref = sample()
    rejects(ref * 1.01, ref, r"cosine figure \S+ exceeds 5e-06", r"largest difference at \(")
    rejects(ref * 0.99, ref, r"cosine figure")
    assert_close(ref * 1.002, ref, **SPARSE_DECODE_OUT)
    rejects(ref * 1.1, ref, r"9[45]\d of 960 elements are off")
    rejects(-ref.clone(), ref)


def test_close_cosine_value():
    """1 - 2 Σab / (Σa² + Σb²) for b = 1, a = 1.1: 1 - 2.2 / 2.21."""
    a, b = torch.full((10,), 1.1, dtype=torch.float32), torch.ones(10)
    figure = 1 - 2.2 / 2.21
    assert_close(a, b, abs_tol=1, rel_tol=1, cos_tol=figure * 1.001)
    rejects(a, b, f"cosine figure {figure:.2g}", abs_tol=1, rel_tol=1, cos_tol=figure * 0.999)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_close_sees_misplaced_infinities_and_nan(value):
    ref = sample()
    word = {"nan": "NaN", "inf": r"\+inf", "-inf": "-inf"}[str(value)]
    ans = ref.clone()
    ans[2, 4, 63] = value  # a number in the reference
    rejects(ans, ref, f"{word} not where the reference has it: 1 of 960", r"first at \(2, 4, 63\)")
    rejects(ref, ans, word, r"first at \(2, 4, 63\)")  # and the other way round
    at = {"nan": 2, "inf": 0, "-inf": 1}[str(value)]
    ans = ref.clone()
    ans[0, 0, at], ans[0, 0, 3] = 0.0, value  # shifted by a few elements
    rejects(ans, ref, word, "2 of 960")
    ans = ref.clone()
    ans[0, 0, at] = -value if math.isinf(value) else math.inf
    rejects(ans, ref)


def test_close_sees_shape_and_dtype():
    ref = sample()
    rejects(ref[..., :63], ref, r"shape must be \[3, 5, 64\], got \[3, 5, 63\]")
    rejects(ref[:1], ref)
    rejects(ref.double(), ref, "dtype must be torch.float32, got torch.float64")


def test_bitwise():
    x = sample()
    assert_bitwise(x, x.clone())
    assert_bitwise(x.mT, x.mT.contiguous())
    assert_bitwise(x.to(torch.bfloat16)[:, 1:], x.to(torch.bfloat16)[:, 1:].clone())
    y = x.clone()
    y[1, 3, 9] = torch.nextafter(x[1, 3, 9], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"out: 1 of 960 .* first at \(1, 3, 9\)"):
        assert_bitwise(y, x, name="out")
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_bitwise(torch.tensor([-0.0]), torch.tensor([0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise(x.double(), x)
    with pytest.raises(AssertionError, match="shape"):
        assert_bitwise(x[0], x)


# ---- Case and make_inputs

CASES = [
    Case(b=4, h_q=8, s_q=2, s_kv=128, topk=64, page_block_size=2),
    Case(b=7, h_q=8, s_q=3, s_kv=200, topk=192, page_block_size=61, varlen=True, sink=True),
    Case(b=6, h_q=8, s_q=2, s_kv=300, topk=192, page_block_size=53, topk_length=True, holes=True, seed=5),
    Case(
        b=9, h_q=8, s_kv=150, topk=128, zero_length=True, varlen=True, duplicates=True, topk_length=True, odd_rows=True
    ),
    Case(b=3, h_q=8, s_kv=100, topk=64, page_block_size=1, scales="random", duplicates=True, holes=True, strided=False),
    Case(b=3, h_q=8, s_kv=100, topk=64, all_invalid=True, topk_length=True, scales="amax", sink=True),
    Case(b=1, h_q=8, s_kv=100, topk=64, zero_length=True),
    Case(b=5, h_q=8, s_q=2, s_kv=150, topk=100, page_block_size=61, kv_format="model1", topk_length=True, outside=True),
    Case(b=4, h_q=8, s_kv=90, topk=64, page_block_size=7, kv_format="model1", scales="random", strided=False, holes=True),
]
EXTRA_CASES = [
    Case(b=5, h_q=8, s_q=2, s_kv=150, topk=100, extra_topk=70, topk_length=True, outside=True, varlen=True),
    Case(
        **{"b": 9, "h_q": 8, "s_kv": 100, "topk": 64, "kv_format": "model1", "extra_topk": 96, "extra_s_kv": 50},
        **{"extra_page_block_size": 53, "extra_topk_length": True, "holes": True, "zero_length": True, "sink": True},
    ),
]


def caches(case: Case):
    """(case, inputs) of the one cache, or of each of the two as if it were the only one."""
    x = make_inputs(case)
    yield case, replace(x, extra_kv_cache=None)
    if case.extra_topk:
        page = case.extra_page_block_size or case.page_block_size
        size = {"topk": case.extra_topk, "s_kv": case.extra_s_kv or 2 * case.extra_topk, "page_block_size": page}
        tensors = {"kv_cache": x.extra_kv_cache, "indices": x.extra_indices, "kv": x.extra_kv}
        yield (
            replace(case, **size, topk_length=case.extra_topk_length),
            replace(x, **tensors, topk_length=x.extra_topk_length, extra_kv_cache=None),
        )


def attended(case, inputs) -> torch.Tensor:
    valid = (inputs.indices >= 0) & (inputs.indices < inputs.kv_cache.shape[0] * case.page_block_size)
    if inputs.topk_length is not None:
        valid = valid & (torch.arange(case.topk) < inputs.topk_length.view(-1, 1, 1))
    return valid


def test_ids():
    assert str(Case()) == "b4-h128-q1-kv512-topk64-page64"
    assert str(CASES[2]) == "b6-h8-q2-kv300-topk192-page53-topk_length-holes-seed5"
    assert str(CASES[4]) == "b3-h8-q1-kv100-topk64-page1-holes-duplicates-random-packed"
    assert str(CASES[7]) == "b5-h8-q2-kv150-topk100-page61-model1-topk_length-outside"
    assert str(EXTRA_CASES[0]) == "b5-h8-q2-kv150-topk100-page64-extra_topk70-varlen-topk_length-outside"
    assert str(EXTRA_CASES[1]) == (
        "b9-h8-q1-kv100-topk64-page64-model1-extra_topk96-extra_kv50-extra_page53-extra_topk_length-sink-zero_length-holes"
    )
    assert len({str(c) for c in CASES + EXTRA_CASES}) == len(CASES + EXTRA_CASES)


def test_case_errors():
    with pytest.raises(ValueError, match="kv_format: must be v32 or model1, got v4"):
        Case(kv_format="v4")
    with pytest.raises(ValueError, match='scales: must be "pow2" or "random" for model1, got "amax"'):
        Case(kv_format="model1", scales="amax")
    for name, value in (("extra_s_kv", 5), ("extra_page_block_size", 5), ("extra_topk_length", True)):
        with pytest.raises(ValueError, match=f"extra_topk: must be given with {name}, got 0"):
            Case(**{name: value})
    with pytest.raises(ValueError, match='scales: must be .* got "e8m0"'):
        Case(scales="e8m0")


@pytest.mark.parametrize("case", CASES + EXTRA_CASES, ids=str)
def test_shapes_and_strides(case):
    for c, x in caches(case):
        fmt = c.format
        assert x.q.shape == (c.b, c.s_q, c.h_q, fmt.d_qk) and x.q.dtype == torch.bfloat16
        assert x.indices.shape == (c.b, c.s_q, c.topk) and x.indices.dtype == torch.int32
        assert x.kv_cache.shape[1:] == (c.page_block_size, 1, fmt.bytes_per_token) and x.kv_cache.dtype == torch.uint8
        assert x.softmax_scale == pytest.approx(fmt.d_qk**-0.55)
        page_bytes = fmt.page_bytes(c.page_block_size) + fmt.row_bytes
        if not c.strided:
            page_bytes = -(-c.page_block_size * fmt.bytes_per_token // 16) * 16
        assert x.kv_cache.stride() == (page_bytes, fmt.bytes_per_token, fmt.bytes_per_token, 1)
        assert x.q.is_contiguous() != c.strided
        assert x.q.stride(-1) == x.indices.stride(-1) == 1
        if c.odd_rows:
            assert x.indices.data_ptr() % 8 == 4 and x.indices.stride(1) % 2 == 0
        else:
            assert x.indices.storage_offset() == 0 and x.indices.stride(1) == c.topk + 128 * c.strided
        assert (x.attn_sink is None) != c.sink and (x.topk_length is None) != c.topk_length


@pytest.mark.parametrize("case", CASES + EXTRA_CASES, ids=str)
def test_poison_is_exactly_what_is_not_attended(case):
    """Every token outside the attended ones is NaN in its scales, codes and RoPE; no attended one has a NaN."""
    for c, x in caches(case):
        fmt, page = c.format, c.page_block_size
        used = torch.zeros(x.kv.shape[0] * page, dtype=torch.bool)
        used[x.indices[attended(c, x)].long()] = True
        nan = dequantize_kv_cache(x.kv_cache, kv_format=fmt).isnan().view(-1, fmt.d_qk)
        assert torch.equal(nan, (~used)[:, None].expand_as(nan))
        assert torch.equal(x.kv.isnan().view(-1, fmt.d_qk), nan)
        assert not used.all()
        raw = x.kv_cache.flatten(1)  # a page's bytes
        rows = raw[:, : page * fmt.row_bytes].reshape(-1, fmt.row_bytes)[~used]
        assert (rows[:, : fmt.d_nope] == 0x7F).all()
        assert rows[:, fmt.rope_offset : fmt.rope_offset + 128].contiguous().view(torch.bfloat16).isnan().all()
        if fmt is MODEL1:
            scales = raw[:, page * 576 :].reshape(-1, 8)
            assert (scales[~used, :7] == 0xFF).all() and (scales[used, :7] != 0xFF).all()
            assert (scales[:, 7] == 0xFF).all()  # padding: of attended tokens too
        else:
            assert rows[:, 512:528].contiguous().view(torch.float32).isnan().all()


def test_page_gaps_of_model1():
    for case in (CASES[7], EXTRA_CASES[1]):
        for c, x in caches(case):
            stride, used = x.kv_cache.stride(0), c.page_block_size * 584
            assert stride % 576 == 0 and stride - used >= 576
            pool = x.kv_cache.as_strided((x.kv_cache.shape[0], stride), (stride, 1))
            assert (pool[:, used:] == 0xFF).all()


def test_outside():
    for c, x in (*caches(CASES[7]), *caches(EXTRA_CASES[0])):
        end = x.kv_cache.shape[0] * c.page_block_size
        inside = torch.ones_like(x.indices) > 0
        if x.topk_length is not None:
            inside &= torch.arange(c.topk) < x.topk_length.view(-1, 1, 1)
        found = x.indices[inside]
        assert {end, end + 1, 2 * end, INT_MAX} == set(found[found >= end].tolist())
        assert 0.08 < (found >= end).float().mean() < 0.17


def test_extra_is_another_draw():
    """The main cache is that of the case without extra keys, and the extra cache no copy of it."""
    case = replace(CASES[0], extra_topk=64)
    x, plain = make_inputs(case), make_inputs(CASES[0])
    for name in ("q", "kv_cache", "indices"):
        assert torch.equal(getattr(x, name), getattr(plain, name))
    assert x.extra_indices.shape == x.indices.shape and not torch.equal(x.extra_indices, x.indices)
    assert {*x.kwargs()} - {*x.plan_kwargs()} == {"softmax_scale", "attn_sink", "extra_kv_cache"}
    assert plain.extra_kv_cache is None and x.extra_topk_length is None


@pytest.mark.parametrize("case", CASES + EXTRA_CASES, ids=str)
def test_reference_is_clean_of_poison(case):
    x = make_inputs(case)
    out, lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    assert not out.isnan().any() and not lse.isnan().any()
    none = ~torch.stack([attended(c, y).any(-1) for c, y in caches(case)]).any(0)  # [b, s_q]
    assert torch.equal(lse.isposinf(), none[..., None].expand_as(lse)) and (out[none] == 0).all()


def test_gaps_are_poison():
    x = make_inputs(CASES[1])
    page, num_blocks = CASES[1].page_block_size, x.kv_cache.shape[0]
    pool = x.kv_cache.as_strided((num_blocks, page + 1, 656), ((page + 1) * 656, 656, 1))
    assert (pool[:, page] == 0xFF).all()
    rows = x.q.as_strided((7, 3, 8, 576 + 128), x.q.stride())
    assert rows[..., 576:].isnan().all() and not rows[..., :576].isnan().any()
    assert (x.indices.as_strided((7, 3, 192 + 128), x.indices.stride())[..., 192:] == INT_MAX).all()


def test_indices_are_distinct_tokens_of_their_request():
    """Distinct within a row; -1 only behind them and only where the request is too short; no token in two requests."""
    for case in CASES[:2]:
        x = make_inputs(case)
        owner, counts = {}, set()
        for r, s in ((r, s) for r in range(case.b) for s in range(case.s_q)):
            row = x.indices[r, s].tolist()
            valid = [t for t in row if t >= 0]
            assert row[len(valid) :] == [-1] * (case.topk - len(valid))
            assert len(set(valid)) == len(valid) and all(owner.setdefault(t, r) == r for t in valid)
            assert valid != sorted(valid)
            counts.add(len(valid))
        assert counts == {64} if case is CASES[0] else len(counts) > 2 and max(counts) == case.topk


def test_pages_are_shuffled():
    """Request r's pages are not a run of the cache."""
    x = make_inputs(CASES[0])
    pages = [sorted({t // 2 for t in x.indices[r].flatten().tolist()}) for r in range(4)]
    assert all(p[-1] - p[0] > 2 * 64 for p in pages)


def test_topk_length_and_what_is_behind():
    case = replace(CASES[2], b=40, holes=False)
    x = make_inputs(case)
    assert {0, 1, case.topk} <= set(x.topk_length.tolist()) and len(set(x.topk_length.tolist())) > 20
    behind = x.indices[torch.arange(case.topk).expand_as(x.indices) >= x.topk_length.view(-1, 1, 1)]
    assert set(WILD_INDICES) <= set(behind.tolist())
    capacity = x.kv.shape[0] * case.page_block_size
    real = behind[(behind >= 0) & (behind < capacity)]
    assert 0.1 < len(real) / len(behind) < 0.3
    assert x.kv.view(-1, 576)[real.long(), 0].isnan().any()  # in range, behind the limit, poisoned
    inside = x.indices[attended(case, x)]
    assert len(inside) and (inside < capacity).all()


def test_holes_and_duplicates():
    x = make_inputs(Case(b=20, h_q=8, s_kv=1000, topk=320, holes=True))
    invalid = x.indices[:, 0] == -1
    assert 0.2 < invalid.float().mean() < 0.5
    assert not invalid.all(-1).any()
    whole = invalid.view(20, 5, 64).all(-1)
    assert 0.2 < whole.any(-1).float().mean() < 0.8 and whole[:, :4].any()
    x = make_inputs(Case(b=20, h_q=8, s_kv=1000, topk=320, duplicates=True))
    distinct = [len(set(row)) for row in x.indices[:, 0].tolist()]
    assert (x.indices >= 0).all() and all(180 < n < 280 for n in distinct)


def test_zero_length_and_all_invalid():
    x = make_inputs(replace(CASES[3], b=60, topk_length=False))
    none = (x.indices == -1).all(-1).all(-1)
    assert 15 < int(none.sum()) < 45
    assert (make_inputs(CASES[6]).indices == -1).all()
    x = make_inputs(CASES[5])
    assert not attended(CASES[5], x).any() and x.kv.isnan().all()


def test_value_ranges():
    x = make_inputs(Case(b=8, h_q=64, s_kv=400, topk=320, sink=True, scales="random"))
    q, kv = x.q.float(), x.kv[~x.kv.isnan()].float()
    assert q.abs().max() == 1 and 0.3 < (q.abs() == 1).float().mean() < 0.34  # P(|N| > 1) = 0.317
    assert kv.abs().max() <= 1 and kv.std() == pytest.approx(0.1, rel=0.02) and abs(kv.mean()) < 1e-3
    x = make_inputs(Case(b=1, h_q=128, s_kv=10, topk=8, sink=True))
    for share in (x.attn_sink.isposinf(), x.attn_sink.isneginf()):
        assert 0.15 < share.float().mean() < 0.5
    assert x.attn_sink.isfinite().sum() > 20


def test_random_scales_of_model1():
    x = make_inputs(Case(b=2, h_q=8, s_kv=64, topk=64, page_block_size=8, kv_format="model1", scales="random"))
    codes = x.kv_cache.flatten(1)[:, 8 * 576 :].reshape(-1, 8)[:, :7]
    assert set(codes.flatten().tolist()) == {*range(119, 127), 255}
    quantisation = (dequantize_kv_cache(x.kv_cache, kv_format=MODEL1) - x.kv).abs()
    assert 0 < quantisation[~quantisation.isnan()].max() < 0.04


@pytest.mark.parametrize("scales", ["pow2", "amax", "random"])
def test_scales(scales):
    x = make_inputs(Case(b=2, h_q=8, s_kv=64, topk=64, scales=scales))
    s = x.kv_cache.reshape(-1, 656)[:, 512:528].contiguous().view(torch.float32)
    s = s[~s.isnan()]
    is_power = torch.frexp(s).mantissa == 0.5
    assert is_power.all() if scales == "pow2" else is_power.float().mean() < 0.1
    quantisation = (dequantize_kv_cache(x.kv_cache) - x.kv).abs()
    assert 0 < quantisation[~quantisation.isnan()].max() < 0.04


class CountedOps(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [CASES[1], EXTRA_CASES[0]], ids=str)
def test_no_loop_over_requests(case):
    """The grid makes 4,716 inputs: as many operations for 60 requests as for 5, and few."""
    counts = []
    for b in (5, 60):
        with CountedOps() as ops:
            make_inputs(replace(case, b=b))
        counts.append(ops.count)
    assert counts[0] == counts[1] < 180 * (2 if case.extra_topk else 1)


def test_seeds():
    a, b, c = make_inputs(CASES[2]), make_inputs(CASES[2]), make_inputs(replace(CASES[2], seed=6))
    for name in ("q", "kv_cache", "indices", "topk_length"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
        x, y = getattr(a, name), getattr(c, name)
        assert x.shape != y.shape or not torch.equal(x, y), name
