"""The command line answers at once and says what is wrong in one line."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("mqmk-daemon")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_help_appears_within_half_a_second():
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        found = run("--help")
        seconds.append(time.perf_counter() - begun)
        assert found.returncode == 0
    assert "bench" in found.stdout
    assert min(seconds) < 0.5


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'ray', 'mlflow', 'timm', 'numpy', 'rich'}"
    code = f"import sys, mqmk.daemon.cli.main; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_version_is_printed():
    assert run("--version").stdout.startswith("mqmk-daemon, version ")


@pytest.mark.parametrize(
    "command",
    [
        "pack",
        "predict",
        "evaluate",
        "report",
        "bench",
        "bench speed",
        "bench training",
        "bench accuracy",
        "bench compare",
    ],
)
def test_every_command_explains_itself(command):
    found = run(*command.split(), "--help")
    assert found.returncode == 0
    assert "Usage:" in found.stdout


def test_an_error_that_a_user_can_act_on_is_one_line():
    found = run("bench", "speed", "--backbone", "vit_tinny_patch16_224")
    assert found.returncode == 1
    assert found.stderr.splitlines() == [
        "mqmk-daemon: no backbone is called 'vit_tinny_patch16_224'; did you mean "
        + found.stderr.strip().split("did you mean ")[1]
    ]


def test_bench_speed_prints_json_with_a_row_for_everything():
    options = ["--backbone", "vit_tiny_patch16_224", "--tasks", "2", "--images", "1", "--rounds", "1", "--json"]
    report = json.loads(run("bench", "speed", *options).stdout)
    names = {"plain", "naive", "sqsk", "sqmk", "mqsk", "mqmk", "mqmk-ei", "cascade", "anchor", "fused", "perfect"}
    assert {row["matcher"] for row in report["rows"]} == names
    for row in report["rows"]:
        assert row.keys() == {
            "backbone", "tasks", "matcher", "ms_per_image", "ratio_to_naive", "ratio_to_plain", "peak_mb"
        }  # fmt: skip
        assert row["ms_per_image"] > 0
        assert row["peak_mb"] > 50
    assert report["machine"]["matmul_gflops"] > 0
    assert 0 < report["matmul_share"]["vit_tiny_patch16_224"] < 2
