"""The image test uses what compose.yaml and the Dockerfile declare; `make image-test` runs it all."""

from itertools import pairwise
from pathlib import Path

from programs.image.run import ImageTest, class_labels, hardening_options, healthcheck_command


def test_the_container_is_hardened_as_in_compose() -> None:
    options = hardening_options()
    assert "--cap-drop=ALL" in options
    assert ("--security-opt", "no-new-privileges:true") in pairwise(options)
    assert "--shm-size" in options


def test_the_health_check_is_that_of_the_dockerfile() -> None:
    command = healthcheck_command()
    assert command[0] == "python" and "/healthz" in " ".join(command)


def test_an_unmet_expectation_is_a_problem(tmp_path: Path) -> None:
    test = ImageTest(["docker"], "image", 8000, [], tmp_path)
    test._expect(True, "this holds")
    test._expect(False, "this holds, too")
    assert test.problems == ["expected: this holds, too"]
    assert "crab" in class_labels()
