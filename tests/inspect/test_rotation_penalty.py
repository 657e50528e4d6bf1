"""Rotation penalties on digits: transforms, fine-tuning against a loop written by hand, resuming, what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_networks import Batches, digits
from torch import Tensor, nn
from torch.nn import functional as F

import intertwine as it
from intertwine.data.batches import labelled_batches
from intertwine.errors import InputError
from intertwine.inspect.rotation import haar_orthogonal
from intertwine.inspect.rotation_penalty import LayerSplit, PenaltyTrial, RotationPenalty, rotation_penalty
from intertwine.inspect.transforms import random_element, random_transform, relu_member

pytestmark = pytest.mark.usefixtures("one_thread")


def batches(size: int = 64, count: int | None = None) -> Batches:
    """The training digits."""
    ((images, labels),) = digits()[0]
    return list(zip(images.split(size), labels.split(size), strict=True))[:count]


def train(model: nn.Module, epochs: int, rate: float = 5e-3) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(epochs):
        for images, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


@cache
def convolutions(seed: int, sigmoid: bool = False, epochs: int = 12) -> nn.Module:
    """Two convolutions, the second so narrow that a rotation before its ReLU loses something."""
    torch.manual_seed(seed)
    act = nn.Sigmoid if sigmoid else nn.ReLU
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), act(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1), act(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return train(model, epochs)


def share_right(model: nn.Module) -> float:
    ((images, labels),) = digits()[1]
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


# -- row 000-G40: transforms -------------------------------------------------------------------------------------------


def test_row_000_g40_rotations_are_uniform() -> None:
    """Of the uniform law on O(3) every entry has mean 0, the trace mean square 1, and half the determinants are −1."""
    found = torch.stack([haar_orthogonal(3, seed) for seed in range(2000)])
    torch.testing.assert_close(found @ found.mT, torch.eye(3, dtype=torch.float64).expand_as(found))
    assert found.mean(0).abs().max() < 0.05
    traces = found.diagonal(dim1=1, dim2=2).sum(1)
    assert float(traces.square().mean()) == pytest.approx(1, abs=0.1)
    assert float((torch.linalg.det(found) > 0).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_row_000_g40_plain_qr_is_not_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.linalg.qr(torch.randn(500, 3, 3, generator=generator, dtype=torch.float64))[0]
    assert plain.mean(0).abs().max() > 0.3


def test_row_000_g40_members_of_g_relu() -> None:
    found = torch.stack([relu_member(25, seed) for seed in range(400)])
    assert (found > 0).sum(1).unique().tolist() == (found > 0).sum(2).unique().tolist() == [1]
    scales = found[found > 0]
    assert float(scales.mean()) == pytest.approx(1, abs=0.05)
    assert float(scales.log().mean()) == pytest.approx(-0.5, abs=0.04)
    assert float(scales.log().std()) == pytest.approx(1, abs=0.04)
    first = torch.stack([relu_member(3, seed) for seed in range(900)])[:, 0].argmax(1).bincount()
    assert first.tolist() == pytest.approx([300] * 3, abs=60)
    x = torch.randn(25, 7, dtype=torch.float64)
    torch.testing.assert_close((found[0] @ x).relu(), found[0] @ x.relu())
    narrow = relu_member(50, 0, spread=0.1)
    assert float(narrow[narrow > 0].log().std()) == pytest.approx(0.1, abs=0.03)


def test_transforms_repeat_and_refuse() -> None:
    for kind in ("orthogonal", "relu"):
        assert torch.equal(random_transform(kind, 4, 1), random_transform(kind, 4, 1))
        assert not torch.equal(random_transform(kind, 4, 1), random_transform(kind, 4, 2))
    with pytest.raises(InputError, match=r"Unknown kind of transform 'ortogonal'. Did you mean 'orthogonal'\?"):
        random_transform("ortogonal", 3)
    with pytest.raises(InputError, match="number of features must be at least 1, but is 0"):
        random_transform("relu", 0)
    with pytest.raises(InputError, match=r"depends on a network\. Use random_element"):
        random_transform("element", 3)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.GELU])
def test_row_000_g40_element_of_the_networks_own_group(act: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), act(), nn.Conv2d(6, 5, 3), act(), nn.Flatten(), nn.Linear(80, 3)).double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    matrix, moved = random_element(it.symmetry(model, x), model, "2", "ncpp", 5, seed=3)
    torch.testing.assert_close(torch.einsum("ij,njhw->nihw", matrix, model[:3](x)), moved[:3](x))  # pyrefly: ignore
    torch.testing.assert_close(model(x), moved(x))
    assert torch.equal(model[0].weight, moved[0].weight)  # pyrefly: ignore - wires elsewhere take no part
    entries = matrix[matrix != 0]
    assert len(entries) == 5
    if act is nn.GELU:
        assert entries.tolist() == [1.0] * 5
    if act is nn.Tanh:
        assert entries.abs().tolist() == [1.0] * 5


# -- row 000-G41: the penalty ------------------------------------------------------------------------------------------


def with_matrix(model: nn.Module, after: int, matrix: Tensor) -> nn.Sequential:
    """The network with a fixed 1×1 convolution put in, as paper 0 does it."""
    assert isinstance(model, nn.Sequential)
    layers = list(copy.deepcopy(model))
    fixed = nn.Conv2d(len(matrix), len(matrix), 1, bias=False)
    fixed.weight = nn.Parameter(matrix[:, :, None, None].to(next(model.parameters()).dtype))
    return nn.Sequential(*layers[: after + 1], fixed, *layers[after + 1 :])


def by_hand(model: nn.Module, after: int, matrix: Tensor, seed: int, epochs: int, rate: float) -> list[float]:
    """Accuracy right after the insertion, and after each epoch of a plain training loop on the whole network."""
    whole = with_matrix(model, after, matrix)
    weights = [p for layer in list(whole)[after + 2 :] for p in layer.parameters()]
    optimizer, order = torch.optim.Adam(weights, rate), torch.Generator().manual_seed(seed)
    found, data = [share_right(whole)], batches()
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate / 2 ** int(5 * epoch / epochs)
        for i in torch.randperm(len(data), generator=order).tolist():
            optimizer.zero_grad()
            F.cross_entropy(whole(data[i][0]), data[i][1]).backward()
            optimizer.step()
        found.append(share_right(whole))
    return found


@pytest.mark.parametrize("kind", ["orthogonal", "relu"])
@pytest.mark.parametrize("after", [0, 3])
def test_row_000_g41_training_is_that_of_an_inserted_convolution(kind: str, after: int) -> None:
    model, seed, epochs, rate = convolutions(0), 5, 3, 2e-3
    found = rotation_penalty(
        model, str(after), batches(), digits()[1], kind=kind, seeds=[seed], epochs=epochs, rate=rate
    )
    (trial,) = found.trials
    matrix = random_transform(kind, 4 if after else 8, seed)
    wanted = by_hand(model, after, matrix, seed, epochs, rate)
    assert trial.before == share_right(model)
    assert [trial.inserted, *trial.history] == pytest.approx(wanted, abs=2.5 / 360)  # at most two digits by rounding
    assert (trial.after, trial.best) == (trial.history[-1], max(trial.history))
    assert trial.penalty == trial.before - trial.after
    assert trial.best_penalty == trial.before - trial.best
    assert trial.after > trial.inserted


def test_row_000_g41_next_layer_can_undo_g_relu_but_no_rotation() -> None:
    """W_{l+1} φ(A)⁻¹ gives the outputs back for A in G_ReLU, and not for a rotation."""
    model = copy.deepcopy(convolutions(0)).double()
    (example,) = labelled_batches([(digits()[1][0][0].double()[:40], digits()[1][0][1][:40])], model)
    split = LayerSplit(model, "0", example)
    away = {}
    for kind in ("relu", "orthogonal"):
        matrix = random_transform(kind, 8, 1)
        split.start()
        with torch.no_grad():
            layer = split.rest.get_submodule("3")
            assert isinstance(layer, nn.Conv2d)
            layer.weight.copy_(torch.einsum("oihw,ij->ojhw", layer.weight, torch.linalg.inv(matrix)))
            away[kind] = float((split.outputs(split.example, matrix) - model(*example.call[0])).abs().max())
    assert away["relu"] < 1e-10
    assert away["orthogonal"] > 0.1


def test_row_000_g41_control_and_element_cost_nothing() -> None:
    model = convolutions(0)
    found = rotation_penalty(
        model, ["0", "3"], batches(), digits()[1], kind=["identity", "element"], seeds=[0, 1], epochs=2
    )
    assert [(trial.at, trial.kind, trial.seed) for trial in found.trials][:4] == [
        ("0", "identity", 0), ("0", "identity", 1), ("0", "element", 0), ("0", "element", 1),
    ]  # fmt: skip
    for trial in found.trials:
        assert trial.inserted == pytest.approx(trial.before, abs=1.5 / 360)
        assert trial.penalty < 0.02


@cache
def figure_4(seed: int) -> RotationPenalty:
    return rotation_penalty(
        convolutions(seed), "3", batches(), digits()[1], kind=["relu", "orthogonal"], seeds=range(3), epochs=10,
        rate=2e-2,
    )  # fmt: skip


@pytest.mark.slow
def test_row_000_g63_rotations_cost_more_than_members_of_g_relu() -> None:
    found = [figure_4(seed) for seed in (0, 1)]
    mean = {(kind, what): sum(one.mean("3", kind, what) for one in found) / 2
            for kind in ("relu", "orthogonal") for what in ("inserted", "penalty", "best_penalty")}  # fmt: skip
    assert mean["orthogonal", "inserted"] < mean["relu", "inserted"]
    assert mean["orthogonal", "penalty"] > mean["relu", "penalty"] + 0.02
    assert mean["orthogonal", "best_penalty"] > mean["relu", "best_penalty"]


def lost(act: nn.Module, z: Tensor, matrix: Tensor) -> float:
    """Share of act(z) that no affine map can get back from act(Az): what is lost for good."""
    given = torch.cat([act(z @ matrix.T), torch.ones(len(z), 1, dtype=z.dtype)], 1)
    wanted = act(z)
    fitted = given @ torch.linalg.lstsq(given, wanted).solution
    return float((fitted - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())


def test_row_000_g63_scales_hurt_a_sigmoid_network() -> None:
    """G_ReLU passes a ReLU without loss; behind a sigmoid its scales lose something, and permutations nothing."""
    z = torch.randn(500, 6, dtype=torch.float64)
    member, turn = relu_member(6, 2), haar_orthogonal(6, 2)
    order = (member > 0).double()
    relu, sigmoid = nn.ReLU(), nn.Sigmoid()
    assert max(lost(relu, z, member), lost(relu, z, order), lost(sigmoid, z, order)) < 1e-20
    assert lost(sigmoid, z, member) > 1e-4
    assert lost(relu, z, turn) > 1e-2
    model = convolutions(0, sigmoid=True, epochs=25)
    found = rotation_penalty(
        model, "3", batches(), digits()[1], kind=["element", "relu"], seeds=[0, 1], epochs=3, rate=1e-2
    )
    assert found.mean("3", "relu", "inserted") < found.mean("3", "element", "inserted") - 0.1
    assert found.mean("3", "relu") > found.mean("3", "element") + 0.02


# -- what is kept as it was --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual network with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv1, self.conv2 = (nn.Conv2d(i, 6, 3, padding=1) for i in (1, 6, 6))
        self.norm, self.drop, self.head = nn.BatchNorm2d(6), nn.Dropout(0.1), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.conv2(F.relu(self.norm(self.conv1(x)), inplace=True))
        y += x
        return self.head(self.drop(F.relu(y).mean((2, 3))))


def test_the_model_is_not_changed_and_layers_in_front_are_not_trained() -> None:
    torch.manual_seed(0)
    model = Block()
    model.conv1.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (example, *_) = labelled_batches(batches(count=1), model)
    split = LayerSplit(model, "conv1", example)
    names = {id(p): name for name, p in split.rest.named_parameters()}
    assert sorted(names[id(p)] for p in split.weights) == [
        "conv2.bias", "conv2.weight", "head.bias", "head.weight", "norm.bias", "norm.weight",
    ]  # fmt: skip
    torch.manual_seed(7)
    state = torch.get_rng_state()
    rotation_penalty(model, "conv1", batches(count=3), digits()[1], kind="orthogonal", epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in model.conv1.parameters()] == [False, True]
    assert model.training
    assert model.drop.training
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_behind_are_trained_in_training_mode_with_a_seed_of_their_own() -> None:
    """Dropout is on while the layers behind are trained, and drawn by the seed of the trial alone."""
    data = batches(count=3)
    model = Block()
    model.drop.p = 0.5
    found = []
    for start in (1, 2):
        torch.manual_seed(start)  # what the caller drew before must not matter
        found.append(rotation_penalty(model, "conv1", data, data, kind="identity", seeds=[4], epochs=2).trials[0])
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
    assert found[0].history == pytest.approx(found[1].history, abs=0.02)
    model.drop.p = 0.0
    still = rotation_penalty(model, "conv1", data, data, kind="identity", seeds=[4], epochs=2).trials[0]
    assert still.loss != pytest.approx(found[0].loss, rel=1e-3)  # dropout was on while it trained


def assert_alike(one: RotationPenalty, two: RotationPenalty) -> None:
    """The same trials, apart from rounding, which depends on where tensors lie in memory."""
    for a, b in zip(one.trials, two.trials, strict=True):
        assert (a.at, a.kind, a.seed) == (b.at, b.kind, b.seed)
        assert [a.before, a.inserted, *a.history] == pytest.approx([b.before, b.inserted, *b.history], abs=1.5 / 360)
        assert a.loss == pytest.approx(b.loss, rel=1e-3)


def test_a_first_layer_may_write_over_the_data() -> None:
    data, test = ([(images - 0.3, labels) for images, labels in some] for some in (batches(count=3), digits()[1]))
    kept = [images.clone() for images, _ in [*data, *test]]
    found = [
        rotation_penalty(
            nn.Sequential(nn.ReLU(inplace), *copy.deepcopy(list(convolutions(0).children()))), "1", data, test,
            kind=["element", "orthogonal"], epochs=2,
        )
        for inplace in (True, False)
    ]  # fmt: skip
    assert all(torch.equal(images, old) for (images, _), old in zip([*data, *test], kept, strict=True))
    assert_alike(*found)


class Loader:
    """Batches that are no list: read anew, told the epoch."""

    def __init__(self, held: Batches) -> None:
        self.held, self.epochs, self.reads = held, [], 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.reads += 1
        return iter(self.held)


def test_features_are_kept_or_computed_again_with_the_same_result() -> None:
    options: dict[str, Any] = {"kind": "orthogonal", "epochs": 2, "seeds": [3]}
    model, data, test = convolutions(0), batches(count=6), digits()[1]
    kept = rotation_penalty(model, "0", data, test, **options)
    again = rotation_penalty(model, "0", data, test, memory=0, **options)
    assert_alike(kept, again)
    loader = Loader(data)
    rotation_penalty(model, "0", loader, test, **options)
    assert loader.epochs == [0, 1]
    assert loader.reads == 4  # to see that it can be read twice, the example, and one per epoch


# -- resuming and reading ----------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_trial_by_trial(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": ["relu", "orthogonal"], "epochs": 1, "seeds": [0, 1]}
    model, data, test = convolutions(0), batches(count=4), digits()[1]
    whole = rotation_penalty(model, "0", data, test, **options)

    class Killed(Exception):
        pass

    def kill(doing: str, part: float) -> None:
        if part > 0.5:
            raise Killed

    with pytest.raises(Killed):
        rotation_penalty(model, "0", data, test, out=tmp_path, progress=kill, **options)
    left = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    assert sorted(left) == ["layer0-relu-0.json", "layer0-relu-1.json"]
    heard: list[tuple[str, float]] = []
    found = rotation_penalty(
        model, "0", data, test, out=tmp_path, progress=lambda doing, part: heard.append((doing, part)), **options
    )
    assert_alike(found, whole)
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in left.items())
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert [part for _, part in heard] == sorted(part for _, part in heard)
    assert heard[-1] == ("orthogonal at 0", 1.0)
    with pytest.raises(
        InputError, match=r"holds a trial of another plan, which differs in epochs. Give another folder"
    ):
        rotation_penalty(model, "0", data, test, out=tmp_path, **(options | {"epochs": 2}))
    with pytest.raises(InputError, match=r"differs in before, weights"):
        rotation_penalty(convolutions(1), "0", data, test, out=tmp_path, **options)


def trials() -> RotationPenalty:
    found = (("a", "relu", 0.9), ("a", "relu", 0.7), ("b", "orthogonal", 0.5))
    return RotationPenalty(tuple(PenaltyTrial(at, k, i, 0.9, 0.1, (0.2, y), 1.0) for i, (at, k, y) in enumerate(found)))


def test_penalties_read_draw_and_turn_into_data() -> None:
    found = trials()
    assert repr(found) == (
        "RotationPenalty(before 0.9000; a, relu: inserted 0.1000 ± 0.0000, after 0.8000 ± 0.1414, penalty 0.1000 ± "
        "0.1414 (2 trials); b, orthogonal: inserted 0.1000, after 0.5000, penalty 0.4000 (1 trial))"
    )
    assert found.values() == {("a", "relu"): pytest.approx([0.0, 0.2]), ("b", "orthogonal"): pytest.approx([0.4])}
    data = json.loads(json.dumps(found.to_dict()))
    assert data["means"][0] == {"at": "a", "kind": "relu", "trials": 2,
                                "penalty": pytest.approx(0.1), "std": pytest.approx(0.1414, abs=1e-4)}  # fmt: skip
    assert data["trials"][1]["penalty"] == pytest.approx(0.2)
    axes = found.plot().axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([10, 40])  # pyrefly: ignore
    assert axes.get_ylabel() == "penalty, percentage points"
    diverged = RotationPenalty((PenaltyTrial("a", "relu", 0, 0.9, 0.1, (0.1,), None),))
    assert repr(diverged).endswith("; 1 trials diverged)")


# -- refusals ----------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3))
        return self.head(y if y.sum() > 0 else -y)


class Summed(nn.Module):
    """Channels that no permutation passes: they are summed up one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)).relu().cumsum(1).relu())


