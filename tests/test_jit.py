"""The kernel cache with a kernel of its own, compiled without a GPU: what is compiled when, and what goes wrong how."""

import ctypes
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mla_cute import interface, jit, reference

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_90a"

AXPY = '''
import os
from dataclasses import dataclass
from pathlib import Path

import cutlass
from cutlass import Float32, const_expr, cute
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from mla_cute import jit


@dataclass(frozen=True)
class Problem:
    op: str = "axpy"
    has_z: bool = False


@dataclass(frozen=True)
class Config:
    threads: int = 128
    fault: str = ""

    def check(self, problem):
        if self.threads % 32:
            raise ValueError(f"threads: must be a multiple of 32, got {self.threads}")


class Axpy:
    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, z, a: Float32, stream):
        threads = self.config.threads
        self.kernel(x, y, z, a).launch(grid=[cute.ceil_div(x.shape[0], threads), 1, 1], block=[threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, z, a: Float32):
        i = cute.arch.block_idx()[0] * self.config.threads + cute.arch.thread_idx()[0]
        if const_expr(self.config.fault == "python"):
            undefined_name()
        if const_expr(self.config.fault == "ptx"):
            y[0, 0] = inline_ptx("no.such.instruction {$w0};", write_only_types=[Float32])
        if const_expr(self.config.fault == "stack"):  # a register array that is indexed at run time lives in local memory
            r = cute.make_rmem_tensor((64,), Float32)
            for j in cutlass.range_constexpr(64):
                r[j] = x[j, 0]
            for j in cutlass.range(x.shape[0]):
                r[(j * j) % 64] = x[j, 1]
            y[0, 0] = r[x.shape[0] % 64]
        if i < x.shape[0]:
            y[i, 0] = a * x[i, 0] + y[i, 0]
            if const_expr(z is not None):
                y[i, 0] += z[i]


def default_config(problem):
    return Config()


def compile(problem, config, arch):
    """The count of compiles over all processes is this file's number of lines."""
    with open(Path(__file__).with_name("compiles.log"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    config.check(problem)
    n = cute.sym_int()
    x = jit.fake_tensor(Float32, (n, 8), stride=(cute.sym_int64(divisibility=8), 1), align=16)
    y = jit.fake_tensor(Float32, (n, 8))
    z = jit.fake_tensor(Float32, (n,)) if problem.has_z else None
    return jit.build(Axpy(config), x, y, z, Float32(0), jit.fake_stream(), arch=arch, name="axpy")
'''


