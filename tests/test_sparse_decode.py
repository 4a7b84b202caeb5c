"""The kernels behind mla_cute.sparse_decode: what the compiler makes of them (compile) and what they compute (gpu)."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from decode_checks import CORNER_SIZES, SIZES, compile_kernels, decode_and_check, poison_free_memory

import mla_cute
from mla_cute import jit, reference, target
from mla_cute.kv_cache import V32
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs
from mla_cute.validate import Problem

# ---- cpu tier: the arithmetic of Config ----


@pytest.fixture
def sm90():
    return jit.arch_module("sparse_decode", "sm_90a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tile_n": 32}, "tile_n must be 64, got 32"),
        ({"fixed_overhead_blocks": 0}, "fixed_overhead_blocks must be at least 1, got 0"),
        ({"registers": (168, 184)}, r"at most 504, got \(168, 184\)"),
        ({"registers": (160, 192)}, r"at most 504, got \(160, 192\)"),
        ({"registers": (150, 184)}, "multiples of 8"),
        ({"registers": (16, 240)}, "in 24..240"),
        ({"tile_n": 64.0}, "tile_n: must be an int, got 64.0"),
        ({"fixed_overhead_blocks": True}, "fixed_overhead_blocks: must be an int, got True"),
        ({"fixed_overhead_blocks": "2"}, "fixed_overhead_blocks: must be an int, got '2'"),
        ({"fixed_overhead_blocks": 1.5}, "fixed_overhead_blocks: must be an int, got 1.5"),
        ({"registers": [160, 184]}, "registers must be a tuple of 2 ints"),
        ({"registers": (160, 160, 184)}, "registers must be a tuple of 2 ints"),
        ({"registers": (160, 184.0)}, "registers must be a tuple of 2 ints"),
    ],
    ids=str,
)
def test_config_refuses(sm90, change, words):
    problem = Problem(h_q=128)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(sm90.default_config(problem), **change).check(problem)


def test_config_refuses_what_shared_memory_does_not_hold(sm90, monkeypatch):
    problem = Problem(h_q=128)
    config = sm90.default_config(problem)
    monkeypatch.setattr(sm90, "SMEM_LIMIT", config.smem_bytes(V32) - 1)
    with pytest.raises(ValueError, match=f"needs {config.smem_bytes(V32)} bytes, the limit is {sm90.SMEM_LIMIT}"):
        config.check(problem)
    monkeypatch.setattr(sm90, "SMEM_LIMIT", config.smem_bytes(V32))
    config.check(problem)


def test_config_refuses_another_format(sm90):
    problem = dataclasses.replace(Problem(h_q=128), kv_format="model2")
    with pytest.raises(NotImplementedError, match="cache of v32 or model1, got sparse_decode on model2"):
        sm90.default_config(problem).check(problem)


@pytest.mark.parametrize(
    ("h_q", "s_q", "parts"), [(128, 1, 66), (128, 2, 33), (64, 1, 132), (1, 1, 132), (96, 1, 66), (128, 200, 1)]
)
def test_parts_fill_the_chip_once(sm90, h_q, s_q, parts):
    problem = Problem(h_q=h_q)
    assert sm90.default_config(problem).num_parts(problem, s_q, 132) == parts


# ---- compile tier ----


MODEL1 = {"kv_format": "model1", "d_qk": 512}
EXTRA = {"has_topk_length": True, "has_attn_sink": True, "has_extra": True, "has_extra_topk_length": True}


@pytest.mark.compile
@pytest.mark.parametrize(
    "fields",
    [
        {"h_q": 128},
        {"h_q": 128, "has_topk_length": True, "has_attn_sink": True},
        {"h_q": 64, "has_attn_sink": True},
        {"h_q": 1, "has_topk_length": True, "has_attn_sink": True},
        {"h_q": 128, **EXTRA},
        {"h_q": 96, "has_extra": True},
        {"h_q": 128, **MODEL1},
        {"h_q": 64, **MODEL1, **EXTRA},
        {"h_q": 128, "clustered": True},
        {"h_q": 16, "has_topk_length": True, "has_attn_sink": True, "clustered": True},
        {"h_q": 128, **MODEL1, **EXTRA, "clustered": True},
    ],
    ids=lambda fields: "-".join(f"{k}{v}" for k, v in fields.items()),
)
def test_sm90_compiles_without_spills(sm90, fields):
    clustered = fields.get("clustered", False)
    problem = Problem(**{name: value for name, value in fields.items() if name != "clustered"})
    config = dataclasses.replace(sm90.default_config(problem), clustered=clustered)
    seen = jit.inspect(sm90, problem, config, "sm_90a")
    main = [usage for name, usage in seen.resources.items() if name.startswith("mla_sparse_decode_sm90")]
    assert len(main) == 1 and len(seen.resources) == (1 if clustered else 2)  # and the combine
    for name, usage in seen.resources.items():
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0), (name, usage)
    assert main[0]["REG"] == 168  # at entry: 65,536 over 384 threads
    assert seen.spill_bytes == 0
    assert seen.advisories == ()  # no setmaxnreg ignored, no WGMMA serialised, no wait injected
    (ptx,) = seen.ptx
    for count in config.registers:
        assert f"sync.aligned.u32 {count};" in " ".join(ptx.replace("\t", " ").split()), count
    # QK: steps of 16 dims, K from registers; V32's rope in bf16. PV: 4 steps of 16 keys, by code that both warpgroups run.
    rope = problem.d_qk - 512
    assert Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) \{[^}]*\}, (.)", ptx)) == Counter(
        {
            ("m64n64k16.f32.f16.f16", "{"): 512 // 16,
            ("m64n64k16.f32.bf16.bf16", "{"): rope // 16,
            ("m64n256k16.f32.f16.f16", "%"): 64 // 16,
        }
    )
    # The emulator does not miss fences, commits and waits between tiles (tests/test_emulator_mutations.py): A's registers have
    # a name of their own in each tile. Their places are what makes ptxas use two sets of registers.
    steps = re.findall(r"wgmma\.(fence|mma_async|commit_group|wait_group)\S*(?:[ \t]*(\d);)?", ptx)
    tiles = [f"{'wait1 ' if i >= 2 else ''}fence mma mma mma mma commit" for i in range(problem.d_qk // 64)]
    names = {"mma_async": "mma", "commit_group": "commit", "wait_group": "wait"}
    assert " ".join(names.get(name, name) + count for name, count in steps) == " ".join(
        ["fence mma mma mma mma commit wait0", *tiles, "wait0"]
    )
    assert "ld.local" not in ptx and "st.local" not in ptx


# ---- gpu tier ----


# What FlashMLA's own tests leave out, and the test here that has it, in both formats where both can:
#
# | gap                                 | test                                                                            |
# |-------------------------------------|---------------------------------------------------------------------------------|
# | -1 inside of the list               | test_against_reference: cases with `holes`                                      |
# | duplicates                          | test_against_reference: `duplicates`                                            |
# | scales that are no powers of two    | test_against_reference: `amax`, `random`; MODEL1's e8m0 has none, only `random` |
# | misaligned rows of indices          | test_against_reference: `odd_rows`                                              |
# | a plan used again, equal lengths    | test_a_plan_serves_other_inputs, test_a_plan_serves_equal_lengths               |
# | another stream, another device      | test_runs_on_the_current_stream, test_runs_on_the_tensors_device                |
# | more than 2^31 elements             | tests/test_large.py; of the writer test_cache_writer.py                         |
# | NaN behind topk_length              | test_against_reference: every `topk_length` case, test_extra_keys_alone         |
# | determinism                         | test_twenty_runs_give_the_same_bits                                             |
# | b = 1, split as often as can be     | test_one_request_in_every_part                                                  |
# | extra keys with topk_length = 0     | test_extra_keys_alone                                                           |
# | NaN between pages                   | every case of make_inputs but `strided=False`                                   |
# | query tokens with 1 <= keys < s_q   | dense decode's causal mask: there is no such op here                            |


GRID = [
    Case(b=b, h_q=h_q, s_q=s_q, s_kv=s_kv, topk=topk, page_block_size=page, varlen=varlen, sink=True)
    for (s_kv, topk, page), b, s_q, h_q, varlen in itertools.product(
        SIZES, (4, 74, 321), (1, 3), (64, 128), (True, False)
    )
    if varlen or b == 74
]
CORNERS = [
    Case(b=b, h_q=h_q, s_q=3, s_kv=s_kv, topk=topk, page_block_size=page, varlen=True, all_invalid=all_invalid,
         zero_length=zero_length, sink=sink)
    for (s_kv, topk, page), b, h_q, all_invalid, zero_length, sink in itertools.product(
        CORNER_SIZES, (4, 74, 321), (64, 128), (True, False), (True, False), (True, False)
    )
    if all_invalid or zero_length or sink
]  # fmt: skip
BEYOND = [  # what FlashMLA refuses or does not test
    *(
        Case(b=5, h_q=h_q, s_q=2, s_kv=700, topk=133, varlen=True, sink=True)
        for h_q in (1, 2, 8, 16, 32, 63, 65, 96, 127)
    ),
    *(Case(b=9, h_q=128, s_kv=3000, topk=topk, varlen=True, sink=True) for topk in (1, 2, 63, 65, 133, 2176)),
    Case(b=9, h_q=128, s_q=3, s_kv=900, topk=700, holes=True, sink=True),
    Case(b=9, h_q=64, s_q=3, s_kv=900, topk=700, duplicates=True, holes=True),
    *(Case(b=7, h_q=128, s_q=2, s_kv=1200, topk=640, scales=scales, holes=True) for scales in ("amax", "random")),
    *(
        Case(b=b, h_q=h_q, s_q=s_q, s_kv=2000, topk=topk, topk_length=True, sink=True, page_block_size=page)
        for b, h_q, s_q, topk, page in (
            (1, 128, 1, 2048, 64),
            (6, 128, 1, 577, 61),
            (74, 64, 3, 300, 1),
            (300, 16, 2, 65, 7),
        )
    ),
    Case(b=6, h_q=128, s_q=2, s_kv=800, topk=321, odd_rows=True, topk_length=True),
    Case(b=6, h_q=128, s_q=2, s_kv=800, topk=320, strided=False),
    Case(b=1, h_q=128, s_kv=40000, topk=20000, page_block_size=64, sink=True),
    Case(b=2, h_q=64, s_q=70, s_kv=300, topk=128, sink=True),
    Case(b=4096, h_q=16, s_kv=64, topk=64, topk_length=True),
    Case(b=9, h_q=128, s_q=2, s_kv=900, topk=321, outside=True, holes=True, sink=True),
    # As many query tokens as leave 4, 2 and 2 parts, and splits.
    *(Case(b=b, h_q=64, s_q=s_q, s_kv=900, topk=700, sink=True) for b, s_q in ((2, 33), (3, 64), (3, 66))),
]
# MODEL1, and extra keys in both formats: FlashMLA's feature product, thinned; then what it does not test.
FEATURES = [
    dict(kv_format=kv_format, topk_length=length, **extra)
    for kv_format in ("v32", "model1")
    for extra in ({}, {"extra_topk": 64}, {"extra_topk": 576, "extra_topk_length": True})
    for length in (False, True)
    if kv_format == "model1" or extra
]
FORMATS = [
    Case(b=b, h_q=h_q, s_q=s_q, s_kv=s_kv, topk=topk, page_block_size=page, varlen=True, sink=True, **features)
    for i, features in enumerate(FEATURES)
    for (s_kv, topk, page), b, s_q, h_q in [
        (SIZES[i % 8], 4, 1, 128),
        (SIZES[(i + 3) % 8], 74, 3, 64),
        (SIZES[(i + 5) % 8], 321, 1, 64),
    ]
] + [
    Case(b=b, h_q=h_q, s_q=3, s_kv=650, topk=576, page_block_size=53, varlen=True, sink=True, all_invalid=all_invalid,
         zero_length=not all_invalid, **features)
    for features in FEATURES[::3]
    for b, h_q, all_invalid in ((4, 128, True), (74, 64, False))
] + [
    *(Case(b=5, h_q=h_q, s_q=2, s_kv=700, topk=133, kv_format="model1", extra_topk=65, sink=True) for h_q in (1, 16, 96)),
    *(Case(b=5, h_q=64, s_kv=300, topk=topk, kv_format=f, extra_topk=extra, extra_page_block_size=page, holes=True)
      for f, topk, extra, page in (("model1", 1, 1, 1), ("v32", 65, 63, 7), ("model1", 127, 2049, 2))),
    Case(b=6, h_q=128, s_q=2, s_kv=800, topk=321, odd_rows=True, topk_length=True, kv_format="model1", extra_topk=77,
         extra_topk_length=True),
    Case(b=9, h_q=64, s_kv=500, topk=200, kv_format="model1", extra_topk=200, outside=True, duplicates=True, sink=True,
         scales="random"),
    Case(b=128, h_q=128, s_q=2, s_kv=4000, topk=128, page_block_size=256, kv_format="model1", extra_topk=1024,
         extra_page_block_size=64, sink=True),
    *(
        Case(b=9, h_q=128, s_q=3, s_kv=900, topk=700, sink=True, extra_topk=333, extra_page_block_size=7, kv_format=f, **flags)
        for f in ("v32", "model1")
        for flags in (
            {"holes": True, "duplicates": True},
            {"odd_rows": True, "holes": True, "topk_length": True, "extra_topk_length": True},
            {"scales": "random", "holes": True},
        )
    ),
    *(Case(b=9, h_q=64, s_q=3, s_kv=900, topk=700, sink=True, kv_format="model1", **flags)
      for flags in ({"holes": True}, {"duplicates": True, "odd_rows": True}, {"scales": "random", "topk_length": True})),
    Case(b=3, h_q=64, s_q=64, s_kv=900, topk=300, extra_topk=400, kv_format="model1", sink=True),
]  # fmt: skip


CASES = GRID + CORNERS + BEYOND + FORMATS


@pytest.fixture(scope="module")
def compiled(impl):
    compile_kernels(CASES, impl)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case, impl):
    decode_and_check(make_inputs(case, "cuda"), impl)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [GRID[5], BEYOND[0], BEYOND[10]], ids=str)
def test_against_unquantised_keys(case, impl):
    """The loose oracle: the keys before quantisation. An error shared with our dequantisation would not hide here."""
    x = make_inputs(case, "cuda")
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
    ref_out, ref_lse = reference.sparse_decode(x.q, x.kv, x.indices, **x.kwargs())
    finite = torch.isfinite(ref_lse)
    assert_bitwise(torch.isfinite(lse), finite, name="isfinite(lse)")
    assert (lse - ref_lse)[finite].abs().max() < 0.02
    assert (out.float() - ref_out.float()).norm() <= 0.06 * ref_out.float().norm()  # e4m3: 3 mantissa bits


# Some requests split, some whole.
REPEAT = Case(b=74, h_q=128, s_q=2, s_kv=3000, topk=2048, varlen=True, sink=True, topk_length=True)


# The same of MODEL1, with extra keys and lengths of both.
REPEAT_EXTRA = dataclasses.replace(REPEAT, kv_format="model1", topk=512, extra_topk=1024, extra_topk_length=True)
BOTH = pytest.mark.parametrize("case", [REPEAT, REPEAT_EXTRA], ids=str)


@pytest.mark.gpu
@BOTH
def test_twenty_runs_give_the_same_bits(case, impl):
    x = make_inputs(case, "cuda")
    plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), impl=impl)
    splits = plan.num_splits.diff()
    assert (splits == 1).any() and (splits > 1).any()
    first = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
    for _ in range(20):
        again = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
        assert_bitwise(again[0], first[0], name="out")
        assert_bitwise(again[1], first[1], name="lse")


@pytest.mark.gpu
def test_permuted_requests_give_permuted_results(impl):
    """Bitwise where no request is split in either order: then nothing of a request depends on its neighbours."""
    x = make_inputs(Case(b=64, h_q=128, s_q=2, s_kv=3000, topk=1024, sink=True, strided=False), "cuda")
    order = torch.randperm(64, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
    p_out, p_lse = mla_cute.sparse_decode(x.q[order], x.kv_cache, x.indices[order], **x.kwargs(), impl=impl)
    plan = mla_cute.plan_decode(x.q, x.indices)
    assert torch.equal(plan.num_splits.diff(), torch.ones(64, dtype=torch.int32, device="cuda"))
    assert_bitwise(p_out, out[order], name="out")
    assert_bitwise(p_lse, lse[order], name="lse")


@pytest.mark.gpu
def test_permuted_requests_with_splits(impl):
    x = make_inputs(dataclasses.replace(REPEAT, strided=False), "cuda")
    order = torch.randperm(74, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    kwargs = x.kwargs() | {"topk_length": x.topk_length[order]}
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
    p_out, p_lse = mla_cute.sparse_decode(x.q[order], x.kv_cache, x.indices[order], **kwargs, impl=impl)
    assert_close(p_out, out[order], **SPARSE_DECODE_OUT, name="out")
    assert_close(p_lse, lse[order], **SPARSE_DECODE_LSE, name="lse")


@pytest.mark.gpu
def test_a_plan_serves_other_inputs(impl):
    x, y = (make_inputs(dataclasses.replace(REPEAT, topk_length=False, seed=seed), "cuda") for seed in (0, 1))
    plan = mla_cute.plan_decode(x.q, x.indices, impl=impl)
    decode_and_check(x, impl, plan=plan)
    decode_and_check(y, impl, plan=plan)


@pytest.mark.gpu
@BOTH
def test_a_plan_serves_equal_lengths(case, impl):
    """Other queries, and each query token with the lists of its neighbour, by a plan made from another copy of the lengths."""
    x = make_inputs(case, "cuda")
    plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), impl=impl)
    swapped = {name: None if t is None else t.flip(1) for name, t in vars(x).items() if name.endswith("indices")}
    lengths = {name: None if t is None else t.clone() for name, t in vars(x).items() if name.endswith("topk_length")}
    y = dataclasses.replace(x, q=make_inputs(dataclasses.replace(case, seed=1), "cuda").q, **swapped, **lengths)
    one, other = decode_and_check(x, impl, plan=plan), decode_and_check(y, impl, plan=plan)
    assert (one[0] != other[0]).float().mean() > 0.3  # another answer was asked for


@pytest.mark.gpu
@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("kv_format", ["v32", "model1"])
def test_one_request_in_every_part(kv_format, h_q, impl):
    """b = 1, split as often as the plan has parts; MODEL1 with extra keys, which begin in the middle of them."""
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    case = one_request(kv_format, h_q, num_sms // (h_q // 64))
    x = make_inputs(case, "cuda")
    plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), impl=impl)
    assert plan.num_splits.tolist() == [0, plan.num_parts] and plan.num_parts > 1
    decode_and_check(x, impl)


def one_request(kv_format, h_q, num_parts):
    """Its 6 P - 5 blocks: with the request's overhead of 5 the parts get 6 each, and only the last has the rest."""
    blocks = 6 * num_parts - 5
    main = blocks if kv_format == "v32" else blocks // 3
    extra_topk = max(64 * (blocks - main) - 3, 0)
    topk = 64 * main - 1
    sizes = {"s_kv": topk + 9, "topk": topk, "extra_topk": extra_topk, "extra_s_kv": extra_topk + 9 if extra_topk else None}
    return Case(b=1, h_q=h_q, kv_format=kv_format, holes=True, sink=True, **sizes)


