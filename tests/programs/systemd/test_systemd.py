"""The systemd test runs the documented commands; `make systemd-test` runs it all."""

import pytest
from programs.systemd.run import documented_commands


def test_the_operations_guide_documents_the_installation_and_the_restore() -> None:
    installation = documented_commands("useradd")
    assert sum("/opt/mqmk/bin/pip" in line for line in installation) == 1, "the one line that needs the package index"
    assert any("enable --now" in line for line in installation)
    restore = documented_commands("systemctl stop")
    assert any("/mqmk-backups/" in line for line in restore) and "start" in restore[-1]


def test_a_block_that_is_not_documented_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no block that starts with"):
        documented_commands("rm -rf")
