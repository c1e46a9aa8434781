import copy

import pytest
import torch
import torchvision
from torch.nn.functional import interpolate

from segapp.errors import ConfigError
from segapp.models import build_model
from segapp.models.from_torchvision import build_torchvision, torchvision_backbones, torchvision_names

REGISTERED = torchvision.models.list_models(module=torchvision.models.segmentation)
SMALL = {"encoder": "mobilenet_v3_small"}


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network was built with a download")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)


def original_of(name, model):
    kwargs = {} if name.startswith("lraspp") else {"aux_loss": True}
    with torch.device("meta"):  # without values, which are those of the model
        original = torchvision.models.get_model(
            name, weights=None, weights_backbone=None, num_classes=model.num_classes, **kwargs
        )
    original.load_state_dict(copy.deepcopy(model.state_dict()), strict=True, assign=True)
    return original


def assert_upsampled(logits, images, expected):
    found = interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "101" in name or name == "deeplabv3_resnet50" else ())
        for name in REGISTERED
    ],
)
@torch.no_grad()
@pytest.mark.usefixtures("_uninspected")
def test_upsampled_logits_match_torchvision_with_equal_weights(name):
    torch.manual_seed(0)
    model = build_model("torchvision", name, 5)
    original, images = original_of(name, model), torch.randn(2, 3, 40, 56)
    outputs = []
    for network in (model, original):  # training mode draws dropout masks
        torch.manual_seed(1)
        outputs.append(network(images))
    logits, expected = outputs
    assert len(logits) == len(expected) == 1 + (model.aux_classifier is not None)
    for ours, theirs in zip(logits, (expected["out"], expected.get("aux")), strict=False):
        assert_upsampled(ours, images, theirs)
    odd = torch.randn(1, 3, 37, 53)
    (logits,) = model.eval()(odd)
    assert_upsampled(logits, odd, original.eval()(odd)["out"])


@pytest.fixture(scope="module", params=["fcn", "deeplabv3", "lraspp"])
def small(request):
    return build_model("torchvision", request.param, 4, **SMALL)


