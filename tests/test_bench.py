"""mla_cute.bench without a GPU: cases, inputs, arithmetic, records, tables and plots, and that nothing unchecked is timed.

Everything but the profiler runs here, on the reference and small shapes.
"""

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mla_cute
from mla_cute import bench, reference, target
from mla_cute.kv_cache import MODEL1, V32, dequantize_kv_cache
from mla_cute.testing import Case, Inputs, make_inputs

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "h200"
RECORD = {  # as they were before MODEL1, peers and errors
    "op": "sparse_decode", "kv_format": "v32", "b": 2, "h_q": 128, "s_q": 1, "s_kv": 512, "topk": 64, "extra_topk": 0,
    "us": 20.0, "split_us": 15.0, "combine_us": 4.0, "tflops": 100.4, "gbps": 300.0, "peer": "flash_mla", "peer_us": 30.0,
    "checked": True, "gpu": "NVIDIA H200", "driver": "1", "torch": "2", "dsl": "4", "commit": "abc", "date": "2026-01-01",
}  # fmt: skip
MODEL1_RECORD = RECORD | {
    "kv_format": "model1", "topk": 128, "extra_topk": 1024, "s_kv": 16384, "extra_s_kv": 16384, "page_block_size": 256,
    "extra_page_block_size": 2, "extra_topk_length": True, "peer": None, "peer_us": None,
    "peers": {"flash_mla": {"us": 16.0, "ratio": 0.8, "errors": {"out_rms": 2e-5}}}, "errors": {"out_rms": 1e-5},
}  # fmt: skip
WRITE_RECORD = {k: RECORD[k] for k in ("kv_format", "checked", "gpu", "driver", "torch", "dsl", "commit", "date")} | {
    "op": "write_kv_cache", "scales": "amax", "n": 4096, "us": 10.0, "gbps": 2990, "copy_us": 9.0,
}  # fmt: skip
SMALL = {
    "v32": bench.bench_case(5, 3, s_q=2, s_kv=100, topk=40),
    "model1": bench.bench_case(
        *(3, 5, 1, 150, 64),
        kv_format="model1",
        page_block_size=61,
        extra_topk=128,
        extra_page_block_size=2,
        extra_s_kv=100,
        topk_length=True,
        extra_topk_length=True,
    ),
}
small = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)


@pytest.fixture
def timed(monkeypatch) -> list:
    """Puts other times in place of the profiler's; the calls that were timed."""
    calls = []

    def kernel_times(call, n):
        calls.append(call)
        call()
        us = 10.0 * len(calls)  # ours 10, the first peer 20
        return {"us": us, "split_us": 8.0, "combine_us": 1.0, "us_range": [9.0, us + 1], "calls": n}

    monkeypatch.setattr(bench, "kernel_times", kernel_times)
    return calls


class FakeFlashMLA:
    """The 2026 form of the package, on the reference; keeps what it was called with."""

    def __init__(self, factor=1.0, refuses=""):
        self.factor, self.refuses, self.seen = factor, refuses, []

    def get_mla_metadata(self):
        return "metadata", None

    def flash_mla_with_kvcache(self, q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits=None, **kwargs):
        assert (block_table, cache_seqlens, head_dim_v, metadata, num_splits) == (None, None, 512, "metadata", None)
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.seen.append({"q": q, "k_cache": k_cache, **kwargs})
        assert kwargs.pop("is_fp8_kvcache")
        extra = kwargs.pop("extra_k_cache"), kwargs.pop("extra_indices_in_kvcache")
        kwargs |= dict(zip(("extra_kv_cache", "extra_indices"), extra))
        out, lse = mla_cute.reference.sparse_decode(q, k_cache, **kwargs)
        return out * self.factor, lse.transpose(1, 2).contiguous()


@pytest.fixture
def flash_mla(monkeypatch) -> FakeFlashMLA:
    fake = FakeFlashMLA()
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    return fake


