"""Test inputs with poison in everything that must not be read, and the comparisons: for tests, bench and examples
alike.

The data, the poison and the tolerances follow FlashMLA's own tests; holes, duplicates, other scales and NaN page gaps
are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch

from .kv_cache import V32, quantize_kv_cache, to_cache_indices

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
    token.
    """

    b: int = 4
    h_q: int = 128
    s_q: int = 1
    s_kv: int = 512
    topk: int = 64
    page_block_size: int = 64
    d_qk: int = V32.d_qk
    varlen: bool = False  # request lengths ~ N(s_kv, s_kv / 2), at least s_q
    sink: bool = False  # attn_sink ~ N(0, 1), about 31 % +inf and 31 % -inf
    topk_length: bool = False  # uniform in [0, topk] (with 0, 1 and topk if b >= 4), wild indices behind them
    all_invalid: bool = False  # no index is valid
    zero_length: bool = False  # about half of the requests have no key: at least one, not all unless b = 1
    holes: bool = False  # -1 inside the list: a quarter of the entries, and one whole block in about half of the rows
    duplicates: bool = False  # a quarter of the entries repeat another of their row
    scales: str = "pow2"  # "pow2", "amax", or "random": no powers of two, unrelated to the values
    strided: bool = True  # rows of q and indices and pages of the cache lie further apart than they need
    odd_rows: bool = False  # rows of indices start at odd multiples of 4 bytes: no vector load fits them
    seed: int = 0

    def __post_init__(self) -> None:
        if self.d_qk != V32.d_qk:
            raise ValueError(f"d_qk: must be {V32.d_qk} (V32), got {self.d_qk}")
        if self.scales not in ("pow2", "amax", "random"):
            raise ValueError(f'scales: must be "pow2", "amax" or "random", got "{self.scales}"')

    def __str__(self) -> str:
        flags = "varlen sink topk_length all_invalid zero_length holes duplicates odd_rows"
        words = [f"b{self.b}", f"h{self.h_q}", f"q{self.s_q}", f"kv{self.s_kv}", f"topk{self.topk}"]
        words += [f"page{self.page_block_size}", *(name for name in flags.split() if getattr(self, name))]
        words += [self.scales] * (self.scales != "pow2") + ["packed"] * (not self.strided)
        return "-".join(words + [f"seed{self.seed}"] * (self.seed != 0))


@dataclass(frozen=True, eq=False, repr=False)  # neither compares nor prints whole tensors
class Inputs:
    """The tensors of a case, all on one device."""

    q: torch.Tensor  # [b, s_q, h_q, 576] bf16
    kv_cache: torch.Tensor  # [num_blocks, page_block_size, 1, 656] uint8
    indices: torch.Tensor  # [b, s_q, topk] int32
    topk_length: torch.Tensor | None  # [b] int32
    attn_sink: torch.Tensor | None  # [h_q] fp32
    softmax_scale: float
    kv: torch.Tensor  # [num_blocks, page_block_size, 1, 576] bf16: what was quantised, NaN where no valid index points

    def kwargs(self) -> dict:
        """The optional arguments, as keywords of `sparse_decode`."""
        return {k: getattr(self, k) for k in ("softmax_scale", "topk_length", "attn_sink")}


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Build the tensors of a case on `device`; the same case on the same kind of device gives the same bits.

    q ~ N(0, 1) and keys ~ N(0, 1) / 10, clamped to ±1; softmax_scale = d_qk ** -0.55; each query token lists distinct
    random keys of its request, -1 behind them if there are fewer than topk; pages are dealt out at random. Every token
    that no valid index points to is NaN before it is quantised (NaN scales, codes and RoPE), the gaps between pages are
    NaN bytes, those in q NaN, those in indices INT_MAX.
    """
    g = torch.Generator(device=device).manual_seed(case.seed)
    opts = {"generator": g, "device": device}
    b, s_q, topk, page = case.b, case.s_q, case.topk, case.page_block_size

    q = torch.randn(b, s_q, case.h_q, case.d_qk, **opts).clamp_(-1, 1).to(torch.bfloat16)
    sink = None
    if case.sink:
        sink, u = torch.randn(case.h_q, **opts), torch.rand(case.h_q, **opts)
        sink = torch.where(u < 0.31, math.inf, torch.where(u > 0.69, -math.inf, sink))

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

    valid, topk_length = indices >= 0, None
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
    if scales == "random":
        scales = (1 + torch.rand(num_blocks, page, 1, V32.num_scales, **opts)) / 448  # never saturates: |kv| <= 1
        scales.masked_fill_(~used, math.nan)
    gap = int(case.strided)
    pool = torch.full((num_blocks, page + gap, 1, V32.bytes_per_token), 0xFF, dtype=torch.uint8, device=device)
    kv_cache = quantize_kv_cache(kv, scales=scales, out=pool[:, :page])
    if case.strided:
        q, indices = _spread(q, math.nan), _spread(indices, INT_MAX)
    if case.odd_rows:
        rows = torch.full((b, s_q, topk + 2 - topk % 2), INT_MAX, dtype=torch.int32, device=device)
        indices = rows[..., 1 : topk + 1].copy_(indices)  # even row length, odd offset
    return Inputs(q, kv_cache, indices, topk_length, sink, case.d_qk**-0.55, kv)


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
