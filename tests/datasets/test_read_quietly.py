"""What libraries print about files that they cannot read stays out of the output of a command."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import tifffile

CODE = """
import sys
from PIL import Image, UnidentifiedImageError
import segapp.datasets.files
try:
    Image.open(sys.argv[1])
except UnidentifiedImageError:
    print("not read")
"""


def test_tiff_of_eight_bands_prints_nothing() -> None:
    tifffile.imwrite("bands.tif", np.zeros((16, 16, 8), np.uint16), photometric="minisblack", planarconfig="contig")
    done = subprocess.run([sys.executable, "-c", CODE, "bands.tif"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("not read\n", "")
