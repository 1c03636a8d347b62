"""Which task's prompt fits an image: the matchers, functions of one signature in one dictionary.

| name      | query                       | keys             | queries computed (M tasks)        |
|-----------|-----------------------------|------------------|-----------------------------------|
| sqsk      | plain ViT                   | one for a task   | 2                                 |
| sqmk      | plain ViT                   | one for a class  | 2                                 |
| mqsk      | Q_t for every task t        | one for a task   | M                                 |
| mqmk      | Q_t for every task t        | one for a class  | M                                 |
| mqmk-ei   | Q+, the mean of e-prompts   | one for a class  | 2                                 |
| cascade   | Q+, then Q_t of a shortlist | one for a class  | 1 + shortlist, 2 on early accept  |
| perfect   | the true task is given      | -                | 1                                 |

S_t(x) is the sum of the K largest cosines between the query and the keys of task t only; the matched task has the
largest S_t. Every matcher hands on the matched task's own query Q_t, from which the classifier answers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.errors import MatchError
from mqmk.matcher.keys import KeyBank, plain_keys, trained_keys
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT, Prompt, Stem

NOBODY: Final = -1  # the runner-up where there is only one task
_TOKENS_PER_PASS = {"cpu": 1024, "cuda": 65536}  # larger passes leave a CPU's caches; docs/benchmarks.md


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

    task: Int[Tensor, "batch"]
    score: Float[Tensor, "batch"]
    runner_up: Int[Tensor, "batch"]
    margin: Float[Tensor, "batch"]
    """Score minus the runner-up's; infinite where there is only one task."""
    scores: Float[Tensor, "batch tasks"]
    """S_t of every task that was scored; -inf for tasks the matcher left out."""
    query: Float[Tensor, "batch dim"]
    """Q_t of the matched task."""
    queries: Int[Tensor, "batch"]
    """How many queries were computed for the image, the matched task's included."""


