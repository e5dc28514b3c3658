"""A network of the user's own: every algorithm, every kind of observation, the whole of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import five_workers
import numpy as np
import own_networks
import pytest
import torch
from conftest import PROCESS_ENGINES, SOME_ENGINES_RAY_LATER
from five_workers import APART
from own_networks import SPACES
from training_programs import OWN_NETWORKS, folder_of, read_run

import manyhands as mh
from manyhands import trees
from manyhands.cli.main import main
from manyhands.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("nothing_left")]

# No schedules: one over 192 steps is another than one over 128.
CONSTANT = {"learning_rate": 1e-3}
REPLAY = CONSTANT | {"learning_starts": 32, "batch_size": 8, "replay_size": 500, "beta": 0.5,
                     "checkpoint_replay": True}  # fmt: skip
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": CONSTANT | {"minibatch": 16},
    "a2c": CONSTANT,
    "trpo": {"value_minibatch": 16, "value_learning_rate": 1e-3},
    "impala": CONSTANT,
    "dqn": REPLAY | {"epsilon_steps": 100},
    "ddpg": REPLAY | {"policy_learning_rate": 1e-3},
}
KINDS = ("vector", "image", "dict")
CELLS = [
    *((name, "Features", kind) for name in ("ppo", "impala", "dqn", "ddpg") for kind in KINDS),
    *(("ppo", "PolicyValue", kind) for kind in KINDS),
    *(("dqn", "QValues", kind) for kind in KINDS),
    ("a2c", "PolicyValue", "vector"),
    ("trpo", "PolicyValue", "dict"),
    ("impala", "PolicyValue", "vector"),
]


def options_of(algorithm: str, kind: str, **more: Any) -> dict[str, Any]:
    kwargs = {"kind": kind, "continuous": algorithm == "ddpg"}
    options = {"env": "own_networks:Seen", "env_kwargs": kwargs, "num_envs": 4, "quiet": True,
               "rollout_length": 16, "network": "own_networks:Features",
               "network_kwargs": {"width": 5}, "tensorboard": False}  # fmt: skip
    return options | ALGORITHMS[algorithm] | more


def train(algorithm: str, kind: str, folder: Path, steps: int, **more: Any) -> Any:
    options = {"engine": "inline"} | options_of(algorithm, kind, **more)
    return mh.train(algorithm, **options, steps=steps, run_dir=str(folder))


def weights(run: Any) -> bytes:
    return Path(run.run_dir, "policy.safetensors").read_bytes()


@pytest.mark.parametrize(("algorithm", "network", "kind"), CELLS)
def test_it_trains_resumes_to_the_bit_and_is_loaded(
    algorithm: str, network: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"own_networks:{network}"
    whole = train(algorithm, kind, tmp_path / "whole", 192, network=name)
    half = train(algorithm, kind, tmp_path / "half", 128, network=name)
    mh.resume(half.run_dir, steps=192)
    assert weights(whole) == weights(half)
    policy = mh.load(whole.run_dir)
    assert any(key.endswith("layers.0.weight") for key in policy.model.state_dict())
    space = SPACES[kind]
    space.seed(1)
    seen = space.sample()
    action = policy.act(seen)
    assert policy.action_space.contains(action)
    assert np.isfinite(policy.value(seen))
    exported = torch.jit.load(str(policy.export(tmp_path / "policy.pt")))
    parts = [seen[key] for key in sorted(seen)] if isinstance(seen, dict) else [seen]
    given = exported(*(torch.from_numpy(np.asarray(part)[None]) for part in parts))
    np.testing.assert_allclose(given.numpy()[0], action, atol=1e-5)
    if network != "Features":
        assert main(["evaluate", str(whole.run_dir), "--episodes", "2"]) == 0
        assert "return" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("algorithm", "network", "kind", "continuous"),
    [
        ("ppo", "Features", "dict", True),
        ("ppo", "PolicyValue", "vector", True),
        ("dqn", "QValues", "image", False),
    ],
)
def test_onnx_acts_as_the_policy(
    algorithm: str, network: str, kind: str, continuous: bool, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run = train(algorithm, kind, tmp_path / "run", 64, network=f"own_networks:{network}",
                env_kwargs={"kind": kind, "continuous": continuous})  # fmt: skip
    policy = mh.load(run.run_dir)
    session = runtime.InferenceSession(str(policy.export(tmp_path / "policy.onnx")))
    space = SPACES[kind]
    for rows in (1, 5):
        space.seed(rows)
        drawn = [space.sample() for _ in range(rows)]
        batch: Any = trees.stack(drawn)
        given = batch if isinstance(batch, dict) else {"observation": batch}
        (found,) = session.run(["action"], given)
        np.testing.assert_allclose(found, policy.act_batch(batch), atol=1e-5)


@pytest.mark.parametrize("name", ["policy.pt", "policy.onnx"])
def test_a_constant_number_of_rows_is_not_exported_in_silence(name: str, tmp_path: Path) -> None:
    if name.endswith("onnx"):
        pytest.importorskip("onnxscript")
    run = train("ppo", "vector", tmp_path / "run", 64, network="own_networks:CountsRows")
    with pytest.raises(ConfigError, match=r"any number of rows.*x\.shape\[0\]"):
        mh.load(run.run_dir).export(tmp_path / name)
    assert not (tmp_path / name).exists()


# -- every strategy, every engine ------------------------------------------------------------------


@pytest.mark.parametrize("engine", PROCESS_ENGINES)
def test_every_engine_learns_the_same(engine: str) -> None:
    for name in OWN_NETWORKS:
        inline, learned = (
            read_run(folder_of(one, 2) / "own networks" / name).policy for one in ("inline", engine)
        )
        assert all(np.isfinite(value).all() for value in inline.values()), name
        assert all(np.array_equal(value, inline[k]) for k, value in learned.items()), name


def cells_apart() -> list[Any]:
    found = []
    for engine in SOME_ENGINES_RAY_LATER:
        name = engine.values[0]  # type: ignore[attr-defined]
        for case in APART:
            marks = list(engine.marks)  # type: ignore[attr-defined]
            if name == "local" and case in five_workers.SLOW[name]:
                marks.append(pytest.mark.slow)
            found.append(pytest.param(name, case, marks=marks, id=f"{name}-{case}"))
    return found


@pytest.mark.parametrize(("engine", "case"), cells_apart())
def test_those_that_wait_for_nobody(engine: str, case: str, tmp_path: Path) -> None:
    if engine == "inline":
        folder, options = tmp_path / "run", five_workers.with_own_network(*APART[case])
        options |= {"workers": 3, "steps": 300, "engine": engine, "run_dir": str(folder)}
        mh.train(APART[case][0], **options)
    else:
        folder = five_workers.folder_of(engine, case)
    assert json.loads((folder / "summary.json").read_text())["updates"] >= 3
    assert mh.load(folder).act(np.zeros(3, np.float32)) is not None


def test_a_memory_behind_it(tmp_path: Path) -> None:
    run = train("impala", "vector", tmp_path / "run", 128, lstm=4)
    assert mh.load(run.run_dir).act(np.zeros(3, np.float32)) in range(3)


def test_a_class_is_given_by_name_or_as_it_is(tmp_path: Path) -> None:
    named = train("ppo", "vector", tmp_path / "named", 64)
    given = train("ppo", "vector", tmp_path / "given", 64, network=own_networks.Features)
    assert weights(named) == weights(given)
    own = lambda *spaces, width: own_networks.Features(*spaces, width=width)  # noqa: E731
    here = train("ppo", "vector", tmp_path / "here", 64, network=own)
    assert weights(named) == weights(here)  # inline, it need not be sent
    with pytest.raises(ConfigError, match="a lambda cannot be sent"):
        train("ppo", "vector", tmp_path / "l", 64, network=lambda *s: None, engine="local")


@pytest.mark.parametrize(
    ("algorithm", "network", "row"),
    [
        ("ppo", "Features", "own_networks:Features for features, 64 parameters"),
        ("ppo", "PolicyValue", "own_networks:PolicyValue for policy and value, 64 parameters"),
        ("dqn", "QValues", "own_networks:QValues for Q values, 38 parameters"),
        # As many features as there are actions are features.
        ("dqn", "Features", "own_networks:Features for features, 24 parameters"),
    ],
)
def test_the_start_table_says_what_it_is_taken_for(
    algorithm: str, network: str, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    width = 3 if (algorithm, network) == ("dqn", "Features") else 5
    train(algorithm, "vector", tmp_path / "run", 64, network=f"own_networks:{network}",
          network_kwargs={"width": width}, quiet=False)  # fmt: skip
    assert re.search(f"^network +{row}$", capsys.readouterr().out, re.MULTILINE)


def test_initial_weights_come_from_the_seed_whoever_draws_them(tmp_path: Path) -> None:
    own = {"network": "own_networks:drawn_by_numpy", "network_kwargs": {}}
    runs = [
        train("ppo", "vector", tmp_path / "quiet", 64, **own),
        train("ppo", "vector", tmp_path / "not quiet", 64, quiet=False, **own),
        train("ppo", "vector", tmp_path / "another seed", 64, seed=2, **own),
    ]
    assert weights(runs[0]) == weights(runs[1]) != weights(runs[2])


def test_normalised_observations_are_float32(tmp_path: Path) -> None:
    run = train("ppo", "precise", tmp_path / "run", 64, normalize_observations=True,
                network="own_networks:linear", network_kwargs={})  # fmt: skip
    assert mh.load(run.run_dir).act(np.zeros(3)) in range(3)


# -- wrong ones ------------------------------------------------------------------------------------

WRONG = [
    ("ppo", "Idle", r"without a gradient.*features do not depend: forgotten.bias, forgotten.wei"),
    ("ppo", "Moody", r"features of \(3, 5\) for 3 observations, then features of \(3, 4\) for 3"),
    ("ppo", "Flat", r"features of shape \(3,\) for 3 observations; \[3, F\], one row an obs"),
    ("ppo", "Pair", r"a NoneType as values for 3 observations; a tensor of torch.float32 is exp"),
    ("ppo", "Triple", r"gave a tuple as features for 3 observations; a tensor of torch.float32"),
    ("ppo", "Wide", r"parameters of shape \(3, 4\) for 3 obs.*\[3, 3\] \(one for each action\) is"),
    ("ppo", "Values", r"gave values of shape \(3, 3\) for 3 obs.*; \[3\] or \[3, 1\] is expected"),
    ("dqn", "WideQ", r"Q values of shape \(3, 2\) for 3 observations; \[3, 3\] \(one for each ac"),
    ("ppo", "Detached", r"gives features that depend on none of its parameters; is there a deta"),
    ("ppo", "DetachedValue", r"gives values that depend on none of its parameters"),
    ("ppo", "Mixes", r"other features for an observation when others are beside it; rows must n"),
    ("ppo", "OneRow", r"features of shape \(6,\) for 1 observation; \[1, F\]"),
    ("ppo", "NotFinite", r"gave features that are not finite for 3 obs.*; a finite number is exp"),
    ("ppo", "Double", r"gave a tensor of torch.float64 as features.*; a tensor of torch.float32"),
    ("ppo", "Statistics", r"buffers that change when it is called: 1.num_batches_tracked.*LayerN"),
    ("ppo", "Raises", r"failed in forward, given observations \(3, 3\) of torch.float32: Runtime"
                      r"Error: mat1 and mat2 .*\(own_networks.py, line \d+\)"),
    ("ppo", "doubles", r"parameters of torch.float64 \(layers.0.weight\), and float32 is expected"),
    ("ppo", "frozen", r"no parameters that can be trained"),
    ("ppo", "no_module", r"gave a str; a function or class"),
    ("ppo", "fails", r"failed: RuntimeError: the user's own trouble \(own_networks.py, line \d+"),
    ("ppo", "one_space", r"cannot be called with \(observation_space, action_space\): too many po"
                         r"sitional arguments. It is one_space\(observation_space"),
    ("ppo", "the_same", r"gave the same module twice; make a new one in every call"),
    ("ppo", "nowhere", r"own_networks:nowhere cannot be found: module 'own_networks' has no attr"),
    ("ppo", "QValues", r"gives Q values, and ppo takes features .*, or policy and value .a pair"),
    ("dqn", "PolicyValue", r"gives policy and value, and dqn takes features .*, or Q values .*Tru"),
    ("ddpg", "PolicyValue", r"gives policy and value, and ddpg takes features \(one tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "name", "words"), WRONG)
def test_a_wrong_one_is_said_before_anything_starts(
    algorithm: str, name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(algorithm, "vector", tmp_path / "run", 64, network=f"own_networks:{name}",
              network_kwargs={})  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("algorithm", "more", "words"),
    [
        ("trpo", {"network_kwargs": {"shared": True}},
         r"trpo needs separate networks.*own_networks:PolicyValue both depend on policy_feat"),
        ("ppo", {"shared_network": True}, "decides itself what they share; type: --no-shared-net"),
        ("impala", {"lstm": 4}, r"gives policy and value, and impala --lstm takes features"),
        ("ppo", {"env_kwargs": {"kind": "vector", "continuous": True}, "network": "Wide"},
         r"\[3, 4\] \(2 means, then 2 logarithms of standard deviations\) is expected"),
        ("ppo", {"network_kwargs": {"widht": 5}},
         r"cannot be called with \(observation_space, action_space, widht=5\): got an unexpected "
         r"keyword argument 'widht'. It is PolicyValue\(observation_space"),
        ("ppo", {"network": "build", "network_kwargs": {}}, r"cannot be found: module"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(
    algorithm: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    network = f"own_networks:{more.pop('network', 'PolicyValue')}"
    with pytest.raises(ConfigError, match=words):
        train(algorithm, "vector", tmp_path / "run", 64, network=network, **more)
    assert not (tmp_path / "run").exists()


def test_policy_and_value_may_share_what_they_like(tmp_path: Path) -> None:
    run = train("ppo", "vector", tmp_path / "run", 64, network="own_networks:PolicyValue",
                network_kwargs={"shared": True})  # fmt: skip
    assert mh.load(run.run_dir).model.shared


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("moved.nets:build", r"cannot be found.*folder that holds moved.*PYTHONPATH=THAT_FOLDER"),
        ("/moved/script.py:build", r"/moved/script.py cannot be found.*after network = in the run"),
        ("build", r"not of the form module:function; type: --network package.module:build"),
    ],
)
def test_a_run_whose_network_is_not_there_says_what_to_type(
    network: str, words: str, tmp_path: Path
) -> None:
    run = train("ppo", "vector", tmp_path / "run", 64)
    config = Path(run.run_dir, "config.toml")
    config.write_text(config.read_text().replace("own_networks:Features", network))
    for use in (mh.load, lambda folder: mh.resume(folder, steps=128)):
        with pytest.raises(ConfigError, match=words):
            use(run.run_dir)
