"""`segapp status --requeue-code`: which ends of a run start a job again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segapp.commands.runs import requeue_code
from segapp.run.events import EventWriter, RunEnd, RunStart
from segapp.run.folder import RunFolder

SIGNAL = {"type": "run_end", "exit_code": 75, "stopped_by": "signal", "reason": "SIGTERM: a checkpoint was saved"}
COMMAND = {**SIGNAL, "stopped_by": "command", "reason": "asked to stop: a checkpoint was saved"}
FAILED = {"type": "run_end", "exit_code": 5, "reason": "the loss was not finite"}
OLD = {"type": "run_end", "exit_code": 75, "reason": "SIGTERM: a checkpoint was saved"}
BEGUN = {"type": "run_start"}


@pytest.mark.parametrize(
    ("events", "code", "scheduler_code"),
    [
        ([{**SIGNAL, "step": 5}], 75, 75),
        ([{**SIGNAL, "step": 5}], 137, 137),  # a machine was killed
        ([{**SIGNAL, "step": 5}], 1, 1),  # the launcher failed in this round: the end is that of an earlier one
        ([{**COMMAND, "step": 5}], 75, 0),
        ([{**SIGNAL, "step": 5}, {**FAILED, "exit_code": 0}], 0, 0),
        ([FAILED], 75, 1),
        ([OLD], 75, 1),
        ([], 75, 1),
        ([{**SIGNAL, "step": 5}, {**BEGUN, "resumed_from_step": 5}], 75, 75),  # killed after its checkpoint of step 9
        ([{**SIGNAL, "step": 9}, {**BEGUN, "resumed_from_step": 9}], 75, 75),  # killed before it had one
        ([BEGUN, {**BEGUN, "resumed_from_step": 9}, {**BEGUN, "resumed_from_step": 9}], 75, 1),  # twice
        ([{**BEGUN, "resumed_from_step": 9}, BEGUN], 75, 75),
        ([], 2, 2),
        ([], 0, 8),  # others can write a launcher's exit code
        ([BEGUN], 0, 8),
        ([FAILED], 0, 5),
        ([{**FAILED, "exit_code": 0}, {**BEGUN, "resumed_from_step": 5}], 0, 8),
        ([{**SIGNAL, "step": 5}], 0, 75),  # of torchrun, which would start a stopped run again
        ([{**COMMAND, "step": 5}], 0, 0),
        ([{**SIGNAL, "step": 5}, {**SIGNAL, "step": None}], 75, 75),
        ([{**SIGNAL, "step": step} for step in (1, 5, None, 5)], 75, 1),
        ([{**SIGNAL, "step": 5}, {**SIGNAL, "step": None}, {**SIGNAL, "step": 6}], 75, 75),
    ],
)
def test_only_a_saved_stop_by_a_signal_is_requeued(
    events: list[dict[str, Any]], code: int, scheduler_code: int
) -> None:
    assert requeue_code(events, code, saved_step=9)[0] == scheduler_code


def fields(end: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in end.items() if name != "type"}


def test_command_reads_the_end_of_the_last_start(tmp_path: Path, command: Any) -> None:
    start = RunStart(classes=["a"], num_params=7, batch_size=4, epochs=2, steps_per_epoch=3, devices=["cpu"])
    folder = RunFolder.create(path=tmp_path / "run")
    requeue = "status", folder.path, "--requeue-code"
    assert command(*requeue, 3)[0] == 3, "it failed before the run began"
    folder.write_info()
    with EventWriter(folder.events) as writer:
        writer.write(start)
        writer.write(RunEnd(status="stopped", step=5, **fields(SIGNAL)))
        assert command(*requeue, 75)[::2] == (75, "requeue, exit code 75: SIGTERM: a checkpoint was saved\n")
        writer.write(start)
        assert command(*requeue, 75)[0] == 1, "killed, without a checkpoint"
        writer.write(RunEnd(status="stopped", step=9, **fields(COMMAND)))
        assert command(*requeue, 75)[::2] == (0, "no requeue, exit code 0: asked to stop: a checkpoint was saved\n")
