"""segmentation_models_pytorch: every architecture with every encoder, smp's own and timm's (`tu-...`).

smp builds the network, without downloads; its encoder, decoder and head are used, but without the head's upsampling and
activation.

Shapes: N images, C classes, K feature channels, H x W of the input in pixels, h x w of the logits.
"""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from segapp.custom.loading import shown_error
from segapp.errors import ConfigError
from segapp.models.names import check_options, timm_options, unknown_name
from segapp.models.network import SegmentationModel

_RESERVED = (
    *("self", "kwargs", "encoder_name", "encoder_weights", "in_channels", "classes", "activation", "aux_params"),
    "upsampling",  # of the head, which is removed
)
"""Arguments of smp's classes that `build_model` sets or leaves out."""


class SmpModel(SegmentationModel):
    """An smp network without its head's upsampling; tensor names are smp's."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, segmentation_head: nn.Module, **about: Any) -> None:
        super().__init__(library="smp", **about)
        self.encoder = encoder
        self.decoder = decoder
        self.segmentation_head = segmentation_head

    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the logits, and the decoder's output (N, K, h, w)."""
        features = self.encoder(images_NCHW)
        # DPT's encoder returns (features, prefix tokens), and its decoder takes both.
        decoded: Tensor = self.decoder(*features) if isinstance(features, tuple) else self.decoder(features)
        return (self.segmentation_head(decoded),), decoded


def build_smp(
    name: str, num_classes: int, encoder: str | None, options: Mapping[str, Any], in_channels: int
) -> SmpModel:
    """Return a network with random weights; see `build_model`.

    The name is the class name of an smp architecture, in any case. The encoder is one of smp's, or `tu-` and the name
    of a timm model. The options are arguments of the class and, with a `tu-` encoder, of the timm model. PSPNet also
    takes `encoder_output_stride`: `encoder_depth: 5` and stride 8 give the published network.

    Raises:
        ConfigError: an unknown name or option, or a combination that cannot be built.
    """
    known = smp_architectures()
    by_lower = {each.lower(): each for each in known}
    if name.lower() not in by_lower:
        raise unknown_name("model.name", name, "an architecture of smp", known)
    name = by_lower[name.lower()]
    architecture = known[name]
    parameters = inspect.signature(architecture.__init__).parameters
    encoder = encoder or str(parameters["encoder_name"].default)
    _check_encoder(encoder)
    arguments = _arguments(name, encoder, options, [p for p in parameters if p not in _RESERVED])
    if in_channels != 3:
        arguments["in_channels"] = in_channels
    net = _construct(architecture, name, encoder, num_classes, arguments)
    return SmpModel(
        net.encoder,
        net.decoder,
        _head_without_upsampling(net.segmentation_head),
        name=name,
        encoder_name=encoder,
        num_classes=num_classes,
        in_channels=in_channels,
        size_divisor=int(net.encoder.output_stride) if net.requires_divisible_input_shape else 1,
        # PAN pools its deepest features three times by 2.
        min_size_px=8 * int(net.encoder.output_stride) if name == "PAN" else 1,
        usual_size_px=_usual_size(net.encoder, options),
    )


def smp_architectures() -> dict[str, type[Any]]:
    import segmentation_models_pytorch as smp

    return {cls.__name__: cls for cls in smp.MODEL_ARCHITECTURES_MAPPING.values()}


def _check_encoder(encoder: str) -> None:
    import timm
    from segmentation_models_pytorch.encoders import encoders, is_equivalent_to_timm_universal

    if encoder.startswith("tu-"):
        if not timm.is_model(encoder.removeprefix("tu-")):
            known = [f"tu-{name}" for name in timm.list_models()]
            raise unknown_name("model.encoder", encoder, "a model of timm", known)
    elif encoder not in encoders and not is_equivalent_to_timm_universal(encoder):
        what = "an encoder of smp (encoders of timm begin with tu-)"
        raise unknown_name("model.encoder", encoder, what, encoders)


def _arguments(name: str, encoder: str, options: Mapping[str, Any], accepted: list[str]) -> dict[str, Any]:
    # smp's PSPNet passes `output_stride` to its encoder; DeepLabV3 has the option under the longer name.
    renamed = {"encoder_output_stride": "output_stride"} if name == "PSPNet" else {}
    own = timm_options(encoder) - {*_RESERVED} if encoder.startswith("tu-") else set()
    check_options(options, [*accepted, *renamed, *own], f"smp {name} with encoder {encoder}")
    return {renamed.get(option, option): value for option, value in options.items()}


def _construct(architecture: Any, name: str, encoder: str, num_classes: int, arguments: dict[str, Any]) -> Any:
    """Return the network as smp builds it; a DPT for images of any size if its transformer supports that."""
    build: Any = partial(architecture, encoder_name=encoder, encoder_weights=None, classes=num_classes, **arguments)
    if name == "DPT" and not {"dynamic_img_size", "img_size"} & arguments.keys():
        with contextlib.suppress(Exception):
            return build(dynamic_img_size=True)
    try:
        return build()
    except Exception as error:  # smp and timm raise exceptions of any type for wrong arguments
        given = f" and options {arguments}" if arguments else ""
        raise ConfigError(
            f"model.encoder: smp {name} cannot be built with {encoder}{given}: {shown_error(error)}; change the "
            "encoder or the options",
            key="model.encoder",
        ) from error


def _head_without_upsampling(head: nn.Module) -> nn.Module:
    """Return the part of smp's head that computes logits, with smp's names."""
    if hasattr(head, "head"):  # DPT
        return nn.Sequential(OrderedDict(head=head.get_submodule("head")))
    assert isinstance(head, nn.Sequential), type(head)
    return nn.Sequential(head[0])


def _usual_size(encoder: nn.Module, options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (H, W) in pixels for which a timm model was made; None for smp's own encoders."""
    config: dict[str, Any] | None = getattr(getattr(encoder, "model", None), "pretrained_cfg", None)
    size = options.get("img_size", config["input_size"][1:] if config else None)
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
