"""The pane of `gpu0_bsz`: the present value, the pending change, and the editor with its predictions."""

import textwrap
from dataclasses import dataclass

from textual.content import Content

from segapp.memory.judge import SplitJudge, SplitVerdict
from segapp.memory.peaks import Peak
from segapp.run.words import dots, duration, gib, memory_text, share_text
from segapp.tui.glyphs import Glyphs
from segapp.tui.panes.devices import WORD_STYLES, headroom_level
from segapp.tui.panes.header import device_label, etas_s
from segapp.tui.widgets import LiteralText
from segapp.view.source import Status
from segapp.view.view import View

EDITOR_KEYS = (
    ("0-9", "number"), ("+", "more"), ("-", "less"), ("e", "even"), ("enter", "send"), ("!", "send anyway"),
    ("esc", "close"), ("?", "Help"),
)  # fmt: skip


class Gpu0Pane(LiteralText, can_focus=True):
    """The pane of `gpu0_bsz`; the app focuses it and handles its keys while the editor is open."""

    def __init__(self) -> None:
        super().__init__(id="gpu0", classes="pane lines")


@dataclass(frozen=True)
class Draft:
    """The state of the editor."""

    text: str
    is_fresh: bool = False
    """True if the next digit replaces the number: at first, and after + or -."""
    is_confirmed: bool = False
    """True after the first enter for a tight split, or the first ! for one that is not expected to fit."""

    @property
    def value(self) -> int | None:
        """The value to send; None for an even split."""
        return int(self.text) if self.text.isdigit() else None


def begin_draft(view: View) -> Draft:
    """Return the draft with which the editor opens: the pending value, or the present one."""
    gpu0 = view.gpu0
    value = gpu0.pending.new if gpu0.pending is not None else gpu0.value
    return Draft("" if value is None else str(value), is_fresh=True)


def edit_draft(draft: Draft, key: str, character: str | None, view: View) -> tuple[Draft | None, bool]:
    """Return the draft after a key, None if the editor closes, and True if the previous draft should be sent."""
    if key == "escape":
        return None, False
    if character is not None and character in "0123456789":
        text = character if draft.is_fresh else draft.text + character
        return Draft(str(int(text))[:6]), False
    if key == "backspace":
        return Draft(draft.text[:-1]), False
    if character == "e":
        return Draft(""), False
    if character in ("+", "=") or key == "up":
        return _stepped(draft, view, 1), False
    if character in ("-", "_") or key == "down":
        return _stepped(draft, view, -1), False
    if key == "enter" or character == "!":
        return _submitted(draft, view, insists=character == "!")
    return draft, False


def _stepped(draft: Draft, view: View, by: int) -> Draft:
    most = view.start.batch_size if view.start is not None else sum(view.split or (0,))
    value = draft.value
    if value is None:
        value = view.split[0] if view.split else 0
    return Draft(str(min(max(value + by, 0), most)), is_fresh=True)


def _submitted(draft: Draft, view: View, *, insists: bool) -> tuple[Draft | None, bool]:
    verdict = view.judge.verdict(draft.value)
    if verdict.level == "no change" and view.gpu0.pending is None:
        return None, False
    if insists:
        if not verdict.is_possible:
            return draft, False
        return (None, True) if draft.is_confirmed else (Draft(draft.text, is_confirmed=True), False)
    if verdict.level == "tight" and not draft.is_confirmed:
        return Draft(draft.text, is_confirmed=True), False
    if verdict.is_allowed or verdict.level == "no change":
        return None, True
    return draft, False


def gpu0_content(
    view: View, status: Status, draft: Draft | None, size: tuple[int, int], glyphs: Glyphs, *, can_edit: bool
) -> Content:
    """Return the pane of `gpu0_bsz`: the present and the pending value, or the editor."""
    if view.start is None:
        return Content.styled("known once the training has started", "$text-muted")
    if view.num_devices < 2:
        return Content.styled("one device: nothing to split", "$text-muted")
    why = view.judge.why_no_split
    if why is not None:
        return Content("\n").join([Content.styled(line, "$text-muted") for line in _wrap(why, size[0], 3)])
    if draft is not None:
        return _editor(view, draft, *size, glyphs)
    is_pending = view.gpu0.pending is not None
    lines = _pending_lines(view, status, glyphs) if is_pending else _idle_lines(view, can_edit)
    return Content("\n").join([line.truncate(size[0], ellipsis=True) for line in lines])


def _idle_lines(view: View, can_edit: bool) -> list[Content]:
    gpu0 = view.gpu0
    batch = f"  batch {view.start.batch_size}" if view.start is not None else ""
    how = "  auto" if view.is_auto else ""
    lines = [Content.assemble((share_text(gpu0.value), "bold"), f"{how}  split {dots(view.split)}{batch}")]
    last = gpu0.last
    if last is not None and last.status == "applied":
        peaks = _observed(view, last.predicted_mib, last.observed_mib)
        when = f" at epoch {last.epoch}" if last.epoch is not None else ""
        lines.append(Content.styled(f"applied{when}{peaks}", "$text-success"))
    elif last is not None:
        lines.append(Content.styled(f"{share_text(last.new)} was {last.status}", "$text-warning"))
    elif can_edit:
        lines.append(Content.styled("press b to change it from the next epoch on", "$text-muted"))
    return lines


