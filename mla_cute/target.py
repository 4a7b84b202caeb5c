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
import warnings
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
    # CTAs of a cluster, each with an SM to itself -> how many such clusters run at the same time
    max_clusters: Callable[[int], int] = lambda size: 0


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
    return Target(
        session.arch, session.num_sms, run.load, run.empty, session.admit, lambda size: session.num_sms // size
    )


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
    max_clusters = functools.partial(_max_clusters, device)
    return Target(arch, num_sms, jit.load, guards._empty_strided_cuda, max_clusters=max_clusters)


def _max_clusters(device: torch.device, size: int) -> int:
    return _clusters(device).get(size, 0)


@functools.cache
def _clusters(device: torch.device) -> dict[int, int]:
    """{CTAs of a cluster: how many run at the same time} by the driver: SMs come in groups (GPCs) of different sizes, and a
    cluster lies in one of them. All sizes at once, in the first call: none is asked for while a CUDA graph is captured.

    Empty, with a warning, where the driver does not tell: then small batches do without them.
    """

    def checked(result: tuple):
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(result[0].name)
        return result[1] if len(result) > 1 else None

    try:
        from cuda.bindings import driver  # loads libcuda

        # The primary context, which torch uses too, and keeps: here nobody may have made it yet.
        checked(driver.cuInit(0))
        index = torch.cuda.current_device() if device.index is None else device.index
        checked(driver.cuCtxPushCurrent(checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))))
        try:
            module = checked(driver.cuModuleLoadData(_EMPTY_KERNEL))
            try:
                function = checked(driver.cuModuleGetFunction(module, b"empty"))
                attributes = driver.CUfunction_attribute
                shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
                for attribute, value in (
                    (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
                    (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
                ):
                    checked(driver.cuFuncSetAttribute(function, attribute, value))
                return {size: checked(_ask(driver, function, size, shared)) for size in range(2, 17)}
            finally:
                checked(driver.cuModuleUnload(module))
        finally:
            checked(driver.cuCtxPopCurrent())
    except Exception as e:
        warnings.warn(f"{device}: the driver does not say how many clusters fit ({e}): small batches do without", stacklevel=2)
        return {}


def _ask(driver, function, size: int, shared: int) -> tuple:
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 1, 1, size
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = 1, 1, size
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
    launch.sharedMemBytes, launch.attrs, launch.numAttrs = shared, [cluster], 1
    return driver.cuOccupancyMaxActiveClusters(function, launch)


_EMPTY_KERNEL = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\0"
