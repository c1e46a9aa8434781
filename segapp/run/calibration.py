"""The temperature of a run's probabilities, which `segapp calibrate` saves in the run folder."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from segapp.run.files import read_of_run


class Calibration(BaseModel):
    """Content of `calibration.json` in a run folder."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    temperature: float
    """The temperature by which logits are divided."""
    sha256: str
    """SHA-256 of the checkpoint to which it was fitted; other checkpoints are not calibrated."""
    step: int
    """Step of that checkpoint."""
    split: str
    num_images: int
    num_px: int
    """Number of pixels that were used."""
    nll: tuple[float, float]
    """Mean negative log-likelihood per pixel, before and after."""
    ece: tuple[float, float]
    """Expected calibration error, before and after."""


def read_calibration(path: Path) -> Calibration | None:
    """Return the content of the file; None if it does not exist or cannot be read."""
    try:
        return Calibration.model_validate_json(read_of_run(path))
    except (OSError, ValidationError):
        return None
