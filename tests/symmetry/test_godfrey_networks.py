"""Godfrey et al. 2022, rows 000-G01, G14 to G16 and G18 to G21: what the groups do to networks, losses and stitching.

"Printed" is the statement as it stands in the paper, "corrected" what holds; a test shows the first fail.
"""

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import Line, Net, certified, edited, element, gap, prove, wire_at
from torch import Tensor, nn

import intertwine as it
from intertwine.symmetry.element import Element
from intertwine.symmetry.intertwiner import intertwines, phi, random_member
from intertwine.symmetry.symmetry import Symmetry

#: torch refuses eps = 0 in training; this one changes no digit.
NO_EPS = 1e-300
Function = Callable[[Tensor], Tensor]
Weights = list[tuple[Tensor, Tensor]]
SIGMAS: dict[str, Function] = {
    "ReLU": torch.relu,
    "cube": lambda x: x**3,
    "square": lambda x: x**2,
    "tanh": torch.tanh,
    "Gaussian RBF": lambda x: torch.exp(-(x**2) / 2),
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weights(*widths: int) -> Weights:
    return [(double(n, m) / math.sqrt(m), double(n)) for m, n in pairwise(widths)]


def run(sigma: Function, layers: Weights, x: Tensor, last: bool = True) -> Tensor:
    """ℓ_k ∘ … ∘ ℓ_1 on a batch; `last`: the last of these layers is the network's last and has no activation."""
    for i, (w, b) in enumerate(layers):
        x = x @ w.T + b
        if i < len(layers) - 1 or not last:
            x = sigma(x)
    return x


def acted(sigma: Function, layers: Weights, members: list[Tensor]) -> Weights:
    """W' = (A_1 W_1, A_1 b_1, A_2 W_2 φ(A_1⁻¹), A_2 b_2, …, W_k φ(A_{k−1}⁻¹), b_k), as printed in Proposition 3.4."""
    moved, before = [], torch.eye(layers[0][0].shape[1], dtype=torch.float64)
    for (w, b), a in zip(layers, [*members, torch.eye(len(layers[-1][1]), dtype=torch.float64)], strict=True):
        moved.append((a @ w @ before, a @ b))
        before = phi(sigma, torch.linalg.inv(a))
    return moved


# -- G01 ---------------------------------------------------------------------------------------------------------------


def test_000_G01_truncations() -> None:
    """f = f_{>i} ∘ f_{≤i} at every hidden layer. Printed: 1 ≤ i < k − 1; the cut i = k − 1 is one as well."""
    layers, x = weights(3, 5, 4, 6, 2), double(8, 3)
    k = len(layers)
    whole = run(torch.relu, layers, x)
    cuts = [
        i for i in range(1, k) if torch.equal(run(torch.relu, layers[i:], run(torch.relu, layers[:i], x, False)), whole)
    ]
    assert cuts == list(range(1, k))
    assert max(cuts) == k - 1, "the printed range ends before it"


def test_000_G01_the_weights_of_a_layer_have_the_output_first() -> None:
    """Printed: Mat_{n1,n0} are n0 × n1 matrices. Then W_i ∈ Mat_{n_i, n_{i−1}} could not act on R^{n_{i−1}}."""
    n0, n1 = 3, 5
    x = double(n0)
    assert (double(n1, n0) @ x).shape == (n1,)
    with pytest.raises(RuntimeError, match="size mismatch"):
        double(n0, n1) @ x


# -- G14 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGMAS)
def test_000_G14_proposition_3_4_by_hand(name: str) -> None:
    """The formula for W' and both halves of equation 3.5 at every cut, with φ as printed."""
    sigma = SIGMAS[name]
    layers, x = weights(3, 5, 4, 6, 2), double(20, 3)
    members = [random_member(sigma, len(b), seed, spread=0.3) for seed, (_, b) in enumerate(layers[:-1])]
    moved = acted(sigma, layers, members)
    whole = run(sigma, layers, x)
    assert torch.allclose(run(sigma, moved, x), whole, rtol=1e-7, atol=1e-9 * float(whole.abs().max()))
    for m in range(1, len(layers)):
        image = phi(sigma, members[m - 1])
        hidden = run(sigma, layers[:m], x, False)
        assert torch.allclose(run(sigma, moved[:m], x, False), hidden @ image.T, rtol=1e-7, atol=1e-9)
        z = double(20, hidden.shape[1])  # any point, not only features
        expected = run(sigma, layers[m:], z @ torch.linalg.inv(image).T)
        assert torch.allclose(run(sigma, moved[m:], z), expected, rtol=1e-6, atol=1e-8 * float(expected.abs().max()))


def mlp(activation: nn.Module | None = None) -> nn.Sequential:
    sigma = activation or nn.ReLU()
    return nn.Sequential(
        *(nn.Linear(3, 6), sigma, nn.Linear(6, 5), copy.deepcopy(sigma), nn.Linear(5, 4), copy.deepcopy(sigma)),
        nn.Linear(4, 2),
    ).double()


def cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3)),
    ).double()


