# EPD-Serve. `make help` lists what there is. All is installed into $(VENV), what test-vllm023 and docs need into
# $(VENV_VLLM023) and $(VENV_DOCS), nowhere else.

VENV   ?= .venv
VENV_VLLM023 ?= .venv-vllm023
VENV_DOCS ?= .venv-docs
PYTHON ?=
DEVICE ?= auto
LAYOUT ?= (E-P)-D
MODEL  ?=
PORT   ?= 8000
# Of test-npu: the kind of device; 1 for stages without graphs, 0 for with graphs, else both; TextVQA and AISBench for its
# acceptance; where the report is copied to. More in tests/npu/card.py.
EPD_TEST_DEVICE ?= npu
EAGER  ?=
TEXTVQA  ?=
AISBENCH ?=
OUT    ?=
# Passed through untouched: SERVE_ARGS to `epd-serve serve` (e.g. --host), TEST_ARGS to pytest and to the parts of
# test-npu (e.g. --plan, --parts ops,plain), PIP_ARGS to pip.
SERVE_ARGS ?=
TEST_ARGS  ?=
PIP_ARGS   ?=
export VENV VENV_VLLM023 VENV_DOCS PYTHON DEVICE LAYOUT MODEL PORT PIP_ARGS EPD_TEST_DEVICE EAGER OUT TEXTVQA AISBENCH

SHELL := /bin/bash
CODE  := bench deploy proxy epd_serve store npu_ops docs/generate.py
.DEFAULT_GOAL := help
.PHONY: help serve test test-promises coverage test-all test-page test-npu test-vllm023 check check-npu-contract npu-contract docs reference format environment-serve environment-test clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22
	@echo
	@echo "make serve takes LAYOUT='(E-P)-D' MODEL=DIR PORT=8000 DEVICE=auto|cpu|npu|cuda SERVE_ARGS=; all take PYTHON= VENV= PIP_ARGS="

environment-serve:
	@deploy/install/environment.sh serve

environment-test:
	@deploy/install/environment.sh test

serve: environment-serve ## install what is missing and serve a model (the built-in one unless MODEL=DIR)
	@exec "$$VENV/bin/epd-serve" serve $${MODEL:+"$$MODEL"} --layout "$$LAYOUT" --device "$$DEVICE" --port "$$PORT" $(SERVE_ARGS)

test: environment-test ## unit tests and the short end-to-end tests
	@exec "$$VENV/bin/python" -m pytest -m "not slow" $(TEST_ARGS)

test-promises: environment-test ## the same, and every promise of README.md on real stages (what CI runs)
	@exec "$$VENV/bin/python" -m pytest -m "not slow or promise" $(TEST_ARGS)

coverage: environment-test ## unit tests, with the share of lines that they run (processes that they start not counted)
	@exec "$$VENV/bin/python" -m pytest -m "not slow and not e2e" --cov --cov-report=term:skip-covered $(TEST_ARGS)

test-all: environment-test ## all tests, the long ones too
	@exec "$$VENV/bin/python" -m pytest --hypothesis-profile=explore $(TEST_ARGS)

test-page: environment-test ## the page in a headless Chromium, over simulated and real stages (gets Chromium by apt-get, if it may)
	@tests/browser.sh
	@exec "$$VENV/bin/python" -m pytest tests/deploy/launch/test_sim_page.py tests/e2e/test_page.py $(TEST_ARGS)

test-npu: ## on a machine with a card (EPD_TEST_DEVICE=npu|cuda): what it shows, part by part; leaves one file to send
	@exec tests/npu/run.sh $(TEST_ARGS)

test-vllm023: ## tests of the engine, and the short end-to-end ones, on vLLM 0.23, Ascend's generation (CPU; 6 GB of disk)
	@VENV="$$VENV_VLLM023" deploy/install/environment.sh vllm023
	@exec "$$VENV_VLLM023/bin/python" -m pytest tests/epd_serve/engine tests/e2e -m "not slow" $(TEST_ARGS)

check: environment-test ## ruff, mypy (the tests, too), import-linter, NPU contract
	"$$VENV/bin/ruff" check .
	"$$VENV/bin/ruff" format --check .
	"$$VENV/bin/mypy" $(CODE) tests
	"$$VENV/bin/lint-imports"
	"$$VENV/bin/python" -m tests.contract

check-npu-contract: environment-test ## our code against released vLLM, vllm-ascend, torch-npu, Mooncake; offline
	"$$VENV/bin/python" -m tests.contract

npu-contract: environment-test ## download those wheels, read them again, write the manifest and docs/reference/compatibility.md
	"$$VENV/bin/python" -m tests.contract --refresh build/npu-wheels

docs: ## build the documentation as a site, into build/site; SITE_URL= where it will be (170 MB of tools, apart)
	@VENV="$$VENV_DOCS" deploy/install/environment.sh docs
	@NO_MKDOCS_2_WARNING=1 exec "$$VENV_DOCS/bin/mkdocs" build --strict --clean
	@echo "build/site/index.html; with search: python3 -m http.server --directory build/site"

reference: environment-test ## write docs/reference/ anew: command line, configuration, metrics, HTTP API
	@PYTHONPATH=. exec "$$VENV/bin/python" docs/generate.py

format: environment-test ## let ruff format and fix
	"$$VENV/bin/ruff" check --fix .
	"$$VENV/bin/ruff" format .

clean: ## remove the environment and all caches
	@for venv in "$$VENV" "$$VENV_VLLM023" "$$VENV_DOCS"; do if [[ -f "$$venv/.epd-serve" ]]; then rm -rf "$$venv"; fi; done
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
