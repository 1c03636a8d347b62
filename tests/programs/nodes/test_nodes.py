"""The test on several machines detects violated expectations; `make nodes-test` runs it all.

two_nodes.py runs in tests/daemon/workers/test_ray_pool.py.
"""

from pathlib import Path
from typing import Any

import pytest
from programs.nodes.run import NodesTest, ray_start

PASSED: dict[str, Any] = {
    "failed while published": 0, "nodes": ["10.77.0.2", "10.77.0.3"], "every machine receives": [200, 200],
    "hidden": True, "failed later": [0.4], "answered after the loss": 900,
}  # fmt: skip


def problems(lost: str = "kill", **other: Any) -> list[str]:
    return NodesTest(Path("unused"), lost, results={**PASSED, **other}).problems()


def test_a_run_that_meets_every_expectation_passes() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failed while published", 1),
        ("nodes", ["10.77.0.2"]),
        ("every machine receives", [200, 503]),
        ("hidden", False),
        ("failed later", [0.4, 7.0]),
        ("answered after the loss", 3),
    ],
)
def test_a_violated_expectation_is_a_problem(name: str, value: Any) -> None:
    assert len(problems(**{name: value})) == 1


def test_the_loss_of_an_unplugged_machine_may_be_detected_later() -> None:
    assert problems("unplug", **{"failed later": [7.0]}) == []
    assert len(problems("unplug", **{"failed later": [70.0]})) == 1


def test_ray_is_started_in_the_foreground_without_usage_statistics() -> None:
    assert {"--block", "--disable-usage-stats", "--head"} <= {*ray_start("--head")}
