# Every chore by name; `make help` lists them.
#
# Needed on the machine: make, a C++20 compiler, Python 3.10 or later with its headers and venv.
# Everything else, cmake and ninja too, comes from PyPI into .venv on first use; nothing is
# installed elsewhere. Overridable: PYTHON=python3.12  TORCH=torch==2.13.0  PYTEST='-k fold -x'
# TENSORFLOW=tensorflow-cpu==2.21.0  REPORT='--quick --only all_reduce,training'
# DEVICE='--out FILE --ranks 1,2'
# PEERS= (MPIs beside Open MPI)  MPIS= (those that tests use)  WORKERS= (tests in one process)
# CLANG=clang++-14 (sanitizers and fuzzers by clang)

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TENSORFLOW ?= tensorflow-cpu==2.21.0
PYTEST ?=
WORKERS ?= -n 3 --dist loadgroup
MUTANTS ?= --table
OUT    ?= demo-output
BASE   ?= HEAD
PEERS  ?= mpich impi
MPIS   ?= openmpi mpich impi
REPORT ?=
CLANG  ?=
GUARDS ?= --draw
DIFFERENTIAL ?= --seconds 3600
TIDY   ?= $(shell git ls-files 'csrc/*.cpp' 'tests/core/*.cpp')

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
COMMA  := ,
SPACE  := $(subst ,, )
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PINNED := $(PIP) --require-hashes --requirement .ci/pins/

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

SOURCES := $(shell find csrc python -name __pycache__ -prune -o -print) CMakeLists.txt pyproject.toml README.md
SANITIZED = PYTHONPATH=build/asan-package LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so)" \
            ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 $(BIN)/python -m