class Residual(nn.Module):
    """x + W2·ReLU(W1·x), then ReLU."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def residual() -> nn.Sequential:
    stem = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    return nn.Sequential(stem, Residual(5, 7), Residual(5, 4), nn.Linear(5, 2)).double()


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "MLP": (mlp, (7, 3)),
    "CNN": (cnn, (3, 2, 8, 8)),
    "residual": (residual, (7, 3)),
}


def found(name: str) -> tuple[nn.Sequential, Tensor, Symmetry, Element, nn.Sequential]:
    """A model, inputs, its certified symmetry, a random element and the moved model."""
    make, shape = MODELS[name]
    model, x = make(), double(*shape)
    sym = certified(it.symmetry(model, x), model, x)
    g = sym.random(seed=1, scale_spread=0.5)
    moved = sym.act(g, model)
    assert isinstance(moved, nn.Sequential)
    return model, x, sym, g, moved


@pytest.mark.parametrize("name", MODELS)
def test_000_G14_proposition_3_4_at_every_cut(name: str) -> None:
    """f' = f; f'_{≤m} = φ(A_m) f_{≤m}; f'_{>m} = f_{>m} ∘ φ(A_m)⁻¹ on any input, through pooling and flattening."""
    model, x, sym, g, moved = found(name)
    assert gap(model, moved, x) < 1e-12
    moves = 0
    for m in range(1, len(model)):
        before, after = model[:m](x), moved[:m](x)
        predicted = sym.act_on_features(g, str(m - 1), before)
        assert torch.allclose(after, predicted, rtol=1e-10, atol=1e-12)
        moves += not torch.allclose(after, before, rtol=1e-3)
        z = torch.randn_like(before)
        assert torch.allclose(moved[m:](sym.act_on_features(g, str(m - 1), z)), model[m:](z), rtol=1e-9, atol=1e-10)
        assert not torch.allclose(moved[m:](z), model[m:](z), rtol=1e-3)
    assert moves == len(model) - 1, "no cut is left where it was"


def test_000_G14_the_element_is_a_matrix_of_the_group() -> None:
    """The engine's element on a wire, as the matrix A, is a member of G_ReLU, and its features move by A."""
    model, x, sym, g, _ = found("MLP")
    a = sym.act_on_features(g, "1", torch.eye(6, dtype=torch.float64)).T
    assert intertwines(torch.relu, a).ok
    assert torch.allclose(sym.act_on_features(g, "1", model[:2](x)), model[:2](x) @ a.T)


def test_000_G14_flatten_acts_by_a_kronecker_product() -> None:
    """After flattening, 5 channels of 2 × 2 positions move by A ⊗ I_4."""
    model, x, sym, g, _ = found("CNN")
    image, flat = model[:6](x), model[:7](x)
    eye = torch.eye(5, dtype=torch.float64)[:, :, None, None].expand(-1, -1, 2, 2)
    a = sym.act_on_features(g, "5", eye)[:, :, 0, 0].T.contiguous()
    kron = torch.kron(a, torch.eye(4, dtype=torch.float64))
    assert torch.allclose(sym.act_on_features(g, "6", flat), flat @ kron.T)
    assert torch.allclose(sym.act_on_features(g, "5", image).flatten(1), flat @ kron.T)


