"""A tracker in a run's own config gets nothing unless this user has named it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from segapp.config import load_config
from segapp.config.trust import name_tracker, unnamed_tracker
from segapp.session.request import plan_request
from tests.support.fault_runs import finished_run
from tests.support.programs import segapp as program


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEGAPP_TRACKERS", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SEGAPP_TRACKERS", "")  # so that it is restored after the test


@pytest.fixture(scope="module")
def finished(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, next to its config."""
    return finished_run(tmp_path_factory.mktemp("finished"), tiny_root)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, whose config names a tracker."""
    shutil.copytree(finished, tmp_path / "run")
    write_log(tmp_path / "run" / "config.yaml", wandb="own project")
    return tmp_path / "run"


def write_log(config: Path, **log: str | None) -> None:
    raw = yaml.safe_load(config.read_text())
    raw["log"] |= log
    config.write_text(yaml.safe_dump(raw))


def test_tracker_of_a_stranger_gets_nothing_and_one_line_says_so(run: Path) -> None:
    done = program("train", "--plain", "--resume", str(run), "train.epochs=2", cwd=run.parent, SEGAPP_TRACKERS="")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in (done.stdout + done.stderr).splitlines() if "you have not named it" in line)
    assert "'log.wandb=\"own project\"'" in line
    assert not (run / "wandb").exists()
    assert load_config(run / "config.yaml").log.wandb == "own project"  # a later resume may name it


def is_named(*words: str, config: str | None = None) -> bool:
    """Return whether the user has named the tracker of a resumed run."""
    return unnamed_tracker(plan_request(config, list(words), None, "run").config.log) is None


@pytest.fixture
def here(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(run.parent)
    return run.parent


def test_tracker_is_named_by_override_environment_or_config(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_named()
    monkeypatch.setenv("WANDB_PROJECT", "own projectx")
    assert not is_named()
    monkeypatch.setenv("WANDB_PROJECT", "own project")
    assert is_named()
    monkeypatch.delenv("WANDB_PROJECT")
    assert is_named(), "a tracker that was used is in the record"
    shutil.rmtree(Path.home() / ".local")
    assert not is_named()
    assert is_named("log.wandb=own project")


def test_config_names_its_own_trackers_only(here: Path) -> None:
    shutil.copyfile(here / "run" / "config.yaml", here / "own.yaml")
    write_log(here / "own.yaml", wandb="other project")
    plan_request("own.yaml", [], here / "new", None)
    assert not is_named()


def test_config_in_a_run_or_a_sweep_names_nothing(here: Path) -> None:
    assert not is_named(config="run/config.yaml")
    (here / "link.yaml").symlink_to("run/config.yaml")
    assert not is_named(config="link.yaml")
    (here / "sweep" / "configs").mkdir(parents=True)
    (here / "sweep" / "sweep.json").write_text("{}")
    shutil.copyfile(here / "run" / "config.yaml", here / "sweep" / "configs" / "a.yaml")
    request = plan_request("sweep/configs/a.yaml", [], here / "sweep" / "a", None)
    assert unnamed_tracker(request.config.log) == 'log.wandb="own project"'


def test_new_training_names_its_trackers(here: Path) -> None:
    shutil.copyfile(here / "run" / "config.yaml", here / "own.yaml")
    plan_request("own.yaml", [], here / "new", None)
    assert is_named()


def test_names_work_without_a_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert not is_named()
    assert is_named("log.wandb=own project")


def test_record_is_private_and_has_each_tracker_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.umask(0)
    try:
        for _ in range(3):
            is_named("log.wandb=own project")
    finally:
        os.umask(old)
    record = Path.home() / ".local/state/segapp/trackers"
    assert record.read_text() == 'log.wandb="own project"\n'
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    monkeypatch.setenv("SEGAPP_TRACKERS", "")
    assert is_named()
    record.parent.chmod(0o777)  # anyone could have written it
    assert not is_named()


def test_a_value_of_several_lines_names_one_tracker(here: Path) -> None:
    log = load_config("run/config.yaml").log
    name_tracker(log.model_copy(update={"wandb": 'x"\nlog.wandb="own project'}))
    assert unnamed_tracker(log) is not None
