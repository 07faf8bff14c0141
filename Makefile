# Each target is a line or two that a person could type.
.PHONY: install quickstart test check docs clean

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export SDPO_SOAK_RUNS ?= 2000

quickstart: install        ## SDPO beside GRPO on the lab task: curves, run directories, a picture
	.venv/bin/python recipes/lab/quickstart.py

test: install              ## everything that CI runs
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy
	.venv/bin/python -m pytest -q -n 2 -m "not slow"
	.venv/bin/python -m pytest -q -m slow

check: install             ## the quick part of it
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy
	.venv/bin/python -m pytest -q -n 2 -m "not slow"

docs: install              ## pages that are generated from the code
	.venv/bin/python -m sdpo.config_reference > docs/configuration.md
	.venv/bin/python -m sdpo.config_reference --troubleshooting > docs/troubleshooting.md

install:                   ## .venv, with a CPU build of torch where there is no GPU
	scripts/install.sh dev

clean:
	rm -rf .venv runs
