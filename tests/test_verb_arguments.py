"""Arguments of every kind: what is plainly meant is taken, what would do nothing or something else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import intertwine
from intertwine.checkpoints import load
from intertwine.cli import main
from intertwine.connect.connectivity import Connectivity
from intertwine.errors import InputError, MismatchError
from intertwine.inspect.top_images import top_images
from intertwine.lab.study.plan import Part, Plan, ZooPlan

it: Any = intertwine  # the arguments are of wrong types on purpose
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.tensor([0, 1] * 4))]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval()


def normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()


def weights(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(weights(one), weights(other), strict=True))


# -- refused -----------------------------------------------------------------------------------------------------------

NAN = float("nan")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rotation of integers": (
        lambda: it.rotation(3, 0.5, 0, dtype=torch.int64), "must be a floating-point dtype, but is torch.int64"
    ),
    "rotation by a text": (lambda: it.rotation(3, "a", 0), "alpha must be a finite number, but is 'a'"),
    "fingerprint to 0": (lambda: it.fingerprint(net(), X, precision=0), "precision must be a finite number above 0"),
    "fingerprint to -1": (lambda: it.fingerprint(net(), X, precision=-1), "precision must be a finite number above 0"),
    "fingerprint to nan": (lambda: it.fingerprint(net(), X, precision=NAN), "precision must be a finite .* above 0"),
    "tolerance nan": (lambda: it.equivalent(net(), net(), X, tol=NAN), "tol must be a relative .* but is nan"),
    "tolerance -1": (lambda: it.equivalent(net(), net(), X, tol=-1), "tol must be a relative difference.* but is -1"),
    "guided batch": (lambda: it.guided_backprop(net(), "1", 0, X, batch=-1), "batch must be at least 1, but is -1"),
    "top batch": (lambda: top_images(net(), "1", X, 0, batch=0), "batch must be at least 1, but is 0"),
    "guided unit": (lambda: it.guided_backprop(net(), "1", 0.5, X), r"units=0\.5 names no features at '1'"),
    "memory": (lambda: it.barrier(net(), net(), DATA, memory=-1), "memory must be a number of GiB"),
    "points": (lambda: it.barrier(net(), net(), DATA, points="5"), "points must be at least 3.* but is '5'"),
    "alphas": (lambda: it.connectivity(net(), net(), DATA, alphas="a"), r"alphas are the weights.* found \['a'\]"),
    "bias": (lambda: it.fold(net(), X, bias="x"), "bias must be True .* or False, but is 'x'"),
    "beta": (lambda: it.complexity(net(), X, beta="a"), "beta must be above 0 and below 1, but is 'a'. It is a share"),
    "max_ratio": (lambda: it.fold(net(), X, max_ratio="a"), "max_ratio must be above 0 and at most 1, or None"),
    "base": (lambda: it.canonicalize(net(), X, base=-2), "The lexicographic order has no base, but base is -2"),
    "nodesort base": (lambda: it.canonicalize(net(), X, order="nodesort", base=NAN), "a base above 1, but base is nan"),
    "one network": (lambda: it.merge(net()), "needs a list of networks, but got one Sequential"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_do_nothing_or_something_else_is_refused(name: str, unchecked: None) -> None:
    call, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        call()


# -- taken -------------------------------------------------------------------------------------------------------------

HALVES: list[Any] = [torch.tensor(0.5), np.float32(0.5), np.array(0.5), np.float64(0.5)]


@pytest.mark.parametrize("half", HALVES, ids=lambda half: type(half).__name__)
def test_numbers_of_torch_and_numpy_are_numbers(half: Any) -> None:
    assert same(it.interpolate(net(0), net(1), half), it.interpolate(net(0), net(1), 0.5))
    assert torch.equal(it.rotation(3, half, 0), it.rotation(3, 0.5, 0))
    assert it.connectivity(net(0), net(1), DATA, half).alphas == (0.5,)


def test_several_powers_may_be_a_tensor() -> None:
    assert torch.equal(it.rotation(3, torch.tensor([0.25, 0.5]), 0), it.rotation(3, [0.25, 0.5], 0))


@pytest.mark.parametrize("unit", [np.int64(1), torch.tensor(1), [np.int64(1)], torch.tensor([1])])
def test_units_may_be_numbers_of_torch_and_numpy(unit: Any) -> None:
    assert torch.equal(it.guided_backprop(net(), "1", unit, X).maps, it.guided_backprop(net(), "1", 1, X).maps)
    assert top_images(net(), "1", X, unit).units == (1,)


def test_one_alpha_is_a_list_of_one() -> None:
    one: Connectivity = it.connectivity(net(0), net(1), DATA, alphas=0.5)
    assert one.to_dict() == it.connectivity(net(0), net(1), DATA, alphas=[0.5]).to_dict()


def test_networks_may_come_from_a_generator() -> None:
    given = [net(seed) for seed in range(3)]
    assert same(it.merge((m for m in given), X).model, it.merge(given, X).model)
    assert it.align_many((m for m in given), X).after == it.align_many(given, X).after


def test_a_base_is_11_where_none_is_given() -> None:
    found, named = (it.canonicalize(net(), X, order="nodesort", **given).model for given in ({}, {"base": 1.1}))
    assert same(found, named)


# -- told as it is -----------------------------------------------------------------------------------------------------


def test_modes_that_differ_are_named() -> None:
    with pytest.raises(MismatchError, match=r"The second network is in training mode and the other is not.* eval\(\)"):
        it.equivalent(normed(), normed().train(), X)
    part = normed()
    part[1].train()
    with pytest.raises(MismatchError, match=r"'1' of the first network is in training mode"):
        it.equivalent(part, normed(), X)


@pytest.mark.parametrize(
    "verb", [it.fold, it.fingerprint, lambda m, x: it.align(m, m, x), lambda m, x: it.merge([m, m], x)]
)
def test_nan_weights_are_told_without_a_canonical_form(verb: Callable[..., Any]) -> None:
    broken: Any = net()
    with torch.no_grad():
        broken[0].weight[0, 0] = NAN
    with pytest.raises(InputError, match=r"'0\.weight' holds NaN.* can be neither sorted nor compared"):
        verb(broken, X)


# -- Networks and inputs that go wrong ---------------------------------------------------------------------------------


class WritesOverItsInput(nn.Module):
    """Doubles what it is given, in place, before it looks at it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.relu, self.b = nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.relu(self.a(x.mul_(2))))


