# make run   sets up everything and runs the quickstart on real input
# make test  sets up everything and runs every check
# Both need Python 3.11 and the package registries; see README.md.

PYTHON ?= python3.11
export UV_PYTHON_DOWNLOADS := never
# Compiling vLLM anew at each start takes longer than starting it.
unexport PYTHONDONTWRITEBYTECODE
# A fresh resolve each time: a lock file would carry registry addresses.
UV := .cache/uv/bin/uv
BIN := .venv/bin
MODEL := .cache/models/smollm2-135m-instruct
PRISM := .cache/bin/prism
PRISM_VERSION := v2.77.0
NPM := .cache/npm/node_modules/apache-beam/package.json
TS_VERSION := 2.49.0

.PHONY: run test lint unit format clean help setup java-example
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "make: $(PYTHON) is not a Python 3.11 (the demo's vLLM for CPUs is built for it);" \
	       "say which one is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "· creating the tool environment (.cache/uv)"
	@$(PYTHON) -m venv .cache/uv
	@.cache/uv/bin/pip install --quiet uv

.venv/.synced: pyproject.toml | $(UV)
	@echo "· installing Beam, vLLM for CPUs and the development tools into .venv (about 6 GB; 1 to 5 minutes the first time)"
	@$(UV) sync --quiet --python $(PYTHON) --group demo --group dev
	@touch $@

$(MODEL)/config.json: | .venv/.synced
	@$(BIN)/beam-llm demo-model $(MODEL)

# Prism, Beam's local streaming runner, needs Go; the tests that use it say so when it is missing.
$(PRISM):
	@if command -v go >/dev/null; then \
	  echo "· building Prism $(PRISM_VERSION) (about 2 minutes, once)"; \
	  GOBIN=$(CURDIR)/.cache/bin go install github.com/apache/beam/sdks/v2/go/cmd/prism@$(PRISM_VERSION) 2>.cache/prism.log \
	    || { cat .cache/prism.log >&2; exit 1; }; \
	else echo "· no Go here: the tests on Prism will be skipped"; fi

# Beam's TypeScript SDK, a client of the expansion service, for its test.
$(NPM):
	@if command -v npm >/dev/null; then \
	  echo "· fetching Beam's TypeScript SDK (about a minute, once)"; \
	  npm install --prefix .cache/npm --silent --ignore-scripts --no-audit --no-fund apache-beam@$(TS_VERSION); \
	else echo "· no npm here: the test of Beam's TypeScript SDK will be skipped"; fi

setup: .venv/.synced $(MODEL)/config.json $(PRISM) $(NPM) ## install everything, run nothing

run: .venv/.synced $(MODEL)/config.json ## label real text with a real model
	@$(BIN)/beam-llm demo-data output/quickstart/questions.jsonl
	@$(BIN)/beam-llm run yaml_examples/quickstart.yaml --var model=$(MODEL) \
	  --var input=output/quickstart/questions.jsonl --var output=output/quickstart --preview 15

java-example: setup ## label real text from a Java pipeline, on Prism (JAVA_RUNNER=python: Beam's own)
	@command -v mvn >/dev/null || { echo "make: the Java example needs JDK 17 and Maven" >&2; exit 1; }
	@mvn --batch-mode --quiet --no-transfer-progress -f expansion_service/java -DskipTests package
	@rm -rf output/java
	@$(BIN)/beam-llm demo-data output/java/questions.jsonl
	@$(BIN)/python expansion_service/java/example/run_local.py \
	  $(if $(filter python,$(JAVA_RUNNER)),python,prism=$(CURDIR)/$(PRISM)) \
	  --input=$(CURDIR)/output/java/questions.jsonl --output=$(CURDIR)/output/java \
	  --model=$(CURDIR)/$(MODEL) --cpu=true
	@head -n 5 output/java/labels*.jsonl

test: setup lint unit ## lint, types and every test

lint: .venv/.synced ## ruff and pyright
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python expansion_service/java/generate.py --check

unit: setup
	@$(BIN)/pytest $(PYTEST_ARGS)

format: .venv/.synced ## rewrite the sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## remove everything that make created
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis output uv.lock expansion_service/java/*/target
