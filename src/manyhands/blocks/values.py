"""Shared values: a small table that all workers read and write, with compare-and-set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands.blocks import Locked, reach, whole
from manyhands.errors import ConfigError

if TYPE_CHECKING:
    from manyhands.parallel import Parallel


class Table(Locked):
    """What the owner holds; one call at a time, so that each is whole."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, Any] = {}

    @whole
    def get(self, key: str) -> list[Any]:
        return [key in self._values, self._values.get(key)]

    @whole
    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    @whole
    def swap(self, key: str, old: Any, new: Any) -> bool:
        if self._values.get(key) != old:
            return False
        self._values[key] = new
        return True

    @whole
    def add(self, key: str, amount: Any) -> Any:
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]

    @whole
    def remove(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    @whole
    def keys(self) -> list[str]:
        return list(self._values)


class SharedValues:
    """A handle on the table; every worker makes one. Values are what can travel: see `wire`."""

    def __init__(self, par: Parallel, name: str = "values", *, owner: int = 0) -> None:
        self._worker = par.worker
        self._here: Table | None = None
        if par.rank == owner:
            self._here = Table()
            par.serve(f"values: {name}", self._here)
        else:
            self._there = reach(par, f"values: {name}")

    def __getitem__(self, key: str) -> Any:
        there, value = self._call("get", key)
        if not there:
            raise ConfigError(f"there is no shared value {key!r}; there are {self.keys()}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of that name, or `default`; `values[key]` raises where there is none."""
        there, value = self._call("get", key)
        return value if there else default

    def __setitem__(self, key: str, value: Any) -> None:
        self._call("set", key, value)

    def swap(self, key: str, old: Any, new: Any) -> bool:
        """Set `new` if the value is `old` (None: not there yet); whether it was."""
        return bool(self._call("swap", key, old, new))

    def add(self, key: str, amount: float = 1) -> Any:
        """Add to a number, from 0 if it is not there; the new number."""
        return self._call("add", key, amount)

    def remove(self, key: str) -> bool:
        """Forget a value; whether there was one."""
        return bool(self._call("remove", key))

    def keys(self) -> list[str]:
        """The names that have a value."""
        return list(self._call("keys"))

    def _call(self, method: str, *args: Any) -> Any:
        if self._here is not None:
            self._worker.breathe()
            return getattr(self._here, method)(*args)
        return self._there.call(method, *args)
