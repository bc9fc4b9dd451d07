# make train and make test on a machine with Python and make; make help lists the rest.
.DEFAULT_GOAL := help
.PHONY: help install train tensorboard test test-long lint types bench bench-long clean

PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
ARGS   ?=
JOBS   ?= 2
# What is installed beside the packages that all need (setup.cfg): with an NVIDIA GPU, CUDA for both backends.
EXTRAS ?= dev$(if $(wildcard /dev/nvidia[0-9]*),$(comma)cuda)
comma  := ,
INSTALLED = $(VENV)/installed-with-$(EXTRAS)
# On CPUs a step's arrays come from malloc: large pages, and what a step frees is kept for the next (docs/strategies.md).
export GLIBC_TUNABLES ?= \
  glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864:glibc.malloc.top_pad=67108864:glibc.malloc.tcache_count=127

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1#/' | column -t -s '#'

install: $(INSTALLED)  ## the virtual environment .venv with all that is needed

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	  { echo "Onecurve needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Say which: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. On Debian or Ubuntu: apt-get install python3-venv"; exit 2; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), with $(EXTRAS) (a minute or two the first time; CUDA, where there is a GPU, is some GB)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' || \
	  { echo "The packages could not be installed: is there a network, and an index that pip may reach?"; exit 2; }
	@touch $@

train: install  ## train; ARGS="--strategy=mirrored --devices=2 ..." are its flags
	$(RUN) -m trainer $(ARGS)

tensorboard: install  ## watch all runs under runs/
	$(VENV)/bin/tensorboard --logdir runs

test: install  ## the tests, under 15 minutes on two cores
	$(RUN) -m pytest -n $(JOBS) $(ARGS)

test-long: install  ## the tests that take longer, too
	$(RUN) -m pytest -n $(JOBS) -m "long or not long" $(ARGS)

lint: install  ## style and types
	$(VENV)/bin/ruff check trainer input_pipeline launch tests benchmarks
	$(VENV)/bin/ruff format --check trainer input_pipeline launch tests benchmarks
	$(VENV)/bin/mypy

types: install  ## types alone
	$(VENV)/bin/mypy

bench: install  ## each question of docs/performance.md, beside the rivals, under 15 minutes; writes that page
	$(RUN) -m benchmarks.step_time jax
	$(RUN) -m benchmarks.step_time tensorflow
	$(RUN) -m benchmarks.data
	$(RUN) -m benchmarks.scaling jax
	$(RUN) -m benchmarks.scaling tensorflow
	$(RUN) -m benchmarks.memory
	$(RUN) -m benchmarks.allreduce
	$(RUN) -m benchmarks.start
	$(RUN) -m benchmarks.save

bench-long: bench  ## what takes longer: saves beside bare copies, the cost of --exact, 200 kills
	$(RUN) -m benchmarks.exact_cost tensorflow
	$(RUN) -m benchmarks.exact_cost jax
	$(RUN) -m benchmarks.save_stall jax
	$(RUN) -m benchmarks.save_stall tensorflow
	$(RUN) -m benchmarks.kills --kills=200

clean:  ## remove the environment and the caches, not the runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