@pytest.fixture
def as_if_gpu(monkeypatch, timed):
    """`main` measures, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mla_cute, "select_impl", lambda device, impl=None: mla_cute.reference)
    monkeypatch.setattr(bench, "provenance", lambda commit: {"gpu": "NVIDIA H200", "commit": commit})
    monkeypatch.setattr(bench, "compile_ahead", lambda *args: None)
    for name in ("measure", "measure_write"):
        monkeypatch.setattr(bench, name, functools.partial(getattr(bench, name), device="cpu"))


def run_main(*argv) -> int:
    try:
        bench.main([str(a) for a in argv])
    except SystemExit as e:
        return e.code
    return 0


# ----- cases and inputs -----------------------------------------------------------------------------------------------


def test_suites():
    flashmla = [dataclasses.asdict(c) for c in bench.FLASHMLA]
    assert len(flashmla) == 42 and len({tuple(c.values()) for c in flashmla}) == 42
    assert len({*bench.SUITES["all"]}) == 46 and {*bench.QUICK} < {*bench.SUITES["all"]} and len(bench.QUICK) == 10
    cfg = {  # h_q, extra_topk, extra page, extra lengths: FlashMLA's CFG1 to CFG4
        (c["h_q"], c["extra_topk"], c["extra_page_block_size"], c["extra_topk_length"])
        for c in flashmla
        if c["extra_topk"]
    }
    assert cfg == {(64, 512, 64, False), (128, 1024, 64, False), (64, 1024, 2, True), (128, 1024, 2, True)}
    for c in flashmla:
        model1 = (128, 16384, 16384, 256) if c["extra_topk"] else (16384, 32768, None, 64)
        assert c["kv_format"] == "v32" or (c["topk"], c["s_kv"], c["extra_s_kv"], c["page_block_size"]) == model1


@pytest.mark.parametrize("case", bench.SUITES["all"], ids=str)
def test_every_case_is_one_that_the_kernel_takes(case):
    from mla_cute.sm90 import sparse_decode as module

    module.default_config(case.problem).check(case.problem)


@small
def test_inputs(case, monkeypatch):
    monkeypatch.setattr(bench, "DRAWS", 1)  # a request at a time
    monkeypatch.setattr(bench, "POOL_TOKENS", 128)
    x = bench.make_inputs(case, "cpu")
    assert x.q.shape == (case.b, case.s_q, case.h_q, case.d_qk) and x.q.abs().max() <= 1
    lists = [(x.kv_cache, x.indices, x.topk_length, case.topk, case.page_block_size)]
    if case.extra_topk:
        extra = case.extra_topk, case.extra_page_block_size
        lists.append((x.extra_kv_cache, x.extra_indices, x.extra_topk_length, *extra))
    assert len(lists) == 1 + (x.extra_indices is not None)
    for kv_cache, indices, length, topk, page in lists:
        assert kv_cache.shape[1:] == (page, 1, case.format.bytes_per_token)
        assert kv_cache.stride(0) % case.format.row_bytes == 0  # FlashMLA: of MODEL1 576
        assert dequantize_kv_cache(kv_cache, kv_format=case.format).isfinite().all()
        assert indices.shape == (case.b, case.s_q, topk) and indices.dtype == torch.int32
        assert (length is not None) == case.topk_length
        assert length is None or (length.min() >= 0 and length.max() <= topk)
        owners = {}
        for r, s in torch.cartesian_prod(torch.arange(case.b), torch.arange(case.s_q)).tolist():
            row = indices[r, s]
            valid = row[row >= 0]
            assert (row[len(valid) :] == -1).all() and len(valid) >= 1
            assert len(valid.unique()) == len(valid) and valid.max() < kv_cache.shape[0] * page
            for p in (valid // page).unique().tolist():
                assert owners.setdefault(p, r) == r  # a page is of one request
    again = bench.make_inputs(case, "cpu")
    assert torch.equal(x.indices, again.indices) and torch.equal(x.kv_cache, again.kv_cache)


# ----- arithmetic -----------------------------------------------------------------------------------------------------


def test_flops_and_bytes_by_hand():
    v32, model1 = bench.bench_case(128, 128, s_q=2), bench.model1(4, 64)
    assert bench.flops(v32, 256 * 2048) == 2 * 256 * 2048 * 128 * 1088 == 146_028_888_064
    assert bench.num_bytes(v32, 1000) == 2 * 256 * 128 * 1088 + 656_000
    assert bench.flops(model1, 10) == 2 * 10 * 128 * 1024
    assert bench.num_bytes(model1, 1000) == 2 * 64 * 2 * 128 * 1024 + 576_000


def test_listed_and_distinct_keys_by_hand():
    indices = torch.tensor([[[1, 2, -1], [2, 3, -1]], [[7, 7, 9], [1, -1, -1]]], dtype=torch.int32)
    x = Inputs(None, None, indices, None, None, 1.0, None)
    assert bench.counts(x) == (12, 6)  # 1, 2, 3, 7, 9 and -1
    x = dataclasses.replace(x, topk_length=torch.tensor([2, 1]), extra_indices=indices)
    assert bench.counts(x) == (2 * (2 + 1) + 12, 4 + 6)  # 1, 2, 3, 7
    x = dataclasses.replace(x, topk_length=torch.tensor([5, -3]), extra_topk_length=torch.tensor([0, 0]))
    assert bench.counts(x) == (6, 4)


def test_roofline():
    h200 = {"gpu": "NVIDIA H200"}
    assert bench.roofline(h200 | {"tflops": 494.5, "gbps": 480.0}) == {"bound": "compute", "bound_share": 0.5}
    assert bench.roofline(h200 | {"tflops": 98.9, "gbps": 1200.0}) == {"bound": "bandwidth", "bound_share": 0.25}
    assert bench.roofline(h200 | {"gbps": 4320}) == {"bound": "bandwidth", "bound_share": 0.9}
    assert bench.roofline({"gpu": "another", "tflops": 1.0, "gbps": 1.0}) == {}


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start))


def test_times_of_events():
    events = [event("cudaLaunchKernel", 0, 1), event("warmup", 1, 3)]
    for i, split in enumerate((10, 14, 12)):
        at = 100 * i + 10
        events += [event("Memset (Device)", at, at + 5), event("cudaLaunchKernel", at + 5, at + 6)]
        events += [event("mla_combine_x", at + 8 + split, at + 12 + split), event("mla_sparse", at + 10, at + 10 + split)]
    times = bench.times_of(events, 3)
    assert times == {"us": 14, "split_us": 12, "combine_us": 4, "us_range": [12, 16], "calls": 3}
    assert bench.times_of([event("fill", 0, 1), event("Memcpy DtoD", 2, 5)], 1)["split_us"] == 3
    with pytest.raises(RuntimeError, match="the profiler saw 3 of 4 calls"):
        bench.times_of(events, 4)


# ----- measuring ------------------------------------------------------------------------------------------------------


@small
def test_measure(case, timed, flash_mla):
    if case.kv_format == "v32":
        case = dataclasses.replace(case, topk=64)
    record, failed = bench.measure(case, 7, peers=["flash_mla"], oracle=True, device="cpu")
    assert failed == [] and len(timed) == 2 and record["checked"] and record["calls"] == 7 and "variant" not in record
    x = bench.make_inputs(case, "cpu")
    listed, distinct = bench.counts(x)
    assert record["tflops"] == round(bench.flops(case, listed) / 10.0 / 1e6, 1)
    assert record["gbps"] == round(bench.num_bytes(case, distinct) / 10.0 / 1e3, 1)
    peer = record["peers"]["flash_mla"]
    assert (record["us"], peer["us"], peer["ratio"]) == (10.0, 20.0, 2.0)
    assert peer["errors"] == pytest.approx(record["errors"], rel=0.5)  # the fake is the same reference
    assert 0 < record["errors"]["out_rms"] < record["errors"]["out_max"] < 1e-3 > record["errors"]["lse_max"]

    seen = flash_mla.seen[-1]
    assert seen["q"].shape[2] == 64 and torch.equal(seen["q"][:, :, : case.h_q], x.q)
    assert torch.equal(seen["attn_sink"][: case.h_q], x.attn_sink) and seen["attn_sink"].shape == (64,)
    assert seen["k_cache"].dtype == torch.float8_e4m3fn and seen["softmax_scale"] == case.d_qk**-0.55
    for theirs, ours in {
        "indices": "indices", "topk_length": "topk_length", "extra_topk_length": "extra_topk_length",
        "extra_k_cache": "extra_kv_cache", "extra_indices_in_kvcache": "extra_indices",
    }.items():  # fmt: skip
        t, expected = seen[theirs], getattr(x, ours)
        assert t is expected or torch.equal(t.view(expected.dtype), expected)

    named = {name: record.get(name, bench.DEFAULTS.get(name)) for name in (*bench.CASE_FIELDS, *bench.MORE_FIELDS)}
    assert bench.bench_case(**named) == case  # the record says which case it is


def test_peer_heads(timed, flash_mla):
    for h_q, padded in ((1, 64), (64, 64), (65, 128), (128, 128)):
        case = bench.bench_case(1, h_q, s_kv=64, topk=64)
        assert bench.measure(case, peers=["flash_mla"], device="cpu")[1] == []
        assert flash_mla.seen[-1]["q"].shape[2] == padded


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk": 40}, "flash_mla needs indices of a multiple of 64 keys, got 40"),
        ({"topk_length": True}, "flash_mla takes neither topk_length nor extra keys with a V3.2 cache"),
        ({"extra_topk": 64}, "neither topk_length nor extra keys"),
        ({"kv_format": "model1", "extra_topk": 32}, "needs extra_indices of a multiple of 64 keys, got 32"),
    ],
)
def test_what_the_peer_does_not_take(change, message, timed, flash_mla):
    case = dataclasses.replace(bench.bench_case(1, 2, s_kv=64, topk=64), **change)
    record, (failed,) = bench.measure(case, peers=["flash_mla"], device="cpu")
    assert record["peers"] == {} and len(timed) == 1 and flash_mla.seen == []
    assert failed.startswith("flash_mla: NotImplementedError: ") and message in failed


def test_a_wrong_result_is_not_timed(monkeypatch, timed):
    case = SMALL["v32"]
    right = mla_cute.sparse_decode

    def wrong(what, index=...):
        def call(*args, **kwargs):
            out, lse = right(*args, **kwargs)
            {"out": out, "lse": lse}[what][index] += 0.1
            return out, lse

        return call

    for what in ("out", "lse"):
        monkeypatch.setattr(mla_cute, "sparse_decode", wrong(what))
        with pytest.raises(AssertionError, match=f"^{what}: "):
            bench.measure(case, device="cpu")
    monkeypatch.setattr(mla_cute, "sparse_decode", lambda *args, **kwargs: (right(*args, **kwargs)[0] / 0, None))
    with pytest.raises(AssertionError, match="^out: "):
        bench.measure(case, device="cpu")
    assert timed == []


def test_nan_in_a_request_that_is_not_compared():
    x = bench.make_inputs(bench.bench_case(20, 1, s_kv=10, topk=4), "cpu")
    expected = bench.expect(x)
    assert len(expected.requests) == 10
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    bench.check(expected, out, lse)
    out[1, 0, 0, 3] = float("nan")
    with pytest.raises(AssertionError, match="out: 1 of 10240 elements are not finite"):
        bench.check(expected, out, lse)


def test_a_wrong_peer_is_not_timed(timed, flash_mla):
    flash_mla.factor = 1.1
    record, (failed,) = bench.measure(bench.bench_case(1, 2, s_kv=64, topk=64), peers=["flash_mla"], device="cpu")
    assert len(timed) == 1 and record["peers"] == {} and failed.startswith("flash_mla: AssertionError: out: ")


def test_errors_by_hand():
    out, lse = torch.zeros(2, 1, 1, 2), torch.tensor([[[1.0]], [[torch.inf]]])
    exact = torch.tensor([[[[3.0, 4.0]]], [[[0.0, 0.0]]]], dtype=torch.float64), lse.double() + 0.5
    expected = bench.Expected(torch.arange(2), None, None, exact)
    found = bench.errors(expected, out, lse)
    assert found == {"out_max": 4.0, "out_rms": 2.5, "lse_max": 0.5, "lse_rms": 0.3536}


def test_variants_are_named(timed):
    record, _ = bench.measure(SMALL["v32"], changes={"tile_n": 32}, device="cpu")
    assert record["variant"] == "tile_n=32"
    record, _ = bench.measure(SMALL["v32"], impl="mla_cute.reference", device="cpu")
    assert record["variant"] == "mla_cute.reference"


def test_without_git(monkeypatch):
    def run(command, **options):
        if command[0] == "git":
            raise FileNotFoundError("git")
        return "580.1\n"

    monkeypatch.setattr(bench.subprocess, "check_output", run)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = bench.provenance(None)
    assert re.fullmatch(r"unknown, version \d+\.\d+\.\d+", found["commit"]) and found["driver"] == "580.1"


def test_clocks(monkeypatch):
    class Popen:
        polls, stdout = [None, None, 0], SimpleNamespace(read=lambda: "1980, 612.34\n")

        def __init__(self, command, **kwargs):
            assert command[:2] == ["nvidia-smi", "--query-gpu=clocks.sm,power.draw"]

        def poll(self):
            return self.polls.pop(0)

    calls = []
    monkeypatch.setattr(bench.subprocess, "Popen", Popen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert bench.clocks(lambda: calls.append(0)) == {"sm_mhz": 1980.0, "power_w": 612.34} and len(calls) == 2


def test_compile_ahead(monkeypatch, capsys):
    from mla_cute import jit, schedule_kernel
    from mla_cute.sm90 import sparse_decode as module

    jobs = []
    monkeypatch.setattr(mla_cute, "select_impl", lambda device, impl: module)
    monkeypatch.setattr(jit, "arch_of", lambda device: "sm_90a")
    of_device = target.Target("sm_90a", 132, None, None, max_clusters=lambda size: 120 // size)
    monkeypatch.setattr(bench, "target", lambda device: of_device)
    monkeypatch.setattr(jit, "compile_ahead", lambda todo, progress: jobs.extend(todo))
    bench.compile_ahead(bench.QUICK, None, {"fixed_overhead_blocks": 2})
    problems = {job.problem for job in jobs if job.module is module}
    assert problems == {case.problem for case in bench.QUICK} and len(problems) == 6
    assert {job.config.fixed_overhead_blocks for job in jobs if job.module is module} == {2}
    assert len([job for job in jobs if job.module is schedule_kernel]) == 2 and len(jobs) == 9
    assert [job.config.clustered for job in jobs if job.module is module].count(True) == 1  # small batches' kernel
    monkeypatch.setattr(jit, "compile_ahead", lambda todo, progress: 1 // 0)
    bench.compile_ahead(bench.QUICK, None, {})
    assert "not compiled ahead: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 128, 4100])
@pytest.mark.parametrize("fmt, scales", bench.KINDS)
def test_measure_write(fmt, scales, n, timed):
    record, failed = bench.measure_write(fmt, scales, n, 3, device="cpu")
    assert failed == [] and len(timed) == 2
    assert (record["kv_format"], record["scales"], record["n"], record["checked"]) == (fmt.name, scales, n, True)
    assert (record["us"], record["copy_us"], record["copy_share"]) == (10.0, 20.0, 2.0)
    each = {V32: 2 * 576 + 656 + 8, MODEL1: 2 * 512 + 584 + 8}[fmt]
    assert record["gbps"] == round(n * each / 1e4, 1)


def test_a_wrong_write_is_not_timed(monkeypatch, timed):
    right, calls = mla_cute.write_kv_cache, []

    def wrong(kv_cache, latent, *args, **kwargs):
        calls.append(0)
        right(kv_cache, latent * (1 + len(calls) % 2), *args, **kwargs)

    monkeypatch.setattr(mla_cute, "write_kv_cache", wrong)
    with pytest.raises(AssertionError, match="kv_cache: .* differ in their bits"):
        bench.measure_write(V32, "pow2", 5, device="cpu")
    assert timed == []


# ----- records --------------------------------------------------------------------------------------------------------


def test_records_append_and_the_latest_counts(tmp_path):
    path = tmp_path / "h200" / "sparse_decode.json"
    other = RECORD | {"b": 4}
    bench.append(path, [RECORD, other])
    bench.append(path, [RECORD | {"us": 10.0}])
    records = json.loads(path.read_text())
    assert [r["us"] for r in records] == [20.0, 20.0, 10.0]
    assert [(r["b"], r["us"]) for r in bench.latest(records)] == [(2, 10.0), (4, 20.0)]


def test_a_new_record_takes_the_row_of_an_old_one(timed):
    case = bench.bench_case(2, 128, s_kv=512, topk=64)
    new, _ = bench.measure(case, device="cpu")
    assert bench.identity(new) == bench.identity(RECORD)
    others = [dataclasses.replace(case, page_block_size=2), dataclasses.replace(case, topk_length=True)]
    others += [bench.model1(config, b) for config in (1, 2, 3, 4) for b in (2, 64)] + [bench.SUITES["all"][-1]]
    fields = [{name: getattr(c, name) for name in (*bench.CASE_FIELDS, *bench.MORE_FIELDS)} for c in others]
    assert len({bench.identity({"op": "sparse_decode"} | f) for f in [*fields, RECORD]}) == len(others) + 1
    assert bench.identity(WRITE_RECORD) != bench.identity(WRITE_RECORD | {"scales": "pow2"})
    assert bench.identity(WRITE_RECORD) != bench.identity(WRITE_RECORD | {"n": 1})


def test_committed_records():
    """All of them are read, and their rows are those of today's cases."""
    records = bench.load(sorted(RESULTS.glob("*.json")))
    assert {r["op"] for r in records} == {*bench.TABLES}
    assert all("what" not in r for r in records)
    cases = [{name: getattr(c, name) for name in (*bench.CASE_FIELDS, *bench.MORE_FIELDS)} for c in bench.SUITES["all"]]
    known = {bench.identity({"op": "sparse_decode"} | fields) for fields in cases}
    found = {bench.identity(r) for r in records if r["op"] == "sparse_decode"}
    assert len(found & known) >= 16


