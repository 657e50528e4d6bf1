"""Trials with odd models and odd inputs, through every verb of the Python interface.

Good outcomes are an error of intertwine with a reason, the unchanged error of the model, or a valid result (finite
numbers, or a named reason for their absence). The model must never be changed.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from reliability_trial import Ended, Outcome, Trial, Variant, each, forked, judged
from torch import Tensor, nn

TOPIC = "Models and inputs"


class OwnError(Exception):
    """The error of a user's model."""


class Net(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, between: Callable[[Net, Tensor], Any] = lambda net, hidden: hidden) -> None:
        super().__init__()
        self.between, self.calls = between, 0
        torch.manual_seed(0)
        self.a, self.relu, self.b = nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        hidden = self.between(self, self.relu(self.a(x)))
        return self.b(hidden) if isinstance(hidden, Tensor) else hidden


def _raise(net: Net, hidden: Tensor) -> Tensor:
    raise OwnError("the model's own error")


def _raise_later(net: Net, hidden: Tensor) -> Tensor:
    if net.calls > 1:
        raise OwnError("the model's own error")
    return hidden


class Mutating(Net):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Lazy(nn.Sequential):
    """Uninitialised parameters."""

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2))


def _hooked(when: str) -> Net:
    net = Net()
    if when == "before":
        net.relu.register_forward_pre_hook(lambda module, args: _raise(net, args[0]))
    else:
        net.relu.register_forward_hook(lambda module, args, out: _raise(net, out))
    return net


def _with(value: float, name: str = "a.weight") -> Net:
    net = Net()
    with torch.no_grad():
        net.get_parameter(name).view(-1)[0] = value
    return net


#: Name → factory of a model.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "whose forward raises": lambda: Net(_raise),
    "whose forward raises the second time": lambda: Net(_raise_later),
    "whose hook raises, before a layer": lambda: _hooked("before"),
    "whose hook raises, behind a layer": lambda: _hooked("after"),
    "that returns None": lambda: Net(lambda net, hidden: None),
    "that returns text": lambda: Net(lambda net, hidden: "text"),
    "that returns nested dictionaries and lists": lambda: Net(lambda net, hidden: {"a": [hidden, {"b": (hidden,)}]}),
    "that writes over its input": Mutating,
    "that draws random numbers": lambda: Net(lambda net, hidden: hidden + torch.randn_like(hidden)),
    "with lazy layers": Lazy,
    "on the meta device": lambda: Net().to("meta"),
    "with NaN in a weight": lambda: _with(math.nan),
    "with infinity in a weight": lambda: _with(math.inf),
    "with NaN in its last bias": lambda: _with(math.nan, "b.bias"),
}


