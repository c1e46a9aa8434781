"""Optimizers, their parameter groups, the learning rate, and the moving average of the weights."""

from segapp.optim.average import WeightAverage
from segapp.optim.groups import GroupSettings, as_optimizer_group, norm_and_bias, parameter_groups
from segapp.optim.optimizers import adam, adamw, add_groups, set_lr, sgd
from segapp.optim.plateau import Plateau
from segapp.optim.schedule import Schedule, lr_at

__all__ = [
    "GroupSettings",
    "Plateau",
    "Schedule",
    "WeightAverage",
    "adam",
    "adamw",
    "add_groups",
    "as_optimizer_group",
    "lr_at",
    "norm_and_bias",
    "parameter_groups",
    "set_lr",
    "sgd",
]
