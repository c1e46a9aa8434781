"""The event types: a closed union of pydantic models, one per `type` of a line in events.jsonl."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from segapp.run.words import encodable
from segapp.scores import foreground_of, score_by_name

VERSION = 1
"""The `v` of every line that this program writes; readers skip lines of other versions."""

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is treated as damaged and skipped."""

MAX_EVENTS_BYTES = 4 * 2**30
"""A longer file is refused: a training on eight GPUs writes about 0.1 GiB per day."""


Text = Annotated[str, BeforeValidator(lambda value: encodable(value) if isinstance(value, str) else value)]
"""Text that can be encoded as UTF-8; undecodable bytes of file names become visible escapes."""

Message = Annotated[Text, BeforeValidator(lambda value: value[:4000] if isinstance(value, str) else value)]
"""The first 4000 characters of a text for people, which a stranger's run may have in any length."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of steps or epochs; exact as a float."""


AsNull = Field(json_schema_extra={"is_written_as_null": True})
"""Marks an optional field that is in every line of its type, as null if it has no value; others are left out."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class _Event(_Model):
    """The fields of every line; the writer sets `v`, `seq` and `t`."""

    v: int = VERSION
    seq: int = 0
    """Number of the line, from 1."""
    t: float = 0.0
    """Time of writing, Unix seconds, on the trainer's clock."""


class Device(_Model):
    """One device of a run."""

    device: Text
    """The torch device: `cuda:0`, `cpu`."""
    name: Text | None = None
    """Product name."""
    uuid: Text | None = None
    total_mib: float | None = None
    machine: Text | None = None
    """Host name of its machine; None if all devices of the run are on one machine."""


class RunStart(_Event):
    """Training starts or resumes."""

    type: Literal["run_start"] = "run_start"
    classes: list[Text]
    """Class names in the order of their ids."""
    num_params: int
    batch_size: int
    """Samples in a full batch, over all devices."""
    epochs: int
    steps_per_epoch: int
    devices: list[Annotated[Device, BeforeValidator(lambda value: {"device": value} if type(value) is str else value)]]
    acquired_s: float | None = None
    """When the process locked the run, as its file `lock` says, Unix seconds."""
    resumed_from_step: int | None = None
    """Step of the checkpoint that training resumes from; None for a new run. Earlier lines of later steps are void."""
    gpu0_bsz: int | None = None
    is_auto: bool | None = None
    """True if `gpu0_bsz: auto` chooses the next splits."""
    live: dict[str, Any] | None = None
    """The settings in force that commands can change, as `set` takes them."""
    split: list[int] | None = None
    """Samples of a full batch for each device."""
    num_train: int | None = None
    num_val: int | None = None
    precision: str | None = None
    """Precision of the steps: fp32, fp16, amp-fp16 or amp-bf16; with `train.precision: auto`, the chosen one."""
    mode: str | None = None
    """Parallel mode: single, dp, ddp or model."""
    mode_reason: Text | None = None
    """Why `parallel.mode: auto` chose it; None if the config names the mode."""
    steps: int | None = None
    """Steps of the whole run, which may end within an epoch (`train.steps`); None: whole epochs."""
    num_trainable: int | None = None
    """Trained parameters; fewer than `num_params` if `model.freeze` applies."""
    freeze_epochs: int | None = None
    """Epochs for which the others are frozen; None: the whole run, or nothing is frozen."""
    monitor: Text | None = None
    """The score that `checkpoint.monitor` names; None: mIoU."""
    has_background: bool | None = None
    """True if class 0 is the background, which the means over the foreground leave out; None: its name tells."""
    palette: list[tuple[int, int, int]] | None = None
    """RGB color of each class in the sample images."""
    checker: dict[str, Any] | None = None
    """All facts that determine if a batch split fits, as JSON: the rules of this training, the memory of each device,
    the measured peaks, the splits that failed (`segapp.memory.split_check.SplitChecker`)."""

    @property
    def foreground(self) -> Sequence[str]:
        """Names of the classes but the background; empty without a background."""
        return () if self.has_background is False else foreground_of(self.classes)


class Weights(_Event):
    """Report of the tensors that were initialized from a file of pretrained weights."""

    type: Literal["weights"] = "weights"
    source: Text
    """The file, or the name of the weights."""
    message: Message
    """A summary in two lines, and a line about classes of other names."""
    num_taken: int
    """Tensors of the model that are in the file."""
    num_tensors: int
    """Tensors of the model, or of its backbone if the file holds only a backbone."""
    left_out: dict[Text, Text] = {}
    """Name in the file -> why it is not used; the first hundred."""
    missing: dict[Text, Text] = {}
    """Name in the model -> why it keeps its initialization; the first hundred."""


class EpochStart(_Event):
    """An epoch begins; not written again if a run resumes in the middle of an epoch."""

    type: Literal["epoch_start"] = "epoch_start"
    epoch: int
    """From 1."""
    lr: float | None
    split: Annotated[list[int] | None, AsNull] = None
    step: int | None = None
    num_unfrozen: int | None = None
    """Number of parameters that were frozen and are trained from this epoch on; None: unchanged."""
    checker: dict[str, Any] | None = None
    """Replaces the value in `run_start`."""


