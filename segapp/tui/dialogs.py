"""The dialogs: a text such as the help page, a list of choices, how to stop, and `gpu0_bsz`."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from segapp.errors import CommandError
from segapp.run.commands import SetCommand, parse_setting
from segapp.run.words import dots, duration, memory_text, printable, share_text
from segapp.tui.header import etas_s
from segapp.tui.keys import Key, bindings
from segapp.tui.widgets import drawable
from segapp.view.source import Status
from segapp.view.view import View
from segapp.view.wording import fit_cells

_HELP = Key("app.help", "f1,question_mark,h", "", "show the keys, or close them")
"""While an input line has the focus, `?` is a part of its text."""


CHOICES = ("e", "x")


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


class Gpu0Screen(ModalScreen[SetCommand | None]):
    """Asks for the images of the first device, and checks them at every key; closes with the command, or None."""

    KEYS = (
        Key("dismiss", "escape", "", "close; nothing is sent"),
        Key("submit", "enter", "", "send it", is_bound=False),
        _HELP,
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]
    AUTO_FOCUS = "Input"

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view
        self._hint = f"images of the first device, 0 to {sum(view.split or (0,))}, or even, or auto"

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -setting") as box:
            box.border_title = Content(f"gpu0_bsz is {share_text(self._view.gpu0.value)}")
            box.border_subtitle = Content("enter to send  esc to close")
            yield Input(placeholder=self._hint, compact=True)
            yield Static(self._hint, classes="wrapped", id="verdict", markup=False)

    def check(self, text: str) -> tuple[SetCommand | None, str]:
        """Return the command for a text, None if it cannot be sent, and the peaks that it would need or its problem."""
        try:
            command = parse_setting("gpu0_bsz", text)
        except CommandError as error:
            return None, str(error)
        if command.gpu0_bsz == "auto":
            return command, "the trainer chooses it from the measured memory"
        checked = self._view.split_checker.check(command.gpu0_bsz)
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
