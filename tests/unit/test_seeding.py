"""The seed tree: no two sources of chance ever draw the same numbers."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands import seeding

paths = st.tuples(
    st.sampled_from(["env", "worker", "actor", "learner", "action", "part"]),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 2**40),
)


@given(st.lists(paths, min_size=2, max_size=30, unique=True), st.integers(0, 2**64))
@settings(max_examples=100, deadline=None)
def test_streams_are_distinct(places: list[tuple[str, int, int, int]], seed: int) -> None:
    drawn = {seeding.generator(seed, *p).bytes(16) for p in places}
    assert len(drawn) == len(places)


def test_paths_of_different_length_do_not_meet() -> None:
    """("env", 1) and ("env", 1, 0) are different places of the tree."""
    places = [("env",), ("env", 0), ("env", 0, 0), ("env", 0, 0, 0), ("env", 1), (0,), (0, 0)]
    drawn = {seeding.generator(7, *p).bytes(16) for p in places}
    assert len(drawn) == len(places)


def test_no_seed_twice_in_a_hundred_thousand() -> None:
    """The 128-bit states: 10 roles and seeds x 100 workers x 10 envs x 10 episodes."""
    seen = set()
    for role in ("env", "actor", "learner", "action", "worker"):
        for seed in (1, 2):
            for worker in range(100):
                for env in range(10):
                    for episode in range(10):
                        node = seeding.sequence(seed, role, worker, env, episode)
                        seen.add(node.generate_state(2, np.uint64).tobytes())
    assert len(seen) == 100_000


def test_integers_fit_gymnasium_and_collide_no_more_than_chance() -> None:
    """31 bits: among n draws n²/2³² pairs meet by chance, 2.3 for 100,000."""
    drawn = [seeding.integer(3, "env", w, e, k) for w in range(40) for e in range(50)
             for k in range(50)]  # fmt: skip
    assert all(0 <= x < 2**31 for x in drawn)
    assert len(drawn) - len(set(drawn)) < 12


def test_order_of_asking_does_not_matter() -> None:
    places = [("env", w, e, k) for w in range(4) for e in range(4) for k in range(4)]
    forward = {p: seeding.integer(5, *p) for p in places}
    random.Random(0).shuffle(places)
    assert {p: seeding.integer(5, *p) for p in places} == forward


def test_neighbouring_run_seeds_share_nothing() -> None:
    one = {seeding.integer(1, "env", 0, i, 0) for i in range(1000)}
    two = {seeding.integer(2, "env", 0, i, 0) for i in range(1000)}
    assert not one & two


def everything() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_adding_a_worker_changes_no_other_stream() -> None:
    """A worker's numbers depend on the run's seed and its own place; nobody else is asked."""
    drawn = {}
    for size in (2, 3, 8):
        for rank in range(size):
            seeding.seed_everything(11, "worker", rank)
            drawn.setdefault(rank, []).append(everything())
    for values in drawn.values():
        assert all(v == values[0] for v in values)
    assert len({tuple(v[0]) for v in drawn.values()}) == 8


def test_seed_everything_repeats() -> None:
    seeding.seed_everything(4, "worker", 1)
    first = everything()
    seeding.seed_everything(4, "worker", 1)
    assert everything() == first
    seeding.seed_everything(5, "worker", 1)
    assert not set(everything()) & set(first)


def test_part_from_main_parts_and_repeats() -> None:
    """A script seeds alike on all workers: each gets numbers of its own, the same every run."""
    drawn = []
    for rank in (1, 2, 1):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        if rank:
            seeding.part_from_main(rank)
        drawn.append(everything())
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    main = everything()
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])
    assert not set(drawn[0]) & set(main)


def test_part_from_main_lets_each_library_decide_for_itself() -> None:
    """A script that seeds only torch leaves the others to chance; its actions must repeat."""
    seed = {"python": random.seed, "numpy": np.random.seed, "torch": torch.manual_seed}
    for number, library in enumerate(seed):
        drawn = []
        for _ in range(2):
            random.seed(), np.random.seed(), torch.seed()
            seed[library](0)
            seeding.part_from_main(1)
            drawn.append(everything()[number])
        assert drawn[0] == drawn[1], library
