"""The host half of a compiled function, run for real on CPU tensors: it says itself what it launches.

    compile_for_emulation ──► object file, symbol, PTX texts
    object file + STUB ──cc──► shared library ──tvm_ffi──► HostFunction(*CPU tensors) ──► Launch, Launch, ...

The object file that a DSL function exports holds everything that happens on the host at a call: TVM-FFI's checks of the
arguments, grid, cluster and shared-memory size, kernel parameters, TMA descriptors (encoded by the code itself, without the
driver). What it leaves unresolved are a few entry points of the CUDA runtime. STUB provides these: device attributes are
answered from a table, a launch is handed to Python, the rest says "success". Nothing about a launch is written down here.

Needs a C compiler: $CC, else cc, gcc or clang from the PATH.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .. import jit
from .tensormap import INTERLEAVES, L2_PROMOTIONS, Swizzle, TensorMap, element_of

Dim3 = tuple[int, int, int]

SHARED_OPT_IN = 232448  # bytes of shared memory that a CTA may have, sm_90 and sm_10x
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 16  # CTAs; the host code allows the non-portable sizes above 8 for every kernel
ATTRIBUTE_BYTES = 72  # of a cudaLaunchAttribute: id at 0, value at 8
NULL_DEVICE = 2, 0  # kDLCUDA, device 0: what TVM-FFI is told of the CPU memory


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host code asked for it."""

    kernel: str  # entry name in the PTX
    grid: Dim3  # CTAs
    block: Dim3  # threads
    cluster: Dim3  # CTAs; (1, 1, 1) without the attribute (a .reqnctapercluster of the PTX is not looked at)
    smem_bytes: int  # dynamic shared memory
    pdl: bool  # programmatic stream serialisation: may start before the launch ahead of it has ended
    cooperative: bool
    params: tuple[bytes, ...]  # one per .param of the entry, copied at the launch
    preferred: Dim3 | None = None  # cluster size that the hardware may use instead
    num_sms: int = field(default=132, compare=False)  # of the device


class Compiled(NamedTuple):
    """What the emulator needs of a kernel module's function."""

    object_file: bytes
    symbol: str
    ptx: tuple[str, ...]  # one text per GPU module, each of one or more kernels, with .loc lines of the Python source


def compile_for_emulation(module: ModuleType, problem, config, arch: str) -> Compiled:
    """Compile `module.compile(problem, config, arch)` as `jit.load` does, and keep its object file and PTX.

    Past both caches. Redirects the process's stderr while it compiles. Raises what `jit.load` raises, TypeError when
    `compile` returns a plain callable.
    """
    job = jit.Job(module, problem, config, arch)
    symbol = re.sub(r"\W", "_", f"mla_{job.name}")
    with jit.kept(job, line_info=True) as folder:
        with jit.captured_stderr():
            compiled = module.compile(problem, config, arch)
        if not hasattr(compiled, "export_to_c"):
            raise TypeError(f"{job.name}: {module.__name__}.compile must return a DSL function, got {compiled!r}")
        path = folder / "kernel.o"  # the suffix selects the format
        compiled.export_to_c(str(path), function_name=symbol)
        texts = [file.read_text(errors="replace") for file in sorted(folder.glob("*.ptx"))]
        return Compiled(path.read_bytes(), symbol, tuple(map(_true_lines, texts)))


def _true_lines(ptx: str) -> str:
    """Blanks the .loc lines inside inline assembly: they count its lines on from the Python line where it begins."""
    return re.sub(
        r"// begin inline asm\n.*?// end inline asm\n",
        lambda block: re.sub(r"(?m)^\s*\.loc\s.*$", "", block[0]),
        ptx,
        flags=re.DOTALL,
    )


