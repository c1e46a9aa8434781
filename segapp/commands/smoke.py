"""`segapp train --smoke`: a few steps of a config on its own data, and what the whole training would need.

A real training with few images in a folder of its own: steps, an evaluation, a save; then a second one that resumes it,
whose steps are timed. What was measured is multiplied by the counts of the full config. The folder is removed.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from segapp.build.data import build_pairs, split_names
from segapp.build.devices import plan_devices
from segapp.config import RunConfig, validate_config
from segapp.datasets.sampling import num_batches
from segapp.errors import CheckpointError, ConfigError, DataError, StorageError
from segapp.run.events import EventReader
from segapp.run.folder import RunFolder
from segapp.run.text import printable
from segapp.train.request import ImageLimit, TrainRequest
from segapp.train.session import run_session
from segapp.train.telemetry.console import format_duration

NUM_STEPS = 4
"""Of the first training, and of an epoch of the second."""
TIMED_S = 4.0
"""The second training takes about so long where steps are quick, so that their median means something."""
MAX_EPOCHS = 16
NUM_VAL = 4
"""Validation images."""
_MEMORY_EVERY_S, _HEARTBEAT_EVERY_S = 2.0, 5.0


@dataclass(frozen=True)
class Measured:
    """What the few steps took.

    Attributes:
        step_s: seconds of a step, the wait for data included; median.
        data_wait_frac: share of it spent waiting for data.
        eval_image_s: seconds of a validation image.
        copy_s: seconds that training waits for the copy of a save.
        save_s: seconds of the writing, beside the training.
        checkpoint_bytes: of one checkpoint.
        step_event_bytes: of one line of events.jsonl.
        memory_event_bytes: of one `memory` line.
        tensorboard_step_bytes: that one published step leaves for TensorBoard.
        samples_bytes: of the sample pictures of one evaluation, TensorBoard's copy included.
        peak_mib: by device, what it held at most (a processor: the whole process).
        resumed_step: the step at which the second training went on.
    """

    step_s: float
    data_wait_frac: float
    eval_image_s: float
    copy_s: float
    save_s: float
    checkpoint_bytes: int
    step_event_bytes: float
    memory_event_bytes: float
    tensorboard_step_bytes: float
    samples_bytes: float
    peak_mib: dict[str, float]
    resumed_step: int


@dataclass(frozen=True)
class Need:
    """What a whole training needs.

    Attributes:
        num_train: training images.
        num_val: validation images.
        batch_size: images of a micro-batch.
        steps: in all.
        evaluations: in all.
        saves: in all, at least.
        train_s: seconds of the steps.
        eval_s: seconds of the evaluations.
        save_s: seconds that training waits for saves.
        total_s: seconds.
        peak_mib: by device.
        checkpoints_bytes: of those kept, and the one being written.
        events_bytes: of events.jsonl.
        tensorboard_bytes: of tensorboard/ and samples/.
        disk_bytes: of all.
        disk_free_bytes: where the runs lie.
    """

    num_train: int
    num_val: int
    batch_size: int
    steps: int
    evaluations: int
    saves: int
    train_s: float
    eval_s: float
    save_s: float
    total_s: float
    peak_mib: dict[str, float]
    checkpoints_bytes: int
    events_bytes: int
    tensorboard_bytes: int
    disk_bytes: int
    disk_free_bytes: int


def smoke(plan: TrainRequest, config_name: str, *, as_json: bool) -> int:
    """`segapp train --smoke`: runs the few steps and prints the report; lines of the trainings go to stderr.

    Args:
        plan: of a new training; nothing is written where it would lie.
        config_name: as it was asked for, for messages.
        as_json: print the report as JSON.

    Returns:
        The exit code of a training that was stopped, else 0.

    Raises:
        SegappError: what the training itself would have raised.
    """
    devices = plan_devices(plan.config.parallel)
    if devices.mode == "ddp":
        raise ConfigError("parallel.mode = ddp: --smoke runs in one process: add parallel.mode=dp, or single")
    try:
        num_train, num_val = (len(build_pairs(plan.config.data, split)) for split in split_names(plan.config.data))
        home = _existing(Path("runs") if plan.run is None else plan.run)
        with _folder_in(home) as folder:
            code = _train(plan.config, folder)
            if code != 0:
                return code
            config = validate_config(_yaml_of(folder))
            found = measure(folder, devices.devices)
            free_bytes = shutil.disk_usage(home).free
            needed = need(plan.config, config.train.batch_size, found, num_train, num_val, free_bytes)
    except DataError as error:
        raise DataError(f"{error}\nlook closer: segapp check --config {config_name}") from None
    report = {"measured": asdict(found), "full_run": asdict(needed)}
    print(json.dumps(report, indent=2) if as_json else "\n".join(report_lines(plan.config, found, needed)))
    return 0


def _existing(path: Path) -> Path:
    """The nearest folder above a run that is there: its disk will hold the run."""
    path = path.absolute()
    return next(parent for parent in path.parents if parent.is_dir())


@contextlib.contextmanager
def _folder_in(home: Path) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=".segapp-smoke-", dir=home))
    except OSError as error:
        raise StorageError(f"{home}: {error.strerror}: free space or choose another folder") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(config: RunConfig, folder: Path) -> int:
    """The two trainings; gives the first exit code that is not 0.

    Raises:
        CheckpointError: the second one did not go on where the first had ended.
    """
    limit = ImageLimit(NUM_STEPS * config.train.accumulate, NUM_VAL)
    with contextlib.redirect_stdout(sys.stderr):
        code = run_session(TrainRequest(_shortened(config, 1), run=folder / "run", limit=limit))
        if code != 0:
            return code
        run = RunFolder(folder / "run")
        step_s = _events(run.events, "step")[-1]["step_s"]
        num_more = max(1, min(MAX_EPOCHS, round(TIMED_S / NUM_STEPS / max(step_s, 1e-3))))
        code = run_session(TrainRequest(_shortened(config, 1 + num_more), run, limit=limit))
    starts = _events(run.events, "run_start")
    if code == 0 and (len(starts) != 2 or starts[1].get("resumed_from_step") != starts[0]["steps_per_epoch"]):
        raise CheckpointError("the smoke run did not go on from its own checkpoint: keep its lines and report this")
    return code


def _shortened(config: RunConfig, epochs: int) -> RunConfig:
    """The config with an evaluation and a save at its end, every step published, and nothing sent elsewhere."""
    raw = config.model_dump(mode="json")
    raw["train"] |= {"epochs": epochs, "early_stop": None}
    raw["eval"] |= {"every_epochs": epochs}
    raw["checkpoint"] |= {"every_epochs": None, "every_steps": None, "every_minutes": None, "keep": 1}
    raw["log"] |= {"every_steps": 1, "wandb": None, "mlflow": None}
    return validate_config(raw)


def _yaml_of(folder: Path) -> dict[str, Any]:
    from segapp.config.yaml_reader import parse_yaml

    raw, _ = parse_yaml((folder / "run" / "config.yaml").read_text(), "config.yaml")
    found: dict[str, Any] = raw
    return found


def measure(folder: Path, devices: Sequence[torch.device]) -> Measured:
    """What the two trainings in a folder have left.

    Args:
        folder: with their `run`.
        devices: that they used, in this process.
    """
    run = RunFolder(folder / "run")
    lines = [line for line in run.events.read_bytes().splitlines() if line]
    steps = _events(run.events, "step")
    resumed_step = _events(run.events, "run_start")[1]["resumed_from_step"]
    timed = [step for step in steps if step["step"] > resumed_step + 1] or steps[-1:]  # the first warms up
    vals, saves = _events(run.events, "val"), _events(run.events, "checkpoint")
    pictures = sum(path.stat().st_size for path in run.samples.rglob("*") if path.is_file())
    curves = sum(path.stat().st_size for path in run.tensorboard.rglob("*") if path.is_file())
    return Measured(
        step_s=median(step["step_s"] for step in timed),
        data_wait_frac=median(step["data_wait_frac"] or 0.0 for step in timed),
        eval_image_s=min(val["val_s"] / max(val["num_images"], 1) for val in vals),
        copy_s=max(save.get("copy_s") or 0.0 for save in saves),
        save_s=max(save.get("save_s") or 0.0 for save in saves),
        checkpoint_bytes=max(save["size_bytes"] for save in saves),
        step_event_bytes=_mean_length(lines, b'"type":"step"'),
        memory_event_bytes=_mean_length(lines, b'"type":"memory"'),
        # Its pictures are the samples again: what is left belongs to the steps.
        tensorboard_step_bytes=max(0, curves - pictures) / len(steps) if curves else 0.0,
        samples_bytes=(2 if curves else 1) * pictures / len(vals),
        peak_mib=_peaks(devices),
        resumed_step=resumed_step,
    )


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in EventReader(path).read_raw() if event["type"] == kind]


def _mean_length(lines: Sequence[bytes], mark: bytes) -> float:
    lengths = [len(line) + 1 for line in lines if mark in line]
    return sum(lengths) / max(len(lengths), 1)


def _peaks(devices: Sequence[torch.device]) -> dict[str, float]:
    """MiB by device: reserved by the allocator on a GPU, of the whole process on a processor."""
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return {
        str(device): torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else rss_mib
        for device in devices
    }


def need(config: RunConfig, batch_size: int, found: Measured, num_train: int, num_val: int, free_bytes: int) -> Need:
    """What a whole training needs: arithmetic with what was measured.

    Args:
        config: the full one.
        batch_size: of a micro-batch; where the config says `auto`, what that came to.
        found: what the few steps took.
        num_train: training images.
        num_val: validation images.
        free_bytes: of the disk.
    """
    epochs, section = config.train.epochs, config.checkpoint
    per_epoch = -(-num_batches(num_train, batch_size, drop_last=True) // config.train.accumulate)
    steps, evaluations = epochs * per_epoch, -(-epochs // config.eval.every_epochs)
    train_s, eval_s = steps * found.step_s, evaluations * num_val * found.eval_image_s
    by_epochs = 0 if section.every_epochs is None else epochs // section.every_epochs
    by_steps = 0 if section.every_steps is None else steps // section.every_steps
    by_time = 0 if section.every_minutes is None else int((train_s + eval_s) / 60 / section.every_minutes)
    saves = max(1, by_epochs + by_steps + by_time)
    save_s = saves * found.copy_s
    total_s = train_s + eval_s + save_s
    published = steps // config.log.every_steps + epochs
    events = (
        published * found.step_event_bytes
        + total_s * (found.memory_event_bytes / _MEMORY_EVERY_S + 100 / _HEARTBEAT_EVERY_S)
        + 500 * (evaluations + saves + epochs)
    )
    curves = published * found.tensorboard_step_bytes + evaluations * found.samples_bytes
    # The newest epochs, the best, and the one that is being written before an old one goes; at least the two newest.
    checkpoints = (max(section.keep, 2) + 2) * found.checkpoint_bytes
    return Need(
        num_train=num_train,
        num_val=num_val,
        batch_size=batch_size,
        steps=steps,
        evaluations=evaluations,
        saves=saves,
        train_s=train_s,
        eval_s=eval_s,
        save_s=save_s,
        total_s=total_s,
        peak_mib=found.peak_mib,
        checkpoints_bytes=checkpoints,
        events_bytes=round(events),
        tensorboard_bytes=round(curves),
        disk_bytes=round(checkpoints + events + curves),
        disk_free_bytes=free_bytes,
    )


def report_lines(config: RunConfig, found: Measured, needed: Need) -> list[str]:
    """The report for a person."""
    peaks = ", ".join(f"{device} {mib:.0f} MiB" for device, mib in needed.peak_mib.items())
    lines = [
        f"smoke run of {printable(config.name)}: trained, evaluated, saved, and resumed at step {found.resumed_step}",
        f"a step {found.step_s:.3f} s ({found.data_wait_frac:.0%} of it waiting for data), a validation image "
        f"{found.eval_image_s:.3f} s, a save {found.copy_s:.2f} s of waiting and {found.save_s:.2f} s of writing",
        f"a full run: {config.train.epochs} epochs of {needed.num_train} images in batches of {needed.batch_size}, "
        f"{needed.steps} steps, {needed.evaluations} evaluations of {needed.num_val} images",
        f"  time    {format_duration(needed.total_s)} (steps {format_duration(needed.train_s)}, evaluations "
        f"{format_duration(needed.eval_s)}, saves {format_duration(needed.save_s)})",
        f"  memory  {peaks} at most{_of_memory(config)}",
        f"  disk    {_size(needed.disk_bytes)} (checkpoints {_size(needed.checkpoints_bytes)}, TensorBoard and samples "
        f"{_size(needed.tensorboard_bytes)}, events {_size(needed.events_bytes)}); "
        f"free are {_size(needed.disk_free_bytes)}",
    ]
    if needed.disk_bytes > needed.disk_free_bytes:
        lines.append("  the disk is too small: lower checkpoint.keep, or choose another folder with --run")
    return lines


def _of_memory(config: RunConfig) -> str:
    workers = f", and {config.data.workers} data workers beside it" if config.data.workers else ""
    cache = "; data.cache = ram adds all images, decoded" if config.data.cache == "ram" else ""
    return workers + cache


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
