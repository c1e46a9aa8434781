"""Import custom components and call their factories; every `ConfigError` names the key and the next move.

The contracts say what a factory of each kind gets, and what it returns (page `own-parts`). Classes are factories too.
`segapp check-part` tests a component against its contract. A network takes normalized images (N, B, H, W) with the
dtype of its weights and returns logits (N, C, h, w), or a tuple or dict whose first entry they are, followed by
auxiliary logits in training. Its attributes `size_divisor`, `min_size_px` and `fixed_size_px` (H, W) restrict H and W;
a submodule `backbone` or `encoder` gets the backbone's learning rate.

Shapes: N images, B bands, C classes, H x W pixels of an image, h x w of the logits.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from segapp.custom.names import find_source, is_component, is_file_name, is_installed, split_name
from segapp.custom.sources import offer
from segapp.custom.trust import accepted_sources
from segapp.errors import ConfigError, SegappError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

ARGUMENTS: dict[str, tuple[tuple[str, ...], int]] = {
    "model": (("num_classes", "in_channels"), 0),
    "loss": (("num_classes", "ignore_index", "align_corners", "aux_weight", "weight"), 0),
    "data": (("root", "split"), 0),
    "optim": (("lr",), 1),  # the parameter groups with their `weight_decay`
    "schedule": (("total_steps", "steps_per_epoch"), 0),
    "transform": (("crop_px", "ignore_index"), 0),
}
"""Arguments of factories in addition to the `options` of the config, by kind: keyword arguments, passed only to a
factory with a parameter of that name, and the number of positional ones. `weight` (C,) is `loss.class_weights`."""


class Loss(Protocol):
    """A plain loss; a `segapp.losses.AdditiveCriterion` can be returned instead."""

    def __call__(self, logits: Tensor, target: Tensor, /) -> Tensor:
        """Return a differentiable scalar: the mean over valid pixels; otherwise the step is exact only on one device.

        Args:
            logits: (N, C, H, W), float32 or float64, at the target's resolution.
            target: (N, H, W) int64: class ids, and `ignore_index` for pixels that are not valid.
        """


class DataSource(Protocol):
    """The images and masks of a split, which data workers get by pickle or fork. It may have `name(index) -> str`."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image_and_mask(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return an image and its mask, the same at every call.

        The image is (H, W, B) with dtype `data.dtype`, by default uint8 RGB. The mask is (H, W) of integers: class ids,
        or keys of `data.label_map`, and `data.ignore_index`.
        """


class Schedule(Protocol):
    """A learning-rate schedule, which depends only on the step."""

    def __call__(self, step: int, /) -> float:
        """Return the factor on `optim.lr`, 0 or more, at a step (optimizer update), counted from 1."""


class Transform(Protocol):
    """A transform of training samples; one from albumentations, or a list of them, can be returned instead."""

    def __call__(self, image: NDArray[Any], mask: NDArray[Any], seed: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return image (H, W, B) and mask (H, W) of class ids, dtypes unchanged, determined by the arguments."""


_import_lock = threading.RLock()
"""Held while a module is imported, because another thread may offer another version of it."""


def load_part(name: str, key: str, *, is_built_in: bool = False) -> Callable[..., Any]:
    """Import a custom component that a config key or an option names, and return its class or factory function.

    With `is_built_in`, the name comes from a table of segapp and not from a config.

    A custom component is compiled from the bytes that were compared with the record. Nothing is added to the Python
    path.

    Raises:
        ConfigError: there is no such module, it lacks the name, or its import fails.
    """
    try:
        sources = None if is_built_in else accepted_sources(name)
        if not is_component(name):
            raise ConfigError(
                f"{key} = {name!r} is not a custom component: write package.module:factory or ./file.py:factory"
            )
        where, attribute = split_name(name)
        what = f"{key} = {name}"
        if sources is None and is_file_name(where):
            part_file(name, what)
        with _import_lock:
            if sources is not None:
                offer(sources, what)
            found: Any = _import(where if sources is None else sources.module, what)
        for word in attribute.split("."):
            if not hasattr(found, word):
                hint = did_you_mean(word, [each for each in dir(found) if not each.startswith("__")], most=3)
                raise ConfigError(f"{what}: {where} has no {word!r}: {hint or 'check the spelling'}")
            found = getattr(found, word)
        if not callable(found):
            kind = type(found).__name__
            raise ConfigError(f"{what} is a {kind}: name a class or a function that creates the component")
        return found  # type: ignore[no-any-return]
    # Errors from inside the component do not know the key that names it.
    except ConfigError as error:
        error.key, error.value = key, name
        raise


def part_file(name: str, what: str) -> Path:
    """Return the file of a component `file.py:factory`; raise ConfigError if there is none."""
    if (source := find_source(name)) is None:
        raise ConfigError(
            f"{what}: there is no file {split_name(name)[0]}: the path is relative to the config file or to the "
            f"current folder ({os.getcwd()})"
        )
    return source


