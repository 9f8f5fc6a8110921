# Two commands for a newcomer: `make up` runs a whole cell here, `make test` runs the tests.
# `make test-training` runs PyTorch's own training jobs on a cell. It needs a GB of packages of its own.
# `make chaos` hurts a cell for an hour and writes docs/reliability.md.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
DURATION ?= 3600
SEED ?= 1
PAUSE ?= 2.5
NATS ?= 1

# A cell is dozens of interpreters; each would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up test test-training chaos lint fuzz env clean

up: env
	$(VENV)/bin/aryl up

test: env
	$(VENV)/bin/pytest -n 4 --dist worksteal

# Apart from ours: what jobs need is no dependency of Aryl. Where the index has CUDA builds only, name
# PyTorch's own for the CPU: make test-training TORCH_INDEX=https://download.pytorch.org/whl/cpu
TRAINING_VENV := .venv-training
TORCH_INDEX ?=
test-training: env $(TRAINING_VENV)/.installed
	ARYL_TRAINING_PYTHON=$(CURDIR)/$(TRAINING_VENV)/bin/python3 $(VENV)/bin/pytest tests/training

$(TRAINING_VENV)/.installed: tests/training/requirements.txt
	$(PYTHON) -m venv $(TRAINING_VENV)
	$(TRAINING_VENV)/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement $<
	touch $@

chaos: env
	$(VENV)/bin/python -m tests.live.chaos --duration-s $(DURATION) --seed $(SEED) --mean-pause-s $(PAUSE) --nats-servers $(NATS) --results docs/results/reliability.json; \
	status=$$?; $(VENV)/bin/python docs/generate.py && exit $$status

lint: env
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

# Every decoder against a coverage-guided fuzzer, for so many minutes in all.
MINUTES ?= 10
fuzz: env
	$(VENV)/bin/pip install --quiet --group fuzz
	$(VENV)/bin/python -m tests.fuzz.run --minutes $(MINUTES)

env: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "aryl needs Python >= 3.11, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh -c 'S=; [ "$$(id -u)" = 0 ] || S=sudo; echo "installing python3-venv"; $$S apt-get update -q && $$S apt-get install -y python3-venv'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)/bin/pip install --quiet --editable '.[coordinator]' --group dev
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(TRAINING_VENV) dist build
