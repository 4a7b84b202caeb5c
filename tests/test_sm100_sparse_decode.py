"""The Blackwell kernel, which no GPU here runs: what the compiler makes of it (compile) and its numbers in the emulator
(emulate)."""

import dataclasses
import importlib.util
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from decode_checks import pieces

import mla_cute
import mla_cute.sm90.sparse_decode as sm90
import mla_cute.sm100.sparse_decode as sm100
from mla_cute import emulator, jit, reference, schedule
from mla_cute.emulator import Options
from mla_cute.emulator.run import load
from mla_cute.kv_cache import MODEL1, V32
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs
from mla_cute.validate import Problem

ARCH = "sm_100a"
LENGTHS = {"has_topk_length": True, "has_attn_sink": True}
EXTRA = {**LENGTHS, "has_extra": True, "has_extra_topk_length": True}
OF_MODEL1 = {"kv_format": "model1", "d_qk": 512}


def check(result, expected):
    assert_close(result[0], expected[0], **SPARSE_DECODE_OUT, name="out")
    assert_close(result[1], expected[1], **SPARSE_DECODE_LSE, name="lse")


# ---- cpu tier ----


def test_blackwell_gets_this_kernel():
    assert jit.arch_module("sparse_decode", "sm_100a") is sm100
    assert jit.arch_module("sparse_decode", "sm_103a") is sm100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tile_n": 32}, "tile_n must be 64, got 32"),
        ({"fixed_overhead_blocks": 0}, "fixed_overhead_blocks must be at least 1, got 0"),
        ({"registers": (208, 104, 200)}, r"together at most 504, got \(208, 104, 200\)"),
        ({"registers": (210, 96, 192)}, "multiples of 8"),
        ({"registers": (208, 16, 192)}, "in 24..256"),
        ({"registers": (208, 104)}, "registers must be a tuple of 3 ints"),
        ({"raw_slots": 1}, "raw_slots must be at least 2, got 1"),
        ({"k_slots": 1}, "k_slots must be at least 2, 1 of them for Q, got 1"),
        ({"h_q": 128, "k_slots": 3}, "k_slots must be at least 4, 3 of them for Q, got 3"),
        ({"h_q": 128, "kv_format": "model1", "k_slots": 2}, "k_slots must be at least 3, 2 of them for Q, got 2"),
        ({"ctas": 2}, "ctas must be 1, or 2 for more than 64 heads, got 2 for 64"),
        ({"ctas": 3}, "ctas must be 1, or 2 for more than 64 heads, got 3 for 64"),
        ({"raw_slots": 4}, r"shared memory needs \d+ bytes, the limit is 232448"),
        ({"index_slots": 2.0}, "index_slots: must be an int, got 2.0"),
        ({"rescale_bits": 8.0}, "rescale_bits: must be an int, got 8.0"),
        ({"rescale_bits": -1}, "rescale_bits must be 0..64, got -1"),
    ],
    ids=str,
)
def test_config_refuses(change, words):
    change = dict(change)
    kv_format = change.pop("kv_format", "v32")
    problem = Problem(h_q=change.pop("h_q", 64), d_qk=576 if kv_format == "v32" else 512, kv_format=kv_format)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(sm100.default_config(problem), **change).check(problem)


@pytest.mark.parametrize("module", [sm90, sm100])
def test_a_plan_is_a_pytree(module):
    """Of literals, for torch.compile and torch.export: every field of a shipped Config is one."""
    config = module.default_config(Problem(h_q=128))
    tensors = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    plan = schedule.DecodePlan(1, 1, 128, 64, False, 0, False, 2, config, *tensors)
    leaves, tree = torch.utils._pytree.tree_flatten(plan)
    assert torch.utils._pytree.tree_unflatten(leaves, tree).config == config


@pytest.mark.emulate
def test_a_plan_under_compile():
    x = make_inputs(Case(b=1, h_q=64, s_kv=100, topk=70, strided=False))

    def call(q, kv_cache, indices):
        plan = mla_cute.plan_decode(q, indices, backend="emulator")
        return mla_cute.sparse_decode(q, kv_cache, indices, plan=plan, backend="emulator")

    with emulator.session(arch=ARCH, num_sms=1):
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        check(compiled(x.q, x.kv_cache, x.indices), reference.sparse_decode(x.q, x.kv_cache, x.indices))


