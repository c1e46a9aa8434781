"""Reading and writing videos with OpenCV; frame rate and number of frames are kept, sound is dropped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.errors import DataError, StorageError, cannot_be_written
from segapp.inference.predict.outputs import ImageOutputs, OutputPlan, blend, colorize
from segapp.inference.predict.predictor import Strip
from segapp.inference.predict.reading import InputFile, Picture, Saved
from segapp.run.files import remove_quietly, temporary_name

CODECS = (("mp4v", ".mp4"), ("avc1", ".mp4"), ("XVID", ".avi"), ("MJPG", ".avi"))
"""Codecs in the order in which they are tried; Motion JPEG is built into OpenCV."""
_VIDEO_KINDS = ("color", "overlay")


class VideoReader:
    """The frames of a video; DataError if it cannot be opened or has no frame.

    The frame rate is 25 per second if the metadata have none. The number of frames is 0 if it is missing, and may be
    wrong.
    """

    def __init__(self, file: InputFile) -> None:
        self.file = file
        os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # errors are reported below, in one line
        self._capture = cv2.VideoCapture(os.fspath(file.path.absolute()))  # FFmpeg takes "http:x.mp4" for an address
        is_open = self._capture.isOpened()
        self._first = self._read() if is_open else None
        if self._first is None:
            self._capture.release()
            reason = "no frame can be decoded" if is_open else "no decoder supports it"
            raise DataError(
                f"{shown(file.path)}: {reason}: the video is damaged or of an unknown format; convert it, e.g. with "
                "ffmpeg -i IN -c:v libx264 OUT.mp4",
                path=file.path,
            )
        rate = float(self._capture.get(cv2.CAP_PROP_FPS))
        self.frames_per_s = rate if np.isfinite(rate) and rate > 0 else 25.0
        self.num_frames = max(0, int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        self.frame_px = int(self._first.shape[0] * self._first.shape[1])

    def __iter__(self) -> Iterator[Picture]:
        """Yield the frames as images named NAME/000001 and so on.

        Raises:
            DataError: at the end, if the file has fewer frames than its metadata say.
        """
        number = 0
        pixels = self._first
        self._first = None
        try:
            while pixels is not None:
                number += 1
                yield Picture(replace(self.file, name=f"{self.file.name}/{number:06}"), pixels)
                pixels = self._read()
        finally:
            self._capture.release()
        # Metadata often count one or two frames too many.
        if number < self.num_frames - 2:
            raise DataError(
                f"{shown(self.file.path)}: ends after frame {number} of {self.num_frames}: the video is damaged or "
                "truncated; the frames before this point were written",
                path=self.file.path,
            )

    def _read(self) -> NDArray[Any] | None:
        try:
            is_read, frame = self._capture.read()
        except cv2.error:
            return None
        return np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)) if is_read else None


class VideoOutputs:
    """Context manager of the outputs of a video: color and overlay as videos, other kinds as one file per frame.

    The videos are removed if the context is left with an exception.
    """

    def __init__(self, plan: OutputPlan, reader: VideoReader) -> None:
        self._frames = replace(plan, kinds=tuple(kind for kind in plan.video_kinds if kind not in _VIDEO_KINDS))
        self._videos = [_VideoFile(plan, kind, reader) for kind in plan.video_kinds if kind in _VIDEO_KINDS]
        self._frame_paths: list[Path] = []

    @property
    def paths(self) -> list[Path]:
        """The files: the videos, then the files of the frames; complete after the context has ended."""
        return [*(video.path for video in self._videos if video.has_frames), *self._frame_paths]

    def __enter__(self) -> VideoOutputs:
        return self

    def add(self, picture: Picture, strips: list[Strip]) -> None:
        """Append a frame."""
        labels = strips[0].labels if len(strips) == 1 else np.concatenate([strip.labels for strip in strips])
        for video in self._videos:
            video.add(picture.pixels, labels)
        if self._frames.kinds:
            with ImageOutputs(self._frames, picture) as outputs:
                for strip in strips:
                    outputs.add(strip)
            self._frame_paths += outputs.paths

    def __exit__(self, error: object, *_: object) -> None:
        for video in self._videos:
            video.close(keep=error is None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the line that OpenCV prints for each missing codec."""
    log = cv2.utils.logging
    level = log.getLogLevel()
    log.setLogLevel(log.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        log.setLogLevel(level)


class _VideoFile:
    """Output video under a temporary name, renamed when complete."""

    def __init__(self, plan: OutputPlan, kind: Saved, reader: VideoReader) -> None:
        self._scheme, self._kind = plan.scheme, kind
        self._rate = reader.frames_per_s
        self._base = plan.folder / kind / reader.file.name
        self._writer: Any = None
        self._temporary = self.path = self._base

    @property
    def has_frames(self) -> bool:
        return self._writer is not None

    def add(self, image: NDArray[Any], labels: NDArray[Any]) -> None:
        frame = colorize(labels, self._scheme) if self._kind == "color" else blend(image, labels, self._scheme)
        # Codecs with chroma subsampling refuse odd sides or silently drop the last row.
        odd = [(0, side % 2) for side in frame.shape[:2]]
        frame = np.pad(frame, (*odd, (0, 0)), mode="edge")
        if self._writer is None:
            self._open((frame.shape[1], frame.shape[0]))
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))

    def _open(self, size: tuple[int, int]) -> None:
        folder = self._base.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}: choose another --out", path=folder) from None
        for codec, suffix in CODECS:
            self._temporary = folder / (temporary_name() + suffix)
            fourcc = cv2.VideoWriter.fourcc(*codec)
            with _quiet():
                writer = cv2.VideoWriter(os.fspath(self._temporary), fourcc, self._rate, size, True)
            if writer.isOpened():
                self._writer, self.path = writer, folder / (self._base.name + suffix)
                return
            remove_quietly(self._temporary)
        tried = ", ".join(codec for codec, _ in CODECS)
        raise StorageError(
            f"{self._base}: no video can be written here (tried {tried}): choose another --out, or --save labels",
            path=self._base,
        )

    def close(self, *, keep: bool) -> None:
        if self._writer is None:
            return
        self._writer.release()
        try:
            if keep:
                if not self._temporary.stat().st_size:
                    raise StorageError(
                        f"{self.path} could not be written: free space or choose another --out", path=self.path
                    )
                os.replace(self._temporary, self.path)
        except OSError as error:
            raise StorageError(cannot_be_written(self.path, error), path=self.path) from None
        finally:
            remove_quietly(self._temporary)