def test_000_G14_max_pooling_lets_no_signs_through() -> None:
    """Printed without a condition; signs pass tanh and average pooling, and stop at a maximum."""
    x = double(2, 3, 4, 4)
    assert torch.allclose(F.max_pool2d(3 * x, 2), 3 * F.max_pool2d(x, 2))
    assert not torch.allclose(F.max_pool2d(-x, 2), -F.max_pool2d(x, 2))
    where = "on conv.weight[0], conv.bias[0], head.weight[1 ×4]"
    for pool, group in ((nn.AvgPool2d(2), "S_3 ⋉ {±1}^3"), (nn.MaxPool2d(2), "S_3")):
        net = Net(lambda m, x: m.head(m.pool(m.conv(x).tanh()).flatten(1)),
                  conv=nn.Conv2d(2, 3, 3, padding=1), pool=pool, head=nn.Linear(12, 2))  # fmt: skip
        prove(net, torch.randn(2, 2, 4, 4), wires=[f"{group} {where}"])


# -- G15 ---------------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("name", MODELS)
def test_000_G15_the_loss_is_invariant_and_gradients_are_contragredient(name: str) -> None:
    """ℓ(gW) = ℓ(W), and ⟨∇ℓ(gW), g·d⟩ = ⟨∇ℓ(W), d⟩ for every direction d."""
    model, x, sym, g, moved = found(name)
    y = torch.arange(len(x)) % 2
    losses = [loss_of(m, x, y) for m in (model, moved)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    gradients = [
        dict(zip((n for n, _ in m.named_parameters()), torch.autograd.grad(v, list(m.parameters())), strict=True))
        for m, v in zip((model, moved), losses, strict=True)
    ]
    for _ in range(3):
        direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        there = sym.act_on_state(g, direction)
        before = sum(float((gradients[0][n] * direction[n]).sum()) for n in direction)
        after = sum(float((gradients[1][n] * there[n]).sum()) for n in direction)
        assert after == pytest.approx(before, rel=1e-9, abs=1e-11)


def hessian_spectrum(model: nn.Module, x: Tensor, y: Tensor) -> np.ndarray:
    names, tensors = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)
    sizes = [t.numel() for t in tensors]

    def loss(flat: Tensor) -> Tensor:
        parts = {n: f.view_as(t) for n, f, t in zip(names, flat.split(sizes), tensors, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, parts, (x,)), y)

    flat = torch.cat([t.flatten() for t in tensors])
    return np.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat).numpy())


def test_000_G15_the_hessian_keeps_its_spectrum_under_isometries_only() -> None:
    """Permutations and signs are orthogonal maps of weight space, scales are not; the inertia survives them too."""
    x, y = double(20, 3), torch.arange(20) % 2
    turned = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sym = it.symmetry(turned, x)
    moved = sym.act(sym.random(seed=3), turned)
    assert str(sym.wires[0].group) == "S_4 ⋉ {±1}^4"
    before = hessian_spectrum(turned, x, y)
    assert np.allclose(hessian_spectrum(moved, x, y), before, atol=1e-12)

    scaled = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    sym = it.symmetry(scaled, x)
    g = element(sym, "0.weight[0]", scale=torch.tensor([[3.0, 0.5, 2.0, 1.0]], dtype=torch.float64))
    before, after = (hessian_spectrum(m, x, y) for m in (scaled, sym.act(g, scaled)))
    assert gap(scaled, sym.act(g, scaled), x) < 1e-12
    assert np.abs(after - before).max() > 0.1 * np.abs(before).max()
    assert sum(before > 1e-9) == sum(after > 1e-9)
    assert sum(before < -1e-9) == sum(after < -1e-9)
    swapped = sym.act(element(sym, "0.weight[0]", permutation=torch.tensor([2, 0, 3, 1])), scaled)
    assert np.allclose(hessian_spectrum(swapped, x, y), before, atol=1e-12)


def test_000_G15_the_last_layer_has_no_group() -> None:
    """Printed: 1 ≤ i ≤ k. Corrected: i ≤ k − 1; a permutation of the outputs is another function and another loss."""
    model, x = mlp(), double(9, 3)
    order = torch.tensor([1, 0])
    other = edited(model, **{"6__weight": lambda w: w[order], "6__bias": lambda b: b[order]})
    y = torch.zeros(9, dtype=torch.long)
    assert gap(model, other, x) > 1e-3
    assert abs((loss_of(model, x, y) - loss_of(other, x, y)).item()) > 1e-3
    assert "6.weight axis 0" in [what for what, _ in it.symmetry(model, x).frozen]


