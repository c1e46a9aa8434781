"""`segapp models`: list the models that a config can name, with size, cost, memory, speed and local weights.

Networks are measured on the meta device, by a simulation, and with `--speed` by forward passes with random weights;
nothing is downloaded. Functions import torch and the model libraries, which takes seconds, only when they need them.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, astuple, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError, SegappError, did_you_mean
from segapp.run.words import aligned, first_line

if TYPE_CHECKING:
    from segapp.models import SegmentationModel

MAX_ROWS = 20
"""Maximum number of networks that are built for a table; with more matches, only the names are listed."""
NUM_CLASSES = 19
"""Number of classes of the measured networks, as in Cityscapes."""
_MIN_PASSES, _MIN_S = 5, 0.5


@dataclass(frozen=True)
class ModelName:
    """The keys of a config's `model` section that name a network; `encoder` is None if the name includes it."""

    library: str
    name: str
    encoder: str | None = None

    @property
    def label(self) -> str:
        """The name in one word: `smp/Unet/resnet34`."""
        return "/".join(part for part in astuple(self) if part is not None)


@dataclass(frozen=True)
class ModelFacts:
    """Measurements of a network.

    Attributes:
        gflops: 1e9 floating-point operations of a forward pass of one image; a multiply-add counts as two.
        size_px: height and width of that image, the nearest size that the network takes.
        stride: pixels per logit along each axis.
        image_mib: memory of one more image in a training step, fp32 with SGD; None: not simulated.
        images_per_s: forward passes of one image per second, fp32, on `device`; None: not measured.
        weights_here: named weights of the backbone or the network that are in the local caches.
        problem: why it cannot be built or run; None if it can.
        device: the device of `images_per_s`.
    """

    label: str
    num_params: int = 0
    gflops: float = 0.0
    size_px: tuple[int, int] | None = None
    stride: int = 0
    image_mib: float | None = None
    images_per_s: float | None = None
    weights_here: list[str] = field(default_factory=list)
    problem: str | None = None
    device: str | None = None


def print_models(pattern: str | None, size: str, *, with_memory: bool, with_speed: bool, as_json: bool) -> None:
    """Print the names that match a pattern and, if they are few, the measurements of each network."""
    size_px = _parse_size(size)
    names = matching_names(pattern)
    if len(names) > MAX_ROWS:
        _print_names(names, as_json=as_json)
        return
    facts = [measure_model(name, size_px, with_memory=with_memory, with_speed=with_speed) for name in names]
    print(json.dumps([asdict(each) for each in facts], indent=2) if as_json else "\n".join(table(facts)))


def _parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ConfigError(f"--size {text}: write HEIGHTxWIDTH in pixels, e.g. 512x512")
    return int(height), int(width)


def _print_names(names: list[ModelName], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(name) for name in names], indent=2))
        return
    families: dict[str, list[ModelName]] = {}
    for name in names:
        families.setdefault(f"{name.library}/{name.name}" if name.encoder else name.library, []).append(name)
    for family, members in families.items():
        shown = ", ".join(each.encoder or each.name for each in members[:4])
        print(f"{family}: {len(members)}, such as {shown}" if len(members) > 4 else f"{family}: {shown}")
    print(f"{len(names)} models match; more is shown of {MAX_ROWS} or fewer: give a pattern, e.g. smp/Unet/resnet34")


def table(facts: list[ModelFacts]) -> list[str]:
    """Return the facts as lines of aligned columns."""
    rows = [("NETWORK", "PARAMETERS", "GFLOPS", "SIZE", "STRIDE", "MIB/IMAGE", "IMAGES/S", "WEIGHTS")]
    for each in facts:
        if each.problem is not None:
            rows.append((each.label, *"------", each.problem.partition(";")[0]))
            continue
        cells = (
            f"{each.num_params / 1e6:.1f} M",
            f"{each.gflops:.1f}",
            "x".join(map(str, each.size_px or ())),
            str(each.stride),
            "-" if each.image_mib is None else f"{each.image_mib:.0f}",
            "-" if each.images_per_s is None else f"{each.images_per_s:.3g}",
            ", ".join(each.weights_here) or "-",
        )
        rows.append((each.label, *cells))
    devices = sorted({each.device for each in facts if each.device is not None})
    note = [f"images/s: one image at a time, fp32, random weights, on {', '.join(devices)}"] if devices else []
    return [*aligned(rows), *note]


