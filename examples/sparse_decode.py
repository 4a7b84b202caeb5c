"""The main job: one decode step of DeepSeek-V3.2's sparse attention over a paged FP8 cache, checked and timed.

    python examples/sparse_decode.py [--device emulator] [--batch 16] [--seq-lens 300 5000] [--topk 2048] [--impl PATH]

Several requests of different lengths share a cache. For each layer: prefill writes every request's keys page by page
through the block table (`quantize_kv_cache`); an index score picks each request's topk tokens; `to_cache_indices` turns
their positions into cache slots; one plan serves all layers; `sparse_decode` attends. Two references say how good that
is: fp32 attention on the dequantised cache (the kernel's own error, which must be within the tolerances of
`mla_cute.testing`, or the exit code is 1) and on the keys before quantisation (what FP8 costs).

On a Hopper GPU that is the Hopper kernel. Without one, the same kernel runs in the emulator, instruction by instruction, on a
smaller input; --device cpu takes the reference.

Weights and activations are random; shapes, layouts, scales and the way of the data are the model's.
"""

import argparse
import contextlib
import itertools
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass

import torch

import mla_cute
from mla_cute import emulator
from mla_cute.testing import SPARSE_DECODE_LSE, SPARSE_DECODE_OUT, assert_close

CONFIG = {  # of DeepSeek-V3.2's config.json, what decode attention depends on
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 40, "mscale_all_dim": 1.0},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
PAGE = 64  # tokens
HEADS, D_V, D_ROPE = CONFIG["num_attention_heads"], CONFIG["kv_lora_rank"], CONFIG["qk_rope_head_dim"]
D_QK = D_V + D_ROPE
SIZES = {  # by --device: tokens of each request, layers
    "cuda": ([300, 1000, 2048, 4096, 8000, 16384, 32768, 65536] * 2, 3),
    "cpu": ([300, 1000, 2048, 5000], 2),
    "emulator": ([300, 1200], 1),
}
EMULATED_SMS = 8  # of the GPU that an emulated kernel runs on: a small one, for the work is done one warp after the other


@dataclass(frozen=True)
class Layer:
    """What one layer of the model hands to the kernel, and the keys before they were quantised."""

    q: torch.Tensor  # [b, 1, 128, 576] bf16: absorbed into the latent space, RoPE behind
    kv_cache: torch.Tensor  # [num_blocks, 64, 1, 656] uint8
    indices: torch.Tensor  # [b, 1, topk] int32, cache slots; -1 behind those of a request shorter than topk
    kv: torch.Tensor  # [num_blocks, 64, 1, 576] bf16


