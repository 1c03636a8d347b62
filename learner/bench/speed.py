"""How long each matcher takes, side by side with whole forward passes in one run: `mqmk-daemon bench speed`.

Times are the least of several rounds, because what disturbs a measurement only ever adds to it; ratios are the median
of those within a round, because a shared machine is faster in one minute than in the next. Weights and images are
random: they do not change the time.
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.criteria import Criterion, at_least, at_most
from mqmk.learner.bench.random_pool import random_pool
from mqmk.learner.bench.timing import read_lines, time_call, time_in_turns
from mqmk.matcher.backbone import RANDOM, load_backbone
from mqmk.matcher.keys import trained_keys
from mqmk.matcher.matchers import MATCHERS, match_images
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT, Prompt

TWO_PASS: Final = ("sqsk", "sqmk", "mqmk-ei")


@dataclass(frozen=True)
class SpeedSettings:
    """What is measured."""

    backbones: tuple[str, ...] = ("deit_tiny_patch16_224", "vit_base_patch16_224")
    tasks: tuple[int, ...] = (10, 20, 100)
    images: int = 2
    e_length: int = 20
    rounds: int = 3
    turn: float = 0.3  # seconds for which a quick row is repeated in each round
    too_long_to_repeat: float = 15.0  # seconds; a row that takes longer is measured once


@dataclass(frozen=True)
class Row:
    """One line of the table; `naive` (M + 1 whole passes) and `plain` (one, without prompts) are rows too."""

    backbone: str
    tasks: int
    matcher: str
    ms_per_image: float
    ratio_to_naive: float
    ratio_to_plain: float
    peak_mb: float


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    processor: str
    cores: int
    device: str
    torch: str
    matmul_gflops: float
    """Rate of a 2048 x 2048 float32 matrix product."""


@dataclass(frozen=True)
class SpeedReport:
    """Everything `--json` prints."""

    machine: Machine
    rows: tuple[Row, ...]
    bars: tuple[Criterion, ...]
    matmul_share: dict[str, float]
    """For each backbone the share of the matrix-product rate that a plain forward pass reaches."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure_speed(settings: SpeedSettings, progress: Callable[[Row], None]) -> SpeedReport:
    """Measure every row and check the criteria; `progress` is called with each row."""
    machine = describe_machine()
    rows: list[Row] = []
    share: dict[str, float] = {}
    for name in settings.backbones:
        vit = load_backbone(name, weights=RANDOM)
        for tasks in settings.tasks:
            for row in _measure(vit, tasks, settings):
                rows.append(row)
                progress(row)
        plain = min(row.ms_per_image for row in rows if (row.backbone, row.matcher) == (name, "plain"))
        share[name] = round(_gflop_of_a_pass(vit) / (plain / 1000) / machine.matmul_gflops, 3)
    return SpeedReport(machine, tuple(rows), tuple(check_criteria(rows)), share)


def check_criteria(rows: list[Row]) -> Iterator[Criterion]:
    """The project's criteria, as far as these rows allow."""
    found = {(row.backbone, row.tasks, row.matcher): row for row in rows}
    for name in dict.fromkeys(row.backbone for row in rows):
        exact = found.get((name, 10, "mqmk"))
        if exact and name == "vit_base_patch16_224":
            yield at_most(f"{name}: mqmk at 10 tasks, share of naive", 0.80, exact.ratio_to_naive)
        few, many = found.get((name, 10, "cascade")), found.get((name, 100, "cascade"))
        if few and many:
            yield at_least(f"{name}: cascade at 100 tasks, times faster than naive", 20.0, 1 / many.ratio_to_naive)
            grown = many.ms_per_image / few.ms_per_image
            yield at_most(f"{name}: cascade at 100 tasks, times its own time at 10", 1.25, grown)
        for matcher in TWO_PASS:
            slowest = max((r.ratio_to_plain for r in rows if (r.backbone, r.matcher) == (name, matcher)), default=0.0)
            yield at_most(f"{name}: {matcher}, plain forwards", 2.2, slowest)


