"""Times the kernels beside a peer's, and the host side. Every subcommand but `table` needs a GPU; each has --help.

    python -m mla_cute.bench sparse_decode [--case b=128,h_q=128,s_q=2] [--impl M] [--set field=value] [--json]
    python -m mla_cute.bench table [JSON ...] [--write README.md]    the speed table, the latest record of each case
    python -m mla_cute.bench host                                    host time of a call that has its plan
    python -m mla_cute.bench first-call                              first call of a fresh process, cold and cached

Method: kernel times from CUPTI (torch.profiler), from the start of a call's first kernel to the end of its last, with the
plan given, medians over the runs; before each run a fill of --flush-gb empties L2. Where CUPTI is missing, CUDA events
around the call instead, and the output says so. A time is shown only after the last timed run's result agreed with the
reference. Inputs, method and conventions (-1 in a list counts as work, each distinct token is read once) are those of
FlashMLA's performance cases, but for its flush of 8 GB, whose 2 ms also let the chip cool.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import faulthandler
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity

from . import jit, reference
from .interface import select_impl, sparse_decode
from .kv_cache import V32
from .schedule import plan_decode
from .testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, Inputs, assert_close, make_inputs
from .validate import check_sparse_decode

PACKAGE = Path(__file__).resolve().parent
RESULTS = Path("benchmarks/results")  # in the current directory; <gpu>/<op>.json
MARKERS = ("<!-- speed-table:start -->", "<!-- speed-table:end -->")
SAME_CASE = ("op", "kv_format", "b", "h_q", "s_q", "s_kv", "topk", "extra_topk", "variant")  # records equal in these
CASE_DEFAULTS = {"b": 128, "h_q": 128, "s_q": 1, "topk": 2048, "s_kv": 32768}
WARMUP_RUNS = 3
PLANNERS = ("mla_schedule", "get_mla_metadata")  # kernels that are not part of a call with a plan


class WrongResult(Exception):
    """What was timed did not compute what the reference computes: there is no time to show."""


# ----- cases ----------------------------------------------------------------------------------------------------------


def make_case(**shape: int) -> Case:
    """A performance case: pages of 64, request lengths vary about s_kv, with sink; q, indices and pages are strided."""
    return Case(**CASE_DEFAULTS | shape, page_block_size=64, varlen=True, sink=True)


SUITES = {
    "v32": [
        *(make_case(b=b, s_q=2) for b in (2, 64, 74, 128)),
        *(make_case(b=148, h_q=h_q, s_q=2, topk=16384) for h_q in (64, 128)),
        *(make_case(b=b, h_q=h_q) for h_q in (64, 128) for b in (1, 4, 16, 64, 128)),
    ],
}


def parse_case(text: str) -> Case:
    """`b=2,h_q=64,...` over CASE_DEFAULTS."""
    shape = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in CASE_DEFAULTS:
            raise argparse.ArgumentTypeError(f"fields are {', '.join(CASE_DEFAULTS)}, got {item!r}")
        if not value.isdecimal() or int(value) < 1:
            raise argparse.ArgumentTypeError(f"{name} must be a positive integer, got {value!r}")
        shape[name] = int(value)
    return make_case(**shape)


def parse_setting(text: str) -> tuple[str, object]:
    """`field=value` of a Config: the value as a Python literal, else as a string."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not name or not value:
        raise argparse.ArgumentTypeError(f"must be field=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def with_settings(config, settings: Sequence[tuple[str, object]]):
    """The Config with these fields changed; exits naming the fields there are."""
    names = [field.name for field in dataclasses.fields(config)]
    for name, _ in settings:
        if name not in names:
            sys.exit(f"bench: --set: {type(config).__module__}.Config has {', '.join(names)}, got {name!r}")
    return dataclasses.replace(config, **dict(settings))


def variant_name(impl: str | None, settings: Sequence[tuple[str, object]]) -> str | None:
    """What differs from the shipped kernel; None: nothing."""
    return " ".join([f"impl={impl}"] * bool(impl) + [f"{name}={value}" for name, value in settings]) or None


def flop(case: Case) -> int:
    """Of QK and PV over all listed keys, skipped ones too."""
    return 2 * case.b * case.s_q * case.topk * case.h_q * (V32.d_qk + V32.d_v)


def bytes_moved(case: Case, distinct: int) -> int:
    """q and out in bf16 and each distinct listed token once; not partial results, indices and lse."""
    return 2 * case.b * case.s_q * case.h_q * (V32.d_qk + V32.d_v) + distinct * V32.bytes_per_token


# ----- timing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians in us: of a call from first start to last end, of its longest kernel, of its combine (0: has none)."""

    us: float
    split_us: float | None = None
    combine_us: float | None = None
    timer: str = "cuda_events"  # or "cupti"


def time_call(call: Callable, runs: int, flush_gb: float) -> tuple[Timing, object]:
    """Times of `call` with a cold L2, and the result of its last timed run. One call before compiles and plans."""
    call()
    flush = torch.empty(int(flush_gb * 2**29), dtype=torch.int16, device="cuda")
    marks, result, total = [], None, WARMUP_RUNS + runs

    def run_all() -> None:
        nonlocal result
        for _ in range(total):
            flush.zero_()
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            marks[-1][0].record()
            result = call()
            marks[-1][1].record()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    events = []
    if ProfilerActivity.CUDA in torch.profiler.supported_activities():
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
            run_all()
        on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        events = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_gpu)
    else:
        run_all()
    if events:
        return timing_of(events, total), result
    print("bench: CUPTI recorded no kernels; timed by CUDA events around the call instead", file=sys.stderr)
    us = median(1000 * begin.elapsed_time(end) for begin, end in marks[WARMUP_RUNS:])
    return Timing(round(us, 2)), result


