"""Prediction of image and video files: label maps, colors, overlays, probabilities, and polygons."""

from segapp.inference.predict.outputs import OutputPlan, blend, colorize, parse_saved
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.polygons import PolygonPlan, parse_polygons
from segapp.inference.predict.predictor import (
    EnsemblePredictor,
    Predictor,
    TrainedPredictor,
    predict_image,
)
from segapp.inference.predict.reading import InputFile, Saved, find_images

__all__ = [
    "EnsemblePredictor",
    "InputFile",
    "OutputPlan",
    "PolygonPlan",
    "Predictor",
    "Saved",
    "TrainedPredictor",
    "blend",
    "colorize",
    "find_images",
    "parse_polygons",
    "parse_saved",
    "predict_files",
    "predict_image",
]
