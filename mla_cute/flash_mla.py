"""Drop-in for the `flash_mla` package: its names and signatures, 2025 and 2026, over `mla_cute.sparse_decode`.

    from mla_cute.flash_mla import flash_mla_with_kvcache, get_mla_metadata

This version has sparse decode on the FP8 caches V32 and MODEL1. Unlike FlashMLA it takes any number of heads from 1 to
128, any topk, and topk_length and extra keys for both. Dense decode and sparse prefill raise NotImplementedError.

Where FlashMLA asserts, this raises AssertionError too; what its native code rejects is ValueError, TypeError or
NotImplementedError here, as everywhere in mla_cute (where k_cache is called kv_cache, extra_k_cache extra_kv_cache and
extra_indices_in_kvcache extra_indices).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from .interface import sparse_decode
from .schedule import DecodePlan, plan_decode
from .target import is_traced
from .validate import D_QK, D_V, INT32_MAX, MAX_HEADS, MAX_S_Q, check_dense, check_sparse_decode

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclass
class FlashMLASchedMeta:
    """The plan of one decode step: made by the first `flash_mla_with_kvcache` that gets it, used by the later ones.

    Reuse it (one step's layers) as long as shapes, flags and the values of topk_length and extra_topk_length stay the
    same; the values are not compared. Setting `tile_scheduler_metadata` to None makes the next call plan again.
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
    _plan: DecodePlan | None = field(default=None, repr=False, compare=False)  # whose tensors these two are

    def _plan_in_use(self) -> DecodePlan | None:
        if self.tile_scheduler_metadata is None:
            return None
        plan = self._plan
        if plan is None or self.tile_scheduler_metadata is not plan.metadata or self.num_splits is not plan.num_splits:
            raise ValueError(
                "tile_scheduler_metadata: the tensors of a FlashMLASchedMeta must be those that its first call made, "
                "got others; set tile_scheduler_metadata to None to plan again"
            )
        return plan


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
    num_q_tokens_per_head_k = s_q * h_q / h_k, num_heads_k = 1, num_heads_q, is_fp8_kvcache=True and topk: the plan as
    two int32 tensors, metadata [P, 8] and num_splits [b + 1].

    Raises TypeError or ValueError, naming the argument, for sparse arguments that describe no call.
    """
    if topk is None:
        return FlashMLASchedMeta(), None
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
    # The plan depends on shapes alone here: tensors of those shapes over one element's worth of memory.
    b, s_q = cache_seqlens.shape[0], num_q_tokens_per_head_k // num_heads_q
    if s_q > MAX_S_Q:
        _no(
            "num_q_tokens_per_head_k",
            f"must be at most {MAX_S_Q} * num_heads_q ({num_heads_q})",
            num_q_tokens_per_head_k,
        )
    q = torch.empty((1, 1, 1, D_QK), dtype=torch.bfloat16, device=cache_seqlens.device).expand(
        b, s_q, num_heads_q, D_QK
    )
    indices = torch.empty((1, 1, topk), dtype=torch.int32, device=cache_seqlens.device).expand(b, s_q, topk)
    plan = plan_decode(q, indices)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with a paged cache; sparse (indices given) on a V32 or MODEL1 FP8 cache.

    Args:
        q [b, s_q, h_q, 576 or 512] bf16, k_cache [num_blocks, page_block_size, 1, 656 or 584], indices [b, s_q, topk]
            int32, topk_length [b] int32, attn_sink [h_q] fp32, softmax_scale (default d_qk ** -0.5), out [b, s_q, h_q,
            512], extra_k_cache, extra_indices_in_kvcache [b, s_q, extra_topk] int32, extra_topk_length [b] int32: as in
            `mla_cute.sparse_decode`. The cache's last dim says which format it is.
        block_table, cache_seqlens: of dense attention; ignored, None is fine.
        head_dim_v: 512. causal: False. is_fp8_kvcache: True.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returned. A `FlashMLASchedMeta` (num_splits None)
            is planned once and reused. A pair of tensors may be a copy in larger buffers; since nothing ties their
            contents to this call, they are checked for kind and size only and each call plans anew (one small launch).

    Returns: out [b, s_q, h_q, 512] bf16, and lse [b, h_q, s_q] fp32, natural log, +inf where nothing is attended: a
        transposed view, not contiguous.

    Raises AssertionError where FlashMLA does: a call that differs from the first one of the same FlashMLASchedMeta, or
    causal or not is_fp8_kvcache with indices. NotImplementedError for dense attention. Otherwise ValueError or
    TypeError.
    """
    _has_dims("q", q, 4)
    _has_dims("k_cache", k_cache, 4)
    for name, t, dims in (
        ("indices", indices, 3),
        ("extra_k_cache", extra_k_cache, 4),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache, 3),
    ):
        if t is not None:
            _has_dims(name, t, dims)
    _is_bool("causal", causal)
    _is_bool("is_fp8_kvcache", is_fp8_kvcache)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        meta = tile_scheduler_metadata
        _assert(num_splits is None, "num_splits: must be None beside a FlashMLASchedMeta, got a value")
        _assert(
            meta.have_initialized or indices is None or not causal,
            "causal: must be False when indices is given (sparse attention), got True",
        )
        config = FlashMLASchedMeta.Config(
            b=q.shape[0],
            s_q=q.shape[1],
            h_q=q.shape[2],
            page_block_size=k_cache.shape[1],
            h_k=k_cache.shape[2],
            causal=causal,
            is_fp8_kvcache=is_fp8_kvcache,
            topk=None if indices is None else indices.shape[-1],
            extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
            extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
        )
        if meta.have_initialized:
            _assert_same(config, meta.config)
        else:  # recorded before anything below can fail, as in FlashMLA: a failed first call still binds the object
            meta.have_initialized, meta.config = True, config
    else:
        meta = None
        _is_plan_like(tile_scheduler_metadata, num_splits, q)

    if indices is None:
        raise NotImplementedError("indices: needed, got None; this version has sparse decode only, not dense attention")
    _assert(not causal, "causal: must be False when indices is given (sparse attention), got True")
    _assert(is_fp8_kvcache, "is_fp8_kvcache: must be True when indices is given (sparse attention), got False")
    if head_dim_v != D_V:
        _no("head_dim_v", f"must be {D_V}", head_dim_v)

    plan_options = {
        "topk_length": topk_length,
        "extra_indices": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    options = {"softmax_scale": softmax_scale, "attn_sink": attn_sink, "extra_kv_cache": extra_k_cache, "out": out}
    options |= plan_options
    if q.shape[0] == 0:
        out, lse = sparse_decode(q, k_cache, indices, **options)
        return out, lse.transpose(1, 2)
    plan = None if meta is None else meta._plan_in_use()
    if plan is None:
        if not (is_dynamo_compiling() or is_traced(q)):  # for a graph, whose ops check their own arguments
            check_sparse_decode(q, k_cache, indices, **options)  # before the planner is launched
        plan = plan_decode(q, indices, **plan_options)
        if meta is None and tile_scheduler_metadata.shape[0] < plan.num_parts:
            _no("tile_scheduler_metadata", f"must have {plan.num_parts} rows or more", tile_scheduler_metadata.shape[0])
    out, lse = sparse_decode(q, k_cache, indices, plan=plan, **options)
    if meta is not None:
        meta.tile_scheduler_metadata, meta.num_splits, meta._plan = plan.metadata, plan.num_splits, plan
    return out, lse.transpose(1, 2)


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


def _is_plan_like(metadata, num_splits, q: torch.Tensor) -> None:
    """The 2025 form: tensors that could hold a plan for q, in buffers of this size or larger."""
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
    if not isinstance(recorded, FlashMLASchedMeta.Config):
        needed = "config of a FlashMLASchedMeta that have_initialized must be that of its first call"
        _no("tile_scheduler_metadata", needed, recorded)
    for f in fields(FlashMLASchedMeta.Config):
        got, needed = getattr(config, f.name), getattr(recorded, f.name)
        _assert(
            got == needed, f"{f.name}: must be {needed} as in the first call with this FlashMLASchedMeta, got {got}"
        )


def _has_dims(name: str, t: torch.Tensor, dims: int) -> None:
    check_dense(name, t)
    if t.dim() != dims:
        _no(name, f"must have {dims} dims", f"shape {list(t.shape)}")


def _is_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _no(name, "must be a bool", repr(value), TypeError)


def _assert(condition: bool, message: str) -> None:
    """FlashMLA's assertions are part of its interface: raised under `python -O` too."""
    if not condition:
        raise AssertionError(message)


def _no(name: str, needed: str, got, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: {needed}, got {got}")
