"""ESN: for each task a class-attention block with its own head on one frozen, prompted ViT; energies choose the task.

Prompt tokens are trained on the first task and frozen then, so the tokens of an image never change again.
"""

from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.forward import class_token, num_heads, run_blocks
from mqmk.learner.bench.methods.parts.heads import keep_task, row_tasks
from mqmk.learner.bench.methods.parts.prompts import uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.remembering import recall
from mqmk.learner.bench.methods.parts.training import Recipe, collect, cosine, fit, fit_features
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

TOKENS: Final = 20
EPOCHS: Final = 30  # of a classifier on tokens that no longer change
TEMPERATURES: Final = (0.001, 0.01, *(tenth / 10 for tenth in range(1, 11)))
ANCHOR, ANCHOR_WEIGHT = -10.0, 0.1


class TaskClassifier(nn.Module):
    """One task's token, which attends to all tokens of the ViT, with an MLP of half the width and a linear head."""

    def __init__(self, vit: FrozenViT, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        dim = vit.dim
        self.heads = num_heads(vit)
        self.token = nn.Parameter(class_token(vit).clone())
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.project = (nn.Linear(dim, dim) for _ in range(4))
        self.widen, self.narrow = nn.Linear(dim, dim // 2), nn.Linear(dim // 2, dim)
        self.head = nn.Linear(dim, classes)
        for layer in (self.q, self.k, self.v, self.project, self.widen, self.narrow, self.head):
            with torch.no_grad():
                layer.weight.normal_(0, 0.02, generator=generator)
                layer.bias.zero_()
        self.requires_grad_(False).to(vit.device)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        token = self.token.expand(len(tokens), 1, -1)
        x = self.norm1(torch.cat([token, tokens], dim=1))

        def split(y: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch heads n width"]:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.q(x[:, :1])), split(self.k(x)), split(self.v(x)))
        token = token + self.project(mixed.transpose(1, 2).flatten(2))  # [batch, heads, 1, width] -> [batch, 1, dim]
        token = token + self.narrow(F.gelu(self.widen(self.norm2(token))))
        return self.head(token[:, 0])


class ESN:
    """Prompt tokens of task 1; a classifier for each task; temperatures that vote."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings, anchor: Literal["min", "max"] = "min") -> None:
        self._vit, self._settings, self._anchor = vit, settings, anchor
        self._generator, bound = torch.Generator().manual_seed(settings.train.seed), vit.dim**-0.5
        self._prompt = uniform(vit, self._generator, 1, TOKENS, vit.dim, low=-bound, high=bound)
        self._classifiers: list[TaskClassifier] = []
        self._mark = object()
        self.temperatures = [TEMPERATURES[0]]
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train the task's classifier, on the first task with the prompt, and find a temperature that prefers it.

        With the prompt frozen the tokens of an image are computed once, and the classifier trains on them as long as
        in the reference.
        """
        vit, train, is_first = self._vit, self._settings.train, not self._classifiers
        classifier = TaskClassifier(vit, len(task.classes), self._generator)

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            logits = classifier(tokens)
            return F.cross_entropy(logits, labels) + anchor_loss(logits, self._anchor)

        recipe = Recipe("sgd", 0.01 * self._settings.rate, cosine, clip=1.0, weight_decay=5e-4)
        trained = list(classifier.parameters())
        if is_first:
            both = [*trained, self._prompt]
            fit(vit, task.training, train, recipe, both, lambda images, labels: loss(self._tokens(images), labels))
        tokens, labels = collect(vit, task.training, train.batch, self._tokens)
        fit_features(tokens, labels, recipe, trained, loss, epochs=EPOCHS, batch=train.batch, seed=train.seed)
        self.trained = sum(tensor.numel() for tensor in [*trained, *([self._prompt] if is_first else [])])
        self._classifiers.append(classifier)
        if not is_first:
            self.temperatures.append(self._best_temperature(tokens))

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """The classes of the task that most temperatures vote for."""
        kinds = [self._mark] * len(images)
        tokens = recall(self._vit, images, kinds, lambda some: self._tokens(images[some]))
        by_task = [classifier(tokens) for classifier in self._classifiers]
        task = vote(by_task, self.temperatures)
        row_task = row_tasks([logits.shape[1] for logits in by_task], self._vit.device)
        scores = torch.cat(by_task, dim=1)
        return Answer(keep_task(scores, row_task, task), task, scores)

    def kept(self) -> dict[str, Tensor]:
        """All of it stays as it was learned."""
        tensors: dict[str, Tensor] = {}
        for number, classifier in enumerate(self._classifiers):
            tensors |= {f"task{number}/{name}": value.detach() for name, value in classifier.named_parameters()}
            tensors[f"task{number}/temperature"] = torch.tensor(self.temperatures[number])
        return tensors | ({"task0/prompt": self._prompt} if self._classifiers else {})

    def _tokens(self, images: Tensor) -> Float[Tensor, "batch tokens dim"]:
        return run_blocks(self._vit, images, {0: self._prompt})

    @torch.no_grad()
    def _best_temperature(self, tokens: Float[Tensor, "images tokens dim"]) -> float:
        """The one by which most of the newest task's own training images go to its classifier."""
        by_task = [classifier(tokens) for classifier in self._classifiers]
        own = [int((energies(by_task, t).argmax(dim=1) == len(by_task) - 1).sum()) for t in TEMPERATURES]
        return TEMPERATURES[own.index(max(own))]


def anchor_loss(logits: Float[Tensor, "batch classes"], anchor: Literal["min", "max"]) -> Float[Tensor, ""]:
    """Ties the energy of every image to -10; as coded by the reference, E is the soft minimum of the logits."""
    energy = -(-logits if anchor == "min" else logits).logsumexp(dim=1)
    return ANCHOR_WEIGHT * (energy - ANCHOR).square().mean()


def energies(by_task: list[Tensor], temperature: float) -> Float[Tensor, "batch tasks"]:
    """The soft maximum of each task's logits."""
    return torch.stack([(logits / temperature).logsumexp(dim=1) for logits in by_task], dim=1)


def vote(by_task: list[Tensor], temperatures: list[float]) -> Int[Tensor, " batch"]:
    """Every distinct temperature votes for the task of largest energy; of equals the first task wins."""
    votes = [energies(by_task, temperature).argmax(dim=1) for temperature in sorted(set(temperatures))]
    return F.one_hot(torch.stack(votes), len(by_task)).sum(dim=0).argmax(dim=1)


METHODS: Final = (
    MethodInfo(
        "esn",
        "prompts",
        "a class-attention block for each task on tokens prompted for task 1; energies choose the task",
        ESN,
        Published(
            "MQMK paper, from CPrompt",
            cifar100=86.42,
            imagenet_r=75.11,
            domainnet=79.22,
            matching_cifar100=78.50,
            matching_imagenet_r=70.33,
            matching_domainnet=72.84,
            imagenet_r_5=73.42,
            imagenet_r_20=70.57,
        ),
        (
            "classifiers train on the tokens of images as they are, computed once, with gradients clipped at 1",
            "20 prompt tokens where the reference has 100, frozen after task 1 as its paper says",
            "without the distillation term, whose condition never holds in the reference",
        ),
        searches_rate=True,
        epoch_passes=(2.8, 0.6),
        test_passes=0.2,
        rounds=1,
    ),
)
