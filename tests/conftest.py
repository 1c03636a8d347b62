"""What every test shares: shapes checked at run time, the real assets, the backbones."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

install_import_hook(["mqmk.matcher", "mqmk.learner"], "beartype.beartype")  # before anything imports them

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("search", deadline=None, max_examples=500)  # HYPOTHESIS_PROFILE=search looks further
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # most tests compute so little that a second thread only costs

pytest_plugins = ["s3", "ray_session"]  # fixtures that several files share: one server, one Ray head a session

ASSETS = Path(__file__).resolve().parent.parent.parent / "shared" / "assets"


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with real weights and pictures."""
    if not (ASSETS / "deit_tiny_patch16_224.safetensors").exists():
        pytest.skip(f"real weights and pictures are not here: {ASSETS.parent.name}/{ASSETS.name} beside the project")
    return ASSETS


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test that draws random numbers draws the same ones every time."""
    torch.manual_seed(0)
