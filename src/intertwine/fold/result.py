"""The result of folding: the smaller module, its groups and costs; how it is saved to a folder and loaded again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from intertwine.checkpoints.load import Loaded, load
from intertwine.checkpoints.weights import fill, read_checkpoint, write_checkpoint
from intertwine.data.batches import copied_arguments
from intertwine.data.layers import evaluating
from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.fold.cutting import Example, cut_model
from intertwine.fold.options import check_wire
from intertwine.fold.prepare import RULES, Skipped, prepare
from intertwine.graph.model import copy_module
from intertwine.lazy import data_frame

Groups = Mapping[str, tuple[tuple[int, ...], ...]]  # wire → the old features behind each new one
#: The files in the folder of a folded network.
WEIGHTS, ACCOUNT = "folded.safetensors", "fold.json"
HOW_TO_LOAD = (
    "intertwine.fold.result.load_folded(FOLDER) makes the network that was folded, cuts it to `widths` "
    "(intertwine.fold.result.shrink) and fills it with folded.safetensors"
)


@dataclass(frozen=True)
class Reduction:
    """A number before and after folding."""

    before: float | int
    after: float | int

    @property
    def share(self) -> float:
        """The number after as a share of that before; 1 where that is 0."""
        return self.after / self.before if self.before else 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}

    def __repr__(self) -> str:
        return f"{self.before:,} → {self.after:,} ({self.share:.1%})"


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def count_flops(model: nn.Module, example: Example) -> int:
    """Floating-point operations of one forward on the example: those of matrix products and convolutions."""
    args, kwargs = copied_arguments(example)
    with evaluating(model), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()


def forward_seconds(model: nn.Module, example: Example, repeats: int) -> float:
    """The median time of a forward on the example, after one to warm up."""
    times = []
    with evaluating(model):
        for _ in range(repeats + 1):
            args, kwargs = copied_arguments(example)
            start = time.perf_counter()
            model(*args, **kwargs)
            if torch.cuda.is_available():  # a forward there has only been queued so far
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return median(times[1:])


@dataclass(frozen=True, eq=False)
class Fold:
    """A folded network. See `intertwine.fold`.

    `model`: a smaller module of the same classes. `groups`: wire → the old features behind each new one.
    `rules`: wire → "sum" (rows summed, columns averaged) or "mean" (rows averaged, columns summed).
    `parameters`, `flops`: before and after, each with `.share`. `skipped`: wires that are not folded, with the reason.
    `cut_error`: the relative difference of the small module from the merged network at full width, in double precision.
    `betas`: wire → the β at which it stopped, where `fold_to` chose one for each.
    """

    model: nn.Module
    groups: Groups
    rules: Mapping[str, str]
    parameters: Reduction
    flops: Reduction
    skipped: tuple[Skipped, ...]
    cut_error: float
    _original: nn.Module = field(repr=False)
    _example: Example = field(repr=False)
    betas: Mapping[str, float] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, Reduction]:
        """Wire → its number of features before and after."""
        return {name: Reduction(sum(map(len, groups)), len(groups)) for name, groups in self.groups.items()}

    @property
    def removed(self) -> int:
        """The number of features that were merged into others."""
        return sum(int(w.before - w.after) for w in self.widths.values())

    def latency(self, repeats: int = 10) -> Reduction:
        """The median time of a forward on the example in seconds, before and after."""
        if repeats < 1:
            raise InputError(f"repeats must be at least 1, but is {repeats}.")
        return Reduction(*(forward_seconds(m, self._example, repeats) for m in (self._original, self.model)))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per wire that can be folded, as plain data."""
        return [
            {"wire": name, "before": int(w.before), "after": int(w.after), "share": w.share, "rule": self.rules[name]}
            | {"beta": self.betas.get(name)}
            for name, w in self.widths.items()
        ]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        return {
            "groups": {name: [list(g) for g in groups] for name, groups in self.groups.items()},
            "widths": {name: change.to_dict() for name, change in self.widths.items()},
            "rules": dict(self.rules),
            "parameters": self.parameters.to_dict(),
            "flops": self.flops.to_dict(),
            "skipped": [s.to_dict() for s in self.skipped],
            "cut_error": self.cut_error,
            "betas": dict(self.betas),
        }

    def __repr__(self) -> str:
        if not self.groups:
            why = self.skipped[0] if self.skipped else None
            return f"Fold(nothing to fold{f': {why.what}: {why.reason}' if why else ''})"
        if not self.removed:
            count = f"{len(self.groups)} wire{'s' * (len(self.groups) != 1)}"
            return f"Fold(nothing was merged in {count}: no two features are near enough)"
        lines = [f"Fold(parameters {self.parameters}, FLOPs {self.flops})"]
        long = max(map(len, self.groups))
        for name, width in self.widths.items():
            lines.append(f"  {name:<{long}}  {width.before:>5} → {width.after:<5}  {RULES[self.rules[name]]}")
        lines += [f"  {s.what}: not folded: {s.reason}" for s in self.skipped]
        return "\n".join(lines)