# -- G16 ---------------------------------------------------------------------------------------------------------------


def test_000_G16_the_example_networks() -> None:
    """Two sets of weights, one function, on the plane (printed: for x ∈ R, on which a 2 × 2 matrix does not act)."""
    pairs = [([[1.0, 0], [0, 2]], [[3.0, 0], [0, 1]]), ([[0.0, 2], [1, 0]], [[0.0, 3], [1, 0]])]
    x = double(2, 200)
    values = []
    for first, second in pairs:
        w1, w2 = (torch.tensor(w, dtype=torch.float64) for w in (first, second))
        values.append(w2 @ torch.relu(w1 @ x))
    assert torch.equal(values[0], values[1])
    # the second is the first moved by the swap
    swap = torch.tensor([[0.0, 1], [1, 0]], dtype=torch.float64)
    moved = acted(
        torch.relu, [(torch.tensor(w, dtype=torch.float64), torch.zeros(2).double()) for w in pairs[0]], [swap]
    )
    assert [w.tolist() for w, _ in moved] == [list(map(list, w)) for w in pairs[1]]


# -- G18 ---------------------------------------------------------------------------------------------------------------


def test_000_G18_the_printed_batch_norm_is_no_batch_norm() -> None:
    """Printed: X̃·diag(X̃ᵀX̃)⁻¹ with X̃ = X − 11ᵀX. Corrected: 1/b in the mean, and the exponent −1/2."""
    rng = np.random.default_rng(0)
    x, scale, shift = rng.normal(size=(16, 5)), np.exp(rng.normal(size=5)), rng.normal(size=5)

    def printed(x: np.ndarray) -> np.ndarray:
        centred = x - np.ones((len(x), len(x))) @ x
        return centred / (centred**2).sum(0)

    def corrected(x: np.ndarray) -> np.ndarray:
        centred = x - np.ones((len(x), len(x))) @ x / len(x)
        return centred / np.sqrt((centred**2).mean(0))

    torchs = F.batch_norm(torch.from_numpy(x), None, None, training=True, eps=NO_EPS).numpy()
    assert np.allclose(corrected(x), torchs)
    assert np.allclose(corrected(x * scale), corrected(x))
    assert np.allclose(corrected(x + shift), corrected(x))
    assert not np.allclose(printed(x), torchs, atol=0.1)
    assert not np.allclose(printed(x * scale), printed(x), rtol=0.1), "it turns XD into XD⁻¹"
    assert np.allclose(printed(x * scale), printed(x) / scale)
    assert not np.allclose(printed(x + shift), printed(x), rtol=0.01)


def normed(eps: float) -> nn.Sequential:
    model = nn.Sequential(
        *(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5, eps=eps), nn.ReLU()),
        *(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4, eps=eps), nn.ReLU(), nn.Linear(4, 2)),
    ).double()
    for norm in (model[1], model[4]):
        assert isinstance(norm, nn.BatchNorm1d)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model.train()
    for _ in range(3):
        model(double(20, 3))  # running statistics of their own
    return model


def acted_E47(model: nn.Sequential, exact: bool) -> nn.Sequential:
    """Equation E.47 with random A_l = P·D and c_l; running means by A, variances by P·D² (`exact`: with eps inside)."""
    moved, before = copy.deepcopy(model), torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        for seed, place in enumerate((0, 3)):
            linear, norm = moved[place], moved[place + 1]
            assert isinstance(linear, nn.Linear)
            assert isinstance(norm, nn.BatchNorm1d)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            a = random_member(torch.relu, len(linear.weight), seed)
            p = (a > 0).double()
            b = p @ torch.diag((0.5 * double(len(a))).exp())
            linear.weight.copy_(a @ linear.weight @ torch.linalg.inv(before))
            norm.weight.copy_(b @ norm.weight)
            norm.bias.copy_(b @ norm.bias)
            norm.running_mean.copy_(a @ norm.running_mean)
            eps = norm.eps if exact else 0.0
            norm.running_var.copy_((a**2) @ (norm.running_var + eps) - eps)
            before = b
        last = moved[6]
        assert isinstance(last, nn.Linear)
        last.weight.copy_(last.weight @ torch.linalg.inv(before))
    return moved


