"""The library's own kernels in the emulator: numbers of the reference, no findings, under several schedules."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_checks import pieces

import mla_cute
import mla_cute.sm90.sparse_decode as sm90
from mla_cute import emulator, reference, schedule, schedule_kernel
from mla_cute.emulator import Options
from mla_cute.emulator.run import load
from mla_cute.target import target
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs
from mla_cute.validate import Problem

pytestmark = pytest.mark.emulate
SCHEDULES = 6
CONFIG = sm90.Config(fixed_overhead_blocks=1, clustered=False)  # so that small requests are split
CLUSTERS = sm90.Config(clustered=True)
NAIVE = Path(__file__).parent.parent / "examples" / "naive_sparse_decode.py"

# (case, SMs of the GPU that the plan is made for): 1 to 5 blocks of keys, split and whole requests, one or two tiles of heads.
CASES = [
    (Case(b=2, h_q=64, s_kv=90, topk=64, holes=True), 3),
    (Case(b=3, h_q=64, s_kv=400, topk=320, topk_length=True, sink=True, holes=True, seed=2), 6),
    (Case(b=1, h_q=64, s_kv=400, topk=300, sink=True), 4),
    (Case(b=2, h_q=128, s_kv=200, topk=130, sink=True, duplicates=True), 6),
    (Case(b=2, h_q=40, s_q=2, s_kv=150, topk=133, page_block_size=16, odd_rows=True, scales="random"), 4),
    (Case(b=2, h_q=64, s_kv=100, topk=70, zero_length=True, sink=True), 3),
    (Case(b=1, h_q=5, s_kv=70, topk=65, all_invalid=True, sink=True), 2),
    (Case(b=2, h_q=64, s_kv=90, topk=70, kv_format="model1", page_block_size=61, sink=True, outside=True), 3),
    (Case(b=2, h_q=20, s_kv=150, topk=100, kv_format="model1", page_block_size=7, topk_length=True, odd_rows=True,
          extra_topk=70, extra_page_block_size=5, extra_topk_length=True), 3),
    (Case(b=2, h_q=64, s_kv=90, topk=33, topk_length=True, extra_topk=129, extra_page_block_size=3, holes=True), 4),
]  # fmt: skip


# And by clusters: (case, SMs of the GPU). The comment says CTAs of a cluster x blocks of a request.
CLUSTERED = [
    (Case(b=1, h_q=64, s_kv=400, topk=300, sink=True, holes=True), 16),  # 16 x 5
    (Case(b=3, h_q=64, s_kv=400, topk=320, topk_length=True, sink=True, holes=True, seed=2), 9),  # 3 x 1 to 5
    (Case(b=2, h_q=96, s_kv=200, topk=130, sink=True, duplicates=True, scales="random"), 30),  # 7 x 3, tiles of 64 and 32
    (Case(b=2, h_q=5, s_q=2, s_kv=100, topk=70, zero_length=True, topk_length=True), 40),  # 10 x 1 to 2, 5 heads
    (Case(b=1, h_q=5, s_kv=70, topk=65, all_invalid=True, sink=True), 2),  # 2 x 2
    (Case(b=2, h_q=128, s_kv=90, topk=33, topk_length=True, kv_format="model1", extra_topk=129, extra_page_block_size=3,
          extra_topk_length=True, holes=True, sink=True), 20),  # 5 x 1 to 4
    (Case(b=2, h_q=64, s_kv=90, topk=70, kv_format="model1", page_block_size=61, outside=True), 3),  # 1 x 2
]  # fmt: skip


@pytest.mark.parametrize(
    "case, num_sms, config",
    [pytest.param(*c, CONFIG, id=f"{c[0]}-{c[1]}") for c in CASES]
    + [pytest.param(*c, CLUSTERS, id=f"{c[0]}-{c[1]}-clusters") for c in CLUSTERED],
)
def test_sparse_decode(case, num_sms, config):
    in_all_schedules(case, num_sms, SCHEDULES, config=config)


def in_all_schedules(case, num_sms, schedules, **how):
    """The reference's numbers and no finding in each, and the same bits in all of them."""
    x = make_inputs(case)
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    first = None
    for n in range(schedules):
        with emulator.session(num_sms=num_sms, options=Options.schedule(n)) as s:  # strict: a finding raises
            result = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), **how, backend="emulator")
        assert s.findings == []
        for name, ours, ref, tolerance in zip(
            ("out", "lse"), result, expected, (SPARSE_DECODE_OUT, SPARSE_DECODE_LSE)
        ):
            assert_close(ours, ref, **tolerance, name=name)
        first = first or result
        assert_bitwise(result[0], first[0], name="out")  # whatever the order of the warps
        assert_bitwise(result[1], first[1], name="lse")


