"""Whether a machine is quiet enough to judge a claim about speed on it."""

from __future__ import annotations

import os
import time

QUIET = 0.05  # of the cores may be busy with something else
_LOOK_SECONDS = 2.0


class OtherPrograms:
    """Cores that were busy with something else than this process and the children that have ended.

    Only the cores that this process may use are looked at; what a virtual machine's host took away
    ("steal") counts as somebody else's, too.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), busy_seconds(), own_seconds()

    def cores(self) -> float | None:
        """Of them, in the mean since the start; None where the system does not tell."""
        busy = busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (own_seconds() - self._ours)
        return max(0.0, others / max(time.monotonic() - self._began, 1e-9))


def others_now() -> float | None:
    """Cores that other programs keep busy at this moment."""
    watch = OtherPrograms()
    time.sleep(_LOOK_SECONDS)
    return watch.cores()


def busy_seconds(path: str = "/proc/stat") -> float | None:
    """Seconds that the usable cores have been busy since the machine began."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    ticks = 0
    for row in (row for row in rows if row and row[0] in names):
        # user nice system idle iowait irq softirq steal; guests are part of user
        user, nice, system, _, _, irq, softirq, steal = map(int, row[1:9])
        ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def why_not_judged(
    cores: int, workers: int, before: float | None, meanwhile: float | None
) -> list[str]:
    """Why a claim about so many workers cannot be judged here; empty when it can.

    Args:
        cores: that may be used.
        workers: the most that the claim speaks of.
        before, meanwhile: cores that other programs kept busy.
    """
    reasons = []
    if cores < workers:
        reasons.append(f"{workers} workers need as many cores, and there are {cores}")
    if before is None or meanwhile is None:
        return [*reasons, "this system does not tell what else runs on it"]
    allowed = QUIET * cores
    for busy, when in ((before, "before it began"), (meanwhile, "meanwhile")):
        if busy > allowed:
            reasons.append(
                f"other programs kept {busy:.2f} of {cores} cores busy {when} "
                f"(quiet is at most {allowed:.2f})"
            )
    return reasons
