"""The transforms of training and evaluation: functions of an image, its mask and a seed; and their trial.

Before a training, a list of transforms is tried on synthetic images: dtypes, sizes, class ids and seeds.

Shapes: H, W height and width in pixels; images (H, W, B) of B bands, masks (H, W) of train ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import albumentations as A
import cv2
import numpy as np

from segapp.datasets.augment.crop import ScaledCrop, resize
from segapp.datasets.augment.entries import STANDARD, BandValues, Entry, TransformBuilder, raise_problems
from segapp.datasets.images.pixel_format import Pixels
from segapp.datasets.sampling import mix_seed


class TrainTransform:
    """A list of transforms whose random numbers depend only on the seed.

    Args:
        crop_px: Height and width of the result.
        entries: The transforms.
        ignore_index: Mask value outside the image.
        resize_px: Height and width to which every image is resized first; None: not resized. A `ScaledCrop` at the
            beginning of the list includes this, so the image is resampled only once.
        bands: Values of images that are not 8-bit RGB.

    Raises:
        ConfigError: Entries are wrong; the error lists all problems.
        ValueError: A size is not positive.
    """

    def __init__(
        self,
        crop_px: tuple[int, int],
        entries: Sequence[Entry] = STANDARD,
        *,
        ignore_index: int = 255,
        resize_px: tuple[int, int] | None = None,
        bands: BandValues | None = None,
    ) -> None:
        self.crop_px = _check_size("crop_px", crop_px)
        self.ignore_index = ignore_index
        self.steps = TransformBuilder(self.crop_px, ignore_index, bands).build_all(entries, resize_px)
        # If the first transform is a crop, image and mask may be objects that read windows of files.
        self.crops_first = bool(self.steps) and isinstance(self.steps[0], ScaledCrop)
        self.resize_px = None if self.crops_first else resize_px
        self._resize = EvalTransform(self.resize_px)

    def __call__(self, image: Pixels, mask: Pixels, seed: int, aim: int | None = None) -> tuple[Pixels, Pixels]:
        """Return the augmented image (H, W, B) and mask (H, W) of the crop's size.

        A `ScaledCrop` contains a pixel of the class `aim`, if the mask has one.

        Each transform gets its own seed: with one seed for all, all would draw the same random numbers, and scale and
        brightness, for example, would be correlated.
        """
        if not self.crops_first:
            image, mask = self._resize(image, mask, seed)
            image, mask = (each if each.flags.writeable else each.copy() for each in (image, mask))
        data: dict[str, Any] = {"image": image, "mask": mask, "aim": aim}
        for position, step in enumerate(self.steps):
            set_seed(step, mix_seed(seed, position))
            data = step(**data)
        return data["image"], data["mask"]


def set_seed(step: Any, seed: int) -> None:
    """Seed a transform, and each transform inside it with its own seed."""
    if not isinstance(step, A.BaseCompose):
        step.set_random_seed(seed)
        return
    step.random_generator, step.py_random = np.random.default_rng(seed), Random(seed)
    for position, child in enumerate(step.transforms):
        set_seed(child, mix_seed(seed, position))


class EvalTransform:
    """Resizes image and mask to a height and width; None: not resized."""

    def __init__(self, resize_px: tuple[int, int] | None = None) -> None:
        self.resize_px = _check_size("resize_px", resize_px) if resize_px is not None else None

    def __call__(self, image: Pixels, mask: Pixels, seed: int, aim: int | None = None) -> tuple[Pixels, Pixels]:
        """Return the resized image (H, W, B) and mask (H, W); seed and aim are not used."""
        if self.resize_px is None or self.resize_px == image.shape[:2]:
            return image, mask
        return resize(image, self.resize_px, cv2.INTER_LINEAR), resize(mask, self.resize_px, cv2.INTER_NEAREST_EXACT)


def _check_size(name: str, size_px: tuple[int, int]) -> tuple[int, int]:
    height, width = (int(side) for side in size_px)
    if height < 1 or width < 1:
        raise ValueError(f"{name}={size_px}: height and width must be positive")
    return height, width


_IDS = (3, 7)
_NUM_SEEDS = 3
_MAX_STATES = 4
_MAX_SIDE_PX = 4096


@dataclass
class _State:
    """A possible image and mask between two transforms, and the last transform that changed their size."""

    image: Pixels
    mask: Pixels
    resized_by: str | None = None

    @property
    def size_px(self) -> tuple[int, ...]:
        return self.image.shape[:2]


def check_transform(
    transform: TrainTransform, sizes_px: Iterable[tuple[int, int]], image_type: tuple[int, Any], mask_type: Any
) -> None:
    """Check that a list of transforms gives valid training samples, whatever random numbers it draws.

    Each transform is applied to synthetic images of the smallest and the largest sizes that it can get.

    Args:
        transform: The list.
        sizes_px: Height and width of the images.
        image_type: Number of bands and numpy type.
        mask_type: Numpy type.

    Raises:
        ConfigError: A transform fails, changes the dtype of image or mask, mixes class ids, or does not depend only on
            its seed, or the final size is not `crop_px`; the error lists all problems.
    """
    trial = _Trial(transform.ignore_index)
    states = [_drawn(size, image_type, mask_type) for size in _extreme(sizes_px)]
    if transform.resize_px is not None:
        resize = EvalTransform(transform.resize_px)
        states = [_State(*resize(state.image, state.mask, 0)) for state in states[:1]]
    for number, step in enumerate(transform.steps):
        states = trial.outcomes(step, states, f"data.augment[{number}]")
    for state in states:
        if state.size_px != transform.crop_px and not trial.problems:
            trial.problems.append(_wrong_size(state, transform.crop_px))
    raise_problems(list(dict.fromkeys(trial.problems)))


def _wrong_size(state: _State, crop_px: tuple[int, int]) -> str:
    height, width = state.size_px
    wanted = f"data.crop_px = {list(crop_px)}"
    if state.resized_by is None:
        return f"data.augment: no transform makes crops of {wanted}: begin the list with ScaledCrop"
    return (
        f"{state.resized_by} can give images of {height} x {width} px, but all must end with {wanted}: change its "
        "arguments, or put ScaledCrop or a RandomCrop with pad_if_needed behind it"
    )


def _extreme(sizes_px: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sizes with least height, least width and largest area, limited to the largest size of a trial."""
    sizes = list(sizes_px)
    chosen = [min(sizes), min(sizes, key=lambda size: size[1]), max(sizes, key=lambda size: size[0] * size[1])]
    return list(dict.fromkeys((min(height, _MAX_SIDE_PX), min(width, _MAX_SIDE_PX)) for height, width in chosen))


