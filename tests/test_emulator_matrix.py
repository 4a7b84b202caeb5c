"""Matrix instructions of the emulator against formulas of the PTX ISA, one element at a time, and CuTe's layouts."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from mla_cute.emulator import matrix as mx

RNG = np.random.default_rng(7)


def wgmma_desc(start, leading, stride, mode, base_offset=0):
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | base_offset << 49 | mode << 62


def tcgen05_desc(start, leading, stride, mode, base_offset=0):
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | base_offset << 49 | mode << 61


def bf16(values):
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


# Shared-memory descriptors ------------------------------------------------------------------------------------------


def test_descriptor_decode():
    d = mx.SmemDescriptor.decode_wgmma(0x4000004000010042)  # SW128, LBO 16, SBO 1024, at 0x420
    assert d == mx.SmemDescriptor(0x420, 16, 1024, "128")
    modes = {0: "none", 1: "128", 2: "64", 3: "32"}
    for code, mode in modes.items():
        assert mx.SmemDescriptor.decode_wgmma(wgmma_desc(2048, 32, 256, code)) == mx.SmemDescriptor(2048, 32, 256, mode)
    for code, mode in {0: "none", 1: "128_atom32", 2: "128", 4: "64", 6: "32"}.items():
        got = mx.SmemDescriptor.decode_tcgen05(tcgen05_desc(1 << 17, 32, 256, code))
        assert got == mx.SmemDescriptor(1 << 17, 32, 256, mode)
    assert mx.SmemDescriptor.decode_tcgen05(tcgen05_desc(0, 0, 0, 2, 5)).base_offset == 5
    absolute = mx.SmemDescriptor.decode_tcgen05(tcgen05_desc(0, 16, 1024, 2) | 1 << 52)
    assert absolute.leading_is_address
    with pytest.raises(NotImplementedError, match="absolute"):
        mx.operand_chunks(absolute, 8, 16, 16, "K")


@pytest.mark.parametrize("bit", [14, 31, 46, 48, 52, 61])
def test_descriptor_reserved_wgmma(bit):
    with pytest.raises(ValueError, match="reserved bits"):
        mx.SmemDescriptor.decode_wgmma(wgmma_desc(1024, 16, 1024, 1) | 1 << bit)


def test_descriptor_reserved_tcgen05():
    good = tcgen05_desc(1024, 16, 1024, 2)
    for bit in (15, 30, 53, 60):
        with pytest.raises(ValueError, match="reserved bits"):
            mx.SmemDescriptor.decode_tcgen05(good | 1 << bit)
    with pytest.raises(ValueError, match="bits 46-48 are 0b000"):
        mx.SmemDescriptor.decode_tcgen05(good & ~(1 << 46))
    for code in (3, 5, 7):
        with pytest.raises(ValueError, match=f"swizzle mode {code}"):
            mx.SmemDescriptor.decode_tcgen05(tcgen05_desc(1024, 16, 1024, code))
    with pytest.raises(ValueError, match="base offset 1 without a swizzle"):
        mx.SmemDescriptor.decode_tcgen05(tcgen05_desc(1024, 16, 1024, 0, 1))


def canonical_address(desc, row, k, bits, major):
    """One element by the ISA's table of canonical layouts (element units, T = 128 / bits) and CuTe's Swizzle."""
    t, leading, stride = 128 // bits, desc.leading * 8 // bits, desc.stride * 8 // bits
    width = {"none": 1, "32": 2, "64": 4, "128": 8, "128_atom32": 8}[desc.swizzle]
    if major == "K":
        chunk = leading if desc.swizzle == "none" else t
        element = row % 8 * width * t + row // 8 * stride + k % t + k // t * chunk
    else:
        i, j, m = row % t, row // t % width, row // t // width
        if desc.swizzle == "none":
            element = i + m * stride + k % 8 * t + k // 8 * leading
        else:
            period = 4 if desc.swizzle == "128_atom32" else 8
            element = i + j * t + m * leading + k % period * width * t + k // period * stride
    address = desc.start + element * bits // 8
    b, base, s = {"none": (0, 4, 3), "32": (1, 4, 3), "64": (2, 4, 3), "128": (3, 4, 3), "128_atom32": (2, 5, 2)}[
        desc.swizzle
    ]
    for bit in range(base, base + b):
        address ^= (address >> (bit + s) & 1) << bit
    return address


@pytest.mark.parametrize("mode", ["none", "32", "64", "128", "128_atom32"])
@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_operand_addresses(mode, major, bits):
    if major == "K" and mode == "128_atom32":
        with pytest.raises(ValueError, match="MN-major"):
            mx.operand_chunks(mx.SmemDescriptor(0, 16, 16, mode), 8, 256 // bits, bits, "K")
        return
    rows, k = 64, 256 // bits
    for start in (0, 1024, 5 * 1024 + 32, 3 * 1024 + 96):
        desc = mx.SmemDescriptor(start, 4096 + 256, 2048 + 512, mode)
        got = mx.operand_addresses(desc, rows, k, bits, major)
        assert got.dtype == np.int32 and got.shape == (rows, k)
        want = [[canonical_address(desc, r, j, bits, major) for j in range(k)] for r in range(rows)]
        np.testing.assert_array_equal(got, want)
        chunks = mx.operand_chunks(desc, rows, k, bits, major)
        assert chunks.shape == ((rows, 2) if major == "K" else (rows * bits // 128, k)) and not (chunks & 15).any()
        assert set(chunks.ravel()) == set((got & ~15).ravel())


def swizzled_tile(matrix, base):
    """Row-major uint16 [rows, 64] as TMA stores it with a 128-byte swizzle: chunk c of row r at c ^ (r % 8)."""
    shared = np.zeros(16384, np.uint8)
    for r, row in enumerate(matrix):
        for c in range(8):
            at = base + 128 * r + 16 * (c ^ r % 8)
            shared[at : at + 16] = row[8 * c : 8 * c + 8].view(np.uint8)
    return shared


def test_read_operand_k_advance_and_transposed_view():
    tile = RNG.integers(0, 1 << 16, (64, 64), dtype=np.uint16)
    shared = swizzled_tile(tile, 2048)
    for k in range(4):  # K advances by 32 bytes inside the atom
        desc = mx.SmemDescriptor.decode_wgmma(wgmma_desc(2048 + 32 * k, 16, 1024, 1))
        np.testing.assert_array_equal(mx.read_operand(shared, desc, 64, 16, "bf16", "K"), tile[:, 16 * k : 16 * k + 16])
    for k in range(4):  # the same bytes as an MN-major operand: 64 columns are its rows, 16 tile rows its K
        desc = mx.SmemDescriptor.decode_tcgen05(tcgen05_desc(2048 + 2048 * k, 8192, 1024, 2))
        np.testing.assert_array_equal(mx.read_operand(shared, desc, 64, 16, "f16", "MN"), tile[16 * k : 16 * k + 16].T)


def test_base_offset_shifts_the_pattern():
    """A pattern that starts 256 bytes after a 1024-byte boundary has base offset 2: its first row is not permuted."""
    desc = mx.SmemDescriptor(1024 + 256, 16, 1024, "128", 2)
    chunks = mx.operand_chunks(desc, 8, 16, 16, "K")
    want = [[1280 + 128 * r + 16 * (c ^ r) for c in range(2)] for r in range(8)]
    np.testing.assert_array_equal(chunks, want)


def test_read_operand_narrow_types():
    shared = RNG.integers(0, 256, 4096, dtype=np.uint8)
    desc = mx.SmemDescriptor(1024, 16, 256, "32")
    address = mx.operand_chunks(desc, 8, 32, 8, "K")
    for bits, name in ((4, "e2m1"), (6, "e3m2"), (8, "e4m3")):
        got = mx.read_operand(shared, desc, 8, 32, name, "K")
        for r, j in itertools.product(range(8), range(32)):
            chunk = int.from_bytes(shared[address[r, j // 16] :][:16].tobytes(), "little")
            assert got[r, j] == chunk >> bits * (j % 16) & (1 << bits) - 1
    packed = mx.read_operand(shared, desc, 8, 64, "e2m1", "K", packed=True)
    for r, j in itertools.product(range(8), range(64)):
        assert packed[r, j] == shared[address[r, j // 32] + j % 32 // 2] >> 4 * (j % 2) & 15
    words = mx.read_operand(shared, mx.SmemDescriptor(0, 1024, 512, "128_atom32"), 32, 8, "tf32", "MN")
    assert words[5, 6] == shared[canonical_address(mx.SmemDescriptor(0, 1024, 512, "128_atom32"), 5, 6, 32, "MN") :][
        :4
    ].view(np.uint32)


def test_operand_errors():
    desc = mx.SmemDescriptor(0, 16, 1024, "128")
    with pytest.raises(ValueError, match="24 rows of 8-bit"):
        mx.operand_chunks(desc, 24, 32, 8, "MN")
    with pytest.raises(ValueError, match="whole number"):
        mx.operand_chunks(desc, 8, 4, 16, "K")
    with pytest.raises(ValueError, match="'N'-major"):
        mx.operand_chunks(desc, 8, 16, 16, "N")
    with pytest.raises(ValueError, match="read-only"):
        mx.value_table("e4m3")[0] = 1


# Element types and arithmetic ---------------------------------------------------------------------------------------

ML = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn, "e2m1": ml_dtypes.float4_e2m1fn, "ue8m0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


@pytest.mark.parametrize("name", ML)
def test_value_tables(name):
    codes = np.arange(1 << mx.TYPE_BITS[name], dtype=np.uint8)
    np.testing.assert_array_equal(mx.to_float(codes, name), codes.view(ML[name]).astype(np.float64))


def test_wide_types_and_integers():
    codes = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(mx.to_float(codes, "f16"), codes.view(np.float16).astype(float))
    np.testing.assert_array_equal(mx.to_float(codes, "bf16"), (codes.astype(np.uint32) << 16).view(np.float32))
    assert mx.to_float(np.uint32([0x3F801FFF, 0x3F802000]), "tf32").tolist() == [1.0, 1.0 + 2**-10]
    assert mx.to_float(np.uint8([0, 127, 128, 255]), "s8").tolist() == [0, 127, -128, -1]
    assert mx.to_float(np.uint8([128, 255]), "u8").tolist() == [128, 255]
    assert mx.to_float(np.uint8([0x38, 0xB8]), "ue4m3").tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="'e9m9'"):
        mx.to_float(np.uint8([0]), "e9m9")


@pytest.mark.parametrize(
    "a_type,b_type", [("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), ("e4m3", "e5m2"), ("e2m1", "e3m2")]
)
def test_mma_float(a_type, b_type):
    m, n, k = 64, 24, 256 // max(8, mx.TYPE_BITS[a_type])

    def random(rows, name):
        bits = mx.TYPE_BITS[name]
        if name in ML:
            codes = RNG.integers(0, 1 << bits, (rows, k), dtype=np.uint8)
            return np.where(np.isfinite(mx.to_float(codes, name)), codes, 0).astype(np.uint8)
        values = RNG.standard_normal((rows, k)).astype(np.float32)
        return (
            values.view(np.uint32)
            if bits == 32
            else bf16(values)
            if name == "bf16"
            else values.astype(np.float16).view(np.uint16)
        )

    a, b = random(m, a_type), random(n, b_type)
    c = RNG.standard_normal((m, n)).astype(np.float32)
    x, y = mx.to_float(a, a_type), mx.to_float(b, b_type)
    for negate_a, negate_b in itertools.product((False, True), repeat=2):
        sign = -1 if negate_a != negate_b else 1
        got = mx.mma(a, a_type, b, b_type, c.view(np.uint32), negate_a=negate_a, negate_b=negate_b)
        want = c.astype(float).copy()
        for i in range(k):
            want += sign * x[:, i : i + 1] * y[:, i]
        assert got.dtype == np.uint32 and got.shape == (m, n)
        np.testing.assert_allclose(got.view(np.float32), want, rtol=2**-23, atol=1e-12)


def test_mma_golden():
    """By hand: [[1, 2], [-3, 0.5]] · [[1, 1], [4, -2], [0, 8]]ᵀ + 10."""
    a, b = bf16(np.array([[1, 2], [-3, 0.5]])), bf16(np.array([[1, 1], [4, -2], [0, 8]]))
    ten = np.full((2, 3), 10, np.float32)
    want = np.array([[3, 0, 16], [-2.5, -13, 4]])
    assert (mx.mma(a, "bf16", b, "bf16").view(np.float32) == want).all()
    assert (mx.mma(a, "bf16", b, "bf16", ten.view(np.uint32)).view(np.float32) == want + 10).all()
    assert (mx.mma(a, "bf16", b, "bf16", ten.view(np.uint32), scale_c_exponent=1).view(np.float32) == want + 5).all()
    assert (mx.mma(a, "bf16", b, "bf16", ten.view(np.uint32), negate_a=True).view(np.float32) == 10 - want).all()
    zero = mx.mma(a, "bf16", b, "bf16", zero_columns=np.array([False, True, False])).view(np.float32)
    assert zero.tolist() == [[3, 0, 16], [-2.5, 0, 4]]
    half = mx.mma(a, "bf16", b, "bf16", ten.astype(np.float16).view(np.uint16), d_type="f16")
    assert half.dtype == np.uint16 and (half.view(np.float16) == want + 10).all()


def test_mma_rounding_and_special_values():
    one = bf16(np.ones((1, 2)))
    # 2^24 + (1 + 1) is exact; one at a time in fp32 it would lose both.
    c = np.array([[2.0**24]], np.float32).view(np.uint32)
    assert mx.mma(one, "bf16", one, "bf16", c).view(np.float32) == 2**24 + 2
    infinity = bf16(np.array([[np.inf, 1.0]]))
    zero = bf16(np.array([[0.0, 1.0]]))
    assert mx.mma(infinity, "bf16", one, "bf16").view(np.float32) == np.inf
    assert mx.mma(infinity, "bf16", zero, "bf16")[0, 0] == 0x7FFFFFFF
    assert mx.mma(infinity, "bf16", zero, "bf16", d_type="f16")[0, 0] == 0x7FFF
    with pytest.raises(ValueError, match="K = 2"):
        mx.mma(one, "bf16", bf16(np.ones((1, 3))), "bf16")
    with pytest.raises(ValueError, match="'f64'"):
        mx.mma(one, "bf16", one, "bf16", d_type="f64")


def test_mma_integer():
    a, b = RNG.integers(0, 256, (64, 32), dtype=np.uint8), RNG.integers(0, 256, (16, 32), dtype=np.uint8)
    c = RNG.integers(0, 1 << 32, (64, 16), dtype=np.uint32)
    exact = a.view(np.int8).astype(np.int64) @ b.astype(np.int64).T + c.view(np.int32)
    np.testing.assert_array_equal(mx.mma(a, "s8", b, "u8", c, d_type="s32"), (exact & 0xFFFFFFFF).astype(np.uint32))
    top = np.array([[2**31 - 1]], np.int32).view(np.uint32)
    low = np.array([[-(2**31)]], np.int32).view(np.uint32)
    two, minus = np.uint8([[2]]), np.uint8([[0xFF]])
    assert mx.mma(two, "s8", two, "s8", top, d_type="s32").view(np.int32) == -(2**31) + 3
    assert mx.mma(two, "s8", two, "s8", top, d_type="s32", saturate=True).view(np.int32) == 2**31 - 1
    assert mx.mma(two, "s8", minus, "s8", low, d_type="s32", saturate=True).view(np.int32) == -(2**31)


@pytest.mark.parametrize("kind,factors,scale_type", [("e4m3", 1, "ue8m0"), ("e2m1", 2, "ue8m0"), ("e2m1", 4, "ue4m3")])
def test_mma_block_scaled(kind, factors, scale_type):
    k = 32 if kind == "e4m3" else 64
    a, b = RNG.integers(0, 8, (128, k), dtype=np.uint8), RNG.integers(0, 8, (8, k), dtype=np.uint8)
    low, high = (120, 134) if scale_type == "ue8m0" else (0, 0x7F)
    sa, sb = (
        RNG.integers(low, high, (128, factors), dtype=np.uint8),
        RNG.integers(low, high, (8, factors), dtype=np.uint8),
    )
    got = mx.mma(a, kind, b, kind, scale_a=sa, scale_b=sb, scale_type=scale_type).view(np.float32)

    def scale(code):
        return (
            2.0 ** (int(code) - 127) if scale_type == "ue8m0" else float(np.uint8(code).view(ml_dtypes.float8_e4m3fn))
        )

    for i, j in ((0, 0), (5, 3), (127, 7)):
        want = sum(
            float(a[i, q].view(ML[kind])) * scale(sa[i, q * factors // k])
            * float(b[j, q].view(ML[kind])) * scale(sb[j, q * factors // k]) for q in range(k)
        )  # fmt: skip
        assert got[i, j] == pytest.approx(want, rel=1e-7)


def test_mma_copies_of_a():
    a, b = bf16(RNG.standard_normal((2, 64, 16))), bf16(RNG.standard_normal((128, 16)))
    got = mx.mma(a, "bf16", b, "bf16")
    np.testing.assert_array_equal(got[:, :64], mx.mma(a[0], "bf16", b[:64], "bf16"))
    np.testing.assert_array_equal(got[:, 64:], mx.mma(a[1], "bf16", b[64:], "bf16"))


# Fragments ----------------------------------------------------------------------------------------------------------


def a_coordinate(bits, registers, lane, i):
    """Element a_i of mma.m16n8kK as the ISA's sections spell it out for each type."""
    g, t = lane >> 2, lane % 4
    if bits == 16:
        return g + (0 if i in (0, 1, 4, 5) else 8), t * 2 + (i & 1) + (8 if i >= 4 else 0)
    if bits == 8 and registers == 2:  # m16n8k16
        return g + (0 if i < 4 else 8), t * 4 + (i & 3)
    if bits == 8:
        return g + (0 if i < 4 or 8 <= i < 12 else 8), t * 4 + (i & 3) + (16 if i >= 8 else 0)
    return g + (0 if i in (0, 2) else 8), t + (4 if i >= 2 else 0)  # tf32


