"""Output files of predictions: written row by row under a temporary name, renamed when complete.

PNG files have the format of the W3C recommendation "Portable Network Graphics (PNG), third edition".

Shapes: C classes, H x W pixels of an image, R rows of a strip.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.images.pixel_format import RGB8, PixelFormat, in_all_bands
from segapp.datasets.images.raster import NOT_WHOLE, GeoTiffWriter
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError, accepted_words, cannot_be_written
from segapp.inference.drawing import blend, colorize
from segapp.inference.predict.polygons import CocoFile, PolygonPlan, encode_vectors
from segapp.inference.predict.predictor import Strip, Wanted
from segapp.inference.predict.reading import SAVED, Picture, Saved
from segapp.run.files import open_new, remove_quietly, unfinished_path

PROBABILITY_SCALE = 65_535
"""Stored value of probability 1."""
CONFIDENCE_SCALE = 255
"""Stored value of confidence 1."""
WRITTEN_PX = 2**22
"""Pixels that are converted for the files at the same time, each of up to 30 bytes."""


@dataclass(frozen=True)
class OutputPlan:
    """Kinds of outputs and where they are written."""

    folder: Path  # --out; each kind has a subfolder
    scheme: ClassScheme
    kinds: tuple[Saved, ...] = ("labels", "color", "overlay")
    label_ids: bool = False  # write the ids of the data set instead of class ids
    pixels: PixelFormat = RGB8
    polygons: PolygonPlan | None = None

    @property
    def wanted(self) -> Wanted:
        """What the outputs need besides the class ids."""
        needed: tuple[Wanted, ...] = ("probabilities", "confidence")
        return next((kind for kind in needed if kind in self.kinds), "labels")

    def notes(self, picture: Picture) -> list[str]:
        """Return sentences about the results of an image, and what they do not tell."""
        notes = [picture.unused_bands] if picture.unused_bands else []
        if picture.has_control_points:
            notes.append("control points are not copied to the results: gdalwarp makes an image with a transform")
        if self.polygons is not None and self.polygons.format != "coco" and picture.georeference is None:
            notes.append("without a georeference, polygons are in columns and rows of pixels")
        return notes


def confidence(strip: Strip) -> NDArray[np.float32]:
    """Return the probability of the most likely class, (R, W)."""
    if strip.confidence is not None:
        return strip.confidence
    assert strip.probabilities is not None
    return np.asarray(strip.probabilities.max(0), np.float32)


def label_table(scheme: ClassScheme, *, label_ids: bool, has_nodata: bool) -> tuple[NDArray[Any], int | None]:
    """Return the value of each class in label files, (C,), and the value that they declare for pixels without data.

    The latter is the `ignore_index` of the training, unless that is a class or does not fit; else the largest free one.
    """
    ids = scheme.file_ids if label_ids else range(scheme.num_classes)
    used = {*ids} if scheme.multilabel is None else {0, 255}
    largest = np.iinfo(np.uint8 if max(used) < 256 and len(used) + has_nodata <= 256 else np.uint16).max
    free = (value for value in (scheme.ignore_index, *range(largest, -1, -1)) if value not in used)
    nodata = next(value for value in free if 0 <= value <= largest) if has_nodata else None
    return np.array(ids, np.min_scalar_type(largest)), nodata


def labels_of_data(strip: Strip, scheme: ClassScheme) -> NDArray[Any]:
    no_class = np.iinfo(np.uint16).max if scheme.multilabel is None else 0
    return strip.labels if strip.hidden is None else np.where(strip.hidden, no_class, strip.labels.astype(np.int32))


class ImageOutputs:
    """Context manager of the output files of one image; strips are added from top to bottom.

    The files are removed if the context is left with an exception.

    Raises:
        StorageError: a file cannot be written.
    """

    def __init__(self, plan: OutputPlan, picture: Picture, coco: CocoFile | None = None) -> None:
        self._plan, self._picture, self._coco = plan, picture, coco
        self._rows: list[NDArray[Any]] = []  # for the COCO file
        self._writers: list[_Writer] = []
        self.hidden_px = 0  # pixels without data

    def __enter__(self) -> ImageOutputs:
        try:
            for writer in _writers(self._plan, self._picture):
                self._writers.append(writer)
        except BaseException:
            self.__exit__(RuntimeError)
            raise
        return self

    @property
    def paths(self) -> list[Path]:
        """The files of this image; complete after the context has ended."""
        return [writer.path for writer in self._writers]

    def add(self, strip: Strip) -> None:
        if self._picture.missing is not None:
            hidden = in_all_bands(self._picture.missing[strip.rows])
            strip, self.hidden_px = replace(strip, hidden=hidden), self.hidden_px + int(np.count_nonzero(hidden))
        for part in strip.divided(WRITTEN_PX):
            for writer in self._writers:
                writer.add(part)
        if self._coco is not None:
            self._rows.append(labels_of_data(strip, self._plan.scheme))

    def __exit__(self, error: object, *_: object) -> None:
        with ExitStack() as closing:  # all of them, also if one fails
            for writer in self._writers:
                closing.callback(writer.close, keep=error is None)
        if self._coco is not None and error is None:
            self._coco.add(self._picture, np.concatenate(self._rows))


class _Writer:
    """Output file under a temporary name; it is compared with what was written before it gets its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = unfinished_path(path, path.suffix)  # GDAL warns about other suffixes
        with self._reported():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: IO[bytes] = open(open_new(self._temporary), "wb")  # noqa: SIM115
            try:
                self.begin()
            except BaseException:
                self.close(keep=False)
                raise

    def add(self, strip: Strip) -> None:
        with self._reported():
            self.write(strip)

    def close(self, *, keep: bool) -> None:
        try:
            if keep:
                with self._reported():
                    self.finish()
                    num_bytes = self.file.tell()  # 0 if a library has written the file, which `finish` compares
                    self.file.close()
                    if num_bytes and self._temporary.stat().st_size != num_bytes:
                        raise OSError(errno.ENOSPC, NOT_WHOLE)
                    os.replace(self._temporary, self.path)
        finally:
            with suppress(OSError):  # of bytes that did not fit on the disk
                self.file.close()
            remove_quietly(self._temporary)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_be_written(self.path, error) from None

    def begin(self) -> None:
        """Write the head of the file before the first rows, if it has one."""

    def write(self, strip: Strip) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Write the end of the file; OSError if what a library wrote differs from what it was given."""
        raise NotImplementedError


Rows = Callable[[Strip], NDArray[Any]]


class _PictureFile(_Writer):
    """GeoTIFF of a georeferenced image; else a PNG.

    `rows` returns the rows of a strip as they are stored; the options are the same as for `PngWriter`. A GeoTIFF of one
    band declares `nodata`, the value of pixels without data; in colors they are black, which is also a color.
    """

    def __init__(
        self,
        folder: Path,
        picture: Picture,
        rows: Rows,
        *,
        is_photo: bool = False,
        nodata: int | None = None,
        **options: Any,
    ) -> None:
        self._picture, self._rows, self._is_photo, self._options = picture, rows, is_photo, options
        self._nodata = nodata
        suffix = ".png" if picture.georeference is None else ".tif"
        super().__init__(folder / f"{picture.file.name}{suffix}")

    def begin(self) -> None:
        size, georeference = self._picture.pixels.shape[:2], self._picture.georeference
        self._image: PngWriter | GeoTiffWriter
        if georeference is None:
            profile = self._picture.profile if self._is_photo else None
            self._image = PngWriter(self.file, size, is_photo=self._is_photo, profile=profile, **self._options)
        else:
            self._image = GeoTiffWriter(self._temporary, size, georeference, nodata=self._nodata, **self._options)

    def write(self, strip: Strip) -> None:
        rows = self._rows(strip)
        if strip.hidden is not None:
            hidden = strip.hidden.reshape(strip.hidden.shape + (1,) * (rows.ndim - 2))
            rows = np.where(hidden, rows.dtype.type(self._nodata or 0), rows)
        self._image.write(rows)

    def finish(self) -> None:
        self._image.finish()


class _Probabilities(_Writer):
    """Archive .npz with `probabilities`, uint16 (H, W, C), 65535 for 1, and `classes`, the names."""

    def __init__(self, folder: Path, picture: Picture, scheme: ClassScheme) -> None:
        self._size, self._names = picture.pixels.shape[:2], scheme.names
        super().__init__(folder / f"{picture.file.name}.npz")

    def begin(self) -> None:
        self._archive = zipfile.ZipFile(self.file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        with self._archive.open("classes.npy", "w") as entry:
            np.lib.format.write_array(entry, np.array(self._names))
        self._entry = self._archive.open("probabilities.npy", "w", force_zip64=True)
        header = {"descr": "<u2", "fortran_order": False, "shape": (*self._size, len(self._names))}
        np.lib.format.write_array_header_1_0(self._entry, header)

    def write(self, strip: Strip) -> None:
        assert strip.probabilities is not None
        # 16 rows at a time, to keep the transposed copy small
        for first in range(0, strip.probabilities.shape[1], 16):
            values = strip.probabilities[:, first : first + 16]
            if strip.hidden is not None:
                values = np.where(strip.hidden[first : first + 16], np.float32(0), values)
            stored = np.rint(values.transpose(1, 2, 0) * np.float32(PROBABILITY_SCALE)).astype("<u2")
            self._entry.write(np.ascontiguousarray(stored).tobytes())

    def finish(self) -> None:
        self._entry.close()
        self._archive.close()

    def close(self, *, keep: bool) -> None:
        try:
            super().close(keep=keep)
        finally:
            self._archive.fp = None  # otherwise it would write its end when it is collected


class _Vectors(_Writer):
    """GeoJSON or GeoPackage of an image's polygons, written when all rows are there."""

    def __init__(self, folder: Path, picture: Picture, scheme: ClassScheme, plan: PolygonPlan) -> None:
        self._picture, self._scheme, self._plan = picture, scheme, plan
        self._rows: list[NDArray[Any]] = []
        super().__init__(folder / f"{picture.file.name}.{plan.format}")

    def write(self, strip: Strip) -> None:
        self._rows.append(labels_of_data(strip, self._scheme))

    def finish(self) -> None:
        self.file.write(encode_vectors(np.concatenate(self._rows), self._picture, self._scheme, self._plan))


