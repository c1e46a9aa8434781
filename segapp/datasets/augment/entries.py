"""Transforms made from a list of plain values, every argument checked; the built-in recipe as such a list."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import albumentations as A
import cv2
from pydantic import ValidationError

from segapp.custom.contracts import Transform
from segapp.custom.loading import build_part
from segapp.custom.names import is_part
from segapp.datasets.augment.color import PhotometricChange
from segapp.datasets.augment.crop import ScaledCrop
from segapp.errors import ConfigError, did_you_mean

Entry = Mapping[str, Mapping[str, Any]]
"""One transform of a list: {name: {argument: value}}."""


@dataclass(frozen=True)
class BandValues:
    """Values of images that are not 8-bit RGB."""

    ranges: tuple[tuple[float, float], ...]  # lowest and highest usual value of each band
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
    "ToTensorV2": "segapp makes the tensors: leave it out",
    "ToTensor3D": "segapp makes the tensors: leave it out",
}


@dataclass
class TransformBuilder:
    """Makes transforms from entries, and collects the problems of the entries."""

    crop_px: tuple[int, int]  # height and width of a `ScaledCrop` whose entry gives none
    ignore_index: int  # mask value outside the image
    bands: BandValues | None = None  # values of images that are not 8-bit RGB
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
        if is_part(name):
            return self._own(name, given, place)
        kind = find_transform(name)
        if isinstance(kind, str):
            self.problems.append(f"{place}: {kind}")
            return None
        place = f"{place}: {name}"
        arguments = {key: _constant(key, value) for key, value in given.items()}
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
        if name in COMPOSITIONS and not _is_probability(arguments.get("p", 1)):
            self.problems.append(f"{place}.p = {arguments['p']!r}: a probability is expected, 0 to 1")
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
            return SeededFunction(made)
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
            return {} if self.bands is None else {"ranges": self.bands.ranges}
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
    """Raise ConfigError for the problems of a list of transforms, if there are any."""
    if problems:
        lines = [f"{len(problems)} problems in data.augment:"] if len(problems) > 1 else []
        raise ConfigError("\n  ".join([*lines, *problems]), key="data.augment").see("augment")


class SeededFunction(A.DualTransform):  # type: ignore[misc]  # albumentations has no types
    """A function of (image, mask, seed) that returns image and mask, as a transform."""

    def __init__(self, function: Transform) -> None:
        super().__init__(p=1.0)
        self.function = function

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        """Return the data with the function's image and mask."""
        image, mask = self.function(data["image"], data["mask"], self.seed)
        return {**data, "image": image, "mask": mask}


_TRANSFORMS = (A.BasicTransform, A.BaseCompose)

_GIVEN = ("ignore_index", "resize_px", "fill", "ranges", "strict")
"""Arguments that segapp passes to its own transforms."""

_NEAREST = (cv2.INTER_NEAREST, cv2.INTER_NEAREST_EXACT)


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


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
    """Return the names of all transforms that a list may contain."""
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
    """Return the transforms inside a transform, or the transform itself."""
    if isinstance(step, A.BaseCompose):
        return [leaf for child in step.transforms for leaf in leaves(child)]
    return [step]


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    found = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each for each in found if each.kind in named and each.name != "self"}


def _constant(key: str, value: Any) -> Any:
    """Return the value of an OpenCV constant that is given by name, such as BORDER_REFLECT_101."""
    if isinstance(value, str) and (key.endswith("interpolation") or key == "border_mode"):
        return getattr(cv2, value.removeprefix("cv2."), value)
    return value


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
