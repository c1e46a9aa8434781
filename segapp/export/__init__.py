"""From a trained network to a file that runs without segapp, and back from such a file to predictions."""

from segapp.export.info import ExportInfo
from segapp.export.network import ExportNetwork
from segapp.export.runner import EXPORT_SUFFIXES, ExportedModel, is_exported
from segapp.export.weights import write_weights
from segapp.export.write import MIN_AGREEMENT, CheckResult, Format, check_export, write_export

__all__ = [
    "EXPORT_SUFFIXES",
    "MIN_AGREEMENT",
    "CheckResult",
    "ExportInfo",
    "ExportNetwork",
    "ExportedModel",
    "Format",
    "check_export",
    "is_exported",
    "write_export",
    "write_weights",
]
