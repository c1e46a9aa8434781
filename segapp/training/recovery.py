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
from typing import Any

from pydantic import TypeAdapter

from segapp.checkpoint.saver import Position
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import Evaluation
from segapp.inference.sliding import Inference
from segapp.memory.oom import examine, headline, is_out_of_memory, release, report_lines
from segapp.memory.split_check import format_split
from segapp.parallel.distributed import PeerOutOfMemoryError
from segapp.run.events import Alert, CommandAnswer, EventLog, EventReader, Gpu0Bsz, Oom, read_answers
from segapp.run.files import read_of_run, write_atomic
from segapp.run.folder import RunFolder
from segapp.run.words import first_line
from segapp.training.commands import CommandController
from segapp.training.context import RunContext
from segapp.training.step.engine import StepEngine

MAX_PIECES = 1024
"""Maximum number of pieces of a micro-batch."""
SMALLEST_WINDOW_PX = 64
_SAME_RESULT = "the same gradients and BatchNorm statistics, in about a third more time"

logger = logging.getLogger("segapp")


@dataclass(frozen=True)
class MemoryFallbacks:
    """The fallbacks that a run has adopted."""

    num_pieces: int = 1
    """Number of pieces of a micro-batch."""
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
        """Return the combination of two sets of fallbacks."""
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
        own = inference.window_px or self.window_px
        return replace(inference, window_px=(min(own[0], self.window_px[0]), min(own[1], self.window_px[1])))


