"""The printed lines: throttled, complete, and free of control codes."""

from __future__ import annotations

import io
from typing import Any

import pytest

from segapp.run.events import Alert, Device, Event, Heartbeat, RunEnd, RunStart, Step, Val
from segapp.scores import foreground_means
from segapp.training.console import PlainReporter, iou_table

START = RunStart(
    classes=["a", "b"],
    num_params=1_500_000,
    batch_size=4,
    epochs=2,
    steps_per_epoch=10,
    devices=[Device(device="cpu")],
)


def step(number: int, **fields: Any) -> Step:
    times = {"images_per_s": 12.0, "data_wait_frac": 0.25, "eta_epoch_s": 61.0, "eta_run_s": 3700.0}
    return Step(**{"epoch": 1, "step": number, "loss": 0.5, "lr": 0.01, **times, **fields})


def lines(*events: Event, interval_s: float = 1e9) -> list[str]:
    stream = io.StringIO()
    reporter = PlainReporter(stream, interval_s)
    for event in (START, *events):
        reporter.handle(event)
    reporter.close()
    return stream.getvalue().splitlines()


def test_step_line_has_every_field() -> None:
    line = lines(step(13, epoch=2))[-1]
    parts = ("epoch 2/2", "step 3/10", "loss 0.5000", "1.00e-02", "12.0 images/s", "data wait 25 %", "eta 1m01s epoch")
    assert [part for part in (*parts, "1h01m run") if part not in line] == [], line


def test_step_lines_are_throttled_except_the_last_of_an_epoch() -> None:
    shown = lines(*(step(number) for number in range(1, 11)))
    assert [line.split("step ")[1].split("/")[0] for line in shown[1:]] == ["1", "10"]


def test_non_finite_loss_is_shown_as_such() -> None:
    assert "loss not finite" in lines(step(1, loss=None, skipped=3))[-1]
    assert "skipped 3" in lines(step(1, loss=None, skipped=3))[-1]


def test_stop_with_a_checkpoint_says_how_to_continue() -> None:
    end = RunEnd(status="stopped", reason="stopped by SIGINT: a checkpoint was saved", exit_code=75)
    assert lines(end)[-1] == "stopped: stopped by SIGINT: a checkpoint was saved; --resume continues from it"
    assert "--resume" not in lines(RunEnd(status="stopped", reason="stopped by SIGINT", exit_code=130))[-1]


def test_evaluation_line_names_the_object() -> None:
    """The scores are over one class more than the object; with a background for several labels it is no background."""
    scored = Val(
        epoch=1, step=2, loss=0.5, miou=0.6, iou=[0.9, 0.3], pixel_accuracy=0.97, scores=foreground_means([0.9, 0.3])
    )
    start = START.model_copy(update={"classes": ["bg", "a: \x1b[2Jb"]})
    assert "Dice of a: \\x1b[2Jb 0.4615  loss" in lines(start, scored)[-1]
    several = start.model_copy(update={"has_background": False})
    assert "pixel accuracy 0.9700" in lines(several, scored.model_copy(update={"scores": None}))[-1]


@pytest.mark.parametrize(
    ("monitor", "more"),
    [
        ("dice:b: c/d", "  Dice of b: c/d 0.4615"),
        ("iou:sky", "  IoU of sky -"),
        ("mean_recall", "  mean recall 0.2500"),
        ("loss", ""),
        (None, ""),
    ],
)
def test_evaluation_line_ends_with_the_monitored_score(monitor: str | None, more: str) -> None:
    start = START.model_copy(update={"classes": ["a", "b: c/d", "sky"], "monitor": monitor})
    val = Val(epoch=1, step=2, loss=0.5, miou=0.6, iou=[0.9, 0.3, None], mean_recall=0.25)
    assert lines(start, val)[-1].endswith(f"loss 0.5000{more}")


def test_hostile_names_send_no_control_codes() -> None:
    alert = Alert(kind="data", message="bad \x1b[2J name")
    assert "\x1b" not in "".join(lines(alert))
    assert "\x1b" not in "".join(iou_table(["\x1b[2J"], [0.5]))


def test_worst_class_comes_first_and_absent_ones_last() -> None:
    table = iou_table(["a", "bb", "c"], [0.9, None, 0.1])
    assert [row.split()[0] for row in table] == ["c", "a", "bb"]
    assert table[-1].endswith("absent")


def test_closed_stream_does_not_end_the_training() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream, 0.0)
    stream.close()
    reporter._line("nobody reads this")


def test_long_evaluation_prints_its_progress_every_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([100.0, 100.0, 129.0, 131.0, 131.0, 150.0, 162.0, 162.0])
    monkeypatch.setattr("segapp.training.console.time.monotonic", lambda: next(now_s))
    beats = [Heartbeat(phase="eval", num_evaluated=done, num_images=1700) for done in (3, 90, 1200, 1300, 1699)]
    shown = lines(Heartbeat(phase="train"), *beats)
    assert shown[1:] == [f"evaluating: {done} of 1,700 images" for done in ("3", "1,200", "1,699")]
