"""The examples: the demo's numbers and exit code, and the naive implementation against the reference."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_cute
from mla_cute import interface, jit, reference
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, Case, assert_bitwise, assert_close, make_inputs
from mla_cute.validate import Problem

ROOT = Path(__file__).resolve().parent.parent
DEMO, NAIVE = ROOT / "examples" / "sparse_decode.py", ROOT / "examples" / "naive_sparse_decode.py"
SMALL = ["--device", "cpu", "--seq-lens", "40", "130", "--topk", "64", "--layers", "2"]


def run_script(path, *args, **env):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **env}
    return subprocess.run(
        [sys.executable, path, *args], check=False, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo_under_test", DEMO)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def naive():
    pytest.importorskip("cutlass")
    return mla_cute.select_impl("cpu", str(NAIVE))


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def table(text):
    """Rows of the demo's table: (request, length, attended, out error, lse error, fp8 error)."""
    rows = re.findall(r"(?m)^ *(\d+) +(\d+) +(\d+) +(\S+) +(\S+) +(\S+)$", text)
    return [(*map(int, row[:3]), *map(float, row[3:])) for row in rows]


def has_line(pattern, text):
    return re.search(f"(?m)^{pattern}", text) is not None


def assert_good_table(text, lengths, topk):
    rows = table(text)
    assert [row[:3] for row in rows] == [(r, n, min(n, topk)) for r, n in enumerate(lengths)]
    for _, _, attended, out, lse, fp8 in rows:
        # Values of out are below 1, those of lse below 16. One key alone is nothing but rounded: no error to see.
        assert 0 <= out < max(SPARSE_DECODE_OUT["abs_tol"], SPARSE_DECODE_OUT["rel_tol"])
        assert 0 <= lse < 16 * SPARSE_DECODE_LSE["rel_tol"]
        assert out < fp8 < 0.1 or attended == 1


# ---- the demo


