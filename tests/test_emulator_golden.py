"""The emulator against hardware: the same small inputs, run on an H200 once, and here.

`python tests/test_emulator_golden.py FOLDER` on a Hopper GPU writes the files of tests/golden/ into FOLDER.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import mla_cute
import mla_cute.sm90.sparse_decode as sm90
from mla_cute import target
from mla_cute.emulator import Options, session

GOLDEN = Path(__file__).parent / "golden"
NUM_SMS = 12  # that the plan believes in: small grids


@dataclass(frozen=True)
class Shape:
    b: int
    h_q: int
    s_q: int
    topk: int
    lengths: tuple[int, ...] | None = None
    sink: bool = False
    seed: int = 0


CASES = {
    "split": Shape(3, 64, 1, 320, lengths=(300, 0, 133), sink=True),
    "whole": Shape(2, 128, 1, 64),
    "partial": Shape(2, 20, 2, 133, sink=True),
    # One key: out is its value and lse its score; nothing is rounded but the sum of the score.
    "one_key": Shape(2, 64, 1, 1),
}


def inputs(shape: Shape) -> tuple[dict, dict]:
    """(positional, optional) arguments: drawn as integers, so that they are the same bits everywhere."""
    rng = np.random.Generator(np.random.PCG64(shape.seed))
    b, s_q, topk, pages, page = shape.b, shape.s_q, shape.topk, 12, 16

    def bf16(low: int, high: int, size, unit: float) -> torch.Tensor:
        return (torch.from_numpy(rng.integers(low, high, size)).float() * unit).to(torch.bfloat16)

    records = torch.zeros(pages * page, 656, dtype=torch.uint8)
    codes = rng.integers(0, 0x68, (pages * page, 512)) | rng.integers(0, 2, (pages * page, 512)) << 7  # up to 2^6
    records[:, :512] = torch.from_numpy(codes.astype(np.uint8))
    scales = np.exp2(rng.integers(-7, -3, (pages * page, 4))).astype(np.float32)
    records[:, 512:528] = torch.from_numpy(scales).view(torch.uint8)
    records[:, 528:] = bf16(-128, 129, (pages * page, 64), 2.0**-7).view(torch.uint8)
    args = {
        "q": bf16(-128, 129, (b, s_q, shape.h_q, 576), 2.0**-7),
        "kv_cache": records.view(pages, page, 1, 656),
        "indices": torch.from_numpy(rng.integers(-20, pages * page, (b, s_q, topk)).astype(np.int32)),
    }
    if topk == 1:
        args["indices"].clamp_(min=0)
    options = {"softmax_scale": 2.0**-6}
    if shape.lengths:
        options["topk_length"] = torch.tensor(shape.lengths, dtype=torch.int32)
    if shape.sink:
        options["attn_sink"] = torch.from_numpy(rng.integers(-4, 5, shape.h_q)).float()
    return args, options


def bits(t: torch.Tensor) -> np.ndarray:
    return t.cpu().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32).numpy()


def run(args: dict, options: dict, **how) -> dict[str, np.ndarray]:
    how |= {"config": sm90.Config(clustered=False)}  # of these few requests the load would make clusters
    plan = mla_cute.plan_decode(args["q"], args["indices"], topk_length=options.get("topk_length"), **how)
    out, lse = mla_cute.sparse_decode(**args, **options, plan=plan, **how)
    return {"out": bits(out), "lse": bits(lse), "metadata": bits(plan.metadata), "num_splits": bits(plan.num_splits)}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    real = target.device_target
    target.device_target = lambda device: real(device)._replace(num_sms=NUM_SMS)
    for name, shape in CASES.items():
        args, options = inputs(shape)
        moved = [{n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in d.items()} for d in (args, options)]
        np.savez_compressed(folder / f"{name}.npz", **run(*moved))


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance in representable numbers, of float bit patterns of one width."""
    order = lambda v: np.where(v < 0, -(v & np.iinfo(v.dtype).max).astype(np.int64), v.astype(np.int64))  # noqa: E731
    return np.abs(order(a) - order(b))


@pytest.mark.emulate
@pytest.mark.parametrize("name", CASES)
def test_matches_the_hardware(name):
    """The plan and, of one key, out bit for bit. The tensor core adds in an order and to a width of its own, and ex2 and lg2
    are approximations: elsewhere few values of out differ, by one bf16 number or, where a sum cancels, by what an fp16 P
    that is rounded the other way changes; and lse by some fp32 ones."""
    golden = np.load(GOLDEN / f"{name}.npz")
    for n in range(8):  # schedules
        with session(num_sms=NUM_SMS, options=Options.schedule(n)):
            matches(run(*inputs(CASES[name]), backend="emulator"), golden, name)


def matches(ours: dict, golden: dict, name: str) -> None:
    assert np.array_equal(ours["metadata"], golden["metadata"])
    assert np.array_equal(ours["num_splits"], golden["num_splits"])
    distance = ulps(ours["out"], golden["out"])
    out, out_there = (torch.from_numpy(x["out"]).view(torch.bfloat16).float() for x in (ours, golden))
    cancelled = ((out - out_there).abs() < 1e-4).numpy()
    assert distance.max() == 0 if name == "one_key" else ((distance <= 1) | cancelled).all()
    assert (distance != 0).mean() < 1e-3, f"{(distance != 0).mean():.2g} of out differ"
    lse, there = (torch.from_numpy(x["lse"]).view(torch.float32) for x in (ours, golden))
    torch.testing.assert_close(lse, there, rtol=5e-7, atol=1e-6)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
