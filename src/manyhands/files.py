"""Reading files that somebody else may have written, or put there in place of one of ours."""

from __future__ import annotations

import os
import stat

_SMALL = 1 << 20  # bytes that are always there


class Unreadable(Exception):
    """The text names the file and the reason."""


def read(path: str | os.PathLike[str], limit: int | None = None, *, links: bool = True) -> bytes:
    """All bytes of a plain file, of at most `limit`, and of no more than memory is free.

    A pipe is refused and not waited for; so is a link, where none are asked for.
    """
    name = os.fspath(path)
    try:
        # NONBLOCK: opening a pipe would wait for somebody who writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
        with open(fd, "rb") as source:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise Unreadable(f"{name} is not a plain file")
            if limit is not None and facts.st_size > limit:
                raise Unreadable(f"{name} has {facts.st_size:,} bytes, at most {limit:,} are read")
            if facts.st_size > _SMALL and facts.st_size > _free():
                raise Unreadable(f"{name} has {facts.st_size:,} bytes, more than memory is free")
            return source.read(facts.st_size)
    except OSError as error:
        raise Unreadable(f"{name} cannot be read: {error.strerror}") from None


def _free() -> int:
    import psutil  # slow to import, and for large files only

    return int(psutil.virtual_memory().available)
