"""The pinhole camera, the canvas it projects onto, and the planes that objects are drawn on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from demo_drawing.constants import HEIGHT_PX, OVERSAMPLING, WIDTH_PX, Array, Labels, Mask, Point, Rgb, Window
from demo_drawing.texture import noise


@dataclass(frozen=True)
class Camera:
    """A pinhole camera looking along z; u and v are pixels of the finished image."""

    focal_px: float
    center_u: float
    horizon_v: float
    height_m: float

    def project(self, points: Sequence[Point]) -> Array:
        """Return the (N, 2) image positions (u, v) of world points (x, y, z) with z > 0."""
        x, y, z = np.asarray(points, dtype=np.float64).T
        u = self.center_u + self.focal_px * x / z
        v = self.horizon_v + self.focal_px * (self.height_m - y) / z
        return np.stack([u, v], axis=1)

    def scale_at(self, z: float) -> float:
        """Return the pixels per metre at distance z."""
        return self.focal_px / z


@dataclass
class Canvas:
    """Colours (H, W, 3) in [0, 1] and label ids (H, W), oversampled; u and v are each sample's image position."""

    camera: Camera
    haze: Array
    """The colour of the air."""
    haze_m: float
    """The distance after which 1/e of a colour is left, in metres."""
    colour: Array = field(init=False)
    label: Labels = field(init=False)
    u: Array = field(init=False)
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        height, width = HEIGHT_PX * OVERSAMPLING, WIDTH_PX * OVERSAMPLING
        self.colour = np.zeros((height, width, 3))
        self.label = np.zeros((height, width), dtype=np.uint8)
        v, u = np.mgrid[0:height, 0:width]
        self.u, self.v = (u + 0.5) / OVERSAMPLING, (v + 0.5) / OVERSAMPLING

    def window(self, u0: float, v0: float, u1: float, v1: float) -> Window:
        """Return the part of the canvas between the corners (u0, v0) and (u1, v1)."""
        rows, columns = self.label.shape
        top, bottom = (min(max(math.floor(v * OVERSAMPLING), 0), rows) for v in (v0, v1 + 1))
        left, right = (min(max(math.floor(u * OVERSAMPLING), 0), columns) for u in (u0, u1 + 1))
        return slice(top, bottom), slice(left, right)

    def window_around(self, points: Array) -> Window:
        """Return the part of the canvas that holds these (N, 2) positions."""
        (u0, v0), (u1, v1) = points.min(axis=0), points.max(axis=0)
        return self.window(u0, v0, u1, v1)

    def paint(
        self, window: Window, where: Mask, rgb: Array, z: Array | float, label: int | None, alpha: float = 1
    ) -> None:
        """Colour the samples `where` as seen through z metres of air.

        Args:
            window: a part of the canvas.
            where: a mask over the window.
            rgb: one colour, or one for each sample of the window.
            z: one distance, or one for each sample of the window.
            label: their new label id; None keeps what they have.
            alpha: opacity in [0, 1].
        """
        clear = np.exp(-np.asarray(z, dtype=np.float64) / self.haze_m)[..., None]
        seen = np.clip(np.broadcast_to(rgb * clear + self.haze * (1 - clear), (*where.shape, 3)), 0, 1)
        part = self.colour[window]
        part[where] = part[where] * (1 - alpha) + seen[where] * alpha
        if label is not None:
            self.label[window][where] = label

    def polygon(
        self, corners: Array, rgb: Rgb | Array, z: float, label: int | None, grain: float = 0, alpha: float = 1
    ) -> None:
        """Fill a convex polygon given by its (N, 2) corners in pixels; `grain` is the strength of a coarse texture."""
        window = self.window_around(corners)
        u, v = self.u[window], self.v[window]
        following = np.roll(corners, -1, axis=0)
        area = float(np.sum(corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]))
        inside = np.ones(u.shape, dtype=bool)
        for (u0, v0), (u1, v1) in zip(corners, following, strict=True):
            inside &= ((u1 - u0) * (v - v0) - (v1 - v0) * (u - u0)) * math.copysign(1, area) >= 0
        shade = 1 + grain * noise(u * 0.8, v * 0.8, 5)[..., None]
        self.paint(window, inside, np.asarray(rgb) * shade, z, label, alpha)

    def ellipse(self, center: Array, radii: tuple[float, float], rgb: Rgb | Array, z: float, label: int | None) -> None:
        """Fill an ellipse given in pixels."""
        (u, v), (radius_u, radius_v) = center, radii
        window = self.window(u - radius_u, v - radius_v, u + radius_u, v + radius_v)
        inside = ((self.u[window] - u) / radius_u) ** 2 + ((self.v[window] - v) / radius_v) ** 2 <= 1
        self.paint(window, inside, np.asarray(rgb), z, label)


