"""Caches of chosen codes, scales and rope, the emulated kernel on them, and attention in fp64 on keys that nothing rounded."""

import math
from dataclasses import dataclass

import torch

import mla_cute
import mla_cute.sm90.sparse_decode as sm90
from mla_cute import emulator, reference
from mla_cute.emulator import report
from mla_cute.kv_cache import E8M0_NAN, KVFormat, new_cache, planes

CONFIG = sm90.Config(fixed_overhead_blocks=1, clustered=False)
PAGE = 16
CONVERT_WARPS = range(8, 12)


@dataclass
class Tokens:
    """n cached tokens as their parts: a test changes these, then attends to them."""

    fmt: KVFormat
    codes: torch.Tensor  # uint8 [n, d_nope], e4m3
    scales: torch.Tensor  # fp32 [n, num_scales]; of MODEL1 powers of two from 2^-127 on, or NaN
    rope: torch.Tensor  # bf16 [n, 64]

    @classmethod
    def draw(cls, fmt: KVFormat, n: int, seed: int = 0) -> "Tokens":
        """Latent and rope ~ N(0, 1) / 10, the latent in codes of many sizes."""
        g = torch.Generator().manual_seed(seed)
        codes = (torch.randn(n, fmt.d_nope, generator=g) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        rope = (torch.randn(n, fmt.d_rope, generator=g) / 10).to(torch.bfloat16)
        return cls(fmt, codes.view(torch.uint8), torch.full((n, fmt.num_scales), 2.0**-10), rope)

    def cache(self) -> torch.Tensor:
        """[pages, PAGE, 1, bytes]; NaN behind the tokens."""
        n = len(self.codes)
        cache = new_cache(-(-n // PAGE), PAGE, self.fmt, torch.device("cpu")).fill_(0xFF)
        scales = self.scales.view(torch.uint8)
        if self.fmt.scale_bytes == 1:  # the exponent field, 0 of 2^-127
            field = (self.scales.view(torch.int32) >> 23 & 255).to(torch.uint8)
            scales = torch.where(self.scales.isnan(), E8M0_NAN, field)
        page, offset = torch.arange(n) // PAGE, torch.arange(n) % PAGE
        for plane, values in zip(planes(cache, self.fmt), (self.codes, scales, self.rope.view(torch.uint8))):
            for column in range(values.shape[1]):
                plane[..., column][page, offset] = values[:, column]
        return cache

    def exact(self) -> torch.Tensor:
        """fp64 [n, d_qk]: code * scale, which the reference rounds to bf16."""
        codes = self.codes.view(torch.float8_e4m3fn).double().unflatten(-1, (self.fmt.num_scales, self.fmt.quant_tile))
        return torch.cat([(codes * self.scales.double().unsqueeze(-1)).flatten(-2), self.rope.double()], -1)


@dataclass
class Call:
    """What is asked of the tokens; s_q = 1, no sink, no extra keys."""

    tokens: Tokens
    q: torch.Tensor  # bf16 [b, 1, h_q, d_qk]
    indices: torch.Tensor  # int32 [b, 1, topk]
    lengths: torch.Tensor  # int32 [b]
    scale: float
    raises: list[int] | None = None  # blocks in which each convert warp of the last emulated run raised its maxima

    @classmethod
    def draw(cls, tokens: Tokens, lengths, h_q: int = 64, seed: int = 1) -> "Call":
        """q ~ N(0, 1), clamped to +-1; each request's list is a permutation of the tokens, cut to its length."""
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(len(lengths), 1, h_q, tokens.fmt.d_qk, generator=g).clamp(-1, 1).to(torch.bfloat16)
        lists = torch.stack([torch.randperm(len(tokens.codes), generator=g) for _ in lengths])
        topk = torch.tensor(lengths, dtype=torch.int32)
        return cls(tokens, q, lists[:, None, : max(lengths)].int(), topk, tokens.fmt.d_qk**-0.5)

    def by_rope_alone(self) -> "Call":
        """q of the latent is 0: logits stay moderate whatever its size."""
        self.q[..., : self.tokens.fmt.d_nope] = 0
        return self

    def kwargs(self) -> dict:
        return {"topk_length": self.lengths, "softmax_scale": self.scale}

    def emulate(self, num_sms: int = 1, schedule: int = 2, impl=None) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's out and lse, without a finding. num_sms = 1: one CTA has every request, in order.

        impl: another implementation, of which `raises` are not counted.
        """
        how = {"config": CONFIG} if impl is None else {"impl": impl}
        with emulator.session(num_sms=num_sms, options=emulator.Options.schedule(schedule)) as s:
            args = self.q, self.tokens.cache(), self.indices
            result = mla_cute.sparse_decode(*args, **self.kwargs(), **how, backend="emulator")
        if impl is not None:
            return result
        (grid,) = [grid for grid in s.grids if grid.launch.kernel.startswith("mla_sparse_decode")]
        functions = [report.function_of(ins.source) for ins in grid.program.kernel.instructions]
        self.raises = [max(n for n, f in zip(grid.hits[w], functions) if f == "raise_maxima") for w in CONVERT_WARPS]
        return result

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.sparse_decode(self.q, self.tokens.cache(), self.indices, **self.kwargs())

    def oracle(self) -> "Oracle":
        fmt, (b, _, h_q, _) = self.tokens.fmt, self.q.shape
        keys, zeros = self.tokens.exact(), torch.zeros(b, 1, h_q, fmt.d_v, dtype=torch.float64)
        result = Oracle(zeros, torch.full((b, 1, h_q), math.inf).double(), zeros.clone(), zeros[..., :1].clone())
        for r in range(b):
            listed = self.indices[r, 0, : int(self.lengths[r])].long()
            k = keys[listed[listed >= 0]]
            if len(k):
                x = self.q[r, 0].double() @ k.T * self.scale
                p, v = torch.softmax(x, -1), k[:, : fmt.d_v]
                largest = k if fmt.d_v == fmt.d_qk else v  # what a key's values share an exponent with
                result.lse[r, 0] = torch.logsumexp(x, -1)
                result.out[r, 0] = p @ v
                result.weight[r, 0] = p @ v.abs()
                result.largest[r, 0] = p @ largest.abs().amax(-1, keepdim=True)
        return result


@dataclass
class Oracle:
    """All in fp64."""

    out: torch.Tensor  # [b, 1, h_q, d_v]
    lse: torch.Tensor  # [b, 1, h_q]
    weight: torch.Tensor  # [b, 1, h_q, d_v] sum of p |v|: what a relative error of the values is relative to
    largest: torch.Tensor  # [b, 1, h_q, 1] sum of p max |v|, over the columns

    def out_error(self, out: torch.Tensor) -> torch.Tensor:
        return (out.double() - self.out).abs()

    def relative(self, out: torch.Tensor) -> float:
        """The largest error of out by weight: rounding out to bf16 makes 2^-9 of it."""
        return float((self.out_error(out) / self.weight.clamp(min=1e-300)).max())

    def lse_error(self, lse: torch.Tensor) -> float:
        same = lse.double() == self.lse  # inf - inf
        return float(torch.where(same, 0.0, (lse.double() - self.lse).abs()).max())


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())
