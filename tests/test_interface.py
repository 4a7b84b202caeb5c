"""interface.py: sparse_decode's way from arguments to launch, on the CPU; which implementation serves what."""

import dataclasses
import gc
import importlib
import math
import os
import re
import subprocess
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mla_cute
from mla_cute import emulator, interface, jit, reference, target, validate
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs

CASE = Case(b=3, h_q=5, s_q=2, s_kv=200, topk=133, page_block_size=16, topk_length=True, sink=True, holes=True)
EXTRA = Case(
    **{"b": 3, "h_q": 5, "s_q": 2, "s_kv": 200, "topk": 133, "page_block_size": 16, "topk_length": True, "sink": True},
    **{"kv_format": "model1", "extra_topk": 70, "extra_page_block_size": 61, "extra_topk_length": True, "holes": True},
)

BYTES = torch.uint8, torch.int8, torch.float8_e4m3fn

# An implementation's source: fills out and lse.
FILL = (
    "from mla_cute.reference import Config, default_config\n"
    "def compile(problem, config, arch):\n"
    "    return lambda *args: (args[12].fill_({0}), args[13].fill_({0}))\n"
)


def recorder():
    """An implementation that runs the reference and keeps what it was given: (module, compiled, launched)."""
    module, compiled, launched = types.ModuleType("recorder"), [], []

    def compile(problem, config, arch):
        compiled.append((problem, config, arch))
        run = reference.compile(problem, reference.Config(), arch)

        def launch(*args):
            launched.append(args)
            run(*args)

        return launch

    module.Config, module.default_config, module.compile = reference.Config, reference.default_config, compile
    return module, compiled, launched


def refused(error, message, *args, **kwargs):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        mla_cute.sparse_decode(*args, **kwargs)


