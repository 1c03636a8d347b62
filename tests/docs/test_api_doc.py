"""Every example of docs/api.md is run against a live service, and says what the page says it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.daemons.daemon import class_folders, upgraded_release
from support.servers.http_server import served

from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
SHOWN = "127.0.0.1:8000"
KEY = "a key that only the shop knows"
POOLS = upgraded_release() / "pools"


@dataclass(frozen=True)
class Example:
    """A block of the page, and the heading above it."""

    heading: str
    kind: str
    text: str


def examples(*kinds: str) -> list[Any]:
    found = []
    for part in PAGE.split("\n## ")[1:]:
        blocks = re.findall(r"```(\w+)\n(.*?)```", part, re.DOTALL)
        found += [Example(part.splitlines()[0], kind, text) for kind, text in blocks if kind in kinds]
    return [pytest.param(each, id=f"{number} {each.heading}") for number, each in enumerate(found)]


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def addresses(vit) -> Iterator[dict[bool, str]]:
    """Of a service that is open, and of one that asks for a key."""
    with served(vit, POOLS) as open_to_all, served(vit, POOLS, KEY) as locked:
        yield {False: open_to_all, True: locked}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples are typed: the images they name are there."""
    place = tmp_path_factory.mktemp("typed")
    for task, label in (("birds", "owl"), ("sea", "crab")):
        shutil.copy(class_folders(task, 1) / label / "000.png", place / f"{label}.png")
    return place


def run(example: Example, addresses: dict[bool, str], folder: Path) -> subprocess.CompletedProcess[str]:
    text = example.text.replace(SHOWN, addresses[example.heading == "API keys"].removeprefix("http://"))
    command = ["bash", "-ec", text] if example.kind == "sh" else [sys.executable, "-c", text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MQMK_API_KEY": KEY, "no_proxy": "127.0.0.1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("example", examples("sh"))
def test_commands_do_what_the_page_says(example, addresses, folder):
    done = run(example, addresses, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    for expected in re.findall(r"^# (.*)$", example.text, re.MULTILINE):
        assert expected in done.stdout


@pytest.mark.parametrize("example", examples("python"))
def test_python_runs_and_says_something(example, addresses, folder):
    if "tritonclient" in example.text:
        pytest.importorskip("tritonclient", reason="pip install 'tritonclient[http]'")
    done = run(example, addresses, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def shape(value: Any) -> Any:
    """Names and kinds of a document, without its values."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) else type(value)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_answers_have_the_shape_that_the_page_shows(addresses, folder):
    shown = [shape(json.loads(each.values[0].text)) for each in examples("json")]
    asked = "curl -s --data-binary @owl.png -H 'X-Request-Id: shape' http://127.0.0.1:8000/predict"
    answer = run(Example("", "sh", asked), addresses, folder)
    told = 'curl -s -d \'{"id": "shape", "label": "owl"}\' http://127.0.0.1:8000/feedback'
    feedback = run(Example("", "sh", told), addresses, folder)
    assert [shape(json.loads(each.stdout)) for each in (answer, feedback)] == shown


def test_every_route_is_on_the_page(vit, tmp_path):
    service = Service(vit, LivePool(PoolStore(tmp_path), vit, PredictSettings()), ServiceSpec(tmp_path))
    document = build_api(service).openapi()
    service.close()
    routes = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert routes <= set(re.findall(r"`((?:GET|POST) /[^`]*)`", PAGE))
    codes = {code for methods in document["paths"].values() for row in methods.values() for code in row["responses"]}
    assert codes - {"200", "304"} <= set(re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE))
