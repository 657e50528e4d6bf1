# Every task of the project, on a machine with Python 3.11 or newer, pip and make. `make help` lists them.

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
# Without the constraints pip is free to choose another torch, so every install goes through this line.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PINS    := pyproject.toml constraints.txt
# Neighbours stay in one worker (worksteal), so that what a module trains for its tests is trained once, not per worker.
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --doctest-modules --durations=10 --durations-min=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint format bench docs site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed-demo  ## run the main job on real digits, write out/report.html
	$(BIN)/intertwine demo --out out

test: $(VENV)/.installed-dev  ## run the test suite and the examples in the docstrings
	$(PYTEST) -m "not slow" src tests

test-slow: $(VENV)/.installed-dev  ## run the tests that take minutes
	$(PYTEST) -m slow tests

lint: $(VENV)/.installed-dev  ## check style, layout and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: $(VENV)/.installed-dev  ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev  ## measure everything this machine can (hours): make bench ONLY=fuzz,discovery PEERS=PYTHON
	$(BIN)/python bench/all.py $(if $(ONLY),--only $(ONLY)) $(if $(PEERS),--peers $(PEERS))

docs: $(VENV)/.installed-dev  ## regenerate the generated pages from the result files
	$(BIN)/python bench/coverage.py --page
	$(BIN)/python docs/activations.py
	$(BIN)/python docs/measures.py
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/alignment_figures.py
	$(BIN)/python docs/stitching_figures.py
	$(BIN)/python docs/folding_figures.py
	$(BIN)/python docs/inspection_figures.py
	$(BIN)/python docs/reproduction.py --figures
	$(BIN)/python docs/architecture_figure.py
	$(BIN)/python docs/results.py
	$(BIN)/python docs/benchmarks.py
	$(BIN)/intertwine inspect examples/residual.py:net --svg docs/images/wires.svg
	$(BIN)/python examples/compare_checkpoints.py docs/images
	$(BIN)/python examples/merge_models.py docs/images
	$(BIN)/python examples/shrink_model.py docs/images
	$(BIN)/python docs/figures.py docs/images/wires.svg docs/images/compare_checkpoints.png docs/images/merge_models.png docs/images/shrink_model.png

site: $(VENV)/.installed-dev  ## build the documentation, build/site/index.html, without a network
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -E -d build/site-cache docs build/site
	$(BIN)/python docs/site/offline.py build/site

clean:  ## remove the environment, caches and results
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .pyrefly_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made once. pip appears last in a new environment, so it stands for a finished one.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "intertwine needs Python 3.11 or newer, but $(PYTHON) is missing or older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras: a second run installs nothing unless the requirements changed.
$(VENV)/.installed-demo: $(PINS) | $(BIN)/pip
	@echo "installing intertwine for the demo ..."
	$(INSTALL) -e '.[cli,data,frames,plot]'
	@touch $@

$(VENV)/.installed-dev: $(PINS) | $(BIN)/pip
	@echo "installing intertwine for development ..."
	$(INSTALL) -e '.[dev,models]'
	@touch $@
