"""Write docs/results from what benchmarks have stored: `make results`.

    python docs/generate/results.py docs/results

Reads benchmarks/results: learning/*.json (learning.py), off_policy.json (off_policy.py),
scaling.json (`manyhands bench scaling`), workers/*.json (workers.py), pendulum/*.json
(pendulum.py), and the figures of others in published.json and founding.json. Each task gets a
curve: the mean over seeds, and a band from the lowest to the highest.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import result_pictures as pictures

STORED = Path(__file__).parents[2] / "benchmarks" / "results"

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
    workers = [json.loads(path.read_text()) for path in sorted(STORED.glob("workers/*.json"))]
    swings = [json.loads(path.read_text()) for path in sorted(STORED.glob("pendulum/*.json"))]
    text = _HEAD + scores(tasks, published) + curves(tasks) + by_workers(workers)
    found = {"index.md": text + pendulum(swings) + updates() + founding()}
    found |= {f"{name(task)}.svg": picture(task) for task in tasks}
    found |= {f"workers-{one['strategy']}.svg": worker_picture(one) for one in workers}
    for one in swings:
        found |= {f"{file}.svg": text for file, text in swing_pictures(one).items()}
    return found


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
            f"{seeds(task)} | {min(minutes):.1f} to {max(minutes):.1f}{beside(task)} | "
            f"{figures.get('minutes', '–')} | {task['steps_per_second']:,}{beside(task)} |"
        )
    return "\n".join(lines) + "\n"


def spread(task: dict[str, Any]) -> str:
    returns = [run["return"] for run in task["runs"]]
    deviation = statistics.stdev(returns) if len(returns) > 1 else 0.0
    return f"{statistics.mean(returns):,.0f} ± {deviation:,.0f}"


def seeds(task: dict[str, Any]) -> str:
    numbers = ", ".join(str(run["seed"]) for run in task["runs"])
    return f"{numbers}{' (they checked the setting)' if task['check'] else ''}"


def beside(task: dict[str, Any]) -> str:
    return " (beside other work)" if task.get("busy") else ""


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


def by_workers(found: list[dict[str, Any]]) -> str:
    """The same curve with 1, 2 and 4 workers: what was expected, and what came."""
    if not found:
        return ""
    parts = [
        "\n## The same curve with 1, 2 and 4 workers\n\nOf a strategy in which all wait for all, "
        "every number of workers should draw the same line, but for rounding; of the others the "
        "bands over seeds should overlap. Workers that learn or serve and do not act are not "
        "counted.\n"
    ]
    for one in found:
        groups = by_acting(one)
        returns = [
            f"{n}: " + ", ".join(f"{run['return']:g}" for run in one["runs"] if run["acting"] == n)
            for n in groups
        ]
        numbers = sorted({run["seed"] for run in one["runs"]})
        said = same(groups) if one["synchronous"] else overlap(groups)
        parts.append(
            f"\n### {one['strategy']}: {one['algorithm']} on {one['env']}\n\n"
            f"![{one['strategy']} with 1, 2 and 4 workers](workers-{one['strategy']}.svg)\n\n"
            f"Seeds {', '.join(map(str, numbers))}, {one['runs'][0]['steps']:,} steps, "
            f"{one['engine']} engine, {one['machine']}. Mean return of the last 100 episodes by "
            f"workers that act: {'; '.join(returns)}. {said}\n\n"
            "<!-- not run: minutes -->\n```bash\n"
            f"python benchmarks/workers.py {one['strategy']} --seeds "
            f"{numbers[0]}..{numbers[-1]} --steps {one['asked']}\n```\n"
        )
    return "".join(parts)


def by_acting(one: dict[str, Any]) -> dict[int, list[list[float]]]:
    """The curves by number of workers that act; of each in the order of seeds."""
    runs = sorted(one["runs"], key=lambda run: (run["acting"], run["seed"]))
    counts = dict.fromkeys(run["acting"] for run in runs)
    return {n: [run["curve"] for run in runs if run["acting"] == n] for n in counts}


def same(groups: dict[int, list[list[float]]]) -> str:
    """How far the curves of several workers are from those of one, seed by seed."""
    first, *others = groups.values()
    apart = [
        abs(x - y)
        for curves in others
        for mine, theirs in zip(first, curves, strict=True)
        for x, y in zip(mine, theirs, strict=True)
    ]
    if not any(apart):
        return "Every curve of several workers is that of one, at all places."
    share = sum(gap > 0 for gap in apart) / len(apart)
    return (
        f"Of all places, {share:.0%} differ from the run with one worker, by {max(apart):g} at "
        "most: sums in another order round differently, and a game in which one action changes "
        "goes on differently."
    )


def overlap(groups: dict[int, list[list[float]]]) -> str:
    """In how many places the band of every number of workers meets that of one."""
    first, *others = ([(min(c), max(c)) for c in zip(*g, strict=True)] for g in groups.values())
    met = [
        low <= top and bottom <= high
        for band in others
        for (low, high), (bottom, top) in zip(first, band, strict=True)
    ]
    return f"The bands of several workers meet that of one in {sum(met)} of {len(met)} places."


def worker_picture(one: dict[str, Any]) -> str:
    groups = {f"{n} worker{'s' * (n > 1)}": curves for n, curves in by_acting(one).items()}
    title = f"{one['strategy']}, {one['algorithm']} on {one['env']}: mean return by workers"
    return pictures.several(title, groups, one["runs"][0]["steps"])


def pendulum(found: list[dict[str, Any]]) -> str:
    """The grid of the second founding document: both rewards, all that it drew."""
    if not found:
        return ""
    parts = ["\n## The pendulum, dense and sparse\n"]
    for one in found:
        names = ["curve", "critic", "maps", "episode", "moving"]
        words = [
            "Mean return of the last 100 episodes",
            "The critic's loss, on a log axis",
            "Torque and value over angle and speed",
            "An episode from hanging down",
            "The same episode, at its pace",
        ]
        shown = "\n\n".join(
            f"{text}:\n\n![{text}](pendulum-{one['reward']}-{file}.svg)"
            for file, text in zip(names, words, strict=True)
        )
        parts.append(
            f"\n### {one['reward']} reward\n\nSeed {one['seed']}, {one['steps']:,} steps, "
            f"one worker, {one['machine']}, torch {one['versions']['torch']}. Upright through the "
            f"second half in {one['upright']} of {one['episodes']} fresh episodes.\n\n{shown}\n\n"
            "<!-- not run: it trains for minutes -->\n```bash\n"
            f"python benchmarks/pendulum.py {one['reward']} --seed {one['seed']}\n```\n"
        )
    return "".join(parts)


def swing_pictures(one: dict[str, Any]) -> dict[str, str]:
    start, title = f"pendulum-{one['reward']}", f"Pendulum, {one['reward']} reward"
    return {
        f"{start}-curve": pictures.curve(f"{title}: mean return", one["curve"]),
        f"{start}-critic": pictures.curve(f"{title}: loss of the critic", one["critic"], log=True),
        f"{start}-maps": pictures.maps(f"{title}: torque and value", one["maps"]),
        f"{start}-episode": pictures.trajectory(f"{title}: an episode", one["episode"]),
        f"{start}-moving": pictures.moving(f"{title}: an episode, moving", one["episode"]),
    }


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


def picture(task: dict[str, Any]) -> str:
    title = f"{task['algorithm']} on {task['env']}: mean return of the last 100 episodes"
    return pictures.several(title, {"": [run["curve"] for run in task["runs"]]}, task["steps"])


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
