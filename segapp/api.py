"""segapp from Python: `from segapp import train, evaluate, predict, load`; errors are those of `segapp.errors`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.build.devices import plan_devices
from segapp.build.pairs import build_pixels
from segapp.build.trained import TrainedModel, load_trained
from segapp.commands.evaluate import EvalOptions, as_json, score_target
from segapp.commands.predict import PredictOptions, build_predictor
from segapp.config import RunConfig, load_config
from segapp.config.load import config_of
from segapp.errors import ConfigError
from segapp.inference.predict import OutputPlan, TrainedPredictor, find_images, parse_saved, predict_files
from segapp.inference.predict.pipeline import Tally
from segapp.run.events import Event, RunEnd, Val
from segapp.run.folder import RunFolder
from segapp.train.request import TrainRequest, plan_request
from segapp.train.session import run_session

Config = str | Path | Mapping[str, Any] | RunConfig
"""A config: a file or the name of one, nested plain values, or a validated config."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a training.

    Attributes:
        run: folder of the run.
        is_finished: False if it was stopped before its end.
        reason: why it ended.
        step: optimizer updates made.
        val: the last evaluation; None without one.
    """

    run: Path
    is_finished: bool
    reason: str
    step: int
    val: Val | None


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation.

    Attributes:
        split: name of the split.
        num_images: of the split.
        miou: mean IoU of the classes that occur, 0 to 1; None if no pixel is valid.
        iou: class -> IoU; None for a class that does not occur.
        pixel_accuracy: share of the valid pixels with the right class.
        loss: of the criterion of the training.
        confusion: pixels (C, C), row: target's class, column: predicted class.
    """

    split: str
    num_images: int
    miou: float | None
    iou: dict[str, float | None]
    pixel_accuracy: float | None
    loss: float | None
    confusion: NDArray[np.int64]


class Network:
    """A trained network, ready to predict.

    Attributes:
        trained: the network itself, its config and its classes.
        classes: names in the order of their ids.
    """

    def __init__(self, trained: TrainedModel) -> None:
        self.trained = trained
        self.classes = trained.scheme.names
        self._predictor = TrainedPredictor(
            trained.model, trained.inference, trained.scheme, trained.device, build_pixels(trained.config.data)
        )

    def predict(self, image: NDArray[Any]) -> NDArray[Any]:
        """Return the class ids (H, W), uint8 (uint16 for more than 256 classes), of an image (H, W, B), by default RGB.

        Raises:
            ValueError: it is no such image.
        """
        labels: NDArray[Any] = self._predictor.labels(self._checked(image)[None])[0]
        return labels

    def probabilities(self, image: NDArray[Any]) -> NDArray[np.float32]:
        """Return float32 (C, H, W), with sum 1 over C, of an image (H, W, B), uint8 RGB by default."""
        found: NDArray[np.float32] = self._predictor.probabilities(self._checked(image)[None])[0]
        return found

    def _checked(self, image: NDArray[Any]) -> NDArray[Any]:
        pixels = self._predictor.pixels
        if image.dtype != pixels.numpy_dtype or image.ndim != 3 or image.shape[2] != pixels.num_bands:
            wanted = f"{pixels.layout} of shape (H, W, {pixels.num_bands})"
            raise ValueError(f"image is {image.dtype} of shape {image.shape}: give {wanted}")
        return image


