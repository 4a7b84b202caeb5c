"""Sparse decode by hand: one small case from the plan to out and lse, each number beside a published article's.

    python examples/walkthrough.py

The article is a walk-through of FlashMLA's sparse decode in 20 steps (0 to 19), in Chinese, published on
ggaaooppeenngg.github.io. Its case has DeepSeek-V3.2's dimensions: b = 2 requests, 1 query token each, 128 heads,
topk = 128, pages of 64 tokens, 132 SMs, hence P = 66 parts. It follows one head over two blocks of 64 keys, with
numbers made up for the purpose. Here the same numbers are put into a real FP8 cache and a real q (`build_case`), so
that the library's functions compute them: what the article supposes comes out of `mla_cute.sparse_decode` in the end
(step 19). Plain torch shows the steps between.

The printed table has a row a value: computed here | printed in the article | a mark | a note. The marks:

    =        the same number, rounded to the article's digits
    SLIP     the article is wrong there; the note says what is right and why (if in a word, nothing is computed)
    blank    the article has nothing to compare with
    DIFFERS  computed and printed are not the same, and nobody knows why: does not occur, and the script would exit 1

Names are the project's: S = raw scores q·k, P = probabilities (the article has them the other way round). A quantity in
base 2 says `_log2`. Needs no GPU.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

import torch

import mla_cute
from mla_cute import V32, reference
from mla_cute.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_cute.kv_cache import E4M3_MAX

# The case
B, S_Q, H_Q, TOPK, PAGE = 2, 1, 128, 128, 64
TILE_N = 64  # keys a block: a run of the index list, not a page
TILE_M = 64  # heads a CTA
SINK = -2.5  # of head 0, natural-log units

# Two GPUs
H800_SMS, B200_SMS = 132, 148
H800_TFLOPS, H800_TBPS = 989, 3.35  # dense bf16, HBM
MMA_FLOP_PER_CYCLE = 4096  # of one SM: 989e12 / 132 SMs / 1.83e9 Hz

# What the article supposes about head 0 of request 0: scores it prints (place in the block: value), Σ exp of each block
BLOCK_SCORES = ({0: 3.52, 1: -1.23, 2: 2.17, 3: 0.89, 63: -0.45}, {0: 1.75, 1: 0.33, 2: -2.10, 63: 0.91})
BLOCK_SUMS = (42.5, 38.2)
OUT = {0: 0.1931, 1: -0.2847, 2: 0.0523, 511: -0.1234}  # dim: value of out
# ... and about the first listed token, 47
TOKEN_NOPE = (0.25, -0.5, 0.125, -0.0625, 0.375, -0.03125, 0.75, -0.875)
TOKEN_ROPE = {0: 0.1, 1: -0.2, 2: 0.3, 63: 0.05}  # RoPE dim: value
GROUP_AMAX = {1: 1.5, 2: 0.75, 3: 3.0}  # ours: they give the scales that the article prints in step 7

SCALE = V32.d_qk**-0.5
SCALE_LOG2 = SCALE * math.log2(math.e)  # exp(SCALE * s) = exp2(SCALE_LOG2 * s)


# ---- the rows of the table


@dataclass(frozen=True)
class Row:
    """One value: as computed here, and as the article prints it."""

    name: str
    computed: float | tuple | None  # a number or several; None: the article slips in a word, `slip` has the right one
    article: str | tuple[str, ...] | None = None  # its digits as printed; None: it prints none
    note: str = ""
    slip: str = ""  # not empty: the article is wrong; what is right, and why

    @property
    def agrees(self) -> bool | None:
        """Does the computed value round to the article's digits? None if the article has none."""
        if self.article is None:
            return None
        ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (self.computed, self.article))
        return len(ours) == len(theirs) and all(map(_rounds_to, ours, theirs))

    @property
    def mark(self) -> str:
        if self.slip:
            return "SLIP"
        return {None: "", True: "=", False: "DIFFERS"}[self.agrees]


def _rounds_to(value: float | None, printed: str) -> bool:
    try:
        number = float(printed)
    except ValueError:
        return False
    if isinstance(value, int):
        return value == number
    half_digit = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return abs(value - number) <= half_digit * (1 + 1e-6)


@dataclass(frozen=True)
class Step:
    """A step of the article: its number there, what it is about, its rows."""

    number: int
    title: str
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def numbers(x: torch.Tensor) -> tuple:
    """The values of a small tensor."""
    return tuple(x.tolist())


# ---- the case: the article's numbers, stored where the kernels would find them


@dataclass(frozen=True, eq=False)
class Case:
    positions: torch.Tensor  # [b, s_q, topk] int32, place of each selected token in its request
    block_table: torch.Tensor  # [b, 138] int32, the physical page of each page of a request
    indices: torch.Tensor  # [b, s_q, topk] int32, physical token numbers
    kv_cache: torch.Tensor  # [num_blocks, page, 1, 656] uint8
    q: torch.Tensor  # [b, s_q, h_q, 576] bf16
    attn_sink: torch.Tensor  # [h_q] fp32

    @property
    def keys(self) -> torch.Tensor:
        """[topk, 576] fp32: the keys that request 0 attends, dequantised, in the order of its list."""
        kv = mla_cute.dequantize_kv_cache(self.kv_cache)  # [num_blocks, page, 1, 576] bf16
        return kv.view(-1, V32.d_qk)[self.indices[0, 0].long()].float()


