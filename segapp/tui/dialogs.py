"""The dialogs: a text such as the help page, a list of choices, how to stop, the log, and the live settings."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Log, OptionList, Static
from textual.widgets.option_list import Option

from segapp.errors import CommandError
from segapp.run.commands import SetCommand, parse_setting
from segapp.run.words import dots, duration, memory_text, printable, share_text
from segapp.tui.header import etas_s
from segapp.tui.keys import Key, bindings
from segapp.tui.widgets import SearchLine, drawable
from segapp.view.source import LogTail, Status
from segapp.view.view import View
from segapp.view.wishes import in_force
from segapp.view.wording import fit_cells

_HELP = Key("app.help", "f1,question_mark,h", "", "show the keys, or close them")
"""While an input line has the focus, `?` is a part of its text."""


CHOICES = ("e", "x")

_MAX_LOG_BYTES = 4 * 2**20
"""The end of a log that is shown."""


class ScrolledDialog(ModalScreen[None]):
    """A text in a box that scrolls."""

    KEYS = (
        Key("dismiss", "escape,q,enter,space,d", "", "close"),
        Key("app.undo", "u", "", "take back a command"),
        _HELP,
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]

    def __init__(self, title: str, content: Content, *, is_wide: bool = False) -> None:
        super().__init__()
        self._title, self._content, self._is_wide = title, content, is_wide

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -wide" if self._is_wide else "dialog") as box:
            box.border_title, box.border_subtitle = Content(self._title), Content("esc to close")
            text = drawable(self, self._content)
            yield Static(text, classes="wrapped" if self._is_wide else "lines", markup=False)


class HelpScreen(ScrolledDialog):
    """The keys of the screen below."""


class Choice(NamedTuple):
    """An entry of a list."""

    title: str
    value: str
    key: str = ""
    """The key that does the same, shown at the right."""
    words: str = ""
    """Other words under which it is found."""


class ChoiceScreen(ModalScreen[str | None]):
    """A list with a line to search it; closes with the value of the chosen entry, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss", "close"),
        ("down", "move('cursor_down')", "next"), ("pagedown", "move('page_down')", "next page"),
        ("up", "move('cursor_up')", "previous"), ("pageup", "move('page_up')", "previous page"),
    ]  # fmt: skip
    HINT: ClassVar[str] = "type to find"

    def __init__(self, title: str, choices: Sequence[Choice], note: str = "") -> None:
        super().__init__()
        self._title, self._choices, self._note = title, choices, note
        self._found: list[Choice] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -list") as box:
            box.border_title, box.border_subtitle = Content(self._title), Content("enter to choose  esc to close")
            if self.HINT:
                yield Input(placeholder=self.HINT, compact=True)
            yield OptionList(compact=True)
            if self._note:
                yield Static(Content.styled(self._note, "$text-muted"), classes="wrapped", markup=False)

    def on_mount(self) -> None:
        self.call_after_refresh(self._show)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        """List the entries that have every word of the search text."""
        words = "".join(line.value for line in self.query(Input)).casefold().split()
        listed = self.query_one(OptionList)
        self._found = [
            each for each in self._choices if all(word in f"{each.title} {each.words}".casefold() for word in words)
        ]
        room = listed.scrollable_content_region.width
        rows = [
            Content.assemble(fit_cells(each.title, room - len(each.key) - 1), (f" {each.key}", "$text-accent bold"))
            for each in self._found
        ]
        listed.clear_options()
        listed.add_options([drawable(self, row) for row in rows] or [Option("nothing has this name", disabled=True)])
        listed.highlighted = 0 if rows else None

    def action_move(self, how: str) -> None:
        getattr(self.query_one(OptionList), f"action_{how}")()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one(OptionList).action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if self.is_current:
            self.dismiss(self._found[event.option_index].value)


class StopScreen(ChoiceScreen):
    """Asks how to stop the training, with the focus on continuing; a second ctrl+c means now."""

    KEYS = (
        Key("dismiss", "escape,n", "", "keep training; also any other letter"),
        Key("dismiss('epoch')", "e", "", "stop after this epoch, with a checkpoint"),
        Key("dismiss('now')", "x,ctrl+c", "", "save a checkpoint now, and stop"),
        _HELP,
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS), Binding("ctrl+c", "dismiss('now')", priority=True)]
    HINT = ""

    def __init__(self, view: View, status: Status) -> None:
        eta_s = etas_s(view, status)[0]
        where = f" on {printable(status.host)}" if status.host else ""
        last = f"If the trainer does not answer{where}: kill {status.pid} saves a checkpoint, kill -9 does not."
        choices = (
            Choice("Keep training", "", "esc, n"),
            Choice(f"After this epoch{f', ~{duration(eta_s)}' if eta_s is not None else ''}", "epoch", "e"),
            # the command is held for some seconds, in which the training continues
            Choice(f"Now: saves about step {view.at_step or 0}", "now", "x"),
        )
        super().__init__("Stop the training?", choices, last if status.pid is not None else "")

    def on_key(self, event: events.Key) -> None:
        """Keep training at any other key of a text, because it is typed text."""
        if event.is_printable and event.key not in (*CHOICES, "question_mark"):
            event.stop()
            if self.is_current:  # several keys may have been read already
                self.dismiss("")


