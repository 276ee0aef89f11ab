# The commands of the project; CI runs the same ones. Everything works on a fresh clone.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NATIVE := $(wildcard native/CMakeLists.txt native/qnnbroker/native/*.pyx native/qnnbroker/native/*.pxd native/qnnbroker/native/csrc/* benchmarks/qnnbroker/benchmarks/csrc/*)

SANITIZED := build/asan

.PHONY: asan install native demo test stress soak lint types format proto docs cli-reference bench clean

$(VENV)/.created:
	@echo "making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	touch $@

$(VENV)/.requirements: $(VENV)/.created pyproject.toml
	@echo "installing what is needed into $(VENV): about 350 MB, pip says nothing for a minute or two"
	$(PY) -m pip install -q "scikit-build-core>=0.11" "cython>=3.1" "cmake>=3.24" ninja
	$(PY) -m pip install -q --group dev
	touch $@

# An editable install: Python files are seen at once, native ones after `make native`.
$(STAMP): $(VENV)/.requirements $(NATIVE)
	@echo "building and installing qnnbroker (C and Cython, half a minute)"
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

# Ten million messages through the rings, under sanitizers too, and a minute of mixed clients.
stress: install
	QNNBROKER_STRESS=1 $(PY) -m pytest tests/native/test_ring_stress.py \
	  tests/native/test_executor_stress.py \
	  tests/native/test_ring_machine.py tests/processes/test_hot_path.py

# Clients come and go, some are killed; the memory is drawn in build/soak/pss.png.
soak: install
	PYTHONPATH=examples $(PY) -m tests.soak

# The memory state machine and its neighbours on a build with AddressSanitizer, in an environment of
# its own that borrows the other packages. Leaks of the interpreter are not looked for.
asan: install
	$(PY) -m venv --without-pip $(SANITIZED)/venv
	$(PY) -c "import site; print(site.getsitepackages()[0])" \
	  > $$(ls -d $(SANITIZED)/venv/lib/python3*/site-packages)/borrowed.pth
	CMAKE_ARGS="-DQNNBROKER_SANITIZE=address" $(PY) -m pip --python $(SANITIZED)/venv/bin/python \
	  install -q --no-build-isolation --no-deps --force-reinstall -C build-dir=$(SANITIZED)/build .
	LD_PRELOAD=$$($${CC:-cc} -print-file-name=libasan.so) \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1 PYTHONMALLOC=malloc \
	  $(SANITIZED)/venv/bin/python -m pytest -q tests/processes/test_memory_machine.py \
	  tests/processes/test_registrations.py tests/processes/test_reset.py tests/native/test_rpcmem.py

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
	@echo "installing what the site is made with"
	$(PY) -m pip install -q --group docs
	touch $@

# The site, in build/docs. Strict: a broken link is an error.
docs: install $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

cli-reference: install
	$(PY) docs/generate_cli.py

bench: install
	@echo "installing what draws the pictures"
	$(PY) -m pip install -q --group bench
	$(PY) -m benchmarks

clean:
	rm -rf build $(VENV)
