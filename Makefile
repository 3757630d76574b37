# Every target makes the virtual environment it needs; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow bench world picture clean

demo: $(READY)
	$(BIN)/dualkg demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

test-slow: $(READY)
	$(BIN)/pytest -m slow

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dualkg needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rdf,dev]'
	touch $@

clean:
	rm -rf $(VENV)
