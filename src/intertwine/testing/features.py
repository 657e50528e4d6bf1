"""The laws of features: at every module the moved model computes the moved features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.errors import InputError
from intertwine.graph.copies import copied
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.element import Element
from intertwine.symmetry.runner import largest
from intertwine.testing.laws import Ledger
from intertwine.testing.subject import Subject, strands_of

CANCELLED = 1e-4  # features this much smaller than the largest are rounding noise, and are judged by its size


def check_features(subject: Subject, g: Element, h: Element, ledger: Ledger) -> None:
    """Check the features of every module that returns a tensor."""
    sym = subject.symmetry
    modules = dict(subject.model.named_modules(remove_duplicate=False))
    sites = [name for name in sym._discovery.graph.sites if name in modules]
    own = outputs_of_modules(subject, subject.model, sites)
    moved = outputs_of_modules(subject, sym.act(g, subject.model), sites)
    noise = CANCELLED * max(map(largest, own.values()), default=0.0)
    for name, x in own.items():
        wires = _wires(subject, name)
        try:
            predicted = sym.act_on_features(g, name, x)
        except InputError as error:
            ledger.skip(f"features of {name}", str(error))
            continue
        ledger.note("features", relative_error(moved[name], predicted, noise), name, wires)
        twice = sym.act_on_features(g, name, sym.act_on_features(h, name, x))
        once = sym.act_on_features(g @ h, name, x)
        ledger.note("features: composition", relative_error(twice, once, noise), name, wires)


def outputs_of_modules(subject: Subject, model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Module path → the first tensor the module returned last, read with hooks and not from the captured program."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [v for v in tree_leaves(output) if isinstance(v, Tensor)]
            if tensors and tensors[0].is_floating_point():
                kept[name] = tensors[0].clone()

        return hook

    watched = copied(model)
    for name in names:
        watched.get_submodule(name).register_forward_hook(keep(name))
    subject.forward(watched)
    return kept


def _wires(subject: Subject, site: str) -> tuple[str, ...]:
    """The wires that move the features of a module; those of a view are not worked out, which would change it."""
    discovery = subject.symmetry._discovery
    value = discovery.graph.values[discovery.graph.sites[site]]
    found = strands_of(discovery.layout(value)) if not value.lazy else set()
    return tuple(discovery.strands[i].name for i in sorted(found))
