# `make run` opens the chat, `make test` passes the tests; both set up what they need first.
# `make gguf` adds what GGUF files need, which is compiled. The Models tab offers the same.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Every package that is installed here, with the version that was tested, and what builds it.
LOCKED = -c requirements.lock --build-constraint requirements.lock

# A line of requirements.txt, without its comment.
requirement = "$$(sed -n 's/^\($(1)[^ ]*\).*/\1/p' requirements.txt)"

.PHONY: run gguf native test quick soak latest arm check wheel setup setup-dev chromium lock clean

# Without a C++ compiler everything runs in Python: slower, and with the same answers.
run: setup
	@$(MAKE) --no-print-directory native || echo "The compiled core is not there. Strata runs without it."
	$(BIN)/python app.py $(ARGS)

# The compiled core, in seconds (engine/native.py).
native: $(VENV)/.native

gguf: $(VENV)/.gguf

# In workers: when a native library ends one, the test is named and the next worker goes on.
WORKERS := -n logical --maxprocesses 4 --dist worksteal --max-worker-restart 1000
# Tests start hundreds of programs: what was compiled for one is there for the next.
test quick soak latest: export PYTHONDONTWRITEBYTECODE :=

test: setup-dev chromium
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# No torch, no llama.cpp, no Gradio, no browser.
quick: setup-dev
	$(BIN)/python -m pytest $(WORKERS) tests/unit tests/service $(ARGS)

# What `make test` leaves out: before a change to the engine, the compiled core or storage lands.
soak: setup-dev chromium
	$(BIN)/python -m pytest $(WORKERS) --soak $(ARGS)

# With the newest releases, in an environment of its own: which package breaks what.
latest: setup-dev chromium
	$(BIN)/python -m tests.support.latest $(WORKERS) $(ARGS)

# The products on ARM, in an emulator: needs CMake, and the packages g++-aarch64-linux-gnu and
# qemu-user. Each processor is named with the instructions that it must have.
EMULATED = qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu $(1) $(VENV)/arm/rows_test
arm:
	cmake -S native/tests -B $(VENV)/arm -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
	cmake --build $(VENV)/arm --parallel
	$(call EMULATED,cortex-a72) plain
	$(call EMULATED,neoverse-n1) plain dotprod
	$(call EMULATED,max) plain dotprod i8mm

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine storage bench training app strata_chat
	$(BIN)/mypy app.py

# To be installed elsewhere: pipx install dist/strata_chat-*.whl, then, for the compiled core,
# pipx inject strata-chat dist/strata_native-*.whl. The core's wheel fits this kind of machine only.
wheel: $(VENV)/.pip
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	$(PIP) wheel --quiet --no-deps --wheel-dir dist ./native || echo "The compiled core was not built."

setup: $(VENV)/.run
setup-dev: $(VENV)/.dev

$(VENV)/.pip: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade -c requirements.lock pip
	touch $@

# torch first and alone: the exact version that is asked for decides which build comes.
# llama-cpp-python is left out: it takes minutes to compile, and the chat opens without it.
$(VENV)/.run: requirements.txt $(VENV)/.pip
	$(PIP) install --quiet $(LOCKED) $(call requirement,torch==)
	grep -v '^llama-cpp-python' requirements.txt | $(PIP) install --quiet $(LOCKED) -r /dev/stdin
	touch $@

$(VENV)/.native: native/pyproject.toml native/CMakeLists.txt native/rows.cmake \
    $(wildcard native/src/*) $(VENV)/.pip
	$(PIP) install --quiet $(LOCKED) ./native
	touch $@

$(VENV)/.gguf: requirements.txt $(VENV)/.run
	$(PIP) install $(LOCKED) $(call requirement,llama-cpp-python)
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.gguf $(VENV)/.native
	$(PIP) install --quiet $(LOCKED) --group dev
	touch $@

# The browser tests drive the system's Chromium; on Debian and Ubuntu it can be installed here.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	command -v google-chrome >/dev/null || { \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	apt-get update -qq && apt-get install -y -qq chromium; \
	else echo "The browser tests need Chromium on the PATH. Install the package chromium."; exit 1; fi; }

# The newest versions that fit together, for every platform. The CUDA libraries are left out: each
# build of torch names its own.
lock: $(VENV)/.pip
	$(PIP) install --quiet uv
	{ echo "# What \`make lock\` found: the versions that are installed and tested."; \
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
	pyproject.toml --all-extras --group dev --group build \
	| grep -vE '^(cuda|nvidia)'; } > requirements.new
	mv requirements.new requirements.lock

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
