"""A checkpoint on every rank, for rank_checks.py: machines that see its file, other bytes, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from segapp.checkpoint import training_state
from segapp.checkpoint.training_state import save_checkpoint
from segapp.errors import SegappError
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import CheckpointFacts
from segapp.run.folder import RunFolder


def shared_checkpoints(ranks: Ranks, folder: Path) -> dict[str, list[Any]]:
    """Return what each rank gets in each case: the kind of the outcome, and the tensors' largest difference."""
    torch.manual_seed(0)
    state: dict[str, Any] = {
        "model": {"a": torch.randn(300, 400), "b": torch.randn(7).double()},
        "rng": [torch.arange(5)],
        "is": True,
    }
    if ranks.is_main:
        save_checkpoint(folder, state, CheckpointFacts(step=3, epoch=1))
    found: dict[str, list[Any]] = {}
    real = training_state.open_if_intact

    def note(case: str, *, is_elsewhere: bool, sees: bytes | None = b"") -> None:
        """Load with this rank on a machine of its own or not, where its file ends in other bytes or is missing."""

        def opened(path: Path, *facts: Any) -> Any:
            own = path if sees == b"" or ranks.is_main else folder / f"seen by {ranks.rank}"
            if sees and own != path:
                own.write_bytes(path.read_bytes()[: -len(sees)] + sees)
            elif own != path:
                own.unlink(missing_ok=True)
            return real(own, *facts)

        machine = f"machine-{ranks.rank if is_elsewhere else 0}"
        with mock.patch.multiple(training_state, machine_id=lambda: machine, open_if_intact=opened):
            try:
                loaded = training_state.load_to_resume(ranks, RunFolder(folder.parent), is_resumed=True)
            except SegappError as error:
                own: list[Any] = [type(error).__name__, str(error).replace(str(folder), "")]
            else:
                assert loaded is not None
                assert (loaded.step, loaded.state["is"]) == (3, True)
                weights = loaded.state["model"].items()
                own = [maps(folder), max(float((state["model"][k] - each).abs().max()) for k, each in weights)]
            found[case] = ranks.gather(own)

    note("one machine", is_elsewhere=False)
    note("two machines", is_elsewhere=True)
    note("other bytes there", is_elsewhere=True, sees=b"?")
    note("other bytes on the same machine", is_elsewhere=False, sees=b"?")
    note("no file there", is_elsewhere=True, sees=None)
    note("no file on one machine", is_elsewhere=False, sees=None)
    return found


def maps(folder: Path) -> str:
    """Return "checkpoint" if this process has mapped a file of a folder, else nothing."""
    return "checkpoint" if str(folder) in Path("/proc/self/maps").read_text() else ""
