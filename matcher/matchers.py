"""Which task's prompt fits an image: the matchers, functions of one signature in one dictionary.

| name      | query                       | keys             | queries computed (M tasks)        |
|-----------|-----------------------------|------------------|-----------------------------------|
| sqsk      | plain ViT                   | one for a task   | 2                                 |
| sqmk      | plain ViT                   | one for a class  | 2                                 |
| mqsk      | Q_t for every task t        | one for a task   | M                                 |
| mqmk      | Q_t for every task t        | one for a class  | M                                 |
| mqmk-ei   | Q+, the mean of e-prompts   | one for a class  | 2                                 |
| cascade   | Q+, then Q_t of a shortlist | one for a class  | 1 + shortlist, 2 on early accept  |
| ridge     | plain ViT                   | a regression     | 2                                 |
| perfect   | the true task is given      | -                | 1                                 |

S_t(x) is the sum of the K largest cosines between the query and the keys of task t only; the matched task has the
largest S_t. For `ridge` it is the value of the task's best class in a regression over all classes (`ridge.py`). Every
matcher hands on the matched task's own query Q_t, from which the classifier answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.errors import MatchError
from mqmk.matcher.keys import KeyBank, plain_keys, trained_keys
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.queries import LiveQueries, Queries, rows_per_pass
from mqmk.matcher.ridge import RidgeBank, solved

NOBODY: Final = -1  # the runner-up where there is only one task


@dataclass(frozen=True)
class MatchSettings:
    """What a caller may choose for one call."""

    top_keys: int = 1
    """K: how many of a task's largest cosines are summed."""
    keys_per_task: int | None = None
    """Average the class keys of a task into this many; None takes the keys as they were trained."""
    shortlist: int = 3
    """Cascade: how many tasks get an exact query."""
    accept_margin: float | None = None
    """Cascade: accept Q+'s choice at once when it leads by this much; None always computes the shortlist."""
    tokens_per_pass: int | None = None
    """Upper bound on rows x tokens of one forward pass, which bounds memory; None suits the device."""

    def __post_init__(self) -> None:
        for name in ("top_keys", "keys_per_task", "shortlist", "tokens_per_pass"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MatchError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Match:
    """The matched task of each image of a batch, and how clear it was."""

    task: Int[Tensor, " batch"]
    score: Float[Tensor, " batch"]
    runner_up: Int[Tensor, " batch"]
    margin: Float[Tensor, " batch"]
    """Score minus the runner-up's; infinite where there is only one task."""
    scores: Float[Tensor, "batch tasks"]
    """S_t of every task that was scored; -inf for tasks the matcher left out."""
    query: Float[Tensor, "batch dim"]
    """Q_t of the matched task."""
    queries: Int[Tensor, " batch"]
    """How many queries were computed for the image, the matched task's included."""


@dataclass(frozen=True)
class Scene:
    """What every matcher is given."""

    queries: Queries
    pool: PromptPool
    settings: MatchSettings
    true_task: Int[Tensor, " batch"] | None = None

    def keys(self, keys_per_task: int | None) -> KeyBank:
        """The keys of all tasks."""
        return self.pool.remember(("keys", keys_per_task), lambda: trained_keys(self.pool, keys_per_task))

    def plain_keys(self, keys_per_task: int | None) -> KeyBank:
        """Keys for queries without prompts."""
        return self.pool.remember(("plain keys", keys_per_task), lambda: plain_keys(self.pool, keys_per_task))

    def regression(self) -> RidgeBank:
        """The regression over all classes, for queries without prompts."""
        return self.pool.remember("regression", lambda: solved(self.pool))


Matcher = Callable[[Scene], Match]


def match(
    matcher: str,
    vit: FrozenViT,
    pool: PromptPool,
    images: Float[Tensor, "batch 3 height width"],
    settings: MatchSettings | None = None,
    true_task: Int[Tensor, " batch"] | None = None,
) -> Match:
    """Match a batch of any size by the named matcher, in passes of bounded memory."""
    settings = settings or MatchSettings()
    size = rows_per_pass(vit, settings.tokens_per_pass)
    parts = []
    for first in range(0, len(images), size):
        part = slice(first, first + size)
        queries = LiveQueries(vit, pool, images[part], size)
        parts.append(decide(matcher, Scene(queries, pool, settings, None if true_task is None else true_task[part])))
    return Match(*(torch.cat([getattr(part, name) for part in parts]) for name in Match.__dataclass_fields__))


def decide(matcher: str, scene: Scene) -> Match:
    """Match by the named matcher, wherever the queries come from."""
    if matcher not in MATCHERS:
        raise MatchError(f"no matcher is called {matcher!r}; choose one of {', '.join(MATCHERS)}")
    if not scene.pool.tasks:
        raise MatchError("the pool has learned no task yet; drop a task into the bucket first")
    return MATCHERS[matcher](scene)


def _single_query(scene: Scene, keys_per_task: int | None) -> Match:
    scores = scene.plain_keys(keys_per_task).scores(scene.queries.plain(), scene.settings.top_keys)
    return _answered(scene, scores)


def _exact(scene: Scene, keys_per_task: int | None) -> Match:
    """A query for each task; only the best one is kept, so memory does not grow with M."""
    bank, scores, best = scene.keys(keys_per_task), [], torch.zeros(())
    leader = torch.tensor(-torch.inf)
    for task, query in enumerate(scene.queries.by_task()):
        scores.append(bank.score(query, task, scene.settings.top_keys))
        leads = scores[-1] > leader.to(query.device)
        best = torch.where(leads[:, None], query, best.to(query.device))
        leader = torch.where(leads, scores[-1], leader.to(query.device))
    return _decided(torch.stack(scores, dim=1), best, torch.tensor(len(scores)))


def _enhanced_scores(scene: Scene) -> Float[Tensor, "batch tasks"]:
    return scene.keys(scene.settings.keys_per_task).scores(scene.queries.plus(), scene.settings.top_keys)


def _cascade(scene: Scene) -> Match:
    """Q+ draws up a shortlist for each image; exact queries decide among it, whatever M is."""
    settings, bank = scene.settings, scene.keys(scene.settings.keys_per_task)
    cheap = _enhanced_scores(scene)
    size = min(settings.shortlist, cheap.shape[1])
    shortlist = cheap.topk(size, dim=1).indices
    lead = _winners(cheap)[3]
    accepted = lead >= (torch.inf if settings.accept_margin is None else settings.accept_margin)
    wanted = (torch.arange(size, device=cheap.device) == 0) | ~accepted[:, None]
    image, place = wanted.nonzero(as_tuple=True)
    task = shortlist[image, place]
    query = scene.queries.own(image, task)
    exact = torch.full_like(cheap, -torch.inf)
    for number in task.unique().tolist():
        here = task == number
        exact[image[here], number] = bank.score(query[here], number, settings.top_keys)
    scores = torch.where(accepted[:, None], cheap, exact)  # the evidence that decided
    chosen = task == scores.argmax(dim=1)[image]
    return _decided(scores, query[chosen], torch.where(accepted, 2, 1 + size))


def _perfect(scene: Scene) -> Match:
    if scene.true_task is None:
        raise MatchError("`perfect` is given the true task of each image; it is for evaluation only")
    query = scene.queries.own(torch.arange(len(scene.true_task)), scene.true_task)
    every = scene.keys(scene.settings.keys_per_task).scores(query, scene.settings.top_keys)
    others = torch.arange(every.shape[1], device=every.device) != scene.true_task.to(every.device)[:, None]
    return _decided(every.masked_fill(others, -torch.inf), query, torch.tensor(1))


def _answered(scene: Scene, scores: Float[Tensor, "batch tasks"]) -> Match:
    """Matched by the scores of some other query; the matched task's own query is asked for now."""
    query = scene.queries.own(torch.arange(len(scores)), scores.argmax(dim=1))
    return _decided(scores, query, torch.tensor(2))


def _decided(
    scores: Float[Tensor, "batch tasks"], query: Float[Tensor, "batch dim"], queries: Int[Tensor, "*batch"]
) -> Match:
    task, score, runner_up, margin = _winners(scores)
    return Match(task, score, runner_up, margin, scores, query, queries.to(task.device).expand(len(task)))


def _winners(
    scores: Float[Tensor, "batch tasks"],
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"], Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Matched task, its score, the runner-up, and the margin between them."""
    score, task = scores.max(dim=1)
    second, runner_up = scores.scatter(1, task[:, None], -torch.inf).max(dim=1)
    return task, score, runner_up.masked_fill(second.isinf(), NOBODY), score - second


MATCHERS: Final[dict[str, Matcher]] = {
    "sqsk": lambda scene: _single_query(scene, keys_per_task=1),
    "sqmk": lambda scene: _single_query(scene, scene.settings.keys_per_task),
    "mqsk": lambda scene: _exact(scene, keys_per_task=1),
    "mqmk": lambda scene: _exact(scene, scene.settings.keys_per_task),
    "mqmk-ei": lambda scene: _answered(scene, _enhanced_scores(scene)),
    "cascade": _cascade,
    "ridge": lambda scene: _answered(scene, scene.regression().scores(scene.queries.plain())),
    "perfect": _perfect,
}
