"""The weights that a run has trained: its best checkpoint, found by the run's name or folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segapp.checkpoint.training_state import LoadedCheckpoint, load_checkpoint
from segapp.errors import CheckpointError, ConfigError
from segapp.models import SegmentationModel
from segapp.models.names import some_names
from segapp.models.weights import load_weights
from segapp.run.folder import find_run, is_run


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
    """Return the network's tensors of a training state: the average of the weights if there is one.

    Raises:
        KeyError: there are none.
    """
    average = state.get("ema")
    return average["module"] if average is not None else state["model"]


def names_run(text: str) -> bool:
    """Return True if a `model.weights` value is a run: a folder, or the name of a run in runs/."""
    return Path(text).is_dir() or is_run(Path("runs") / text)


def load_run_weights(model: SegmentationModel, run: str, *, is_partial: bool) -> None:
    """Copy the weights of a run into a network, and record what it has taken.

    Args:
        model: the network, changed in place.
        run: name or folder.
        is_partial: take the tensors that match; otherwise all of the network's must be there.

    Raises:
        CheckpointError: the run has no readable checkpoint, or its network is another one.
        ConfigError: there is no such run.
    """
    key = "model.weights"
    try:
        checkpoint = find_checkpoint(run)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{key}: {error}") from None
    try:
        state = network_state(checkpoint.state)
    except KeyError:
        raise CheckpointError(
            f"{key}: {checkpoint.path} holds no network: it was not written by segapp train"
        ) from None
    report = load_weights(
        model, state, run, key, model.backbone_prefix, is_partial=is_partial, in_channels=model.in_channels
    )
    wanted = {name for name, _ in model.named_parameters()}
    missing = {name: reason for name, reason in report.keys.missing.items() if name in wanted}
    if missing and not is_partial:
        classes = list(checkpoint.state.get("classes") or ())
        others = f"; it has {len(classes)} classes, this config {model.num_classes}" if classes else ""
        raise CheckpointError(
            f"{key}: run {run} lacks {some_names(missing)} ({next(iter(missing.values()))}){others}: set "
            "model.partial_weights: true to take what matches"
        )
    model.record_load(report)
