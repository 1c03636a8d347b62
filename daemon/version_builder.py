"""The next pool version: the current pool with one task more or one less, evaluated on held-out pictures, and judged.

Nothing here touches a published version. The candidate is written beside the store; the daemon announces it in the
ledger before it moves in.
"""

import shutil
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from mqmk.daemon import crash_points
from mqmk.daemon.config import Config
from mqmk.daemon.fresh_answer import FreshAnswers
from mqmk.daemon.gate import Judged, verdict
from mqmk.daemon.jobs import Build, Built, Stale
from mqmk.daemon.registry_figures import evaluation_files
from mqmk.daemon.state_files import StateFiles
from mqmk.learner.evaluate import Evaluation, HeldOut, QueryTable, Tally, extend, first_table, matching_card
from mqmk.learner.tasks import InMemory
from mqmk.learner.train import empty_pool
from mqmk.matcher.calibration import matching_confidence
from mqmk.matcher.durable import replace_file
from mqmk.matcher.matchers import MatchSettings
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import read_pool, write_pool
from mqmk.matcher.predictor import choose_matcher
from mqmk.matcher.prompted_vit import FrozenViT

CPU: Final = torch.device("cpu")


class VersionBuilder:
    """One build."""

    def __init__(self, vit: FrozenViT, config: Config, job: Build, fresh: FreshAnswers) -> None:
        self.vit, self.config, self.job, self.fresh = vit, config, job, fresh
        self.files = StateFiles(job.state)

    def build(self) -> Built | Stale:
        """Make, evaluate, judge, write."""
        crash_points.reached("build.before")
        shutil.rmtree(self.files.candidates, ignore_errors=True)  # of builds that were given up
        parent, old = self._current()
        new = self._next(old)
        if isinstance(new, Stale):
            return new
        held_out, table = self._queries(parent, old, new)
        evaluation = Evaluation(new.to(CPU), table, held_out)
        new, document, figures = self._measured(new, evaluation)
        identity = write_pool(new, self.files.candidates, self.job.version, parent)
        judged = Judged(old, new, document, self.files.candidates / identity.folder, self.job.approved)
        refused = verdict(self.vit, self.config, judged, self.fresh)
        self._keep(table, figures, identity.digest)
        crash_points.reached("build.candidate")
        return Built(identity.version, identity.digest, parent, document, refused)

    def _current(self) -> tuple[int | None, PromptPool]:
        if self.job.parent is None:
            return None, empty_pool(self.vit, self.config.train)
        version, pool = read_pool(self.files.store.folder / self.job.parent, self.vit.info)
        return version.version, pool

    def _next(self, old: PromptPool) -> PromptPool | Stale:
        if self.job.kind == "forget":
            left = old.without_task(self.job.name)
            # With no task left, nothing that was learned from data stays either.
            return left if left.tasks else empty_pool(self.vit, self.config.train)
        trained = self.files.read_trained(self.job.identity)
        if old.tasks and not torch.equal(trained.g_prompt.cpu(), old.g_prompt.cpu()):
            return Stale("the pool's g-prompt is not the one this task was trained with; it is learned again")
        if not old.tasks:
            return trained
        return old.with_task(trained.tasks[0])

    def _queries(self, parent: int | None, old: PromptPool, new: PromptPool) -> tuple[HeldOut, QueryTable]:
        """Held-out pictures of all tasks, and their queries; those of the parent version are taken over."""
        held_out = HeldOut.nothing(self.vit.info.image_size)
        for number, task in enumerate(new.tasks):
            held_out = held_out.with_task(number, self._pictures(task.manifest_sha256))
        table = first_table(self.vit)
        grows = [task.name for task in new.tasks[: len(old.tasks)]] == [task.name for task in old.tasks]
        if parent is not None and grows and old.tasks:
            table = self._known_table() or table
        if not len(held_out.task):
            none = torch.zeros(0, self.vit.dim)
            return held_out, QueryTable(torch.zeros(0, len(new.tasks), self.vit.dim), none, none)
        return held_out, extend(table, self.vit, new.to(self.vit.device), held_out)

    def _pictures(self, identity: str) -> InMemory:
        path, size = self.files.held_out(identity), self.vit.info.image_size
        if not path.exists():
            return InMemory(torch.zeros(0, 3, size, size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
        tensors = load_file(path)
        return InMemory(tensors["pixels"], tensors["labels"])

    def _known_table(self) -> QueryTable | None:
        assert self.job.parent is not None
        digest = read_pool(self.files.store.folder / self.job.parent)[0].digest
        try:
            return QueryTable(**load_file(self.files.queries(digest)))
        except (FileNotFoundError, SafetensorError, TypeError):
            return None

    def _keep(self, table: QueryTable, figures: Mapping[str, bytes], digest: str) -> None:
        path = self.files.queries(digest)
        for name, data in figures.items():
            place = self.files.evaluation(digest) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, save({"own": table.own, "plus": table.plus, "plain": table.plain}))
        newest = sorted(path.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime)
        for old in newest[:-3]:  # they can be computed again
            old.unlink(missing_ok=True)

    def _measured(
        self, pool: PromptPool, evaluation: Evaluation
    ) -> tuple[PromptPool, dict[str, Any], dict[str, bytes]]:
        """The pool with what `auto` chooses by; what the evaluation says in numbers; tables and figures for people."""
        if not len(evaluation.held_out.task):
            return pool, {"held_out": 0, "tasks": {}}, {}
        tallies: dict[str, Tally] = {name: evaluation.tally(name) for name in self.config.evaluate.matchers}
        pool = pool.with_matching(matching_card(len(evaluation.held_out.task), tallies))
        tallies["perfect"] = evaluation.tally("perfect")
        matcher: str = self.config.serve.matcher
        if matcher == "auto":
            matcher = choose_matcher(pool, self.config.serve.budget, MatchSettings().shortlist)
        names = [task.name for task in pool.tasks]
        found = {name: evaluation.match(name) for name in dict.fromkeys((*self.config.evaluate.matchers, matcher))}
        sure = matching_confidence(found, evaluation.held_out.task, names, matcher)
        pool = pool.with_matching({**pool.matching, **sure})
        used = tallies.get(matcher) or evaluation.tally(matcher)
        document = {
            "held_out": len(evaluation.held_out.task),
            "matcher": matcher,
            "matching_rate": used.matching_rate,
            "accuracy": fmean(used.task_accuracy_task),
            "matchers": pool.matching["matchers"],
            "tasks": _by_task(pool, evaluation, used, tallies["perfect"]),
            "confusion": _confusion(pool, used),
        }
        return pool, document, evaluation_files(tallies, names)


def _by_task(pool: PromptPool, evaluation: Evaluation, used: Tally, perfect: Tally) -> dict[str, Mapping[str, float]]:
    """What each task with held-out pictures reaches."""
    judged = set(evaluation.held_out.task.tolist())
    return {
        task.name: {
            "matching_rate": used.task_matching[number],
            "accuracy": used.task_accuracy_task[number],
            "accuracy_given_task": perfect.task_accuracy_task[number],
        }
        for number, task in enumerate(pool.tasks)
        if number in judged
    }


def _confusion(pool: PromptPool, used: Tally) -> dict[str, dict[str, int]]:
    """True task -> matched task -> pictures, without the zeros: a thousand tasks have a million pairs."""
    names = [task.name for task in pool.tasks]
    rows = {name: dict(zip(names, counts, strict=True)) for name, counts in zip(names, used.confusion, strict=True)}
    return {name: {matched: n for matched, n in row.items() if n} for name, row in rows.items()}
