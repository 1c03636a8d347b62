"""Prompt methods of the literature: shapes, selection, losses and what is kept, by hand on small tensors."""

import dataclasses
import itertools
import math

import pytest
import torch
from support.builders import random_images
from support.method_tasks import QUICK, learned
from torch.nn import functional as F

from mqmk.learner.bench.methods.coda import CODA, Components, join_components
from mqmk.learner.bench.methods.cprompt import CPrompt, flatten_old_heads
from mqmk.learner.bench.methods.dualprompt import DualPrompt
from mqmk.learner.bench.methods.esn import ESN, TEMPERATURES, TaskClassifier, anchor_loss, energies, vote
from mqmk.learner.bench.methods.evoprompt import Attribution, EvoPrompt, Memory, assign, fuse, mix_head_rows
from mqmk.learner.bench.methods.hide import HiDe, spread_loss
from mqmk.learner.bench.methods.l2p import L2P
from mqmk.learner.bench.methods.l2p_plus import L2PPlus, pull_loss
from mqmk.learner.bench.methods.parts.forward import final_norm, run_blocks
from mqmk.learner.bench.methods.parts.prompts import choose

# L2P


def test_l2p_reads_the_mean_of_its_chosen_prompts_own_tokens(vit):
    method, images = L2P(vit, QUICK, prompts=4, length=2, chosen=2), random_images(3)
    choice = choose(vit.plain(images), method.keys, 2)
    for number, image in enumerate(images):
        inserted = torch.cat([method.prompts[index] for index in choice.index[number].tolist()])
        hidden = run_blocks(vit, image[None], {0: inserted[None]})
        by_hand = final_norm(vit, hidden[0, -4:]).mean(dim=0)
        torch.testing.assert_close(method.feature(images, choice)[number], by_hand, atol=1e-5, rtol=1e-5)


def test_with_all_prompts_chosen_every_image_gets_the_same(vit):
    method, images = L2P(vit, QUICK, prompts=3, length=2, chosen=3), random_images(2)
    choice = choose(vit.plain(images), method.keys, 3)
    shared = run_blocks(vit, images, {0: method.prompts.flatten(0, 1)[None]})
    expected = final_norm(vit, shared[:, -6:]).mean(dim=1)
    torch.testing.assert_close(method.feature(images, choice), expected, atol=1e-4, rtol=1e-4)


def test_l2p_counts_a_choice_for_every_image_and_epoch(vit, tasks):
    kept = learned(L2P(vit, QUICK), tasks[:2]).kept()
    assert kept["task0/usage"].sum() == 12 * 5
    assert kept["task1/usage"].sum() == 4 * 5
    assert kept["prompts"].shape == (10, 5, vit.dim) and kept["task1/head"].shape == (1, vit.dim)


# L2P++


def test_deep_l2p_plus_in_block_0_alone_is_l2p_plus(vit, tasks):
    one, other = (learned(L2PPlus(vit, QUICK, last_layer=0), tasks[:1]) for _ in range(2))
    deep = L2PPlus(vit, QUICK, last_layer=4)
    assert one.layers == (0,) and deep.layers == (0, 1, 2, 3)  # as many as the backbone has
    assert torch.equal(one.prompts, other.prompts)
    assert deep.prompts.shape == (4, 30, 10, vit.dim)


def test_the_pull_loss_of_a_batch_is_the_mean_of_its_images_alone(vit):
    method, query = L2PPlus(vit, QUICK, last_layer=1), torch.randn(4, 32)
    alone = [pull_loss(method.choose(each[None])) for each in query]
    torch.testing.assert_close(pull_loss(method.choose(query)), torch.stack(alone).mean())


def test_of_a_chosen_prompt_the_first_rows_are_keys_and_the_others_values(vit, monkeypatch):
    method, images = L2PPlus(vit, QUICK, prompts=2, rows=4, chosen=2), random_images(1)
    given = []
    monkeypatch.setattr(vit, "query", lambda _, prompt: given.append(prompt) or torch.zeros(1, 32))
    choice = choose(torch.randn(1, 32), method.keys[0], 2)
    method.feature(images, [choice])
    rows = given[0].at(0)[0]  # [2, length, dim]
    first, second = choice.index[0].tolist()
    torch.testing.assert_close(rows[0], torch.cat([method.prompts[0, first, :2], method.prompts[0, second, :2]]))
    torch.testing.assert_close(rows[1], torch.cat([method.prompts[0, first, 2:], method.prompts[0, second, 2:]]))


# DualPrompt


