"""A wheel has no images of the demo: the first training draws them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from segapp.datasets import demo
from segapp.datasets.layouts.formats import DataLocation, check_root
from segapp.errors import DataError, StorageError
from tests.support import ROOT

AFTER = """

def write_demo(out):
    (out / "leftImg8bit").mkdir()
    (out / "scene.png").write_text(str(sorted(p.name for p in Path("data").glob("*"))))
    {after}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program as in an installed package, with a short drawing, and an empty current folder."""
    here = tmp_path / "an empty folder"
    here.mkdir()
    monkeypatch.chdir(here)
    path = tmp_path / "site-packages/demo/make_demo.py"
    path.parent.mkdir(parents=True)
    (path.parent / "demo_drawing").symlink_to(ROOT / "data/demo_drawing")
    monkeypatch.setattr(demo, "_PROGRAMS", (tmp_path / "no clone/make_demo.py", path))
    monkeypatch.syspath_prepend(tmp_path)  # at the end, the path of modules is again as before
    write(path)
    return path


def write(program: Path, after: str = "") -> None:
    program.write_text((ROOT / "data/make_demo.py").read_text().partition("def main")[0] + AFTER.format(after=after))


def test_a_missing_demo_is_drawn_at_once_as_a_whole(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.draw_demo("data/demo")
    assert "drawing the images of the demo into data/demo" in capsys.readouterr().err
    (seen,) = yaml.safe_load(Path("data/demo/scene.png").read_text())
    assert seen != "demo"  # until all images are there
    assert os.listdir("data") == ["demo"]
    demo.draw_demo("data/demo")
    assert capsys.readouterr() == ("", "")


def test_other_data_and_what_is_there_are_left(program: Path) -> None:
    demo.draw_demo("data/other")
    assert not Path("data").exists()
    Path("data").mkdir()
    Path("data/demo").symlink_to("gone")  # a disk that is not mounted
    demo.draw_demo("data/demo")
    assert os.listdir("data") == ["demo"]


@pytest.mark.parametrize(
    ("after", "error", "words"),
    [
        ("raise OSError(28, 'No space left on device')", StorageError, "cannot draw the demo into data/demo: No space"),
        ("raise KeyboardInterrupt", KeyboardInterrupt, "^$"),
    ],
)
def test_half_a_demo_is_removed(program: Path, after: str, error: type[BaseException], words: str) -> None:
    write(program, after)
    with pytest.raises(error, match=words):
        demo.draw_demo("data/demo")
    assert os.listdir("data") == []


def test_a_demo_that_another_training_drew_first_is_kept(program: Path) -> None:
    write(program, "Path('data/demo/first').mkdir(parents=True)")
    demo.draw_demo("data/demo")
    assert os.listdir("data/demo") == ["first"]
    assert os.listdir("data") == ["demo"]


def test_train_draws_before_it_looks_for_the_data(tmp_path: Path) -> None:
    code = "import segapp.datasets.demo as d; d.draw_demo = lambda root: print('drawn:', root)\n"
    code += "from segapp.__main__ import main; main()"
    words = ["train", "--plain", "--config", "demo.yaml"]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True, env=with_root())
    assert done.stdout == "drawn: data/demo\n"
    assert done.returncode == DataError.exit_code
    assert "data root data/demo does not exist" in done.stderr
    assert os.listdir(tmp_path) == []


def with_root() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_other_commands_say_what_draws_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"get it: segapp train --config demo\.yaml draws it$"):
        check_root(DataLocation("cityscapes", demo.DEMO_ROOT))
    with pytest.raises(DataError, match=r"get it: leftImg8bit_trainvaltest\.zip"):
        check_root(DataLocation("cityscapes", "data/dem"))


def test_the_wheel_has_the_program_and_its_parts() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    in_wheel, in_clone = (path.relative_to(ROOT).as_posix() for path in demo._PROGRAMS)
    assert included["force-include"][in_clone] == in_wheel
    parts = {source: place for source, place in included["force-include"].items() if source.startswith("data/demo_")}
    assert parts == {"data/demo_drawing": "segapp/demo/demo_drawing"}
    assert yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["data"]["root"] == demo.DEMO_ROOT


@pytest.mark.slow
def test_the_drawn_demo_is_the_one_in_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # at the end, the path of modules is again as before
    demo.draw_demo("data/demo")
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")}
    assert names == {path.relative_to(ROOT).as_posix() for path in (ROOT / "data/demo").rglob("*.png")}
