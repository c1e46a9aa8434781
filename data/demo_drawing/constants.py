"""Label ids, image size and the types that the parts of the drawing share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labels = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Window = tuple[slice, slice]
Point = tuple[float, float, float]
Rgb = tuple[float, float, float]

WIDTH_PX, HEIGHT_PX = 256, 128
OVERSAMPLING = 2  # drawn at twice the size, then averaged: smooth edges
COLOUR_STEP = 5  # colours are multiples of 5, which halves the PNG files and is hidden by the noise

EGO_VEHICLE, RECTIFICATION_BORDER, STATIC, DYNAMIC, GROUND = 1, 2, 4, 5, 6  # ignored in training and evaluation
ROAD, SIDEWALK, BUILDING, FENCE, POLE, TRAFFIC_LIGHT, TRAFFIC_SIGN = 7, 8, 11, 13, 17, 19, 20
VEGETATION, SKY, PERSON, CAR = 21, 23, 24, 26
