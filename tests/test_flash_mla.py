"""flash_mla.py: FlashMLA's names and signatures, the life cycle of its plan objects, and what it refuses."""

import dataclasses
import inspect
import re

import pytest
import torch

import mla_cute
from mla_cute import flash_mla
from mla_cute.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from mla_cute.testing import Case, assert_bitwise, make_inputs

CASE = Case(b=3, h_q=5, s_q=2, s_kv=200, topk=133, page_block_size=16, topk_length=True, sink=True, holes=True)
MODEL1 = Case(
    **{"b": 3, "h_q": 5, "s_q": 2, "s_kv": 200, "topk": 133, "page_block_size": 16, "topk_length": True, "sink": True},
    **{"kv_format": "model1", "extra_topk": 70, "extra_page_block_size": 61, "extra_topk_length": True},
)
I32 = torch.int32


@pytest.fixture(scope="module")
def x():
    return make_inputs(CASE)


def decode(x, meta, num_splits=None, **changes):
    """One sparse call, as a client spells it."""
    options = {"softmax_scale": x.softmax_scale, "causal": False, "is_fp8_kvcache": True, "indices": x.indices}
    options |= {"attn_sink": x.attn_sink, "topk_length": x.topk_length, "extra_k_cache": x.extra_kv_cache}
    options |= {"extra_indices_in_kvcache": x.extra_indices, "extra_topk_length": x.extra_topk_length} | changes
    q, k_cache = options.pop("q", x.q), options.pop("k_cache", x.kv_cache)
    head_dim_v = options.pop("head_dim_v", 512)
    return flash_mla_with_kvcache(q, k_cache, None, None, head_dim_v, meta, num_splits, **options)


def expected(x, **changes):
    return mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **(x.kwargs() | changes))


