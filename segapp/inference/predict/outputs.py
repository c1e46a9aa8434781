"""What a prediction leaves on disk, written a few rows at a time, under its final name only when it is whole."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.layouts.formats import ClassScheme
from segapp.errors import ConfigError, StorageError, cannot_be_written
from segapp.inference.predict.png import PngWriter
from segapp.inference.predict.reading import Picture
from segapp.inference.predict.tiles import Strip
from segapp.run.files import remove_quietly, temporary_name

Saved = Literal["labels", "color", "overlay", "probabilities"]
SAVED: tuple[Saved, ...] = ("labels", "color", "overlay", "probabilities")
OVERLAY_ALPHA = 0.5
PROBABILITY_SCALE = 65_535
"""A stored probability over this is the probability."""


@dataclass(frozen=True)
class OutputPlan:
    """What is written, and where.

    Attributes:
        folder: --out; each kind has a folder below it.
        scheme: classes and colours.
        kinds: what is saved of an image.
        video_kinds: what is saved of a video; labels and probabilities make a file a frame.
        label_ids: write the data set's own ids instead of class ids.
    """

    folder: Path
    scheme: ClassScheme
    kinds: tuple[Saved, ...] = ("labels", "color", "overlay")
    video_kinds: tuple[Saved, ...] = ("color", "overlay")
    label_ids: bool = False

    @property
    def with_probabilities(self) -> bool:
        """Whether probabilities are wanted."""
        return "probabilities" in self.kinds


def label_id_table(scheme: ClassScheme) -> NDArray[Any]:
    """Class id -> id in the data set's own files, as an array of num_classes values."""
    return np.array(scheme.file_ids, dtype=np.uint8 if max(scheme.file_ids) < 256 else np.uint16)


def color_table(scheme: ClassScheme) -> NDArray[np.uint8]:
    """Class id -> RGB colour, (C, 3)."""
    return np.array(scheme.palette, dtype=np.uint8)


def colorize(labels: NDArray[Any], scheme: ClassScheme) -> NDArray[Any]:
    """Class ids (H, W) as a uint8 RGB picture (H, W, 3)."""
    colors: NDArray[np.uint8] = color_table(scheme)[labels]
    return colors


def blend(image: NDArray[Any], labels: NDArray[Any], scheme: ClassScheme) -> NDArray[Any]:
    """A picture (H, W, 3) half covered with the colours of its classes."""
    return np.asarray(cv2.addWeighted(image, 1 - OVERLAY_ALPHA, colorize(labels, scheme), OVERLAY_ALPHA, 0.0))


class ImageOutputs:
    """The files of one picture; strips are added from top to bottom.

    As a context: left with an exception, nothing stays of them.

    Args:
        plan: what is written.
        picture: what was predicted.

    Raises:
        StorageError: a file cannot be written.
    """

    def __init__(self, plan: OutputPlan, picture: Picture) -> None:
        self._plan, self._picture = plan, picture
        self._writers: list[_Writer] = []

    def __enter__(self) -> ImageOutputs:
        try:
            for kind in self._plan.kinds:
                self._writers.append(_WRITERS[kind](self._plan, self._picture))
        except BaseException:
            self.__exit__(RuntimeError)
            raise
        return self

    def add(self, strip: Strip) -> None:
        """Appends some rows."""
        for writer in self._writers:
            writer.add(strip)

    def __exit__(self, error: object, *_: object) -> None:
        for writer in self._writers:
            writer.close(keep=error is None)