@pytest.mark.emulate
@pytest.mark.parametrize("h_q", [64, 128])
def test_slots_to_spare_and_none(h_q):
    """As few slots as Config takes: Q's come between those of K."""
    x = make_inputs(Case(b=3, h_q=h_q, s_kv=200, topk=130))
    config = sm100.Config(ctas=1 + (h_q > 64), k_slots=2 if h_q == 64 else 4, raw_slots=2, index_slots=2)
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    for n in (0, 1, 4):
        with emulator.session(arch=ARCH, num_sms=2, options=Options.schedule(n)):
            kwargs = x.kwargs() | {"config": config, "backend": "emulator"}
            check(mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **kwargs), expected)


@pytest.mark.emulate
@pytest.mark.parametrize("h_q", [64, 128])
def test_no_key_and_a_sink_below_all(h_q):
    """A sink of -1e30, for none, lies below the maximum that no key has raised."""
    q, kv_cache = torch.zeros(1, 1, h_q, 576).bfloat16(), mla_cute.quantize_kv_cache(torch.ones(1, 64, 1, 576).bfloat16())
    sink = torch.tensor([-1e30, -1e32, -2e38, math.nan]).repeat(h_q // 4)
    with emulator.session(arch=ARCH, num_sms=h_q // 64):
        none = torch.full((1, 1, 1), -1, dtype=torch.int32)
        out, lse = mla_cute.sparse_decode(q, kv_cache, none, attn_sink=sink, backend="emulator")
    assert (out == 0).all() and (lse == math.inf).all()


@pytest.mark.emulate
@pytest.mark.parametrize("scale", [2e4, 2.0**100])
def test_large_logits_keep_the_sum(scale):
    """The mean of one token three times is the token, however large its logit."""
    q, kv_cache = torch.ones(1, 1, 64, 576).bfloat16(), mla_cute.quantize_kv_cache(torch.ones(1, 64, 1, 576).bfloat16())
    with emulator.session(arch=ARCH, num_sms=1):
        same = torch.zeros(1, 1, 3, dtype=torch.int32)
        out, _ = mla_cute.sparse_decode(q, kv_cache, same, softmax_scale=scale, backend="emulator")
    assert (out == 1).all()


def test_config_refuses_another_format():
    problem = dataclasses.replace(Problem(h_q=64), kv_format="model2")
    with pytest.raises(NotImplementedError, match="cache of v32 or model1, got sparse_decode on model2"):
        sm100.default_config(problem).check(problem)


@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize(("fmt", "fields"), [(V32, {}), (MODEL1, OF_MODEL1)], ids=["v32", "model1"])
def test_shared_memory_is_used_up(fmt, fields, h_q):
    config = sm100.default_config(Problem(h_q=h_q, **fields))
    assert config.smem_bytes(fmt) <= 227 * 1024
    assert dataclasses.replace(config, raw_slots=config.raw_slots + 1).smem_bytes(fmt) > 227 * 1024


@pytest.mark.parametrize(
    ("h_q", "s_q", "parts"), [(128, 1, 74), (128, 2, 37), (64, 1, 148), (1, 1, 148), (96, 1, 74), (128, 200, 1)]
)
def test_parts_fill_the_chip_once(h_q, s_q, parts):
    problem = Problem(h_q=h_q)
    assert sm100.default_config(problem).num_parts(problem, s_q, 148) == parts


def cache_of(pages, stride, token_bytes=656, page_block_size=64):
    return torch.empty_strided(
        (pages, page_block_size, 1, token_bytes), (stride, token_bytes, token_bytes, 1), dtype=torch.uint8, device="meta"
    )


def test_page_strides_that_tma_reaches():
    """Rows of 16 bytes reach 32 GiB; whole records all that an index can name."""
    sm100.check_caches(cache_of(800_000, 64 * 656 + 16))
    sm100.check_caches(cache_of(30_000_000, 64 * 656))
    sm100.check_caches(cache_of(1, 12345))  # of one page: never used
    sm100.check_caches(cache_of(3_500_000, 64 * 576 + 1024, 584), cache_of(3, 40_000, 584))  # rows of 64 bytes


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (cache_of(900_000, 42_000), "a multiple of 656 bytes .a record., such as 42640, in a cache of 900000 pages: TMA "
         r"reaches 2\*\*31 - 1 rows, of 16 bytes with this stride, got 42000"),
        (cache_of(4_000_000, 64 * 576 + 1024, 584), "a multiple of 576 bytes .a record., such as 38016, .* rows, of 64 bytes"),
        (cache_of(30_000_000, 656 * 72), "a multiple of 656 bytes .a record., at most 46576, .*, got 47232"),
    ],
    ids=["v32", "model1", "far"],
)  # fmt: skip
def test_page_strides_that_tma_does_not_reach(cache, words):
    for name, caches in (("kv_cache", (cache, None)), ("extra_kv_cache", (cache_of(1, 656), cache))):
        with pytest.raises(ValueError, match=rf"^{name}: page stride \(dim 0\) must be {words}"):
            sm100.check_caches(*caches)


