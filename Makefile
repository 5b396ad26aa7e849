# Two commands on a fresh Debian 12 or 13: "sudo make demo" and "sudo make test". Both install what they need.
SHELL := /bin/sh
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
FUZZ_SECONDS ?= 600
LOCK := --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --quiet
KIT := PYTHONPATH=integration .venv/bin/python

.PHONY: help setup test demo bench soak fuzz lint lock lowest clean

help:
	@echo "sudo make demo    convert a real image, start it lazily, against plain overlayfs; compose a task and grade it"
	@echo "sudo make test    all tests, with real containerd, runc and registry (PYTEST_ARGS=...)"
	@echo "sudo make bench   the measured comparisons of docs/benchmarks.md (BENCH_ARGS=...)"
	@echo "sudo make soak    long reliability runs"
	@echo "sudo make fuzz    mutated tails, tars, texts, NRI calls and foreign TOCs, FUZZ_SECONDS (600) each"
	@echo "sudo make setup   only install what these need; leaves the command at .venv/bin/weenv"
	@echo "make lint         ruff, mypy and the import contract"
	@echo "make lock         renew requirements.lock from pyproject.toml"
	@echo "make lowest       tests without root, with the lowest versions that pyproject.toml allows"
	@echo "make clean        remove the virtual environment and caches of this clone"

setup:
	@MAKE_GOAL="$(firstword $(MAKECMDGOALS))" PYTHON="$(PYTHON)" sh integration/weenv_testkit/setup.sh

# Two processes (see conftest.py): one has all that is real but in a guest, from its first test to its last, the other the rest.
test: setup
	$(KIT) -m weenv_testkit.prefetch
	.venv/bin/python -m pytest -m "not soak" -n 2 $(PYTEST_ARGS)

demo: setup
	@$(KIT) -m weenv_testkit.demo $(DEMO_ARGS)

bench: setup
	$(KIT) -m benchmarks $(BENCH_ARGS)

soak: setup
	$(KIT) -m weenv_testkit.prefetch
	.venv/bin/python -m pytest -m soak $(PYTEST_ARGS)

# Without coverage, all that is installed here; with atheris in the environment, run a target by itself (see its text).
fuzz: setup
	for target in tail tarscan text nri foreign; do \
		PYTHONPATH=integration nice -n 15 .venv/bin/python tests/fuzz/fuzz_$$target.py --seconds $(FUZZ_SECONDS) || exit 1; \
	done

lint: .venv/bin/ruff
	.venv/bin/ruff check .
	.venv/bin/mypy
	MYPYPATH=src:integration:benchmarks .venv/bin/mypy -p weenv_testkit -p weenv_bench
	.venv/bin/lint-imports

.venv/bin/ruff:
	@echo "lint: no virtual environment yet; run: sudo make setup" >&2; exit 1

# The lock names every file by hash and no index, so it works with whatever index pip is configured for.
lock: .venv/bin/ruff
	.venv/bin/python -m pip install --quiet uv
	.venv/bin/uv pip compile pyproject.toml requirements-build.in --extra dev --extra fuse --extra systemd $(LOCK) --upgrade --output-file requirements.lock
	.venv/bin/uv pip compile requirements-build.in --constraint requirements.lock $(LOCK) --output-file requirements-build.lock

# Only the runtime's dependencies are the lowest; what tests need beside them is as it comes. The oldest aiohttp leaves a
# connection to the collector now and then; what is left out needs pyfuse3, of which there is no wheel.
lowest: .venv/bin/ruff
	.venv/bin/python -m pip install --quiet uv
	rm -rf .venv-lowest && .venv/bin/uv venv --quiet --python .venv/bin/python .venv-lowest
	.venv/bin/uv pip compile pyproject.toml --only-binary :all: --resolution lowest-direct --quiet \
		--no-emit-index-url --no-emit-find-links --output-file .venv-lowest/requirements.txt
	.venv/bin/uv pip install --quiet --python .venv-lowest/bin/python --only-binary :all: --requirement .venv-lowest/requirements.txt \
		pytest pytest-asyncio pytest-timeout hypothesis jsonschema kubernetes-validate matplotlib pyzstd tomlkit docker hatchling editables
	.venv/bin/uv pip install --quiet --python .venv-lowest/bin/python --no-deps --editable .
	.venv-lowest/bin/python -m pytest -m "not soak and not root" -W "ignore::pytest.PytestUnraisableExceptionWarning" \
		--deselect "tests/test_accepting.py::test_nobody_dies_or_spins_for_want_of_descriptors[host]" tests $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-lowest .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
