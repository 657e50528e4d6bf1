"""Random networks made of every hazard: the engine is right on each of them, and the check that says so can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fuzz_check import check, check_module, shrink
from fuzz_networks import Block, Network, build, networks, random_network
from fuzz_pieces import HAZARDS
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import intertwine as it


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(networks())
def test_the_engine_is_right_on_random_networks(network: Network) -> None:
    verdict = check(network)
    assert verdict.outcome == "right", f"{verdict.outcome}: {verdict.detail}\n{network!r}"


@pytest.mark.parametrize("kind", list(HAZARDS))
def test_every_hazard_builds_and_runs(kind: str) -> None:
    for choices in range(0, 24, 3):
        network = Network(
            (Block(kind, choices * 7919, ((),) * HAZARDS[kind].nests),), takes=["image", "tokens", "ids"][choices % 3]
        )
        model, x = build(network)
        assert network.hazards == {kind}
        with torch.no_grad():
            y = model(x.clone())
        assert bool(y.isfinite().all())


def test_a_network_is_the_same_every_time() -> None:
    first, second = (build(random_network(5)) for _ in range(2))
    assert torch.equal(first[1], second[1])
    for a, b in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_putting_one_moved_parameter_back_changes_the_function() -> None:
    tried = [check(random_network(seed), control=True).control for seed in range(12)]
    changed = [c for c in tried if c is not None]
    assert len(changed) >= 8
    assert sum(changed) >= 0.8 * len(changed)


class _Doubled(nn.Module):
    """A model on which `act` is made wrong by a forward that depends on the order of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_ordered(self.a(x)))


def _ordered(x: Tensor) -> Tensor:
    return torch.ops.fuzz.ordered(x)


@pytest.fixture
def wrong_rule() -> None:
    """An op that treats its positions differently, with a rule that says it treats them alike."""
    if not hasattr(torch.ops.fuzz, "ordered"):
        torch.library.define("fuzz::ordered", "(Tensor x) -> Tensor")
        torch.library.impl("fuzz::ordered", "cpu", lambda x: x * torch.arange(1, x.shape[-1] + 1, dtype=x.dtype))
        torch.library.register_fake("fuzz::ordered", torch.empty_like)

        @it.rule("fuzz::ordered")
        def ordered(t: object, x: object) -> object:
            return x


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rule_is_noticed() -> None:
    torch.manual_seed(0)
    assert check_module(_Doubled(), torch.randn(2, 3)).outcome == "caught"


def test_shrinking_keeps_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that needs one kind of block shrinks to little more than that block."""
    import fuzz_check

    def pretend(network: Network) -> fuzz_check.Verdict:
        return fuzz_check.Verdict("crashed" if "tied" in network.hazards else "right")

    monkeypatch.setattr(fuzz_check, "check", pretend)
    big = next(n for n in map(random_network, range(1000)) if "tied" in n.hazards and n.size > 4)
    small = shrink(big, tries=2000)
    assert (small.size, small.ends, small.takes) == (1, 0, "image")
    assert small.blocks == (Block("tied", 0),)