class HostFunction:
    """The host half of a compiled function, linked against a stub of the CUDA runtime; calls wait for one another.

    object_file: what `export_to_c(path, function_name=symbol)` wrote, compiled with --enable-tvm-ffi; a path or the bytes.
    param_sizes: kernel name -> bytes of each .param of that entry, in order, as the PTX declares them.
    num_sms, arch: of the device that the host code sees.

    Raises NotImplementedError naming what the object file wants of CUDA and the stub has not, RuntimeError without a C
    compiler.
    """

    def __init__(
        self,
        object_file: Path | bytes,
        symbol: str,
        param_sizes: Callable[[str], Sequence[int]],
        *,
        num_sms: int = 132,
        arch: str = "sm_90a",
    ):
        self.symbol = symbol
        self._param_sizes = param_sizes
        self._attributes = _device_attributes(num_sms, arch)
        self._lock = threading.Lock()
        self._launches: list[Launch] = []
        self._on_launch: Callable[[Launch], None] | None = None
        self._error: BaseException | None = None  # raised below the C code, which cannot let it through
        # The library calls these: they live as long as it does.
        self._callbacks = _LaunchFn(self._launch), _AttributeFn(self._attribute), _EncodeFn(self._encode)
        self._function = _load(object_file, symbol, self._callbacks)

    def __call__(self, *args, on_launch: Callable[[Launch], None] | None = None) -> list[Launch]:
        """Runs the host code on CPU tensors, None and numbers: the arguments of the compiled function, less the stream.

        The launches are returned in order; `on_launch` gets each one when it is made, before the host code goes on. The
        addresses in them are those of the tensors. An exception of on_launch or param_sizes reaches the caller, and the
        host code launches nothing after it. Raises ValueError for a tensor that is not on the CPU and for a launch that
        CUDA would refuse, and what TVM-FFI raises for arguments that the compiled function does not take.
        """
        args = [_as_cuda(i, arg) for i, arg in enumerate(args)]
        with self._lock:
            self._launches, self._on_launch, self._error = [], on_launch, None
            try:
                self._function(*args)
            except Exception:
                if self._error is None:
                    raise
            finally:
                launches, error = self._launches, self._error
                self._launches, self._on_launch, self._error = [], None, None
        if error is not None:
            raise error
        return launches

    # What the stub calls. A status other than 0 makes the host code return; ctypes would only print an exception.

    def _launch(self, config: int, kernel: bytes, params) -> int:
        if self._error is not None:
            return 1
        try:
            launch = _read_launch(_LaunchConfig.from_address(config), kernel.decode(), params, self._param_sizes)
            launch = replace(launch, num_sms=self._attributes[16])
            self._launches.append(launch)
            if self._on_launch is not None:
                self._on_launch(launch)
        except BaseException as e:
            self._error = e
            return 1
        return 0

    def _attribute(self, number: int, value) -> int:
        if number not in self._attributes:
            self._error = NotImplementedError(f"{self.symbol}: asks for cudaDeviceAttr {number}, not known here")
            return 1
        value[0] = self._attributes[number]
        return 0

    def _encode(self, target: int, *args) -> int:
        try:
            ctypes.memmove(target, _encode_tiled(*args), 128)
        except (ValueError, LookupError) as e:
            self._error = ValueError(f"{self.symbol}: cuTensorMapEncodeTiled: {e}")
            return 1
        return 0


