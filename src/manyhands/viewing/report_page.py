"""The look of a report: HTML from parts, all in one file, without a script and without a network.

Light and dark follow the reader's system. Pictures come in both; everything else is text and CSS,
so that it stays sharp and wraps on a phone.

Pictures show curves and what the policy does. Whatever cannot be made (no policy yet, no camera,
images for observations) becomes a sentence.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from manyhands import seeding
from manyhands.errors import ManyhandsError
from manyhands.policy import Policy, load
from manyhands.viewing import curves, pictures
from manyhands.viewing.runs import Run

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f7f8; --ink: #1d2125;
  --soft: #5c646c; --line: #dfe3e6; --accent: #0072b2; --good: #007a55; --bad: #b3261e;
  --p0: #0072b2; --p1: #d55e00; --p2: #cc79a7; --p3: #009e73; --p4: #8f98a1; --p5: #e69f00;
  --p6: #7a5195;  --rest: #cfd4d9; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --card: #1f2226; --ink: #e8eaed;
  --soft: #a3abb3; --line: #34393f; --accent: #6cc0f5; --good: #46d6a4; --bad: #ff8a80;
  --p0: #56b4e9; --p1: #f08a3c; --p2: #e69ac6; --p3: #2cc79b; --p4: #7d868f; --p5: #e6b84d;
  --p6: #b79ae0;  --rest: #454b52; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans",
  sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.soft, figcaption, .tile small { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile span { font-size: .8rem; color: var(--soft); }
.tile small { display: block; font-size: .8rem; line-height: 1.35; }
.good b { color: var(--good); } .bad b { color: var(--bad); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.25rem; align-items: start; }
.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; height: auto; }
figure img.film { width: auto; max-width: 100%; margin: 0 auto; border: 1px solid var(--line);
  border-radius: .5rem; }
figcaption { font-size: .85rem; margin-top: .35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem .4rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.wrap td:last-child { white-space: normal; min-width: 12rem; }
td small { color: var(--soft); display: block; }
.bar { display: flex; height: 1.6rem; border-radius: .35rem; overflow: hidden;
  margin: .2rem 0 .9rem; background: var(--rest); }
.bar i { display: block; min-width: 1px; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0; margin: .5rem 0;
  list-style: none; font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .4rem; vertical-align: -.05rem; }
.p0 { background: var(--p0); } .p1 { background: var(--p1); } .p2 { background: var(--p2); }
.p3 { background: var(--p3); } .p4 { background: var(--p4); } .p5 { background: var(--p5); }
.p6 { background: var(--p6); }
.rest { background: var(--rest); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0;
  padding: .7rem .9rem; white-space: pre-wrap; font: .85rem/1.5 ui-monospace, SFMono-Regular,
  "DejaVu Sans Mono", monospace; }
pre.fault { border-color: var(--bad); }
details { margin: .75rem 0; } summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 3rem; font-size: .85rem; color: var(--soft); }
@media (max-width: 40rem) { th, td { padding-right: .6rem; font-size: .82rem; } }
@media print { body { max-width: none; } h2, figure { break-inside: avoid; } }
"""

# CRUCIAL: the page can load nothing that is not in it, whatever a run's names contain.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Picture:
    """An image for light pages and, where it differs, one for dark pages."""

    light: bytes
    dark: bytes | None
    kind: str  # svg+xml, png, gif
    alt: str
    caption: str = ""

    def html(self) -> str:
        film = ' class="film"' if self.kind == "gif" else ""
        image = f'<img{film} src="{self._uri(self.light)}" alt="{escape(self.alt)}">'
        if self.dark is not None:
            dark = f'<source media="(prefers-color-scheme: dark)" srcset="{self._uri(self.dark)}">'
            image = f"<picture>{dark}{image}</picture>"
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        return f"<figure>{image}{caption}</figure>"

    def _uri(self, data: bytes) -> str:
        return f"data:image/{self.kind};base64,{base64.b64encode(data).decode()}"


