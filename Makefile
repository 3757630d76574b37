# Every target makes the virtual environment it needs; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH := .venv-bench
BENCH_READY := $(BENCH)/.ready
unexport PYTHONDONTWRITEBYTECODE  # tests start many processes, and each would compile the package again

# Material announces its successor at each build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo docs test types unit test-slow test-pykeen golden records picture world bench bench-report clean

demo: $(READY)
	$(BIN)/dualkg demo

# The site, in build/site: open build/site/index.html. Warnings are errors.
docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet
	@echo "The site is build/site/index.html."

test: $(READY)
	@command -v chromium chromium-browser google-chrome >/dev/null || echo "The pages' tests need a browser, and are skipped without: apt-get install chromium"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	@$(MAKE) --no-print-directory -j2 types unit

# At the same time: mypy uses one core, and the last tests leave others free. Some tests wait for processes or a browser,
# so there is one more worker than cores.
types:
	$(BIN)/mypy

# One process compiles the numba kernels first, which all workers would compile otherwise.
unit:
	$(BIN)/python -m tests.compile_kernels
	$(BIN)/pytest -n $$(($$(nproc || getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal --durations=15

test-slow: $(READY)
	$(BIN)/pytest -m 'slow or hypothesis' --hypothesis-profile=thorough

# The slow tests of one topic, by its folder or file: make test-slow-training, make test-slow-wheel.
test-slow-%: $(READY)
	$(BIN)/pytest -m 'slow or hypothesis' --hypothesis-profile=thorough $(or $(wildcard tests/$*),tests/test_$*.py)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dualkg needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rdf,fast,search,postgresql,index,analysis,serve,dev,docs]'
	touch $@

# Models of PyKEEN, imported and ranked beside PyKEEN.
test-pykeen: $(BENCH_READY)
	$(BENCH)/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-bench.txt --editable . pytest pytest-timeout hypothesis
	$(BENCH)/bin/python -m pytest -m slow tests/training/test_importing.py

# The record that tests/golden compares trainings with, measured again by the code as it is: a few minutes.
golden: $(READY)
	$(BIN)/python -m tests.golden.record

# The results pages, made from the records, and the pictures of the README and of docs/paths.md.
records: $(READY)
	$(BIN)/python -m paper results

picture: $(READY)
	$(BIN)/dualkg demo --picture docs/demo.svg
	$(BIN)/python scripts/path_pictures.py --redraw
	$(BIN)/python scripts/pictures.py
	DUALKG_PICTURES=docs $(BIN)/pytest -m slow tests/serve/browser/test_picture.py

# The bundled graph from its sources.
world: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rdf,fast,search,postgresql,index,analysis,serve,dev,docs,world]'
	$(BIN)/python scripts/build_world.py

# Speed and memory on this machine, for more than half an hour. Peers and pictures have an environment of their own.
bench: $(READY) $(BENCH_READY)
	$(BIN)/python benchmarks/measurement.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/ranking.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/completion.py
	@if command -v wrk >/dev/null; then $(BIN)/python benchmarks/serving.py; \
	else echo "Serving is not measured: wrk makes the load, and it is not installed. Debian has a package of that name."; fi
	$(MAKE) bench-report

# The page and its pictures, from what is saved.
bench-report: $(BENCH_READY)
	$(BENCH)/bin/python benchmarks/report.py

$(BENCH_READY): constraints-bench.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --constraint constraints-bench.txt pykeen matplotlib torch
	touch $@

clean:
	rm -rf $(VENV) $(BENCH)
