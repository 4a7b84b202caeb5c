"""Runs compiled kernels on the CPU from their PTX: the real host code, an interpreter, and checks that a GPU does not make.

    with emulator.session(arch="sm_90a", options=emulator.Options.schedule(3)) as s:
        out, lse = mla_cute.sparse_decode(q, kv_cache, indices, backend="emulator")
    print(s.findings)

README.md beside this file says what is modelled.
"""

from .machine import EmulationError, Finding, Options
from .run import load, run_ptx, session

__all__ = ["EmulationError", "Finding", "Options", "load", "run_ptx", "session"]
