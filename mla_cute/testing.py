"""Test inputs with poison in everything that must not be read, and the comparisons: for tests, bench and examples
alike.

The data, the poison and the tolerances follow FlashMLA's own tests; holes, duplicates, indices outside of the cache, other
scales and NaN page gaps are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from .kv_cache import FORMATS, V32, KVFormat, quantize_kv_cache, to_cache_indices
from .validate import Problem

# Accepted error of sparse decode against the reference, for assert_close(**...): the one place where it is set.
SPARSE_DECODE_OUT = MappingProxyType({"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6})
SPARSE_DECODE_LSE = MappingProxyType({"abs_tol": 1e-6, "rel_tol": 8.01 / 65536, "cos_tol": 1e-7})

INT_MAX = 2**31 - 1
WILD_INDICES = (INT_MAX, 2147480000, -(2**31), -123456)  # what may stand behind topk_length
UNUSED_PAGE = 2147480000  # block table entries of pages a request does not have
SPARE_PAGES = 4  # pages of the cache that no request owns


@dataclass(frozen=True)
class Case:
    """One sparse-decode input; `str(case)` is its test id.

    b requests, s_q query tokens each, h_q heads, s_kv keys a request (the mean if `varlen`), topk listed keys a query
    token. With extra_topk there is a second cache: the flags hold for both, what is drawn is drawn anew.
    """

    b: int = 4
    h_q: int = 128
    s_q: int = 1
    s_kv: int = 512
    topk: int = 64
    page_block_size: int = 64
    kv_format: str = "v32"  # or "model1"
    extra_topk: int = 0  # listed keys of the second cache; 0: there is none
    extra_s_kv: int | None = None  # its keys a request; default 2 * extra_topk
    extra_page_block_size: int | None = None  # default page_block_size
    extra_topk_length: bool = False  # as topk_length, for the second cache
    varlen: bool = False  # request lengths ~ N(s_kv, s_kv / 2), at least s_q
    sink: bool = False  # attn_sink ~ N(0, 1), about 31 % +inf and 31 % -inf
    topk_length: bool = False  # uniform in [0, topk] (with 0, 1 and topk if b >= 4), wild indices behind them
    all_invalid: bool = False  # no index is valid
    zero_length: bool = False  # about half of the requests have no key: at least one, not all unless b = 1
    holes: bool = False  # -1 inside the list: a quarter of the entries, and one whole block in about half of the rows
    duplicates: bool = False  # a quarter of the entries repeat another of their row
    outside: bool = False  # an eighth of the entries point outside of the cache: the first behind its end to INT_MAX
    scales: str = "pow2"  # "pow2", "amax" (V32), or "random": unrelated to the values, and in V32 no powers of two
    strided: bool = True  # rows of q and indices and pages of the cache lie further apart than they need
    odd_rows: bool = False  # rows of indices start at odd multiples of 4 bytes: no vector load fits them
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kv_format not in FORMATS:
            raise ValueError(f"kv_format: must be {' or '.join(FORMATS)}, got {self.kv_format}")
        if self.scales not in ("pow2", "amax", "random"):
            raise ValueError(f'scales: must be "pow2", "amax" or "random", got "{self.scales}"')
        if self.scales == "amax" and self.format.scale_bytes == 1:
            raise ValueError(f'scales: must be "pow2" or "random" for {self.kv_format}, got "amax"')
        if not self.extra_topk:
            for name in ("extra_s_kv", "extra_page_block_size", "extra_topk_length"):
                if getattr(self, name):
                    raise ValueError(f"extra_topk: must be given with {name}, got 0")

    @property
    def format(self) -> KVFormat:
        return FORMATS[self.kv_format]

    @property
    def problem(self) -> Problem:
        """What a kernel is compiled for to run it."""
        return Problem(
            h_q=self.h_q,
            d_qk=self.d_qk,
            kv_format=self.kv_format,
            has_topk_length=self.topk_length,
            has_attn_sink=self.sink,
            has_extra=bool(self.extra_topk),
            has_extra_topk_length=self.extra_topk_length,
        )

    @property
    def d_qk(self) -> int:
        return self.format.d_qk

    def __str__(self) -> str:
        flags = "varlen sink topk_length all_invalid zero_length holes duplicates outside odd_rows"
        words = [f"b{self.b}", f"h{self.h_q}", f"q{self.s_q}", f"kv{self.s_kv}", f"topk{self.topk}"]
        words += [f"page{self.page_block_size}"] + [self.kv_format] * (self.kv_format != V32.name)
        sizes = {"topk": self.extra_topk, "kv": self.extra_s_kv, "page": self.extra_page_block_size}
        words += [f"extra_{word}{value}" for word, value in sizes.items() if value]
        words += [name for name in ["extra_topk_length", *flags.split()] if getattr(self, name)]
        words += [self.scales] * (self.scales != "pow2") + ["packed"] * (not self.strided)
        return "-".join(words + [f"seed{self.seed}"] * (self.seed != 0))


@dataclass(frozen=True, eq=False, repr=False)  # neither compares nor prints whole tensors
class Inputs:
    """The tensors of a case, all on one device."""

    q: torch.Tensor  # [b, s_q, h_q, d_qk] bf16
    kv_cache: torch.Tensor  # [num_blocks, page_block_size, 1, bytes_per_token] uint8
    indices: torch.Tensor  # [b, s_q, topk] int32
    topk_length: torch.Tensor | None  # [b] int32
    attn_sink: torch.Tensor | None  # [h_q] fp32
    softmax_scale: float
    # [num_blocks, page_block_size, 1, d_qk] bf16: what was quantised, NaN where no valid index points. None: not kept.
    kv: torch.Tensor | None
    extra_kv_cache: torch.Tensor | None = None  # these four as their namesakes
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    extra_kv: torch.Tensor | None = None

    def kwargs(self) -> dict:
        """The optional arguments, as keywords of `sparse_decode`."""
        return {"softmax_scale": self.softmax_scale, "attn_sink": self.attn_sink} | self.keys()

    def keys(self) -> dict:
        """Those that say which keys count."""
        names = "topk_length", "extra_kv_cache", "extra_indices", "extra_topk_length"
        return {name: getattr(self, name) for name in names}

    def plan_kwargs(self) -> dict:
        """The optional arguments of `plan_decode`."""
        return {name: value for name, value in self.keys().items() if name != "extra_kv_cache"}


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Build the tensors of a case on `device`; the same case on the same kind of device gives the same bits.

    q ~ N(0, 1) and keys ~ N(0, 1) / 10, clamped to ±1; softmax_scale = d_qk ** -0.55; each query token lists distinct
    random keys of its request, -1 behind them if there are fewer than topk; pages are dealt out at random. Every token
    that no valid index points to is NaN before it is quantised (NaN scales, codes and RoPE), the gaps between pages and the
    padding of scales are NaN bytes, the gaps in q NaN, those in indices INT_MAX.
    """
    g = torch.Generator(device=device).manual_seed(case.seed)
    opts = {"generator": g, "device": device}
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, **opts).clamp_(-1, 1).to(torch.bfloat16)
    sink = None
    if case.sink:
        sink, u = torch.randn(case.h_q, **opts), torch.rand(case.h_q, **opts)
        sink = torch.where(u < 0.31, math.inf, torch.where(u > 0.69, -math.inf, sink))
    kv_cache, indices, topk_length, kv = _make_keys(case, g)
    extra = None, None, None, None
    if case.extra_topk:
        second = replace(
            case,
            topk=case.extra_topk,
            s_kv=case.extra_s_kv or 2 * case.extra_topk,
            page_block_size=case.extra_page_block_size or case.page_block_size,
            topk_length=case.extra_topk_length,
        )
        extra = _make_keys(second, g)
    if case.strided:
        q = _spread(q, math.nan)
    return Inputs(q, kv_cache, indices, topk_length, sink, case.d_qk**-0.55, kv, *extra)


