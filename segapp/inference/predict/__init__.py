"""Prediction of image and video files: label maps, colour pictures, overlays and probabilities."""

from segapp.inference.predict.outputs import (
    SAVED,
    ImageOutputs,
    OutputPlan,
    Saved,
    blend,
    colorize,
    label_id_table,
    parse_saved,
)
from segapp.inference.predict.pipeline import Tally, predict_files
from segapp.inference.predict.predictor import (
    EnsemblePredictor,
    ExportedPredictor,
    Predictor,
    TrainedPredictor,
    check_same_classes,
    predict_image,
)
from segapp.inference.predict.reading import IMAGE_SUFFIXES, VIDEO_SUFFIXES, InputFile, find_images
from segapp.inference.workspace import Workspace

__all__ = [
    "IMAGE_SUFFIXES",
    "SAVED",
    "VIDEO_SUFFIXES",
    "EnsemblePredictor",
    "ExportedPredictor",
    "ImageOutputs",
    "InputFile",
    "OutputPlan",
    "Predictor",
    "Saved",
    "Tally",
    "TrainedPredictor",
    "Workspace",
    "blend",
    "check_same_classes",
    "colorize",
    "find_images",
    "label_id_table",
    "parse_saved",
    "predict_files",
    "predict_image",
]