def test_000_G18_the_action_in_training_and_evaluation() -> None:
    """Exact in both modes without eps. With eps training is off by its size, and evaluation needs a²(v + eps) − eps."""
    x = double(16, 3)
    for eps in (NO_EPS, 1e-3):
        model = normed(eps)
        for training in (True, False):
            model.train(training)
            errors = {
                exact: gap(copy.deepcopy(model), acted_E47(model, exact).train(training), x) for exact in (True, False)
            }
            if eps == NO_EPS:
                assert max(errors.values()) < 1e-12
            elif training:
                assert 1e-7 < errors[True] < 0.1, "the statistics of the batch are rescaled, eps is not"
            else:
                assert errors[True] < 1e-12
                assert errors[False] > 1e-7


def test_000_G18_the_engine_finds_both_factors() -> None:
    """R₊^n × G_ReLU per layer in evaluation, exact for any eps, and signs, which the paper leaves out."""
    model, x = normed(1e-3), double(16, 3)
    sym = certified(it.symmetry(model.eval(), x), model, x)
    assert [w.group.scales for w in sym.wires] == [2, 2]
    assert [w.group.signs for w in sym.wires] == [1, 1]
    moved = sym.act(sym.random(seed=2, scale_spread=1.0), model)
    assert gap(model, moved, x) < 1e-11
    training = it.symmetry(model.train(), x)
    assert [w.group.scales for w in training.wires] == [1, 1], "eps stops the scales in front of the norm"
    moved = training.act(training.random(seed=2, scale_spread=1.0), model)
    assert gap(copy.deepcopy(model), moved, x) < 1e-11


# -- G19 ---------------------------------------------------------------------------------------------------------------


def test_000_G19_block_ends_move_by_one_matrix() -> None:
    """A_{r_i} is one matrix along the skip chain; f'_{≤r} = A_r f_{≤r} at every block end."""
    model, x, sym, g, moved = found("residual")
    stream = wire_at(sym, "0.0.weight[0]")
    assert (
        Line.of(stream).places
        == Line.read(
            "_ on 0.0.weight[0], 0.0.bias[0], 1.first.weight[1], 1.second.weight[0], 1.second.bias[0],"
            "2.first.weight[1], 2.second.weight[0], 2.second.bias[0], 3.weight[1]"
        ).places
    )
    a = sym.act_on_features(g, "0", torch.eye(5, dtype=torch.float64)).T
    assert intertwines(torch.relu, a).ok
    for m in (1, 2, 3):
        assert torch.allclose(moved[:m](x), model[:m](x) @ a.T, rtol=1e-11, atol=1e-12)


def test_000_G19_two_matrices_on_one_skip_chain_break_the_function() -> None:
    """Let the second block alone end in another A: what it adds and what it is added to no longer fit."""
    model, x, _, _, _ = found("residual")
    a = random_member(torch.relu, 5, 4)
    inverse = torch.linalg.inv(a)
    other = edited(model, **{
        "2__second__weight": lambda w: a @ w, "2__second__bias": lambda b: a @ b, "3__weight": lambda w: w @ inverse,
    })  # fmt: skip
    assert gap(model, other, x) > 1e-2


