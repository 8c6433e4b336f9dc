# Two commands for a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test lint slow clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/medfed demo

test: $(VENV)/.installed lint
	$(BIN)/pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/.installed
	$(BIN)/pytest -m slow --timeout=3600

clean:
	rm -rf $(VENV) demo runs
