"""`build_model`: a network with its weights, from names."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from segapp.errors import CheckpointError
from segapp.models.eomt import build_eomt
from segapp.models.from_python import build_python
from segapp.models.from_smp import build_smp
from segapp.models.from_torchvision import build_torchvision
from segapp.models.inspection import inspect_model
from segapp.models.names import unknown_name
from segapp.models.network import SegmentationModel
from segapp.models.weights import (
    cached_hub_file,
    cached_url,
    fetch_hub_file,
    fetch_url,
    load_weights,
    looks_like_path,
    read_weights_file,
)

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
        library: `torchvision`, `smp`, `segapp` for `eomt`, or `python` for a custom model.
        name: the model's name in that library; for a custom model `package.module:factory`.
        num_classes: C, at least 1.
        in_channels: B, the bands of the images; the first convolution of a weights file for RGB is adapted to them.
        weights: for the whole network: a torchvision name (`COCO_WITH_VOC_LABELS_V1`, `DEFAULT`) or a local file.
            Tensors with another shape, such as a head for other classes, keep their initialization.
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
        model = build_eomt(name, num_classes, aux, encoder, options or {}, in_channels)
    elif library == "python":
        model = build_python(name, num_classes, options or {}, in_channels)
    else:
        raise unknown_name("model.library", library, "a library of models", LIBRARIES)
    inspect_model(model)
    if weights_backbone is not None:
        _load(model, "model.weights_backbone", weights_backbone, is_partial=partial_weights)
    if weights is not None:
        _load(model, "model.weights", weights, is_partial=partial_weights)
    return model.train()


def _load(model: SegmentationModel, key: str, weights: str, *, is_partial: bool) -> None:
    """Load the weights of a config key, `model.weights` or `model.weights_backbone`, and record the report."""
    module: nn.Module = model
    if key == "model.weights":
        prefix, what = model.backbone_prefix, f"weights of {model.name}"
        named = _torchvision_weights(_torchvision_name(model), key) if model.library == "torchvision" else {}
    else:
        module, prefix, what = model.backbone_module, "", f"weights of backbone {model.encoder_name}"
        named = _torchvision_weights(model.encoder_name, key)
        if model.library != "torchvision":
            for name, (repo_id, revision) in _hub_files(model.encoder_name).items():
                named[name] = partial(fetch_hub_file, repo_id, revision, name, key)
    state = read_weights_file(_locate(weights, named, what, key), key)
    report = load_weights(module, state, weights, key, prefix, is_partial=is_partial, in_channels=model.in_channels)
    model.load_reports += (report,)


def _torchvision_name(model: SegmentationModel) -> str:
    return f"{model.name.partition('_')[0]}_{model.encoder_name}"


def _locate(weights: str, named: Mapping[str, Callable[[], Path]], what: str, key: str) -> Path:
    """Return the local file of a name or a path; a name has precedence over a file in the current folder."""
    short = weights.rpartition("Weights.")[2]  # torchvision also spells it ResNet50_Weights.IMAGENET1K_V1
    if short in named:
        return named[short]()
    if looks_like_path(weights):
        return Path(weights).expanduser()
    if not named:
        raise CheckpointError(
            f"{key}: no file {weights!r}, and there are no named {what}; give the path of a file",
            key=key,
            value=weights,
        )
    error = unknown_name(key, weights, what, named)
    raise error.reworded(f"{error}; or give the path of a file")


def weights_in_cache(model: SegmentationModel) -> list[str]:
    """Return the named weights of a network and its backbone whose files are on this machine, without a download."""
    from torchvision.models import get_model_weights, list_models

    if model.library != "torchvision":
        files = _hub_files(model.encoder_name)
        return [f"weights_backbone={name}" for name, file in files.items() if cached_hub_file(*file)]
    names = {"weights": _torchvision_name(model), "weights_backbone": model.encoder_name}
    return [
        f"{key}={weights.name}"
        for key, name in names.items()
        if name in list_models()
        for weights in get_model_weights(name)
        if cached_url(weights.url)
    ]


def _torchvision_weights(name: str, key: str) -> dict[str, Callable[[], Path]]:
    """Return torchvision's named weights for a model, each with a function that fetches its file."""
    from torchvision.models import get_model_weights, list_models

    if name not in list_models():
        return {}
    members = get_model_weights(name).__members__  # with aliases: DEFAULT is one
    return {member: partial(fetch_url, weights.url, member, key) for member, weights in members.items()}


def _hub_files(encoder: str) -> dict[str, tuple[str, str | None]]:
    """Return repository and revision of an encoder's named weights; for a timm model, `imagenet` and `DEFAULT`."""
    import timm
    from segmentation_models_pytorch.encoders import encoders

    if encoder in encoders:
        settings = encoders[encoder]["pretrained_settings"]
        return {name: (each["repo_id"], each["revision"]) for name, each in settings.items()}
    config = timm.get_pretrained_cfg(encoder.removeprefix("tu-")) if encoder.startswith("tu-") else None
    if config is None or not config.hf_hub_id:
        return {}
    return dict.fromkeys(("imagenet", "DEFAULT"), (config.hf_hub_id, None))
