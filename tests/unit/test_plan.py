"""`manyhands plan`: its simulation where the answer is known on paper, and its words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli import plan as command
from manyhands.cli.main import main
from manyhands.cli.train import parse
from manyhands.errors import ConfigError
from manyhands.strategies import registry
from manyhands.strategies.simulate import (
    Cluster,
    Costs,
    Load,
    actor_learner,
    allreduce,
    apex,
    gather,
    gradient_server,
    single,
)

COSTS = Costs(
    act=0.0,
    step=1e-4,
    update=0.0,
    update_row=5e-5,
    other=0.0,
    apply=1e-3,
    meetings=10,
    batch=1000,
    row_bytes=100,
    weight_bytes=40_000,
    message=0.0,
    bandwidth=1e15,
)
ONE_HOST = Cluster(hosts=1, cores=4096)


def shared(actors: int, extra: int = 0, **more: int) -> Load:
    """1,000 rows of an update, divided."""
    return Load(actors + extra, actors, 1, 1000 // actors, **more)


def test_every_strategy_has_a_model() -> None:
    for spec in registry.SPECS.values():
        assert spec.load_model().__name__ == spec.name


def test_one_worker_is_a_sum() -> None:
    out = single(dataclasses.replace(COSTS, other=0.05, act=1e-4), shared(1), ONE_HOST)
    assert out.steps_per_second == pytest.approx(1000 / (0.1 + 0.1 + 0.05 + 0.05))
    assert out.bottleneck == "environments"


@pytest.mark.parametrize("workers", [2, 10, 100])
def test_gather_is_amdahl(workers: int) -> None:
    out = gather(COSTS, shared(workers), ONE_HOST)
    assert out.steps_per_second == pytest.approx(1000 / (0.1 / workers + 0.05), rel=1e-6)
    assert workers == 2 or out.bottleneck == "learner"


def test_gather_is_bound_by_the_wire_into_the_main_host() -> None:
    slow = Cluster(hosts=10, cores=1, latency=0.0, bandwidth=1e5)  # 1,000 rows a second
    out = gather(dataclasses.replace(COSTS, weight_bytes=0), shared(10), slow)
    # Nine tenths of the rows come over it: 0.9 s, and 0.06 s of work.
    assert out.steps_per_second == pytest.approx(1000 / (0.9 + 0.01 + 0.05), rel=1e-6)
    assert out.bottleneck == "messages"
    assert out.bytes_per_second == pytest.approx(0.9e5 / 0.96, rel=1e-6)


def test_allreduce_shares_all_but_meetings() -> None:
    assert allreduce(COSTS, shared(10), ONE_HOST).steps_per_second == pytest.approx(1000 / 0.015)
    far = Cluster(hosts=10, cores=1, latency=1e-3, bandwidth=1e15)
    out = allreduce(COSTS, shared(10), far)
    assert out.steps_per_second == pytest.approx(1000 / (0.015 + 20 * 2e-3 * 3.3219), rel=1e-3)
    assert out.bottleneck == "meetings"


def test_processors_are_shared_and_crowded() -> None:
    two = Cluster(hosts=1, cores=2)
    crowded = dataclasses.replace(COSTS, crowd=((0.0, 1.0), (0.5, 1.0), (1.0, 1.25)))
    assert allreduce(COSTS, shared(4), two).steps_per_second == pytest.approx(
        allreduce(COSTS, shared(2), two).steps_per_second)  # fmt: skip
    assert allreduce(crowded, shared(2), two).steps_per_second == pytest.approx(
        allreduce(COSTS, shared(2), two).steps_per_second / 1.25)  # fmt: skip
    assert allreduce(crowded, shared(1), two).steps_per_second == pytest.approx(
        allreduce(COSTS, shared(1), two).steps_per_second)  # fmt: skip


def test_asynchronous_work_gets_what_others_leave() -> None:
    """Three actors and a learner that mostly waits, on two processors: what they do is divided by
    two, not by four."""
    out = actor_learner(COSTS, Load(4, 3, 1, 100), Cluster(hosts=1, cores=2))
    assert out.steps_per_second == pytest.approx(2 / (COSTS.step + COSTS.update_row), rel=0.03)
    alone = actor_learner(COSTS, Load(2, 1, 1, 100), Cluster(hosts=1, cores=1))
    assert alone.steps_per_second == pytest.approx(1 / (COSTS.step + COSTS.update_row), rel=0.03)


def test_meetings_are_as_long_as_measured() -> None:
    """Between two numbers of workers on a straight line; beyond, it goes on."""
    costs = dataclasses.replace(COSTS, meet=((1, 0.0, 0.0), (2, 1e-5, 1e-4), (4, 3e-5, 5e-4)))
    for workers, small, sums in ((2, 1e-5, 1e-4), (3, 2e-5, 3e-4), (10, 9e-5, 1.7e-3)):
        out = allreduce(costs, dataclasses.replace(shared(workers), length=1000), ONE_HOST)
        rows = 1000 * workers
        seconds = 1000 * 1.5e-4 + 10 * workers * sums + 10 * small  # gradients, and beside them
        assert out.steps_per_second == pytest.approx(rows / seconds)


def test_a_push_costs_its_calls_however_small_it_is() -> None:
    """Without minibatches an update has one gradient step, whatever its rows."""
    costs = dataclasses.replace(COSTS, update=0.01, meetings=1, apply=0.0)
    out = gradient_server(costs, Load(11, 10, 1, 100), ONE_HOST)
    assert out.steps_per_second == pytest.approx(10 * 100 / (0.015 + 0.01), rel=0.02)


def test_messages_take_time_of_both_sides() -> None:
    costs = dataclasses.replace(COSTS, message=1e-3)
    out = actor_learner(costs, Load(2, 1, 1, 100), ONE_HOST)
    assert out.steps_per_second == pytest.approx(100 / 0.012, rel=0.02)  # rows, and weights
    costs = dataclasses.replace(costs, step=1e-6)
    out = actor_learner(costs, Load(2, 1, 1, 100), ONE_HOST)
    assert out.steps_per_second == pytest.approx(100 / (0.005 + 0.002), rel=0.02)


def test_a_server_takes_one_push_after_the_other() -> None:
    few = gradient_server(COSTS, Load(5, 4, 1, 100), ONE_HOST)
    assert few.steps_per_second == pytest.approx(4 * 100 / 0.015, rel=0.05)
    assert few.lag == pytest.approx(4, abs=0.5)  # all have pushed in between, itself included
    assert few.bottleneck == "environments"
    many = gradient_server(COSTS, Load(65, 64, 1, 100), ONE_HOST)
    assert many.steps_per_second == pytest.approx(100 / COSTS.apply, rel=0.02)
    assert many.bottleneck == "server"
    assert many.lag > 60


def test_a_learner_that_is_slower_bounds_its_actors() -> None:
    for model in (actor_learner, apex):
        few = model(COSTS, Load(2, 1, 1, 100), ONE_HOST)
        assert few.steps_per_second == pytest.approx(1e4, rel=0.02)
        many = model(COSTS, Load(17, 16, 1, 100), ONE_HOST)
        assert many.steps_per_second == pytest.approx(1 / COSTS.update_row, rel=0.02)
        assert (few.bottleneck, many.bottleneck) == ("environments", "learner")
        # The queues are full, and each has one more in its hand.
        assert few.lag < 2 < many.lag < 3 * 16 + 2


def test_a_thin_wire_is_named() -> None:
    thin = Cluster(hosts=17, cores=1, latency=1e-4, bandwidth=1e6)
    costs = dataclasses.replace(COSTS, weight_bytes=100)
    out = actor_learner(costs, Load(17, 16, 1, 100), thin)
    assert out.steps_per_second == pytest.approx(1e4, rel=0.03)  # 100 bytes each, all over it
    assert out.bottleneck == "the wire to the learner"


def test_the_whole_table_and_the_cheapest() -> None:
    one = parse(["ppo", "--env", "CartPole-v1", "--num-envs", "64", "--workers", "1"])
    rows = command.simulate(one, COSTS, Cluster(hosts=4, cores=16))
    assert {row[0] for row in rows} == {"single", "gather", "allreduce"}
    assert max(row[1] for row in rows) == 4096
    text = "\n".join(command.table(one, Cluster(hosts=4, cores=16), rows, 20_000))
    assert "1000 Mbit/s and 100 µs between them" in text
    assert "20,000 steps/s: --strategy allreduce --workers 4 is enough" in text
    assert "nobody reaches 1,000,000,000 steps/s" in command.cheapest(rows, 1e9)
    a3c = parse(["a2c", "--env", "CartPole-v1", "--num-envs", "64", "--workers", "1"])
    assert "gradient_server" in {row[0] for row in command.simulate(a3c, COSTS, ONE_HOST)}


def test_costs_of_something_else_are_refused(tmp_path: Path) -> None:
    one = parse(["ppo", "--env", "CartPole-v1", "--workers", "1"])
    file = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match=r"nothing has been measured .* add --measure"):
        command.load(one, str(file))
    facts = {"of": command._key(one), "costs": dataclasses.asdict(COSTS)}
    file.write_text(json.dumps(facts))
    assert command.load(one, str(file)) == COSTS
    file.write_text(json.dumps(facts | {"of": "dqn"}))
    with pytest.raises(ConfigError, match="was measured for dqn"):
        command.load(one, str(file))
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no file of costs"):
        command.load(one, str(file))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "ppo", "--env", "CartPole-v1", "--costs", str(tmp_path / "costs.json")]
    one = parse(["ppo", "--env", "CartPole-v1", "--workers", "1"])
    facts = {"of": command._key(one), "costs": dataclasses.asdict(COSTS)}
    (tmp_path / "costs.json").write_text(json.dumps(facts))
    assert main([*words, "--json", str(tmp_path / "out.json"), "--hosts", "2"]) == 0
    assert "ppo on CartPole-v1, 2 hosts of" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 25
    assert main([*words, "--hosts", "0"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--workers 0", "--workers: plan goes through every strategy with 1 to 4,096 workers"),
        ("-n 4", "-n: plan goes through every strategy"),
        ("--strategy nosuch", "--strategy: plan goes through every strategy"),
        ("--engine=ray", "--engine: plan goes through every strategy"),
        ("--hosts 0", "--hosts 0: at least 1 is needed"),
        ("--cores -2", "--cores -2: at least 1 is needed"),
        ("--link-mbit -5", "--link-mbit -5: a number above 0 is needed"),
        ("--link-mbit nan", "--link-mbit nan: a number above 0 is needed"),
        ("--link-latency-us -1", "--link-latency-us -1: a number from 0 on is needed"),
        ("--rate 0", "--rate 0: a number above 0 is needed"),
        ("--rate inf", "--rate inf: a number above 0 is needed"),
        ("--picture it.doc", "--picture it.doc: a .png, .svg or .pdf is expected"),
        ("--json not/there.json", "not/there.json cannot be written"),
        ("--measure --costs not/there.json", "not/there.json cannot be written"),
        ("--costs not/there.json", "nothing has been measured (not/there.json is not there); add"),
        ("--costs .", ". is no file of costs"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "ppo", "--env", "CartPole-v1", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_words_name_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--env", "CartPole-v1"]) == 2
    assert "the algorithm comes first: manyhands plan ppo --env" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"step": -1e-4}, {"bandwidth": 0}, {"update_row": float("nan")}, {"act": "fast"}]
)
def test_costs_that_no_machine_has_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    one = parse(["ppo", "--env", "CartPole-v1", "--workers", "1", "--engine", "inline"])
    costs = dataclasses.asdict(COSTS) | wrong
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"of": command._key(one), "costs": costs}))
    with pytest.raises(ConfigError, match="is no file of costs"):
        command.load(one, str(file))


def test_costs_are_measured(tmp_path: Path) -> None:
    """In processor time, so that they are right on a busy machine, too."""
    words = ["plan", "ppo", "--env", "Pendulum-v1", "--rollout-length", "64", "--measure"]
    words += ["--costs", str(tmp_path / "costs.json"), "--picture", str(tmp_path / "plan.png")]
    assert main(words) == 0
    costs = Costs(**json.loads((tmp_path / "costs.json").read_text())["costs"])
    assert 1e-6 < costs.step < 1e-3
    assert 1e-6 < costs.act < 1e-2
    assert 1e-7 < costs.update_row < 1e-3
    assert 0 < costs.message < 1e-2
    assert 1e7 < costs.bandwidth < 1e12
    assert costs.meet[0][0] == 1
    assert all(0 < small < 1 for _, small, _ in costs.meet[1:])
    assert all(1 <= longer < 5 for _, longer in costs.crowd)
    assert (tmp_path / "plan.png").stat().st_size > 1000