@pytest.mark.parametrize("num_parts", [2, 66, 132, 148])
@pytest.mark.parametrize("kv_format", ["v32", "model1"])
def test_one_request_is_split_into_all_parts(kv_format, num_parts):
    case = one_request(kv_format, 64, num_parts)
    keys = reference.sparse_num_keys(1, case.topk, extra_topk=case.extra_topk)
    assert reference.plan(keys, num_parts)[1].tolist() == [0, num_parts]


def keys_of_one_cache(case, device):
    """Inputs without main keys, without extra keys and without either, by lengths of 0; and the same as one cache's."""
    x = make_inputs(case, device)
    none = torch.zeros_like(x.topk_length)
    empty = {"extra_kv_cache": None, "extra_indices": None, "extra_topk_length": None}
    only_main, only_extra = dataclasses.replace(x, extra_topk_length=none), dataclasses.replace(x, topk_length=none)
    main = dataclasses.replace(x, **empty)
    extra = dataclasses.replace(
        x, kv_cache=x.extra_kv_cache, indices=x.extra_indices, topk_length=x.extra_topk_length, **empty
    )
    yield only_extra, extra
    yield only_main, main
    yield dataclasses.replace(only_extra, extra_topk_length=none), dataclasses.replace(main, topk_length=none)


@pytest.mark.gpu
@pytest.mark.parametrize("b", [6, 300])
@pytest.mark.parametrize("kv_format", ["v32", "model1"])
def test_extra_keys_alone(kv_format, b, impl):
    """topk_length = 0 leaves the extra keys, extra_topk_length = 0 the main ones; the oracle has one cache only."""
    for x, alone in keys_of_one_cache(dataclasses.replace(EXTRA_ALONE, kv_format=kv_format, b=b), "cuda"):
        out, lse = decode_and_check(x, impl)
        ref_out, ref_lse = reference.sparse_decode(alone.q, alone.kv_cache, alone.indices, **alone.kwargs())
        assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


