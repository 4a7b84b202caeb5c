"""Sparse decode by hand: every intermediate value of one small case, beside the numbers of a published walk-through.

The walk-through is an article in Chinese that follows FlashMLA's sparse decode on a toy batch (b 2, topk 128, pages of 64,
an H800). Each step below computes its values with this library and prints them next to the article's. A row is `ok` when
they agree to the digits the article gives; a `slip` is where the article is wrong, with what is right and why.

    python examples/walkthrough.py
"""

import math
import sys
from dataclasses import dataclass

import torch

import mla_cute
from mla_cute import reference
from mla_cute.kv_cache import V32
from mla_cute.validate import Problem

LOG2_E = math.log2(math.e)

# The article's case: attention of DeepSeek-V3.2, a small batch, an H800.
B, S_Q, H_Q, TOPK, PAGE, NUM_SMS = 2, 1, 128, 128, 64, 132
SCALE = 576**-0.5  # 1/24
SCALE_LOG2 = SCALE * LOG2_E


@dataclass(frozen=True)
class Row:
    """One value: what this library computes and what the article prints (None: it prints nothing)."""

    name: str
    computed: object  # a number or a list of numbers
    article: object
    slip: str = ""  # what is wrong in the article and what is right; empty where it agrees

    @property
    def verdict(self) -> str:
        return "slip" if self.slip else "ok"


