"""Checked access to the values of a decoded `config.json` of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from fireflyer.base.errors import UsageError

__all__ = ["ConfigKeys"]

MAX_LAYERS: Final = 1 << 16
"""Of a model: figures are summed layer by layer."""


class ConfigKeys:
    """Values of a decoded `config.json`, checked as they are taken. Each method raises `UsageError` with the key."""

    def __init__(self, config: Mapping[str, object], model_types: Iterable[str] = ()) -> None:
        """`model_types`: those that the caller understands, named where the configuration has none."""
        self._config = config
        self._model_types = tuple(model_types)

    def number(self, name: str, default: int | None = None) -> int:
        """Value of `name`, a whole number of 0 or more."""
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise UsageError(f"config.json has no {name!r}, which a model of type {self.model_type()!r} needs")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise UsageError(f"config.json: {name!r} is {value!r}; a whole number is needed")
        return value

    def optional(self, name: str) -> int | None:
        """Value of `name`, a whole number, or None where it is absent."""
        return None if self._config.get(name) is None else self.number(name)

    def positive(self, name: str, default: int | None = None) -> int:
        """Value of `name`, a whole number of 1 or more."""
        value = self.number(name, default)
        if value < 1:
            raise UsageError(f"config.json: {name!r} is {value}; it must be 1 or more")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Value of `name`, a finite number above 0."""
        value = self._config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UsageError(f"config.json: {name!r} is {value!r}; a number above 0 is needed")
        return float(value)

    def table(self, name: str) -> ConfigKeys | None:
        """Values of the object `name`, or None where it is absent."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UsageError(f"config.json: {name!r} is {value!r}; an object is needed")
        return ConfigKeys({"model_type": self._config.get("model_type")} | value, self._model_types)

    def text(self, name: str, default: str) -> str:
        """Value of `name`, a string."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise UsageError(f"config.json: {name!r} is {value!r}; a string is needed")
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """Value of `name`, a list of strings, or None where it is absent."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"config.json: {name!r} is {value!r}; a list of strings is needed")
        return tuple(value)

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Value of `name`, a list of whole numbers, or None where it is absent or empty."""
        value = self._config.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise UsageError(f"config.json: {name!r} is {value!r}; a list of whole numbers is needed")
        return tuple(value)

    def repeated(self, name: str) -> tuple[str, ...] | None:
        """Value of `name`, a list of pairs of strings and how often they come: `[[["global", "local"], 12]]`, written
        out, or None where it is absent."""
        value = self._config.get(name)
        if value is None:
            return None
        found: list[str] = []
        for pair in value if isinstance(value, list) else [None]:
            match pair:
                case [[*strings], int(times)] if all(isinstance(one, str) for one in strings):
                    if 0 <= times * len(strings) <= MAX_LAYERS - len(found):
                        found += strings * times
                        continue
            raise UsageError(f"config.json: {name!r} is {value!r}; a list as [[['global', 'local'], 12]] is needed")
        return tuple(found)

    def with_defaults(self, **defaults: object) -> ConfigKeys:
        """Keys that have these values where they are absent."""
        return ConfigKeys(defaults | dict(self._config), self._model_types)

    def with_values(self, **values: object) -> ConfigKeys:
        """Keys that have these values, whatever they had."""
        return ConfigKeys(dict(self._config) | values, self._model_types)

    def refuse(self, name: str, why: str) -> None:
        """Raises `UsageError` where `name` has a value that is not null, false, 0 or empty."""
        if self._config.get(name):
            raise UsageError(f"config.json: {name!r} is {self._config[name]!r}; {why}")

    def layer(self, name: str, default: int, layers: int) -> int:
        """Value of `name`, the number of one of `layers` layers; -1 is the last."""
        value = self._config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not -layers <= value < layers:
            raise UsageError(f"config.json: {name!r} is {value!r}; a layer from 0 to {layers - 1} is needed, or -1")
        return value % layers

    def is_text(self, name: str, text: str) -> bool:
        """True if the value of `name` is this string."""
        return self._config.get(name) == text

    def has(self, name: str) -> bool:
        """True if `name` is there and not null."""
        return self._config.get(name) is not None

    def flag(self, name: str, default: bool) -> bool:
        """Value of `name`, true or false."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"config.json: {name!r} is {value!r}; true or false is needed")
        return value

    def model_type(self) -> str:
        """Architecture that the configuration is of."""
        value = self._config.get("model_type")
        if not isinstance(value, str):
            raise UsageError(f"config.json has no 'model_type'; known are {', '.join(sorted(self._model_types))}")
        return value
