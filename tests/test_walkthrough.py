"""examples/walkthrough.py: each of its values against the article's number, or the right one where that slips."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_cute

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "walkthrough.py"

spec = importlib.util.spec_from_file_location("walkthrough", SCRIPT)
walkthrough = sys.modules["walkthrough"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(walkthrough)

LOG2_E = math.log2(math.e)
C = LOG2_E / 24  # softmax_scale * log2(e)
M = 3.52 * C  # row maximum, base 2
SINK = 2 ** (-2.5 * LOG2_E - M)  # the sink's weight
LSE = math.log(80.7) + 3.52 / 24

# (step, row): what the article prints, and computes rightly. Accepted: half a unit of the last digit.
AGREE = {
    (0, "d_qk = latent + RoPE"): "576",
    (0, "d_v"): "512",
    (0, "128 heads x 128 dims / 576"): "28",
    (1, "q [b, s_q, h_q, d_qk]"): "2 1 128 576",
    (1, "k_cache [., page, h_kv, bytes]"): "64 1 656",
    (1, "indices [b, s_q, topk]"): "2 1 128",
    (1, "page and offset of index 47"): "0 47",
    (1, "out [b, s_q, h_q, d_v]"): "2 1 128 512",
    (1, "lse [b, h_q, s_q]"): "2 128 1",
    (2, "bytes: codes, scales, RoPE"): "512 16 128",
    (2, "bytes a token"): "656",
    (2, "offsets: codes, scales, RoPE"): "0 512 528",
    (2, "softmax_scale = 1/sqrt(576)"): "0.04167",
    (2, "log2(e)"): "1.4427",
    (2, "q.stride(0), q.stride(2)"): "73728 576",
    (3, "blocks of each request"): "2 2",
    (3, "cost = sum of (blocks + 5)"): "14",
    (3, "P = 132 / s_q / (h_q / 64)"): "66",
    (3, "payload = ceil(14 / 66) + 5"): "6",
    (3, "cost of a whole request"): "7",
    (3, "blocks that fit into an empty part"): "1",
    (3, "part 0: requests, blocks"): "0 0 0 1",
    (3, "part 1: requests, blocks"): "0 0 1 2",
    (3, "part 2: requests, blocks"): "1 1 0 1",
    (3, "part 3: requests, blocks"): "1 1 1 2",
    (3, "parts without work"): "4 65",
    (3, "num_splits"): "0 2 4",
    (3, "FP8 record saves [%]"): "43",
    (4, "groups a token"): "4",
    (4, "amax"): "0.75",
    (4, "amax / 448"): "0.001674",
    (4, "exponent = ceil(log2(amax / 448))"): "-9",
    (4, "scale = 2^-9"): "0.001953",
    (4, "1 / scale"): "512.0",
    (4, "code of 0.25"): "128.0",
    (4, "largest code"): "448",
    (5, "SM90 grid"): "2 1 66",
    (5, "SM90 CTAs"): "132",
    (5, "threads a CTA"): "384",
    (5, "SM100 columns of O"): "0 255",
    (5, "SM100 columns of Q"): "256 399",
    (5, "gather4 copies a block"): "16",
    (6, "bytes of a Q tile"): "73728",
    (7, "first indices"): "47 2091 583 12",
    (7, "last index"): "8821",
    (7, "index 47: page, offset"): "0 47",
    (7, "scales of token 47"): "0.001953 0.003906 0.001953 0.007812",
    (7, "codes"): "128.0 -256.0 64.0 -32.0 192.0 -16.0 384.0 -448.0",
    (7, "bf16(code * scale)"): "0.2500 -0.5000 0.1250 -0.0625 0.3750 -0.0312 0.7500 -0.8750",
    (7, "RoPE dims 0, 1, 2, 63"): "0.1 -0.2 0.3 0.05",
    (8, "q·k of the example"): "12.5",
    (8, "times softmax_scale"): "0.5208",
    (9, "S of keys 0, 1, 2, 3, 63"): "3.52 -1.23 2.17 0.89 -0.45",
    (9, "maximum of the block"): "3.52",
    (9, "row_max_log2 = 3.52 * scale_log2"): "0.2116",
    (9, "rescale of what was before"): "0",
    (9, "P of key 0"): "1.0",
    (9, "exponent of key 1"): "-0.2855",
    (9, "P of key 1"): "0.820",
    (9, "row_sum"): "42.5",
    (10, "MMA steps = 64 keys / 16"): "4",
    (11, "S of keys 0, 1, 2, 63"): "1.75 0.33 -2.10 0.91",
    (11, "maximum of the block, log2"): "0.1052",
    (11, "row_max_log2"): "0.2116",
    (11, "rescale of what was before"): "1.0",
    (11, "exponent of key 0"): "-0.1064",
    (11, "P of key 0"): "0.929",
    (11, "P of key 1"): "0.876",
    (11, "sum of the block"): "38.2",
    (11, "row_sum"): "80.7",
    (12, "row_sum"): "80.7",
    (12, "row_max_log2"): "0.2116",
    (13, "sink_log2 = -2.5 * log2(e)"): "-3.607",
    (13, "sink_log2 - row_max_log2"): "-3.818",
    (13, "the sink's P"): "0.0709",
    (13, "row_sum with the sink"): "80.77",
    (13, "o_scale = 1 / that"): "0.01238",
    (14, "O[0]"): "15.6",
    (14, "O[0] * o_scale"): "0.1931",
    (14, "ln(row_sum)"): "4.391",
    (14, "row_max_log2 / log2(e)"): "0.1467",
    (16, "heads a CTA"): "8",
    (16, "three splits: maximum"): "4.2",
    (16, "weight of split 0"): "1.0",
    (16, "weight of split 1"): "0.7579",
    (16, "request 0: merged out[0]"): "0.1931",
    (19, "out shape"): "2 1 128 512",
    (19, "the same in fp32, not rounded"): "0.1931 -0.2847 0.0523 -0.1234",
}

# (step, row): what the article says, what is right, and how close to that the computed number must come. None: words, which
# nothing computes.
SLIPS = {
    (0, "values a token of plain K and V / 576"): (28, 40960 / 576, 1e-9),
    (1, "cache that dense decode reads"): ("the same", None, None),
    (2, "scale_log2 = softmax_scale * log2(e)"): (0.06010, 0.0601123, 5e-8),
    (3, "CTAs that get work"): (14, 8, 0),
    (3, "part 0: first, last request split"): ((0, 1), (1, 1), 0),
    (3, "part 1: first, last request split"): ((1, 0), (1, 1), 0),
    (3, "part 2: first, last request split"): ((0, 1), (1, 1), 0),
    (3, "part 3: first, last request split"): ((1, 0), (1, 1), 0),
    (3, "b 128, topk 2048: split requests"): ("most", 0, 0),
    (3, "combine, if nothing is split"): ("not launched", None, None),
    (3, "what bounds decode with 128 heads"): ("memory", None, None),
    (4, "fp32 stored as the group's scale"): (512.0, 2**-9, 0),
    (4, "format of a stored scale"): ("UE8M0", None, None),
    (4, "decimal digits of e4m3"): (3, 4 * math.log10(2), 1e-9),
    (5, "SM100 parts for 64 heads"): (132, 148, 0),
    (5, "SM100 tensor memory [KiB]"): (512, 256, 0),
    (5, "tcgen05.mma.ws"): ("widthless", None, None),
    (5, "SM100, 128 heads of V3.2"): ("left open", None, None),
    (6, "warpgroup that loads Q"): (2, 0, 0),
    (7, "amax of this group"): (0.75, 0.875, 0),
    (7, "threads that share a token on SM90"): (32, 4, 0),
    (7, "what converts e4m3 to fp32"): ("tensor cores", None, None),
    (8, "S as the kernel keeps it"): (0.5208, 12.5, 0),
    (8, "S of head 0, first listed token"): (12.5, 3.52, 1e-6),
    (8, "dims of the product"): (512, 576, 0),
    (8, "the MMA call's bool flag"): ("accumulate", None, None),
    (9, "named barriers exist since"): ("Hopper", None, None),
    (10, "P of key 1, as the MMA takes it"): ("fp32", 0.8203125, 0),
    (11, "exponent of key 1"): (-0.1917, 0.33 * C - M, 1e-6),
    (12, "warpgroups that hold a part of row_sum"): (2, 1, 0),
    (13, "where our split requests meet the sink"): ("main kernel", None, None),
    (14, "bf16 of it"): (0.1931, 0.193359375, 0),
    (14, "lse, natural log"): (4.538, LSE, 2e-6),
    (15, "combine begins to merge after"): ("its request's CTAs", None, None),
    (16, "splits of each request here"): ((1, 1), (2, 2), 0),
    (16, "grid"): ("(b, s_q, h_q/8)", None, None),
    (16, "weight of split 2"): (0.1353, 2**-2.1, 1e-6),
    (16, "sum of the weights"): (1.8932, 1 + 2**-0.4 + 2**-2.1, 1e-6),
    (16, "request 0: merged lse"): (4.538, LSE, 2e-6),
    (17, "Q·Kᵀ [cycles]"): (36, 64 * 64 * 576 * 2 // 4096, 0),
    (17, "P·V [cycles]"): (16, 64 * 64 * 512 * 2 // 4096, 0),
    (18, "SM100 threads of the warpgroups"): ((32, 192, 160), (128, 128, 128), 0),
    (19, "out[0, 0, 0, (0, 1, 2, 511)]"): (
        (0.1931, -0.2847, 0.0523, -0.1234),
        (0.193359375, -0.28515625, 0.05224609375, -0.12353515625),
        0,
    ),
    (19, "lse[0, 0, 0]"): (4.538, LSE, 2e-6),
}

W = [1, 2**-0.4, 2**-2.1]  # weights of the article's three splits
# (step, row): the number where the article prints none, and the accepted error.
OURS = {
    (3, "slots of the 4 partial results"): ((0, 1, 2, 3), 0),
    (3, "FLOP a byte of K, 128 heads"): (2 * 128 * 1088 / 656, 1e-9),
    (5, "SM90 registers of 65536"): (64512, 0),
    (7, "index 47: byte address"): (47 * 656, 0),
    (7, "index 2091: page, offset"): ((32, 43), 0),
    (7, "index 2091: byte address"): (2091 * 656, 0),
    (7, "... with a gap of one record a page"): ((2091 + 32) * 656, 0),
    (7, "request 1, position 4: index"): (145 * 64 + 4, 0),
    (7, "conversion cycles a token"): (50, 0),
    (10, "P·v of tokens 47, 2091 in dim 0"): ((0.25, 2 ** (-4.75 * C) * 0.203125), 1e-6),
    (10, "O[0] after the block"): (8.5388, 1e-3),
    (10, "O[0] with P rounded to bf16"): (8.5458, 1e-3),
    (12, "row_sum in lanes 0..3"): ((20.738, 20.324, 19.558, 20.080), 1e-3),
    (14, "lse of a partial result, log2"): (math.log2(80.7) + M, 2e-6),
    (16, "merged O[0], O[1]"): (
        (
            (0.15 * W[0] + 0.12 * W[1] + 0.08 * W[2]) / sum(W),
            -(0.23 * W[0] + 0.31 * W[1] + 0.11 * W[2]) / sum(W),
        ),
        1e-6,
    ),
    (16, "merged lse, natural log"): ((4.2 + math.log2(sum(W))) * math.log(2), 1e-6),
    (16, "request 0: lse_log2 of its two splits"): ((math.log2(42.5) + M, math.log2(38.2) + M), 2e-6),
    (17, "tensor-core cycles a key"): (34, 0),
    (18, "SM100 registers of 65536"): (64512, 0),
    (18, "SM90 registers of 65536"): (64512, 0),
}


@pytest.fixture(scope="module")
def rows():
    """{(step number, row name): Row}"""
    return {(step.number, row.name): row for step in walkthrough.walk() for row in step.rows}


@pytest.fixture(scope="module")
def case():
    return walkthrough.build_case()


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def values(printed):
    """The article's cell as numbers (as words where it has words)."""
    result = []
    for cell in as_tuple(printed):
        try:
            result.append(float(cell))
        except ValueError:
            result.append(cell)
    return tuple(result)


