"""A rank that waits for others says so at once; it ends by a signal, as a start does that is stuck in C."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from segapp.config import dump_config
from tests.support import ROOT
from tests.support.live_runs import small, wait_for
from tests.support.programs import start
from tests.support.runs import events


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize(("number", "rank", "size"), [(signal.SIGINT, 1, 3), (signal.SIGTERM, 0, 2)])
def test_rank_that_waits_says_so_and_ends_by_a_signal(
    number: signal.Signals, rank: int, size: int, tiny: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(dump_config(small(tiny)))
    port = free_port()
    environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    words = ("train", "--plain", "--config", "own.yaml", "--run", "run")
    program = start(*words, cwd=tmp_path, logs=tmp_path, GLOO_SOCKET_IFNAME="lo", **environ)
    others = f"{size - 1} other rank{'s' if size > 2 else ''}"
    line = f"rank {rank} of {size} waits for {others} at localhost:{port}, for at most 600 s"
    wait_for(lambda: line in program.stderr, 60)
    began_s = time.monotonic()
    program.send(number)
    assert program.wait(30) == 128 + number
    assert time.monotonic() - began_s < 6  # 0.8 s on an idle machine; 600 s before
    assert "Traceback" not in program.stderr
    assert not (tmp_path / "run").exists()


STUCK = """
import ctypes, os
from pathlib import Path
from tests.support.own_parts import Net

def net(num_classes):
    if "STUCK" in os.environ:
        mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        Path("stuck").touch()
        lock(mutex)  # a call of C that a signal does not end
    return Net(num_classes)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_start_that_is_stuck_in_c_ends_with_an_event(
    number: signal.Signals, code: int, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """A new run has nothing to save; a run that is resumed has its checkpoint."""
    config = small(tiny, 2).model_dump(mode="json") | {"model": {"library": "python", "name": "stuck:net"}}
    (tmp_path / "own.yaml").write_text(json.dumps(config))
    (tmp_path / "stuck.py").write_text(STUCK)
    words = ["train", "--plain", "--trust-parts", "--config", "own.yaml", "--run", "run"]
    paths = f"{tmp_path}:{ROOT}"
    if code == 75:
        done = start(*words, "train.epochs=1", cwd=tmp_path, logs=tmp_path, PYTHONPATH=paths).finish()
        assert done.returncode == 0, done.stderr
        words += ["--resume"]
    program = start(*words, cwd=tmp_path, logs=tmp_path, PYTHONPATH=paths, STUCK="1")
    wait_for(lambda: (tmp_path / "stuck").exists(), 60)
    time.sleep(0.3)
    program.send(number)
    assert program.wait(30) == code, program.stderr
    end = events(tmp_path / "run", "run_end")[-1]
    assert (end["status"], end["exit_code"], end["stopped_by"]) == ("stopped", code, "signal")
    saved = "a checkpoint was saved" if code == 75 else "nothing was there to save yet"
    assert end["reason"] == f"{number.name}: {saved}"
