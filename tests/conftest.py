"""Shared by all tests: shape checks at run time, the real weights and images, fixed random numbers."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

install_import_hook(["mqmk.matcher", "mqmk.learner"], "beartype.beartype")  # before anything imports them

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("search", deadline=None, max_examples=500)  # HYPOTHESIS_PROFILE=search: more examples
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # most tests compute too little to gain from a second thread

pytest_plugins = [
    "support.servers.s3",
    "support.servers.ray_session",
]  # fixtures that several files share: one S3 server and one Ray head per session

ROOT = Path(__file__).resolve().parent.parent
ASSETS = Path(os.environ.get("MQMK_TEST_ASSETS") or ROOT.parent / "shared" / "assets")
"""Real weights and images, which are not part of the repository: `MQMK_TEST_ASSETS`, or ../shared/assets."""


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with real weights and images; tests that need it are skipped without it."""
    names = ("deit_tiny_patch16_224.safetensors", "cifar100-200x50.tar")
    if missing := [name for name in names if not (ASSETS / name).exists()]:
        pytest.skip(f"{' and '.join(missing)} not found in {ASSETS}: set MQMK_TEST_ASSETS to their folder")
    return ASSETS


@pytest.fixture(scope="session", autouse=True)
def without_test_variables() -> None:
    """The daemon refuses unknown MQMK_ variables, and processes started by tests inherit the environment."""
    os.environ.pop("MQMK_TEST_ASSETS", None)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed torch, so that every run of a test draws the same numbers."""
    torch.manual_seed(0)
