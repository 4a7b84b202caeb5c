"""The public op: sparse_decode. Validate → plan → compile (cached) → launch; the compiled function merges the splits.

CPU tensors take the reference through the same path, CUDA tensors the kernel of their architecture (`select_impl`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import itertools
import os
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import jit
from .schedule import DecodePlan, most_splits, plan_decode, scratch_size, settle
from .target import DEFAULT_BACKEND, arch_of, target
from .validate import Problem, check_sparse_decode

IMPL_NAMES = ("Config", "default_config", "compile")  # what makes a module an implementation


def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    config: Any = None,
    impl: ModuleType | str | None = None,
    backend: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token over the cached tokens that its index list selects (MLA decode, FP8 cache).

    With x_j = softmax_scale * q·k_j over the selected tokens j, K = dequantised, V = the first 512 values of K
    (of MODEL1 these are all, RoPE included): lse = ln Σ exp(x_j); out = Σ exp(x_j - lse) v_j, times
    exp(lse) / (exp(lse) + exp(sink)) where there is a sink.

    Args:
        q: [b, s_q, h_q, 576] bf16, for MODEL1 [b, s_q, h_q, 512]; 1 to 128 heads. Last dim contiguous, address and other
            strides multiples of 16 bytes. On Hopper values must be below 2**20, see below.
        kv_cache: [num_blocks, page_block_size, 1, bytes_per_token] in uint8, int8 or float8_e4m3fn, as
            `quantize_kv_cache` writes it: 656 bytes a token are V32 (DeepSeek V3 to V3.2), 584 MODEL1 (DeepSeek V4).
            stride(1) = bytes_per_token, address and page stride multiples of 16 bytes; gaps between pages are not read.
            Any page size, at most 2**31 - 1 tokens. On Blackwell pages that are no whole records apart must lie within
            2**31 times the largest number of bytes that divides both: 32 GiB or more.
        indices: [b, s_q, topk] int32, page * page_block_size + offset (`to_cache_indices`), last dim contiguous, topk
            >= 1. Entries that are no token of the cache (negative, or num_blocks * page_block_size and more) are skipped
            wherever they stand, nothing is read for them; duplicates count each time.
        softmax_scale: positive, at most 2**123; default d_qk ** -0.5.
        topk_length: [b] int32; only the first topk_length[r] entries of request r's lists are looked at. Values are
            clamped to [0, topk].
        attn_sink: [h_q] fp32, natural-log units: one more logit a head, without a value. -inf has no effect, +inf gives
            out = 0.
        extra_kv_cache: a second cache of the same format, with a page size of its own, whose tokens are attended to
            beside those of kv_cache: one softmax over both.
        extra_indices: [b, s_q, extra_topk] int32, into extra_kv_cache, which needs them; rules as for indices.
        extra_topk_length: [b] int32, as topk_length, for extra_indices.
        plan: from `plan_decode`, for calls with the same shapes and the same lengths; saves the planner's
            launch. Default: planned in this call, on the device, without a host sync. Small batches on Hopper neither read a
            plan nor make one (`settle` of the implementation's `Config`).
        config: the implementation's `Config`; default plan.config, or `default_config` of the implementation.
        impl: another implementation: a module with `Config`, `default_config` and `compile`, its importable name, or
            the path of its .py file (both are looked up in every call). Default: `select_impl(q.device)`.
        out: [b, s_q, h_q, 512] bf16, where to write; last dim contiguous, address and other strides multiples of 16
            bytes.
        lse: [b, s_q, h_q] fp32, where to write; last dim contiguous. From first to last byte, gaps counted, neither
            may overlap the other or another argument.

    Returns: (out, lse). lse is in natural log and never includes the sink. A query token that attends to nothing gets
        out = 0 and lse = +inf. An empty batch (b = 0) returns empty tensors and launches nothing.

    Work is queued on torch's current stream of q's device and the call does not wait for it. It may be captured in a
    CUDA graph (call it once before: a first call compiles); without a plan, each replay plans anew. Results are
    deterministic: the same bits for the same inputs and plan, of clusters on one device (how large they are is up to the
    chip). Scratch: 2 * plan.num_parts * s_q slots of 32 KiB for
    every 16 heads and 4 bytes a head whatever b is (at most 35 MB on 132 SMs, for any s_q and h_q), nothing if
    num_parts is 1 or clusters run. There is no backward.

    torch.compile(fullgraph=True), torch.export and make_fx make an op of the call, torch.ops.mla_cute.sparse_decode (see
    torch_ops). There `impl` must be importable by its name, and the fields of `config` ints, bools, strings, None or tuples
    of them.

    Numbers: K and V are rounded once (not at all for scales that are powers of two), to bf16 in the reference; Hopper's kernel
    multiplies in fp16, q / 16 by keys over a power of two of their own, and sums in fp32. So values of q from 2**20 on make
    their head's out and lse NaN, and below 2**-13 they lose bits; scales belong between 2**-60 and 2**60; and in out a key
    loses bits if its probability times its largest scale is below 2**-21 of the list's largest such product, or in columns
    whose scale is below 2**-26 of its largest. Blackwell's multiplies in bf16: keys are rounded like the reference's, to 2**-17
    of their last place or so, and probabilities once. A query all of whose scores lie below -7e29 counts as one without keys.

    Raises ValueError or TypeError naming the argument, what is needed and what came; NotImplementedError when the
    device's architecture has no kernel or the DSL cannot compile it. All of them before anything is launched.

    The op, the cache format and the plan are those of DeepSeek's FlashMLA (`flash_mla_with_kvcache` with indices).
    """
    problem = None
    if not is_dynamo_compiling():
        problem = check_sparse_decode(
            q,
            kv_cache,
            indices,
            softmax_scale=softmax_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            extra_kv_cache=extra_kv_cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
            out=out,
            lse=lse,
        )
    if problem is None:  # an op of a graph
        from . import torch_ops

        return torch_ops.sparse_decode(
            q,
            kv_cache,
            indices,
            softmax_scale=softmax_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            extra_kv_cache=extra_kv_cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
            plan=plan,
            config=config,
            impl=impl,
            backend=backend,
            out=out,
            lse=lse,
        )
    if backend is None:
        backend = DEFAULT_BACKEND
    if isinstance(impl, str):  # in every call: a relative path is another file in another directory
        impl = select_impl(q.device, impl, backend)
    ready = _ready
    if (
        ready.problem is not problem
        or ready.plan_kind is not (None if plan is None else getattr(plan, "kind", plan))
        or ready.config is not config
        or ready.impl is not impl
        or ready.compile is not ready.module.compile  # reloaded
        or backend is not None  # its session may be another one
    ):
        ready = _prepare(problem, plan, config, impl, backend, q, kv_cache, indices, extra_kv_cache, extra_indices)
    empty = ready.empty
    # Not torch.cuda.current_device(), which first asks whether CUDA is initialised: it is, q is there.
    if ready.device_index is not None and ready.device_index != torch._C._cuda_getDevice():
        empty = functools.partial(_empty, q.device)
    if out is None:
        out = empty(*ready.out_spec)
    if lse is None:
        lse = empty(*ready.lse_spec)
    if ready.kernel is None:  # an empty batch
        return out, lse
    if ready.no_plan is not None:
        metadata, num_splits = ready.no_plan
    else:
        if plan is None:
            plan = plan_decode(
                q,
                indices,
                topk_length=topk_length,
                extra_indices=extra_indices,
                extra_topk_length=extra_topk_length,
                config=ready.kernel_config,
                impl=ready.module,
                backend=backend,
            )
        metadata, num_splits = plan.metadata, plan.num_splits
    ready.kernel(  # on torch's current stream of the tensors' device, whichever device is the current one
        q,
        kv_cache if ready.is_bytes else kv_cache.view(torch.uint8),
        indices,
        topk_length,
        extra_kv_cache if ready.extra_is_bytes else extra_kv_cache.view(torch.uint8),
        extra_indices,
        extra_topk_length,
        attn_sink,
        ready.default_scale if softmax_scale is None else float(softmax_scale),
        metadata,
        num_splits,
        empty(*ready.scratch_spec),
        out,
        lse,
        ready.max_splits,
        _nonce(),
    )
    return out, lse


