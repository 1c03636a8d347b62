"""How one task is learned: the whole loop of `train_task` on one screen.

Loss = cross-entropy over this task's classes only + mean(1 - cos(stop_grad(Q_t), k_ty)), one forward and one backward
a step. With keys in closed form the second term needs no training: for fixed queries its minimiser is the mean of the
normalised queries of a class, so one pass after the last epoch gives the exact keys.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner import checkpoint
from mqmk.learner.augment import augment
from mqmk.learner.patches import some_patches
from mqmk.learner.settings import TrainSettings
from mqmk.learner.statistics import ClassMeans, PlainCounting, PlainStatistics
from mqmk.learner.tasks import Batch, Task
from mqmk.learner.team import ALONE, Team
from mqmk.matcher.images import normalise
from mqmk.matcher.keys import grouped
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT, Prompt, Stem


@dataclass(frozen=True)
class Progress:
    """How far a running task is."""

    task: str
    epoch: int
    epochs: int
    loss: float
    images_per_second: float
    seconds_left: float
    held_out_accuracy: float | None


@dataclass(frozen=True, eq=False)
class Trained:
    """What learning a task produced."""

    prompt: TaskPrompt
    g_prompt: Float[Tensor, "layers 2 length dim"]

    def added_to(self, pool: PromptPool) -> PromptPool:
        """The pool that knows this task, too."""
        return replace(pool, g_prompt=self.g_prompt).with_task(self.prompt)


def train_task(
    task: Task,
    vit: FrozenViT,
    pool: PromptPool,
    settings: TrainSettings,
    *,
    resume: bytes | None = None,
    keep: Callable[[bytes], None] | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    team: Team = ALONE,
    regression: bool = False,
) -> Trained:
    """Learn one task. Reads no data of any other task and changes nothing that other tasks compute.

    After every epoch `keep` gets the whole state, before `report` is told. A run that was killed goes on from the last
    one, given as `resume`, and ends with the same tensors.
    With `regression`, the task also keeps what the matcher `ridge` needs: 4 MB, many times the rest of it.
    """
    learning = Learning(task, vit, pool.to(vit.device), settings, regression)
    if resume and (saved := checkpoint.from_bytes(resume)):
        learning.restore(saved)
    while learning.epoch < settings.epochs and not learning.stalled:
        begun, total = time.monotonic(), 0.0
        random = torch.Generator().manual_seed(learning.seed)
        for share, batch in learning.batches():
            learning.set_rate(share)
            learning.optimiser.zero_grad()
            for part in team.mine(batch.split(settings.accumulate * team.size)):
                images = augment(learning.prepared(part), settings.augmentation, random)
                loss = learning.loss(images, part.labels.to(vit.device), random)
                (loss * len(part) / len(batch)).backward()
                total += loss.item() * len(part)
            team.add_up(learning.trained)
            torch.nn.utils.clip_grad_norm_(learning.trained, settings.clip)
            learning.optimiser.step()
        learning.end_epoch()
        if keep:
            keep(checkpoint.to_bytes(learning.tensors()))
        report(learning.progress(team.total(total) / len(task.training), time.monotonic() - begun))
    return learning.finish()


class Learning:
    """The state of one task's training: what is trained, the optimiser, the epoch, the best so far."""

    def __init__(
        self, task: Task, vit: FrozenViT, pool: PromptPool, settings: TrainSettings, regression: bool = False
    ) -> None:
        self.task, self.vit, self.pool, self.settings, self.regression = task, vit, pool, settings, regression
        self.epoch, self.accuracy, self.best_accuracy, self.epochs_without_gain = 0, -1.0, -1.0, 0
        random = torch.Generator().manual_seed(settings.seed)

        def around(*shape: int) -> Tensor:
            return torch.empty(*shape).uniform_(-settings.spread, settings.spread, generator=random)

        layers, classes = len(pool.e_layers), len(task.classes)
        self.g_prompt = pool.g_prompt.clone()
        self.e_prompt = self._starting_e_prompt(around(layers, 2, settings.e_length, vit.dim))
        self.head, self.keys = around(classes, vit.dim).to(vit.device), around(classes, vit.dim).to(vit.device)
        self.trains_g = not pool.tasks or settings.g_prompt == "always"
        self.trained = [self.e_prompt, self.head]
        self.trained += [self.g_prompt] if self.trains_g else []
        self.trained += [self.keys] if settings.keys == "learned" else []
        for tensor in self.trained:
            tensor.requires_grad_()
        self.optimiser = torch.optim.Adam(self.trained, lr=settings.learning_rate)
        self.best = self._values()

    def _starting_e_prompt(self, random: Tensor) -> Tensor:
        if not self.pool.tasks or self.settings.start == "random":
            return random.to(self.vit.device)
        source = self.pool.tasks[0 if self.settings.start == "first" else -1]
        return source.e_prompt.clone()

    def _values(self) -> dict[str, Tensor]:
        values = {"g_prompt": self.g_prompt, "e_prompt": self.e_prompt, "head": self.head, "keys": self.keys}
        return {name: value.detach().clone() for name, value in values.items()}

    @property
    def seed(self) -> int:
        """Random numbers depend on the epoch alone, so a resumed run draws the same ones."""
        return self.settings.seed * 100_003 + self.epoch

    @property
    def stalled(self) -> bool:
        """Early stopping says that it is enough."""
        return self.settings.patience is not None and self.epochs_without_gain >= self.settings.patience

    def batches(self) -> Iterator[tuple[float, Batch]]:
        """This epoch's batches, each with the share of the whole training that is done before it."""
        steps = math.ceil(len(self.task.training) / self.settings.batch)
        batches = self.task.training.batches(self.settings.batch, self.seed, self.settings.balanced)
        for step, batch in enumerate(batches):
            yield (self.epoch + step / steps) / self.settings.epochs, batch

    def set_rate(self, share: float) -> None:
        """Cosine schedule."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))

    def prepared(self, batch: Batch) -> Float[Tensor, "batch 3 height width"]:
        """The backbone's input."""
        return normalise(batch.pixels.to(self.vit.device), self.vit.info)

    def loss(
        self,
        images: Float[Tensor, "batch 3 height width"],
        labels: Int[Tensor, " batch"],
        random: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """Classification over this task's classes, and matching where keys are learned; the same features for both."""
        seen = some_patches(self.vit, self.vit.embed(images), self.settings.patches, random)
        query = F.normalize(self.query(seen), dim=1)
        loss = F.cross_entropy(self.pool.head_scale * query @ F.normalize(self.head, dim=1).T, labels)
        if self.settings.keys == "learned":
            loss = loss + (1 - F.cosine_similarity(query.detach(), self.keys[labels])).mean()
        return loss

    def query(self, embedded: Stem) -> Float[Tensor, "batch dim"]:
        """Q_t with the prompts being trained; no gradient below the first trained layer."""
        g = Prompt(self.pool.g_layers, (self.g_prompt,))
        with torch.set_grad_enabled(self.trains_g and torch.is_grad_enabled()):
            stem = self.vit.stem(embedded, g, self.pool.e_layers[0])
        return self.vit.query(stem, g, Prompt(self.pool.e_layers, (self.e_prompt,)))

    def end_epoch(self) -> None:
        """Count the epoch, look at the held-out side, remember the best."""
        self.epoch += 1
        wanted = self.settings.patience is not None or self.epoch == self.settings.epochs
        if len(self.task.held_out) and wanted:  # nothing in between depends on it, and it is a pass over the pictures
            self.accuracy = self._held_out_accuracy()
        better = self.accuracy > self.best_accuracy or self.settings.patience is None
        self.epochs_without_gain = 0 if better else self.epochs_without_gain + 1
        if better:
            self.best, self.best_accuracy = self._values(), self.accuracy

    @torch.no_grad()
    def _held_out_accuracy(self) -> float:
        right = 0
        for batch in self.task.held_out.batches(self.settings.batch, seed=None):
            query = self.query(self.vit.embed(self.prepared(batch)))
            answers = (query @ F.normalize(self.head, dim=1).T).argmax(dim=1)
            right += int((answers == batch.labels.to(answers.device)).sum())
        return right / len(self.task.held_out)

    def progress(self, loss: float, seconds: float) -> Progress:
        """What the last epoch took and what is left."""
        left = seconds * (self.settings.epochs - self.epoch)
        rate = len(self.task.training) / seconds
        accuracy = None if self.accuracy < 0 else self.accuracy
        return Progress(self.task.name, self.epoch, self.settings.epochs, loss, rate, left, accuracy)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state, for a checkpoint."""
        numbers = [self.epoch, self.accuracy, self.best_accuracy, self.epochs_without_gain]
        state = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        state |= {f"now.{name}": value for name, value in self._values().items()}
        state |= {f"best.{name}": value for name, value in self.best.items()}
        moments = checkpoint.optimiser_tensors(self.optimiser)
        return state | {f"optimiser.{name}": value for name, value in moments.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint of the same task and settings."""
        epoch, self.accuracy, self.best_accuracy, without_gain = state["numbers"].tolist()
        self.epoch, self.epochs_without_gain = int(epoch), int(without_gain)
        for name, value in checkpoint.under(state, "now.").items():
            getattr(self, name).data.copy_(value)
        self.best = {name: value.to(self.vit.device) for name, value in checkpoint.under(state, "best.").items()}
        checkpoint.restore_optimiser(self.optimiser, checkpoint.under(state, "optimiser."))

    @torch.no_grad()
    def finish(self) -> Trained:
        """Keys and means in closed form from one pass over the training data, without variation."""
        for name, value in self.best.items():
            getattr(self, name).data.copy_(value)
        means, plain = self._statistics()
        keys = self.keys.detach() if self.settings.keys == "learned" else means
        if self.settings.keys_per_task is not None:
            keys = grouped(keys, self.settings.keys_per_task)
        values = self._values()
        prompt = TaskPrompt(
            name=self.task.name,
            classes=self.task.classes,
            e_prompt=values["e_prompt"],
            keys=keys,
            head=values["head"],
            means=means,
            plain_means=plain.means if plain else None,
            plain_gram=plain.gram if plain else None,
            plain_sums=plain.sums if plain else None,
            manifest_sha256=self.task.manifest_sha256,
            samples=len(self.task.training),
            trained_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return Trained(prompt, values["g_prompt"])

    def _statistics(self) -> tuple[Float[Tensor, "classes dim"], PlainStatistics | None]:
        """Class means with this task's prompt and, where wanted, what is kept of queries without any."""
        shape = len(self.task.classes), self.vit.dim, self.vit.device
        own, plain = ClassMeans(*shape), PlainCounting(*shape, self.regression) if self.settings.plain_means else None
        for batch in self.task.training.batches(self.settings.batch, seed=None):
            embedded, labels = self.vit.embed(self.prepared(batch)), batch.labels.to(self.vit.device)
            own.add(self.query(embedded), labels)
            if plain:
                plain.add(self.vit.query(embedded), labels)
        return own.value(), plain.value() if plain else None


def empty_pool(vit: FrozenViT, settings: TrainSettings) -> PromptPool:
    """The pool before any task: a random g-prompt in the first two blocks, room for e-prompts in the later ones."""
    e_layers = settings.e_layers or tuple(range(2, vit.depth - 1)) or (vit.depth - 1,)
    random = torch.Generator().manual_seed(settings.seed)
    rows = torch.empty(2, 2, settings.g_length, vit.dim).uniform_(-settings.spread, settings.spread, generator=random)
    return PromptPool(vit.info, (0, 1), e_layers, rows.to(vit.device), head_scale=settings.head_scale)
