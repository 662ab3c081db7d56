# Each target does all its own set-up. PYTHON: 3.11 to 3.14; ARGS: more options for main.py or pytest;
# EXTRA: more pinned packages, requirements-interop.lock for the tests against other systems.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 \
  $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[1-4].*/bin/python; do \
  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
WORKDIR ?= runs/quickstart
# Processes of the test suite: one a core, and few, as each takes gigabytes.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# `again` is never made: an environment without the packages of EXTRA is installed again.
LACKING = $(if $(EXTRA),$(if $(wildcard $(VENV)/$(notdir $(EXTRA))),,again))

.PHONY: quickstart test again
quickstart: $(VENV)/installed
	$(VENV)/bin/python main.py --config=configs/quickstart.py --workdir=$(WORKDIR) $(ARGS)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist=loadfile --no-loadscope-reorder $(ARGS)

# The lock names every package, so that pip need not look for versions.
$(VENV)/installed: requirements.lock pyproject.toml $(EXTRA) $(LACKING)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.14 found; set PYTHON=/path/to/one" >&2; exit 2; }
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --no-deps -r requirements.lock
	$(if $(EXTRA),$(PIP_INSTALL) -r $(EXTRA))
	$(PIP_INSTALL) --no-deps --editable .
	touch $@ $(if $(EXTRA),$(VENV)/$(notdir $(EXTRA)))