def page(title: str, subtitle: str, body: Iterable[str], footer: str) -> str:
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            '<link rel="icon" href="data:image/gif;base64,R0lGODlhAQABAAAAACw=">',
            f"<style>{CSS}</style></head><body>",
            f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>',
            *body,
            f"<footer>{escape(footer)}</footer></body></html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str, *, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{escape(text)}</p>" if text else ""


def code(text: str, *, fault: bool = False) -> str:
    kind = ' class="fault"' if fault else ""
    return f"<pre{kind}>{escape(text)}</pre>"


def details(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def tile(name: str, number: str, note: str = "", kind: str = "") -> str:
    small = f"<small>{escape(_minus(note))}</small>" if note else ""
    bold = f"<b>{escape(_minus(number))}</b>"
    return f'<div class="tile {kind}"><span>{escape(name)}</span>{bold}{small}</div>'


def _minus(text: str) -> str:
    return re.sub(r"-(?=[\d.])", "−", text)


def tiles(parts: Iterable[str]) -> str:
    return f'<div class="tiles">{"".join(parts)}</div>'


def gallery(pictures: Sequence[Picture], *, small: bool = False) -> str:
    if not pictures:
        return ""
    inside = "".join(picture.html() for picture in pictures)
    return f'<div class="grid{" small" if small else ""}">{inside}</div>'


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | tuple[str, str]]], kind: str = ""
) -> str:
    """Cells are text, or (text, smaller text under it)."""

    def cell(value: str | tuple[str, str]) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        return f"<td>{escape(value[0])}<small>{escape(value[1])}</small></td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One stacked bar of (colour class, share from 0 to 1, words shown on hovering)."""
    inside = "".join(
        f'<i class="{kind}" style="width:{100 * share:.2f}%" title="{escape(words)}"></i>'
        for kind, share, words in parts
    )
    return f'<div class="bar" role="img">{inside}</div>'


def legend(parts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in parts)
    return f'<ul class="legend">{rows}</ul>'


# -- pictures, and what the policy does ------------------------------------------------------------


_PLANE, _EPISODE = (5.2, 3.7), (5.2, 5.2)  # inches
_LONGEST = 2000  # steps of the example episode
_FILM_WIDTH, _FILM_FPS, _FILM_FRAMES = 320, 25.0, 260
_FILM_BYTES = 4_000_000  # a page that can be sent by mail


def picture(
    draw: Callable[[Any, curves.Theme], None],
    inches: tuple[float, float],
    alt: str,
    *,
    kind: str = "svg",
    size: float = 10.0,
) -> Picture:
    """Draw twice, for light and for dark pages."""
    plt = curves.pyplot()
    made: list[bytes] = []
    places: list[Any] = []
    for theme in (curves.LIGHT, curves.DARK):
        with curves.style(theme, size):
            figure = plt.figure(figsize=inches, layout="constrained")
            try:
                draw(figure, theme)
                if made:  # the same but for its colours: a layout takes as long as a picture
                    figure.set_layout_engine("none")
                    for axes, place in zip(figure.axes, places, strict=True):
                        axes.set_position(place)
                data = io.BytesIO()
                # Without a date the same run gives the same page.
                figure.savefig(data, format=kind, dpi=150, transparent=True,
                               metadata={"Date": None} if kind == "svg" else None)  # fmt: skip
                places = [axes.get_position(original=True) for axes in figure.axes]
            finally:
                plt.close(figure)
        made.append(data.getvalue())
    mime = "svg+xml" if kind == "svg" else kind
    return Picture(made[0], made[1], mime, alt)