@pytest.mark.parametrize(
    ("at", "options", "text"),
    [
        ("3", {"kind": "rotate"}, r"Unknown kind of transform 'rotate'.*Choose one of: identity, relu"),
        ("3", {"seeds": []}, "There are 1 layers, 3 kinds, 0 seeds and 50 epochs. Give at least one layer"),
        ("3", {"epochs": -1}, "and -1 epochs"),
        ("*", {}, r"'\*' stands for 8 layers"),
        ("", {}, r"stands for 1 layers or for the whole network"),
        ("nine", {}, "no module of that path"),
        ("7", {}, "There is nothing to train after '7'. Name an earlier layer"),
        ("1:input", {"kind": "element"}, "No tensor is computed under a module called '1:input'"),
        ("7:input", {"kind": "element"}, "No tensor is computed under"),
    ],
)
def test_rotation_penalty_refuses(at: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        rotation_penalty(convolutions(0), at, batches(count=1), digits()[1], **options)


def test_rotation_penalty_refuses_networks_and_data_it_cannot_use() -> None:
    data = batches(count=1)
    with pytest.raises(
        InputError, match=r"The network cannot be split at 'conv', so the later layers cannot be trained alone"
    ):
        rotation_penalty(Branching(), "conv", data, data)
    with pytest.raises(InputError, match="it is read several times"):
        rotation_penalty(convolutions(0), "0", iter(data), data)
    numbers = [(data[0][0], torch.randn(len(data[0][0]), 10))]
    with pytest.raises(InputError, match="A rotation penalty is a difference of accuracies"):
        rotation_penalty(convolutions(0), "0", numbers, data)
    with pytest.raises(
        InputError,
        match=r"do not undo an element of the network's group at 'conv2': it also moves values that go around",
    ):
        rotation_penalty(Block(), "conv2", data, data, kind="element", epochs=0)
    inside = rotation_penalty(Block(), "conv1", data, data, kind="element", epochs=0)
    assert inside.trials[0].penalty == pytest.approx(0, abs=1.5 / 64)
    with pytest.raises(InputError, match="Only the identity of the network's group acts at 'conv'"):
        rotation_penalty(Summed(), "conv", data, data, kind="element", epochs=0)


@pytest.mark.parametrize("kind", ["orthogonal", "element"])
def test_paths_are_those_of_the_wrapped_network(kind: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(32, 3)
    data = [(x, net(x).argmax(1))]
    (plain,) = rotation_penalty(net, "0", data, data, kind=kind, epochs=1).trials
    (found,) = rotation_penalty(nn.DataParallel(net), "module.0", data, data, kind=kind, epochs=1).trials
    assert (found.inserted, found.history, found.loss) == (plain.inserted, plain.history, plain.loss)
