"""The sections of a config file as frozen models, and the settings that may change during a run. No torch.

The docstring of a field is its documentation: the JSON schema and the page `config` are generated from it.
"""

from segapp.config.sections.data import DataConfig
from segapp.config.sections.model import CriticConfig, DistillConfig, LossConfig, LossTerm, ModelConfig
from segapp.config.sections.recording import CheckpointConfig, EvalConfig, LogConfig
from segapp.config.sections.run import LiveSettings, RunConfig
from segapp.config.sections.training import (
    OptimConfig,
    ParallelConfig,
    ParamGroupConfig,
    ScheduleConfig,
    TrainConfig,
)
from segapp.config.sections.values import section_of

__all__ = [
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DistillConfig",
    "EvalConfig",
    "LiveSettings",
    "LogConfig",
    "LossConfig",
    "LossTerm",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ParamGroupConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "section_of",
]
