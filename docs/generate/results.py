"""Write docs/results from what benchmarks have stored: `make results`.

    python docs/generate/results.py docs/results

Reads benchmarks/results: learning/*.json (learning.py), off_policy.json (off_policy.py),
scaling.json (`manyhands bench scaling`), and the figures of others in published.json and
founding.json. Each task gets a curve: the mean over seeds, and a band from the lowest to the
highest.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[2] / "benchmarks" / "results"
_WIDE, _HIGH, _LEFT, _BELOW = 520, 220, 56, 26  # of a picture, in pixels

_HEAD = """\
# Results

Written by `make results` from the JSON files in `benchmarks/results`; the commands below make them.
A score is the mean return of the last 100 episodes of a run, while it still explores; ± is the
deviation over seeds. Seeds that "checked the setting" were run to see whether it will do, and prove
less than fresh ones, which are still to come.
"""
_LEGEND = """
The line is the mean over seeds, the band goes from the lowest to the highest.
"""


def pages() -> dict[str, str]:
    """Name of each file -> its text."""
    tasks = [json.loads(path.read_text()) for path in sorted(STORED.glob("learning/*.json"))]
    published = json.loads((STORED / "published.json").read_text())
    found = {"index.md": _HEAD + scores(tasks, published) + curves(tasks) + updates() + founding()}
    return found | {f"{name(task)}.svg": picture(task) for task in tasks}


def name(task: dict[str, Any]) -> str:
    return f"{task['algorithm']}-{task['env']}".lower()


def scores(tasks: list[dict[str, Any]], published: dict[str, Any]) -> str:
    lines = [
        f"\n## {published['title']}\n",
        f"Published: {published['source']}.\n",
        "| task | published | here | seeds | minutes a run | theirs | steps/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in tasks:
        figures = published["figures"].get(task["algorithm"], {})
        theirs = figures.get(task["env"].rsplit("-", 1)[0])
        known = f"{theirs[0]:,} ± {theirs[1]:,}" if theirs else "–"
        minutes = [run["minutes"] for run in task["runs"]]
        lines.append(
            f"| {task['algorithm']} on {task['env']} | {known} | **{spread(task)}** | "
            f"{seeds(task)} | {min(minutes):.1f} to {max(minutes):.1f} | "
            f"{figures.get('minutes', '–')} | {task['steps_per_second']:,} |"
        )
    return "\n".join(lines) + "\n"


def spread(task: dict[str, Any]) -> str:
    returns = [run["return"] for run in task["runs"]]
    deviation = statistics.stdev(returns) if len(returns) > 1 else 0.0
    return f"{statistics.mean(returns):,.0f} ± {deviation:,.0f}"


def seeds(task: dict[str, Any]) -> str:
    numbers = ", ".join(str(run["seed"]) for run in task["runs"])
    return f"{numbers}{' (they checked the setting)' if task['check'] else ''}"


def curves(tasks: list[dict[str, Any]]) -> str:
    parts = [_LEGEND]
    for task in tasks:
        words = " ".join(
            f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
            for key, value in task["options"].items()
        )
        listed = ",".join(str(run["seed"]) for run in task["runs"])
        returns = ", ".join(f"{run['return']:,.0f}" for run in task["runs"])
        parts.append(
            f"\n### {task['algorithm']} on {task['env']}\n\n"
            f"![{task['algorithm']} on {task['env']}]({name(task)}.svg)\n\n"
            f"Seeds {listed}: {returns}. {task['machine']}, one worker, "
            f"torch {task['versions']['torch']}.\n\n"
            f"<!-- not run: minutes a seed -->\n```bash\n"
            f"python benchmarks/learning.py {task['algorithm']} {task['env']} --seeds {listed} "
            f"--steps 1000000 {words}\n```\n"
        )
    return "".join(parts)


def updates() -> str:
    path = STORED / "off_policy.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    versions, machine = found["versions"], found["machine"]
    lines = [
        "\n## Updates of SAC and TD3\n",
        "256 × 256 units, batches of 256, HalfCheetah's shapes, one thread; drawing the batch "
        "counts. Processor time, the two turn by turn in one process, median of "
        f"{found['setting']['rounds']} rounds. {machine['cpu']}, torch {versions['torch']}, "
        f"Stable-Baselines3 {versions['stable-baselines3']}, load average "
        f"{machine['load']:.0f} on two cores.\n",
        "| | ms an update | Stable-Baselines3 | times as fast |",
        "|---|---|---|---|",
    ]
    for algorithm, one in found["found"].items():
        ours, theirs = one["milliseconds"].values()
        low, high = min(one["ratios"]), max(one["ratios"])
        lines.append(
            f"| {algorithm} | {ours:.2f} | {theirs:.2f} | **{one['ratio']:.2f}** ({low:.2f} to "
            f"{high:.2f}) |"
        )
    command = "PYTHONPATH=FOLDER python benchmarks/off_policy.py --out FILE.json"
    return "\n".join(lines) + (
        "\n\nHalf of it is the library of products: here oneDNN is twice as fast as MKL, "
        "which torch's layers use. Where it is not, expect less.\n\n"
        f"<!-- not run: it needs Stable-Baselines3 -->\n```bash\n{command}\n```\n"
    )


def founding() -> str:
    """What the documents that this library began with have measured, beside ours."""
    scaling = json.loads((STORED / "scaling.json").read_text())
    setting, machine = scaling["settings"], scaling["machine"]
    lines = [
        f"\n## {setting['env']}, {setting['algorithm']}: steps a second by number of processes\n",
        f"{machine['cores']} cores of an {machine['cpu']}, median of {setting['rounds']} rounds: "
        "`manyhands bench scaling`.\n",
        "| strategy | processes | steps/s | times one |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {run['strategy']} | {run['workers']} | {run['steps_per_second']:,.0f} | "
        f"{run['speed_up']:.2f} |"
        for run in scaling["runs"]
    ]
    tutorial = json.loads((STORED / "founding.json").read_text())
    lines += [
        f"\n## {tutorial['title']}\n",
        f"| | {tutorial['theirs']} | here, median |",
        "|---|---|---|",
        *(
            f"| {row['who']} | {row['theirs']} | {row['ours']} ({row['seeds']} seeds) |"
            for row in tutorial["rows"]
        ),
        "\nOf Ape-X no such figure is stored.",
    ]
    return "\n".join(lines) + "\n"


# -- pictures --------------------------------------------------------------------------------------


def picture(task: dict[str, Any]) -> str:
    columns = list(zip(*(run["curve"] for run in task["runs"]), strict=True))
    low, high = min(map(min, columns)), max(map(max, columns))
    bottom, top = min(low, 0.0), high + 0.05 * (high - low or 1.0)

    def at(i: int, value: float) -> str:
        x = _LEFT + (i + 1) / len(columns) * (_WIDE - _LEFT - 8)
        y = 8 + (top - value) / (top - bottom) * (_HIGH - _BELOW - 8)
        return f"{x:.1f},{y:.1f}"

    above = [at(i, max(column)) for i, column in enumerate(columns)]
    below = [at(i, min(column)) for i, column in enumerate(columns)]
    line = [at(i, statistics.mean(column)) for i, column in enumerate(columns)]
    marks = []
    for share in (0.0, 0.5, 1.0):
        value = bottom + share * (high - bottom)
        y = float(at(0, value).split(",")[1])
        marks.append(
            f'<line x1="{_LEFT}" x2="{_WIDE - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
        )
    foot = f"{task['steps']:,} steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" '
        f'width="{_WIDE}" height="{_HIGH}" font-family="sans-serif" font-size="11" fill="#777">\n'
        f"<title>{task['algorithm']} on {task['env']}: mean return of the last 100 episodes"
        "</title>\n"
        + "\n".join(marks)
        + f'\n<polygon points="{" ".join(above + below[::-1])}" fill="#3b7dd8" opacity="0.25"/>\n'
        f'<polyline points="{" ".join(line)}" fill="none" stroke="#3b7dd8" stroke-width="2"/>\n'
        f'<text x="{_LEFT}" y="{_HIGH - 8}">0</text>'
        f'<text x="{_WIDE - 8}" y="{_HIGH - 8}" text-anchor="end">{foot}</text>\n</svg>\n'
    )


def main(folder: Path) -> None:
    made = pages()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in made:
            old.unlink()
    for file, text in made.items():
        (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
