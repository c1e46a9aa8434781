"""The pages of the documentation: their list, the page of a topic, and a search over all of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from segapp.errors import ConfigError, closest_words

FOLDER = Path(__file__).parent
INDEX = FOLDER / "README.md"
"""The list of the pages: a heading for each group, and a link with a sentence for each page."""

_ENTRY = re.compile(r"^- \[(?P<topic>[^\]]+)\]\((?P<path>[^)]+)\): (?P<about>.+)$")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_MAX_NEAREST = 3
_MAX_HITS = 12


class Page(NamedTuple):
    """One page, as the index lists it."""

    topic: str
    """The word that names it: the name of its file without `.md`."""
    group: str
    """Heading of the index under which it is listed."""
    path: Path
    about: str
    """The question that it answers, in one sentence."""

    def text(self) -> str:
        """Return the Markdown text without comments, which are for the tests."""
        return _COMMENT.sub("", self.path.read_text(encoding="utf-8"))


class Hit(NamedTuple):
    """A line that a search has found."""

    page: Page
    line: str


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return all pages in the order of the index."""
    found, group = [], ""
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            group = line[3:].strip()
        elif entry := _ENTRY.match(line):
            found.append(Page(entry["topic"], group, FOLDER / entry["path"], entry["about"]))
    return tuple(found)


def find_page(topic: str) -> tuple[Page, str]:
    """Return the page of a topic such as `screen` or `screen#the-chart`, and the anchor in it.

    Raises:
        ConfigError: there is no such page; the message names the nearest ones.
    """
    name, _, anchor = topic.partition("#")
    known = {page.topic: page for page in pages()}
    name = Path(name.strip().lower().replace(" ", "-")).name.removesuffix(".md")
    if name not in known:
        nearest = closest_words(name, known, most=_MAX_NEAREST)
        nearest += [hit.page.topic for hit in search_pages(topic) if hit.page.topic not in nearest]
        found = list(dict.fromkeys(nearest))[:_MAX_NEAREST]
        hint = f"did you mean {' or '.join(found)}? " if found else ""
        raise ConfigError(f"there is no page {topic!r}: {hint}segapp docs lists all")
    page = known[name]
    anchors = [slug for slug, _ in headings(page.text())]
    if anchor and anchor not in anchors:
        raise ConfigError(f"page {name} has no heading {anchor!r}: it has {', '.join(anchors)}")
    return page, anchor


def headings(text: str) -> Iterator[tuple[str, str]]:
    """Yield (anchor, title) of each heading, the anchor as code hosts and Textual make it."""
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and (match := re.match(r"#{1,6} (.+)", line)):
            yield slug(match[1].strip()), match[1].strip()


def slug(title: str) -> str:
    """Return the anchor of a heading.

    >>> slug("When `gpu0_bsz` helps, and when not")
    'when-gpu0_bsz-helps-and-when-not'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def search_pages(words: str) -> list[Hit]:
    """Return the best line of each page that has all words, at the beginning of a word; the best pages first.

    >>> [hit.page.topic for hit in search_pages("OUT OF memory")][:1]
    ['out-of-memory']
    """
    wanted = [re.compile(rf"(?<![a-z0-9]){re.escape(word)}") for word in _plain(words).split()]

    def num_words(text: str) -> int:
        return sum(bool(word.search(_plain(text))) for word in wanted)

    found: list[tuple[int, Hit]] = []
    for page in pages() if wanted else ():
        title, text = f"{page.topic} {page.about}", page.text()
        if num_words(f"{title} {text}") == len(wanted):
            best = max([*text.splitlines(), page.about], key=num_words)
            rank = 4 * num_words(page.topic) + 2 * num_words(title) + num_words(best)
            found.append((-rank, Hit(page, best.strip("# "))))
    return [hit for _, hit in sorted(found, key=lambda each: each[0])][:_MAX_HITS]


def _plain(text: str) -> str:
    return text.lower().replace("-", " ")