def test_no_row_goes_unchecked(rows):
    assert len(AGREE) + len(SLIPS) + len(OURS) == len(rows)
    assert {*AGREE, *SLIPS, *OURS} == set(rows)


@pytest.mark.parametrize("key", AGREE, ids=str)
def test_agrees_with_the_article(rows, key):
    row, printed = rows[key], AGREE[key].split()
    assert as_tuple(row.article) == tuple(printed)
    assert len(as_tuple(row.computed)) == len(printed)
    for computed, digits in zip(as_tuple(row.computed), printed):
        half_digit = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        tol = 0 if isinstance(computed, int) else half_digit * 1.000001
        assert computed == pytest.approx(float(digits), rel=0, abs=tol)
    assert not row.slip
    assert row.mark == "="


@pytest.mark.parametrize("key", SLIPS, ids=str)
def test_slip_is_marked_and_put_right(rows, key):
    row, (article, right, tol) = rows[key], SLIPS[key]
    assert values(row.article) == as_tuple(article)
    if tol is None:
        assert row.computed is right is None
    else:
        assert as_tuple(row.computed) == pytest.approx(as_tuple(right), rel=0, abs=tol)
    assert row.mark == "SLIP"
    assert row.slip
    assert row.agrees is False  # it would be no slip otherwise


