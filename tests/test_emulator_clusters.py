"""The kernel of small batches: what orders its clusters, taken out one instruction at a time, must be missed."""

import inspect
import re
from collections import Counter

import pytest
import torch
from test_emulator_mutations import places, without
from test_emulator_mutations import trouble as of_kernel

import mla_cute.sm90.sparse_decode as sm90
from mla_cute import reference
from mla_cute.emulator.run import load
from mla_cute.testing import Case, make_inputs
from mla_cute.validate import Problem

pytestmark = pytest.mark.emulate
SIZE = 3
# Two blocks a CTA; one; one for two CTAs and none for the third.
LENGTHS, SCHEDULES = (330, 130, 100), (0, 1, 2)


@pytest.fixture(scope="module")
def kernel():
    problem = Problem(h_q=24, has_topk_length=True, has_attn_sink=True)
    return load(sm90, problem, sm90.Config(clustered=True), "sm_90a")


@pytest.fixture(scope="module")
def case():
    x = make_inputs(Case(b=3, h_q=24, topk=340, s_kv=400, sink=True, holes=True, strided=False))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    ours = {"softmax_scale": x.softmax_scale, "topk_length": lengths, "attn_sink": x.attn_sink}
    unread = torch.full((1, 8), -1, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)  # where a plan would be
    return x, lengths, unread, reference.sparse_decode(x.q, x.kv_cache, x.indices, **ours)


def trouble(kernel, case) -> str | None:
    return of_kernel(kernel, case, SCHEDULES, 0, SIZE)


def lines_of(*methods) -> set[int]:
    sources = [inspect.getsourcelines(inspect.unwrap(method)) for method in methods]
    return {first + i for lines, first in sources for i in range(len(lines))}


def of_clusters(kernel) -> dict[int, str]:
    """Lines (from 0) of what only this kernel has, and what it is."""
    text, at = kernel.modules[0].text, 0
    (file,) = re.findall(r'\.file\s+(\d+) ".*sm90/sparse_decode\.py"', text)
    mine, found = lines_of(sm90.SparseDecode.merge_in_cluster, sm90.SparseDecode.leave_piece), {}
    known = places(kernel)
    for i, line in enumerate(text.split("\n")):
        if loc := re.match(rf"\s*\.loc\s+{file} (\d+)", line):
            at = int(loc[1])
        if match := re.match(r"\s*(barrier\.cluster\.\w+(?:\.relaxed)?)", line):
            found[i] = match[1]
        elif i in known and (at in mine or "pieces_full" in known[i] or known[i].startswith("griddepcontrol")):
            found[i] = known[i]
    return found


def test_the_kernel_itself_has_no_findings(kernel, case):
    assert trouble(kernel, case) is None


def test_every_synchronisation_is_missed_when_it_is_gone(kernel, case):
    found = of_clusters(kernel)
    assert len(found) > 10
    unnoticed = Counter(what for i, what in found.items() if trouble(without(kernel, i), case) is None)
    # Nothing is launched ahead here: that has a test on a GPU, test_clusters_wait_for_what_is_ahead_of_them. And of math's two
    # arrivals the second only lets peers end sooner: threads that have ended count as arrived.
    assert unnoticed == {"griddepcontrol.wait": 1, "barrier.cluster.arrive.relaxed": 1}, found
