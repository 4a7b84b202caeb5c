"""What a call may look like: every check of the user's arguments, and the `Problem` that is left when they pass.

Messages read `argument: what is needed, got what came`; a wrong type or dtype is a TypeError, a wrong value, shape,
stride or device a ValueError. Nothing here reads a tensor's contents, so nothing waits for a GPU: indices and lengths
are trusted.

Speed: a call with a ready plan has about 10 us of host time in all, so a call whose tensors are like those of one that
passed is only compared with it, by torch.compile's own guard: one C++ call for types, shapes, strides, dtypes, devices
and dispatch keys, which also say whether a tensor is fake, wrapped by torch.func or a negative view, and whether this
thread is being traced. Addresses and the scale are looked at every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._dynamo.guards import TensorGuards, _empty_strided_cpu
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_dynamo_compiling

from .target import is_recorded

HEAD_TILE = 64  # query heads of one CTA tile: the M of one warpgroup MMA
MAX_HEADS = 128  # two CTA tiles of heads
MAX_S_Q = 65_535  # query tokens of a request: the grid's y axis
D_QK, D_V = 576, 512  # V32's d_qk; d_v is the same in all formats
ALIGN = 16  # bytes: what a TMA descriptor and a bulk copy ask of every address and stride of q, kv_cache and out
WORD = 4  # bytes: what a load or store of one int32 or fp32 asks of the other addresses
INT32_MAX = 2**31 - 1
TMA_REACH = 2**40  # bytes: a stride of q or out must be less
MAX_TOPK = 2**31 - 64  # whole blocks of 64 keys: the last position of the last block is an int32
# The kernels take the scale as fp32: a normal number, and so large that times 16 * log2(e), as Hopper's has it, it is finite.
SCALE_MIN, SCALE_MAX = 2.0**-126, 2.0**123
_CACHE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)  # three names for one byte
_MEMO_ENTRIES = 4096  # shapes of a long-running server: bounded, then forgotten and checked again


class CacheFormat(NamedTuple):
    """What the checks know of a `mla_cute.kv_cache.KVFormat`; that module imports this one."""

    name: str
    d_qk: int
    token_bytes: int
    values: str  # of a key
    record: str


FORMATS = {
    fmt.token_bytes: fmt
    for fmt in (
        CacheFormat("v32", D_QK, 656, "512 latent + 64 RoPE values", "512 e4m3, 4 fp32 scales, 64 bf16"),
        CacheFormat("model1", 512, 584, "448 latent + 64 RoPE values", "448 e4m3, 64 bf16, 7 e8m0 scales and a pad byte"),
    )
}


@dataclass(frozen=True)
class Problem:
    """What changes the generated code of one op, and nothing else: half of the compile key, the other half is `Config`.

    Batch, query length, topk, page size and strides are run-time values and do not appear.
    """

    op: str = "sparse_decode"
    h_q: int = 128
    d_qk: int = D_QK
    d_v: int = D_V
    kv_format: str = "v32"
    has_topk_length: bool = False
    has_attn_sink: bool = False
    has_extra: bool = False  # a second cache with indices of its own
    has_extra_topk_length: bool = False

    @property
    def head_tiles(self) -> int:
        """CTA tiles of 64 heads that one query token needs: 1 or 2."""
        return -(-self.h_q // HEAD_TILE)


def check_sparse_decode(
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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Problem | None:
    """Check the arguments of `mla_cute.sparse_decode` (shapes and units there) and say which problem they are.

    Returns the `Problem`, or None without a check when a graph records the call (`is_recorded`). Raises ValueError or
    TypeError whose message names the argument, what is needed and what came. Costs about 2 us (4 with out and lse) when a
    call like it passed before. Works on the CPU and on CUDA alike; reads no tensor contents.
    """
    tensors = (
        q,
        kv_cache,
        indices,
        _ABSENT[0] if topk_length is None else topk_length,
        _ABSENT[1] if attn_sink is None else attn_sink,
        _ABSENT[2] if out is None else out,
        _ABSENT[3] if lse is None else lse,
    )
    has_extra, at_extra = False, ()
    if extra_kv_cache is not None or extra_indices is not None or extra_topk_length is not None:
        has_extra = True
        tensors += (extra_kv_cache, extra_indices, _ABSENT[4] if extra_topk_length is None else extra_topk_length)
    try:
        is_like_last, passed = _last
        if (
            passed is None
            or has_extra is not passed.problem.has_extra
            or not is_like_last(*tensors)
            or _len_torch_dispatch_stack()  # the guard does not look at the modes of torch.export and make_fx
        ):
            extra = extra_kv_cache, extra_indices, extra_topk_length
            if is_recorded(_CALL, (q, kv_cache, indices, topk_length, attn_sink, out, lse, *extra)):
                return None
            passed = _find(tensors)
        if passed is not None:
            # An absent tensor is at an aligned address that is not null, and has no bytes.
            at_length = ALIGN if topk_length is None else topk_length.data_ptr()
            at_sink = ALIGN if attn_sink is None else attn_sink.data_ptr()
            at_out, at_lse = ALIGN if out is None else out.data_ptr(), ALIGN if lse is None else lse.data_ptr()
            at_q, at_cache, at_indices = q.data_ptr(), kv_cache.data_ptr(), indices.data_ptr()
            if has_extra:
                at_extra = (
                    extra_kv_cache.data_ptr(),
                    extra_indices.data_ptr(),
                    ALIGN if extra_topk_length is None else extra_topk_length.data_ptr(),
                )
            if (
                not (at_q | at_cache | at_out) % ALIGN
                and not (at_indices | at_length | at_sink | at_lse) % WORD
                and not (has_extra and (at_extra[0] % ALIGN or (at_extra[1] | at_extra[2]) % WORD))
                and (
                    (
                        (at_q and at_cache and at_indices and at_length and at_sink and at_out and at_lse)
                        and not (has_extra and 0 in at_extra)
                    )
                    or not _has_null(
                        (at_lse, at_out, at_q, at_cache, at_indices, at_length, at_sink) + at_extra, passed.num_bytes
                    )
                )
                and (softmax_scale is None or (type(softmax_scale) is float and SCALE_MIN <= softmax_scale <= SCALE_MAX))
                and not (passed.requires_grad and torch.is_grad_enabled())
                and (
                    (out is None and lse is None)
                    or not _overlap(
                        (at_lse, at_out, at_q, at_cache, at_indices, at_length, at_sink) + at_extra, passed.num_bytes
                    )
                )
            ):
                return passed.problem
    except (AttributeError, RuntimeError):
        pass  # something is no tensor, or has no strides: the checks below say what
    extra = extra_kv_cache, extra_indices, extra_topk_length
    passed = _check_sparse_decode(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, extra, out, lse)
    return _keep(tensors, passed).problem


@dataclass(frozen=True, slots=True)  # its fields are read faster than a NamedTuple's
class _Passed:
    """What is kept of metadata that passed."""

    problem: Problem  # an object of its own for each
    num_bytes: tuple[int, ...]  # from the first to the last byte of each tensor, in the order of _TENSORS
    requires_grad: bool = True  # whether one of the tensors that passed did
    is_like: Callable[..., bool] | None = None  # whether tensors are like them


# The outputs first; the last three only where there are extra keys.
_TENSORS = (
    *("lse", "out", "q", "kv_cache", "indices", "topk_length", "attn_sink"),
    *("extra_kv_cache", "extra_indices", "extra_topk_length"),
)
_CALL = (
    *("q", "kv_cache", "indices", "topk_length", "attn_sink", "out", "lse"),
    *("extra_kv_cache", "extra_indices", "extra_topk_length"),
)
_ALIGNED = ("out", "q", "kv_cache", "extra_kv_cache")  # to 16 bytes, the others to 4
_passed: dict[tuple, _Passed] = {}
_last: tuple[Callable[..., bool] | None, _Passed | None] = None, None  # the newest of them


class _Absent(torch.Tensor):
    """A type that no tensor of a call has; each object stands for one argument that was not passed."""


_ABSENT = tuple(torch.Tensor._make_subclass(_Absent, _empty_strided_cpu((0,), (1,), torch.uint8)) for _ in range(5))


def _find(tensors: tuple) -> _Passed | None:
    """What is known of tensors of this metadata, which becomes the newest; None for a call that must be checked."""
    global _last
    try:
        passed = _passed.get(_key(tensors))
    except (AttributeError, TypeError, RuntimeError):
        return None  # something is no tensor, or has no strides
    if passed is None or not passed.is_like(*_distinct(tensors)):
        return None  # new, or like those that passed in its shapes alone: fake, say, or called in another mode of torch
    _last = passed.is_like, passed
    return passed


def _keep(tensors: tuple, passed: _Passed) -> _Passed:
    """Remember a call that passed. Metadata that is known keeps its Problem: what differs is not in it."""
    global _last
    key = _key(tensors)
    known = _passed.get(key)
    if known is None and len(_passed) >= _MEMO_ENTRIES:
        _passed.clear()
    guard = TensorGuards(*_distinct(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    requires_grad = any(t.requires_grad for t in tensors)
    problem = passed.problem if known is None else known.problem
    passed = _passed[key] = _Passed(problem, passed.num_bytes, requires_grad, guard.check)
    _last = passed.is_like, passed
    return passed


def _distinct(tensors: tuple) -> tuple:
    """A guard takes no object twice, as one tensor for both lengths: the second is another of the same memory."""
    if len(set(map(id, tensors))) == len(tensors):
        return tensors
    return tuple([t if all(t is not s for s in tensors[:i]) else t.detach() for i, t in enumerate(tensors)])


def _has_null(addresses: tuple[int, ...], num_bytes: tuple[int, ...]) -> bool:
    return any(size and not address for address, size in zip(addresses, num_bytes))


def _key(tensors: tuple) -> tuple:
    return tuple([None if type(t) is _Absent else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


# ----- the checks -----------------------------------------------------------------------------------------------------


def _check_sparse_decode(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, extra, out, lse) -> _Passed:
    problem = check_metadata(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, extra, out, lse)
    tensors = (lse, out, q, kv_cache, indices, topk_length, attn_sink, *(extra if problem.has_extra else ()))
    addresses = tuple(0 if t is None else t.data_ptr() for t in tensors)
    num_bytes = tuple(map(num_bytes_of, tensors))
    for name, t, address, size in zip(_TENSORS, tensors, addresses, num_bytes):
        check_has_memory(name, t, address, size)
        align = ALIGN if name in _ALIGNED else WORD
        if address % align:
            _no(name, f"first element must be {align}-byte aligned", f"an address {address % align} bytes past one")
    meeting = _overlap(addresses, num_bytes)
    if meeting:
        name, other = (_TENSORS[i] for i in meeting)
        got = " and ".join(f"{num_bytes[i]} bytes at {addresses[i]:#x}" for i in meeting)
        _no(name, f"must not overlap {other} from first to last byte", got)
    return _Passed(problem, num_bytes)


def check_metadata(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, extra, out, lse) -> Problem:
    """All but the addresses: holds for torch.compile's tensors too, which have none, and whose sizes may be symbols.

    extra: (extra_kv_cache, extra_indices, extra_topk_length).
    """
    # q [b, s_q, h_q, d_qk]
    _is_tensor("q", q, (torch.bfloat16,), ("b", "s_q", "h_q", "d_qk"))
    fmt = _cache_format("kv_cache", kv_cache)  # says what d_qk must be
    b, s_q, h_q, d_qk = q.shape
    if q.device.type not in ("cpu", "cuda"):
        _no("q", "device must be cpu or cuda", q.device)
    if d_qk != fmt.d_qk:
        _no("q", f"last dim d_qk must be {fmt.d_qk} ({fmt.name.upper()}: {fmt.values})", d_qk)
    if not 1 <= h_q <= MAX_HEADS:
        _no("q", f"h_q (dim 2) must be 1 to {MAX_HEADS}", h_q)
    if s_q > MAX_S_Q:
        _no("q", f"s_q (dim 1) must be at most {MAX_S_Q}", s_q)
    if s_q < 1:
        _no("q", "s_q (dim 1) must be at least 1", s_q)
    _is_aligned("q", q)

    _is_cache("kv_cache", kv_cache, b)
    _is_indices("indices", indices, "topk", b, s_q)

    # the second cache
    extra_kv_cache, extra_indices, extra_topk_length = extra
    if extra_kv_cache is not None or extra_indices is not None or extra_topk_length is not None:
        if extra_kv_cache is None:
            there = "extra_indices" if extra_indices is not None else "extra_topk_length"
            _no("extra_kv_cache", f"must be given with {there}", None)
        if extra_indices is None:
            _no("extra_indices", "must be given with extra_kv_cache", None)
        extra_fmt = _cache_format("extra_kv_cache", extra_kv_cache)
        if extra_fmt is not fmt:
            needed = f"last dim must be {fmt.token_bytes} as kv_cache's ({fmt.name.upper()})"
            _no("extra_kv_cache", needed, f"{extra_fmt.token_bytes} ({extra_fmt.name.upper()})")
        _is_cache("extra_kv_cache", extra_kv_cache, b)
        _is_indices("extra_indices", extra_indices, "extra_topk", b, s_q)
        if extra_topk_length is not None:
            _is_tensor("extra_topk_length", extra_topk_length, (torch.int32,), ("b",))
            _is_vector("extra_topk_length", extra_topk_length, "b", b)

    # options
    if topk_length is not None:
        _is_tensor("topk_length", topk_length, (torch.int32,), ("b",))
        _is_vector("topk_length", topk_length, "b", b)
    if attn_sink is not None:
        _is_tensor("attn_sink", attn_sink, (torch.float32,), ("h_q",))
        _is_vector("attn_sink", attn_sink, "h_q", h_q)
    if softmax_scale is not None:
        if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real):
            _no("softmax_scale", "must be a Python float", _type_name(softmax_scale), TypeError)
        if not SCALE_MIN <= softmax_scale <= SCALE_MAX:  # NaN fails too
            _no("softmax_scale", f"must be positive and finite in fp32 ({SCALE_MIN:g} to {SCALE_MAX:g})", softmax_scale)

    # outputs
    if out is not None:
        _is_tensor("out", out, (torch.bfloat16,), ("b", "s_q", "h_q", "d_v"))
        _is_shaped("out", out, (b, s_q, h_q, D_V), "[b, s_q, h_q, d_v]")
        _is_aligned("out", out)
        check_writable("out", out)
    if lse is not None:
        _is_tensor("lse", lse, (torch.float32,), ("b", "s_q", "h_q"))
        _is_shaped("lse", lse, (b, s_q, h_q), "[b, s_q, h_q]")
        if h_q > 1 and lse.stride(2) != 1:
            _no("lse", "last dim must be contiguous (stride 1)", f"stride {lse.stride(2)}")
        check_writable("lse", lse)

    others = (
        ("kv_cache", kv_cache),
        ("indices", indices),
        ("topk_length", topk_length),
        ("attn_sink", attn_sink),
        ("extra_kv_cache", extra_kv_cache),
        ("extra_indices", extra_indices),
        ("extra_topk_length", extra_topk_length),
        ("out", out),
        ("lse", lse),
    )
    for name, t in others:
        if t is not None and t.device != q.device:
            _no(name, f"must be on the device of q ({q.device})", t.device)
    if torch.is_grad_enabled():
        for name, t in (("q", q), *others):
            if t is not None and t.requires_grad:
                _no(
                    name,
                    "must not require grad: sparse_decode has no backward, call it under torch.no_grad() "
                    f"or pass {name}.detach()",
                    "requires_grad=True",
                )
    return Problem(
        h_q=h_q,
        d_qk=d_qk,
        kv_format=fmt.name,
        has_topk_length=topk_length is not None,
        has_attn_sink=attn_sink is not None,
        has_extra=extra_kv_cache is not None,
        has_extra_topk_length=extra_topk_length is not None,
    )


def _cache_format(name: str, cache: Any) -> CacheFormat:
    """The format that the cache's last dim tells."""
    known = " or ".join(map(str, FORMATS))
    _is_tensor(name, cache, _CACHE_DTYPES, ("num_blocks", "page_block_size", "1", known))
    fmt = FORMATS.get(int(cache.shape[3]))  # torch.compile has symbols, which do not hash
    if fmt is None:
        known = " or ".join(f"{n} ({f.name.upper()}: {f.record})" for n, f in FORMATS.items())
        _no(name, f"last dim must be the bytes of a token, {known}", cache.shape[3])
    return fmt


