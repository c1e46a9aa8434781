"""Every class of encoder takes its own tensors and those of its published file, paired as its library pairs them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torchvision
from segmentation_models_pytorch.encoders import encoders, get_encoder
from timm.models import _builder
from torch import nn

from segapp.models import SegmentationModel
from segapp.models.from_smp import SmpModel
from segapp.models.from_torchvision import build_torchvision
from segapp.models.weights import load_weights

SMP = (  # the first, the fourth and so on are in the default suite
    *("resnet18", "dpn68", "vgg11", "densenet121", "se_resnet50", "inceptionv4", "mobilenet_v2", "inceptionresnetv2"),
    *("efficientnet-b0", "mobileone_s0", "xception", "timm-efficientnet-b0", "timm-skresnet18"),
    *("timm-tf_efficientnet_lite0", "timm-gernet_s", "mit_b0", "timm-mobilenetv3_small_minimal_100"),
)
TIMM = ("resnet18", "convnext_atto", "repvgg_a0", "tf_efficientnet_lite0", "mobilevitv2_050", "hiera_tiny_224")
SLOW_TIMM = (
    *("dla34", "hrnet_w18_small", "coat_lite_tiny", "densenet121", "halonet26t"),
    *("mobilenetv3_small_050", "fastvit_t8", "efficientvit_b0", "pvt_v2_b0", "edgenext_xx_small", "poolformer_s12"),
    *("ghostnet_050", "efficientformerv2_s0", "lcnet_035", "cspresnet50", "darknet17", "dpn48b", "rdnet_tiny"),
    *("starnet_s1",),
    *("swinv2_cr_tiny_ns_224", "mobilevit_xxs", "coatnet_pico_rw_224", "gcvit_xxtiny", "focalnet_tiny_srf", "vgg11"),
    *("nasnetalarge", "mobilenetv5_base", "nextvit_small", "tiny_vit_5m_224", "rexnet_100", "vovnet39a", "xception41"),
    *("fasternet_t0", "botnet26t_256", "selecsls42b", "skresnet18", "res2net50_26w_4s", "resnest14d", "repvit_m0_9"),
    *("mambaout_femto", "inception_next_atto", "inception_v4", "mixnet_s", "hgnet_tiny", "convformer_s18"),
    *("swin_tiny_patch4_window7_224", "tresnet_m", "maxvit_pico_rw_256", "davit_tiny", "twins_svt_small"),
    *("mobileone_s0", "regnety_002"),
)
CLASSIFIER = dict.fromkeys(("fc.bias", "_fc.bias", "last_linear.bias", "classifier.1.bias", "head.fc.bias"), (7,))


def timm_encoder(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, dict[str, str]]:
    """Return a timm encoder of smp, and the name in the published file of each tensor.

    timm loads the file into the model before it makes an extractor of features from the model's tensors.
    """
    seen: list[nn.Module] = []
    monkeypatch.setattr(_builder, "load_pretrained", lambda model, *_, **__: seen.append(model))
    with torch.device("meta"):
        encoder = get_encoder(f"tu-{name}", weights=True)
    published = {id(tensor): name for name, tensor in seen[-1].state_dict(keep_vars=True).items()}
    return encoder, {name: published[id(t)] for name, t in encoder.state_dict(keep_vars=True).items()}


def smp_encoder(name: str) -> tuple[nn.Module, dict[str, str]]:
    """Return an encoder of smp's own, and the name in the published file of each tensor."""
    with torch.device("cpu" if name.startswith("mit") else "meta"):
        encoder = get_encoder(name, weights=None)
    names = {own: own.removeprefix("model.") if name.startswith("timm-") else own for own in encoder.state_dict()}
    if name.startswith("densenet"):  # of torch 0.3: norm.1 for norm1, in the layers of the dense blocks only
        names = {own: re.sub(r"(layer\d+\.[a-z]+)(\d)", r"\1.\2", published) for own, published in names.items()}
        assert names["features.denseblock3.denselayer2.norm1.bias"] == "features.denseblock3.denselayer2.norm.1.bias"
        assert names["features.norm0.weight"] == "features.norm0.weight"
    return encoder, names


def network_around(encoder: nn.Module, name: str) -> SegmentationModel:
    about: dict[str, Any] = {"name": "Unet", "encoder_name": name, "num_classes": 5, "in_channels": 3}
    return SmpModel(encoder, nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Conv2d(3, 5, 1)), **about)


def assert_every_tensor_arrives(model: SegmentationModel, names: dict[str, str]) -> None:
    """Load a file in which each tensor has its own number, under the published and under the network's own names.

    A tensor that the network uses under several names is in the file once.
    """
    own = model.backbone_module.to_empty(device="cpu").state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("encoder.")}
    first = {there: name for name, there in reversed(names.items())}
    for spelled in (names, {name: first[there] for name, there in names.items()}):
        numbers = {name: torch.tensor(float(i)) for i, name in enumerate(dict.fromkeys(spelled.values()), start=1)}
        file = {there: numbers[there].expand(own[name].shape) for name, there in spelled.items()}
        others = {name: torch.ones(shape) for name, shape in CLASSIFIER.items()}
        load_weights(model, others | file, "a.pt", "model.weights_backbone")
        report = model.load_reports[-1]
        assert report.keys.missing == {}
        assert set(report.keys.left_out) == set(others) - set(file)
        assert [name for name, value in own.items() if not value.eq(numbers[spelled[name]]).all()] == []
    assert all(value.equal(model.state_dict()[name]) for name, value in before.items())


def test_small_encoders_are_of_every_class_of_smp() -> None:
    known = {name: each["encoder"] for name, each in encoders.items()}
    assert {known[name] for name in SMP if name in known} == set(known.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [*SMP, *(pytest.param(name, marks=pytest.mark.slow) for name in encoders if name not in SMP)]
)
def test_encoder_of_smp_takes_own_and_published_names(name: str) -> None:
    encoder, names = smp_encoder(name)
    assert_every_tensor_arrives(network_around(encoder, name), names)


@pytest.mark.parametrize("name", [*TIMM, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TIMM)])
def test_encoder_of_timm_takes_own_and_published_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, names = timm_encoder(name, monkeypatch)
    assert_every_tensor_arrives(network_around(encoder, f"tu-{name}"), names)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "mobilenet_v3_small", "mobilenet_v3_large"])
def test_backbone_of_torchvision_takes_own_and_published_names(name: str) -> None:
    with torch.device("meta"):
        model = build_torchvision("fcn", 5, False, name, {}, 3)
        published = torchvision.models.get_model(name, weights=None).state_dict()
    own = list(model.backbone_module.state_dict())
    names = {n: f"features.{n}" if name.startswith("mobile") else n for n in own}
    assert set(names.values()) <= set(published)
    assert_every_tensor_arrives(network_around(model.backbone_module, name), names)
