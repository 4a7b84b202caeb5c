"""Threads, forks, streams and CUDA graphs: calls beside other calls, and calls that are made again later."""

import dataclasses
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mla_cute
from mla_cute import interface, jit, reference
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs

MODEL1 = {"kv_format": "model1", "extra_topk": 70, "extra_topk_length": True}
# One a thread: other kernels, shapes, plans and options.
CASES = [
    Case(b=3, h_q=128, topk=200, s_kv=300, topk_length=True, sink=True),
    Case(b=2, h_q=64, s_q=2, topk=133, s_kv=300, holes=True),
    Case(b=5, h_q=24, topk=65, s_kv=300, page_block_size=7, **MODEL1),
    Case(b=1, h_q=8, topk=700, s_kv=900, sink=True),
]


def decode(x, plan=None, **options):
    return mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, **options)


def make_plan(x, **options):
    return mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), **options)


def assert_reference(got, x):
    for ours, expected, tolerance, name in zip(
        got,
        reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs()),
        (SPARSE_DECODE_OUT, SPARSE_DECODE_LSE),
        ("out", "lse"),
    ):
        assert_close(ours, expected, **tolerance, name=name)


def tokens(seed, device="cpu", n=40):
    """latent, rope, and slots of a cache of 64 tokens."""
    g = torch.Generator().manual_seed(seed)
    latent, rope = (torch.randn(n, d, generator=g).to(device, torch.bfloat16) for d in (512, 64))
    return latent, rope, torch.randperm(64, generator=g)[:n].to(device)


def blank_cache(device="cpu"):
    return torch.full((4, 16, 1, 656), 0xFF, dtype=torch.uint8, device=device)


def written(seed):
    """On the CPU, whatever the device of the cache that it is compared with."""
    cache = blank_cache()
    mla_cute.write_kv_cache(cache, *tokens(seed))
    return cache


def at_the_same_time(work, n):
    """work(0) ... work(n - 1) in a thread each, let off together; their results, or the first exception."""
    start = threading.Barrier(n)

    def run(i):
        start.wait(60)
        return work(i)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many switches of threads as Python makes
    try:
        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(run, range(n)))
    finally:
        sys.setswitchinterval(before)


# ----- threads --------------------------------------------------------------------------------------------------------


def test_threads():
    """Each its own shapes and plans, over and over, with and without a plan: always its own numbers."""
    inputs = [make_inputs(case) for case in CASES]
    expected = [decode(x) for x in inputs]

    def work(i):
        x, found = inputs[i], []
        latent, rope, slots = tokens(i)
        for repeat in range(6):
            found.append(decode(x, make_plan(x) if repeat % 3 else None))
        cache = blank_cache()
        mla_cute.write_kv_cache(cache, latent, rope, slots)
        return found, cache

    for i, (found, cache) in enumerate(at_the_same_time(work, len(CASES))):
        for out, lse in found:
            assert_bitwise(out, expected[i][0], name=f"out of {CASES[i]}")
            assert_bitwise(lse, expected[i][1], name=f"lse of {CASES[i]}")
        assert_bitwise(cache, written(i), name="kv_cache")


def test_threads_share_a_plan():
    x = make_inputs(CASES[0])
    plan, expected = make_plan(x), decode(x)
    for out, lse in at_the_same_time(lambda _: decode(x, plan), 4):
        assert_bitwise(out, expected[0], name="out")
        assert_bitwise(lse, expected[1], name="lse")


def test_each_steps_plan_goes_the_short_way(monkeypatch):
    """A new plan of the kind that the last call had needs no new checks; one of another kind gets them."""
    x = make_inputs(CASES[0])
    expected = decode(x, make_plan(x))
    prepared, inner = [], interface._prepare
    monkeypatch.setattr(interface, "_prepare", lambda *args: prepared.append(1) or inner(*args))
    for _ in range(3):
        assert_bitwise(decode(x, make_plan(x))[0], expected[0], name="out")
    assert prepared == []
    config = reference.Config(tile_n=16)
    plan = make_plan(x, config=config)
    assert plan.kind is make_plan(x, config=config).kind is not make_plan(x).kind
    assert_bitwise(decode(x, plan)[0], expected[0], name="out")
    assert len(prepared) == 1
    other = make_inputs(dataclasses.replace(CASES[0], topk=199))
    with pytest.raises(ValueError, match="plan: was made for topk 199, got a call with topk 200"):
        decode(x, make_plan(other))
    with pytest.raises(TypeError, match=r"plan: must be a mla_cute.DecodePlan, got str"):
        decode(x, "a plan")


