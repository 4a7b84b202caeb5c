"""`python -m mla_cute.emulator`: what it prints, its exit status, the timeline, and what it says about bad input."""

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mla_cute.emulator import __main__ as command
from mla_cute.emulator import report
from mla_cute.emulator.machine import Finding, Options, Place
from mla_cute.emulator.ptx import Instruction
from mla_cute.emulator.run import run_ptx

ROOT = Path(__file__).parent.parent
NAIVE = ROOT / "examples" / "naive_sparse_decode.py"
SMALL = ["sparse_decode", "--b", "1", "--h_q", "8", "--topk", "16", "--num-sms", "4", "--schedules", "1"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of its own, kept for the tests of this file."""
    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


def planted(tmp_path: Path, old: str, new: str) -> str:
    """The naive implementation with a fault."""
    text = NAIVE.read_text()
    assert text.count(old) == 1
    path = tmp_path / "planted.py"
    path.write_text(text.replace(old, new))
    return str(path)


# ----- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "size"),
    [([], 4), (["--impl", "mla_cute.sm90.sparse_decode_small", "--set", "cluster=3"], 3)],
    ids=["load", "asked"],
)
def test_the_kernel_of_small_batches(capsys, more, size):
    """Which another Config stands for than the one that was asked for."""
    args = ["sparse_decode", "--b", "1", "--h_q", "8", "--topk", "128", "--num-sms", "4", "--schedules", "1"]
    assert command.main([*args, *more]) == 0
    text = capsys.readouterr().out
    assert f"clusters of {size} CTAs" in text and "mla_sparse_decode_small_sm90" in text
    assert "1 schedule: numbers agree with the reference, no findings (" in text


def test_a_right_kernel(tmp_path, capsys):
    trace, data = tmp_path / "trace.json", tmp_path / "report.json"
    files = ["--trace", str(trace), "--json", str(data)]
    args = [*SMALL, "--s_kv", "12", "--sink", "--lengths", "--holes", "--impl", str(NAIVE), "--set", "heads_per_cta=8"]
    assert command.main([*args, *files]) == 0
    text = capsys.readouterr().out
    assert "1 schedule: numbers agree with the reference, no findings (" in text
    assert re.search(r"^0 +eager .* ok$", text, re.M)
    assert "heads_per_cta=8" in text
    assert re.search(r"mla_naive_sparse_decode_0: 1 CTA of 256 threads\n.*\n +0-7 .*kernel", text)

    whole = json.loads(data.read_text())
    (schedule,) = whole["schedules"]
    assert whole["case"]["topk"] == 16 and whole["num_parts"] == 1
    assert schedule["findings"] == schedule["wrong"] == [] and not schedule["stopped"]
    assert schedule["errors"]["out"] < 1e-3 and schedule["errors"]["lse"] < 1e-5
    planner, kernel = schedule["kernels"]
    assert planner["block"] == [1024, 1, 1] and len(planner["warps"]) == 32
    assert len(kernel["warps"]) == 8 and kernel["instructions"] == sum(sum(w["classes"].values()) for w in kernel["warps"])
    # One lane 0 a warp writes lse, all write 16 bf16 of out; the keys are 2 of codes and RoPE, 1 scale.
    assert all(w["classes"]["math"] > w["classes"]["memory"] > 10 for w in kernel["warps"])
    assert schedule["instructions"] == planner["instructions"] + kernel["instructions"]

    events = json.loads(trace.read_text())["traceEvents"]
    runs = [e for e in events if e["ph"] == "X" and e["cat"] == "run"]
    assert sum(e["args"]["instructions"] for e in runs) == schedule["instructions"]
    assert max(e["ts"] + e["dur"] for e in runs) == schedule["instructions"]
    assert {"kernel", "load_key"} & {e["name"] for e in runs}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes[-1] == "launch 1, mla_naive_sparse_decode_0, CTA (0, 0, 0)"
    assert next(e["name"] for e in events if e["ph"] == "i") == "barrier 0 round 0"  # the planner's


def test_a_read_behind_the_list_is_found(tmp_path, capsys):
    fault = planted(tmp_path, "cutlass.range(length, unroll=1)", "cutlass.range(length + 1, unroll=1)")
    assert command.main([*SMALL, "--impl", fault]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^0 +eager +[\d.]+ +[\d,]+ +- +- +stopped, 1 finding$", text, re.M)
    found = text.split("Findings\n")[1]
    assert re.match(r"1\. out_of_bounds \(schedule 0\): global access to .*, in no tensor.*\n", found)
    # Python first, then PTX, then who.
    assert re.search(
        r"at +\S*planted\.py:\d+ +token = indices\[.*\n +PTX line \d+: .*ld\.global.*\n +warp \d of CTA \(\d, 0, 0\), mla_",
        found,
    )
    assert "1 of 1 schedule went wrong" in text
    assert "did not end" in text


def test_wrong_numbers(tmp_path, capsys):
    data = tmp_path / "report.json"
    fault = planted(tmp_path, "cutlass.range(length, unroll=1)", "cutlass.range(length - 1, unroll=1)")
    assert command.main([*SMALL, "--only", "2", "--impl", fault, "--json", str(data)]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^2 +random .* WRONG$", text, re.M)
    assert re.search(r"Wrong numbers\nschedule 2: out: \d+ of 4096 elements are off by", text)
    assert "Findings" not in text
    (schedule,) = json.loads(data.read_text())["schedules"]
    assert len(schedule["wrong"]) == 2 and schedule["errors"]["out"] > 1e-3 and schedule["schedule"] == 2


# ----- bad input ------------------------------------------------------------------------------------------------------


def test_as_a_process():
    done = subprocess.run([sys.executable, "-m", "mla_cute.emulator", "dense_decode"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "python -m mla_cute.emulator: OP: must be sparse_decode, got dense_decode\n"
    assert not done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (["sparse_decode", "--arch", "sm_80"], r"--arch: no kernel for sm_80; sparse_decode has one for sm_100a, sm_90a, the"),
        (["sparse_decode", "--b", "many"], r"argument --b: invalid int value: 'many'"),
        (["sparse_decode", "--b", "0"], r"--b: must be at least 1, got 0"),
        (["sparse_decode", "--h_q", "200"], r"--h_q: must be 1 to 128, got 200"),
        (["sparse_decode", "--impl", "nowhere.py"], r"impl: no such file, got 'nowhere.py'"),
        ([*SMALL, "--impl", "mla_cute.reference"], r"sparse_decode: mla_cute.reference.compile must return a DSL function"),
        (["sparse_decode", "--set", "tile_n"], r"--set: needs field=value with a field of tile_n=64, .*; got tile_n"),
        (["sparse_decode", "--set", "fixed_overhead_blocks=0"], r"config: fixed_overhead_blocks must be at least 1, got 0"),
        (["sparse_decode", "--trace", "no/such/folder/t.json"], r"no/such/folder/t.json: cannot be written \(No such file"),
        (
            ["sparse_decode", "--b", "128", "--topk", "2048", "--s_q", "2", "--h_q", "128"],
            r"too large to emulate: 4 schedules will take about \d+ hours \(16384 blocks of keys, 32 CTAs\); .*--force",
        ),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    assert command.main(args) == 2
    captured = capsys.readouterr()
    assert re.match(rf"python -m mla_cute\.emulator: {message}", captured.err) and captured.err.count("\n") == 1
    assert not captured.out


def test_no_kernel_of_an_arch_that_the_emulator_knows(monkeypatch, capsys):
    monkeypatch.setattr(command, "ARCHES", ("sm_120a",))
    assert command.main(["sparse_decode", "--arch", "sm_120a"]) == 2
    assert "--arch: sparse_decode: no kernel for sm_120a; --impl names one" in capsys.readouterr().err


def test_no_compiler(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert command.main(SMALL) == 2
    assert "needs a C compiler" in capsys.readouterr().err


def test_force(monkeypatch, capsys):
    monkeypatch.setattr(command.run, "MAX_SECONDS", 0)
    args = [*SMALL, "--impl", str(NAIVE), "--only", "1"]  # lazy: stores nothing for thousands of instructions
    assert command.main(args) == 2
    assert "too large to emulate: 1 schedule will take about 0 seconds (1 block" in capsys.readouterr().err
    assert command.main([*args, "--force"]) == 0
    assert "numbers agree" in capsys.readouterr().out


# ----- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opcode, name",
    [
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", "tensor"),
        ("wgmma.wait_group.sync.aligned", "barrier"),
        ("tcgen05.mma.cta_group::1.kind::f16", "tensor"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32", "memory"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes", "copy"),
        ("cp.async.bulk.wait_group.read", "barrier"),
        ("ld.shared.v4.b32", "memory"),
        ("mbarrier.try_wait.parity.shared.b64", "barrier"),
        ("cvt.rn.bf16x2.f32", "convert"),
        ("fma.rn.f32", "math"),
        ("setp.lt.s32", "math"),
        ("bra", "control"),
    ],
)
def test_classes(opcode, name):
    assert report.class_of(Instruction(opcode, [], None, False, 1, None, opcode)) == name


def test_roles_are_told_apart_by_what_not_all_warps_run():
    def warp(index, **functions):
        return report.WarpCounts(index, {"math": sum(functions.values())}, functions)

    warps = [warp(0, kernel=90, math=10), warp(1, kernel=90, math=9), warp(2, kernel=90, copy=8, start=1)]
    counts = report.KernelCounts("k", (1, 1, 1), (96, 1, 1), (1, 1, 1), 0, True, warps)
    assert report.roles(counts) == [("0-1", "math", {"math": 199}), ("2", "copy, start", {"math": 99})]


def test_functions_of_lines(tmp_path):
    file = tmp_path / "f.py"
    file.write_text("x = 1\n\n@decorated\ndef outer():\n    def inner():\n        pass\n    return inner\n")
    names = [report.function_of((str(file), line)) for line in range(1, 8)]
    assert names == ["", "", "outer", "outer", "inner", "inner", "outer"]
    assert report.function_of((str(tmp_path / "missing.py"), 1)) == "" == report.function_of(None)


# ----- findings and timelines of a hand-written kernel ----------------------------------------------------------------

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
# Warp 1 reads what warp 0 stored.
RACE = (
    HEAD
    + """.visible .entry race()
{
    .reg .b32 %r<4>;
    .reg .pred %p<2>;
    .shared .align 16 .b8 buffer[16];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, buffer;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READ;
    st.shared.u32 [%r1], %r0;
READ:
    BARRIER
    setp.ne.u32 %p1, %r0, 32;
    @%p1 bra END;
    ld.shared.u32 %r2, [%r1];
END:
    ret;
}
"""
)


def test_a_race_has_two_places():
    assert run_ptx(RACE.replace("BARRIER", "bar.sync 0;"), [], block=(64, 1, 1)) == []
    without = RACE.replace("BARRIER", "")
    findings = [run_ptx(without, [], block=(64, 1, 1), options=Options.schedule(n)) for n in range(4)]
    races = [f for found in findings for f in found if f.kind == "race"]
    assert races
    outcomes = [report.Outcome(n, n, "lazy", 0.1, {}, [], [races[0]], []) for n in (1, 3)]
    lines = report.findings_text(outcomes).split("\n")
    assert lines[0].startswith("1. race (schedules 1, 3): ")
    texts = {"ld.shared.u32 %r2, [%r1]", "st.shared.u32 [%r1], %r0"}
    assert {re.sub(r".*PTX line \d+: ", "", line) for line in lines if "PTX line" in line} == texts
    assert [line.split()[0] for line in lines if "PTX" in line] == ["at", "against"]
    assert len(lines) == 5


def test_findings_of_an_unrolled_loop_are_one():
    def finding(line, ptx_line, kind="race"):
        places = [Place("k", (0, 0, 0), 1, n, "ld", ("f.py", line)) for n in (ptx_line, ptx_line + 1)]
        return Finding(kind, f"message {ptx_line}", *places)

    found = [finding(3, 10), finding(3, 20), finding(3, 10), finding(4, 30), finding(3, 10, "proxy")]
    text = report.findings_text([report.Outcome(2, 2, "random", 0.1, {}, [], found, [])])
    heads = [line for line in text.split("\n") if line[0] != " "]
    assert heads == [
        "1. race (schedule 2; 2 times in the PTX, one of them): message 10",
        "2. race (schedule 2): message 30",
        "3. proxy (schedule 2): message 10",
    ]


# Warp 0 lets the copy engine bring 256 bytes; all warps wait, and multiply zeros by them.
COPY = (
    HEAD
    + """.visible .entry copy(.param .u64 source)
{
    .reg .b32 %r<12>;
    .reg .b64 %rd<4>;
    .reg .f32 %f<4>;
    .reg .pred %p<4>;
    .shared .align 128 .b8 data[256];
    .shared .align 8 .b64 full;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, data;
    mov.u32 %r2, full;
    ld.param.u64 %rd0, [source];
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 256, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
    mov.f32 %f0, 0f00000000;
    mov.f32 %f1, %f0;
    mov.f32 %f2, %f0;
    mov.f32 %f3, %f0;
    mov.u32 %r3, 0;
    shr.u32 %r4, %r1, 4;
    or.b32 %r4, %r4, 524288;
    mov.u32 %r5, 8;
    mov.b64 %rd1, {%r4, %r5};
    setp.eq.u32 %p2, %r0, %r0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, {%r3, %r3, %r3, %r3}, %rd1, %p2, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    ret;
}
"""
)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_trace_events(policy, tmp_path):
    source = np.zeros(256, np.uint8)
    trace = report.Trace()
    findings = run_ptx(COPY, [source], block=(128, 1, 1), options=Options(seed=1, policy=policy), trace=trace)
    assert [str(f) for f in findings] == []
    trace.write(str(tmp_path / "trace.json"))
    whole = json.loads((tmp_path / "trace.json").read_text())
    events = whole["traceEvents"]
    assert "instruction" in whole["otherData"]["time"]

    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [rows[i] for i in range(4)] == [f"warp {i}" for i in range(4)] and len(rows) == 5
    # Every asynchronous operation begins and ends once, in that order.
    begun = {e["id"]: e for e in events if e["ph"] == "b"}
    ended = {e["id"]: e for e in events if e["ph"] == "e"}
    assert Counter(e["name"] for e in begun.values()) == {"bulk load": 1, "wgmma": 4}
    assert begun.keys() == ended.keys() and all(begun[i]["ts"] <= ended[i]["ts"] for i in begun)
    assert not any("unfinished" in e["args"] for e in begun.values())
    (load,) = (e for e in begun.values() if e["name"] == "bulk load")
    assert load["args"]["at"].startswith("PTX line") and "cp.async.bulk" in load["args"]["at"]
    instants = [e for e in events if e["ph"] == "i"]
    names = [e["name"] for e in instants]
    assert names[0] == "barrier 0 round 0" and re.fullmatch(r"mbarrier 0x\w+ phase 0", names[1]) and len(names) == 2
    assert instants[1]["ts"] == ended[load["id"]]["ts"]  # the copy's bytes are what the phase waited for
    if policy == "lazy":  # the copy comes when nobody can go on: all four warps wait for it
        waits = [e for e in events if e.get("cat") == "wait" and "mbarrier" in e["name"]]
        assert sorted(e["tid"] for e in waits) == [0, 1, 2, 3]
        assert all(e["name"].startswith("waits for phase 0 (parity 0) of the mbarrier") for e in waits)
        assert all(e["args"]["state when it began"] and "try_wait" in e["args"]["at"] for e in waits)
    # Spans of a row follow one another.
    for tid in range(4):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    instructions = sum(e["args"]["instructions"] for e in events if e.get("cat") == "run")
    assert instructions == trace.now == report.count(trace.grids[0]).total


def test_trace_of_a_deadlock():
    """Without the copy nobody completes the phase: the timeline ends with the waits."""
    trace = report.Trace()
    text = re.sub(r".*cp\.async\.bulk\.shared.*\n", "", COPY)
    findings = run_ptx(text, [np.zeros(256, np.uint8)], block=(128, 1, 1), trace=trace)
    assert findings[-1].kind in ("deadlock", "livelock")
    events = trace.json()["traceEvents"]
    last = [e for e in events if e.get("cat") == "wait"][-4:]
    assert sorted(e["tid"] for e in last) == [0, 1, 2, 3]
    assert report.count(trace.grids[0]).finished is False


def test_no_trace_changes_nothing():
    """The same schedule with and without a trace."""
    watch, trace = report.Watch(), report.Trace()
    for t in (watch, trace):
        run_ptx(COPY, [np.zeros(256, np.uint8)], block=(128, 1, 1), options=Options(seed=7), trace=t)
    assert report.count(watch.grids[0]) == report.count(trace.grids[0])


# ----- its README -----------------------------------------------------------------------------------------------------


def test_readme_has_every_kind_of_finding():
    folder = ROOT / "mla_cute" / "emulator"
    source = "\n".join(p.read_text() for p in folder.glob("*.py"))
    kinds = set(re.findall(r"\b(?:Fault|Finding|Missing|report)\(\s*\"([a-z_0-9]+)\"", source)) | {"deadlock", "livelock"}
    listed = set(re.findall(r"^\| `(\w+)` \|", (folder / "README.md").read_text(), re.M))
    assert kinds == listed


def test_readme_names_what_exists():
    text = (ROOT / "mla_cute" / "emulator" / "README.md").read_text()
    for path in re.findall(r"`([\w./]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / "mla_cute" / "emulator" / path).exists(), path
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(snippet, {})
    for options in re.findall(r"python -m mla_cute\.emulator (.*)", text):
        command.arguments().parse_args(options.split("#")[0].split())
