"""segapp from Python: `from segapp import train, evaluate, predict, load`; errors are those of `segapp.errors`.

The module itself loads no torch: the functions import what they need.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from segapp.errors import ConfigError, DataError, accepted_words
from segapp.scores import SCORES, EpochLoss, count_scored

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from segapp.build.trained import TrainedModel
    from segapp.config import RunConfig
    from segapp.inference.predict.pipeline import Tally
    from segapp.run.events import Event, RunEnd
    from segapp.training.signals import StopSignals

Config: TypeAlias = "str | Path | Mapping[str, Any] | RunConfig"
"""A config: a file or the name of one, nested plain values, or a validated config."""
Picture: TypeAlias = "str | Path | NDArray[Any] | Any"
"""An image: a file, an array (H, W, B) as it is stored, by default uint8 RGB, or a PIL image."""


class StopTraining(Exception):  # noqa: N818 - it is a request, not an error
    """Raise it in `on_event` to stop a training: it saves a checkpoint, and `train` returns with the message."""


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Scores of an evaluation; each is an attribute too, such as `miou`, `mean_dice` and `loss`.

    Attributes:
        scores: name -> score, those of `segapp.scores.SCORES`; None where a value is not known: a mean over no class,
            a loss that was not finite, or that of networks of different losses.
        iou: class -> IoU; None for a class that does not occur.
        num_images: of the split.
    """

    scores: dict[str, float | None]
    iou: dict[str, float | None]
    num_images: int | None = None

    def __getattr__(self, name: str) -> float | None:
        scores: dict[str, float | None] = self.__dict__.get("scores", {})
        if name in scores:
            return scores[name]
        raise AttributeError(f"{type(self).__name__} has no {name}: its scores are {', '.join(scores)}")

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.iou)

    @property
    def num_scored(self) -> int:
        """Number of classes that `miou` is the mean of: those in the targets or the predictions."""
        return count_scored(list(self.iou.values()))


@dataclass(frozen=True, kw_only=True)
class Evaluated(_Scored):
    """One evaluation during a training, with its scores.

    Attributes:
        epoch: counted from 1.
        step: optimizer updates made.
        train_loss: mean training loss of the epoch so far, as `segapp ls` shows it; None if it was not finite.
        val_s: seconds that it took.
    """

    epoch: int
    step: int
    train_loss: float | None
    val_s: float | None = None


class History(tuple[Evaluated, ...]):
    """The evaluations of a run, in order."""

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame: a row per evaluation, a column `iou NAME` per class.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise ConfigError("to_pandas needs pandas: pip install pandas, or use the rows as they are") from None
        plain = ("epoch", "step", "train_loss", "num_images", "val_s", "num_scored")
        rows = [
            {**{name: getattr(row, name) for name in plain}, **row.scores}
            | {f"iou {name}": value for name, value in row.iou.items()}
            for row in self
        ]
        return pandas.DataFrame(rows)


@dataclass(frozen=True)
class TrainResult:
    """Result of a training.

    Attributes:
        run: folder of the run.
        is_finished: False if it was stopped before its end.
        reason: why it ended.
        step: optimizer updates made.
        history: all evaluations of the run, those before a resume too.
    """

    run: Path
    is_finished: bool
    reason: str
    step: int
    history: History

    @property
    def val(self) -> Evaluated | None:
        """The last evaluation; None without one."""
        return self.history[-1] if self.history else None


@dataclass(frozen=True, kw_only=True)
class EvalResult(_Scored):
    """Result of an evaluation, with its scores.

    Attributes:
        split: name of the split.
        confusion: pixels (C, C), row: target's class, column: predicted class.
    """

    split: str
    confusion: NDArray[np.int64]