def _is_cache(name: str, cache: torch.Tensor, b: int) -> None:
    """[num_blocks, page_block_size, 1, token_bytes] bytes."""
    num_blocks, page, h_kv, token_bytes = cache.shape
    if h_kv != 1:
        _no(name, "h_kv (dim 2) must be 1, MLA has one KV head", h_kv)
    if page < 1:
        _no(name, "page_block_size (dim 1) must be at least 1", page)
    if num_blocks < 1 and b > 0:
        _no(name, "num_blocks (dim 0) must be at least 1 for a non-empty batch", num_blocks)
    if num_blocks * page > INT32_MAX:
        _no(
            name,
            f"num_blocks * page_block_size must be at most {INT32_MAX}, the reach of an int32 index",
            f"{num_blocks} * {page} = {num_blocks * page}",
        )
    if cache.stride(3) != 1:
        _no(name, "last dim must be contiguous (stride 1)", f"stride {cache.stride(3)}")
    if page > 1 and cache.stride(1) != token_bytes:
        _no(name, f"token stride (dim 1) must be {token_bytes} bytes", cache.stride(1))
    if num_blocks > 1 and cache.stride(0) % ALIGN:
        _no(name, f"page stride (dim 0) must be a multiple of {ALIGN} bytes", cache.stride(0))


