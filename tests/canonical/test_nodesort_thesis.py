"""Sorensen's NodeSort thesis (2020), statement by statement: 002-S01 to 002-S23 number what it says, in its order.

Where the print is wrong, the printed and the corrected version stand side by side. A parameterisation θ is a list of
pairs (W, b) in the thesis's notation: a layer is x W + b, so the nodes of layer ℓ are the columns of W_ℓ and the rows
of W_{ℓ+1}. An order is a tensor of old positions: new node i is old node order[i].
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nodesort_experiment import tiny_rows
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import InputError
from intertwine.lab.papers import nodesort_networks
from intertwine.lab.papers.experiments import find, read_result
from intertwine.lab.papers.nodesort import averaged, by_method
from intertwine.lab.papers.nodesort_networks import MLPStack, concatenated

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "sorensen-table1.paper.json"

Layer = tuple[Tensor, Tensor]
Theta = list[Layer]
Orders = list[Tensor]
DEEP = (5, 7, 7, 7, 3)  # three hidden layers of one width, so that wrong indices can go unnoticed


# -- the thesis's objects ----------------------------------------------------------------------------------------------


def theta_of(sizes: Sequence[int], seed: int = 0) -> Theta:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(m, n, generator=generator, dtype=torch.float64),
            torch.randn(n, generator=generator, dtype=torch.float64),
        )
        for m, n in itertools.pairwise(sizes)
    ]


def realise(theta: Theta, x: Tensor, activation: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    """f_θ(x): d affine maps with d − 1 activations between them."""
    for weight, bias in theta[:-1]:
        x = activation(x @ weight + bias)
    return x @ theta[-1][0] + theta[-1][1]


def act(orders: Orders, theta: Theta) -> Theta:
    """π(θ), equation (5) with its biases mended: columns and biases of layer ℓ, rows of layer ℓ + 1."""
    moved = []
    for layer, (weight, bias) in enumerate(theta):
        if layer > 0:
            weight = weight[orders[layer - 1]]
        if layer < len(orders):
            weight, bias = weight[:, orders[layer]], bias[orders[layer]]
        moved.append((weight, bias))
    return moved


def random_orders(theta: Theta, seed: int) -> Orders:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(len(bias), generator=generator) for _, bias in theta[:-1]]


def same(a: Theta, b: Theta) -> bool:
    return all(torch.equal(x, y) for la, lb in zip(a, b, strict=True) for x, y in zip(la, lb, strict=True))


def module_of(theta: Theta, activation: type[nn.Module] = nn.Sigmoid) -> nn.Sequential:
    """θ as an ordinary module. Sigmoid has no scales and no signs, so its symmetries are the thesis's permutations."""
    parts: list[nn.Module] = []
    for weight, bias in theta:
        linear = nn.Linear(weight.shape[0], weight.shape[1], dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias)
        parts += [linear, activation()]
    return nn.Sequential(*parts[:-1])


def theta_from(module: nn.Module) -> Theta:
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return [(part.weight.detach().T, part.bias.detach()) for part in linears]


def library(theta: Theta, order: str, base: float = 1.1, activation: type[nn.Module] = nn.Sigmoid) -> Theta:
    """The library's canonical form of θ."""
    x = torch.zeros(1, len(theta[0][0]), dtype=torch.float64)
    return theta_from(it.canonicalize(module_of(theta, activation), x, order=order, base=base).model)


def points(theta: Theta, count: int = 20) -> Tensor:
    return torch.randn(count, len(theta[0][0]), dtype=torch.float64, generator=torch.Generator().manual_seed(9))


# -- NodeSort three times: what was meant, what is right, what is printed ----------------------------------------------


def keys(weight: Tensor, base: float) -> Tensor:
    """Order (8): ⟨row, (p^0, ..., p^(m−1))⟩ for every row."""
    return (weight * base ** torch.arange(weight.shape[1], dtype=torch.float64)).sum(1)


