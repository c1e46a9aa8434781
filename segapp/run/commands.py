"""Commands to a running training: their types, their text form, and the inbox of files that carries them.

A sender writes `commands/<time>-<id>.json` under a temporary name and renames it. The trainer reads the inbox at its
next boundary, carries the command out, writes exactly one final answer as an event, and then removes the file. After a
crash in between, the file still exists, and `read_answers` finds the answered commands in the events, so a command is
neither lost nor carried out twice. Only the owner can write to the inbox, and whoever may read the run may read it; a
file of another user, a link, a pipe or a large file is refused unread.
"""

import getpass
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from segapp.chunks import SPLIT_NAMES, SplitRequest
from segapp.errors import CommandError, accepted_words
from segapp.run.files import TEMPORARY_PREFIX, read_of_run, reason_of, remove_quietly, write_atomic
from segapp.run.words import encodable, printable

MAX_COMMAND_BYTES = 64 * 2**10
"""Larger files in the inbox are refused unread."""

MAX_WAITING = 1000
"""Number of files that may wait in the inbox; more `set` and `checkpoint` commands are refused."""

_MAX_READ_S = 3.0
_FILE_NAME = re.compile(r"\d{20}-(?P<id>[0-9a-f]{12})\.json")


class _Command(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SetCommand(_Command):
    """Change settings from the next epoch on; only the given fields change."""

    kind: Literal["set"] = "set"
    gpu0_bsz: int | Literal["auto"] | None = None
    """Samples of device 0 in a full batch; None: an even split; `auto`: follow the measured memory."""
    lr_factor: float | None = None
    """Factor on the scheduled learning rate; above 0, at most 100."""
    recompute: Literal["config", "off", "all"] | None = None
    """Blocks that are recomputed in the backward pass; config: the blocks that `train.recompute` names."""
    shares: list[int] | None = None
    """Samples of each device in a full batch: the long form of `gpu0_bsz`."""
    force: bool = False
    """Accept a split that is not expected to fit."""

    @property
    def changes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS if name in self.model_fields_set}

    @property
    def split(self) -> SplitRequest | Literal["auto"] | None:
        """The split that it requests; None if it requests none."""
        if self.gpu0_bsz == "auto":
            return "auto"
        is_split = not SPLIT_NAMES.isdisjoint(self.changes)
        return SplitRequest(self.gpu0_bsz, self.shares) if is_split else None

    @property
    def new_settings(self) -> dict[str, Any]:
        """The new values of the run's `LiveSettings`, by name."""
        others = {name: value for name, value in self.changes.items() if name != "gpu0_bsz"}
        return {**others, "gpu0_bsz_auto": True} if self.split == "auto" else self.changes

    @field_validator("gpu0_bsz", mode="before")
    @classmethod
    def _check_gpu0_bsz(cls, value: Any) -> Any:
        if value is None or value == "auto" or (type(value) is int and 0 <= value <= 2**20):
            return value
        raise ValueError(f"gpu0_bsz={value}: write a whole number from 0 to 2^20, none (an even split) or auto")

    @field_validator("lr_factor", mode="before")
    @classmethod
    def _check_lr_factor(cls, value: Any) -> Any:
        if type(value) in (int, float) and math.isfinite(value) and 0 < value <= 100:
            return float(value)
        raise ValueError(f"lr_factor={value}: write a number above 0, at most 100")

    @field_validator("recompute", mode="before")
    @classmethod
    def _check_recompute(cls, value: Any) -> Any:
        if value in ("config", "off", "all"):
            return value
        raise ValueError(f"recompute={value}: write off, all, or config (the value of train.recompute)")

    @field_validator("shares", mode="before")
    @classmethod
    def _check_shares(cls, value: Any) -> Any:
        is_list = isinstance(value, list) and 0 < len(value) <= 1024
        if is_list and all(type(n) is int and 0 <= n <= 2**20 for n in value) and sum(value) > 0:
            return value
        given = ",".join(map(str, value)) if isinstance(value, list) else value
        raise ValueError(f"shares={given}: write one whole number from 0 up for each device, such as 2,3,3")

    @model_validator(mode="after")
    def _check_together(self) -> "SetCommand":
        if not self.changes:
            raise ValueError(f"set changes nothing: write set NAME=VALUE, NAME one of {', '.join(SETTINGS)}")
        if self.changes.keys() >= SPLIT_NAMES:
            raise ValueError("gpu0_bsz and shares both set the split: write one of them")
        return self


