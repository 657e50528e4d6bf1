"""What folding says: the result, the complexity of layers, what is skipped and why, and answers to bad input."""

import json
from typing import Any

import pytest
import torch
from networks import Net
from torch import Tensor, nn

from intertwine import zoo
from intertwine.errors import InputError
from intertwine.fold.complexity import complexity
from intertwine.fold.fold import fold, fold_groups, shrink

X = torch.randn(3, 4)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_the_result_reads_as_a_table_and_as_a_dict() -> None:
    folded = fold_groups(net(), X, groups={"0": [(1, 4), (2, 3, 7)]})
    assert folded.groups["0"] == ((0,), (1, 4), (2, 3, 7), (5,), (6,))
    text = repr(folded)
    assert "parameters 58 → 37 (63.8%)" in text
    assert "0      8 → 5      rows summed, columns averaged" in text
    assert "2.weight: not folded: it is an axis of the model's output" in text
    found = json.loads(json.dumps(folded.to_dict()))
    assert found["parameters"]["after"] == 37 == sum(p.numel() for p in folded.model.parameters())
    assert found["flops"] == {"before": 2 * 3 * 48, "after": 2 * 3 * 30, "share": 30 / 48}
    assert folded.latency(2).after > 0


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_beta_is_a_share(beta: float) -> None:
    with pytest.raises(InputError, match=r"beta=.* was asked for. It is a share of a distance, above 0 and"):
        fold(net(), X, beta=beta)
    with pytest.raises(InputError, match="for '0'"):
        complexity(net(), X, beta={"0": beta})


def test_options_that_do_not_exist() -> None:
    with pytest.raises(InputError, match=r"schedule='roundrobin' was asked for\. Did you mean round-robin"):
        fold(net(), X, schedule="roundrobin")
    with pytest.raises(InputError, match="max_ratio=0 was asked for"):
        fold(net(), X, max_ratio=0)
    with pytest.raises(
        InputError, match=r"A beta was given for '2', which is no wire that can be folded. Those are 0\."
    ):
        fold(net(), X, beta={"2": 0.1})
    with pytest.raises(InputError, match="name a feature twice"):
        fold_groups(net(), X, groups={"0": [(1, 8)]})
    with pytest.raises(InputError, match="'0' was to have 9 features; in this network it has 8 features"):
        shrink(net(), X, widths={"0": 9})
    with pytest.raises(InputError, match="The time of 0 forwards"):
        fold(net(), X).latency(0)
    with pytest.raises(InputError, match="dead=1"):
        complexity(net(), X, dead=1.0)


def test_nothing_to_fold_is_said() -> None:
    model = nn.Linear(4, 2)
    folded = fold(model, X)
    assert repr(folded) == "Fold(nothing to fold: weight: it is an axis of the model's output)"
    assert torch.equal(folded.model.weight, model.weight)  # type: ignore[arg-type]
    untouched = fold(net(), X, beta=1e-9)
    assert "nothing was merged in 1 wire:" in repr(untouched)
    assert torch.equal(untouched.model(X), net()(X))


def test_each_wire_may_have_its_own_beta() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    folded = fold(model, X, beta={"2": 0.6})
    assert folded.widths["0"].after == 8
    assert folded.widths["2"].after < 8


@pytest.mark.parametrize(
    ("parts", "forward", "reason"),
    [
        (
            {"a": nn.Linear(4, 6), "n": nn.LayerNorm(6), "b": nn.Linear(6, 2)},
            lambda m, x: m.b(m.n(m.a(x))),
            "statistics over all features",
        ),
        (
            {"a": nn.Linear(4, 6), "b": nn.Linear(6, 2)},
            lambda m, x: m.b(m.a(x).softmax(1)),
            "looks at them together",
        ),
        (
            {"a": nn.Linear(4, 6), "b": nn.Linear(6, 2)},
            lambda m, x: m.b((h := m.a(x).relu()) - h.mean(1, keepdim=True)),
            "looks at them together",
        ),
    ],
)
def test_features_that_are_counted_are_not_merged(parts: dict[str, nn.Module], forward: Any, reason: str) -> None:
    model: Any = Net(forward, **parts)
    folded = fold(model, X, beta=0.9)
    assert folded.removed == 0
    assert any(reason in why for what, why in folded.skipped if what == "a"), folded.skipped


