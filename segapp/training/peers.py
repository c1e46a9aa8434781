"""End this rank if another rank that it would wait for is gone: a process of this machine, or another machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from segapp.compat.torch import group_store
from segapp.errors import DistributedError
from segapp.parallel.distributed import Ranks
from segapp.parallel.launch import end_process, end_with_peers
from segapp.parallel.peer_watch import PeerWatch, peer_limit_s
from segapp.run.files import machine_id

logger = logging.getLogger("segapp")


class Peers:
    """The ranks of a job and, on one rank per machine, the watch over the other machines, which starts here.

    Args:
        rank: rank of this process.
        places: (machine, process id, host name) of every rank.
        store: store of the process group, with a separate connection.
        limit_s: seconds of silence after which a machine is lost; 0: they are not watched.

    Attributes:
        pids: (machine, process id) of every rank.
    """

    def __init__(
        self, rank: int, places: Sequence[tuple[str, int, str]], store: Callable[[], Any], limit_s: float
    ) -> None:
        self.pids = [(machine, pid) for machine, pid, _ in places]
        self._report: Callable[[str], None] = logger.error
        self._watch: PeerWatch | None = None
        here = places[rank][0]
        ranks_of: dict[str, list[int]] = {}
        for number, (machine, _, _) in enumerate(places):
            ranks_of.setdefault(machine, []).append(number)
        if limit_s > 0 and len(ranks_of) > 1 and ranks_of[here][0] == rank:
            job = f"segapp/alive/{places[0][0]}/{places[0][1]}"  # of this round, because all rounds may share the store
            others = {f"{job}/{machine}": _named(places, own) for machine, own in ranks_of.items() if machine != here}
            self._watch = PeerWatch(store(), f"{job}/{here}", others, self._lose, limit_s=limit_s)

    def _lose(self, reason: str) -> None:
        message = f"{reason}: its power or network connection failed, or it hangs"
        end_process(DistributedError.exit_code, lambda: self._tell(message))

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}; --resume continues from the newest checkpoint\n".encode())
        self._report(message)

    @contextlib.contextmanager
    def watched(self, report: Callable[[str], None]) -> Iterator[None]:
        """Run the body; end this process soon after a rank of this machine, or another machine, is gone.

        Args:
            report: called with the reason before the process ends.
        """
        here = machine_id()
        others = [pid for machine, pid in self.pids if machine == here and pid != os.getpid()]
        gone, self._report = "another rank ended while this rank waited for it: read the other rank's output", report
        code = DistributedError.exit_code
        end_watch = end_with_peers(others, code, lambda: self._tell(gone)) if others else lambda: None
        try:
            yield
            self.close(has_left=True)
        finally:
            end_watch()

    def close(self, *, has_left: bool = False) -> None:
        """End the watch over the other machines; with `has_left`, machines that still watch do not report this one."""
        if self._watch is not None:
            self._watch.stop(has_left=has_left)
            self._watch = None


def find_peers(ranks: Ranks) -> Peers:
    """Return the ranks of this job; every rank must call it.

    Raises:
        DistributedError: the variable with the time limit is no number.
    """
    try:
        limit_s = peer_limit_s()
    except ValueError as error:
        raise DistributedError(str(error)) from None
    return Peers(ranks.rank, ranks.gather((machine_id(), os.getpid(), socket.gethostname())), group_store, limit_s)


def _named(places: Sequence[tuple[str, int, str]], ranks: Sequence[int]) -> str:
    """Return "machine node2 (ranks 2 to 3)"."""
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"machine {places[ranks[0]][2]} ({numbers})"
