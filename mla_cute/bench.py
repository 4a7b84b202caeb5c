"""Timings on a GPU:  python -m mla_cute.bench sparse_decode | write_kv_cache | host | first-call   (-h for each);
tables and plots of them:  python -m mla_cute.bench table | plot.

Kernel times come from the CUDA profiler, as in FlashMLA's own benchmark: from the start of the first kernel of a call to the
end of its last one, the planner left out, the L2 cache flushed before every call, the median of the calls. A peer is timed
the same way, in the same process, on the same inputs. Nothing is printed whose result was not checked first.
"""

import argparse
import ast
import dataclasses
import datetime
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

import mla_cute

from .kv_cache import FORMATS, MODEL1, V32, KVFormat, quantize_kv_cache
from .schedule import settle
from .target import target
from .testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, Inputs, assert_bitwise, assert_close

# ----- cases ----------------------------------------------------------------------------------------------------------


def bench_case(b: int, h_q: int, s_q: int = 1, s_kv: int = 32768, topk: int = 2048, **more) -> Case:
    """As FlashMLA's benchmark has them: request lengths ~ N(s_kv, s_kv / 2), with a sink."""
    return Case(b=b, h_q=h_q, s_q=s_q, s_kv=s_kv, topk=topk, varlen=True, sink=True, **more)


def model1(config: int, b: int) -> Case:
    """FlashMLA's MODEL1 CFG1 to CFG4."""
    h_q, extra_topk = (64, 128)[config % 2 == 0], 512 if config == 1 else 1024
    extra = {"extra_topk": extra_topk, "extra_s_kv": 16384, "extra_page_block_size": 64 if config < 3 else 2}
    extra["extra_topk_length"] = config >= 3
    return bench_case(b, h_q, s_q=2, s_kv=16384, topk=128, kv_format="model1", page_block_size=256, **extra)


FLASHMLA = [  # the performance cases of FlashMLA's tests, and single-token decode over the batch sizes
    *(bench_case(b, 128, s_q=2) for b in (2, 64, 74, 128)),
    *(bench_case(b, h_q) for h_q in (64, 128) for b in (1, 4, 16, 64, 128)),
    *(bench_case(148, h_q, s_q=2, topk=16384) for h_q in (64, 128)),
    *(model1(config, b) for config in (1, 2, 3, 4) for b in (2, 64, 74, 128, 148, 256)),
    *(bench_case(148, h_q, s_q=2, topk=16384, kv_format="model1") for h_q in (64, 128)),
]
FEW_HEADS = [bench_case(b, 16) for b in (1, 16, 64, 128)]  # callers of FlashMLA pad these to 64 heads
QUICK = [
    *(bench_case(b, h_q, s_q) for b, h_q, s_q in ((128, 128, 2), (128, 128, 1), (128, 64, 1))),
    *(bench_case(b, 128) for b in (16, 4, 1)),
    *(model1(config, 128) for config in (1, 2, 4)),
    bench_case(128, 16),
]
SUITES = {"quick": QUICK, "flashmla": FLASHMLA, "few-heads": FEW_HEADS, "all": [*FLASHMLA, *FEW_HEADS]}
SMALL = bench_case(2, 128, s_kv=512, topk=64)  # where the host's time is looked at

# Of a case, in every record; and those only where they are not at their default.
CASE_FIELDS = ("kv_format", "b", "h_q", "s_q", "s_kv", "topk", "extra_topk")
MORE_FIELDS = ("page_block_size", "extra_s_kv", "extra_page_block_size", "topk_length", "extra_topk_length")
DEFAULTS = {f.name: f.default for f in dataclasses.fields(Case) if f.name in MORE_FIELDS}
# variant: only where not the shipped kernel. scales, n: of write_kv_cache.
CASE_KEYS = ("op", *CASE_FIELDS, "variant", *MORE_FIELDS, "scales", "n")

KINDS = ((V32, "pow2"), (V32, "amax"), (MODEL1, "pow2"))  # that the writer writes
WRITES = [(fmt, scales, n) for n in (1, 128, 4096, 16384, 65536) for fmt, scales in KINDS]
WRITE_SUITES = {"quick": [w for w in WRITES if w[2] >= 16384], "all": WRITES}


def case_of(text: str) -> Case:
    """--case"""
    needed, optional = ("b", "h_q", "s_q", "s_kv", "topk"), ("kv_format", "extra_topk", *MORE_FIELDS)
    try:
        values = dict(item.split("=") for item in text.split(","))
        for name in values.keys() - {"kv_format"}:
            values[name] = (bool if name.endswith("topk_length") else int)(int(values[name]))
        if not {*needed} <= {*values} <= {*needed, *optional} or min(values[k] for k in needed) < 1:
            raise ValueError
    except ValueError:
        forms = f"needs {'=, '.join(needed)}= of at least 1, takes {'=, '.join(optional)}="
        raise argparse.ArgumentTypeError(f"{forms}, with commas between; got {text!r}") from None
    try:
        return bench_case(**values)
    except ValueError as e:  # these fields do not go together
        raise argparse.ArgumentTypeError(str(e)) from None


