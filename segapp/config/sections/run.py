"""The complete config of a run, and the settings that may change while it trains."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from segapp.config.sections.data import DataConfig
from segapp.config.sections.model import DistillConfig, LossConfig, ModelConfig
from segapp.config.sections.recording import CheckpointConfig, EvalConfig, LogConfig
from segapp.config.sections.training import OptimConfig, ParallelConfig, ScheduleConfig, TrainConfig
from segapp.config.sections.values import Section, no_bool


class RunConfig(Section):
    """The complete config, fixed for a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run folder: letters, digits, dot, underscore, hyphen."""
    seed: Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(no_bool)] = 0
    """Random seed of initial weights, sample order and augmentation."""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    distill: DistillConfig | None = None
    """Knowledge distillation; null: off."""


class LiveSettings(BaseModel):
    """Settings that commands may change during a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu0_bsz: int | None = None
    gpu0_bsz_auto: bool = False
    """True if `gpu0_bsz` follows the measured memory."""
    shares: list[int] | None = None
    lr_factor: float = 1.0
