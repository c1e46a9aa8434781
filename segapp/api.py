"""segapp from Python: `from segapp import train, evaluate, predict, load, history`.

Every error that a function raises for its input is a `segapp.errors.SegappError`. Importing this module does not load
torch; the functions import it when they are called.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

import numpy as np

from segapp.custom.trust import accept_code, trusting
from segapp.errors import ConfigError, DataError, SegappError
from segapp.results import EvalResult, Evaluated, History, PredictResult, TrainResult
from segapp.run.words import silence
from segapp.scores import SCORES, EpochLoss

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from PIL import Image
    from torch import nn

    from segapp.assembly.trained import TrainedModel
    from segapp.config import RunConfig
    from segapp.inference.predict.polygons import PolygonFormat
    from segapp.inference.predict.reading import Saved
    from segapp.run.events import Event, RunEnd
    from segapp.training.console import PlainReporter
    from segapp.training.signals import StopSignals

AnyPath: TypeAlias = "str | os.PathLike[str]"
"""A path, or where the argument says so the name of a run or of a shipped config."""
Config: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | RunConfig"
"""A config: a file or the name of one, nested plain values, or a validated config."""
Device: TypeAlias = "str | int | torch.device"
"""A device: such as "cuda:1" or "cpu", a CUDA index, or a `torch.device`."""
Picture: TypeAlias = "str | os.PathLike[str] | NDArray[Any] | Image.Image"
"""An image: a file, an array (H, W, B) as it is stored, by default uint8 RGB, or a PIL image."""


class StopTraining(Exception):  # noqa: N818 - it is a request, not an error
    """Raise it in `on_event` to stop a training: it saves a checkpoint, and `train` returns with the message."""


class Network:
    """A trained model, ready to predict.

    Attributes:
        classes: class names in the order of their ids.
        trained: the model with its config, checkpoint and device.
    """

    def __init__(self, trained: TrainedModel) -> None:
        from segapp.commands.predict import predictor_of

        self.trained = trained
        self.classes: tuple[str, ...] = trained.scheme.names
        self._predictor = predictor_of(trained)
        self._evaluating = _Evaluating(trained.model)

    @property
    def module(self) -> nn.Module:
        """The `nn.Module`, in eval mode: normalized images (N, B, H, W) to a tuple, low-resolution logits first."""
        return self.trained.model

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.trained.device

    @overload  # a text, although it is a sequence of texts, is one image
    def predict(self, image: Picture) -> NDArray[np.unsignedinteger[Any]]: ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, image: Sequence[Picture]) -> list[NDArray[np.unsignedinteger[Any]]]: ...
    def predict(self, image: Picture | Sequence[Picture]) -> Any:
        """Return the class ids (H, W), uint8 (uint16 for more than 256 classes), of an image.

        The module predicts in evaluation mode, also if you train it: its modules are set to that mode meanwhile.

        Args:
            image: a path, an array (H, W, B) of stored values (by default uint8 RGB), or a PIL image. A list gives a
                list, and a batch (N, H, W, B) gives (N, H, W).

        Raises:
            DataError: the file cannot be read.
            ValueError: the image has another type or shape.

        Example:
            >>> import segapp
            >>> network = segapp.load("demo")  # doctest: +SKIP
            >>> network.predict("photo.jpg").shape  # doctest: +SKIP
        """
        return self._each(image, self._predictor.labels)

    @overload
    def probabilities(self, image: Picture) -> NDArray[np.float32]: ...  # type: ignore[overload-overlap]
    @overload
    def probabilities(self, image: Sequence[Picture]) -> list[NDArray[np.float32]]: ...
    def probabilities(self, image: Picture | Sequence[Picture]) -> Any:
        """Return the probabilities, float32 (C, H, W), with sum 1 over C, of an image; arguments as for `predict`.

        Raises:
            DataError: the file cannot be read.
            ValueError: the image has another type or shape.
        """
        return self._each(image, self._predictor.probabilities)

    def __repr__(self) -> str:
        trained = self.trained
        facts = f"{str(trained.path)!r}, step {trained.step}, {trained.config.model.name}, {len(self.classes)} classes"
        return f"{type(self).__name__}({facts}, device={str(self.device)!r})"

    def _each(self, image: Any, compute: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
        if isinstance(image, list | tuple):
            return [self._each(one, compute) for one in image]
        with self._evaluating:
            if isinstance(image, np.ndarray) and image.ndim == 4:
                return compute(self._checked(image))
            return compute(self._checked(self._pixels_of(image))[None])[0]

    def _pixels_of(self, image: Any) -> NDArray[Any]:
        """Return the stored values (H, W, B) of a file, a PIL image or an array."""
        from PIL import Image, ImageOps

        from segapp.inference.predict.reading import InputFile, read_picture

        if isinstance(image, (str, os.PathLike)):
            path = Path(image)
            if not path.is_file():
                raise DataError(f"{path} is not a file: check the path", path=path)
            picture = read_picture(InputFile(path, path.stem), self._predictor.pixels)
            if picture.unused_bands:
                warnings.warn(f"{path}: {picture.unused_bands}", stacklevel=5)
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
        if 0 in image.shape:
            raise ValueError(f"image of shape {image.shape} has no pixels: give at least one")
        if image.dtype != pixels.numpy_dtype or image.ndim not in (3, 4) or image.shape[-1] != pixels.num_bands:
            wanted = f"{pixels.layout} of shape (H, W, {pixels.num_bands})"
            raise ValueError(f"image is {image.dtype} of shape {image.shape}: give {wanted}")
        return image


class _Evaluating:
    """Keeps a module in evaluation mode; the last of several threads restores the modes of its parts."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._lock, self._num_running, self._training = module, threading.Lock(), 0, list[Any]()
        self._process = os.getpid()

    def __reduce__(self) -> Any:  # copies have a lock of their own
        return type(self), (self._module,)

    def __enter__(self) -> None:
        if self._process != os.getpid():  # a fork: its threads of OpenMP are gone, and a second one would wait for them
            import torch

            torch.set_num_threads(1)
            self._process, self._lock, self._num_running = os.getpid(), threading.Lock(), 0
        with self._lock:
            if not self._num_running:
                self._training = [part for part in self._module.modules() if part.training]
                for part in self._training:
                    part.training = False
            self._num_running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_running -= 1
            for part in () if self._num_running else self._training:
                part.training = True


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
    overrides: list[str] | tuple[str, ...] | Mapping[str, Any] = (),
    *,
    run: AnyPath | None = None,
    resume: AnyPath | None = None,
    on_event: Callable[[Event], None] | None = None,
    handle_signals: bool = False,
    progress: bool | None = None,
    trust_parts: bool = False,
) -> TrainResult:
    """Train a model in this process, and return when the training has ended; works in a notebook and in a thread.

    Args:
        config: path or name of a config, nested dictionaries, or a `RunConfig`. Leave it out to resume a run.
        overrides: config keys to change, as `KEY=VALUE` or as a dictionary such as `{"train.epochs": 2}`.
        run: folder of the run; None: runs/NAME.
        resume: what to continue: "auto" (the newest run of the config), a run, or a checkpoint file; None: begin anew.
        on_event: called with each event of the run (`segapp.Event`), usually in the thread that trains. Raise
            `StopTraining("reason")` in it to stop the training at the next step with a checkpoint. Any other exception
            ends the training as failed.
        handle_signals: stop the training with a checkpoint on Ctrl-C and SIGTERM; only in the main thread.
        progress: print the progress, as `segapp train --plain` does; None: in a notebook or a terminal.
        trust_parts: run the custom code that a file names; code in a dictionary or a `RunConfig` is yours.

    Raises:
        SegappError: the training could not begin, or it failed. The subclass distinguishes the causes: `ConfigError`,
            `DataError`, `OutOfMemoryError` and so on.

    Example:
        >>> import segapp
        >>> result = segapp.train("demo.yaml", ["train.epochs=2"])  # doctest: +SKIP
        >>> result.val.miou, result.history.rows()  # doctest: +SKIP
    """
    from segapp.assembly.devices import plan_devices
    from segapp.config.trust import name_trackers
    from segapp.session.request import TrainRequest, adopt_launcher, open_folder, plan_request
    from segapp.session.session import run_session
    from segapp.training.console import PlainReporter
    from segapp.training.signals import StopSignals

    _check_flags(handle_signals=handle_signals, trust_parts=trust_parts)
    if on_event is not None and not callable(on_event):
        raise ConfigError(f"on_event is {on_event!r}: give a function of one event")
    if handle_signals and threading.current_thread() is not threading.main_thread():
        raise ConfigError("handle_signals=True works in the main thread only: leave it out in another thread")
    folder, words = None if run is None else Path(_path(run, "run")), _words(overrides)
    with _library_call(trust_parts):
        if resume is None:
            if config is None:
                raise ConfigError("config is missing: give a file, a dictionary or a RunConfig")
            request = TrainRequest(_read(config, words), run=folder)
            name_trackers(request.config.log)
        elif config is None or isinstance(config, str | os.PathLike):
            named = None if config is None else os.fspath(config)
            request = plan_request(named, words, folder, _path(resume, "resume"))
        else:
            raise ConfigError(f"resume = {resume!r} continues the run's config: leave config out, or name its file")
        # On a copy: this process belongs to the caller, and no ranks are started here.
        if request.config.parallel.mode != "single" and (launcher := adopt_launcher(dict(os.environ))):
            raise ConfigError(
                f"{launcher} started several tasks, each of which would train the whole run: use the command segapp "
                "train, or parallel.mode=single for separate runs",
                key="parallel.mode",
            ).see("several-machines")
        devices = plan_devices(request.config, is_one_process=True)
        if devices.mode == "ddp":
            raise ConfigError(
                "parallel.mode = ddp starts processes: use segapp train, or parallel.mode=dp here", key="parallel.mode"
            )
        parallel = request.config.parallel.model_copy(update={"mode": devices.mode})
        with silence():  # the result names the folder
            path = open_folder(request).path
        if request.folder is None:
            request = replace(request, run=path, config=request.config.model_copy(update={"parallel": parallel}))
        signals = StopSignals(is_active=handle_signals)
        is_shown = _is_shown(progress)
        listener = _Events(on_event, signals, PlainReporter() if is_shown else None)
        with contextlib.nullcontext() if is_shown else silence():
            run_session(request, listener=listener, signals=signals)
    (evaluations, step), end = _read_run(path), listener.end
    is_finished = end is None or end.status == "finished"
    reason = "already complete" if end is None else end.reason or ""
    return TrainResult(run=path, is_finished=is_finished, reason=reason, step=step, history=evaluations)


