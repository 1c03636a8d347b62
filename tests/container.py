"""The image as compose.yaml runs it, with docker or podman: `make image-test`.

The image is built, learns a task of sketches, asks for its API key, says that it is healthy, stops when told to and
serves again after a start. Prints one JSON line of what happened.
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
from chaos_clients import pictures
from daemon_parts import class_folders

from mqmk.deploy.keys import hash_key

ROOT: Final = Path(__file__).resolve().parent.parent
DOCKERFILE: Final = ROOT / "deploy" / "docker" / "Dockerfile"
SERVICE: Final = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]["daemon"]
NAME: Final = "mqmk-image-test"
PATIENCE: Final = 180.0


def guarded() -> list[str]:
    """What compose.yaml takes from the service, as words for `run`."""
    words = [f"--cap-drop={each}" for each in SERVICE["cap_drop"]] + ["--shm-size", SERVICE["shm_size"]]
    return words + [word for each in SERVICE["security_opt"] for word in ("--security-opt", each)]


def health() -> list[str]:
    """The command by which the image says that it is healthy."""
    found = re.search(r"^HEALTHCHECK[^\[]*CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found
    words: list[str] = json.loads(found[1])
    return words


@dataclass
class Proof:
    """One run."""

    engine: list[str]
    image: str
    port: int
    more: list[str]
    folder: Path
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self) -> None:
        self._start()
        self._inside("mqmk-daemon", "pack", "/photos", "/var/lib/mqmk/bucket/tasks", "--task", "sea")
        self._expect("sea: SERVING" in self._inside("mqmk-daemon", "show", "sea", "--wait", "200"), "sea is served")
        self.found["without a key"], self.found["with it"] = self._asked(""), self._asked(self.key)
        self._expect(self.found["without a key"] == 401, "the door is closed without a key")
        self._expect(self.found["with it"] in class_labels(), "the door is open with a key")
        self._inside(*health())
        self._inside("mqmk-daemon", "doctor")
        self.found["rights"] = self._inside("sh", "-c", "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status").split()
        self._expect(self.found["rights"] == ["10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1"], "few rights")
        self._stop_and_start()

    def _start(self) -> None:
        (self.folder / "api-keys").write_text(hash_key(self.key) + "\n")
        shutil.copytree(class_folders("sea", 40), self.folder / "photos")
        subprocess.run(["chmod", "-R", "a+rX", self.folder], check=True)
        mounted = {"photos": "/photos", "api-keys": "/run/secrets/api-keys"}
        volumes = [word for here, there in mounted.items() for word in ("-v", f"{self.folder / here}:{there}:ro")]
        chosen = ("MQMK_SERVE_API_KEYS", "MQMK_SERVE_HOST", "MQMK_METRICS_HOST", "MQMK_METRICS_PORT")
        settings = [word for name in chosen for word in ("-e", f"{name}={SERVICE['environment'][name]}")]
        ports = ["-p", f"127.0.0.1:{self.port}:8000"]
        self._call("run", "--detach", "--name", NAME, *guarded(), *ports, *volumes, *settings, *self.more, self.image)
        self._until(lambda: "bucket" in self._inside("ls", "/var/lib/mqmk"), "the daemon makes its folders")

    def _stop_and_start(self) -> None:
        begun = time.monotonic()
        self._call("stop", "--time", SERVICE["stop_grace_period"].removesuffix("s"), NAME)
        self.found["stopped, s"] = round(time.monotonic() - begun, 1)
        code = self._call("inspect", NAME, "--format", "{{.State.ExitCode}}").strip()
        self._expect(code == "0", f"ends with 0, not {code}, when it is told to stop")
        begun = time.monotonic()
        self._call("start", NAME)
        self._until(lambda: self._asked(self.key) == self.found["with it"], "it answers as before")
        self.found["started, s until an answer"] = round(time.monotonic() - begun, 1)

    def _asked(self, key: str) -> str | int:
        """The label of a crab, or why not."""
        request = Request(f"http://127.0.0.1:{self.port}/predict", pictures(["crab"])["crab"], {"X-Api-Key": key})
        try:
            with urlopen(request, timeout=10) as answer:
                return str(json.load(answer)["label"])
        except HTTPError as error:
            return error.code
        except OSError:
            return "no answer"

    def _inside(self, *command: str) -> str:
        return self._call("exec", NAME, *command)

    def _call(self, *words: str) -> str:
        done = subprocess.run([*self.engine, *words], capture_output=True, text=True, timeout=PATIENCE * 2, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _expect(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.problems.append(f"not so: {what}")

    def _until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, f"{why}: not within {PATIENCE:g} s\n{self._call('logs', NAME)[-2000:]}"
            time.sleep(0.5)

    def end(self) -> None:
        with suppress(AssertionError):
            self._call("rm", "--force", "--volumes", NAME)


def class_labels() -> list[str]:
    return [path.name for path in class_folders("sea", 40).iterdir()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", help="docker or podman, with options of its own", type=shlex.split)
    parser.add_argument("--image", help="one that was built already")
    parser.add_argument("--port", type=int, default=8000, help="on this machine")
    parser.add_argument("--run", type=shlex.split, default=[], help="more options for `run`")
    given = parser.parse_args()
    engine = given.engine or next(([name] for name in ("docker", "podman") if shutil.which(name)), None)
    if engine is None:
        sys.exit("neither docker nor podman is installed here")
    image = given.image or "mqmk-daemon:image-test"
    if given.image is None:
        subprocess.run([*engine, "build", "--file", DOCKERFILE, "--tag", image, ROOT], check=True)
    with tempfile.TemporaryDirectory(prefix="mqmk-image-") as folder:
        proof = Proof(engine, image, given.port, given.run, Path(folder))
        try:
            proof.run()
        finally:
            proof.end()
    print(json.dumps(proof.found | {"problems": proof.problems}), flush=True)
    sys.exit(int(bool(proof.problems)))


if __name__ == "__main__":
    main()
