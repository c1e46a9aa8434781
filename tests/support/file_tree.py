"""The file tree of ARCHITECTURE.md: every module with the first sentence of its docstring.

python -m tests.support.file_tree           prints it
python -m tests.support.file_tree --write   puts it into segapp/docs/ARCHITECTURE.md
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.support import ROOT

MAP = ROOT / "segapp" / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- file tree: python -m tests.support.file_tree --write -->", "<!-- end of the file tree -->"


def tree() -> str:
    """Return the tree as a Markdown block."""
    lines: list[str] = []
    folders = sorted({path.parent for path in (ROOT / "segapp").rglob("*.py")})
    for folder in folders:
        modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if modules:
            lines.append(f"{folder.relative_to(ROOT)}/")
            lines += [f"  {path.name:24} {_first_sentence(path)}".rstrip() for path in modules]
    return "\n".join(["```", *lines, "```"])


def _first_sentence(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = doc.split("\n\n")[0].replace("\n", " ")
    return first.removesuffix(".")


def split_map() -> tuple[str, str, str]:
    """Return ARCHITECTURE.md before, in and after its tree."""
    before, _, rest = MAP.read_text().partition(BEGIN + "\n")
    inside, _, after = rest.partition(END)
    return before, inside.rstrip("\n"), after


def main() -> None:
    """Print the tree, or write it into the map."""
    if "--write" in sys.argv[1:]:
        before, _, after = split_map()
        MAP.write_text(f"{before}{BEGIN}\n{tree()}\n{END}{after}")
    else:
        print(tree())


if __name__ == "__main__":
    main()
