"""Chen, Zhou and Yan (2024), "Going Beyond Neural Network Feature Similarity", sections 2 and 3, row by row.

Each test bears the number of its row. Where the paper errs, what it prints and what holds stand side by side.
"""

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from networks import Net, edited, element, gap
from torch import Tensor, nn

import intertwine as it
from intertwine.graph.capture import capture
from intertwine.graph.program import Program
from intertwine.graph.runner import ProgramRunner, float64_forward
from intertwine.lab.papers.feature_duality import feature_classes, self_transformations
from intertwine.lab.papers.linear_equivalence import linear_equivalence, silent_feature, sum_of_two_features
from intertwine.lab.papers.naturality import naturality


def rows(width: int = 3, count: int = 8) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def first_layer(model: nn.Module) -> nn.Linear:
    return cast(nn.Linear, model.get_submodule("0"))


def hidden(model: nn.Module, x: Tensor) -> Tensor:
    """The features of the first hidden layer."""
    with torch.no_grad():
        return F.relu(first_layer(model)(x))


def with_units(net: nn.Module, order: Sequence[int]) -> nn.Sequential:
    """The network with copies: hidden unit i is what unit `order[i]` was; what reads them stays."""
    kept = list(order)
    changes: dict[str, Any] = {"0__weight": lambda w: w[kept], "0__bias": lambda b: b[kept]}
    return cast(nn.Sequential, edited(net, **changes))


def convolutional() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.fc(F.relu(m.b(F.relu(m.norm(m.a(x))))).mean((2, 3)))

    parts = {"a": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "b": nn.Conv2d(4, 5, 3), "fc": nn.Linear(5, 2)}
    return Net(forward, **parts).double().eval()


# -- 003-F01: notation, the permutation of θ ---------------------------------------------------------------------------


def permuted(net: nn.Sequential, first: Tensor, second: Tensor, last: Tensor | None = None) -> nn.Module:
    """W_π = P_l W P_{l−1}ᵀ and b_π = P_l b, written with matrices; P_0 is the identity, and so is P_3 unless given."""
    p1, p2, p3 = first, second, torch.eye(2, dtype=torch.float64) if last is None else last
    changes: dict[str, Any] = {
        "0__weight": lambda w: p1 @ w, "0__bias": lambda b: p1 @ b,
        "2__weight": lambda w: p2 @ w @ p1.mT, "2__bias": lambda b: p2 @ b,
        "4__weight": lambda w: p3 @ w @ p2.mT, "4__bias": lambda b: p3 @ b,
    }  # fmt: skip
    return edited(net, **changes)


def matrix_of(order: Sequence[int]) -> Tensor:
    return torch.eye(len(order), dtype=torch.float64)[list(order)]


def test_003_F01_permutation_of_the_parameters() -> None:
    net, x = mlp(3, 4, 5, 2), rows()
    first, second = [2, 0, 3, 1], [4, 2, 0, 1, 3]
    moved = permuted(net, matrix_of(first), matrix_of(second))
    assert gap(net, moved, x) < 1e-14
    assert torch.allclose(hidden(moved, x), hidden(net, x) @ matrix_of(first).mT), "Z_π = P Z"

    sym = it.symmetry(net, x)
    by_first = element(sym, "0.weight[0]", permutation=torch.tensor(first))
    by_second = element(sym, "2.weight[0]", permutation=torch.tensor(second))
    state = sym.act(by_first @ by_second, net).state_dict()
    assert all(torch.equal(t, state[name]) for name, t in moved.state_dict().items())


def test_003_F01_the_ends_keep_their_order() -> None:
    """P_0 = P_L = 1 is implied in the paper; with another P_L the function is another one."""
    net, x = mlp(3, 4, 5, 2), rows()
    eye = torch.eye
    other = permuted(net, eye(4, dtype=torch.float64), eye(5, dtype=torch.float64), last=matrix_of([1, 0]))
    assert gap(net, other, x) > 1e-3


# -- 003-F02: category, functor, natural transformation ----------------------------------------------------------------