def test_readme_shows_the_committed_records(tmp_path):
    readme = tmp_path / "README.md"
    text = (Path(__file__).parent.parent / "README.md").read_text()
    readme.write_text(text)
    bench.write_tables(readme, bench.load([RESULTS / "sparse_decode.json", RESULTS / "write_kv_cache.json"]))
    assert readme.read_text() == text, "python -m mla_cute.bench table FILES --write README.md"


def test_a_variant_never_takes_the_shipped_row(tmp_path, capsys):
    path = tmp_path / "r.json"
    bench.append(path, [RECORD, RECORD | {"us": 1.0, "variant": "fixed_overhead_blocks=2"}])
    bench.main(["table", str(path)])
    printed = capsys.readouterr().out
    assert "| 20.0 (15.0 / 4.0) |" in printed
    assert "| 1.0 (" not in printed


@pytest.mark.parametrize("command", [["table"], ["plot", "--out", "nowhere"]])
@pytest.mark.parametrize("record", [RECORD, WRITE_RECORD])
def test_a_time_that_was_not_checked_is_not_shown(tmp_path, capsys, command, record):
    path = tmp_path / "r.json"
    for unchecked in ({k: v for k, v in record.items() if k != "checked"}, record | {"checked": False}):
        path.write_text(json.dumps([RECORD, unchecked]))
        assert run_main(*command, path) == 1
        said = capsys.readouterr()
        assert said.out == "" and "a time whose result was not checked: V3.2" in said.err


