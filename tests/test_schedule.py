"""The plan: errors of DecodePlan and plan_decode, the closed form behind the device planner, the planner itself."""

import dataclasses
import math
import random
import types

import numpy as np
import pytest
import torch

from mla_cute import DecodePlan, jit, plan_decode, reference, schedule
from mla_cute.target import target
from mla_cute.testing import assert_bitwise
from mla_cute.validate import Problem

TOPK = 2048


def shapes(b, s_q=1, h_q=128, topk=TOPK, device="cpu"):
    """q and indices for plan_decode, which looks at their shapes only: no memory behind them."""
    q = torch.empty(1, dtype=torch.bfloat16, device=device).expand(b, s_q, h_q, 576)
    return q, torch.empty(1, dtype=torch.int32, device=device).expand(b, s_q, topk)


# ---- DecodePlan and plan_decode on the CPU


def test_plan_on_cpu_is_the_references():
    lengths = torch.tensor([0, 5, 64, 65, 5000, -3, TOPK], dtype=torch.int32)
    for length in (None, lengths):
        plan = plan_decode(*shapes(7, s_q=2), topk_length=length)
        keys = reference.sparse_num_keys(7, TOPK, length)
        metadata, num_splits = reference.plan(keys, 33)  # 132 SMs // (2 query tokens * 2 head tiles)
        assert_bitwise(plan.metadata, metadata)
        assert_bitwise(plan.num_splits, num_splits)
        assert (plan.b, plan.s_q, plan.h_q, plan.topk, plan.num_parts) == (7, 2, 128, TOPK, 33)
        assert (plan.tile_n, plan.fixed_overhead_blocks, plan.has_topk_length) == (64, 5, length is not None)
        assert (plan.extra_topk, plan.has_extra_topk_length) == (0, False)
        assert isinstance(plan, DecodePlan) and plan.config == reference.Config()


@pytest.mark.parametrize("tile_n", [64, 32])
def test_plan_with_extra_keys(tile_n):
    """Blocks of the main keys, at least one, and behind them those of the extra keys."""
    length, extra_length = (torch.tensor(n, dtype=torch.int32) for n in ([0, 65, 64, 9999, -3], [0, 1, 640, -7, 9999]))
    q, indices = shapes(5)
    extra = torch.empty(1, dtype=torch.int32).expand(5, 1, 640)
    config = reference.Config(tile_n=tile_n)

    def check(blocks, **lengths):
        plan = plan_decode(q, indices, extra_indices=extra, **lengths, config=config)
        expected = reference.plan([n * tile_n for n in blocks], 66, tile_n=tile_n)
        assert_bitwise(plan.metadata, expected[0])
        assert_bitwise(plan.num_splits, expected[1])
        assert (plan.extra_topk, plan.has_extra_topk_length) == (640, "extra_topk_length" in lengths)

    main, more = TOPK // tile_n, 640 // tile_n
    mains = [1, 128 // tile_n if tile_n == 64 else 3, 64 // tile_n, main, 1]
    mores = [0, 1, more, 0, more]
    check([main + more] * 5)
    check([n + more for n in mains], topk_length=length)
    check([main + n for n in mores], extra_topk_length=extra_length)
    check([n + m for n, m in zip(mains, mores)], topk_length=length, extra_topk_length=extra_length)


def test_the_problem_of_a_plan(monkeypatch):
    seen = []
    monkeypatch.setattr(reference.Config, "check", lambda self, problem: seen.append(problem))
    q, indices = shapes(3)
    plan_decode(q, indices)
    plan_decode(q[..., :512], indices, extra_indices=indices[..., :7], extra_topk_length=torch.zeros(3, dtype=torch.int32))
    model1 = {"d_qk": 512, "kv_format": "model1"}
    assert seen == [Problem(), Problem(**model1, has_extra=True, has_extra_topk_length=True)]


def test_plan_takes_config_and_impl():
    config = reference.Config(tile_n=32, fixed_overhead_blocks=1)
    for impl in (None, reference, "mla_cute.reference"):
        plan = plan_decode(*shapes(3), config=config, impl=impl)
        assert_bitwise(plan.metadata, reference.plan([TOPK] * 3, 66, tile_n=32, fixed_overhead_blocks=1)[0])
        assert (plan.tile_n, plan.fixed_overhead_blocks, plan.config) == (32, 1, config)
    with pytest.raises(ValueError, match="tile_n"):
        plan_decode(*shapes(3), config=reference.Config(tile_n=0))


def test_empty_batch():
    plan = plan_decode(*shapes(0))
    assert plan.metadata.tolist() == [[0, -1, 0, 0, 0, 0, 0, 0]] * 66
    assert plan.num_splits.tolist() == [0]


CALL = {"b": 7, "s_q": 1, "h_q": 128, "topk": TOPK, "has_topk_length": False, "device": torch.device("cpu")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": 8}, "plan: was made for b 7, got a call with b 8"),
        ({"s_q": 2}, "s_q 1, got a call with s_q 2"),
        ({"h_q": 64}, "h_q 128, got a call with h_q 64"),
        ({"topk": 64}, "topk 2048, got a call with topk 64"),
        ({"extra_topk": 64}, "extra_topk 0, got a call with extra_topk 64"),
        (
            {"has_extra_topk_length": True},
            "has_extra_topk_length False, got a call with has_extra_topk_length True",
        ),
        ({"has_topk_length": True}, "has_topk_length False, got a call with has_topk_length True"),
        ({"device": torch.device("cuda", 0)}, "device cpu, got a call with device cuda:0"),
        ({"config": reference.Config(tile_n=32)}, "config.tile_n 64, got a call with 32"),
        ({"config": reference.Config(fixed_overhead_blocks=3)}, "config.fixed_overhead_blocks 5, got a call with 3"),
    ],
)
def test_check_names_the_field(change, message):
    plan = plan_decode(*shapes(7))
    plan.check(**CALL)
    plan.check(**CALL, config=reference.Config())
    with pytest.raises(ValueError, match="^plan: ") as error:
        plan.check(**{**CALL, **change})
    assert message in str(error.value)