class PauseCommand(_Command):
    """Pause at the next micro-batch; everything stays in memory."""

    kind: Literal["pause"] = "pause"


class ResumeCommand(_Command):
    """Continue after a pause."""

    kind: Literal["resume"] = "resume"


class CheckpointCommand(_Command):
    """Save a checkpoint at the next boundary."""

    kind: Literal["checkpoint"] = "checkpoint"


class StopCommand(_Command):
    """Save a checkpoint and end: at the next micro-batch (`now`) or after this epoch (`epoch`)."""

    kind: Literal["stop"] = "stop"
    when: Literal["now", "epoch"] = "now"


class CancelCommand(_Command):
    """Cancel commands that are accepted but not yet applied."""

    kind: Literal["cancel"] = "cancel"
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{12}$")
    """The command to cancel; None: every pending one."""


Command = SetCommand | PauseCommand | ResumeCommand | CheckpointCommand | StopCommand | CancelCommand

SETTINGS = ("gpu0_bsz", "lr_factor", "recompute", "shares")
"""The settings that `set` can change."""

COMMAND_NAMES = ("set", "pause", "resume", "checkpoint", "stop", "cancel")
"""The first words of the commands."""

_adapter: TypeAdapter[Command] = TypeAdapter(
    Annotated[Command, Field(discriminator="kind")], config=ConfigDict(defer_build=True)
)


@dataclass(frozen=True)
class ReceivedCommand:
    """A file of the inbox: a command, or the reason why it is refused."""

    id: str
    """Id of the command; for a file without one, the printable form of its name."""
    by: str
    """The sender: `alice@host`."""
    command: Command | None
    problem: str | None
    """Why the file is refused; None for a command."""

    @property
    def text(self) -> str:
        """The command as it is typed, for the answer event; `?` for a refused file."""
        return format_command(self.command) if self.command is not None else "?"


def parse_command(text: str) -> Command:
    """Parse a command as it is typed.

    `set gpu0_bsz=3`, `set gpu0_bsz=7 --force`, `set gpu0_bsz=auto`, `set lr_factor=0.5`, `set recompute=off`,
    `set shares=2,3,3`, `pause`, `resume`, `checkpoint`, `stop`, `stop epoch`, `cancel`, `cancel ID`.

    >>> parse_command("set gpu0_bsz=3").changes
    {'gpu0_bsz': 3}

    Raises:
        CommandError: The text is not a command; the message lists the accepted words and the nearest one.
    """
    word, *arguments = text.split() or [""]
    if word not in COMMAND_NAMES:
        raise CommandError(
            f"{_shown(word) or 'nothing'}: no such command: {accepted_words(word, COMMAND_NAMES)}", value=word
        )
    raw = _parse_set(arguments) if word == "set" else _parse_argument(word, arguments)
    try:
        return _adapter.validate_python({"kind": word, **raw})
    except ValidationError as error:
        raise CommandError(_first_problem(error)) from None


def parse_setting(name: str, text: str) -> SetCommand:
    """Return the command that changes one setting to the value in a text, which holds nothing else.

    >>> parse_setting("gpu0_bsz", " 3 ").changes
    {'gpu0_bsz': 3}

    Raises:
        CommandError: The text is no value of the setting.
    """
    try:
        return SetCommand.model_validate({name: _parse_value(name, text.strip())})
    except ValidationError as error:
        raise CommandError(_first_problem(error)) from None


