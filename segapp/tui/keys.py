"""The keys of the screens; bindings, key bar, help page and command palette are built from their tables."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.style import Style

from segapp.tui.widgets import LiteralText

_SHOWN = {"question_mark": "?", "slash": "/", "left": "←→", "down": "↓↑", "escape": "esc", "ctrl+p": "^p"}
_IN_ASCII = {"←→": "left/right", "↓↑": "up/down"}


class Key(NamedTuple):
    """One action and its keys."""

    action: str
    keys: str
    """Comma-separated; the key bar shows the first. Empty: only the command palette has the action."""
    label: str
    """Label in the key bar; empty: not in the bar."""
    help: str
    """`Group: what it does`; without a group, the command palette leaves it out."""
    panes: str = ""
    """Names of the panes, separated by spaces, in which the action has an effect; empty: everywhere."""
    words: str = ""
    """Common words under which the command palette finds the action."""
    sends: bool = False
    """True if it sends a command to the run; a read-only view does not offer it."""
    is_bound: bool = True
    """False for a key that the focused widget handles itself."""


LEAVE = Key("app.detach", "q", "Leave", "Screen: leave; the training continues", words="quit exit detach")
COMMON = (
    Key("app.theme", "", "", "Screen: theme ...", words="colors light dark"),
    Key("app.screenshot", "", "", "Screen: save a screenshot (SVG)", words="picture"),
    Key("app.redraw", "r", "", "draw the screen again"),
    Key("app.suspend_process", "ctrl+z", "", "return to the shell until fg; the training continues"),
    Key("app.commands", "ctrl+p", "Menu", "every action by its name"),
    Key("app.help", "question_mark,h,f1", "Help", "Screen: the keys"),
)
KEYS = (
    LEAVE,
    Key("app.toggle_pause", "p", "Pause", "Run: pause, or resume", sends=True),
    Key("app.checkpoint", "c", "Save", "Run: save a checkpoint", sends=True),
    Key("app.stop", "S", "Stop", "Run: stop after this epoch, or now; asks first", words="end kill", sends=True),
    Key("app.edit_setting", "b", "gpu0_bsz", "Run: change gpu0_bsz, shares, lr_factor or recompute",
        words="batch split learning rate", sends=True),
    Key("app.undo", "u", "", "Run: take back a command", words="undo cancel", sends=True),
    Key("app.metric(1)", "v", "Metric", "show the next metric", panes="loss"),
    Key("app.metric(-1)", "V", "", "show the previous metric", panes="loss"),
    Key("app.metrics", "", "", "Chart: metric or class ...", words="mIoU learning rate grad norm"),
    Key("app.toggle_log", "y", "", "Chart: logarithmic axis, or linear", panes="loss"),
    Key("move", "left", "Evaluation", "show another evaluation", panes="pictures", is_bound=False),
    Key("image", "down", "Image", "show another image of the evaluation", panes="pictures", is_bound=False),
    Key("select", "enter", "Chart", "show the selected class in the chart", panes="classes", is_bound=False),
    Key("open", "enter", "Open", "show the selected event in full", panes="events", is_bound=False),
    Key("app.filter", "slash", "Find", "Show: find a class or an event", panes="events classes", words="search"),
    Key("app.pictures", "i,5", "Images", "Show: sample images, or the chart again", words="predictions"),
    Key("app.config", "C", "", "Run: show the config and its changes", words="settings"),
    Key("app.log", "l", "", "Run: read its log, trainer.log", words="output trace"),
    Key("app.runs", "R", "Runs", "Runs: list the runs, and open one"),
    Key("app.details", "d", "", "Show: details of the alert or event"),
    Key("app.seen", "a", "", "Show: dismiss the alert", words="acknowledge"),
    Key("app.pane('loss')", "1", "", "show the chart"),
    Key("app.pane('gpu')", "2", "", "show the devices and gpu0_bsz"),
    Key("app.pane('classes')", "3", "", "show the IoU of every class"),
    Key("app.pane('events')", "4", "", "show the events of the run"),
    Key("app.zoom", "f", "Zoom", "Show: only this pane, or all panes", words="full screen"),
    Key("app.escape", "escape", "", "close the search or the zoom"),
    *COMMON,
)  # fmt: skip
TYPED = {name: key.action for key in KEYS if key.sends or key is LEAVE for name in key.keys.split(",")}
"""Keys without an effect in typed text, because what they do reaches beyond the screen, and their actions."""


def bindings(keys: Iterable[Key]) -> list[Binding]:
    return [Binding(key.keys, key.action, key.help) for key in keys if key.keys and key.is_bound]


def available(keys: Iterable[Key], *, sends: bool) -> list[Key]:
    return [key for key in keys if sends or not key.sends]


def shown_key(key: Key, *, in_ascii: bool = False) -> str:
    first = key.keys.split(",")[0]
    shown = _SHOWN.get(first, first)
    return _IN_ASCII.get(shown, shown) if in_ascii else shown


def here(keys: Sequence[Key], pane: str) -> list[Key]:
    """Return the keys for a pane: first leaving and the commands, then the keys of this pane."""
    found = [key for key in keys if not key.panes or pane in key.panes.split()]
    return sorted(found, key=lambda key: (not key.sends and not key.panes and key is not LEAVE,))


class KeyBar(LiteralText):
    """The last line of a screen: keys with their labels; a click presses the key."""

    def offer(self, keys: Sequence[Key], **labels: str) -> None:
        """Show keys, some with another label than usual; what does not fit is left out, except the last two.

        In the tables of the screens, these are the command palette and help.
        """
        in_ascii = self.app.has_class("-ascii")
        pieces = [
            Content.assemble(
                (f" {shown_key(key, in_ascii=in_ascii)} ", "$text-accent bold"),
                (labels.get(key.label, key.label), "$foreground"),
            ).stylize(Style.from_meta({"key": key.keys.split(",")[0]}))
            for key in keys
            if key.label
        ]
        while len(pieces) > 2 and sum(piece.cell_length + 1 for piece in pieces) > self.size.width:
            del pieces[-3]
        self.show(Content(" ").join(pieces))

    def on_click(self, event: events.Click) -> None:
        # The end of a selection is a click, too, if it began in the same line.
        if not self.screen.selections and (key := event.style.meta.get("key")):
            self.app.simulate_key(key)


def help_lines(keys: Sequence[Key], pane: str = "", *, in_ascii: bool = False) -> Content:
    """Return the help page: the keys, and the signs of the pane."""
    lines = [_line(shown_key(key, in_ascii=in_ascii), key.help, "$text-accent bold") for key in keys if key.keys]
    lines.append(_line("shift+drag", "select text with the terminal", "$text-accent bold"))
    signs = {
        "loss": (
            ("◆", "evaluation"), ("★", "best checkpoint"), ("┊", "change of gpu0_bsz, resume"),
            ("×", "not a finite number"), ("▲", "outside the scale"),
        ),
        "classes": (("▲ ▼", "change of IoU since the previous evaluation"), ("!", "IoU fell by more than 0.02")),
    }  # fmt: skip
    legend = [_line(sign, meaning, "$text-success bold") for sign, meaning in signs.get(pane, ())]
    return Content("\n").join([*lines, *([Content(""), *legend] if legend else [])])


def _line(sign: str, meaning: str, style: str) -> Content:
    return Content.assemble((f"{sign:>10}  ", style), meaning)
