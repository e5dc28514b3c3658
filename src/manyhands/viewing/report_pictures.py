"""The pictures of a report: drawn for light and for dark pages, and what the policy does.

Whatever cannot be made (no policy yet, no camera, images for observations) becomes a sentence.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands import seeding
from manyhands.errors import ManyhandsError
from manyhands.policy import Policy, load
from manyhands.viewing import curves, pictures
from manyhands.viewing import report_page as html
from manyhands.viewing.report_page import Picture
from manyhands.viewing.runs import Run

_PLANE, _EPISODE = (5.2, 3.7), (5.2, 4.6)  # inches
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
    made = []
    for theme in (curves.LIGHT, curves.DARK):
        with curves.style(theme, size):
            figure = plt.figure(figsize=inches, layout="constrained")
            try:
                draw(figure, theme)
                data = io.BytesIO()
                # Without a date the same run gives the same page.
                figure.savefig(data, format=kind, dpi=150, transparent=True,
                               metadata={"Date": None} if kind == "svg" else None)  # fmt: skip
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
        return html.section(title, html.paragraph(_because("No pictures of the policy", error)))
    missing: list[str] = []
    try:
        played, film = example(policy, run, video=video, missing=missing)
    except Exception as error:  # the same: a page is to come out whatever it raises
        return html.section(title, html.paragraph(_because("No episode could be played", error)))
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
        intro += f"Maps show it from the circle to the square. {plane.note}"
    if film is not None:
        shown.append(film)
    return html.section(
        title,
        html.paragraph(intro, soft=True),
        html.gallery(shown),
        *(html.paragraph(words, soft=True) for words in missing),
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
