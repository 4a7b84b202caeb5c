"""Tiers: unmarked and `compile` tests run anywhere; `gpu` and `grid` tests are skipped, with the reason, where no GPU has a
kernel. `grid` tests are left out unless -m names them."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--impl", default=None, help="implementation of sparse_decode for the gpu tier: module or .py path")
    parser.addoption(
        "--grid-shard", default="0/1", metavar="I/N", help="of the grid, every N-th case from the I-th on (I from 0)"
    )


@pytest.fixture(scope="session")
def impl(request):
    """What to pass as impl=: None for the shipped kernel."""
    return request.config.getoption("--impl")


def pytest_collection_modifyitems(config, items):
    reason = _no_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu") or item.get_closest_marker("grid"):
                item.add_marker(pytest.mark.skip(reason=reason))
    grid = [item for item in items if item.get_closest_marker("grid")]
    index, count = _shard(config.getoption("--grid-shard"))
    kept = grid[index::count] if "grid" in config.getoption("markexpr") else []
    if len(kept) < len(grid):
        left_out = set(grid) - set(kept)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise pytest.UsageError(f"--grid-shard: must be I/N with 0 <= I < N, got {text}")
    return int(index), int(count)


def _no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU, torch sees none"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"needs compute capability 9.0, got {major}.{minor}"