def mended_orders(theta: Theta, base: float) -> Orders:
    """Algorithm 1 with its indices mended only: every layer's keys from the weights as they stand."""
    return [keys(weight, base).argsort(stable=True) for weight, _ in theta[1:]]


def sequential_orders(theta: Theta, base: float) -> Orders:
    """From the output backwards: a layer's keys are taken after the layer behind it has been sorted."""
    orders: Orders = []
    behind = torch.arange(theta[-1][0].shape[1])
    for weight, _ in reversed(theta[1:]):
        behind = keys(weight[:, behind], base).argsort(stable=True)
        orders.insert(0, behind)
    return orders


def algorithm_1(theta: Theta, base: float, last_power: int = 0) -> Orders:
    """Algorithm 1 as printed: keys P · W_{ℓ+1} with P = (p^0, ..., p^(n_ℓ)), one entry too many.

    `last_power=-1` takes that entry away, to see what comes next.
    """
    orders: Orders = []
    for weight, _ in reversed(theta[1:]):
        powers = base ** torch.arange(weight.shape[0] + 1 + last_power, dtype=torch.float64)
        orders.insert(0, (powers @ weight).argsort(stable=True).argsort())
    return orders


def listing_1(theta: Theta, base: float, names_mended: bool = False) -> list[tuple[Any, Any]]:
    """Listing 1 in our words, line by line, with `base` given (the print never defines it).

    It keeps the orders in a list (`every`) but reads one of them (`own`), as an array of integers. `names_mended` reads
    the list instead, and whole rows and columns in place of the slice `[r:, c]`.
    """
    every: list[Any] = [0] * len(theta)
    result: list[Any] = [0] * len(theta)
    for i, (weight, bias) in reversed(list(enumerate((w.numpy(), b.numpy()) for w, b in theta))):
        columns = weight.shape[1]
        powers = np.power([base] * columns, range(columns), dtype=np.longdouble)
        own = np.argsort(weight @ powers)
        every[i] = own
        read = every if names_mended else own
        if i == len(theta) - 1:
            result[i] = (weight[read[i]], bias)
        elif i == 0:
            result[i] = (weight[:, read[i - 1]], bias[read[i - 1]])
        elif names_mended:
            result[i] = (weight[read[i]][:, read[i - 1]], bias[read[i - 1]])
        else:
            result[i] = (weight[read[i] :, read[i - 1]], bias[read[i - 1]])
    return result


def invariant(form: Callable[[Theta], Theta], sizes: Sequence[int], trials: int = 50) -> int:
    """In how many of the trials a permuted copy gets the same form."""
    thetas = [theta_of(sizes, seed) for seed in range(trials)]
    return sum(same(form(theta), form(act(random_orders(theta, seed), theta))) for seed, theta in enumerate(thetas))


# -- sections 1 and 2: parameterisations and permutations --------------------------------------------------------------


def test_002_S01_a_parameterisation_has_d_layers_not_d_plus_1() -> None:
    sizes = (784, 512, 10)
    theta = theta_of(sizes)
    assert len(theta) == len(sizes) - 1
    assert sum(weight.numel() + bias.numel() for weight, bias in theta) == 407_050
    x = points(theta, 3)
    assert torch.allclose(module_of(theta)(x), realise(theta, x))
    with pytest.raises(IndexError):  # printed: the product runs to d + 1, and layer d + 1 would end in n_{d+1}
        [(sizes[layer - 1], sizes[layer]) for layer in range(1, len(sizes) + 1)]


