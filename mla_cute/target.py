"""Where a call runs: a device, or the emulator. The only place that knows both.

| tensors | backend    | arch             | kernels come from    |
|---------|------------|------------------|----------------------|
| CPU     |            | cpu              | `jit.load`, torch    |
| CUDA    |            | the device's     | `jit.load`           |
| CPU     | "emulator" | the session's    | `emulator.run.load`  |

Environment: MLA_CUTE_BACKEND=emulator makes the emulator the backend of every call that names none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._dynamo import guards

from . import jit

CPU_NUM_SMS = 132  # plans made on the CPU are those of an H100 or H200
DEFAULT_BACKEND = os.environ.get("MLA_CUTE_BACKEND") or None


class Target(NamedTuple):
    arch: str  # "sm_90a", ..., or "cpu"
    num_sms: int
    load: Callable  # (module, problem, config, arch) -> the launchable function
    # (shape, strides, dtype) -> uninitialised tensor on the CPU or the current CUDA device. The two of torch are what
    # torch.compile's code allocates with: less than half the time of torch.empty.
    empty: Callable
    # (blocks of keys, all heads and query tokens counted) -> None, or ValueError when that would take far too long
    admit: Callable = lambda blocks: None


def target(device: torch.device, backend: str | None = None) -> Target:
    """backend None: the environment's. Raises ValueError naming `backend` when it is unknown or not for this device."""
    backend = DEFAULT_BACKEND if backend is None else backend
    if backend is None:
        return device_target(device)
    if backend != "emulator":
        raise ValueError(f'backend: must be None or "emulator", got {backend!r}')
    if device.type != "cpu":
        raise ValueError(f"backend: the emulator takes CPU tensors, got tensors on {device}")
    from .emulator import run

    session = run.current()
    return Target(session.arch, session.num_sms, run.load, run.empty, session.admit)


def is_traced(t: object) -> bool:
    """Whether t stands for a tensor of a graph that is being made without Dynamo (torch.export), or only for its shape.

    Not `torch.compiler.is_compiling()`: that holds for the whole process, so in another thread's calls with real tensors too,
    and takes a few tenths of a us of each call.
    """
    if type(t) is torch.Tensor:
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(t, (FakeTensor, FunctionalTensor))


def is_recorded(names: tuple[str, ...], arguments: tuple) -> bool:
    """Whether a graph records a call with these tensors (None and others do not count): then it is to be an op of it.

    So it is while torch.export or make_fx trace, and with fake tensors. Raises TypeError naming an argument that cannot be
    traced: a fake tensor beside real ones, or anything while torch.jit.trace runs.
    """
    if not _len_torch_dispatch_stack() and _get_tracing_state() is None:
        for t in arguments:
            if type(t) is not torch.Tensor and t is not None:
                break
        else:
            return False
    # torch excludes the key where the modes are not to see what is called: inside of the op, for one
    is_seen = _len_torch_dispatch_stack() and not torch._C._dispatch_tls_is_dispatch_key_excluded(_PYTHON)
    if is_seen and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING):
        return True
    tensors = [(name, t) for name, t in zip(names, arguments) if isinstance(t, torch.Tensor)]
    if _get_tracing_state() is not None:
        needed = "must not be traced by torch.jit.trace (torch.compile and torch.export take this call)"
        raise TypeError(f"{names[0]}: {needed}, got a {type(arguments[0]).__name__} while it runs")
    if all(type(t) is torch.Tensor for _, t in tensors):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    fakes = [(name, t) for name, t in tensors if isinstance(t, FakeTensor)]
    reals = [name for name, t in tensors if t.numel() and not is_traced(t)]
    if fakes and reals and not fakes[0][1].fake_mode.allow_non_fake_inputs:
        raise TypeError(f"{fakes[0][0]}: must be a tensor with memory as {reals[0]} is, got a FakeTensor")
    return any(is_traced(t) for _, t in tensors)


_PYTHON = torch._C.DispatchKey.Python
_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE", "FUNCTIONAL"))


def arch_of(device: torch.device, backend: str | None = None) -> str:
    """The architecture alone: also of a device that has no kernel."""
    backend = DEFAULT_BACKEND if backend is None else backend
    return jit.arch_of(device) if backend is None else target(device, backend).arch


@functools.cache
def device_target(device: torch.device) -> Target:
    arch = jit.arch_of(device)
    if arch == "cpu":
        return Target(arch, CPU_NUM_SMS, jit.load, guards._empty_strided_cpu)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(arch, num_sms, jit.load, guards._empty_strided_cuda)