def test_groups_and_heads_are_skipped_with_a_reason() -> None:
    torch.manual_seed(0)
    grouped = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
        *(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1)),
    )
    folded = fold(grouped, torch.randn(1, 3, 8, 8), beta=0.9)
    assert list(folded.groups) == ["4"]
    reasons = " ".join(why for _, why in folded.skipped)
    assert "groups" in reasons
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    found = fold(encoder, torch.randn(2, 3, 8), beta=0.6)
    assert list(found.groups) == ["linear1"]
    assert "heads" in " ".join(why for _, why in found.skipped)


class Slicing(nn.Module):
    """Features added to themselves with a width in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu().view(-1, self.width)
        return self.b(h)


def test_a_width_written_into_the_forward_is_named() -> None:
    torch.manual_seed(0)
    with pytest.raises(
        InputError, match=r"forward fails at test_fold_results\.py:\d+ \(h = self\.a\(x\)\.relu\(\)\.view"
    ):
        fold(Slicing(8), X, beta=0.9)
    with pytest.raises(InputError, match=r"outputs differ by .* uses a width without failing"):
        fold(
            Net(lambda m, x: m.b(m.a(x).relu()) * (m.a.out_features / 8), a=nn.Linear(4, 8), b=nn.Linear(8, 2)),
            X,
            beta=0.9,
        )


def test_padding_written_into_the_forward_is_named() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.c((nn.functional.pad(h, (2, 3)) + m.b(h)).relu())

    with pytest.raises(InputError, match=r"pads features with \(2, 3\) zeros at .* the folded network needs \("):
        fold(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 13), c=nn.Linear(13, 2)), X, beta=0.9)


# -- complexity --------------------------------------------------------------------------------------------------------


def test_dead_features_are_not_equivalent_ones_003_F17() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = model[0].weight[0], model[0].bias[0]  # one twice
        model[0].weight[2:5], model[0].bias[2:5] = 1e-9 * model[0].weight[2:5], 0.0  # three that do not act
        model[2].weight[:, 7] = 0.0  # one that nobody reads
    for rows, left in (("ward", 5), ("effect", 3)):  # what is not read is merged into anything at no cost
        found = complexity(model, X, beta=1e-4, rows=rows)["0"]
        assert (found.width, found.classes, found.equivalent, found.dead, found.left) == (8, 3, 1, 4, left)
        assert found.width == found.classes + found.equivalent + found.dead


def test_complexity_of_every_layer_003_F25() -> None:
    torch.manual_seed(0)
    model = zoo.build("tiny10")
    x = torch.randn(1, 3, 32, 32)
    low, high = complexity(model, x, beta=0.05), complexity(model, x, beta=0.6)
    folded = fold(model, x, beta=0.6)
    assert {x.name: x.left for x in high.layers} == {n: w.after for n, w in folded.widths.items()}
    assert all(a.classes >= b.classes for a, b in zip(low.layers, high.layers, strict=True))
    assert [x.width for x in low.layers] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert "conv8     64" in repr(low)
    assert json.loads(json.dumps(low.to_dict()))["layers"][0]["share"] == low["conv1"].share
    with pytest.raises(InputError, match="There is no layer 'conv9' here"):
        low["conv9"]


def test_complexity_is_drawn_003_F25() -> None:
    pytest.importorskip("matplotlib")
    found = complexity(net(), X, beta=0.3)
    for relative in (False, True):
        (axes,) = found.plot(relative).axes
        heights = [patch.get_height() for patch in axes.patches]  # type: ignore[attr-defined]
        assert sum(heights) == pytest.approx(1 if relative else 8)
