"""`segapp docs`: the list, a page in a pipe, the search, and the error of an unknown topic."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from segapp.commands.docs import show_docs
from segapp.docs.pages import find_page, pages, search_pages, section
from segapp.errors import ConfigError


def test_list_names_every_page(capsys: pytest.CaptureFixture[str]) -> None:
    show_docs(None, None)
    shown = capsys.readouterr().out
    assert [page.topic for page in pages() if f"  {page.topic} " not in shown] == []
    assert "Troubleshooting" in shown


def test_page_in_a_pipe_is_plain_text_and_may_be_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    show_docs("several-gpus", None)
    shown = capsys.readouterr().out
    assert shown.startswith("# Multi-GPU training")
    assert "<!--" not in shown
    show_docs("tune#early-stopping", None)
    shown = capsys.readouterr().out
    assert shown.startswith("## Early stopping\n")
    assert "train: {early_stop: 10}" in shown
    assert "Overfitting" not in shown


def test_terminal_shows_a_page_in_its_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("segapp.commands.docs.is_interactive", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("pydoc.pager", shown.append)
    show_docs("several-gpus", None)
    (text,) = shown
    assert "Multi-GPU training" in text
    assert "# Multi-GPU" not in text


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("memmory", "out-of-memory"), ("out-of-memry", "out-of-memory"), ("mmseg", "coming-from"), ("nccl", "ranks"),
     ("slurm", "schedulers"), ("deterministic", "exact"), ("nnunet", "coming-from"), ("mmsegmentation", "coming-from"),
     ("checkpoint-refused", "resume-refused"), ("multilabel", "masks"), ("Plan Accuracy", "memory-prediction")],
)  # fmt: skip
def test_unknown_topic_names_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no page '{asked}': .*{nearest}"):
        find_page(asked)


def test_topics_are_found_in_other_spellings_and_with_headings() -> None:
    assert find_page("Out of memory")[0].topic == "out-of-memory"
    assert find_page("tasks/train.md")[0].topic == "train"
    assert find_page("screen#the-chart")[1] == "the-chart"
    with pytest.raises(ConfigError, match="has no heading 'the-charts': it has"):
        find_page("screen#the-charts")


@pytest.mark.parametrize(
    ("words", "code", "topic"),
    [
        (["train", "--config", "demo.yaml", "optim.lr=-1"], 2, "config-errors"),
        (["check", "--config", "folder.yaml", "data.root=nowhere"], 3, "data-refused"),
    ],
)
def test_errors_end_with_the_page_that_says_more(words: list[str], code: int, topic: str, command: Any) -> None:
    found, _, said = command(*words)
    assert (found, said[:7], said.splitlines()[-1]) == (code, "error: ", f"more: segapp docs {topic}")


def test_a_topic_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("x").see("own-parts")))
    assert (str(error), error.topic, ConfigError("y").topic) == ("x", "own-parts", None)


def test_section_has_its_subsections_and_comments_in_its_code() -> None:
    text = "# One\n\n## Two\n\n```sh\n# no heading\n```\n\n### Three\n\n## Four\n"
    assert section(text, "two") == "## Two\n\n```sh\n# no heading\n```\n\n### Three\n"
    assert section(text, "three") == "### Three\n"


def test_search_takes_plurals_and_says_what_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_pages("resumes")[0].page == search_pages("resume")[0].page
    assert search_pages("how do I")  # only small words
    assert search_pages("OHEM")
    show_docs(None, "early stopping")
    assert capsys.readouterr().out.startswith("tune#early-stopping ")
    show_docs(None, "tensorrt zebra")
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "no page has all of the words 'tensorrt zebra'; these pages have most of them:"
    assert second.startswith("export")
    with pytest.raises(ConfigError, match="no page has any of the words 'zebra giraffe'"):
        show_docs(None, "zebra giraffe")
