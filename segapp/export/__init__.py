"""Export a trained network to ONNX, pt2 or safetensors, and check the file."""

from segapp.export.info import ExportInfo
from segapp.export.network import ExportNetwork
from segapp.export.write import CheckResult, Format, check_export, write_export, write_weights

__all__ = [
    "CheckResult",
    "ExportInfo",
    "ExportNetwork",
    "Format",
    "check_export",
    "write_export",
    "write_weights",
]
