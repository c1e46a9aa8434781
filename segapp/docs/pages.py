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
"""The list of the pages: a heading per group, and per page a link, a sentence, and a comment with its keywords."""

_ENTRY = re.compile(r"^- \[(?P<topic>[^\]]+)\]\((?P<path>[^)]+)\): (?P<about>.+)$")
_KEYWORDS = re.compile(r"^  <!-- keywords: (?P<keywords>.+) -->$")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_MAX_NEAREST = 3
_MAX_HITS = 12


class Page(NamedTuple):
    """One page, as the index lists it."""

    topic: str
    """The topic: the name of its file without `.md`."""
    group: str
    """Heading of its group in the index."""
    path: Path
    about: str
    """The question that it answers, in one sentence."""
    keywords: tuple[str, ...] = ()
    """Other words for its contents, such as terms of other trainers; used only by the search."""

    def text(self) -> str:
        """Return the Markdown text without comments, which are for the tests."""
        return _COMMENT.sub("", self.path.read_text(encoding="utf-8"))


class Hit(NamedTuple):
    """A line found by a search."""

    page: Page
    line: str
    anchor: str = ""
    """The heading above the line; empty before the second heading of a page."""

    @property
    def topic(self) -> str:
        """The topic for `segapp docs`, with the anchor if the line is not in the first section."""
        return f"{self.page.topic}#{self.anchor}" if self.anchor else self.page.topic


@functools.cache
def pages() -> tuple[Page, ...]:
    found, group = [], ""
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            group = line[3:].strip()
        elif entry := _ENTRY.match(line):
            found.append(Page(entry["topic"], group, FOLDER / entry["path"], entry["about"]))
        elif keywords := _KEYWORDS.match(line):
            words = tuple(word.strip() for word in keywords["keywords"].split(","))
            found[-1] = found[-1]._replace(keywords=words)
    return tuple(found)


def find_page(topic: str) -> tuple[Page, str]:
    """Return the page of a topic such as `screen` or `screen#the-chart`, and the anchor in it.

    Raises:
        ConfigError: there is no such page; the message suggests similar ones.
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
    """Yield (anchor, title) of each heading; code hosts and Textual make the same anchors."""
    return ((slug(title), title) for level, title, _ in _lines(text) if level)


def section(text: str, anchor: str) -> str:
    """Return the heading of an anchor and the text below it, up to the next heading of the same or a higher level."""
    own, found = 0, []
    for level, title, line in _lines(text):
        if own and 0 < level <= own:
            break
        if level and not own and slug(title) == anchor:
            own = level
        if own:
            found.append(line)
    return "\n".join(found).rstrip() + "\n"


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the level of a heading (0 for other lines), its title and the line, for each line of a text."""
    is_code = False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        match = None if is_code else re.match(r"(#{1,6}) (.+)", line)
        yield (len(match[1]), match[2].strip(), line) if match else (0, "", line)


def slug(title: str) -> str:
    """Return the anchor of a heading.

    >>> slug("When `shares` help, and when not")
    'when-shares-help-and-when-not'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def search_pages(words: str) -> list[Hit]:
    """Return the pages that have some of the words, the best first, each with its best line.

    Words match as a whole. A word counts more if it is in a heading of a page, and most in its topic, title or
    keywords. A page with more of the words ranks higher, and pages about the code count half.

    >>> [hit.page.topic for hit in search_pages("OUT OF memory")][:1]
    ['out-of-memory']
    """
    wanted = _wanted(words)
    ranked: list[tuple[float, Page]] = []
    for page, weights in _index().items():
        if found := wanted & weights.keys():
            rank = len(found) / len(wanted) * sum(weights[word] for word in found)
            ranked.append((-rank / 2 if page.group == "Developing" else -rank, page))
    return [_best_line(page, wanted) for _, page in sorted(ranked, key=lambda each: each[0])][:_MAX_HITS]


def _best_line(page: Page, wanted: set[str]) -> Hit:
    """Return the line of a page with the most of the words; a heading counts twice."""
    best, most, anchor = Hit(page, page.about), 0, ""
    for number, (level, title, line) in enumerate([(0, "", page.about), *_lines(page.text())]):
        anchor = slug(title) if level and number > 1 else anchor
        count = len(wanted.intersection(_words(line))) * (2 if level else 1)
        if count > most:
            best, most = Hit(page, line.strip("# "), anchor), count
    return best


def has_all_words(hit: Hit, words: str) -> bool:
    """Return True if the page of a hit has all words of a search, apart from words such as `how` and `the`."""
    return _wanted(words) <= _index()[hit.page].keys()


def _wanted(words: str) -> set[str]:
    """Return the words to search for, without small words unless there are no others."""
    found = set(_words(words))
    return found - _SMALL_WORDS or found


@functools.cache
def _index() -> dict[Page, dict[str, int]]:
    """Return the weight of each word of each page, determined by the most important place that has the word."""
    index = {}
    for page in pages():
        text = page.text()
        titles = [title for _, title in headings(text)]
        weights = dict.fromkeys(_words(text), 1)
        weights |= dict.fromkeys(_words(" ".join([page.about, *titles])), 3)
        weights |= dict.fromkeys(_words(" ".join([page.topic, *titles[:1], *page.keywords])), 6)
        index[page] = weights
    return index


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without the ending of a plural and a last e.

    >>> _words("Two losses: train.early_stop"), _words("loss")
    (['two', 'loss', 'train', 'early', 'stop'], ['loss'])
    """
    return [re.sub("(?<!s)s$", "", word).removesuffix("e") for word in re.findall(r"[^\W_]+", text.lower())]


_SMALL_WORDS = set(_words("a an and are at be by can do does for from have how i if in is it me my of on or the to use "
                          "what when which why with"))  # fmt: skip
