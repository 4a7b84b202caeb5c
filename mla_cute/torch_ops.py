"""torch.compile, torch.export and make_fx: the public functions as ops of a graph, `torch.ops.mla_cute.*`.

    traced call of sparse_decode, plan_decode, write_kv_cache or quantize_kv_cache ──► its namesake here ──► op in the graph
    graph runs ──► op ──► the public function

An op takes what a graph can hold: of a plan its tensors and ints, of an implementation its name, of a config its text.
Importing this module registers the ops. A traced call does that by itself; a program that only loads an exported graph,
or names the ops, imports it first.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import operator
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import cache_writer, interface, schedule
from . import kv_cache as quantizer
from .kv_cache import FORMATS, V32, check_format
from .schedule import DecodePlan
from .validate import D_V, check_metadata

# Arguments as the public functions have them; plan_shape: the fields of the plan up to has_extra_topk_length.
_PLAN = "Tensor? plan_metadata=None, Tensor? plan_num_splits=None, SymInt[]? plan_shape=None, str? plan_config=None"
_HOW = "str? config=None, str? impl=None, str? backend=None"
_OPTIONS = (
    "float? softmax_scale=None, Tensor? topk_length=None, Tensor? attn_sink=None, Tensor? extra_kv_cache=None, "
    "Tensor? extra_indices=None, Tensor? extra_topk_length=None, "
    f"{_PLAN}, {_HOW}"
)
# scale_values: instead of a rule for the scales
_QUANTIZE = 'str? kv_format=None, str scales="pow2", Tensor? scale_values=None, str? backend=None'
_SCHEMAS = {
    "sparse_decode": f"(Tensor q, Tensor kv_cache, Tensor indices, *, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    # Dynamo refuses a keyword `out` that is not contiguous: here it is passed by position.
    "sparse_decode_out": "(Tensor q, Tensor kv_cache, Tensor indices, Tensor(a!) out, Tensor(b!) lse, *, "
    f"{_OPTIONS}) -> ()",
    "plan_decode": "(Tensor q, Tensor indices, *, Tensor? topk_length=None, Tensor? extra_indices=None, "
    f"Tensor? extra_topk_length=None, {_HOW}) -> (Tensor metadata, Tensor num_splits)",
    "write_kv_cache": "(Tensor(a!) kv_cache, Tensor latent, Tensor rope, Tensor slots, *, str? kv_format=None, "
    'str scales="pow2", str? backend=None) -> ()',
    "quantize_kv_cache": f"(Tensor kv, *, {_QUANTIZE}) -> Tensor",
    "quantize_kv_cache_out": f"(Tensor kv, Tensor(a!) out, *, {_QUANTIZE}) -> ()",
}


# ----- where a public function goes while it is traced ----------------------------------------------------------------


def sparse_decode(q, kv_cache, indices, *, plan, config, impl, backend, out, lse, **options):
    if isinstance(options["softmax_scale"], (bool, torch.Tensor)):  # the op would make a float of it
        raise TypeError(f"softmax_scale: must be a Python float, got {type(options['softmax_scale']).__name__}")
    if plan is not None:
        if not isinstance(plan, DecodePlan):
            raise TypeError(f"plan: must be a mla_cute.DecodePlan, got {type(plan).__name__}")
        options["plan_metadata"], options["plan_num_splits"] = plan.metadata, plan.num_splits
        options["plan_shape"] = [
            plan.num_splits.shape[0] - 1,  # b, as a symbol where the batch is one
            *(plan.s_q, plan.h_q, plan.topk, 1 if plan.has_topk_length else 0),
            *(plan.extra_topk, 1 if plan.has_extra_topk_length else 0),
        ]
        options["plan_config"] = _text_of("plan.config", plan.config)
    options |= {"config": _text_of("config", config), "impl": _name_of(impl), "backend": backend}
    if out is None and lse is None:
        return torch.ops.mla_cute.sparse_decode(q, kv_cache, indices, **options)
    if out is None:
        out = torch.empty((*q.shape[:-1], D_V), dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    torch.ops.mla_cute.sparse_decode_out(q, kv_cache, indices, out, lse, **options)
    return out, lse


def plan_decode(q, indices, *, topk_length, extra_indices, extra_topk_length, config, impl, backend) -> DecodePlan:
    lengths = {"topk_length": topk_length, "extra_indices": extra_indices, "extra_topk_length": extra_topk_length}
    how = {"impl": _name_of(impl), "backend": backend}
    metadata, num_splits = torch.ops.mla_cute.plan_decode(
        q, indices, **lengths, config=_text_of("config", config), **how
    )
    b, s_q, h_q, d_qk = q.shape
    has = topk_length is not None, extra_indices is not None, extra_topk_length is not None
    if config is None:
        config = _default_config(q.device, operator.index(h_q), operator.index(d_qk), *has, **how)
    return DecodePlan(
        *(b, s_q, h_q, indices.shape[2], has[0], 0 if extra_indices is None else extra_indices.shape[2], has[2]),
        *(metadata.shape[0], config, metadata, num_splits),
    )


def write_kv_cache(kv_cache, latent, rope, slots, *, kv_format, scales, backend) -> None:
    name = None if kv_format is None else _name_of_format(kv_format)
    _is_rule(scales, '"pow2" or "amax"')
    torch.ops.mla_cute.write_kv_cache(kv_cache, latent, rope, slots, kv_format=name, scales=scales, backend=backend)


def quantize_kv_cache(kv, *, kv_format, scales, out, backend) -> torch.Tensor:
    options = {"kv_format": _name_of_format(kv_format), "backend": backend}
    if isinstance(scales, torch.Tensor):
        options["scale_values"] = scales
    else:
        _is_rule(scales, '"pow2", "amax" or a fp32 tensor')
        options["scales"] = scales
    if out is None:
        return torch.ops.mla_cute.quantize_kv_cache(kv, **options)
    torch.ops.mla_cute.quantize_kv_cache_out(kv, out, **options)
    return out


@torch.compiler.assume_constant_result
def _default_config(device, h_q, d_qk, has_topk_length, has_extra, has_extra_topk_length, impl, backend) -> Any:
    """plan_decode's for a call like this: an object that the compiled code holds, not one that it makes."""
    problem = schedule.problem_of(h_q, d_qk, has_topk_length, has_extra, has_extra_topk_length)
    return interface.select_impl(device, impl, backend).default_config(problem)