def history(run: AnyPath) -> History:
    """Return the evaluations of a run, while it trains or afterwards, without loading torch.

    Args:
        run: name or folder of the run.

    Raises:
        ConfigError: there is no such run.

    Example:
        >>> import pandas  # doctest: +SKIP
        >>> import segapp
        >>> pandas.DataFrame(segapp.history("demo").rows())  # doctest: +SKIP
    """
    from segapp.run.folder import find_run

    return _read_run(find_run(_path(run, "run")).path)[0]


def _read_run(path: Path) -> tuple[History, int]:
    """Return the evaluations of a run and its number of steps, from its events."""
    from segapp.run.events import EventReader, RunStart, StepRun, Val, parse_event
    from segapp.run.folder import RunFolder

    loss, classes, rows, step = EpochLoss(), list[str](), list[Evaluated](), 0
    for item in chain.from_iterable(EventReader(RunFolder(path).events).skim()):
        if isinstance(item, StepRun):
            loss.add(item.epoch, item.step, item.loss)
            step = item.step[-1] if item.step else step
            continue
        loss.add_event(item)
        if item["type"] == "run_start":
            start = cast(RunStart, parse_event(item))
            classes, resumed = start.classes, start.resumed_from_step
            # A resume repeats the steps after its checkpoint, and their evaluations.
            rows, step = (rows, step) if resumed is None else ([row for row in rows if row.step <= resumed], resumed)
        elif item["type"] == "run_end":
            step = item.get("step") or step  # not every step has an event
        elif item["type"] == "val":
            val = cast(Val, parse_event(item))
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
    return History(rows), step