# ----- tables ---------------------------------------------------------------------------------------------------------


def test_table_and_readme(tmp_path, capsys):
    path, other, readme = tmp_path / "r.json", tmp_path / "w.json", tmp_path / "README.md"
    bench.append(path, [RECORD, RECORD | {"b": 4, "peer": None, "peer_us": None, "commit": "def"}, MODEL1_RECORD])
    host = {"op": "sparse_decode", "what": "host time", "us": [1.0]}
    bench.append(other, [WRITE_RECORD, WRITE_RECORD | {"kv_format": "model1", "scales": "pow2"}, host])
    marked = [f"<!-- {name}-table:start -->\nstale\n<!-- {name}-table:end -->" for name in ("speed", "writer")]
    readme.write_text("\n".join(["a", marked[0], "b", marked[1], "z\n"]))
    assert run_main("table", path, other, "--write", readme) == 0
    head = "us (split / combine) | TFLOPS | GB/s | of the bound | FlashMLA us | FlashMLA / ours |"
    lines = [
        "**V3.2**, s_kv 512, page 64",
        f"| b | h_q | s_q | topk | {head}",
        "| 2 | 128 | 1 | 64 | 20.0 (15.0 / 4.0) | 100 | 300 | 10% compute | 30.0 | 1.50 |",
        "| 4 | 128 | 1 | 64 | 20.0 (15.0 / 4.0) | 100 | 300 | 10% compute | - | - |",
        "**MODEL1**, s_kv 16384 + 16384, page 256 + 2",
        f"| b | h_q | s_q | topk | {head} rms error, ours / FlashMLA's |",
        "| 2 | 128 | 1 | 128 + 0..1024 | 20.0 (15.0 / 4.0) | 100 | 300 | 10% compute | 16.0 | 0.80 | 0.500 |",
        "| `write_kv_cache` | scales | n | us | GB/s | a copy of as many bytes, us | copy / ours |",
        "| V3.2 | amax | 4096 | 10.0 | 2990 | 9.0 | 90% |",
        "| MODEL1 | pow2 | 4096 | 10.0 | 2990 | 9.0 | 90% |",
    ]
    printed, text = capsys.readouterr().out.split("\n"), readme.read_text()
    for line in lines:
        assert line in printed and line in text.split("\n")
    where = "NVIDIA H200, driver 1, torch 2, DSL 4, commits abc, def, 2026-01-01."
    assert where in text and "The bound is the nearer one of 989 TFLOPS and 4.8 TB/s." in text
    assert "stale" not in text and text.startswith("a\n<!--") and "-->\nb\n<!--" in text and text.endswith("-->\nz\n")