def test_002_S02_realisation_is_not_injective() -> None:
    a, b = theta_of((4, 6, 3), 0), theta_of((4, 6, 3), 1)
    for theta in (a, b):
        theta[-1] = (torch.zeros(6, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert not same(a, b)
    assert torch.equal(realise(a, points(a)), realise(b, points(b)))


def test_002_S03_columns_of_a_and_rows_of_b() -> None:
    a, b = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    pi = torch.eye(5, dtype=torch.float64)[torch.tensor([2, 0, 3, 1, 4])]
    assert torch.allclose((a @ pi.inverse()) @ (pi @ b), a @ b)
    assert not torch.allclose((pi @ a) @ (b @ pi.inverse()), a @ b), "in print: rows of A and columns of B"


def test_002_S04_permutations_keep_the_function() -> None:
    theta = theta_of(DEEP)
    x = points(theta)
    twin = act(random_orders(theta, 1), theta)
    assert not same(theta, twin)
    assert torch.allclose(realise(twin, x), realise(theta, x))
    sym = it.symmetry(module_of(theta), x)
    assert torch.allclose(sym.act(sym.random(0), module_of(theta))(x), realise(theta, x))


def test_002_S04_printed_biases_do_not() -> None:
    """In print biases also get the previous layer's permutation, and the output's bias is moved."""
    pi = torch.tensor([2, 0, 1])
    wide = theta_of((4, 3, 2))
    with pytest.raises(IndexError):  # π_{d−1} b_d: three nodes, two entries
        wide[-1][1][pi]
    square = theta_of((4, 3, 3))
    printed = act([pi], square)
    printed[-1] = (printed[-1][0], printed[-1][1][pi])
    assert not torch.allclose(realise(printed, points(square)), realise(square, points(square)))


def test_002_S05_relabelled_graphs_compute_the_same() -> None:
    """Nodes get new labels and keep their edges; the matrices read off the new labels are π(θ)."""
    theta = theta_of((3, 4, 4, 2))
    orders = random_orders(theta, 3)
    relabelled = [(dict[tuple[int, int], float](), dict[int, float]()) for _ in theta]
    labels = [torch.arange(3), *(order.argsort() for order in orders), torch.arange(2)]  # old node → new label
    for layer, (weight, bias) in enumerate(theta):
        edges, offsets = relabelled[layer]
        for i, j in itertools.product(*map(range, weight.shape)):
            edges[int(labels[layer][i]), int(labels[layer + 1][j])] = float(weight[i, j])
            offsets[int(labels[layer + 1][j])] = float(bias[j])
    read = [
        (torch.tensor([[edges[i, j] for j in range(w.shape[1])] for i in range(w.shape[0])], dtype=torch.float64),
         torch.tensor([offsets[j] for j in range(w.shape[1])], dtype=torch.float64))
        for (edges, offsets), (w, _) in zip(relabelled, theta, strict=True)
    ]  # fmt: skip
    assert same(read, act(orders, theta))
    assert torch.allclose(realise(read, points(theta)), realise(theta, points(theta)))


def orbit(theta: Theta) -> int:
    """How many different parameterisations the permutations make of one."""
    choices = [list(itertools.permutations(range(len(bias)))) for _, bias in theta[:-1]]
    moved = (act([torch.tensor(p) for p in pick], theta) for pick in itertools.product(*choices))
    return len({torch.cat([t.flatten() for layer in m for t in layer]).numpy().tobytes() for m in moved})


def test_002_S06_the_orbit_has_all_permutations_only_if_nodes_differ() -> None:
    theta = theta_of((2, 3, 2, 1))
    assert orbit(theta) == math.factorial(3) * math.factorial(2)
    twins = theta_of((2, 3, 2, 1))
    for tensor in (twins[0][0].T, twins[0][1], twins[1][0]):
        tensor[1] = tensor[0]  # two nodes with the same incoming weights, bias and outgoing weights
    assert orbit(twins) == orbit(theta) // 2, "the lemma's bound needs pairwise different nodes"


def test_002_S07_the_group_has_that_order_whatever_the_weights() -> None:
    for sizes in ((3, 4, 2), DEEP, (784, 512, 10)):
        module = module_of(theta_of(sizes))
        expected = sum(math.lgamma(n + 1) for n in sizes[1:-1])
        assert it.symmetry(module, torch.zeros(1, sizes[0], dtype=torch.float64)).log_order == pytest.approx(expected)
    assert math.lgamma(513) == pytest.approx(2686.1, abs=0.05)


def test_002_S08_every_copy_of_an_optimum_has_the_same_surroundings() -> None:
    theta = theta_of((2, 3, 2))
    x, target = points(theta, 8), torch.randn(8, 2, dtype=torch.float64)
    flat = torch.cat([t.flatten() for layer in theta for t in layer])
    order = [torch.tensor([2, 0, 1])]
    moved = torch.cat([t.flatten() for layer in act(order, theta) for t in layer])

    def loss(vector: Tensor) -> Tensor:
        w1, b1, w2, b2 = vector.split([6, 3, 6, 2])
        return (realise([(w1.reshape(2, 3), b1), (w2.reshape(3, 2), b2)], x) - target).square().mean()

    assert torch.allclose(loss(flat), loss(moved))
    here, there = (torch.func.grad(loss)(v).norm() for v in (flat, moved))
    assert torch.allclose(here, there)
    here, there = (torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, v)) for v in (flat, moved))
    assert torch.allclose(here, there, atol=1e-12)


