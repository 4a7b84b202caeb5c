"""The oracles against plain Python arithmetic in fp64, and the plan against its rules and worked examples."""

import bisect
import functools
import math
import struct
import sys
from dataclasses import dataclass

import pytest
import torch

import mla_cute
from mla_cute import reference
from mla_cute.kv_cache import MODEL1, dequantize_kv_cache, quantize_kv_cache
from mla_cute.testing import Case, assert_bitwise, assert_close, make_inputs

TIGHT_OUT = {"abs_tol": 2e-6, "rel_tol": 2e-5, "cos_tol": 1e-10}  # fp32 oracle against fp64, before any bf16 rounding
TIGHT_LSE = {"abs_tol": 2e-6, "rel_tol": 2e-6, "cos_tol": 1e-10}


# ---- brute force


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def to_bf16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).to(torch.bfloat16).item()


def decode_token(cache: torch.Tensor, token: int) -> list[float]:
    """A key of a V32 or MODEL1 cache, from its bytes."""
    page = cache.shape[1]
    raw, t = bytes(cache[token // page].flatten().tolist()), token % page  # a page's bytes, the token in it
    if cache.shape[3] == 656:
        row, tile, rope_offset = raw[656 * t : 656 * t + 656], 128, 528
        scales = struct.unpack("<4f", row[512:528])
    else:
        row, tile, rope_offset = raw[576 * t : 576 * t + 576], 64, 448
        codes = raw[576 * page + 8 * t : 576 * page + 8 * t + 7]
        scales = [math.nan if c == 255 else 2.0 ** (c - 127) for c in codes]
    nope = [to_bf16(e4m3_value(row[i]) * scales[i // tile]) for i in range(len(scales) * tile)]
    return nope + [struct.unpack("<f", b"\0\0" + row[at : at + 2])[0] for at in range(rope_offset, rope_offset + 128, 2)]


def brute_force(inputs, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s_q, len(heads), 512] fp64 and lse [b, s_q, len(heads)] fp64, by loops over Python floats."""
    b, s_q, _, _ = inputs.q.shape
    caches = [(inputs.kv_cache, inputs.indices, inputs.topk_length)]
    if inputs.extra_kv_cache is not None:
        caches.append((inputs.extra_kv_cache, inputs.extra_indices, inputs.extra_topk_length))
    record = functools.cache(lambda token: decode_token(caches[token[0]][0], token[1]))

    def attended(r: int, s: int):
        for c, (cache, indices, length) in enumerate(caches):
            limit = sys.maxsize if length is None else length[r].item()
            for i, t in enumerate(indices[r, s].tolist()):
                if i < limit and 0 <= t < cache.shape[0] * cache.shape[1]:
                    yield c, t

    out, lse = torch.zeros(b, s_q, len(heads), 512).double(), torch.full((b, s_q, len(heads)), math.inf).double()
    for r in range(b):
        for s in range(s_q):
            tokens = list(attended(r, s))
            for h, head in enumerate(heads):
                q = inputs.q[r, s, head].tolist()
                x = [inputs.softmax_scale * math.fsum(map(float.__mul__, q, record(t))) for t in tokens]
                if not tokens:
                    continue
                lse[r, s, h] = total = max(x) + math.log(math.fsum(math.exp(v - max(x)) for v in x))
                sink = -math.inf if inputs.attn_sink is None else inputs.attn_sink[head].item()
                weights = [math.exp(v - total) for v in x]
                if sink == math.inf:
                    weights = [0.0] * len(x)
                elif sink != -math.inf:
                    weights = [w / (1 + math.exp(sink - total)) for w in weights]
                for w, t in zip(weights, tokens, strict=True):
                    out[r, s, h] += w * torch.tensor(record(t)[:512], dtype=torch.float64)
    return out, lse


BRUTE_CASES = [
    Case(b=2, h_q=4, s_q=2, s_kv=40, topk=24, page_block_size=7),
    Case(b=5, h_q=8, s_q=1, s_kv=50, topk=32, page_block_size=1, varlen=True, sink=True, topk_length=True),
    Case(
        b=3, h_q=8, s_q=2, s_kv=40, topk=40, page_block_size=64, sink=True, holes=True, scales="amax", zero_length=True
    ),
    Case(b=2, h_q=4, s_q=2, s_kv=30, topk=33, page_block_size=5, duplicates=True, scales="random", odd_rows=True),
    Case(b=2, h_q=8, s_q=1, s_kv=20, topk=8, page_block_size=4, sink=True, all_invalid=True, strided=False),
    Case(b=3, h_q=4, s_q=2, s_kv=40, topk=24, page_block_size=7, kv_format="model1", outside=True, sink=True),
    Case(b=5, h_q=4, s_kv=40, topk=20, page_block_size=1, kv_format="model1", topk_length=True, scales="random"),
    Case(
        **{"b": 5, "h_q": 4, "s_kv": 40, "topk": 20, "page_block_size": 5, "zero_length": True, "topk_length": True},
        **{"extra_topk": 9, "extra_page_block_size": 3, "extra_topk_length": True, "outside": True, "scales": "amax"},
    ),
    Case(
        **{"b": 2, "h_q": 4, "s_q": 2, "s_kv": 40, "topk": 17, "page_block_size": 2, "kv_format": "model1", "sink": True},
        **{"extra_topk": 30, "extra_s_kv": 25, "extra_page_block_size": 64, "holes": True, "duplicates": True},
    ),
    Case(
        **{"b": 5, "h_q": 4, "s_kv": 20, "topk": 8, "page_block_size": 61, "kv_format": "model1", "strided": False},
        **{"extra_topk": 8, "extra_topk_length": True, "zero_length": True, "varlen": True, "odd_rows": True},
    ),
]


@pytest.mark.parametrize("case", BRUTE_CASES, ids=str)
def test_sparse_decode_against_brute_force(case):
    inputs = make_inputs(case)
    heads = list(range(case.h_q))[:4]
    want_out, want_lse = brute_force(inputs, heads)
    for dtype, tol in ((torch.float32, 1), (torch.float64, 1e-6)):
        out, lse = reference.sparse_decode(
            inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs(), dtype=dtype, out_dtype=torch.float64
        )
        assert lse.dtype == dtype and out.shape == (case.b, case.s_q, case.h_q, 512)
        out, lse = out[:, :, heads], lse[:, :, heads].double()
        assert torch.equal(lse.isinf(), want_lse.isinf()) and (lse[lse.isinf()] > 0).all()
        attended = want_lse.isfinite()
        assert attended.any() != case.all_invalid
        assert ((lse - want_lse)[attended].abs() < 2e-6 * tol).all()
        assert (out - want_out).abs().max() < 2e-6 * tol
    out, lse = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_close(out[:, :, heads].float(), want_out.float(), abs_tol=1e-6, rel_tol=2**-8 * 1.01, cos_tol=1e-5)


def test_brute_force_cases_reach_the_edges():
    """The cases above have requests without keys, +inf, -inf and finite sinks, holes and duplicates."""
    inputs = [make_inputs(c) for c in BRUTE_CASES]
    sinks = torch.cat([x.attn_sink[:4] for x in inputs if x.attn_sink is not None])
    assert sinks.isposinf().any() and sinks.isneginf().any() and sinks.isfinite().any()
    assert any((x.indices[0] >= 0).any() and (x.indices == -1).any() for x in inputs)
    assert any((x.topk_length == 0).any() for x in inputs if x.topk_length is not None)


# ---- edge rules by hand


def one_request(kv: torch.Tensor, indices: list[int], **kwargs):
    """One request, one query token of 2 heads: q picks dims 0 and 1; kv [n, 576] as it stands, scale 1."""
    q = torch.zeros(1, 1, 2, 576, dtype=torch.bfloat16)
    q[0, 0, 0, 0] = q[0, 0, 1, 1] = 1
    cache = quantize_kv_cache(kv.view(1, -1, 1, 576).to(torch.bfloat16))
    idx = torch.tensor(indices, dtype=torch.int32).view(1, 1, -1)
    out, lse = reference.sparse_decode(q, cache, idx, softmax_scale=1.0, **kwargs)
    return out[0, 0], lse[0, 0]


def two_keys() -> torch.Tensor:
    kv = torch.zeros(3, 576)
    kv[0, 0], kv[1, 1] = 2.0, 4.0  # head 0 scores (2, 0), head 1 scores (0, 4)
    kv[2] = math.nan  # never listed where it counts
    return kv


def test_two_keys_by_hand():
    out, lse = one_request(two_keys(), [0, 1])
    assert lse.tolist() == pytest.approx([math.log(math.exp(2) + 1), math.log(1 + math.exp(4))], rel=1e-6)
    p0, p1 = math.exp(2) / (math.exp(2) + 1), 1 / (1 + math.exp(4))
    assert out[0, :3].tolist() == pytest.approx([2 * p0, 4 * (1 - p0), 0], rel=2**-8)
    assert out[1, :3].tolist() == pytest.approx([2 * p1, 4 * (1 - p1), 0], rel=2**-8)


def test_duplicates_count_per_occurrence():
    _, lse = one_request(two_keys(), [0, 0, 1, 0])
    assert lse.tolist() == pytest.approx([math.log(3 * math.exp(2) + 1), math.log(3 + math.exp(4))], rel=1e-6)


def test_holes_and_order_do_not_matter():
    want = one_request(two_keys(), [0, 1])
    for indices in ([-1, 0, -1, 1, -1], [0, -1, -1, 1], [-(2**31), 0, 1, -123456]):
        got = one_request(two_keys(), indices)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("length", [-3, 0, 1, 2, 3, 4, 99])
def test_topk_length_is_clamped_and_hides_the_rest(length):
    """Behind the limit stands a NaN token, and INT_MAX; a limit beyond topk means topk."""
    indices = [0, 1, 2, 2**31 - 1] if length < 3 else [0, 1, -1, -1]
    out, lse = one_request(two_keys(), indices, topk_length=torch.tensor([length], dtype=torch.int32))
    want = [-1] if length <= 0 else [0] if length == 1 else [0, 1]
    want_out, want_lse = one_request(two_keys(), want)
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("sink", [0.7, -1.5, 80.0, math.inf, -math.inf])
def test_sink(sink):
    """It scales out by exp(lse) / (exp(lse) + exp(sink)), and never touches lse."""
    plain, plain_lse = one_request(two_keys(), [0, 1])
    out, lse = one_request(two_keys(), [0, 1], attn_sink=torch.tensor([sink, 0.0]))
    assert torch.equal(lse, plain_lse)
    factor = 1 / (1 + math.exp(sink - plain_lse[0].item())) if sink < math.inf else 0.0
    assert out[0].tolist() == pytest.approx((plain[0].float() * factor).tolist(), rel=2**-7, abs=1e-30)
    if sink == -math.inf:
        assert torch.equal(out[0], plain[0])
    if sink == math.inf:
        assert (out[0] == 0).all()


@pytest.mark.parametrize("sink", [None, 0.5, math.inf, -math.inf, math.nan])
def test_nothing_attended(sink):
    sink = None if sink is None else torch.full((2,), sink)
    for kwargs in ({}, {"topk_length": torch.zeros(1, dtype=torch.int32)}):
        out, lse = one_request(two_keys(), [2, 2] if kwargs else [-1, -1], attn_sink=sink, **kwargs)
        assert (out == 0).all() and (lse == math.inf).all()


def test_nan_of_a_listed_token_shows():
    out, lse = one_request(two_keys(), [0, 2])
    assert out.isnan().all() and lse.isnan().all()


def test_empty_cache_and_empty_batch():
    q = torch.ones(2, 1, 4, 576, dtype=torch.bfloat16)
    cache, idx = torch.empty(0, 64, 1, 656, dtype=torch.uint8), torch.full((2, 1, 3), -1, dtype=torch.int32)
    out, lse = reference.sparse_decode(q, cache, idx)
    assert (out == 0).all() and (lse == math.inf).all()
    out, lse = reference.sparse_decode(q[:0], cache, idx[:0])
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 1, 4)


def test_indices_outside_of_the_cache_are_none():
    want = one_request(two_keys(), [0, 1])
    got = one_request(two_keys(), [3, 0, 2**31 - 1, 1, 4])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_extra_keys_by_hand():
    """One softmax over both caches: key 0 here and key 1 there are the two keys, wherever they stand."""
    want = one_request(two_keys(), [0, 1])
    cache = quantize_kv_cache(two_keys().view(3, 1, 1, 576).to(torch.bfloat16))  # other pages
    for main, extra, length in (([0, 3], [1, -1, 3], 3), ([-1], [1, 0], 2), ([0], [-1, 1, 2], 2), ([0, 1], [2, 2], 0)):
        got = one_request(
            two_keys(),
            main,
            extra_kv_cache=cache,
            extra_indices=torch.tensor(extra, dtype=torch.int32).view(1, 1, -1),
            extra_topk_length=torch.tensor([length], dtype=torch.int32),
        )
        assert torch.equal(got[1], want[1]) and torch.equal(got[0], want[0])


def test_v_of_model1_has_rope():
    kv = torch.zeros(2, 512)
    kv[0, 0], kv[0, 511], kv[1, 450] = 1.0, 3.0, -2.0
    q = torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16)
    cache = quantize_kv_cache(kv.view(1, 2, 1, 512).to(torch.bfloat16), kv_format=MODEL1)
    out, lse = reference.sparse_decode(q, cache, torch.tensor([[[0, 1]]], dtype=torch.int32))
    assert out[0, 0, 0, [0, 450, 511]].tolist() == [0.5, -1.0, 1.5] and lse.item() == pytest.approx(math.log(2))


def test_format_by_the_last_dim():
    x = make_inputs(Case(b=2, h_q=4, s_kv=40, topk=24, kv_format="model1", extra_topk=8))
    args, options = (x.q, x.kv_cache, x.indices), x.kwargs()
    want = reference.sparse_decode(*args, **options)
    for got in (
        reference.sparse_decode(*args, **options, kv_format=MODEL1),
        reference.sparse_decode(x.q, x.kv_cache.view(torch.float8_e4m3fn), x.indices, **options),
    ):
        assert_bitwise(got[0], want[0])
        assert_bitwise(got[1], want[1])
    keys = dequantize_kv_cache(x.kv_cache, kv_format=MODEL1), dequantize_kv_cache(x.extra_kv_cache, kv_format=MODEL1)
    got = reference.sparse_decode(x.q, keys[0], x.indices, **(options | {"extra_kv_cache": keys[1]}))
    assert_bitwise(got[0], want[0])
    with pytest.raises(ValueError, match=r"kv_cache: last dim must be 656 \(V32\) or 584 \(MODEL1\), got 576"):
        reference.sparse_decode(x.q, x.kv_cache[..., :576], x.indices)


def test_default_scale_counts_rope():
    inputs = make_inputs(Case(b=1, h_q=4, s_kv=20, topk=8))
    a = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices)
    b = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, softmax_scale=1 / 24)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_unquantised_keys():
    """With the bf16 keys in place of the cache: the same up to e4m3's error, and not the same."""
    inputs = make_inputs(Case(b=4, h_q=16, s_kv=200, topk=64, sink=True))
    out, lse = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    out2, lse2 = reference.sparse_decode(inputs.q, inputs.kv, inputs.indices, **inputs.kwargs())
    assert 0 < (lse - lse2).abs().max() < 0.05 and 0 < (out.float() - out2.float()).abs().max() < 0.05


def test_chunks_join_and_other_dtypes_of_cache(monkeypatch):
    inputs = make_inputs(Case(b=5, h_q=8, s_q=3, s_kv=100, topk=64, sink=True, topk_length=True, holes=True))
    want = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * 64 * 576 * 4)  # 4 of the 15 query tokens at once
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        got = reference.sparse_decode(inputs.q, inputs.kv_cache.view(dtype), inputs.indices, **inputs.kwargs())
        assert_close(got[0].float(), want[0].float(), abs_tol=1e-6, rel_tol=2**-7, cos_tol=1e-6)
        assert_close(got[1], want[1], **TIGHT_LSE)


PRECISION = {  # what a program may have asked for: the older setting, one backend's, or all backends'
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "cuda tf32": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cpu bf16": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "all tf32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "all but cuda": lambda: (
        setattr(torch.backends, "fp32_precision", "tf32"),
        setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    ),
}


def precision() -> list[str]:
    backends = torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return [backend.fp32_precision for backend in backends]


@pytest.fixture
def restored_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends):
        backend.fp32_precision = "none"


@pytest.mark.parametrize("name", PRECISION)
def test_fp32_is_fp32_and_the_precision_is_put_back(name, restored_precision):
    inputs = make_inputs(BRUTE_CASES[0])
    want = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    PRECISION[name]()
    before = precision()
    out, lse = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    assert precision() == before
    assert_bitwise(out, want[0])
    assert_bitwise(lse, want[1])
    if name == "all tf32":  # what followed the common setting still does
        torch.backends.fp32_precision = "ieee"
        assert precision() == ["ieee"] * 3


def test_autocast_changes_nothing():
    inputs = make_inputs(Case(b=3, h_q=8, s_q=2, s_kv=300, topk=200, sink=True, topk_length=True))
    metadata, num_splits = reference.plan(reference.sparse_num_keys(3, 200, inputs.topk_length), 7)

    def results():
        args = (inputs.q, inputs.kv_cache, inputs.indices)
        yield from reference.sparse_decode(*args, **inputs.kwargs())
        options = {"softmax_scale": inputs.softmax_scale, "topk_length": inputs.topk_length}
        partial = reference.partials(*args, metadata, **options)
        yield from partial
        room = torch.zeros(3, 2, 8, 512), torch.zeros(3, 2, 8)
        yield from reference.combine(*partial, metadata, num_splits, out=room[0], lse=room[1])
        yield quantize_kv_cache(inputs.kv)
        yield dequantize_kv_cache(inputs.kv_cache)

    want = list(results())
    with torch.autocast("cpu", torch.bfloat16):
        got = list(results())
    for ours, right in zip(got, want):
        assert_bitwise(ours, right)


def test_default_device_changes_nothing():
    inputs = make_inputs(BRUTE_CASES[0])
    args = (inputs.q, inputs.kv_cache, inputs.indices)
    want = mla_cute.sparse_decode(*args, **inputs.kwargs())
    with torch.device("meta"):
        plan = mla_cute.plan_decode(inputs.q, inputs.indices, topk_length=inputs.topk_length)
        assert plan.device == torch.device("cpu")
        got = mla_cute.sparse_decode(*args, **inputs.kwargs(), plan=plan)
    for ours, right in zip(got, want):
        assert_bitwise(ours, right)


# ---- the plan: worked examples


def rows(metadata: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(r) for r in metadata[:, :7].tolist()]


def payload_of(num_keys: list[int], num_parts: int) -> int:
    return -(-sum(max(n - 1, 0) // 64 + 1 + 5 for n in num_keys) // num_parts) + 5


def busy(metadata: torch.Tensor, b: int) -> int:
    return int((metadata[:, 0] < b).sum())


def test_plan_b2_topk128():
    metadata, num_splits = reference.plan([128] * 2, 66)
    assert payload_of([128] * 2, 66) == 6
    used = [(0, 0, 0, 1, 0, 1, 1), (0, 0, 1, 2, 1, 1, 1), (1, 1, 0, 1, 0, 1, 1), (1, 1, 1, 2, 1, 1, 1)]
    assert rows(metadata) == used + [(2, 1, 0, 0, 0, 0, 0)] * 62
    assert num_splits.tolist() == [0, 2, 4]
    assert metadata[:, 7].tolist() == [0, 1, 2, 3] + [4] * 62
    assert metadata.dtype == num_splits.dtype == torch.int32


def test_plan_b2_topk2048():
    metadata, num_splits = reference.plan([2048] * 2, 33)
    assert payload_of([2048] * 2, 33) == 8
    assert num_splits.tolist() == [0, 11, 22] and busy(metadata, 2) == 22
    sizes = (metadata[:22, 3] - metadata[:22, 2]).tolist()
    assert sizes == ([3] * 10 + [2]) * 2
    assert metadata[:, 7].tolist() == list(range(22)) + [22] * 11


@pytest.mark.parametrize(("b", "payload"), [(64, 77), (128, 149)])
def test_plan_no_request_split(b, payload):
    metadata, num_splits = reference.plan([2048] * b, 33)
    assert payload_of([2048] * b, 33) == payload
    assert num_splits.tolist() == list(range(b + 1)) and busy(metadata, b) == 32
    assert (metadata[:, 4:] == 0).all()


def test_plan_b74():
    metadata, num_splits = reference.plan([2048] * 74, 33)
    assert payload_of([2048] * 74, 33) == 88
    assert num_splits[-1] == 98 and num_splits.diff().max() == 2


def test_plan_b128_p74():
    _, num_splits = reference.plan([2048] * 128, 74)
    assert payload_of([2048] * 128, 74) == 69 and num_splits[-1] == 183


@pytest.mark.parametrize("num_parts", [37, 66, 132])
def test_plan_b1(num_parts):
    metadata, num_splits = reference.plan([2048], num_parts)
    assert payload_of([2048], num_parts) == 6 and num_splits.tolist() == [0, 32]
    assert rows(metadata)[:32] == [(0, 0, i, i + 1, i, 1, 1) for i in range(32)] and busy(metadata, 1) == 32


def test_plan_dense_lengths():
    metadata, num_splits = reference.plan([0, 100, 4096], 33)
    assert payload_of([0, 100, 4096], 33) == 8
    # One part takes the empty request; the payload then holds request 1; request 2 goes in pieces of three blocks.
    assert rows(metadata)[:3] == [(0, 0, 0, 0, 0, 0, 0), (1, 1, 0, 2, 0, 0, 0), (2, 2, 0, 3, 0, 1, 1)]
    assert num_splits.tolist() == [0, 1, 2, 24]


def test_plan_part_over_several_requests():
    """By hand. 4 blocks each, P = 2: payload = ceil(27 / 2) + 5 = 19 = 2 * (4 + 5) + 1, and 1 does not open a third."""
    metadata, num_splits = reference.plan([256] * 3, 2)
    assert rows(metadata) == [(0, 1, 0, 4, 0, 0, 0), (2, 2, 0, 4, 0, 0, 0)] and num_splits.tolist() == [0, 1, 2, 3]
    # 10 blocks each: payload = ceil(45 / 2) + 5 = 28 = 15 + (8 + 5): request 1 is cut at 8.
    metadata, num_splits = reference.plan([640] * 3, 2)
    assert rows(metadata) == [(0, 1, 0, 8, 0, 0, 1), (1, 2, 8, 10, 1, 1, 0)] and num_splits.tolist() == [0, 1, 3, 4]
    assert metadata[:, 7].tolist() == [0, 1]
    assert reference.partial_pieces(metadata, 3) == [(0, 1, 0, 8), (1, 1, 8, None)]


def test_plan_errors():
    with pytest.raises(ValueError, match="num_parts: must be at least 1, got 0"):
        reference.plan([64], 0)
    with pytest.raises(ValueError, match="num_keys: must not be negative, got -1"):
        reference.plan([64, -1], 3)


def test_sparse_num_keys():
    assert reference.sparse_num_keys(3, 2048) == [2048] * 3
    lengths = torch.tensor([0, 1, 128, 4000, -7]).int()
    assert reference.sparse_num_keys(5, 128, lengths) == [1, 1, 128, 128, 1]
    extra_lengths = torch.tensor([3, 0, 9999, -7, 70]).int()
    assert reference.sparse_num_keys(2, 130, extra_topk=70) == [192 + 70] * 2
    assert reference.sparse_num_keys(5, 130, lengths, extra_topk=70) == [n + 70 for n in (64, 64, 128, 192, 64)]
    want = [64 + 3, 64, 128 + 70, 192, 64 + 70]
    assert reference.sparse_num_keys(5, 130, lengths, extra_topk=70, extra_topk_length=extra_lengths) == want
    want = [160 + 3, 160, 160 + 70, 160, 160 + 70]
    assert reference.sparse_num_keys(5, 130, extra_topk=70, extra_topk_length=extra_lengths, tile_n=32) == want


# ---- the plan: invariants


@dataclass(frozen=True)
class PlanCase:
    b: int
    num_parts: int
    max_keys: int
    dense: bool  # zeros allowed
    tile_n: int = 64
    overhead: int = 5
    seed: int = 0
    extra_keys: int = 0  # at most

    def lengths(self) -> list[int]:
        g = torch.Generator().manual_seed(self.seed)
        n = torch.randint(0, self.max_keys + 1, (self.b,), generator=g)
        n[torch.rand(self.b, generator=g) < 0.15] = 0
        if self.dense:
            return n.tolist()
        extra = {"extra_topk": self.extra_keys, "tile_n": self.tile_n}
        if self.extra_keys:
            more = torch.randint(0, self.extra_keys + 1, (self.b,), generator=g)
            extra["extra_topk_length"] = torch.where(torch.rand(self.b, generator=g) < 0.3, 0, more).int()
        return reference.sparse_num_keys(self.b, self.max_keys, n.int(), **extra)


PLAN_CASES = [
    PlanCase(b, p, keys, dense, seed=b + p + keys)
    for b in (1, 2, 3, 7, 33, 100, 321)
    for p in (1, 2, 3, 33, 66, 132)
    for keys in (1, 64, 65, 2048, 20000)
    for dense in (False, True)
] + [
    PlanCase(9, 11, 3000, False, tile_n=32, overhead=0),
    PlanCase(9, 11, 3000, False, tile_n=128, overhead=3),
    PlanCase(50, 40, 3000, True, tile_n=64, overhead=1),
    PlanCase(9, 11, 300, False, tile_n=32, overhead=0, extra_keys=2000),
] + [PlanCase(b, p, 128, False, seed=b + p, extra_keys=n) for b in (1, 7, 100) for p in (1, 33, 132) for n in (1, 64, 1000)]


def test_plan_invariants():
    for case in PLAN_CASES:
        num_keys = case.lengths()
        metadata, num_splits = reference.plan(
            num_keys, case.num_parts, tile_n=case.tile_n, fixed_overhead_blocks=case.overhead
        )
        blocks = [-(-n // case.tile_n) for n in num_keys]  # 0 for an empty request
        check_plan(case, num_keys, blocks, metadata.tolist(), num_splits.tolist())


def check_plan(case, num_keys, blocks, records, num_splits):
    b, parts, overhead = len(num_keys), case.num_parts, case.overhead
    payload = -(-sum(max(n, 1) + overhead for n in blocks) // parts) + overhead
    assert len(records) == parts and len(num_splits) == b + 1
    work = [[] for _ in range(b)]  # per request: (begin, end, split, flagged as split, slot or None), in part order
    slot, idle = 0, False
    for begin_req, end_req, begin_block, end_block, begin_split, first, last, field7 in records:
        assert field7 == slot, case
        if begin_req >= b:
            assert (begin_req, end_req, begin_block, end_block, begin_split, first, last) == (b, b - 1, 0, 0, 0, 0, 0)
            idle = True
            continue
        assert not idle and begin_req <= end_req < b, case  # idle parts come last
        cost = 0
        for r in range(begin_req, end_req + 1):
            begin = begin_block if r == begin_req else 0
            end = end_block if r == end_req else blocks[r]
            flag = first if r == begin_req else last if r == end_req else 0
            own = slot if flag else None
            slot += bool(flag)
            work[r].append((begin, end, begin_split if r == begin_req else 0, flag, own))
            cost += max(end - begin, 1) + overhead
        if begin_req == end_req:
            assert first == last, case
        assert cost <= payload, case
    assert slot <= 2 * (parts - 1), case
    slots = []
    for r in range(b):
        assert len(work[r]) == num_splits[r + 1] - num_splits[r] >= 1, case
        assert work[r][0][0] == 0 and work[r][-1][1] == blocks[r], case
        for i, (begin, end, split, flag, own) in enumerate(work[r]):
            assert split == i and flag == (len(work[r]) > 1), case
            assert begin < end or blocks[r] == 0, case
            assert i == 0 or begin == work[r][i - 1][1], case  # each block once, in order
            slots += [own] if flag else []
    assert slots == list(range(slot)), case  # pieces of a request consecutive, in split order


def test_plan_closed_form():
    """The same plan from prefix sums: a second derivation, the one a parallel planner uses."""
    for case in PLAN_CASES:
        if case.dense:
            continue
        num_keys, f = case.lengths(), case.overhead
        metadata, num_splits = reference.plan(num_keys, case.num_parts, tile_n=case.tile_n, fixed_overhead_blocks=f)
        cost = [0]
        for n in num_keys:
            cost.append(cost[-1] + -(-n // case.tile_n) + f)
        payload, b = -(-cost[-1] // case.num_parts) + f, len(num_keys)
        x, cuts = 0, [0]
        for begin_req, _, begin_block, *_ in metadata.tolist():
            r = bisect.bisect_right(cost, x) - 1  # x = cost[r] + k
            assert (begin_req, begin_block) == (r, x - cost[r] if r < b else 0), case
            e = bisect.bisect_right(cost, x + payload) - 1
            x = cost[b] if e == b else max(x + payload - f, cost[e])
            cuts.append(x)
        assert x == cost[b]
        interior = sorted({c for c in cuts if c not in cost})
        assert num_splits.tolist() == [r + bisect.bisect_left(interior, cost[r]) for r in range(b + 1)], case


# ---- partials and combine


def split_and_combine(
    case: Case, num_parts: int, dtype: torch.dtype = torch.float32, tile_n: int = 64, overhead: int = 5
):
    """(out, lse) by way of partials and combine where a request is split, garbage elsewhere; and which are split."""
    inputs = make_inputs(case)
    extra = {"extra_topk": case.extra_topk, "extra_topk_length": inputs.extra_topk_length, "tile_n": tile_n}
    num_keys = reference.sparse_num_keys(case.b, case.topk, inputs.topk_length, **extra)
    metadata, num_splits = reference.plan(num_keys, num_parts, tile_n=tile_n, fixed_overhead_blocks=overhead)
    o_partial, lse_partial = reference.partials(
        inputs.q,
        inputs.kv_cache,
        inputs.indices,
        metadata,
        softmax_scale=inputs.softmax_scale,
        **inputs.keys(),
        tile_n=tile_n,
        dtype=dtype,
    )
    assert o_partial.shape == (2 * num_parts, case.s_q, case.h_q, 512)
    out = torch.full((case.b, case.s_q, case.h_q, 512), 7.0, dtype=dtype)
    lse = torch.full((case.b, case.s_q, case.h_q), 7.0, dtype=dtype)
    got = reference.combine(o_partial, lse_partial, metadata, num_splits, attn_sink=inputs.attn_sink, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    return inputs, out, lse, num_splits.diff() > 1, o_partial, lse_partial, metadata


COMBINE_CASES = [
    (Case(b=1, h_q=8, s_q=2, s_kv=700, topk=640, sink=True), 12),
    (Case(b=3, h_q=8, s_q=1, s_kv=700, topk=640, page_block_size=61, sink=True, varlen=True), 7),
    (Case(b=8, h_q=8, s_q=2, s_kv=300, topk=576, sink=True, topk_length=True, holes=True, duplicates=True, seed=3), 9),
    (Case(b=5, h_q=16, s_q=1, s_kv=512, topk=512, zero_length=True, sink=True, scales="amax"), 132),
    (Case(b=2, h_q=8, s_q=3, s_kv=100, topk=256, all_invalid=True, sink=True), 30),
    (Case(b=2, h_q=8, s_q=1, s_kv=100, topk=320), 16),  # the second half of the list is -1: empty splits
    (Case(b=6, h_q=8, s_q=1, s_kv=500, topk=200), 20),  # topk is no multiple of the block
    (Case(b=3, h_q=8, s_kv=700, topk=300, kv_format="model1", outside=True, sink=True), 12),
    (Case(b=3, h_q=8, s_kv=300, topk=200, extra_topk=250, extra_page_block_size=7, sink=True), 14),
    (
        Case(
            **{"b": 6, "h_q": 8, "s_kv": 300, "topk": 200, "topk_length": True, "kv_format": "model1", "holes": True},
            **{"extra_topk": 330, "extra_topk_length": True, "sink": True, "seed": 1},
        ),
        25,
    ),
]


@pytest.mark.parametrize(("case", "num_parts"), COMBINE_CASES, ids=lambda x: str(x))
def test_combine_is_the_whole(case, num_parts):
    inputs, out, lse, split, o_partial, lse_partial, _ = split_and_combine(case, num_parts)
    assert split.any()
    want_out, want_lse = reference.sparse_decode(
        inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs(), out_dtype=torch.float32
    )
    assert_close(out[split], want_out[split], **TIGHT_OUT, name="out")
    assert_close(lse[split], want_lse[split], **TIGHT_LSE, name="lse")
    assert (out[~split] == 7).all() and (lse[~split] == 7).all()  # requests in one piece are not touched


@pytest.mark.parametrize("tile_n", [16, 64])
def test_pieces_of_extra_keys(tile_n):
    """One block a part: every block of main and of extra keys is a piece, cut where the block says."""
    case = Case(
        **{"b": 5, "h_q": 4, "s_kv": 90, "topk": 70, "topk_length": True, "page_block_size": 3, "kv_format": "model1"},
        **{"extra_topk": 75, "extra_topk_length": True, "extra_page_block_size": 8, "seed": 1},
    )
    inputs, *_, o_partial, lse_partial, metadata = split_and_combine(case, 1000, torch.float64, tile_n, overhead=0)
    pieces = reference.partial_pieces(metadata, case.b)
    blocks = {r: [p for p in pieces if p.request == r] for r in range(case.b)}
    seen = 0
    for r in range(case.b):
        length, extra_length = int(inputs.topk_length[r]), int(inputs.extra_topk_length[r])
        lists = [
            (inputs.kv_cache, inputs.indices[r, 0, i : min(i + tile_n, length)]) for i in range(0, max(length, 1), tile_n)
        ]
        lists += [
            (inputs.extra_kv_cache, inputs.extra_indices[r, 0, i : min(i + tile_n, extra_length)])
            for i in range(0, extra_length, tile_n)
        ]
        if len(lists) == 1:  # one block is not split
            assert not blocks[r]
            continue
        assert len(blocks[r]) == len(lists)
        for piece, (cache, listed) in zip(blocks[r], lists):
            out, lse = reference.sparse_decode(
                inputs.q[r : r + 1],
                cache,
                listed.view(1, 1, -1),
                softmax_scale=inputs.softmax_scale,
                dtype=torch.float64,
                out_dtype=torch.float64,
            )
            assert (o_partial[piece.slot] - out[0]).abs().max() < 1e-12
            want = torch.where(lse[0] == math.inf, -math.inf, lse[0] * math.log2(math.e))
            assert torch.allclose(lse_partial[piece.slot], want, rtol=1e-12)
            seen += cache is inputs.extra_kv_cache
    assert seen > 2


def test_partials_layout():
    """Each piece holds its own blocks' softmax average and base-2 log-sum; slots of no piece are NaN."""
    case, num_parts = COMBINE_CASES[2][0], 20
    inputs, *_, o_partial, lse_partial, metadata = split_and_combine(case, num_parts, torch.float64)
    pieces = reference.partial_pieces(metadata, case.b)
    assert [p.slot for p in pieces] == list(range(len(pieces))) and len(pieces) > 4
    unused = slice(len(pieces), None)
    assert o_partial[unused].isnan().all() and lse_partial[unused].isnan().all()
    for piece in pieces:
        r, begin = piece.request, 64 * piece.begin_block
        end = case.topk if piece.end_block is None else 64 * piece.end_block
        length = (inputs.topk_length[r : r + 1] - begin).clamp(max=end - begin)
        out, lse = reference.sparse_decode(  # the piece as a request of its own
            inputs.q[r : r + 1],
            inputs.kv_cache,
            inputs.indices[r : r + 1, :, begin:end],
            softmax_scale=inputs.softmax_scale,
            topk_length=length,
            dtype=torch.float64,
            out_dtype=torch.float64,
        )
        assert (o_partial[piece.slot] - out[0]).abs().max() < 1e-12
        none = lse[0] == math.inf
        assert (lse_partial[piece.slot][none] == -math.inf).all() and (o_partial[piece.slot][none] == 0).all()
        assert ((lse_partial[piece.slot] * math.log(2) - lse[0])[~none].abs() < 1e-12).all()


def test_combine_by_hand():
    """Two splits of one request between two requests in one piece; a third slot of NaN is nobody's."""
    metadata = torch.tensor([[0, 1, 0, 1, 0, 0, 1, 0], [1, 2, 1, 2, 1, 1, 0, 1]], dtype=torch.int32)
    num_splits = torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    heads = 7
    # log2 sums per head: even; 3 to 1; first empty; both empty (four times, under every kind of sink)
    lse_partial = torch.full((4, 1, heads), math.nan)
    lse_partial[:2, 0] = torch.tensor(
        [[5.0, 3.0, -math.inf] + [-math.inf] * 4, [5.0, 3 - math.log2(3), 2.0] + [-math.inf] * 4]
    )
    o_partial = torch.full((4, 1, heads, 512), math.nan)
    o_partial[0], o_partial[1] = 8.0, 16.0
    o_partial[0, 0, 2] = 0
    o_partial[:2, 0, 3:] = 0

    def run(sink):
        out, lse = torch.full((3, 1, heads, 512), -1.0), torch.full((3, 1, heads), -1.0)
        reference.combine(o_partial, lse_partial, metadata, num_splits, attn_sink=sink, out=out, lse=lse)
        assert (out[[0, 2]] == -1).all() and (lse[[0, 2]] == -1).all()
        assert torch.equal(out[1, 0], out[1, 0, :, :1].expand(-1, 512))
        return out[1, 0, :, 0].tolist(), lse[1, 0].tolist()

    ln = math.log
    out, lse = run(None)
    assert out == pytest.approx([12, 10, 16, 0, 0, 0, 0], rel=1e-6)
    want_lse = [ln(64), ln(8 + 8 / 3), ln(4)] + [math.inf] * 4
    assert lse == pytest.approx(want_lse, rel=1e-6)
    out, lse = run(torch.tensor([ln(64), ln(32 / 3), ln(12), 0.0, math.inf, -math.inf, 300.0]))
    assert out == pytest.approx([6, 5, 4, 0, 0, 0, 0], rel=1e-6) and lse == pytest.approx(want_lse, rel=1e-6)
    assert out[3:] == [0, 0, 0, 0]
    out, lse = run(torch.tensor([math.inf, -math.inf, 1e30, 0.0, 0.0, 0.0, 0.0]))
    assert out[0] == 0 and out[1] == pytest.approx(10, rel=1e-6) and out[2] == 0
    assert lse == pytest.approx(want_lse, rel=1e-6)


# ---- the module as an implementation


@dataclass(frozen=True)
class FakeProblem:
    op: str = "sparse_decode"
    h_q: int = 128
    kv_format: str = "v32"

    @property
    def head_tiles(self) -> int:
        return -(-self.h_q // 64)


@pytest.mark.parametrize("extra", [{}, {"kv_format": "model1", "extra_topk": 30, "extra_topk_length": True}], ids=len)
def test_compile_writes_strided_outputs(extra):
    case = Case(b=3, h_q=8, s_q=2, s_kv=100, topk=64, sink=True, topk_length=True, zero_length=True, **extra)
    inputs, problem = make_inputs(case), FakeProblem(h_q=8, kv_format=case.kv_format)
    run = reference.compile(problem, reference.default_config(problem), "sm_90a")
    out = torch.full((3, 2, 9, 520), 7.0, dtype=torch.bfloat16)
    lse = torch.full((3, 8, 2), 7.0)
    run(
        *(inputs.q, inputs.kv_cache, inputs.indices, inputs.topk_length),
        *(inputs.extra_kv_cache, inputs.extra_indices, inputs.extra_topk_length),
        *(inputs.attn_sink, inputs.softmax_scale, None, None, None),
        *(out[:, :, :8, :512], lse.transpose(1, 2)),
    )
    want = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    assert_bitwise(out[:, :, :8, :512], want[0])
    assert_bitwise(lse.transpose(1, 2), want[1])
    assert (out[:, :, 8:] == 7).all() and (out[..., 512:] == 7).all()


@pytest.mark.parametrize(
    ("h_q", "s_q", "num_sms", "want"),
    [(64, 1, 132, 132), (128, 1, 132, 66), (128, 2, 132, 33), (64, 3, 132, 44), (1, 1, 132, 132), (128, 200, 132, 1)],
)
def test_config_num_parts(h_q, s_q, num_sms, want):
    problem = FakeProblem(h_q=h_q)
    assert reference.default_config(problem).num_parts(problem, s_q, num_sms) == want


def test_config_check():
    with pytest.raises(NotImplementedError, match="problem.op: .* got dense_decode"):
        reference.compile(FakeProblem(op="dense_decode"), reference.Config(), "sm_90a")
    with pytest.raises(NotImplementedError, match="problem.kv_format: the reference reads v32 and model1, got v4"):
        reference.Config().check(FakeProblem(kv_format="v4"))
    with pytest.raises(ValueError, match="tile_n: must be at least 1, got 0"):
        reference.Config(tile_n=0).check(FakeProblem())
    with pytest.raises(ValueError, match="fixed_overhead_blocks: must not be negative, got -1"):
        reference.Config(fixed_overhead_blocks=-1).check(FakeProblem())
    for value in (math.nan, "64", None, 64.0, 64.5, True):
        for name in ("tile_n", "fixed_overhead_blocks"):
            with pytest.raises(ValueError, match=f"^{name}: must be an int, got {value!r}$"):
                reference.Config(**{name: value}).check(FakeProblem())