@dataclass(frozen=True)
class Scene:
    """What every matcher is given: the frozen ViT, the pool, a batch of images, the settings."""

    vit: FrozenViT
    pool: PromptPool
    images: Float[Tensor, "batch 3 height width"]
    settings: MatchSettings
    true_task: Int[Tensor, "batch"] | None = None

    def stem(self) -> Stem:
        """The part of the pass that all tasks share."""
        return self.vit.stem(self.images, self.pool.g, self.pool.e_layers[0])

    def query(self, stem: Stem, e_prompt: Prompt) -> Float[Tensor, "batch dim"]:
        """The query with the g-prompt and this e-prompt."""
        return self.vit.query(stem, self.pool.g, e_prompt)

    def bank(self, keys_per_task: int | None) -> KeyBank:
        """The keys of all tasks."""
        return self.pool.remember(("keys", keys_per_task), lambda: trained_keys(self.pool, keys_per_task))

    @property
    def rows_per_pass(self) -> int:
        """How many (image, task) pairs fit into one forward pass."""
        tokens = self.settings.tokens_per_pass or _TOKENS_PER_PASS.get(self.vit.device.type, 1024)
        return max(1, tokens // self.vit.tokens)


Matcher = Callable[[Scene], Match]


def match(matcher: str, scene: Scene) -> Match:
    """Match a batch of any size by the named matcher, in passes of bounded memory."""
    if matcher not in MATCHERS:
        raise MatchError(f"no matcher is called {matcher!r}; choose one of {', '.join(MATCHERS)}")
    if not scene.pool.tasks:
        raise MatchError("the pool has learned no task yet; drop a task into the bucket first")
    parts = [MATCHERS[matcher](part) for part in _passes(scene)]
    fields = (torch.cat([getattr(part, name) for part in parts]) for name in Match.__dataclass_fields__)
    return Match(*fields)


def _passes(scene: Scene) -> Iterator[Scene]:
    size = scene.rows_per_pass
    for start in range(0, max(1, len(scene.images)), size):
        part = slice(start, start + size)
        true_task = None if scene.true_task is None else scene.true_task[part]
        yield Scene(scene.vit, scene.pool, scene.images[part], scene.settings, true_task)


def _single_query(scene: Scene, keys_per_task: int | None) -> Match:
    bank = scene.pool.remember(("plain", keys_per_task), lambda: plain_keys(scene.pool, keys_per_task))
    scores = bank.scores(scene.vit.plain(scene.images), scene.settings.top_keys)
    return _answered(scene, scene.stem(), scores)


def _exact(scene: Scene, keys_per_task: int | None) -> Match:
    """A query for each task; only the best one is kept, so memory does not grow with M."""
    stem, pool, bank = scene.stem(), scene.pool, scene.bank(keys_per_task)
    batch, tasks = len(stem), len(pool.tasks)
    scores = torch.full((batch, tasks), -torch.inf, device=scene.vit.device)
    best = torch.zeros(batch, scene.vit.dim, device=scene.vit.device)
    for numbers in torch.arange(tasks).split(max(1, scene.rows_per_pass // batch)):
        for number, query in zip(numbers.tolist(), _queries(scene, stem, numbers), strict=True):
            score = bank.score(query, number, scene.settings.top_keys)
            best = torch.where((score > scores.amax(dim=1))[:, None], query, best)
            scores[:, number] = score
    return _decided(scores, best, torch.tensor(tasks))


def _queries(scene: Scene, stem: Stem, tasks: Int[Tensor, "tasks"]) -> Float[Tensor, "tasks batch dim"]:
    """Q_t of every image for some tasks in one pass; with a single task nothing is copied."""
    if len(tasks) == 1:
        return scene.query(stem, scene.pool.e(int(tasks))).unsqueeze(0)
    image = torch.arange(len(stem)).repeat(len(tasks))
    prompt = scene.pool.e_rows(tasks.repeat_interleave(len(stem)))
    return scene.query(stem.rows(image), prompt).unflatten(0, (len(tasks), len(stem)))


def _enhanced(scene: Scene) -> Match:
    stem = scene.stem()
    return _answered(scene, stem, _enhanced_scores(scene, stem))


def _enhanced_scores(scene: Scene, stem: Stem) -> Float[Tensor, "batch tasks"]:
    plus = scene.query(stem, scene.pool.mean_e)
    return scene.bank(scene.settings.keys_per_task).scores(plus, scene.settings.top_keys)


def _cascade(scene: Scene) -> Match:
    """Q+ draws up a shortlist for each image; exact queries decide among it, whatever M is."""
    stem, settings = scene.stem(), scene.settings
    cheap = _enhanced_scores(scene, stem)
    size = min(settings.shortlist, len(scene.pool.tasks))
    shortlist = cheap.topk(size, dim=1).indices
    lead = _winners(cheap)[3]
    accepted = lead >= (torch.inf if settings.accept_margin is None else settings.accept_margin)
    wanted = (torch.arange(size, device=cheap.device) == 0) | ~accepted[:, None]
    image, place = wanted.nonzero(as_tuple=True)
    queries = torch.zeros(*wanted.shape, scene.vit.dim, device=cheap.device)
    for rows in torch.arange(len(image)).split(scene.rows_per_pass):
        prompt = scene.pool.e_rows(shortlist[image[rows], place[rows]])
        queries[image[rows], place[rows]] = scene.query(stem.rows(image[rows]), prompt)
    scores = torch.full_like(cheap, -torch.inf)
    for number in shortlist.unique().tolist():
        asked, at = ((shortlist == number) & wanted).nonzero(as_tuple=True)
        bank = scene.bank(settings.keys_per_task)
        scores[asked, number] = bank.score(queries[asked, at], number, settings.top_keys)
    scores = torch.where(accepted[:, None], cheap, scores)  # the evidence that decided
    chosen = (shortlist == scores.argmax(dim=1, keepdim=True)).int().argmax(dim=1)
    query = queries[torch.arange(len(stem)), chosen]
    return _decided(scores, query, torch.where(accepted, 2, 1 + size))


def _perfect(scene: Scene) -> Match:
    if scene.true_task is None:
        raise MatchError("`perfect` is given the true task of each image; it is for evaluation only")
    query = scene.query(scene.stem(), scene.pool.e_rows(scene.true_task))
    every = scene.bank(scene.settings.keys_per_task).scores(query, scene.settings.top_keys)
    others = torch.arange(every.shape[1], device=every.device) != scene.true_task[:, None]
    return _decided(every.masked_fill(others, -torch.inf), query, torch.tensor(1))


def _answered(scene: Scene, stem: Stem, scores: Float[Tensor, "batch tasks"]) -> Match:
    """Matched by the scores of some other query; the matched task's own query is computed now."""
    query = scene.query(stem, scene.pool.e_rows(scores.argmax(dim=1)))
    return _decided(scores, query, torch.tensor(2))


def _decided(
    scores: Float[Tensor, "batch tasks"], query: Float[Tensor, "batch dim"], queries: Int[Tensor, "*batch"]
) -> Match:
    task, score, runner_up, margin = _winners(scores)
    return Match(task, score, runner_up, margin, scores, query, queries.to(task.device).expand(len(task)))


def _winners(
    scores: Float[Tensor, "batch tasks"],
) -> tuple[Int[Tensor, "batch"], Float[Tensor, "batch"], Int[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Matched task, its score, the runner-up, and the margin between them."""
    score, task = scores.max(dim=1)
    second, runner_up = scores.scatter(1, task[:, None], -torch.inf).max(dim=1)
    return task, score, runner_up.masked_fill(second.isinf(), NOBODY), score - second


MATCHERS: Final[dict[str, Matcher]] = {
    "sqsk": lambda scene: _single_query(scene, keys_per_task=1),
    "sqmk": lambda scene: _single_query(scene, scene.settings.keys_per_task),
    "mqsk": lambda scene: _exact(scene, keys_per_task=1),
    "mqmk": lambda scene: _exact(scene, scene.settings.keys_per_task),
    "mqmk-ei": _enhanced,
    "cascade": _cascade,
    "perfect": _perfect,
}
