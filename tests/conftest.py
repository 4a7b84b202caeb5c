"""Tiers: unmarked and `compile` tests run anywhere; `gpu` tests are skipped, with the reason, where no GPU has a kernel."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--impl", default=None, help="implementation of sparse_decode for the gpu tier: module or .py path")


@pytest.fixture(scope="session")
def impl(request):
    """What to pass as impl=: None for the shipped kernel."""
    return request.config.getoption("--impl")


def pytest_collection_modifyitems(items):
    reason = _no_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU, torch sees none"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"needs compute capability 9.0, got {major}.{minor}"
