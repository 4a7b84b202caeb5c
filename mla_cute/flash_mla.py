"""Drop-in for the `flash_mla` package: its names and signatures, 2025 and 2026, over `mla_cute.sparse_decode`.

    from mla_cute.flash_mla import flash_mla_with_kvcache, get_mla_metadata

This version has sparse decode on the FP8 caches V32 and MODEL1. Unlike FlashMLA it takes any number of heads from 1 to
128, any topk, an empty batch, CPU tensors, and topk_length and extra keys for both formats. Dense decode, sparse prefill
and dense MHA raise NotImplementedError.

Errors are of FlashMLA's types: AssertionError where its Python code asserts, RuntimeError where its native code checks.
The latter are ValueError or TypeError, too, as everywhere in mla_cute; messages name the arguments of this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from .interface import sparse_decode
from .schedule import DecodePlan, plan_decode
from .target import is_traced
from .validate import D_QK, D_V, INT32_MAX, MAX_HEADS, MAX_S_Q, check_dense, check_sparse_decode

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

NOT_CAUSAL = "causal: must be False when indices is given (sparse attention), got True"
KV_FORMATS = {"V32": 656, "V4": 584}  # SGLang's names of the formats that are here: bytes a token


class NativeValueError(ValueError, RuntimeError):
    """A check that FlashMLA makes in native code, where every failure is a RuntimeError."""


class NativeTypeError(TypeError, RuntimeError):
    """The same, of a type or dtype."""


@dataclass
class FlashMLASchedMeta:
    """The plan of one decode step: made by the first `flash_mla_with_kvcache` that gets it, used by the later ones.

    Reuse it (one step's layers) as long as shapes, flags and the values of topk_length and extra_topk_length stay the
    same; the values are not compared. A call that has lengths where the first had none, or none where it had some, is
    planned for itself (one small launch); the object keeps its plan. Setting `tile_scheduler_metadata` to None makes the
    next call plan again.
    """

    @dataclass
    class Config:
        """What the first call looked like; later calls must be equal."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None  # [P, 8] int32
    num_splits: torch.Tensor | None = None  # [b + 1] int32

    _plan = None  # the DecodePlan whose tensors these two are; no field, the fields are FlashMLA's

    def _kept_plan(self) -> DecodePlan | None:
        if self.tile_scheduler_metadata is None:
            return None
        plan = self._plan
        if plan is None or self.tile_scheduler_metadata is not plan.metadata or self.num_splits is not plan.num_splits:
            raise ValueError(
                "tile_scheduler_metadata: the tensors of a FlashMLASchedMeta must be those that its first call made, "
                "got others; set tile_scheduler_metadata to None to plan again"
            )
        return plan

    def _keep(self, plan: DecodePlan) -> None:
        self.tile_scheduler_metadata, self.num_splits, self._plan = plan.metadata, plan.num_splits, plan


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *ignored: object,
    **ignored_too: object,
) -> tuple[FlashMLASchedMeta, None] | tuple[torch.Tensor, torch.Tensor]:
    """What `flash_mla_with_kvcache` takes as tile_scheduler_metadata and num_splits.

    Called without arguments, or for dense attention (topk None): an empty `FlashMLASchedMeta` and None, the form of
    2026, which ignores whatever arguments it gets. The first `flash_mla_with_kvcache` fills it.

    Called for sparse attention as in 2025, with cache_seqlens [b] int32 (only its size and device matter),
    num_q_tokens_per_head_k = s_q * h_q / h_k, num_heads_k = 1, num_heads_q, is_fp8_kvcache=True and topk: a plan as two
    int32 tensors, metadata [P, 8] and num_splits [b + 1], with P = max(SMs / 2 / s_q, 1) for any number of heads, as
    FlashMLA had it on Hopper: clients size buffers by that, and copy the tensors into them.

    Raises TypeError or ValueError (RuntimeErrors both), naming the argument, for sparse arguments that describe no call.
    """
    if topk is None:
        return FlashMLASchedMeta(), None
    try:
        return _plan_tensors(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk)
    except (ValueError, TypeError) as e:
        raise _native(e) from None


