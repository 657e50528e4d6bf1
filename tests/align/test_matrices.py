"""Alignment under matrices: orthogonal residual streams, a general matrix per head, heads matched in any basis."""

import copy
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import Net, gap
from orbits import distance
from scipy.optimize import minimize
from torch import Tensor, nn

import intertwine as it
from intertwine.align.align import Alignment, align
from intertwine.align.matrices import (
    Grams,
    balanced_matrix,
    head_step,
    matrix_step,
    nearest_general,
    nearest_orthogonal,
)
from intertwine.align.solver import from_embeddings, permutations_of
from intertwine.align.state import MatchingState
from intertwine.lab.zoo.networks.registry import build
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.symmetry import Symmetry

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import align_transformers

SMALL = {"dim": 16, "depth": 2, "heads": 4}
IDS = torch.zeros(1, 8, dtype=torch.long)


def shaken(model: nn.Module) -> nn.Module:
    """Random weights everywhere, so that norms and biases have something to tell."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def grouped() -> Net:
    """Two key heads, each read by three query heads, between RMS norms."""

    def forward(m: Net, ids: Tensor) -> Tensor:
        x = m.tokens(ids)
        y = m.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (m.q, m.k, m.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return m.head(m.last(x + m.o(y.transpose(1, 2).flatten(2))))

    sides = {"tokens": nn.Embedding(20, 12), "head": nn.Linear(12, 5), "norm": nn.RMSNorm(12), "last": nn.RMSNorm(12)}
    return Net(forward, **sides, q=nn.Linear(12, 24), k=nn.Linear(12, 8), v=nn.Linear(12, 8), o=nn.Linear(24, 12))


def mixing() -> Net:
    """A square matrix on the residual stream: the rotation enters it on both sides."""

    def forward(m: Net, ids: Tensor) -> Tensor:
        x = m.tokens(ids)
        return m.head(m.last(x + m.mix(m.norm(x))))

    sides = {"tokens": nn.Embedding(20, 12), "head": nn.Linear(12, 5), "norm": nn.RMSNorm(12), "last": nn.RMSNorm(12)}
    return Net(forward, **sides, mix=nn.Linear(12, 12))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: build("gpt", **SMALL, vocab=11, context=8, tied=False, norm="rms"), lambda: IDS),
    "gpt, tied": (lambda: build("gpt", **SMALL, vocab=11, context=8, norm="rms"), lambda: IDS),
    "gpt, layer norms": (lambda: build("gpt", **SMALL, vocab=11, context=8), lambda: IDS),
    "vit": (lambda: build("vit", **SMALL, side=8, norm="rms"), lambda: torch.zeros(1, 3, 8, 8)),
    "grouped queries": (grouped, lambda: IDS),
    "square on the stream": (mixing, lambda: IDS),
}


@cache
def network(name: str) -> tuple[nn.Module, Symmetry]:
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    model = shaken(make())
    return model, it.symmetry(model, inputs(), continuous=True)


# -- queries -----------------------------------------------------------------------------------------------------------


def test_queries_that_share_a_key_are_ordered_by_what_they_ask() -> None:
    """What heads give out is alike, so queries and keys alone tell one query head from another."""
    torch.manual_seed(0)
    a = shaken(grouped()).double()
    with torch.no_grad():
        for name in ("v.weight", "v.bias"):
            values = a.get_parameter(name).unflatten(0, (2, 4))
            values[1] = values[0]
        out = a.get_parameter("o.weight").unflatten(1, (6, 4))
        out[:, 1:] = out[:, :1].clone()
    sym = it.symmetry(a, IDS, continuous=True)
    heads = next(i for i, s in enumerate(sym.wire_specs) if s.permutes and not s.bases)
    for seed in range(3):
        shuffle = sym.random(seed).only(*(s.name for i, s in enumerate(sym.wire_specs) if heads in (i, *s.bases)))
        weights = weights_of(sym, sym.folded(a)), weights_of(sym, sym.act(shuffle, a))
        pair = MatchingState(sym, *weights, range(len(sym.wires)))
        before = pair.objective
        assert head_step(pair, heads)
        assert pair.objective < 1e-20 * before


# -- planted -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_permutations_and_matrices_come_back(name: str, dtype: torch.dtype) -> None:
    model, sym = network(name)
    model = copy.deepcopy(model).to(dtype)
    g = permutations_of(sym.random(1), "matrix")
    found = align(model, sym.act(g, model), symmetry=sym)
    assert found.before > 1
    assert distance(sym, sym.folded(model), found.reference) == 0
    assert distance(sym, found.reference, found.model) < (1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("name", ["gpt", "gpt, tied", "gpt, layer norms", "grouped queries"])
def test_scales_and_signs_come_back_beside_matrices(name: str) -> None:
    model, sym = network(name)
    found = align(model, sym.act(sym.random(2), model), symmetry=sym, method="scale-aware")
    assert distance(sym, found.reference, found.model) < 1e-5


@pytest.mark.models
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral", "qwen3"))])
def test_rotary_transformers_come_back(name: str) -> None:
    """Rotary positions leave scales, not matrices, between queries and keys; mistral and qwen3 group their queries."""
    catalogue = pytest.importorskip("catalogue")
    pytest.importorskip("transformers")
    model, args, kwargs = next(e for e in catalogue.entries("transformers") if e.name == name).build()
    sym = it.symmetry(model, *args, continuous=True, **kwargs)
    assert {s.matrix for s in sym.wire_specs} == {"O", "GL", None}
    for method, parts in (("weights", ("matrix",)), ("scale-aware", ("matrix", "sign", "scale"))):
        g = permutations_of(sym.random(3), *parts)
        found = align(model, sym.act(g, model), symmetry=sym, method=method, starts=1)  # the first start is enough
        assert distance(sym, found.reference, found.model) < 1e-5


def test_the_function_stays_and_the_reference_is_folded() -> None:
    torch.manual_seed(1)
    a, sym = network("gpt")
    b = shaken(build("gpt", **SMALL, vocab=11, context=8, tied=False, norm="rms"))
    found = align(a, b, symmetry=sym, starts=1)
    ids = torch.randint(11, (3, 8))
    assert gap(a, found.reference, ids) < 1e-5
    assert gap(b, found.model, ids) < 1e-5
    assert all(bool((p == 1).all()) for n, p in found.reference.named_parameters() if "norm" in n)
    left, right = weights_of(sym, found.reference), weights_of(sym, found.model)
    moved = [n for n, layout in sym.layouts.items() if layout.moves]
    assert found.after == pytest.approx(sum(float((left[n] - right[n]).square().sum()) for n in moved), rel=1e-4)
    assert found.after < 0.8 * found.before
    by_start: dict[str, float] = {}
    for step in found.history:
        assert step.objective <= by_start.get(step.start, float("inf"))
        by_start[step.start] = step.objective
    assert found.after == pytest.approx(min(by_start.values()), rel=1e-4)


def test_matrices_do_better_than_permutations() -> None:
    torch.manual_seed(1)
    a, sym = network("gpt")
    b = shaken(build("gpt", **SMALL, vocab=11, context=8, tied=False, norm="rms"))
    fa, fb = sym.folded(a), sym.folded(b)
    plain = align(fa, fb, IDS)
    whole = align(fa, fb, symmetry=sym)
    assert whole.before == pytest.approx(sum(float((x - y).square().sum()) for x, y in pairs(fa, fb, sym)), rel=1e-5)
    assert whole.after < 0.9 * plain.after


def pairs(a: nn.Module, b: nn.Module, sym: Symmetry) -> list[tuple[Tensor, Tensor]]:
    left, right = weights_of(sym, a), weights_of(sym, b)
    return [(left[n], right[n]) for n, layout in sym.layouts.items() if layout.moves]


def test_only_some_wires_move() -> None:
    model, sym = network("gpt")
    stream = sym.wires[0].name
    found = align(model, sym.act(permutations_of(sym.random(1), "matrix"), model), symmetry=sym, wires=[stream])
    still = found.element.distance(found.element.only(stream))
    assert still == 0
    assert 0 < found.after < found.before


def test_other_methods_refuse_matrices_in_words() -> None:
    model, sym = network("gpt")
    words = r"contains matrices .*which 'activations' does not move. Choose one of 'weights', 'scale-aware', or"
    with pytest.raises(it.InputError, match=words):
        align(model, model, method="activations", symmetry=sym, data=[(IDS, IDS)])


# -- orthogonal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_ones", [False, True])
def test_the_nearest_orthogonal_matrix(keep_ones: bool) -> None:
    """Against a minimiser on the group itself, and against random members of it."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(5, 9)) for _ in range(2))
    found = nearest_orthogonal(torch.from_numpy(a @ b.T), keep_ones).numpy()
    assert np.allclose(found @ found.T, np.eye(5))
    if keep_ones:
        assert np.allclose(found @ np.ones(5), np.ones(5))
    basis = np.linalg.qr(np.column_stack([np.ones(5), rng.normal(size=(5, 4))]))[0]
    size = 4 if keep_ones else 5

    def member(x: np.ndarray, flip: bool) -> np.ndarray:
        skew = x.reshape(size, size)
        turned = torch.matrix_exp(torch.from_numpy(skew - skew.T)).numpy()
        turned[:, 0] *= -1 if flip else 1
        if not keep_ones:
            return turned
        return basis @ np.block([[np.ones((1, 1)), np.zeros((1, 4))], [np.zeros((4, 1)), turned]]) @ basis.T

    best = min(
        minimize(lambda x, f=f: ((a - member(x, f) @ b) ** 2).sum(), 0.5 * rng.normal(size=size**2)).fun
        for f in (False, True)
        for _ in range(4)
    )
    assert ((a - found @ b) ** 2).sum() == pytest.approx(best, rel=1e-6)


