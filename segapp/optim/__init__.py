"""Optimizers, their parameter groups, the learning rate, and the moving average of the weights."""

from segapp.optim.average import WeightAverage
from segapp.optim.groups import norm_and_bias, parameter_groups
from segapp.optim.optimizers import adamw, set_lr, sgd
from segapp.optim.schedule import Schedule, lr_at

__all__ = [
    "Schedule",
    "WeightAverage",
    "adamw",
    "lr_at",
    "norm_and_bias",
    "parameter_groups",
    "set_lr",
    "sgd",
]
