"""The sections of what is measured and kept: `eval`, `checkpoint`, `log`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from segapp.config.sections.values import Count, HeightWidth, PositiveFloat, PositiveInt, Section


class EvalConfig(Section):
    """`eval:` when and how the model is evaluated."""

    every_epochs: PositiveInt = 1
    """Epochs between evaluations; the end of the training is always evaluated."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations, instead of every_epochs; null: by epochs."""
    batch_size: PositiveInt = 1
    """Images evaluated at once, if they have the same size."""
    slide: bool = False
    """Sliding window instead of the whole image."""
    slide_px: HeightWidth | None = None
    """Height and width of the window, in pixels; null: data.crop_px."""
    slide_overlap: Annotated[float, Field(ge=0, lt=1)] = 1 / 3
    """Overlap of neighbouring windows, as a share of the window."""
    slide_weighting: Literal["uniform", "gaussian"] = "uniform"
    """Weight of a window where windows overlap: uniform, or largest at its centre (gaussian)."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A class is predicted where its probability is above this (data.multilabel)."""
    tta: bool = False
    """Test-time augmentation: average over a horizontal flip and eval.scales."""
    scales: list[PositiveFloat] = [0.75, 1.0, 1.25]
    """Image scales of test-time augmentation."""


class CheckpointConfig(Section):
    """`checkpoint:` when checkpoints are saved and which are kept."""

    every_epochs: PositiveInt | None = 1
    """Epochs between checkpoints; null: not by epochs."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; null: not by steps."""
    every_minutes: PositiveFloat | None = None
    """Minutes between checkpoints; null: not by time."""
    keep: Count = 3
    """Number of epoch_*.pt files kept, besides last.pt and best.pt."""
    grace_s: PositiveFloat = 30.0
    """Seconds between SIGTERM and SIGKILL (SLURM, Kubernetes: 30); a save that takes longer raises an alert."""
    monitor: Literal["miou", "mean_dice", "loss", "pixel_accuracy"] = "miou"
    """Evaluation result that selects best.pt."""


class LogConfig(Section):
    """`log:` what is recorded during training."""

    every_steps: PositiveInt = 10
    """Steps between `step` events."""
    tensorboard: bool = True
    """Write scalars, memory, sample images and settings for TensorBoard into the run folder."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project; needs the package wandb (WANDB_MODE=offline: no upload); null: off."""
    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """MLflow tracking URI, e.g. sqlite:///mlflow.db; needs the package mlflow-skinny or mlflow; null: off."""