def test_rows_of_different_pages_say_so():
    text = bench.table([MODEL1_RECORD, MODEL1_RECORD | {"extra_page_block_size": 64}])
    assert text.startswith("**MODEL1**, s_kv 16384 + 16384\n") and "| 256 + 2 |" in text and "| 256 + 64 |" in text


@pytest.mark.parametrize("text", ["nothing", "<!-- speed-table:end --> <!-- speed-table:start -->"])
def test_a_readme_without_markers(tmp_path, capsys, text):
    path, readme = tmp_path / "r.json", tmp_path / "README.md"
    bench.append(path, [RECORD])
    readme.write_text(text)
    assert run_main("table", path, "--write", readme) == 1
    assert "needs one <!-- speed-table:start --> and behind it one <!-- speed-table:end -->" in capsys.readouterr().err
    assert readme.read_text() == text


@pytest.mark.parametrize("text", [None, "no JSON", ""])
def test_a_file_that_cannot_be_read(tmp_path, capsys, text):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    assert run_main("table", path) == 1
    assert capsys.readouterr().err.startswith(f"table: cannot read {path}: ")


# ----- plots ----------------------------------------------------------------------------------------------------------


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "r.json", tmp_path / "made" / "plots"
    alone = RECORD | {"b": 4, "peer": None, "peer_us": None}
    bench.append(path, [RECORD, alone, MODEL1_RECORD, WRITE_RECORD])
    assert run_main("plot", path, "--out", out) == 0
    texts = {p.name: p.read_text() for p in out.iterdir()}
    assert {*texts} == {"roofline.svg", "ratios.svg"} and all(len(t) < 100_000 for t in texts.values())
    for word in ("V3.2, mla_cute", "V3.2, flash_mla", "MODEL1, flash_mla", "989 TFLOPS, 4.8 TB/s", "3 cases"):
        assert word in texts["roofline.svg"]
    for word in ("1.50  (20 us)", "0.80  (20 us)", "MODEL1 b 2 h_q 128 s_q 1 topk 128 + 0..1024"):
        assert word in texts["ratios.svg"]
    assert run_main("plot", path, "--out", out) == 0
    assert {p.name: p.read_text() for p in out.iterdir()} == texts  # a plot changes when its records do

    from mla_cute import bench_plot

    other = tmp_path / "other"
    assert [p.name for p in bench_plot.write([alone | {"gpu": "another"}], other)] == ["roofline.svg"]
    with pytest.raises(ValueError, match="needs a record of sparse_decode, got none"):
        bench_plot.write([], other)


