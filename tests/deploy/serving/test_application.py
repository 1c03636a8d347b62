"""The service on real Ray Serve with two replicas: what a client sees of swaps, bad pools and dead replicas: nothing.

`make swap-test` runs the long proof (MQMK_SWAP_TEST=full): 50 swaps, 20 bad pools, two replicas killed.
"""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.exposure import beyond_loopback, listening_addresses, ports_of, process_tree
from support.serving import bad_pools
from support.serving.answers import version_of
from support.serving.fingerprints import image_bytes, marked_pool, publish
from support.serving.load import Load, within
from support.serving.running_service import Running, running_service, until
from support.serving.swap_account import Swap, account

from mqmk.daemon.ports import free_port
from mqmk.deploy.serving.telemetry.declared import RAY_PREFIX, REPLICA_METRICS, Metric
from mqmk.deploy.serving.telemetry.heartbeat import LIVE_SECONDS
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_files import PoolVersion
from mqmk.matcher.pool_store import Pointer, PoolStore

FULL = os.environ.get("MQMK_SWAP_TEST") == "full"
SWAPS, BAD, KILLS = (50, 20, 2) if FULL else (6, 6, 1)
BETWEEN = 1.0 if FULL else 0.7
"""Seconds from a version's arrival to the next one."""


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def running(vit, tmp_path_factory) -> Iterator[Running]:
    pools = tmp_path_factory.mktemp("served") / "pools"
    publish(pools, marked_pool(vit, 1), 1)
    with running_service(pools, replicas=2, fallback="previous") as found:
        yield found


