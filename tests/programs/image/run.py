"""Build the container image and run it as compose.yaml does, with docker or podman: `make image-test`.

The container learns a task of sketches, requires its API key, reports healthy, stops on request and serves again after
a start. Prints the results as one JSON line.
"""

import argparse
import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import yaml
from programs.chaos.clients import sample_images
from support.daemons.daemon import class_folders

from mqmk.deploy.serving.api_keys import hash_key

ROOT: Final = Path(__file__).resolve().parents[3]
DOCKERFILE: Final = ROOT / "deploy" / "docker" / "Dockerfile"
SERVICE: Final = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]["daemon"]
NAME: Final = "mqmk-image-test"
TIMEOUT_SECONDS: Final = 180.0


def hardening_options() -> list[str]:
    """The security options of compose.yaml as arguments of `run`."""
    arguments = [f"--cap-drop={each}" for each in SERVICE["cap_drop"]] + ["--shm-size", SERVICE["shm_size"]]
    return arguments + [word for each in SERVICE["security_opt"] for word in ("--security-opt", each)]


def healthcheck_command() -> list[str]:
    """The command of the image's HEALTHCHECK."""
    found = re.search(r"^HEALTHCHECK[^\[]*CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found
    command: list[str] = json.loads(found[1])
    return command


@dataclass
class ImageTest:
    """One run of the container."""

    engine: list[str]
    image: str
    port: int
    extra_options: list[str]
    folder: Path
    api_key: str = field(default_factory=lambda: secrets.token_hex(16))
    results: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self) -> None:
        self._start()
        self._inside("mqmk-daemon", "pack", "/photos", "/var/lib/mqmk/bucket/tasks", "--task", "sea")
        self._expect("sea: SERVING" in self._inside("mqmk-daemon", "show", "sea", "--wait", "200"), "sea is served")
        self.results["without a key"], self.results["with a key"] = self._predict(""), self._predict(self.api_key)
        self._expect(self.results["without a key"] == 401, "a request without an API key is refused")
        self._expect(self.results["with a key"] in class_labels(), "a request with an API key is answered")
        self._inside(*healthcheck_command())
        self._inside("mqmk-daemon", "doctor")
        self.results["rights"] = self._inside("sh", "-c", "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status").split()
        self._expect(
            self.results["rights"] == ["10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1"],
            "the process has no capabilities",
        )
        self._stop_and_start()

    def _start(self) -> None:
        (self.folder / "api-keys").write_text(hash_key(self.api_key) + "\n")
        shutil.copytree(class_folders("sea", 40), self.folder / "photos")
        subprocess.run(["chmod", "-R", "a+rX", self.folder], check=True)
        mounted = {"photos": "/photos", "api-keys": "/run/secrets/api-keys"}
        volumes = [word for here, there in mounted.items() for word in ("-v", f"{self.folder / here}:{there}:ro")]
        chosen = ("MQMK_SERVE_API_KEYS", "MQMK_SERVE_HOST", "MQMK_METRICS_HOST", "MQMK_METRICS_PORT")
        settings = [word for name in chosen for word in ("-e", f"{name}={SERVICE['environment'][name]}")]
        ports = ["-p", f"127.0.0.1:{self.port}:8000"]
        self._call(
            "run",
            "--detach",
            "--name",
            NAME,
            *hardening_options(),
            *ports,
            *volumes,
            *settings,
            *self.extra_options,
            self.image,
        )
        self._wait_until(lambda: "bucket" in self._inside("ls", "/var/lib/mqmk"), "the daemon creates its folders")

    def _stop_and_start(self) -> None:
        started = time.monotonic()
        self._call("stop", "--time", SERVICE["stop_grace_period"].removesuffix("s"), NAME)
        self.results["stop, s"] = round(time.monotonic() - started, 1)
        code = self._call("inspect", NAME, "--format", "{{.State.ExitCode}}").strip()
        self._expect(code == "0", f"exits with 0, not {code}, on stop")
        started = time.monotonic()
        self._call("start", NAME)
        self._wait_until(
            lambda: self._predict(self.api_key) == self.results["with a key"], "it gives the same answer as before"
        )
        self.results["start until an answer, s"] = round(time.monotonic() - started, 1)

    def _predict(self, api_key: str) -> str | int:
        """The predicted label of a crab, the HTTP error status, or `no answer`."""
        request = Request(
            f"http://127.0.0.1:{self.port}/predict", sample_images(["crab"])["crab"], {"X-Api-Key": api_key}
        )
        try:
            with urlopen(request, timeout=10) as answer:
                return str(json.load(answer)["label"])
        except HTTPError as error:
            return error.code
        except OSError:
            return "no answer"

    def _inside(self, *command: str) -> str:
        return self._call("exec", NAME, *command)

    def _call(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.engine, *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS * 2, check=False
        )
        assert done.returncode == 0, f"{shlex.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.problems.append(f"expected: {what}")

    def _wait_until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not what():
            assert time.monotonic() < deadline, (
                f"{why}: not within {TIMEOUT_SECONDS:g} s\n{self._call('logs', NAME)[-2000:]}"
            )
            time.sleep(0.5)

    def remove(self) -> None:
        with suppress(AssertionError):
            self._call("rm", "--force", "--volumes", NAME)


def class_labels() -> list[str]:
    return [path.name for path in class_folders("sea", 40).iterdir()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", help="docker or podman, with global options", type=shlex.split)
    parser.add_argument("--image", help="an existing image instead of a new build")
    parser.add_argument("--port", type=int, default=8000, help="host port")
    parser.add_argument("--run", type=shlex.split, default=[], help="more options for `run`")
    options = parser.parse_args()
    engine = options.engine or next(([name] for name in ("docker", "podman") if shutil.which(name)), None)
    if engine is None:
        sys.exit("neither docker nor podman is installed")
    image = options.image or "mqmk-daemon:image-test"
    if options.image is None:
        subprocess.run([*engine, "build", "--file", DOCKERFILE, "--tag", image, ROOT], check=True)
    with tempfile.TemporaryDirectory(prefix="mqmk-image-") as folder:
        test = ImageTest(engine, image, options.port, options.run, Path(folder))
        try:
            test.run()
        finally:
            test.remove()
    print(json.dumps(test.results | {"problems": test.problems}), flush=True)
    sys.exit(int(bool(test.problems)))


if __name__ == "__main__":
    main()
