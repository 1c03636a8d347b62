"""Evaluates a new version on held-out images: the card that `auto` chooses by, the document, and artifacts to read.

Matcher, classifiers, weights and calibration are chosen on one half of the sample and every figure is reported on the
other (`split_halves`): the best of several matchers looks better on the images it was chosen on. What the version ships
is then fitted on all of them.

A task that the version adds is judged by all its own held-out images, however few of them the sample has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from mqmk.daemon.builder.evaluation_artifacts import evaluation_files
from mqmk.daemon.config.sections import Config
from mqmk.learner.evaluation.calibration_fit import fit_calibration_once, fit_confidence
from mqmk.learner.evaluation.evaluate import split_halves
from mqmk.learner.evaluation.sample_answers import MatchedSample
from mqmk.learner.evaluation.sample_evaluation import (
    ClassTally,
    SampleEvaluation,
    SampleTally,
    TaskShare,
    matcher_figures,
    matching_card,
)
from mqmk.learner.evaluation.sample_matches import SHORTLIST
from mqmk.matcher.matcher_info import AUTO, CLASS_MATCHERS, EXACT, PLAIN_MATCHERS
from mqmk.matcher.matchers import MatchSettings
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.predictor import choose_matcher

MOST_MISTAKES: Final = 500
"""Pairs of different tasks that in a document, the most frequent ones."""
MOST_CLASSES: Final = 40
"""Classes in a document, the least accurate ones, and likewise pairs of classes: a few kB a version."""
DIGITS: Final = 4
"""Of the figures that stay with a task in all later versions."""


@dataclass(frozen=True, eq=False)
class NewTask:
    """A task that a version adds."""

    images: int
    """Held-out ones."""
    measure: Callable[[str, Mapping[str, Any]], TaskShare]
    """How the named matcher does on them, with what was fitted on other images."""


@dataclass(frozen=True, eq=False)
class EvaluatedPool:
    """A pool with its card, the version's document, and files for people by their names."""

    pool: PromptPool
    document: Mapping[str, Any]
    files: Mapping[str, bytes]


def evaluate_version(
    config: Config, matched: MatchedSample, held_out: int, new: Mapping[int, NewTask]
) -> EvaluatedPool:
    """Choose, then report. `held_out` images are kept in all, of which there is a sample.

    New tasks are given by their places in the pool.
    """
    pool, sample = matched.pool, matched.sample
    if not len(sample):
        return EvaluatedPool(_with_metrics(pool, new, {}), {"held_out": 0, "images": 0, "tasks": {}}, {})
    names, halves = matchers_to_measure(config, pool), split_halves(sample)
    fitted = matched.fit(halves.choosing, fit_calibration_once)
    evaluation = matched.answer(fitted)
    chosen = {name: evaluation.tally(name, halves.choosing) for name in names}
    pool = pool.with_matching(matching_card(int(halves.choosing.sum()), chosen))
    matcher: str = config.serve.matcher
    if matcher == AUTO:
        matcher = choose_matcher(pool, config.serve.budget, MatchSettings().shortlist)
    tallies = {name: evaluation.tally(name, halves.reporting) for name in (*names, matcher, "perfect")}
    used = tallies[matcher]
    document: dict[str, Any] = {
        "held_out": held_out,
        "sampled": used.is_estimate or len(sample) < held_out,
        "chosen_on_same_images": config.serve.matcher == AUTO and halves.overlap,
        "matcher": matcher,
        "images": used.images,
        "matching_rate": used.matching_rate,
        "accuracy": used.accuracy,
        "calibration_error": used.calibration_error,
        "classifier": None if matcher in CLASS_MATCHERS else fitted["answers"][matcher]["classifier"],
        "tasks": _tasks(evaluation, tallies, matcher, new, fitted),
        "confusion": _confusion(pool, used),
        **_describe_classes(evaluation.by_class(matcher, halves.reporting)),
        "matchers": matcher_figures({name: tallies[name] for name in names}),
    }
    shipped = matched.fit(torch.ones(len(sample), dtype=torch.bool))
    pool = pool.with_matching({**pool.matching, **shipped, **_confidence(config, matched.answer(shipped), matcher)})
    pool = _with_metrics(pool, new, document["tasks"])
    detailed = [name for name in dict.fromkeys((matcher, EXACT)) if name in tallies]
    return EvaluatedPool(pool, document, evaluation_files(tallies, detailed, [task.name for task in pool.tasks]))


