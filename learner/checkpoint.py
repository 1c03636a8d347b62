"""How a training run survives a kill: its whole state after an epoch, as one safetensors file or its bytes."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mqmk.matcher.durable import replace_file


def to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """The state as it is kept."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def from_bytes(data: bytes) -> dict[str, Tensor] | None:
    """The state that was kept; None where it cannot be read, so that training begins anew."""
    try:
        return load(data)
    except SafetensorError:
        return None


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Durable when this returns; a reader sees the old file or the new one."""
    replace_file(path, to_bytes(tensors))


def read(path: Path) -> dict[str, Tensor] | None:
    """The state that was written; None where there is none that can be read."""
    return from_bytes(path.read_bytes()) if path.exists() else None


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
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
    """Take up the state that `optimiser_tensors` gave."""
    for number, parameter in enumerate(_parameters(optimiser)):
        own = under(tensors, f"{number}.")
        optimiser.state[parameter] = {n: v if n == "step" else v.to(parameter.device) for n, v in own.items()}


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
