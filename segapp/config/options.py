"""The built-in losses, optimizers and schedules: name -> factory and options.

To add one, write its module and an entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from segapp.config.values import (
    Count,
    Decay,
    NonNegativeFloat,
    OpenFraction,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)
from segapp.errors import accepted_words


class NoOptions(Section):
    """No options."""


class CrossEntropyOptions(Section):
    """Cross-entropy, averaged over the valid pixels."""

    implementation: Literal["auto", "reference"] = "auto"
    """auto: fused (Triton on GPUs); reference: from full-resolution logits. Change it to compare both."""


class OhemOptions(Section):
    """Cross-entropy of the hard pixels."""

    threshold: PositiveFraction = 0.7
    """A pixel is hard if the probability of its target class is below this. Change it to 0.9 for more pixels."""
    min_kept: Count = 100_000
    """Smallest number of valid pixels per step that contribute. Change it to about 5 % of the pixels of a step."""


class BinaryOptions(Section):
    """Binary cross-entropy."""

    pos_weight: PositiveFloat = 1.0
    """Factor on the pixels that have a class. Change it to 2 to 10 if the class is rare and recall is low."""


class DiceOptions(Section):
    """1 minus the Dice coefficient of probabilities and target, averaged over the classes."""

    smooth: NonNegativeFloat = 1.0
    """Added to numerator and denominator. Change it to 0 to weight tiny objects more."""


class TverskyOptions(DiceOptions):
    """Tversky loss."""

    alpha: NonNegativeFloat = 0.3
    """Weight of false positives. Change it above beta if precision is low."""
    beta: NonNegativeFloat = 0.7
    """Weight of false negatives. Change it to more if recall is low."""
    gamma: PositiveFloat = 1.0
    """Exponent. Change it to 0.75 for the focal Tversky loss."""


class FocalOptions(Section):
    """Focal loss."""

    gamma: NonNegativeFloat = 2.0
    """Focusing exponent; 0 is cross-entropy. Change it to less if training is unstable."""


class SgdOptions(Section):
    """Stochastic gradient descent with momentum."""

    nesterov: bool = False
    """Use Nesterov momentum. Change it if you reproduce a recipe."""


class AdamOptions(Section):
    """Adam, whose weight decay is added to the gradient, and AdamW, where it is decoupled."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moment. Change it if you reproduce a recipe."""


class StepOptions(Section):
    """A learning rate that is multiplied by a factor at given epochs or steps."""

    epochs: list[PositiveInt] = []
    """Epochs after which the learning rate is multiplied by gamma. Change it to e.g. [60, 80] of 100 epochs."""
    steps: list[PositiveInt] = []
    """Steps after which the learning rate is multiplied by gamma. Change it if you plan by steps."""
    gamma: PositiveFloat = 0.1
    """Factor at each of these epochs and steps. Change it if the reductions are too strong."""


class WsdOptions(Section):
    """Warm-up, stable, decay."""

    decay_ratio: PositiveFraction = 0.2
    """Share of the steps, at the end, in which the learning rate falls. Change it to 0.1 for very long runs."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the fall. sqrt: 1 - sqrt(t), with t from 0 to 1. Change it if you reproduce a recipe."""


class PlateauOptions(Section):
    """Reductions when evaluations stop improving."""

    gamma: OpenFraction = 0.1
    """Factor of a reduction. Change it to 0.5 for gentler ones."""
    patience: Count = 10
    """Evaluations without a better score before a reduction. Change it to fewer if evaluations are rare."""


@dataclass(frozen=True)
class BuiltIn:
    """A loss, optimizer or schedule of segapp."""

    factory: str
    """Path of the factory, `package.module:name`; a string, so that the config imports no torch."""
    options: type[Section] = NoOptions
    """The keys in `options`."""
    is_overlap: bool = False
    """True for a loss of the overlap of whole classes: rare classes count as much as frequent ones."""
    takes_sets: bool = False
    """True for a loss that works on classes that do not exclude each other (`data.multilabel`)."""


