"""Export a trained network to ONNX, pt2 or safetensors, check the file, and run exported ONNX files."""

from segapp.export.network import ExportNetwork
from segapp.export.runner import ExportedModel, ExportInfo, is_exported
from segapp.export.write import CheckResult, Format, check_export, write_export, write_weights

__all__ = [
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
