"""Finds places of segapp at which the tests cannot tell first from last, own from others, or height from width.

It watches the tests, and the processes that they start, and lists

- loops, comprehensions and `min`, `max`, `sorted`, `sum`, `any`, `all` that never saw two different elements;
- picks (`x[0]`, `x[-1]`) from lists and tuples that never held two different elements;
- pairs of whole-number arguments of a function that were equal in all of its calls;
- orders (`<`, `<=`, `>`, `>=`) of numbers that were never equal, and methods that no object was asked for twice.

A mistake at such a place (first for last, this rank's for all ranks', rows for columns, `<` for `<=`) passes unnoticed.
`tests/weak_places.toml` has the reasons for places of the first two kinds that cannot have two elements.

    WEAK=FOLDER uv run pytest -p tests.support.weak_places
    uv run python -m tests.support.weak_places FOLDER [ROOM ...]        # such as: parallel training/step

The code is rewritten as it is imported, so lines stay as they are; Triton kernels are left alone.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import importlib.abc
import importlib.machinery
import json
import operator
import os
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDS = {"min", "max", "sorted", "sum", "any", "all"}
ORDERS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
EVERY_S = 2.0
"""Seconds between two saves: many processes of the tests are killed."""


class Watch:
    """What this process has seen: by place, the largest number of elements, and 1 if two of them differed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Forget what was seen before a fork; the thread that saves has not come along."""
        self.seen: dict[str, list[int]] = {}
        self.objects: dict[str, set[int]] = {}
        self.is_saving, self.began_ns = False, time.time_ns()

    def note(self, place: str, count: int, telling: bool) -> None:
        if not self.is_saving:
            self.is_saving = True
            threading.Thread(target=self.save_now_and_then, daemon=True).start()
        found = self.seen.setdefault(place, [0, 0])
        found[0], found[1] = max(found[0], count), found[1] | telling

    def loop(self, place: str, elements: Iterable[Any]) -> Iterator[Any]:
        first: Any = None
        for count, element in enumerate(elements, 1):
            if count == 1:
                first = element
            self.note(place, count, count > 1 and not self.told(place) and differ(first, element))
            yield element

    def pick(self, place: str, value: Any) -> Any:
        if type(value) in (list, tuple):
            self.note(place, len(value), len(value) > 1 and not self.told(place) and differ(value[0], value[-1]))
        return value

    def arguments(self, place: str, /, **values: Any) -> None:
        """Note the pairs of whole numbers, and None for other values."""
        names = [name for name, value in values.items() if type(value) is int]
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                pair = f"{place}{one} = {other}"
                count = self.seen.get(pair, [0])[0] + 1
                self.note(pair, count, values[one] != values[other])

    def order(self, place: str, name: str, left: Any, right: Any) -> Any:
        if type(left) in (int, float) and type(right) in (int, float):
            self.note(place, 1, left == right)
        return getattr(operator, name)(left, right)

    def call(self, place: str, owner: object) -> None:
        if not self.told(place):
            objects = self.objects.setdefault(place, set())
            self.note(place, 1, id(owner) in objects)
            objects.add(id(owner))

    def told(self, place: str) -> bool:
        return bool(self.seen.get(place, (0, 0))[1])

    def save_now_and_then(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.save()

    def save(self) -> None:
        for _ in range(3):
            with contextlib.suppress(RuntimeError):  # another thread added a place meanwhile
                text = json.dumps({"places": sorted(self.places), "seen": self.seen})
                break
        else:
            return
        temporary = self.folder / f".{os.getpid()}-{threading.get_ident()}"
        temporary.write_text(text)
        temporary.rename(self.folder / f"{os.getpid()}-{self.began_ns}.json")


def differ(one: Any, other: Any) -> bool:
    if one is other or getattr(one, "ndim", 0):  # two tensors or arrays of several values are two elements
        return one is not other
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = [*one.items()], [*other.items()]
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        # `!=` would compare the tensors in them, of which a simulation of torch says that it fails.
        return len(one) != len(other) or any(map(differ, one, other))
    try:
        return bool(one != other)
    except Exception:
        return True


class Rewrite(ast.NodeTransformer):
    """Sends what a module loops over, picks, compares and calls past the watch, `__weak__`."""

    def __init__(self, module: str, places: set[str]) -> None:
        self.module, self.places, self.is_method = module, places, [False]

    def ask(
        self, method: str, node: ast.expr | ast.stmt, kind: str, /, *values: ast.expr, **named: ast.expr
    ) -> ast.Call:
        place = f"{self.module}:{node.lineno}:{node.col_offset}:{kind}:"
        if method != "arguments":
            self.places.add(place)
        asked = ast.Attribute(ast.Name("__weak__", ast.Load()), method, ast.Load())
        return ast.Call(asked, [ast.Constant(place), *values], [ast.keyword(*item) for item in named.items()])

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.iter = self.ask("loop", node.iter, "for", node.iter)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        if not node.is_async:
            node.iter = self.ask("loop", node.iter, "for", node.iter)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in FOLDS and len(node.args) == 1:
            (argument,) = node.args
            if not isinstance(argument, ast.Starred | ast.GeneratorExp | ast.ListComp | ast.SetComp):
                node.args = [self.ask("loop", argument, node.func.id, argument)]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and ast.unparse(node.slice) in ("0", "-1"):
            node.value = self.ask("pick", node, "pick", node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) > 1 or type(node.ops[0]) not in ORDERS:
            return node
        name = ast.Constant(ORDERS[type(node.ops[0])].__name__)
        return self.ask("order", node, "order", name, node.left, *node.comparators)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.is_method.append(True)
        node.body = [self.visit(each) for each in node.body]  # bases and decorators as they are
        self.is_method.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        is_method = self.is_method[-1]
        self.is_method.append(False)
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.body = [self.visit(each) for each in node.body]
        self.is_method.pop()
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        numbers = [each for each in every if "int" in (ast.unparse(each.annotation) if each.annotation else "int")]
        names = {each.arg: ast.Name(each.arg, ast.Load()) for each in numbers if each.arg not in ("self", "cls")}
        asked = [self.ask("arguments", node, node.name, **names)] if len(names) > 1 else []
        if is_method and every[:1] and every[0].arg == "self" and not node.name.startswith("__"):
            asked.append(self.ask("call", node, f"call {node.name}", ast.Name("self", ast.Load())))
        at = int(ast.get_docstring(node, clean=False) is not None)
        node.body[at:at] = [ast.copy_location(ast.Expr(each), node.body[0]) for each in asked]
        return node


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        tree = ast.fix_missing_locations(Rewrite(fullname, builtins.__weak__.places).visit(tree))  # type: ignore[attr-defined]
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "segapp" or "triton" in fullname:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install(folder: Path) -> None:
    """Rewrite segapp's modules as they are imported, here and in processes of this one, and save what was seen."""
    if hasattr(builtins, "__weak__"):
        return
    watch = builtins.__weak__ = Watch(folder)  # type: ignore[attr-defined]
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text("import tests.support.weak_places\n")
    os.environ["WEAK"] = str(folder)
    os.environ["PYTHONPATH"] = f"{site}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    sys.meta_path.insert(0, Finder())
    atexit.register(watch.save)
    os.register_at_fork(after_in_child=watch.begin)
    end = os._exit

    def save_and_end(code: int) -> None:
        watch.save()
        end(code)

    os._exit = save_and_end  # type: ignore[assignment]


