# Needs Python 3.11+ and make; everything else is installed into .venv.
#   make demo    tune a real model, print before and after
#   make test    every check, as CI runs it
.DEFAULT_GOAL := help
.PHONY: help demo docs package test test-core test-long test-tensorflow lint bench judge lab peers mutants zoo zoo-sample clean

# Tests start hundreds of processes: without compiled files each compiles 300 modules, for .8 s.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
ZOO_VENV := .venv-zoo
TF_VENV := .venv-tf
ZOO := $(ZOO_VENV)/bin/python -m zoo
DIGITS := examples/digits
OUT := $(DIGITS)/out

help:
	@echo "make demo   install, tune a real model, print before and after"
	@echo "make test   every check: lint, types, import layers, tests"
	@echo "make test-core  the core's tests, on a wheel without plugins"
	@echo "make test-long  the tests that take a minute each: own suites of ONNX, random graphs"
	@echo "make test-tensorflow  the tests of TensorFlow models, in an environment of their own"
	@echo "make lint   the same without the tests"
	@echo "make judge  plans beside the best ones, on nets of which all are tried"
	@echo "make lab    searches on simulated nets: seconds, evaluations, regret"
	@echo "make peers  other tools on the same models, each in an environment of its own"
	@echo "make docs   the documentation as a site, in build/site"
	@echo "make package  the wheel and the source archive, tried in an empty environment"
	@echo "make bench  the benchmarks; figures in benchmarks/RESULTS.md"
	@echo "make mutants  do the tests notice small faults? figures in docs/testing.md"
	@echo "make zoo    architectures of other libraries through everything; writes docs/zoo.md"
	@echo "make clean  remove the environment and everything generated"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "finecast needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# Exit code 1 means that nothing could be gained on this machine (a CPU without bf16, say):
# finecast has then said why and kept fp32, which is the right answer and no failure. Python's
# own exit code for a crash is 1 too, hence the look for a traceback.
demo: $(VENV)/.installed
	@rm -rf $(OUT) && mkdir -p $(OUT)
	@echo "demo: tuning $(DIGITS)/digits.onnx"
	@{ PYTHONUNBUFFERED=1 $(BIN)/finecast tune $(DIGITS)/digits.onnx -o $(OUT)/tuned.onnx \
	    --data $(DIGITS)/digits_eval.npz --calib $(DIGITS)/digits_calib.npz \
	    --metric top1 --max-drop 0.01 --force 2>&1; \
	  echo $$? > $(OUT)/status; } | tee $(OUT)/demo.log
	@status=$$(cat $(OUT)/status); rm $(OUT)/status; \
	if [ $$status -eq 1 ] && ! grep -q Traceback $(OUT)/demo.log; then \
	  echo "demo: nothing is gained on this machine, for the reason above; the model stays fp32"; \
	elif [ $$status -ne 0 ]; then \
	  echo "demo: finecast failed with exit code $$status" >&2; exit $$status; \
	else \
	  echo "demo: the tuned model and its plan are in $(OUT)/"; \
	fi

# WORKERS=0 runs them in one process, as a debugger needs it.
WORKERS ?= auto
# Tests of the core in which plugins take part where they are here, and the pages.
WITH_PLUGINS := tests/docs tests/zoo tests/test_keywords.py tests/test_seams.py tests/test_structure.py \
  tests/reports/test_base.py tests/cli/test_both_ways.py tests/cli/test_file_names.py \
  tests/cli/test_groups.py tests/cli/test_user_files.py tests/torch/test_laws.py \
  tests/torch/test_mixed_types.py tests/torch/test_regions.py tests/torch/test_scalars.py \
  tests/torch/test_views.py
PYTEST := pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal
test: lint test-core
	$(BIN)/$(PYTEST) -m 'not long' plugins $(WITH_PLUGINS)

# What takes a minute each: it finds what the others do not, and seldom.
test-long: $(VENV)/.installed-dev
	$(BIN)/$(PYTEST) -m long