class TestDemo:
    def test_as_a_script_at_its_sizes_for_a_cpu(self):
        done = run_script(DEMO, "--device", "cpu")
        assert done.returncode == 0, done.stderr
        assert_good_table(done.stdout, [300, 1000, 2048, 5000], 2048)
        assert "scaled down for the cpu" in done.stdout
        assert has_line(r"kernel  mla_cute\.reference on the CPU$", done.stdout)
        assert has_line(r"plan    66 parts, 85 blocks of 64 keys, \d+ splits \(4 of 4 requests", done.stdout)
        assert has_line(r"time    \d+\.\d ms a call$", done.stdout)
        assert has_line(r"ok ", done.stdout)

    def test_batch_repeats_the_lengths(self, demo, capsys):
        args = ["--device", "cpu", "--seq-lens", "5", "64", "65", "--topk", "65", "--layers", "1"]
        assert demo.main([*args, "--batch", "5"]) == 0
        assert_good_table(capsys.readouterr().out, [5, 64, 65, 5, 64], 65)
        assert demo.main([*args, "--batch", "1", "--seed", "3"]) == 0
        assert_good_table(capsys.readouterr().out, [5], 65)

    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ("out.mul_(1.03)", r"layer 1: out: \d+ of"),
            ("out[0, 0, 5, 7] += 0.1", "layer 0: out: 1 of"),
            ("out[1, 0, 127, 511] = float('nan')", "layer 0: out: NaN"),
            ("lse.add_(0.01)", r"layer 0: lse: \d+ of"),
        ],
    )
    def test_a_wrong_kernel_fails(self, demo, capsys, tmp_path, fault, said):
        impl = tmp_path / "wrong.py"
        impl.write_text(
            "from mla_cute import reference\n"
            "from mla_cute.reference import Config, default_config\n"
            "def compile(problem, config, arch):\n"
            "    run = reference.compile(problem, config, arch)\n"
            "    def wrong(*args):\n"
            "        run(*args)\n"
            f"        out, lse = args[12:14]; {fault}\n"
            "    return wrong\n"
        )
        assert demo.main([*SMALL, "--impl", str(impl)]) == 1
        printed = capsys.readouterr()
        assert re.search(said, printed.err) and "tolerance" in printed.err
        assert not has_line(r"ok ", printed.out) and has_line(r"kernel  wrong_", printed.out)
        if "nan" not in fault:
            with pytest.raises(AssertionError):
                assert_good_table(printed.out.replace("nan", "0"), [40, 130], 64)

    def test_a_gpu_without_a_kernel_takes_the_reference(self, demo, capsys, monkeypatch):
        monkeypatch.setattr(demo.shutil, "which", lambda name: None)  # and no C compiler
        interface._shipped_impl.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
        monkeypatch.setattr(jit, "_arch_of_cuda", lambda index: "sm_75a")
        assert demo.main(["--seq-lens", "40", "--topk", "64", "--layers", "1"]) == 0
        printed = capsys.readouterr().out
        assert has_line(r"No kernel for Some GPU \(.*sm_75a.*\): this run takes the CPU reference\.$", printed)
        assert_good_table(printed, [40], 64)
        with pytest.raises(SystemExit, match="--device cuda: .*sm_75a"):
            demo.main(["--device", "cuda"])

    @pytest.mark.emulate
    def test_without_a_gpu(self, demo, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        lengths = ["--seq-lens", "40", "90", "--topk", "64", "--layers", "1"]
        assert demo.main(lengths) == 0
        printed = capsys.readouterr().out
        assert "No CUDA GPU: the Hopper kernel runs in the emulator." in printed
        assert_good_table(printed, [40, 90], 64)
        assert has_line(r"kernel  mla_cute\.sm90\.sparse_decode on the emulator$", printed)
        assert has_line(r"time    \d+\.\d s for [\d,]{6,} instructions of a warp, without findings$", printed)
        monkeypatch.setattr(demo.shutil, "which", lambda name: None)
        assert demo.main(lengths) == 0
        assert "No CUDA GPU: this run takes the CPU reference." in capsys.readouterr().out
        with pytest.raises(SystemExit, match="--device cuda: torch sees no CUDA GPU"):
            demo.main(["--device", "cuda"])

    @pytest.mark.parametrize(
        "args",
        [
            ["--topk", "0"],
            ["--seq-lens", "5", "0"],
            ["--batch", "-1"],
            ["--layers", "x"],
            ["--impl", "nonesuch"],
            ["--impl", "math"],
        ],
    )
    def test_bad_arguments(self, demo, capsys, args):
        with pytest.raises(SystemExit) as e:
            demo.main(["--device", "cpu", *args])
        assert e.value.code == 2 and args[0] in capsys.readouterr().err

    def test_inputs(self, demo):
        """Every page belongs to one request, what is not written is NaN, and the indices are the best-scored tokens."""
        lengths, topk, g = [1, 64, 65, 300], 100, torch.Generator().manual_seed(1)
        block_table, num_blocks = demo.make_block_table(lengths, g)
        pages = block_table[block_table >= 0]
        assert len(pages) == len(pages.unique()) == 1 + 1 + 2 + 5 and num_blocks > len(pages) > int(pages.min()) >= 0
        layer = demo.make_layer(lengths, topk, block_table, num_blocks, g)
        written = layer.kv.isfinite().all(-1).flatten()  # [tokens]
        assert written.sum() == sum(lengths) and layer.kv.isnan().all(-1).flatten()[~written].all()
        cache = mla_cute.dequantize_kv_cache(layer.kv_cache).flatten(0, 2)
        assert_bitwise(cache.isnan(), ~written[:, None].expand(-1, 576))
        assert_bitwise(cache[written, 512:], layer.kv.flatten(0, 2)[written, 512:])
        for r, n in enumerate(lengths):
            slots = layer.indices[r, 0]
            kept = min(n, topk)
            assert (slots[:kept] >= 0).all() and (slots[kept:] == -1).all()
            assert len(slots[:kept].unique()) == kept and written[slots[:kept].long()].all()
            assert set((slots[:kept] // 64).tolist()) <= set(block_table[r].tolist())

    def test_rope_turns_with_the_distance(self, demo):
        q, k = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).double()
        at = [
            float(demo.rotate(q, torch.tensor([i])) @ demo.rotate(k, torch.tensor([j])).T)
            for i, j in ((9, 2), (107, 100))
        ]
        assert at[0] == pytest.approx(at[1], abs=1e-3) and at[0] != pytest.approx(float(q @ k.T), abs=0.1)
        assert demo.softmax_scale() == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)

    @pytest.mark.gpu
    @pytest.mark.parametrize("impl", [None, str(NAIVE)], ids=["shipped", "naive"])
    def test_on_a_gpu(self, demo, device, capsys, impl):
        args = ["--seq-lens", "1", "70", "2048", "9000", "--layers", "2"] + (["--impl", impl] if impl else [])
        assert demo.main(["--device", "cuda", *args]) == 0
        printed = capsys.readouterr().out
        assert_good_table(printed, [1, 70, 2048, 9000], 2048)
        assert has_line(r"kernel  (mla_cute\.sm\d+\.|naive_)sparse_decode", printed)
        assert has_line(r"time    \d+\.\d us a call .*, \d+ TFLOPS$", printed)


# ---- the naive implementation


class TestNaive:
    def test_config_refuses(self, naive):
        with pytest.raises(ValueError, match="heads_per_cta must be 1 to 32, got 33"):
            naive.Config(heads_per_cta=33).check(Problem())
        for name in ("tile_n", "fixed_overhead_blocks", "heads_per_cta"):
            for value in (-1, 4.0, "4", None):
                with pytest.raises(ValueError, match=f"config: {name} must be an int, . or more, got {value!r}"):
                    naive.Config(**{name: value}).check(Problem())
        with pytest.raises(NotImplementedError, match="must be sparse_decode on v32, got dense_decode on v32"):
            naive.default_config(Problem()).check(Problem(op="dense_decode"))
        with pytest.raises(NotImplementedError, match="must be sparse_decode on v32, got sparse_decode on model1"):
            naive.Config().check(Problem(kv_format="model1"))
        with pytest.raises(NotImplementedError, match="problem: must be without extra keys, got has_extra=True"):
            naive.Config().check(Problem(has_extra=True))

    def test_refuses_cpu_tensors(self, naive):
        x = make_inputs(Case(b=1, h_q=1, topk=1, s_kv=2))
        with pytest.raises(NotImplementedError, match="q: must be on a CUDA GPU"):
            mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, impl=naive)

    @pytest.mark.compile
    @pytest.mark.parametrize("optional", [False, True], ids=["plain", "topk_length-sink"])
    @pytest.mark.parametrize("h_q", [1, 128])
    @pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
    def test_compiles_without_spills(self, naive, arch, h_q, optional):
        problem = Problem(h_q=h_q, has_topk_length=optional, has_attn_sink=optional)
        found = jit.inspect(naive, problem, naive.default_config(problem), arch)
        ((name, usage),) = found.resources.items()
        assert name.startswith("mla_naive_sparse_decode")
        assert usage["REG"] <= 96 and usage["STACK"] == 0 and usage["LOCAL"] == 0
        assert found.spill_bytes == 0 and not found.advisories
        (ptx,) = found.ptx
        assert not re.search(r"\.(local|shared)|bar\.sync|mma", ptx)
        assert len(re.findall(r"ld\.global\.(?:v4\.b32|v2\.b64)", ptx)) == 1  # a lane's 16 codes in one load

    @pytest.mark.compile
    def test_loads_like_a_shipped_kernel(self, naive, tmp_path, monkeypatch):
        monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path))
        assert callable(jit.load(naive, Problem(h_q=2), naive.Config(heads_per_cta=2), "sm_90a"))

    @pytest.mark.compile
    def test_script_without_a_gpu(self):
        pytest.importorskip("cutlass")
        done = run_script(NAIVE, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        assert has_line(r"No GPU here: compiled for sm_90a in .* s, 0 bytes spilled, not run\.$", done.stdout)

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        "case",
        [
            Case(),
            Case(b=74, topk=2048, s_kv=2046, varlen=True),
            Case(h_q=1, topk=1),
            Case(h_q=1, topk=65, s_kv=100, sink=True, odd_rows=True),
            Case(h_q=5, topk=133, holes=True, duplicates=True, sink=True),
            Case(h_q=64, s_q=3, topk=576, s_kv=650, page_block_size=61, varlen=True, sink=True),
            Case(h_q=127, s_q=2, topk=65, topk_length=True, s_kv=300, scales="random"),
            Case(b=9, h_q=128, s_q=3, topk=200, page_block_size=61, topk_length=True, sink=True, holes=True),
            Case(b=7, h_q=16, s_kv=300, zero_length=True, sink=True, page_block_size=53),
            Case(h_q=128, all_invalid=True, sink=True),
            Case(b=1, h_q=3, topk=17, page_block_size=1, strided=False),
            Case(h_q=128, topk=64, scales="amax", seed=2),
            Case(h_q=8, topk=200, outside=True, topk_length=True),
        ],
        ids=str,
    )
    def test_agrees_with_the_reference(self, naive, device, case):
        x = make_inputs(case, device)
        # Around out and lse lies something that must stay as it is.
        b, s_q, h_q = case.b, case.s_q, case.h_q
        big_out = torch.full((b + 1, s_q + 1, h_q + 1, 640), 7.0, dtype=torch.bfloat16, device=device)
        big_lse = torch.full((b + 1, s_q + 1, h_q + 3), 7.0, device=device)
        out, lse = big_out[:b, :s_q, :h_q, :512], big_lse[:b, :s_q, :h_q]
        mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=naive, out=out, lse=lse)
        again = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs(), impl=naive)
        assert_bitwise(again[0], out, name="out")
        assert_bitwise(again[1], lse, name="lse")
        ref_out, ref_lse = reference.sparse_decode(x.q, x.kv_cache, x.indices, **x.kwargs())
        assert_close(out, ref_out, **SPARSE_DECODE_OUT, name="out")
        assert_close(lse, ref_lse, **SPARSE_DECODE_LSE, name="lse")
        out.fill_(7.0), lse.fill_(7.0)
        assert (big_out == 7.0).all() and (big_lse == 7.0).all()

    @pytest.mark.gpu
    @pytest.mark.parametrize("heads_per_cta", [1, 7, 32])
    def test_config_changes_nothing_but_speed(self, naive, device, heads_per_cta):
        x = make_inputs(Case(h_q=96, s_q=2, topk=100, sink=True), device)
        args = {**x.kwargs(), "impl": str(NAIVE)}
        ans = mla_cute.sparse_decode(
            x.q, x.kv_cache, x.indices, **args, config=naive.Config(heads_per_cta=heads_per_cta)
        )
        default = mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, **args)
        assert_bitwise(ans[0], default[0], name="out")
        assert_bitwise(ans[1], default[1], name="lse")

    @pytest.mark.gpu
    def test_script_on_a_gpu(self, device):
        done = run_script(NAIVE)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("agrees with the reference") == 2
