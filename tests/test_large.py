"""Addresses past 32 bits and sizes at their limits: on a GPU, and in the emulator on memory that is mapped but not there.

The oracle never sees a large address: it gets the compact tensors, the kernel the same values far apart; or it gets slices.

Scratch is not here: 2 P s_q h_q 513 values, h_q in whole groups of 16, with P s_q head_tiles <= the SMs are some 9 million
at most. The combine alone takes any number of pieces and is here.
"""

import contextlib
import dataclasses
import gc
import math
import mmap
import types

import pytest
import torch
from decode_checks import compile_kernels, decode_and_check
from test_combine import fragment_order, rounded

import mla_cute
from mla_cute import emulator, jit, reference, schedule
from mla_cute.cache_writer import write_kv_cache
from mla_cute.kv_cache import FORMATS, planes, quantize_kv_cache
from mla_cute.target import target
from mla_cute.testing import (
    INT_MAX,
    SPARSE_DECODE_LSE,
    SPARSE_DECODE_OUT,
    Case,
    Inputs,
    assert_bitwise,
    assert_close,
    make_inputs,
)
from mla_cute.validate import MAX_S_Q, MAX_TOPK, Problem, check_sparse_decode, check_writable

MAP_NORESERVE = 0x4000  # Linux; the mmap module does not name it before Python 3.13
GB = 10**9
SENTINEL = 77.0


# ----- tensors that reach far -----------------------------------------------------------------------------------------


def allocate(num_bytes, device):
    """Bytes that are no number of a key: NaN on a GPU. On the CPU zeros, and pages that nobody touches take no memory."""
    if torch.device(device).type == "cuda":
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        pages = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    except OSError as e:
        pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of address space: {e}")
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]


def far_apart(x, strides):
    """x in memory of its own with these strides, in elements."""
    extent = 1 + sum(stride * (n - 1) for stride, n in zip(strides, x.shape))
    view = allocate(extent * x.element_size(), x.device).view(x.dtype).as_strided(x.shape, strides)
    check_writable("strides", view)
    return view.copy_(x)


@dataclasses.dataclass(frozen=True)
class Pages:
    """Where a cache's pages lie: num_blocks of them with `page` tokens each, `stride` bytes apart (they may overlap)."""

    num_blocks: int
    page: int
    stride: int

    @property
    def capacity(self):
        return self.num_blocks * self.page

    def address(self, token, row_bytes):
        return token // self.page * self.stride + token % self.page * row_bytes

    def cache(self, fmt, device):
        record = fmt.bytes_per_token
        pool = allocate((self.num_blocks - 1) * self.stride + self.page * record, device)
        return pool.as_strided((self.num_blocks, self.page, 1, record), (self.stride, record, record, 1))