class Step(_Event):
    """An optimizer update, or the mean over all updates since the last `step` line."""

    type: Literal["step"] = "step"
    epoch: int
    step: int
    """Number of optimizer updates so far, from 1; never reset."""
    loss: float | None
    """Loss of this step; None if it was not finite."""
    lr: float | None
    images_per_s: Annotated[float | None, AsNull] = None
    data_wait_frac: Annotated[float | None, AsNull] = None
    """Share of the time spent waiting for data, 0 to 1."""
    grad_norm: Annotated[float | None, AsNull] = None
    split: Annotated[list[int] | None, AsNull] = None
    skipped: int | None = None
    """Updates skipped because of a non-finite value, since the run began."""
    loss_scale: float | None = None
    step_s: float | None = None
    eta_epoch_s: float | None = None
    """Seconds until the next epoch begins, including evaluations, excluding pauses."""
    eta_run_s: float | None = None
    """Seconds until the training ends."""
    terms: dict[Text, float | None] | None = None
    """Terms of the loss to plot together with it, by name, such as the distillation loss."""
    peaks_mib: list[float | None] | None = None
    """Highest allocation of each device in training under the present split; None without a split."""


class DeviceMemory(_Model):
    """Memory and load of one device; None if unknown."""

    device: Text | None = None
    uuid: Text | None = None
    name: Text | None = None
    used_mib: float | None = None
    """Memory that the driver reports for all processes together (on a CPU: resident memory of the process)."""
    total_mib: float | None = None
    utilization: float | None = None
    """0 to 1."""
    temperature: float | None = None
    """Temperature in degrees Celsius."""
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    peak_mib: float | None = None
    """Highest allocation since the last line; null in a step in which cuDNN times its algorithms."""
    phase: Text | None = None
    """Phase of the training at the peak: forward, loss, backward, step, eval."""
    phase_peak_mib: dict[str, float | None] | None = None


class Memory(_Event):
    """A sample of the memory and load of every device."""

    type: Literal["memory"] = "memory"
    devices: list[DeviceMemory]
    step: int | None = None


class Val(_Event):
    """Results of an evaluation."""

    type: Literal["val"] = "val"
    epoch: Count
    step: Count
    loss: float | None
    """Loss; None if it was not finite."""
    miou: float | None
    """Mean of `iou` over the classes for which it is not None; None if no pixel is valid."""
    iou: list[float | None]
    """IoU per class; None for a class in neither prediction nor target."""
    pixel_accuracy: Annotated[float | None, AsNull] = None
    mean_dice: float | None = None
    mean_precision: float | None = None
    mean_recall: float | None = None
    precision: list[float | None] | None = None
    """Precision per class; None for a class that is never predicted. Dice follows from the IoU: 2 IoU / (1 + IoU)."""
    recall: list[float | None] | None = None
    """Recall per class; None for a class that is not in the target."""
    scores: dict[str, float | None] | None = None
    """Scores without a separate field: name, as in `segapp.scores.SCORES`, -> value."""
    steps_loss: float | None = None
    """Mean training loss of the `step` events since the last evaluation or start; None without a finite one."""
    num_images: int | None = None
    val_s: float | None = None

    def score(self, name: str, classes: Sequence[str] = ()) -> float | None:
        """Return a score by its name; None if it is not known. `iou:NAME` and `dice:NAME` need the classes."""
        values: dict[str, float | None] = {**(self.scores or {}), **vars(self)}
        return score_by_name(name, values, self.iou, classes)


class Checkpoint(_Event):
    """A checkpoint is committed: on disk, synced, and safe from a crash."""

    type: Literal["checkpoint"] = "checkpoint"
    path: Text
    """Path relative to the run folder."""
    epoch: int
    step: int
    is_best: bool = False
    sha256: str | None = None
    size_bytes: int | None = None
    metric: float | None = None
    save_s: float | None = None
    """Time to write it, in the background."""
    copy_s: float | None = None
    """Time to copy the state in memory; training waits for it."""


class CommandAnswer(_Event):
    """An answer to a command; every command gets exactly one final answer (any status but `accepted`)."""

    type: Literal["command"] = "command"
    id: Text
    command: Text
    """The command as typed: `set gpu0_bsz=3`."""
    by: Text
    status: Literal["accepted", "applied", "rejected", "cancelled"]
    reason: Annotated[Message | None, AsNull] = None
    changes: dict[str, Any] | None = None
    """The settings that an applied `set` changed, by name; None for other answers."""
    step: int | None = None


