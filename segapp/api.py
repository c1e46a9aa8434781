"""segapp from Python: `from segapp import train, evaluate, predict, load, history`.

Every error that a function raises for its input is a `segapp.errors.SegappError`. Importing this module does not load
torch; the functions import it when they are called.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from segapp.custom.trust import accept_code, trusting
from segapp.errors import ConfigError, DataError
from segapp.scores import SCORES, EpochLoss, count_scored

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from segapp.assembly.trained import TrainedModel
    from segapp.config import RunConfig
    from segapp.run.events import Event, RunEnd
    from segapp.training.console import PlainReporter
    from segapp.training.signals import StopSignals

Config: TypeAlias = "str | Path | Mapping[str, Any] | RunConfig"
"""A config: a file or the name of one, nested plain values, or a validated config."""
Picture: TypeAlias = "str | Path | NDArray[Any] | Any"
"""An image: a file, an array (H, W, B) as it is stored, by default uint8 RGB, or a PIL image."""


class StopTraining(Exception):  # noqa: N818 - it is a request, not an error
    """Raise it in `on_event` to stop a training: it saves a checkpoint, and `train` returns with the message."""


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Scores of an evaluation; each score is an attribute too, such as `miou`, `mean_dice` and `loss`.

    Attributes:
        scores: name -> score, for each name of `segapp.scores.SCORES`; None if a value does not exist: a mean over no
            class, a loss that was not finite, or the loss of an ensemble of models with different losses.
        iou: class -> IoU; None for a class that does not occur.
        num_images: number of evaluated images.
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
        """Number of classes that `miou` averages over: those that occur in the targets or the predictions."""
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

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary per evaluation, with a key `iou NAME` per class: `pandas.DataFrame(history.rows())`."""
        plain = ("epoch", "step", "train_loss", "num_images", "val_s", "num_scored")
        return [
            {**{name: getattr(row, name) for name in plain}, **row.scores}
            | {f"iou {name}": value for name, value in row.iou.items()}
            for row in self
        ]


