"""The checkpoint that a training continues from, and whether it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segapp.build.pairs import build_scheme, count_images, split_names
from segapp.checkpoint.training_state import LoadedCheckpoint, load_checkpoint, newest_file, peek_state
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


def check_before_start(
    config: RunConfig, folder: RunFolder | None, checkpoint: Path | None, *, is_limited: bool = False
) -> None:
    """Refuse what could not be resumed, before anything in the run folder is changed.

    A state that cannot be read is not refused here: loading it goes back to an older one, or names the damage.

    Args:
        config: the requested config; an automatic batch is the one that was saved.
        folder: of the run, if it was there before.
        checkpoint: the file to continue from; None: the folder's newest.
        is_limited: a part of the images is used, so that their number says nothing.

    Raises:
        CheckpointError: the course of the training would change.
        DataError: the training images cannot be found.
    """
    path = checkpoint if checkpoint is not None or folder is None else newest_file(CheckpointFolder(folder.checkpoints))
    saved = None if path is None else peek_state(path)
    if path is None or saved is None:
        return
    if not config.train.batch_size or config.train.effective_batch_size is not None:
        kept = {key: saved["config"]["train"][key] for key in ("batch_size", "accumulate")}
        config = config.model_copy(update={"train": config.train.model_copy(update=kept)})
    classes = list(build_scheme(config.data).names)
    num_train = saved["data"]["num_train"] if is_limited else count_images(config.data, split_names(config.data)[0])
    _check_state(saved, path, config, num_train, classes)


def check_resumable(checkpoint: LoadedCheckpoint, config: RunConfig, num_train: int, classes: list[str]) -> None:
    """Refuse to continue where the course of the training would change.

    Raises:
        CheckpointError: names every difference.
    """
    _check_state(checkpoint.state, checkpoint.path, config, num_train, classes)


def _check_state(
    state: Mapping[str, Any], path: Path, config: RunConfig, num_train: int, classes: Sequence[str]
) -> None:
    saved = state.get("config")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} holds no config: it was not written by segapp train", path=path)
    differences = resume_differences(saved, config)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences)
        raise CheckpointError(
            f"{path} cannot be resumed with this config, these keys differ (saved -> now):\n{shown}\n"
            "  put them back, or start a new run",
            path=path,
        ).see("resume-refused")
    data: Any = state["data"]
    saved_classes = list(state["classes"])
    if data["num_train"] != num_train or saved_classes != list(classes):
        raise CheckpointError(
            f"{path} was trained on {data['num_train']} images of {len(saved_classes)} classes; data.root "
            f"now has {num_train} of {len(classes)}: put the data back, or start a new run",
            path=path,
        ).see("resume-refused")