@dataclass(frozen=True)
class Billboard:
    """A flat object facing the camera; shapes are given in metres to the right of and above its foot (x, 0, z)."""

    canvas: Canvas
    x: float
    z: float
    label: int

    def polygon(self, corners: Sequence[tuple[float, float]], rgb: Rgb | Array, grain: float = 0) -> None:
        """Fill a convex polygon with corners (metres to the right, metres up)."""
        points = self.canvas.camera.project([(self.x + dx, y, self.z) for dx, y in corners])
        self.canvas.polygon(points, rgb, self.z, self.label, grain)

    def bar(self, dx0: float, dx1: float, y0: float, y1: float, rgb: Rgb | Array, grain: float = 0) -> None:
        """Fill an upright rectangle."""
        self.polygon([(dx0, y0), (dx1, y0), (dx1, y1), (dx0, y1)], rgb, grain)

    def limb(self, start: tuple[float, float], end: tuple[float, float], width: float, rgb: Rgb | Array) -> None:
        """Fill a thick line from start to end."""
        (x0, y0), (x1, y1) = start, end
        half = width / 2 / math.hypot(x1 - x0, y1 - y0)
        nx, ny = (y1 - y0) * half, (x0 - x1) * half
        self.polygon([(x0 + nx, y0 + ny), (x1 + nx, y1 + ny), (x1 - nx, y1 - ny), (x0 - nx, y0 - ny)], rgb)

    def post(self, y1: float, rgb: Rgb | Array, width: float = 0.24) -> None:
        """Fill a bar standing on the foot, at least 3.6 pixels wide."""
        half = max(width, 3.6 / self.canvas.camera.scale_at(self.z)) / 2
        self.bar(-half, half, 0, y1, rgb)

    def disc(self, dx: float, y: float, radius: float, rgb: Rgb | Array, stretch: float = 1) -> None:
        """Fill a disc, or an ellipse `stretch` times as high as wide."""
        camera = self.canvas.camera
        radius_px = radius * camera.scale_at(self.z)
        center = camera.project([(self.x + dx, y, self.z)])[0]
        self.canvas.ellipse(center, (radius_px, radius_px * stretch), rgb, self.z, self.label)


@dataclass(frozen=True)
class SidePlane:
    """A rectangle of the upright plane x = `x_m` along the street, by inverse projection.

    `window` is the part of the canvas that holds it; `inside` marks the samples in the rectangle; z and y are their
    positions in metres.
    """

    window: Window
    inside: Mask
    z: Array
    y: Array


def project_side_plane(canvas: Canvas, x_m: float, z0: float, z1: float, height_m: float) -> SidePlane:
    """Return the samples that show the rectangle z0 <= z <= z1, 0 <= y <= height_m of the plane x = x_m."""
    camera, side = canvas.camera, math.copysign(1, x_m)
    window = canvas.window_around(camera.project([(x_m, 0, z0), (x_m, height_m, z0), (x_m, 0, z1)]))
    offset = (canvas.u[window] - camera.center_u) * side
    z = np.minimum(camera.focal_px * abs(x_m) / np.maximum(offset, 0.05), 400)
    y = camera.height_m - (canvas.v[window] - camera.horizon_v) * z / camera.focal_px
    inside = (offset > 0) & (z >= z0) & (z <= z1) & (y >= 0) & (y <= height_m)
    return SidePlane(window, inside, z, y)
