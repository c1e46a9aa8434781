"""The reaction to an out-of-memory error: revert the split, adopt a fallback, or give up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from segapp.checkpoint.saver import Position
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import Evaluation
from segapp.inference.sliding import Inference
from segapp.memory.oom import is_out_of_memory
from segapp.memory.oom_report import OomReport, OomSnapshot
from segapp.parallel.distributed import PeerOutOfMemoryError
from segapp.training.control.commands import CommandController
from segapp.training.recovery.fallbacks import MemoryFallbacks, next_eval_fallback
from segapp.training.recovery.memory_limit import MemoryLimit
from segapp.training.recovery.out_of_memory import OomHandler, final_error, first_line
from segapp.training.step.engine import StepEngine
from segapp.training.step.precise_bn import BatchNormMemoryError

MAX_PIECES = 1024
"""A micro-batch is cut into at most so many pieces."""


@dataclass(frozen=True)
class BatchSizes:
    """The sizes that decide what needs less memory.

    Attributes:
        batch_size: images of a micro-batch, all devices and ranks together.
        accumulate: micro-batches of a step.
        eval_batch_size: images of an evaluation batch.
        crop_px: height and width of a training crop.
    """

    batch_size: int
    accumulate: int
    eval_batch_size: int
    crop_px: tuple[int, int]


class OomPolicy:
    """Decides what follows an out-of-memory error, and makes evaluations that need less memory.

    Args:
        handler: examines and reports out-of-memory errors.
        engine: makes steps.
        controller: reverts a split that was applied a moment ago.
        inference: of the evaluation, without fallbacks.
        sizes: of batches and crops.
        limit: what each device may hold; None: all that it has.
        later: fallbacks adopted after the checkpoint that training continues from, with the step of each.

    Attributes:
        fallbacks: those in force.
    """

    def __init__(
        self,
        handler: OomHandler,
        engine: StepEngine,
        controller: CommandController,
        inference: Inference,
        sizes: BatchSizes,
        *,
        limit: MemoryLimit | None = None,
        later: Sequence[tuple[int, MemoryFallbacks]] = (),
    ) -> None:
        self.fallbacks = MemoryFallbacks()
        self._handler, self._engine, self._controller = handler, engine, controller
        self._inference, self._sizes, self._limit = inference, sizes, limit
        self._ranks = engine.ranks
        self._later = list(later)
        for split in {split for _, fallbacks in later for split in fallbacks.failed_splits}:
            controller.batch_split.record_failure(split)
        self._has_left_step = False
        self._cut_at_step: int | None = None
        """The step for which micro-batches were cut; failing there again ends the training."""

    @property
    def can_save(self) -> bool:
        """True if every rank is at a step boundary with a whole state.

        False after an update broke off in the middle, or after this rank left a step in which the others still wait.
        """
        return self._engine.is_whole and not self._has_left_step

    def restore(self, fallbacks: MemoryFallbacks) -> None:
        """Adopt the fallbacks of a checkpoint."""
        self.fallbacks = fallbacks

    def after_thaw(self) -> None:
        """Count the memory of the parameters that are trained from now on."""
        if self._limit is not None:
            self._limit.hold_training(self._engine)

    # --- a step ----------------------------------------------------------------------------------------------------

    def begin(self, position: Position) -> MemoryFallbacks:
        """Return the fallbacks for a step or an evaluation at a position.

        Those adopted after the checkpoint that training continues from are adopted again at the same step.
        """
        while self._later and self._later[0][0] <= position.step:
            self.fallbacks = self.fallbacks.joined(self._later.pop(0)[1])
        return self.fallbacks

    def within_limit(self) -> AbstractContextManager[None]:
        """Return the context in which the memory limits are enforced."""
        return nullcontext() if self._limit is None else self._limit.enforced()

    def handle_step_failure(self, error: Exception, position: Position) -> None:
        """After a step ran out of memory: revert to the last good split where there is one, else cut micro-batches.

        Args:
            error: the out-of-memory error; what it holds is freed.
            position: of the training.

        Raises:
            OutOfMemoryError: nothing is left to try.
        """
        if self._ranks.world_size > 1:
            raise self._fail_rank(error, position)
        report = self._examined(error, position)
        reverted = self._controller.revert_split(report.problem, position.step)
        if reverted is not None:
            self._handler.report(replace(report, action=f"{reverted}; the step was made again"))
            return
        smaller = self._smaller_pieces()
        if not self._engine.is_whole:
            raise self._give_up(report, "the update broke off in the middle: resume from the last checkpoint")
        if smaller is None:
            raise self._give_up(report, "no smaller pieces are possible: the training is saved and stops")
        if self._cut_at_step == position.step:
            raise self._give_up(report, "smaller pieces failed in the same step: the training is saved and stops")
        self.fallbacks, self._cut_at_step = smaller, position.step
        self._controller.batch_split.clear_peaks()
        action = (
            f"the step is made again, and all later ones, with micro-batches in {smaller.num_pieces} pieces: the same "
            "mean over the step, but BatchNorm takes its statistics from smaller pieces"
        )
        self._handler.report(replace(report, action=action, judge=self._controller.judge().to_json()), smaller)

    def _fail_rank(self, error: Exception, position: Position) -> OutOfMemoryError:
        """Return the error of a rank that ran out of memory while the others wait in a collective of the same step."""
        self._has_left_step = True
        snapshot, problem = self._handler.examine(error, self._ranks.rank), first_line(error)
        failed = self._controller.batch_split.current
        reverted = self._controller.revert_split(problem, position.step)
        action, advice = "all ranks stop: the others wait in a collective of this step", self._simple_advice(snapshot)
        smaller: MemoryFallbacks | None
        way = None
        if reverted is not None and failed is not None:
            smaller = self.fallbacks.joined(MemoryFallbacks(failed_splits=(failed,)))
            action, way = f"{action}; {reverted}", "with the split before"
        elif (smaller := self._smaller_pieces()) is not None:
            way = f"with micro-batches in {smaller.num_pieces} pieces, the same mean over the step"
        if way is not None:
            advice = (f"segapp train --resume goes on from the last checkpoint {way}", *advice)
        report = OomReport(snapshot, position.epoch, position.step, problem, action, advice=advice)
        self._handler.report_alone(report, smaller)
        return final_error(report)

    def _smaller_pieces(self) -> MemoryFallbacks | None:
        """Return fallbacks with twice as many pieces; None where BatchNorm, or the batch, allows no more."""
        num_pieces = 2 * self.fallbacks.num_pieces
        size = self._sizes.batch_size // num_pieces
        if num_pieces > MAX_PIECES or size < 1 or not self._engine.can_train_on(size, num_pieces):
            return None
        return replace(self.fallbacks, num_pieces=num_pieces)

    # --- an evaluation ---------------------------------------------------------------------------------------------

    def make_evaluation(self, evaluate: Callable[[MemoryFallbacks], Evaluation], position: Position) -> Evaluation:
        """Evaluate; where memory does not suffice, begin again in a way that needs less.

        Args:
            evaluate: evaluates once under some fallbacks.
            position: of the training.

        Raises:
            OutOfMemoryError: no way needs little enough.
        """
        while True:
            try:
                with self.within_limit():
                    return evaluate(self.begin(position))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            self._handle_eval_oom(failure, position)

    def _handle_eval_oom(self, error: Exception, position: Position) -> None:
        """Adopt a way to evaluate that needs less memory, on every rank.

        Raises:
            OutOfMemoryError: there is none.
        """
        is_precise_bn = isinstance(error, BatchNormMemoryError)
        report = self._examined(error, position)
        model, found = self._engine.model, None
        if is_precise_bn:
            num_pieces = 2 * self.fallbacks.num_bn_pieces
            if self._sizes.batch_size // num_pieces >= model.min_train_batch:
                smaller = replace(self.fallbacks, num_bn_pieces=num_pieces)
                found = smaller, f"train.precise_bn cuts its batches into {num_pieces} pieces"
        else:
            found = next_eval_fallback(
                self.fallbacks,
                self.fallbacks.adapted(self._inference),
                self._sizes.eval_batch_size,
                self._sizes.crop_px,
                is_fixed=model.fixed_size_px is not None,
            )
        if found is None:
            raise self._give_up(report, "no smaller way to evaluate is left: the training is saved and stops")
        self.fallbacks, action = found
        self._handler.report(replace(report, action=action), self.fallbacks)

    # --- both ------------------------------------------------------------------------------------------------------

    def _examined(self, error: BaseException, position: Position) -> OomReport:
        """Return what is known of an out-of-memory error, on every rank; what the failed attempt held is freed."""
        own = None
        if not isinstance(error, PeerOutOfMemoryError):
            own = self._handler.examine(error, self._ranks.rank), first_line(error)
        self._handler.release(error, self._engine.device)
        snapshot, problem = self._ranks.first_of(own)
        batch_split = self._controller.batch_split
        return OomReport(
            snapshot,
            position.epoch,
            position.step,
            problem,
            "",
            split=batch_split.current or (),
            predicted_mib=batch_split.predicted_mib(),
        )

    def _give_up(self, report: OomReport, action: str) -> OutOfMemoryError:
        report = replace(report, action=action, advice=self._simple_advice(report.snapshot))
        return final_error(self._handler.report(report, is_final=True))

    def _simple_advice(self, snapshot: OomSnapshot) -> tuple[str, ...]:
        """Return what helps, without a memory plan."""
        sizes, crop = self._sizes, self._sizes.crop_px
        if snapshot.phase == "eval":
            return (f"eval.slide=true eval.slide_px=[{crop[0] // 2},{crop[1] // 2}]", "eval.batch_size=1")
        smaller = [f"lower data.crop_px = [{crop[0]}, {crop[1]}]"]
        if sizes.batch_size > 1:
            accumulate = f"train.accumulate={2 * sizes.accumulate}"
            smaller.insert(0, f"lower train.batch_size: train.batch_size={sizes.batch_size // 2} {accumulate}")
        return tuple(smaller)
