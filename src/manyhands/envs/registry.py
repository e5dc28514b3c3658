"""From what the user wrote to something that makes environments, or to words that help.

An environment may be named by a Gymnasium id ("CartPole-v1", "package:Id-v0"), by an import path
to a factory ("package.module:function", "script.py:function"), or given as a callable that returns
a `gymnasium.Env`.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium

from manyhands import streams
from manyhands.engines import calls
from manyhands.envs.spaces import MaskedObservation, first_mask, has_mask
from manyhands.errors import ConfigError, ManyhandsError, SupportError, importing, needs
from manyhands.types import MASK

EnvSource = str | Callable[..., Any]

# Whose `info` is known to have no mask: nobody has to look.
_WITHOUT_MASKS = re.compile(r"ale_py|gymnasium\.envs\.(?!toy_text)")

ATARI_ID = re.compile(r"^ALE/|NoFrameskip-v\d+$|-ram(Deterministic|NoFrameskip)?-v\d+$")
_PETTINGZOO = re.compile(r"pettingzoo[./]|(atari|butterfly|classic|mpe|sisl)[./]\w+_v\d+$")
# Ids of Gym's. What ale-py still registers of them is known, and does not come here.
_OLD_ATARI = re.compile(
    r"(ALE/)?(?P<game>\w+?)(?P<ram>-ram)?(?P<kind>Deterministic|NoFrameskip)?-v(?P<version>[045])$"
)


def resolve(env: EnvSource) -> EnvSource:
    """An id that Gymnasium knows, or a callable; raises `ConfigError` with the nearest names."""
    if not isinstance(env, str):
        if callable(env):
            return env
        raise ConfigError(
            f"an environment is given by its id or by a callable that makes one, not by a "
            f"{type(env).__name__}; for an existing environment class give the class itself"
        )
    if not env:
        raise ConfigError(
            "the environment has no name by which it could be made: this policy was saved by an "
            "Agent in an environment that is not registered. Give the Agent a name for it, such as "
            "env='package.module:function'"
        )
    if calls.knows(env):
        return calls.find(env)
    if ":" in env:
        return _from_import_path(env)
    known_id(env)
    return env


def name_of_env(env: Any) -> tuple[str, dict[str, Any]]:
    """(id, arguments) by which environments like this one are made; an empty id where they are not:
    it is not registered, or wrapped."""
    spec = getattr(env, "spec", None)
    if spec is None or spec.additional_wrappers or spec.id not in gymnasium.registry:
        return "", {}
    for_vectors = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "render_mode")
    kwargs = {k: v for k, v in spec.kwargs.items() if k not in for_vectors}
    if spec.max_episode_steps != gymnasium.registry[spec.id].max_episode_steps:
        kwargs["max_episode_steps"] = spec.max_episode_steps
    plain = all(isinstance(v, bool | int | float | str) for v in kwargs.values())
    return (spec.id, kwargs) if plain else ("", {})


def known_id(env_id: str) -> Any:
    """The spec of a registered id; Atari games are registered when they are first asked for."""
    try:
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as first:
        if register_atari(required=bool(ATARI_ID.search(env_id))):
            try:
                return gymnasium.spec(env_id)
            except gymnasium.error.Error as second:
                raise unknown_id(env_id, list(gymnasium.registry), str(second)) from second
        raise unknown_id(env_id, list(gymnasium.registry), str(first)) from first


def register_atari(*, required: bool) -> bool:
    """Make the Atari games known to Gymnasium; False when ale-py is absent and not required."""
    try:
        import ale_py
    except ImportError as error:
        if required:
            raise needs("ale-py", "atari", error) from error
        return False
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else a banner per process
    gymnasium.register_envs(ale_py)
    return True


def is_atari(env: EnvSource) -> bool:
    """Whether an id that `resolve` has passed is one of ALE's games."""
    if not isinstance(env, str):
        return False
    return str(known_id(env).entry_point).startswith("ale_py")


