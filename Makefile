# make setup    a virtual environment in .venv with gradzip in it
# make demo     train a small model over a slow network with each codec, and look at the report
# make test     all tests, or some: ARGS=...  make check   ruff and mypy, as in continuous integration
# make test-no-simd   the engines' tests against a library without SIMD code
# make format   rewrite Python files as ruff formats them
# make bench    codec speed and size          make native  only the C++ library, in build/
# make fuzz     a million damaged payloads    make fuzz-neon   the same for AArch64, in the emulator qemu
# make wheel    one wheel in dist/
# make docs     the documentation as a site in build/site
# make clean    remove what was built

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check install --quiet -c $(VENV)/constraints.txt
HAS_TORCH := -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))' 2>/dev/null

.PHONY: setup demo test test-no-simd check format bench native fuzz fuzz-neon wheel docs clean

setup: $(VENV)/.installed

# A torch that is already there is kept, whatever its version: it fits the machine's GPU and is large to fetch again.
# Asked twice, because a virtual environment does not see the packages of another one that is active. The copy of
# constraints.txt tells later runs which torch it was: it has a line for torch only where `make setup` fetched it.
$(VENV)/constraints.txt: constraints.txt
	@echo 'making a virtual environment in $(VENV)'
	@if $(PYTHON) $(HAS_TORCH); then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi
	@if [ -e $@ ]; then grep -q '^torch' $@; else ! env -u PYTHONPATH $(RUN)/python $(HAS_TORCH); fi \
	    && cp constraints.txt $@ || grep -v '^torch' constraints.txt >$@
	@touch $@

# Python files are used in place; anything native or a new dependency means another install.
$(VENV)/.installed: $(VENV)/constraints.txt pyproject.toml CMakeLists.txt $(wildcard native/*)
	@echo 'installing gradzip and what it needs; where there is no torch, fetching it takes minutes'
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo 'installing what the tests need'
	@$(PIP) 'gradzip[test]'
	@$(PIP) 'gradzip[examples]' || echo 'no Lightning, Accelerate, Trainer or TensorBoard here: tests that need them are skipped'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) 'gradzip[dev]'
	touch $@

demo: $(VENV)/.installed
	$(RUN)/gradzip demo $(ARGS)

# All of them: two processes side by side, each with a file at a time. Arguments go to pytest as it is.
test: $(VENV)/.test
	$(RUN)/python -m pytest $(or $(ARGS),-n 2 --dist loadfile --no-loadscope-reorder)

# The library as it is on processors that are not x86. pip builds it, so that a machine without CMake can do it, too.
test-no-simd: $(VENV)/.test
	@$(PIP) --upgrade --no-deps --target build/no-simd -C cmake.define.GRADZIP_NO_SIMD=ON .
	GRADZIP_NO_SIMD=1 GRADZIP_LIBRARY=build/no-simd/gradzip/libgradzip.so $(RUN)/python -m pytest \
	    $(or $(ARGS),-n 2 tests/test_engines.py tests/test_golden.py tests/test_huffman.py tests/test_planner_timeline.py)

# mypy reads scripts and tests a folder at a time, with the folder in its path, as Python runs them: some import their
# neighbours, and several folders have a run.py.
SCRIPTS = $(sort $(patsubst %/,%,$(dir $(wildcard bench/*.py examples/*.py experiments/*.py experiments/*/*.py tests/*.py))))

check: $(VENV)/.dev
	$(RUN)/python -m ruff check .
	$(RUN)/python -m ruff format --check .
	$(RUN)/python -m mypy
	@status=0; for folder in $(SCRIPTS); do \
	    if [ -e $$folder/__init__.py ]; then neighbours=; else neighbours=$$folder; fi; \
	    echo "mypy $$folder"; \
	    MYPYPATH=$$neighbours $(RUN)/python -m mypy --config-file mypy-scripts.ini $$folder/*.py || status=1; \
	done; exit $$status

format: $(VENV)/.dev
	$(RUN)/python -m ruff check --fix .
	$(RUN)/python -m ruff format .

bench: $(VENV)/.test
	$(RUN)/gradzip bench codec $(ARGS)

native:
	cmake -B build
	cmake --build build --parallel

# tests/test_fuzz.py runs a short one from the same folder.
fuzz:
	cmake -B build/sanitized -DGRADZIP_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g'
	cmake --build build/sanitized --parallel
	build/sanitized/fuzz $(or $(ARGS),1000000)

# Needs a cross compiler and qemu (Debian: g++-aarch64-linux-gnu, qemu-user). tests/test_neon.py runs a short one.
fuzz-neon:
	cmake -B build/neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DGRADZIP_FUZZ=ON
	cmake --build build/neon --parallel
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/fuzz $(or $(ARGS),1000000)

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) 'gradzip[docs]'
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --quiet

wheel: $(VENV)/.installed
	rm -rf dist
	$(RUN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	ls dist

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +
