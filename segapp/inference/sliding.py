"""Low-resolution logits of whole images: in one pass, in sliding windows, flipped, at several scales.

`NormalizedInput` lets a network take images as stored in files.

Shapes: N images, C classes, H x W pixels of an image, h x w of the model's logits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.compat.torch import keep_inductor_in
from segapp.datasets.preprocessing import Preprocessing, padded
from segapp.errors import RunError
from segapp.losses.confusion import (
    LogitsTile,
    View,
    upsample_argmax,
    upsample_logits,
    upsample_probabilities,
    upsample_sets,
)
from segapp.memory.oom import is_out_of_memory, oom_failpoint
from segapp.parallel import sample_masks
from segapp.places import keep_compiled_code
from segapp.run.words import first_line

if TYPE_CHECKING:
    from segapp.models import SegmentationModel


def _is_of_the_compiler(error: Exception) -> bool:
    """Return True for errors of Dynamo, Inductor and the compilers that it starts."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return any(type(each).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")) for each in chain)


class NormalizedInput(nn.Module):
    """Model that takes images as stored in files; copies of uint8 between devices are a quarter of float32's size.

    The inner model takes normalized images (N, B, H, W), padded to a suitable size, with `channels_last` in the NHWC
    memory format, and returns a tuple whose first entry is the logits.
    """

    def __init__(self, model: SegmentationModel, preprocessing: Preprocessing, *, channels_last: bool = False) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._compiled: Callable[[Tensor], Any] | None = None
        self._as_cuda_graphs = False
        self._graph_shape: torch.Size | None = None

    def compile_training(self, *, as_cuda_graphs: bool = False) -> None:
        """Run the model's forward pass in training through torch.compile; the model itself is not modified.

        With `as_cuda_graphs`, graphs are recorded for the shape of the first batch. Others, such as the short last
        batch and pieces after an out-of-memory error, are not compiled.
        """
        keep_inductor_in(keep_compiled_code())
        options: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False} if as_cuda_graphs else {}
        self._compiled = torch.compile(lambda images: self.model(images), **options)
        self._as_cuda_graphs = as_cuda_graphs

    def forward(self, images: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return (logits, *auxiliary logits) of stored images (N, B, H, W).

        `keys` (N, layers) are the keys of the samples' dropout masks; see `segapp.parallel.dropout`.

        Raises:
            RunError: the model cannot be compiled.
        """
        if self.training:
            oom_failpoint("train.forward")
        # Evaluation has many sizes, and a rank may have no sample: each would be compiled anew.
        is_compiled = self._compiled is not None and self.training and len(images) > 0
        if is_compiled and self._as_cuda_graphs:
            self._graph_shape = self._graph_shape or images.shape
            is_compiled = images.shape == self._graph_shape
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # the outputs of the pass before may be overwritten
        call: Any = self._compiled if is_compiled else self.model
        try:
            with sample_masks(keys):
                outputs: tuple[Tensor, ...] = call(self.normalized(images))
        except Exception as error:
            if not is_compiled or is_out_of_memory(error) or not _is_of_the_compiler(error):
                raise
            raise RunError(
                f"train.compile: the model cannot be compiled ({type(error).__name__}: {first_line(error)}): set it to "
                "false",
                key="train.compile",
            ) from error
        return outputs

    def normalized(self, images: Tensor) -> Tensor:
        size = self.model.suitable_size(*images.shape[-2:])
        return padded(self.preprocessing.normalize(images), size).contiguous(memory_format=self.memory_format)


@contextlib.contextmanager
def without_cudnn_benchmark() -> Iterator[None]:
    """Disable cuDNN's benchmark, which would time every convolution again for each image size.

    (`torch.backends.cudnn.flags` would also set unrelated switches.)
    """
    was_on, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = was_on


MIN_WINDOW_PX = 64


def smaller_window(window: tuple[int, int]) -> tuple[int, int] | None:
    """Return the next window to try after an out-of-memory error, with half the sides; None if none is smaller.

    >>> smaller_window((200, 96)), smaller_window((64, 40))
    ((100, 64), None)
    """
    height, width = (min(side, max(MIN_WINDOW_PX, side // 2)) for side in window)
    return None if (height, width) == window else (height, width)


@dataclass(frozen=True)
class Inference:
    """Settings of the computation of logits for whole images."""

    preprocessing: Preprocessing  # from stored images to the input of the model, on the same device
    align_corners: bool = True  # of the upsampling, as in training
    window_px: tuple[int, int] | None = None  # height and width of a sliding window; None: the whole image
    overlap: float = 1 / 3  # share of a window that the next one covers too
    scales: tuple[float, ...] = (1.0,)  # scales of the image; the predictions are averaged
    flip: bool = False  # also average over the horizontally flipped image
    threshold: float | None = None  # a class is predicted if its sigmoid is above this; None: one class per pixel
    autocast: Callable[[], Any] = torch.no_grad  # returns the context manager of the forward pass

    @property
    def multilabel(self) -> bool:
        return self.threshold is not None

    def within(self, window_px: tuple[int, int] | None) -> Inference:
        """Return this inference in windows of at most a height and width; None: as it is."""
        if window_px is None:
            return self
        height, width = self.window_px or window_px
        return replace(self, window_px=(min(height, window_px[0]), min(width, window_px[1])))

    def labels(self, views: Tensor | list[View], size: tuple[int, int]) -> Tensor:
        """Return the classes (N, H, W) of `views`: ids, or sets of classes as int32 (bit c for class c)."""
        if self.threshold is not None:
            return upsample_sets(views, size, self.threshold, align_corners=self.align_corners)
        return upsample_argmax(views, size, align_corners=self.align_corners)

    def probabilities(self, views: Tensor | list[View], size: tuple[int, int]) -> Tensor:
        """Return the class probabilities (N, C, H, W) of `views`."""
        return upsample_probabilities(
            views, size, align_corners=self.align_corners, is_sigmoid=self.threshold is not None
        )

    @property
    def needs_whole(self) -> bool:
        """True if the network sees the whole image at another size, so that no part can be computed on its own."""
        return self.preprocessing.resize_px is not None

    @property
    def has_plain_windows(self) -> bool:
        """True for sliding windows over the original image; the windows of a part are then windows of the whole."""
        return self.window_px is not None and self._is_plain and not self.needs_whole

    def seen_px(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width at which the network sees an image."""
        return self.preprocessing.resize_px or size

    @property
    def _is_plain(self) -> bool:
        return self.scales == (1.0,) and not self.flip

    def views(self, model: SegmentationModel, images: Tensor) -> tuple[Tensor | list[View], tuple[int, int]]:
        """Return low-resolution logits of stored images (N, B, H, W), and the size to which they are upsampled.

        The logits are (N, C, h, w) or a list of views, as `upsample_argmax` and related functions take them. The size
        (H', W') includes the padding at the bottom and right to a suitable size of the model. For
        images that `data.resize_px` resizes, it is the size of the stored images.
        """
        seen, whole = self.preprocessing(images), (images.shape[-2], images.shape[-1])
        views, size = self.views_of_input(model, seen)
        if seen.shape[-2:] == whole:
            return views, size
        each, (height, width) = [views] if isinstance(views, Tensor) else views, seen.shape[-2:]
        if size != (height, width) or not all(isinstance(view, Tensor) for view in each):
            # Padding and tiles are counted in pixels of the resized image, which are no whole pixels of the file.
            upsampled = (
                upsample_logits([view], size, align_corners=self.align_corners, is_sigmoid=self.multilabel)
                for view in each
            )
            views = [logits[..., :height, :width] for logits in upsampled]
        return views, whole

    def views_of_input(self, model: SegmentationModel, images: Tensor) -> tuple[Tensor | list[View], tuple[int, int]]:
        """Return `views` of images that are preprocessed already."""
        frame = padded(images, model.suitable_size(*images.shape[-2:])) if self.window_px is None else images
        size = (frame.shape[-2], frame.shape[-1])
        if self.window_px is None and self._is_plain:
            return self._logits(model, frame), size
        flips = (False, True) if self.flip else (False,)
        return [self._view(model, frame, scale, flip) for scale in self.scales for flip in flips], size

    def _view(self, model: SegmentationModel, frame: Tensor, scale: float, flip: bool) -> View:
        seen = frame
        if scale != 1.0:
            scaled = tuple(max(1, round(side * scale)) for side in frame.shape[-2:])
            if self.window_px is None:
                scaled = model.suitable_size(*scaled)
            seen = F.interpolate(frame, scaled, mode="bilinear", align_corners=False, antialias=scale < 1.0)
        seen = seen.flip(-1) if flip else seen
        if self.window_px is None:
            logits = self._logits(model, seen)
            return logits.flip(-1) if flip else logits
        tiles = list(self._tiles(model, seen, self.window_px))
        size = (seen.shape[-2], seen.shape[-1])
        if scale == 1.0:
            return [_unflipped(tile, size[1]) if flip else tile for tile in tiles]
        # The borders of a scaled image's windows lie between output pixels, so they are joined at the scaled size.
        logits = upsample_logits([tiles], size, align_corners=self.align_corners, is_sigmoid=self.multilabel)
        return logits.flip(-1) if flip else logits

    def _tiles(self, model: SegmentationModel, images: Tensor, window_px: tuple[int, int]) -> Iterator[LogitsTile]:
        height, width = images.shape[-2:]
        window = (min(window_px[0], height), min(window_px[1], width))
        frame = model.suitable_size(*window)
        for top, left in window_corners((height, width), window, self.overlap):
            part = images[..., top : top + window[0], left : left + window[1]]
            yield LogitsTile(self._logits(model, padded(part, frame)), top, left, window, frame)

    def _logits(self, model: SegmentationModel, images: Tensor) -> Tensor:
        # The weight average of a half-precision model is float32, and is evaluated in float32.
        dtype = next((p.dtype for p in model.parameters() if p.dim() > 1), images.dtype)
        with self.autocast():
            logits: Tensor = model(images.to(dtype))[0]
        return logits


def _unflipped(tile: LogitsTile, width: int) -> LogitsTile:
    """Return a tile of the flipped image as a tile of the image; its padding moves from the right to the left."""
    left = width - tile.left - tile.size[1]
    skip = tile.frame[1] - tile.size[1]
    return replace(tile, logits=tile.logits.flip(-1), left=left, skip=skip)


def window_corners(size: tuple[int, int], window: tuple[int, int], overlap: float) -> Iterator[tuple[int, int]]:
    """Yield the top left corners of windows, no larger than the image, that cover it; the last end at its border.

    `overlap` is the share of a window that the next window also covers, 0 <= overlap < 1.
    """
    tops, lefts = (window_starts(side, length, overlap) for side, length in zip(size, window, strict=True))
    return itertools.product(tops, lefts)


def window_starts(side: int, length: int, overlap: float) -> list[int]:
    stride = max(1, math.ceil(length * (1 - overlap)))
    steps = math.ceil(max(side - length, 0) / stride) + 1
    return [min(i * stride, side - length) for i in range(steps)]
