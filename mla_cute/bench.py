"""Timings on a GPU:  python -m mla_cute.bench sparse_decode | host | first-call | table   (-h for each).

Kernel times come from the CUDA profiler, as in FlashMLA's own benchmark: from the start of the first kernel of a call to the
end of its last one, the planner left out, the L2 cache flushed before every call, the median of the calls. A peer is timed
the same way, in the same process, on the same inputs. Nothing is printed whose result was not checked first.
"""

import argparse
import ast
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import mla_cute

from .kv_cache import V32, quantize_kv_cache
from .testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, assert_close
from .validate import Problem

PAGE = 64
# The V3.2 cases of FlashMLA's benchmark, and single-token decode over the batch sizes.
SUITE = [
    *({"b": b, "h_q": 128, "s_q": 2, "s_kv": 32768, "topk": 2048} for b in (2, 64, 74, 128)),
    *({"b": b, "h_q": h_q, "s_q": 1, "s_kv": 32768, "topk": 2048} for h_q in (64, 128) for b in (1, 4, 16, 64, 128)),
    *({"b": 148, "h_q": h_q, "s_q": 2, "s_kv": 32768, "topk": 16384} for h_q in (64, 128)),
]
CASE_KEYS = ("op", "kv_format", "b", "h_q", "s_q", "s_kv", "topk", "extra_topk", "variant")  # variant: only where not shipped


def flops(case: dict) -> int:
    """2 FLOP per head, listed key (-1 counted) and column of QK and PV."""
    return 2 * case["b"] * case["s_q"] * case["topk"] * case["h_q"] * (V32.d_qk + V32.d_v)


def num_bytes(case: dict, distinct: int) -> int:
    """q and out once, each distinct cached token once."""
    rows = case["b"] * case["s_q"] * case["h_q"]
    return 2 * rows * (V32.d_qk + V32.d_v) + distinct * V32.bytes_per_token


