"""examples/walkthrough.py: its values against the article's digits, and its slips against what is right."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "walkthrough.py"
spec = importlib.util.spec_from_file_location("walkthrough", SCRIPT)
walkthrough = sys.modules["walkthrough"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(walkthrough)
ROWS = {(title, row.name): row for title, step in walkthrough.STEPS.items() for row in step()}


def flat(value):
    return [x for v in value for x in flat(v)] if isinstance(value, list) else [value]


def unit(x) -> float:
    """One unit in the last digit that the article gives."""
    digits = str(x).partition(".")[2]
    return 10.0 ** -len(digits) if digits and digits != "0" else 1e-9


@pytest.mark.parametrize("key", [k for k, r in ROWS.items() if not r.slip and r.article is not None], ids=str)
def test_agrees_to_the_articles_digits(key):
    row = ROWS[key]
    computed, article = flat(row.computed), flat(row.article)
    assert len(computed) == len(article)
    for c, a in zip(computed, article):
        assert abs(c - a) < unit(a), (c, a)


@pytest.mark.parametrize("key", [k for k, r in ROWS.items() if r.slip], ids=str)
def test_a_slip_really_differs_or_is_about_the_meaning(key):
    row = ROWS[key]
    about_the_meaning = {"blocks and overhead in all", "scaled score", "scale * log2(e)", "out, bf16", "lse"}
    if row.name not in about_the_meaning:
        assert row.computed != row.article


RIGHT = {  # what is right where the article slips, computed apart from the script
    "partition 0: req, req, block, block, flags": [0, 0, 0, 1, 1, 1],
    "partition 1: req, req, block, block, flags": [0, 0, 1, 2, 1, 1],
    "partition 2: req, req, block, block, flags": [1, 1, 0, 1, 1, 1],
    "partition 3: req, req, block, block, flags": [1, 1, 1, 2, 1, 1],
    "requests that combine merges": [2],
    "largest magnitude of group 0": [0.875],
    "factor 512 stored": [0.0],
    "scale * log2(e)": [0.0601123],
    "out, bf16": [0.193359375],
    "lse": [4.537407],
    "weight of piece 2": [0.2332582],
    "sum of the weights": [1.9911164],
    "out, first two columns": [0.25960362 / 1.9911164, -0.49059438 / 1.9911164],
    "lse of the whole, natural log": [math.log(math.fsum(2**x for x in (4.2, 3.8, 2.1)))],
    "the same from the weights": [math.log(math.fsum(2**x for x in (4.2, 3.8, 2.1)))],
    "dequantised": [0.25, -0.5, 0.125, -0.0625, 0.375, -0.03125, 0.75, -0.875],
    "page and row of tokens 2091, 583, 8821": [32, 43, 9, 7, 137, 53],
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_values(name):
    (row,) = (r for (_, n), r in ROWS.items() if n == name)
    assert flat(row.computed) == pytest.approx(RIGHT[name], rel=2e-6)


def test_the_script_prints_every_step():
    done = subprocess.run([sys.executable, str(SCRIPT)], check=True, capture_output=True, text=True)
    for title, name in ROWS:
        assert title in done.stdout
        assert name in done.stdout
    assert len(re.findall(r"^  slip", done.stdout, re.M)) == sum(bool(r.slip) for r in ROWS.values())
