# `make` lists the targets. Every target sets up .venv by itself; PYTHON=... chooses the interpreter (3.11 or newer).
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PAIR := -n 2
BY_FILE := $(PAIR) --dist loadfile --no-loadscope-reorder # what tests of a file share is made once
SMOKE = -q -m 'smoke or golden' tests/golden $(shell grep -rl --include='test_*.py' 'mark\.smoke' tests)

.DEFAULT_GOAL := help
.PHONY: help demo check smoke test test-all test-full test-other-torch test-one-process test-unit test-golden test-op-db test-dist test-gpu test-nullcuda \
    test-benchmarks test-foresight docs site lint size wheel test-wheel bench bench-peers bench-gpu venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a small GPT on two processes and compare (ARGS="--style zero1 --ranks 3")
	$(BIN)/python -m examples.demo $(ARGS)

check: $(STAMP) ## before each commit, a minute: lint and types beside imports, golden text and one quick test of each part
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint smoke

test: $(STAMP) ## each behaviour once, about 21 minutes on two cores; both halves run whatever the first one says
	@status=0; for half in test-one-process test-dist; do $(MAKE) --no-print-directory $$half || status=1; done; exit $$status

test-all: test test-full test-other-torch ## everything

test-full: $(STAMP) ## what `make test` leaves out: whole crosses, 3 and 4 ranks, catalogues (ARGS="--minutes 20": a part each day)
	$(PYTEST) benchmarks/tests foresight/tests tests -m full $(BY_FILE) $(ARGS)

test-other-torch: $(STAMP) ## the quick tests in each environment that is called .venv-*, for other versions of torch
	@status=0; for python in .venv-*/bin/python; do \
	  if [ -x "$$python" ]; then \
	    "$$python" -c 'import torch; print("torch", torch.__version__)' && OMP_NUM_THREADS=1 "$$python" -m pytest $(SMOKE) || status=1; \
	  else echo "no other torch: python -m venv .venv-NAME"; fi; \
	done; exit $$status

smoke: $(STAMP) ## golden text and one quick test of each part
	$(PYTEST) $(SMOKE)

# One run for all of these: each run of pytest imports torch and the tests anew in three processes. The last files are short: no core is idle for long.
test-one-process: $(STAMP) ## all but test-dist and what lint runs: unit, golden, op_db, gpu, foresight, benchmarks, tools, docs
	$(PYTEST) benchmarks/tests foresight/tests tests tools/tests --ignore tests/dist --ignore tests/unit/test_imports.py $(BY_FILE) $(ARGS)

test-unit: $(STAMP) ## tests that need no process group (ARGS goes to pytest)
	$(PYTEST) tests/unit $(BY_FILE) --ignore tests/unit/test_docs.py $(ARGS)

test-golden: $(STAMP) ## printed text against tests/golden/*.txt (ARGS=--accept rewrites the files)
	$(call tier,golden)

test-op-db: $(STAMP) ## the day's share of PyTorch's database of ops, in a step, by every plan (ARGS=--all-ops takes all)
	$(call tier,op_db,$(PAIR))

test-dist: $(STAMP) ## tests on gloo processes, three files at a time: ranks wait for each other, and for limits of time
	$(call tier,dist,$(subst -n 2,-n 3,$(BY_FILE)))

test-gpu: $(STAMP) ## tests that need a GPU (skipped without one)
	$(call tier,gpu)

NULL_DEVICE := build/nullcuda
test-nullcuda: $(NULL_DEVICE)/nullcuda ## launches, copies and streams of a step, counted on a CUDA device that computes nothing (downloads 530 MB)
	PYTHONPATH=src:. OMP_NUM_THREADS=1 NULLCUDA_DEVICES=2 $(NULL_DEVICE)/nullcuda python -m pytest tests/nullcuda tests/gpu/test_programs.py $(ARGS)

$(NULL_DEVICE)/nullcuda: $(wildcard tools/nullcuda/*)
	PYTHON=$(PYTHON) tools/nullcuda/build.sh $(NULL_DEVICE)

test-benchmarks: $(STAMP) ## tests of benchmarks/ and tools/
	$(PYTEST) benchmarks/tests tools/tests $(ARGS)

test-foresight: $(STAMP) ## tests of foresight/: other software, numbers of GPUs, calibration, accuracy
	$(PYTEST) foresight/tests $(PAIR) $(ARGS)

docs: $(STAMP) ## run every snippet of README.md and docs/, check the links
	$(PYTEST) tests/unit/test_docs.py $(PAIR) $(ARGS)

site: $(STAMP) ## build the documentation as a site into build/site; a warning is an error (ARGS goes to mkdocs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

lint: $(STAMP) ## ruff, pyright, size limits, names that say nothing, import directions
	@status=0; \
	for check in 'ruff check .' 'ruff format --check .' 'pyright' 'python tools/size.py --brief' 'python tools/names.py --brief' \
	    'python tools/api.py --check' 'python -m pytest -q tests/unit/test_imports.py'; do \
	  echo "$$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

size: $(STAMP) ## table of code lines per file and function
	$(BIN)/python tools/size.py

wheel: $(STAMP) ## build the wheels of wholestep and wholestep-foresight into dist/
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . ./foresight

EMPTY := build/empty
test-wheel: wheel ## install the built wheels into an empty environment and train a step there
	rm -rf $(EMPTY)
	$(BIN)/python -m venv $(EMPTY)
	PIP_CONSTRAINT=constraints.txt $(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile dist/*.whl
	$(EMPTY)/bin/python -I tools/first_step.py
	rm -rf $(EMPTY)

bench: $(STAMP) ## measure the cost of calling a compiled step, then a step beside DDP and FSDP2 (a few minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers run --rounds 3

bench-peers: $(STAMP) ## the whole comparison (ARGS="--peers all --config M --rate 250mbit"; python -m benchmarks.peers list)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers run $(ARGS)

bench-gpu: $(STAMP) ## a step on one CUDA device beside its peers, ten minutes (ARGS="--json runs/gpu.json"; --nullcuda; --device cpu --sizes tiny)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

venv: $(STAMP) ## create or update .venv from constraints.txt

clean: ## remove caches and build output (keeps .venv)
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests tools examples benchmarks foresight -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A tier whose folder holds no tests yet is said to be empty: pytest would call it a failure.
define tier
@if compgen -G 'tests/$(1)/test_*.py' >/dev/null; then set -x; $(PYTEST) tests/$(1) $(2) $(ARGS); else echo "tests/$(1): empty"; fi
endef

# A .venv that is there already is kept and completed.
$(STAMP): pyproject.toml foresight/pyproject.toml constraints.txt
	@set -e; if [ ! -x $(BIN)/python ]; then \
	  for p in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
	    if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$p; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then echo "wholestep needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	  "$$found" -m venv $(VENV); \
	fi
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs,hf]' -e ./foresight
	@touch $@
