"""PTX scalar arithmetic: against exact fractions, Python integers, torch, ml_dtypes, and PTX's own pseudo-code."""

import itertools
import math
import operator
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from mla_cute.emulator import numeric
from mla_cute.emulator.numeric import dtype_of, from_float, scalar, to_float

INF, NAN = math.inf, math.nan
HALVES = np.arange(1 << 16, dtype=np.uint16)
BYTES = np.arange(256, dtype=np.uint8)
# name: (exponent bits, mantissa bits, dtype of ml_dtypes or numpy)
FLOATS = {
    "f64": (11, 52, np.float64),
    "f32": (8, 23, np.float32),
    "f16": (5, 10, np.float16),
    "bf16": (8, 7, ml_dtypes.bfloat16),
    "e4m3": (4, 3, ml_dtypes.float8_e4m3fn),
    "e5m2": (5, 2, ml_dtypes.float8_e5m2),
    "e2m3": (2, 3, ml_dtypes.float6_e2m3fn),
    "e3m2": (3, 2, ml_dtypes.float6_e3m2fn),
    "e2m1": (2, 1, ml_dtypes.float4_e2m1fn),
}
UINT = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(1)


# ---- oracles -----------------------------------------------------------------------------------------------------


def exact(bits: int, name: str):
    """Value of raw bits: a Fraction, or a float inf or nan."""
    exponent_bits, mantissa_bits, _ = FLOATS[name]
    sign = -1 if bits >> (exponent_bits + mantissa_bits) else 1
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << mantissa_bits) - 1)
    if exponent == (1 << exponent_bits) - 1:
        return NAN if fraction else sign * INF
    bias = (1 << (exponent_bits - 1)) - 1
    m = fraction + (1 << mantissa_bits if exponent else 0)
    return Fraction(sign * m) * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)


def rounded(x: Fraction, name: str, rounding: str) -> int:
    """Bits of an IEEE format for a non-zero fraction."""
    exponent_bits, mantissa_bits, _ = FLOATS[name]
    bias = (1 << (exponent_bits - 1)) - 1
    negative, x = x < 0, abs(x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= x < Fraction(2) ** e
    e = max(e, 1 - bias)
    scaled = x / Fraction(2) ** (e - mantissa_bits)
    n = math.floor(scaled)
    rest = scaled - n
    if rounding == "rn":
        n += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n % 2 == 1)
    else:
        n += rest > 0 and rounding == ("rm" if negative else "rp")
    if Fraction(n) * Fraction(2) ** (e - mantissa_bits) >= Fraction(2) ** (bias + 1):
        toward_zero = rounding == "rz" or rounding == ("rp" if negative else "rm")
        code = (((1 << exponent_bits) - 1) << mantissa_bits) - toward_zero
    else:
        code = ((e + bias - 1) << mantissa_bits) + n
    return code | negative << (exponent_bits + mantissa_bits)


def is_nan(bits: int, name: str) -> bool:
    return exact(bits, name) != exact(bits, name)


def expected(op: str, operands: list[int], name: str, rounding: str) -> int | None:
    """Bits of one operation, None where the result is a NaN. Infinite operands through Python floats."""
    values = [exact(b, name) for b in operands]
    sign = lambda b: b >> (sum(FLOATS[name][:2]))  # noqa: E731
    if any(isinstance(v, float) for v in values):
        with np.errstate(all="ignore"):
            f = [np.float64(float(v)) for v in values]
            f = [np.copysign(x, -1.0 if sign(b) else 1.0) if x == 0 else x for x, b in zip(f, operands)]
            r = {
                "add": lambda a, b: a + b,
                "sub": lambda a, b: a - b,
                "mul": lambda a, b: a * b,
                "fma": lambda a, b, c: a * b + c,
                "div": lambda a, b: a / b,
                "rcp": lambda a: 1 / a,
                "sqrt": np.sqrt,
            }[op](*f)
        if r != r:
            return None
        if r != 0 and abs(r) != INF:  # one infinite operand: finite only as 0
            raise AssertionError
        bits = int(np.asarray(r).astype(np.float64).view(np.uint64))
        inf = ((1 << FLOATS[name][0]) - 1) << FLOATS[name][1]
        return (inf if abs(r) == INF else 0) | bits >> 63 << sum(FLOATS[name][:2])
    signs = [sign(b) for b in operands]
    if op == "rcp":
        values, signs, op = [Fraction(1), values[0]], [0, signs[0]], "div"
    if op == "sub":
        values, signs, op = [values[0], -values[1]], [signs[0], 1 - signs[1]], "add"
    top = sum(FLOATS[name][:2])
    if op == "sqrt":
        if values[0] == 0:
            return operands[0]
        if values[0] < 0:
            return None
        x = values[0]  # a root to far more bits than any format has, with the rest made visible
        scale = 1 << 2400
        root = math.isqrt(x.numerator * scale * scale // x.denominator)
        r = Fraction(root, scale)
        return rounded(r if r * r == x else r + Fraction(1, 2 * scale), name, rounding)
    if op == "div":
        if values[1] == 0:
            inf = ((1 << FLOATS[name][0]) - 1) << FLOATS[name][1]
            return None if values[0] == 0 else inf | (signs[0] ^ signs[1]) << top
        r, zero = values[0] / values[1], signs[0] ^ signs[1]
    elif op == "mul":
        r, zero = values[0] * values[1], signs[0] ^ signs[1]
    else:
        product, s = (values[0] * values[1], signs[0] ^ signs[1]) if op == "fma" else (values[0], signs[0])
        r = product + values[-1]
        zero = s if s == signs[-1] else rounding == "rm"
    return zero << top if r == 0 else rounded(r, name, rounding)


def float_bits(rng, name: str, n: int) -> np.ndarray:
    """Random bits: everything, values of similar size, few significant bits, subnormals, and the edges."""
    exponent_bits, mantissa_bits, _ = FLOATS[name]
    width = 1 + exponent_bits + mantissa_bits
    dtype = UINT[width]
    total = 1 << width
    anything = rng.integers(0, total, n, dtype=dtype)
    bias = (1 << (exponent_bits - 1)) - 1
    near = (rng.integers(bias - 3, bias + 4, n).astype(np.uint64) << np.uint64(mantissa_bits)).astype(dtype)
    near |= rng.integers(0, 1 << mantissa_bits, n, dtype=dtype) | (anything & dtype(1 << (width - 1)))
    sparse = near & ~dtype((1 << (mantissa_bits - 3)) - 1)
    small = rng.integers(0, 4 << mantissa_bits, n, dtype=dtype)
    inf = ((1 << exponent_bits) - 1) << mantissa_bits
    one = bias << mantissa_bits
    edges = np.array(
        [0, 1, inf, inf - 1, inf + 1, one, one + 1, one - 1, 1 << mantissa_bits, (1 << mantissa_bits) - 1], dtype
    )
    edges = np.concatenate([edges, edges | dtype(1 << (width - 1))])
    kinds = np.stack([anything, near, near, sparse, small, edges[rng.integers(0, len(edges), n)]])
    return kinds[rng.integers(0, len(kinds), n), np.arange(n)]


def check_float(op: str, opcode: str, name: str, rounding: str, sources: list[np.ndarray]) -> None:
    s = scalar(opcode)
    got = s.fn(*sources)
    assert got.dtype == dtype_of(s.result)
    canonical = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}.get(name)
    for g, *operands in zip(got.tolist(), *(x.tolist() for x in sources)):
        want = expected(op, operands, name, rounding)
        message = f"{opcode} {[hex(x) for x in operands]} -> {g:#x}, not {want if want is None else hex(want)}"
        if want is None:
            assert g == canonical if canonical else is_nan(g, name), message
        else:
            assert g == want, message