def test_answers_come_over_http_with_the_id_that_was_sent(running):
    request = urllib.request.Request(f"{running.url}/predict", image_bytes(), {"X-Request-Id": "mine"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers.get_all("X-Request-Id") == ["mine"]
        body = json.load(answer)
    assert body["id"] == "mine"
    assert version_of(body) == 1
    assert answer.headers["Server-Timing"].startswith("decode;dur=")


def test_an_answer_without_an_id_gets_one_that_the_header_repeats(running):
    with urllib.request.urlopen(urllib.request.Request(f"{running.url}/predict", image_bytes()), timeout=30) as answer:
        assert answer.headers.get_all("X-Request-Id") == [json.load(answer)["id"]]


def test_feedback_finds_the_replica_that_answered(running):
    for number in range(8):
        running.post("/predict", image_bytes(), **{"X-Request-Id": f"asked-{number}"})
    told = [running.post("/feedback", json.dumps({"id": f"asked-{n}", "label": "x"}).encode()) for n in range(8)]
    assert [one["status"] for one in told] == [200] * 8
    assert running.post("/feedback", b'{"id": "never", "label": "x"}')["status"] == 404


def test_the_label_of_a_retried_request_is_counted_once_whoever_answered_and_whoever_gets_the_label(running):
    for _ in range(12):
        running.post("/predict", image_bytes(), **{"X-Request-Id": "retried"})
    told = [running.post("/feedback", b'{"id": "retried", "label": "x"}') for _ in range(8)]
    assert [one["status"] for one in told] == [200] * 8
    assert [one["counted"] for one in told] == [True] + [False] * 7


def test_errors_keep_their_shape_through_the_proxy(running):
    assert running.post("/predict", b"hello")["status"] == 415
    assert running.post("/predict", b"x" * (16 * 2**20 + 1))["status"] == 413


def exported(address: str) -> dict[str, list[Sample]]:
    """What Ray's agent shows of ours, by the declared name."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {metric.name: [each for each in samples if each.name in exported_as(metric)] for metric in REPLICA_METRICS}


def exported_as(metric: Metric) -> tuple[str, ...]:
    name = RAY_PREFIX + metric.name
    return tuple(f"{name}_{part}" for part in ("bucket", "sum", "count")) if metric.kind == "histogram" else (name,)


def total(samples: list[Sample], **labels: str) -> float:
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_rays_agent_shows_everything_that_replicas_are_declared_to_export(running):
    address = f"http://127.0.0.1:{running.say('metrics')}/metrics"
    for _ in range(6):
        running.post("/predict", image_bytes(), **{"X-Request-Id": "told"})
    running.post("/feedback", json.dumps({"id": "told", "label": "label-v1-a"}).encode())

    def told() -> bool:
        now = exported(address)
        answered = total(now["mqmk_requests_total"], route="predict", code="200", matcher="mqmk")
        return answered >= 6 and total(now["mqmk_labelled_matches_total"], result="matched") >= 1

    until(told, 40, "six answers and a label are told")
    found = exported(address)
    assert [name for name, samples in found.items() if not samples] == []
    assert total(found["mqmk_answers_total"], task="task-v1") >= 6
    assert total(found["mqmk_answers_total"], task="kept0") == pytest.approx(0)
    stages = {each.labels["stage"] for each in found["mqmk_request_duration_seconds"]}
    assert stages == {"decode", "queue", "match", "total"}
    for samples in found.values():
        assert all({"deployment", "replica", "application"} <= each.labels.keys() for each in samples)
    assert len({each.labels["replica"] for each in found["mqmk_inflight_images"]}) == 2


def test_nothing_listens_where_others_could_reach_it(running):
    found = listening_addresses(process_tree(running.process.pid))
    assert int(running.url.rpartition(":")[2]) in ports_of(found)
    assert beyond_loopback(found) == {}


def test_deploying_again_leaves_the_replicas_alone(running):
    before = {report.pid for report in running.reports}
    assert running.say("deploy") == "deployed RUNNING"
    time.sleep(1.5)
    assert {report.pid for report in running.reports} == before


def test_more_clients_get_more_answers(running):
    rates = {}
    for clients in (1, 32):
        with Load(running.url, clients) as load:
            time.sleep(8 if FULL else 3)
        assert not [sample for sample in load.samples if sample.error]
        span = max(sample.began + sample.seconds for sample in load.samples) - load.samples[0].began
        rates[clients] = len(load.samples) / span
    print(f"\nrequests/s at 1 and 32 clients: {rates[1]:.0f} and {rates[32]:.0f}, {rates[32] / rates[1]:.1f}x")
    assert rates[32] > rates[1]


@pytest.mark.timeout(900)
def test_swaps_bad_pools_and_dead_replicas_fail_no_request(running, vit):
    store = PoolStore(running.pools)
    good = {version: store.write(marked_pool(vit, version), version, None) for version in range(1, SWAPS // 2 + 2)}
    bad = bad_pools.bad_pointers(running.pools, marked_pool(vit, 1), 1000)
    order = [*range(2, SWAPS // 2 + 2), *range(SWAPS // 2, 0, -1)]  # forward and back
    with Load(running.url) as load:
        watch(running, 3)
        swaps = [swap(running, good[version]) for version in order]
        for number in range(BAD):
            offer_bad(running, *bad[number % len(bad)], good[order[-1]])
        killed = [kill_one(running, good[order[-1]], damaged=number == 0) for number in range(KILLS)]
        watch(running, 2)
    judge(load, swaps, killed)
    assert {sample.version for sample in load.samples if sample.version} == set(order) | {1}


def test_a_replica_that_takes_long_to_load_a_pool_is_alive_all_the_time(running, vit):
    """The load takes long because its file is a pipe that nobody writes to; then it ends, and the file is whole."""
    store = PoolStore(running.pools)
    slow = store.write(marked_pool(vit, 500), 500, None)
    tensors = running.pools / bad_pools.file_of(store.card(slow), bad_pools.LAYER)
    whole, before = tensors.read_bytes(), store.current()
    tensors.unlink()
    os.mkfifo(tensors)
    store.point_at(slow)
    try:
        pids, seen = {report.pid for report in running.reports}, []
        end = time.monotonic() + LIVE_SECONDS + 3
        while time.monotonic() < end:
            seen.append({report.pid for report in running.reports})
            time.sleep(0.05)
        assert len(pids) == 2 and {*map(frozenset, seen)} == {frozenset(pids)}
        assert running.post("/predict", image_bytes())["status"] == 200
    finally:
        (running.pools / "whole").write_bytes(whole)
        writer = os.open(tensors, os.O_WRONLY | os.O_NONBLOCK)
        (running.pools / "whole").replace(tensors)
        os.close(writer)
    until(lambda: everybody_holds(running, 500), 30, "both hold it")
    store.point_at(before)
    until(lambda: everybody_holds(running, before.version), 30, "and the one before")


def test_a_new_replica_that_finds_a_damaged_version_serves_the_one_before_and_says_so(running, vit):
    store = PoolStore(running.pools)
    pool = marked_pool(vit, 601)
    publish(running.pools, replace(pool, tasks=pool.tasks[:-1]), 600)
    publish(running.pools, pool, 601)
    until(lambda: everybody_holds(running, 601), 30, "version 601 everywhere")
    damaged = running.pools / bad_pools.file_of(store.card(store.current()), bad_pools.LAYER)
    damaged.write_bytes(damaged.read_bytes()[:100])
    os.kill(running.reports[0].pid, signal.SIGKILL)
    until(lambda: [each.pool_version for each in running.reports if each.last_failure] == [600], 120, "600 stands in")
    (found,) = [each for each in running.reports if each.last_failure]
    assert found.last_failure.startswith("version 601: read: ")
    assert found.last_failure.endswith("version 600 is served instead")
    with urllib.request.urlopen(f"{running.url}/v2/health/ready", timeout=30) as answer:
        assert answer.status == 200
    publish(running.pools, marked_pool(vit, 1), 1)
    until(lambda: everybody_holds(running, 1) and not any(r.last_failure for r in running.reports), 60, "all is well")


def everybody_holds(running: Running, version: int) -> bool:
    reports = running.reports
    return len(reports) == 2 and all(report.pool_version == version for report in reports)


def watch(running: Running, seconds: float) -> None:
    """Let time pass, looking at reports as often as `until` does: swaps and the time between cost the machine alike."""
    end = time.monotonic() + seconds
    until(lambda: bool(running.reports) and time.monotonic() >= end, seconds + 30, "time passes")


def swap(running: Running, identity: PoolVersion) -> Swap:
    published = time.monotonic()
    PoolStore(running.pools).point_at(identity)
    until(lambda: everybody_holds(running, identity.version), 30, f"version {identity.version} everywhere")
    everywhere = time.monotonic()
    watch(running, BETWEEN)
    return Swap(published, everywhere, time.monotonic())


def offer_bad(running: Running, name: str, pointer: Pointer, good: PoolVersion) -> None:
    before = {report.replica_id: report.failures for report in running.reports}
    PoolStore(running.pools).point_at(pointer)
    until(lambda: all(r.failures > before[r.replica_id] for r in running.reports), 30, f"{name} is refused")
    assert everybody_holds(running, good.version), name
    PoolStore(running.pools).point_at(good)
    until(lambda: not any(report.last_failure for report in running.reports), 30, "back at the good one")


def kill_one(running: Running, held: PoolVersion, damaged: bool) -> tuple[float, float]:
    """From when to when there was one replica less; a new one that finds CURRENT damaged waits until it is mended."""
    if damaged:
        (running.pools / "CURRENT").write_text("{")
    victim, began = running.reports[0], time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    if damaged:
        until(lambda: any("CURRENT" in said for said in running.waiting), 120, "a new replica waits and says why")
        PoolStore(running.pools).point_at(held)
    until(
        lambda: everybody_holds(running, held.version) and victim.pid not in {each.pid for each in running.reports},
        120,
        "a new replica holds CURRENT",
    )
    return began, time.monotonic()


def judge(load: Load, swaps: list[Swap], killed: list[tuple[float, float]]) -> None:
    """Print the numbers, and say no if they are not what was promised."""
    failed = [sample for sample in load.samples if sample.error]
    from_kills = within(failed, killed)
    mixed = [sample for sample in failed if "MIXED" in str(sample.error)]
    span = load.samples[-1].began - load.samples[0].began
    found = account(load.samples, swaps)
    print(
        f"\n{len(load.samples)} requests ({len(load.samples) / span:.0f}/s), {len(swaps)} swaps, {BAD} bad pools, "
        f"{KILLS} kills: {len(failed) - len(from_kills)} failed, {len(from_kills)} more while a replica was dead, "
        f"{len(mixed)} mixed\n{found}"
    )
    assert not mixed, mixed[0]
    assert len(failed) == len(from_kills), [one for one in failed if one not in from_kills][:3]
    assert len(from_kills) <= KILLS * load.clients, from_kills[:3]  # what the dead replica had in hand
    if FULL:
        assert found.ratio <= 1.25
        assert max(found.delays) < 2


def lives(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/live", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_a_service_moves_to_another_address_only_where_ray_is_ours_and_goes_when_it_is_undeployed(running):
    """Last, because it ends the service."""
    port = free_port()
    elsewhere = json.dumps({"host": "127.0.0.2", "port": port})
    refused = running.say(f"deploy {json.dumps({'ours': False, 'port': port})}")
    assert f"listens at 127.0.0.1:{running.url.rpartition(':')[2]}, not at 127.0.0.1:{port}" in refused
    assert running.say(f"deploy {json.dumps({'ours': False})}").startswith("deployed ") and lives(running.url)
    assert running.say(f"deploy {elsewhere}").startswith("deployed ")
    until(lambda: lives(f"http://127.0.0.2:{port}"), 90, "it answers at its new address")
    assert not lives(running.url)
    assert running.say("undeploy") == "True None"
    assert not lives(f"http://127.0.0.2:{port}")
    assert running.say("undeploy") == "False None", "there is nothing left to end"
