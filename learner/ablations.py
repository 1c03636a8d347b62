"""What one choice is worth on the same trained pool: keys per task, top-K, classifier, shortlist.

These change how keys are used and need no further training. What changes training (prompt depth and length, g-prompt
policy, key rule, start) is a run of its own, by the options of `mqmk-daemon bench accuracy`.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from mqmk.learner.evaluate import Evaluation, Tally
from mqmk.matcher.matchers import MatchSettings

NUMBERS: Final = (1, 2, 4, 5, 10, 20, 50)
FIGURES: Final = ("matching_rate", "accuracy_task", "accuracy_all", "queries")

Ablations = dict[str, dict[str, dict[str, float]]]
"""Choice -> value -> figures."""


def key_ablations(evaluation: Evaluation, classifier: str = "fc") -> dict[str, dict[str, Tally]]:
    """The paper's tables that need no further training."""
    most = max(len(task.classes) for task in evaluation.pool.tasks)
    numbers = [n for n in NUMBERS if n <= most]
    tally = evaluation.tally
    return {
        "keys per task": {str(n): tally("mqmk", MatchSettings(keys_per_task=n), classifier) for n in numbers},
        "top-K": {str(n): tally("mqmk", MatchSettings(top_keys=n), classifier) for n in numbers},
        "classifier": {name: tally("mqmk", None, name) for name in ("fc", "ncm", "km")},
        "shortlist": {str(n): tally("cascade", MatchSettings(shortlist=n), classifier) for n in (1, 2, 3, 5)},
    }


def ablation_figures(evaluations: Sequence[Evaluation]) -> Ablations:
    """The means over seeds, as `--json` prints them."""
    found = [key_ablations(each) for each in evaluations]
    return {
        choice: {
            value: {figure: fmean(getattr(each[choice][value], figure) for each in found) for figure in FIGURES}
            for value in values
        }
        for choice, values in found[0].items()
    }
