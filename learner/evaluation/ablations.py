"""The effect of one choice on the same trained pool: keys per task, top-K, classifier, shortlist.

These change how keys are used and need no further training. What changes training (prompt depth and length, g-prompt
policy, key rule, start) is a run of its own, by the options of `mqmk-daemon bench accuracy`.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from mqmk.learner.evaluation.evaluate import Evaluation, Tally
from mqmk.matcher.matcher_info import EXACT
from mqmk.matcher.matchers import MatchSettings

NUMBERS: Final = (1, 2, 4, 5, 10, 20, 50)
FIGURES: Final = {
    "matching_rate": "matching_rate",
    "accuracy_task": "accuracy_task",
    "accuracy_all": "accuracy_all",
    "queries": "num_queries",
}
"""Name in `--json` -> field of a Tally."""

Ablations = dict[str, dict[str, dict[str, float]]]
"""Choice -> value -> figures."""


def key_ablations(evaluation: Evaluation, classifier: str = "fc") -> dict[str, dict[str, Tally]]:
    """The paper's tables that need no further training."""
    most = max(len(task.classes) for task in evaluation.pool.tasks)
    numbers = [n for n in NUMBERS if n <= most]
    tally = evaluation.tally
    return {
        "keys per task": {str(n): tally(EXACT, MatchSettings(keys_per_task=n), classifier) for n in numbers},
        "top-K": {str(n): tally(EXACT, MatchSettings(top_keys=n), classifier) for n in numbers},
        "classifier": {name: tally(EXACT, None, name) for name in ("fc", "ncm", "km")},
        "shortlist": {str(n): tally("cascade", MatchSettings(shortlist=n), classifier) for n in (1, 2, 3, 5)},
    }


def ablation_figures(evaluations: Sequence[Evaluation]) -> Ablations:
    """The means over seeds, as `--json` prints them."""
    found = [key_ablations(each) for each in evaluations]
    return {
        choice: {value: mean_figures([each[choice][value] for each in found]) for value in values}
        for choice, values in found[0].items()
    }


def mean_figures(tallies: Sequence[Tally]) -> dict[str, float]:
    """The means over seeds of one value of a choice."""
    return {name: fmean(getattr(tally, field) for tally in tallies) for name, field in FIGURES.items()}
