"""The line of each event in the log, word by word, and a whole event as text."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.run.events import (
    Alert,
    Checkpoint,
    CommandAnswer,
    Device,
    EpochStart,
    Event,
    Gpu0Bsz,
    Oom,
    RunEnd,
    RunStart,
    Settings,
    Step,
    Topology,
    Val,
    Weights,
)
from segapp.view.wording import chosen, event_text, log_line

START = RunStart(classes=["road"], num_params=11_249_000, batch_size=8, epochs=1, steps_per_epoch=20, t=5.0,
                 devices=[Device(device="cuda:0"), Device(device="cuda:1")])  # fmt: skip
STARTED = "1 class, 11.2 M parameters, batch 8, 1 epoch of 20 steps on cuda:0, cuda:1"
BEFORE = Val(epoch=1, step=20, loss=0.5, miou=0.4, iou=[0.3, 0.5])


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (START, "start", STARTED),
        (START.model_copy(update={"precision": "amp-bf16"}), "start", STARTED.replace("8,", "8, amp-bf16,")),
        (START.model_copy(update={"resumed_from_step": 0}), "start", f"resumed at step 0: {STARTED}"),
        (Weights(source="w.pt", message="182 of 182\nthe rest", num_taken=182, num_tensors=182), "load", "182 of 182"),
        (EpochStart(epoch=3, lr=0.0099, step=5), "epoch", "3 begins, lr 9.9e-3"),
        (EpochStart(epoch=3, lr=0.0099, step=5, split=[4, 10], num_unfrozen=23_540_000), "model",
         "23.5 M frozen parameters are unfrozen in epoch 3, lr 9.9e-3, split 4·10"),
        (Settings(step=4, recompute="config", blocks=[["a"], ["a", "b"]], num_blocks=3, reason="train.recompute"),
         "mem", "1·2 of 3 blocks recomputed: train.recompute"),
        (Settings(step=4, split=[5, 3], reason="without b cpu",
                  topology=Topology(ranks=2, machines=1, old_ranks=3, old_machines=2, round=1)), "ranks",
         "2 ranks on 1 machine (before: 3 on 2), split 5·3, restart 1: without b cpu"),
        (Val(epoch=2, step=40, loss=0.25, miou=0.5, iou=[0.6, 0.2, None, 0.1], val_s=81.0), "val",
         "e2 mIoU 0.500 (3/4) (+0.100), loss 0.250, worst sky 0.200, 1m21s"),  # the fourth has no name
        (Val(epoch=2, step=40, loss=None, miou=0.375, iou=[None]), "val",
         "e2 mIoU 0.375 (0/1) (-0.025), loss not finite"),
        (Val(epoch=2, step=40, loss=None, miou=None, iou=[]), "val", "e2 mIoU -, loss not finite"),
        (Checkpoint(path="checkpoints/last.pt", epoch=1, step=5), "saved", "last.pt at step 5 of epoch 1"),
        (Checkpoint(path="/a/b.pt", epoch=1, step=5, is_best=True, size_bytes=117_400_000, save_s=0.62), "best",
         "/a/b.pt at step 5 of epoch 1, 117 MB in 0.6 s"),
        (CommandAnswer(id="a", command="pause", by="a@b", status="applied"), "ctl", "a@b: pause applied"),
        (CommandAnswer(id="a", command="pause", by="a@b", status="rejected", reason="it has ended"), "ctl",
         "a@b: pause rejected: it has ended"),
        (CommandAnswer(id="a", command="set gpu0_bsz=5", by="a@b", status="cancelled", reason="by 0a1f of c@d"), "ctl",
         "gpu0_bsz=5 cancelled by c@d"),
        (CommandAnswer(id="a", command="pause", by="a@b", status="cancelled", reason="by nobody"), "ctl",
         "a@b: pause cancelled: by nobody"),
        (Gpu0Bsz(status="pending", old=None, new=6, split=[6, 10], epoch=4), "gpu0",
         "gpu0_bsz even → 6 pending at epoch 4, split 6·10"),
        (Gpu0Bsz(status="applied", old=6, new=None, epoch=4), "gpu0", "gpu0_bsz 6 → even applied at epoch 4"),
        (Gpu0Bsz(status="reverted", old=4, new=6, epoch=4, reason="no memory"), "gpu0",
         "gpu0_bsz 4 → 6 reverted: no memory"),
        (Gpu0Bsz(status="cancelled", old=4, new=6), "gpu0", "gpu0_bsz 4 → 6 cancelled"),
        (Oom(device="cuda:0", index=0, phase="backward", step=3, action="split", requested_mib=511.6), "oom",
         "cuda:0 out of memory in backward after step 3, 512 MiB requested: split"),
        (Oom(device="cpu", index=0, phase="eval", step=3, action="stop"), "oom",
         "cpu out of memory in eval after step 3: stop"),
        (Alert(kind="hang", message="no\x1b progress"), "alert", "no\\x1b progress"),
        (RunEnd(status="failed", reason="disk full", exit_code=1), "end", "failed: disk full"),
        (RunEnd(status="finished", exit_code=0), "end", "finished"),
    ],
)  # fmt: skip
def test_events_are_logged_word_by_word(event: Event, kind: str, text: str) -> None:
    line = log_line(event, ["road", "sky", "pole"], BEFORE)
    assert line is not None
    assert line == (event.t, kind, text, event)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, {}),  # no config was read
        ({"model.weights": None, "model.weights_backbone": None, "train.bn_momentum": None},
         {"weights": "random", "bn_momentum": "of the model"}),
        ({"model.weights": None, "model.weights_backbone": "DEFAULT", "train.bn_momentum": 0.1},
         {"weights": "DEFAULT", "bn_momentum": "0.1"}),
        ({"model.weights": "a\x1b/run", "train.bn_momentum": "auto"}, {"weights": "a\\x1b/run"}),
        ({"model.library": "python", "model.weights": None, "train.bn_momentum": 0.0512}, {"bn_momentum": "0.0512"}),
    ],
)  # fmt: skip
def test_chosen_weights_and_momentum(settings: dict[str, Any], shown: dict[str, str]) -> None:
    assert chosen(settings) == shown


def test_steps_and_answered_cancellations_have_no_line() -> None:
    assert log_line(Step(epoch=1, step=1, loss=0.5, lr=0.1), [], None) is None
    assert log_line(Gpu0Bsz(status="cancelled", old=4, new=6, id="a"), [], None) is None
    line = log_line(BEFORE, ["road"], None)
    assert line is not None
    assert line.text == "e1 mIoU 0.400 (2/2), loss 0.500, worst road 0.300"


def test_event_has_a_printable_line_for_each_field_with_a_value() -> None:
    change = Gpu0Bsz(status="applied", old=4, new=6, split=[6, 10], observed_mib=[7.5, None], is_auto=True)
    assert event_text(change).splitlines() == [
        "type: gpu0_bsz", "status: applied", "old: 4", "new: 6", "split: [6, 10]",
        "observed_mib: [7.5, None]", "is_auto: True",
    ]  # fmt: skip
    start = RunStart(classes=["road", "a\x1bb"], num_params=9, batch_size=8, epochs=8, steps_per_epoch=20,
                     devices=[Device(device="cuda:0", total_mib=10.5), Device(device="cpu")])  # fmt: skip
    assert event_text(start).isprintable() is False
    assert all(line.isprintable() for line in event_text(start).splitlines())
    answer = CommandAnswer(id="a", command="x", by="a@b", status="applied", reason="a\n\x1b")
    assert event_text(answer).endswith("reason: a\n\\x1b")