def test_000_G19_stitching_inside_a_block_leaves_the_skip_behind() -> None:
    """Front of f up to inside block 1, back of f': the skip carries A_r⁻¹, as equation E.56 says, and S ≠ f."""
    model, x, sym, g, moved = found("residual")
    block, other = model[1], moved[1]
    assert isinstance(block, Residual)
    assert isinstance(other, Residual)
    a = sym.act_on_features(g, "0", torch.eye(5, dtype=torch.float64)).T
    inner = wire_at(sym, "1.first.weight[0]")
    move = g[inner.name]
    assert move.scale is not None
    assert move.permutation is not None
    skip = model[:1](x)
    inside = torch.relu(block.first(skip))
    ideal = (inside * move.scale[0])[:, move.permutation]  # φ = A of the inner wire
    assert torch.allclose(ideal, torch.relu(other.first(skip @ a.T))), "inside the block alone it would fit"
    stitched = moved[2:](torch.relu(skip + other.second(ideal)))
    back = skip @ torch.linalg.inv(a).T
    predicted = model[2:](torch.relu(back + block.second(inside)))  # E.56
    assert torch.allclose(stitched, predicted, rtol=1e-10, atol=1e-11)
    assert (stitched - model(x)).abs().max() > 1e-2 * model(x).abs().max()
    # with the identity on the stream the same stitch is exact
    still = moved_by_inner(sym, g, inner.name, model)
    last = still[1]
    assert isinstance(last, Residual)
    assert torch.allclose(still[2:](torch.relu(skip + last.second(ideal))), model(x), rtol=1e-10, atol=1e-11)


def moved_by_inner(sym: Symmetry, g: Element, wire: str, model: nn.Sequential) -> nn.Sequential:
    moved = sym.act(g.only(wire), model)
    assert isinstance(moved, nn.Sequential)
    return moved


def padded() -> Net:
    """A ResNet of two stages with a shortcut of option A: every second pixel, new channels of zeros on both sides."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x).relu()
        x = (x + m.b(m.a(x).relu())).relu()
        x = (F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)) + m.d(m.c(x).relu())).relu()
        return m.head(x.mean((2, 3)))

    return Net(
        forward,
        stem=nn.Conv2d(3, 4, 3, padding=1), a=nn.Conv2d(4, 5, 3, padding=1), b=nn.Conv2d(5, 4, 3, padding=1),
        c=nn.Conv2d(4, 6, 3, 2, 1), d=nn.Conv2d(6, 8, 3, padding=1), head=nn.Linear(8, 2),
    ).double()  # fmt: skip


def test_000_G19_a_zero_padded_shortcut() -> None:
    """The stream goes on in the middle channels of the next stage; the padded ones move among themselves."""
    net, x = padded(), double(2, 3, 8, 8)
    sym = prove(net, x, wires=[
        "S_4 ⋉ (R₊)^4 on stem.weight[0], stem.bias[0], a.weight[1], b.weight[0], b.bias[0], c.weight[1], "
        "d.weight[0 +2], d.bias[0 +2], head.weight[1 +2]",
        "S_5 ⋉ (R₊)^5 on a.weight[0], a.bias[0], b.weight[1]",
        "S_6 ⋉ (R₊)^6 on c.weight[0], c.bias[0], d.weight[1]",
        "S_2 ⋉ (R₊)^2 on d.weight[0], d.bias[0], head.weight[1]",
        "S_2 ⋉ (R₊)^2 on d.weight[0 +6], d.bias[0 +6], head.weight[1 +6]",
    ])  # fmt: skip
    g = sym.random(seed=5, scale_spread=0.5)
    assert gap(net, sym.act(g, net), x) < 1e-12

    def reordered(order: list[int]) -> float:
        index = torch.tensor(order)
        other = edited(
            net, d__weight=lambda w: w[index], d__bias=lambda b: b[index], head__weight=lambda w: w[:, index]
        )
        return gap(net, other, x)

    # the two padded blocks may even trade places (the engine does not use this); a middle channel may not leave
    assert reordered([7, 1, 2, 3, 4, 5, 6, 0]) < 1e-12
    assert reordered([2, 1, 0, 3, 4, 5, 6, 7]) > 1e-3
    assert reordered([0, 1, 3, 2, 4, 5, 6, 7]) > 1e-3, "nor may middle channels move without the stage before"


def test_000_G19_a_convolutional_shortcut_begins_a_new_stream() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x).relu()
        return m.head((m.short(x) + m.d(m.c(x).relu())).relu().mean((2, 3)))

    net = Net(
        forward,
        stem=nn.Conv2d(3, 4, 3, padding=1), c=nn.Conv2d(4, 6, 3, 2, 1), d=nn.Conv2d(6, 8, 3, padding=1),
        short=nn.Conv2d(4, 8, 1, 2), head=nn.Linear(8, 2),
    ).double()  # fmt: skip
    prove(net, double(2, 3, 8, 8), wires=[
        "S_4 ⋉ (R₊)^4 on stem.weight[0], stem.bias[0], c.weight[1], short.weight[1]",
        "S_6 ⋉ (R₊)^6 on c.weight[0], c.bias[0], d.weight[1]",
        "S_8 ⋉ (R₊)^8 on d.weight[0], d.bias[0], short.weight[0], short.bias[0], head.weight[1]",
    ])  # fmt: skip


# -- G20 ---------------------------------------------------------------------------------------------------------------


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())


@pytest.mark.parametrize("name", MODELS)
def test_000_G20_theorem_4_2_exact_stitch(name: str) -> None:
    """S(f, f̃, l, φ(A_l)) = f = f̃ at every cut: no penalty. Printed at the end of the proof: φ(A_l)⁻¹, which is not."""
    model, x, sym, g, moved = found(name)
    labels = torch.arange(len(x)) % 2
    whole = model(x)
    for cut in range(1, len(model)):
        front = model[:cut](x)
        stitched = moved[cut:](sym.act_on_features(g, str(cut - 1), front))
        assert torch.allclose(stitched, whole, rtol=1e-10, atol=1e-11)
        assert torch.allclose(stitched, moved(x), rtol=1e-10, atol=1e-11)
        penalty = (accuracy(whole, labels) + accuracy(moved(x), labels)) / 2 - accuracy(stitched, labels)
        assert penalty == 0
        printed = moved[cut:](sym.act_on_features(g.inverse(), str(cut - 1), front))
        assert (printed - whole).abs().max() > 1e-3 * whole.abs().max()


def test_000_G20_the_last_factor_is_of_the_last_hidden_layer() -> None:
    """Printed: W_k φ(A_k⁻¹). A_k would be of the outputs' size and does not fit on the right of W_k."""
    layers = weights(3, 5, 2)
    last = layers[-1][0]
    assert (last @ random_member(torch.relu, 5)).shape == last.shape
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        last @ random_member(torch.relu, 2)


