"""mma.sync: a warp multiplies A of 16 x K by B of K x 8, all of it in registers."""

from __future__ import annotations

import re

import numpy as np

from . import matrix
from .decode import Closure, Decoder, op
from .machine import Warp
from .ptx import Instruction

RESULTS = {"f16": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32")}
RESULTS |= {"bf16": ("f32",), "tf32": ("f32",)}


@op("mma.sync")
def mma_sync(ins: Instruction, d: Decoder) -> Closure:
    """mma.sync.aligned.m16n8kK.row.col{.satfinite}.dtype.atype.btype.ctype of 8-, 16- and 32-bit elements."""
    k, d_type, a_type, b_type, c_type, saturate = _form(ins)
    bits, width = matrix.TYPE_BITS[a_type], 16 if d_type == "f16" else 32
    fragments = matrix.fragment_a(bits, k), matrix.fragment_b(bits, k), matrix.fragment_c(8, width)
    outs = d.outs(ins.operands[0])
    a, b, c = (d.regs(o) for o in ins.operands[1:4])
    for name, given, fragment in zip("ABCD", (a, b, c, outs), (*fragments, fragments[2])):
        if len(given) != len(fragment.row):
            raise ValueError(f"{len(given)} registers of {name}, {len(fragment.row)} expected")

    def run(w: Warp):
        w.need_all("mma.sync")
        for i in (*a, *b, *c):
            w.need_defined(w.regs[i], "mma.sync")
        left, right, add = (np.stack([w.regs[i] for i in registers]) for registers in (a, b, c))
        result = matrix.mma(
            matrix.from_registers(left, fragments[0], bits, (16, k)),
            a_type,
            matrix.from_registers(right, fragments[1], bits, (8, k)),
            b_type,
            matrix.from_registers(add, fragments[2], width, (16, 8)),
            d_type=d_type,
            saturate=saturate,
        )
        for out, value in zip(outs, matrix.to_registers(result, fragments[2], width)):
            if out >= 0:
                w.write(out, value)

    return run


def _form(ins: Instruction) -> tuple[int, str, str, str, str, bool]:
    parts = [p for p in ins.parts[2:] if p not in ("aligned", "satfinite")]
    shape = re.fullmatch(r"m16n8k(\d+)", parts[0])
    if not shape or parts[1:3] != ["row", "col"] or len(parts) != 7:
        raise ValueError("only the dense forms m16n8kK.row.col are known")
    d_type, a_type, b_type, c_type = parts[3:]
    if d_type not in RESULTS.get(a_type, ()) or c_type != d_type:
        raise ValueError(f"no product of {a_type} that adds {c_type} to {d_type} is known")
    if a_type != b_type and (RESULTS.get(b_type) != RESULTS[a_type] or a_type in ("f16", "bf16", "tf32")):
        raise ValueError(f"no product of {a_type} and {b_type}")
    saturate = "satfinite" in ins.parts
    if saturate and d_type != "s32":
        raise ValueError("satfinite is of integers")
    return int(shape[1]), d_type, a_type, b_type, c_type, saturate
