# Everything runs in .venv, which each target makes if it is missing. Needs Python 3.11 to 3.13 and make.
PYTHON ?= python3.11
BIN := .venv/bin
EXTRAS ?= engine,dev
export TOKENIZERS_PARALLELISM := false
# Container images often set it. Without compiled files each process imports torch and transformers 6 seconds longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test slow release check size lowest site

help:   ## Show this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/: .*## /\t/' | expand -t 8

setup: .venv/.ready  ## Make .venv with the pinned packages
demo: .venv/.ready  ## Sweep, grade and report on an embedded model: results/runs/demo/report/report.html
	$(BIN)/kvsweep -m experiment=demo launcher=local
	$(BIN)/kvsweep report results/runs/demo

test: .venv/.ready  ## All tests that need nothing but this checkout
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not release and not slurm and not browser"

slow: .venv/.ready  ## The other tests of CI: attacks, mutants, families, further cases
	$(BIN)/python -m pytest -n 2 --dist worksteal --dearest 20 -m "slow and not release and not slurm and not browser"

release: .venv/.ready  ## What only a release needs: all cases, published findings, kernels lowered, all of SLURM
	$(BIN)/python -m pytest -n 2 --dist worksteal --dearest 20 -m "release and not slurm"
	$(BIN)/python -m pytest -q results/published
	$(BIN)/python -m pytest --dearest 20 -m "slurm and slow" tests/slurm

lowest:  ## The commands that read files alone, with the lowest version of each direct dependency
	@rm -rf build/lowest && $(PYTHON) -m venv build/lowest && cp -r tests/stored/8ed060b build/lowest/run
	@build/lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct -e .
	for command in status "grade --all" report export; do \
		build/lowest/bin/kvsweep $$command build/lowest/run >build/lowest/said || exit 1; done

site: .venv/.ready  ## The static site in build/site, with the published reports; fails on a dead link
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check -c constraints.txt -e '.[site]'
	$(BIN)/python scripts/site.py

size: .venv/.ready  ## Tokens and density of the core, of each annex, and of the tests
	$(BIN)/python scripts/size.py

check: .venv/.ready  ## Lint, formatting, types, and that no part has grown
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/size.py --check

# Python compiles what it imports, here what a decoding command does; pip would first compile all that torch and
# transformers have.
.venv/.ready: pyproject.toml constraints.txt
	@echo "setup: .venv with torch, transformers and the other packages, one to two minutes"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python -c "import kvsweep.harness.sweep.execute, transformers.models.llama.modeling_llama"
	@touch $@
