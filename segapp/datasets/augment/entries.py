"""Transforms made from a list of plain values, every argument checked; the built-in recipe and its color changes."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import albumentations as A
import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from segapp.custom.loading import Transform, build_part
from segapp.custom.names import is_component
from segapp.datasets.augment.crop import ScaledCrop
from segapp.datasets.images.pixel_format import Pixels
from segapp.errors import ConfigError, did_you_mean

_MAX_BRIGHTNESS = 32.0
_MAX_FACTOR = 0.5
_MAX_HUE_DEG = 18.0

# Luminance weights of the Filter Effects Module (W3C), which defines saturation and hue rotation as matrices.
_LUMA = np.array([0.213, 0.715, 0.072])
_HUE_COS = np.array([[0.787, -0.715, -0.072], [-0.213, 0.285, -0.072], [-0.213, -0.715, 0.928]])
_HUE_SIN = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])


class PhotometricChange(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations has no types
    """Brightness, contrast, saturation and hue, each with probability 0.5 (ranges of SSD, Liu et al. 2016).

    All four are affine in the color, so one matrix applies them all and values are clipped once. Contrast, saturation
    and hue follow the W3C Filter Effects Module (contrast around middle gray, hue as a rotation that keeps the
    luminance). Images that are not 8-bit RGB get the same brightness and contrast in every band, relative to its range.

    Args:
        strength: Factor of the ranges: brightness +-32 of 255, contrast and saturation 0.5 to 1.5, hue +-18 degrees.
        ranges: Lowest and highest usual value of each band; None: 8-bit RGB.

    Raises:
        ValueError: The strength is negative.
    """

    class InitSchema(BaseModel):
        """The argument, which albumentations validates."""

        strength: Annotated[float, Field(ge=0, allow_inf_nan=False)]
        ranges: tuple[tuple[float, float], ...] | None
        strict: bool

    def __init__(self, strength: float = 1.0, ranges: tuple[tuple[float, float], ...] | None = None) -> None:
        super().__init__(p=1.0)
        self.strength = strength
        self.ranges = ranges

    def get_params(self) -> dict[str, Any]:
        """Return the color matrix for one image, or its brightness and contrast."""
        brightness = self._draw(_MAX_BRIGHTNESS)
        contrast = 1 + self._draw(_MAX_FACTOR)
        if self.ranges is not None:
            return {"brightness": brightness / 255, "contrast": max(0.0, contrast)}
        saturation = 1 + self._draw(_MAX_FACTOR)
        hue_deg = self._draw(_MAX_HUE_DEG)
        return {"matrix": color_matrix(brightness, max(0.0, contrast), max(0.0, saturation), hue_deg)}

    def _draw(self, limit: float) -> float:
        """Return a uniform random number in +-limit, scaled by the strength, or 0 with probability 0.5."""
        value = self.py_random.uniform(-limit, limit) * self.strength
        return float(value) if self.py_random.random() < 0.5 else 0.0

    def apply(self, img: Pixels, **params: Any) -> Pixels:
        """Return the image with changed colors or bands, with the same dtype."""
        if self.ranges is None:
            return np.asarray(cv2.transform(img, params["matrix"]))
        brightness, contrast = params["brightness"], params["contrast"]
        if brightness == 0 and contrast == 1:
            return img
        low, high = np.array(self.ranges, np.float32).T
        middle = (low + high) / 2
        changed = (img.astype(np.float32) - middle) * contrast + (middle + brightness * (high - low))
        if img.dtype.kind == "f":
            return np.asarray(changed, img.dtype)
        limits = np.iinfo(img.dtype)
        return np.asarray(np.rint(changed).clip(limits.min, limits.max), img.dtype)


def color_matrix(
    brightness: float = 0.0, contrast: float = 1.0, saturation: float = 1.0, hue_deg: float = 0.0
) -> NDArray[np.float32]:
    """Return the affine map of RGB colors in 0..255, shape (3, 4): hue, saturation, contrast, then brightness.

    Args:
        brightness: Added to every channel.
        contrast: Factor around 127.5.
        saturation: 0: gray of the same luminance; 1: unchanged.
        hue_deg: Rotation in degrees.
    """
    angle = math.radians(hue_deg)
    hue = np.tile(_LUMA, (3, 1)) + math.cos(angle) * _HUE_COS + math.sin(angle) * _HUE_SIN
    saturate = (1 - saturation) * np.tile(_LUMA, (3, 1)) + saturation * np.eye(3)
    linear = contrast * saturate @ hue
    offset = np.full((3, 1), brightness + 127.5 * (1 - contrast))
    return np.hstack([linear, offset]).astype(np.float32)


Entry = Mapping[str, Mapping[str, Any]]
"""One transform of a list: {name: {argument: value}}."""


@dataclass(frozen=True)
class BandValues:
    """Values of the bands of images."""

    ranges: tuple[tuple[float, float], ...] | None  # lowest and highest usual value of each band; None: 8-bit RGB
    fill: tuple[float, ...]  # padding value of each band


STANDARD: tuple[Entry, ...] = ({"ScaledCrop": {}}, {"HorizontalFlip": {}}, {"PhotometricChange": {}})
"""The built-in recipe with its usual numbers."""

OWN_TRANSFORMS: dict[str, type[A.BasicTransform]] = {"ScaledCrop": ScaledCrop, "PhotometricChange": PhotometricChange}
COMPOSITIONS = ("OneOf", "SomeOf", "RandomOrder", "OneOrOther", "Sequential", "SelectiveChannelTransform")
"""Transforms that contain other transforms."""

_ABSTRACT = ("BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D", "BaseCompose")
_REFUSED = {
    "Compose": "use Sequential",
    "ReplayCompose": "use Sequential",
    "Lambda": "a config cannot contain a function: name a factory, package.module:name",
    "Normalize": "images are normalized on the device with data.mean and data.std: leave it out",
    "ToFloat": "images are scaled on the device with data.value_range: leave it out",
    "FromFloat": "images are scaled on the device with data.value_range: leave it out",
    "ToTensorV2": "segapp makes the tensors: leave it out",
    "ToTensor3D": "segapp makes the tensors: leave it out",
}


@dataclass
class TransformBuilder:
    """Makes transforms from entries, and collects the problems of the entries."""

    crop_px: tuple[int, int]  # height and width of a `ScaledCrop` whose entry gives none
    ignore_index: int  # mask value outside the image
    bands: BandValues | None = None  # None: 8-bit RGB that is normalized with ImageNet's mean
    # One sentence for each problem: the entry, the argument, and what to do
    problems: list[str] = field(default_factory=list)

    def build_all(self, entries: Sequence[Entry], resize_px: tuple[int, int] | None) -> tuple[Any, ...]:
        """Return the transforms of a list; a `ScaledCrop` at its beginning first resizes to `resize_px`.

        Raises:
            ConfigError: Entries are wrong; the error lists all problems.
        """
        steps = [
            self.build(entry, f"data.augment[{number}]", resize_px if number == 0 else None)
            for number, entry in enumerate(entries)
        ]
        raise_problems(self.problems)
        return tuple(steps)

    def build(self, entry: Entry, place: str, resize_px: tuple[int, int] | None = None) -> Any:
        """Return the transform of an entry, or None after recording its problems."""
        ((name, given),) = entry.items()
        if is_component(name):
            return self._own(name, given, place)
        kind = find_transform(name)
        if isinstance(kind, str):
            self.problems.append(f"{place}: {kind}")
            return None
        place = f"{place}: {name}"
        arguments = dict(given)
        for key, value in given.items():  # a constant of OpenCV may be given by name, such as BORDER_REFLECT_101
            if isinstance(value, str) and (key.endswith("interpolation") or key == "border_mode"):
                arguments[key] = getattr(cv2, value.removeprefix("cv2."), value)
        if name in COMPOSITIONS:
            inner = arguments.get("transforms")
            if not isinstance(inner, list) or not inner:
                self.problems.append(f"{place}.transforms: a list of at least one transform is expected")
                return None
            children = [self.build(each, f"{place}[{number}]") for number, each in enumerate(inner)]
            if any(child is None for child in children):
                return None
            arguments["transforms"] = children
        before = len(self.problems)
        self._check_names(kind, arguments, place)
        p = arguments.get("p", 1)
        if name in COMPOSITIONS and (isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1):
            self.problems.append(f"{place}.p = {p!r}: a probability is expected, 0 to 1")
        if len(self.problems) > before:
            return None
        return self._made(kind, {**self._defaults(kind, resize_px), **arguments}, place)

    def _own(self, name: str, options: Mapping[str, Any], place: str) -> Any:
        """Return the transform of a custom component, or None after recording a problem."""
        offered = {"crop_px": self.crop_px, "ignore_index": self.ignore_index}
        try:
            made = build_part(name, place, options, offered=offered, options_key=place)
        except ConfigError as error:
            self.problems.append(str(error))
            return None
        if isinstance(made, list | tuple) and made and all(isinstance(each, _TRANSFORMS) for each in made):
            return A.Sequential(list(made), p=1.0)
        if isinstance(made, A.Compose):
            return A.Sequential(made.transforms, p=made.p)
        if isinstance(made, _TRANSFORMS):
            return made
        if callable(made):
            return SeededFunction(made, name)
        self.problems.append(
            f"{place} = {name} makes a {type(made).__name__}: return a transform of albumentations, a list of them, "
            "or a function of (image, mask, seed)"
        )
        return None

    def _check_names(self, kind: type, arguments: Mapping[str, Any], place: str) -> None:
        given = _GIVEN if kind in OWN_TRANSFORMS.values() else ("strict",)
        known = [name for name in _parameters(kind) if name not in given]
        for argument in arguments:
            if argument not in known:
                hint = did_you_mean(argument, known) or f"it takes {', '.join(known)}"
                self.problems.append(f"{place}.{argument} is not an argument: {hint}")
        if arguments.get("mask_interpolation", 0) not in _NEAREST:
            self.problems.append(f"{place}.mask_interpolation would mix class ids: leave it out")

    def _defaults(self, kind: type, resize_px: tuple[int, int] | None) -> dict[str, Any]:
        """Return the arguments whose defaults in segapp differ from the class's own."""
        given: dict[str, Any] = {"crop_px": self.crop_px, "ignore_index": self.ignore_index, "resize_px": resize_px}
        parameters = _parameters(kind)
        if kind is ScaledCrop:
            return given if self.bands is None else {**given, "fill": self.bands.fill}
        if kind is PhotometricChange:
            return {} if self.bands is None or self.bands.ranges is None else {"ranges": self.bands.ranges}
        defaults: dict[str, Any] = {}
        if "fill_mask" in parameters and parameters["fill_mask"].default is not None:
            defaults["fill_mask"] = self.ignore_index
        schema = getattr(kind, "InitSchema", None)
        if schema is not None and "mask_interpolation" in schema.model_fields:
            accepted = get_args(schema.model_fields["mask_interpolation"].annotation)
            if cv2.INTER_NEAREST_EXACT in accepted:  # INTER_NEAREST shifts a resized mask by up to half a pixel
                defaults["mask_interpolation"] = cv2.INTER_NEAREST_EXACT
        return defaults

    def _made(self, kind: type, arguments: dict[str, Any], place: str) -> Any:
        owner = next(each for each in kind.__mro__ if "__init__" in vars(each))
        strict = {"strict": True} if "InitSchema" in vars(owner) else {}  # otherwise a failed check only warns
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about names that albumentations will replace
                return kind(**arguments, **strict)
        except Exception as error:
            cause = error.__cause__
            found = cause.errors() if isinstance(cause, ValidationError) else []
            for each in found:
                self.problems.append(_described(each, place))
            if not found:
                self.problems.append(f"{place}: {error}: change its arguments")
        return None


