"""`segapp train --smoke`: run a few steps of a config on its own data, and estimate the needs of the whole training.

It runs a real training with few images in a temporary folder: steps, an evaluation, a save. A second training resumes
it, and its steps are timed. The measurements are multiplied by the counts of the full config; the folder is removed.
"""

import contextlib
import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from segapp.accelerator import gpu_of
from segapp.assembly.devices import plan_devices
from segapp.assembly.pairs import count_images, split_names
from segapp.checkpoint.saver import SAVING_SHARE
from segapp.config import CheckpointConfig, RunConfig, load_config, validate_config
from segapp.datasets.sampling import num_batches
from segapp.errors import CheckpointError, ConfigError, DataError, cannot_be_written
from segapp.run.events import EventReader
from segapp.run.folder import RunFolder
from segapp.run.words import duration, printable, size
from segapp.session.build import build_timetable
from segapp.session.request import ImageLimit, TrainRequest
from segapp.session.session import run_session
from segapp.session.start_checks import schedule_notes
from segapp.training.progress import Timetable

NUM_STEPS = 4
"""Number of steps of the first training, and of each epoch of the second."""
TIMED_S = 4.0
"""Approximate duration of the second training if its steps are short, so that they are enough for a median."""
MAX_EPOCHS = 16
NUM_VAL = 4


@dataclass(frozen=True)
class Measured:
    """Measurements of the two short trainings.

    `step_s` is a median, `slowest_step_s` is of both trainings, and `data_wait_frac` is the share of waiting for data.
    A save blocks the training for `copy_s` and writes for `save_s` in the background. `step_bytes` are events and
    curves of TensorBoard per published step, and `samples_bytes` are sample images per evaluation.
    """

    step_s: float
    slowest_step_s: float
    data_wait_frac: float
    eval_image_s: float
    copy_s: float
    save_s: float
    checkpoint_bytes: int
    step_bytes: float
    samples_bytes: float
    peak_mib: dict[str, float]
    resumed_step: int


def run_smoke(request: TrainRequest, config_name: str, *, as_json: bool) -> int:
    """Run the two short trainings, which print to stderr, and print the report; return the exit code."""
    devices = plan_devices(request.config, is_one_process=True)
    if devices.mode == "ddp":
        raise ConfigError(
            "parallel.mode = ddp: --smoke runs in one process: add parallel.mode=dp, or single", key="parallel.mode"
        )
    try:
        splits = split_names(request.config.data)
        num_train, num_val = (count_images(request.config.data, split) for split in splits)
        path = Path("runs" if request.run is None else request.run).absolute()
        home = next(parent for parent in path.parents if parent.is_dir())  # on the disk of the future run
        try:
            temporary = tempfile.TemporaryDirectory(prefix=".segapp-smoke-", dir=home, ignore_cleanup_errors=True)
        except OSError as error:
            raise cannot_be_written(home, error, "choose another folder with --run") from None
        with temporary as name:
            folder = Path(name)
            # A mode that this process can run: `auto` would start ranks on several GPUs.
            parallel = request.config.parallel.model_copy(update={"mode": devices.mode})
            code = _train_twice(request.config.model_copy(update={"parallel": parallel}), folder)
            if code != 0:
                return code
            batch_size = load_config(folder / "run" / "config.yaml").train.batch_size
            measured = measure(folder, devices.devices)
            free_bytes = shutil.disk_usage(home).free
            for note in schedule_notes(request.config, num_batches(num_train, batch_size)):
                print(f"alert: {note}", file=sys.stderr)
            full = estimate_full_run(request.config, batch_size, measured, num_train, num_val, free_bytes)
    except DataError as error:
        raise error.reworded(f"{error}\nlook closer: segapp check --config {config_name}") from None
    report = {"measured": asdict(measured), "full_run": full}
    print(json.dumps(report, indent=2) if as_json else "\n".join(report_lines(request.config, measured, full)))
    return 0


def _train_twice(config: RunConfig, folder: Path) -> int:
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
        raise CheckpointError("the smoke run did not resume from its own checkpoint: keep its output and report this")
    return code


def _shortened(config: RunConfig, epochs: int) -> RunConfig:
    """Return the config with one evaluation and one save at its end, every step recorded, and no external tracker.

    Parts of the model that are frozen for some epochs are trained in the second training, whose steps are timed.
    """
    raw = config.model_dump(mode="json")
    raw["train"] |= {"epochs": epochs, "steps": None, "early_stop": None}
    raw["model"] |= {"freeze_epochs": None if config.model.freeze_epochs is None else 1}
    raw["eval"] |= {"every_epochs": epochs, "every_steps": None}
    raw["checkpoint"] |= {"every_epochs": None, "every_steps": None, "every_minutes": None, "keep": 1}
    raw["log"] |= {"every_steps": 1, "wandb": None, "mlflow": None}
    return validate_config(raw)


