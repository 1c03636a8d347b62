"""What was found out about pairs of image and prompt: cosines with every class of the task, not the query itself.

They depend on the image, the g-prompt, and the prompt, keys and head of task t, and on nothing else. Rows and columns
are named by the content of these, so whatever an earlier version recorded is taken over. A pair that nobody needed yet
is NaN.
"""

from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mqmk.learner.evaluation.query_table import TableNames, content_digest, find_places
from mqmk.matcher.fusion import ClassEvidence, Pairs
from mqmk.matcher.keys import max_by_task, trained_keys
from mqmk.matcher.pool import PromptPool, task_of_rows

BY_CLASS = ("key", "head")
BY_IMAGE = ("enhanced", "plain", "anchor")


@dataclass(frozen=True, eq=False)
class ScoreRecords:
    """Everything that the matchers of a service need to be measured on some images."""

    names: TableNames
    key: Float[Tensor, "images rows"]
    """Cosine of Q_t with the key of each class of task t."""
    head: Float[Tensor, "images rows"]
    """Cosine of Q_t with the head row of each class of task t."""
    task_scores: Float[Tensor, "images tasks"]
    """S_t of Q_t with one key for the task."""
    enhanced: Float[Tensor, "images dim"]
    """Q+, with the mean of all e-prompts of this pool."""
    plain: Float[Tensor, "images dim"]
    anchor: Float[Tensor, "images dim"]

    @property
    def has_anchor(self) -> bool:
        """Whether the anchor query of every image was computed."""
        return not bool(self.anchor.isnan().any())

    @property
    def lacks(self) -> Bool[Tensor, "images tasks"]:
        """Which images were not recorded with which prompt."""
        return self.task_scores.isnan()

    def class_scores(self, images: Int[Tensor, " some"]) -> Float[Tensor, "some tasks"]:
        """S_t of Q_t with a key for each class; NaN for pairs that were not recorded."""
        row_task = task_of_rows(self.names.sizes)
        best = max_by_task(self.key[images].nan_to_num(nan=-torch.inf), row_task, len(self.names.sizes))
        return best.masked_fill(self.lacks[images], torch.nan)

    def record(self, pool: PromptPool, pairs: Pairs, query: Float[Tensor, "pairs dim"]) -> None:
        """Note what the queries of some pairs say."""
        ClassEvidence(self.key, self.head).add(pool, pairs, query)
        by_task = trained_keys(pool, 1)
        for task in pairs.task.unique().tolist():
            here = pairs.task == task
            self.task_scores[pairs.image[here], task] = by_task.score(query[here], task, top_keys=1)


def name_records(pool: PromptPool, images: tuple[str, ...]) -> TableNames:
    """The rows and columns that a pool and some images ask for."""
    backbone = repr(pool.backbone)
    ground = repr((backbone, pool.g_layers, pool.e_layers, content_digest("g-prompt", pool.g_prompt)))
    prompts = tuple(
        content_digest(f"{ground}{task.class_samples}", task.e_prompt, task.keys, task.head, task.means)
        for task in pool.tasks
    )
    enhanced = sha256("".join(prompts).encode()).hexdigest()[:32]
    anchor = "" if pool.anchor is None else content_digest(ground, pool.anchor)
    sizes = tuple(len(task.classes) for task in pool.tasks)
    return TableNames(images, prompts, enhanced, content_digest(backbone), anchor, sizes)


def take_over(known: ScoreRecords | None, names: TableNames, dim: int) -> ScoreRecords:
    """Records under these names, with what is known already."""
    images, tasks, rows = len(names.images), len(names.prompts), sum(names.sizes)
    unknown = [torch.full((images, width), torch.nan) for width in (rows, rows, tasks, dim, dim, dim)]
    records = ScoreRecords(names, *unknown)
    if known is None:
        return records
    place = find_places(known.names.images, names.images)
    here = (place >= 0).nonzero()[:, 0]
    there = place[here]
    column = find_places(known.names.prompts, names.prompts)
    kept = (column >= 0).nonzero()[:, 0]
    records.task_scores[here[:, None], kept] = known.task_scores[there[:, None], column[kept]]
    new_rows, old_rows = _rows_of(names.sizes, kept), _rows_of(known.names.sizes, column[kept])
    for name in BY_CLASS:
        getattr(records, name)[here[:, None], new_rows] = getattr(known, name)[there[:, None], old_rows]
    for name in BY_IMAGE:
        if getattr(known.names, name) == getattr(names, name):
            getattr(records, name)[here] = getattr(known, name)[there]
    return records


def _rows_of(sizes: tuple[int, ...], tasks: Int[Tensor, " some"]) -> Int[Tensor, " rows"]:
    """The rows of some tasks, in their order."""
    size = torch.tensor(sizes, dtype=torch.int64)
    first = size.cumsum(0) - size
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(sizes[t]) + first[t] for t in tasks.tolist())])
