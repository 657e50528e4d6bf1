"""Solvers that follow the task loss: relaxed elements against elements and formulas, and what the search keeps."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from networks import Net, gap
from orbits import KINDS, made, mlp, symmetry_of
from torch import Tensor, nn
from zoo_networks import network

import intertwine as it
from intertwine.align.align import Alignment, align
from intertwine.align.matching import (
    RelaxedElement,
    RelaxedMove,
    matrix_of,
    mixed,
    nearest_permutation,
    sinkhorn,
)
from intertwine.align.solver import permutations_of
from intertwine.errors import InputError
from intertwine.symmetry.blocks import transform_weights, weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

METHODS = ("straight-through", "sinkhorn")
Batch = tuple[Tensor, Tensor]


# -- relaxed elements --------------------------------------------------------------------------------------------------


def relaxed(element: Element) -> RelaxedElement:
    """An element as a relaxed one: its permutations as matrices of zeros and ones."""
    mixtures = {}
    for i, move in element.moves.items():
        weights = None if move.permutation is None else matrix_of(move.permutation)
        mixtures[i] = RelaxedMove(weights, None if move.scale is None else move.scale.log(), move.sign)
    return RelaxedElement(element.wire_specs, mixtures)


def check_at_corners(sym: Symmetry, model: nn.Module) -> None:
    """At matrices of zeros and ones a relaxed element is the element: to the last bit, but for scales."""
    weights = weights_of(sym, model)
    g = sym.random(7)
    for element, tolerance in ((permutations_of(g, "sign"), 0.0), (g, 1e-13)):
        wanted, found = transform_weights(sym, element, weights), mixed(sym, relaxed(element), weights)
        for name, x in wanted.items():
            assert torch.allclose(found[name], x, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("kind", KINDS)
def test_corners_are_elements(kind: str) -> None:
    if not symmetry_of(kind).wires:
        pytest.skip("nothing acts on it")
    check_at_corners(symmetry_of(kind), made(kind)[0])


@pytest.mark.parametrize("name", ["mlp", "resnet20", "vit", "gpt"])
def test_corners_are_elements_of_known_networks(name: str) -> None:
    model, sym = network(name)
    check_at_corners(sym, copy.deepcopy(model).double())


def stochastic(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sinkhorn(torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64), rounds=200)


def test_between_corners_against_matrix_products() -> None:
    net = mlp(torch.tanh, (3, 5, 4, 2)).double().requires_grad_(False)
    sym = it.symmetry(net, torch.zeros(1, 3).double())
    p, q = stochastic(5), stochastic(4, seed=1)
    logs, signs = torch.randn(2, 5).double(), torch.tensor([1.0, -1, 1, -1, 1]).double()
    found = mixed(
        sym,
        RelaxedElement(sym.wire_specs, {0: RelaxedMove(p, sign=signs[None]), 1: RelaxedMove(q)}),
        weights_of(sym, net),
    )
    d = torch.diag(signs)
    assert torch.allclose(found["a.weight"], p @ d @ net.a.weight)
    assert torch.allclose(found["a.bias"], p @ d @ net.a.bias)
    assert torch.allclose(found["b.weight"], q @ net.b.weight @ d @ p.T)
    assert torch.equal(found["c.bias"], net.c.bias)
    scaled = mlp(F.relu, (3, 5, 2)).double().requires_grad_(False)
    sym = it.symmetry(scaled, torch.zeros(1, 3).double())
    found = mixed(sym, RelaxedElement(sym.wire_specs, {0: RelaxedMove(p, log_scale=logs[:1])}), weights_of(sym, scaled))
    d = torch.diag(logs[0].exp())
    assert torch.allclose(found["a.weight"], p @ d @ scaled.a.weight)
    assert torch.allclose(found["b.weight"], scaled.b.weight @ d.inverse() @ p.T)


@pytest.mark.parametrize("kind", ["attention", "grouped convolution", "experts", "three floors", "tied embedding"])
def test_halfway_is_the_mean_of_two_corners(kind: str) -> None:
    """Moved weights are linear in the mixture of every strand that enters no tensor twice, fibres included."""
    sym, (model, _) = symmetry_of(kind), made(kind)
    weights = weights_of(sym, model)
    checked = 0
    for s in range(len(sym.wires)):
        here, there = (relaxed(permutations_of(sym.random(i).only(sym.wires[s].name))) for i in (1, 2))
        ends = [actor.mixtures[s].weights for actor in (here, there)]
        if ends[0] is None or ends[1] is None:
            continue
        both = RelaxedElement(sym.wire_specs, {s: RelaxedMove((ends[0] + ends[1]) / 2)})
        tensors = [mixed(sym, actor, weights) for actor in (here, there, both)]
        for name, layout in sym.layouts.items():
            if name in weights and sum(leaf.wire == s for leaf in layout.wire_axes()) <= 1:
                x, y, z = (t[name] for t in tensors)
                assert torch.allclose((x + y) / 2, z, rtol=1e-12, atol=1e-12)
                checked += not torch.equal(x, y)
    assert checked > 2


def test_slopes_reach_every_part() -> None:
    net = mlp(F.relu, (2, 3, 2)).double().requires_grad_(False)
    sym = it.symmetry(net, torch.zeros(1, 2).double())
    weights = weights_of(sym, net)

    def moved_weights(scores: Tensor, logs: Tensor) -> Tensor:
        found = mixed(sym, RelaxedElement(sym.wire_specs, {0: RelaxedMove(sinkhorn(scores), logs)}), weights)
        return torch.cat([x.flatten() for x in found.values()])

    scores, logs = torch.randn(3, 3).double().requires_grad_(True), torch.randn(1, 3).double().requires_grad_(True)
    assert torch.autograd.gradcheck(moved_weights, (scores, logs))


# -- Sinkhorn ----------------------------------------------------------------------------------------------------------


def test_shares_add_up() -> None:
    shares = sinkhorn(torch.randn(3, 6, 6).double(), rounds=100)
    ones = torch.ones(3, 6).double()
    assert torch.allclose(shares.sum(-1), ones, atol=1e-12)
    assert torch.allclose(shares.sum(-2), ones, atol=1e-9)
    assert bool((shares > 0).all())


def test_slopes_of_shares_against_the_implicit_formula() -> None:
    """dZ = P∘(G − α1ᵀ − 1βᵀ), where α and β keep the sums of rows and columns."""
    scores, g = torch.randn(2, 5, 5).double()
    scores.requires_grad_(True)
    p = sinkhorn(scores, rounds=500)
    (found,) = torch.autograd.grad((p * g).sum(), scores)
    p = p.detach()
    n, eye = 5, torch.eye(5).double()
    system = torch.cat([torch.cat([eye, p], 1), torch.cat([p.T, eye], 1)])
    both = torch.linalg.pinv(system) @ torch.cat([(p * g).sum(1), (p * g).sum(0)])
    assert torch.allclose(found, p * (g - both[:n, None] - both[None, n:]), atol=1e-10)


def test_cold_shares_are_the_best_assignment_and_large_scores_are_numbers() -> None:
    scores = torch.randn(8, 8).double()
    order = nearest_permutation(scores)
    assert torch.allclose(sinkhorn(scores / 0.005, rounds=2000), matrix_of(order), atol=0.01)
    assert bool(sinkhorn(1e6 * scores.float()).isfinite().all())


# -- the search --------------------------------------------------------------------------------------------------------


@cache
def digits() -> tuple[nn.Module, nn.Module, Symmetry, tuple[Batch, ...]]:
    """Two small networks trained on digits from different seeds, and the data they saw."""
    digits = it.zoo.data("digits")
    x, y = digits.inputs(digits.images).flatten(1), digits.labels
    data = tuple(zip(x.split(200), y.split(200), strict=True))
    return trained(0, x, y), trained(1, x, y), it.symmetry(trained(0, x, y, epochs=0), x[:2]), data


def trained(seed: int, x: Tensor, y: Tensor, epochs: int = 20) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(100):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval()


def middle_loss(a: nn.Module, b: nn.Module, data: tuple[Batch, ...], t: float = 0.5) -> float:
    with torch.no_grad():
        outputs = [it.interpolate(a, b, t)(x).double() for x, _ in data]
    return float(F.cross_entropy(torch.cat(outputs), torch.cat([y for _, y in data])))


@cache
def searched(method: str) -> Alignment:
    a, b, sym, data = digits()
    return align(a, b, symmetry=sym, method=method, data=data, options={"steps": 80})


@pytest.mark.parametrize("method", METHODS)
def test_a_lower_loss_in_the_middle_than_weights(method: str) -> None:
    a, b, sym, data = digits()
    plain = align(a, b, symmetry=sym)
    found = searched(method)
    before, after = (middle_loss(a, x.model, data) for x in (plain, found))
    assert after < 0.97 * before, "the loss of weights was not lowered"
    assert found.after > plain.after, "the loss is not the distance: some of it is given away"
    assert gap(copy.deepcopy(b), copy.deepcopy(found.model), data[0][0]) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_every_step_tells_the_distance_and_the_loss(method: str) -> None:
    a, b, sym, data = digits()
    found, plain = searched(method), align(a, b, symmetry=sym)
    assert [step.start for step in found.history[:2]] == ["identity", "weights"]
    assert {step.start for step in found.history[2:]} == {method}
    assert found.history[0].objective == found.before
    assert found.history[1].objective == pytest.approx(plain.after)
    assert found.history[0].own == pytest.approx(middle_loss(a, b, data), rel=1e-5)
    assert found.history[1].own == pytest.approx(middle_loss(a, plain.model, data), rel=1e-5)
    best = min(found.history, key=lambda step: step.own or 0.0)
    assert best.own == pytest.approx(middle_loss(a, found.model, data), rel=1e-5)
    assert best.objective == found.after
    steps = [step.sweep for step in found.history]
    assert steps == sorted(steps)
    assert steps[-1] <= 80


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_is_taken_where_it_was_asked(method: str) -> None:
    a, b, sym, data = digits()
    found = align(a, b, symmetry=sym, method=method, data=data, options={"steps": 2, "at": 0.25})
    assert found.history[0].own == pytest.approx(middle_loss(a, b, data, t=0.25), rel=1e-5)
    drawn = align(a, b, symmetry=sym, method=method, data=data, options={"steps": 20, "at": None})
    assert drawn.history[0].own == pytest.approx(middle_loss(a, b, data), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_another_loss_and_few_held_batches(method: str) -> None:
    a, b, sym, data = digits()

    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - F.one_hot(targets, 10)).square().sum(-1)

    found = align(a, b, symmetry=sym, method=method, data=data, options={"loss": squares, "held": 2, "steps": 30})
    with torch.no_grad():
        outputs = [it.interpolate(a, b, 0.5)(x).double() for x, _ in data[:2]]
    wanted = torch.cat([squares(o, y) for o, (_, y) in zip(outputs, data, strict=False)]).mean()
    assert found.history[0].own == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_data_without_classes_needs_a_loss_where_the_message_says(method: str) -> None:
    a, b, sym, data = digits()
    plain = [(x, F.one_hot(y, 10).to(x.dtype)) for x, y in data]
    with pytest.raises(
        InputError, match=r"found outputs .* Pass options=\{'loss': …\}, a function of \(outputs, targets\)"
    ):
        align(a, b, symmetry=sym, method=method, data=plain)
    found = align(a, b, symmetry=sym, method=method, data=plain, options={"loss": F.mse_loss, "held": 1, "steps": 2})
    with torch.no_grad():
        wanted = F.mse_loss(it.interpolate(a, b, 0.5)(plain[0][0]).double(), plain[0][1].double())
    assert found.history[0].own == pytest.approx(float(wanted), rel=1e-5)


def strangers(kind: str) -> tuple[nn.Module, nn.Module, Symmetry, list[tuple[tuple[Tensor, ...], Tensor]]]:
    """Two unlike networks, and random data that they know nothing of."""
    (a, inputs), (b, _) = made(kind, seed=0), made(kind, seed=1)
    with torch.no_grad():
        outputs = copy.deepcopy(a)(*inputs)
    targets = torch.randint(0, 2, outputs.shape[:-1])
    return a.requires_grad_(False), b.requires_grad_(False), symmetry_of(kind), [(inputs, targets)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["MLP with GELU", "residual with batch norm", "attention", "LSTM", "experts"])
def test_what_was_planted_is_left_alone(kind: str, method: str) -> None:
    a, _, sym, data = strangers(kind)
    g = permutations_of(sym.random(3))
    found = align(a, sym.act(g, a), symmetry=sym, method=method, data=data, options={"steps": 5})
    assert found.after == 0
    assert (found.element @ g).distance(sym.identity()) == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["residual with batch norm", "grouped convolution", "attention", "GRU", "experts"])
def test_never_worse_than_the_start_and_the_function_stays(kind: str, method: str) -> None:
    a, b, sym, data = strangers(kind)
    options = {"steps": 25, "rate": 0.3, "batch_statistics": False}
    found = align(a, b, symmetry=sym, method=method, data=data, options=options)
    losses = [step.own for step in found.history if step.own is not None]
    assert len(losses) == len(found.history) > 2
    with torch.no_grad():
        outputs = it.interpolate(a, found.model, 0.5)(*data[0][0])
    loss = F.cross_entropy(outputs.flatten(0, -2), data[0][1].flatten())
    assert float(loss) == pytest.approx(min(losses), rel=1e-9)
    assert min(losses) <= min(losses[:2])
    assert gap(copy.deepcopy(b), copy.deepcopy(found.model), *data[0][0]) < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_nothing_given_is_changed_and_seeds_decide(method: str) -> None:
    a, b, sym, data = strangers("residual with batch norm")
    a.train()
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    state = torch.get_rng_state()
    first, second = (
        align(a, b, symmetry=sym, method=method, data=data, seed=4, options={"steps": 20, "at": None}) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first.history == second.history
    assert first.element.distance(second.element) == 0
    for model, kept in zip((a, b), before, strict=True):
        assert all(torch.equal(x, kept[name]) for name, x in model.state_dict().items())
    assert all(module.training for module in a.modules())
    assert all(p.grad is None for model in (a, b) for p in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_only_some_wires(method: str) -> None:
    a, b, sym, data = digits()
    first, second = (wire.name for wire in sym.wires)
    found = align(a, b, symmetry=sym, method=method, data=data, wires=[second], options={"steps": 40})
    assert found.element.only(first).distance(sym.identity()) == 0
    assert found.element.distance(sym.identity()) > 0


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_by_the_statistics_of_the_batch(method: str) -> None:
    """Mixed running statistics belong to no network; both ways of taking them are told apart by the loss they give."""
    a, b, sym, data = strangers("residual with batch norm")
    (inputs, targets) = data[0]
    middle = it.interpolate(a, b, 0.5)
    with torch.no_grad():
        running = float(F.cross_entropy(middle.eval()(*inputs), targets))
        batch = float(F.cross_entropy(middle.train()(*inputs), targets))
    assert abs(running - batch) > 1e-3
    for flag, loss in ((True, batch), (False, running)):
        options = {"steps": 1, "batch_statistics": flag}
        found = align(a, b, symmetry=sym, method=method, data=data, options=options)
        assert found.history[0].own == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_with_buffers_in_the_objective_and_weights_that_no_loss_reaches(method: str) -> None:
    a, b, sym, data = strangers("residual with batch norm")
    found = align(a, b, symmetry=sym, method=method, data=data, buffers=True, options={"steps": 3})
    assert found.after <= found.before
    aside = [Net(lambda m, x: (m.b(F.gelu(m.a(x))), m.d(F.gelu(m.c(x)))), **layers()) for _ in range(2)]
    x = torch.randn(6, 3)
    options = {"steps": 10, "loss": lambda outputs, targets: F.cross_entropy(outputs[0], targets)}
    assert align(*aside, x, method=method, data=[(x, torch.arange(6) % 2)], options=options).history


def layers() -> dict[str, nn.Module]:
    return {"a": nn.Linear(3, 5), "b": nn.Linear(5, 2), "c": nn.Linear(3, 4), "d": nn.Linear(4, 2)}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, r"option steps must be at least 1, but is 0"),
        ({"held": 0}, r"option held must be at least 1, but is 0"),
        ({"at": 0.0}, r"option at must be above 0, where b counts, .* but is 0.0"),
        ({"rate": -1.0}, r"option rate must be a finite number above 0, but is -1.0"),
        ({"speed": 1.0}, r"has no option 'speed'.*Its options: .*rate"),
    ],
)
def test_options_out_of_range(method: str, options: dict[str, float], words: str) -> None:
    a, b, sym, data = digits()
    with pytest.raises(it.InputError, match=words):
        align(a, b, symmetry=sym, method=method, data=data, options=options)


def test_temperatures_out_of_range() -> None:
    a, b, sym, data = digits()
    for options, words in (
        ({"temperature": 0.0}, "temperature must be a finite number above 0, but is 0.0"),
        ({"coolest": 2.0}, "coolest must be above 0 and at most the temperature, but is 2.0"),
    ):
        with pytest.raises(it.InputError, match=words):
            align(a, b, symmetry=sym, method="sinkhorn", data=data, options=options)


@pytest.mark.parametrize("method", METHODS)
def test_data_that_gives_no_loss(method: str) -> None:
    a, b, sym, data = digits()
    x, y = data[0]

    def run(data: object) -> None:
        align(a, b, symmetry=sym, method=method, data=data, options={"steps": 40})

    with pytest.raises(it.InputError, match="needs data"):
        run(None)
    with pytest.raises(it.InputError, match="a generator can be read only once"):
        run(batch for batch in data)
    with pytest.raises(it.InputError, match="Every target of the held-out batches is marked as ignored"):
        run([(x, torch.full_like(y, -100))])
    with pytest.raises(it.InputError, match="The task loss between the two networks is nan on the held-out batches"):
        run([(x * float("nan"), y)])
    with pytest.raises(it.InputError, match="The task loss became nan at step 9"):
        run([*data[:8], (x * float("nan"), y)])
    with pytest.raises(it.InputError, match="Cross-entropy needs integer targets and outputs"):
        run([(x, y.float())])


@pytest.mark.parametrize("method", METHODS)
def test_one_sample_has_no_batch_statistics(method: str) -> None:
    nets = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval() for _ in range(2)]
    with pytest.raises(it.InputError, match="one value per channel, which has no variance"):
        align(*nets, torch.zeros(2, 3), method=method, data=[(torch.zeros(1, 3), torch.zeros(1).long())])


def wrapped(model: nn.Module, how: str) -> nn.Module:
    return nn.DataParallel(model) if how == "DataParallel" else model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["DataParallel", "inference", "made in inference", "DataParallel, inference"])
def test_wrappers_and_inference_mode_change_nothing(how: str, method: str) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    a = nn.Sequential(*layers)
    b, x, y = copy.deepcopy(a), torch.randn(32, 4), torch.randint(3, (32,))
    for parameter in b.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    plain = align(a, b, x, method=method, data=[(x, y)], options={"steps": 8})
    with torch.inference_mode("inference" in how):
        if how.startswith("made"):
            a, b, x, y = copy.deepcopy(a), copy.deepcopy(b), x.clone(), y.clone()
        pair = [wrapped(model, how.partition(",")[0]) for model in (a, b)]
        found = align(pair[0], pair[1], x, method=method, data=[(x, y)], options={"steps": 8})
    both = zip(found.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    assert all(torch.equal(p, q) for p, q in both)
    assert [step.own for step in found.history] == [step.own for step in plain.history]
    assert len(plain.history) > 1