# ----- arguments ------------------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):  # DLPack's, at the beginning of a DLManagedTensor
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # elements
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Disguised:
    """A CPU tensor's memory, as DLPack, under the name of a CUDA device."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return NULL_DEVICE

    def __dlpack__(self, **_):
        from torch.utils.dlpack import to_dlpack

        capsule = to_dlpack(self.tensor)  # holds the tensor
        described = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        described.device_type, described.device_id = NULL_DEVICE
        # torch may write 1 for the stride of a dim of one element; a call with CUDA tensors passes what the tensor says.
        for i, stride in enumerate(self.tensor.stride()):
            described.strides[i] = stride
        return capsule


def _as_cuda(position: int, arg):
    """What to hand to TVM-FFI for an argument; zero copy."""
    import torch
    import tvm_ffi

    if not isinstance(arg, torch.Tensor):
        return arg
    if arg.device.type != "cpu":
        raise ValueError(f"argument #{position}: must be on the CPU for the emulator, got a tensor on {arg.device}")
    return tvm_ffi.from_dlpack(_Disguised(arg.detach()))


# ----- launches -------------------------------------------------------------------------------------------------------


class _LaunchConfig(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    ]


_LaunchFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
_AttributeFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))

_EncodeFn = ctypes.CFUNCTYPE(  # of cuTensorMapEncodeTiled
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_uint64,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint32)] * 2,
    *[ctypes.c_int] * 4,
)
# The driver's enumerations, in order.
_DRIVER_TYPES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"),
    *("b4x16", "b4x16_p64", "b6x16_p32"),
)
_DRIVER_SWIZZLES = {0: Swizzle.NONE, 1: Swizzle.B32, 2: Swizzle.B64, 3: Swizzle.B128} | {
    4: Swizzle.B128_ATOM_32B,
    6: Swizzle.B128_ATOM_64B,
}


def _encode_tiled(kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill) -> bytes:
    """The 128-byte descriptor that the driver would make. strides: bytes, of all dims but the first."""
    element = _DRIVER_TYPES[kind]
    return TensorMap(
        address,
        element,
        tuple(dims[:rank]),
        (element_of(element).bits // 8, *strides[: rank - 1]),
        tuple(box[:rank]),
        tuple(steps[:rank]),
        _DRIVER_SWIZZLES[swizzle],
        INTERLEAVES[interleave],
        bool(fill),
        l2_promotion=L2_PROMOTIONS[promotion],
    ).encode()


COOPERATIVE, CLUSTER, SERIALISATION, PREFERRED_CLUSTER = 2, 4, 6, 11  # cudaLaunchAttributeID
EVENTS = {7: "a programmatic event", 12: "a launch completion event"}  # the value begins with an event, null for none
# Without effect on what a kernel computes: ignored entry, L2 access policy, stream synchronisation policy, cluster
# scheduling policy, priority, memory synchronisation domains (2), shared-memory carveout, NVLink scheduling.
HINTS = {0, 1, 3, 5, 8, 9, 10, 14, 16}


def _read_launch(config: _LaunchConfig, kernel: str, params, param_sizes: Callable[[str], Sequence[int]]) -> Launch:
    attributes = {}
    for i in range(config.num_attributes):
        record = ctypes.string_at(config.attributes + i * ATTRIBUTE_BYTES, ATTRIBUTE_BYTES)
        attributes[struct.unpack_from("i", record)[0]] = record[8:]
    cluster = _dims(attributes.get(CLUSTER)) or (1, 1, 1)
    launch = Launch(
        kernel,
        tuple(config.grid),
        tuple(config.block),
        cluster,
        config.smem_bytes,
        _flag(attributes.get(SERIALISATION)),
        _flag(attributes.get(COOPERATIVE)),
        tuple(ctypes.string_at(params[i], size) for i, size in enumerate(param_sizes(kernel))),
        _dims(attributes.get(PREFERRED_CLUSTER)),
    )
    for number, value in attributes.items():
        if number in EVENTS and any(value[:8]):
            raise NotImplementedError(f"{kernel}: launched with {EVENTS[number]}, which the emulator does not model")
        if number not in {COOPERATIVE, CLUSTER, SERIALISATION, PREFERRED_CLUSTER, *EVENTS, *HINTS}:
            raise NotImplementedError(f"{kernel}: launched with cudaLaunchAttribute {number}, unknown to the emulator")
    check_launch(launch)
    return launch


def _flag(value: bytes | None) -> bool:
    return value is not None and struct.unpack_from("i", value)[0] != 0


def _dims(value: bytes | None) -> Dim3 | None:
    """None for a missing attribute, and for one of zeros: no cluster."""
    dims = struct.unpack_from("3I", value) if value else (0, 0, 0)
    return dims if any(dims) else None


def check_launch(launch: Launch) -> None:
    """What CUDA refuses for any kernel; static shared memory and .reqntid are in the PTX only."""
    threads, ctas = _volume(launch.block), _volume(launch.cluster)
    for wrong, text in (
        (not _within(launch.grid, MAX_GRID), f"grid must be 1 to {MAX_GRID} CTAs"),
        (not _within(launch.block, MAX_BLOCK), f"block must be 1 to {MAX_BLOCK} threads"),
        (threads > MAX_THREADS, f"block must have at most {MAX_THREADS} threads together"),
        (launch.smem_bytes > SHARED_OPT_IN, f"smem_bytes must be at most {SHARED_OPT_IN}"),
        (not 1 <= ctas <= MAX_CLUSTER, f"cluster must have 1 to {MAX_CLUSTER} CTAs"),
        (ctas and any(g % c for g, c in zip(launch.grid, launch.cluster)), "grid must be a multiple of cluster"),
    ):
        if wrong:
            raise ValueError(
                f"{launch.kernel}: {text}, got grid {launch.grid}, block {launch.block}, cluster {launch.cluster}, "
                f"smem_bytes {launch.smem_bytes}"
            )


def _within(dims: Dim3, most: Dim3) -> bool:
    return all(1 <= n <= limit for n, limit in zip(dims, most))


def _volume(dims: Dim3) -> int:
    return dims[0] * dims[1] * dims[2]


def _device_attributes(num_sms: int, arch: str) -> dict[int, int]:
    """cudaDeviceAttr -> value."""
    match = re.fullmatch(r"sm_(9|10)(\d)[af]?", arch)
    if not match:
        raise NotImplementedError(f"arch: must be an sm_9x or sm_10x such as sm_90a or sm_100a, got {arch!r}")
    return {
        1: MAX_THREADS,
        **{2 + i: n for i, n in enumerate((*MAX_BLOCK, *MAX_GRID))},
        8: 48 * 1024,  # shared memory of a CTA that does not opt in to more
        10: 32,  # warp size
        12: 65536,  # registers of a CTA
        16: num_sms,
        39: 2048,  # threads of an SM
        75: int(match[1]),
        76: int(match[2]),
        81: 233472,  # shared memory of an SM
        82: 65536,  # registers of an SM
        95: 1,  # cooperative launch
        97: SHARED_OPT_IN,
        106: 32,  # CTAs of an SM
        111: 1024,  # shared memory of a CTA that is reserved
    }


# ----- the stub and the link ------------------------------------------------------------------------------------------

# The runtime calls behind a leading underscore have the arguments of their namesakes in cuda_runtime_api.h. A kernel handle
# is its name. Statuses: 0 success; -1, from the init function, an error that TVM-FFI has been told already.
STUB = r"""
#include <stdlib.h>
#include <string.h>

