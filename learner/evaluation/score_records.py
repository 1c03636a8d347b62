"""What was found out about pairs of image and prompt: scores and the own head's answer, not the query itself.

S_t and the answer of task t's head depend on the image, the g-prompt, and the prompt, keys and head of task t, and on
nothing else. Rows and columns are named by the content of these, so whatever an earlier version recorded is taken over.
A pair that nobody needed yet is NaN.
"""

from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mqmk.learner.evaluation.query_table import TableNames, content_digest, find_places
from mqmk.matcher.keys import trained_keys
from mqmk.matcher.pool import PromptPool, read_head


@dataclass(frozen=True, eq=False)
class ScoreRecords:
    """Everything that the matchers of a service need to be measured on some images."""

    names: TableNames
    class_scores: Float[Tensor, "images tasks"]
    """S_t of Q_t with a key for each class."""
    task_scores: Float[Tensor, "images tasks"]
    """S_t of Q_t with one key for the task."""
    answers: Int32[Tensor, "images tasks"]
    """The class within its task that the task's own head answers."""
    enhanced: Float[Tensor, "images dim"]
    """Q+, with the mean of all e-prompts of this pool."""
    plain: Float[Tensor, "images dim"]

    @property
    def complete(self) -> Bool[Tensor, " images"]:
        """Which images were recorded with every prompt."""
        return ~self.class_scores.isnan().any(dim=1)

    @property
    def missing(self) -> Int[Tensor, " images"]:
        """With how many prompts an image was not recorded."""
        return self.class_scores.isnan().sum(dim=1)

    def record(
        self,
        pool: PromptPool,
        image: Int[Tensor, " pairs"],
        task: Int[Tensor, " pairs"],
        query: Float[Tensor, "pairs dim"],
    ) -> None:
        """Note what the queries of some pairs say."""
        by_class, by_task = trained_keys(pool, None), trained_keys(pool, 1)
        order = task.argsort(stable=True)
        numbers, counts = task[order].unique_consecutive(return_counts=True)
        for number, pairs in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            rows, found = image[pairs], query[pairs]
            self.class_scores[rows, number] = by_class.score(found, number, top_keys=1)
            self.task_scores[rows, number] = by_task.score(found, number, top_keys=1)
            logits = found @ read_head(pool.tasks[number].head, pool.head_kind).T  # whose order needs no scale
            self.answers[rows, number] = logits.argmax(dim=1).int()


def name_records(pool: PromptPool, images: tuple[str, ...]) -> TableNames:
    """The rows and columns that a pool and some images ask for."""
    backbone = repr(pool.backbone)
    ground = repr((backbone, pool.g_layers, pool.e_layers, content_digest("g-prompt", pool.g_prompt)))
    prompts = tuple(
        content_digest(f"{ground}{task.class_samples}", task.e_prompt, task.keys, task.head, task.means)
        for task in pool.tasks
    )
    enhanced = sha256("".join(prompts).encode()).hexdigest()[:32]
    return TableNames(images, prompts, enhanced, content_digest(backbone))


def take_over(known: ScoreRecords | None, names: TableNames, dim: int) -> ScoreRecords:
    """Records under these names, with what is known already."""
    images, tasks = len(names.images), len(names.prompts)
    class_scores, task_scores = (torch.full((images, tasks), torch.nan) for _ in range(2))
    answers = torch.zeros(images, tasks, dtype=torch.int32)
    enhanced, plain = (torch.full((images, dim), torch.nan) for _ in range(2))
    records = ScoreRecords(names, class_scores, task_scores, answers, enhanced, plain)
    if known is None:
        return records
    row, column = find_places(known.names.images, names.images), find_places(known.names.prompts, names.prompts)
    rows, columns = (row >= 0).nonzero(), (column >= 0).nonzero()[:, 0]
    for name in ("class_scores", "task_scores", "answers"):
        getattr(records, name)[rows, columns] = getattr(known, name)[row[rows], column[columns]]
    for name in ("enhanced", "plain"):
        if getattr(known.names, name) == getattr(names, name):
            getattr(records, name)[rows[:, 0]] = getattr(known, name)[row[rows[:, 0]]]
    return records
