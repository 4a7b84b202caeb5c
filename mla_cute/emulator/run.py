"""From a kernel module to a callable that runs it here: `load` is to the emulator what `jit.load` is to a GPU.

    load ──► jit (compile for emulation: object, PTX; on disk) ──► host.HostFunction ──► Launch ──► machine.run_launches
                                                             └──► ptx.parse ──► decode.Program ──┘
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import jit
from ..validate import num_bytes_of
from . import ptx
from .decode import Program
from .host import MAX_CLUSTER, SHARED_OPT_IN, Compiled, HostFunction, Launch, check_launch, compile_for_emulation
from .machine import RESERVED, EmulationError, Finding, GlobalMemory, Grid, Options, run_launches

MAX_SECONDS = 600.0  # an estimate above this is refused without `force`
SECONDS_PER_KEY_BLOCK = 0.15  # 64 keys by 64 heads in the Hopper kernel (measured, one core)
TARGETS = ("sm_90a", "sm_100a", "sm_100f", "sm_103a")  # of PTX that run_ptx takes
SECONDS_PER_CTA = 0.006  # one that finds nothing to do (measured, one core)


@dataclass
class Session:
    """How emulated kernels run, and what became of them."""

    arch: str = "sm_90a"
    options: Options = field(default_factory=Options)
    num_sms: int = 132  # of the GPU that the host code and the plan believe in
    strict: bool = True  # findings raise EmulationError
    force: bool = False  # run however long it takes
    trace: Any = None  # see report.Trace
    findings: list[Finding] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)  # finished launches
    seconds: float = 0.0

    def admit(self, key_blocks: int, ctas: int = 0) -> None:
        """ValueError when what is to be run would take too long and was not forced."""
        seconds = key_blocks * SECONDS_PER_KEY_BLOCK + ctas * SECONDS_PER_CTA
        if seconds > MAX_SECONDS and not self.force:
            work = f"{ctas} CTAs" if ctas else f"{key_blocks} blocks of keys"
            raise ValueError(
                f"too large to emulate: {work} take about {seconds / 60:.0f} minutes; "
                "take a smaller shape, or a session with force=True"
            )


_session: ContextVar[Session | None] = ContextVar("_session", default=None)


def current() -> Session:
    """The session in force; outside of one, a strict one with the arch of MLA_CUTE_EMULATOR_ARCH (default sm_90a)."""
    return _session.get() or Session(arch=os.environ.get("MLA_CUTE_EMULATOR_ARCH", "sm_90a"))


@contextlib.contextmanager
def session(**options) -> Iterator[Session]:
    """`with session(arch="sm_90a", options=Options(seed=3), strict=False) as s:` collects findings and finished launches."""
    s = Session(**options)
    token = _session.set(s)
    try:
        yield s
    finally:
        _session.reset(token)


class Emulated:
    """A compiled function whose kernels run in the emulator. Arguments as on a GPU, but CPU tensors."""

    def __init__(self, compiled: Compiled, arch: str):
        self.modules = [ptx.parse(text) for text in compiled.ptx]
        for module in self.modules:
            if module.target != arch:
                raise ValueError(f"arch: PTX of target {module.target} cannot run as {arch}")
        self.kernels = {name: module for module in self.modules for name in module.kernels}
        self.programs: dict[str, Program] = {}
        self.compiled, self.arch = compiled, arch
        self.hosts: dict[int, HostFunction] = {}

    def program(self, kernel: str) -> Program:
        if kernel not in self.programs:
            self.programs[kernel] = Program(self.kernels[kernel], kernel)
        return self.programs[kernel]

    def host(self, num_sms: int) -> HostFunction:
        if num_sms not in self.hosts:
            sizes = lambda kernel: [p.size for p in self.kernels[kernel].kernels[kernel].params]  # noqa: E731
            c = self.compiled
            self.hosts[num_sms] = HostFunction(c.object_file, c.symbol, sizes, num_sms=num_sms, arch=self.arch)
        return self.hosts[num_sms]

    def __call__(self, *args) -> None:
        s = current()
        started = time.perf_counter()
        memory = GlobalMemory()
        for i, t in enumerate(args):
            if isinstance(t, torch.Tensor):
                memory.add(t.data_ptr(), num_bytes_of(t), f"argument {i} {list(t.shape)}", t)
        launches = self.host(s.num_sms)(*args)
        s.admit(0, sum(x.grid[0] * x.grid[1] * x.grid[2] for x in launches))
        findings: list[Finding] = []
        try:
            pairs = [(self.program(launch.kernel), launch) for launch in launches]
            findings, grids = run_launches(pairs, memory, s.options, s.trace)
            s.grids += grids
        except EmulationError as e:
            findings = e.findings
            if s.strict:
                raise
        finally:
            s.findings += findings
            s.seconds += time.perf_counter() - started
        if findings and s.strict:
            raise EmulationError(findings)


_memory: dict[tuple, Callable] = {}


def load(module, problem, config, arch: str) -> Callable:
    """As `jit.load`: the function of `module.compile(problem, config, arch)`, to be called with CPU tensors."""
    key = (module, problem, config, arch)
    if key not in _memory:
        _memory[key] = Emulated(_compiled(module, problem, config, arch), arch)
    return _memory[key]


def _compiled(module, problem, config, arch: str) -> Compiled:
    """From the disk cache, or compiled and stored there: by the place of the sources too, which the PTX names."""
    make = lambda: pickle.dumps(tuple(compile_for_emulation(module, problem, config, arch)))  # noqa: E731
    place = hashlib.sha256(repr((jit.PACKAGE, getattr(module, "__file__", None))).encode()).hexdigest()[:16]
    return Compiled(*pickle.loads(jit.cached_bytes(jit.Job(module, problem, config, arch), f".{place}.emu", make)))


def empty(shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty_strided, filled with NaN or large numbers: a kernel that reads it or leaves it shows."""
    t = torch.empty_strided(shape, strides, dtype=dtype)
    t.view(torch.uint8).fill_(0xFF)
    return t