def _is_indices(name: str, indices: Any, topk: str, b: int, s_q: int) -> None:
    """[b, s_q, topk]; `topk` is what messages call the last dim."""
    _is_tensor(name, indices, (torch.int32,), ("b", "s_q", topk))
    if indices.shape[:2] != (b, s_q):
        _no(name, f"shape must be [b, s_q, {topk}] with b {b}, s_q {s_q} of q", list(indices.shape))
    if indices.shape[2] < 1:
        _no(name, f"{topk} (dim 2) must be at least 1", indices.shape[2])
    if indices.shape[2] > MAX_TOPK:
        _no(name, f"{topk} (dim 2) must be at most {MAX_TOPK}", indices.shape[2])
    if indices.shape[2] > 1 and indices.stride(2) != 1:
        _no(name, "last dim must be contiguous (stride 1)", f"stride {indices.stride(2)}")


def check_dense(name: str, t: Any) -> None:
    """Raise TypeError unless t is a tensor with one address and strides: no sparse one, no nested one."""
    if not isinstance(t, torch.Tensor):
        _no(name, "must be a torch.Tensor", _type_name(t), TypeError)
    if t.layout != torch.strided or t.is_nested:
        _no(name, "must be a dense (strided) tensor", "a nested tensor" if t.is_nested else t.layout, TypeError)