def test_calls_are_refused_before_they_compile(monkeypatch):
    x = make_inputs(Case(b=1, h_q=3, topk=5, s_kv=9))
    monkeypatch.setattr(sm100, "MAX_ROWS", 100)
    with emulator.session(arch=ARCH), pytest.raises(ValueError, match="^kv_cache: page stride .dim 0. must be a multiple"):
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, backend="emulator")


# ---- compile tier ----


COMPILED = [
    ("sm_100a", {"h_q": 64}),
    ("sm_100a", {"h_q": 1, **EXTRA}),
    ("sm_100a", {"h_q": 40, **OF_MODEL1, "has_attn_sink": True}),
    ("sm_100a", {"h_q": 128, **EXTRA}),
    ("sm_100a", {"h_q": 96, **OF_MODEL1, **LENGTHS}),
    ("sm_103a", {"h_q": 64, **LENGTHS}),
    ("sm_103a", {"h_q": 128, **OF_MODEL1, **EXTRA}),
]


@pytest.mark.compile
@pytest.mark.parametrize(("arch", "fields"), COMPILED, ids=str)
def test_compiles_without_spills(arch, fields):
    problem = Problem(**fields)
    config = sm100.default_config(problem)
    seen = jit.inspect(sm100, problem, config, arch)
    main = [usage for name, usage in seen.resources.items() if name.startswith("mla_sparse_decode_sm100")]
    assert len(main) == 1 and len(seen.resources) == 2  # and the combine
    for name, usage in seen.resources.items():
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0), (name, usage)
    assert main[0]["REG"] == 168  # at entry: 65,536 over 384 threads
    assert seen.spill_bytes == 0 and seen.advisories == ()
    (ptx,) = seen.ptx
    assert f".target {arch}" in ptx
    assert "ld.local" not in ptx and "st.local" not in ptx
    for count in config.registers:
        assert f"sync.aligned.u32 {count};" in " ".join(ptx.replace("\t", " ").split()), count
    ctas, is_v32 = config.ctas, problem.kv_format == "v32"
    assert ctas == problem.head_tiles
    counts = Counter(re.findall(r"\btcgen05\.\w+(?:\.ws)?\.cta_group::\d", ptx))
    # QK: half of the dims in steps of 16. PV: 4 steps of 16 keys, both halves of d_v. Q to tensor memory: 8 columns at once.
    mma = "tcgen05.mma.ws.cta_group::1" if ctas == 1 else "tcgen05.mma.cta_group::2"
    wanted = {mma: problem.d_qk // 2 // 16 + 2 * 4, f"tcgen05.cp.cta_group::{ctas}": problem.d_qk // 2 // 16}
    for name in ("alloc", "dealloc", "relinquish_alloc_permit"):
        wanted[f"tcgen05.{name}.cta_group::{ctas}"] = 1
    assert {name: n for name, n in counts.items() if "commit" not in name} == wanted
    assert re.findall(r"tcgen05\.alloc\S+ \[%r\d+\], (\d+)", ptx) == ["512"]
    # Two halves of 8 groups of raw records, 16 groups of rope (V32's in two pieces, of which a pair of CTAs has one each).
    assert ptx.count("global.tile::gather4.") == 16 + 16 * (2 if is_v32 and ctas == 1 else 1)
    nope = 448 if ctas == 1 and not is_v32 else 512 // ctas
    assert ptx.count("cvt.rn.bf16x2.e4m3x2") == nope * 64 // 128 // 2  # of 128 threads, two codes each
    assert "griddepcontrol.launch_dependents" in ptx and "griddepcontrol.wait" in ptx


@pytest.mark.compile
def test_the_planner_compiles_for_sm_103a():  # for sm_100a: tests/test_schedule.py
    from mla_cute import schedule_kernel

    seen = jit.inspect(schedule_kernel, schedule_kernel.PlanProblem(True, False, True), None, "sm_103a")
    assert seen.spill_bytes == 0 and seen.advisories == ()


# ---- emulate tier ----


@pytest.mark.emulate
def test_the_script_for_a_real_one(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("blackwell", Path(__file__).parent.parent / "benchmarks" / "blackwell.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--emulate", "--only", "1", "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failures"] == 0 and [sorted(check) for check in found["checks"]] == [["case", "seconds"]]
    assert "1 checks, 0 timed, 0 failures" in capsys.readouterr().out
    for argv, said in ((["--emulate", "--out", "/none/x.json"], "--out: no directory /none"), ([], "torch sees none")):
        if not argv and torch.cuda.is_available():
            continue
        with pytest.raises(SystemExit) as e:
            script.main(argv)
        assert e.value.code == 1 and said in capsys.readouterr().err


SCHEDULES = 8
FEW = 3  # of the cases that only vary a size
# (case, SMs of the GPU that the plan is made for, schedules): formats, 1 to 128 heads, 1 to 6 blocks of keys, split and whole
# requests. Few problems, because compiling one takes longer than to run it.
CASES = [
    (Case(b=3, h_q=64, s_kv=400, topk=320, topk_length=True, sink=True, holes=True, seed=2), 9, SCHEDULES),
    (Case(b=5, h_q=64, s_kv=200, topk=130, topk_length=True, sink=True, duplicates=True, outside=True), 1, SCHEDULES),
    (Case(b=1, h_q=64, s_kv=70, topk=65, topk_length=True, sink=True, all_invalid=True), 5, FEW),
    (Case(b=2, h_q=64, s_kv=100, topk=70, topk_length=True, sink=True, zero_length=True, seed=3), 3, FEW),
    (Case(b=2, h_q=64, s_kv=300, topk=1, topk_length=True, sink=True, page_block_size=1, scales="amax"), 2, FEW),
    (Case(b=2, h_q=128, s_kv=200, topk=130, holes=True, page_block_size=53, scales="random"), 6, SCHEDULES),
    (Case(b=2, h_q=16, s_q=2, s_kv=150, topk=133, page_block_size=16, odd_rows=True, extra_topk=70,
          extra_page_block_size=5, sink=True), 4, FEW),
    (Case(b=2, h_q=1, s_kv=90, topk=33, topk_length=True, extra_topk=129, extra_page_block_size=3, holes=True), 4, FEW),
    (Case(b=2, h_q=64, s_kv=90, topk=70, kv_format="model1", page_block_size=61, sink=True, outside=True,
          topk_length=True), 3, SCHEDULES),
    (Case(b=4, h_q=64, s_kv=300, topk=190, kv_format="model1", sink=True, holes=True, topk_length=True,
          scales="random"), 2, SCHEDULES),
    (Case(b=2, h_q=128, s_kv=150, topk=100, kv_format="model1", page_block_size=7, topk_length=True, odd_rows=True,
          extra_topk=70, extra_page_block_size=5, extra_topk_length=True, sink=True), 3, SCHEDULES),
    (Case(b=2, h_q=1, s_kv=90, topk=70, kv_format="model1", page_block_size=2), 3, FEW),
]  # fmt: skip


@pytest.mark.emulate
@pytest.mark.parametrize("case, num_sms, schedules", CASES, ids=lambda x: str(x))
def test_emulated(case, num_sms, schedules):
    x = make_inputs(case)
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    config = dataclasses.replace(sm100.default_config(case.problem), fixed_overhead_blocks=1)  # splits small requests too
    first = None
    for n in range(schedules):
        with emulator.session(arch=ARCH, num_sms=num_sms, options=Options.schedule(n)) as s:  # strict: a finding raises
            result = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), config=config, backend="emulator")
        assert s.findings == []
        (launch,) = (grid.launch for grid in s.grids if grid.launch.kernel.startswith("mla_sparse_decode_sm100"))
        assert launch.smem_bytes <= config.smem_bytes(case.format) <= launch.smem_bytes + 2048  # what alignments may take
        check(result, expected)
        first = first or result
        assert_bitwise(result[0], first[0], name="out")  # whatever the order of the warps
        assert_bitwise(result[1], first[1], name="lse")