def softmax_scale() -> float:
    """The scale that goes with the model's head dim before absorption, and with its YaRN context extension."""
    scaling = CONFIG["rope_scaling"]
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return (CONFIG["qk_nope_head_dim"] + CONFIG["qk_rope_head_dim"]) ** -0.5 * mscale**2


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE on fp32 x [n, ..., 64] at int positions [n]: each pair of neighbours turns by its own angle."""
    pair = torch.arange(0, D_ROPE, 2, device=x.device)
    angles = positions[:, None] * CONFIG["rope_theta"] ** (-pair / D_ROPE)  # [n, 32]
    turn = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.ndim - 2), -1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def make_block_table(lengths: list[int], g: torch.Generator) -> tuple[torch.Tensor, int]:
    """int32 [b, max_pages], pages dealt at random from a pool as in a server that has run for a while; the pool's size."""
    pages = [-(-n // PAGE) for n in lengths]
    num_blocks = sum(pages) + 8  # some are free
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device=g.device)
    dealt = torch.randperm(num_blocks, generator=g, device=g.device).int().split([*pages, 8])
    for r, own in enumerate(dealt[:-1]):
        table[r, : len(own)] = own
    return table, num_blocks


def prefill(lengths: list[int], block_table: torch.Tensor, num_blocks: int, g: torch.Generator):
    """Write the keys of all requests, latent (normalised, channels of different size) and rotated RoPE, page by page.

    Returns the FP8 cache and the same pages in bf16. What is not written is NaN in both.
    """
    kv_cache = torch.full((num_blocks, PAGE, 1, mla_cute.V32.bytes_per_token), 0xFF, dtype=torch.uint8, device=g.device)
    kv = torch.full((num_blocks, PAGE, 1, D_QK), math.nan, dtype=torch.bfloat16, device=g.device)
    norm_weight = 0.1 * torch.exp(0.4 * torch.randn(D_V, generator=g, device=g.device))
    for r, n in enumerate(lengths):
        x = torch.randn(n, D_QK, generator=g, device=g.device)
        latent = torch.nn.functional.rms_norm(x[:, :D_V], (D_V,), norm_weight)
        keys = torch.cat([latent, rotate(x[:, D_V:], torch.arange(n, device=g.device))], -1).to(torch.bfloat16)
        for i, page in enumerate(block_table[r, : -(-n // PAGE)].tolist()):
            tokens = keys[i * PAGE : (i + 1) * PAGE]  # the last page may be half full
            kv[page, : len(tokens), 0] = tokens
            mla_cute.quantize_kv_cache(tokens[None, :, None], out=kv_cache[page : page + 1, : len(tokens)])
    return kv_cache, kv


def index_topk(lengths: list[int], topk: int, g: torch.Generator) -> torch.Tensor:
    """Positions int32 [b, 1, topk] of the tokens with the highest index score Σ_h w_h relu(q_h·k), -1 where none is left."""
    heads, dim = CONFIG["index_n_heads"], CONFIG["index_head_dim"]
    positions = torch.full((len(lengths), 1, topk), -1, dtype=torch.int32, device=g.device)
    for r, n in enumerate(lengths):
        index_q = torch.randn(heads, dim, generator=g, device=g.device)
        index_k = torch.randn(n, dim, generator=g, device=g.device)
        weights = torch.randn(heads, generator=g, device=g.device)
        score = weights @ torch.relu(index_q @ index_k.T)  # [n]
        positions[r, 0, : min(n, topk)] = score.topk(min(n, topk)).indices.int()
    return positions


def make_layer(lengths: list[int], topk: int, block_table: torch.Tensor, num_blocks: int, g: torch.Generator) -> Layer:
    kv_cache, kv = prefill(lengths, block_table, num_blocks, g)
    # Latent keys are about 0.1, RoPE keys 1: with q of 2.5 and 0.5 the logits come out with a deviation of about 1.
    q = 0.5 * torch.randn(len(lengths), 1, HEADS, D_QK, generator=g, device=g.device)
    q[..., :D_V] *= 5
    now = torch.tensor(lengths, device=g.device)  # the position of the token that is being decoded
    q[..., D_V:] = rotate(q[..., D_V:].contiguous(), now)
    indices = mla_cute.to_cache_indices(index_topk(lengths, topk, g), block_table, PAGE)
    return Layer(q.to(torch.bfloat16), kv_cache, indices, kv)


def errors(layer: Layer, out: torch.Tensor, lse: torch.Tensor, options: dict) -> tuple[torch.Tensor, list[str]]:
    """Largest errors of each request, fp32 [b, 3]: out and lse, and out against unquantised keys; and what fails."""
    args = {**options, "out_dtype": torch.float32}
    dequantised = mla_cute.dequantize_kv_cache(layer.kv_cache)
    ref_out, ref_lse = mla_cute.reference.sparse_decode(layer.q, dequantised, layer.indices, **args)
    exact_out, _ = mla_cute.reference.sparse_decode(layer.q, layer.kv, layer.indices, **args)
    failures = []
    for name, ans, ref, tolerance in (
        ("out", out, ref_out.to(out.dtype), SPARSE_DECODE_OUT),
        ("lse", lse, ref_lse, SPARSE_DECODE_LSE),
    ):
        try:
            assert_close(ans, ref, **tolerance, name=name)
        except AssertionError as e:
            failures.append(str(e))
    pairs = (out.float(), ref_out), (lse, ref_lse), (out.float(), exact_out)
    return torch.stack([(a - b).abs().flatten(1).amax(1) for a, b in pairs], 1).cpu(), failures


def seconds_per_call(decode, layers: list[Layer]) -> float:
    """Mean time of a call over all layers: of the GPU, replaying a CUDA graph as a server does; of the host on a CPU."""
    if layers[0].q.device.type == "cpu":
        repeats, start = 3, time.perf_counter()
        for layer in layers * repeats:
            decode(layer)
        return (time.perf_counter() - start) / (repeats * len(layers))
    graph, repeats = torch.cuda.CUDAGraph(), 50
    with torch.cuda.graph(graph):
        for layer in layers:
            decode(layer)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / (repeats * len(layers))


def choose_device(wanted: str, impl: str | None) -> str:
    """cuda if there is a GPU that a kernel exists for, else emulator or, without a C compiler, cpu; says why."""
    if wanted in ("cpu", "emulator"):
        return wanted
    instead = "emulator" if any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))) else "cpu"
    then = {"emulator": "the Hopper kernel runs in the emulator", "cpu": "this run takes the CPU reference"}[instead]
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise SystemExit("--device cuda: torch sees no CUDA GPU")
        print(f"No CUDA GPU: {then}.")
        return instead
    try:
        mla_cute.select_impl("cuda", impl)
    except NotImplementedError as e:
        if wanted == "cuda":
            raise SystemExit(f"--device cuda: {e}") from None
        print(f"No kernel for {torch.cuda.get_device_name()} ({e}): {then}.")
        return instead
    return "cuda"


def parse(argv: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(description="Sparse decode of DeepSeek-V3.2 over a paged FP8 cache.")
    parser.add_argument(
        "--device",
        choices=("auto", *SIZES),
        default="auto",
        help="auto: a GPU if it has a kernel, else the emulator; cpu: the reference",
    )
    parser.add_argument("--batch", type=positive, help="requests; lengths are repeated or cut to that many")
    parser.add_argument("--seq-lens", type=positive, nargs="+", help="tokens of each request (default: by device)")
    parser.add_argument("--topk", type=positive, default=CONFIG["index_topk"], help="tokens a request attends to")
    parser.add_argument("--layers", type=positive, help="layers that share the plan (default: by device)")
    parser.add_argument("--impl", help="another implementation: a module name or the path of a .py file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.impl is not None:
        try:
            mla_cute.select_impl("cpu", args.impl)
        except (TypeError, ValueError) as e:
            parser.error(f"argument --{e}")  # it begins with "impl:"
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 1 if an error exceeds its tolerance."""
    args = parse(argv)
    where = choose_device(args.device, args.impl)
    device = torch.device("cuda", torch.cuda.current_device()) if where == "cuda" else torch.device("cpu")
    how = {"impl": args.impl, "backend": "emulator" if where == "emulator" else None}
    lengths, num_layers = SIZES[where]
    if where != "cuda" and args.seq_lens is None:
        full, full_layers = SIZES["cuda"]
        print(
            f"Sizes are scaled down for the {where}: up to {max(lengths):,} tokens a request instead of {max(full):,}, "
            f"{len(lengths)} requests instead of {len(full)}, {num_layers} layers instead of {full_layers}."
        )
    lengths = args.seq_lens or lengths
    lengths = list(itertools.islice(itertools.cycle(lengths), args.batch or len(lengths)))
    num_layers, topk = args.layers or num_layers, args.topk

    g = torch.Generator(device=device).manual_seed(args.seed)
    block_table, num_blocks = make_block_table(lengths, g)
    layers = [make_layer(lengths, topk, block_table, num_blocks, g) for _ in range(num_layers)]

    # A decode step: every layer has the same lengths, so one plan serves them all.
    topk_length = torch.tensor(lengths, device=device).clamp(max=topk).int()  # [b]
    options = {"softmax_scale": softmax_scale(), "topk_length": topk_length}
    emulated = emulator.session(num_sms=EMULATED_SMS) if where == "emulator" else contextlib.nullcontext()
    with emulated as session:  # findings of the emulator are errors
        plan = mla_cute.plan_decode(layers[0].q, layers[0].indices, topk_length=topk_length, **how)

        def decode(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
            return mla_cute.sparse_decode(layer.q, layer.kv_cache, layer.indices, **options, plan=plan, **how)

        results = [decode(layer) for layer in layers]

    worst, failures = torch.zeros(len(lengths), 3), []
    for i, (layer, (out, lse)) in enumerate(zip(layers, results, strict=True)):
        found, failed = errors(layer, out, lse, options)
        worst = torch.maximum(worst, found)  # keeps a NaN
        failures += [f"layer {i}: {message}" for message in failed]

    attended = topk_length.tolist()
    print(f"DeepSeek-V3.2 attention: {HEADS} heads, latent {D_V} + RoPE {D_ROPE}, top {topk} tokens, pages of {PAGE}.")
    print(
        f"Largest errors of each request over {num_layers} layers; fp8 = out against attention on unquantised keys:\n"
    )
    print(f"{'request':>7} {'length':>8} {'attended':>8} {'out error':>10} {'lse error':>10} {'fp8 error':>10}")
    for r, (n, keys, row) in enumerate(zip(lengths, attended, worst.tolist(), strict=True)):
        print(f"{r:>7} {n:>8} {keys:>8} {row[0]:>10.1e} {row[1]:>10.1e} {row[2]:>10.1e}")

    name = {"cuda": torch.cuda.get_device_name, "cpu": lambda: "the CPU", "emulator": lambda: "the emulator"}[where]()
    splits = plan.num_splits.diff()
    print(f"\nkernel  {mla_cute.select_impl(device, **how).__name__} on {name}")
    print(
        f"plan    {plan.num_parts} parts, {sum(-(-n // plan.tile_n) for n in attended)} blocks of {plan.tile_n} keys, "
        f"{int(splits.sum())} splits ({int((splits > 1).sum())} of {len(lengths)} requests are split)"
    )
    if where == "emulator":
        instructions = sum(grid.time for grid in session.grids)
        print(f"time    {session.seconds:.1f} s for {instructions:,} instructions of a warp, without findings")
    elif where == "cuda":
        seconds = seconds_per_call(decode, layers)
        flop = 2 * HEADS * (D_QK + D_V) * sum(attended)
        print(f"time    {seconds * 1e6:.1f} us a call (CUDA graph), {flop / seconds / 1e12:.0f} TFLOPS")
    else:
        print(f"time    {seconds_per_call(decode, layers) * 1e3:.1f} ms a call")
    if failures:
        print("\nFAILED: the error exceeds the tolerance\n" + "\n".join(failures), file=sys.stderr)
        return 1
    print("ok      out and lse are within the tolerances")
    return 0


if __name__ == "__main__":
    sys.exit(main())