def describe_machine() -> Machine:
    """Processor, cores, device, and the rate of a large matrix product on it."""
    model = [line for line in read_lines("/proc/cpuinfo") if line.startswith("model name")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(2048, 2048, device=device)
    seconds = min(time_call(lambda: a @ a) for _ in range(8))
    return Machine(
        processor=model[0].split(":", 1)[1].strip() if model else platform.processor(),
        cores=os.cpu_count() or 1,
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=torch.__version__,
        matmul_gflops=round(2 * 2048**3 / seconds / 1e9, 1),
    )


def _measure(vit: FrozenViT, tasks: int, settings: SpeedSettings) -> Iterator[Row]:
    pool = random_pool(vit, tasks, settings.e_length)
    size = vit.info.image_size
    images = torch.randn(settings.images, 3, size, size, device=vit.device)
    true_task = torch.arange(settings.images) % tasks
    matchers = {name: partial(match_images, name, vit, pool, images, None, true_task) for name in MATCHERS}
    long_ones = {name: matchers.pop(name) for name in ("mqsk", "mqmk")}
    # The short ones run next to the plain pass that they are compared with.
    calls: dict[str, Callable[[], object]] = {"naive": partial(naive, vit, pool, images), **long_ones}
    calls |= {"plain": partial(whole_pass, vit, images), **matchers}
    with torch.inference_mode():
        timings = time_in_turns(calls, settings.rounds, settings.turn, settings.too_long_to_repeat)
    for name, timing in timings.items():
        yield Row(
            backbone=vit.info.name,
            tasks=tasks,
            matcher=name,
            ms_per_image=round(1000 * min(timing.seconds) / settings.images, 3),
            ratio_to_naive=round(timing.over(timings["naive"]), 4),
            ratio_to_plain=round(timing.over(timings["plain"]), 4),
            peak_mb=timing.peak_mb,
        )


def naive(
    vit: FrozenViT, pool: PromptPool, images: Float[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch dim"]:
    """What published code does: a whole pass for each task, then one more with the matched prompt."""
    bank = trained_keys(pool, None)
    tasks = range(len(pool.tasks))
    scores = [bank.score(whole_pass(vit, images, pool.g, pool.e(task)), task, 1) for task in tasks]
    return whole_pass(vit, images, pool.g, pool.e_rows(torch.stack(scores).argmax(dim=0)))


def whole_pass(
    vit: FrozenViT, images: Float[Tensor, "batch 3 height width"], *prompts: Prompt
) -> Float[Tensor, "batch dim"]:
    """A forward pass that computes every token of every block and shares nothing, as timm does it; in our precision."""
    with vit.autocast():
        if not prompts:
            return vit._vit.forward_features(images)[:, 0].float()
        return _every_token(vit._vit, images, prompts).float()


def _every_token(
    timm_vit: Any, images: Float[Tensor, "batch 3 height width"], prompts: Sequence[Prompt]
) -> Float[Tensor, "batch dim"]:
    x = timm_vit.norm_pre(timm_vit._pos_embed(timm_vit.patch_embed(images)))
    for layer, block in enumerate(timm_vit.blocks):
        attention = block.attn
        wide = attention.qkv(block.norm1(x)).unflatten(2, (3, attention.num_heads, -1))
        q, k, v = wide.permute(2, 0, 3, 1, 4).unbind(0)
        for prompt in prompts:
            if (rows := prompt.at(layer)) is not None:
                split = rows.expand(len(x), -1, -1, -1).unflatten(3, (attention.num_heads, -1)).transpose(2, 3)
                split = split.to(k.dtype)
                k, v = torch.cat([split[:, 0], k], dim=2), torch.cat([split[:, 1], v], dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + block.ls1(attention.proj(mixed))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return timm_vit.norm(x)[:, 0]


def _gflop_of_a_pass(vit: FrozenViT) -> float:
    """Multiply-adds of a plain pass over one image, counted twice as usual."""
    hidden = 4 * vit.dim
    per_token = vit.dim * 3 * vit.dim + vit.dim * vit.dim + 2 * vit.dim * hidden
    attention = 2 * vit.tokens * vit.dim
    return 2 * vit.depth * vit.tokens * (per_token + attention) / 1e9