@pytest.mark.compile
def test_threads_compile_at_the_same_time(tmp_path, monkeypatch):
    """Several kernels and some of them twice: one function each."""
    from mla_cute import schedule_kernel

    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_memory", {})
    problems = [schedule_kernel.PlanProblem(*flags) for flags in ((False, False, False), (True, False, False))]
    made = at_the_same_time(lambda i: jit.load(schedule_kernel, problems[i % 2], None, "sm_90a"), 4)
    assert made[0] is made[2] and made[1] is made[3] and made[0] is not made[1]


# ----- forks ----------------------------------------------------------------------------------------------------------

# A parent that forks, and waits for its child no longer than it should take. One thread in torch: libgomp's threads do
# not come along, and torch waits for them for ever, whatever it computes.
FORKING = """
import os, sys, threading, time
import mla_cute

def fork(child, seconds=120):
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    for _ in range(seconds * 20):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

def call(device="cpu", **change):
    import torch
    torch.set_num_threads(1)
    from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs
    x = make_inputs(Case(b=3, h_q=64, topk=100, s_kv=150, topk_length=True, sink=True, **change), device)
    plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length)
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan)
    ref_out, ref_lse = mla_cute.reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")
    cache, latent = torch.zeros(1, 2, 1, 656, dtype=torch.uint8), torch.ones(2, 512, dtype=torch.bfloat16)
    ours = cache.to(device)
    mla_cute.write_kv_cache(cache, latent, latent[:, :64], torch.arange(2))
    mla_cute.write_kv_cache(ours, latent.to(device), latent[:, :64].to(device), torch.arange(2, device=device))
    assert_bitwise(ours.cpu(), cache, name="kv_cache")
"""


