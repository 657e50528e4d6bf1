"""The conformance suite holds on every kind of group the engine makes, and a broken engine does not get past it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from group_cases import (
    CASES,
    mlp,
    rows,
)
from networks import Net
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import MismatchError
from intertwine.graph import builder
from intertwine.graph.builder import GraphBuilder
from intertwine.graph.constraints import Value
from intertwine.symmetry.element import Element, Move
from intertwine.symmetry.geometry import Dim, base_dims, spread
from intertwine.symmetry.symmetry import MOMENTS, Symmetry
from intertwine.testing.dense import DenseAction
from intertwine.testing.group import check_group
from intertwine.testing.laws import LAWS, ConformanceError, GroupReport

# -- networks, one for every kind of group -----------------------------------------------------------------------------


@cache
def found(name: str) -> tuple[nn.Module, Symmetry, tuple[Any, ...]]:
    """The network of a case, its symmetry and its inputs."""
    torch.manual_seed(0)
    case = CASES[name]
    model, inputs = case.make().double().train(case.training), case.inputs()
    return model, it.symmetry(model, *inputs, continuous=case.continuous), inputs


# -- every law on every group ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_law_holds(name: str) -> None:
    model, sym, inputs = found(name)
    assert set(CASES[name].groups) <= {str(w.group) for w in sym.wires}, "the case is not what it is there for"
    report = check_group(sym, model, *inputs, seeds=[0])
    if sym.wires:
        assert set(report.laws) == set(LAWS), "a law was left out"
    assert report.max < 1e-11
    assert all("folded" in why or "fixed at ones" in why for why in report.skipped.values()), report.skipped


def test_rotations_that_fix_the_ones() -> None:
    """The engine does not offer them yet, but elements can be made of them: here as a part of what it finds."""
    model, sym, inputs = found("O of a residual stream")
    strands = tuple(replace(s, matrix="O1") if s.matrix else s for s in sym.wire_specs)
    inside = replace(sym, geometry=replace(sym.geometry, wire_specs=strands))
    matrix = inside.random(seed=0)["stem"].matrix
    assert matrix is not None
    assert torch.allclose(matrix.sum(-1), torch.ones(6, dtype=torch.float64))
    assert check_group(inside, model, *inputs, seeds=[0]).max < 1e-11


def test_several_seeds_and_keyword_inputs() -> None:
    net = Net(lambda m, a, *, b: m.out(F.relu(m.up(a)) * b), up=nn.Linear(3, 5), out=nn.Linear(5, 2))
    a, b = torch.randn(4, 3), torch.randn(4, 1)
    report = check_group(it.symmetry(net, a, b=b), net, a, b=b, seeds=range(3))
    assert report.elements == 9
    assert report.max < 1e-11


def test_the_report() -> None:
    model, sym, inputs = found("positive scales")
    report = check_group(sym, model, *inputs, seeds=[4], tolerance=1e-10)
    assert isinstance(report, GroupReport)
    assert repr(report).startswith("GroupReport(18 laws hold on 1 wires and 3 random elements, largest error ")
    entry = report.to_dict()
    assert entry["laws"] == dict(report.laws)
    assert entry["max"] == report.max
    assert entry["tolerance"] == 1e-10


def test_what_cannot_be_differentiated_is_said() -> None:
    """A model that returns whole numbers alone has a function and features, but no gradients."""
    net = mlp(F.relu)
    numbers = Net(lambda m, x: m.net(x).argmax(-1), net=net)
    x = torch.randn(40, 3)
    report = check_group(it.symmetry(numbers, x), numbers, x, seeds=[0])
    assert set(report.skipped) == {"gradient", "optimizer"}
    assert "cannot be differentiated" in report.skipped["gradient"]
    assert "not checked: gradient, optimizer" in repr(report)


# -- dense matrices ----------------------------------------------------------------------------------------------------


def test_the_dense_matrix_by_hand() -> None:
    """On a weight of shape (out, in), scales then a permutation of the rows: the matrix is P D ⊗ 1."""
    _, sym, _ = found("positive scales")
    g = sym.random(seed=1)
    move = g["a"]
    assert move.permutation is not None
    assert move.scale is not None
    by_hand = torch.eye(5, dtype=torch.float64)[move.permutation] @ torch.diag(move.scale[0])
    matrix, offset = DenseAction(sym.layouts["a.weight"], g).matrix()
    assert torch.allclose(matrix, torch.kron(by_hand, torch.eye(3, dtype=torch.float64)))
    assert not bool(offset.any())
    columns, _ = DenseAction(sym.layouts["b.weight"], g).matrix()
    assert torch.allclose(columns, torch.kron(torch.eye(2, dtype=torch.float64), by_hand.inverse().mT))


def test_the_dense_matrix_of_a_variance_is_affine() -> None:
    _, sym, _ = found("two scales and eps")
    g = sym.random(seed=1)
    matrix, offset = DenseAction(sym.layouts["bn1.running_var"], g).matrix()
    assert torch.allclose(offset, 0.1 * (matrix.sum(1) - 1))
    assert bool(offset.any())


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("nothing", "training mode")])
def test_dense_matrices_are_a_representation(name: str) -> None:
    """Multiplied as matrices they compose as the elements do, and at degree −1 they are the inverse transposed."""
    _, sym, _ = found(name)
    g, h = sym.random(seed=1), sym.random(seed=2)
    small = [replace(x, shift=0.0) for x in sym.layouts.values() if 1 < torch.Size(x.shape).numel() <= 160]
    assert small
    for layout in small:
        (by_g, _), (by_h, _), (both, _) = (DenseAction(layout, x).matrix() for x in (g, h, g @ h))
        assert torch.allclose(both, by_g @ by_h, rtol=0, atol=1e-11)
        contragredient, _ = DenseAction(layout, g, degree=-1).matrix()
        assert torch.allclose(contragredient.mT @ by_g, torch.eye(len(by_g), dtype=torch.float64), rtol=0, atol=1e-11)


def test_a_dense_matrix_has_a_largest_size() -> None:
    net = Net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(80, 80), b=nn.Linear(80, 2))
    sym = it.symmetry(net, torch.zeros(1, 80))
    with pytest.raises(it.InputError, match=r"6400 entries, but a dense matrix is limited to 4096. Take single rows"):
        DenseAction(sym.layouts["a.weight"], sym.identity()).matrix()
    assert check_group(sym, net, torch.randn(2, 80), seeds=[0]).max < 1e-11


# -- broken engines ----------------------------------------------------------------------------------------------------


def refused(case: str) -> ConformanceError:
    """What `check_group` says of a case while something is broken."""
    model, sym, inputs = found(case)
    with pytest.raises(ConformanceError) as caught:
        check_group(sym, model, *inputs, seeds=[0])
    return caught.value


def test_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Element, "inverse", lambda self: self)
    error = refused("signs")
    assert isinstance(error, AssertionError)
    assert isinstance(error, it.IntertwineError)
    assert error.law == "inverse"
    assert error.wires == ("a",)
    assert error.error > 0.1
    assert str(error).startswith("The law 'inverse' (g @ g⁻¹ = e = g⁻¹ @ g,")
    assert "was checked and fails on wire 'a': g @ g⁻¹ is off by " in str(error)
    assert str(error).endswith("allowed is 1.0e-09. Look at how elements are inverted.")


@pytest.mark.parametrize("case", ["positive scales", "grouped convolution", "three floors"])
def test_an_inverse_that_forgets_to_carry(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def inverse(self: Element) -> Element:
        parts = {
            "permutation": lambda t: t.argsort(-1),
            "scale": lambda t: 1 / t,
            "sign": lambda t: t,
            "matrix": torch.linalg.inv,
        }
        moves = {i: Move(**{name: parts[name](t) for name, t in m.items()}) for i, m in self.moves.items()}
        return replace(self, moves=moves)

    monkeypatch.setattr(Element, "inverse", inverse)
    assert refused(case).law == "inverse"


WRONG_ORDER = {
    "permutations": "action: composition",
    "O of a residual stream": "action: composition",
    "experts": "only",
}


@pytest.mark.parametrize("case", WRONG_ORDER)
def test_a_product_in_the_wrong_order(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opposite group is a group too: it takes an action, or a fibre over its base, to see the difference."""
    right = Element.__matmul__
    monkeypatch.setattr(Element, "__matmul__", lambda self, other: right(other, self))
    assert refused(case).law == WRONG_ORDER[case]


