"""Save and load the training state, and find the checkpoint that a training continues from.

`segapp.run.checkpoints` has the layout of the files and the commit protocol.

A checkpoint is a dict of tensors and plain values written by `torch.save`, so `torch.load(path, weights_only=True)` can
read it. It has at least `model`, the state dict without a `module.` prefix, and `checkpoint`, its facts (format, step,
epoch, position, metric), which stay in every copy of the file.
"""

import math
import os
import re
import shlex
import socket
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from segapp.checkpoint.snapshot import as_storable, find_non_finite, num_tensor_bytes
from segapp.config import RunConfig, resume_differences
from segapp.errors import CheckpointError, NonFiniteError, SegappError, accepted_words
from segapp.models.weights import load_mapped_tensors, load_tensors, peek_tensors
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import (
    BEST,
    FORMAT,
    LAST,
    CheckpointEntry,
    CheckpointFacts,
    CheckpointFolder,
    DamagedError,
    Manifest,
    open_if_intact,
)
from segapp.run.files import hash_file, machine_id, reason_of
from segapp.run.folder import RunFolder, run_of_file
from segapp.run.words import first_line

FINITE_PARTS = ("model", "ema", "optimizer", "distillation")
"""Parts of a state that must be finite for a commit."""

Reader = Callable[[BinaryIO], Any]
T = TypeVar("T")

_POSITION = ("step", "epoch", "position")
"""Facts of a checkpoint that must be equal in the file and in the manifest."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Result of `load_checkpoint`."""

    state: dict[str, Any]
    """The saved state, on the CPU."""
    path: Path
    sha256: str
    messages: tuple[str, ...]
    """Newer checkpoints that were skipped, with reasons, and other warnings; printed and emitted as alerts."""
    file: Path
    """The file that was read: `path`, or another intact file of the same checkpoint."""

    @property
    def step(self) -> int:
        return int(self.state["checkpoint"]["step"])

    @property
    def facts(self) -> CheckpointFacts:
        return CheckpointFacts.model_validate(self.state["checkpoint"])


def save_checkpoint(
    folder: Path | str,
    state: dict[str, Any],
    facts: CheckpointFacts,
    *,
    is_best: bool = False,
    finished_epoch: int | None = None,
    keep: int = 3,
) -> tuple[CheckpointEntry, Sequence[str]]:
    """Commit a checkpoint. Once the call returns, it survives a crash or a power cut; a failure never harms older ones.

    Args:
        folder: The run's `checkpoints` folder; the caller holds the run's lock.
        state: Has at least `model`, the bare state dict, is finite (`require_finite`), and must not change during the
            call: pass a `snapshot` if training continues.
        facts: Position and metric; a metric that is not finite is stored as None and is never the best.
        is_best: Also name it `best.pt`.
        finished_epoch: Also name it `epoch_0007.pt`, with this number.
        keep: Number of `epoch_*.pt` files that are kept.

    Returns:
        The entry of the checkpoint, and problems after the commit, which are reported as alerts.

    Raises:
        TypeError: the state has a value that is neither a tensor nor plain.
        StorageError: the file could not be written; older checkpoints are untouched.
    """
    metric = facts.metric if facts.metric is not None and math.isfinite(facts.metric) else None
    facts = facts.model_copy(update={"metric": metric})
    content = as_storable({**state, "checkpoint": {"format": FORMAT, **facts.model_dump()}})
    return CheckpointFolder(folder).commit(
        lambda file: torch.save(content, file),  # type: ignore[arg-type]
        facts,
        is_best=is_best and metric is not None,
        finished_epoch=finished_epoch,
        keep=keep,
        need_bytes=num_tensor_bytes(content),
    )


def require_finite(state: Mapping[str, Any]) -> None:
    """Raise NonFiniteError if the model, its average or the optimizer has a NaN or an infinity."""
    for part in FINITE_PARTS:
        place = find_non_finite(state.get(part), part)
        if place is not None:
            raise NonFiniteError(
                f"{place} is not finite: this checkpoint was not written, and the last good one was kept: "
                "lower the learning rate, or clip gradients",
                key="optim.lr",
            )