class Network:
    """A trained network, ready to predict.

    Attributes:
        trained: the network itself, its config and its classes.
        classes: names in the order of their ids.
    """

    def __init__(self, trained: TrainedModel) -> None:
        from segapp.commands.predict import predictor_of

        self.trained = trained
        self.classes = trained.scheme.names
        self._predictor = predictor_of(trained)

    @property
    def module(self) -> nn.Module:
        """The `nn.Module`, in eval mode: normalised images (N, B, H, W) to a tuple, low-resolution logits first."""
        return self.trained.model

    def predict(self, image: Picture | list[Picture]) -> Any:
        """Return the class ids (H, W), uint8 (uint16 for more than 256 classes), of an image.

        Args:
            image: a file, an array (H, W, B) of stored values, by default uint8 RGB, or a PIL image. A list gives a
                list, and a batch (N, H, W, B) gives (N, H, W).

        Raises:
            DataError: the file cannot be read.
            ValueError: it is no such image.
        """
        return self._each(image, self._predictor.labels)

    def probabilities(self, image: Picture | list[Picture]) -> Any:
        """Return float32 (C, H, W), with sum 1 over C, of an image; of lists and batches as `predict` does.

        Raises:
            DataError: the file cannot be read.
            ValueError: it is no such image.
        """
        return self._each(image, self._predictor.probabilities)

    def _each(self, image: Any, compute: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
        if isinstance(image, list):
            return [self._each(one, compute) for one in image]
        if isinstance(image, np.ndarray) and image.ndim == 4:
            return compute(self._checked(image))
        return compute(self._checked(self._pixels_of(image))[None])[0]

    def _pixels_of(self, image: Any) -> NDArray[Any]:
        """Return the stored values (H, W, B) of a file, a PIL image or an array."""
        from PIL import Image, ImageOps

        from segapp.inference.predict import InputFile
        from segapp.inference.predict.reading import read_picture

        if isinstance(image, (str, Path)):
            path = Path(image)
            if not path.is_file():
                raise DataError(f"{path} is no file: check the path", path=path)
            return np.asarray(read_picture(InputFile(path, path.stem), self._predictor.pixels).pixels[:])
        if isinstance(image, Image.Image):
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        if not isinstance(image, np.ndarray):
            raise ValueError(
                f"image is a {type(image).__name__}: give a path, an array, a PIL image, or a list of them"
            )
        return image

    def _checked(self, image: NDArray[Any]) -> NDArray[Any]:
        pixels = self._predictor.pixels
        if image.dtype != pixels.numpy_dtype or image.ndim not in (3, 4) or image.shape[-1] != pixels.num_bands:
            wanted = f"{pixels.layout} of shape (H, W, {pixels.num_bands})"
            raise ValueError(f"image is {image.dtype} of shape {image.shape}: give {wanted}")
        return image


class _Events:
    """Passes the events of a training on, keeps its end, and stops it if the listener asks for that."""

    def __init__(
        self, on_event: Callable[[Event], None] | None, types: Collection[str] | None, signals: StopSignals
    ) -> None:
        self.end: RunEnd | None = None
        self._on_event, self._types, self._signals = on_event, types, signals

    def handle(self, event: Event) -> None:
        if event.type == "run_end":
            self.end = event
        if self._on_event is None or (self._types is not None and event.type not in self._types):
            return
        try:
            self._on_event(event)
        except StopTraining as stop:
            self._signals.request_stop(str(stop) or "on_event raised StopTraining")

    def close(self) -> None:
        """Nothing is kept open."""


def train(
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    resume: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    event_types: Collection[str] | None = None,
    handle_signals: bool = False,
) -> TrainResult:
    """Train in this process, and return when the training has ended; works in a notebook and in a thread.

    Args:
        config: the config; may be left out if a run is resumed.
        overrides: `KEY=VALUE` words.
        run: folder of the run; None: runs/NAME.
        resume: auto, a run, or a checkpoint file, with a config file or none; None: a new training.
        on_event: called with each event of the run (`segapp.run.events`), most of them in the thread that trains.
            `raise StopTraining("reason")` in it stops the training at the next step with a checkpoint; any other
            exception ends the training as failed.
        event_types: the types of events that `on_event` gets, such as `["step", "val"]`; None: all.
        handle_signals: let Ctrl-C and SIGTERM stop the training with a checkpoint; in the main thread only.

    Raises:
        SegappError: the training could not begin, or failed; its class says why.
    """
    from segapp.build.devices import plan_devices
    from segapp.run.folder import RunFolder
    from segapp.training.launchers import adopt_launcher
    from segapp.training.request import TrainRequest, plan_request
    from segapp.training.session import run_session
    from segapp.training.signals import StopSignals

    _check_event_types(event_types)
    folder = None if run is None else Path(run)
    if resume is None:
        if config is None:
            raise ConfigError("config is missing: give a file, a dictionary or a RunConfig")
        request = TrainRequest(_read(config, overrides), run=folder)
    elif isinstance(config, str | Path | None):
        request = plan_request(None if config is None else str(config), overrides, folder, resume)
    else:
        raise ConfigError(f"resume = {resume!r} continues with the run's config: leave config out, or name its file")
    # On a copy: this process belongs to the caller, and no ranks are started here.
    if request.config.parallel.mode != "single" and (launcher := adopt_launcher(dict(os.environ))):
        raise ConfigError(
            f"{launcher} started several tasks, each of which would train the whole run: use the command segapp train, "
            "or parallel.mode=single for separate runs",
            key="parallel.mode",
        ).see("several-machines")
    devices = plan_devices(request.config, is_one_process=True)
    if devices.mode == "ddp":
        raise ConfigError(
            "parallel.mode = ddp starts processes: use segapp train, or parallel.mode=dp here", key="parallel.mode"
        )
    parallel = request.config.parallel.model_copy(update={"mode": devices.mode})
    if request.folder is None:
        path = RunFolder.create(request.config.name, path=request.run).path
        request = replace(request, run=path, config=request.config.model_copy(update={"parallel": parallel}))
    else:
        path = request.folder.path
    signals = StopSignals(is_active=handle_signals)
    listener = _Events(on_event, event_types, signals)
    run_session(request, listener=listener, signals=signals)
    history, end = _read_history(path), listener.end
    if end is None:
        return TrainResult(path, True, "already complete", 0, history)
    return TrainResult(path, end.status == "finished", end.reason or "", end.step or 0, history)


def _check_event_types(types: Collection[str] | None) -> None:
    """Check the names of events; ConfigError if one is not known."""
    from segapp.run.events import EVENT_TYPES

    if isinstance(types, str):
        raise ConfigError(f"event_types = {types!r} is one word: give a list of names, e.g. [{types!r}]")
    for name in types or ():
        if name not in EVENT_TYPES:
            raise ConfigError(f"event_types: there is no event {name!r}: {accepted_words(name, EVENT_TYPES)}")


def _read_history(path: Path) -> History:
    """Return the evaluations of a run from its events."""
    from segapp.run.events import EventReader, Val, parse_event
    from segapp.run.folder import RunFolder

    loss, classes, rows = EpochLoss(), list[str](), list[Evaluated]()
    for raw in EventReader(RunFolder(path).events).read_raw():
        loss.add_event(raw)
        if raw["type"] == "run_start":
            classes, resumed = raw.get("classes") or [], raw.get("resumed_from_step")
            rows = rows if resumed is None else [row for row in rows if row.step <= resumed]
        elif raw["type"] == "val":
            val = cast(Val, parse_event(raw))
            rows.append(
                Evaluated(
                    epoch=val.epoch,
                    step=val.step,
                    train_loss=loss.mean,
                    iou=dict(zip(classes, val.iou, strict=False)),
                    num_images=val.num_images,
                    val_s=val.val_s,
                    scores={name: val.score(name) for name in SCORES},
                )
            )
    return History(rows)


def evaluate(
    target: str | Path | Sequence[str | Path], *, split: str | None = None, slide: bool = False, tta: bool = False
) -> EvalResult:
    """Evaluate a run (its best checkpoint), a checkpoint, or the mean of several networks on a split.

    Args:
        target: a run's name or folder, or a checkpoint; several in a list are scored as `predict` averages them.
        split: name of the split; None: the run's own for validation.
        slide: sliding window instead of the whole image.
        tta: average over a flip and several scales.

    Raises:
        SegappError: the network or the data cannot be used.
    """
    from segapp.commands.evaluate import EvalOptions, score_target

    scored = score_target(_listed(target), EvalOptions(split, slide, tta))
    evaluation = scored.found.evaluation
    return EvalResult(
        split=scored.split,
        num_images=evaluation.num_images,
        iou=dict(zip(scored.trained.scheme.names, evaluation.scores.iou, strict=True)),
        confusion=scored.found.matrix.numpy(),
        scores=evaluation.values(),
    )


def predict(
    target: str | Path | Sequence[str | Path],
    paths: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    save: Sequence[str] = (),
    tta: bool = False,
) -> Tally:
    """Predict image files and write the results, as `segapp predict` does.

    Args:
        target: a run's name or folder, a checkpoint, or an exported file; the probabilities of several are averaged.
        paths: images, videos, folders or globs; one or several.
        out: folder of the results.
        save: labels, color, overlay, probabilities; empty: all but the last.
        tta: average over a flip and several scales.

    Returns:
        `paths`: the files written, in the order of the images; numbers of images and pixels, seconds, and `problems`:
        the files that could not be read.

    Raises:
        SegappError: the network cannot be used, or a path does not exist.
    """
    from segapp.commands.predict import PredictOptions, build_predictor, output_plan
    from segapp.inference.predict import find_images, parse_saved, predict_files

    files = find_images([Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)])
    options = PredictOptions(parse_saved([save] if isinstance(save, str) else list(save)), tta=tta)
    predictor = build_predictor(_listed(target), options)
    return predict_files(predictor, files, output_plan(Path(out), predictor, options))


def load(target: str | Path, *, slide: bool = False, tta: bool = False) -> Network:
    """Return the network of a run (its best checkpoint), of a checkpoint, or of an exported safetensors file.

    Args:
        target: a run's name or folder, or a file.
        slide: sliding window instead of the whole image.
        tta: average over a flip and several scales.

    Raises:
        SegappError: it cannot be used.
    """
    from segapp.build.trained import load_trained

    return Network(load_trained(str(target), slide=slide, tta=tta))


def _listed(target: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(target)] if isinstance(target, (str, Path)) else [str(each) for each in target]


def _read(config: Config, overrides: Sequence[str]) -> RunConfig:
    from segapp.config import RunConfig, load_config
    from segapp.config.load import config_of

    if isinstance(config, str | Path):
        return load_config(config, overrides)
    raw = config.model_dump(mode="json") if isinstance(config, RunConfig) else copy.deepcopy(dict(config))
    return config_of(raw, overrides)