def _import(module: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{what}: importing it needs the module {error.name}: install it, or name it in an import statement if "
                "it is next to the file"
            ) from error
        raise ConfigError(
            f"{what}: no module {error.name} on the Python path or in the current folder ({os.getcwd()}): start segapp "
            "in its folder, add its folder to PYTHONPATH, or name the file: ./file.py:factory"
        ).see("own-parts") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: importing it fails with {shown_error(error)}: correct it").see(
            "own-parts"
        ) from error


def option_problems(
    name: str,
    factory: Callable[..., Any],
    key: str,
    options: Mapping[str, Any],
    offered: Sequence[str] = (),
    num_positional: int = 0,
) -> list[str]:
    """Return the problems of a component's options, one sentence each; [] if its factory can be called with them.

    segapp passes `num_positional` arguments by position, and those in `offered` if the factory has such parameters.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (ValueError, TypeError):  # implemented in C: it checks its own arguments
        return []
    num_taken = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if num_taken < num_positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return [f"{name} takes fewer than the {num_positional} arguments that segapp gives it: run segapp check-part"]
    parameters = parameters[num_positional:]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    problems = []
    for option in options:
        if option in offered:
            problems.append(f"{key}.{option} is given by segapp: leave it out")
        elif option not in named and not takes_any:
            known = [name for name in named if name not in offered]
            hint = did_you_mean(str(option), known) or f"it takes {', '.join(known) or 'no option'}"
            problems.append(f"{key}.{option} is not an argument of {name}: {hint}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in options and name not in offered:
            problems.append(f"{key}.{name} is missing: {name} takes it and has no default for it")
    return problems


def build_part(
    name: str,
    key: str,
    options: Mapping[str, Any],
    *given: Any,
    offered: Mapping[str, Any] | None = None,
    options_key: str | None = None,
    is_built_in: bool = False,
) -> Any:
    """Import the component that a config key names, and return the result of its factory.

    The factory gets the positional arguments `given`, the keyword arguments `options` of the config, and those in
    `offered` for which it has a parameter. `options_key` is the config key of the options; None: `options` next to
    `key`. With `is_built_in`, the name comes from a table of segapp and not from a config.

    Raises:
        ConfigError: the component cannot be imported, does not accept the options, or raises.
    """
    factory = load_part(name, key, is_built_in=is_built_in)
    options_key = options_key or f"{key.rpartition('.')[0]}.options"
    offered = offered or {}
    problems = option_problems(name, factory, options_key, options, tuple(offered), len(given))
    if problems:
        raise ConfigError("; ".join(problems), key=options_key, value=dict(options)).see("own-parts")
    taken = {word: value for word, value in offered.items() if takes(factory, word)}
    try:
        return factory(*given, **taken, **options)
    # A sentence that is written for the user stays.
    except SegappError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} = {name}: creating it fails with {shown_error(error)}: correct it, or {options_key}",
            key=key,
            value=name,
        ).see("own-parts") from error


def takes(factory: Callable[..., Any], name: str) -> bool:
    """Return True if a factory has a parameter with this name that accepts a keyword argument."""
    try:
        parameter = inspect.signature(factory).parameters.get(name)
    except (ValueError, TypeError):
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def shown_error(error: BaseException) -> str:
    """Return type, message and place of an error in one line; the place is the innermost line of user code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    message, where = str(error).partition("\n")[0], ""
    if not message and frames:  # such as an assertion without words
        message = str(frames[-1].line)
    if isinstance(error, SyntaxError) and error.filename:
        message, where = error.msg, f" ({_path_shown(error.filename)}, line {error.lineno})"
    elif own:
        where = f" ({_path_shown(own[-1].filename)}, line {own[-1].lineno})"
    elif frames:
        where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {message}{where}"


def _is_own(file: Path) -> bool:
    """Return True if a source file belongs neither to Python, nor to an installed package, nor to segapp."""
    return file.is_file() and not is_installed(file)


def _path_shown(file: str) -> str:
    """Return a path relative to the current folder if it is below it."""
    return os.path.relpath(file) if Path(file).is_relative_to(os.getcwd()) else file


def raised_at(error: BaseException, parts: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the custom component in whose file an error was raised, and file and line; None if in none of them.

    For example, `loss.name = own:focal` and `own.py:12`. The causes of the error are searched too. `parts` has the
    component of each key of the config.
    """
    sources = {key: source.resolve() for key, name in parts.items() if (source := find_source(name)) is not None}
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    # The mistake is at the first cause, which is the last link.
    for each in reversed(chain):
        for frame, line in reversed(list(traceback.walk_tb(each.__traceback__))):
            path = Path(frame.f_code.co_filename).resolve()
            keys = [key for key, source in sources.items() if source == path]
            if keys:
                return " or ".join(f"{key} = {parts[key]}" for key in keys), f"{path.name}:{line}"
    return None