@dataclass(frozen=True)
class TrainResult:
    """Result of a training.

    Attributes:
        run: folder of the run.
        is_finished: False if it was stopped before its end.
        reason: why it ended.
        step: optimizer updates made.
        history: all evaluations of the run, including the ones before a resume.
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
    """Result of an evaluation: everything that `segapp eval` prints; `print(result)` shows the same table.

    With groups of classes, `scores` has `groups_miou` too.

    Attributes:
        split: name of the data split.
        confusion: pixels (C, C); the row is the class of the target, the column the predicted class. With several
            classes per pixel (C, 2, 2).
        dice: class -> Dice score (F1); None for a class that does not occur, as in the next two.
        precision: class -> precision.
        recall: class -> recall.
        groups: group of classes -> its IoU; empty if the data set has no groups.
        checkpoints: the evaluated checkpoints; several of an ensemble.
    """

    split: str
    confusion: NDArray[np.int64]
    dice: dict[str, float | None]
    precision: dict[str, float | None]
    recall: dict[str, float | None]
    groups: dict[str, float | None]
    checkpoints: list[Path]
    text: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return the lines that `segapp eval` prints."""
        return self.text

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary of scores per class, worst IoU first: `pandas.DataFrame(result.rows())`."""
        columns = {"iou": self.iou, "dice": self.dice, "precision": self.precision, "recall": self.recall}
        names = sorted(self.iou, key=lambda name: (self.iou[name] is None, self.iou[name] or 0.0))
        return [{"class": name, **{key: values[name] for key, values in columns.items()}} for name in names]


@dataclass(frozen=True)
class PredictResult:
    """Result of a prediction of files.

    Attributes:
        paths: the files that were written, in the order of the images.
        problems: a sentence for each file that could not be read.
        notes: sentences about the prediction, such as the use of tiles.
        num_images: number of predicted images and frames.
        num_px: their pixels.
        seconds: duration.
    """

    paths: list[Path]
    problems: list[str]
    notes: list[str]
    num_images: int
    num_px: int
    seconds: float


class Network:
    """A trained model, ready to predict.

    Attributes:
        classes: class names in the order of their ids.
        trained: the model with its config, checkpoint and device.
    """

    def __init__(self, trained: TrainedModel) -> None:
        from segapp.commands.predict import predictor_of

        self.trained = trained
        self.classes = trained.scheme.names
        self._predictor = predictor_of(trained)

    @property
    def module(self) -> nn.Module:
        """The `nn.Module`, in eval mode: normalized images (N, B, H, W) to a tuple, low-resolution logits first."""
        return self.trained.model

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.trained.device

    def predict(self, image: Picture | list[Picture]) -> Any:
        """Return the class ids (H, W), uint8 (uint16 for more than 256 classes), of an image.

        Args:
            image: a path, an array (H, W, B) of stored values (by default uint8 RGB), or a PIL image. A list gives a
                list, and a batch (N, H, W, B) gives (N, H, W).

        Raises:
            DataError: the file cannot be read.
            ValueError: the image has another type or shape.

        Example:
            `network.predict("photo.jpg")`, `network.predict(batch)`
        """
        return self._each(image, self._predictor.labels)

    def probabilities(self, image: Picture | list[Picture]) -> Any:
        """Return the probabilities, float32 (C, H, W), with sum 1 over C, of an image; arguments as for `predict`.

        Raises:
            DataError: the file cannot be read.
            ValueError: the image has another type or shape.
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

        from segapp.inference.predict.reading import InputFile, read_picture

        if isinstance(image, (str, Path)):
            path = Path(image)
            if not path.is_file():
                raise DataError(f"{path} is not a file: check the path", path=path)
            picture = read_picture(InputFile(path, path.stem), self._predictor.pixels)
            if picture.unused_bands:
                warnings.warn(f"{path}: {picture.unused_bands}", stacklevel=4)
            return np.asarray(picture.pixels[:])
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
    """Passes the events of a training to the console and the caller, keeps its end, and stops it on request."""

    def __init__(
        self, on_event: Callable[[Event], None] | None, signals: StopSignals, console: PlainReporter | None
    ) -> None:
        self.end: RunEnd | None = None
        self._on_event, self._signals, self._console = on_event, signals, console

    def handle(self, event: Event) -> None:
        if self._console is not None:
            self._console.handle(event)
        if event.type == "run_end":
            self.end = event
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except StopTraining as stop:
            self._signals.request_stop(str(stop) or "on_event raised StopTraining")

    def close(self) -> None:
        pass


def train(
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    resume: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    handle_signals: bool = False,
    progress: bool | None = None,
    trust_parts: bool = False,
) -> TrainResult:
    """Train a model in this process, and return when the training has ended; works in a notebook and in a thread.

    Args:
        config: path or name of a config, nested dictionaries, or a `RunConfig`. Leave it out to resume a run.
        overrides: config keys to change, as `KEY=VALUE`.
        run: folder of the run; None: runs/NAME.
        resume: what to continue: "auto" (the newest run of the config), a run, or a checkpoint file; None: begin anew.
        on_event: called with each event of the run (`segapp.run.events`), usually in the thread that trains. Raise
            `StopTraining("reason")` in it to stop the training at the next step with a checkpoint. Any other exception
            ends the training as failed.
        handle_signals: stop the training with a checkpoint on Ctrl-C and SIGTERM; only in the main thread.
        progress: print the progress, as `segapp train --plain` does; None: in a notebook or a terminal.
        trust_parts: run the custom code that a file names; code in a dictionary or a `RunConfig` is yours.

    Raises:
        SegappError: the training could not begin, or it failed. The subclass distinguishes the causes: `ConfigError`,
            `DataError`, `OutOfMemoryError` and so on.

    Example:
        >>> result = train("demo.yaml", ["train.epochs=2"])  # doctest: +SKIP
        >>> result.val.miou, result.history.rows()  # doctest: +SKIP
    """
    from segapp.assembly.devices import plan_devices
    from segapp.config.trust import name_trackers
    from segapp.run.folder import RunFolder
    from segapp.session.launchers import adopt_launcher
    from segapp.session.request import TrainRequest, plan_request
    from segapp.session.session import run_session
    from segapp.training.console import PlainReporter, has_progress_bar
    from segapp.training.signals import StopSignals

    folder = None if run is None else Path(run)
    with trusting(trust_parts):
        if resume is None:
            if config is None:
                raise ConfigError("config is missing: give a file, a dictionary or a RunConfig")
            request = TrainRequest(_read(config, overrides), run=folder)
            name_trackers(request.config.log)
        elif isinstance(config, str | Path | None):
            request = plan_request(None if config is None else str(config), overrides, folder, resume)
        else:
            raise ConfigError(f"resume = {resume!r} continues the run's config: leave config out, or name its file")
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
    is_shown = has_progress_bar() if progress is None else progress
    listener = _Events(on_event, signals, PlainReporter() if is_shown else None)
    with trusting(trust_parts):
        run_session(request, listener=listener, signals=signals)
    evaluations, end = _read_history(path), listener.end
    if end is None:
        return TrainResult(path, True, "already complete", 0, evaluations)
    return TrainResult(path, end.status == "finished", end.reason or "", end.step or 0, evaluations)


