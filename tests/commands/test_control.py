"""Trainers in processes of their own, controlled by `segapp ctl`."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from segapp.commands.runs import control_run, print_requeue_code, print_status, run_to_attach
from segapp.commands.spawn import is_interactive
from segapp.config import RunConfig, dump_config
from segapp.errors import CommandError, RunError
from segapp.run.commands import parse_command, send_command
from segapp.run.events import Device, DeviceMemory, EventWriter, Memory, RunStart, Step
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.view.runs import run_state
from segapp.view.wording import log_line
from segapp.waiting import lines_while
from tests.support.live_runs import assert_answered_once, background, ended_after, seen, small, three_devices, wait_for
from tests.support.runs import events, segapp, train


def written(config: RunConfig, folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(dump_config(config))
    return path


def ctl(folder: Path, *words: str, timeout_s: float = 100, **options: Any) -> int:
    """Run `segapp ctl RUN ... --wait` in this process, which saves the start of an interpreter."""
    return control_run(str(folder), list(words), wait=True, timeout_s=timeout_s, **options)


def test_detached_training_obeys_ctl_commands(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(three_devices(tiny, 10_000), tmp_path)
    run = tmp_path / "runs" / "tiny"
    with ended_after(run):
        started = segapp("train", "--config", "tiny.yaml", "--detach", cwd=tmp_path)
        assert started.returncode == 0, started.stderr
        assert "segapp attach tiny" in started.stdout
        holder = RunFolder(run).read_holder()
        assert holder is not None
        assert os.getsid(holder.pid) == os.getpgid(holder.pid) == holder.pid  # no terminal's session
        os.kill(holder.pid, signal.SIGHUP)

        assert ctl(run, "pause") == 0
        paused_at = events(run, "step")[-1]["step"]
        os.kill(holder.pid, signal.SIGUSR1)
        wait_for(lambda: [e for e in seen(run, "checkpoint") if e["step"] == paused_at])
        wait_for(lambda: seen(run, "memory"))
        status = json.loads(segapp("status", "tiny", "--json", cwd=tmp_path).stdout)
        assert (status["phase"], status["state"] in ("live", "busy")) == ("paused", True)
        assert status["devices"][0]["used_mib"] > 50
        os.kill(holder.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("segapp.commands.runs.lines_while", functools.partial(lines_while, first_s=0.1))
            assert ctl(run, "checkpoint", timeout_s=0.6) == 1
        os.kill(holder.pid, signal.SIGCONT)
        assert f"waiting for run tiny, process {holder.pid} on {holder.host}: it is " in capsys.readouterr().err
        assert ctl(run, "checkpoint") == 0
        assert events(run, "step")[-1]["step"] == paused_at
        assert ctl(run, "resume") == 0

        capsys.readouterr()
        assert ctl(run, "set", "gpu0_bsz=3") == 0
        said = capsys.readouterr().out
        assert said.index("split 3·1·1 of 5") < said.index("accepted: from epoch") < said.index("applied")
        wait_for(lambda: events(run, "step")[-1]["split"] == [3, 1, 1])
        assert ctl(run, "set", "gpu0_bsz=6") == 1  # rejected by ctl
        assert ctl(run, "cancel") == 1  # rejected by the trainer
        with pytest.raises(CommandError, match="did you mean pause"):
            ctl(run, "pauze")
        assert ctl(run, "stop", after_epoch=True) == 0
        wait_for(lambda: seen(run, "run_end"))  # written after the answer
    end = events(run, "run_end")[-1]
    assert (end["exit_code"], end["stopped_by"], end["step"] % 2) == (75, "command", 0)
    assert print_requeue_code(str(run), 75) == 0
    assert_answered_once(run)
    with pytest.raises(RunError, match="tiny is stopped"):
        ctl(run, "pause")


def test_second_resume_is_refused_while_the_first_starts(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The log is the first one's: viewers show how long ago its last line was written."""
    config = written(small(tiny), tmp_path)
    folder = RunFolder.create(path=tmp_path / "run")
    with folder:
        folder.write_info()
    folder.config_yaml.write_text(config.read_text())
    folder.log.write_text("starting: importing torch\n")
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(100)\n")
    with background(config, "--resume", "run", cwd=tmp_path, PYTHONPATH=str(tmp_path)) as first:
        wait_for(lambda: "importing torch" in (tmp_path / "lines.log").read_text())
        second = segapp("train", "--resume", "run", "--detach", cwd=tmp_path)
        assert (second.returncode, str(first.pid) in second.stderr) == (9, True), second.stderr
    assert folder.log.read_text() == "starting: importing torch\n"


