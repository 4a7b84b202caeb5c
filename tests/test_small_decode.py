"""The Hopper kernel of small batches: arithmetic of Config, what the compiler makes of it (compile), what it computes
(emulate, gpu). Which calls it serves: tests/test_sparse_decode.py."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from decode_checks import compile_kernels, decode_and_check
from decode_numerics import Call, Tokens
from test_decode_numerics import check, exponents, rising, steps
from test_emulator_kernels import CASES as PLANNED
from test_emulator_kernels import CLUSTERED, in_all_schedules
from test_emulator_mutations import SYNCHRONISING, without
from test_emulator_mutations import trouble as of_kernel
from test_sparse_decode import BEYOND, EXTRA, FORMATS, H200, MODEL1

import mla_cute
import mla_cute.sm90.sparse_decode_small as small
from mla_cute import emulator, jit, reference
from mla_cute.emulator.run import load
from mla_cute.kv_cache import FORMATS as LAYOUTS
from mla_cute.kv_cache import quantize_kv_cache
from mla_cute.testing import Case, assert_bitwise, make_inputs
from mla_cute.validate import Problem

IMPL = small.__name__

# ---- cpu tier ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tile_n": 32}, "tile_n must be 64, got 32"),
        ({"tile_n": 64.0}, "tile_n: must be an int, got 64.0"),
        ({"fixed_overhead_blocks": 0}, "fixed_overhead_blocks must be at least 1, got 0"),
        ({"tile_h": 64}, "tile_h must be None, 16 or 32, got 64"),
        ({"tile_h": 16.0}, "tile_h must be None, 16 or 32, got 16.0"),
        ({"cluster": 0}, "cluster must be None or 1 to 16, got 0"),
        ({"cluster": 17}, "cluster must be None or 1 to 16, got 17"),
        ({"cluster": True}, "cluster: must be an int, got True"),
    ],
    ids=str,
)
def test_config_refuses(change, words):
    with pytest.raises(ValueError, match=words):
        small.Config(**change).check(Problem(h_q=128))


def test_config_refuses_what_shared_memory_does_not_hold(monkeypatch):
    needed = small.Config().smem_bytes(LAYOUTS["v32"], 32)
    monkeypatch.setattr(small, "SMEM_LIMIT", needed - 1)
    with pytest.raises(ValueError, match=f"needs {needed} bytes, the limit is {needed - 1}"):
        small.Config().check(Problem(h_q=128))
    monkeypatch.setattr(small, "SMEM_LIMIT", needed)
    small.Config().check(Problem(h_q=128))


@pytest.mark.parametrize(
    ("h_q", "b", "s_q", "topk", "extra_topk", "size"),
    [
        (128, 1, 1, 2048, 0, 16),  # 4 tiles of heads, of 7 clusters that run at once; 2 blocks a CTA
        (128, 2, 1, 2048, 0, 9),  # 8 tiles of 9
        (128, 4, 1, 2048, 0, 6),  # 16 of 17
        (128, 16, 1, 2048, 0, 2),  # 64 of 66
        (64, 1, 1, 2048, 0, 16),
        (16, 1, 1, 2048, 0, 16),
        (16, 4, 1, 2048, 0, 16),
        (64, 2, 2, 128, 512, 9),
        (16, 1, 1, 64, 0, 16),  # one block; the merge is shared
        (1, 133, 1, 2048, 0, 4),  # in five waves
        (64, 0, 1, 2048, 0, 16),
    ],
)
def test_what_the_load_decides(h_q, b, s_q, topk, extra_topk, size):
    problem = Problem(h_q=h_q)
    load = problem, b, s_q, topk, extra_topk, 132, H200.__getitem__
    assert small.Config().settle(*load) == (small.Config(), size)
    assert small.Config(cluster=7).settle(*load) == (small.Config(), 7)
    assert small.Config(cluster=7).kernels() == [small.Config()]  # a launch's argument


def test_what_no_launch_takes():
    how = Problem(h_q=64), 1, 1, 2048, 0, 132
    with pytest.raises(ValueError, match="config: cluster must be of a size that this GPU runs, got 12 for 1 requests"):
        small.Config(cluster=12).settle(*how, lambda size: 0)
    assert small.Config().settle(*how, lambda size: 0) == (small.Config(), 1)
    with pytest.raises(ValueError, match="q: must have at most 65535 requests for sm90.sparse_decode_small, got 65536"):
        small.Config().settle(Problem(h_q=64), 65536, 1, 2048, 0, 132, H200.__getitem__)
    assert small.Config().settle(Problem(h_q=64), 65535, 1, 2048, 0, 132, H200.__getitem__)[1] == 1


@pytest.mark.parametrize("fmt", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("heads", [16, 32])
def test_what_arrives_has_room(fmt, heads):
    """It lies where records were."""
    for size in range(1, small.MAX_CLUSTER + 1):
        assert -(-512 // 16 // size) * size <= small.MAX_ARRIVING
    arriving = small.MAX_ARRIVING * heads * (16 * 2 + 4) + small.MAX_CLUSTER * heads * 4
    assert arriving <= small.STAGES * small.Config().stage_bytes(fmt)


@pytest.mark.parametrize("fmt", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("heads", [16, 32])
def test_q_comes_in_where_v_will_be(fmt, heads):
    assert heads * (fmt.d_qk * 2 + 32) <= 64 * 512 * 2


# ---- compile tier ----


@pytest.mark.compile
@pytest.mark.parametrize(
    "fields",
    [
        {"h_q": 128},
        {"h_q": 16, "has_topk_length": True, "has_attn_sink": True},
        {"h_q": 64, **EXTRA},
        {"h_q": 128, **MODEL1},
        {"h_q": 64, **MODEL1, "has_topk_length": True},
        {"h_q": 5, **MODEL1, **EXTRA},
    ],
    ids=lambda fields: "-".join(f"{k}{v}" for k, v in fields.items()),
)
def test_compiles_without_spills(fields):
    problem = Problem(**fields)
    config = small.default_config(problem)
    seen = jit.inspect(small, problem, config, "sm_90a")
    ((name, usage),) = seen.resources.items()
    assert name.startswith("mla_sparse_decode_small_sm90")
    assert (usage["STACK"], usage["LOCAL"], seen.spill_bytes) == (0, 0, 0)
    assert usage["REG"] <= 128  # 65,536 over 512 threads
    assert seen.advisories == ()  # no WGMMA serialised, no wait injected
    assert seen.seconds < 30
    (ptx,) = seen.ptx
    # QK of a quarter of the columns; V32's quarter of rope in bf16. PV: two tiles of 64 columns, 64 keys.
    n, rope = config.heads(problem), problem.d_qk - 512
    assert Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) \{[^}]*\}, (.)", ptx)) == Counter(
        {
            (f"m64n{n}k16.f32.f16.f16", "{"): 128 // 16,
            (f"m64n{n}k16.f32.bf16.bf16", "{"): rope // 64,
            (f"m64n{n}k16.f32.f16.f16", "%"): 2 * 64 // 16,
        }
    )
    # As in the kernel of large batches: the emulator does not miss what lets ptxas use A's registers again.
    steps = re.findall(r"wgmma\.(fence|mma_async|commit_group|wait_group)\S*(?:[ \t]*(\d);)?", ptx)
    units = ["fence mma commit"] * (rope > 0) + ["fence mma mma commit"] * 4
    units = [f"{'wait1 ' if i >= 2 else ''}{unit}" for i, unit in enumerate(units)]
    names = {"mma_async": "mma", "commit_group": "commit", "wait_group": "wait"}
    assert " ".join(names.get(step, step) + count for step, count in steps) == " ".join(
        ["wait0", *units, "wait0 fence", *["mma"] * 8, "commit wait0"]
    )


# ---- emulate tier ----


EMULATED = [
    *PLANNED[1:8:3],
    *((case, min(num_sms, 12)) for case, num_sms in CLUSTERED[1:6]),
    (Case(b=1, h_q=33, s_kv=700, topk=640, scales="random", sink=True), 5),  # 5 x 10: several steps
    (Case(b=1, h_q=16, s_kv=700, topk=500, kv_format="model1", sink=True, holes=True), 3),
    (Case(b=2, h_q=32, s_kv=300, topk=300), 1),  # 1 x 5
]


@pytest.mark.emulate
@pytest.mark.parametrize(("case", "num_sms"), EMULATED, ids=[f"{case}-{num_sms}" for case, num_sms in EMULATED])
def test_in_the_emulator(case, num_sms):
    in_all_schedules(case, num_sms, 3, impl=IMPL)


# Range and precision: tests/test_decode_numerics.py has more, of the kernel of large batches.


@pytest.mark.emulate
@pytest.mark.parametrize("num_sms", [1, 3])  # CTAs of a cluster
@pytest.mark.parametrize("between", ["tokens", "tiles", "both"])
@pytest.mark.parametrize("fmt", LAYOUTS.values(), ids=LAYOUTS)
def test_scales_that_differ(fmt, between, num_sms):
    """By 2^24 between the tiles of a token or between tokens: no value loses more than rounding, in its piece neither."""
    tokens = Tokens.draw(fmt, 200)
    n, tiles = tokens.scales.shape
    tokens.scales *= exponents(12, *{"tokens": (n, 1), "tiles": (1, tiles), "both": (n, tiles)}[between])
    check(Call.draw(tokens, [190, 30]).by_rope_alone(), with_reference=False, num_sms=num_sms, impl=IMPL)


@pytest.mark.emulate
def test_a_head_among_larger_ones():
    """Its piece is 2^-41 of another one's in the same columns: no head takes another one's bits."""
    n = 1024
    latent, rope = torch.full((n, 512), 448.0), torch.zeros(n, 64)
    latent[0, 384:] = 2.0**-22
    rope[0, 0] = 100.0
    cache = quantize_kv_cache(torch.cat([latent, rope], 1).bfloat16().view(n // 64, 64, 1, 576), kv_format=LAYOUTS["v32"])
    q = torch.zeros(1, 1, 2, 576, dtype=torch.bfloat16)
    q[0, 0, 1, 512] = 1.0  # the second head attends the first key alone, the first one all of them
    indices = torch.arange(n, dtype=torch.int32).view(1, 1, n)
    with emulator.session(num_sms=1):
        out, _ = mla_cute.sparse_decode(q, cache, indices, softmax_scale=1.0, impl=small, backend="emulator")
    exact, _ = reference.sparse_decode(q, cache, indices, softmax_scale=1.0, dtype=torch.float64, out_dtype=torch.float64)
    assert ((out.double() - exact).abs() <= 0.005 * exact.abs()).all()


@pytest.mark.emulate
@pytest.mark.parametrize("num_sms", [1, 2])
@pytest.mark.parametrize("values", [(0, 0, 0, 40), (0, 5, 10, 15, 20), (30, 20, 0, -40)], ids=str)
@pytest.mark.parametrize("fmt", LAYOUTS.values(), ids=LAYOUTS)
def test_rising_and_falling_maxima(fmt, values, num_sms):
    """From block to block, in steps of a CTA and between CTAs."""
    check(rising(fmt, steps(*values)), lse_error=2e-5, num_sms=num_sms, impl=IMPL)


SIZE = 2
LENGTHS = (300, 60)  # three blocks for one CTA and two for the other; one for one and none for the other


@pytest.mark.emulate
@pytest.mark.parametrize("fmt", LAYOUTS.values(), ids=LAYOUTS)
def test_every_synchronisation_is_missed_when_it_is_gone(fmt):
    problem = Problem(h_q=24, d_qk=fmt.d_qk, kv_format=fmt.name, has_topk_length=True, has_attn_sink=True)
    kernel = load(small, problem, small.default_config(problem), "sm_90a")
    x = make_inputs(Case(b=2, h_q=24, topk=320, s_kv=400, kv_format=fmt.name, sink=True, holes=True, strided=False))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    ours = {"softmax_scale": x.softmax_scale, "topk_length": lengths, "attn_sink": x.attn_sink}
    unread = torch.full((1, 8), -1, dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)  # where a plan would be
    case = x, lengths, unread, reference.sparse_decode(x.q, x.kv_cache, x.indices, **ours)
    found, waits = {}, 0
    for i, line in enumerate(kernel.modules[0].text.split("\n")):
        match = SYNCHRONISING.search(line) or re.match(r"\s*(barrier\.cluster\.\w+)", line)
        if match and not line.lstrip().startswith("//"):
            name = re.match(r"griddepcontrol\.wait|barrier\.cluster\.\w+|\w+\.\w+", line[match.start() :].lstrip())[0]
            waits += name == "wgmma.wait_group" and line.strip().endswith("0;")  # for PV, for QK, for PV
            if not (waits == 1 and name.startswith("wgmma")):  # in QK they order registers: see test_compiles_without_spills
                found[i] = name
    assert len(found) > 15
    assert of_kernel(kernel, case, (0, 1), 0, SIZE) is None
    unnoticed = Counter(what for i, what in found.items() if of_kernel(without(kernel, i), case, (0, 1), 0, SIZE) is None)
    # Nothing is launched ahead here: that has a test on a GPU. In MODEL1 the barrier for rope's exponents stands in for those
    # before it, for Q and for V.
    assert unnoticed == {"griddepcontrol.wait": 1} | ({"bar.sync": 2} if fmt.name == "model1" else {}), found


# ---- gpu tier ----


GPU = [case for case in BEYOND + FORMATS if case.b <= 74 and case.topk <= 20000][::2]


@pytest.fixture(scope="module")
def compiled():
    compile_kernels(GPU, IMPL)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", GPU, ids=str)
def test_on_the_gpu(case):
    decode_and_check(make_inputs(case, "cuda"), IMPL)


@pytest.mark.gpu
@pytest.mark.parametrize("size", range(1, 17))
def test_every_size_of_cluster(size):
    """The same numbers whatever the size, and the same bits in every run of one."""
    x = make_inputs(Case(b=1, h_q=40, s_kv=3000, topk=1500, topk_length=True, sink=True, holes=True), "cuda")
    config = dataclasses.replace(small.Config(), cluster=size)
    first = decode_and_check(x, IMPL, config=config)
    for _ in range(20):
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=IMPL, config=config)
        assert_bitwise(out, first[0], name="out")
        assert_bitwise(lse, first[1], name="lse")
