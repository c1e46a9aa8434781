"""The lines around the panes, word by word, for a run with known numbers: epoch 3 of 8, half of its 20 steps done."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from textual.content import Content

from segapp.run.events import Alert, Checkpoint, Device, RunEnd, RunStart, Step, Val
from segapp.tui import header
from segapp.tui.widgets import ascii_text
from segapp.view.source import Status
from segapp.view.view import Evaluating, Raised, View

LIVE = Status("live", "live", now_s=150.0, age_s=3.0, pid=7)


@pytest.fixture
def view() -> View:
    view = View()
    view.start = RunStart(
        classes=["road", "sky", "pole", "car"], num_params=9, batch_size=8, epochs=8, steps_per_epoch=20, t=50.0,
        devices=[Device(device=f"cuda:{i}", total_mib=10_240) for i in range(2)],
    )  # fmt: skip
    view.classes = view.start.classes
    view.epoch, view.lr, view.phase, view.split = 3, 0.005, "train", (3, 5)
    view.at_step, view.moved_s = 50, 140.0
    view.step = Step(
        epoch=3, step=50, loss=0.5, lr=0.005, images_per_s=12.5, data_wait_frac=0.25, grad_norm=1.5, skipped=2,
        step_s=0.64, loss_scale=1024.0, terms={"pixel": 0.25, "edge": 1.5}, eta_epoch_s=16.0, eta_run_s=76.0, t=140.0,
    )  # fmt: skip
    view.loss.add(3, [49, 50], [0.7, 0.5])
    return view


def test_first_line_leaves_out_the_least_important(view: View) -> None:
    about, began = "deeplabv3_resnet50 - camvid - sgd 0.02", {"weights": "w/lite.pth", "bn_momentum": "0.05"}

    def line(width: int, status: Status = LIVE) -> str:
        shown = header.header(view, status, "a-run", width, about=about, began=began, is_readonly=True)
        return ascii_text(shown.plain)

    known = f"segapp  a-run  * LIVE train  {about}  epoch 3/8  step 10/20  lr 5.0e-3"
    whole = f"{known}  weights lite.pth  bn_momentum 0.05  up 1m40s  read-only"
    assert line(len(whole)) == whole
    parts = ("bn_momentum 0.05  ", "weights lite.pth  ", "up 1m40s  ", f"{about}  ", "  lr 5.0e-3", "  step 10/20")
    for left_out in ("segapp  ", *parts, "  read-only"):
        before, whole = len(whole), whole.replace(left_out, "")
        assert line(before - 1) == whole
    assert line(len("a-run  * LIVE train")) == "a-run  * LIVE train"
    ages = {age_s: line(200, replace(LIVE, age_s=age_s)).partition("read-only")[2].strip() for age_s in (9.9, 10.0, 75)}
    assert ages == {9.9: "", 10.0: "10s ago", 75: "1m15s ago"}
    assert line(14) == "* LIVE train"
    assert line(9) == "* LIVE t~"
    assert view.start is not None
    view.start = view.start.model_copy(update={"steps": 155, "precision": "amp-fp16"})
    assert "step 50/155" in line(200)
    assert "amp-fp16" in line(200).split("  ")
    long = ascii_text(header.header(view, LIVE, "x" * 99, 100, about="", is_readonly=False).plain)
    assert f"{'x' * 24}~  * LIVE" in long


@pytest.mark.parametrize(
    ("status", "is_paused", "phase", "shown"),
    [
        (LIVE, False, "eval", "* LIVE eval"),
        (replace(LIVE, word="paused"), True, "train", "* PAUSED"),
        (replace(LIVE, word="reading", loaded_frac=0.9), True, "train", "* READING"),
        (replace(LIVE, word="gone"), False, "train", "o GONE"),
        (Status("finished", "finished"), False, "train", "o FINISHED"),
        (Status("stale", "stale"), True, "train", "* STALE train"),
        (Status("lost", "lost"), False, None, "* LOST"),
        (Status("crashed", "crashed"), True, "train", "o CRASHED"),
    ],
)
def test_state_is_a_dot_a_word_and_the_phase(
    view: View, status: Status, is_paused: bool, phase: str | None, shown: str
) -> None:
    view.is_paused, view.phase = is_paused, phase
    line = header.header(view, replace(status, age_s=13.0), "a", 200, about="", is_readonly=False)
    age = {line.plain[span.start : span.end]: span.style for span in line.spans}["13s ago"]
    assert age == ("$text-warning bold" if status.state == "stale" else "$text-muted")
    assert ascii_text(header.state_content(view, status).plain) == shown


def test_progress_of_epoch_and_run_is_in_their_steps(view: View) -> None:
    line = ascii_text(header.progress_line(view, LIVE, 110).plain)
    epoch, run = f"epoch {'=' * 12}{'.' * 12} 50% ETA 6s", f"run {'=' * 7}-{'.' * 16} 31.2% ETA 1m06s"
    shown_s = LIVE.now_s - 7200 + 66  # on this machine's clock, which is two hours behind the trainer's
    ends = f"ends {time.strftime('%H:%M', time.localtime(shown_s))}"
    assert re.split(" {3,}", line)[:2] == [epoch, run]  # 16 s at the step, 10 s ago
    assert ascii_text(header.progress_line(view, replace(LIVE, skew_s=7200.0), 110).plain).endswith(ends)
    assert ascii_text(header.progress_line(view, LIVE, 40).plain).startswith("run ==-..... 31.2%")
    assert (header.epoch_fraction(view), header.run_fraction(view)) == (0.5, 50 / 160)
    assert header.etas_s(view, replace(LIVE, now_s=139.0)) == (16.0, 76.0)  # by a clock behind the trainer's
    assert header.etas_s(view, replace(LIVE, now_s=170.0)) == (None, 46.0)
    view.evaluating = Evaluating(100.0, 120.0, 25, 100)
    line = ascii_text(header.progress_line(view, LIVE, 110).plain)
    assert line.startswith(f"eval {'=' * 3}-{'.' * 10} 25/100 images ETA 30s   run ")
    assert "eval" not in ascii_text(header.progress_line(view, replace(LIVE, word="crashed"), 110).plain)
    view.evaluating, view.step, view.at_step = None, None, None
    assert (header.epoch_fraction(view), header.run_fraction(view)) == (0.0, 0.0)
    view.epoch = None
    assert ascii_text(header.progress_line(view, LIVE, 110).plain).strip() == f"run {'.' * 24} 0.0%"
    read = header.progress_line(View(), Status("busy", "busy", loaded_frac=0.5), 30).plain
    assert read == "reading the history ━━━━━─────"


def test_throughput_line_marks_what_slows_or_skips(view: View) -> None:
    line = ascii_text(header.throughput_line(view, LIVE, 200).plain)
    assert line == (
        "12.5 img/s  step 640 ms  waiting for data 25%  grad norm 1.50  skipped 2  scale 1024  pixel 0.250  edge 1.50"
    )
    assert ascii_text(header.throughput_line(view, LIVE, 34).plain) == "12.5 img/s  waiting for data 25%"
    assert view.step is not None
    view.step = view.step.model_copy(update={"step_s": 12.34, "skipped": 0, "terms": None, "loss_scale": None})
    assert ascii_text(header.throughput_line(view, LIVE, 200).plain).endswith(
        "step 12.3 s  waiting for data 25%  grad norm 1.50"
    )
    found = header.throughput_line(view, LIVE, 200)
    assert {found.plain[span.start : span.end]: span.style for span in found.spans}["25%"] == "$text-warning bold"
    assert ascii_text(header.throughput_line(View(), LIVE, 200).plain) == "no step yet"
    for status in (Status("finished", "finished"), replace(LIVE, word="starting", starting_s=145.0)):
        last = header.throughput_line(view, status, 200)
        assert last.plain == f"last  {found.plain}"
        assert {span.style for span in last.spans} == {"$text-muted"}


def banner(view: View, status: Status, width: int, *unseen: Raised) -> Content | None:
    again = "to continue: `segapp train --resume 'my run'`"
    return header.banner(
        view, status, width, unseen, run="'my run'", again=again, doing="importing torch, 6s", cause="it left no trace"
    )


@pytest.mark.parametrize(
    ("status", "end", "shown"),
    [
        (replace(LIVE, word="gone"), None, "'my run': the run folder was removed; this is its last known state"),
        (Status("crashed", "crashed"), None,
         "no process holds this folder after step 50 (step 42 is saved): it left no trace; to continue: "
         "`segapp train --resume 'my run'`"),
        (Status("crashed", "crashed", pid=7), None,
         "the trainer's process has died after step 50 (step 42 is saved): it left no trace; to continue: "
         "`segapp train --resume 'my run'`"),
        (Status("failed", "failed"), "disk full", "failed: disk full; to continue: `segapp train --resume 'my run'`"),
        (Status("stopped", "stopped"), "", "stopped: no reason given; to continue: `segapp train --resume 'my run'`"),
        (Status("stale", "stale"), None,
         "the trainer is running but writes no events: it may be stuck; more: segapp docs hangs"),
        (Status("lost", "lost", host="box"), None,
         "no events from the trainer on box, and its process cannot be checked from this host: look for it there"),
        (Status("lost", "lost"), None,
         "no events from the trainer, and its process cannot be checked from this host: look for it there"),
        (Status("finished", "finished"), "8 epochs",
         "best mIoU 0.476 at epoch 3 · segapp eval 'my run' · segapp report 'my run'"),
        (replace(LIVE, word="resuming", starting_s=50.0, is_resumed=True), None,
         "resuming from step 40: importing torch, 6s"),
        (replace(LIVE, word="resuming", starting_s=51.0, is_resumed=True), None,
         "resuming, last saved at step 42: importing torch, 6s"),
        (replace(LIVE, word="starting", starting_s=51.0), None, "starting: importing torch, 6s"),
        (LIVE, None, None),
    ],
)  # fmt: skip
def test_banner_says_what_has_happened(view: View, status: Status, end: str | None, shown: str | None) -> None:
    if end is not None:
        view.end = RunEnd(status=status.state, reason=end, exit_code=1)
    assert view.start is not None
    view.start = view.start.model_copy(update={"resumed_from_step": 40})
    view.checkpoint = Checkpoint(path="checkpoints/last.pt", epoch=3, step=42, is_best=False)
    view.best = Val(epoch=3, step=60, loss=0.5, miou=0.476, iou=[0.476], pixel_accuracy=0.9)
    found = banner(view, status, 100)
    assert (found.plain if found is not None else None) == shown


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (51, "hang (3 times): no progress  a dismiss, d details"),
        (49, "hang (3 times): no progress  a dismiss, d details"),
        (48, "hang (3 times): no progress\na dismiss, d details"),
    ],
)
def test_keys_of_an_alert_are_on_its_line_where_they_fit(view: View, width: int, shown: str) -> None:
    raised = Raised(Alert(kind="hang", message="no progress", t=9.0), 3)
    found = banner(view, LIVE, width, raised)
    assert found is not None
    assert found.plain == shown
    assert banner(view, Status("stale", "stale"), width, raised) != found
    newer = Raised(Alert(kind="oom", message="out of memory", t=10.0), 1)
    found = banner(view, LIVE, 99, raised, newer)
    assert found is not None
    assert found.plain == "oom: out of memory  a dismiss, d details  1 more"


def test_screen_too_small_for_panes_says_so(view: View) -> None:
    lines = ["a-run", "* LIVE train", "epoch 3/8  loss 0.600", "segapp needs 60x15, has 40x10", "press q to leave"]
    assert ascii_text(header.notice(view, LIVE, "a-run", 40, 10).plain).splitlines() == lines
    small = ascii_text(header.notice(view, LIVE, "a-run", 12, 3).plain)
    assert small.splitlines() == ["a-run", "* LIVE train", "epoch 3/8  ~"]
    assert ascii_text(header.notice(View(), LIVE, "a-run", 40, 0).plain) == "a-run"
    assert "no step yet" in ascii_text(header.notice(View(), LIVE, "a-run", 40, 9).plain)
    for width, height, good in ((60, 14, "60"), (59, 15, "15")):
        found = header.notice(view, LIVE, "a", width, height)
        styles = {found.plain[span.start : span.end]: span.style for span in found.spans}
        assert [side for side in ("60", "15") if styles[side] == "$text-success"] == [good]
