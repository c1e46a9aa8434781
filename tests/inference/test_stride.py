"""A logit lies where the stride puts it: more pixels at the right and at the bottom change no label far from them.

Networks that use statistics of the whole image (GroupNorm in smp's FPN, attention, positions of a ViT) or corners
(`align_corners`) are not in the table, because more pixels change these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.preprocessing import Preprocessing
from segapp.export.write import ExportNetwork
from segapp.inference.sliding import Inference
from segapp.models import SegmentationModel, build_model
from tests.models.test_model_table import RUNNING, TABLE, built

NETWORKS: dict[str, tuple[str, str, str, dict[str, Any], int, int]] = {  # strides of the logits and of the coarsest map
    "lraspp": ("torchvision", "lraspp", "mobilenet_v3_small", {}, 8, 16),
    "fcn": ("torchvision", "fcn", "mobilenet_v3_small", {"output_stride": 32}, 32, 32),
    "unet": ("smp", "Unet", "tu-test_resnet", {}, 1, 32),
    "same padding": (
        *("smp", "Unet", "tu-tf_efficientnet_lite0"),
        *({"encoder_depth": 3, "decoder_channels": [8, 8, 4]}, 1, 32),
    ),
    "segformer": ("smp", "Segformer", "tu-test_convnext", {}, 4, 32),
    "pspnet": ("smp", "PSPNet", "tu-test_resnet", {}, 8, 8),
    "upernet": ("smp", "UPerNet", "tu-test_resnet", {}, 4, 32),
    "unet++": ("smp", "UnetPlusPlus", "tu-test_resnet", {}, 1, 32),
    "linknet": ("smp", "Linknet", "tu-test_resnet", {}, 1, 32),
}
SIZE, MARGIN = (161, 209), 96
PREPROCESSING = Preprocessing(PixelFormat(mean=(0.4, 0.6, 34 / 255), std=(0.3, 0.2, 0.25)))


def without_global_context(model: SegmentationModel) -> SegmentationModel:
    """Zeroes what is pooled over the whole image, which more pixels rightly change."""
    for module in model.modules():
        if isinstance(module, nn.AdaptiveAvgPool2d):
            module.register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output))
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def of_inference(model: SegmentationModel, images: Tensor) -> Tensor:
    inference = Inference(PREPROCESSING, align_corners=False)
    return inference.probabilities(*inference.views(model, images)).log()


def of_export(model: SegmentationModel, images: Tensor) -> Tensor:
    found: Tensor = ExportNetwork(model, PREPROCESSING, align_corners=False)(images.permute(0, 2, 3, 1))
    return found


@pytest.mark.parametrize(
    ("key", "logits_of"),
    [
        *((key, of_inference) for key in ("lraspp", "fcn", "same padding", "segformer", "pspnet")),
        ("lraspp", of_export),
        pytest.param("same padding", of_export, marks=pytest.mark.slow),
        *(pytest.param(key, of_inference, marks=pytest.mark.slow) for key in ("unet", "upernet", "unet++", "linknet")),
    ],
)
@torch.no_grad()
def test_more_pixels_change_no_label_far_from_them(key: str, logits_of: Callable[..., Tensor]) -> None:
    library, name, encoder, options, stride, coarsest = NETWORKS[key]
    torch.manual_seed(5)
    model = without_global_context(build_model(library, name, 5, encoder=encoder, options=options))
    assert (model.logits_stride, model.coarsest_stride) == (stride, coarsest)
    largest = SIZE[0] + coarsest, SIZE[1] + coarsest
    smooth = F.interpolate(torch.rand(1, 3, 8, 9) * 220, largest, mode="bicubic")
    images = (smooth + torch.randint(0, 30, smooth.shape)).clamp(0, 255).byte()

    def seen(more_px: int) -> Tensor:
        shown = images[..., : SIZE[0] + more_px, : SIZE[1] + more_px]
        return logits_of(model, shown)[0, :, : SIZE[0] - MARGIN, : SIZE[1] - MARGIN]

    found = seen(0)
    mean = found.mean((1, 2), keepdim=True)  # of a random network, one class would win everywhere
    best = (found - mean).topk(2, 0)
    is_decided = best.values[0] - best.values[1] > 1e-3
    assert len(best.indices[0][is_decided].unique()) > 3
    for more_px in (1, 3, coarsest // 2, coarsest - 1, coarsest):
        labels = (seen(more_px) - mean).argmax(0)
        assert int((labels != best.indices[0])[is_decided].sum()) == 0, more_px


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in RUNNING if "*" not in TABLE[pair]], ids="/".join)
@torch.no_grad()
def test_pixels_of_the_mean_color_are_worth_as_much_as_none(pair: tuple[str, str, str]) -> None:
    """Unlike labels far from more pixels, this holds whatever a network looks at: attention, a dilation of 288 px."""
    torch.manual_seed(5)
    model = without_global_context(built(*pair))
    height, width = model.suitable_size(353, 417)
    images = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)
    for less_px in (1, 3, model.size_multiple - 1):
        shown = images[..., : height - less_px, : width - less_px]
        colored = torch.tensor([102, 153, 34], dtype=torch.uint8).view(3, 1, 1).expand(1, 3, height, width).clone()
        colored[..., : height - less_px, : width - less_px] = shown
        found, expected = (
            of_inference(model, each)[..., : height - less_px, : width - less_px] for each in (shown, colored)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # this color is exactly 0
