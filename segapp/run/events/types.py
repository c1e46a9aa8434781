"""The events there are: a closed union, and the way from a line to an event."""

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic_core import from_json

from segapp.run.text import encodable

VERSION = 1
"""The `v` of every line this program writes; lines of another version are skipped by readers."""

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is taken for damage and skipped."""


def _as_text(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


def _as_device(value: Any) -> Any:
    return {"device": value} if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""Text for people; bytes of file names that are not UTF-8 become visible escapes."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class _Event(_Model):
    """What every line has; the writer fills in `v`, `seq` and `t`."""

    v: int = VERSION
    seq: int = 0
    """Number of the line, from 1."""
    t: float = 0.0
    """When it was written, Unix seconds of the trainer's clock."""


class Device(_Model):
    """One device of a run."""

    device: Text
    """As torch calls it: `cuda:0`, `cpu`."""
    name: Text | None = None
    """What the maker calls it."""
    uuid: Text | None = None
    total_mib: float | None = None


class RunStart(_Event):
    """A trainer began, or began again."""

    type: Literal["run_start"] = "run_start"
    classes: list[Text]
    """Class names in the order of their ids."""
    num_params: int
    batch_size: int
    """Samples in a full batch, over all devices."""
    epochs: int
    steps_per_epoch: int
    devices: list[Annotated[Device, BeforeValidator(_as_device)]]
    name: Text | None = None
    run_id: str | None = None
    host: Text | None = None
    pid: int | None = None
    pid_start_s: float | None = None
    """When the process began, Unix seconds."""
    resumed_from_step: int | None = None
    """The step of the checkpoint that training goes on from; None for a new run. Later steps seen before are void."""
    resumed_from_epoch: int | None = None
    gpu0_bsz: int | None = None
    is_auto: bool | None = None
    """Whether `gpu0_bsz: auto` decides about the splits to come."""
    split: list[int] | None = None
    """Samples of a full batch for each device."""
    config_hash: str | None = None
    versions: dict[str, str] | None = None
    num_train: int | None = None
    num_val: int | None = None


class Weights(_Event):
    """What a file of pretrained weights gave to the network that the training begins with."""

    type: Literal["weights"] = "weights"
    source: Text
    """The file, or the name of the weights."""
    message: Text
    """Two lines for a person."""
    num_taken: int
    """Tensors of the network that come from the file."""
    num_tensors: int
    """Tensors of the network, or of its backbone where the file is for that."""
    left_out: dict[Text, Text] = {}
    """Name in the file -> why it is not used; the first hundred."""
    missing: dict[Text, Text] = {}
    """Name in the network -> why it keeps its initialisation; the first hundred."""


class EpochStart(_Event):
    """An epoch begins; after a resume in the middle of an epoch it is not written again."""

    type: Literal["epoch_start"] = "epoch_start"
    epoch: int
    """From 1."""
    lr: float | None
    split: list[int] | None = None
    step: int | None = None


class Step(_Event):
    """One optimizer update, or the mean of those since the last such line."""

    type: Literal["step"] = "step"
    epoch: int
    step: int
    """Optimizer updates so far, from 1; never reset."""
    loss: float | None
    lr: float | None
    images_per_s: float | None = None
    data_wait_frac: float | None = None
    """Share of the time spent waiting for data, 0 to 1."""
    grad_norm: float | None = None
    split: list[int] | None = None
    skipped: int | None = None
    """Updates left out because something was not finite, since the run began."""
    loss_scale: float | None = None
    step_s: float | None = None
    eta_epoch_s: float | None = None
    eta_run_s: float | None = None
    terms: dict[Text, float | None] | None = None
    """Parts of the loss that are shown beside it, by name, such as a distillation's."""


class DeviceMemory(_Model):
    """One device's memory and load; None where the machine does not say."""

    device: Text | None = None
    uuid: Text | None = None
    name: Text | None = None
    used_mib: float | None = None
    """As the driver reports it, all processes together (the process's resident memory on a CPU)."""
    total_mib: float | None = None
    utilization: float | None = None
    """0 to 1."""
    temperature: float | None = None
    """Degrees Celsius."""
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    peak_mib: float | None = None
    """Highest allocation since the last line."""
    phase: Text | None = None
    """What the trainer was doing at the peak: forward, loss, backward, step, eval."""
    phase_peak_mib: dict[str, float | None] | None = None


class Memory(_Event):
    """Memory and load of every device, sampled."""

    type: Literal["memory"] = "memory"
    devices: list[DeviceMemory]
    step: int | None = None


class Val(_Event):
    """An evaluation."""

    type: Literal["val"] = "val"
    epoch: int
    step: int
    loss: float | None
    miou: float | None
    iou: list[float | None]
    """Per class; None for a class that is in neither prediction nor target."""
    pixel_accuracy: float | None = None
    num_images: int | None = None
    val_s: float | None = None


class Checkpoint(_Event):
    """A checkpoint is on disk, verified, and will not be lost by a crash."""

    type: Literal["checkpoint"] = "checkpoint"
    path: Text
    """Relative to the run folder."""
    epoch: int
    step: int
    is_best: bool = False
    sha256: str | None = None
    size_bytes: int | None = None
    metric: float | None = None
    save_s: float | None = None
    """Of the writing, beside the training."""
    copy_s: float | None = None
    """Of the copy in memory, which the training waited for."""


