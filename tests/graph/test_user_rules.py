"""Ops without a rule are frozen and named, a rule of one's own frees them, and the certificate catches a wrong one."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from networks import Net, certified, prove, reasons, same_weights
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import RuleError
from intertwine.graph import builder
from intertwine.graph.builder import PINNED, GraphBuilder
from intertwine.graph.constraints import Value


def rows(width: int = 3) -> Tensor:
    return torch.randn(4, width)


@torch.library.custom_op("intertwine_tests::soft_clip", mutates_args=())
def soft_clip(x: Tensor) -> Tensor:
    """An odd elementwise function that torch knows nothing about."""
    return x / (1 + x**2).sqrt()


@torch.library.custom_op("intertwine_tests::running_total", mutates_args=())
def running_total(x: Tensor) -> Tensor:
    """An op for which the order of the features matters."""
    return x.cumsum(-1)


@soft_clip.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@running_total.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def rules() -> Iterator[None]:
    """The rules as they were, afterwards."""
    kept = dict(builder._RULES)
    yield
    builder._RULES.clear()
    builder._RULES.update(kept)


def around(op: Callable[[Tensor], Tensor]) -> Net:
    """stem → ReLU → layer → the op → head; the op sits between two layers of width 5."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(op(m.layer(m.stem(x).relu())))

    return Net(forward, stem=nn.Linear(3, 4), layer=nn.Linear(4, 5), head=nn.Linear(5, 2))


BEFORE = "S_4 ⋉ (R₊)^4 on stem.weight[0], stem.bias[0], layer.weight[1]"


def test_an_op_without_a_rule_is_frozen() -> None:
    net, x = around(soft_clip), rows()
    sym = certified(it.symmetry(net, x), net, x)
    assert [str(w.group) for w in sym.wires] == ["S_4 ⋉ (R₊)^4"], "what does not touch the op stays free"
    ((op, where),) = sym.unsupported
    assert op == "intertwine_tests.soft_clip.default"
    assert "test_user_rules.py" in where
    for name in ("layer.weight", "layer.bias"):
        assert f"there is no rule for {op} ({where})" in reasons(sym, name)
    assert any(what.startswith("head.weight axis 1") and "no rule" in reason for what, reason in sym.frozen)


def test_a_rule_of_ones_own(rules: None) -> None:
    @it.rule("intertwine_tests::soft_clip")
    def _(t: GraphBuilder, x: Value) -> Value:
        return t.pointwise(lambda v: v / (1 + v**2).sqrt(), x, key="soft_clip")

    wires = [BEFORE, "S_5 ⋉ {±1}^5 on layer.weight[0], layer.bias[0], head.weight[1]"]
    prove(around(soft_clip), rows(), wires=wires)


def test_a_rule_for_an_order_that_matters(rules: None) -> None:
    @it.rule("intertwine_tests::running_total")
    def _(t: GraphBuilder, x: Value) -> Value:
        lead = t.labels(x, 1)
        return t.multilinear([[(x, [*lead, PINNED])]], [*lead, PINNED])

    sym = prove(around(running_total), rows(), wires=[BEFORE])
    assert "positions along it matter" in reasons(sym, "layer.weight")


def test_a_wrong_rule_is_caught(rules: None) -> None:
    @it.rule("intertwine_tests::running_total")
    def _(t: GraphBuilder, x: Value) -> Value:
        return t.pointwise(lambda v: v, x, key="wrongly elementwise")

    net, x = around(running_total), rows()
    wrong = it.symmetry(net, x)
    assert "S_5 ⋉ (R*)^5" in [str(w.group) for w in wrong.wires]
    kept = copy.deepcopy(net)
    certificate = wrong.certify(net, x)
    assert same_weights(net, kept)
    (broken,) = certificate.broken
    assert broken.op == "intertwine_tests.running_total.default"
    assert "test_user_rules.py" in broken.place
    assert broken.error > 1e-3
    repaired = certificate.symmetry
    assert repaired is not wrong
    assert [str(w.group) for w in repaired.wires] == ["S_4 ⋉ (R₊)^4"]
    assert "the certificate failed at" in reasons(repaired, "layer.weight")
    certified(repaired, net, x)


def test_a_wrong_rule_for_an_op_of_several_results_is_caught(rules: None) -> None:
    @it.rule("aten.sort", replace=True)
    def _(t: GraphBuilder, x: Value, *_: object) -> tuple[Value, ...]:
        return t.pointwise(lambda v: v, x, key="wrongly elementwise"), t.fixed(t.shape, floating=False)

    net, x = around(lambda h: h.sort(dim=1)[0]), rows()
    certificate = it.symmetry(net, x).certify(net, x)
    assert certificate.broken[0].op == "aten.sort.default"
    certified(certificate.symmetry, net, x)


def test_a_wrong_scale_is_caught(rules: None) -> None:
    @it.rule("intertwine_tests::soft_clip")
    def _(t: GraphBuilder, x: Value) -> Value:
        return t.pointwise(torch.relu, x, key="taken for a ReLU")

    net, x = around(soft_clip), rows()
    certificate = it.symmetry(net, x).certify(net, x)
    assert [b.op for b in certificate.broken] == ["intertwine_tests.soft_clip.default"]
    certified(certificate.symmetry, net, x)


def test_a_rule_that_fails_says_so(rules: None) -> None:
    @it.rule("intertwine_tests::soft_clip")
    def broken_rule(t: GraphBuilder, x: Value, missing: object) -> Value:
        return x

    with pytest.raises(RuleError, match=r"rule for intertwine_tests\.soft_clip\.default.*broken_rule.*missing"):
        it.symmetry(around(soft_clip), rows())


def test_a_rule_is_not_replaced_by_accident(rules: None) -> None:
    with pytest.raises(RuleError, match=r"exists already.*replace=True"):
        it.rule("aten.linear")(lambda t, x: x)
