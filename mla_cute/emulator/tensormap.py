"""TMA tensor maps: the hardware's descriptor, the global addresses and shared-memory offsets of a box, swizzles.

    128 bytes of a kernel parameter ──decode──► TensorMap ──tile(coordinates)──► Tile ──load / store──► 16-byte chunks
                                                                                  └──shared(base)──► where each chunk lies

The format is what the DSL's host code writes and what ptxas makes of `tensormap.replace`; of the 128 bytes only the first 64
are written and read. By 32-bit word, counted from bit 0:

| word  | bits          | field                                                                                             |
|-------|---------------|---------------------------------------------------------------------------------------------------|
| 0-1   |               | global address                                                                                    |
| 2     | 0-3           | mode: 2 tiled, 3 im2col                                                                           |
|       | 4-6           | rank - 1                                                                                          |
|       | 7-10          | element type, ELEMENTS in order                                                                   |
|       | 11-12         | interleave: 0 none, 1 16 bytes, 2 32 bytes                                                        |
|       | 13-14         | swizzle span: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes                                         |
|       | 15            | out-of-bounds elements are NaN instead of 0                                                       |
|       | 16            | with f32 and f32.ftz: round to tf32                                                               |
|       | 17-18         | L2 promotion: 0 none, 1 64 bytes, 2 128 bytes, 3 256 bytes; a hint                                |
|       | 19-20         | swizzle atom: 0 16 bytes, 1 32 bytes, 2 32 bytes and halves of 8 swapped, 3 64 bytes              |
|       | 21            | set for tensors of 128 KiB and more: how Blackwell forms addresses out of bounds; no effect here  |
|       | 22            | a swizzle span of 96 bytes (sm_103 and later)                                                     |
| 3-6   |               | strides 1-4 / 16, bits 0-31                                                                       |
| 7     | 0-15          | strides 1-4 / 16, bits 32-35, four bits each                                                      |
| 8-12  |               | dims 0-4, less 1                                                                                  |
| 13    | 0-14          | element strides 0-4, less 1, three bits each                                                      |
|       | 24-31         | box 0 less 1; im2col: channels per pixel less 1                                                   |
| 14    | tiled         | box 1-4 less 1, eight bits each                                                                   |
|       | im2col        | lower corner of the rank - 2 spatial dims, then the upper: signed, 16, 8 or 5 bits for rank 3, 4, 5 |
| 15    | 0-9           | im2col: pixels per column less 1                                                                  |
"""

import enum
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WORDS = 16  # of 32 bits, those that the hardware reads
SMEM_ALIGNMENT = 128  # bytes: of a box in shared memory
CHUNK = 16  # bytes: what no swizzle takes apart
MODES = {2: "tiled", 3: "im2col"}


class Element(NamedTuple):
    """An element type as `tensormap.replace` calls it."""

    name: str
    bits: int  # in global memory
    kind: str = "int"  # int, float or packed; a float's out-of-bounds value may be NaN
    padded: bool = False  # 16 elements take 16 bytes of shared memory


ELEMENTS = (
    Element("u8", 8),
    Element("u16", 16),
    Element("u32", 32),
    Element("s32", 32),
    Element("u64", 64),
    Element("s64", 64),
    Element("f16", 16, "float"),
    Element("f32", 32, "float"),
    Element("f32.ftz", 32, "float"),
    Element("f64", 64, "float"),
    Element("bf16", 16, "float"),
    Element("b4x16", 4, "packed"),
    Element("b4x16_p64", 4, "packed", True),
    Element("b6x16_p32", 6, "packed", True),
)
TF32 = {7: Element("tf32", 32, "float"), 8: Element("tf32.ftz", 32, "float")}  # bit 16 set
_ELEMENT_CODES = {e.name: (i, 0) for i, e in enumerate(ELEMENTS)} | {e.name: (i, 1) for i, e in TF32.items()}
_ELEMENTS = {e.name: e for e in (*ELEMENTS, *TF32.values())}


def element_of(name: str) -> Element:
    return _ELEMENTS[name]