def _nonce() -> int:
    """Positive, 63 bits, and another one in every call: no memory that a call finds as its scratch holds it."""
    return next(_calls) * _multiplier & 2**63 - 1


def _seed() -> None:
    global _calls, _multiplier
    _calls, _multiplier = itertools.count(1), secrets.randbits(63) | 1  # odd: a permutation


_seed()
os.register_at_fork(after_in_child=_seed)


@dataclasses.dataclass(frozen=True, slots=True)  # its fields are read faster than a NamedTuple's
class _Ready:
    """The arguments of a call that `_prepare` has checked against one another, and what they lead to."""

    problem: Problem | None = None  # this very object: one per metadata of the tensors, so it stands for all of that
    plan_kind: object = None  # every plan of this kind will do; none is kept alive
    config: Any = None
    impl: ModuleType | None = None
    module: ModuleType | None = None
    compile: Callable | None = None
    kernel_config: Any = None
    kernel: Callable | None = None
    is_bytes: bool = True  # kv_cache is uint8
    extra_is_bytes: bool = True  # extra_kv_cache too, or there is none
    default_scale: float = 0.0
    device_index: int | None = None  # of a CUDA device
    empty: Callable | None = None  # (shape, strides, dtype) -> tensor on the CPU or the current CUDA device
    out_spec: tuple | None = None  # what `empty` takes
    lse_spec: tuple | None = None
    scratch_spec: tuple | None = None
    max_splits: int = 0  # or the CTAs of a cluster
    no_plan: tuple | None = None  # (metadata, num_splits) for a kernel that does not read them: clusters need no plan


