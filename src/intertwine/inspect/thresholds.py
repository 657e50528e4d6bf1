"""Thresholds: the exact quantile of every unit over a whole data set, met batch by batch.

Only values that can still lie above the quantile are kept: about 0.5 % of all for the usual top 0.5 %, and as many
again while they wait to be sorted in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float


class TopValues:
    """The largest values of every unit, out of a number of values per unit that is known beforehand.

    >>> import torch
    >>> top = TopValues(values=100, share=0.1)
    >>> for part in torch.arange(200.0).reshape(2, 100).split(30, dim=1):
    ...     top.add(part)
    >>> top.threshold()
    tensor([ 89.1000, 189.1000])
    """

    def __init__(self, values: int, share: float) -> None:
        if not 0 < share < 1:
            raise InputError(
                f"The top {share} of the activations was asked for; give a share between 0 and 1, such as 0.005."
            )
        if values < 1:
            raise InputError("A quantile of no activations was asked for; give at least one image.")
        self.values, self.share = values, share
        self.position = (values - 1) * share  # of the quantile, counted from the largest value
        self.keep = min(values, int(self.position) + 2)
        self.seen = 0
        self._best: Tensor | None = None
        self._waiting: list[Tensor] = []

    def add(self, values: Float[Tensor, "units values"]) -> None:
        """More values of every unit."""
        if not bool(values.isfinite().all()):
            raise InputError(
                "The activations hold values that are not finite, so they have no quantile. Check the network and its "
                "inputs."
            )
        self.seen += values.shape[1]
        self._waiting.append(values)
        if sum(part.shape[1] for part in self._waiting) >= self.keep:
            self._sort_in()

    def threshold(self) -> Float[Tensor, " units"]:
        """The value that the share of a unit's values lies above, with linear interpolation as in numpy.quantile."""
        if self.seen != self.values:
            raise InputError(
                f"A quantile over {self.values:,} values per unit was begun, but {self.seen:,} came. The images must "
                "be the same in every pass, and give maps of one size; turn dropping and random sampling off."
            )
        self._sort_in()
        assert self._best is not None
        top = self._best.sort(dim=1, descending=True).values
        at = int(self.position)
        above, below = top[:, at].double(), top[:, min(at + 1, top.shape[1] - 1)].double()
        return (above + (below - above) * (self.position - at)).to(top.dtype)

    def _sort_in(self) -> None:
        parts = [*([] if self._best is None else [self._best]), *self._waiting]
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if joined.shape[1] > self.keep:
            joined = joined.topk(self.keep, dim=1, sorted=False).values
        self._best, self._waiting = joined, []