def test_dualprompt_matches_by_the_mean_of_normalised_plain_queries(vit, tasks):
    method, images = learned(DualPrompt(vit, QUICK), tasks), random_images(5)
    kept = method.kept()
    query = F.normalize(vit.plain(images), dim=1)
    cosines = torch.stack([F.cosine_similarity(query, kept[f"task{t}/key"][None]) for t in range(3)], dim=1)
    answer = method.predict(images)
    assert answer.matched_task.tolist() == cosines.argmax(dim=1).tolist()
    torch.testing.assert_close(method.predict_as(images, answer.matched_task).scores, answer.scores)
    assert not torch.allclose(method.predict_as(images, 2 - answer.matched_task).scores, answer.scores)


def test_a_new_e_prompt_starts_as_the_previous_one_and_the_g_prompt_goes_on(vit, tasks):
    method = DualPrompt(vit, dataclasses.replace(QUICK, rate=1e-9))
    method.learn(tasks[0])
    before = {name: value.clone() for name, value in method.kept().items()}
    method.learn(tasks[1])
    torch.testing.assert_close(method.e_prompts[1], method.e_prompts[0], atol=1e-6, rtol=0)
    trained = learned(DualPrompt(vit, QUICK), tasks[:1])
    g_prompt = trained.kept()["g_prompt"].clone()
    trained.learn(tasks[2])
    assert not torch.equal(trained.kept()["g_prompt"], g_prompt)
    assert before["task0/e_prompt"].shape == (2, 2, 5, vit.dim)  # blocks 2 and 3: the backbone has no fifth


# CODA


