"""PTX's scalar instructions as pure functions on numpy arrays of raw bits.

``scalar("mad.lo.s32")`` looks an opcode up and returns a :class:`Scalar`: the PTX types of its operands and a function
from lane vectors (shape ``[32]``, unsigned integers of the type's width, ``.pred`` and the carry flag as bool) to the lane
vector of the result. Any length works; packed types (``f16x2``, ``f32x2``, …) need contiguous vectors, not 0-d arrays.
No function changes its inputs, and a result may be one of them (``mov``).

What is exact: everything that PTX defines exactly. Where PTX leaves a value open, the function does what hardware does:
a NaN result of single or half precision is 0x7fffffff or 0x7fff, integer division by zero gives all ones.
What is approximate: ``.approx`` instructions are computed in double precision and rounded once, which is inside the
documented error but not the hardware's last bit; their special cases (±0, infinities, NaN, ``.ftz``) are the documented ones.

Fused and directed roundings go through double precision: the sum is brought to *round-to-odd* (its last bit says "not
exact"), after which one rounding to a format of at most 51 bits gives what a single rounding of the exact value would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

# dtype objects, not scalar types: a view through them costs a third less
U1, U2, U4, U8 = (np.dtype(f"u{n}") for n in (1, 2, 4, 8))
I1, I2, I4, I8 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))
F2, F4, F8 = (np.dtype(f"f{n}") for n in (2, 4, 8))
BOOL = np.dtype(bool)
BF16 = np.dtype(ml_dtypes.bfloat16)
_UNSIGNED = {8: U1, 16: U2, 32: U4, 64: U8}
_SIGNED = {8: I1, 16: I2, 32: I4, 64: I8}
_FLOAT = {"f16": F2, "bf16": BF16, "f32": F4, "f64": F8}

# Width in bits of every type that occurs in Scalar.sources and Scalar.results. ``cc`` is the carry flag.
WIDTHS = {f"{kind}{n}": n for kind in "bus" for n in (8, 16, 32, 64)}
WIDTHS |= {"pred": 1, "cc": 1, "b128": 128, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
WIDTHS |= {"f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "f32x2": 64}

_quiet = np.errstate(all="ignore")  # used as a decorator: 0.4 µs a call, safe with threads


def dtype_of(type_name: str) -> np.dtype:
    """The dtype of a register that holds ``type_name``: bool, or an unsigned integer of its width."""
    return BOOL if WIDTHS[type_name] == 1 else _UNSIGNED[min(WIDTHS[type_name], 64)]


@dataclass(frozen=True)
class Scalar:
    """What one opcode does to one lane vector.

    Attributes:
        sources: PTX types of the source operands, in order. A vector operand ``{a, b, e, f}`` counts as four. The carry
            flag, where the instruction reads it, is the last source, of type ``cc``: bool.
        result: PTX type of the (first) destination.
        fn: source bits -> bits of the first destination.
        results: types of all that the opcode can write: ``(result,)``, or ``("pred", "pred")`` for ``setp`` (``p|q``),
            ``(type, "cc")`` for ``add.cc`` and its like, ``("b32", "pred")`` for ``lop3.or``.
        fn_all: source bits -> tuple of all of ``results``. For an instruction with two destinations or a carry-out.
        optional: types of sources that may follow ``sources``: ``max.f32`` takes two or three.
    """

    sources: tuple[str, ...]
    result: str
    fn: Callable[..., np.ndarray]
    results: tuple[str, ...] = ()
    fn_all: Callable[..., tuple[np.ndarray, ...]] | None = None
    optional: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.results:
            object.__setattr__(self, "results", (self.result,))
        if self.fn_all is None:
            object.__setattr__(self, "fn_all", lambda *xs: (self.fn(*xs),))


# ---- floating-point formats --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. Codes are magnitudes: without the sign bit, which sits at ``ebits + mbits``."""

    ebits: int
    mbits: int
    bias: int
    max_code: int  # the largest finite value
    inf_code: int | None
    nan_code: int | None  # the NaN that conversions and arithmetic produce; None: the format has none

    @property
    def width(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def container(self) -> np.dtype:
        return next(_UNSIGNED[n] for n in _UNSIGNED if n >= self.width)


FORMATS = {
    "f64": Format(11, 52, 1023, 0x7FEFFFFFFFFFFFFF, 0x7FF << 52, 0x7FF8 << 48),
    "f32": Format(8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
    "tf32": Format(8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF),  # in 19 bits; a register holds it shifted left by 13
    "f16": Format(5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Format(4, 3, 7, 0x7E, None, 0x7F),
    "e5m2": Format(5, 2, 15, 0x7B, 0x7C, 0x7F),
    "e2m3": Format(2, 3, 1, 0x1F, None, None),
    "e3m2": Format(3, 2, 3, 0x1F, None, None),
    "e2m1": Format(2, 1, 1, 0x7, None, None),
}
_CONSTANTS = {  # per format: exponent mask, sign mask, infinity, NaN, one, all of the register's dtype
    name: tuple(
        f.container.type(v)
        for v in (
            ((1 << f.ebits) - 1) << f.mbits,
            1 << (f.ebits + f.mbits),
            f.inf_code,
            f.nan_code,
            f.bias << f.mbits,
        )
    )
    for name, f in FORMATS.items()
    if name in ("f64", "f32", "f16", "bf16")
}
_NAN32 = U4.type(0x7FFFFFFF)
_NAN16 = U2.type(0x7FFF)
_U64 = {n: U8.type(n) for n in (0, 1, 11, 13, 16, 32, 52, 63, 64)}
_FRACTION, _HIDDEN, _MAGNITUDE = U8.type((1 << 52) - 1), U8.type(1 << 52), U8.type((1 << 63) - 1)


def _encode(
    x: np.ndarray,
    fmt: Format,
    rounding: str = "rn",
    satfinite: bool = False,
    random: np.ndarray | None = None,
    random_bits: int = 16,
) -> np.ndarray:
    """Round float64 values, exact or rounded to odd, to ``fmt``: codes with sign, dtype ``fmt.container``.

    ``rounding``: rn, rna (ties away), rz, rm, rp, or rs, which adds ``random`` (uint64 below 2**random_bits, aligned with
    the first discarded bits) to what would be cut off and then cuts.
    """
    bits = x.view(U8)
    magnitude = bits & _MAGNITUDE
    negative = (bits >> _U64[63]).astype(BOOL)
    biased = (magnitude >> _U64[52]).view(I8)
    significand = np.where(biased > 0, (magnitude & _FRACTION) | _HIDDEN, magnitude)
    exponent = np.maximum(biased, 1) - 1023
    floor = np.maximum(exponent, 1 - fmt.bias)  # subnormals of the format share its smallest exponent
    shift = np.minimum(52 - fmt.mbits + floor - exponent, 60).view(U8)  # 53 bits are gone after 60 all the same
    kept = significand >> shift
    rest = significand - (kept << shift)
    half = _U64[1] << (shift - _U64[1])
    if rounding == "rn":
        up = (rest > half) | ((rest == half) & (kept & _U64[1]).astype(BOOL))
    elif rounding == "rna":
        up = rest >= half
    elif rounding == "rs":
        width = U8.type(random_bits)
        common = np.minimum(shift, width)  # one of the two shifts is by 0
        added = random << (shift - common) >> (width - common)
        up = ((rest + added) >> shift).view(I8)
    else:
        up = (rest != 0) & (~negative if rounding == "rp" else negative if rounding == "rm" else False)
    code = ((floor + (fmt.bias - 1)) << fmt.mbits) + kept.view(I8) + up
    to_inf = fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    over = code > fmt.max_code
    if np.count_nonzero(over):
        if satfinite or to_inf is None:
            code = np.where(over, fmt.max_code, code)
        else:
            finite = {"rz": True, "rm": ~negative, "rp": negative}.get(rounding, False) & (biased < 2047)
            code = np.where(over, np.where(finite, fmt.max_code, to_inf), code)
    code = code | (negative.astype(I8) << (fmt.ebits + fmt.mbits))
    nan = x != x
    if np.count_nonzero(nan):
        code = np.where(nan, fmt.max_code if fmt.nan_code is None else fmt.nan_code, code)
    return code.astype(fmt.container)


def _decode(fmt: Format) -> np.ndarray:
    """float64 values of all codes of a format of at most 8 bits, indexed by the byte; unused high bits are ignored."""
    code = np.arange(256) & ((1 << fmt.width) - 1)
    magnitude = code & ((1 << (fmt.width - 1)) - 1)
    exponent, fraction = magnitude >> fmt.mbits, magnitude & ((1 << fmt.mbits) - 1)
    hidden = np.where(exponent > 0, 1 << fmt.mbits, 0)
    value = np.ldexp((fraction + hidden).astype(F8), np.maximum(exponent, 1) - fmt.bias - fmt.mbits)
    if fmt.inf_code is not None:
        value[magnitude == fmt.inf_code] = np.inf
    if fmt.nan_code is not None:
        value[magnitude > (fmt.max_code if fmt.inf_code is None else fmt.inf_code)] = np.nan
    return np.where(code >> (fmt.width - 1), -value, value)


_SMALL = {name: _decode(FORMATS[name]) for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")}
_SMALL32 = {name: table.astype(F4) for name, table in _SMALL.items()}
_SMALL32["ue8m0"] = np.where(np.arange(256) < 255, np.ldexp(1.0, np.arange(256) - 127), np.nan).astype(F4)
_ALIASES = {"e8m0": "ue8m0", "float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def _ue8m0(bits: np.ndarray, rounding: str, satfinite: bool) -> np.ndarray:
    """float32 bits -> power-of-two scale codes (uint8). The sign is dropped; NaN, and infinity unless satfinite, are 0xff."""
    magnitude = bits & U4.type(0x7FFFFFFF)
    code = magnitude >> U4.type(23)
    if rounding == "rp":  # 2**-127 itself is a subnormal of float32, and code 0
        inexact = (magnitude & U4.type(0x7FFFFF)).astype(BOOL) & (magnitude > 0x400000) & (magnitude < 0x7F800000)
        code = code + inexact
    if satfinite:
        code = np.where(magnitude <= 0x7F800000, np.minimum(code, U4.type(0xFE)), code)
    return code.astype(U1)


@_quiet
def to_float(bits: np.ndarray, type_name: str) -> np.ndarray:
    """Values of raw bits as float32 of the same shape.

    ``type_name``: f32, tf32, f16, bf16, e4m3, e5m2, e2m3, e3m2, e2m1 (one code a byte), ue8m0. Signed zeros, infinities
    and NaN stay what they are; a NaN's payload may not.
    """
    name = _ALIASES.get(type_name, type_name)
    if name in _SMALL32:
        return _SMALL32[name][bits]
    if name in ("f32", "tf32"):
        return bits.view(F4)
    if name == "f16":
        return bits.view(F2).astype(F4)
    if name == "bf16":
        return (bits.astype(U4) << U4.type(16)).view(F4)
    raise ValueError(f"to_float: unknown type {type_name!r}")


@_quiet
def from_float(values: np.ndarray, type_name: str, rounding: str = "rn", satfinite: bool = False) -> np.ndarray:
    """Round float values (float32 or float64, any shape) once to ``type_name``: raw bits of the same shape.

    ``rounding``: rn, rna, rz, rm, rp (ue8m0: rz or rp). Without ``satfinite`` a value beyond the range becomes infinity, or
    NaN where the format has no infinity; formats without NaN (e2m1, e2m3, e3m2) always saturate and give +max for NaN.
    """
    name = _ALIASES.get(type_name, type_name)
    values = np.asarray(values)
    if rounding not in ("rn", "rna", "rz", "rm", "rp") or (name == "ue8m0" and rounding not in ("rz", "rp")):
        raise ValueError(f"from_float: rounding {rounding!r} of {type_name}")
    if name == "ue8m0":
        return _ue8m0(_round(values.astype(F8), "f32", rounding), rounding, satfinite)
    if name not in FORMATS or name == "f64":
        raise ValueError(f"from_float: unknown type {type_name!r}")
    if name == "tf32":
        return _tf32(values.astype(F8), rounding, satfinite)
    return _round(values.astype(F8), name, rounding, satfinite)


def _tf32(x: np.ndarray, rounding: str, satfinite: bool) -> np.ndarray:
    code = _encode(x, FORMATS["tf32"], rounding, satfinite) << U4.type(13)
    return np.where(x != x, _NAN32, code)


def _load(bits: np.ndarray, name: str) -> np.ndarray:
    """Bits of f16, bf16, f32 or f64 -> float64, exact."""
    return bits.view(_FLOAT[name]).astype(F8)


def _round(
    x: np.ndarray, name: str, rounding: str = "rn", satfinite: bool = False, random=None, random_bits=16
) -> np.ndarray:
    """float64, exact or rounded to odd, -> bits of ``name``, rounded once, NaN canonical."""
    if rounding == "rn" and not satfinite and name in ("f32", "f16"):
        r = x.astype(_FLOAT[name])
        nan = x != x
        r = r.view(_UNSIGNED[WIDTHS[name]])
        return np.where(nan, _CONSTANTS[name][3], r) if np.count_nonzero(nan) else r
    if rounding == "rn" and not satfinite and name == "bf16":
        # By way of float32, which is wrong only where that is a midpoint of bf16 (low 15 bits 0) without being exact:
        # there it moves to its odd neighbour, on the side of x.
        single = x.astype(F4)
        bits = single.view(U4)
        midpoint = (bits & U4.type(0x7FFF)) == 0
        if np.count_nonzero(midpoint):
            beyond = np.abs(x) - np.abs(single)  # NaN for infinities, which stay
            bits = bits + np.where(midpoint, np.sign(np.where(beyond == beyond, beyond, 0)), 0).astype(I4).view(U4)
            single = bits.view(F4)
        nan = x != x
        r = single.astype(BF16).view(U2)
        return np.where(nan, _NAN16, r) if np.count_nonzero(nan) else r
    return _encode(x, FORMATS[name], rounding, satfinite, random, random_bits)


def _canonical32(r: np.ndarray) -> np.ndarray:
    """Fresh float32 values -> bits, NaN as 0x7fffffff."""
    squares = r.dot(r)  # NaN if and only if a lane is: squares cannot cancel. The cheapest test there is
    if squares == squares:
        return r.view(U4)
    return np.where(r != r, _NAN32, r.view(U4))


def _flush(bits: np.ndarray, name: str) -> np.ndarray:
    """.ftz: subnormals become zeros of their sign."""
    exponent_mask, sign_mask = _CONSTANTS[name][:2]
    exponent = bits & exponent_mask
    if np.count_nonzero(exponent) == exponent.size:
        return bits
    return np.where(exponent, bits, bits & sign_mask)


def _saturate(bits: np.ndarray, name: str) -> np.ndarray:
    """.sat: clamp to [0, 1]; NaN and -0 become +0. As integers: all that is negative or NaN is above infinity."""
    _, _, inf, _, one = _CONSTANTS[name]
    return np.where(bits > inf, bits.dtype.type(0), np.minimum(bits, one))


def _relu(bits: np.ndarray, sign_mask) -> np.ndarray:
    """.relu on bits whose NaNs are canonical, and so positive: negative values become +0."""
    return np.where(bits >= sign_mask, bits.dtype.type(0), bits)


# ---- floating-point arithmetic -----------------------------------------------------------------------------------


def _sum_to_odd(p: np.ndarray, c: np.ndarray, downward: bool = False) -> np.ndarray:
    """p + c in float64, rounded to odd. ``downward``: an exact zero of two opposite addends is -0 (only .rm does that)."""
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)  # exact (Knuth); NaN where s is not finite, which counts as exact below
    if np.count_nonzero(error):
        inexact = np.abs(error) > 0
        bits = s.view(I8)
        step = np.where((error > 0) == (s > 0), 1, -1)
        s = np.where(inexact & ((bits & 1) == 0), bits + step, bits).view(F8)
    if downward:
        s = np.where((s == 0) & (np.signbit(p) != np.signbit(c)), -0.0, s)
    return s


_IN_F64 = {  # float64 operands that hold at most 24 significant bits -> exact, or rounded to odd
    "add": lambda a, b, down: _sum_to_odd(a, b, down),
    "sub": lambda a, b, down: _sum_to_odd(a, -b, down),
    "mul": lambda a, b, down: a * b,
    "fma": lambda a, b, c, down: _sum_to_odd(a * b, c, down),
    # No quotient or root of 24-bit numbers lies closer to a number of 25 bits than 2**-49 without being it, so the
    # nearest float64 is on the same side of every rounding boundary as the exact value.
    "div": lambda a, b, down: a / b,
    "rcp": lambda a, down: 1.0 / a,
    "sqrt": lambda a, down: np.sqrt(a),
}


_MIDPOINT_CANDIDATE = U8.type((1 << 28) - 1)


def _fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma.rn.f32. The product is exact in float64; rounding the sum twice is wrong only if the first result is a midpoint
    of float32, whose low 28 bits are 0 (more than 28 where the result is subnormal): only those go through odd rounding."""
    p = a.view(F4).astype(F8) * b.view(F4).astype(F8)
    z = c.view(F4).astype(F8)
    s = p + z
    low = s.view(U8) & _MIDPOINT_CANDIDATE
    if np.count_nonzero(low) != low.size:
        s = _sum_to_odd(p, z)
    return _canonical32(s.astype(F4))


_NATIVE32 = {
    "add": lambda a, b: _canonical32(np.add(a.view(F4), b.view(F4))),
    "sub": lambda a, b: _canonical32(np.subtract(a.view(F4), b.view(F4))),
    "mul": lambda a, b: _canonical32(np.multiply(a.view(F4), b.view(F4))),
    "div": lambda a, b: _canonical32(np.divide(a.view(F4), b.view(F4))),
    "rcp": lambda a: _canonical32(np.divide(F4.type(1), a.view(F4))),
    "sqrt": lambda a: _canonical32(np.sqrt(a.view(F4))),
    "fma": _fma32,
}
_NATIVE64 = {
    "add": lambda a, b: np.add(a.view(F8), b.view(F8)).view(U8),
    "sub": lambda a, b: np.subtract(a.view(F8), b.view(F8)).view(U8),
    "mul": lambda a, b: np.multiply(a.view(F8), b.view(F8)).view(U8),
    "div": lambda a, b: np.divide(a.view(F8), b.view(F8)).view(U8),
    "rcp": lambda a: np.divide(1.0, a.view(F8)).view(U8),
    "sqrt": lambda a: np.sqrt(a.view(F8)).view(U8),
}


def _split64(bits: int) -> tuple[int, int, int]:
    """Finite float64 bits -> sign (±1), significand m >= 0, exponent e: sign * m * 2**e."""
    exponent, fraction = bits >> 52 & 0x7FF, bits & ((1 << 52) - 1)
    return (-1 if bits >> 63 else 1), fraction | ((exponent > 0) << 52), max(exponent, 1) - 1075


def _round64(m: int, e: int, sticky: bool, negative: bool, rounding: str) -> int:
    """(m + a bit less than 1 if sticky) * 2**e, m > 0, -> float64 bits, rounded once. Sticky needs m of 55 bits or more."""
    drop = max(m.bit_length() - 53, -1074 - e)
    if drop <= 0:
        kept, rest, half, e = m << -drop, 0, 1, e + drop
    else:
        kept, rest, half, e = m >> drop, m & ((1 << drop) - 1), 1 << (drop - 1), e + drop
    rest, half = rest * 2 + sticky, half * 2
    if rounding == "rn":
        kept += rest > half or (rest == half and kept & 1)
    else:
        kept += rest > 0 and rounding == ("rm" if negative else "rp")
    code = ((e + 1074) << 52) + kept  # the hidden bit adds one to the exponent field
    if code >= 0x7FF << 52:
        finite = rounding == "rz" or rounding == ("rp" if negative else "rm")
        code = (0x7FF << 52) - 1 if finite else 0x7FF << 52
    return code | negative << 63


def _exact64(op: str, rounding: str) -> Callable[..., np.ndarray]:
    """Double precision where numpy has no instruction: fma, and roundings other than to nearest. Python integers, by lane."""

    def lane(*x: int) -> int:
        for bits in x:
            if bits & (1 << 63) - 1 > 0x7FF << 52:
                return bits | 1 << 51  # double precision keeps the payload
        one = 0x3FF << 52
        if op == "sqrt":
            return root(x[0])
        if op in ("div", "rcp"):
            return divide(*x) if op == "div" else divide(one, x[0])
        if op == "mul":
            return multiply_add(*x, (x[0] ^ x[1]) & 1 << 63)  # a zero of the product's sign changes nothing
        return multiply_add(*x) if op == "fma" else multiply_add(x[0], one, x[1] ^ (op == "sub") << 63)

    def multiply_add(a: int, b: int, c: int) -> int:
        if any(bits >> 52 & 0x7FF == 0x7FF for bits in (a, b, c)):
            x, y, z = np.array([a, b, c], U8).view(F8)
            r = x * y + z
            return int(np.asarray(r).view(U8)) if r == r else 0xFFF8 << 48
        (sa, ma, ea), (sb, mb, eb), (sc, mc, ec) = map(_split64, (a, b, c))
        e = min(ea + eb, ec)
        product, addend = sa * sb * ma * mb << (ea + eb - e), sc * mc << (ec - e)
        total = product + addend
        if total == 0:
            same = sa * sb == sc
            return ((sc < 0) if same else rounding == "rm") << 63
        return _round64(abs(total), e, False, total < 0, rounding)

    def divide(a: int, b: int) -> int:
        sign = (a ^ b) >> 63
        inf_a, inf_b = ((bits >> 52 & 0x7FF) == 0x7FF for bits in (a, b))
        (_, ma, ea), (_, mb, eb) = _split64(a), _split64(b)
        if (inf_a and inf_b) or (ma == 0 and mb == 0 and not inf_a and not inf_b):
            return 0xFFF8 << 48
        if inf_a or mb == 0:
            return sign << 63 | 0x7FF << 52
        if inf_b or ma == 0:
            return sign << 63
        q, r = divmod(ma << 120, mb)
        return _round64(q, ea - eb - 120, r != 0, bool(sign), rounding)

    def root(a: int) -> int:
        if a << 1 & (1 << 64) - 1 == 0 or a == 0x7FF << 52:
            return a
        if a >> 63:
            return 0xFFF8 << 48
        _, m, e = _split64(a)
        m, e = m << 120 + (e & 1), e - 120 - (e & 1)
        r = math.isqrt(m)
        return _round64(r, e // 2, r * r != m, False, rounding)

    def fn(*sources: np.ndarray) -> np.ndarray:
        shape = np.broadcast_shapes(*(x.shape for x in sources))
        lanes = zip(*(np.broadcast_to(x, shape).ravel().tolist() for x in sources))
        return np.array([lane(*operands) for operands in lanes], U8).reshape(shape)

    return fn


def _arithmetic(
    op: str, name: str, rounding: str, ftz=False, sat=False, relu=False, narrow: str | None = None
) -> Callable:
    """Bits -> bits of ``name`` for one of _IN_F64. ``narrow``: type of the operands before the last (mixed precision)."""
    if name == "f64":
        core = _NATIVE64[op] if rounding == "rn" and op in _NATIVE64 else _exact64(op, rounding)
    elif name == "f32" and rounding == "rn" and narrow is None:
        core = _NATIVE32[op]
    else:
        operation, down = _IN_F64[op], rounding == "rm"

        def core(*sources):
            values = [_load(x, narrow or name) for x in sources[:-1]] + [_load(sources[-1], name)]
            return _round(operation(*values, down), name, rounding)

    if not (ftz or sat or relu):
        return core

    def fn(*sources):
        bits = core(*(_flush(x, name) for x in sources)) if ftz else core(*sources)
        if ftz:
            bits = _flush(bits, name)
        if sat:
            bits = _saturate(bits, name)
        return _relu(bits, _CONSTANTS[name][1]) if relu else bits

    return fn


def _minmax(which: str, name: str, nan_wins: bool, xorsign: bool, absolute: bool, ftz: bool) -> Callable:
    """min and max of two or three: -0 < +0, a NaN loses to a number (``nan_wins``: it wins)."""
    _, sign_mask, inf, nan, _ = _CONSTANTS[name]
    magnitude = ~sign_mask
    signed = _SIGNED[8 * sign_mask.itemsize]
    better = np.greater if which == "max" else np.less

    def key(bits):  # integers in the order of the floats
        v = bits.view(signed)
        return v ^ ((v >> (8 * signed.itemsize - 1)) & magnitude.view(signed))

    def pair(a, b):
        nan_a, nan_b = (a & magnitude) > inf, (b & magnitude) > inf
        r = np.where(better(key(a), key(b)), a, b)
        r = np.where(nan_a, b, np.where(nan_b, a, r))
        return np.where((nan_a | nan_b) if nan_wins else (nan_a & nan_b), nan, r)

    def general(a, b, *rest):
        sources = [_flush(x, name) for x in (a, b, *rest)] if ftz else [a, b, *rest]
        sign = (sources[0] ^ sources[1]) & sign_mask
        if absolute:
            sources = [x & magnitude for x in sources]
        r = pair(sources[0], sources[1])
        for x in sources[2:]:
            r = pair(r, x)
        return np.where(r == nan, r, r | sign) if xorsign else r

    if name != "f32" or xorsign or absolute:
        return general
    # In these a NaN wins, and sends the rare vector with one to `general`; np.fmax is not sure about signalling NaNs.
    native = np.maximum if which == "max" else np.minimum
    equal_bits = np.bitwise_and if which == "max" else np.bitwise_or  # equal floats differ in bits only as -0 and +0

    def fast(a, b, *rest):
        if rest:
            return general(a, b, *rest)
        if ftz:
            a, b = _flush(a, name), _flush(b, name)
        x, y = a.view(F4), b.view(F4)
        r = native(x, y)
        squares = r.dot(r)
        if squares != squares:
            return general(a, b)
        equal = x == y
        return np.where(equal, equal_bits(a, b), r.view(U4)) if np.count_nonzero(equal) else r.view(U4)

    return fast


# Double precision, then one rounding: closer to the true value than the hardware's 2 ulp or so, not bit-equal to it.
_APPROX = {
    "ex2": np.exp2,
    "lg2": np.log2,  # ±0 -> -inf, negative -> NaN
    "rcp": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),  # -0 -> -inf
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _approximate(op: str, name: str, ftz: bool) -> Callable:
    function = _APPROX[op]
    if name == "f32":

        def core(a):
            return _canonical32(function(a.view(F4).astype(F8)).astype(F4))

    else:

        def core(a):
            return _round(function(_load(a, name)), name)

    if not ftz:
        return core
    if op == "ex2" and name == "f32":  # a subnormal input gives 1 either way, so only the result needs flushing

        def flushed(a):
            r = function(a.view(F4).astype(F8)).astype(F4)
            return _canonical32(r * (r >= F4.type(2.0**-126)) if r.size and r.min() < 2.0**-126 else r)

        return flushed
    return lambda a: _flush(core(_flush(a, name)), name)


def _approximate_high64(op: str) -> Callable:
    """rcp and rsqrt.approx.ftz.f64: from the upper 32 bits of the operand to the upper 32 bits of the result."""

    def fn(a):
        a = _flush(a & U8.type(0xFFFFFFFF << 32), "f64")
        r = _flush(_APPROX[op](a.view(F8)).view(U8) & U8.type(0xFFFFFFFF << 32), "f64")
        return np.where((r & _MAGNITUDE) > U8.type(0x7FF << 52), U8.type(0x7FFFFFFF << 32), r)

    return fn


def _divide_approx(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.approx.f32 is a times the reciprocal of b, which is 0 for 2**126 < |b| < 2**128."""
    x, y = a.view(F4).astype(F8), b.view(F4).astype(F8)
    gone = (np.abs(y) > 2.0**126) & (np.abs(y) < 2.0**128)
    q = np.where(gone, x * np.copysign(0.0, y), x / y)
    return _canonical32(q.astype(F4))


# ---- integer arithmetic ------------------------------------------------------------------------------------------


def _mul_hi(width: int, signed: bool) -> Callable:
    if width < 64:
        wide = (_SIGNED if signed else _UNSIGNED)[2 * width]
        unsigned, view = _UNSIGNED[width], (_SIGNED if signed else _UNSIGNED)[width]
        amount = wide.type(width)
        return lambda a, b: ((a.view(view).astype(wide) * b.view(view).astype(wide)) >> amount).astype(unsigned)
    low, by = U8.type(0xFFFFFFFF), _U64[32]

    def fn(a, b):
        a0, a1, b0, b1 = a & low, a >> by, b & low, b >> by
        t = a1 * b0 + (a0 * b0 >> by)
        middle = a0 * b1 + (t & low)
        high = a1 * b1 + (t >> by) + (middle >> by)
        if signed:
            high = high - np.where(a >> _U64[63], b, _U64[0]) - np.where(b >> _U64[63], a, _U64[0])
        return high

    return fn


def _mul_wide(width: int, signed: bool) -> Callable:
    view, wide = ((_SIGNED if signed else _UNSIGNED)[n] for n in (width, 2 * width))
    result = _UNSIGNED[2 * width]
    if signed:
        return lambda a, b: np.multiply(a.view(view), b.view(view), dtype=wide).view(result)
    return lambda a, b: np.multiply(a, b, dtype=wide)


def _mul24(high: bool, signed: bool) -> Callable:
    wide = I8 if signed else U8

    def extend(a):
        return (a.view(I4) << 8 >> 8).astype(I8) if signed else (a & U4.type(0xFFFFFF)).astype(U8)

    amount = wide.type(16 if high else 0)
    return lambda a, b: (extend(a) * extend(b) >> amount).astype(U4)


def _divmod(width: int, signed: bool, remainder: bool) -> Callable:
    """Truncating division on magnitudes, so that INT_MIN / -1 wraps. By zero: all ones."""
    operation = np.remainder if remainder else np.floor_divide
    unsigned, view = _UNSIGNED[width], _SIGNED[width]
    one, ones = unsigned.type(1), unsigned.type((1 << width) - 1)

    def divide(a, b):
        zero = b == 0
        if not np.count_nonzero(zero):
            return operation(a, b)
        return np.where(zero, ones, operation(a, np.where(zero, one, b)))

    if not signed:
        return divide

    def fn(a, b):
        s, t = a.view(view), b.view(view)
        r = divide(np.abs(s).view(unsigned), np.abs(t).view(unsigned))
        negative = (s < 0) if remainder else (s < 0) != (t < 0)
        return np.where(negative & (t != 0), np.negative(r), r)

    return fn


def _add_sat(subtract: bool) -> Callable:
    operation = np.subtract if subtract else np.add
    return lambda a, b: _clamp32(operation(a.view(I4).astype(I8), b.view(I4).astype(I8)))


def _clamp32(wide: np.ndarray) -> np.ndarray:
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(U4)


def _carry(subtract: bool, carry_in: bool) -> Callable:
    """(a, b[, cc]) -> (sum, carry out). For subtraction the flag is the borrow."""

    def fn(a, b, cc=None):
        if subtract:
            r = a - b
            out = a < b
        else:
            r = a + b
            out = r < a
        if carry_in:
            c = cc.astype(a.dtype)
            total = r - c if subtract else r + c
            out = out | (r < c if subtract else total < r)
            r = total
        return r, out

    return fn


def _bit_length(a: np.ndarray) -> np.ndarray:
    """Position of the highest one plus 1, 0 for 0; of uint32 or uint64, as int32."""
    if a.dtype == U4:
        return np.frexp(a.astype(F8))[1]
    high = (a >> _U64[32]).astype(F8)
    low = (a & U8.type(0xFFFFFFFF)).astype(F8)
    return np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])


def _shift_left(width: int) -> Callable:
    # numpy shifts out everything for amounts of the width and above, as PTX does
    if width == 32:
        return np.left_shift
    unsigned = _UNSIGNED[width]
    return lambda a, b: np.left_shift(a, b).astype(unsigned)  # 64: b is promoted; 16: a is, and the result cut


def _shift_right(width: int, signed: bool) -> Callable:
    if not signed:
        if width == 16:
            return lambda a, b: np.right_shift(a, b).astype(U2)
        return np.right_shift
    view, unsigned = _SIGNED[width], _UNSIGNED[width]
    if width == 32:
        return lambda a, b: np.right_shift(a.view(I4), b.view(I4)).view(U4)
    top = U4.type(width - 1)
    return lambda a, b: np.right_shift(a.view(view), np.minimum(b, top).astype(view)).view(unsigned)


def _bfe(width: int, signed: bool) -> Callable:
    unsigned, view = _UNSIGNED[width], _SIGNED[width]
    byte = U4.type(0xFF)

    def fn(a, b, c):
        position, length = (b & byte).astype(U8), np.minimum(c & byte, U4.type(64)).astype(U8)
        unused = _U64[64] - length
        if signed:  # shifts of 64 bits or more fill with the sign, so a field beyond the top is all sign
            field = a.view(view).astype(I8) >> position.view(I8) << unused.view(I8) >> unused.view(I8)
            field = np.where(length > 0, field, 0).view(U8)
        else:
            field = np.where(length > 0, a.astype(U8) >> position << unused >> unused, _U64[0])
        return field.astype(unsigned)

    return fn


def _bfi(width: int) -> Callable:
    unsigned = _UNSIGNED[width]
    byte = U4.type(0xFF)

    def fn(a, b, c, d):
        position, length = (c & byte).astype(U8), (d & byte).astype(U8)
        mask = ((_U64[1] << length) - _U64[1]) << position  # a shift by 64 or more gives 0: all ones, or no field
        return ((a.astype(U8) << position & mask) | (b.astype(U8) & ~mask)).astype(unsigned)

    return fn


def _bmsk(clamp: bool) -> Callable:
    def fn(a, b):
        position, length = a & U4.type(31), b & U4.type(31)
        mask = (((_U64[1] << length.astype(U8)) - _U64[1]) << position.astype(U8)).astype(U4)
        if clamp:
            top = (U8.type(0xFFFFFFFF) << position.astype(U8)).astype(U4)
            mask = np.where(a >= 32, U4.type(0), np.where(b >= 32, top, mask))
        return mask

    return fn


def _szext(clamp: bool, signed: bool) -> Callable:
    def fn(a, b):
        unused = U4.type(32) - (b & U4.type(31))  # 32 for N = 0: all shifted out
        shifted = a << unused
        r = shifted.view(I4) >> unused.view(I4) if signed else shifted >> unused
        return np.where(b >= 32, a, r.view(U4)) if clamp else r.view(U4)

    return fn


@cache
def _find_nth(mask: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    positions = range(base, 32) if offset > 0 else range(min(base, 31), -1, -1)
    ones = [p for p in positions if mask >> p & 1]
    return ones[abs(offset) - 1] if abs(offset) <= len(ones) else 0xFFFFFFFF


def _fns(mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    mask, base, offset = np.broadcast_arrays(mask, base, offset.view(I4))
    return np.array([_find_nth(*lane) for lane in zip(mask.tolist(), base.tolist(), offset.tolist())], U4)


_NIBBLES = np.arange(0, 16, 4, dtype=U4)
_PRMT_MODES = {  # source bytes of the target's bytes 0 to 3, by c & 3
    "f4e": [[s + i for i in range(4)] for s in range(4)],
    "b4e": [[(s - i) % 8 for i in range(4)] for s in range(4)],
    "rc8": [[s] * 4 for s in range(4)],
    "ecl": [[max(i, s) for i in range(4)] for s in range(4)],
    "ecr": [[min(i, s) for i in range(4)] for s in range(4)],
    "rc16": [[s % 2 * 2 + i % 2 for i in range(4)] for s in range(4)],
}


def _prmt(mode: str | None) -> Callable:
    table = np.array(_PRMT_MODES[mode], U1) if mode else None

    @cache
    def of(control: int) -> tuple[list[int], np.ndarray | None]:
        """Source bytes of one control value, and a mask of the target bytes that replicate a sign."""
        if mode:
            return table[control & 3].tolist(), None
        selectors = [control >> 4 * i & 15 for i in range(4)]
        signs = np.array([selector > 7 for selector in selectors])
        return [selector & 7 for selector in selectors], signs if signs.any() else None

    def fn(a, b, c):
        if a.ndim and not np.count_nonzero(c != c.item(0)):  # the control is nearly always an immediate
            source = np.empty((a.size, 2), U4)
            source[:, 0] = a
            source[:, 1] = b
            index, signs = of(c.item(0) & 0xFFFF)
            r = source.view(U1)[:, index]
            r = r if signs is None else np.where(signs, (r.view(I1) >> 7).view(U1), r)
            return np.ascontiguousarray(r).view(U4)[:, 0]
        a, b, c = np.broadcast_arrays(a, b, c)
        source = np.stack((a, b), axis=-1).view(U1)  # bytes 0 to 7 of {b, a}: little-endian
        selector = table[c & U4.type(3)] if mode else ((c[..., None] >> _NIBBLES) & U4.type(15)).astype(U1)
        r = np.take_along_axis(source, (selector & 7).astype(np.intp), axis=-1)
        if mode is None:
            r = np.where(selector & 8, (r.view(I1) >> 7).view(U1), r)
        return np.ascontiguousarray(r).view(U4)[..., 0]

    return fn


# Functions of (b, c) by truth table: bit 2b + c. Any function of three is F[low](b, c) ^ a & F[low ^ high](b, c).
_TWO = [
    lambda b, c: np.zeros_like(b & c),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: ~np.zeros_like(b & c),
]


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, lut: np.ndarray) -> np.ndarray:
    table = lut.item(0)  # an immediate: the same in all lanes
    low, high = table & 15, table >> 4 & 15
    if low == high:
        return _TWO[low](b, c)
    r = a & _TWO[low ^ high](b, c)
    return r ^ _TWO[low](b, c) if low else r


_REVERSED = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], U1)


def _brev(a: np.ndarray) -> np.ndarray:
    return _REVERSED[a[..., None].view(U1)].view(a.dtype)[..., 0].byteswap()


def _dot(lanes: int, a_type: str, b_type: str, start: int) -> Callable:
    """dp4a (four bytes of both) and dp2a (halves of a times bytes ``start`` and start + 1 of b)."""
    view_a = (_SIGNED if a_type == "s32" else _UNSIGNED)[32 // lanes]
    view_b = I1 if b_type == "s32" else U1

    def fn(a, b, c):
        x = a[..., None].view(view_a).astype(I8)
        y = b[..., None].view(view_b).astype(I8)[..., start : start + lanes]
        return ((x * y).sum(axis=-1) + c.astype(I8)).astype(U4)

    return fn


# ---- comparison --------------------------------------------------------------------------------------------------

_BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_ORDERED = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_NEGATED = {"neu": "eq", "geu": "lt", "gtu": "le", "leu": "gt", "ltu": "ge"}  # true with a NaN: not the opposite
_FLOAT_COMPARE = {
    **_ORDERED,
    "ne": lambda x, y: (x < y) | (x > y),
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": np.not_equal,
    **{name: lambda x, y, f=_ORDERED[of]: ~f(x, y) for name, of in _NEGATED.items() if name != "neu"},
    "num": lambda x, y: (x == x) & (y == y),
    "nan": lambda x, y: (x != x) | (y != y),
}


def _compare(m: _Modifiers, op: str, t: str, ftz: bool) -> Callable:
    """(a, b) -> bool by element, for one element type."""
    if t in FORMATS:
        if op not in _FLOAT_COMPARE:
            raise m.error(f".{op} of .{t}")
        compare = _FLOAT_COMPARE[op]
        if t == "bf16":
            return lambda a, b: compare(*((x.astype(U4) << U4.type(16)).view(F4) for x in (a, b)))
        view = _FLOAT[t]
        if ftz:
            return lambda a, b: compare(_flush(a, t).view(view), _flush(b, t).view(view))
        return lambda a, b: compare(a.view(view), b.view(view))
    if ftz:
        raise m.error(f".ftz of .{t}")
    if op in _UNSIGNED_NAMES and t[0] == "u":
        op = _UNSIGNED_NAMES[op]
    if op not in (*_ORDERED, "ne") or (t[0] == "b" and op not in ("eq", "ne")):
        raise m.error(f".{op} of .{t}")
    compare = np.not_equal if op == "ne" else _ORDERED[op]
    if t[0] != "s" or op in ("eq", "ne"):
        return compare
    view = _SIGNED[WIDTHS[t]]
    return lambda a, b: compare(a.view(view), b.view(view))


_COMPARISONS = (*_FLOAT_COMPARE, *_UNSIGNED_NAMES)
_COMPARED = tuple(f"{k}{n}" for k in "bus" for n in (16, 32, 64)) + ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")


# ---- opcodes -----------------------------------------------------------------------------------------------------


class _Modifiers:
    """The modifiers of one opcode. Builders take what they understand; what is left over is an error."""

    def __init__(self, opcode: str):
        self.opcode = opcode
        self.name, *self.left = opcode.split(".")

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.opcode}: {what} is not understood")

    def take(self, *names: str) -> str | None:
        """The first of the remaining modifiers that is one of ``names``, removed."""
        for i, modifier in enumerate(self.left):
            if modifier in names:
                return self.left.pop(i)
        return None

    def need(self, what: str, *names: str) -> str:
        found = self.take(*names)
        if found is None:
            raise ValueError(f"{self.opcode}: no {what} (one of {', '.join('.' + n for n in names)})")
        return found

    def flag(self, name: str) -> bool:
        return self.take(name) is not None

    def type(self, *allowed: str) -> str:
        """The last modifier, removed, which must be one of ``allowed``."""
        if not self.left:
            raise ValueError(f"{self.opcode}: no type")
        if self.left[-1] not in allowed:
            raise self.error(f".{self.left[-1]}")
        return self.left.pop()

    def done(self) -> None:
        if self.left:
            raise self.error(f"modifier .{self.left[0]}")


_INTS = tuple(f"{k}{n}" for n in (16, 32, 64) for k in "us")
_BITS = ("b16", "b32", "b64")
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_FLOATS = ("f32", "f64", "f32x2", *_HALVES)
_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _element(t: str) -> str:
    return t[:-2] if t.endswith("x2") else t


def _by_element(t: str, fn: Callable) -> Callable:
    """Apply ``fn`` for an element type to registers that hold one or two of them."""
    if not t.endswith("x2"):
        return fn
    part, whole = _UNSIGNED[WIDTHS[t] // 2], _UNSIGNED[WIDTHS[t]]
    return lambda *sources: fn(*(x.view(part) for x in sources)).view(whole)


def _same(count: int, t: str, fn: Callable) -> Scalar:
    return Scalar((t,) * count, t, fn)


def _float_op(m: _Modifiers, op: str, count: int) -> Scalar:
    """add, sub, mul, fma in all floating-point types."""
    last = m.type(*_FLOATS)
    mixed = last in ("f16", "bf16") and m.flag("f32")
    t = "f32" if mixed else last
    if mixed and op == "mul":
        raise m.error(".f32 of ." + last)
    rounding = m.need("rounding", *_ROUNDINGS) if op == "fma" else m.take(*_ROUNDINGS) or "rn"
    if t in _HALVES and rounding != "rn":
        raise m.error(f".{rounding} of .{t}")
    ftz, sat, relu = m.flag("ftz"), m.flag("sat"), m.flag("relu")
    if (ftz and (t in ("f64", "bf16", "bf16x2") or mixed)) or (sat and t not in ("f32", "f16", "f16x2")):
        raise m.error(f".{'ftz' if ftz else 'sat'} of .{t}")
    if relu and (op != "fma" or t not in _HALVES):
        raise m.error(f".relu of .{t}")
    fn = _arithmetic(op, _element(t), rounding, ftz, sat, relu, last if mixed else None)
    sources = (last,) * (count - 1) + (t,)
    return Scalar(sources, t, _quiet(_by_element(t, fn)))


def _is_float(m: _Modifiers) -> bool:
    return bool(m.left) and m.left[-1] in _FLOATS


def _build_addsub(m: _Modifiers) -> Scalar:
    subtract = m.name in ("sub", "subc")
    if _is_float(m):
        return _float_op(m, m.name, 2)
    native = np.subtract if subtract else np.add
    t = m.type(*_INTS, "u16x2", "s16x2")
    carry_in, carry_out = m.name in ("addc", "subc"), m.flag("cc")
    if carry_in or carry_out:
        if WIDTHS[t] < 32 or t.endswith("x2"):
            raise m.error(f".{t}")
        return _with_carry((t, t), t, _carry(subtract, carry_in), carry_in, carry_out)
    if m.flag("sat"):
        if t != "s32":
            raise m.error(f".sat of .{t}")
        return _same(2, t, _add_sat(subtract))
    return _same(2, t, _by_element(t, native))


def _with_carry(sources: tuple[str, ...], t: str, both: Callable, carry_in: bool, carry_out: bool) -> Scalar:
    sources = sources + (("cc",) if carry_in else ())
    if not carry_out:
        return Scalar(sources, t, lambda *xs: both(*xs)[0])
    return Scalar(sources, t, lambda *xs: both(*xs)[0], (t, "cc"), both)


def _product(mode: str, t: str) -> tuple[Callable, str]:
    """The multiplication of mul and mad, and the type of its result."""
    width, signed = WIDTHS[t], t[0] == "s"
    if mode == "lo":
        return np.multiply, t
    if mode == "hi":
        return _mul_hi(width, signed), t
    return _mul_wide(width, signed), f"{t[0]}{2 * width}"


def _build_mul(m: _Modifiers) -> Scalar:
    if _is_float(m):
        return _float_op(m, "mul", 2)
    t = m.type(*_INTS)
    mode = m.need("mode", "lo", "hi", "wide")
    if mode == "wide" and WIDTHS[t] == 64:
        raise m.error(f".wide of .{t}")
    fn, result = _product(mode, t)
    return Scalar((t, t), result, fn)


def _build_mad(m: _Modifiers) -> Scalar:
    if _is_float(m):
        if m.left[-1] not in ("f32", "f64"):
            raise m.error(f".{m.left[-1]}")
        return _float_op(m, "fma", 3)
    t = m.type(*_INTS)
    mode = m.need("mode", "lo", "hi", *(("wide",) if m.name == "mad" else ()))
    if mode == "wide" and WIDTHS[t] == 64:
        raise m.error(f".wide of .{t}")
    multiply, result = _product(mode, t)
    carry_in, carry_out = m.name == "madc", m.flag("cc")
    if carry_in or carry_out:
        if WIDTHS[t] < 32 or mode == "wide":
            raise m.error(".cc")
        add = _carry(False, carry_in)
        return _with_carry((t,) * 3, t, lambda a, b, *rest: add(multiply(a, b), *rest), carry_in, carry_out)
    if m.flag("sat"):
        if (mode, t) != ("hi", "s32"):
            raise m.error(".sat")
        return _same(3, t, lambda a, b, c: _clamp32(multiply(a, b).view(I4).astype(I8) + c.view(I4)))
    return Scalar((t, t, result), result, lambda a, b, c: np.add(multiply(a, b), c))


def _build_mul24(m: _Modifiers) -> Scalar:
    t = m.type("u32", "s32")
    mode = m.need("mode", "lo", "hi")
    multiply = _mul24(mode == "hi", t == "s32")
    if m.name == "mul24":
        return _same(2, t, multiply)
    if m.flag("sat"):
        if (mode, t) != ("hi", "s32"):
            raise m.error(".sat")
        return _same(3, t, lambda a, b, c: _clamp32(multiply(a, b).view(I4).astype(I8) + c.view(I4)))
    return _same(3, t, lambda a, b, c: multiply(a, b) + c)


def _build_fma(m: _Modifiers) -> Scalar:
    return _float_op(m, "fma", 3)


def _build_div(m: _Modifiers) -> Scalar:
    if not _is_float(m):
        t = m.type(*_INTS)
        return _same(2, t, _divmod(WIDTHS[t], t[0] == "s", m.name == "rem"))
    t = m.type("f32", "f64") if m.name == "div" else m.type()
    mode = m.need("rounding", *_ROUNDINGS, "approx", "full")
    ftz = m.flag("ftz")
    if t == "f64" and (ftz or mode in ("approx", "full")):
        raise m.error(f".{'ftz' if ftz else mode} of .f64")
    if mode != "approx":  # div.full's error bound is 2 ulp: the correctly rounded quotient is one of its values
        return _same(2, t, _quiet(_arithmetic("div", t, "rn" if mode == "full" else mode, ftz)))
    if ftz:
        return _same(2, t, _quiet(lambda a, b: _flush(_divide_approx(_flush(a, t), _flush(b, t)), t)))
    return _same(2, t, _quiet(_divide_approx))


def _build_root(m: _Modifiers) -> Scalar:
    """rcp, sqrt, rsqrt."""
    t = m.type("f32", "f64")
    mode = m.need("rounding", "approx", *(() if m.name == "rsqrt" else _ROUNDINGS))
    ftz = m.flag("ftz")
    if t == "f32":
        fn = _approximate(m.name, t, ftz) if mode == "approx" else _arithmetic(m.name, t, mode, ftz)
    elif mode != "approx" and not ftz:
        fn = _arithmetic(m.name, t, mode)
    elif mode == "approx" and ftz and m.name != "sqrt":
        fn = _approximate_high64(m.name)
    elif mode == "approx" and m.name == "rsqrt":
        fn = _approximate64
    else:
        raise m.error(f".{mode} of .f64")
    return _same(1, t, _quiet(fn))


def _approximate64(a: np.ndarray) -> np.ndarray:
    """rsqrt.approx.f64: subnormal inputs count as zeros of their sign."""
    return _APPROX["rsqrt"](_flush(a, "f64").view(F8)).view(U8)


def _build_approximation(m: _Modifiers) -> Scalar:
    """ex2, lg2, sin, cos, tanh."""
    halves = {"ex2": _HALVES, "tanh": _HALVES}.get(m.name, ())
    t = m.type("f32", *halves)
    m.need("rounding", "approx")
    ftz = m.flag("ftz")
    if ftz and (m.name == "tanh" or t in ("f16", "f16x2")):
        raise m.error(f".ftz of .{t}")
    return _same(1, t, _quiet(_by_element(t, _approximate(m.name, _element(t), ftz))))


def _build_minmax(m: _Modifiers) -> Scalar:
    if _is_float(m):
        t = m.type("f32", "f64", *_HALVES)
        ftz, nan_wins, xorsign, absolute = (m.flag(x) for x in ("ftz", "NaN", "xorsign", "abs"))
        if t == "f64" and (ftz or nan_wins or xorsign or absolute):
            raise m.error("a modifier of .f64")
        if (ftz and _element(t) == "bf16") or (xorsign and not absolute) or (absolute and not xorsign and t != "f32"):
            raise m.error(".ftz of .bf16, .xorsign without .abs, or .abs alone on a type other than .f32")
        fn = _quiet(_by_element(t, _minmax(m.name, _element(t), nan_wins, xorsign, absolute, ftz)))
        if absolute and not xorsign:
            return _same(3, t, fn)
        return Scalar((t, t), t, fn, optional=("f32",) if t == "f32" and not xorsign else ())
    t = m.type(*_INTS, "u16x2", "s16x2")
    element = _element(t)
    operation = np.maximum if m.name == "max" else np.minimum
    unsigned = _UNSIGNED[WIDTHS[element]]
    relu = m.flag("relu")
    if relu and t not in ("s32", "s16x2"):
        raise m.error(f".relu of .{t}")
    if t[0] == "u":
        return _same(2, t, _by_element(t, operation))
    view = _SIGNED[WIDTHS[element]]
    if relu:
        zero = view.type(0)
        fn = _by_element(t, lambda a, b: np.maximum(operation(a.view(view), b.view(view)), zero).view(unsigned))
    else:
        fn = _by_element(t, lambda a, b: operation(a.view(view), b.view(view)).view(unsigned))
    return _same(2, t, fn)


def _build_sign(m: _Modifiers) -> Scalar:
    """abs and neg. On floats both are additions of zero in hardware, so a NaN of 32 or 16 bits comes out canonical."""
    if not _is_float(m):
        t = m.type("s16", "s32", "s64")
        view, unsigned = _SIGNED[WIDTHS[t]], _UNSIGNED[WIDTHS[t]]
        return _same(1, t, np.negative if m.name == "neg" else lambda a: np.abs(a.view(view)).view(unsigned))
    t = m.type("f32", "f64", *_HALVES)
    name, ftz, absolute = _element(t), m.flag("ftz"), m.name == "abs"
    if ftz and name in ("f64", "bf16"):
        raise m.error(f".ftz of .{t}")
    _, sign_mask, inf, nan, _ = _CONSTANTS[name]
    magnitude = ~sign_mask

    def fn(a):
        if ftz:
            a = _flush(a, name)
        r = a & magnitude if absolute else a ^ sign_mask
        return r if name == "f64" else np.where((a & magnitude) > inf, nan, r)

    return _same(1, t, _by_element(t, fn))


def _build_copysign(m: _Modifiers) -> Scalar:
    t = m.type("f32", "f64")
    sign_mask = _CONSTANTS[t][1]
    magnitude = ~sign_mask
    return _same(2, t, lambda a, b: (a & sign_mask) | (b & magnitude))  # the sign is the first operand's


def _build_testp(m: _Modifiers) -> Scalar:
    t = m.type("f32", "f64")
    exponent_mask, sign_mask, inf, _, _ = _CONSTANTS[t]
    magnitude, least = ~sign_mask, inf.dtype.type(1 << FORMATS[t].mbits)
    tests = {
        "finite": lambda x: x < inf,
        "infinite": lambda x: x == inf,
        "number": lambda x: x <= inf,
        "notanumber": lambda x: x > inf,
        "normal": lambda x: ((x >= least) & (x < inf)) | (x == 0),  # zeros count as normal
        "subnormal": lambda x: (x < least) & (x != 0),
    }
    test = tests[m.need("test", *tests)]
    return Scalar((t,), "pred", lambda a: test(a & magnitude))


def _build_logic(m: _Modifiers) -> Scalar:
    t = m.type("pred", *_BITS)
    operation = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[m.name]
    return _same(2, t, operation)


def _build_not(m: _Modifiers) -> Scalar:
    if m.name == "not":
        return _same(1, m.type("pred", *_BITS), np.invert)
    t = m.type(*_BITS)
    unsigned = _UNSIGNED[WIDTHS[t]]
    return _same(1, t, lambda a: np.equal(a, 0).astype(unsigned))


def _build_shift(m: _Modifiers) -> Scalar:
    t = m.type(*_BITS, *(_INTS if m.name == "shr" else ()))
    fn = _shift_left(WIDTHS[t]) if m.name == "shl" else _shift_right(WIDTHS[t], t[0] == "s")
    return Scalar((t, "u32"), t, fn)


def _build_shf(m: _Modifiers) -> Scalar:
    m.type("b32")
    left, clamp = m.need("direction", "l", "r") == "l", m.need("mode", "clamp", "wrap") == "clamp"
    by, most, low = _U64[32], U4.type(32), U4.type(31)

    def fn(a, b, c):
        n = (np.minimum(c, most) if clamp else c & low).astype(U8)
        both = (b.astype(U8) << by) | a
        return ((both << n) >> by).astype(U4) if left else (both >> n).astype(U4)

    return Scalar(("b32", "b32", "u32"), "b32", fn)


def _build_lop3(m: _Modifiers) -> Scalar:
    m.type("b32")
    boolean = m.take("or", "and")
    sources = ("b32",) * 4
    if boolean is None:
        return Scalar(sources, "b32", _lop3)
    combine = _BOOLEAN[boolean]

    def both(a, b, c, lut, q):
        r = _lop3(a, b, c, lut)
        return r, combine(r != 0, q)

    return Scalar((*sources, "pred"), "b32", lambda *xs: _lop3(*xs[:4]), ("b32", "pred"), both)


def _build_count(m: _Modifiers) -> Scalar:
    t = m.type("b32", "b64")
    if m.name == "popc":
        return Scalar((t,), "u32", lambda a: np.bitwise_count(a).astype(U4))
    width = I4.type(WIDTHS[t])
    return Scalar((t,), "u32", lambda a: (width - _bit_length(a)).view(U4))


def _build_bfind(m: _Modifiers) -> Scalar:
    t = m.type("u32", "u64", "s32", "s64")
    top, signed = WIDTHS[t] - 1, t[0] == "s"
    view, unsigned, shift_amount = _SIGNED[WIDTHS[t]], _UNSIGNED[WIDTHS[t]], m.flag("shiftamt")

    def fn(a):
        if signed:
            a = (a.view(view) ^ (a.view(view) >> top)).view(unsigned)  # complement of a negative value
        position = _bit_length(a) - 1
        if shift_amount:
            position = np.where(position < 0, position, top - position)
        return position.astype(U4)

    return Scalar((t,), "u32", fn)


def _build_brev(m: _Modifiers) -> Scalar:
    return _same(1, m.type("b32", "b64"), _brev)


def _build_field(m: _Modifiers) -> Scalar:
    if m.name == "bfe":
        t = m.type("u32", "u64", "s32", "s64")
        return Scalar((t, "u32", "u32"), t, _bfe(WIDTHS[t], t[0] == "s"))
    t = m.type("b32", "b64")
    return Scalar((t, t, "u32", "u32"), t, _bfi(WIDTHS[t]))


def _build_fns(m: _Modifiers) -> Scalar:
    m.type("b32")
    return Scalar(("b32", "b32", "s32"), "b32", _fns)


def _build_szext(m: _Modifiers) -> Scalar:
    t = m.type("u32", "s32")
    return Scalar((t, "u32"), t, _szext(m.need("mode", "clamp", "wrap") == "clamp", t == "s32"))


def _build_bmsk(m: _Modifiers) -> Scalar:
    m.type("b32")
    return Scalar(("b32", "b32"), "b32", _bmsk(m.need("mode", "clamp", "wrap") == "clamp"))


def _build_prmt(m: _Modifiers) -> Scalar:
    mode = m.take(*_PRMT_MODES)
    m.type("b32")
    return _same(3, "b32", _prmt(mode))


def _build_dot(m: _Modifiers) -> Scalar:
    b_type = m.type("u32", "s32")
    a_type = m.type("u32", "s32")
    result = "u32" if (a_type, b_type) == ("u32", "u32") else "s32"
    start = 2 if m.name == "dp2a" and m.need("half", "lo", "hi") == "hi" else 0
    fn = _dot(4 if m.name == "dp4a" else 2, a_type, b_type, start)
    return Scalar(("b32", "b32", result), result, fn)


def _build_sad(m: _Modifiers) -> Scalar:
    t = m.type(*_INTS)
    view = (_SIGNED if t[0] == "s" else _UNSIGNED)[WIDTHS[t]]

    def fn(a, b, c):
        return np.where(a.view(view) < b.view(view), b - a, a - b) + c

    return _same(3, t, fn)


_ANY = (*_BITS, *_INTS, "f32", "f64")


def _build_selp(m: _Modifiers) -> Scalar:
    t = m.type(*_ANY)
    return Scalar((t, t, "pred"), t, lambda a, b, c: np.where(c, a, b))


def _build_slct(m: _Modifiers) -> Scalar:
    selector = m.type("s32", "f32")
    t = m.type(*_ANY)
    ftz = m.flag("ftz")
    if selector == "s32":
        if ftz:
            raise m.error(".ftz of .s32")
        return Scalar((t, t, "s32"), t, lambda a, b, c: np.where(c.view(I4) >= 0, a, b))
    if ftz:  # a negative subnormal counts as -0, which is >= 0
        return Scalar((t, t, "f32"), t, lambda a, b, c: np.where(_flush(c, "f32").view(F4) >= 0, a, b))
    return Scalar((t, t, "f32"), t, lambda a, b, c: np.where(c.view(F4) >= 0, a, b))


def _build_mov(m: _Modifiers) -> Scalar:
    return _same(1, m.type("pred", *_ANY, "b128"), lambda a: a)


def _build_setp(m: _Modifiers) -> Scalar:
    t = m.type(*_COMPARED)
    op, boolean, ftz = m.need("comparison", *_COMPARISONS), m.take(*_BOOLEAN), m.flag("ftz")
    if ftz and _element(t) not in ("f32", "f16"):
        raise m.error(f".ftz of .{t}")
    compare = _compare(m, op, _element(t), ftz)
    combine = _BOOLEAN[boolean] if boolean else None
    sources = (t, t, "pred") if boolean else (t, t)
    if t.endswith("x2"):  # p is the comparison of the low halves, q that of the high ones

        def both(a, b, *c):
            r = compare(a.view(U2), b.view(U2)).reshape(-1, 2)
            p, q = np.ascontiguousarray(r[:, 0]), np.ascontiguousarray(r[:, 1])
            return (combine(p, *c), combine(q, *c)) if c else (p, q)

        return Scalar(sources, "pred", lambda *xs: both(*xs)[0], ("pred", "pred"), both)
    if combine is None:

        def both(a, b):
            p = compare(a, b)
            return p, ~p

        return Scalar(sources, "pred", compare, ("pred", "pred"), both)

    def both(a, b, c):
        p = compare(a, b)
        return combine(p, c), combine(~p, c)

    return Scalar(sources, "pred", lambda a, b, c: combine(compare(a, b), c), ("pred", "pred"), both)


def _build_set(m: _Modifiers) -> Scalar:
    t = m.type(*_COMPARED)
    packed, element = t.endswith("x2"), _element(t)
    if packed:
        result = m.type(t, "u32", "s32")
    elif t in ("f16", "bf16"):
        result = m.type("f16", "bf16", "u16", "s16", "u32", "s32")
    else:
        result = m.type("u32", "s32", "f32", "f16", "bf16")
    op, boolean, ftz = m.need("comparison", *_COMPARISONS), m.take(*_BOOLEAN), m.flag("ftz")
    if ftz and element not in ("f32", "f16"):
        raise m.error(f".ftz of .{t}")
    compare = _compare(m, op, element, ftz)
    combine = _BOOLEAN[boolean] if boolean else None
    dtype = U2 if packed else dtype_of(result)
    name = _element(result)
    true = _CONSTANTS[name][4] if name in FORMATS else dtype.type((1 << 8 * dtype.itemsize) - 1)
    false = dtype.type(0)

    def fn(a, b, *c):
        if not packed:
            r = compare(a, b)
            return np.where(combine(r, *c) if c else r, true, false)
        r = compare(a.view(U2), b.view(U2))
        return np.where(combine(r, np.repeat(c[0], 2)) if c else r, true, false).view(U4)

    return Scalar((t, t, "pred") if boolean else (t, t), result, fn)


# ---- cvt ---------------------------------------------------------------------------------------------------------

_CVT_INTS = ("u8", "s8", *_INTS)
_CVT_FLOATS = ("f16", "bf16", "f32", "f64")
_SMALL_PACKED = {"e4m3x2": "b16", "e5m2x2": "b16", "e2m3x2": "b16", "e3m2x2": "b16", "e2m1x2": "b8", "ue8m0x2": "b16"}
_SMALL_FOUR = {"e4m3x4": "b32", "e5m2x4": "b32", "e2m3x4": "b32", "e3m2x4": "b32", "e2m1x4": "b16"}
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _int_range(t: str) -> tuple[int, int]:
    n = WIDTHS[t]
    return (-(1 << (n - 1)), (1 << (n - 1)) - 1) if t[0] == "s" else (0, (1 << n) - 1)


def _int_view(t: str) -> np.dtype:
    return (_SIGNED if t[0] == "s" else _UNSIGNED)[WIDTHS[t]]


def _cvt_int_int(d: str, a: str, sat: bool) -> Callable:
    view, unsigned = _int_view(a), _UNSIGNED[WIDTHS[d]]
    (low, high), (d_low, d_high) = _int_range(a), _int_range(d)
    if sat and (d_low > low or d_high < high):
        low, high = view.type(max(low, d_low)), view.type(min(high, d_high))
        return lambda x: np.clip(x.view(view), low, high).astype(unsigned)
    if WIDTHS[a] == WIDTHS[d]:
        return lambda x: x
    if a[0] == "u" or WIDTHS[d] < WIDTHS[a]:
        return lambda x: x.astype(unsigned)
    wide = _SIGNED[WIDTHS[d]]
    return lambda x: x.view(view).astype(wide).view(unsigned)


def _cvt_int_float(d: str, a: str, rounding: str, sat: bool) -> Callable:
    view = _int_view(a)
    if rounding == "rn" and d in ("f32", "f64"):
        to, unsigned = _FLOAT[d], _UNSIGNED[WIDTHS[d]]
        fn = lambda x: x.view(view).astype(to).view(unsigned)  # noqa: E731  (one hardware conversion: rounds once)
    elif WIDTHS[a] < 64:
        fn = lambda x: _round(x.view(view).astype(F8), d, rounding)  # noqa: E731  (exact in float64)
        if d == "f64":
            fn = lambda x: x.view(view).astype(F8).view(U8)  # noqa: E731
    elif d == "f64":

        def fn(x):
            lanes = [_round64(abs(v), 0, False, v < 0, rounding) if v else 0 for v in x.view(view).ravel().tolist()]
            return np.array(lanes, U8).reshape(x.shape)

    else:

        def fn(x):  # 53 bits with the last one sticky; f32 and smaller look at no more than 26
            negative = x.view(view) < 0
            magnitude = np.where(negative, np.negative(x), x)
            sticky = (magnitude & U8.type(0x7FF)) != 0
            cut = (magnitude >> _U64[11] | sticky) << _U64[11]
            value = np.where(magnitude >> np.uint64(53), cut, magnitude).astype(F8)
            return _round(np.where(negative, -value, value), d, rounding)

    return (lambda x: _saturate(fn(x), d)) if sat else fn


def _cvt_float_int(d: str, a: str, rounding: str, ftz: bool) -> Callable:
    """Out-of-range values clamp to the destination's range."""
    integer, unsigned, width = _TO_INTEGER[rounding], _UNSIGNED[WIDTHS[d]], WIDTHS[d]
    low, high = _int_range(d)
    of_nan = 1 << (width - 1) if a == "f64" or width == 64 else 0

    def fn(x):
        value = integer(_load(_flush(x, "f32") if ftz else x, a))
        nan = value != value
        if width < 64:
            r = np.clip(np.where(nan, 0.0, value), low, high).astype(I8).astype(unsigned)
        else:
            inside = (value >= low) & (value < float(high))  # float(high) is high + 1
            r = np.where(inside, value, 0.0).astype(_int_view(d)).view(U8)
            r = np.where(inside, r, np.where(value < 0, U8.type(low & high * 2 + 1 if low else 0), U8.type(high)))
        return np.where(nan, unsigned.type(of_nan), r) if np.count_nonzero(nan) else r

    return fn


def _cvt_float_float(
    d: str, a: str, rounding: str | None, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Callable:
    integer = _TO_INTEGER.get(rounding)
    flush_in, flush_out = ftz and a == "f32", ftz and d == "f32"
    if rounding == "rn" and not satfinite and (d, a) in (("bf16", "f32"), ("f16", "f32")):
        fn = _half_from_f32(d)
    elif integer is None and (d, a) == ("f32", "bf16"):
        fn = lambda x: x.astype(U4) << U4.type(16)  # noqa: E731  (a shift in hardware too: a NaN keeps its payload)
    elif integer is None and (d, a) == ("f32", "f16"):
        fn = lambda x: _canonical32(x.view(F2).astype(F4))  # noqa: E731
    elif integer is None and d == a:
        fn = lambda x: x  # noqa: E731
    elif d == "f64":

        def fn(x):
            value = _load(x, a)
            value = value if a in ("f32", "f64") else np.where(value != value, np.nan, value)
            return (integer(value) if integer else value).view(U8)

    else:

        def fn(x):
            value = _load(x, a)
            nearest = "rn" if integer or rounding is None else rounding
            return _round(integer(value) if integer else value, d, nearest, satfinite)

    if not (flush_in or flush_out or sat or relu):
        return fn

    def modified(x):
        r = fn(_flush(x, a) if flush_in else x)
        r = _flush(r, d) if flush_out else r
        r = _saturate(r, d) if sat else r
        return _relu(r, _CONSTANTS[d][1]) if relu else r

    return modified


def _half_from_f32(d: str) -> Callable:
    to = BF16 if d == "bf16" else F2

    def fn(x):
        value = x.view(F4)
        r = value.astype(to).view(U2)
        nan = value != value
        return np.where(nan, _NAN16, r) if np.count_nonzero(nan) else r

    return fn


def _pack_halves(d: str) -> Callable:
    """cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32: the first operand becomes the upper half."""
    to = BF16 if d == "bf16x2" else F2

    def fn(a, b):
        both = np.empty(((a if a.ndim else b).size, 2), F4)
        both[:, 0] = b.view(F4)
        both[:, 1] = a.view(F4)
        flat = both.reshape(-1)
        r = flat.astype(to).view(U4)
        squares = flat.dot(flat)
        if squares == squares:
            return r
        return np.where(flat != flat, _NAN16, r.view(U2)).view(U4)

    return fn


def _random_operand(d: str, rbits: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """.rs: random bits for ``count`` operands, [count, lanes], uint64, and how many bits they are.

    f16x2: 13 bits of each half of rbits, bf16x2: 16. Four operands: 16 bits, the upper half for a and b, the lower for e
    and f; e2m1x4: the upper bytes of both halves for a and b, the lower bytes for e and f.
    """
    r = rbits.astype(U8)
    upper, lower = r >> _U64[16], r & U8.type(0xFFFF)
    if count == 2:
        n = 13 if d == "f16x2" else 16
        mask = U8.type((1 << n) - 1)
        return np.stack((upper & mask, lower & mask)), n
    if d == "e2m1x4":
        byte = U8.type(0xFF)
        upper, lower = (upper & ~byte) | lower >> U8.type(8), (upper & byte) << U8.type(8) | (lower & byte)
    return np.stack((upper, upper, lower, lower)), 16


def _pack(codes: np.ndarray, d: str) -> np.ndarray:
    """[operands, lanes] codes -> one register a lane, the first operand uppermost."""
    dtype = dtype_of(_SMALL_PACKED.get(d) or _SMALL_FOUR.get(d) or "b32")
    width = 8 * dtype.itemsize // len(codes)
    r = codes[0].astype(dtype)
    for code in codes[1:]:
        r = (r << dtype.type(width)) | code
    return r


@cache
def _small_table(name: str, source: str, relu: bool) -> np.ndarray:
    """Codes of ``name`` (rounded to nearest, satfinite) for all 65,536 f16 or bf16."""
    values = _load(np.arange(1 << 16, dtype=U2), source)
    codes = _encode(values, FORMATS[name], "rn", satfinite=True)
    return _relu(codes, 1 << (FORMATS[name].width - 1)) if relu else codes


def _small_from_f32(name: str, relu: bool) -> Callable:
    """float32 bits -> codes of at most 8 bits. The upper 16 bits rounded to odd have 4 bits more than the widest format."""
    by, lower = U4.type(16), U4.type(0xFFFF)

    def fn(bits):
        inexact = (bits & lower) != 0
        return _small_table(name, "bf16", relu)[(bits >> by) | inexact]

    return fn


def _cvt_pack_from_f32(d: str, rounding: str, relu: bool, satfinite: bool) -> Callable:
    """Two or four f32 operands, for .rs followed by the random bits, -> a packed register."""
    name, count = d[:-2], int(d[-1])
    small = _small_from_f32(name, relu) if rounding == "rn" and name in _SMALL else None

    def fn(*sources):
        bits = np.empty((count, max(x.size for x in sources)), U4)
        for i in range(count):
            bits[i] = sources[i]
        if small:
            return _pack(small(bits), d)
        if name == "ue8m0":
            return _pack(_ue8m0(bits, rounding, satfinite), d)
        random, n = _random_operand(d, sources[count], count) if rounding == "rs" else (None, 16)
        codes = _round(bits.view(F4).astype(F8), name, rounding, satfinite, random, n)
        return _pack(_relu(codes, 1 << (FORMATS[name].width - 1)) if relu else codes, d)

    return fn


def _unpack_small(a: str, d: str, relu: bool) -> Callable:
    """e4m3x2 and its like -> f16x2 or bf16x2 through a table of 256 halves (e2m1x2: 256 pairs); all exact."""
    values = _SMALL32[a[:-2]].astype(F8)
    halves = _round(values, d[:-2])
    if relu:
        halves = _relu(halves, U2.type(0x8000))
    if a != "e2m1x2":
        return lambda x: halves[x.view(U1)].view(U4)
    codes = np.arange(256)
    pairs = (halves[codes >> 4].astype(U4) << U4.type(16)) | halves[codes & 15]
    return lambda x: pairs[x]


def _pack_small(d: str, a: str, rounding: str, relu: bool, satfinite: bool) -> Callable:
    """f16x2 or bf16x2 -> e4m3x2 and its like."""
    name, source = d[:-2], a[:-2]

    def fn(x):
        if name == "ue8m0":
            codes = _ue8m0(x.view(U2).astype(U4) << U4.type(16), rounding, satfinite)
        else:
            codes = _small_table(name, source, relu)[x.view(U2)]
        return codes.view(U2) if d != "e2m1x2" else _pack(codes.reshape(-1, 2).T[::-1], d)

    return fn


def _build_cvt(m: _Modifiers) -> Scalar:
    if m.flag("pack"):
        return _build_cvt_pack(m)
    a = m.type(*_CVT_INTS, *_CVT_FLOATS, "f16x2", "bf16x2", *_SMALL_PACKED)
    d = m.type(*_CVT_INTS, *_CVT_FLOATS, "f16x2", "bf16x2", "tf32", *_SMALL_PACKED, *_SMALL_FOUR)
    rounding = m.take(*_ROUNDINGS, *_TO_INTEGER, "rna", "rs")
    ftz, sat, relu, satfinite = (m.flag(x) for x in ("ftz", "sat", "relu", "satfinite"))
    if d in (*_CVT_INTS, *_CVT_FLOATS) and a in (*_CVT_INTS, *_CVT_FLOATS):
        return Scalar((a,), d, _cvt_scalar(m, d, a, rounding, ftz, sat, relu, satfinite))
    if ftz or sat:
        raise m.error(f".{'ftz' if ftz else 'sat'} of .{d}.{a}")
    small = d in _SMALL_PACKED or d in _SMALL_FOUR
    result = _SMALL_PACKED.get(d) or _SMALL_FOUR.get(d) or ("b32" if d == "tf32" else d)
    if d == "tf32":
        if a != "f32" or rounding not in ("rna", "rn", "rz") or (relu and rounding == "rna"):
            raise m.error(f"{rounding and '.' + rounding} of .{d}.{a}")

        def tf32(x):
            r = _tf32(x.view(F4).astype(F8), rounding, satfinite)
            return _relu(r, U4.type(1 << 31)) if relu else r

        return Scalar(("f32",), result, _quiet(tf32))
    if "ue8m0x2" in (d, a) and (relu or "f16x2" in (d, a)):
        raise m.error(f"{'.relu of ' if relu else ''}.{d}.{a}")
    if d == "ue8m0x2":
        allowed = ("rz", "rp")
    elif d in _SMALL_FOUR:
        allowed = ("rs",)
    else:
        allowed = ("rn",) if small or a in _SMALL_PACKED else ("rn", "rz", "rs")
    if rounding not in allowed:
        raise m.error(f"rounding {rounding and '.' + rounding} of .{d}.{a}")
    if a == "f32":
        if small and not satfinite and d != "ue8m0x2":
            raise m.error(f".{d}.{a} without .satfinite")
        if rounding == "rn" and not (small or relu or satfinite):
            return Scalar(("f32", "f32"), result, _quiet(_pack_halves(d)))
        sources = ("f32",) * int(d[-1]) + (("b32",) if rounding == "rs" else ())
        return Scalar(sources, result, _quiet(_cvt_pack_from_f32(d, rounding, relu, satfinite)))
    if a in _SMALL_PACKED and d in ("f16x2", "bf16x2") and not satfinite:
        return Scalar((_SMALL_PACKED[a],), result, _quiet(_unpack_small)(a, d, relu))
    if a in ("f16x2", "bf16x2") and d in _SMALL_PACKED and (satfinite or d == "ue8m0x2"):
        return Scalar((a,), result, _quiet(_pack_small(d, a, rounding, relu, satfinite)))
    raise m.error(f".{d}.{a}")


def _cvt_scalar(m: _Modifiers, d: str, a: str, rounding, ftz: bool, sat: bool, relu: bool, satfinite: bool) -> Callable:
    """One number to one number."""
    from_int, to_int = a in _CVT_INTS, d in _CVT_INTS
    if (relu or satfinite) and not (a == "f32" and d in ("f16", "bf16")):
        raise m.error(f".{'relu' if relu else 'satfinite'} of .{d}.{a}")
    if ftz and "f32" not in (a, d):
        raise m.error(f".ftz of .{d}.{a}")
    if from_int and to_int:
        if rounding:
            raise m.error(f".{rounding} of .{d}.{a}")
        return _cvt_int_int(d, a, sat)
    widens = not from_int and not to_int and (d == a or WIDTHS[d] > WIDTHS[a])
    modes = tuple(_TO_INTEGER) if to_int else _ROUNDINGS if d != a or from_int else (*_TO_INTEGER, *_ROUNDINGS)
    if rounding is None and not widens:
        raise ValueError(f"{m.opcode}: no rounding (one of {', '.join('.' + r for r in modes)})")
    if rounding is not None and rounding not in modes:
        raise m.error(f".{rounding} of .{d}.{a}")
    if to_int:
        return _quiet(_cvt_float_int(d, a, rounding, ftz))
    if from_int:
        return _quiet(_cvt_int_float(d, a, rounding, sat))
    return _quiet(_cvt_float_float(d, a, rounding, ftz, sat, relu, satfinite))


def _build_cvt_pack(m: _Modifiers) -> Scalar:
    """cvt.pack.sat: two s32 saturated to narrow integers, the first uppermost, above them the low bits of c."""
    if m.left and m.left[-1] == "b32":
        m.type("b32")
        narrow, sources = ("u2", "s2", "u4", "s4", "u8", "s8"), ("s32", "s32", "b32")
    else:
        narrow, sources = ("u16", "s16"), ("s32", "s32")
    m.type("s32")
    t = m.need("type", *narrow)
    m.need("saturation", "sat")
    n = int(t[1:])
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if t[0] == "s" else (0, (1 << n) - 1)
    mask, by = U4.type((1 << n) - 1), U4.type(n)

    def fn(a, b, *c):
        upper, lower = (np.clip(x.view(I4), low, high).view(U4) & mask for x in (a, b))
        r = (upper << by) | lower
        return r | (c[0] << U4.type(2 * n)) if c else r

    return Scalar(sources, "b32", fn)


_BUILDERS: dict[str, Callable[[_Modifiers], Scalar]] = {
    **dict.fromkeys(("add", "sub", "addc", "subc"), _build_addsub),
    "mul": _build_mul,
    **dict.fromkeys(("mad", "madc"), _build_mad),
    **dict.fromkeys(("mul24", "mad24"), _build_mul24),
    "fma": _build_fma,
    **dict.fromkeys(("div", "rem"), _build_div),
    **dict.fromkeys(("rcp", "sqrt", "rsqrt"), _build_root),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh"), _build_approximation),
    **dict.fromkeys(("min", "max"), _build_minmax),
    **dict.fromkeys(("abs", "neg"), _build_sign),
    "copysign": _build_copysign,
    "testp": _build_testp,
    **dict.fromkeys(("and", "or", "xor"), _build_logic),
    **dict.fromkeys(("not", "cnot"), _build_not),
    **dict.fromkeys(("shl", "shr"), _build_shift),
    "shf": _build_shf,
    "lop3": _build_lop3,
    **dict.fromkeys(("popc", "clz"), _build_count),
    "bfind": _build_bfind,
    "brev": _build_brev,
    **dict.fromkeys(("bfe", "bfi"), _build_field),
    "fns": _build_fns,
    "szext": _build_szext,
    "bmsk": _build_bmsk,
    "prmt": _build_prmt,
    **dict.fromkeys(("dp4a", "dp2a"), _build_dot),
    "sad": _build_sad,
    "selp": _build_selp,
    "slct": _build_slct,
    "mov": _build_mov,
    "setp": _build_setp,
    "set": _build_set,
    "cvt": _build_cvt,
}


@cache
def scalar(opcode: str) -> Scalar | None:
    """What ``opcode`` (``"mad.lo.s32"``, without guard and operands) does; None if it is not a scalar ALU opcode.

    Raises:
        ValueError: the mnemonic is a scalar ALU one, a modifier or a combination of them is not understood.
    """
    modifiers = _Modifiers(opcode)
    build = _BUILDERS.get(modifiers.name)
    if build is None:
        return None
    result = build(modifiers)
    modifiers.done()
    return result