EXTRA_ALONE = Case(h_q=64, s_q=2, s_kv=500, topk=321, topk_length=True, extra_topk=200, extra_topk_length=True, sink=True)


def test_oracle_of_extra_keys_alone():
    """The three pairs ask three things: keys in two of them, other keys, and none in the last."""
    seen = []
    for x, alone in keys_of_one_cache(dataclasses.replace(EXTRA_ALONE, h_q=4), "cpu"):
        answers = [reference.sparse_decode(y.q, y.kv_cache, y.indices, **y.kwargs()) for y in (x, alone)]
        assert_close(answers[0][0], answers[1][0], **SPARSE_DECODE_OUT)
        assert_close(answers[0][1], answers[1][1], **SPARSE_DECODE_LSE)
        seen.append(answers[1][1])
    assert 0 < seen[0].isinf().float().mean() < 1 and 0 < seen[1].isinf().float().mean() < 1 and seen[2].isposinf().all()
    assert (seen[0] != seen[1]).float().mean() > 0.5


@pytest.mark.gpu
def test_freed_memory_is_handed_out_again():
    """What `decode_and_check` poisons scratch by."""
    poison_free_memory(7_654_321)
    assert (torch.empty(7_654_321, dtype=torch.uint8, device="cuda") == 0xFF).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_cache_dtypes(impl, dtype):
    x = make_inputs(Case(b=4, topk=133, sink=True), "cuda")
    out, lse = decode_and_check(x, impl)
    again = mla_cute.sparse_decode(x.q, x.kv_cache.view(dtype), x.indices, **x.kwargs(), impl=impl)
    assert_bitwise(again[0], out, name="out")
    assert_bitwise(again[1], lse, name="lse")


