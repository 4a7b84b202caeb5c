"""Thread-level pieces of the SM100 kernels: tensor memory and its tensor core, TMA by address, conversion.

One instruction each, as inline PTX, with plain addresses: of shared memory (Int32), tensor memory (Int32: lane in the upper 16
bits, column of 32 bits in the lower), global memory (Int64). What orders them, fences and barriers, stands in the kernel.
"""

import cutlass
from cutlass import BFloat16, Float16, Float32, Int16, Int32, Int64, Uint32, cute
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

TMEM_COLUMNS = 512
EVICT_LAST = 0x14F0000000000000  # L2 policy
SWIZZLE_64B, SWIZZLE_128B = 4, 2  # layout codes of a shared memory descriptor


# ---- pairs of CTAs: the even one, of rank 0, has the thread that issues for both ----


def in_leader(mbar: cute.Pointer) -> Int32:
    """Cluster address of the same mbarrier in the pair's first CTA."""
    code = "mapa.shared::cluster.u32 {$w0}, {$r0}, 0;"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[Int32(mbar.toint())])


def arrive_leader(mbar: cute.Pointer) -> None:
    """An arrival there; whoever waits for it with `wait_cluster` sees what came before."""
    inline_ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[in_leader(mbar)])


def expect_leader(mbar: cute.Pointer, num_bytes: Int32) -> None:
    """An arrival there that expects so many bytes of this CTA's copies."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [{$r0}], {$r1};",
        read_only_args=[in_leader(mbar), num_bytes],
    )


@cute.jit
def wait_cluster(mbar: cute.Pointer, parity: Int32):
    """Waits for a phase to which other CTAs contribute."""
    code = (
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], {$r1}; "
        "selp.u32 {$w0}, 1, 0, p; }"
    )
    address, done = Int32(mbar.toint()), Uint32(0)
    while done == 0:
        done = inline_ptx(code, write_only_types=[Uint32], read_only_args=[address, parity])


# ---- tensor memory. ctas: 1, or 2 when the pair does it together ----


def tmem_alloc(slot: Int32, ctas: int) -> None:
    """One warp: all 512 columns; their address goes to shared memory at `slot`."""
    inline_ptx(
        f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [{{$r0}}], {TMEM_COLUMNS}; "
        f"tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;",
        read_only_args=[slot],
    )


def tmem_free(tmem: Int32, ctas: int) -> None:
    """One warp: gives the 512 columns back, which nobody uses any more."""
    inline_ptx(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 {{$r0}}, {TMEM_COLUMNS};", read_only_args=[tmem])


def tmem_load(tmem: Int32, count: int, shape: str = "32x32b", dtype=Float32) -> cute.Tensor:
    """A warp's part of tensor memory into `count` registers of 32 bits.

    shape 32x32b: lane l has `count` columns of tensor memory's lane l; 16x256b: of 16 lanes, an accumulator fragment: lane
    4 g + c has at i the row g + 8 (i // 2 % 2), column 8 (i // 4) + 2 c + i % 2. Valid behind `tmem_wait_load`.
    """
    repeat = count // {"32x32b": 1, "16x256b": 4}[shape]
    outs = ", ".join(f"{{$w{i}}}" for i in range(count))
    words = inline_ptx(
        f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{ {outs} }}, [{{$r0}}];",
        write_only_types=[dtype] * count,
        read_only_args=[tmem],
    )
    r = cute.make_rmem_tensor(count, dtype)
    for i in range(count):
        r[i] = words[i]
    return r


def tmem_store(tmem: Int32, r: cute.Tensor) -> None:
    """Registers to as many columns of each lane (32x32b). Done behind `tmem_wait_store`."""
    count = cute.size(r)
    ins = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{{$r0}}], {{ {ins} }};",
        read_only_args=[tmem, *(r[i] for i in range(count))],
    )


def tmem_wait_load() -> None:
    inline_ptx("tcgen05.wait::ld.sync.aligned;")


def tmem_wait_store() -> None:
    inline_ptx("tcgen05.wait::st.sync.aligned;")


def tmem_fence_before() -> None:
    """In front of an arrival that hands tensor memory on."""
    inline_ptx("tcgen05.fence::before_thread_sync;")


def tmem_fence_after() -> None:
    """Behind the wait for one."""
    inline_ptx("tcgen05.fence::after_thread_sync;")


# ---- its tensor core ----


def smem_descriptor(addr: Int32, swizzle: int, leading_bytes: int, stride_bytes: int) -> Int64:
    """Of an operand in shared memory. K-major: 8 rows are `stride_bytes` apart. MN-major: 8 of K are `stride_bytes` apart, the
    rows of one swizzle width and the next `leading_bytes`. Add n // 16 to go n bytes on."""
    constant = leading_bytes // 16 << 16 | stride_bytes // 16 << 32 | 1 << 46 | swizzle << 61
    return Int64(addr >> 4) | Int64(constant - (constant >> 63 << 64))


def instruction_descriptor(m: int, n: int, b_is_mn_major: bool) -> int:
    """D [m, n] fp32 = A [m, 16] B [n, 16] of bf16, A K-major."""
    return 1 << 4 | 1 << 7 | 1 << 10 | int(b_is_mn_major) << 16 | n // 8 << 17 | m // 16 << 24


def mma(tmem_d: Int32, a, b: Int64, instruction: int, accumulate, ctas: int) -> None:
    """One thread: D (+)= A B; with one CTA weight-stationary. a: Int32, an address of tensor memory, or Int64, a descriptor."""
    a_operand = "[{$r1}]" if isinstance(a, Int32) else "{$r1}"
    name = "mma.ws.cta_group::1" if ctas == 1 else "mma.cta_group::2"
    inline_ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r4}, 0; "
        f"tcgen05.{name}.kind::f16 [{{$r0}}], {a_operand}, {{$r2}}, {{$r3}}, p; }}",
        read_only_args=[tmem_d, a, b, Int32(instruction), Int32(accumulate)],
    )


