"""Lists of sha256 sums of a data set, in the format of `sha256sum -c`.

About two thirds of damaged JPEG files decode without an error; only a checksum finds them.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from segapp.datasets.doctor import Finding
from segapp.datasets.files import ImagePair, open_regular, shown
from segapp.errors import DataError
from segapp.run.files import hash_file

_LINE = re.compile(r"(\\?)([0-9a-f]{64}) [ *](.+)")


def write_sums(splits: Mapping[str, Sequence[ImagePair]], root: Path) -> str:
    """Return a list with the sum and the name, relative to the root, of every file."""
    names = sorted({_name(path, root) for pairs in splits.values() for path in _files(pairs)}, key=os.fsencode)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: hash_file(root / name)[0], names)
        return "".join(_line(digest, name) for digest, name in zip(digests, names, strict=True))


def check_sums(list_file: Path, splits: Mapping[str, Sequence[ImagePair]], root: Path) -> list[Finding]:
    """Return a finding for each file whose sum differs from the list or that is not listed.

    Raises:
        DataError: the list cannot be read.
    """
    listed = _read(list_file)
    findings = []
    with ThreadPoolExecutor() as pool:
        for split, pairs in splits.items():
            owners = {path: pair for pair in pairs for path in _files([pair])}
            for path, digest in zip(owners, pool.map(_digest, owners), strict=True):
                expected = listed.get(_name(path, root))
                if digest is not None and digest != expected:
                    what = "is not in the list of sums" if expected is None else "has changed since the sums were taken"
                    message = f"{shown(path)} {what} {shown(list_file)}: restore it, or write the list again"
                    findings.append(Finding("error", "sums", split, message, owners[path]))
    return findings


def _digest(path: Path) -> str | None:
    """Return the sum; None for a file that cannot be read, which is another finding."""
    try:
        return hash_file(path)[0]
    except OSError:
        return None


def _files(pairs: Iterable[ImagePair]) -> list[Path]:
    return [path for pair in pairs for path in pair.files]


def _name(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)


def _line(digest: str, name: str) -> str:
    """Return a line as coreutils writes it: a backslash marks a name in which special characters are escaped."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def _read(list_file: Path) -> dict[str, str]:
    try:
        with open_regular(list_file) as file:
            text = os.fsdecode(file.read())
    except OSError as error:
        raise DataError(
            f"{shown(list_file)} cannot be read ({error.strerror}): write it with --write-sums", path=list_file
        ) from error
    sums = {}
    for number, line in enumerate(text.split("\n"), 1):
        match = _LINE.fullmatch(line)
        if match is None and line:
            raise DataError(
                f"{shown(list_file)}:{number} is not a sum and a name: write it with --write-sums", path=list_file
            )
        if match is not None:
            name = re.sub(r"\\(.)", _unescaped, match[3]) if match[1] else match[3]
            sums[name] = match[2]
    return sums


def _unescaped(match: re.Match[str]) -> str:
    return {"n": "\n", "r": "\r"}.get(match[1], match[1])