# ----- what a graph can hold ------------------------------------------------------------------------------------------


def _name_of(impl: ModuleType | str | None) -> str | None:
    """The name that `select_impl` finds the implementation by."""
    if impl is None or isinstance(impl, str):
        return impl
    name = impl.__name__
    if sys.modules.get(name) is not impl:
        raise ValueError(f"impl: under torch.compile it must be importable by its name, got {name}, which is not")
    return name


def _name_of_format(kv_format: Any) -> str:
    check_format(kv_format)
    known = FORMATS.get(kv_format.name)
    # One by one: Dynamo may have made symbols of them, which it compares, but not in dataclasses.
    if known is None or any(getattr(known, f) != getattr(kv_format, f) for f in _fields_of(type(known))):
        raise ValueError(f"kv_format: under torch.compile it must be mla_cute.V32 or mla_cute.MODEL1, got {kv_format}")
    return kv_format.name


def _is_rule(scales: Any, needed: str) -> None:
    if not isinstance(scales, str):
        raise TypeError(f"scales: must be {needed}, got {type(scales).__name__}")


def _text_of(name: str, config: Any) -> str | None:
    """The class of a config and its fields as a dict: "mla_cute.reference.Config{'tile_n': 64, ...}".

    Dynamo traces this: it must be plain code on the fields, whose values then guard the graph.
    """
    if config is None:
        return None
    kind = type(config)
    names = _fields_of(kind)
    if names is None:
        raise TypeError(f"{name}: under torch.compile it must be a dataclass, got {kind.__name__}")
    fields = ", ".join([f"{field!r}: {_literal(name, field, getattr(config, field))!r}" for field in names])
    return f"{kind.__module__}.{kind.__qualname__}{{{fields}}}"


@torch.compiler.assume_constant_result
def _fields_of(kind: type) -> tuple[str, ...] | None:
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def _literal(name: str, field: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return operator.index(value)  # a constant also where torch.compile would make a symbol of it
    if isinstance(value, tuple):
        return tuple([_literal(name, field, v) for v in value])
    raise TypeError(
        f"{name}.{field}: under torch.compile it must be an int, a bool, a str, None or a tuple of them, "
        f"got {type(value).__name__}"
    )


@functools.lru_cache(64)
def _config_of(name: str, text: str, kind: type) -> Any:
    """The config that `_text_of` wrote down, of the class that an implementation takes."""
    written, _, fields = text.partition("{")
    if written != f"{kind.__module__}.{kind.__qualname__}":
        raise TypeError(f"{name}: must be a {kind.__module__}.{kind.__qualname__}, got a {written}")
    try:
        values = ast.literal_eval("{" + fields)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(field, str) for field in values):
        raise ValueError(f"{name}: must be the name of a class and the dict of its fields, got {text!r}")
    try:
        config = kind(**values)
    except TypeError as e:
        raise ValueError(f"{name}: must have the fields of {written} ({e}), got {text!r}") from None
    if _text_of(name, config) != text:
        raise ValueError(f"{name}: under torch.compile it must be equal to one made from its fields, got {text}")
    return config