def timing_of(events: list[tuple[float, float, str]], total: int) -> Timing:
    """From all that the GPU did, (start us, end us, name) by start: `total` times the flush, then the kernels of a call.

    The flush is the first event; the others are known by its name, a fill of int16 values, which no call does.
    """
    flush, calls = events[0][2], []
    for event in events:
        if event[2] == flush:
            calls.append([])
        elif not any(name in event[2] for name in PLANNERS):
            calls[-1].append(event)
    if len(calls) != total or not all(calls):
        seen = "".join(f"\n  {n} x {name[:150]}" for name, n in Counter(e[2] for e in events).items())
        raise RuntimeError(f"timing: needs {total} calls, each behind a flush, got this from the profiler:{seen}")
    spans, splits, combines = [], [], []
    for kernels in calls[WARMUP_RUNS:]:
        spans.append(max(end for _, end, _ in kernels) - kernels[0][0])
        combines.append(sum(end - start for start, end, name in kernels if "combine" in name))
        splits.append(max((end - start for start, end, name in kernels if "combine" not in name), default=0.0))
    return Timing(*(round(median(us), 2) for us in (spans, splits, combines)), "cupti")


def flash_mla_call(x: Inputs) -> Callable:
    """FlashMLA's own kernels (package `flash_mla`) on the same tensors, heads padded to 64 or 128 as they need."""
    import flash_mla

    h_q, pad = x.q.shape[2], -x.q.shape[2] % 64
    q = torch.nn.functional.pad(x.q, (0, 0, 0, pad)) if pad else x.q
    options = {
        "softmax_scale": x.softmax_scale,
        "is_fp8_kvcache": True,
        "indices": x.indices,
        "attn_sink": torch.nn.functional.pad(x.attn_sink, (0, pad)),
    }
    kv_cache, plan = x.kv_cache.view(torch.float8_e4m3fn), flash_mla.get_mla_metadata()[0]

    def call():
        out, lse = flash_mla.flash_mla_with_kvcache(q, kv_cache, None, None, V32.d_v, plan, **options)
        return out[:, :, :h_q], lse.transpose(1, 2)[:, :, :h_q]

    return call


PEERS = {"flash_mla": flash_mla_call}  # name of a package: the call it makes of the inputs


# ----- sparse_decode --------------------------------------------------------------------------------------------------


