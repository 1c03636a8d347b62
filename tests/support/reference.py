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


def regression(q: Tensor, tasks) -> dict[int, float]:
    """Ridge regression on random features: the normal equations of all classes, inverted, one class at a time."""
    width = len(tasks[0].plain_gram)
    directions = np.random.RandomState(0).standard_normal((len(q), width))
    seen = np.maximum(q.numpy() / np.linalg.norm(q.numpy()) @ directions, 0)
    gram = sum(task.plain_gram.double().numpy() for task in tasks)
    inverse = np.linalg.inv(gram + 0.01 * np.trace(gram) / width * np.eye(width))
    rows = {t: task.plain_sums.double().numpy() for t, task in enumerate(tasks)}
    return {t: max(float(row @ inverse @ seen) for row in own) for t, own in rows.items()}


@dataclass
class NaiveMatch:
    task: int
    scores: dict[int, float]
    query: Tensor
    num_queries: int


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
        elif matcher == "ridge":
            scores = regression(query(self.vit, image, {}), self.pool.tasks)
            num_queries = 2
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

    def logits(self, found: NaiveMatch, classifier: str, readout: str) -> list[float]:
        values = []
        for number, task in enumerate(self.pool.tasks):
            for place in range(len(task.classes)):
                if classifier == "km":
                    row = task.keys[place * len(task.keys) // len(task.classes)]
                else:
                    row = (task.head if classifier == "fc" else task.means)[place]
                left_out = readout == "task" and number != found.task
                values.append(-math.inf if left_out else self.pool.logit_scale * cosine(found.query, row))
        return values
