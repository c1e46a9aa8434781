"""Makes names and messages safe to print: no control codes, no hidden or reordered text."""

import re

# C0 and C1 controls and DEL drive the terminal; bidirectional controls and line separators reorder or hide text;
# lone surrogates (file names that are not UTF-8) cannot be printed at all.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    r"""Return the text with every control character, bidirectional control and lone surrogate written as an escape.

    Idempotent.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _UNSAFE.sub(lambda match: _escaped(match[0]), text)


def encodable(text: str) -> str:
    r"""Return the text with lone surrogates (bytes of a file name that are not UTF-8) written as `\\xNN`.

    >>> encodable("caf\udce9.png")
    'caf\\xe9.png'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", lambda match: _escaped(match[0]), text)
    return text


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
