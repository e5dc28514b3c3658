"""Ape-X: actors fill a replay, each its own shard; learners draw from all of it. arXiv:1803.00933.

    actor 0   envs ─► n-step rows, first priorities ─► shard 0 ─┐
    actor 1   envs ─► n-step rows, first priorities ─► shard 1 ─┼─► main learner: draws by priority
    actor 2   envs ─► n-step rows, first priorities ─► shard 2 ─┘   │            ▲ new priorities
       ▲                                                            ├─► learner 0: its part ─┐
       └─────────── newest weights, every so many steps ────────────└─► learner 1: its part ─┴ sum

Who holds what: the shards lie in memory that actors write and the main learner reads; the tree of
priorities is the main learner's. Several learners share each batch and take the same step: they are
one learner with the whole batch. What moves: every transition once, into shared memory; the weights
when actors look for them; a few numbers about steps and episodes. Asynchronous, but bounded: a
learner that is faster than its actors waits, and so do actors that are faster than their learner,
so that each transition is drawn updates_per_step × batch_size times on average whoever is faster.

Each environment explores with its own ε, or its own noise. An actor that dies is restarted (local
engine); what it had collected is kept or dropped, as lost_shard says, and counted.

    actor.py     what an actor does, and how it runs freely
    learner.py   what the main learner and the others do, and how they run freely
    turns.py     the deterministic clock: on inline, and on local with one actor, actor and learner
                 take turns; there a run repeats to the bit, and so does a resumed one
"""

from __future__ import annotations

from manyhands.strategies.apex import turns
from manyhands.strategies.apex.actor import Actor
from manyhands.strategies.apex.learner import Follower, KeptReplay, MainLearner
from manyhands.strategies.context import Context, Part
from manyhands.strategies.progress import RunProgress


def run(context: Context, progress: RunProgress) -> None:
    if progress.resumed is not None:
        progress.resumed = KeptReplay.for_actors(progress.resumed, len(context.acting))
    if not turns.fits(context):
        part(context, progress).run()
    elif context.part.role == "actor":
        turns.act(context)
    elif context.is_main:
        turns.lead(context, progress)
    else:
        turns.follow(context, progress)


def part(context: Context, progress: RunProgress) -> Part:
    """Freely."""
    if context.part.role == "actor":
        return Actor(context)
    return MainLearner(context, progress) if context.is_main else Follower(context, progress)
