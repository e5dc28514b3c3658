"""The four errors. Each says what was given, what was expected, and what to type."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_WORDS = 1 << 16  # characters of one error: it goes into files and onto screens


def described(error: BaseException) -> str:
    """`ValueError: its words`, whatever its own code does, and cut where they have no end."""
    try:
        words = str(error)
    except Exception as fault:
        words = f"(it cannot be put into words: {type(fault).__name__})"
    if len(words) > _MOST_WORDS:
        words = f"{words[: _MOST_WORDS // 2]} ... {words[-_MOST_WORDS // 2 :]}"
    return f"{type(error).__name__}: {words}"


class ManyhandsError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(ManyhandsError):
    """The user asked for something that cannot be: a wrong number, name or combination."""


class SupportError(ManyhandsError):
    """The thing asked for is not available: a missing package, or a cell of the support table."""


class WorkerError(ManyhandsError):
    """A worker raised, died or went silent. Carries who, where and the original traceback."""

    def __init__(self, who: str, what: str = "", *, rank: int = -1, exit_code: int = 1) -> None:
        super().__init__(f"{who} {what}" if what else who)
        self.what = what  # "failed:" and the traceback, or how it ended
        self.rank = rank
        self.exit_code = exit_code


class CollectiveError(ManyhandsError):
    """Workers did not meet: they disagree, one is gone, or one did not come in time."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM reached the launcher; the workers are ended on its way up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def importing(place: str) -> Iterator[None]:
    """ConfigError where a module of the user's ends the program when it is imported, as a script
    does that has no main guard: it would end ours without a word."""
    try:
        yield
    except SystemExit as leave:
        if leave.code == 128 + signal.SIGTERM:  # how a signal ends a worker: no module's doing
            raise
        raise ConfigError(
            f"{place} called sys.exit({'' if leave.code is None else repr(leave.code)}) while it "
            'was imported; what it does as a script belongs under: if __name__ == "__main__":'
        ) from leave


def needs(package: str, extra: str, cause: Exception | None = None) -> SupportError:
    """The one line a user sees when an optional package is not there."""
    detail = f" ({cause})" if cause is not None else ""
    return SupportError(f"{package} is not installed{detail}; type: {install(extra)}")


def install(extra: str) -> str:
    """The command that adds an extra, from where this copy of the package came.

    Whoever works in a copy of the repository, or installed from a folder, a file or an address,
    would get another version, or none, by the name alone.
    """
    tree = os.path.realpath(os.path.join(__file__, "..", "..", ".."))
    if os.path.isfile(
        os.path.join(tree, "pyproject.toml")
    ):  # a copy, installed by -e or not at all
        here = os.path.realpath(os.curdir) == tree
        return f"pip install -e '{'.' if here else tree}[{extra}]'"
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("manyhands").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    if not text:
        return f"pip install 'manyhands[{extra}]'"
    origin = json.loads(text)  # PEP 610
    url = origin["url"]
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}"
    return f"pip install 'manyhands[{extra}] @ {url}'"
