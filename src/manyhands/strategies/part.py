"""What one worker does in its role, a piece at a time.

    with part:
        while part.goes_on():
            part.stepper.fill()      where it acts: until there is enough to make something of
            part.update()            learns from it, sends it, or takes what others have sent

`manyhands train` runs this loop. In a loop of their own (agent.py) users step the environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from manyhands.envs.adapter import Stepper
from manyhands.strategies.context import Context


class Part(ABC):
    """One worker's part in a strategy."""

    context: Context
    stepper: Stepper | None = None  # its policy in its environments; None: it does not act

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether there is more to do, as far as this worker knows."""

    @abstractmethod
    def update(self) -> None:
        """With a stepper, once that is full. Waits for others where the role does."""

    def close(self) -> None:  # noqa: B027 (not every role has anything to say)
        """The end, which the others are told; waits for them where they wait for this one."""

    def release(self) -> None:  # noqa: B027 (nor to give back)
        """Give back what was taken, however it has ended."""

    def run(self) -> None:
        """All of it, in environments of our own."""
        with self:
            while self.goes_on():
                if self.stepper is not None:
                    with self.context.phases("rollout"):
                        self.stepper.fill()
                self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.release()
