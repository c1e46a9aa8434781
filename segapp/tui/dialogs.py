"""The dialogs: a text such as the help page, how to stop, and `gpu0_bsz`."""

from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from segapp.errors import CommandError
from segapp.run.commands import SetCommand, parse_command
from segapp.run.words import dots, memory_text, printable, share_text
from segapp.tui.widgets import drawable
from segapp.view.view import View

StopChoice = Literal["epoch", "now"]


class ScrolledDialog(ModalScreen[None]):
    """A text in a box that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,enter,space,question_mark,h,d", "dismiss", "close"),
        ("j", "scroll(1)", "down"),
        ("k", "scroll(-1)", "up"),
    ]

    def __init__(self, title: str, content: Content, *, is_wide: bool = False) -> None:
        super().__init__()
        self._title, self._content, self._is_wide = title, content, is_wide

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -wide" if self._is_wide else "dialog") as box:
            box.border_title, box.border_subtitle = Content(self._title), Content("esc to close")
            text = drawable(self, self._content)
            yield Static(text, classes="wrapped" if self._is_wide else "lines", markup=False)

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


class StopScreen(ModalScreen[StopChoice | None]):
    """Asks how to stop the training; a second ctrl+c stops it now, every other key but `e` and `n` cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("e", "dismiss('epoch')", "after this epoch"),
        Binding("n,ctrl+c", "dismiss('now')", "now", priority=True),
        ("escape,enter,q,space,S,c", "dismiss", "continue"),
    ]

    def __init__(self, pid: int | None, host: str | None) -> None:
        super().__init__()
        self._pid, self._host = pid, host

    def compose(self) -> ComposeResult:
        choices = {
            "e": "stop after this epoch, with a checkpoint",
            "n, ctrl+c": "stop now: save a checkpoint and end",
            "esc": "continue training",
        }
        lines = [Content.assemble((f" {key:<9} ", "$text-accent bold"), text) for key, text in choices.items()]
        if self._pid is not None:
            where = f" on {printable(self._host)}" if self._host else ""
            last = f"If the trainer does not answer{where}: kill {self._pid} saves a checkpoint, kill -9 does not."
            lines.append(Content.styled(last, "$text-muted"))
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Content("Stop the training?")
            yield Static(Content("\n").join(lines), classes="lines", markup=False)


class Gpu0Screen(ModalScreen[SetCommand | None]):
    """Asks for the images of the first device, and checks them at every key; closes with the command, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "cancel")]
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
            command = parse_command(f"set gpu0_bsz={text}")
        except CommandError as error:
            return None, str(error)
        assert isinstance(command, SetCommand)
        if command.gpu0_bsz == "auto":
            return command, "the trainer chooses it from the measured memory"
        checked = self._view.split_checker.check(command.gpu0_bsz)
        peaks = [] if self._view.has_logical_devices else [memory_text(mib) for mib in checked.predicted_mib]
        predicted = f", peaks {', '.join(peaks)} GiB" if peaks else ""
        meaning = f"{checked.level}: split {dots(checked.split)}{predicted}; {checked.reason}"
        return command if checked.is_allowed else None, meaning

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        command, text = self.check(event.value) if event.value else (None, self._hint)
        style = "$text-muted" if not event.value else "$text-error" if command is None else "$text-success"
        self.query_one("#verdict", Static).update(drawable(self, Content.styled(text, style)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with the command, if there is one."""
        event.stop()
        command = self.check(event.value)[0] if event.value else None
        if command is not None:
            self.dismiss(command)
