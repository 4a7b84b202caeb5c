"""Who does what: `plan_decode` deals the key blocks of all requests to one wave of CTAs; a `DecodePlan` holds it.

A kernel is launched with P parts (CTAs per query token and tile of heads). Each part is a run of consecutive key
blocks, all about equally long, possibly from several requests; a request that two or more parts share is split. Two
pieces are merged by the part that ends last, three or more behind the main kernel (`mla_cute.combine`). Hopper's kernel for
small batches reads no plan (`settle`). The rules, and the records but for their last field, are those of FlashMLA's
metadata kernel; `mla_cute.reference.plan` states them, `mla_cute.schedule_kernel` computes them on the device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import GetAttrKey, register_pytree_node

from . import reference
from .target import Target, is_recorded, is_traced, target
from .validate import (
    D_V,
    FORMATS,
    HEAD_TILE,
    INT32_MAX,
    MAX_HEADS,
    MAX_S_Q,
    MAX_TOPK,
    Problem,
    check_dense,
    check_int,
    check_plain,
)


@dataclasses.dataclass(frozen=True, eq=False)
class DecodePlan:
    """The result of `plan_decode`: for calls of one shape on one device, and for the lengths it was made from.

    Fields are named as in the call; `tile_n` (keys a block), `fixed_overhead_blocks` and `config` say how it was made.
    """

    b: int
    s_q: int
    h_q: int
    topk: int
    has_topk_length: bool
    extra_topk: int  # 0: no extra keys
    has_extra_topk_length: bool
    num_parts: int  # P
    config: Any
    metadata: torch.Tensor  # [P, 8] int32, a record a part: see `mla_cute.reference.plan`
    num_splits: torch.Tensor  # [b + 1] int32: splits of the requests before each request

    def __post_init__(self) -> None:
        """Kernels trust these: raise ValueError naming the field where one cannot be a plan's."""
        if is_dynamo_compiling() or is_traced(self.metadata):  # the op makes the plan again when the graph runs
            return
        check_int("num_parts", self.num_parts)
        if self.num_parts < 1:
            raise ValueError(f"num_parts: must be at least 1, got {self.num_parts}")
        for name, shape in (("metadata", (self.num_parts, 8)), ("num_splits", (self.b + 1,))):
            t = getattr(self, name)
            check_dense(name, t)
            if t.dtype != torch.int32 or t.shape != shape or not t.is_contiguous():
                raise ValueError(
                    f"{name}: must be int32 {list(shape)}, contiguous, "
                    f"got {t.dtype} {list(t.shape)} with strides {list(t.stride())}"
                )
        if self.num_splits.device != self.metadata.device:
            got = self.num_splits.device
            raise ValueError(f"num_splits: must be on the device of metadata ({self.device}), got {got}")
        if is_traced(self.num_splits):
            raise TypeError("num_splits: must be a tensor with memory as metadata is, got a FakeTensor")

    @property
    def device(self) -> torch.device:
        return self.metadata.device

    @property
    def tile_n(self) -> int:
        return self.config.tile_n

    @property
    def fixed_overhead_blocks(self) -> int:
        return overhead(self.config, self.b, self.topk, self.extra_topk, self.num_parts)

    @property
    def max_splits(self) -> int:
        """The most pieces of one request: exact without lengths, which are on the device, else an upper bound."""
        has_lengths = self.has_topk_length or self.has_extra_topk_length
        return most_splits(self.config, self.b, self.topk, self.extra_topk, has_lengths, self.num_parts)

    @functools.cached_property
    def kind(self) -> object:
        """One object for all plans that differ in their tensors alone: what one of them fits, the others fit."""
        key = (
            *(type(self.metadata), type(self.num_splits)),  # a fake one fits no real call
            *(self.b, self.s_q, self.h_q, self.topk, self.has_topk_length, self.extra_topk, self.has_extra_topk_length),
            *(self.num_parts, self.config, self.device),
        )
        if len(_kinds) >= _MAX_KINDS:
            _kinds.clear()
        try:
            return _kinds.setdefault(key, key)
        except TypeError:  # a config that does not hash
            return key

    def check(
        self,
        *,
        b: int,
        s_q: int,
        h_q: int,
        topk: int,
        has_topk_length: bool,
        extra_topk: int = 0,
        has_extra_topk_length: bool = False,
        device: torch.device,
        config: Any = None,
    ) -> None:
        """Raise ValueError naming the first field in which a call differs from what the plan was made for.

        config: the call's; None when the call takes the plan's own. Costs about 1 us. The lengths themselves are on the
        device and are not compared.
        """
        if is_traced(self.metadata) or is_traced(self.num_splits):
            raise TypeError("plan: must hold tensors with memory, as those of the call are, got fake ones")
        if (
            (b, s_q, h_q, topk, has_topk_length) == (self.b, self.s_q, self.h_q, self.topk, self.has_topk_length)
            and (extra_topk, has_extra_topk_length) == (self.extra_topk, self.has_extra_topk_length)
            and device == self.metadata.device
            and (config is None or config is self.config or config == self.config)
        ):
            return
        call = {"b": b, "s_q": s_q, "h_q": h_q, "topk": topk, "has_topk_length": has_topk_length}
        call |= {"extra_topk": extra_topk, "has_extra_topk_length": has_extra_topk_length, "device": device}
        for name, value in call.items():
            if value != getattr(self, name):
                raise ValueError(f"plan: was made for {name} {getattr(self, name)}, got a call with {name} {value}")
        for name in ("tile_n", "fixed_overhead_blocks"):
            ours, theirs = getattr(self.config, name), getattr(config, name)
            if ours != theirs:
                raise ValueError(f"plan: was made with config.{name} {ours}, got a call with {theirs}")
        raise ValueError(f"plan: was made with config {self.config}, got a call with {config}")