@pytest.mark.parametrize(
    "h_q, sink, kv_format", [(1, True, "model1"), (16, False, "v32"), (40, True, "model1"), (128, True, "v32")]
)
def test_two_pieces_and_three(h_q, sink, kv_format):
    """Beside whole requests, with empty pieces; in orders of their CTAs in which now one piece, now the other comes last.

    Scratch and nonce stay the same, as in replays of a CUDA graph: flags must begin anew.
    """
    x, topk_length, (metadata, num_splits), expected = pieces(h_q, kv_format, sink)
    problem = Problem(h_q=h_q, d_qk=x.q.shape[3], kv_format=kv_format, has_topk_length=True, has_attn_sink=sink)
    kernel = load(sm90, problem, sm90.default_config(problem), "sm_90a")
    scratch, first = torch.full((schedule.scratch_size(4, 2, h_q),), math.nan), None
    for n in range(5):
        out, lse = (torch.full(t.shape, math.nan, dtype=t.dtype) for t in expected)
        args = x.attn_sink, float(x.softmax_scale), metadata, num_splits, scratch, out, lse, 3, 12345
        with emulator.session(options=Options.schedule(n)):
            kernel(x.q, x.kv_cache.view(torch.uint8), x.indices, topk_length, None, None, None, *args)
        assert_close(out, expected[0], **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, expected[1], **SPARSE_DECODE_LSE, name="lse")
        first = first or (out, lse)
        assert_bitwise(out, first[0], name="out")
        assert_bitwise(lse, first[1], name="lse")


@pytest.mark.parametrize(
    "model1, lengths", [(False, (640, 64, 640)), (False, (1, 640, 65)), (True, (640, 64, 640)), (True, (0, 0, 0))]
)
def test_a_plan_older_than_the_lengths_ends(model1, lengths):
    """A part that begins at a block which its request no longer has: no hang, and no finding in reads or barriers."""
    case = Case(b=3, h_q=4, s_kv=700, topk=640, topk_length=True, sink=True, **({"kv_format": "model1"} if model1 else {}))
    x = make_inputs(case)
    old = torch.tensor([640, 640, 640], dtype=torch.int32)
    x.topk_length.copy_(torch.tensor(lengths))
    with emulator.session(num_sms=2):
        config = sm90.Config(fixed_overhead_blocks=5, clustered=False)
        plan = mla_cute.plan_decode(x.q, x.indices, topk_length=old, backend="emulator", config=config)
        assert plan.metadata[1, 2] == 8  # where part 1 begins in request 1
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, backend="emulator")
    # Lengths that only shrank: the blocks that are no more attend to nothing.
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    assert_close(out, expected[0], **SPARSE_DECODE_OUT, name="out")
    assert_close(lse, expected[1], **SPARSE_DECODE_LSE, name="lse")


def test_the_cases_split_and_do_not_split():
    """What the list above claims."""
    splits = []
    for case, num_sms in CASES:
        x = make_inputs(case)
        with emulator.session(num_sms=num_sms):
            plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), config=CONFIG, backend="emulator")
        splits += plan.num_splits.diff().tolist()
    assert 1 in splits and max(splits) > 2


