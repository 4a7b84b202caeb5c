# Every target makes .venv when it is missing. PYTHON=python3.12 make demo   picks another interpreter.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test lint compile emulate gpu grid bench clean

demo: .venv/.ready  ## the main job: on the GPU if there is one, else on the CPU
	$(PY) examples/sparse_decode.py

test: .venv/.ready  ## everything that needs no GPU
	$(PY) -m pytest -q -n auto -m "not gpu"

lint: .venv/.ready
	$(PY) -m ruff check .

compile: .venv/.ready  ## every kernel compiles, without spills
	$(PY) -m pytest -q -m compile

emulate: .venv/.ready  ## the kernels, run on the CPU from their PTX
	$(PY) -m pytest -q -n auto -m emulate

gpu: .venv/.ready  ## the kernels' numbers; needs a Hopper GPU
	$(PY) -m pytest -q -m gpu

grid: .venv/.ready  ## FlashMLA's whole grid of cases; needs a Hopper GPU
	$(PY) -m pytest -q -m grid tests/test_grid.py

bench: .venv/.ready  ## needs a Hopper GPU
	$(PY) -m mla_cute.bench sparse_decode

# torch first and pinned: what the index gives for this machine (a CPU build, say) must not be replaced by the rest.
.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv && $(PY) -m pip install -q torch==2.13.0 && $(PY) -m pip install -q -e ".[test]" && touch $@

clean:
	rm -rf .venv
