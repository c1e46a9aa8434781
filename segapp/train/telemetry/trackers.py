"""What a run has measured, in the tools people watch runs with: TensorBoard, Weights & Biases, MLflow.

They are made from the events, on the main rank, and can never stop a training: a tracker that fails is switched off.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from segapp.config import RunConfig
from segapp.datasets.masks import read_image
from segapp.errors import ConfigError
from segapp.run.events import EpochStart, Event, Memory, RunEnd, Step, Val
from segapp.run.folder import RunFolder
from segapp.run.text import printable


class Tracker(Protocol):
    """One tool."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Takes finite numbers of one step."""
        ...

    def picture(self, file: Path, step: int) -> None:
        """Takes a PNG file."""
        ...

    def close(self, status: str, best: Mapping[str, float]) -> None:
        """Writes what waits; `status` is that of `run_end`, `best` the results to keep beside the settings."""
        ...


class TrackerListener:
    """Turns events into a tracker's calls.

    Args:
        name: of the tool, for messages.
        tracker: the tool.
        classes: names for the per-class IoU curves.
        pictures: folder of the sample pictures.
    """

    def __init__(self, name: str, tracker: Tracker, classes: Sequence[str], pictures: Path) -> None:
        self.name, self.classes = name, list(classes)
        self._tracker: Tracker | None = tracker
        self._pictures = pictures
        self._seen = set(_pictures_in(pictures))
        self._step = 0
        self._status = "failed"
        self._best: dict[str, float] = {}

    def handle(self, event: Event) -> None:
        """Send what the tracker shows of one event."""
        match event:
            case Step():
                self._step = event.step
                self._scalars(
                    {
                        "train/loss": event.loss,
                        "train/lr": event.lr,
                        "train/images_per_s": event.images_per_s,
                        "train/data_wait_frac": event.data_wait_frac,
                        "train/grad_norm": event.grad_norm,
                        "train/loss_scale": event.loss_scale,
                    }
                )
                self._scalars({f"train/{name}": value for name, value in (event.terms or {}).items()})
            case Val():
                self._step = event.step
                values = {"val/loss": event.loss, "val/miou": event.miou, "val/pixel_accuracy": event.pixel_accuracy}
                self._scalars(values | {f"iou/{n}": iou for n, iou in zip(self.classes, event.iou, strict=True)})
                if event.miou is not None:
                    self._best["best_miou"] = max(event.miou, self._best.get("best_miou", -math.inf))
            case Memory():
                names = [device.device or f"device {i}" for i, device in enumerate(event.devices)]
                peaks = zip(names, event.devices, strict=True)
                self._scalars({f"memory/{i}_{name}_peak_mib": d.peak_mib for i, (name, d) in enumerate(peaks)})
            case EpochStart():
                self._new_pictures()
            case RunEnd():
                self._status = event.status
                self._new_pictures()

    def close(self) -> None:
        """Writes what waits."""
        self._try(lambda tracker: tracker.close(self._status, self._best))
        self._tracker = None

    def _scalars(self, values: Mapping[str, float | None]) -> None:
        finite = {key: float(v) for key, v in values.items() if v is not None and math.isfinite(v)}
        if finite:
            self._try(lambda tracker: tracker.scalars(finite, self._step))

    def _new_pictures(self) -> None:
        for file in _pictures_in(self._pictures):
            if file not in self._seen:
                self._seen.add(file)
                self._try(lambda tracker, file=file: tracker.picture(file, self._step))

    def _try(self, call: Callable[..., None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # somebody else's server, disk or version
            self._tracker = None
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"note: {self.name} is switched off for this training: {printable(what)[:300]}", file=sys.stderr)


def _pictures_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png")) if folder.is_dir() else []


class TensorBoardTracker:
    """Event files in the run folder.

    Args:
        folder: where they go.
        settings: flat config, shown under hparams.
        purge_step: on resume, later points of an earlier attempt are hidden.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = {key: v if isinstance(v, (bool, int, float)) else str(v) for key, v in settings.items()}
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def picture(self, file: Path, step: int) -> None:
        """See `Tracker`."""
        self._writer.add_image(f"samples/{_series(file)}", read_image(file), step, dataformats="HWC")

    def close(self, status: str, best: Mapping[str, float]) -> None:
        """See `Tracker`."""
        from torch.utils.tensorboard.summary import hparams

        make: Any = hparams
        for summary in make(self._settings, dict(best)):
            self._writer.file_writer.add_summary(summary)
        self._writer.close()


class WandbTracker:
    """Weights & Biases; with WANDB_MODE=offline nothing leaves the machine.

    Args:
        folder: its files go into `wandb` below.
        project: in which the run appears.
        settings: flat config.
        run_id: a resumed run goes on under it.
        name: of the run.
    """

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any], run_id: str, name: str) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def picture(self, file: Path, step: int) -> None:
        """See `Tracker`."""
        self._run.log({f"samples/{_series(file)}": self._wandb.Image(str(file))}, step=step)

    def close(self, status: str, best: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.summary.update(dict(best))
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MlflowTracker:
    """MLflow, at the tracking address given: a server, a database, or a folder.

    Args:
        uri: the tracking address, such as `file:./mlruns` or `http://box:5000`.
        experiment: in which the run appears.
        settings: flat config.
        run_id: of segapp; a resumed run goes on under it.
        name: of the run.
    """

    _ENDS = {"finished": "FINISHED", "stopped": "KILLED"}  # noqa: RUF012 -- a constant

    def __init__(self, uri: str, experiment: str, settings: Mapping[str, Any], run_id: str, name: str) -> None:
        from mlflow.entities import Metric, Param, RunStatus
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        earlier = self._client.search_runs([number], f"tags.segapp_run_id = '{run_id}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
            return
        self._id = self._client.create_run(number, run_name=name, tags={"segapp_run_id": run_id}).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        import time

        now_ms = int(time.time() * 1000)
        metrics = [self._metric(_allowed(tag), value, now_ms, step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, file: Path, step: int) -> None:
        """See `Tracker`."""
        self._client.log_artifact(self._id, str(file), "samples")

    def close(self, status: str, best: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for key, value in best.items():
            self._client.set_tag(self._id, key, f"{value:.6f}")
        self._client.set_terminated(self._id, self._ENDS.get(status, "FAILED"))


def _allowed(tag: str) -> str:
    """MLflow's metric names hold letters, digits, and a few signs."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. /") else "_" for c in tag)


def _series(file: Path) -> str:
    """The number of the image in `epoch_0004_2.png`: pictures of one image are one series."""
    return file.stem.rsplit("_", 1)[-1]


def make_trackers(
    config: RunConfig, folder: RunFolder, classes: Sequence[str], step: int | None
) -> list[TrackerListener]:
    """The trackers that the config asks for.

    Args:
        config: of the run.
        folder: of the run.
        classes: their names.
        step: of the checkpoint that training goes on from.

    Raises:
        ConfigError: a tracker's package is not installed.
    """
    settings = flat_settings(config.model_dump(mode="json"))
    info = folder.read_info()
    run_id = info.id if info is not None else folder.name
    log, made = config.log, []

    def add(name: str, package: str, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] == package.split("-")[0]:
                raise ConfigError(f"log.{name} needs the package {package}: pip install {package}") from None
            raise
        except Exception as error:  # no login, no server, no room
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                f"log.{name} cannot be used: {printable(what)[:300]}: mend it, or switch it off"
            ) from None
        made.append(TrackerListener(name, tracker, classes, folder.samples))

    if log.tensorboard:
        purge = None if step is None else step + 1
        add("tensorboard", "tensorboard", lambda: TensorBoardTracker(folder.tensorboard, settings, purge))
    if log.wandb is not None:
        project = log.wandb
        add("wandb", "wandb", lambda: WandbTracker(folder.path, project, settings, run_id, folder.name))
    if log.mlflow is not None:
        uri = log.mlflow
        add("mlflow", "mlflow-skinny", lambda: MlflowTracker(uri, config.name, settings, run_id, folder.name))
    return made


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat_settings(value, f"{prefix}{key}.")
        else:
            found[prefix + str(key)] = value
    return found
