"""Data and memory that go away while a training runs (F43, F46, F47, N04)."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.fault_runs import SYNCHRONOUS, FaultRun, Invariants, case, needs, traced
from tests.support.hostile_files import write_picture

NewRun = Callable[..., FaultRun]


@pytest.mark.sampled(3)
@case("F46", how="an image removed under the run, and the whole data folder", passes="exit 3, the file named, exact")
@case(
    "F46",
    how="an image, a mask replaced by noise, or an image by one of another size, under the run; then put back",
    passes="exit 3, the file named, exact",
)
@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("images/train/03.png", None),
        ("images/train/03.png", lambda path: path.write_bytes(os.urandom(500))),
        ("images/train/03.png", lambda path: write_picture(path, np.zeros((48, 60, 3), np.uint8))),
        ("masks/train/03.png", lambda path: path.write_bytes(os.urandom(500))),
        (".", None),
    ],
    ids=["file gone", "noise", "other size", "mask of noise", "folder gone"],
)
def test_data_changed_under_the_run_exit_3(
    new_run: NewRun, invariants: Invariants, name: str, change: Callable[[Path], object] | None
) -> None:
    run = new_run(data={"workers": 1})
    path = run.copy_data() / name
    program = run.start(failpoints="train.step=sleep:0.2")
    run.wait_for_step(3, program)
    path.rename(run.work / "elsewhere")
    if change is not None:
        change(path)
    says = ("does not exist",) if change is None else ()
    invariants.assert_clear(run.ended(program), 3, name if name != "." else "data/", *says)
    (run.work / "elsewhere").replace(path)
    invariants.check(run)


@pytest.mark.sampled(2)
@case("F47", how="strace: EIO at one read of an image, then a healthy disk", passes="tried again, exact")
@case("F47", how="strace: EIO at every read of an image", passes="exit 3, the file named, saved")
@pytest.mark.faults
@pytest.mark.parametrize("when", ["1", "1+"])
def test_one_read_error_is_retried(new_run: NewRun, invariants: Invariants, when: str) -> None:
    needs("strace")
    run = new_run(checkpoint={"every_steps": None})
    path = Path(run.config.data.root) / "images" / "train" / "03.png"
    program = run.start(failpoints="train.step=1:stop")
    with traced(run, program, "-P", str(path), "-e", f"inject=read:error=EIO:when={when}") as trace:
        done = run.ended(program)
    assert "EIO" in trace.read_text()
    if when == "1":
        assert done.returncode == 0, done.stderr
    else:
        invariants.assert_clear(done, 3, "03.png", "Input/output error")
    invariants.check(run)


@case(
    "N04",
    how="RLIMIT_AS 30 MiB above what the training holds before a step",
    passes="tried in pieces, then exit 6, saved; a resume with more memory goes on",
)
@pytest.mark.faults_long
def test_address_space_limit_exits_6_and_resumes(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(data={"crop_px": [384, 384], "scale": [0.5, 8]}, train={"epochs": 2, "batch_size": 5})
    run.train(failpoints=f"train.step=2:kill;{SYNCHRONOUS}")
    program = run.start(failpoints="train.step=1:stop")
    run.wait_for(lambda: " T " in Path(f"/proc/{program.pid}/stat").read_text(), program)
    held = int(Path(f"/proc/{program.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(program.pid, resource.RLIMIT_AS, (held + 30 * 2**20, held + 30 * 2**20))
    program.send(signal.SIGCONT)
    done = run.ended(program)
    invariants.assert_clear(done, 6, "memory")
    invariants.check(run, resume=False)
    assert run.train().returncode == 0