def import_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache on disk and in memory, in a process that compiles fast enough to say nothing."""
    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "_said", set())
    monkeypatch.setattr(jit, "_STARTED", time.time() + 3600)  # the test writes its sources itself
    monkeypatch.setattr(jit, "SLOW_SECONDS", float("inf"))
    return tmp_path / "cache"


@pytest.fixture
def axpy(tmp_path, cache):
    """The kernel above as a module loaded from a path, older than any process that the test starts."""
    pytest.importorskip("cutlass")
    path = tmp_path / "axpy_kernel.py"
    path.write_text(AXPY)
    os.utime(path, (time.time() - 60,) * 2)
    yield import_file(path)
    del sys.modules["axpy_kernel"]


def compiles(module) -> list[str]:
    log = Path(module.__file__).with_name("compiles.log")
    return log.read_text().split() if log.exists() else []


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.o"))


def load(module, arch=ARCH, problem=None, **config):
    return jit.load(module, problem or module.Problem(), module.Config(**config), arch)


LOAD_IN_NEW_PROCESS = """
    import importlib.util, sys
    from mla_cute import jit
    assert "cutlass" not in sys.modules
    spec = importlib.util.spec_from_file_location("axpy_kernel", {file!r})
    module = sys.modules["axpy_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(jit.load(module, module.Problem(), module.Config(), "sm_90a"))
"""


def new_process(code: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# ----- no DSL needed --------------------------------------------------------------------------------------------------


def plain_module(path: Path | None = None, result=None) -> types.ModuleType:
    """An impl in torch: compile() returns an ordinary callable; module.calls counts."""
    module = types.ModuleType("plain")
    module.calls = 0

    def compile(problem, config, arch):
        module.calls += 1
        return result or (lambda *args: (problem, config, arch))

    module.compile = compile
    if path:
        path.write_text("# sources\n")
        module.__file__ = str(path)
    return module


@dataclass(frozen=True)
class Problem:
    op: str = "plain"
    h_q: int = 128


def test_import_is_light():
    code = 'import importlib.util, sys; sys.modules["mla_cute"] = None\n'
    code += f"spec = importlib.util.spec_from_file_location('jit', {str(ROOT / 'mla_cute/jit.py')!r})\n"
    code += "module = importlib.util.module_from_spec(spec)\n"
    code += "sys.modules['jit'] = module; spec.loader.exec_module(module)\n"
    code += "assert not {'cutlass', 'torch', 'tvm_ffi', 'tqdm'} & set(sys.modules)"
    assert new_process(code).wait() == 0


@pytest.mark.parametrize("arch", [ARCH, "cpu"])
def test_plain_callables_stay_in_memory(cache, tmp_path, arch):
    module = plain_module(tmp_path / "plain.py")
    fn = jit.load(module, Problem(), None, arch)
    assert fn() == (Problem(), None, arch)
    assert jit.load(module, Problem(), None, arch) is fn and module.calls == 1
    assert jit.load(module, Problem(h_q=64), None, arch) is not fn and module.calls == 2
    assert not entries(cache)
    assert cache.exists() == (arch != "cpu")  # a CPU user gets no directory


def test_threads_compile_once(cache):
    module, fns = plain_module(), []
    compile = module.compile
    module.compile = lambda *args: (time.sleep(0.1), compile(*args))[1]
    threads = [threading.Thread(target=lambda: fns.append(jit.load(module, Problem(), None, ARCH))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.calls == 1 and len(fns) == 4 and len(set(fns)) == 1


def test_errors_of_a_module_pass_through(cache):
    module = plain_module()

    def compile(problem, config, arch):
        raise ValueError("threads: must be a multiple of 32, got 100")

    module.compile = compile
    with pytest.raises(ValueError, match="multiple of 32"):
        jit.load(module, Problem(), None, ARCH)
    module.compile = lambda *args: print  # the failure is not remembered
    assert jit.load(module, Problem(), None, ARCH) is print


def test_fingerprint_sees_sources_and_settings(tmp_path, monkeypatch):
    module = plain_module(tmp_path / "plain.py")
    seen = {jit.fingerprint(module)}
    assert jit.fingerprint(module) in seen

    def changed() -> bool:
        now = jit.fingerprint(module)
        new = now not in seen
        seen.add(now)
        return new

    (tmp_path / "plain.py").write_text("# other sources\n")
    assert changed()
    (tmp_path / "helper.py").write_text("# a helper beside the module\n")
    assert changed()
    (tmp_path / "notes.txt").write_text("no source")
    assert not changed()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert changed()
    monkeypatch.setattr(jit, "_version", lambda name: "99.0")
    assert changed()
    inside = plain_module()
    inside.__file__ = str(ROOT / "mla_cute" / "reference.py")
    package_only = jit.fingerprint(inside)
    (tmp_path / "helper.py").write_text("# changed\n")
    assert jit.fingerprint(inside) == package_only
    monkeypatch.setattr(jit, "_sources", lambda module, sources=jit._sources: sources(module)[:-1])
    assert jit.fingerprint(inside) != package_only  # every file of the package counts


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", "~/kernels")
    assert jit.cache_dir() == Path.home() / "kernels"
    monkeypatch.delenv("MLA_CUTE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_dir() == tmp_path / "mla_cute"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_dir() == Path.home() / ".cache" / "mla_cute"


def test_no_home_directory(monkeypatch, tmp_path, capfd):
    """HOME is not set, and the system does not know the user: kernels are compiled all the same."""
    for name in ("MLA_CUTE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does then
    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "_said", set())
    module = plain_module(tmp_path / "plain.py")
    for h_q in (1, 2):
        assert jit.load(module, Problem(h_q=h_q), None, ARCH)() == (Problem(h_q=h_q), None, ARCH)
    said = "mla_cute: no home directory, and MLA_CUTE_CACHE_DIR is not set: kernels are compiled in every process"
    assert capfd.readouterr().err.splitlines() == [said]
    with pytest.raises(OSError, match="no home directory"):
        jit.compile_ahead([jit.Job(module, Problem(), None, ARCH)], progress=False)


def test_dead_links_are_no_sources(cache, tmp_path):
    """Such as an editor's lock of an unsaved file, beside an implementation."""
    module = plain_module(tmp_path / "plain.py")
    before = jit.fingerprint(module)
    (tmp_path / ".#plain.py").symlink_to("user@host.1234")
    assert jit.fingerprint(module) == before
    assert jit.load(module, Problem(), None, ARCH)() == (Problem(), None, ARCH)


def test_arch_of(monkeypatch):
    assert jit.arch_of("cpu") == "cpu" and jit.arch_of(torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="device: must be cuda or cpu, got meta"):
        jit.arch_of("meta")
    capabilities = [(9, 0), (10, 0), (10, 3), (12, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    jit._arch_of_cuda.cache_clear()
    try:
        assert [jit.arch_of(f"cuda:{i}") for i in range(4)] == ["sm_90a", "sm_100a", "sm_103a", "sm_120a"]
        assert jit.arch_of("cuda") == "sm_103a"
        capabilities[0] = (8, 0)
        assert jit.arch_of("cuda:0") == "sm_90a"  # asked once
    finally:
        jit._arch_of_cuda.cache_clear()


def test_arch_module():
    assert jit.arch_module("sparse_decode", "cpu").__name__ == "mla_cute.reference"
    for op, arch in (("sparse_decode", "sm_80a"), ("sparse_decode", "gfx942"), ("no_such_op", ARCH)):
        with pytest.raises(NotImplementedError, match=f"{op}: no kernel for {arch}"):
            jit.arch_module(op, arch)


# ----- compiled by the DSL --------------------------------------------------------------------------------------------


@pytest.mark.compile
def test_memory_then_disk(axpy, cache):
    fn = load(axpy)
    assert type(fn).__name__ == "Function" and type(fn).__module__.startswith("tvm_ffi")  # the bare function
    assert load(axpy) is fn and len(compiles(axpy)) == 1
    assert [p.suffix for p in cache.glob("*/*")].count(".o") == 1
    assert {p.suffix for p in cache.glob("*/*")} == {".o", ".lock"}

    jit._memory.clear()
    assert load(axpy) is not fn and len(compiles(axpy)) == 1
    for other in ({"threads": 64}, {"arch": "sm_100a"}, {"problem": axpy.Problem(has_z=True)}):
        load(axpy, **other)
    assert len(compiles(axpy)) == len(entries(cache)) == 4

    done = new_process(LOAD_IN_NEW_PROCESS.format(file=axpy.__file__))
    out, err = done.communicate()
    assert done.returncode == 0 and "Function" in out and not err, err
    assert len(compiles(axpy)) == 4


@pytest.mark.compile
@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage", "empty"])
def test_damaged_entry_is_compiled_again(axpy, cache, damage):
    load(axpy)
    (entry,) = entries(cache)
    good = entry.read_bytes()
    middle = len(good) // 2
    bad = {
        "truncated": good[:-1],
        "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "garbage": os.urandom(5000),
        "empty": b"",
    }[damage]
    entry.write_bytes(bad)
    jit._memory.clear()
    load(axpy)
    assert len(compiles(axpy)) == 2
    jit._memory.clear()
    load(axpy)  # repaired
    assert len(compiles(axpy)) == 2


@pytest.mark.compile
def test_processes_compile_once(axpy):
    code = LOAD_IN_NEW_PROCESS.format(file=axpy.__file__)
    both = [new_process(code) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0 and "Function" in out, err
    assert len(compiles(axpy)) == 1


@pytest.mark.compile
def test_changed_source(axpy, cache, monkeypatch, capfd):
    load(axpy)
    source = Path(axpy.__file__)
    source.write_text(AXPY + "# edited\n")
    jit._memory.clear()
    load(axpy)
    assert len(compiles(axpy)) == 2 and len({p.parent for p in entries(cache)}) == 2

    # As in a process that imported the module before the edit: what it runs must not be stored as the new source's.
    monkeypatch.setattr(jit, "_STARTED", time.time() - 2)
    for threads in (64, 96):
        assert callable(load(axpy, threads=threads))
    assert len(entries(cache)) == 2
    assert capfd.readouterr().err.splitlines() == [
        f"mla_cute: {source} changed after this process started: axpy_kernel is not cached on disk"
    ]


@pytest.mark.compile
def test_namesakes_do_not_share_entries(axpy, tmp_path, cache):
    """Another file of the same directory under the same module name, with the same Problem and Config."""
    fn = load(axpy)
    other = tmp_path / "other.py"
    other.write_text(AXPY)
    os.utime(other, (time.time() - 60,) * 2)
    spec = importlib.util.spec_from_file_location("axpy_kernel", other)
    module = sys.modules["axpy_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    load(axpy, threads=64)  # under the fingerprint of a directory with two files
    assert load(module, threads=64) is not fn
    assert len(compiles(axpy)) == len(entries(cache)) == 3


@pytest.mark.compile
def test_works_without_a_cache_directory(axpy, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path / "file" / "cache"))  # unwritable for root too
    fn = load(axpy)
    load(axpy, threads=64)
    assert load(axpy) is fn and len(compiles(axpy)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line.startswith(f"mla_cute: cannot write to {tmp_path}/file/cache (Not a directory)")
        and "MLA_CUTE_CACHE_DIR" in line
    )
    with pytest.raises(OSError):
        jit.compile_ahead([jit.Job(axpy, axpy.Problem(), axpy.Config(), ARCH)], progress=False)


@pytest.mark.compile
def test_slow_compiles_are_reported(axpy, cache, monkeypatch, capfd):
    monkeypatch.setattr(jit, "SLOW_SECONDS", 0.0)
    load(axpy)
    (line,) = capfd.readouterr().err.splitlines()
    (entry,) = entries(cache)
    assert line.startswith("mla_cute: compiled axpy for sm_90a (axpy_kernel) in ") and line.endswith(
        f" s, cached in {entry}"
    )
    jit._memory.clear()
    load(axpy)
    assert not capfd.readouterr().err


@pytest.mark.compile
@pytest.mark.parametrize("fault, said", [("python", "undefined_name"), ("ptx", "no.such.instruction|Not a name")])
def test_compile_error(axpy, cache, fault, said):
    with pytest.raises(jit.CompileError, match=said) as caught:
        load(axpy, fault=fault)
    assert isinstance(caught.value, NotImplementedError) and caught.value.__cause__ is not None
    text = str(caught.value)
    for part in (
        "axpy: does not compile for sm_90a with nvidia-cutlass-dsl 4.",
        repr(axpy.Problem()),
        f"fault='{fault}'",
    ):
        assert part in text
    assert "axpy_kernel" in text and "\x1b" not in text
    assert not entries(cache)
    assert callable(load(axpy))  # the DSL is usable afterwards


@pytest.mark.compile
def test_config_errors_are_not_compile_errors(axpy):
    with pytest.raises(ValueError, match="threads: must be a multiple of 32, got 100"):
        load(axpy, threads=100)


@pytest.mark.compile
def test_inspect(axpy, cache, capfd):
    seen = jit.inspect(axpy, axpy.Problem(), axpy.Config(), ARCH)
    assert seen.seconds > 0 and len(seen.ptx) == len(seen.cubins) == 1 and ".target sm_90a" in seen.ptx[0]
    ((name, usage),) = seen.resources.items()
    assert name in seen.ptx[0] and 0 < usage["REG"] < 64
    assert usage["STACK"] == usage["LOCAL"] == usage["SHARED"] == seen.spill_bytes == 0 and seen.advisories == ()
    assert f"Used {usage['REG']} registers" in seen.log and not capfd.readouterr().err

    (usage,) = jit.inspect(axpy, axpy.Problem(), axpy.Config(fault="stack"), ARCH).resources.values()
    assert usage["STACK"] >= 256
    with pytest.raises(jit.CompileError):
        jit.inspect(axpy, axpy.Problem(), axpy.Config(fault="ptx"), ARCH)
    assert not cache.exists()


def test_inspection_reads_the_log():
    log = """\
ptxas info    : Function properties for k
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
ptxas         .     serialized in function 'k'
ptxas info    : Used 168 registers, used 16 barriers
"""
    seen = jit.Inspection(0.0, (), (), log)
    assert seen.spill_bytes == 12 and len(seen.advisories) == 1
    assert "C7512" in seen.advisories[0] and seen.advisories[0].endswith("instructions are serialized in function 'k'")


@pytest.mark.compile
def test_warmup_in_processes(axpy, cache):
    todo = [jit.Job(axpy, axpy.Problem(has_z=z), axpy.Config(), ARCH) for z in (False, True)]
    done = jit.compile_ahead(todo, processes=2, progress=False)
    assert sorted(name for name, _, _ in done) == [f"axpy sm_90a {job.problem}" for job in todo]
    assert all(seconds > 0 and not cached for _, seconds, cached in done)
    assert len(entries(cache)) == 2 and str(os.getpid()) not in compiles(axpy)
    for job in todo:
        jit.load(*job)
    assert len(compiles(axpy)) == 2

    todo[1] = todo[1]._replace(config=axpy.Config(fault="python"))
    with pytest.raises(jit.CompileError, match="axpy: does not compile for sm_90a"):
        jit.compile_ahead(todo, processes=1, progress=False)
    todo[1] = todo[1]._replace(config=axpy.Config(threads=100))
    with pytest.raises(RuntimeError, match=r"axpy sm_90a Problem\(.*has_z=True\) failed: ValueError: threads: must be"):
        jit.compile_ahead(todo, processes=1, progress=False)


def test_warmup_needs_an_arch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="arch: must be given"):
        jit.warmup()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"h_q": 129}, ValueError, "h_q: must be 1 to 128, got 129"),
        ({"h_q": (64, 0)}, ValueError, "h_q: must be 1 to 128, got 0"),
        ({"h_q": -5}, ValueError, "h_q: must be 1 to 128, got -5"),
        ({"h_q": "64"}, TypeError, "h_q: must be int or several, got '64'"),
        ({"h_q": 64.0}, TypeError, "h_q: must be int or several, got 64.0"),
        ({"h_q": True}, TypeError, "h_q: must be int or several, got True"),
        ({"has_topk_length": "no"}, TypeError, "has_topk_length: must be bool or several, got 'no'"),
        ({"kv_format": "v4"}, ValueError, "kv_format: must be v32 or model1, got v4"),
        ({"kv_format": ("v32", None)}, TypeError, "kv_format: must be str or several, got ('v32', None)"),
        (
            {"op": "decode"},
            ValueError,
            "op: must be sparse_decode, write_kv_cache, quantize_kv_cache or several of them, got",
        ),
        ({"op": None}, TypeError, "op: must be str or several, got None"),
        (
            {"op": ("sparse_decode", "write_kv_cache"), "scales": "e8m0"},
            ValueError,
            "scales: must be pow2 or amax, got e8m0",
        ),
        (
            {"op": "write_kv_cache", "scales": "amax", "kv_format": "model1"},
            ValueError,
            "scales: must be pow2 for model1",
        ),
        ({"op": "quantize_kv_cache", "arch": "sm_80a"}, NotImplementedError, "quantize_kv_cache: no kernel for sm_80a"),
        ({"has_extra": 1}, TypeError, "has_extra: must be bool or several, got 1"),
        ({"has_extra_topk_length": True}, ValueError, "has_extra: must be True with has_extra_topk_length, got False"),
        ({"has_attn_sink": (0, 1)}, TypeError, "has_attn_sink: must be bool or several, got (0, 1)"),
        ({"config": "fast"}, TypeError, "config: must be a mla_cute.reference.Config, got 'fast'"),
        ({"config": reference.Config(tile_n=0)}, ValueError, "tile_n: must be at least 1, got 0"),
        ({"jobs": 0}, ValueError, "jobs: must be at least 1, got 0"),
        ({"jobs": -1}, ValueError, "jobs: must be at least 1, got -1"),
        ({"jobs": "2"}, TypeError, "jobs: must be an int, got '2'"),
        ({"arch": "cpu"}, ValueError, 'arch: must be a GPU architecture such as "sm_90a", got "cpu"'),
        ({"arch": "sm_90"}, ValueError, 'arch: must be a GPU architecture such as "sm_90a", got "sm_90"'),
        ({"arch": 90}, TypeError, "arch: must be a str such as"),
        ({"impl": "no.such.module"}, ValueError, "impl: must be an importable module"),
        ({"impl": math}, TypeError, "impl: must be a module with Config"),
        ({"impl": None, "arch": "sm_80a"}, NotImplementedError, "sparse_decode: no kernel for sm_80a"),
    ],
)
def test_warmup_checks_its_arguments(monkeypatch, change, error, message):
    monkeypatch.setattr(jit, "compile_ahead", None)
    pytest.importorskip("cutlass")  # warmup's list of kernels has the planner
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        jit.warmup(**{"h_q": 64, "arch": ARCH, "impl": reference, **change})


