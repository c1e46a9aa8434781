"""Prediction of image and video files: label maps, colors, overlays, probabilities, and polygons."""
