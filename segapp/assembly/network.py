"""Build the network, with the weights of a run, and its inference; check that crop and batch sizes fit it."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from segapp.assembly.own_parts import copied_parts
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.bounds import allowed_bytes
from segapp.checkpoint.training_state import LoadedCheckpoint, load_checkpoint
from segapp.compat.torch import BatchNorm, TorchDispatchMode, dispatch_modes
from segapp.config import DataConfig, EvalConfig, ModelConfig, RunConfig, check_code, load_config, validate_config
from segapp.config.sections import IMAGENET
from segapp.custom.sources import Sources
from segapp.custom.trust import using_copies
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.preprocessing import Preprocessing
from segapp.datasets.resources import available_bytes
from segapp.errors import CheckpointError, ConfigError, SegappError, some_names
from segapp.inference.sliding import Inference
from segapp.models import SegmentationModel, build_model
from segapp.models.adapters import add_adapters, merge_adapters
from segapp.models.by_name import expected_statistics
from segapp.models.weights import (
    CONFIG_KEY,
    load_weights,
    peek_tensors,
    read_metadata,
    read_weights_file,
    weights_path,
)
from segapp.precision import Precision
from segapp.run.folder import find_run, is_run
from segapp.run.words import size

_MODULE_BYTES = 4096  # of Python's objects around a tensor


def build_network(
    section: ModelConfig,
    num_classes: int,
    *,
    num_bands: int = 3,
    with_weights: bool = True,
    weights_file: Path | None = None,
    class_names: Sequence[str] = (),
) -> SegmentationModel:
    """Return the network of a `model` section for images with this number of bands, with or without pretrained weights.

    It has no adapters: see `put_adapters`. `weights_file` is the file from which all its weights will be loaded. A note
    is recorded if weights of a run are for as many classes that have other names than `class_names`.

    Raises:
        ConfigError: the network cannot be built, needs more memory than there is or than its `weights_file` fills, or
            there is no such run.
        CheckpointError: its weights cannot be used.
    """
    weights = section.weights if with_weights else None
    run = saved = None
    if weights is not None and weights_path(weights).is_file():
        saved = saved_config(weights)
        run = weights if saved is not None and saved.model.adapters and Path(weights).suffix == ".pt" else None
    elif weights is not None and (Path(weights).is_dir() or is_run(Path("runs") / weights)):
        run = weights
    most_bytes = available_bytes() or 2**63
    if weights_file is not None:  # whose values may have half of the bytes of float32
        most_bytes = min(most_bytes, allowed_bytes(file_bytes=weights_file.stat().st_size // 8))
    with contextlib.nullcontext() if dispatch_modes() else _BoundedTensors(most_bytes):  # a simulation needs no memory
        model = build_model(
            section.library,
            section.name,
            num_classes,
            in_channels=num_bands,
            weights=weights if run is None else None,
            weights_backbone=section.weights_backbone if with_weights else None,
            partial_weights=section.partial_weights,
            aux=section.aux,
            encoder=section.encoder,
            options=section.options,
        )
    if run is not None:
        load_run_weights(model, run, class_names, is_partial=section.partial_weights)
    elif saved is not None:
        _note_other_names(model, _saved(weights_path(str(weights)), "classes"), class_names)
    return model


class _BoundedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ConfigError before the tensors that are created in its context take more than a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most_bytes = most_bytes
        self._num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the bytes of a new tensor, whose shape is the first argument, and of its module's Python objects."""
        options = kwargs or {}
        if args and isinstance(args[0], list | tuple) and all(isinstance(side, int) for side in args[0]):
            dtype = options.get("dtype") or torch.get_default_dtype()
            self._num_bytes += math.prod(args[0]) * dtype.itemsize + _MODULE_BYTES
            if self._num_bytes > self._most_bytes:
                raise ConfigError(
                    f"model.options: the model needs more than {size(self._most_bytes)} of memory, which is all that "
                    "is free, or more than its weights file can fill: lower its sizes",
                    key="model.options",
                )
        return func(*args, **options)


def put_adapters(section: ModelConfig, model: SegmentationModel) -> None:
    """Freeze the backbone and add the adapters of a `model` section, if it has any; see `add_adapters`."""
    if section.adapters is not None:
        add_adapters(model, section.adapters)


def fill_in_base(checkpoint: LoadedCheckpoint, model: SegmentationModel) -> None:
    """Add the base of a network with adapters to the state of a checkpoint that refers to it, in place.

    Raises:
        CheckpointError: the network has another base.
    """
    saved = checkpoint.state.get("base")
    if saved is None:
        return
    if model.base is None or model.base.sha256 != saved["sha256"]:
        now = "no weights file gives it" if model.base is None else f"sha256 {model.base.sha256[:16]} now"
        raise CheckpointError(
            f"{checkpoint.path} holds only adapters and head, for a base from {', '.join(saved['sources'])} with "
            f"sha256 {saved['sha256'][:16]}, and {now}: put the original file back, or name a copy of it as "
            "model.weights_backbone or model.weights",
            key="model.adapters",
            path=checkpoint.path,
        )
    own = model.state_dict()
    base = {name: own[name] for name in model.base.names}
    checkpoint.state["model"].update(base)
    if checkpoint.state.get("ema") is not None:
        checkpoint.state["ema"]["module"].update(base)