def load_checkpoint(source: Path | str, which: str = "auto", *, is_mapped: bool = False) -> LoadedCheckpoint:
    """Read a checkpoint and compare its sha256 with the manifest.

    Args:
        source: A run folder, its `checkpoints` folder, or a file. A file without an entry in a manifest (a copy
            elsewhere) is read if its own checksums match, with a warning.
        which: For a folder: `auto` reads the newest intact checkpoint and reports the skipped ones; `last`, `best` or
            a file name (`epoch_0007.pt`) reads that one or fails.
        is_mapped: The tensors are mapped from the file instead of loaded. The caller must not keep them: if the file is
            removed from a network file system, access to its pages ends the process.

    Raises:
        CheckpointError: none can be used; the message has the reason for each.
    """
    read = load_mapped_tensors if is_mapped else load_tensors
    path = Path(source)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        store = CheckpointFolder(folder)
        if which == "auto":
            return _load_newest_intact(store, read)
        name = {"last": LAST, "best": BEST}.get(which, which)
        return _load_named(store, name if name.endswith(".pt") else f"{name}.pt", read)
    return _load_file(path, read)


def on_main(ranks: Ranks, make: Callable[[], T]) -> T:
    """Return on every rank the result of `make` on the main rank, or raise its SegappError on every rank."""
    outcome: tuple[T | None, SegappError | None] = None, None
    if ranks.is_main:
        try:
            outcome = make(), None
        except SegappError as error:
            outcome = None, error
    result, problem = ranks.from_main(outcome)
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


def load_to_resume(
    ranks: Ranks, folder: RunFolder, *, is_resumed: bool, checkpoint: Path | None = None
) -> LoadedCheckpoint | None:
    """Return on every rank the state to resume, from a file or the newest intact checkpoint of an existing run.

    Returns None for a new training, or for a run that was stopped before its first save.

    No state is sent or held twice: the tensors are mapped from the file, and the ranks of a machine share its pages in
    the page cache. The hash is compared on the main rank's machine, and by the first rank of each other machine there.

    Raises:
        SegappError: no checkpoint can be read, or a rank does not see the same file; on every rank.
    """
    loaded: LoadedCheckpoint | None = None

    def load_on_main() -> tuple[LoadedCheckpoint, int] | None:
        nonlocal loaded
        store = CheckpointFolder(folder.checkpoints)
        if checkpoint is not None:
            loaded = load_checkpoint(checkpoint, is_mapped=True)
        elif is_resumed and store.is_untouched():
            print("the run has no checkpoint yet: it begins anew")
        elif is_resumed:
            loaded = _load_newest_intact(store, load_mapped_tensors, is_holder=True)
        # The state is left out, because each rank maps the file.
        return None if loaded is None else (replace(loaded, state={}), loaded.file.stat().st_size)

    facts = on_main(ranks, load_on_main)
    if facts is None or ranks.world_size == 1:
        return loaded
    main_checkpoint, num_bytes = facts
    path = main_checkpoint.file.resolve()
    machines = ranks.gather(machine_id())
    # The hash needs the whole file, which the ranks of a machine would otherwise read several times.
    is_first = machines.index(machines[ranks.rank]) == ranks.rank
    problem: SegappError | None = None
    if loaded is None:
        try:
            with open_if_intact(path, num_bytes, main_checkpoint.sha256 if is_first else None) as file:
                state = read_state(file, main_checkpoint.path, file.name, load_mapped_tensors)
                loaded = replace(main_checkpoint, state=state)
        except SegappError as error:
            problem = error
        except (DamagedError, OSError) as error:
            problem = CheckpointError(
                f"{main_checkpoint.file}: rank {ranks.rank}, on {socket.gethostname()}, does not see the checkpoint of "
                f"rank 0 ({reason_of(error)}): put it on a file system that all machines share",
                path=main_checkpoint.file,
            )
    # Every rank raises it, because the others would wait for the failed one in the next collective.
    if problem := ranks.first_of(problem):
        raise problem
    return loaded


