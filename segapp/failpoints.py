"""Named places at which a test injects a fault through an environment variable.

`SEGAPP_FAILPOINTS="ckpt.before_rename=kill;train.step=17:oom"` arms two points. Each is `name=[HIT:]ACTION[*TIMES]`:

- `HIT` is the visit, counted from 1, at which it first acts (default 1);
- `TIMES` is the number of consecutive visits at which it acts (default: all from `HIT` on; 1 if `HIT` is given);
- `ACTION` is `kill` (SIGKILL to this process), `segv`, `term`, `stop` (the signals), `exit:CODE` (exit immediately),
  `raise:WHAT` (an errno name such as `ENOSPC`, or a built-in exception such as `RuntimeError`), `sleep:SECONDS`,
  `hang`, or any other word, which `failpoint` returns to its caller (`nan`, `oom`).

If `SEGAPP_FAILPOINT_MARKS` names a folder, every armed point gets an empty file there with its name, and a line in it
each time it acts, so a test can check that its fault occurred. An unarmed point costs one dictionary lookup. The method
comes from etcd's gofail.
"""

import builtins
import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass

VARIABLE = "SEGAPP_FAILPOINTS"
MARKS_VARIABLE = "SEGAPP_FAILPOINT_MARKS"

_SPEC = re.compile(r"(?:(?P<hit>\d+):)?(?P<action>[a-z_]+)(?::(?P<argument>[\w.+-]+))?(?:\*(?P<times>\d+))?")


@dataclass
class _Point:
    action: str
    argument: str
    first_hit: int
    num_times: int | None
    num_hits: int = 0

    def is_due(self) -> bool:
        self.num_hits += 1
        past = self.num_hits - self.first_hit
        return past >= 0 and (self.num_times is None or past < self.num_times)


def parse_failpoints(text: str) -> dict[str, _Point]:
    """Return the armed points of a `SEGAPP_FAILPOINTS` value; raise ValueError for an entry of another form."""
    points = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, spec = entry.partition("=")
        match = _SPEC.fullmatch(spec.strip())
        if match is None:
            raise ValueError(f"{VARIABLE}: cannot read {entry!r}: write name=[HIT:]ACTION[:ARGUMENT][*TIMES]")
        times, hit = match["times"], match["hit"]
        points[name.strip()] = _Point(
            action=match["action"],
            argument=match["argument"] or "",
            first_hit=int(hit or 1),
            num_times=int(times) if times else (1 if hit else None),
        )
    return points


_points: dict[str, _Point] = {}
_lock = threading.Lock()


def arm(text: str) -> None:
    """Replace all armed points by the points in `text`, which has the form of `SEGAPP_FAILPOINTS`; `""` disarms all."""
    armed = parse_failpoints(text)
    _points.clear()
    _points.update(armed)
    for name in armed:
        _mark(name, "")


def _mark(name: str, line: str) -> None:
    """Add `line` to the file of a point if a folder for the files is set."""
    folder = os.environ.get(MARKS_VARIABLE)
    if folder:
        with open(os.path.join(folder, name), "a", encoding="utf-8") as file:
            file.write(line)


arm(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> str | None:
    """Act if the point `name`, such as `ckpt.before_rename`, is armed and due.

    Return None, or the word of an action that the caller performs; raise the exception of a `raise:` action.
    """
    point = _points.get(name)
    if point is None:
        return None
    with _lock:
        if not point.is_due():
            return None
    _mark(name, f"{os.getpid()}\n")
    return _act(name, point)


def _act(name: str, point: _Point) -> str | None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif point.action in ("segv", "term"):
        os.kill(os.getpid(), signal.SIGSEGV if point.action == "segv" else signal.SIGTERM)
    elif point.action == "stop":
        signal.raise_signal(signal.SIGSTOP)  # to this thread, which would continue for a while after a process signal
    elif point.action == "exit":
        os._exit(int(point.argument or 1))
    elif point.action == "sleep":
        time.sleep(float(point.argument))
    elif point.action == "hang":
        while True:
            time.sleep(3600)
    elif point.action == "raise":
        raise _exception(point.argument, name)
    else:
        return point.action
    return None


def _exception(what: str, name: str) -> BaseException:
    number = getattr(errno, what, None)
    if isinstance(number, int):
        return OSError(number, os.strerror(number), f"failpoint {name}")
    kind = getattr(builtins, what, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind(f"failpoint {name}")
    raise ValueError(f"{VARIABLE}: {name}=raise:{what}: neither an errno name nor a built-in exception")
