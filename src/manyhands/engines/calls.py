"""Functions travel by name, never as bytes: `package.module:function`, with plain arguments.

So nothing is ever unpickled, and what a run was started with can be written down and repeated.
"""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from manyhands import wire
from manyhands.errors import ConfigError, WorkerError, described, importing

_MAIN = "__manyhands_main__"  # before the path of a script that is imported, not run
_ROOM = 96 * 1024  # what fits an environment variable with room to spare
importing_main = False
_remembered: dict[str, Callable[..., Any]] = {}


def name_of(function: Callable[..., Any]) -> str:
    """`module:qualname`, or `file.py:qualname` for a function of the script that runs."""
    if isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    if not name or not module:
        raise ConfigError(f"{function!r} has no name by which a worker process could find it")
    if "<" in name:
        what = "a lambda" if "<lambda>" in name else f"{name.split('.')[-1]!r}, a closure,"
        raise ConfigError(
            f"{what} cannot be sent to a worker process: functions travel by name. Define it at "
            "the top level of a module (def ...:) and pass what it closes over as arguments, or "
            "use engine='inline'"
        )
    if module == "__main__":
        path = getattr(sys.modules["__main__"], "__file__", None)
        if not path:
            raise ConfigError(
                f"{name} was typed at a prompt or in a notebook; worker processes find functions "
                "by name: put it into a file and import it, or use engine='inline'"
            )
        return f"{os.path.abspath(path)}:{name}"
    return f"{module.removeprefix(_MAIN)}:{name}"  # of an imported script: its path


def remember(function: Callable[..., Any]) -> str:
    """A name by which `find` gives this very function in this process, whatever it is: one of the
    running script, which must not be imported to find it, or one that has no name elsewhere."""
    try:
        name = name_of(function)
    except ConfigError:
        module, named = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        name = f"{module or '__main__'}:{named or type(function).__qualname__}"
    _remembered[name] = function
    return name


@contextmanager
def remembered(target: Any) -> Iterator[str]:
    """`remember`, until the block ends: `find` then goes by what the name says again."""
    name = remember(target)
    try:
        yield name
    finally:
        _remembered.pop(name, None)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A call as text."""
    name = name_of(function)
    if isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
    try:
        data = wire.encode([name, list(args), kwargs])
    except ConfigError as fault:
        raise ConfigError(f"an argument of {name} cannot be sent: {fault}") from None
    if len(data) > _ROOM:
        raise ConfigError(
            f"the arguments of {name} take {len(data):,} bytes and at most {_ROOM:,} can be sent "
            "at start; write them to a file and pass its path"
        )
    return base64.b64encode(data).decode()


def perform(text: str) -> Any:
    """Find the function of a packed call and call it."""
    name, args, kwargs = wire.decode(base64.b64decode(text))
    return find(name)(*args, **kwargs)


def find(name: str) -> Callable[..., Any]:
    """The function of that name; ConfigError when it is not there."""
    if name in _remembered:
        return _remembered[name]
    place, _, qualname = name.rpartition(":")
    if not place:
        raise ConfigError(f"{name!r} cannot be found: it is not of the form module:function")
    try:
        with importing(place):
            found: Any = _script(place) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as fault:
        # WHY look at the name: what the module itself fails to import is the user's own trouble,
        # and its traceback tells him where.
        if fault.name is None or not f"{place}.".startswith(f"{fault.name}."):
            raise
        raise ConfigError(f"{name} cannot be found: {fault}") from None
    try:
        for part in qualname.split("."):
            found = getattr(found, part)
    except AttributeError as fault:
        raise ConfigError(f"{name} cannot be found: {fault}") from None
    if not callable(found):
        raise ConfigError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]


def where_to_look(place: str) -> str:
    """What to do about a module that cannot be found."""
    return (
        "It is looked for in the folder from which you start and on PYTHONPATH; go to the folder "
        f"that holds {place.split('.')[0]} and start there, or type before your command: "
        "PYTHONPATH=THAT_FOLDER"
    )


def refuse_python(name: str) -> None:
    """ConfigError for a function of Python itself, such as os:system, where an environment or a
    network is to be made: a configuration that somebody else has written must not get that far."""
    if name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{name} is part of Python and makes neither environments nor networks; name a "
            "function of your own, such as package.module:function"
        )


def knows(name: str) -> bool:
    """Whether `find` has something for a name that is no import path: it was remembered, or is in
    a script."""
    return name in _remembered or name.rpartition(":")[0].endswith(".py")


def invoke(target: object, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a public method by name; anything else is refused."""
    function = None if method.startswith("_") else getattr(target, method, None)
    if not callable(function):
        offered = [m for m in dir(target) if not m.startswith("_") and callable(getattr(target, m))]
        raise ConfigError(f"no method {method!r} is served; there are: {', '.join(offered)}")
    return function(*args, **kwargs)


def remote_error(name: str, method: str, error: BaseException) -> WorkerError:
    """What the caller of a service gets when its method has failed, traceback included."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerError(f"{name}: {method} failed: {described(error)}\n{text}")


def _script(path: str) -> ModuleType:
    """The user's script as a module: its functions, without what `__main__` guards."""
    global importing_main
    # By its path: policies of several scripts may be loaded in one process.
    name = f"{_MAIN}{os.path.abspath(path)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ConfigError(f"the script {path} cannot be found on this machine")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(path))
    importing_main = True
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found by the next call
        raise
    finally:
        importing_main = False
    return module
