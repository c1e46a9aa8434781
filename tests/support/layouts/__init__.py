"""Drawn folders of about two hundred layouts, each with the truth that the drawing knows.

`canvas` draws and notes the truth, `layout` says what `segapp init` is to do, `judge` compares; the layouts are in
`usual`, `review_known`, `review_new` and `public`. `python -m tests.support.layouts` prints the table of all.
"""

from __future__ import annotations

from tests.support.layouts.layout import DrawnLayout
from tests.support.layouts.public import PUBLIC
from tests.support.layouts.review_known import KNOWN
from tests.support.layouts.review_new import NEW
from tests.support.layouts.usual import USUAL

ROOMS: dict[str, list[DrawnLayout]] = {
    "usual": USUAL,
    "known to a practitioner": KNOWN,
    "as on people's disks": NEW,
    "public": PUBLIC,
}
"""Layouts by where they are from."""
LAYOUTS: dict[str, DrawnLayout] = {layout.name: layout for layouts in ROOMS.values() for layout in layouts}


def names(text: str) -> list[str]:
    """Returns names that semicolons separate."""
    return [" ".join(name.split()) for name in text.split(";")]


UNMENDED = names(
    """
    BraTS slices; cell tracking
    """
)
"""Layouts that are still read wrongly."""