def check_plain(name: str, t: Any) -> None:
    """Raise TypeError unless t is a dense tensor whose memory holds its values."""
    check_dense(name, t)
    if is_dynamo_compiling():  # which has none of these
        return
    if is_functorch_wrapped_tensor(t):
        needed = "must be outside of torch.func's transforms (vmap, grad, jvp), which have no rule for this call"
        _no(name, needed, "a tensor that one of them wraps", TypeError)
    if t.is_neg():  # a conjugate view is complex: its dtype is refused
        _no(name, "must hold its values (resolve_neg())", "a negative view", TypeError)


def check_has_memory(name: str, t: torch.Tensor | None, address: int, num_bytes: int) -> None:
    """Raise ValueError for a tensor that has bytes, but none of them in memory: a fake one, or one of a freed storage."""
    if num_bytes and not address:
        _no(name, "must have memory", f"a {_type_name(t)} of {num_bytes} bytes at address 0")


def check_writable(name: str, t: torch.Tensor) -> None:
    """Raise ValueError if two elements share an address, as in an expanded view."""
    extent = 1  # elements from the first to one past the last
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape) if size > 1):
        if stride < extent:  # dims from inner to outer must step over one another
            _no(name, "elements must not share memory", f"shape {list(t.shape)} with strides {list(t.stride())}")
        extent += stride * (size - 1)