def test_committed_plots_are_small():
    for path in RESULTS.glob("*.svg"):
        assert path.stat().st_size < 100_000


def test_no_matplotlib(tmp_path, capsys, monkeypatch, as_if_gpu, timed):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "r.json"
    bench.append(path, [RECORD])
    assert run_main("plot", path, "--out", tmp_path) == 1
    assert capsys.readouterr().err.startswith("plot: plots need matplotlib (pip install matplotlib")
    assert run_main("sparse_decode", "--case", CASE, "--plot", tmp_path) == 1
    assert capsys.readouterr().err.startswith("sparse_decode: plots need matplotlib")
    assert timed == []  # said before the work


# ----- the command ----------------------------------------------------------------------------------------------------

CASE = "b=2,h_q=16,s_q=1,s_kv=100,topk=64"


def test_a_run(tmp_path, capsys, as_if_gpu, flash_mla):
    path = tmp_path / "out" / "r.json"
    model1 = f"{CASE},kv_format=model1,extra_topk=64,extra_page_block_size=2,extra_topk_length=1"
    options = ["--peers", "flash_mla", "--errors", "-n", "31", "--commit", "abc", "--json", path]
    assert run_main("sparse_decode", "--case", CASE, "--case", model1, *options) == 0
    first, second = json.loads(path.read_text())
    for r in (first, second):
        assert r["checked"] and r["commit"] == "abc" and r["calls"] == 31 and r["gpu"] == "NVIDIA H200"
        assert r["peers"]["flash_mla"]["errors"] and 0 <= r["bound_share"] < 1 and r["bound"] in ("compute", "bandwidth")
    assert (second["kv_format"], second["extra_topk"], second["extra_topk_length"]) == ("model1", 64, True)
    printed = capsys.readouterr().out
    assert "**V3.2**, s_kv 100, page 64\n\n| b |" in printed and "**MODEL1**" in printed
    assert "2 of 2 cases, 0 failures" in printed and "| 1.000 |" in printed


