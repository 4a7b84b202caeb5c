"""Thread-level pieces of the SM90 kernels: shared memory by address, bulk copies, conversion, fragment arithmetic."""

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def smem_tensor(addr: Int32, dtype, count: int) -> cute.Tensor:
    """`count` elements of 32 bits at the shared address `addr`, aligned to their size, as a tensor that vectorises."""
    ptr = cute.make_ptr(dtype, addr, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(ptr, cute.make_layout(count))


def load_smem_16b(addr: Int32, dtype=Uint32) -> cute.Tensor:
    """16 bytes of shared memory into registers [4] of a 32-bit type (ld.shared.v4)."""
    r = cute.make_rmem_tensor(4, dtype)
    cute.autovec_copy(smem_tensor(addr, dtype, 4), r)
    return r


def store_smem_16b(addr: Int32, r: cute.Tensor) -> None:
    """Registers [4] of a 32-bit type to 16 bytes of shared memory (st.shared.v4)."""
    cute.autovec_copy(r, smem_tensor(addr, r.element_type, 4))


def bulk_copy_to_smem(dst: Int32, src: Int64, num_bytes: int, mbar: Int32) -> None:
    """One lane's 1-D bulk copy global -> shared, 16-byte aligned; the bytes are counted on `mbar` (shared address)."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst, src, Int32(num_bytes), mbar],
    )


def e4m3_to_bf16(codes: cute.Tensor, scale: Float32) -> cute.Tensor:
    """16 e4m3 codes (registers [4] x 32 bit) times an fp32 scale -> registers [8] x 32 bit of bf16 pairs, in order.

    e4m3 -> f16 -> f32 is exact, the product is rounded once: bit-equal to bf16(float(code) * scale) for every scale.
    """
    values = cute.recast_tensor(codes, Float8E4M3FN).load().to(Float32) * scale
    bf16 = cute.make_rmem_tensor(16, BFloat16)
    bf16.store(values.to(BFloat16))
    return cute.recast_tensor(bf16, Uint32)


def e8m0_to_fp32(code: Uint32) -> Float32:
    """2^(code - 127); 0 is 2^-127, a subnormal, and 255 NaN."""
    bits = code << 23
    bits = cutlass.select_(code == 0, Uint32(0x00400000), bits)
    return Uint32(cutlass.select_(code == 255, Uint32(0x7FC00000), bits)).bitcast(Float32)


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


def set_registers(count: int) -> None:
    """Gives the calling warpgroup `count` registers a thread; 384 threads enter with 168 each."""
    if count > 168:
        cute.arch.setmaxregister_increase(count)
    else:
        cute.arch.setmaxregister_decrease(count)
