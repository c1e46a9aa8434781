"""Send a run's metrics to TensorBoard, Weights & Biases and MLflow.

Trackers get the events of the main rank. They cannot stop a training: a tracker that raises is switched off.
"""

import math
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from segapp.config import RunConfig
from segapp.config.values import flat_settings
from segapp.errors import ConfigError, without_secrets
from segapp.run.events import Event, Memory, RunEnd, Step, Val
from segapp.run.folder import RunFolder
from segapp.run.words import first_line, printable
from segapp.scores import SCORES, count_scored, score_named

_FILES_OF_WANDB = ("wandb/settings", ".wandb/settings", "config-defaults.yaml")
_OFF = {"tensorboard": "false", "wandb": "null, or WANDB_MODE=offline in the environment", "mlflow": "null"}
_ANSWER_S = "6"
"""Seconds in which a server of W&B or MLflow must answer, unless the user's variables say otherwise."""


class Tracker(Protocol):
    """An experiment tracker."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log finite numbers of one step."""

    def close(self, status: str, best: Mapping[str, float]) -> None:
        """Flush and end the tracker's run."""


class TrackerListener:
    """Sends events to a tracker."""

    def __init__(
        self, name: str, tracker: Tracker, classes: Sequence[str], monitor: str = "miou", best: float | None = None
    ) -> None:
        self.name, self.classes, self._monitor = name, list(classes), score_named(monitor)
        self._tracker: Tracker | None = tracker
        self._step = 0
        self._status = "failed"
        sign = 1 if self._monitor.larger_is_better else -1
        self._best = {} if best is None else {f"best_{monitor}": sign * best}

    def handle(self, event: Event) -> None:
        match event:
            case Step():
                self._step = event.step
                shown = ("loss", "lr", "images_per_s", "data_wait_frac", "grad_norm", "loss_scale")
                values = {name: getattr(event, name) for name in shown}
                self._scalars({f"train/{name}": value for name, value in values.items()})
                self._scalars({f"train/{name}": value for name, value in (event.terms or {}).items()})
            case Val():
                self._step = event.step
                values = {f"val/{name}": event.score(name) for name in SCORES}
                values["val/num_scored"] = count_scored(event.iou)
                self._scalars(values | {f"iou/{n}": iou for n, iou in zip(self.classes, event.iou, strict=True)})
                value, name = event.score(self._monitor.name, self.classes), f"best_{self._monitor.name}"
                if value is not None:
                    better = max if self._monitor.larger_is_better else min
                    self._best[name] = better(value, self._best.get(name, value))
            case Memory():
                names = [device.device or f"device {i}" for i, device in enumerate(event.devices)]
                peaks = zip(names, event.devices, strict=True)
                self._scalars({f"memory/{i}_{name}_peak_mib": d.peak_mib for i, (name, d) in enumerate(peaks)})
            case RunEnd():
                self._status = event.status

    def close(self) -> None:
        """Close the tracker; idempotent."""
        self._try(lambda tracker: tracker.close(self._status, self._best))
        self._tracker = None

    def _scalars(self, values: Mapping[str, float | None]) -> None:
        finite = {key: float(v) for key, v in values.items() if v is not None and math.isfinite(v)}
        if finite:
            self._try(lambda tracker: tracker.scalars(finite, self._step))

    def _try(self, call: Callable[..., None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # a server, a disk, or a version of the tracker's package
            self._tracker = None
            what = without_secrets(f"{type(error).__name__}: {first_line(error)}")
            print(f"note: {self.name} is switched off for this training: {printable(what)[:300]}", file=sys.stderr)


class TensorBoardTracker:
    """Writes TensorBoard event files; points of earlier files from `purge_step` on, which is repeated, are hidden."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = {key: v if isinstance(v, (bool, int, float)) else str(v) for key, v in settings.items()}
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)
        self._excepthook = threading.excepthook
        threading.excepthook = self._leave_to_next_point

    def _leave_to_next_point(self, args: Any) -> None:
        """Ignore an error of TensorBoard's own thread, such as a full disk: the next point raises it again."""
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard")):
            self._excepthook(args)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, status: str, best: Mapping[str, float]) -> None:
        """Write the best scores next to the settings, and close the files."""
        from torch.utils.tensorboard.summary import hparams

        make: Any = hparams
        threading.excepthook = self._excepthook
        for summary in make(self._settings, dict(best)):
            self._writer.file_writer.add_summary(summary)
        self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases; with WANDB_MODE=offline, or without an answer of the server, to this machine only."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any], run_id: str, name: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it sends tracebacks to its makers
        os.environ.setdefault("WANDB_DISABLE_GIT", "true")  # git runs programs that the repository of a folder names
        if found := [name for name in _FILES_OF_WANDB if os.path.lexists(name)]:
            note = f"log.wandb does not read {', '.join(found)} in the current folder: set WANDB_BASE_URL and the like"
            print(f"note: {note}", file=sys.stderr)
        from unittest import mock  # takes 40 ms to import

        import wandb

        def init(**options: Any) -> Any:
            return wandb.init(
                project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(settings),
                settings=wandb.Settings(console="off", silent=True, **options),
            )  # fmt: skip

        with (  # raises if wandb has no such attribute, so another version reads none of these files either
            mock.patch.object(wandb.Settings, "settings_workspace", os.devnull),
            mock.patch("wandb.sdk.wandb_config.Config._load_defaults"),
            open(os.devnull) as no_terminal,
            mock.patch.object(sys, "stdin", no_terminal),  # without a key, wandb would ask for one and wait
        ):
            if "WANDB_MODE" in os.environ:
                self._run: Any = init()
                return
            try:
                self._run = init(init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _ANSWER_S)))
            except Exception as error:  # no network, no key, a server that refuses it
                what = printable(without_secrets(f"{type(error).__name__}: {first_line(error)}"))[:300]
                if wandb.run is None:
                    wandb.teardown()  # else its service holds the id of this run
                self._run = init(mode="offline")
                note = f"log.wandb continues offline ({what}): upload the run later with wandb sync"
                print(f"note: {note} {shlex.quote(os.path.dirname(self._run.dir))}", file=sys.stderr)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str, best: Mapping[str, float]) -> None:
        self._run.summary.update(dict(best))
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MlflowTracker:
    """Logs to MLflow: a server, a database, or a folder, such as `sqlite:///mlflow.db` or `http://box:5000`.

    A resumed run continues with the `run_id` of the segapp run.
    """

    _ENDS = {"finished": "FINISHED", "stopped": "KILLED"}  # noqa: RUF012 -- a constant

    def __init__(self, uri: str, experiment: str, settings: Mapping[str, Any], run_id: str, name: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it sends statistics to its makers
        from unittest import mock

        from mlflow.entities import Metric, Param, RunStatus
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=uri)
        limits = {"MLFLOW_HTTP_REQUEST_TIMEOUT": _ANSWER_S, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        with mock.patch.dict(os.environ, limits | dict(os.environ)):  # later requests are repeated for minutes
            known = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if known is None else known.experiment_id
        earlier = self._client.search_runs([experiment_id], f"tags.segapp_run_id = '{run_id}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
            return
        self._id = self._client.create_run(experiment_id, run_name=name, tags={"segapp_run_id": run_id}).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step in one request."""
        import time

        now_ms = int(time.time() * 1000)
        metrics = [self._metric(_name_of_mlflow(tag), value, now_ms, step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, status: str, best: Mapping[str, float]) -> None:
        for key, value in best.items():
            self._client.set_tag(self._id, _name_of_mlflow(key), f"{value:.6f}")
        self._client.set_terminated(self._id, self._ENDS.get(status, "FAILED"))


def _name_of_mlflow(tag: str) -> str:
    """Return a name for a metric or a tag: MLflow does not allow other characters."""
    return re.sub(r"[^A-Za-z0-9_\-./ ]", "_", tag)


def make_trackers(
    config: RunConfig, folder: RunFolder, classes: Sequence[str], step: int | None, best: float | None = None
) -> list[TrackerListener]:
    """Return the trackers in the config; `best` is the best value before a resume, of which larger is better.

    Raises:
        ConfigError: A tracker's package is not installed, or the tracker cannot be opened.
    """
    settings = flat_settings(config.model_dump(mode="json"))
    info = folder.read_info()
    run_id = info.id if info is not None else folder.name
    log, listeners = config.log, []

    def add(name: str, package: str, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] == package.split("-")[0]:
                raise ConfigError(f"log.{name} needs the package {package}: pip install {package}") from None
            raise
        except Exception as error:  # no login, no server, no disk space
            what = without_secrets(f"{type(error).__name__}: {first_line(error)}")
            raise ConfigError(
                f"log.{name} cannot be used: {printable(what)[:300]}: correct it, or set log.{name}: {_OFF[name]}"
            ) from None
        listeners.append(TrackerListener(name, tracker, classes, config.checkpoint.monitor, best))

    if log.tensorboard:
        purge = None if step is None else step + 1
        add("tensorboard", "tensorboard", lambda: TensorBoardTracker(folder.tensorboard, settings, purge))
    if log.wandb is not None:
        project = log.wandb
        add("wandb", "wandb", lambda: WandbTracker(folder.path, project, settings, run_id, folder.name))
    if log.mlflow is not None:
        whole = os.environ.get("MLFLOW_TRACKING_URI", "")  # may hold the password of the same address
        uri = whole if without_secrets(whole) == log.mlflow else log.mlflow
        add("mlflow", "mlflow-skinny", lambda: MlflowTracker(uri, config.name, settings, run_id, folder.name))
    return listeners
