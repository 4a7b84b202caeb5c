"""What tests of sparse decode share: FlashMLA's sizes, a call beside the reference, split requests, kernels compiled ahead."""

import math

import torch

import mla_cute
from mla_cute import jit, reference, schedule
from mla_cute.schedule import scratch_size
from mla_cute.target import target
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_close, make_inputs

# Of FlashMLA's own tests; with extra keys each of them for either cache.
SIZES = [  # (s_kv, topk, page_block_size)
    (512, 64, 2),
    (512, 64, 64),
    (512, 64, 69),
    (1024, 576, 2),
    (1024, 576, 61),
    (2046, 2048, 2),
    (2046, 2048, 64),
    (2046, 2048, 576),
]
CORNER_SIZES = [(512, 64, 61), (650, 576, 53)]


def decode_and_check(x, impl=None, out=None, lse=None, **kwargs):
    """One call, compared with the reference, which is computed behind it: reused memory must not hold the answer.

    For the same reason out and lse, where not given, and scratch begin as NaN: a case before this one may have left what is
    right here too (zeros, +inf).
    """
    shape = (*x.q.shape[:3], 512)
    out = torch.full(shape, math.nan, dtype=torch.bfloat16, device=x.q.device) if out is None else out
    lse = torch.full(shape[:3], math.nan, device=x.q.device) if lse is None else lse
    if x.q.is_cuda:
        poison_free_memory(scratch_bytes(x.q))
    got = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl, out=out, lse=lse, **kwargs)
    if x.q.is_cuda:
        torch.cuda.synchronize()
    ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    assert_close(got[0], ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(got[1], ref_lse, **SPARSE_DECODE_LSE, name="lse")
    return got


def scratch_bytes(q):
    """Of a call with the shipped kernel's default config; 0 where the plan has one part."""
    _, s_q, h_q, _ = q.shape
    parts = torch.cuda.get_device_properties(q.device).multi_processor_count // (s_q * -(-h_q // 64))
    return scratch_size(parts, s_q, h_q) * 4


def poison_free_memory(num_bytes):
    """The next allocation of this size finds NaN: torch's allocator hands out the block that was freed last."""
    torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cuda")


def compile_kernels(cases, impl=None):
    """Every kernel that the cases need on the current GPU, in parallel processes: one after the other they take minutes."""
    from mla_cute import schedule_kernel  # loads the DSL

    module = mla_cute.select_impl("cuda", impl)
    arch = jit.arch_of("cuda")
    where, jobs = target(torch.device("cuda")), {}
    for case in cases:
        how = case.problem, case.b, case.s_q, case.topk, case.extra_topk
        config, _ = schedule.settle(module.default_config(case.problem), *how, where)
        jobs[jit.Job(module, case.problem, config, arch)] = True
    plans = {
        schedule_kernel.PlanProblem(
            case.topk_length,
            schedule_kernel.needs_workspace(case.b, 1),
            has_extra_topk_length=case.extra_topk_length,
        )
        for case in cases
    }
    jit.compile_ahead([*jobs, *(jit.Job(schedule_kernel, plan, None, arch) for plan in plans)], progress=False)


def pieces(h_q, kv_format, sink=True):
    """Whole requests, one in two pieces and one in three, two of which the same part begins and ends in; some are empty."""
    lengths = (40, 64, 100, 384, 10)
    plan = reference.plan(lengths, 4, fixed_overhead_blocks=0)
    assert plan[1].diff().tolist() == [1, 1, 2, 3, 1]
    x = make_inputs(
        Case(b=5, h_q=h_q, s_q=2, s_kv=400, topk=384, kv_format=kv_format, sink=sink, strided=False, holes=True)
    )
    token = x.indices.max()  # one that is listed: the others hold NaN
    x.indices[2, 0, :64] = -1  # the first piece
    x.indices[3, 0, 320:] = -1  # the last one
    x.indices[2:4, 1] = -1  # all of them
    x.indices[2, :, 70] = token  # but the second
    x.indices[1, 1] = -1
    topk_length = torch.tensor(lengths, dtype=torch.int32)
    ours = {"softmax_scale": x.softmax_scale, "topk_length": topk_length, "attn_sink": x.attn_sink}
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **ours)
    assert (expected[1][3, 1] == math.inf).all() and expected[1][2].isfinite().all()
    return x, topk_length, plan, expected
