"""Checkpoints of a training run: its whole state after an epoch, as one safetensors file or its bytes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mqmk.matcher.durable import replace_file


def to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """A checkpoint of the state."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def from_bytes(data: bytes) -> dict[str, Tensor] | None:
    """The state of a checkpoint; None where it cannot be read, so that training starts over."""
    try:
        return load(data)
    except SafetensorError:
        return None


def compute_digest(run: Mapping[str, Any], initial: Mapping[str, Tensor]) -> Tensor:
    """Which run a checkpoint belongs to, as 32 bytes: its description and its initial tensors."""
    found = hashlib.sha256(json.dumps(run, sort_keys=True, default=list).encode())
    for name, tensor in sorted(initial.items()):
        found.update(f"{name} {[*tensor.shape]}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return torch.tensor([*found.digest()], dtype=torch.uint8)


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Durable when this returns; a reader sees the old file or the new one."""
    replace_file(path, to_bytes(tensors))


def read(path: Path) -> dict[str, Tensor] | None:
    """The state that was written; None where there is none, or it cannot be read."""
    return from_bytes(path.read_bytes()) if path.exists() else None


def strip_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter, numbered in order."""
    return {
        f"{number}.{name}": value
        for number, parameter in enumerate(_parameters(optimiser))
        for name, value in optimiser.state[parameter].items()
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the state that `optimiser_tensors` gave."""
    for number, parameter in enumerate(_parameters(optimiser)):
        moments = strip_prefix(tensors, f"{number}.")
        optimiser.state[parameter] = {n: v if n == "step" else v.to(parameter.device) for n, v in moments.items()}


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
