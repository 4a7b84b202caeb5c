"""From (kernel module, Problem, Config, arch) to a launchable function: compile once, keep it in memory and on disk.

    load ──► memory ──► <cache_dir>/<fingerprint>/<key>.o ──► module.compile ──► build (cute.compile) ──► export, reload

The only file that knows the DSL's compile options and how its object files are written and read; neither needs a GPU. The
DSL (`cutlass`) and torch are imported at first use. A compiled function is always taken from its exported object file, also
in the process that compiled it: that gives the bare TVM-FFI function, which costs less host time a call than the wrapper
that cute.compile returns. The cache's scheme (a directory a fingerprint, exported objects) follows flash-attention's
`flash_attn/cute` and quack.

Environment: MLA_CUTE_CACHE_DIR, the directory of the cache (default: $XDG_CACHE_HOME/mla_cute or ~/.cache/mla_cute).
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parent
DISTRIBUTIONS = (  # their versions decide what a source compiles to; the cu12 and cu13 parts bring different ptxas
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
DIGEST_BYTES = 32  # sha256 behind the object file's own bytes; readers of ELF files ignore what follows the sections
SLOW_SECONDS = 1.0  # a compile that takes longer is reported on stderr

_STARTED = time.time()  # sources newer than this may differ from what this process imported


def kept_over_fork(lock: threading.RLock) -> threading.RLock:
    """The lock, free in a forked child: forking waits for it, so no other thread is amid what it guards.

    (A program started by `subprocess` waits for nothing.)
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


_lock = kept_over_fork(threading.RLock())  # one compile or load at a time: the DSL keeps process-wide state
_memory: dict[tuple, Callable] = {}
_said: set[str] = set()


class Job(NamedTuple):
    """One kernel to compile: a module with `compile(problem, config, arch)` and its three arguments."""

    module: ModuleType
    problem: Any
    config: Any
    arch: str

    @property
    def name(self) -> str:
        """What a user knows the kernel by: the op, or the module's last name when the problem has none."""
        return getattr(self.problem, "op", None) or self.module.__name__.rpartition(".")[2]


_job: ContextVar[Job | None] = ContextVar("_job", default=None)  # what module.compile is being called for
_dump_dir: ContextVar[str | None] = ContextVar("_dump_dir", default=None)  # set by kept: PTX and cubin go there
_line_info: ContextVar[bool] = ContextVar("_line_info", default=False)  # set by kept: PTX names lines of the Python source


class CompileError(NotImplementedError):
    """The DSL cannot compile a kernel; says which kernel, for which arch, with which DSL. The cause is the DSL's exception."""


# ----- architectures --------------------------------------------------------------------------------------------------