# ----- inputs ---------------------------------------------------------------------------------------------------------

POOL_TOKENS = 65536  # keys that are drawn and quantised: the pages of a cache are copies, which takes milliseconds
DRAWS = 1 << 27  # random numbers held at once


def make_inputs(case: Case, device="cuda") -> Inputs:
    """As `testing.make_inputs`, but of gigabytes in milliseconds: packed, and without poison.

    Request lengths ~ N(s_kv, s_kv / 2), pages anywhere, distinct random keys, -1 behind short lists; topk_length and
    extra_topk_length uniform in [0, topk].
    """
    g, host = torch.Generator(device).manual_seed(case.seed), torch.Generator().manual_seed(case.seed)
    keys = _make_keys(case, g, host)
    extra = None, None, None
    if case.extra_topk:
        second = dataclasses.replace(
            case,
            topk=case.extra_topk,
            s_kv=case.extra_s_kv or 2 * case.extra_topk,
            page_block_size=case.extra_page_block_size or case.page_block_size,
            topk_length=case.extra_topk_length,
        )
        extra = _make_keys(second, g, host)
    opts = {"generator": g, "device": device}
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, dtype=torch.bfloat16, **opts).clamp_(-1, 1)
    return Inputs(q, *keys, torch.randn(case.h_q, **opts), case.d_qk**-0.55, None, *extra)