def matchers_to_measure(config: Config, pool: PromptPool) -> tuple[str, ...]:
    """Those that every task of the pool can answer: tasks may have been trained without what a matcher needs."""
    lacking: frozenset[str] = frozenset()
    if any(task.plain_means is None for task in pool.tasks):
        lacking |= PLAIN_MATCHERS
    if not pool.has_statistics:
        lacking |= CLASS_MATCHERS
    return tuple(name for name in config.evaluate.matchers if name not in lacking)


def needed_matchers(config: Config, pool: PromptPool) -> tuple[str, ...]:
    """Those that must be matched to measure a version: also what serves, and what the others are compared with."""
    # `auto` falls back to these where it can afford none of those that are measured.
    fallback = ("fused",) if pool.has_statistics and config.serve.budget > SHORTLIST else ("cascade", "mqmk-ei")
    serving = fallback if config.serve.matcher == AUTO else (config.serve.matcher,)
    return tuple(dict.fromkeys((*matchers_to_measure(config, pool), *serving, EXACT, "perfect")))


def _confidence(config: Config, evaluation: SampleEvaluation, serving: str) -> dict[str, Any]:
    found = {name: match for name, match in evaluation.matches.items() if name != "perfect"}
    names = [task.name for task in evaluation.pool.tasks]
    return fit_confidence(found, names, serving, config.evaluate.false_alarm)


def _tasks(
    evaluation: SampleEvaluation,
    tallies: Mapping[str, SampleTally],
    matcher: str,
    new: Mapping[int, NewTask],
    fitted: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Shares of a task's own images, of each task that has some; of new ones also of images outside the sample."""
    pool, used, perfect = evaluation.pool, tallies[matcher], tallies["perfect"]
    tasks = {
        pool.tasks[number].name: _figures(share, perfect.tasks[number].accuracy) for number, share in used.tasks.items()
    }
    for number, task in new.items():
        share = used.tasks.get(number)
        if task.images and (share is None or int((evaluation.sample.task == number).sum()) < task.images):
            share = task.measure(matcher, fitted)
        if task.images and share:
            tasks[pool.tasks[number].name] = _figures(share, task.measure("perfect", fitted).accuracy)
    return tasks


def _figures(share: TaskShare, accuracy_given_task: float) -> dict[str, Any]:
    return {
        "images": share.images,
        "matching_rate": share.matching_rate,
        "accuracy": share.accuracy,
        "accuracy_given_task": accuracy_given_task,
    }


def _with_metrics(
    pool: PromptPool, new: Mapping[int, NewTask], measured: Mapping[str, Mapping[str, float]]
) -> PromptPool:
    """New tasks with what they reach in this version, for `GET /pool`; the others keep what they have."""
    tasks = [*pool.tasks]
    for number in new:
        reached = measured.get(tasks[number].name, {})
        tasks[number] = replace(tasks[number], metrics={name: round(value, DIGITS) for name, value in reached.items()})
    return replace(pool, tasks=tuple(tasks))


def _confusion(pool: PromptPool, used: SampleTally) -> dict[str, dict[str, int]]:
    """True task -> matched task -> images: every task that has images, and the most frequent mistakes."""
    names = [task.name for task in pool.tasks]
    rows: dict[str, dict[str, int]] = {names[number]: {} for number in used.tasks}
    mistakes = sorted((-n, true, matched) for (true, matched), n in used.confusion.items() if true != matched)
    for number in used.tasks:
        if n := used.confusion.get((number, number)):
            rows[names[number]][names[number]] = n
    for n, true, matched in mistakes[:MOST_MISTAKES]:
        rows[names[true]][names[matched]] = -n
    return rows


def _describe_classes(tally: ClassTally) -> dict[str, Any]:
    """The least accurate classes, and the pairs that are mistaken most often: `[true, answered, images]`."""
    by_accuracy = sorted(tally.images, key=lambda label: (tally.right[label] / tally.images[label], label))
    by_count = sorted(tally.mistakes.items(), key=lambda item: (-item[1], item[0]))
    return {
        "classes": {
            label: {"images": tally.images[label], "right": tally.right[label]} for label in by_accuracy[:MOST_CLASSES]
        },
        "mistaken_classes": [[*pair, images] for pair, images in by_count[:MOST_CLASSES]],
    }
