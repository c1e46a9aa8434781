"""Ranks that die, raise, stall or are told to stop: every one ends, with a cause and nothing left (gloo, two ranks)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import EACH_SAVE, MODEL, FaultRun, Invariants, case

NewRun = Callable[..., FaultRun]

pytestmark = [pytest.mark.faults_long, pytest.mark.timeout(1200)]

DDP = {"parallel": {"mode": "ddp", "devices": ["cpu", "cpu"]}}


def ranks_of(run: FaultRun) -> dict[int, int]:
    """Process ids of the ranks, by rank."""
    found = {}
    for pid in run.left_behind():
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        for rank in (0, 1):
            if b"\0RANK=%d\0" % rank in environ and b"-m\0segapp\0train" in words:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if b"RANK=%d" % rank not in Path(f"/proc/{parent}/environ").read_bytes():
                    found[rank] = pid
    return found


def begun(new_run: NewRun, **sections: object) -> tuple[FaultRun, object]:
    run = new_run(**{**DDP, "train": {"epochs": 60, "hang_timeout_s": 6.0}, **sections})
    program = run.start(failpoints="train.step=sleep:0.1")
    run.wait_for_step(3, program, 400)  # a launcher and two ranks import the program, also on a busy machine
    return run, program


@case("X01", how="SIGKILL to rank 1", passes="all end, 137 or 8, the rank is named, no orphans, nothing lost")
def test_killed_rank_ends_all_and_is_named(new_run: NewRun, invariants: Invariants) -> None:
    run, program = begun(new_run)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    done = run.ended(program, 120)  # type: ignore[arg-type]
    assert done.returncode in (8, 137), done.stderr
    assert re.search(r"^error: .*rank 1\b", done.stderr, re.MULTILINE), done.stderr
    invariants.check(run, resume=False)


@case("X01", how="SIGSTOP to rank 1 (it stalls)", passes="stacks, exit 8, no orphans, nothing lost")
def test_stalled_rank_exits_8_with_stacks(new_run: NewRun, invariants: Invariants) -> None:
    run, program = begun(new_run)
    os.kill(ranks_of(run)[1], signal.SIGSTOP)
    done = run.ended(program, 180)  # type: ignore[arg-type]
    assert done.returncode == 8, done.stderr
    assert "all stacks are in" in (run.events("run_end")[-1]["reason"] or "")
    assert (run.folder / "stacks.log").stat().st_size > 0
    invariants.assert_clean_processes(run, within_s=10)
    invariants.assert_nothing_lost(run)


@case("X01", how="rank 1 raises in its forward pass", passes="all end, the cause is said, no orphans, nothing lost")
def test_raising_rank_ends_all_and_cause_is_named(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(**DDP)
    done = run.train(failpoints="train.forward.rank1=6:raise:RuntimeError", timeout_s=180)
    assert done.returncode in (1, 8), done.stderr
    assert "failpoint train.forward.rank1" in (run.folder / "logs" / "rank-0001.log").read_text()
    invariants.check(run, timeout_s=180)


@case("X01", how="rank 0 hangs in a save for ever", passes="stacks, exit 8 or 10, no orphans, nothing lost")
def test_save_that_never_returns_ends_all_with_stacks(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(**DDP, train={"epochs": 60, "hang_timeout_s": 6.0})
    done = run.train(failpoints=f"ckpt.before_fsync=4:hang;{EACH_SAVE}", timeout_s=240)
    assert done.returncode in (8, 10), done.stderr
    assert "rank 0, round 0, process" in (run.folder / "stacks.log").read_text()
    assert "rank 1, round 0, process" in (run.folder / "logs" / "rank-0001-stacks.log").read_text()
    invariants.assert_clean_processes(run, within_s=10)
    invariants.assert_nothing_lost(run)


@case("X02", how="batches of 3 over 2 ranks, 4 images to evaluate over 3 ranks", passes="no hang, one device's losses")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_batches_over_ranks_equal_one_device(new_run: NewRun, num_ranks: int) -> None:
    sections: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 4 if num_ranks == 3 else 3, "ema": None},
        "model": {**MODEL, "options": {**MODEL["options"], "psp_dropout": 0.0}},
        "optim": {"name": "sgd", "lr": 0.001},
        "data": {"crop_px": [48, 64]},
    }
    alone = new_run("alone", **sections)
    assert alone.train().returncode == 0
    run = new_run(**sections, parallel={"mode": "ddp", "devices": ["cpu"] * num_ranks})
    done = run.train(timeout_s=240)
    assert done.returncode == 0, done.stderr
    losses = [[event["loss"] for event in each.events("step")] for each in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert [event["num_images"] for event in run.events("val")] == [4, 4]


@case("X02", how="one image for two ranks to train on; one to evaluate", passes="exit 2, told once; evaluated by one")
@pytest.mark.parametrize(("num_train", "num_val", "exit_code"), [(1, 4, 2), (3, 1, 0)])
def test_fewer_images_than_ranks_are_refused_or_evaluated(
    new_run: NewRun, num_train: int, num_val: int, exit_code: int
) -> None:
    run = new_run(**DDP, train={"epochs": 1})
    root = run.work / "data"
    shutil.copytree(run.config.data.root, root)
    for path in [*root.rglob("train/*"), *root.rglob("val/*")]:
        if int(path.stem) >= (num_train if path.parent.name == "train" else num_val):
            path.unlink()
    done = run.train(f"data.root={root}", timeout_s=180)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.count("error:") == (exit_code > 0), done.stderr
    if exit_code == 0:
        assert [event["num_images"] for event in run.events("val")] == [1]


@case("X04", how="two runs of two ranks at once", passes="both finish")
def test_two_runs_at_once_both_finish(new_run: NewRun) -> None:
    runs = [new_run(name, **DDP, train={"epochs": 1}) for name in ("a", "b")]
    programs = [run.start() for run in runs]
    for run, program in zip(runs, programs, strict=True):
        assert run.ended(program, 240).returncode == 0, program.stderr


@case("X04", how="the port of the rendezvous is in use", passes="exit 8, one line that names it")
def test_rendezvous_port_in_use_exits_8_and_is_named(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(**DDP)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        invariants.assert_clear(run.train(timeout_s=120, **ranks), 8, port)


@case("X03", how="SIGTERM to one rank only; to the launcher", passes="both ranks stop at the same step, saved, 75")
@pytest.mark.parametrize("whom", ["rank", "launcher"])
def test_signal_to_a_rank_stops_all_at_the_same_step(new_run: NewRun, invariants: Invariants, whom: str) -> None:
    run, program = begun(new_run)
    if whom == "rank":
        os.kill(ranks_of(run)[1], signal.SIGTERM)
    else:
        program.send(signal.SIGTERM)  # type: ignore[attr-defined]
    done = run.ended(program, 120)  # type: ignore[arg-type]
    assert done.returncode == 75, done.stderr
    assert run.committed()[0]["step"] == run.events("step")[-1]["step"]
    invariants.check(run, resume=False)


@case("F37", how="SIGKILL to the launcher", passes="no rank left after 5 s, nothing lost")
def test_killed_launcher_leaves_no_rank(new_run: NewRun, invariants: Invariants) -> None:
    run, program = begun(new_run)
    program.send(signal.SIGKILL)  # type: ignore[attr-defined]
    run.ended(program)  # type: ignore[arg-type]
    invariants.assert_clean_processes(run, within_s=15)
    invariants.assert_nothing_lost(run)


@case("F37", how="SIGKILL to the launcher while the ranks start", passes="none of them left")
@pytest.mark.parametrize("delay_s", [0.5, 2.0, 5.0])
def test_launcher_killed_at_start_leaves_no_rank(new_run: NewRun, invariants: Invariants, delay_s: float) -> None:
    run = new_run(**DDP)
    program = run.start()
    run.wait_for(lambda: len(run.left_behind()) > 1, program, 120)
    time.sleep(delay_s)
    program.send(signal.SIGKILL)
    run.ended(program)
    invariants.assert_clean_processes(run, within_s=30)
    invariants.assert_nothing_lost(run)


@case("F02", how="ddp, two ranks: SIGKILL to the launcher, to rank 1, to rank 0, resumed each time", passes="exact")
def test_killed_ranks_resume_exactly(
    new_run: NewRun, invariants: Invariants, record_property: Callable[[str, object], None]
) -> None:
    run = new_run(**DDP)
    for number, victim in enumerate(("launcher", 1, 0)):
        program = run.start(failpoints="train.step=sleep:0.3")
        run.wait_for_step(4 * number + 2, program, 180)
        ranks = ranks_of(run)
        assert sorted(ranks) == [0, 1]
        if victim == "launcher":
            program.send(signal.SIGKILL)
        else:
            os.kill(ranks[victim], signal.SIGKILL)  # type: ignore[index]
        assert run.ended(program, 120).returncode in (-signal.SIGKILL, 128 + signal.SIGKILL, 8)
        invariants.assert_clean_processes(run, within_s=15)
        invariants.assert_nothing_lost(run)
    invariants.check(run, timeout_s=180)
    record_property("figure", "ddp: 3 kills, 0 lost, 0 inexact")
