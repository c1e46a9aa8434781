"""The rules by which a config follows from a fingerprint and a machine, at their limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from segapp.memory.plan import GpuSpec
from segapp.onboarding.content import MaskContent
from segapp.onboarding.division import Division
from segapp.onboarding.encoding import Classes
from segapp.onboarding.fingerprint import Fingerprint
from segapp.onboarding.layout import Pair
from segapp.onboarding.machine import Machine, find_machine
from segapp.onboarding.proposal import Facts, config_text

CPU, TWO_GPUS = Machine(0, "the CPU"), Machine(2, "2 GPUs")
EVEN = (0.5, 0.3, 0.2)


def written(
    kept_4: Sequence[float] = (1, 1, 1),
    kept_8: Sequence[float] = (1, 1, 1),
    *,
    shares: Sequence[float] = EVEN,
    machine: Machine = CPU,
    has_weights: bool = False,
    num_train: int = 67,
    sizes_px: Sequence[tuple[int, int]] = ((300, 500),),
    has_up: bool = True,
    has_sides: bool = True,
) -> tuple[dict[str, Any], str]:
    """Returns the config for a fingerprint, and its text."""
    names = tuple("abcdefgh"[: len(shares)])
    fingerprint = Fingerprint(61, False, tuple(shares), {4: tuple(kept_4), 8: tuple(kept_8)}, has_up, has_sides)
    pairs = [Pair(f"{number}.png", f"{number}.png") for number in range(num_train)]
    facts = Facts(
        name="x",
        root=Path("x"),
        format="folder",
        keys={},
        division=Division(pairs, pairs[:1], {}),
        classes=Classes(names, "given"),
        content=MaskContent(num_masks=61, num_all=61, sizes_px=list(sizes_px)),
        machine=machine,
        fingerprint=fingerprint,
        weights_problem=None if has_weights else "offline",
    )
    text = config_text(facts)
    return yaml.safe_load(text), text


@pytest.mark.parametrize(
    ("kept_4", "kept_8", "has_weights", "machine", "model"),
    [
        ((0.9, 0.99, 0.99), (0.811, 0.8, 1.0), False, CPU, ("lraspp_mobilenet_v3_large", None)),
        ((0.9, 0.99, 0.99), (0.808, 0.8, 1.0), False, CPU, ("Unet", "resnet18")),
        ((1.0,) * 8, (0.34, *(1.0,) * 7), False, CPU, ("lraspp_mobilenet_v3_large", None)),
        ((1.0,) * 8, (0.33, *(1.0,) * 7), False, CPU, ("Unet", "resnet18")),
        ((0.981, 0.99, 1.0), (1.0, 1.0, 1.0), True, CPU, ("DeepLabV3Plus", "tu-tf_efficientnet_lite0")),
        ((0.979, 0.99, 1.0), (1.0, 1.0, 1.0), True, CPU, ("Unet", "tu-tf_efficientnet_lite0")),
        ((0.981, 0.99, 1.0), (1.0, 1.0, 1.0), False, TWO_GPUS, ("DeepLabV3Plus", "resnet50")),
        ((0.99, 0.979, 1.0), (1.0, 1.0, 1.0), True, TWO_GPUS, ("Unet", "resnet50")),
    ],
)
def test_model_at_the_limits_of_its_dice(
    kept_4: Sequence[float], kept_8: Sequence[float], has_weights: bool, machine: Machine, model: tuple[str, str | None]
) -> None:
    shares = (1 / len(kept_4),) * len(kept_4)
    config, _ = written(kept_4, kept_8, shares=shares, machine=machine, has_weights=has_weights)
    assert (config["model"]["name"], config["model"].get("encoder")) == model


@pytest.mark.parametrize(
    ("shares", "loss"),
    [
        ((0.9, 0.0899, 0.0101), {"name": "ce", "plus": [{"name": "dice"}]}),
        ((0.9, 0.0901, 0.0099), {"name": "ce", "class_weights": "enet"}),
        ((0.9901, 0.0, 0.0099), {"name": "ce", "plus": [{"name": "dice"}]}),
    ],
    ids=["no rare class", "a rare class of three", "a rare class of two with pixels"],
)
def test_loss_at_the_limit_of_its_share(shares: Sequence[float], loss: dict[str, Any]) -> None:
    assert written(shares=shares)[0]["loss"] == loss


def test_lengths_rates_and_batches_are_of_the_device() -> None:
    """2,000 steps on a CPU and 20,000 on GPUs; the rate grows with the square root of the batch."""
    cpu, text = written()
    assert (cpu["train"], cpu["eval"]) == ({"epochs": 125, "batch_size": 4}, {"every_epochs": 6})
    assert "2,000 steps, 16 per epoch" in text
    assert cpu["optim"]["lr"] == 2e-3
    gpus, text = written(machine=TWO_GPUS, has_weights=True)
    assert (gpus["train"], gpus["optim"]["lr"]) == ({"epochs": 5000, "batch_size": 16}, 7.1e-4)
    assert "16  # 8 for each of 2 GPUs; the largest that fits: segapp plan --config FILE\n" in text
    assert "4  # 4 on a CPU\n" in written()[1], "segapp plan needs GPUs"
    elsewhere = written(machine=find_machine([GpuSpec(8192), GpuSpec(24576.4)]))[1]
    assert "segapp plan --config FILE --gpus 8192MiB,24576MiB\n" in elsewhere
    few, text = written(machine=TWO_GPUS, num_train=5)
    assert (few["train"]["batch_size"], few["optim"]["lr"]) == (5, 4e-4)
    assert "5  # all images: 8 for each of 2 GPUs would be more;" in text


@pytest.mark.parametrize(
    ("machine", "sizes_px", "crop_px"),
    [
        (TWO_GPUS, [(700, 1000)], [512, 512]),
        (TWO_GPUS, [(901, 1000)], [768, 768]),
        (CPU, [(901, 1000)], [256, 256]),
        (CPU, [(200, 400)], [192, 256]),
        (CPU, [(100, 220), *[(230, 170)] * 2, *[(400, 500)] * 7], [224, 160]),  # one of ten may be smaller
    ],
)
def test_crop_is_what_the_device_and_most_images_afford(
    machine: Machine, sizes_px: list[tuple[int, int]], crop_px: list[int]
) -> None:
    assert written(sizes_px=sizes_px, machine=machine)[0]["data"]["crop_px"] == crop_px


def test_only_large_images_are_evaluated_in_windows() -> None:
    assert "slide" not in written(sizes_px=[(2000, 4000), (9, 9)])[0]["eval"]
    assert written(sizes_px=[(9, 9), (2000, 4001), (300, 500)])[0]["eval"]["slide"] is True


@pytest.mark.parametrize(
    ("size", "has_up", "has_sides", "flips"),
    [
        ((64, 64), False, False, ["D4"]),
        ((64, 96), False, False, ["HorizontalFlip", "VerticalFlip"]),  # quarter turns need a square crop
        ((64, 64), False, True, ["HorizontalFlip", "VerticalFlip"]),
        ((64, 64), True, False, None),
    ],
)
def test_flips_are_what_the_masks_and_the_crop_allow(
    size: tuple[int, int], has_up: bool, has_sides: bool, flips: list[str] | None
) -> None:
    """Little zoom goes with them: an object that is seen from above has one size."""
    section = written(sizes_px=[size], has_up=has_up, has_sides=has_sides)[0]["data"]
    zoom, color = {"ScaledCrop": {"scale": [0.75, 1.33]}}, {"PhotometricChange": {}}
    assert section.get("augment") == (flips and [zoom, *({flip: {}} for flip in flips), color])
