"""Sentences and numbers of the pages that were once wrong, each compared with the code or the file that decides it."""

from __future__ import annotations

import re

import pytest

from segapp.chunks import plan_chunks
from segapp.config import load_config
from segapp.docs.pages import FOLDER, find_page
from tests.support import ROOT
from tests.support.page_blocks import blocks, page_files


def test_table_of_batch_splits_is_what_the_code_plans() -> None:
    text = find_page("several-gpus")[0].text()
    rows = re.findall(r"^\| `gpu0_bsz: (\w+)` \| ([\d+ ]+) \|", text, re.M)
    assert [value for value, _ in rows] == ["null", "1", "0"]
    for value, split in rows:
        planned = plan_chunks(8, 4, None if value == "null" else int(value))
        assert tuple(map(int, split.split(" + "))) == planned


@pytest.mark.parametrize("topic", ["README", "several-gpus"])
def test_example_of_gpu0_bsz_changes_the_split_and_names_a_mode(topic: str) -> None:
    commands = [
        command for block in blocks() if block.page.stem == topic and block.language == "sh"
        for command in block.commands() if command.startswith("segapp train") and "gpu0_bsz=" in command
    ]  # fmt: skip
    assert commands
    for command in commands:
        name, size = re.findall(r"--config (\S+)|gpu0_bsz=(\d+)", command)[0][0], int(command.split("gpu0_bsz=")[1][0])
        devices = re.findall(r"devices=\[([^]]*)\]", command)
        num_devices = len(devices[0].split(",")) if devices else 4
        batch = load_config(ROOT / "configs" / name).train.batch_size
        assert isinstance(batch, int)
        assert plan_chunks(batch, num_devices, size) != plan_chunks(batch, num_devices), command
        assert "parallel.mode=" in command


def test_no_page_config_or_example_installs_segapp_from_an_index() -> None:
    files = [*page_files(), *(ROOT / "configs").glob("*.yaml"), *(FOLDER / "examples").rglob("*.*")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files if path.suffix != ".pyc"}
    wrong = r"pip install [^\n`|&]*?(?<![\w./-])'?segapp(?:\[|\s|'|$)"
    assert re.search(wrong, "uv pip install --python ~/segapp segapp\n")
    assert [name for name, text in texts.items() if re.search(wrong, text, re.M)] == []


def test_scripts_of_the_repository_are_run_with_uv() -> None:
    commands = [command for block in blocks() if block.language == "sh" for command in block.commands()]
    assert [command for command in commands if re.match(r"python3? segapp/", command)] == []


def test_published_results_are_in_the_heads_of_the_configs() -> None:
    text = find_page("choose-model")[0].text()
    rows = re.findall(r"^\|[^|]+\|[^|]+\| (`[^|]+`) \| ([^|]*\d[^|]*) \|$", text, re.M)
    assert len(rows) == 5
    for names, results in rows:
        configs = re.findall(r"`([\w.-]+\.yaml)`", names)
        figures = re.findall(r"[\d.]+ %", results)
        for name, figure in zip(configs[-len(figures) :], figures, strict=True):
            head = (ROOT / "configs" / name).read_text().partition("\nname:")[0]
            assert f"Published: {figure} mIoU" in head, name


def test_pages_that_show_gpus_say_what_was_not_measured() -> None:
    for topic in ("several-gpus", "speed", "recompute", "small-loss", "choose-model", "install", "platforms"):
        text = " ".join(find_page(topic)[0].text().split())
        assert re.search(r"not (?:been|run|yet|measured|reproduced)|nobody|untested|No speed", text), topic
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "segapp has not run on several GPUs, or on GPUs of other makes, yet." in readme


def test_figure_with_four_gpus_is_called_simulated() -> None:
    figures = re.findall(r"!\[([^]]*)\]\(\.\./pictures/tui\.svg\)\n\n(.*)", find_page("screen")[0].text())
    assert [("simulated" in words, "simulated" in below) for words, below in figures] == [(True, True)]


def test_each_sentence_on_security_names_tests_that_exist() -> None:
    text = find_page("trust")[0].path.read_text()
    promises, limits = text.split("## What does not hold")
    items = re.findall(r"^- (?:.|\n(?!- |\n|#))*", promises, re.M)
    assert len(items) > 15
    for item in items:
        named = re.findall(r"<!-- test: (\S+)::(\w+) -->", item)
        assert named, item
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(), (file, name)
    assert "<!-- test" not in limits
