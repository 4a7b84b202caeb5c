"""FlashMLA's whole grid of sparse-decode tests: 3,680 correctness and 1,036 corner cases. Slow: runs with -m grid only.

The grid is that of its tests/test_flash_mla_sparse_decoding.py; what it says of the data is `mla_cute.testing`'s, which adds
poison. tests/test_sparse_decode.py has a thinned selection, and what the grid leaves out.
"""

import dataclasses
import itertools
from collections import Counter
from types import ModuleType

import pytest
import torch
from decode_checks import CORNER_SIZES, SIZES, compile_kernels, decode_and_check

from mla_cute import reference
from mla_cute.testing import Case, make_inputs

FEATURES = [("v32", False, False, False)] + [  # kv_format, extra keys, extra_topk_length, topk_length
    ("model1", extra, extra_length, length)
    for extra in (False, True)
    for extra_length in ((False, True) if extra else (False,))
    for length in (False, True)
]


def product(sizes, s_qs):
    """Everything that both groups share, as fields of Case."""
    for kv_format, extra, extra_length, length in FEATURES:
        batches = [(4, True), (74, True), (321, True)] + [(74, False)] * (not length and not extra_length)
        for size, extra_size, h_q, (b, varlen), s_q in itertools.product(
            sizes, sizes if extra else [None], (64, 128), batches, s_qs
        ):
            fields = dict(zip(("s_kv", "topk", "page_block_size"), size))
            if extra:
                fields |= dict(zip(("extra_s_kv", "extra_topk", "extra_page_block_size"), extra_size))
            flags = {"varlen": varlen, "topk_length": length, "extra_topk_length": extra_length}
            yield fields | flags | {"b": b, "h_q": h_q, "s_q": s_q, "kv_format": kv_format}


CORRECTNESS = [Case(**fields, sink=True) for fields in product(SIZES, (1, 3))]
CORNERS = [
    Case(**fields, all_invalid=all_invalid, zero_length=zero_length, sink=sink)
    for fields in product(CORNER_SIZES, (3,))
    for all_invalid, zero_length, sink in itertools.product((True, False), repeat=3)
    if all_invalid or zero_length or sink
]
CASES = [dataclasses.replace(case, seed=seed) for seed, case in enumerate(CORRECTNESS + CORNERS)]


def test_the_grid_is_flashmlas():
    assert (len(CORRECTNESS), len(CORNERS)) == (3680, 1036)
    assert len({str(case) for case in CORRECTNESS}) == 3680 and len({str(case) for case in CORNERS}) == 1036
    counts = Counter(
        (c.kv_format, c.extra_topk > 0, c.extra_topk_length, c.topk_length) for c in CORRECTNESS if not c.all_invalid
    )
    # 8 sizes (64 pairs) x 2 head counts x 2 s_q x batches: 4 without lengths, 3 with
    assert [counts[feature] for feature in FEATURES] == [128, 128, 96, 1024, 768, 768, 768]
    assert len({(c.problem, c.sink) for c in CASES}) == 28  # kernels


@pytest.fixture(scope="module")
def compiled(impl):
    compile_kernels(CASES, impl)


@pytest.fixture(scope="module", autouse=True)
def larger_chunks():
    """The reference's: on a GPU with room, a quarter of the launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK_BYTES", 1 << 30)
        yield


@pytest.mark.grid
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_grid(case, impl):
    decode_and_check(make_inputs(case, "cuda"), impl)


# ---- the check itself, on the CPU with small shapes


def small(case):
    """The case with everything that it is but its size."""
    sizes = {name: min(getattr(case, name), most) for name, most in (("b", 9), ("h_q", 4), ("s_kv", 90), ("topk", 70))}
    if case.extra_topk:
        sizes |= {"extra_topk": min(case.extra_topk, 66), "extra_s_kv": 80}
    return dataclasses.replace(case, **sizes)


def faulty(fault):
    """The reference as an implementation, with `fault(what out and lse held before, out, lse)` done to what it writes."""

    def compile(problem, config, arch=None):
        run = reference.compile(problem, config, arch)

        def launch(*args):
            out, lse = args[12:14]
            before = out.clone(), lse.clone()
            run(*args)
            fault(before, out, lse)

        return launch

    module = ModuleType(fault.__name__)
    module.Config, module.default_config, module.compile = reference.Config, reference.default_config, compile
    return module


def unwritten(before, out, lse):
    out[-1], lse[-1] = before[0][-1], before[1][-1]


def one_head_off(before, out, lse):
    out[-1, -1, -1] = out[-1, -1, -1] * 1.05 + 0.002


def lse_of_the_neighbour(before, out, lse):
    lse[0, 0, 0] = torch.where(lse[0, 0, 0].isinf(), 0.0, lse[0, 0, 0] + 1e-3)


SOME = [CASES[i] for i in (0, 61, 130, 301, 500, 1500, 2300, 3100, 3679, 3680, 3700, 3764, 4000, 4300, 4715)]


@pytest.mark.parametrize("case", [small(case) for case in SOME], ids=str)
def test_the_check_can_fail(case):
    decode_and_check(make_inputs(case))
    for fault in (unwritten, one_head_off, lse_of_the_neighbour):
        with pytest.raises(AssertionError, match="^(out|lse): "):
            decode_and_check(make_inputs(case), faulty(fault))