def batches(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One batch of labelled data."""
    return [(x, torch.arange(len(x)) % 2 if x.ndim else torch.tensor(0))]


def rows(count: int = 24) -> Tensor:
    """Inputs that fit."""
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def _values(found: Any) -> Iterator[float]:
    if isinstance(found, dict):
        for value in found.values():
            yield from _values(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _values(value)
    elif isinstance(found, Tensor):
        yield from found.detach().double().flatten().tolist()
    elif isinstance(found, float):
        yield found


def _weights(model: nn.Module) -> list[float]:
    return [value for t in model.state_dict().values() for value in _values(t)]


#: Verb → a call of it on a model a, a model b and inputs that returns a tree of numbers.
VERBS: dict[str, Callable[[Any, nn.Module, nn.Module, Tensor], Any]] = {
    "symmetry": lambda it, a, b, x: it.symmetry(a, x).certify(a, x).max_error,
    "canonicalize": lambda it, a, b, x: _weights(it.canonicalize(a, x).model),
    "fingerprint": lambda it, a, b, x: str(it.fingerprint(a, x)),
    "align": lambda it, a, b, x: _weights(it.align(a, b, x).model),
    "align on data": lambda it, a, b, x: _weights(it.align(a, b, x, method="activations", data=batches(x)).model),
    "barrier": lambda it, a, b, x: it.barrier(a, b, batches(x), points=3).to_dict(),
    "merge": lambda it, a, b, x: _weights(it.merge([a, b], x).model),
    "compare": lambda it, a, b, x: it.compare(a, b, batches(x), layers=["relu"]).to_dict(),
    "stitch": lambda it, a, b, x: it.stitch(a, b, "relu", fit="direct", data=batches(x)).to_dict(),
    "fold": lambda it, a, b, x: _weights(it.fold(a, x, beta=0.2).model),
    "features": lambda it, a, b, x: [f["relu"].shape for f in it.features(a, batches(x), ["relu"])] and None,
}
#: Invalid inputs.
INPUTS: dict[str, Callable[[], Tensor]] = {
    "of another width": lambda: torch.randn(24, 4),
    "without samples": lambda: torch.randn(0, 3),
    "with NaN": lambda: torch.cat([rows(), torch.full((1, 3), math.nan)]),
    "with inf": lambda: torch.cat([rows(), torch.full((1, 3), math.inf)]),
    "of integers": lambda: torch.ones(24, 3, dtype=torch.int64),
    "of one sample": lambda: rows(1),
    "of no dimension": lambda: torch.tensor(1.0),
    "all the same": lambda: torch.ones(24, 3),
}


def _tried(verb: str, make: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Outcome:
    """Call a verb in a child process; the result must be valid, and the model unchanged."""
    import intertwine as it

    def work() -> str:
        a, b, x = make(), make(), inputs()
        before = [t.clone() for t in a.state_dict().values() if not _shapeless(t)]
        kept = x.clone()
        try:
            found = VERBS[verb](it, a, b, x)
        except (OwnError, RuntimeError, TypeError) as error:
            if not _of_the_model(error):
                raise
            _check_same(a, before)
            return f"own error: {error}"
        _check_same(a, before)
        assert torch.equal(x.nan_to_num(), kept.nan_to_num()), "the inputs were changed"
        bad = [value for value in _values(found) if not math.isfinite(value)]
        assert not bad, f"an answer with {bad[0]}"
        return "an answer"

    return _named(forked(work))


def _of_the_model(error: Exception) -> bool:
    """Whether the error comes from the user's forward."""
    return Net.forward.__code__ in [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]


def _shapeless(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.UninitializedParameter)


def _check_same(model: nn.Module, before: list[Tensor]) -> None:
    after = [t for t in model.state_dict().values() if not _shapeless(t)]
    same = len(after) == len(before) and all(
        t.is_meta or torch.equal(t.nan_to_num(), old.nan_to_num()) for t, old in zip(after, before, strict=True)
    )
    assert same, "the model was changed"


def _named(ended: Ended) -> Outcome:
    own = ended.out.startswith("own error") or "OwnError" in ended.err
    outcome = judged(ended, "the model's own error came through" if own else "an answer that holds")
    return Outcome(outcome.kind, outcome.good, outcome.said)


def variants(which: dict[str, Any], call: Callable[..., Outcome]) -> list[Variant]:
    """Every verb with every one of these."""
    return [
        functools.partial(lambda place, verb, name: call(verb, which[name]), verb=verb, name=name)
        for name in which
        for verb in VERBS
    ]


# -- measures ----------------------------------------------------------------------------------------------------------


def _measured(place: Path, name: str, spoil: str) -> Outcome:
    import intertwine as it

    def work() -> str:
        found = it.measure(INPUTS[spoil](), rows(), name)
        assert found.degenerate or math.isfinite(found.value), f"{found.value} without a reason"
        return "an answer"

    return judged(forked(work), "a value, or a reason why there is none")


def _measures() -> list[Variant]:
    import intertwine as it

    return [
        functools.partial(_measured, name=measure.name, spoil=spoil)
        for measure in it.measures()
        for spoil in ("with NaN", "with inf", "without samples", "of another width", "of one sample", "of no dimension")
    ]


def trials() -> Iterator[Trial]:
    """All trials with models and inputs."""
    for name, make in MODELS.items():
        own = {name: make}
        call = lambda verb, model: _tried(verb, model, rows)  # noqa: E731
        yield each(TOPIC, f"model {name}", f"a model {name}, through every verb", variants(own, call))
    for name, inputs in INPUTS.items():
        call = lambda verb, given: _tried(verb, Net, given)  # noqa: E731
        yield each(TOPIC, f"inputs {name}", f"inputs {name}, through every verb", variants({name: inputs}, call))
    yield each(
        TOPIC,
        "measures",
        "every measure on NaN, inf, no sample, one sample, other samples, a single number",
        _measures(),
    )