def bench_case(
    case: Case,
    *,
    device: str = "cuda",
    impl: str | None = None,
    settings: Sequence[tuple[str, object]] = (),
    peer: str | None = None,
    runs: int = 30,
    flush_gb: float = 1.0,
) -> dict:
    """Time one case and check it: its record, without the machine's fields. Raises WrongResult.

    A peer that fails, or whose result is wrong, is named on stderr and left out of the record.
    """
    x = make_inputs(case, device)
    problem = check_sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    module = select_impl(x.q.device, impl)
    config = with_settings(module.default_config(problem), settings)
    plan = plan_decode(x.q, x.indices, config=config, impl=module)

    def call():
        return sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, impl=module)

    # The reference runs behind it: memory that it has freed could bring a kernel that writes nothing the right result.
    ours, result = time_call(call, runs, flush_gb)
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    check(result, expected)
    theirs = None
    if peer:
        try:
            timing, result = time_call(PEERS[peer](x), runs, flush_gb)
            check(result, expected)
            theirs = timing
        except Exception as e:
            print(f"bench: {case}: no time of {peer}: {type(e).__name__}: {e}", file=sys.stderr)
    distinct = torch.unique(x.indices).numel()  # a -1 is one of them, as FlashMLA counts
    return {
        "op": "sparse_decode",
        "kv_format": V32.name,
        **{name: getattr(case, name) for name in ("b", "h_q", "s_q", "s_kv", "topk")},
        "extra_topk": None,
        **{name: getattr(ours, name) for name in ("us", "split_us", "combine_us")},
        "tflops": round(flop(case) / ours.us / 1e6, 1),
        "gbps": round(bytes_moved(case, distinct) / ours.us / 1e3),
        "peer": peer if theirs else None,
        **{f"peer_{name}": theirs and getattr(theirs, name) for name in ("us", "split_us", "combine_us")},
        "checked": True,
        "timer": ours.timer,
        "runs": runs,
        "flush_gb": flush_gb,
        "variant": variant_name(impl, settings),
    }


