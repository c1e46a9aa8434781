"""The table of keys; bindings, key bar, help page and command palette are built from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from textual.binding import Binding
from textual.content import Content

_SHOWN = {
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "slash": "/",
    "left": "←",
    "right": "→",
    "escape": "esc",
    "plus": "+",
    "minus": "-",
}
_ASCII = {"←": "left", "→": "right"}


class Key(NamedTuple):
    """One action and its keys."""

    action: str
    """Name of the app's action; its `binding_id` is the name in `[keymap]` of ui.toml."""
    keys: str
    """Comma-separated; the key bar shows the first."""
    label: str
    """Label in the key bar; empty: not in the bar."""
    help: str
    ctl: str = ""
    """The equivalent `segapp ctl` command."""
    is_control: bool = False
    """True if the action sends a command to the trainer; hidden and disabled in a read-only view."""


KEYS = (
    Key("detach", "q,ctrl+q", "Detach", "leave; the training goes on"),
    Key("toggle_pause", "space", "Pause", "pause at the next micro-batch, or resume", "pause, resume", True),
    Key("edit_gpu0", "b", "gpu0_bsz", "change the share of GPU 0 from the next epoch on", "set gpu0_bsz=N", True),
    Key("undo_gpu0", "u", "", "cancel a pending change, or request the value before", "cancel", True),
    Key("checkpoint", "c", "Ckpt", "save a checkpoint now", "checkpoint", True),
    Key("stop", "S", "Stop", "stop after this epoch, or now; asks first", "stop, stop epoch", True),
    Key("pane('loss')", "1", "", "loss chart"),
    Key("pane('gpu')", "2", "", "devices and gpu0_bsz"),
    Key("pane('classes')", "3", "", "IoU of every class"),
    Key("pane('events')", "4", "", "events of the run"),
    Key("pictures", "i,5", "", "sample pictures, and back"),
    Key("zoom", "f", "", "the selected pane alone, and back"),
    Key("toggle_log", "y", "Log y", "logarithmic loss axis"),
    Key("smooth", "m", "Smooth", "smoothing: by length, 0.98, 0.9, 0.6, none"),
    Key("x_axis", "x", "", "curve over steps, epochs or time"),
    Key("window(-1)", "left_square_bracket", "", "shorter part of the curve"),
    Key("window(1)", "right_square_bracket", "", "longer part of the curve"),
    Key("cursor(-1)", "left", "", "read the curve to the left; the picture before"),
    Key("cursor(1)", "right", "", "read the curve to the right; the next picture"),
    Key("sort", "o", "", "order of the classes: worst, best, drop, name, id"),
    Key("filter", "slash", "", "show the classes whose names contain a text"),
    Key("theme", "t", "", "next theme"),
    Key("help", "question_mark,f1,h", "Help", "this page"),
    Key("escape", "escape", "", "close, clear, or dismiss an alert"),
    Key("redraw", "r", "", "draw the screen again"),
)


def bindings() -> list[Binding]:
    """Return the bindings of the app; `MonitorApp.check_action` disables some in a read-only view."""
    return [Binding(key.keys, key.action, key.help, id=binding_id(key)) for key in KEYS]


def binding_id(key: Key) -> str:
    """Return the name of a key in `[keymap]`: `pane_loss` for `pane('loss')`."""
    return "".join(c if c.isalnum() else "_" for c in key.action.replace("-1", "back").replace("1", "on")).strip("_")


def is_control(action: str) -> bool:
    """Return True if an action sends a command to the trainer."""
    return any(key.is_control and key.action == action for key in KEYS)


def available(is_readonly: bool) -> list[Key]:
    """Return the keys that a view offers."""
    return [key for key in KEYS if not (is_readonly and key.is_control)]


def shown_key(key: Key, keymap: Mapping[str, str], *, is_ascii: bool = False) -> str:
    """Return the name of a key on the screen."""
    first = keymap.get(binding_id(key), key.keys).split(",")[0]
    shown = _SHOWN.get(first, first)
    return _ASCII.get(shown, shown) if is_ascii else shown


def key_bar(keys: Sequence[Key], keymap: Mapping[str, str], labels: Mapping[str, str], width: int) -> Content:
    """Return the key bar: as many keys as fit, in the order of the table, help always."""
    shown = [key for key in keys if key.label]
    shown.sort(key=lambda key: key.action == "help")
    pieces = [
        Content.assemble(
            (f" {shown_key(key, keymap)} ", "$text-accent bold"), (labels.get(key.action, key.label), "$foreground")
        )
        for key in shown
    ]
    while len(pieces) > 1 and sum(piece.cell_length + 1 for piece in pieces) > width:
        del pieces[-2]
    return Content(" ").join(pieces)


def help_lines(keys: Sequence[Key], keymap: Mapping[str, str], *, is_ascii: bool) -> Content:
    """Return the help page."""
    lines = [
        Content.assemble(
            (f"{shown_key(key, keymap, is_ascii=is_ascii):>7}  ", "$text-accent bold"),
            key.help,
            (f"  (ctl: {key.ctl})" if key.ctl else "", "$text-muted"),
        )
        for key in keys
    ]
    return Content("\n").join(
        [*lines, Content.assemble((f"{'ctrl+p':>7}  ", "$text-accent bold"), "all of this by name")]
    )
