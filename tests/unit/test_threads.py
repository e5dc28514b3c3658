"""One thread a process while a run lasts, and the user's own number afterwards."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap

import pytest

from manyhands.devices import THREAD_VARIABLES as VARIABLES

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="on one core nothing has a second thread"
)

COUNTS = """
    import os, sys
    import gymnasium, numpy, torch
    from threadpoolctl import threadpool_info
    import manyhands as mh

    def threads():
        return [*(pool["num_threads"] for pool in threadpool_info()), torch.get_num_threads()]

    class Counts(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(2)
        seen = set()
        fails = False

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return numpy.zeros(2, numpy.float32), {}

        def step(self, action):
            Counts.seen.add(tuple(threads()))
            if Counts.fails:
                raise RuntimeError("on purpose")
            return numpy.zeros(2, numpy.float32), 1.0, False, False, {}

    def train(folder):
        mh.train("a2c", env="__main__:Counts", workers=2, num_envs=2, steps=20, quiet=True,
                 engine="inline", tensorboard=False, run_dir=folder)

    if __name__ == "__main__":
        before, variables = threads(), dict(os.environ)
        torch.set_num_threads(torch.get_num_threads())
        train(sys.argv[1] + "/well")
        during = sorted(Counts.seen)
        after = threads()
        Counts.fails = True
        try:
            train(sys.argv[1] + "/badly")
        except mh.WorkerError:
            pass
        print(before, during, after, threads(), dict(os.environ) == variables, sep="; ")
"""


def uncapped(code: str, *args: str, **variables: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in VARIABLES} | variables
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_inline_has_one_thread_while_it_runs(tmp_path: object) -> None:
    said = uncapped(COUNTS, str(tmp_path)).split("; ")
    before, during, after, after_a_failure, same_variables = said
    assert max(map(int, before.strip("[]").split(", "))) > 1
    ones = ", ".join("1" for _ in before.split(","))
    assert during == f"[({ones})]"
    assert after == before
    assert after_a_failure == before
    assert same_variables == "True"


def test_who_has_said_how_many_gets_them(tmp_path: object) -> None:
    said = uncapped(COUNTS, str(tmp_path), OMP_NUM_THREADS="2").split("; ")
    assert {*said[1].strip("[()]").split(", ")} == {"2"}


@pytest.mark.slow
@pytest.mark.alone
def test_inline_takes_the_processor_time_of_local(tmp_path: object) -> None:
    code = """
        import sys
        import manyhands as mh
        if __name__ == "__main__":
            mh.train("ppo", env="CartPole-v1", workers=1, engine=sys.argv[1], steps=12_288,
                     quiet=True, run_dir=f"{sys.argv[2]}/{sys.argv[1]}")
    """
    spent = {}
    for engine in ("inline", "local"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        uncapped(code, engine, str(tmp_path))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent[engine] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent["inline"] <= 1.3 * spent["local"], spent
