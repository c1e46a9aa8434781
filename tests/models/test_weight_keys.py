"""Weights of other libraries, from their real models: every tensor is mapped, and outputs are equal."""

from __future__ import annotations

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from segapp.errors import CheckpointError
from segapp.models import build_model
from segapp.models.keys import map_keys

IMAGES = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_look_at_the_network(monkeypatch):
    """Skip the inspection; these networks have no unused parts."""
    monkeypatch.setattr("segapp.models.by_name.inspect_model", lambda model: None)


def lively(network: nn.Module) -> nn.Module:
    """Set BatchNorm statistics to other values than those of a new network."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for name, buffer in network.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.8, 1.2)
    return network.eval()


@pytest.fixture(scope="module")
def fcn() -> nn.Module:
    torch.manual_seed(1)
    return lively(
        torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=5, aux_loss=True)
    )


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    torch.manual_seed(2)
    return lively(torchvision.models.resnet18(weights=None))


def loaded(library, name, state, tmp_path, num_classes=5, key="weights", **kwargs):
    torch.save(state, tmp_path / "file.pth")
    model = build_model(library, name, num_classes, **{key: str(tmp_path / "file.pth")}, **kwargs)
    return model.eval(), model.load_reports[0].keys


@torch.no_grad()
def assert_same_features(backbone: nn.Module, original: nn.Module) -> None:
    """Check that the backbone's last feature map is that of the original classification network."""
    found = backbone(IMAGES)
    last = found[-1] if isinstance(found, (list, tuple)) else list(found.values())[-1]
    nodes = {"layer4": "last"}
    extract = torchvision.models.feature_extraction.create_feature_extractor(original, return_nodes=nodes)
    torch.testing.assert_close(last, extract(IMAGES)["last"])


# Whole networks


