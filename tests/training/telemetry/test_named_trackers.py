"""A tracker in a run's own config gets nothing unless this user has named it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from segapp.config import load_config
from segapp.config.trust import name_trackers, unnamed_trackers
from segapp.session.request import plan_request
from tests.support.fault_runs import finished_run
from tests.support.programs import segapp as program


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEGAPP_TRACKERS", "MLFLOW_TRACKING_URI", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SEGAPP_TRACKERS", "")  # so that it is restored after the test


@pytest.fixture(scope="module")
def finished(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, next to its config."""
    return finished_run(tmp_path_factory.mktemp("finished"), tiny_root)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, whose config names a database outside of it."""
    shutil.copytree(finished, tmp_path / "run")
    write_log(tmp_path / "run" / "config.yaml", mlflow=database(tmp_path))
    return tmp_path / "run"


def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def write_log(config: Path, **log: str | None) -> None:
    raw = yaml.safe_load(config.read_text())
    raw["log"] |= log
    config.write_text(yaml.safe_dump(raw))


def test_tracker_of_a_stranger_gets_nothing_and_one_line_says_so(run: Path) -> None:
    uri = database(run.parent)
    done = program("train", "--plain", "--resume", str(run), "train.epochs=2", cwd=run.parent, SEGAPP_TRACKERS="")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in (done.stdout + done.stderr).splitlines() if "you have not named it" in line)
    assert f"'log.mlflow=\"{uri}\"'" in line
    assert not (run.parent / "mlflow.db").exists()
    assert load_config(run / "config.yaml").log.mlflow == uri  # a later resume may name it


KEYS = [("mlflow", "MLFLOW_TRACKING_URI"), ("wandb", "WANDB_PROJECT")]


def planned(*words: str, config: str | None = None, resume: str = "run") -> set[str]:
    """Return the trackers of a resumed run that the user has not named."""
    return {*unnamed_trackers(plan_request(config, list(words), None, resume).config.log)}


@pytest.fixture
def here(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_log(run / "config.yaml", mlflow="http://box:5000", wandb="own project")
    monkeypatch.chdir(run.parent)
    return run.parent


@pytest.mark.parametrize(("key", "variable"), KEYS)
def test_tracker_is_named_by_override_environment_or_config(
    key: str, variable: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ({"mlflow", "wandb"} - {key}).pop()
    value = {"mlflow": "http://box:5000", "wandb": "own project"}[key]
    assert planned() == {"mlflow", "wandb"}
    monkeypatch.setenv(variable, f"{value}x")
    assert planned() == {"mlflow", "wandb"}
    monkeypatch.setenv(variable, value)
    assert planned() == {other}
    monkeypatch.delenv(variable)
    assert planned() == {other}, "a tracker that was used is in the record"
    shutil.rmtree(Path.home() / ".local")
    assert planned() == {"mlflow", "wandb"}
    assert planned(f"log.{key}={value}") == {other}


def test_config_names_its_own_trackers_only(here: Path) -> None:
    shutil.copyfile(here / "run" / "config.yaml", here / "own.yaml")
    write_log(here / "own.yaml", mlflow="http://other:5000")
    assert planned(config="own.yaml") == {"mlflow"}


def test_config_in_a_run_or_a_sweep_names_nothing(here: Path) -> None:
    assert planned(config="run/config.yaml") == {"mlflow", "wandb"}
    (here / "link.yaml").symlink_to("run/config.yaml")
    assert planned(config="link.yaml") == {"mlflow", "wandb"}
    (here / "sweep" / "configs").mkdir(parents=True)
    (here / "sweep" / "sweep.json").write_text("{}")
    shutil.copyfile(here / "run" / "config.yaml", here / "sweep" / "configs" / "a.yaml")
    request = plan_request("sweep/configs/a.yaml", [], here / "sweep" / "a", None)
    assert {*unnamed_trackers(request.config.log)} == {"mlflow", "wandb"}


def test_new_training_names_its_trackers(here: Path) -> None:
    shutil.copyfile(here / "run" / "config.yaml", here / "own.yaml")
    plan_request("own.yaml", [], here / "new", None)
    assert planned() == set()


def test_names_work_without_a_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert planned() == {"mlflow", "wandb"}
    assert planned("log.wandb=own project") == {"mlflow"}


def test_record_is_private_and_has_each_tracker_once(here: Path) -> None:
    old = os.umask(0)
    try:
        for _ in range(3):
            planned("log.wandb=own project")
    finally:
        os.umask(old)
    record = Path.home() / ".local/state/segapp/trackers"
    assert record.read_text() == 'log.wandb="own project"\n'
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    unnamed = load_config("run/config.yaml").log
    record.write_text("".join(f"log.{key}={json.dumps(getattr(unnamed, key))}\n" for key in ("mlflow", "wandb")))
    assert planned() == set()
    record.parent.chmod(0o777)  # anyone could have written it
    assert planned() == {"mlflow"}, "the other one was named in this process"


def test_a_value_of_several_lines_names_one_tracker(here: Path) -> None:
    log = load_config("run/config.yaml").log
    name_trackers(log.model_copy(update={"mlflow": 'x"\nlog.wandb="own project'}), ["mlflow"])
    name_trackers(log, ["mlflow"])
    assert {*unnamed_trackers(log)} == {"wandb"}
