"""`segapp models`: list the models that a config can name, with parameters, size and stride.

Networks are built on the meta device; nothing is downloaded. Functions import torch and the model libraries, which
takes seconds, only when they need them.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from segapp.errors import ConfigError, SegappError, did_you_mean
from segapp.run.words import aligned, first_line

if TYPE_CHECKING:
    from segapp.models import SegmentationModel

MAX_ROWS = 20
"""Maximum number of networks that are built for a table; with more matches, only the names are listed."""
NUM_CLASSES = 19


class ModelName(NamedTuple):
    """The keys of a config's `model` section that name a network; `encoder` is None if the name includes it."""

    library: str
    name: str
    encoder: str | None = None

    @property
    def label(self) -> str:
        """The name in one word: `smp/Unet/resnet34`."""
        return "/".join(part for part in self if part is not None)


def print_models(pattern: str | None, size: str, *, as_json: bool) -> None:
    """Print the names that match a pattern and, if they are few, the measurements of each network."""
    size_px = parse_size(size)
    names = matching_names(pattern)
    if len(names) > MAX_ROWS:
        print(json.dumps([name._asdict() for name in names], indent=2) if as_json else "\n".join(families(names)))
        return
    facts = [measure_model(name, size_px) for name in names]
    print(json.dumps(facts, indent=2) if as_json else "\n".join(table(facts)))


def parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ConfigError(f"--size {text}: write HEIGHTxWIDTH in pixels, e.g. 512x512")
    return int(height), int(width)


def families(names: list[ModelName]) -> list[str]:
    """Return a line for each library or architecture, with some of its names."""
    members: dict[str, list[str]] = {}
    for library, name, encoder in names:
        members.setdefault(f"{library}/{name}" if encoder else library, []).append(encoder or name)
    lines = [f"{family}: {len(each)}, such as {', '.join(each[:4])}" for family, each in members.items()]
    more = f"more is shown of {MAX_ROWS} or fewer: give a pattern, e.g. smp/Unet/resnet34"
    return [*lines, f"{len(names)} models match; {more}"]


def table(facts: list[dict[str, Any]]) -> list[str]:
    rows = [("NETWORK", "PARAMETERS", "SIZE", "STRIDE")]
    for each in facts:
        if each["problem"] is not None:
            rows.append((each["label"], *"--", each["problem"].partition(";")[0]))
            continue
        size = "x".join(map(str, each["size_px"]))
        rows.append((each["label"], f"{each['num_params'] / 1e6:.1f} M", size, str(each["stride"])))
    return aligned(rows)


def matching_names(pattern: str | None) -> list[ModelName]:
    """Return the networks whose label contains a text or matches it as a glob; ConfigError if there is none."""
    names = all_names()
    if pattern is None:
        return names
    wanted = pattern.lower()
    found = [name for name in names if wanted in name.label.lower() or fnmatchcase(name.label.lower(), wanted)]
    exact = [name for name in found if wanted == name.label.lower()]
    if not found:
        parts = {part for name in names for part in (name.label, *name.label.split("/"))}
        hint = did_you_mean(pattern, sorted(parts), most=3) or "check the spelling"
        raise ConfigError(f"{pattern!r} matches no model: {hint} (segapp models lists the families)")
    # A whole name may also be a part of longer ones.
    return exact or found


def all_names() -> list[ModelName]:
    import timm
    from segmentation_models_pytorch.encoders import encoders

    from segapp.models.by_name import OWN
    from segapp.models.from_smp import smp_architectures
    from segapp.models.from_torchvision import FAMILIES, torchvision_backbones, torchvision_names

    names = [ModelName("torchvision", name) for name in torchvision_names() if name not in FAMILIES]
    names += [ModelName("torchvision", family, backbone) for family in FAMILIES for backbone in torchvision_backbones()]
    for name, (_, pattern) in OWN.items():
        own = [None] if pattern is None else [f"tu-{encoder}" for encoder in timm.list_models(pattern)]
        names += [ModelName("segapp", name, encoder) for encoder in own]
    # smp takes its own encoders and, as `tu-NAME`, the encoders of timm.
    every = [*encoders, *(f"tu-{name}" for name in timm.list_models())]
    return names + [ModelName("smp", name, encoder) for name in smp_architectures() for encoder in every]


def measure_model(name: ModelName, size_px: tuple[int, int]) -> dict[str, Any]:
    """Return the measurements of a network for an image of about this size.

    Its keys are `label`, `num_params`, `size_px` (the nearest size that the network takes), `stride` (pixels per logit
    along each axis), and `problem` (why it cannot be built; None if it can).
    """
    facts = {"label": name.label, "num_params": 0, "size_px": None, "stride": 0}
    try:
        model = _built(name)
        num_params = sum(parameter.numel() for parameter in model.parameters())
        facts |= {"num_params": num_params, "size_px": model.suitable_size(*size_px), "stride": model.logits_stride}
    except (SegappError, RuntimeError, ValueError) as error:
        return facts | {"problem": first_line(error)}
    return facts | {"problem": None}


def _built(name: ModelName) -> SegmentationModel:
    import torch

    from segapp.models import build_model

    try:
        with torch.device("meta"):
            return build_model(name.library, name.name, NUM_CLASSES, encoder=name.encoder)
    except ConfigError:  # some constructors read values
        return build_model(name.library, name.name, NUM_CLASSES, encoder=name.encoder)
