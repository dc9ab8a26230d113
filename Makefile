# make setup    a virtual environment in .venv with gradzip in it
# make demo     train a small model over a slow network with each codec, and look at the report
# make test     all tests, or some: ARGS=...  make check   ruff and mypy
# make bench    codec speed and size          make native  only the C++ library, in build/
# make fuzz     a million damaged payloads    make wheel   one wheel in dist/
# make docs     the documentation as a site in build/site
# make clean    remove what was built

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check install --quiet -c $(VENV)/constraints.txt
HAS_TORCH := -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))' 2>/dev/null

.PHONY: setup demo test check bench native fuzz wheel docs clean

setup: $(VENV)/.installed

# A torch that is already there is kept, whatever its version: it fits the machine's GPU and is large to fetch again.
# Asked twice, because a virtual environment does not see the packages of another one that is active.
$(VENV)/constraints.txt: constraints.txt
	@echo 'making a virtual environment in $(VENV)'
	@if $(PYTHON) $(HAS_TORCH); then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi
	@if env -u PYTHONPATH $(RUN)/python $(HAS_TORCH) && [ ! -e $@ ]; then : >$@; fi
	@if [ ! -e $@ ] || [ -s $@ ]; then cp constraints.txt $@; fi
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

check: $(VENV)/.dev
	$(RUN)/python -m ruff check .
	$(RUN)/python -m mypy

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