class Doubles(WritesOverItsInput):
    """The same function, which leaves its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.relu(self.a(x * 2)))


def batches(count: int = 24) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(count, 3), torch.arange(count) % 2)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def test_every_network_on_a_line_sees_the_same_inputs() -> None:
    data = batches()
    kept = data[0][0].clone()
    found = it.barrier(WritesOverItsInput(0), WritesOverItsInput(1), data, points=3)
    assert torch.equal(data[0][0], kept)
    assert found.loss == it.barrier(Doubles(0), Doubles(1), data, points=3).loss


@pytest.mark.parametrize("verb", ["fold", "merge", "connectivity"])
def test_a_forward_that_works_in_place_does_not_reach_the_inputs(verb: str) -> None:
    data, a, b = batches(), WritesOverItsInput(0), WritesOverItsInput(1)
    kept = data[0][0].clone()
    calls: dict[str, Callable[[], Any]] = {
        "fold": lambda: it.fold(a, data[0][0], beta=0.2),
        "merge": lambda: it.merge([a, b], data=data, method="activations"),
        "connectivity": lambda: it.connectivity(a, b, data),
    }
    calls[verb]()
    assert torch.equal(data[0][0], kept)


@pytest.mark.parametrize("verb", ["barrier", "compare", "stitch", "features"])
def test_networks_without_numbers_are_refused(verb: str) -> None:
    model, data = network().to("meta"), batches()
    calls: dict[str, Callable[[], Any]] = {
        "barrier": lambda: it.barrier(model, model, data, points=3),
        "compare": lambda: it.compare(model, model, data),
        "stitch": lambda: it.stitch(model, model, "1", fit="direct", data=data),
        "features": lambda: it.features(model, data),
    }
    with pytest.raises(it.InputError, match=r"meta device and hold no numbers. Load them first: .*assign=True"):
        calls[verb]()


def test_a_first_batch_without_samples_cannot_be_stitched_on() -> None:
    data = [(torch.randn(0, 3), torch.zeros(0).long()), *batches()]
    with pytest.raises(it.InputError, match="The first batch of the data is empty"):
        it.stitch(network(), network(), "1", fit="direct", data=data)


def test_batches_that_the_networks_refuse_are_told_as_such() -> None:
    a, b = network(), network()
    whole_numbers = [(torch.ones(8, 3, dtype=torch.int64), torch.zeros(8).long())]
    with pytest.raises(it.InputError, match=r"could not be run on a batch of the data: .* raised .*same dtype"):
        it.align(a, b, torch.randn(1, 3), method="activations", data=whole_numbers)


def test_a_refused_network_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(it.IntertwineError, match="its own forward raised RuntimeError"):
        it.symmetry(network(), torch.randn(4, 7))
    assert capfd.readouterr() == ("", "")


def test_what_verbs_give_can_be_written_as_json() -> None:
    a, b, x, data = network(), network(), batches()[0][0], batches()
    found = it.symmetry(a, x)
    results: dict[str, Any] = {
        "symmetry": found,
        "wire": found.wires[0],
        "certify": found.certify(a, x),
        "activation_group": it.activation_group(torch.relu),
        "canonicalize": it.canonicalize(a, x),
        "align": it.align(a, b, x),
        "align_many": it.align_many([a, b], x),
        "barrier": it.barrier(a, b, data, points=3),
        "connectivity": it.connectivity(a, b, data),
        "diagnose": it.diagnose(a, b, data),
        "merge": it.merge([a, b], x),
        "measure": it.measure(x, x, "linear_cka"),
        "compare": it.compare(a, b, data),
        "fold": it.fold(a, x),
        "calibrate": it.calibrate(x, x, "linear_cka"),
        "stitch": it.stitch(a, b, "1", fit="direct", data=data),
        "complexity": it.complexity(a, x),
        "fold_to": it.fold_to(a, x, parameters=0.9),
        "features": it.features(a, data),
    }
    for name, result in results.items():
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False)), name
        assert type(result).__name__ in repr(result) or "\n" in repr(result), name
    for name in ("barrier", "connectivity", "compare", "complexity"):
        assert results[name].to_frame().height == len(results[name].to_rows()) > 0, name


# -- Networks kept in float64 ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place, options = tmp_path_factory.mktemp("zoos") / "exact", {"widths": (64, 16, 10)}
    return it.zoo.train("mlp", seeds=[0, 1], data="digits", out=place, options=options, epochs=2, precision="float64")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inputs", [(), ("1x1x8x8",)])
def test_inputs_are_of_the_networks_kind(inputs: tuple[str, ...], zoo: Any) -> None:
    loaded = load(f"{zoo.folder}:0", None, inputs)
    assert loaded.inputs == ("float64 1×1×8×8",)
    assert torch.equal(loaded.model(*loaded.args), zoo[0](*loaded.args))


@pytest.mark.usefixtures("one_thread")
def test_inputs_of_a_users_file_too(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x, ids):\n"
        "        return super().forward(x)[ids]\n"
        "def net(): return Net(3, 2, dtype=torch.float64)\n"
        "def example_inputs(): return (torch.ones(4, 3),), {'ids': torch.tensor([1, 2])}\n"
    )
    loaded = load(f"{tmp_path / 'nets.py'}:net")
    assert loaded.inputs == ("float64 4×3", "ids: int64 2")  # ids stay whole numbers


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "line",
    [
        "inspect {zoo}:0", "canonicalize {zoo}:0", "compare {zoo}:0 {zoo}:1", "align {zoo}:0 {zoo}:1",
        "align {zoo}:0 {zoo}:1 --method activations --data digits", "merge {zoo}:0 {zoo}:1 --data digits",
        "barrier {zoo}:0 {zoo}:1 --data digits --points 3", "fold {zoo}:0 --parameters 0.6 --data digits",
        "stitch {zoo}:0 {zoo}:1 --at 2 --data digits",
    ],
)  # fmt: skip
def test_commands(line: str, zoo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.format(zoo=zoo.folder).split()) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
def test_a_study_and_its_report(zoo: Any, tmp_path: Path) -> None:
    pytest.importorskip("polars")
    one = {"zoos": ("z",), "networks": (0,)}
    parts = (
        Part("canonical", **one), Part("symmetry", **one), Part("complexity", **one),
        Part("fold", **one, options={"at": [0.6]}, grid={"method": ("fold_to", "merge", "fold", "prune")}),
        Part("barrier", ("z",), pairs=((0, 1),), options={"method": "weights", "points": 3}),
    )  # fmt: skip
    study = it.study.run(Plan("exact", {"z": ZooPlan(folder=str(zoo.folder))}, parts), out=tmp_path / "s")
    assert (study.tasks, study.errors) == (8, {})
    found = {(row["verb"], row["quantity"]): row["value"] for row in study.frame().to_dicts()}
    assert found["canonical", "changed_predictions"] == 0
    assert found["canonical", "way_back_error"] < 1e-12  # single precision is at 1e-7
    assert "S_16" in it.report.write(study, tmp_path / "r.html").read_text()
