"""Checks of an own model: logits of any image, gradients, independence of images, state, other devices."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from segapp.commands.check_part.checks import Check, tried
from segapp.commands.check_part.elsewhere import follows
from segapp.custom.loading import shown_error
from segapp.models import SegmentationModel
from segapp.models.inspection import probabilities_problem


def checks_of_model(
    model: SegmentationModel, make: Callable[[], SegmentationModel], crop_px: tuple[int, int] | None
) -> Iterator[Check]:
    """Yield the checks of a network.

    Args:
        model: the network.
        make: makes it again, with other weights.
        crop_px: height and width of the training crops, if they are known.
    """
    height, width = size_px = model.suitable_size(64, 96)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, model.in_channels, height, width, generator=generator)
    yield tried(
        "it takes images of other sizes", lambda: _size_problem(model, [size_px, *([crop_px] if crop_px else [])])
    )

    @torch.no_grad()
    def logits(network: nn.Module = model, of: Tensor = images) -> Tensor:
        found: Tensor = network.eval()(of)[0]
        return found

    def gradients() -> str | None:
        model.train().zero_grad()
        total = torch.stack([head.square().mean() for head in model(images)]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        wrong = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        return f"that of {wrong[0]} is not finite: check its layer" if wrong else None

    def alone() -> str | None:
        apart = torch.cat([logits(of=images[i : i + 1]) for i in range(len(images))])
        if torch.allclose(apart, logits(), rtol=1e-3, atol=1e-4):
            return None
        return "an image's logits depend on the others in its batch: remove what mixes images, or splits do not agree"

    def round_trip() -> str | None:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        fresh = make()
        fresh.load_state_dict(torch.load(file, weights_only=True))
        if torch.equal(logits(fresh), logits()):
            return None
        return "other logits after loading: register what is learned as nn.Parameter or with register_buffer"

    def moved() -> str | None:
        return follows(model, lambda copied, device: logits(copied, images.to(device)))

    def unbounded() -> str | None:
        return probabilities_problem(logits(), logits(of=1000 * images))

    yield tried("logits are finite", lambda: None if logits().isfinite().all() else "check the initial weights")
    yield tried("it returns logits, not probabilities", unbounded)
    same = "draws numbers in evaluation: use torch's dropout, which train() and eval() switch"
    yield tried("evaluation repeats its result", lambda: None if torch.equal(logits(), logits()) else same)
    yield tried("gradients are finite", gradients)
    yield tried("images do not depend on each other", alone)
    yield tried("its state can be saved and loaded", round_trip)
    yield tried("it can be copied and moved to another device", moved)


def _size_problem(model: SegmentationModel, sizes_px: list[tuple[int, int]]) -> str | None:
    """Return which of some sizes of images a network does not take; None if it takes all."""
    with torch.no_grad():
        for height, width in sizes_px:
            try:
                model.eval()(torch.zeros(1, model.in_channels, height, width))
            except Exception as error:
                square = max(2 * model.size_divisor, 64)
                made_px = "x".join(map(str, model.suitable_size(square, square)))
                return (
                    f"{made_px} px work, {height}x{width} px fail with {shown_error(error)}: compute sizes from the "
                    f"input; or set size_divisor, min_size_px or fixed_size_px = (H, W) on the network, and "
                    f"data.crop_px to a size that it takes"
                )
    return None