#define STUB __attribute__((visibility("hidden")))  /* never those of a real runtime that is loaded as well */

typedef int (*launch_fn)(const void *config, const char *kernel, void **params);
typedef int (*attribute_fn)(int number, int *value);
static launch_fn on_launch;
static attribute_fn on_attribute;
typedef int (*encode_fn)(
    void *, int, unsigned, void *, const void *, const void *, const void *, const void *, int, int, int, int
);
static encode_fn on_encode;

__attribute__((visibility("default"))) void emulator_connect(launch_fn launch, attribute_fn attribute, encode_fn encode) {
    on_launch = launch;
    on_attribute = attribute;
    on_encode = encode;
}

STUB int _cudaLaunchKernelEx(const void *config, const void *kernel, void **params) {
    return on_launch(config, kernel, params);
}
STUB int _cudaDeviceGetAttribute(int *value, int number, int device) { return on_attribute(number, value); }

STUB int _cuTensorMapEncodeTiled(
    void *map, int type, unsigned rank, void *address, const void *dims, const void *strides, const void *box,
    const void *steps, int interleave, int swizzle, int promotion, int fill
) {
    return on_encode(map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill);
}

STUB int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
STUB int _cudaGetDevice(int *device) { *device = 0; return 0; }
STUB int _cudaSetDevice(int device) { return 0; }
STUB int _cudaDeviceSynchronize(void) { return 0; }
STUB int _cudaStreamSynchronize(void *stream) { return 0; }