@pytest.mark.gpu
def test_given_outputs_and_nothing_else_are_written(impl):
    """Strided out and lse between guards: the kernel writes its rows and not a byte more, split or not."""
    x = make_inputs(dataclasses.replace(REPEAT, h_q=40, b=5), "cuda")
    out_pool = torch.full((5, 2, 48, 640), 7.0, dtype=torch.bfloat16, device="cuda")
    lse_pool = torch.full((5, 2, 48), 7.0, device="cuda")
    out, lse = out_pool[:, :, 4:44, 64:576], lse_pool[:, :, 4:44]
    got = decode_and_check(x, impl, out=out, lse=lse)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    out.fill_(7.0)
    lse.fill_(7.0)
    assert (out_pool == 7.0).all() and (lse_pool == 7.0).all()


@pytest.mark.gpu
def test_graph_replays_with_other_inputs(impl):
    """Planned and decoded in one captured graph: a replay sees new lengths, indices and keys."""
    x, y = (make_inputs(dataclasses.replace(REPEAT, strided=False, seed=seed), "cuda") for seed in (0, 1))
    num_blocks = max(x.kv_cache.shape[0], y.kv_cache.shape[0])
    static_cache = torch.zeros(num_blocks, 64, 1, 656, dtype=torch.uint8, device="cuda")
    q, indices, length = x.q.clone(), x.indices.clone(), x.topk_length.clone()
    kwargs = x.kwargs() | {"topk_length": length, "impl": impl}

    def fill(z):
        q.copy_(z.q)
        indices.copy_(z.indices)
        length.copy_(z.topk_length)
        static_cache[: z.kv_cache.shape[0]].copy_(z.kv_cache)

    fill(x)
    mla_cute.sparse_decode(q, static_cache, indices, **kwargs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_cute.sparse_decode(q, static_cache, indices, **kwargs)
    for z in (y, x):
        fill(z)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        ref_out, ref_lse = reference.sparse_decode(
            z.q, z.kv_cache, z.indices, softmax_scale=x.softmax_scale, topk_length=z.topk_length, attn_sink=x.attn_sink
        )
        assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


STREAM = Case(b=4, topk=512, s_kv=600, topk_length=True, strided=False)
STREAM_EXTRA = dataclasses.replace(STREAM, kv_format="model1", extra_topk=300, extra_topk_length=True)
STREAM_CASES = pytest.mark.parametrize("case", [STREAM, STREAM_EXTRA], ids=str)


@pytest.mark.gpu
@STREAM_CASES
def test_runs_on_the_current_stream(case, impl):
    """Ordered behind work of a side stream that makes its input late: a launch on another stream would read zeros.

    The lengths are late, too: the plan, the kernel and the combine see them.
    """
    x = make_inputs(case, "cuda")
    want = decode_and_check(x, impl)
    names = [name for name in ("q", "indices", "topk_length", "extra_topk_length") if getattr(x, name) is not None]
    late = dataclasses.replace(x, **{name: torch.zeros_like(getattr(x, name)) for name in names})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: some 25 ms
        for name in names:
            getattr(late, name).copy_(getattr(x, name))
        out, lse = mla_cute.sparse_decode(late.q, late.kv_cache, late.indices, **late.kwargs(), impl=impl)
    stream.synchronize()
    assert_bitwise(out, want[0], name="out")
    assert_bitwise(lse, want[1], name="lse")


@pytest.mark.gpu
@STREAM_CASES
def test_runs_on_the_tensors_device(case, impl):
    """Whichever device is current; on that device's current stream."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = make_inputs(case, "cuda:1")
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):  # makes cuda:1 current
        torch.cuda.set_device(0)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert out.device == lse.device == torch.device("cuda:1")
    ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


@pytest.mark.gpu
def test_context_survives_refusals(impl):
    x = make_inputs(Case(b=4, topk=133), "cuda")
    for bad in ({"softmax_scale": -1.0}, {"topk_length": x.indices[:, 0, 0].float()}, {"attn_sink": x.q[0, 0, :, 0]}):
        with pytest.raises((ValueError, TypeError)):
            mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **bad, impl=impl)
    with pytest.raises(ValueError, match="kv_cache"):
        mla_cute.sparse_decode(x.q, x.kv_cache.cpu(), x.indices, impl=impl)
    with pytest.raises(ValueError, match="plan"):
        plan = mla_cute.plan_decode(x.q[:2], x.indices[:2], impl=impl)
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, plan=plan, impl=impl)
    decode_and_check(x, impl)


# How many clusters of 2 to 16 CTAs an H200 runs at the same time, one that was asked: its SMs come in groups of 9 to 18.
H200 = dict(zip(range(2, 17), (66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)))


@pytest.mark.parametrize(
    ("h_q", "b", "s_q", "topk", "extra_topk", "form", "size"),
    [  # each as was the fastest one on an H200, or close to it
        (128, 1, 1, 2048, 0, "small", 16),
        (128, 2, 1, 2048, 0, "clustered", 16),
        (128, 4, 1, 2048, 0, "planned", 0),  # 9 CTAs for 32 blocks are 4 blocks each, a plan's parts 2
        (128, 6, 1, 2048, 0, "clustered", 8),
        (128, 8, 1, 2048, 0, "planned", 0),
        (128, 32, 1, 2048, 0, "clustered", 2),
        (128, 128, 1, 2048, 0, "planned", 0),
        (128, 1, 1, 4096, 0, "small", 16),
        (128, 1, 1, 16384, 0, "planned", 0),
        (64, 1, 1, 2048, 0, "small", 16),
        (64, 3, 1, 2048, 0, "small", 16),
        (64, 4, 1, 2048, 0, "clustered", 16),
        (64, 16, 1, 2048, 0, "planned", 0),
        (64, 64, 1, 2048, 0, "clustered", 2),
        (16, 1, 1, 2048, 0, "small", 16),
        (16, 16, 1, 2048, 0, "small", 6),
        (16, 64, 1, 2048, 0, "clustered", 2),
        (16, 128, 1, 2048, 0, "planned", 0),
        (64, 2, 2, 128, 512, "small", 9),
        (64, 8, 2, 128, 512, "clustered", 6),
        (128, 2, 2, 128, 1024, "small", 6),
        (128, 4, 2, 128, 1024, "clustered", 6),
        (64, 1, 1, 64, 0, "small", 16),  # one block; its merge is shared
        (128, 40, 1, 64, 0, "planned", 0),
        (64, 1, 1, 1, 1, "small", 16),
        (1, 133, 1, 2048, 0, "planned", 0),  # more requests than SMs
        (64, 0, 1, 2048, 0, "planned", 0),
    ],
)
def test_what_the_load_decides(sm90, h_q, b, s_q, topk, extra_topk, form, size):
    from mla_cute.sm90 import sparse_decode_small

    problem, config = Problem(h_q=h_q), sm90.default_config(Problem(h_q=h_q))
    load = problem, b, s_q, topk, extra_topk, 132, H200.__getitem__
    forms = {"planned": config, "clustered": dataclasses.replace(config, clustered=True), "small": sparse_decode_small.Config()}
    assert config.settle(*load) == (forms[form], size)
    assert config.kernels() == [*forms.values()]
    never = dataclasses.replace(config, clustered=False)
    assert never.settle(*load) == (never, 0) and never.kernels() == [never]
    always = dataclasses.replace(config, clustered=True)
    assert always.settle(*load)[0] == always and always.settle(*load)[1] >= 1 and always.kernels() == [always]
    tuned = dataclasses.replace(config, fixed_overhead_blocks=3)  # for this kernel: not left to the other one
    assert isinstance(tuned.settle(*load)[0], sm90.Config)
    assert tuned.kernels() == [tuned, dataclasses.replace(tuned, clustered=True)]


def test_settling_asks_only_where_the_answer_matters(sm90):
    def never(size):
        raise AssertionError(size)

    problem = Problem(h_q=64)
    assert sm90.Config(clustered=False).settle(problem, 1, 1, 2048, 0, 132, never) == (sm90.Config(clustered=False), 0)
    assert sm90.Config().settle(problem, 0, 1, 2048, 0, 132, never) == (sm90.Config(), 0)
    assert sm90.Config().settle(problem, 133, 1, 2048, 0, 132, never) == (sm90.Config(), 0)
    assert sm90.Config().settle(problem, 70000, 1, 2048, 0, 132, never) == (sm90.Config(), 0)
    with pytest.raises(ValueError, match="clustered must be None or False for more than 65535 requests, got True and b 70000"):
        sm90.Config(clustered=True).settle(problem, 70000, 1, 2048, 0, 132, never)


def test_a_driver_that_does_not_tell(monkeypatch):
    """Where the query fails, plans serve small batches, and a warning says so, once."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    target._clusters.cache_clear()
    device = torch.device("cuda", 99)
    with pytest.warns(UserWarning, match="cuda:99: the driver does not say how many clusters fit"):
        assert target._max_clusters(device, 8) == 0
    assert target._max_clusters(device, 16) == 0
    target._clusters.cache_clear()


class Driver:
    """As much of cuda.bindings.driver as the query takes, where nobody has made a context yet."""

    class CUresult:
        CUDA_SUCCESS, CUDA_ERROR_INVALID_CONTEXT = (SimpleNamespace(name=name) for name in ("SUCCESS", "INVALID_CONTEXT"))

    CUfunction_attribute = CUlaunchAttributeID = MagicMock()
    CUlaunchAttribute = CUlaunchConfig = MagicMock

    def __init__(self):
        self.contexts = []

    def __getattr__(self, name):
        def call(*args):
            if name == "cuCtxPushCurrent":
                self.contexts.append(args[0])
            elif name == "cuCtxPopCurrent":
                self.contexts.pop()
            elif name not in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain") and not self.contexts:
                return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
            return self.CUresult.CUDA_SUCCESS, 120 if name.startswith("cuOccupancy") else name

        return call


def test_clusters_are_asked_for_before_there_is_a_context(monkeypatch):
    """Whoever compiles ahead asks before torch has used the device."""
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(shared_memory_per_block_optin=1))
    device = torch.device("cuda", 98)
    try:
        assert [target._max_clusters(device, size) for size in (1, 2, 16, 17)] == [0, 120, 120, 0]
    finally:
        target._clusters.cache_clear()
    assert driver.contexts == []