def make_case(case: dict, device="cuda"):
    """q, kv_cache, indices, attn_sink: lengths ~ N(s_kv, s_kv / 2), distinct random keys, -1 behind short lists."""
    g = torch.Generator(device).manual_seed(0)
    b, s_q, topk = case["b"], case["s_q"], case["topk"]
    lengths = torch.normal(case["s_kv"], case["s_kv"] / 2, (b,), generator=torch.Generator().manual_seed(0))
    lengths = lengths.clamp(s_q, 4 * case["s_kv"]).long().tolist()
    pages = [-(-n // PAGE) for n in lengths]
    kv_cache = torch.empty(sum(pages), PAGE, 1, V32.bytes_per_token, dtype=torch.uint8, device=device)
    for i in range(0, len(kv_cache), 4096):
        part = kv_cache[i : i + 4096]
        keys = torch.randn(len(part), PAGE, 1, V32.d_qk, generator=g, device=device, dtype=torch.bfloat16)
        quantize_kv_cache((keys / 10).clamp_(-1, 1), out=part)
    page_of = torch.randperm(sum(pages), generator=g, device=device)  # the pages of a request lie anywhere
    indices = torch.full((b, s_q, topk), -1, dtype=torch.int32, device=device)
    first = 0
    for r, n in enumerate(lengths):
        table = page_of[first : first + pages[r]]
        first += pages[r]
        for s in range(s_q):
            tokens = torch.randperm(n, generator=g, device=device)[:topk]
            indices[r, s, : len(tokens)] = (table[tokens // PAGE] * PAGE + tokens % PAGE).int()
    q = torch.randn(b, s_q, case["h_q"], V32.d_qk, generator=g, device=device, dtype=torch.bfloat16).clamp_(-1, 1)
    return q, kv_cache, indices, torch.randn(case["h_q"], generator=g, device=device)


def kernel_times(call, n: int) -> dict[str, float]:
    """Medians in us over n calls with a cold L2: span, split (the longest kernel), combine (0 if there is none)."""
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    calls: list[list] = []
    for event in sorted(prof.events(), key=lambda e: e.time_range.start):
        name = event.name.lower()
        if "memset" in name or "fill" in name:
            calls.append([])
        elif calls and not name.startswith(("cuda", "activity", "context")):
            calls[-1].append(event)
    calls = [events for events in calls if events]
    if len(calls) != n:
        raise RuntimeError(f"the profiler saw {len(calls)} of {n} calls")

    def median(us):
        return statistics.median(us(events) for events in calls)

    return {
        "us": median(lambda events: events[-1].time_range.end - events[0].time_range.start),
        "split_us": median(lambda events: max(e.time_range.elapsed_us() for e in events if not is_combine(e))),
        "combine_us": median(lambda events: sum(e.time_range.elapsed_us() for e in events if is_combine(e))),
    }


def is_combine(event) -> bool:
    return "combine" in event.name.lower()


def check(q, kv_cache, indices, sink, out, lse) -> None:
    """Against the reference, on up to eight requests spread over the batch. Raises AssertionError."""
    some = torch.arange(0, len(q), max(len(q) // 8, 1), device=q.device)
    ref_out, ref_lse = mla_cute.reference.sparse_decode(q[some], kv_cache, indices[some], attn_sink=sink)
    assert_close(out[some], ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse[some], ref_lse, **SPARSE_DECODE_LSE, name="lse")


def measure(case: dict, args) -> dict:
    q, kv_cache, indices, sink = make_case(case)
    module = mla_cute.select_impl("cuda", args.impl)
    config = module.default_config(Problem(h_q=case["h_q"], has_attn_sink=True))
    try:
        changes = {name: ast.literal_eval(value) for name, value in (item.split("=", 1) for item in args.set)}
        config = dataclasses.replace(config, **changes)
    except (ValueError, SyntaxError, TypeError) as e:
        fields = ", ".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config))
        raise SystemExit(f"--set: needs field=value with a field of {fields}; got {args.set} ({e})") from None
    plan = mla_cute.plan_decode(q, indices, config=config, impl=module)

    def ours():
        return mla_cute.sparse_decode(q, kv_cache, indices, attn_sink=sink, plan=plan, impl=module)

    check(q, kv_cache, indices, sink, *ours())
    times = kernel_times(ours, args.n)
    us = times["us"]
    distinct = int(torch.unique(indices).numel())
    record = {"op": "sparse_decode", "kv_format": V32.name.lower(), **case, "extra_topk": 0, **times}
    record |= {"tflops": flops(case) / us / 1e6, "gbps": num_bytes(case, distinct) / us / 1e3, "checked": True}
    record |= {"peer": None, "peer_us": None}
    if args.impl or args.set:
        record["variant"] = " ".join([args.impl or "", *args.set]).strip()  # never the shipped kernel's row
    if args.peer:
        import flash_mla

        meta, _ = flash_mla.get_mla_metadata()
        options = {"is_fp8_kvcache": True, "indices": indices, "attn_sink": sink}
        fp8 = kv_cache.view(torch.float8_e4m3fn)

        def theirs():
            return flash_mla.flash_mla_with_kvcache(q, fp8, None, None, V32.d_v, meta, None, **options)

        out, lse = theirs()  # the first call also plans
        check(q, kv_cache, indices, sink, out, lse.transpose(1, 2))
        record |= {"peer": "flash_mla", "peer_us": kernel_times(theirs, args.n)["us"]}
    return record


def provenance(commit: str | None) -> dict:
    """Where and with what a record was measured."""
    from importlib.metadata import version

    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent)]
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        dirty = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip()
        commit += "-dirty" if dirty else ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.check_output(query, text=True).split()[0],
        "torch": torch.__version__,
        "dsl": dsl_version(version),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def dsl_version(version) -> str:
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"):
        try:
            return version(name)
        except ImportError:  # PackageNotFoundError is one
            continue
    return "unknown"


def latest(records: list[dict]) -> list[dict]:
    """The last record of every case, in the order of the file."""
    return list({tuple(r.get(k) for k in CASE_KEYS): r for r in records}.values())


def append(path: Path, records: list[dict]) -> None:
    old = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in old + records)
    path.write_text(f"[\n{lines}\n]\n")


def table(records: list[dict]) -> str:
    """The records as Markdown."""
    rows = ["| b | h_q | s_q | topk | us (split / combine) | TFLOPS | GB/s | FlashMLA us | FlashMLA / ours |", "|" + "---|" * 9]
    for r in records:
        peer = (f"{r['peer_us']:.1f}", f"{r['peer_us'] / r['us']:.2f}") if r["peer_us"] else ("-", "-")
        cells = [r["b"], r["h_q"], r["s_q"], r["topk"], f"{r['us']:.1f} ({r['split_us']:.1f} / {r['combine_us']:.1f})"]
        cells += [f"{r['tflops']:.0f}", f"{r['gbps']:.0f}", *peer]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def write_table(readme: Path, records: list[dict]) -> None:
    """Put the table between the README's markers, with what it was measured on."""
    begin, end = "<!-- speed-table:start -->", "<!-- speed-table:end -->"
    text = readme.read_text()
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    last = records[-1]
    where = (
        f"{last['gpu']}, driver {last['driver']}, torch {last['torch']}, DSL {last['dsl']}, commit {last['commit']}, "
        f"{last['date']}. Cold L2, profiler times, medians, both sides in one run: `python -m mla_cute.bench sparse_decode`."
    )
    readme.write_text(f"{head}{begin}\n{where}\n\n{table(records)}\n{end}{tail}")


def host(args) -> None:
    """CPU time of a call with a given plan: 1,000 calls without a wait between them."""
    case = {"b": 2, "h_q": 128, "s_q": 1, "s_kv": 512, "topk": 64}
    q, kv_cache, indices, sink = make_case(case)
    plan = mla_cute.plan_decode(q, indices)
    rounds = []
    for _ in range(7):
        for _ in range(20):
            mla_cute.sparse_decode(q, kv_cache, indices, attn_sink=sink, plan=plan)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(1000):
            mla_cute.sparse_decode(q, kv_cache, indices, attn_sink=sink, plan=plan)
        rounds.append((time.perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
    low, middle, high = min(rounds), statistics.median(rounds), max(rounds)
    print(f"host time per call, us: {middle:.1f} (7 rounds of 1000: {low:.1f} to {high:.1f})")


FIRST_CALL = """
import time, torch, mla_cute
from mla_cute.bench import make_case
q, kv_cache, indices, sink = make_case({"b": 2, "h_q": 128, "s_q": 1, "s_kv": 512, "topk": 64})
torch.cuda.synchronize()
started = time.perf_counter()
mla_cute.sparse_decode(q, kv_cache, indices, attn_sink=sink)
torch.cuda.synchronize()
print(time.perf_counter() - started)
"""


def first_call(args) -> None:
    """Seconds of the first call of a fresh process, planner and kernel, with an empty and with a filled cache directory.

    Python's bytecode of the DSL is written with the first, as an installation by pip does: importing it without takes 2 s.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "from the disk cache", "from the disk cache"):
            env = os.environ | {"MLA_CUTE_CACHE_DIR": folder, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
            done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, check=True, stdout=subprocess.PIPE, text=True)
            print(f"first call, {name}: {float(done.stdout):.2f} s")


def case_of(text: str) -> dict:
    case = {k: int(v) for k, v in (item.split("=") for item in text.split(","))}
    if {*case} != {*SUITE[0]}:
        raise ValueError
    return case


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mla_cute.bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("sparse_decode", help="kernel times of the suite or of single cases")
    run.add_argument("--case", action="append", type=case_of, default=[], help="b=128,h_q=128,s_q=2,s_kv=32768,topk=2048")
    run.add_argument("--peer", action="store_true", help="time the installed flash_mla package beside it")
    run.add_argument("--impl", help="another implementation: module or path")
    run.add_argument("--set", action="append", default=[], help="field=value of Config, a Python literal")
    run.add_argument("-n", type=int, default=30, help="calls a case")
    run.add_argument("--json", type=Path, help="append the records to this file")
    run.add_argument("--commit", help="what to write as commit; default: ask git")
    commands.add_parser("host", help="CPU time per call")
    commands.add_parser("first-call", help="seconds of a process's first call")
    show = commands.add_parser("table", help="the latest records as Markdown")
    show.add_argument("json", type=Path)
    show.add_argument("--write", type=Path, help="put the table into this README")
    args = parser.parse_args(argv)

    if args.command == "table":
        try:
            records = [r for r in latest(json.loads(args.json.read_text())) if not r.get("variant")]
        except (OSError, ValueError) as e:
            parser.exit(1, f"table: cannot read {args.json}: {e}\n")
        print(table(records))
        if args.write:
            write_table(args.write, records)
        return
    if not torch.cuda.is_available():
        parser.exit(1, f"{args.command}: needs a GPU, torch sees none\n")
    if args.command != "sparse_decode":
        {"host": host, "first-call": first_call}[args.command](args)
        return
    try:
        mla_cute.select_impl("cuda", args.impl)
    except (TypeError, ValueError, NotImplementedError) as e:
        parser.exit(1, f"sparse_decode: {e}\n")
    about = provenance(args.commit)
    records = []
    for case in args.case or SUITE:
        records.append(measure(case, args) | about)
        print(table(records[-1:]).split("\n")[-1], flush=True)
        if args.json:
            append(args.json, records[-1:])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