def test_warmup_takes_an_impl_by_name_or_path(monkeypatch, tmp_path):
    pytest.importorskip("cutlass")
    monkeypatch.setattr(jit, "compile_ahead", lambda todo, processes, progress: todo)
    path = tmp_path / "variant.py"
    path.write_text("from mla_cute.reference import Config, compile, default_config\n")
    for impl in ("mla_cute.reference", str(path)):
        module = interface.select_impl("cpu", impl)
        todo = jit.warmup([1, 2], has_topk_length=True, has_attn_sink=False, arch=ARCH, impl=impl)
        own = [job for job in todo if job.module is module]
        assert [(job.problem.h_q, job.config) for job in own] == [(1, module.Config()), (2, module.Config())]


@pytest.mark.compile
def test_warmup_jobs():
    pytest.importorskip("cutlass")
    impl = plain_module()
    impl.default_config = lambda problem: f"config of {problem.h_q}"
    jobs = jit.warmup_jobs((64, 128), (False, True), (False,), ARCH, impl)
    own = [job for job in jobs if job.module is impl]
    assert [(job.name, job.problem.h_q, job.problem.has_topk_length, job.config) for job in own] == [
        ("sparse_decode", h_q, lengths, f"config of {h_q}") for h_q in (64, 128) for lengths in (False, True)
    ]
    assert len(jobs) == len(own) + 2  # one planner per has_topk_length
    extra = {"kv_format": ("model1", "v32"), "has_extra": (False, True), "has_extra_topk_length": (False, True)}
    jobs = jit.warmup_jobs((64,), (False,), (False,), ARCH, impl, **extra)
    own = [job.problem for job in jobs if job.module is impl]
    assert [(p.kv_format, p.d_qk, p.has_extra, p.has_extra_topk_length) for p in own] == [
        (name, d_qk, extra, lengths)
        for name, d_qk in (("v32", 576), ("model1", 512))
        for extra, lengths in ((False, False), (True, False), (True, True))
    ]
    assert len(jobs) == len(own) + 2
    jobs = jit.warmup_jobs((64,), (False,), (False, True), ARCH, impl, config="mine")
    assert [job.config for job in jobs if job.module is impl] == ["mine", "mine"] and {job.arch for job in jobs} == {
        ARCH
    }


