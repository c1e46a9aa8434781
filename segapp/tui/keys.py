"""The table of keys; bindings, key bar, help page and command palette are built from it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from textual.content import Content

from segapp.view.plot import CLASS, metric_names, metric_title
from segapp.view.view import View

_SHOWN = {
    "question_mark": "?",
    "slash": "/",
    "left": "←",
    "escape": "esc",
}


class Key(NamedTuple):
    """One action and its keys."""

    action: str
    """Name of the app's action."""
    keys: str
    """Comma-separated; the key bar shows the first."""
    label: str
    """Label in the key bar; empty: not in the bar."""
    help: str
    ctl: str = ""
    """The equivalent `segapp ctl` command of an action that sends one; a read-only view does not offer it."""
    panes: str = ""
    """Names of the panes, separated by spaces, in which the action has an effect; empty: everywhere."""
    words: str = ""
    """Common words under which the command palette finds the action."""
    is_bound: bool = True
    """False for a key that the focused widget handles itself."""


KEYS = (
    Key("detach", "q,ctrl+q", "Leave", "leave; the training continues", words="quit, exit, detach"),
    Key("toggle_pause", "space", "Pause", "pause at the next micro-batch, or resume", "pause, resume"),
    Key("edit_gpu0", "b", "gpu0_bsz", "images of the first device (GPU 0) from the next epoch on", "set gpu0_bsz=N",
        words="batch split"),
    Key("checkpoint", "c", "Save", "save a checkpoint now", "checkpoint"),
    Key("stop", "S", "Stop", "stop after this epoch, or now; asks first", "stop, stop --after-epoch",
        words="end, kill"),
    Key("metric(1)", "v", "Metric", "next metric in the chart", panes="loss", words="mIoU, learning rate, grad norm"),
    Key("metric(-1)", "V", "", "previous metric", panes="loss"),
    Key("move", "left", "Evaluation", "show another evaluation; also right", panes="pictures", is_bound=False),
    Key("image", "down", "Image", "show another image of the evaluation; also up", panes="pictures", is_bound=False),
    Key("toggle_log", "y", "Log y", "logarithmic vertical axis", panes="loss"),
    Key("select", "enter", "Chart", "show the IoU of the selected class in the chart", panes="classes", is_bound=False),
    Key("open", "enter", "Open", "show the selected event in full", panes="events", is_bound=False),
    Key("filter", "slash", "Find", "find a text in the events or in the classes", panes="events classes",
        words="search"),
    Key("details", "d", "", "show the alert or the selected event in full", words="event"),
    Key("seen", "a", "", "dismiss the alert in the banner", words="acknowledge"),
    Key("config", "C", "", "show the config, and what has been changed since the start", words="settings"),
    Key("runs", "R", "Runs", "list the runs, and open one", words="list"),
    Key("undo_gpu0", "u", "", "undo the gpu0_bsz change", "cancel"),
    Key("pane('loss')", "1", "", "show the chart"),
    Key("pane('gpu')", "2", "", "show the devices and gpu0_bsz", words="memory"),
    Key("pane('classes')", "3", "", "show the IoU of every class"),
    Key("pane('events')", "4", "", "show the events of the run"),
    Key("pictures", "i,5", "", "show the sample images, or the chart again", words="images"),
    Key("zoom", "f", "Zoom", "show only the selected pane, or all panes again", words="full screen"),
    Key("help", "question_mark,h", "Help", "show this page"),
    Key("escape", "escape", "", "close, clear, or dismiss an alert"),
    Key("redraw", "r", "", "redraw the screen"),
    Key("suspend_process", "ctrl+z", "", "return to the shell until fg; the training continues"),
)  # fmt: skip


def available(is_readonly: bool) -> list[Key]:
    """Return the keys that a view offers."""
    return [key for key in KEYS if not (is_readonly and key.ctl)]


def shown_key(key: Key) -> str:
    """Return the name of a key as displayed."""
    first = key.keys.split(",")[0]
    return _SHOWN.get(first, first)


def key_bar(keys: Sequence[Key], labels: Mapping[str, str], width: int) -> Content:
    """Return the key bar: as many keys as fit, in order, and always the last one, which is help in the table."""
    shown = [key for key in keys if key.label]
    return bar([(shown_key(key), labels.get(key.action, key.label)) for key in shown], width)


def palette(keys: Sequence[Key], view: View) -> Iterator[tuple[str, str, str]]:
    """Yield title, hint and action of the command palette's entries: keys, metrics and classes of the run."""
    for key in keys:
        if key.is_bound:
            title = f"{key.help} ({key.words})" if key.words else key.help
            yield title, f"key {shown_key(key)}" + (f", ctl {key.ctl}" if key.ctl else ""), key.action
    for metric in (*metric_names(view), *(CLASS + name for name in view.classes)):
        yield f"chart: {metric_title(metric)}", "metric", f"show_metric({metric!r})"


def here(keys: Sequence[Key], pane: str) -> list[Key]:
    """Return the keys for a pane: first leaving and the commands, then the keys of this pane."""
    found = [key for key in keys if not key.panes or pane in key.panes.split()]
    return sorted(found, key=lambda key: (not key.ctl and not key.panes and key.action != "detach",))


def bar(items: Sequence[tuple[str, str]], width: int) -> Content:
    """Return a line of keys with their labels; keys that do not fit are left out, except the last one."""
    pieces = [Content.assemble((f" {name} ", "$text-accent bold"), (label, "$foreground")) for name, label in items]
    while len(pieces) > 1 and sum(piece.cell_length + 1 for piece in pieces) > width:
        del pieces[-2]
    return Content(" ").join(pieces)


def help_lines(keys: Sequence[Key]) -> Content:
    """Return the help page: the keys, and the signs of the chart."""
    lines = [
        Content.assemble(
            (f"{shown_key(key):>11}  ", "$text-accent bold"),
            key.help,
            (f"  ({key.panes.replace(' ', ', ')})" if key.panes else "", "$text-muted"),
            (f"  (ctl: {key.ctl})" if key.ctl else "", "$text-muted"),
        )
        for key in keys
    ]
    signs = (
        ("◆", "evaluation"), ("★", "best checkpoint"), ("┊", "change of gpu0_bsz, resume"),
        ("×", "not a finite number"), ("▲", "outside the scale"),
        ("▲ ▼", "change of IoU since the previous evaluation"),
        ("!", "a class whose IoU fell by more than 0.02"),
    )  # fmt: skip
    legend = [Content.assemble((f"{sign:>11}  ", "$text-success bold"), meaning) for sign, meaning in signs]
    palette = Content.assemble((f"{'ctrl+p':>11}  ", "$text-accent bold"), "every action by name, themes, screenshot")
    mouse = Content.assemble((f"{'shift+drag':>11}  ", "$text-accent bold"), "select text with the terminal")
    return Content("\n").join([*lines, palette, mouse, Content(""), *legend])