def test_coda_weights_are_cosines_of_attended_queries_and_may_be_negative():
    parts = Components(torch.randn(2, 3, 8, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    query = torch.randn(5, 4)
    weights = parts.weights(query)
    for layer, image, component in itertools.product(range(2), range(5), range(3)):
        attended = query[image] * parts.attention[layer, component]
        expected = F.cosine_similarity(attended, parts.keys[layer, component], dim=0)
        torch.testing.assert_close(weights[layer, image, component], expected)
    assert weights.min() < 0
    summed = parts.prefix(torch.ones(2, 1, 3))[0]
    torch.testing.assert_close(summed[:, 0], parts.prompts[:, :, :4].sum(dim=1))
    torch.testing.assert_close(summed[:, 1], parts.prompts[:, :, 4:].sum(dim=1))


def test_new_components_are_unit_and_orthogonal_to_all_earlier_ones(vit, tasks):
    method = learned(CODA(vit, dataclasses.replace(QUICK, rate=30.0)), tasks[:2])
    old, new = join_components(method.components), method.start_components()
    for layer in range(len(method.layers)):
        for name in ("prompts", "keys", "attention"):
            rows, known = getattr(new, name)[layer].flatten(1), getattr(old, name)[layer].flatten(1)
            torch.testing.assert_close(rows.norm(dim=1), torch.ones(10))
            torch.testing.assert_close(rows @ known.T, torch.zeros(10, 20), atol=1e-5, rtol=0)


# ESN


def test_the_anchor_ties_the_soft_minimum_as_coded_or_the_soft_maximum():
    logits = torch.tensor([[1.0, 2.0]])
    low = -math.log(math.exp(-1) + math.exp(-2))
    high = -math.log(math.exp(1) + math.exp(2))
    assert float(anchor_loss(logits, "min")) == pytest.approx(0.1 * (low + 10) ** 2)
    assert float(anchor_loss(logits, "max")) == pytest.approx(0.1 * (high + 10) ** 2)


def test_temperatures_vote_and_a_single_one_is_the_largest_energy():
    by_task = [torch.tensor([[5.0, 0.0], [0.0, 0.0]]), torch.tensor([[4.0, 4.0], [1.0, -9.0]])]
    assert vote(by_task, [1.0]).tolist() == energies(by_task, 1.0).argmax(dim=1).tolist()
    assert vote(by_task, [0.001]).tolist() == [0, 1]  # the largest logit
    soft = energies(by_task, 100.0).argmax(dim=1).tolist()
    assert vote(by_task, [0.001, 100.0, 100.0]).tolist() == [min(a, b) for a, b in zip([0, 1], soft, strict=True)]


def test_a_task_classifier_attends_from_its_token_to_all_tokens(vit):
    classifier = TaskClassifier(vit, 3, torch.Generator().manual_seed(0))
    tokens = torch.randn(2, 5, vit.dim)
    assert torch.equal(classifier.token, vit._vit.cls_token[0, 0])
    x = classifier.norm1(torch.cat([classifier.token.expand(2, 1, -1), tokens], dim=1))
    width, heads = vit.dim // classifier.heads, []
    for head in range(classifier.heads):
        part = slice(head * width, (head + 1) * width)
        q, k, v = classifier.q(x[:, :1])[..., part], classifier.k(x)[..., part], classifier.v(x)[..., part]
        heads.append((q @ k.mT / width**0.5).softmax(dim=-1) @ v)
    token = classifier.token + classifier.project(torch.cat(heads, dim=-1))
    token = token + classifier.narrow(F.gelu(classifier.widen(classifier.norm2(token))))
    torch.testing.assert_close(classifier(tokens), classifier.head(token[:, 0]), atol=1e-5, rtol=1e-5)
    assert classifier.widen.out_features == vit.dim // 2


def test_the_prompt_is_frozen_after_the_first_task_and_every_later_task_adds_a_temperature(vit, tasks):
    method = ESN(vit, QUICK)
    before = method._prompt.clone()
    method.learn(tasks[0])
    first = method.kept()["task0/prompt"].clone()
    assert not torch.equal(first, before)
    learned(method, tasks[1:])
    assert torch.equal(method.kept()["task0/prompt"], first)
    assert len(method.temperatures) == 3 and set(method.temperatures) <= set(TEMPERATURES)
    answer = method.predict(random_images(4))
    row_task = torch.tensor([0, 0, 0, 1, 2, 2])
    assert (answer.scores.isfinite() == (row_task == answer.matched_task[:, None])).all()


# EvoPrompt


@pytest.fixture
def memory():
    return Memory(torch.randn(2, 4, 6), torch.randn(2, 10, 4))


def flat(layers=2, hidden=4, out=10, value=0.5):
    return Attribution(torch.full((layers, hidden), value), torch.full((layers, out), value))


def test_fusing_a_memory_with_itself_changes_nothing(memory):
    fused, _ = fuse(memory, memory, flat(), flat())
    torch.testing.assert_close(fused.down, memory.down)
    torch.testing.assert_close(fused.up, memory.up)


def test_the_order_of_hidden_nodes_does_not_matter(memory):
    reference = Memory(memory.down + 0.1 * torch.randn(2, 4, 6), memory.up + 0.1 * torch.randn(2, 10, 4))
    order = torch.tensor([2, 0, 3, 1])
    now = Attribution(torch.rand(2, 4), torch.rand(2, 10))
    moved = Memory(memory.down[:, order], memory.up[:, :, order])
    one, attribution = fuse(memory, reference, now, flat())
    other, again = fuse(moved, reference, dataclasses.replace(now, hidden=now.hidden[:, order]), flat())
    torch.testing.assert_close(one.down, other.down)
    torch.testing.assert_close(one.up, other.up)
    torch.testing.assert_close(attribution.hidden, again.hidden)


def test_a_node_used_only_now_is_taken_over_and_one_used_only_before_is_kept(memory):
    reference = Memory(memory.down + 0.01, memory.up + 0.01)
    taken, _ = fuse(memory, reference, flat(value=1.0), flat(value=0.0))
    kept, _ = fuse(memory, reference, flat(value=0.0), flat(value=1.0))
    torch.testing.assert_close(taken.down, memory.down)
    torch.testing.assert_close(kept.up, reference.up)


def test_the_assignment_is_the_cheapest_of_all():
    for seed in range(5):
        cost = torch.rand(5, 5, generator=torch.Generator().manual_seed(seed))
        found = float(cost[torch.arange(5), assign(cost)].sum())
        assert found == pytest.approx(
            min(
                sum(float(cost[row, column]) for row, column in enumerate(order))
                for order in itertools.permutations(range(5))
            )
        )


def test_new_head_rows_take_the_part_of_the_most_alike_class():
    known = torch.tensor([[1.0, 0, 0, 0, 0, 1, 0, 0], [0, 1.0, 0, 0, 1, 0, 0, 0]])
    rows = torch.tensor([[1.0] * 8, [2.0] * 8])
    mixed = mix_head_rows(torch.tensor([[1.0, 0, 0, 0, 1, 0, 0, 0]]), known, rows)
    torch.testing.assert_close(mixed, torch.tensor([[1.0] * 4 + [2.0] * 4]), atol=1e-4, rtol=0)


def test_evoprompt_inserts_five_tokens_before_every_block(vit, tasks):
    method = learned(EvoPrompt(vit, QUICK), tasks[:1])
    tokens = method._memory.tokens(torch.randn(3, vit.dim))
    assert tokens.keys() == set(range(vit.depth))
    assert all(each.shape == (3, 5, vit.dim) for each in tokens.values())
    attribution = method.kept()["hidden_attribution"]
    assert attribution.min() >= 0 and attribution.max() <= 1


# CPrompt


def test_old_heads_are_flattened_only_where_they_are_as_sure_as_the_new_one():
    new = torch.tensor([[5.0, 0.0], [0.0, 0.0]])
    old = torch.tensor([[1.0, 0.0], [3.0, 0.0]], requires_grad=True)
    flatten_old_heads([old], new, tau=2.0).backward()
    torch.testing.assert_close(old.grad[0], torch.zeros(2), atol=1e-7, rtol=0)
    assert old.grad[1, 0] > 0  # the sure logit goes down
    target = (torch.tensor([3.0, 0.0]) / 2).softmax(dim=0)
    expected = (torch.tensor([3.0, 0.0]).softmax(dim=0) - target) / 2  # mean over two images
    torch.testing.assert_close(old.grad[1], expected)


def test_at_temperature_one_old_heads_are_left_alone():
    old = torch.randn(3, 4, requires_grad=True)
    flatten_old_heads([old], torch.randn(3, 2), tau=1.0).backward()
    torch.testing.assert_close(old.grad, torch.zeros(3, 4), atol=1e-7, rtol=0)
    assert flatten_old_heads([], torch.randn(3, 2)) == 0


def test_cprompt_matches_the_task_of_the_best_class_key(vit, tasks):
    method, images = learned(CPrompt(vit, QUICK), tasks), random_images(6)
    query = run_blocks(vit, images)[:, 0]
    keys = torch.cat([method.kept()[f"task{number}/keys"] for number in range(3)])
    best = (F.normalize(query, dim=1) @ F.normalize(keys, dim=1).T).argmax(dim=1)
    assert method.predict(images).matched_task.tolist() == torch.tensor([0, 0, 0, 1, 2, 2])[best].tolist()
    assert method.kept()["task0/first"].shape == (10, vit.dim)


def test_cprompt_computes_old_prompts_without_gradient_and_its_own_once(vit, tasks):
    method, images = learned(CPrompt(vit, QUICK), tasks[:2]), random_images(5)
    new, drawn = method._start_prompts(), torch.tensor([2, 0, 1, 2, 0])
    everyone, weights = [*method._prompts, new], torch.randn(5, vit.dim)

    def gradient(feature):
        new.first.grad = new.second.grad = None
        (feature() * weights).sum().backward()
        return feature().detach(), new.first.grad.clone(), new.second.grad.clone()

    for tensor in (new.first, new.second):
        tensor.requires_grad_()
    own = torch.zeros(5, dtype=torch.int64)
    naive = gradient(lambda: method._feature(images, method._pick(everyone, drawn)))
    found = gradient(lambda: method._mix(images, method._feature(images, method._pick([new], own)), drawn))
    for expected, given in zip(naive, found, strict=True):
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)


def test_cprompt_starts_heads_as_kaiming_does(vit):
    head = CPrompt(vit, QUICK)._start_head(50)
    bound = (3 / vit.dim) ** 0.5
    assert head.weight.abs().max() <= bound
    assert head.weight.std().item() == pytest.approx(vit.dim**-0.5, rel=0.1)
    assert not head.bias.any()


# HiDe


def test_the_spread_loss_wants_every_row_most_like_itself():
    centroids, features = torch.randn(2, 4), torch.randn(3, 4)
    rows = torch.cat([centroids, features])
    by_hand = torch.stack([-(rows[i] @ rows.T / 0.8).log_softmax(dim=0)[i] for i in range(5)]).mean()
    torch.testing.assert_close(spread_loss(centroids, features), by_hand)


def test_the_prompt_of_a_task_keeps_a_hundredth_of_the_older_ones(vit, tasks):
    method = HiDe(vit, dataclasses.replace(QUICK, rate=1e-9))
    learned(method, tasks[:2])
    kept = method.kept()
    torch.testing.assert_close(kept["task1/prompt"], kept["task0/prompt"], atol=1e-6, rtol=0)
    assert kept["task0/prompt"].shape == (4, 2, 20, vit.dim)


def test_hide_uses_the_prompt_of_the_task_that_plain_features_name(vit, tasks):
    method, images = learned(HiDe(vit, QUICK), tasks), random_images(6)
    best = method._identity.scores(vit.plain(images)).argmax(dim=1)
    named = torch.tensor([0, 0, 0, 1, 2, 2])[best]
    answer = method.predict(images)
    assert answer.matched_task.tolist() == named.tolist()
    torch.testing.assert_close(method.predict_as(images, named).scores, answer.scores)