def flatten(plan: DecodePlan) -> tuple[list[torch.Tensor], tuple]:
    """Tensors, and what their shapes do not say."""
    return [plan.metadata, plan.num_splits], (
        *(plan.s_q, plan.h_q, plan.topk, plan.has_topk_length, plan.extra_topk, plan.has_extra_topk_length),
        _text_of("plan.config", plan.config),
    )


def unflatten(children: Iterable, context: tuple) -> DecodePlan:
    metadata, num_splits = children
    s_q, h_q, topk, has_topk_length, extra_topk, has_extra_topk_length, text = context
    config = _config_named(text)
    whole = isinstance(metadata, torch.Tensor) and isinstance(num_splits, torch.Tensor)
    fields = {
        "b": num_splits.shape[0] - 1 if whole else None,
        "s_q": s_q,
        "h_q": h_q,
        "topk": topk,
        "has_topk_length": has_topk_length,
        "extra_topk": extra_topk,
        "has_extra_topk_length": has_extra_topk_length,
        "num_parts": metadata.shape[0] if whole else None,
        "config": config,
        "metadata": metadata,
        "num_splits": num_splits,
    }
    if whole:
        return DecodePlan(**fields)
    plan = object.__new__(DecodePlan)  # not checked: torch puts other things into the places of the tensors too
    for name, value in fields.items():
        object.__setattr__(plan, name, value)
    return plan


@torch.compiler.assume_constant_result
def _config_named(text: str) -> Any:
    module, _, name = text.partition("{")[0].rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):  # ValueError: no module's name at all
        raise ValueError(f"plan.config: must begin with the name of an importable class, got {text!r}") from None
    return _config_of("plan.config", text, kind)


# ----- the ops --------------------------------------------------------------------------------------------------------


_PLAN_SHAPE = ("b", "s_q", "h_q", "topk", "has_topk_length", "extra_topk", "has_extra_topk_length")


def _check_parts(plan_metadata, plan_num_splits, plan_shape, plan_config) -> None:
    """Raise ValueError unless they are all of a plan, or nothing."""
    parts = {
        "plan_metadata": plan_metadata,
        "plan_num_splits": plan_num_splits,
        "plan_shape": plan_shape,
        "plan_config": plan_config,
    }
    given = [name for name, value in parts.items() if value is not None]
    missing = [name for name, value in parts.items() if value is None]
    if given and missing:
        raise ValueError(f"{missing[0]}: must be given with {' and '.join(given)}, got None")
    if given and len(plan_shape) != len(_PLAN_SHAPE):
        raise ValueError(f"plan_shape: must be [{', '.join(_PLAN_SHAPE)}], got {list(plan_shape)}")
    for name, dims in (("plan_metadata", "[P, 8]"), ("plan_num_splits", "[b + 1]")):
        if given and parts[name].dim() != dims.count(",") + 1:
            raise ValueError(f"{name}: must be int32 {dims}, got shape {list(parts[name].shape)}")


def _sparse_decode(
    q,
    kv_cache,
    indices,
    *,
    plan_metadata=None,
    plan_num_splits=None,
    plan_shape=None,
    plan_config=None,
    config=None,
    impl=None,
    backend=None,
    **options,
):
    plan = None
    _check_parts(plan_metadata, plan_num_splits, plan_shape, plan_config)
    if config is not None or plan_metadata is not None:
        kind = interface.select_impl(q.device, impl, backend).Config
    if plan_metadata is not None:
        b, s_q, h_q, topk, has_topk_length, extra_topk, has_extra_topk_length = plan_shape
        made_with = _config_of("plan.config", plan_config, kind)
        plan = DecodePlan(
            *(b, s_q, h_q, topk, bool(has_topk_length), extra_topk, bool(has_extra_topk_length)),
            *(plan_metadata.shape[0], made_with, plan_metadata, plan_num_splits),
        )
    config = None if config is None else _config_of("config", config, kind)
    how = {"plan": plan, "config": config, "impl": impl, "backend": backend}
    return interface.sparse_decode(q, kv_cache, indices, **options, **how)


def _sparse_decode_out(q, kv_cache, indices, out, lse, **options) -> None:
    _sparse_decode(q, kv_cache, indices, out=out, lse=lse, **options)


def _plan_decode(q, indices, *, config=None, impl=None, backend=None, **lengths):
    if config is not None:
        config = _config_of("config", config, interface.select_impl(q.device, impl, backend).Config)
    plan = schedule.plan_decode(q, indices, **lengths, config=config, impl=impl, backend=backend)
    return plan.metadata, plan.num_splits


def _write_kv_cache(kv_cache, latent, rope, slots, *, kv_format=None, scales="pow2", backend=None) -> None:
    fmt = None if kv_format is None else _format_of(kv_format)
    cache_writer.write_kv_cache(kv_cache, latent, rope, slots, kv_format=fmt, scales=scales, backend=backend)


