"""The classes of masks as config values, and what the user says about masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from segapp.datasets.layouts.published_classes import Color
from segapp.errors import ConfigError
from segapp.onboarding.survey.content import MaskContent, Value

IGNORED = 255
INSTANCE_STEP = 1000
"""Class x this + number of the instance is the value of a pixel in most masks of instances."""
MASK_KINDS = {
    "ids": "each value is a class",
    "instances": f"value // {INSTANCE_STEP} is the class",
    "panoptic": f"values from {INSTANCE_STEP} on are class x {INSTANCE_STEP} + instance, smaller ones are classes",
    "object": "each value above 0 is an object of one class; 0 is the background",
}
"""Values of `--masks`."""
NO_PALETTE = "none"
"""Value of `--palette`: the colours are those of no published data set."""
UNLABELLED = ("ignore", "class")
"""Values of `--unlabelled`."""


@dataclass(frozen=True)
class MaskChoices:
    """What the user says about masks; None: found, or asked.

    Attributes:
        masks: what the values are: a key of `MASK_KINDS`.
        unlabelled: what becomes of pixels without a class name: one of `UNLABELLED`.
        palette: title of the published data set whose colours the masks have, or `NO_PALETTE`.
    """

    masks: str | None = None
    unlabelled: str | None = None
    palette: str | None = None

    def check(self) -> None:
        """Check that the values exist.

        Raises:
            ConfigError: one does not.
        """
        for option, value, known in (
            ("--masks", self.masks, tuple(MASK_KINDS)),
            ("--unlabelled", self.unlabelled, UNLABELLED),
        ):
            if value is not None and value not in known:
                raise ConfigError(f"{option} {value}: choose {', '.join(known[:-1])} or {known[-1]}")


FOUND = MaskChoices()


@dataclass(frozen=True)
class Classes:
    """Classes of masks, as config values.

    Attributes:
        names: of the classes, by id.
        names_reason: where they are from.
        label_map: value in the mask -> class or ignored.
        label_map_reason: why.
        ignore_index: None: 255.
        palette: colours of RGB masks, those of ignored pixels last; empty: masks of ids.
        palette_reason: what they are.
        notes: sentences about values that are ignored, or about files that do not fit.
        source: file next to the data that the names are from; empty: none.
    """

    names: tuple[str, ...]
    names_reason: str
    label_map: Mapping[int, int] = field(default_factory=dict)
    label_map_reason: str = ""
    ignore_index: int | None = None
    palette: tuple[Color, ...] = ()
    palette_reason: str = ""
    notes: tuple[str, ...] = ()
    source: str = ""

    def class_of(self, stored: Value) -> int | None:
        """Return the class of a value or colour in the masks; None if it is ignored, or of no class."""
        if isinstance(stored, tuple):
            number = self.palette.index(stored) if stored in self.palette else len(self.names)
        else:
            ignore_index = IGNORED if self.ignore_index is None else self.ignore_index
            number = self.label_map.get(stored, stored)
            number = len(self.names) if number == ignore_index else number
        return number if 0 <= number < len(self.names) else None


def ignored_shares(content: MaskContent, classes: Classes) -> dict[Value, float]:
    """Return the values and colours that have no class -> their share of the pixels read."""
    total = max(1, content.num_px)
    return {stored: count / total for stored, count in content.pixels.items() if classes.class_of(stored) is None}
