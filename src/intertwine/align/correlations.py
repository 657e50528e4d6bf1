"""`matched_correlations`: the correlation of units of two networks on data, wire by wire, with a plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from intertwine.align.activation_sites import run_side_by_side
from intertwine.align.similarity import PairedActivations
from intertwine.align.state import MovableWires
from intertwine.argument_types import Float
from intertwine.canonical.equivalence import common_symmetry
from intertwine.data.batches import Fingerprint
from intertwine.errors import InputError, MismatchError, unknown_name
from intertwine.figures import new_figure
from intertwine.symmetry.symmetry import Symmetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How many wires a plot shows, the worst ones first.
MOST_SHOWN = 12


@dataclass(frozen=True, eq=False)
class WireCorrelation:
    """One wire: `matrix` holds the correlation of every unit of the first network with every unit of the second.

    Units of a wire that has copies (inside heads) are numbered copy by copy. `tensors`: names of the compared tensors
    in the captured program. `dead`: constant units of the first and of the second network; their correlation is 0.
    """

    wire: str
    matrix: Float[Tensor, "units units"] = field(repr=False)
    dead: tuple[tuple[int, ...], tuple[int, ...]]
    tensors: tuple[str, ...]

    @property
    def matched(self) -> Float[Tensor, " units"]:
        """The correlation of each unit with the one at the same index."""
        return self.matrix.diagonal()

    @property
    def mean(self) -> float | None:
        """The mean matched correlation, without units dead in both networks; None if no unit is alive."""
        both = set(self.dead[0]) & set(self.dead[1])
        alive = [i for i in range(len(self.matrix)) if i not in both]
        return float(self.matched[alive].mean()) if alive else None

    def lowest(self, count: int = 5) -> tuple[tuple[int, float], ...]:
        """(unit, matched correlation) of the units with the lowest correlation, the lowest first."""
        return tuple((i, float(self.matched[i])) for i in self.matched.argsort()[:count].tolist())

    def to_dict(self) -> dict[str, Any]:
        """All entries as plain data."""
        return {
            "wire": self.wire,
            "mean": self.mean,
            "matched": self.matched.tolist(),
            "lowest": [list(pair) for pair in self.lowest()],
            "dead": [list(side) for side in self.dead],
            "tensors": list(self.tensors),
            "matrix": self.matrix.tolist(),
        }


@dataclass(frozen=True, eq=False)
class MatchedCorrelations:
    """The result of `matched_correlations`: one entry per wire, and the fingerprint of the data."""

    wires: tuple[WireCorrelation, ...]
    data: Fingerprint

    def __getitem__(self, wire: str) -> WireCorrelation:
        for found in self.wires:
            if found.wire == wire:
                return found
        raise InputError(unknown_name("wire", wire, [w.wire for w in self.wires[:20]]))

    @property
    def mean(self) -> float | None:
        """The mean of the wires' means."""
        means = [w.mean for w in self.wires if w.mean is not None]
        return sum(means) / len(means) if means else None

    def worst_first(self) -> tuple[WireCorrelation, ...]:
        """The wires by their mean matched correlation, those without one last."""
        return tuple(sorted(self.wires, key=lambda w: (w.mean is None, w.mean or 0.0)))

    def to_dict(self) -> dict[str, Any]:
        """All entries as plain data."""
        return {"mean": self.mean, "wires": [w.to_dict() for w in self.wires], "data": self.data.to_dict()}

    def plot(self, before: MatchedCorrelations | None = None) -> Figure:
        """Heat maps of up to twelve wires, the lowest mean first; those of `before` in a row above.

        The units of a wire are drawn in the order of their matched correlation, so matches appear as a diagonal.
        """
        if before is not None and [w.wire for w in before.wires] != [w.wire for w in self.wires]:
            raise MismatchError("`before` has other wires. Pass the correlations of the same architecture.")
        shown = self.worst_first()[:MOST_SHOWN]
        rows = [("", shown)] if before is None else [("before: ", [before[w.wire] for w in shown]), ("after: ", shown)]
        figure = new_figure(1 + 2.4 * len(shown), 0.4 + 2.5 * len(rows))
        grid = figure.subplots(len(rows), len(shown), squeeze=False)
        image = None
        for axes_of_row, (prefix, wires) in zip(grid, rows, strict=True):
            for axes, wire in zip(axes_of_row, wires, strict=True):
                order = self[wire.wire].matrix.diagonal().argsort(descending=True)
                image = axes.imshow(
                    wire.matrix[order][:, order].numpy(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest"
                )
                mean = "no unit varies" if wire.mean is None else f"mean {wire.mean:.2f}"
                axes.set_title(f"{wire.wire}\n{prefix}{mean}", fontsize=8)
                axes.set_xlabel("unit of the second, best match first", fontsize=7)
                axes.set_ylabel("unit of the first", fontsize=7)
                axes.tick_params(labelsize=6)
        assert image is not None
        figure.colorbar(image, ax=grid.ravel().tolist(), label="correlation")
        if len(self.wires) > len(shown):
            figure.suptitle(f"the {len(shown)} of {len(self.wires)} wires with the lowest mean", fontsize=9)
        return figure

    def __repr__(self) -> str:
        worst = self.worst_first()[0]
        means = ["no unit varies" if m is None else f"{m:.3f}" for m in (self.mean, worst.mean)]
        return (
            f"MatchedCorrelations({len(self.wires)} wires on {self.data.samples:,} samples, mean {means[0]}, lowest "
            f"{means[1]} at {worst.wire!r})"
        )


def matched_correlations(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    *example_args: Any,
    symmetry: Symmetry | None = None,
    at: str = "post",
    **example_kwargs: Any,
) -> MatchedCorrelations:
    """The correlation of every unit of a with every unit of b, wire by wire; the diagonal holds the matched pairs.

    Use it on `alignment.reference` and `alignment.model` to see how well units are matched. Positions and tokens count
    as samples. A wire in several tensors has the correlation over all of them, each around its own mean.

    Args:
        a, b: two networks of one architecture; they are run in evaluation mode and not changed.
        data: batches of (inputs, targets), read once. Both networks see each batch.
        *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`; not needed where symmetry is given.
        symmetry: the symmetry of the architecture if it is known; it is then not checked that both models have it.
        at: which tensors are compared: "post" (after nonlinearities) or "pre" (before). A wire that meets no
            nonlinearity is compared at every hidden tensor it stands in.

    Returns:
        A `MatchedCorrelations`: `.wires` with `.matrix`, `.mean`, `.lowest()` and `.dead`; `.plot(before)`.

    Raises:
        MismatchError: the networks are of different architectures. InputError: no data, or features that are NaN.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.align.correlations import matched_correlations
        >>> x = torch.randn(64, 3)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> sym = intertwine.symmetry(model, x)
        >>> twin = sym.act(sym.random(seed=1), model)
        >>> before = matched_correlations(model, twin, [(x, None)], symmetry=sym)
        >>> aligned = intertwine.align(model, twin, symmetry=sym, method="activations", data=[(x, None)])
        >>> after = matched_correlations(aligned.reference, aligned.model, [(x, None)], symmetry=sym)
        >>> before.mean < 0.9, round(after.mean, 6)
        (True, 1.0)
    """
    found = common_symmetry([a, b], symmetry, example_args, example_kwargs)
    features = PairedActivations(MovableWires(found.wire_specs, frozenset()), frozenset(range(len(found.wires))), at)
    fingerprint = run_side_by_side(found, a, b, data, [features])
    wires = []
    for w, kinds in sorted(features.products.items()):
        (products,) = kinds.values()
        first, second = (tuple(side.nonzero().flatten().tolist()) for side in products.dead())
        name, tensors = found.wires[w].name, tuple(features.names[w])
        wires.append(WireCorrelation(name, products.correlation(), (first, second), tensors))
    if not wires:
        raise InputError(
            "No wire stands in a hidden tensor, so there are no units to compare. Look at intertwine.symmetry(model, "
            "…).frozen for the reasons, axis by axis."
        )
    return MatchedCorrelations(tuple(wires), fingerprint)
