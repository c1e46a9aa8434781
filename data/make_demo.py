"""Draws the demo data set: street scenes of three invented towns, in the Cityscapes layout.

    python data/make_demo.py [--out DIR] [--scenes N]

writes OUT/leftImg8bit/{train,val}/<city>/<city>_<seq>_<frame>_leftImg8bit.png and
OUT/gtFine/{train,val}/<city>/<city>_<seq>_<frame>_gtFine_labelIds.png. Needs numpy and Pillow; `demo_drawing` beside
this file draws.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from demo_drawing.scene import draw_scene
from demo_drawing.towns import TOWNS
from PIL import Image


def write_demo(out: Path, max_scenes: int | None = None) -> None:
    """Draw the scenes of all towns into the folder `out`, at most `max_scenes` of each town."""
    for town in TOWNS:
        for index in range(town.num_scenes)[:max_scenes]:
            pixels, labels = draw_scene(town, index)
            for array, kind, suffix in ((pixels, "leftImg8bit", "leftImg8bit"), (labels, "gtFine", "gtFine_labelIds")):
                folder = out / kind / town.split / town.name
                folder.mkdir(parents=True, exist_ok=True)
                name = f"{town.name}_000000_{index + 1:06d}_{suffix}.png"
                Image.fromarray(array).save(folder / name, optimize=True)


def write_whole(out: Path) -> None:
    """Draw all scenes into the folder `out`, which appears at the end: a part of them would be a data set, too."""
    made = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        made.mkdir(parents=True)
        write_demo(made)
        if not out.exists():  # another process can have drawn them at the same time
            made.rename(out)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Draws the demo data set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "demo", help="folder to write to")
    parser.add_argument("--scenes", type=int, help="scenes of each town (default: all)")
    arguments = parser.parse_args()
    write_demo(arguments.out, arguments.scenes)


if __name__ == "__main__":
    main()
