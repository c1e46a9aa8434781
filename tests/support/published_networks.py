"""Networks of published memory figures that no library here has in the published form, from torch's and timm's modules.

The form is that of mmsegmentation's configs: a ResNet whose stem is one 7x7 convolution or three of 3x3 (ResNetV1c),
dilated to stride 8 for all heads but UPerNet's, a head of 512 channels (ResNet-18: 128), and an auxiliary FCN head on
the third stage. In training a network returns both heads' logits, at the resolution of the head.

Shapes: N images, C channels or classes, H x W pixels.
"""

from itertools import pairwise

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOL_SCALES = (1, 2, 3, 6)
DILATIONS = (1, 12, 24, 36)


def conv(inputs: int, outputs: int, kernel: int = 1, *, dilation: int = 1, groups: int = 1, inplace: bool = True):
    """Convolution, BatchNorm, ReLU."""
    padding = kernel // 2 * dilation
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=inplace),
    )


def separable(inputs: int, outputs: int, dilation: int = 1):
    """A 3x3 convolution of each channel and a 1x1 convolution of all, each with BatchNorm and ReLU."""
    return nn.Sequential(conv(inputs, inputs, 3, dilation=dilation, groups=inputs), conv(inputs, outputs))


def resized(features: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(features, like.shape[-2:], mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """Averages over grids of four sizes beside the features, joined by a 3x3 convolution (PSPNet)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(n), conv(inputs, width)) for n in POOL_SCALES)
        self.bottleneck = conv(inputs + len(POOL_SCALES) * width, width, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.bottleneck(torch.cat([features, *(resized(pool(features), features) for pool in self.pools)], 1))


class Fcn(nn.Module):
    """3x3 convolutions; with `joined`, one more over their result and the features."""

    def __init__(self, inputs: int, width: int, num_convs: int, *, joined: bool) -> None:
        super().__init__()
        widths = [inputs, *[width] * num_convs]
        self.convs = nn.Sequential(*(conv(a, b, 3) for a, b in pairwise(widths)))
        self.last = conv(inputs + width, width, 3) if joined else None

    def forward(self, features: Tensor) -> Tensor:
        found = self.convs(features)
        return found if self.last is None else self.last(torch.cat([features, found], 1))


class Aspp(nn.Module):
    """Convolutions of four dilations and the image's mean (DeepLabV3); `separable` in DeepLabV3+."""

    def __init__(self, inputs: int, width: int, *, is_separable: bool) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(inputs, width))
        self.branches = nn.ModuleList(
            conv(inputs, width)
            if rate == 1
            else separable(inputs, width, rate)
            if is_separable
            else conv(inputs, width, 3, dilation=rate)
            for rate in DILATIONS
        )
        total = (1 + len(DILATIONS)) * width
        self.bottleneck = separable(total, width) if is_separable else conv(total, width, 3)

    def forward(self, features: Tensor) -> Tensor:
        found = [resized(self.image(features), features), *(branch(features) for branch in self.branches)]
        return self.bottleneck(torch.cat(found, 1))


class Head(nn.Module):
    """A head on the last stage."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, stages: list[Tensor]) -> Tensor:
        return self.body(stages[-1])


class DeepLabV3Plus(nn.Module):
    """Separable ASPP, joined with the first stage at its resolution."""

    def __init__(self, widths: list[int], width: int, first_width: int) -> None:
        super().__init__()
        self.aspp = Aspp(widths[-1], width, is_separable=True)
        self.first = conv(widths[0], first_width)
        self.last = nn.Sequential(separable(width + first_width, width), separable(width, width))

    def forward(self, stages: list[Tensor]) -> Tensor:
        found, first = self.aspp(stages[-1]), self.first(stages[0])
        return self.last(torch.cat([resized(found, first), first], 1))


class UperNet(nn.Module):
    """A pyramid of averages on the last stage, and a feature pyramid over all stages."""

    def __init__(self, widths: list[int], width: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(widths[-1], width)
        self.lateral = nn.ModuleList(conv(inputs, width, inplace=False) for inputs in widths[:-1])
        self.smooth = nn.ModuleList(conv(width, width, 3, inplace=False) for _ in widths[:-1])
        self.last = conv(len(widths) * width, width, 3)

    def forward(self, stages: list[Tensor]) -> Tensor:
        maps = [lateral(stage) for lateral, stage in zip(self.lateral, stages[:-1], strict=True)]
        maps.append(self.pyramid(stages[-1]))
        for level in range(len(maps) - 1, 0, -1):
            maps[level - 1] = maps[level - 1] + resized(maps[level], maps[level - 1])
        found = [smooth(each) for smooth, each in zip(self.smooth, maps[:-1], strict=True)]
        return self.last(torch.cat([found[0], *(resized(each, found[0]) for each in (*found[1:], maps[-1]))], 1))


def build_head(name: str, widths: list[int], width: int) -> nn.Module:
    if name == "psp":
        return Head(Pyramid(widths[-1], width))
    if name == "fcn":
        return Head(Fcn(widths[-1], width, 2, joined=True))
    if name == "deeplabv3":
        return Head(Aspp(widths[-1], width, is_separable=False))
    if name == "deeplabv3plus":
        return DeepLabV3Plus(widths, width, 48 if widths[-1] > 512 else 12)
    return UperNet(widths, width)


class Published(nn.Module):
    """A ResNet with a head, and an auxiliary head in training."""

    size_divisor = 1

    def __init__(self, num_classes: int, head: str, depth: int, *, has_deep_stem: bool) -> None:
        super().__init__()
        stem = {"stem_width": 32, "stem_type": "deep"} if has_deep_stem else {}
        stride = 32 if head == "uper" else 8
        self.backbone = timm.create_model(
            f"resnet{depth}", features_only=True, out_indices=(1, 2, 3, 4), output_stride=stride, **stem
        )
        widths = self.backbone.feature_info.channels()
        width = 512 if depth > 34 else 128
        self.head = build_head(head, widths, width)
        self.classes = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, num_classes, 1))
        self.aux = Fcn(widths[2], width // 2, 1, joined=False)
        self.aux_classes = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width // 2, num_classes, 1))

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return (N, C, h, w) logits, in training with the auxiliary ones."""
        stages = self.backbone(images)
        logits = self.classes(self.head(stages))
        return (logits, self.aux_classes(self.aux(stages[2]))) if self.training else logits