@pytest.mark.emulate
def test_rescaling_whenever_a_maximum_grows():
    """Random scores never outgrow the first maximum by 2 ** 8."""
    case = Case(b=3, h_q=64, s_kv=400, topk=320, topk_length=True, sink=True, holes=True, seed=2)
    x = make_inputs(case)
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
    config = dataclasses.replace(sm100.default_config(case.problem), rescale_bits=0)
    for n in range(FEW):
        with emulator.session(arch=ARCH, num_sms=2, options=Options.schedule(n)):
            kwargs = x.kwargs() | {"config": config, "backend": "emulator"}
            check(mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **kwargs), expected)


@pytest.mark.emulate
def test_two_tiles_of_heads_without_a_pair():
    case = Case(b=1, h_q=70, s_kv=200, topk=130, holes=True)
    x = make_inputs(case)
    with emulator.session(arch=ARCH, num_sms=4, options=Options.schedule(2)):
        result = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), config=sm100.Config(), backend="emulator")
    check(result, reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs()))


@pytest.mark.emulate
def test_maxima_that_outgrow_the_threshold():
    """Logits of hundreds: by the shipped threshold, and not for all heads of a warp at once."""
    case = Case(b=2, h_q=64, s_kv=400, topk=320, topk_length=True, sink=True, holes=True, seed=4)
    x = make_inputs(case)
    options = x.kwargs() | {"softmax_scale": 4.0}
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **options)
    with emulator.session(arch=ARCH, num_sms=2, options=Options.schedule(3)):
        check(mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **options, backend="emulator"), expected)