class _Results:
    """Keeps the last evaluation and the end of a training, and passes every event on."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self.val: Val | None = None
        self.end: RunEnd | None = None
        self._on_event = on_event

    def handle(self, event: Event) -> None:
        self.val = event if isinstance(event, Val) else self.val
        self.end = event if isinstance(event, RunEnd) else self.end
        if self._on_event is not None:
            self._on_event(event)

    def close(self) -> None:
        """Nothing is kept open."""


def train(
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    resume: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    handle_signals: bool = False,
) -> TrainResult:
    """Train in this process, and return when the training has ended; works in a notebook and in a thread.

    Args:
        config: what to train; may be left out where a run is resumed.
        overrides: `KEY=VALUE` words.
        run: folder of the run; None: runs/NAME.
        resume: auto, a run, or a checkpoint file, with a config file or none; None: a new training.
        on_event: called with each event of the run (`segapp.run.events`), in the thread that trains; an exception in
            it ends the training.
        handle_signals: let Ctrl-C and SIGTERM stop the training with a checkpoint; in the main thread only.

    Raises:
        SegappError: the training could not begin, or failed; the class tells why.
    """
    results, folder = _Results(on_event), None if run is None else Path(run)
    if resume is not None:
        if not isinstance(config, str | Path | None):
            raise ConfigError(f"resume = {resume!r} goes on with the run's config: leave config out, or name its file")
        request = plan_request(None if config is None else str(config), overrides, folder, resume)
    else:
        if config is None:
            raise ConfigError("config is missing: give a file, a dictionary or a RunConfig")
        request = TrainRequest(_read(config, overrides), run=folder)
    devices = plan_devices(request.config.parallel, is_one_process=True)
    if devices.mode == "ddp":
        raise ConfigError("parallel.mode = ddp starts processes: use segapp train, or parallel.mode=dp here")
    parallel = request.config.parallel.model_copy(update={"mode": devices.mode})
    if request.folder is None:
        path = RunFolder.create(request.config.name, path=request.run).path
        request = replace(request, run=path, config=request.config.model_copy(update={"parallel": parallel}))
    else:
        path = request.folder.path
    run_session(request, listener=results, handle_signals=handle_signals)
    end = results.end or RunEnd(status="finished", reason="already complete", exit_code=0, step=0)
    return TrainResult(path, end.status == "finished", end.reason or "", end.step or 0, results.val)


def evaluate(target: str | Path, *, split: str | None = None, slide: bool = False, tta: bool = False) -> EvalResult:
    """Evaluate a run (its best checkpoint) or a checkpoint on a split.

    Args:
        target: a run's name or folder, or a checkpoint.
        split: name of the split; None: the run's own for validation.
        slide: sliding window instead of the whole image.
        tta: average over a flip and several scales.

    Raises:
        SegappError: the network or the data cannot be used.
    """
    scored = score_target(str(target), EvalOptions(split, slide, tta))
    values = as_json(scored.found, scored.trained, scored.groups, scored.split)
    return EvalResult(
        scored.split,
        values["num_images"],
        values["miou"],
        dict(zip(values["classes"], values["iou"], strict=True)),
        values["pixel_accuracy"],
        values["loss"],
        scored.found.matrix.numpy(),
    )


def predict(
    target: str | Path, paths: Sequence[str | Path], out: str | Path, *, save: Sequence[str] = (), tta: bool = False
) -> Tally:
    """Predict image files and write the results, as `segapp predict` does.

    Args:
        target: a run's name or folder, a checkpoint, or an exported file.
        paths: images, videos, folders or globs.
        out: folder of the results.
        save: labels, color, overlay, probabilities; empty: all but the last.
        tta: average over a flip and several scales.

    Returns:
        Numbers of images and pixels, seconds, and `problems`: the files that could not be read.

    Raises:
        SegappError: the network cannot be used.
    """
    files = find_images([Path(path) for path in paths])
    predictor = build_predictor([str(target)], PredictOptions(tta=tta))
    kinds = parse_saved(list(save))
    plan = OutputPlan(Path(out), predictor.scheme)
    if kinds:
        plan = replace(plan, kinds=kinds, video_kinds=kinds)
    return predict_files(predictor, files, plan)


def load(target: str | Path, *, slide: bool = False, tta: bool = False) -> Network:
    """Return the network of a run (its best checkpoint), of a checkpoint, or of an exported safetensors file.

    Args:
        target: a run's name or folder, or a file.
        slide: sliding window instead of the whole image.
        tta: average over a flip and several scales.

    Raises:
        SegappError: it cannot be used.
    """
    return Network(load_trained(str(target), slide=slide, tta=tta))


def _read(config: Config, overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, str | Path):
        return load_config(config, overrides)
    raw = config.model_dump(mode="json") if isinstance(config, RunConfig) else copy.deepcopy(dict(config))
    return config_of(raw, overrides)
