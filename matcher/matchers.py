"""Which task's prompt fits an image: the matchers, functions of one signature in one dictionary.

| name      | query                       | keys             | queries computed (M tasks) |
|-----------|-----------------------------|------------------|----------------------------|
| sqsk      | plain ViT                   | one for a task   | 2                          |
| sqmk      | plain ViT                   | one for a class  | 2                          |
| mqsk      | Q_t for every task t        | one for a task   | M                          |
| mqmk      | Q_t for every task t        | one for a class  | M                          |
| mqmk-ei   | Q+, the mean of e-prompts   | one for a class  | 2                          |
| cascade   | Q+, then Q_t of a shortlist | one for a class  | 1 + shortlist              |
| anchor    | that of the anchor prompt   | a regression     | 1                          |
| fused     | that, then Q_t of a shortlist | all of these   | 1 + shortlist, or 1        |
| perfect   | the true task is given      | -                | 1                          |

S_t(x) is the sum of the K largest cosines between the query and the keys of task t only; the matched task has the
largest S_t. Each returns the matched task's own query Q_t, which the classifier reads. `anchor` and `fused` weigh all
classes themselves (`regression.py`, `fusion.py`): S_t is the probability of the task's best class. Descriptions and
requirements are in `matcher_info.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.errors import MatchError
from mqmk.matcher.fusion import ClassEvidence, Pairs, read_fusion
from mqmk.matcher.keys import max_by_task, plain_keys, trained_keys
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.queries import LiveQueries, Queries, rows_per_pass
from mqmk.matcher.regression import fit_regression

NO_RUNNER_UP: Final = -1  # the runner-up where there is only one task


@dataclass(frozen=True)
class MatchSettings:
    """What a caller may choose for one call."""

    top_keys: int = 1
    """K: how many of a task's largest cosines are summed."""
    keys_per_task: int | None = None
    """At most this many keys for a task, one for each group of classes; None takes the keys as they were trained."""
    shortlist: int = 3
    """Cascade: how many tasks get an exact query."""
    tokens_per_pass: int | None = None
    """Upper bound on rows x tokens of one forward pass, which bounds memory; None picks one for the device."""

    def __post_init__(self) -> None:
        for name in ("top_keys", "keys_per_task", "shortlist", "tokens_per_pass"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MatchError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Match:
    """The matched task of each image of a batch, and how clear the match was."""

    task: Int[Tensor, " batch"]
    score: Float[Tensor, " batch"]
    runner_up: Int[Tensor, " batch"]
    margin: Float[Tensor, " batch"]
    """Score minus the runner-up's; infinite where there is only one task."""
    scores: Float[Tensor, "batch tasks"]
    """S_t of every task that was scored; -inf for tasks the matcher left out."""
    query: Float[Tensor, "batch dim"]
    """Q_t of the matched task; the anchor query of a matcher that weighs all classes itself."""
    num_queries: Int[Tensor, " batch"]
    """How many queries were computed for the image, the matched task's included."""
    class_logits: Float[Tensor, "batch rows"] | None = None
    """Of every class, from a matcher that weighs them itself; None where a classifier reads the query."""


@dataclass(frozen=True)
class MatchInput:
    """What every matcher receives."""

    queries: Queries
    pool: PromptPool
    settings: MatchSettings
    true_task: Int[Tensor, " batch"] | None = None


Matcher = Callable[[MatchInput], Match]


def match_images(
    matcher: str,
    vit: FrozenViT,
    pool: PromptPool,
    images: Float[Tensor, "batch 3 height width"],
    settings: MatchSettings | None = None,
    true_task: Int[Tensor, " batch"] | None = None,
) -> Match:
    """Match a batch of any size with the named matcher, in passes of bounded memory."""
    settings = settings or MatchSettings()
    size = rows_per_pass(vit, settings.tokens_per_pass)
    parts = []
    for first in range(0, len(images), size):
        part = slice(first, first + size)
        queries = LiveQueries(vit, pool, images[part], size)
        known = None if true_task is None else true_task[part]
        parts.append(match_queries(matcher, MatchInput(queries, pool, settings, known)))
    return Match(*(_join([getattr(part, name) for part in parts]) for name in Match.__dataclass_fields__))


def _join(parts: list[Any]) -> Any:
    return None if parts[0] is None else torch.cat(parts)


def match_queries(matcher: str, inputs: MatchInput) -> Match:
    """Match with the named matcher, wherever the queries come from."""
    if matcher not in MATCHERS:
        raise MatchError(f"no matcher is called {matcher!r}; choose one of {', '.join(MATCHERS)}")
    if not inputs.pool.tasks:
        raise MatchError("the pool has learned no task yet; drop a task into the bucket first")
    return MATCHERS[matcher](inputs)


def _single_query(inputs: MatchInput, keys_per_task: int | None) -> Match:
    bank = plain_keys(inputs.pool, keys_per_task)
    return _with_task_query(inputs, bank.scores(inputs.queries.plain(), inputs.settings.top_keys))


def _multi_query(inputs: MatchInput, keys_per_task: int | None) -> Match:
    """A query for each task; only the best one is kept, so memory does not grow with M."""
    bank, scores, best = trained_keys(inputs.pool, keys_per_task), [], torch.zeros(())
    leader = torch.tensor(-torch.inf)
    for task, query in enumerate(inputs.queries.by_task()):
        scores.append(bank.score(query, task, inputs.settings.top_keys))
        leads = scores[-1] > leader.to(query.device)
        best = torch.where(leads[:, None], query, best.to(query.device))
        leader = torch.where(leads, scores[-1], leader.to(query.device))
    return to_match(torch.stack(scores, dim=1), best, len(scores))


def _enhanced_scores(inputs: MatchInput) -> Float[Tensor, "batch tasks"]:
    bank = trained_keys(inputs.pool, inputs.settings.keys_per_task)
    return bank.scores(inputs.queries.enhanced(), inputs.settings.top_keys)


def _cascade(inputs: MatchInput) -> Match:
    """Q+ draws up a shortlist for each image; exact queries decide within it, whatever M is."""
    settings, bank = inputs.settings, trained_keys(inputs.pool, inputs.settings.keys_per_task)
    cheap = _enhanced_scores(inputs)
    shortlisted = shortlist_tasks(cheap, settings.shortlist)
    size, task = shortlisted.shape[1], shortlisted.flatten()  # [batch, size] -> [batch * size]
    image = torch.arange(len(cheap), device=cheap.device).repeat_interleave(size)
    query = inputs.queries.task_queries(image, task)
    exact = torch.full_like(cheap, -torch.inf)
    for number in task.unique().tolist():
        here = task == number
        exact[image[here], number] = bank.score(query[here], number, settings.top_keys)
    matched = task == exact.argmax(dim=1)[image]
    return to_match(exact, query[matched], 1 + size)


def shortlist_tasks(cheap: Float[Tensor, "batch tasks"], size: int) -> Int[Tensor, "batch size"]:
    """The tasks that get an exact query, by the scores of Q+."""
    return cheap.topk(min(size, cheap.shape[1]), dim=1).indices


def _perfect(inputs: MatchInput) -> Match:
    if inputs.true_task is None:
        raise MatchError("`perfect` needs the true task of each image; it is for evaluation only")
    query = inputs.queries.task_queries(torch.arange(len(inputs.true_task)), inputs.true_task)
    bank = trained_keys(inputs.pool, inputs.settings.keys_per_task)
    scores = bank.scores(query, inputs.settings.top_keys)
    others = torch.arange(scores.shape[1], device=scores.device) != inputs.true_task.to(scores.device)[:, None]
    return to_match(scores.masked_fill(others, -torch.inf), query, 1)


def _with_task_query(inputs: MatchInput, scores: Float[Tensor, "batch tasks"]) -> Match:
    """A match by the scores of some other query; the matched task's own query is computed now."""
    query = inputs.queries.task_queries(torch.arange(len(scores)), scores.argmax(dim=1))
    return to_match(scores, query, 2)


def _anchor(inputs: MatchInput) -> Match:
    """One query and one regression decide between all classes."""
    query = inputs.queries.anchor()
    logits = read_fusion(inputs.pool).anchor * fit_regression(inputs.pool).values(query)
    return match_classes(inputs.pool, logits, query, torch.ones(len(query), dtype=torch.long))


def _fused(inputs: MatchInput) -> Match:
    """The regression draws up a shortlist for images that it is not certain of; exact queries are weighed with it."""
    pool, fusion, query = inputs.pool, read_fusion(inputs.pool), inputs.queries.anchor()
    values = fit_regression(pool).values(query)
    image = (~fusion.is_certain(values)).nonzero()[:, 0]
    pairs = Pairs.of_shortlist(pool, values, inputs.settings.shortlist, image)
    evidence = ClassEvidence.empty(values)
    if len(image):
        evidence.add(pool, pairs, inputs.queries.task_queries(pairs.image, pairs.task))
    num_queries = 1 + torch.bincount(pairs.image, minlength=len(values))
    return match_classes(pool, fusion.class_logits(values, evidence), query, num_queries)


def match_classes(
    pool: PromptPool,
    logits: Float[Tensor, "batch rows"],
    query: Float[Tensor, "batch dim"],
    num_queries: Int[Tensor, " batch"],
) -> Match:
    """A match by the logits of all classes: the task of the best class, so that label and task agree."""
    scores = max_by_task(logits.softmax(dim=1), pool.row_task, len(pool.tasks))
    found = to_match(scores, query, 0)
    return replace(found, num_queries=num_queries.to(scores.device), class_logits=logits)


def to_match(scores: Float[Tensor, "batch tasks"], query: Float[Tensor, "batch dim"], num_queries: int) -> Match:
    """The two best tasks of each image, with the matched task's query."""
    score, task = scores.max(dim=1)
    second, runner_up = scores.scatter(1, task[:, None], -torch.inf).max(dim=1)
    runner_up = runner_up.masked_fill(second.isinf(), NO_RUNNER_UP)
    return Match(task, score, runner_up, score - second, scores, query, torch.full_like(task, num_queries))


MATCHERS: Final[dict[str, Matcher]] = {
    "sqsk": lambda inputs: _single_query(inputs, keys_per_task=1),
    "sqmk": lambda inputs: _single_query(inputs, inputs.settings.keys_per_task),
    "mqsk": lambda inputs: _multi_query(inputs, keys_per_task=1),
    "mqmk": lambda inputs: _multi_query(inputs, inputs.settings.keys_per_task),
    "mqmk-ei": lambda inputs: _with_task_query(inputs, _enhanced_scores(inputs)),
    "cascade": _cascade,
    "anchor": _anchor,
    "fused": _fused,
    "perfect": _perfect,
}
