"""Every synchronising instruction of the Hopper kernel, taken out one at a time: the emulator must notice each."""

import copy
import re
from collections import Counter

import numpy as np
import pytest
import torch

import mla_cute.sm90.sparse_decode as sm90
from mla_cute import reference
from mla_cute.emulator import ptx
from mla_cute.emulator.machine import Options
from mla_cute.emulator.run import Emulated, load, session
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_close, make_inputs
from mla_cute.validate import Problem

pytestmark = pytest.mark.emulate
# Whole requests between others in one part, so that stages are used again behind an epilogue, and split ones.
H_Q, LENGTHS, NUM_PARTS = 64, (300, 20, 130, 64, 200), 3
SYNCHRONISING = re.compile(
    r"fence\.proxy\.async|fence\.mbarrier|bar\.sync|bar\.arrive|mbarrier\.arrive|mbarrier\.try_wait|wgmma\.(wait|fence|commit)"
    r"|bulk\.(wait|commit)_group|griddepcontrol\.wait"
)
# bar.warp.sync is not among them: the lanes of a warp march together here. How many may go unnoticed: of combine's two
# griddepcontrol.wait the one without reads behind it, which only holds back later launches; and the barriers between a
# warpgroup's last WGMMA on a buffer and its stores over it, because by PTX's words a wgmma group is complete, reads for the
# other warps included, for whoever has waited for it. The kernel does not rely on that.
UNNOTICED = Counter({"griddepcontrol.wait;": 1, "bar.sync \t5, 128;": 2, "bar.sync \t6, 128;": 1})


@pytest.fixture(scope="module")
def kernel():
    problem = Problem(h_q=H_Q, has_topk_length=True, has_attn_sink=True)
    return load(sm90, problem, sm90.default_config(problem), "sm_90a")


@pytest.fixture(scope="module")
def case():
    x = make_inputs(Case(b=len(LENGTHS), h_q=H_Q, topk=320, s_kv=400, sink=True, holes=True, strided=False))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    plan = reference.plan(LENGTHS, NUM_PARTS, tile_n=64, fixed_overhead_blocks=1)
    expected = reference.sparse_decode(
        x.q, x.kv_cache, x.indices, softmax_scale=x.softmax_scale, topk_length=lengths, attn_sink=x.attn_sink
    )
    return x, lengths, plan, expected


def trouble(kernel, case, schedules) -> str | None:
    """What is first found or wrong."""
    x, lengths, (metadata, num_splits), (ref_out, ref_lse) = case
    for n in schedules:
        out = torch.full(ref_out.shape, float("nan"), dtype=torch.bfloat16)
        lse = torch.full(ref_lse.shape, float("nan"))
        scratch = torch.full((2 * NUM_PARTS * H_Q * 513,), float("nan"))
        options = (x.attn_sink, float(x.softmax_scale), metadata, num_splits, scratch, out, lse)
        with session(options=Options.schedule(n), strict=False) as s:
            kernel(x.q, x.kv_cache, x.indices, lengths, None, None, None, *options)
        if s.findings:
            return str(s.findings[0])
        try:
            assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
            assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")
        except AssertionError as e:
            return f"wrong numbers: {e}"
    return None


def without(kernel: Emulated, line: int) -> Emulated:
    """The kernel without the instruction in that line (from 0); a wait says at once that it is over."""
    lines = kernel.modules[0].text.split("\n")
    found = re.search(r"try_wait\S*\s+(%?\w+),", lines[line])
    lines[line] = f"setp.eq.b32 {found[1]}, 0, 0;" if found else ""
    mutant = copy.copy(kernel)
    module = ptx.parse("\n".join(lines))
    mutant.modules, mutant.programs = [module], {}
    mutant.kernels = dict.fromkeys(module.kernels, module)
    return mutant


def test_the_kernel_itself_has_no_findings(kernel, case):
    metadata, num_splits = case[2]
    splits = np.diff(num_splits.numpy())
    assert splits.max() > 1  # combine has work
    assert splits.min() == 1  # and so has the unsplit epilogue
    assert trouble(kernel, case, range(8)) is None


def test_every_synchronisation_is_missed_when_it_is_gone(kernel, case):
    lines = kernel.modules[0].text.split("\n")
    places = [i for i, text in enumerate(lines) if SYNCHRONISING.search(text) and not text.lstrip().startswith("//")]
    assert len(places) > 40
    unnoticed = [i for i in places if trouble(without(kernel, i), case, range(2)) is None]
    assert Counter(lines[i].strip() for i in unnoticed) <= UNNOTICED, "\n".join(f"{i + 1}: {lines[i]}" for i in unnoticed)
