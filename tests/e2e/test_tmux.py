"""The whole program in a terminal: tmux sends the keys and captures the screen."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segapp.commands.runs import control_run
from segapp.config import dump_config
from segapp.run.folder import RunFolder
from segapp.run.lock import is_alive
from segapp.tui.app import TYPING_S
from tests.support import ROOT
from tests.support.live_runs import wait_for
from tests.support.runs import events, merged

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

SEGAPP = f"{shlex.quote(sys.executable)} -m segapp"


class Terminal:
    """A tmux server with one window of 120 x 36."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._num_servers = 0

    def tmux(self, *arguments: str, must_work: bool = False) -> str:
        words = ["tmux", "-L", f"{self.name}-{self._num_servers}", "-f", "/dev/null", *arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert not must_work or done.returncode == 0, done.stderr
        return done.stdout

    def start(self, command: str, **env: str) -> None:
        self.tmux("kill-server")
        self._num_servers += 1  # another socket: a terminating server accepts a new session and then drops it
        words = [f"{name}={value}" for name, value in {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **env}.items()]
        unset = [word for name in ("RANK", "NO_COLOR", "COLUMNS", "LINES") for word in ("-u", name)]
        line = f"{shlex.join(['env', *unset, *words])} {command}; echo CODE=$?; sleep 600"
        self.tmux("new-session", "-d", "-x", "120", "-y", "36", "-c", str(self.folder), line, must_work=True)

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def wait_for(self, *texts: str) -> None:
        deadline_s = time.monotonic() + 100
        while any(text not in (screen := self.tmux("capture-pane", "-p")) for text in texts):
            assert time.monotonic() < deadline_s, f"{texts} never came:\n{screen}"
            time.sleep(0.1)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(f"segapp-test-{os.getpid()}", tmp_path)
    try:
        yield found
    finally:
        found.tmux("kill-server")
        holder = RunFolder(tmp_path / "runs" / "tiny").read_holder()
        if holder is not None and is_alive(holder):
            os.kill(holder.pid, 9)


def test_run_survives_a_lost_terminal_and_is_controlled_again(
    tiny: dict[str, Any], tmp_path: Path, terminal: Terminal
) -> None:
    config = merged(
        {**tiny, "model": {"library": "python", "name": "tests.support.own_parts:Net"}},
        train={"epochs": 500, "batch_size": 3, "ema": None},
        parallel={"mode": "dp", "devices": ["cpu", "cpu", "cpu"]},
    )
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    run = tmp_path / "runs" / "tiny"
    # A step takes long, so that a change that is pending until the next epoch can be observed.
    slow = {"SEGAPP_FAILPOINTS": "train.step=sleep:0.7", "SEGAPP_TRUST_PARTS": "1", "PYTHONPATH": str(ROOT)}
    terminal.start(f"{SEGAPP} train --config tiny.yaml", **slow)
    terminal.wait_for("tiny", "LIVE", "Loss")
    holder = RunFolder(run).read_holder()
    assert holder is not None
    terminal.tmux("kill-server")
    steps = len(wait_for(lambda: events(run, "step")))
    wait_for(lambda: len(events(run, "step")) >= steps + 2)
    assert is_alive(holder)
    assert control_run(str(run), ["set", "lr_factor=0.5"], wait=True, timeout_s=60) == 0

    terminal.start(f"{SEGAPP} attach")
    terminal.wait_for("tiny", "LIVE", "Loss")
    terminal.keys("b")
    terminal.wait_for("enter to send")
    terminal.keys("2")
    terminal.wait_for("ok: split 2·1·0")
    terminal.keys("Enter")
    wait_for(lambda: [e for e in events(run, "gpu0_bsz") if e["status"] == "pending"])  # shown until the epoch ends
    applied = wait_for(lambda: [e for e in events(run, "gpu0_bsz") if e["status"] == "applied"])[0]
    assert (applied["new"], applied["split"]) == (2, [2, 1, 0])
    terminal.wait_for("2·1·0")
    terminal.keys("p")
    terminal.wait_for("● PAUSED")
    terminal.keys("c")
    wait_for(lambda: [e for e in events(run, "command") if (e["command"], e["status"]) == ("checkpoint", "applied")])
    at = events(run, "step")[-1]["step"]
    assert [e for e in events(run, "checkpoint") if e["step"] == at]
    terminal.keys("p")
    terminal.wait_for("LIVE")
    terminal.keys("S")
    terminal.wait_for("After this epoch", "Now: saves about step")
    time.sleep(2 * TYPING_S)  # faster keys are typed text, which sends nothing
    terminal.keys("x")
    terminal.wait_for("STOPPED")
    assert events(run, "run_end")[-1]["exit_code"] == 75
    terminal.keys("q")
    terminal.wait_for("CODE=0")
    final = [e["status"] for e in events(run, "command") if e["status"] != "accepted"]
    assert final == ["applied"] * 6