def check_int(name: str, value: Any) -> None:
    """Raise ValueError unless the number of a Config is an int (no bool, no numpy int: its repr is a compile key)."""
    if type(value) is not int:
        _no(name, "must be an int", repr(value))


def _is_tensor(name: str, t: Any, dtypes: tuple[torch.dtype, ...], dims: tuple[str, ...]) -> None:
    check_plain(name, t)
    if t.dtype not in dtypes:
        _no(name, f"dtype must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}", t.dtype, TypeError)
    if t.dim() != len(dims):
        _no(name, f"must have {len(dims)} dim{'s' * (len(dims) > 1)} [{', '.join(dims)}]", f"shape {list(t.shape)}")


def _is_aligned(name: str, t: torch.Tensor) -> None:
    """Last dim contiguous; the strides that are walked (dims of size > 1) multiples of 16 bytes, and a TMA's."""
    if t.stride(-1) != 1:
        _no(name, "last dim must be contiguous (stride 1)", f"stride {t.stride(-1)}")
    size = t.element_size()
    for i in range(t.dim() - 1):
        if t.shape[i] > 1 and t.stride(i) * size % ALIGN:
            _no(
                name,
                f"stride of dim {i} must be a multiple of {ALIGN} bytes ({ALIGN // size} elements)",
                f"{t.stride(i)} elements",
            )
        if t.shape[i] > 1 and t.stride(i) * size >= TMA_REACH:  # the descriptor would drop its upper bits
            _no(name, f"stride of dim {i} must be below 2**40 bytes", f"{t.stride(i)} elements")


