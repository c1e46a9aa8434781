"""What the fuzzer does to folders of annotations: for each converter a sound folder, and mutations of its files."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
import shutil
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from segapp.errors import SegappError
from segapp.onboarding.candidates import CONVERTERS, find_conversions
from segapp.onboarding.conversion import write_files
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.tree import survey_tree
from tests.fuzz.targets import mutate
from tests.support import drawn_annotations as drawn
from tests.support.drawn_folders import draw_image, draw_mask
from tests.support.hostile_files import PYTHONS_WORDS, png_bomb
from tests.support.limits import LIMIT_S

SIZE = (drawn.HEIGHT, drawn.WIDTH)


def run_lengths(root: Path) -> None:
    rows = ["ImageId,EncodedPixels"]
    for name in drawn.NAMES:
        draw_image(root / "train" / f"{name}.jpg", SIZE)
        rows.append(f"{name}.jpg,{' '.join(f'{column * drawn.HEIGHT + 9} 20' for column in range(10, 30))}")
    (root / "train.csv").write_text("\n".join(rows))


def arrays(root: Path) -> None:
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    np.save(root / "images.npy", rng.integers(0, 255, (4, *SIZE), np.uint8))
    np.save(root / "masks.npy", np.stack([drawn.expected()] * 4))


def pieces(root: Path) -> None:
    for name in drawn.NAMES:
        draw_image(root / "images" / f"{name}.png", SIZE)
        for number, label in enumerate(("road", "car")):
            values = np.array([0, 255], np.uint8)[:: 1 if number else -1]
            draw_mask(root / "masks" / label / f"{name}.png", values, SIZE)


SAMPLES: dict[str, Callable[[Path], None]] = {
    "COCO": drawn.coco,
    "YOLO": drawn.yolo,
    "labelme": drawn.labelme,
    "Label Studio": drawn.label_studio,
    "CVAT": drawn.cvat,
    "Supervisely": drawn.supervisely,
    "tables of run lengths": run_lengths,
    "arrays": arrays,
    "several masks for each image": pieces,
}
"""Title of a converter -> function that draws a folder for it."""

HUGE = (0, -1, 255, 256, 65_536, 2**31 - 1, 2**32, 10**9, 2 * 10**10, 2**62, -(2**63), 10**30)
VALUES: tuple[Any, ...] = (
    *HUGE, 1e9, -1e9, 1e300, float("inf"), float("nan"), None, True, "", "x" * 4096, [], {}, [[]] * 9, [[[[[[0]]]]]],
    [4, 3], {"counts": [0, 2**40], "size": [2**20, 2**20]},
)  # fmt: skip


WORDS = (*(str(value).encode() for value in HUGE), b"-1e300", b"nan", b"inf", b"9" * 400, b"0,20000000000", b"[" * 500,
         b"\0", b"\n", b"&a [*a]", "\u202e".encode())  # fmt: skip
"""What is put into text and bytes."""


def bitmap_bomb() -> str:
    """A PNG of 20,000 x 20,000 zeros, packed and in base64, as Supervisely writes it."""
    return base64.b64encode(zlib.compress(png_bomb(20_000, 20_000), 9)).decode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """Returns JSON with one to three values replaced, removed, repeated or nested."""
    content = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        if not (found := list(places(content))):
            break
        parent, key = rng.choice(found)
        value = parent[key]
        kind = rng.randrange(7)
        if kind == 0 and isinstance(value, list) and len(value) < 1000:
            parent[key] = value * rng.choice((2, 50, 400))
        elif kind == 1:
            parent[key] = [[value]]
        elif kind == 2 and isinstance(value, str):
            parent[key] = rng.choice((value * 1000, bitmap_bomb()))
        elif kind == 3 and isinstance(value, list):
            corners = [(number % 60, -1e9 if number % 2 else 1e9) for number in range(2000)]
            parent[key] = corners if value and isinstance(value[0], list) else list(itertools.chain(*corners))
        elif kind == 4:
            del parent[key]
        else:
            parent[key] = rng.choice(VALUES)
    return json.dumps(content).encode()


def mutate_folder(root: Path, rng: random.Random) -> None:
    """Changes one or two files of a folder, rather annotations than images."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    others = [path for path in files if path.suffix not in (".png", ".jpg")]
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(others if others and rng.random() < 0.85 else files)
        data = path.read_bytes()
        changed = mutate(data, rng, WORDS)
        if path.suffix == ".json" and rng.random() < 0.8:
            with contextlib.suppress(ValueError, RecursionError):
                changed = mutate_json(data, rng)
        path.write_bytes(changed)


def convert(root: Path, out: Path) -> None:
    """Examines a folder as `segapp init` does, then draws the masks of everything that a converter finds in it."""
    with _in_words():
        propose_config(InitRequest(root, out=out / "a.yaml", force=True))
    with _in_words():
        found, problems = find_conversions(survey_tree(root), has_masks=False)
        for number, layout in enumerate(found):
            with _in_words():
                problems += write_files(layout, out / str(number), root)[1]
        said = " ".join(line for line in problems if "no readable image" not in line)  # these quote the decoder
        assert not (match := PYTHONS_WORDS.search(said)), match


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """An error for users is fine if it does not say what Python says."""
    try:
        yield
    except SegappError as error:
        if PYTHONS_WORDS.search(str(error)):
            raise


def convert_mutations(title: str, seeds: range) -> list[tuple[int, str]]:
    """Returns the seeds of the mutated folders on which something else than an error in words was raised."""
    findings = []
    with tempfile.TemporaryDirectory(prefix="segapp-fuzz-") as folder:
        SAMPLES[title](sound := Path(folder, "sound"))
        for seed in seeds:
            shutil.copytree(sound, root := Path(folder, "data"))
            mutate_folder(root, random.Random(f"{title} {seed}"))
            Path(folder, "out").mkdir()
            start_s = time.process_time()
            try:
                convert(root, Path(folder, "out"))
            except Exception:
                findings.append((seed, traceback.format_exc()))
            if time.process_time() - start_s > LIMIT_S:
                findings.append((seed, f"longer than {LIMIT_S} s"))
            shutil.rmtree(root)
            shutil.rmtree(Path(folder, "out"))
    return findings


assert SAMPLES.keys() == CONVERTERS.keys(), "every converter has a sample"