class Functor:
    """T_θ: the arrow from object m to object n of a program is "run the calls m … n", with weights θ put in.

    An object is what is in memory after so many calls (feature shapes, in the paper); an arrow m → n exists for m ≤ n.
    """

    def __init__(self, program: Program, model: nn.Module, x: Tensor) -> None:
        self.program, self.model, self.x = program, model, x

    @property
    def start(self) -> dict[str, Any]:
        return dict(ProgramRunner(self.program, self.model, ((self.x,), {})).values)

    def arrow(self, m: int, n: int, state: dict[str, Any]) -> dict[str, Any]:
        """T_θ(m → n) applied to the state at m."""
        runner = ProgramRunner(self.program, self.model, ((self.x,), {}))
        runner.values = dict(state)
        with float64_forward():
            for position in range(m, n):
                runner.step(position)
        return runner.values


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items() if isinstance(t, Tensor))


@pytest.mark.parametrize(
    "make", [lambda: (mlp(3, 4, 5, 2), rows()), lambda: (convolutional(), torch.randn(2, 3, 6, 6))]
)
def test_003_F02_functor_laws(make: Any) -> None:
    net, x = make()
    x = x.double()
    program = capture(net, (x,))
    functor, end = Functor(program, net, x), len(program)
    start = functor.start
    whole = functor.arrow(0, end, start)
    for cut in range(end + 1):
        there = functor.arrow(0, cut, start)
        assert same_state(functor.arrow(cut, cut, there), there), "T(id) = id"
        assert same_state(functor.arrow(cut, end, there), whole), "T(g ∘ f) = T(g) ∘ T(f)"
    (output,) = (whole[ref.name] for ref in program.outputs)
    assert torch.equal(output, net(x)), "the arrow from the first object to the last is the network"
    assert not same_state(functor.arrow(0, end - 1, start), whole), "the laws are about something"


def test_003_F02_functor_depends_on_the_parameters_alone() -> None:
    """One category of arrows, two functors: the same program with the weights of another network."""
    torch.manual_seed(0)
    one, other, x = mlp(3, 4, 2), mlp(3, 4, 2), rows()
    program = capture(one, (x,))
    assert [c.op for c in program.calls] == [c.op for c in capture(other, (x,)).calls]
    functor = Functor(program, other, x)
    (output,) = (functor.arrow(0, len(program), functor.start)[ref.name] for ref in program.outputs)
    assert torch.equal(output, other(x))