@pytest.mark.emulate
@pytest.mark.parametrize("kv_format", ["v32", "model1"])
def test_nan_stays_in_its_request(kv_format):
    """A request whose keys are all NaN, and behind it, in the same slots, one with groups that are not copied because nothing
    in them counts, and one without a key."""
    case = Case(b=3, h_q=64, s_kv=300, topk=130, sink=True, kv_format=kv_format, strided=False)
    x = make_inputs(case)
    options = x.kwargs() | {"topk_length": torch.tensor([130, 130, 0], dtype=torch.int32)}
    x.indices[0] = 5
    x.indices[1][x.indices[1] == 5] = -1
    x.indices[1, 0, 4:60] = -1
    fmt = case.format
    page = x.kv_cache[0].as_strided((fmt.row_bytes,), (1,), x.kv_cache.storage_offset() + 5 * fmt.row_bytes)
    page.fill_(0xFF)  # codes and rope; of V32 scales too
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **options)
    with emulator.session(arch=ARCH, num_sms=1, options=Options.schedule(3)):
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **options, backend="emulator")
    assert expected[0][0].isnan().all() and out[0].isnan().all() and lse[0].isnan().all()
    assert expected[0][1].isfinite().all()
    check((out[1:], lse[1:]), (expected[0][1:], expected[1][1:]))


@pytest.mark.emulate
def test_the_cases_split_and_do_not_split():
    splits = []
    for case, num_sms, _ in CASES:
        x = make_inputs(case)
        config = dataclasses.replace(sm100.default_config(case.problem), fixed_overhead_blocks=1)
        with emulator.session(arch=ARCH, num_sms=num_sms):
            plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), config=config, backend="emulator")
        splits += plan.num_splits.diff().tolist()
    assert {1, 2, 3} <= set(splits)


