"""The result of one check of an own part, and how a failure in the user's code is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from segapp.custom.loading import shown_error
from segapp.errors import SegappError

NUM_CLASSES, IGNORED = 3, 255
"""What parts are tried with where no config says it."""


class NotTriedError(Exception):
    """A check that could not be carried out; its message has the reason."""


@dataclass(frozen=True)
class Check:
    """Result of one check of a part.

    Attributes:
        what: the statement that is checked.
        problem: what is wrong, the cost that a note names, or the reason why it was not tried; empty where it holds.
        kind: of the problem.
    """

    what: str
    problem: str = ""
    kind: Literal["failed", "note", "not tried"] = "failed"

    @property
    def mark(self) -> str:
        """The word in front of the line."""
        return {"failed": "FAILED", "note": "note", "not tried": "not tried"}[self.kind] if self.problem else "ok"


def tried(what: str, check: Callable[[], str | None]) -> Check:
    """Return the result of a check that returns its problem, or raises it."""
    try:
        return Check(what, check() or "")
    except NotTriedError as reason:
        return Check(what, str(reason), "not tried")
    except SegappError as error:
        return Check(what, str(error))
    except Exception as error:
        return Check(what, f"fails with {shown_error(error)}: correct it")
