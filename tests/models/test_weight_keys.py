"""Weights of other libraries, from their real models: every tensor is mapped, and outputs are equal."""

from __future__ import annotations

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from segapp.errors import CheckpointError
from segapp.models import build_model
from segapp.models.keys import map_keys

IMAGES = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("_uninspected")


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


def loaded(library, name, state, tmp_path, key="weights", **kwargs):
    torch.save(state, tmp_path / "file.pth")
    model = build_model(library, name, 5, **{key: str(tmp_path / "file.pth")}, **kwargs)
    return model.eval(), model.load_reports[0].keys


@torch.no_grad()
def assert_same_features(backbone: nn.Module, original: nn.Module) -> None:
    """Check that the backbone's last feature map is what a classifier pools."""
    found = backbone(IMAGES)
    last = found[-1] if isinstance(found, (list, tuple)) else list(found.values())[-1]
    torch.testing.assert_close(last, nn.Sequential(*[*original.children()][:-2])(IMAGES))


@torch.no_grad()
@pytest.mark.parametrize("encoder", ["mobilenet_v2", "tu-test_resnet"])
def test_whole_smp_model_gives_equal_outputs(tmp_path, encoder):
    torch.manual_seed(3)
    original = lively(smp.FPN(encoder, encoder_weights=None, classes=5))
    state = {"state_dict": {f"model.{name}": value for name, value in original.state_dict().items()}}
    model, keys = loaded("smp", "FPN", state, tmp_path, encoder=encoder)
    assert keys.missing == keys.left_out == {}
    found = nn.functional.interpolate(model(IMAGES)[0], (64, 64), mode="bilinear", align_corners=True)
    torch.testing.assert_close(found, original(IMAGES))


def test_timm_and_smp_backbones_load_into_others(tmp_path):
    torch.manual_seed(4)
    original = lively(timm.create_model("resnet18", pretrained=False))
    state = {f"module.{name}": value for name, value in original.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"train with it as model\.weights_backbone, or set model\.partial"):
        loaded("torchvision", "lraspp", state, tmp_path, encoder="resnet18")
    backbone = {"key": "weights_backbone", "encoder": "resnet18"}
    model, keys = loaded("torchvision", "lraspp", state, tmp_path, **backbone)
    assert set(keys.left_out) == {"module.fc.weight", "module.fc.bias"}
    assert_same_features(model.backbone_module, original)
    back, keys = loaded("smp", "PSPNet", model.state_dict(), tmp_path, **backbone, options={"encoder_depth": 5})
    assert_same_features(back.backbone_module, original)
    assert set(keys.left_out.values()) == {"of another part of the file"}


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


@given(
    st.permutations(
        [(name, tuple(value.shape)) for name, value in timm.create_model("test_resnet").state_dict().items()]
    )
)
def test_key_order_of_the_file_does_not_matter(items):
    wanted = {f"encoder.{name}": shape for name, shape in items if not name.startswith("fc.")}
    keys = map_keys({f"module.{name}": shape for name, shape in items}, wanted, "encoder.")
    assert keys.missing == {}
    assert set(keys.left_out) == {"module.fc.weight", "module.fc.bias"}
