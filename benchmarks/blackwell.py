"""Checks and times everything on a Blackwell GPU, where it has not been run yet, and writes one JSON file to send back.

    python benchmarks/blackwell.py [--out blackwell.json] [--suite all] [--no-times]
    python benchmarks/blackwell.py --emulate [--only 2]   # the same checks on a CPU, slowly, without times

Checks first: numbers of the reference on inputs with poison in all that must not be read, and the same bits twice. A failure is
recorded and the rest goes on. Then the registers and spills of what was compiled, and the times of `mla_cute.bench` with
errors against fp64 and the clocks meanwhile. Exit status 1 if anything failed.
"""

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
import time
from pathlib import Path

import torch

import mla_cute
from mla_cute import bench, emulator, jit
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs

EMULATED_SMS = 4  # of the GPU that plans are made for
EMULATED_ARCH = "sm_100a"
ALL = {"topk_length": True, "sink": True, "holes": True, "duplicates": True, "outside": True}
CHECKS = [
    Case(b=3, h_q=64, s_kv=400, topk=320, **ALL),
    Case(b=2, h_q=64, s_kv=200, topk=130),
    Case(b=2, h_q=64, s_kv=90, topk=70, kv_format="model1", page_block_size=61, **ALL),
    Case(b=4, h_q=128, s_kv=300, topk=200, scales="random", page_block_size=53, **ALL),
    Case(b=2, h_q=16, s_q=2, s_kv=150, topk=133, odd_rows=True, page_block_size=16, extra_topk=70, extra_page_block_size=5),
    Case(b=2, h_q=128, s_q=3, s_kv=150, topk=100, kv_format="model1", page_block_size=7, extra_topk=70,
         extra_page_block_size=5, extra_topk_length=True, **ALL),
    Case(b=2, h_q=1, s_kv=90, topk=1, zero_length=True, sink=True),
    Case(b=1, h_q=40, s_kv=70, topk=65, all_invalid=True, sink=True),
]  # fmt: skip
LARGE_CHECKS = [  # of whole requests and of many pieces; not for the emulator
    *(Case(b=b, h_q=h_q, s_kv=4096, topk=2048, **ALL) for b in (1, 7, 64) for h_q in (16, 64, 128)),
    *(Case(b=b, h_q=h_q, s_q=2, s_kv=4096, topk=128, kv_format="model1", extra_topk=512, extra_topk_length=True, **ALL)
      for b in (1, 64) for h_q in (64, 128)),
    Case(b=300, h_q=128, s_kv=700, topk=500, varlen=True, **ALL),
]  # fmt: skip


def check(case: Case, device: str, backend: str | None) -> dict:
    """{"case", "seconds", and "error" if there is one}."""
    started, error = time.perf_counter(), None
    try:
        x = make_inputs(case, device)
        call = lambda: mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), backend=backend)  # noqa: E731
        results = [call() for _ in range(1 if backend else 3)]
        expected = mla_cute.reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        for result in results:
            assert_close(result[0], expected[0], **SPARSE_DECODE_OUT, name="out")
            assert_close(result[1], expected[1], **SPARSE_DECODE_LSE, name="lse")
            assert_bitwise(result[0], results[0][0], name="out")
    except Exception as e:  # also what CUDA says: the rest then fails alike, and the file says so
        error = bench.reason(e)
    print(f"{'FAILED ' + error if error else 'ok'}  {case}", flush=True)
    return {"case": str(case), "seconds": round(time.perf_counter() - started, 2)} | ({"error": error} if error else {})


def resources(cases: list[Case], arch: str) -> list[dict]:
    """What the compiler made of the kernels of these cases."""
    found, module = [], jit.arch_module("sparse_decode", arch)
    for problem in dict.fromkeys(case.problem for case in cases):
        seen = jit.inspect(module, problem, module.default_config(problem), arch)
        kernels = seen.resources if _has_cuobjdump(seen) else {}
        found.append({"problem": dataclasses.asdict(problem), "spill_bytes": seen.spill_bytes, "kernels": kernels})
        found[-1] |= {"seconds": round(seen.seconds, 1), "advisories": seen.advisories}
    return found


def _has_cuobjdump(seen) -> bool:
    try:
        return bool(seen.resources)
    except FileNotFoundError:
        return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("blackwell.json"))
    parser.add_argument("--suite", choices=bench.SUITES, default="all", help="cases to time")
    parser.add_argument("--no-times", action="store_true", help="checks alone")
    parser.add_argument("--emulate", action="store_true", help="on the CPU: the small checks alone")
    parser.add_argument("--only", type=int, help="so many checks")
    parser.add_argument("--commit", help="what to write as commit; default: ask git")
    args = parser.parse_args(argv)
    if not args.emulate:
        if not torch.cuda.is_available():
            parser.exit(1, "needs a Blackwell GPU, torch sees none; --emulate runs the checks on the CPU\n")
        got = torch.cuda.get_device_capability()
        if got not in ((10, 0), (10, 3)):
            name = torch.cuda.get_device_name()
            parser.exit(1, f"needs a GPU of compute capability 10.0 or 10.3, got {got[0]}.{got[1]} ({name})\n")
    if not args.out.parent.is_dir():
        parser.exit(1, f"--out: no directory {args.out.parent}\n")
    cases = [*CHECKS, *([] if args.emulate else LARGE_CHECKS)][: args.only]
    arch = EMULATED_ARCH if args.emulate else jit.arch_of("cuda")
    where = {"python": platform.python_version(), "arch": arch}
    if not args.emulate:
        where |= bench.provenance(args.commit) | {"sms": torch.cuda.get_device_properties(0).multi_processor_count}
    report = {"where": where, "checks": [], "resources": [], "records": [], "failures": 0}

    def save():
        report["failures"] = sum("error" in c for c in report["checks"]) + report.get("failed_times", 0)
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    device, backend = ("cpu", "emulator") if args.emulate else ("cuda", None)
    session = emulator.session(arch=arch, num_sms=EMULATED_SMS) if args.emulate else contextlib.nullcontext()
    with session:
        for case in cases:
            report["checks"].append(check(case, device, backend))
            save()  # a crash leaves what is known
    if not args.emulate:
        report["resources"] = resources(cases, arch)
        save()
    if not (args.emulate or args.no_times):
        timed = bench.SUITES[args.suite]
        bench.compile_ahead(timed, None, {})
        jobs = [(str(c), lambda c=c: bench.measure(c, oracle=True, sample_clocks=True)) for c in timed]
        report["records"], report["failed_times"] = bench.run(jobs, where)
        save()
    print(f"{len(report['checks'])} checks, {len(report['records'])} timed, {report['failures']} failures: {args.out}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
