"""torch.compile and torch.export through the public functions, and the ops themselves: numbers as without them."""

import dataclasses
import io
import re
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import mla_cute
from mla_cute import emulator, flash_mla, interface, reference, torch_ops
from mla_cute.emulator.machine import GlobalMemory
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs

CASE = Case(b=3, h_q=5, s_q=2, s_kv=200, topk=133, page_block_size=16, topk_length=True, sink=True, holes=True)
EXTRA = dataclasses.replace(
    CASE, kv_format="model1", extra_topk=70, extra_page_block_size=32, extra_topk_length=True, seed=1
)
BARE = Case(b=3, h_q=64, s_kv=100, topk=33, page_block_size=16)
cases = pytest.mark.parametrize("case", [CASE, EXTRA, BARE], ids=str)


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()


class Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, _):
        self.count += 1
        return graph.forward


def compiled(fn, backend="aot_eager", **options):
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def decode(x, plan=None, **options):
    return mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, **options)


def make_plan(x, **options):
    return mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs(), **options)


def batches(case, *sizes):
    return [make_inputs(dataclasses.replace(case, b=b, seed=b)) for b in sizes]


def assert_same(got, x):
    """Bits and layout of a call without a compiler."""
    for ours, expected, name in zip(got, decode(x), ("out", "lse")):
        assert_bitwise(ours, expected, name=name)
        assert ours.stride() == expected.stride()


def poisoned_outputs(x):
    """Strided out and lse, filled with 3, and the memory around them."""
    b, s_q, h_q, _ = x.q.shape
    out = torch.full((b, s_q + 1, h_q, 520), 3.0).bfloat16()
    lse = torch.full((s_q, b, h_q + 1), 3.0)
    return (out[:, :s_q, :, :512], lse[:, :, :h_q].transpose(0, 1)), (out, lse)


# ----- torch.compile --------------------------------------------------------------------------------------------------


@cases
def test_without_a_plan(case):
    f = compiled(decode)
    for x in batches(case, 3, 4, 7):
        assert_same(f(x), x)


def test_empty_batch():
    f = compiled(lambda q, kv_cache, indices: mla_cute.sparse_decode(q, kv_cache, indices))
    x = make_inputs(BARE)
    out, lse = f(x.q[:0], x.kv_cache, x.indices[:0])
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == ((0, 1, 64, 512), (0, 1, 64), torch.bfloat16, torch.float32)


@cases
def test_plan_from_outside(case):
    f = compiled(decode)
    for x in batches(case, 3, 4, 7):
        assert_same(f(x, make_plan(x)), x)


@cases
def test_plan_from_inside(case):
    f = compiled(lambda x: decode(x, make_plan(x)))
    for x in batches(case, 3, 4, 7):
        assert_same(f(x), x)


@cases
def test_plan_out_of_a_graph(case):
    """Whole: every field is that of a plan made without a compiler, and calls without one take it."""
    f = compiled(make_plan)
    for x in batches(case, 3, 4):
        got, expected = f(x), make_plan(x)
        for field in dataclasses.fields(mla_cute.DecodePlan):
            ours, theirs = getattr(got, field.name), getattr(expected, field.name)
            if isinstance(theirs, torch.Tensor):
                assert_bitwise(ours, theirs, name=field.name)
            else:
                assert (type(ours), ours) == (type(theirs), theirs), field.name
        got.__post_init__()
        assert_same(decode(x, got), x)


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=["both", "out", "lse"])
def test_writes_into_out_and_lse(given):
    f = compiled(lambda x, out, lse: decode(x, out=out, lse=lse))
    for x in batches(CASE, 3, 4, 7):
        (out, lse), pools = poisoned_outputs(x)
        got = f(x, out if given[0] else None, lse if given[1] else None)
        assert (got[0] is out, got[1] is lse) == given
        expected = decode(x)
        assert_bitwise(got[0], expected[0], name="out")
        assert_bitwise(got[1], expected[1], name="lse")
        if given[0]:
            assert_bitwise(out, expected[0], name="out")
        if given[1]:
            assert_bitwise(lse, expected[1], name="lse")
        for view, pool in zip((out, lse), pools):  # nothing around them was written
            view.fill_(3.0)
            assert (pool == 3.0).all()


@pytest.mark.parametrize("plan", ["none", "inside", "outside"])
def test_dynamic_batch_is_one_graph(plan):
    def f(x, given):
        return decode(x, make_plan(x) if plan == "inside" else given)

    graphs = Graphs()
    f = compiled(f, graphs)
    for x in batches(CASE, 3, 4, 7):
        given = make_plan(x) if plan == "outside" else None
        for t in (x.q, x.indices, x.topk_length, x.kv_cache, *([given.num_splits] if given else [])):
            torch._dynamo.mark_dynamic(t, 0)
        assert_same(f(x, given), x)
    assert graphs.count == 1


def test_every_shape_may_change():
    """Those that kernels are compiled for, heads and format, make new graphs; no change gives a wrong number."""
    f = compiled(lambda x: decode(x, make_plan(x)), dynamic=True)
    changes = ({}, {"s_q": 1}, {"s_q": 3}, {"topk": 64}, {"topk": 99}, {"h_q": 3}, {"h_q": 8}, {"kv_format": "model1"})
    for change in changes:
        x = make_inputs(dataclasses.replace(CASE, **change))
        assert_same(f(x), x)


def test_scale():
    x = make_inputs(CASE)
    f = compiled(lambda scale: mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, softmax_scale=scale))
    for scale in (None, 0.1, 0.2, 0.3, 1):
        expected = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, softmax_scale=scale)
        assert_bitwise(f(scale)[0], expected[0], name="out")
        assert_bitwise(f(scale)[1], expected[1], name="lse")