def run_ptx(
    text: str,
    args,
    *,
    kernel: str | None = None,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    smem_bytes: int = 0,
    options: Options | None = None,
    trace=None,
) -> list[Finding]:
    """Run one kernel of a PTX text; returns the findings, the last of which is why it stopped if it did.

    args: one per .param: a CPU tensor or writable numpy array (its address), a number (in the parameter's size), or bytes.
    kernel: the entry's name, where there are several. cluster, smem_bytes: as a launch would ask for them.

    Raises ValueError for what a launch would refuse, TypeError for an argument that is no such thing.
    """
    if not isinstance(text, str):
        raise TypeError(f"text: must be PTX as a str, got {type(text).__name__}")
    module = ptx.parse(text)
    if not module.kernels:
        raise ValueError("text: has no kernel (.entry)")
    if module.target not in TARGETS:
        raise ValueError(f"text: .target must be one of {', '.join(TARGETS)}, got {module.target!r}")
    name = next(iter(module.kernels)) if kernel is None else kernel
    if name not in module.kernels:
        raise ValueError(f"kernel: must be one of {', '.join(module.kernels)}, got {name!r}")
    program = Program(module, name)
    args, wanted = list(args), program.kernel.params
    if len(args) != len(wanted):
        raise ValueError(f"args: kernel {name} has {len(wanted)} parameters, got {len(args)}")
    memory = GlobalMemory()
    params = tuple(_parameter(i, arg, param, memory) for i, (arg, param) in enumerate(zip(args, wanted)))
    dims = [_dims(what, value) for what, value in (("grid", grid), ("block", block), ("cluster", cluster))]
    launch = Launch(name, *dims, operator.index(smem_bytes), False, False, params, num_sms=current().num_sms)
    _check_launch(launch, program)
    try:
        return run_launches([(program, launch)], memory, options or Options(), trace)[0]
    except EmulationError as e:
        return e.findings