def _drawn(size_px: tuple[int, int], image_type: tuple[int, Any], mask_type: Any) -> _State:
    height, width = size_px
    num_bands, dtype = image_type
    rng = np.random.default_rng(0)
    values = rng.random((height, width, num_bands), np.float32)
    image = values if np.dtype(dtype).kind == "f" else (values * np.iinfo(dtype).max).astype(dtype)
    mask = np.full((height, width), _IDS[0], mask_type)
    mask[height // 3 : 2 * height // 3, width // 3 :] = _IDS[1]
    return _State(image.astype(dtype), mask)


@dataclass
class _Trial:
    """Trial of transforms, and its problems."""

    ignore_index: int  # mask value outside the image
    problems: list[str] = field(default_factory=list)  # one sentence each

    def outcomes(self, step: Any, states: list[_State], place: str) -> list[_State]:
        """Return the possible results of a transform for the given images: the smallest and largest per size."""
        made = [each for state in states for each in self._of_one(step, state, place)]
        if step.p < 1 or not made:
            made += states
        by_size = {state.size_px: state for state in reversed(made)}
        ordered = sorted(by_size.values(), key=lambda state: state.size_px[0] * state.size_px[1])
        return ordered[:1] + ordered[max(1, len(ordered) - _MAX_STATES + 1) :]

    def _of_one(self, step: Any, state: _State, place: str) -> list[_State]:
        if step.p <= 0:
            return []
        inner = f"{place}: {type(step).__name__}"
        children = [(f"{inner}[{number}]", child) for number, child in enumerate(getattr(step, "transforms", ()))]
        if isinstance(step, A.Sequential):
            states = [state]
            for name, child in children:
                states = self.outcomes(child, states, name)
            return states
        if isinstance(step, A.BaseCompose) and not isinstance(step, A.SelectiveChannelTransform):
            made = [each for name, child in children for each in self._of_one(child, state, name)]
            return (
                made if isinstance(step, A.OneOf | A.OneOrOther) else [state, *made, *self._tried(step, state, inner)]
            )
        return self._tried(step, state, inner)

    def _tried(self, step: Any, state: _State, place: str) -> list[_State]:
        """Apply a transform with a few seeds; record the problems of the results and return the valid ones."""
        good: list[_State] = []
        for seed in range(_NUM_SEEDS):
            try:
                image, mask = _applied(step, state, seed)
                again = _applied(step, state, seed) if seed == 0 else (image, mask)
            except Exception as error:
                text = f"{type(error).__name__}: {getattr(error, 'err', str(error)).partition(chr(10))[0]}"
                self.problems.append(f"{place} fails on {_kind_of(state.image)} ({text}): change it, or leave it out")
                return good
            problem = self._problem(step, state, (image, mask), again)
            if problem is not None:
                self.problems.append(f"{place} {problem}")
                return good
            resized_by = state.resized_by if image.shape[:2] == state.size_px else place
            good.append(_State(image, mask, resized_by))
        return good

    def _problem(self, step: Any, state: _State, result: Sequence[Any], again: Sequence[Any]) -> str | None:
        image, mask = result
        if not isinstance(image, np.ndarray) or not isinstance(mask, np.ndarray):
            return "makes tensors: leave it out, segapp makes them"
        if image.dtype != state.image.dtype or image.ndim != 3 or image.shape[2] != state.image.shape[2]:
            return f"makes {_kind_of(image)} of {_kind_of(state.image)}: leave it out"
        if mask.dtype != state.mask.dtype or mask.shape != image.shape[:2]:
            return f"makes masks of {mask.dtype}, {mask.shape} for images of {image.shape[:2]}: leave it out"
        allowed = {*_IDS, self.ignore_index, getattr(step, "fill_mask", None), getattr(step, "mask_drop_value", None)}
        strange = [int(value) for value in np.unique(mask) if value not in allowed]
        if strange:
            return f"puts {strange[0]} into masks that do not have it, which may be another class: leave it out"
        if any(not np.array_equal(one, other) for one, other in zip(result, again, strict=True)):
            return "gives different results for one seed, so that no run could be repeated: draw from self.py_random"
        return None


def _applied(step: Any, state: _State, seed: int) -> tuple[Any, Any]:
    set_seed(step, seed)
    result = step(image=state.image.copy(), mask=state.mask.copy(), force_apply=True)
    return result["image"], result["mask"]


def _kind_of(image: Any) -> str:
    """Return "a 20 x 30 px image with 3 bands of uint8"."""
    bands = image.shape[2] if image.ndim == 3 else 1
    return f"a {image.shape[0]} x {image.shape[1]} px image with {bands} bands of {image.dtype}"
