"""The config: YAML files as frozen, validated sections; all problems are reported together. No torch."""

from segapp.config.load import (
    changed_keys as changed_keys,
)
from segapp.config.load import (
    config_hash as config_hash,
)
from segapp.config.load import (
    config_schema as config_schema,
)
from segapp.config.load import (
    dump_config as dump_config,
)
from segapp.config.load import (
    explain_config as explain_config,
)
from segapp.config.load import (
    find_config as find_config,
)
from segapp.config.load import (
    kept_on_resume as kept_on_resume,
)
from segapp.config.load import (
    load_config as load_config,
)
from segapp.config.load import (
    named_config as named_config,
)
from segapp.config.load import (
    parse_overrides as parse_overrides,
)
from segapp.config.load import (
    resume_differences as resume_differences,
)
from segapp.config.load import (
    validate_config as validate_config,
)
from segapp.config.parts import part_names as part_names
from segapp.config.sections import (
    CheckpointConfig as CheckpointConfig,
)
from segapp.config.sections import (
    CriticConfig as CriticConfig,
)
from segapp.config.sections import (
    DataConfig as DataConfig,
)
from segapp.config.sections import (
    DistillConfig as DistillConfig,
)
from segapp.config.sections import (
    EvalConfig as EvalConfig,
)
from segapp.config.sections import (
    LiveSettings as LiveSettings,
)
from segapp.config.sections import (
    LogConfig as LogConfig,
)
from segapp.config.sections import (
    LossConfig as LossConfig,
)
from segapp.config.sections import (
    LossTerm as LossTerm,
)
from segapp.config.sections import (
    ModelConfig as ModelConfig,
)
from segapp.config.sections import (
    OptimConfig as OptimConfig,
)
from segapp.config.sections import (
    ParallelConfig as ParallelConfig,
)
from segapp.config.sections import (
    ParamGroupConfig as ParamGroupConfig,
)
from segapp.config.sections import (
    RunConfig as RunConfig,
)
from segapp.config.sections import (
    ScheduleConfig as ScheduleConfig,
)
from segapp.config.sections import (
    TrainConfig as TrainConfig,
)