def _is_shaped(name: str, t: torch.Tensor, shape: tuple[int, ...], dims: str) -> None:
    if tuple(t.shape) != shape:
        _no(name, f"shape must be {dims} = {list(shape)}", list(t.shape))


def _is_vector(name: str, t: torch.Tensor, dim: str, size: int) -> None:
    _is_shaped(name, t, (size,), f"[{dim}]")
    if not t.is_contiguous():
        _no(name, "must be contiguous (stride 1)", f"stride {t.stride(0)}")


def num_bytes_of(t: torch.Tensor | None) -> int:
    """Bytes from the first to the last that t reaches, gaps counted; 0 if it is absent or empty."""
    if t is None or not t.numel():
        return 0
    return (1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape))) * t.element_size()


def _overlap(addresses: tuple[int, ...], num_bytes: tuple[int, ...]) -> tuple[int, int] | None:
    """Positions in _TENSORS of an output and of an argument behind it whose address ranges meet.

    Absent and empty tensors have no bytes, and are at the lowest addresses: they meet nothing.
    """
    lse, lse_end = addresses[0], addresses[0] + num_bytes[0]
    out, out_end = addresses[1], addresses[1] + num_bytes[1]
    for i, start in enumerate(addresses):
        if i and start < lse_end and lse < start + num_bytes[i]:
            return 0, i
        if i > 1 and start < out_end and out < start + num_bytes[i]:
            return 1, i
    return None


def _type_name(x: Any) -> str:
    return type(x).__name__ if type(x).__module__ == "builtins" else f"{type(x).__module__}.{type(x).__name__}"


def _no(name: str, needed: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: {needed}, got {got}")