# -- section 3: the order and the algorithm ----------------------------------------------------------------------------


def close_call(gap: float) -> Theta:
    """Two very different nodes whose keys at p = 2 differ by `gap`."""
    theta = theta_of((3, 2, 2))
    rows = torch.tensor([[1.0, 1.0], [3.0 + gap, 0.0]], dtype=torch.float64)
    return [theta[0], (rows, theta[1][1])]


def distance(a: Theta, b: Theta) -> float:
    return math.sqrt(
        sum(float((x - y).square().sum()) for la, lb in zip(a, b, strict=True) for x, y in zip(la, lb, strict=True))
    )


def stacked(theta: Theta) -> MLPStack:
    (w1, b1), (w2, b2) = theta
    return MLPStack(w1[None], b1[None], w2[None], b2[None], "sigmoid")


@pytest.mark.parametrize("order", ["nodesort", "nodesort-printed"])
def test_002_S09_noise_can_make_sorted_networks_jump_and_not_matched_ones(order: str) -> None:
    a, b = close_call(1e-7), close_call(-1e-7)
    assert distance(a, b) < 1e-6
    assert distance(library(a, order, 2.0), library(b, order, 2.0)) > 1
    left, right = stacked(a), stacked(b)
    matched = nodesort_networks.reordered("weight matching", right, left, points(a))
    assert float(nodesort_networks.stack_distances(left, matched)["all"]) < 1e-6


def test_002_S09_exact_copies_are_recognised() -> None:
    theta = theta_of(DEEP)
    twin = act(random_orders(theta, 5), theta)
    assert distance(theta, twin) > 1
    assert same(library(theta, "nodesort"), library(twin, "nodesort"))
    other = theta_of(DEEP, 1)
    assert not same(library(theta, "nodesort"), library(other, "nodesort"))


def test_002_S10_digits_in_base_ten_are_numbers_read_backwards() -> None:
    rows = torch.tensor([[1, 2, 3], [9, 0, 0], [0, 0, 1]], dtype=torch.float64)
    assert keys(rows, 10).tolist() == [321, 9, 100]
    with pytest.raises(RuntimeError):  # as printed P = (p^0, ..., p^m) has m + 1 entries for rows of m
        rows @ 10 ** torch.arange(4, dtype=torch.float64)


def test_002_S10_order_is_not_lexicographic() -> None:
    """(1, −5) comes after (0.9, 5) in a dictionary and before it in order (8)."""
    rows = torch.tensor([[1.0, -5.0], [0.9, 5.0]], dtype=torch.float64)
    assert keys(rows, 1.1).argsort().tolist() == [0, 1]
    assert nodesort_networks.lexicographic_order(rows[None]).tolist() == [[1, 0]]
    theta = theta_of((3, 2, 2))
    theta = [theta[0], (rows, theta[1][1])]
    assert torch.equal(library(theta, "nodesort-printed", 1.1)[1][0], rows)


