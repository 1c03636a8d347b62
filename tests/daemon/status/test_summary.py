"""The few figures above the table of `status`."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.servers.monitored import lived_in, report

from mqmk.daemon.cli.status import render_status
from mqmk.daemon.status.snapshot import Snapshot
from mqmk.daemon.status.summary import matching_summary, summary_line


def test_status_says_how_well_it_matches_what_was_forgotten_and_what_waits_for_a_person(tmp_path: Path) -> None:
    config, ledger, _ = lived_in(tmp_path / "state")
    report(config, "r2", 3, feedback={"matched": 9, "mismatched": 1})
    document = Snapshot(config, ledger).status()
    ledger.close()
    figures = document["matching"]
    assert figures["matching_rate"] == pytest.approx(0.9) and figures["forgetting"] == pytest.approx(0.02)
    assert (figures["images"], figures["matching_rate_interval"][0]) == (300, pytest.approx(0.861, abs=1e-3))
    assert (figures["labelled"], figures["labelled_answers"]) == (0.9, 10)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_status(document))
    said = console.export_text()
    assert "accuracy 80.0% (±4.9, 300 images), matched to the right task 90.0% ±3.9, calibration error 3.4%" in said
    assert figures["calibration_error"] == 0.034 and "90.0% of 10 labelled" in " ".join(said.split())
    assert "forgotten 2.0%" in " ".join(said.split())
    assert "needs attention: bad, weak, sea" in said
    assert f"bucket {config.bucket_url}" in "".join(said.split("\n"))


def test_before_anything_is_learned_nothing_is_claimed() -> None:
    figures = matching_summary(None, [])
    assert [name for name, value in figures.items() if value] == []
    assert summary_line(figures) is None
