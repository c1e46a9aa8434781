"""The temperature of a run's probabilities, as `segapp calibrate` leaves it in the run folder."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError


class Calibration(BaseModel):
    """Content of `calibration.json` in a run folder."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    temperature: float
    """Divides the logits."""
    sha256: str
    """Sum of the checkpoint that it was fitted to; another one is not calibrated."""
    step: int
    """Step of that checkpoint."""
    split: str
    num_images: int
    num_px: int
    """Pixels that were used."""
    nll: tuple[float, float]
    """Mean negative log-likelihood of a pixel, before and after."""
    ece: tuple[float, float]
    """Expected calibration error, before and after."""


def read_calibration(path: Path) -> Calibration | None:
    """Return the content of the file; None if there is none, or none that can be read."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
