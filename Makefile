# `make demo` and `make test` include the set-up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  ?= tests
# Options for pip, such as the index of PyTorch's CPU builds on a machine without a GPU.
PIP_FLAGS ?=

.PHONY: help install native wheel wheels demo test test-all test-cpus gpu docs lint format clean

help:                ## show this list
	@sed -n 's/^\([a-z-]*\): .*## /  make \1	/p' $(MAKEFILE_LIST)

# Made anew if the declared or the pinned dependencies change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "transduce needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV) (a few minutes on a slow connection) ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $@

# Installing has compiled the library; this compiles what has changed since. Without a compiler it prints so and succeeds.
native:              ## compile what has changed in the native library (all of it: half a minute)
	@TRANSDUCE_NATIVE_REQUIRED=$$(command -v "$${CXX:-c++}" >/dev/null && echo 1) $(BIN)/python setup.py --quiet build_ext --inplace

install: $(READY) native ## create .venv with pinned versions and the native library
	@$(BIN)/transduce --version

wheel:               ## build the wheel of the package with its native library into dist/
	rm -rf build/lib*
	TRANSDUCE_NATIVE_REQUIRED=1 $(PYTHON) -m pip wheel --quiet --no-deps $(PIP_FLAGS) --wheel-dir dist .

# Of other systems than Linux the compiler is zig's, a package of PyPI, whose Clang has their headers and libraries.
ZIG    := $(VENV)/bin/python -m ziglang c++ -target
OTHERS := linux-aarch64 macosx-11.0-arm64 win-amd64
CXX_linux-aarch64     ?= aarch64-linux-gnu-g++
CXX_macosx-11.0-arm64 ?= $(ZIG) aarch64-macos.11.0
CXX_win-amd64         ?= $(ZIG) x86_64-windows-gnu
wheels: $(READY) wheel ## also build the wheels of Linux on AArch64, macOS on arm64 and Windows into dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt ziglang
	$(foreach system,$(OTHERS),rm -rf build/lib* && TRANSDUCE_NATIVE_REQUIRED=1 _PYTHON_HOST_PLATFORM=$(system) CXX='$(CXX_$(system))' \
	  $(BIN)/python -m pip wheel --quiet --no-deps $(PIP_FLAGS) --wheel-dir dist . &&) ls dist

demo: $(READY) native ## train on the built-in corpus (a few minutes), translate, show
	$(BIN)/transduce demo

test: $(READY) native ## run the tests, except those marked slow
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow' $(TESTS)

test-all: $(READY) native ## run all tests: also long trainings, kills, more fuzzing, the site and the wheel
	$(BIN)/python -m pytest -n auto --dist worksteal $(TESTS)

# Tests whose results depend on rounding, with the CPU's own instructions (native) and with those of lesser CPUs.
# Two threads need pytest without xdist, whose workers have one thread each.
ARITHMETIC ?= tests/oracle tests/unit/nn tests/unit/models tests/unit/training tests/unit/decoding tests/unit/bulk \
  $(addprefix tests/system/test_,$(addsuffix .py,learn memory vectors encoder causal resume ranks trust native))
has      = $(if $(shell grep -wm1 $(1) /proc/cpuinfo 2>/dev/null),$(2))
CPUS    ?= $(sort $(call has,avx512f,avx2) $(call has,avx_vnni,avx2 avx_vnni) $(call has,avx512_vnni,avx512) $(call has,amx_tile,avx512_bf16) native)
THREADS ?= 1 2
ISA_avx2        := TRANSDUCE_NATIVE_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
ISA_avx_vnni    := TRANSDUCE_NATIVE_ISA=avx_vnni $(filter-out TRANSDUCE%,$(ISA_avx2))
ISA_avx512      := TRANSDUCE_NATIVE_ISA=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512
ISA_avx512_bf16 := TRANSDUCE_NATIVE_ISA=avx512_vnni ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 MKL_ENABLE_INSTRUCTIONS=AVX512_E1
test-cpus: $(READY) native ## run the tests that depend on rounding, under lesser instruction sets and with two threads
	@failed=; $(foreach cpu,$(CPUS),$(foreach n,$(THREADS),echo '$(cpu), threads: $(n)'; \
	env $(ISA_$(cpu)) OMP_NUM_THREADS=$(n) GOMP_SPINCOUNT=10000 $(BIN)/python -m pytest $(if $(filter 1,$(n)),-n auto --dist worksteal) $(ARITHMETIC) \
	|| failed="$$failed $(cpu):$(n)"; )) test -z "$$failed" || { echo "failed on:$$failed"; exit 1; }

# Uses the Python of a GPU machine as it is: constraints.txt does not list the packages that PyTorch needs for GPUs.
gpu:                 ## run all tests and benchmarks for a GPU with $(PYTHON), whose PyTorch finds it; results in build/gpu
	mkdir -p build/gpu
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(TESTS)
	PYTHONPATH=src $(PYTHON) -m transduce demo --run build/gpu/demo
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py --run build/gpu/demo >build/gpu/results.md
	cat build/gpu/results.md

docs: $(READY) native ## build the documentation's site in build/site
	$(BIN)/python docs/build_site.py
	TRANSDUCE_VERSION="transduce $$($(BIN)/python -c 'import transduce; print(transduce.__version__)')" $(BIN)/zensical build --strict --clean
	@echo 'Open build/site/index.html; to search it, run $(BIN)/python -m http.server --directory build/site and open localhost:8000'

LOOSE := arg-type index misc operator return-value union-attr var-annotated
lint: $(READY)       ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
# Whether the benchmarks still call the package as it is: their types beyond that are not checked.
	$(BIN)/mypy benchmarks --ignore-missing-imports --no-warn-unused-ignores $(patsubst %,--disable-error-code %,$(LOOSE))

format: $(READY)     ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:               ## remove build results (run folders stay)
	rm -rf native/build src/transduce/kernels/*.so
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
