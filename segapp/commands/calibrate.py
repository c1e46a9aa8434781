"""`segapp calibrate`: fit a temperature to a run's probabilities on its validation split, and save it in the run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from segapp.build.data import build_dataset
from segapp.build.pairs import split_names
from segapp.build.trained import load_trained
from segapp.commands.predict import predictor_of
from segapp.errors import ConfigError, storage_errors
from segapp.inference.calibration import fit_temperature, negative_log_likelihood, reliability, score_pixels
from segapp.report.reliability import reliability_picture
from segapp.run.calibration import Calibration
from segapp.run.files import write_atomic
from segapp.run.folder import run_of_file
from segapp.run.words import printable
from segapp.training.telemetry.console import progress_bar


def calibrate_target(target: str, *, split: str | None, picture: Path | None) -> None:
    """Fit the temperature, write `calibration.json`, and print the errors before and after.

    Raises:
        ConfigError: the network predicts several classes per pixel, or is not a checkpoint of a run.
        DataError: no temperature can be fitted to the split.
    """
    if picture is not None and picture.suffix.lower() != ".svg":
        raise ConfigError(f"--picture {picture} is not an .svg file: give it that suffix")
    trained = load_trained(target)
    folder = run_of_file(trained.path)
    if folder is None:
        raise ConfigError(
            f"{printable(target)} is not a run: name a run, because the temperature is saved in the run folder"
        )
    if trained.scheme.multilabel is not None:
        raise ConfigError(
            f"{printable(target)} has several classes per pixel (data.multilabel), and calibrate needs one: name "
            "another run"
        )
    config = trained.config
    chosen = split or split_names(config.data)[1]
    dataset = build_dataset(config.data, trained.scheme, chosen, is_training=False, seed=config.seed)
    raw = replace(trained, inference=replace(trained.inference, temperature=1.0))
    with progress_bar(len(dataset), "calibrating", unit="image") as progress:
        pixels = score_pixels(predictor_of(raw), dataset, seed=config.seed, progress=progress)
    temperature = fit_temperature(pixels)
    before, after = reliability(pixels), reliability(pixels, temperature)
    found = Calibration(
        temperature=temperature,
        sha256=trained.sha256,
        step=trained.step,
        split=chosen,
        num_images=len(dataset),
        num_px=len(pixels.targets),
        nll=(negative_log_likelihood(pixels), negative_log_likelihood(pixels, temperature)),
        ece=(before.error, after.error),
    )
    with storage_errors(folder.calibration, "free space"):
        write_atomic(folder.calibration, found.model_dump_json(indent=1).encode() + b"\n")
    if picture is not None:
        with storage_errors(picture, "choose another file"):
            picture.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(
                picture, reliability_picture({"before": before, f"temperature {temperature:.3f}": after}).encode()
            )
    print(
        f"temperature {temperature:.3f}, fitted to {found.num_px} pixels of {found.num_images} images of "
        f"{printable(chosen)} ({printable(trained.path.name)}, step {trained.step})"
    )
    print(
        f"expected calibration error {found.ece[0]:.4f} -> {found.ece[1]:.4f}  "
        f"negative log-likelihood {found.nll[0]:.4f} -> {found.nll[1]:.4f}"
    )
    print(f"written to {printable(str(folder.calibration))}: segapp predict and segapp export use it", file=sys.stderr)
