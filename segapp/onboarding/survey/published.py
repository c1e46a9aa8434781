"""Published data sets: their class colours and values, and their recognition by colours in masks or names of files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from segapp.datasets.files import ImagePair
from segapp.datasets.layouts import published_classes as published
from segapp.datasets.layouts.formats import DATASETS, DataLocation, find_pairs
from segapp.datasets.layouts.published_classes import Color, parse_colors, parse_names
from segapp.errors import DataError
from segapp.onboarding.survey.hypotheses import DataLayout, Pair
from segapp.onboarding.survey.tree import Tree

_NAMES = {
    "cityscapes": r".*_leftImg8bit",
    "camvid": r"(0001TP|0006R0|0016E5|Seq05VD)_\w+",
    "voc": r"\d{4}_\d{6}",
    "ade20k": r"ADE_(train|val|valid|validation|test)_\d+",
}
"""Names of the published images; other images in the same folders have classes of their own."""


@dataclass(frozen=True)
class PublishedPalette:
    """The classes of a data set, and one colour for each; further colours are ignored pixels."""

    title: str
    names: tuple[str, ...]
    colors: tuple[Color, ...]
    ignored: tuple[Color, ...] = ()


BLACK = ((0, 0, 0),)

PALETTES = (
    PublishedPalette("CamVid with the 11 classes of SegNet", published.CAMVID_NAMES, published.CAMVID_COLORS, BLACK),
    PublishedPalette(
        "CamVid with its 32 colours",
        parse_names(
            """Animal, Archway, Bicyclist, Bridge, Building, Car, CartLuggagePram, Child, Column_Pole, Fence,
            LaneMkgsDriv, LaneMkgsNonDriv, Misc_Text, MotorcycleScooter, OtherMoving, ParkingBlock, Pedestrian, Road,
            RoadShoulder, Sidewalk, SignSymbol, Sky, SUVPickupTruck, TrafficCone, TrafficLight, Train, Tree, Truck_Bus,
            Tunnel, VegetationMisc, Wall"""
        ),
        parse_colors(
            """408040 c00080 0080c0 008040 800000 400080 4000c0 c08040 c0c080 404080 8000c0 c00040 808040 c000c0 804040
            40c080 404000 804080 8080c0 0000c0 c08080 808080 4080c0 000040 004040 c04080 808000 c080c0 400040 c0c000
            40c000"""
        ),
        BLACK,
    ),
    PublishedPalette(
        "Cityscapes",
        published.CITYSCAPES_NAMES,
        published.CITYSCAPES_COLORS,
        parse_colors("000000 6f4a00 510051 faaaa0 e6968c b4a5b4 966464 96785a 00005a 00006e 141414"),
    ),
    PublishedPalette(
        "ADE20K (road and skyscraper have one colour: both are road)",
        tuple(name for name in published.ADE20K_NAMES if name != "skyscraper"),
        tuple(dict.fromkeys(published.ADE20K_COLORS)),
        BLACK,
    ),
    PublishedPalette("PASCAL VOC", published.VOC_NAMES, published.VOC_COLORS, parse_colors("e0e0c0")),
    PublishedPalette(
        "LoveDA",
        parse_names("background, building, road, water, barren, forest, agricultural"),
        parse_colors("ffffff ff0000 ffff00 0000ff 9f81b7 00ff00 ffc380"),
        BLACK,
    ),
    PublishedPalette(
        "ISPRS Potsdam and Vaihingen",
        parse_names("impervious surfaces, building, low vegetation, tree, car, clutter"),
        parse_colors("ffffff 0000ff 00ffff 00ff00 ffff00 ff0000"),
        BLACK,
    ),
    PublishedPalette(
        "iSAID",
        parse_names(
            """background, ship, storage tank, baseball diamond, tennis court, basketball court, ground track field,
            bridge, large vehicle, small vehicle, helicopter, swimming pool, roundabout, soccer ball field, plane,
            harbor"""
        ),
        parse_colors(
            """000000 00003f 003f3f 003f00 003f7f 003fbf 003fff 007f3f 007f7f 00007f 0000bf 0000ff 00bf7f 007fbf 007fff
            00649b"""
        ),
    ),
    PublishedPalette(
        "DeepGlobe land cover",
        parse_names("urban land, agriculture land, rangeland, forest land, water, barren land"),
        parse_colors("00ffff ffff00 ff00ff 00ff00 0000ff ffffff"),
        BLACK,
    ),
    PublishedPalette(
        "UAVid",
        parse_names(
            "background clutter, building, road, static car, tree, low vegetation, human, moving car",
        ),
        parse_colors("000000 800000 804080 c000c0 008000 808000 404000 400080"),
    ),
    PublishedPalette(
        "SUIM",
        parse_names("background, human diver, plants, wrecks, robots, reefs, fish, sea-floor"),
        parse_colors("000000 0000ff 00ff00 00ffff ff0000 ff00ff ffff00 ffffff"),
    ),
)
_LEAST_SHARE = 0.4
_LEAST_COLORS = 4
_MIN_RARE = 2
"""Number of colours of no other palette that do not occur by chance."""


def recognise(colors: Collection[Color]) -> list[PublishedPalette]:
    """Return the palettes that have all the colours, those first of which most colours occur; none for few colours."""
    found = []
    for palette in PALETTES:
        own, named = set(colors) - set(palette.ignored), set(palette.colors)
        least = max(_LEAST_COLORS, len(named) // 15)  # many colours of a large palette occur in others too
        if own <= named and (len(own) >= least or (len(own) >= 2 and len(own) / len(named) >= _LEAST_SHARE)):
            found.append((len(own) / len(named), palette))
    return [palette for _, palette in sorted(found, key=lambda one: -one[0])]


def is_certain(palette: PublishedPalette, colors: Collection[Color], masks: str) -> bool:
    """Return True if the colours can hardly be those of another data set.

    All colours of the palette occur, or two that no other palette has, or a folder is named after the data set. Few
    colours may be those of a data set that is not known here: black, red, green and blue occur in most palettes.

    Args:
        palette: that has all the colours.
        colors: in the masks.
        masks: path of a mask, with the name of the data folder.
    """
    own = set(colors) & set(palette.colors)
    others = {color for other in PALETTES if _family(other) != _family(palette) for color in other.colors}
    num_rare = sum(color not in others and not _is_plain(color) for color in own)
    return num_rare >= _MIN_RARE or len(own) == len(set(palette.colors)) or _family(palette) in masks.lower()


def _family(palette: PublishedPalette) -> str:
    """Return the name that palettes of one data set share."""
    return palette.title.lower().replace("pascal ", "").split()[0]


def _is_plain(color: Color) -> bool:
    """Return True for red, green, blue and their sums, full or half."""
    return set(color) <= {0, 255} or set(color) <= {0, 128}


LIP_NAMES = parse_names(
    """background, hat, hair, glove, sunglasses, upper-clothes, dress, coat, socks, pants, jumpsuits, scarf, skirt,
    face, left-arm, right-arm, left-leg, right-leg, left-shoe, right-shoe"""
)


@dataclass(frozen=True)
class PublishedValues:
    """The meaning of the values in the masks of a data set.

    Attributes:
        title: of the data set.
        masks: regular expression of the path of its masks.
        names: value -> name of its class.
        ignored: values of pixels that count nowhere.
        notes: what to know about a class.
    """

    title: str
    masks: str
    names: Mapping[int, str]
    ignored: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def _names_of(title: str) -> tuple[str, ...]:
    return next(palette.names for palette in PALETTES if palette.title == title)


VALUES = (
    PublishedValues("LoveDA", r"(Rural|Urban)/masks_png/", dict(enumerate(_names_of("LoveDA"), start=1)), (0,)),
    PublishedValues("LIP", r"parsing_annotations/", dict(enumerate(LIP_NAMES))),
    PublishedValues("BDD100K", r"labels/sem_seg/|/10k/|_train_id\.", dict(enumerate(published.CITYSCAPES_NAMES))),
    PublishedValues(
        "Oxford-IIIT Pets",
        r"(^|/)trimaps/",
        {1: "pet", 2: "background", 3: "border"},
        notes=(
            "3 is the border of the pet, a few pixels wide; to ignore it: classes [pet, background], label_map 3: 255",
        ),
    ),
)


def recognise_values(mask: str, values: Collection[int]) -> PublishedValues | None:
    """Return the data set whose folders and values these are.

    Args:
        mask: path of a mask below the root.
        values: in the masks, 255 left out.
    """
    for known in VALUES:
        if re.search(known.masks, mask) and set(values) <= known.names.keys() | set(known.ignored):
            return known
    return None


def published_layout(tree: Tree) -> DataLayout | None:
    """Return the layout of a published data set, named after its format; None for other folders."""
    for format, expression in _NAMES.items():
        splits = {}
        for split in ("train", "val"):
            splits[split] = _pairs(tree, format, split)
        if not splits["train"] or not splits["val"]:
            continue
        pairs = [pair for found in splits.values() for pair in found]
        known = sum(re.fullmatch(expression, pair.image.stem) is not None for pair in pairs)
        if known < 0.9 * len(pairs):
            continue
        placed = [
            Pair(_relative(pair.image, tree.root), _relative(pair.mask, tree.root), split)
            for split, found in splits.items()
            for pair in found
            if pair.mask is not None
        ]
        evidence = (f"folders and names of {format}: {DATASETS[format].expected}",)
        return DataLayout(format, tuple(placed), 0.99, evidence)
    return None


def _pairs(tree: Tree, format: str, split: str) -> tuple[ImagePair, ...]:
    try:
        return find_pairs(DataLocation(format, tree.root, allow_outside_root=True), split)
    except DataError:
        return ()


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)
