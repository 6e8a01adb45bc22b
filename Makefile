# `make run` opens the chat, `make test` passes the tests; both set up what they need first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check setup setup-dev chromium clean

run: setup
	$(BIN)/python app.py $(ARGS)

# In a worker: when a native library ends it, the test is named and the next worker goes on.
test: setup-dev chromium
	$(BIN)/python -m pytest -n 1 --max-worker-restart 1000 $(ARGS)

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine storage bench training app
	$(BIN)/mypy app.py

setup: $(VENV)/.run
setup-dev: $(VENV)/.dev

# torch first and alone: the exact version that is asked for decides which build comes.
$(VENV)/.run: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)"
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@

# The browser tests drive the system's Chromium; on Debian and Ubuntu it can be installed here.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	command -v google-chrome >/dev/null || { \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	apt-get update -qq && apt-get install -y -qq chromium; \
	else echo "The browser tests need Chromium on the PATH. Install the package chromium."; exit 1; fi; }

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
