"""Every file of a data folder is in the account of `segapp init` and of `segapp check`: used, or not used and why."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from segapp.commands.check import check_data
from segapp.config import RunConfig, load_config
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.tree import Tree, survey_tree, unused_files, unused_lines
from tests.support.drawn_folders import draw, draw_image, draw_mask

NAMES = [f"{number:04}" for number in range(12)]
PARTS = ("images", "masks", "train", "val", "depth", "a", "labels")
FILES = ("0.jpg", "0.png", "0_mask.png", "1.jpg", "train.txt", "x.csv", "note.md", "boxes.json", "c.npy")


def checked(config: RunConfig, *, as_json: bool) -> str:
    """Returns what `segapp check` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        check_data(config, as_json=as_json)
    return out.getvalue()


@given(
    paths=st.lists(
        st.tuples(st.lists(st.sampled_from(PARTS), max_size=3), st.sampled_from(FILES)), min_size=1, max_size=30
    ),
    data=st.data(),
)
def test_each_file_is_counted_once(paths: list[tuple[list[str], str]], data: st.DataObject) -> None:
    files = sorted({"/".join([*folders, name]) for folders, name in paths})
    images = tuple(path for path in files if path.endswith((".jpg", ".png")))
    others = tuple(path for path in files if path not in images)
    used = {path for path in files if data.draw(st.booleans())}
    tree = Tree(Path("d"), images, others, leads_outside=False)
    unused = unused_files(tree, used)
    named = [path for paths in unused for path in paths]
    assert len(named) == len(set(named))
    assert set(named) == set(files) - used
    lines = unused_lines(tree, unused)
    assert lines[0] == f"{len(files)} files: {len(used)} used, {len(named)} not used"
    assert len([line for line in lines if line.startswith("not used")]) == min(13, len(unused))


STRAYS = (
    "masks/train/zzz.png",
    "images/test/t.jpg",
    "depth/0000.png",
    "other.txt",
    "sheet.csv",
    "meta/info.json",
    "a.md",
)


def test_init_and_check_account_for_every_file(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for split, names in (("train", NAMES[:8]), ("val", NAMES[8:])):
        draw(root, names, f"images/{split}/{{}}.jpg", f"masks/{split}/{{}}.png")
    for stray in STRAYS:
        path = root / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".jpg", ".png"):
            draw_mask(path) if "masks" in stray else draw_image(path)
        else:
            path.write_text("{}" if path.suffix == ".json" else "x;y\n1;2\n")
    result = propose_config(InitRequest(root, root.with_suffix(".yaml")))
    assert "31 files: 24 used, 7 not used" in result.lines
    for stray in STRAYS:
        assert any(line.startswith(f"not used: {stray}") for line in result.lines), (stray, result.lines)
    config = load_config(result.configs[0])
    assert "31 files: 24 used, 7 not used" in checked(config, as_json=False).splitlines()
    files = json.loads(checked(config, as_json=True))["files"]
    assert {path for group in files["not_used"] for path in group} == {*STRAYS}


def test_hidden_files_are_not_counted_and_all_others_are(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.PNG", ".hidden.png", "c.txt", "d", "e.weird", ".git/f.png", "__MACOSX/g.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    tree = survey_tree(tmp_path)
    assert (tree.images, tree.others) == (("a.jpg", "b.PNG"), ("c.txt", "d", "e.weird"))
