"""The config: YAML files as frozen, validated sections; all problems are reported together. No torch."""

# isort: skip_file
# `as` marks a public name for linters and type checkers; this is the only list of public names.

from segapp.config.load import (
    changed_keys as changed_keys,
    check_code as check_code,
    config_schema as config_schema,
    dump_config as dump_config,
    explain_config as explain_config,
    find_config as find_config,
    kept_on_resume as kept_on_resume,
    load_config as load_config,
    load_runnable as load_runnable,
    named_config as named_config,
    resume_differences as resume_differences,
    validate_config as validate_config,
)
from segapp.config.trust import component_names as component_names
from segapp.config.sections import (
    CheckpointConfig as CheckpointConfig,
    DataConfig as DataConfig,
    DistillConfig as DistillConfig,
    EvalConfig as EvalConfig,
    LiveSettings as LiveSettings,
    LossConfig as LossConfig,
    LossTerm as LossTerm,
    ModelConfig as ModelConfig,
    OptimConfig as OptimConfig,
    RecomputeChoice as RecomputeChoice,
    RunConfig as RunConfig,
    ScheduleConfig as ScheduleConfig,
    TrainConfig as TrainConfig,
)
