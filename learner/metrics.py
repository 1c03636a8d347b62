"""The figures of continual learning: A_T and F_T from a(t, n), the accuracy on task t after learning task n."""

from collections.abc import Sequence
from statistics import fmean

History = Sequence[Sequence[float]]
"""`history[n][t]` is a(t, n): row n holds the tasks 0 to n that were known then."""


def average_accuracy(history: History) -> float:
    """A_T: the mean over tasks after the last one."""
    return fmean(history[-1])


def forgetting(history: History) -> float:
    """F_T as in the paper: the mean over tasks of what was lost since the task was learned."""
    return fmean(history[t][t] - last for t, last in enumerate(history[-1]))


def forgetting_from_best(history: History) -> float:
    """F_T as most codes print it: what was lost since a task's best moment, over all tasks but the last."""
    last = history[-1]
    if len(last) == 1:
        return 0.0
    return fmean(max(row[t] for row in history[t:-1]) - last[t] for t in range(len(last) - 1))
