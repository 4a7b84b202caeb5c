"""Thread-level pieces of the SM90 kernels: shared memory by address, bulk copies, conversion, fragment arithmetic."""

import cutlass
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.arch.nvvm_wrappers import inline_ptx


def bulk_copy_to_smem(dst: Int32, src: Int64, num_bytes: Int32, mbar: Int32) -> None:
    """One lane's 1-D bulk copy global -> shared, 16-byte aligned; the bytes are counted on `mbar` (shared address)."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst, src, num_bytes, mbar],
    )


def bulk_copy_to_peer(dst: Int32, src: Int32, num_bytes: Int32, mbar: Int32, rank: Int32) -> None:
    """One lane's bulk copy of shared memory to `dst` of the cluster's CTA `rank`; the bytes are counted on its `mbar`."""
    inline_ptx(
        "{ .reg .b32 d, m; mapa.shared::cluster.u32 d, {$r0}, {$r4}; mapa.shared::cluster.u32 m, {$r3}, {$r4}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [{$r1}], {$r2}, [m]; }",
        read_only_args=[dst, src, num_bytes, mbar, rank],
    )


def store_to_peer(dst: Int32, words: cute.Tensor, mbar: Int32, rank: Int32) -> None:
    """The same of registers [4], [2] or [1]."""
    n = cute.size(words)
    vector, names = f".v{n}" if n > 1 else "", ", ".join(f"{{$r{3 + i}}}" for i in range(n))
    names = f"{{{names}}}" if n > 1 else names
    inline_ptx(
        "{ .reg .b32 d, m; mapa.shared::cluster.u32 d, {$r0}, {$r2}; mapa.shared::cluster.u32 m, {$r1}, {$r2}; "
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [d], {names}, [m]; }}",
        read_only_args=[dst, mbar, rank, *(words[i] for i in range(n))],
    )


def copy_async_8b(dst: Int32, src: Int64, num_bytes: Uint32) -> None:
    """One lane's asynchronous copy global -> shared of 8 bytes, or of 0, then zeros arrive and `src` is not read."""
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 8, {$r2};", read_only_args=[dst, src, num_bytes])


def wait_for_peers(mbar: Int32) -> None:
    """Until the first phase of a barrier in shared memory is complete, by arrivals and bytes of any CTA of the cluster."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
        "@!done bra again; }",
        read_only_args=[mbar],
    )


def e4m3_to_fp16(codes: cute.Tensor, scale: Uint32) -> cute.Tensor:
    """e4m3 codes (registers [n] of four) times a scale (the same fp16 twice) -> registers [2 n] of fp16 pairs, in order.

    A code is exact in fp16; the product is rounded once.
    """
    fp16 = cute.make_rmem_tensor(4 * cute.size(codes), Float16)
    fp16.store(cute.recast_tensor(codes, Float8E4M3FN).load().to(Float16))
    words = cute.recast_tensor(fp16, Uint32)
    for i in range(cute.size(words)):
        words[i] = mul_fp16x2(words[i], scale)
    return words


def bf16_to_fp16(words: cute.Tensor, out: cute.Tensor) -> None:
    """Registers of bf16 pairs -> registers `out` of fp16 pairs; what is too large becomes inf."""
    for i in range(cute.size(out)):
        code = (
            "{ .reg .b32 low, high; shl.b32 low, {$r0}, 16; and.b32 high, {$r0}, 0xFFFF0000; "
            "cvt.rn.f16x2.f32 {$w0}, high, low; }"
        )
        out[i] = inline_ptx(code, write_only_types=[Uint32], read_only_args=[words[i]])


def fp16_pair(x: Float32) -> Uint32:
    """x as fp16, twice."""
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = x, x
    fp16 = cute.make_rmem_tensor(2, Float16)
    fp16.store(pair.load().to(Float16))
    return cute.recast_tensor(fp16, Uint32)[0]


def mul_fp16x2(a: Uint32, b: Uint32) -> Uint32:
    """Product of two pairs of fp16."""
    return inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def mul_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Product of two pairs of bf16."""
    code = "{ .reg .b32 b; mov.b32 b, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, b; }"  # b may be a literal, which mul does not take
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[a, b])


