"""`build_model`: a network with its weights, from names; custom networks (`model.library: python`)."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from segapp.config.sections import IMAGENET, Statistics
from segapp.custom.loading import build_part
from segapp.errors import CheckpointError, ConfigError
from segapp.losses.additive import heads_of
from segapp.models.eomt import build_eomt
from segapp.models.from_smp import build_smp
from segapp.models.from_torchvision import build_torchvision, split_name
from segapp.models.inspection import inspect_model
from segapp.models.names import unknown_name
from segapp.models.network import SegmentationModel
from segapp.models.weights import BACKBONE_KEY, fetch_hub_file, fetch_url, load_weights, read_weights_file


class PythonModel(SegmentationModel):
    """A custom network; tensor names are its own with the prefix `network.`.

    Its submodule `backbone` or `encoder` is the backbone; without one, the whole network is.
    """

    def __init__(self, network: nn.Module, *, name: str, num_classes: int, in_channels: int) -> None:
        parts = [part for part in ("backbone", "encoder") if isinstance(getattr(network, part, None), nn.Module)]
        super().__init__(
            library="python",
            name=name,
            encoder_name=type(network).__name__,
            num_classes=num_classes,
            in_channels=in_channels,
            backbone_name=".".join(["network", *parts[:1]]),
            size_divisor=int(getattr(network, "size_divisor", 1)),
            min_size_px=int(getattr(network, "min_size_px", 1)),
            fixed_size_px=getattr(network, "fixed_size_px", None),
        )
        self.network = network

    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], None]:
        """Return the network's logits, the main ones (N, C, h, w) first, in evaluation only these; and no features."""
        heads = heads_of(self.network(images_NCHW))
        shape, wanted = tuple(heads[0].shape), (images_NCHW.shape[0], self.num_classes)
        if len(shape) != 4 or shape[:2] != wanted:
            raise ValueError(f"the logits have the shape {shape}: return ({wanted[0]}, {wanted[1]}, h, w)")
        return heads if self.training else heads[:1], None


def build_python(name: str, num_classes: int, options: Mapping[str, Any], in_channels: int) -> PythonModel:
    """Return the network of a custom factory, which gets `num_classes` and `in_channels` if it has such parameters."""
    network = build_part(name, "model.name", options, offered={"num_classes": num_classes, "in_channels": in_channels})
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model.name = {name} made a {type(network).__name__}: return a torch.nn.Module",
            key="model.name",
            value=name,
        )
    return PythonModel(network, name=name, num_classes=num_classes, in_channels=in_channels)


OWN: Mapping[str, tuple[Callable[..., SegmentationModel], str | None]] = {"eomt": (build_eomt, "vit_*patch1[46]*")}
"""Models of `library: segapp`: name -> its builder, and the pattern of the timm models that can be its encoder."""

LIBRARIES = ("torchvision", "smp", "segapp", "python")


