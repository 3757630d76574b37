# Every target makes the virtual environment it needs; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow records picture world bench clean

demo: $(READY)
	$(BIN)/dualkg demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest

test-slow: $(READY)
	$(BIN)/pytest -m slow

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dualkg needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rdf,fast,dev]'
	touch $@

# The pages that are made from what was measured, and the picture of the demo.
records: $(READY)
	$(BIN)/python scripts/record.py

picture: $(READY)
	$(BIN)/dualkg demo --picture docs/demo.svg

# The bundled graph from its sources, and reading at ten million triples.
world: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rdf,fast,dev,world]'
	$(BIN)/python scripts/build_world.py

bench: $(READY)
	$(BIN)/python benchmarks/reading.py

clean:
	rm -rf $(VENV)