def _dims(what: str, value) -> tuple[int, int, int]:
    try:
        dims = tuple(operator.index(n) for n in value)
    except TypeError:
        dims = ()
    if len(dims) != 3 or min(dims) < 1:
        raise ValueError(f"{what}: must be three positive integers, got {value!r}")
    return dims


def _check_launch(launch: Launch, program: Program) -> None:
    """ValueError for what CUDA refuses, the kernel's own directives and static shared memory included."""
    check_launch(launch)
    directives, name = program.kernel.directives, launch.kernel
    needed = directives.get("reqntid")
    if needed and (*needed, 1, 1)[:3] != launch.block:
        raise ValueError(f"{name}: block must be its .reqntid {(*needed, 1, 1)[:3]}, got {launch.block}")
    most, threads = directives.get("maxntid"), math.prod(launch.block)
    if most and threads > math.prod(most):
        raise ValueError(f"{name}: block must have at most {math.prod(most)} threads (.maxntid), got {launch.block}")
    if math.prod(program.cluster) > MAX_CLUSTER:
        raise ValueError(f"{name}: .reqnctapercluster must have at most {MAX_CLUSTER} CTAs, got {program.cluster}")
    static = program.dynamic_offset - RESERVED
    if launch.smem_bytes < 0 or static + launch.smem_bytes > SHARED_OPT_IN:
        text = f"smem_bytes must be 0 to {SHARED_OPT_IN - static}: {SHARED_OPT_IN} less the static {static}"
        raise ValueError(f"{name}: {text}, got {launch.smem_bytes}")


def _parameter(position: int, arg, param: ptx.Param, memory: GlobalMemory) -> bytes:
    """The bytes of an argument. The memory of an array may be accessed from now on."""
    what = f"argument {position} ({param.name})"
    if isinstance(arg, np.ndarray):
        if not arg.flags.writeable:
            raise ValueError(f"{what}: must be writable, got a read-only array")
        if arg.dtype.hasobject:
            raise TypeError(f"{what}: must be an array of numbers, got dtype {arg.dtype}")
        low, high = np.lib.array_utils.byte_bounds(arg)
        address, size = arg.ctypes.data, arg.size and high - low
    elif isinstance(arg, torch.Tensor):
        if arg.device.type != "cpu" or arg.layout != torch.strided:
            raise ValueError(f"{what}: must be a strided tensor on the CPU, got {arg.layout} on {arg.device}")
        address = low = arg.data_ptr()
        size = num_bytes_of(arg)
    elif isinstance(arg, bytes | bytearray):
        if len(arg) != param.size:
            raise ValueError(f"{what}: must have {param.size} bytes, got {len(arg)}")
        return bytes(arg)
    else:
        return _number(what, arg, param)
    if param.size != 8:
        raise ValueError(f"{what}: is a .{param.kind} of {param.size} bytes, no address: got an array")
    memory.add(low, size, f"argument {position} {list(arg.shape)}", arg)
    return address.to_bytes(8, "little")


def _number(what: str, arg, param: ptx.Param) -> bytes:
    kind, size, floats = param.kind, param.size, (float, np.floating)
    if not isinstance(arg, (int, np.integer, np.bool_, *floats)):
        raise TypeError(f"{what}: must be a tensor, an array, a number or bytes, got {type(arg).__name__}")
    if size > 8 or (kind == "b8" and size > 1):
        raise TypeError(f"{what}: is an array of {size} bytes: must be bytes, got {arg!r}")
    if kind in ("f16", "f32", "f64") or (kind[0] == "b" and size > 1 and isinstance(arg, floats)):
        return np.array(float(arg), f"f{size}").tobytes()
    if isinstance(arg, floats):
        raise TypeError(f"{what}: is a .{kind}, got the float {arg!r}")
    low, high = -(1 << 8 * size - 1), (1 << 8 * size) - 1
    if not low <= int(arg) <= high:
        raise ValueError(f"{what}: is a .{kind}, got {arg!r}")
    return (int(arg) & high).to_bytes(size, "little")
