"""People and dogs."""

from __future__ import annotations

from numpy.random import RandomState

from demo_drawing.canvas import Billboard, Canvas
from demo_drawing.constants import DYNAMIC, PERSON
from demo_drawing.towns import CLOTHES, COATS, HAIR, SKIN, choose


def draw_person(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint a person in a coat, walking or standing, with or without a bag."""
    size, step, swing = rng.uniform(1.0, 1.25), rng.uniform(0.02, 0.26), rng.uniform(-0.2, 0.2)
    coat, trousers = choose(rng, CLOTHES), choose(rng, CLOTHES) * 0.6
    shoulder, hem = 1.38 * size, rng.uniform(0.60, 0.8) * size
    body = Billboard(canvas, x, z, PERSON)
    for sign in (-1, 1):
        foot = sign * (0.10 + step)
        body.limb((sign * 0.12, 0.88 * size), (foot, 0.02), 0.28, trousers * (1 if sign < 0 else 0.85))
        body.limb((foot, 0.06), (foot + 0.14, 0.06), 0.13, trousers * 0.4)
    body.limb((-0.30, shoulder), (-0.38 - swing, 0.85 * size), 0.20, coat * 0.8)
    neck = [(0.37, shoulder), (0.17, 1.48 * size), (-0.17, 1.48 * size), (-0.37, shoulder)]
    body.polygon([(-0.34, hem), (0.34, hem), *neck], coat, 0.15)
    body.limb((0.30, shoulder), (0.38 + swing, 0.85 * size), 0.20, coat * 0.9)
    body.disc(0, 1.60 * size, 0.20, choose(rng, SKIN, 0.1), 1.15)
    body.disc(-0.01, 1.70 * size, 0.205, choose(rng, HAIR, 0.2), 0.7)
    if rng.rand() < 0.35:
        body.bar(0.34 + swing, 0.64 + swing, 0.5 * size, 0.86 * size, choose(rng, CLOTHES))


def draw_dog(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint a dog, labelled `dynamic`, so ignored."""
    coat = choose(rng, COATS)
    dog = Billboard(canvas, x, z, DYNAMIC)
    for dx in (-0.28, -0.18, 0.18, 0.28):
        dog.bar(dx - 0.04, dx + 0.04, 0, 0.32, coat * 0.85)
    dog.bar(-0.34, 0.34, 0.28, 0.52, coat)
    dog.disc(0.42, 0.62, 0.14, coat)
    dog.limb((-0.34, 0.48), (-0.52, 0.74), 0.07, coat)
