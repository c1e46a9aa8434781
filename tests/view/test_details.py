"""A whole event as text: every field that has a value."""

from __future__ import annotations

from segapp.run.events import CommandAnswer, Device, Gpu0Bsz, RunStart
from segapp.view.wording import event_text


def test_event_has_a_line_for_each_field_with_a_value() -> None:
    change = Gpu0Bsz(status="applied", old=4, new=6, split=[6, 10], observed_mib=[7.5, None], is_auto=True)
    assert event_text(change).splitlines() == [
        "seq: 0", "t: 0.0", "type: gpu0_bsz", "status: applied", "old: 4", "new: 6", "split: [6, 10]",
        "observed_mib: [7.5, None]", "is_auto: True",
    ]  # fmt: skip


def test_text_of_an_event_is_printable() -> None:
    start = RunStart(classes=["road", "a\x1bb"], num_params=9, batch_size=8, epochs=8, steps_per_epoch=20,
                     devices=[Device(device="cuda:0", total_mib=10.5), Device(device="cpu")])  # fmt: skip
    assert event_text(start).isprintable() is False
    assert all(line.isprintable() for line in event_text(start).splitlines())
    answer = CommandAnswer(id="a", command="x", by="a@b", status="applied", reason="a\n\x1b")
    assert event_text(answer).endswith("reason: a\n\\x1b")
