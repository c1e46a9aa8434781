"""Wishes for a running training, as files in its inbox; each gets exactly one final answer, as an event.

A sender writes `commands/<time>-<id>.json` under a temporary name and renames it. The trainer drains the inbox at its
next boundary, acts, writes the answer, and only then settles (removes) the file: after a crash in between, the file is
still there, and `read_answers` over the events tells which wishes are done already. So a wish is neither lost nor
done twice. Inbox 0700, files 0600; a file of another user, a link, a pipe or a large file is refused unread.
"""

import difflib
import getpass
import json
import math
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from segapp.errors import CommandError
from segapp.failpoints import failpoint
from segapp.run.files import TEMPORARY_PREFIX, fsync_directory, open_new, remove_quietly, temporary_name, write_all
from segapp.run.text import encodable, printable

MAX_COMMAND_BYTES = 64 * 2**10
"""A larger file in the inbox is refused unread."""

_MAX_DRAINED = 256
_FILE_NAME = re.compile(r"\d{20}-(?P<id>[0-9a-f]{12})\.json")


class _Command(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SetCommand(_Command):
    """Changes settings from the next epoch on; only the fields that were given are meant."""

    kind: Literal["set"] = "set"
    gpu0_bsz: int | Literal["auto"] | None = None
    """Samples of a full batch for device 0; None splits evenly, `auto` follows the measured memory."""
    lr_factor: float | None = None
    """Multiplies the schedule's learning rate; above 0, at most 100."""
    shares: list[int] | None = None
    """Samples of a full batch for each device: the long form of `gpu0_bsz`."""
    force: bool = False
    """Also a split that is not expected to fit."""

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that were given, with their values."""
        return {name: getattr(self, name) for name in SETTINGS if name in self.model_fields_set}

    @field_validator("gpu0_bsz", mode="before")
    @classmethod
    def _check_gpu0_bsz(cls, value: Any) -> Any:
        if value is None or value == "auto" or (type(value) is int and 0 <= value <= 2**20):
            return value
        raise ValueError(f"gpu0_bsz={value}: write a whole number from 0 up, none (an even split) or auto")

    @field_validator("lr_factor", mode="before")
    @classmethod
    def _check_lr_factor(cls, value: Any) -> Any:
        if type(value) in (int, float) and math.isfinite(value) and 0 < value <= 100:
            return float(value)
        raise ValueError(f"lr_factor={value}: write a number above 0, at most 100")

    @field_validator("shares", mode="before")
    @classmethod
    def _check_shares(cls, value: Any) -> Any:
        is_list = isinstance(value, list) and 0 < len(value) <= 1024
        if is_list and all(type(n) is int and 0 <= n <= 2**20 for n in value) and sum(value) > 0:
            return value
        raise ValueError(f"shares={value}: write one whole number from 0 up for each device, such as 2,3,3")

    @model_validator(mode="after")
    def _check_together(self) -> "SetCommand":
        if not self.changes:
            raise ValueError(f"set changes nothing: write set NAME=VALUE with NAME one of {', '.join(SETTINGS)}")
        if {"gpu0_bsz", "shares"} <= self.changes.keys():
            raise ValueError("gpu0_bsz and shares say the same thing: write one of them")
        return self


class PauseCommand(_Command):
    """Stops at the next micro-batch, keeps everything in memory."""

    kind: Literal["pause"] = "pause"


class ResumeCommand(_Command):
    """Goes on after a pause."""

    kind: Literal["resume"] = "resume"


class CheckpointCommand(_Command):
    """Saves a checkpoint at the next boundary."""

    kind: Literal["checkpoint"] = "checkpoint"


class StopCommand(_Command):
    """Saves and ends: at the next micro-batch (`now`) or after this epoch (`epoch`)."""

    kind: Literal["stop"] = "stop"
    when: Literal["now", "epoch"] = "now"


class CancelCommand(_Command):
    """Takes back what has not been applied yet."""

    kind: Literal["cancel"] = "cancel"
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{12}$")
    """The command to take back; None takes back every pending one."""


Command = SetCommand | PauseCommand | ResumeCommand | CheckpointCommand | StopCommand | CancelCommand

SETTINGS = ("gpu0_bsz", "lr_factor", "shares")
"""What `set` can change."""

COMMAND_NAMES = ("set", "pause", "resume", "checkpoint", "stop", "cancel")
"""The commands there are."""

_adapter: TypeAdapter[Command] = TypeAdapter(
    Annotated[Command, Field(discriminator="kind")], config=ConfigDict(defer_build=True)
)


@dataclass(frozen=True)
class ReceivedCommand:
    """A file of the inbox: a command, or the reason why it is none."""

    id: str
    """Of the command; for a file that carries none, its name made printable."""
    by: str
    """Who sent it: `alice@host`."""
    command: Command | None
    problem: str | None
    """Why it is refused; None for a command."""
    path: Path
    sent_s: float = 0.0

    @property
    def text(self) -> str:
        """As it would be typed, for the answer event."""
        return format_command(self.command) if self.command is not None else "?"


def parse_command(text: str) -> Command:
    """A command as a person types it.

    >>> parse_command("set gpu0_bsz=3").changes
    {'gpu0_bsz': 3}

    Args:
        text: `set gpu0_bsz=3`, `set gpu0_bsz=7 force`, `set gpu0_bsz=auto`, `set lr_factor=0.5`, `set shares=2,3,3`,
            `pause`, `resume`, `checkpoint`, `stop`, `stop epoch`, `cancel`, `cancel ID`.

    Raises:
        CommandError: what is not understood, with the accepted words and the nearest one.
    """
    word, *arguments = text.split() or [""]
    if word not in COMMAND_NAMES:
        names = ", ".join(COMMAND_NAMES)
        raise CommandError(f"{_shown(word) or 'nothing'}: no such command: use {names}{_nearest(word, COMMAND_NAMES)}")
    raw = _PARSERS[word](arguments)
    try:
        return _adapter.validate_python({"kind": word, **raw})
    except ValidationError as error:
        raise CommandError(_first_problem(error)) from None


def format_command(command: Command) -> str:
    """The text that `parse_command` reads back as this command."""
    if isinstance(command, SetCommand):
        words = [f"{name}={_format_value(value)}" for name, value in command.changes.items()]
        return " ".join(["set", *words, *(["force"] if command.force else [])])
    if isinstance(command, StopCommand):
        return "stop" if command.when == "now" else f"stop {command.when}"
    if isinstance(command, CancelCommand) and command.id is not None:
        return f"cancel {command.id}"
    return command.kind


def send_command(folder: Path | str, command: Command, by: str | None = None) -> str:
    """Puts a command into a run's inbox.

    Args:
        folder: The run folder.
        command: What is wished.
        by: Who wishes it; `user@host` when None.

    Returns:
        The command's id, which its answers carry.

    Raises:
        CommandError: the inbox cannot be written to.
    """
    inbox = Path(folder) / "commands"
    command_id, now_s = secrets.token_hex(6), time.time()
    body = {
        "v": 1,
        "id": command_id,
        "by": encodable(by or sender())[:200],
        "t": round(now_s, 6),
        "command": command.model_dump(exclude_unset=True) | {"kind": command.kind},
    }
    temporary = inbox / temporary_name()
    try:
        fd = open_new(temporary, 0o600)
        try:
            write_all(fd, json.dumps(body, allow_nan=False).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        failpoint("command.before_rename")
        os.rename(temporary, inbox / f"{int(now_s * 1e9):020d}-{command_id}.json")
        fsync_directory(inbox)
    except OSError as error:
        remove_quietly(temporary)
        raise CommandError(
            f"cannot send to {folder}: {error.strerror or error}: only the user who runs the training can"
        ) from error
    return command_id


def drain_commands(folder: Path | str, handled: Container[str] = ()) -> list[ReceivedCommand]:
    """What lies in the inbox, in the order in which it was sent; nothing is removed yet.

    Never raises: what is wrong with a file is in its `ReceivedCommand`.

    Args:
        folder: The run folder.
        handled: Ids not to be given again: those given before, and after a restart those answered already
            (`segapp.run.events.read_answers`).

    Returns:
        At most 256; the rest comes with the next call.
    """
    inbox = Path(folder) / "commands"
    try:
        names = sorted(name for name in os.listdir(inbox) if not name.startswith(TEMPORARY_PREFIX))
    except OSError:
        return []
    received = []
    for name in names:
        if _id_of(name) not in handled:
            received.append(_receive(inbox / name))
            if len(received) == _MAX_DRAINED:
                break
    return received


def remove_command(received: ReceivedCommand) -> None:
    """Removes a command's file, after its final answer was written; that it is gone already is fine."""
    remove_quietly(received.path)


def remove_answered(folder: Path | str, answered: Container[str]) -> int:
    """Removes the files of commands that were answered before a crash.

    Args:
        folder: The run folder.
        answered: Ids with a final answer (`segapp.run.events.read_answers`).

    Returns:
        How many there were.
    """
    done = [received for received in drain_commands(folder) if received.id in answered]
    for received in done:
        remove_command(received)
    return len(done)


def sender() -> str:
    """Who is asking: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _parse_set(arguments: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for argument in arguments:
        if argument == "force":
            raw["force"] = True
            continue
        name, equals, value = argument.partition("=")
        if name not in SETTINGS:
            raise CommandError(
                f"set {_shown(name)}: no such setting: use {', '.join(SETTINGS)}{_nearest(name, SETTINGS)}"
            )
        if not equals or not value:
            raise CommandError(f"set {name}: what value? write set {name}=VALUE")
        if name in raw:
            raise CommandError(f"set {name}: given twice: write it once")
        raw[name] = _parse_value(name, value)
    return raw


def _parse_value(name: str, text: str) -> Any:
    if name == "shares":
        return [_number(part) for part in text.strip("[]()").split(",")]
    if name == "gpu0_bsz" and text.lower() in ("none", "null", "even"):
        return None
    return _number(text)


def _number(text: str) -> int | float | str:
    """The number a text stands for, or the text itself, for the check that follows to name."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text) and len(text) < 64:
        return float(text)
    return _shown(text)


def _parse_stop(arguments: list[str]) -> dict[str, Any]:
    if not arguments:
        return {}
    when = arguments[0].removeprefix("when=")
    if len(arguments) > 1 or when not in ("now", "epoch"):
        raise CommandError(f"stop {_shown(' '.join(arguments))}: write stop, stop now or stop epoch")
    return {"when": when}


def _parse_cancel(arguments: list[str]) -> dict[str, Any]:
    if not arguments:
        return {}
    command_id = arguments[0].removeprefix("id=")
    if len(arguments) > 1 or not re.fullmatch(r"[0-9a-f]{12}", command_id):
        raise CommandError(f"cancel {_shown(' '.join(arguments))}: write cancel, or cancel and the id of one command")
    return {"id": command_id}


def _parse_bare(word: str) -> Callable[[list[str]], dict[str, Any]]:
    def parse(arguments: list[str]) -> dict[str, Any]:
        if arguments:
            raise CommandError(f"{word} {_shown(' '.join(arguments))}: {word} takes nothing more: write {word}")
        return {}

    return parse


_PARSERS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "set": _parse_set,
    "stop": _parse_stop,
    "cancel": _parse_cancel,
    "pause": _parse_bare("pause"),
    "resume": _parse_bare("resume"),
    "checkpoint": _parse_bare("checkpoint"),
}


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)


