"""Every synchronising instruction of the Hopper kernel, taken out one at a time: the emulator must notice each."""

import copy
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_combine import SENTINEL, check, make_partials

import mla_cute.sm90.sparse_decode as sm90
from mla_cute import combine, reference
from mla_cute.emulator import ptx
from mla_cute.emulator.machine import Options
from mla_cute.emulator.run import Emulated, load, session
from mla_cute.schedule import scratch_size
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_close, make_inputs
from mla_cute.validate import Problem

pytestmark = pytest.mark.emulate
SHARES = 4
# Whole requests between others in one part, so that slots are used again behind an epilogue; requests of one block behind one
# another, so that two blocks in a row raise their maxima; one in two pieces, which the main kernel merges, and one in three.
H_Q, LENGTHS, NUM_PARTS = 64, (64, 20, 40, 180, 630, 100), 4
SCRATCH = scratch_size(NUM_PARTS, 1, H_Q)
SYNCHRONISING = re.compile(
    r"fence\.proxy\.async|fence\.mbarrier|bar\.sync|bar\.arrive|barrier\.cta|mbarrier\.arrive|mbarrier\.try_wait"
    r"|wgmma\.(wait_group|fence|commit_group)|bulk\.(wait|commit)_group|griddepcontrol\.wait|ld\.acquire|atom\.acq_rel"
)
# bar.warp.sync is not among them: the lanes of a warp march together here. What goes unnoticed, and nothing else does:
# * griddepcontrol.wait: of combine's two the one without reads behind it, which only holds back later launches.
# * bar.sync: three in combine, whose last test makes happen what they order; and two, once in each copy of store_o's code, in
#   front of the stores over V: to the emulator a product is complete for the whole warpgroup when it is for one warp. It
#   computes a warp's part late all the same, so that tests/test_emulator_kernels.py (two pieces and three) has wrong numbers.
# * raw_empty, once: in the copies of the first records, whose code stands in front of math's loop. Their slots are empty.
# * bulk.commit_group and bulk.wait_group, once each: behind O of a part's last request, the place of which nothing takes any
#   more. That a CTA ends while copies still read its shared memory is not looked at.
# * wgmma: between QK's nine tiles. In PTX every tile has registers of its own for A, so that nothing touches those of one in
#   flight; the waits are what lets ptxas use them again. A fence in front of A's new values PTX does want; the emulator does
#   not look at it, because compilers move such values behind the fence (ops_wgmma.py). tests/test_sparse_decode.py counts them.
UNNOTICED = Counter(
    {
        "griddepcontrol.wait": 1,
        "mbarrier.try_wait raw_empty": 1,
        "bulk.commit_group": 1,
        "bulk.wait_group": 1,
        "bar.sync": 5,
        "wgmma.fence": 8,
        "wgmma.commit_group": 8,
        "wgmma.wait_group 1": 7,
    }
)


@pytest.fixture(scope="module")
def kernel():
    problem = Problem(h_q=H_Q, has_topk_length=True, has_attn_sink=True)
    return load(sm90, problem, sm90.default_config(problem), "sm_90a")


@pytest.fixture(scope="module")
def case():
    x = make_inputs(Case(b=len(LENGTHS), h_q=H_Q, topk=640, s_kv=400, sink=True, holes=True, strided=False))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    plan = reference.plan(LENGTHS, NUM_PARTS, tile_n=64, fixed_overhead_blocks=0)
    expected = reference.sparse_decode(
        x.q, x.kv_cache, x.indices, softmax_scale=x.softmax_scale, topk_length=lengths, attn_sink=x.attn_sink
    )
    return x, lengths, plan, expected


def trouble(kernel, case, schedules, scratch_values=SCRATCH, max_splits=NUM_PARTS) -> str | None:
    """What is first found or wrong."""
    x, lengths, (metadata, num_splits), (ref_out, ref_lse) = case
    for n in schedules:
        out = torch.full(ref_out.shape, float("nan"), dtype=torch.bfloat16)
        lse = torch.full(ref_lse.shape, float("nan"))
        scratch = torch.full((scratch_values,), float("nan"))
        options = (x.attn_sink, float(x.softmax_scale), metadata, num_splits, scratch, out, lse, max_splits, 1 + n)
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


def places(kernel: Emulated) -> dict[int, str]:
    """Lines (from 0) of the synchronising instructions, and what each is: of an mbarrier's with the barrier's name."""
    lines, source, at = kernel.modules[0].text.split("\n"), Path(sm90.__file__).read_text().split("\n"), 0
    (file,) = re.findall(r'\.file\s+(\d+) ".*sm90/sparse_decode\.py"', kernel.modules[0].text)
    found = {}
    for i, text in enumerate(lines):
        if loc := re.match(rf"\s*\.loc\s+{file} (\d+)", text):
            at = int(loc[1])
        match = SYNCHRONISING.search(text)
        if match and not text.lstrip().startswith("//"):
            name = re.match(r"griddepcontrol\.wait|\w+\.\w+", text[match.start() :])[0]
            if name == "wgmma.wait_group":
                name += " " + text.strip()[-2]
            barrier = re.search(r"shared\.(\w+)", source[at - 1]) if name.startswith("mbarrier") else None
            found[i] = f"{name} {barrier[1]}" if barrier else name
    return found


