"""`segapp predict`: from files to label maps, pictures and overlays, with a trained network or an exported file."""

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
    """What `segapp predict` was asked for beside the model and the pictures.

    Attributes:
        save: kinds of output; empty: label maps, colour pictures and overlays (of a video no label maps).
        label_ids: write the data set's own ids.
        slide: predict by sliding window.
        tta: average over a flip and several scales.
        batch: pictures at once; None: by memory.
        config: for bare weights, which network they are of; None: the file says it.
    """

    save: tuple[Saved, ...] = ()
    label_ids: bool = False
    slide: bool = False
    tta: bool = False
    batch: int | None = None
    config: str | None = None


def predict_target(target: str, paths: Sequence[Path], out: Path, options: PredictOptions) -> None:
    """`segapp predict`: writes what is to be saved of every picture, with a run, a checkpoint or an exported file.

    Raises:
        DataError: at the end, where files could not be read; the others are written.
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
        shown = "\n".join(f"  {problem}" for problem in tally.problems[:10])
        raise DataError(f"{len(tally.problems)} of {len(files)} files could not be read:\n{shown}")


def parse_batch(word: str) -> int | None:
    """`--batch`: a number, or None for auto.

    Raises:
        ConfigError: it is neither.
    """
    if word == "auto":
        return None
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"--batch {word} is neither a number from 1 on nor auto: give one of them")
    return int(word)


def _predictor(target: str, options: PredictOptions) -> Predictor:
    """What answers, by the name it was given."""
    if not is_exported(target):
        trained = load_trained(target, options.config, slide=options.slide, tta=options.tta)
        return TrainedPredictor(trained.model, trained.inference, trained.scheme, trained.device)
    if options.config is not None:
        raise ConfigError(f"--config {options.config}: {target} is an exported network and needs none: leave it out")
    if options.slide or options.tta:
        raise ConfigError(
            f"{target}: an exported file has neither --slide nor --tta: leave them out, or predict with RUN"
        )
    device = choose_devices("auto")[0][0]
    return ExportedPredictor(ExportedModel(Path(target), device), device)
