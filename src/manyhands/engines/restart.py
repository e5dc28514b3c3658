"""Workers that are started again when they are killed, while the others go on.

Only where the others do not wait for them: the actors of an asynchronous run. One that raised an
error is not started again: it would raise it again, and the user is to see it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

RESTARTS, WINDOW = 5, 60.0  # so often in so many seconds; more is no accident
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0

LineFilter = Callable[[bytes], bytes]


@dataclass
class Again:
    """How to start one worker again, and how often it was."""

    command: list[str]
    env: dict[str, str]
    lives: int = 0
    deaths: list[float] = field(default_factory=list)
    filters: tuple[LineFilter | None, LineFilter | None] = (None, None)

    def allowed(self) -> bool:
        """Note a death; whether it is one of few."""
        now = time.monotonic()
        self.deaths = [*(t for t in self.deaths if now - t < WINDOW), now]
        return len(self.deaths) <= RESTARTS

    def start(self) -> subprocess.Popen[bytes]:
        """The next life. The more deaths there were, the longer the pause before it."""
        self.lives += 1
        time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (len(self.deaths) - 1)))
        # WHY no preexec_fn: threads run by now, and only a plain spawn is safe beside them. The
        # worker itself asks to die with us.
        return subprocess.Popen(
            self.command,
            env=self.env | {"MANYHANDS_LIFE": str(self.lives)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
