"""TMA tensor maps: the 128 bytes against what the DSL was asked for, boxes against element loops, swizzles against CuTe."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from mla_cute.emulator import tensormap as tm
from mla_cute.emulator.tensormap import Swizzle, TensorMap

ADDRESS = 0x7000_1234_5670


def raw_of(words: str) -> bytes:
    """128 bytes of "index:hex" 64-bit words, the others zero; the second half is what the DSL leaves there, anything."""
    values = [0] * 8
    for word in words.split():
        index, value = word.split(":")
        values[int(index)] = int(value, 16)
    return b"".join(v.to_bytes(8, "little") for v in values) + bytes(range(64))


def expected(element="bf16", dims=(576, 128), strides=(1168,), box=(64, 64), **other) -> TensorMap:
    size = next(e.bits for e in (*tm.ELEMENTS, *tm.TF32.values()) if e.name == element) // 8
    steps = other.pop("element_strides", (1,) * len(dims))
    other = {"address": ADDRESS, "l2_promotion": 128, **other}
    return TensorMap(element=element, dims=dims, strides=(size, *strides), box=box, element_strides=steps, **other)


# ----- the format: words that nvidia-cutlass-dsl 4.8.1 wrote ----------------------------------------------------------

SWIZZLE_WORDS = {
    Swizzle.B128: (64, "00246512", "3f"),
    Swizzle.B64: (32, "00244512", "1f"),
    Swizzle.B32: (16, "00242512", "0f"),
    Swizzle.NONE: (8, "00240512", "07"),
    Swizzle.B128_ATOM_32B: (64, "002c6512", "3f"),
    Swizzle.B128_ATOM_64B: (64, "003c6512", "3f"),
}
TYPE_WORDS = {  # 128 x 100 elements, pitch 256, box 64 bytes x 8
    "u8": (8, "0000001000040012"),
    "u16": (16, "0000002000040092"),
    "bf16": (16, "0000002000040512"),
    "f16": (16, "0000002000040312"),
    "f32": (32, "0000004000040392"),
    "tf32": (32, "0000004000050392"),
    "u32": (32, "0000004000040112"),
    "u64": (64, "0000008000240212"),
    "f64": (64, "0000008000240492"),
}
RANK_WORDS = (  # bf16, dims 1000 70 60 50 40, strides / 16 of all four 16-byte digits but the highest
    "1:0000000000040502 4:00000000000003e7 6:3f00000000000000",
    "1:2468acf100240512 4:00000045000003e7 6:3f00000000000000 7:0000000000000006",
    "1:2468acf100240522 2:00000000aaaaaaab 4:00000045000003e7 5:000000000000003b 6:3f00000000000000 7:0000000000000506",
    "1:2468acf100240532 2:e0000003aaaaaaab 4:00000045000003e7 5:000000310000003b 6:3f00000000000000 7:0000000000040506",
    "1:2468acf100240542 2:e0000003aaaaaaab 3:0000000066666667 4:00000045000003e7 5:000000310000003b 6:3f00000000000027 "
    "7:0000000002010506",
)
IM2COL = "0:0000700012345670 1:{} 2:{} 3:{} 4:000000130000003f 5:{} 6:{} 7:0000003f{}"
IM2COL_WORDS = {  # f16, c 64, w h d 20 30 40, n 5: rank, lower, upper, strides of c w h d n
    IM2COL.format(
        "0000000800244343", "000012c0000000a0", "2ee00", "000000270000001d", "1f00000000000004", "00000c41"
    ): (5, (1, 2, 3), (0, 0, 0), (1, 1, 1, 1, 1)),
    IM2COL.format(
        "0000000800244343", "000012c0000000a0", "2ee00", "000000270000001d", "1f00000000000004", "000077df"
    ): (5, (-1, -2, -3), (0, 0, 0), (1, 1, 1, 1, 1)),
    IM2COL.format(
        "0000000800244343", "000012c0000000a0", "2ee00", "000000270000001d", "1f00068800000004", "00000000"
    ): (5, (0, 0, 0), (0, 0, 0), (1, 2, 3, 4, 1)),
    IM2COL.format("0000000800244333", "000012c0000000a0", "0", "000000040000001d", "1f00000000000000", "fafbfefd"): (
        4,
        (-3, -2),
        (-5, -6),
        (1, 1, 1, 1),
    ),
    IM2COL.format("0000000800044323", "00000000000000a0", "0", "0000000000000004", "1f00000000000000", "fffbfffd"): (
        3,
        (-3,),
        (-5,),
        (1, 1, 1),
    ),
}


@pytest.mark.parametrize("mode", SWIZZLE_WORDS)
def test_decode_swizzle(mode):
    columns, low, box = SWIZZLE_WORDS[mode]
    raw = raw_of(f"0:{ADDRESS:x} 1:00000049{low} 4:0000007f0000023f 6:{box}00000000000000 7:3f")
    assert TensorMap.decode(raw) == expected(box=(columns, 64), swizzle=mode)
    assert TensorMap.decode(raw).encode() == raw[:64] + bytes(64)


@pytest.mark.parametrize("element", TYPE_WORDS)
def test_decode_element(element):
    bits, word = TYPE_WORDS[element]
    columns = 512 // bits
    raw = raw_of(f"0:{ADDRESS:x} 1:{word} 4:000000630000007f 6:{columns - 1:x}00000000000000 7:7")
    got = TensorMap.decode(raw)
    assert got == expected(element, (128, 100), (32 * bits,), (columns, 8))
    assert (got.element_bytes, got.box_bytes) == (bits // 8, 512)
    assert got.encode() == raw[:64] + bytes(64)


@pytest.mark.parametrize("rank", range(1, 6))
def test_decode_rank(rank):
    raw = raw_of(f"0:{ADDRESS:x} {RANK_WORDS[rank - 1]}")
    dims = (1000, 70, 60, 50, 40)[:rank]
    strides = tuple(16 * n for n in (0x2468ACF1, 0xAAAAAAAB, 0xE0000003, 0x66666667)[: rank - 1])
    assert TensorMap.decode(raw) == expected("bf16", dims, strides, (64, 7, 6, 5 if rank < 5 else 2, 3)[:rank])
    assert TensorMap.decode(raw).encode() == raw[:64] + bytes(64)


def test_decode_strides_of_36_bits():
    strides = tuple(16 * (n << 32 | n) for n in (1, 0xA, 0xF, 3))
    m = expected("u8", (1 << 32, 5, 6, 7, 8), strides, (256, 256, 1, 1, 2), element_strides=(1, 8, 3, 1, 2))
    raw = m.encode()
    assert raw[28:32] == bytes((0xA1, 0x3F, 0, 0))
    assert TensorMap.decode(raw) == m


@pytest.mark.parametrize(
    "element, low, stride, swizzle",
    [
        ("b4x16", "00046592", 8, Swizzle.B128),
        ("b4x16_p64", "00046612", 8, Swizzle.B128),
        ("b6x16_p32", "00046692", 12, Swizzle.B128),
    ],
)
def test_decode_packed(element, low, stride, swizzle):
    raw = raw_of(f"0:700012345660 1:{stride:08x}{low} 4:00000063000000ff 6:7f00000000000000 7:7")
    got = TensorMap.decode(raw)
    assert got == expected(element, (256, 100), (16 * stride,), (128, 8), address=0x700012345660, swizzle=swizzle)
    with pytest.raises(ValueError, match="no whole number of bytes"):
        _ = got.element_bytes
    if element == "b4x16":
        assert got.box_bytes == 512
    else:
        with pytest.raises(NotImplementedError, match=f"boxes of {element}"):
            got.tile((0, 0))


@pytest.mark.parametrize("words", IM2COL_WORDS)
def test_decode_im2col(words):
    rank, lower, upper, steps = IM2COL_WORDS[words]
    dims = (64, *(20, 30, 40)[: rank - 2], 5)
    strides = tuple(16 * n for n in (8, 0xA0, 0x12C0, 0x2EE00)[: rank - 1])
    got = TensorMap.decode(raw_of(words))
    assert got == expected(
        "f16",
        dims,
        strides,
        (32, 64),
        mode="im2col",
        swizzle=Swizzle.B64,
        lower_corner=lower,
        upper_corner=upper,
        element_strides=steps,
    )
    assert got.encode() == raw_of(words)[:64] + bytes(64)
    with pytest.raises(NotImplementedError, match="im2col boxes"):
        got.tile((0,) * rank)


@pytest.mark.parametrize(
    "bit, message",
    [
        (64, "rank: must be 3 to 5 for im2col, got 2"),
        (64 + 2, "mode: 6 is neither"),
        (64 + 6, "rank: must be 1 to 5, got 6"),
        (64 + 9, "element type: unknown code 14"),
        (64 + 16, "element type: unknown code 10 with the bit of tf32"),
        (64 + 11, None),
        (64 + 20, "swizzle: no known pattern of span code 3 and atom code 2"),
        (64 + 22, "span of 96 bytes"),
        (64 + 23, "word 2: unknown bits 0x800000"),
        (64 + 31, "word 2: unknown bits 0x80000000"),
        (7 * 32 + 16, "word 7: unknown bits 0x10000"),
        (13 * 32 + 15, "word 13: unknown bits 0x8000"),
        (15 * 32, "word 15: unknown bits 0x1"),
        (3, "address: must be a multiple of 16 bytes, got 0x700012345678"),
        (13 * 32 + 24, "box: dim 0 must be a multiple of 16 bytes, got 63 elements"),
        (13 * 32 + 30, "box: dim 0 must be at most the swizzle's 128 bytes, got 256"),
    ],
)
def test_decode_names_what_it_does_not_understand(bit, message):
    raw = expected(swizzle=Swizzle.B128).encode()
    flipped = int.from_bytes(raw, "little") ^ 1 << bit
    raw = flipped.to_bytes(128, "little")
    if bit == 64 + 9:  # bf16 is 10: with the third bit 14
        raw = tm.replaced(expected(box=(64, 64)).encode(), "elemtype", 10)
        raw = (int.from_bytes(raw, "little") | 1 << bit).to_bytes(128, "little")
    if bit == 64 + 11:  # interleave is decoded, its boxes are not known
        assert TensorMap.decode(raw).interleave == 16
        with pytest.raises(NotImplementedError, match="interleave 16 bytes"):
            TensorMap.decode(raw).tile((0, 0))
        return
    if bit == 13 * 32 + 30:
        raw = expected(box=(128, 64)).encode()
        raw = tm.replaced(raw, "swizzle_mode", 3)
    with pytest.raises(ValueError, match=message):
        TensorMap.decode(raw)


def test_decode_other_sizes():
    raw = expected().encode()
    assert TensorMap.decode(raw[:64]) == expected()
    with pytest.raises(ValueError, match="must have 128 bytes, got 96"):
        TensorMap.decode(raw[:96])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dims": (0, 128)}, "dims: must be 1 to 2\\^32"),
        ({"dims": (576,)}, "must have 1, 1 and 1 entries"),
        ({"box": (512, 64)}, "box: must be 1 to 256"),
        ({"strides": (2, 1160)}, "strides: must be multiples of 16"),
        ({"strides": (4, 1168)}, "strides: must begin with the 2 bytes"),
        ({"element_strides": (1, 9)}, "element_strides: must be 1 to 8"),
        ({"element": "bf15"}, "unknown type 'bf15'"),
        ({"element": "u16", "fill_nan": True}, "fill_nan: has no meaning for u16"),
        ({"mode": "im2col"}, "rank: must be 3 to 5"),
    ],
)
def test_bad_map(change, message):
    with pytest.raises(ValueError, match=message):
        replace(expected(), **change)


def test_replaced():
    """Each field of tensormap.replace, at the bits where ptxas puts it."""
    raw = expected("u8", (576, 128, 4, 5, 6), (592, 1024, 2048, 4096), (64, 64, 1, 1, 1)).encode()
    for args in (
        ("global_address", 0x1230),
        *(
            (f, n + 3, i)
            for f, n in (("box_dim", 13), ("global_dim", 1 << 31), ("element_stride", 0))
            for i in range(5)
        ),
        *(("global_stride", (i + 1) * 0x10_0000_0010, i) for i in range(4)),
        ("elemtype", 10),
        ("fill_mode", 1),
        ("swizzle_mode", 1),
    ):
        raw = tm.replaced(raw, *args)
    got = TensorMap.decode(raw)
    assert got == TensorMap(
        0x1230,
        "bf16",
        (2**31 + 3,) * 5,
        (2, *((i + 1) * 0x10_0000_0010 for i in range(4))),
        (16,) * 5,
        (3,) * 5,
        Swizzle.B32,
        fill_nan=True,
        l2_promotion=128,
    )
    types = [TensorMap.decode(tm.replaced(expected().encode(), "elemtype", i)).element for i in (7, 11, 12, 13)]
    assert types == ["f32", "tf32", "tf32.ftz", "b4x16"]
    raw = tm.replaced(tm.replaced(expected().encode(), "swizzle_mode", 3), "swizzle_atomicity", 1)
    assert TensorMap.decode(raw).swizzle is Swizzle.B128_ATOM_32B
    assert TensorMap.decode(tm.replaced(raw, "interleave_layout", 1)).interleave == 16
    assert tm.replaced(expected().encode(), "rank", 0)[8] >> 4 & 7 == 0
    for bad in (("swizzle_mode", 4), ("elemtype", 16), ("colour", 1), ("box_dim", 1, 5), ("global_stride", 16, 4)):
        with pytest.raises(ValueError, match="tensormap.replace"):
            tm.replaced(raw, *bad)


# ----- swizzles -------------------------------------------------------------------------------------------------------

TILE_PATTERN = [[c ^ r for c in range(8)] for r in range(8)]  # rows of 128 bytes, where chunk c of row r is


def test_swizzle_128_is_the_pattern_of_the_documentation():
    rows, chunks = np.indices((8, 8))
    got = tm.swizzle((rows * 128 + chunks * 16).ravel(), Swizzle.B128).reshape(8, 8)
    np.testing.assert_array_equal(got - rows * 128, np.array(TILE_PATTERN) * 16)


@pytest.mark.parametrize("mode", Swizzle)
def test_swizzle_permutes_chunks_within_its_span(mode):
    addresses = np.arange(1 << 13) + (3 << 24)
    got = tm.swizzle(addresses, mode)
    np.testing.assert_array_equal(np.sort(got), addresses)
    np.testing.assert_array_equal(tm.swizzle(got, mode), addresses)
    assert (got // mode.span == addresses // mode.span).all()
    assert (got % 16 == addresses % 16).all()


def test_swizzle_takes_the_pattern_from_the_address():
    """A box at 128 bytes past the period starts in the pattern's second row."""
    m = expected(swizzle=Swizzle.B128, box=(64, 8))
    np.testing.assert_array_equal(m.tile((0, 0)).shared(1024 + 128)[:8], 1024 + 128 + np.array(TILE_PATTERN[1]) * 16)
    np.testing.assert_array_equal(m.tile((0, 0)).shared(2048)[:8], 2048 + np.arange(8) * 16)


