"""torchvision's segmentation families: FCN, DeepLabV3 and LR-ASPP on ResNets and MobileNetV3.

The networks are built from torchvision's backbones and heads, because its builders support few combinations, download
weights, and upsample to the input size.

Shapes: N images, C classes, K feature channels, H x W of the input in pixels, h x w of the logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from segapp.compat.models import feature_maps_of, strided_blocks
from segapp.errors import ConfigError
from segapp.models.names import check_options, unknown_name
from segapp.models.network import SegmentationModel
from segapp.models.surgery import widen_first_conv

FAMILIES = ("deeplabv3", "fcn", "lraspp")

_RESNET_OPTIONS = ("output_stride", "zero_init_residual", "groups", "width_per_group")
_MOBILENET_OPTIONS = ("output_stride", "width_mult", "reduced_tail")
_HEAD_OPTIONS = {"deeplabv3": ("atrous_rates",), "fcn": (), "lraspp": ("inter_channels",)}


class TorchvisionModel(SegmentationModel):
    """A torchvision network without its final interpolation; tensor names are torchvision's."""

    def __init__(self, backbone: nn.Module, classifier: nn.Module, aux: nn.Module | None, **about: Any) -> None:
        super().__init__(library="torchvision", backbone_name="backbone", **about)
        self.backbone = backbone
        self.classifier = classifier
        self.aux_classifier = aux

    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the logits, and the input (N, K, h, w) of the classifier's last layer; for LR-ASPP the deepest map."""
        maps = self.backbone(images_NCHW)
        if "low" in maps:
            return self._with_aux(self.classifier(maps), maps), maps["high"]
        *layers, last = self.classifier.children()
        features = maps["out"]
        for layer in layers:
            features = layer(features)
        return self._with_aux(last(features), maps), features

    def _with_aux(self, logits: Tensor, maps: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if self.aux_classifier is None or not self.training:
            return (logits,)
        return logits, self.aux_classifier(maps["aux"])


def torchvision_names() -> tuple[str, ...]:
    """Return all names that `build_torchvision` accepts: torchvision's own, then the bare families."""
    from torchvision.models import list_models, segmentation

    return (*list_models(module=segmentation), *FAMILIES)


def build_torchvision(
    name: str,
    num_classes: int,
    aux: bool,
    encoder: str | None,
    options: Mapping[str, Any],
    in_channels: int,
) -> TorchvisionModel:
    """Return a network with random weights; see `build_model`.

    The name is a torchvision name, such as `deeplabv3_resnet50`, or a family (`fcn`, `deeplabv3`, `lraspp`) whose
    backbone is then given by `encoder`: any ResNet or MobileNetV3. The auxiliary FCN head is on an earlier stage;
    LR-ASPP has none. The options are the backbone's `output_stride` (8, 16 or 32), and other arguments of backbone and
    head.

    Raises:
        ConfigError: an unknown name or option, or a combination that cannot be built.
    """
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead
    from torchvision.models.segmentation.fcn import FCNHead
    from torchvision.models.segmentation.lraspp import LRASPPHead

    family, backbone_name = split_name(name, encoder)
    own = _HEAD_OPTIONS[family]
    accepted = (*own, *(_RESNET_OPTIONS if not backbone_name.startswith("mobilenet") else _MOBILENET_OPTIONS))
    check_options(options, accepted, f"torchvision {family} with backbone {backbone_name}")
    head_options = {option: value for option, value in options.items() if option in own}
    backbone_options = {option: value for option, value in options.items() if option not in own}
    aux = aux and family != "lraspp"
    try:
        backbone, channels = _build_backbone(backbone_name, family, aux, backbone_options)
        widen_first_conv(backbone, in_channels)
        classifier: nn.Module
        if family == "lraspp":
            inter_channels = head_options.get("inter_channels", 128)
            classifier = LRASPPHead(channels["low"], channels["out"], num_classes, inter_channels)
        elif family == "deeplabv3":
            classifier = DeepLabHead(channels["out"], num_classes, **head_options)
        else:
            classifier = FCNHead(channels["out"], num_classes)
        aux_classifier = FCNHead(channels["aux"], num_classes) if aux else None
    except (TypeError, ValueError, RuntimeError) as error:  # raised by torch's layers for an invalid option
        raise ConfigError(
            f"model.options: {dict(options)} cannot be built into {family}: {error}", key="model.options"
        ) from error
    return TorchvisionModel(
        backbone,
        classifier,
        aux_classifier,
        name=name,
        encoder_name=backbone_name,
        num_classes=num_classes,
        in_channels=in_channels,
    )


def torchvision_backbones() -> list[str]:
    from torchvision.models import get_model_builder, list_models

    modules = ("torchvision.models.resnet", "torchvision.models.mobilenetv3")
    return [name for name in list_models() if get_model_builder(name).__module__ in modules]


def split_name(name: str, encoder: str | None) -> tuple[str, str]:
    """Return family and backbone of a model's name."""
    family, _, backbone_name = name.partition("_")
    if name not in torchvision_names() and (family not in FAMILIES or backbone_name not in torchvision_backbones()):
        raise unknown_name("model.name", name, "a model of torchvision", torchvision_names())
    if not backbone_name and encoder is None:
        raise ConfigError(
            f"model.encoder: {name} needs a backbone: set one of {', '.join(torchvision_backbones())}, or a whole name "
            f"such as {name}_mobilenet_v3_large",
            key="model.encoder",
        )
    if backbone_name and encoder not in (None, backbone_name):
        raise ConfigError(
            f"model.encoder: {name} already names its backbone: remove {encoder!r}, or set name: {family}",
            key="model.encoder",
        )
    backbone_name = backbone_name or str(encoder)
    if backbone_name not in torchvision_backbones():
        raise unknown_name("model.encoder", backbone_name, "a backbone of torchvision here", torchvision_backbones())
    return family, backbone_name


def _build_backbone(name: str, family: str, aux: bool, options: Mapping[str, Any]) -> tuple[nn.Module, dict[str, int]]:
    """Return a backbone that computes a dict of feature maps, and their numbers of channels."""
    net, layers, channels = (_mobilenet if name.startswith("mobilenet") else _resnet)(name, options)
    # LR-ASPP's head expects its deep features under "high".
    wanted = ("low", "out") if family == "lraspp" else ("aux", "out") if aux else ("out",)
    spelled = {"out": "high"} if family == "lraspp" else {}
    return feature_maps_of(net, {layers[key]: spelled.get(key, key) for key in wanted}), channels


def _take_stride(options: Mapping[str, Any], name: str, accepted: Sequence[int], words: str) -> tuple[int, Any]:
    """Return the option `output_stride`, by default the first accepted one, and the other options."""
    stride = options.get("output_stride", accepted[0])
    if stride not in accepted:
        raise ConfigError(f"model.options: output_stride={stride!r}; {name} takes {words}", key="model.options")
    return stride, {option: value for option, value in options.items() if option != "output_stride"}


def _resnet(name: str, options: Mapping[str, Any]) -> tuple[nn.Module, dict[str, str], dict[str, int]]:
    """Return a ResNet; its last two stages are dilated to stride 8 if its blocks support it, as in torchvision."""
    from torchvision.models import get_model

    if name in ("resnet18", "resnet34"):
        stride, rest = _take_stride(options, name, (32,), "32: its blocks cannot be dilated")
    else:
        stride, rest = _take_stride(options, name, (8, 16, 32), "8, 16 or 32")
    net = get_model(name, weights=None, replace_stride_with_dilation=[False, stride < 16, stride < 32], **rest)
    num_out = net.fc.in_features
    channels = {"low": num_out // 4, "aux": num_out // 2, "out": num_out}
    return net, {"low": "layer2", "aux": "layer3", "out": "layer4"}, channels


def _mobilenet(name: str, options: Mapping[str, Any]) -> tuple[nn.Module, dict[str, str], dict[str, int]]:
    """Return a MobileNetV3; its last stage is dilated to stride 16, as in torchvision."""
    from torchvision.models import get_model

    stride, rest = _take_stride(options, name, (16, 32), "16 or 32")
    net = get_model(name, weights=None, dilated=stride == 16, **rest).features
    # The first blocks of the stages: C2, at stride 8, is the fourth from the end of [first, stages..., last].
    stages = [0, *strided_blocks(net), len(net) - 1]
    low, out = stages[-4], stages[-1]
    channels = {"low": net[low].out_channels, "aux": net[low].out_channels, "out": net[out].out_channels}
    return net, {"low": str(low), "aux": str(low), "out": str(out)}, channels
