"""Tests that only one demo at a time can use a folder."""

import pytest
from click.testing import CliRunner

from dualmap_cli.demo import command
from dualmap_cli.demo.errors import OutputRefused
from dualmap_cli.demo.folder import held


def test_second_demo_in_a_folder_is_rejected(tmp_path):
    with held(tmp_path):
        result = CliRunner().invoke(command.demo, ["--out", str(tmp_path), "--requests", "1"])

    assert result.exit_code == 2
    assert "--out" in result.output
    assert f"another demo is writing to {tmp_path}; give a different --out" in result.output
    assert not (tmp_path / "logs").exists(), "the live files of the first are untouched"


def test_demo_folder_lock_is_released_at_any_exit(tmp_path):
    with pytest.raises(RuntimeError, match="ended badly"), held(tmp_path):
        raise RuntimeError("ended badly")

    with held(tmp_path):
        pass


def test_demos_in_different_folders_run_together(tmp_path):
    with held(tmp_path / "one"), held(tmp_path / "two"):
        pass


def test_demo_folder_that_cannot_be_created_is_rejected(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OutputRefused, match="give a writable folder"), held(tmp_path / "file" / "below"):
        pass
