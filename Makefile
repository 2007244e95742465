# make demo    on a machine that has only Python: sets everything up in .venv, then trains a model with its context
#              sharded over the ring: over all GPUs, or over two CPU processes. ARGS="--steps 50" goes to the command.
# make test    sets everything up for testing, then runs every test there is.
# make check   format, lint and types: before each commit.
#
# PYTHON=python3.12 picks the interpreter of a new .venv; `make clean` removes the environments.

PYTHON ?= python3
VENV := .venv
ARGS ?=
inputs := pyproject.toml .ci/constraints.txt .ci/setup

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

demo: $(VENV)/.ready
	$(VENV)/bin/python -m ringattn.launch.train $(ARGS)

test: $(VENV)/.ready-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" .ci/stages

check: $(VENV)/.ready-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" .ci/stages format lint types

clean:
	rm -rf $(VENV) .venv-triton36

# the stamps make a second call free, until a pinned version changes
$(VENV)/.ready: $(inputs)
	.ci/setup $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.ready-dev: $(inputs)
	.ci/setup $(VENV) $(PYTHON) dev
	@touch $(VENV)/.ready $@
