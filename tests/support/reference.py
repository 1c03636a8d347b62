"""The method once more, written only to be right: plain loops, one image, one task, one head at a time, float64.

Shares no code with `mqmk.matcher`; every matcher is compared with it.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


def query(vit: nn.Module, image: Tensor, rows: dict[int, list[tuple[Tensor, Tensor]]]) -> Tensor:
    """Class token after the final norm of a whole forward pass; `rows[layer]` lists (key rows, value rows)."""
    vit = copy.deepcopy(vit).double()
    tokens = vit.patch_embed(image.double()[None])[0]
    prefix = [vit.cls_token[0]] + ([vit.reg_token[0]] if vit.reg_token is not None else [])
    if vit.no_embed_class:
        x = torch.cat([*prefix, tokens + vit.pos_embed[0]])
    else:
        x = torch.cat([*prefix, tokens]) + vit.pos_embed[0]
    x = vit.norm_pre(x)
    for layer, block in enumerate(vit.blocks):
        attention, y = block.attn, block.norm1(x)
        wide = y @ attention.qkv.weight.T
        if attention.qkv.bias is not None:
            wide = wide + attention.qkv.bias
        dim = x.shape[1]
        q, k, v = wide[:, :dim], wide[:, dim : 2 * dim], wide[:, 2 * dim :]
        for key_rows, value_rows in reversed(rows.get(layer, [])):
            k, v = torch.cat([key_rows.double(), k]), torch.cat([value_rows.double(), v])
        width = dim // attention.num_heads
        mixed = []
        for head in range(attention.num_heads):
            part = slice(head * width, (head + 1) * width)
            qh, kh = attention.q_norm(q[:, part]), attention.k_norm(k[:, part])
            mixed.append(torch.softmax(qh @ kh.T / math.sqrt(width), dim=1) @ v[:, part])
        x = x + block.ls1(attention.proj(attention.norm(torch.cat(mixed, dim=1))))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return vit.norm(x)[0]


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def merge_keys(means: Tensor, class_samples: tuple[int, ...], number: int) -> Tensor:
    """The keys of groups of neighbouring classes.

    The paper's matching loss is the sum of 1 - cos(Q, k) over the samples of a group. For unit vectors Q that is
    n - (sum of Q) . k / |k|, least for k along the sum of all queries of the group, whatever class they belong to. The
    queries of one class sum up to their number times their mean.
    """
    sums = [torch.zeros(means.shape[1], dtype=torch.float64) for _ in range(number)]
    for place, mean in enumerate(means):
        group = place * number // len(means)
        sums[group] = sums[group] + class_samples[place] * mean.double()
    return torch.stack(sums)


def score(q: Tensor, keys: Tensor, top_keys: int) -> float:
    cosines = sorted((cosine(q, key) for key in keys), reverse=True)[:top_keys]
    return sum(cosines) * top_keys / len(cosines)


def regression(q: Tensor, tasks) -> list[float]:
    """Ridge regression on random features: the normal equations of all classes, inverted, one class at a time."""
    width = tasks[0].factor.shape[1]
    directions = np.random.RandomState(0).standard_normal((len(q), width))
    seen = np.maximum(q.numpy() / np.linalg.norm(q.numpy()) @ directions, 0)
    gram = np.zeros((width, width))
    for task in tasks:
        for row in task.factor.double().numpy():
            gram += np.outer(row, row)
        gram += np.diag(task.residual[0].double().numpy())
    inverse = np.linalg.inv(gram + 0.05 * np.trace(gram) / width * np.eye(width))
    return [float(row @ inverse @ seen) for task in tasks for row in task.feature_means.double().numpy()]


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


@dataclass
class NaiveMatch:
    task: int
    scores: dict[int, float]
    query: Tensor
    num_queries: int
    class_logits: list[float] | None = None


class Naive:
    """All matchers for one pool."""

    def __init__(self, vit: nn.Module, pool, top_keys: int = 1, keys_per_task: int | None = None) -> None:
        self.vit, self.pool, self.top_keys, self.keys_per_task = vit, pool, top_keys, keys_per_task

    def _rows(self, e_prompt: Tensor) -> dict[int, list[tuple[Tensor, Tensor]]]:
        rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for place, layer in enumerate(self.pool.g_layers):
            rows.setdefault(layer, []).append((self.pool.g_prompt[place, 0], self.pool.g_prompt[place, 1]))
        for place, layer in enumerate(self.pool.e_layers):
            rows.setdefault(layer, []).append((e_prompt[place, 0], e_prompt[place, 1]))
        return rows

    def task_query(self, image: Tensor, task: int) -> Tensor:
        return query(self.vit, image, self._rows(self.pool.tasks[task].e_prompt))

    def enhanced(self, image: Tensor) -> Tensor:
        mean = torch.stack([task.e_prompt.double() for task in self.pool.tasks]).mean(dim=0)
        return query(self.vit, image, self._rows(mean))

    def _score(self, q: Tensor, task: int, keys_per_task: int | None, plain: bool = False) -> float:
        own = self.pool.tasks[task]
        keys, means = (own.plain_means, own.plain_means) if plain else (own.keys, own.means)
        if keys_per_task is not None and keys_per_task < len(keys):
            keys = merge_keys(means, own.class_samples, keys_per_task)
        return score(q, keys, self.top_keys)

    def match(self, matcher: str, image: Tensor, *, shortlist: int = 3, true: int = 0):
        tasks = range(len(self.pool.tasks))
        one_key = 1 if matcher in ("sqsk", "mqsk") else self.keys_per_task
        if matcher in ("sqsk", "sqmk"):
            plain = query(self.vit, image, {})
            scores = {t: self._score(plain, t, one_key, plain=True) for t in tasks}
            num_queries = 2
        elif matcher in ("anchor", "fused"):
            return self._weigh_classes(matcher, image, shortlist)
        elif matcher in ("mqsk", "mqmk"):
            scores = {t: self._score(self.task_query(image, t), t, one_key) for t in tasks}
            num_queries = len(tasks)
        elif matcher in ("mqmk-ei", "cascade"):
            enhanced = self.enhanced(image)
            scores = {t: self._score(enhanced, t, one_key) for t in tasks}
            num_queries = 2
            order = sorted(tasks, key=lambda t: -scores[t])
            if matcher == "cascade":
                best = order[:shortlist]
                scores = {t: self._score(self.task_query(image, t), t, one_key) for t in best}
                num_queries = 1 + len(best)
        else:
            scores = {true: self._score(self.task_query(image, true), true, one_key)}
            num_queries = 1
        task = max(scores, key=lambda t: scores[t])
        return NaiveMatch(task, scores, self.task_query(image, task), num_queries)

    def _weigh_classes(self, matcher: str, image: Tensor, shortlist: int) -> NaiveMatch:
        weights = {"anchor": 12.0, "regression": 8.0, "key": 8.0, "head": 8.0, "unscored": 6.0, "accept": 0.95}
        weights |= self.pool.matching.get("fusion", {})
        q = query(self.vit, image, self._rows(self.pool.anchor))
        values = regression(q, self.pool.tasks)
        owners = [(t, place) for t, task in enumerate(self.pool.tasks) for place in range(len(task.classes))]
        logits, num_queries = [weights["anchor"] * value for value in values], 1
        if matcher == "fused" and max(softmax(logits)) < weights["accept"]:
            best = {t: max(v for v, (owner, _) in zip(values, owners, strict=True) if owner == t)
                    for t in range(len(self.pool.tasks))}  # fmt: skip
            chosen = sorted(best, key=lambda t: -best[t])[:shortlist]
            queries = {t: self.task_query(image, t) for t in chosen}
            num_queries += len(chosen)
            for row, (t, place) in enumerate(owners):
                logits[row] = weights["regression"] * values[row] + weights["unscored"]
                if t in chosen:
                    task = self.pool.tasks[t]
                    key = task.keys[place * len(task.keys) // len(task.classes)]
                    local = weights["key"] * cosine(queries[t], key) + weights["head"] * cosine(
                        queries[t], task.head[place]
                    )
                    logits[row] = weights["regression"] * values[row] + local
        shares = softmax(logits)
        scores = {t: max(s for s, (owner, _) in zip(shares, owners, strict=True) if owner == t)
                  for t in range(len(self.pool.tasks))}  # fmt: skip
        return NaiveMatch(max(scores, key=lambda t: scores[t]), scores, q, num_queries, logits)

    def logits(self, found: NaiveMatch, classifier: str, readout: str) -> list[float]:
        values = []
        for number, task in enumerate(self.pool.tasks):
            for place in range(len(task.classes)):
                if classifier == "km":
                    row = task.keys[place * len(task.keys) // len(task.classes)]
                else:
                    row = (task.head if classifier == "fc" else task.means)[place]
                left_out = readout == "task" and number != found.task
                if found.class_logits is not None:
                    values.append(-math.inf if left_out else found.class_logits[len(values)])
                else:
                    values.append(-math.inf if left_out else self.pool.logit_scale * cosine(found.query, row))
        return values