def test_a_product_that_forgets_the_scales_of_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Element._compose

    def compose(self: Element, i: int, first: Element, undo: Element) -> Move:
        return replace(right(self, i, first, undo), scale=self.moves[i].scale)

    monkeypatch.setattr(Element, "_compose", compose)
    assert refused("positive scales").law == "identity"


def test_a_scale_applied_after_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is kept even so, and each move can be undone; but it is not the action of this group."""

    def act_on_axis(self: Element, x: Tensor, dim: int, dims: list[Dim], degree: int = 1) -> Tensor:
        move = self.moves.get(dims[dim].tree.wire)  # type: ignore[union-attr]
        if move is None or move.permutation is None:
            return x
        x = x.index_select(dim, move.permutation)
        factor = self._factor(move, dims[dim].tree, degree)  # type: ignore[arg-type]
        return x if factor is None else x * spread(factor, [*base_dims(dims, dim, ()), dim], x.ndim)

    monkeypatch.setattr(Element, "act_on_axis", act_on_axis)
    error = refused("positive scales")
    assert error.law == "action: composition"
    assert error.wires == ("a",)


@pytest.mark.parametrize("case", ["signs", "GRU", "group norm", "nonzero |x|"])
def test_a_dropped_sign(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything stays consistent without signs; only the dense matrices know that they are missing."""
    right = Element._factor
    monkeypatch.setattr(Element, "_factor", staticmethod(lambda m, leaf, k: right(replace(m, sign=None), leaf, k)))
    assert refused(case).law == "dense"


