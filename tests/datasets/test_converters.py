"""Converters: the masks that `segapp init` writes from annotations, against hand-drawn ones; resuming; bad entries."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.commands.init import InitRequest, propose_config
from segapp.datasets.convert.drawing import decode_runs
from segapp.errors import DataError
from tests.support.drawn_folders import draw_image, listing, proposed

HEIGHT, WIDTH = 48, 64
NAMES = [f"{number:04}" for number in range(6)]
BOX = [(10, 8), (29, 8), (29, 27), (10, 27)]
SMALL = [(14, 12), (19, 12), (19, 17), (14, 17)]


def expected(big: int = 1, small: int = 2) -> np.ndarray:
    """The mask of BOX with SMALL on top: corners are pixel centres, outlines are filled."""
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[8:28, 10:30] = big
    mask[12:18, 14:20] = small
    return mask


def written(tmp_path: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(tmp_path / "made-masks" / f"{name}.png"))


def flat(ring: list[tuple[int, int]]) -> list[float]:
    return [float(value) for corner in ring for value in corner]


def runs_by_column(mask: np.ndarray) -> list[int]:
    """Run lengths in COCO's order, by a loop over the pixels."""
    counts, value = [0], False
    for pixel in mask.T.ravel():
        if bool(pixel) != value:
            counts.append(0)
            value = not value
        counts[-1] += 1
    return counts


def coco(root: Path, segmentation: Any, names: list[str] = NAMES, folder: str = "images") -> None:
    for name in names:
        draw_image(root / folder / f"{name}.jpg", (HEIGHT, WIDTH))
    annotations = []
    for number in range(len(names)):
        for category, ring in ((7, SMALL), (3, BOX)):  # the small one first: it must end on top
            annotations.append({"id": len(annotations), "image_id": number, "category_id": category,
                                "segmentation": segmentation(ring)})  # fmt: skip
    content = {
        "images": [{"id": i, "file_name": f"{name}.jpg"} for i, name in enumerate(names)],
        "annotations": annotations,
        "categories": [{"id": 3, "name": "road"}, {"id": 7, "name": "car"}],
    }
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / "instances.json").write_text(json.dumps(content))


def as_runs(ring: list[tuple[int, int]]) -> dict[str, Any]:
    (x0, y0), (x1, y1) = ring[0], ring[2]
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0 : y1 + 1, x0 : x1 + 1] = True
    return {"size": [HEIGHT, WIDTH], "counts": runs_by_column(mask)}


def as_compressed(ring: list[tuple[int, int]]) -> dict[str, Any]:
    masks = pytest.importorskip("pycocotools.mask")
    runs = as_runs(ring)
    encoded = masks.frPyObjects(runs, HEIGHT, WIDTH)
    return {"size": runs["size"], "counts": encoded["counts"].decode()}


@pytest.mark.parametrize("kind", [lambda ring: [flat(ring)], as_runs, as_compressed], ids=["polygons", "runs", "rle"])
def test_coco_objects_become_masks_smaller_on_top(kind: Any, tmp_path: Path) -> None:
    if kind is as_runs:
        expected_order = expected()
    coco(tmp_path / "d", kind)
    content = json.loads((tmp_path / "d" / "annotations" / "instances.json").read_text())
    for annotation in content["annotations"]:
        annotation["area"] = 36 if annotation["category_id"] == 7 else 400
    (tmp_path / "d" / "annotations" / "instances.json").write_text(json.dumps(content))
    config, result, names = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["background", "road", "car"]
    assert len(names["train"] + names["val"]) == 6
    expected_order = expected()
    for name in NAMES:
        assert (written(tmp_path, f"images/{name}") == expected_order).all()
    assert "6 of 6 entries name an image" in " ".join(result.lines)


def test_finished_masks_are_kept_and_changed_ones_drawn_again(tmp_path: Path) -> None:
    coco(tmp_path / "d", lambda ring: [flat(ring)])
    request = InitRequest(tmp_path / "d", tmp_path / "made.yaml", force=True)
    propose_config(request)
    masks = tmp_path / "made-masks" / "images"
    (masks / "0000.png").write_bytes((masks / "0000.png").read_bytes()[:60])
    before = listing(masks)
    lines = " ".join(propose_config(request).lines)
    assert "5 of them there already" in lines
    assert {name for name, value in listing(masks).items() if value != before[name]} == {"0000.png"}
    assert (written(tmp_path, "images/0000") == expected()).all()


def test_bad_entries_are_named_and_the_others_converted(tmp_path: Path) -> None:
    coco(tmp_path / "d", lambda ring: [flat(ring)])
    path = tmp_path / "d" / "annotations" / "instances.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["segmentation"] = [[1.0, 2.0]]
    del content["annotations"][2]["category_id"]
    path.write_text(json.dumps(content))
    _, result, names = proposed(tmp_path / "d", tmp_path / "made.yaml")
    lines = "\n".join(result.lines)
    assert (
        "left out: annotations/instances.json: image 0000.jpg: the entry cannot be read (a polygon of 1 corners"
        in lines
    )
    assert "image 0001.jpg: the entry cannot be read ('category_id' is missing)" in lines
    assert len(names["train"] + names["val"]) == 4


