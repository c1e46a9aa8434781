"""Custom networks (`model.library: python`)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from segapp.custom.loading import build_part
from segapp.errors import ConfigError
from segapp.losses.additive import heads_of
from segapp.models.network import SegmentationModel


class PythonModel(SegmentationModel):
    """A custom network; tensor names are its own with the prefix `network.`.

    Its submodule `backbone` or `encoder` is the backbone; without one, the whole network is.
    """

    def __init__(self, network: nn.Module, *, name: str, num_classes: int, in_channels: int) -> None:
        parts = [part for part in ("backbone", "encoder") if isinstance(getattr(network, part, None), nn.Module)]
        super().__init__(
            library="python",
            name=name,
            encoder_name=type(network).__name__,
            num_classes=num_classes,
            in_channels=in_channels,
            backbone_name=".".join(["network", *parts[:1]]),
            size_divisor=int(getattr(network, "size_divisor", 1)),
            min_size_px=int(getattr(network, "min_size_px", 1)),
            fixed_size_px=getattr(network, "fixed_size_px", None),
        )
        self.network = network

    def compute_logits(self, images_NCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the network's logits, the main ones (N, C, h, w) first; in evaluation only the main ones."""
        heads = heads_of(self.network(images_NCHW))
        shape, wanted = tuple(heads[0].shape), (images_NCHW.shape[0], self.num_classes)
        if len(shape) != 4 or shape[:2] != wanted:
            raise ValueError(f"the logits have the shape {shape}: return ({wanted[0]}, {wanted[1]}, h, w)")
        return heads if self.training else heads[:1]

    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Raise TypeError: the features before the last layer of a custom network are unknown."""
        raise TypeError(f"{self.name} has no features for distillation")


def build_python(name: str, num_classes: int, options: Mapping[str, Any], in_channels: int) -> PythonModel:
    """Return the network of a custom factory, which gets `num_classes` and `in_channels` if it has such parameters."""
    network = build_part(name, "model.name", options, offered={"num_classes": num_classes, "in_channels": in_channels})
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model.name = {name} made a {type(network).__name__}: return a torch.nn.Module",
            key="model.name",
            value=name,
        )
    return PythonModel(network, name=name, num_classes=num_classes, in_channels=in_channels)
