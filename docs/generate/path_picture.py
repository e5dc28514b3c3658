"""The path of a step as a picture: which files run between `env.step` and the optimiser's step.

`make docs` writes docs/concepts/path-of-a-step.svg from the table below, and
tests/examples/test_path.py traces the three runs: a file that runs and is not here, or is here and
does not run, fails it. engines/ (how workers talk) and experiment/ (what is written down) are left
out: they are under every path.
"""

from __future__ import annotations

from html import escape

# path -> (algorithm, strategy, how many files it may have)
PATHS = {
    "PPO, allreduce": ("ppo", "allreduce", 15),
    "IMPALA, actor_learner": ("impala", "actor_learner", 17),
    "DQN, Ape-X": ("dqn", "apex", 22),
}
_ALL = ("PPO, allreduce", "IMPALA, actor_learner", "DQN, Ape-X")
_PPO, _IMPALA, _APEX = ((name,) for name in _ALL)
_POLICIES = (*_PPO, *_IMPALA)
_SENT = (*_IMPALA, *_APEX)

# stage -> file -> the paths that it is on; in the order of a step
STAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "the environments step": {
        "envs/loop.py": _ALL,
        "envs/adapter.py": _ALL,
        "streams.py": _ALL,
    },
    "the policy acts": {
        "math/running_stats.py": _ALL,
        "networks/numpy_mlp.py": _ALL,
        "networks/numpy_distributions.py": _POLICIES,
        "strategies/apex/actor.py": _APEX,
    },
    "steps become rows": {
        "collect/rollout.py": _PPO,
        "collect/unroll.py": _IMPALA,
        "strategies/experience.py": _APEX,
        "replay/n_step.py": _APEX,
        "trees.py": _ALL,
    },
    "rows reach who learns": {
        "strategies/messages.py": _SENT,
        "wire.py": _SENT,
        "replay/sharded.py": _APEX,
        "replay/ring.py": _APEX,
        "replay/sampling.py": _APEX,
        "replay/sum_tree.py": _APEX,
    },
    "a loss and its gradient": {
        "math/returns.py": _PPO,
        "math/vtrace.py": _IMPALA,
        "algorithms/base.py": _POLICIES,
        "algorithms/ppo.py": _PPO,
        "algorithms/impala.py": _IMPALA,
        "algorithms/off_policy.py": _APEX,
        "algorithms/dqn.py": _APEX,
        "math/losses.py": _ALL,
    },
    "[seam] and the step": {
        "strategies/allreduce.py": _PPO,
        "strategies/actor_learner.py": _IMPALA,
        "strategies/apex/learner.py": _APEX,
        "strategies/apex/turns.py": _APEX,
        "math/optimiser.py": _ALL,
        "strategies/progress.py": _ALL,
    },
}

_LEFT, _WIDE, _GAP, _LINE, _TOP = 190, 266, 14, 19, 64
_COLOURS = ("#e8eef9", "#eaf5ea", "#f9efe2")


def files_of(path: str) -> set[str]:
    """The files of one path."""
    return {file for files in STAGES.values() for file, on in files.items() if path in on}


def picture() -> str:
    """The SVG: a column for each path, a row for each stage."""
    parts, y = [], _TOP
    for stage, files in STAGES.items():
        columns = [[f for f, on in files.items() if path in on] for path in PATHS]
        high = _LINE * max(len(column) for column in columns) + 18
        parts.append(_text(_LEFT - 20, y + high / 2 + 4, stage, "stage"))
        for number, column in enumerate(columns):
            x = _LEFT + number * (_WIDE + _GAP)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_WIDE}" height="{high}" rx="6" '
                f'fill="{_COLOURS[number]}"/>'
            )
            first = y + high / 2 - _LINE * (len(column) - 1) / 2 + 4
            parts += [_text(x + 14, first + i * _LINE, f, "file") for i, f in enumerate(column)]
            if not column:
                parts.append(_text(x + 14, y + high / 2 + 4, "they stay where they are", "none"))
        y += high
        if stage != list(STAGES)[-1]:
            parts += [
                _text(_LEFT + number * (_WIDE + _GAP) + _WIDE / 2, y + 14, "↓", "arrow")
                for number in range(len(PATHS))
            ]
        y += 20
    heads = [
        _text(_LEFT + i * (_WIDE + _GAP) + 14, 40, f"{path}: {len(files_of(path))} files", "head")
        for i, path in enumerate(PATHS)
    ]
    wide = _LEFT + 3 * (_WIDE + _GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {y}" role="img" '
            'aria-label="Files between env.step and the optimiser, for three runs">',
            "<style>text{font:13px system-ui,sans-serif;fill:#1c2733}"
            ".file{font-family:ui-monospace,monospace;font-size:12px}"
            ".stage{text-anchor:end;fill:#566}.head{font-weight:600;font-size:14px}"
            ".none{fill:#889;font-style:italic}.arrow{text-anchor:middle;fill:#889}</style>",
            f'<rect width="{wide}" height="{y}" fill="#fff"/>',
            *heads,
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'
