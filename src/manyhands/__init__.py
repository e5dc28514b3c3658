"""manyhands: run a reinforcement-learning job on everything you have.

Names are loaded when they are first used, so that `import manyhands` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.gymnasium_ids import register_with_gymnasium

if TYPE_CHECKING:
    from manyhands.agent import Agent
    from manyhands.algorithms.registry import AlgorithmSpec
    from manyhands.blocks import SharedValues, check_actor
    from manyhands.blocks.gradients import GradientServer
    from manyhands.blocks.weights import WeightServer
    from manyhands.engines.launch import launch
    from manyhands.errors import (
        CollectiveError,
        ConfigError,
        ManyhandsError,
        SupportError,
        WorkerError,
    )
    from manyhands.experiment.hooks import Run
    from manyhands.parallel import Parallel
    from manyhands.policy import load
    from manyhands.replay.buffer import PrioritizedReplay, Replay
    from manyhands.replay.sharded import ShardedReplay
    from manyhands.run import resume, train
    from manyhands.sweeps import sweep
    from manyhands.viewing.curves import plot
    from manyhands.viewing.evaluation import evaluate
    from manyhands.viewing.report import report

__version__ = "0.1.0"

register_with_gymnasium()  # never imports it: waits until somebody does

_WHERE = {
    "Agent": "manyhands.agent",
    "AlgorithmSpec": "manyhands.algorithms.registry",
    "Parallel": "manyhands.parallel",
    "WeightServer": "manyhands.blocks.weights",
    "GradientServer": "manyhands.blocks.gradients",
    "SharedValues": "manyhands.blocks",
    "check_actor": "manyhands.blocks",
    "Replay": "manyhands.replay.buffer",
    "PrioritizedReplay": "manyhands.replay.buffer",
    "ShardedReplay": "manyhands.replay.sharded",
    "Run": "manyhands.experiment.hooks",
    "launch": "manyhands.engines.launch",
    "train": "manyhands.run",
    "resume": "manyhands.run",
    "sweep": "manyhands.sweeps",
    "load": "manyhands.policy",
    "evaluate": "manyhands.viewing.evaluation",
    "plot": "manyhands.viewing.curves",
    "report": "manyhands.viewing.report",
    "ManyhandsError": "manyhands.errors",
    "ConfigError": "manyhands.errors",
    "SupportError": "manyhands.errors",
    "WorkerError": "manyhands.errors",
    "CollectiveError": "manyhands.errors",
}
__all__ = [
    "Agent",
    "AlgorithmSpec",
    "CollectiveError",
    "ConfigError",
    "GradientServer",
    "ManyhandsError",
    "Parallel",
    "PrioritizedReplay",
    "Replay",
    "Run",
    "ShardedReplay",
    "SharedValues",
    "SupportError",
    "WeightServer",
    "WorkerError",
    "__version__",
    "check_actor",
    "evaluate",
    "launch",
    "load",
    "plot",
    "report",
    "resume",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from manyhands.devices import no_garbage_collection

        with no_garbage_collection():  # some of them import torch
            return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