def next_eval_fallback(
    fallbacks: MemoryFallbacks, inference: Inference, batch_size: int, crop_px: tuple[int, int], *, is_fixed: bool
) -> tuple[MemoryFallbacks, str] | None:
    """Return the next evaluation method, which needs less memory, and a sentence about it; None if there is none.

    `inference` is the method with the present fallbacks; the first window has the size of a training crop. `is_fixed`
    means that the network accepts only windows of one size.
    """
    if batch_size > 1 and not fallbacks.is_eval_single:
        return replace(fallbacks, is_eval_single=True), "evaluation continues image by image, with the same result"
    if is_fixed:
        return None
    if inference.window_px is None:
        window = crop_px
        text = f"evaluation continues in sliding windows of {window[0]}x{window[1]} instead of whole images"
    else:
        height, width = (max(SMALLEST_WINDOW_PX, side // 2) for side in inference.window_px)
        window = (min(height, inference.window_px[0]), min(width, inference.window_px[1]))
        if window == inference.window_px:
            return None
        text = f"evaluation continues in smaller windows, {window[0]}x{window[1]}"
    return replace(fallbacks, window_px=window), f"{text}: its scores differ slightly from those before"


def fallbacks_after(folder: RunFolder, step: int) -> list[tuple[int, MemoryFallbacks]]:
    """Return the fallbacks that any rank adopted after `step` updates, for a training that resumes there."""
    events = EventReader(folder.events).read_skimmed()
    adopted = [raw for raw in events if isinstance(raw, dict) and raw["type"] == "oom"]
    adopted += [raw for raw, _ in _rank_reports(folder)]
    found = [
        (int(raw.get("step") or 0), MemoryFallbacks.from_json(raw["fallbacks"]))
        for raw in adopted
        if raw.get("fallbacks")
    ]
    return sorted((each for each in found if each[0] >= step), key=lambda item: item[0])


def _rank_reports(folder: RunFolder) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the reports of ranks other than the main one, and the time of each, Unix seconds."""
    for path in sorted(folder.reports.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(read_of_run(path)), path.stat().st_mtime


def final_error(report: Oom) -> OutOfMemoryError:
    """Return the error that ends a training, with the whole report."""
    move = report.advice[0] if report.advice else "lower train.batch_size or data.crop_px"
    first = f"out of memory on {report.device} in {report.phase}: {report.problem}: {move}"
    return OutOfMemoryError("\n".join([first, *report_lines(report)[1:]]))


def report_reverted_split(folder: RunFolder, event_log: EventLog) -> None:
    """Emit that the newest change of the split was reverted, and reject its command, if a rank has reported this.

    That rank could not emit it, because only the main rank writes events. Call it before the inbox is read, so that the
    command is not carried out again.
    """
    rare = [raw for raw in EventReader(folder.events).read_skimmed() if isinstance(raw, dict)]
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
    reason = f"out of memory: split {format_split(split)} does not fit: back to the one before ({problems[0]})"
    asked_for: Any = {name: change.get(name) for name in ("old", "new", "epoch", "id", "is_auto")}
    event_log.emit(Gpu0Bsz(status="reverted", **asked_for, reason=reason, reason_code="out_of_memory"))
    asked = next((raw for raw in rare if raw["type"] == "command" and raw.get("id") == change.get("id")), None)
    if asked is not None and asked["id"] not in read_answers(rare):
        known: Any = {name: asked.get(name) for name in ("id", "command", "by", "step")}
        event_log.emit(CommandAnswer(status="rejected", reason=reason, **known))


class OomPolicy:
    """Reports out-of-memory errors, decides how to react, and runs evaluations with less memory.

    Args:
        batch_size: images of a micro-batch, over all devices and ranks.
        later: fallbacks adopted after the checkpoint that training continues from, with the step of each.
    """

    def __init__(
        self,
        context: RunContext,
        engine: StepEngine,
        controller: CommandController,
        inference: Inference,
        *,
        batch_size: int,
        accumulate: int,
        eval_batch_size: int,
        crop_px: tuple[int, int],
        later: Sequence[tuple[int, MemoryFallbacks]] = (),
    ) -> None:
        self.fallbacks = MemoryFallbacks()
        self._event_log, self._memory, self._ranks = context.event_log, context.device_memory, context.ranks
        self._folder = context.folder.reports
        self._engine, self._controller, self._inference = engine, controller, inference
        self._batch_size, self._accumulate = batch_size, accumulate
        self._eval_batch_size, self._crop_px = eval_batch_size, crop_px
        self._later = list(later)
        for split in {split for _, fallbacks in later for split in fallbacks.failed_splits}:
            controller.batch_split.record_failure(split)
        self._has_left_step = False
        self._cut_at_step: int | None = None
        """The step in which micro-batches were cut; another failure in it ends the training."""
        self._recomputed_at_step: int | None = None
        """The step from which blocks are recomputed."""

    @property
    def can_save(self) -> bool:
        """True if every rank is at a step boundary with a consistent state.

        It is False after an update was interrupted, or after this rank left a step in which the others still wait.
        """
        return self._engine.is_whole and not self._has_left_step

    def begin(self, position: Position) -> MemoryFallbacks:
        """Return the fallbacks for a step or an evaluation at a position.

        Fallbacks adopted after the checkpoint that training continues from are adopted again at the same step.
        """
        while self._later and self._later[0][0] <= position.step:
            later = self._later.pop(0)[1]
            self.fallbacks = self.fallbacks.joined(later)
            if later.is_recomputed:
                self._begin_recompute(position)
        return self.fallbacks

    def _begin_recompute(self, position: Position) -> None:
        self._recomputed_at_step = position.step
        self._controller.adopt_recompute("all")

    def keep_again(self, error: Exception, position: Position) -> bool:
        """Undo a recomputation that the network does not support after all; return False if it was not the cause."""
        is_first = self._recomputed_at_step == position.step and self._ranks.world_size == 1
        if not is_first or not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return False
        problem = first_line(error)
        release(error, self._engine.device)
        self.forget_recompute()
        self._recomputed_at_step, self._controller.recompute.problem = None, problem
        self._controller.adopt_recompute("config")
        message = f"recomputation was turned off, because a block does not support it: {problem}"
        self._event_log.emit(Alert(kind="recompute", message=message, step=position.step))
        return True

    def forget_recompute(self, *, is_later_too: bool = False) -> None:
        """Undo the recomputation that an out-of-memory error started, because the blocks are now chosen by hand."""
        self.fallbacks = replace(self.fallbacks, is_recomputed=False)
        if is_later_too:
            self._later = [(step, replace(each, is_recomputed=False)) for step, each in self._later]

    def handle_step_failure(self, error: Exception, position: Position) -> None:
        """After a step ran out of memory, revert to the last good split if there is one, else use less memory.

        The first fallback recomputes all blocks in the backward pass, the next ones cut micro-batches. The memory that
        the error holds is freed.

        Raises:
            OutOfMemoryError: there is no fallback left.
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
        found = self._next_fallback()
        if found is None:
            raise self._give_up(report, "no smaller pieces are possible: the training is saved and stops")
        is_recompute = self._controller.recompute.has_kept
        if not is_recompute and self._cut_at_step == position.step:
            raise self._give_up(report, "smaller pieces failed in the same step: the training is saved and stops")
        self.fallbacks, way = found
        if is_recompute:
            self._begin_recompute(position)
        else:
            self._cut_at_step = position.step
            self._controller.batch_split.clear_peaks()
        action = f"this step and all later steps run {way}"
        self._report(
            report, action=action, judge=self._controller.split_checker().to_json(), fallbacks=self.fallbacks.to_json()
        )

    def _fail_rank(self, error: Exception, position: Position) -> OutOfMemoryError:
        """Return the error of a rank that ran out of memory while the others wait in a collective of the same step."""
        self._has_left_step = True
        report = _placed(examine(error, self._memory, self._ranks.rank), position)
        failed = self._controller.batch_split.current
        reverted = self._controller.revert_split(report.problem or "", position.step)
        action, advice = "all ranks stop: the others wait in a collective of this step", self._advice(report)
        found = self._next_fallback()
        if reverted is not None and failed is not None:
            found = self.fallbacks.joined(MemoryFallbacks(failed_splits=(failed,))), "with the split before"
            action = f"{action}; {reverted}"
        if found is not None:
            advice.insert(0, f"segapp train --resume continues from the last checkpoint {found[1]}")
        adopted = None if found is None else found[0].to_json()
        report = report.model_copy(update={"action": action, "advice": advice, "fallbacks": adopted})
        if self._ranks.rank:
            self._report_alone(report)
        else:
            self._report(report)
        return final_error(report)

    def _next_fallback(self) -> tuple[MemoryFallbacks, str] | None:
        """Return the next way to make steps with less memory, and its description; None if there is none.

        First all blocks are recomputed. Then there are twice as many pieces, unless BatchNorm or the batch forbids it.
        """
        recompute = self._controller.recompute
        if recompute.has_kept:
            return replace(self.fallbacks, is_recomputed=True), f"with {recompute.words('all')}: {_SAME_RESULT}"
        num_pieces = 2 * self.fallbacks.num_pieces
        size = self._batch_size // num_pieces
        if num_pieces > MAX_PIECES or size < 1 or not self._engine.network.can_train_on(size, num_pieces):
            return None
        words = "the same mean over the step, but BatchNorm computes its statistics from smaller pieces"
        return replace(self.fallbacks, num_pieces=num_pieces), f"with each micro-batch in {num_pieces} pieces: {words}"

    def make_evaluation(self, evaluate: Callable[[MemoryFallbacks], Evaluation], position: Position) -> Evaluation:
        """Evaluate; if memory does not suffice, start again with a method that needs less.

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
            self._handle_eval_oom(failure, position)

    def _handle_eval_oom(self, error: Exception, position: Position) -> None:
        """Adopt an evaluation method that needs less memory, on every rank, or raise OutOfMemoryError."""
        report = self._examined(error, position)
        found = next_eval_fallback(
            self.fallbacks,
            self.fallbacks.adapted(self._inference),
            self._eval_batch_size,
            self._crop_px,
            is_fixed=self._engine.model.fixed_size_px is not None,
        )
        if found is None:
            raise self._give_up(report, "no smaller way to evaluate is left: the training is saved and stops")
        self.fallbacks, action = found
        self._report(report, action=action, fallbacks=self.fallbacks.to_json())

    def _examined(self, error: BaseException, position: Position) -> Oom:
        """Return the known facts of an out-of-memory error, on every rank; free the memory of the failed attempt."""
        is_own = not isinstance(error, PeerOutOfMemoryError)
        own = examine(error, self._memory, self._ranks.rank) if is_own else None
        release(error, self._engine.device)
        batch_split = self._controller.batch_split
        split, predicted_mib = list(batch_split.current or ()), list(batch_split.predicted_mib())
        update = {"split": split or None, "predicted_mib": predicted_mib or None}
        return _placed(self._ranks.first_of(own), position).model_copy(update=update)

    def _give_up(self, report: Oom, action: str) -> OutOfMemoryError:
        return final_error(self._report(report, action=action, advice=self._advice(report)))

    def _advice(self, report: Oom) -> list[str]:
        """Return changes of the config that need less memory."""
        height, width = self._crop_px
        if report.phase == "eval":
            return [f"eval.slide=true eval.slide_px=[{height // 2},{width // 2}]", "eval.batch_size=1"]
        smaller = [f"lower data.crop_px = [{height}, {width}]"]
        if self._batch_size > 1:
            accumulate = f"train.accumulate={2 * self._accumulate}"
            smaller.insert(0, f"lower train.batch_size: train.batch_size={self._batch_size // 2} {accumulate}")
        return smaller

    def _report(self, report: Oom, **changes: Any) -> Oom:
        """Complete a report and write it as an event, a file and an alert, on the main rank; return it."""
        report = report.model_copy(update=changes)
        if self._ranks.is_main:
            path = self._write(report)
            self._event_log.emit(report.model_copy(update={"path": path}))
            message = f"{headline(report)}; {report.problem}" + (f"; see {path}" if path else "")
            self._event_log.emit(Alert(kind="oom", message=message, step=report.step))
        return report

    def _report_alone(self, report: Oom) -> None:
        """Write the facts that only this rank knows, if no collective is possible; a resume adopts the fallbacks."""
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"rank_{self._ranks.rank}_step_{report.step}.json"
            if path.exists():  # of an earlier start of the ranks: its fallbacks are kept
                path = path.with_stem(f"{path.stem}_{1 + len(list(self._folder.glob('rank_*.json')))}")
            write_atomic(path, report.model_dump_json(exclude={"v", "seq", "t", "type", "path"}) + "\n")
        except OSError:
            logger.exception("report of an out-of-memory")
        self._write(report)

    def _write(self, report: Oom) -> str | None:
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"oom_{1 + len(list(self._folder.glob('oom_*.txt'))):04}.txt"
            write_atomic(path, "\n".join(report_lines(report)) + "\n")
        except OSError:
            logger.exception("report of an out-of-memory")
            return None
        return f"{self._folder.name}/{path.name}"


def _placed(report: Oom, position: Position) -> Oom:
    return report.model_copy(update={"epoch": position.epoch, "step": position.step})