def arch_of(device) -> str:
    """The compile target of a device, torch.device or what makes one: "sm_90a", "sm_100a", ..., or "cpu".

    Raises ValueError for other kinds of device.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"device: must be cuda or cpu, got {device}")
    return _arch_of_cuda(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _arch_of_cuda(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}a"  # "a": the instructions of exactly this architecture, such as wgmma and tcgen05


def arch_module(op: str, arch: str) -> ModuleType:
    """The shipped kernel module of an op: `mla_cute.sm90.<op>` for sm_90a, sm100 for sm_100a and sm_103a, reference for cpu.

    Raises NotImplementedError when there is none.
    """
    if arch == "cpu":
        return importlib.import_module("mla_cute.reference")
    digits = re.fullmatch(r"sm_(\d+)\d[af]?", arch)
    folder = f"sm{digits[1]}0" if digits else ""
    if not (PACKAGE / folder / f"{op}.py").is_file():
        raise NotImplementedError(f"{op}: no kernel for {arch}")
    return importlib.import_module(f"mla_cute.{folder}.{op}")


# ----- what a kernel module's compile() calls -------------------------------------------------------------------------


def fake_tensor(dtype, shape, stride=None, align=None):
    """A tensor argument for `build`: dims and strides (elements) are ints or `cute.sym_int()`s, a tied dim the same object.

    stride: default row-major. TVM-FFI checks every call against this: static dims, divisibility of the strides of dims
    larger than 1, equal tied dims, `align` bytes of the first element (default: one element). A row-major stride that
    follows from a symbolic dim is free.
    """
    from cutlass import cute

    if stride is not None:
        return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)
    row_major = tuple(reversed(range(len(shape))))  # the DSL's default is column-major
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=row_major, assumed_align=align)


def fake_stream():
    """The stream argument for `build`: not an argument of the compiled function, which launches on torch's current stream."""
    from cutlass import cute

    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def build(host_fn, *fake_args, arch: str, name: str | None = None):
    """Compile a `@cute.jit` host function for `arch` without launching it; `None` stands for an absent tensor.

    Returns a TVM-FFI function of the same arguments less the stream, all positional. Raises CompileError, naming `name`.
    """
    from cutlass import cute

    # Without an arch the DSL asks the driver or, where there is none, silently takes sm_100a.
    options = f"--gpu-arch {arch} --enable-tvm-ffi"
    if _dump_dir.get():
        options += f" --keep-ptx --keep-cubin --dump-dir {_dump_dir.get()} remarks{{ptx}}"
        options += " --generate-line-info" * _line_info.get()
    try:
        return cute.compile(host_fn, *fake_args, options=options)
    except Exception as e:
        job = _job.get()
        name = name or (job.name if job else getattr(host_fn, "__name__", type(host_fn).__name__))
        about = [f"{name}: does not compile for {arch} with nvidia-cutlass-dsl {_version('nvidia-cutlass-dsl')}"]
        if job:
            about += [f"  module: {job.module.__name__}", f"  problem: {job.problem}", f"  config: {job.config}"]
        raise CompileError("\n".join([*about, f"  {type(e).__name__}: {_plain(str(e)).strip()}"])) from e


# ----- memory, disk, compile ------------------------------------------------------------------------------------------


def load(module: ModuleType, problem, config, arch: str) -> Callable:
    """The launchable function of `module.compile(problem, config, arch)`, compiled at most once per source and machine.

    Looks in memory, then on disk, then compiles and writes both; threads and processes that ask for the same kernel wait
    for the one that compiles. problem and config must be hashable and have a repr that says all that matters (frozen
    dataclasses do). What `compile` returns need not come from the DSL: a plain callable is kept in memory only, and arch
    "cpu" never touches the disk. Raises CompileError, and whatever `module.compile` raises itself.
    """
    key = (module.compile, module, problem, config, arch)  # compile: another one after importlib.reload
    fn = _memory.get(key)  # every launch comes by here: under 1 us
    if fn is None:
        with _lock:
            fn = _memory.get(key)
            if fn is None:
                fn = _memory[key] = _load(Job(*key[1:]))[0]
    return fn


def cache_dir() -> Path:
    """The directory of compiled kernels; deleting it, or any part of it, is safe. Raises OSError without a home for it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mla_cute"
    try:
        return Path(os.environ.get("MLA_CUTE_CACHE_DIR") or default).expanduser()
    except RuntimeError:  # no HOME, and a user that the system does not know, as in a container
        raise FileNotFoundError(errno.ENOENT, "no home directory, and MLA_CUTE_CACHE_DIR is not set") from None


def fingerprint(module: ModuleType) -> str:
    """What the code of a kernel depends on beside its key: sources, versions, Python, machine, the DSL's settings.

    Sources are all of mla_cute, less the emulator, which compiles nothing; for a module outside it also every .py file in
    the module's directory (its helpers).
    """
    digest = hashlib.sha256()
    for path in _sources(module):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    settings = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    versions = [_version(name) for name in DISTRIBUTIONS]
    digest.update(repr((versions, settings, sys.version_info[:2], platform.machine())).encode())
    return digest.hexdigest()[:16]


def _sources(module: ModuleType) -> list[Path]:
    own, emulator = Path(module.__file__).resolve(), PACKAGE / "emulator"
    inside = [path for path in PACKAGE.rglob("*.py") if emulator not in path.parents]
    outside = [] if PACKAGE in own.parents else own.parent.glob("*.py")
    # is_file: an editor's lock of an unsaved file is a link to nothing.
    return sorted(path for path in [*inside, *outside] if path.is_file())


def _entry(job: Job) -> tuple[str, Path | None]:
    """Name of the job's function in its object file, and that file in the cache (None: not to be cached on disk)."""
    file = getattr(job.module, "__file__", None)
    # The file too: modules loaded from paths of one directory may have the same name.
    key = repr((job.module.__name__, file and Path(file).name, job.problem, job.config, job.arch))
    key = hashlib.sha256(key.encode()).hexdigest()
    symbol = f"mla_{key[:24]}"
    if job.arch == "cpu" or not file:  # torch code; or no source to fingerprint
        return symbol, None
    try:
        folder = cache_dir()
    except OSError as e:
        _say_once(f"{e.strerror}: kernels are compiled in every process")
        return symbol, None
    for path in _sources(job.module):
        # What runs here may be the old source: it must not be stored under the new one's fingerprint. (A file of the
        # future, by another machine's clock, says nothing.)
        if _STARTED < path.stat().st_mtime < time.time() + 60:
            _say_once(f"{path} changed after this process started: {job.module.__name__} is not cached on disk")
            return symbol, None
    return symbol, folder / fingerprint(job.module) / f"{key}.o"