def build_model(
    library: str,
    name: str,
    num_classes: int,
    *,
    in_channels: int = 3,
    weights: str | None = None,
    weights_backbone: str | None = None,
    partial_weights: bool = False,
    aux: bool = True,
    encoder: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> SegmentationModel:
    """Return a segmentation network, in training mode, on the CPU.

    Random initialization uses torch's global generator, so seed it before. The parameters are the keys of a config's
    `model` section and `num_classes`.

    Args:
        library: `torchvision`, `smp`, `segapp` for the models of `OWN`, or `python` for a custom model.
        name: the model's name in that library; for a custom model `package.module:factory`.
        num_classes: C, at least 1.
        in_channels: B, the bands of the images; a weights file for RGB is adapted to them.
        weights: for the whole network: a torchvision name (`COCO_WITH_VOC_LABELS_V1`, `DEFAULT`) or a local file.
            The classifier of a file with another number of classes is not used.
        weights_backbone: for the backbone: a name of torchvision (`IMAGENET1K_V1`, `DEFAULT`), one of smp's names for
            its encoders (`imagenet`), or a local file. Loaded before `weights`.
        partial_weights: load only the tensors that match, also from another backbone or a part of one.
        aux: train the auxiliary head of torchvision's FCN and DeepLabV3, and the predictions of EoMT's earlier blocks;
            the other families have none.
        encoder: the backbone's name, for smp, for EoMT and for torchvision's bare families.
        options: further arguments of the network, plain values.

    Returns:
        The network; its `load_reports` say what the weights files contributed.

    Raises:
        ConfigError: an unknown name or option, or a combination that cannot be built.
        CheckpointError: a weights file is missing, cannot be downloaded, is damaged, or belongs to another model.
        ValueError: `num_classes` is less than 1.

    Example:
        >>> model = build_model("torchvision", "lraspp", 5, encoder="mobilenet_v3_small").eval()
        >>> import torch
        >>> [tuple(logits.shape) for logits in model(torch.zeros(1, 3, 64, 96))]
        [(1, 5, 8, 12)]
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes}: a model needs at least one class")
    model: SegmentationModel
    if library == "torchvision":
        model = build_torchvision(name, num_classes, aux, encoder, options or {}, in_channels)
    elif library == "smp":
        model = build_smp(name, num_classes, encoder, options or {}, in_channels)
    elif library == "segapp":
        if name.lower() not in OWN:
            raise unknown_name("model.name", name, "a model of segapp", OWN)
        build, pattern = OWN[name.lower()]
        if pattern is None and encoder is not None:
            raise ConfigError(f"model.encoder: {name} has an encoder of its own: leave it out", key="model.encoder")
        model = build(num_classes, aux, encoder, options or {}, in_channels)
    elif library == "python":
        model = build_python(name, num_classes, options or {}, in_channels)
    else:
        raise unknown_name("model.library", library, "a library of models", LIBRARIES)
    # Before the weights, because it removes modules that never run, whose tensors a file need not have.
    alike = (
        library,
        name,
        num_classes,
        in_channels,
        aux,
        encoder,
        json.dumps(options or {}, sort_keys=True, default=repr),
    )
    inspect_model(model, None if library == "python" else alike)
    if weights_backbone is not None:
        _load(model, BACKBONE_KEY, weights_backbone, is_partial=partial_weights)
    if weights is not None:
        _load(model, "model.weights", weights, is_partial=partial_weights)
    return model.train()


def _load(model: SegmentationModel, key: str, weights: str, *, is_partial: bool) -> None:
    """Load the weights of a config key, `model.weights` or `model.weights_backbone`, and record the report."""
    encoder = model.encoder_name
    if key == BACKBONE_KEY:
        what, members = f"backbone {encoder}", _torchvision_weights(encoder)
        files = {} if model.library == "torchvision" else hub_files(encoder)
    else:
        what, members, files = model.name, _torchvision_weights(f"{model.name.partition('_')[0]}_{encoder}"), {}
    named = {name: partial(fetch_url, each.url, name, key) for name, each in members.items()}
    named |= {name: partial(fetch_hub_file, *file, name, key) for name, file in files.items()}
    state = read_weights_file(_locate(weights, named, f"weights of {what}", key), key)
    load_weights(model, state, weights, key, is_partial=is_partial)


def _locate(weights: str, named: Mapping[str, Callable[[], Path]], what: str, key: str) -> Path:
    """Return the local file of a name or a path; a name has precedence over a file in the current folder."""
    short = weights.rpartition("Weights.")[2]  # torchvision also spells it ResNet50_Weights.IMAGENET1K_V1
    if short in named:
        return named[short]()
    if Path(weights).exists() or "/" in weights or (Path(weights).suffix and "_Weights." not in weights):
        return Path(weights)
    if not named:
        raise CheckpointError(
            f"{key}: no file {weights!r}, and there are no named {what}; give the path of a file",
            key=key,
            value=weights,
        )
    error = unknown_name(key, weights, what, named)
    raise error.reworded(f"{error}; or give the path of a file")


def _torchvision_weights(name: str) -> Mapping[str, Any]:
    from torchvision.models import get_model_weights, list_models

    return get_model_weights(name).__members__ if name in list_models() else {}  # with aliases: DEFAULT is one


def expected_statistics(library: str, name: str, encoder: str | None, weights: str) -> Statistics:
    """Return the mean and std that named weights expect; for a file, those that the encoder's usual weights expect."""
    encoder = split_name(name, encoder)[1] if library == "torchvision" else str(encoder)
    expected: Any = None
    if members := _torchvision_weights(encoder):
        expected = members.get(weights.rpartition("Weights.")[2], members["DEFAULT"]).transforms()
    elif encoder.startswith("tu-"):
        import timm

        with suppress(RuntimeError):  # an unknown tag is reported when the encoder is built
            expected = timm.get_pretrained_cfg(encoder.removeprefix("tu-"))
    elif encoder.startswith("dpn"):  # smp has these numbers only in files on its hub
        return (124 / 255, 117 / 255, 104 / 255), (1 / (0.0167 * 255),) * 3
    elif weights == "advprop" or encoder.startswith(("inception", "xception", "timm-tf_", "timm-mobilenetv3")):
        return (0.5,) * 3, (0.5,) * 3
    return IMAGENET if expected is None else (tuple(expected.mean), tuple(expected.std))


def hub_files(encoder: str) -> dict[str, tuple[str, str | None]]:
    """Return repository and revision of an encoder's named weights; for a timm model, `imagenet` and `DEFAULT`."""
    import timm
    from segmentation_models_pytorch.encoders import encoders

    if encoder in encoders:
        settings = encoders[encoder]["pretrained_settings"]
        return {name: (each["repo_id"], each["revision"]) for name, each in settings.items()}
    config = timm.get_pretrained_cfg(encoder.removeprefix("tu-")) if encoder.startswith("tu-") else None
    return dict.fromkeys(("imagenet", "DEFAULT"), (config.hf_hub_id, None)) if config and config.hf_hub_id else {}
