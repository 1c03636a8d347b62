"""The figures of continual learning: A_T and F_T from a(t, n), the accuracy on task t after learning task n."""

from collections.abc import Iterable, Sequence
from statistics import fmean

History = Sequence[Sequence[float | None]]
"""`history[n][t]` is a(t, n): row n holds the tasks 0 to n that were known then; None without test images."""


def average_accuracy(history: History) -> float:
    """A_T: the mean over tasks after the last one."""
    return mean_of_measured(history[-1])


def mean_of_measured(values: Iterable[float | None]) -> float:
    """The mean over tasks, those without a figure left out; 0 if none has one."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else 0.0


def accuracy_drop(before: float | None, after: float | None) -> float | None:
    """The accuracy lost; None where either figure is missing."""
    return None if before is None or after is None else before - after


def forgetting(history: History) -> float:
    """F_T as in the paper: the mean over tasks of what was lost since the task was learned."""
    return mean_of_measured(accuracy_drop(history[t][t], last) for t, last in enumerate(history[-1]))


def forgetting_from_best(history: History) -> float:
    """F_T as most published codes print it: the mean over all tasks but the last of what was lost since a task's best
    moment. The last moment may be the best, so nothing is ever gained."""
    last = history[-1]
    if len(last) == 1:
        return 0.0
    columns = ([row[t] for row in history[t:]] for t in range(len(last) - 1))
    best = [max((value for value in column if value is not None), default=None) for column in columns]
    return mean_of_measured(map(accuracy_drop, best, last))