def run_pieces(kernel, x, topk_length, plan, expected, n, strict=True):
    """(findings, out, lse); scratch holds NaN."""
    scratch = torch.full((schedule.scratch_size(4, 2, x.q.shape[2]),), math.nan)
    out, lse = (torch.full(t.shape, math.nan, dtype=t.dtype) for t in expected)
    args = x.attn_sink, float(x.softmax_scale), *plan, scratch, out, lse, 3, 12345
    with emulator.session(arch=ARCH, options=Options.schedule(n), strict=strict) as s:
        kernel(x.q, x.kv_cache.view(torch.uint8), x.indices, topk_length, None, None, None, *args)
    (combine,) = (grid.launch for grid in s.grids if grid.launch.kernel.startswith("mla_combine"))
    assert combine.grid[0] <= 2 * 4 * 2 * -(-x.q.shape[2] // 64)  # two an SM: parts, query tokens, tiles of heads
    return s.findings, out, lse


@pytest.mark.emulate
@pytest.mark.parametrize("h_q, kv_format, schedules", [(64, "v32", 4), (20, "model1", 3), (128, "v32", 2)])
def test_two_pieces_and_three(h_q, kv_format, schedules):
    inputs = pieces(h_q, kv_format)
    problem = Problem(h_q=h_q, d_qk=inputs[0].q.shape[3], kv_format=kv_format, **LENGTHS)
    kernel = load(sm100, problem, sm100.default_config(problem), ARCH)
    first = None
    for n in range(schedules):
        _, *result = run_pieces(kernel, *inputs, n)
        check(result, inputs[3])
        first = first or result
        assert_bitwise(result[0], first[0], name="out")
        assert_bitwise(result[1], first[1], name="lse")


@pytest.mark.emulate
@pytest.mark.parametrize("lengths", [(640, 64, 640), (1, 640, 65), (0, 0, 0)])
def test_a_plan_older_than_the_lengths_ends(lengths):
    """A part that begins at a block which its request no longer has: no hang, and no finding in reads or barriers."""
    x = make_inputs(Case(b=3, h_q=64, s_kv=700, topk=640, topk_length=True, sink=True))
    old = torch.tensor([640, 640, 640], dtype=torch.int32)
    x.topk_length.copy_(torch.tensor(lengths))
    with emulator.session(arch=ARCH, num_sms=2):
        config = dataclasses.replace(sm100.default_config(Problem(h_q=64)), fixed_overhead_blocks=5)
        plan = mla_cute.plan_decode(x.q, x.indices, topk_length=old, backend="emulator", config=config)
        assert plan.metadata[1, 2] == 8  # where part 1 begins in request 1
        result = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, backend="emulator")
    check(result, reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs()))


