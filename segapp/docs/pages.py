"""The pages of the documentation: their list, the page of a topic, and a search over all of them."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
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
_PHRASE = 12.0
"""Added to the rank of a page if one of its keywords has the words of a search in their order."""
_MIN_STEM = 3


class Page(NamedTuple):
    """One page, as the index lists it."""

    topic: str
    """The word that names it: the name of its file without `.md`."""
    group: str
    """Heading of the index under which it is listed."""
    path: Path
    about: str
    """The question that it answers, in one sentence."""
    keywords: tuple[str, ...] = ()
    """Other words for its contents, such as terms of other trainers; only the search uses them."""

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
        elif keywords := _KEYWORDS.match(line):
            words = tuple(word.strip() for word in keywords["keywords"].split(","))
            found[-1] = found[-1]._replace(keywords=words)
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
    """Return the pages with the most of the words, the best first, each with its best line.

    Words match as a whole, whatever their ending (`stop` and `stopping`). A word counts more if few pages have it, and
    if it is in the topic, the title, the keywords or a heading of a page.

    >>> [hit.page.topic for hit in search_pages("OUT OF memory")][:1]
    ['out-of-memory']
    """
    asked = _stems(words)
    wanted = set(asked) - _SMALL_WORDS or set(asked)
    index = _index()
    rarity = {stem: math.log(1 + len(index) / (1 + sum(stem in found for found in index.values()))) for stem in wanted}
    most = max((len(wanted & found.keys()) for found in index.values()), default=0)
    ranked: list[tuple[float, Hit]] = []
    for page, found in index.items() if most else ():
        if len(wanted & found.keys()) == most:
            is_phrase = any(f" {' '.join(asked)} " in f" {' '.join(_stems(each))} " for each in page.keywords)
            rank = sum(rarity[stem] * found.get(stem, 0) for stem in wanted) + _PHRASE * is_phrase
            best = max([page.about, *page.text().splitlines()], key=lambda line: len(wanted & set(_stems(line))))
            ranked.append((-rank, Hit(page, best.strip("# "))))
    return [hit for _, hit in sorted(ranked, key=lambda each: each[0])][:_MAX_HITS]


def has_all_words(hit: Hit, words: str) -> bool:
    """Return whether the page of a hit has all words of a search, apart from words such as `how` and `the`."""
    return set(_stems(words)) - _SMALL_WORDS <= _index()[hit.page].keys()


@functools.cache
def _index() -> dict[Page, dict[str, float]]:
    """Return the weight of each word of each page, by the best place that has the word."""
    index = {}
    for page in pages():
        text = page.text()
        found = {stem: 1 + min(count, 10) / 10 for stem, count in Counter(_stems(text)).items()}
        titles = [title for _, title in headings(text)]
        places = [(3.0, page.about), (3.0, " ".join(titles)), (6.0, f"{page.topic} {' '.join(page.keywords)}")]
        for weight, place in [*places, (6.0, titles[0] if titles else "")]:
            found.update(dict.fromkeys(_stems(place), weight))
        index[page] = found
    return index


def _stems(text: str) -> list[str]:
    """Return the words of a text without their endings.

    >>> _stems("Early stopping: train.early_stop")
    ['early', 'stop', 'train', 'early', 'stop']
    """
    return [_stem(word) for word in re.findall(r"[^\W_]+", text.lower())]


def _stem(word: str) -> str:
    for ending in () if word.endswith("ss") else ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= _MIN_STEM:
            word = word.removesuffix(ending)
            break
    return word[:-1] if len(word) > _MIN_STEM and word[-1] == word[-2] else word


_SMALL_WORDS = set(_stems("a an and are at be by can do does for from have how i if in is it me my of on or the to use "
                          "what when which why with"))  # fmt: skip
