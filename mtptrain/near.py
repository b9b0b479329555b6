"""Names near a misspelt one: which options exist, and the one line that says what was probably meant."""

import dataclasses
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, get_type_hints

from mtptrain.config import Config

_CUTOFF = 0.6
_SHOWN = 3


def option_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections (`train.optim`) before what they hold (`train.optim.lr`)."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        yield key
        if dataclasses.is_dataclass(hints[field.name]):
            yield from option_keys(hints[field.name], f"{key}.")


_OPEN = ("target.shape", "engine.options")
"""Options that hold free keys of somebody else's: of config.json, of vLLM."""


def is_option(key: str) -> bool:
    """Whether the schema has `key`; anything under an open option counts."""
    return key in set(option_keys()) or is_free(key)


def is_free(key: str) -> bool:
    """Whether `key` lies under an open option."""
    return key.startswith(tuple(f"{name}." for name in _OPEN))


def near_names(name: str, known: list[str]) -> list[str]:
    """At most three of `known`, the nearest first. Dotted names are also compared by their last part alone."""

    def score(other: str) -> float:
        whole = SequenceMatcher(None, name, other).ratio()
        last = SequenceMatcher(None, name.rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return max(whole, 0.5 * (whole + last), 0.95 * last)

    scored = sorted(((score(other), other) for other in known), key=lambda pair: (-pair[0], pair[1]))
    return [other for value, other in scored if value >= _CUTOFF][:_SHOWN]


def unknown_name(what: str, name: str, known: list[str]) -> str:
    """One line for a name that is not among `known`; a short list is shown whole when nothing is near."""
    near = near_names(name, known)
    if near:
        return f"{what}; near: {', '.join(near)}"
    return f"{what}; there are: {', '.join(known)}" if len(known) <= 20 else f"{what}; `--cfg job` prints all options"


def unknown_option(key: str) -> str:
    """One line for a key the schema does not have."""
    if key == "recipe" or key.startswith("recipe."):
        return f"{key}: a recipe file must begin with the line `# @package _global_`, or its keys land under `recipe`"
    if is_free(key):
        return f"{key}: a key that is not there yet is added with a plus: +{key}=VALUE, or +{key.rpartition('.')[0]}={{KEY:VALUE}}"
    return unknown_name(f"{key}: no such option", key, [*option_keys(), "+recipe"])


def unknown_keys(values: Mapping[str, Any], cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a nested mapping that the schema does not have."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            yield key
        elif dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            yield from unknown_keys(value, hints[name], f"{key}.")