def check(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise WrongResult unless (out, lse) of all requests are the reference's within the tests' tolerances."""
    try:
        assert_close(result[0], expected[0], name="out", **SPARSE_DECODE_OUT)
        assert_close(result[1], expected[1], name="lse", **SPARSE_DECODE_LSE)
    except AssertionError as e:
        raise WrongResult(str(e)) from None


def machine(commit: str | None) -> dict:
    """The fields of a record that say where, with what and when."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver.partition("\n")[0] or None,
        "torch": torch.__version__,
        "dsl": jit._version("nvidia-cutlass-dsl") or jit._version("nvidia-cutlass-dsl-libs-base"),
        "commit": commit or os.environ.get("MLA_CUTE_COMMIT") or git_commit(PACKAGE),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def git_commit(folder: Path) -> str:
    """Short hash of the checkout around `folder`, with "-dirty" if files in `folder` differ; "unknown" without one."""
    commit = _output("git", "-C", str(folder), "rev-parse", "--short", "HEAD")
    dirty = commit and _output("git", "-C", str(folder), "status", "--porcelain", "--", ".")
    return (commit or "unknown") + ("-dirty" if dirty else "")


def _output(*command: str) -> str:
    """What a command prints; "" if there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def gpu_slug(name: str) -> str:
    """The folder of a GPU's results: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def run_sparse_decode(args: argparse.Namespace, device: str = "cuda") -> int:
    """A row a case on stdout, what goes wrong on stderr; 1 if a result was wrong."""
    peer = args.peer or next((name for name in PEERS if importlib.util.find_spec(name)), "none")
    if peer != "none" and not importlib.util.find_spec(peer):
        sys.exit(f"bench: --peer: cannot import {peer}")
    peer = None if peer == "none" else peer
    where = machine(args.commit)
    path = RESULTS / gpu_slug(where["gpu"]) / "sparse_decode.json" if args.json is True else args.json
    print("{gpu}, driver {driver}, torch {torch}, DSL {dsl}, commit {commit}".format(**where), end=", ")
    print(f"median of {args.runs}", variant_name(args.impl, args.set) or "")
    print(f"{'case':44}{'us':>9}{'split':>9}{'combine':>9}{'TFLOPS':>8}{'GB/s':>7}{peer or 'no peer':>11}{'ratio':>7}")
    wrong = 0
    for case in args.case or SUITES[args.suite]:
        name = f"b={case.b} h_q={case.h_q} s_q={case.s_q} topk={case.topk} s_kv={case.s_kv}"
        faulthandler.dump_traceback_later(args.timeout, exit=True, file=sys.__stderr__)  # hung kernels ignore Ctrl-C
        options = {"impl": args.impl, "settings": args.set, "peer": peer, "runs": args.runs, "flush_gb": args.flush_gb}
        try:
            record = bench_case(case, device=device, **options) | where
        except WrongResult as e:
            wrong += 1
            print(f"bench: {name}: WRONG RESULT, time not shown: {e}", file=sys.stderr)
            continue
        except Exception:
            print(f"bench: {name}: failed", file=sys.stderr)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        columns = (("us", 1, 9), ("split_us", 1, 9), ("combine_us", 1, 9), ("tflops", 0, 8), ("gbps", 0, 7))
        row = "".join(f"{_cell(record[key], digits):>{width}}" for key, digits, width in columns)
        print(f"{name:44}{row}{_cell(record['peer_us'], 1):>11}{_ratio(record):>7}", flush=True)
        if path:
            append_record(path, record)
    if path:
        print(f"bench: records are in {path}", file=sys.stderr)
    return 1 if wrong else 0


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _ratio(record: dict) -> str:
    return _cell(record["peer_us"] and record["peer_us"] / record["us"], 2)


# ----- records and the table ------------------------------------------------------------------------------------------


def append_record(path: Path, record: dict) -> None:
    """Put a record behind those of the file, one a line. Older ones of its case stay: the latest is the last."""
    records = [*json.loads(path.read_text()), record] if path.exists() else [record]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    os.replace(part, path)


def latest(records: list[dict]) -> list[dict]:
    """The last record of each case, in the table's order."""
    last = {tuple(r.get(key) for key in SAME_CASE): r for r in records}.values()
    return sorted(last, key=lambda r: (r.get("variant") or "", r["topk"], -r["s_q"], r["h_q"], r["b"]))


def speed_table(records: list[dict]) -> str:
    """Markdown of one GPU's records (at least one): a row a case, and how they were made."""
    rows = latest(records)
    about = {key: ", ".join(dict.fromkeys(str(r[key]) for r in rows)) for key in rows[0]}  # every value that occurs
    peer = ", ".join(dict.fromkeys(r["peer"] for r in rows if r["peer"])) or "peer"
    lines = [
        f"| cache | b | h_q | s_q | topk | µs (split / combine) | TFLOPS | GB/s | {peer} µs | ratio |",
        "|---" + "|---:" * 9 + "|",
    ]
    for r in rows:
        events = r["split_us"] is None
        us = _cell(r["us"], 1) + ("\\*" if events else f" ({r['split_us']:.1f} / {r['combine_us']:.1f})")
        cells = [" ".join(filter(None, (r["kv_format"], r.get("variant")))), r["b"], r["h_q"], r["s_q"], r["topk"], us]
        cells += [_cell(r["tflops"], 0), _cell(r["gbps"], 0), _cell(r["peer_us"], 1), _ratio(r)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "{gpu}, driver {driver}, torch {torch}, DSL {dsl}, commit {commit}".format(**about) + ", "]
    lines[-1] += max(r["date"] for r in rows)[:10]
    lines[-1] += ". Kernel times with a cold L2, medians; ratio = the peer's time / ours in the same run."
    if any(r["split_us"] is None for r in rows):
        lines[-1] += " \\* By CUDA events around the call, for want of CUPTI: launch gaps included."
    return "\n".join(lines) + "\n"


def run_table(args: argparse.Namespace) -> int:
    paths = args.json or sorted(RESULTS.glob("*/sparse_decode.json"))
    if not paths:
        sys.exit(f"bench table: no {RESULTS}/*/sparse_decode.json here, name a file")
    table = "\n".join(speed_table(json.loads(path.read_text())) for path in paths)
    if not args.write:
        print(table, end="")
        return 0
    text = args.write.read_text()
    if [text.count(marker) for marker in MARKERS] != [1, 1] or text.index(MARKERS[0]) > text.index(MARKERS[1]):
        sys.exit(f"bench table: {args.write} must hold {MARKERS[0]} and below it {MARKERS[1]}, once each")
    head, tail = text.partition(MARKERS[0])[0], text.partition(MARKERS[1])[2]
    args.write.write_text(f"{head}{MARKERS[0]}\n{table}{MARKERS[1]}{tail}")
    return 0


# ----- the host side --------------------------------------------------------------------------------------------------


def run_host(args: argparse.Namespace) -> int:
    """us of a call with its plan, from --calls of them in a row without a sync; so small that the GPU keeps up."""
    x = make_inputs(Case(b=1, s_kv=256, topk=64), "cuda")
    plan = plan_decode(x.q, x.indices)

    def launch() -> tuple[float, float]:
        """us a call until the last was launched, and until the GPU was done."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(args.calls):
            sparse_decode(x.q, x.kv_cache, x.indices, plan=plan)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return 1e6 * (launched - started) / args.calls, 1e6 * (time.perf_counter() - started) / args.calls

    launch()  # compiles, warms up
    rounds = sorted(launch() for _ in range(5))
    host, done = rounds[2]
    print(f"host time {host:.1f} us a call with a plan, {args.calls} calls, median of 5 rounds", end=" ")
    print(f"({rounds[0][0]:.1f} to {rounds[-1][0]:.1f}); {done:.1f} us until the GPU was done")
    if done > 1.1 * host:
        print("bench host: the GPU did not keep up, the figure may hold waits for its queue", file=sys.stderr)
    return 0


FIRST_CALL = """
import math, time, torch, mla_cute
q = torch.randn(2, 1, 128, 576, device="cuda").bfloat16()
kv_cache = torch.zeros(64, 64, 1, 656, dtype=torch.uint8, device="cuda")
indices = torch.arange(2048, dtype=torch.int32, device="cuda").expand(2, 1, 2048)
torch.cuda.synchronize()
started = time.perf_counter()
out, lse = mla_cute.sparse_decode(q, kv_cache, indices)
torch.cuda.synchronize()
seconds = time.perf_counter() - started
assert not out.any() and torch.allclose(lse, torch.full_like(lse, math.log(2048))), "wrong result"
print(seconds)
"""


def run_first_call(args: argparse.Namespace) -> int:
    """Seconds of the first call in new processes that have imported torch and made a CUDA context; planner included."""
    with tempfile.TemporaryDirectory(prefix="mla_cute_") as cache:
        path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"MLA_CUTE_CACHE_DIR": cache, "PYTHONPATH": path}
        for name in ("cold", "warm", "warm"):
            child = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, stdout=subprocess.PIPE, text=True)
            if child.returncode:
                sys.exit(f"bench first-call: the {name} process failed ({child.returncode}), its messages are above")
            kernels = len(list(Path(cache).rglob("*.o")))
            print(f"{name}: {float(child.stdout.split()[-1]):.2f} s, then {kernels} kernels in the cache", flush=True)
    return 0


# ----- command line ---------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mla_cute.bench", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("sparse_decode", help="kernel times by case, beside a peer, results checked")
    p.set_defaults(run=run_sparse_decode)
    p.add_argument("--suite", choices=SUITES, default="v32")
    shape = ",".join(f"{name}={value}" for name, value in CASE_DEFAULTS.items())
    p.add_argument("--case", type=parse_case, action="append", help=f"instead of a suite, repeatable; default {shape}")
    p.add_argument("--impl", help="another implementation: importable name or path of a .py file")
    p.add_argument("--set", type=parse_setting, action="append", default=[], help="field=value of its Config")
    p.add_argument("--peer", choices=[*PEERS, "none"], help="default: flash_mla if it can be imported")
    json_help = f"append records; without PATH to {RESULTS}/<gpu>/sparse_decode.json"
    p.add_argument("--json", nargs="?", const=True, type=Path, metavar="PATH", help=json_help)
    p.add_argument("--runs", type=int, default=30)
    p.add_argument("--flush-gb", type=float, default=1.0, help="filled before each run to empty L2 (FlashMLA: 8)")
    p.add_argument("--commit", help="for the records; default $MLA_CUTE_COMMIT, else git's")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds a case may take before the process ends")
    p = commands.add_parser("table", help="the Markdown speed table from records")
    p.set_defaults(run=run_table)
    p.add_argument("json", nargs="*", type=Path, help=f"default: every {RESULTS}/*/sparse_decode.json")
    p.add_argument("--write", type=Path, help=f"put it into this file between {MARKERS[0]} and {MARKERS[1]}")
    p = commands.add_parser("host", help="host time of a call with a plan")
    p.set_defaults(run=run_host)
    p.add_argument("--calls", type=int, default=1000)
    commands.add_parser("first-call", help="first call of a fresh process").set_defaults(run=run_first_call)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.command != "table" and not torch.cuda.is_available():
        sys.exit(f"bench {args.command}: needs a CUDA GPU, torch {torch.__version__} sees none")
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