# The core's tests, on a wheel that was built where there are no plugins: it works without them.
CORE := build/core
test-core: $(VENV)/.installed-dev
	rm -rf $(CORE) && mkdir -p $(CORE)
	tar c --exclude=./plugins --exclude=./build --exclude='./.venv*' --exclude=./.git . | tar x -C $(CORE)
	$(PYTHON) -m venv $(CORE)/.venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(CORE)/.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
	$(CORE)/.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(CORE)
	cd $(CORE) && .venv/bin/python -m $(PYTEST) -m 'not long' tests

# An environment of its own: TensorFlow takes 1.3 GB, and finecast works without it.
$(TF_VENV)/.installed: pyproject.toml constraints.txt
	[ -x $(TF_VENV)/bin/python ] || $(PYTHON) -m venv $(TF_VENV)
	$(TF_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint constraints.txt --editable '.[tensorflow]' \
	  hypothesis pytest pytest-xdist scikit-learn
	@touch $@

test-tensorflow: $(TF_VENV)/.installed
	$(TF_VENV)/bin/pytest plugins/tensorflow/tests tests/native/test_conformance.py \
	  'tests/docs/test_pages.py::test_the_blocks_run[docs/start/tensorflow.md]'

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Strict: a broken link, or a page outside the navigation, is an error. The blocks of code on
# the pages are run by tests/docs.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the site is in build/site: open $(CURDIR)/build/site/index.html"

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(PIP) --editable '.[docs]'
	@touch $@

# What users install, as they do: the wheel alone in an environment of its own, called from
# another folder. Nothing of this checkout but the example's model and data is read.
package: $(BIN)/python
	rm -rf dist build/package && mkdir -p build/package
	$(PIP) build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/package/venv
	build/package/venv/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint constraints.txt dist/finecast-*.whl
	cp $(DIGITS)/digits.onnx build/package/model.onnx
	cp $(DIGITS)/digits_eval.npz build/package/data.npz
	cd build/package && venv/bin/finecast tune model.onnx -o tuned.onnx --data data.npz \
	  --metric top1 --max-drop 0.01 --target avx512-vnni
	cd build/package && venv/bin/finecast explain model.onnx --plan tuned.plan.json

bench: $(VENV)/.installed-dev
	@mkdir -p build && $(BIN)/python -m benchmarks.common > build/bench.jsonl
	@set -e; for script in benchmarks/bench_*.py; do \
	  $(BIN)/python -m benchmarks.$$(basename $$script .py) | tee -a build/bench.jsonl; done
	@echo "for RESULTS.md: $(BIN)/python -m benchmarks.report build/bench.jsonl"

# Nets of which every plan is tried: how far each tool's plan lies from the best.
judge: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.judge $(JUDGE_ARGS)

# Searches on simulated nets. LAB_ARGS='--families cnn --seeds 20'; '--held-out' is for the last run.
lab: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.lab $(LAB_ARGS)

# Other tools take some 10 GB of environments, in the user's cache. What is done already is kept:
# PEERS_ARGS='--only finecast --again' makes rows anew. Five models need .venv-zoo (make zoo).
peers: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.peers $(PEERS_ARGS)

# GROUPS="solver rules" for some of them; SAMPLE=3 for fewer mutants of each module.
SAMPLE ?= 6
mutants: $(VENV)/.installed-dev
	$(PIP) --editable '.[mutants]'
	$(BIN)/python scripts/mutants.py $(GROUPS) --sample $(SAMPLE)

# An environment of its own: the libraries whose architectures it takes are many and large.
$(ZOO_VENV)/.installed: pyproject.toml constraints.txt zoo/constraints.txt
	$(PYTHON) -m venv $(ZOO_VENV)
	$(ZOO_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint zoo/constraints.txt --editable '.[zoo]'
	@touch $@

# ZOO_ARGS='--speed' measures speed, too; '--resume' goes on where a run was stopped.
zoo: $(ZOO_VENV)/.installed
	$(ZOO) --write docs/zoo.md $(ZOO_ARGS)

# What CI runs.
zoo-sample: $(ZOO_VENV)/.installed
	$(ZOO) --sample --json build/zoo-sample.jsonl
	$(ZOO_VENV)/bin/python -m pytest -p no:cacheprovider plugins/huggingface/tests

clean:
	rm -rf $(VENV) $(ZOO_VENV) $(TF_VENV) .venv-mxnet $(OUT) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src plugins tests -name __pycache__ -type d -prune -exec rm -rf {} +