@pytest.mark.compile
def test_warmup_jobs_of_the_writer():
    jobs = jit.warmup_jobs((), (), (), ARCH, op=("write_kv_cache", "quantize_kv_cache"), scales=("pow2", "amax"))
    assert [(job.name, job.problem.kv_format, job.problem.scales, job.problem.slot_bytes) for job in jobs] == [
        ("write_kv_cache", "v32", "pow2", 8),
        ("write_kv_cache", "v32", "pow2", 4),
        ("write_kv_cache", "v32", "amax", 8),
        ("write_kv_cache", "v32", "amax", 4),
        ("quantize_kv_cache", "v32", "pow2", 0),
        ("quantize_kv_cache", "v32", "amax", 0),
    ]
    jobs = jit.warmup_jobs((), (), (), ARCH, op=("quantize_kv_cache",), scales=("amax", "pow2"), kv_format=("model1",))
    assert [(job.problem.kv_format, job.problem.scales) for job in jobs] == [("model1", "pow2")]


@pytest.mark.compile
@pytest.mark.parametrize("kv_format", ["v32", "model1"])
def test_warmup_covers_what_calls_load(kv_format, monkeypatch):
    """Whatever a serving engine calls: the kernel that the call asks for is one of those that warmup compiles."""
    import mla_cute
    from mla_cute import emulator
    from mla_cute.emulator import run
    from mla_cute.testing import Case, make_inputs

    asked = []
    monkeypatch.setattr(run, "load", lambda *job: asked.append(jit.Job(*job)) or (lambda *arguments: None))
    todo = []
    monkeypatch.setattr(jit, "compile_ahead", lambda jobs, processes, progress: todo.extend(jobs))
    both = (False, True)
    flags = dict.fromkeys(("has_topk_length", "has_attn_sink", "has_extra", "has_extra_topk_length"), both)
    jit.warmup((5, 64, 128), op=jit.OPS, kv_format=kv_format, scales=("pow2", "amax"), arch=ARCH, **flags)
    for num_sms, topk in ((1, 3), (8, 3200), (16, 70)):  # by a plan; by clusters; by the kernel of small batches
        for h_q, lengths, sink, extra, extra_lengths in itertools.product((5, 64, 128), both, both, both, both):
            if extra_lengths and not extra:
                continue
            options = {"extra_topk": 3, "extra_topk_length": extra_lengths} if extra else {}
            case = Case(b=2, h_q=h_q, s_kv=70, topk=topk, kv_format=kv_format, topk_length=lengths, sink=sink, **options)
            x = make_inputs(case)
            with emulator.session(num_sms=num_sms):
                mla_cute.sparse_decode(x.q, x.kv_cache, x.indices, backend="emulator", **x.kwargs())
    with emulator.session():
        keys = torch.zeros(1, 2, 1, x.q.shape[3], dtype=torch.bfloat16)
        for scales in ("pow2", "amax")[: 1 if kv_format == "model1" else 2]:
            fmt = {"v32": mla_cute.V32, "model1": mla_cute.MODEL1}[kv_format]
            cache = mla_cute.quantize_kv_cache(keys, kv_format=fmt, scales=scales, backend="emulator")
            for slots in (torch.arange(2), torch.arange(2).int()):
                parts = keys[0, :, 0].split((fmt.d_nope, fmt.d_rope), -1)
                mla_cute.write_kv_cache(cache, *parts, slots, scales=scales, backend="emulator")
    assert {*asked} == {*todo}


