"""Pipeline of a prediction: threads decode inputs and encode outputs while the network computes.

Decoding and encoding release the GIL. The queues are limited by pixels, not by images: they hold one large image, or
many small ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np
from PIL import Image

from segapp.accelerator import accelerator_of, gpu_of
from segapp.datasets.files import ImagePair, read_header
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.inspection import check_ranges
from segapp.datasets.resources import ThreadPool, freed_memory_kept
from segapp.errors import DataError, some_names
from segapp.inference.predict.outputs import ImageOutputs, OutputPlan
from segapp.inference.predict.polygons import CocoFile
from segapp.inference.predict.predictor import Predictor, Strip, kept_of, plan_workspace, predict_strips
from segapp.inference.predict.reading import MAX_PREDICTED_PX, InputFile, Picture, read_picture
from segapp.inference.workspace import Workspace
from segapp.memory.oom import is_out_of_memory
from segapp.run.files import remove_dead_temporaries
from segapp.run.words import duration
from segapp.waiting import lines_while

NUM_THREADS = 2
"""Of those that decode, and of those that encode."""
MAX_WAITING_BYTES = 2**27
"""Maximum number of bytes of images that are decoded ahead, and of images and predictions waiting to be written."""
MAX_BATCH = 16

Item = TypeVar("Item")


@dataclass
class Tally:
    """Counts and messages of a prediction, and the files that were written, in the order of the inputs."""

    num_images: int = 0
    num_px: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)


def predict_files(
    predictor: Predictor,
    files: Sequence[InputFile],
    plan: OutputPlan,
    *,
    batch: int | None = None,
    workspace: Workspace | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Tally:
    """Predict images, and write the outputs; the tally lists files that cannot be read as problems.

    Args:
        predictor: the network.
        files: inputs; consecutive images of one size share a batch.
        plan: which outputs are written, and where.
        batch: images per batch; None: as many as fit on a GPU, 1 on a CPU, where larger batches are not faster.
        workspace: number of pixels that fit into memory; None: determined from the free memory.
        progress: called with the number of finished files.

    Raises:
        StorageError: an output cannot be written.
        OutOfMemoryError: not even a block of the smallest size fits.
    """
    workspace = workspace or plan_workspace(predictor, plan.wanted)
    job = _Job(predictor, plan, workspace, batch or (1 if gpu_of(predictor.device) is None else MAX_BATCH), progress)
    pairs = [ImagePair(file.path, None, file.name) for file in files]
    for pixels in dict.fromkeys(each.pixels for each in getattr(predictor, "members", [predictor])):
        job.tally.notes += [found.message for found in check_ranges("images", pairs, plan.scheme, pixels)]
    start = time.perf_counter()
    if plan.polygons is not None:
        # Before hours of work, and before the threads, which must not import the writers at the same time.
        plan.polygons.check_places(files)
    for folder in (plan.folder / kind for kind in (*plan.kinds, "polygons")):
        # A prediction that was killed leaves its unfinished files.
        remove_dead_temporaries(folder, is_recursive=True)
    if plan.polygons is not None and plan.polygons.format == "coco":
        job.coco = CocoFile(plan.folder, plan.scheme, plan.polygons)
    with _large_pictures_allowed(), freed_memory_kept(predictor.device.type == "cpu"):
        job.predict_images(files)
    job.tally.notes += [f"{some_names(names)}: {note}" for note, names in job.notes.items()]
    if shares := job.nodata_shares:
        share = fmean(shares.values())
        job.tally.notes.append(f"{some_names([*shares])}: {share:.1%} of the pixels are nodata, and so in the results")
    job.tally.seconds = time.perf_counter() - start
    job.tally.paths = [path for file in files for path in job.written.get(file.name, [])]
    if job.coco is not None:
        job.coco.write(files)
        job.tally.paths.append(job.coco.path)
    return job.tally


@dataclass
class _Job:
    """State of a running prediction."""

    predictor: Predictor
    plan: OutputPlan
    workspace: Workspace
    batch: int
    progress: Callable[[int], None]
    tally: Tally = field(default_factory=Tally)
    written: dict[str, list[Path]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)  # a sentence -> images
    nodata_shares: dict[str, float] = field(default_factory=dict)  # image -> share of its pixels, 0 to 1
    coco: CocoFile | None = None
    num_done: int = 0
    share: float = 0.0  # of the image in tiles that is predicted

    def count(self, num_files: int) -> None:
        self.num_done += num_files
        self.progress(self.num_done)

    def predict_images(self, files: Sequence[InputFile]) -> None:
        """Predict images; the outputs are written in threads."""
        pixels = self.predictor.pixels
        calls = ((_decoded_bytes(file, pixels), partial(_read_or_problem, file, pixels)) for file in files)
        with (
            closing(ahead(calls, NUM_THREADS)) as read,
            closing(ahead(self._writes(self._readable(read)), NUM_THREADS)) as written,
        ):
            deque(written, maxlen=0)

    def _writes(self, found: Iterable[Picture]) -> Iterator[tuple[int, Callable[[], None]]]:
        """Predict images; yield the calls that write the outputs, with their weights."""
        for pictures in self._batches(found):
            for picture, strips in self._predicted(pictures):
                if isinstance(strips, list):
                    num_bytes = getattr(picture.pixels, "nbytes", 0) + sum(strip.num_bytes for strip in strips)
                    yield num_bytes, partial(self._write, picture, strips)
                else:  # larger than the workspace: written while it is predicted
                    self._write_tiles(picture, strips)
            self.count(len(pictures))

    def _readable(self, read: Iterable[Picture | str]) -> Iterator[Picture]:
        for found in read:
            if isinstance(found, str):
                self.tally.problems.append(found)
                self.count(1)
            else:
                for note in self.plan.notes(found):
                    self.notes.setdefault(note, []).append(found.file.name)
                yield found

    def _batches(self, pictures: Iterable[Picture]) -> Iterator[list[Picture]]:
        """Group consecutive images of one size into batches that fit into the workspace."""
        waiting: list[Picture] = []
        for picture in pictures:
            # For each image anew, because the workspace may have been halved meanwhile.
            fits = max(1, min(self.batch, self.workspace.max_px // picture.num_px))
            if waiting and (waiting[0].pixels.shape != picture.pixels.shape or len(waiting) >= fits):
                yield waiting
                waiting = []
            waiting.append(picture)
            if len(waiting) >= fits:
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def _predicted(self, pictures: list[Picture]) -> Iterator[tuple[Picture, list[Strip] | Iterator[Strip]]]:
        """Yield each image with its strips: a list, or an iterator for an image that exceeds the workspace."""
        self.tally.num_images += len(pictures)
        self.tally.num_px += len(pictures) * pictures[0].num_px
        if pictures[0].num_px > self.workspace.max_px:
            self._note_tiles(pictures[0])
            yield pictures[0], self._strips(pictures[0])
            return
        if len(pictures) == 1:
            yield pictures[0], list(self._strips(pictures[0]))
            return
        try:
            strips = self._together(pictures)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            accelerator_of(self.predictor.device).empty_cache()
            self.workspace.halve()
            strips = [list(self._strips(picture)) for picture in pictures]
        yield from zip(pictures, strips, strict=True)

    def _strips(self, picture: Picture) -> Iterator[Strip]:
        def count(share: float) -> None:
            self.share = share

        self.share = 0.0
        wanted = self.plan.wanted
        return predict_strips(self.predictor, picture.pixels, self.workspace, wanted=wanted, on_tile=count)

    def _together(self, pictures: list[Picture]) -> list[list[Strip]]:
        images = np.stack([picture.pixels[:] for picture in pictures])
        rows = slice(0, images.shape[1])
        if self.plan.wanted == "labels":
            return [[Strip(rows, labels)] for labels in self.predictor.labels(images)]
        found = self.predictor.probabilities(images)
        return [[Strip(rows, **kept_of(each, self.predictor.threshold, self.plan.wanted))] for each in found]

    def _write(self, picture: Picture, strips: Iterable[Strip]) -> None:
        with ImageOutputs(self.plan, picture, self.coco) as outputs:
            for strip in strips:
                outputs.add(strip)
                del strip  # otherwise it would be kept while the next one is predicted
        self.written[picture.file.name] = outputs.paths
        if outputs.hidden_px:
            self.nodata_shares[picture.file.name] = outputs.hidden_px / picture.num_px

    def _write_tiles(self, picture: Picture, strips: Iterable[Strip]) -> None:
        """Write a large image while it is predicted, with a line every 30 s."""
        began_s = time.monotonic()

        def line() -> str:
            left_s = (time.monotonic() - began_s) * (1 / self.share - 1) if self.share else None
            left = "" if left_s is None else f", about {duration(left_s)} left"
            return f"{picture.file.name}: {self.share:.0%} of the pixels are predicted{left}"

        with lines_while(line):
            self._write(picture, strips)

    def _note_tiles(self, picture: Picture) -> None:
        height, width = picture.pixels.shape[:2]
        seams = ", whose borders may show because loss.align_corners is true" if self.predictor.align_corners else ""
        self.tally.notes.append(
            f"{picture.file.name}: {width}x{height} px does not fit into memory: predicted in tiles of at "
            f"most {min(self.workspace.max_px, self.workspace.tile_px) / 1e6:.1f} Mpx{seams}"
        )


def _read_or_problem(file: InputFile, pixels: PixelFormat) -> Picture | str:
    try:
        return read_picture(file, pixels)
    except DataError as error:
        return str(error)


def _decoded_bytes(file: InputFile, pixels: PixelFormat) -> int:
    """Return the size of the image, from the header; 0 if it cannot be read, which is reported when decoding."""
    try:
        header = read_header(file.path, max_pixels=MAX_PREDICTED_PX)
    except DataError:
        return 0
    return header.height_px * header.width_px * pixels.num_bands * pixels.numpy_dtype.itemsize


def ahead(
    calls: Iterable[tuple[int, Callable[[], Item]]], num_threads: int, limit: int = MAX_WAITING_BYTES
) -> Generator[Item, None, None]:
    """Yield the results of calls in order, computed in threads, while the caller makes the next calls.

    Close this iterator if you may stop early: ending the threads during garbage collection can deadlock. A call is its
    weight and a function. `limit` is the total weight of the running calls and of the results that are not yet yielded;
    a heavier call runs on its own.
    """
    waiting: deque[tuple[int, Future[Item]]] = deque()
    with ThreadPool(num_threads, "predict") as pool:
        try:
            for weight, call in calls:
                while waiting and (len(waiting) >= 2 * MAX_BATCH or weight + sum(w for w, _ in waiting) > limit):
                    yield waiting.popleft()[1].result()
                waiting.append((weight, pool.submit(call)))
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            for _, each in waiting:
                each.cancel()


@contextmanager
def _large_pictures_allowed() -> Iterator[None]:
    """Raise Pillow's pixel limit, because images that are predicted in tiles exceed it."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = MAX_PREDICTED_PX
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before
