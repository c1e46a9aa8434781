"""Options of timm, and errors about unknown names of networks and options."""

import inspect
from collections.abc import Iterable

from segapp.errors import ConfigError, accepted_words


def unknown_name(key: str, value: str, what: str, known: Iterable[str]) -> ConfigError:
    message = f"{key}: {value!r} is not {what}: {accepted_words(value, sorted(known), most=3)}"
    return ConfigError(message, key=key, value=value)


def check_options(options: Iterable[str], accepted: Iterable[str], owner: str) -> None:
    accepted = tuple(accepted)
    for option in options:
        if option not in accepted:
            raise unknown_name("model.options", option, f"an option of {owner}", accepted)


def timm_options(encoder: str) -> set[str]:
    """Return the options of an encoder of timm: the arguments of the modules in its file, which describe layers.

    Those of `timm.create_model` are left out, because some load files, and a config may come from a stranger.
    """
    import timm
    from torch import nn

    file = timm.model_entrypoint(encoder.removeprefix("tu-")).__globals__
    kinds = [kind for kind in file.values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    parameters = [each for kind in kinds for each in inspect.signature(kind.__init__).parameters.values()]
    names = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    return names - inspect.signature(timm.create_model).parameters.keys() - {"self"}