def test_config():
    """Its numbers change the plan: one that came from another config would show there."""
    made_outside = compiled(lambda x, config: make_plan(x, config=config))
    made_inside = compiled(lambda x, n: make_plan(x, config=reference.Config(tile_n=n)))
    with_plan = compiled(decode)
    with_both = compiled(lambda x, plan, config: decode(x, plan, config=config))
    x = make_inputs(CASE)
    expected = [make_plan(x, config=reference.Config(tile_n=n)).metadata for n in (8, 16, 32, 64)]
    assert len({tuple(t.flatten().tolist()) for t in expected}) == 4
    for n, metadata in zip((8, 16, 32, 64), expected):
        config = reference.Config(tile_n=n)
        for plan in (made_outside(x, config), made_inside(x, n)):
            assert_bitwise(plan.metadata, metadata, name="metadata")
            assert (plan.config, plan.tile_n) == (config, n)
        assert_same(with_plan(x, plan), x)
        assert_same(with_both(x, plan, config), x)
    with pytest.raises(ValueError, match=r"plan: was made with config.tile_n 64, got a call with 8"):
        with_both(x, plan, reference.Config(tile_n=8))


@pytest.mark.parametrize("impl", [reference, "mla_cute.reference"], ids=["module", "name"])
def test_impl(impl):
    x = make_inputs(CASE)
    f = compiled(lambda x: decode(x, make_plan(x, impl=impl), impl=impl))
    assert_same(f(x), x)


def test_impl_from_a_file(tmp_path):
    path = tmp_path / "nines.py"
    path.write_text(
        "from mla_cute.reference import Config, default_config\n"
        "def compile(problem, config, arch):\n"
        "    return lambda *args: (args[12].fill_(9), args[13].fill_(9))\n"
    )
    x = make_inputs(CASE)
    module = mla_cute.select_impl("cpu", str(path))
    try:
        for impl in (str(path), module):
            out, lse = compiled(lambda x, impl=impl: decode(x, impl=impl))(x)
            assert (out == 9).all() and (lse == 9).all()
    finally:
        del sys.modules[module.__name__]


class Layer(torch.nn.Module):
    """New tokens into a cache, a plan, and attention over it."""

    def __init__(self, num_blocks=4, device="cpu"):
        super().__init__()
        self.register_buffer("kv_cache", torch.zeros(num_blocks, 16, 1, 656, dtype=torch.uint8, device=device))

    def forward(self, q, latent, rope, slots, indices, topk_length):
        mla_cute.write_kv_cache(self.kv_cache, latent * 2, rope, slots)
        plan = mla_cute.plan_decode(q, indices, topk_length=topk_length)
        out, lse = mla_cute.sparse_decode(q * 2, self.kv_cache, indices, topk_length=topk_length, plan=plan)
        return out * 2, lse


def layer_inputs(b, seed=0, device="cpu", h_q=5, topk=33):
    g = torch.Generator().manual_seed(seed)
    bf16 = lambda *shape: torch.randn(shape, generator=g).to(torch.bfloat16)  # noqa: E731
    made = (
        *(bf16(b, 2, h_q, 576), bf16(3 * b, 512), bf16(3 * b, 64), torch.randperm(64, generator=g)[: 3 * b]),
        torch.randint(-1, 64, (b, 2, topk), generator=g, dtype=torch.int32),
        torch.randint(0, topk + 1, (b,), generator=g, dtype=torch.int32),
    )
    return [t.to(device) for t in made]


def assert_layer(layer, call, inputs):
    """`call`, which runs `layer` in some way, does what a layer with the same cache does."""
    twin = Layer(device=layer.kv_cache.device)
    twin.kv_cache.copy_(layer.kv_cache)
    at = layer.kv_cache.data_ptr()
    got, expected = call(*inputs), twin(*inputs)
    assert layer.kv_cache.data_ptr() == at
    assert_bitwise(layer.kv_cache, twin.kv_cache, name="kv_cache")
    assert_bitwise(got[0], expected[0], name="out")
    assert_bitwise(got[1], expected[1], name="lse")


@pytest.mark.parametrize("dynamic", [None, True])
def test_inductor_writes_the_cache_in_place(dynamic):
    from torch._inductor.utils import run_and_get_code

    layer = Layer()
    f = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    _, code = run_and_get_code(assert_layer, layer, f, layer_inputs(3))
    for b in (4, 5, 5):
        assert_layer(layer, f, layer_inputs(b, seed=b))
    (code,) = code
    # The cache goes into the op as it came: a copy of it, which may be half of a GPU's memory, would take another name.
    (written,) = re.findall(r"mla_cute\.write_kv_cache\.default\((\w+),", code)
    (read,) = re.findall(r"mla_cute\.sparse_decode\.default\(\w+, (\w+),", code)
    assert written == read and re.fullmatch(r"arg\d+_1", written), code
    assert not re.search(rf"copy_\([^)]*{written}|{written}\.copy_|{written}\.clone", code)