# ---- floating-point arithmetic against fractions -----------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "div", "rcp", "sqrt"])
def test_arithmetic_is_rounded_once(op, name, rounding, rng):
    count = {"fma": 3, "rcp": 1, "sqrt": 1}.get(op, 2)
    n = 2500 if name == "f32" else 500
    check_float(op, f"{op}.{rounding}.{name}", name, rounding, [float_bits(rng, name, n) for _ in range(count)])


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_half_arithmetic_is_rounded_once(op, name, rng):
    sources = [float_bits(rng, name, 1500) for _ in range(3 if op == "fma" else 2)]
    check_float(op, f"{op}.rn.{name}", name, "rn", sources)
    packed = scalar(f"{op}.rn.{name}x2").fn(*(np.ascontiguousarray(x).view(np.uint32) for x in sources))
    assert np.array_equal(packed.view(np.uint16), scalar(f"{op}.rn.{name}").fn(*sources))


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_fma_of_midpoints(rounding, rng):
    """a*b + c whose exact value is a hair off a midpoint of two floats: rounding twice gets these wrong."""
    n = 500
    a = 1 + rng.integers(0, 1 << 12, n) * 2.0**-12
    b = 1 + (rng.integers(0, 1 << 11, n) * 2 + 1) * 2.0**-12  # products of 25 bits: midpoints, if the last bit is 1
    c = np.where(rng.integers(0, 2, n), 1, -1) * 2.0 ** rng.integers(-149, -60, n)
    scale = 2.0 ** rng.integers(-126, 100, n)  # into the subnormals too
    c = np.where(rng.integers(0, 8, n) > 0, c, 0)
    sources = [x.astype(np.float32).view(np.uint32) for x in (a * np.minimum(scale, 1), b * np.maximum(scale, 1), c)]
    check_float("fma", f"fma.{rounding}.f32", "f32", rounding, sources)
    packed = [np.ascontiguousarray(x).view(np.uint64) for x in sources]
    got = scalar(f"fma.{rounding}.f32x2").fn(*packed).view(np.uint32)
    assert np.array_equal(got, scalar(f"fma.{rounding}.f32").fn(*sources))


def test_double_rounding_is_avoided():
    """2**-24 + 1 is a midpoint, and 2**-80 more is lost by float64."""
    one, tiny = np.float32(1 + 2.0**-12), np.float32(2.0**-80)
    a = np.full(32, one).view(np.uint32)
    c = np.full(32, tiny).view(np.uint32)
    b = np.full(32, np.float32(1 + 2.0**-12)).view(np.uint32)  # a*b = 1 + 2**-11 + 2**-24
    up = scalar("fma.rn.f32").fn(a, b, c).view(np.float32)
    down = scalar("fma.rn.f32").fn(a, b, c | np.uint32(1 << 31)).view(np.float32)
    assert (up == np.float32(1 + 2.0**-11 + 2.0**-23)).all()
    assert (down == np.float32(1 + 2.0**-11)).all()


def test_ftz_sat_relu():
    tiny, one, nan = 0x00000001, 0x3F800000, 0x7FC00001

    def run(opcode, *bits, dtype=np.uint32):
        return int(scalar(opcode).fn(*(np.full(32, b, dtype) for b in bits))[7])

    assert run("add.f32", tiny, tiny) == 2
    assert run("add.ftz.f32", tiny, one) == one
    assert run("add.ftz.f32", 0x80000001, 0x80000001) == 0x80000000  # the sign stays
    assert run("mul.ftz.f32", 0x00800000, 0x3F000000) == 0  # a subnormal result
    assert run("fma.rn.ftz.f32", tiny, 0x7F000000, 0) == 0
    assert run("add.sat.f32", one, one) == one
    assert run("add.sat.f32", 0x80000000 | one, 0) == 0
    assert run("add.sat.f32", nan, 0) == 0
    assert run("add.f32", nan, 0) == 0x7FFFFFFF
    assert run("fma.rn.relu.f16", 0x3C00, 0xBC00, 0, dtype=np.uint16) == 0
    assert run("fma.rn.relu.bf16", 0x7FC1, 0xBC00, 0, dtype=np.uint16) == 0x7FFF
    assert run("fma.rn.sat.f16x2", 0x40003C00, 0x40003800, 0x0000BC00) == 0x3C000000
    assert run("add.ftz.f16", 0x0001, 0x0001, dtype=np.uint16) == 0
    assert run("ex2.approx.ftz.f32", 0xC3020000) == 0  # 2**-130
    assert run("ex2.approx.f32", 0xC3020000) == 1 << 19
    assert run("setp.eq.ftz.f32", tiny, 0x80000000) == 1
    assert run("max.ftz.f32", 0x80000001, 0x80000002) == 0x80000000
    assert run("slct.u32.f32", 1, 2, 0x80000001) == 2
    assert run("slct.ftz.u32.f32", 1, 2, 0x80000001) == 1


def test_mixed_precision(rng):
    for name in ("f16", "bf16"):
        a, b = float_bits(rng, name, 300), float_bits(rng, name, 300)
        c = float_bits(rng, "f32", 300)
        wide = [scalar(f"cvt.f32.{name}").fn(x) for x in (a, b)]
        for rounding in ("rn", "rz", "rp"):
            assert np.array_equal(
                scalar(f"add.{rounding}.f32.{name}").fn(a, c), scalar(f"add.{rounding}.f32").fn(wide[0], c)
            )
            got = scalar(f"fma.{rounding}.f32.{name}").fn(a, b, c)
            assert np.array_equal(got, scalar(f"fma.{rounding}.f32").fn(*wide, c))


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_min_max(name, rng):
    a, b, c = (float_bits(rng, name, 1500) for _ in range(3))
    top = 1 << sum(FLOATS[name][:2])
    canonical = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "f64": 0x7FF8 << 48}[name]

    def oracle(which, nan_wins, *operands):
        nans = [is_nan(x, name) for x in operands]
        if all(nans) or (nan_wins and any(nans)):
            return canonical
        numbers = [x for x, n in zip(operands, nans) if not n]
        return (max if which == "max" else min)(numbers, key=lambda x: (exact(x, name), not x & top))

    for which, nan in itertools.product(("min", "max"), ("", ".NaN")):
        if name == "f64" and nan:
            continue
        fn = scalar(f"{which}{nan}.{name}").fn
        assert fn(a, b).tolist() == [oracle(which, nan, x, y) for x, y in zip(a.tolist(), b.tolist())]
        if name == "f32":
            got = fn(a, b, c).tolist()
            assert got == [oracle(which, nan, *xs) for xs in zip(a.tolist(), b.tolist(), c.tolist())]
            got = scalar(f"{which}{nan}.abs.f32").fn(a, b, c).tolist()
            assert got == [
                oracle(which, nan, *(x & ~top for x in xs)) for xs in zip(a.tolist(), b.tolist(), c.tolist())
            ]
        if name != "f64":
            got = scalar(f"{which}{nan}.xorsign.abs.{name}").fn(a, b).tolist()
            for g, x, y in zip(got, a.tolist(), b.tolist()):
                want = oracle(which, nan, x & ~top, y & ~top)
                assert g == (want if want == canonical else want | ((x ^ y) & top))


def test_comparisons_with_nan(rng):
    def oracle(op, a, b):
        nan = a != a or b != b
        if op in ("num", "nan"):
            return nan == (op == "nan")
        if op in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
            return nan or getattr(operator, op[:2])(a, b)
        return not nan and getattr(operator, op)(a, b)

    ops = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
    for name in ("f32", "f16", "bf16", "f64"):
        a, b = float_bits(rng, name, 400), float_bits(rng, name, 400)
        b[::5] = a[::5]
        values = [(exact(x, name), exact(y, name)) for x, y in zip(a.tolist(), b.tolist())]
        q = rng.integers(0, 2, 400).astype(bool)
        for op in ops:
            want = np.array([oracle(op, x, y) for x, y in values])
            assert np.array_equal(scalar(f"setp.{op}.{name}").fn(a, b), want), (op, name)
            p, not_p = scalar(f"setp.{op}.{name}").fn_all(a, b)
            assert np.array_equal(p, want) and np.array_equal(not_p, ~want)
            for boolean, f in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
                p, not_p = scalar(f"setp.{op}.{boolean}.{name}").fn_all(a, b, q)
                assert np.array_equal(p, f(want, q)) and np.array_equal(not_p, f(~want, q))
            assert np.array_equal(scalar(f"set.{op}.u32.{name}").fn(a, b), np.where(want, 0xFFFFFFFF, 0))
            if name in ("f16", "bf16"):
                a2, b2 = a.view(np.uint32), b.view(np.uint32)
                p, high = scalar(f"setp.{op}.{name}x2").fn_all(a2, b2)
                assert np.array_equal(p, want[::2]) and np.array_equal(high, want[1::2])
                one = 0x3C00 if name == "f16" else 0x3F80
                got = scalar(f"set.{op}.{name}x2.{name}x2").fn(a2, b2).view(np.uint16)
                assert np.array_equal(got, np.where(want, one, 0))


def test_sign_operations_and_tests(rng):
    a, b = float_bits(rng, "f32", 500), float_bits(rng, "f32", 500)
    values = a.view(np.float32)
    number = ~np.isnan(values)
    for op, f in (("abs", np.abs), ("neg", np.negative)):
        got = scalar(f"{op}.f32").fn(a)
        assert np.array_equal(got, np.where(number, f(values).view(np.uint32), 0x7FFFFFFF))
    assert np.array_equal(scalar("copysign.f32").fn(a, b), np.copysign(b.view(np.float32), values).view(np.uint32))
    tests = {
        "finite": np.isfinite(values),
        "infinite": np.isinf(values),
        "number": number,
        "notanumber": ~number,
        "subnormal": (np.abs(values) < 2.0**-126) & (values != 0),
        "normal": np.isfinite(values) & ((np.abs(values) >= 2.0**-126) | (values == 0)),
    }
    for op, want in tests.items():
        assert np.array_equal(scalar(f"testp.{op}.f32").fn(a), want), op


