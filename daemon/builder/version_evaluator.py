"""Evaluate one version: choose the sample, compute what no earlier version recorded, measure, and keep the records."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mqmk.daemon.builder.held_out_files import HeldOutFiles, pixel_reader
from mqmk.daemon.builder.record_files import load_nearest_records, save_records
from mqmk.daemon.builder.version_evaluation import EvaluatedPool, NewTask, evaluate_version, needed_matchers
from mqmk.daemon.config.sections import Config
from mqmk.daemon.state_dir import StateDir
from mqmk.learner.evaluation.sample import Sample, TaskImages, choose_sample
from mqmk.learner.evaluation.sample_answers import MatchedSample
from mqmk.learner.evaluation.sample_evaluation import TaskShare
from mqmk.learner.evaluation.sample_matches import ALL_TASKS, NO_ROWS, RowBudget, SampleMatches, match_sample
from mqmk.learner.evaluation.score_records import ScoreRecords, name_records
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT


class VersionEvaluator:
    """One evaluation. The pool is on the CPU."""

    def __init__(
        self,
        vit: FrozenViT,
        config: Config,
        files: StateDir,
        held_out: HeldOutFiles,
        pool: PromptPool,
        known: ScoreRecords | None = None,
    ) -> None:
        self._vit, self._config, self._files, self._pool = vit, config, files, pool
        self._paths = [files.held_out(task.manifest_sha256) for task in pool.tasks]
        self._images = held_out.list_images(self._paths)
        # A quarter, if the pool can be served without Q+ and exact matching: both cost more in every version.
        most = config.evaluate.max_images
        self._budget = RowBudget.of(max(1, most // 4) if pool.has_statistics else most)
        self._sample = choose_sample(self._images, config.evaluate.max_images)
        if known is None:
            known = load_nearest_records(files.evaluations, name_records(pool, self._sample.ids))
        self.records, self._matches = self._match(self._sample, needed_matchers(config, pool), known, self._budget)

    def evaluate(self, added: int) -> EvaluatedPool:
        """Measure every matcher on the sample, and on their own images the last tasks of the pool, which are new."""
        matched = MatchedSample(self._pool, self._sample, self.records, self._matches)
        held_out = sum(len(images.ids) for images in self._images)
        tasks = len(self._pool.tasks)
        new = {number: self._new_task(number) for number in range(tasks - added, tasks)}
        return evaluate_version(self._config, matched, held_out, new)

    def _new_task(self, number: int) -> NewTask:
        return NewTask(len(self._images[number].ids), partial(self._measure_task, number))

    def _measure_task(self, number: int, matcher: str, fitted: Mapping[str, Any]) -> TaskShare:
        """On as many of its images as one build may add; with the task given, on all of them."""
        most = None if matcher == "perfect" else max(1, self._config.evaluate.max_images // 2)
        sample = self._sample_of_task(number, most)
        budget = self._budget if matcher in ALL_TASKS else NO_ROWS
        records, matches = self._match(sample, (matcher,), self.records, budget)
        return MatchedSample(self._pool, sample, records, matches).answer(fitted).by_task(matcher)[number]

    def _sample_of_task(self, number: int, max_images: int | None) -> Sample:
        own = [images if place == number else TaskImages.empty() for place, images in enumerate(self._images)]
        return choose_sample(own, max_images)

    def _match(
        self, sample: Sample, matchers: Sequence[str], known: ScoreRecords | None, budget: RowBudget = NO_ROWS
    ) -> tuple[ScoreRecords, SampleMatches]:
        read = pixel_reader(self._paths, sample)
        return match_sample(self._vit, self._pool, sample, read, matchers, known, budget)

    def save(self, files: Mapping[str, bytes], digest: str) -> None:
        """Keep the records for the next version, and the files for people."""
        for name, data in files.items():
            place = self._files.evaluation(digest) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        save_records(self._files.records(digest), self.records)
