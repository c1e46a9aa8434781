"""Public data sets in the shape of their documentation: from the air, of streets, in medicine, of objects and parts."""

from __future__ import annotations

import json

import cv2
import numpy as np
from PIL import Image

from segapp.datasets.layouts.schemes import parse_colors
from tests.support import drawn_annotations
from tests.support.layouts.canvas import SIZE, Canvas, Codes, coded, patches, save, scene
from tests.support.layouts.layout import (
    BINARY,
    EIGHT,
    FOUR,
    TWELVE,
    UNNAMED,
    Ask,
    Refuse,
    layouts,
    split,
    unsplit,
)
from tests.support.layouts.review_known import PALETTE, annotated
from tests.support.layouts.review_new import table

BACKGROUND_OBJECT: Codes = {0: "background", 1: "object"}
CITYSCAPES: Codes = {7: "class_7", 11: "class_11", 23: "class_23", 26: "class_26", 0: "class_0"}
RUGD: Codes = {(108, 64, 20): "dirt", (0, 102, 0): "grass", (0, 255, 0): "tree", (0, 0, 255): "sky", (0, 0, 0): None}
COLORS = ((128, 64, 128), (70, 70, 70), (70, 130, 180), (0, 0, 142), (0, 0, 0))


def white(areas: np.ndarray, *numbers: int) -> np.ndarray:
    """Returns a mask of 255 where an area has one of the numbers."""
    return np.isin(areas, numbers).astype(np.uint8) * np.uint8(255)


# Medicine


def kvasir(canvas: Canvas) -> None:
    """Kvasir-SEG: images and masks of one name, both JPEG; boxes in a JSON."""
    for number in range(12):
        stem = f"cju{number:02}xk4d5nqm"
        canvas.pair(f"images/{stem}.jpg", f"masks/{stem}.jpg", BINARY, as_rgb=True, quality=95)
    canvas.text("kavsir_bboxes.json", json.dumps({"cju00xk4d5nqm": {"height": 48, "width": 64, "bbox": []}}))


def clinic(canvas: Canvas) -> None:
    """CVC-ClinicDB: numbers as names, once as PNG and once as TIFF."""
    for number in range(1, 13):
        areas = canvas.pair(f"PNG/Original/{number}.png", f"PNG/Ground Truth/{number}.png", BINARY)
        save(canvas.root / f"TIF/Ground Truth/{number}.tif", white(areas, 1))
        save(canvas.root / f"TIF/Original/{number}.tif", scene(f"PNG/Original/{number}.png").astype(np.uint8))
    canvas.unused.append(tuple(f"TIF/Original/{number}.tif" for number in range(1, 13)))
    canvas.unused.append(tuple(f"TIF/Ground Truth/{number}.tif" for number in range(1, 13)))


def pannuke(canvas: Canvas) -> None:
    """PanNuke: arrays of images and of one plane for each class, the background last, in three folds."""
    names = ["Neoplastic", "Inflammatory", "Connective", "Dead", "Epithelial", "Background"]
    for fold in (1, 2, 3):
        images, masks = [], []
        for number in range(4):
            key = f"fold{fold} {number}"
            pixels, areas = scene(key, (48, 48)), patches(key, 6, (48, 48))
            images.append(pixels.astype(np.float64))
            masks.append(np.stack([(areas == one) * (one + 1.0 if one < 5 else 1.0) for one in range(6)], -1))
            canvas.note(f"images/fold{fold}/images.npy", f"masks/fold{fold}/masks.npy", pixels, areas, names, group=key)
        save(canvas.root / f"images/fold{fold}/images.npy", np.stack(images))
        save(canvas.root / f"masks/fold{fold}/masks.npy", np.stack(masks))
        save(canvas.root / f"images/fold{fold}/types.npy", np.array(["Breast"] * 4))


def stare(canvas: Canvas) -> None:
    """STARE: PPM images, masks of two annotators in folders of their own."""
    for number in range(1, 13):
        name = f"im{number:04}"
        areas = canvas.pair(f"stare-images/{name}.ppm", f"labels-ah/{name}.ah.ppm", BINARY)
        save(canvas.root / f"labels-vk/{name}.vk.ppm", white(np.roll(areas, 2, 1), 1))
    canvas.unused.append(tuple(f"labels-vk/im{number:04}.vk.ppm" for number in range(1, 13)))