def test_check_compares_the_whole_config():
    @dataclasses.dataclass(frozen=True)
    class Config(reference.Config):
        num_stages: int = 2

    plan = plan_decode(*shapes(7), config=Config())
    plan.check(**CALL, config=Config())
    with pytest.raises(ValueError, match=r"num_stages=2.*num_stages=3"):
        plan.check(**CALL, config=Config(num_stages=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_parts": -3}, "num_parts: must be at least 1, got -3"),
        ({"num_parts": 66.0}, "num_parts: must be an int, got 66.0"),
        ({"num_parts": 65}, "metadata: must be int32 [65, 8], contiguous, got torch.int32 [66, 8]"),
        ({"metadata": lambda t: t[:1]}, "metadata: must be int32 [66, 8], contiguous, got torch.int32 [1, 8]"),
        ({"metadata": lambda t: t.float()}, "metadata: must be int32 [66, 8], contiguous, got torch.float32"),
        ({"metadata": lambda t: t.T.contiguous().T}, "contiguous, got torch.int32 [66, 8] with strides [1, 66]"),
        ({"metadata": lambda t: t.to_sparse()}, "metadata: must be a dense (strided) tensor, got torch.sparse_coo"),
        ({"num_splits": lambda t: t[:0]}, "num_splits: must be int32 [8], contiguous, got torch.int32 [0]"),
        ({"num_splits": lambda t: t.tolist()}, "num_splits: must be a torch.Tensor, got list"),
        ({"num_splits": lambda t: t.to("meta")}, "num_splits: must be on the device of metadata (cpu), got meta"),
        ({"b": 8}, "num_splits: must be int32 [9], contiguous, got torch.int32 [8]"),
    ],
)
def test_plan_holds_together(change, message):
    plan = plan_decode(*shapes(7))
    change = {name: value(getattr(plan, name)) if callable(value) else value for name, value in change.items()}
    with pytest.raises((TypeError, ValueError)) as error:
        dataclasses.replace(plan, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("q", "indices", "topk_length", "error", "message"),
    [
        ((2, 1, 128), (2, 1, 64), None, ValueError, "q: must be [b, s_q, h_q, d_qk], got shape [2, 1, 128]"),
        ((2, 65536, 1, 576), (2, 65536, 1), None, ValueError, "q: must have 1 <= s_q <= 65535 and"),
        ((2, 1, 129, 576), (2, 1, 64), None, ValueError, "1 <= h_q <= 128, got shape [2, 1, 129, 576]"),
        ((2, 1, 128, 576), (3, 1, 64), None, ValueError, "indices: shape must be [b, s_q, topk] = [2, 1, 1 or more]"),
        ((2, 1, 128, 576), (2, 1, 0), None, ValueError, "got [2, 1, 0]"),
        ((2, 1, 128, 576), None, None, TypeError, "indices: must be a torch.Tensor, got NoneType"),
        ((2, 1, 128, 576), (2, 1, 64), torch.zeros(2), TypeError, "topk_length: dtype must be int32"),
        ((2, 1, 128, 576), (2, 1, 64), torch.zeros(3, dtype=torch.int32), ValueError, "must be [b] = [2], got [3]"),
        ((2, 1, 128, 576), (2, 1, 64), torch.zeros(2, 1, dtype=torch.int32), ValueError, "topk_length: must be [b]"),
        ((2, 1, 128, 576), (2, 1, 64), torch.zeros(2, device="meta"), ValueError, "on the device of q (cpu), got meta"),
    ],
)
def test_errors(q, indices, topk_length, error, message):
    with pytest.raises(error) as raised:
        indices = None if indices is None else torch.empty(1).expand(indices)
        plan_decode(torch.empty(1).expand(q), indices, topk_length=topk_length)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"extra_indices": 3}, TypeError, "extra_indices: must be a torch.Tensor, got int"),
        (
            {"extra_indices": torch.zeros(7, 9)},
            ValueError,
            "extra_indices: must be [b, s_q, extra_topk], got shape [7, 9]",
        ),
        (
            {"extra_indices": torch.zeros(7, 2, 9)},
            ValueError,
            "extra_indices: shape must be [b, s_q, extra_topk] = [7, 1, 1 or more], got [7, 2, 9]",
        ),
        ({"extra_indices": torch.zeros(7, 1, 0)}, ValueError, "= [7, 1, 1 or more], got [7, 1, 0]"),
        ({"extra_indices": torch.zeros(7, 1, 9, device="meta")}, ValueError, "on the device of q (cpu), got meta"),
        (
            {"extra_topk_length": torch.zeros(7).int()},
            ValueError,
            "extra_indices: must be given with extra_topk_length, got None",
        ),
        (
            {"extra_indices": torch.zeros(7, 1, 9), "extra_topk_length": torch.zeros(7)},
            TypeError,
            "extra_topk_length: dtype must be int32, got torch.float32",
        ),
        (
            {"extra_indices": torch.zeros(7, 1, 9), "extra_topk_length": torch.zeros(8).int()},
            ValueError,
            "extra_topk_length: shape must be [b] = [7], got [8]",
        ),
    ],
)
def test_errors_of_extra_keys(extra, error, message):
    with pytest.raises(error) as raised:
        plan_decode(*shapes(7), **extra)
    assert message in str(raised.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": "a"}, TypeError, "config: must be a mla_cute.reference.Config, got 'a'"),
        ({"config": 3}, TypeError, "config: must be a mla_cute.reference.Config, got 3"),
        ({"config": {}}, TypeError, "config: must be a mla_cute.reference.Config, got {}"),
        ({"config": reference.Config(tile_n=64.5)}, ValueError, "tile_n: must be an int, got 64.5"),
        ({"impl": math}, TypeError, "impl: must be a module with Config, default_config, compile"),
        ({"topk_length": torch.zeros(7).int().to_sparse()}, TypeError, "topk_length: must be a dense (strided) tensor"),
        ({"q": torch.zeros(7, 1, 2, 576).to_sparse()}, TypeError, "q: must be a dense (strided) tensor"),
        ({"q": lambda: torch.nested.nested_tensor([torch.zeros(1, 2, 576)] * 7)}, TypeError, "got a nested tensor"),
        ({"indices": lambda: torch.nested.nested_tensor([torch.zeros(1, 2)] * 7)}, TypeError, "got a nested tensor"),
        (dict(zip(("q", "indices"), shapes(7, device="meta"))), ValueError, "q: device must be cpu or cuda, got meta"),
    ],
)
def test_errors_of_other_kinds(change, error, message):
    args = dict(zip(("q", "indices"), shapes(7)))
    args |= {name: value() if isinstance(value, types.FunctionType) else value for name, value in change.items()}
    with pytest.raises(error) as raised:
        plan_decode(args.pop("q"), args.pop("indices"), **args)
    assert message in str(raised.value)