class Swizzle(enum.Enum):
    """CuTe's Swizzle<B, M, S> on byte addresses: bits M+S.. (B of them) are xored into bits M.. ."""

    NONE = 0, 4, 3
    B32 = 1, 4, 3
    B64 = 2, 4, 3
    B128 = 3, 4, 3
    B128_ATOM_32B = 2, 5, 2
    B128_ATOM_64B = 1, 6, 1

    @property
    def span(self) -> int:
        """Bytes within which chunks move; 16 without a swizzle."""
        bits, base, _ = self.value
        return 1 << bits + base


# (span code, atom code) of word 2. Of the third atom, 32 bytes with swapped halves, the pattern is not established.
_SWIZZLES = {
    (0, 0): Swizzle.NONE,
    (1, 0): Swizzle.B32,
    (2, 0): Swizzle.B64,
    (3, 0): Swizzle.B128,
    (3, 1): Swizzle.B128_ATOM_32B,
    (3, 3): Swizzle.B128_ATOM_64B,
}
INTERLEAVES = (0, 16, 32)  # bytes
L2_PROMOTIONS = (0, 64, 128, 256)  # bytes


def swizzle(addresses: np.ndarray, mode: Swizzle) -> np.ndarray:
    """Where the hardware puts the bytes of shared addresses; an involution.

    The pattern is one of the address bits, not of the box: a box that is not aligned to the pattern's period (8 rows of
    the span, 1,024 bytes for 128) starts in the middle of it. Chunks of 16 bytes stay whole.
    """
    bits, base, shift = mode.value
    if not bits:
        return addresses
    mask = ((1 << bits) - 1) << base
    return addresses ^ ((addresses >> shift) & mask)


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one instruction moves; dim 0 is the contiguous one.

    Tuples have one entry per dim. im2col: `box` is (channels per pixel, pixels per column).
    """

    address: int
    element: str  # name of an Element
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes; strides[0] is that of one element, 0 for types of less than a byte
    box: tuple[int, ...]  # elements, before division by the element strides
    element_strides: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    interleave: int = 0  # bytes: 0, 16 or 32
    fill_nan: bool = False  # what out-of-bounds elements read as; else 0
    mode: str = "tiled"  # or im2col
    lower_corner: tuple[int, ...] = ()  # im2col: of the bounding box, per spatial dim
    upper_corner: tuple[int, ...] = ()
    l2_promotion: int = 0  # bytes; a hint, as is bit 21, which is not kept

    def __post_init__(self):
        rank, element = self.rank, _ELEMENTS.get(self.element)
        row = self.box[0] * element.bits // 8 if element else 0  # bytes
        align = 32 if self.interleave == 32 or (element and element.padded) else 16
        sides = 2 if self.mode == "im2col" else rank
        for wrong, text in (
            (element is None, f"element: unknown type {self.element!r}"),
            (not 1 <= rank <= 5, f"rank: must be 1 to 5, got {rank}"),
            (self.mode not in MODES.values(), f"mode: must be tiled or im2col, got {self.mode!r}"),
            (
                (len(self.strides), len(self.box), len(self.element_strides)) != (rank, sides, rank),
                f"strides, box, element_strides: must have {rank}, {sides} and {rank} entries, got {self.strides}, "
                f"{self.box}, {self.element_strides}",
            ),
            (not _within(self.dims, 1 << 32), f"dims: must be 1 to 2^32, got {self.dims}"),
            (not _within(self.box, 256 if sides == rank else 1024), f"box: must be 1 to 256 elements, got {self.box}"),
            (not _within(self.element_strides, 8), f"element_strides: must be 1 to 8, got {self.element_strides}"),
            (
                element and self.strides[0] != element.bits // 8,
                f"strides: must begin with the {element.bits // 8 if element else 0} bytes of an element, got {self.strides}",
            ),
            (self.mode == "im2col" and rank < 3, f"rank: must be 3 to 5 for im2col, got {rank}"),
            (self.address % align, f"address: must be a multiple of {align} bytes, got {self.address:#x}"),
            (
                any(s % align for s in self.strides[1:]),
                f"strides: must be multiples of {align} bytes, got {self.strides}",
            ),
            (self.fill_nan and element and element.kind != "float", f"fill_nan: has no meaning for {self.element}"),
            (
                not self.interleave and row % 16,
                f"box: dim 0 must be a multiple of 16 bytes, got {self.box[0]} elements of {self.element}",
            ),
            (
                not self.interleave and self.swizzle is not Swizzle.NONE and row > self.swizzle.span,
                f"box: dim 0 must be at most the swizzle's {self.swizzle.span} bytes, got {row}",
            ),
        ):
            if wrong:
                raise ValueError(f"tensor map: {text}")

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bits(self) -> int:
        """Of one element in global memory."""
        return _ELEMENTS[self.element].bits

    @property
    def element_bytes(self) -> int:
        """Of one element; ValueError for types of less than a byte."""
        if self.element_bits % 8:
            raise ValueError(f"tensor map: an element of {self.element} has no whole number of bytes; use element_bits")
        return self.element_bits // 8

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements that a tiled box has in shared memory: box / element_strides, rounded up; dim 0 has no step."""
        steps = (1, *self.element_strides[1:])
        return tuple(-(-box // step) for box, step in zip(self.box, steps))

    @property
    def box_bytes(self) -> int:
        """What complete_tx counts for one box: all of it, elements out of bounds included."""
        self._need_known()
        return int(np.prod(self.extent)) * self.element_bits // 8

    # ----- the 128 bytes

    @classmethod
    def decode(cls, raw: bytes) -> "TensorMap":
        """The map that 128 bytes (64 are enough) describe. ValueError, naming the field, for what is not understood."""
        if len(raw) not in (64, 128):
            raise ValueError(f"tensor map: must have 128 bytes, got {len(raw)}")
        return _decode(bytes(raw[:64]))

    def encode(self) -> bytes:
        """The 128 bytes, the second half zero; bit 21 as the DSL sets it."""
        code, tf32 = _ELEMENT_CODES[self.element]
        span, atom = next(codes for codes, mode in _SWIZZLES.items() if mode is self.swizzle)
        size = sum((d - 1) * s for d, s in zip(self.dims, self.strides)) + 1
        w = [0] * WORDS
        w[0], w[1] = self.address & 0xFFFFFFFF, self.address >> 32
        w[2] = {name: n for n, name in MODES.items()}[self.mode] | self.rank - 1 << 4 | code << 7
        w[2] |= INTERLEAVES.index(self.interleave) << 11 | span << 13 | int(self.fill_nan) << 15 | tf32 << 16
        w[2] |= L2_PROMOTIONS.index(self.l2_promotion) << 17 | atom << 19 | int(size >= 128 * 1024) << 21
        for i, dim in enumerate(self.dims):
            w[8 + i] = dim - 1
            w[13] |= self.element_strides[i] - 1 << 3 * i
        for i, stride in enumerate(self.strides[1:]):
            w[3 + i] = stride // 16 & 0xFFFFFFFF
            w[7] |= stride >> 36 << 4 * i
        w[13] |= self.box[0] - 1 << 24
        if self.mode == "im2col":
            bits = _corner_bits(self.rank)
            for i, corner in enumerate((*self.lower_corner, *self.upper_corner)):
                first = 0 if i < self.rank - 2 else 16
                w[14] |= (corner & (1 << bits) - 1) << first + bits * (i % (self.rank - 2))
            w[15] = self.box[1] - 1
        else:
            for i, n in enumerate(self.box[1:]):
                w[14] |= n - 1 << 8 * i
        return struct.pack("<16I", *w) + bytes(64)

    # ----- boxes

    def tile(self, coords: Sequence[int]) -> "Tile":
        """The box whose first element is at `coords`, dim 0 first; coordinates may be negative or past the end."""
        if len(coords) != self.rank:
            raise ValueError(f"tensor map: {len(coords)} coordinates for a tensor of rank {self.rank}")
        p = self._plan
        offset = sum(c * s for c, s in zip(coords[1:], self.strides[1:]))
        rows = None  # all in bounds
        for i in range(1, self.rank):
            last = coords[i] + (self.extent[i] - 1) * self.element_strides[i]
            if coords[i] < 0 or last >= self.dims[i]:
                index = p.index[i - 1] + coords[i]
                within = (index >= 0) & (index < self.dims[i])
                rows = within if rows is None else rows & within
        return self._chunks(coords[0], p.rows + offset, rows, p.smem_offsets)

    @functools.cached_property
    def _plan(self) -> "_Plan":
        """What all boxes of the map have in common."""
        self._need_known()
        extent, steps = self.extent, self.element_strides
        row_bytes = extent[0] * self.element_bits // 8
        num_rows = int(np.prod(extent[1:], dtype=np.int64))
        rows, index, inner = np.arange(num_rows), [], 1  # dim 1 runs fastest
        for n, step in zip(extent[1:], steps[1:]):
            index.append(rows // inner % n * step)
            inner *= n
        offsets = sum((i * s for i, s in zip(index, self.strides[1:])), np.zeros(num_rows, np.int64))
        if num_rows > 1:
            self._need_full_rows(row_bytes)
        smem_offsets = np.arange(num_rows * row_bytes // CHUNK, dtype=np.int64) * CHUNK
        smem_offsets.flags.writeable = False
        return _Plan(index, offsets, np.arange(row_bytes // CHUNK, dtype=np.int64) * CHUNK, smem_offsets)

    def _need_full_rows(self, row_bytes: int) -> None:
        if self.swizzle is not Swizzle.NONE and row_bytes < self.swizzle.span:
            raise NotImplementedError(
                f"tensor map: rows of {row_bytes} bytes in a swizzle of {self.swizzle.span}: where the hardware puts them "
                "is not established"
            )

    def _need_known(self) -> None:
        """NotImplementedError for what decodes, but whose boxes are not modelled."""
        if self.mode != "tiled":
            raise NotImplementedError("tensor map: im2col boxes are not modelled")
        if self.interleave:
            raise NotImplementedError(f"tensor map: boxes of interleave {self.interleave} bytes are not modelled")
        if _ELEMENTS[self.element].padded:
            raise NotImplementedError(f"tensor map: boxes of {self.element}, padded in shared memory, are not modelled")

    def _chunks(
        self, column: int, rows: np.ndarray, rows_within: np.ndarray | None, smem_offsets: np.ndarray
    ) -> "Tile":
        """The Tile of some rows: the byte offset of each row's column 0 from the address, and which ones are in bounds."""
        bits = self.element_bits
        if column * bits % 8:
            raise ValueError(f"tensor map: coordinate {column} in dim 0 is within a byte of {self.element}")
        columns = self._plan.columns + column * bits // 8  # [chunks of a row] bytes from column 0
        addresses = (self.address + rows[:, None] + columns).reshape(-1)
        width = -(-self.dims[0] * bits // 8)  # bytes
        if rows_within is None and columns[0] >= 0 and columns[-1] + CHUNK <= width:
            return Tile(self, addresses, smem_offsets, _all_true(len(addresses)), None)
        if rows_within is None:
            rows_within = _all_true(len(rows))
        whole = (columns >= 0) & (columns + CHUNK <= width)
        inside = (rows_within[:, None] & whole).reshape(-1)
        touched = (columns > -CHUNK) & (columns < width) & ~whole
        if not touched.any():
            return Tile(self, addresses, smem_offsets, inside, None)
        byte = columns[:, None] + np.arange(CHUNK)
        valid = rows_within[:, None, None] & ((byte >= 0) & (byte < width))
        return Tile(self, addresses, smem_offsets, inside, valid.reshape(-1, CHUNK))


class _Plan(NamedTuple):
    index: list[np.ndarray]  # per dim from 1 on: [rows] int, steps of the row from the coordinate
    rows: np.ndarray  # [rows] int64, bytes of the row from that of the coordinates
    columns: np.ndarray  # [chunks of a row] int64, bytes
    smem_offsets: np.ndarray  # [rows x chunks] int64


def gather4(tensor_map: TensorMap, column: int, rows: Sequence[int]) -> "Tile":
    """tile::gather4: four rows of a 2-D map of box (columns, 1), one below the other in shared memory.

    A row out of bounds reads as the fill. `nbytes` of the Tile, four boxes, is what complete_tx counts.
    """
    m = tensor_map
    if m.rank != 2 or m.box[1] != 1:
        raise ValueError(f"tensor map: gather4 and scatter4 need rank 2 and a box of one row, got box {m.box}")
    if len(rows) != 4:
        raise ValueError(f"gather4 and scatter4: 4 rows, got {len(rows)}")
    columns = m._plan.columns
    m._need_full_rows(len(columns) * CHUNK)
    index = np.array(rows, np.int64)
    within = (index >= 0) & (index < m.dims[1])
    smem_offsets = np.arange(4 * len(columns), dtype=np.int64) * CHUNK
    return m._chunks(column, index * m.strides[1], None if within.all() else within, smem_offsets)


def scatter4(tensor_map: TensorMap, column: int, rows: Sequence[int]) -> "Tile":
    """tile::scatter4: where the four rows in shared memory go; a row out of bounds is not written. As gather4."""
    return gather4(tensor_map, column, rows)


Find = Callable[[int, int], tuple[int, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Tile:
    """A box as chunks of 16 bytes, in the order of shared memory.

    Chunks are whole there and, in `addresses`, as far as they are in bounds: `inside` says which are altogether. `valid`,
    [n, 16] bool, says it per byte where the tensor's edge cuts chunks, else None.

    `find(low, high)`, for load and store, returns (address of the array's byte 0, uint8 array) of the memory that holds
    [low, high) or raises; the array's length is a multiple of 16 and its address, too.
    """

    map: TensorMap
    addresses: np.ndarray  # [n] int64, global address of the chunk, also where it is out of bounds
    smem_offsets: np.ndarray  # [n] int64, bytes from the box's first, not swizzled; ascending, dense
    inside: np.ndarray  # [n] bool
    valid: np.ndarray | None
    run_bytes: int = CHUNK

    @property
    def nbytes(self) -> int:
        """Of the box in shared memory: what complete_tx counts."""
        return len(self.addresses) * CHUNK

    def shared(self, base: int) -> np.ndarray:
        """[n] int64: the shared address of each chunk of a box at address `base`, swizzled. Chunks stay contiguous."""
        return swizzle(base + self.smem_offsets, self.map.swizzle)

    def span(self) -> tuple[int, int] | None:
        """[low, high) of the global addresses in bounds; None when there are none."""
        if self.valid is None:
            a = self.addresses[self.inside]
            return (int(a.min()), int(a.max()) + CHUNK) if len(a) else None
        n, byte = np.nonzero(self.valid)
        a = self.addresses[n] + byte
        return (int(a.min()), int(a.max()) + 1) if len(a) else None

    def load(self, find: Find) -> np.ndarray:
        """[n, 16] uint8: what a load writes to shared memory, with the fill and the conversion of tf32 and ftz types."""
        return self._filled(_converted(self.raw(find), self.map.element))

    def raw(self, find: Find) -> np.ndarray:
        """[n, 16] uint8: global memory as it is, 0 out of bounds; what a reduction combines with."""
        data = np.zeros((len(self.addresses), CHUNK), np.uint8)
        span = self.span()
        if span is None:
            return data
        base, array = find(*span)
        if self.inside.all():
            view, index = _elements(array, self.addresses - base)
            return view[index].view(np.uint8).reshape(-1, CHUNK)
        if self.inside.any():
            view, index = _elements(array, self.addresses[self.inside] - base)
            data[self.inside] = view[index].view(np.uint8).reshape(-1, CHUNK)
        for n, index in self._cut(base):
            data[n] = array[index]
        return data

    def store(self, find: Find, data: np.ndarray) -> None:
        """Writes [n, 16] uint8, in the order of the chunks, to global memory; bytes out of bounds are dropped."""
        span = self.span()
        if span is None:
            return
        base, array = find(*span)
        if self.inside.any():
            view, index = _elements(array, self.addresses[self.inside] - base)
            chunks = data if self.inside.all() else data[self.inside]
            view[index] = np.ascontiguousarray(chunks).view(view.dtype)
        for n, index in self._cut(base):
            array[index] = data[n]

    def _cut(self, base: int):
        """((chunk, byte) indices, array index) of the bytes in bounds of chunks that an edge cuts."""
        if self.valid is not None:
            n, byte = np.nonzero(self.valid & ~self.inside[:, None])
            yield (n, byte), self.addresses[n] - base + byte

    def _filled(self, data: np.ndarray) -> np.ndarray:
        if not self.map.fill_nan or (self.valid is None and self.inside.all()):
            return data
        valid = self.valid if self.valid is not None else np.repeat(self.inside[:, None], CHUNK, 1)
        return np.where(valid, data, _nan(self.map.element))


# ----- fields --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _decode(raw: bytes) -> TensorMap:
    w = struct.unpack("<16I", raw)

    def field(word: int, first: int, bits: int) -> int:
        return w[word] >> first & (1 << bits) - 1

    mode, rank, code = MODES.get(field(2, 0, 4)), field(2, 4, 3) + 1, field(2, 7, 4)
    if mode is None:
        raise ValueError(f"tensor map: mode: {field(2, 0, 4)} is neither tiled nor im2col; is this a tensor map?")
    if rank > 5:
        raise ValueError(f"tensor map: rank: must be 1 to 5, got {rank}")
    tf32 = field(2, 16, 1)
    element = TF32.get(code) if tf32 else (ELEMENTS[code] if code < len(ELEMENTS) else None)
    codes = field(2, 13, 2), field(2, 19, 2)
    for wrong, text in (
        (element is None, f"element type: unknown code {code}{' with the bit of tf32' if tf32 else ''}"),
        (field(2, 11, 2) == 3, "interleave: unknown code 3"),
        (field(2, 22, 1), "swizzle: a span of 96 bytes is not modelled"),
        (codes not in _SWIZZLES, f"swizzle: no known pattern of span code {codes[0]} and atom code {codes[1]}"),
        (field(2, 23, 9), f"word 2: unknown bits {w[2] & ~0x7FFFFF:#x}"),
        (field(7, 16, 16), f"word 7: unknown bits {w[7] & ~0xFFFF:#x}"),
        (field(13, 15, 9), f"word 13: unknown bits {w[13] & 0xFF8000:#x}"),
        (mode == "tiled" and w[15], f"word 15: unknown bits {w[15]:#x}"),
        (mode == "im2col" and w[15] >> 10, f"pixels per column: must be at most 1024, got {w[15] + 1}"),
    ):
        if wrong:
            raise ValueError(f"tensor map: {text}")
    strides = tuple((w[3 + i] | field(7, 4 * i, 4) << 32) * 16 for i in range(rank - 1))
    box, corners = (field(13, 24, 8) + 1, *(field(14, 8 * i, 8) + 1 for i in range(rank - 1))), ((), ())
    if mode == "im2col":
        box, bits = (box[0], w[15] + 1), _corner_bits(rank)
        corners = tuple(
            tuple(_signed(field(14, first + bits * i, bits), bits) for i in range(rank - 2)) for first in (0, 16)
        )
    return TensorMap(
        address=w[0] | w[1] << 32,
        element=element.name,
        dims=tuple(w[8 + i] + 1 for i in range(rank)),
        strides=(element.bits // 8, *strides),
        box=box,
        element_strides=tuple(field(13, 3 * i, 3) + 1 for i in range(rank)),
        swizzle=_SWIZZLES[codes],
        interleave=INTERLEAVES[field(2, 11, 2)],
        fill_nan=bool(field(2, 15, 1)),
        mode=mode,
        lower_corner=corners[0],
        upper_corner=corners[1],
        l2_promotion=L2_PROMOTIONS[field(2, 17, 2)],
    )


def _within(values: Sequence[int], most: int) -> bool:
    return all(1 <= v <= most for v in values)


def _corner_bits(rank: int) -> int:
    return {3: 16, 4: 8, 5: 5}.get(rank, 0)


def _signed(value: int, bits: int) -> int:
    return value - (value >> bits - 1 << bits)


# tensormap.replace: field -> (word, first bit, bits) of ordinal 0, and the bits from one ordinal to the next.
_REPLACED = {
    "rank": (2, 4, 3, 0),
    "box_dim": (13, 24, 8, 8),
    "global_dim": (8, 0, 32, 32),
    "element_stride": (13, 0, 3, 3),
    "elemtype": (2, 7, 4, 0),
    "interleave_layout": (2, 11, 2, 0),
    "swizzle_mode": (2, 13, 2, 0),
    "swizzle_atomicity": (2, 19, 2, 0),
    "fill_mode": (2, 15, 1, 0),
}
_MOST = {"elemtype": 15, "interleave_layout": 2, "swizzle_mode": 3, "swizzle_atomicity": 3, "fill_mode": 1}


def replaced(raw: bytes, field: str, value: int, ordinal: int = 0) -> bytes:
    """`tensormap.replace.tile.FIELD`: the 128 bytes with one field changed.

    field, value: as in PTX: global_address; rank (the instruction's value: one less); box_dim, global_dim, element_stride
    by ordinal; global_stride by ordinal, in bytes, from that of dim 1 on; elemtype, interleave_layout, swizzle_mode,
    swizzle_atomicity, fill_mode by code. ValueError for a value that the instruction does not take.
    """
    bits = int.from_bytes(raw[:64], "little")

    def put(word: int, first: int, width: int, new: int) -> None:
        nonlocal bits
        at = 32 * word + first
        bits = bits & ~(((1 << width) - 1) << at) | (new & (1 << width) - 1) << at

    if not 0 <= ordinal < 5 - (field == "global_stride"):
        raise ValueError(f"tensormap.replace: ordinal {ordinal} of {field}")
    if value < 0 or value > _MOST.get(field, value):
        raise ValueError(f"tensormap.replace: {field} does not take {value}")
    if field == "global_address":
        put(0, 0, 64, value)
    elif field == "global_stride":
        put(3 + ordinal, 0, 32, value >> 4)
        put(7, 4 * ordinal, 4, value >> 36)
    elif field == "elemtype" and value >= 11:  # tf32, tf32.ftz, then the packed ones; the others leave tf32's bit alone
        if value < 13:
            put(2, 16, 1, 1)
        put(2, 7, 4, value - 4 if value < 13 else value - 2)
    elif field in _REPLACED:
        word, first, width, step = _REPLACED[field]
        less = field in ("box_dim", "global_dim", "element_stride")
        put(word, first + step * ordinal, width, value - less)
        if field == "swizzle_mode":
            put(2, 22, 1, 0)
    else:
        raise ValueError(f"tensormap.replace: unknown field {field!r}")
    return bits.to_bytes(64, "little") + raw[64:]


# ----- data ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _all_true(n: int) -> np.ndarray:
    true = np.ones(n, bool)
    true.flags.writeable = False
    return true


def _elements(array: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(view of the array in the largest units that all chunks are aligned to, [n, units] index of the chunks in it)."""
    low = int(np.bitwise_or.reduce(offsets)) | CHUNK
    unit = low & -low
    if unit == CHUNK:
        return array.view("V16"), (offsets >> 4)[:, None]
    return array.view(f"u{unit}"), (offsets // unit)[:, None] + np.arange(CHUNK // unit)


def _converted(data: np.ndarray, element: str) -> np.ndarray:
    """[n, 16] uint8 after the conversion of a load: subnormals to signed zero, then to tf32 by round to nearest even."""
    if element not in ("f32.ftz", "tf32", "tf32.ftz"):
        return data
    x = data.view(np.uint32).astype(np.int64)
    if element.endswith("ftz"):
        x = np.where(x & 0x7F800000, x, x & 0x80000000)
    if element.startswith("tf32"):
        rounded = x + 0xFFF + (x >> 13 & 1) & 0xFFFFE000
        x = np.where(x & 0x7F800000 == 0x7F800000, x, rounded)  # infinities and NaNs as they are
    return x.astype(np.uint32).view(np.uint8)


def _nan(element: str) -> np.ndarray:
    """[16] uint8 of the canonical NaN; the hardware's own pattern for elements out of bounds is not documented."""
    bits = _ELEMENTS[element].bits
    value = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FF8000000000000}[bits]
    return np.full(CHUNK * 8 // bits, value, f"u{bits // 8}").view(np.uint8)