def format_command(command: Command) -> str:
    """Return the text that `parse_command` reads back as this command."""
    if isinstance(command, SetCommand):
        words = [f"{name}={_format_value(value)}" for name, value in command.changes.items()]
        return " ".join(["set", *words, *(["--force"] if command.force else [])])
    if isinstance(command, StopCommand):
        return "stop" if command.when == "now" else f"stop {command.when}"
    if isinstance(command, CancelCommand) and command.id is not None:
        return f"cancel {command.id}"
    return command.kind


def send_command(folder: Path | str, command: Command, by: str | None = None) -> str:
    """Put a command into a run's inbox, and return its id, which its answers contain; CommandError if that fails."""
    inbox = Path(folder) / "commands"
    num_waiting = len(_names_in(inbox))
    # A stop must reach the run in any case.
    if num_waiting >= MAX_WAITING and command.kind in ("set", "checkpoint"):
        why = f"{num_waiting} files wait in {inbox}, and at most {MAX_WAITING} may"
        raise CommandError(f"{command.kind} was not sent: {why}: wait for their answers, or remove them", path=folder)
    command_id, now_s = secrets.token_hex(6), time.time()
    body = {
        "v": 1,
        "id": command_id,
        "by": encodable(by or sender())[:200],
        "t": round(now_s, 6),
        "command": command.model_dump(exclude_unset=True) | {"kind": command.kind},
    }
    # The time comes first, so that the names sort in the order of sending.
    path = inbox / f"{int(now_s * 1e9):020d}-{command_id}.json"
    try:
        write_atomic(path, json.dumps(body, allow_nan=False), point="command")
    except OSError as error:
        raise CommandError(
            f"cannot send to {folder}: {error.strerror or error}: send as the user who runs the training", path=folder
        ) from error
    return command_id


def drain_commands(folder: Path | str, handled: Container[str] = ()) -> list[ReceivedCommand]:
    """Return the commands in the inbox, in the order in which they were sent; no file is removed.

    It never raises: the problem of a file is in its `ReceivedCommand`. The ids in `handled` are left out: ids that were
    returned before and, after a restart, ids that are answered (`segapp.run.events.read_answers`).

    If more than `MAX_WAITING` files wait, the newer ones are refused, except `stop`, `pause`, `resume` and `cancel`;
    and of these, `stop`, `pause` and `resume` are returned by a call of their own, before all others.
    """
    inbox = Path(folder) / "commands"
    by_id = {command_id: name for name in reversed(_names_in(inbox)) if (command_id := _id_of(name)) not in handled}
    names, deadline_s = sorted(by_id.values()), time.monotonic() + _MAX_READ_S  # a copy of a command is left out
    is_flood = len(names) > MAX_WAITING
    # Of a flood, there may be no time to read all, and whoever answers it with a command sends the newest.
    ordered = reversed(names) if is_flood else names
    read = {name: _receive(inbox / name) for name in ordered if time.monotonic() < deadline_s}
    commands = [read[name] for name in names if name in read]
    if not is_flood:
        return commands
    if urgent := [each for each in commands if each.text in ("stop", "pause", "resume")]:
        return urgent
    why = f"{len(names)} files wait in the inbox, and at most {MAX_WAITING} may: send it again when they are answered"
    newer = set(names[MAX_WAITING:])
    return [
        replace(each, command=None, problem=why)
        if name in newer and not each.text.startswith(("stop", "cancel"))
        else each
        for name, each in sorted(read.items())
    ]


def remove_answered(folder: Path | str, answered: Container[str], limit_s: float = math.inf) -> bool:
    """Remove the files of commands whose final answers were written; return False if there was no time for all.

    The limit grows with their number beyond 5000, because the list of so many files takes long each time.
    """
    inbox = Path(folder) / "commands"
    names = [name for name in _names_in(inbox) if _id_of(name) in answered]
    deadline_s = time.monotonic() + limit_s * max(1.0, len(names) / 5000)
    for name in names:
        if time.monotonic() > deadline_s:
            return False
        remove_quietly(inbox / name)
    return True