def schedule() -> list[Row]:
    """Which CTA does which blocks: the plan."""
    config = reference.Config()  # blocks of 64 keys, 5 blocks of overhead a request, as FlashMLA
    parts = config.num_parts(Problem(h_q=H_Q), S_Q, NUM_SMS)
    metadata, num_splits = reference.plan(reference.sparse_num_keys(B, TOPK), parts)
    blocks = -(-TOPK // config.tile_n)
    total = B * (blocks + config.fixed_overhead_blocks)
    rows = [
        Row("partitions", parts, 66),
        Row("blocks of a request", blocks, 2),
        Row("blocks and overhead in all", total, 14, "it is the load in blocks, not a number of CTAs to launch"),
        Row("payload of a partition", -(-total // parts) + config.fixed_overhead_blocks, 6),
        Row("num_splits", num_splits.tolist(), [0, 2, 4]),
    ]
    told = [[0, 0, 0, 1, 0, 1], [0, 0, 1, 2, 1, 0], [1, 1, 0, 1, 0, 1], [1, 1, 1, 2, 1, 0]]
    for p, article in enumerate(told):
        begin_req, end_req, begin_block, end_block, _, first, last, _ = metadata[p].tolist()
        computed = [begin_req, end_req, begin_block, end_block, first, last]
        why = "a partition inside one request has both split flags set if either is"
        rows.append(Row(f"partition {p}: req, req, block, block, flags", computed, article, why))
    idle = int((metadata[:, 0] >= B).sum())
    rows.append(Row("idle partitions", idle, 62))
    split = int((num_splits.diff() > 1).sum())
    why = "its last steps call the requests unsplit, its own plan splits both"
    rows.append(Row("requests that combine merges", split, 0, why))
    return rows


def quantise() -> list[Row]:
    """One group of 128 values to e4m3 and back, through a real 656-byte record."""
    codes = torch.tensor([128.0, -256, 64, -32, 192, -16, 384, -448])
    wanted = [0.25, -0.5, 0.125, -0.0625, 0.375, -0.0312, 0.75, -0.875]
    kv = torch.zeros(1, 1, 1, V32.d_qk)
    kv[..., :8] = codes * 2.0**-9
    cache = mla_cute.quantize_kv_cache(kv)
    record = cache[0, 0, 0]
    stored = record[V32.scale_offset : V32.scale_offset + 16].view(torch.float32)
    back = mla_cute.dequantize_kv_cache(cache)[0, 0, 0, :8].float()
    amax = float(kv.abs().max())
    return [
        Row("bytes of a record", V32.bytes_per_token, 656),
        Row("saved against bf16, whole %", round(100 - 100 * V32.bytes_per_token / (2 * V32.d_qk)), 43),
        Row("largest magnitude of group 0", amax, 0.75, "its own list holds -0.875; the scale comes out the same"),
        Row("0.75 / 448", 0.75 / 448, 0.001674),
        Row("scale of group 0", float(stored[0]), 0.001953),
        Row("scale stored as", str(stored.dtype).split(".")[1], "ue8m0", "V3.2 stores fp32, a power of two here"),
        Row("factor 512 stored", float((stored == 512).sum()), 1.0, "the divisor is stored, its reciprocal is not needed"),
        Row("codes", record[:8].view(torch.float8_e4m3fn).float().tolist(), codes.tolist()),
        Row("dequantised", back.tolist(), wanted),
    ]


def address() -> list[Row]:
    """Where token 47 of a request lies, and how indices are made from positions."""
    table = torch.arange(256, dtype=torch.int32).repeat(B, 1)  # the article's cache: page i of a request is page i
    positions = torch.tensor([47, 2091, 583, 8821], dtype=torch.int32).repeat(B, S_Q, 1)
    index = mla_cute.to_cache_indices(positions, table, PAGE)[0, 0].tolist()
    byte = index[0] // PAGE * PAGE * V32.bytes_per_token + index[0] % PAGE * V32.bytes_per_token
    return [
        Row("page and row of token 47", [index[0] // PAGE, index[0] % PAGE], [0, 47]),
        Row("page and row of tokens 2091, 583, 8821", [[i // PAGE, i % PAGE] for i in index[1:]], None),
        Row("first byte of token 47", byte, 47 * 656),
        Row("bytes of a Q tile", 64 * V32.d_qk * 2, 73728),
        Row("lanes that dequantise a token", 4, 32, "4 lanes a token in FlashMLA; 8 here"),
    ]


def scores() -> list[Row]:
    """q k for one token whose dot product is 12.5."""
    raw = 12.5
    return [
        Row("softmax scale", SCALE, 0.04167),
        Row("scale * log2(e)", SCALE_LOG2, 0.06010, "0.0601123; its 0.06010 loses a digit, the values after it do not"),
        Row("scaled score", raw * SCALE, 0.5208, "P itself stays unscaled: the scale enters with exp2"),
    ]


def softmax() -> list[Row]:
    """Online softmax over two blocks; the article gives a few scores and the sums 42.5 and 38.2."""
    m = -1e30  # finite: -inf - -inf is NaN
    row_sum, rows = 0.0, []
    blocks = [
        ([3.52, -1.23], 42.5, [0.2116, 0.2116, 0.0, 1.0, 0.820]),
        ([1.75, 0.33], 38.2, [0.1052, 0.2116, 1.0, 0.929, 0.876]),
    ]
    for i, (x, total, told) in enumerate(blocks):
        block_max = max(x) * SCALE_LOG2
        new_m = max(m, block_max)
        alpha = 2.0 ** (m - new_m)
        p = [2.0 ** (v * SCALE_LOG2 - new_m) for v in x]
        row_sum, m = row_sum * alpha + total, new_m
        names = ("block max, base 2", "running max", "rescale factor", "P of key 0", "P of key 1")
        rows += [Row(f"block {i}: {n}", c, a) for n, c, a in zip(names, (block_max, m, alpha, *p), told)]
        rows.append(Row(f"block {i}: running sum", row_sum, (42.5, 80.7)[i]))
    return rows


def sink_and_lse() -> list[Row]:
    """The sink enters the output's factor and nothing else; lse is in natural log."""
    row_sum, row_max, sink = 80.7, 3.52 * SCALE_LOG2, -2.5
    denominator = row_sum + 2.0 ** (sink * LOG2_E - row_max)
    lse = math.log(row_sum) + row_max / LOG2_E
    out = float(torch.tensor(15.6 / denominator).bfloat16())
    sigma = 1 / (1 + math.exp(sink - lse))
    return [
        Row("sink, base 2", sink * LOG2_E, -3.607),
        Row("sink's share", 2.0 ** (sink * LOG2_E - row_max), 0.0709),
        Row("factor of O", 1 / denominator, 0.01238),
        Row("factor by the formula with lse", sigma / row_sum, 0.01238),
        Row("out, bf16", out, 0.1931, "bf16 has 8 bits: 0.1931 becomes 0.193359"),
        Row("lse", lse, 4.538, "4.5374: it adds two rounded numbers"),
    ]


def combine() -> list[Row]:
    """Three pieces of one request, with reference.combine: everything inside is base 2."""
    pieces = torch.tensor([4.2, 3.8, 2.1])
    parts = 8  # enough that each of the three blocks gets a partition of its own
    o = torch.zeros(2 * parts, 1, 1, V32.d_v)
    o[:3, 0, 0, 0], o[:3, 0, 0, 1] = torch.tensor([0.15, 0.12, 0.08]), torch.tensor([-0.23, -0.31, -0.11])
    lse_partial = torch.full((2 * parts, 1, 1), -math.inf)
    lse_partial[:3, 0, 0] = pieces
    metadata, num_splits = reference.plan([192], parts)
    out, lse = torch.zeros(1, 1, 1, V32.d_v), torch.zeros(1, 1, 1)
    reference.combine(o, lse_partial, metadata, num_splits, out=out, lse=lse)
    weights = [2.0 ** float(x - pieces.max()) for x in pieces]
    total = sum(weights)
    wrong = [(0.15 + 0.7579 * 0.12 + 0.1353 * 0.08) / 1.8932, (-0.23 - 0.7579 * 0.31 - 0.1353 * 0.11) / 1.8932]
    return [
        Row("pieces", int(num_splits[1]), 3),
        Row("weight of piece 0", weights[0], 1.0),
        Row("weight of piece 1", weights[1], 0.7579),
        Row("weight of piece 2", weights[2], 0.1353, "2^-2.1 is 0.2333; it took e^-2"),
        Row("sum of the weights", total, 1.8932, "1.9912, with the right third weight"),
        Row("out, first two columns", out[0, 0, 0, :2].tolist(), wrong, "follows from the weights"),
        Row("lse of the whole, natural log", float(lse), None),
        Row("the same from the weights", (math.log2(total) + float(pieces.max())) / LOG2_E, None),
    ]


STEPS = {
    "1  plan": schedule,
    "2  quantisation of one group": quantise,
    "3  physical addresses": address,
    "4  scores": scores,
    "5  online softmax over two blocks": softmax,
    "6  sink, output, lse": sink_and_lse,
    "7  combine of three splits": combine,
}


def text(value) -> str:
    if isinstance(value, list):
        return "[" + " ".join(text(v) for v in value) + "]"
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def main() -> int:
    for title, step in STEPS.items():
        print(f"\n{title}\n    {step.__doc__.splitlines()[0]}")
        for row in step():
            print(f"  {row.verdict:4}  {row.name:42} {text(row.computed):>28}   article {text(row.article)}")
            if row.slip:
                print(f"{'':8}{row.slip}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