BY_CLANG := $(if $(CLANG),clang-)
CPP      = $(shell git ls-files --cached --others --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp')

# One build tree (pyproject.toml's build-dir) has the wheel, the C++ tests, the core's parts for tests
# and the core with fault points: the engine is compiled once.
TREE  := build/$(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
WHEEL := build/dist
# A compiler that was asked for has a tree of its own: cmake does not change it in an old one.
ASKED := $(if $(filter default undefined,$(origin CXX)),,$(notdir $(CXX)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES: # no rule of its own: make would compile a folder from the file of its name
.PHONY: demo test test-all test-cpp test-jax test-tf216 mutants guards faults differential additions lint tidy format sanitize sanitize-address sanitize-thread sanitize-module bench device device-wheels device-dry docs site size clean help

# ---- what a person asks for ----

demo: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/demo  ## train on 1 and 2 ranks, compare, draw pictures
	@$(BIN)/python examples/demo.py --output $(OUT)

test: test-cpp $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/on-torch $(STAMPS)/tensorflow $(STAMPS)/test $(MPIS:%=$(STAMPS)/mpi-%)  ## build, install into .venv, run all tests
	cmake --build $(TREE) --target core_testing faulty_core
	$(BIN)/python -m pytest $(WORKERS) --junit-xml=build/pytest.xml $(PYTEST)

test-all: export GRID := full
test-all: test  ## the same with every combination of every table

mutants: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/on-torch $(STAMPS)/tensorflow $(STAMPS)/test  ## put small faults into the code and show that tests notice; MUTANTS='--draw 4' for a few
	$(BIN)/python tests/mutations/run.py $(MUTANTS)

differential: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/tensorflow $(STAMPS)/test  ## draw training programs for an hour and compare ranks with one process; DIFFERENTIAL='--seconds 90'
	$(BIN)/python tests/differential/search.py $(DIFFERENTIAL)

faults: $(STAMPS)/farandole $(STAMPS)/test  ## do what may go wrong to jobs, and write docs/reliability.md: what they tell, and when; FAULTS='--rows 1 2' for a look
	$(BIN)/python tests/faults/report.py $(FAULTS)

fuzz: $(STAMPS)/build  ## feed damaged messages and files to what reads them, for an hour, by clang's libFuzzer; FUZZ='--seconds 120'
	cmake --preset fuzz -DCMAKE_CXX_COMPILER=$(or $(CLANG),clang++)
	cmake --build --preset fuzz
	$(BIN)/python tests/fuzz/run.py $(FUZZ)

guards: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/tensorflow $(STAMPS)/test $(STAMPS)/lint $(STAMPS)/site  ## plant one fault for each guard of these checks and show that it fails; GUARDS= for all
	$(BIN)/python tests/guards/run.py $(GUARDS)

additions: $(STAMPS)/farandole $(STAMPS)/test  ## add a dummy for each row of CONTRIBUTING's table and show that the rest follows
	$(BIN)/python tests/additions/run.py

test-cpp: $(if $(ASKED),$(STAMPS)/build,$(STAMPS)/farandole)  ## the C++ tests alone; CXX=clang++-14 by another compiler
ifneq ($(ASKED),)
	cmake -S . -B build/$(ASKED) -G Ninja -DFARANDOLE_MODULE=OFF -DFARANDOLE_TESTS=ON -DFARANDOLE_WERROR=ON
endif
	cmake --build build/$(or $(ASKED),$(notdir $(TREE))) --target farandole_tests farandole_cuda_tests
	ctest --test-dir build/$(or $(ASKED),$(notdir $(TREE))) --parallel 3 --output-on-failure

# TensorFlow 2.16 wants numpy below 2, and so an environment of its own.
test-tf216: $(STAMPS)/farandole  ## the tests of TensorFlow with the oldest version that works
	$(PYTHON) -m venv $(VENV)/tf216
	$(BIN)/python -m pip --disable-pip-version-check --python $(VENV)/tf216/bin/python install --quiet --group test-tf216
	$(BIN)/python -m pip --disable-pip-version-check --python $(VENV)/tf216/bin/python install --quiet --no-deps --force-reinstall $(WHEEL)/*.whl
	$(VENV)/tf216/bin/python -m pytest $(WORKERS) tests/frameworks/test_tensorflow_*.py $(PYTEST)

# JAX 0.11 and newer want Python 3.12 or later: that of .ci/wheel, which has the wheel.
test-jax: JAX_PYTHON ?= build/wheel-3.12/venv/bin/python
test-jax: $(STAMPS)/venv  ## those tests of JAX that depend on its version, with the newest that works, where `.ci/wheel python3.12` has run; another Python with JAX_PYTHON=
	$(BIN)/python -m pip --disable-pip-version-check --python $(JAX_PYTHON) install --quiet --group test-jax
	$(JAX_PYTHON) -m pytest $(WORKERS) $(foreach part,abi ops derivatives,tests/frameworks/test_jax_$(part).py) $(PYTEST)

# Without ruff's cache: it does not see that a module moved, by which imports are sorted.
lint: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/test $(STAMPS)/lint  ## formatting, lint, spelling, types; clang-tidy over what changed since BASE
	ruff check --no-cache
	ruff format --check
	clang-format --dry-run -Werror $(CPP)
	codespell
	mypy
	basedpyright
	$(BIN)/python .ci/completeness.py
	cmake --build $(TREE) --target core_testing
	MYPYPATH=tests PYTHONPATH=$(TREE)/testing $(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml farandole._core _core_testing
	@$(MAKE) --no-print-directory tidy TIDY="$$(git diff --name-only --diff-filter=d $(BASE) -- 'csrc/*.cpp' 'tests/core/*.cpp')"

tidy: $(STAMPS)/build $(STAMPS)/lint  ## clang-tidy (.clang-tidy) over csrc and tests/core, but the bindings
	@cmake -S . -B build/tidy -G Ninja -DFARANDOLE_MODULE=OFF -DFARANDOLE_TESTS=ON -DFARANDOLE_UNITY=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	@echo $(filter-out csrc/bindings/% tests/core/bindings/%,$(TIDY)) | xargs --no-run-if-empty -n 4 -P $$(nproc) clang-tidy -p build/tidy --quiet --warnings-as-errors='*'

format: $(STAMPS)/lint  ## format C++ and Python in place
	ruff check --fix-only
	ruff format
	clang-format -i $(CPP)

sanitize: sanitize-address sanitize-thread  ## C++ tests, ranks that are processes among them, under ASan+UBSan and TSan; CLANG=clang++-14: by clang, in less time

sanitize-address: PRESET = asan
sanitize-thread: PRESET = tsan
sanitize-address sanitize-thread: $(STAMPS)/build
	cmake --preset $(BY_CLANG)$(PRESET) $(CLANG:%=-DCMAKE_CXX_COMPILER=%)
	cmake --build --preset $(BY_CLANG)$(PRESET)
	ctest --preset $(BY_CLANG)$(PRESET)

sanitize-module: $(STAMPS)/farandole  ## the Python module on real ranks under ASan+UBSan
	cmake --preset asan-module && cmake --build --preset asan-module
	rm -rf build/asan-package && mkdir -p build/asan-package && cp -r python/farandole build/asan-package/
	cp build/asan-module/_core*.so build/asan-package/farandole/
	for collective in all_reduce gather; do \
	  $(SANITIZED) farandole bench $$collective -np 3 --sizes 4,1K,1000K,4M --iterations 20 || exit 1; \
	done

bench: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/bench $(PEERS:%=$(STAMPS)/bench-%)  ## measure all of docs/benchmarks.md beside peers and write its tables
	$(BIN)/python bench/report $(if $(PEERS),--peer-python $(subst $(SPACE),$(COMMA),$(foreach p,$(PEERS),$p=$(VENV)/peers/$p/bin/python))) $(REPORT)

device:  ## on a machine with a GPU: compare collectives with the host's bits and trainings with one process, kill ranks, and measure; DEVICE='--out FILE'
	$(or $(wildcard $(BIN)/python),$(PYTHON)) bench/device $(DEVICE)

# With kernels of all architectures, as in released wheels: what is measured is what users get.
device-wheels: $(STAMPS)/farandole build/nvrtc  ## what `make device` takes along to a machine that has a driver and a Python alone: wheels in build
	rm -rf build/device-wheels
	$(WHEEL_BY_PIP) --wheel-dir build/device-wheels -C cmake.args=-UFARANDOLE_CUDA_CODES \
	  -C cmake.define.FARANDOLE_NVRTC=$(CURDIR)/build/nvrtc .
	$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --dest build/device-wheels numpy

device-dry: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/test  ## `make device` over the driver of the tests: bench/device/dry-run.txt
	cmake --build $(TREE) --target fake_libcuda
	rm -f bench/device/dry-run.txt
	LD_LIBRARY_PATH=$(TREE)/fake_libcuda $(BIN)/python bench/device --dry --out bench/device/dry-run.txt

docs: $(STAMPS)/farandole  ## the generated part of docs/algorithms.md and its drawings
	@$(BIN)/python docs/generate_algorithms.py

site: $(STAMPS)/farandole $(STAMPS)/torch $(STAMPS)/tensorflow $(STAMPS)/test $(STAMPS)/site  ## the documentation as a site, in build/site; a broken link or a missing docstring fails
	NO_MKDOCS_2_WARNING=1 COLUMNS=88 $(BIN)/python -W ignore -m mkdocs build --strict

size:  ## lines per folder, the longest files, the blocks that stand twice, and the change since BASE
	@git ls-files -z '*.h' '*.cpp' '*.py' '*.md' | xargs -0 wc -l | grep -v ' total$$' | awk \
	  '{ n = split($$2, p, "/"); d = p[1]; for (i = 2; i < n && i < 3; ++i) d = d "/" p[i]; s[d] += $$1; t += $$1 } \
	   END { for (d in s) printf "%7d  %s\n", s[d], d; printf "%7d  in all\n", t }' | sort -k2
	@echo; git ls-files -z '*.h' '*.cpp' '*.py' | xargs -0 wc -l | grep -v ' total$$' | sort -rn | head -10
	@echo; $(PYTHON) tests/repeats.py | tail -1
	@echo; git diff --stat $(BASE) | tail -1

clean:  ## remove all that make made, .venv included
	rm -rf build $(VENV) demo-output .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1:\2/p' $(MAKEFILE_LIST) | awk -F: '{ printf "%-18s%s\n", $$1, $$2 }'

# ---- the environment: a stamp per group of packages (pyproject.toml), one for our own ----

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; choose one with PYTHON=")'
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists() and "Python.h is missing; on Debian: apt install python3-dev")'
	$(PYTHON) -m venv $(VENV)
	$(PINNED)pip.txt
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: | $(STAMPS)/venv
	$(PIP) $(TORCH)
	@touch $@

$(STAMPS)/tensorflow: | $(STAMPS)/venv
	$(PIP) $(TENSORFLOW)
	@touch $@

$(STAMPS)/on-torch: pyproject.toml | $(STAMPS)/torch
	$(PIP) --group on-torch
	@touch $@

$(STAMPS)/build: .ci/pins/build.txt | $(STAMPS)/venv
	$(PINNED)build.txt
	@touch $@

$(STAMPS)/test: | $(STAMPS)/build # which has all of the group that is pinned
$(STAMPS)/test $(STAMPS)/lint $(STAMPS)/demo $(STAMPS)/bench $(STAMPS)/site: $(STAMPS)/%: pyproject.toml | $(STAMPS)/venv
	$(PIP) --group $*
	@touch $@

# An MPI overwrites another's files, so each lives in an environment of its own.
$(STAMPS)/bench-%: pyproject.toml | $(STAMPS)/venv
	$(PYTHON) -m venv $(VENV)/peers/$*
	$(BIN)/python -m pip --disable-pip-version-check --python $(VENV)/peers/$*/bin/python install --quiet --group bench-$*
	@touch $@

# Likewise, but for the environment: ranks of tests are this one's Python.
$(STAMPS)/mpi-%: pyproject.toml | $(STAMPS)/venv
	$(PIP) --ignore-installed --prefix $(VENV)/mpi/$* --group mpi-$*
	@touch $@

# What compiles kernels of released wheels: csrc/cuda/nvrtc.py.
build/nvrtc: .ci/pins/kernels.txt | $(STAMPS)/venv
	rm -rf $@
	$(PINNED)kernels.txt --target $@
	@touch $@

WHEEL_BY_PIP = $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps \
  -C cmake.define.FARANDOLE_TESTS=ON -C cmake.define.FARANDOLE_WERROR=ON

# Installed as users get it, but with kernels of one architecture, from whose PTX a driver makes those
# for others; and warnings are errors.
$(STAMPS)/farandole: $(SOURCES) $(STAMPS)/build
	rm -rf $(WHEEL)
	$(WHEEL_BY_PIP) --wheel-dir $(WHEEL) -C cmake.define.FARANDOLE_CUDA_CODES=sm_75 \
	  -C cmake.define.FARANDOLE_NVRTC=$(NVRTC_PACKAGES) .
	$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes farandole
	$(PIP) $(WHEEL)/*.whl
	@touch $@
