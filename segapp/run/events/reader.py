"""Reads events.jsonl while it is being written, and waits for the answer to a command."""

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from segapp.run.events.decode import StepRun, is_known, last_line_end, parse_event, parse_line, skim_block
from segapp.run.events.types import (
    FINAL_STATUSES,
    MAX_LINE_BYTES,
    Event,
)


class EventReader:
    """Reads a growing `events.jsonl` in pieces; any content is safe.

    A last line without a newline is read once it is complete. Lines that are damaged, of an unknown type or of another
    version are skipped and counted. A missing file reads as empty.

    Args:
        path: The file.
        from_end: Skip the present content (to wait for an answer).
    """

    def __init__(self, path: Path | str, *, from_end: bool = False) -> None:
        self.path = Path(path)
        self.generation = 0
        """Increases when the file was replaced, truncated or removed: what was read before is void."""
        self.num_bad = 0
        """Damaged lines skipped."""
        self.num_unknown = 0
        """Lines of an unknown type or version skipped."""
        self._fd = -1
        self._offset = 0
        self._is_skipping = False
        if from_end and self._follow():
            self._offset = last_line_end(self._fd)

    def read(self, max_bytes: int | None = None) -> list[Event]:
        """Return the events written since the last call, parsed and validated.

        Args:
            max_bytes: Read about this much at most; None reads to the end.
        """
        events = []
        for raw in self.read_raw(max_bytes):
            try:
                events.append(parse_event(raw))
            except ValidationError:
                self.num_bad += 1
        return events

    def read_raw(self, max_bytes: int | None = None) -> list[dict[str, Any]]:
        """Return the events written since the last call as dicts: about ten times as fast as `read`.

        Each has `v`, `seq`, `t` and a known `type`; the other fields are not validated.

        Args:
            max_bytes: Read about this much at most; None reads to the end.
        """
        return [raw for block in self._blocks(max_bytes) for raw in self._parse_block(block)]

    def read_skimmed(self, max_bytes: int | None = None) -> list[dict[str, Any] | StepRun]:
        """Like `read_raw`, but with consecutive `step` events reduced to their curve: for long histories.

        Args:
            max_bytes: Read about this much at most; None reads to the end.
        """
        items: list[dict[str, Any] | StepRun] = []
        for block in self._blocks(max_bytes):
            for part in [block] if self._is_skipping else skim_block(block):
                if isinstance(part, StepRun):
                    items.append(part)
                else:
                    items.extend(self._parse_block(part))
        return items

    def read_column(self, field: re.Pattern[bytes], max_bytes: int | None = None) -> list[tuple[float, int, float]]:
        """Return time, step and value of a number in the new `step` events; nan where it was null.

        Args:
            field: From `step_column`.
            max_bytes: Read about this much at most; None reads to the end.
        """
        found = []
        for block in self._blocks(max_bytes):
            for t, step, value in field.findall(block):
                with contextlib.suppress(ValueError):  # such as 1.2.3
                    found.append((float(t), int(step), math.nan if value == b"null" else float(value)))
        return found

    @property
    def num_bytes_left(self) -> int:
        """Bytes of the file that were not read yet."""
        return max(0, os.fstat(self._fd).st_size - self._offset) if self._follow() else 0

    def close(self) -> None:
        """Close the file; the next read opens it again and continues, if it is still the same file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def _blocks(self, max_bytes: int | None) -> Iterator[bytes]:
        """Yield whole lines from the current offset, at most a few megabytes at a time."""
        if not self._follow():
            return
        left = max_bytes if max_bytes is not None else os.fstat(self._fd).st_size - self._offset
        left = max(left, 1)
        while left > 0:
            block = self._read_block(min(left, 4 * 2**20))
            if not block:
                return
            left -= len(block)
            yield block

    def _follow(self) -> bool:
        """Open the file, again if the path now names another one; return False if there is none."""
        try:
            there = os.stat(self.path)
        except OSError:
            if self._fd >= 0:
                self._start_again()
            return False
        if self._fd >= 0:
            here = os.fstat(self._fd)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < self._offset:
                self._start_again()
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                return False
        return True

    def _start_again(self) -> None:
        self.close()
        self.generation += 1
        self._offset = 0
        self._is_skipping = False

    def _read_block(self, num_bytes: int) -> bytes:
        """Return whole lines from the current offset, at least one if there is one, else empty bytes."""
        while True:
            try:
                block = os.pread(self._fd, num_bytes, self._offset)
            except OSError:
                return b""
            end = block.rfind(b"\n") + 1
            if end:
                self._offset += end
                return block[:end]
            if len(block) < num_bytes:
                return b""
            if num_bytes > MAX_LINE_BYTES:
                self._is_skipping = True
                self._offset += len(block)
                num_bytes = 4 * 2**20
            else:
                num_bytes *= 4

    def _parse_block(self, block: bytes) -> Iterator[dict[str, Any]]:
        lines = block.split(b"\n")
        lines.pop()
        if self._is_skipping:
            self._is_skipping = False
            self.num_bad += 1
            del lines[0]
        for line in lines:
            raw = parse_line(line)
            if raw is None:
                self.num_bad += 1
            elif not is_known(raw):
                self.num_unknown += 1
            else:
                yield raw


def read_answers(raws: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the final answers (id -> status) among the events of `EventReader.read_raw`."""
    return {
        raw["id"]: raw["status"]
        for raw in raws
        if raw["type"] == "command" and raw.get("status") in FINAL_STATUSES and isinstance(raw.get("id"), str)
    }
