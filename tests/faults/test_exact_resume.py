"""A resumed run is the run that was never interrupted: at every step, at every precision, with any workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.support.fault_runs import SYNCHRONOUS, FaultRun, Invariants, case, course, some
from tests.support.hostile_files import write_picture
from tests.support.runs import differing

NewRun = Callable[..., FaultRun]


def state_of(run: FaultRun) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run.newest(), weights_only=True)
    return state


@case("R01", how="stopped at a step, resumed to the end", passes="exact at every step, also the last")
@pytest.mark.parametrize("step", some(range(1, 16), 6))
def test_run_stopped_at_a_step_resumes_exactly(new_run: NewRun, invariants: Invariants, step: int) -> None:
    run = new_run(checkpoint={"every_steps": None})
    assert run.train(failpoints=f"train.step={step}:term").returncode == 75
    invariants.check(run)
    done = run.train()
    assert done.returncode == 0
    assert "already complete" in done.stdout
    invariants.assert_same(run)


@pytest.mark.slow
@case("R06", how="learning rates of a run killed twice", passes="the same floats")
@case("R10", how="the epoch's sample order after kills, 2 workers", passes="the same losses, so the same crops")
@case("R03", how="0, 1 and 2 workers, changed at each resume", passes="the same course, bit for bit")
@pytest.mark.faults
def test_changed_worker_count_resumes_exactly(new_run: NewRun, invariants: Invariants) -> None:
    run, reference = new_run(), new_run("reference")
    assert reference.train().returncode == 0
    for step, workers in ((4, 2), (3, 1)):
        assert run.train(f"data.workers={workers}", failpoints=f"train.step={step}:kill").returncode == -signal.SIGKILL
    assert run.train("data.workers=2").returncode == 0
    assert course(run) == course(reference)
    names = differing(state_of(run), state_of(reference))
    assert all(name.startswith("/config/data/workers") for name in names), names


@case("R05", how="each component of a saved state replaced in turn", passes="each is noticed, by its name")
@case("R04", how="resumed and saved at once", passes="every component of the state equals what was saved")
@case("R11", how="the run folder under another parent, its files' times set back", passes="exact")
@pytest.mark.parametrize("precision", some(["fp32", "amp-fp16"], "amp-fp16"))
def test_loaded_state_equals_the_saved_one(new_run: NewRun, invariants: Invariants, precision: str) -> None:
    run = new_run(train={"precision": precision})
    assert run.train(failpoints="train.step=8:term").returncode == 75
    before = state_of(run)
    for name in before:
        assert {path.split("/")[1] for path in differing({**before, name: "forgotten"}, before)} == {name}
    run.work = run.work.rename(run.work.with_name("elsewhere"))
    for path in run.folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert run.train(failpoints="train.step=1:term").returncode == 75  # before a step is made
    # The learning rate is set anew at the beginning of every step, also of one that a stop leaves.
    assert [name for name in differing(state_of(run), before) if not name.endswith("/lr")] == []
    done = new_run("copy", train={"precision": precision})
    assert done.train(failpoints=f"train.step=8:kill;{SYNCHRONOUS}").returncode == -signal.SIGKILL
    assert [name for name in differing(state_of(done), before) if not name.endswith("/lr")] == []
    invariants.check(run)


@case(
    "R07",
    how="lr, batch size, crop, precision changed before a resume",
    passes="refused with the keys; workers and epochs may",
)
@pytest.mark.parametrize(
    "key",
    some(
        ["optim.lr=0.5", "train.batch_size=4", "data.crop_px=[16,16]", "train.precision=amp-bf16"],
        "optim.lr=0.5",
        "train.batch_size=4",
    ),
)
def test_resume_with_changed_training_keys_is_refused(left_by: NewRun, invariants: Invariants, key: str) -> None:
    run = left_by(f"train.step=8:kill;{SYNCHRONOUS}")
    invariants.assert_clear(run.train(key), 4, key.partition("=")[0], "->")


@case(
    "N01",
    how="loss NaN from a step on (learning rate 1e30)",
    passes="no such step taken, exit 5, the last commit finite",
)
@case("N06", how="a learning rate that diverges", passes="exit 5, checkpoint finite")
@pytest.mark.faults
def test_diverging_run_exits_5_with_finite_checkpoint(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(
        optim={"name": "sgd", "lr": 1e30},
        schedule={"warmup_steps": 0},
        train={"steps": 20, "ema": None},
        eval={"every_steps": 20},
    )
    done = run.train()
    invariants.assert_clear(done, 5, "10 steps in a row", "optim.lr")
    model = state_of(run)["model"]
    assert all(torch.isfinite(value).all() for value in model.values() if value.is_floating_point())
    invariants.check(run, resume=False)


@pytest.mark.sampled(2)
@case(
    "N02",
    how="fp16: gradients infinite for 3 steps, and for 40 (failpoint)",
    passes="3: skipped and counted, goes on; 40: exit 5 below scale 1; weights finite",
)
@pytest.mark.faults_long
@pytest.mark.parametrize("count", [3, 40])
def test_fp16_overflows_are_skipped_or_exit_5(new_run: NewRun, invariants: Invariants, count: int) -> None:
    run = new_run(train={"precision": "fp16", "epochs": 9})
    done = run.train(failpoints=f"train.gradient=4:inf*{count}")
    steps = {event["step"]: event for event in run.events("step")}
    # The first loss scale may be too high for this network too: before the fault, and a step after it.
    infinite = [step for step, event in steps.items() if step >= 4 and event["grad_norm"] is None]
    assert infinite[:3] == [4, 5, 6]
    assert all(steps[step]["loss"] is not None for step in infinite), "the loss is finite, its gradients are not"
    if count == 3:
        assert done.returncode == 0, done.stderr
        assert [steps[step]["skipped"] - steps[3]["skipped"] for step in (4, 5, 6, 45)] == [1, 2, 3, len(infinite)]
    else:
        invariants.assert_clear(done, 5, "the loss scale fell below 1")
        assert infinite == list(range(4, max(steps) + 1))
    model = state_of(run)["model"]
    assert all(torch.isfinite(value).all() for value in model.values() if value.is_floating_point())
    invariants.assert_clean_processes(run)


@pytest.mark.sampled(2)
@case(
    "F19", how="a worse, and no, metric after a resume: other, and ignored, masks to evaluate", passes="best unchanged"
)
@pytest.mark.faults
@pytest.mark.parametrize("what", ["worse", "none"])
def test_best_stays_best_after_a_worse_resume(new_run: NewRun, invariants: Invariants, what: str) -> None:
    run = new_run(train={"epochs": 4})
    masks = run.copy_data() / "masks" / "val"
    run.train(failpoints=f"train.step=12:kill;{SYNCHRONOUS}")
    evaluated = {event["epoch"]: event["miou"] for event in run.events("val")}
    assert sorted(evaluated) == [1, 2]
    best = torch.load(run.folder / "checkpoints" / "best.pt", weights_only=True)
    program = run.start(failpoints="train.step=1:sleep:2")
    run.wait_for_act(program, "train.step")  # at the start all masks are looked at: a split without a label is refused
    for path in masks.iterdir():
        mask = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        write_picture(path, np.where((mask == 255) | (what == "none"), 255, 2 - mask % 3).astype(np.uint8))
    assert run.ended(program).returncode == 0, program.stderr
    later = {event["epoch"]: event["miou"] for event in run.events("val") if event["epoch"] > 2}
    assert sorted(later) == [3, 4]
    assert all(miou is None if what == "none" else miou < max(evaluated.values()) for miou in later.values())
    assert not [event for event in run.events("checkpoint") if event["is_best"] and event["epoch"] > 2]
    assert differing(torch.load(run.folder / "checkpoints" / "best.pt", weights_only=True), best) == []
    invariants.check(run, resume=False)