@pytest.mark.parametrize("bits,k", [(16, 8), (16, 16), (8, 16), (8, 32), (32, 4), (32, 8)])
def test_mma_fragments(bits, k):
    per = 32 // bits
    a, b = mx.fragment_a(bits, k), mx.fragment_b(bits, k)
    registers = k // (2 * per)
    assert a.row.shape == (registers, per, 32) and b.row.shape == (registers // 2, per, 32)
    for lane, i in itertools.product(range(32), range(registers * per)):
        assert (a.row[i // per, i % per, lane], a.column[i // per, i % per, lane]) == a_coordinate(
            bits, registers, lane, i
        )
    for lane, i in itertools.product(range(32), range(registers * per // 2)):
        want_k = lane % 4 * per + i % per + 4 * per * (i // per)
        assert (b.row[i // per, i % per, lane], b.column[i // per, i % per, lane]) == (lane >> 2, want_k)
    with pytest.raises(ValueError, match="not 12"):
        mx.fragment_a(bits, 12)


def test_c_fragment_and_wgmma_d():
    for n, bits in ((8, 32), (8, 16), (24, 32), (256, 16)):
        f, per = mx.fragment_c(n, bits), 32 // bits
        assert f.row.shape == (n // 2 // per, per, 32)
        for lane, i in itertools.product((0, 5, 17, 31), range(n // 2)):
            row = (lane >> 2) + (8 if i % 4 >= 2 else 0)
            column = i // 4 * 8 + lane % 4 * 2 + i % 2
            assert (f.row[i // per, i % per, lane], f.column[i // per, i % per, lane]) == (row, column)
    for n, dtype, bits in ((8, np.uint32, 32), (256, np.uint32, 32), (24, np.uint16, 16)):
        d = RNG.integers(0, np.iinfo(dtype).max, (64, n), dtype=dtype)
        registers = mx.wgmma_d_to_registers(d)
        assert registers.dtype == np.uint32 and registers.shape == (4, n * bits // 64, 32)
        for warp in range(4):
            want = mx.to_registers(d[16 * warp : 16 * warp + 16], mx.fragment_c(n, bits), bits)
            np.testing.assert_array_equal(registers[warp], want)
        back = mx.wgmma_d_from_registers(registers, n)
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, d)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_wgmma_a_registers(bits):
    k = 256 // bits
    a = RNG.integers(0, 1 << bits, (64, k), dtype=np.uint64).astype(f"u{bits // 8}")
    per = 32 // bits
    registers = np.zeros((4, 4, 32), np.uint32)
    for warp, lane, i in itertools.product(range(4), range(32), range(4 * per)):
        row, column = a_coordinate(bits, 4, lane, i)
        registers[warp, i // per, lane] |= np.uint32(int(a[16 * warp + row, column]) << bits * (i % per))
    np.testing.assert_array_equal(mx.wgmma_a_from_registers(registers, bits), a)


def test_ldmatrix_m8n8():
    rows = RNG.integers(0, 256, (32, 16), dtype=np.uint8)
    matrices = rows.view(np.uint16).reshape(4, 8, 8)
    for num in (1, 2, 4):
        plain = mx.ldmatrix(rows, mx.ldmatrix_map("m8n8", num, False))
        trans = mx.ldmatrix(rows, mx.ldmatrix_map("m8n8", num, True))
        assert plain.shape == trans.shape == (num, 32) and plain.dtype == np.uint32
        for m, lane in itertools.product(range(num), range(32)):
            r, c = lane // 4, lane % 4 * 2
            assert plain[m, lane] == int(matrices[m, r, c]) | int(matrices[m, r, c + 1]) << 16
            assert trans[m, lane] == int(matrices[m, c, r]) | int(matrices[m, c + 1, r]) << 16
        for registers, flag in ((plain, False), (trans, True)):
            stored = mx.stmatrix(registers, mx.stmatrix_map("m8n8", num, flag))
            np.testing.assert_array_equal(stored, rows[: 8 * num])


def test_ldmatrix_b8_and_sub_byte():
    """m16n16.trans.b8: element (row, column) of matrix q is byte `row` at the address of lane 16 q + column."""
    rows = RNG.integers(0, 256, (32, 16), dtype=np.uint8)
    for num in (1, 2):
        got = mx.ldmatrix(rows, mx.ldmatrix_map("m16n16", num, True))
        for q in range(num):  # a 16 × 16 matrix in registers is half of an 8-bit A fragment
            matrix = rows[16 * q : 16 * q + 16].T
            np.testing.assert_array_equal(got[2 * q : 2 * q + 2], mx.to_registers(matrix, mx.fragment_a(8, 16), 8))
    unpacked = mx.decompress(rows, "b6x16_p32", central=False)
    got = mx.ldmatrix(unpacked, mx.ldmatrix_map("m8n16", 4, False))
    for m, lane in ((0, 0), (1, 7), (3, 31)):
        assert got[m, lane] == unpacked[8 * m + lane // 4, lane % 4 * 4 :][:4].view(np.uint32)
    with pytest.raises(ValueError, match=r"m16n16\.x4\.trans does not exist"):
        mx.ldmatrix_map("m16n16", 4, True)
    with pytest.raises(ValueError, match=r"m16n16\.x1 does not exist"):
        mx.ldmatrix_map("m16n16", 1, False)


def test_stmatrix_b8_is_a_c_fragment():
    """m16n8.trans.b8: element (row, column) of matrix m goes to byte `row` at the address of lane 8 m + column."""
    registers = RNG.integers(0, 1 << 32, (4, 32), dtype=np.uint32)
    out = mx.stmatrix(registers, mx.stmatrix_map("m16n8", 4, True))
    for m, lane, j in itertools.product(range(4), range(32), range(4)):
        row, column = lane // 4 + 8 * (j // 2), lane % 4 * 2 + j % 2
        assert out[8 * m + column, row] == registers[m, lane] >> 8 * j & 255
    with pytest.raises(ValueError, match="does not exist"):
        mx.stmatrix_map("m16n8", 1, False)


def test_movmatrix():
    matrix = RNG.integers(0, 1 << 16, (8, 8), dtype=np.uint16)

    def registers(x):
        return np.uint32([int(x[t // 4, t % 4 * 2]) | int(x[t // 4, t % 4 * 2 + 1]) << 16 for t in range(32)])

    np.testing.assert_array_equal(mx.movmatrix(registers(matrix)), registers(matrix.T))


def test_decompress():
    chunk = np.zeros((1, 16), np.uint8)
    chunk[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert mx.decompress(chunk, "b4x16_p64", central=False)[0].tolist() == list(range(16))
    central = mx.decompress(chunk, "b4x16_p64", central=True)
    assert central[0].tolist() == [4 * i for i in range(16)]
    assert mx.from_container(central, "e2m1")[0].tolist() == list(range(16))
    six = int.from_bytes(bytes(range(12)), "little")
    chunk[0, :12] = range(12)
    assert mx.decompress(chunk, "b6x16_p32", central=True)[0].tolist() == [six >> 6 * i & 63 for i in range(16)]
    with pytest.raises(ValueError, match="b5x16"):
        mx.decompress(chunk, "b5x16", central=True)


# wgmma --------------------------------------------------------------------------------------------------------------

WG = "wgmma.mma_async.sync.aligned."


def test_parse_wgmma():
    f = mx.parse_wgmma(WG + "m64n64k16.f32.bf16.bf16", [[0] * 32, "a", "b", "p", 1, -1, 0, 1])
    assert (f.m, f.n, f.k, f.d_type, f.a_type, f.b_type) == (64, 64, 16, "f32", "bf16", "bf16")
    assert (f.a_in_registers, f.a_registers, f.d_registers) == (False, 0, 32)
    assert (f.a_major, f.b_major, f.negate_a, f.negate_b) == ("K", "MN", False, True)
    f = mx.parse_wgmma((WG + "m64n72k16.f16.f16.f16").split("."), [[0] * 18, [0] * 4, "b", "p", -1, 1, 1])
    assert (f.a_in_registers, f.a_registers, f.d_registers, f.b_major, f.negate_a) == (True, 4, 18, "MN", True)
    f = mx.parse_wgmma(WG + "m64n8k32.f16.e4m3.e5m2", [[0] * 2, "a", "b", "p", "1", "1"])
    assert (f.a_type, f.b_type, f.d_registers) == ("e4m3", "e5m2", 2)
    f = mx.parse_wgmma(WG + "m64n32k32.s32.s8.u8.satfinite", [[0] * 16, "a", "b", "p"])
    assert f.saturate and (f.d_type, f.a_type, f.b_type) == ("s32", "s8", "u8")
    assert mx.parse_wgmma(WG + "m64n8k8.f32.tf32.tf32", [[0] * 4, [0] * 4, "b", "p", 1, 1]).k == 8


@pytest.mark.parametrize(
    "text,operands,error",
    [
        ("m64n64k16.f16.bf16.bf16", [[0] * 16, 0, 0, 0, 1, 1, 0, 0], "cannot have D of .f16"),
        ("m64n64k8.f32.bf16.bf16", [[0] * 32, 0, 0, 0, 1, 1, 0, 0], "no shape m64n64k8"),
        ("m64n12k16.f32.bf16.bf16", [[0] * 6, 0, 0, 0, 1, 1, 0, 0], "no shape"),
        ("m64n40k32.s32.s8.s8", [[0] * 20, 0, 0, 0], "no shape"),
        ("m64n64k16.f32.bf16.f16", [[0] * 32, 0, 0, 0, 1, 1, 0, 0], "operand types"),
        ("m64n64k16.f32.bf16.bf16", [[0] * 31, 0, 0, 0, 1, 1, 0, 0], "31 registers, 32 expected"),
        ("m64n64k16.f32.bf16.bf16", [[0] * 32, [0] * 2, 0, 0, 1, 1, 0], "A in 2 registers"),
        ("m64n64k16.f32.bf16.bf16", [[0] * 32, 0, 0, 0, 1, 1], "2 immediates"),
        ("m64n64k16.f32.bf16.bf16", [[0] * 32, 0, 0, 0, 0, 1, 0, 0], "scales are 1 or -1"),
        ("f32.bf16.bf16", [[0] * 32, 0, 0, 0], "no wgmma shape"),
    ],
)
def test_parse_wgmma_errors(text, operands, error):
    with pytest.raises(ValueError, match=error):
        mx.parse_wgmma(WG + text, operands)


def test_parse_wgmma_not_emulated():
    with pytest.raises(NotImplementedError, match="sparse"):
        mx.parse_wgmma("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16", [])
    with pytest.raises(NotImplementedError, match="single-bit"):
        mx.parse_wgmma(WG + "m64n8k256.s32.b1.b1.and.popc", [])


# tcgen05: opcodes and instruction descriptors -----------------------------------------------------------------------


def test_parse_tcgen05():
    f = mx.parse_tcgen05_mma("tcgen05.mma.cta_group::2.kind::f16.collector::a::fill")
    assert f == mx.Tcgen05Mma("f16", 2, False, 0, "a::fill")
    f = mx.parse_tcgen05_mma("tcgen05.mma.ws.cta_group::1.kind::tf32")
    assert f == mx.Tcgen05Mma("tf32", 1, True, 0, "b0::discard")
    cases = {
        "mxf8f6f4.block_scale": 1,
        "mxf4.block_scale": 2,
        "mxf4nvf4.block_scale.block16": 4,
        "mxf4nvf4.block_scale.scale_vec::2X": 2,
    }
    for text, factors in cases.items():
        assert mx.parse_tcgen05_mma(f"tcgen05.mma.cta_group::1.kind::{text}").scale_factors == factors
    for text, error in (
        ("tcgen05.mma.cta_group::1.kind::mxf4", "needs .block_scale"),
        ("tcgen05.mma.cta_group::1.kind::f16.block_scale", "cannot have .block_scale"),
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale", "needs a scale vector"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16", "4 scale factors"),
        ("tcgen05.mma.ws.cta_group::2.kind::f16", "cta_group::1"),
        ("tcgen05.mma.cta_group::1.kind::f64", "known .kind"),
    ):
        with pytest.raises(ValueError, match=error):
            mx.parse_tcgen05_mma(text)
    for name in ("sp", "ashift"):
        with pytest.raises(NotImplementedError, match=name):
            mx.parse_tcgen05_mma(f"tcgen05.mma.{name}.cta_group::1.kind::f16")
    assert mx.parse_tcgen05_ld("tcgen05.ld.sync.aligned.16x256b.x2.pack::16b.b32") == ("16x256b", 2, True, 8)
    assert mx.parse_tcgen05_ld("tcgen05.st.sync.aligned.32x32b.x128.b32") == ("32x32b", 128, False, 128)
    with pytest.raises(ValueError, match="256 registers"):
        mx.parse_tcgen05_ld("tcgen05.ld.sync.aligned.16x256b.x64.b32")
    with pytest.raises(NotImplementedError, match="red"):
        mx.parse_tcgen05_ld("tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32")


def idesc(d, a, b, m, n, a_mn=0, b_mn=0, extra=0):
    return d << 4 | a << 7 | b << 10 | a_mn << 15 | b_mn << 16 | (n >> 3) << 17 | (m >> 4) << 24 | extra


def test_instruction_descriptor():
    got = mx.decode_instruction(0x08400490, "f16")  # golden: M 128, N 256, bf16 · bf16 -> f32, K-major
    assert got == mx.InstructionDescriptor("f16", 128, 256, 16, "bf16", "bf16", "f32")
    got = mx.decode_instruction(idesc(0, 0, 0, 64, 24, 0, 1, 1 << 14 | 2 << 30), "f16")
    assert (got.d_type, got.a_type, got.b_major, got.negate_a, got.negate_b, got.max_shift) == (
        "f16",
        "f16",
        "MN",
        False,
        True,
        16,
    )
    assert mx.decode_instruction(idesc(1, 2, 2, 128, 8), "tf32").k == 8
    got = mx.decode_instruction(idesc(2, 1, 0, 128, 32, extra=8), "i8")
    assert (got.d_type, got.a_type, got.b_type, got.saturate) == ("s32", "s8", "u8", True)
    got = mx.decode_instruction(idesc(1, 5, 4, 128, 32), "f8f6f4")
    assert (got.a_type, got.b_type, got.k) == ("e2m1", "e3m2", 32)
    got = mx.decode_instruction(idesc(3, 0, 3, 256, 64, extra=1 << 23 | 2 << 29), "mxf8f6f4")
    assert (got.m, got.a_type, got.b_type, got.scale_type, got.scale_a_id, got.scale_b_id) == (
        256,
        "e4m3",
        "e2m3",
        "ue8m0",
        2,
        3,
    )
    got = mx.decode_instruction(idesc(0, 1, 1, 128, 64, extra=2 << 29), "mxf4nvf4")
    assert (got.k, got.a_type, got.scale_type, got.scale_a_id, got.d_type) == (64, "e2m1", "ue4m3", 2, "f32")


@pytest.mark.parametrize(
    "kind,value,error",
    [
        ("f16", idesc(1, 1, 1, 128, 64, extra=1 << 6), "bits 6-6"),
        ("f16", idesc(1, 1, 1, 128, 64, extra=1 << 23), "bits 23-23"),
        ("f16", idesc(1, 1, 1, 128, 64, extra=1 << 3), "bits 3-3"),
        ("f16", idesc(1, 2, 1, 128, 64), "A type code 2"),
        ("f16", idesc(2, 1, 1, 128, 64), "D type code 2"),
        ("f8f6f4", idesc(1, 0, 2, 128, 64), "B type code 2"),
        ("i8", idesc(2, 1, 1, 128, 64, extra=1 << 13), "bits 13-14"),
        ("mxf4", idesc(0, 1, 1, 128, 64), "ue8m0"),
        ("mxf4", idesc(1, 1, 1, 128, 64, extra=1 << 23), "must be 0 or 2"),
        ("mxf4", idesc(0, 1, 1, 128, 64, 1, extra=1 << 23), "bits 15-16"),
        ("f64", 0, "kind::f64"),
    ],
)
def test_instruction_descriptor_errors(kind, value, error):
    with pytest.raises(ValueError, match=error):
        mx.decode_instruction(value, kind)


def test_instruction_descriptor_not_emulated():
    with pytest.raises(NotImplementedError, match="sparse"):
        mx.decode_instruction(idesc(1, 1, 1, 128, 64, extra=4), "f16")
    with pytest.raises(NotImplementedError, match="K = 96"):
        mx.decode_instruction(idesc(0, 1, 1, 128, 64, extra=1 << 23 | 1 << 31), "mxf4")


def test_shapes():
    """Every M × N against the ISA's table of shapes, by enumeration."""
    table = {
        ("f16", 1, False): ((64, 128), range(8, 257, 8)),
        ("f16", 2, False): ((128, 256), range(16, 257, 16)),
        ("f8f6f4", 1, True): ((32, 64, 128), (64, 128, 256)),
        ("i8", 1, False): ((64, 128), [8, 16, 24, *range(32, 257, 16)]),
        ("i8", 2, False): ((128, 256), range(32, 257, 32)),
        ("mxf8f6f4", 1, False): ((128,), range(8, 257, 8)),
        ("mxf4", 2, False): ((128, 256), range(16, 257, 16)),
    }
    for (kind, group, ws), (ms, ns) in table.items():
        for m, n in itertools.product((16, 32, 64, 128, 256), range(0, 257, 8)):
            d = mx.InstructionDescriptor(kind, m, n, 16, "e2m1", "e2m1", "f32")
            if m in ms and n in ns:
                mx.check_tcgen05_shape(d, group, ws)
            else:
                with pytest.raises(ValueError, match=f"M {m} × N {n}"):
                    mx.check_tcgen05_shape(d, group, ws)
    with pytest.raises(ValueError, match="no shape"):  # 8-bit transposed B comes in steps of 16
        mx.check_tcgen05_shape(
            mx.InstructionDescriptor("f8f6f4", 64, 24, 32, "e4m3", "e4m3", "f32", b_major="MN"), 1, False
        )
    with pytest.raises(ValueError, match="A of e2m1"):
        mx.check_tcgen05_shape(
            mx.InstructionDescriptor("f8f6f4", 64, 32, 32, "e2m1", "e4m3", "f32", a_major="MN"), 1, False
        )
    with pytest.raises(ValueError, match="does not exist"):
        mx.check_tcgen05_shape(mx.InstructionDescriptor("mxf4", 128, 64, 64, "e2m1", "e2m1", "f32"), 1, True)
    tf32 = mx.InstructionDescriptor("tf32", 128, 64, 8, "tf32", "tf32", "f32", b_major="MN")
    mx.check_tcgen05_swizzle(tf32, mx.SmemDescriptor(0, 0, 0, "128_atom32"), "MN")
    with pytest.raises(ValueError, match="MN-major operand with swizzle '128'"):
        mx.check_tcgen05_swizzle(tf32, mx.SmemDescriptor(0, 0, 0, "128"), "MN")


def test_zero_column_mask():
    """The examples of the ISA, least significant column first."""

    def value(counts, spans, nonzero, skip, use, shift):
        return (
            sum(c << 8 * i for i, c in enumerate(counts)) | sum(s << 32 + i for i, s in enumerate(spans))
            | nonzero << 39 | skip << 40 | use << 48 | shift << 56
        )  # fmt: skip

    def text(mask):
        return "".join("01"[int(v)] for v in mask)

    mask, shift = mx.zero_column_mask(value([0] * 4, [0] * 4, 0, 4, 3, 0), 128, 64)
    assert not mask.any() and shift == 0
    mask, _ = mx.zero_column_mask(value([0], [0], 1, 2, 3, 0), 128, 64)
    assert text(mask).startswith("00001110000111") and mask.size == 64
    mask, _ = mx.zero_column_mask(value([0, 0], [1, 0], 1, 2, 3, 0), 64, 64)
    assert text(mask[:32]).startswith("11100001110000111") and text(mask[32:]).startswith("00001110000111")
    mask, shift = mx.zero_column_mask(value([0, 1, 2, 1], [1, 1, 0, 0], 1, 2, 3, 2), 32, 128)
    starts = ("11100001110000", "1100001110000", "001110000111", "0001110000111")
    assert shift == 2 and all(text(mask[32 * i : 32 * i + 32]).startswith(s) for i, s in enumerate(starts))


# tcgen05: tensor memory ---------------------------------------------------------------------------------------------


def d_place(m, n, group, ws, row, column):
    """(lane, column) of D's element in its CTA by the ISA's layouts A to G."""
    if (m, group) in ((256, 2), (128, 1)):  # A, D
        return row, column
    if (m, group) == (128, 2) or (m, ws) == (64, True):  # B, E: 2 × 2
        return (row, column) if column < n // 2 else (row + 64, column - n // 2)
    if m == 64:  # F: half of the lanes
        return 32 * (row // 16) + row % 16, column
    return 32 * (column // (n // 4)) + row, column % (n // 4)  # G: 1 × 4


@pytest.mark.parametrize(
    "m,n,group,ws", [(128, 256, 1, False), (64, 24, 1, False), (256, 32, 2, False), (128, 64, 2, False), (64, 128, 1, True),
                     (32, 64, 1, True), (128, 64, 1, True)],
)  # fmt: skip
def test_d_layouts(m, n, group, ws):
    d = mx.tcgen05_d_map(m, n, group, ws)
    rows = m // group
    assert d.lane.shape == d.column.shape == (rows, n)
    for r, c in itertools.product(range(rows), range(n)):
        assert (d.lane[r, c], d.column[r, c]) == d_place(m, n, group, ws, r, c)
    flat = d.flat(mx.tmem_address(0, 100))
    assert len(np.unique(flat)) == rows * n and flat[3, 5] == d.lane[3, 5] * 512 + d.column[3, 5] + 100
    a = mx.tcgen05_a_map(m, 8, group, ws)  # row r of copy i sits in the lanes of D's i-th column group
    copies = a.lane.shape[0]
    assert a.lane.shape == (copies, rows, 8)
    for i, r in itertools.product(range(copies), range(rows)):
        assert (a.lane[i, r] == d.lane[r, i * n // copies]).all() and a.column[i, r].tolist() == list(range(8))


def test_tmem_bounds_and_lanes():
    d = mx.tcgen05_d_map(64, 128, 1, False)
    d.flat(mx.tmem_address(16, 384))
    with pytest.raises(ValueError, match="column 385 reaches lane 111, column 512"):
        d.flat(mx.tmem_address(0, 385))
    with pytest.raises(ValueError, match="lane 33, column 0 reaches lane 144"):
        d.flat(mx.tmem_address(17 + 16, 0))
    mx.check_tmem_lane(mx.tmem_address(16, 8), 64, 1, False)
    for args in ((8, 64, 1, False), (16, 64, 1, True), (16, 128, 1, False)):
        with pytest.raises(ValueError, match=f"lane {args[0]}"):
            mx.check_tmem_lane(mx.tmem_address(args[0], 0), *args[1:])
    with pytest.raises(ValueError, match="no layout for M = 256"):
        mx.tcgen05_d_map(256, 64, 1, False)
    mx.check_ld_lanes(mx.tmem_address(96, 0), "32x32b", 7)
    mx.check_ld_lanes(mx.tmem_address(48, 0), "16x64b", 1)
    for lane, shape, warp in ((32, "32x32b", 0), (16, "32x32b", 0), (8, "16x256b", 0), (0, "16x64b", 1)):
        with pytest.raises(ValueError, match=f"warp {warp} at lane {lane}"):
            mx.check_ld_lanes(mx.tmem_address(lane, 0), shape, warp)


def ld_place(shape, lane, register):
    """(row, 32-bit column) of a register by the ISA's figures for one warp."""
    if shape == "32x32b":
        return lane, register
    if shape == "16x64b":  # even lanes rows 0-7, odd ones rows 8-15; lane bit 1 the column of a pair
        return lane // 4 + 8 * (lane % 2), 2 * register + (lane >> 1 & 1)
    if shape == "16x128b":
        return lane // 4 + 8 * (register % 2), 4 * (register // 2) + lane % 4
    return lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2


@pytest.mark.parametrize(
    "shape,num", [("32x32b", 1), ("32x32b", 16), ("16x64b", 4), ("16x128b", 2), ("16x256b", 1), ("16x256b", 4)]
)
def test_ld_map(shape, num):
    got = mx.tcgen05_ld_map(shape, num)
    registers = num * {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    assert got.lane.shape == (registers, 32)
    packed = mx.tcgen05_ld_map(shape, num, pack=True)
    assert packed.lane.shape == (registers, 2, 32)
    for lane, i in itertools.product(range(32), range(registers)):
        row, column = ld_place(shape, lane, i)
        assert (got.lane[i, lane], got.column[i, lane]) == (row, column)
        for half in range(2):
            assert (packed.lane[i, half, lane], packed.column[i, half, lane]) == (row, 2 * column + half)
    assert len(np.unique(got.flat(0))) == got.lane.size  # every word once


def test_ld_errors_and_split():
    split = mx.tcgen05_ld_map("16x32bx2", 4, half_split=16)
    for lane, i in itertools.product(range(32), range(4)):
        assert (split.lane[i, lane], split.column[i, lane]) == (lane % 16, i + 16 * (lane // 16))
    with pytest.raises(ValueError, match="no shape"):
        mx.tcgen05_ld_map("32x64b", 1)
    with pytest.raises(ValueError, match="256 registers"):
        mx.tcgen05_ld_map("16x128b", 128)


def test_store_in_one_shape_load_in_another():
    tmem = np.zeros(128 * 512, np.uint32)
    written = RNG.integers(0, 1 << 32, (2, 16, 32), dtype=np.uint32)  # two 16x256b.x4 cover 32 lanes × 32 columns
    for half in range(2):
        address = mx.tmem_address(64 + 16 * half, 40)
        tmem[mx.tcgen05_ld_map("16x256b", 4).flat(address)] = written[half]
    read = tmem[mx.tcgen05_ld_map("32x32b", 32).flat(mx.tmem_address(64, 40))]
    for half, lane, i in itertools.product(range(2), range(32), range(16)):
        row, column = ld_place("16x256b", lane, i)
        assert read[column, 16 * half + row] == written[half, i, lane]
    np.testing.assert_array_equal(tmem.reshape(128, 512)[64:96, 40:72].T, read)
    # bf16 pairs: .unpack::16b spreads them over two columns, .pack::16b brings them back.
    store = mx.tcgen05_ld_map("32x32b", 8, pack=True).flat(0)
    values = RNG.integers(0, 1 << 32, (8, 32), dtype=np.uint32)
    tmem[store] = mx.unpack_words(values)
    assert (tmem.reshape(128, 512)[:32, :16] >> 16 == 0).all()
    assert tmem.reshape(128, 512)[3, 5] == values[2, 3] >> 16
    np.testing.assert_array_equal(mx.pack_words(tmem[store]), values)


def test_wgmma_like_epilogue_of_layout_d():
    """Warp w of a warpgroup reads its 32 rows of a 128 × 16 accumulator with 32x32b: row = 32 w + lane."""
    tmem = np.zeros(128 * 512, np.uint32)
    d = RNG.integers(0, 1 << 32, (128, 16), dtype=np.uint32)
    tmem[mx.tcgen05_d_map(128, 16, 1, False).flat(16)] = d
    for warp in range(4):
        got = tmem[mx.tcgen05_ld_map("32x32b", 16).flat(mx.tmem_address(32 * warp, 16))]
        np.testing.assert_array_equal(got.T, d[32 * warp : 32 * warp + 32])


def test_cp_and_decompressed_operand():
    source = np.arange(128)
    cases = {
        "128x256b": (8, {r: [r] for r in source}),
        "128x128b": (4, {r: [r] for r in source}),
        "4x256b": (8, {r: [32 * r] for r in range(4)}),
        "64x128b.warpx2::02_13": (4, {r: [r, r + 64] for r in range(64)}),
        "64x128b.warpx2::01_23": (4, {r: [r, r + 32] if r < 32 else [r + 32, r + 64] for r in range(64)}),
        "32x128b.warpx4": (4, {r: [r, r + 32, r + 64, r + 96] for r in range(32)}),
    }
    for text, (words, lanes) in cases.items():
        cp = mx.parse_tcgen05_cp(f"tcgen05.cp.cta_group::1.{text}")
        assert (cp.rows, cp.row_bytes, cp.source_format, cp.cta_group) == (len(lanes), 4 * words, "", 1)
        assert cp.words.lane.shape == (len(lanes[0]), len(lanes), words)
        for r, where in lanes.items():
            assert [int(v) for v in cp.words.lane[:, r, 0]] == where and cp.words.column[0, r].tolist() == list(
                range(words)
            )
    cp = mx.parse_tcgen05_cp("tcgen05.cp.cta_group::2.128x128b.b8x16.b4x16_p64")
    assert cp.source_format == "b4x16_p64" and cp.cta_group == 2
    for text in ("64x128b", "128x256b.warpx4", "128x128b.b8x16", "32x64b"):
        with pytest.raises(ValueError, match=text.split(".")[0]):
            mx.parse_tcgen05_cp(f"tcgen05.cp.cta_group::1.{text}")


def test_tmem_a_elements():
    words = np.uint32([[0x03020100, 0x07060504]])
    assert mx.tmem_a_elements(words, "bf16").tolist() == [[0x100, 0x302, 0x504, 0x706]]
    assert mx.tmem_a_elements(words, "e4m3").tolist() == [list(range(8))]
    assert mx.tmem_a_elements(words, "tf32").tolist() == words.tolist()
    assert mx.tmem_a_elements(np.uint32([[0x3C380804]]), "e2m1").tolist() == [[1, 2, 14, 15]]
    assert mx.tmem_a_elements(np.uint32([[0xFF80403F]]), "e2m3").tolist() == [[63, 0, 0, 63]]
    assert mx.tmem_a_elements(np.uint32([[0x76543210]]), "e2m1", packed=True).tolist() == [list(range(8))]
    assert mx.operand_rows(256, 128, 2) == (128, 64) and mx.operand_rows(64, 24, 1) == (64, 24)


def test_scale_factors():
    whole = mx.scale_factor_map(128)
    assert whole.lane.shape == (4, 128)
    for copy, r in itertools.product(range(4), range(128)):
        assert (whole.lane[copy, r], whole.column[copy, r]) == (32 * copy + r % 32, r // 32)
    split = mx.scale_factor_map(128, split=True)
    for copy, r in itertools.product(range(2), range(128)):
        assert (split.lane[copy, r], split.column[copy, r]) == (64 * (r // 64) + 32 * copy + r % 32, r % 64 // 32)
    word = np.uint32([0x44332211])
    assert mx.scale_factors(word, 1, 2).tolist() == [[0x33]] and mx.scale_factors(word, 2, 2).tolist() == [[0x33, 0x44]]
    assert mx.scale_factors(word, 4, 0).tolist() == [[0x11, 0x22, 0x33, 0x44]]
    with pytest.raises(ValueError, match="id 1 with 2"):
        mx.scale_factors(word, 2, 1)


def test_shift_down():
    tmem = np.arange(128 * 512, dtype=np.uint32)
    to, source = mx.tcgen05_shift_map()
    address = mx.tmem_address(32, 16)
    moved = tmem.copy()
    moved[to.flat(address)] = tmem[source.flat(address)]
    grid, before = moved.reshape(128, 512), tmem.reshape(128, 512)
    np.testing.assert_array_equal(grid[32:63, 16:24], before[33:64, 16:24])
    grid[32:63, 16:24] = before[32:63, 16:24]
    np.testing.assert_array_equal(moved, tmem)  # nothing else moved


# CuTe's own layouts -------------------------------------------------------------------------------------------------


def evaluate(layout, *coordinates):
    """Offset of linear coordinates, one per top-level mode, in a layout printed by CuTe as "shape:stride"."""
    shape, stride = (eval(part) for part in str(layout).split(" o ")[-1].split(":"))

    def walk(shape, stride, i):
        if not isinstance(shape, tuple):
            return i % shape * stride, i // shape
        total = 0
        for s, d in zip(shape, stride):
            size = int(np.prod(np.array(flatten(s))))
            total, i = total + walk(s, d, i % size)[0], i // size
        return total, i

    def flatten(s):
        return [v for x in s for v in flatten(x)] if isinstance(s, tuple) else [s]

    return sum(walk(s, d, i)[0] for s, d, i in zip(shape, stride, coordinates))


@pytest.fixture(scope="module")
def cute_layouts(tmp_path_factory):
    """Layout text by name, printed by CuTe while it traces: needs no GPU."""
    cute = pytest.importorskip("cutlass.cute")
    import cutlass
    from cutlass import BFloat16, Float8E4M3FN, Float8E8M0FNU, Float16, Float32, Int8, TFloat32
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warp, warpgroup
    from cutlass.memory import SmemAllocator
    from cutlass.utils import blackwell_helpers, blockscaled_layout

    found = {}
    k_major = OperandMajorMode.K

    def umma(name, dtype, op, n, k):
        """Shared-memory layouts of A (128 × k) and B (n × k), and the descriptors that the compiler emits for them."""

        @cute.kernel
        def kernel(mma: cute.TiledMma, la: cute.ComposedLayout, lb: cute.ComposedLayout):
            allocator = SmemAllocator()
            a, b = (allocator.allocate_tensor(dtype, x.outer, byte_alignment=1024, swizzle=x.inner) for x in (la, lb))
            a, b = mma.make_fragment_A(a), mma.make_fragment_B(b)
            layout = mma.make_fragment_C(mma.partition_shape_C((128, n))).layout
            d = cute.make_tensor(cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16), layout)
            for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
                cute.gemm(mma, d, a[None, None, i, 0], b[None, None, i, 0], d)

        @cute.jit
        def host():
            mma = cute.make_tiled_mma(op)
            la = blackwell_helpers.make_smem_layout_a(mma, (128, n, k), dtype, 1)
            lb = blackwell_helpers.make_smem_layout_b(mma, (128, n, k), dtype, 1)
            found["umma", name, n] = [dtype.width, 128, str(la)], [dtype.width, n, str(lb)]
            kernel(mma, la, lb).launch(grid=(1, 1, 1), block=(32, 1, 1))

        options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {tmp_path_factory.mktemp('umma')}"
        ptx = cute.compile(host, options=options).artifacts.PTX
        ptx = ptx if isinstance(ptx, str) else ptx.decode()
        values = dict(re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), %rd\d+, (-?\d+);", ptx))
        for operands in re.findall(r"tcgen05\.mma\S*\s+\[%r\d+\], (%rd\d+), (%rd\d+),", ptx):
            for which, register in zip(found["umma", name, n], operands):
                which.append(int(values[register]) % 2**64)  # the start is relative to the tensor's

    @cute.jit
    def hopper():
        source = warpgroup.OperandSource.RMEM
        for name, op in (
            ("wgmma bf16", warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, 32, 16), source, k_major, k_major)),
            (
                "wgmma fp8",
                warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, 32, 32), source, k_major, k_major),
            ),
            ("mma 16", warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))),
            ("mma 8", warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 8))),
        ):
            mma = cute.make_tiled_mma(op)
            found[name] = [str(x) for x in (mma.tv_layout_A_tiled, mma.tv_layout_B_tiled, mma.tv_layout_C_tiled)]

    @cute.jit
    def blackwell():
        for kind in tcgen05.SmemLayoutAtomKind:
            for bits, dtype in ((8, Int8), (16, BFloat16), (32, Float32)):
                atom = tcgen05.make_smem_layout_atom(kind, dtype)
                found["atom", kind.name, bits] = (str(atom.inner), str(atom.outer))
        for shape, op in (
            ("32x32b", tcgen05.Ld32x32bOp), ("16x64b", tcgen05.Ld16x64bOp),
            ("16x128b", tcgen05.Ld16x128bOp), ("16x256b", tcgen05.Ld16x256bOp),
        ):  # fmt: skip
            atom = cute.make_copy_atom(op(tcgen05.Repetition(2)), Float32)
            found["ld", shape] = str(atom.layout_dst_tv)
        for name, op in (("ld b8", warp.LdMatrix16x16x8bOp(True, 2)), ("st b8", warp.StMatrix16x8x8bOp(True, 4))):
            atom = cute.make_copy_atom(op, Int8)
            found[name] = (str(atom.layout_src_tv), str(atom.layout_dst_tv))
        for m, group, source in ((64, "ONE", "TMEM"), (128, "ONE", "SMEM"), (128, "TWO", "SMEM"), (256, "TWO", "SMEM")):
            for dtype in (Float32, Float16):
                op = tcgen05.MmaF16BF16Op(
                    Float16,
                    dtype,
                    (m, 64, 16),
                    tcgen05.CtaGroup[group],
                    tcgen05.OperandSource[source],
                    k_major,
                    k_major,
                )
                mma = cute.make_tiled_mma(op)
                fragment = mma.make_fragment_C(mma.partition_shape_C((m, 64)))
                found["tmem", m, group, dtype.width] = str(fragment.layout)

        for m, group in ((64, "ONE"), (128, "TWO")):
            op = tcgen05.MmaF16BF16Op(
                Float16, Float32, (m, 64, 16), tcgen05.CtaGroup[group], tcgen05.OperandSource.TMEM, k_major, k_major
            )
            mma = cute.make_tiled_mma(op)
            found["tmem A", m] = str(mma.make_fragment_A(mma.partition_shape_A((m, 16))).layout)
        for m, group in ((128, "ONE"), (256, "TWO"), (128, "TWO")):
            tile = (m, 128, 128)
            mma = blackwell_helpers.make_blockscaled_trivial_tiled_mma(
                Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float8E8M0FNU, 32, tcgen05.CtaGroup[group], (m, 128)
            )
            for which, smem, tmem in (
                ("a", blockscaled_layout.make_smem_layout_sfa, blockscaled_layout.make_tmem_layout_sfa),
                ("b", blockscaled_layout.make_smem_layout_sfb, blockscaled_layout.make_tmem_layout_sfb),
            ):
                source = cute.slice_(smem(mma, tile, 32, 1), (None, None, None, 0))
                found["scales", which, m, group] = str(tmem(mma, tile, 32, source))

    source, one = tcgen05.OperandSource.SMEM, tcgen05.CtaGroup.ONE
    for major in (OperandMajorMode.K, OperandMajorMode.MN):
        for n in (64, 32, 16):
            op = tcgen05.MmaF16BF16Op(BFloat16, Float32, (128, n, 16), one, source, major, major)
            umma(major.name + " bf16", BFloat16, op, n, n)
        op = tcgen05.MmaF8F6F4Op(Float8E4M3FN, Float8E4M3FN, Float32, (128, 64, 32), one, source, major, major)
        umma(major.name + " fp8", Float8E4M3FN, op, 64, 64)
        umma(major.name + " tf32", TFloat32, tcgen05.MmaTF32Op((128, 64, 8), one, source, major, major), 64, 16)
    cute.compile(hopper, options="--gpu-arch sm_90a")
    cute.compile(blackwell, options="--gpu-arch sm_100a")
    return found


@pytest.mark.compile
def test_fragments_are_cutes(cute_layouts):
    """tv layouts map (thread, value) to row + rows * column."""
    for name, rows, n, bits, k in (
        ("wgmma bf16", 64, 32, 16, 16),
        ("wgmma fp8", 64, 32, 8, 32),
        ("mma 16", 16, 8, 16, 16),
        ("mma 8", 16, 8, 16, 8),
    ):
        layouts = cute_layouts[name]
        fragments = [(mx.fragment_a(bits, k), rows), (mx.fragment_b(bits, k), 8), (mx.fragment_c(n), rows)]
        for which, (f, height) in enumerate(fragments):
            if which == 1 and rows == 64:
                continue  # B of wgmma is never in registers
            registers, per, _ = f.row.shape
            for t, v in itertools.product(range(2 * rows if which != 1 else 32), range(registers * per)):
                at = v // per, v % per, t % 32
                assert evaluate(layouts[which], t, v) == f.row[at] + 16 * (t // 32) + height * f.column[at]


@pytest.mark.compile
def test_shared_memory_atoms_are_cutes(cute_layouts):
    names = {"INTER": "none", "SW32": "32", "SW64": "64", "SW128": "128", "SW128_32B": "128_atom32"}
    seen = 0
    for key, (inner, outer) in ((k, v) for k, v in cute_layouts.items() if k[0] == "atom"):
        _, kind, bits = key
        major, _, mode = kind.partition("_")
        (rows, k), _ = (eval(x) for x in outer.split(":"))
        b, base, s = eval(inner[inner.index("<") + 1 : inner.index(">")])
        stride = 512 if mode == "SW128_32B" else 1 << 15  # this atom of CuTe's holds two of 4 k
        desc = mx.SmemDescriptor(8192, 1 << 14, stride, names[mode])
        got = mx.operand_addresses(desc, rows, k, bits, major)
        for r, j in itertools.product(range(rows), range(k)):
            offset = evaluate(outer, r, j) * bits // 8
            offset ^= (offset >> base + s & (1 << b) - 1) << base
            assert got[r, j] == 8192 + offset
        seen += 1
    assert seen >= 24


@pytest.mark.compile
def test_tensor_memory_layouts_are_cutes(cute_layouts):
    for m, group, ctas in ((64, "ONE", 1), (128, "ONE", 1), (128, "TWO", 2), (256, "TWO", 2)):
        got = mx.tcgen05_d_map(m, 64, ctas, False)
        for bits in (32, 16):  # addresses in elements: a lane is 2^16 32-bit columns
            layout = cute_layouts["tmem", m, group, bits]
            for r, c in itertools.product(range(0, m // ctas, 3), range(64)):
                address = got.lane[r, c] << 16 | got.column[r, c]
                assert evaluate(layout, r + m // ctas * c) == int(address) * 32 // bits
    for shape in (
        "32x32b",
        "16x64b",
        "16x128b",
        "16x256b",
    ):  # (thread, value) to value id: row * words in a row + column
        got = mx.tcgen05_ld_map(shape, 2)
        width = int(got.column.max()) + 1
        for lane, i in itertools.product(range(32), range(got.lane.shape[0])):
            assert evaluate(cute_layouts["ld", shape], lane, i) == got.lane[i, lane] * width + got.column[i, lane]


@pytest.mark.compile
def test_emitted_descriptors_read_cutes_layouts(cute_layouts):
    """The descriptor of each K step of a tile must lead to the bytes that the tile's layout names."""
    swizzles = set()
    for name, pair in ((k[1], v) for k, v in cute_layouts.items() if k[0] == "umma"):
        for bits, rows, layout, *descriptors in pair:
            inner, _, outer = layout.split(" o ")
            b, base, s = eval(inner[inner.index("<") + 1 : inner.index(">")])
            k = 256 // bits
            assert descriptors
            for step, value in enumerate(descriptors):
                desc = mx.SmemDescriptor.decode_tcgen05(value)
                got = mx.operand_addresses(desc, rows, k, bits, name.split()[0])
                for r, j in itertools.product(range(0, rows, 5), range(k)):
                    offset = evaluate(outer, r + rows * j, 0, step, 0) * bits // 8
                    assert got[r, j] == offset ^ (offset >> s & ((1 << b) - 1 << base))
                swizzles.add((name.split()[0], desc.swizzle))
    assert {
        ("K", "32"),
        ("K", "64"),
        ("K", "128"),
        ("MN", "32"),
        ("MN", "64"),
        ("MN", "128"),
        ("MN", "128_atom32"),
    } <= swizzles


@pytest.mark.compile
def test_tensor_memory_operands_are_cutes(cute_layouts):
    for m, ctas in ((64, 1), (128, 2)):
        got = mx.tcgen05_a_map(m, 8, ctas, False)
        lane, column = got.lane.reshape(-1, 8), got.column.reshape(-1, 8)  # CuTe lists the copies of a pair as rows
        for r, j in itertools.product(range(lane.shape[0]), range(16)):
            address = int(lane[r, j // 2]) << 16 | int(column[r, j // 2])
            assert evaluate(cute_layouts["tmem A", m], r + lane.shape[0] * j) == 2 * address + j % 2
    for which, m, group in (
        ("a", 128, "ONE"),
        ("b", 128, "ONE"),
        ("a", 256, "TWO"),
        ("b", 256, "TWO"),
        ("b", 128, "TWO"),
    ):
        got = mx.scale_factor_map(128, split=(which, m, group) == ("b", 128, "TWO"))
        layout = cute_layouts["scales", which, m, group]
        for copy, r, step in itertools.product(range(got.lane.shape[0]), range(128), range(4)):
            address = int(got.lane[copy, r]) << 16 | int(got.column[copy, r])
            assert evaluate(layout, r + 128 * copy, 0, step) == 4 * address + step


@pytest.mark.compile
def test_byte_matrix_moves_are_cutes(cute_layouts):
    """Both maps go to byte ids of the rows: 16 * (lane that supplies the address) + byte."""
    for name, move, registers in (
        ("ld b8", mx.ldmatrix_map("m16n16", 2, True), cute_layouts["ld b8"][1]),
        ("st b8", mx.stmatrix_map("m16n8", 4, True), cute_layouts["st b8"][0]),
    ):
        addresses = cute_layouts[name][0 if name == "ld b8" else 1]
        assert all(evaluate(addresses, lane, 0) == 16 * lane for lane in range(32))
        for lane, v in itertools.product(range(32), range(move.source.shape[0] * 4)):
            at = v // 4, v % 4, lane
            assert evaluate(registers, lane, v) == 16 * move.source[at] + move.byte[at]