def test_coco_panoptic_segments_become_masks(tmp_path: Path) -> None:
    root = tmp_path / "d"
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 9, "name": "sky"}, {"id": 1, "name": "car"}],
    }
    ids = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    ids[:20], ids[20:30] = (5, 1, 0), (7, 0, 0)  # segments 261 and 7; the rest has none
    for number, name in enumerate(NAMES):
        draw_image(root / "val2017" / f"{name}.jpg", (HEIGHT, WIDTH))
        (root / "annotations" / "panoptic_val2017").mkdir(parents=True, exist_ok=True)
        Image.fromarray(ids).save(root / "annotations" / "panoptic_val2017" / f"{name}.png")
        content["images"].append({"id": number, "file_name": f"{name}.jpg"})
        segments = [{"id": 261, "category_id": 9}, {"id": 7, "category_id": 1}]
        content["annotations"].append({"image_id": number, "file_name": f"{name}.png", "segments_info": segments})
    (root / "annotations" / "panoptic_val2017.json").write_text(json.dumps(content))
    proposed(root, tmp_path / "made.yaml", layout="coco")
    mask = written(tmp_path, "val2017/0000")
    assert [int(mask[row, 0]) for row in (0, 25, 40)] == [2, 1, 255]


def test_yolo_polygons_become_masks(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for split, names in (("train", NAMES[:4]), ("val", NAMES[4:])):
        for name in names:
            draw_image(root / "images" / split / f"{name}.jpg", (HEIGHT, WIDTH))
            lines = [
                f"{number} " + " ".join(f"{(x + 0.5) / WIDTH:.8f} {(y + 0.5) / HEIGHT:.8f}" for x, y in ring)
                for number, ring in ((1, SMALL), (0, BOX))
            ]
            path = root / "labels" / split / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames:\n  0: road\n  1: car\n")
    config, _, names_of = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["background", "road", "car"]
    assert (len(names_of["train"]), len(names_of["val"])) == (4, 2)
    assert (written(tmp_path, "images/train/0000") == expected()).all()


def test_labelme_shapes_become_masks_later_on_top(tmp_path: Path) -> None:
    root = tmp_path / "d"
    piece = io.BytesIO()
    Image.fromarray(np.full((6, 6), 255, np.uint8)).save(piece, "PNG")
    for name in NAMES:
        draw_image(root / f"{name}.jpg", (HEIGHT, WIDTH))
        shapes = [
            {"label": "road", "shape_type": "polygon", "points": BOX},
            {"label": "car", "shape_type": "mask", "points": [[14, 12], [19, 17]],
             "mask": base64.b64encode(piece.getvalue()).decode()},
            {"label": "ignore", "shape_type": "rectangle", "points": [[40, 30], [49, 39]]},
        ]  # fmt: skip
        (root / f"{name}.json").write_text(
            json.dumps({"imagePath": f"{name}.jpg", "shapes": shapes, "imageData": None})
        )
    config, _, _ = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["background", "car", "road"]
    wanted = expected(2, 1)
    wanted[30:40, 40:50] = 255
    assert (written(tmp_path, "0003") == wanted).all()


def test_run_lengths_that_do_not_fill_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="run lengths of 5 pixels for 3 x 2"):
        decode_runs([2, 3], 2, 3)
    assert decode_runs([1, 2, 3], 2, 3, "F").tolist() == [[False, True, False], [True, False, False]]


def test_annotations_that_are_all_bad_are_an_error(tmp_path: Path) -> None:
    coco(tmp_path / "d", lambda ring: [[1.0, 2.0]])
    with pytest.raises(DataError, match=r"no entry of COCO can be converted: annotations/instances\.json: image 0000"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert not (tmp_path / "made.yaml").exists()


def brush(mask: np.ndarray) -> list[int]:
    """Label Studio's run lengths of a mask as alpha: each pixel's four values as one run, by an independent writer."""
    bits = f"{mask.size * 4:032b}{7:05b}" + "".join(f"{length - 1:04b}" for length in (1, 2, 3, 8))
    for pixel in mask.ravel():
        if pixel:  # a repeated run of four, 2 bits of length
            bits += f"1{1:02b}{3:02b}{255:08b}"
        else:  # four values one by one
            bits += f"0{1:02b}{3:02b}" + f"{0:08b}" * 4
    bits += "0" * (-len(bits) % 8)
    return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]


def percent(ring: list[tuple[int, int]]) -> list[list[float]]:
    return [[(x + 0.5) / WIDTH * 100, (y + 0.5) / HEIGHT * 100] for x, y in ring]


