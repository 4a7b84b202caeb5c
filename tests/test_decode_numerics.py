"""The range and precision of the Hopper kernel: keys in fp16 over a power of two of their own, maxima that may stand still.

Each against attention in fp64 on keys that nothing rounded, most also against the reference, whose keys are bf16.
"""

import dataclasses
import math

import pytest
import torch
from decode_numerics import Call, Tokens, rms

from mla_cute import reference
from mla_cute.kv_cache import FORMATS, MODEL1, V32
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, assert_close

pytestmark = pytest.mark.emulate
BOTH = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
# Errors of out by Σ p |v|: rounding it to bf16 makes 2^-8 at most, rounding P and V to fp16 2^-11 each.
RELATIVE = 2.0**-8 + 2.0**-10


def check(call: Call, lse_error=1e-5, with_reference=True, **how):
    """with_reference: its tolerances are for values as small as those of keys in use, and for scales that are powers of two."""
    out, lse = call.emulate(**how)
    oracle = call.oracle()
    assert not out.isnan().any() and not lse.isnan().any()
    assert oracle.relative(out) < RELATIVE
    assert oracle.lse_error(lse) < lse_error
    if with_reference:
        for ours, theirs, tolerance in zip((out, lse), call.reference(), (SPARSE_DECODE_OUT, SPARSE_DECODE_LSE)):
            assert_close(ours, theirs, **tolerance)
    return out, lse, oracle


def exponents(spread: int, *shape: int) -> torch.Tensor:
    """2^e, e uniform in -spread .. spread; both ends are among them."""
    e = torch.randint(-spread, spread + 1, shape, generator=torch.Generator().manual_seed(6)).float()
    e.view(-1)[0], e.view(-1)[-1] = spread, -spread
    return torch.exp2(e)


# ---- scales ----


@BOTH
@pytest.mark.parametrize("power", [-110, -60, -30, -10, 10, 20, 60])
def test_scales_far_from_one(fmt, power):
    """The same factor on all: the exponents of the keys carry it. What scales below 2^-60 lose is less than 2^-70."""
    tokens = Tokens.draw(fmt, 100)
    tokens.scales *= 2.0**power
    if fmt is MODEL1 and power > 20:
        tokens.rope *= 2.0 ** (power - 20)  # which shares its exponent with the latent
    call = Call.draw(tokens, [90, 30]).by_rope_alone()
    if fmt is MODEL1 and power > 20:
        call.scale *= 2.0 ** (20 - power)
    out, _ = call.emulate()
    oracle = call.oracle()
    floor = 2.0**-70 if fmt is V32 else 2.0**-30 * float(tokens.rope.abs().max())
    assert (oracle.out_error(out) <= RELATIVE * oracle.weight + floor).all()
    assert oracle.out.abs().max() > floor or power == -110


@BOTH
@pytest.mark.parametrize("spread", [4, 12])
@pytest.mark.parametrize("between", ["tokens", "tiles", "both"])
def test_scales_that_differ(fmt, between, spread):
    """By 2^24 between the tiles of a token or between tokens: no value loses more than rounding, nor does a small one near a
    large one."""
    tokens = Tokens.draw(fmt, 100)
    n, tiles = tokens.scales.shape
    tokens.scales *= exponents(spread, *{"tokens": (n, 1), "tiles": (1, tiles), "both": (n, tiles)}[between])
    check(Call.draw(tokens, [90, 30]).by_rope_alone(), with_reference=False)


@BOTH
@pytest.mark.parametrize("spread", [20, 40])
@pytest.mark.parametrize("between", ["tokens", "tiles", "both"])
def test_scales_that_differ_wildly(fmt, between, spread):
    """By up to 2^80: then small values vanish beside large ones, and no error is more than 2^-20 of the largest values of the
    keys, by their weights. That holds for the logits of MODEL1's rope, too, which has its latent's exponent."""
    tokens = Tokens.draw(fmt, 100)
    n, tiles = tokens.scales.shape
    tokens.scales *= exponents(spread, *{"tokens": (n, 1), "tiles": (1, tiles), "both": (n, tiles)}[between])
    call = Call.draw(tokens, [90, 30]).by_rope_alone()
    out, lse = call.emulate()
    oracle = call.oracle()
    lost = 2.0**-20 if fmt is V32 or spread == 20 else 2.0**-5  # that of P, by the error of the logits
    assert (oracle.out_error(out) <= RELATIVE * oracle.weight + lost * oracle.largest).all()
    assert oracle.lse_error(lse) < (1e-5 if fmt is V32 or spread == 20 else 2.0**-5)


