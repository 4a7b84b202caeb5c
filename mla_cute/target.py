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