def test_003_F02_naturality_square() -> None:
    """T f ∘ τ = τ′ ∘ S f on data, for every arrow f, with τ the move of the features by a group element."""
    net, x = convolutional(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    sym = it.symmetry(net, x)
    g = sym.random(seed=0)
    square = naturality(sym.act(g, net), net, g, x, symmetry=sym)
    assert square.max < 1e-12
    assert len(square.arrows) >= 8
    assert not naturality(sym.act(g, net), net, g.inverse(), x, symmetry=sym).ok


# -- 003-F03: functionally equivalent features -------------------------------------------------------------------------


def test_003_F03_permuted_and_rescaled_copies_are_equivalent() -> None:
    net, x = mlp(3, 4, 5, 2), rows()
    sym = it.symmetry(net, x)
    g = sym.random(seed=0)  # permutations and positive scales: the group G_ReLU
    assert {str(w.group) for w in sym.wires} == {"S_4 ⋉ (R₊)^4", "S_5 ⋉ (R₊)^5"}
    found = naturality(sym.act(g, net), net, g, x, symmetry=sym)
    assert found.ok
    assert found.max < 1e-14


def test_003_F03_the_direction_of_tau() -> None:
    """Declared as a → b in print; Eq. 4 applies it to features of b, so it must be b → a."""
    b, x = mlp(3, 4, 5, 2), rows()
    sym = it.symmetry(b, x)
    from_b_to_a = sym.random(seed=0)
    a = sym.act(from_b_to_a, b)
    assert naturality(a, b, from_b_to_a, x, symmetry=sym).ok, "as Eq. 4 uses it"
    assert not naturality(a, b, from_b_to_a.inverse(), x, symmetry=sym).ok, "as it is declared"


def test_003_F03_without_the_input_arrow_any_first_layer_will_do() -> None:
    """Eq. 4 asks for l ≥ 1. With τ = 1 it then says nothing of the first layer, and other functions pass for equal."""
    b, x = mlp(3, 4, 5, 2), rows()
    a = edited(b, **{"0__weight": lambda w: torch.randn_like(w)})
    found = naturality(a, b, None, x)
    assert found.max_without_input == 0, "printed: equivalent features"
    assert gap(a, b, x) > 0.1, "but other functions"
    assert found.max > 0.1, "corrected: the arrow from the input, with τ_x = 1, tells them apart"
    assert found.worst is not None
    assert "0.weight" in found.worst.weights


def test_003_F03_score_of_a_trained_pair() -> None:
    """Two trainings from different starts: hidden units matched by hand lower the score, but not to rounding."""
    torch.manual_seed(0)
    x = rows(2, 64)
    y = (x[:, :1] * x[:, 1:]).tanh()
    nets = [mlp(2, 6, 1) for _ in range(2)]
    for net in nets:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        for _ in range(200):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    a, b = nets
    sym = it.symmetry(a, x)
    target, mine = (torch.cat([first_layer(n).weight, first_layer(n).bias[:, None]], 1).detach() for n in (a, b))
    orders = [torch.tensor(p) for p in permutations(range(6))]
    best = min(orders, key=lambda p: float((mine[p] - target).norm()))
    matched, mixed = (
        naturality(a, b, element(sym, "0.weight[0]", permutation=p), x, symmetry=sym) for p in (best, best.flip(0))
    )
    assert 1e-3 < matched.arrows[0].residual < mixed.arrows[0].residual
    assert not matched.ok


# -- 003-F04: does linear mode connectivity give equivalent features? --------------------------------------------------


def between(a: nn.Module, b: nn.Module, t: float) -> nn.Module:
    """The network at t on the line from b to a."""
    left, right = a.state_dict(), b.state_dict()
    made = copy.deepcopy(a)
    made.load_state_dict({name: t * left[name] + (1 - t) * right[name] for name in left})
    return made


def test_003_F04_connectivity_does_not_give_equivalence() -> None:
    """Proposition 3.2 is false: constant loss and linear features all along the line, and no invertible map."""
    a, b, x = silent_feature()
    za, zb = hidden(a, x), hidden(b, x)
    for t in torch.linspace(0, 1, 11).tolist():
        middle = between(a, b, t)
        assert torch.allclose(middle(x), x), "the loss against y = x is 0 everywhere: connected"
        assert torch.allclose(hidden(middle, x), t * za + (1 - t) * zb, atol=1e-6), "the features move linearly, too"
    found = linear_equivalence(za, zb)
    assert (found.rank_a, found.rank_b) == (2, 1)
    assert found.residual > 0.1
    assert not found.ok

    sym = it.symmetry(a, x)
    elements = [element(sym, "0.weight[0]", permutation=torch.tensor(p)) for p in ([0, 1], [1, 0])]
    assert all(not naturality(a, b, g, x, symmetry=sym).ok for g in elements), "nor is any permutation natural"


def test_003_F04_where_the_proof_goes_wrong() -> None:
    """From (W_a − W_b)(Z_a − Z_b) = 0 the proof reads W_a Z_b = W_b Z_b, which asks for (W_a − W_b) Z_b = 0."""
    za, zb = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    difference = torch.tensor([[1.0, 0.0]])
    assert not bool((difference @ (za - zb)).any())
    assert bool((difference @ zb).any())


def test_003_F04_as_an_empirical_test() -> None:
    """For two given networks the question has an answer: twins are connected to themselves and equivalent."""
    net, x = mlp(3, 4, 2), rows()
    sym = it.symmetry(net, x)
    moved = sym.act(sym.random(seed=0), net)
    assert linear_equivalence(hidden(moved, x), hidden(net, x)).ok
    assert not linear_equivalence(hidden(mlp(3, 4, 2), x), hidden(net, x)).ok


# -- 003-F05: feature duality ------------------------------------------------------------------------------------------


def test_003_F05_different_features_that_the_readout_adds() -> None:
    """Theorem 3.3, "only if": false as printed, true with the arrow from the input."""
    model, x = sum_of_two_features()
    one, other = hidden(model, x).unbind(1)
    assert not torch.equal(one, other)
    printed = self_transformations(model, "1", x, input_arrow=False)
    assert printed.swaps == ((0, 1),), "printed: more than one natural transformation …"
    assert printed.equal == (), "… and yet no two features are equal"
    assert not printed.dual
    corrected = self_transformations(model, "1", x)
    assert corrected.swaps == ()
    assert corrected.dual


DUPLICATES: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {
    (0, 1, 2, 3, 4): (),
    (0, 1, 2, 0, 4): ((0, 3),),
    (0, 1, 2, 0, 1): ((0, 3), (1, 4)),
    (0, 1, 2, 0, 0): ((0, 3), (0, 4), (3, 4)),
}


@pytest.mark.parametrize("order", DUPLICATES)
def test_003_F05_duality_with_and_without_duplicates(order: tuple[int, ...]) -> None:
    """Equal features, whatever reads them, are exactly those that can be swapped once the input arrow counts."""
    torch.manual_seed(0)
    net, x = with_units(mlp(3, 5, 2), order), rows(count=40)
    found = self_transformations(net, "1", x)
    assert found.dual
    assert found.swaps == DUPLICATES[order]
    assert found.multiple is bool(DUPLICATES[order])
    assert self_transformations(net, "1", x, input_arrow=False).swaps == found.swaps, "a generic readout sees the rest"


def test_003_F05_equal_on_the_data_or_in_the_weights() -> None:
    """The theorem speaks of features, so equality is a matter of the data: here the second input is always 0."""
    net = with_units(mlp(2, 3, 2), [0, 0, 2])
    with torch.no_grad():
        first_layer(net).weight[1, 1] += 1
    x = rows(2, 40)
    flat = x * torch.tensor([1.0, 0.0])
    assert self_transformations(net, "0", flat).swaps == ((0, 1),)
    assert self_transformations(net, "0", x).swaps == ()


# -- 003-F06: feature complexity ---------------------------------------------------------------------------------------


def comparable(net: nn.Sequential, x: Tensor) -> set[tuple[int, int]]:
    """Z_i ≤ Z_j: some natural self-transformation maps feature i to feature j. The identity and the swaps."""
    found = self_transformations(net, "1", x)
    return {(i, i) for i in range(found.width)} | {p for i, j in found.swaps for p in ((i, j), (j, i))}


def width_of(order: set[tuple[int, int]], size: int) -> int:
    """The width of an order: the most elements of which no two are comparable."""
    antichains = (
        subset
        for count in range(1, size + 1)
        for subset in combinations(range(size), count)
        if all((i, j) not in order for i, j in combinations(subset, 2))
    )
    return max(map(len, antichains))


def test_003_F06_the_order_is_an_equivalence_relation() -> None:
    """The paper speaks of a poset; but what is comparable is equal, so the order is symmetric and its width a count."""
    torch.manual_seed(0)
    net, x = with_units(mlp(3, 6, 2), [0, 1, 0, 3, 0, 1]), rows(count=40)
    order = comparable(net, x)
    assert all((j, i) in order for i, j in order), "symmetric: so antisymmetry, which an order needs, fails …"
    assert (0, 2) in order, "… because features 0 and 2 are below each other and not the same feature"
    assert all((i, k) in order for i, j in order for m, k in order if j == m), "transitive"
    found = feature_classes(hidden(net, x))
    assert found.groups == ((0, 2, 4), (1, 5), (3,))
    assert found.count == width_of(order, 6) == 3


@pytest.mark.parametrize("distinct", [1, 3, 7])
def test_003_F06_complexity_of_constructed_layers(distinct: int) -> None:
    torch.manual_seed(0)
    order = [i % distinct for i in range(7)]
    net, x = with_units(mlp(4, 7, 2), order), rows(4, 60)
    found = feature_classes(hidden(net, x))
    assert found.count == distinct <= 7
    assert found.labels == tuple(order)


def test_003_F06_exact_equality_does_not_survive_training() -> None:
    """Copies that drift apart by a little are all different without a tolerance, and one class each with one."""
    torch.manual_seed(0)
    copied, x = with_units(mlp(4, 8, 2), [0, 1, 2, 3] * 2), rows(4, 60)
    drifted = edited(copied, **{"0__weight": lambda w: w + 1e-6 * torch.randn_like(w)})
    assert feature_classes(hidden(drifted, x), tolerance=0.0).count == 8
    assert feature_classes(hidden(drifted, x), tolerance=1e-4).count == 4