def test_a_fibre_that_acts_after_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Element, "depth", lambda self, strand: 0)
    assert refused("three floors").law in ("inverse", "associativity", "action: composition")


def test_a_degree_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Element.act_on_axis
    monkeypatch.setattr(Element, "act_on_axis", lambda self, x, dim, dims, degree=1: right(self, x, dim, dims))
    error = refused("positive scales")
    assert error.law == "dense"
    assert "a.weight at degree -1" in str(error)


def test_gradients_moved_like_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    import intertwine.testing.actions as gradients

    right = gradients.act
    monkeypatch.setattr(gradients, "_check_dense", lambda *_: None)
    monkeypatch.setattr(gradients, "act", lambda layout, x, g, degree=1: right(layout, x, g))
    assert refused("positive scales").law == "pairing"
    monkeypatch.setattr(gradients, "_check_pairing", lambda *_: None)
    assert refused("positive scales").law == "gradient"


def test_second_moments_moved_like_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOMENTS, "exp_avg_sq", (-1, False))
    error = refused("positive scales")
    assert error.law == "optimizer"
    assert "exp_avg_sq of a.weight" in str(error)


BROKEN_VERBS: dict[str, tuple[str, Callable[..., Any]]] = {
    "features": ("act_on_features", lambda self, g, name, x: x),
    "action: state": ("act_on_state", lambda self, g, state: dict(state)),
    "action: slots": ("act", lambda self, g, model: copy.deepcopy(model)),
}


