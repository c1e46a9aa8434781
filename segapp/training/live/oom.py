"""Reactions to an out-of-memory error: revert the split, adopt a fallback, or end the training.

A fallback is a method that needs less memory, which a run keeps, even after a resume. First all blocks of the network
are recomputed in the backward pass, then micro-batches are cut into pieces. Evaluation processes single images, then
sliding windows, then smaller windows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from segapp.checkpoint.saver import Position
from segapp.config import LiveSettings
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import Evaluation
from segapp.inference.sliding import Inference, smaller_window
from segapp.memory.oom import examine, headline, is_out_of_memory, release, report_lines
from segapp.parallel.distributed import PeerOutOfMemoryError
from segapp.run.events import Alert, Oom, Settings
from segapp.run.files import write_atomic
from segapp.run.words import first_line
from segapp.training.context import RunContext
from segapp.training.live.controller import CommandController
from segapp.training.step.engine import StepEngine

MAX_PIECES = 1024
_SAME_RESULT = "the same gradients and BatchNorm statistics, in about a third more time"

logger = logging.getLogger("segapp")


class Fallback(NamedTuple):
    """A method that needs less memory: a row of an ordered list, of which the first that applies is adopted."""

    applies: bool
    values: Mapping[str, Any]
    """The settings that it changes."""
    words: str
    """Text for the report."""


def next_eval_fallback(
    settings: LiveSettings, inference: Inference, batch_size: int, crop_px: tuple[int, int], *, is_fixed: bool
) -> Fallback | None:
    """Return the next method to evaluate with less memory; None if there is none.

    `inference` is the method with the present fallbacks; the first window has the size of a training crop. `is_fixed`
    means that the network accepts only windows of one size.
    """
    window, effect = inference.window_px, "its scores differ slightly from those before"
    smaller = None if window is None else smaller_window(window)
    # The first keeps the scores, so it comes before those that change them.
    rows = (
        Fallback(
            batch_size > 1 and not settings.is_eval_single,
            {"is_eval_single": True},
            "evaluation continues image by image, with the same result",
        ),
        Fallback(
            window is None and not is_fixed,
            {"window_px": crop_px},
            f"evaluation continues in sliding windows of {crop_px[0]}x{crop_px[1]} instead of whole images: {effect}",
        ),
        Fallback(
            smaller is not None and not is_fixed,
            {"window_px": smaller},
            "evaluation continues in smaller windows, {}x{}: {}".format(*(smaller or crop_px), effect),
        ),
    )
    return next((row for row in rows if row.applies), None)


def final_error(report: Oom) -> OutOfMemoryError:
    move = report.advice[0] if report.advice else "lower train.batch_size or data.crop_px"
    first = f"out of memory on {report.device} in {report.phase}: {report.problem}: {move}"
    return OutOfMemoryError("\n".join([first, *report_lines(report)[1:]]))


class OomPolicy:
    """Reports out-of-memory errors, adopts fallbacks, and runs evaluations with less memory."""

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
    ) -> None:
        self._event_log, self._memory, self._ranks = context.event_log, context.device_memory, context.ranks
        self._folder = context.folder.reports
        self._engine, self._controller, self._inference = engine, controller, inference
        self._batch_size, self._accumulate = controller.batch_split.batch_size, accumulate
        self._eval_batch_size, self._crop_px = eval_batch_size, crop_px
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

    def begin(self, position: Position) -> LiveSettings:
        """Return the settings for a step or an evaluation at a position, with the fallbacks that are due again."""
        due = self._controller.take_due_fallbacks(position.step)
        if due != self._controller.settings:
            self._adopt(due, position)
        return due

    def _adopt(self, settings: LiveSettings, position: Position) -> None:
        """Use fallbacks from the next step or evaluation on."""
        if settings.is_recomputed and not self._controller.settings.is_recomputed:
            self._recomputed_at_step = position.step
        self._controller.adopt(settings)

    def undo_recompute_if_cause(self, error: Exception, position: Position) -> bool:
        """Undo a recomputation that the network does not support after all; return False if it was not the cause."""
        is_first = self._recomputed_at_step == position.step and self._ranks.world_size == 1
        if not is_first or not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return False
        problem = first_line(error)
        release(error, self._engine.device)
        self._recomputed_at_step = None
        self._controller.blocks.problem = problem
        self._adopt(self._controller.settings.with_changes({"recompute": "config"}), position)
        message = f"recomputation was turned off, because a block does not support it: {problem}"
        self._event_log.emit(Alert(kind="recompute", message=message, step=position.step))
        return True

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
        # Some parameters have their new values, so the step cannot be repeated.
        if not self._engine.is_whole:
            raise self._give_up(report, "the optimizer update was interrupted: resume from the last checkpoint")
        fallback = self._next_step_fallback(position)
        if fallback is None:
            why = "no smaller pieces are possible, or they failed in the same step"
            raise self._give_up(report, f"{why}: the training is saved and stops")
        if "num_pieces" in fallback.values:
            self._cut_at_step = position.step
        self._adopt(self._controller.settings.with_changes(fallback.values), position)
        action, checker = f"this step and all later steps run {fallback.words}", self._controller.split_checker()
        self._report(report, action=action, checker=checker.to_json())

    def _fail_rank(self, error: Exception, position: Position) -> OutOfMemoryError:
        """Report the error of one of several ranks, with the fallback for the resume; return the error to raise."""
        self._has_left_step = True
        report = _placed(examine(error, self._memory, self._ranks.rank), position)
        # Read before the revert, which changes it.
        failed = self._controller.batch_split.current
        reverted = self._controller.revert_split(report.problem or "", position.step)
        action, advice = "all ranks stop: the others wait in a collective of this step", self._advice(report)
        fallback = self._next_step_fallback(position)
        if reverted is not None and failed is not None:
            action, fallback = f"{action}; {reverted}", Fallback(True, {}, "with the split before")
        if fallback is not None:
            advice.insert(0, f"segapp train --resume continues from the last checkpoint {fallback.words}")
        error = final_error(self._report(report, action=action, advice=advice))
        if fallback is not None:
            fallbacks = self._controller.settings.with_changes(fallback.values).fallbacks
            self._record(
                Settings(
                    step=position.step,
                    reason=report.problem or "out of memory",
                    fallbacks=fallbacks or None,
                    failed_split=None if reverted is None or failed is None else list(failed),
                )
            )
        return error

    def _record(self, event: Settings) -> None:
        """Emit the settings of a resume, or write them to a file on a rank that cannot emit events."""
        if self._ranks.is_main:
            self._event_log.emit(event)
            return
        path = self._folder / f"rank_{self._ranks.rank}_step_{event.step}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            if path.exists():  # of an earlier start of the ranks: its fallbacks are kept
                path = path.with_stem(f"{path.stem}_{1 + len(list(self._folder.glob('rank_*.json')))}")
            write_atomic(path, event.model_dump_json(exclude={"v", "seq", "t", "type"}, exclude_none=True) + "\n")
        except OSError:
            logger.exception("settings after an out-of-memory error")

    def _next_step_fallback(self, position: Position) -> Fallback | None:
        """Return the next method to make steps with less memory, for one process and for a rank; None if there is none.

        There are twice as many pieces each time, unless BatchNorm, the batch, or a failure in this step forbids it.
        """
        now, blocks = self._controller.settings, self._controller.blocks
        num_pieces = 2 * now.num_pieces
        size = self._batch_size // num_pieces
        can_cut = num_pieces <= MAX_PIECES and size >= 1 and self._cut_at_step != position.step
        rows = (
            Fallback(
                blocks.has_kept(now.recompute),
                {"is_recomputed": True},
                f"with {blocks.describe('all')}: {_SAME_RESULT}",
            ),
            Fallback(
                can_cut and self._engine.network.can_train_on(size, num_pieces),
                {"num_pieces": num_pieces},
                f"with each micro-batch in {num_pieces} pieces: the same mean over the step, but BatchNorm computes "
                "its statistics from smaller pieces",
            ),
        )
        return next((row for row in rows if row.applies), None)

    def make_evaluation(self, evaluate: Callable[[LiveSettings], Evaluation], position: Position) -> Evaluation:
        """Evaluate; if memory does not suffice on a rank, start again on every rank with a method that needs less.

        Raises:
            OutOfMemoryError: no method needs little enough memory.
        """
        while True:
            settings = self.begin(position)
            try:
                return evaluate(settings)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            report, inference = self._examined(failure, position), self._inference.within(settings.window_px)
            is_fixed = self._engine.model.fixed_size_px is not None
            sizes = self._eval_batch_size, self._crop_px
            fallback = next_eval_fallback(settings, inference, *sizes, is_fixed=is_fixed)
            if fallback is None:
                raise self._give_up(report, "no smaller way to evaluate is left: the training is saved and stops")
            self._adopt(settings.with_changes(fallback.values), position)
            self._report(report, action=fallback.words)

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
        """Complete a report and write it as an event, a file and an alert, or on another rank as a file; return it."""
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
        """Write a report as text; return its path in the run folder, None if that failed."""
        try:
            self._folder.mkdir(exist_ok=True)
            name = "oom" if self._ranks.is_main else f"oom_rank_{self._ranks.rank}"
            numbers = (int(path.stem[-4:]) for path in self._folder.glob(f"{name}_[0-9][0-9][0-9][0-9].txt"))
            path = self._folder / f"{name}_{1 + max(numbers, default=0):04}.txt"
            write_atomic(path, "\n".join(report_lines(report)) + "\n")
        except OSError:
            logger.exception("report of an out-of-memory")
            return None
        return f"{self._folder.name}/{path.name}"


def _placed(report: Oom, position: Position) -> Oom:
    return report.model_copy(update={"epoch": position.epoch, "step": position.step})
