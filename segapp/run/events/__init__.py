"""What the trainer writes and everybody reads: one JSON object a line in `events.jsonl`.

Every line is `{"v":1,"seq":n,"t":unix_s,"type":...,...}`. `seq` counts lines from 1 without a gap, over restarts too.
One process writes (it holds the run's lock); any number read, at any moment, from any byte onwards.

**After a resume** the file reads as if the training had never been interrupted. A trainer that goes back to an earlier
step calls `EventWriter.rewind` before it writes: the `step`, `epoch_start`, `val` and `checkpoint` lines that are about
to happen again are moved to `events.rewound.jsonl`, everything else stays, and the file is replaced as a whole.
Readers see the replacement as a new `EventReader.generation` and start their picture again. Where the file cannot be
replaced (a full disk) it stays as it is; `run_start.resumed_from_step` is there in either case, and a fold that drops
later steps on meeting it is right both times.
"""

from segapp.run.events.reader import EventReader, read_answers, wait_for_answer
from segapp.run.events.skim import StepRun
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
    LargeTensor,
    Memory,
    Oom,
    OtherProcess,
    RunEnd,
    RunStart,
    Step,
    Val,
    Weights,
    parse_event,
    parse_line,
)
from segapp.run.events.writer import EventWriter

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
    "EventReader",
    "EventWriter",
    "Gpu0Bsz",
    "Heartbeat",
    "LargeTensor",
    "Memory",
    "Oom",
    "OtherProcess",
    "RunEnd",
    "RunStart",
    "Step",
    "StepRun",
    "Val",
    "Weights",
    "parse_event",
    "parse_line",
    "read_answers",
    "wait_for_answer",
]