def build_case() -> Case:
    """The inputs of the article's call, such that head 0 of request 0 meets the numbers that the article supposes."""
    g = torch.Generator().manual_seed(0)

    # Request 0 has the article's tokens and owns pages 0..137 in order, request 1 pages 145..138, back to front.
    spread = [100 + 70 * i for i in range(TOPK - 5)]  # the article names only the first four and the last
    positions = torch.tensor([[[47, 2091, 583, 12, *spread, 8821]], [[*range(0, 4 * TOPK, 4)]]], dtype=torch.int32)
    block_table = torch.full((B, 138), 2147480000, dtype=torch.int32)  # entries nobody needs may be anything
    block_table[0] = torch.arange(138)
    block_table[1, :8] = torch.arange(145, 137, -1)
    indices = mla_cute.to_cache_indices(positions, block_table, PAGE)
    listed = indices[0, 0].long()  # [topk]

    # Scores: head 0 of q is 1 in three RoPE dims and 0 elsewhere, so that whatever a key holds there is its score.
    # Three bf16 values add up to the score to fp32 accuracy; RoPE is not quantised.
    scores = torch.cat([fill_block(*block) for block in zip(BLOCK_SCORES, BLOCK_SUMS, strict=True)])  # [topk] fp64
    score_dims = slice(V32.d_nope + 8, V32.d_nope + 11)
    q = torch.randn(B, S_Q, H_Q, V32.d_qk, generator=g).to(torch.bfloat16)
    q[0, 0, 0] = 0
    q[0, 0, 0, score_dims] = 1
    # Head 1 is the article's other example, a dot product of 12.5 with token 47 over the values of TOKEN_NOPE.
    q[0, 0, 1] = 0
    q[0, 0, 1, :8] = torch.tensor([4, -4, 8, -16, 8, -32, 0, -4])

    kv = torch.empty(146, PAGE, 1, V32.d_qk, dtype=torch.bfloat16).normal_(generator=g).mul_(0.1)
    token = kv.view(-1, V32.d_qk)  # [num_blocks * page, 576], by physical token number
    token[47, : len(TOKEN_NOPE)] = torch.tensor(TOKEN_NOPE).to(torch.bfloat16)
    for group, amax in GROUP_AMAX.items():
        token[47, group * V32.quant_tile] = amax
    token[47, V32.d_nope - 1] = 0.75  # the article's last NoPE value
    for dim, value in TOKEN_ROPE.items():
        token[47, V32.d_nope + dim] = value
    rest = scores.clone()
    for dim in range(score_dims.start, score_dims.stop):
        token[listed, dim] = rest.to(torch.bfloat16)
        rest -= token[listed, dim].double()

    # Values: V is the first 512 dims of K. Four of them are chosen so that Σ p·v gives the article's out.
    p = torch.exp2((scores - scores.max()) * SCALE_LOG2)  # [topk]
    denominator = p.sum() + torch.exp2(torch.tensor(SINK * math.log2(math.e)) - scores.max() * SCALE_LOG2)
    for dim, value in OUT.items():
        token[listed, dim] = values_with_sum(p, float(value * denominator), token[47, dim].item())

    attn_sink = torch.full((H_Q,), -math.inf)  # no sink
    attn_sink[0] = SINK
    return Case(positions, block_table, indices, mla_cute.quantize_kv_cache(kv), q, attn_sink)


def fill_block(known: dict[int, float], total: float) -> torch.Tensor:
    """Scores of a block, fp64 [64]: the known ones, and one score for all others that makes Σ P = total."""
    row_max_log2 = BLOCK_SCORES[0][0] * SCALE_LOG2  # the row's maximum stands in block 0
    missing = total - sum(2 ** (s * SCALE_LOG2 - row_max_log2) for s in known.values())
    other = (math.log2(missing / (TILE_N - len(known))) + row_max_log2) / SCALE_LOG2
    return torch.tensor([known.get(i, other) for i in range(TILE_N)], dtype=torch.float64)


def values_with_sum(p: torch.Tensor, total: float, first: float) -> torch.Tensor:
    """v [topk] bf16 with v[0] = first and Σ p·v = total; each has 4 significant bits, so that e4m3 keeps it."""
    v, missing, weight = [first], total - float(p[0]) * first, float(p[1:-3].sum())
    for w in p[1:].tolist():  # about equal values; the last three make up for the rounding
        mantissa, exponent = math.frexp(missing / max(weight, w))
        v.append(round(mantissa * 16) / 16 * 2.0**exponent)
        missing, weight = missing - w * v[-1], weight - w
    return torch.tensor(v).to(torch.bfloat16)


# ---- the steps


def step_0_setup() -> Step:
    """MLA caches one latent vector a token for all heads: what that saves."""
    one_tensor = 128 * 128  # 128 heads of 128 dims
    k_and_v = 128 * (128 + 64) + 128 * 128  # K with its RoPE dims, and V
    return Step(
        0,
        "The problem: DeepSeek-V3.2's attention in the latent space",
        (
            Row("d_qk = latent + RoPE", V32.d_qk, "576"),
            Row("d_v", V32.d_v, "512", "V is the first 512 values of K: it is not stored again"),
            Row("128 heads x 128 dims / 576", one_tensor / V32.d_qk, "28"),
            Row(
                "values a token of plain K and V / 576",
                k_and_v / V32.d_qk,
                "28",
                slip="16384 counts one tensor without RoPE. Plain attention stores K (128 x 192) and V (128 x 128): "
                "40960 values a token.",
            ),
        ),
    )


