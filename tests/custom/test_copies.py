"""Copies of custom components in a run: they predict at another place, each checkpoint with its own version."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import segapp
import segapp.custom.sources as sources
import segapp.custom.trust as trust
from segapp.checkpoint.training_state import load_checkpoint
from segapp.commands.suspects import judge_masks
from segapp.config import RunConfig
from segapp.custom.trust import trusting
from segapp.errors import ConfigError
from segapp.session.request import plan_request
from segapp.session.session import run_session
from tests.support.programs import segapp as run_segapp
from tests.support.runs import alerts, differing, merged, train

NET = """
import time
from tests.support.own_parts import FolderData, Net as Plain, ce
time.sleep(0.01)  # as long as an import may take, in which another thread imports another version
from {where}klass_of_copies import CLASS

class Net(Plain):
    def forward(self, images):
        logits = super().forward(images)["out"]
        logits[:, CLASS] += 1000  # so every pixel tells which version of the neighbor has run
        return logits
"""
NAMES = {"file": "net_of_copies.py:Net", "package": "package_of_copies.inner.net_of_copies:Net"}
IMAGE = np.zeros((37, 43, 3), np.uint8)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder of its own, in which no code is accepted."""
    enter(tmp_path / "home", monkeypatch)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a folder, which is made, as another process would."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "")
    sources._modules.files.clear()
    trust._accepted.clear()
    for name in [name for name in sys.modules if "_of_copies" in name]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def write(kind: str, number: int) -> Path:
    """Writes a network that predicts one class everywhere to the current folder; returns the file with its number."""
    folder = Path() if kind == "file" else Path("package_of_copies", "inner")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net_of_copies.py").write_text(NET.format(where="" if kind == "file" else "."))
    neighbor = folder / "klass_of_copies.py"
    neighbor.write_text(f"CLASS = {number}\n")
    return neighbor


def config_of(tiny: dict[str, Any], kind: str = "file", **sections: Any) -> RunConfig:
    where = NAMES[kind].removesuffix("Net")
    own = {"model": {"library": "python", "name": f"{where}Net"}, "loss": {"name": f"{where}ce"}}
    data = {**tiny["data"], "format": f"{where}FolderData"}
    return merged({**tiny, **own, "data": data, "schedule": {"warmup_steps": 0}}, train={"epochs": 1}, **sections)


def trained(tiny: dict[str, Any], run: Path, kind: str = "file", *, number: int) -> Path:
    """Trains a network that predicts one class, and returns the folder of the run."""
    write(kind, number)
    assert train(config_of(tiny, kind), run) == 0
    return run


def predicted(target: Path) -> int:
    """The only class that a run or a checkpoint predicts."""
    (found,) = np.unique(segapp.load(target, trust_parts=True).predict(IMAGE))
    return int(found)


