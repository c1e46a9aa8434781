"""Prediction of image files: label maps, colors, overlays, probabilities, and polygons."""