@pytest.mark.parametrize("key", OURS, ids=str)
def test_number_that_the_article_leaves_out(rows, key):
    row, (right, tol) = rows[key], OURS[key]
    assert row.article is None
    assert as_tuple(row.computed) == pytest.approx(as_tuple(right), rel=0, abs=tol)
    assert row.mark == ""


@pytest.mark.parametrize(
    ("computed", "article", "mark"),
    [
        (0.0601123, "0.06011", "="),
        (0.0601123, "0.06010", "DIFFERS"),
        (-0.03125, "-0.0312", "="),  # half a digit off: either rounding will do
        (66, "66", "="),
        (66, "66.4", "DIFFERS"),  # whole numbers are exact
        ((1, 2), ("1", "2"), "="),
        ((1, 2), ("1", "3"), "DIFFERS"),
        ((1, 2), ("1",), "DIFFERS"),
        (0.5, "half", "DIFFERS"),
        (1, None, ""),
    ],
)
def test_mark(computed, article, mark):
    assert walkthrough.Row("name", computed, article).mark == mark
    assert walkthrough.Row("name", computed, article, slip="why").mark == "SLIP"


def test_online_softmax_is_the_librarys_attention(case):
    """All 512 dims, not only the four that the table shows."""
    *_, last = walkthrough.online_softmax(case)
    out, lse = mla_cute.reference.sparse_decode(case.q, case.kv_cache, case.indices, out_dtype=torch.float32)
    torch.testing.assert_close(last.state.o / last.state.row_sum, out[0, 0, 0], rtol=1e-5, atol=1e-6)
    expected = (torch.log2(last.state.row_sum) + last.state.row_max_log2) / LOG2_E
    torch.testing.assert_close(expected, lse[0, 0, 0], rtol=1e-6, atol=1e-6)


def test_case_lists_distinct_tokens_of_its_own_pages(case):
    for request, pages in enumerate((range(138), range(138, 146))):
        tokens = case.indices[request, 0].tolist()
        assert len(set(tokens)) == 128
        assert {t // 64 for t in tokens} <= set(pages)


def run(*args):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *args], capture_output=True, encoding="utf-8", env=env, timeout=120)


def test_script_prints_every_step_and_row(rows):
    done = run("-X", "utf8", str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [int(line.split()[1][:-1]) for line in lines if line.startswith("Step ")] == list(range(20))
    for (_, name), row in rows.items():
        assert any(line.startswith(f"  {name} ") and row.mark in line for line in lines), name
    assert f"{len(AGREE)} agree with the article, {len(SLIPS)} mark a slip" in lines[-1]


def test_exit_code_tells_an_unexplained_difference(monkeypatch, capsys):
    row = walkthrough.Row("wrong", 1, "2")
    monkeypatch.setattr(walkthrough, "walk", lambda: [walkthrough.Step(0, "title", (row,))])
    assert walkthrough.main() == 1
    assert "DIFFERS" in capsys.readouterr().out