@pytest.mark.parametrize("law", BROKEN_VERBS)
def test_a_verb_that_does_nothing(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, broken = BROKEN_VERBS[law]
    if verb == "act":
        monkeypatch.setattr(Symmetry, "act_on_state", lambda self, g, state: dict(state))
    monkeypatch.setattr(Symmetry, verb, broken)
    assert refused("positive scales").law == law


def test_features_that_ignore_one_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Symmetry.act_on_features
    monkeypatch.setattr(Symmetry, "act_on_features", lambda self, g, n, x: right(self, g.only("conv1"), n, x))
    error = refused("two scales and eps")
    assert error.law == "features"
    assert error.wires == ("conv2",)


def with_scales(g: Element, change: Callable[[Tensor], Tensor]) -> Element:
    """The element with other scales."""
    return replace(g, moves={i: replace(m, scale=change(m.scale)) for i, m in g.moves.items() if m.scale is not None})


def test_an_identity_that_is_nearly_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Symmetry.identity

    def identity(self: Symmetry) -> Element:
        return with_scales(right(self), lambda scale: scale * (1 + 1e-12))

    monkeypatch.setattr(Symmetry, "identity", identity)
    error = refused("positive scales")
    assert error.law == "action: identity"
    assert "allowed is 0.0e+00" in str(error)


def test_a_file_of_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Element.load

    def load(path: Any) -> Element:
        return with_scales(right(path), lambda scale: scale.float().double())

    monkeypatch.setattr(Element, "load", staticmethod(load))
    error = refused("positive scales")
    assert error.law == "storage"
    assert error.error < 1e-6


def test_only_that_keeps_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Element, "only", lambda self, *wires: self)
    assert refused("positive scales").law == "only"


def test_a_model_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import intertwine.testing.laws as subject

    right = subject.generic_copy

    def generic_copy(model: nn.Module, seed: int) -> nn.Module:
        copied = right(model, seed)
        next(model.parameters()).data.add_(1e-9)
        return copied

    monkeypatch.setattr(subject, "generic_copy", generic_copy)
    found.cache_clear()  # the model is spoilt
    error = refused("positive scales")
    found.cache_clear()
    assert error.law == "untouched"
    assert "a.weight" in str(error)
    assert "on no single wire" in str(error)


# -- rules of users ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("intertwine_check_group::smooth_step", mutates_args=())
def smooth_step(x: Tensor) -> Tensor:
    """An odd elementwise function that torch knows nothing about."""
    return x / (1 + x**2).sqrt()


@smooth_step.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def rules() -> Iterator[None]:
    """The rules as they were, afterwards."""
    kept = dict(builder._RULES)
    yield
    builder._RULES.clear()
    builder._RULES.update(kept)


def test_a_rule_of_ones_own(rules: None) -> None:
    @it.rule("intertwine_check_group::smooth_step")
    def _(t: GraphBuilder, x: Value) -> Value:
        return t.pointwise(lambda v: v / (1 + v**2).sqrt(), x, key="smooth_step")

    net, (x,) = mlp(smooth_step), rows()
    sym = it.symmetry(net.double(), x)
    assert [str(w.group) for w in sym.wires] == ["S_5 ⋉ {±1}^5"]
    report = check_group(sym, net, x, seeds=[0])
    assert {"function", "features", "dense"} <= set(report.laws)
    assert "cannot be differentiated" in report.skipped["gradient"], "the op has no derivative"


def test_a_wrong_rule_of_ones_own(rules: None) -> None:
    @it.rule("intertwine_check_group::smooth_step")
    def _(t: GraphBuilder, x: Value) -> Value:
        return t.pointwise(torch.relu, x, key="taken for a ReLU")

    net, (x,) = mlp(smooth_step), rows()
    with pytest.raises(
        ConformanceError, match=r"law 'function' .* on wire 'a': the model's output is off by"
    ) as caught:
        check_group(it.symmetry(net.double(), x), net, x, seeds=[0])
    assert caught.value.wires == ("a",)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_model_of_another_architecture() -> None:
    _, sym, inputs = found("signs")
    other = Net(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    with pytest.raises(MismatchError, match=r"Call intertwine.symmetry on this model"):
        check_group(sym, other, *inputs)