def _plan_tensors(
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(cache_seqlens, torch.Tensor) or cache_seqlens.dim() != 1:
        _no("cache_seqlens", "must be a tensor [b]", getattr(cache_seqlens, "shape", cache_seqlens), TypeError)
    _is_bool("is_fp8_kvcache", is_fp8_kvcache)
    _assert(is_fp8_kvcache, "is_fp8_kvcache: must be True for sparse attention (topk given), got False")
    for name, value, most in (
        ("num_q_tokens_per_head_k", num_q_tokens_per_head_k, MAX_S_Q * MAX_HEADS),
        ("num_heads_k", num_heads_k, 1),
        ("num_heads_q", num_heads_q, MAX_HEADS),
        ("topk", topk, INT32_MAX),
    ):
        if type(value) is not int:
            _no(name, "must be an int for sparse attention (topk given)", value, TypeError)
        if not 1 <= value <= most:
            _no(name, f"must be 1{f' to {most}' * (most > 1)} for sparse attention (topk given)", value)
    if num_q_tokens_per_head_k % num_heads_q:
        _no("num_q_tokens_per_head_k", f"must be s_q * num_heads_q ({num_heads_q})", num_q_tokens_per_head_k)
    b, s_q = cache_seqlens.shape[0], num_q_tokens_per_head_k // num_heads_q
    if s_q > MAX_S_Q:
        needed = f"must be at most {MAX_S_Q} * num_heads_q ({num_heads_q})"
        _no("num_q_tokens_per_head_k", needed, num_q_tokens_per_head_k)
    # The plan depends on shapes alone here: tensors of those shapes over one element's worth of memory. That of 128 heads
    # has FlashMLA's number of rows; ours for 64 and fewer has twice as many and would not fit into clients' buffers.
    q = torch.empty((1, 1, 1, D_QK), dtype=torch.bfloat16, device=cache_seqlens.device)
    indices = torch.empty((1, 1, topk), dtype=torch.int32, device=cache_seqlens.device).expand(b, s_q, topk)
    plan = plan_decode(q.expand(b, s_q, MAX_HEADS, D_QK), indices)
    return plan.metadata, plan.num_splits


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    kv_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with a paged cache; sparse (indices given) on a V32 or MODEL1 FP8 cache.

    Args:
        q [b, s_q, h_q, 576 or 512] bf16, k_cache [num_blocks, page_block_size, 1, 656 or 584], indices [b, s_q, topk]
            int32, topk_length [b] int32, attn_sink [h_q] fp32, softmax_scale (default d_qk ** -0.5), out [b, s_q, h_q,
            512], extra_k_cache, extra_indices_in_kvcache [b, s_q, extra_topk] int32, extra_topk_length [b] int32: as in
            `mla_cute.sparse_decode`. The cache's last dim says which format it is.
        block_table, cache_seqlens: of dense attention; ignored, whatever they are.
        head_dim_v: 512. causal: False. is_fp8_kvcache: True.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returned. A `FlashMLASchedMeta` (num_splits None)
            is planned once and reused. A pair of tensors, [P, 8] and [b + 1] or larger, may be a copy in buffers of the
            client's: nothing ties contents to this call, so they are not read and each call plans anew (one small launch).
        out, kv_format: as in the forks of vLLM and SGLang: where to write; "V32" or "V4" (MODEL1) to have k_cache checked.

    Returns: out [b, s_q, h_q, 512] bf16, contiguous unless `out` was passed, and lse [b, h_q, s_q] fp32, natural log, +inf
        where nothing is attended: a view with strides (s_q * h_q, 1, h_q).

    Raises AssertionError where FlashMLA does: a call that differs from the first one of the same FlashMLASchedMeta, or
    causal or not is_fp8_kvcache with indices. NotImplementedError for dense attention. Otherwise `NativeValueError` or
    `NativeTypeError`, which are RuntimeErrors as in FlashMLA.
    """
    try:
        # What FlashMLA's Python code does, in its order.
        config = _config(q, k_cache, causal, is_fp8_kvcache, indices, extra_k_cache, extra_indices_in_kvcache)
        meta = None
        if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
            meta = tile_scheduler_metadata
            _assert(num_splits is None, "num_splits: must be None beside a FlashMLASchedMeta, got a value")
            if meta.have_initialized:
                _assert_same(config, meta.config)
            else:
                _assert(indices is None or not causal, NOT_CAUSAL)  # binds nothing; whatever else fails does
                meta.have_initialized, meta.config = True, config
        else:
            _is_plan_like(tile_scheduler_metadata, num_splits, q)
        if indices is None:
            needed = "needed, got None; this version has sparse decode only, not dense attention"
            raise NotImplementedError(f"indices: {needed}")
        _assert(not causal, NOT_CAUSAL)
        _assert(is_fp8_kvcache, "is_fp8_kvcache: must be True when indices is given (sparse attention), got False")

        # What its native code does.
        if head_dim_v != D_V:
            _no("head_dim_v", f"must be {D_V}", head_dim_v)
        if kv_format is not None:
            _is_kv_format(kv_format, k_cache)
        lengths = {"topk_length": topk_length, "extra_topk_length": extra_topk_length}
        options = {"softmax_scale": softmax_scale, "attn_sink": attn_sink, "extra_kv_cache": extra_k_cache, "out": out}
        options |= {"extra_indices": extra_indices_in_kvcache} | lengths
        if q.shape[0] == 0:
            out, lse = sparse_decode(q, k_cache, indices, **options)
            return out, lse.transpose(1, 2)
        plan = kept = None if meta is None else meta._kept_plan()
        if kept is None or (kept.has_topk_length, kept.has_extra_topk_length) != (
            topk_length is not None,
            extra_topk_length is not None,
        ):
            if not (is_dynamo_compiling() or is_traced(q)):  # for a graph, whose ops check their own arguments
                check_sparse_decode(q, k_cache, indices, **options)  # before the planner is launched
            plan = plan_decode(q, indices, extra_indices=extra_indices_in_kvcache, **lengths)
        out, lse = sparse_decode(q, k_cache, indices, plan=plan, **options)
        if meta is not None and kept is None:
            meta._keep(plan)
        return out, lse.transpose(1, 2)
    except (ValueError, TypeError) as e:
        raise _native(e) from None


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill: not in this version, always raises NotImplementedError."""
    raise NotImplementedError("flash_mla_sparse_fwd: this version has no sparse prefill, only sparse decode")


def flash_attn_varlen_func(*args: object, **kwargs: object) -> NoReturn:
    """Dense MHA (in FlashMLA for Blackwell): not in this version, always raises NotImplementedError."""
    raise NotImplementedError("flash_attn_varlen_func: this version has no dense MHA, only sparse decode")


def flash_attn_varlen_qkvpacked_func(*args: object, **kwargs: object) -> NoReturn:
    """As `flash_attn_varlen_func`."""
    raise NotImplementedError("flash_attn_varlen_qkvpacked_func: this version has no dense MHA, only sparse decode")


def flash_attn_varlen_kvpacked_func(*args: object, **kwargs: object) -> NoReturn:
    """As `flash_attn_varlen_func`."""
    raise NotImplementedError("flash_attn_varlen_kvpacked_func: this version has no dense MHA, only sparse decode")


# ----- the checks -----------------------------------------------------------------------------------------------------

_OURS = {"kv_cache": "k_cache", "extra_kv_cache": "extra_k_cache", "extra_indices": "extra_indices_in_kvcache"}
_OURS["plan"] = "tile_scheduler_metadata"


def _native(e: ValueError | TypeError) -> RuntimeError:
    """The error as a RuntimeError, with the names that arguments have here."""
    text = re.sub(r"^plan(?=:)|\b(extra_)?kv_cache\b|\bextra_indices\b", lambda found: _OURS[found[0]], str(e))
    error = NativeTypeError(text) if isinstance(e, TypeError) else NativeValueError(text)
    return error.with_traceback(e.__traceback__)


def _is_plan_like(metadata, num_splits, q: torch.Tensor) -> None:
    """The form of 2025: tensors that could hold a plan for q, in buffers of any size."""
    b = q.shape[0]
    _assert(
        isinstance(metadata, torch.Tensor),
        "tile_scheduler_metadata: must be what get_mla_metadata returned (a FlashMLASchedMeta, or a tensor "
        f"with num_splits beside it), got {type(metadata).__name__}",
    )
    if metadata.dtype != torch.int32 or metadata.dim() != 2 or metadata.shape[0] < 1 or metadata.shape[1] != 8:
        _no("tile_scheduler_metadata", "must be int32 [P, 8]", f"{metadata.dtype} {list(metadata.shape)}")
    if not isinstance(num_splits, torch.Tensor):
        _no(
            "num_splits",
            "must be the tensor that belongs to tile_scheduler_metadata",
            type(num_splits).__name__,
            TypeError,
        )
    if num_splits.dtype != torch.int32 or num_splits.dim() != 1 or num_splits.shape[0] < b + 1:
        _no(
            "num_splits", f"must be int32 [b + 1] = [{b + 1}] or larger", f"{num_splits.dtype} {list(num_splits.shape)}"
        )
    for name, t in (("tile_scheduler_metadata", metadata), ("num_splits", num_splits)):
        if t.device != q.device:
            _no(name, f"must be on the device of q ({q.device})", t.device)


def _assert_same(config: FlashMLASchedMeta.Config, recorded: FlashMLASchedMeta.Config) -> None:
    if config == recorded:
        return
    _assert(
        isinstance(recorded, FlashMLASchedMeta.Config),
        "tile_scheduler_metadata: config of a FlashMLASchedMeta that have_initialized must be that of its first call, "
        f"got {recorded}",
    )
    for f in fields(FlashMLASchedMeta.Config):
        got, needed = getattr(config, f.name), getattr(recorded, f.name)
        _assert(
            got == needed, f"{f.name}: must be {needed} as in the first call with this FlashMLASchedMeta, got {got}"
        )


def _config(q, k_cache, causal, is_fp8_kvcache, indices, extra_k_cache, extra_indices) -> FlashMLASchedMeta.Config:
    """Of tensors with dims enough for it; whether they have too many or too few is a check of the native part."""
    for name, t, least, dims in (
        ("q", q, 3, 4),
        ("k_cache", k_cache, 3, 4),
        ("indices", indices, 1, 3),
        ("extra_k_cache", extra_k_cache, 2, 4),
        ("extra_indices_in_kvcache", extra_indices, 1, 3),
    ):
        if t is None and name not in ("q", "k_cache"):
            continue
        check_dense(name, t)
        if t.dim() < least:
            _no(name, f"must have {dims} dims", f"shape {list(t.shape)}")
    _is_bool("causal", causal)
    _is_bool("is_fp8_kvcache", is_fp8_kvcache)
    return FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=None if indices is None else indices.shape[-1],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices is None else extra_indices.shape[-1],
    )


def _is_kv_format(kv_format: str, k_cache: torch.Tensor) -> None:
    if not isinstance(kv_format, str) or kv_format not in KV_FORMATS:
        raise NotImplementedError(f"kv_format: must be {' or '.join(KV_FORMATS)} in this version, got {kv_format!r}")
    if k_cache.shape[-1] != KV_FORMATS[kv_format]:
        needed = f"last dim must be {KV_FORMATS[kv_format]}, the bytes of a token in {kv_format}"
        _no("k_cache", needed, k_cache.shape[-1])


def _is_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _no(name, "must be a bool", repr(value), TypeError)


def _assert(condition: bool, message: str) -> None:
    """FlashMLA's assertions are part of its interface: raised under `python -O` too."""
    if not condition:
        raise AssertionError(message)


def _no(name: str, needed: str, got, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: {needed}, got {got}")
