"""Pruning by score: against networks cut by hand, against zeroed features, and error messages."""

import copy
from typing import Any

import pytest
import torch
from networks import Net
from torch import Tensor, nn

from intertwine import zoo
from intertwine.errors import InputError
from intertwine.fold.prune import Pruned, prune
from intertwine.fold.result import shrink

X = torch.randn(3, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ROW = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def lively(model: nn.Module) -> Any:
    """In double precision and evaluation mode, with norm weights and statistics of no special value."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                tensor.data = torch.rand(tensor.shape, generator=generator) + 0.2
            module.weight.data[::3] *= -1
    return model.double().eval()


def chain() -> Any:
    """conv, norm, conv, flatten (four pixels), linear; wires "0" of 6 and "3" of 5."""
    torch.manual_seed(0)
    return lively(
        nn.Sequential(
            *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 5), nn.Tanh(), nn.Flatten()),
            nn.Linear(20, 3),
        )
    )


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 2)).double()


class Residual(nn.Module):
    """Two layers write one wire, on which two norms lie."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.inner, self.outer, self.norm = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def stream(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x)).relu()
        return (x + self.norm(self.outer(self.inner(x).relu()))).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stream(x).mean((2, 3)))


def residual() -> Residual:
    torch.manual_seed(0)
    return lively(Residual())


def lowest(scores: Tensor, number: int) -> tuple[int, ...]:
    return tuple(sorted(scores.argsort()[:number].tolist()))


def without(x: Tensor, gone: tuple[int, ...], axis: int = 0) -> Tensor:
    return x.index_select(axis, torch.tensor([i for i in range(x.shape[axis]) if i not in gone]))


def test_a_chain_as_cut_by_hand_003_F22() -> None:
    model = chain()
    before = copy.deepcopy(model.state_dict())
    found = prune(model, X, widths={"0": 4, "3": 2})
    gone, last = (lowest(model[i].weight.abs().sum((1, 2, 3)), n) for i, n in ((0, 2), (3, 3)))
    assert found.dropped == {"0": gone, "3": last}
    pixels = tuple(4 * i + k for i in last for k in range(4))
    expected = {
        "0.weight": without(model[0].weight, gone), "0.bias": without(model[0].bias, gone),
        **{f"1.{k}": without(before[f"1.{k}"], gone) for k in ("weight", "bias", "running_mean", "running_var")},
        "1.num_batches_tracked": before["1.num_batches_tracked"],
        "3.weight": without(without(model[3].weight, last), gone, 1), "3.bias": without(model[3].bias, last),
        "6.weight": without(model[6].weight, pixels, 1), "6.bias": model[6].bias,
    }  # fmt: skip
    state = found.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    small: Any = found.model
    assert (small[0].out_channels, small[1].num_features, small[3].in_channels, small[6].in_features) == (4, 4, 4, 8)


@pytest.mark.parametrize("score", ["l1", "gamma"])
def test_scores_of_all_layers_on_a_residual_wire_are_added_003_F22(score: str) -> None:
    model = residual()
    model.stem_norm.weight.data[:] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, 6.0])
    model.norm.weight.data[:] = torch.tensor([5.0, -4.0, 0.5, 0.4, -0.3, 0.1])
    layers = {"l1": (model.stem, model.outer), "gamma": (model.stem_norm, model.norm)}[score]
    each = [layer.weight.detach().abs().reshape(6, -1).sum(1) for layer in layers]
    found = prune(model, X, widths={"stem": 3}, score=score)
    gone = lowest(each[0] + each[1], 3)
    assert found.dropped == {"stem": gone, "inner": ()}
    assert gone not in [lowest(own, 3) for own in each]  # the sum matters
    silenced = copy.deepcopy(model)
    silenced.inner.weight.data[:, list(gone)] = 0
    silenced.head.weight.data[:, list(gone)] = 0
    assert (silenced(X) - found.model(X)).abs().max() < 1e-12
    assert (model(X) - found.model(X)).abs().max() > 1e-3
    assert found.cut_error < 1e-9


def test_dead_norms_are_cut_as_they_are() -> None:
    """A feature whose γ is 0 keeps its weights where it stays: statistics reset may need them."""
    model = chain()
    model[1].weight.data[:] = 0.0
    small: Any = prune(model, X, widths={"0": 5}).model
    assert torch.equal(small[0].weight, without(model[0].weight, lowest(model[0].weight.abs().sum((1, 2, 3)), 1)))


def test_a_share_of_every_wire_and_one_at_least() -> None:
    found = prune(mlp(), ROW, widths=0.5)
    assert {name: (w.before, w.after) for name, w in found.widths.items()} == {"0": (9, 4), "2": (7, 4)}
    assert found.removed == 8
    assert found.parameters.after == 4 * 5 + 4 + 4 * 4 + 4 + 2 * 4 + 2
    assert {w.after for w in prune(mlp(), ROW, widths=0.01).widths.values()} == {1}
    assert found.to_dict()["dropped"] == {name: list(gone) for name, gone in found.dropped.items()}
    assert found.to_dict()["widths"]["0"]["before"] == 9
    assert str(found).splitlines()[1:3] == ["  0      9 → 4", "  2      7 → 4"]
    again = shrink(mlp(), ROW, widths={name: int(w.after) for name, w in found.widths.items()})
    again.load_state_dict(found.model.state_dict())


