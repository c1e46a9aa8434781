"""The dialogs: the help page, and how to stop."""

from __future__ import annotations

from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from segapp.run.text import printable

StopChoice = Literal["epoch", "now"]


class HelpScreen(ModalScreen[None]):
    """The help page."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,question_mark,f1,h,q,enter,space", "dismiss", "close"),
        ("down,j", "scroll(1)", "down"),
        ("up,k", "scroll(-1)", "up"),
    ]

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def compose(self) -> ComposeResult:
        """Yield a box with the lines."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Content("Keys")
            box.border_subtitle = Content("esc closes")
            yield Static(self._content, classes="lines")

    def action_scroll(self, by: int) -> None:
        """Scroll the page."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)

    async def action_dismiss(self, result: None = None) -> None:
        """Close the page."""
        self.dismiss(None)


class StopScreen(ModalScreen[StopChoice | None]):
    """Asks how to stop the training; every key but `e` and `n` cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("e", "choose('epoch')", "after this epoch"),
        ("n", "choose('now')", "now"),
        ("escape,enter,q,space,S,c", "choose('')", "continue"),
    ]

    def __init__(self, pid: int | None, host: str | None) -> None:
        super().__init__()
        self._pid, self._host = pid, host

    def compose(self) -> ComposeResult:
        """Yield a box with the choices."""
        lines = [
            Content.assemble((" e ", "$text-accent bold"), " stop after this epoch, with a checkpoint"),
            Content.assemble((" n ", "$text-accent bold"), " stop now: save a checkpoint and end"),
            Content.assemble((" esc ", "$text-accent bold"), " continue training"),
        ]
        if self._pid is not None:
            where = f" on {printable(self._host)}" if self._host else ""
            last = f"If it does not answer{where}: kill {self._pid} saves, kill -9 does not."
            lines.append(Content.styled(last, "$text-muted"))
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Content("Stop the training?")
            yield Static(Content("\n").join(lines), classes="lines")

    def action_choose(self, choice: str) -> None:
        """Close the dialog with a choice."""
        self.dismiss("epoch" if choice == "epoch" else "now" if choice == "now" else None)