def small_piece() -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[12:18, 14:20] = True
    return mask


def test_label_studio_polygons_and_brushes_become_masks(tmp_path: Path) -> None:
    tasks = []
    for name in NAMES:
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg", (HEIGHT, WIDTH))
        result = [
            {"type": "polygonlabels", "value": {"points": percent(BOX), "polygonlabels": ["road"]}},
            {"type": "brushlabels", "value": {"format": "rle", "rle": brush(small_piece()), "brushlabels": ["car"]}},
        ]
        annotations = [{"was_cancelled": True, "result": []}, {"was_cancelled": False, "result": result}]
        tasks.append({"data": {"image": f"/data/upload/3/1a2b3c4d-{name}.jpg"}, "annotations": annotations})
    (tmp_path / "d" / "export.json").write_text(json.dumps(tasks))
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["background", "car", "road"]
    assert (written(tmp_path, "images/0002") == expected(2, 1)).all()


def test_cvat_shapes_become_masks_by_z_order(tmp_path: Path) -> None:
    entries = []
    for number, name in enumerate(NAMES):
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg", (HEIGHT, WIDTH))
        points = ";".join(f"{x}.0,{y}.0" for x, y in BOX)
        entries.append(
            f'<image id="{number}" name="{name}.jpg" width="{WIDTH}" height="{HEIGHT}">'
            f'<mask label="car" rle="7,3,1,25" left="14" top="12" width="6" height="6" z_order="1"/>'
            f'<polygon label="road" points="{points}" z_order="0"/></image>'
        )
    labels = "".join(f"<label><name>{name}</name></label>" for name in ("road", "car"))
    text = f"<annotations><version>1.1</version><meta><task><labels>{labels}</labels></task></meta>{''.join(entries)}"
    (tmp_path / "d" / "annotations.xml").write_text(text + "</annotations>")
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["background", "car", "road"]
    wanted = expected(2, 2)
    piece = np.zeros(36, bool)
    piece[7:10] = piece[11:] = True
    wanted[12:18, 14:20][piece.reshape(6, 6)] = 1
    assert (written(tmp_path, "images/0001") == wanted).all()


def test_supervisely_polygons_with_holes_and_bitmaps(tmp_path: Path) -> None:
    root = tmp_path / "d"
    data = io.BytesIO()
    Image.fromarray(np.full((6, 6), 255, np.uint8)).save(data, "PNG")
    bitmap = {"data": base64.b64encode(zlib.compress(data.getvalue())).decode(), "origin": [40, 30]}
    for name in NAMES:
        draw_image(root / "ds0" / "img" / f"{name}.jpg", (HEIGHT, WIDTH))
        objects = [
            {"classTitle": "road", "geometryType": "polygon", "points": {"exterior": BOX, "interior": [SMALL]}},
            {"classTitle": "car", "geometryType": "bitmap", "bitmap": bitmap},
        ]
        (root / "ds0" / "ann").mkdir(exist_ok=True)
        content = {"size": {"height": HEIGHT, "width": WIDTH}, "objects": objects}
        (root / "ds0" / "ann" / f"{name}.jpg.json").write_text(json.dumps(content))
    (root / "meta.json").write_text(json.dumps({"classes": [{"title": "road"}, {"title": "car"}]}))
    config, _, _ = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["background", "car", "road"]
    mask = written(tmp_path, "ds0/img/0000")
    assert (mask[30:36, 40:46] == 1).all()
    assert (mask[13:17, 15:19] == 0).all()  # the inside of the hole; its outline belongs to the road
    assert (mask[8:28, 10:30] == 2).sum() == 20 * 20 - 4 * 4


def test_parquet_rows_become_images_and_masks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "d" / "data").mkdir(parents=True)
    for split, count in (("train", 5), ("validation", 2)):
        rows: dict[str, list[Any]] = {"image": [], "label": []}
        for number in range(count):
            draw_image(tmp_path / "x.jpg", (HEIGHT, WIDTH))
            mask = io.BytesIO()
            Image.fromarray(expected(1, number % 3)).save(mask, "PNG")
            rows["image"].append({"bytes": (tmp_path / "x.jpg").read_bytes(), "path": None})
            rows["label"].append({"bytes": mask.getvalue(), "path": None})
        path = tmp_path / "d" / "data" / f"{split}-00000-of-00001.parquet"
        parquet.write_table(pyarrow.table(rows), path, row_group_size=2)
    (tmp_path / "d" / "id2label.json").write_text('{"0": "ground", "1": "road", "2": "car"}')
    config, _, names = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["ground", "road", "car"]
    assert (len(names["train"]), len(names["val"])) == (5, 2)
    mask = written(tmp_path, "masks/train/train-00000-of-00001-000004")
    assert (mask == expected(1, 1)).all()
