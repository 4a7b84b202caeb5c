"""The merge of split partials on the device against reference.combine."""

import math
import re
from dataclasses import dataclass

import pytest
import torch

from mla_cute import jit, reference
from mla_cute.testing import SPARSE_DECODE_LSE, assert_bitwise, assert_close
from mla_cute.validate import Problem

D_V = 512
SENTINEL = 77.0  # what out and lse hold before: must survive in requests that are not split


@dataclass(frozen=True)
class Partials:
    """A plan, the partials that a main kernel would have left for it, and the oracle's answer."""

    metadata: torch.Tensor  # [P, 8]
    num_splits: torch.Tensor  # [b + 1]
    scratch: torch.Tensor  # o_partial in fragment order and lse_partial (base 2); NaN in unused slots, O also in empty pieces
    attn_sink: torch.Tensor | None  # [h_q]
    out: torch.Tensor  # [b, s_q, h_q, 512] bf16, SENTINEL in requests that are not in three pieces or more
    lse: torch.Tensor  # [b, s_q, h_q] fp32

    def to(self, device):
        return {name: None if t is None else t.to(device) for name, t in vars(self).items()}


def to_fp16(o_partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 512] -> fp16 [..., 2 halves, 256] over a power of two [..., 2], which puts the largest into 2^14 ... 2^15."""
    halves = o_partial.unflatten(-1, (2, 256))
    largest = halves.abs().amax(-1)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 15)
    return (halves / scale[..., None]).half(), scale


def rounded(o_partial: torch.Tensor) -> torch.Tensor:
    """What a piece in fp16 says."""
    fp16, scale = to_fp16(o_partial)
    return (fp16 * scale[..., None]).flatten(-2)


def fragment_order(o_partial: torch.Tensor) -> torch.Tensor:
    """[slots, s_q, h_q, 512] -> [slots, s_q, groups of 16 heads, 2 halves, 4096]: of pieces of a request in three or more.

    First fp16 [16, 8 (g), 4 (c), 2 (j % 2), 2 (r), 2 (e)], for head g + 8 r of the group and column 8 j + 2 c + e of the half,
    then [16] powers of two. NaN where nothing is.
    """
    slots, s_q, h_q, _ = o_partial.shape
    groups = -(-h_q // 16)
    whole = torch.full((slots, s_q, 16 * groups, D_V), math.nan, device=o_partial.device)
    whole[:, :, :h_q] = o_partial
    fp16, scale = to_fp16(whole)
    result = torch.full((slots, s_q, groups, 2, 4096), math.nan, device=o_partial.device)
    fp16 = fp16.view(slots, s_q, groups, 2, 8, 2, 16, 2, 4, 2).permute(0, 1, 2, 5, 6, 4, 8, 7, 3, 9)
    result.view(torch.float16)[..., :4096] = fp16.flatten(4)
    result[..., 2048:2064] = scale.view(slots, s_q, groups, 16, 2).transpose(3, 4)
    return result


def make_partials(blocks, num_parts, s_q=1, h_q=128, sink=True, empty=0.2, spread=8.0, seed=0) -> Partials:
    """blocks: key blocks of each request; empty: share of (piece, row)s without a key; spread: of lse, base 2."""
    g = torch.Generator().manual_seed(seed)
    metadata, num_splits = reference.plan([64 * n for n in blocks], num_parts)
    shape = (2 * num_parts, s_q, h_q)
    o_partial, lse_partial = torch.full((*shape, D_V), math.nan), torch.full(shape, math.nan)
    pieces = [piece.slot for piece in reference.partial_pieces(metadata, len(blocks))]
    of_row = 2.0 ** torch.randint(-8, 1, (h_q, 1), generator=g)
    o_partial[pieces] = rounded(torch.randn(len(pieces), *shape[1:], D_V, generator=g) * of_row)
    lse_partial[pieces] = spread * torch.randn(len(pieces), *shape[1:], generator=g)
    is_empty = torch.rand(shape, generator=g) < empty
    is_empty[:, :, 0] = empty > 0  # head 0 attends nothing at all
    lse_partial.masked_fill_(is_empty & ~lse_partial.isnan(), -math.inf)
    o_partial[lse_partial == -math.inf] = 0.0

    attn_sink = None
    if sink:
        attn_sink = 3 * torch.randn(h_q, generator=g)
        for i, value in enumerate((0.0, math.inf, -math.inf, 1e30, -1e30)):
            attn_sink[i + 1 :: 11] = value
    out = torch.full((len(blocks), s_q, h_q, D_V), SENTINEL)
    lse = torch.full((len(blocks), s_q, h_q), SENTINEL)
    is_pair = num_splits.diff() == 2  # the main kernel's
    out64, lse64 = out.double(), lse.double()  # the oracle in fp64, rounded once
    reference.combine(
        o_partial.double(), lse_partial.double(), metadata, num_splits, attn_sink=attn_sink, out=out64, lse=lse64
    )
    o_partial[lse_partial == -math.inf] = math.nan  # an empty piece's o_partial has no meaning
    out64[is_pair], lse64[is_pair] = SENTINEL, SENTINEL
    scratch = torch.cat([fragment_order(o_partial).flatten(), lse_partial.flatten()])
    return Partials(metadata, num_splits, scratch, attn_sink, out64.to(torch.bfloat16), lse64.to(torch.float32))


def test_oracle_gives_finite_answers():
    """The cases below ask something: every kind of row is there, and the answers are numbers."""
    t = make_partials([32, 1], 44)
    assert t.num_splits.tolist() == [0, 32, 33]
    assert t.out.isfinite().all() and not t.lse.isnan().any()
    assert (t.lse[0, 0, 0] == math.inf) and (t.out[0, 0, 0] == 0).all()  # nothing attended
    assert (t.out[0, 0, 2] == 0).all() and t.lse[0, 0, 2].isfinite()  # sink +inf
    assert (t.out[1] == SENTINEL).all() and t.scratch.isnan().any()
    pair = make_partials([32] * 3, 4)
    assert pair.num_splits.diff().max() == 2 and (pair.out == SENTINEL).all()


@pytest.mark.compile
@pytest.mark.parametrize("has_attn_sink", [False, True], ids=["no_sink", "sink"])
@pytest.mark.parametrize("h_q", [128, 5])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiles_without_spills(arch, h_q, has_attn_sink):
    from mla_cute import combine

    found = jit.inspect(combine, Problem(h_q=h_q, has_attn_sink=has_attn_sink), None, arch)
    (name, usage), *others = found.resources.items()
    assert name.startswith("mla_combine") and not others
    assert usage["REG"] <= 128 and usage["STACK"] == 0 and usage["LOCAL"] == 0  # two CTAs an SM
    assert found.spill_bytes == 0 and not found.advisories
    ptx = found.ptx[0]
    assert "ld.local" not in ptx
    assert len(re.findall(r"ld\.global\.(?:v4\.b32|v2\.b64)", ptx)) >= 2 * combine.BLOCK * combine.PIECES
    # Read-only loads could return what o_partial held before the main kernel ended.
    assert ptx.count("griddepcontrol.wait") == 2 and "ld.global.nc" not in ptx


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def run(t: Partials, device, *, strided=False, load=None):
    """(out, lse) of the kernel, from buffers that hold SENTINEL. load: as jit.load, which it is by default."""
    from mla_cute import combine

    x = t.to(device)
    out, lse = torch.full_like(x["out"], SENTINEL), torch.full_like(x["lse"], SENTINEL)
    if strided:  # heads outermost, rows with a gap; lse as [b, h_q, s_q]
        b, s_q, h_q, d_v = out.shape
        out = torch.full((h_q, b, s_q + 1, d_v + 8), SENTINEL, dtype=out.dtype, device=device)
        out = out[:, :, :s_q, :d_v].permute(1, 2, 0, 3)
        lse = torch.full((b, h_q, s_q + 3), SENTINEL, device=device)[:, :, :s_q].transpose(1, 2)
    h_q = out.shape[2]
    arch = "sm_90a" if load else jit.arch_of(device)
    kernel = (load or jit.load)(combine, Problem(h_q=h_q, has_attn_sink=t.attn_sink is not None), None, arch)
    most = int(t.num_splits.diff().max())
    kernel(*(x[name] for name in ("metadata", "num_splits", "scratch", "attn_sink")), out, lse, most)
    return out, lse


def check(out, lse, t: Partials):
    # One fp32 sum of up to some 200 terms of size 1 and one rounding to bf16.
    assert_close(out.cpu(), t.out, abs_tol=1e-5, rel_tol=1.01 / 128, cos_tol=5e-6, name="out")
    assert_close(lse.cpu(), t.lse, **SPARSE_DECODE_LSE, name="lse")


CASES = {  # blocks of the requests, parts
    "one part": ([7, 3], 1),
    "no split": ([4] * 8, 8),
    "2 splits": ([32] * 3, 4),  # the main kernel's
    "3 splits": ([32] * 3, 8),
    "8 and 9 splits": ([8, 9], 20),
    "16 and 17 splits": ([16, 17], 40),
    "32 splits": ([32], 66),
    "33 splits": ([33], 66),
    "a few requests": ([32, 1, 9, 32, 17, 2], 40),
    "74 requests": ([32] * 74, 33),
    "64 splits": ([64, 1], 100),
    "200 splits": ([200], 230),
    "400 splits": ([400, 3], 420),
}


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [False, True], ids=["no_sink", "sink"])
@pytest.mark.parametrize("case", CASES)
def test_combine_is_the_references(device, case, sink):
    for h_q in (16, 5):
        t = make_partials(*CASES[case], h_q=h_q, sink=sink)
        check(*run(t, device), t)


@pytest.mark.gpu
@pytest.mark.parametrize(("s_q", "h_q"), [(1, 1), (1, 64), (1, 128), (2, 127), (3, 64)])
def test_shapes_and_strides(device, s_q, h_q):
    t = make_partials([32, 5, 20], 24, s_q=s_q, h_q=h_q)
    for strided in (False, True):
        check(*run(t, device, strided=strided), t)


@pytest.mark.emulate
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("case", ["one part", "2 splits", "3 splits", "8 and 9 splits", "16 and 17 splits", "64 splits"])
def test_combine_in_the_emulator(case, strided):
    from mla_cute import emulator
    from mla_cute.emulator import Options
    from mla_cute.emulator.run import load

    for n, (s_q, h_q) in enumerate([(1, 5), (2, 1), (1, 16), (1, 40)]):
        t = make_partials(*CASES[case], s_q=s_q, h_q=h_q, sink=n != 1)
        with emulator.session(options=Options.schedule(n)):
            check(*run(t, torch.device("cpu"), strided=strided, load=load), t)


@pytest.mark.emulate
def test_nan_is_seen_whatever_its_piece_weighs():
    """As in a whole request, where 0 * NaN is NaN too. Only a piece without a key may hold anything."""
    from mla_cute import emulator
    from mla_cute.emulator.run import load

    t = make_partials([8], 12, h_q=1, sink=False, empty=0.0)
    slots, slot = 2 * len(t.metadata), reference.partial_pieces(t.metadata, 1)[3].slot
    t.scratch[slots * 2 * 4096 + slot] = -1000.0  # its lse: the weight is 0 in fp32
    t.scratch[slot * 2 * 4096 :].view(torch.float16)[0] = math.nan  # head 0, column 0
    with emulator.session():
        out, _ = run(t, torch.device("cpu"), load=load)
    assert out[0, 0, 0, 0].isnan() and out[0, 0, 0, 1:].isfinite().all()


@pytest.mark.gpu
def test_extreme_weights(device):
    """Pieces whose lse lie hundreds of powers of two apart: most weights are 0, none may overflow."""
    t = make_partials([40] * 2, 50, h_q=16, spread=300.0)
    check(*run(t, device), t)


@pytest.mark.gpu
def test_nothing_empty(device):
    t = make_partials([40] * 2, 50, h_q=16, empty=0.0)
    check(*run(t, device), t)


@pytest.mark.gpu
def test_same_bits_every_time(device):
    t = make_partials([100, 30], 90)
    first = run(t, device)
    for _ in range(5):
        again = run(t, device)
        assert_bitwise(again[0], first[0])
        assert_bitwise(again[1], first[1])


@pytest.mark.gpu
def test_partials_written_right_before(device):
    """Launched behind a kernel that still writes the partials: the dependent launch must wait for it."""
    from mla_cute import combine

    t = make_partials([64], 80)
    x = t.to(device)
    kernel = jit.load(combine, Problem(h_q=128, has_attn_sink=True), None, jit.arch_of(device))
    scratch, out, lse = torch.empty_like(x["scratch"]), torch.empty_like(x["out"]), torch.empty_like(x["lse"])
    for _ in range(20):
        scratch.fill_(1e4)
        scratch.copy_(x["scratch"])
        kernel(x["metadata"], x["num_splits"], scratch, x["attn_sink"], out, lse, int(x["num_splits"].diff().max()))
        check(out, lse, t)