def shrink(model: nn.Module, *example_args: Any, widths: Mapping[str, int], **example_kwargs: Any) -> nn.Module:
    """A network cut to the widths of a folded one, so that the folded weights can be loaded into it.

    Args:
        model: a network of the architecture that was folded, with any weights; it is not changed.
        *example_args, **example_kwargs: inputs it can be called with.
        widths: wire → number of features, such as `{name: w.after for name, w in folded.widths.items()}`.

    Raises:
        InputError: a wire does not exist, or has fewer features than it is to keep.

    Example:
        >>> import torch
        >>> from intertwine.fold.fold import fold
        >>> from intertwine.fold.result import shrink
        >>> make = lambda: torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> folded = fold(make(), torch.zeros(1, 3), beta=0.5)
        >>> again = shrink(make(), torch.zeros(1, 3), widths={n: w.after for n, w in folded.widths.items()})
        >>> again.load_state_dict(folded.model.state_dict())
        <All keys matched successfully>
    """
    prepared = prepare(copy_module(model), (example_args, example_kwargs))
    wires = {wire.name: wire for wire in prepared.wires}
    for name, width in widths.items():
        check_wire("width", name, wires)
        if not 1 <= width <= wires[name].size:
            raise InputError(
                f"The width of the wire {name!r} must be from 1 to {wires[name].size}, but is {width}. Pass a network "
                "of the architecture that was folded."
            )
    return cut_model(prepared.model, prepared.symmetry, {wires[n].index: range(w) for n, w in widths.items()})


def save_folded(
    folder: str | Path, folded: Fold, source: str, inputs: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write the weights of a folded network, and how it was made; returns the two files.

    Args:
        folder: where to write. folded: the result of a folding.
        source, inputs: the name and the inputs under which `intertwine.checkpoints.load` makes the original network.
        about: more entries for the JSON file.
    """
    place = Path(folder)
    write_checkpoint(folded.model, place / WEIGHTS)
    path, colon, rest = source.rpartition(":")
    if path and Path(path).exists():  # the name then holds in every working directory
        source = f"{Path(path).resolve()}{colon}{rest}"
    made = {"model": source, "inputs": list(inputs), "how": HOW_TO_LOAD}
    write_json(place / ACCOUNT, {"made_of": made, **folded.to_dict(), **(about or {})})
    return place / WEIGHTS, place / ACCOUNT


def load_folded(folder: str | Path, model: nn.Module | None = None, *example_args: Any) -> Loaded:
    """A folded network from its folder.

    Args:
        folder: what `save_folded` or `intertwine fold --out` wrote.
        model, *example_args: a network of the architecture that was folded, and inputs it can be called with. Without
            these it is made by the name that it had on the command line.

    Raises:
        InputError: no such folder, or the original network cannot be made. MismatchError: it is another architecture.

    >>> import tempfile
    >>> import torch, intertwine
    >>> from intertwine.fold.result import load_folded, save_folded
    >>> folded = intertwine.fold(intertwine.zoo.build("mlp"), torch.randn(1, 1, 28, 28), beta=0.6)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_folded(folder, folded, "zoo:mlp")
    ...     again = load_folded(folder)
    >>> x = torch.randn(2, 1, 28, 28)
    >>> torch.equal(again.model(x), folded.model(x)), again.parameters == folded.parameters.after
    (True, True)
    """
    place = Path(folder)
    if not (place / ACCOUNT).is_file():
        raise InputError(f"{place} has no {ACCOUNT}. Give a folder that `intertwine fold --out` wrote.")
    try:
        account = json.loads((place / ACCOUNT).read_text(encoding="utf-8"))
        source, inputs = str(account["made_of"]["model"]), [str(text) for text in account["made_of"]["inputs"]]
        widths = {name: int(change["after"]) for name, change in account["widths"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{place / ACCOUNT} is damaged or does not describe a folding ({type(error).__name__}: {error}). Copy the "
            "folder again, or fold the network once more."
        ) from error
    if model is None:
        made = load(source, None, inputs)
    else:
        made = Loaded(str(place), copy_module(model).eval(), example_args, {})
    small = shrink(made.model, *made.args, widths=widths, **made.kwargs)
    fill(small, read_checkpoint(place / WEIGHTS), str(place / WEIGHTS))
    return Loaded(str(place), small.eval(), made.args, made.kwargs)