def hrf(canvas: Canvas) -> None:
    """HRF: healthy, diabetic and glaucomatous eyes; masks are TIFFs in manual1, fields of view in mask."""
    fields = []
    field = np.zeros(SIZE, np.uint8)
    cv2.circle(field, (32, 24), 22, 255, -1)
    for number in range(1, 5):
        for ending in ("h", "dr", "g"):
            name = f"{number:02}_{ending}"
            suffix = ".JPG" if ending == "dr" else ".jpg"
            canvas.pair(f"images/{name}{suffix}", f"manual1/{name}.tif", BINARY)
            fields.append(f"mask/{name}_mask.tif")
            save(canvas.root / fields[-1], np.dstack([field] * 3))
    canvas.unused.append(tuple(fields))


def refuge(canvas: Canvas) -> None:
    """REFUGE: 0 is the cup, 128 the disc, 255 the background; masks are BMPs."""
    codes: Codes = {0: "class_0", 128: "class_128", 255: "class_255"}
    for kind, prefix in (("Glaucoma", "g"), ("Non-Glaucoma", "n")):
        for number in range(1, 7):
            name = f"{prefix}{number:04}"
            canvas.pair(
                f"Training400/{kind}/{name}.jpg", f"Annotation-Training400/Disc_Cup_Masks/{kind}/{name}.bmp", codes
            )


