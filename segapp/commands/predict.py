"""`segapp predict`: predict images with a run, a checkpoint or weights, or the mean of several."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segapp.assembly.trained import TrainedModel, load_trained
from segapp.config import RunConfig
from segapp.errors import ConfigError, DataError
from segapp.inference.predict.outputs import OutputPlan
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.polygons import PolygonPlan
from segapp.inference.predict.predictor import EnsemblePredictor, Predictor, TrainedPredictor
from segapp.inference.predict.reading import InputFile, Saved
from segapp.parallel.scatter_gather import DeviceLike
from segapp.run.words import printable
from segapp.waiting import progress_bar


@dataclass(frozen=True)
class PredictOptions:
    """Options of `segapp predict`.

    Attributes:
        save: kinds of output; empty: labels, color and overlay.
        label_ids: write the ids of the data set instead of class ids.
        polygons: the polygons to write; without `save`, nothing else is written.
        batch: images per batch; None: depending on the free memory.
        config: config of the network for a file with only weights, or its name; None: from the file.
        device: where to compute; None: the first device of the run.
    """

    save: tuple[Saved, ...] = ()
    label_ids: bool = False
    slide: bool = False
    tta: bool = False
    batch: int | None = None
    config: str | RunConfig | None = None
    polygons: PolygonPlan | None = None
    device: DeviceLike | None = None


def predict_target(networks: Sequence[str], files: Sequence[InputFile], out: Path, options: PredictOptions) -> None:
    """Predict files, write the outputs, and print the speed; the probabilities of several networks are averaged.

    Raises:
        ConfigError: an option does not fit the networks, or their classes differ.
        DataError: at the end, if files could not be read; the others are written.
    """
    predictor = build_predictor(networks, options)
    members = predictor.members if isinstance(predictor, EnsemblePredictor) else [predictor]
    for height, width in dict.fromkeys(filter(None, (each.inference.window_px for each in members if options.slide))):
        windows = f"windows of {height} x {width} px (eval.slide_px)"
        print(f"note: --slide predicts in {windows}; large images are cut without it", file=sys.stderr)
    plan = output_plan(out, predictor, options)
    with progress_bar(len(files), "predicting", unit="file") as progress:
        tally = predict_files(predictor, files, plan, batch=options.batch, progress=progress)
    for note in tally.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    print(
        f"{tally.num_images} images of {len(files)} files written to {printable(str(out))} in {tally.seconds:.1f} s: "
        f"{_speed(tally.num_images, tally.seconds)}, {tally.num_px / 1e6 / max(tally.seconds, 1e-9):.2f} Mpx/s"
    )
    if tally.problems:
        first_ten = "\n".join(f"  {problem}" for problem in tally.problems[:10])
        raise DataError(f"{len(tally.problems)} of {len(files)} files could not be read:\n{first_ten}")


def output_plan(out: Path, predictor: Predictor, options: PredictOptions) -> OutputPlan:
    plan = OutputPlan(
        out,
        predictor.scheme,
        pixels=predictor.pixels,
        label_ids=options.label_ids,
        polygons=options.polygons,
    )
    if options.save or options.polygons:
        plan = replace(plan, kinds=options.save)
    if predictor.scheme.multilabel is not None and "confidence" in plan.kinds:
        raise ConfigError(
            "--save confidence is for one class per pixel, and this model predicts sets of classes (data.multilabel): "
            "use --save probabilities"
        )
    return plan


def _speed(num_images: int, seconds: float) -> str:
    """Return images per second, and also seconds per image if one takes longer than a second.

    >>> _speed(1, 387.0)
    '0.00258 images/s (387.0 s each)'
    """
    per_s = num_images / max(seconds, 1e-9)
    each = f" ({seconds / num_images:.1f} s each)" if num_images and seconds > num_images else ""
    return f"{per_s:.2f} images/s" if per_s >= 1 else f"{per_s:.3g} images/s{each}"


def parse_batch(text: str) -> int | None:
    """Return the number in `--batch`; None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--batch {text} is neither a positive number nor auto: give one of them")
    return int(text)


def build_predictor(networks: Sequence[str], options: PredictOptions) -> Predictor:
    if len(networks) == 1:
        return _member(networks[0], options)
    if options.config is not None:
        raise ConfigError(
            f"--config belongs to one file of weights, and {len(networks)} models are named: write the weights "
            "with their config first (segapp export --format safetensors)"
        )
    return EnsemblePredictor((name, _member(name, options)) for name in networks)


def predictor_of(trained: TrainedModel) -> TrainedPredictor:
    return TrainedPredictor(trained.model, trained.inference, trained.scheme, trained.device)


def _member(target: str, options: PredictOptions) -> TrainedPredictor:
    trained = load_trained(target, options.config, slide=options.slide, tta=options.tta, device=options.device)
    return predictor_of(trained)
