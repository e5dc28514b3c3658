"""Values of configurations: what a field's type accepts, and the words when it does not."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union

from manyhands.errors import ConfigError


class Workers(int):
    """How many workers: a number, or `2..16`, of which the most counts as the number."""

    least: int  # that must be there; as many as there are, where it is one number

    def __new__(cls, most: int, least: int | None = None) -> Workers:
        made = super().__new__(cls, most)
        made.least = int(most if least is None else least)
        return made

    @classmethod
    def parse(cls, text: str) -> Workers:
        """ValueError for what is neither a number nor two with two dots between them."""
        least, dots, most = text.partition("..")
        return cls(int(most), int(least)) if dots else cls(int(text))

    def __str__(self) -> str:
        """As it is typed."""
        return int.__repr__(self) if self.least == self else f"{self.least}..{int.__repr__(self)}"

    @property
    def plain(self) -> int | str:
        return int(self) if self.least == self else str(self)


def coerce(name: str, value: Any, hint: Any) -> Any:
    """The value as the field's type has it; ConfigError when it is of another kind.

    Whole floats are taken for ints (steps=1e6), ints for floats, lists for tuples, numpy's
    scalars for Python's, a Path for its text.
    """
    origin = typing.get_origin(hint)
    if origin in (Union, UnionType):
        return _coerce_union(name, value, hint)
    if origin is tuple and isinstance(value, (list, tuple)):
        return _coerce_tuple(name, value, hint)
    if (hint is dict or origin is dict) and isinstance(value, Mapping):
        return plain(name, value)
    if origin is Literal and isinstance(value, str) and value in typing.get_args(hint):
        return value
    if hint in (bool, str, NoneType) and isinstance(value, hint):
        return value
    if hint is Workers:
        return _workers(name, value)
    if hint is str and isinstance(value, Path):
        return str(value)
    if hint in (int, float):
        number = _number(name, value, hint)
        if number is not None:
            return number
    raise ConfigError(f"{name}={value!r}: {words(hint)} is expected")


def _workers(name: str, value: Any) -> Workers:
    if isinstance(value, Workers):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return Workers.parse(value)
    elif (number := _number(name, value, int)) is not None:
        return Workers(int(number))
    raise ConfigError(f"{name}={value!r}: a whole number is expected, or two such as 2..16")


def _number(name: str, value: Any, kind: Any) -> int | float | None:
    """The value as an int or a float, None if it is neither; True is never a number here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(f"{name} is a number of more than 300 digits") from None
    if kind is float:
        return number
    if isinstance(value, Integral):
        return int(value)
    return int(number) if number.is_integer() else None


def _coerce_union(name: str, value: Any, hint: Any) -> Any:
    members = typing.get_args(hint)
    given = [m for m in members if m is not NoneType]
    if value is not None and len(given) == 1 and typing.get_origin(given[0]) is tuple:
        return coerce(name, value, given[0])  # its error names the entry
    exact = [m for m in members if m is type(value)]
    for member in [*exact, *members]:
        try:
            return coerce(name, value, member)
        except ConfigError:
            continue  # another member may fit; the error below names them all
    raise ConfigError(f"{name}={value!r}: {words(hint)} is expected")


def _coerce_tuple(name: str, value: Any, hint: Any) -> tuple[Any, ...]:
    members = typing.get_args(hint)
    if len(members) == 2 and members[1] is ...:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise ConfigError(f"{name}={value!r}: {len(members)} values are expected")
    pairs = zip(value, members, strict=True)
    return tuple(coerce(f"{name}[{i}]", v, m) for i, (v, m) in enumerate(pairs))


def words(hint: Any) -> str:
    """A type in a user's words."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(words(m) for m in members))
    if origin is Literal:
        return " or ".join(map(repr, members))
    if origin is tuple:
        return f"a list ({words(members[0])} each)"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return plain.get(hint, "nothing" if hint is NoneType else "a table")


def plain(name: str, value: Any) -> Any:
    """Plain data that TOML can hold, or ConfigError: it would be lost from the run's record."""
    if isinstance(value, Mapping):
        bad = [k for k in value if not isinstance(k, str)]
        if bad:
            raise ConfigError(f"{name} has the key {bad[0]!r}: keys are text")
        return {k: plain(f"{name}.{k}", v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(f"{name}[{i}]", v) for i, v in enumerate(value)]
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(
        f"{name}={value!r}: text, numbers, true or false, lists and tables of these are expected"
    )
