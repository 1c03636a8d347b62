"""The last of sixty tasks costs what the tenth did; and the scale test detects it when it does not."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from programs.scale.bars import Row, bars, baseline, fit, read_rows, slopes, totals, write_row
from programs.scale.measure import bytes_by_part, bytes_under, pool_bytes
from programs.scale.run import row_windows
from programs.scale.tasks import VIEWS, package_material

TESTS = Path(__file__).resolve().parents[2]
TASKS = int(os.environ.get("SCALE_TASKS", "60"))
SLACK = {"seconds from drop to SERVING": 2.5, "bytes a swap reads, of the pool": 10.0}
"""Another test may begin on the other core half-way; and one task is two per cent of so small a pool."""
SHORT = (
    "seconds from drop to SERVING",
    "bytes added by a version to the pool store",
    "bytes added by a version to MLflow",
    "bytes added by a version to the state directory",
    "bytes a swap reads, of the pool",
    "peak memory of the builder",
    "store of all versions, in pools",
    "failed requests",
)
"""What sixty tasks on a busy machine can show; request times and the replica's few megabytes are lost in noise."""


@pytest.mark.timeout(900)
@pytest.mark.skipif("SCALE_TASKS" not in os.environ, reason="five minutes: SCALE_TASKS=60 pytest tests/programs/scale")
def test_the_last_of_sixty_tasks_costs_what_the_tenth_did_and_no_request_fails(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    options = ["--tasks", str(TASKS), "--json", str(rows_file), "--keep", str(tmp_path / "run"), "--per-second", "3"]
    command = [sys.executable, "-m", "programs.scale.run", *options, "--set", "train.epochs=1"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=880, check=False)
    said = (done.stdout + done.stderr)[-6000:]
    assert rows_file.exists(), said
    rows = read_rows(rows_file)
    assert rows[-1].tasks == TASKS and all(row.settled for row in rows), said
    found = {bar.what: bar for bar in bars(rows)}
    judged = [replace(found[what], limit=SLACK.get(what, found[what].limit)) for what in SHORT]
    assert [str(bar) for bar in judged if not bar.holds] == [], said


# The tasks


def test_no_class_and_no_image_occurs_twice() -> None:
    material = package_material()
    made = [each for number in range(material.most_tasks) for each in material.classes(number)]
    assert len({each.label for each in made}) == len(made) == 50 * len(VIEWS)
    images = [image.tobytes() for each in made for image in material.images(each)]
    assert len({*images}) == len(images) == len(made) * 30


def test_the_image_a_client_sends_is_not_in_the_task() -> None:
    material = package_material()
    for number in (0, 41, 159):
        for made in material.classes(number):
            unseen = material._some(made, made.first + 30, 1)[0].tobytes()
            assert unseen not in {image.tobytes() for image in material.images(made)}


def test_a_task_is_packed_into_the_same_bytes_every_time(tmp_path: Path) -> None:
    material = package_material()
    written = [material.write(17, "task-00018", tmp_path / str(place)) for place in range(2)]
    contents = [sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in each.iterdir()) for each in written]
    assert contents[0] == contents[1]
    manifest = json.loads((written[0] / "TASK.json").read_text())
    assert len(manifest["classes"]) == 5 and sum(shard["samples"] for shard in manifest["shards"]) == 150


# The rows


def test_rows_come_after_every_hundred_tasks_and_first_around_the_tenth() -> None:
    assert row_windows(300, 100) == {15: 10, 100: 20, 200: 20, 300: 20}
    assert row_windows(60, 100) == {15: 10, 60: 20}
    assert row_windows(12, 100) == {12: 8}


def test_a_resumed_run_measures_only_its_own_tasks() -> None:
    assert row_windows(300, 100, done=100) == {200: 20, 300: 20}
    assert row_windows(300, 100, done=195) == {200: 5, 300: 20}


def test_rows_are_read_as_they_were_written_and_the_newest_of_a_number_counts(tmp_path: Path) -> None:
    for row in (Row(100, 20, serving_seconds=9.0), Row(15, 10), Row(100, 20, serving_seconds=3.0)):
        write_row(row, tmp_path / "rows")
    assert read_rows(tmp_path / "rows") == [Row(15, 10), Row(100, 20, serving_seconds=3.0)]


# The limits

TENTH = Row(
    15, 10, serving_seconds=3.0, added_store=80e3, added_mlflow=90e3, added_state=200e3, store_bytes=1.2e6,
    pool_bytes=1e6, swap_bytes=80e3, request_p50_ms=10.0, quiet_p50_ms=8.0, builder_peak_mib=500.0, replica_mib=400.0,
)  # fmt: skip
THOUSANDTH = replace(TENTH, tasks=1000, window=20, store_bytes=150e6, pool_bytes=80e6, replica_mib=520.0)