def _observed(view: View, predicted: list[float | None] | None, observed: list[float | None] | None) -> str:
    """Return the observed peak of device 0, with the predicted one."""
    if view.has_logical_devices:
        return ""
    seen = next(iter(observed or []), None)
    if seen is None and view.split is not None:
        seen = next(iter(view.peaks_mib.get(view.split, [])), None)
    if seen is None:
        return ""
    first = next(iter(predicted or []), None)
    device = view.devices[0].device if view.devices else None
    before = f" (predicted {memory_text(first)})" if first is not None else ""
    return f", {device_label(device, 0)} peak {memory_text(seen)}{before}"


def _pending_lines(view: View, status: Status, glyphs: Glyphs) -> list[Content]:
    pending = view.gpu0.pending
    assert pending is not None
    epoch_eta_s, _ = etas_s(view, status)
    when = f"epoch {pending.epoch}" if pending.epoch is not None else "the next epoch"
    eta = f", in {duration(epoch_eta_s)}" if epoch_eta_s is not None else ""
    split = pending.split or view.judge.verdict(pending.new).split
    return [
        Content.assemble(
            (share_text(view.gpu0.value), "bold"),
            f" {glyphs.arrow} ",
            (share_text(pending.new), "$text-warning bold"),
            (f"  PENDING: {when}{eta}", "$text-warning bold"),
        ),
        Content(f"split {dots(view.split)} {glyphs.arrow} {dots(split)}"),
        Content.styled("press u to cancel", "$text-muted"),
    ]


def _editor(view: View, draft: Draft, width: int, num_lines: int, glyphs: Glyphs) -> Content:
    judge = view.judge
    verdict = judge.verdict(draft.value)
    word = _level_word(judge, verdict)
    style = WORD_STYLES[word]
    value = draft.text if draft.text else "even"
    reason = _wrap(verdict.reason, width, 2)
    lines = [
        Content.assemble(
            (share_text(view.gpu0.value), "bold"),
            f" {glyphs.arrow} ",
            (f" {value} ", "$text-warning bold reverse"),
            "  ",
            (word, style),
        ),
        Content(f"split {dots(view.split)} {glyphs.arrow} {dots(verdict.split)}"),
        *_prediction_lines(view, judge, verdict, num_lines - 3 - len(reason), glyphs),
        *[Content.styled(line, style) for line in reason],
        Content.styled(_hint(verdict, draft), "$text-muted"),
    ]
    return Content("\n").join([line.truncate(width, ellipsis=True) for line in lines])


def _level_word(judge: SplitJudge, verdict: SplitVerdict) -> str:
    """Return the level as text: a tight split may not fit if its highest possible peak exceeds a device."""
    pairs = zip(verdict.predicted_mib, judge.usable_mib, strict=False)
    is_over = any(headroom_level(peak, usable) == "full" for peak, usable in pairs)
    return "may not fit" if verdict.level == "tight" and is_over else verdict.level


def _prediction_lines(
    view: View, judge: SplitJudge, verdict: SplitVerdict, limit: int, glyphs: Glyphs
) -> list[Content]:
    """Return a line per device with its present and predicted peak; if there are too many, the fullest ones."""
    if view.has_logical_devices:
        return [Content.styled("no prediction: the devices share one process", "$text-muted")]
    rows = []
    for i, peak in enumerate(judge.peaks.peak(verdict.split or ())):
        if peak.mib is not None:
            usable = judge.usable_mib[i] if i < len(judge.usable_mib) else None
            rows.append((peak.mib / usable if usable else 0.0, _prediction_line(view, judge, i, peak, usable, glyphs)))
    fullest = sorted(range(len(rows)), key=lambda i: -rows[i][0])[: max(1, limit)]
    return [rows[i][1] for i in sorted(fullest)]


def _prediction_line(
    view: View, judge: SplitJudge, index: int, peak: Peak, usable_mib: float | None, glyphs: Glyphs
) -> Content:
    now = judge.peaks.measured.get(judge.current or (), ())
    before = memory_text(now[index]) if index < len(now) else "-"
    amount = memory_text if usable_mib is not None and usable_mib < 1024 else gib
    spread = " at most" if peak.basis == "bound" else f"±{amount(max(judge.peaks.spread_mib, 51.2))}"
    word = headroom_level(peak.mib, usable_mib)
    if word == "full":
        word = "may not fit" if peak.basis == "bound" else "won't fit"
    label = device_label(view.devices[index].device if index < len(view.devices) else None, index)
    change = f"{label} peak {before} {glyphs.arrow} {memory_text(peak.mib)}{spread} /{memory_text(usable_mib)}"
    return Content.assemble(f"{change}  ", (word, WORD_STYLES.get(word, "")))


def _hint(verdict: SplitVerdict, draft: Draft) -> str:
    if verdict.level == "tight":
        return "enter again to send  esc" if draft.is_confirmed else "+ - change  enter twice to send  esc"
    if verdict.level == "won't fit":
        return "! again to send anyway  esc" if draft.is_confirmed else "+ - change  ! to send anyway  esc"
    return "+ - change  e even  enter  esc" if verdict.is_allowed else "+ - change  e even  esc"


def _wrap(text: str, width: int, num_lines: int) -> list[str]:
    """Return a text in at most some lines; the last one may be longer than the width."""
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return lines if len(lines) <= num_lines else [*lines[: num_lines - 1], " ".join(lines[num_lines - 1 :])]
