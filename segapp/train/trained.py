"""A trained model out of a run or a checkpoint file, before it is put to any use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segapp.config import RunConfig, validate_config
from segapp.datasets.formats import ClassScheme
from segapp.errors import CheckpointError, ConfigError
from segapp.models import SegmentationModel
from segapp.run.folder import find_run
from segapp.train.build import build_network, build_scheme
from segapp.train.checkpoint import LoadedCheckpoint, load_checkpoint


@dataclass(frozen=True)
class TrainedState:
    """What a checkpoint says of its model.

    Attributes:
        model: on the CPU in fp32; the weights' average where there is one.
        config: that it was trained with.
        scheme: its classes.
        checkpoint: where it comes from.
    """

    model: SegmentationModel
    config: RunConfig
    scheme: ClassScheme
    checkpoint: LoadedCheckpoint


def read_trained(target: str) -> TrainedState:
    """The model of a run (its best checkpoint, else the last) or of a checkpoint file.

    Args:
        target: a run's name, its folder, or a checkpoint file.

    Raises:
        CheckpointError: there is none, or it is of another program, config or model.
    """
    checkpoint = _find_checkpoint(target)
    state = checkpoint.state
    if not isinstance(state.get("config"), dict):
        raise CheckpointError(f"{checkpoint.path} holds no config: it was not written by segapp train")
    try:
        config = validate_config(state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path} holds a config that this version does not read: {error}") from None
    scheme = build_scheme(config.data)
    if list(scheme.names) != list(state["classes"]):
        raise CheckpointError(f"{checkpoint.path} was trained on other classes than its config names: it was changed")
    model = build_network(config.model, scheme.num_classes, with_weights=False)
    average = state.get("ema")
    try:
        model.load_state_dict(average["module"] if average is not None else state["model"])
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"{checkpoint.path} does not fit {config.model.name}: {error}") from None
    return TrainedState(model, config, scheme, checkpoint)


def _find_checkpoint(target: str) -> LoadedCheckpoint:
    path = Path(target)
    if path.is_file():
        return load_checkpoint(path)
    folder = find_run(target)
    try:
        return load_checkpoint(folder.path, "best")
    except CheckpointError:
        return load_checkpoint(folder.path)