# ---- the closed form: what schedule_kernel computes, against the walk of reference.plan


def closed_form(blocks, num_parts, overhead):
    """The three steps of schedule_kernel on numpy arrays, names as there."""
    b = len(blocks)
    cost = np.concatenate([[0], np.cumsum(np.asarray(blocks, dtype=np.int64) + overhead)])
    total = cost[b]
    payload = -(-total // num_parts) + overhead
    cuts = [(0, 0, 0, 0, 0)]  # request, block, split, count, requests cut
    x = 0
    while cuts[-1][0] < b:
        req, _, split, count, num_cut = cuts[-1]
        y = x + payload
        next_req = int(np.searchsorted(cost, y, side="right")) - 1
        x = min(max(y - overhead, cost[next_req]), total)
        assert y <= 2 * total + num_parts + overhead  # what _plan_by_kernel keeps below 2**31
        is_cut = int(x > cost[next_req])
        split = split + 1 if next_req == req else is_cut
        cuts.append((next_req, int(x - cost[next_req]), split, count + is_cut, num_cut + (split == 1)))
    used = len(cuts) - 1
    assert used <= num_parts and cuts[-1][:2] == (b, 0)
    slots = [count + num_cut - (block > 0) for _, block, _, count, num_cut in cuts]

    metadata = np.zeros((num_parts, 8), dtype=np.int32)
    num_splits = np.zeros(b + 1, dtype=np.int32)
    for p in range(num_parts):
        if p >= used:
            metadata[p] = [b, b - 1, 0, 0, 0, 0, 0, slots[used]]
            continue
        (req, block, split, count, _), (next_req, next_block, *_) = cuts[p], cuts[p + 1]
        first, last = int(block > 0), int(next_block > 0)
        end_req = next_req - 1 + last
        end_block = next_block or cost[next_req] - cost[end_req] - overhead
        if req == end_req:
            first = last = first | last
        metadata[p] = [req, end_req, block, end_block, split, first, last, slots[p]]
        num_splits[req + 1 : next_req + 1] = np.arange(req + 1, next_req + 1) + count
    return metadata, num_splits


def random_lengths(rng, b, topk):
    """Lengths of one of several characters; many at block borders, where an off-by-one would show."""
    kind = rng.randrange(6)
    if kind == 0:
        return [topk] * b
    if kind == 1:
        return [0] * b
    if kind == 2:  # one giant among dwarfs
        lengths = [rng.randrange(0, 3) for _ in range(b)]
        lengths[rng.randrange(b)] = topk
        return lengths
    if kind == 3:
        return [rng.randrange(topk + 1) for _ in range(b)]
    if kind == 4:
        return [min(topk, 64 * rng.randrange(topk // 64 + 1) + rng.choice((-1, 0, 1))) for _ in range(b)]
    return [int(topk * rng.random() ** 8) for _ in range(b)]


def test_closed_form_is_the_walk():
    rng = random.Random(0)
    for _ in range(4000):
        b = rng.choice((1, 2, 3, 7, 33, 74, 128, 300))
        topk = rng.choice((1, 63, 64, 65, 128, 640, 2048, 8192))
        num_parts = rng.choice((1, 2, 3, 16, 33, 66, 132, 148, 500))
        overhead = rng.choice((5, 5, 5, 3, 1, 0, 17))
        keys = [max(n, 1) for n in random_lengths(rng, b, topk)]
        metadata, num_splits = closed_form([(n - 1) // 64 + 1 for n in keys], num_parts, overhead)
        expected = reference.plan(keys, num_parts, fixed_overhead_blocks=overhead)
        case = (b, topk, num_parts, overhead, keys)
        assert (metadata == expected[0].numpy()).all(), case
        assert (num_splits == expected[1].numpy()).all(), case


def test_max_splits():
    """Without lengths it is exact, with any lengths an upper bound."""
    rng = random.Random(0)
    reached = 0
    for _ in range(2000):
        b, num_parts = rng.choice((1, 2, 3, 7, 33, 74, 128, 300)), rng.choice((1, 2, 3, 16, 33, 66, 132, 148, 500))
        topk, extra_topk = rng.choice((1, 63, 64, 65, 128, 640, 2048, 8192)), rng.choice((0, 0, 1, 64, 130, 1024))
        tile_n, overhead = rng.choice((64, 64, 32)), rng.choice((5, 5, 3, 1, 0, 17))
        key = b, topk, extra_topk
        how = num_parts, tile_n, overhead

        def splits(lengths, b=b, topk=topk, extra_topk=extra_topk, how=how):
            lengths = None if lengths is None else torch.tensor(lengths)
            keys = reference.sparse_num_keys(b, topk, lengths, extra_topk=extra_topk, tile_n=how[1])
            _, num_splits = reference.plan(keys, how[0], tile_n=how[1], fixed_overhead_blocks=how[2])
            return int(num_splits.diff().max())

        assert schedule.max_splits(*key, False, *how) == splits(None), (key, how)
        bound, got = schedule.max_splits(*key, True, *how), splits(random_lengths(rng, b, topk))
        assert got <= bound, (key, how)
        reached += 2 < got == bound
    assert reached > 50
    assert schedule.max_splits(0, 64, 0, False, 66, 64, 5) == schedule.max_splits(0, 64, 0, True, 66, 64, 5) == 1


def test_max_splits_of_a_plan():
    q, indices = shapes(7)
    plan = plan_decode(q, indices)
    assert plan.max_splits == plan.num_splits.diff().max()
    lengths = plan_decode(q, indices, topk_length=torch.full((7,), indices.shape[2], dtype=torch.int32))
    assert torch.equal(lengths.num_splits, plan.num_splits) and lengths.max_splits >= plan.max_splits


def test_scratch_size():
    assert schedule.scratch_size(1, 3, 128) == 0
    for h_q, groups, tiles in ((1, 1, 1), (16, 1, 1), (17, 2, 1), (64, 4, 1), (65, 5, 2), (128, 8, 2)):
        assert schedule.scratch_size(5, 3, h_q) == 10 * 3 * (groups * 16 * 512 + 2 * h_q + 2 * 2 * tiles)


def test_cost_limit():
    """The planner's 32-bit arithmetic refuses what it cannot count, before anything is launched."""
    where = target(torch.device("cpu"))._replace(load=lambda *_: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=r"indices: b \* \(blocks of topk \+ 5\) must be below about 2\*\*30, got"):
        schedule._plan_by_kernel(2**25, 64 * 32, None, 132, 64, 5, torch.device("cuda", 0), where)
    with pytest.raises(ValueError, match=r"indices: b \* \(blocks of topk and extra_topk \+ 5\) must be below about"):
        schedule._plan_by_kernel(2**25, 64, None, 132, 64, 5, torch.device("cuda", 0), where, extra_topk=64 * 31)


# ---- the kernel


@pytest.mark.compile
@pytest.mark.parametrize("use_workspace", [False, True], ids=["shared", "workspace"])
@pytest.mark.parametrize("has_extra_topk_length", [False, True], ids=["", "extra_topk_length"])
@pytest.mark.parametrize("has_topk_length", [False, True], ids=["uniform", "topk_length"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiles_without_spills(arch, has_topk_length, has_extra_topk_length, use_workspace):
    from mla_cute import schedule_kernel

    problem = schedule_kernel.PlanProblem(has_topk_length, use_workspace, has_extra_topk_length)
    found = jit.inspect(schedule_kernel, problem, None, arch)
    (name, usage), *others = found.resources.items()
    assert name.startswith(f"mla_schedule_{arch[:-1].replace('_', '')}") and not others
    assert usage["REG"] <= 64 and usage["STACK"] == 0 and usage["LOCAL"] == 0
    assert found.spill_bytes == 0 and not found.advisories
    assert "ld.local" not in found.ptx[0] and "ld.global.nc" not in found.ptx[0]  # .nc: the workspace is also written


LENGTHS = {
    "uniform": None,
    "zero": lambda g, b: torch.zeros(b),
    "full": lambda g, b: torch.full((b,), TOPK),
    "random": lambda g, b: torch.randint(0, TOPK + 1, (b,), generator=g),
    "skewed": lambda g, b: TOPK * torch.rand(b, generator=g) ** 8,
    "giant": lambda g, b: torch.where(torch.arange(b) == b // 2, TOPK, 1),
    "wild": lambda g, b: torch.randint(-(2**31), 2**31 - 1, (b,), generator=g),
    "borders": lambda g, b: 64 * torch.randint(0, 33, (b,), generator=g) + torch.randint(-1, 2, (b,), generator=g),
}


def make_lengths(kind, b, seed=0):
    g = torch.Generator().manual_seed(seed)
    return None if LENGTHS[kind] is None else LENGTHS[kind](g, b).to(torch.int32)


def assert_plan_is_reference(metadata, num_splits, b, topk, lengths, tile_n=64, overhead=5):
    keys = reference.sparse_num_keys(b, topk, lengths)
    expected = reference.plan(keys, metadata.shape[0], tile_n=tile_n, fixed_overhead_blocks=overhead)
    assert_bitwise(metadata.cpu(), expected[0], name="metadata")
    assert_bitwise(num_splits.cpu(), expected[1], name="num_splits")


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("b", [1, 2, 31, 32, 33, 74, 128, 1023, 1024, 1025, 4096, 16384, 16385, 65536])
def test_device_plan_is_the_references(device, b, kind):
    lengths = make_lengths(kind, b)
    on_device = None if lengths is None else lengths.to(device)
    # The reference takes 0.1 s for 65536 requests.
    for num_parts in (1, 2, 33, 66, 132, 148, 1024, 1025) if b <= 4096 else (33, 132, 1025):
        for tile_n, overhead in ((64, 5), (32, 0)) if b <= 4096 else ((64, 5),):
            plan = schedule._plan_by_kernel(b, TOPK, on_device, num_parts, tile_n, overhead, device, target(device))
            assert_plan_is_reference(*plan, b, TOPK, lengths, tile_n, overhead)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LENGTHS)
def test_workspace_variant_on_small_batches(device, kind, monkeypatch):
    from mla_cute import schedule_kernel

    monkeypatch.setattr(schedule_kernel, "needs_workspace", lambda b, num_parts: True)
    for b in (1, 74, 1025):
        lengths = make_lengths(kind, b)
        on_device = None if lengths is None else lengths.to(device)
        plan = schedule._plan_by_kernel(b, TOPK, on_device, 132, 64, 5, device, target(device))
        assert_plan_is_reference(*plan, b, TOPK, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"), [(1, 64, 64), (1, 128, 2048), (2, 128, 640), (3, 1, 1), (200, 128, 128)]
)
def test_plan_decode_on_the_device(device, s_q, h_q, topk):
    for b in (1, 74, 300):
        for kind in ("uniform", "random"):
            lengths = make_lengths(kind, b)
            on_device = None if lengths is None else lengths.to(device)
            plan = plan_decode(*shapes(b, s_q, h_q, topk, device), topk_length=on_device)
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            assert plan.num_parts == plan.config.num_parts(Problem(h_q=h_q), s_q, num_sms) == plan.metadata.shape[0]
            assert plan.device == device
            assert_plan_is_reference(plan.metadata, plan.num_splits, b, topk, lengths, overhead=plan.fixed_overhead_blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [("uniform", "uniform"), ("random", "uniform"), ("uniform", "wild"), ("borders", "borders")])
@pytest.mark.parametrize("b", [1, 74, 1025, 16385])
def test_device_plan_with_extra_keys(device, b, kinds):
    length, extra_length = (make_lengths(kind, b, seed) for seed, kind in enumerate(kinds))
    on_device = [None if t is None else t.to(device) for t in (length, extra_length)]
    q, indices = shapes(b, device=device)
    extra = torch.empty(1, dtype=torch.int32, device=device).expand(b, 1, 650)
    plan = plan_decode(q, indices, topk_length=on_device[0], extra_indices=extra, extra_topk_length=on_device[1])
    keys = reference.sparse_num_keys(b, TOPK, length, extra_topk=650, extra_topk_length=extra_length)
    expected = reference.plan(keys, plan.num_parts, fixed_overhead_blocks=plan.fixed_overhead_blocks)
    assert_bitwise(plan.metadata.cpu(), expected[0], name="metadata")
    assert_bitwise(plan.num_splits.cpu(), expected[1], name="num_splits")


@pytest.mark.gpu
def test_strided_lengths(device):
    lengths = make_lengths("random", 74)
    spread = torch.full((74, 3), -1, dtype=torch.int32)
    spread[:, 1] = lengths
    plan = plan_decode(*shapes(74, device=device), topk_length=spread.to(device)[:, 1])
    assert_plan_is_reference(plan.metadata, plan.num_splits, 74, TOPK, lengths, overhead=plan.fixed_overhead_blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("b", [74, 20000])
def test_captured_plan_follows_the_lengths(device, b):
    lengths = make_lengths("random", b).to(device)
    q, indices = shapes(b, device=device)
    plan_decode(q, indices, topk_length=lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_decode(q, indices, topk_length=lengths)
    for kind in ("skewed", "zero", "giant"):
        new = make_lengths(kind, b, seed=1)
        lengths.copy_(new)
        graph.replay()
        assert_plan_is_reference(plan.metadata, plan.num_splits, b, TOPK, new, overhead=plan.fixed_overhead_blocks)


@pytest.mark.gpu
def test_repeated_plans_are_equal(device):
    """A race between the steps would show as a difference sooner or later."""
    lengths = make_lengths("random", 4096).to(device)
    first = schedule._plan_by_kernel(4096, TOPK, lengths, 132, 64, 5, device, target(device))
    for _ in range(200):
        again = schedule._plan_by_kernel(4096, TOPK, lengths, 132, 64, 5, device, target(device))
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize(
    ("b", "extra_topk", "num_parts", "charge", "splits"),
    [(16, 0, 66, 1, 4), (66, 0, 132, 1, 3), (67, 0, 132, 2, 3), (128, 0, 33, 2, 2), (128, 0, 132, 2, 1), (64, 1024, 33, 2, 2)],
)
def test_overhead_by_load(b, extra_topk, num_parts, charge, splits):
    """Few blocks a part are dealt evenly; of more, requests are kept whole where that costs little."""
    for given, expected in ((None, charge), (7, 7)):
        config = types.SimpleNamespace(tile_n=64, fixed_overhead_blocks=given)
        assert schedule.overhead(config, b, 2048, extra_topk, num_parts) == expected
    blocks = 32 + extra_topk // 64
    _, num_splits = reference.plan([64 * blocks] * b, num_parts, fixed_overhead_blocks=charge)
    assert num_splits.diff().max() == splits == schedule.max_splits(b, 2048, extra_topk, False, num_parts, 64, charge)


def test_most_splits_covers_every_charge_in_use():
    """A plan is tensors: one cut with another charge than the load's must not lose its combine."""
    rng, by_load = random.Random(0), types.SimpleNamespace(tile_n=64, fixed_overhead_blocks=None)
    less = 0
    for _ in range(3000):
        b, num_parts, topk = rng.randint(1, 200), rng.randint(1, 140), 64 * rng.randint(1, 40)
        most = schedule.most_splits(by_load, b, topk, 0, False, num_parts)
        for charge in schedule.CHARGES:
            splits = reference.plan([topk] * b, num_parts, fixed_overhead_blocks=charge)[1].diff().max()
            assert splits <= most
            own = types.SimpleNamespace(tile_n=64, fixed_overhead_blocks=charge)
            assert schedule.most_splits(own, b, topk, 0, False, num_parts) == splits
        less += schedule.max_splits(b, topk, 0, False, num_parts, 64, schedule.overhead(by_load, b, topk, 0, num_parts)) < most
    assert less > 0  # it asks something