def measure(folder: Path, devices: Sequence[torch.device]) -> Measured:
    run = RunFolder(folder / "run")
    steps = _events(run.events, "step")
    resumed_step = _events(run.events, "run_start")[1]["resumed_from_step"]
    timed = [step for step in steps if step["step"] > resumed_step + 1] or steps[-1:]  # the first is a warm-up
    usual = [step["step_s"] for step in steps if step["step"] not in (1, resumed_step + 1)]
    vals, saves = _events(run.events, "val"), _events(run.events, "checkpoint")
    pictures = sum(path.stat().st_size for path in run.samples.glob("epoch_*.png"))
    curves = sum(path.stat().st_size for path in run.tensorboard.rglob("*") if path.is_file())
    return Measured(
        step_s=median(step["step_s"] for step in timed),
        slowest_step_s=max(usual, default=timed[-1]["step_s"]),
        data_wait_frac=median(step["data_wait_frac"] or 0.0 for step in timed),
        eval_image_s=min(val["val_s"] / max(val["num_images"], 1) for val in vals),
        copy_s=max(save.get("copy_s") or 0.0 for save in saves),
        save_s=max(save.get("save_s") or 0.0 for save in saves),
        checkpoint_bytes=max(save["size_bytes"] for save in saves),
        step_bytes=(run.events.stat().st_size + curves) / len(steps),
        samples_bytes=pictures / len(vals),
        peak_mib=_peaks(devices),
        resumed_step=resumed_step,
    )


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in EventReader(path).read_raw() if event["type"] == kind]


def _peaks(devices: Sequence[torch.device]) -> dict[str, float]:
    """Return peak MiB by device: reserved by the allocator on a GPU, resident memory of the process on the CPU."""
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return {
        str(device): gpu.peak_reserved_bytes(device) / 2**20 if (gpu := gpu_of(device)) else rss_mib
        for device in devices
    }


def estimate_full_run(
    config: RunConfig, batch_size: int, measured: Measured, num_train: int, num_val: int, free_bytes: int
) -> dict[str, Any]:
    """Multiply the measurements by the counts of the full config; `total_s` and `disk_bytes` are the sums."""
    timetable = build_timetable(config, num_batches(num_train, batch_size))
    steps, evaluations = timetable.num_steps, timetable.num_evaluations()
    train_s, eval_s = steps * measured.step_s, evaluations * num_val * measured.eval_image_s
    saves = _num_saves(config.checkpoint, timetable, train_s + eval_s, measured.copy_s + measured.save_s)
    published = steps // config.log.every_steps + timetable.epochs
    records = published * measured.step_bytes + evaluations * measured.samples_bytes
    # The kept epochs (at least the two newest), the best, and the one being written before an old one is removed.
    checkpoints = (max(config.checkpoint.keep, 2) + 2) * measured.checkpoint_bytes
    return {
        "num_train": num_train,
        "num_val": num_val,
        "batch_size": batch_size,
        "epochs": timetable.epochs,
        "steps": steps,
        "evaluations": evaluations,
        "saves": saves,
        "train_s": train_s,
        "eval_s": eval_s,
        "save_s": saves * measured.copy_s,
        "total_s": train_s + eval_s + saves * measured.copy_s,
        "peak_mib": measured.peak_mib,
        "checkpoints_bytes": checkpoints,
        "records_bytes": round(records),
        "disk_bytes": round(checkpoints + records),
        "disk_free_bytes": free_bytes,
    }


def _num_saves(section: CheckpointConfig, timetable: Timetable, seconds: float, save_s: float) -> int:
    """Return the saves of a training of this duration, if a copy and a write take `save_s`."""
    due = {timetable.num_steps}
    for every, unit in ((section.every_epochs, timetable.steps_per_epoch), (section.every_steps, 1)):
        if every is not None:
            due.update(range(every * unit, timetable.num_steps, every * unit))
    num_due = len(due)
    if section.every_minutes is not None:
        num_due = max(num_due, int(seconds / (60 * section.every_minutes)))
    num_made = min(num_due, 2 + int(SAVING_SHARE * seconds / save_s)) if save_s else num_due
    return num_made + 1  # before the first evaluation


def report_lines(config: RunConfig, measured: Measured, full: Mapping[str, Any]) -> list[str]:
    peaks = ", ".join(f"{device} {mib:.0f} MiB" for device, mib in full["peak_mib"].items())
    workers = {"auto": ", plus the data workers", 0: ""}.get(
        config.data.workers, f", plus {config.data.workers} data workers"
    )
    adds = {"ram": "adds all decoded images", "auto": "may add up to 25 % of the free memory"}.get(config.data.cache)
    cache = f"; data.cache = {config.data.cache} {adds}" if adds else ""
    lines = [
        f"smoke run of {printable(config.name)}: trained, evaluated, saved, resumed at step {measured.resumed_step}",
        f"a step {measured.step_s:.3f} s ({measured.data_wait_frac:.0%} of it waiting for data), a validation image "
        f"{measured.eval_image_s:.3f} s, a save {measured.copy_s:.2f} s of waiting and {measured.save_s:.2f} s of "
        "writing",
        f"a full run: {full['epochs']} epochs of {full['num_train']} images in batches of {full['batch_size']}, "
        f"{full['steps']} steps, {full['evaluations']} evaluations of {full['num_val']} images",
        f"  time    {duration(full['total_s'])} (steps {duration(full['train_s'])}, evaluations "
        f"{duration(full['eval_s'])}, saves {duration(full['save_s'])})",
        f"  memory  {peaks} at most{workers}{cache}",
        f"  disk    {size(full['disk_bytes'])} (checkpoints {size(full['checkpoints_bytes'])}, events, curves "
        f"and samples {size(full['records_bytes'])}); {size(full['disk_free_bytes'])} are free",
    ]
    if measured.slowest_step_s > 2 * measured.step_s:
        lines.append(
            f"  the slowest step took {measured.slowest_step_s:.3f} s: if other programs keep this machine as busy, "
            f"the steps take up to {duration(full['train_s'] * measured.slowest_step_s / measured.step_s)}"
        )
    if full["disk_bytes"] > full["disk_free_bytes"]:
        lines.append("  the disk is too small: lower checkpoint.keep, or choose another folder with --run")
    return lines