STUB int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    *library = (void *)code;
    return 0;
}
STUB int _cudaLibraryUnload(void *library) { return 0; }
STUB int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = strdup(name);  /* the name may lie on the caller's stack */
    return *kernel ? 0 : 2;
}

/* Static shared memory is what the host code asks for, to set the dynamic size to the most that is left. It is not known
   here: 0, and the limit is checked where both sizes are. */
STUB int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    if (attribute != 1) return 1;
    *value = 0;
    return 0;
}
STUB int _cudaFuncSetAttribute(const void *kernel, int attribute, int value) { return 0; }
STUB int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }

typedef void (*raise_fn)(const char *kind, const char *message);
typedef void (*raise_parts_fn)(const char *kind, const char **parts, int count);

STUB int cuda_dialect_init_library_once(
    void **state, int (*load)(void **), int (*load_to_device)(void **, int), raise_fn raise
) {
    if (*state) return 0;
    void *library = NULL;
    if (load(&library) || load_to_device(&library, 0)) {
        raise("RuntimeError", "the kernels could not be loaded into the emulator");
        return -1;
    }
    *state = library;
    return 0;
}
STUB void cuda_dialect_assert_success(int status) {}  /* what failed is known to Python */
STUB void cuda_dialect_unload_library_once(void **state) {}
STUB const char *cuda_dialect_get_error_name(int status) { return "emulator"; }
STUB void CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts_fn raise, int status) {
    const char *message = "a CUDA call failed in the emulator";
    raise("RuntimeError", &message, 1);
}
"""


def _load(object_file: Path | bytes, symbol: str, callbacks) -> Callable:
    """The TVM-FFI function of a linked object file; the library stays loaded until the process ends."""
    import tvm_ffi

    data = object_file if isinstance(object_file, bytes) else Path(object_file).read_bytes()
    with tempfile.TemporaryDirectory(prefix="mla_cute_") as folder:
        library = _link(data, symbol, Path(folder))  # a path of its own: the loader knows libraries by their files
        module = tvm_ffi.load_module(str(library))
        ctypes.CDLL(str(library)).emulator_connect(*callbacks)
    with contextlib.suppress(AttributeError):
        return getattr(module, symbol)
    raise ValueError(f"symbol: the object file has no function {symbol!r} for TVM-FFI")


def _link(data: bytes, symbol: str, folder: Path) -> Path:
    from tvm_ffi.libinfo import find_libtvm_ffi

    source, kernel, library = folder / "stub.c", folder / "kernel.o", folder / "kernel.so"
    source.write_text(STUB)
    kernel.write_bytes(data)
    # Bsymbolic: what the object file defines is its own, whatever other library of the process has the same names.
    flags = ["-shared", "-fPIC", "-w", "-Wl,--no-undefined", "-Wl,-Bsymbolic"]
    done = subprocess.run(
        [*_compiler(), *flags, str(source), str(kernel), find_libtvm_ffi(), "-lm", "-o", str(library)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},  # so that the messages are the ones expected below
    )
    if done.returncode:
        missing = sorted(set(re.findall(r"undefined (?:reference to|symbol:) [`']?(\w+)", done.stderr)))
        if missing:
            raise NotImplementedError(f"{symbol}: its host code calls {', '.join(missing)}, unknown to the emulator")
        raise RuntimeError(f"{symbol}: cannot be linked for the emulator:\n{done.stderr.strip()}")
    return library


def _compiler() -> list[str]:
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise RuntimeError(
        f"the emulator needs a C compiler to link the kernels' host code: no {wanted[0] if wanted else 'cc'} found; install "
        "one (apt install gcc, dnf install gcc, or pip install ziglang and CC='python -m ziglang cc') or point CC at it"
    )
