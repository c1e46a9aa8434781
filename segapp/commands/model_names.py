"""The names of all networks, kept in a file because the libraries take seconds to import."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from segapp.errors import ConfigError, did_you_mean
from segapp.run.files import write_atomic

_LIBRARIES = ("torchvision", "segmentation_models_pytorch", "timm")


@dataclass(frozen=True)
class ModelName:
    """The keys of a config's `model` section that name a network; `encoder` is None where the name holds it."""

    library: str
    name: str
    encoder: str | None = None

    @property
    def label(self) -> str:
        """The name in one word: `smp/Unet/resnet34`."""
        return "/".join(part for part in astuple(self) if part is not None)


def matching_names(pattern: str | None) -> list[ModelName]:
    """Return the networks whose label contains a text, or matches it as a glob; case does not matter.

    Raises:
        ConfigError: there is none; the message has the nearest.
    """
    names = all_names()
    if pattern is None:
        return names
    wanted = pattern.lower()
    found = [name for name in names if wanted in name.label.lower() or fnmatchcase(name.label.lower(), wanted)]
    exact = [name for name in found if wanted in (name.label.lower(), (name.encoder or name.name).lower())]
    if exact and "/" in wanted:
        return exact
    if not found:
        parts = {part for name in names for part in (name.label, *name.label.split("/"))}
        hint = did_you_mean(pattern, sorted(parts), most=3) or "check the spelling"
        raise ConfigError(f"{pattern!r} matches no network: {hint} (segapp models lists the families)")
    return found


def all_names() -> list[ModelName]:
    """Return all networks, from the file that an earlier call wrote if the libraries and this module are the same."""
    libraries = repr([version(each) for each in _LIBRARIES]).encode()
    key = hashlib.sha256(libraries + Path(__file__).read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segapp"
    path = folder / f"model-names-{key}.json"
    try:
        return [ModelName(*row) for row in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        names = _collect()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps([astuple(name) for name in names]))
    except OSError:
        pass  # the next call collects them again
    return names


def _collect() -> list[ModelName]:
    import timm
    from segmentation_models_pytorch.encoders import encoders

    from segapp.models.from_smp import smp_names
    from segapp.models.from_torchvision import FAMILIES, torchvision_backbones, torchvision_names

    names = [ModelName("torchvision", name) for name in torchvision_names() if name not in FAMILIES]
    names += [ModelName("torchvision", family, backbone) for family in FAMILIES for backbone in torchvision_backbones()]
    names += [ModelName("segapp", "eomt", f"tu-{name}") for name in timm.list_models("vit_*patch1[46]*")]
    every = [*encoders, *(f"tu-{name}" for name in timm.list_models())]
    return names + [ModelName("smp", name, encoder) for name in smp_names() for encoder in every]