def without(kernel: Emulated, *numbers: int) -> Emulated:
    """The kernel without the instructions in those lines (from 0).

    A wait says at once that it is over, a barrier that counts votes tells each thread its own, and accesses of a flag in global
    memory become relaxed ones.
    """
    lines = kernel.modules[0].text.split("\n")
    for i in numbers:
        waited = re.sub(r"mbarrier\.try_wait\S*\s+(%?\w+),[^;]*;", r"setp.eq.b32 \1, 0, 0;", lines[i])
        voted = re.sub(r"barrier\.cta\.red\S*\s+(\w+), %?\w+, \d+, (\w+);", r"or.pred \1, \2, \2;", lines[i])
        relaxed = re.sub(r"\b(ld\.acquire|atom\.acq_rel)\b", lambda m: m[0].split(".")[0] + ".relaxed", lines[i])
        lines[i] = next((text for text in (waited, voted, relaxed) if text != lines[i]), "")
    return with_text(kernel, "\n".join(lines))


def with_text(kernel: Emulated, text: str) -> Emulated:
    mutant = copy.copy(kernel)
    module = ptx.parse(text)
    mutant.modules, mutant.programs = [module], {}
    mutant.kernels = dict.fromkeys(module.kernels, module)
    return mutant


def test_the_kernel_itself_has_no_findings(kernel, case):
    metadata, num_splits = case[2]
    splits = np.diff(num_splits.numpy())
    assert splits.tolist() == [1, 1, 1, 2, 3, 1]  # every epilogue has work, and combine
    assert trouble(kernel, case, range(8)) is None


@pytest.mark.parametrize("share", range(SHARES))  # for test runs on several cores
def test_every_synchronisation_is_missed_when_it_is_gone(kernel, case, share):
    found = places(kernel)
    assert len(found) > 60
    kinds = sorted(set(found.values()))[share::SHARES]
    # In schedule 2 the pair's first part ends last. Schedule 1 does products as late as may be, which is enough for theirs.
    schedules = {what: (1,) if what.startswith("wgmma") else (0, 1, 2) for what in kinds}
    missing = {i: schedules[what] for i, what in found.items() if what in kinds}
    unnoticed = [i for i, numbers in missing.items() if trouble(without(kernel, i), case, numbers) is None]
    lines = kernel.modules[0].text.split("\n")
    expected = Counter({kind: n for kind, n in UNNOTICED.items() if kind in kinds})
    assert Counter(found[i] for i in unnoticed) == expected, "\n".join(f"{i + 1}: {lines[i]}" for i in unnoticed)


def test_what_goes_unnoticed_is_there(kernel):
    assert set(UNNOTICED) <= set(places(kernel).values())


def test_two_pieces_that_look_at_the_same_time(kernel, case):
    """Neither finds the other's flag: the exchange says who merges."""
    text = kernel.modules[0].text
    blind, count = re.subn(r"ld\.acquire\.gpu\.global\.b64 (%\w+), [^;]*;", r"mov.b64 \1, 0;", text)
    assert count == 1
    kernel = with_text(kernel, blind)
    assert trouble(kernel, case, range(4)) is None
    votes = [i for i, what in places(kernel).items() if what == "barrier.cta"]
    exchanges = [i for i, what in places(kernel).items() if what.startswith("atom")]
    assert len(exchanges) == 2  # of a part's last request and of an earlier one
    vote = min(i for i in votes if i > max(exchanges))
    for i in (*exchanges, vote):
        assert trouble(without(kernel, i), case, range(4)) is not None


def test_combine_of_many_pieces_and_parts():
    """Several warps to a unit's pieces, and more parts than threads."""
    problem = Problem(h_q=5)
    kernel = load(combine, problem, None, "sm_90a")
    t = make_partials([260, 40], 320, h_q=5, sink=False)

    def is_right(kernel):
        out, lse = torch.full_like(t.out, SENTINEL), torch.full_like(t.lse, SENTINEL)
        with session(options=Options.schedule(2), strict=False) as s:
            kernel(t.metadata, t.num_splits, t.scratch, None, out, lse, int(t.num_splits.diff().max()))
        try:
            check(out, lse, t)
        except AssertionError:
            return False
        return not s.findings

    assert is_right(kernel)
    barriers = [i for i, text in enumerate(kernel.modules[0].text.split("\n")) if re.match(r"\s*bar\.sync", text)]
    assert len(barriers) == 5
    # The first one is for the next round of parts, the fourth for the CTA's next unit: here others stand between them.
    assert [is_right(without(kernel, i)) for i in barriers] == [True, False, False, True, False]
