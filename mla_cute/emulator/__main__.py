"""Run an op in the emulator and say what is wrong with it:  python -m mla_cute.emulator sparse_decode --topk 128

Inputs are those of `mla_cute.testing`; the plan is made by the planner's kernel, the op and the combine by the kernel that
`--impl` and `--arch` select, all from their PTX. Numbers are compared with `mla_cute.reference`. Several schedules are
run: 0 does asynchronous work at once, 1 as late as the program allows, the others at random times, all with another order
of the warps. Exit status: 0 all right, 1 wrong numbers or findings, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import jit, reference, schedule_kernel
from ..interface import select_impl, sparse_decode
from ..schedule import DecodePlan, overhead, plan_decode, settle
from ..target import target
from ..testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, Inputs, assert_close, make_inputs
from ..validate import Problem, check_sparse_decode
from . import host, report, run
from .machine import Options

PROGRAM = "python -m mla_cute.emulator"
OPS = ("sparse_decode",)
ARCHES = ("sm_90a", "sm_100a", "sm_103a")
# Measured on one core of a server, with the kernels of sm90; a kernel without tensor cores takes longer.
SECONDS_PER_CTA = 0.065  # one of the plan's, by one tile of 64 heads, without work: itself and its 32 CTAs of the combine


@dataclass
class Job:
    """What is run, ready to run."""

    case: Case
    inputs: Inputs
    module: ModuleType
    config: Any  # that was asked for
    settled: Any  # whose kernel runs
    arch: str
    num_sms: int
    num_parts: int
    cluster: int  # CTAs for each request; 0: by the plan
    force: bool
    planner: run.Emulated
    kernel: run.Emulated
    seconds: float  # that compiling took
    plan: tuple[torch.Tensor, torch.Tensor]  # what the reference says
    out: torch.Tensor
    lse: torch.Tensor


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def arguments() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description=__doc__.split("\n")[0], epilog="See README.md of the emulator.")
    parser.add_argument("op", metavar="OP", help=f"{', '.join(OPS)} (with its plan and combine)")
    parser.add_argument("--arch", default="sm_90a", help="what to compile for: sm_90a (default) or sm_100a")
    shape = parser.add_argument_group("shape and data")
    shape.add_argument("--b", type=int, default=2, help="requests (2)")
    shape.add_argument("--s_q", type=int, default=1, help="query tokens a request (1)")
    shape.add_argument("--h_q", type=int, default=64, help="query heads (64)")
    shape.add_argument("--topk", type=int, default=128, help="listed keys a query token (128)")
    shape.add_argument("--s_kv", type=int, help="cached tokens a request (1.5 topk); below topk: -1 behind them")
    shape.add_argument("--page", type=int, default=64, help="tokens of a page (64)")
    shape.add_argument("--format", default="v32", help="of the cache: v32 (default) or model1")
    shape.add_argument("--extra_topk", type=int, default=0, help="listed keys of an extra cache (0: none)")
    shape.add_argument("--sink", action="store_true", help="with an attn_sink")
    shape.add_argument("--lengths", action="store_true", help="with topk_length, random")
    shape.add_argument("--holes", action="store_true", help="with -1 inside the lists")
    shape.add_argument("--seed", type=int, default=0, help="of the inputs (0)")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--impl", help="another implementation: module or path of its .py file")
    how.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of Config, a Python literal")
    how.add_argument("--num-sms", type=int, default=32, help="SMs of the GPU that plan and kernel believe in (32)")
    how.add_argument("--schedules", type=int, default=4, metavar="N", help="run schedules 0 to N - 1 (4)")
    how.add_argument("--only", type=int, metavar="I", help="run schedule I alone")
    how.add_argument("--force", action="store_true", help=f"also when it will take more than {run.MAX_SECONDS:.0f} s")
    out = parser.add_argument_group("what to write")
    out.add_argument("--trace", type=Path, metavar="FILE", help="a timeline of the first schedule, for ui.perfetto.dev")
    out.add_argument("--json", type=Path, metavar="FILE", help="everything that is printed, and counts by warp")
    return parser


# ----- ready to run ---------------------------------------------------------------------------------------------------


def prepare(args) -> Job:
    """Raises ValueError, TypeError, NotImplementedError or RuntimeError for what cannot be run."""
    if args.op not in OPS:
        raise ValueError(f"OP: must be {' or '.join(OPS)}, got {args.op}")
    for name in ("b", "s_q", "h_q", "topk", "page", "num_sms", "schedules"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('num_sms', 'num-sms')}: must be at least 1, got {getattr(args, name)}")
    if args.s_kv is not None and args.s_kv < 0:
        raise ValueError(f"--s_kv: must not be negative, got {args.s_kv}")
    if args.only is not None and args.only < 0:
        raise ValueError(f"--only: must not be negative, got {args.only}")
    for path in (args.trace, args.json):
        if path:
            try:
                path.open("a").close()
            except OSError as e:
                raise ValueError(f"{path}: cannot be written ({e.strerror})") from None
    host._compiler()  # says so now if there is none

    case = Case(
        b=args.b,
        s_q=args.s_q,
        h_q=args.h_q,
        topk=args.topk,
        s_kv=args.topk * 3 // 2 if args.s_kv is None else args.s_kv,
        page_block_size=args.page,
        sink=args.sink,
        topk_length=args.lengths,
        holes=args.holes,
        seed=args.seed,
        kv_format=args.format,
        extra_topk=args.extra_topk,
        extra_topk_length=bool(args.lengths and args.extra_topk),
    )
    module = _module(args)
    problem = case.problem
    if not 1 <= case.h_q <= 128:
        raise ValueError(f"--h_q: must be 1 to 128, got {case.h_q}")
    config = _configured(module.default_config(problem), args.set)
    config.check(problem)
    with run.session(arch=args.arch, num_sms=args.num_sms):
        where = target(torch.device("cpu"), "emulator")
    settled, cluster = settle(config, problem, case.b, case.s_q, case.topk, case.extra_topk, where)
    num_parts = config.num_parts(problem, case.s_q, args.num_sms)
    seconds, blocks = estimate(case, problem, config, num_parts), _blocks(case, problem, config)
    runs = 1 if args.only is not None else args.schedules
    if seconds * runs > run.MAX_SECONDS and not args.force:
        raise ValueError(
            f"too large to emulate: {report.some(runs, 'schedule')} will take about {_duration(seconds * runs)} "
            f"({report.some(blocks, 'block')} of keys, {num_parts * case.s_q * problem.head_tiles} CTAs); "
            "take a smaller shape, or --force"
        )

    inputs = make_inputs(case)
    problem = check_sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    started = time.perf_counter()
    planner = run.load(schedule_kernel, _plan_problem(case, num_parts), None, args.arch)
    kernel = run.load(module, problem, settled, args.arch)
    for emulated in (planner, kernel):
        for name in emulated.kernels:
            emulated.program(name)  # an instruction that is not known is told before anything runs
    seconds = time.perf_counter() - started
    keys = reference.sparse_num_keys(
        case.b,
        case.topk,
        inputs.topk_length,
        extra_topk=case.extra_topk,
        extra_topk_length=inputs.extra_topk_length,
        tile_n=config.tile_n,
    )
    charge = overhead(config, case.b, case.topk, case.extra_topk, num_parts)
    plan = reference.plan(keys, num_parts, tile_n=config.tile_n, fixed_overhead_blocks=charge)
    out, lse = reference.sparse_decode(inputs.q, inputs.kv_cache, inputs.indices, **inputs.kwargs())
    fixed = (case, inputs, module, config, settled, args.arch, args.num_sms, num_parts, cluster, args.force)
    return Job(*fixed, planner, kernel, seconds, plan, out, lse)


def _module(args) -> ModuleType:
    if args.arch not in ARCHES:
        shipped = sorted(f"sm_{p.parent.name[2:]}a" for p in jit.PACKAGE.glob(f"sm*/{args.op}.py"))
        raise NotImplementedError(
            f"--arch: no kernel for {args.arch}; {args.op} has one for {', '.join(shipped)}, "
            f"the emulator runs {', '.join(ARCHES)}"
        )
    if args.impl:
        return select_impl("cpu", args.impl)
    try:
        return jit.arch_module(args.op, args.arch)
    except NotImplementedError as e:
        raise NotImplementedError(f"--arch: {e}; --impl names one that is not shipped") from None


def _configured(config, changes: list[str]):
    """The Config with the fields of --set."""
    try:
        values = {name: ast.literal_eval(value) for name, value in (item.split("=", 1) for item in changes)}
        return dataclasses.replace(config, **values)
    except (ValueError, SyntaxError, TypeError) as e:
        fields = ", ".join(f"{f.name}={getattr(config, f.name)!r}" for f in dataclasses.fields(config))
        raise ValueError(f"--set: needs field=value with a field of {fields}; got {', '.join(changes)} ({e})") from None


def _plan_problem(case: Case, num_parts: int) -> schedule_kernel.PlanProblem:
    use_workspace = schedule_kernel.needs_workspace(case.b, num_parts)
    return schedule_kernel.PlanProblem(case.topk_length, use_workspace, case.extra_topk_length)


def _blocks(case: Case, problem: Problem, config) -> int:
    blocks = -(-case.topk // config.tile_n) + -(-case.extra_topk // config.tile_n)
    return case.b * case.s_q * blocks * problem.head_tiles


def estimate(case: Case, problem: Problem, config, num_parts: int) -> float:
    """Seconds of one schedule."""
    ctas = num_parts * case.s_q * problem.head_tiles
    return _blocks(case, problem, config) * run.SECONDS_PER_KEY_BLOCK + ctas * SECONDS_PER_CTA


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


# ----- running it -----------------------------------------------------------------------------------------------------


def emulate(job: Job, watch: report.Watch) -> tuple[torch.Tensor | None, torch.Tensor | None, DecodePlan | None]:
    """out, lse and the plan (None if the planner was stopped), in the session in force."""
    x, how = job.inputs, {"config": job.config, "impl": job.module, "backend": "emulator"}
    plan = plan_decode(x.q, x.indices, **x.plan_kwargs(), **how)
    if any(grid.waiting or grid.active for grid in watch.grids):
        return None, None, None
    return *sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, **how), plan


def run_schedule(job: Job, n: int, watch: report.Watch) -> report.Outcome:
    options = Options.schedule(n)
    with run.session(
        arch=job.arch, options=options, num_sms=job.num_sms, strict=False, force=job.force, trace=watch
    ) as session:
        out, lse, plan = emulate(job, watch)
    kernels = [report.count(grid) for grid in watch.grids]
    outcome = report.Outcome(n, options.seed, options.policy, session.seconds, {}, [], session.findings, kernels)
    if not outcome.stopped:
        compare(job, outcome, out, lse, plan)
    return outcome


def compare(job: Job, outcome: report.Outcome, out: torch.Tensor, lse: torch.Tensor, plan: DecodePlan) -> None:
    """With the reference: fills in what differs."""
    for name, mine, right in zip(("metadata", "num_splits"), (plan.metadata, plan.num_splits), job.plan):
        if not torch.equal(mine, right):
            at = (mine != right).nonzero()[0].tolist()
            outcome.wrong.append(
                f"plan: {name} {at} is {int(mine[tuple(at)])}, must be {int(right[tuple(at)])} "
                f"({int((mine != right).sum())} of {mine.numel()} differ)"
            )
    for name, mine, right, limits in (
        ("out", out, job.out, SPARSE_DECODE_OUT),
        ("lse", lse, job.lse, SPARSE_DECODE_LSE),
    ):
        finite = torch.isfinite(right)
        difference = (mine.float() - right.float())[finite].abs()
        outcome.errors[name] = float(difference.max()) if difference.numel() else 0.0
        try:
            assert_close(mine, right, **limits, name=name)
        except AssertionError as e:
            outcome.wrong.append(str(e))


# ----- the command ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
        return 130


def _main(argv: list[str] | None) -> int:
    try:
        args = arguments().parse_args(argv)
        job = prepare(args)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return 2
    outcomes, started = [], time.perf_counter()
    print(head(job), flush=True)
    for n in [args.only] if args.only is not None else range(args.schedules):
        first = not outcomes
        watch = report.Trace() if args.trace and first else report.Watch()
        outcomes.append(run_schedule(job, n, watch))
        if args.trace and first:
            watch.write(args.trace)
        print(report.row(outcomes[-1]), flush=True)
    print(tail(job, outcomes))
    if args.trace:
        print(f"\ntimeline of schedule {outcomes[0].schedule}: {args.trace} (open it at ui.perfetto.dev)")
    if args.json:
        about = {"op": args.op, "arch": args.arch, "impl": job.module.__name__, "config": repr(job.settled)}
        about |= {"case": dataclasses.asdict(job.case), "num_sms": job.num_sms, "num_parts": job.num_parts}
        about |= {"compile_seconds": job.seconds, "seconds": time.perf_counter() - started}
        args.json.write_text(json.dumps(about | {"schedules": [report.as_dict(o) for o in outcomes]}, indent=1))
    return int(any(o.bad for o in outcomes))


def head(job: Job) -> str:
    problem = job.case.problem
    how = "its plan and combine"
    if job.cluster:
        how = f"clusters of {report.some(job.cluster, 'CTA')}, beside a plan that they do not read"
    return "\n".join(
        [
            f"sparse_decode for {job.arch}: {job.module.__name__}, with {how}",
            f"case {job.case}: {report.some(_blocks(job.case, problem, job.config), 'block')} of keys, "
            f"a plan of {report.some(job.num_parts, 'part')} for {report.some(job.num_sms, 'SM')}",
            f"{job.settled}",
            f"compiled, parsed and decoded in {job.seconds:.1f} s\n",
            report.COLUMNS,
        ]
    )


def tail(job: Job, outcomes: list[report.Outcome]) -> str:
    """What stands below the table of schedules."""
    parts = []
    wrong = [f"schedule {o.schedule}: {text}" for o in outcomes for text in o.wrong]
    if wrong:
        parts.append("\n".join(["Wrong numbers", *wrong]))
    findings = report.findings_text(outcomes)
    if findings:
        parts.append(f"Findings\n{findings}")
    shown = next((o for o in outcomes if not o.stopped), outcomes[0])
    parts.append(f"Instructions of schedule {shown.schedule}, all CTAs together\n{report.counts_text(shown.kernels)}")
    bad = sum(o.bad for o in outcomes)
    total = sum(o.seconds for o in outcomes)
    ran = report.some(len(outcomes), "schedule")
    verdict = f"{bad} of {ran} went wrong" if bad else f"{ran}: numbers agree with the reference, no findings"
    parts.append(f"{verdict} ({total:.1f} s)")
    return "\n" + "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
