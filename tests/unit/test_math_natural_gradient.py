"""Natural gradient: against dense linear algebra, the definition of Fisher, and itself cut up."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.errors import ConfigError
from manyhands.math.natural_gradient import (
    conjugate_gradient,
    fisher_product,
    flat_gradient,
    flat_parameters,
    line_search,
    set_flat_parameters,
    trust_region_step,
)
from manyhands.networks.heads import Categorical, DiagonalGaussian


class Policy(nn.Module):
    """Four inputs to three logits, or to two means with free log standard deviations."""

    def __init__(self, head, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.head = head
        outputs = head.size if isinstance(head, DiagonalGaussian) else head.parameter_size
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))
        self.log_std = nn.Parameter(torch.tensor([-0.5, 0.3]))
        self.double()

    def forward(self, x):
        out = self.net(x)
        if isinstance(self.head, DiagonalGaussian):
            return torch.cat([out, self.log_std.expand_as(out)], -1)
        return out


def gaussian():
    return DiagonalGaussian(torch.full((2,), -1.0).numpy(), torch.full((2,), 1.0).numpy())


@pytest.fixture(params=[Categorical(3), gaussian()], ids=["categorical", "gaussian"])
def policy(request):
    return Policy(request.param)


@pytest.fixture
def rows():
    return torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def kl_of(policy, rows):
    new = policy(rows)
    return policy.head.kl(new.detach(), new).mean()


def true_fisher(policy, rows):
    """E over rows and actions of (∇ log p)(∇ log p)ᵀ, the definition, no Hessian of any KL."""
    parameters = list(policy.parameters())
    total = 0.0
    for row in rows:
        p = policy(row[None])
        if isinstance(policy.head, Categorical):
            for a in range(3):
                logp = policy.head.log_prob(p, torch.tensor([a]))
                g = flat_gradient(logp[0], parameters, retain_graph=True)
                total += logp[0].detach().exp() * torch.outer(g, g)
        else:  # closed form for a normal: diag(1/σ²) for means, 2 for log σ
            mean, log_std = p.chunk(2, -1)
            for d in range(2):
                g = flat_gradient(mean[0, d], parameters, retain_graph=True)
                h = flat_gradient(log_std[0, d], parameters, retain_graph=True)
                total += torch.outer(g, g) * torch.exp(-2 * log_std[0, d].detach())
                total += 2.0 * torch.outer(h, h)
    return total / len(rows)


def test_fisher_product_is_the_fisher_matrix_of_the_definition(policy, rows):
    product = fisher_product(kl_of(policy, rows), list(policy.parameters()))
    eye = torch.eye(len(flat_parameters(list(policy.parameters()))), dtype=torch.float64)
    found = torch.stack([product(v) for v in eye])
    torch.testing.assert_close(found, true_fisher(policy, rows), atol=1e-10, rtol=1e-8)


def test_fisher_products_of_parts_average_to_the_product_of_the_whole(policy, rows):
    parameters = list(policy.parameters())
    v = torch.randn(len(flat_parameters(parameters)), dtype=torch.float64)
    whole = fisher_product(kl_of(policy, rows), parameters)(v)
    parts = [fisher_product(kl_of(policy, part), parameters)(v) for part in rows.split(10)]

    def mean(x):
        torch.testing.assert_close(x, parts[0])
        return torch.stack(parts).mean(0)

    found = fisher_product(kl_of(policy, rows[:10]), parameters, mean)(v)
    torch.testing.assert_close(found, whole)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**31), st.sampled_from([0.0, 0.1]))
def test_conjugate_gradient_solves_what_a_dense_solver_solves(n, seed, damping):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(n, n, dtype=torch.float64, generator=generator)
    a = root @ root.T + 0.1 * torch.eye(n, dtype=torch.float64)
    b = torch.randn(n, dtype=torch.float64, generator=generator)
    found = conjugate_gradient(
        lambda v: a @ v, b, iterations=5 * n, damping=damping, tolerance=1e-24
    )
    want = torch.linalg.solve(a + damping * torch.eye(n, dtype=torch.float64), b)
    torch.testing.assert_close(found.x, want, atol=1e-7, rtol=1e-6)


def test_conjugate_gradient_stops_when_it_is_there_whatever_the_scale():
    for scale in (1e-8, 1.0, 1e8):
        found = conjugate_gradient(lambda v: 2.0 * v, scale * torch.ones(3))
        assert found.iterations == 1
        torch.testing.assert_close(found.x, scale * torch.full((3,), 0.5))


def test_conjugate_gradient_gives_up_on_a_bad_matrix_with_what_it_has():
    assert conjugate_gradient(lambda v: -v, torch.ones(2)).iterations == 0
    assert conjugate_gradient(lambda v: v * math.nan, torch.ones(2)).x.tolist() == [0.0, 0.0]
    assert conjugate_gradient(lambda v: v, torch.zeros(2)).iterations == 0


def test_the_step_has_the_modelled_kl_and_the_direction_of_the_damped_solution(policy, rows):
    parameters = list(policy.parameters())
    fisher = true_fisher(policy, rows) + 0.1 * torch.eye(len(flat_parameters(parameters)))
    gradient = torch.randn(len(fisher), dtype=torch.float64)
    product = fisher_product(kl_of(policy, rows), parameters)
    found = trust_region_step(gradient, product, max_kl=0.01, damping=0.1, iterations=60)
    assert (0.5 * found.step @ fisher @ found.step).item() == pytest.approx(0.01, rel=1e-6)
    want = torch.linalg.solve(fisher, gradient)
    torch.testing.assert_close(
        found.step / found.step.norm(), want / want.norm(), atol=1e-5, rtol=1e-4
    )
    assert found.expected_improvement == pytest.approx((gradient @ found.step).item())


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_no_step_without_a_usable_gradient(bad):
    def never(v):
        raise AssertionError("no product may be asked for: other workers would wait")

    assert trust_region_step(torch.full((3,), bad), never, max_kl=0.01).step is None


def test_flat_parameters_go_back_where_they_came_from_and_keep_their_memory():
    model = nn.Linear(3, 2)
    parameters = list(model.parameters())
    view = model.weight.detach().numpy()
    flat = flat_parameters(parameters)
    assert flat.shape == (8,)
    set_flat_parameters(parameters, flat + 1.0)
    torch.testing.assert_close(flat_parameters(parameters), flat + 1.0)
    assert (view == model.weight.detach().numpy()).all()
    with pytest.raises(ConfigError, match="9 flat numbers"):
        set_flat_parameters(parameters, torch.zeros(9))


def test_parameters_that_play_no_part_get_zero_gradients():
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    assert flat_gradient(a.sum(), [a, b]).tolist() == [1, 1, 0, 0, 0]


class Bowl:
    """objective −(x−3)², KL x²/2: one parameter, known answers."""

    def __init__(self):
        self.x = torch.zeros(1, dtype=torch.float64)
        self.calls = 0

    def evaluate(self):
        self.calls += 1
        return -((self.x[0] - 3.0) ** 2), 0.5 * self.x[0] ** 2

    def search(self, step, evaluate=None, **options):
        return line_search(
            [self.x],
            torch.tensor([step], dtype=torch.float64),
            evaluate or self.evaluate,
            **options,
        )


def test_line_search_takes_the_full_step_when_it_is_good():
    bowl = Bowl()
    found = bowl.search(2.0, max_kl=2.0)
    assert (found.accepted, found.fraction, found.tries) == (True, 1.0, 1)
    assert (bowl.x.item(), found.kl, found.improvement) == (2.0, 2.0, 8.0)


def test_line_search_shrinks_until_the_kl_is_within_its_limit():
    """A search that looks only at the improvement would have taken the full step."""
    bowl = Bowl()
    found = bowl.search(3.0, max_kl=0.3)
    assert found.accepted
    assert (bowl.x.item(), found.fraction, found.tries) == (0.75, 0.25, 3)
    assert found.kl <= 0.3


def test_line_search_shrinks_until_there_is_enough_improvement():
    assert Bowl().search(10.0, max_kl=math.inf).fraction == 0.5
    strict = Bowl().search(4.0, max_kl=math.inf, expected_improvement=24.0, accept_ratio=0.8)
    assert strict.fraction == 0.25  # 8, 8, 5 gained where 19.2, 9.6, 4.8 are needed


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda x: (x[0] * math.nan, x[0] * 0),
        lambda x: (x[0], x[0] * math.nan),
        lambda x: (x[0], -x[0] * math.inf),
        lambda x: (x[0] if x[0] < 0.2 else x[0] * math.inf, x[0] * 0),
        lambda x: (-x[0], x[0] * 0),
        lambda x: (x[0] * 0, x[0] * 0),
        lambda x: (x[0], x[0] * 0 + 1.0),
    ],
    ids=["nan", "nan kl", "-inf kl", "inf", "worse", "equal", "kl"],
)
def test_line_search_restores_the_parameters_bit_for_bit_when_nothing_is_good(evaluate):
    bowl = Bowl()
    bowl.x += 0.1
    before = bowl.x.clone()
    found = bowl.search(1e3 / 3, lambda: evaluate(bowl.x), max_kl=0.01, tries=4)
    assert (found.accepted, found.fraction, found.tries) == (False, 0.0, 4)
    assert torch.equal(bowl.x, before)


def test_line_search_restores_the_parameters_when_evaluation_raises():
    bowl = Bowl()

    def evaluate():
        if bowl.x.item() != 0.0:
            raise RuntimeError("out of memory")
        return bowl.evaluate()

    with pytest.raises(RuntimeError, match="out of memory"):
        bowl.search(1.0, evaluate, max_kl=1.0)
    assert bowl.x.item() == 0.0


def test_line_search_decides_from_the_average_not_from_its_own_numbers():
    """This worker alone would accept; a worker whose KL is too large speaks for all."""
    bowl = Bowl()
    other_kl = 1.0

    def mean(own):
        return 0.5 * (own + torch.stack([own[0], own[1] * 0 + other_kl]))

    assert not bowl.search(0.1, max_kl=0.05, mean=mean).accepted
    assert bowl.x.item() == 0.0
    bad_worker = Bowl().search(0.1, max_kl=1.0, mean=lambda own: own + torch.tensor([math.nan, 0]))
    assert not bad_worker.accepted


def update(policies, parts, advantages, actions):
    """One trust-region update by as many workers as there are parts, in lock-step by hand."""
    count = len(policies)
    parameters = [list(p.parameters()) for p in policies]
    old = [p(x).detach() for p, x in zip(policies, parts, strict=True)]

    def objective(i):
        head, new = policies[i].head, policies[i](parts[i])
        ratio = (head.log_prob(new, actions[i]) - head.log_prob(old[i], actions[i])).exp()
        return (ratio * advantages[i]).mean(), head.kl(old[i], new).mean()

    def average(values):
        return torch.stack(values).mean(0)

    gradient = average([flat_gradient(objective(i)[0], parameters[i]) for i in range(count)])
    products = [fisher_product(objective(i)[1], parameters[i]) for i in range(count)]
    found = trust_region_step(gradient, lambda v: average([p(v) for p in products]), max_kl=0.01)

    def evaluate():  # every worker has the parameters of the first
        for own in parameters[1:]:
            set_flat_parameters(own, flat_parameters(parameters[0]))
        both = average([torch.stack(objective(i)) for i in range(count)])
        return both[0], both[1]

    return line_search(parameters[0], found.step, evaluate, max_kl=0.01)


def test_four_workers_step_as_one_worker_with_all_their_rows(policy, rows):
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(40, dtype=torch.float64, generator=generator)
    actions = policy.head.sample(policy(rows).detach(), generator)
    alone, team = copy.deepcopy(policy), [copy.deepcopy(policy) for _ in range(4)]
    one = update([alone], [rows], [advantages], [actions])
    four = update(team, rows.split(10), advantages.split(10), actions.split(10))
    assert one.accepted
    assert four.accepted
    assert 0 < one.kl <= 0.01
    torch.testing.assert_close(
        flat_parameters(list(alone.parameters())), flat_parameters(list(team[0].parameters()))
    )
    assert one.improvement == pytest.approx(four.improvement)