def unknown_id(env_id: str, known: list[str], detail: str) -> ConfigError:
    """The error for a name nobody knows, with the names that come nearest."""
    if _PETTINGZOO.match(env_id):
        return ConfigError(
            f"there is no environment {env_id!r} of Gymnasium; it looks like a game of PettingZoo: "
            "type: --env-backend pettingzoo"
        )
    newest = _newest(known)
    base, version = _parted(env_id)
    if newest.get(base, env_id) != env_id:
        more = " any more" if 0 <= version < _parted(newest[base])[1] else ""
        return ConfigError(f"there is no environment {env_id!r}{more}; type: --env {newest[base]}")
    old = _OLD_ATARI.match(env_id)
    if old and f"ALE/{old['game']}-v5" in known:
        return ConfigError(_instead_of(env_id, old))
    by_lower = {name.lower(): name for name in newest.values()}
    near = difflib.get_close_matches(env_id.lower(), list(by_lower), n=4, cutoff=0.6)
    if near:
        hint = "did you mean " + ", ".join(by_lower[name] for name in near) + "?"
    else:
        hint = "no registered name is close; for your own environment give 'package.module:Class'"
    return ConfigError(f"there is no environment {env_id!r}: {hint} ({detail})")


def _newest(known: list[str]) -> dict[str, str]:
    """Of each name the version that counts most, of those that still work."""
    found: dict[str, str] = {}
    for env_id in sorted(known, key=lambda env_id: _parted(env_id)[1]):
        spec = gymnasium.registry.get(env_id)
        if spec is None or "_raise_mujoco_py_error" not in str(spec.entry_point):
            found[_parted(env_id)[0]] = env_id
    return found


def _parted(env_id: str) -> tuple[str, int]:
    """Name and version; -1 where it has none."""
    name, _, version = env_id.rpartition("-v")
    return (name, int(version)) if name and version.isdecimal() else (env_id, -1)


def _instead_of(env_id: str, old: re.Match[str]) -> str:
    """What to type today for an id of Gym's that ale-py does not register any more."""
    # What the ids said: v0 repeats the last action one time in four, as today's do, v4 never does.
    # The plain ones skipped 2 to 4 frames by chance, which nobody does any more.
    options: dict[str, Any] = {"obs_type": "ram"} if old["ram"] else {}
    if old["version"] == "4":
        options["sticky_actions"] = 0.0
    if old["kind"] == "NoFrameskip":
        options["frame_skip"] = 1
    words = "".join(f" {name}={value}" for name, value in options.items())
    return f"there is no environment {env_id!r} any more; type: --env ALE/{old['game']}-v5" + (
        f" --env-kwargs{words}, or in Python: env_kwargs={options}" if options else ""
    )


def takes_num_envs(env: EnvSource) -> bool:
    """Whether it is a function that is given how many environments to make: `num_envs` is an
    argument of it, and it is no class of single environments."""
    if isinstance(env, str) or (isinstance(env, type) and issubclass(env, gymnasium.Env)):
        return False
    try:
        return "num_envs" in inspect.signature(env).parameters
    except (TypeError, ValueError):  # written in C, and silent about itself
        return False


def env_factory(env: EnvSource, env_kwargs: dict[str, Any], num_envs: int = 1) -> Callable[[], Any]:
    """A callable without arguments that makes one environment, or a vector of `num_envs`.

    Gymnasium's passive checker and its order enforcer are left out: they are paid for in every
    step. `check_env` says more, once, and the adapters keep reset and step in order themselves.
    """
    if not isinstance(env, str):
        factory = env
        given = {"num_envs": num_envs} if takes_num_envs(env) else {}

        def make_own() -> Any:
            quiet_mujoco()
            return factory(**given, **env_kwargs)

        return _with_masks(make_own, env, env_kwargs)

    spec = copy.deepcopy(known_id(env))
    spec.order_enforce = False

    def make() -> Any:
        quiet_mujoco(spec.entry_point)
        with friendly_errors(env):
            return gymnasium.make(spec, disable_env_checker=True, **env_kwargs)

    if _WITHOUT_MASKS.match(str(spec.entry_point)):
        return make
    return _with_masks(make, env, env_kwargs)


_gives_mask: dict[tuple[Hashable, str], bool] = {}  # in `info`, by what the environment is made of