def report(folder: Path, rooms: list[str]) -> None:
    """Print the weak places of these rooms, or of all, and a table by room without those that have a reason."""
    seen: dict[str, list[int]] = {}
    places: set[str] = set()
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        places |= set(found["places"])
        for place, (count, telling) in found["seen"].items():
            old = seen.setdefault(place, [0, 0])
            old[:] = max(old[0], count), old[1] | telling
    reasons = tomllib.loads((ROOT / "tests" / "weak_places.toml").read_text())
    rows: dict[str, Counter[str]] = {}
    for place in sorted(places | seen.keys(), key=lambda place: (place.split(":")[0], int(place.split(":")[1]), place)):
        module, line, _, kind, pair = place.split(":")
        name = module.removeprefix("segapp.").replace(".", "/")
        count, telling = seen.get(place, [0, 0])
        group = "pairs" if pair else "orders" if kind == "order" else "calls" if kind.startswith("call ") else "places"
        row = rows.setdefault(name.partition("/")[0], Counter())
        row[group] += count > 0
        if telling or not count or (pair and count == 1):
            continue
        source = (ROOT / "segapp" / f"{name}.py").read_text().splitlines()[int(line) - 1].strip()
        if group == "places" and source in reasons.get(name, {}):
            row["with a reason"] += 1
            continue
        row[f"weak {group}"] += 1
        if not rooms or any(name.startswith(room) for room in rooms):
            what = pair or ("one element" if count == 1 and group == "places" else f"{count} alike" * (count > 1))
            print(f"{name}.py:{line} {kind} {what}: {source}")
    rows["all"] = sum(rows.values(), Counter[str]())
    groups = ("places", "pairs", "orders", "calls")
    print(f"\n{'weak of reached':<16}", *(f"{group:>12}" for group in groups), "  share of places, with a reason")
    for room, row in sorted(rows.items(), key=lambda item: -item[1]["weak places"]):
        cells = (f"{row[f'weak {group}']} of {row[group]}" for group in groups)
        share = row["weak places"] / max(1, row["places"])
        print(f"{room:<16}", *(f"{cell:>12}" for cell in cells), f"{share:>7.0%} {row['with a reason']:>15}")


if __name__ == "__main__":
    report(Path(sys.argv[1]), sys.argv[2:])
elif os.environ.get("WEAK"):
    install(Path(os.environ["WEAK"]).absolute())