def build_inference(
    data: DataConfig, section: EvalConfig, model: SegmentationModel, precision: Precision, align_corners: bool
) -> Inference:
    window = (section.slide_px or data.crop_px) if section.slide else None
    if model.fixed_size_px is not None:
        window = model.fixed_size_px
    return Inference(
        Preprocessing(build_pixels(data), precision.input_dtype).to(precision.device),
        align_corners=align_corners,
        window_px=window,
        overlap=section.slide_overlap,
        scales=(0.75, 1.0, 1.25) if section.tta else (1.0,),
        flip=section.tta,
        threshold=None if data.multilabel is None else section.threshold,
        autocast=precision.autocast,
    )


def check_sizes(config: RunConfig, model: SegmentationModel) -> None:
    """Raise ConfigError, with the nearest value that works, if the model does not take the crop or the batch size."""
    height, width = config.data.crop_px
    if not model.accepts(height, width):
        wanted = model.suitable_size(height, width)
        raise ConfigError(
            f"data.crop_px = [{height}, {width}] does not fit {config.model.name}: use [{wanted[0]}, {wanted[1]}]",
            key="data.crop_px",
        )
    if config.train.batch_size < model.min_train_batch:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size} is too small for {config.model.name}: its BatchNorm after "
            f"global pooling needs at least {model.min_train_batch} images",
            key="train.batch_size",
            value=config.train.batch_size,
        )


def largest_phase(config: RunConfig) -> RunConfig:
    """Return the config without `model.freeze` if it ends during the run: the rest needs more memory."""
    if config.model.freeze_epochs is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"freeze": [], "freeze_epochs": None})})


def find_checkpoint(target: str) -> LoadedCheckpoint:
    """Return a checkpoint file, or the best checkpoint of a run, else its last.

    Raises:
        CheckpointError: no checkpoint can be read.
        ConfigError: there is no such run.
    """
    path = Path(target)
    if path.is_file():
        return load_checkpoint(path)
    folder = find_run(target)
    try:
        return load_checkpoint(folder.path, "best")
    except CheckpointError:
        return load_checkpoint(folder.path)


def network_state(state: Mapping[str, Any]) -> Any:
    """Return the network's tensors of a training state, the average if there is one; KeyError if there are none."""
    average = state.get("ema")
    return average["module"] if average is not None else state["model"]


@dataclass(frozen=True)
class Restored:
    """The network of a checkpoint with its weights, adapters merged into them; its config, classes and components."""

    model: SegmentationModel
    config: RunConfig
    scheme: ClassScheme
    copies: Mapping[str, Sources]
    """See `copied_parts`."""
    notes: Sequence[str]


def restored_network(checkpoint: LoadedCheckpoint, uses: Sequence[str] = ("model.",)) -> Restored:
    """Return the network of a checkpoint; `uses` has the beginnings of the keys whose custom components are needed.

    Raises:
        CheckpointError: the checkpoint is of another program, config or model, or its adapters have another base.
        ConfigError: the config cannot be used.
    """
    state, path = checkpoint.state, checkpoint.path
    if not isinstance(state.get("config"), dict):
        raise CheckpointError(f"{path} holds no config: it was not written by segapp train", path=path)
    try:
        saved = validate_config(state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{path} holds a config that this version cannot read: {error}", path=path) from None
    copies, notes = copied_parts(checkpoint, saved, uses)
    check_code(saved, path, uses=uses, copies=copies)
    scheme = build_scheme(saved.data)
    if list(scheme.names) != list(state["classes"]):
        raise CheckpointError(
            f"{path} was trained on other classes than its config names: restore the original file", path=path
        )
    bands, has_base = build_pixels(saved.data).num_bands, "base" not in state
    try:
        with using_copies(copies):
            model = build_network(
                saved.model,
                scheme.num_classes,
                num_bands=bands,
                with_weights=not has_base,
                weights_file=checkpoint.file if has_base else None,
            )
    except (CheckpointError, ConfigError) as error:
        raise (
            error if has_base else error.reworded(f"{path} holds only adapters and head, their base: {error}")
        ) from None
    put_adapters(saved.model, model)
    fill_in_base(checkpoint, model)
    try:
        model.load_state_dict(network_state(state))
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path} does not fit {saved.model.name}: {error}", path=path) from None
    model = model if saved.model.adapters is None else merge_adapters(model)
    return Restored(model, saved, scheme, copies, notes)


def saved_config(weights: str) -> RunConfig | None:
    """Return the config of the training of a run, a checkpoint or an exported file; None for other weights."""
    path = weights_path(weights)
    with contextlib.suppress(Exception):  # foreign and damaged files are reported when they are loaded
        if not path.is_file():
            return load_config(find_run(weights).config_yaml)
        return validate_config(_saved(path, CONFIG_KEY))
    return None