def test_in_a_graph(tmp_path, capsys, monkeypatch, as_if_gpu, flash_mla):
    times = {"graph_us": 31.0, "warm_graph_us": 29.0}
    monkeypatch.setattr(bench, "graph_times", lambda call, expected, n: call() and times)
    path = tmp_path / "r.json"
    assert run_main("sparse_decode", "--case", CASE, "--graph", "--peers", "flash_mla", "--json", path) == 0
    (r,) = json.loads(path.read_text())
    for side in (r, r["peers"]["flash_mla"]):
        assert (side["graph_us"], side["warm_graph_us"]) == (31, 29)
    printed = capsys.readouterr().out
    assert "| in a graph, us (cold / warm L2) | FlashMLA us | in a graph |" in printed
    assert "| 31.0 / 29.0 | 20.0 | 31.0 / 29.0 |" in printed


@pytest.mark.gpu
def test_captured():
    """A replay computes: results from the capture's own run would be NaN."""
    x = torch.arange(8.0, device="cuda")
    replay = bench.captured(lambda: (2 * x, x + 1))
    for _ in range(2):
        x += 1
        assert [t.tolist() for t in replay()] == [(2 * x).tolist(), (x + 1).tolist()]


@pytest.mark.gpu
def test_graph_times():
    """Of ten calls in a graph each takes a tenth; a wrong result has no time."""
    case = Case(b=2, h_q=16, s_kv=200, topk=64)
    x = make_inputs(case, "cuda")
    call, expected = bench.sparse_decode(x, case.problem), bench.expect(x)
    times = bench.graph_times(call, expected, 5)
    assert 1 < times["warm_graph_us"] < 1.2 * times["graph_us"] + 5
    with pytest.raises(AssertionError):
        bench.graph_times(lambda: [2 * t for t in call()], expected, 5)


