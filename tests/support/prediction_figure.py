"""The figure of the README: an image of the demo data, its prediction by a run of `configs/demo.yaml`, and a legend.

python -m tests.support.prediction_figure RUN   writes segapp/docs/pictures/prediction.svg
"""

from __future__ import annotations

import base64
import html
import io
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segapp.assembly.pairs import build_pairs, build_scheme
from segapp.config import load_config
from segapp.datasets.files import ImagePair
from segapp.datasets.images.reading import read_image
from segapp.datasets.layouts.schemes import ClassScheme
from tests.support import ROOT, mono_font

FIGURE = ROOT / "segapp" / "docs" / "pictures" / "prediction.svg"
_SCALE, _GAP_PX, _LINE_PX, _COLUMNS = 2, 8, 24, 6
_STYLE = """
text { font: 14px "segapp mono", monospace; fill: #1f2328 } .swatch { stroke: #818b98 }
.labels { image-rendering: pixelated; opacity: 0.6 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }"""


def demo_pair() -> tuple[ClassScheme, ImagePair]:
    """Return the classes of the demo data and the first pair of its validation images."""
    data = load_config(ROOT / "configs/demo.yaml", [f"data.root={ROOT / 'data/demo'}"]).data
    return build_scheme(data), build_pairs(data, "val")[0]


def figure(image: NDArray[np.uint8], labels: NDArray[np.uint8], scheme: ClassScheme) -> str:
    """Return the figure of an image (H, W, 3) and its predicted classes (H, W), for a light and a dark theme."""
    height, width = (_SCALE * size for size in labels.shape)
    photo, colors = Image.fromarray(image), Image.fromarray(labels, "P")
    colors.putpalette(np.array(scheme.palette, np.uint8).tobytes())
    present = np.unique(labels).tolist()
    rows = -(-len(present) // _COLUMNS)
    full_width, full_height = 2 * width + _GAP_PX, height + _LINE_PX * (rows + 1) + 12
    second = width + _GAP_PX
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {full_height}">',
        f"<style>{mono_font.style()}{_STYLE}</style>",
        f'<image id="image" {size} href="{_png(photo)}"/><use href="#image" x="{second}"/>',
        f'<image class="labels" x="{second}" {size} href="{_png(colors)}"/>',
        f'<text x="0" y="{height + 18}">image</text><text x="{second}" y="{height + 18}">prediction</text>',
    ]
    for number, index in enumerate(present):
        x, y = number % _COLUMNS * full_width // _COLUMNS, height + 18 + _LINE_PX * (1 + number // _COLUMNS)
        color = "#{:02x}{:02x}{:02x}".format(*scheme.palette[index])
        parts.append(
            f'<rect class="swatch" x="{x + 1}" y="{y - 12}" width="14" height="14" fill="{color}"/>'
            f'<text x="{x + 22}" y="{y}">{html.escape(scheme.names[index])}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def main(run: Path) -> None:
    """Write the figure with the prediction of a run."""
    from segapp import load

    scheme, pair = demo_pair()
    image = read_image(pair.image)
    FIGURE.write_text(figure(image, load(run, device="cpu").predict(image), scheme), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
