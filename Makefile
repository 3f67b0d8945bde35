# Two commands: `make demo` and `make test`. Each makes the virtual environments it needs. While working: `make check`.
#
#   PYTHONS="3.11 3.12 3.13"   the Python versions `make test` looks for; those it does not find are named and left out
#   PYTEST_ARGS=...       further arguments for pytest, such as PYTEST_ARGS="-k sharding -x"
#   NPROC=2               test processes
#   CUDA_ARCHITECTURES=90 what `make build` compiles the CUDA kernels for, such as "80;90"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHONS ?= 3.11 3.12 3.13
PYTEST_ARGS ?=
NPROC ?= 2
CUDA_ARCHITECTURES ?= 90
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process here imports jax: twice the time where the bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE

# The interpreter of a Python version: on the PATH or among pyenv's, and able to make a virtual environment.
python = $(shell for p in python$(1) $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python$(1) /usr/bin/python$(1) \
	/usr/local/bin/python$(1) python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' >/dev/null 2>&1 \
	&& { command -v "$$p"; break; }; done)
constraints = constraints/jax-$(if $(filter 3.11,$(1)),0.10,$(if $(filter 3.12,$(1)),0.11,0.12)).txt
all_constraints := $(foreach jax,0.10 0.11 0.12,constraints/jax-$(jax).txt)

found := $(foreach v,$(PYTHONS),$(if $(call python,$(v)),$(v)))
missing := $(filter-out $(found),$(PYTHONS))
# The demo and the linters need one environment: the first of these that is there.
one := $(firstword $(found) $(foreach v,3.11 3.12 3.13,$(if $(call python,$(v)),$(v))))

cuda_sources = $(shell find csrc benchmarks -name "*.cu" -o -name "*.cuh" -o -name "*.h" -o -name "*.cc")

.PHONY: help demo test test-all check docs prepare lint format build wheel clean pythons $(found:%=test-%)

help:
	@echo "make demo    a small trained V4 writes Python through the cache on this machine's CPU, and is checked"
	@echo "make test    lint, build, and tests on Python $(PYTHONS)"
	@echo "make test-all  as test, with every slow test and every case"
	@echo "make check   lint, types, and the tests that compile nothing: under two minutes"
	@echo "make docs    the site, in build/site; a warning is an error"
	@echo "make lint | format | build | wheel | clean | test-3.11 | test-3.12 | test-3.13"

demo: .venv/ready
	@.venv/bin/python -m dsv4_jax demo --checkpoint checkpoints/small

# Tests of the host's half: no device, hardly anything to compile. On Python 3.12, or the one there is.
host_tests := $(wildcard tests/manager tests/stores tests/cli tests/docs/test_reference.py tests/docs/test_pictures.py \
	tests/bench/test_records.py tests/bench/test_shapes.py \
	tests/pools/test_token_allocator.py tests/pools/test_radix_cache.py tests/pools/test_interrupted.py tests/formats \
	$(foreach t,capacity config eviction_queue events layout output packaging public_names structure libraries,tests/test_$(t).py))
check_python := $(firstword $(filter 3.12,$(found)) $(one))

check: lint .venv-$(check_python)/ready
	@echo "== check: Python $(check_python)"
	@.venv-$(check_python)/bin/python -m pytest -n $(NPROC) -p no:cacheprovider -m "not slow" $(PYTEST_ARGS) $(host_tests)

docs: .venv-docs/ready
	@echo "== docs"
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --clean
	@echo "build/site/index.html"

test: pythons prepare $(found:%=test-%)
	@echo "All passed on Python $(found).$(if $(missing), NOT RUN on Python $(missing): not found.)"

pythons:
	@$(if $(found),,echo "None of Python $(PYTHONS) was found (with the venv and ensurepip modules)" >&2; exit 1)
	@$(foreach v,$(found),echo "Python $(v): $(call python,$(v)), $(call constraints,$(v))";)
	@$(foreach v,$(missing),echo "Python $(v): NOT FOUND on this machine, its tests will not run";)

# Side by side: most of it is waiting for downloads, and the linters and compilers need one environment only.
prepare:
	@$(MAKE) -j 4 --output-sync=target $(found:%=.venv-%/ready) lint build

lint: .venv-$(one)/ready
	@echo "== lint"
	@.venv-$(one)/bin/ruff check --quiet .
	@.venv-$(one)/bin/ruff format --quiet --check .
	@.venv-$(one)/bin/clang-format --dry-run --Werror $(cuda_sources)
	@.venv-$(one)/bin/pyrefly check --python-interpreter-path .venv-$(one)/bin/python --summary=none --output-format=min-text

format: .venv-$(one)/ready
	@.venv-$(one)/bin/ruff check --fix . && .venv-$(one)/bin/ruff format . && .venv-$(one)/bin/clang-format -i $(cuda_sources)

# Native code, into dsv4_jax/native/: C++ always, CUDA where nvcc is. Against the headers of the oldest supported jaxlib.
# tests/cuda/test_build.py reads the assembler's reports; tests/test_wheel.py makes a wheel of what is in build/.
native = -DPYTHON=$(CURDIR)/.venv-$(one)/bin/python -DDSV4_PTXAS_REPORT=ON "-DDSV4_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)"
build: .venv-$(one)/ready
	@echo "== build"
	@export PATH="$(CURDIR)/.venv-$(one)/bin:$$PATH"; mkdir -p build; { cmake -S csrc -B build -G Ninja $(native) \
		&& cmake --build build --parallel $(NPROC) && cmake --install build --prefix . --component libraries --strip; } >build/build.log 2>&1 \
		|| { cat build/build.log; exit 1; }
	@grep -h "not built\|left out" build/build.log || true

# For every GPU that nvcc knows, as a user's `pip install .` makes it.
wheel: .venv-$(one)/ready
	@.venv-$(one)/bin/python -m pip wheel --no-deps -w dist .

# Before a release, and after a change of many files: every case of every test on every Python.
test-all: export RUN_SLOW := 1
test-all: test

# The others leave to Python 3.12 what does not differ between them (tests/conftest.py), if it is there.
$(if $(filter 3.12,$(found)),,$(eval export RUN_SLOW := 1))

$(found:%=test-%): test-%: .venv-%/ready
	@echo "== Python $*: $$(.venv-$*/bin/python -c 'import jax, numpy; print("jax", jax.__version__, "numpy", numpy.__version__)')"
	@.venv-$*/bin/python -m pytest -n $(NPROC) --dist loadfile --no-loadscope-reorder \
		-p no:cacheprovider --durations=5 $(PYTEST_ARGS)

# $(call install,environment,version,extras): pip's own output goes to a file, shown if it fails.
define install
	@echo "== $(1): Python $(2), installing $(if $(3),with $(3))"
	@"$(call python,$(2))" -m venv --clear $(1)
	@$(1)/bin/python -m pip install --no-compile -c $(call constraints,$(2)) -e '.$(if $(3),[$(3)])' >$(1)/pip.log 2>&1 \
		|| { tail -n 20 $(1)/pip.log; echo "pip failed; all of its output is in $(1)/pip.log"; exit 1; }
	@touch $@
endef

.venv/ready: pyproject.toml $(all_constraints)
	@$(if $(one),,echo "No Python 3.11, 3.12 or 3.13 was found (with the venv and ensurepip modules)" >&2; exit 1)
	$(call install,.venv,$(one),text)

.venv-%/ready: pyproject.toml $(all_constraints)
	$(call install,.venv-$*,$*,dev)
	@$(if $(filter 3.12,$*),.venv-$*/bin/python -m pip install --quiet --no-compile --no-deps -r constraints/dynamo.txt)

# The site's tools alone: they read the package's source, and import what makes the page of results, benchmarks/render.py (NumPy is enough).
.venv-docs/ready: constraints/docs.txt
	@echo "== .venv-docs: Python $(one), installing mkdocs"
	@"$(call python,$(one))" -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --no-compile -r constraints/docs.txt >.venv-docs/pip.log 2>&1 \
		|| { tail -n 20 .venv-docs/pip.log; echo "pip failed; all of its output is in .venv-docs/pip.log"; exit 1; }
	@touch $@

clean:
	rm -rf .venv .venv-docs .venv-3.* build dist dsv4_jax/native *.egg-info .pytest_cache .hypothesis .ruff_cache demo-out