def saved_state(folder: RunFolder | None, checkpoint: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the file that a training would resume from, and its state without the tensors.

    The file is `checkpoint`, or else the newest one of an existing run folder. Returns None for a new training, or if
    the state cannot be read: loading then falls back to an older checkpoint, or reports the damage.
    """
    path = checkpoint
    if path is None and folder is not None:
        store = CheckpointFolder(folder.checkpoints)
        path = next((store.objects / entry.object for entry in store.read_manifest().entries), None)
    try:
        state: Any = None if path is None else peek_tensors(path)
    except Exception:  # a damaged file shows as any of a dozen exceptions
        return None
    is_state = isinstance(state, dict) and all(key in state for key in ("config", "data", "classes"))
    return (path, state) if path is not None and is_state else None


def check_resumable(
    state: Mapping[str, Any], path: Path, config: RunConfig, num_train: int, classes: Sequence[str]
) -> None:
    """Raise CheckpointError with every difference that would change the course of the training."""
    saved = state.get("config")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} holds no config: it was not written by segapp train", path=path)
    differences = resume_differences(saved, config)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences)
        run = run_of_file(path)
        ways = f"or start a new run from its weights: model.weights={path}"
        if run is not None:
            ways = f"or continue the run as it is: segapp train --resume {shlex.quote(os.path.relpath(run.path))}"
        if any(line.startswith("optim.lr:") for line in differences):
            ways += "\n  another learning rate, while it trains: segapp ctl RUN set lr_factor=0.5"
        raise CheckpointError(
            f"{path} cannot be resumed with this config, because these keys differ (saved -> now):\n{shown}\n"
            f"  set them back, {ways}",
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


def _load_newest_intact(store: CheckpointFolder, read: Reader, *, is_holder: bool = False) -> LoadedCheckpoint:
    """Load the newest intact checkpoint; the holder of the run's lock sets damaged files aside and repairs aliases."""
    manifest = store.read_manifest()
    if not manifest.entries:
        files = sorted(path.name for path in store.path.glob("*.pt"))
        why = "; ".join(manifest.problems) or "nothing is committed there"
        hint = f"name a file to use it on its own checksums: {', '.join(files)}" if files else "start a new training"
        raise CheckpointError(f"{store.path}: no checkpoint to resume from: {why}: {hint}", path=store.path)
    messages = list(manifest.problems)
    damaged: list[CheckpointEntry] = []
    for entry in manifest.entries:
        label = manifest.describe(entry)
        try:
            state, file = _read_entry(store, entry, read)
        except DamagedError as error:
            damaged.append(entry)
            messages.append(f"{label} {error}")
        except (OSError, CheckpointError) as error:
            # A file that cannot be read now may be intact, so it is not set aside.
            messages.append(f"{label} cannot be used: {reason_of(error)}")
        else:
            messages += _alias_messages(store, manifest, entry, is_holder)
            if entry is not manifest.entries[0]:
                messages.append(f"went back to {label}")
            # Nothing is moved before an intact checkpoint is found: the damaged files may be all that is left.
            if is_holder:
                messages += store.quarantine(damaged) if damaged else store.repair_aliases()
            name = next(iter(manifest.names_of(entry)), None)
            path = store.path / name if name else store.objects / entry.object
            return LoadedCheckpoint(state, path, entry.sha256, tuple(messages), file)
    reasons = "".join(f"\n  {message}" for message in messages)
    raise CheckpointError(
        f"{store.path}: none of the {len(manifest.entries)} checkpoints can be used:{reasons}", path=store.path
    )


def _load_named(store: CheckpointFolder, name: str, read: Reader) -> LoadedCheckpoint:
    manifest = store.read_manifest()
    entry = manifest.entry_named(name)
    if entry is None:
        known = accepted_words(name, sorted(manifest.names))
        raise CheckpointError(f"{store.path / name}: there is no such checkpoint: {known}", path=store.path / name)
    try:
        state, file = _read_entry(store, entry, read)
    except (DamagedError, OSError) as error:
        raise CheckpointError(
            f"{store.path / name} {reason_of(error)}: use another, or `auto` for the newest intact one",
            path=store.path / name,
        ) from error
    messages = _alias_messages(store, manifest, entry, False)
    return LoadedCheckpoint(state, store.path / name, entry.sha256, tuple(messages), file)


def _load_file(path: Path, read: Reader) -> LoadedCheckpoint:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file: name a checkpoint file or a run", path=path)
    try:
        sha256, _ = hash_file(path)
        # A file in objects/ belongs to the manifest in the folder above.
        folder = path.parent.parent if path.parent.name == "objects" else path.parent
        manifest = CheckpointFolder(folder).read_manifest()
        is_verified = any(entry.sha256 == sha256 for entry in manifest.entries)
        if not is_verified and path.name in manifest.names:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is not the one in manifest.json: "
                f"resume the run itself ({folder.parent}) to use the newest intact one",
                path=path,
            )
        with open(path, "rb") as file:
            if not is_verified:
                _check_zip(file, path)
            state = read_state(file, path, str(path), read)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {reason_of(error)}: name a checkpoint file or a run", path=path
        ) from error
    warning = f"{path} is in no manifest: only the checksums inside the file were compared"
    return LoadedCheckpoint(state, path, sha256, () if is_verified else (warning,), path)