def _nearest(word: str, words: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, words, 1, 0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    message = str(problem["msg"]).removeprefix("Value error, ")
    place = ".".join(str(part) for part in problem["loc"])
    return message if problem["type"] == "value_error" else f"{printable(place)}: {message}"


def _id_of(name: str) -> str:
    match = _FILE_NAME.fullmatch(name)
    return match["id"] if match else _shown(name)


def _receive(path: Path) -> ReceivedCommand:
    command_id = _id_of(path.name)
    try:
        content = _read_own_file(path)
        by, sent_s, command = _parse_envelope(content, command_id)
    except CommandError as error:
        return ReceivedCommand(command_id, "?", None, str(error), path)
    except OSError as error:
        return ReceivedCommand(command_id, "?", None, f"cannot be read: {error.strerror or error}", path)
    return ReceivedCommand(command_id, by, command, None, path, sent_s)


def _read_own_file(path: Path) -> bytes:
    """The content of a small regular file of this user (or of root).

    Raises:
        CommandError: it is something else.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise CommandError("not a regular file")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise CommandError("not a regular file")
        if facts.st_uid not in (os.geteuid(), 0):
            raise CommandError(f"written by another user (uid {facts.st_uid})")
        if facts.st_size > MAX_COMMAND_BYTES:
            raise CommandError(f"too large: {facts.st_size} bytes, {MAX_COMMAND_BYTES} are accepted")
        return os.read(fd, MAX_COMMAND_BYTES + 1)
    finally:
        os.close(fd)


def _parse_envelope(content: bytes, command_id: str) -> tuple[str, float, Command]:
    try:
        raw = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise CommandError(f"not JSON: {_shown(str(error))}") from None
    if not isinstance(raw, dict) or raw.get("v") != 1:
        raise CommandError("not a command of version 1")
    if raw.get("id") != command_id:
        raise CommandError("its id is not the one in its file name")
    sent_s, by = raw.get("t"), raw.get("by")
    if type(sent_s) not in (int, float) or not isinstance(by, str):
        raise CommandError("it does not say who sent it and when")
    try:
        return by[:200], float(sent_s), _adapter.validate_python(raw.get("command"))  # type: ignore[arg-type]
    except (ValidationError, OverflowError) as error:
        reason = _first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise CommandError(_shown_long(reason)) from None


def _shown_long(text: str) -> str:
    return printable(text)[:500]
