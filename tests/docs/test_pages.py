"""The pages of the documentation: listed, linked, short, and true about commands, options, keys, topics and files."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from segapp import errors
from segapp.cli import app
from segapp.config import validate_config
from segapp.config.words import known_keys
from segapp.docs.pages import FOLDER, find_page, headings, pages, section
from tests.support import ROOT
from tests.support.page_blocks import Block, blocks, page_files
from tests.support.reference import differing

ROOT_COMMAND = typer.main.get_command(app)
MINIMAL: dict[str, Any] = {"name": "page", "data": {"format": "folder", "root": "data/mine", "classes": ["a", "b"]}}


def test_every_page_is_listed_once_and_exists() -> None:
    listed = [page.path for page in pages()]
    assert sorted(listed) == sorted(path for path in FOLDER.rglob("*.md") if path != FOLDER / "README.md")
    topics = [page.topic for page in pages()]
    assert topics == [page.path.stem.lower() for page in pages()]
    assert len(set(topics)) == len(topics) > 50


def test_readme_has_at_most_150_lines_and_pictures_are_small() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(pictures) == 2
    assert all((ROOT / (markdown or html)).stat().st_size < 200 * 1024 for markdown, html in pictures)


def test_generated_files_are_what_the_code_says() -> None:
    assert list(differing()) == [], "run: python -m tests.support.reference --write"


INTERNAL = {
    "SEGAPP_TRACKERS", "SEGAPP_LOST_SINCE_S", "SEGAPP_PARENT_PID", "SEGAPP_RANK_DEVICES", "SEGAPP_RANK_STORE",
    "NCCL_RAS_ENABLE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_CPP_LOG_LEVEL",
    "NO_ALBUMENTATIONS_UPDATE", "PYTHONUNBUFFERED", "PYTHONWARNINGS",
}  # fmt: skip
"""Variables that segapp only sets, for its own processes and for libraries."""


def test_every_variable_of_the_code_is_explained() -> None:
    """Modules that use the environment name variables as constants like `A_B`, or as those of the page."""
    explained = set(re.findall(r"^\| `([A-Z_]+)` \| .{9,} \|$", find_page("environment")[0].text(), re.M))
    in_code: set[str] = set()
    for path in (ROOT / "segapp").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "environ" in text or "SpawnOptions" in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value in explained | INTERNAL or re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", node.value):
                    in_code.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg in INTERNAL:
                in_code.add(node.arg)
    assert in_code - explained == INTERNAL
    assert explained - in_code == {"WANDB_BASE_URL"}


@pytest.mark.parametrize("path", page_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    own = {anchor for anchor, _ in headings(path.read_text())}
    assert "]()" not in re.sub(r"`[^`]*`", "", text), path
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path}: {target}"
        assert linked.is_relative_to(ROOT), f"{path}: {target}"
        anchors = {each for each, _ in headings(linked.read_text())} if file and anchor else own
        assert not anchor or anchor in anchors, f"{path}: {target}"


def test_pages_begin_with_a_title_and_their_answer() -> None:
    titles = []
    for page in pages():
        lines = [line for line in page.text().splitlines() if line]
        assert re.fullmatch(r"# \S.{2,79}", lines[0]), page.topic
        assert re.match(r"```|[A-Za-z`\[*]", lines[1]), f"{page.topic} begins with a list, a table or a heading"
        titles.append(lines[0])
    assert len(set(titles)) == len(titles)


def parsed_problem(command: str) -> str | None:
    """Return why the parser refuses a command; None if it takes it. Nothing is executed."""
    launch, _, training = command.partition(" -- train ")
    if training:
        return parsed_problem(launch) or parsed_problem(f"segapp train {training}")
    words = shlex.split(command.replace("...", " "), comments=True)[1:]
    here: Any = ROOT_COMMAND
    if words in (["--help"], ["--version"], ["--install-completion"]):
        return None
    while hasattr(here, "commands"):
        if not words or words[0] not in here.commands:
            return f"no command {words[:1]}"
        here = here.commands[words.pop(0)]
    options = {spelling for parameter in here.params for spelling in parameter.opts}
    options |= {"--help", "--debug", "--trust-parts"}
    unknown = [word for word in words if re.match(r"--\w", word) and word.partition("=")[0] not in options]
    return f"unknown options {unknown}" if unknown else None


def present_text(path: Path) -> str:
    """Return the text of a page without the section that names what went."""
    return re.sub(r"\n### What went\b.*?(?=\n###? )", "", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", page_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_named_commands_and_options_are_in_the_parser(path: Path) -> None:
    commands = [command for block in blocks() if block.page == path for command in block.commands()]
    commands += re.findall(r"`(segapp [^`]+)`", re.sub(r"^```.*?^```", "", present_text(path), flags=re.M | re.S))
    problems = {command: parsed_problem(command) for command in commands if command.startswith("segapp ")}
    assert {command: why for command, why in problems.items() if why} == {}


SECTIONS = "data|model|loss|optim|schedule|train|parallel|eval|checkpoint|log|distill"
NOT_KEYS = re.compile(r"\.(py|md|yaml|txt|log|json|jsonl|pt|onnx|csv)$|segapp|\.unet\b")


@pytest.mark.parametrize("path", page_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_named_config_keys_exist(path: Path) -> None:
    text = "" if path.name == "config.md" else present_text(path)
    code = re.findall(r"`([^`\n]+)`", text)
    code += [block.text for block in blocks() if block.page == path and block.language == "sh"]
    pattern = rf"(?<![\w./-])((?:{SECTIONS})(?:\.[a-z][a-z0-9_]*)+)(?![\w/(])"
    named = {key for part in code for key in re.findall(pattern, part)}
    known = {".".join(key) for key in known_keys()} | {"loss.plus.name"}
    assert {key for key in named if key not in known and not NOT_KEYS.search(key)} == set()


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "yaml"], ids=lambda block: block.place)
def test_yaml_blocks_are_accepted_by_the_config(block: Block) -> None:
    content = yaml.safe_load(block.text)
    data = {**MINIMAL["data"], **content.get("data", {})}
    if data["format"] not in ("folder", "list"):
        data.pop("classes", None)
    validate_config({**MINIMAL, **content, "data": {**data, **content.get("data", {})}})


def test_every_topic_of_an_error_is_a_page() -> None:
    named = {kind.topic for kind in vars(errors).values() if getattr(kind, "topic", None)}
    for text in (path.read_text() for path in (ROOT / "segapp").rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if ".see(" in text else ():
            is_see = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "see"
            if is_see and node.args and isinstance(node.args[0], ast.Constant):  # type: ignore[attr-defined]
                named.add(node.args[0].value)  # type: ignore[attr-defined]
    assert {"out-of-memory", "data-refused", "resume-refused", "no-gpu", "ranks", "disk-full",
            "config-errors"} <= {topic.partition("#")[0] for topic in named}  # fmt: skip
    for topic in named:
        page, anchor = find_page(topic)
        assert section(page.text(), anchor), topic


def test_every_exception_has_a_reason_and_its_test_exists() -> None:
    marked = [block for block in blocks() if block.mark]
    assert [block.place for block in marked if len(block.reason) < 8] == []
    named = {name for block in marked for name in re.findall(r"tests/[\w/]+\.py", block.reason)}
    assert [name for name in named if not (ROOT / name).exists()] == []
