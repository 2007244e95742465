# make demo    on a machine that has only Python: sets everything up in .venv, then trains a model with its context
#              sharded over the ring: over all GPUs, or over two CPU processes. ARGS="--steps 50" goes to the command.
# make serve   likewise, then serves a model with its context sharded over the ring, at http://127.0.0.1:8000: a tiny one
#              that talks nonsense, or ARGS="--model path/to/checkpoint".
# make test    sets everything up for testing, then runs every test there is.
# make check   format, lint and types: before each commit.
#
# PYTHON=python3.12 picks the interpreter of a new .venv; `make clean` removes the environments.

PYTHON ?= python3
VENV := .venv
ARGS ?=
inputs := pyproject.toml .ci/constraints.txt .ci/setup

.DEFAULT_GOAL := help
.PHONY: help demo serve test check clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

demo: $(VENV)/.ready
	$(VENV)/bin/python -m ringattn.launch.train $(ARGS)

serve: $(VENV)/.ready-serve
	$(VENV)/bin/python -m ringattn.launch.serve $(if $(findstring --model,$(ARGS)),,--model tiny) $(ARGS)

test: $(VENV)/.ready-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" .ci/stages

check: $(VENV)/.ready-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" .ci/stages format lint types

clean:
	rm -rf $(VENV) .venv-triton36 .venv-triton38 .venv-transformers4

# the stamps make a second call free, until a pinned version changes
$(VENV)/.ready: $(inputs)
	.ci/setup $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.ready-serve: $(inputs)
	.ci/setup $(VENV) $(PYTHON) serve
	@touch $(VENV)/.ready $@

$(VENV)/.ready-dev: $(inputs)
	.ci/setup $(VENV) $(PYTHON) dev
	@touch $(VENV)/.ready $(VENV)/.ready-serve $@