_ready = _Ready()  # of the last call: the layers of a model make the same call again and again


def _prepare(problem, plan, config, impl, backend, q, kv_cache, indices, extra_kv_cache, extra_indices) -> _Ready:
    """Which kernel runs, and do plan and config belong to it: the part of the checks that needs the implementation."""
    global _ready
    where = target(q.device, backend)
    module = select_impl(q.device, impl, backend)
    b, s_q, h_q, d_qk = q.shape
    topk, extra_topk = indices.shape[2], 0 if extra_indices is None else extra_indices.shape[2]
    if config is not None:
        check_config(module, config)
    if plan is not None:
        if not isinstance(plan, DecodePlan):
            raise TypeError(f"plan: must be a mla_cute.DecodePlan, got {type(plan).__name__}")
        if not isinstance(plan.config, module.Config):
            made = ' and backend="emulator"' if backend else ""
            raise ValueError(f"plan: must be made with a {module.__name__}.Config{made}, got {plan.config!r}")
        plan.check(
            b=b,
            s_q=s_q,
            h_q=h_q,
            topk=topk,
            has_topk_length=problem.has_topk_length,
            extra_topk=extra_topk,
            has_extra_topk_length=problem.has_extra_topk_length,
            device=q.device,
            config=config,
        )
        kernel_config = plan.config
    else:
        kernel_config = module.default_config(problem) if config is None else config
    kernel_config.check(problem)
    if hasattr(module, "check_caches"):
        module.check_caches(kv_cache, extra_kv_cache)
    tile_n = kernel_config.tile_n
    where.admit(b * s_q * problem.head_tiles * (-(-topk // tile_n) + -(-extra_topk // tile_n)))
    settled, cluster = settle(kernel_config, problem, b, s_q, topk, extra_topk, where)
    parts = kernel_config.num_parts(problem, s_q, where.num_sms) if plan is None else plan.num_parts
    has_lengths = problem.has_topk_length or problem.has_extra_topk_length
    made = _Ready(
        problem,
        None if plan is None else plan.kind,
        config,
        impl,
        module,
        module.compile,
        kernel_config,
        kernel=where.load(module, problem, settled, where.arch) if b else None,
        is_bytes=kv_cache.dtype is torch.uint8,
        extra_is_bytes=extra_kv_cache is None or extra_kv_cache.dtype is torch.uint8,
        default_scale=d_qk**-0.5,
        device_index=q.device.index,
        empty=where.empty,
        out_spec=_spec(torch.bfloat16, b, s_q, h_q, problem.d_v),
        lse_spec=_spec(torch.float32, b, s_q, h_q),
        scratch_spec=_spec(torch.float32, 0 if cluster else scratch_size(parts, s_q, h_q)),
        max_splits=cluster or most_splits(kernel_config, b, topk, extra_topk, has_lengths, parts),
        no_plan=_no_plan(q.device) if cluster else None,
    )
    if backend is None:
        _ready = made
    return made  # not _ready: another thread may have set it meanwhile


def _no_plan(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Without memory: what stays in `_ready` must not hold any of a CUDA graph's pool."""
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((0, 8), (0,)))


def _spec(dtype: torch.dtype, *shape: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return shape, torch.empty(shape, device="meta").stride(), dtype


def _empty(device: torch.device, shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def select_impl(
    device: torch.device | str, impl: ModuleType | str | None = None, backend: str | None = None
) -> ModuleType:
    """The module whose kernel `sparse_decode` runs on `device`: its `__name__` says which.

    impl: None for the shipped choice (`mla_cute.reference` on the CPU, the kernel of the GPU's architecture on CUDA, of
    the emulated one on the CPU with backend="emulator"), else what `sparse_decode` takes: a module, its importable name,
    or the path of its .py file.

    Raises NotImplementedError when the architecture has no kernel, ValueError when there is no such device or `impl` cannot
    be found, TypeError when it is no implementation.
    """
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device: must be a torch.device or a str, got {type(device).__name__}")
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device: must be a device of torch such as "cuda" or "cpu", got {device!r}') from None
    if impl is None:
        return _shipped_impl(device, arch_of(device, backend))
    module = _import(impl) if isinstance(impl, str) else impl
    missing = [name for name in IMPL_NAMES if not hasattr(module, name)]
    if missing:
        raise TypeError(
            f"impl: must be a module with {', '.join(IMPL_NAMES)}, or its name or path, "
            f"got {module!r} without {', '.join(missing)}"
        )
    return module


def check_config(module: ModuleType, config: Any) -> None:
    """Raise TypeError unless `config` is of the implementation's class."""
    if not isinstance(config, module.Config):
        raise TypeError(f"config: must be a {module.__name__}.Config, got {config!r}")


@functools.cache
def _shipped_impl(device: torch.device, arch: str) -> ModuleType:
    try:
        return jit.arch_module("sparse_decode", arch)
    except NotImplementedError:
        kernels = sorted(path.parent.name for path in Path(__file__).parent.glob("sm*/sparse_decode.py"))
        raise NotImplementedError(
            f"q: sparse_decode needs a GPU, or an emulated one, with a kernel ({', '.join(kernels)}), got {arch} ({device}); "
            "impl=mla_cute.reference runs everywhere, slowly"
        ) from None


def _import(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _import_file(name)
    try:
        if not name or name.startswith("."):  # import_module's own messages do not say of what
            raise ModuleNotFoundError(name=name)
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name + ".").startswith(e.name + "."):
            raise ValueError(f"impl: must be an importable module or the path of a .py file, got {name!r}") from None
        raise  # the module is there, something that it imports is not


def _import_file(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"impl: no such file, got {name!r}")
    # Unique, so that a file never takes the place of another module; in sys.modules, so that its classes pickle.
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    with _import_lock:
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, path)
            module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:  # Ctrl-C too: half a module must not stay
                del sys.modules[module_name]
                raise
        return sys.modules[module_name]


_import_lock = jit.kept_over_fork(threading.RLock())  # a file being imported stands in sys.modules before it is whole
