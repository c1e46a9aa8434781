"""The events of a run, written by the trainer and read by viewers: one JSON object per line in `events.jsonl`.

Every line is `{"v":1,"seq":n,"t":unix_s,"type":...,...}`. `seq` counts lines from 1 without a gap, across restarts.
One process writes (the holder of the run's lock); any number of processes read, at any time and from any offset.

**After a resume**, the file reads as if the training had never been interrupted. A trainer that goes back to an earlier
step calls `EventWriter.rewind` before it writes: the `step`, `epoch_start`, `val` and `checkpoint` lines that the
training will repeat are moved to `events.rewound.jsonl`, all others are kept, and the file is replaced atomically.
Readers notice the replacement (`EventReader.generation` increases) and read the file again from its start. If the file
cannot be replaced (full disk), it is not changed. `run_start.resumed_from_step` is written in both cases, so a reader
that then drops later steps is correct in both.
"""

# isort: skip_file
# `as` marks a public name for linters and type checkers; this is the only list of public names.

from segapp.run.events.reader import (
    EventReader as EventReader,
    StepColumn as StepColumn,
    StepRun as StepRun,
    is_known as is_known,
    parse_event as parse_event,
    parse_line as parse_line,
    read_answers as read_answers,
)
from segapp.run.events.types import (
    EVENT_TYPES as EVENT_TYPES,
    FINAL_STATUSES as FINAL_STATUSES,
    MAX_LINE_BYTES as MAX_LINE_BYTES,
    VERSION as VERSION,
    Alert as Alert,
    Checkpoint as Checkpoint,
    CommandAnswer as CommandAnswer,
    Device as Device,
    Topology as Topology,
    DeviceMemory as DeviceMemory,
    EpochStart as EpochStart,
    Event as Event,
    Gpu0Bsz as Gpu0Bsz,
    Heartbeat as Heartbeat,
    Memory as Memory,
    Oom as Oom,
    RunEnd as RunEnd,
    RunStart as RunStart,
    Settings as Settings,
    Step as Step,
    Val as Val,
    Weights as Weights,
)
from segapp.run.events.writer import (
    EventListener as EventListener,
    EventLog as EventLog,
    EventWriter as EventWriter,
)
