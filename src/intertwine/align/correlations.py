"""`matched_correlations`: how well the units of two networks go together on data, wire by wire, with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from intertwine.align.activation_sites import run_side_by_side
from intertwine.align.similarity import MovableStrands, PairedActivations
from intertwine.argument_types import Float
from intertwine.canonical.equivalence import check_same_architecture
from intertwine.data.batches import Fingerprint
from intertwine.errors import InputError, MismatchError
from intertwine.figures import new_figure
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: How many wires a picture shows, the worst ones first.
MOST_SHOWN = 12


@dataclass(frozen=True, eq=False)
class WireCorrelation:
    """One wire: `matrix` holds the correlation of every unit of the first network with every unit of the second.

    Units of a wire that has copies (inside heads) are numbered copy by copy. `tensors`: what was compared, by the names
    of the captured program. `dead`: units that do not vary, in the first and in the second network; they correlate
    with nothing.
    """

    wire: str
    matrix: Float[Tensor, "units units"] = field(repr=False)
    dead: tuple[tuple[int, ...], tuple[int, ...]]
    tensors: tuple[str, ...]

    @property
    def matched(self) -> Float[Tensor, " units"]:
        """The correlation of each unit with the one in its own place."""
        return self.matrix.diagonal()

    @property
    def mean(self) -> float | None:
        """Of the matched correlations; units dead in both networks do not count. None where no unit is alive."""
        both = set(self.dead[0]) & set(self.dead[1])
        alive = [i for i in range(len(self.matrix)) if i not in both]
        return float(self.matched[alive].mean()) if alive else None

    def lowest(self, count: int = 5) -> tuple[tuple[int, float], ...]:
        """(unit, matched correlation) of the units that go together worst, the worst first."""
        order = self.matched.argsort()[:count].tolist()
        return tuple((i, float(self.matched[i])) for i in order)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
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
    """What `matched_correlations` found: one entry per wire, and the fingerprint of the data."""

    wires: tuple[WireCorrelation, ...]
    data: Fingerprint

    def __getitem__(self, wire: str) -> WireCorrelation:
        for found in self.wires:
            if found.wire == wire:
                return found
        raise InputError(f"There is no wire {wire!r}. Wires: {', '.join(w.wire for w in self.wires[:20])}.")

    @property
    def mean(self) -> float | None:
        """The mean of the wires' means."""
        means = [w.mean for w in self.wires if w.mean is not None]
        return sum(means) / len(means) if means else None

    def worst_first(self) -> tuple[WireCorrelation, ...]:
        """The wires by their mean matched correlation, those without one last."""
        return tuple(sorted(self.wires, key=lambda w: (w.mean is None, w.mean or 0.0)))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"mean": self.mean, "wires": [w.to_dict() for w in self.wires], "data": self.data.to_dict()}

    def plot(self, before: MatchedCorrelations | None = None) -> Figure:
        """The matrices side by side, up to twelve wires, the lowest mean first; with `before`, those above these.

        The units of a wire are drawn in the order of their matched correlation, so that matches show as a diagonal.
        """
        if before is not None and [w.wire for w in before.wires] != [w.wire for w in self.wires]:
            raise MismatchError("`before` has other wires than these. Pass the correlations of the same architecture.")
        shown = self.worst_first()[:MOST_SHOWN]
        rows = [("", shown)] if before is None else [("before: ", [before[w.wire] for w in shown]), ("after: ", shown)]
        figure = new_figure(1 + 2.4 * len(shown), 0.4 + 2.5 * len(rows))
        grid = figure.subplots(len(rows), len(shown), squeeze=False)
        image = None
        for axes_of_row, (words, wires) in zip(grid, rows, strict=True):
            for axes, wire in zip(axes_of_row, wires, strict=True):
                order = self[wire.wire].matrix.diagonal().argsort(descending=True)
                image = axes.imshow(
                    wire.matrix[order][:, order].numpy(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest"
                )
                mean = "no unit varies" if wire.mean is None else f"mean {wire.mean:.2f}"
                axes.set_title(f"{wire.wire}\n{words}{mean}", fontsize=8)
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
        words = ["no unit varies" if m is None else f"{m:.3f}" for m in (self.mean, worst.mean)]
        return (
            f"MatchedCorrelations({len(self.wires)} wires on {self.data.samples:,} samples, mean {words[0]}, lowest "
            f"{words[1]} at {worst.wire!r})"
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
    """The correlation of every unit of a with every unit of b, wire by wire; the diagonal is what a mix would average.

    A pure function of two networks: of `alignment.reference` and `alignment.model` it tells how well units are matched.
    Positions and tokens count as samples. A wire that several tensors carry has the correlation of all of them
    together, each around its own mean.

    Args:
        a, b: two networks of one architecture; they are run in evaluation mode and not changed.
        data: batches of (inputs, targets), read once. Both networks see each batch.
        *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`; not needed where symmetry is given.
        symmetry: the symmetry of the architecture where it is already known; both models are then trusted to be of it.
        at: which tensors speak for a wire: "post" (after nonlinearities) or "pre" (before). A wire that meets no
            nonlinearity is judged by every hidden tensor that carries it.

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
    found = symmetry
    if found is None:
        found = find_symmetry(a, *example_args, **example_kwargs)
        check_same_architecture(found, a, b, find_symmetry(b, *example_args, **example_kwargs))
    features = PairedActivations(MovableStrands(found.wire_specs, frozenset()), frozenset(range(len(found.wires))), at)
    fingerprint = run_side_by_side(found, a, b, data, [features])
    wires = tuple(_wire(found, s, features) for s in sorted(features.products))
    if not wires:
        raise InputError(
            "No hidden tensor carries a wire, so there are no units to compare. Look at intertwine.symmetry(model, "
            "…).frozen for the reasons, axis by axis."
        )
    return MatchedCorrelations(wires, fingerprint)


def _wire(symmetry: Symmetry, s: int, features: PairedActivations) -> WireCorrelation:
    (products,) = features.products[s].values()
    dead: Sequence[tuple[int, ...]] = [tuple(side.nonzero().flatten().tolist()) for side in products.dead()]
    return WireCorrelation(symmetry.wires[s].name, products.correlation(), (dead[0], dead[1]), tuple(features.names[s]))
