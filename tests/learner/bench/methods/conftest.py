"""What every test of a method learns with."""

import pytest
import torch
from support.builders import frozen, random_timm_vit
from support.method_tasks import ragged_tasks


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return frozen(random_timm_vit())


@pytest.fixture(scope="module")
def tasks():
    return ragged_tasks()