def _with_masks(
    make: Callable[[], Any], env: EnvSource, env_kwargs: dict[str, Any]
) -> Callable[[], Any]:
    """Environments that give a mask of actions, wherever, show it in the observation.

    Whether `info` has one is seen after a reset only: of an environment that is made for that, so
    that those which are trained in have no episode more.
    """
    key = (env if isinstance(env, Hashable) else id(env), repr(sorted(env_kwargs.items())))

    def made() -> Any:
        one = make()
        if not isinstance(one, gymnasium.Env):
            return one
        if has_mask(one.observation_space):
            part = one.observation_space[MASK]
            return MaskedObservation(one) if isinstance(part, gymnasium.spaces.Tuple) else one
        if key not in _gives_mask:
            _gives_mask[key] = _mask_in_info(make, one)
        return MaskedObservation(one) if _gives_mask[key] else one

    return made


@streams.given_back()  # environments may draw in the making
def _mask_in_info(make: Callable[[], Any], other: Any) -> bool:
    given, found = None, False
    with suppress(Exception):  # whatever fails here fails again where it is reported
        env = make()
        try:
            info = env.reset(seed=0)[1]
            given, found = info.get(MASK), MASK in info
        finally:
            if env is not other:  # a callable may give the same one again
                env.close()
    if found:
        first_mask(given, other.action_space)
    return found


@contextmanager
def friendly_errors(env_id: str) -> Iterator[None]:
    """Turn Gymnasium's ways of saying "not installed" and "gone" into ours."""
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise missing_package(env_id, error) from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise unknown_id(env_id, list(gymnasium.registry), str(error)) from error


def missing_package(env_id: str, error: Exception) -> ManyhandsError:
    """What to type when the id is known but the package behind it is not there."""
    point = str(known_id(env_id).entry_point)
    if "_raise_mujoco_py_error" in point:  # Gymnasium keeps the old ids only to refuse them
        return ConfigError(
            f"{env_id} was built on mujoco-py, which no longer exists; type: --env "
            f"{_newest(list(gymnasium.registry))[_parted(env_id)[0]]}"
        )
    if "mujoco" in point:
        return needs("mujoco", "mujoco", error)
    if "ale_py" in point:
        return needs("ale-py", "atari", error)
    if "box2d" in point:
        return needs("Box2D or pygame", "box2d", error)
    return SupportError(f"{env_id} cannot be made, a package is missing: {error}")


def _from_import_path(path: str) -> EnvSource:
    module_name, _, attribute = path.partition(":")
    calls.refuse_python(path)
    try:
        with importing(module_name):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"the environment {path!r} names the module {module_name!r}, which cannot be "
            f"imported: {error}. The form is 'package.module:function'; is it on PYTHONPATH?"
        ) from error
    found = getattr(module, attribute, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if attribute in gymnasium.registry:  # Gymnasium's own form: "module that registers:id"
        return attribute
    if module_name == "__main__":
        raise ConfigError(
            f"the environment {attribute} was defined in a notebook or at a prompt, and is not in "
            "this process: run the cell that defines it first, or put it into a file and import it"
        )
    names = [n for n in dir(module) if callable(getattr(module, n)) and not n.startswith("_")]
    near = difflib.get_close_matches(attribute, names + list(gymnasium.registry), n=4, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise ConfigError(
        f"the environment {path!r}: module {module_name!r} has no callable {attribute!r} and "
        f"registers no such id{hint}"
    )


# -- what MuJoCo prints ----------------------------------------------------------------------------


def quiet_mujoco(entry_point: Any = "") -> None:
    """Call it before an environment is made. Imports MuJoCo only for an environment of its own.

    Left to itself its C library prints every deprecation of every model file once an environment,
    on every worker, `--quiet` or not, and keeps a MUJOCO_LOG.TXT in the working directory.
    """
    if str(entry_point).startswith("gymnasium.envs.mujoco"):
        with suppress(ImportError):  # making the environment says so, with what to type
            importlib.import_module("mujoco")
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:  # else it is the user's own
        mujoco.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    """Deprecated parts of a model file are its author's affair; an unstable simulation is not."""
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr, flush=True)