def _load(job: Job) -> tuple[Callable, bool]:
    """(function, whether the disk had it)"""
    symbol, entry = _entry(job)
    fn = _read(entry, symbol)
    if fn is not None:
        return fn, True
    with _one_process(entry):
        fn = _read(entry, symbol)  # another process may have written it while this one waited
        return (fn, True) if fn is not None else (_compile(job, symbol, entry), False)


def _compile(job: Job, symbol: str, entry: Path | None) -> Callable:
    started = time.perf_counter()
    token = _job.set(job)
    try:
        compiled = job.module.compile(job.problem, job.config, job.arch)
    finally:
        _job.reset(token)
    if not hasattr(compiled, "export_to_c"):  # a plain callable
        return compiled
    with tempfile.TemporaryDirectory(prefix="mla_cute_") as folder:
        path = Path(folder, "kernel.o")  # the suffix selects the format
        compiled.export_to_c(str(path), function_name=symbol)
        fn, data = _open(path, symbol), path.read_bytes()
    stored = entry is not None and _write(entry, data)
    seconds = time.perf_counter() - started
    if seconds > SLOW_SECONDS:
        where = f"cached in {entry}" if stored else "not cached on disk"
        _say(f"compiled {job.name} for {job.arch} ({job.module.__name__}) in {seconds:.1f} s, {where}")
    return fn


def _open(path: Path, symbol: str) -> Callable:
    from cutlass import cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), symbol)


def cached_bytes(job: Job, suffix: str, make: Callable[[], bytes]) -> bytes:
    """What `make()` returns, made at most once per source and machine: kept on disk beside the job's object file."""
    _, entry = _entry(job)
    entry = entry and entry.with_suffix(suffix)
    with _one_process(entry):
        data = _intact(entry)
        if data is None:
            data = make()
            if entry:
                _write(entry, data)
    return data


def _read(entry: Path | None, symbol: str) -> Callable | None:
    return None if _intact(entry) is None else _open(entry, symbol)


def _intact(entry: Path | None) -> bytes | None:
    """The bytes of a cache entry; None when there is none or it is damaged, which the loader would not always see."""
    try:
        data = entry.read_bytes() if entry else b""
    except OSError:
        return None
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return body if body and hashlib.sha256(body).digest() == digest else None


def _write(entry: Path, data: bytes) -> bool:
    part = entry.with_suffix(f".{uuid.uuid4().hex}")
    try:
        try:
            part.write_bytes(data + hashlib.sha256(data).digest())
            os.replace(part, entry)  # readers see a whole entry or none
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        _say_once(
            f"cannot write to {cache_dir()} ({e.strerror}): kernels are compiled in every process; set MLA_CUTE_CACHE_DIR"
        )
        return False
    return True


@contextlib.contextmanager
def _one_process(entry: Path | None):
    """Lets one process at a time compile an entry. Where no lock can be had two may: that costs time, nothing else."""
    with contextlib.ExitStack() as stack:
        if entry:
            with contextlib.suppress(OSError):
                entry.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(open(entry.with_suffix(".lock"), "w")), fcntl.LOCK_EX)
        yield


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)  # the DSL colours its messages


def _say(text: str) -> None:
    print(f"mla_cute: {text}", file=sys.stderr)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _say(text)