def matching_names(pattern: str | None) -> list[ModelName]:
    """Return the networks whose label contains a text or matches it as a glob; ConfigError if there is none."""
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
        raise ConfigError(f"{pattern!r} matches no model: {hint} (segapp models lists the families)")
    return found


def all_names() -> list[ModelName]:
    """Return all networks that a config can name."""
    import timm
    from segmentation_models_pytorch.encoders import encoders

    from segapp.models.from_smp import smp_names
    from segapp.models.from_torchvision import FAMILIES, torchvision_backbones, torchvision_names

    names = [ModelName("torchvision", name) for name in torchvision_names() if name not in FAMILIES]
    names += [ModelName("torchvision", family, backbone) for family in FAMILIES for backbone in torchvision_backbones()]
    names += [ModelName("segapp", "eomt", f"tu-{name}") for name in timm.list_models("vit_*patch1[46]*")]
    every = [*encoders, *(f"tu-{name}" for name in timm.list_models())]
    return names + [ModelName("smp", name, encoder) for name in smp_names() for encoder in every]


def measure_model(
    name: ModelName, size_px: tuple[int, int], *, with_memory: bool = False, with_speed: bool = False
) -> ModelFacts:
    """Return the measurements of a network for images of a size; an error is one of the attributes."""
    from segapp.models.by_name import weights_in_cache

    try:
        model = _built(name)
        size_px = model.suitable_size(*size_px)
        speed, device = _images_per_s(name, size_px) if with_speed else (None, None)
        return ModelFacts(
            name.label,
            sum(parameter.numel() for parameter in model.parameters()),
            _num_flops(model, size_px) / 1e9,
            size_px,
            model.logits_stride,
            _image_mib(name, size_px) if with_memory else None,
            speed,
            weights_in_cache(model),
            device=device,
        )
    except (SegappError, RuntimeError, ValueError) as error:
        return ModelFacts(name.label, problem=first_line(error))


def _built(name: ModelName) -> SegmentationModel:
    import torch

    from segapp.models import build_model

    try:
        with torch.device("meta"):
            return build_model(name.library, name.name, NUM_CLASSES, encoder=name.encoder)
    except ConfigError:  # some constructors read values
        return build_model(name.library, name.name, NUM_CLASSES, encoder=name.encoder)


def _num_flops(model: SegmentationModel, size_px: tuple[int, int]) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = model.to("meta").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, *size_px, device="meta"))
    return int(counter.get_total_flops())


def _images_per_s(name: ModelName, size_px: tuple[int, int]) -> tuple[float, str]:
    """Return the median speed of forward passes of one image, and the device, which a run would also choose."""
    import torch

    from segapp.accelerator import accelerator_of
    from segapp.build.devices import choose_devices
    from segapp.models import build_model

    device = choose_devices("auto")[0][0]
    model = build_model(name.library, name.name, NUM_CLASSES, encoder=name.encoder).to(device).eval()
    images, times = torch.rand(1, 3, *size_px, device=device), [0.0]
    with torch.inference_mode():
        model(images)
        while len(times) <= _MIN_PASSES or sum(times) < _MIN_S:
            accelerator_of(device).synchronize(device)
            start = time.perf_counter()
            model(images)
            accelerator_of(device).synchronize(device)
            times.append(time.perf_counter() - start)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return 1 / statistics.median(times[1:]), f"{device}{threads}"


def _image_mib(name: ModelName, size_px: tuple[int, int]) -> float:
    """Return the difference between the peaks of two batch sizes, per image."""
    from segapp.build.pairs import build_scheme
    from segapp.build.step import StepAssembler
    from segapp.memory.peaks import SimulationJob
    from segapp.training.planning.simulate import Simulator

    simulator = Simulator(StepAssembler(_config(name, size_px), build_scheme(_config(name, size_px).data)))
    peaks = [simulator.run(SimulationJob("single", (num_images,))).peak_mib()[0] for num_images in (2, 6)]
    return (peaks[1] - peaks[0]) / 4


def _config(name: ModelName, size_px: tuple[int, int]) -> RunConfig:
    section = {"library": name.library, "name": name.name, "encoder": name.encoder}
    classes = [f"class {number}" for number in range(NUM_CLASSES)]
    data = {"format": "folder", "root": str(Path()), "classes": classes, "crop_px": list(size_px)}
    config = {"name": "models", "data": data, "model": section, "train": {"batch_size": 6, "precision": "fp32"}}
    if name.library == "segapp":
        config["loss"] = {"name": "mask_classification", "align_corners": False, "aux_weight": 1.0}
    return validate_config(config)