def raise_problems(problems: Sequence[str]) -> None:
    if problems:
        lines = [f"{len(problems)} problems in data.augment:"] if len(problems) > 1 else []
        raise ConfigError("\n  ".join([*lines, *problems]), key="data.augment").see("augment")


class SeededFunction(A.DualTransform):  # type: ignore[misc]  # albumentations has no types
    """A function of (image, mask, seed) that returns image and mask, as a transform with a name in messages."""

    def __init__(self, function: Transform, name: str) -> None:
        super().__init__(p=1.0)
        self.function, self.name = function, name

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        found = self.function(data["image"], data["mask"], self.seed)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(f"it returns a {type(found).__name__}: return (image, mask)")
        return {**data, "image": found[0], "mask": found[1]}


_TRANSFORMS = (A.BasicTransform, A.BaseCompose)

_GIVEN = ("ignore_index", "resize_px", "fill", "ranges", "strict")
"""Arguments that segapp passes to its own transforms."""

_NEAREST = (cv2.INTER_NEAREST, cv2.INTER_NEAREST_EXACT)


def find_transform(name: str) -> type | str:
    """Return the class of a name, or the problem of the name."""
    if name in OWN_TRANSFORMS:
        return OWN_TRANSFORMS[name]
    if name in _REFUSED:
        return f"{name} cannot be used: {_REFUSED[name]}"
    names = known_transforms()
    if name in names:
        return getattr(A, name)  # type: ignore[no-any-return]
    hint = did_you_mean(name, names, most=2) or "see its documentation"
    return f"{name} is not a transform of albumentations {A.__version__}: {hint}"


def known_transforms() -> list[str]:
    found = list(OWN_TRANSFORMS)
    for name in dir(A):
        kind = getattr(A, name)
        if not isinstance(kind, type) or name in _ABSTRACT or name in _REFUSED:
            continue
        is_leaf = issubclass(kind, A.BasicTransform) and not issubclass(kind, A.Transform3D)
        if is_leaf or name in COMPOSITIONS:
            found.append(name)
    return found


def leaves(step: Any) -> list[Any]:
    if isinstance(step, A.BaseCompose):
        return [leaf for child in step.transforms for leaf in leaves(child)]
    return [step]


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    found = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each for each in found if each.kind in named and each.name != "self"}


def _described(problem: Any, place: str) -> str:
    """Return a pydantic problem as a sentence."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not problem["loc"]:
        return f"{place}: {message}"
    where = f"{place}.{problem['loc'][0]}"
    if problem["type"] == "missing":
        return f"{where} is missing: add it"
    shown = repr(problem["input"])
    return f"{where} = {shown if len(shown) <= 60 else shown[:57] + '...'}: {message}"