def spread_tokens(n, pages, row_bytes, seed=0):
    """n tokens whose rows do not overlap: first and last, those beside each power of two of bytes, others at random."""
    anchors = [0, pages.capacity - 1]
    for power in range(31, 48):
        p, rest = divmod(2**power, pages.stride)
        token = p * pages.page + min(rest // row_bytes, pages.page - 1)
        anchors += [t for t in (token - 1, token, token + 1) if 0 < t < pages.capacity - 1]
    g = torch.Generator().manual_seed(seed)
    others = torch.randint(0, pages.capacity, (6 * n,), generator=g).tolist()
    others += range(pages.capacity if pages.capacity < 6 * n else 0)
    kept, end = set(), math.inf
    for token in sorted({*anchors, *others}, reverse=True):  # the last one first: it stays
        if pages.address(token, row_bytes) + row_bytes <= end:
            kept.add(token)
            end = pages.address(token, row_bytes)
    chosen = torch.tensor([t for t in dict.fromkeys(anchors + others) if t in kept][:n])
    assert len(chosen) == n > len(anchors) and (chosen == pages.capacity - 1).any()
    return chosen[torch.randperm(n, generator=g)]


def relocated(cache, indices, length, fmt, pages):
    """(cache, indices): the attended tokens of a cache in another one; what is past its end stays past the end."""
    indices, capacity = indices.clone(), cache.shape[0] * cache.shape[1]
    beyond = indices >= capacity
    indices[beyond] = (indices[beyond].long() + (pages.capacity - capacity)).clamp(max=INT_MAX).int()
    valid = (indices >= 0) & ~beyond
    if length is not None:
        valid &= torch.arange(indices.shape[-1], device=indices.device) < length[:, None, None]
    used, rank = indices[valid].long().unique(return_inverse=True)
    tokens = spread_tokens(len(used), pages, fmt.row_bytes).to(indices.device)
    large = pages.cache(fmt, indices.device)
    for to, source in zip(planes(large, fmt), planes(cache, fmt)):
        to[tokens // pages.page, tokens % pages.page] = source[used // cache.shape[1], used % cache.shape[1]]
    indices[valid] = tokens[rank].int()
    return large, indices


def moved(x, case, main=None, extra=None, **strides):
    """(arguments, out, lse) of a call that must do what x asks: caches as Pages say, q, indices, extra_indices, out and
    lse with these strides; out and lse NaN."""
    y = x
    if main:
        cache, indices = relocated(x.kv_cache, x.indices, x.topk_length, case.format, main)
        y = dataclasses.replace(y, kv_cache=cache, indices=indices)
    if extra:
        cache, indices = relocated(x.extra_kv_cache, x.extra_indices, x.extra_topk_length, case.format, extra)
        y = dataclasses.replace(y, extra_kv_cache=cache, extra_indices=indices)
    b, s_q, h_q, _ = x.q.shape
    outputs = {
        "out": torch.full((b, s_q, h_q, 512), math.nan, dtype=torch.bfloat16, device=x.q.device),
        "lse": torch.full((b, s_q, h_q), math.nan, device=x.q.device),
    }
    for name, s in strides.items():
        if name in outputs:
            outputs[name] = far_apart(outputs[name], s)
        else:
            y = dataclasses.replace(y, **{name: far_apart(getattr(y, name), s)})
    return y, outputs["out"], outputs["lse"]


def check_moved(x, case, backend=None, impl=None, config=None, **where):
    y, out, lse = moved(x, case, **where)
    how = {"backend": backend, "impl": impl, "config": config}
    mla_cute.sparse_decode(y.q, y.kv_cache, y.indices, **y.kwargs(), out=out, lse=lse, **how)
    if out.is_cuda:
        torch.cuda.synchronize()
    ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


# ----- emulate --------------------------------------------------------------------------------------------------------

# Strides in elements; of q and out they are less than 2^40 bytes, TMA's limit.
EMULATED = {
    "every token of a cache": (
        Case(b=4, h_q=5, s_q=2, s_kv=70, topk=150, page_block_size=7, topk_length=True, holes=True, sink=True, seed=2),
        {"main": Pages(INT_MAX // 7, 7, 7 * 656), "indices": (2**33 + 1, 2**32 + 3, 1), "lse": (2**33 + 1, 2**32 + 7, 1)},
        {"q": (2**36 + 8, 2**34 + 64, 2**31 + 8, 1), "out": (2**36 + 8, 2**34 + 64, 2**31 + 24, 1)},
    ),
    "far pages, two tiles of heads": (
        Case(b=4, h_q=70, s_kv=90, topk=190, page_block_size=11, topk_length=True, outside=True),
        {"main": Pages(9, 61, 2**39 + 16 * 41), "indices": (2**31 + 1, 2**34 + 3, 1), "lse": (2**31 + 128, 2**35 + 1, 1)},
        {"q": (2**31 + 64, 2**33 + 8, 2**34 + 72, 1), "out": (2**37 + 8, 2**38 + 64, 2**30 + 24, 1)},
    ),
    "one page, and an extra cache": (
        Case(b=4, h_q=5, s_q=2, s_kv=60, topk=100, kv_format="model1", topk_length=True, extra_topk=90, sink=True,
             extra_topk_length=True, holes=True),
        {"main": Pages(1, INT_MAX, 0x1000), "extra": Pages(INT_MAX // 61, 61, 35_712), "lse": (2**31 + 5, 2**34 + 1, 1),
         "indices": (2**31 + 1, 2**34 + 3, 1), "extra_indices": (2**34 + 1, 2**31 + 3, 1)},
        {"q": (2**34 + 8, 2**37 + 64, 2**31 + 24, 1), "out": (2**33 + 64, 2**31 + 8, 2**36 + 72, 1)},
    ),
}  # fmt: skip


@pytest.mark.emulate
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_kernel_on_large_addresses(name):
    from mla_cute.sm90 import sparse_decode

    case, where, rows = EMULATED[name]
    how = {"backend": "emulator", "config": sparse_decode.Config(fixed_overhead_blocks=5)}  # some whole, some split
    with emulator.session(num_sms=3 * case.s_q * case.problem.head_tiles) as s:  # three parts
        x = make_inputs(case)
        plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), **how)
        check_moved(x, case, **how, **where, **rows)
    splits = plan.num_splits.diff()
    assert (splits == 1).any() and (splits > 1).any()
    assert s.findings == [] and len(s.grids) == 3  # two plans, the kernel, which merges pairs


@pytest.mark.emulate
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_emulated_writer_on_large_addresses(fmt):
    n, pages = 80, Pages(INT_MAX // 61, 61, fmt.page_bytes(61))
    g = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(n, d, generator=g).to(torch.bfloat16) for d in (fmt.d_nope, fmt.d_rope))
    small = Pages(n, 1, 656).cache(fmt, "cpu")
    write_kv_cache(small, latent, rope, torch.arange(n))
    slots = spread_tokens(n, pages, fmt.row_bytes)
    cache = pages.cache(fmt, "cpu")
    far = far_apart(latent, (2**33 + 8, 1)), far_apart(rope, (2**32 + 64, 1)), far_apart(slots, (2**31 + 1,))
    with emulator.session():
        write_kv_cache(cache, *far, backend="emulator")
    for got, expected in zip(planes(cache, fmt), planes(small, fmt)):
        assert_bitwise(got[slots // 61, slots % 61], expected[:, 0], name="kv_cache")
        others = torch.tensor(sorted({*(slots + 1).tolist(), *(slots - 1).tolist()} - {*slots.tolist(), -1, pages.capacity}))
        assert (got[others // 61, others % 61] == 0).all()


# ----- inputs of many rows, checked in slices -------------------------------------------------------------------------


def shared_cache_inputs(case, device, listed=None, num_tokens=4096, seed=0):
    """Inputs of many requests over one small cache. The first `listed` entries (default: all) of each list are tokens, the
    others INT_MAX; lengths, skewed to short ones, are at most `listed`, and some 0."""
    g = torch.Generator(device).manual_seed(seed)
    fmt, listed = case.format, min(listed or case.topk, case.topk)

    def keys(topk, listed, page, has_length):
        kv = torch.empty(-(-num_tokens // page), page, 1, fmt.d_qk, dtype=torch.bfloat16, device=device)
        kv = kv.normal_(generator=g).mul_(0.1).clamp_(-1, 1)
        cache = quantize_kv_cache(kv, kv_format=fmt)
        indices = torch.full((case.b, case.s_q, topk), INT_MAX, dtype=torch.int32, device=device)
        tokens = torch.randint(0, num_tokens, (case.b, case.s_q, listed), generator=g, device=device, dtype=torch.int32)
        indices[..., :listed] = tokens
        length = None
        if has_length:
            length = ((listed + 1) * torch.rand(case.b, generator=g, device=device) ** 4).int().clamp(max=listed)
        return cache, indices, length, kv

    q = torch.empty(case.b, case.s_q, case.h_q, fmt.d_qk, dtype=torch.bfloat16, device=device)
    q.normal_(generator=g).clamp_(-1, 1)
    sink = torch.randn(case.h_q, generator=g, device=device) if case.sink else None
    cache, indices, length, kv = keys(case.topk, listed, case.page_block_size, case.topk_length)
    extra = None, None, None, None
    if case.extra_topk:
        page = case.extra_page_block_size or case.page_block_size
        extra = keys(case.extra_topk, min(listed, case.extra_topk), page, case.extra_topk_length)
    return Inputs(q, cache, indices, length, sink, fmt.d_qk**-0.55, kv, *extra)


def check_all_rows(x, listed=None, step=2048, impl=None):
    """One call; every row of it against the reference of slices, which look at the first `listed` entries of each list."""
    b, s_q, h_q, _ = x.q.shape
    out = torch.full((b, s_q, h_q, 512), math.nan, dtype=torch.bfloat16, device=x.q.device)
    lse = torch.full((b, s_q, h_q), math.nan, device=x.q.device)
    mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), out=out, lse=lse, impl=impl)
    if out.is_cuda:
        torch.cuda.synchronize()
    rows = {"q": x.q, "out": out, "lse": lse, "indices": x.indices, "extra_indices": x.extra_indices}
    rows = {name: None if t is None else t.flatten(0, 1) for name, t in rows.items()}  # views
    lengths = {"topk_length": x.topk_length, "extra_topk_length": x.extra_topk_length}
    lengths = {name: None if t is None else t.repeat_interleave(s_q) for name, t in lengths.items()}
    for i in range(0, b * s_q, step):
        part = {name: None if t is None else t[i : i + step, None] for name, t in rows.items()}
        for name in ("indices", "extra_indices"):
            part[name] = None if part[name] is None else part[name][..., :listed]
        ref_out, ref_lse = reference.sparse_decode(
            part["q"],
            x.kv_cache,
            part["indices"],
            softmax_scale=x.softmax_scale,
            attn_sink=x.attn_sink,
            extra_kv_cache=x.extra_kv_cache,
            extra_indices=part["extra_indices"],
            **{name: None if t is None else t[i : i + step] for name, t in lengths.items()},
        )
        assert_close(part["out"], ref_out, **SPARSE_DECODE_OUT, name=f"out of rows {i}...")
        assert_close(part["lse"], ref_lse, **SPARSE_DECODE_LSE, name=f"lse of rows {i}...")


def one_long_list(case, device, seed=0):
    """(Inputs, the same with the valid entries alone): -1 nearly everywhere in a list of case.topk entries; tokens at its
    ends, and beside each power of two of entries."""
    topk = case.topk
    near = [n + i for n in (0, *(2**k for k in range(8, 32)), topk) for i in range(-3, 4)]
    positions = sorted({n for n in near if 0 <= n < topk})
    short = shared_cache_inputs(dataclasses.replace(case, topk=len(positions)), device, seed=seed)
    indices = torch.full((1, 1, topk), -1, dtype=torch.int32, device=device)
    for i, position in enumerate(positions):  # one by one: nothing here has to count past 2^31
        indices[0, 0, position] = short.indices[0, 0, i]
    return dataclasses.replace(short, indices=indices), short


def check_one_long_list(case, device, impl=None):
    x, short = one_long_list(case, device)
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
    ref_out, ref_lse = reference.sparse_decode(short.q, short.kv_cache, short.indices, **short.kwargs())
    assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


def combine_in_slices(b, blocks, num_parts, s_q, h_q, device, kernel):
    """`kernel` (metadata, num_splits, o_partial, lse_partial, attn_sink, out, lse) on pieces of b requests, three or more of
    each, checked at the first, the middle and the last query token. Returns elements of the pieces."""
    g = torch.Generator(device).manual_seed(0)
    metadata, num_splits = reference.plan([64 * blocks] * b, num_parts)
    assert num_splits.diff().min() >= 3
    o_partial = torch.empty(2 * num_parts, s_q, h_q, 512, device=device).normal_(generator=g)
    for piece in o_partial:
        piece.copy_(rounded(piece))
    lse_partial = torch.randn(2 * num_parts, s_q, h_q, generator=g, device=device) * 8
    sink = torch.randn(h_q, generator=g, device=device)
    out = torch.full((b, s_q, h_q, 512), SENTINEL, dtype=torch.bfloat16, device=device)
    lse = torch.full((b, s_q, h_q), SENTINEL, device=device)
    kernel(metadata.to(device), num_splits.to(device), o_partial, lse_partial, sink, out, lse)
    for s in (0, s_q // 2, s_q - 1):
        ref = [torch.full((b, 1, h_q, *d), SENTINEL, dtype=torch.float64, device=device) for d in ((512,), ())]
        part = (t[:, s : s + 1].double() for t in (o_partial, lse_partial))
        reference.combine(*part, metadata, num_splits, attn_sink=sink.double(), out=ref[0], lse=ref[1])
        assert_close(out[:, s : s + 1], ref[0].bfloat16(), abs_tol=1e-5, rel_tol=1.01 / 128, cos_tol=5e-6, name=f"out {s}")
        assert_close(lse[:, s : s + 1], ref[1].float(), **SPARSE_DECODE_LSE, name=f"lse {s}")
    slots = [piece.slot for piece in reference.partial_pieces(metadata, b)]
    assert max(slots) == len(slots) - 1 > 0
    return len(slots) * s_q * h_q * 512


# ----- cpu: the same on small shapes, with the reference as kernel; what is refused ------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("extra", [False, True])
def test_the_helpers_on_small_shapes(fmt, extra):
    flags = {"topk_length": True, "extra_topk": 40, "extra_topk_length": True, "sink": True} if extra else {}
    case = Case(b=37, h_q=3, s_q=2, topk=50, page_block_size=8, kv_format=fmt, **flags)
    check_all_rows(shared_cache_inputs(case, "cpu", num_tokens=200), step=7)
    x = shared_cache_inputs(case, "cpu", listed=20, num_tokens=200)
    assert (x.indices[..., 20:] == INT_MAX).all() and not (x.indices[..., :20] == INT_MAX).any()
    check_all_rows(x, listed=20, step=7)
    if x.topk_length is not None:
        assert {0, 2, 3} < {*x.topk_length.tolist()} and int(x.topk_length.max()) <= 20
    check_one_long_list(dataclasses.replace(case, b=1, s_q=1, topk=5000, topk_length=False), "cpu")


def test_all_rows_are_checked():
    """A row that is wrong is found, whichever it is."""
    x = shared_cache_inputs(Case(b=37, h_q=3, s_q=2, topk=9), "cpu", num_tokens=200)
    for row in (0, 40, 73):

        def compile(problem, config, arch=None, row=row):
            run = reference.compile(problem, config, arch)

            def launch(*args):
                run(*args)
                args[12].view(-1, 3, 512)[row, 1] += 0.05  # out

            return launch

        faulty = types.ModuleType("faulty")
        faulty.Config, faulty.default_config, faulty.compile = reference.Config, reference.default_config, compile
        with pytest.raises(AssertionError, match=f"out of rows {row // 7 * 7}"):
            check_all_rows(x, step=7, impl=faulty)


def test_combine_in_slices():
    def kernel(metadata, num_splits, o_partial, lse_partial, sink, out, lse):
        reference.combine(o_partial, lse_partial, metadata, num_splits, attn_sink=sink, out=out, lse=lse)

    assert combine_in_slices(5, 20, 30, 3, 2, "cpu", kernel) > 0
    with pytest.raises(AssertionError, match="lse 2"):  # the last query token
        combine_in_slices(5, 20, 30, 3, 2, "cpu", lambda *args: (kernel(*args), args[-1][:, 2].add_(0.1)))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_tokens_are_spread(fmt):
    """To both ends, beside powers of two of bytes; and where pages overlap, no two rows do."""
    pages = Pages(2**22, 64, 64 * 656)
    tokens = spread_tokens(200, pages, fmt.row_bytes)
    assert {0, pages.capacity - 1} <= {*tokens.tolist()} and len(tokens.unique()) == 200
    address = pages.address(tokens, fmt.row_bytes)
    for power in range(31, 38):
        assert ((address - 2**power).abs() < 41984).sum() >= 2
    overlapping = Pages(INT_MAX, 1, 16)
    address = overlapping.address(spread_tokens(200, overlapping, 656), 656).sort().values
    assert (address.diff() >= 656).all() and int(address[-1]) == 16 * (INT_MAX - 1)


def test_a_batch_of_65536_on_the_cpu():
    """The reference's way: seven requests over and over. Query tokens: 64 of each."""
    few = make_inputs(Case(b=7, h_q=1, s_kv=20, topk=3, topk_length=True, sink=True, strided=False))
    want = mla_cute.sparse_decode(few.q, few.kv_cache, few.indices, **few.kwargs())
    for b, s_q in ((65_536, 1), (9, 64)):
        at = torch.arange(b) % 7
        q, indices = few.q[at].expand(-1, s_q, -1, -1), few.indices[at].expand(-1, s_q, -1)
        kwargs = few.kwargs() | {"topk_length": few.topk_length[at]}
        out, lse = mla_cute.sparse_decode(q, few.kv_cache, indices, **kwargs)
        assert_close(out, want[0][at].expand(-1, s_q, -1, -1), **SPARSE_DECODE_OUT)
        assert_close(lse, want[1][at].expand(-1, s_q, -1), **SPARSE_DECODE_LSE)


def shapes(b=2, s_q=1, h_q=128, topk=64, extra_topk=0):
    """Arguments of check_sparse_decode with next to no memory behind them."""

    def indices(topk):
        return allocate(4 * topk, "cpu").view(torch.int32).expand(b, s_q, topk)

    cache = torch.zeros(1, 1, 1, 656, dtype=torch.uint8)
    extra = {"extra_kv_cache": cache, "extra_indices": indices(extra_topk)} if extra_topk else {}
    q = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16).expand(b, s_q, h_q, 576)
    return (q, cache, indices(topk)), extra


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 0},
        {"b": 65_536},
        {"b": 2**24, "h_q": 1},
        {"s_q": 64},
        {"s_q": MAX_S_Q},
        {"b": 65_536, "s_q": 64, "topk": 2048},
        {"topk": MAX_TOPK},
        {"topk": 64, "extra_topk": MAX_TOPK},
    ],
    ids=str,
)
def test_sizes_that_pass(sizes):
    args, extra = shapes(**sizes)
    assert check_sparse_decode(*args, **extra).h_q == sizes.get("h_q", 128)
    if sizes.get("b", 1) <= 65_536:
        plan = mla_cute.plan_decode(args[0], args[2], extra_indices=extra.get("extra_indices"))
        assert plan.num_splits.shape == (args[0].shape[0] + 1,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"s_q": MAX_S_Q + 1}, r"^q: .*s_q.* 65535"),
        ({"s_q": 0}, r"^q: .*s_q.*, got"),
        ({"topk": MAX_TOPK + 1}, r"^indices: topk \(dim 2\) must be at most 2147483584, got 2147483585$"),
        ({"extra_topk": MAX_TOPK + 1}, r"^extra_indices: extra_topk \(dim 2\) must be at most 2147483584, got 2147483585$"),
    ],
    ids=str,
)
def test_sizes_that_are_refused(sizes, message):
    args, extra = shapes(**sizes)
    with pytest.raises(ValueError, match=message):
        check_sparse_decode(*args, **extra)
    with pytest.raises(ValueError, match=message):
        mla_cute.plan_decode(args[0], args[2], extra_indices=extra.get("extra_indices"))


@pytest.mark.parametrize("name", ["q", "out"])
def test_strides_past_a_tma_descriptor(name):
    x = make_inputs(Case(b=2, h_q=5, s_kv=60, topk=60))
    refused = f"^{name}: stride of dim 0 must be below 2\\*\\*40 bytes, got {2**39} "
    for stride, context in (
        (2**39 - 8, contextlib.nullcontext()),
        (2**39, pytest.raises(ValueError, match=refused)),
    ):
        y, out, lse = moved(x, Case(), **{name: (stride, 2**20, 2**12, 1)})
        with context:
            check_sparse_decode(y.q, y.kv_cache, y.indices, out=out, lse=lse)


# The largest batch that the planner's 32-bit costs count: 2 * 6 b + 132 parts + 5 < 2^31 - 1, with one block a request.
LARGEST_BATCH = (INT_MAX - 1 - 132 - 5) // 12


def test_the_largest_batch():
    launched = []
    where = target(torch.device("cpu"))._replace(load=lambda *_: lambda *args: launched.append(args))
    args = 64, None, 132, 64, 5, torch.device("meta"), where
    schedule._plan_by_kernel(LARGEST_BATCH, *args)
    assert len(launched) == 1 and LARGEST_BATCH == 178_956_959
    with pytest.raises(ValueError, match=r"^indices: b \* \(blocks of topk \+ 5\) must be below about 2\*\*30, got"):
        schedule._plan_by_kernel(LARGEST_BATCH + 1, *args)


# ----- gpu ------------------------------------------------------------------------------------------------------------

LISTS = {"h_q": 128, "s_q": 2, "s_kv": 300, "topk": 250, "topk_length": True, "sink": True, "holes": True}
V32_CASE = Case(b=6, **LISTS)
MODEL1_CASE = Case(b=6, kv_format="model1", extra_topk=200, extra_s_kv=250, extra_topk_length=True, **LISTS)
CACHES = {
    "V32, 9 GB": (V32_CASE, Pages(9 * GB // 41_984, 64, 41_984), None),
    "MODEL1, 9 GB each": (MODEL1_CASE, Pages(9 * GB // 37_440, 64, 37_440), Pages(9 * GB // 1728, 2, 1728)),
    "V32, far pages": (V32_CASE, Pages(9, 576, 6 * 2**30 + 16 * 41), None),
    "MODEL1, far pages": (MODEL1_CASE, Pages(5, 576, 2**32 + 16 * 37), Pages(7, 321, 6 * 2**30 + 16 * 5)),
    # No device has room for 2^31 - 1 tokens side by side. Here pages overlap, and the tokens in use do not.
    "V32, the last index": (V32_CASE, Pages(INT_MAX, 1, 16), None),
    "V32, the last index, pages of 61": (V32_CASE, Pages(INT_MAX // 61, 61, 1040), None),
}
FAR_ROWS = {
    "q and indices": {"q": (2**32 + 64, 2**31 + 640, 576, 1), "indices": (2**31 + 3, 2**30 + 1, 1)},
    "out and lse": {"out": (2**32 + 64, 2**31 + 512, 512, 1), "lse": (2**31 + 1, 2**30 + 1, 1)},
    "heads": {
        **{"q": (2**21 + 8, 2**20 + 8, 2**26 + 72, 1), "out": (2**20 + 8, 2**23, 2**26 + 8, 1)},
        **{"indices": (2**20, 2**31 + 5, 1), "lse": (2**20, 2**31 + 128, 1)},
    },
}
MANY_ROWS = [  # rows of 65,536 values: elements 2^31 and 2^32 of out begin rows 32,768 and 65,536; of q they lie before
    Case(b=66_000, h_q=128, s_q=1, topk=64, topk_length=True, sink=True),
    Case(b=1_032, h_q=128, s_q=64, topk=64, sink=True),
    Case(b=1, h_q=128, s_q=MAX_S_Q, topk=64, sink=True),
    Case(b=66_000, h_q=128, s_q=1, topk=64, kv_format="model1", topk_length=True, sink=True),
]
LARGE_BATCHES = [  # with splits
    Case(b=65_536, h_q=16, topk=256, topk_length=True, sink=True),
    Case(b=65_536, h_q=16, topk=128, kv_format="model1", topk_length=True, extra_topk=200, extra_topk_length=True, sink=True),
]
LARGE_LISTS = Case(b=65_536, h_q=16, topk=40_000, topk_length=True, sink=True)
LONG_LISTS = [
    Case(b=1, h_q=64, topk=MAX_TOPK, sink=True),
    Case(b=1, h_q=64, topk=MAX_TOPK, kv_format="model1", extra_topk=100, sink=True),
]


@pytest.fixture(scope="module")
def compiled(impl):
    compile_kernels([V32_CASE, MODEL1_CASE, *MANY_ROWS, *LARGE_BATCHES, LARGE_LISTS, *LONG_LISTS], impl)


@pytest.fixture
def room(monkeypatch):
    """room(bytes) skips on a GPU that has not as many free. Everything is given back behind the test."""
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1 << 30)
    yield _room
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _room(num_bytes):
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / GB:.0f} GB of GPU memory, {free / GB:.0f} GB are free")


def bytes_of(pages):
    return pages.num_blocks * pages.stride if pages else 0


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", CACHES)
def test_large_cache(name, impl, room):
    case, main, extra = CACHES[name]
    room(bytes_of(main) + bytes_of(extra) + 3 * GB)
    check_moved(make_inputs(case, "cuda"), case, impl=impl, main=main, extra=extra)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", FAR_ROWS)
@pytest.mark.parametrize("case", [V32_CASE, MODEL1_CASE], ids=["V32", "MODEL1"])
def test_far_rows(case, name, impl, room):
    """Strides of requests, query tokens and heads past 2^31 and 2^32 elements; splits write through the combine."""
    room(70 * GB)
    x = make_inputs(dataclasses.replace(case, b=4), "cuda")
    plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), impl=impl)
    splits = plan.num_splits.diff()
    assert splits.clamp(max=3).unique().numel() > 1 and (splits > 1).any()  # whole ones, pairs, more: two of them at least
    check_moved(x, case, impl=impl, **FAR_ROWS[name])


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", MANY_ROWS, ids=str)
def test_many_rows(case, impl, room):
    """More than 2^32 bytes and elements of q and nearly as many of out, whichever dim brings them; every row is checked."""
    room(85 * GB)
    x = shared_cache_inputs(case, "cuda")
    assert x.q.numel() > 2**32 and case.b * case.s_q * 128 * 512 > 2**32 - 2**17
    check_all_rows(x, impl=impl)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", LARGE_BATCHES, ids=str)
def test_large_batch(case, impl, room):
    """The planner's workspace, and a combine that finds its few splits among 65,536 requests."""
    room(25 * GB)
    x = shared_cache_inputs(case, "cuda")
    plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), impl=impl)
    keys = reference.sparse_num_keys(
        case.b, case.topk, x.topk_length, extra_topk=case.extra_topk, extra_topk_length=x.extra_topk_length
    )
    expected = reference.plan(keys, plan.num_parts, fixed_overhead_blocks=plan.fixed_overhead_blocks)
    assert_bitwise(plan.metadata.cpu(), expected[0], name="metadata")
    assert_bitwise(plan.num_splits.cpu(), expected[1], name="num_splits")
    assert (expected[1].diff() > 1).any() and (x.topk_length == 0).any()
    check_all_rows(x, step=8192, impl=impl)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_many_long_lists(impl, room):
    """More than 2^31 indices, 10 GB: few of each list count."""
    room(20 * GB)
    x = shared_cache_inputs(LARGE_LISTS, "cuda", listed=64)
    assert x.indices.numel() > 2**31
    check_all_rows(x, listed=64, step=8192, impl=impl)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", LONG_LISTS, ids=str)
def test_one_long_list(case, impl, room):
    """2^31 - 64 indices of one query token, 8.6 GB: the longest list there can be, and extra keys behind it."""
    room(10 * GB)
    check_one_long_list(case, "cuda", impl)


@pytest.mark.gpu
def test_large_combine(room):
    """Pieces that take more than 2^32 elements, 2^34 bytes."""
    from mla_cute import combine

    room(85 * GB)
    kernel = jit.load(combine, Problem(h_q=128, has_attn_sink=True), None, jit.arch_of("cuda"))

    def in_fragment_order(metadata, num_splits, o_partial, lse_partial, *rest):
        scratch = torch.empty(o_partial.numel() + lse_partial.numel(), device="cuda")
        for slot, piece in enumerate(o_partial):  # slot by slot: there is no room for a second copy of all
            scratch[slot * piece.numel() :][: piece.numel()] = fragment_order(piece[None]).flatten()
        scratch[o_partial.numel() :] = lse_partial.flatten()
        kernel(metadata, num_splits, scratch, *rest, int(num_splits.diff().max()))

    assert combine_in_slices(100, 40, 300, 224, 128, "cuda", in_fragment_order) > 2**32


@pytest.mark.gpu
def test_the_largest_plan(room):
    """178,956,959 requests of one block: parts are runs of whole requests."""
    room(5 * GB)
    b, device = LARGEST_BATCH, torch.device("cuda", torch.cuda.current_device())
    metadata, num_splits = schedule._plan_by_kernel(b, 64, None, 132, 64, 5, device, target(device))
    assert torch.equal(num_splits, torch.arange(b + 1, dtype=torch.int32, device=device))
    assert metadata.tolist() == runs_of_requests(b, 132)


def runs_of_requests(b, num_parts):
    """The plan's records where every request has one block: a part takes those that cost at most its payload."""
    each = (-(-6 * b // num_parts) + 5) // 6
    begins = [min(p * each, b) for p in range(num_parts + 1)]
    return [[begin, min(begin + each, b) - 1, 0, int(begin < b), 0, 0, 0, 0] for begin in begins[:-1]]


def test_runs_of_requests():
    for b, num_parts in ((1, 132), (1000, 132), (1001, 7), (5, 3), (20_000, 132)):
        assert runs_of_requests(b, num_parts) == reference.plan([64] * b, num_parts)[0].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "short"])
def test_plan_of_millions(kind, room):
    """2^24 requests with lengths; expected from the closed form that tests/test_schedule.py checks."""
    from test_schedule import closed_form

    room(2 * GB)
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(-5, 2048 if kind == "random" else 3, (2**24,), generator=g, dtype=torch.int32)
    device = torch.device("cuda", torch.cuda.current_device())
    metadata, num_splits = schedule._plan_by_kernel(2**24, 2000, lengths.cuda(), 132, 64, 5, device, target(device))
    expected = closed_form((lengths.clamp(1, 2000).numpy() + 63) // 64, 132, 5)
    assert (metadata.cpu().numpy() == expected[0]).all() and (num_splits.cpu().numpy() == expected[1]).all()


def test_decode_and_check_takes_inputs_of_one_cache():
    """The two helpers agree on what an Inputs is."""
    decode_and_check(shared_cache_inputs(Case(b=3, h_q=2, topk=9, topk_length=True), "cpu", num_tokens=64))
