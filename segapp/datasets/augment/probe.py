"""Trial of a list of transforms on synthetic images before a training: dtypes, sizes, class ids and seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import albumentations as A
import numpy as np

from segapp.datasets.augment.entries import raise_problems
from segapp.datasets.augment.pipeline import EvalTransform, TrainTransform, set_seed
from segapp.datasets.images.pixel_format import Pixels

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