def copy_to_tmem(tmem: Int32, source: Int64, ctas: int) -> None:
    """One thread: 128 rows of 32 bytes of shared memory (a descriptor) to 128 lanes, 8 columns; in both CTAs of a pair."""
    inline_ptx(f"tcgen05.cp.cta_group::{ctas}.128x256b [{{$r0}}], {{$r1}};", read_only_args=[tmem, source])


def commit(mbar: cute.Pointer, ctas: int) -> None:
    """One thread: an arrival at the mbarrier (of both CTAs) when all that this thread has given the tensor core is done."""
    multicast, mask = (".multicast::cluster", ", {$r1}") if ctas == 2 else ("", "")
    inline_ptx(
        f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [{{$r0}}]{mask};",
        read_only_args=[Int32(mbar.toint()), *([Int16(3)] if ctas == 2 else [])],
    )


# ---- TMA ----


def prefetch_map(tensor_map: Int64) -> None:
    inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map])


def gather4(dst: Int32, tensor_map: Int64, column, rows: cute.Tensor, mbar: Int32, ctas: int = 1) -> None:
    """One thread: four rows [4] of a 2-D map with boxes of one row, one behind the other; a row out of bounds is zeros.

    ctas 2: mbar is a cluster address, in either CTA of the pair.
    """
    space = "cta" if ctas == 1 else "cluster"
    inline_ptx(
        f"cp.async.bulk.tensor.2d.shared::{space}.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::{ctas}"
        ".L2::cache_hint [{$r0}], [{$r1}, { {$r2}, {$r3}, {$r4}, {$r5}, {$r6} }], [{$r7}], {$r8};",
        read_only_args=[dst, tensor_map, Int32(column), *(rows[i] for i in range(4)), mbar, Int64(EVICT_LAST)],
    )


def tile_load(dst: Int32, tensor_map: Int64, coordinates: list, mbar: Int32, ctas: int = 1) -> None:
    """One thread: a box of a 4-D map to shared memory. ctas as in `gather4`."""
    form = "shared::cta.global.tile.mbarrier::complete_tx::bytes"
    if ctas == 2:
        form = "shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
    inline_ptx(
        f"cp.async.bulk.tensor.4d.{form} [{{$r0}}], [{{$r1}}, {{ {{$r2}}, {{$r3}}, {{$r4}}, {{$r5}} }}], [{{$r6}}];",
        read_only_args=[dst, tensor_map, *(Int32(x) for x in coordinates), mbar],
    )


def tile_store(tensor_map: Int64, coordinates: list, src: Int32) -> None:
    """One thread: a box from shared memory to a 4-D map, in this thread's bulk group."""
    inline_ptx(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [{$r0}, { {$r1}, {$r2}, {$r3}, {$r4} }], [{$r5}];",
        read_only_args=[tensor_map, *(Int32(x) for x in coordinates), src],
    )


# ---- conversion ----


def e4m3_to_bf16(word: Uint32) -> tuple:
    """Four e4m3 codes -> two registers of bf16 pairs, exactly."""
    code = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.bf16x2.e4m3x2 {$w0}, low; cvt.rn.bf16x2.e4m3x2 {$w1}, high; }"
    )
    return inline_ptx(code, write_only_types=[Uint32, Uint32], read_only_args=[word])


def mul_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Product of two pairs of bf16."""
    return inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def fma_bf16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """a * b + c of pairs of bf16, rounded once."""
    return inline_ptx("fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, c])


def pack_pair(low: Float32, high: Float32, dtype) -> Uint32:
    """A pair of bf16 or fp16."""
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = low, high
    packed = cute.make_rmem_tensor(2, dtype)
    packed.store(pair.load().to(dtype))
    return cute.recast_tensor(packed, Uint32)[0]


def bf16_pair(low: Float32, high: Float32) -> Uint32:
    return pack_pair(low, high, BFloat16)


def fp16_pair(low: Float32, high: Float32) -> Uint32:
    return pack_pair(low, high, Float16)


def opaque(x: Int32) -> Int32:
    """x, of which the compiler knows nothing before this place."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def advance(slot: Int32, phase: Int32, slots: int) -> tuple[Int32, Int32]:
    """The next slot of a ring and the parity of its use."""
    wraps = slot + 1 == slots
    return cutlass.select_(wraps, Int32(0), slot + 1), cutlass.select_(wraps, phase ^ 1, phase)
