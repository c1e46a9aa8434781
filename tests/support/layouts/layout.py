"""A drawn layout: a name, how it is drawn, and what `segapp init` is to do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.layouts.canvas import Canvas, Codes, Truth

TWELVE = tuple(f"{number:04}" for number in range(12))
EIGHT, FOUR = TWELVE[:8], TWELVE[8:]

UNNAMED: Codes = {0: "class_0", 1: "class_1", 2: "class_2"}
BINARY: Codes = {0: "background", 255: "object"}
CAMVID_IDS: Codes = {0: "sky", 1: "building", 2: "pole", 3: "road", 4: "pavement", 5: "tree", 8: "car", 11: None}
CAMVID_COLORS: Codes = {
    (128, 128, 128): "sky", (128, 0, 0): "building", (192, 192, 128): "pole", (128, 64, 128): "road",
    (60, 40, 222): "pavement", (128, 128, 0): "tree", (64, 0, 128): "car", (0, 0, 0): None,
}  # fmt: skip


@dataclass(frozen=True)
class Read:
    """`init` writes a config without a question.

    Attributes:
        says: words that its lines must contain.
        check_names: words of the error with which `check` refuses the data; empty: it does not.
    """

    says: tuple[str, ...] = ()
    check_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ask:
    """`init` asks, and with one of the answers that it offers it reads the truth.

    Attributes:
        option: that answers it, or its beginning.
        or_read: the truth may be read without a question too.
    """

    option: str
    or_read: bool = False


@dataclass(frozen=True)
class Refuse:
    """`init` refuses.

    Attributes:
        words: of its message.
    """

    words: tuple[str, ...]


Expected = Read | Ask | Refuse
Draw = Callable[[Canvas], None]


@dataclass(frozen=True)
class DrawnLayout:
    """A layout of a folder.

    Attributes:
        name: of the layout.
        drawing: draws it, and notes what is true.
        expected: of `init`.
        tolerance: share of the pixels of a mask that may differ, for masks that were saved with loss.
    """

    name: str
    drawing: Draw
    expected: Expected = Read()
    tolerance: float = 0.0

    def draw(self, root: Path) -> Truth:
        """Draws the layout into a folder, which is made, and returns what is true."""
        root.mkdir(parents=True, exist_ok=True)
        canvas = Canvas(root)
        self.drawing(canvas)
        return canvas.truth()


def layouts(drawings: Mapping[str, Draw | tuple[Draw, Expected]]) -> list[DrawnLayout]:
    """Returns layouts by name; a drawing alone is read without a question."""
    return [
        DrawnLayout(name, *(drawing if isinstance(drawing, tuple) else (drawing,)))
        for name, drawing in drawings.items()
    ]


def unsplit(image: str, mask: str, codes: Codes = UNNAMED, names: Sequence[str] = TWELVE, **options: Any) -> Draw:
    """Draws a layout without splits; `{}` in the paths is the name."""

    def drawing(canvas: Canvas) -> None:
        for name in names:
            canvas.pair(image.replace("{}", name), mask.replace("{}", name), codes, **options)

    return drawing


def split(
    image: str,
    mask: str,
    words: Sequence[str] = ("train", "val"),
    codes: Codes = UNNAMED,
    names: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> Draw:
    """Draws a layout with a folder for each split, `{s}` in the paths."""

    def drawing(canvas: Canvas) -> None:
        for word, stems, known in zip(words, (EIGHT, FOUR), ("train", "val"), strict=True):
            for stem in (names or {}).get(word, stems):
                paths = [path.replace("{s}", word).replace("{}", stem) for path in (image, mask)]
                canvas.pair(paths[0], paths[1], codes, split="test" if "est" in word.lower() else known, **options)

    return drawing


def listed(
    image: str, mask: str, lists: str, line: str = "{}", codes: Codes = UNNAMED, words: Sequence[str] = ("train", "val")
) -> Draw:
    """Draws a layout with lists of names, `{s}` in their path."""

    def drawing(canvas: Canvas) -> None:
        for word, names in zip(words, (EIGHT, FOUR), strict=True):
            for name in names:
                canvas.pair(
                    image.replace("{}", name),
                    mask.replace("{}", name),
                    codes,
                    split="test" if word == "test" else "train" if word.startswith("train") else "val",
                )
            canvas.text(lists.replace("{s}", word), [line.replace("{}", name) for name in names])

    return drawing


def with_files(drawing: Draw, texts: Mapping[str, str], *, names_said: bool = True) -> Draw:
    """Draws a layout and text files in it, which name the classes if `names_said`."""

    def both(canvas: Canvas) -> None:
        drawing(canvas)
        canvas.names_said = names_said
        for name, content in texts.items():
            canvas.text(name, content)

    return both


def published(drawing: Draw) -> Draw:
    """Draws a layout whose folders and values say the names of its classes."""
    return with_files(drawing, {})