@pytest.mark.parametrize("kind", NAMES)
def test_run_predicts_with_its_copy_at_another_place(
    kind: str,
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = trained(tiny, tmp_path / "run", kind, number=1)
    loss = segapp.evaluate(run, trust_parts=True).loss
    assert predicted(run) == 1
    assert "note" not in capsys.readouterr().err
    write(kind, 2)
    assert predicted(run) == 1
    own = next(Path.cwd().rglob("net_of_copies.py"))
    note = f"note: {NAMES[kind]}: the run's copy is used, and {own} has changed since the training\n"
    assert capsys.readouterr().err == note
    elsewhere = enter(tmp_path / "elsewhere", monkeypatch)
    shutil.copytree(run, copied := elsewhere / "copied run")
    assert predicted(copied) == 1
    assert "note" not in capsys.readouterr().err
    assert segapp.evaluate(copied, trust_parts=True).loss == loss


def test_suspects_know_the_training_images_from_the_copy(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tiny, tmp_path / "run", number=1)
    with Path("net_of_copies.py").open("a") as file:
        file.write("FolderData.__init__ = lambda self, root, split, own=FolderData.__init__: own(self, root, 'val')\n")
    enter(Path.cwd(), monkeypatch)
    with trusting(True):
        found = judge_masks([str(run)], None, 20)
    assert {image.pair.image.parent.name for image in found.images} == {"val"}
    assert {path.parent.name for path in found.unjudged} == {"train"}


def test_each_checkpoint_predicts_with_its_own_version(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tiny, tmp_path / "run", number=1)
    first = Path(shutil.copy(run / "checkpoints" / "last.pt", run / "checkpoints" / "first.pt"))
    write("file", 2)
    with trusting(True):
        assert run_session(plan_request(None, ["train.epochs=3"], None, str(run))) == 0
    told = [each["message"] for each in alerts(run) if each["kind"] == "parts"]
    changed = "its source has changed since the checkpoint was saved; RUN/parts keeps the former one"
    assert told == [f"net_of_copies.py:{name}: {changed}" for name in ("FolderData", "Net", "ce")]
    other = trained(tiny, tmp_path / "other", number=0)
    enter(tmp_path / "elsewhere", monkeypatch)
    targets = {first: 1, run / "checkpoints" / "last.pt": 2, other: 0}
    assert [predicted(target) for target in (*targets, *reversed(targets))] == [1, 2, 0, 0, 2, 1]
    found: dict[Path, set[int]] = {target: set() for target in targets}
    threads = [
        threading.Thread(target=lambda target=target: found[target].update(predicted(target) for _ in range(5)))
        for target in targets
    ]
    with trusting(True):
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert found == {target: {number} for target, number in targets.items()}

    with pytest.raises(ConfigError, match=r"is not found here, and the run has 2 versions of it") as error:
        plan_request(None, ["train.epochs=4"], None, str(run))
    folders = {path.name: path for path in (run / "parts").iterdir()}
    assert len(folders) == 2
    assert all(name in str(error.value) for name in folders)
    wanted = next(path for path in folders.values() if "2" in (path / "klass_of_copies.py").read_text())
    [shutil.copy(path, Path.cwd()) for path in wanted.iterdir()]
    with trusting(True):
        assert plan_request(None, ["train.epochs=4"], None, str(run)).copies == {}


@pytest.mark.parametrize("damage", ["changed", "added", "lost"])
def test_copy_that_is_not_as_it_was_does_not_run(
    damage: str,
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = trained(tiny, tmp_path / "run", number=1)
    (copy,) = (run / "parts").glob("*/klass_of_copies.py")
    if damage == "lost":
        copy.unlink()
    else:
        (copy if damage == "changed" else copy.with_name("json.py")).write_text("CLASS = 2\n")
    enter(tmp_path / "elsewhere", monkeypatch)
    with trusting(True):
        assert plan_request(None, [], None, str(run)).copies == {}
    with pytest.raises(ConfigError, match=r"net_of_copies.py is not here, and the run has no intact copy of it"):
        predicted(run)
    write("file", 0)
    assert predicted(run) == 0
    assert "its source has changed since the training, and the run has no intact copy" in capsys.readouterr().err


def test_resume_takes_the_copy_of_a_missing_file(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "copied"):
        trained(tiny, tmp_path / name, number=1)
    more = ["train.epochs=2", "parallel.mode=ddp", "parallel.devices=[cpu,cpu]"]
    words = ("train", "--plain", "--trust-parts", *more, "--resume")
    assert run_segapp(*words, tmp_path / "own", cwd=Path.cwd(), SEGAPP_TEST_FORK="1").returncode == 0
    elsewhere = enter(tmp_path / "elsewhere", monkeypatch)
    (tmp_path / "copied").rename(elsewhere / "copied")
    done = run_segapp(*words, "copied", cwd=elsewhere, SEGAPP_TEST_FORK="1")
    assert done.returncode == 0, done.stderr
    own, copied = (load_checkpoint(folder).state for folder in (tmp_path / "own", elsewhere / "copied"))
    assert copied["position"] == own["position"]
    assert differing(copied["model"], own["model"]) == []
    assert copied["parts"] == own["parts"] == load_checkpoint(tmp_path / "own", "best").state["parts"]


def test_trust_is_asked_for_what_a_command_uses(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    write("file", 1)
    parts = "tests.support.own_parts"
    sections = {
        "data": {
            "format": f"{parts}:FolderData",
            "augment": [{"ScaledCrop": {}}, {"albumentations:HorizontalFlip": {}}],
        },
        "loss": {"name": f"{parts}:additive_ce"},
        "optim": {"name": "torch.optim:RMSprop"},
        "schedule": {"name": f"{parts}:falling"},
    }
    run = tmp_path / "run"
    assert train(config_of(tiny, **sections), run) == 0
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # another user
    model, data, loss = ("model.name = net", "data.format = tests", "loss.name = tests")
    commands = {
        "predict RUN image.png --out out": {model},
        "export RUN --out out.safetensors": {model},
        "export RUN --out out.onnx": {model, data},
        "eval RUN": {model, data, loss},
        "eval RUN RUN": {model, data},
        "suspects RUN": {model, data},
    }
    Path("image.png").touch()
    for words, asked in commands.items():
        code, _, said = command(*words.replace("RUN", str(run)).split())
        found = {part for part in (model, data, loss, "Flip", "optim.name", "schedule.name") if part in said}
        assert (code, found) == (2, asked), (words, said)
    with trusting(True):
        segapp.load(run)
    segapp.load(run)
    with pytest.raises(ConfigError, match=r"names code that would run: data.format = .*loss.name = [^=]*: add"):
        segapp.evaluate(run)


@pytest.mark.parametrize("number", [1, 2])
def test_equal_module_of_the_program_is_used(
    number: int, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tiny, tmp_path / "run", number=1)
    monkeypatch.syspath_prepend(str(enter(tmp_path / f"program {number}", monkeypatch)))
    write("file", number)
    import klass_of_copies  # type: ignore[import-not-found]
    import net_of_copies  # type: ignore[import-not-found]  # noqa: F401

    assert number == klass_of_copies.CLASS
    if number == 1:
        assert predicted(run) == 1
        return
    with pytest.raises(ConfigError, match=r"has imported another version of klass_of_copies .* start a new one"):
        predicted(run)
