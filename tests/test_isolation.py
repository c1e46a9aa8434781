"""The places of a test: nothing in it depends on where the tests are started, or on whose account."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.isolation import Watch


@pytest.mark.parametrize("turn", ["first", "second"])
def test_working_directory_and_home_are_empty(turn: str) -> None:
    """The second turn does not see the files of the first one."""
    assert os.listdir() == os.listdir(Path.home()) == []
    assert Path.home().resolve() != Path.cwd()
    assert not Path.cwd().is_relative_to(ROOT)
    Path(f"left by the {turn}").write_text("")
    Path.home().joinpath("settings").mkdir()


def test_processes_of_a_test_start_in_its_places() -> None:
    code = (
        "import os, pathlib; print(os.getcwd(), pathlib.Path.home(), [n for n in os.environ if n.startswith('XDG_')])"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == f"{Path.cwd()} {Path.home()} []\n"


def test_watch_names_uses_of_a_folder(tmp_path: Path) -> None:
    watched, other = tmp_path / "runs", tmp_path / "runs-2"
    other.mkdir()
    watch = Watch((str(watched),))
    (other / "a").write_text("")
    assert watch.take() == []
    watched.mkdir()
    (watched / "a").write_text("")
    os.chdir(tmp_path)
    assert os.listdir("runs") == ["a"]
    uses = watch.take()
    assert uses == [f"os.mkdir {watched}", f"open {watched / 'a'}", f"os.listdir {watched}"]
    assert watch.take() == []


@pytest.mark.slow
def test_start_in_a_folder_with_runs_changes_no_result(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "home" / ".config" / "segapp").mkdir(parents=True)
    name = "tests/test_api.py::test_wrong_calls_are_named"
    words = [sys.executable, "-m", "pytest", "-n", "0", "-c", str(ROOT / "pyproject.toml"), str(ROOT / name)]
    environ = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