# ---- approximations ----------------------------------------------------------------------------------------------


def test_approximations_and_their_special_cases(rng):
    x = np.concatenate([rng.uniform(-20, 20, 500), np.exp(rng.uniform(-80, 80, 500))]).astype(np.float32)
    references = {
        "ex2": (lambda v: 2.0**v, x[:500]),
        "lg2": (math.log2, x[500:]),
        "rcp": (lambda v: 1 / v, x),
        "rsqrt": (lambda v: 1 / math.sqrt(v), x[500:]),
        "sqrt": (math.sqrt, x[500:]),
        "sin": (math.sin, x[:500]),
        "cos": (math.cos, x[:500]),
        "tanh": (math.tanh, x[:500]),
    }
    for op, (f, values) in references.items():
        got = scalar(f"{op}.approx.f32").fn(values.view(np.uint32)).view(np.float32)
        want = np.array([f(float(v)) for v in values])
        assert np.all(np.abs(got - want) <= np.abs(want) * 2.0**-23), op
    nan = 0x7FFFFFFF
    special = {  # for -inf, -1, -0, +0, +inf, NaN
        "ex2": [0, 0x3F000000, 0x3F800000, 0x3F800000, 0x7F800000, nan],
        "lg2": [nan, nan, 0xFF800000, 0xFF800000, 0x7F800000, nan],
        "rcp": [0x80000000, 0xBF800000, 0xFF800000, 0x7F800000, 0, nan],
        "rsqrt": [nan, nan, 0xFF800000, 0x7F800000, 0, nan],
        "sqrt": [nan, nan, 0x80000000, 0, 0x7F800000, nan],
        "sin": [nan, None, 0x80000000, 0, nan, nan],
        "cos": [nan, None, 0x3F800000, 0x3F800000, nan, nan],
        "tanh": [0xBF800000, None, 0x80000000, 0, 0x3F800000, nan],
    }
    inputs = np.array([-INF, -1, -0.0, 0.0, INF, NAN], np.float32).view(np.uint32)
    subnormals = np.array([0x80000001, 0x00000001], np.uint32)
    for op, want in special.items():
        for ftz in ("", ".ftz") if op != "tanh" else ("",):
            got = scalar(f"{op}.approx{ftz}.f32").fn(inputs).tolist()
            assert all(w is None or g == w for g, w in zip(got, want)), (op, ftz, [hex(g) for g in got])
        if op != "tanh":
            flushed = scalar(f"{op}.approx.ftz.f32").fn(subnormals)
            assert flushed.tolist() == want[2:4], op


def test_approximate_division():
    f = lambda *v: np.array(v, np.float32).view(np.uint32)  # noqa: E731
    got = scalar("div.approx.f32").fn(f(1, 1, INF, -6, 0), f(3, 1.5 * 2.0**126, 1.5 * 2.0**126, 2, 0))
    assert got.tolist() == [0x3EAAAAAB, 0, 0x7FFFFFFF, 0xC0400000, 0x7FFFFFFF]
    assert scalar("div.full.f32").fn(f(1), f(3)).tolist() == [0x3EAAAAAB]
    one = np.array([1.0, 3.0]).view(np.uint64)
    got = scalar("rcp.approx.ftz.f64").fn(one)
    assert got.tolist() == [0x3FF0000000000000, 0x3FD5555500000000]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_approximations_in_half_precision(name, rng):
    """The double result, rounded once."""
    x = float_bits(rng, name, 1500)
    for op, f in (("ex2", lambda v: 2.0**v), ("tanh", math.tanh)):
        ftz = op == "ex2" and name == "bf16"
        for g, bits in zip(scalar(f"{op}.approx{'.ftz' * ftz}.{name}").fn(x).tolist(), x.tolist()):
            v = float(exact(bits, name))
            if v != v:
                assert g == 0x7FFF
            elif op == "ex2" and abs(v) > 200:
                assert g == {"f16": 0x7C00, "bf16": 0x7F80}[name] * (v > 0)
            elif v == 0 and op == "tanh":
                assert g == bits
            else:
                want = rounded(Fraction(f(v)), name, "rn")
                assert g == (0 if ftz and want < 0x80 else want), (op, hex(bits))
        both = x.view(np.uint32)
        packed = scalar(f"{op}.approx{'.ftz' * ftz}.{name}x2").fn(both).view(np.uint16)
        assert np.array_equal(packed, scalar(f"{op}.approx{'.ftz' * ftz}.{name}").fn(x))


# ---- conversions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0"])
def test_small_floats_decode_like_ml_dtypes(name):
    dtype = ml_dtypes.float8_e8m0fnu if name == "ue8m0" else FLOATS[name][2]
    codes = BYTES[: {"e2m3": 64, "e3m2": 64, "e2m1": 16}.get(name, 256)]
    want = codes.view(dtype).astype(np.float32)
    got = to_float(codes, name)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(want)[~np.isnan(got)])
    if name in ("e4m3", "e5m2"):
        kind = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
        assert np.array_equal(torch.from_numpy(codes).view(kind).float().numpy(), got, equal_nan=True)
    if name != "ue8m0":  # and back, in every rounding
        for rounding in ("rn", "rz", "rm", "rp", "rna"):
            back = from_float(got, name, rounding)
            assert np.array_equal(back[~np.isnan(got)], codes[~np.isnan(got)])


@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_all_halves_to_small_floats(name, source):
    """Against ml_dtypes, whose conversions of 16-bit floats round once, and without saturation where that exists."""
    values = HALVES.view(FLOATS[source][2])
    wide = values.astype(np.float32)
    finite = np.isfinite(wide)
    limit = {"e4m3": 448, "e5m2": 57344, "e2m3": 7.5, "e3m2": 28, "e2m1": 6}[name]
    with np.errstate(all="ignore"):
        want = np.clip(wide, -limit, limit).astype(FLOATS[name][2]).view(np.uint8)
    want = np.where(np.isnan(wide), 0x7F if name in ("e4m3", "e5m2") else from_float(np.float32(limit), name), want)
    assert np.array_equal(from_float(wide, name, satfinite=True), want)
    if name in ("e4m3", "e5m2"):
        with np.errstate(all="ignore"):
            want = wide[finite].astype(FLOATS[name][2]).view(np.uint8)
        got = from_float(wide[finite], name)
        assert np.array_equal(got, want)
        kind = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
        inside = np.abs(wide) <= limit
        torch_codes = torch.from_numpy(wide[inside].copy()).to(kind).view(torch.uint8).numpy()
        assert np.array_equal(from_float(wide[inside], name), torch_codes)


def test_packed_small_conversions(rng):
    a, b = (np.concatenate([float_bits(rng, "f32", 2000), HALVES.astype(np.uint32) << 16]) for _ in range(2))
    b = rng.permutation(b)
    for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
        upper, lower = (from_float(x.view(np.float32), name, satfinite=True) for x in (a, b))
        width = 4 if name == "e2m1" else 8
        want = upper.astype(np.uint16) << width | lower
        s = scalar(f"cvt.rn.satfinite.{name}x2.f32")
        got = s.fn(a, b)
        assert got.dtype == dtype_of(s.result) and np.array_equal(got, want), name
        sign = 1 << {"e2m1": 3, "e2m3": 5, "e3m2": 5}.get(name, 7)
        relu = [np.where(x & sign, 0, x).astype(np.uint16) for x in (upper, lower)]
        got = scalar(f"cvt.rn.satfinite.relu.{name}x2.f32").fn(a, b)
        assert np.array_equal(got, relu[0] << width | relu[1]), name
    for name in ("e4m3", "e5m2"):
        got = scalar(f"cvt.rn.satfinite.{name}x2.f16x2").fn(HALVES.view(np.uint32)).view(np.uint8)
        assert np.array_equal(got, from_float(HALVES.view(np.float16).astype(np.float32), name, satfinite=True))
    for name in ("e4m3", "e5m2", "e2m3", "e3m2"):
        codes = BYTES if name[0:2] in ("e4", "e5") else BYTES & 63
        got = scalar(f"cvt.rn.f16x2.{name}x2").fn(codes.view(np.uint16)).view(np.float16)
        assert np.array_equal(got.astype(np.float32), to_float(codes, name), equal_nan=True)
    got = scalar("cvt.rn.f16x2.e2m1x2").fn(BYTES).view(np.float16).reshape(-1, 2)
    assert np.array_equal(got[:, 0], to_float(BYTES & 15, "e2m1")) and np.array_equal(
        got[:, 1], to_float(BYTES >> 4, "e2m1")
    )
    nan = scalar("cvt.rn.f16x2.e4m3x2").fn(np.array([0xFF7F], np.uint16))
    assert nan.tolist() == [0x7FFF7FFF]


