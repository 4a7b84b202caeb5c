"""Oracles in plain torch: sparse decode, the plan, the split partials and their combine. Any device, any strides.

They define what the kernels must compute, and serve as an implementation themselves (`Config`, `default_config`,
`compile`): CPU tensors take it, and `impl=mla_cute.reference` selects it on any device.

Sparse decode attends, for each query token, the listed keys that are valid: position i of the list counts if
i < topk_length[r] (every position if there is no topk_length) and indices[r, s, i] is the number of a token in the cache:
neither negative nor past the end. A second list of keys in a second cache (extra_indices, ...) adds its own, by the same
rules. A key listed twice counts twice. With x_j = softmax_scale * q·k_j over all attended keys j:

    lse = ln Σ exp(x_j)        out = σ Σ exp(x_j - lse) v_j        σ = 1 / (1 + exp(sink - lse)), 1 without sink

Nothing attended: out 0, lse +inf, whatever the sink. Nothing but the attended tokens is read, so NaN elsewhere stays
there. The rules, the plan and the combine's maths are those of DeepSeek's FlashMLA.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .jit import kept_over_fork
from .kv_cache import FORMATS, KVFormat, gather_tokens
from .validate import INT32_MAX, Problem, check_int

LOG2_E = math.log2(math.e)
CHUNK_BYTES = 1 << 28  # dequantised keys held at once: a few query tokens of topk 2048, not a whole batch


# ---- sparse decode


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
    kv_format: KVFormat | None = None,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLA decode, computed in `dtype` from the dequantised keys.

    Args:
        q: [b, s_q, h_q, d_qk] bf16 (any float dtype), any h_q.
        kv_cache: [num_blocks, page_block_size, 1, bytes_per_token] in `kv_format`, or unquantised keys
            [num_blocks, page_block_size, 1, d_qk] bf16 (how far does quantisation itself move the result?).
        indices: int32 [b, s_q, topk], physical token numbers; negative or past the cache = none.
        softmax_scale: factor on q·k; default d_qk ** -0.5.
        topk_length: int32 [b] or None. attn_sink: fp32 [h_q] in natural-log units, or None.
        extra_kv_cache, extra_indices, extra_topk_length: more keys: a cache like kv_cache with a page size of its own,
            int32 [b, s_q, extra_topk] and int32 [b]; the first two or none of them.
        kv_format: default: the one whose bytes (of unquantised keys: whose d_qk) kv_cache's last dim has.
        dtype: torch.float32 or torch.float64, of all arithmetic. out_dtype: of out; default q.dtype.

    Returns: out [b, s_q, h_q, d_v] and lse [b, s_q, h_q] in `dtype`, natural log, without the sink.

    Raises ValueError if kv_cache's last dim tells no format.
    """
    b, s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    fmt = kv_format or _format_of(kv_cache)
    lists = [_Keys.listed(kv_cache, indices, topk_length)]
    if extra_kv_cache is not None:
        lists.append(_Keys.listed(extra_kv_cache, extra_indices, extra_topk_length))
    lists = [_Keys(k.kv_cache, k.indices.flatten(0, 1), k.valid.flatten(0, 1)) for k in lists]
    q_rows, keys = q.reshape(b * s_q, h_q, d_qk), sum(k.indices.shape[-1] for k in lists)
    out = torch.empty(b * s_q, h_q, fmt.d_v, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(b * s_q, h_q, dtype=dtype, device=q.device)
    step = max(1, CHUNK_BYTES // (max(keys, 1) * d_qk * dtype.itemsize))
    for i in range(0, b * s_q, step):
        rows = slice(i, i + step)
        o, lse[rows] = _attend(q_rows[rows], [k[rows] for k in lists], scale, fmt, dtype)
        if attn_sink is not None:
            sigma = torch.sigmoid(lse[rows] - attn_sink.to(dtype))  # [n, h_q]; junk (inf - inf) in empty rows
            o = torch.where(lse[rows, :, None] == math.inf, 0.0, o * sigma.unsqueeze(-1))
        out[rows] = o.to(out.dtype)
    return out.view(b, s_q, h_q, fmt.d_v), lse.view(b, s_q, h_q)


def _format_of(kv_cache: torch.Tensor) -> KVFormat:
    """The format of an FP8 cache or of unquantised keys, by the last dim."""
    is_unquantised = kv_cache.dtype == torch.bfloat16
    sizes = {fmt.d_qk if is_unquantised else fmt.bytes_per_token: fmt for fmt in FORMATS.values()}
    if kv_cache.shape[-1] not in sizes:
        known = " or ".join(f"{size} ({fmt.name.upper()})" for size, fmt in sizes.items())
        raise ValueError(f"kv_cache: last dim must be {known}, got {kv_cache.shape[-1]}")
    return sizes[kv_cache.shape[-1]]


@dataclass(frozen=True, eq=False)
class _Keys:
    """Listed keys of one cache; a subscript is one of the list."""

    kv_cache: torch.Tensor
    indices: torch.Tensor  # [..., keys]
    valid: torch.Tensor  # bool [..., keys]: which of them are attended

    @classmethod
    def listed(cls, kv_cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None) -> _Keys:
        """indices [b, s_q, topk], length [b] or None."""
        last = kv_cache.shape[0] * kv_cache.shape[1] - 1
        valid = (indices >= 0) & (indices <= min(last, INT32_MAX))
        if length is not None:
            position = torch.arange(indices.shape[-1], device=indices.device)
            valid = valid & (position < length[:, None, None])
        return cls(kv_cache, indices, valid)

    def __getitem__(self, i) -> _Keys:
        return _Keys(self.kv_cache, self.indices[i], self.valid[i])


def _attend(
    q: torch.Tensor,
    lists: list[_Keys],
    scale: float,
    fmt: KVFormat,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of n query tokens, without sink: o [n, h_q, d_v] (0 if empty), lse [n, h_q] natural (+inf if
    empty).

    q [n, h_q, d_qk]; each list [n, its keys].
    """
    valid = torch.cat([k.valid for k in lists], dim=-1)
    n, keys = valid.shape
    # Keys that are not attended stay 0: their weight is 0, and 0 * NaN would be NaN.
    k = torch.zeros(n, keys, fmt.d_qk, dtype=dtype, device=q.device)
    begin = 0
    for part in lists:
        end = begin + part.valid.shape[1]
        k[:, begin:end][part.valid] = _gather(part.kv_cache, part.indices[part.valid], fmt).to(dtype)
        begin = end
    with _full_fp32_matmul(), torch.autocast(q.device.type, enabled=False):
        scores = (q.to(dtype) @ k.mT) * scale  # [n, h_q, keys]
        scores = scores.masked_fill(~valid.unsqueeze(1), -math.inf)
        row_max = scores.amax(-1, keepdim=True) if keys else scores.new_full((*scores.shape[:2], 1), -math.inf)
        row_max = torch.where(row_max == -math.inf, 0.0, row_max)
        p = torch.exp(scores - row_max)
        row_sum = p.sum(-1, keepdim=True)  # [n, h_q, 1]
        empty = row_sum == 0
        o = (p @ k[..., : fmt.d_v]) / torch.where(empty, 1.0, row_sum)
    lse = torch.where(empty, math.inf, row_max + torch.log(row_sum))
    return o, lse.squeeze(-1)


def _gather(kv_cache: torch.Tensor, tokens: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """The named tokens, bf16 [n, d_qk], of an FP8 cache or of unquantised keys."""
    page = kv_cache.shape[1]
    if kv_cache.dtype == torch.bfloat16:
        return kv_cache[tokens.long() // page, tokens.long() % page, 0]
    return gather_tokens(kv_cache, tokens, kv_format=fmt)


@contextlib.contextmanager
def _full_fp32_matmul() -> Iterator[None]:
    """fp32 products without the TF32 a caller may have allowed: it is coarser than the tolerance of lse."""
    # Each backend's own setting, which the products look at: the older one for all of them cannot be read, nor put back
    # as it was, once a program has used these.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    with _matmul_lock:
        before = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            for backend, precision in zip(backends, before):
                backend.fp32_precision = "none"  # torch.backends.fp32_precision decides; where that says what was there,
                if backend.fp32_precision != precision:  # it goes on doing so
                    backend.fp32_precision = precision


# The settings are the process's: two threads must not put back each other's "ieee".
_matmul_lock = kept_over_fork(threading.RLock())


# ---- the plan


def sparse_num_keys(
    b: int,
    topk: int,
    topk_length: torch.Tensor | None = None,
    *,
    extra_topk: int = 0,
    extra_topk_length: torch.Tensor | None = None,
    tile_n: int = 64,
) -> list[int]:
    """Keys the plan counts for each request: topk_length clamped to [0, topk], or topk; and those of the extra cache.

    0 counts as 1: every request has a block, so that some part writes its zeros. The extra keys (extra_topk_length clamped
    to [0, extra_topk], or extra_topk) begin with a block of their own: what comes before counts as whole blocks of tile_n.
    """
    lengths = [topk] * b if topk_length is None else topk_length.tolist()
    keys = [max(min(n, topk), 1) for n in lengths]
    if extra_topk == 0:
        return keys
    extra = [extra_topk] * b if extra_topk_length is None else extra_topk_length.tolist()
    return [-(-n // tile_n) * tile_n + max(min(more, extra_topk), 0) for n, more in zip(keys, extra)]


def plan(
    num_keys: Sequence[int], num_parts: int, *, tile_n: int = 64, fixed_overhead_blocks: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Deal the key blocks of all requests to `num_parts` CTAs, in order, each getting about the same number.

    Args:
        num_keys: keys of each request, b ints >= 0; for sparse decode `sparse_num_keys(...)`. A request of 0 keys
            costs one block but gets none (end_block 0): dense decode's rule.
        num_parts: P, the number of parts.
        tile_n: keys a block. fixed_overhead_blocks: what beginning a request costs, in blocks.

    Returns: metadata int32 [P, 8] and num_splits int32 [b + 1], the running count of splits. A record is
        0 begin_req, 1 end_req (inclusive), 2 begin_block in begin_req, 3 end_block in end_req (exclusive),
        4 begin_split: which split of begin_req this part is, 5 begin_req is split, 6 end_req is split,
        7 partial_slot: partial results written by the parts before (see `partial_pieces`).
        A part without work has begin_req = b, end_req = b - 1, zeros, and the count in field 7.

    Raises ValueError for a negative number of keys or fewer than one part.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts: must be at least 1, got {num_parts}")
    if any(n < 0 for n in num_keys):
        raise ValueError(f"num_keys: must not be negative, got {min(num_keys)}")
    b, overhead = len(num_keys), fixed_overhead_blocks
    blocks = [max(n - 1, 0) // tile_n + 1 for n in num_keys]
    payload = -(-sum(n + overhead for n in blocks) // num_parts) + overhead

    records, num_splits, slot = [], [0], 0
    req = given = split = 0  # current request, blocks of it dealt out, splits of it made
    for _ in range(num_parts):
        if req == b:
            records.append([b, b - 1, 0, 0, 0, 0, 0, slot])
            continue
        begin_req, begin_block, begin_split = req, given, split
        left = payload
        while req < b:
            rest = blocks[req] - given
            if left >= rest + overhead:  # the rest of the request fits
                num_splits.append(num_splits[-1] + split + 1)
                left -= rest + overhead
                req, given, split = req + 1, 0, 0
                continue
            if left > overhead:
                given += left - overhead
                split += 1
            break
        if given > 0:
            end_req, end_block = req, given
        else:
            end_req = req - 1
            end_block = blocks[end_req] if num_keys[end_req] else 0
        first = begin_block > 0
        last = num_keys[end_req] > 0 and end_block != blocks[end_req]
        if begin_req == end_req:
            first = last = first or last
        records.append([begin_req, end_req, begin_block, end_block, begin_split, int(first), int(last), slot])
        slot += first + (last and end_req != begin_req)
    assert (req, given, split) == (b, 0, 0), "the payload must cover all the work"
    return tuple(torch.tensor(x, dtype=torch.int32, device="cpu") for x in (records, num_splits))


class Piece(NamedTuple):
    """One split's share of one request: key blocks [begin_block, end_block); end_block None = to the end."""

    slot: int
    request: int
    begin_block: int
    end_block: int | None


def partial_pieces(metadata: torch.Tensor, b: int) -> list[Piece]:
    """The partial results a plan makes, in slot order; the splits of a request are consecutive, in split order.

    A part writes one for begin_req if field 5 is set, and behind it one for end_req if field 6 is set and end_req is
    another request: at most 2 * (P - 1) in all, whatever b is. Requests that are not split have none.
    """
    pieces = []
    for begin_req, end_req, begin_block, end_block, _, first, last, slot in metadata.tolist():
        if begin_req >= b:
            continue
        if first:
            pieces.append(Piece(slot, begin_req, begin_block, end_block if end_req == begin_req else None))
        if last and end_req != begin_req:
            pieces.append(Piece(slot + first, end_req, 0, end_block))
    return pieces


# ---- split partials and combine


def partials(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    metadata: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    tile_n: int = 64,
    kv_format: KVFormat | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the main kernel leaves for the combine: each split's own softmax average and log-sum, never with the sink.

    Args: as for `sparse_decode`, and metadata [P, 8] from `plan` with the same `tile_n`.

    Returns: o_partial [2P, s_q, h_q, d_v] and lse_partial [2P, s_q, h_q], base 2, in `dtype`. A split without a valid
        key is 0 and -inf. Slots no piece is written to hold NaN.
    """
    b, s_q, h_q, d_qk = q.shape
    num_slots = 2 * metadata.shape[0]
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    fmt = kv_format or _format_of(kv_cache)
    main = _Keys.listed(kv_cache, indices, topk_length)
    lists = [(main, 0)]  # and the key, in blocks from the request's first, that each list begins at
    if extra_kv_cache is not None:
        extra = _Keys.listed(extra_kv_cache, extra_indices, extra_topk_length)
        ends = [-(-n // tile_n) * tile_n for n in sparse_num_keys(b, indices.shape[-1], topk_length)]
    o_partial = torch.full((num_slots, s_q, h_q, fmt.d_v), math.nan, dtype=dtype, device=q.device)
    lse_partial = torch.full((num_slots, s_q, h_q), math.nan, dtype=dtype, device=q.device)
    for piece in partial_pieces(metadata, b):
        r = piece.request
        if extra_kv_cache is not None:
            lists = [(main, 0), (extra, ends[r])]
        begin, end = piece.begin_block * tile_n, None if piece.end_block is None else piece.end_block * tile_n
        part = [k[r, :, max(begin - at, 0) : None if end is None else max(end - at, 0)] for k, at in lists]
        o, lse = _attend(q[r], part, scale, fmt, dtype)
        o_partial[piece.slot] = o
        lse_partial[piece.slot] = torch.where(lse == math.inf, -math.inf, lse * LOG2_E)
    return o_partial, lse_partial


def combine(
    o_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    metadata: torch.Tensor,
    num_splits: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partials of every split request into out and lse; requests that are not split stay as they are.

    Args:
        o_partial: [slots, s_q, h_q, d_v], normalised. lse_partial: [slots, s_q, h_q], base 2, -inf for an empty split
            (whose o_partial must be finite: its weight is 0). Slots that belong to no piece are not read.
        metadata [P, 8], num_splits [b + 1]: from `plan`. attn_sink: fp32 [h_q], natural-log units, or None.
        out [b, s_q, h_q, d_v], lse [b, s_q, h_q]: written for the split requests; lse natural log, without the sink.

    Returns: out, lse.
    """
    splits = num_splits.tolist()
    for begin_req, _, _, _, begin_split, _, _, slot in metadata.tolist():
        if begin_split != 1 or begin_req >= out.shape[0]:
            continue  # the part holding split 1 owns the merge: its first piece stands right behind split 0
        n = splits[begin_req + 1] - splits[begin_req]
        pieces = slice(slot - 1, slot - 1 + n)
        lse_log2 = lse_partial[pieces]  # [n, s_q, h_q]
        top = lse_log2.amax(0)
        top = torch.where(top == -math.inf, 0.0, top)
        total = torch.exp2(lse_log2 - top).sum(0)
        merged_log2 = torch.where(total == 0, math.inf, torch.log2(total) + top)  # [s_q, h_q]
        lse[begin_req] = (merged_log2 / LOG2_E).to(lse.dtype)
        if attn_sink is not None:
            sink_log2 = attn_sink.to(merged_log2.dtype) * LOG2_E
            with_sink = merged_log2 + torch.log2(1 + torch.exp2(sink_log2 - merged_log2))
            alone = torch.where(sink_log2 == -math.inf, math.inf, sink_log2)
            merged_log2 = torch.where(merged_log2 == math.inf, alone, with_sink)
        weight = torch.exp2(lse_log2 - merged_log2)  # [n, s_q, h_q]
        out[begin_req] = (weight.unsqueeze(-1) * o_partial[pieces]).sum(0).to(out.dtype)
    return out, lse


# ---- the module as an implementation


@dataclass(frozen=True)
class Config:
    """The numbers the plan needs; the reference itself has nothing to tune."""

    tile_n: int = 64  # keys a block
    fixed_overhead_blocks: int = 5  # FlashMLA's estimate of what beginning a request costs on SM90, in blocks

    def num_parts(self, problem: Problem, s_q: int, num_sms: int) -> int:
        """P: parts of the plan, so that P * s_q * head_tiles CTAs are one wave."""
        return max(num_sms // (s_q * problem.head_tiles), 1)

    def check(self, problem: Problem) -> None:
        """Raise NotImplementedError unless the problem is sparse decode on a known cache, ValueError for bad numbers."""
        if problem.op != "sparse_decode":
            raise NotImplementedError(f"problem.op: the reference has sparse_decode, got {problem.op}")
        if problem.kv_format not in FORMATS:
            known = " and ".join(FORMATS)
            raise NotImplementedError(f"problem.kv_format: the reference reads {known}, got {problem.kv_format}")
        check_int("tile_n", self.tile_n)
        check_int("fixed_overhead_blocks", self.fixed_overhead_blocks)
        if self.tile_n < 1:
            raise ValueError(f"tile_n: must be at least 1, got {self.tile_n}")
        if self.fixed_overhead_blocks < 0:
            raise ValueError(f"fixed_overhead_blocks: must not be negative, got {self.fixed_overhead_blocks}")


def default_config(problem: Problem) -> Config:
    """The only choice there is."""
    return Config()


def compile(problem: Problem, config: Config, arch: str | None = None) -> Callable[..., None]:
    """A callable with the kernels' positional signature; it writes all of out and lse, on any device, and needs no
    plan.

    Raises what `config.check` raises.
    """
    config.check(problem)

    def run(
        q: torch.Tensor,  # [b, s_q, h_q, d_qk] bf16
        kv_cache: torch.Tensor,  # [num_blocks, page_block_size, 1, bytes_per_token]
        indices: torch.Tensor,  # [b, s_q, topk] int32
        topk_length: torch.Tensor | None,  # [b] int32
        extra_kv_cache: torch.Tensor | None,  # as kv_cache, with a page size of its own
        extra_indices: torch.Tensor | None,  # [b, s_q, extra_topk] int32
        extra_topk_length: torch.Tensor | None,  # [b] int32
        attn_sink: torch.Tensor | None,  # [h_q] fp32
        softmax_scale: float,
        metadata: torch.Tensor | None,  # of the plan, as the next two and the last two: not used
        num_splits: torch.Tensor | None,
        scratch: torch.Tensor | None,
        out: torch.Tensor,  # [b, s_q, h_q, d_v] bf16, any strides
        lse: torch.Tensor,  # [b, s_q, h_q] fp32, any strides
        max_splits: int = 0,
        nonce: int = 0,
    ) -> None:
        o, ls = sparse_decode(
            q,
            kv_cache,
            indices,
            softmax_scale=softmax_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            extra_kv_cache=extra_kv_cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
        )
        out.copy_(o)
        lse.copy_(ls)

    return run
