"""Reactions to an out-of-memory error: revert the split, adopt a fallback, or end the training.

A fallback is a method that needs less memory, which a run keeps, even after a resume. First all blocks of the network
are recomputed in the backward pass, then micro-batches are cut into pieces. Evaluation processes single images, then
sliding windows, then smaller windows.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from segapp.checkpoint.saver import Position
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import Evaluation
from segapp.inference.sliding import Inference
from segapp.memory.oom import examine, headline, is_out_of_memory, release, report_lines
from segapp.parallel.distributed import PeerOutOfMemoryError
from segapp.run.events import Alert, CommandAnswer, EventLog, EventReader, Gpu0Bsz, Oom, read_answers
from segapp.run.files import read_of_run, write_atomic
from segapp.run.folder import RunFolder
from segapp.run.words import dots, first_line
from segapp.training.commands import CommandController
from segapp.training.context import RunContext
from segapp.training.step.engine import StepEngine

MAX_PIECES = 1024
SMALLEST_WINDOW_PX = 64
_SAME_RESULT = "the same gradients and BatchNorm statistics, in about a third more time"

logger = logging.getLogger("segapp")


@dataclass(frozen=True)
class MemoryFallbacks:
    """The fallbacks that a run has adopted; `num_pieces` are the pieces of a micro-batch."""

    num_pieces: int = 1
    is_eval_single: bool = False
    """Evaluate image by image, whatever `eval.batch_size` is."""
    window_px: tuple[int, int] | None = None
    """Evaluate in windows of this height and width; None: as configured."""
    failed_splits: tuple[tuple[int, ...], ...] = ()
    """Splits over ranks that ran out of memory; the run uses the previous split again."""
    is_recomputed: bool = False
    """Recompute all blocks of the network in the backward pass."""

    def to_json(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, as plain values."""
        return {name: value for name, value in vars(self).items() if value != getattr(MemoryFallbacks, name)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> MemoryFallbacks:
        """Return the fallbacks of `to_json`'s values; unknown names are ignored."""
        return TypeAdapter(MemoryFallbacks).validate_python(values)

    def joined(self, other: MemoryFallbacks) -> MemoryFallbacks:
        windows = [window for window in (self.window_px, other.window_px) if window is not None]
        return MemoryFallbacks(
            max(self.num_pieces, other.num_pieces),
            self.is_eval_single or other.is_eval_single,
            min(windows, key=lambda window: window[0] * window[1], default=None),
            tuple(sorted({*self.failed_splits, *other.failed_splits})),
            self.is_recomputed or other.is_recomputed,
        )

    def adapted(self, inference: Inference) -> Inference:
        """Return the inference of whole images with these fallbacks."""
        if self.window_px is None:
            return inference
        height, width = inference.window_px or self.window_px
        return replace(inference, window_px=(min(height, self.window_px[0]), min(width, self.window_px[1])))


class Fallback(NamedTuple):
    """A method that needs less memory: a row of an ordered list, of which the first that applies is adopted."""

    applies: bool
    adopted: MemoryFallbacks
    """The run's fallbacks with this one."""
    words: str
    """Text for the report."""


def next_eval_fallback(
    fallbacks: MemoryFallbacks, inference: Inference, batch_size: int, crop_px: tuple[int, int], *, is_fixed: bool
) -> Fallback | None:
    """Return the next method to evaluate with less memory; None if there is none.

    `inference` is the method with the present fallbacks; the first window has the size of a training crop. `is_fixed`
    means that the network accepts only windows of one size.
    """
    window = inference.window_px or crop_px
    height, width = (min(side, max(SMALLEST_WINDOW_PX, side // 2)) for side in window)
    is_whole, effect = inference.window_px is None, "its scores differ slightly from those before"
    rows = (
        Fallback(
            batch_size > 1 and not fallbacks.is_eval_single,
            replace(fallbacks, is_eval_single=True),
            "evaluation continues image by image, with the same result",
        ),
        Fallback(
            is_whole and not is_fixed,
            replace(fallbacks, window_px=window),
            f"evaluation continues in sliding windows of {window[0]}x{window[1]} instead of whole images: {effect}",
        ),
        Fallback(
            not (is_whole or is_fixed) and (height, width) != window,
            replace(fallbacks, window_px=(height, width)),
            f"evaluation continues in smaller windows, {height}x{width}: {effect}",
        ),
    )
    return next((row for row in rows if row.applies), None)


def fallbacks_after(folder: RunFolder, step: int) -> list[tuple[int, MemoryFallbacks]]:
    """Return the fallbacks that any rank adopted after `step` updates, for a training that resumes there."""
    reports = [*EventReader(folder.events).read_kinds("oom"), *(raw for raw, _ in _rank_reports(folder))]
    adopting = [raw for raw in reports if raw.get("fallbacks") and int(raw.get("step") or 0) >= step]
    adopted = [(int(raw.get("step") or 0), MemoryFallbacks.from_json(raw["fallbacks"])) for raw in adopting]
    return sorted(adopted, key=lambda item: item[0])


def _rank_reports(folder: RunFolder) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the reports of ranks other than the main one, and the time of each, Unix seconds."""
    for path in sorted(folder.reports.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(read_of_run(path)), path.stat().st_mtime


def final_error(report: Oom) -> OutOfMemoryError:
    move = report.advice[0] if report.advice else "lower train.batch_size or data.crop_px"
    first = f"out of memory on {report.device} in {report.phase}: {report.problem}: {move}"
    return OutOfMemoryError("\n".join([first, *report_lines(report)[1:]]))


def report_reverted_split(folder: RunFolder, event_log: EventLog) -> None:
    """Emit that the newest change of the split was reverted, and reject its command, if a rank has reported this.

    That rank could not emit it, because only the main rank writes events. Call it before the inbox is read, so that the
    command is not carried out again.
    """
    rare = list(EventReader(folder.events).read_kinds("gpu0_bsz", "command"))
    change = next((raw for raw in reversed(rare) if raw["type"] == "gpu0_bsz"), None)
    if change is None or change["status"] not in ("pending", "applied") or not change.get("split"):
        return
    split = tuple(change["split"])
    problems = [
        raw.get("problem") or raw.get("message") or "a rank ran out of memory"
        for raw, written_s in _rank_reports(folder)
        if written_s >= change["t"] and split in MemoryFallbacks.from_json(raw.get("fallbacks") or {}).failed_splits
    ]
    if not problems:
        return
    reason = f"out of memory: split {dots(split)} does not fit: back to the one before ({problems[0]})"
    asked_for: Any = {name: change.get(name) for name in ("old", "new", "epoch", "id", "is_auto")}
    event_log.emit(Gpu0Bsz(status="reverted", **asked_for, reason=reason))
    asked = next((raw for raw in rare if raw["type"] == "command" and raw.get("id") == change.get("id")), None)
    if asked is not None and asked["id"] not in read_answers(rare):
        known: Any = {name: asked.get(name) for name in ("id", "command", "by", "step")}
        event_log.emit(CommandAnswer(status="rejected", reason=reason, **known))


class OomPolicy:
    """Reports out-of-memory errors, adopts fallbacks, and runs evaluations with less memory.

    Only `LiveSettings.recompute` says which blocks are recomputed; `fallbacks.is_recomputed` says that it is `all`
    because of an out-of-memory error.

    Args:
        to_adopt: fallbacks adopted after the checkpoint that training continues from, with the step of each.
    """

    def __init__(
        self,
        context: RunContext,
        engine: StepEngine,
        controller: CommandController,
        inference: Inference,
        *,
        accumulate: int,
        eval_batch_size: int,
        crop_px: tuple[int, int],
        to_adopt: Sequence[tuple[int, MemoryFallbacks]] = (),
    ) -> None:
        self.fallbacks = MemoryFallbacks()
        self._event_log, self._memory, self._ranks = context.event_log, context.device_memory, context.ranks
        self._folder = context.folder.reports
        self._engine, self._controller, self._inference = engine, controller, inference
        self._batch_size, self._accumulate = controller.batch_split.batch_size, accumulate
        self._eval_batch_size, self._crop_px = eval_batch_size, crop_px
        self._to_adopt = list(to_adopt)
        for split in {split for _, fallbacks in to_adopt for split in fallbacks.failed_splits}:
            controller.batch_split.record_failure(split)
        self._has_left_step = False
        self._cut_at_step: int | None = None
        """The step in which micro-batches were cut; another failure in it ends the training."""
        self._recomputed_at_step: int | None = None
        """The step from which blocks are recomputed."""

    @property
    def can_save(self) -> bool:
        """True if every rank is between two steps, with a consistent state.

        It is False after an update was interrupted, or after this rank left a step in which the others still wait.
        """
        return self._engine.is_whole and not self._has_left_step

    def begin(self, position: Position) -> MemoryFallbacks:
        """Return the fallbacks for a step or an evaluation at a position.

        Fallbacks adopted after the checkpoint that training continues from are adopted again at the same step.
        """
        while self._to_adopt and self._to_adopt[0][0] <= position.step:
            self._adopt(self.fallbacks.joined(self._to_adopt.pop(0)[1]), position)
        return self.fallbacks

    def _adopt(self, fallbacks: MemoryFallbacks, position: Position) -> None:
        """Use these fallbacks from the next step or evaluation on."""
        old, self.fallbacks = self.fallbacks, fallbacks
        if fallbacks.is_recomputed and not old.is_recomputed:
            self._recomputed_at_step = position.step
            self._controller.adopt_recompute("all")
        if fallbacks.num_pieces > old.num_pieces:
            self._controller.batch_split.clear_peaks()

    def undo_recompute_if_cause(self, error: Exception, position: Position) -> bool:
        """Undo a recomputation that the network does not support after all; return False if it was not the cause."""
        is_first = self._recomputed_at_step == position.step and self._ranks.world_size == 1
        if not is_first or not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return False
        problem = first_line(error)
        release(error, self._engine.device)
        self.drop_automatic_recompute()
        self._recomputed_at_step, self._controller.recompute.problem = None, problem
        self._controller.adopt_recompute("config")
        message = f"recomputation was turned off, because a block does not support it: {problem}"
        self._event_log.emit(Alert(kind="recompute", message=message, step=position.step))
        return True

    def drop_automatic_recompute(self, *, is_dropped_for_good: bool = False) -> None:
        """Record that the user now chooses the blocks; `is_dropped_for_good`: do not recompute all at a later step."""
        self.fallbacks = replace(self.fallbacks, is_recomputed=False)
        if is_dropped_for_good:
            self._to_adopt = [(step, replace(each, is_recomputed=False)) for step, each in self._to_adopt]

    def handle_step_failure(self, error: Exception, position: Position) -> None:
        """After a step ran out of memory, revert to the previous split, else adopt the next fallback.

        In one process the step is repeated. Several ranks end, because the others wait in an exchange of the same step;
        they adopt the fallback when they resume. The memory that the error holds is freed.

        Raises:
            OutOfMemoryError: there is no fallback left, or there are several ranks.
        """
        if self._ranks.world_size > 1:
            raise self._fail_rank(error, position)
        report = self._examined(error, position)
        reverted = self._controller.revert_split(report.problem or "", position.step)
        if reverted is not None:
            self._report(report, action=f"{reverted}; the step was repeated")
            return
        if not self._engine.is_whole:
            raise self._give_up(report, "the optimizer update was interrupted: resume from the last checkpoint")
        fallback = self._next_step_fallback(position)
        if fallback is None:
            why = "no smaller pieces are possible, or they failed in the same step"
            raise self._give_up(report, f"{why}: the training is saved and stops")
        is_cut = fallback.adopted.num_pieces > self.fallbacks.num_pieces
        self._cut_at_step = position.step if is_cut else self._cut_at_step
        self._adopt(fallback.adopted, position)
        action, checker = f"this step and all later steps run {fallback.words}", self._controller.split_checker()
        self._report(report, action=action, judge=checker.to_json(), fallbacks=self.fallbacks.to_json())

    def _fail_rank(self, error: Exception, position: Position) -> OutOfMemoryError:
        """Report the error of one of several ranks, with the fallback for the resume; return the error to raise."""
        self._has_left_step = True
        report = _placed(examine(error, self._memory, self._ranks.rank), position)
        failed = self._controller.batch_split.current
        reverted = self._controller.revert_split(report.problem or "", position.step)
        action, advice = "all ranks stop: the others wait in a collective of this step", self._advice(report)
        fallback = self._next_step_fallback(position)
        if reverted is not None and failed is not None:
            fallbacks = self.fallbacks.joined(MemoryFallbacks(failed_splits=(failed,)))
            action, fallback = f"{action}; {reverted}", Fallback(True, fallbacks, "with the split before")
        if fallback is not None:
            advice.insert(0, f"segapp train --resume continues from the last checkpoint {fallback.words}")
        adopted = None if fallback is None else fallback.adopted.to_json()
        return final_error(self._report(report, action=action, advice=advice, fallbacks=adopted))

    def _next_step_fallback(self, position: Position) -> Fallback | None:
        """Return the next method to make steps with less memory, for one process and for a rank; None if there is none.

        There are twice as many pieces each time, unless BatchNorm, the batch, or a failure in this step forbids it.
        """
        now, recompute = self.fallbacks, self._controller.recompute
        num_pieces = 2 * now.num_pieces
        size = self._batch_size // num_pieces
        can_cut = num_pieces <= MAX_PIECES and size >= 1 and self._cut_at_step != position.step
        rows = (
            Fallback(
                recompute.has_kept(self._controller.settings.recompute),
                replace(now, is_recomputed=True),
                f"with {recompute.describe('all')}: {_SAME_RESULT}",
            ),
            Fallback(
                can_cut and self._engine.network.can_train_on(size, num_pieces),
                replace(now, num_pieces=num_pieces),
                f"with each micro-batch in {num_pieces} pieces: the same mean over the step, but BatchNorm computes "
                "its statistics from smaller pieces",
            ),
        )
        return next((row for row in rows if row.applies), None)

    def make_evaluation(self, evaluate: Callable[[MemoryFallbacks], Evaluation], position: Position) -> Evaluation:
        """Evaluate; if memory does not suffice on a rank, start again on every rank with a method that needs less.

        Raises:
            OutOfMemoryError: no method needs little enough memory.
        """
        while True:
            try:
                return evaluate(self.begin(position))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            report, inference = self._examined(failure, position), self.fallbacks.adapted(self._inference)
            is_fixed = self._engine.model.fixed_size_px is not None
            sizes = self._eval_batch_size, self._crop_px
            fallback = next_eval_fallback(self.fallbacks, inference, *sizes, is_fixed=is_fixed)
            if fallback is None:
                raise self._give_up(report, "no smaller way to evaluate is left: the training is saved and stops")
            self._adopt(fallback.adopted, position)
            self._report(report, action=fallback.words, fallbacks=self.fallbacks.to_json())

    def _examined(self, error: BaseException, position: Position) -> Oom:
        """Return the known facts of an out-of-memory error, on every rank; free the memory of the failed attempt."""
        is_of_peer = isinstance(error, PeerOutOfMemoryError)
        report = None if is_of_peer else examine(error, self._memory, self._ranks.rank)
        release(error, self._engine.device)
        split, predicted_mib = list(self._controller.batch_split.current or ()), list(self._controller.predicted_mib())
        update = {"split": split or None, "predicted_mib": predicted_mib or None}
        return _placed(self._ranks.first_of(report), position).model_copy(update=update)

    def _give_up(self, report: Oom, action: str) -> OutOfMemoryError:
        return final_error(self._report(report, action=action, advice=self._advice(report)))

    def _advice(self, report: Oom) -> list[str]:
        height, width = self._crop_px
        if report.phase == "eval":
            return [f"eval.slide=true eval.slide_px=[{height // 2},{width // 2}]", "eval.batch_size=1"]
        smaller = [f"lower data.crop_px = [{height}, {width}]"]
        if self._batch_size > 1:
            accumulate = f"train.accumulate={2 * self._accumulate}"
            smaller.insert(0, f"lower train.batch_size: train.batch_size={self._batch_size // 2} {accumulate}")
        return smaller

    def _report(self, report: Oom, **changes: Any) -> Oom:
        """Complete a report and write it as an event, a file and an alert, or on another rank as files; return it."""
        report = report.model_copy(update=changes)
        if self._ranks.is_main:
            path = self._write(report)
            self._event_log.emit(report.model_copy(update={"path": path}))
            message = f"{headline(report)}; {report.problem}" + (f"; see {path}" if path else "")
            self._event_log.emit(Alert(kind="oom", message=message, step=report.step))
        elif self._has_left_step:  # the main rank does not know of it
            self._write(report)
        return report

    def _write(self, report: Oom) -> str | None:
        """Write a report as text; also as JSON, for a resume, on a rank that cannot emit it."""
        try:
            self._folder.mkdir(exist_ok=True)
            if not self._ranks.is_main:
                path = self._folder / f"rank_{self._ranks.rank}_step_{report.step}.json"
                if path.exists():  # of an earlier start of the ranks: its fallbacks are kept
                    path = path.with_stem(f"{path.stem}_{1 + len(list(self._folder.glob('rank_*.json')))}")
                write_atomic(path, report.model_dump_json(exclude={"v", "seq", "t", "type", "path"}) + "\n")
            path = self._folder / f"oom_{1 + len(list(self._folder.glob('oom_*.txt'))):04}.txt"
            write_atomic(path, "\n".join(report_lines(report)) + "\n")
        except OSError:
            logger.exception("report of an out-of-memory")
            return None
        return f"{self._folder.name}/{path.name}"


def _placed(report: Oom, position: Position) -> Oom:
    return report.model_copy(update={"epoch": position.epoch, "step": position.step})