class _Writer:
    """A file under a temporary name."""

    folder = ""
    suffix = ".png"

    def __init__(self, plan: OutputPlan, picture: Picture) -> None:
        self.plan, self.picture = plan, picture
        self.path = plan.folder / self.folder / f"{picture.file.name}{self.suffix}"
        self._temporary = self.path.parent / temporary_name()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file: IO[bytes] = open(self._temporary, "wb")  # noqa: SIM115
        except OSError as error:
            raise self._refused(error) from None
        try:
            self.begin()
        except OSError as error:
            self.close(keep=False)
            raise self._refused(error) from None

    def add(self, strip: Strip) -> None:
        try:
            self.write(strip)
        except OSError as error:
            raise self._refused(error) from None

    def close(self, *, keep: bool) -> None:
        try:
            if keep:
                self.finish()
                self.file.close()
                os.replace(self._temporary, self.path)
        except OSError as error:
            raise self._refused(error) from None
        finally:
            self.file.close()
            remove_quietly(self._temporary)

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(cannot_be_written(self.path, error, "free space or choose another --out"))

    def begin(self) -> None:
        raise NotImplementedError

    def write(self, strip: Strip) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class _PngFile(_Writer):
    """A PNG, and where the picture lies on the earth beside it."""

    def finish(self) -> None:
        self._png.finish()
        if self.picture.world is not None:
            self.path.with_suffix(".pgw").write_text(self.picture.world)

    def start(self, **options: Any) -> None:
        self._png = PngWriter(self.file, self.picture.pixels.shape[:2], **options)

    def rows(self, values: NDArray[Any]) -> None:
        self._png.write(values)


class _Labels(_PngFile):
    folder = "labels"

    def begin(self) -> None:
        scheme = self.plan.scheme
        plain = np.uint8 if scheme.num_classes <= 256 else np.uint16
        self._table = label_id_table(scheme) if self.plan.label_ids else None
        self.start(dtype=plain if self._table is None else self._table.dtype)

    def write(self, strip: Strip) -> None:
        self.rows(strip.labels if self._table is None else self._table[strip.labels])


class _Color(_PngFile):
    """With a palette where there are few enough classes: as small as the labels, the same colours."""

    folder = "color"

    def begin(self) -> None:
        scheme = self.plan.scheme
        self._has_palette = scheme.num_classes <= 256
        if self._has_palette:
            self.start(palette=scheme.palette[: scheme.num_classes])
        else:
            self.start(channels=3)

    def write(self, strip: Strip) -> None:
        self.rows(strip.labels if self._has_palette else colorize(strip.labels, self.plan.scheme))


class _Overlay(_PngFile):
    folder = "overlay"

    def begin(self) -> None:
        self.start(channels=3, is_photo=True, profile=self.picture.profile)

    def write(self, strip: Strip) -> None:
        self.rows(blend(self.picture.pixels[strip.rows], strip.labels, self.plan.scheme))


class _Probabilities(_Writer):
    """An .npz: `probabilities` uint16 (H, W, C), 65535 for 1, and `classes`, the names."""

    folder = "probabilities"
    suffix = ".npz"

    def begin(self) -> None:
        scheme = self.plan.scheme
        self._archive = zipfile.ZipFile(self.file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        with self._archive.open("classes.npy", "w") as entry:
            np.lib.format.write_array(entry, np.array(scheme.names))
        self._entry = self._archive.open("probabilities.npy", "w", force_zip64=True)
        shape = (*self.picture.pixels.shape[:2], scheme.num_classes)
        header = {"descr": "<u2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._entry, header)

    def write(self, strip: Strip) -> None:
        assert strip.probabilities is not None
        # 16 rows at a time: the copy in another layout and type stays small.
        for first in range(0, strip.probabilities.shape[1], 16):
            values = strip.probabilities[:, first : first + 16]
            stored = np.rint(values.transpose(1, 2, 0) * np.float32(PROBABILITY_SCALE)).astype("<u2")
            self._entry.write(np.ascontiguousarray(stored).tobytes())

    def finish(self) -> None:
        self._entry.close()
        self._archive.close()


_WRITERS: dict[Saved, type[_Writer]] = {
    "labels": _Labels,
    "color": _Color,
    "overlay": _Overlay,
    "probabilities": _Probabilities,
}


def parse_saved(words: Sequence[str]) -> tuple[Saved, ...]:
    """`--save` as kinds, each once, in a fixed order.

    Raises:
        ConfigError: an unknown kind.
    """
    wanted = {word.strip() for each in words for word in each.split(",") if word.strip()}
    unknown = sorted(wanted - set(SAVED))
    if unknown:
        raise ConfigError(f"--save {unknown[0]} is not known: use one or more of {', '.join(SAVED)}")
    return tuple(kind for kind in SAVED if kind in wanted)