def _writers(plan: OutputPlan, picture: Picture) -> Iterator[_Writer]:
    scheme = plan.scheme
    if plan.polygons is not None and plan.polygons.format != "coco":
        yield _Vectors(plan.folder / "polygons", picture, scheme, plan.polygons)
    has_nodata = picture.missing is not None
    table, nodata = label_table(scheme, label_ids=plan.label_ids, has_nodata=has_nodata)
    for kind in plan.kinds:
        folder = plan.folder / kind
        if kind == "probabilities":
            yield _Probabilities(folder, picture, scheme)
        elif kind == "confidence":
            yield _PictureFile(
                folder,
                picture,
                partial(_confidence_of, 1 if has_nodata else 0),
                nodata=0 if has_nodata else None,
            )
        elif kind == "overlay":
            yield _PictureFile(
                folder,
                picture,
                lambda strip: blend(plan.pixels.as_rgb(picture.pixels[strip.rows]), strip.labels, scheme),
                channels=3,
                is_photo=True,
            )
        elif kind == "color" and scheme.num_classes + has_nodata <= 256 and scheme.multilabel is None:
            palette = scheme.palette[: scheme.num_classes]
            own = label_table(scheme, label_ids=False, has_nodata=has_nodata)[1]
            yield _PictureFile(folder, picture, lambda strip: strip.labels, palette=palette, nodata=own)
        elif kind == "color":
            yield _PictureFile(folder, picture, lambda strip: colorize(strip.labels, scheme), channels=3)
        elif scheme.multilabel is not None:  # one mask per class: 255 for pixels that have it
            taken: list[Path] = []
            for number, name in enumerate(scheme.names):
                of_class = folder / (re.sub(r"[^\w.-]", "_", name).lstrip(".") or str(number))
                while of_class in taken:
                    of_class = of_class.with_name(f"{of_class.name}_{number}")
                taken.append(of_class)
                yield _PictureFile(of_class, picture, partial(_mask_of, number), nodata=nodata)
        else:
            yield _PictureFile(folder, picture, lambda strip: table[strip.labels], dtype=table.dtype, nodata=nodata)


