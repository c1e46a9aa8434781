"""The lines around the panes: state, progress, throughput, and alerts."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from rich.cells import cell_len
from textual.content import Content

from segapp.run.words import (
    age,
    clock_time,
    duration,
    learning_rate,
    number,
    percent,
    printable,
)
from segapp.tui.widgets import progress
from segapp.view.source import Status
from segapp.view.view import FACT_ALERTS, Evaluating, Raised, View
from segapp.view.wording import clip, finished_line
from segapp.view.wording import loss as loss_text

MIN_WIDTH, MIN_HEIGHT = 60, 15
NEW_S = 10.0
"""Age of the last event from which it is shown."""

STATE_STYLES = {
    "live": "$text-success bold",
    "busy": "$text-primary bold",
    "starting": "$text-primary bold",
    "resuming": "$text-primary bold",
    "reading": "$text-primary bold",
    "paused": "$text-warning bold",
    "stale": "$text-warning bold",
    "lost": "$text-warning bold",
    "crashed": "$text-error bold",
    "finished": "$text-success bold",
    "stopped": "$text-warning bold",
    "failed": "$text-error bold",
    "gone": "$text-error bold",
}


class LinePart(NamedTuple):
    """A part of a line."""

    rank: int
    """Parts with the highest rank are left out first."""
    text: str | Content
    style: str = ""

    @property
    def content(self) -> Content:
        return Content.styled(self.text, self.style) if isinstance(self.text, str) else self.text


def fit_parts(parts: Sequence[LinePart | None], width: int, gap: int = 2) -> Content:
    """Return the parts that fit into a width, joined; parts with the highest rank are left out first."""
    kept = [(part.rank, part.content) for part in parts if part is not None and part.content.cell_length]
    while kept and sum(content.cell_length for _, content in kept) + gap * (len(kept) - 1) > width:
        if len(kept) == 1:
            return kept[0][1].truncate(width, ellipsis=True)
        del kept[max(range(len(kept)), key=lambda i: (kept[i][0], i))]
    return Content(" " * gap).join([content for _, content in kept])


def state_content(view: View, status: Status) -> Content:
    """Return a dot, the state, and the phase of the trainer."""
    word, dot = status.word, "○" if status.is_over else "●"
    phase = f" {view.phase}" if view.phase and word in ("live", "busy", "stale", "lost") else ""
    return Content.styled(f"{dot} {word.upper()}{phase}", STATE_STYLES[word])


def header(
    view: View,
    status: Status,
    name: str,
    width: int,
    *,
    about: str,
    began: Mapping[str, str] | None = None,
    waiting: str = "",
    is_readonly: bool,
) -> Content:
    """Return the first line: name, state, what is trained, position, and the age of the last event if it is not new.

    `about` and `began` are `wording.setup` and `wording.chosen` of the config; `waiting` is `Wishes.waiting`.
    """
    start, muted = view.start, "$text-muted" if status.has_old_numbers else ""
    # In a narrow terminal, what stays the same gives way to the state, the step and the learning rate.
    parts = [
        LinePart(9, "segapp", "$text-muted") if width >= 76 else None,
        LinePart(1, clip(name, max(8, width // 4)), "bold"),
        LinePart(0, state_content(view, status)),
        LinePart(1, clip(f"waiting: {waiting}", max(24, width // 3)), "$text-warning bold") if waiting else None,
        LinePart(6, about, "$text-accent"),
        LinePart(2, _epoch(view)) if view.epoch is not None else None,
        LinePart(4, _steps(view), muted) if view.at_step is not None and start is not None else None,
        LinePart(5, f"lr {learning_rate(view.lr)}", muted) if view.lr is not None else None,
        LinePart(7, printable(start.precision)) if start is not None and start.precision is not None else None,
        *(LinePart(8, f"{key} {PurePath(text).name}") for key, text in (began or {}).items()),
        LinePart(7, f"up {duration(_up_s(view, status))}") if start is not None else None,
        LinePart(2, "read-only", "$text-warning") if is_readonly else None,
        LinePart(3, age(status.age_s), "$text-muted" if status.state != "stale" else "$text-warning bold")
        if status.age_s is not None and status.age_s >= NEW_S and status.starting_s is None
        else None,
    ]
    return fit_parts(parts, width)


def _epoch(view: View) -> str:
    return f"epoch {view.epoch}/{view.start.epochs}" if view.start is not None else f"epoch {view.epoch}"


def _steps(view: View) -> str:
    assert view.start is not None
    at_step, per_epoch = view.at_step or 0, view.start.steps_per_epoch
    if view.start.steps is not None:
        return f"step {at_step}/{view.start.steps}"
    return f"step {min(max(0, at_step - ((view.epoch or 1) - 1) * per_epoch), per_epoch)}/{per_epoch}"


def _up_s(view: View, status: Status) -> float | None:
    end_s = view.end.t if view.end is not None else view.last_s if status.is_over else status.now_s
    return None if end_s is None or view.start is None else end_s - view.start.t


def epoch_fraction(view: View) -> float | None:
    if view.start is None or view.epoch is None or not view.start.steps_per_epoch:
        return None
    done = (view.at_step or 0) - (view.epoch - 1) * view.start.steps_per_epoch
    return min(max(done / view.start.steps_per_epoch, 0.0), 1.0)


def run_fraction(view: View) -> float | None:
    if view.start is None:
        return None
    total = view.start.steps or view.start.epochs * view.start.steps_per_epoch
    return min((view.at_step or 0) / total, 1.0) if total else None


def etas_s(view: View, status: Status) -> tuple[float | None, float | None]:
    """Return the seconds to the end of the epoch and of the run; None if unknown."""
    step = view.step
    if step is None or status.has_old_numbers or view.is_paused:
        return None, None
    since_s = max(0.0, status.now_s - step.t - view.away_s)

    def left_s(eta_s: float | None) -> float | None:
        return None if eta_s is None or not since_s < eta_s < math.inf else eta_s - since_s

    of_epoch = step.eta_epoch_s if step.epoch == view.epoch else None  # no step of a new epoch has reported it yet
    return left_s(of_epoch), left_s(step.eta_run_s)


def progress_line(view: View, status: Status, width: int) -> Content:
    """Return the second line: progress and remaining time of the epoch or its evaluation, and of the run."""
    if status.loaded_frac < 1:
        done, left = progress(status.loaded_frac, max(8, width // 3))
        return Content.assemble("reading the history ", (done, "$text-primary"), (left, "$text-muted"))
    epoch_eta_s, run_eta_s = etas_s(view, status)
    bar_width = max(8, (width - 62) // 2)
    epoch, run = epoch_fraction(view), run_fraction(view)
    if view.evaluating is not None and not status.is_over:
        first = _evaluation(view, view.evaluating, status.now_s, max(8, bar_width - 10))
    else:
        first = _one_progress("epoch", epoch, epoch_eta_s, bar_width) if epoch is not None else Content("")
    here_s = status.now_s - status.skew_s
    ends = "" if run_eta_s is None else f"ends {clock_time(here_s + run_eta_s, here_s)}"
    parts = [
        LinePart(1, first),
        LinePart(0, _one_progress("run", run, run_eta_s, bar_width)) if run is not None else None,
        LinePart(2, ends, "$text-muted"),
    ]
    return fit_parts(parts, width, gap=3)


def _evaluation(view: View, found: Evaluating, now_s: float, width: int) -> Content:
    total = found.num_images
    done, left = progress(found.num_done / total if total else 0.0, width)
    eta_s = None if view.is_paused else found.eta_s(now_s)
    return Content.assemble(
        "eval ",
        (done, "$text-success"),
        (left, "$text-muted"),
        f" {found.num_done}/{total} images" if total else " begins",
        (f" ETA {duration(eta_s)}" if eta_s is not None else "", "bold"),
    )


def _one_progress(word: str, frac: float, eta_s: float | None, width: int) -> Content:
    done, left = progress(frac, width)
    eta = f" ETA {duration(eta_s)}" if eta_s is not None else ""
    shown = f"{100 * frac:.1f}%" if word == "run" and frac < 1 else f"{100 * frac:.0f}%"
    return Content.assemble(
        f"{word} ", (done, "$text-primary"), (left, "$text-muted"), f" {shown}", (eta.ljust(11), "bold")
    )


def dimmed(content: Content, status: Status) -> Content:
    """Return numbers of the steps or the devices without colors if they are the last ones of a process that is gone."""
    return Content.styled(content.plain, "$text-muted") if status.has_old_numbers else content


def throughput_line(view: View, status: Status, width: int) -> Content:
    """Return the throughput line: images per second, step time, data wait, gradient norm."""
    step = view.step
    if step is None:
        return Content.styled(
            "no step yet" if view.moved_s is None else "no loss yet: see log.every_steps", "$text-muted"
        )
    terms = list((step.terms or {}).items())
    # With a fifth of the time spent waiting, more workers or a cache are worth a try.
    wait_style = "$text-warning bold" if (step.data_wait_frac or 0.0) > 0.2 else ""
    step_s = step.step_s or 0.0
    step_time = f"{step_s * 1000:.0f} ms" if step_s < 10 else f"{step_s:.1f} s"
    parts = [
        LinePart(0, "last") if status.has_old_numbers else None,
        LinePart(0, Content.assemble((number(step.images_per_s), "bold"), " img/s")),
        LinePart(2, f"step {step_time}") if step.step_s is not None else None,
        LinePart(1, Content.assemble("waiting for data ", (percent(step.data_wait_frac), wait_style))),
        LinePart(3, f"grad norm {number(step.grad_norm)}") if step.grad_norm is not None else None,
        LinePart(3, f"skipped {step.skipped}", "$text-error") if step.skipped else None,
        LinePart(5, f"scale {step.loss_scale:g}") if step.loss_scale is not None else None,
        *(LinePart(6 + i, f"{name} {number(value)}") for i, (name, value) in enumerate(terms)),
    ]
    return dimmed(fit_parts(parts, width), status)


def device_kind(device: str | None) -> str:
    return "CPU" if device is not None and device.startswith("cpu") else "GPU"


def banner(
    view: View, status: Status, width: int, unseen: Sequence[Raised], *, run: str, again: str, doing: str, cause: str
) -> Content | None:
    """Return the start or end of the training, a problem or an alert that the user must see; None if there is none.

    `run`: the argument that names the run; `again`: how to continue; `doing`: what a start waits for; `cause`: what is
    known about the end of a process without an event.
    """
    word = status.word
    if word in ("starting", "resuming"):
        return Content.assemble((_from_where(view, status), "bold"), (printable(doing), "$text-primary bold"))
    where = f" on {printable(status.host)}" if status.host else ""
    # In a copy of a run, the lock names a process that holds the original.
    gone = "the trainer's process has died" if status.pid is not None else "no process holds this folder"
    problems = {
        "gone": (f"{run}: the run folder was removed; this is its last known state", "$text-error bold"),
        "crashed": (f"{gone}{_lost_steps(view)}: {cause}; {again}", "$text-error bold"),
        "stale": (
            "the trainer is running but writes no events: it may be stuck; more: segapp docs hangs",
            "$text-warning bold",
        ),
        "lost": (
            f"no events from the trainer{where}, and its process cannot be checked from this host: look for it there",
            "$text-warning",
        ),
    }
    if view.end is not None:
        more = f"; more: segapp docs {printable(view.end.topic)}" if view.end.topic else ""
        ended = f"{word}: {printable(view.end.reason or 'no reason given')}; {again}{more}"
        problems |= {
            "failed": (ended, "$text-error bold"),
            "stopped": (ended, "$text-warning bold"),
            "finished": (finished_line(view.best_words, run), "$text-success bold"),
        }
    if word in problems:
        return Content.styled(*problems[word])
    return _alert(unseen, width) if unseen else None


def _lost_steps(view: View) -> str:
    """Return how far the run was and what is saved of it; empty before the first step."""
    if view.at_step is None:
        return ""
    saved = "nothing is saved" if view.checkpoint is None else f"step {view.checkpoint.step} is saved"
    return f" after step {view.at_step} ({saved})"


def _from_where(view: View, status: Status) -> str:
    """Return the beginning of the sentence about a start: what is known about the step from which it continues."""
    if view.start is None or not status.is_resumed:
        return "starting: "
    if view.start.t >= (status.starting_s or 0.0):
        return f"resuming from step {view.start.resumed_from_step}: "
    return f"resuming, last saved at step {view.checkpoint.step}: " if view.checkpoint is not None else "resuming: "


def _alert(unseen: Sequence[Raised], width: int) -> Content:
    raised = unseen[-1]
    is_fact = raised.last.kind in FACT_ALERTS
    times = f" ({raised.times} times)" if raised.times > 1 and not is_fact else ""
    others = f"  {len(unseen) - 1} more" if len(unseen) > 1 else ""
    text, hint = (
        f"{printable(raised.last.kind)}{times}: {printable(raised.last.message)}",
        f"a dismiss, d details{others}",
    )
    if is_fact:
        return Content.assemble((clip(text, width - len(hint) - 2), "$text-warning"), (f"  {hint}", "$text-muted"))
    last = textwrap.wrap(text, width)[-1]
    gap = "  " if cell_len(last) + 2 + len(hint) <= width else "\n"
    return Content.assemble((text, "$text-error bold"), (gap + hint, "$text-muted"))


def notice(view: View, status: Status, name: str, width: int, height: int) -> Content:
    """Return the content for a terminal that is too small for panes: the state, and the size needed."""
    good, bad = "$text-success", "$text-error bold"
    size = Content.assemble(
        "segapp needs ",
        (str(MIN_WIDTH), good if width >= MIN_WIDTH else bad), "x",
        (str(MIN_HEIGHT), good if height >= MIN_HEIGHT else bad),
        f", has {width}x{height}",
    )  # fmt: skip
    last = "last " if status.has_old_numbers else ""
    loss = f"{last}loss {loss_text(view.loss.mean)}" if view.step is not None else "no step yet"
    lines = [
        Content.styled(clip(name, max(1, width)), "bold"),
        state_content(view, status),
        Content(f"{_epoch(view)}  {loss}" if view.epoch is not None else loss),
        size,
        Content.styled("press q to leave", "$text-muted"),
    ]
    return Content("\n").join([line.truncate(max(1, width), ellipsis=True) for line in lines[: max(1, height)]])
