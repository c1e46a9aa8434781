"""`segapp predict`: predict images and videos with a run, a checkpoint or an exported ONNX file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segapp.build.devices import choose_devices
from segapp.build.trained import load_trained
from segapp.errors import ConfigError, DataError
from segapp.export import ExportedModel, is_exported
from segapp.inference.predict import (
    ExportedPredictor,
    OutputPlan,
    Predictor,
    Saved,
    TrainedPredictor,
    find_images,
    predict_files,
)
from segapp.inference.progress_bar import progress_bar
from segapp.run.text import printable


@dataclass(frozen=True)
class PredictOptions:
    """Options of `segapp predict`.

    Attributes:
        save: kinds of output; empty: labels, color and overlay (for a video: color and overlay).
        label_ids: write the ids of the data set instead of class ids.
        slide: predict by sliding window.
        tta: test-time augmentation: average over flips and several scales.
        batch: pictures per batch; None: by the free memory.
        config: config of the network for bare weights; None: from the file.
    """

    save: tuple[Saved, ...] = ()
    label_ids: bool = False
    slide: bool = False
    tta: bool = False
    batch: int | None = None
    config: str | None = None


def predict_target(target: str, paths: Sequence[Path], out: Path, options: PredictOptions) -> None:
    """Predict files, write the outputs, and print the speed.

    Raises:
        DataError: at the end, if files could not be read; the others are written.
    """
    files = find_images(paths)
    predictor = _predictor(target, options)
    plan = OutputPlan(out, predictor.scheme, label_ids=options.label_ids)
    if options.save:
        plan = replace(plan, kinds=options.save, video_kinds=options.save)
    with progress_bar(len(files), "predicting", unit="file") as progress:
        tally = predict_files(predictor, files, plan, batch=options.batch, progress=progress)
    for note in tally.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    speed = tally.num_images / max(tally.seconds, 1e-9)
    print(
        f"{tally.num_images} images of {len(files)} files written to {printable(str(out))} in {tally.seconds:.1f} s: "
        f"{speed:.2f} images/s, {tally.num_px / 1e6 / max(tally.seconds, 1e-9):.2f} Mpx/s"
    )
    if tally.problems:
        first_ten = "\n".join(f"  {problem}" for problem in tally.problems[:10])
        raise DataError(f"{len(tally.problems)} of {len(files)} files could not be read:\n{first_ten}")


def parse_batch(text: str) -> int | None:
    """Return the number given by `--batch`; None for auto.

    Raises:
        ConfigError: it is neither.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--batch {text} is neither a positive number nor auto: give one of them")
    return int(text)


def _predictor(target: str, options: PredictOptions) -> Predictor:
    """Return the predictor of a run, a checkpoint or an exported file."""
    if not is_exported(target):
        trained = load_trained(target, options.config, slide=options.slide, tta=options.tta)
        return TrainedPredictor(trained.model, trained.inference, trained.scheme, trained.device)
    if options.config is not None:
        raise ConfigError(f"--config {options.config}: {target} is an exported network: leave --config out")
    if options.slide or options.tta:
        raise ConfigError(
            f"{target}: an exported file supports neither --slide nor --tta: leave them out, or predict with the run"
        )
    device = choose_devices("auto")[0][0]
    return ExportedPredictor(ExportedModel(Path(target), device), device)
