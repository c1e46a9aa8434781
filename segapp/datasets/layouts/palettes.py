"""The palettes of indexed masks, which say the class of a pixel a second time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from segapp.datasets.files import shown

Color = tuple[int, int, int]
BLACK_AND_WHITE = {0: (0, 0, 0), 1: (255, 255, 255)}


def palette_of(image: Image.Image) -> dict[int, Color]:
    """Return the colors of the ids in a mask; none without a palette, or if it says nothing about the classes.

    A ramp of grays says nothing, and neither does an id with the color of a lower one: programs write both by default.
    """
    flat = (image.getpalette("RGB") if image.mode == "P" else None) or []
    colors = [*zip(flat[::3], flat[1::3], flat[2::3], strict=True)]
    counts = enumerate(zip(colors, image.histogram() if flat else (), strict=False))
    found = {index: color for index, (color, count) in counts if count and colors.index(color) == index}
    grays = [color for color in found.values() if len({*color}) == 1]
    return found if grays != sorted(grays) or len(grays) < len(found) or found == BLACK_AND_WHITE else {}


@dataclass
class Palettes:
    """The palettes of several masks, which must agree."""

    index_of: dict[Color, tuple[int, str | Path]] = field(default_factory=dict)
    color_of: dict[int, tuple[Color, str | Path]] = field(default_factory=dict)

    def add(self, source: str | Path, palette: Mapping[int, Color]) -> str:
        """Return how a palette disagrees with an earlier one: a color has two ids, or an id two colors; else ""."""
        for index, color in palette.items():
            at, earlier = self.index_of.setdefault(color, (index, source))
            if at != index:
                return f"the palettes disagree: {[*color]} is {at} in {shown(earlier)} and {index} in {shown(source)}"
            known, earlier = self.color_of.setdefault(index, (color, source))
            if known != color:
                two = f"{[*known]} in {shown(earlier)} and {[*color]} in {shown(source)}"
                return f"the palettes disagree: {index} is {two}"
        return ""
