"""Hugging Face parquet files with a column of images and one of masks. Both are written next to the config."""

import io
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from segapp.bounds import check_memory
from segapp.datasets.files import MAX_PIXELS, open_bytes, shown
from segapp.onboarding.convert.conversion import as_ids, file_state, missing_extra, split_said
from segapp.onboarding.layout import Drawing, Layout, Mask, Pair
from segapp.onboarding.survey.tree import Tree

_MASKS = ("mask", "label", "labels", "annotation", "segmentation", "semantic_segmentation", "seg", "gt", "masks")
_ROW_BYTES = 2048  # memory of the pair of a row
_IMAGES = ("image", "img", "pixel_values", "images", "jpg")


def find_parquet(tree: Tree) -> Layout | None:
    """Return the conversion of parquet files; raise DataError if pyarrow is not installed."""
    paths = tree.others_named(".parquet")
    if not paths:
        return None
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet files") from None
    pairs: list[Pair] = []
    suffix, said = "", ""
    for path in sorted(paths):
        file = parquet.ParquetFile(tree.root / path)
        names = file.schema_arrow.names
        image, mask = (next((name for name in known if name in names), None) for known in (_IMAGES, _MASKS))
        if image is None or mask is None:
            continue
        said = f"the columns {image} and {mask}"
        state = file_state(tree.root / path)
        first_row = 0
        for group in range(file.num_row_groups):
            _check_group(file.metadata.row_group(group), path, state[0])
            read = partial(_read_group, tree.root / path, group, (image, mask))
            suffix = suffix or _suffix(read()[0][0].as_py()["bytes"])
            num_rows = file.metadata.row_group(group).num_rows
            for number in range(num_rows):
                row = first_row + number
                name = f"{split_said(path) or 'all'}/{Path(path).stem}-{row:06}"
                drawing = Drawing(
                    f"{shown(path)}: row {row}",
                    (path, row, *state),
                    partial(_mask_of, read, number),
                    image_bytes=partial(_image_of, read, number),
                    has_digest=False,
                )
                pairs.append(Pair(f"images/{name}{suffix}", f"masks/{name}.png", split_said(path), drawing=drawing))
            first_row += num_rows
    if not pairs:
        return None
    evidence = (f"{len(paths)} parquet files with {said}", f"{len(pairs)} rows")
    return Layout("parquet", pairs, 0.95, evidence, tuple(sorted(paths)), title="parquet")


def _suffix(data: bytes) -> str:
    """Return the extension for images of this kind; readers look only at the content."""
    return ".jpg" if data[:2] == b"\xff\xd8" else ".png"


def _check_group(group: Any, path: str, file_bytes: int) -> None:
    """Raise ValueError if the rows of a group, or their pairs, ask for too much memory."""
    columns = [group.column(number) for number in range(group.num_columns)]
    num_bytes = sum(column.total_uncompressed_size for column in columns) + _ROW_BYTES * group.num_rows
    check_memory(num_bytes, f"{shown(path)}: a group of {group.num_rows} rows", file_bytes=file_bytes)


_Read = Callable[[], tuple[Any, Any]]


@lru_cache(maxsize=1)
def _read_group(path: Path, group: int, columns: tuple[str, str]) -> tuple[Any, Any]:
    """Return the images and masks of a row group; the last group is cached, because rows are read in order.

    A value that many rows repeat is in memory once; ValueError is raised if the rows together are too large.
    """
    from pyarrow import compute, parquet

    file = parquet.ParquetFile(path, read_dictionary=[f"{column}.bytes" for column in columns])
    table = file.read_row_group(group, columns=list(columns))
    values = [chunk.field("bytes") for column in table.columns for chunk in column.chunks]
    num_bytes = sum(compute.sum(compute.binary_length(one.dictionary).take(one.indices)).as_py() or 0 for one in values)
    check_memory(num_bytes, f"{shown(path)}: a group of {table.num_rows} rows", file_bytes=path.stat().st_size)
    return table.column(columns[0]), table.column(columns[1])


def _image_of(read: _Read, number: int, _digest: str) -> bytes:
    return bytes(read()[0][number].as_py()["bytes"])


def _mask_of(read: _Read, number: int) -> Mask:
    """Return the ids of the mask in a row; raise ValueError if it has colors, or ids above 255."""
    data = read()[1][number].as_py()["bytes"]
    image = open_bytes(data, Path("mask"), MAX_PIXELS)
    if image.mode not in ("L", "P", "1", "I", "I;16"):
        raise ValueError(f"a mask of mode {image.mode}: only masks of ids can be converted")
    ids = np.asarray(Image.open(io.BytesIO(data)))
    return as_ids(ids, 255).astype(np.uint8, copy=False)