def _make_keys(case: Case, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """kv_cache, indices, topk_length and kv, as in `Inputs`."""
    device, fmt = g.device, case.format
    opts = {"generator": g, "device": device}
    b, s_q, topk, page = case.b, case.s_q, case.topk, case.page_block_size

    # Requests: their lengths, and a random page for each of their pages.
    lengths = torch.full((b,), case.s_kv, dtype=torch.int64, device=device)
    if case.varlen:
        lengths = (case.s_kv * (1 + 0.5 * torch.randn(b, **opts))).long().clamp_(min=s_q)
    if case.zero_length:
        zero = torch.rand(b, **opts) < 0.5
        zero[(case.seed + 1) % b] = False
        zero[case.seed % b] = True  # b = 1: this one
        lengths = lengths.masked_fill(zero, 0)
    max_length = int(lengths.max())
    pages = (lengths + page - 1) // page  # [b]
    table_width = max(-(-max_length // (4 * page)) * 4, 4)  # padded to 4 pages: the tail holds UNUSED_PAGE
    owned = torch.arange(table_width, device=device) < pages[:, None]
    num_blocks = int(pages.sum()) + SPARE_PAGES
    block_table = torch.full((b, table_width), UNUSED_PAGE, dtype=torch.int32, device=device)
    block_table[owned] = torch.randperm(num_blocks, **opts)[: num_blocks - SPARE_PAGES].int()

    # Indices: the topk smallest of one random number a key are a random choice without repeats, in random order.
    position = torch.full((b, s_q, topk), -1, dtype=torch.int64, device=device)
    if max_length > 0 and not case.all_invalid:
        draw = torch.rand(b, s_q, max_length, **opts)
        draw.masked_fill_(torch.arange(max_length, device=device) >= lengths[:, None, None], 2.0)
        value, chosen = draw.topk(min(topk, max_length), largest=False, sorted=True)
        position[..., : chosen.shape[-1]] = chosen.masked_fill(value == 2.0, -1)
    if case.duplicates:
        source = position.gather(-1, torch.randint(0, topk, position.shape, **opts))
        repeat = (torch.rand(position.shape, **opts) < 0.25) & (position >= 0) & (source >= 0)
        position = torch.where(repeat, source, position)
    if case.holes:
        hole = torch.rand(position.shape, **opts) < 0.25
        num_tiles = -(-topk // 64)
        tile = torch.randint(0, 2 * num_tiles, (b, s_q, 1), **opts)  # the upper half of the draws: no whole block
        hole |= torch.arange(topk, device=device) // 64 == tile
        position = position.masked_fill(hole, -1)
    indices = to_cache_indices(position, block_table, page)
    if case.outside:
        end = num_blocks * page
        beyond = torch.tensor([end, end + 1, 2 * end, INT_MAX], dtype=torch.int32, device=device)
        pick = torch.randint(0, 8 * len(beyond), indices.shape, **opts)
        indices = torch.where(pick < len(beyond), beyond[pick % len(beyond)], indices)

    valid, topk_length = (indices >= 0) & (indices < num_blocks * page), None
    if case.topk_length:
        topk_length = torch.randint(0, topk + 1, (b,), **opts)
        if b >= 4:
            topk_length[torch.randperm(b, **opts)[:3]] = torch.tensor([0, 1, topk], device=device)
        inside = torch.arange(topk, device=device) < topk_length[:, None, None]
        valid = valid & inside
        # Behind the limit one entry in five keeps its index: of a token that is now poisoned unless listed elsewhere.
        wild = torch.tensor(WILD_INDICES, dtype=torch.int32, device=device)
        pick = torch.randint(0, len(WILD_INDICES) + 1, indices.shape, **opts)
        behind = torch.where(pick < len(WILD_INDICES), wild[pick.clamp(max=len(WILD_INDICES) - 1)], indices)
        indices = torch.where(inside, indices, behind)
        topk_length = topk_length.int()

    # Keys, poisoned before they are quantised.
    used = torch.zeros(num_blocks * page, dtype=torch.bool, device=device)
    used[indices[valid].long()] = True
    used = used.view(num_blocks, page, 1, 1)
    kv = torch.empty(num_blocks, page, 1, case.d_qk, dtype=torch.bfloat16, device=device)
    kv.normal_(generator=g).mul_(0.1).clamp_(-1, 1).masked_fill_(~used, math.nan)
    scales = case.scales
    if scales == "random":  # never saturates: |kv| <= 1
        if fmt.scale_bytes == 1:
            exponent = torch.randint(-8, 0, (num_blocks, page, 1, fmt.num_scales), **opts)
            scales = (exponent.int() + 127 << 23).view(torch.float32)
        else:
            scales = (1 + torch.rand(num_blocks, page, 1, fmt.num_scales, **opts)) / 448
        scales.masked_fill_(~used, math.nan)
    # Pages of a plane need not be whole rows, only a multiple of 16 bytes.
    stride = fmt.page_bytes(page) + fmt.row_bytes if case.strided else -(-page * fmt.bytes_per_token // 16) * 16
    pool = torch.full((num_blocks, stride), 0xFF, dtype=torch.uint8, device=device)
    kv_cache = pool.as_strided((num_blocks, page, 1, fmt.bytes_per_token), (stride, *(fmt.bytes_per_token,) * 2, 1))
    quantize_kv_cache(kv, kv_format=fmt, scales=scales, out=kv_cache)
    if fmt.scale_plane:
        plane = pool[:, page * fmt.row_bytes : page * fmt.bytes_per_token].unflatten(-1, (page, fmt.scale_row_bytes))
        plane[..., fmt.num_scales :] = 0xFF  # as a scale this would be NaN
    if case.strided:
        indices = _spread(indices, INT_MAX)
    if case.odd_rows:
        rows = torch.full((b, s_q, topk + 2 - topk % 2), INT_MAX, dtype=torch.int32, device=device)
        indices = rows[..., 1 : topk + 1].copy_(indices)  # even row length, odd offset
    return kv_cache, indices, topk_length, kv


def _spread(x: torch.Tensor, fill: float) -> torch.Tensor:
    """A copy of x inside a tensor of `fill`, larger by 1 in every dim and by 128 in the last (keeps alignment)."""
    room = [n + 1 for n in x.shape[:-1]] + [x.shape[-1] + 128]
    view = torch.full(room, fill, dtype=x.dtype, device=x.device)[tuple(slice(n) for n in x.shape)]
    return view.copy_(x)


def assert_close(
    ans: torch.Tensor, ref: torch.Tensor, *, abs_tol: float, rel_tol: float, cos_tol: float = 1e-7, name: str = "ans"
) -> None:
    """Raise AssertionError unless `ans` is `ref` up to rounding.

    Shape and dtype must be equal, +inf, -inf and NaN must stand at the same places; every other element must have |Δ| <
    abs_tol or |Δ| / (|ref| + 1e-6) < rel_tol; and all together |1 - 2 Σab / (Σa² + Σb²)| <= cos_tol in fp64, a figure
    that also sees a wrong size (it is 0 if Σref² < 1e-12). The message gives the counts and the worst element.
    """
    _assert_same_kind(ans, ref, name)
    a, r = ans.detach().float(), ref.detach().to(ans.device).float()
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(a) != test(r)
        if wrong.any():
            at = _first(wrong)
            raise AssertionError(
                f"{name}: {what} not where the reference has it: {int(wrong.sum())} of {a.numel()} elements differ, "
                f"first at {at}: got {a[at].item()}, reference {r[at].item()}"
            )
    finite = torch.isfinite(r)
    a, r = torch.where(finite, a, 0.0), torch.where(finite, r, 0.0)
    abs_err = (a - r).abs()
    rel_err = abs_err / (r.abs() + 1e-6)
    bad = ~((abs_err < abs_tol) | (rel_err < rel_tol))
    if bad.any():
        at = _unravel(int(torch.where(bad, abs_err, -1.0).argmax()), bad.shape)
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {a.numel()} elements are off by abs >= {abs_tol:.3g} and "
            f"rel >= {rel_tol:.3g}, worst at {at}: got {a[at].item():.8g}, reference {r[at].item():.8g}, "
            f"abs {abs_err[at].item():.3g}, rel {rel_err[at].item():.3g}"
        )
    a, r = a.double(), r.double()
    ref_size = float((r * r).sum())
    cos = 0.0 if ref_size < 1e-12 else 1 - 2 * float((a * r).sum()) / (float((a * a).sum()) + ref_size)
    if not abs(cos) <= cos_tol:
        at = _unravel(int(abs_err.argmax()), abs_err.shape)
        raise AssertionError(
            f"{name}: cosine figure {cos:.3g} exceeds {cos_tol:.3g} though every element passes; "
            f"largest difference at {at}: got {a[at].item():.8g}, reference {r[at].item():.8g}"
        )


def assert_bitwise(ans: torch.Tensor, ref: torch.Tensor, *, name: str = "ans") -> None:
    """Raise AssertionError unless `ans` and `ref` have the same shape, dtype and bits (-0 is not 0, NaN is itself)."""
    _assert_same_kind(ans, ref, name)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ans.element_size()]
    wrong = ans.detach().contiguous().view(bits) != ref.detach().to(ans.device).contiguous().view(bits)
    if wrong.any():
        at = _first(wrong)
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in their bits, first at {at}: "
            f"got {ans[at].item()!r}, reference {ref[at].item()!r}"
        )


def _assert_same_kind(ans: torch.Tensor, ref: torch.Tensor, name: str) -> None:
    if ans.shape != ref.shape:
        raise AssertionError(f"{name}: shape must be {list(ref.shape)}, got {list(ans.shape)}")
    if ans.dtype != ref.dtype:
        raise AssertionError(f"{name}: dtype must be {ref.dtype}, got {ans.dtype}")


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return _unravel(int(mask.to(torch.uint8).argmax()), mask.shape)


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
