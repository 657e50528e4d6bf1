"""Networks and inputs that go wrong: what bench/reliability.py found, kept from coming back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import intertwine as it


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
    with pytest.raises(it.InputError, match="The first batch of the data holds no samples"):
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
        "symmetry": found, "wire": found.wires[0], "certify": found.certify(a, x),
        "activation_group": it.activation_group(torch.relu), "canonicalize": it.canonicalize(a, x),
        "align": it.align(a, b, x), "align_many": it.align_many([a, b], x), "barrier": it.barrier(a, b, data, points=3),
        "connectivity": it.connectivity(a, b, data), "diagnose": it.diagnose(a, b, data), "merge": it.merge([a, b], x),
        "measure": it.measure(x, x, "linear_cka"), "compare": it.compare(a, b, data), "fold": it.fold(a, x),
        "calibrate": it.calibrate(x, x, "linear_cka"), "stitch": it.stitch(a, b, "1", fit="direct", data=data),
        "complexity": it.complexity(a, x), "fold_to": it.fold_to(a, x, parameters=0.9),
        "features": it.features(a, data),
    }  # fmt: skip
    for name, result in results.items():
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False)), name
        assert type(result).__name__ in repr(result) or "\n" in repr(result), name
    for name in ("barrier", "connectivity", "compare", "complexity"):
        assert results[name].to_frame().height == len(results[name].to_rows()) > 0, name