class LogScreen(ModalScreen[None]):
    """The log of a run: follows its end, and shows only the lines with a text."""

    KEYS = (
        Key("close", "escape,l,q", "", "close, or clear the search"),
        Key("find", "slash", "", "find a text"),
        Key("end", "end", "", "follow the last line", is_bound=False),
        Key("scroll", "left", "", "show the other part of long lines", is_bound=False),
        Key("app.undo", "u", "", "take back a command"),
        _HELP,
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]
    AUTO_FOCUS = "#log-lines"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._tail = path, LogTail(path, _MAX_LOG_BYTES)
        self._read: list[str] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -log") as box:
            box.border_title = Content(printable(str(self._path)))
            box.border_subtitle = drawable(self, Content("/ to find  ←→ for long lines  esc to close"))
            yield SearchLine("text in a line", id="log-search", lines="log-lines")
            yield Log(id="log-lines")
            yield Static("no line is written: with --plain, a training prints them on its terminal", markup=False)

    def on_mount(self) -> None:
        self._follow()
        self.set_interval(0.5, self._follow)

    def _follow(self) -> None:
        new = self._tail.read()
        self._read += new
        self._write(new)
        self.query_one(Static).display = not self._read

    def _write(self, lines: Iterable[str]) -> None:
        wanted = self.query_one(SearchLine).text.casefold()
        found = (drawable(self, Content(line)).plain for line in lines if wanted in line.casefold())
        self.query_one(Log).write_lines(found)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.query_one(Log).clear()
        self._write(self._read)

    def action_find(self) -> None:
        self.query_one(SearchLine).open()

    def action_close(self) -> None:
        if not self.query_one(SearchLine).close():
            self.dismiss()


class SettingScreen(ModalScreen[SetCommand | None]):
    """Asks for the value of a live setting, and checks it at every key; closes with the command, or None.

    `settings` are the names of the settings that the run can change, the first of them shown first.
    """

    KEYS = (
        Key("dismiss", "escape", "", "close; nothing is sent"),
        Key("setting(1)", "down", "", "another setting"),
        Key("submit", "enter", "", "send it", is_bound=False),
        _HELP,
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS), ("up", "setting(-1)", "the setting before")]
    AUTO_FOCUS = "Input"

    def __init__(self, view: View, settings: Sequence[str]) -> None:
        super().__init__()
        self._view, self._settings, self._at = view, settings, 0

    @property
    def _setting(self) -> str:
        return self._settings[self._at]

    @property
    def _hint(self) -> str:
        split = self._view.split or (0,)
        return {
            "gpu0_bsz": f"images of the first device, 0 to {sum(split)}, none (an even split), or auto",
            "shares": f"images of each device, {sum(split)} in all, such as {','.join(map(str, split))}",
            "lr_factor": "factor on the scheduled learning rate, above 0, at most 100",
            "recompute": "off, all, or config (the blocks that train.recompute names)",
        }[self._setting]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -setting") as box:
            box.border_subtitle = Content("enter to send  down for other settings  esc to close")
            yield Input(compact=True)
            yield Static(classes="wrapped", id="verdict", markup=False)

    def on_mount(self) -> None:
        self.action_setting(0)

    def action_setting(self, by: int) -> None:
        self._at = (self._at + by) % len(self._settings)
        value = in_force(self._view, self._setting)
        shown = dots(self._view.split) if self._setting == "shares" or isinstance(value, list) else share_text(value)
        self.query_one(VerticalScroll).border_title = drawable(self, Content(f"{self._setting} is {shown}"))
        self.query_one(Input).value = ""
        self._show("")

    def check(self, text: str) -> tuple[SetCommand | None, str]:
        """Return the command for a text, None if it cannot be sent, and what it would do or its problem."""
        try:
            command = parse_setting(self._setting, text)
        except CommandError as error:
            return None, str(error)
        if command.lr_factor is not None:
            now = in_force(self._view, "lr_factor")
            if command.lr_factor == now:
                return None, f"no change: lr_factor is {now:g}"
            return command, f"ok: the scheduled learning rate times {command.lr_factor:g}, now times {now:g}"
        if command.recompute is not None:
            return command, "ok; how much memory that saves is not predicted here: see segapp plan"
        if command.gpu0_bsz == "auto":
            return command, "the trainer chooses it from the measured memory"
        checked = self._view.split_checker.check(command.split)
        # An impossible split has no peaks; one that is not expected to fit has, and is not sent either.
        if checked.split is None:
            return None, f"{checked.level}: {checked.reason}"
        peaks = [] if self._view.has_logical_devices else [memory_text(mib) for mib in checked.predicted_mib]
        predicted = f", peaks {', '.join(peaks)} GiB" if peaks else ""
        meaning = f"{checked.level}: split {dots(checked.split)}{predicted}; {checked.reason}"
        return command if checked.is_allowed else None, meaning

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._show(event.value)

    def _show(self, value: str, prefix: str = "") -> None:
        command, text = self.check(value) if value.strip() else (None, self._hint)
        style = "$text-muted" if not value else "$text-error" if command is None else "$text-success"
        self.query_one("#verdict", Static).update(drawable(self, Content.styled(prefix + text, style)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with the command, or say that there is none to send."""
        event.stop()
        command = self.check(event.value)[0] if event.value.strip() else None
        if command is None:
            self._show(event.value, "not sent: ")
        elif self.is_current:
            self.dismiss(command)