class CommandAnswer(_Event):
    """What became of a command; every command gets exactly one final answer (anything but `accepted`)."""

    type: Literal["command"] = "command"
    id: Text
    command: Text
    """As it is typed: `set gpu0_bsz=3`."""
    by: Text
    status: Literal["accepted", "applied", "rejected", "cancelled"]
    reason: Text | None = None
    changes: dict[str, Any] | None = None
    """The settings that a `set` asked for, by name; None for other commands, and in lines written before the field."""
    step: int | None = None


class Gpu0Bsz(_Event):
    """A change of the share of device 0."""

    type: Literal["gpu0_bsz"] = "gpu0_bsz"
    status: Literal["pending", "applied", "cancelled", "reverted"]
    old: int | None
    new: int | None
    split: list[int] | None = None
    predicted_mib: list[float | None] | None = None
    """Peak of each device as the planner sees it."""
    observed_mib: list[float | None] | None = None
    epoch: int | None = None
    """The epoch from which it holds."""
    reason: Text | None = None
    """A sentence for a person; programs read `reason_code`."""
    reason_code: Literal["out_of_memory"] | None = None
    """Why a change was reverted; see `is_out_of_memory`."""
    id: Text | None = None
    """The command that asked for it; None where `auto` did."""
    is_auto: bool | None = None
    """Whether `auto` decides about the splits to come."""
    step: int | None = None
    """Updates made before it held."""

    @property
    def is_out_of_memory(self) -> bool:
        """True if the change was reverted because a device ran out of memory.

        Lines written before `reason_code` existed have only the sentence: it names memory, or is missing.
        """
        return self.status == "reverted" and (
            self.reason_code == "out_of_memory" or (self.reason_code is None and "memory" in (self.reason or "memory"))
        )


class Alert(_Event):
    """Something a person should know."""

    type: Literal["alert"] = "alert"
    kind: str
    """A short word: `non_finite`, `checkpoint`, `storage`, `oom`."""
    message: Text
    step: int | None = None


class LargeTensor(_Model):
    """A tensor that was alive when memory ran out."""

    mib: float
    what: Text


class OtherProcess(_Model):
    """Another process on a card."""

    pid: int
    name: Text
    used_mib: float | None = None


class Oom(_Event):
    """A device ran out of memory: which, when, with what in it, and what the training did about it."""

    type: Literal["oom"] = "oom"
    device: Text
    index: int
    """Number of the device among the training's."""
    phase: Text
    """forward, loss, backward, step, eval."""
    step: int
    """Updates made before it."""
    action: Text
    """What was done about it."""
    epoch: int | None = None
    problem: Text | None = None
    split: list[int] | None = None
    requested_mib: float | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    total_mib: float | None = None
    fragmentation: float | None = None
    """Share of the allocator's memory that no tensor used, 0 to 1."""
    largest: list[LargeTensor] = []
    others: list[OtherProcess] = []
    others_mib: float | None = None
    predicted_mib: list[float | None] | None = None
    advice: list[Text] = []
    """What to change, the best first."""
    lessons: dict[str, Any] | None = None
    """What the training does differently from now on."""
    path: Text | None = None
    """The report, relative to the run folder."""


class Heartbeat(_Event):
    """The trainer is alive, whatever it is doing."""

    type: Literal["heartbeat"] = "heartbeat"
    pid: int | None = None
    phase: Text | None = None
    """train, eval, save, paused, start."""
    step: int | None = None
    saving_s: float | None = None
    """For how long a checkpoint has been being written, while one is."""


class RunEnd(_Event):
    """The trainer is done."""

    type: Literal["run_end"] = "run_end"
    status: Literal["finished", "stopped", "failed"]
    reason: Text | None = None
    exit_code: int | None = None
    step: int | None = None
    epoch: int | None = None


Event = (
    RunStart
    | Weights
    | EpochStart
    | Step
    | Memory
    | Val
    | Checkpoint
    | CommandAnswer
    | Gpu0Bsz
    | Alert
    | Oom
    | Heartbeat
    | RunEnd
)

EVENT_TYPES: dict[str, type[BaseModel]] = {
    "run_start": RunStart,
    "weights": Weights,
    "epoch_start": EpochStart,
    "step": Step,
    "memory": Memory,
    "val": Val,
    "checkpoint": Checkpoint,
    "command": CommandAnswer,
    "gpu0_bsz": Gpu0Bsz,
    "alert": Alert,
    "oom": Oom,
    "heartbeat": Heartbeat,
    "run_end": RunEnd,
}
"""What each `type` is read into."""

FINAL_STATUSES = frozenset({"applied", "rejected", "cancelled"})
"""The statuses with which a command is answered for good."""

_adapter: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="type")], config=ConfigDict(defer_build=True)
)


def parse_event(raw: dict[str, Any]) -> Event:
    """An event from the dict of its line.

    Raises:
        ValueError: a field is missing or of the wrong type, or the type is unknown.
    """
    return _adapter.validate_python(raw)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The dict of one line, or None where the line is damaged or is no event."""
    try:
        raw = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        return None
    if not isinstance(raw, dict):
        return None
    seq, t = raw.get("seq"), raw.get("t")
    has_frame = type(raw.get("v")) is int and type(seq) is int and isinstance(t, (int, float)) and t is not True
    return raw if has_frame and isinstance(raw.get("type"), str) else None


def last_line_end(fd: int) -> int:
    """The offset behind the last newline; 0 if there is none."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 2**16)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