@pytest.mark.gpu
def test_clusters_that_fit():
    """By the driver: no more CTAs than SMs, and larger clusters are fewer."""
    num_sms, max_clusters = _sms()
    counts = [max_clusters(size) for size in range(2, 17)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 0 and max_clusters(17) == 0
    assert all(0 <= n * size <= num_sms for size, n in enumerate(counts, 2))


@pytest.mark.parametrize("clustered", [0, 1, 16, "True"])
def test_clustered_is_a_bool(sm90, clustered):
    problem = Problem(h_q=64)
    with pytest.raises(ValueError, match=f"config: clustered must be None, True or False, got {clustered!r}"):
        dataclasses.replace(sm90.default_config(problem), clustered=clustered).check(problem)


SMALL = [case for case in BEYOND + FORMATS if case.b <= 9 and case.topk < 10000][::3]


@pytest.fixture(scope="module")
def either_way():
    module = jit.arch_module("sparse_decode", "sm_90a")
    jobs = [
        jit.Job(module, case.problem, dataclasses.replace(module.default_config(case.problem), clustered=clustered), "sm_90a")
        for case in SMALL
        for clustered in (True, False)
    ]
    jit.compile_ahead(list(dict.fromkeys(jobs)), progress=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_batches_either_way(sm90, case):
    """By clusters and by a plan, whatever the load would decide."""
    x = make_inputs(case, "cuda")
    results = [
        decode_and_check(x, config=dataclasses.replace(sm90.default_config(case.problem), clustered=clustered))
        for clustered in (True, False)
    ]
    for ours, other in zip(*results):
        assert_close(ours, other, **(SPARSE_DECODE_OUT if ours.dim() == 4 else SPARSE_DECODE_LSE), name="either way")


@pytest.mark.gpu
def test_clusters_give_the_same_bits_and_read_no_plan(sm90):
    """Also launched one behind the other, where a call begins before the one ahead of it has ended; and with a wrong plan."""
    x = make_inputs(Case(b=2, h_q=128, s_q=2, s_kv=3000, topk=1500, topk_length=True, sink=True), "cuda")
    config = sm90.default_config(Problem(h_q=128))
    assert config.settle(Problem(h_q=128), 2, 2, 1500, 0, *_sms())[1] > 1
    first = decode_and_check(x)
    wrong = mla_cute.plan_decode(x.q, x.indices, topk_length=torch.ones_like(x.topk_length))
    runs = [mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=wrong) for _ in range(50)]
    for out, lse in runs:
        assert_bitwise(out, first[0], name="out")
        assert_bitwise(lse, first[1], name="lse")


@pytest.mark.gpu
@pytest.mark.parametrize("other", [None, "mla_cute.sm90.sparse_decode_small"])
def test_clusters_wait_for_what_is_ahead_of_them(other):
    """q is written by the kernel that is launched just ahead: a cluster that did not wait would read the old one."""
    x, y = (make_inputs(Case(b=1, h_q=64, s_kv=3000, topk=2048, sink=True, seed=seed), "cuda") for seed in (0, 1))
    q = torch.empty_like(x.q)
    expected = [mla_cute.sparse_decode(t.q, x.kv_cache, x.indices, **x.kwargs(), impl=other) for t in (x, y)]
    got = []
    for i in range(40):
        q.copy_((x, y)[i % 2].q)
        got.append(mla_cute.sparse_decode(q, x.kv_cache, x.indices, **x.kwargs(), impl=other))
    for i, (out, lse) in enumerate(got):
        assert_bitwise(out, expected[i % 2][0], name="out")
        assert_bitwise(lse, expected[i % 2][1], name="lse")


def _sms():
    where = target.target(torch.device("cuda"))
    return where.num_sms, where.max_clusters


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{"registers": (152, 200)}, {"fixed_overhead_blocks": 1}], ids=str)
def test_other_configs_compute_the_same(sm90, change):
    """Several runs each: a refill that overtakes the reads of its slot shows in some of them only."""
    config = dataclasses.replace(sm90.default_config(Problem(h_q=128)), **change)
    x = make_inputs(REPEAT, "cuda")
    out, lse = decode_and_check(x, config=config)
    for _ in range(40):
        again = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), config=config)
        assert_bitwise(again[0], out, name="out")
        assert_bitwise(again[1], lse, name="lse")


MEMCHECK = """
import torch, mla_cute
import mla_cute.sm90.sparse_decode as sm90
from mla_cute.testing import Case, make_inputs
ragged = Case(b=3, h_q=40, s_q=2, s_kv=200, topk=133, topk_length=True, sink=True)
split = Case(b=1, h_q=128, s_kv=600, topk=512)
for case in (ragged, split):
    x = make_inputs(case, "cuda")
    mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), config=sm90.Config(clustered=False))
    torch.cuda.synchronize()
print("ran")
"""


@pytest.mark.gpu
def test_memcheck():
    """compute-sanitizer over one small unsplit-and-ragged and one split case: no error.

    By a plan: of clusters the tool (2025.3) says of legal accesses that they are "not located in remote CTA", and of a CTA that
    sends to itself that its cluster "needs to have at least 2 blocks". The emulator checks theirs.
    """
    tool = os.environ.get("COMPUTE_SANITIZER", "/usr/local/cuda/bin/compute-sanitizer")
    if not os.path.exists(tool):
        pytest.skip(f"no compute-sanitizer at {tool} (set COMPUTE_SANITIZER)")
    done = subprocess.run(
        [tool, "--tool", "memcheck", sys.executable, "-c", MEMCHECK],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "ran" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
