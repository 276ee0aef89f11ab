# The commands of the project; CI runs the same ones. Everything works on a fresh clone.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NATIVE := $(wildcard native/CMakeLists.txt native/qnnbroker/native/*.pyx native/qnnbroker/native/*.pxd native/qnnbroker/native/csrc/* benchmarks/qnnbroker/benchmarks/csrc/*)

.PHONY: install native demo test soak lint types format proto docs cli-reference bench clean

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	touch $@

$(VENV)/.requirements: $(VENV)/.created pyproject.toml
	$(PY) -m pip install -q "scikit-build-core>=0.11" "cython>=3.1" "cmake>=3.24" ninja
	$(PY) -m pip install -q --group dev
	touch $@

# An editable install: Python files are seen at once, native ones after `make native`.
$(STAMP): $(VENV)/.requirements $(NATIVE)
	$(PY) -m pip install -q --no-build-isolation -e ".[server]"
	touch $@

install: $(STAMP)

native: $(VENV)/.requirements
	flock $(VENV)/.lock $(PY) -m pip install -q --no-build-isolation --no-deps -e .
	touch $(STAMP)

demo: install
	$(PY) examples/demo.py

test: install
	$(PY) -m pytest tests

# Clients come and go, some are killed; the memory is drawn in build/soak/pss.png.
soak: install
	PYTHONPATH=examples $(PY) -m tests.soak

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: install
	$(PY) -m mypy
	$(PY) -m mypy.stubtest qnnbroker.native --allowlist native/stubtest-allowlist.txt --ignore-missing-stub --mypy-config-file pyproject.toml

format: install
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

proto: install
	$(PY) protos/regenerate.py

$(VENV)/.docs: $(VENV)/.requirements
	$(PY) -m pip install -q --group docs
	touch $@

# The site, in build/docs. Strict: a broken link is an error.
docs: install $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

cli-reference: install
	$(PY) docs/generate_cli.py

bench: install
	$(PY) -m pip install -q --group bench
	$(PY) -m benchmarks

clean:
	rm -rf build $(VENV)
