"""A terminal as small as the live view needs it: what a person sees after all was written."""

from __future__ import annotations

import io
import re

_CODES = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen(io.StringIO):
    """Says that it is a terminal; `lines()` are those on it, from the very first."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return seen(self.getvalue())


def seen(text: str) -> list[str]:
    """The lines that a terminal without end shows; an unknown code is an error."""
    rows, x, y = [""], 0, 0
    at = 0
    for found in _CODES.finditer(text):
        assert found.start() == at, f"cannot read {text[at : at + 20]!r}"
        at = found.end()
        argument, code, back, down, words = found.groups()
        if back:
            x = 0
        elif down:
            x, y = 0, y + 1  # the terminal's own habit: a new line starts at its beginning
            rows += [""] * (y + 1 - len(rows))
        elif words:
            rows[y] = rows[y][:x].ljust(x) + words + rows[y][x + len(words) :]
            x += len(words)
        elif code == "A":
            assert y >= int(argument or 1), "the cursor would leave the screen"
            y -= int(argument or 1)
        elif code in "JK":
            rows[y] = rows[y][:x]
            rows[y + 1 :] = rows[y + 1 :] if code == "K" else []
        else:
            assert code == "m", f"unknown code {found.group()!r}"  # colours
    assert at == len(text)
    return [row.rstrip() for row in rows]