def test_every_family_gives_every_parameter_a_gradient(small):
    assert small.min_train_batch == 1 + (small.name == "deeplabv3")
    outputs = small(torch.randn(small.min_train_batch, 3, 48, 32))
    assert len(outputs) == 1 + (small.name != "lraspp")
    sum(logits.square().sum() for logits in outputs).backward()
    assert all(p.requires_grad and p.grad is not None for p in small.parameters())
    assert outputs[0].shape[1:] == (4, 48 // small.logits_stride, 32 // small.logits_stride)
    if small.min_train_batch > 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            small(torch.randn(1, 3, 48, 32))


@torch.no_grad()
def test_last_layer_turns_the_features_into_the_logits(small):
    images = torch.randn(2, 3, 64, 96)
    (logits,), features = small.eval().compute_with_features(images)
    assert logits.equal(small(images)[0])
    if small.name == "lraspp":  # whose head has no such layer: the deepest map
        assert features.equal(small.backbone(images)["high"])
        assert features.shape == (2, 576, 4, 6)
    else:
        assert logits.equal(small.get_submodule("classifier.4")(features))
    assert len(small.train().compute_with_features(images)[0]) == 1 + (small.name != "lraspp")


@pytest.mark.usefixtures("_uninspected")
def test_one_pixel_is_an_image():
    model = build_model("torchvision", "fcn", 150, aux=False, **SMALL)
    assert model.min_size_px == 1
    assert [tuple(logits.shape) for logits in model(torch.zeros(2, 3, 32, 32))] == [(2, 150, 2, 2)]
    assert [tuple(logits.shape) for logits in model.eval()(torch.zeros(1, 3, 1, 1))] == [(1, 150, 1, 1)]


def test_zero_classes_are_refused():
    with pytest.raises(ValueError, match="at least one class"):
        build_model("torchvision", "fcn", 0, **SMALL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "encoder", "options", "stride"),
    [
        ("fcn", "resnet50", {"output_stride": 16}, 16),
        ("fcn", "mobilenet_v3_small", {"output_stride": 32}, 32),
        ("deeplabv3", "mobilenet_v3_small", {"atrous_rates": [2, 4]}, 16),
        ("lraspp", "mobilenet_v3_small", {"width_mult": 0.5, "reduced_tail": True, "inter_channels": 32}, 8),
    ],
)
def test_options_reach_backbone_and_head(name, encoder, options, stride):
    with torch.device("meta"):  # sizes only
        plain = build_torchvision(name, 3, True, encoder, {}, 3)
        model = build_model("torchvision", name, 3, encoder=encoder, options=options)
    assert model.logits_stride == stride
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, plain)]
    assert (sizes[0] < sizes[1]) == (set(options) != {"output_stride"})
    if "reduced_tail" in options:
        with torch.device("meta"):
            features = torchvision.models.mobilenet_v3_small(width_mult=0.5, reduced_tail=True).features
        assert [p.shape for p in model.backbone.parameters()] == [p.shape for p in features.parameters()]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("deeplabv3_resnet5", {}, r"model\.name: 'deeplabv3_resnet5' is not .*: did you mean deeplabv3_resnet50"),
        ("Unet", {}, r"model\.name: 'Unet' is not"),
        ("fcn", {}, r"model\.encoder: fcn needs a backbone: set one of mobilenet_v3_large"),
        ("fcn", {"encoder": "resnet60"}, r"model\.encoder: 'resnet60' is not .*did you mean .*resnet50"),
        ("fcn_resnet50", {"encoder": "resnet18"}, r"model\.encoder: fcn_resnet50 already names its backbone"),
        ("fcn", {**SMALL, "options": {"width_mul": 2}}, r"model\.options: 'width_mul' .*did you mean width_mult"),
        ("fcn", {"encoder": "resnet18", "options": {"output_stride": 8}}, r"output_stride=8; resnet18 takes 32"),
        ("fcn", {"encoder": "resnet50", "options": {"output_stride": 4}}, r"=4; resnet50 takes 8, 16 or 32"),
        ("fcn", {**SMALL, "options": {"output_stride": 8}}, r"output_stride=8; mobilenet_v3_small takes 16 or 32"),
        ("fcn", {"encoder": "resnet50", "options": {"output_stride": [8]}}, r"model\.options"),
        ("deeplabv3", {**SMALL, "options": {"atrous_rates": "x"}}, r"model\.options: .*atrous_rates"),
    ],
)  # fmt: skip
def test_unknown_name_is_refused_with_the_nearest(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        build_model("torchvision", name, 3, **kwargs)


def test_unknown_library_is_refused():
    with pytest.raises(ConfigError, match=r"model\.library: 'torchvison' is not .*did you mean torchvision"):
        build_model("torchvison", "fcn", 3)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", torchvision_backbones())
@pytest.mark.parametrize("family", ["fcn", "lraspp"])
def test_every_known_backbone_builds_into_a_family(family, encoder):
    with torch.device("meta"):  # the largest take seconds to initialise
        model = build_model("torchvision", family, 3, encoder=encoder)
        assert len(model(torch.zeros(2, 3, 64, 64))) == 1 + (model.aux_classifier is not None)


def test_every_registered_model_and_listed_backbone_is_known():
    assert set(REGISTERED) <= set(torchvision_names())
    assert {"resnet18", "resnet152", "wide_resnet50_2", "mobilenet_v3_small"} <= set(torchvision_backbones())


def test_initialisation_depends_only_on_the_global_generator():
    def built(seed, build, *arguments, **options):
        torch.manual_seed(seed)
        model = build(*arguments, **options)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.get_rng_state()

    first, state = built(5, build_model, "torchvision", "fcn", 6, **SMALL)  # built by no other test
    other, (without, state_without) = (
        built(seed, build_torchvision, "fcn", 6, True, SMALL["encoder"], {}, 3) for seed in (1, 5)
    )
    assert first.equal(without)
    assert not first.equal(other[0])
    assert state.equal(state_without), "looking at the network drew random numbers"
