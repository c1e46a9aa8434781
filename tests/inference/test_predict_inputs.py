"""`segapp predict` reads the files that init and check read, never its own results, and names what it leaves out."""

import unicodedata
from pathlib import Path

import pytest

from segapp.errors import ConfigError, DataError
from segapp.inference.predict.reading import find_images


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names_of(*paths: Path, out: Path | None = None) -> list[str]:
    return [file.name for file in find_images(paths, out)[0]]


def test_hidden_files_and_other_kinds_are_named_not_read(tmp_path: Path) -> None:
    touch(tmp_path, "d/a.JPG", "d/._a.JPG", "d/b/c.gif", "d/b/Thumbs.db", "d/__MACOSX/d/a.JPG", "d/.old/x.png")
    touch(tmp_path, "d/p.heic", "d/b/q.heic", "d/b/r.HEIC", "d/b/notes.txt")
    for paths in ([tmp_path / "d"], [tmp_path / "d" / "**"], [tmp_path / "d", tmp_path / "d" / "b" / "*"]):
        files, notes = find_images(paths)
        assert [file.path for file in files] == [tmp_path / "d" / "a.JPG", tmp_path / "d" / "b" / "c.gif"]
        assert notes == [
            "4 files of other kinds (3 .heic, 1 .txt) not read: convert them, or install pillow-heif",
            f"4 hidden files and folders not read, such as {tmp_path}/d/._a.JPG",
        ]
    touch(tmp_path, "h/x.heic")
    with pytest.raises(DataError, match=r"h holds no image \(1 files of other kinds \(\.heic\) not read: conv"):
        find_images([tmp_path / "h"])
    touch(tmp_path, "g/runs/one/run.json", "g/runs/one/samples/x.png", "g/x.png")
    assert find_images([tmp_path / "g"])[1] == [
        f"1 hidden files and folders not read, such as {tmp_path}/g/runs/one/run.json"
    ]


def test_hidden_files_are_read_if_a_glob_names_them(tmp_path: Path) -> None:
    touch(tmp_path, "d/.cache/a.png", "d/.cache/.b.png", "d/e/c.png")
    assert names_of(tmp_path / "d" / "*" / ".*") == [".cache/.b"]
    assert names_of(tmp_path / "d" / ".c*" / "a.png") == [".cache/a"]


def test_glob_matches_only_at_its_depth(tmp_path: Path) -> None:
    touch(tmp_path, "d/a.png", "d/e/b.png", "d/e/f/c.png", "d/[x].png")
    assert names_of(tmp_path / "d" / "*.png") == ["[x]", "a"]
    assert names_of(tmp_path / "d" / "*" / "?.png") == ["e/b"]
    assert names_of(tmp_path / "d" / "**" / "f" / "*.png") == ["e/f/c"]
    assert names_of(tmp_path / "d" / "[x].png") == ["[x]"]
    touch(tmp_path, "d/clip.MP4", "d/runs/one/run.json", "d/runs/one/samples/1.png")
    assert names_of(tmp_path / "d" / "runs" / "one" / "samples") == ["1"]
    images, notes = find_images([tmp_path / "d" / "**" / "*"])
    assert {image.name for image in images} == {"a", "[x]", "e/b", "e/f/c"}
    assert "save the frames of videos with ffmpeg -i VIDEO frames/%06d.png" in notes[0]
    with pytest.raises(DataError, match="is a pattern that matches no image"):
        find_images([tmp_path / "*.gif"])


def test_results_are_never_inputs(tmp_path: Path) -> None:
    touch(tmp_path, "d/a.png", "d/b/c.png", "d/out/labels/a.png", "d/out/overlay/b/c.png")
    (tmp_path / "link").symlink_to("d/out")
    assert names_of(tmp_path / "d", out=tmp_path / "link") == ["a", "b/c"]
    touch(tmp_path, "d/labels/a.png", "d/polygons/x.png", "d/confidence/b/c.png", "d/mine/x.png")
    assert names_of(tmp_path / "d", out=tmp_path / "d") == ["a", "b/c", "mine/x", "out/labels/a", "out/overlay/b/c"]
    assert names_of(tmp_path / "d" / "*" / "*", out=tmp_path / "d") == ["b/c", "mine/x"]
    for path in (tmp_path / "d" / "labels", tmp_path / "d" / "confidence" / "b" / "c.png"):
        with pytest.raises(ConfigError, match="is in the folder of the results"):
            find_images([path], tmp_path / "d")


def test_names_from_several_folders_say_which_is_which(tmp_path: Path) -> None:
    touch(tmp_path, "a/night/p0.png", "a/night/p1.png", "b/night/p0.png", "b/night/x/p2.png", "c/p0.png", "c/p0.jpg")
    folders = [tmp_path / "a/night", tmp_path / "b/night", tmp_path / "c"]
    expected = ["a/night/p0", "a/night/p1", "b/night/p0", "b/night/x/p2", "c/p0.jpg", "c/p0.png"]
    assert names_of(*folders) == expected
    assert names_of(folders[2] / "p0.jpg", folders[1] / "p0.png") == ["c/p0", "b/night/p0"]
    assert names_of(folders[0], folders[1] / "x") == ["p0", "p1", "p2"]
    assert names_of(folders[2], folders[2] / "p0.png", folders[2] / "p0.jpg") == ["p0.jpg", "p0.png"]


def test_names_equal_on_the_screen_are_told_apart(tmp_path: Path) -> None:
    both = [unicodedata.normalize(form, "é") for form in ("NFD", "NFC")]
    touch(tmp_path, *(f"{name}.png" for name in both), "e.png")
    found = find_images([tmp_path])[0]
    assert [file.path.name for file in found] == ["e.png", f"{both[0]}.png", f"{both[1]}.png"]
    assert [file.name for file in found] == ["e", f"{both[0]}.png", f"{both[1]}.png-2"]
    with_other = unicodedata.normalize("NFD", "ñ")
    touch(tmp_path / "n", unicodedata.normalize("NFC", "ñ") + ".png")
    for given in (f"{with_other}.png", f"{with_other}*"):
        assert [file.path.name for file in find_images([tmp_path / "n" / given])[0]] == [
            unicodedata.normalize("NFC", "ñ.png")
        ]


def test_no_matching_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no image"):
        find_images([tmp_path])
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_images([tmp_path / "missing.png"])