def _make_keys(case: Case, g: torch.Generator, host: torch.Generator) -> tuple:
    """kv_cache, indices and topk_length. Lengths are drawn on the host: they are the same on every device."""
    fmt, page, b, s_q, topk = case.format, case.page_block_size, case.b, case.s_q, case.topk
    device, opts = g.device, {"generator": g, "device": g.device}
    lengths = torch.normal(float(case.s_kv), case.s_kv / 2, (b,), generator=host).clamp(s_q, 4 * case.s_kv).long()
    longest, pages = int(lengths.max()), (lengths + page - 1) // page
    num_pages, first = int(pages.sum()), (pages.cumsum(0) - pages).to(device)
    lengths = lengths.to(device)

    num_bytes, shape = page * fmt.bytes_per_token, (-1, page, 1, fmt.bytes_per_token)
    drawn = min(num_pages, max(POOL_TOKENS // page, 1))
    pool = torch.zeros(drawn, fmt.page_bytes(page), dtype=torch.uint8, device=device)
    keys = torch.randn(drawn, page, 1, fmt.d_qk, dtype=torch.bfloat16, **opts)
    quantize_kv_cache((keys / 10).clamp_(-1, 1), kv_format=fmt, out=pool[:, :num_bytes].view(shape))
    pick = torch.randint(0, drawn, (num_pages,), **opts)
    kv_cache = pool.view(torch.int64)[pick].view(torch.uint8)[:, :num_bytes].view(shape)

    # The topk smallest of one random number a key are a random choice without repeats, in random order.
    page_of = torch.randperm(num_pages, **opts)
    indices = torch.full((b, s_q, topk), -1, dtype=torch.int32, device=device)
    step = max(1, DRAWS // (s_q * longest))
    for r in range(0, b, step):
        part = slice(r, r + step)
        draw = torch.rand(len(lengths[part]), s_q, longest, **opts)
        draw.masked_fill_(torch.arange(longest, device=device) >= lengths[part, None, None], 2.0)
        value, token = draw.topk(min(topk, longest), largest=False, sorted=True)
        none = value == 2.0
        token.masked_fill_(none, 0)
        index = page_of[first[part, None, None] + token // page] * page + token % page
        indices[part, :, : token.shape[-1]] = index.masked_fill_(none, -1).int()
    length = torch.randint(0, topk + 1, (b,), generator=host).int().to(device) if case.topk_length else None
    return kv_cache, indices, length


# ----- arithmetic -----------------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    tflops: float  # dense bf16
    gbps: float


PEAKS = {"NVIDIA H200": Peak(989.0, 4800.0), "NVIDIA B200": Peak(2250.0, 8000.0)}  # the vendor's figures


def counts(inputs: Inputs) -> tuple[int, int]:
    """Listed keys, and distinct values among them: -1 counts, what stands behind a length does not."""
    listed = distinct = 0
    for indices, length in (inputs.indices, inputs.topk_length), (inputs.extra_indices, inputs.extra_topk_length):
        if indices is None:
            continue
        if length is not None:
            position = torch.arange(indices.shape[2], device=indices.device).expand(indices.shape)
            indices = indices[position < length[:, None, None]]
        listed += indices.numel()
        distinct += torch.unique(indices).numel()
    return listed, distinct


def flops(case: Case, listed: int) -> int:
    """2 FLOP per head, listed key and column of QK and PV."""
    return 2 * listed * case.h_q * (case.d_qk + case.format.d_v)


def num_bytes(case: Case, distinct: int) -> int:
    """q and out once; each distinct cached key once, as FlashMLA counts it: the row, without MODEL1's scales."""
    rows = case.b * case.s_q * case.h_q
    return 2 * rows * (case.d_qk + case.format.d_v) + distinct * case.format.row_bytes


def roofline(record: dict) -> dict:
    """bound: what limits the case on this chip; bound_share: the time it allows over the time taken. {} if not known."""
    peak = PEAKS.get(record.get("gpu"))
    if peak is None:
        return {}
    shares = {"bandwidth": record["gbps"] / peak.gbps}
    if "tflops" in record:
        shares["compute"] = record["tflops"] / peak.tflops
    bound = max(shares, key=shares.get)
    return {"bound": bound, "bound_share": round(shares[bound], 4)}


# ----- times ----------------------------------------------------------------------------------------------------------


def kernel_times(call: Callable, n: int) -> dict:
    """In us, over n calls with a cold L2: medians of span, split (the longest kernel) and combine (0 if there is none);
    least and greatest span."""
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    return times_of(prof.events(), n)


def times_of(events: Iterable, n: int) -> dict:
    calls: list[list] = []
    for event in sorted(events, key=lambda e: e.time_range.start):
        name = event.name.lower()
        if "memset" in name or "fill" in name:  # the flush
            calls.append([])
        elif calls and not name.startswith(("cuda", "activity", "context")):
            calls[-1].append(event)
    calls = [events for events in calls if events]
    if len(calls) != n:
        raise RuntimeError(f"the profiler saw {len(calls)} of {n} calls")

    def median(us):
        return round(statistics.median(us(events) for events in calls), 3)

    def span(events):
        return events[-1].time_range.end - events[0].time_range.start

    def durations(events, combine):
        return [e.time_range.elapsed_us() for e in events if ("combine" in e.name.lower()) is combine] or [0]

    return {
        "us": median(span),
        "split_us": median(lambda events: max(durations(events, False))),
        "combine_us": median(lambda events: sum(durations(events, True))),
        "us_range": [round(pick(map(span, calls)), 3) for pick in (min, max)],
        "calls": n,
    }


def clocks(call: Callable) -> dict:
    """SM clock and power while the GPU runs the call without a pause."""
    fields = {"sm_mhz": "clocks.sm", "power_w": "power.draw"}
    query = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits", "-i", "0"]
    smi = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    while smi.poll() is None:
        call()
    torch.cuda.synchronize()
    return dict(zip(fields, map(float, smi.stdout.read().split(","))))


# ----- checks ---------------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """Results of up to eight requests spread over the batch: the reference's, and the fp64 oracle's if it was asked for."""

    requests: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    exact: tuple[torch.Tensor, torch.Tensor] | None


def expect(x: Inputs, oracle: bool = False) -> Expected:
    some = torch.arange(0, len(x.q), max(len(x.q) // 8, 1), device=x.q.device)
    kwargs = x.kwargs()
    for name in ("topk_length", "extra_indices", "extra_topk_length"):  # these have a batch axis
        kwargs[name] = None if kwargs[name] is None else kwargs[name][some]

    def reference(**dtypes):
        return mla_cute.reference.sparse_decode(x.q[some], x.kv_cache, x.indices[some], **kwargs, **dtypes)

    return Expected(some, *reference(), reference(dtype=torch.float64, out_dtype=torch.float64) if oracle else None)


def check(expected: Expected, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Raises AssertionError unless these are the results, as far as known, and every out is finite."""
    assert_close(out[expected.requests], expected.out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse[expected.requests], expected.lse, **SPARSE_DECODE_LSE, name="lse")
    if not out.isfinite().all():
        raise AssertionError(f"out: {int((~out.isfinite()).sum())} of {out.numel()} elements are not finite")


def errors(expected: Expected, out: torch.Tensor, lse: torch.Tensor) -> dict:
    """Greatest and root-mean-square distance from the fp64 oracle."""
    found = {}
    for name, ours, exact in zip(("out", "lse"), (out, lse), expected.exact):
        off = ours[expected.requests].double() - exact
        off = torch.where(exact.isfinite(), off, 0.0)  # nothing attended: lse is +inf in both, as `check` saw
        found |= {f"{name}_max": float(off.abs().max()), f"{name}_rms": float(off.square().mean().sqrt())}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def checked_times(call: Callable, expected: Expected, calls: int) -> dict:
    """Times of a call, with its errors if there is an oracle: the only way to a time, and it leads through the check."""
    result = call()
    check(expected, *result)
    return kernel_times(call, calls) | ({"errors": errors(expected, *result)} if expected.exact else {})


def captured(call: Callable, n: int = 1) -> Callable:
    """n calls in a CUDA graph: a call of this replays it and returns the last one's results, which the replay has written."""
    call()  # whatever is done once, compiling say, is not for the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            result = call()
    for t in result:
        t.fill_(float("nan"))  # what the check finds there is the replay's

    def replay():
        graph.replay()
        return result

    return replay


def graph_times(call: Callable, expected: Expected, calls: int) -> dict:
    """us of a call in a CUDA graph, medians: alone with a cold L2; one of ten behind one another, from events around them."""
    ten, events = captured(call, 10), [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]
    check(expected, *ten())
    for start, end in zip(events[::2], events[1::2]):
        start.record()
        ten()
        end.record()
    torch.cuda.synchronize()
    warm = statistics.median(start.elapsed_time(end) * 100 for start, end in zip(events[::2], events[1::2]))  # ms of ten
    return {"graph_us": checked_times(captured(call), expected, calls)["us"], "warm_graph_us": round(warm, 3)}


# ----- sparse decode --------------------------------------------------------------------------------------------------


def flash_mla(x: Inputs) -> Callable:
    """A call of the installed flash_mla (2026 form): (out, lse) like ours. Its heads are padded to 64 or 128 here, once."""
    import flash_mla

    fmt = next(fmt for fmt in FORMATS.values() if fmt.bytes_per_token == x.kv_cache.shape[-1])
    h_q = x.q.shape[2]
    if fmt == V32 and (x.topk_length is not None or x.extra_indices is not None):
        raise NotImplementedError("flash_mla takes neither topk_length nor extra keys with a V3.2 cache")
    for name in ("indices", "extra_indices"):
        listed = getattr(x, name)
        if listed is not None and listed.shape[2] % 64:  # of extra ones it would read past the list, without a word
            raise NotImplementedError(f"flash_mla needs {name} of a multiple of 64 keys, got {listed.shape[2]}")
    padding = (64 if h_q <= 64 else 128) - h_q
    q = torch.nn.functional.pad(x.q, (0, 0, 0, padding)) if padding else x.q
    sink = torch.nn.functional.pad(x.attn_sink, (0, padding)) if padding else x.attn_sink
    caches = [t if t is None else t.view(torch.float8_e4m3fn) for t in (x.kv_cache, x.extra_kv_cache)]
    options = {
        "softmax_scale": x.softmax_scale,
        "is_fp8_kvcache": True,
        "indices": x.indices,
        "attn_sink": sink,
        "extra_k_cache": caches[1],
        "extra_indices_in_kvcache": x.extra_indices,
        "topk_length": x.topk_length,
        "extra_topk_length": x.extra_topk_length,
    }
    meta, _ = flash_mla.get_mla_metadata()  # the first call plans

    def call():
        out, lse = flash_mla.flash_mla_with_kvcache(q, caches[0], None, None, fmt.d_v, meta, None, **options)
        return out[:, :, :h_q], lse[:, :h_q].transpose(1, 2)

    return call


PEERS = {"flash_mla": flash_mla}


def sparse_decode(x: Inputs, problem, impl=None, changes: dict | None = None) -> Callable:
    """A call of ours, planned."""
    module = mla_cute.select_impl(x.q.device, impl)
    config = dataclasses.replace(module.default_config(problem), **changes or {})
    plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), config=config, impl=module)
    return lambda: mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, impl=module)


def measure(
    case: Case, calls=30, peers=(), impl=None, changes=None, oracle=False, sample_clocks=False, graph=False, device="cuda"
) -> tuple[dict, list[str]]:
    """The record of a case, and which peers failed and why."""
    x = make_inputs(case, device)
    expected = expect(x, oracle)
    ours = sparse_decode(x, case.problem, impl, changes)
    record = {"op": "sparse_decode"} | {name: getattr(case, name) for name in CASE_FIELDS}
    record |= {name: getattr(case, name) for name in MORE_FIELDS if getattr(case, name) != DEFAULTS[name]}

    def times(call):
        return checked_times(call, expected, calls) | (graph_times(call, expected, calls) if graph else {})

    record |= times(ours) | {"checked": True}
    listed, distinct = counts(x)
    us, work = record["us"], flops(case, listed)
    record |= {"tflops": round(work / us / 1e6, 1), "gbps": round(num_bytes(case, distinct) / us / 1e3, 1)}
    if impl or changes:  # never the shipped kernel's row
        fields = [f"{name}={value!r}" for name, value in (changes or {}).items()]
        record["variant"] = " ".join([impl or "", *fields]).strip()
    if sample_clocks:
        record |= clocks(ours)
    record["peers"], failed = {}, []
    for name in peers:
        try:
            theirs = times(PEERS[name](x))
        except Exception as e:  # the case is ours all the same
            failed.append(f"{name}: {reason(e)}")
            continue
        theirs |= {"tflops": round(work / theirs["us"] / 1e6, 1), "ratio": round(theirs["us"] / us, 4)}
        record["peers"][name] = theirs
    return record, failed


def reason(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip()[:400]}".split("\n")[0]


def compile_ahead(cases: list[Case], impl, changes: dict) -> None:
    """Compile what a suite needs, several kernels at once: a minute saved where the disk cache is empty."""
    from . import jit, schedule_kernel

    module, arch, jobs = mla_cute.select_impl("cuda", impl), jit.arch_of("cuda"), []
    where = target(torch.device("cuda"))
    for case in cases:
        problem = case.problem
        config = dataclasses.replace(module.default_config(problem), **changes)
        config, _ = settle(config, problem, case.b, case.s_q, case.topk, case.extra_topk, where)
        plan = schedule_kernel.PlanProblem(
            problem.has_topk_length, use_workspace=False, has_extra_topk_length=problem.has_extra_topk_length
        )
        jobs += [jit.Job(module, problem, config, arch), jit.Job(schedule_kernel, plan, None, arch)]
    try:
        jit.compile_ahead(list(dict.fromkeys(jobs)), progress=False)
    except Exception as e:  # each case compiles for itself then, and says what it cannot
        print(f"not compiled ahead: {reason(e)}", file=sys.stderr)


# ----- the writer -----------------------------------------------------------------------------------------------------


def measure_write(fmt: KVFormat, scales: str, n: int, calls=30, device="cuda") -> tuple[dict, list[str]]:
    """The record of `write_kv_cache` of n tokens, beside a copy of as many bytes. Its bytes must be those of the CPU."""
    g = torch.Generator(device).manual_seed(0)
    tokens = torch.randn(n, fmt.d_qk, generator=g, device=device).to(torch.bfloat16)
    latent, rope = tokens[:, : fmt.d_nope].contiguous(), tokens[:, fmt.d_nope :].contiguous()
    num_pages = max(2 * n // 64, 64)
    if n < 4096:  # a decode step: one token here, one there
        slots = torch.randperm(64 * num_pages, generator=g, device=device)[:n]
    else:  # a prefill: whole pages in any order
        pages = torch.randperm(num_pages, generator=g, device=device)[: -(-n // 64)]
        slots = (pages[:, None] * 64 + torch.arange(64, device=device)).flatten()[:n]
    kv_cache = torch.full((num_pages, 64, 1, fmt.bytes_per_token), 0xFF, dtype=torch.uint8, device=device)
    expected = torch.full_like(kv_cache, 0xFF, device="cpu")

    def call():
        mla_cute.write_kv_cache(kv_cache, latent, rope, slots, scales=scales)

    call()
    mla_cute.write_kv_cache(expected, latent.cpu(), rope.cpu(), slots.cpu(), scales=scales)
    assert_bitwise(kv_cache.cpu(), expected, name="kv_cache")
    moved = n * (2 * fmt.d_qk + fmt.bytes_per_token + slots.element_size())
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    times, copy_us = kernel_times(call, calls), kernel_times(lambda: copy.copy_(source), calls)["us"]
    us = times["us"]
    record = {"op": "write_kv_cache", "kv_format": fmt.name, "scales": scales, "n": n, "us": us}
    record |= {"us_range": times["us_range"], "calls": calls, "checked": True, "gbps": round(moved / us / 1e3, 1)}
    return record | {"copy_us": copy_us, "copy_share": round(copy_us / us, 4)}, []


# ----- records --------------------------------------------------------------------------------------------------------


def provenance(commit: str | None) -> dict:
    """Where and with what a record was measured."""
    from importlib.metadata import version

    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent)]
        try:
            commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
            dirty = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip()
            commit += "-dirty" if dirty else ""
        except (OSError, subprocess.CalledProcessError):  # no git, or an installed package
            commit = f"unknown, version {version('mla-cute')}"
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


def identity(record: dict) -> tuple:
    """What is measured. A field that older records do not have is at its default there."""
    return tuple(record.get(key, DEFAULTS.get(key)) for key in CASE_KEYS)


def latest(records: list[dict]) -> list[dict]:
    """The last record of every case, in the order of the file."""
    return list({identity(r): r for r in records}.values())


def peers_of(record: dict) -> dict:
    """name -> {"us": ..., ...}; older records have one peer, and its time only."""
    if "peers" in record:
        return record["peers"]
    return {record["peer"]: {"us": record["peer_us"]}} if record.get("peer_us") else {}


def load(paths: list[Path]) -> list[dict]:
    """The latest records of shipped kernels. Raises ValueError for a time whose result was not checked."""
    records = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ValueError(f"cannot read {path}: {e}") from None
        for r in found:
            if r.get("op") not in TABLES or "what" in r or r.get("variant"):  # host times are no table's; nor variants
                continue
            if not r.get("checked"):
                raise ValueError(f"{path}: a time whose result was not checked: {label(r)}")
            records.append(r)
    return latest(records)


def append(path: Path, records: list[dict]) -> None:
    old = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in old + records)
    path.write_text(f"[\n{lines}\n]\n")


# ----- tables ---------------------------------------------------------------------------------------------------------


def label(r: dict) -> str:
    """A record's case in a few words."""
    if r["op"] == "write_kv_cache":
        return f"{title(r)} {r['scales']} n {r['n']}"
    return f"{title(r)} b {r['b']} h_q {r['h_q']} s_q {r['s_q']} topk {topk_of(r)}"


def title(r: dict) -> str:
    return {"v32": "V3.2", "model1": "MODEL1"}.get(r["kv_format"], r["kv_format"])


def topk_of(r: dict) -> str:
    """"128 + 0..1024": lists of 128 keys, and of up to 1024 of the extra cache, by lengths."""
    parts = [("0.." if r.get(f"{k}_length") else "") + str(r[k]) for k in ("topk", "extra_topk") if r.get(k)]
    return " + ".join(parts)


def sparse_decode_cells(r: dict) -> dict:
    peer = peers_of(r).get("flash_mla")
    share = roofline(r)
    s_kv, page = ([r.get(k, DEFAULTS.get(k)) for k in (name, f"extra_{name}")] for name in ("s_kv", "page_block_size"))
    cells = {"b": r["b"], "h_q": r["h_q"], "s_q": r["s_q"], "topk": topk_of(r)}
    cells |= {name: " + ".join(str(n) for n in values if n) for name, values in (("s_kv", s_kv), ("page", page))}
    cells |= {"us (split / combine)": f"{r['us']:.1f} ({r['split_us']:.1f} / {r['combine_us']:.1f})"}
    cells |= {"TFLOPS": f"{r['tflops']:.0f}", "GB/s": f"{r['gbps']:.0f}"}
    cells |= {"of the bound": f"{share['bound_share']:.0%} {share['bound']}" if share else "-"}
    graph = [f"{x['graph_us']:.1f} / {x['warm_graph_us']:.1f}" if "graph_us" in x else "-" for x in (r, peer or {})]
    cells |= {"in a graph, us (cold / warm L2)": graph[0], "FlashMLA us": f"{peer['us']:.1f}" if peer else "-"}
    cells |= {"in a graph": graph[1]}
    cells |= {"FlashMLA / ours": f"{peer['us'] / r['us']:.2f}" if peer else "-"}
    both = [side["errors"]["out_rms"] for side in (r, peer or {}) if "errors" in side]
    return cells | {"rms error, ours / FlashMLA's": f"{both[0] / both[1]:.3f}" if len(both) == 2 else "-"}


def write_kv_cache_cells(r: dict) -> dict:
    cells = {"`write_kv_cache`": title(r), "scales": r["scales"], "n": r["n"]}
    cells |= {"us": f"{r['us']:.1f}", "GB/s": f"{r['gbps']:.0f}"}
    return cells | {"a copy of as many bytes, us": f"{r['copy_us']:.1f}", "copy / ours": f"{r['copy_us'] / r['us']:.0%}"}


class Table(NamedTuple):
    marker: str  # of its place in the README
    heading: Callable  # of the group that a record belongs to
    cells: Callable  # column: what stands there, "-" for nothing
    method: str


TABLES = {
    "sparse_decode": Table(
        "speed-table",
        lambda r: f"**{title(r)}**",
        sparse_decode_cells,
        "Cold L2, profiler times, medians, both sides in one run",
    ),
    "write_kv_cache": Table(
        "writer-table", lambda r: "", write_kv_cache_cells, "Cold L2, profiler times, medians, bytes read and written"
    ),
}


def table(records: list[dict]) -> str:
    """Records of one op as Markdown, one table a heading.

    A column in which no record has anything is left out; s_kv and page go into the heading where they are all the same.
    """
    groups: dict[str, list] = {}
    for r in records:
        groups.setdefault(TABLES[r["op"]].heading(r), []).append(TABLES[r["op"]].cells(r))
    text = []
    for heading, rows in groups.items():
        values = {column: {row[column] for row in rows} for column in rows[0]}
        same = [name for name in ("s_kv", "page") if len(values.get(name, ())) == 1]
        columns = [column for column in values if column not in same and values[column] != {"-"}]
        lines = [columns, *([row[column] for column in columns] for row in rows)]
        lines = [f"| {' | '.join(map(str, line))} |" for line in lines]
        heading = ", ".join([heading, *(f"{name} {rows[0][name]}" for name in same)])
        text.append("\n".join([f"{heading}\n"] * bool(heading) + [lines[0], "|" + "---|" * len(columns), *lines[1:]]))
    return "\n\n".join(text)


def about(records: list[dict]) -> str:
    """What the records of one op were measured on; the last one speaks for all but the commits."""
    last = records[-1]
    commits = list(dict.fromkeys(r["commit"] for r in records))
    command = last.get("command", f"python -m mla_cute.bench {last['op']}")
    machine = f"{last['gpu']}, driver {last['driver']}, torch {last['torch']}, DSL {last['dsl']}"
    machine += f", commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {last['date']}"
    text = f"{machine}. {TABLES[last['op']].method}: `{command}`."
    peak = PEAKS.get(last["gpu"])
    if peak and last["op"] == "sparse_decode":
        text += f" The bound is the nearer one of {peak.tflops:.0f} TFLOPS and {peak.gbps / 1e3:g} TB/s."
    return text


def write_tables(readme: Path, records: list[dict]) -> None:
    """Put each op's table between its markers in the README, with what it was measured on. Raises ValueError without them."""
    text = readme.read_text()
    for op, spec in TABLES.items():
        of_op = [r for r in records if r["op"] == op]
        if not of_op:
            continue
        begin, end = f"<!-- {spec.marker}:start -->", f"<!-- {spec.marker}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"{readme}: needs one {begin} and behind it one {end}")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{about(of_op)}\n\n{table(of_op)}\n{end}{rest.split(end)[1]}"
    readme.write_text(text)


# ----- host times -----------------------------------------------------------------------------------------------------


HOST_ROUNDS, HOST_CALLS = 51, 100


def host(args, device="cuda") -> None:
    """CPU time of calls: of sparse_decode also without its launch, which says where it goes.

    A round is short and begins with an idle GPU: where the driver's queue (about 1,000 launches) is full, a call waits.
    """
    x = make_inputs(SMALL, device)
    plan = mla_cute.plan_decode(x.q, x.indices)
    module = mla_cute.select_impl(device)
    without = ModuleType("without_launch")
    without.Config, without.default_config = module.Config, module.default_config
    without.compile = lambda problem, config, arch: lambda *_: None
    token = torch.zeros(2, V32.d_qk, dtype=torch.bfloat16, device=device)
    latent, rope, slots = token[:, : V32.d_nope], token[:, V32.d_nope :], torch.arange(2, device=device)

    def decode(impl=None):
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, attn_sink=x.attn_sink, plan=plan, impl=impl)

    print(f"host time a call, us: median (range) of {HOST_ROUNDS} rounds of {HOST_CALLS}")
    whole = print_host_time("sparse_decode with a plan", decode)
    rest = print_host_time("  all but its launch", lambda: decode(without))
    print(f"  its launch{'':18}{whole - rest:8.1f} (the difference)")
    print_host_time("plan_decode", lambda: mla_cute.plan_decode(x.q, x.indices))
    print_host_time("write_kv_cache", lambda: mla_cute.write_kv_cache(x.kv_cache, latent, rope, slots))


def print_host_time(name: str, call: Callable) -> float:
    """The median of the rounds, us a call."""
    rounds = []
    for _ in range(HOST_ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - started) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize()
    rounds = rounds[1:]  # the first compiles
    median = statistics.median(rounds)
    print(f"{name:28}{median:8.1f} ({min(rounds):.1f} to {max(rounds):.1f})", flush=True)
    return median


FIRST_CALL = """
import time, torch, mla_cute
from mla_cute.bench import SMALL, make_inputs
x = make_inputs(SMALL)
torch.cuda.synchronize()
started = time.perf_counter()
mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, attn_sink=x.attn_sink)
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


# ----- the command ----------------------------------------------------------------------------------------------------


def run(jobs: list[tuple[str, Callable]], where: dict, path: Path | None = None) -> tuple[list[dict], int]:
    """Each job's record, printed, appended to the file; and how many failures there were. A failure does not end the run.

    jobs: (name, () -> (record, failures of peers)); where: what every record gets.
    """
    records, failures, header = [], 0, None
    for name, job in jobs:
        try:
            record, failed = job()
        except Exception as e:
            record, failed = None, [reason(e)]
        if record is not None:
            record |= where
            record |= roofline(record)
            *above, row = table([record]).split("\n")
            if above != header:
                header = above
                print("", *above, sep="\n")
            print(row, flush=True)
            records.append(record)
            if path:
                append(path, [record])
        for why in failed:
            failures += 1
            print(f"FAILED {name}: {why}", flush=True)
        torch.cuda.empty_cache()
    return records, failures


def changes_of(items: list[str], config) -> dict:
    """--set. Raises ValueError."""
    try:
        changes = {name: ast.literal_eval(value) for name, value in (item.split("=", 1) for item in items)}
        dataclasses.replace(config, **changes)
        return changes
    except (ValueError, SyntaxError, TypeError) as e:
        fields = ", ".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config))
        raise ValueError(f"--set: needs field=value with a field of {fields}; got {items} ({e})") from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m mla_cute.bench", description=__doc__.split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True)
    decode = commands.add_parser("sparse_decode", help="kernel times of a suite or of single cases")
    write = commands.add_parser("write_kv_cache", help="kernel times of the cache writer, beside a copy")
    for command, suites in ((decode, SUITES), (write, WRITE_SUITES)):
        sizes = ", ".join(f"{name} {len(cases)}" for name, cases in suites.items())
        command.add_argument("--suite", choices=suites, help=f"cases: {sizes}; default all")
        command.add_argument("-n", type=int, default=30, help="calls a case")
        command.add_argument("--json", type=Path, help="append the records to this file")
        command.add_argument("--commit", help="what to write as commit; default: ask git")
    decode.add_argument(
        "--case", action="append", type=case_of, default=[], help="b=128,h_q=128,s_q=2,s_kv=32768,topk=2048 and more"
    )
    decode.add_argument("--peers", nargs="+", choices=PEERS, default=[], help="installed packages to time beside it")
    decode.add_argument("--impl", help="another implementation: module or path")
    decode.add_argument("--set", action="append", default=[], help="field=value of Config, a Python literal")
    decode.add_argument("--errors", action="store_true", help="record errors against an fp64 oracle")
    decode.add_argument("--clocks", action="store_true", help="record SM clock and power under each case")
    decode.add_argument("--graph", action="store_true", help="times in CUDA graphs too, of one call and of ten")
    decode.add_argument("--plot", type=Path, metavar="DIR", help="write roofline.svg and ratios.svg there")
    commands.add_parser("host", help="CPU time per call, and of all but the launch")
    commands.add_parser("first-call", help="seconds of a process's first call")
    tables = commands.add_parser("table", help="the latest records as Markdown")
    tables.add_argument("--write", type=Path, help="put the tables into this README")
    plot = commands.add_parser("plot", help="roofline.svg and ratios.svg of the latest sparse_decode records")
    plot.add_argument("--out", type=Path, required=True, metavar="DIR")
    for command in (tables, plot):
        command.add_argument("json", type=Path, nargs="+")
    return top


def main(argv: list[str] | None = None) -> None:
    top = parser()
    args = top.parse_args(argv)
    try:
        if args.command in ("table", "plot"):
            show(args)
        elif not torch.cuda.is_available():
            raise ValueError("needs a GPU, torch sees none")
        elif args.command in ("host", "first-call"):
            {"host": host, "first-call": first_call}[args.command](args)
        else:
            measure_all(args)
    except (ValueError, TypeError, NotImplementedError, ImportError) as e:
        top.exit(1, f"{args.command}: {e}\n")


def show(args) -> None:
    records = load(args.json)
    if args.command == "plot":
        from .bench_plot import write

        write([r for r in records if r["op"] == "sparse_decode"], args.out)
        return
    for op in TABLES:
        if of_op := [r for r in records if r["op"] == op]:
            print(table(of_op))
    if args.write:
        write_tables(args.write, records)


def measure_all(args) -> None:
    started = time.perf_counter()
    if args.n < 1:
        raise ValueError(f"-n: must be at least 1, got {args.n}")
    if args.command == "write_kv_cache":
        jobs = [
            (f"{fmt.name} {scales} n {n}", lambda w=(fmt, scales, n): measure_write(*w, args.n))
            for fmt, scales, n in WRITE_SUITES[args.suite or "all"]
        ]
    else:
        cases = args.case + (SUITES[args.suite or "all"] if args.suite or not args.case else [])
        for name in args.peers:
            importlib.import_module(name)
        if args.plot:
            from . import bench_plot

            bench_plot.pyplot()  # before the work, not behind it
        module = mla_cute.select_impl("cuda", args.impl)
        changes = changes_of(args.set, module.default_config(cases[0].problem))
        if len(cases) > 1:
            compile_ahead(cases, args.impl, changes)
        options = (args.n, args.peers, args.impl, changes, args.errors, args.clocks, args.graph)
        jobs = [(str(case), lambda case=case: measure(case, *options)) for case in cases]
    records, failures = run(jobs, provenance(args.commit), args.json)
    print(f"\n{len(records)} of {len(jobs)} cases, {failures} failures, {time.perf_counter() - started:.0f} s")
    if args.command == "sparse_decode" and args.plot and records:
        bench_plot.write(records, args.plot)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
