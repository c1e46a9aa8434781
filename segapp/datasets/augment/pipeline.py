"""The transforms of training: functions of an image, its mask and a seed; and their trial.

Before a training, a list of transforms is tried on synthetic images: dtypes, sizes, class ids and seeds.

Shapes: H, W height and width in pixels; images (H, W, B) of B bands, masks (H, W) of train ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from random import Random
from typing import Any

import albumentations as A
import cv2
import numpy as np
from albumentations.augmentations.crops.transforms import BaseCrop

from segapp.datasets.augment.crop import ScaledCrop, resize
from segapp.datasets.augment.entries import (
    STANDARD,
    BandValues,
    Entry,
    SeededFunction,
    TransformBuilder,
    leaves,
    raise_problems,
)
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
        bands: Values of the bands; None: 8-bit RGB that is normalized with ImageNet's mean.

    Raises:
        ConfigError: Entries are wrong; the error lists all problems.
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
        self.crop_px = crop_px
        self.ignore_index = ignore_index
        self.steps = TransformBuilder(self.crop_px, ignore_index, bands).build_all(entries, resize_px)
        # If the first transform is a crop, image and mask may be objects that read windows of files.
        self.crops_first = bool(self.steps) and isinstance(self.steps[0], ScaledCrop)
        self.resize_px = None if self.crops_first else resize_px

    def __call__(self, image: Pixels, mask: Pixels, seed: int, aim: int | None = None) -> tuple[Pixels, Pixels]:
        """Return the augmented image (H, W, B) and mask (H, W) of the crop's size.

        A `ScaledCrop` contains a pixel of the class `aim`, if the mask has one.

        Each transform gets its own seed: with one seed for all, all would draw the same random numbers, and scale and
        brightness, for example, would be correlated.
        """
        if not self.crops_first:
            image, mask = resized(image, mask, self.resize_px)
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


def resized(image: Pixels, mask: Pixels, size_px: tuple[int, int] | None) -> tuple[Pixels, Pixels]:
    if size_px is None or size_px == image.shape[:2]:
        return image, mask
    return resize(image, size_px, cv2.INTER_LINEAR), resize(mask, size_px, cv2.INTER_NEAREST_EXACT)


_IDS = (3, 7)
_NUM_SEEDS = 6
_MAX_SIDE_PX = 4096


def check_transform(
    transform: TrainTransform, sizes_px: Iterable[tuple[int, int]], image_type: tuple[int, Any], mask_type: Any
) -> None:
    """Check that a list of transforms gives valid training samples, on synthetic images of extreme sizes.

    `sizes_px` has height and width of the images, `image_type` their number of bands and numpy type.

    Raises:
        ConfigError: A transform fails, changes the dtype of image or mask, mixes class ids, does not depend only on
            its seed, or changes all images in the same way, or the final size is not `crop_px`.
    """
    sizes = list(sizes_px)
    chosen = [min(sizes), min(sizes, key=lambda size: size[1]), max(sizes, key=lambda size: size[0] * size[1])]
    tried = {(min(height, _MAX_SIDE_PX), min(width, _MAX_SIDE_PX)) for height, width in chosen}
    pairs = [resized(*_drawn(size_px, image_type, mask_type), transform.resize_px) for size_px in sorted(tried)]
    _refuse_fixed(transform.steps, pairs)
    for pair in pairs:
        for seed in range(_NUM_SEEDS):
            _try_steps(transform, *pair, seed)
        _try_steps(transform, *pair, 0, skips=True)


def _drawn(size_px: tuple[int, int], image_type: tuple[int, Any], mask_type: Any) -> tuple[Pixels, Pixels]:
    height, width = size_px
    num_bands, dtype = image_type
    rng = np.random.default_rng(0)
    values = rng.random((height, width, num_bands), np.float32) ** 2  # an equalized image is another one
    image = values if np.dtype(dtype).kind == "f" else values * np.iinfo(dtype).max
    mask = np.full((height, width), _IDS[0], mask_type)
    mask[height // 3 : 2 * height // 3, width // 3 :] = _IDS[1]
    return image.astype(dtype), mask


_SIZE = "use data.resize_px, or a random crop, such as ScaledCrop, which pads small images"
_VALUES = "use p=0.5, or convert the images"
_RANDOM_CROPS = (ScaledCrop, BaseCrop, A.RandomSizedCrop, A.RandomResizedCrop, A.CropAndPad)


def _refuse_fixed(steps: Sequence[Any], pairs: Sequence[tuple[Pixels, Pixels]]) -> None:
    """Raise ConfigError if a transform changes all images in the same way; after a random crop, sizes may change."""
    cures = {}
    for leaf in chain(*map(leaves, steps)):
        # Of one size only, a crop may seem fixed: it pads the smallest image without a choice.
        of_sizes = [_cure(leaf, *pair) for pair in pairs]
        cures[leaf] = of_sizes[0] if all(of_sizes) else ""
    is_cropped = False
    for number, step in enumerate(steps):
        fixed, is_cropped = _fixed_in(step, cures, is_cropped)
        if fixed is not None:
            what = "changes every training image, but none in evaluation and predict"
            cure = "change only some of them" if isinstance(fixed, SeededFunction) else cures[fixed]
            raise_problems([f"data.augment[{number}]: {_named(fixed)} {what}: {cure}"])


def _fixed_in(step: Any, cures: Mapping[Any, str], is_cropped: bool, *, is_forced: bool = False) -> tuple[Any, bool]:
    """Return a transform that changes every image in the same way, or None; and if every image is cropped then.

    `is_forced`: the transform is applied whatever its p, because a choice fell on it.
    """
    is_either = isinstance(step, A.OneOrOther)
    if step.p < 1 and not is_either and not (is_forced and not isinstance(step, A.SomeOf)):
        return None, is_cropped
    if not isinstance(step, A.BaseCompose):
        is_fixed = cures[step] == _VALUES or (cures[step] == _SIZE and not is_cropped)
        return (step if is_fixed else None), is_cropped or (isinstance(step, _RANDOM_CROPS) and not cures[step])
    is_one = is_either or isinstance(step, A.OneOf)
    children = step.transforms[step.p == 0 : 1 + (step.p < 1)] if is_either else step.transforms
    if is_one or (isinstance(step, A.SomeOf) and (step.replace or step.n < len(children))):
        possible = [child for child in children if child.p or not is_one]
        found = [_fixed_in(child, cures, is_cropped, is_forced=is_one) for child in possible]
        fixed = [leaf for leaf, _ in found]
        # A choice of flips is random, and one of colors or sizes is not.
        are_alike = len(fixed) == 1 or all(
            cures.get(leaf) == _SIZE or isinstance(leaf, A.ImageOnlyTransform) for leaf in fixed
        )
        return (fixed[0] if fixed and None not in fixed and are_alike else None), all(cropped for _, cropped in found)
    for child in children:
        leaf, is_cropped = _fixed_in(child, cures, is_cropped)
        if leaf is not None:
            return leaf, is_cropped
    return None, is_cropped


def _cure(leaf: Any, image: Pixels, mask: Pixels) -> str:
    """Return the cure of a transform that changes an image in the same way with all seeds; "" for any other.

    The strength may differ, as with CLAHE: the mean of the changes, each of norm 1, has a norm of at least 0.95.
    """
    may_skip = type(leaf).__call__ is not A.BasicTransform.__call__  # a function, which has no p
    try:
        results = [_applied(leaf, image, mask, seed)[0] for seed in range(64 if may_skip else _NUM_SEEDS)]
    except Exception:  # its usual input is the result of another transform
        return ""
    if any(each.shape != image.shape for each in results):
        is_same = all(np.array_equal(each, results[0]) for each in results)
        keeps_scale = isinstance(leaf, ScaledCrop | A.RandomCrop | A.PadIfNeeded)  # where they only pad
        return _SIZE if is_same and not keeps_scale else ""
    changes = np.array([each[::4, ::4] for each in results], np.float32) - image[::4, ::4]
    norms = np.sqrt((changes**2).sum((1, 2, 3), keepdims=True))
    return _VALUES if norms.all() and np.linalg.norm((changes / norms).mean(0)) >= 0.95 else ""


def _try_steps(transform: TrainTransform, image: Pixels, mask: Pixels, seed: int, *, skips: bool = False) -> None:
    """Apply the transforms one after the other, each in any case; raise ConfigError for the first wrong result.

    With `skips`, those that a training does not always apply are left out.
    """
    resized_by = skipped = None
    for number, step in enumerate(transform.steps):
        parts = [*map(_named, leaves(step))]
        inner = f" ({', '.join(parts)})" if isinstance(step, A.BaseCompose) else ""
        place = f"data.augment[{number}]: {_named(step)}{inner}"
        if skips and step.p < 1:
            skipped = place
            continue
        try:
            result = _applied(step, image, mask, seed)
            # The same seed must give the same result, or a resume would train on other images.
            again = _applied(step, image, mask, seed) if seed == 0 else result
        except Exception as error:
            text = f"{type(error).__name__}: {getattr(error, 'err', str(error)).partition(chr(10))[0]}"
            raise_problems([f"{place} fails on {_kind_of(image)} ({text}): change it, or leave it out"])
        problem = _problem(step, (image, mask), result, again, transform.ignore_index)
        if problem is not None:
            raise_problems([f"{place} {problem}"])
        if result[0].shape[:2] != image.shape[:2]:
            resized_by = place
        image, mask = result
    if image.shape[:2] != transform.crop_px and skipped is not None:
        size_px = f"{image.shape[0]} x {image.shape[1]} px"
        raise_problems([f"{skipped} is not always applied, and images have {size_px} without it: set its p to 1"])
    if image.shape[:2] != transform.crop_px:
        raise_problems([_wrong_size(image.shape[:2], transform.crop_px, resized_by)])


def _named(step: Any) -> str:
    return step.name if isinstance(step, SeededFunction) else type(step).__name__


def _applied(step: Any, image: Pixels, mask: Pixels, seed: int) -> tuple[Any, Any]:
    set_seed(step, seed)
    result = step(image=image.copy(), mask=mask.copy(), force_apply=True)
    return result["image"], result["mask"]


def _problem(
    step: Any, before: tuple[Pixels, Pixels], result: tuple[Any, Any], again: tuple[Any, Any], ignore_index: int
) -> str | None:
    image, mask = result
    if not isinstance(image, np.ndarray) or not isinstance(mask, np.ndarray):
        return "makes tensors: leave it out, segapp makes them"
    if image.dtype != before[0].dtype or image.ndim != 3 or image.shape[2] != before[0].shape[2]:
        return f"makes {_kind_of(image)} of {_kind_of(before[0])}: leave it out"
    if mask.dtype != before[1].dtype or mask.shape != image.shape[:2]:
        return f"makes masks of {mask.dtype}, {mask.shape} for images of {image.shape[:2]}: leave it out"
    # Pixels that a transform fills have the value that its arguments name.
    fills = {getattr(leaf, name, None) for leaf in leaves(step) for name in ("fill_mask", "mask_drop_value")}
    strange = set(np.unique(mask).tolist()) - set(np.unique(before[1]).tolist()) - fills - {ignore_index}
    if strange:
        return f"puts {min(strange)} into masks that do not have it, which may be another class: leave it out"
    if any(not np.array_equal(one, other) for one, other in zip(result, again, strict=True)):
        return "gives different results for one seed, so that no run could be repeated: draw from self.py_random"
    return None


def _wrong_size(size_px: tuple[int, ...], crop_px: tuple[int, int], resized_by: str | None) -> str:
    wanted = f"data.crop_px = {list(crop_px)}"
    if resized_by is None:
        return f"data.augment: no transform makes crops of {wanted}: begin the list with ScaledCrop"
    return (
        f"{resized_by} can give images of {size_px[0]} x {size_px[1]} px, but all must end with {wanted}: change its "
        "arguments, or put ScaledCrop or a RandomCrop with pad_if_needed behind it"
    )


def _kind_of(image: Any) -> str:
    bands = image.shape[2] if image.ndim == 3 else 1
    return f"a {image.shape[0]} x {image.shape[1]} px image with {bands} bands of {image.dtype}"