@pytest.mark.parametrize("workspace", [False, True], ids=["shared", "workspace"])
@pytest.mark.parametrize("lengths", [None, [200, 0, 77, 1], [64] * 70], ids=["uniform", "varied", "many"])
def test_plan(lengths, workspace, monkeypatch):
    monkeypatch.setattr(schedule_kernel, "needs_workspace", lambda b, num_parts: workspace)
    b, topk = len(lengths or [0] * 5), 200
    topk_length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    keys = reference.sparse_num_keys(b, topk, topk_length)
    for n in range(SCHEDULES):
        for num_parts, overhead in ((1, 5), (7, 5), (40, 0)):
            with emulator.session(options=Options.schedule(n)):
                where = target(torch.device("cpu"), "emulator")
                args = (b, topk, topk_length, num_parts, 64, overhead, torch.device("cpu"), where)
                metadata, num_splits = schedule._plan_by_kernel(*args)
            expected = reference.plan(keys, num_parts, tile_n=64, fixed_overhead_blocks=overhead)
            assert_bitwise(metadata, expected[0], name="metadata")
            assert_bitwise(num_splits, expected[1], name="num_splits")


@pytest.mark.parametrize("workspace", [False, True], ids=["shared", "workspace"])
@pytest.mark.parametrize("topk", [1, 200])
@pytest.mark.parametrize("lengths", [None, [200, 0, 77, 1, 64]], ids=["uniform", "varied"])
@pytest.mark.parametrize("extra_lengths", [None, [0, 130, -5, 9999, 64]], ids=["extra-uniform", "extra-varied"])
def test_plan_with_extra_keys(extra_lengths, lengths, topk, workspace, monkeypatch):
    monkeypatch.setattr(schedule_kernel, "needs_workspace", lambda b, num_parts: workspace)
    length, extra_length = (None if n is None else torch.tensor(n, dtype=torch.int32) for n in (lengths, extra_lengths))
    for n in range(SCHEDULES):
        num_parts, tile_n, extra_topk = ((1, 64, 130), (7, 64, 65), (40, 32, 130))[n % 3]
        extra = {"extra_topk": extra_topk, "extra_topk_length": extra_length}
        with emulator.session(options=Options.schedule(n)):
            where = target(torch.device("cpu"), "emulator")
            args = (5, topk, length, num_parts, tile_n, 1, torch.device("cpu"), where)
            metadata, num_splits = schedule._plan_by_kernel(*args, **extra)
        keys = reference.sparse_num_keys(5, topk, length, **extra, tile_n=tile_n)
        expected = reference.plan(keys, num_parts, tile_n=tile_n, fixed_overhead_blocks=1)
        assert_bitwise(metadata, expected[0], name="metadata")
        assert_bitwise(num_splits, expected[1], name="num_splits")


def test_naive_example():
    x = make_inputs(Case(b=2, h_q=3, s_kv=60, topk=40, topk_length=True, sink=True, holes=True, outside=True))
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    for n in range(3):
        with emulator.session(num_sms=2, options=Options.schedule(n)):
            out, lse = mla_cute.sparse_decode(
                x.q, x.kv_cache, x.indices, **x.kwargs(), impl=str(NAIVE), backend="emulator"
            )
        assert_close(out, expected[0], **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, expected[1], **SPARSE_DECODE_LSE, name="lse")


def test_sources_are_those_of_this_copy(tmp_path):
    """Copies of one source share the disk cache, but each names its own files: line numbers of another's may be gone."""
    code = (
        "from mla_cute import combine; from mla_cute.emulator.run import load; from mla_cute.validate import Problem\n"
        "print(load(combine, Problem(h_q=1), None, 'sm_90a').modules[0].text)"
    )
    for name in ("a", "b"):
        shutil.copytree(Path(mla_cute.__file__).parent, tmp_path / name / "mla_cute")
        env = os.environ | {"PYTHONPATH": str(tmp_path / name), "MLA_CUTE_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", code]
        ptx = subprocess.run(command, cwd=tmp_path / name, env=env, check=True, capture_output=True, text=True).stdout
        files = set(re.findall(r'\.file\s+\d+ "([^"]*)"', ptx))
        assert str(tmp_path / name / "mla_cute" / "combine.py") in files
