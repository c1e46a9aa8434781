"""Numbers, times, sizes and names in the form that all viewers use; text from data is made safe to print.

Messages before a command's work begins: in a training's log, which the TUI reads; for others, on a terminal.
"""

import codecs
import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from segapp.places import keep_compiled_code

# C0 and C1 controls and DEL control the terminal; bidirectional controls and line separators reorder or hide text; lone
# surrogates (file names that are not UTF-8) cannot be printed at all.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Return the text with every control character, bidirectional control and lone surrogate written as an escape.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _UNSAFE.sub(lambda match: _escaped(match[0]), text)


def encodable(text: str) -> str:
    r"""Return the text with lone surrogates (bytes of a file name that are not UTF-8) written as `\\xNN`.

    >>> encodable("caf\udce9.png")
    'caf\\xe9.png'
    """
    return re.sub("[\ud800-\udfff]", lambda match: _escaped(match[0]), text)


ASCII_FOR = str.maketrans("·→←…×±°—●○━╸─▲▼◆★┊│└█", ".><~x~C-*o=-.+-VB:|+#")
"""Unicode code of a sign -> a similar sign in ASCII."""

ESCAPED = "segapp.escaped"
"""Name of the standard streams' error handler: what their encoding lacks becomes a similar sign, or an escape."""


def _in_ascii(error: Any) -> tuple[str, int]:
    text: str = error.object[error.start : error.end].translate(ASCII_FOR)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(ESCAPED, _in_ascii)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def number(value: float | None, digits: int = 3) -> str:
    """Return a loss or score with about `digits` significant digits; "-" for None and nan."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        decimals = max(0, digits - max(1, math.floor(math.log10(abs(value))) + 1)) if abs(value) >= 1 else digits
        return f"{value:.{decimals}f}"
    return _short_exponent(f"{value:.{max(0, digits - 2)}e}")


def learning_rate(value: float | None) -> str:
    """Return 0.0099 as 9.9e-3."""
    return "-" if value is None or not math.isfinite(value) else _short_exponent(f"{value:.1e}")


def duration(seconds: float | None) -> str:
    """Return seconds as 45s, 4m05s, 7h26m or 3d04h; "-" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = round(max(seconds, 0.0))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86_400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{min(seconds // 86_400, 9999)}d{seconds % 86_400 // 3600:02}h"


def clock_time(t_s: float, now_s: float, form: str = "%H:%M", far: str = "%d %b %H:%M") -> str:
    """Return a time on this machine's clock as 23:40, or with its day if it is 24 hours away: 03 Dec 23:40."""
    try:
        return time.strftime(form if abs(now_s - t_s) < 86_400 else far, time.localtime(t_s))
    except (OverflowError, ValueError, OSError):
        return "--:--"


def age(seconds: float | None) -> str:
    """Return an age as 0.4s ago, 12s ago or 3m10s ago."""
    if seconds is None:
        return "no data"
    return f"{seconds:.1f}s ago" if seconds < 9.95 else f"{duration(seconds)} ago"


def gib(mib: float | None) -> str:
    """Return MiB as GiB with one decimal; "n/a" if unknown."""
    if mib is None or not math.isfinite(mib):
        return "n/a"
    return f"{mib / 1024:.1f}" if mib < 99.95 * 1024 else f"{mib / 1024:.0f}"


def memory_text(mib: float | None) -> str:
    """Return MiB as GiB with one decimal, less than 1 GiB as `312M`; "n/a" if unknown."""
    return f"{mib:.0f}M" if mib is not None and 0 < mib < 1023.5 else gib(mib)


def percent(frac: float | None) -> str:
    """Return 0.96 as 96%; "n/a" for None."""
    return "n/a" if frac is None or not math.isfinite(frac) else f"{100 * frac:.0f}%"


def dots(split: Sequence[int] | None) -> str:
    """Return a split as 4·10·9·9."""
    return "·".join(map(str, split)) if split else "-"


def share_text(value: int | None) -> str:
    """Return the samples of device 0 as text: "even" for None."""
    return "even" if value is None else str(value)


def plural(count: int, word: str) -> str:
    """Return `1 class`, `2 classes`."""
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count} {word}{ending}"


def size(num_bytes: float) -> str:
    """Return a number of bytes as 1.5 MiB, 117 MiB or 2.3 GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 100 * 2**20 else f"{num_bytes / 2**20:.0f} MiB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _short_exponent(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


_MARK = "starting: "


_thread_local = threading.local()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Let `say` print nothing in the body, in this thread."""
    was_silent = getattr(_thread_local, "is_silent", False)
    _thread_local.is_silent = True
    try:
        yield
    finally:
        _thread_local.is_silent = was_silent


def say(text: str) -> None:
    if not getattr(_thread_local, "is_silent", False):
        print(text, flush=True)


def announce(what: str) -> None:
    """Print what the trainer does now, after `starting:`."""
    say(f"{_MARK}{what}")


def announce_on_terminal(what: str) -> None:
    """Print a command's present action on stderr if it is a terminal; scripts, pipes and --json get only results."""
    if sys.stderr.isatty():
        print(f"{_MARK}{what}", file=sys.stderr, flush=True)


class _TorchNotice:
    """A module finder that finds nothing; before the import of torch, it prints a line and places torch's caches.

    It is never removed, because removing a finder during a search would skip the next one.
    """

    has_printed = False

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch" and not self.has_printed:
            self.has_printed = True
            keep_compiled_code()  # torchvision imports torch._dynamo, which makes the folder
            announce_on_terminal("importing torch")


def announce_torch() -> None:
    """Print a line on a terminal when a command imports torch, which takes seconds."""
    sys.meta_path.insert(0, _TorchNotice())


def last_announced(lines: list[str]) -> str | None:
    """Return the last announcement in the lines of a log; None if there is none."""
    return next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), None)


class _LastingStream:
    """A stream that continues without its reader: after a broken pipe, it writes to /dev/null."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._outlasting(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._outlasting(self._stream.flush)

    def _outlasting(self, call: Any, *arguments: str) -> None:
        try:
            call(*arguments)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def outlast_readers() -> None:
    """Keep this process from ending when the reader of its output ends, as in `segapp train | head`."""
    streams: Any = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
    sys.stdout, sys.stderr = streams
