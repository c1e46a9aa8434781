"""The blocks that are found in networks, by name."""

import pytest
import torch
from torch import nn

from segapp.errors import ConfigError
from segapp.models import build_model
from segapp.models.blocks import block_names, find_blocks
from segapp.parallel import DataParallelModel, convert_sync_batchnorm, set_recompute
from segapp.parallel.scatter_gather import tensors_in


@pytest.mark.parametrize(
    ("library", "name", "encoder", "expected"),
    [
        (
            "smp",
            "Unet",
            "resnet18",
            [f"encoder.layer{stage}.{i}" for stage in (1, 2, 3, 4) for i in (0, 1)]
            + [f"decoder.blocks.{i}" for i in range(5)],
        ),
        ("smp", "Segformer", "mit_b0", [f"encoder.block{stage}.{i}" for stage in (1, 2, 3, 4) for i in (0, 1)]),
        (
            "smp",
            "Linknet",
            "tu-convnext_tiny",
            [f"encoder.model.stages_{s}.blocks.{i}" for s, depth in enumerate((3, 3, 9, 3)) for i in range(depth)]
            + [f"decoder.blocks.{i}" for i in range(5)],
        ),
        (
            "segapp",
            "eomt",
            "tu-vit_tiny_patch16_224",
            [*(f"encoder.blocks.{i}" for i in range(12)), "decoder.upscale.0", "decoder.upscale.1"],
        ),
    ],
)
def test_blocks_are_residual_and_transformer_blocks(library, name, encoder, expected):
    """Of ConvNeXt's stages the blocks, of an EoMT also the upscaling of its patches."""
    with torch.device("cpu" if encoder == "mit_b0" else "meta"):  # mit reads values while it is built
        model = build_model(library, name, 3, encoder=encoder)
    assert list(find_blocks(model)) == expected


class Own(nn.Module):
    checkpoint_blocks = ("body", "tail.*")

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.tail = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_a_custom_network_names_its_blocks():
    net = nn.Sequential(Own())
    assert list(find_blocks(net)) == ["0.body", "0.tail.0", "0.tail.1"]
    assert block_names(net, ["*.tail.*"]) == ("0.tail.0", "0.tail.1")
    assert block_names(net, ["0.tail"]) == ("0.tail.0", "0.tail.1"), "a module stands for what lies within it"


def test_unknown_blocks_are_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"train\.recompute.*0\.bodi.*0\.body"):
        block_names(nn.Sequential(Own()), ["0.bodi"])
    net = nn.Sequential(Own())
    net[0].checkpoint_blocks = ["nothing"]
    with pytest.raises(ConfigError, match="checkpoint_blocks of Own"):
        find_blocks(net)


def test_a_network_without_blocks_says_what_to_do():
    with pytest.raises(ConfigError, match=r"train\.recompute: the model has no blocks.*checkpoint_blocks"):
        block_names(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)))


EOMT = {"depth": 4, "embed_dim": 48, "num_heads": 2, "num_queries": 6, "num_blocks": 2, "mask_steps": 4}
NETWORKS = [
    ("segapp", "eomt", "tu-vit_small_patch16_dinov3", {**EOMT, "drop_path_rate": 0.2}, 64),
    ("smp", "Segformer", "mit_b0", {}, 64),
    ("smp", "DPT", "tu-vit_tiny_patch16_224", {}, 224),
    ("smp", "UPerNet", "tu-convnext_atto", {}, 64),
    ("smp", "Unet", "densenet121", {}, 64),
    ("smp", "FPN", "efficientnet-b0", {}, 64),
    ("smp", "PAN", "dpn68", {}, 128),
    ("torchvision", "lraspp", "mobilenet_v3_small", {}, 64),
    ("torchvision", "deeplabv3", "resnet18", {}, 64),
]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(("library", "name", "encoder", "options", "px"), NETWORKS, ids=lambda value: str(value)[:30])
def test_recomputed_networks_take_the_same_step(library, name, encoder, options, px, num_devices):
    """Gradients and buffers, bit for bit."""
    found = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        net = convert_sync_batchnorm(build_model(library, name, 5, encoder=encoder, options=options)).train()
        if is_recomputed:
            set_recompute(net, [find_blocks(net)] * num_devices)
        torch.manual_seed(1)
        outputs = DataParallelModel(
            net, ["cpu"] * num_devices, gpu0_bsz=1 if num_devices > 1 else None, mode="lockstep"
        )(torch.randn(3, 3, px, px))
        sum(logits.float().square().mean() for logits in tensors_in(outputs.gather(device="cpu"))).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        found.append([*gradients, *net.buffers()])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
