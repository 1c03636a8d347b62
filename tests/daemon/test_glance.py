"""The few figures above the table of `status`."""

import io
from pathlib import Path

import pytest
from monitored import lived_in, report
from rich.console import Console

from mqmk.daemon.commands.status import drawn
from mqmk.daemon.glance import glance, in_words
from mqmk.daemon.overview import Overview


def test_status_says_how_well_it_matches_what_was_forgotten_and_what_waits_for_a_person(tmp_path: Path) -> None:
    config, ledger, _ = lived_in(tmp_path / "state")
    report(config, "r2", 3, feedback={"matched": 9, "mismatched": 1})
    document = Overview(config, ledger).status()
    ledger.close()
    figures = document["matching"]
    assert figures["heldout"] == pytest.approx(0.9) and figures["forgetting"] == pytest.approx(0.02)
    assert (figures["labelled"], figures["labelled_answers"]) == (0.9, 10)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(drawn(document))
    said = console.export_text()
    assert "90.0% of held-out pictures, 90.0% of 10 labelled answers, forgotten: 2.0%" in said
    assert "waiting for you: bad, weak, sea" in said


def test_before_anything_is_learned_nothing_is_claimed() -> None:
    figures = glance(None, [])
    assert figures == {"heldout": None, "labelled": None, "labelled_answers": 0, "forgetting": None}
    assert in_words(figures) is None
