"""Published class names, colours and file ids of the data sets that have a format of their own.

Colours are RGB in 0..255. A label map gives, for each id in a mask file, its train id, or None if it is ignored.
"""

from collections.abc import Mapping

Color = tuple[int, int, int]


def parse_colors(text: str) -> tuple[Color, ...]:
    """Return colours from six hexadecimal digits each, separated by white space.

    >>> parse_colors("804080 f423e8")
    ((128, 64, 128), (244, 35, 232))
    """
    return tuple((code >> 16, code >> 8 & 255, code & 255) for code in (int(word, 16) for word in text.split()))


def parse_names(text: str) -> tuple[str, ...]:
    """Return names separated by commas, over any number of lines.

    >>> parse_names("road, traffic light")
    ('road', 'traffic light')
    """
    return tuple(" ".join(name.split()) for name in text.split(","))


def bit_palette(num_colors: int, *, first: int = 0) -> tuple[Color, ...]:
    """Return distinct colours by the rule of PASCAL VOC: bits of the index go in turn to red, green and blue.

    Args:
        num_colors: Number of colours.
        first: Index of the first; 0 is black, which published palettes use for background or ignored pixels.

    >>> bit_palette(4)
    ((0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0))
    """
    return tuple(
        (_spread(index), _spread(index >> 1), _spread(index >> 2)) for index in range(first, first + num_colors)
    )


def _spread(index: int) -> int:
    """Return every third bit of the index, placed from bit 7 downwards."""
    return sum((index >> 3 * bit & 1) << 7 - bit for bit in range(8))


# Cityscapes: 19 of 34 ids are trained and evaluated (cityscapesscripts, helpers/labels.py). Where a name is missing
# here the benchmark ignores the id: 0-6, 9, 10, 14-16, 18, 29, 30.
CITYSCAPES_NAMES = parse_names(
    """road, sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky, person,
    rider, car, truck, bus, train, motorcycle, bicycle"""
)
CITYSCAPES_COLORS = parse_colors(
    """804080 f423e8 464646 66669c be9999 999999 faaa1e dcdc00 6b8e23 98fb98 4682b4 dc143c ff0000 00008e 000046 003c64
    005064 0000e6 770b20"""
)
CITYSCAPES_FILE_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
CITYSCAPES_LABEL_MAP: Mapping[int, int | None] = {
    **dict.fromkeys(range(34)),
    **{file_id: train_id for train_id, file_id in enumerate(CITYSCAPES_FILE_IDS)},
}

CITYSCAPES_CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "flat": parse_names("road, sidewalk"),
    "construction": parse_names("building, wall, fence"),
    "object": parse_names("pole, traffic light, traffic sign"),
    "nature": parse_names("vegetation, terrain"),
    "sky": parse_names("sky"),
    "human": parse_names("person, rider"),
    "vehicle": parse_names("car, truck, bus, train, motorcycle, bicycle"),
}

# CamVid with the 11 classes of SegNet (Badrinarayanan et al. 2017) and its colours; id 11 is void.
CAMVID_NAMES = parse_names("sky, building, pole, road, pavement, tree, sign symbol, fence, car, pedestrian, bicyclist")
CAMVID_COLORS = parse_colors("808080 800000 c0c080 804080 3c28de 808000 c08080 404080 400080 404000 0080c0")
CAMVID_LABEL_MAP: Mapping[int, int | None] = {**{index: index for index in range(11)}, 11: None}

# PASCAL VOC 2012: the index in the palette PNG is the class, 255 the ignored outline.
VOC_NAMES = parse_names(
    """background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog, horse,
    motorbike, person, pottedplant, sheep, sofa, train, tvmonitor"""
)
VOC_COLORS = bit_palette(21)

# ADE20K as the scene parsing benchmark of 2016 uses it: 150 classes, stored as 1..150; 0 is everything else.
ADE20K_NAMES = parse_names(
    """wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, earth, door,
    table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, field,
    armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, signboard,
    chest of drawers, counter, sand, sink, skyscraper, fireplace, refrigerator, grandstand, path, stairs, runway,
    case, pool table, pillow, screen door, stairway, river, bridge, bookcase, blind, coffee table, toilet, flower,
    book, hill, bench, countertop, stove, palm, kitchen island, computer, swivel chair, boat, bar, arcade machine,
    hovel, bus, towel, light, truck, tower, chandelier, awning, streetlight, booth, television receiver, airplane,
    dirt track, apparel, pole, land, bannister, escalator, ottoman, bottle, buffet, poster, stage, van, ship,
    fountain, conveyer belt, canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent, bag,
    minibike, cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher,
    screen, blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, plate,
    monitor, bulletin board, shower, radiator, glass, clock, flag"""
)
ADE20K_COLORS = parse_colors(
    """787878 b47878 06e6e6 503232 04c803 787850 8c8c8c cc05ff e6e6e6 04fa07 e005ff ebff07 96053d 787846 08ff33 ff0652
    8fff8c ccff04 ff3307 cc4603 0066c8 3de6fa ff0633 0b66ff ff0747 ff09e0 0907e6 dcdcdc ff095c 7009ff 08ffd6 07ffe0
    ffb806 0aff47 ff290a 07ffff e0ff08 6608ff ff3d06 ffc207 ff7a08 00ff14 ff0829 ff0599 0633ff eb0cff a09614 00a3ff
    8c8c8c fa0a0f 14ff00 1fff00 ff1f00 ffe000 99ff00 0000ff ff4700 00ebff 00adff 1f00ff 0bc8c8 ff5200 00fff5 003dff
    00ff70 00ff85 ff0000 ffa300 ff6600 c2ff00 008fff 33ff00 0052ff 00ff29 00ffad 0a00ff adff00 00ff99 ff5c00 ff00ff
    ff00f5 ff0066 ffad00 ff0014 ffb8b8 001fff 00ff3d 0047ff ff00cc 00ffc2 00ff52 000aff 0070ff 3300ff 00c2ff 007aff
    00ffa3 ff9900 00ff0a ff7000 8fff00 5200ff a3ff00 ffeb00 08b8aa 8500ff 00ff5c b800ff ff001f 00b8ff 00d6ff ff0070
    5cff00 00e0ff 70e0ff 46b8a0 a300ff 9900ff 47ff00 ff00a3 ffcc00 ff008f 00ffeb 85ff00 ff00eb f500ff ff007a fff500
    0abed4 d6ff00 00ccff 1400ff ffff00 0099ff 0029ff 00ffcc 2900ff 29ff00 ad00ff 00f5ff 4700ff 7a00ff 00ffb8 005cff
    b8ff00 0085ff ffd600 19c2c2 66ff00 5c00ff"""
)
ADE20K_LABEL_MAP: Mapping[int, int | None] = {0: None, **{index + 1: index for index in range(150)}}