def old_metadata(x, **changes):
    b, s_q, h_q = x.q.shape[:3]
    arguments = {
        "cache_seqlens": torch.zeros(b, dtype=I32),
        "num_q_tokens_per_head_k": s_q * h_q,
        "num_heads_k": 1,
        "num_heads_q": h_q,
        "is_fp8_kvcache": True,
        "topk": x.indices.shape[2],
    }
    return get_mla_metadata(**(arguments | changes))


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is made, in order."""
    made, inner = [], flash_mla.plan_decode
    monkeypatch.setattr(flash_mla, "plan_decode", lambda *args, **kw: made.append(inner(*args, **kw)) or made[-1])
    return made


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}")


class TestResults:
    def test_out_and_lse(self, x):
        out, lse = decode(x, get_mla_metadata()[0])
        ref_out, ref_lse = expected(x)
        assert_bitwise(out, ref_out)
        assert out.is_contiguous()
        assert lse.shape == (3, 5, 2)
        assert lse.stride() == (10, 1, 5)  # the view clients know: [b, h_q, s_q] over [b, s_q, h_q]
        assert_bitwise(lse.transpose(1, 2), ref_lse)

    def test_positional_order(self, x):
        junk = torch.full((3, 4), 2147480000, dtype=I32)
        arguments = (x.q, x.kv_cache, junk, junk[:, 0], 512, get_mla_metadata()[0], None, x.softmax_scale, False, True)
        out, _ = flash_mla_with_kvcache(*arguments, x.indices, x.attn_sink, None, None, x.topk_length, None)
        assert_bitwise(out, expected(x)[0])
        assert [*inspect.signature(flash_mla_with_kvcache).parameters][-1] == "out"

    def test_default_scale_and_no_options(self, x):
        out, lse = flash_mla_with_kvcache(
            x.q, x.kv_cache, None, None, 512, get_mla_metadata()[0], is_fp8_kvcache=True, indices=x.indices.clamp(0, 99)
        )
        ref_out, ref_lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices.clamp(0, 99), softmax_scale=576**-0.5)
        assert_bitwise(out, ref_out)
        assert_bitwise(lse.mT.contiguous(), ref_lse)

    @pytest.mark.parametrize(
        "case", [MODEL1, dataclasses.replace(MODEL1, kv_format="v32"), dataclasses.replace(CASE, kv_format="model1")], ids=str
    )
    @pytest.mark.parametrize("form", ["object", "tensors"])
    def test_model1_and_extra_keys(self, case, form):
        x = make_inputs(case)
        out, lse = decode(x, *(get_mla_metadata() if form == "object" else old_metadata(x)))
        ref_out, ref_lse = expected(x)
        assert_bitwise(out, ref_out)
        assert_bitwise(lse.mT.contiguous(), ref_lse)

    def test_positional_extra_keys(self):
        x = make_inputs(MODEL1)
        arguments = (x.q, x.kv_cache, None, None, 512, get_mla_metadata()[0], None, x.softmax_scale, False, True)
        extra = (x.extra_kv_cache, x.extra_indices, x.topk_length, x.extra_topk_length)
        out, _ = flash_mla_with_kvcache(*arguments, x.indices, x.attn_sink, *extra)
        assert_bitwise(out, expected(x)[0])

    def test_out_is_written_in_place(self, x):
        mine = torch.empty(3, 2, 5, 512, dtype=torch.bfloat16)
        out, _ = decode(x, get_mla_metadata()[0], out=mine)
        assert out is mine
        assert_bitwise(mine, expected(x)[0])

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_cache_dtypes(self, x, dtype):
        out, _ = decode(x, get_mla_metadata()[0], k_cache=x.kv_cache.view(dtype))
        assert_bitwise(out, expected(x)[0])

    @pytest.mark.parametrize("form", ["object", "tensors"])
    def test_empty_batch(self, x, form):
        pair = get_mla_metadata() if form == "object" else old_metadata(x)
        out, lse = decode(x, *pair, q=x.q[:0], indices=x.indices[:0], topk_length=None)
        assert (out.shape, lse.shape) == ((0, 2, 5, 512), (0, 5, 2))


class TestObject:
    """The form of 2026."""

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            (torch.zeros(3, dtype=I32), 10, 1),
            (torch.zeros(3, dtype=I32), 10, 1, 5, False, None),
            (torch.zeros(3, dtype=I32), 10, 1, 5, False, None, "more"),
            (None, "any", "number", "of", "arguments", None, "and", "kinds"),
        ],
        ids=len,
    )
    def test_get_mla_metadata(self, arguments):
        meta, nothing = get_mla_metadata(*arguments)
        assert meta == FlashMLASchedMeta(False, None, None, None)
        assert nothing is None
        assert get_mla_metadata()[0] is not meta

    def test_get_mla_metadata_ignores_other_keywords(self):
        meta, _ = get_mla_metadata(cache_seqlens=torch.zeros(3, dtype=I32), num_heads_per_head_k=128, num_heads_k=1)
        assert meta == FlashMLASchedMeta()

    def test_first_call_fills_later_calls_reuse(self, x, plans):
        meta, _ = get_mla_metadata()
        first, _ = decode(x, meta)
        assert meta.have_initialized
        assert meta.config == FlashMLASchedMeta.Config(3, 2, 5, 16, 1, False, True, 133, None, None)
        (plan,) = plans
        assert meta.tile_scheduler_metadata is plan.metadata
        assert meta.num_splits is plan.num_splits
        assert plan.metadata.dtype == plan.num_splits.dtype == I32
        assert (plan.metadata.shape[1], plan.num_splits.shape) == (8, (4,))
        for q in (x.q, x.q.flip(0)):  # other contents, the same lengths
            out, _ = decode(x, meta, q=q)
            assert_bitwise(out, expected(dataclasses.replace(x, q=q))[0])
        assert len(plans) == 1
        assert meta.tile_scheduler_metadata is plan.metadata
        assert_bitwise(decode(x, meta)[0], first)

    def test_config_is_recorded_before_a_call_that_fails(self, x, plans):
        meta, _ = get_mla_metadata()
        with refused(ValueError, "head_dim_v: must be 512, got 256"):
            decode(x, meta, head_dim_v=256)
        with refused(TypeError, "q: dtype must be bfloat16, got torch.float32"):
            decode(x, meta, q=x.q.float())
        assert meta.have_initialized
        assert meta.config.topk == 133
        assert meta.tile_scheduler_metadata is None
        assert meta.num_splits is None
        assert plans == []  # nothing was launched either
        with refused(AssertionError, "topk: must be 133 as in the first call with this FlashMLASchedMeta, got 64"):
            decode(x, meta, indices=x.indices[..., :64])
        assert_bitwise(decode(x, meta)[0], expected(x)[0])
        assert len(plans) == 1

    def test_that_claims_a_first_call(self, x):
        message = (
            "tile_scheduler_metadata: config of a FlashMLASchedMeta that have_initialized must be that of its first"
        )
        with refused(ValueError, message):
            decode(x, FlashMLASchedMeta(have_initialized=True))

    def test_another_shape_than_the_first(self, x):
        meta, _ = get_mla_metadata()
        decode(x, meta)
        text = "{}: must be {} as in the first call with this FlashMLASchedMeta, got {}"
        pages = x.kv_cache.shape[0] // 2
        wide = torch.zeros(pages, 32, 1, 656, dtype=torch.uint8)
        for name, needed, got, changes in (
            ("b", 3, 2, {"q": x.q[:2], "indices": x.indices[:2]}),
            ("s_q", 2, 1, {"q": x.q[:, :1], "indices": x.indices[:, :1]}),
            ("h_q", 5, 4, {"q": x.q[:, :, :4]}),
            ("page_block_size", 16, 32, {"k_cache": wide}),
            ("h_k", 1, 2, {"k_cache": torch.zeros(pages, 16, 2, 656, dtype=torch.uint8)}),
            ("causal", False, True, {"causal": True}),
            ("is_fp8_kvcache", True, False, {"is_fp8_kvcache": False}),
            ("topk", 133, 100, {"indices": x.indices[..., :100]}),
            ("topk", 133, None, {"indices": None}),
        ):
            with refused(AssertionError, text.format(name, needed, got)):
                decode(x, meta, **changes)
        assert_bitwise(decode(x, meta)[0], expected(x)[0])

    def test_other_extra_keys_than_the_first(self):
        x, (meta, _) = make_inputs(MODEL1), get_mla_metadata()
        decode(x, meta)
        assert meta.config == FlashMLASchedMeta.Config(3, 2, 5, 16, 1, False, True, 133, 61, 70)
        text = "{}: must be {} as in the first call with this FlashMLASchedMeta, got {}"
        none = dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
        for name, needed, got, changes in (
            ("extra_page_block_size", 61, 30, {"extra_k_cache": x.extra_kv_cache[:, :30]}),
            ("extra_page_block_size", 61, None, none),
            ("extra_topk", 70, 64, {"extra_indices_in_kvcache": x.extra_indices[..., :64]}),
            ("extra_topk", 70, None, {"extra_indices_in_kvcache": None}),
        ):
            with refused(AssertionError, text.format(name, needed, got)):
                decode(x, meta, **changes)
        message = "plan: was made for has_extra_topk_length True, got a call with has_extra_topk_length False"
        with refused(ValueError, message):
            decode(x, meta, extra_topk_length=None)
        assert_bitwise(decode(x, meta)[0], expected(x)[0])

    def test_lengths_that_come_or_go_are_no_silent_reuse(self, x):
        meta, _ = get_mla_metadata()
        decode(x, meta)
        with refused(ValueError, "plan: was made for has_topk_length True, got a call with has_topk_length False"):
            decode(x, meta, topk_length=None)

    def test_planning_again(self, x, plans):
        meta, _ = get_mla_metadata()
        decode(x, meta)
        shorter = x.topk_length // 2
        meta.tile_scheduler_metadata = None
        out, _ = decode(x, meta, topk_length=shorter)
        assert len(plans) == 2
        assert meta.tile_scheduler_metadata is plans[1].metadata
        assert meta.num_splits is plans[1].num_splits
        assert_bitwise(out, expected(x, topk_length=shorter)[0])

    @pytest.mark.parametrize("name", ["tile_scheduler_metadata", "num_splits"])
    def test_foreign_tensors_inside(self, x, name):
        meta, _ = get_mla_metadata()
        decode(x, meta)
        setattr(meta, name, getattr(meta, name).clone())
        with refused(ValueError, "tile_scheduler_metadata: the tensors of a FlashMLASchedMeta must be those that its"):
            decode(x, meta)

    def test_num_splits_beside_an_object(self, x):
        with refused(AssertionError, "num_splits: must be None beside a FlashMLASchedMeta, got a value"):
            decode(x, get_mla_metadata()[0], torch.zeros(4, dtype=I32))


class TestTensors:
    """The form of 2025."""

    def test_get_mla_metadata_gives_the_plan(self, x):
        metadata, num_splits = old_metadata(x)
        plan = mla_cute.plan_decode(x.q, x.indices)
        assert_bitwise(metadata, plan.metadata)
        assert_bitwise(num_splits, plan.num_splits)
        positional = get_mla_metadata(torch.zeros(3, dtype=I32), 10, 1, 5, True, 133)
        assert_bitwise(positional[0], metadata)
        assert_bitwise(positional[1], num_splits)

    @pytest.mark.parametrize("lengths", [False, True])
    def test_decode(self, x, lengths):
        topk_length = x.topk_length if lengths else None
        indices = x.indices if lengths else torch.where(x.indices < x.kv_cache.shape[0] * 16, x.indices, -1)
        out, lse = decode(x, *old_metadata(x), topk_length=topk_length, indices=indices)
        ref = mla_cute.sparse_decode(x.q, x.kv_cache, indices, **(x.kwargs() | {"topk_length": topk_length}))
        assert_bitwise(out, ref[0])
        assert_bitwise(lse.mT.contiguous(), ref[1])

    def test_larger_buffers_and_any_contents(self, x, plans, monkeypatch):
        """Clients keep buffers for the largest batch and copy plans into them; nothing says which call they are for."""
        metadata, num_splits = old_metadata(x)
        buffer, splits = torch.full((500, 8), 2147480000, dtype=I32), torch.full((100,), -7, dtype=I32)
        buffer[: len(metadata)], splits[: len(num_splits)] = metadata, num_splits
        plans.clear()
        seen, inner = [], flash_mla.sparse_decode
        monkeypatch.setattr(flash_mla, "sparse_decode", lambda *a, **kw: seen.append(kw["plan"]) or inner(*a, **kw))
        for pair in ((buffer, splits), (torch.zeros_like(buffer), splits.fill_(0))):
            assert_bitwise(decode(x, *pair)[0], expected(x)[0])
        assert seen == plans  # the call's own plan, never what stands in the buffers
        assert len(plans) == 2

    def test_that_cannot_be_a_plan_of_this_call(self, x):
        metadata, num_splits = old_metadata(x)
        rows = len(metadata)
        for pair, error, message in (
            ((None, None), AssertionError, "tile_scheduler_metadata: must be what get_mla_metadata returned"),
            (((metadata, num_splits), None), AssertionError, "tile_scheduler_metadata: must be what get_mla_metadata"),
            (
                (metadata, None),
                TypeError,
                "num_splits: must be the tensor that belongs to tile_scheduler_metadata, got N",
            ),
            (
                (metadata.long(), num_splits),
                ValueError,
                f"tile_scheduler_metadata: must be int32 [P, 8], got torch.int64 [{rows}, 8]",
            ),
            (
                (metadata[:, :7], num_splits),
                ValueError,
                "tile_scheduler_metadata: must be int32 [P, 8], got torch.int32",
            ),
            (
                (metadata[0], num_splits),
                ValueError,
                "tile_scheduler_metadata: must be int32 [P, 8], got torch.int32 [8]",
            ),
            (
                (metadata[:-1], num_splits),
                ValueError,
                f"tile_scheduler_metadata: must have {rows} rows or more, got {rows - 1}",
            ),
            (
                (metadata, num_splits[:-1]),
                ValueError,
                "num_splits: must be int32 [b + 1] = [4] or larger, got torch.int32 [3]",
            ),
            (
                (metadata, num_splits.float()),
                ValueError,
                "num_splits: must be int32 [b + 1] = [4] or larger, got torch.f",
            ),
            (
                (metadata.to("meta"), num_splits),
                ValueError,
                "tile_scheduler_metadata: must be on the device of q (cpu), got meta",
            ),
            (
                (metadata, num_splits.to("meta")),
                ValueError,
                "num_splits: must be on the device of q (cpu), got meta",
            ),
        ):
            with refused(error, message):
                decode(x, *pair)

    @pytest.mark.parametrize(
        "changes, error, message",
        [
            ({"cache_seqlens": None}, TypeError, "cache_seqlens: must be a tensor [b], got None"),
            (
                {"cache_seqlens": torch.zeros(3, 1)},
                TypeError,
                "cache_seqlens: must be a tensor [b], got torch.Size([3, 1])",
            ),
            (
                {"is_fp8_kvcache": False},
                AssertionError,
                "is_fp8_kvcache: must be True for sparse attention (topk given)",
            ),
            (
                {"num_heads_q": None},
                TypeError,
                "num_heads_q: must be an int for sparse attention (topk given), got None",
            ),
            ({"num_heads_k": 2}, ValueError, "num_heads_k: must be 1 for sparse attention (topk given), got 2"),
            ({"topk": 0}, ValueError, "topk: must be 1 to 2147483647 for sparse attention (topk given), got 0"),
            ({"topk": 10**30}, ValueError, "topk: must be 1 to 2147483647 for sparse attention (topk given), got 1000"),
            ({"topk": True}, TypeError, "topk: must be an int for sparse attention (topk given), got True"),
            (
                {"num_heads_q": 129},
                ValueError,
                "num_heads_q: must be 1 to 128 for sparse attention (topk given), got 129",
            ),
            ({"num_heads_q": 10**30}, ValueError, "num_heads_q: must be 1 to 128 for sparse attention"),
            ({"num_q_tokens_per_head_k": 5 * 10**30}, ValueError, "num_q_tokens_per_head_k: must be 1 to 8388480 for"),
            (
                {"num_q_tokens_per_head_k": 5 * 65536},
                ValueError,
                "num_q_tokens_per_head_k: must be at most 65535 * num_heads_q (5), got 327680",
            ),
            ({"is_fp8_kvcache": "no"}, TypeError, "is_fp8_kvcache: must be a bool, got 'no'"),
            (
                {"num_q_tokens_per_head_k": 11},
                ValueError,
                "num_q_tokens_per_head_k: must be s_q * num_heads_q (5), got 11",
            ),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_bad_sizes(self, x, changes, error, message):
        with refused(error, message):
            old_metadata(x, **changes)


class TestRefused:
    @pytest.fixture(params=["object", "tensors"])
    def pair(self, request, x):
        return get_mla_metadata() if request.param == "object" else old_metadata(x)

    @pytest.mark.parametrize(
        "changes, error, message",
        [
            ({"is_fp8_kvcache": False}, AssertionError, "is_fp8_kvcache: must be True when indices is given"),
            (
                {"causal": True},
                AssertionError,
                "causal: must be False when indices is given (sparse attention), got True",
            ),
            ({"head_dim_v": 576}, ValueError, "head_dim_v: must be 512, got 576"),
            ({"indices": None}, NotImplementedError, "indices: needed, got None; this version has sparse decode only"),
            ({"extra_k_cache": torch.zeros(1)}, ValueError, "extra_k_cache: must have 4 dims, got shape [1]"),
            (
                {"extra_k_cache": torch.zeros(4, 16, 1, 656).byte()},
                ValueError,
                "extra_indices: must be given with extra_kv_cache, got None",
            ),
            (
                {"extra_indices_in_kvcache": torch.zeros(1)},
                ValueError,
                "extra_indices_in_kvcache: must have 3 dims, got shape [1]",
            ),
            (
                {"extra_indices_in_kvcache": torch.zeros(3, 2, 7, dtype=I32)},
                ValueError,
                "extra_kv_cache: must be given with extra_indices, got None",
            ),
            (
                {"extra_topk_length": torch.zeros(3, dtype=I32)},
                ValueError,
                "extra_kv_cache: must be given with extra_topk_length, got None",
            ),
            ({"q": torch.zeros(3, 5, 576)}, ValueError, "q: must have 4 dims, got shape [3, 5, 576]"),
            ({"q": [1]}, TypeError, "q: must be a torch.Tensor, got list"),
            ({"is_fp8_kvcache": "no"}, TypeError, "is_fp8_kvcache: must be a bool, got 'no'"),
            ({"causal": 0}, TypeError, "causal: must be a bool, got 0"),
            ({"q": torch.zeros(3, 2, 5, 576).to_sparse()}, TypeError, "q: must be a dense (strided) tensor, got"),
            ({"k_cache": torch.zeros(3, 656)}, ValueError, "k_cache: must have 4 dims, got shape [3, 656]"),
            ({"indices": torch.zeros(3, 133)}, ValueError, "indices: must have 3 dims, got shape [3, 133]"),
            ({"attn_sink": torch.zeros(4)}, ValueError, "attn_sink: shape must be [h_q] = [5], got [4]"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_message(self, x, pair, changes, error, message):
        with refused(error, message):
            decode(x, *pair, **changes)

    def test_causal_in_the_first_call_binds_nothing(self, x):
        meta, _ = get_mla_metadata()
        with refused(AssertionError, "causal: must be False"):
            decode(x, meta, causal=True)
        assert meta == FlashMLASchedMeta()

    def test_sparse_prefill(self):
        q, kv = torch.zeros(2, 64, 576), torch.zeros(9, 1, 576)
        with refused(
            NotImplementedError, "flash_mla_sparse_fwd: this version has no sparse prefill, only sparse decode"
        ):
            flash_mla_sparse_fwd(q, kv, torch.zeros(2, 1, 64, dtype=I32), 0.1)