def sender() -> str:
    """Return the sender of this process's commands: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _parse_set(arguments: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for argument in arguments:
        if argument == "--force":
            raw["force"] = True
            continue
        name, equals, value = argument.partition("=")
        if name not in SETTINGS:
            raise CommandError(f"set {_shown(name)}: no such setting: {accepted_words(name, SETTINGS)}", value=name)
        if not equals or not value:
            raise CommandError(f"set {name}: no value: write set {name}=VALUE", value=name)
        if name in raw:
            raise CommandError(f"set {name} is given twice: write it once", value=name)
        raw[name] = _parse_value(name, value)
    return raw


def _parse_value(name: str, text: str) -> Any:
    if name == "shares":
        return [_number(part) for part in text.strip("[]()").split(",")]
    word = text.lower()
    if name == "gpu0_bsz" and word in ("none", "null", "even"):
        return None
    return _number(word)


def _number(text: str) -> int | float | str:
    """Return the number in a text; if there is none, return the text, which the validation then reports."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    is_long = re.fullmatch(r"[+-]?[0-9]+", text) is not None  # as a float it would be another number
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text) and len(text) < 64 and not is_long:
        return float(text)
    return _shown(text)


_OPTIONAL_ARGUMENTS = {
    "stop": ("when", "now|epoch", "stop, stop now or stop epoch"),
    "cancel": ("id", "[0-9a-f]{12}", "cancel, or cancel and the id of one command"),
}
"""Command -> name and pattern of its one optional argument, and what to write."""


def _parse_argument(word: str, arguments: list[str]) -> dict[str, Any]:
    if not arguments:
        return {}
    shown = _shown(" ".join(arguments))
    if word not in _OPTIONAL_ARGUMENTS:
        raise CommandError(f"{word} {shown}: {word} takes no argument: write {word}", value=shown)
    name, pattern, usage = _OPTIONAL_ARGUMENTS[word]
    value = arguments[0].removeprefix(f"{name}=")
    if len(arguments) > 1 or not re.fullmatch(pattern, value):
        raise CommandError(f"{word} {shown}: write {usage}", value=shown)
    return {name: value}


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    is_id = problem["type"] == "string_pattern_mismatch"  # of the only pattern, without its regular expression
    message = "12 hexadecimal digits are expected" if is_id else str(problem["msg"]).removeprefix("Value error, ")
    place = ".".join(str(part) for part in problem["loc"])
    return message if problem["type"] == "value_error" else f"{printable(place)}: {message}"


def _id_of(name: str) -> str:
    match = _FILE_NAME.fullmatch(name)
    return match["id"] if match else printable(name)


def _names_in(inbox: Path) -> list[str]:
    """Return the names of the files in an inbox in order, without those that are being written."""
    try:
        return sorted(name for name in os.listdir(inbox) if not name.startswith(TEMPORARY_PREFIX))
    except OSError:
        return []


def _receive(path: Path) -> ReceivedCommand:
    command_id = _id_of(path.name)
    try:
        by, command = _parse_envelope(read_of_run(path, MAX_COMMAND_BYTES), command_id)
    except (CommandError, OSError) as error:
        return ReceivedCommand(command_id, "?", None, reason_of(error))
    return ReceivedCommand(command_id, by, command, None)


def _parse_envelope(content: bytes, command_id: str) -> tuple[str, Command]:
    try:
        raw = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise CommandError(f"not JSON: {_shown(str(error))}") from None
    if not isinstance(raw, dict) or raw.get("v") != 1:
        raise CommandError("not a command of version 1")
    # Answers are found by the id, and answered files by their names.
    if raw.get("id") != command_id:
        raise CommandError("its id is not the one in its file name")
    by = raw.get("by")
    if type(raw.get("t")) not in (int, float) or not isinstance(by, str):
        raise CommandError("its sender or time is missing")
    try:
        return by[:200], _adapter.validate_python(raw.get("command"))
    except ValidationError as error:
        raise CommandError(printable(_first_problem(error))[:500]) from None
