"""`segapp docs`: list the pages, show one, or search them. No torch; a terminal shows the page in a pager."""

import shutil
import sys
import textwrap
from itertools import groupby

from segapp.commands.spawn import is_interactive
from segapp.docs.pages import find_page, has_all_words, pages, search_pages, section
from segapp.errors import ConfigError


def show_docs(topic: str | None, words: str | None) -> None:
    """Print the list of pages or what a search finds; show a page in a terminal, or print it."""
    if words is not None:
        _print_hits(f"{words} {topic or ''}".strip())
    elif topic is None:
        _print_list()
    else:
        page, anchor = find_page(topic)
        text = section(page.text(), anchor) if anchor else page.text()
        if sys.stdout.isatty() and is_interactive():
            from rich.console import Console
            from rich.markdown import Markdown

            console = Console()
            with console.pager():
                console.print(Markdown(text))
        else:
            print(text, end="")


def _print_list() -> None:
    width = max(len(page.topic) for page in pages())
    for group, members in groupby(pages(), key=lambda page: page.group):
        print(group)
        for page in members:
            print(_wrapped(f"  {page.topic:{width}}  ", page.about))
    print("\nsegapp docs TOPIC shows a page; segapp docs --search WORDS finds the pages with these words")


def _print_hits(words: str) -> None:
    hits = search_pages(words)
    if not hits:
        raise ConfigError(f"no page has any of the words {words!r}: try other words, or segapp docs for the list")
    if not any(has_all_words(hit, words) for hit in hits):
        print(f"no page has all of the words {words!r}; these pages have most of them:")
    width = max(len(hit.topic) for hit in hits)
    for hit in hits:
        print(_wrapped(f"{hit.topic:{width}}  ", hit.line))


def _wrapped(start: str, text: str) -> str:
    columns = min(shutil.get_terminal_size((120, 24)).columns, 120)
    indent = " " * len(start)
    return textwrap.fill(text, columns, initial_indent=start, subsequent_indent=indent, break_long_words=False)