def _missed(row: Row) -> list[str]:
    return [bar.what for bar in bars([TENTH, replace(THOUSANDTH, tasks=500), row]) if bar.holds is False]


def test_what_stays_as_it_was_holds_every_limit() -> None:
    assert _missed(THOUSANDTH) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"serving_seconds": 6.1}, "seconds from drop to SERVING"),
        ({"added_store": 97e3}, "bytes added by a version to the pool store"),
        ({"added_mlflow": 109e3}, "bytes added by a version to MLflow"),
        ({"added_state": 250e3}, "bytes added by a version to the state directory"),
        ({"swap_bytes": 4.1e6}, "bytes a swap reads, of the pool"),
        ({"request_p50_ms": 13.1}, "request p50 while tasks are learned"),
        ({"quiet_p50_ms": 10.5}, "request p50 while nothing is learned"),
        ({"builder_peak_mib": 1431.0}, "peak memory of the builder"),
        ({"replica_mib": 560.0}, "growth of the replica, in growth of the pool"),
        ({"store_bytes": 241e6}, "store of all versions, in pools"),
        ({"failed": 1}, "failed requests"),
    ],
)
def test_each_limit_can_be_missed(change: dict[str, float], what: str) -> None:
    assert _missed(replace(THOUSANDTH, **change)) == [what]


def test_a_missing_measurement_is_shown_and_is_not_a_miss() -> None:
    found = bars([TENTH, replace(THOUSANDTH, swap_bytes=None)])
    assert [bar.what for bar in found if bar.holds is None] == ["bytes a swap reads, of the pool"]
    assert any("not measured" in str(bar) for bar in found)


def test_growth_is_compared_with_the_row_around_the_tenth_task() -> None:
    assert baseline([TENTH, THOUSANDTH]) is TENTH
    assert baseline([replace(TENTH, tasks=5, window=3), TENTH, THOUSANDTH]) is TENTH


# The slopes


def test_slopes_are_extrapolated_to_ten_thousand_tasks() -> None:
    rows = [Row(n, 1, serving_seconds=3 + 0.002 * n, added_store=1e5, store_bytes=1e5 * n) for n in (100, 200, 300)]
    found = {slope.what: slope for slope in slopes(rows)}
    assert found["drop to SERVING"].per_thousand == pytest.approx(2.0)
    assert found["drop to SERVING"].far == pytest.approx(23.0)
    assert fit([(0, 1), (1, 3)])[:2] == pytest.approx((2.0, 1.0))
    hours, store = (float(row.split()[-2].replace(",", "")) for row in totals(rows))
    assert hours == pytest.approx((3 * 10_000 + 0.001 * 10_000**2) / 3600, abs=0.01)
    assert store == pytest.approx(1.0)


# Bytes


def test_the_pool_is_measured_by_its_card_and_layers(tmp_path: Path) -> None:
    digest, layer, statistics, other = "a" * 64, "b" * 64, "c" * 64, "d" * 64
    (tmp_path / "layers").mkdir()
    (tmp_path / "versions").mkdir()
    for name, count in ((layer, 1000), (statistics, 5000), (other, 70_000)):
        (tmp_path / "layers" / f"{name}.safetensors").write_bytes(bytes(count))
    card = json.dumps({"g": None, "tasks": [{"layer": layer, "statistics": statistics, "manifest_sha256": "e" * 64}]})
    (tmp_path / "versions" / f"7-{digest[:12]}.json").write_text(card)
    (tmp_path / "CURRENT").write_text(json.dumps({"version": 7, "digest": digest}))
    found = pool_bytes(tmp_path)
    assert (found.served, found.statistics) == (1000 + len(card), 5000)


def test_a_state_directory_is_counted_part_by_part_and_linked_files_once(tmp_path: Path) -> None:
    for name in ("pools/layers", "pools/3-aaaaaaaaaaaa", "mlflow/artifacts/1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pools/layers/x.safetensors").write_bytes(bytes(100))
    (tmp_path / "pools/3-aaaaaaaaaaaa/pool.json").write_bytes(bytes(10))
    (tmp_path / "mlflow/artifacts/1/x.safetensors").hardlink_to(tmp_path / "pools/layers/x.safetensors")
    (tmp_path / "ledger.sqlite-wal").write_bytes(bytes(4000))
    found = bytes_by_part(tmp_path)
    assert sum(found.values()) == 110
    assert bytes_under(found, "pools") + bytes_under(found, "mlflow") == 110
    assert found["pools"] == 10