def run_forking(code, tmp_path):
    env = {**os.environ, "MLA_CUTE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKING + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_fork_before_and_after_calls(tmp_path):
    code = """
print(fork(call))  # after the import alone
call()
print(fork(call), fork(lambda: call(seed=1)))
call()
"""
    assert run_forking(code, tmp_path) == ["0"] * 3


def test_fork_while_another_thread_compiles(tmp_path):
    """The child may not find the lock taken by a thread that it does not have."""
    code = """
from mla_cute import interface, jit, reference
import types
slow, go_on = types.ModuleType("slow"), threading.Event()
slow.Config, slow.default_config = reference.Config, reference.default_config
def compile(problem, config, arch):
    compiling.set()
    time.sleep(0.5)
    return lambda *args: None
slow.compile = compile
compiling = threading.Event()
thread = threading.Thread(target=lambda: jit.load(slow, "a problem", None, "cpu"))
thread.start()
compiling.wait()
print(fork(lambda: (call(), jit.load(slow, "another problem", None, "cpu")), 60))
thread.join()
with interface._import_lock, reference._matmul_lock:  # the thread that forks may have them itself
    print(fork(call, 60))
call()
"""
    assert run_forking(code, tmp_path) == ["0"] * 2


@pytest.mark.compile
def test_fork_after_compiling(tmp_path):
    """The child takes a kernel from memory, another from disk, and compiles a third."""
    code = """
from mla_cute import jit, schedule_kernel
def load(*flags):
    assert callable(jit.load(schedule_kernel, schedule_kernel.PlanProblem(*flags), None, "sm_90a"))
load(True, False, False)
print(fork(lambda: load(True, False, False)), fork(lambda: load(False, False, False)))
print(fork(lambda: load(False, False, False)), fork(lambda: load(True, False, True)))
load(True, False, True)
"""
    assert run_forking(code, tmp_path) == ["0"] * 4


# ----- gpu: threads and forks -----------------------------------------------------------------------------------------

THREADS_THAT_COMPILE = """
import sys, threading
import torch, mla_cute
sys.path.insert(0, sys.argv[1])
from test_concurrency import CASES, assert_reference, at_the_same_time, blank_cache
from test_concurrency import decode, make_inputs, make_plan, tokens, written
inputs = [make_inputs(case, "cuda") for case in CASES]
torch.cuda.synchronize()

def work(i):
    x, stream = inputs[i], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cache = blank_cache("cuda")
        mla_cute.write_kv_cache(cache, *tokens(i, "cuda"))
        found = [decode(x, make_plan(x) if repeat % 3 else None) for repeat in range(20)]
    stream.synchronize()
    return found, cache

for i, (found, cache) in enumerate(at_the_same_time(work, len(CASES))):
    for got in found:
        assert_reference(got, inputs[i])
        assert torch.equal(got[0], found[0][0]) and torch.equal(got[1], found[0][1])
    assert torch.equal(cache.cpu(), written(i))
print("right")
"""


@pytest.mark.gpu
def test_threads_whose_first_calls_compile(tmp_path):
    """A process without a cache: each thread on a stream of its own, all first calls at the same time."""
    env = {**os.environ, "MLA_CUTE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", THREADS_THAT_COMPILE, os.path.dirname(__file__)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["right"]), done.stderr


@pytest.mark.gpu
def test_threads_on_a_gpu():
    """Compiled before: many calls of each thread, on streams of their own, meet in the launch path."""
    inputs = [make_inputs(case, "cuda") for case in CASES]
    expected = [decode(x) for x in inputs]
    torch.cuda.synchronize()

    def work(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [decode(inputs[i], make_plan(inputs[i]) if n % 3 else None) for n in range(100)]
        stream.synchronize()
        return found

    for i, found in enumerate(at_the_same_time(work, len(CASES))):
        assert_reference(expected[i], inputs[i])
        for out, lse in found:
            assert_bitwise(out, expected[i][0], name=f"out of {CASES[i]}")
            assert_bitwise(lse, expected[i][1], name=f"lse of {CASES[i]}")


@pytest.mark.gpu
def test_fork_before_cuda_starts(tmp_path):
    """After `import mla_cute`, and after a call on the CPU: the child uses the GPU, then another, then the parent."""
    code = """
print(fork(lambda: call("cuda"), 200))
call()
print(fork(lambda: call("cuda"), 200))
call("cuda")
print("parent")
"""
    assert run_forking(code, tmp_path) == ["0", "0", "parent"]


# ----- gpu: streams ---------------------------------------------------------------------------------------------------


def late(*sources):
    """Copies that the current stream makes only after some 25 ms: what reads them earlier reads zeros."""
    copies = [torch.zeros_like(t) for t in sources]
    torch.cuda.current_stream().synchronize()
    torch.cuda._sleep(50_000_000)
    for t, source in zip(copies, sources):
        t.copy_(source)
    return copies


@pytest.mark.gpu
def test_plan_runs_on_the_current_stream():
    x = make_inputs(dataclasses.replace(CASES[2], b=74, s_kv=400, topk=300, topk_length=True), "cuda")
    expected = make_plan(x)
    keys = reference.sparse_num_keys(
        74, 300, x.topk_length.cpu(), extra_topk=70, extra_topk_length=x.extra_topk_length.cpu()
    )
    plan = reference.plan(keys, expected.num_parts, fixed_overhead_blocks=expected.fixed_overhead_blocks)
    assert_bitwise(expected.metadata.cpu(), plan[0], name="metadata")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        length, extra_length = late(x.topk_length, x.extra_topk_length)
        options = x.plan_kwargs() | {"topk_length": length, "extra_topk_length": extra_length}
        plan = mla_cute.plan_decode(x.q, x.indices, **options)
        got = decode(x, plan)  # ordered behind its plan
    stream.synchronize()
    assert_bitwise(plan.metadata, expected.metadata, name="metadata")
    assert_bitwise(plan.num_splits, expected.num_splits, name="num_splits")
    assert_reference(got, x)


@pytest.mark.gpu
def test_writer_runs_on_the_current_stream():
    cache = blank_cache("cuda")
    latent, rope, slots = tokens(0, "cuda")
    mla_cute.write_kv_cache(cache, latent, rope, slots)  # compiles
    cache.fill_(0xFF)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mla_cute.write_kv_cache(cache, *late(latent, rope, slots))
    stream.synchronize()
    assert_bitwise(cache.cpu(), written(0), name="kv_cache")


# ----- gpu: graphs ----------------------------------------------------------------------------------------------------

GRAPH_CASES = [
    Case(b=9, h_q=128, s_q=2, s_kv=900, topk=700, topk_length=True, sink=True, strided=False),
    Case(b=9, h_q=64, s_kv=900, topk=300, page_block_size=16, topk_length=True, sink=True, strided=False,
         kv_format="model1", extra_topk=500, extra_topk_length=True),
]  # fmt: skip
graph_cases = pytest.mark.parametrize("case", GRAPH_CASES, ids=str)


class Static:
    """Inputs that stand still in memory, for a graph; `fill` puts the values of others there."""

    def __init__(self, *others):
        first = others[0]
        values = {}
        for field in dataclasses.fields(first):
            t = getattr(first, field.name)
            if field.name.endswith("kv_cache") and t is not None:
                num_blocks = max(getattr(x, field.name).shape[0] for x in others)
                values[field.name] = torch.zeros(num_blocks, *t.shape[1:], dtype=t.dtype, device=t.device)
            elif isinstance(t, torch.Tensor):
                values[field.name] = t.clone()
        self.inputs = dataclasses.replace(first, **values)

    def fill(self, x, *names):
        for name in names or ("q", "indices", "topk_length", "extra_indices", "extra_topk_length", "attn_sink"):
            if getattr(x, name) is not None:
                getattr(self.inputs, name).copy_(getattr(x, name))
        for name in ("kv_cache", "extra_kv_cache"):
            if getattr(x, name) is not None:
                getattr(self.inputs, name)[: getattr(x, name).shape[0]].copy_(getattr(x, name))


def with_lengths_of(x, y):
    """y with x's lengths, and, since what lies behind y's own is wild, with indices that may all be looked at."""
    num_tokens = y.kv_cache.shape[0] * y.kv_cache.shape[1]
    used = y.indices[(y.indices >= 0) & (y.indices < num_tokens)]
    indices = used[torch.arange(y.indices.numel(), device=used.device) % len(used)].view_as(y.indices)
    changes = {"indices": indices, "topk_length": x.topk_length}
    if y.extra_indices is not None:
        num_tokens = y.extra_kv_cache.shape[0] * y.extra_kv_cache.shape[1]
        used = y.extra_indices[(y.extra_indices >= 0) & (y.extra_indices < num_tokens)]
        order = torch.arange(y.extra_indices.numel(), device=used.device) % len(used)
        changes |= {"extra_indices": used[order].view_as(y.extra_indices), "extra_topk_length": x.extra_topk_length}
    return dataclasses.replace(y, **changes)


def without_poison(x):
    """Every token a number: lengths may then be others than those that the poison was laid for."""
    caches = {}
    for name, kv in (("kv_cache", x.kv), ("extra_kv_cache", x.extra_kv)):
        if kv is not None:
            fmt = mla_cute.V32 if kv.shape[-1] == 576 else mla_cute.MODEL1
            caches[name] = mla_cute.quantize_kv_cache(kv.nan_to_num(0.5), kv_format=fmt)
    return dataclasses.replace(x, **caches)


def captured(call):
    """(graph, what the call returned inside of it), after a call outside, which compiles."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def two_inputs(case, device):
    return [without_poison(make_inputs(dataclasses.replace(case, seed=seed), device)) for seed in (0, 1)]


@pytest.mark.gpu
@graph_cases
def test_graph_with_a_plan_from_outside(case):
    """Replays with other queries, keys and indices, the lengths being those of the plan."""
    x, y = two_inputs(case, "cuda")
    y = with_lengths_of(x, y)
    static = Static(x, y)
    static.fill(x)
    plan = make_plan(static.inputs)
    graph, (out, lse) = captured(lambda: decode(static.inputs, plan))
    for z in (y, x, y):
        static.fill(z)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_reference((out, lse), dataclasses.replace(z, softmax_scale=x.softmax_scale))


@pytest.mark.gpu
@graph_cases
def test_graph_that_plans(case):
    """Replays with other lengths, extra ones too: alone, and with everything else."""
    x, y = two_inputs(case, "cuda")
    static = Static(x, y)
    static.fill(x)

    def call():
        plan = make_plan(static.inputs)
        return decode(static.inputs, plan), decode(static.inputs, plan), plan

    graph, (first, second, plan) = captured(call)
    lengths = [n for n in ("topk_length", "extra_topk_length") if getattr(x, n) is not None]
    for names in [(name,) for name in lengths] + [(), tuple(lengths)]:
        z = x if names == tuple(lengths) else y
        static.fill(z, *names)
        for t in (*first, *second):
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        now = static.inputs
        keys = reference.sparse_num_keys(
            case.b,
            case.topk,
            now.topk_length.cpu(),
            extra_topk=case.extra_topk,
            extra_topk_length=None if now.extra_topk_length is None else now.extra_topk_length.cpu(),
        )
        expected = reference.plan(keys, plan.num_parts, fixed_overhead_blocks=plan.fixed_overhead_blocks)
        assert_bitwise(plan.metadata.cpu(), expected[0], name="metadata")
        assert_reference(first, now)
        for ours, expected in zip(second, first):
            assert_bitwise(ours, expected)


@pytest.mark.gpu
def test_graph_that_writes_plans_and_decodes():
    """A whole step: the new tokens are in the keys that the replay attends to."""
    x = without_poison(make_inputs(dataclasses.replace(GRAPH_CASES[0], page_block_size=16), "cuda"))
    static = Static(x)
    static.fill(x)
    latent, rope, slots = tokens(0, "cuda")

    def call():
        mla_cute.write_kv_cache(static.inputs.kv_cache, latent, rope, slots)
        return decode(static.inputs, make_plan(static.inputs))

    graph, got = captured(call)
    for seed in (1, 2):
        for t, new in zip((latent, rope, slots), tokens(seed, "cuda")):
            t.copy_(new)
        expected = static.inputs.kv_cache.cpu()
        mla_cute.write_kv_cache(expected, latent.cpu(), rope.cpu(), slots.cpu())
        graph.replay()
        torch.cuda.synchronize()
        assert_bitwise(static.inputs.kv_cache.cpu(), expected, name="kv_cache")
        assert_reference(got, static.inputs)