def behaviour(run: Run, *, video: bool) -> str:
    """What the policy does: over the plane of states, along an episode, and as a film."""
    title = "Behaviour"
    try:
        policy = load(run.path)
    except Exception as error:  # making the environment runs somebody else's code
        return section(title, paragraph(_because("No pictures of the policy", error)))
    missing: list[str] = []
    try:
        played, film = example(policy, run, video=video, missing=missing)
    except Exception as error:  # the same: a page is to come out whatever it raises
        return section(title, paragraph(_because("No episode could be played", error)))
    shown: list[Picture] = []
    plane = pictures.plane_of(policy, run.experiment.run.env, played)
    intro = (
        f"One episode with the likeliest actions: return {played.total:,.2f} in "
        f"{len(played.actions):,} steps. "
    )
    if isinstance(plane, str):
        missing.append(f"No maps of policy and value: {plane}.")
    else:
        shown = maps(policy, plane, played)
        intro += f"Maps show it from the circle to the square, fading on the way. {plane.note}"
    if film is not None:
        shown.append(film)
    return section(
        title,
        paragraph(intro, soft=True),
        gallery(shown),
        *(paragraph(words, soft=True) for words in missing),
    )


def maps(policy: Policy, plane: pictures.Plane, played: Any) -> list[Picture]:
    steps = len(played.actions)
    cut = (
        f"its first {pictures.SHOWN} of {steps} steps."
        if steps > pictures.SHOWN
        else "step by step."
    )
    captions = {"Episode": cut}

    def over_plane(name: str, draw: Any) -> Callable[[Any, curves.Theme], None]:
        def drawn(figure: Any, theme: curves.Theme) -> None:
            captions[name] = draw(figure.subplots(), policy, plane, played, theme)

        return drawn

    def step_by_step(figure: Any, theme: curves.Theme) -> None:
        pictures.draw_episode(figure, plane, played, theme)

    made = [("Policy", over_plane("Policy", pictures.draw_policy), _PLANE)]
    if hasattr(policy.model, "value"):
        made.append(("Value", over_plane("Value", pictures.draw_value), _PLANE))
    made.append(("Episode", step_by_step, _EPISODE))
    found = []
    for name, draw, size in made:
        drawn = picture(draw, size, f"{name} of the trained policy", kind="png")
        found.append(dataclasses.replace(drawn, caption=f"{name}: {captions[name]}"))
    return found


def example(
    policy: Policy, run: Run, *, video: bool, missing: list[str]
) -> tuple[Any, Picture | None]:
    """An episode, and its film where there can be one; the reason goes to `missing`."""
    from manyhands.viewing.evaluation import few_threads
    from manyhands.viewing.video import BRANCH, play, stage_of

    seed = seeding.integer(run.experiment.run.seed, BRANCH, 0)  # as `manyhands video` begins
    with few_threads(policy):
        if not video:
            missing.append("No film was asked for.")
        else:
            try:
                played, data, cut = _filmed(policy, run, seed)
            except Exception as error:  # drawing runs somebody else's code
                missing.append(_because("No film", error))
            else:
                if len(data) <= _FILM_BYTES:
                    words = "Film: the same episode" + (", its beginning." if cut else ".")
                    return played, Picture(data, None, "gif", "Film of the episode", words)
                missing.append(f"The film is left out: it has {len(data) / 1e6:.1f} MB.")
                return played, None
        stage = stage_of(run.experiment, camera=False)
        try:
            return play(policy, stage, seed, max_length=_LONGEST), None
        finally:
            stage.close()


def _filmed(policy: Policy, run: Run, seed: int) -> tuple[Any, bytes, bool]:
    """(the episode, a GIF, whether the film is shorter than the episode)."""
    from manyhands.viewing.video import Film, Stage, play, stage_of

    stage = stage_of(run.experiment)
    skip = max(1, round(stage.fps / _FILM_FPS))
    states = 0

    def watch(there: Stage) -> None:
        nonlocal states
        # Drawing may cost far more than playing: only what will be shown.
        if states % skip == 0 and reel.frames < _FILM_FRAMES:
            reel.add(there.frame())
        states += 1

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episode.gif"
        try:
            with Film(path, stage.fps / skip, width=_FILM_WIDTH) as reel:
                played = play(policy, stage, seed, max_length=_LONGEST, watch=watch)
        finally:
            stage.close()
        return played, path.read_bytes(), states > _FILM_FRAMES * skip


def _because(what: str, error: BaseException) -> str:
    kind = "" if isinstance(error, ManyhandsError) else f"{type(error).__name__}: "
    return f"{what}: {kind}{str(error).rstrip(' .?!')}."