# -- general -----------------------------------------------------------------------------------------------------------


def sides(seed: int, n: int = 3, noise: float = 1.0) -> tuple[np.ndarray, ...]:
    """Slices of A and B on both sides; without noise B is A moved by a matrix."""
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(n, n)) + 2 * np.eye(n)
    plus, minus = rng.normal(size=(n, 7)), rng.normal(size=(n, 5))
    b_plus, b_minus = np.linalg.inv(g) @ plus, g.T @ minus
    return plus, minus, b_plus + noise * rng.normal(size=(n, 7)), b_minus + noise * rng.normal(size=(n, 5))


def products(a_plus: np.ndarray, a_minus: np.ndarray, b_plus: np.ndarray, b_minus: np.ndarray) -> Grams:
    def stack(x: tuple[np.ndarray, np.ndarray], y: tuple[np.ndarray, np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack([p @ q.T for p, q in zip(x, y, strict=True)]))[:, None]

    a, b = (a_plus, a_minus), (b_plus, b_minus)
    return Grams(stack(a, b), stack(a, a), stack(b, b))


def cost(g: np.ndarray, a_plus: np.ndarray, a_minus: np.ndarray, b_plus: np.ndarray, b_minus: np.ndarray) -> float:
    return ((a_plus - g @ b_plus) ** 2).sum() + ((a_minus - np.linalg.inv(g).T @ b_minus) ** 2).sum()


@pytest.mark.parametrize("seed", range(6))
def test_the_nearest_general_matrix(seed: int) -> None:
    """Against scipy's minimiser from many starts: never worse, but for local minima that neither can rule out."""
    data = sides(seed)
    found = nearest_general(products(*data))[0].numpy()
    rng = np.random.default_rng(seed)
    ends = [
        minimize(lambda x: cost(x.reshape(3, 3), *data), (rng.normal(size=(3, 3)) + s * np.eye(3)).ravel(), tol=1e-10)
        for s in (0, 1, 2)
        for _ in range(4)
    ]
    assert cost(found, *data) <= 1.01 * min(float(end.fun) for end in ends)
    for _ in range(10):  # visits go on where the last one ended
        moved = found @ data[2], np.linalg.inv(found).T @ data[3]
        found = nearest_general(products(data[0], data[1], *moved))[0].numpy() @ found
    assert cost(found, *data) <= 1.0001 * min(float(end.fun) for end in ends)
    step = 1e-6
    slope = [
        (cost(found + step * e.reshape(3, 3), *data) - cost(found - step * e.reshape(3, 3), *data)) / (2 * step)
        for e in np.eye(9)
    ]
    assert np.abs(slope).max() < 1e-4 * cost(np.eye(3), *data)


def test_a_planted_general_matrix_is_found_to_the_last_digits() -> None:
    data = sides(0, noise=0.0)
    found = nearest_general(products(*data))[0].numpy()
    assert cost(found, *data) < 1e-20 * cost(np.eye(3), *data)


def test_a_side_of_zeros_moves_nothing() -> None:
    """With one side only, least squares would shrink what is unlike instead of bringing it together."""
    a_plus, a_minus, b_plus, b_minus = sides(0)
    found = nearest_general(products(a_plus, a_minus, b_plus, 0 * b_minus))
    assert torch.equal(found[0], torch.eye(3, dtype=torch.float64))


def test_units_that_are_zero_do_no_harm() -> None:
    a_plus, a_minus, b_plus, b_minus = sides(0)
    for x in (b_plus, b_minus, a_plus):
        x[1] = 0
    data = a_plus, a_minus, b_plus, b_minus
    found = nearest_general(products(*data))[0].numpy()
    assert np.isfinite(found).all()
    assert cost(found, *data) <= cost(np.eye(3), *data)


def test_the_balanced_basis() -> None:
    plus, minus, *_ = sides(3)
    g = balanced_matrix(torch.from_numpy(np.stack([plus @ plus.T, minus @ minus.T]))[:, None])[0].numpy()
    here, there = g @ plus, np.linalg.inv(g).T @ minus
    assert np.allclose(here @ here.T, there @ there.T)
    for seed in range(3):
        other = np.random.default_rng(seed).normal(size=(3, 3)) + 2 * np.eye(3)
        length = ((other @ plus) ** 2).sum() + ((np.linalg.inv(other).T @ minus) ** 2).sum()
        assert (here**2).sum() + (there**2).sum() <= length


# -- strands that enter a block twice ----------------------------------------------------------------------------------


def test_a_rotation_on_both_sides_of_a_matrix_goes_down_by_small_steps() -> None:
    torch.manual_seed(3)
    a, sym = network("square on the stream")
    left = {"mix.weight": weights_of(sym, sym.folded(a))["mix.weight"].double()}
    skew = torch.randn(12, 12, dtype=torch.float64)
    turned = torch.matrix_exp(0.05 * (skew - skew.mT))
    right = {n: turned @ x @ turned.mT for n, x in left.items()}
    pair = MatchingState(sym, left, right, [0])
    values = [pair.objective]
    while matrix_step(pair, 0) and len(values) < 400:
        values.append(pair.objective)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1e-3 * values[0]


# -- heads -------------------------------------------------------------------------------------------------------------


def test_heads_are_matched_in_any_basis() -> None:
    """The order found is that of the least distance of the products QᵀK and OV, formed here as they are defined."""
    torch.manual_seed(4)
    a, sym = network("gpt")
    b = shaken(copy.deepcopy(a))
    heads = next(i for i, s in enumerate(sym.wire_specs) if s.permutes and s.size == 4)
    inner = [i for i, s in enumerate(sym.wire_specs) if s.bases == (heads,)]
    shuffle = sym.random(5).only(sym.wire_specs[heads].name, *(sym.wire_specs[i].name for i in inner))
    twin = sym.act(shuffle, b)
    weights = weights_of(sym, sym.folded(a)), weights_of(sym, sym.folded(twin))
    pair = MatchingState(sym, *weights, range(len(sym.wires)))
    before = pair.objective
    assert head_step(pair, heads)
    assert pair.objective < before
    found = pair.moves[heads].permutation
    assert found is not None
    prefix = sym.wire_specs[heads].name.split(".attention")[0]
    qk, ov = zip(*(circuits(w, prefix) for w in weights), strict=True)
    costs = sum(
        (x[0][:, None] - x[1][None]).square().sum((-1, -2)) / x[0].norm() / x[1].norm() * size
        for x, size in ((qk, lengths(weights, prefix, 0)), (ov, lengths(weights, prefix, 1)))
    )
    assert isinstance(costs, Tensor)
    chosen = float(costs[torch.arange(4), found].sum())
    orders = torch.cartesian_prod(*[torch.arange(4)] * 4)
    orders = orders[(orders.sort(1).values == torch.arange(4)).all(1)]
    every = costs[torch.arange(4), orders].sum(1)
    assert chosen == pytest.approx(float(every.min()), rel=1e-5)


def circuits(weights: Any, prefix: str) -> tuple[Tensor, Tensor]:
    """Per head: QᵀK and VᵀO, with their biases as further columns."""
    qkv = torch.cat([weights[f"{prefix}.attention.qkv.weight"], weights[f"{prefix}.attention.qkv.bias"][:, None]], 1)
    q, k, v = qkv.double().unflatten(0, (3, 4, 4))
    out = weights[f"{prefix}.attention.proj.weight"].double().unflatten(1, (4, 4)).permute(1, 2, 0)
    return q.mT @ k, v.mT @ out


def lengths(weights: Any, prefix: str, which: int) -> float:
    """Half the squared lengths of what a circuit is made of."""
    total = 0.0
    for w in weights:
        qkv = torch.cat([w[f"{prefix}.attention.qkv.weight"], w[f"{prefix}.attention.qkv.bias"][:, None]], 1)
        own = [qkv[:32]] if which == 0 else [qkv[32:], w[f"{prefix}.attention.proj.weight"]]
        total += sum(float(x.double().square().sum()) for x in own)
    return total / 2


# -- from the embeddings -----------------------------------------------------------------------------------------------


def test_the_start_from_the_embeddings_finds_all_of_a_planted_element() -> None:
    for name in ("gpt", "vit", "grouped queries"):
        model, sym = network(name)
        model = copy.deepcopy(model).double()
        g = permutations_of(sym.random(6), "matrix")
        weights = weights_of(sym, sym.folded(model)), weights_of(sym, sym.act(g, model))
        found = from_embeddings(sym, *weights, range(len(sym.wires)))
        pair = MatchingState(sym, *weights, range(len(sym.wires)))
        before = pair.objective
        pair.start_at(found)
        assert pair.objective < 1e-12 * before


def test_the_start_from_the_embeddings_serves_permutations_too() -> None:
    torch.manual_seed(0)
    model = shaken(build("gpt", **SMALL, vocab=11, context=8))
    sym = it.symmetry(model, IDS)
    g = permutations_of(sym.random(6))
    weights = weights_of(sym, model), weights_of(sym, sym.act(g, model))
    found = from_embeddings(sym, *weights, range(len(sym.wires)))
    assert (found @ g).distance(sym.identity()) == 0
    starts = {step.start for step in align(model, shaken(copy.deepcopy(model)), symmetry=sym, starts=4).history}
    assert starts - {"best start"} == {"identity", "canonical", "paired", "embeddings"}


# -- relative weights --------------------------------------------------------------------------------------------------


def test_relative_weights_are_what_is_lowered_and_both_are_told() -> None:
    a, b = (shaken(build("gpt", **SMALL | {"depth": 1}, vocab=11, context=8, tied=False, norm="rms")) for _ in range(2))
    sym = it.symmetry(a, IDS, continuous=True)
    with torch.no_grad():
        for model in (a, b):
            model.get_parameter("head.weight").mul_(10)  # outweighs all else
    plain, relative = (align(a, b, symmetry=sym, options={"relative": r}, starts=1) for r in (False, True))
    assert all(step.own is None for step in plain.history)
    own = [step.own for step in relative.history if step.own is not None]
    assert len(own) == len(relative.history)
    assert own == sorted(own, reverse=True)
    assert own[-1] == pytest.approx(_relative_distance(relative, b), rel=1e-4)
    assert own[-1] < _relative_distance(plain, b)
    assert relative.history[-1].objective == pytest.approx(relative.after, rel=1e-4)
    assert relative.after > plain.after


def _relative_distance(found: Alignment, b: nn.Module) -> float:
    """Σ ‖A − B‖² with every tensor divided by the mean square of its entries, before anything moved."""
    total, sym = 0.0, found.symmetry
    for (x, y), (_, first) in zip(
        pairs(found.reference, found.model, sym), pairs(found.reference, sym.folded(b), sym), strict=True
    ):
        total += float((x - y).double().square().sum()) * x.numel() / float(x.norm()) / float(first.norm())
    return total


# -- the experiment ----------------------------------------------------------------------------------------------------


def test_the_experiment_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    sizes = {"pairs": 1, "steps": 3, "dim": 8, "points": 3, "samples": 8, "context": 8, "megabytes": 0.05}
    tiny = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    align_transformers.main(["--quick", *tiny, "--task", "text", "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["stage"] for row in rows][:2] == ["as trained", "MLP units"]
    assert len(rows) == 6
    assert all(row["after"] <= row["before"] for row in rows[1:])
    align_transformers.main(["page", "--out", str(out)])
    assert capsys.readouterr().out.count("GPT on source text, 8 wide") == 12  # as they come, and in the page


def test_held_out_text_is_not_trained_on() -> None:
    train, test = (bytes(t.tolist()) for t in align_transformers.library_text(10.0))
    assert len(test) > 10_000
    assert test[5_000:5_200] not in train
