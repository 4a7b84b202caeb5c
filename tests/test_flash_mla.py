"""flash_mla.py: FlashMLA's names and signatures, the life cycle of its plan objects, and what it refuses."""

import copy
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

    def test_default_scale_and_no_options(self, x):
        out, lse = flash_mla_with_kvcache(
            x.q, x.kv_cache, None, None, 512, get_mla_metadata()[0], is_fp8_kvcache=True, indices=x.indices.clamp(0, 99)
        )
        ref_out, ref_lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices.clamp(0, 99), softmax_scale=576**-0.5)
        assert_bitwise(out, ref_out)
        assert_bitwise(lse.mT.contiguous(), ref_lse)

    @pytest.mark.parametrize(
        "case",
        [MODEL1, dataclasses.replace(MODEL1, kv_format="v32"), dataclasses.replace(CASE, kv_format="model1")],
        ids=str,
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

    def test_a_native_check_that_fails_later_changes_nothing(self, x, plans):
        meta, _ = get_mla_metadata()
        first, _ = decode(x, meta)
        kept = meta.tile_scheduler_metadata, meta.num_splits
        with refused(RuntimeError, "attn_sink: shape must be [h_q] = [5], got [4]"):
            decode(x, meta, attn_sink=x.attn_sink[:4])
        assert (meta.tile_scheduler_metadata, meta.num_splits) == kept
        assert_bitwise(decode(x, meta)[0], first)
        assert len(plans) == 1

    def test_a_rank_is_a_native_check(self, x):
        """The config of three dims is recorded, as FlashMLA does; of fewer there is none."""
        meta, _ = get_mla_metadata()
        with refused(RuntimeError, "q: must have 4 dims, got shape [5, 576]"):
            decode(x, meta, q=x.q[0, 0])
        assert not meta.have_initialized
        with refused(RuntimeError, "q: must have 4 dims [b, s_q, h_q, d_qk], got shape [2, 5, 576]"):
            decode(x, meta, q=x.q[0])
        assert (meta.config.b, meta.config.s_q, meta.config.h_q) == (2, 5, 576)
        with refused(AssertionError, "b: must be 2 as in the first call with this FlashMLASchedMeta, got 3"):
            decode(x, meta)

    def test_a_copy_is_as_good(self, x, plans):
        meta, _ = get_mla_metadata()
        first, _ = decode(x, meta)
        for again in (copy.copy(meta), copy.deepcopy(meta)):
            assert_bitwise(decode(x, again)[0], first)
        assert len(plans) == 1

    def test_that_claims_a_first_call(self, x):
        message = (
            "tile_scheduler_metadata: config of a FlashMLASchedMeta that have_initialized must be that of its first"
        )
        with refused(AssertionError, message):
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
        assert_bitwise(decode(x, meta)[0], expected(x)[0])

    @pytest.mark.parametrize("name", ["topk_length", "extra_topk_length"])
    @pytest.mark.parametrize("first", ["with", "without"])
    def test_lengths_that_come_or_go_are_planned_for(self, plans, name, first):
        """Not part of the config, so no error; not covered by the plan, so no reuse. The object keeps its plan."""
        x = make_inputs(MODEL1)  # whose lists have no garbage behind the lengths: calls without them are legal
        x = dataclasses.replace(x, indices=x.indices.clamp(max=x.kv_cache.shape[0] * 16 - 1))
        x = dataclasses.replace(x, extra_indices=x.extra_indices.clamp(max=x.extra_kv_cache.shape[0] * 61 - 1))
        calls = [{}, {name: None}][:: 1 if first == "with" else -1]
        wanted = [expected(x, **change)[0] for change in calls]
        assert not torch.equal(*wanted)
        meta, _ = get_mla_metadata()
        assert_bitwise(decode(x, meta, **calls[0])[0], wanted[0])
        kept = meta.tile_scheduler_metadata
        assert_bitwise(decode(x, meta, **calls[1])[0], wanted[1])
        assert len(plans) == 2
        assert meta.tile_scheduler_metadata is kept is plans[0].metadata
        assert_bitwise(decode(x, meta, **calls[0])[0], wanted[0])
        assert len(plans) == 2

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
        plan = mla_cute.plan_decode(x.q[:, :, :1].expand(-1, -1, 128, -1), x.indices)
        assert_bitwise(metadata, plan.metadata)
        assert_bitwise(num_splits, plan.num_splits)
        positional = get_mla_metadata(torch.zeros(3, dtype=I32), 10, 1, 5, True, 133)
        assert_bitwise(positional[0], metadata)
        assert_bitwise(positional[1], num_splits)

    @pytest.mark.parametrize("s_q", [1, 2, 3, 66, 67, 5000])
    @pytest.mark.parametrize("h_q", [1, 16, 64, 128])
    def test_rows_are_those_of_2025(self, h_q, s_q):
        """Clients allocate buffers by FlashMLA's formula for Hopper, s_q 1, and copy what they get into a slice."""
        got, splits = get_mla_metadata(torch.zeros(1, dtype=I32), s_q * h_q, 1, h_q, True, 2048)
        rows = max(132 // 2 // 1 // (-(-h_q // 128) * s_q), 1)  # 132 SMs: what plans on the CPU are for
        assert got.shape == (rows, 8)
        buffer, splits_buffer = torch.zeros(66, 8, dtype=I32), torch.zeros(2, dtype=I32)
        buffer[: got.size(0)].copy_(got)
        splits_buffer.copy_(splits)

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
        for pair in ((buffer, splits), (torch.zeros_like(buffer), splits.fill_(0)), (buffer[:1], splits[:4])):
            assert_bitwise(decode(x, *pair)[0], expected(x)[0])
        assert seen == plans  # the call's own plan, never what stands in the buffers
        assert len(plans) == 3

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
                (metadata[:0], num_splits),
                ValueError,
                "tile_scheduler_metadata: must be int32 [P, 8], got torch.int32 [0, 8]",
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
                "extra_indices_in_kvcache: must be given with extra_k_cache, got None",
            ),
            (
                {"extra_indices_in_kvcache": torch.zeros([])},
                ValueError,
                "extra_indices_in_kvcache: must have 3 dims, got shape []",
            ),
            (
                {"extra_indices_in_kvcache": torch.zeros(3, 2, 7, dtype=I32)},
                ValueError,
                "extra_k_cache: must be given with extra_indices_in_kvcache, got None",
            ),
            (
                {"extra_topk_length": torch.zeros(3, dtype=I32)},
                ValueError,
                "extra_k_cache: must be given with extra_topk_length, got None",
            ),
            (
                {"q": torch.zeros(3, 5, 576).bfloat16()},
                ValueError,
                "q: must have 4 dims [b, s_q, h_q, d_qk], got shape [3, 5, 576]",
            ),
            ({"q": [1]}, TypeError, "q: must be a torch.Tensor, got list"),
            ({"is_fp8_kvcache": "no"}, TypeError, "is_fp8_kvcache: must be a bool, got 'no'"),
            ({"causal": 0}, TypeError, "causal: must be a bool, got 0"),
            ({"q": torch.zeros(3, 2, 5, 576).to_sparse()}, TypeError, "q: must be a dense (strided) tensor, got"),
            ({"k_cache": torch.zeros(3, 656)}, ValueError, "k_cache: must have 4 dims, got shape [3, 656]"),
            ({"q": torch.zeros(3, 576)}, ValueError, "q: must have 4 dims, got shape [3, 576]"),
            ({"indices": torch.zeros(3, 133, dtype=I32)}, ValueError, "indices: must have 3 dims [b, s_q, topk], got"),
            ({"attn_sink": torch.zeros(4)}, ValueError, "attn_sink: shape must be [h_q] = [5], got [4]"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_message(self, x, pair, changes, error, message):
        with refused(error, message) as caught:
            decode(x, *pair, **changes)
        assert isinstance(caught.value, (AssertionError, RuntimeError))

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

    @pytest.mark.parametrize("name", ["", "qkvpacked_", "kvpacked_"])
    def test_dense_mha(self, name):
        name = f"flash_attn_varlen_{name}func"
        with refused(NotImplementedError, f"{name}: this version has no dense MHA, only sparse decode"):
            getattr(flash_mla, name)(torch.zeros(1), causal=True)


def test_exports_and_signatures():
    """The six names of FlashMLA; arguments in its order, with its defaults; vLLM's `out` behind them, SGLang's by keyword."""
    assert {*flash_mla.__all__} == {
        "FlashMLASchedMeta",
        *("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd", "flash_attn_varlen_func"),
        *("flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"),
    }

    def of(function):
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters if p.name != "kv_format")
        return {p.name: p.default for p in parameters}

    needed = inspect.Parameter.empty
    wanted = dict.fromkeys(
        ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"), needed
    )
    wanted |= {"num_splits": None, "softmax_scale": None, "causal": False, "is_fp8_kvcache": False}
    wanted |= dict.fromkeys(("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length"))
    wanted |= dict.fromkeys(("extra_topk_length", "out", "kv_format"))
    assert [*of(flash_mla_with_kvcache).items()] == [*wanted.items()]
    wanted = dict.fromkeys(("q", "kv", "indices", "sm_scale"), needed)
    wanted |= {"d_v": 512, "attn_sink": None, "topk_length": None}
    assert [*of(flash_mla_sparse_fwd).items()] == [*wanted.items()]
    assert [(f.name, f.default) for f in dataclasses.fields(FlashMLASchedMeta)] == [
        ("have_initialized", False),
        ("config", None),
        ("tile_scheduler_metadata", None),
        ("num_splits", None),
    ]
    names = "b s_q h_q page_block_size h_k causal is_fp8_kvcache topk extra_page_block_size extra_topk"
    assert [(f.name, f.default) for f in dataclasses.fields(FlashMLASchedMeta.Config)] == [
        (name, dataclasses.MISSING) for name in names.split()
    ]
    with pytest.raises(TypeError, match="'descale_q'"):  # of vLLM's extension for dense FP8
        flash_mla_with_kvcache(None, None, None, None, 512, None, descale_q=None)


class TestEachParameter:
    """What FlashMLA accepts of a parameter for sparse decode and what it refuses, one by one."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"q": lambda t: t[:, :, :1].expand(t.shape)},
            {"q": lambda t: torch.zeros(3, 3, 7, 640, dtype=t.dtype)[:, :2, 1:6, :576].copy_(t)},
            {"k_cache": lambda t: torch.cat([t, t[:, :1]], 1)[:, :-1]},  # pages apart
            {"k_cache": lambda t: t.view(torch.int8)},
            {"k_cache": lambda t: t.view(torch.float8_e4m3fn)},
            {"indices": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]]},
            {"indices": lambda t: t[:, :, :1]},
            {"attn_sink": None},
            {"attn_sink": lambda t: torch.full_like(t, float("inf"))},
            {"topk_length": None, "indices": lambda t: t.clamp(max=40)},
            {"topk_length": lambda t: t * 0},
            {"softmax_scale": None},
            {"block_table": torch.full((3, 4), 2147480000, dtype=I32), "cache_seqlens": torch.full((7,), 0.5)},
            {"block_table": "no tensor", "cache_seqlens": [object()]},
            {"kv_format": "V32"},
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_accepted(self, x, changes):
        mine = {
            name: make(getattr(x, "kv_cache" if name == "k_cache" else name)) if callable(make) else make
            for name, make in changes.items()
        }
        wide = {"q": x.q, "k_cache": x.kv_cache, "indices": x.indices, "attn_sink": x.attn_sink, "kv_format": None}
        wide |= {
            "topk_length": x.topk_length,
            "block_table": None,
            "cache_seqlens": None,
            "softmax_scale": x.softmax_scale,
        }
        wide |= mine
        tables = wide.pop("block_table"), wide.pop("cache_seqlens")
        arguments = wide.pop("q"), wide.pop("k_cache"), *tables, 512, get_mla_metadata()[0]
        out, lse = flash_mla_with_kvcache(*arguments, is_fp8_kvcache=True, **wide)
        del wide["kv_format"]
        indices = wide.pop("indices")
        ref_out, ref_lse = mla_cute.sparse_decode(arguments[0], arguments[1], indices, **wide)
        assert_bitwise(out, ref_out)
        assert_bitwise(lse.mT.contiguous(), ref_lse)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            # AssertionError, from FlashMLA's Python code
            (
                {"tile_scheduler_metadata": None},
                AssertionError,
                "tile_scheduler_metadata: must be what get_mla_metadata",
            ),
            ({"num_splits": 0}, AssertionError, "num_splits: must be None beside a FlashMLASchedMeta, got a value"),
            (
                {"causal": True},
                AssertionError,
                "causal: must be False when indices is given (sparse attention), got True",
            ),
            ({"is_fp8_kvcache": False}, AssertionError, "is_fp8_kvcache: must be True when indices is given"),
            # RuntimeError, from its native code
            ({"q": lambda t: t.float()}, TypeError, "q: dtype must be bfloat16, got torch.float32"),
            ({"q": lambda t: t.half()}, TypeError, "q: dtype must be bfloat16, got torch.float16"),
            ({"q": lambda t: t[0]}, ValueError, "q: must have 4 dims [b, s_q, h_q, d_qk], got shape [2, 5, 576]"),
            (
                {"q": lambda t: t.mT.contiguous().mT},
                ValueError,
                "q: last dim must be contiguous (stride 1), got stride 5",
            ),
            (
                {"q": lambda t: t[..., :512]},
                ValueError,
                "q: last dim d_qk must be 576 (V32: 512 latent + 64 RoPE values)",
            ),
            ({"q": lambda t: t[:, :0]}, ValueError, "q: s_q (dim 1) must be at least 1, got 0"),
            ({"q": lambda t: t[:, :, :0]}, ValueError, "q: h_q (dim 2) must be 1 to 128, got 0"),
            ({"q": lambda t: t.repeat(1, 1, 26, 1)}, ValueError, "q: h_q (dim 2) must be 1 to 128, got 130"),
            ({"k_cache": lambda t: t.short()}, TypeError, "k_cache: dtype must be uint8 or int8 or float8_e4m3fn, got"),
            (
                {"k_cache": lambda t: t[:, :, 0]},
                ValueError,
                "k_cache: must have 4 dims [num_blocks, page_block_size, 1,",
            ),
            (
                {"k_cache": lambda t: t[..., :600]},
                ValueError,
                "k_cache: last dim must be the bytes of a token, 656 (V32",
            ),
            (
                {"k_cache": lambda t: t.repeat(1, 1, 2, 1)},
                ValueError,
                "k_cache: h_kv (dim 2) must be 1, MLA has one KV",
            ),
            ({"k_cache": lambda t: t[:, ::2]}, ValueError, "k_cache: token stride (dim 1) must be 656 bytes, got 1312"),
            (
                {"k_cache": lambda t: torch.cat([t, t], 3)[..., ::2]},
                ValueError,
                "k_cache: last dim must be contiguous (stride 1)",
            ),
            (
                {"k_cache": lambda t: t[:0]},
                ValueError,
                "k_cache: num_blocks (dim 0) must be at least 1 for a non-empty",
            ),
            ({"k_cache": lambda t: t.to("meta")}, ValueError, "k_cache: must be on the device of q (cpu), got meta"),
            ({"head_dim_v": 576}, ValueError, "head_dim_v: must be 512, got 576"),
            ({"indices": lambda t: t.long()}, TypeError, "indices: dtype must be int32, got torch.int64"),
            (
                {"indices": lambda t: t[:, 0]},
                ValueError,
                "indices: must have 3 dims [b, s_q, topk], got shape [3, 133]",
            ),
            (
                {"indices": lambda t: t[:2]},
                ValueError,
                "indices: shape must be [b, s_q, topk] with b 3, s_q 2 of q, got",
            ),
            ({"indices": lambda t: t[:, :, :0]}, ValueError, "indices: topk (dim 2) must be at least 1, got 0"),
            ({"indices": lambda t: t[:, :, ::2]}, ValueError, "indices: last dim must be contiguous (stride 1), got"),
            ({"indices": None}, NotImplementedError, "indices: needed, got None; this version has sparse decode only"),
            ({"attn_sink": lambda t: t.bfloat16()}, TypeError, "attn_sink: dtype must be float32, got torch.bfloat16"),
            ({"attn_sink": lambda t: t[:4]}, ValueError, "attn_sink: shape must be [h_q] = [5], got [4]"),
            (
                {"attn_sink": lambda t: t.repeat(2)[::2]},
                ValueError,
                "attn_sink: must be contiguous (stride 1), got stride 2",
            ),
            ({"topk_length": lambda t: t.long()}, TypeError, "topk_length: dtype must be int32, got torch.int64"),
            ({"topk_length": lambda t: t[:2]}, ValueError, "topk_length: shape must be [b] = [3], got [2]"),
            (
                {"topk_length": lambda t: t.repeat(2)[::2]},
                ValueError,
                "topk_length: must be contiguous (stride 1), got",
            ),
            (
                {"extra_k_cache": lambda t: t[:, :, 0]},
                ValueError,
                "extra_k_cache: must have 4 dims [num_blocks, page_bl",
            ),
            (
                {"extra_k_cache": lambda t: t[..., :576]},
                ValueError,
                "extra_k_cache: last dim must be the bytes of a token",
            ),
            (
                {"extra_k_cache": None},
                ValueError,
                "extra_k_cache: must be given with extra_indices_in_kvcache, got None",
            ),
            (
                {"extra_k_cache": lambda t: torch.zeros(2, 8, 1, 584, dtype=torch.uint8)},
                ValueError,
                "extra_k_cache: last dim must be 656 as k_cache's (V32), got 584 (MODEL1)",
            ),
            (
                {"extra_indices_in_kvcache": None, "extra_topk_length": None},
                ValueError,
                "extra_indices_in_kvcache: must be given with extra_k_cache, got None",
            ),
            (
                {"extra_indices_in_kvcache": lambda t: t[:, :1]},
                ValueError,
                "extra_indices_in_kvcache: shape must be [b, s_q, extra_topk] with b 3, s_q 2 of q, got [3, 1, 70]",
            ),
            ({"extra_topk_length": lambda t: t[:1]}, ValueError, "extra_topk_length: shape must be [b] = [3], got [1]"),
            (
                {"extra_k_cache": None, "extra_indices_in_kvcache": None},
                ValueError,
                "extra_k_cache: must be given with extra_topk_length, got None",
            ),
            (
                {"out": torch.zeros(3, 5, 2, 512).bfloat16()},
                ValueError,
                "out: shape must be [b, s_q, h_q, d_v] = [3, 2, 5",
            ),
            ({"out": torch.zeros(3, 2, 5, 512)}, TypeError, "out: dtype must be bfloat16, got torch.float32"),
            ({"softmax_scale": "1"}, TypeError, "softmax_scale: must be a Python float, got str"),
            ({"kv_format": "V4"}, ValueError, "k_cache: last dim must be 584, the bytes of a token in V4, got 656"),
            ({"kv_format": "V41"}, NotImplementedError, "kv_format: must be V32 or V4 in this version, got 'V41'"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_refused(self, changes, error, message):
        x = make_inputs(dataclasses.replace(MODEL1, kv_format="v32"))
        good = {"q": x.q, "k_cache": x.kv_cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512}
        good |= {"tile_scheduler_metadata": get_mla_metadata()[0], "is_fp8_kvcache": True, "indices": x.indices}
        good |= {"attn_sink": x.attn_sink, "extra_k_cache": x.extra_kv_cache, "topk_length": x.topk_length}
        good |= {"extra_indices_in_kvcache": x.extra_indices, "extra_topk_length": x.extra_topk_length}
        bad = {name: make(good[name]) if callable(make) else make for name, make in changes.items()}
        with refused(error, message) as caught:
            flash_mla_with_kvcache(**(good | bad))
        assert isinstance(caught.value, AssertionError if error is AssertionError else RuntimeError)

    def test_model1_by_sglangs_name(self):
        x = make_inputs(MODEL1)
        assert_bitwise(decode(x, get_mla_metadata()[0], kv_format="V4")[0], expected(x)[0])
        with refused(RuntimeError, "k_cache: last dim must be 656, the bytes of a token in V32, got 584"):
            decode(x, get_mla_metadata()[0], kv_format="V32")


class TestOutputs:
    @pytest.mark.parametrize(("b", "s_q", "h_q"), [(1, 1, 1), (1, 1, 128), (2, 1, 5), (3, 4, 1), (2, 3, 64), (0, 2, 7)])
    def test_strides(self, b, s_q, h_q):
        q = torch.zeros(b, s_q, h_q, 576, dtype=torch.bfloat16)
        indices = torch.full((b, s_q, 3), -1, dtype=I32)
        cache = torch.zeros(1, 2, 1, 656, dtype=torch.uint8)
        meta = get_mla_metadata()[0]
        out, lse = flash_mla_with_kvcache(q, cache, None, None, 512, meta, is_fp8_kvcache=True, indices=indices)
        assert (out.shape, out.dtype, out.stride()) == (
            (b, s_q, h_q, 512),
            torch.bfloat16,
            (s_q * h_q * 512, h_q * 512, 512, 1),
        )
        assert (lse.shape, lse.dtype, lse.stride()) == ((b, h_q, s_q), torch.float32, (s_q * h_q, 1, h_q))
        assert (out == 0).all() and (lse == float("inf")).all()