@pytest.mark.emulate
@pytest.mark.parametrize("kv_format, page_block_size, gap", [("v32", 64, 16), ("v32", 1, 656), ("model1", 7, 64 - 56)])
def test_pages_that_are_no_whole_records_apart(kv_format, page_block_size, gap):
    """Rows of 16 and of 64 bytes, and whole records; NaN in the gaps."""
    case = Case(b=2, h_q=64, s_kv=150, topk=100, topk_length=True, sink=True, kv_format=kv_format,
                page_block_size=page_block_size, strided=False)  # fmt: skip
    x = make_inputs(case)
    pages, size = x.kv_cache.shape[0], page_block_size * case.format.bytes_per_token
    memory = torch.full((pages, size + gap), 0xFF, dtype=torch.uint8)
    memory[:, :size] = x.kv_cache.as_strided((pages, size), (x.kv_cache.stride(0), 1))
    token_bytes = case.format.bytes_per_token
    cache = memory.as_strided(x.kv_cache.shape, (size + gap, token_bytes, token_bytes, 1))
    expected = reference.sparse_decode(x.q, cache, x.indices, **x.kwargs())
    with emulator.session(arch=ARCH, num_sms=2, options=Options.schedule(2)):
        check(mla_cute.sparse_decode(x.q, cache, x.indices, **x.kwargs(), backend="emulator"), expected)


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["far pages, two tiles of heads", "one page, and an extra cache"])
def test_large_addresses(name):
    """The cases of Hopper's, with pages as far apart as TMA's rows reach: 656 * 2 ** 27 bytes, and 2 ** 31 tokens of MODEL1."""
    from test_large import EMULATED, Pages, check_moved

    case, where, rows = EMULATED[name]
    if case.extra_topk:
        where = where | {"extra": Pages((2**31 - 1) // 62, 61, 62 * 576)}
    else:
        where = where | {"main": Pages(9, 61, 656 * 2**27)}
    config = dataclasses.replace(sm100.default_config(case.problem), fixed_overhead_blocks=5)  # some whole, some split
    with emulator.session(arch=ARCH, num_sms=3 * case.s_q * case.problem.head_tiles) as s:  # three parts
        check_moved(make_inputs(case), case, backend="emulator", config=config, **where, **rows)
    assert s.findings == []


# Taken out of the main kernel one at a time, these must be missed; every SAMPLE-th of them here, because each takes seconds.
# tcgen05.fence and wait::ld are not among them: the emulator takes what mbarriers acquire and release for known, and a
# register's use for a wait. What goes unnoticed is the wait at the end for the other CTA: both free tensor memory together. Nor
# are two waits (PROMISED, their comments) for what here is over by then: PTX does not promise that.
PROMISED = "only this wait promises", "no CTA ends before the last commits"
SYNCHRONISING = re.compile(
    r"fence\.proxy\.async|fence\.mbarrier|bar\.sync|barrier\.cluster|mbarrier\.arrive|mbarrier\.try_wait"
    r"|tcgen05\.(wait::st|commit)|bulk\.(wait|commit)_group"
)
SAMPLE = 6


@pytest.mark.emulate
@pytest.mark.parametrize("h_q, kv_format", [(128, "v32"), (64, "model1")])
def test_synchronisation_is_missed_when_it_is_gone(h_q, kv_format):
    """Requests of one block behind one another, more blocks than any ring has slots, and a request in two pieces."""
    from test_emulator_mutations import without

    lengths = (64, 20, 630, 100)
    x = make_inputs(Case(b=4, h_q=h_q, s_kv=700, topk=640, kv_format=kv_format, sink=True, holes=True, strided=False))
    topk_length = torch.tensor(lengths, dtype=torch.int32)
    plan = reference.plan(lengths, 2, fixed_overhead_blocks=0)
    ours = {"softmax_scale": x.softmax_scale, "topk_length": topk_length, "attn_sink": x.attn_sink}
    expected = reference.sparse_decode(x.q, x.kv_cache, x.indices, **ours)
    problem = Problem(h_q=h_q, d_qk=x.q.shape[3], kv_format=kv_format, **LENGTHS)
    config = dataclasses.replace(sm100.default_config(problem), rescale_bits=0)
    kernel = load(sm100, problem, config, ARCH)
    assert plan[1].diff().tolist() == [1, 1, 2, 1]

    def trouble(kernel, schedules=(0, 1, 2)):
        for n in schedules:
            out, lse = (torch.full(t.shape, math.nan, dtype=t.dtype) for t in expected)
            scratch = torch.full((schedule.scratch_size(2, 1, h_q),), math.nan)
            args = x.attn_sink, float(x.softmax_scale), *plan, scratch, out, lse, 2, 1
            with emulator.session(arch=ARCH, options=Options.schedule(n), strict=False) as s:
                kernel(x.q, x.kv_cache, x.indices, topk_length, None, None, None, *args)
            if s.findings:
                return str(s.findings[0])
            try:
                check((out, lse), expected)
            except AssertionError as e:
                return f"wrong numbers: {e}"
        return None

    assert trouble(kernel, range(4)) is None
    lines = kernel.modules[0].text.split("\n")
    begin = {name: i for i, line in enumerate(lines) for name in ("mla_sparse", "mla_combine") if f".entry {name}" in line}
    first, last = begin["mla_sparse"], begin["mla_combine"]
    assert first < last
    found = [i for i in range(first, last) if SYNCHRONISING.search(lines[i]) and not lines[i].lstrip().startswith("//")]
    assert len(found) > 50
    source = Path(sm100.__file__).read_text().split("\n")
    promised = {i + 2 for i, line in enumerate(source) if any(words in line for words in PROMISED)}
    assert len(promised) == 2 and all("mbarrier_wait" in source[i - 1] for i in promised)
    file, at = re.search(r'\.file\s+(\d+) ".*sm100/sparse_decode\.py"', kernel.modules[0].text)[1], {}
    for i, line in enumerate(lines):
        loc = re.match(rf"\s*\.loc\s+{file} (\d+)", line)
        at[i] = int(loc[1]) if loc else at.get(i - 1, 0)
    found = [i for i in found if at[i] not in promised]
    unnoticed = [lines[i].strip() for i in found[::SAMPLE] if trouble(without(kernel, i)) is None]
    assert [line for line in unnoticed if not line.startswith("barrier.cluster.wait")] == []