def evaluate(
    target: AnyPath | Sequence[AnyPath],
    *,
    split: str | None = None,
    slide: bool = False,
    tta: bool = False,
    data_root: AnyPath | None = None,
    devices: Sequence[Device] | None = None,
    config: Config | None = None,
    progress: bool | None = None,
    trust_parts: bool = False,
) -> EvalResult:
    """Evaluate a run (its best checkpoint), a checkpoint, or an ensemble on a data split.

    Args:
        target: name or folder of a run, or a checkpoint. The probabilities of several in a list are averaged.
        split: name of the data split; None: the validation split of the run.
        slide: use a sliding window instead of the whole image.
        tta: average over flipped and scaled copies.
        data_root: folder of the data set, if it has moved.
        devices: divide the images among devices, such as [0, 1]; None: the first device of the run.
        config: config of the model, if the target holds only weights.
        progress: show the progress; None: in a notebook or a terminal.
        trust_parts: run the custom code that the target names; segapp remembers it.

    Raises:
        SegappError: the model or the data cannot be used.

    Example:
        >>> import segapp
        >>> result = segapp.evaluate("demo", tta=True)  # doctest: +SKIP
        >>> result.miou, result.dice["road"]  # doctest: +SKIP
    """
    from segapp.commands.evaluate import EvalOptions, as_json, score_lines, score_target

    _check_flags(slide=slide, tta=tta, trust_parts=trust_parts)
    if not isinstance(devices, list | tuple | None):
        raise ConfigError(f"devices is {devices!r}: give a list, such as [{devices!r}]")
    with _library_call(trust_parts):
        options = EvalOptions(
            None if split is None else _path(split, "split"),
            slide,
            tta,
            None if data_root is None else _path(data_root, "data_root"),
            None if devices is None else list(devices),
            None if config is None else _read(config),
            is_shown=_is_shown(progress),
        )
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
    target: AnyPath | Sequence[AnyPath],
    paths: AnyPath | Iterable[AnyPath],
    out: AnyPath,
    *,
    save: Saved | Sequence[Saved] = (),
    label_ids: bool = False,
    polygons: PolygonFormat | None = None,
    min_area_px: int = 0,
    simplify_px: float = 0.0,
    slide: bool = False,
    tta: bool = False,
    batch: int | None = None,
    device: Device | None = None,
    config: Config | None = None,
    progress: bool | None = None,
    trust_parts: bool = False,
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
        device: where to compute; None: the first device of `parallel.devices` of the run.
        config: config of the model, if the target holds only weights.
        progress: show the progress; None: in a notebook or a terminal.
        trust_parts: run the custom code that the target names; segapp remembers it.

    Raises:
        SegappError: the model or an option cannot be used, or a path does not exist.

    Example:
        >>> import segapp
        >>> segapp.predict("demo", "photos/", "out", save=["overlay"]).paths  # doctest: +SKIP
        >>> segapp.predict("demo", "photos/", "out", polygons="coco", min_area_px=50).problems  # doctest: +SKIP
    """
    from segapp.commands.predict import PredictOptions, build_predictor, output_plan, parse_batch
    from segapp.inference.predict.outputs import parse_saved
    from segapp.inference.predict.pipeline import predict_files
    from segapp.inference.predict.polygons import parse_polygons
    from segapp.inference.predict.reading import find_images
    from segapp.waiting import progress_bar

    _check_flags(label_ids=label_ids, slide=slide, tta=tta, trust_parts=trust_parts)
    with _library_call(trust_parts):
        targets, folder = _listed(target), Path(_path(out, "out"))
        files, notes = find_images(_listed(paths, "paths"), folder)
        options = PredictOptions(
            parse_saved([save] if isinstance(save, str) else _listed(save, "save") if save != () else []),
            label_ids,
            slide,
            tta,
            parse_batch("auto" if batch is None else str(batch)),
            None if config is None else _read(config),
            parse_polygons(polygons, min_area_px, simplify_px),
            device,
        )
        predictor = build_predictor(targets, options)
        plan = output_plan(folder, predictor, options)
        with progress_bar(len(files), "predicting", unit="file", is_shown=_is_shown(progress)) as bar:
            tally = predict_files(predictor, files, plan, batch=options.batch, progress=bar)
    tally.notes = [*notes, *tally.notes]
    return PredictResult(**{each.name: getattr(tally, each.name) for each in fields(PredictResult)})


def load(
    target: AnyPath,
    *,
    device: Device | None = None,
    slide: bool = False,
    tta: bool = False,
    config: Config | None = None,
    trust_parts: bool = False,
) -> Network:
    """Return the model of a run (its best checkpoint), of a checkpoint, or of an exported .safetensors file.

    Args:
        target: name or folder of a run, or a file.
        device: where to compute, such as "cuda:1" or "cpu"; None: the first device of `parallel.devices` of the run.
        slide: use a sliding window instead of the whole image.
        tta: average over flipped and scaled copies.
        config: config of the model, if the target holds only weights.
        trust_parts: run the custom code that the target names; segapp remembers it.

    Raises:
        SegappError: the target or the device cannot be used.

    Example:
        >>> import segapp
        >>> network = segapp.load("demo", device="cpu")  # doctest: +SKIP
        >>> network.predict("photo.jpg").shape, network.module  # doctest: +SKIP
    """
    from segapp.assembly.trained import load_trained

    _check_flags(slide=slide, tta=tta, trust_parts=trust_parts)
    with _library_call(trust_parts):
        own = None if config is None else _read(config)
        return Network(load_trained(_path(target, "target"), own, slide=slide, tta=tta, device=device))


_ARGUMENTS = {"min-area": "min_area_px", "simplify": "simplify_px", "data-root": "data_root", "label-ids": "label_ids"}
"""Options of the command line whose arguments in Python have other names."""

_OPTION = re.compile(
    r"(segapp [a-z-]+[^;:`]*)?--(resume|out|save|batch|polygons|min-area|simplify|config|devices|split|run|"
    r"data-root|label-ids|slide|tta)\b"
)
"""An option of the command line in a message; with the text before it if it belongs to a command to enter."""


@contextlib.contextmanager
def _library_call(trust_parts: bool) -> Iterator[None]:
    """Trust custom code as asked, and let errors name arguments of Python instead of options of a command.

    The modes of the caller's thread, such as inference mode, do not reach the body.
    """
    import torch

    try:
        with trusting(trust_parts), torch.inference_mode(False), torch.enable_grad():
            yield
    except SegappError as error:
        text = str(error)
        said = _OPTION.sub(lambda found: found[0] if found[1] else _ARGUMENTS.get(found[2], found[2]), text)
        said = said.replace("command line: ", "overrides: ")
        if said == text:
            raise
        raise error.reworded(said) from error.__cause__


def _path(value: Any, name: str) -> str:
    """Return an argument that is one path or name; ConfigError for anything else."""
    if isinstance(value, (str, os.PathLike)) and isinstance(path := os.fspath(value), str) and path:
        return path
    what = repr(value) if isinstance(value, str | bytes | bool | int | None) else f"a {type(value).__name__}"
    if isinstance(value, TrainResult | Network):
        advice = ", such as its run" if isinstance(value, TrainResult) else ", such as its trained.path"
    else:
        advice = "; load(target).predict takes arrays" if hasattr(value, "dtype") else ""
    raise ConfigError(f"{name} is {what}: give a path or a name{advice}")


def _listed(value: Any, name: str = "target") -> list[str]:
    """Return an argument that is one path or several as a list."""
    if isinstance(value, str | bytes | os.PathLike) or not isinstance(value, Iterable) or hasattr(value, "dtype"):
        return [_path(value, name)]
    if not (paths := [_path(each, f"{name}[{at}]") for at, each in enumerate(value)]):
        raise ConfigError(f"{name} is empty: give a path, or a list of them")
    return paths


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name} is {value!r}: give True or False")


def _is_shown(progress: bool | None) -> bool:
    from segapp.waiting import has_progress_bar

    _check_flags(**({} if progress is None else {"progress": progress}))
    return has_progress_bar() if progress is None else progress


def _words(overrides: Any) -> list[str]:
    """Return overrides as `KEY=VALUE`; values of a mapping are written as JSON, which the reader of YAML takes."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_as_json(key, value)}" for key, value in overrides.items()]
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise ConfigError(f"overrides is {overrides!r}: give a list such as ['train.epochs=2'], or a dictionary")
    return [word if isinstance(word, str) else f"{word!r}" for word in overrides]


def _as_json(key: Any, value: Any) -> str:
    if isinstance(value, Mapping) and "." not in str(key):
        keys = ", ".join(f"'{key}.{each}'" for each in value)
        raise ConfigError(f"overrides[{key!r}] would replace the whole section {key}: change its keys, {keys}")
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        kind = f"a {type(value).__name__} that is no plain value"
        raise ConfigError(f"overrides[{key!r}] is {kind}: give numbers, texts, lists or dictionaries") from None


def _plain(value: Any) -> Any:
    """Return a path, or a number or an array of numpy, as a plain value."""
    if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def _read(config: Any, overrides: Sequence[str] = ()) -> RunConfig:
    from segapp.config import RunConfig, load_runnable
    from segapp.config.load import config_of
    from segapp.config.trust import named_code

    if isinstance(config, str | os.PathLike):
        return load_runnable(os.fspath(config), overrides)
    if not isinstance(config, RunConfig | Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: give a file, a dictionary or a RunConfig")
    raw = config.model_dump(mode="json") if isinstance(config, RunConfig) else copy.deepcopy(dict(config))
    found = config_of(raw, overrides)
    accept_code(named_code(found).values())
    return found
