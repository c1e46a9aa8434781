"""Trainers that are forked from a process with the imports behave as new processes do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from segapp.commands.sweep.warm import WarmError, WarmProcess, modules_of
from segapp.config import dump_config
from tests.support.live_runs import seen, small, wait_for
from tests.support.runs import events, merged

COUNTED = "from pathlib import Path\nwith Path({file!r}).open('a') as file:\n    file.write('imported ')\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "counted.py").write_text(COUNTED.format(file=str(folder / "imports")))
    return folder


@pytest.fixture(scope="module")
def warm(place: Path) -> Iterator[WarmProcess]:
    modules = ["counted", "segmentation_models_pytorch"]  # what `small` needs
    warm = WarmProcess(modules, {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"})
    yield warm
    warm.close()


@pytest.fixture
def begin(warm: WarmProcess, place: Path, tiny: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Starts a training of the tiny config into ./NAME, with its output in ./NAME.log."""
    Path("tiny.yaml").write_text(dump_config(small(tiny)))
    started = []

    def start(name: str, *words: str, **environ: str) -> Any:
        log, config = str(Path(f"{name}.log").absolute()), str(Path("tiny.yaml").absolute())
        command = ["train", "--plain", "--config", config, "--run", str(Path(name).absolute()), *words]
        started.append(warm.start(command, {**os.environ, "PYTHONPATH": str(place), **environ}, log))
        return started[-1]

    yield start
    for trainer in started:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(60)


def test_exit_codes_and_output_are_those_of_the_program(begin: Callable[..., Any]) -> None:
    done, wrong = begin("done", "train.epochs=1"), begin("wrong", "model.name=nowhere")
    assert (done.wait(120), wrong.wait(120)) == (0, 2)
    assert Path("done.log").read_text().splitlines()[-1] == "finished: 1 epochs"
    assert "error: " in Path("wrong.log").read_text()
    assert "Traceback" not in Path("wrong.log").read_text()
    assert events(Path("done"), "run_end")[-1]["status"] == "finished"


def test_killed_trainer_leaves_the_others_alone(begin: Callable[..., Any]) -> None:
    slow = {"SEGAPP_FAILPOINTS": "train.step=sleep:0.1"}
    killed, stopped = begin("killed", "train.epochs=500", **slow), begin("stopped", "train.epochs=500", **slow)
    for name in ("killed", "stopped"):
        wait_for(lambda name=name: len(seen(Path(name), "step")) >= 2)
    assert [os.getsid(each.pid) for each in (killed, stopped)] == [killed.pid, stopped.pid]
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    number = len(seen(Path("stopped"), "step"))
    wait_for(lambda: len(seen(Path("stopped"), "step")) > number)
    assert stopped.poll() is None
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == 75
    assert events(Path("stopped"), "run_end")[-1]["status"] == "stopped"


def test_modules_are_imported_once_and_variables_are_per_trainer(begin: Callable[..., Any], place: Path) -> None:
    config = Path("tiny.yaml").read_text()
    trainers = []
    for number in range(2):
        Path("tiny.yaml").write_text(config)
        trainers.append(begin(f"own{number}", "optim.name=counted:missing", "optim.options={}"))
    armed = begin("armed", SEGAPP_FAILPOINTS="train.step=2:kill")
    assert [each.wait(120) for each in trainers] == [2, 2]
    assert "counted" in Path("own0.log").read_text()
    assert armed.wait(120) == -signal.SIGKILL
    assert (place / "imports").read_text() == "imported "


def test_late_imports_follow_from_the_configs(tiny: dict[str, Any]) -> None:
    plain = merged(tiny)
    logged = merged(tiny, log={"tensorboard": True}, model={"library": "smp", "name": "Unet", "encoder": "resnet18"})
    assert modules_of([plain, plain]) == ["torchvision.models.segmentation"]
    assert modules_of([logged, plain]) == [
        "segmentation_models_pytorch", "torch.utils.tensorboard", "torchvision.models.segmentation"
    ]  # fmt: skip


def test_end_of_the_process_is_noticed_and_trainers_save(warm: WarmProcess, begin: Callable[..., Any]) -> None:
    """The last test of this file: it ends the process that the others share."""
    trainer = begin("run", "train.epochs=500", SEGAPP_FAILPOINTS="train.step=sleep:0.1")
    with pytest.raises(subprocess.TimeoutExpired):
        trainer.wait(0.1)
    wait_for(lambda: len(seen(Path("run"), "step")) >= 2)
    warm.close()
    assert trainer.poll() == -signal.SIGKILL, "nobody knows its status any more"
    wait_for(lambda: bool(events(Path("run"), "run_end")))
    assert events(Path("run"), "run_end")[-1]["status"] == "stopped"
    began_s = time.monotonic()
    with pytest.raises(WarmError, match="has ended"):
        warm.start(["train"], dict(os.environ), "log")
    assert time.monotonic() - began_s < 5
