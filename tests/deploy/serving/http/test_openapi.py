"""schemathesis asks what the OpenAPI document allows and what it forbids: every answer is one that it announces."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.daemons.daemon import upgraded_release
from support.servers.http_server import served

from mqmk.matcher.backbone import load_backbone

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
LEFT_OUT = "positive_data_acceptance"  # a body may be binary, as announced, and still be no image
EXPECTED = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "503"]
[checks.negative_data_rejection]
expected-statuses = ["4xx", "503"]
"""
WAYS = {
    "something learned": ["--max-examples", "10"],
    "nothing learned": ["--max-examples", "3", "--phases", "fuzzing"],
}


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="pip install schemathesis")
@pytest.mark.parametrize("pool", WAYS)
def test_every_answer_is_one_that_the_document_announces(pool, tmp_path):
    (tmp_path / "schemathesis.toml").write_text(EXPECTED)
    options = ["--checks", "all", "--exclude-checks", LEFT_OUT, "--seed", "1", *WAYS[pool]]
    pools = upgraded_release() / "pools" if pool == "something learned" else tmp_path / "pools"
    with served(load_backbone(), pools) as url:
        command = [SCHEMATHESIS, "run", f"{url}/openapi.json", *options, "--continue-on-failure", "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Selected: 11/11\n  Tested: 11" in done.stdout
