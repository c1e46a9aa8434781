"""Sample pictures in the terminal: two pixels per cell as half blocks, or characters by brightness without colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.strip import Strip
from textual.widget import Widget

from segapp.run.text import printable

_RAMP = " .:-=+*#%@"
_MAX_PIXELS = 64 * 2**20


class PictureView(Widget, can_focus=True):
    """Shows one PNG of the run's `samples`, as large as it fits.

    Args:
        has_colour: Draw half blocks in colour; otherwise characters by brightness.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"picture-view--text"}
    DEFAULT_CSS = "PictureView { .picture-view--text { color: $text-muted; } }"

    def __init__(self, *, has_colour: bool, **keywords: str) -> None:
        super().__init__(id=keywords.get("id"), classes=keywords.get("classes"))
        self._has_colour = has_colour
        self._paths: list[Path] = []
        self._shown: Path | None = None
        self._strips: list[Strip] = []
        self._built: tuple[object, ...] | None = None

    def show(self, paths: list[Path]) -> None:
        """Set the available pictures, newest first; a selected one stays on the screen."""
        was_newest = self._shown is None or (bool(self._paths) and self._shown == self._paths[0])
        self._paths = paths
        if was_newest or self._shown not in paths:
            self._shown = paths[0] if paths else None
        self._announce()

    def move(self, by: int) -> None:
        """Show an older (-1) or a newer (1) picture."""
        if self._shown is not None:
            index = min(max(self._paths.index(self._shown) - by, 0), len(self._paths) - 1)
            self._shown = self._paths[index]
            self._announce()

    def _announce(self) -> None:
        if self._shown is None:
            self.border_subtitle = Content("none yet")
        else:
            index = self._paths.index(self._shown) + 1
            self.border_subtitle = Content(f"{printable(self._shown.name)} {index}/{len(self._paths)}")
        if self._key() != self._built:
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return one line of the picture."""
        if self._key() != self._built:
            self._strips = self._build()
            self._built = self._key()
        width = self.content_size.width
        if y < len(self._strips):
            return self._strips[y].crop_extend(0, width, self.rich_style)
        return Strip.blank(width, self.rich_style)

    def _key(self) -> tuple[object, ...]:
        return (self._shown, self.content_size)

    def _build(self) -> list[Strip]:
        width, height = self.content_size
        if self._shown is None:
            return [self._text("no sample pictures yet: each evaluation draws some")]
        if width < 2 or height < 1:
            return []
        try:
            image = load_picture(self._shown, width, 2 * height)
        except (OSError, ValueError, SyntaxError) as error:
            return [self._text(f"{printable(self._shown.name)} cannot be shown: {printable(str(error))[:60]}")]
        return _colour_strips(image) if self._has_colour else _grey_strips(image)

    def _text(self, text: str) -> Strip:
        return Strip([Segment(text, self.get_component_rich_style("picture-view--text"))])


def load_picture(path: Path, max_width: int, max_height: int) -> Any:
    """Return a picture as a Pillow RGB image, scaled to fit a size, with its aspect ratio.

    Raises:
        OSError: The file cannot be read, or is damaged.
        ValueError: The picture is too large for a sample.
    """
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as opened:
        if opened.width * opened.height > _MAX_PIXELS:
            raise ValueError(f"{opened.width}x{opened.height} px is too large")
        image = opened.convert("RGB")
    scale = min(max_width / image.width, max_height / image.height)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST)


def _colour_strips(image: Any) -> list[Strip]:
    width, height = image.size
    pixels = image.load()
    strips = []
    for y in range(0, height, 2):
        segments = []
        for x in range(width):
            lower = Color.from_rgb(*pixels[x, y + 1]) if y + 1 < height else None
            segments.append(Segment("▀", Style(color=Color.from_rgb(*pixels[x, y]), bgcolor=lower)))
        strips.append(Strip(segments, width))
    return strips


def _grey_strips(image: Any) -> list[Strip]:
    grey = image.convert("L").resize((image.width, max(1, image.height // 2)))
    pixels = grey.load()
    rows = [
        "".join(_RAMP[pixels[x, y] * (len(_RAMP) - 1) // 255] for x in range(grey.width)) for y in range(grey.height)
    ]
    return [Strip([Segment(row, Style())], grey.width) for row in rows]
