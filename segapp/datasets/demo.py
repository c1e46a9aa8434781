"""The images of the demo: a wheel has only the program that draws them."""

import os
import runpy
import sys
from pathlib import Path

from segapp.run.files import storage_errors_of

DEMO_ROOT = "data/demo"  # `data.root` of demo.yaml
_PACKAGE = Path(__file__).resolve().parents[1]
_PROGRAMS = (_PACKAGE / "demo/make_demo.py", _PACKAGE.parent / "data/make_demo.py")  # in a wheel, in a clone


def draw_demo(root: str) -> None:
    """Draw the images of the demo if `root` is their folder and does not exist, or raise StorageError."""
    if root == DEMO_ROOT and not os.path.lexists(root):
        print(f"drawing the images of the demo into {root}, once: about half a minute", file=sys.stderr, flush=True)
        program = next(filter(Path.is_file, _PROGRAMS))
        sys.path.append(str(program.parent))
        with storage_errors_of("draw the demo into", Path(root)):
            runpy.run_path(str(program))["write_whole"](Path(root))
