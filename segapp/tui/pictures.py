"""Sample images in the terminal, in half blocks: two pixels per cell.

Without color, they are drawn in characters and letters. The file of an evaluation contains a validation image, its
prediction and its target next to each other, in the colors of the classes. Another file is shown as a whole.
"""

import contextlib
import re
import string
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.binding import BindingType
from textual.content import Content
from textual.strip import Strip

from segapp.run.folder import FIRST_BATCH
from segapp.run.words import printable
from segapp.tui.widgets import StripWidget
from segapp.view.view import View
from segapp.view.wording import clip


class Arrangement(NamedTuple):
    """Positions of three pictures, each below its label.

    The legend is next to a single column, in the free quarter of two columns, and below three.
    """

    columns: int
    width: int
    height: int
    """Rows of a picture, without its label."""
    legend_width: int
    legend_height: int


def arrange(size: tuple[int, int], picture_px: tuple[int, int], legend_width: int) -> Arrangement:
    """Return the arrangement in which the pictures are largest; one column, if several are equal.

    The size is in cells; a cell shows two pixels, one below the other. Without a legend, its width is 0.
    """
    width, height = size
    legend_cells = min(legend_width, width // 3) + 1 if legend_width else 0
    below = 3 if legend_width and height >= 12 else min(1, legend_width)
    rooms = {
        1: (width - legend_cells, height // 3 - 1),
        2: ((width - 1) // 2, height // 2 - 1),
        3: ((width - 2) // 3, height - 1 - below),
    }
    scales = {columns: min(w / picture_px[0], 2 * h / picture_px[1]) for columns, (w, h) in rooms.items()}
    columns = max(scales, key=lambda columns: scales[columns])
    used = max(1, round(scales[columns] * picture_px[0])), max(1, round(scales[columns] * picture_px[1] / 2))
    legend = {
        1: (width - used[0] - 1, height),
        2: (width - used[0] - 1, used[1]),
        3: (width, max(below, height - used[1] - 1)),
    }[columns]
    return Arrangement(columns, *used, *legend)


_RAMP = " .:-=+*#%@"
_NAME = re.compile(rf"epoch_(\d{{1,9}})_(\d{{1,9}})\.png|{re.escape(FIRST_BATCH)}")
_LABELS = ("image", "target", "prediction")
_OF_FILE = (0, 2, 1)
"""The position of each picture of `_LABELS` in the file, from the left."""

Rgb = tuple[int, int, int]


class PictureKey(NamedTuple):
    """The evaluation and the image that a file shows; epoch 0 is the first batch of the training."""

    epoch: int
    image: int


class PictureView(StripWidget):
    """Shows a PNG of the run's `samples`: its three pictures, labeled and as large as possible, with their classes.

    In color it draws half blocks, otherwise characters by brightness, and a letter per class.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"picture-view--text", "picture-view--name", "picture-view--label"}
    DEFAULT_CSS = """
    PictureView {
        .picture-view--text { color: $text-muted; }
        .picture-view--name { color: $foreground; }
        .picture-view--label { color: $foreground; text-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("left", "move(-1)", "previous evaluation"),
        ("right", "move(1)", "next evaluation"),
        ("up", "image(-1)", "previous image"),
        ("down", "image(1)", "next image"),
    ]

    def __init__(self, *, has_color: bool, **keywords: str) -> None:
        super().__init__(**keywords)
        self._has_color = has_color
        self._paths: dict[PictureKey, Path] = {}
        self._shown: PictureKey | None = None
        self._written_ns = 0  # the shown file; an evaluation that a resume repeats writes it again
        self._names: dict[Rgb, str] = {}

    def show(self, paths: list[Path], view: View) -> None:
        """Set the available pictures, newest first; a selected one stays, otherwise the newest evaluation is shown."""
        shown = self._shown
        was_newest = shown is None or not self._paths or shown.epoch == max(self._paths).epoch
        self._paths = _places(paths)
        self._names = _class_names(view)
        if was_newest or shown not in self._paths:
            newest = max(self._paths).epoch if self._paths else 0
            self._shown = self._nearest(newest, shown.image if shown is not None else 0)
        self._announce()

    def action_move(self, by: int) -> None:
        """Show the same image at the previous (-1) or next (1) evaluation."""
        if self._shown is not None:
            self._shown = self._nearest(_next(self._epochs(), self._shown.epoch, by), self._shown.image)
            self._announce()

    def action_image(self, by: int) -> None:
        if self._shown is not None:
            epoch = self._shown.epoch
            self._shown = PictureKey(epoch, _next(self._images(epoch), self._shown.image, by))
            self._announce()

    def _epochs(self) -> list[int]:
        return sorted({place.epoch for place in self._paths})

    def _images(self, epoch: int) -> list[int]:
        return sorted(place.image for place in self._paths if place.epoch == epoch)

    def _nearest(self, epoch: int, image: int) -> PictureKey | None:
        return min((p for p in self._paths if p.epoch == epoch), key=lambda p: abs(p.image - image), default=None)

    def _announce(self) -> None:
        if self._shown is None:
            self.border_subtitle = Content("none yet")
        else:
            with contextlib.suppress(OSError):
                self._written_ns = self._paths[self._shown].stat().st_mtime_ns
            epochs, images = [epoch for epoch in self._epochs() if epoch], self._images(self._shown.epoch)
            at = "the first batch as the model sees it"
            if self._shown.epoch:
                at = f"evaluation {epochs.index(self._shown.epoch) + 1} of {len(epochs)}"
                at += f"  image {images.index(self._shown.image) + 1} of {len(images)}"
            self.border_subtitle = Content(f"{printable(self._paths[self._shown].name)}  {at}")
        if not self.is_current:
            self.refresh()

    def key(self) -> tuple[object, ...]:
        return (self._shown and self._paths.get(self._shown), self._written_ns, self.content_size, len(self._names))

    def build(self) -> list[Strip]:
        """Return the labeled pictures with their legend, or why there are none."""
        width, height = self.content_size
        if self._shown is None:
            return [self._text("no sample images yet: the first step and each evaluation write some")]
        if width < 2 or height < 2:
            return []
        path = self._paths[self._shown]
        try:
            image = load_picture(path)
        except (OSError, ValueError, SyntaxError) as error:
            return [self._text(f"{printable(path.name)} cannot be shown: {printable(str(error))[:60]}")]
        match = _NAME.fullmatch(path.name)
        # Only pictures of evaluations have three parts.
        if match is None or match[1] is None or image.width % 3:
            return self._draw(image, {}, width, height)
        part = image.width // 3
        pictures = [image.crop((at * part, 0, (at + 1) * part, image.height)) for at in _OF_FILE]
        legend = find_legend(pictures[1:], self._names)
        plan = arrange(
            (width, height), (part, image.height), max((len(name) + 3 for name in legend.values()), default=0)
        )
        letters = dict(zip(legend, string.ascii_uppercase, strict=False))
        blocks = [
            [self._text(label, "label"), *self._draw(picture, letters if i else {}, plan.width, plan.height)]
            for i, (label, picture) in enumerate(zip(_LABELS, pictures, strict=True))
        ]
        return self._join(plan, blocks, self._legend(legend, letters, plan))

    def _join(self, plan: Arrangement, blocks: list[list[Strip]], legend: list[Strip]) -> list[Strip]:
        """Return the labeled pictures in their positions, with the legend in the free one."""
        height = plan.height + 1
        blocks = [[*block, *[Strip([])] * (height - len(block))] for block in blocks]
        if plan.columns == 1:
            stack = [strip for block in blocks for strip in block]
            return self._beside([stack, legend], plan.width)
        if plan.columns == 2:
            lower = self._beside([blocks[2], [self._text("classes" if legend else "", "label"), *legend]], plan.width)
            return [*self._beside(blocks[:2], plan.width), *lower]
        return [*self._beside(blocks, plan.width), *legend]

    def _beside(self, blocks: Sequence[list[Strip]], width: int) -> list[Strip]:
        rows = zip_longest(*blocks, fillvalue=Strip([]))

        def padded(strip: Strip) -> Strip:
            return strip.crop_extend(0, max(width, strip.cell_length) + 1, self.rich_style)

        return [Strip.join([*map(padded, row[:-1]), row[-1]]) for row in rows]

    def _legend(self, legend: dict[Rgb, str], letters: dict[Rgb, str], plan: Arrangement) -> list[Strip]:
        """Return the classes of the pictures, most pixels first, as many as fit."""
        entries = []
        for color, name in legend.items():
            sign = "██" if self._has_color else letters.get(color, "?")
            style = Style(color=Color.from_rgb(*color)) if self._has_color else self.rich_style
            text = self._text(f" {clip(printable(name), max(1, plan.legend_width - 4))}", "name")
            entries.append(Strip.join([Strip([Segment(sign, self.rich_style + style)]), text]))
        per_row = max(1, plan.legend_width // (max((e.cell_length for e in entries), default=1) + 2))
        room = per_row * max(1, plan.legend_height)
        if len(entries) > room:
            entries[room - 1 :] = [self._text(f"and {len(entries) - room + 1} more")]
        widest = max((entry.cell_length for entry in entries), default=0) + 1
        rows = [entries[i : i + per_row] for i in range(0, len(entries), per_row)]
        return [self._beside([[entry] for entry in row], widest)[0] for row in rows]

    def _text(self, text: str, name: str = "text") -> Strip:
        return Strip([Segment(text, self.get_component_rich_style(f"picture-view--{name}"))])

    def _draw(self, image: Any, letters: dict[Rgb, str], width: int, height: int) -> list[Strip]:
        """Return a picture as large as possible; class colors use the nearest pixel, an image is averaged."""
        from PIL.Image import Resampling

        size = _fitted(image.size, width, 2 * height)
        is_smaller = size[0] < image.width and not letters
        scaled = image.resize(size, Resampling.BOX if is_smaller else Resampling.NEAREST)
        if self._has_color:
            return _color_strips(scaled)
        small = scaled.resize((size[0], size[1] // 2), Resampling.NEAREST)
        pixels, grey = small.load(), small.convert("L").load()

        def sign(x: int, y: int) -> str:
            return letters.get(pixels[x, y], ".") if letters else _RAMP[grey[x, y] * (len(_RAMP) - 1) // 255]

        rows = ["".join(sign(x, y) for x in range(small.width)) for y in range(small.height)]
        return [Strip([Segment(row, self.rich_style)], small.width) for row in rows]


def _next(choices: list[int], current: int, by: int) -> int:
    return choices[min(max(choices.index(current) + by, 0), len(choices) - 1)]


def _places(paths: list[Path]) -> dict[PictureKey, Path]:
    """Return the file of each picture; a file with another name counts as an evaluation after the others."""
    found = {}
    for i, path in enumerate(reversed(paths)):
        match = _NAME.fullmatch(path.name)
        found[PictureKey(int(match[1] or 0), int(match[2] or 0)) if match else PictureKey(10**9 + i, 0)] = path
    return found


def _class_names(view: View) -> dict[Rgb, str]:
    """Return the names of the classes of each color."""
    palette = view.start.palette if view.start is not None else None
    names: dict[Rgb, str] = {}
    for color, name in zip(palette or [], view.classes, strict=False):
        names[color] = f"{names[color]}, {name}" if color in names else name
    return names


def find_legend(pictures: Sequence[Any], names: dict[Rgb, str]) -> dict[Rgb, str]:
    """Return the classes that occur in Pillow RGB pictures of class colors, the most frequent first.

    Other colors (ignored pixels, mixtures) are left out.
    """
    counts: dict[Rgb, int] = {}
    for picture in pictures:
        for count, color in picture.getcolors(picture.width * picture.height) or []:
            counts[color] = counts.get(color, 0) + count
    return {color: names[color] for color in sorted(counts, key=lambda color: -counts[color]) if color in names}


def load_picture(path: Path) -> Any:
    """Return a picture as a Pillow RGB image; raise OSError for a damaged file, ValueError for one too large."""
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as opened:
        if opened.width * opened.height > 64 * 2**20:
            raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
        return opened.convert("RGB")


def _fitted(size: tuple[int, int], max_width: int, max_height: int) -> tuple[int, int]:
    """Return the largest size with the same aspect ratio; its height is even, for half blocks."""
    scale = min(max_width / size[0], max_height / size[1])
    return max(1, round(size[0] * scale)), max(2, round(size[1] * scale / 2) * 2)


def _color_strips(image: Any) -> list[Strip]:
    pixels = image.load()

    def cell(x: int, y: int) -> Segment:
        return Segment("▀", Style(color=Color.from_rgb(*pixels[x, y]), bgcolor=Color.from_rgb(*pixels[x, y + 1])))

    return [Strip([cell(x, y) for x in range(image.width)], image.width) for y in range(0, image.height, 2)]