@torch.no_grad()
def test_fcn_outputs_equal_those_of_torchvision(tmp_path, fcn):
    wanted = fcn(IMAGES)["out"]
    own = fcn.state_dict()
    model, keys = loaded("torchvision", "fcn_resnet50", {"meta": {"epoch": 3}, "state_dict": own}, tmp_path)
    assert keys.convention == "the same names"
    assert keys.missing == keys.left_out == {}
    assert all(value.equal(own[name]) for name, value in model.state_dict().items())
    found = nn.functional.interpolate(model(IMAGES)[0], (64, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(found, wanted)


def test_differing_classes_and_auxiliary_head_are_reported(tmp_path, fcn):
    _, keys = loaded("torchvision", "fcn_resnet50", fcn.state_dict(), tmp_path, num_classes=3, aux=False)
    assert keys.missing == dict.fromkeys(["classifier.4.weight", "classifier.4.bias"], "for 5 classes there, 3 here")
    reasons = {name: reason for name, reason in keys.left_out.items() if name.startswith("aux_classifier.")}
    assert set(reasons.values()) == {"this model has no auxiliary head (model.aux)"}
    assert len(keys.left_out) == len(reasons) + 2


@torch.no_grad()
@pytest.mark.parametrize("encoder", ["resnet18", "tu-resnet18"])
def test_whole_smp_model_gives_equal_outputs(tmp_path, encoder):
    torch.manual_seed(3)
    original = lively(smp.FPN(encoder, encoder_weights=None, classes=5))
    model, keys = loaded("smp", "FPN", {"state_dict": {f"model.{n}": v for n, v in original.state_dict().items()}}, tmp_path, encoder=encoder)  # fmt: skip  # noqa: E501
    assert keys.missing == keys.left_out == {}
    found = nn.functional.interpolate(model(IMAGES)[0], (64, 64), mode="bilinear", align_corners=True)
    torch.testing.assert_close(found, original(IMAGES))


# Backbones


@pytest.mark.parametrize("key", ["weights", "weights_backbone"])
@pytest.mark.parametrize(
    ("library", "name", "encoder"),
    [("torchvision", "lraspp", "resnet18"), ("smp", "FPN", "resnet18"), ("smp", "FPN", "tu-resnet18")],
)
def test_torchvision_classifier_loads_into_any_backbone(tmp_path, resnet18, library, name, encoder, key):
    model, keys = loaded(library, name, resnet18.state_dict(), tmp_path, encoder=encoder, key=key)
    assert keys.left_out == dict.fromkeys(["fc.weight", "fc.bias"], "the backbone's own classifier")
    assert not [name for name in keys.missing if name.startswith(model.backbone_prefix)]
    assert_same_features(model.backbone_module, resnet18)


def test_timm_backbone_loads_into_torchvision(tmp_path):
    torch.manual_seed(4)
    original = lively(timm.create_model("resnet50", pretrained=False))
    state = {f"module.{name}": value for name, value in original.state_dict().items()}
    model, keys = loaded("torchvision", "fcn_resnet50", state, tmp_path, options={"output_stride": 32}, aux=False)
    assert set(keys.left_out) == {"module.fc.weight", "module.fc.bias"}
    assert_same_features(model.backbone_module, original)


def test_smp_and_torchvision_encoders_load_into_each_other(tmp_path, resnet18):
    encoder = smp.encoders.get_encoder("resnet18", weights=None)
    encoder.load_state_dict(resnet18.state_dict())
    model, _ = loaded("torchvision", "lraspp", encoder.state_dict(), tmp_path, encoder="resnet18")
    assert_same_features(model.backbone_module, resnet18)
    back, keys = loaded("smp", "Unet", model.state_dict(), tmp_path, encoder="resnet18")
    assert_same_features(back.backbone_module, resnet18)
    assert set(keys.left_out.values()) == {"of another part of the file"}


# Errors


def test_deeper_backbone_holding_all_names_is_refused(tmp_path):
    state = torchvision.models.resnet34(weights=None).state_dict()
    for key in ("weights", "weights_backbone"):
        with pytest.raises(CheckpointError, match=r"another backbone: it has further blocks: layer1\.2\.conv1"):
            loaded("smp", "FPN", state, tmp_path, encoder="resnet18", key=key)


def test_head_of_a_network_with_another_backbone_is_refused(tmp_path):
    """The decoders of both networks are alike, so half of the tensors match and the encoder would stay random."""
    torch.manual_seed(0)
    other = smp.Unet("vgg11", encoder_weights=None)
    file = other.state_dict()
    kwargs = {"encoder": "tu-test_resnet", "options": {}}
    with pytest.raises(
        CheckpointError, match=r"is of another backbone: (\d+) of \1 tensors .*set model\.partial_weights: true"
    ):
        loaded("smp", "Unet", file, tmp_path, num_classes=1, **kwargs)
    _, keys = loaded("smp", "Unet", file, tmp_path, num_classes=1, partial_weights=True, **kwargs)
    assert any(name.startswith("decoder.") for name in keys.taken)
    assert not any(name.startswith("encoder.") for name in keys.taken)


def test_file_of_two_networks_is_refused_unless_one_fits_better(tmp_path, resnet18):
    state = resnet18.state_dict()
    both = {f"{who}.{name}": value for who in ("student", "teacher") for name, value in state.items()}
    with pytest.raises(CheckpointError, match=r"several models that fit equally well .*student.* and teacher"):
        loaded("smp", "FPN", both, tmp_path, encoder="resnet18")
    both.pop("student.conv1.weight")
    _, keys = loaded("smp", "FPN", both, tmp_path, encoder="resnet18")
    assert all(name.startswith("teacher.") for name in keys.taken.values())
    assert keys.left_out["student.layer1.0.conv1.weight"] == "of another part of the file"
    with pytest.raises(CheckpointError, match=r"holds several state dicts \(student, teacher\)"):
        loaded("smp", "FPN", {"student": state, "teacher": state, "step": 3}, tmp_path, encoder="resnet18")


def test_network_of_other_names_is_refused_with_the_nearest(tmp_path):
    state = timm.create_model("mobilenetv3_small_050", pretrained=False).state_dict()
    with pytest.raises(CheckpointError, match=r"model\.weights: .*file\.pth .*; nearest: \S+ there, \S+ here"):
        loaded("torchvision", "lraspp", state, tmp_path, encoder="mobilenet_v3_small")


# map_keys

NAMES = st.text("ab.01", min_size=1, max_size=8)
SHAPES = st.dictionaries(NAMES, st.tuples(st.integers(1, 3), st.integers(1, 2)), max_size=12)


@given(SHAPES, SHAPES, st.sampled_from(["", "a.", "b."]))
def test_every_name_is_loaded_skipped_or_missing_by_shape(found, wanted, backbone):
    try:
        keys = map_keys(found, wanted, backbone)
    except CheckpointError:
        return
    assert keys.taken
    assert all(found[there] == wanted[here] for here, there in keys.taken.items())
    assert len(set(keys.taken.values())) == len(keys.taken)
    assert set(keys.taken) | set(keys.missing) == set(wanted)
    assert set(keys.taken.values()) | set(keys.left_out) == set(found)
    assert not set(keys.taken) & set(keys.missing)
    assert not set(keys.taken.values()) & set(keys.left_out)
    assert all({*keys.left_out.values(), *keys.missing.values()})


@given(st.permutations(list(torchvision.models.resnet18(weights=None).state_dict().items())))
def test_key_order_of_the_file_does_not_matter(items):
    wanted = {f"encoder.{name}": tuple(value.shape) for name, value in items if not name.startswith("fc.")}
    found = {f"module.{name}": tuple(value.shape) for name, value in items}
    keys = map_keys(found, wanted, "encoder.")
    assert keys.missing == {}
    assert set(keys.left_out) == {"module.fc.weight", "module.fc.bias"}