def test_ctl_on_a_finished_run_is_refused(tiny: dict[str, Any], tmp_path: Path) -> None:
    assert train(small(tiny, 1), tmp_path / "run") == 0
    with pytest.raises(RunError, match="run is finished"):
        ctl(tmp_path / "run", "pause")
    with pytest.raises(CommandError, match="belongs to stop"):
        ctl(tmp_path / "run", "pause", after_epoch=True)
    # A command that arrives after the end is answered when the run is opened again.
    send_command(tmp_path / "run", parse_command("set lr_factor=0.1"))
    assert run_session(TrainRequest(small(tiny, 1), RunFolder(tmp_path / "run"))) == 0
    assert assert_answered_once(tmp_path / "run")["set lr_factor=0.1"]["status"] == "rejected"


def test_attach_without_run_takes_newest_live_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [RunFolder.create(name) for name in ("old", "new")]
    for age, folder in enumerate(folders):
        with folder:
            folder.write_info()
        for file in (folder.run_json, folder.lock):
            os.utime(file, (1e9 + age, 1e9 + age))
    assert run_to_attach(None).name == "new"
    assert run_to_attach("old").name == "old"
    with folders[0]:
        os.utime(folders[0].lock, (1e9, 1e9))
        assert run_to_attach(None).name == "old"
        assert run_state(folders[0].path) in ("live", "busy")
    # On another machine, whose lock is not seen here.
    folders[0].lock.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    os.utime(folders[0].lock, (1e9, 1e9))
    with EventWriter(folders[0].events) as writer:
        writer.write(Step(epoch=1, step=1, loss=1.0, lr=0.1))
    assert run_to_attach(None).name == "old"


def test_status_names_the_machine_of_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(path=tmp_path / "run")
    folder.write_info()
    devices = [Device(device="cuda:0", machine=name) for name in ("node1", "node2")]
    begun = RunStart(classes=["a"], num_params=7, batch_size=2, epochs=1, steps_per_epoch=5, devices=devices)
    with EventWriter(folder.events) as writer:
        writer.write(begun)
        writer.write(Memory(devices=[DeviceMemory(device="cuda:0", used_mib=2048.0)] * 2))
    print_status(str(folder.path), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-5:] for line in lines[-2:]] == [[f"node{i}", "cuda:0", "2.0", "GiB", "used"] for i in (1, 2)]
    print_status(str(folder.path), as_json=True)
    assert [device["machine"] for device in json.loads(capsys.readouterr().out)["devices"]] == ["node1", "node2"]
    line = log_line(begun, ["a"], None)
    assert line is not None
    assert line.text.endswith("on node1 cuda:0, node2 cuda:0")


@pytest.mark.parametrize(
    ("stdin", "stderr", "environ", "expected"),
    [
        (True, True, {"TERM": "xterm-256color"}, True),
        (False, True, {"TERM": "xterm-256color"}, False),
        (True, False, {"TERM": "xterm-256color"}, False),
        (True, True, {"TERM": "dumb"}, False),
        (True, True, {}, False),
        (True, True, {"TERM": "tmux", "RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_screen_is_shown_only_in_a_terminal(
    stdin: bool, stderr: bool, environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, is_terminal in (("stdin", stdin), ("stderr", stderr)):
        monkeypatch.setattr(sys, name, types.SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal))
    for name in ("TERM", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert is_interactive() is expected