@pytest.mark.parametrize("fmt", [mla_cute.V32, mla_cute.MODEL1], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_write(fmt, dtype):
    g = torch.Generator().manual_seed(0)
    latent = torch.randn(9, fmt.d_nope, generator=g).to(torch.bfloat16)
    rope = torch.randn(9, 64, generator=g).to(torch.bfloat16)
    slots = torch.tensor([3, -1, 7, 0, 99, 12, 13, 14, 23])
    caches = [torch.full((3, 8, 1, fmt.bytes_per_token), 0xFF, dtype=torch.uint8) for _ in range(3)]
    mla_cute.write_kv_cache(caches[0], latent, rope, slots)
    f = compiled(lambda cache, **options: mla_cute.write_kv_cache(cache.view(dtype), latent, rope, slots, **options))
    assert f(caches[1]) is None
    f(caches[2], kv_format=fmt, scales="pow2")
    assert_bitwise(caches[1], caches[0], name="kv_cache")
    assert_bitwise(caches[2], caches[0], name="kv_cache")
    assert (caches[0] != 0xFF).any()


def test_calls_while_another_thread_compiles():
    """torch.compiler.is_compiling() may say so to the whole process: these have real tensors, and are made, not traced."""
    compiling, done = threading.Event(), threading.Event()

    def slow(graph, _):
        compiling.set()
        done.wait(60)
        return graph.forward

    x, other = make_inputs(CASE), make_inputs(BARE)
    expected = decode(x)
    latent, cache = torch.zeros(2, 512, dtype=torch.bfloat16), torch.full((1, 2, 1, 656), 0xFF, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        compiled_call = pool.submit(compiled(decode, slow), other)
        try:
            assert compiling.wait(60)
            out, lse = decode(x, make_plan(x))
            mla_cute.write_kv_cache(cache, latent, latent[:, :64], torch.arange(2))
            with pytest.raises(ValueError, match="num_splits: must be int32"):
                dataclasses.replace(make_plan(x), b=9)
        finally:
            done.set()
        assert_same(compiled_call.result(), other)
    assert_bitwise(out, expected[0], name="out")
    assert_bitwise(lse, expected[1], name="lse")
    assert not cache[..., :512].any()


def test_fake_tensors():
    """Shapes without a compiler, as for a memory estimate."""
    x = make_inputs(EXTRA)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {
            field.name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for field in dataclasses.fields(x)
            for value in [getattr(x, field.name)]
        }
        fake = dataclasses.replace(x, **fakes)
        plan = make_plan(fake)
        out, lse = decode(fake, plan)
        with pytest.raises(ValueError, match="indices: shape must be"):
            mla_cute.sparse_decode(fake.q, fake.kv_cache, fake.indices[:2])
    expected = decode(x)
    for ours, theirs in ((out, expected[0]), (lse, expected[1]), (plan.metadata, make_plan(x).metadata)):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert isinstance(ours, torch._subclasses.FakeTensor)


@pytest.mark.emulate
def test_emulator():
    x = make_inputs(Case(b=1, h_q=3, topk=5, s_kv=9))
    f = compiled(lambda x: decode(x, make_plan(x, backend="emulator"), backend="emulator"))
    with emulator.session(num_sms=2) as s:
        out, lse = f(x)
    assert len(s.grids) == 2 and s.findings == []  # plan and kernel: one block needs no combine
    ref_out, ref_lse = decode(x)
    assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
    assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


def call_flash_mla(x, meta, num_splits=None):
    options = {"softmax_scale": x.softmax_scale, "attn_sink": x.attn_sink, "topk_length": x.topk_length}
    return flash_mla.flash_mla_with_kvcache(
        x.q, x.kv_cache, None, None, 512, meta, num_splits, is_fp8_kvcache=True, indices=x.indices, **options
    )


def test_flash_mla():
    """A FlashMLASchedMeta that comes from outside is filled, one that was filled is used, one may live inside."""
    x = make_inputs(CASE)
    expected = call_flash_mla(x, flash_mla.FlashMLASchedMeta())
    f = compiled(call_flash_mla)
    meta = flash_mla.FlashMLASchedMeta()
    for call in (f, f, call_flash_mla):
        out, lse = call(x, meta)
        assert_bitwise(out, expected[0], name="out")
        assert_bitwise(lse, expected[1], name="lse")
        assert lse.stride() == expected[1].stride()
        assert meta.have_initialized and meta.tile_scheduler_metadata is meta._plan.metadata
    before = meta.tile_scheduler_metadata
    f(x, meta)
    assert meta.tile_scheduler_metadata is before

    def two_layers(x):
        meta, _ = flash_mla.get_mla_metadata()
        return call_flash_mla(x, meta), call_flash_mla(x, meta)

    def form_of_2025(x):
        b, s_q, h_q, _ = x.q.shape
        return call_flash_mla(
            x, *flash_mla.get_mla_metadata(x.topk_length, s_q * h_q, 1, h_q, True, x.indices.shape[2])
        )

    for out, lse in (*compiled(two_layers)(x), compiled(form_of_2025)(x)):
        assert_bitwise(out, expected[0], name="out")
        assert_bitwise(lse, expected[1], name="lse")


# ----- what is refused ------------------------------------------------------------------------------------------------


def _unimportable():
    module = types.ModuleType("nowhere_to_be_found")
    module.Config, module.default_config, module.compile = reference.Config, reference.default_config, reference.compile
    return module


@dataclasses.dataclass(frozen=True)
class _WithFloat(reference.Config):
    share: float = 0.5


REFUSED = [
    ({"q": lambda x: x.q.float()}, "q: dtype must be bfloat16, got torch.float32"),
    ({"q": lambda x: x.q[0]}, "q: must have 4 dims [b, s_q, h_q, d_qk], got shape [2, 5, 576]"),
    ({"q": lambda x: x.q.detach().clone().requires_grad_()}, "q: must not require grad: sparse_decode has no backward"),
    ({"kv_cache": lambda x: x.kv_cache[:, ::2]}, "kv_cache: token stride (dim 1) must be 656 bytes, got 1312"),
    ({"kv_cache": lambda x: x.kv_cache[..., :600]}, "kv_cache: last dim must be the bytes of a token, 656 (V32"),
    ({"indices": lambda x: x.indices[:2]}, "indices: shape must be [b, s_q, topk] with b 3, s_q 2 of q"),
    ({"topk_length": lambda x: x.topk_length.long()}, "topk_length: dtype must be int32, got torch.int64"),
    ({"out": lambda x: torch.empty(3, 2, 5, 500).bfloat16()}, "out: shape must be [b, s_q, h_q, d_v] = [3, 2, 5, 512]"),
    ({"softmax_scale": lambda x: -1.0}, "softmax_scale: must be positive and finite in fp32"),
    ({"softmax_scale": lambda x: True}, "softmax_scale: must be a Python float, got bool"),
    ({"plan": lambda x: (1, 2)}, "plan: must be a mla_cute.DecodePlan, got tuple"),
    ({"plan": make_plan}, "plan: was made for has_topk_length True, got a call with has_topk_length False"),
    ({"config": lambda x: {"tile_n": 64}}, "config: under torch.compile it must be a dataclass, got dict"),
    (
        {"config": lambda x: _WithFloat()},
        "config.share: under torch.compile it must be an int, a bool, a str, None or a",
    ),
    ({"config": lambda x: reference.Config(tile_n=0)}, "tile_n: must be at least 1, got 0"),
    ({"impl": lambda x: "no_such_module"}, "impl: must be an importable module or the path of a .py file"),
    (
        {"impl": lambda x: _unimportable()},
        "impl: under torch.compile it must be importable by its name, got nowhere_to_",
    ),
    ({"backend": lambda x: "gpu"}, 'backend: must be None or "emulator", got '),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused(change, message):
    x = make_inputs(CASE)
    (name, make) = next(iter(change.items()))
    value = make(x)
    args = {"q": x.q, "kv_cache": x.kv_cache, "indices": x.indices, name: value}
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(mla_cute.sparse_decode)(**args)


def test_config_of_another_class_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Config:
        tile_n: int = 64

    x = make_inputs(CASE)
    with pytest.raises(TypeError, match=r"config: must be a mla_cute.reference.Config, got a .*<locals>.Config"):
        compiled(decode)(x, config=Config())


def test_refused_by_the_others():
    x = make_inputs(CASE)
    with pytest.raises(Exception, match=re.escape("q: must be [b, s_q, h_q, d_qk], got shape [2, 5, 576]")):
        compiled(mla_cute.plan_decode)(x.q[0], x.indices)
    cache, latent = torch.zeros(3, 8, 1, 656, dtype=torch.uint8), torch.zeros(4, 512, dtype=torch.bfloat16)
    write = compiled(mla_cute.write_kv_cache)
    for change, message in (
        ({"rope": latent[:, :32]}, "rope: must be [n, 64], the RoPE values of V32, got [4, 32]"),
        ({"latent": latent.clone().requires_grad_()}, "latent: must not require grad: write_kv_cache has no backward"),
        ({"kv_format": mla_cute.MODEL1}, "kv_format: must be V32 for a cache of 656 bytes a token, got MODEL1"),
        ({"kv_format": "v32"}, "kv_format: must be a KVFormat"),
        ({"scales": "exact"}, 'scales: must be "pow2" or "amax", got "exact"'),
    ):
        args = {"kv_cache": cache, "latent": latent, "rope": latent[:, :64], "slots": torch.arange(4)} | change
        with pytest.raises(Exception, match=re.escape(message)):
            write(**args)
    assert not cache.any()


def test_plan_of_another_batch_is_refused_when_the_graph_runs():
    """A symbol of a graph for any batch has no value to compare with while it is traced."""
    graphs = Graphs()
    f = compiled(decode, graphs)
    small, large = batches(CASE, 3, 7)
    for x in (small, large):
        plan = make_plan(x)
        for t in (x.q, x.indices, x.topk_length, x.kv_cache, plan.num_splits):
            torch._dynamo.mark_dynamic(t, 0)
        f(x, plan)
    with pytest.raises(ValueError, match=r"^plan: was made for b 3, got a call with b 7"):
        f(large, make_plan(small))
    assert graphs.count == 1


# ----- the ops --------------------------------------------------------------------------------------------------------


def op_arguments(x):
    """Positional and keyword arguments of torch.ops.mla_cute.sparse_decode, with a plan."""
    plan = make_plan(x)
    shape = [plan.b, plan.s_q, plan.h_q, plan.topk, plan.has_topk_length, plan.extra_topk, plan.has_extra_topk_length]
    given = {
        "plan_metadata": plan.metadata,
        "plan_num_splits": plan.num_splits,
        "plan_shape": [int(n) for n in shape],
        "plan_config": torch_ops._text_of("plan.config", plan.config),
    }
    return (x.q, x.kv_cache, x.indices), x.kwargs() | given


@cases
def test_opcheck(case):
    x = make_inputs(case)
    args, options = op_arguments(x)
    b, s_q, h_q, _ = x.q.shape
    outputs = torch.empty(b, s_q, h_q, 512, dtype=torch.bfloat16), torch.empty(b, s_q, h_q)
    ops = torch.ops.mla_cute
    torch.library.opcheck(ops.sparse_decode.default, args, x.kwargs())
    torch.library.opcheck(ops.sparse_decode.default, args, options)
    torch.library.opcheck(ops.sparse_decode_out.default, (*args, *outputs), options)
    torch.library.opcheck(ops.plan_decode.default, (x.q, x.indices), x.plan_kwargs())


def test_opcheck_of_the_writer():
    g = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(4, n, generator=g).to(torch.bfloat16) for n in (512, 64))
    cache = torch.zeros(3, 8, 1, 656, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.mla_cute.write_kv_cache.default, (cache, latent, rope, torch.arange(4)))


@cases
def test_ops_called_directly(case):
    x = make_inputs(case)
    args, options = op_arguments(x)
    assert_same(torch.ops.mla_cute.sparse_decode(*args, **x.kwargs()), x)
    assert_same(torch.ops.mla_cute.sparse_decode(*args, **options), x)
    (out, lse), _ = poisoned_outputs(x)
    assert torch.ops.mla_cute.sparse_decode_out(*args, out, lse, **options) is None
    assert_bitwise(out, decode(x)[0], name="out")
    assert_bitwise(lse, decode(x)[1], name="lse")
    metadata, num_splits = torch.ops.mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs())
    assert_bitwise(metadata, make_plan(x).metadata, name="metadata")
    assert_bitwise(num_splits, make_plan(x).num_splits, name="num_splits")


QUANTIZED = [
    (fmt, options)
    for fmt, rules in ((mla_cute.V32, ("pow2", "amax", 0.3)), (mla_cute.MODEL1, ("pow2", 0.25)))
    for options in rules
]
quantized = pytest.mark.parametrize(("fmt", "scales"), QUANTIZED, ids=[f"{f.name}-{s}" for f, s in QUANTIZED])


def quantizing(fmt, scales, page=5):
    """Keys, scales for `quantize_kv_cache`, the cache that it makes, and an `out` with gaps between its pages."""
    keys = torch.randn(3, page, 1, fmt.d_qk, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    if not isinstance(scales, str):
        scales = torch.full((page, 1, 1), scales)
    expected = mla_cute.quantize_kv_cache(keys, kv_format=fmt, scales=scales)
    return keys, scales, expected, torch.zeros(3, page + 1, 1, fmt.bytes_per_token, dtype=torch.uint8)[:, :page]


@quantized
def test_opcheck_of_the_quantiser(fmt, scales):
    keys, scales, _, out = quantizing(fmt, scales)
    how = {"scales": scales} if isinstance(scales, str) else {"scale_values": scales}
    torch.library.opcheck(torch.ops.mla_cute.quantize_kv_cache.default, (keys,), {"kv_format": fmt.name} | how)
    torch.library.opcheck(torch.ops.mla_cute.quantize_kv_cache_out.default, (keys, out), {"kv_format": fmt.name} | how)


@quantized
def test_quantise(fmt, scales):
    keys, scales, expected, out = quantizing(fmt, scales)
    f = compiled(lambda keys, **options: mla_cute.quantize_kv_cache(keys, kv_format=fmt, scales=scales, **options))
    got = f(keys)
    assert_bitwise(got, expected, name="cache")
    assert got.stride() == expected.stride()
    assert f(keys, out=out) is out
    assert_bitwise(out, expected, name="out")


@pytest.mark.parametrize("fmt", [mla_cute.V32, mla_cute.MODEL1], ids=lambda fmt: fmt.name)
def test_dequantise(fmt):
    _, _, expected, out = quantizing(fmt, "pow2")
    out.copy_(expected)
    f = compiled(lambda cache: mla_cute.dequantize_kv_cache(cache, kv_format=fmt))
    for cache in (expected, out, out[1:], out[:, :1]):
        assert_bitwise(f(cache), mla_cute.dequantize_kv_cache(cache, kv_format=fmt), name="keys")


def test_to_cache_indices():
    f = compiled(lambda positions, table: mla_cute.to_cache_indices(positions, table, 8))
    table = torch.tensor([[3, -1, 7], [0, 1, 2]], dtype=torch.int32)
    for positions in (torch.arange(-2, 22).view(2, 3, 4), torch.arange(16).view(2, 2, 4)):
        assert_bitwise(f(positions, table), mla_cute.to_cache_indices(positions, table, 8), name="indices")
        graph = make_fx(lambda p, t: mla_cute.to_cache_indices(p, t, 8))(positions, table)
        assert_bitwise(graph(positions, table), mla_cute.to_cache_indices(positions, table, 8), name="indices")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    """Ops in the graph, not what they do, and no input baked in."""

    def f(q, kv_cache, indices, latent, rope, slots, keys):
        mla_cute.write_kv_cache(kv_cache, latent, rope, slots)
        plan = mla_cute.plan_decode(q, indices)
        cache = mla_cute.quantize_kv_cache(keys)
        return mla_cute.sparse_decode(q, kv_cache, indices, plan=plan), mla_cute.sparse_decode(q, cache, indices)

    q, latent, rope, slots, indices, _ = layer_inputs(3)
    keys, _, cache, _ = quantizing(mla_cute.V32, "pow2", 30)
    args = q, cache, indices, latent, rope, slots, keys
    graph = make_fx(f, tracing_mode=mode)(*[t.clone() for t in args])
    names = ["write_kv_cache", "plan_decode", "quantize_kv_cache", "sparse_decode", "sparse_decode"]
    assert [str(n.target).split(".")[1] for n in graph.graph.nodes if "mla_cute" in str(n.target)] == names
    assert not [n for n in graph.graph.nodes if n.op == "get_attr"]
    others = q * 2, torch.zeros_like(cache), indices.flip(2), latent * 2, rope * 2, slots.flip(0), keys * 2
    for (out, lse), expected in zip(graph(*[t.clone() for t in others]), f(*[t.clone() for t in others])):
        assert_bitwise(out, expected[0], name="out")
        assert_bitwise(lse, expected[1], name="lse")


def test_a_fake_tensor_among_real_ones():
    x, mode = make_inputs(CASE), torch._subclasses.FakeTensorMode()
    plan, needed = make_plan(x), "must be a tensor with memory as {} is, got a FakeTensor"
    for _ in range(2):
        with pytest.raises(TypeError, match="^kv_cache: " + needed.format("q")):
            decode(dataclasses.replace(x, kv_cache=mode.from_tensor(x.kv_cache)), plan)
        for name in ("indices", "topk_length"):
            with pytest.raises(TypeError, match=f"^{name}: " + needed.format("q")):
                make_plan(dataclasses.replace(x, **{name: mode.from_tensor(getattr(x, name))}))
        fakes = {name: mode.from_tensor(getattr(plan, name)) for name in ("metadata", "num_splits")}
        with pytest.raises(TypeError, match="^plan: must hold tensors with memory"):
            decode(x, dataclasses.replace(plan, **fakes))
        with pytest.raises(TypeError, match="^num_splits: " + needed.format("metadata")):
            dataclasses.replace(plan, num_splits=fakes["num_splits"])
        decode(x, plan)
    cache = torch.full((3, 8, 1, 656), 7, dtype=torch.uint8)
    latent = torch.zeros(4, 512, dtype=torch.bfloat16)
    args = {"kv_cache": cache, "latent": latent, "rope": latent[:, :64], "slots": torch.arange(4)}
    for name in args:
        fake = args | {name: mode.from_tensor(args[name])}
        other = "latent" if name == "kv_cache" else "kv_cache"
        for backend in (None, "emulator"):
            with pytest.raises(TypeError, match=f"^{name}: " + needed.format(other)):
                mla_cute.write_kv_cache(**fake, backend=backend)
    assert (cache == 7).all()
    keys, _, _, out = quantizing(mla_cute.V32, "pow2")
    with pytest.raises(TypeError, match="^out: " + needed.format("kv")):
        mla_cute.quantize_kv_cache(keys, out=mode.from_tensor(out))
    with pytest.raises(TypeError, match="^scales: " + needed.format("kv")):
        mla_cute.quantize_kv_cache(keys, scales=mode.from_tensor(torch.ones(1)))


def test_tensors_without_values():
    """Negative views, freed memory and torch.func's tensors, in the functions with few checks of their own."""
    x = make_inputs(CASE)
    latent = torch.ones(4, 512, dtype=torch.bfloat16)
    args = {"kv_cache": torch.zeros(3, 8, 1, 656, dtype=torch.uint8), "latent": latent, "rope": latent[:, :64].clone()}
    args["slots"] = torch.arange(4)
    mla_cute.write_kv_cache(**args)  # what passed before hides nothing
    for name in args:
        with pytest.raises(TypeError, match=f"^{name}: must hold its values"):
            mla_cute.write_kv_cache(**args | {name: torch._neg_view(args[name])})
        freed = args[name].clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^{name}: must have memory"):
            mla_cute.write_kv_cache(**args | {name: freed})
    with pytest.raises(TypeError, match="^latent: must be outside of torch.func's transforms"):
        torch.vmap(lambda t: mla_cute.write_kv_cache(**args | {"latent": t}))(torch.ones(2, 4, 512).bfloat16())
    with pytest.raises(TypeError, match="^q: must be outside of torch.func's transforms"):
        torch.vmap(lambda q: mla_cute.plan_decode(q, x.indices).metadata)(x.q[None])
    with pytest.raises(TypeError, match="^topk_length: must hold its values"):
        mla_cute.plan_decode(x.q, x.indices, topk_length=torch._neg_view(x.topk_length))
    for call in (mla_cute.plan_decode, lambda q, i: mla_cute.sparse_decode(q, x.kv_cache, i)):
        with pytest.raises(TypeError, match="^q: must not be traced by torch.jit.trace"):
            torch.jit.trace(call, (x.q, x.indices))
    keys, _, _, _ = quantizing(mla_cute.V32, "pow2")
    assert_bitwise(mla_cute.quantize_kv_cache(torch._neg_view(keys)), mla_cute.quantize_kv_cache(-keys))


@pytest.mark.emulate
def test_quantiser_reads_a_negative_view_in_the_kernel():
    keys, _, _, _ = quantizing(mla_cute.V32, "pow2")
    got = mla_cute.quantize_kv_cache(torch._neg_view(keys), backend="emulator")
    assert_bitwise(got, mla_cute.quantize_kv_cache(-keys))


def test_emulator_refuses_address_0():
    memory = GlobalMemory()
    memory.add(0, 0, "an empty one")
    with pytest.raises(ValueError, match=r"^argument 1 \[4\]: must have memory, got 16 bytes at address 0$"):
        memory.add(0, 16, "argument 1 [4]")


def test_quantiser_on_the_meta_device():
    keys = torch.zeros(3, 5, 1, 576, dtype=torch.bfloat16, device="meta")
    for scales in ("pow2", torch.ones(1, device="meta")):
        assert mla_cute.quantize_kv_cache(keys, scales=scales).shape == (3, 5, 1, 656)
    model1 = mla_cute.quantize_kv_cache(keys[..., :512], scales=torch.ones(1, device="meta"), kv_format=mla_cute.MODEL1)
    assert model1.shape == (3, 5, 1, 584)


@pytest.mark.parametrize("fake", [False, True])
def test_parts_of_a_plan(fake):
    """All of them or none; in the op and in what stands for it while a graph is made."""
    x = make_inputs(BARE)
    (q, kv_cache, indices), options = op_arguments(x)
    parts = {name: value for name, value in options.items() if name.startswith("plan_")}
    others = {name: value for name, value in options.items() if name not in parts}
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    if fake:
        q = mode.from_tensor(q)
    call = lambda **given: torch.ops.mla_cute.sparse_decode(q, kv_cache, indices, **others, **given)  # noqa: E731
    call()
    call(**parts)
    for i in range(1, 2 ** len(parts) - 1):
        some = {name: value for j, (name, value) in enumerate(parts.items()) if i >> j & 1}
        missing = next(name for name in parts if name not in some)
        with pytest.raises(ValueError, match=f"^{missing}: must be given with {' and '.join(some)}, got None$"):
            call(**some)
    for name, value, message in (
        ("plan_shape", [3, 1], r"plan_shape: must be \[b, s_q, h_q, topk, has_topk_length, .*, got \[3, 1\]$"),
        ("plan_metadata", parts["plan_metadata"].flatten(), r"plan_metadata: must be int32 \[P, 8\], got shape"),
        ("plan_num_splits", parts["plan_num_splits"][None], r"plan_num_splits: must be int32 \[b \+ 1\], got shape"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(**parts | {name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{'tile_n': 1,", "must be the name of a class and the dict of its fields, got "),
        ("{'tile_n': f()}", "must be the name of a class and the dict of its fields, got "),
        ("{1, 2}", "must be the name of a class and the dict of its fields, got "),
        ("{1: 2}", "must be the name of a class and the dict of its fields, got "),
        ("", "must be the name of a class and the dict of its fields, got "),
        ("{'nothing': 1}", "must have the fields of mla_cute.reference.Config ("),
    ],
)
def test_malformed_config(fields, message):
    x = make_inputs(BARE)
    (q, kv_cache, indices), options = op_arguments(x)
    text = "mla_cute.reference.Config" + fields
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(f"config: {message}")):
            torch.ops.mla_cute.sparse_decode(q, kv_cache, indices, config=text)
        with pytest.raises(ValueError, match=re.escape(f"config: {message}")):
            torch.ops.mla_cute.plan_decode(q, indices, config=text)
        with pytest.raises(ValueError, match=re.escape(f"plan.config: {message}")):
            torch.ops.mla_cute.sparse_decode(q, kv_cache, indices, **options | {"plan_config": text})
    with pytest.raises(ValueError, match=r"^plan.config: must begin with the name of an importable class, got 'xx'"):
        torch_ops._config_named("xx")


def test_quantiser_op_refuses():
    keys, _, _, out = quantizing(mla_cute.V32, "pow2")
    quantize, ops = compiled(mla_cute.quantize_kv_cache), torch.ops.mla_cute
    mine = dataclasses.replace(mla_cute.V32, name="mine")
    for options, message in (
        ({"kv_format": mine}, "kv_format: under torch.compile it must be mla_cute.V32 or mla_cute.MODEL1"),
        ({"kv_format": "v32"}, "kv_format: must be a KVFormat"),
        ({"kv_format": mla_cute.MODEL1}, "kv: must be [num_blocks, page_block_size >= 1, 1, 512]"),
        ({"scales": "exact"}, 'scales: must be "pow2", "amax" or a fp32 tensor, got "exact"'),
        ({"scales": None}, 'scales: must be "pow2", "amax" or a fp32 tensor, got NoneType'),
        ({"scales": torch.zeros(1)}, "scales: must be positive, got 0.0"),
        ({"out": out[:2]}, "out: must have 3 blocks of 5 tokens as kv has"),
    ):
        with pytest.raises(Exception, match=re.escape(message)):
            quantize(keys, **options)
    with pytest.raises(ValueError, match="^kv_format: must be v32 or model1, got v33"):
        ops.quantize_kv_cache(keys, kv_format="v33")
    with pytest.raises(ValueError, match='^scale_values: must be None when scales says "amax"'):
        ops.quantize_kv_cache(keys, scales="amax", scale_values=torch.ones(1))


def test_text_of_a_config():
    config = reference.Config(tile_n=32, fixed_overhead_blocks=7)
    text = torch_ops._text_of("config", config)
    assert text == "mla_cute.reference.Config{'tile_n': 32, 'fixed_overhead_blocks': 7}"
    assert torch_ops._config_of("config", text, reference.Config) == config
    assert torch_ops._config_named(text) == config

    @dataclasses.dataclass(frozen=True)
    class Odd:
        numbers: tuple
        word: str = "it's {1}"
        flag: bool = True
        nothing: None = None

        def __post_init__(self):
            object.__setattr__(self, "word", self.word.rstrip("!"))

    odd = Odd((1, (2, 3), "x"))
    assert torch_ops._config_of("config", torch_ops._text_of("config", odd), Odd) == odd
    object.__setattr__(odd, "word", "what no call can make!")
    with pytest.raises(ValueError, match="must be equal to one made from its fields"):
        torch_ops._config_of("config", torch_ops._text_of("config", odd), Odd)


# ----- torch.export ---------------------------------------------------------------------------------------------------


class Decode(torch.nn.Module):
    def __init__(self, plan=None):
        super().__init__()
        self.plan = plan

    def forward(self, q, kv_cache, indices, plan=None):
        return mla_cute.sparse_decode(q, kv_cache, indices, plan=self.plan if plan is None else plan)


class Plan(torch.nn.Module):
    def forward(self, q, indices):
        return mla_cute.plan_decode(q, indices)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
class TestExport:
    def test_layer(self, strict):
        batch = torch.export.Dim("batch", min=2, max=20)
        sizes = ({0: batch}, *({0: 3 * batch},) * 3, {0: batch}, {0: batch})
        program = torch.export.export(Layer(), tuple(layer_inputs(3)), dynamic_shapes=sizes, strict=strict)
        names = [str(node.target) for node in program.graph.nodes if "mla_cute" in str(node.target)]
        assert names == [f"mla_cute.{name}.default" for name in ("write_kv_cache", "plan_decode", "sparse_decode")]
        stored = io.BytesIO()
        torch.export.save(program, stored)
        stored.seek(0)
        for made in (program, torch.export.load(stored)):
            module = made.module()
            for b in (3, 5):
                assert_layer(module, module, layer_inputs(b, seed=b))

    def test_plan_goes_in(self, strict):
        q, _, _, _, indices, _ = layer_inputs(3)
        other_q, _, _, _, other_indices, _ = layer_inputs(5, seed=1)
        kv_cache = make_inputs(BARE).kv_cache
        plan, other = mla_cute.plan_decode(q, indices), mla_cute.plan_decode(other_q, other_indices)
        batch = torch.export.Dim("batch", min=2, max=20)
        sizes = ({0: batch}, None, {0: batch}, [None, {0: batch + 1}])
        args = q, kv_cache, indices, plan
        program = torch.export.export(Decode(), args, dynamic_shapes=sizes, strict=strict)
        for call in (args, (other_q, kv_cache, other_indices, other)):
            for ours, expected in zip(program.module()(*call), Decode()(*call)):
                assert_bitwise(ours, expected)
        constant = torch.export.export(Decode(plan), (q, kv_cache, indices), strict=strict)
        assert_bitwise(constant.module()(q, kv_cache, indices)[0], Decode()(q, kv_cache, indices)[0])
        torch.export.save(program, io.BytesIO())

    def test_plan_comes_out(self, strict):
        q, _, _, _, indices, _ = layer_inputs(3)
        other_q, _, _, _, other_indices, _ = layer_inputs(5, seed=1)
        batch = torch.export.Dim("batch", min=2, max=20)
        sizes = {0: batch}, {0: batch}
        program = torch.export.export(Plan(), (q, indices), dynamic_shapes=sizes, strict=strict)
        for args in ((q, indices), (other_q, other_indices)):
            plan, expected = program.module()(*args), mla_cute.plan_decode(*args)
            assert isinstance(plan, mla_cute.DecodePlan) and (plan.b, plan.config) == (expected.b, expected.config)
            plan.__post_init__()
            assert_bitwise(plan.metadata, expected.metadata, name="metadata")
            assert_bitwise(plan.num_splits, expected.num_splits, name="num_splits")


def test_exported_program_in_another_process(tmp_path):
    """It needs the ops alone: `import mla_cute.torch_ops`."""
    inputs = layer_inputs(3)
    torch.export.save(torch.export.export(Layer(), tuple(inputs)), tmp_path / "layer.pt2")
    torch.save((inputs, Layer()(*inputs)), tmp_path / "values.pt")
    code = (
        "import sys, torch, mla_cute.torch_ops\n"
        "assert 'cutlass' not in sys.modules\n"
        f"inputs, expected = torch.load({str(tmp_path / 'values.pt')!r})\n"
        f"got = torch.export.load({str(tmp_path / 'layer.pt2')!r}).module()(*inputs)\n"
        "print(*(torch.equal(a, b) for a, b in zip(got, expected)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


# ----- gpu ------------------------------------------------------------------------------------------------------------

GPU_CASES = [
    Case(b=4, h_q=128, topk=700, s_kv=900, topk_length=True, sink=True, holes=True, strided=False),
    Case(b=4, h_q=64, s_q=2, topk=300, s_kv=900, kv_format="model1", extra_topk=200, extra_topk_length=True),
]


def on_gpu(case, *sizes):
    return [make_inputs(dataclasses.replace(case, b=b, seed=b), "cuda") for b in sizes]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("plan", ["none", "inside", "outside"])
def test_gpu(case, plan):
    """The bits of a call without a compiler, which is compared with the reference."""
    f = compiled(lambda x, given: decode(x, make_plan(x) if plan == "inside" else given), "inductor")
    for x in on_gpu(case, 4, 5, 9):
        assert_same(f(x, make_plan(x) if plan == "outside" else None), x)
        out, lse = decode(x)
        ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_opcheck_on_a_gpu(case):
    x = make_inputs(dataclasses.replace(case, strided=False), "cuda")
    args, options = op_arguments(x)
    outputs = [torch.empty_like(t) for t in decode(x)]
    torch.library.opcheck(torch.ops.mla_cute.sparse_decode.default, args, options)
    torch.library.opcheck(torch.ops.mla_cute.sparse_decode_out.default, (*args, *outputs), options)
    torch.library.opcheck(torch.ops.mla_cute.plan_decode.default, (x.q, x.indices), x.plan_kwargs())


@pytest.mark.gpu
def test_reduce_overhead(monkeypatch):
    """CUDA graphs of the compiler's own: recorded once, replayed with other inputs, the cache written in place."""
    calls = []
    inner = mla_cute.sparse_decode  # which is now the package's, whatever interface's will be
    monkeypatch.setattr(interface, "sparse_decode", lambda *args, **kw: calls.append(1) or inner(*args, **kw))
    counters.clear()
    layer = Layer(device="cuda")
    f = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    counts = []

    def call(*inputs):
        torch.compiler.cudagraph_mark_step_begin()
        out, lse = (t.clone() for t in f(*inputs))  # the next replay writes into the same memory
        counts.append(len(calls))
        return out, lse

    with torch.no_grad():
        for seed in range(6):
            assert_layer(layer, call, layer_inputs(4, seed, "cuda", h_q=64, topk=200))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counts[0] >= 1 and counts[2:] == counts[2:3] * 4  # a replay runs no Python


@pytest.mark.gpu
def test_compiled_call_in_a_graph():
    """Captured by hand, planned inside: a replay follows new lengths."""
    x, y = (make_inputs(dataclasses.replace(GPU_CASES[0], seed=seed), "cuda") for seed in (0, 1))
    f = compiled(lambda x: decode(x, make_plan(x)), "inductor")
    blocks = max(x.kv_cache.shape[0], y.kv_cache.shape[0])
    cache = torch.zeros(blocks, 64, 1, 656, dtype=torch.uint8, device="cuda")
    static = dataclasses.replace(
        x, q=x.q.clone(), kv_cache=cache, indices=x.indices.clone(), topk_length=x.topk_length.clone()
    )

    def fill(z):
        for name in ("q", "indices", "topk_length"):
            getattr(static, name).copy_(getattr(z, name))
        cache[: z.kv_cache.shape[0]].copy_(z.kv_cache)

    fill(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = f(static)
    for z in (y, x):
        fill(z)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        options = z.kwargs() | {"softmax_scale": x.softmax_scale, "attn_sink": x.attn_sink}
        ref_out, ref_lse = reference.sparse_decode(z.q, z.kv_cache, z.indices, **options)
        assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")