def test_a_failure_does_not_end_the_run(tmp_path, capsys, monkeypatch, as_if_gpu):
    fake = FakeFlashMLA(refuses="no kernel for this\nand a trace")
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    path = tmp_path / "r.json"
    right, calls = mla_cute.sparse_decode, []

    def fails_at_first(*args, **kwargs):
        calls.append(0)
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        return right(*args, **kwargs)

    monkeypatch.setattr(mla_cute, "sparse_decode", fails_at_first)
    other = CASE.replace("b=2", "b=3")
    assert run_main("sparse_decode", "--case", CASE, "--case", other, "--peers", "flash_mla", "--json", path) == 1
    (record,) = json.loads(path.read_text())
    assert record["b"] == 3 and record["peers"] == {}
    printed = capsys.readouterr().out
    assert "FAILED b2-h16-q1-kv100-topk64-page64-varlen-sink: RuntimeError: out of luck\n" in printed
    assert "FAILED b3-h16-q1-kv100-topk64-page64-varlen-sink: flash_mla: RuntimeError: no kernel for this\n" in printed
    assert "1 of 2 cases, 2 failures" in printed and "| 3 | 16 |" in printed and "| 2 | 16 |" not in printed


def test_suites_of_the_writer(tmp_path, capsys, monkeypatch, as_if_gpu):
    monkeypatch.setitem(bench.WRITE_SUITES, "quick", [(fmt, scales, 70) for fmt, scales in bench.KINDS])
    path = tmp_path / "w.json"
    assert run_main("write_kv_cache", "--suite", "quick", "--json", path, "--commit", "abc") == 0
    records = json.loads(path.read_text())
    assert [(r["kv_format"], r["scales"], r["n"]) for r in records] == [(f.name, s, 70) for f, s in bench.KINDS]
    assert capsys.readouterr().out.count("| `write_kv_cache` |") == 1
    assert {w[2] for w in bench.WRITES} == {1, 128, 4096, 16384, 65536} and len(bench.WRITES) == 15


@pytest.mark.parametrize(
    "case",
    ["b=1", CASE.replace("b=2", "b=x"), "", f"{CASE},x=2", CASE.replace("b=2", "b=0"), f"{CASE},kv_format=v4", CASE + ",b"],
)
def test_a_case_that_is_none(capsys, case):
    assert run_main("sparse_decode", "--case", case) == 2
    said = capsys.readouterr().err
    needed = "needs b=, h_q=, s_q=, s_kv=, topk= of at least 1, takes kv_format="
    assert f"argument --case: {needed}" in said or "kv_format: must be v32 or model1, got v4" in said


@pytest.mark.parametrize(
    "options, message",
    [
        (["--impl", "nonesuch"], "sparse_decode: impl: must be an importable module"),
        (["-n", "0"], "sparse_decode: -n: must be at least 1, got 0"),
        (["--set", "raw=1"], "sparse_decode: --set: needs field=value with a field of tile_n=64"),
        (["--set", "tile_n"], "sparse_decode: --set: needs field=value"),
        (["--set", "tile_n=x"], "sparse_decode: --set: needs field=value"),
        (["--peers", "flash_mla"], "sparse_decode: import of flash_mla halted"),
    ],
)
def test_options_that_cannot_be(monkeypatch, capsys, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    right = mla_cute.select_impl
    monkeypatch.setattr(mla_cute, "select_impl", lambda device, impl: right("cpu", impl))
    assert run_main("sparse_decode", "--case", CASE, *options) == 1
    assert capsys.readouterr().err.startswith(message)


def test_host_times_are_not_the_gpus(monkeypatch, capsys):
    """Each round begins with an idle GPU and cannot fill the driver's queue; with a launch and without, it is one call."""
    assert 2 * bench.HOST_CALLS < 1000  # launches of a round
    monkeypatch.setattr(bench, "HOST_ROUNDS", 3)
    monkeypatch.setattr(bench, "HOST_CALLS", 2)
    events, attend = [], reference.sparse_decode
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(reference, "sparse_decode", lambda *a, **k: events.append("launch") or attend(*a, **k))
    bench.host(None, "cpu")
    assert events == ["wait", "launch", "launch"] * 4 + ["wait"] * (1 + 3 * 5)  # one round more: it compiles
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "host time a call, us: median (range) of 3 rounds of 2"
    names = ["sparse_decode with a plan", "all but its launch", "its launch", "plan_decode", "write_kv_cache"]
    assert [line.strip().startswith(name) for line, name in zip(text[1:], names, strict=True)] == [True] * 5
    whole, rest, launch = (float(re.search(r" +(\d+\.\d) \(", line)[1]) for line in text[1:4])
    assert rest < whole
    assert launch == pytest.approx(whole - rest, abs=0.11)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("command", ["sparse_decode", "write_kv_cache", "host", "first-call"])
def test_no_gpu_is_said(command, capsys):
    assert run_main(command) == 1
    assert "needs a GPU" in capsys.readouterr().err
