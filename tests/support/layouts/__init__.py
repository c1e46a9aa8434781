"""Drawn folders of 73 layouts, each with the truth that the drawing knows.

`canvas` draws and notes the truth, `judge` compares; the layouts are in `naming` and `contents`.
"""

from __future__ import annotations

from tests.support.layouts.canvas import DrawnLayout
from tests.support.layouts.contents import LAYOUTS as CONTENTS
from tests.support.layouts.naming import LAYOUTS as NAMING

LAYOUTS: dict[str, DrawnLayout] = {layout.name: layout for layout in (*NAMING, *CONTENTS)}