def test_002_S10_order_has_ties() -> None:
    """Different rows can have one key, so the order alone does not make the form unique. The library breaks ties."""
    rows = torch.tensor([[3.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert keys(rows, 2).tolist() == [3, 3]
    theta = theta_of((3, 2, 2))
    theta = [theta[0], (rows, theta[1][1])]
    twin = act([torch.tensor([1, 0])], theta)
    assert not same(act(mended_orders(theta, 2), theta), act(mended_orders(twin, 2), twin))
    assert same(library(theta, "nodesort", 2.0), library(twin, "nodesort", 2.0))


def test_002_S11_algorithm_1_fails_as_printed() -> None:
    theta = theta_of((5, 7, 6, 3))
    with pytest.raises(RuntimeError):  # P has n_ℓ + 1 entries, W_{ℓ+1} has n_ℓ rows
        algorithm_1(theta, 1.1)
    # one entry less, and P · W_{ℓ+1} still sorts the nodes of layer ℓ + 1 instead of layer ℓ
    assert [len(order) for order in algorithm_1(theta, 1.1, last_power=-1)] == [6, 3]
    with pytest.raises(IndexError):
        realise(act(algorithm_1(theta_of((5, 3, 6, 7)), 1.1, last_power=-1), theta_of((5, 3, 6, 7))), points(theta))


@pytest.mark.parametrize("base", [1.1, 2.0, 10.0])
def test_002_S11_keys_must_follow_the_layer_behind(base: float) -> None:
    """With mended indices the printed algorithm is canonical for one hidden layer and for no more."""
    mended = lambda theta: act(mended_orders(theta, base), theta)  # noqa: E731
    sequential = lambda theta: act(sequential_orders(theta, base), theta)  # noqa: E731
    assert invariant(mended, (5, 12, 3)) == 50
    assert invariant(mended, (5, 12, 12, 3)) == 0
    assert invariant(sequential, (5, 12, 12, 3)) == 50
    assert invariant(sequential, (5, 12, 12, 12, 3)) == 50


def test_002_S11_library_has_both() -> None:
    theta = theta_of(DEEP, 4)
    assert same(library(theta, "nodesort-printed", 1.1), act(mended_orders(theta, 1.1), theta))
    assert same(library(theta, "nodesort", 1.1), act(sequential_orders(theta, 1.1), theta))


def test_002_S12_listing_1_gives_no_network() -> None:
    theta = theta_of((5, 7, 3))
    printed = listing_1(theta, 1.1)
    assert printed[1][0].shape == (3,), "one row instead of all rows in order"
    assert printed[0][0].shape == (5,), "one column instead of all columns in order"
    with pytest.raises(IndexError):  # input 4 has the largest key, and there is no node 4
        listing_1([(torch.arange(10.0).reshape(5, 2), torch.zeros(2)), *theta_of((2, 3))], 1.1)


def test_002_S12_mended_names_work_for_one_hidden_layer_by_accident() -> None:
    """In layer 0 index i − 1 is −1, Python's last entry, which with one hidden layer is the right one."""
    theta = theta_of((5, 7, 3))
    mended = [(torch.from_numpy(w), torch.from_numpy(b)) for w, b in listing_1(theta, 1.1, names_mended=True)]
    assert same(mended, act(mended_orders(theta, 1.1), theta))
    deep = listing_1(theta_of(DEEP), 1.1, names_mended=True)
    assert deep[1][0].shape != (7, 7), "the columns come from layer i − 1, which is not yet sorted, not from i + 1"
    right = act(sequential_orders(theta_of(DEEP), 1.1), theta_of(DEEP))
    assert torch.allclose(realise(right, points(right)), realise(theta_of(DEEP), points(right)))


@pytest.mark.parametrize("base", [1.001, 1.1, 2.0, 10.0])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU])
def test_002_S13_the_sorted_form_is_canonical(base: float, activation: type[nn.Module]) -> None:
    """NodeSort(θ) = NodeSort(π(θ)) and NodeSort(NodeSort(θ)) = NodeSort(θ), 50 times out of 50."""
    sizes = (4, 6, 6, 3)
    x = torch.zeros(1, 4, dtype=torch.float64)
    sym = it.symmetry(module_of(theta_of(sizes), activation), x)

    def form(theta: Theta) -> Theta:
        made = it.canonicalize(module_of(theta, activation), x, order="nodesort", base=base, symmetry=sym)
        return theta_from(made.model)

    for seed in range(50):
        theta = theta_of(sizes, seed)
        once, twin = form(theta), form(act(random_orders(theta, seed), theta))
        assert distance(once, twin) <= 1e-12 * distance(theta, act(random_orders(theta, seed), theta))
        if seed < 5:
            assert distance(form(once), once) <= 1e-12


def test_002_S13_near_base_one_the_printed_keys_almost_work() -> None:
    """With p near 1 a key is near the sum of its row, which no order of columns changes: the error is easy to miss."""
    counts = {
        base: invariant(lambda theta, base=base: act(mended_orders(theta, base), theta), (5, 12, 12, 3))
        for base in (1.0, 1.0001, 1.001, 1.1)
    }
    assert counts[1.1] == 0
    assert counts[1.001] < counts[1.0001] <= 50
    assert 0 < counts[1.001] < 50


@pytest.mark.parametrize("order", ["nodesort", "nodesort-printed", "lexicographic"])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU, nn.Tanh])
def test_002_S14_sorting_keeps_the_function(order: str, activation: type[nn.Module]) -> None:
    module = module_of(theta_of(DEEP), activation)
    x = points(theta_of(DEEP))
    canonical = it.canonicalize(module, x, order=order)
    assert torch.allclose(canonical.model(x), module(x), rtol=1e-10, atol=1e-10)
    again = it.symmetry(module, x).act(canonical.element, module)
    for ours, theirs in zip(again.parameters(), canonical.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_002_S15_printed_powers_overflow() -> None:
    """Powers beyond 2^1024 are no float64; the listing's float128 ends at 1.2e4932 and is not on every machine."""
    theta = theta_of((3, 4, 400, 2))
    assert not torch.isfinite(keys(theta[1][0], 10.0)).all()
    with pytest.raises(InputError) as refusal:
        library(theta, "nodesort-printed", 10.0)
    message = str(refusal.value)
    assert "overflow" in message
    assert re.search(r"\b10(\.0)?\b", message), "the base is named"
    assert re.search(r"\b(400|399)\b", message), "the width, or its last power, is named"


@pytest.mark.parametrize("base", [1.001, 2.0, 10.0, 1e6])
def test_002_S15_sequential_keys_are_safe_for_any_base_and_width(base: float) -> None:
    theta = theta_of((3, 4, 400, 2))
    twin = act(random_orders(theta, 1), theta)
    form = library(theta, "nodesort", base)
    assert same(form, library(twin, "nodesort", base))
    assert torch.allclose(realise(form, points(theta)), realise(theta, points(theta)))


def test_002_S15_entries_above_one_are_sorted_too() -> None:
    theta = [(100 * weight, bias) for weight, bias in theta_of(DEEP)]
    twin = act(random_orders(theta, 1), theta)
    assert same(library(theta, "nodesort", 1.1), library(twin, "nodesort", 1.1))


@pytest.mark.parametrize("order", ["nodesort", "nodesort-printed"])
def test_002_S16_convolutional_networks(order: str) -> None:
    """Claimed and not shown in the thesis: output channels, BatchNorm and the next layer's input channels move."""
    net = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    ).double().eval()  # fmt: skip
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.uniform_(0.5, 2)
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    canonical = it.canonicalize(net, x, order=order).model
    assert torch.allclose(canonical(x), net(x), rtol=1e-9, atol=1e-9)
    assert not torch.equal(canonical.get_parameter("0.weight"), net.get_parameter("0.weight"))
    if order == "nodesort":
        sym = it.symmetry(net, x)
        twin = it.canonicalize(sym.act(sym.random(3), net), x, order=order).model
        for a, b in zip(canonical.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


# -- section 4: the experiment -----------------------------------------------------------------------------------------


def measured(what: str, **where: Any) -> dict[str, dict[str, Any]]:
    """Method → what was measured of it with a thousand networks."""
    return by_method(read_result(RESULT).rows, what, **where)


def tiny(what: str, **where: Any) -> dict[str, dict[str, Any]]:
    """The same with five small ones."""
    return by_method(tiny_rows(), what, **where)


SORTS = ["nodesort 1.001", "nodesort 1.1", "nodesort 2", "nodesort 10", "lexicographic"]


def test_002_S17_printed_table() -> None:
    """What Table 1 prints: the means fall by 0.29 % and 6.9 %, and the largest distance of W1 grows."""
    plan = find("sorensen-table1")
    before, after = (
        dict(zip(plan.labels, plan.printed[name], strict=True)) for name in ("unsorted", "sorted, p = 1.1")
    )
    change = {label: float(after[label] or 0) / float(before[label] or 0) - 1 for label in plan.labels}
    assert change["W₁ mean"] == pytest.approx(-0.0029, abs=5e-5)
    assert change["W₂ mean"] == pytest.approx(-0.069, abs=5e-4)
    assert change["W₁ max"] > 0, "the text says that all distances fell"


def test_002_S17_sorting_brings_the_sorted_weights_nearer() -> None:
    result = tiny("all_pairs")
    assert all(result[method]["w2"]["change"] < 0 for method in SORTS)


def test_002_S17_measured() -> None:
    start, result = measured("start")["unsorted"], measured("all_pairs")
    assert start["w1"]["mean"] == pytest.approx(35.2, abs=0.1)
    assert start["w2"]["mean"] == pytest.approx(6.26, abs=0.1)
    for layer, printed in (("w1", 82.89585), ("w2", 16.28864)):
        assert result["unsorted"][layer]["mean"] == pytest.approx(printed, rel=0.02), "weights grew as far"
    for method in SORTS:
        assert result[method]["w2"]["change"] < 0
        assert abs(result[method]["w1"]["change"]) < abs(result[method]["w2"]["change"])


def test_002_S18_permuted_copies_are_found_and_nothing_else() -> None:
    for method in SORTS:
        assert tiny("all_pairs")[method]["coinciding_pairs"] == 0
        assert tiny("control")[method]["distance"] == 0
    assert tiny("control")["unsorted"]["distance"] > 0


def test_002_S18_measured() -> None:
    result, control = measured("all_pairs"), measured("control")
    for method in SORTS:
        assert result[method]["coinciding_pairs"] == 0
        assert result[method]["w1"]["min"] > 0
        assert control[method]["distance"] == 0


# -- section 5: averages -----------------------------------------------------------------------------------------------


def test_002_S19_the_mean_is_entry_by_entry() -> None:
    a, b = stacked(theta_of((3, 4, 2), 0)), stacked(theta_of((3, 4, 2), 1))
    both = concatenated([a, b])
    mean = averaged("unsorted", both, torch.zeros(1, 3))
    assert torch.equal(mean.w1, (a.w1 + b.w1) / 2)
    assert torch.equal(mean.b2, (a.b2 + b.b2) / 2)
    assert ((a.w1 + b.w1) / 2).sum().shape == (), "the printed double sum is a number, not a matrix"


def test_002_S20_toy_points() -> None:
    r, g, b = (1.4, -3.0, 5.6), (5.0, 1.2, -2.4), (-3.2, 0.9, 6.0)
    assert tuple(sorted(r)) == (-3.0, 1.4, 5.6)
    assert tuple(sorted(g)) == (-2.4, 1.2, 5.0)
    assert tuple(sorted(b)) == b
    # one octant is an accident of these three; what sorted points share is the chamber x1 ≤ x2 ≤ x3
    signs = {tuple(np.sign(sorted(point))) for point in (r, g, b)}
    assert len(signs) == 1
    assert tuple(np.sign(sorted((-1.0, -2.0, 3.0)))) not in signs


def test_002_S21_sorted_networks_can_average_to_the_zero_network() -> None:
    """The thesis rules it out; (1, 1) and (−1, −1) are sorted. With different keys W2 cannot vanish, but W1 can."""

    def ones(sign: int) -> Theta:
        weights = sign * torch.ones(1, 2, dtype=torch.float64)
        return [(weights, torch.zeros_like(weights[0])), (weights.T, torch.zeros_like(weights[:, 0]))]

    a, b = (act(mended_orders(ones(sign), 1.1), ones(sign)) for sign in (1, -1))
    mean = [((wa + wb) / 2, (ba + bb) / 2) for (wa, ba), (wb, bb) in zip(a, b, strict=True)]
    assert same(a, ones(1))
    assert same(b, ones(-1))
    assert all(not tensor.any() for layer in mean for tensor in layer)
    assert not realise(mean, points(mean), torch.relu).any()


def test_002_S21_averages_of_every_kind_are_measured() -> None:
    for size in (2, 5):
        accuracy = tiny("accuracy", networks=size)
        assert {"unsorted", *SORTS, "weight matching", "activation matching", "ensemble"} == set(accuracy)
        assert all(0 <= numbers["min"] <= numbers["mean"] <= numbers["max"] <= 1 for numbers in accuracy.values())
    for method in ("unsorted", *SORTS, "weight matching"):
        curve = tiny("curves")[method]
        assert curve["loss_barrier"]["mean"] >= 0
        assert len(curve["accuracy"]["mean"]) == len(curve["t"]) == 11


def test_002_S21_measured() -> None:
    """Sorting is no substitute for matching: matched networks average better and meet a lower barrier."""
    for size in (2, 10):
        accuracy = measured("accuracy", networks=size)
        matched = accuracy["weight matching"]["mean"]
        assert all(matched > accuracy[method]["mean"] for method in ("unsorted", *SORTS))
    barrier = {name: row["loss_barrier"]["mean"] for name, row in measured("curves").items()}
    assert all(barrier["weight matching"] < barrier[method] for method in ("unsorted", *SORTS))


def test_002_S22_an_ensemble_is_at_least_as_good() -> None:
    """For the loss this is a theorem (the logarithm is concave); accuracy may differ by a few samples."""
    nets = [theta_of((4, 6, 3), seed) for seed in range(5)]
    chances = torch.stack([realise(theta, points(theta)).softmax(-1) for theta in nets])
    labels = torch.arange(20) % 3
    losses = -chances[:, torch.arange(20), labels].log().mean(1)
    assert -chances.mean(0)[torch.arange(20), labels].log().mean() <= losses.mean()
    ensemble, single = tiny("accuracy", networks=5)["ensemble"], tiny("accuracy", networks=1)["single"]
    assert ensemble["mean"] >= single["mean"] - 0.02


def test_002_S22_measured() -> None:
    two, ten = (measured("accuracy", networks=size)["ensemble"]["mean"] for size in (2, 10))
    assert measured("accuracy", networks=1)["single"]["mean"] < two < ten


def test_002_S23_matching_beats_sorting() -> None:
    result = tiny("some_pairs")
    for method in ("unsorted", *SORTS, "activation matching"):
        for number in ("min", "mean", "max"):
            assert result["weight matching"]["all"][number] <= result[method]["all"][number] + 1e-9


def test_002_S23_measured() -> None:
    """Matching brings networks several times nearer than the best sort does, in both layers."""
    result = measured("some_pairs")
    for layer in ("w1", "w2", "all"):
        best_sort = min(result[method][layer]["change"] for method in SORTS)
        assert result["weight matching"][layer]["change"] < 2 * best_sort < 0
