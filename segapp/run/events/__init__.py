"""The events of a run, written by the trainer and read by viewers: one JSON object a line in `events.jsonl`.

Every line is `{"v":1,"seq":n,"t":unix_s,"type":...,...}`. `seq` counts lines from 1 without a gap, across restarts.
One process writes (the holder of the run's lock); any number of processes read, at any time and from any offset.

**After a resume** the file reads as if the training had never been interrupted. A trainer that goes back to an earlier
step calls `EventWriter.rewind` before it writes: the `step`, `epoch_start`, `val` and `checkpoint` lines that training
repeats are moved to `events.rewound.jsonl`, all others stay, and the file is replaced atomically. Readers notice the
replacement (`EventReader.generation` increases) and read the file again from its start. If the file cannot be replaced
(full disk), it stays as it is. `run_start.resumed_from_step` is written in both cases: a fold that drops later steps
when it meets the field is right in both.
"""

from segapp.run.events.reader import EventReader, StepRun, is_known, parse_event, parse_line, read_answers, step_column
from segapp.run.events.types import (
    EVENT_TYPES,
    FINAL_STATUSES,
    MAX_LINE_BYTES,
    VERSION,
    Alert,
    Checkpoint,
    CommandAnswer,
    Device,
    DeviceMemory,
    EpochStart,
    Event,
    Gpu0Bsz,
    Heartbeat,
    LiveTensor,
    Memory,
    Oom,
    OtherProcess,
    ParamGroup,
    RunEnd,
    RunStart,
    Step,
    Val,
    Weights,
)
from segapp.run.events.writer import EventListener, EventLog, EventWriter

__all__ = [
    "EVENT_TYPES",
    "FINAL_STATUSES",
    "MAX_LINE_BYTES",
    "VERSION",
    "Alert",
    "Checkpoint",
    "CommandAnswer",
    "Device",
    "DeviceMemory",
    "EpochStart",
    "Event",
    "EventListener",
    "EventLog",
    "EventReader",
    "EventWriter",
    "Gpu0Bsz",
    "Heartbeat",
    "LiveTensor",
    "Memory",
    "Oom",
    "OtherProcess",
    "ParamGroup",
    "RunEnd",
    "RunStart",
    "Step",
    "StepRun",
    "Val",
    "Weights",
    "is_known",
    "parse_event",
    "parse_line",
    "read_answers",
    "step_column",
]