def _quantize_kv_cache(kv, **options):
    return _quantize(kv, None, **options)


def _quantize_kv_cache_out(kv, out, **options) -> None:
    _quantize(kv, out, **options)


def _quantize(kv, out, *, kv_format=None, scales="pow2", scale_values=None, backend=None):
    fmt, scales = _quantize_options(kv_format, scales, scale_values)
    return quantizer.quantize_kv_cache(kv, kv_format=fmt, scales=scales, out=out, backend=backend)


def _quantize_options(kv_format, scales, scale_values) -> tuple:
    """(KVFormat, scales) as the public function has them."""
    if scale_values is not None and scales != "pow2":
        raise ValueError(f'scale_values: must be None when scales says "{scales}", got a tensor')
    return V32 if kv_format is None else _format_of(kv_format), scales if scale_values is None else scale_values


def _format_of(name: str):
    if name not in FORMATS:
        raise ValueError(f"kv_format: must be {' or '.join(FORMATS)}, got {name}")
    return FORMATS[name]


# What they would do to tensors without memory: the same checks, where they need neither addresses nor an implementation.


def _fake_sparse_decode(q, kv_cache, indices, **options):
    _fake_sparse_decode_out(q, kv_cache, indices, None, None, **options)
    b, s_q, h_q, _ = q.shape
    out = torch.empty((b, s_q, h_q, D_V), dtype=torch.bfloat16, device=q.device)
    return out, torch.empty((b, s_q, h_q), dtype=torch.float32, device=q.device)


def _fake_sparse_decode_out(
    q,
    kv_cache,
    indices,
    out,
    lse,
    *,
    softmax_scale=None,
    topk_length=None,
    attn_sink=None,
    extra_kv_cache=None,
    extra_indices=None,
    extra_topk_length=None,
    plan_metadata=None,
    plan_num_splits=None,
    plan_shape=None,
    plan_config=None,
    **_,
) -> None:
    _check_parts(plan_metadata, plan_num_splits, plan_shape, plan_config)
    extra = extra_kv_cache, extra_indices, extra_topk_length
    # A symbol in its place is looked at when it has a value.
    scale = softmax_scale if isinstance(softmax_scale, (int, float)) else None
    check_metadata(q, kv_cache, indices, scale, topk_length, attn_sink, extra, out, lse)
    if plan_shape is not None:
        call = {
            **{"b": q.shape[0], "s_q": q.shape[1], "h_q": q.shape[2], "topk": indices.shape[2]},
            "has_topk_length": topk_length is not None,
            "extra_topk": 0 if extra_indices is None else extra_indices.shape[2],
            "has_extra_topk_length": extra_topk_length is not None,
        }
        for (name, value), made_for in zip(call.items(), plan_shape):
            made_for = bool(made_for) if isinstance(value, bool) else made_for
            if statically_known_true(value != made_for):  # what is not known is compared when the graph runs
                raise ValueError(f"plan: was made for {name} {made_for}, got a call with {name} {value}")


def _fake_plan_decode(
    q,
    indices,
    *,
    topk_length=None,
    extra_indices=None,
    extra_topk_length=None,
    config=None,
    impl=None,
    backend=None,
):
    if config is not None:
        config = _config_of("config", config, interface.select_impl(q.device, impl, backend).Config)
    *_, num_parts = schedule.choose(q, indices, topk_length, extra_indices, extra_topk_length, config, impl, backend)
    metadata = torch.empty((num_parts, 8), dtype=torch.int32, device=q.device)
    return metadata, torch.empty((q.shape[0] + 1,), dtype=torch.int32, device=q.device)


def _fake_write_kv_cache(kv_cache, latent, rope, slots, *, kv_format=None, scales="pow2", backend=None) -> None:
    fmt = None if kv_format is None else _format_of(kv_format)
    cache_writer.check_metadata(kv_cache, latent, rope, slots, fmt, scales)
    cache_writer.check_no_grad((kv_cache, latent, rope, slots))


def _fake_quantize_kv_cache(kv, *, kv_format=None, scales="pow2", scale_values=None, backend=None):
    return quantizer.check_quantize(kv, *_quantize_options(kv_format, scales, scale_values), None)[2]


def _fake_quantize_kv_cache_out(kv, out, *, kv_format=None, scales="pow2", scale_values=None, backend=None) -> None:
    quantizer.check_quantize(kv, *_quantize_options(kv_format, scales, scale_values), out)


_library = torch.library.Library("mla_cute", "DEF")  # the ops live as long as this object
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,  # the compiler must not lay a cache's pages out anew
)
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=_TAGS)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, globals()[f"_{_name}"], _key)
    torch.library.register_fake(f"mla_cute::{_name}", globals()[f"_fake_{_name}"], lib=_library)