@BOTH
def test_large_scales_in_the_logits(fmt):
    """With q of the latent, too: logits as large as the keys, one of them takes all."""
    tokens = Tokens.draw(fmt, 100)
    tokens.scales *= exponents(40, 100, 1)
    call = Call.draw(tokens, [90, 30])
    out, lse = call.emulate()
    oracle = call.oracle()
    assert (oracle.out_error(out) <= RELATIVE * oracle.weight + 2.0**-22 * oracle.largest).all()
    assert (oracle.lse - lse.double()).abs().max() < 1e-6 * oracle.lse.abs().max()


@pytest.mark.parametrize("which", ["amax", "random"])
def test_scales_are_not_rounded_to_bf16(which):
    """Scales that are no powers of two: a product of 11 bits, where the reference has 8."""
    tokens = Tokens.draw(V32, 100)
    factor = 1 + torch.rand(tokens.scales.shape, generator=torch.Generator().manual_seed(7))
    if which == "amax":  # of a latent whose tiles have sizes of their own
        x = torch.randn(100, 4, 128, generator=torch.Generator().manual_seed(8)) / 10 * factor.unsqueeze(-1)
        tokens.scales = x.abs().amax(-1) / 448
        tokens.codes = (x / tokens.scales.unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        tokens.scales *= factor
    call = Call.draw(tokens, [90, 30])
    out, lse, oracle = check(call, lse_error=1e-3)
    ref_out, ref_lse = call.reference()
    assert rms(oracle.out_error(out)) < 0.85 * rms(oracle.out_error(ref_out))  # the rest is the rounding of out
    assert oracle.lse_error(lse) < 0.4 * oracle.lse_error(ref_lse)


# ---- NaN, and parts of a key that are much smaller than others ----


@pytest.mark.parametrize("last", [False, True], ids=["first-block", "last-block"])
@pytest.mark.parametrize("what", ["scale", "code", "rope"])
@BOTH
def test_nan_reaches_the_requests_that_attend_to_it(fmt, what, last):
    """Before and behind them others in the same CTA, that do not."""
    tokens = Tokens.draw(fmt, 100)
    call = Call.draw(tokens, [70, 90, 80])
    bad = 99
    for r in range(3):  # nobody else has token 99
        row = call.indices[r, 0]
        row[row == bad] = int(row[0])
    call.indices[1, 0, 88 if last else 3] = bad
    if what == "scale":
        tokens.scales[bad, 1] = math.nan  # e8m0 255
    elif what == "code":
        tokens.codes[bad, 200] = 0x7F
    else:
        tokens.rope[bad, 7] = math.nan
    out, lse = call.emulate()
    assert lse[1].isnan().all() and out[1].isnan().all()
    oracle = call.oracle()
    for r in (0, 2):
        assert oracle.out_error(out)[r].max() < 1e-3 and (oracle.lse - lse.double())[r].abs().max() < 1e-5
    ref_out, ref_lse = call.reference()
    assert torch.equal(ref_lse.isnan(), lse.isnan()) and ref_out[1].isnan().all()


def test_smallest_scale_of_model1():
    """e8m0 0, 2^-127: in one tile beside others, and in all tiles."""
    tokens = Tokens.draw(MODEL1, 100)
    tokens.scales[::3, 2] = 2.0**-127
    tokens.scales[1::3] = 2.0**-127
    assert int((tokens.cache()[..., :] == 0).sum()) > 0
    check(Call.draw(tokens, [90, 30]))


@BOTH
@pytest.mark.parametrize("which", ["all", "some"])
@pytest.mark.parametrize("power", [-20, -9, 9, 14, 20])
def test_rope_larger_and_smaller_than_the_latent(fmt, power, which):
    """MODEL1's rope is V: its size decides a key's exponent where it is the larger one (cover_rope's slow path)."""
    tokens = Tokens.draw(fmt, 100)
    tokens.rope[:: 1 if which == "all" else 3] *= 2.0**power
    call = Call.draw(tokens, [90, 30])
    if power > 0:  # logits stay moderate, and q stays above fp16's subnormals
        shrink = min(power, 9)
        call.q[..., fmt.d_nope :] *= 2.0**-shrink
        call.scale *= 2.0 ** (shrink - power)
    out, lse = call.emulate()
    oracle = call.oracle()
    assert (oracle.out_error(out) <= RELATIVE * oracle.weight + 2.0**-24 * oracle.largest).all()
    assert oracle.lse_error(lse) < 3e-5


@BOTH
@pytest.mark.parametrize("what", ["latent", "rope", "both"])
def test_zeros(fmt, what):
    """As the writer stores zeros with scales "amax" (2^-126) or "pow2" (2^-13)."""
    for scale in (2.0**-126, 2.0**-13):
        tokens = Tokens.draw(fmt, 100)
        if what != "rope":
            tokens.codes[10:].zero_()
            tokens.scales[10:] = scale
        if what != "latent":
            tokens.rope.zero_()
        check(Call.draw(tokens, [90, 30]))


# ---- q ----


@BOTH
@pytest.mark.parametrize("power", [-10, 0, 10, 19])
def test_sizes_of_q(fmt, power):
    call = Call.draw(Tokens.draw(fmt, 100), [90, 30])
    call.q *= 2.0**power
    call.scale *= 2.0**-power
    assert call.q.abs().max() == 2.0**power
    check(call, lse_error=1e-5 if power >= 0 else 1e-4)  # steps of 2^-20


@BOTH
@pytest.mark.parametrize("size", [1e-4, 1e-6, 1e-30])
def test_tiny_q(fmt, size):
    """In absolute terms: q within 2^-21, and so a logit within that times its key."""
    call = Call.draw(Tokens.draw(fmt, 100), [90, 30])
    call.q *= size
    check(call)


@BOTH
@pytest.mark.parametrize("value", [2.0**20, -(2.0**100), math.inf, math.nan])
def test_q_beyond_fp16_is_nan(fmt, value):
    """For its head alone, and never a wrong number; the largest bf16 below 2^20 is fine."""
    call = Call.draw(Tokens.draw(fmt, 100), [90, 30])
    call.q[0, 0, 3, 77] = value
    call.q[0, 0, 4, 100] = call.q[1, 0, 3, 200] = 2.0**20 * (1 - 2.0**-8)
    out, lse = call.emulate()
    is_bad = torch.zeros(2, 1, 64, dtype=torch.bool)
    is_bad[0, 0, 3] = True
    assert torch.equal(lse.isnan(), is_bad) and torch.equal(out.isnan(), is_bad.unsqueeze(-1).expand_as(out))
    call.q[0, 0, 3] = 0
    oracle = call.oracle()
    rest = ~is_bad
    assert oracle.out_error(out)[rest].max() < 1e-3
    assert ((oracle.lse - lse.double()).abs() / oracle.lse.abs().clamp(min=1))[rest].max() < 1e-6


# ---- maxima ----


def rising(fmt, logits, h_q: int = 64, signs: bool = True) -> Call:
    """One request; its keys' logits, base 2, times 1 to 1/2 by head, of every other head negative."""
    tokens = Tokens.draw(fmt, len(logits))
    call = Call.draw(tokens, [len(logits)], h_q=h_q)
    call.indices = torch.arange(len(logits), dtype=torch.int32).view(1, 1, -1)
    call.by_rope_alone()
    head = torch.arange(h_q)
    factor = (1 - head / (2 * h_q)) * torch.where((head % 2 == 1) & signs, -1.0, 1.0)
    # Spread over rope's columns, so that MODEL1's rope does not decide the keys' exponents, which count in the maxima.
    call.q[0, 0, :, fmt.d_nope :] = factor.to(torch.bfloat16).unsqueeze(-1)
    tokens.rope[:] = (torch.tensor(logits) * math.log(2) / call.scale / 64).to(torch.bfloat16).unsqueeze(-1)
    return call


def steps(*values: float) -> list[float]:
    """A block's keys have the value, less 0 to 1."""
    return [v - (i % 64) / 64 for v in values for i in range(64)]


@BOTH
@pytest.mark.parametrize(
    "values, raises",
    [
        ((0, 0, 0, 40), 2),  # late
        ((0, 12, 24, 36), 4),  # by more than 8 each time
        ((0, 2, 4, 6, 7.5), 1),  # never by more than 8 in all: the first block's maxima stand
        ((0, 5, 10, 15, 20), 3),  # every second time
        ((30, 20, 0, -40), 1),  # falling; of the other heads rising, see below
        ((0, 0, 0), 1),
    ],
    ids=str,
)
def test_rising_maxima(fmt, values, raises):
    """m of all heads is raised when a maximum of one has risen by more than 8 (P_BITS - RAISED_BITS) since the last time."""
    call = rising(fmt, steps(*values), signs=False)
    check(call, lse_error=2e-5)
    assert call.raises == [raises] * 4
    call = rising(fmt, steps(*values))
    check(call, lse_error=2e-5)
    assert min(call.raises) == max(call.raises) >= raises


@BOTH
@pytest.mark.parametrize("key", [0, 15, 16, 63])
def test_one_key_raises_the_maximum(fmt, key):
    """Of each convert warp, and by just more and just less than 8."""
    for rise, raises in ((7.5, 1), (9, 2)):
        logits = [0.0] * 130
        logits[64 + key] = rise
        call = rising(fmt, logits, signs=False)
        check(call, lse_error=2e-5)
        assert call.raises == [raises] * 4


# ---- blocks ----


@BOTH
@pytest.mark.parametrize("masked", [(0,), (0, 1, 2), (1,), (3,), (0, 2, 4)], ids=str)
def test_masked_blocks(fmt, masked):
    """Wholly masked ones before, between and behind others; the second request has the same keys unmasked."""
    call = Call.draw(Tokens.draw(fmt, 300), [300, 300])
    for block in masked:
        call.indices[0, 0, 64 * block : 64 * block + 64] = -1
    check(call)


@BOTH
def test_nothing_attended_between_others(fmt):
    call = Call.draw(Tokens.draw(fmt, 200), [64, 150, 0, 130])
    call.indices[1] = -1
    out, lse, _ = check(call)
    assert lse[1:3].isposinf().all() and (out[1:3] == 0).all() and lse[0].isfinite().all() and lse[3].isfinite().all()


@BOTH
@pytest.mark.parametrize(
    "lengths, num_sms",
    [
        ((20, 270, 330), 1),
        ((400, 20), 1),
        ((65, 129), 1),
        ((64,) * 7, 1),
        ((1, 1, 200), 1),
        ((257, 30, 130), 3),
        ((385,), 2),
    ],
    ids=str,
)
def test_numbers_of_blocks(fmt, lengths, num_sms):
    """Slots and phases go on from request to request; in one CTA, and split over several."""
    check(Call.draw(Tokens.draw(fmt, 420), lengths), num_sms=num_sms, schedule=3)


@BOTH
def test_exponents_do_not_leak_into_the_next_block(fmt):
    """Keys of one block 2^12 larger than those of the next, in turns, in one request and between requests."""
    tokens = Tokens.draw(fmt, 320)
    tokens.scales *= torch.exp2(12.0 * (torch.arange(320) // 64 % 2)).unsqueeze(-1)
    call = Call.draw(tokens, [320, 64, 64]).by_rope_alone()
    call.indices[0, 0] = torch.arange(320)
    call.indices[1, 0, :64] = torch.arange(64, 128)
    call.indices[2, 0, :64] = torch.arange(64)
    check(call, with_reference=False)


def test_the_oracle_is_the_reference_where_nothing_is_rounded():
    for fmt in FORMATS.values():
        call = Call.draw(Tokens.draw(fmt, 100), [90, 0, 30])  # scales are powers of two: bf16 holds every key
        call.indices[0, 0, ::7] = -1
        exact = reference.sparse_decode(
            call.q, call.tokens.cache(), call.indices, **call.kwargs(), dtype=torch.float64, out_dtype=torch.float64
        )
        oracle = call.oracle()
        torch.testing.assert_close(oracle.out, exact[0], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(oracle.lse, exact[1], rtol=1e-12, atol=0)
        wrong = dataclasses.replace(call, scale=call.scale * 1.01).oracle()
        assert wrong.relative(exact[0]) > 1e-4 > oracle.relative(exact[0])
