"""Records of scores give what the service answers, and a build computes no pair twice and no more than it may."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import frozen, random_pool, random_task, random_timm_vit
from support.noise import Noise, count_queries

from mqmk.learner.evaluation.sample import Sample, TaskImages, choose_sample
from mqmk.learner.evaluation.sample_answers import MatchedSample
from mqmk.learner.evaluation.sample_evaluation import SampleEvaluation, matching_card
from mqmk.learner.evaluation.sample_matches import RowBudget, SampleMatches, match_sample
from mqmk.learner.evaluation.score_records import ScoreRecords, name_records
from mqmk.matcher.images import normalise
from mqmk.matcher.matcher_info import SERVABLE_MATCHERS
from mqmk.matcher.matchers import MatchSettings, match_images
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.predictor import PredictSettings, predict
from mqmk.matcher.prompted_vit import FrozenViT

MATCHERS = (*SERVABLE_MATCHERS, "perfect")
PLENTY = RowBudget(100_000, 100_000, 100_000)


@pytest.fixture
def vit() -> FrozenViT:
    return frozen(random_timm_vit())


def answer(pool: PromptPool, sample: Sample, records: ScoreRecords, found: SampleMatches) -> SampleEvaluation:
    """With everything fitted on the whole sample."""
    matched = MatchedSample(pool, sample, records, found)
    return matched.answer(matched.fit(torch.ones(len(sample), dtype=torch.bool)))


def test_q_plus_and_exact_rows_are_computed_for_the_first_images_only(vit: FrozenViT) -> None:
    pool = random_pool((2,) * 12, vit=vit)
    noise = Noise(pool, 7)
    sample = choose_sample(noise.tasks, 160)
    budget = RowBudget(100_000, 100_000, 64)
    evaluation = answer(pool, sample, *match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, None, budget))
    assert len(sample) == 160
    for name in ("mqmk", "mqsk", "mqmk-ei", "cascade"):
        assert len(evaluation.matches[name].image) == 64 and evaluation.tally(name).is_estimate, name
    for name in ("sqmk", "anchor", "fused", "perfect"):
        assert len(evaluation.matches[name].image) == 160 and not evaluation.tally(name).is_estimate, name


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans(), st.integers(0, 1000))
def test_records_give_what_the_service_answers(classes: list[int], keys_of_groups: bool, seed: int) -> None:
    torch.manual_seed(seed)
    vit = frozen(random_timm_vit())
    pool = random_pool(tuple(classes), vit=vit)
    if keys_of_groups:
        pool = pool.with_task(random_task("grouped", 5, keys=2))
    noise = Noise(pool, 2)
    sample = choose_sample(noise.tasks, 20)
    read = noise.reader(sample)
    matched = MatchedSample(pool, sample, *match_sample(vit, pool, sample, read, MATCHERS, budget=PLENTY))
    fitted = matched.fit(torch.ones(len(sample), dtype=torch.bool))
    found, pool = matched.answer(fitted).matches, pool.with_matching(fitted)
    assert {*found} == {*MATCHERS}
    images = normalise(read(torch.arange(len(sample))), vit.info)
    starts = torch.tensor([0, *(len(task.classes) for task in pool.tasks)]).cumsum(0)
    for name, match in found.items():
        served = match_images(name, vit, pool, images, true_task=sample.task)
        assert torch.equal(match.image, torch.arange(len(sample)))
        assert torch.equal(match.task, served.task) and torch.equal(match.num_queries, served.num_queries)
        torch.testing.assert_close(match.score, served.score, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(match.margin, served.margin, atol=1e-5, rtol=1e-5)
        best = predict(vit, pool, images, PredictSettings(matcher=name), sample.task).probabilities.max(dim=1)
        assert torch.equal(starts[match.task] + match.answer, best.indices)
        torch.testing.assert_close(match.probability, best.values, atol=1e-5, rtol=1e-5)
        best = served.scores.topk(min(3, len(pool.tasks)), dim=1)
        assert torch.equal(match.best, best.indices.where(best.values.isfinite(), -1))


def test_the_next_version_computes_the_new_prompt_new_images_and_q_plus(vit: FrozenViT) -> None:
    pool = random_pool((2, 3), vit=vit)
    noise = Noise(pool, 4)
    sample = choose_sample(noise.tasks)
    records, _ = match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, budget=PLENTY)
    pool = pool.with_task(random_task("new", 2))
    noise.add(2, 4)
    sample = choose_sample(noise.tasks)
    rows = count_queries(vit)
    grown, found = match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, records, PLENTY)
    old, new = 20, 8
    assert sum(rows) == (old + new) + old + new * 3 + 2 * new, "Q+, the new prompt, new images, plain and anchor"
    rows.clear()
    _, same = match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, grown, PLENTY)
    assert not rows
    for name in found:
        assert torch.equal(same[name].score, found[name].score) and torch.equal(same[name].task, found[name].task)


def test_the_names_of_records_depend_on_everything_that_a_score_depends_on(vit: FrozenViT) -> None:
    pool = random_pool((2, 3), vit=vit)
    first, second = pool.tasks
    names = name_records(pool, ("a",))
    for field in ("e_prompt", "keys", "head", "means"):
        changed = replace(pool, tasks=(replace(first, **{field: getattr(first, field) + 1}), second))
        assert name_records(changed, ("a",)).prompts[0] != names.prompts[0], field
        assert name_records(changed, ("a",)).prompts[1] == names.prompts[1], field
    assert name_records(replace(pool, g_prompt=pool.g_prompt + 1), ("a",)).prompts[1] != names.prompts[1]
    assert name_records(pool.without_task("task1"), ("a",)).enhanced != names.enhanced
    reached = replace(pool, tasks=(replace(first, metrics={"accuracy": 0.1}), second))
    assert name_records(reached, ("a",)) == names, "not what is only said about a task"


def test_rows_are_completed_within_the_budget_and_later_builds_go_on(vit: FrozenViT) -> None:
    pool = random_pool((1,) * 10, vit=vit)
    noise = Noise(pool, 2)
    sample = choose_sample(noise.tasks)
    records, measured = None, []
    for _ in range(4):
        rows = count_queries(vit)
        records, found = match_sample(vit, pool, sample, noise.reader(sample), ("mqmk", "mqsk"), records,
                                      RowBudget(50, 100, 100))  # fmt: skip
        assert sum(rows) <= 50
        assert torch.equal(found["mqmk"].image, found["mqsk"].image)
        measured.append(len(found["mqmk"].image))
    assert measured == [5, 10, 10, 10], "50 queries a build, and no more than 100 pairs in all"
    evaluation = answer(pool, sample, records, found)
    assert evaluation.tally("mqmk").images == 10 and evaluation.tally("mqmk").is_estimate


def test_a_row_longer_than_the_budget_is_completed_one_at_a_time(vit: FrozenViT) -> None:
    pool = random_pool((1,) * 10, vit=vit)
    noise = Noise(pool, 1)
    sample = choose_sample(noise.tasks, 3)
    _, found = match_sample(vit, pool, sample, noise.reader(sample), ("mqmk",), None, RowBudget(4, 4, 100))
    assert len(found["mqmk"].image) == 1


def test_agreement_is_measured_on_the_images_that_were_matched_exactly(vit: FrozenViT) -> None:
    pool = random_pool((1,) * 8, vit=vit)
    noise = Noise(pool, 3)
    sample = choose_sample(noise.tasks)
    records, found = match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, None, RowBudget(48, 100, 100))
    evaluation = answer(pool, sample, records, found)
    exact, cheap = found["mqmk"], found["mqmk-ei"]
    assert 6 <= len(exact.image) < len(cheap.image) == 24
    same = (cheap.task[exact.image] == exact.task).float().mean().item()
    tally = evaluation.tally("mqmk-ei")
    assert tally.agreement == pytest.approx(same) and tally.images == 24 and not tally.is_estimate
    assert evaluation.tally("mqmk").agreement == 1.0
    none = torch.ones(24, dtype=torch.bool)
    none[exact.image] = False
    assert evaluation.tally("mqmk", none) == evaluation.tally("mqmk"), "on its own images where none of these are"


def test_the_figures_of_a_tally_agree_with_each_other(vit: FrozenViT) -> None:
    pool = random_pool((3, 1, 4), vit=vit)
    noise = Noise(pool, 5)
    sample = choose_sample(noise.tasks)
    evaluation = answer(pool, sample, *match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, None, PLENTY))
    tally = evaluation.tally("cascade")
    assert sum(tally.confusion.values()) == tally.images == 40
    assert tally.matching_rate == pytest.approx(sum(tally.confusion[n, n] for n in range(3)) / 40)
    assert [tally.tasks[n].images for n in range(3)] == [15, 5, 20]
    assert tally.accuracy == pytest.approx(sum(share.accuracy * share.images for share in tally.tasks.values()) / 40)
    assert tally.recall_at_3 == 1.0, "there are only three tasks"
    assert tally.accuracy <= tally.matching_rate and evaluation.tally("perfect").matching_rate == 1.0
    assert tally.num_queries == 1 + MatchSettings().shortlist


def test_a_label_that_two_tasks_know_counts_whichever_gives_it(vit: FrozenViT) -> None:
    pool = random_pool((2, 3), vit=vit)
    pool = pool.with_task(replace(random_task("again", 2), classes=pool.tasks[0].classes))
    noise = Noise(pool, 10)
    sample = choose_sample(noise.tasks)
    evaluation = answer(pool, sample, *match_sample(vit, pool, sample, noise.reader(sample), ("mqmk",), None, PLENTY))
    match = evaluation.matches["mqmk"]
    right = torch.where(sample.task == 1, match.task == 1, match.task != 1)
    assert (right != (match.task == sample.task)).any(), "the two tasks of the same classes are mistaken for each other"
    assert torch.equal(evaluation.is_matched(match), right)
    assert torch.equal(evaluation.is_correct(match), right & (match.answer == sample.label))


def test_nothing_is_matched_without_images_or_tasks(vit: FrozenViT) -> None:
    for pool in (random_pool((), vit=vit), random_pool((2,), vit=vit)):
        sample = choose_sample([TaskImages.empty() for _ in pool.tasks], 10)
        records, found = match_sample(vit, pool, sample, lambda _: torch.zeros(0), MATCHERS, None, PLENTY)
        assert not found and records.task_scores.shape == (0, len(pool.tasks))


def test_the_card_of_a_pool_holds_rate_agreement_and_cost_of_each_matcher_and_of_how_many_images(
    vit: FrozenViT,
) -> None:
    pool = random_pool((2,) * 6, vit=vit)
    noise = Noise(pool, 2)
    sample = choose_sample(noise.tasks)
    budget = RowBudget(30, 60, 100)
    evaluation = answer(pool, sample, *match_sample(vit, pool, sample, noise.reader(sample), MATCHERS, None, budget))
    card = matching_card(24, {name: evaluation.tally(name) for name in ("mqmk", "mqmk-ei", "cascade")})
    assert card["held_out"] == 24
    rows = card["matchers"]
    assert (rows["mqmk"]["cost"], rows["mqmk-ei"]["cost"]) == (6, 2)
    assert rows["mqmk"]["agreement"] == 1.0
    assert rows["mqmk"]["images"] < 24 and rows["mqmk"]["sampled"] is True
    assert rows["cascade"]["images"] == 24 and rows["cascade"]["sampled"] is False
    assert pool.with_matching(card).matching == card