def history(run: str | Path) -> History:
    """Return the evaluations of a run, while it trains or afterwards, without loading torch.

    Args:
        run: name or folder of the run.

    Raises:
        RunError: there is no such run.

    Example:
        >>> pandas.DataFrame(history("demo").rows())  # doctest: +SKIP
    """
    from segapp.run.folder import find_run

    return _read_history(find_run(str(run)).path)


def _read_history(path: Path) -> History:
    """Return the evaluations of a run from its events."""
    from segapp.run.events import EventReader, RunStart, StepRun, Val, parse_event
    from segapp.run.folder import RunFolder

    loss, classes, rows = EpochLoss(), list[str](), list[Evaluated]()
    start: RunStart | None = None
    for item in chain.from_iterable(EventReader(RunFolder(path).events).skim()):
        if isinstance(item, StepRun):
            loss.add(item.epoch, item.step, item.loss)
            continue
        loss.add_event(item)
        if item["type"] == "run_start":
            start = cast(RunStart, parse_event(item))
            classes, resumed = start.classes, start.resumed_from_step
            rows = rows if resumed is None else [row for row in rows if row.step <= resumed]
        elif item["type"] == "val":
            val = cast(Val, parse_event(item)).with_foreground(start)
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
    target: str | Path | Sequence[str | Path],
    *,
    split: str | None = None,
    slide: bool = False,
    tta: bool = False,
    data_root: str | Path | None = None,
    devices: str | None = None,
    config: str | Path | None = None,
) -> EvalResult:
    """Evaluate a run (its best checkpoint), a checkpoint, or an ensemble on a data split.

    Args:
        target: name or folder of a run, or a checkpoint. The probabilities of several in a list are averaged.
        split: name of the data split; None: the validation split of the run.
        slide: use a sliding window instead of the whole image.
        tta: average over flipped and scaled copies.
        data_root: folder of the data set, if it has moved.
        devices: divide the images among devices, such as "0,1" or "cpu,cpu"; None: the first device of the run.
        config: config of the model, if the target holds only weights.

    Raises:
        SegappError: the model or the data cannot be used.

    Example:
        >>> result = evaluate("demo", tta=True)  # doctest: +SKIP
        >>> result.miou, result.dice["road"]  # doctest: +SKIP
    """
    from segapp.commands.evaluate import EvalOptions, as_json, score_lines, score_target

    root, config = (None if each is None else str(each) for each in (data_root, config))
    options = EvalOptions(split, slide, tta, root, devices, config)
    scored = score_target(_listed(target), options)
    raw = as_json(scored)
    return EvalResult(
        split=scored.split,
        num_images=raw["num_images"],
        confusion=scored.found.matrix.numpy(),
        scores={name: raw[name] for name in (*SCORES, "groups_miou") if name in raw},
        groups=raw.get("groups", {}),
        checkpoints=[Path(each["checkpoint"]) for each in raw["networks"]],
        text="\n".join(score_lines(scored)),
        **{key: dict(zip(raw["classes"], raw[key], strict=True)) for key in ("iou", "dice", "precision", "recall")},
    )


