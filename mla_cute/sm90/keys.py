"""Keys and queries in fp16, as the Hopper kernels of sparse decode multiply them: a lane's part of a record, in registers.

K'[t] = K[t] / 2^x(t), x(t) a power of two for each key, which the logit and P absorb; Q / Q_SCALE. A lane holds 16 consecutive
columns of every 64 of its keys where the MMA's k-steps want others: Q's columns are put in that order instead (`query_words`).
"""

import cutlass
from cutlass import Boolean, Float32, Uint32, cute

from ..kv_cache import KVFormat
from .helpers import bf16_to_fp16, fp16_pair, mul_bf16x2, nan_if_inf

Q_SCALE = 16.0  # Q is divided by it to fit into fp16: values below 2 ** 20, in steps of 2 ** -20
Q_SCALE_INVERSE = 0x3D803D80  # 1 / Q_SCALE, a pair of bf16
MIN_EXPONENT = 67  # of a key, biased: scales below 2 ** -60 lose bits


class KeyConversion:
    """Methods of the kernels; self.fmt is the cache's layout."""

    fmt: KVFormat

    def to_fragment(self, fragment: cute.Tensor, r: int, k) -> None:
        """Pairs of columns of a lane's key r, two a k-step, into their place among the registers of the fragment's k-steps."""
        words = cute.recast_tensor(fragment, Uint32)
        for s in range(cute.size(words) // 4):
            for h in (0, 1):  # 4 columns of k-step s are 2 pc, 2 pc + 1 (h = 0) and 2 pc + 8, 2 pc + 9 of its 16
                words[4 * s + 2 * h + r] = k[2 * s + h]

    def exponent_of(self, fields: list) -> Uint32:
        """The least exponent so that no value of V leaves fp16's range: 448 * scale / 2 ** (exponent - 127) < 7168."""
        top = Uint32(MIN_EXPONENT)
        for field in fields:
            top = cutlass.max(top, field)
        return top - 3

    def fp16_scale(self, field: Uint32, exponent: Uint32) -> Uint32:
        """A scale of e8m0, its 8 bits, over 2 ** (exponent - 127), as a pair of fp16: from 2 ** -24 on exactly, else 0."""
        bits = (field + 127 - cutlass.min(exponent, field + 127)) << 23
        return fp16_pair(Uint32(cutlass.select_(field == 255, Uint32(0x7FC00000), bits)).bitcast(Float32))

    def rope_exponent(self, words: list) -> Uint32:
        """The least exponent so that a key's rope / 2 ** (exponent - 127) stays below 2 ** 16. words: a lane's part of it."""
        largest = Uint32(0)
        for word in words:
            largest = cutlass.max(largest, cutlass.max(word & 0x7FFF0000, (word << 16) & 0x7FFF0000))
        for offset in (1, 2):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
        return (largest >> 23) - cutlass.min(largest >> 23, Uint32(15))

    def rope_to_bf16(self, codes: list[cute.Tensor], exponent: Uint32) -> list:
        """[as many as `codes` have words] bf16 pairs of rope over 2 ** (exponent - 127), exactly. Rope that is no part of V
        stays so, with bf16's range."""
        inverse = (254 - exponent) << 7
        inverse = inverse | (inverse << 16)
        return [mul_bf16x2(words[i], inverse) for words in codes for i in range(cute.size(words))]

    def query_words(self, chunks: list[cute.Tensor], i: int, is_bf16: Boolean | bool) -> cute.Tensor:
        """Registers [4]: Q / Q_SCALE of k-step s = i / 2 (of two) and h = i % 2, in fp16, or as bf16 where that is asked for.

        chunks [j] of 8 columns, 16 j + 8 (s / 2) on, of rope 32 (s / 2) + 8 j on. Position 16 s + 8 h + 2 j + e gets column
        16 j + 4 s + 2 h + e, of rope 32 (s / 2) + 8 j + 4 (s % 2) + 2 h + e: in that order lane pc = j holds its columns of K.
        """
        words = cute.make_rmem_tensor(4, Uint32)  # pairs of columns
        for j in (0, 1, 2, 3):
            words[j] = mul_bf16x2(chunks[j][i], Uint32(Q_SCALE_INVERSE))
        if is_bf16 is True:
            return words
        fp16 = cute.make_rmem_tensor(4, Uint32)
        bf16_to_fp16(words, fp16)
        for j in (0, 1, 2, 3):
            pair = nan_if_inf(fp16[j])  # so that what fp16 cannot hold is seen in the result
            if is_bf16 is not False:
                pair = cutlass.select_(is_bf16, words[j], pair)
            fp16[j] = pair
        return fp16


def over_keys(values: list, lane, op) -> list:
    """Values of heads, over a lane's keys -> fewer of them, over the warp's 16 keys: of n heads n / 8 each, at least one.

    Lanes that differ in g = lane / 4 hold other keys of the same heads: each step halves the heads and doubles the keys.
    The lane's bits 16, 8, 4 that halved them are the upper bits of its heads' places in `values`.
    """
    for offset in (16, 8, 4):
        if len(values) == 1:
            values = [op(values[0], cute.arch.shuffle_sync_bfly(values[0], offset=offset))]
            continue
        upper = (lane & offset) != 0
        half = len(values) // 2
        kept = [cutlass.select_(upper, values[i + half], values[i]) for i in range(half)]
        sent = [cutlass.select_(upper, values[i], values[i + half]) for i in range(half)]
        values = [op(k, cute.arch.shuffle_sync_bfly(s, offset=offset)) for k, s in zip(kept, sent)]
    return values
