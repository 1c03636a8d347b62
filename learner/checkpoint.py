"""How a training run survives a kill: its whole state in one safetensors file, replaced atomically after each epoch."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from mqmk.matcher.durable import replace_file


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Durable when this returns; a reader sees the old file or the new one."""
    replace_file(path, save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))


def read(path: Path) -> dict[str, Tensor] | None:
    """The state that was written; None where there is none that can be read, so that training begins anew."""
    try:
        return load_file(path) if path.exists() else None
    except SafetensorError:
        return None


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