def predict(
    target: str | Path | Sequence[str | Path],
    paths: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    save: str | Sequence[str] = (),
    label_ids: bool = False,
    polygons: str | None = None,
    min_area_px: int = 0,
    simplify_px: float = 0.0,
    slide: bool = False,
    tta: bool = False,
    batch: int | None = None,
    config: str | Path | None = None,
) -> PredictResult:
    """Predict image files and write the results, as `segapp predict` does, with the same options.

    Args:
        target: name or folder of a run, a checkpoint, or an exported .safetensors file. The probabilities of several in
            a list are averaged.
        paths: images, folders or globs; one or several.
        out: folder of the results.
        save: labels, color, overlay, confidence, probabilities; empty: the first three.
        label_ids: write the ids of the data set, such as Cityscapes labelIds, instead of class ids.
        polygons: write polygons as geojson, gpkg or coco; without `save`, nothing else is written.
        min_area_px: leave out smaller polygons and holes, in square pixels.
        simplify_px: tolerance of simplified borders in pixels; 0: exact outlines.
        slide: use a sliding window instead of the whole image.
        tta: average over flipped and scaled copies.
        batch: images per batch; None: as many as fit into memory.
        config: config of the model, if the target holds only weights.

    Raises:
        SegappError: the model or an option cannot be used, or a path does not exist.

    Example:
        >>> predict("demo", "photos/", "out", save=["overlay"]).paths  # doctest: +SKIP
        >>> predict("demo", "photos/", "out", polygons="coco", min_area_px=50).problems  # doctest: +SKIP
    """
    from segapp.commands.predict import PredictOptions, build_predictor, output_plan, parse_batch
    from segapp.inference.predict.outputs import parse_saved
    from segapp.inference.predict.pipeline import predict_files
    from segapp.inference.predict.polygons import parse_polygons
    from segapp.inference.predict.reading import find_images

    given = [paths] if isinstance(paths, (str, Path)) else paths
    files, notes = find_images(list(given), Path(out))
    options = PredictOptions(
        parse_saved([save] if isinstance(save, str) else list(save)),
        label_ids,
        slide,
        tta,
        parse_batch("auto" if batch is None else str(batch)),
        None if config is None else str(config),
        parse_polygons(polygons, min_area_px, simplify_px),
    )
    predictor = build_predictor(_listed(target), options)
    tally = predict_files(predictor, files, output_plan(Path(out), predictor, options), batch=options.batch)
    tally.notes = [*notes, *tally.notes]
    return PredictResult(**{each.name: getattr(tally, each.name) for each in fields(PredictResult)})


def load(
    target: str | Path,
    *,
    device: str | torch.device | None = None,
    slide: bool = False,
    tta: bool = False,
    trust_parts: bool = False,
) -> Network:
    """Return the model of a run (its best checkpoint), of a checkpoint, or of an exported .safetensors file.

    Args:
        target: name or folder of a run, or a file.
        device: where to compute, such as "cuda:1" or "cpu"; None: the first device of `parallel.devices` of the run.
        slide: use a sliding window instead of the whole image.
        tta: average over flipped and scaled copies.
        trust_parts: run the custom code that the target names; segapp remembers it.

    Raises:
        SegappError: the target or the device cannot be used.

    Example:
        >>> network = load("demo", device="cpu")  # doctest: +SKIP
        >>> network.predict("photo.jpg").shape, network.module  # doctest: +SKIP
    """
    from segapp.assembly.trained import load_trained

    place = None if device is None else str(device)
    with trusting(trust_parts):
        return Network(load_trained(str(target), slide=slide, tta=tta, device=place))


def _listed(target: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(target)] if isinstance(target, (str, Path)) else [str(each) for each in target]


def _read(config: Config, overrides: Sequence[str]) -> RunConfig:
    from segapp.config import RunConfig, load_runnable
    from segapp.config.load import config_of
    from segapp.config.trust import named_code

    if isinstance(config, str | Path):
        return load_runnable(config, overrides)
    raw = config.model_dump(mode="json") if isinstance(config, RunConfig) else copy.deepcopy(dict(config))
    found = config_of(raw, overrides)
    accept_code(named_code(found).values())
    return found