def _read_entry(store: CheckpointFolder, entry: CheckpointEntry, read: Reader) -> tuple[dict[str, Any], Path]:
    """Return the state of a checkpoint, and the intact file that was read."""
    with store.open_verified(entry) as file:
        state = read_state(file, store.path, f"step {entry.step}", read)
    about = state["checkpoint"]
    stored, listed = ({key: facts[key] for key in _POSITION} for facts in (about, entry.model_dump()))
    if stored != listed:
        said, found = (", ".join(f"{key} {value}" for key, value in facts.items()) for facts in (listed, stored))
        raise CheckpointError(f"manifest.json says {said}, the file says {found}", path=store.path)
    return state, Path(file.name)


def read_state(file: BinaryIO, path: Path, label: str, read: Reader = load_tensors) -> dict[str, Any]:
    """Return the dict in an open checkpoint file; raise CheckpointError for any other content.

    `path` and `label` are for the error; `read` is `load_tensors` or `load_mapped_tensors`.
    """
    try:
        state: Any = read(file)
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}", path=path) from error
    # A damaged pickle may raise any error.
    except Exception as error:
        raise CheckpointError(f"{label}: {_why_not_loaded(error)}", path=path) from error
    about = state.get("checkpoint") if isinstance(state, dict) else None
    if not isinstance(about, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(
            f"{label} is not a checkpoint of segapp (a dict with `model` and `checkpoint`): for bare weights, "
            "name the config of its model with --config",
            path=path,
        )
    if not isinstance(about.get("format"), int) or about["format"] > FORMAT:
        raise CheckpointError(
            f"{label} has format {about.get('format')}, this segapp reads up to {FORMAT}: install a newer segapp",
            path=path,
        )
    if not all(isinstance(about.get(key), int) for key in _POSITION):
        raise CheckpointError(f"{label} has no step, epoch and position: use another checkpoint", path=path)
    return dict(state)


def _why_not_loaded(error: Exception) -> str:
    text = str(error)
    refused = re.search(r"GLOBAL ([\w.]+)", text)
    if refused:
        return f"it holds more than tensors and plain values ({refused[1]}): refused, it could run code"
    return f"torch cannot read it ({type(error).__name__}: {first_line(error)[:200]})"


def _check_zip(file: BinaryIO, path: Path) -> None:
    """Compare the checksums inside the file, which torch writes but does not check."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}: use another copy", path=path) from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {damaged} does not match: use another copy", path=path
        )
    file.seek(0)


def _alias_messages(store: CheckpointFolder, manifest: Manifest, entry: CheckpointEntry, is_holder: bool) -> list[str]:
    """Return a message per alias of an intact checkpoint whose content differs; the lock holder repairs them."""
    names = store.mismatched_aliases(manifest, entry)
    messages = [f"{name} is damaged; step {entry.step} itself is intact" for name in names]
    return messages + (store.set_aside(names) if is_holder and names else [])