class TestNumbers:
    @pytest.mark.parametrize(
        "case",
        [
            CASE,
            Case(b=2, h_q=128, topk=64),
            Case(b=2, h_q=64, s_q=3, topk=65, s_kv=100, varlen=True, duplicates=True, scales="random"),
            Case(b=1, h_q=1, topk=1, odd_rows=True),
            Case(b=4, h_q=16, zero_length=True, sink=True),
            Case(b=2, h_q=8, all_invalid=True, sink=True),
            Case(b=2, h_q=8, kv_format="model1", page_block_size=7, outside=True),
            Case(b=2, h_q=8, extra_topk=33, extra_page_block_size=5, sink=True),
            EXTRA,
        ],
        ids=str,
    )
    def test_equals_the_reference(self, case):
        x = make_inputs(case)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        assert_bitwise(out, ref_out, name="out")
        assert_bitwise(lse, ref_lse, name="lse")

    def test_default_scale(self):
        x = make_inputs(CASE)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, topk_length=x.topk_length)
        expected = mla_cute.sparse_decode(
            x.q, x.kv_cache, x.indices, topk_length=x.topk_length, softmax_scale=1 / math.sqrt(576)
        )
        assert_bitwise(out, expected[0])
        assert_bitwise(lse, expected[1])

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_other_names_of_a_byte(self, dtype):
        x = make_inputs(CASE)
        expected = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache.view(dtype), x.indices, **x.kwargs())
        assert_bitwise(out, expected[0])
        assert_bitwise(lse, expected[1])

    def test_writes_into_out_and_lse(self):
        x = make_inputs(CASE)
        expected = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        b, s_q, h_q = x.q.shape[:3]
        room = torch.full((b, s_q + 1, h_q, 520), math.nan, dtype=torch.bfloat16)
        lse_room = torch.full((s_q, b, h_q + 1), math.nan)
        mine, my_lse = room[:, :s_q, :, :512], lse_room[:, :, :h_q].transpose(0, 1)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), out=mine, lse=my_lse)
        assert out is mine
        assert lse is my_lse
        assert_bitwise(mine, expected[0])
        assert_bitwise(my_lse, expected[1])
        assert room[:, s_q:].isnan().all()
        assert room[..., 512:].isnan().all()
        assert lse_room[..., h_q:].isnan().all()

    def test_results_are_fresh_contiguous_tensors(self):
        x = make_inputs(CASE)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        assert (out.shape, out.dtype) == ((3, 2, 5, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((3, 2, 5), torch.float32)
        assert out.is_contiguous()
        assert lse.is_contiguous()


class TestTheWay:
    def test_plan_then_compile_then_launch(self):
        x = make_inputs(CASE)
        module, compiled, launched = recorder()
        config = reference.Config(fixed_overhead_blocks=2)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), config=config, impl=module)
        problem = validate.Problem(h_q=5, has_topk_length=True, has_attn_sink=True)
        assert compiled == [(problem, config, "cpu")]
        (args,) = launched
        plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length, config=config)
        assert_bitwise(args[9], plan.metadata, name="metadata")
        assert_bitwise(args[10], plan.num_splits, name="num_splits")
        assert plan.num_parts > 1
        slots = 2 * plan.num_parts
        assert (args[11].shape, args[11].dtype) == ((slots * 2 * (16 * 512 + 2 * 5 + 4),), torch.float32)
        assert args[11].is_contiguous()
        for i, tensor in {
            0: x.q,
            1: x.kv_cache,
            2: x.indices,
            3: x.topk_length,
            7: x.attn_sink,
            12: out,
            13: lse,
        }.items():
            assert args[i] is tensor
        assert args[8] == x.softmax_scale
        assert args[4:7] == (None, None, None)
        assert len(args) == 16
        assert args[14] == plan.max_splits == 3  # blocks: the lengths are not known here
        assert 0 < args[15] < 2**63

    def test_nonces_differ(self):
        x = make_inputs(CASE)
        module, _, launched = recorder()
        call = lambda: mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=module)  # noqa: E731
        call()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: call(), range(200)))
        nonces = {args[15] for args in launched}
        assert len(nonces) == 201 and 0 not in nonces
        child = os.fork()
        if child == 0:  # begins anew: another multiplier
            os._exit(interface._nonce() in nonces)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_extra_keys(self):
        x = make_inputs(EXTRA)
        module, compiled, launched = recorder()
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=module)
        problem = validate.Problem(
            **{"h_q": 5, "d_qk": 512, "kv_format": "model1", "has_topk_length": True, "has_attn_sink": True},
            **{"has_extra": True, "has_extra_topk_length": True},
        )
        assert compiled == [(problem, reference.Config(), "cpu")]
        (args,) = launched
        plan = mla_cute.plan_decode(x.q, x.indices, **x.plan_kwargs())
        assert (plan.extra_topk, plan.has_extra_topk_length) == (70, True)
        assert_bitwise(args[9], plan.metadata, name="metadata")
        assert_bitwise(args[10], plan.num_splits, name="num_splits")
        for i, tensor in {4: x.extra_kv_cache, 5: x.extra_indices, 6: x.extra_topk_length, 7: x.attn_sink}.items():
            assert args[i] is tensor
        options = x.kwargs() | {"extra_kv_cache": x.extra_kv_cache.view(torch.int8)}
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **options, plan=plan, impl=module)
        assert launched[1][4].dtype == torch.uint8
        assert launched[1][4].data_ptr() == x.extra_kv_cache.data_ptr()
        assert_bitwise(launched[1][12], args[12])

    def test_extra_keys_count_for_the_emulators_limit(self):
        x = make_inputs(Case(b=1, h_q=1, topk=64, extra_topk=64))
        q, indices = x.q.expand(1, 65, 1, 576), torch.zeros(1, 65, 64, dtype=torch.int32)
        extra = {"extra_kv_cache": x.extra_kv_cache, "extra_indices": torch.zeros(1, 65, 64 * 99, dtype=torch.int32)}
        refused(ValueError, "too large to emulate: 6500 blocks", q, x.kv_cache, indices, **extra, backend="emulator")

    def test_absent_options_and_bytes(self):
        x = make_inputs(Case(b=1, h_q=3))
        module, _, launched = recorder()
        mla_cute.sparse_decode(x.q, x.kv_cache.view(torch.int8), x.indices, impl=module, softmax_scale=1)
        (args,) = launched
        assert args[3:8] == (None,) * 5
        assert type(args[8]) is float
        assert args[1].dtype == torch.uint8
        assert args[1].data_ptr() == x.kv_cache.data_ptr()

    def test_one_part_needs_no_scratch(self):
        x = make_inputs(Case(b=1, h_q=2, s_q=132, s_kv=200))
        module, _, launched = recorder()
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, impl=module)
        (args,) = launched
        assert args[9].shape == (1, 8)
        assert (args[11].shape, args[11].stride()) == ((0,), (1,))

    @pytest.mark.parametrize("num_sms", [78, 132, 148])  # H20, H100 and H200, B200
    def test_scratch_is_bounded_whatever_the_call(self, num_sms, monkeypatch):
        """By 2 * SMs * 64 heads: 34.7 MB on 132 SMs. Long prefill-like calls and large batches included."""
        pytest.importorskip("cutlass")
        from mla_cute.sm90 import sparse_decode as hopper

        where = target.device_target(torch.device("cpu"))._replace(num_sms=num_sms)
        monkeypatch.setattr(target, "device_target", lambda device: where)
        scratch, impl = [], types.ModuleType("hopper_without_a_kernel")
        impl.Config, impl.default_config = hopper.Config, lambda problem: hopper.Config(clustered=False)
        impl.compile = lambda problem, config, arch: lambda *args: scratch.append(args[11].numel() * 4)
        cache = torch.zeros(1, 64, 1, 656, dtype=torch.uint8)

        def scratch_of(b, s_q, h_q, topk):
            q = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16).expand(b, s_q, h_q, 576)
            mla_cute.sparse_decode(q, cache, torch.zeros(1, 1, topk, dtype=torch.int32).expand(b, s_q, topk), impl=impl)
            return scratch.pop()

        bound = 2 * num_sms * (64 * 514 + 4) * 4
        most = 0
        for h_q in (1, 16, 64, 65, 128):
            for s_q in (*range(1, 66), 74, 148, 4096):
                got = scratch_of(1, s_q, h_q, 2048)
                assert got <= bound, (s_q, h_q)
                assert (got == 0) == (num_sms // (s_q * (1 if h_q <= 64 else 2)) <= 1)
                most = max(most, got)
        assert most == bound
        assert num_sms != 132 or bound < 35e6
        for b, s_q, h_q, topk in ((65_536, 1, 1, 2048), (4096, 1, 128, 64), (512, 4, 128, 16_384)):
            assert scratch_of(b, s_q, h_q, topk) == scratch_of(1, s_q, h_q, 1)

    def test_given_plan_is_used(self, monkeypatch):
        x = make_inputs(CASE)
        module, compiled, launched = recorder()
        config = reference.Config(fixed_overhead_blocks=1)
        plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length, config=config)
        monkeypatch.setattr(interface, "plan_decode", None)  # to call it would fail
        for _ in range(3):
            mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, impl=module)
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, impl=module, config=config)
        assert [args[9] is plan.metadata and args[10] is plan.num_splits for args in launched] == [True] * 4
        assert [c for _, c, _ in compiled] == [config]

    def test_alternating_calls_do_not_mix(self):
        """The last call's kernel is remembered; another shape, plan, config or impl must not get it."""
        a, b = make_inputs(CASE), make_inputs(Case(b=2, h_q=7, topk=70))
        first, _, launched_first = recorder()
        second, compiled, launched_second = recorder()
        for _ in range(2):
            mla_cute.sparse_decode(a.q, a.kv_cache, a.indices, **a.kwargs(), impl=first)
            mla_cute.sparse_decode(b.q, b.kv_cache, b.indices, impl=first)
            mla_cute.sparse_decode(b.q, b.kv_cache, b.indices, impl=second)
            mla_cute.sparse_decode(b.q, b.kv_cache, b.indices, impl=second, config=reference.Config(tile_n=32))
        assert [args[0].shape[2] for args in launched_first] == [5, 7, 5, 7]
        assert len(launched_second) == 4
        assert [c for _, c, _ in compiled] == [reference.Config(), reference.Config(tile_n=32)]
        for args in launched_second:
            assert_bitwise(args[12], launched_first[1][12])

    def test_alternating_names_of_a_byte_do_not_mix(self):
        """What is remembered of the last call says whether its caches were uint8, too."""
        x = make_inputs(EXTRA)
        module, _, launched = recorder()
        names = [(x.kv_cache.view(a), x.extra_kv_cache.view(b)) for a in BYTES for b in BYTES]
        for kv_cache, extra_kv_cache in 2 * names:
            options = x.kwargs() | {"extra_kv_cache": extra_kv_cache}
            mla_cute.sparse_decode(x.q, kv_cache, x.indices, **options, impl=module)
        for args in launched:
            assert (args[1].dtype, args[4].dtype) == (torch.uint8, torch.uint8)
            assert_bitwise(args[12], launched[0][12])

    def test_another_threads_call_may_come_anywhere(self):
        """Before every line of a call, another call: as a switch of threads could have it, but every time."""

        def filler(value):
            module = types.ModuleType(f"filler{value}")
            module.Config, module.default_config = reference.Config, reference.default_config
            module.compile = lambda *_: lambda *args: (args[12].fill_(value), args[13].fill_(value))
            return module

        def call(case, module, plan):
            x = inputs[case]
            return mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, plan=plan, impl=module)

        def trace(frame, event, _):
            if frame.f_code.co_filename not in (interface.__file__, validate.__file__):
                return None
            if event == "line":
                lines.add((frame.f_code.co_name, frame.f_lineno))
                out, lse = call(1, *other)
                assert (out == 2).all() and (lse == 2).all()
            return trace

        inputs = [make_inputs(Case(b=2, h_q=3, s_kv=64)), make_inputs(Case(b=1, h_q=2, s_kv=64))]
        other, before, lines = (filler(2), None), sys.gettrace(), set()
        for plan in (None, mla_cute.plan_decode(inputs[0].q, inputs[0].indices)):
            sys.settrace(trace)
            try:
                out, lse = call(0, filler(1), plan)
            finally:
                sys.settrace(before)
            assert out.shape == (2, 1, 3, 512)
            assert (out == 1).all() and (lse == 1).all()
        assert {"sparse_decode", "_prepare", "check_sparse_decode"} <= {name for name, _ in lines}

    def test_empty_batch_launches_nothing(self):
        module, compiled, launched = recorder()
        q = torch.zeros(0, 2, 5, 576, dtype=torch.bfloat16)
        kv_cache = torch.zeros(4, 8, 1, 656, dtype=torch.uint8)
        indices = torch.zeros(0, 2, 64, dtype=torch.int32)
        out, lse = mla_cute.sparse_decode(q, kv_cache, indices, impl=module)
        assert (out.shape, out.dtype) == ((0, 2, 5, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((0, 2, 5), torch.float32)
        assert (out.stride(), lse.stride()) == ((5120, 2560, 512, 1), (10, 5, 1))
        assert compiled == launched == []
        out, lse = mla_cute.sparse_decode(q, kv_cache[:0], indices, topk_length=torch.zeros(0, dtype=torch.int32))
        assert (out.shape, lse.shape) == ((0, 2, 5, 512), (0, 2, 5))

    def test_bad_arguments_launch_nothing(self):
        x = make_inputs(CASE)
        module, compiled, launched = recorder()
        refused(TypeError, "q: dtype must be bfloat16", x.q.float(), x.kv_cache, x.indices, impl=module)
        message = "kv_cache: last dim must be the bytes of a token, 656 (V32"
        refused(ValueError, message, x.q, x.kv_cache[..., :576], x.indices, impl=module)
        refused(ValueError, "indices: topk (dim 2)", x.q, x.kv_cache, x.indices[..., :0], impl=module)
        assert compiled == launched == []


class TestPlanAndConfig:
    @pytest.fixture
    def call(self):
        x = make_inputs(CASE)
        kwargs = {"impl": recorder()[0], "topk_length": x.topk_length}
        plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length)
        return (x.q, x.kv_cache, x.indices), kwargs, plan

    def test_of_other_inputs(self, call):
        (q, kv_cache, indices), kwargs, plan = call
        mla_cute.sparse_decode(q, kv_cache, indices, **kwargs, plan=plan)
        message = "plan: was made for {0} {1}, got a call with {0} {2}"
        short = {**kwargs, "topk_length": kwargs["topk_length"][:2]}
        refused(ValueError, message.format("b", 3, 2), q[:2], kv_cache, indices[:2], **short, plan=plan)
        refused(ValueError, message.format("s_q", 2, 1), q[:, :1], kv_cache, indices[:, :1], **kwargs, plan=plan)
        refused(ValueError, message.format("h_q", 5, 4), q[:, :, :4], kv_cache, indices, **kwargs, plan=plan)
        refused(ValueError, message.format("topk", 133, 64), q, kv_cache, indices[..., :64], **kwargs, plan=plan)
        more = {"extra_kv_cache": kv_cache, "extra_indices": indices[..., :7]}
        refused(ValueError, message.format("extra_topk", 0, 7), q, kv_cache, indices, **kwargs, **more, plan=plan)
        with_extra = mla_cute.plan_decode(q, indices, topk_length=kwargs["topk_length"], extra_indices=indices[..., :7])
        mla_cute.sparse_decode(q, kv_cache, indices, **kwargs, **more, plan=with_extra)
        more["extra_topk_length"] = kwargs["topk_length"]
        text = message.format("has_extra_topk_length", False, True)
        refused(ValueError, text, q, kv_cache, indices, **kwargs, **more, plan=with_extra)
        without = {**kwargs, "topk_length": None}
        text = message.format("has_topk_length", True, False)
        refused(ValueError, text, q, kv_cache, indices, **without, plan=plan)
        tensors = {name: getattr(plan, name).to("meta") for name in ("metadata", "num_splits")}
        elsewhere = dataclasses.replace(plan, **tensors)
        text = "plan: was made for device meta, got a call with device cpu"
        refused(ValueError, text, q, kv_cache, indices, **kwargs, plan=elsewhere)

    def test_of_another_config(self, call):
        args, kwargs, plan = call
        text = "plan: was made with config.tile_n 64, got a call with 128"
        refused(ValueError, text, *args, **kwargs, plan=plan, config=reference.Config(tile_n=128))
        text = "plan: was made with config.fixed_overhead_blocks 5, got a call with 3"
        refused(ValueError, text, *args, **kwargs, plan=plan, config=reference.Config(fixed_overhead_blocks=3))

    def test_of_another_implementation(self, call):
        args, kwargs, plan = call
        module = recorder()[0]
        module.Config = dataclasses.make_dataclass("Config", [("tile_n", int, 64)], frozen=True)
        refused(
            ValueError,
            f"plan: must be made with a recorder.Config, got {plan.config!r}",
            *args,
            **(kwargs | {"impl": module}),
            plan=plan,
        )

    def test_no_plan_at_all(self, call):
        args, kwargs, plan = call
        text = "plan: must be a mla_cute.DecodePlan, got tuple"
        refused(TypeError, text, *args, **kwargs, plan=(plan.metadata, plan.num_splits))

    def test_config_of_another_type(self, call):
        args, kwargs, _ = call
        text = "config: must be a recorder.Config, got {'tile_n': 64}"
        refused(TypeError, text, *args, **kwargs, config={"tile_n": 64})

    def test_config_is_checked_against_the_whole_problem(self):
        """plan_decode sees no sink: a config that cannot have one is refused by the call, with or without plan."""

        @dataclasses.dataclass(frozen=True)
        class NoSink(reference.Config):
            def check(self, problem):
                if problem.has_attn_sink:
                    raise ValueError("config: cannot have a sink, got one")

        x = make_inputs(CASE)
        module, compiled, _ = recorder()
        module.Config = NoSink
        plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length, config=NoSink())
        args, text = (x.q, x.kv_cache, x.indices), "config: cannot have a sink, got one"
        refused(ValueError, text, *args, **x.kwargs(), impl=module, plan=plan)
        refused(ValueError, text, *args, **x.kwargs(), impl=module, config=NoSink())
        assert compiled == []

    def test_config_with_bad_numbers(self, call):
        args, kwargs, _ = call
        text = "tile_n: must be at least 1, got 0"
        refused(ValueError, text, *args, **kwargs, config=reference.Config(tile_n=0))