def brats(canvas: Canvas) -> None:
    """Slices of BraTS: modalities of a patient in folders of their names, labels 0, 1, 2 and 4."""
    codes: Codes = {0: "class_0", 1: "class_1", 2: "class_2", 4: "class_4"}
    others = []
    for patient in range(1, 7):
        for number in (60, 61):
            folder = f"BraTS20_Training_{patient:03}"
            stem = f"{folder}/{folder}"
            pixels = scene(f"{patient} {number}", SIZE, 1, like=f"brain {patient}")[..., 0].astype(np.uint8)
            canvas.pair(f"{stem}_flair_{number}.png", f"{stem}_seg_{number}.png", codes, pixels=pixels, group=folder)
            for kind in ("t1", "t2"):
                others.append(f"{stem}_{kind}_{number}.png")
                save(canvas.root / others[-1], 255 - pixels if kind == "t1" else pixels // 2)
    canvas.unused.append(tuple(others))


def cell_tracking(canvas: Canvas) -> None:
    """Cell Tracking Challenge: t000.tif in 01, man_seg000.tif in 01_GT/SEG numbers the cells, TRA tracks."""
    for video in ("01", "02"):
        for number in range(6):
            image = f"{video}/t{number:03}.tif"
            pixels = scene(image, SIZE, 1, like=video)[..., 0].astype(np.uint8)
            canvas.image(image, pixels)
            areas = patches(image, 4)
            for folder, stem in (("SEG", "man_seg"), ("TRA", "man_track")):
                save(canvas.root / f"{video}_GT/{folder}/{stem}{number:03}.tif", areas.astype(np.uint16))
            canvas.note(
                image,
                f"{video}_GT/SEG/man_seg{number:03}.tif",
                pixels,
                areas,
                ["background", "object", "object", "object"],
                group=video,
            )
        canvas.unused.append(tuple(f"{video}_GT/TRA/man_track{number:03}.tif" for number in range(6)))


# From the air


def inria(canvas: Canvas) -> None:
    """Inria Aerial: train/images, train/gt, TIFFs; the number of the tile after the city."""
    for city in ("austin", "chicago", "kitsap"):
        for number in range(1, 5):
            canvas.pair(
                f"AerialImageDataset/train/images/{city}{number}.tif",
                f"AerialImageDataset/train/gt/{city}{number}.tif",
                BINARY,
            )
    canvas.images_unused(*(f"AerialImageDataset/test/images/bellingham{number}.tif" for number in (1, 2)))


def massachusetts(canvas: Canvas) -> None:
    """Massachusetts roads: images .tiff, masks .tif of 0 and 255."""
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for name in names:
            canvas.pair(f"tiff/{word}/1{name}_15.tiff", f"tiff/{word}_labels/1{name}_15.tif", BINARY, split=word)


def landcover(canvas: Canvas) -> None:
    """LandCover.ai after its script: tiles in output/, lists of names without ending; masks _m."""
    codes: Codes = {0: "class_0", 1: "class_1", 2: "class_2", 3: "class_3"}
    for word, names in (("train", EIGHT[:6]), ("val", FOUR), ("test", EIGHT[6:])):
        stems = [f"M-33-20-D-c-4-2_{int(name)}" for name in names]
        for stem in stems:
            canvas.pair(f"output/{stem}.jpg", f"output/{stem}_m.png", codes, split=word)
        canvas.text(f"{word}.txt", stems)


def open_earth_map(canvas: Canvas) -> None:
    """OpenEarthMap: a folder for each region with images and labels; train.txt and val.txt of file names."""
    codes: Codes = {0: "class_0", 1: "class_1", 2: "class_2", 4: "class_4", 8: "class_8"}
    root = "OpenEarthMap_wo_xBD"
    for word, regions in (("train", ("aachen", "accra", "lima")), ("val", ("tokyo",))):
        lines = []
        for region in regions:
            for number in range(1, 4):
                name = f"{region}_{number}.tif"
                paths = f"{root}/{region}/images/{name}", f"{root}/{region}/labels/{name}"
                canvas.pair(*paths, codes, split=word, group=region)
                lines.append(name)
        canvas.text(f"{root}/{word}.txt", lines)


def flood_net(canvas: Canvas) -> None:
    """FloodNet: train/train-org-img and train/train-label-img with _lab."""
    codes: Codes = {0: "class_0", 3: "class_3", 5: "class_5", 9: "class_9"}
    split("{s}/{s}-org-img/{}.jpg", "{s}/{s}-label-img/{}_lab.png", codes=codes)(canvas)


def floods(canvas: Canvas) -> None:
    """Sen1Floods11: radar of two float bands, optical images of 13 bands, labels of -1, 0 and 1, tables of splits."""
    for word, names in (("train", EIGHT), ("valid", FOUR)):
        rows = []
        for number in map(int, names):
            country = ("Bolivia", "Ghana", "India")[number % 3]
            stem = f"{country}_{number:05}"
            radar = f"data/flood_events/HandLabeled/S1Hand/{stem}_S1Hand.tif"
            mask = f"data/flood_events/HandLabeled/LabelHand/{stem}_LabelHand.tif"
            pixels = scene(radar, SIZE, 2) / 10 - 30
            canvas.image(radar, pixels)
            optical = (scene(f"optical {stem}", SIZE, 13) * 20).astype(np.uint16)
            save(canvas.root / f"data/flood_events/HandLabeled/S2Hand/{stem}_S2Hand.tif", optical)
            areas = patches(stem, 3)
            save(canvas.root / mask, (areas - 1).astype(np.int16))
            canvas.note(radar, mask, pixels, areas, [None, "class_0", "class_1"], split=word.replace("valid", "val"))
            rows.append([f"{stem}_S1Hand.tif", f"{stem}_LabelHand.tif"])
        canvas.text(f"splits/flood_handlabeled/flood_{word}_data.csv", table(rows))


def x_view(canvas: Canvas) -> None:
    """xView2: pictures before and after a disaster; targets of the damage for both."""
    for number in range(12):
        stem = f"hurricane-{('harvey', 'michael', 'florence')[number % 3]}_{number:08}"
        canvas.pair(
            f"train/images/{stem}_post_disaster.png",
            f"train/targets/{stem}_post_disaster_target.png",
            {0: "class_0", 1: "class_1", 2: "class_2", 3: "class_3", 4: "class_4"},
            group=stem,
            like=stem,
        )
        canvas.pair(
            f"train/images/{stem}_pre_disaster.png",
            f"train/targets/{stem}_pre_disaster_target.png",
            {0: "class_0", 1: "class_1"},
            group=stem,
            like=stem,
        )


def levir(canvas: Canvas) -> None:
    """LEVIR-CD: train/A, train/B, train/label."""
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for number, name in enumerate(names):
            canvas.pair(f"{word}/A/{word}_{number}.png", f"{word}/label/{word}_{number}.png", BINARY, split=word)
            canvas.image(f"{word}/B/{word}_{number}.png")
            assert name
    canvas.unused.append(tuple(f"train/B/train_{number}.png" for number in range(8)))


def whu(canvas: Canvas) -> None:
    """WHU buildings: train/image and train/label, also test/."""
    for word, names in (("train", TWELVE[:6]), ("val", TWELVE[6:9]), ("test", TWELVE[9:])):
        for name in names:
            canvas.pair(f"{word}/image/{name}.tif", f"{word}/label/{name}.tif", BINARY, split=word)


def agriculture(canvas: Canvas) -> None:
    """Agriculture-Vision: a folder of masks for each class, boundaries and masks of valid pixels, near infrared."""
    kinds = ("double_plant", "water", "weed_cluster")
    sides = []
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for name in names:
            image = f"{word}/images/rgb/F{name}_1.jpg"
            pixels = canvas.image(image)
            save(
                canvas.root / f"{word}/images/nir/F{name}_1.jpg", scene(f"nir {name}", SIZE, 1)[..., 0].astype(np.uint8)
            )
            areas = patches(image, 4)
            for number, kind in enumerate(kinds, 1):
                save(canvas.root / f"{word}/labels/{kind}/F{name}_1.png", white(areas, number))
            for kind in ("boundaries", "masks"):
                sides.append(f"{word}/{kind}/F{name}_1.png")
                save(canvas.root / sides[-1], np.full(SIZE, 255, np.uint8))
            canvas.note_planes(
                image,
                f"{word}/labels",
                pixels,
                {kind: areas == number for number, kind in enumerate(kinds, 1)},
                split=word,
            )
    canvas.unused.append(tuple(sides))
    canvas.names_said = True


# Streets and fields


def kitti(canvas: Canvas) -> None:
    """KITTI semantics: ids, colours and instances of each image; a test split without labels."""
    for number in range(12):
        name = f"{number:06}_10.png"
        areas = canvas.pair(f"training/image_2/{name}", f"training/semantic/{name}", CITYSCAPES)
        save(canvas.root / f"training/semantic_rgb/{name}", coded(areas, COLORS))
        ids = coded(areas, [7, 11, 23, 26, 0]).astype(np.uint16) * 256 + (areas == 3)
        save(canvas.root / f"training/instance/{name}", ids.astype(np.uint16))
    canvas.unused += [
        tuple(f"training/{kind}/{number:06}_10.png" for number in range(12)) for kind in ("semantic_rgb", "instance")
    ]
    canvas.images_unused("testing/image_2/000000_10.png", "testing/image_2/000001_10.png")


def kitti_road(canvas: Canvas) -> None:
    """KITTI road: colours of road and lane, the kind inside the name."""
    codes: Codes = {(255, 0, 0): "class_0", (255, 0, 255): "class_1"}
    for number in range(12):
        kind = ("um", "umm", "uu")[number % 3]
        canvas.pair(
            f"training/image_2/{kind}_{number:06}.png",
            f"training/gt_image_2/{kind}_road_{number:06}.png",
            dict(sorted(codes.items())),
        )
        canvas.text(f"training/calib/{kind}_{number:06}.txt", "P0: 1 0 0\n")
    canvas.images_unused("testing/image_2/um_000000.png", "testing/image_2/uu_000001.png")


def rugd(canvas: Canvas) -> None:
    """RUGD: frames and annotations by sequence, colours in a text file with numbers and names."""
    for sequence in ("creek", "park-1", "trail", "village"):
        for number in range(1, 4):
            name = f"{sequence}/{sequence}_{number:05}.png"
            canvas.pair(
                f"RUGD_frames-with-annotations/{name}", f"RUGD_annotations/{name}", RUGD, group=sequence, like=sequence
            )
    lines = [f"{number} {name or 'void'} {r} {g} {b}" for number, ((r, g, b), name) in enumerate(RUGD.items())]
    canvas.text("RUGD_annotations/RUGD_annotation-colormap.txt", lines)
    canvas.names_said = True


def rellis(canvas: Canvas) -> None:
    """RELLIS-3D: lists of an image and its mask of ids in each line; colours beside them."""
    codes: Codes = {0: "class_0", 3: "class_3", 4: "class_4", 17: "class_17"}
    for word, numbers in (("train", range(8)), ("val", range(8, 12))):
        lines = []
        for number in numbers:
            folder, stem = f"0000{number % 2}/pylon_camera_node", f"frame{number:06}-1581623790_{number}"
            image, mask = f"{folder}/{stem}.jpg", f"{folder}_label_id/{stem}.png"
            areas = canvas.pair(image, mask, codes, split=word)
            save(canvas.root / f"{folder}_label_color/{stem}.png", coded(areas, COLORS[:4]))
            lines.append(f"{image} {mask}")
        canvas.text(f"{word}.lst", lines)
    colored = (
        f"0000{number % 2}/pylon_camera_node_label_color/frame{number:06}-1581623790_{number}.png"
        for number in range(8)
    )
    canvas.unused.append(tuple(colored))


def coarse(canvas: Canvas) -> None:
    """Cityscapes with the coarse masks alone."""
    for word, numbers in (("train", range(8)), ("val", range(8, 12))):
        for number in numbers:
            stem = f"{word}/erfurt/erfurt_{number:06}_000019"
            image, mask = f"leftImg8bit/{stem}_leftImg8bit.png", f"gtCoarse/{stem}_gtCoarse_labelIds.png"
            areas = canvas.pair(image, mask, CITYSCAPES, split=word)
            save(canvas.root / f"gtCoarse/{stem}_gtCoarse_color.png", coded(areas, COLORS))
            save(canvas.root / f"gtCoarse/{stem}_gtCoarse_instanceIds.png", coded(areas, [7, 11, 23, 26_001, 0]))
            canvas.text(f"gtCoarse/{stem}_gtCoarse_polygons.json", '{"objects": []}')
    stems = [f"gtCoarse/train/erfurt/erfurt_{number:06}_000019_gtCoarse" for number in range(8)]
    canvas.unused += [tuple(f"{stem}_{kind}.png" for stem in stems) for kind in ("color", "instanceIds")]


def idd(canvas: Canvas) -> None:
    """IDD: folders of drives, _leftImg8bit and _gtFine_labellevel3Ids, polygons beside them."""
    codes: Codes = {0: "class_0", 4: "class_4", 12: "class_12", 25: "class_25", 255: None}
    for word, numbers in (("train", range(8)), ("val", range(8, 12))):
        for number in numbers:
            stem = f"{word}/{number // 4}/frame{number:04}"
            canvas.pair(
                f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labellevel3Ids.png", codes, split=word
            )
            canvas.text(f"gtFine/{stem}_gtFine_polygons.json", '{"objects": []}')


def dark_zurich(canvas: Canvas) -> None:
    """Dark Zurich: validation images with masks, colours and masks of invalid pixels; training images without any."""
    codes: Codes = {0: "road", 2: "building", 10: "sky", 13: "car", 255: None}
    for number in range(12):
        stem = f"val/night/GOPR0356/GOPR0356_frame_{number:06}"
        areas = canvas.pair(f"rgb_anon/{stem}_rgb_anon.png", f"gt/{stem}_gt_labelTrainIds.png", codes)
        save(canvas.root / f"gt/{stem}_gt_labelColor.png", coded(areas, COLORS))
        save(canvas.root / f"gt/{stem}_gt_invalid.png", white(areas, 4))
    canvas.images_unused(
        *(f"rgb_anon/train/night/GOPR0345/GOPR0345_frame_{number:06}_rgb_anon.png" for number in range(3))
    )


# Objects, parts, rooms


def mvtec(canvas: Canvas) -> None:
    """MVTec AD: training images are good and have no mask; ground_truth/<defect>/000_mask.png for the test images."""
    for defect in ("broken_large", "broken_small", "contamination"):
        for number in range(4):
            canvas.pair(
                f"bottle/test/{defect}/{number:03}.png", f"bottle/ground_truth/{defect}/{number:03}_mask.png", BINARY
            )
    canvas.images_unused(*(f"bottle/train/good/{number:03}.png" for number in range(5)))
    canvas.images_unused(*(f"bottle/test/good/{number:03}.png" for number in range(3)))


def kolektor(canvas: Canvas) -> None:
    """KolektorSDD2: 10000.png and 10000_GT.png side by side in train/ and test/."""
    split("{s}/1{}.png", "{s}/1{}_GT.png", ("train", "test"), BINARY)(canvas)


def cihp(canvas: Canvas) -> None:
    """CIHP: Training/Images, Category_ids, Human_ids, Instance_ids, Categories in colour; lists of ids."""
    codes: Codes = {0: "class_0", 2: "class_2", 5: "class_5", 13: "class_13"}
    for word, names, known in (("Training", EIGHT, "train"), ("Validation", FOUR, "val")):
        for name in names:
            areas = canvas.pair(f"{word}/Images/{name}.jpg", f"{word}/Category_ids/{name}.png", codes, split=known)
            save(canvas.root / f"{word}/Human_ids/{name}.png", (areas > 0).astype(np.uint8))
            persons = areas + 4 * (np.arange(SIZE[1]) > 30)  # a person in each half
            save(canvas.root / f"{word}/Instance_ids/{name}.png", np.where(areas > 0, persons, 0).astype(np.uint8))
            save(canvas.root / f"{word}/Categories/{name}.png", coded(areas, COLORS[:4]))
        canvas.text(f"{word}/{known}_id.txt", names)


def celeb(canvas: Canvas) -> None:
    """CelebAMask-HQ: one mask for each part and image, in numbered folders; parts may be missing."""
    parts = ("skin", "hair", "nose")
    for number in range(12):
        image = f"CelebA-HQ-img/{number}.jpg"
        pixels = canvas.image(image)
        areas = patches(image, 4)
        planes = {}
        for at, part in enumerate(parts, 1):
            if part != "hair" or number % 3:
                planes[part] = areas == at
                path = f"CelebAMask-HQ-mask-anno/{number // 6}/{number:05}_{part}.png"
                save(canvas.root / path, np.dstack([white(areas, at)] * 3))
        canvas.note_planes(image, "CelebAMask-HQ-mask-anno", pixels, planes)
    canvas.text(
        "CelebA-HQ-to-CelebA-mapping.txt", ["idx orig_idx orig_file", *(f"{n} {n} {n:06}.jpg" for n in range(12))]
    )
    canvas.names_said = True


def scan_net(canvas: Canvas) -> None:
    """ScanNet frames: a folder for each scene with color/, depth/, label/ and pose/."""
    codes: Codes = {0: "class_0", 1: "class_1", 5: "class_5", 39: "class_39"}
    for place in range(4):
        folder = f"scene{place:04}_00"
        for number in (0, 100, 200):
            canvas.pair(
                f"{folder}/color/{number:06}.jpg", f"{folder}/label/{number:06}.png", codes, group=folder, like=folder
            )
            depth = (scene(f"depth {place} {number}", SIZE, 1)[..., 0] * 20).astype(np.uint16)
            save(canvas.root / f"{folder}/depth/{number:06}.png", depth)
            canvas.text(f"{folder}/pose/{number:06}.txt", "1 0 0 0\n")
    canvas.unused.append(tuple(f"scene{place:04}_00/depth/000000.png" for place in range(4)))


def msrc(canvas: Canvas) -> None:
    """MSRC-21: images and _GT in colour, both BMP; Train.txt, Validation.txt and Test.txt of file names."""
    colors = parse_colors(
        """800000 008000 808000 000080 008080 808080 c00000 408000 c08000 400080 c00080 408080 c08080 004000 804000
        00c000 804080 00c080 80c080 404000 c04000 000000 800080 400000"""
    )
    codes: Codes = {color: f"class_{number}" for number, color in enumerate(sorted(colors))}
    parts = (("Train", range(6), "train"), ("Validation", range(6, 9), "val"), ("Test", range(9, 12), "test"))
    for word, numbers, known in parts:
        names = [f"{number % 3 + 1}_{number}_s" for number in numbers]
        for name in names:
            canvas.pair(f"Images/{name}.bmp", f"GroundTruth/{name}_GT.bmp", codes, split=known)
        canvas.text(f"{word}.txt", [f"{name}.bmp" for name in names])


def trans10k(canvas: Canvas) -> None:
    """Trans10K: train/images and train/masks with _mask; 0 background, 1 things, 2 stuff; also validation/easy."""
    codes: Codes = {0: "class_0", 1: "class_1", 2: "class_2"}
    split("{s}/images/{}.jpg", "{s}/masks/{}_mask.png", ("train", "validation"), codes)(canvas)


def plants(canvas: Canvas) -> None:
    """CVPPP plants: _rgb, _label with a number for each leaf, _fg, _centers, all in one folder an experiment."""
    others = []
    for experiment in ("A1", "A2"):
        for number in range(1, 7):
            stem = f"{experiment}/plant{number:03}"
            pixels = canvas.image(f"{stem}_rgb.png")
            leaves = range(1, 5 + number)
            areas = patches(stem, len(leaves) + 1)
            save(canvas.root / f"{stem}_label.png", areas.astype(np.uint8))
            save(canvas.root / f"{stem}_fg.png", white(areas, *leaves))
            centers = np.zeros(SIZE, np.uint8)
            for leaf in leaves:
                rows, columns = np.nonzero(areas == leaf)
                centers[int(rows.mean()), int(columns.mean())] = 255
            save(canvas.root / f"{stem}_centers.png", centers)
            others.append(f"{stem}_centers.png")
            canvas.note(f"{stem}_rgb.png", f"{stem}_fg.png", pixels, areas, ["background", *["object"] * len(leaves)])
    canvas.unused.append(tuple(others))


def lars(canvas: Canvas) -> None:
    """LaRS: lars_v1.0.0_images and lars_v1.0.0_annotations with panoptic masks beside the semantic ones."""
    codes: Codes = {0: "obstacle", 1: "water", 2: "sky", 255: None}
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for name in names:
            areas = canvas.pair(
                f"lars_v1.0.0_images/{word}/images/yt{name}_00.jpg",
                f"lars_v1.0.0_annotations/{word}/semantic_masks/yt{name}_00.png",
                codes,
                split=word,
            )
            save(
                canvas.root / f"lars_v1.0.0_annotations/{word}/panoptic_masks/yt{name}_00.png", coded(areas, COLORS[:4])
            )
    canvas.unused.append(tuple(f"lars_v1.0.0_annotations/train/panoptic_masks/yt{name}_00.png" for name in EIGHT))
    canvas.text(
        "lars_v1.0.0_annotations/classes.json", json.dumps({"0": "obstacle", "1": "water", "2": "sky", "255": "ignore"})
    )
    canvas.names_said = True


def taco(canvas: Canvas) -> None:
    """TACO: COCO's JSON beside folders of batches."""
    for number in range(12):
        canvas.image(f"batch_{number % 3}/{number:06}.jpg")
    entries = [{"id": n, "file_name": f"batch_{n % 3}/{n:06}.jpg", "height": 48, "width": 64} for n in range(12)]
    annotations = [
        {"id": n * 2 + at, "image_id": n, "category_id": at, "segmentation": [drawn_annotations.flat(ring)],
         "area": 400 if at == 0 else 36, "iscrowd": 0, "bbox": [10, 8, 20, 20]}
        for n in range(12) for at, ring in enumerate((drawn_annotations.BOX, drawn_annotations.SMALL))
    ]  # fmt: skip
    categories = [{"id": 0, "name": "Bottle"}, {"id": 1, "name": "Can"}]
    canvas.text(
        "annotations.json", json.dumps({"images": entries, "annotations": annotations, "categories": categories})
    )
    for entry in entries:
        pixels = np.asarray(Image.open(canvas.root / str(entry["file_name"])))
        canvas.note(
            str(entry["file_name"]),
            "annotations.json",
            pixels,
            drawn_annotations.expected(),
            ["background", "Bottle", "Can"],
        )
    canvas.names_said = True


def duts(canvas: Canvas) -> None:
    """DUTS: DUTS-TR and DUTS-TE, each with -Image and -Mask."""
    for part, names, known in (("TR", EIGHT, "train"), ("TE", FOUR, "test")):
        for name in names:
            stem = f"DUTS-{part}/DUTS-{part}"
            canvas.pair(f"{stem}-Image/ILSVRC_{name}.jpg", f"{stem}-Mask/ILSVRC_{name}.png", BINARY, split=known)


def crack500(canvas: Canvas) -> None:
    """Crack500: images and masks of one stem side by side, with lists of both in a line."""
    for word, names in (("train", EIGHT), ("val", FOUR)):
        lines = []
        for name in names:
            image, mask = f"{word}crop/2016{name}_1.jpg", f"{word}crop/2016{name}_1.png"
            canvas.pair(image, mask, BINARY, split=word)
            lines.append(f"{image} {mask}")
        canvas.text(f"{word}.txt", lines)


def deep_crack(canvas: Canvas) -> None:
    """DeepCrack: train_img, train_lab, test_img, test_lab."""
    split("{s}_img/{}.jpg", "{s}_lab/{}.png", ("train", "test"), BINARY)(canvas)


def helen(canvas: Canvas) -> None:
    """Helen as SmithCVPR2013: a folder of label images for each image, numbered by part, grey where uncertain."""
    for number in range(12):
        name = f"{number:06}_1"
        pixels = canvas.image(f"images/{name}.jpg")
        areas = patches(name, 3)
        for part in range(3):
            save(canvas.root / f"labels/{name}/{name}_lbl{part:02}.png", white(areas, part))
        canvas.note(f"images/{name}.jpg", f"labels/{name}", pixels, areas, ["lbl00", "lbl01", "lbl02"])
    canvas.names_said = True


def space_net(canvas: Canvas) -> None:
    """SpaceNet roads after rasterisation: PS-RGB images and masks whose prefixes differ inside the name."""
    for number in range(1, 13):
        canvas.pair(
            f"AOI_3_Paris/PS-RGB/SN3_roads_train_AOI_3_Paris_PS-RGB_img{number}.tif",
            f"AOI_3_Paris/masks/SN3_roads_train_AOI_3_Paris_geojson_roads_img{number}.png",
            BINARY,
        )


def sun_rgbd(canvas: Canvas) -> None:
    """SUN RGB-D as prepared: image, depth and label of different stems, train and test in their names' folders."""
    depths = []
    for word, names in (("train", EIGHT), ("test", FOUR)):
        for name in names:
            canvas.pair(f"image/{word}/img-00{name}.jpg", f"label/{word}/img-00{name}.png", UNNAMED, split=word)
            depths.append(f"depth/{word}/{name}.png")
            save(canvas.root / depths[-1], (scene(f"depth {name}", SIZE, 1)[..., 0] * 100).astype(np.uint16))
    canvas.unused.append(tuple(depths))


def cvat(canvas: Canvas) -> None:
    """CVAT's XML: a polygon, and run lengths in front of it."""
    drawn_annotations.cvat(canvas.root)
    areas = drawn_annotations.expected(1, 1).astype(int)
    front = np.zeros(36, bool)
    front[7:10] = front[11:] = True
    areas[12:18, 14:20][front.reshape(6, 6)] = 2
    for name in drawn_annotations.NAMES:
        pixels = np.asarray(Image.open(canvas.root / f"images/{name}.jpg"))
        canvas.note(f"images/{name}.jpg", "annotations.xml", pixels, areas, ["background", "road", "car"])
    canvas.names_said = True


def supervisely(canvas: Canvas) -> None:
    """Supervisely: a polygon with a hole, and a bitmap."""
    drawn_annotations.supervisely(canvas.root)
    areas = drawn_annotations.expected(1, 1).astype(int)
    areas[13:17, 15:19] = 0  # the hole: its outline belongs to the road
    areas[30:36, 40:46] = 2
    for name in drawn_annotations.NAMES:
        path = f"ds0/img/{name}.jpg"
        pixels = np.asarray(Image.open(canvas.root / path))
        canvas.note(path, f"ds0/ann/{name}.jpg.json", pixels, areas, ["background", "road", "car"])
    canvas.names_said = True


def image_folder(canvas: Canvas) -> None:
    """A Hugging Face imagefolder: metadata.jsonl names image and mask, whose names differ."""
    rows = []
    for number, name in enumerate(TWELVE):
        mask = f"seg_{(number * 5 + 3) % 12:04}.png"
        canvas.pair(f"train/{name}.png", f"train/{mask}", UNNAMED)
        rows.append(json.dumps({"file_name": f"{name}.png", "mask_file_name": mask}))
    canvas.text("train/metadata.jsonl", rows)


PUBLIC = layouts(
    {
        "Kvasir-SEG": (kvasir, Refuse(("JPEG", "magick mogrify"))),
        "CVC-ClinicDB": (clinic, Ask("--layout", or_read=True)),
        "PanNuke": (pannuke, Refuse(("save masks as ids",))),
        "STARE": (stare, Ask("--layout", or_read=True)),
        "HRF": hrf,
        "REFUGE": (refuge, Ask("--", or_read=True)),
        "BraTS slices": (brats, Ask("--layout", or_read=True)),
        "cell tracking": (cell_tracking, Ask("--", or_read=True)),
        "Inria Aerial": inria,
        "Massachusetts roads": massachusetts,
        "LandCover.ai": landcover,
        "OpenEarthMap": open_earth_map,
        "FloodNet": flood_net,
        "Sen1Floods11": (floods, Refuse(("np.where(mask < 0, 255, mask)",))),
        "SpaceNet roads": space_net,
        "xView2": x_view,
        "LEVIR-CD": (levir, Ask("--", or_read=False)),
        "WHU buildings": whu,
        "Agriculture-Vision": (agriculture, Ask("--layout", or_read=True)),
        "KITTI semantics": (kitti, Ask("--layout", or_read=True)),
        "KITTI road": (kitti_road, Refuse(("with an image and its mask a line",))),
        "RUGD": rugd,
        "RELLIS-3D": rellis,
        "Cityscapes, coarse": coarse,
        "IDD": idd,
        "Dark Zurich": (dark_zurich, Ask("--layout", or_read=True)),
        "MVTec AD": (mvtec, Ask("--layout", or_read=True)),
        "KolektorSDD2": kolektor,
        "CIHP": (cihp, Ask("--layout", or_read=True)),
        "Helen parts": (helen, Refuse(("move masks of classes",))),
        "CelebAMask-HQ": celeb,
        "SUN RGB-D": sun_rgbd,
        "ScanNet frames": (scan_net, Ask("--layout", or_read=True)),
        "MSRC-21": msrc,
        "Trans10K": trans10k,
        "Weizmann horses": unsplit("rgb/horse{}.jpg", "figure_ground/horse{}.png", BINARY),
        "CVPPP plants": (plants, Refuse(("np.uint8", "--masks ids"))),
        "LaRS": lars,
        "TACO": taco,
        "DUTS": duts,
        "Crack500": crack500,
        "DeepCrack": deep_crack,
        "CrackForest": unsplit("image/{}.jpg", "groundTruth/{}_label.png", BACKGROUND_OBJECT),
        "Pascal parts": unsplit("JPEGImages/2008_00{}.jpg", "pascal_person_part_gt/2008_00{}.png", palette=PALETTE),
        "imagefolder, other names": (image_folder, Refuse(("metadata.jsonl", "to_csv"))),
        "Label Studio, polygons": annotated(drawn_annotations.label_studio),
        "CVAT XML": cvat,
        "Supervisely": supervisely,
    }
)
