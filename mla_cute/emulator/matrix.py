"""Matrix instructions as pure functions on numpy arrays: descriptors, layouts, fragments and arithmetic.

Nothing here knows warps, schedules or memory state. Instruction handlers call it to learn *which* bytes, registers or
tensor-memory words an instruction touches (index maps) and *what* it computes (`mma`). Facts follow the PTX ISA
(wgmma, mma and tcgen05 chapters); where its text leaves a choice, a comment with the word "assumed" says what was
taken.

Conventions
 * Matrices are raw bits: A is [M, K] and B is [N, K] (both "K last"), C and D are [M, N]. uint8 for types of up to 8
   bits, one element per item and right-aligned, uint16 for 16 bits, uint32 for 32.
 * Index maps put the 32 lanes last, registers before, packed elements of a register (low bits first) in between.
 * Shared-memory addresses are byte offsets in the CTA's shared memory; a 16-byte unit of it is a "chunk".
 * Tensor memory is uint32 [128 lanes, 512 columns], flat index lane * 512 + column; its addresses are lane << 16 |
   column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

CHUNK = 16  # bytes: the unit of shared-memory matrix layouts
TMEM_LANES, TMEM_COLUMNS = 128, 512


def _frozen(array: np.ndarray) -> np.ndarray:
    """Cached arrays are shared, so nobody may write them."""
    array.flags.writeable = False
    return array


def _parts(opcode: str | Sequence[str]) -> list[str]:
    """Opcode text or its parts -> parts without dots."""
    parts = opcode.split(".") if isinstance(opcode, str) else opcode
    return [p.lstrip(".") for p in parts if p.lstrip(".")]


# ----------------------------------------------------------------------------------------------------------------
# Element types and arithmetic
# ----------------------------------------------------------------------------------------------------------------

TYPE_BITS = {
    "bf16": 16, "f16": 16, "tf32": 32, "f32": 32, "s32": 32, "s8": 8, "u8": 8,
    "e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4, "ue8m0": 8, "ue4m3": 8,
}  # fmt: skip

# Exponent and mantissa bits.
_SMALL_FLOATS = {"e5m2": (5, 2), "e4m3": (4, 3), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}


@cache
def value_table(type_name: str) -> np.ndarray:
    """Values of all 256 codes of a type of up to 8 bits, float64 [256]; bits above the type's width are ignored."""
    code = np.arange(256)
    if type_name == "u8":
        return _frozen(code.astype(np.float64))
    if type_name == "s8":
        return _frozen(code.astype(np.uint8).view(np.int8).astype(np.float64))
    if type_name == "ue8m0":
        table = np.ldexp(1.0, code - 127)
        table[255] = np.nan
        return _frozen(table)
    if type_name == "ue4m3":
        return _frozen(value_table("e4m3")[code & 0x7F])
    if type_name not in _SMALL_FLOATS:
        raise ValueError(f"no 8-bit or narrower matrix element type is called {type_name!r}")
    exponent_bits, mantissa_bits = _SMALL_FLOATS[type_name]
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    table = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if type_name == "e5m2":
        top = exponent == 31
        table[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    if type_name == "e4m3":
        table[(code & 0x7F) == 0x7F] = np.nan
    negative = code >> exponent_bits + mantissa_bits & 1
    return _frozen(np.where(negative == 1, -table, table))


@np.errstate(invalid="ignore")  # signalling NaNs
def to_float(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Raw bits of any shape -> their values, float64. tf32 drops the low 13 bits of its 32, as the instructions do."""
    if type_name == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if type_name == "f16":
        return np.ascontiguousarray(raw, np.uint16).view(np.float16).astype(np.float64)
    if type_name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if type_name == "f32":
        return np.ascontiguousarray(raw, np.uint32).view(np.float32).astype(np.float64)
    if type_name == "s32":
        return np.ascontiguousarray(raw, np.uint32).view(np.int32).astype(np.float64)
    return value_table(type_name)[raw]


def _canonical_nan(bits: np.ndarray, values: np.ndarray, code: int) -> np.ndarray:
    """Tensor cores return one NaN pattern. The sum is a cheap test: a NaN anywhere makes it NaN (and so do mixed
    infinities).
    """
    if math.isfinite(values.sum(dtype=np.float64)):
        return bits
    return np.where(np.isnan(values), bits.dtype.type(code), bits)


def _products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A [M, K] or [copies, M, K] times B [N, K]ᵀ in float64 -> [M, N]. Copy i multiplies the i-th of equal groups of
    B's rows.
    """
    if a.ndim == 2:
        return a @ b.T
    groups = b.reshape(a.shape[0], -1, b.shape[1])
    return np.concatenate([x @ y.T for x, y in zip(a, groups)], axis=1)


def mma(
    a: np.ndarray,
    a_type: str,
    b: np.ndarray,
    b_type: str,
    c: np.ndarray | None = None,
    *,
    d_type: str = "f32",
    negate_a: bool = False,
    negate_b: bool = False,
    saturate: bool = False,
    scale_c_exponent: int = 0,
    scale_a: np.ndarray | None = None,
    scale_b: np.ndarray | None = None,
    scale_type: str = "ue8m0",
    zero_columns: np.ndarray | None = None,
) -> np.ndarray:
    """D = ±A · ±Bᵀ + C · 2^-scale_c_exponent for one instruction, raw bits in and out.

    a [M, K] or [copies, M, K] (see `tcgen05_a_map`), b [N, K]; c [M, N] raw bits of d_type, or None for D = A·Bᵀ.
    scale_a [M, F] and scale_b [N, F] are uint8 codes of scale_type, one per K / F elements. zero_columns [N] bool:
    rows of b taken as zero. Returns uint32 [M, N] for d_type "f32" and "s32" (saturate clips, else it wraps), uint16
    for "f16".

    Products are exact and the sum, C included, is float64, rounded once per instruction to nearest even. Hardware adds
    in an unspecified order with fewer bits and truncates, so it may differ by a few ulps of the largest term, and by
    far more for fp8 on sm_90, whose adders are known to keep only some 14 bits. Subnormals are kept.
    """
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"mma: A has K = {a.shape[-1]} and B has K = {b.shape[-1]}")
    with np.errstate(all="ignore"):
        x, y = to_float(a, a_type), to_float(b, b_type)
        if scale_a is not None:
            x *= np.repeat(value_table(scale_type)[scale_a], x.shape[-1] // scale_a.shape[-1], axis=-1)
        if scale_b is not None:
            y *= np.repeat(value_table(scale_type)[scale_b], y.shape[-1] // scale_b.shape[-1], axis=-1)
        if zero_columns is not None:
            y[zero_columns] = 0.0
        if negate_a != negate_b:
            x = -x
        d = _products(x, y)
        if d_type == "s32":
            return _finish_s32(d, c, saturate)
        if c is not None:
            value = c.view(np.float32 if d_type == "f32" else np.float16)
            d += np.ldexp(value.astype(np.float64), -scale_c_exponent) if scale_c_exponent else value
        if d_type == "f32":
            rounded = d.astype(np.float32)
            return _canonical_nan(rounded.view(np.uint32), rounded, 0x7FFFFFFF)
        if d_type == "f16":
            half = d.astype(np.float16)
            return _canonical_nan(half.view(np.uint16), half, 0x7FFF)
    raise ValueError(f"mma: D cannot have type {d_type!r}")


def _finish_s32(products: np.ndarray, c: np.ndarray | None, saturate: bool) -> np.ndarray:
    total = products.astype(np.int64)
    if c is not None:
        total += c.view(np.int32)
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.uint32)  # conversion of int64 keeps the low 32 bits


# ----------------------------------------------------------------------------------------------------------------
# Sub-byte elements
# ----------------------------------------------------------------------------------------------------------------


def unpack_bits(chunks: np.ndarray, bits: int) -> np.ndarray:
    """16-byte chunks, uint8 [..., 16], holding 16 packed elements of 4 or 6 bits and padding -> uint8 [..., 16],
    right-aligned.
    """
    if bits == 4:
        out = np.empty_like(chunks)
        out[..., 0::2], out[..., 1::2] = chunks[..., :8] & 15, chunks[..., :8] >> 4
        return out
    if bits == 6:
        word = chunks[..., :12].reshape(*chunks.shape[:-1], 4, 3).astype(np.uint32)
        word = word[..., 0] | word[..., 1] << 8 | word[..., 2] << 16  # four elements in 24 bits
        out = np.stack([word >> 6 * i & 63 for i in range(4)], axis=-1)
        return out.reshape(*chunks.shape[:-1], 16).astype(np.uint8)
    raise ValueError(f"elements of {bits} bits are not padded to 8: 4 or 6 expected")


def unpack_nibbles(data: np.ndarray) -> np.ndarray:
    """Bytes [..., n] of two 4-bit elements each (kind::mxf4) -> uint8 [..., 2n], right-aligned, low nibble first."""
    out = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    out[..., 0::2], out[..., 1::2] = data & 15, data >> 4
    return out


def from_container(data: np.ndarray, type_name: str) -> np.ndarray:
    """8-bit containers of registers or tensor memory -> right-aligned codes: e2m1 lies in bits 2-5, 6-bit types in
    bits 0-5.
    """
    if type_name == "e2m1":
        return data >> 2 & 15
    return data & 63 if type_name in ("e3m2", "e2m3") else data


def decompress(chunks: np.ndarray, source_format: str, *, central: bool) -> np.ndarray:
    """`.b8x16` from `.b4x16_p64` or `.b6x16_p32`: uint8 [..., 16] -> uint8 [..., 16] 8-bit containers.

    central: 4-bit elements go to bits 2-5, where an MMA expects e2m1. tcgen05.cp is assumed to do that (its result
    feeds the MMA); ldmatrix leaves them in bits 0-3 (CUTLASS shifts after it).
    """
    widths = {"b4x16_p64": 4, "b6x16_p32": 6}
    if source_format not in widths:
        raise ValueError(f"unknown source format .{source_format}: .b4x16_p64 or .b6x16_p32 expected")
    bits = widths[source_format]
    out = unpack_bits(chunks, bits)
    return out << 2 if bits == 4 and central else out


# ----------------------------------------------------------------------------------------------------------------
# Shared-memory matrix descriptors
# ----------------------------------------------------------------------------------------------------------------


class _Swizzle(NamedTuple):
    """XOR of address bits [shift + base, …) into [base, …); `mask` selects the target bits. Widths in chunks and
    rows.
    """

    mask: int
    shift: int
    width: int  # chunks in a contiguous row of the atom
    rows: int  # rows of the atom


SWIZZLES = {
    "none": _Swizzle(0, 3, 1, 8),
    "32": _Swizzle(0x10, 3, 2, 8),
    "64": _Swizzle(0x30, 3, 4, 8),
    "128": _Swizzle(0x70, 3, 8, 8),
    "128_atom32": _Swizzle(0x60, 2, 8, 4),  # 128-byte swizzle of 32-byte atoms
}


def swizzle(addresses: np.ndarray, mode: str, base_offset: int = 0) -> np.ndarray:
    """Byte addresses of any shape -> where the data lies. base_offset (units of 128 bytes) is where the pattern's row
    0 starts.
    """
    s = SWIZZLES[mode]
    return addresses ^ (((addresses - (base_offset << 7)) >> s.shift) & s.mask)


@dataclass(frozen=True)
class SmemDescriptor:
    """A decoded matrix descriptor. Addresses and offsets in bytes; leading and stride are the LBO and SBO of the PTX
    ISA.
    """

    start: int
    leading: int
    stride: int
    swizzle: str  # key of SWIZZLES
    base_offset: int = 0
    leading_is_address: bool = False

    @staticmethod
    def decode_wgmma(value: int) -> SmemDescriptor:
        """sm_90 descriptor: swizzle in bits 62-63. ValueError names reserved bits that are set."""
        value = int(value)
        _reserved(value, "wgmma", {14: 2, 30: 2, 46: 3, 52: 10})
        return _described(value, ("none", "128", "64", "32")[value >> 62], "wgmma")

    @staticmethod
    def decode_tcgen05(value: int) -> SmemDescriptor:
        """sm_100 descriptor: bits 46-48 are 0b001, swizzle in bits 61-63."""
        value = int(value)
        _reserved(value, "tcgen05", {14: 2, 30: 2, 53: 8})
        if (version := value >> 46 & 7) != 1:
            raise ValueError(
                f"tcgen05 shared-memory descriptor {value:#018x}: bits 46-48 are {version:#05b}, 0b001 expected"
            )
        modes = {0: "none", 1: "128_atom32", 2: "128", 4: "64", 6: "32"}
        if (code := value >> 61) not in modes:
            raise ValueError(
                f"tcgen05 shared-memory descriptor {value:#018x}: swizzle mode {code} (bits 61-63) is not defined"
            )
        desc = _described(value, modes[code], "tcgen05")
        if not value >> 52 & 1:
            return desc
        return SmemDescriptor(desc.start, desc.leading, desc.stride, desc.swizzle, desc.base_offset, True)


def _reserved(value: int, what: str, fields: dict[int, int]) -> None:
    for low, width in fields.items():
        if bits := value >> low & (1 << width) - 1:
            name = f"bits {low}-{low + width - 1}"
            raise ValueError(f"{what} shared-memory descriptor {value:#018x}: reserved {name} are {bits:#b}, not 0")


def _described(value: int, mode: str, what: str) -> SmemDescriptor:
    start, leading, stride = ((value >> low & 0x3FFF) << 4 for low in (0, 16, 32))
    base_offset = value >> 49 & 7
    if base_offset and mode == "none":
        raise ValueError(f"{what} shared-memory descriptor {value:#018x}: base offset {base_offset} without a swizzle")
    return SmemDescriptor(start, leading, stride, mode, base_offset)


@lru_cache(maxsize=4096)
def _chunk_pattern(phase: int, desc: SmemDescriptor, rows: int, k_elements: int, bits: int, major: str) -> np.ndarray:
    """Chunk addresses for a descriptor that starts at `phase`; see operand_chunks."""
    s = SWIZZLES[desc.swizzle]
    per_chunk = 128 // bits
    if major == "K":
        if desc.swizzle == "128_atom32":
            raise ValueError(
                "shared-memory descriptor: 128-byte swizzle with 32-byte atoms is for MN-major operands only"
            )
        if k_elements % per_chunk:
            raise ValueError(
                f"K-major operand: {k_elements} elements of {bits} bits are no whole number of 16-byte chunks"
            )
        row, chunk = np.arange(rows)[:, None], np.arange(k_elements // per_chunk)
        step = desc.leading if desc.swizzle == "none" else CHUNK  # LBO is not used by swizzled K-major layouts
        linear = row % 8 * (s.width * CHUNK) + row // 8 * desc.stride + chunk * step
    elif major == "MN":
        if rows % per_chunk:
            raise ValueError(
                f"MN-major operand: {rows} rows of {bits}-bit elements are no whole number of 16-byte chunks"
            )
        group, k = np.arange(rows // per_chunk)[:, None], np.arange(k_elements)
        across, along = (desc.stride, desc.leading) if desc.swizzle == "none" else (desc.leading, desc.stride)
        linear = (
            group % s.width * CHUNK + group // s.width * across + k % s.rows * (s.width * CHUNK) + k // s.rows * along
        )
    else:
        raise ValueError(f'operand is {major!r}-major: "K" or "MN" expected')
    return _frozen(swizzle(linear + phase, desc.swizzle, desc.base_offset).astype(np.int32))


def operand_chunks(desc: SmemDescriptor, rows: int, k_elements: int, element_bits: int, major: str) -> np.ndarray:
    """Shared-memory byte addresses of an operand's 16-byte chunks, int32.

    K-major: [rows, K * bits / 128], a chunk holds consecutive k. MN-major: [rows * bits / 128, K], a chunk holds
    consecutive rows. The swizzle works on absolute address bits, so a start inside an atom (K advanced by 32 bytes)
    comes out as on hardware. Patterns are cached by the start's offset in a 1024-byte swizzle period.
    """
    if desc.leading_is_address:
        raise NotImplementedError("shared-memory descriptor with an absolute leading address (K of 48 bytes, sm_103a)")
    phase = desc.start & 1023
    key = SmemDescriptor(0, desc.leading, desc.stride, desc.swizzle, desc.base_offset)
    return _chunk_pattern(phase, key, rows, k_elements, element_bits, major) + np.int32(desc.start - phase)


def operand_addresses(desc: SmemDescriptor, rows: int, k_elements: int, element_bits: int, major: str) -> np.ndarray:
    """Byte address of every element, int32 [rows, K]. Of two 4-bit elements in a byte, the even one has the low bits.

    Padded 4- and 6-bit elements (kinds f8f6f4 and mxf8f6f4) take 16 bytes per 16: ask with element_bits 8; only
    chunks are meaningful.
    """
    chunks = operand_chunks(desc, rows, k_elements, element_bits, major)
    within = np.arange(128 // element_bits, dtype=np.int32) * element_bits // 8
    if major == "K":
        return (chunks[:, :, None] + within).reshape(rows, k_elements)
    return (chunks[:, None, :] + within[:, None]).reshape(rows, k_elements)


def read_operand(
    shared: np.ndarray,
    desc: SmemDescriptor,
    rows: int,
    k_elements: int,
    type_name: str,
    major: str,
    *,
    packed: bool = False,
) -> np.ndarray:
    """Operand A or B from shared memory (uint8, length a multiple of 16), raw bits [rows, K] as `mma` takes them.

    packed: 4-bit elements lie two to a byte (kinds mxf4 and mxf4nvf4); otherwise 4- and 6-bit ones are 16 to a
    16-byte chunk. IndexError if a chunk lies outside `shared`: check operand_chunks first for a better message.
    """
    bits = TYPE_BITS[type_name]
    stored = bits if bits >= 8 or packed else 8
    chunks = operand_chunks(desc, rows, k_elements, stored, major)
    data = shared.reshape(-1, CHUNK)[chunks >> 4]
    if stored != bits:
        data = unpack_bits(data, bits)
    elif bits == 4:
        data = unpack_nibbles(data)
    elif bits > 8:
        data = data.view(np.uint16 if bits == 16 else np.uint32)
    if major == "K":
        return data.reshape(rows, k_elements)
    return data.transpose(0, 2, 1).reshape(rows, k_elements)


# ----------------------------------------------------------------------------------------------------------------
# Register fragments of warps: mma.sync, wgmma, ldmatrix, stmatrix, movmatrix
# ----------------------------------------------------------------------------------------------------------------

_LANE = np.arange(32)
_GROUP, _THREAD = _LANE // 4, _LANE % 4  # "groupID" and "threadID_in_group" of the PTX ISA


class Fragment(NamedTuple):
    """Where register elements of one warp lie in a matrix: int64 [registers, elements per register, 32 lanes] each."""

    row: np.ndarray
    column: np.ndarray


@cache
def fragment_a(bits: int, k: int) -> Fragment:
    """A of 16 rows × k elements of `bits` bits (mma.m16n8kK, and a warp's quarter of wgmma's A in registers)."""
    per = 32 // bits
    if k not in (4 * per, 8 * per):
        raise ValueError(f"A fragment of {bits}-bit elements: K is {4 * per} or {8 * per}, not {k}")
    register, element = np.arange(k // (2 * per))[:, None, None], np.arange(per)[:, None]
    row = _GROUP + 8 * (register % 2) + 0 * element
    return Fragment(_frozen(row), _frozen(4 * per * (register // 2) + per * _THREAD + element))


@cache
def fragment_b(bits: int, k: int) -> Fragment:
    """B of k × 8 for mma.m16n8kK. row is n (0-7) and column is k, as B is stored [N, K] here."""
    per = 32 // bits
    if k not in (4 * per, 8 * per):
        raise ValueError(f"B fragment of {bits}-bit elements: K is {4 * per} or {8 * per}, not {k}")
    register, element = np.arange(k // (4 * per))[:, None, None], np.arange(per)[:, None]
    return Fragment(_frozen(_GROUP + 0 * (register + element)), _frozen(4 * per * register + per * _THREAD + element))


@cache
def fragment_c(n: int, bits: int = 32) -> Fragment:
    """C or D of 16 × n: mma.sync (n = 8), and a warp's quarter of wgmma's 64 × n. bits 32 (f32, s32) or 16 (f16, two
    a register).
    """
    per = 32 // bits
    i = (np.arange(n // 2)).reshape(-1, per, 1)  # elements of a thread in order
    return Fragment(_frozen(_GROUP + 8 * (i // 2 % 2)), _frozen(8 * (i // 4) + 2 * _THREAD + i % 2))


def to_registers(matrix: np.ndarray, fragment: Fragment, bits: int) -> np.ndarray:
    """Raw matrix [rows, columns] -> one warp's registers, uint32 [registers, 32]."""
    values = matrix[fragment.row, fragment.column].astype(np.uint32)
    out = values[:, 0]
    for i in range(1, values.shape[1]):
        out = out | values[:, i] << np.uint32(bits * i)
    return out


def from_registers(registers: np.ndarray, fragment: Fragment, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """One warp's registers, uint32 [registers, 32] -> raw matrix of `shape` (uint8, uint16 or uint32 by bits)."""
    out = np.zeros(shape, np.uint32 if bits > 16 else np.uint16 if bits > 8 else np.uint8)
    for i in range(32 // bits):
        out[fragment.row[:, i], fragment.column[:, i]] = registers >> np.uint32(bits * i) & np.uint32((1 << bits) - 1)
    return out


def wgmma_d_to_registers(d: np.ndarray) -> np.ndarray:
    """wgmma's D, raw [64, N] (uint32, or uint16 for f16) -> uint32 [4 warps, registers, 32 lanes]; registers N/2, or
    N/4 for f16.
    """
    n = d.shape[1]
    parts = d.reshape(4, 2, 8, n // 8, 4, 2)  # warp, row half, group, column block, thread, column parity
    if d.dtype == np.uint16:  # the two of a pair stay together
        return np.ascontiguousarray(parts.transpose(0, 3, 1, 2, 4, 5)).view(np.uint32).reshape(4, n // 4, 32)
    return parts.transpose(0, 3, 1, 5, 2, 4).reshape(4, n // 2, 32)


def wgmma_d_from_registers(registers: np.ndarray, n: int) -> np.ndarray:
    """uint32 [4 warps, registers, 32 lanes] -> wgmma's D, raw [64, n]: uint32 from n/2 registers, uint16 (f16) from
    n/4.
    """
    registers = np.ascontiguousarray(registers, np.uint32)
    if registers.shape[1] == n // 4:
        parts = registers.reshape(4, n // 8, 2, 8, 4, 1).view(np.uint16)
        return parts.transpose(0, 2, 3, 1, 4, 5).reshape(64, n)
    parts = registers.reshape(4, n // 8, 2, 2, 8, 4)  # warp, block, half, parity, group, thread
    return parts.transpose(0, 2, 4, 1, 5, 3).reshape(64, n)


def wgmma_a_from_registers(registers: np.ndarray, bits: int) -> np.ndarray:
    """A in registers, uint32 [4 warps, 4, 32 lanes] -> raw [64, K], K = 256 / bits."""
    k = 256 // bits
    fragment = fragment_a(bits, k)
    return np.concatenate([from_registers(warp, fragment, bits, (16, k)) for warp in registers])


class MatrixMove(NamedTuple):
    """ldmatrix or stmatrix: the `part`-th item of `item_bytes` bytes (low first) of a register is at byte `byte` of
    the 16-byte row
    whose address lane `source` supplies. Arrays [registers, parts, 32 lanes]."""

    source: np.ndarray
    byte: np.ndarray
    item_bytes: int


@cache
def ldmatrix_map(shape: str, num: int, trans: bool) -> MatrixMove:
    """shape "m8n8" (b16), "m16n16" (b8, trans) or "m8n16" (4/6-bit rows, `byte` counts after
    decompress(central=False)).
    """
    allowed = {"m8n8": (1, 2, 4), "m16n16": (1, 2), "m8n16": (1, 2, 4)}
    if num not in allowed.get(shape, ()) or (shape, trans) in (("m16n16", False), ("m8n16", True)):
        raise ValueError(f"ldmatrix .{shape}.x{num}{'.trans' if trans else ''} does not exist")
    if shape == "m16n16":
        register, part = np.arange(2 * num)[:, None, None], np.arange(4)[:, None]
        source = 16 * (register // 2) + 4 * _THREAD + part
        return MatrixMove(_frozen(source), _frozen(_GROUP + 8 * (register % 2) + 0 * part), 1)
    register = np.arange(num)[:, None, None]
    if not trans:
        return MatrixMove(_frozen(8 * register + _GROUP), _frozen(4 * _THREAD + 0 * register), 4)
    part = np.arange(2)[:, None]
    return MatrixMove(_frozen(8 * register + 2 * _THREAD + part), _frozen(2 * _GROUP + 0 * (register + part)), 2)


@cache
def stmatrix_map(shape: str, num: int, trans: bool) -> MatrixMove:
    """shape "m8n8" (b16) or "m16n8" (b8, trans)."""
    if num not in (1, 2, 4) or shape not in ("m8n8", "m16n8") or (shape == "m16n8" and not trans):
        raise ValueError(f"stmatrix .{shape}.x{num}{'.trans' if trans else ''} does not exist")
    if shape == "m8n8":
        return ldmatrix_map("m8n8", num, trans)
    register, part = np.arange(num)[:, None, None], np.arange(4)[:, None]
    return MatrixMove(
        _frozen(8 * register + 2 * _THREAD + part % 2), _frozen(_GROUP + 8 * (part // 2) + 0 * register), 1
    )


def ldmatrix(rows: np.ndarray, move: MatrixMove) -> np.ndarray:
    """rows uint8 [32, 16]: the 16 bytes at each lane's address (any content where no address is used) -> uint32
    [registers, 32].
    """
    items = rows.view(f"<u{move.item_bytes}")[move.source, move.byte // move.item_bytes].astype(np.uint32)
    out = items[:, 0]
    for i in range(1, items.shape[1]):
        out = out | items[:, i] << np.uint32(8 * move.item_bytes * i)
    return out


def stmatrix(registers: np.ndarray, move: MatrixMove) -> np.ndarray:
    """uint32 [registers, 32] -> the 16 bytes for each address, uint8 [8 * matrices, 16], of lanes 0, 1, …"""
    dtype = np.dtype(f"<u{move.item_bytes}")
    out = np.zeros((8 * registers.shape[0], CHUNK // move.item_bytes), dtype)
    for i in range(4 // move.item_bytes):
        items = (registers >> np.uint32(8 * move.item_bytes * i)).astype(dtype)
        out[move.source[:, i], move.byte[:, i] // move.item_bytes] = items
    return out.view(np.uint8)


def movmatrix(values: np.ndarray) -> np.ndarray:
    """movmatrix.m8n8.trans.b16: uint32 [32] -> uint32 [32]."""
    matrix = from_registers(values[None], _MOVMATRIX, 16, (8, 8))
    return to_registers(np.ascontiguousarray(matrix.T), _MOVMATRIX, 16)[0]


_MOVMATRIX = Fragment((_GROUP + 0 * np.arange(2)[:, None])[None], (2 * _THREAD + np.arange(2)[:, None])[None])


# ----------------------------------------------------------------------------------------------------------------
# wgmma.mma_async
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wgmma:
    """One wgmma.mma_async form. Operand positions: 0 D, 1 A (registers or descriptor), 2 B's descriptor, 3 scale-d."""

    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    a_in_registers: bool
    a_major: str = "K"
    b_major: str = "K"
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False
    m: int = 64

    @property
    def d_registers(self) -> int:
        """32-bit registers of D in a thread."""
        return self.n // (4 if self.d_type == "f16" else 2)

    @property
    def a_registers(self) -> int:
        """32-bit registers of A in a thread; 0 if A comes by descriptor."""
        return 4 if self.a_in_registers else 0


_WGMMA_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def _vector_length(operand: Any) -> int | None:
    """Registers of a {…} operand: a list, a tuple or something with `items`, else None for a scalar."""
    items = operand if isinstance(operand, (list, tuple)) else getattr(operand, "items", None)
    return None if items is None else len(items)


def _immediate(operand: Any) -> int:
    """An integer constant: an int, its text, or something with `value`."""
    return int(getattr(operand, "value", operand))


def parse_wgmma(opcode: str | Sequence[str], operands: Sequence[Any]) -> Wgmma:
    """Opcode ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" or its parts) and operands -> what it is.

    Operands may be ptx.py's or plain: a register vector is a list or tuple, an immediate an int, the rest anything.
    ValueError for a form that does not exist, NotImplementedError for .sp and .b1.
    """
    parts = _parts(opcode)
    text = ".".join(parts)
    if "sp" in parts:
        raise NotImplementedError(f"sparse wgmma is not emulated: {text}")
    if "b1" in parts:
        raise NotImplementedError(f"single-bit wgmma is not emulated: {text}")
    try:
        at = next(i for i, p in enumerate(parts) if p.startswith("m64n"))
        n, k = (int(v) for v in parts[at][4:].split("k"))
    except (StopIteration, ValueError):
        raise ValueError(f"no wgmma shape .m64nNkK in {text}") from None
    rest = [p for p in parts[at + 1 :] if p != "satfinite"]
    if len(rest) != 3:
        raise ValueError(f"wgmma needs types of D, A and B: {text}")
    d_type, a_type, b_type = rest
    _check_wgmma_types(text, n, k, d_type, a_type, b_type)
    registers = _vector_length(operands[1])
    flags = [_immediate(x) for x in operands[4:]]
    form = Wgmma(
        n, k, d_type, a_type, b_type, registers is not None,
        saturate="satfinite" in parts, **_wgmma_flags(text, a_type, registers is not None, flags),
    )  # fmt: skip
    if registers not in (None, 4):
        raise ValueError(f"wgmma with A in {registers} registers, 4 expected: {text}")
    if (given := _vector_length(operands[0])) != form.d_registers:
        raise ValueError(f"wgmma with D in {given} registers, {form.d_registers} expected: {text}")
    return form


def _check_wgmma_types(text: str, n: int, k: int, d_type: str, a_type: str, b_type: str) -> None:
    if a_type not in _WGMMA_K or TYPE_BITS.get(b_type) != TYPE_BITS[a_type]:
        raise ValueError(f"wgmma has no operand types .{a_type}.{b_type}: {text}")
    integer = a_type in ("s8", "u8")
    fp8 = a_type in ("e4m3", "e5m2")
    if (b_type in ("s8", "u8")) != integer or (a_type != b_type and not (integer or fp8)):
        raise ValueError(f"wgmma has no operand types .{a_type}.{b_type}: {text}")
    results = ("s32",) if integer else ("f32", "f16") if fp8 or a_type == "f16" else ("f32",)
    if d_type not in results:
        raise ValueError(f"wgmma of .{a_type} cannot have D of .{d_type}: {text}")
    if k != _WGMMA_K[a_type] or not 8 <= n <= 256 or n % 8 or (integer and n > 24 and n % 16):
        raise ValueError(f"wgmma has no shape m64n{n}k{k} for .{a_type}: {text}")


def _wgmma_flags(text: str, a_type: str, in_registers: bool, flags: list[int]) -> dict[str, Any]:
    """imm-scale-a, imm-scale-b, {imm-trans-a,} imm-trans-b: how many depends on the types and on A's place."""
    integer, transposable = a_type in ("s8", "u8"), a_type in ("f16", "bf16")
    count = 0 if integer else 2 + (0 if not transposable else 1 if in_registers else 2)
    if len(flags) != count:
        raise ValueError(f"wgmma with {len(flags)} immediates after scale-d, {count} expected: {text}")
    if any(s not in (1, -1) for s in flags[:2]) or any(t not in (0, 1) for t in flags[2:]):
        raise ValueError(f"wgmma immediates {flags}: scales are 1 or -1, transposes 0 or 1: {text}")
    if integer:
        return {}
    trans = [0, 0] if not transposable else [0, *flags[2:]] if in_registers else flags[2:]
    a_major, b_major = ("MN" if t else "K" for t in trans)
    return {"negate_a": flags[0] < 0, "negate_b": flags[1] < 0, "a_major": a_major, "b_major": b_major}


# ----------------------------------------------------------------------------------------------------------------
# tcgen05: opcodes and instruction descriptors
# ----------------------------------------------------------------------------------------------------------------

_KIND_K = {"tf32": 8, "f16": 16, "i8": 32, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_FP8_CODES = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERAND_CODES = {
    "tf32": {2: "tf32"}, "f16": {0: "f16", 1: "bf16"}, "i8": {0: "u8", 1: "s8"},
    "f8f6f4": _FP8_CODES, "mxf8f6f4": _FP8_CODES, "mxf4": {1: "e2m1"}, "mxf4nvf4": {1: "e2m1"},
}  # fmt: skip
_RESULT_CODES = {"tf32": {1: "f32"}, "f16": {0: "f16", 1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")


@dataclass(frozen=True)
class Tcgen05Mma:
    """Qualifiers of a tcgen05.mma opcode. scale_factors: factors per row and instruction of a block-scaled kind, else
    0.
    """

    kind: str
    cta_group: int
    ws: bool
    scale_factors: int
    collector: str  # "a::discard", "b0::fill", …


def parse_tcgen05_mma(opcode: str | Sequence[str]) -> Tcgen05Mma:
    """tcgen05.mma{.ws}… -> qualifiers. NotImplementedError for .sp and .ashift."""
    parts = _parts(opcode)
    text = ".".join(parts)
    for name in ("sp", "ashift"):
        if name in parts:
            raise NotImplementedError(f"tcgen05.mma with .{name} is not emulated: {text}")
    kind = next((p[6:] for p in parts if p.startswith("kind::")), None)
    group = next((int(p[11:]) for p in parts if p.startswith("cta_group::")), None)
    if kind not in _KIND_K or group not in (1, 2):
        raise ValueError(f"tcgen05.mma needs a known .kind and .cta_group: {text}")
    ws, scaled = "ws" in parts, "block_scale" in parts
    if scaled != (kind in BLOCK_SCALED):
        raise ValueError(
            f"tcgen05.mma .kind::{kind} {'needs' if kind in BLOCK_SCALED else 'cannot have'} .block_scale: {text}"
        )
    if ws and (group == 2 or scaled):
        raise ValueError(f"tcgen05.mma.ws exists for cta_group::1 and kinds without block scaling only: {text}")
    default = "b0::discard" if ws else "a::discard"
    collector = next((p[11:] for p in parts if p.startswith("collector::")), default)
    return Tcgen05Mma(kind, group, ws, _scale_factors(text, kind, parts) if scaled else 0, collector)


def _scale_factors(text: str, kind: str, parts: list[str]) -> int:
    named = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}
    named["block32"] = 1 if kind == "mxf8f6f4" else 2
    given = [named[p] for p in parts if p in named]
    if not given and kind == "mxf4nvf4":
        raise ValueError(f"tcgen05.mma .kind::mxf4nvf4 needs a scale vector size: {text}")
    factors = given[0] if given else 1 if kind == "mxf8f6f4" else 2
    allowed = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}[kind]
    if factors not in allowed:
        raise ValueError(f"tcgen05.mma .kind::{kind} cannot have {factors} scale factors per row: {text}")
    return factors


@dataclass(frozen=True)
class InstructionDescriptor:
    """Decoded 32-bit instruction descriptor (idesc) of a tcgen05.mma."""

    kind: str
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    a_major: str = "K"
    b_major: str = "K"
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False
    max_shift: int = 0  # columns, .ws only
    scale_type: str = ""  # "ue8m0" or "ue4m3" of block-scaled kinds
    scale_a_id: int = 0
    scale_b_id: int = 0


@lru_cache(maxsize=1024)
def decode_instruction(value: int, kind: str) -> InstructionDescriptor:
    """idesc of .kind::`kind`. ValueError names a reserved or unknown field; NotImplementedError for sparse and for K
    = 96.
    """
    value = int(value) & 0xFFFFFFFF
    where = f"tcgen05 instruction descriptor {value:#010x} of kind::{kind}"
    if kind not in _KIND_K:
        raise ValueError(f"unknown tcgen05 kind::{kind}")
    if value >> 2 & 1:
        raise NotImplementedError(f"{where}: sparse matrices are not emulated")
    scaled = kind in BLOCK_SCALED
    reserved = {0: 2, 3: 1, 6: 1, 24: 3} if scaled else {6: 1, 23: 1, 29: 1}
    if kind in ("mxf4", "mxf4nvf4"):
        reserved |= {12: 1, 15: 2}
    elif scaled:
        reserved |= {31: 1}
    elif kind == "i8":
        reserved |= {13: 2}
    else:
        reserved |= {3: 1}
    for low, width in reserved.items():
        if bits := value >> low & (1 << width) - 1:
            raise ValueError(f"{where}: bits {low}-{low + width - 1} are {bits:#b}, must be 0")
    a_type = _code(where, "A type", value >> 7 & 7, _OPERAND_CODES[kind])
    b_type = _code(where, "B type", value >> 10 & (3 if kind in ("mxf4", "mxf4nvf4") else 7), _OPERAND_CODES[kind])
    common = {
        "kind": kind, "n": (value >> 17 & 63) << 3, "k": _KIND_K[kind], "a_type": a_type, "b_type": b_type,
        "negate_a": bool(value >> 13 & 1), "negate_b": bool(value >> 14 & 1),
        "a_major": "MN" if value >> 15 & 1 else "K", "b_major": "MN" if value >> 16 & 1 else "K",
    }  # fmt: skip
    if not scaled:
        d_type = _code(where, "D type", value >> 4 & 3, _RESULT_CODES[kind])
        shift = (0, 8, 16, 32)[value >> 30]
        return InstructionDescriptor(
            m=(value >> 24 & 31) << 4, d_type=d_type, saturate=bool(value >> 3 & 1), max_shift=shift, **common
        )
    return _decode_scaled(where, value, common)


def _decode_scaled(where: str, value: int, common: dict[str, Any]) -> InstructionDescriptor:
    kind = common["kind"]
    if kind in ("mxf4", "mxf4nvf4") and value >> 31:
        raise NotImplementedError(f"{where}: K = 96 (sm_103a) is not emulated")
    scale_type = "ue8m0" if value >> 23 & 1 else "ue4m3"
    if scale_type == "ue4m3" and kind != "mxf4nvf4":
        raise ValueError(f"{where}: scale type bit 23 is 0 (ue4m3), kind::{kind} has ue8m0 (1) only")
    ids = value >> 29 & 3, value >> 4 & 3
    if kind != "mxf8f6f4" and any(i & 1 for i in ids):
        raise ValueError(f"{where}: scale factor ids A {ids[0]}, B {ids[1]} must be 0 or 2")
    m = (value >> 27 & 3) << 7
    return InstructionDescriptor(
        m=m, d_type="f32", scale_type=scale_type, scale_a_id=ids[0], scale_b_id=ids[1], **common
    )


def _code(where: str, what: str, code: int, names: dict[int, str]) -> str:
    if code not in names:
        raise ValueError(f"{where}: {what} code {code} is not defined")
    return names[code]


def check_tcgen05_shape(idesc: InstructionDescriptor, cta_group: int, ws: bool) -> None:
    """ValueError if M × N, the major-ness or the shift is not one the PTX ISA lists for the kind and the variant."""
    kind, m, n = idesc.kind, idesc.m, idesc.n
    what = f"tcgen05.mma{'.ws' if ws else ''}.cta_group::{cta_group}.kind::{kind}"
    if ws:
        if cta_group != 1 or kind in BLOCK_SCALED:
            raise ValueError(f"{what} does not exist")
        good = m in (32, 64, 128) and n in (64, 128, 256)
    else:
        rows = (128,) if kind in BLOCK_SCALED and cta_group == 1 else (64, 128) if cta_group == 1 else (128, 256)
        step = {1: 8, 2: 16}[cta_group]
        if kind == "i8":
            step = 32 if cta_group == 2 else 16 if n > 32 else 8
        elif idesc.b_major == "MN" and TYPE_BITS[idesc.b_type] <= 8:
            step *= 2
        good = m in rows and step <= n <= 256 and n % step == 0
    if not good:
        raise ValueError(f"{what} has no shape M {m} × N {n} (B {idesc.b_major}-major)")
    for name, type_name, major in (("A", idesc.a_type, idesc.a_major), ("B", idesc.b_type, idesc.b_major)):
        if major == "MN" and TYPE_BITS[type_name] < 8:
            raise ValueError(f"{what}: {name} of {type_name} cannot be MN-major")
    if idesc.max_shift and not ws:
        raise ValueError(f"{what}: maximum shift {idesc.max_shift} is for .ws only")


def check_tcgen05_swizzle(idesc: InstructionDescriptor, desc: SmemDescriptor, major: str) -> None:
    """ValueError unless an MN-major 32-bit operand, and no other MN-major one, has the 128-byte swizzle with 32-byte
    atoms.
    """
    if major == "MN" and (desc.swizzle == "128_atom32") != (idesc.kind == "tf32"):
        raise ValueError(f"tcgen05.mma .kind::{idesc.kind}: MN-major operand with swizzle {desc.swizzle!r}")


def zero_column_mask(value: int, m: int, n: int) -> tuple[np.ndarray, int]:
    """Zero-column mask descriptor of tcgen05.mma.ws -> (bool [n]: True where B's row counts as zero, shift of B in
    columns).

    With a shift s, B's rows s … s + n - 1 are used. Spans are periodic: use + 1 columns kept, skip + 1 zeroed; a
    first-span bit of 1 starts with a zeroed span; the start count drops that many columns at the beginning.
    """
    value = int(value)
    shift = value >> 56 & 63
    if value >> 36 & 7 or value >> 62:
        raise ValueError(f"zero-column mask descriptor {value:#018x}: reserved bits 36-38 or 62-63 are set")
    mask = np.zeros(n, bool)
    if not value >> 39 & 1:
        return mask, shift
    pieces = {128: 1, 64: 2, 32: 4}[m]
    skip, use = (value >> 40 & 255) + 1, (value >> 48 & 255) + 1
    for i, piece in enumerate(mask.reshape(pieces, -1)):
        position = (np.arange(n // pieces) + (value >> 8 * i & 255)) % (skip + use)
        piece[:] = position < skip if value >> 32 + i & 1 else position >= use
    return mask, shift


# ----------------------------------------------------------------------------------------------------------------
# tcgen05: tensor-memory layouts
# ----------------------------------------------------------------------------------------------------------------


def tmem_address(lane: int, column: int) -> int:
    """Tensor-memory address of a lane (0-127) and a 32-bit column (0-511)."""
    return lane << 16 | column


@dataclass(frozen=True, eq=False)
class TmemMap:
    """Tensor-memory words relative to an address: int64 arrays of lanes and of 32-bit columns, of equal shape."""

    lane: np.ndarray
    column: np.ndarray

    @cached_property
    def _relative(self) -> tuple[np.ndarray, int, int]:
        flat = _frozen(self.lane * TMEM_COLUMNS + self.column)
        return flat, int(self.lane.max()), int(self.column.max())

    def flat(self, address: int) -> np.ndarray:
        """Flat indices (lane * 512 + column) for an address, int64 of the map's shape; ValueError if it leaves tensor
        memory.
        """
        relative, last_lane, last_column = self._relative
        lane, column = int(address) >> 16, int(address) & 0xFFFF
        if lane + last_lane >= TMEM_LANES or column + last_column >= TMEM_COLUMNS:
            raise ValueError(
                f"tensor-memory access at lane {lane}, column {column} reaches lane {lane + last_lane}, "
                f"column {column + last_column} of {TMEM_LANES} × {TMEM_COLUMNS}"
            )
        return relative + (lane * TMEM_COLUMNS + column)


def _tmem_map(lane: np.ndarray, column: np.ndarray) -> TmemMap:
    lane, column = np.broadcast_arrays(lane, column)
    return TmemMap(_frozen(np.ascontiguousarray(lane)), _frozen(np.ascontiguousarray(column)))


def _rows_and_groups(m: int, cta_group: int, ws: bool) -> tuple[int, int, bool]:
    """Rows of D in one CTA, groups of columns side by side in lanes, and whether only half of the lanes is used."""
    table = {
        (128, 1): (128, 1, False),  # layout D
        (256, 2): (128, 1, False),  # layout A
        (128, 2): (64, 2, False),  # layout B
    }
    if ws:
        table[64, 1] = (64, 2, False)  # layout E
        table[32, 1] = (32, 4, False)  # layout G
    else:
        table[64, 1] = (64, 1, True)  # layout F
    if (m, cta_group) not in table:
        raise ValueError(f"tcgen05.mma{'.ws' if ws else ''}.cta_group::{cta_group} has no layout for M = {m}")
    return table[m, cta_group]


def _row_lanes(rows: int, half: bool) -> np.ndarray:
    row = np.arange(rows)
    return row // 16 * 32 + row % 16 if half else row


@cache
def tcgen05_d_map(m: int, n: int, cta_group: int, ws: bool) -> TmemMap:
    """Words of D in one CTA, [rows in CTA, n]. CTA rank r of a pair holds rows r * M/2 … of the matrix.

    An f16 D takes a word per element, in its low 16 bits. With M = 64 (not .ws) the address may have lane 0 or 16,
    otherwise lane 0.
    """
    rows, groups, half = _rows_and_groups(m, cta_group, ws)
    column, width = np.arange(n), n // groups
    return _tmem_map(
        _row_lanes(rows, half)[:, None] + column // width * rows, column % width + 0 * np.arange(rows)[:, None]
    )


@cache
def tcgen05_a_map(m: int, words: int, cta_group: int, ws: bool) -> TmemMap:
    """Words of A in tensor memory, [copies, rows in CTA, words], elements packed low bits first; 8 words for every
    kind.

    Where D has several column groups side by side in lanes (M = 64 and 32 with .ws, M = 128 of a pair), each group's
    lanes read their own copy of A: copy i multiplies the i-th group of B's rows, which `mma` does with a 3-D a. They
    are usually, not always, equal.
    """
    rows, groups, half = _rows_and_groups(m, cta_group, ws)
    lane = np.arange(groups)[:, None, None] * rows + _row_lanes(rows, half)[:, None]
    return _tmem_map(lane, np.arange(words))


def check_tmem_lane(address: int, m: int, cta_group: int, ws: bool) -> None:
    """ValueError unless the lane of D's (or A's) address is one the layout allows: 0, or 16 with half of the lanes
    used.
    """
    lane = int(address) >> 16
    half = _rows_and_groups(m, cta_group, ws)[2]
    if lane not in ((0, 16) if half else (0,)):
        raise ValueError(
            f"tensor-memory operand of M = {m} starts at lane {lane}: {'0 or 16' if half else '0'} expected"
        )


def tmem_a_elements(words: np.ndarray, type_name: str, *, packed: bool = False) -> np.ndarray:
    """Words of A, uint32 [..., w], -> raw elements [..., K] for `mma`. packed: two 4-bit elements to a byte (mxf4,
    mxf4nvf4).
    """
    bits = TYPE_BITS[type_name]
    words = np.ascontiguousarray(words, np.uint32)
    if bits == 32:
        return words
    if bits == 16:
        return words.view(np.uint16)
    data = words.view(np.uint8)
    return unpack_nibbles(data) if packed and bits == 4 else from_container(data, type_name)


def operand_rows(m: int, n: int, cta_group: int) -> tuple[int, int]:
    """(rows of A, rows of B) in each CTA's shared memory: a pair splits both; CTA rank r has A's and B's r-th half."""
    return m // cta_group, n // cta_group


@cache
def scale_factor_map(rows: int, split: bool = False) -> TmemMap:
    """Words with a row's scale factors in tensor memory, [copies, rows]: row r in lane r % 32, column r // 32.

    Every group of 32 lanes has its copy (4). split: scale_B of M = 128 in a CTA pair, where lanes 0-63 hold the first
    half of the rows and lanes 64-127 the second (2 copies of each).
    """
    row = np.arange(rows)
    if not split:
        return _tmem_map(np.arange(4)[:, None] * 32 + row % 32, row // 32)
    half = rows // 2
    within = row % half
    return _tmem_map(row // half * 64 + np.arange(2)[:, None] * 32 + within % 32, within // 32)


def scale_factors(words: np.ndarray, factors: int, factor_id: int) -> np.ndarray:
    """Words uint32 [rows] -> uint8 [rows, factors]: bytes factor_id … of each word (id 0-3 for 1, 0 or 2 for 2, 0 for
    4).
    """
    if factor_id + factors > 4 or factor_id % factors:
        raise ValueError(f"scale factor id {factor_id} with {factors} factors per row")
    data = np.ascontiguousarray(words, np.uint32)[:, None].view(np.uint8)
    return data[:, factor_id : factor_id + factors]


# ----------------------------------------------------------------------------------------------------------------
# tcgen05.ld, .st, .cp and .shift
# ----------------------------------------------------------------------------------------------------------------

_REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}


@cache
def tcgen05_ld_map(shape: str, num: int, pack: bool = False, half_split: int = 0) -> TmemMap:
    """Words of tcgen05.ld/.st, [registers, 32 lanes], relative to taddr; shape "32x32b", "16x64b", "16x128b",
    "16x256b", "16x32bx2".

    pack (.pack::16b / .unpack::16b): [registers, 2, 32]: the low 16 bits of two adjacent columns form a register's
    low and high half, so twice as many columns are spanned. half_split: columns from the first to the second access
    of 16x32bx2.
    """
    if shape not in _REGISTERS_PER_REPEAT or num not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"tcgen05.ld/st has no shape .{shape}.x{num}")
    registers = num * _REGISTERS_PER_REPEAT[shape]
    if registers > 128:
        raise ValueError(f"tcgen05.ld/st .{shape}.x{num} would need {registers} registers")
    i = np.arange(registers)[:, None]
    second = 0
    if shape == "32x32b":
        lane, column = _LANE, i
    elif shape == "16x32bx2":
        lane, column, second = _LANE % 16, i, _LANE // 16 * half_split
    elif shape == "16x64b":
        lane, column = _GROUP + 8 * (_LANE % 2), 2 * i + _LANE // 2 % 2
    elif shape == "16x128b":
        lane, column = _GROUP + 8 * (i % 2), 4 * (i // 2) + _THREAD
    else:
        lane, column = _GROUP + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * _THREAD + i % 2
    lane, column = np.broadcast_arrays(lane, column)
    if not pack:
        return _tmem_map(lane, column + second)
    return _tmem_map(lane[:, None], (2 * column + second)[:, None] + np.arange(2)[:, None])


def check_ld_lanes(address: int, shape: str, warp: int) -> None:
    """ValueError unless taddr's lane suits the shape and lies in the 32 lanes of warp `warp` (its index in the CTA,
    modulo 4).
    """
    lane, first = int(address) >> 16, warp % 4 * 32
    allowed = (first,) if shape == "32x32b" else (first, first + 16)
    if lane not in allowed:
        names = " or ".join(map(str, allowed))
        raise ValueError(f"tcgen05.ld/st .{shape} of warp {warp} at lane {lane}: the warp may use lane {names}")


def pack_words(words: np.ndarray) -> np.ndarray:
    """.pack::16b: words uint32 [registers, 2, 32] as gathered -> registers uint32 [registers, 32]."""
    return words[:, 0] & np.uint32(0xFFFF) | words[:, 1] << np.uint32(16)


def unpack_words(registers: np.ndarray) -> np.ndarray:
    """.unpack::16b: registers uint32 [registers, 32] -> words uint32 [registers, 2, 32], high halves 0 (assumed)."""
    return np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=1)


class Tcgen05Move(NamedTuple):
    """Qualifiers of tcgen05.ld and .st."""

    shape: str
    num: int
    pack: bool
    registers: int


def parse_tcgen05_ld(opcode: str | Sequence[str]) -> Tcgen05Move:
    """tcgen05.ld / tcgen05.st opcode -> qualifiers. NotImplementedError for .red."""
    parts = _parts(opcode)
    text = ".".join(parts)
    if "red" in parts:
        raise NotImplementedError(f"tcgen05.ld.red is not emulated (sm_101a, sm_103a): {text}")
    shape = next((p for p in parts if p in _REGISTERS_PER_REPEAT), None)
    num = next((int(p[1:]) for p in parts if p[0] == "x" and p[1:].isdigit()), None)
    if shape is None or num is None:
        raise ValueError(f"no known shape and repeat count in {text}")
    registers = num * _REGISTERS_PER_REPEAT[shape]
    if registers > 128:
        raise ValueError(f"{text} would need {registers} registers")
    return Tcgen05Move(shape, num, "pack::16b" in parts or "unpack::16b" in parts, registers)


class Tcgen05Copy(NamedTuple):
    """tcgen05.cp: the source is `rows` × `row_bytes` bytes, K-major by its descriptor; `words` maps it to tensor
    memory,
    [copies, rows, row_bytes / 4]; source_format is "" or the format to `decompress` (chunk by chunk, sizes
    unchanged)."""

    rows: int
    row_bytes: int
    words: TmemMap
    source_format: str
    cta_group: int


def parse_tcgen05_cp(opcode: str | Sequence[str]) -> Tcgen05Copy:
    """tcgen05.cp opcode -> what it moves. Read the source with operand_chunks(desc, rows, row_bytes, 8, "K")."""
    parts = _parts(opcode)
    text = ".".join(parts)
    shape = next((p for p in parts if p in _CP_LANES), None)
    if shape is None:
        raise ValueError(f"no known shape in {text}")
    multicast = next((p for p in parts if p.startswith("warpx")), "")
    source_format = next((p for p in parts if p in ("b4x16_p64", "b6x16_p32")), "")
    if ("b8x16" in parts) != bool(source_format):
        raise ValueError(f".b8x16 and a source format go together: {text}")
    if multicast not in _CP_LANES[shape]:
        raise ValueError(f"tcgen05.cp .{shape} cannot have multicast {multicast or '(none)'}: {text}")
    rows, bits = (int(v) for v in shape[:-1].split("x"))
    group = 2 if "cta_group::2" in parts else 1
    return Tcgen05Copy(rows, bits // 8, _cp_map(shape, multicast), source_format, group)


# Lane of source row r in each copy. 4x256b: one row per 32 lanes, so that a lane of taddr picks which lane of each 32
# is replaced.
_CP_LANES: dict[str, dict[str, Callable[[np.ndarray], list[np.ndarray]]]] = {
    "128x256b": {"": lambda r: [r]},
    "128x128b": {"": lambda r: [r]},
    "4x256b": {"": lambda r: [32 * r]},
    "64x128b": {
        "warpx2::02_13": lambda r: [r, r + 64],
        "warpx2::01_23": lambda r: [r // 32 * 64 + r % 32, r // 32 * 64 + r % 32 + 32],
    },
    "32x128b": {"warpx4": lambda r: [r, r + 32, r + 64, r + 96]},
}


@cache
def _cp_map(shape: str, multicast: str) -> TmemMap:
    rows, bits = (int(v) for v in shape[:-1].split("x"))
    lanes = np.stack(_CP_LANES[shape][multicast](np.arange(rows)))
    return _tmem_map(lanes[:, :, None], np.arange(bits // 32))


@cache
def tcgen05_shift_map() -> tuple[TmemMap, TmemMap]:
    """tcgen05.shift.down: (destination, source) words, [31, 8] each, relative to an address whose lane is a multiple
    of 32.

    Assumed: lane i takes lane i + 1's 32 bytes for i < 31, and the last lane keeps its own (tcgen05.cp.4x256b then
    refreshes it).
    """
    lane, column = np.arange(31)[:, None], np.arange(8)
    return _tmem_map(lane, column), _tmem_map(lane + 1, column)
