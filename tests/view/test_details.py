"""A whole event as labelled lines: every field that has a value, and the command that acts on it."""

from __future__ import annotations

import pytest

from segapp.run.events import CommandAnswer, Device, Event, Gpu0Bsz, Oom, RunEnd, RunStart
from segapp.view.wording import event_details


@pytest.mark.parametrize(
    ("event", "command"),
    [
        (RunEnd(status="finished", reason="done", exit_code=0), None),
        (RunEnd(status="stopped", reason="asked", exit_code=0), "segapp train --resume 'my run'"),
        (RunEnd(status="failed", reason="no memory", exit_code=1), "segapp train --resume 'my run'"),
        (Oom(device="cuda:0", index=0, phase="backward", step=3, action="split"), None),
        (Gpu0Bsz(status="reverted", old=4, new=6), "segapp ctl 'my run' set gpu0_bsz=4"),
        (Gpu0Bsz(status="reverted", old=None, new=6), None),
        (Gpu0Bsz(status="applied", old=4, new=6), None),
    ],
)  # fmt: skip
def test_command_of_an_event_comes_last(event: Event, command: str | None) -> None:
    found = event_details(event, "my run")
    assert [text for label, text in found if label == "next"] == ([] if command is None else [command])
    assert command is None or found[-1].label == "next"
    assert found[0].text.startswith(f"{event.type}, line 0 of events.jsonl, ")


def test_fields_are_text_of_their_kind() -> None:
    change = Gpu0Bsz(status="applied", old=4, new=6, split=[6, 10], observed_mib=[1234567.89, None], is_auto=True)
    details = dict(event_details(change, "run"))
    del details["event"]
    assert details == {
        "status": "applied", "old": "4", "new": "6", "split": "6, 10", "observed mib": "1.23457e+06, -",
        "is auto": "True",
    }  # fmt: skip
    start = RunStart(classes=["road", "a\x1bb"], num_params=9, batch_size=8, epochs=8, steps_per_epoch=20,
                     devices=[Device(device="cuda:0", total_mib=10.5), Device(device="cpu")])  # fmt: skip
    details = dict(event_details(start, "run"))
    assert details["classes"] == "road\na\\x1bb"
    assert details["devices"] == "device cuda:0, total_mib 10.5\ndevice cpu"
    changes = {"lr_factor": 0.5}
    answer = CommandAnswer(id="a", command="x", by="a@b", status="applied", changes=changes, reason="a\n\x1b")
    found = event_details(answer, "run")
    assert dict(found)["changes"] == "lr_factor: 0.5"
    assert dict(found)["reason"] == "a\n\\x1b"
    assert ("by", "a@b") in found
