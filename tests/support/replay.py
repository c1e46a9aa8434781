"""Plays a recorded run again, for demonstrations and pictures: a copy of its folder grows as the run did.

python -m tests.support.replay runs/demo 20
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from segapp.run.folder import RunFolder
from segapp.tui.app import run_ui

LONGEST_GAP_S = 60.0
"""A longer time without events counts as this one."""


def play(recorded: Path, events: Path, speed: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Append the lines of a recording to a file, each when it is due.

    Args:
        recorded: `events.jsonl` of a run.
        events: the file to append to.
        speed: seconds of the run per second.
        sleep: waits for some seconds.
    """
    last_s: float | None = None
    with recorded.open("rb") as lines, events.open("ab", buffering=0) as file:
        for line in lines:
            at_s = float(json.loads(line)["t"])
            sleep(min(max(0.0, at_s - (at_s if last_s is None else last_s)), LONGEST_GAP_S) / speed)
            file.write(line)
            last_s = at_s


def main(run: str, speed: str) -> None:
    """Show the screen of a run that is played again."""
    recorded = RunFolder(run)
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(shutil.copytree(recorded.path, Path(place) / recorded.name))
        folder.events.unlink()
        folder.acquire()
        threading.Thread(target=play, args=(recorded.events, folder.events, float(speed)), daemon=True).start()
        run_ui(folder, readonly=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
