"""The checkpoint that a training continues from, and whether it can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segapp.checkpoint.training_state import LoadedCheckpoint, load_checkpoint
from segapp.config import RunConfig, resume_differences
from segapp.errors import CheckpointError
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.folder import RunFolder


def checkpoint_to_resume(
    folder: RunFolder, *, is_resumed: bool, checkpoint: Path | None = None
) -> LoadedCheckpoint | None:
    """Load the state to continue from; None for a new training, or for a run that was stopped before its first save.

    Args:
        folder: of the run.
        is_resumed: the folder was there before.
        checkpoint: the file to continue from; None: the folder's newest intact one.

    Raises:
        CheckpointError: no checkpoint can be read.
    """
    if checkpoint is not None:
        return load_checkpoint(checkpoint)
    if not is_resumed:
        return None
    if CheckpointFolder(folder.checkpoints).is_untouched():
        print("the run has no checkpoint yet: it begins anew")
        return None
    return load_checkpoint(folder.path, is_holder=True)


def check_resumable(checkpoint: LoadedCheckpoint, config: RunConfig, num_train: int, classes: list[str]) -> None:
    """Refuse to continue where the course of the training would change.

    Raises:
        CheckpointError: names every difference.
    """
    saved = checkpoint.state.get("config")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{checkpoint.path} holds no config: it was not written by segapp train")
    differences = resume_differences(saved, config)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences)
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed with this config, these keys differ (saved -> now):\n{shown}\n"
            "  put them back, or start a new run"
        )
    data: Any = checkpoint.state["data"]
    saved_classes = list(checkpoint.state["classes"])
    if data["num_train"] != num_train or saved_classes != classes:
        raise CheckpointError(
            f"{checkpoint.path} was trained on {data['num_train']} images of {len(saved_classes)} classes; data.root "
            f"now has {num_train} of {len(classes)}: put the data back, or start a new run"
        )
