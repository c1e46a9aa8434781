"""How a training ended: its outcome and exit code, and the error that tells a user what failed."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch.distributed as dist

from segapp.custom.loading import raised_at
from segapp.errors import (
    ConfigError,
    DistributedError,
    OutOfMemoryError,
    RunError,
    SegappError,
    StorageError,
    free_or,
)
from segapp.losses.additive import PlainLossError
from segapp.memory.oom import is_out_of_memory
from segapp.models.inspection import ONE_VALUE
from segapp.parallel.replica_threads import failed_replica
from segapp.training.signals import EXIT_STOPPED_AND_SAVED, StoppedBy, StopRequest

_OF_A_COLLECTIVE = re.compile(
    r"gloo|nccl|ProcessGroup|Connection closed by peer|Connection reset by peer", re.IGNORECASE
)


def is_of_lost_peer(error: BaseException) -> bool:
    """Return True for an exception of an exchange whose other end is gone; torch and gloo have no class for all."""
    return isinstance(error, (dist.DistError, ConnectionError)) or bool(_OF_A_COLLECTIVE.search(str(error)))


def as_segapp_error(error: Exception, parts: Mapping[str, str] = MappingProxyType({})) -> SegappError:
    """Return the error that tells a user what failed; an unexpected error becomes a RunError with its type.

    `parts` has the custom component of each key of the config.
    """
    if isinstance(error, SegappError):
        return error
    first = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return OutOfMemoryError(f"out of memory: {first}: lower train.batch_size or data.crop_px")
    if "does not have a deterministic implementation" in str(error):
        return ConfigError(
            f"train.deterministic = true: {first}: choose another model or loss, or set it to false",
            key="train.deterministic",
        )
    if ONE_VALUE in str(error):
        return ConfigError(
            "train.batch_size: a BatchNorm layer gets only one value per channel from a single image: give every "
            "device at least 2 images in each step, or choose another model",
            key="train.batch_size",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError(
            f"{error.filename or 'the run folder'}: {error.strerror}: {free_or('choose another folder', error)}"
        )
    if isinstance(error, PlainLossError):
        losses = " or ".join(f"{key} = {name}" for key, name in parts.items() if key.startswith("loss."))
        return RunError(f"{losses or 'the loss'}: {error}: segapp check-part --config FILE checks it").see("own-parts")
    # After the errors with a known cure, which a component may raise, too.
    place = raised_at(error, parts)
    if place is not None:
        part, line = place
        return RunError(
            f"{part} raised {type(error).__name__} at {line}: {first}: correct it; segapp check-part --config FILE "
            "shows the component in every way that a training uses it"
        ).see("own-parts")
    if is_of_lost_peer(error):
        return DistributedError("another rank does not answer: read its output, and stacks.log")
    replica = failed_replica(error)
    where = "" if replica is None else " in replica {} on {}".format(*replica)
    return RunError(f"unexpected {type(error).__name__}{where}: {first}")


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    status: Literal["finished", "stopped", "failed"]
    reason: str | None
    """None: the run was complete before."""
    exit_code: int = 0
    stopped_by: StoppedBy | None = None
    topic: str | None = None


def outcome_of(ended_by: BaseException | str | None, *, is_saved: bool, signal_number: int) -> Outcome:
    """Return how a training ended that raised `ended_by`, or returned it as the reason of its end."""
    match ended_by:
        case StopRequest() if is_saved:
            return Outcome("stopped", f"{ended_by}: a checkpoint was saved", EXIT_STOPPED_AND_SAVED, ended_by.by)
        case StopRequest():
            reason = f"{ended_by}: nothing was there to save yet"
            return Outcome("stopped", reason, 128 + signal_number, ended_by.by)
        case SegappError():
            reason = " ".join(str(ended_by).split())[:2000]
            return Outcome("failed", reason, ended_by.exit_code, topic=ended_by.topic)
        case BaseException():
            reason = f"{type(ended_by).__name__}: nothing was saved"
            return Outcome("stopped", reason, 128 + signal.SIGINT, "signal")
        case _:
            return Outcome("finished", ended_by)
