"""One folder, one demo: a second one is refused while the first runs, and let in afterwards."""

import pytest
from click.testing import CliRunner

from dualmap_cli.demo import command
from dualmap_cli.demo.errors import OutputRefused
from dualmap_cli.demo.folder import held


def test_a_second_demo_is_refused_as_bad_usage(tmp_path):
    with held(tmp_path):
        result = CliRunner().invoke(command.demo, ["--out", str(tmp_path), "--requests", "1"])

    assert result.exit_code == 2
    assert "--out" in result.output
    assert f"another demo writes to {tmp_path}; choose another --out" in result.output
    assert not (tmp_path / "logs").exists(), "the live files of the first are untouched"


def test_the_folder_is_free_when_a_demo_ends_however_it_does(tmp_path):
    with pytest.raises(RuntimeError, match="ended badly"), held(tmp_path):
        raise RuntimeError("ended badly")

    with held(tmp_path):
        pass


def test_demos_in_different_folders_do_not_mind_each_other(tmp_path):
    with held(tmp_path / "one"), held(tmp_path / "two"):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OutputRefused, match="give a folder to write to"), held(tmp_path / "file" / "below"):
        pass
