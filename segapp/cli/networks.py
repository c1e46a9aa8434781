"""Commands that use a trained network: eval, predict, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segapp.cli.options import SlideFlag, SplitOption, Target, TtaFlag, WeightsConfig, app, option


@app.command("eval")
def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT...", help="A run's name or folder, or a checkpoint; several: their mean."
        ),
    ],
    split: SplitOption = None,
    json_file: Annotated[Path | None, option("--json", "Write the result as JSON.")] = None,
    slide: SlideFlag = False,
    tta: TtaFlag = False,
    data_root: Annotated[str | None, typer.Option(metavar="DIR", help="Data set folder, if it has moved.")] = None,
    boundary: Annotated[bool, typer.Option("--boundary", help="Compute the boundary IoU too.")] = False,
    per_image: Annotated[Path | None, option("--per-image", "Write the scores of every image.", "FILE.csv")] = None,
    confusion: Annotated[Path | None, option("--confusion", "Draw the confusion matrix.", "FILE.png|.svg")] = None,
    devices: Annotated[
        str | None, option("--devices", "Share the images over devices, e.g. 0,1 or cpu,cpu.", "LIST")
    ] = None,
    config: WeightsConfig = None,
) -> None:
    """Evaluate a run's best checkpoint, or the one named, or with --config any file of weights.

    With several networks, the mean of their class probabilities is evaluated, as segapp predict averages them.
    """
    from segapp.commands.evaluate import EvalOptions, evaluate_target

    files = {"json_file": json_file, "per_image": per_image, "confusion": confusion}
    evaluate_target(targets, EvalOptions(split, slide, tta, data_root, boundary, devices, **files, config=config))


@app.command()
def predict(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|FILE", help="A run's name or folder, a checkpoint, weights, or an exported file."
        ),
    ],
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[NETWORK]... PATH...", help="Further networks; images, videos, folders, or globs."),
    ],
    out: Annotated[Path, option("--out", "Folder for the results.", "DIR")],
    save: Annotated[
        list[str] | None,
        typer.Option(
            "--save",
            metavar="KIND",
            help="labels, color, overlay, probabilities; several with commas, or again. [default: all but the last]",
        ),
    ] = None,
    label_ids: Annotated[
        bool, typer.Option("--label-ids", help="Write the data set's own ids (Cityscapes labelIds).")
    ] = False,
    slide: SlideFlag = False,
    tta: TtaFlag = False,
    batch: Annotated[str, typer.Option("--batch", metavar="N|auto", help="Images at once; auto: by memory.")] = "auto",
    config: WeightsConfig = None,
) -> None:
    """Predict images and videos: DIR/labels (class ids), DIR/color, DIR/overlay, DIR/probabilities.

    With several networks, the class probabilities are averaged; their classes must be the same.
    """
    from segapp.commands.predict import PredictOptions, parse_batch, predict_target, split_networks
    from segapp.inference.predict import parse_saved

    options = PredictOptions(parse_saved(save or []), label_ids, slide, tta, parse_batch(batch), config)
    networks, files = split_networks([target, *paths])
    predict_target(networks, files, out, options)


@app.command()
def export(
    target: Target,
    out: Annotated[Path, option("--out", "The file to write.")],
    format: Annotated[str | None, option("--format", "Else by the ending of --out.", "onnx|pt2|safetensors")] = None,
    half: Annotated[bool, typer.Option("--half", help="Weights and arithmetic in float16.")] = False,
    argmax: Annotated[bool, typer.Option("--argmax", help="Give class ids instead of logits.")] = False,
    config: WeightsConfig = None,
) -> None:
    """Write a network as a file that runs without segapp, and compare its output; or write its weights alone.

    The file takes uint8 RGB images (batch, height, width, 3) of any size and gives float32 logits at that size;
    normalisation, padding and upsampling are inside, class names and colours in its metadata. safetensors holds the
    weights alone, under the names of the network's own library, with the same metadata.
    """
    from segapp.commands.export import export_target

    export_target(target, out, format=format, half=half, argmax=argmax, config=config)