class TestImpl:
    def test_cpu_takes_the_reference(self):
        assert mla_cute.select_impl("cpu") is reference
        assert mla_cute.select_impl(torch.device("cpu")).__name__ == "mla_cute.reference"

    def test_cuda_takes_the_kernel_of_its_arch(self, monkeypatch):
        shipped = types.ModuleType("mla_cute.sm90.sparse_decode")
        monkeypatch.setitem(sys.modules, "mla_cute.sm90.sparse_decode", shipped)
        monkeypatch.setattr(jit, "arch_of", lambda device: {0: "sm_90a", 1: "sm_80a"}[device.index])
        interface._shipped_impl.cache_clear()
        try:
            assert mla_cute.select_impl("cuda:0") is shipped
            with pytest.raises(NotImplementedError) as caught:
                mla_cute.select_impl("cuda:1")
            message = str(caught.value)
            assert message.startswith("q: sparse_decode needs a GPU, or an emulated one, with a kernel (sm100, sm90)")
            assert "got sm_80a (cuda:1)" in message
            assert "impl=mla_cute.reference" in message
        finally:
            interface._shipped_impl.cache_clear()

    def test_by_name(self):
        assert mla_cute.select_impl("cpu", "mla_cute.reference") is reference
        x = make_inputs(CASE)
        expected = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        for impl in (reference, "mla_cute.reference", "mla_cute.reference"):
            out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=impl)
            assert_bitwise(out, expected[0])
            assert_bitwise(lse, expected[1])

    def test_by_path(self, tmp_path):
        path = tmp_path / "sevens.py"
        path.write_text(FILL.format(7))
        x = make_inputs(CASE)
        out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, impl=str(path))
        assert (out == 7).all()
        assert (lse == 7).all()
        module = mla_cute.select_impl("cpu", str(path))
        assert module is mla_cute.select_impl("cpu", str(path))
        assert sys.modules[module.__name__] is module  # its classes pickle
        assert module.__name__ != "sevens"  # and take nobody's place
        del sys.modules[module.__name__]

    def test_relative_path_follows_the_directory(self, tmp_path, monkeypatch):
        x = make_inputs(CASE)
        for value in (1, 2):
            folder = tmp_path / str(value)
            folder.mkdir()
            (folder / "fill.py").write_text(FILL.format(value))
            monkeypatch.chdir(folder)
            out, _ = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, impl="fill.py")
            assert (out == value).all()

    def test_reloaded_module(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within one tick of the file system
        path = tmp_path / "mla_cute_test_reloaded.py"
        x = make_inputs(CASE)
        path.write_text(FILL.format(1))
        module = mla_cute.select_impl("cpu", "mla_cute_test_reloaded")
        for value in (1, 2):
            path.write_text(FILL.format(value))
            module = importlib.reload(module)
            for _ in range(2):
                out, _ = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, impl=module)
                assert (out == value).all()

    def test_threads_import_a_file_once(self, tmp_path):
        path = tmp_path / "slow.py"
        path.write_text("import time\ntime.sleep(0.3)\n" + FILL.format(1))
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda _: mla_cute.select_impl("cpu", str(path)), range(2))
        assert one is other

    @pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
    def test_half_a_module_does_not_stay(self, tmp_path, error):
        path = tmp_path / "half.py"
        path.write_text(FILL.format(1) + f"raise {error}('half')\n")
        for _ in range(2):
            with pytest.raises({"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[error], match="half"):
                mla_cute.select_impl("cpu", str(path))

    def test_that_cannot_be_found(self, tmp_path):
        missing = str(tmp_path / "missing.py")
        for impl, message in (
            (
                "mla_cute.nowhere",
                "impl: must be an importable module or the path of a .py file, got 'mla_cute.nowhere'",
            ),
            ("no_such_package.part", "impl: must be an importable module or the path of a .py file, got 'no_such_p"),
            ("", "impl: must be an importable module or the path of a .py file, got ''"),
            (".x", "impl: must be an importable module or the path of a .py file, got '.x'"),
            (missing, f"impl: no such file, got {missing!r}"),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                mla_cute.select_impl("cpu", impl)

    def test_failing_import_is_not_hidden(self, tmp_path, monkeypatch):
        (tmp_path / "mla_cute_test_needy.py").write_text("import mla_cute_test_what_it_needs\n")
        monkeypatch.syspath_prepend(tmp_path)
        for impl in ("mla_cute_test_needy", str(tmp_path / "mla_cute_test_needy.py")):
            with pytest.raises(ModuleNotFoundError, match="mla_cute_test_what_it_needs"):
                mla_cute.select_impl("cpu", impl)

    @pytest.mark.parametrize("impl", [None, reference], ids=["shipped", "given"])
    def test_of_no_device(self, impl):
        for device, error in ((None, TypeError), (3, TypeError), (torch.zeros(1), TypeError), ("nosuch", ValueError)):
            with pytest.raises(error, match="^device: must be a .*torch.* got "):
                mla_cute.select_impl(device, impl)

    def test_that_is_none(self):
        for impl, got in ((math, "<module 'math'"), (7, "7"), ("math", "<module 'math'"), ({}, "{}")):
            with pytest.raises(TypeError) as caught:
                mla_cute.select_impl("cpu", impl)
            message = str(caught.value)
            assert message.startswith(
                f"impl: must be a module with Config, default_config, compile, or its name or path, got {got}"
            )
            assert message.endswith("without Config, default_config, compile")


class TestPackage:
    def test_public_names(self):
        for name in mla_cute.__all__:
            assert getattr(mla_cute, name) is not None
            assert name in dir(mla_cute)
        assert {*mla_cute._HOME, *mla_cute._SUBMODULES, "__version__"} == {*mla_cute.__all__}
        with pytest.raises(AttributeError, match=r"^module 'mla_cute' has no attribute 'dense_decode'$"):
            mla_cute.dense_decode  # noqa: B018

    def test_import_is_light(self):
        code = (
            "import sys, mla_cute\n"
            "assert not {'torch', 'cutlass', 'numpy'} & {*sys.modules}, 'import mla_cute'\n"
            "import mla_cute.flash_mla, mla_cute.testing\n"
            "for name in mla_cute.__all__: getattr(mla_cute, name)\n"
            "assert 'cutlass' not in sys.modules, 'the names'\n"
            "import torch\n"
            "q, kv_cache = torch.zeros(1, 1, 1, 576).bfloat16(), torch.zeros(1, 1, 1, 656).byte()\n"
            "out, lse = mla_cute.sparse_decode(q, kv_cache, torch.full((1, 1, 1), -1, dtype=torch.int32))\n"
            "assert 'cutlass' not in sys.modules, 'a call on the CPU'\n"
            "print(out.abs().sum().item(), lse.item())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "0.0 inf\n"), done.stderr


class TestBackend:
    def test_emulator_runs_the_kernel_of_the_session(self):
        case = Case(b=2, h_q=5, topk=64, s_kv=100, topk_length=True, sink=True, holes=True)
        x = make_inputs(case)
        with emulator.session(num_sms=4) as s:
            plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length, backend="emulator")
            assert plan.num_parts == 4
            out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), plan=plan, backend="emulator")
        kernels = ["mla_schedule_sm90", "mla_sparse_decode_small_sm90"]
        assert [g.launch.kernel.rpartition("_")[0] for g in s.grids] == kernels
        assert s.findings == []
        ref_out, ref_lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())  # not remembered: the reference
        assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")
        assert mla_cute.select_impl("cpu", backend="emulator").__name__ == "mla_cute.sm90.sparse_decode"

    def test_by_the_environment(self):
        code = (
            "import torch, mla_cute\n"
            "from mla_cute import emulator\n"
            "from mla_cute.testing import Case, make_inputs\n"
            "x = make_inputs(Case(b=1, h_q=3, topk=5, s_kv=9))\n"
            "with emulator.session(num_sms=2) as s:\n"
            "    plan = mla_cute.plan_decode(x.q, x.indices)\n"
            "    mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, plan=plan)\n"
            "print(mla_cute.select_impl('cpu').__name__)\n"
            "print(len(s.grids))"
        )
        env = {**os.environ, "MLA_CUTE_BACKEND": "emulator"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["mla_cute.sm90.sparse_decode", "2"]

    def test_bad(self):
        x = make_inputs(Case(b=1, h_q=3, topk=5, s_kv=9))
        refused(ValueError, "backend: must be None or", x.q, x.kv_cache, x.indices, backend="gpu")
        with pytest.raises(ValueError, match="^backend: the emulator takes CPU tensors, got tensors on cuda:0"):
            interface.target(torch.device("cuda", 0), "emulator")
        with emulator.session(arch="sm_120a"), pytest.raises(NotImplementedError, match="or an emulated one, with a kernel"):
            mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, backend="emulator")
        large = torch.zeros(64, 2, 128, 576, dtype=torch.bfloat16), x.kv_cache, torch.zeros(64, 2, 2048, dtype=torch.int32)
        refused(ValueError, "too large to emulate: 8192 blocks of keys take about 20 minutes;", *large, backend="emulator")
        large = torch.zeros(1, 2, 1, 576, dtype=torch.bfloat16), x.kv_cache, torch.zeros(1, 2, 5, dtype=torch.int32)
        planned = mla_cute.select_impl("cpu", backend="emulator").Config(clustered=False)
        with emulator.session(num_sms=110_000), pytest.raises(ValueError, match="too large to emulate: .* CTAs take about"):
            mla_cute.sparse_decode(*large, backend="emulator", config=planned)  # for two query tokens 55,000 parts


def test_no_call_keeps_its_tensors_alive():
    """A CUDA graph's memory pool must hold nothing but outputs when a recording ends; and memory is the caller's."""
    x = make_inputs(CASE)
    plan = mla_cute.plan_decode(x.q, x.indices, topk_length=x.topk_length)
    out, lse = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, plan=plan, **x.kwargs())
    tensors = [x.q, x.kv_cache, x.indices, x.topk_length, x.attn_sink, plan.metadata, plan.num_splits, out, lse]
    gone = [weakref.ref(t) for t in tensors]
    del x, plan, out, lse, tensors
    gc.collect()
    assert [i for i, ref in enumerate(gone) if ref() is not None] == []


def test_what_stands_for_a_plan_has_no_memory():
    """It stays with the last call: of a CUDA graph's pool it would hold a part, which torch.compile's graphs refuse."""
    stand_in = interface._no_plan(torch.device("cpu"))
    assert [t.dtype for t in stand_in] == [torch.int32] * 2
    assert all(t.untyped_storage().nbytes() == 0 for t in stand_in)