def _confidence_of(least: int, strip: Strip) -> NDArray[Any]:
    scaled = np.rint(confidence(strip) * np.float32(CONFIDENCE_SCALE))
    return np.asarray(scaled.clip(least, CONFIDENCE_SCALE), np.uint8)


def _mask_of(number: int, strip: Strip) -> NDArray[Any]:
    return np.where(strip.labels & (1 << number), 255, 0).astype(np.uint8)


def parse_saved(words: Sequence[str]) -> tuple[Saved, ...]:
    """Return the kinds named by `--save`, without duplicates, in a fixed order.

    Raises:
        ConfigError: an unknown kind.
    """
    wanted = {word.strip() for each in words for word in each.split(",") if word.strip()}
    unknown = sorted(wanted - set(SAVED))
    if unknown:
        raise ConfigError(f"--save {unknown[0]} is not known: {accepted_words(unknown[0], SAVED)}", value=unknown[0])
    return tuple(kind for kind in SAVED if kind in wanted)


_GREY, _RGB, _PALETTE = 0, 2, 3
_FILTER_NONE, _FILTER_SUB = 0, 1


class PngWriter:
    """Writer of a PNG of height and width `size` from top to bottom; the file stays open.

    It has one channel of gray (uint8 or uint16), one of ids in a palette of RGB colors, or three of RGB. Ids compress
    best unfiltered, photographs (`is_photo`) as differences to the left neighbor. `profile` is an ICC profile.
    """

    def __init__(
        self,
        file: IO[bytes],
        size: tuple[int, int],
        *,
        dtype: Any = np.uint8,
        channels: int = 1,
        palette: Sequence[tuple[int, int, int]] | None = None,
        is_photo: bool = False,
        profile: bytes | None = None,
    ) -> None:
        self._file, self._channels = file, channels
        self._dtype = np.dtype(dtype)
        self._is_photo = is_photo
        self._deflate = zlib.compressobj(1, strategy=zlib.Z_RLE if is_photo else zlib.Z_DEFAULT_STRATEGY)
        kind = _RGB if channels == 3 else _GREY if palette is None else _PALETTE
        file.write(b"\x89PNG\r\n\x1a\n")
        header = struct.pack(">IIBBBBB", size[1], size[0], 8 * self._dtype.itemsize, kind, 0, 0, 0)
        self._chunk(b"IHDR", header)
        if profile:
            self._chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(profile))
        if palette is not None:
            self._chunk(b"PLTE", bytes(value for color in palette for value in color))

    def write(self, rows: NDArray[Any]) -> None:
        """Append rows (R, W) or (R, W, 3)."""
        count = rows.shape[0]
        stored = np.ascontiguousarray(rows, self._dtype.newbyteorder(">")).reshape(count, -1)
        lines = np.empty((count, 1 + stored.shape[1] * self._dtype.itemsize), np.uint8)
        lines[:, 0] = _FILTER_SUB if self._is_photo else _FILTER_NONE
        lines[:, 1:] = stored.view(np.uint8)
        if self._is_photo:
            left = self._channels * self._dtype.itemsize
            values = stored.view(np.uint8)
            np.subtract(values[:, left:], values[:, :-left], out=lines[:, 1 + left :])
        if data := self._deflate.compress(lines.data):
            self._chunk(b"IDAT", data)

    def finish(self) -> None:
        """Write the end of the file; no rows may follow."""
        self._chunk(b"IDAT", self._deflate.flush())
        self._chunk(b"IEND", b"")

    def _chunk(self, name: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))
