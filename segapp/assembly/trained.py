"""Load a trained network from a run, a checkpoint, or a file of weights."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from segapp.assembly.data import build_dataset
from segapp.assembly.devices import build_precision, choose_devices, with_precision
from segapp.assembly.network import (
    build_inference,
    build_network,
    find_checkpoint,
    restored_network,
    with_weights_defaults,
)
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.config import DataConfig, RunConfig, check_code, load_runnable, validate_config
from segapp.custom.sources import Sources
from segapp.custom.trust import using_copies
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import CheckpointError, ConfigError
from segapp.inference.sliding import Inference
from segapp.models import SegmentationModel
from segapp.models.own_generator import own_generator
from segapp.models.weights import CONFIG_KEY, load_weights, read_metadata, read_weights_file, sha256_of, weights_path
from segapp.parallel.scatter_gather import DeviceLike
from segapp.run.words import printable


@dataclass(frozen=True)
class TrainedState:
    """A network with the weights of a file."""

    model: SegmentationModel
    """The network on the CPU in fp32, adapters merged into the weights; the average of the weights if there is one."""
    config: RunConfig
    scheme: ClassScheme
    path: Path
    sha256: str
    epoch: int = 0
    """The epoch of its last step; 0 if unknown."""
    step: int = 0
    """Steps of training; 0 if unknown."""
    criterion: Mapping[str, Any] | None = None
    """State of the criterion, with the class weights of the training; None if the file has none."""
    messages: tuple[str, ...] = ()
    copies: Mapping[str, Sources] = field(default_factory=dict)
    """Copies in the run of the custom components that are used, by name; see `using_copies`."""


@dataclass(frozen=True)
class TrainedModel(TrainedState):
    """A trained network, ready for inference."""

    inference: Inference = field(kw_only=True)
    device: torch.device = field(kw_only=True)

    def dataset(self, split: str, data: DataConfig | None = None) -> SegmentationDataset:
        with using_copies(self.copies):
            data, seed = data or self.config.data, self.config.seed
            return build_dataset(data, self.scheme, split, is_training=False, seed=seed)


def load_trained(
    target: str,
    config: str | RunConfig | None = None,
    *,
    slide: bool = False,
    tta: bool = False,
    device: DeviceLike | None = None,
    uses: Sequence[str] = ("model.",),
) -> TrainedModel:
    """Return the model of `read_trained` on a device, by default the run's, with its inference; print its messages."""
    given = None if device is None else choose_devices([device], "device")[0][0]
    trained = read_trained(target, config, uses)
    for message in trained.messages:
        print(f"note: {printable(message)}", file=sys.stderr)
    model, own = trained.model, trained.config
    overrides = {key: True for key, is_on in (("slide", slide), ("tta", tta)) if is_on}
    evaluation = own.eval.model_copy(update=overrides)
    place = given or choose_devices(own.parallel.devices)[0][0]
    precision = build_precision(with_precision(own, (place,)), place)
    precision.prepare(model.to(place))
    inference = build_inference(own.data, evaluation, model, precision, own.loss.is_aligned)
    model.eval()
    return TrainedModel(**vars(trained), inference=inference, device=place)


def read_trained(target: str, config: str | RunConfig | None = None, uses: Sequence[str] = ("model.",)) -> TrainedState:
    """Return the network of a run (its best checkpoint, else the last), of a checkpoint, or of a weights file.

    Args:
        target: a run's name, its folder, a checkpoint, or with `config` any file that `model.weights` takes. A
            safetensors file of `segapp export` holds its config.
        config: config for a file that holds only weights, or its path or name.
        uses: beginnings of the keys whose custom components are needed. Those of a run are built from its copies.

    Raises:
        CheckpointError: the file is missing, or belongs to another program, config or model.
        ConfigError: the config cannot be used.
    """
    path = weights_path(target)
    if config is not None or path.suffix.lower() == ".safetensors":
        loaded = load_runnable(config) if isinstance(config, str) else config or _config_of(path, uses)
        with own_generator():
            return _from_weights(path, loaded)
    checkpoint = find_checkpoint(target)
    state = checkpoint.state
    with own_generator():
        restored = restored_network(checkpoint, uses)
    return TrainedState(
        restored.model,
        restored.config,
        restored.scheme,
        checkpoint.path,
        checkpoint.sha256,
        checkpoint.facts.last_epoch,
        checkpoint.step,
        state.get("criterion"),
        (*checkpoint.messages, *restored.notes),
        restored.copies,
    )


def _from_weights(path: Path, config: RunConfig) -> TrainedState:
    config, notes = with_weights_defaults(config, path)
    scheme = build_scheme(config.data)
    model = build_network(
        config.model,
        scheme.num_classes,
        num_bands=build_pixels(config.data).num_bands,
        with_weights=False,
        weights_file=path,
    )
    state = read_weights_file(path, "weights")
    load_weights(model, state, str(path), "weights")
    return TrainedState(model, config, scheme, path, sha256_of(path, "weights"), messages=notes)


def _config_of(path: Path, uses: Sequence[str]) -> RunConfig:
    """Return the config in the metadata of a safetensors file; raise CheckpointError without one."""
    text = read_metadata(path, "weights").get(CONFIG_KEY)
    if text is None:
        raise CheckpointError(f"{path} holds no config: name the config of its model with --config", path=path)
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a mapping")
        config = validate_config(raw)
    except (ValueError, RecursionError, ConfigError) as error:
        raise CheckpointError(
            f"{path} holds a config that this version cannot read ({error}): give one with --config", path=path
        ) from None
    check_code(config, path, uses=uses)
    return config
