"""`connectivity`: layer by layer, whether two networks can be mixed, and which of the two conditions for it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, SupportsFloat

from torch import nn

from intertwine.argument_types import finite_float
from intertwine.connect.layerwise import LayerwisePass
from intertwine.connect.llfc import Commutativity, LayerConnectivity, LayerMeters
from intertwine.data.batches import Fingerprint
from intertwine.data.batchnorm import reset_statistics_along
from intertwine.data.weights import path_between
from intertwine.errors import InputError
from intertwine.figures import new_figure
from intertwine.lazy import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Connectivity:
    """The result of `connectivity`. `skipped` names the layers without features, with the reason.

    `reset_data` is the fingerprint of the data for BatchNorm statistics, if they were re-estimated.
    """

    alphas: tuple[float, ...]
    layers: tuple[LayerConnectivity, ...]
    data: Fingerprint
    reset_data: Fingerprint | None = None
    skipped: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, layer: str) -> LayerConnectivity:
        for one in self.layers:
            if one.layer == layer:
                return one
        raise InputError(f"There is no layer {layer!r} here. Layers: {', '.join(x.layer for x in self.layers)}.")

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per layer and α, as plain data; None if a layer has no such value."""
        rows = []
        for layer in self.layers:
            shared = layer.commutativity or Commutativity(None, None, None)
            for i, one in enumerate(layer.llfc):
                extra = layer.additivity[i] if layer.additivity else None
                rows.append({
                    "layer": layer.layer, "kind": layer.kind, "alpha": one.alpha, "llfc": one.distance, "c": one.c,
                    "c_mean": one.c_mean, "c_std": one.c_std, "baseline": layer.baseline,
                    "additivity": extra and extra.distance, "additivity_residual": extra and extra.residual,
                    "sign_agreement": layer.sign_agreement, "commutativity": shared.residual,
                    "weights_apart": shared.weights, "inputs_apart": shared.inputs, "notes": "; ".join(layer.notes),
                })  # fmt: skip
        return rows

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "alphas": list(self.alphas),
            "layers": [asdict(layer) for layer in self.layers],
            "data": self.data.to_dict(),
            "reset_data": None if self.reset_data is None else self.reset_data.to_dict(),
            "skipped": dict(self.skipped),
        }

    def plot(self) -> Figure:
        """Left: 1 − cos per layer, one line per α, and between the networks. Right: the two conditions."""
        figure = new_figure(10, 3.6)
        left, right = figure.subplots(1, 2)

        def line(axes: Any, values: Sequence[float | None], label: str, style: str) -> None:
            known = {i: value for i, value in enumerate(values) if value is not None}
            axes.plot(list(known), list(known.values()), style, label=label, markersize=3)

        for i, alpha in enumerate(self.alphas):
            line(left, [layer.llfc[i].distance for layer in self.layers], f"mix, α = {alpha:g}", "o-")
        line(left, [layer.baseline for layer in self.layers], "the two networks", "k--")
        together = [layer.commutativity for layer in self.layers]
        line(right, [x.residual if x else None for x in together], "(W_A − W_B)(H_A − H_B), relative", "s-")
        line(right, [layer.sign_agreement for layer in self.layers], "same sign before activations", "^-")
        left.set_title(f"1 − cos of features, {self.data.samples:,} samples", fontsize=9)
        right.set_title("commutativity and sign agreement", fontsize=9)
        for axes in (left, right):
            axes.set_xticks(range(len(self.layers)), [layer.layer for layer in self.layers], rotation=90, fontsize=6)
            axes.legend(fontsize=7)
        return figure

    def __repr__(self) -> str:
        reset = "" if self.reset_data is None else f", statistics reset on {self.reset_data.samples:,}"
        head = f"Connectivity({len(self.layers)} layers, α = {', '.join(f'{x:g}' for x in self.alphas)}; 1 − cos"
        head += f" of features, largest over α; {self.data.samples:,} samples{reset})"
        cells = [["layer", "kind", "mix", "networks", "same sign", "commutativity"]]
        for layer in self.layers:
            residual = layer.commutativity.residual if layer.commutativity else None
            values = (layer.distance, layer.baseline, layer.sign_agreement, residual)
            cells.append([layer.layer or "(model)", layer.kind, *("" if v is None else f"{v:.3g}" for v in values)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  " + "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([head, *lines, *(f"  {x.layer}: {note}" for x in self.layers for note in x.notes)])


def connectivity(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    alphas: SupportsFloat | Iterable[SupportsFloat] = (0.25, 0.5, 0.75),
    layers: str | Iterable[str] | None = None,
    *,
    reset_statistics: Any = None,
) -> Connectivity:
    """Layer by layer: is the feature of the mix α·a + (1 − α)·b the mix of the features of a and b?

    If it is, up to a positive factor, at the last layer, the mix makes no error that neither a nor b makes. It follows,
    with the factor 1, from two conditions that are measured as well: weak additivity at every activation and
    commutativity at every linear layer. Activations that are not modules (`torch.relu` in a forward) are not found.

    Args:
        a, b: two networks of one architecture; neither is changed. They run in evaluation mode.
        data: batches of (inputs, targets), read once; memory holds the features of one batch. Padding counts.
        alphas: the weights of a in the mix, or one of them; `interpolate(a, b, t)` has t = 1 − α.
        layers: module paths and patterns, as in `intertwine.features`. None: every layer that holds weights and every
            elementwise activation.
        reset_statistics: batches on which BatchNorm statistics are re-estimated, for both ends and every mix.

    Returns:
        A `Connectivity`: one `LayerConnectivity` per layer, `.to_rows()`, `.plot()`. Samples whose features are zero
        have no angle: they are left out and counted in the notes of the layer.

    Raises:
        MismatchError: networks of different architectures. InputError: no data, unknown layers, bad alphas.

    Example:
        >>> import torch, intertwine
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> data = [(torch.randn(16, 3), torch.zeros(16).long())]
        >>> found = intertwine.connectivity(a, a, data)
        >>> [layer.distance < 1e-6 for layer in found.layers], found["1"].sign_agreement
        ([True, True, True], 1.0)
    """
    given = [alphas] if finite_float(alphas) is not None or not isinstance(alphas, Iterable) else list(alphas)
    weights = tuple(number for number in map(finite_float, given) if number is not None and 0 < number < 1)
    if not weights or len(weights) < len(given) or len(set(weights)) < len(weights):
        raise InputError(
            "alphas are the weights of the first network in the mix, each once and strictly between 0 and 1; found "
            f"{given}."
        )
    path, reset_data = path_between(a, b, [0.0, 1.0, *(1 - alpha for alpha in weights)]), None
    if reset_statistics is not None:
        path, reset_data = reset_statistics_along(path, reset_statistics)
    passes = LayerwisePass([lambda i=i: path.network(i) for i in range(len(path.ts))], data, layers)
    meters = LayerMeters(a, b, weights)
    for pair in passes:
        meters.add_ends(pair)
        for i in range(len(weights)):
            meters.add_between(i, pair, pair.between(i))
    return Connectivity(weights, meters.results(), passes.hasher.fingerprint, reset_data, passes.skipped)