def store_matrices(address: Int32, words: cute.Tensor) -> None:
    """stmatrix of four 8 x 8 matrices of 16 bits; `address` is that of a row of one of them."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, words[0], words[1], words[2], words[3]],
    )


def nan_if_inf(pair: Uint32) -> Uint32:
    """x * 0 + x of both fp16 values: x where it is finite, else NaN."""
    code = "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 {$w0}, {$r0}, zero, {$r1}; }"
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[pair, pair])


def fragment_row(thread: Int32) -> Int32:
    """Row of a warpgroup thread's first accumulator half in a 64-row WGMMA tile; the second half is 8 rows below."""
    return thread // 32 * 16 + thread % 32 // 4


def quad_transpose(words: list, lane: Int32) -> list:
    """4 x 4 within each quad: lane i (of 4) gives words [4] and gets word i of lanes 0, 1, 2, 3."""
    for offset in (1, 2):
        upper = (lane & offset) != 0
        new = list(words)
        for low in [i for i in range(4) if not i & offset]:
            sent = cutlass.select_(upper, words[low], words[low + offset])
            got = cute.arch.shuffle_sync_bfly(sent, offset=offset)
            new[low] = cutlass.select_(upper, got, words[low])
            new[low + offset] = cutlass.select_(upper, words[low + offset], got)
        words = new
    return words


def barrier_any(barrier_id: Int32, num_threads: int, predicate) -> Uint32:
    """Barrier of `num_threads` threads; 1 if the predicate holds in any of them, else 0."""
    code = (
        "{ .reg .pred mine, any; setp.ne.u32 mine, {$r0}, 0; "
        f"barrier.cta.red.or.pred any, {{$r1}}, {num_threads}, mine; "
        "selp.u32 {$w0}, 1, 0, any; }"
    )
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[Uint32(predicate), Int32(barrier_id)])


def divide(a: Uint32, b: Uint32) -> Uint32:
    """a / b without signs, which `//` of these types computes with them: half the instructions."""
    return inline_ptx("div.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def opaque(x):
    """x, Int32 or Int64, which the compiler takes for a value that only a register can give."""
    code = "mov.b64 {$w0}, {$r0};" if isinstance(x, Int64) else "mov.b32 {$w0}, {$r0};"
    return inline_ptx(code, write_only_types=[type(x)], read_only_args=[x])


def add_shared(address: Int32, value: Int32) -> Int32:
    """Atomic addition in shared memory; returns what was there."""
    code = "{ .reg .b32 v; mov.b32 v, {$r1}; atom.relaxed.cta.shared.add.u32 {$w0}, [{$r0}], v; }"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[address, value])


def load_acquire_gpu(address: Int64) -> Int64:
    """64 bits of global memory: when another CTA has released them, what it wrote before is visible from here on."""
    return inline_ptx("ld.acquire.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def exchange_gpu(address: Int64, value: Int64) -> Int64:
    """Atomic exchange in global memory, release (also of what a barrier has ordered before it) and acquire."""
    code = "atom.acq_rel.gpu.global.exch.b64 {$w0}, [{$r0}], {$r1};"
    return inline_ptx(code, write_only_types=[Int64], read_only_args=[address, value])


def store_relaxed_gpu(address: Int64, value: Int64) -> None:
    """64 bits to global memory, of which atomics are used elsewhere."""
    inline_ptx("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def add_product(x: Float32, y: Float32, weight: Float32) -> Float32:
    """x + y * weight, the product rounded: unlike a fused multiply-add symmetric in x = x' * weight' and y * weight."""
    code = "{ .reg .f32 p; mul.rn.f32 p, {$r1}, {$r2}; add.rn.f32 {$w0}, {$r0}, p; }"
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[x, y, weight])