def test_across_the_network_until_a_share_of_the_parameters_is_left() -> None:
    """Against a loop that takes the lowest away one by one and counts."""
    model = mlp()
    model[0].weight.data *= 50  # lengths are compared within a layer only
    for share in (0.9, 0.5, 0.2):
        left = {0: list(range(9)), 2: list(range(7))}
        scores = {i: model[i].weight.detach().abs().sum(1) for i in left}

        def parameters(left: dict[int, list[int]] = left) -> int:
            a, b = len(left[0]), len(left[2])
            return 5 * a + a + a * b + b + 2 * b + 2

        total = parameters()
        while parameters() > share * total:
            can = [(float(scores[i][k] / scores[i].mean()), i, k) for i in left for k in left[i] if len(left[i]) > 1]
            _, i, k = min(can)
            left[i].remove(k)
        found = prune(model, ROW, widths=share, across=True)
        assert {name: [g[0] for g in groups] for name, groups in found.groups.items()} == {
            str(i): kept for i, kept in left.items()
        }
        assert found.parameters.after == parameters()


def test_across_a_share_that_is_met_exactly_is_enough() -> None:
    total = sum(p.numel() for p in mlp().parameters())
    lefts = [int(prune(mlp(), ROW, widths=share, across=True).parameters.after) for share in (0.8, 0.6, 0.4)]
    exact = [left for left in lefts if left / total * total == left]  # no rounding in between
    assert exact
    for left in exact:
        assert prune(mlp(), ROW, widths=left / total, across=True).parameters.after == left


def test_across_where_several_layers_share_a_wire() -> None:
    found = prune(zoo.build("resnet20"), torch.zeros(1, 3, 32, 32), widths=0.4, across=True)
    assert 0.39 < found.parameters.share <= 0.4
    assert {w.after < w.before for w in found.widths.values()} == {True}


def test_random_features_by_seed() -> None:
    first, again, other = (prune(mlp(), ROW, widths=0.5, score="random", seed=s) for s in (3, 3, 4))
    assert first.dropped == again.dropped != other.dropped
    assert first.dropped != prune(mlp(), ROW, widths=0.5).dropped


def test_equal_scores_leave_the_earlier_features_and_go_evenly_over_wires() -> None:
    model = mlp()
    for i in (0, 2):
        model[i].weight.data[:] = 1.0
    assert prune(model, ROW, widths={"0": 2}).dropped["0"] == tuple(range(2, 9))
    even = prune(model, ROW, widths=0.5, across=True).widths
    assert abs(even["0"].share - even["2"].share) < 0.2


def test_nothing_to_prune_is_said() -> None:
    found = prune(nn.Sequential(nn.Linear(3, 2)), torch.zeros(1, 3), widths=0.5)
    assert isinstance(found, Pruned)
    assert found.removed == 0
    assert "0.weight: not pruned: it is an axis of the model's output" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": 1.0}, r"widths must be above 0 and below 1, the share of its features .* but is 1.0"),
        ({"widths": 0.0, "across": True}, r"widths must be above 0 and below 1, the share of parameters .* but is 0.0"),
        ({"widths": 0.5, "score": "gama"}, r"Unknown score 'gama'. Did you mean 'gamma'\? .* l1, random"),
        ({"widths": 0.5, "score": "gamma"}, r"needs a BatchNorm .* but '0' has none. Use score='l1', or name in"),
        ({"widths": {"1": 2}}, r"A width is given for '1', which is no wire .* one of: 0, 2."),
        ({"widths": {"0": 0}}, r"The width of the wire '0' must be from 1 to 9, but is 0."),
        ({"widths": {"0": 10}}, r"The width of the wire '0' must be from 1 to 9, but is 10."),
        ({"widths": {"0": 3}, "across": True}, r"across=True chooses the number of features"),
        ({"widths": 0.05, "across": True}, r"5.0% .* with one feature on every wire 8.6% are"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prune(mlp(), ROW, **options)


def test_gamma_only_where_it_is_asked_for() -> None:
    """Wire "3" of the chain has no norm; naming wire "0" alone is enough."""
    with pytest.raises(InputError, match="but '3' has none"):
        prune(chain(), X, widths=0.5, score="gamma")
    model = chain()
    assert prune(model, X, widths={"0": 3}, score="gamma").dropped["0"] == lowest(model[1].weight.detach().abs(), 3)


def test_a_width_written_into_the_forward_is_found() -> None:
    class Coded(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu().view(-1, 8))

    model = Coded(lambda self, x: x, first=nn.Linear(5, 8), last=nn.Linear(8, 2)).double()
    with pytest.raises(InputError, match="A width is written into the forward there"):
        prune(model, ROW, widths=0.5)
