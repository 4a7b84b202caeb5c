"""New tokens into a paged FP8 cache, in place: what a serving engine does each step and layer before it attends.

CUDA tensors take one kernel (`cache_writer_kernel`), CPU tensors plain torch; the bytes are those of `quantize_kv_cache`,
which takes the same kernel for a whole cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.compiler import is_dynamo_compiling

from .kv_cache import CACHE_DTYPES, FORMATS, KVFormat, check_format, new_cache, planes, quantize_by_torch
from .target import Target, is_recorded, target
from .validate import ALIGN, INT32_MAX, check_has_memory, check_plain, check_writable, num_bytes_of

MAX_TOKENS = 2**30  # of a call: the kernel counts them in 32 bits
_MEMO_ENTRIES = 4096  # as in validate


def write_kv_cache(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_format: KVFormat | None = None,
    scales: str = "pow2",
    backend: str | None = None,
) -> None:
    """Quantise n tokens and write their records into `kv_cache`, each at its slot. No other byte is touched.

    Args:
        kv_cache: [num_blocks, page_block_size, 1, 656 or 584] in uint8, int8 or float8_e4m3fn: V32 or MODEL1 records,
            written in place. Tokens of a page as far apart as the last dim says, address and page stride multiples of
            16 bytes, pages may be strided but not overlap. At most 2**31 - 1 tokens.
        latent: [n, 512] bf16 for V32, [n, 448] for MODEL1 (without its RoPE); at most 2**30 rows. Last dim contiguous,
            address and row stride multiples of 16 bytes: a slice of a wider projection will do.
        rope: [n, 64] bf16, in the same way.
        slots: [n] int64 or int32, page * page_block_size + offset. Negative ones are skipped, and so are those past the
            cache. The others must differ from one another: of tokens with one slot any may win, or a mixture.
        kv_format: `V32` or `MODEL1`; default: what the last dim of `kv_cache` says.
        scales: as in `quantize_kv_cache`: "pow2", or "amax" for V32.
        backend: "emulator" runs the kernel on CPU tensors.

    The record is bit for bit that of `quantize_kv_cache` on the CPU, NaN and Inf included, and of MODEL1's scales the
    padding byte is written 0. Work is queued on torch's current stream of the tensors' device; nothing is allocated, and
    the call may be captured in a CUDA graph after a first call outside one, which compiles: latent, rope and slots are read
    anew at every replay. In torch.compile and torch.export it is an op that writes kv_cache in place. There is no backward.

    Raises ValueError or TypeError naming the argument, what is needed and what came, before anything is written.
    """
    if is_dynamo_compiling() or is_recorded(_NAMES, (kv_cache, latent, rope, slots)):  # an op of a graph
        from . import torch_ops

        return torch_ops.write_kv_cache(
            kv_cache, latent, rope, slots, kv_format=kv_format, scales=scales, backend=backend
        )
    passed = _check(kv_cache, latent, rope, slots, kv_format, scales)
    if passed.is_empty:
        return
    where = target(kv_cache.device, backend)
    if where.arch == "cpu":
        _write_by_torch(kv_cache, latent, rope, slots, FORMATS[passed.kv_format], scales)
        return
    _write_by_kernel(kv_cache, latent, rope, slots, passed.kv_format, scales, where)


def has_kernel(arch: str) -> bool:
    """Hopper and later: what came before has no architecture by the name that `jit.arch_of` gives it."""
    found = re.fullmatch(r"sm_(\d+)a", arch)
    return found is not None and int(found[1]) >= 90


def write_all(kv_cache: torch.Tensor, kv: torch.Tensor, fmt: KVFormat, scales: str, where: Target) -> None:
    """The records of kv bf16 [num_blocks, page, 1, d_qk] into the whole of kv_cache; as `quantize_kv_cache` checks them."""
    if not kv.numel():
        return
    num_blocks, page = kv.shape[:2]
    if num_blocks * page > MAX_TOKENS:
        _no("kv", f"must have at most {MAX_TOKENS} tokens", f"{num_blocks} * {page} = {num_blocks * page}")
    if kv_cache.data_ptr() % ALIGN or (num_blocks > 1 and kv_cache.stride(0) % ALIGN):
        aligned = new_cache(num_blocks, page, fmt, kv.device)
        write_all(aligned, kv, fmt, scales, where)
        kv_cache.view(torch.uint8).copy_(aligned)
        return
    rows = kv.detach().reshape(-1, fmt.d_qk)  # a view, if the distance is the same between all rows
    if rows.stride(1) != 1 or rows.data_ptr() % ALIGN or (len(rows) > 1 and 2 * rows.stride(0) % ALIGN):
        rows = rows.clone(memory_format=torch.contiguous_format)
    _write_by_kernel(kv_cache, rows[:, : fmt.d_nope], rows[:, fmt.d_nope :], None, fmt.name, scales, where)


def _write_by_kernel(kv_cache, latent, rope, slots, kv_format: str, scales: str, where: Target) -> None:
    from . import cache_writer_kernel as module  # the DSL is imported when a kernel is needed

    problem = module.WriteProblem(kv_format, scales, 0 if slots is None else slots.element_size())
    kernel = where.load(module, problem, module.default_config(problem), where.arch)
    kernel(kv_cache if kv_cache.dtype is torch.uint8 else kv_cache.view(torch.uint8), latent, rope, slots)


def _write_by_torch(kv_cache, latent, rope, slots, fmt: KVFormat, scales: str) -> None:
    num_blocks, page = kv_cache.shape[:2]
    valid = (slots >= 0) & (slots < num_blocks * page)
    slots = slots[valid].long()
    keys = torch.cat([latent[valid], rope[valid]], dim=-1)[:, None, None]  # as pages of one token
    records = new_cache(len(keys), 1, fmt, keys.device)
    quantize_by_torch(keys, fmt, scales, records)
    for old, new in zip(planes(kv_cache, fmt), planes(records, fmt)):  # codes, scales, RoPE
        old[slots // page, slots % page] = new[:, 0]


# ----- the checks -----------------------------------------------------------------------------------------------------


class _Passed(NamedTuple):
    """What is kept of metadata that passed."""

    kv_format: str
    is_empty: bool
    num_bytes: tuple[int, ...]  # from the first to the last byte of each tensor, in the order of _NAMES


_NAMES = ("kv_cache", "latent", "rope", "slots")
_passed: dict[tuple, tuple[_Passed, Callable]] = {}  # and whether tensors are like those that passed: see validate
_UNKNOWN = None, None


def _check(kv_cache, latent, rope, slots, kv_format, scales) -> _Passed:
    """Metadata that passed before is looked up; addresses and requires_grad are looked at every time."""
    tensors = (kv_cache, latent, rope, slots)
    try:
        key = (*((t.shape, t.stride(), t.dtype, t.device) for t in tensors), kv_format, scales)
        passed, is_like = _passed.get(key, _UNKNOWN)
    except (AttributeError, TypeError, RuntimeError):
        key, (passed, is_like) = None, _UNKNOWN  # something is no tensor, or has no strides: the checks say what
    if passed is None or not is_like(*tensors):
        passed = check_metadata(kv_cache, latent, rope, slots, kv_format, scales)
        if len(_passed) >= _MEMO_ENTRIES:
            _passed.clear()
        if key is not None:
            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            _passed[key] = passed, guard.check

    addresses = tuple(t.data_ptr() for t in tensors)
    for i, align in enumerate((ALIGN, ALIGN, ALIGN, slots.element_size())):
        if not addresses[i]:
            check_has_memory(_NAMES[i], tensors[i], addresses[i], passed.num_bytes[i])
        if addresses[i] % align:
            got = f"an address {addresses[i] % align} bytes past one"
            _no(_NAMES[i], f"first element must be {align}-byte aligned", got)
    first, last = addresses[0], addresses[0] + passed.num_bytes[0]
    for i in (1, 2, 3):
        if addresses[i] < last and first < addresses[i] + passed.num_bytes[i]:
            got = " and ".join(f"{passed.num_bytes[j]} bytes at {addresses[j]:#x}" for j in (i, 0))
            _no(_NAMES[i], "must not overlap kv_cache from first to last byte", got)
    check_no_grad(tensors)
    return passed


def check_no_grad(tensors: tuple[torch.Tensor, ...]) -> None:
    """Of kv_cache, latent, rope and slots."""
    if torch.is_grad_enabled():
        for name, t in zip(_NAMES, tensors):
            if t.requires_grad:
                needed = "must not require grad: write_kv_cache has no backward, call it under torch.no_grad() or pass "
                _no(name, f"{needed}{name}.detach()", "requires_grad=True")


def check_metadata(kv_cache: Any, latent: Any, rope: Any, slots: Any, kv_format: Any, scales: Any) -> _Passed:
    # kv_cache [num_blocks, page_block_size, 1, bytes_per_token]
    check_plain("kv_cache", kv_cache)
    _is_one_of("kv_cache", kv_cache, CACHE_DTYPES)
    formats = {fmt.bytes_per_token: fmt for fmt in FORMATS.values()}
    known = " or ".join(f"{n} ({fmt.name.upper()})" for n, fmt in formats.items())
    shape = list(kv_cache.shape)
    if len(shape) != 4 or shape[1] < 1 or shape[2] != 1:
        _no("kv_cache", f"must be [num_blocks, page_block_size >= 1, 1, {known}]", shape)
    fmt = formats.get(int(shape[3]))  # torch.compile has symbols, which do not hash
    if fmt is None:
        _no("kv_cache", f"last dim must be the bytes of a token, {known}", shape[3])
    if kv_format is not None:
        check_format(kv_format)
        if kv_format != fmt:
            needed = f"must be {fmt.name.upper()} for a cache of {fmt.bytes_per_token} bytes a token"
            _no("kv_format", needed, kv_format.name.upper())
    if kv_cache.device.type not in ("cpu", "cuda"):
        _no("kv_cache", "device must be cpu or cuda", kv_cache.device)
    if shape[0] * shape[1] > INT32_MAX:
        needed = f"num_blocks * page_block_size must be at most {INT32_MAX}"
        _no("kv_cache", needed, f"{shape[0]} * {shape[1]} = {shape[0] * shape[1]}")
    if kv_cache.stride(3) != 1:
        _no("kv_cache", "last dim must be contiguous (stride 1)", f"stride {kv_cache.stride(3)}")
    if shape[1] > 1 and kv_cache.stride(1) != fmt.bytes_per_token:
        _no("kv_cache", f"token stride (dim 1) must be {fmt.bytes_per_token} bytes", kv_cache.stride(1))
    if shape[0] > 1 and kv_cache.stride(0) % ALIGN:
        _no("kv_cache", f"page stride (dim 0) must be a multiple of {ALIGN} bytes", kv_cache.stride(0))
    check_writable("kv_cache", kv_cache)

    # the tokens
    _is_rows("latent", latent, fmt.d_nope, f"NoPE values of {fmt.name.upper()}")
    _is_rows("rope", rope, fmt.d_rope, f"RoPE values of {fmt.name.upper()}")
    check_plain("slots", slots)
    _is_one_of("slots", slots, (torch.int64, torch.int32))
    n = latent.shape[0]
    if n > MAX_TOKENS:
        _no("latent", f"must have at most {MAX_TOKENS} rows", n)
    if rope.shape[0] != n:
        _no("rope", f"must have {n} rows as latent", rope.shape[0])
    if slots.shape != (n,):
        _no("slots", f"shape must be [n] = [{n}], an entry for each row of latent", list(slots.shape))
    for name, t in (("latent", latent), ("rope", rope), ("slots", slots)):
        if t.device != kv_cache.device:
            _no(name, f"must be on the device of kv_cache ({kv_cache.device})", t.device)

    if not isinstance(scales, str):
        _no("scales", 'must be "pow2" or "amax"', type(scales).__name__, TypeError)
    if scales not in ("pow2", "amax"):
        _no("scales", 'must be "pow2" or "amax"', f'"{scales}"')
    if scales == "amax" and fmt.scale_bytes == 1:
        _no("scales", f'must be "pow2" for {fmt.name.upper()}, whose scales are e8m0', '"amax"')
    return _Passed(fmt.name, n == 0 or shape[0] == 0, tuple(map(num_bytes_of, (kv_cache, latent, rope, slots))))


def _is_rows(name: str, t: Any, width: int, what: str) -> None:
    """[n, width] bf16 that 16-byte loads can read."""
    check_plain(name, t)
    _is_one_of(name, t, (torch.bfloat16,))
    if t.dim() != 2 or t.shape[1] != width:
        _no(name, f"must be [n, {width}], the {what}", list(t.shape))
    if t.stride(1) != 1:
        _no(name, "last dim must be contiguous (stride 1)", f"stride {t.stride(1)}")
    if t.shape[0] > 1 and 2 * t.stride(0) % ALIGN:
        _no(
            name,
            f"stride of dim 0 must be a multiple of {ALIGN} bytes ({ALIGN // 2} elements)",
            f"{t.stride(0)} elements",
        )


def _is_one_of(name: str, t: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if t.dtype not in dtypes:
        _no(name, f"dtype must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}", t.dtype, TypeError)


def _no(name: str, needed: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: {needed}, got {got}")