def _saved(file: Path, key: str) -> Any:
    """Return a value that a checkpoint or an exported file of segapp holds next to its tensors."""
    value = (read_metadata(file) if file.suffix.lower() == ".safetensors" else peek_tensors(file))[key]
    return json.loads(value) if isinstance(value, str) else value


def suited_momentum(model: SegmentationModel, num_passes: int, *, is_thawed: bool) -> float | None:
    """Return the momentum of all BatchNorm layers that suits a run of `num_passes` forward passes; None: their own.

    Running statistics are averages over about the last 1 / momentum passes. As the weights change, a hundredth of the
    run is the longest window, or ten passes, as with torch's own 0.1. No layer gets less than it has, and layers that
    are frozen for the whole run do not count.
    """
    layers = [module for module in model.train().modules() if isinstance(module, BatchNorm)]
    own = [each.momentum for each in layers if each.momentum is not None and (each.training or is_thawed)]
    least = min(0.1, 100 / max(1, num_passes))
    return round(max(least, *own), 5) if own and min(own) < least else None


def _has_head_of_smp(weights: str) -> bool:
    """Return True for weights of a whole network of smp; False for a file that cannot be read, reported elsewhere."""
    with contextlib.suppress(SegappError, OSError):
        return any("segmentation_head." in name for name in read_weights_file(weights))
    return False


def with_weights_defaults(config: RunConfig, file: Path | None = None) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config with the keys that it leaves to its weights, and notes about values that may surprise.

    These are `data.mean`, `data.std` and `loss.align_corners`. `file`, or else the initial weights, give the values of
    their training, or named weights the ones that they expect. Heads of smp align the corners.
    """
    data, model, is_aligned = config.data, config.model, config.loss.align_corners
    initial = model.weights or model.weights_backbone
    if data.mean and data.std and is_aligned != "auto":
        return config, ()
    # Only `model.weights` may name a run: `imagenet` as weights of the backbone is no run that happens to have this
    # name.
    files = [str(each) for each in (file, initial) if each and (each == model.weights or Path(each).is_file())]
    saved, notes = next(filter(None, map(saved_config, files)), None), []
    if saved is not None and saved.data.mean and saved.data.std:
        mean, std = saved.data.mean, saved.data.std
    else:
        mean, std = expected_statistics(model.library, model.name, model.encoder, initial) if initial else IMAGENET
    left_out = {"data.mean": (data.mean, mean), "data.std": (data.std, std)}
    if taken := [f"{key} = {[*found]}" for key, (named, found) in left_out.items() if not named]:
        source = f"{file or initial} ({model.encoder or model.name})"
        notes = [f"{', '.join(taken)}: the weights {source} expect these, not ImageNet's"] * ((mean, std) != IMAGENET)
    if is_aligned == "auto":
        whole = file or model.weights
        if saved is not None:
            # Weights of a backbone say nothing about the upsampling of the logits.
            is_aligned, why = whole is not None and saved.loss.is_aligned, "were trained with it"
        else:
            is_aligned = whole is not None and model.library == "smp" and _has_head_of_smp(str(whole))
            why = "have the names of smp, whose heads align corners; set false if they were trained without it"
        notes += [f"loss.align_corners = true: the weights {whole} {why}"] * is_aligned
    raw = config.model_dump(mode="json")
    raw["data"] |= {"mean": data.mean or mean, "std": data.std or std}
    raw["loss"]["align_corners"] = is_aligned
    return validate_config(raw), tuple(notes)


def load_run_weights(model: SegmentationModel, run: str, class_names: Sequence[str] = (), *, is_partial: bool) -> None:
    """Copy the weights of a run into a network, and record which weights it took; see `load_weights`.

    Raises:
        CheckpointError: the run has no readable checkpoint, or its network is a different one.
        ConfigError: there is no such run.
    """
    key = "model.weights"
    try:
        checkpoint = find_checkpoint(run)
    except (CheckpointError, ConfigError) as error:
        raise error.reworded(f"{key}: {error}") from None
    try:
        adapters = (checkpoint.state.get("config") or {}).get("model", {}).get("adapters")
        state = restored_network(checkpoint).model.state_dict() if adapters else network_state(checkpoint.state)
    except KeyError:
        raise CheckpointError(
            f"{key}: {checkpoint.path} holds no model: it was not written by segapp train",
            key=key,
            value=run,
            path=checkpoint.path,
        ) from None
    load_weights(model, state, run, key, is_partial=is_partial)
    _note_other_names(model, checkpoint.state.get("classes") or (), class_names)


def _note_other_names(model: SegmentationModel, classes: Sequence[str], class_names: Sequence[str]) -> None:
    """Record a note in the last report of a network if its weights are for as many classes of other names."""
    others = [f"{there} -> {here}" for there, here in zip(classes, class_names, strict=False) if there != here]
    if others and len(classes) == len(class_names):
        note = f"its classes have other names: {some_names(others, 8)}"
        *earlier, report = model.load_reports
        model.load_reports = (*earlier, replace(report, notes=(note,)))