LOSSES: Mapping[str, BuiltIn] = {
    "ce": BuiltIn("segapp.losses.cross_entropy:CriterionCE", CrossEntropyOptions),
    "ohem": BuiltIn("segapp.losses.pixel_losses:CriterionOHEM", OhemOptions),
    "bce": BuiltIn("segapp.losses.pixel_losses:CriterionBCE", BinaryOptions, takes_sets=True),
    "dice": BuiltIn("segapp.losses.overlap:CriterionDice", DiceOptions, is_overlap=True, takes_sets=True),
    "tversky": BuiltIn("segapp.losses.overlap:CriterionTversky", TverskyOptions, is_overlap=True, takes_sets=True),
    "focal": BuiltIn("segapp.losses.pixel_losses:CriterionFocal", FocalOptions, takes_sets=True),
    "lovasz": BuiltIn("segapp.losses.overlap:CriterionLovasz", is_overlap=True),
    "mask_classification": BuiltIn("segapp.losses.mask_classification:CriterionMaskClassification"),
}
OPTIMIZERS: Mapping[str, BuiltIn] = {
    "sgd": BuiltIn("segapp.optim:sgd", SgdOptions),
    "adam": BuiltIn("segapp.optim:adam", AdamOptions),
    "adamw": BuiltIn("segapp.optim:adamw", AdamOptions),
}
SCHEDULES: Mapping[str, BuiltIn] = {
    "poly": BuiltIn("segapp.optim:poly"),
    "cosine": BuiltIn("segapp.optim:cosine"),
    "step": BuiltIn("segapp.optim:steps_down", StepOptions),
    "constant": BuiltIn("segapp.optim:constant"),
    "onecycle": BuiltIn("segapp.optim:one_cycle"),
    "plateau": BuiltIn("segapp.optim:constant", PlateauOptions),
    "wsd": BuiltIn("segapp.optim:wsd", WsdOptions),
}

UNKNOWN_OPTION = "unknown_option"
"""Type of the error for a key that the chosen loss, optimizer or schedule does not have."""

BUILT_INS: Mapping[str, Mapping[str, BuiltIn]] = {"loss": LOSSES, "optim": OPTIMIZERS, "schedule": SCHEDULES}
"""Section -> table of built-ins."""

if TYPE_CHECKING:
    LossName = str
    OptimizerName = str
    ScheduleName = str
else:  # pydantic reads the accepted words from here
    LossName, OptimizerName, ScheduleName = (Literal[tuple(table)] for table in BUILT_INS.values())


def checked_options(table: Mapping[str, BuiltIn]) -> Any:
    """Return the validator of a field `options` after a field `name`: it checks the keys and fills in defaults."""

    def check(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name: str = info.data.get("name", "")  # missing if the name itself is invalid
        if name not in table:
            return options
        try:
            return table[name].options.model_validate(options).model_dump()
        except ValidationError as error:
            raise ValidationError.from_exception_data(
                error.title, [_line_error(item, name, table[name].options) for item in error.errors()]
            ) from None

    return field_validator("options")(check)


def _line_error(item: Any, name: str, model: type[Section]) -> InitErrorDetails:
    """Return a pydantic error for reraising. The error of an unknown key names the accepted keys."""
    found = InitErrorDetails(type=item["type"], loc=item["loc"], input=item["input"], ctx=item.get("ctx", {}))
    if item["type"] == "extra_forbidden":
        known = accepted_words(str(item["loc"][0]), model.model_fields) if model.model_fields else "it has none"
        found["type"] = PydanticCustomError(UNKNOWN_OPTION, "{text}", {"text": f"no option of {name}: {known}"})
    return found


def options_schema(table: Mapping[str, BuiltIn]) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds the options of all built-ins to the JSON schema of a field `options`, for editors."""

    def add(schema: dict[str, Any]) -> None:
        found: dict[str, list[dict[str, Any]]] = {}
        for name, built_in in table.items():
            for key, field in built_in.options.model_json_schema().get("properties", {}).items():
                found.setdefault(key, []).append({**field, "description": f"{field['description']} ({name})"})
        schema["properties"] = {key: each[0] if len(each) == 1 else {"anyOf": each} for key, each in found.items()}

    return add
