"""One door to environments: Gymnasium, EnvPool, ALE and your own.

`make_vec` for training (clean transitions), `seeded_vector` for a loop of your own (an ordinary
Gymnasium vector env), `check_env` for an environment you have written.
"""

from __future__ import annotations

from manyhands import gymnasium_ids
from manyhands.envs import toys
from manyhands.envs.adapter import ActionMap, Episode, Final, Step, VecAdapter
from manyhands.envs.check import check_env
from manyhands.envs.loop import EnvLoop
from manyhands.envs.make import make_vec, seeded_vector
from manyhands.envs.vector import VectorAdapter

gymnasium_ids.register()
toys.register()

__all__ = [
    "ActionMap",
    "EnvLoop",
    "Episode",
    "Final",
    "Step",
    "VecAdapter",
    "VectorAdapter",
    "check_env",
    "make_vec",
    "seeded_vector",
]