# ----- looking at what was compiled -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inspection:
    """What the compiler made of a kernel module: one PTX text and one cubin per GPU module, each of one or more kernels."""

    seconds: float  # of module.compile, without inspection's own work
    ptx: tuple[str, ...]
    cubins: tuple[bytes, ...]
    log: str  # what compiling wrote to stderr: ptxas -v and the DSL's remarks

    @functools.cached_property
    def resources(self) -> dict[str, dict[str, int]]:
        """Per kernel symbol REG (per thread), STACK, LOCAL (bytes per thread), SHARED (static bytes), by `cuobjdump`.

        Dynamic shared memory is a launch argument and not in a cubin. Raises FileNotFoundError without the tool.
        """
        found = {}
        for cubin in self.cubins:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(cubin)
                text = subprocess.check_output([_cuobjdump(), "-res-usage", file.name], text=True)
            for name, usage in re.findall(r"Function ([^\s:]+):\s*\n(.*)", text):
                found[name] = {key: int(n) for key, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
        return found

    @functools.cached_property
    def advisories(self) -> tuple[str, ...]:
        """ptxas' numbered messages, such as C7508 (setmaxnreg ignored) and C7510-C7517 (WGMMA serialised, wait injected)."""
        log = re.sub(r"\nptxas +\. +", " ", self.log)  # how a long message goes on
        return tuple(line.strip() for line in log.splitlines() if re.search(r"\(C\d{4}\)", line))

    @functools.cached_property
    def spill_bytes(self) -> int:
        """Spill stores and loads of all kernels together, in bytes, as ptxas counts them."""
        return sum(map(int, re.findall(r"(\d+) bytes spill", self.log)))


def inspect(module: ModuleType, problem, config, arch: str) -> Inspection:
    """Compile for a look at PTX, registers, stack and ptxas' messages; past both caches, no GPU needed, launches nothing.

    Redirects the process's stderr while it compiles: for tests and tools. Raises CompileError.
    """
    with kept(Job(module, problem, config, arch)) as folder:
        started = time.perf_counter()
        with captured_stderr() as read_log:
            module.compile(problem, config, arch)
            seconds = time.perf_counter() - started
            log = _plain(read_log())
        ptx = tuple(path.read_text(errors="replace") for path in sorted(folder.glob("*.ptx")))
        cubins = tuple(path.read_bytes() for path in sorted(folder.glob("*.cubin")))
    return Inspection(seconds, ptx, cubins, log)


@contextlib.contextmanager
def kept(job: Job, line_info: bool = False) -> Iterator[Path]:
    """A folder in which `build` leaves PTX and cubins of what is compiled for `job` meanwhile; it goes with the context."""
    with _lock, tempfile.TemporaryDirectory(prefix="mla_cute_") as folder:
        tokens = (_job, _job.set(job)), (_dump_dir, _dump_dir.set(folder)), (_line_info, _line_info.set(line_info))
        try:
            yield Path(folder)
        finally:
            for variable, token in tokens:
                variable.reset(token)


@contextlib.contextmanager
def captured_stderr():
    """Collects what Python (sys.stderr) and the compiler's C++ (file descriptor 2) write; shows it if the body fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:

        def read() -> str:
            file.flush()
            file.seek(0)
            return file.read()

        saved = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            with contextlib.redirect_stderr(file):
                yield read
        except BaseException:
            os.write(saved, read().encode())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _cuobjdump() -> str:
    """From the pip wheel nvidia-cuda-cuobjdump, else from the PATH."""
    wheel = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", "cuobjdump")
    return str(wheel) if wheel.exists() else "cuobjdump"


# ----- compiling ahead ------------------------------------------------------------------------------------------------


OPS = ("sparse_decode", "write_kv_cache", "quantize_kv_cache")


def warmup(
    h_q=128,
    *,
    op="sparse_decode",
    has_topk_length=(False, True),
    has_attn_sink=(False, True),
    kv_format="v32",
    has_extra=False,
    has_extra_topk_length=False,
    scales="pow2",
    arch: str | None = None,
    impl: ModuleType | str | None = None,
    config=None,
    jobs: int | None = None,
    progress: bool = True,
) -> list[tuple[str, float, bool]]:
    """Compile kernels into the disk cache, several at a time; needs no GPU when `arch` is given.

    op: "sparse_decode" (with its planner), "write_kv_cache" (for both types of slots), "quantize_kv_cache", or several;
    kv_format: "v32", "model1" or both; arch: such as "sm_90a", default the current GPU's; jobs: processes, default the CPUs
    this one may use; progress: draw a bar. The processes are spawned, so a script calls this under
    `if __name__ == "__main__":`.

    Of sparse_decode: h_q: query heads, an int or several; has_topk_length, has_attn_sink, has_extra (extra keys),
    has_extra_topk_length: bools, or both values; impl, config: as in the op. Of the others: scales: "pow2", "amax" or both
    (where the format has them).

    Returns (kernel, seconds, whether it was there already) per kernel. Raises, before it compiles, ValueError or TypeError
    naming the argument and NotImplementedError for an arch without a kernel; then CompileError, RuntimeError naming the
    kernel for any other failure, OSError when the cache cannot be written.
    """
    from .cache_writer import has_kernel
    from .interface import check_config, select_impl
    from .validate import FORMATS, MAX_HEADS

    ops = _several("op", op, str)
    for name in ops:
        if name not in OPS:
            raise ValueError(f"op: must be {', '.join(OPS)} or several of them, got {name}")
    heads = _several("h_q", h_q, int)
    lengths = _several("has_topk_length", has_topk_length, bool)
    sinks = _several("has_attn_sink", has_attn_sink, bool)
    formats = _several("kv_format", kv_format, str)
    extras = _several("has_extra", has_extra, bool)
    extra_lengths = _several("has_extra_topk_length", has_extra_topk_length, bool)
    known = [fmt.name for fmt in FORMATS.values()]
    for name in formats:
        if name not in known:
            raise ValueError(f"kv_format: must be {' or '.join(known)}, got {name}")
    scales = _several("scales", scales, str)
    for name in scales:
        if name not in ("pow2", "amax"):
            raise ValueError(f"scales: must be pow2 or amax, got {name}")
    if ops != ("sparse_decode",) and (formats, scales) == (("model1",), ("amax",)):
        raise ValueError("scales: must be pow2 for model1, whose scales are e8m0, got amax")
    if extra_lengths == (True,) and True not in extras:
        raise ValueError("has_extra: must be True with has_extra_topk_length, got False")
    for n in heads:
        if not 1 <= n <= MAX_HEADS:
            raise ValueError(f"h_q: must be 1 to {MAX_HEADS}, got {n}")
    if jobs is not None and type(jobs) is not int:
        raise TypeError(f"jobs: must be an int, got {jobs!r}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs: must be at least 1, got {jobs}")
    if arch is None:
        import torch

        if not torch.cuda.is_available():
            raise ValueError('arch: must be given on a machine without a GPU, such as "sm_90a", got None')
        arch = arch_of("cuda")
    if not isinstance(arch, str):
        raise TypeError(f'arch: must be a str such as "sm_90a", got {arch!r}')
    if not re.fullmatch(r"sm_\d+a", arch):  # as `arch_of` names a GPU: no call would look for another
        raise ValueError(f'arch: must be a GPU architecture such as "sm_90a", got "{arch}"')
    module = None
    for name in ops:
        if name == "sparse_decode":
            module = arch_module(name, arch) if impl is None else select_impl("cpu", impl)
            if config is not None:
                check_config(module, config)
        elif not has_kernel(arch):
            raise NotImplementedError(f"{name}: no kernel for {arch}")
    extra = {"kv_format": formats, "has_extra": extras, "has_extra_topk_length": extra_lengths}
    todo = warmup_jobs(heads, lengths, sinks, arch, module, config, op=ops, scales=scales, **extra)
    for job in todo:
        if job.module is module:
            job.config.check(job.problem)
    return compile_ahead(todo, processes=jobs, progress=progress)


def warmup_jobs(
    h_q,
    has_topk_length,
    has_attn_sink,
    arch,
    impl=None,
    config=None,
    *,
    kv_format=("v32",),
    has_extra=(False,),
    has_extra_topk_length=(False,),
    op=("sparse_decode",),
    scales=("pow2",),
) -> list[Job]:
    """Every kernel that the ops launch for these problems (sequences of values); sparse_decode: the planner's and its own."""
    from . import cache_writer_kernel, schedule_kernel
    from .kv_cache import FORMATS as LAYOUTS
    from .validate import FORMATS, Problem

    formats = [fmt for fmt in FORMATS.values() if fmt.name in kv_format]
    found = []
    for name, fmt, rule in itertools.product(op, formats, scales):
        if name == "sparse_decode" or (rule == "amax" and LAYOUTS[fmt.name].scale_bytes == 1):
            continue
        for slot_bytes in (8, 4) if name == "write_kv_cache" else (0,):
            write = cache_writer_kernel.WriteProblem(fmt.name, rule, slot_bytes)
            found.append(Job(cache_writer_kernel, write, cache_writer_kernel.default_config(write), arch))
    if "sparse_decode" not in op:
        formats = []
    for fmt, heads, lengths, extra, extra_lengths, sink in itertools.product(
        formats, h_q, has_topk_length, has_extra, has_extra_topk_length, has_attn_sink
    ):
        if extra_lengths and not extra:
            continue
        problem = Problem(
            op="sparse_decode",
            h_q=heads,
            d_qk=fmt.d_qk,
            kv_format=fmt.name,
            has_topk_length=bool(lengths),
            has_attn_sink=bool(sink),
            has_extra=bool(extra),
            has_extra_topk_length=bool(extra_lengths),
        )
        module = impl or arch_module(problem.op, arch)
        # A workspace is for huge batches only.
        plan = schedule_kernel.PlanProblem(
            problem.has_topk_length, use_workspace=False, has_extra_topk_length=problem.has_extra_topk_length
        )
        chosen = config or module.default_config(problem)
        found += [Job(module, problem, c, arch) for c in (chosen.kernels() if hasattr(chosen, "kernels") else [chosen])]
        found.append(Job(schedule_kernel, plan, None, arch))
    return list(dict.fromkeys(found))


def compile_ahead(todo: list[Job], processes: int | None = None, progress: bool = True) -> list:
    """`load` every job in spawned processes, for the disk cache's sake; results and errors as `warmup`."""
    from tqdm import tqdm

    if not todo:
        return []
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache_dir()):
        pass  # a cache that cannot be written would lose all the work
    processes = min(processes or len(os.sched_getaffinity(0)), len(todo))
    done = []
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The module goes by name and file, the rest as bytes: the worker must import the module before it unpickles.
        sent = {
            pool.submit(_work, job.module.__name__, getattr(job.module, "__file__", None), pickle.dumps(job[1:])): job
            for job in todo
        }
        for future in tqdm(as_completed(sent), total=len(sent), desc="compile", unit="kernel", disable=not progress):
            job = sent[future]
            name = f"{job.name} {job.arch} {job.problem}"
            try:
                done.append((name, *future.result()))
            except CompileError:
                pool.shutdown(cancel_futures=True)
                raise
            except BrokenProcessPool as e:
                raise RuntimeError(
                    f"warmup: a process died at or before {name}; out of memory (pass a smaller jobs=), or a script "
                    'that calls warmup outside `if __name__ == "__main__":`'
                ) from e
            except Exception as e:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"warmup: {name} failed: {type(e).__name__}: {e}") from e
    return done


def _work(module_name: str, file: str | None, rest: bytes) -> tuple[float, bool]:
    """In a worker process: (seconds, whether the disk had it)."""
    global SLOW_SECONDS
    SLOW_SECONDS = float("inf")  # the progress bar tells enough
    started = time.perf_counter()
    job = Job(_imported(module_name, file), *pickle.loads(rest))
    cached = _load(job)[1]
    return time.perf_counter() - started, cached


def _imported(name: str, file: str | None) -> ModuleType:
    """The module of that name; one that was loaded from a path, and is not to be found by name, from its file."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if name == "__main__" or getattr(module, "__file__", None) == file:
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _several(name: str, value, kind: type) -> tuple:
    """One value of a kind, or an iterable of them, as a tuple."""
    values = tuple(value) if hasattr(value, "__iter__") and not isinstance(value, str) else (value,)
    if any(type(v) is not kind for v in values):
        raise TypeError(f"{name}: must be {kind.__name__} or several, got {value!r}")
    return values