# ----- boxes ----------------------------------------------------------------------------------------------------------


class Memory:
    """A tensor's bytes, random; an access outside of them fails."""

    def __init__(self, m: TensorMap, seed: int = 0):
        self.size = (
            1 + sum((d - 1) * s for d, s in zip(m.dims[1:], m.strides[1:])) + m.dims[0] * m.element_bits // 8 - 1
        )
        room = np.random.default_rng(seed).integers(0, 256, -(-self.size // 16) * 16 + 32, np.uint8)
        skip = -room.ctypes.data % 16
        self.bytes = room[skip : skip + -(-self.size // 16) * 16]
        self.address = self.bytes.ctypes.data
        self.map = replace(m, address=self.address)
        self.spans = []

    def find(self, low: int, high: int):
        assert self.address <= low < high <= self.address + self.size
        self.spans.append((low, high))
        return self.address, self.bytes


def elements(m: TensorMap, coords):
    """(offset in global memory or None, offset in the box), bytes, of each element of a box, dim 0 fastest."""
    counts = [-(-n // s) for n, s in zip(m.box, m.element_strides)]
    counts[0] = m.box[0]
    for i, steps in enumerate(itertools.product(*(range(n) for n in reversed(counts)))):
        index = [
            c + step * (stride if d else 1)
            for d, (c, step, stride) in enumerate(zip(coords, steps[::-1], m.element_strides))
        ]
        within = all(0 <= x < dim for x, dim in zip(index, m.dims))
        yield (sum(x * s for x, s in zip(index, m.strides)) if within else None), i * m.element_bytes


def box_of(m: TensorMap, memory: np.ndarray, coords, fill: bytes) -> bytes:
    size = m.element_bytes
    return b"".join(fill if at is None else memory[at : at + size].tobytes() for at, _ in elements(m, coords))


CASES = {
    "rank1": (expected("f32", (100,), (), (64,)), [(0,), (-5,), (63,), (99,), (100,), (-64,)]),
    "bf16": (expected("bf16", (100, 37), (208,), (64, 8)), itertools.product((0, 33, -3, 99), (0, -3, 33, 37))),
    "u8": (expected("u8", (45, 20), (48,), (32, 4)), [(0, 0), (14, 17), (-1, -1), (7, 3), (44, 19)]),
    "u64": (expected("u64", (9, 5), (80,), (4, 3)), [(0, 0), (7, 3), (-1, -2), (1, 1)]),
    "rank3": (expected("f16", (20, 6, 5), (48, 320), (16, 3, 2)), [(4, 3, 3), (8, 5, 4), (-2, -1, -1), (5, 1, 0)]),
    "rank4": (
        expected("u16", (16, 3, 4, 2), (32, 96, 400), (8, 2, 2, 2)),
        [(0, 0, 0, 0), (9, 2, 3, 1), (-7, -1, -1, -1)],
    ),
    "rank5": (
        expected("u32", (6, 3, 3, 3, 2), (32, 96, 288, 1024), (4, 2, 2, 2, 2)),
        [(0, 0, 0, 0, 0), (3, 2, 2, 2, 1), (-1, -1, -1, -1, -1), (6, 0, 0, 0, 0)],
    ),
    "steps": (
        expected("bf16", (32, 20, 9), (64, 1280), (16, 7, 5), element_strides=(2, 3, 2)),
        [(0, 0, 0), (9, 14, 5), (-3, -3, -2), (31, 19, 8)],
    ),
    "broadcast": (expected("u8", (32, 4), (0,), (16, 4)), [(0, 0), (17, 1)]),
    "swizzled": (expected("bf16", (70, 10), (144,), (64, 4), swizzle=Swizzle.B128), [(0, 0), (64, 8), (8, -2)]),
}


@pytest.mark.parametrize("name", CASES)
def test_load_and_store(name):
    m, where = CASES[name]
    memory = Memory(m)
    m = memory.map
    for coords in where:
        before = memory.bytes.copy()
        tile = m.tile(coords)
        loaded = tile.load(memory.find)
        assert loaded.tobytes() == box_of(m, before, coords, bytes(m.element_bytes)), coords
        assert tile.nbytes == m.box_bytes == loaded.size
        np.testing.assert_array_equal(tile.smem_offsets, np.arange(0, m.box_bytes, 16))
        used = [at for at, _ in elements(m, coords) if at is not None]
        span = (memory.address + min(used), memory.address + max(used) + m.element_bytes) if used else None
        assert tile.span() == span, coords

        if name == "broadcast":
            continue  # which of several writes to a place is last is not defined
        data = np.random.default_rng(1).integers(0, 256, loaded.shape, np.uint8)
        want, flat = before.copy(), data.reshape(-1)
        for at, box in elements(m, coords):
            if at is not None:
                want[at : at + m.element_bytes] = flat[box : box + m.element_bytes]
        tile.store(memory.find, data)
        np.testing.assert_array_equal(memory.bytes, want)


def test_inside_and_valid_bytes():
    m = expected("bf16", (100, 37), (208,), (64, 8))
    tile = m.tile((40, 35))  # columns 40..103 of 100, rows 35..42 of 37
    want = np.zeros((8, 8), bool)
    want[:2, :7] = True  # chunk 7 begins at column 96: half of it exists
    np.testing.assert_array_equal(tile.inside.reshape(8, 8), want)
    assert tile.valid.sum() == 2 * 60 * 2
    assert m.tile((0, 0)).valid is None
    assert m.tile((0, 0)).inside.all()
    assert m.tile((0, 35)).valid is None
    assert m.tile((0, 35)).inside.sum() == 16
    far = m.tile((100, 0))
    assert far.span() is None
    assert not far.load(None).any()
    assert far.store(None, np.zeros((64, 16), np.uint8)) is None


def test_addresses():
    m = expected("bf16", (576, 128), (1168,), (16, 2))
    tile = m.tile((3, 5))
    np.testing.assert_array_equal(tile.addresses - ADDRESS - 5 * 1168 - 6, [0, 16, 1168, 1184])
    assert m.tile((-1, -1)).addresses[0] == ADDRESS - 1168 - 2


@pytest.mark.parametrize(
    "element, dtype, coord",
    [("bf16", torch.bfloat16, 94), ("f16", torch.float16, 96), ("f32", torch.float32, 98), ("f64", torch.float64, 99)],
)
def test_fill_nan(element, dtype, coord):
    bits = expected(element, (100, 4), (800,), (16, 2)).element_bits
    memory = Memory(expected(element, (100, 4), (800,), (16, 2), fill_nan=True))
    memory.bytes[:] = 0
    got = torch.frombuffer(bytearray(memory.map.tile((coord, 3)).load(memory.find)), dtype=dtype).view(2, 16)
    want = torch.ones(2, 16, dtype=torch.bool)
    want[0, : 100 - coord] = False
    assert torch.equal(got.isnan(), want), bits
    assert not got[~want].any()


def test_conversions():
    m = expected("tf32", (8, 1), (32,), (8, 1))
    memory = Memory(m)
    x = np.array([0x3F801000, 0x3F803000, 0x3F800FFF, 0xBF801001, 0x7F800000, 0x7F800001, 0x00000001, 0x7F7FFFFF], "u4")
    memory.bytes[:32] = x.view(np.uint8)
    got = memory.map.tile((0, 0)).load(memory.find).view(np.uint32).ravel()
    want = [0x3F800000, 0x3F804000, 0x3F800000, 0xBF802000, 0x7F800000, 0x7F800001, 0, 0x7F800000]
    np.testing.assert_array_equal(got, want)
    ftz = replace(memory.map, element="f32.ftz").tile((0, 0))
    memory.bytes[:8] = np.array([0x807FFFFF, 0x00800000], "u4").view(np.uint8)
    np.testing.assert_array_equal(ftz.load(memory.find).view(np.uint32).ravel()[:2], [0x80000000, 0x00800000])
    np.testing.assert_array_equal(ftz.raw(memory.find).view(np.uint32).ravel()[:2], [0x807FFFFF, 0x00800000])


def test_packed_fp4():
    memory = Memory(expected("b4x16", (96, 5), (48,), (64, 2), address=ADDRESS))
    rows = memory.bytes[: 5 * 48].reshape(5, 48)
    got = memory.map.tile((34, 4)).load(memory.find).reshape(2, 32)
    want = np.zeros((2, 32), np.uint8)
    want[0, :31] = rows[4, 17:]
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="within a byte"):
        memory.map.tile((1, 0))


def test_gather4_and_scatter4():
    memory = Memory(expected("bf16", (100, 37), (208,), (64, 1), swizzle=Swizzle.B128))
    m = memory.map
    rows = (36, -1, 3, 37)
    tile = tm.gather4(m, 40, rows)
    assert tile.nbytes == 4 * m.box_bytes == 512
    want = b"".join(box_of(m, memory.bytes, (40, r), bytes(2)) for r in rows)
    assert tile.load(memory.find).tobytes() == want
    np.testing.assert_array_equal(tile.shared(1024)[8:16], 1024 + 128 + np.array(TILE_PATTERN[1]) * 16)
    assert tm.gather4(m, 0, (3, 3, 5, 1)).load(memory.find).tobytes() == b"".join(
        memory.bytes[r * 208 : r * 208 + 128].tobytes() for r in (3, 3, 5, 1)
    )

    data = np.random.default_rng(2).integers(0, 256, (32, 16), np.uint8)
    want = memory.bytes.copy()
    for i, r in enumerate(rows):
        if 0 <= r < 37:
            want[r * 208 + 80 : r * 208 + 200] = data.reshape(4, 128)[i, :120]
    tm.scatter4(m, 40, rows).store(memory.find, data)
    np.testing.assert_array_equal(memory.bytes, want)


def test_bad_boxes():
    with pytest.raises(ValueError, match="2 coordinates for a tensor of rank 1"):
        expected("f32", (100,), (), (64,)).tile((0, 0))
    with pytest.raises(ValueError, match="a box of one row, got box \\(64, 64\\)"):
        tm.gather4(expected(), 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="4 rows, got 3"):
        tm.gather4(expected(box=(64, 1)), 0, (0, 1, 2))
    with pytest.raises(NotImplementedError, match="rows of 64 bytes in a swizzle of 128"):
        expected(box=(32, 64), swizzle=Swizzle.B128).tile((0, 0))
    expected(box=(32, 1), swizzle=Swizzle.B128).tile((0, 0))  # of one row there is only one way


def test_speed():
    """A 64 x 64 bf16 tile takes under 200 us: box, global memory, shared memory. Best of 20, for busy machines."""
    memory = Memory(expected("bf16", (576, 128), (1168,), (64, 64), swizzle=Swizzle.B128))
    shared = np.zeros(65536, np.uint8).view("V16")
    raw, best = memory.map.encode(), 1.0
    for _ in range(20):
        start = time.perf_counter()
        tile = TensorMap.decode(raw).tile((64, 64))
        shared[tile.shared(1024) >> 4] = tile.load(memory.find).view("V16").ravel()
        best = min(best, time.perf_counter() - start)
    assert best < 200e-6


# ----- what the DSL's host code writes --------------------------------------------------------------------------------

ASKED = [  # tensor, box with dim 0 last, swizzle; the DSL moves a dim of box 1 behind the others
    ("bf16_2d", (64, 64), (3, 4, 3)),
    ("bf16_2d", (32, 32), (2, 4, 3)),
    ("bf16_2d", (128, 16), (1, 4, 3)),
    ("bf16_2d", (5, 8), (0, 4, 3)),
    ("bf16_2d", (64, 64), (2, 5, 2)),
    ("bf16_2d", (64, 64), (1, 6, 1)),
    ("f32_4d", (2, 3, 4, 32), (3, 4, 3)),
    ("u8_3d", (3, 7, 64), (2, 4, 3)),
    ("f16_1d", (256,), (0, 4, 3)),
    ("e4m3_5d", (2, 3, 2, 4, 128), (3, 4, 3)),
]


def tensors() -> dict[str, torch.Tensor]:
    return {
        "bf16_2d": torch.zeros(200, 584, dtype=torch.bfloat16)[:, :576],
        "f32_4d": torch.zeros(3, 5, 9, 64),
        "u8_3d": torch.zeros(6, 11, 80, dtype=torch.uint8)[:, :, :77],
        "f16_1d": torch.zeros(1000, dtype=torch.float16),
        "e4m3_5d": torch.zeros(2, 3, 4, 5, 256, dtype=torch.float8_e4m3fn),
    }


ELEMENT_OF = {"bf16": "bf16", "f32": "f32", "u8": "u8", "f16": "f16", "e4m3": "u8"}


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_maps_of_compiled_host_code(arch, tmp_path):
    """Compiled, linked and run on CPU tensors: the maps that arrive in the launch say what make_tiled_tma_atom was told."""
    launch, args = launch_with_maps(arch, tmp_path)
    got = [TensorMap.decode(raw) for raw in launch.params[: len(ASKED)]]
    for m, raw, (name, box, swizzle) in zip(got, launch.params, ASKED):
        t = args[name]
        want = TensorMap(
            address=t.data_ptr(),
            element=ELEMENT_OF[name.split("_")[0]],
            dims=tuple(t.shape[::-1]),
            strides=tuple(s * t.element_size() for s in t.stride()[::-1]),
            box=box[::-1],
            element_strides=(1,) * t.dim(),
            swizzle=Swizzle(swizzle),
            l2_promotion=128,
        )
        assert m == want, name
        assert m.encode()[:64] == raw[:64], name


def launch_with_maps(arch: str, folder):
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import cpasync

    from mla_cute.emulator.host import HostFunction

    args = tensors()
    names = list(args)

    def atoms(tensors):
        made = []
        for name, box, swizzle in ASKED:
            layout = cute.make_composed_layout(
                cute.make_swizzle(*swizzle), 0, cute.make_ordered_layout(box, order=tuple(range(len(box)))[::-1])
            )
            op = cpasync.CopyBulkTensorTileG2SOp()
            made.append(cpasync.make_tiled_tma_atom(op, tensors[names.index(name)], layout, box)[0])
        return made

    @cute.kernel
    def kernel(maps: list):
        for i in cutlass.range_constexpr(len(maps)):
            cpasync.prefetch_descriptor(maps[i])

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, e: cute.Tensor):
        kernel(atoms([a, b, c, d, e])).launch(grid=[1, 1, 1], block=[32, 1, 1])

    kinds = {"bf16": cutlass.BFloat16, "f32": cutlass.Float32, "u8": cutlass.Uint8, "f16": cutlass.Float16}
    kinds["e4m3"] = cutlass.Float8E4M3FN
    fakes = []
    for name, t in args.items():
        multiple = 16 // t.element_size()
        strides = (*(cute.sym_int(divisibility=multiple) for _ in range(t.dim() - 1)), 1)
        shape = tuple(cute.sym_int() for _ in range(t.dim()))
        fakes.append(cute.runtime.make_fake_tensor(kinds[name.split("_")[0]], shape, stride=strides, assumed_align=16))
    compiled = cute.compile(host, *fakes, options=f"--gpu-arch {arch} --enable-tvm-ffi")
    path = folder / "maps.o"
    compiled.export_to_c(str(path), function_name="maps")
    call = HostFunction(path, "maps", lambda _: [128] * len(ASKED), arch=arch)
    return call(*args.values())[0], args


@pytest.mark.compile
def test_swizzles_are_those_of_cute():
    from cutlass import cute

    got = {}
    places = [16 * (37 * i % 256) for i in range(64)]  # chunks all over 4 KiB

    def evaluate():
        for mode in Swizzle:
            layout = cute.make_composed_layout(cute.make_swizzle(*mode.value), 0, cute.make_layout(4096))
            got[mode] = [layout(place) for place in places]

    @cute.jit
    def host():
        evaluate()

    cute.compile(host, options="--gpu-arch sm_90a")
    for mode in Swizzle:
        assert got[mode] == tm.swizzle(np.array(places), mode).tolist(), mode