# ----- what a compiled function accepts -------------------------------------------------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),  # these two make it a DLManagedTensor
        ("deleter", ctypes.c_void_p),
    ]


class FakeCuda:
    """A float32 tensor "on a GPU": enough for the checks of a call, which come before anything touches a GPU."""

    def __init__(self, shape, strides, data=0x10000):
        self.shape, self.strides = ((ctypes.c_int64 * len(v))(*v) for v in (shape, strides))
        self.tensor = DLTensor(data, 2, 0, len(shape), 2, 32, 1, self.shape, self.strides, 0, None, None)

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self):
        return (2, 0)


@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="would launch with made-up addresses")
def test_calls_are_checked(axpy):
    from tvm_ffi import from_dlpack

    alive = []

    def fake(shape, strides, **kwargs):
        alive.append(FakeCuda(shape, strides, **kwargs))
        return from_dlpack(alive[-1])

    without_z, with_z = load(axpy), load(axpy, problem=axpy.Problem(has_z=True))
    x, y, z = fake((5, 8), (8, 1)), fake((5, 8), (8, 1)), fake((5,), (1,))
    host = torch.zeros(5, 8)
    launched = (RuntimeError, "(?i)cuda")  # all checks passed, and there is no GPU to launch on
    for fn, args, (error, text) in [
        (without_z, (host, host, None, 1.0), (ValueError, "expected device_type=cuda")),
        (without_z, (x, y, None, 1.0), launched),
        (without_z, (x, y, None, 1), launched),
        (with_z, (x, y, z, 1.0), launched),
        (with_z, (x, y, None, 1.0), (TypeError, "expected Tensor")),  # an option absent at compile time stays absent,
        (without_z, (x, y, z, 1.0), (TypeError, "expected None")),  # one present stays present
        (without_z, (x, y, 1.0), (TypeError, "Expects 4 parameters")),
        (without_z, (fake((5, 8), (12, 1)), y, None, 1.0), (ValueError, "divisible by 8")),
        (without_z, (fake((1, 8), (13, 1)), fake((1, 8), (8, 1)), None, 1.0), launched),  # size 1: stride not looked at
        (without_z, (fake((5, 8), (8, 1), data=0x10004), y, None, 1.0), (ValueError, "alignment=16")),
        (without_z, (x, fake((5, 8), (8, 1), data=0x10004), None, 1.0), launched),  # default align: one element
        (without_z, (x, fake((6, 8), (8, 1)), None, 1.0), (ValueError, "expected to match x.shape")),
        (without_z, (x, fake((5, 8), (16, 1)), None, 1.0), (ValueError, "expected to be 8")),  # row-major by default
    ]:
        with pytest.raises(error, match=text):
            fn(*args)
