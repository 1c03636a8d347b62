"""Builds the next pool version: adds tasks or removes one, evaluates it on held-out images, checks the gate.

Nothing here touches a published version. The candidate is written beside the store; the daemon announces it in the
ledger before it is moved there.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from mqmk.daemon import failpoints
from mqmk.daemon.builder.gate import Candidate, check_new_task, check_version
from mqmk.daemon.builder.held_out_files import HeldOutFiles
from mqmk.daemon.builder.smoke_test import SmokeTest
from mqmk.daemon.builder.version_evaluation import EvaluatedPool
from mqmk.daemon.builder.version_evaluator import VersionEvaluator
from mqmk.daemon.config.sections import Config
from mqmk.daemon.jobs import Build, BuildTask, Built, GateRejection
from mqmk.daemon.state_dir import StateDir
from mqmk.learner.training.train import empty_pool
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT

CPU: Final = torch.device("cpu")


@dataclass
class PoolCache:
    """The pool that the last build started from: the next one reads only the layers that came since."""

    pool: PromptPool | None = None


class VersionBuilder:
    """One build."""

    def __init__(
        self,
        vit: FrozenViT,
        config: Config,
        job: Build,
        smoke_test: SmokeTest,
        held_out: HeldOutFiles,
        cache: PoolCache | None = None,
    ) -> None:
        self.vit, self.config, self.job, self.smoke_test, self.held_out = vit, config, job, smoke_test, held_out
        self.cache = cache or PoolCache()
        self.files = StateDir(job.state)
        self.parent = job.parent.version if job.parent else None
        self.evaluator: VersionEvaluator | None = None

    def build(self) -> Built:
        """Make, evaluate, write, check."""
        failpoints.hit("build.before")
        old = self._load_parent()
        built = self._leave_out(old) if self.job.kind == "forget" else self._add(old)
        failpoints.hit("build.candidate")
        return built

    def _leave_out(self, old: PromptPool) -> Built:
        (gone,) = self.job.tasks
        left = old.without_task(gone.name)
        if not left.tasks:  # an empty pool keeps nothing that was learned from data
            left = empty_pool(self.vit, self.config.train)
        evaluated = self._evaluate(left, added=0)
        candidate, reason = self._write_and_check(old, evaluated)
        refused = {gone.task: GateRejection(reason, {})} if reason else {}
        return Built(candidate, self.parent, evaluated.document, refused=refused)

    def _add(self, old: PromptPool) -> Built:
        """Each task is judged by its own figures; without those that were refused, the version is made again.

        If it fails for a reason that may be due to any of them, the first is tried alone and the others wait.
        """
        trained, stale = self._read_trained(old)
        refused: dict[int, GateRejection] = {}
        while trained:
            new = old
            for prompt in trained.values():
                new = new.with_task(prompt.tasks[0]) if new.tasks else prompt
            evaluated = self._evaluate(new, added=len(trained))
            weak = self._find_weak(trained, evaluated)
            if not weak:
                candidate, reason = self._write_and_check(old, evaluated)
                if reason is None:
                    added = tuple(each.task for each in trained)
                    return Built(candidate, self.parent, evaluated.document, added, refused, stale)
                if len(trained) > 1:
                    trained = dict([*trained.items()][:1])
                    continue
                weak = dict.fromkeys(trained, reason)
            figures = evaluated.document["tasks"]
            refused |= {each.task: GateRejection(reason, figures.get(each.name, {})) for each, reason in weak.items()}
            trained = {each: prompt for each, prompt in trained.items() if each not in weak}
        return Built(None, self.parent, {}, (), refused, stale)

    def _read_trained(self, old: PromptPool) -> tuple[dict[BuildTask, PromptPool], tuple[int, ...]]:
        """The prompts to add, as pools of one, and tasks to train again."""
        tasks = self.job.tasks if old.tasks else self.job.tasks[:1]  # the first one's g-prompt becomes the pool's
        found = {each: self.files.read_trained(each.identity) for each in tasks}
        g_prompt = old.g_prompt.cpu()
        stale = [each for each, own in found.items() if old.tasks and not torch.equal(own.g_prompt.cpu(), g_prompt)]
        fresh = {each: own for each, own in found.items() if each not in stale}
        return fresh, tuple(each.task for each in stale)

    def _evaluate(self, pool: PromptPool, added: int) -> EvaluatedPool:
        known = self.evaluator.records if self.evaluator else None
        self.evaluator = VersionEvaluator(self.vit, self.config, self.files, self.held_out, pool.to(CPU), known)
        return self.evaluator.evaluate(added)

    def _find_weak(self, tasks: Iterable[BuildTask], evaluated: EvaluatedPool) -> dict[BuildTask, str]:
        """The reason against each task that does not reach what it must."""
        figures = evaluated.document["tasks"]
        judged = {task: check_new_task(self.config.gate, task.name, figures.get(task.name)) for task in tasks}
        return {task: reason for task, reason in judged.items() if reason and not task.approved}

    def _write_and_check(self, old: PromptPool, evaluated: EvaluatedPool) -> tuple[Pointer, str | None]:
        """Write the candidate, in the place of any other; the reason against it."""
        shutil.rmtree(self.files.candidates, ignore_errors=True)
        made = self.files.store.write(evaluated.pool, self.job.version, self.parent, cards=self.files.candidates)
        candidate = Candidate(old, evaluated.pool, self.files.store, self.files.candidates / made.card)
        reason = check_version(self.vit, self.config, candidate, self.smoke_test)
        assert self.evaluator is not None
        self.evaluator.save(evaluated.files, made.digest)
        return Pointer(made.version, made.digest), reason

    def _load_parent(self) -> PromptPool:
        if self.job.parent is None:
            return empty_pool(self.vit, self.config.train)
        known = [self.cache.pool] if self.cache.pool else []
        self.cache.pool = self.files.store.read(self.job.parent, self.vit.info, known)
        return self.cache.pool