# -- G21 ---------------------------------------------------------------------------------------------------------------


def log_sizes(n: int, ratio: float, rank: int) -> tuple[float, float]:
    """ln of n!·(M/ε)^n and of (2M/ε)^(2nr − r²): equations E.29 and E.32."""
    return math.lgamma(n + 1) + n * math.log(ratio), (2 * n * rank - rank**2) * math.log(2 * ratio)


def difference(n: int, ratio: float, rank: int, printed: bool) -> float:
    """Equation E.34. Printed: log(M/ε + log 2); corrected: log(M/ε) + log 2."""
    last = math.log(ratio + math.log(2)) if printed else math.log(ratio) + math.log(2)
    return math.lgamma(n + 1) + n * math.log(ratio) - (2 * n * rank - rank**2) * last


def test_000_G21_capacity_corrected() -> None:
    first, second = log_sizes(64, 1e7, 1)
    assert difference(64, 1e7, 1, printed=False) == pytest.approx(first - second, rel=1e-12)
    assert difference(64, 1e7, 1, printed=False) == pytest.approx(-898.30, abs=0.01)
    assert difference(64, 1e7, 1, printed=True) == pytest.approx(-810.27, abs=0.01)
    assert abs(difference(64, 1e7, 1, printed=True) - (first - second)) > 80
    for n in (2, 16, 64, 512):
        for rank in (1, 2, n):
            assert difference(n, 1e7, rank, printed=False) < 0
    assert difference(512, 20.0, 1, printed=False) > 0, "M/ε ≫ n is needed"


def test_000_G21_dimensions() -> None:
    """dim G_ReLU = n, and matrices of rank r are 2nr − r² dimensional: the rank of (U, V) → U·V at a generic point."""
    n = 6
    model = nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2))
    assert it.symmetry(model, torch.zeros(1, 3)).dimension == n
    for rank in (1, 2, 3):
        u, v = double(n, rank), double(rank, n)
        jacobian = torch.cat([part.reshape(n * n, -1) for part in torch.func.jacrev(torch.matmul, (0, 1))(u, v)], 1)
        assert int(torch.linalg.matrix_rank(jacobian)) == 2 * n * rank - rank**2 > n
