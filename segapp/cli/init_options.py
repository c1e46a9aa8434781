"""The options of `segapp init` on the command line. Typer only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the images and their masks or annotations.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="The config; by default FOLDER's name with .yaml, in the current folder."
    ),
]
Layout = Annotated[
    str | None,
    typer.Option("--layout", metavar="NAME", help="The layout to take, where several are possible: name or number."),
]
ValShare = Annotated[
    float | None,
    typer.Option(
        "--val-share", metavar="SHARE", help="Share of the validation images, for data without splits; by default 0.2."
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="REGEX", help="Images with the same match in their path stay together; by default a scene."
    ),
]
Folds = Annotated[
    int | None,
    typer.Option("--folds", metavar="NUMBER", help="Write this many folds for cross-validation, each a config."),
]
Blocks = Annotated[
    int | None,
    typer.Option(
        "--blocks", metavar="PX", help="Cut large images and masks into blocks of this side; a strip of each validates."
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="NUMBER", help="Of the division into splits or folds.")]
Page = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures of each possible layout.")
]
CleanMasks = Annotated[
    bool,
    typer.Option(
        "--clean-masks", help="Write copies of JPEG or smoothed masks, each pixel the nearest frequent value."
    ),
]
Masks = Annotated[
    str | None,
    typer.Option(
        "--masks",
        metavar="KIND",
        help="What the values of the masks are: ids, instances (value // 1000 is the class), panoptic or object.",
    ),
]
Unlabelled = Annotated[
    str | None,
    typer.Option("--unlabelled", metavar="HOW", help="Pixels without a class name: ignore them, or make them a class."),
]
Palette = Annotated[
    str | None,
    typer.Option(
        "--palette",
        metavar="NAME",
        help="Published data set whose colours the masks have; none: no known one.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the config and the lists beside it.")]
