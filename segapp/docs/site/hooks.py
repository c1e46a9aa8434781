"""Hooks of mkdocs: navigation, anchors and search words of the site are made from the pages and their index."""

from __future__ import annotations

import re
from typing import Any

from segapp.docs.pages import FOLDER, Page, headings, pages, slug


def on_config(config: Any) -> Any:
    """Build the navigation from the index, and make the same anchors as code hosts and `segapp docs`."""
    groups: dict[str, list[dict[str, str]]] = {}
    for page in pages():
        groups.setdefault(page.group, []).append({_title(page): str(page.path.relative_to(FOLDER))})
    config.nav = [{"Overview": "README.md"}, *({group: members} for group, members in groups.items())]
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda title, separator: slug(title)
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    r"""Add the keywords of a page at its end for the search, and write `\|` in the code of tables as mkdocs does."""
    markdown = re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]+`", _plain_pipes, row[0]), markdown, flags=re.MULTILINE)
    found = next((each for each in pages() if str(each.path.relative_to(FOLDER)) == page.file.src_uri), None)
    if found is None or not found.keywords:
        return markdown
    return f"{markdown}\n\n---\n\n<small>Also: {', '.join(found.keywords)}</small>\n"


def _plain_pipes(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def _title(page: Page) -> str:
    return next(title for _, title in headings(page.text()))
