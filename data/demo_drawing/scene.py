"""A whole scene: what stands where, and the order in which it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.random import RandomState

from demo_drawing.backdrop import draw_sky, draw_skyline
from demo_drawing.canvas import Camera, Canvas
from demo_drawing.cars import draw_car, draw_own_car
from demo_drawing.constants import HEIGHT_PX, WIDTH_PX, Labels
from demo_drawing.figures import draw_dog, draw_person
from demo_drawing.furniture import draw_bin, draw_fence, draw_lamp, draw_sign, draw_traffic_light
from demo_drawing.houses import House, build_house, draw_house
from demo_drawing.plants import draw_hedge, draw_tree
from demo_drawing.sensor import finish
from demo_drawing.street import Street, build_street, draw_ground
from demo_drawing.towns import Town


@dataclass
class DrawQueue:
    """The objects in the street, drawn farthest first once all of them are placed."""

    canvas: Canvas
    rng: RandomState
    items: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def add(self, draw: Callable[..., None], at_z: float, *args: object) -> None:
        """Add an object whose nearest point is at `at_z`."""
        self.items.append((at_z, lambda: draw(self.canvas, self.rng, *args)))

    def draw(self) -> None:
        """Draw all objects."""
        for _, draw in sorted(self.items, key=lambda item: -item[0]):
            draw()


def place_fronts(queue: DrawQueue, town: Town, street: Street, side: int) -> list[House]:
    """Return the houses along one side of the street; the trees and hedges between them go to the queue."""
    rng, x, houses, z = queue.rng, street.front(side), [], 0.0
    while z < 70:
        end = z + rng.uniform(6, 14)
        if z < street.crossing_z + 4 and end > street.crossing_z - 4:  # leave room for the side street
            z, end = (z, street.crossing_z - 4) if z < street.crossing_z - 8 else (street.crossing_z + 4, end + 8)
        if rng.rand() > town.green:
            houses.append(build_house(rng, town, side, z, end))
        else:
            for at in np.arange(z + 2, end, 2.2):
                queue.add(draw_hedge, at, x, at)
            for _ in range(rng.randint(1, 4)):
                at = rng.uniform(z + 2, end)
                queue.add(draw_tree, at, x + side * rng.uniform(0.5, 5), at)
        z = end
    return houses


def place_on_pavement(queue: DrawQueue, street: Street, side: int) -> None:
    """Place lamps, signs, trees, people, traffic lights, fences, bins and parked cars."""
    rng = queue.rng

    def place(draw: Callable[..., None], z: float, near: float = 0.08, far: float = 0.20) -> None:
        queue.add(draw, z, street.on_pavement(side, rng.uniform(near, far)), z)

    for z in np.arange(rng.uniform(5, 13), 28, rng.uniform(10, 16)):
        place(draw_lamp, z)
    for _ in range(rng.randint(1, 4)):
        place(draw_sign, rng.uniform(5, 13))
    for _ in range(rng.randint(0, 3)):
        place(draw_tree, rng.uniform(6, 26), 0.15, 0.5)
    for _ in range(rng.randint(2, 5)):
        place(draw_person, rng.uniform(4, 9), 0.3, 0.8)
    if rng.rand() < 0.75:
        place(draw_traffic_light, street.crossing_z - rng.uniform(4.2, 5))
    if rng.rand() < 0.4:
        place(draw_bin, rng.uniform(5, 14))
    if rng.rand() < 0.85:
        x, is_railing, z = street.on_pavement(side, rng.uniform(0.8, 1.0)), rng.rand() < 0.5, rng.uniform(2, 9)
        for at in np.arange(z, z + rng.uniform(8, 18), 2.0):
            if abs(at + 1 - street.crossing_z) > 5:
                queue.add(draw_fence, at, x, at, at + 2.0, is_railing)
    for z in np.arange(rng.uniform(3.5, 9), 40, rng.uniform(5.5, 7.5)):
        if rng.rand() < 0.35 and abs(z + 2 - street.crossing_z) > 6:
            queue.add(draw_car, z, street, street.kerb(side) - side * 1.1, z, "away" if side > 0 else "towards")


def place_on_road(queue: DrawQueue, street: Street) -> None:
    """Place driving cars, crossing people and a dog."""
    rng = queue.rng
    if rng.rand() < 0.7:
        z = rng.uniform(7, 26)
        queue.add(draw_car, z, street, rng.uniform(-0.4, 0.4), z, "away")
    if rng.rand() < 0.6:
        z = rng.uniform(6, 24)
        queue.add(draw_car, z, street, street.left_m * 0.55, z, "towards")
    if rng.rand() < 0.4:
        z = street.crossing_z - 0.8
        queue.add(draw_car, z, street, rng.uniform(-7, 6), z, "across")
    for _ in range(rng.randint(0, 3) if street.has_zebra else 0):
        z = street.crossing_z - rng.uniform(4.5, 6.5)
        queue.add(draw_person, z, rng.uniform(street.left_m, street.right_m), z)
    if rng.rand() < 0.25:
        z = rng.uniform(5, 11)
        queue.add(draw_dog, z, rng.uniform(-3, 3), z)


def draw_scene(town: Town, index: int) -> tuple[Labels, Labels]:
    """Return the pixels (H, W, 3) and Cityscapes label ids (H, W) of scene `index` of a town."""
    rng = RandomState(town.seed * 1000 + index)
    camera = Camera(
        focal_px=WIDTH_PX * rng.uniform(0.62, 0.85),
        center_u=WIDTH_PX * rng.uniform(0.36, 0.64),
        horizon_v=HEIGHT_PX * rng.uniform(0.38, 0.5),
        height_m=rng.uniform(*town.camera_height_m),
    )
    sky, street = town.skies[rng.randint(len(town.skies))], build_street(rng)
    canvas = Canvas(camera, haze=np.array(sky[1]) * 0.95, haze_m=rng.uniform(70, 220))
    queue = DrawQueue(canvas, rng)
    houses = place_fronts(queue, town, street, -1) + place_fronts(queue, town, street, 1)
    place_on_pavement(queue, street, -1)
    place_on_pavement(queue, street, 1)
    place_on_road(queue, street)
    draw_sky(canvas, rng, sky)
    draw_skyline(canvas, rng, town)
    draw_ground(canvas, street)
    for house in sorted(houses, key=lambda house: -house.z0):
        draw_house(canvas, street, house)
    queue.draw()
    draw_own_car(canvas, rng)
    return finish(canvas, rng)
