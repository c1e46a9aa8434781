"""Exit codes of commands: those that their help and the page `exit-codes` state, against what the commands do."""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from segapp.__main__ import main
from segapp.checkpoint.training_state import save_checkpoint
from segapp.cli import app, ckpt
from segapp.run.checkpoints import CheckpointFacts
from segapp.run.folder import RunFolder
from tests.support.reference import stated_exit_codes

STATED = stated_exit_codes()


def test_every_command_with_codes_of_its_own_states_them() -> None:
    own = set()
    for group, prefix in ((app, ""), (ckpt, "ckpt ")):
        for info in group.registered_commands:
            assert info.callback is not None
            if re.search(r"sys\.exit\(|raise typer\.Exit\(", inspect.getsource(info.callback)):
                own.add(prefix + (info.name or info.callback.__name__))
    assert own - {"attach"} == set(STATED) - {"predict", "export", "init"}  # attach: always 0; the others: of an error


def bad_ids(folder: Path, tiny: dict[str, Any]) -> list[str]:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    return ["check", "--config", "tiny.yaml", "data.classes=[ground,box]"]


def broken_loss(folder: Path, _: Any) -> list[str]:
    (folder / "broken.py").write_text("def loss():\n    raise KeyError('weights')\n")
    return ["check-part", "broken.py:loss", "--as", "loss"]


def damaged_checkpoint(folder: Path, _: Any) -> list[str]:
    run = RunFolder.create(path=folder / "run")
    run.write_info()
    save_checkpoint(run.checkpoints, {"model": {"w": torch.zeros(2)}}, CheckpointFacts(step=1, epoch=1, position=1))
    for path in run.checkpoints.rglob("*.pt"):
        path.write_bytes(path.read_bytes()[:-9])
    return ["ckpt", "verify", "run"]


@pytest.mark.parametrize(("words_of", "code"), [(bad_ids, 3), (broken_loss, 2), (damaged_checkpoint, 4)])
def test_command_exits_with_the_code_that_its_help_states(
    words_of: Callable[[Path, Any], list[str]], code: int, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(Path(), tiny)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code, capsys.readouterr()
    command = max((name for name in STATED if " ".join(words).startswith(name)), key=len)
    assert str(code) in STATED[command]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("place", ["command", "import"])
def test_interrupted_command_names_its_signal(place: str, number: signal.Signals, tmp_path: Path) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored by the program that started the tests, such as nohup")
    interrupt = f"import signal\nsignal.raise_signal({number:d})\n"
    (tmp_path / "interrupts.py").write_text(interrupt)
    body = interrupt if place == "command" else "import interrupts\n"
    (tmp_path / "program.py").write_text(
        "from segapp.__main__ import main\nfrom segapp.cli import app\n\n\n@app.command()\ndef wait() -> None:\n    "
        + body.replace("\n", "\n    ")
        + "print('not interrupted')\n\n\nmain(['wait'])\n"
    )
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"stopped by {number.name}\n")