class Gpu0Bsz(_Event):
    """A change of the batch split."""

    type: Literal["gpu0_bsz"] = "gpu0_bsz"
    status: Literal["pending", "applied", "cancelled", "reverted"]
    old: int | None
    new: int | None
    split: Annotated[list[int] | None, AsNull] = None
    predicted_mib: Annotated[list[float | None] | None, AsNull] = None
    """Predicted peak of each device."""
    observed_mib: Annotated[list[float | None] | None, AsNull] = None
    epoch: Annotated[int | None, AsNull] = None
    """The first epoch with the new split."""
    reason: Message | None = None
    """A sentence for a person. A change is reverted if a device ran out of memory."""
    id: Text | None = None
    """The command that requested it; None for `auto`."""
    is_auto: bool | None = None
    """True if `auto` chooses the next splits."""
    live: dict[str, Any] | None = None
    """Replaces the value in `run_start`."""
    step: int | None = None
    """Number of updates made with the previous split."""
    checker: dict[str, Any] | None = None
    """Replaces the value of the last event that has one."""


class Topology(_Model):
    """Ranks of a training, or devices of one process, that share each batch, and their machines."""

    ranks: int
    machines: int
    old_ranks: int
    old_machines: int
    round: int = 0
    """Number of times that the launcher has restarted the ranks."""


class Settings(_Event):
    """A change of settings with another cause than a command: an out-of-memory error, other blocks, other devices.

    A start writes it only if blocks are recomputed, and a resume also if the devices are others than before.
    """

    type: Literal["settings"] = "settings"
    step: int
    """Number of updates made before the change."""
    reason: Message
    """Cause: train.recompute, by hand, out of memory, or the host and device of each removed and each added rank."""
    fallbacks: dict[str, Any] | None = None
    """After an out-of-memory error: all fallbacks in force from now on, by the name of the setting."""
    failed_split: list[int] | None = None
    """A split that ran out of memory on a rank, and that the resumed run does not use."""
    recompute: Literal["config", "off", "all"] | None = None
    """config: the blocks of the config or of the memory plan; off: none; all: every block."""
    blocks: list[list[Text]] | None = None
    """Names of the recomputed blocks per device, if they have changed."""
    num_blocks: int | None = None
    """Number of blocks of the model."""
    topology: Topology | None = None
    """The ranks and machines of a resume, if they differ from the ranks that saved the checkpoint."""
    split: list[int] | None = None
    """Samples of a full batch per device, on those devices."""


class Alert(_Event):
    """A warning for the user."""

    type: Literal["alert"] = "alert"
    kind: str
    """Group of the alert: `non_finite`, `checkpoint`, `storage`, `oom`, ..."""
    message: Message
    step: int | None = None
    reason: Literal["one_class", "unpredicted", "overfitting"] | None = None
    """Reason of an alert of the kind `learning`."""
    classes: list[Text] | None = None
    """The classes that an alert of the kind `learning` names as not predicted, or not once where they are."""


class Oom(_Event):
    """A device ran out of memory: where, when, what it contained, and how the training reacted."""

    type: Literal["oom"] = "oom"
    device: Text
    index: int
    """Index of the device in the training's list of devices."""
    phase: Text
    """Phase: forward, loss, backward, step, eval."""
    step: int
    """Number of updates made before the error."""
    action: Text
    """Reaction of the training."""
    epoch: int | None = None
    problem: Text | None = None
    split: list[int] | None = None
    requested_mib: float | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    total_mib: float | None = None
    fragmentation: float | None = None
    """Share of the allocator's reserved memory that holds no tensor, 0 to 1."""
    others_mib: float | None = None
    predicted_mib: list[float | None] | None = None
    advice: list[Text] = []
    """Suggested changes, best first."""
    path: Text | None = None
    """The file of the report, relative to the run folder."""
    checker: dict[str, Any] | None = None
    """Replaces the value of the last event that has one."""


class Heartbeat(_Event):
    """The trainer is alive."""

    type: Literal["heartbeat"] = "heartbeat"
    pid: int | None = None
    phase: Text | None = None
    """Phase: train, eval, save, paused, start."""
    step: int | None = None
    saving_s: float | None = None
    """Seconds since the write of a checkpoint began; None if none is being written."""
    num_evaluated: int | None = None
    """Number of evaluated images in the running evaluation; None if unknown."""
    num_images: int | None = None
    """Number of images in the running evaluation."""


class RunEnd(_Event):
    """The training ends."""

    type: Literal["run_end"] = "run_end"
    status: Literal["finished", "stopped", "failed"]
    reason: Annotated[Message | None, AsNull] = None
    exit_code: int | None = None
    step: int | None = None
    epoch: int | None = None
    stopped_by: Literal["signal", "command"] | None = None
    """Cause of a stop: a signal, such as a scheduler's, or a command from a person or a program."""
    topic: Text | None = None
    """The page of `segapp docs` about the failure, if there is one."""


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
    | Settings
    | Alert
    | Oom
    | Heartbeat
    | RunEnd
)

EVENT_TYPES: dict[str, type[BaseModel]] = {kind.model_fields["type"].default: kind for kind in get_args(Event)}
"""The model of each `type`."""

FINAL_STATUSES = frozenset({"applied", "rejected", "cancelled"})
"""The statuses of a final answer to a command."""