_kinds: dict[tuple, tuple] = {}
_MAX_KINDS = 4096  # a long-running server has many shapes: then forgotten, and new objects


# torch.export takes apart what goes in and comes out. torch_ops is imported when that happens.


def _flatten(plan: DecodePlan) -> tuple[list, tuple]:
    from . import torch_ops

    return torch_ops.flatten(plan)


def _flatten_with_keys(plan: DecodePlan) -> tuple[list, tuple]:
    children, context = _flatten(plan)
    return [(GetAttrKey(name), child) for name, child in zip(("metadata", "num_splits"), children)], context


def _unflatten(children: Iterable, context: tuple) -> DecodePlan:
    from . import torch_ops

    return torch_ops.unflatten(children, context)


register_pytree_node(
    DecodePlan,
    _flatten,
    _unflatten,
    serialized_type_name="mla_cute.DecodePlan",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)


def overhead(config: Any, b: int, topk: int, extra_topk: int, num_parts: int) -> int:
    """What beginning a request costs, in blocks, as the plan charges it: the Config's, or where that is None by the load.

    Beginning a request takes about one block's time (H200). Charged with 2, requests stay whole where that costs little;
    with few blocks a part even parts gain more than splits cost (b 16: 8 blocks a part instead of 9). FlashMLA charges 5,
    which keeps more requests whole, but gives parts of many short requests too little to do.
    """
    if config.fixed_overhead_blocks is not None:
        return config.fixed_overhead_blocks
    blocks = -(-topk // config.tile_n) + -(-extra_topk // config.tile_n)  # lengths are on the device
    return 1 if b * blocks <= FEW_BLOCKS * num_parts else 2


def most_splits(config: Any, b: int, topk: int, extra_topk: int, has_lengths: bool, num_parts: int) -> int:
    """`max_splits` of a plan made with this config. It decides whether combine is launched, and plans are tensors that may come
    from anywhere: where the config leaves the charge to the load, the bound holds for every charge that is in use."""
    charges = CHARGES if config.fixed_overhead_blocks is None else (config.fixed_overhead_blocks,)
    how = b, topk, extra_topk, has_lengths, num_parts, config.tile_n
    return max(max_splits(*how, charge) for charge in charges)


@functools.lru_cache(4096)
def max_splits(
    b: int, topk: int, extra_topk: int, has_lengths: bool, num_parts: int, tile_n: int, fixed_overhead_blocks: int
) -> int:
    """The most pieces that the plan of such a call cuts a request into: exact, or with lengths (on the device) at most.

    A part within a request has step = payload - overhead of its blocks, a request's first and last part one or more.
    """
    blocks, overhead = -(-topk // tile_n) + -(-extra_topk // tile_n), fixed_overhead_blocks
    if b == 0:
        return 1
    if has_lengths:
        step = -(-b * (1 + overhead) // num_parts)  # when all have one block, the shortest
        return min(num_parts, blocks, 2 + (blocks - 2) // step)
    cost = blocks + overhead
    step = -(-b * cost // num_parts)
    x, cuts = 0, collections.Counter()  # where a part ends, on the axis of all costs; cuts within each request
    while x < b * cost:  # reference.plan's walk
        req = (x + step + overhead) // cost
        x = max(x + step, cost * req) if req < b else b * cost
        cuts[x // cost] += x % cost != 0
    return 1 + max(cuts.values())


def scratch_size(num_parts: int, s_q: int, h_q: int) -> int:
    """fp32 values of scratch: two slots a part, for every query token O of whole groups of 16 heads, lse twice, and flags.

    A flag, 64 bits, is for 256 columns of a tile of 64 heads. One part alone splits nothing: 0.
    """
    if num_parts == 1:
        return 0
    return 2 * num_parts * s_q * (-(-h_q // 16) * 16 * D_V + 2 * h_q + 4 * -(-h_q // HEAD_TILE))


FEW_BLOCKS = 16  # a part: then the plan deals them evenly
CHARGES = (1, 2, 5)  # `overhead`'s, and FlashMLA's
_NAMES = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")


def plan_decode(
    q: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    config: Any = None,
    impl: ModuleType | str | None = None,
    backend: str | None = None,
) -> DecodePlan:
    """Plan `sparse_decode` calls with these shapes and lengths: one small kernel, or plain Python for CPU tensors.

    A plan holds for every call with the same b, s_q, h_q, topk, extra_topk, device and config whose `topk_length` and
    `extra_topk_length` have the same values, whatever q and indices contain: the layers of a model share one. Without
    lengths it holds as long as the shapes do. A call with other values than its plan's ends, but its results are wrong, and
    nobody notices: the values are on the device, and torch's count of a tensor's in-place changes misses those of kernels
    and of a graph's replays, and counts those of other slices of the same buffer.

    Args:
        q: [b, s_q, h_q, d_qk]; only its shape and device matter.
        indices: [b, s_q, topk]; only its shape and device matter.
        topk_length: int32 [b] or None: how many entries of `indices` count, clamped to [0, topk].
        extra_indices: [b, s_q, extra_topk] or None; only its shape and device matter. Its keys come in blocks of their
            own, behind those of `indices`.
        extra_topk_length: int32 [b] or None: how many entries of `extra_indices` count, clamped to [0, extra_topk].
        config: the implementation's `Config`, as in `sparse_decode`; default: its `default_config`.
        impl: the implementation, as in `sparse_decode`; default: `select_impl(q.device, backend=backend)`.
        backend: as in `sparse_decode`.

    Work is queued on torch's current stream of q's device and the call does not wait for it. It may be captured in a
    CUDA graph (after a first call, which compiles): a replay plans anew, from the lengths it finds. A call captured with a
    plan made outside is replayed with that plan: indices and keys may be others then, lengths may not. With
    impl=mla_cute.reference the plan is made on the host, and on a GPU the call waits for the lengths.

    Raises ValueError or TypeError naming the argument, NotImplementedError for a device without a kernel. The planner's
    kernel counts costs in 32 bits: b * (blocks of topk and extra_topk + fixed_overhead_blocks) must be below about 2**30.
    """
    tensors = q, indices, topk_length, extra_indices, extra_topk_length
    if is_dynamo_compiling() or is_recorded(_NAMES, tensors):  # an op of a graph
        from . import torch_ops

        return torch_ops.plan_decode(
            q,
            indices,
            topk_length=topk_length,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
            config=config,
            impl=impl,
            backend=backend,
        )
    choice = choose(q, indices, topk_length, extra_indices, extra_topk_length, config, impl, backend)
    b, s_q, h_q, topk, extra_topk, where, impl, config, num_parts = choice
    tile_n, device = config.tile_n, q.device
    charge = overhead(config, b, topk, extra_topk, num_parts)
    extra = {"extra_topk": extra_topk, "extra_topk_length": extra_topk_length}
    if where.arch != "cpu" and impl is not reference:  # the reference also serves GPUs that the planner's kernel does not
        lengths = b, topk, topk_length
        metadata, num_splits = _plan_by_kernel(*lengths, num_parts, tile_n, charge, device, where, **extra)
    else:
        keys = reference.sparse_num_keys(b, topk, topk_length, **extra, tile_n=tile_n)
        metadata, num_splits = reference.plan(keys, num_parts, tile_n=tile_n, fixed_overhead_blocks=charge)
        metadata, num_splits = metadata.to(device), num_splits.to(device)
    return DecodePlan(
        *(b, s_q, h_q, topk, topk_length is not None, extra_topk, extra_topk_length is not None),
        *(num_parts, config, metadata, num_splits),
    )


def problem_of(h_q: int, d_qk: int, has_topk_length: bool, has_extra: bool, has_extra_topk_length: bool) -> Problem:
    """As far as a plan's arguments tell."""
    return Problem(
        h_q=h_q,
        d_qk=d_qk,
        kv_format=next((fmt.name for fmt in FORMATS.values() if fmt.d_qk == d_qk), Problem.kv_format),
        has_topk_length=has_topk_length,
        has_extra=has_extra,
        has_extra_topk_length=has_extra_topk_length,
    )


def choose(q, indices, topk_length, extra_indices, extra_topk_length, config, impl, backend) -> tuple:
    """What `plan_decode` knows before it plans: (b, s_q, h_q, topk, extra_topk, where, impl, config, num_parts)."""
    b, s_q, h_q, d_qk, topk, extra_topk = _check(q, indices, topk_length, extra_indices, extra_topk_length)
    has = topk_length is not None, extra_indices is not None, extra_topk_length is not None
    problem = problem_of(h_q, d_qk, *has)
    from .interface import check_config, select_impl  # not at the top: interface imports this module

    where = target(q.device, backend)
    impl = select_impl(q.device, impl, backend)
    if config is None:
        config = impl.default_config(problem)
    check_config(impl, config)
    config.check(problem)
    return b, s_q, h_q, topk, extra_topk, where, impl, config, config.num_parts(problem, s_q, where.num_sms)


def settle(config: Any, problem: Problem, b: int, s_q: int, topk: int, extra_topk: int, where: Target) -> tuple[Any, int]:
    """(the Config whose kernel runs such a call, CTAs of a cluster for each request; 0: none, the kernel takes a plan).

    An implementation's Config may leave that to the load, by a method of this name.
    """
    if not hasattr(config, "settle"):
        return config, 0
    return config.settle(problem, b, s_q, topk, extra_topk, where.num_sms, where.max_clusters)


def _plan_by_kernel(
    b: int,
    topk: int,
    topk_length: torch.Tensor | None,
    num_parts: int,
    tile_n: int,
    charge: int,
    device: torch.device,
    where: Target,
    extra_topk: int = 0,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """metadata [P, 8] and num_splits [b + 1] by one launch of `schedule_kernel`."""
    from . import schedule_kernel  # loads the DSL

    cost = b * (-(-topk // tile_n) + -(-extra_topk // tile_n) + charge)  # at most
    if 2 * cost + num_parts + charge >= INT32_MAX:  # the farthest point on the kernel's cost axis
        blocks = "topk and extra_topk" if extra_topk else "topk"
        raise ValueError(f"indices: b * (blocks of {blocks} + {charge}) must be below about 2**30, got {cost}")
    use_workspace = schedule_kernel.needs_workspace(b, num_parts)
    problem = schedule_kernel.PlanProblem(topk_length is not None, use_workspace, extra_topk_length is not None)
    kernel = where.load(schedule_kernel, problem, None, where.arch)
    metadata = torch.empty(num_parts, 8, dtype=torch.int32, device=device)
    num_splits = torch.empty(b + 1, dtype=torch.int32, device=device)
    workspace = None
    if use_workspace:
        workspace = torch.empty(schedule_kernel.workspace_size(b, num_parts), dtype=torch.int32, device=device)
    lengths = topk_length, topk, extra_topk_length, extra_topk
    kernel(*lengths, tile_n, charge, workspace, metadata, num_splits)  # on the tensors' device
    return metadata, num_splits


def _check(q, indices, topk_length, extra_indices, extra_topk_length) -> tuple[int, int, int, int, int, int]:
    """(b, s_q, h_q, d_qk, topk, extra_topk or 0) of arguments that can be planned."""
    options = {"topk_length": topk_length, "extra_indices": extra_indices, "extra_topk_length": extra_topk_length}
    for name, t, dims in (
        ("q", q, "[b, s_q, h_q, d_qk]"),
        ("indices", indices, "[b, s_q, topk]"),
        ("topk_length", topk_length, "[b]"),
        ("extra_indices", extra_indices, "[b, s_q, extra_topk]"),
        ("extra_topk_length", extra_topk_length, "[b]"),
    ):
        if t is None and name in options:
            continue
        check_plain(name, t)
        if t.dim() != dims.count(",") + 1:
            raise ValueError(f"{name}: must be {dims}, got shape {list(t.shape)}")
        if t.device != q.device:
            raise ValueError(f"{name}: must be on the device of q ({q.device}), got {t.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q: device must be cpu or cuda, got {q.device}")
    b, s_q, h_q, d_qk = q.shape
    if not 1 <= s_q <= MAX_S_Q or not 1 <= h_q <= MAX_HEADS:
        raise ValueError(f"q: must have 1 <= s_q <= {MAX_S_Q} and 1 <= h_q <= {MAX_HEADS}, got shape {list(q.shape)}")
    for name, t, topk in (("indices", indices, "topk"), ("extra_indices", extra_indices, "extra_topk")):
        if t is not None and (t.shape[:2] != (b, s_q) or t.shape[2] < 1):
            needed = f"shape must be [b, s_q, {topk}] = [{b}, {s_q}, 1 or more]"
            raise ValueError(f"{name}: {needed}, got {list(t.shape)}")
        if t is not None and t.shape[2] > MAX_TOPK:
            raise ValueError(f"{name}: {topk} (dim 2) must be at most {MAX_TOPK}, got {t.shape[2]}")
    for name, t in (("topk_length", topk_length), ("extra_topk_length", extra_topk_length)):
        if t is not None and t.dtype != torch.int32:
            raise TypeError(f"{name}: dtype must be int32, got {t.dtype}")
        if t is not None and t.shape[0] != b:
            raise ValueError(f"{name}: shape must be [b] = [{b}], got {list(t.shape)}")
    if extra_topk_length is not None and extra_indices is None:
        raise ValueError("extra_indices: must be given with extra_topk_length, got None")
    return b, s_q, h_q, d_qk, indices.shape[2], 0 if extra_indices is None else extra_indices.shape[2]
