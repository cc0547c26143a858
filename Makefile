# One command each for people and for CI. `make serve ARGS="--port 9000"` passes flags on; PYTHON=python3.12 picks another Python.
# A C compiler is optional: with one, installing also builds the fast kernels; without, torch's own are used.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip reads this file for build requirements (hatchling) too, which its option -c does not reach.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL := $(BIN)/python -m pip install --quiet
INSTALLED_FROM := pyproject.toml constraints.txt $(wildcard hatch_build.py sdcp_mono/kernels/csrc/*)
STUBS := sdcp_mono/grpc/pb/sdcp.proto

# Servers that tests start for themselves. Where they can't be installed, those tests are skipped and say so.
PACKAGES := $(if $(wildcard /usr/lib/postgresql/*/bin/initdb)$(shell command -v initdb),,postgresql)

.PHONY: serve split-demo test check packages proto bench fuzz

serve: $(VENV)/serve.stamp
	$(BIN)/sdcp-mono serve $(ARGS)

split-demo: $(VENV)/serve.stamp
	$(BIN)/sdcp-mono split-demo $(ARGS)

test: check packages
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

packages:
	@test -z "$(PACKAGES)" || timeout 300 apt-get install -y --no-install-recommends $(PACKAGES) \
		|| echo "not installed: $(PACKAGES); the tests that need them are skipped"

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.run $(ARGS)

# Guided by coverage, so it finds more the longer it runs; what it learnt stays in the corpus. Linux and macOS only.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/dev.stamp
	$(INSTALL) atheris
	$(BIN)/python fuzz/fuzz_cbor.py -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=2048 \
		-artifact_prefix=$(VENV)/ $(VENV)/fuzz-corpus

# The generated stubs are committed, so only a change of the .proto needs grpcio-tools.
ifeq ($(wildcard proto/$(STUBS)),)
proto:
	@echo "proto: there is no proto/$(STUBS) yet, nothing to generate"
else
proto: $(VENV)/dev.stamp
	$(INSTALL) grpcio-tools
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/$(STUBS)
endif

# torch comes first and alone: asked for together with packages that need it, pip may take a CUDA build of several GB.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	touch $@

$(VENV)/serve.stamp: $(VENV)/torch.stamp $(INSTALLED_FROM)
	$(INSTALL) -e .
	touch $@

# What serving needs and more, so it stands for both stamps.
$(VENV)/dev.stamp: $(VENV)/torch.stamp $(INSTALLED_FROM)
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/serve.stamp $@