def test_power_of_two_scales(rng):
    x = float_bits(rng, "f32", 3000)
    with np.errstate(all="ignore"):
        magnitude = np.abs(x.view(np.float32).astype(np.float64))
    finite = np.isfinite(magnitude)
    m, e = np.frexp(np.where(finite & (magnitude > 0), magnitude, 1))
    for rounding, satfinite in itertools.product(("rz", "rp"), ("", ".satfinite")):
        exponent = np.where((rounding == "rp") & (m > 0.5), e, e - 1)
        want = np.where(magnitude > 0, np.clip(exponent + 127, 0, 255), 0)
        want = np.where(np.isinf(magnitude), 255, want)
        want = np.where(np.isnan(magnitude), 255, np.minimum(want, 254) if satfinite else want)
        got = scalar(f"cvt.{rounding}{satfinite}.ue8m0x2.f32").fn(x, x[::-1].copy())
        assert np.array_equal(got >> 8, want) and np.array_equal(got & 255, want[::-1]), rounding
        packed = scalar(f"cvt.{rounding}{satfinite}.ue8m0x2.bf16x2").fn(HALVES.view(np.uint32)).view(np.uint8)
        wide = (HALVES.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(packed, from_float(wide, "ue8m0", rounding, bool(satfinite)))
    back = scalar("cvt.rn.bf16x2.ue8m0x2").fn(BYTES.view(np.uint16)).view(np.uint16)
    assert np.array_equal(to_float(back, "bf16"), to_float(BYTES, "ue8m0"), equal_nan=True) and back[255] == 0x7FFF


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_float32_to_halves(name, rng):
    x = float_bits(rng, "f32", 20000)
    kind = torch.float16 if name == "f16" else torch.bfloat16
    values = torch.from_numpy(x.view(np.float32).copy())
    want = np.where(values.isnan(), 0x7FFF, values.to(kind).view(torch.int16).numpy().view(np.uint16)).astype(np.uint16)
    assert np.array_equal(scalar(f"cvt.rn.{name}.f32").fn(x), want)
    assert np.array_equal(from_float(x.view(np.float32), name), want)
    for n in (32, len(x)):  # with NaNs and, probably, without
        got = scalar(f"cvt.rn.{name}x2.f32").fn(x[:n], x[::-1][:n].copy())
        assert np.array_equal(got, want[:n].astype(np.uint32) << 16 | want[::-1][:n])
    relu = np.where(want >= 0x8000, 0, want)
    assert np.array_equal(scalar(f"cvt.rn.relu.{name}.f32").fn(x), relu)
    limit = {"f16": 0x7BFF, "bf16": 0x7F7F}[name]
    sat = np.where((want & 0x7FFF) == limit + 1, (want & 0x8000) | limit, want)
    assert np.array_equal(scalar(f"cvt.rn.satfinite.{name}x2.f32").fn(x, x), sat.astype(np.uint32) * 0x10001)
    for rounding in ("rz", "rm", "rp"):
        got = scalar(f"cvt.{rounding}.{name}.f32").fn(x[:1500])
        for g, bits in zip(got.tolist(), x[:1500].tolist()):
            v = exact(bits, "f32")
            if isinstance(v, float):
                continue
            assert g == (rounded(v, name, rounding) if v else bits >> 31 << 15)
    truncated = scalar("cvt.rz.bf16.f32").fn(x)
    number = ~np.isnan(x.view(np.float32))
    assert np.array_equal(truncated[number], (x >> 16).astype(np.uint16)[number])


def test_halves_to_float32():
    got = scalar("cvt.f32.f16").fn(HALVES)
    want = torch.from_numpy(HALVES.view(np.int16).copy()).view(torch.float16).float().numpy().view(np.uint32)
    nan = np.isnan(HALVES.view(np.float16))
    assert np.array_equal(got, np.where(nan, 0x7FFFFFFF, want))
    assert np.array_equal(scalar("cvt.f32.bf16").fn(HALVES), HALVES.astype(np.uint32) << 16)
    for name in ("f16", "bf16"):
        assert np.array_equal(
            from_float(to_float(HALVES, name), name)[~nan & (HALVES & 0x7F80 != 0x7F80)],
            HALVES[~nan & (HALVES & 0x7F80 != 0x7F80)],
        )


def test_doubles_and_tf32(rng):
    x = float_bits(rng, "f64", 1500)
    for d, rounding in itertools.product(("f32", "f16", "bf16"), ("rn", "rz", "rm", "rp")):
        got = scalar(f"cvt.{rounding}.{d}.f64").fn(x)
        for g, bits in zip(got.tolist(), x.tolist()):
            v = exact(bits, "f64")
            if v != v:
                assert g == (0x7FFFFFFF if d == "f32" else 0x7FFF)
            elif not isinstance(v, float):
                assert g == (rounded(v, d, rounding) if v else bits >> 63 << sum(FLOATS[d][:2])), (
                    hex(bits),
                    d,
                    rounding,
                )
    f = float_bits(rng, "f32", 3000)
    finite = f[np.abs(f.view(np.float32)) < 1e38]
    away = (finite.astype(np.uint64) + 0x1000) & 0xFFFFE000
    assert np.array_equal(scalar("cvt.rna.tf32.f32").fn(finite), away)
    even = (finite.astype(np.uint64) + 0xFFF + (finite >> 13 & 1)) & 0xFFFFE000
    assert np.array_equal(scalar("cvt.rn.tf32.f32").fn(finite), even)
    assert np.array_equal(scalar("cvt.rz.tf32.f32").fn(finite), finite & 0xFFFFE000)
    assert scalar("cvt.rna.satfinite.tf32.f32").fn(np.array([0x7F800000, 0xFFC00000], np.uint32)).tolist() == [
        0x7F7FE000,
        0x7FFFFFFF,
    ]


INTS = {f"{k}{n}": (k == "s", n) for k in "us" for n in (8, 16, 32, 64)}


def int_range(name):
    signed, n = INTS[name]
    return (-(1 << (n - 1)), (1 << (n - 1)) - 1) if signed else (0, (1 << n) - 1)


def signed_value(bits: int, name: str) -> int:
    signed, n = INTS[name]
    return bits - (1 << n) if signed and bits >> (n - 1) else bits


def int_bits(rng, name, n=60):
    """Edges and random values of mixed magnitudes."""
    width = INTS[name][1]
    top = 1 << width
    edges = [0, 1, 2, top - 1, top - 2, top >> 1, (top >> 1) - 1, (top >> 1) + 1, 3, 7]
    values = edges + [int(rng.integers(0, 1 << 63)) * 2 >> int(rng.integers(0, 64)) for _ in range(n - len(edges))]
    values = [v % top for v in values]
    return np.array(values, UINT[width])[rng.permutation(n)]


def test_integers_to_integers(rng):
    for a, d in itertools.product(INTS, INTS):
        x = int_bits(rng, a)
        values = [signed_value(v, a) for v in x.tolist()]
        top = 1 << INTS[d][1]
        assert scalar(f"cvt.{d}.{a}").fn(x).tolist() == [v % top for v in values], (d, a)
        low, high = int_range(d)
        got = scalar(f"cvt.sat.{d}.{a}").fn(x)
        assert got.dtype == UINT[INTS[d][1]]
        assert got.tolist() == [min(max(v, low), high) % top for v in values], (d, a)


def test_integers_to_floats(rng):
    for a, d, rounding in itertools.product(INTS, ("f16", "bf16", "f32", "f64"), ("rn", "rz", "rm", "rp")):
        x = int_bits(rng, a)
        if INTS[a][1] == 64:  # midpoints of float32 with something far below
            n = rng.integers(1 << 23, 1 << 24, 20).astype(np.uint64)
            x = np.concatenate([x, (n * 2 + 1 << np.uint64(37)) + rng.integers(0, 3, 20).astype(np.uint64)])
        want = [rounded(Fraction(v), d, rounding) if v else 0 for v in (signed_value(b, a) for b in x.tolist())]
        assert scalar(f"cvt.{rounding}.{d}.{a}").fn(x).tolist() == want, (d, a, rounding)


def test_floats_to_integers(rng):
    functions = {"rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil, "rni": round}
    for a, d in itertools.product(("f16", "bf16", "f32", "f64"), INTS):
        x = float_bits(rng, a, 150)
        spread = (rng.normal(size=150) * 2.0 ** rng.integers(0, 70, 150)).astype(np.float64)
        with np.errstate(over="ignore"):
            spread = spread.astype(FLOATS[a][2]).view(x.dtype)
        ties = (rng.integers(-9, 9, 20) + 0.5).astype(FLOATS[a][2]).view(x.dtype)
        x = np.concatenate([x, spread, ties])
        low, high = int_range(d)
        top = 1 << INTS[d][1]
        of_nan = top >> 1 if a == "f64" or INTS[d][1] == 64 else 0
        for rounding, f in functions.items():
            want = []
            for v in (exact(b, a) for b in x.tolist()):
                if v != v:
                    want.append(of_nan)
                else:
                    want.append(((high if v > 0 else low) if isinstance(v, float) else min(max(f(v), low), high)) % top)
            assert scalar(f"cvt.{rounding}.{d}.{a}").fn(x).tolist() == want, (d, a, rounding)


def test_rounding_to_integral_floats(rng):
    x = float_bits(rng, "f32", 500)
    v = x.view(np.float32)
    number = ~np.isnan(v)
    for rounding, f in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        with np.errstate(all="ignore"):
            want = f(v).view(np.uint32)
        assert np.array_equal(scalar(f"cvt.{rounding}.f32.f32").fn(x)[number], want[number])
    assert scalar("cvt.sat.f32.f32").fn(np.array([2, -1, NAN, 0.25], np.float32).view(np.uint32)).view(
        np.float32
    ).tolist() == [
        1,
        0,
        0,
        0.25,
    ]


def test_stochastic_rounding(rng):
    """Between the two neighbours: up if the random bits and the discarded ones make a carry."""
    a, b = (rng.normal(size=200).astype(np.float32).view(np.uint32) for _ in range(2))
    r = rng.integers(0, 1 << 32, 200, dtype=np.uint32)
    got = scalar("cvt.rs.bf16x2.f32").fn(a, b, r)
    want = ((a.astype(np.uint64) + (r >> 16)) >> 16 << 16) | ((b.astype(np.uint64) + (r & 0xFFFF)) >> 16)
    assert np.array_equal(got, want)
    got = scalar("cvt.rs.f16x2.f32").fn(a, b, r).view(np.uint16).reshape(-1, 2)
    for column, x, bits in ((1, a, r >> 16), (0, b, r)):
        normal = np.abs(x.view(np.float32)) > 2.0**-14
        moved = ((x & 0x7FFFFFFF).astype(np.int64) + (bits & 0x1FFF).astype(np.int64)) >> 13
        assert np.array_equal((got[:, column] & 0x7FFF)[normal], (moved - (112 << 10))[normal])
    four = [rng.normal(size=200).astype(np.float32).view(np.uint32) for _ in range(4)]
    for name, width in (("e4m3", 8), ("e5m2", 8), ("e2m3", 8), ("e3m2", 8), ("e2m1", 4)):
        s = scalar(f"cvt.rs.satfinite.{name}x4.f32")
        assert len(s.sources) == 5
        zero, ones = (s.fn(*four, np.full(200, v, np.uint32)) for v in (0, 0xFFFFFFFF))
        for i, x in enumerate(four):
            shift = width * (3 - i)
            low, high = ((v >> shift & ((1 << width) - 1)).astype(np.uint8) for v in (zero, ones))
            value = x.view(np.float32)
            assert np.array_equal(low, from_float(value, name, "rz", satfinite=True))
            up = np.where(
                value > 0, from_float(value, name, "rp", satfinite=True), from_float(value, name, "rm", satfinite=True)
            )
            assert ((high == up) | (high == low)).all() and (high == up).mean() > 0.95


# ---- integers ----------------------------------------------------------------------------------------------------


def truncating_div(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


@pytest.mark.parametrize("t", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_arithmetic(t, rng):
    width = INTS[t][1]
    top, low, high = 1 << width, *int_range(t)
    a, b, c = (
        np.concatenate([int_bits(rng, t, 100), np.array(list(p), UINT[width])])
        for p in ((top >> 1, 5), (top - 1, 0), (0, 1))
    )
    values = [[signed_value(v, t) for v in x.tolist()] for x in (a, b, c)]
    wide = top * top

    def check(opcode, f, modulus=top):
        s = scalar(opcode)
        n = len(s.sources)
        got = s.fn(*(a, b, c)[:n])
        assert got.dtype == dtype_of(s.result), opcode
        assert got.tolist() == [f(*v) % modulus for v in zip(*values[:n])], opcode

    check(f"add.{t}", lambda a, b: a + b)
    check(f"sub.{t}", lambda a, b: a - b)
    check(f"mul.lo.{t}", lambda a, b: a * b)
    check(f"mul.hi.{t}", lambda a, b: a * b >> width)
    check(f"mad.lo.{t}", lambda a, b, c: a * b + c)
    check(f"mad.hi.{t}", lambda a, b, c: (a * b >> width) + c)
    check(f"div.{t}", lambda a, b: truncating_div(a, b) if b else -1)
    check(f"rem.{t}", lambda a, b: a - b * truncating_div(a, b) if b else -1)
    check(f"min.{t}", min)
    check(f"max.{t}", max)
    check(f"sad.{t}", lambda a, b, c: c + abs(a - b))
    if width < 64:
        check(f"mul.wide.{t}", lambda a, b: a * b, wide)
        wide_c = int_bits(rng, f"{t[0]}{2 * width}", len(a))
        s = scalar(f"mad.wide.{t}")
        assert s.sources[2] == s.result == f"{t[0]}{2 * width}"
        want = [(x * y + z) % wide for x, y, z in zip(*values[:2], wide_c.tolist())]
        assert s.fn(a, b, wide_c).tolist() == want
    if t[0] == "s":
        check(f"abs.{t}", abs)
        check(f"neg.{t}", lambda a: -a)
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        got = scalar(f"setp.{op}.{t}").fn(a, b)
        assert got.tolist() == [getattr(operator, op)(x, y) for x, y in zip(*values[:2])]
        if t[0] == "u" and op not in ("eq", "ne"):
            alias = {"lt": "lo", "le": "ls", "gt": "hi", "ge": "hs"}[op]
            assert np.array_equal(scalar(f"setp.{alias}.{t}").fn(a, b), got)
        q = rng.integers(0, 2, len(a)).astype(bool)
        assert np.array_equal(scalar(f"set.{op}.xor.f32.{t}").fn(a, b, q), np.where(got ^ q, 0x3F800000, 0))
    if t == "s32":
        clamp = lambda v: min(max(v, low), high)  # noqa: E731
        check("add.sat.s32", lambda a, b: clamp(a + b))
        check("sub.sat.s32", lambda a, b: clamp(a - b))
        check("mad.hi.sat.s32", lambda a, b, c: clamp((a * b >> 32) + c))
        check("min.relu.s32", lambda a, b: max(min(a, b), 0))
        check("max.relu.s32", lambda a, b: max(a, b, 0))
    if width == 32:
        cut = lambda v: (v + (1 << 23)) % (1 << 24) - (1 << 23) if t == "s32" else v % (1 << 24)  # noqa: E731
        check(f"mul24.lo.{t}", lambda a, b: cut(a) * cut(b))
        check(f"mul24.hi.{t}", lambda a, b: cut(a) * cut(b) >> 16)
        check(f"mad24.hi.{t}", lambda a, b, c: (cut(a) * cut(b) >> 16) + c)


def test_carry_chains(rng):
    """128-bit sums, differences and products from 32- and 64-bit pieces."""
    for t, width in (("u32", 32), ("s64", 64)):
        words = [int_bits(rng, t.replace("s", "u"), 64) for _ in range(6)]
        a0, a1, b0, b1, c0, c1 = words
        top = 1 << 2 * width
        value = lambda low, high: [x | y << width for x, y in zip(low.tolist(), high.tolist())]  # noqa: E731,B023
        for sub, f in (("add", operator.add), ("sub", operator.sub)):
            low, cc = scalar(f"{sub}.cc.{t}").fn_all(a0, b0)
            high, out = scalar(f"{sub}c.cc.{t}").fn_all(a1, b1, cc)
            full = [f(x, y) for x, y in zip(value(a0, a1), value(b0, b1))]
            assert value(low, high) == [v % top for v in full]
            assert out.tolist() == [not 0 <= v < top for v in full]
            assert np.array_equal(scalar(f"{sub}c.{t}").fn(a1, b1, cc), high)
            assert scalar(f"{sub}c.cc.{t}").sources[-1] == "cc" and scalar(f"{sub}.cc.{t}").results == (t, "cc")
        u = t.replace("s", "u")
        low, cc = scalar(f"mad.lo.cc.{u}").fn_all(a0, b0, c0)
        high = scalar(f"madc.hi.{u}").fn(a0, b0, c1, cc)
        want = [(x * y + z) % top for x, y, z in zip(a0.tolist(), b0.tolist(), value(c0, c1))]
        assert value(low, high) == want


def test_shifts(rng):
    amounts = np.array([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 31, (1 << 32) - 1], np.uint32)
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        width = INTS[t][1]
        x = np.repeat(int_bits(rng, t, 20), len(amounts))
        n = np.tile(amounts, 20)
        values = [signed_value(v, t) for v in x.tolist()]
        assert scalar(f"shr.{t}").fn(x, n).tolist() == [
            (v >> min(k, 64)) % (1 << width) for v, k in zip(values, n.tolist())
        ]
        got = scalar(f"shl.b{width}").fn(x, n)
        assert got.dtype == x.dtype and got.tolist() == [
            v << min(k, 64) & (1 << width) - 1 for v, k in zip(x.tolist(), n.tolist())
        ]
    a, b = (np.repeat(int_bits(rng, "u32", 20), len(amounts)) for _ in range(2))
    n = np.tile(amounts, 20)
    for mode, amount in (("clamp", lambda k: min(k, 32)), ("wrap", lambda k: k & 31)):
        lanes = [(x | y << 32, amount(k)) for x, y, k in zip(a.tolist(), b.tolist(), n.tolist())]
        assert scalar(f"shf.l.{mode}.b32").fn(a, b, n).tolist() == [v << k >> 32 & 0xFFFFFFFF for v, k in lanes]
        assert scalar(f"shf.r.{mode}.b32").fn(a, b, n).tolist() == [v >> k & 0xFFFFFFFF for v, k in lanes]


def bit(v, i):
    return v >> i & 1


def bfe_oracle(a, pos, length, width, signed):
    pos, length = pos & 255, length & 255
    s = bit(a, min(pos + length - 1, width - 1)) if signed and length else 0
    return sum((bit(a, pos + i) if i < length and pos + i < width else s) << i for i in range(width))


def bfi_oracle(a, b, pos, length, width):
    pos, length = pos & 255, length & 255
    for i in range(min(length, width)):
        if pos + i < width:
            b = b & ~(1 << pos + i) | bit(a, i) << pos + i
    return b


def bmsk_oracle(a, b, mode):
    a1, b1 = a & 31, b & 31
    mask0, mask1 = 0xFFFFFFFF << a1 & 0xFFFFFFFF, 0xFFFFFFFF << a1 + b1 & 0xFFFFFFFF
    position_over = mode == "clamp" and a >= 32
    mask0 = 0 if position_over else mask0
    if a1 + b1 >= 32 or position_over or (mode == "clamp" and b >= 32):
        mask1 = 0
    elif b1 == 0:
        mask1 = 0xFFFFFFFF
    return mask0 & ~mask1


def szext_oracle(a, b, mode, signed):
    b1, large = b & 31, b >= 32 and mode == "clamp"
    mask = 0 if large else 0xFFFFFFFF << b1 & 0xFFFFFFFF
    sign = 0 if b1 == 0 or large or not signed else bit(a, b1 - 1 & 31)
    return a & ~mask | (mask if sign else 0)


def fns_oracle(mask, base, offset):
    if offset == 0:
        return base if bit(mask, base) else 0xFFFFFFFF
    pos, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= pos < 32:
        if bit(mask, pos):
            if count == 0:
                return pos
            count -= 1
        pos += step
    return 0xFFFFFFFF


def test_bit_fields(rng):
    small = np.array([0, 1, 5, 8, 16, 31, 32, 33, 40, 63, 64, 65, 127, 128, 255, 256, 0x1234], np.uint32)
    n = len(small) ** 2
    pos, length = np.repeat(small, len(small)), np.tile(small, len(small))
    for width in (32, 64):
        a, b = (int_bits(rng, f"u{width}", n) for _ in range(2))
        for signed in (False, True):
            got = scalar(f"bfe.{'s' if signed else 'u'}{width}").fn(a, pos, length).tolist()
            assert got == [bfe_oracle(*v, width, signed) for v in zip(a.tolist(), pos.tolist(), length.tolist())]
        got = scalar(f"bfi.b{width}").fn(a, b, pos, length).tolist()
        assert got == [bfi_oracle(*v, width) for v in zip(a.tolist(), b.tolist(), pos.tolist(), length.tolist())]
        assert scalar(f"popc.b{width}").fn(a).tolist() == [v.bit_count() for v in a.tolist()]
        assert scalar(f"clz.b{width}").fn(a).tolist() == [width - v.bit_length() for v in a.tolist()]
        assert scalar(f"brev.b{width}").fn(a).tolist() == [int(f"{v:0{width}b}"[::-1], 2) for v in a.tolist()]
        for t in (f"u{width}", f"s{width}"):
            plain = [(~v if v < 0 else v).bit_length() - 1 for v in (signed_value(x, t) for x in a.tolist())]
            assert scalar(f"bfind.{t}").fn(a).tolist() == [v % (1 << 32) for v in plain]
            want = [(width - 1 - v if v >= 0 else v) % (1 << 32) for v in plain]
            assert scalar(f"bfind.shiftamt.{t}").fn(a).tolist() == want
    a = int_bits(rng, "u32", n)
    for mode in ("clamp", "wrap"):
        pairs = list(zip(pos.tolist(), length.tolist()))
        assert scalar(f"bmsk.{mode}.b32").fn(pos, length).tolist() == [bmsk_oracle(*v, mode) for v in pairs]
        for t in ("u32", "s32"):
            want = [szext_oracle(x, y, mode, t == "s32") for x, y in zip(a.tolist(), length.tolist())]
            assert scalar(f"szext.{mode}.{t}").fn(a, length).tolist() == want
    base = rng.integers(0, 32, n, dtype=np.uint32)
    offset = rng.integers(-6, 7, n).astype(np.int32)
    want = [fns_oracle(*v) for v in zip(a.tolist(), base.tolist(), offset.tolist())]
    assert scalar("fns.b32").fn(a, base, offset.view(np.uint32)).tolist() == want


def prmt_oracle(a, b, c, mode):
    source = (b << 32 | a).to_bytes(8, "little")
    s = c & 3
    rows = {  # target bytes 3 to 0, from the tables in the ISA
        "f4e": ["3210", "4321", "5432", "6543"],
        "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"],
        "rc16": ["1010", "3232", "1010", "3232"],
    }
    if mode:
        return int.from_bytes(bytes(source[int(i)] for i in reversed(rows[mode][s])), "little")
    out = []
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = source[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def test_byte_permutation_and_logic(rng):
    a, b, c = (rng.integers(0, 1 << 32, 200, dtype=np.uint32) for _ in range(3))
    for mode in (None, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        fn = scalar("prmt.b32" + (f".{mode}" if mode else "")).fn
        assert fn(a, b, c).tolist() == [prmt_oracle(*v, mode) for v in zip(a.tolist(), b.tolist(), c.tolist())], mode
        for control in (0x5410, 0x7632, 0x4321, 0xBA98, 0x0000, 0x1F3):
            got = fn(a, b, np.full(200, control, np.uint32)).tolist()
            assert got == [prmt_oracle(x, y, control, mode) for x, y in zip(a.tolist(), b.tolist())], (mode, control)
    q = rng.integers(0, 2, 200).astype(bool)
    for lut in range(256):
        lut_lanes = np.full(200, lut, np.uint32)
        want = np.zeros(200, np.uint32)
        for i in range(8):
            if lut >> i & 1:
                want |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        assert np.array_equal(scalar("lop3.b32").fn(a, b, c, lut_lanes), want), lut
        d, p = scalar("lop3.or.b32").fn_all(a, b, c, lut_lanes, q)
        assert np.array_equal(d, want) and np.array_equal(p, (want != 0) | q)
    for op, f in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        assert np.array_equal(scalar(f"{op}.b32").fn(a, b), f(a, b))
        assert np.array_equal(scalar(f"{op}.pred").fn(q, q[::-1]), f(q, q[::-1]))
    assert np.array_equal(scalar("not.pred").fn(q), ~q) and np.array_equal(scalar("not.b32").fn(a), ~a)
    assert scalar("cnot.b16").fn(np.array([0, 5], np.uint16)).tolist() == [1, 0]
    assert np.array_equal(scalar("selp.b32").fn(a, b, q), np.where(q, a, b))
    assert np.array_equal(scalar("slct.b32.s32").fn(a, b, c), np.where(c.view(np.int32) >= 0, a, b))
    assert scalar("mov.b32").fn(a) is a


def test_dot_products_and_packed_integers(rng):
    a, b, c = (rng.integers(0, 1 << 32, 100, dtype=np.uint32) for _ in range(3))
    view = {"u32": {1: np.uint8, 2: np.uint16}, "s32": {1: np.int8, 2: np.int16}}
    for ta, tb in itertools.product(("u32", "s32"), repeat=2):
        byte_b = b.view(view[tb][1]).reshape(-1, 4).astype(np.int64)
        want = (a.view(view[ta][1]).reshape(-1, 4).astype(np.int64) * byte_b).sum(1) + c
        assert np.array_equal(scalar(f"dp4a.{ta}.{tb}").fn(a, b, c), want & 0xFFFFFFFF)
        half_a = a.view(view[ta][2]).reshape(-1, 2).astype(np.int64)
        for half, columns in (("lo", slice(0, 2)), ("hi", slice(2, 4))):
            want = (half_a * byte_b[:, columns]).sum(1) + c
            assert np.array_equal(scalar(f"dp2a.{half}.{ta}.{tb}").fn(a, b, c), want & 0xFFFFFFFF)
    assert np.array_equal(scalar("add.u16x2").fn(a, b).view(np.uint16), a.view(np.uint16) + b.view(np.uint16))
    got = scalar("min.relu.s16x2").fn(a, b).view(np.int16)
    assert np.array_equal(got, np.maximum(np.minimum(a.view(np.int16), b.view(np.int16)), 0))
    v = a.view(np.int32) >> 20
    for t, n in (("s8", 8), ("u8", 8), ("s4", 4), ("u4", 4), ("s2", 2), ("u2", 2)):
        low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if t[0] == "s" else (0, (1 << n) - 1)
        x = np.clip(v, low, high) & ((1 << n) - 1)
        want = x << n | x[::-1] | (c.astype(np.int64) << 2 * n)
        got = scalar(f"cvt.pack.sat.{t}.s32.b32").fn(v.view(np.uint32), v[::-1].copy().view(np.uint32), c)
        assert np.array_equal(got, want & 0xFFFFFFFF), t
    x = np.array([70000, -70000], np.int32).view(np.uint32)
    assert scalar("cvt.pack.sat.s16.s32").fn(x, x[::-1].copy()).tolist() == [0x7FFF8000, 0x80007FFF]


# ---- one known answer for each group, the real kernels' opcodes, and bad input -----------------------------------

KNOWN = [  # opcode, operands, result
    ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
    ("sub.u32", (0, 1), 0xFFFFFFFF),
    ("add.s64", (2**64 - 1, 1), 0),
    ("mul.lo.s32", (0xFFFFFFFF, 5), 0xFFFFFFFB),
    ("mul.hi.u32", (0x80000000, 6), 3),
    ("mul.wide.s32", (0xFFFFFFFF, 2), 2**64 - 2),
    ("mad.lo.s32", (3, 4, 5), 17),
    ("mad24.lo.u32", (0xFF000002, 3, 1), 7),
    ("div.s32", (0x80000000, 0xFFFFFFFF), 0x80000000),
    ("div.u32", (7, 0), 0xFFFFFFFF),
    ("rem.s32", (0xFFFFFFF9, 3), 0xFFFFFFFF),
    ("abs.s32", (0x80000000,), 0x80000000),
    ("min.s32", (0xFFFFFFFF, 1), 0xFFFFFFFF),
    ("max.u32", (0xFFFFFFFF, 1), 0xFFFFFFFF),
    ("sad.s32", (0xFFFFFFFF, 1, 10), 12),
    ("popc.b32", (0xF0F0,), 8),
    ("clz.b64", (1,), 63),
    ("bfind.s32", (0xFFFFFFFE,), 0),
    ("brev.b32", (1,), 0x80000000),
    ("bfe.s32", (0x000000F0, 4, 4), 0xFFFFFFFF),
    ("bfi.b32", (0xF, 0, 8, 4), 0xF00),
    ("fns.b32", (0b10110, 0, 3), 4),
    ("szext.wrap.s32", (0x80, 8), 0xFFFFFF80),
    ("bmsk.clamp.b32", (4, 4), 0xF0),
    ("dp4a.s32.u32", (0x01FF0000, 0x02030000, 1), 0),
    ("prmt.b32", (0x33221100, 0x77665544, 0x5410), 0x55441100),
    ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x1A), 0x1A),
    ("shf.r.wrap.b32", (0x11223344, 0x55667788, 8), 0x88112233),
    ("shl.b32", (1, 32), 0),
    ("shr.s32", (0x80000000, 99), 0xFFFFFFFF),
    ("selp.b32", (1, 2, 0), 2),
    ("slct.s32.f32", (1, 2, 0x80000000), 1),
    ("set.gt.f32.s32", (1, 0xFFFFFFFF), 0x3F800000),
    ("setp.lt.s32", (0xFFFFFFFF, 0), 1),
    ("setp.neu.f32", (0x7FC00000, 0x7FC00000), 1),
    ("setp.eq.and.f32", (0x80000000, 0, 1), 1),
    ("cvt.s64.s32", (0xFFFFFFFF,), 2**64 - 1),
    ("cvt.u32.u64", (2**32 + 5,), 5),
    ("cvt.sat.u8.s32", (0xFFFFFFFF,), 0),
    ("cvt.rn.f32.s32", (0xFFFFFFFF,), 0xBF800000),
    ("cvt.rzi.u32.f32", (0xBFC00000,), 0),
    ("cvt.rni.s32.f32", (0x40200000,), 2),
    ("cvt.f32.f16", (0x3C01,), 0x3F802000),
    ("cvt.rn.f16.f32", (0x47800000,), 0x7C00),
    ("cvt.rz.f16.f32", (0x47800000,), 0x7BFF),
    ("cvt.rn.bf16x2.f32", (0x3F800000, 0x40000000), 0x3F804000),
    ("cvt.rn.f16x2.f32", (0x3F800000, 0x40000000), 0x3C004000),
    ("cvt.rn.f16x2.e4m3x2", (0x3840,), 0x3C004000),
    ("cvt.rn.satfinite.e4m3x2.f32", (0x7F800000, 0x3F800000), 0x7E38),
    ("cvt.rn.satfinite.e5m2x2.f32", (0xFF800000, 0x7FC00000), 0xFB7F),
    ("cvt.rn.satfinite.e2m1x2.f32", (0x40C00000, 0x7FC00000), 0x77),
    ("cvt.rp.satfinite.ue8m0x2.f32", (0x3F800001, 0x3F800000), 0x807F),
    ("add.f32", (0x7F800000, 0xFF800000), 0x7FFFFFFF),
    ("add.rm.f32", (0x3F800000, 0xBF800000), 0x80000000),
    ("mul.f32", (0x00000001, 0x3F000000), 0),
    ("mul.rp.f32", (0x00000001, 0x3F000000), 1),
    ("fma.rn.f32", (0x40000000, 0x40400000, 0x3F800000), 0x40E00000),
    ("fma.rn.f32x2", (0x3F80000040000000, 0x4000000040400000, 0), 0x4000000040C00000),
    ("mad.rn.f32", (0x40000000, 0x40400000, 0x3F800000), 0x40E00000),
    ("fma.rn.f64", (0x4000000000000000, 0x4008000000000000, 0), 0x4018000000000000),
    ("fma.rn.bf16x2", (0x3F804000, 0x40004040, 0), 0x400040C0),
    ("min.f32", (0x80000000, 0), 0x80000000),
    ("max.NaN.f32", (0x7FC00000, 0), 0x7FFFFFFF),
    ("max.xorsign.abs.f32", (0xC0000000, 0x3F800000), 0xC0000000),
    ("neg.f16x2", (0x3C003C00,), 0xBC00BC00),
    ("copysign.f32", (0x80000000, 0x3F800000), 0xBF800000),
    ("testp.subnormal.f32", (1,), 1),
    ("rcp.approx.ftz.f32", (0x00000001,), 0x7F800000),
    ("rcp.rn.f32", (0x40400000,), 0x3EAAAAAB),
    ("div.rz.f32", (0x3F800000, 0x40400000), 0x3EAAAAAA),
    ("sqrt.rn.f32", (0x40000000,), 0x3FB504F3),
    ("rsqrt.approx.f32", (0x40800000,), 0x3F000000),
    ("ex2.approx.ftz.f32", (0xFF800000,), 0),
    ("ex2.approx.f16x2", (0x3C000000,), 0x40003C00),
    ("lg2.approx.ftz.f32", (0x41000000,), 0x40400000),
    ("tanh.approx.bf16", (0x7F80,), 0x3F80),
    ("cos.approx.f32", (0,), 0x3F800000),
    ("and.b64", (2**40 + 1, 2**40), 2**40),
    ("cnot.b32", (0,), 1),
    ("mov.b64", (5,), 5),
]


@pytest.mark.parametrize("opcode,operands,want", KNOWN, ids=[k[0] for k in KNOWN])
def test_known_answers(opcode, operands, want):
    s = scalar(opcode)
    sources = [np.full(32, v, dtype_of(t)) for v, t in zip(operands, s.sources)]
    assert len(operands) == len(s.sources)
    got = s.fn(*sources)
    assert got.shape == (32,) and got.dtype == dtype_of(s.result)
    assert set(got.tolist()) == {want}, hex(got.tolist()[0])


# What NVVM makes of this project's kernels: sparse decode for sm_90a, plan, combine.
KERNEL_OPCODES = [
    "abs.f32",
    "add.f32",
    "add.s32",
    "add.s64",
    "and.b32",
    "and.b64",
    "and.pred",
    "cvt.f32.bf16",
    "cvt.f32.f16",
    "cvt.rn.bf16.f32",
    "cvt.rn.bf16x2.f32",
    "cvt.rn.f16x2.e4m3x2",
    "cvt.s64.s32",
    "cvt.u64.u32",
    "div.s32",
    "div.u32",
    "ex2.approx.ftz.f32",
    "fma.rn.f32",
    "lg2.approx.ftz.f32",
    "mad.lo.s32",
    "mad.lo.s64",
    "max.f32",
    "max.s32",
    "min.relu.s32",
    "min.s32",
    "mov.b32",
    "mov.b64",
    "mov.u32",
    "mul.f32",
    "mul.lo.s32",
    "mul.lo.s64",
    "mul.wide.s32",
    "mul.wide.u32",
    "neg.s32",
    "not.b32",
    "not.pred",
    "or.b32",
    "or.b64",
    "or.pred",
    "popc.b32",
    "rcp.approx.ftz.f32",
    "rcp.rn.f32",
    "selp.b32",
    "selp.f32",
    "setp.eq.b32",
    "setp.eq.f32",
    "setp.ge.s32",
    "setp.gt.s32",
    "setp.gt.u32",
    "setp.le.s32",
    "setp.lt.s32",
    "setp.lt.u32",
    "setp.ne.b32",
    "setp.neu.f32",
    "shl.b32",
    "shl.b64",
    "shr.s32",
    "shr.u32",
    "sub.f32",
    "sub.s32",
    "xor.b32",
]
# What Hopper and Blackwell kernels of CUTLASS use besides
OTHER_OPCODES = [
    "add.rn.f32x2",
    "add.rn.ftz.f32x2",
    "mul.rn.f32x2",
    "mul.f32x2",
    "fma.rn.f32x2",
    "fma.rn.ftz.f32x2",
    "sub.rn.f32x2",
    "max.NaN.f32",
    "max.ftz.f32",
    "fma.rn.bf16x2",
    "fma.rn.f16x2",
    "mul.bf16x2",
    "mul.f16x2",
    "sub.f16x2",
    "max.f16x2",
    "neg.bf16x2",
    "prmt.b32",
    "lop3.b32",
    "shf.l.wrap.b32",
    "bfe.u32",
    "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.rn.satfinite.e5m2x2.f32",
    "cvt.rn.satfinite.e4m3x2.f16x2",
    "cvt.rn.satfinite.e2m1x2.f32",
    "cvt.rn.f16x2.e2m1x2",
    "cvt.rn.f16x2.e5m2x2",
    "cvt.rn.bf16x2.ue8m0x2",
    "cvt.rp.satfinite.ue8m0x2.f32",
    "cvt.rz.satfinite.ue8m0x2.f32",
    "cvt.rna.tf32.f32",
    "cvt.rn.relu.bf16x2.f32",
    "cvt.rn.f16.f32",
    "cvt.rzi.s32.f32",
    "cvt.rmi.f32.f32",
    "cvt.rni.s32.f32",
    "cvt.rn.f32.s32",
    "cvt.rn.f32.u32",
    "cvt.rn.f32.s64",
    "cvt.u16.u32",
    "cvt.u32.u16",
    "cvt.s32.s8",
    "cvt.u32.u8",
    "cvt.s16.s8",
    "cvt.u32.u64",
    "cvt.f64.f32",
    "cvt.rn.f32.f64",
    "cvt.rn.f16.s16",
    "cvt.pack.sat.s8.s32.b32",
    "tanh.approx.f32",
    "rsqrt.approx.ftz.f32",
    "sqrt.rn.f32",
    "div.rn.f32",
    "div.full.f32",
    "div.approx.ftz.f32",
    "rem.s32",
    "rem.u32",
    "mul.hi.u32",
    "mad.hi.u32",
    "mad.wide.u32",
    "add.cc.s32",
    "addc.u32",
    "mad.lo.cc.u32",
    "setp.lt.and.s32",
    "setp.eq.or.b32",
    "setp.eq.s64",
    "setp.ne.b16",
    "xor.pred",
    "clz.b32",
    "brev.b32",
    "bfind.u32",
    "abs.s32",
    "min.u32",
    "fma.rn.f64",
    "add.f64",
    "selp.b64",
    "cvt.rs.satfinite.e4m3x4.f32",
    "cvt.rs.satfinite.e2m1x4.f32",
    "add.s16",
    "mov.pred",
    "mov.f32",
    "mov.b128",
    "add.rn.f32.f16",
]


@pytest.mark.parametrize("opcode", KERNEL_OPCODES + OTHER_OPCODES)
def test_opcodes_run_on_random_bits(opcode, rng):
    """Right shape and type, inputs unchanged, no warning (which the fixture makes an error), for any bits."""
    s = scalar(opcode)
    assert s is not None and scalar(opcode) is s
    sources = []
    for t in s.sources:
        dtype = dtype_of(t)
        if t in ("pred", "cc"):
            sources.append(rng.integers(0, 2, 32).astype(bool))
        else:
            sources.append(rng.integers(0, 1 << 8 * dtype.itemsize, 32, dtype=dtype))
    if opcode.startswith("lop3"):
        sources[3][:] = 0x96
    before = [x.copy() for x in sources]
    for x in sources:
        x.setflags(write=False)
    results = s.fn_all(*sources)
    assert len(results) == len(s.results)
    for r, t in zip(results, s.results):
        assert r.shape == (32,) and r.dtype == dtype_of(t)
    assert np.array_equal(results[0], s.fn(*sources))
    assert all(np.array_equal(x, y) for x, y in zip(before, sources))


def test_other_instructions_are_not_scalar():
    for opcode in (
        "ld.global.b32",
        "bra.uni",
        "wgmma.fence.sync.aligned",
        "bar.sync",
        "elect.sync",
        "cvta.to.global.u64",
    ):
        assert scalar(opcode) is None


@pytest.mark.parametrize(
    "opcode,named",
    [
        ("add.wrong.s32", ".wrong"),
        ("add.sat.u32", ".sat"),
        ("add.s33", ".s33"),
        ("fma.f32", "no rounding"),
        ("fma.rn.oob.bf16", ".oob"),
        ("mul.s32", "no mode"),
        ("setp.lo.s32", ".lo"),
        ("setp.lt.b32", ".lt"),
        ("setp.ftz.lt.s32", ".ftz"),
        ("cvt.f16.f32", "no rounding"),
        ("cvt.rn.s32.f32", ".rn"),
        ("cvt.rn.bf16x2.f32.bogus", ".bogus"),
        ("cvt.rn.e4m3x2.f32", "satfinite"),
        ("cvt.rs.tf32.f32", ".rs"),
        ("cvt.rp.relu.ue8m0x2.f32", ".relu"),
        ("ex2.f32", "no rounding"),
        ("max.xorsign.f32", ".xorsign"),
        ("prmt.b32.f5e", ".f5e"),
        ("mov", "no type"),
    ],
)
def test_what_is_not_understood_is_named(opcode, named):
    with pytest.raises(ValueError, match="^" + opcode.replace(".", r"\.")) as e:
        scalar(opcode)
    assert named in str(e.value)
    with pytest.raises(ValueError, match=r"from_float|to_float"):
        from_float(np.zeros(1, np.float32), "f31")


def test_results_are_of_any_length_and_constants_broadcast():
    a = np.arange(5, dtype=np.uint32)
    one = np.array(1, np.uint32)
    assert scalar("add.s32").fn(a, one).tolist() == [1, 2, 3, 4, 5]
    assert scalar("setp.lt.s32").fn(a, one).tolist() == [True, False, False, False, False]
    assert numeric.dtype_of("pred") == np.bool_ and numeric.dtype_of("f32x2") == np.uint64