def step_1_call(case: Case) -> Step:
    """The call, in FlashMLA's own names: `mla_cute.flash_mla` is a drop-in for it."""
    sched_meta, _ = get_mla_metadata()  # empty: the first call plans
    out, lse = flash_mla_with_kvcache(
        case.q,
        case.kv_cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=V32.d_v,
        tile_scheduler_metadata=sched_meta,
        is_fp8_kvcache=True,
        indices=case.indices,
    )
    fourth = 47  # the article's example of an index
    return Step(
        1,
        "The call: shapes",
        (
            Row("q [b, s_q, h_q, d_qk]", tuple(case.q.shape), ("2", "1", "128", "576")),
            Row("k_cache [., page, h_kv, bytes]", tuple(case.kv_cache.shape[1:]), ("64", "1", "656")),
            Row("indices [b, s_q, topk]", tuple(case.indices.shape), ("2", "1", "128")),
            Row("page and offset of index 47", (fourth // PAGE, fourth % PAGE), ("0", "47")),
            Row("out [b, s_q, h_q, d_v]", tuple(out.shape), ("2", "1", "128", "512")),
            Row("lse [b, h_q, s_q]", tuple(lse.shape), ("2", "128", "1"), "mla_cute.sparse_decode: [b, s_q, h_q]"),
            Row(
                "cache that dense decode reads",
                None,
                "the same",
                slip="for contexts up to topk the article drops indices and passes a block table instead. FlashMLA's "
                "dense decode reads a cache in q's dtype; over this FP8 cache one lists all tokens.",
            ),
        ),
    )


def step_2_parameters(case: Case) -> Step:
    """What the host hands to the kernel."""
    sizes = (V32.d_nope, V32.num_scales * V32.scale_bytes, V32.rope_bytes)
    return Step(
        2,
        "Parameters: the record of a token, the softmax scale",
        (
            Row("bytes: codes, scales, RoPE", sizes, ("512", "16", "128")),
            Row("bytes a token", sum(sizes), "656"),
            Row(
                "offsets: codes, scales, RoPE",
                (V32.nope_offset, V32.scale_offset, V32.rope_offset),
                ("0", "512", "528"),
            ),
            Row("softmax_scale = 1/sqrt(576)", SCALE, "0.04167"),
            Row("log2(e)", math.log2(math.e), "1.4427"),
            Row(
                "scale_log2 = softmax_scale * log2(e)",
                SCALE_LOG2,
                "0.06010",
                slip="last digit: 0.06011. Its name there says div_log2; it is scale * log2(e) = scale / ln 2.",
            ),
            Row("q.stride(0), q.stride(2)", (case.q.stride(0), case.q.stride(2)), ("73728", "576")),
        ),
    )


def step_3_plan(case: Case) -> Step:
    """Deal the blocks of all requests to P parts in order, each with room for the same payload."""
    plan = mla_cute.plan_decode(case.q, case.indices)  # on the CPU: for the 132 SMs of an H800 or H200
    keys = reference.sparse_num_keys(B, TOPK)  # keys the plan counts for each request
    blocks = [-(-n // plan.tile_n) for n in keys]
    cost = sum(n + plan.fixed_overhead_blocks for n in blocks)
    payload = -(-cost // plan.num_parts) + plan.fixed_overhead_blocks
    part = plan.metadata.tolist()  # [P][8], a record a part
    busy = [record for record in part if record[0] < B]
    pieces = reference.partial_pieces(plan.metadata, B)
    _, serving_splits = reference.plan([2048] * 128, plan.num_parts)  # the article's example of a real batch
    split_requests = int((serving_splits.diff() > 1).sum())
    both = (
        "a flag says that the request is shared with other parts; if the part begins and ends in the same request, "
        "both flags are set. Without that the part would take its piece for the whole request."
    )
    ranges = [
        Row(f"part {p}: requests, blocks", tuple(part[p][:4]), theirs)
        for p, theirs in enumerate(
            [("0", "0", "0", "1"), ("0", "0", "1", "2"), ("1", "1", "0", "1"), ("1", "1", "1", "2")]
        )
    ]
    flags = [
        Row(f"part {p}: first, last request split", tuple(part[p][5:7]), theirs, slip=both if p == 0 else "as part 0")
        for p, theirs in enumerate([("0", "1"), ("1", "0"), ("0", "1"), ("1", "0")])
    ]
    return Step(
        3,
        "The plan: which CTA computes which key blocks",
        (
            Row("blocks of each request", tuple(blocks), ("2", "2")),
            Row("cost = sum of (blocks + 5)", cost, "14", "5: what beginning a request costs, in blocks"),
            Row(
                "CTAs that get work",
                len(busy) * (H_Q // TILE_M),
                "14",
                slip="14 is a cost in blocks, not a number of CTAs: 4 parts of 2 CTAs work, the other 124 CTAs leave.",
            ),
            Row("P = 132 / s_q / (h_q / 64)", plan.num_parts, "66"),
            Row("payload = ceil(14 / 66) + 5", payload, "6"),
            Row("cost of a whole request", blocks[0] + plan.fixed_overhead_blocks, "7", "7 > 6: it is split"),
            Row("blocks that fit into an empty part", payload - plan.fixed_overhead_blocks, "1"),
            *ranges,
            *flags,
            Row("parts without work", (len(busy), plan.num_parts - 1), ("4", "65"), "62 with begin_req = b"),
            Row("num_splits", numbers(plan.num_splits), ("0", "2", "4")),
            Row(
                "slots of the 4 partial results",
                tuple(piece.slot for piece in pieces),
                note="field 7 of our records counts the pieces before the part, so that the buffer needs 2P slots "
                "whatever b is; FlashMLA sizes it b + P and finds a slot through num_splits",
            ),
            Row(
                "b 128, topk 2048: split requests",
                split_requests,
                "most",
                slip="payload 77 holds two whole requests (2 x 37), and the 3 blocks left over do not pay for a third: "
                "64 parts take two each and none is split.",
            ),
            Row(
                "combine, if nothing is split",
                None,
                "not launched",
                slip="FlashMLA launches it in any case, and it leaves at once where there is nothing to merge, as the "
                "article's own step 16 has it. We launch it unless shapes alone say that no request is in three pieces.",
            ),
            Row("FP8 record saves [%]", 100 * (1 - V32.bytes_per_token / (2 * V32.d_qk)), "43"),
            Row(
                "FLOP a byte of K, 128 heads",
                2 * H_Q * (V32.d_qk + V32.d_v) / V32.bytes_per_token,
                note=f"an H800 does {H800_TFLOPS / H800_TBPS:.0f} in the time that it reads a byte",
            ),
            Row(
                "what bounds decode with 128 heads",
                None,
                "memory",
                slip="all heads share each key, so that its bytes are not the limit: tensor cores and the conversion "
                "from FP8 are (steps 7 and 17). FP8 saves room for longer contexts.",
            ),
        ),
    )


def step_4_quantise() -> Step:
    """One group of 128 values becomes 128 e4m3 codes and one scale."""
    kv = torch.zeros(1, 1, 1, V32.d_qk)  # one page of one token
    kv[..., : len(TOKEN_NOPE) - 1] = torch.tensor(TOKEN_NOPE[:-1])  # without the last: amax 0.75
    record = mla_cute.quantize_kv_cache(kv)[0, 0, 0]  # [656] uint8
    amax = kv[..., : V32.quant_tile].abs().max().item()
    exponent = math.ceil(math.log2(amax / E4M3_MAX))
    scale = record[V32.scale_offset :][: V32.scale_bytes].view(torch.float32).item()
    code = record[:1].view(torch.float8_e4m3fn).float().item()
    stored_bits = -math.log2(torch.finfo(torch.float8_e4m3fn).eps)  # of the mantissa; eps = 2^-3
    return Step(
        4,
        "Quantisation of one group of 128 values",
        (
            Row("groups a token", V32.num_scales, "4"),
            Row("amax", amax, "0.75"),
            Row("amax / 448", amax / E4M3_MAX, "0.001674"),
            Row("exponent = ceil(log2(amax / 448))", exponent, "-9"),
            Row("scale = 2^-9", scale, "0.001953", "read back from byte 512 of the record"),
            Row("1 / scale", 1 / scale, "512.0"),
            Row(
                "fp32 stored as the group's scale",
                scale,
                "512.0",
                slip="step 4 names 1 / 2^-9 'scale' and then stores 'scale'. Stored is 2^-9, the factor that "
                "dequantisation multiplies by, as in step 7.",
            ),
            Row(
                "format of a stored scale",
                None,
                "UE8M0",
                slip="V3.2 caches store 4 fp32 a token. Powers of two are the writer's choice (ue8m0 in config.json "
                "speaks of values, not of storage); SM100 converts to e8m0 in registers.",
            ),
            Row("code of 0.25", code, "128.0", f"byte {record[0].item():#04x}"),
            Row("largest code", torch.finfo(torch.float8_e4m3fn).max, "448"),
            Row(
                "decimal digits of e4m3",
                (stored_bits + 1) * math.log10(2),
                "3",
                slip="3 stored mantissa bits and the hidden one are 4 bits, about 1.2 decimal digits: rounding is off "
                "by up to 6 %.",
            ),
        ),
    )


def step_5_launch() -> Step:
    """Grid and resources, SM90 and SM100."""
    heads = H_Q // TILE_M
    parts = H800_SMS // (S_Q * heads)
    tmem_lanes, tmem_columns = 128, 512  # of 4 bytes
    o_columns, q_columns = (TILE_M * width // (4 * tmem_lanes) for width in (V32.d_v * 4, V32.d_qk * 2))
    return Step(
        5,
        "Launch: grids, tensor memory",
        (
            Row("SM90 grid", (heads, S_Q, parts), ("2", "1", "66"), "our kernel has the same grid"),
            Row("SM90 CTAs", heads * S_Q * parts, "132", "one wave"),
            Row("threads a CTA", 3 * 128, "384"),
            Row("SM90 registers of 65536", (192 + 160 + 152) * 128, note="192/160/152 a thread of the warpgroups"),
            Row(
                "SM100 parts for 64 heads",
                B200_SMS // S_Q,
                "132",
                slip="132 are Hopper's SMs; a B200 has 148.",
            ),
            Row(
                "SM100 tensor memory [KiB]",
                tmem_lanes * tmem_columns * 4 // 1024,
                "512",
                slip="128 lanes x 512 columns x 4 bytes are 256 KiB a SM; the article repeats 512 in steps 6, 8, 18.",
            ),
            Row("SM100 columns of O", (0, o_columns - 1), ("0", "255"), "64 x 512 fp32"),
            Row("SM100 columns of Q", (o_columns, o_columns + q_columns - 1), ("256", "399"), "64 x 576 bf16"),
            Row("gather4 copies a block", TILE_N // 4, "16"),
            Row(
                "tcgen05.mma.ws",
                None,
                "widthless",
                slip=".ws is the weight-stationary form of the MMA. One thread issues it, as it does any tcgen05.mma.",
            ),
            Row(
                "SM100, 128 heads of V3.2",
                None,
                "left open",
                slip="FlashMLA runs its 64-head kernel twice (heads 0-63, 64-127) on a V3.2 cache; its 128-head kernel "
                "serves the other cache format.",
            ),
        ),
    )


def step_6_load_q() -> Step:
    return Step(
        6,
        "Q by TMA",
        (
            Row("bytes of a Q tile", TILE_M * V32.d_qk * 2, "73728", "64 heads x 576 bf16"),
            Row(
                "warpgroup that loads Q",
                0,
                "2",
                slip="one lane of warpgroup 0's first warp starts the copy, before its main loop; warpgroup 2 only "
                "gathers K.",
            ),
        ),
    )


def step_7_dequantise(case: Case) -> Step:
    """Index → address → codes and scales → bf16."""
    index = case.indices[0, 0, 0].item()  # 47
    page_stride = case.kv_cache.stride(0)  # 64 x 656 bytes; a caller may leave gaps between pages

    def address(index: int, page_stride: int = page_stride) -> int:
        return index // PAGE * page_stride + index % PAGE * V32.bytes_per_token

    raw = case.kv_cache.flatten()  # the whole cache as bytes
    record = raw[address(index) :][: V32.bytes_per_token]
    scales = record[V32.scale_offset : V32.rope_offset].view(torch.float32)  # [4]
    codes = record[: len(TOKEN_NOPE)].view(torch.float8_e4m3fn).float()  # [8]
    by_hand = (codes * scales[0]).to(torch.bfloat16)
    kv = mla_cute.dequantize_kv_cache(case.kv_cache)  # [num_blocks, page, 1, 576] bf16
    value = kv[index // PAGE, index % PAGE, 0]  # [576]
    assert torch.equal(value[: len(TOKEN_NOPE)], by_hand)
    conversion_cycles = V32.d_nope * (1 / 64 + 1 / 64 + 1 / 16 + 1 / 256)  # e4m3 → half → fp32 → bf16, then * scale
    position, physical = case.positions[1, 0, 1].item(), case.indices[1, 0, 1].item()
    return Step(
        7,
        "From an index to bf16 values",
        (
            Row("first indices", numbers(case.indices[0, 0, :4]), ("47", "2091", "583", "12")),
            Row("last index", case.indices[0, 0, -1].item(), "8821"),
            Row("index 47: page, offset", (index // PAGE, index % PAGE), ("0", "47")),
            Row("index 47: byte address", address(index), note="0 * 41984 + 47 * 656"),
            Row("index 2091: page, offset", (2091 // PAGE, 2091 % PAGE)),
            Row("index 2091: byte address", address(2091), note="32 * 41984 + 43 * 656"),
            Row(
                "... with a gap of one record a page",
                address(2091, (PAGE + 1) * V32.bytes_per_token),
                note="only the page stride changes: the gap is never read",
            ),
            Row(
                f"request 1, position {position}: index",
                physical,
                note=f"indices are physical. Its first page is page {case.block_table[1, 0]} of the cache: "
                f"to_cache_indices gives {case.block_table[1, 0]} * 64 + {position}; request 0's pages lie in order",
            ),
            Row("scales of token 47", numbers(scales), ("0.001953", "0.003906", "0.001953", "0.007812")),
            Row("codes", numbers(codes), ("128.0", "-256.0", "64.0", "-32.0", "192.0", "-16.0", "384.0", "-448.0")),
            Row(
                "bf16(code * scale)",
                numbers(value[: len(TOKEN_NOPE)]),
                ("0.2500", "-0.5000", "0.1250", "-0.0625", "0.3750", "-0.0312", "0.7500", "-0.8750"),
                "exact: the scale is a power of two",
            ),
            Row(
                "amax of this group",
                value[: V32.quant_tile].abs().max().item(),
                "0.75",
                slip="step 4 gave the group an amax of 0.75, but -0.875 is in it. No harm: 0.875 / 448 is just 2^-9, "
                "the same scale.",
            ),
            Row(
                "RoPE dims 0, 1, 2, 63",
                numbers(value[V32.d_nope :][list(TOKEN_ROPE)]),
                ("0.1", "-0.2", "0.3", "0.05"),
                "bf16 as written: 0.1 is stored as 0.100098",
            ),
            Row(
                "threads that share a token on SM90",
                4,
                "32",
                slip="4 lanes a token, each reads 16 bytes of every 64: 128 threads cover 32 tokens a round, not 4 "
                "(SM100: 8 threads a token).",
            ),
            Row(
                "what converts e4m3 to fp32",
                None,
                "tensor cores",
                slip="tensor cores multiply FP8, they do not convert it. The SM's other pipes go e4m3 → half → fp32 → "
                "bf16, then multiply.",
            ),
            Row(
                "conversion cycles a token",
                conversion_cycles,
                note="more than the 34 cycles of tensor-core work (step 17): why two CTAs share it in FlashMLA",
            ),
        ),
    )


def step_8_scores(case: Case) -> Step:
    """S = Q·Kᵀ."""
    keys = case.keys  # [topk, 576]
    s = case.q[0, 0].float() @ keys.T  # [h_q, topk], raw
    dot = s[1, 0].item()
    return Step(
        8,
        "Scores",
        (
            Row("q·k of the example", dot, "12.5", "our head 1 and token 47"),
            Row("times softmax_scale", dot * SCALE, "0.5208"),
            Row(
                "S as the kernel keeps it",
                dot,
                "0.5208",
                slip="the MMA gives the raw product. 1/sqrt(576) is part of the factor in the exponent (step 9), which "
                "the article applies as well: twice in all.",
            ),
            Row(
                "S of head 0, first listed token",
                s[0, 0].item(),
                "12.5",
                slip="step 9 has 3.52 for the same head and token, as the row's maximum: 12.5 cannot be in that row. "
                "We take 3.52 and give the 12.5 to head 1.",
            ),
            Row(
                "dims of the product",
                V32.d_qk,
                "512",
                slip="the listing leaves the 64 RoPE dims out; the sum beneath it has all 576: 36 WGMMAs of 16 dims.",
            ),
            Row(
                "the MMA call's bool flag",
                None,
                "accumulate",
                slip="true starts the accumulator from zero. S is cleared for each block; O, with false, goes on.",
            ),
        ),
    )


class State(NamedTuple):
    """What online softmax carries from block to block, for one head."""

    row_max_log2: torch.Tensor  # scalar, maximum of SCALE_LOG2 * s so far
    row_sum: torch.Tensor  # scalar, Σ P so far
    o: torch.Tensor  # [d_v], Σ P·v so far


class Block(NamedTuple):
    """One block of keys taken in: its scores, its weights, what it did to the sums before, the state behind it."""

    s: torch.Tensor  # [64]
    p: torch.Tensor  # [64]
    rescale: torch.Tensor  # scalar
    state: State


def online_softmax(case: Case) -> list[Block]:
    """Head 0 of request 0 over its two blocks, as the kernel does it, in base 2."""
    # Not -inf to begin with: -inf - (-inf) would be NaN in a block without valid keys.
    state = State(torch.tensor(-1e30), torch.tensor(0.0), torch.zeros(V32.d_v))
    valid = case.indices[0, 0] >= 0  # [topk], all here
    blocks = []
    for keys, ok in zip(case.keys.split(TILE_N), valid.split(TILE_N), strict=True):  # keys [64, 576]
        s = keys @ case.q[0, 0, 0].float()  # [64]
        s = torch.where(ok, s, -math.inf)
        row_max_log2 = torch.maximum(state.row_max_log2, s.max() * SCALE_LOG2)
        rescale = torch.exp2(state.row_max_log2 - row_max_log2)
        p = torch.exp2(s * SCALE_LOG2 - row_max_log2)
        o = state.o * rescale + p @ keys[:, : V32.d_v]
        state = State(row_max_log2, state.row_sum * rescale + p.sum(), o)
        blocks.append(Block(s, p, rescale, state))
    return blocks


def step_9_softmax(blocks: list[Block]) -> Step:
    s, p, rescale, state = blocks[0]
    listed = list(BLOCK_SCORES[0])
    return Step(
        9,
        "Online softmax, first block",
        (
            Row("S of keys 0, 1, 2, 3, 63", numbers(s[listed]), ("3.52", "-1.23", "2.17", "0.89", "-0.45")),
            Row("maximum of the block", s.max().item(), "3.52"),
            Row("row_max_log2 = 3.52 * scale_log2", state.row_max_log2.item(), "0.2116"),
            Row("rescale of what was before", rescale.item(), "0", "exp2(-1e30 - 0.2116)"),
            Row("P of key 0", p[0].item(), "1.0"),
            Row("exponent of key 1", (s[1] * SCALE_LOG2 - state.row_max_log2).item(), "-0.2855"),
            Row("P of key 1", p[1].item(), "0.820"),
            Row("row_sum", state.row_sum.item(), "42.5", "supposed there; ours: the keys not printed score alike"),
            Row(
                "named barriers exist since",
                None,
                "Hopper",
                slip="PTX has had barriers with a number and a thread count since sm_20. New in Hopper are transaction "
                "barriers, mbarriers that count bytes as well.",
            ),
        ),
    )


def step_10_output(case: Case, blocks: list[Block]) -> Step:
    """O += P·V, V = the first 512 values of the same keys."""
    p, v = blocks[0].p, case.keys[:TILE_N, : V32.d_v]  # [64], [64, 512]
    p_bf16 = p.to(torch.bfloat16).float()
    return Step(
        10,
        "O += P·V, first block",
        (
            Row("P·v of tokens 47, 2091 in dim 0", numbers(p[:2] * v[:2, 0]), note="1.0 * 0.25, 0.820 * V[2091, 0]"),
            Row("O[0] after the block", blocks[0].state.o[0].item()),
            Row("MMA steps = 64 keys / 16", TILE_N // 16, "4"),
            Row(
                "P of key 1, as the MMA takes it",
                p_bf16[1].item(),
                "fp32",
                slip="the A operand is bf16, as step 9 converts it; the accumulator is fp32. row_sum adds up the "
                "unrounded values.",
            ),
            Row(
                "O[0] with P rounded to bf16",
                (p_bf16 @ v[:, 0]).item(),
                note="as on a GPU; the reference does not round",
            ),
        ),
    )


def step_11_second_block(blocks: list[Block]) -> Step:
    s, p, rescale, state = blocks[1]
    exponent = s * SCALE_LOG2 - state.row_max_log2
    return Step(
        11,
        "Online softmax, second block",
        (
            Row("S of keys 0, 1, 2, 63", numbers(s[list(BLOCK_SCORES[1])]), ("1.75", "0.33", "-2.10", "0.91")),
            Row("maximum of the block, log2", (s.max() * SCALE_LOG2).item(), "0.1052"),
            Row("row_max_log2", state.row_max_log2.item(), "0.2116", "unchanged"),
            Row("rescale of what was before", rescale.item(), "1.0"),
            Row("exponent of key 0", exponent[0].item(), "-0.1064"),
            Row("P of key 0", p[0].item(), "0.929"),
            Row(
                "exponent of key 1",
                exponent[1].item(),
                "-0.1917",
                slip="last digit: -0.19176 rounds to -0.1918.",
            ),
            Row("P of key 1", p[1].item(), "0.876"),
            Row("sum of the block", p.sum().item(), "38.2"),
            Row("row_sum", state.row_sum.item(), "80.7"),
        ),
    )


def step_12_row_sum(blocks: list[Block]) -> Step:
    """A row of S lies in four lanes of a warp: each has summed its own columns."""
    p = blocks[0].p + blocks[1].p  # [64]: the rescale between them is 1
    lane = torch.arange(TILE_N) // 2 % 4  # of each column, in the WGMMA accumulator
    lanes = torch.stack([p[lane == i].sum() for i in range(4)])
    return Step(
        12,
        "The row sum over the lanes",
        (
            Row("row_sum in lanes 0..3", numbers(lanes), note="lane i holds columns 2i, 2i + 1 of every 8"),
            Row("row_sum", lanes.sum().item(), "80.7", "two shuffles"),
            Row("row_max_log2", blocks[1].state.row_max_log2.item(), "0.2116"),
            Row(
                "warpgroups that hold a part of row_sum",
                1,
                "2",
                slip="what is merged are the four lanes of a row, in warpgroup 0; only it does the softmax. Warpgroup "
                "1 has other columns of O and reads the finished factor from shared memory.",
            ),
        ),
    )


def step_13_sink(case: Case, blocks: list[Block]) -> Step:
    """The sink is one more logit without a value: it enters the denominator only."""
    row_max_log2, row_sum, _ = blocks[1].state
    sink_log2 = case.attn_sink[0] * math.log2(math.e)
    term = torch.exp2(sink_log2 - row_max_log2)
    return Step(
        13,
        "Attention sink",
        (
            Row("sink_log2 = -2.5 * log2(e)", sink_log2.item(), "-3.607"),
            Row("sink_log2 - row_max_log2", (sink_log2 - row_max_log2).item(), "-3.818"),
            Row("the sink's P", term.item(), "0.0709"),
            Row("row_sum with the sink", (row_sum + term).item(), "80.77"),
            Row("o_scale = 1 / that", (1 / (row_sum + term)).item(), "0.01238"),
            Row(
                "where our split requests meet the sink",
                None,
                "main kernel",
                slip="this is the path of a request that is not split. Ours are (step 3): their parts scale by "
                "1 / row_sum and only combine adds the sink, once, or it would count twice.",
            ),
        ),
    )


def step_14_write(case: Case, blocks: list[Block]) -> Step:
    """Out and lse of an unsplit request; what a split one leaves instead."""
    row_max_log2, row_sum, o = blocks[1].state
    o_scale = 1 / (row_sum + torch.exp2(case.attn_sink[0] * math.log2(math.e) - row_max_log2))
    value = o[0] * o_scale
    lse_ln, lse_max = torch.log(row_sum), row_max_log2 / math.log2(math.e)
    return Step(
        14,
        "Writing out and lse",
        (
            Row("O[0]", o[0].item(), "15.6", "supposed there; ours: the values in dim 0 are chosen to give it"),
            Row("O[0] * o_scale", value.item(), "0.1931"),
            Row(
                "bf16 of it",
                value.to(torch.bfloat16).item(),
                "0.1931",
                slip="no bf16 value rounds to 0.1931: they lie 2^-10 apart here. So in step 19.",
            ),
            Row("ln(row_sum)", lse_ln.item(), "4.391"),
            Row("row_max_log2 / log2(e)", lse_max.item(), "0.1467", "= 3.52 / 24"),
            Row(
                "lse, natural log",
                (lse_ln + lse_max).item(),
                "4.538",
                "without the sink",
                slip="last digit: 4.5374. Two rounded terms were added.",
            ),
            Row(
                "lse of a partial result, log2",
                (torch.log2(row_sum) + row_max_log2).item(),
                note="the formula of a part; the two parts that there really are: step 16",
            ),
        ),
    )


def step_15_dependent_launch() -> Step:
    return Step(
        15,
        "Programmatic dependent launch of combine",
        (
            Row(
                "combine begins to merge after",
                None,
                "its request's CTAs",
                slip="it is set up once every CTA of the main kernel has triggered or left, and then waits until that "
                "whole grid has ended before it reads: there is no start request by request.",
            ),
        ),
    )


def step_16_combine(case: Case) -> Step:
    """Merge splits by their lse: the article's three, then the two that request 0 really has."""
    # One request of 192 keys, alone on 66 parts, is split in three. d_v = 2 here: the values that the article prints.
    metadata, num_splits = reference.plan([3 * TILE_N], 66)
    lse_log2 = torch.tensor([4.2, 3.8, 2.1])
    o_partial = torch.tensor([[0.15, -0.23], [0.12, -0.31], [0.08, -0.11]])
    weight = torch.exp2(lse_log2 - lse_log2.max())  # [3]
    out, lse = reference.combine(
        o_partial.view(3, 1, 1, 2),  # [slots, s_q, h_q, d_v]
        lse_log2.view(3, 1, 1),
        metadata,
        num_splits,
        out=torch.zeros(1, 1, 1, 2),
        lse=torch.zeros(1, 1, 1),
    )
    article_weight = torch.tensor([1.0, 0.7579, 0.1353])
    article_out = article_weight @ o_partial / article_weight.sum()

    # Requests 0 and 1 of the case: what the main kernel leaves, and the merge, with the sink.
    plan = mla_cute.plan_decode(case.q, case.indices)
    splits = plan.num_splits.diff()
    o_pieces, lse_pieces = reference.partials(case.q, case.kv_cache, case.indices, plan.metadata)
    merged = reference.combine(
        o_pieces,
        lse_pieces,
        plan.metadata,
        plan.num_splits,
        attn_sink=case.attn_sink,
        out=torch.zeros(B, S_Q, H_Q, V32.d_v),
        lse=torch.zeros(B, S_Q, H_Q),
    )
    return Step(
        16,
        "Combine",
        (
            Row(
                "splits of each request here",
                numbers(splits),
                ("1", "1"),
                slip="step 3 has split both in two, so that combine has work; the no-split epilogue of steps 13 and 14 "
                "is not what happens here.",
            ),
            Row(
                "grid",
                None,
                "(b, s_q, h_q/8)",
                slip="(2, 1, 16) either way, as s_q = 1, but the tokens now lie on x: y ends at 65535.",
            ),
            Row("heads a CTA", 256 // 32, "8", "a warp a head"),
            Row("three splits: maximum", lse_log2.max().item(), "4.2"),
            Row("weight of split 0", weight[0].item(), "1.0"),
            Row("weight of split 1", weight[1].item(), "0.7579"),
            Row(
                "weight of split 2",
                weight[2].item(),
                "0.1353",
                slip="exp2(2.1 - 4.2) = 2^-2.1 = 0.2333; 0.1353 is e^-2, the wrong base and exponent. All is base 2.",
            ),
            Row("sum of the weights", weight.sum().item(), "1.8932", slip="1.9911, as the third is 0.2333."),
            Row(
                "merged O[0], O[1]",
                numbers(out[0, 0, 0]),
                note=f"the article stops at the formula; its weights give ({article_out[0]:.4f}, {article_out[1]:.4f})",
            ),
            Row("merged lse, natural log", lse.item(), note="(4.2 + log2(1.9911)) * ln 2"),
            Row(
                "request 0: lse_log2 of its two splits",
                numbers(lse_pieces[:2, 0, 0]),
                note="log2(42.5) + 0.2116 and log2(38.2) + 0.2116",
            ),
            Row(
                "request 0: merged out[0]",
                merged[0][0, 0, 0, 0].item(),
                "0.1931",
                "with the sink: the number of step 14, by the way that the plan prescribes",
            ),
            Row("request 0: merged lse", merged[1][0, 0, 0].item(), "4.538", slip="as in step 14: 4.5374."),
        ),
    )


def step_17_timeline() -> Step:
    """What a block of 64 keys costs an SM with 64 heads."""

    def mma(dims: int) -> int:
        return 2 * TILE_M * TILE_N * dims // MMA_FLOP_PER_CYCLE

    why = "no source gives cycles like these. At full rate (4096 FLOP a cycle) a block takes 1152 and 1024."
    return Step(
        17,
        "Time of one block",
        (
            Row("Q·Kᵀ [cycles]", mma(V32.d_qk), "36", slip=why + " 36 is the number of WGMMAs."),
            Row("P·V [cycles]", mma(V32.d_v), "16", slip="as above; 1024 for both halves of V."),
            Row(
                "tensor-core cycles a key",
                (mma(V32.d_qk) + mma(V32.d_v)) / TILE_N,
                note="FlashMLA's figure: 34; its conversion from FP8: 50, or 25 if two CTAs share it",
            ),
        ),
    )


def step_18_architectures() -> Step:
    return Step(
        18,
        "SM90 and SM100",
        (
            Row(
                "SM100 threads of the warpgroups",
                (128, 128, 128),
                ("32", "192", "160"),
                slip="three warpgroups of 128, as step 5 has it: softmax; four warps of one job each; dequantisation. "
                "So the softmax has 128 threads, not 32.",
            ),
            Row("SM100 registers of 65536", (224 + 72 + 208) * 128, note="224/72/208 a thread"),
            Row("SM90 registers of 65536", (192 + 160 + 152) * 128, note="192/160/152 a thread"),
        ),
    )


def step_19_result(case: Case) -> Step:
    """The whole call: `mla_cute.sparse_decode` on the case."""
    out, lse = mla_cute.sparse_decode(case.q, case.kv_cache, case.indices, attn_sink=case.attn_sink)
    dims = list(OUT)
    exact, _ = reference.sparse_decode(
        case.q, case.kv_cache, case.indices, attn_sink=case.attn_sink, out_dtype=torch.float32
    )
    return Step(
        19,
        "The result, from mla_cute.sparse_decode",
        (
            Row("out shape", tuple(out.shape), ("2", "1", "128", "512")),
            Row(
                "out[0, 0, 0, (0, 1, 2, 511)]",
                numbers(out[0, 0, 0, dims].float()),
                ("0.1931", "-0.2847", "0.0523", "-0.1234"),
                slip="out is bf16: these are the nearest bf16 values.",
            ),
            Row(
                "the same in fp32, not rounded",
                numbers(exact[0, 0, 0, dims]),
                ("0.1931", "-0.2847", "0.0523", "-0.1234"),
            ),
            Row("lse[0, 0, 0]", lse[0, 0, 0].item(), "4.538", slip="as in step 14: 4.5374."),
        ),
    )


def walk() -> list[Step]:
    """All steps, in order."""
    case = build_case()
    blocks = online_softmax(case)
    return [
        step_0_setup(),
        step_1_call(case),
        step_2_parameters(case),
        step_3_plan(case),
        step_4_quantise(),
        step_5_launch(),
        step_6_load_q(),
        step_7_dequantise(case),
        step_8_scores(case),
        step_9_softmax(blocks),
        step_10_output(case, blocks),
        step_11_second_block(blocks),
        step_12_row_sum(blocks),
        step_13_sink(case, blocks),
        step_14_write(case, blocks),
        step_15_dependent_launch(),
        step_16_combine(case),
        step_17_timeline(),
        step_18_architectures(),
        step_19_result(case),
    ]


# ---- printing

WIDTHS = (42, 24, 24, 9, 60)  # step and value, computed, article, mark, note


def show(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show, value)) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_row(*cells: str) -> None:
    """Print cells side by side, each wrapped to its column."""
    columns = [textwrap.wrap(cell, width - 2) or [""] for cell, width in zip(cells, WIDTHS, strict=True)]
    for i in range(max(map(len, columns))):
        line = "".join((c[i] if i < len(c) else "").ljust(w) for c, w in zip(columns, WIDTHS, strict=True))
        print(line.rstrip())


def main() -> int:
    steps = walk()
    print_row("step", "computed", "article", "", "note")
    for step in steps:
        print(f"\nStep {step.number}: {step.title}")
        for row in step.rows:
            note = "; ".join(filter(None, (row.note, row.slip)))
            print_row("  " + row.name, show(row.computed), show(row.article), row.mark, note)
    marks = [row.mark for step in steps for row in step.rows]
    print(
        f"\n{len(marks)} rows: {marks.count('=')} agree with the article, {marks.count('SLIP')} mark a slip of it, "
        f"{marks.count('')} have no counterpart there."
    )
    return 1 if "DIFFERS" in marks else 0


if __name__ == "__main__":
    raise SystemExit(main())
