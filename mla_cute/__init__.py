"""FlashMLA's multi-head latent attention kernels, written in NVIDIA's CuTe Python DSL.

    out, lse = mla_cute.sparse_decode(q, kv_cache, indices)

Names are imported at first use: `import mla_cute` loads neither torch nor the DSL and asks no GPU anything.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import flash_mla, reference
    from .cache_writer import write_kv_cache
    from .interface import select_impl, sparse_decode
    from .jit import warmup
    from .kv_cache import MODEL1, V32, KVFormat, dequantize_kv_cache, quantize_kv_cache, to_cache_indices
    from .schedule import DecodePlan, plan_decode

__all__ = [
    "MODEL1",
    "V32",
    "DecodePlan",
    "KVFormat",
    "__version__",
    "dequantize_kv_cache",
    "flash_mla",
    "plan_decode",
    "quantize_kv_cache",
    "reference",
    "select_impl",
    "sparse_decode",
    "to_cache_indices",
    "warmup",
    "write_kv_cache",
]
__version__ = "0.1.0"

_HOME = {  # public name: the module it lives in
    "sparse_decode": "interface",
    "select_impl": "interface",
    "plan_decode": "schedule",
    "DecodePlan": "schedule",
    "warmup": "jit",
    "quantize_kv_cache": "kv_cache",
    "dequantize_kv_cache": "kv_cache",
    "to_cache_indices": "kv_cache",
    "KVFormat": "kv_cache",
    "MODEL1": "kv_cache",
    "V32": "kv_cache",
    "write_kv_cache": "cache_writer",
}
_SUBMODULES = ("flash_mla", "reference")  # usable as `impl=mla_cute.reference` without an import of their own


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
