"""A pair of networks and the places where they are cut: the front up to a cut, the back from a cut on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from intertwine.errors import InputError, MismatchError
from intertwine.features.batches import Call
from intertwine.features.places import Site
from intertwine.shapes import Float
from intertwine.stitch.batching import few, signature
from intertwine.stitch.copying import copyings
from intertwine.stitch.cut import Arrived, At, Cut, check_layouts, places_of
from intertwine.stitch.frozen import Hold, unwrapped
from intertwine.stitch.half import Half, halved
from intertwine.stitch.hooked import Taken
from intertwine.stitch.meeting import Spot, check_resize, from_rows, meet, to_rows
from intertwine.stitch.skip import check_skip, choose_skip


class Splice:
    """A pair of networks and the places where they are cut. Neither network is copied or changed.

    Each network is traced once and run step by step, so that a half costs a half; one that cannot be traced is run with
    hooks, the back then whole. What a network computes before a cut and reads behind it, as a residual block does, goes
    around the cut and is taken from the network that `skip` names.

    Args:
        front, back: the networks; both may be the same. at: a place of both, a pair (front, back), or a list of these.
        example: arguments of one call, which every later call resembles.
        skip: whose values go around a cut: "front", which needs two networks of the same steps cut behind the same one,
            or "back". None takes "front" where that can be, as one network of two halves has it, and "back" elsewhere.
        resize: how features of another resolution are brought to the back's: "bilinear", "nearest", "area".
        layouts: place → its axes, one letter each, where they are not what they seem; see `intertwine.features.policy`.

    Raises:
        InputError: a place that the forward never reaches, or an option that there is not. MismatchError: features that
            cannot meet.

    Example:
        >>> a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
        >>> call = (torch.randn(5, 3),), {}
        >>> splice = Splice(a, b, "1", call)
        >>> splice.cuts
        (Cut(front='1', back='1', skip='none', crossing=(), inputs=4, outputs=4),)
        >>> (arrived,) = splice.front(call)
        >>> y = splice.back(0, arrived.rows, arrived, call)
        >>> torch.allclose(y, b[2](a[:2](*call[0])))
        True
    """

    def __init__(
        self,
        front: nn.Module,
        back: nn.Module,
        at: At,
        example: Call,
        *,
        skip: str | None = None,
        resize: str = "bilinear",
        layouts: Mapping[str, str] | None = None,
    ) -> None:
        check_skip(skip)
        check_resize(resize)
        self.front_model, self.back_model, self._resize = front, back, resize
        places = places_of(front, back, at)
        check_layouts(layouts or {}, places)
        models = unwrapped(front), unwrapped(back)
        self._hold = Hold(models)
        given = layouts or {}
        with self.running():
            self._front = halved(models[0], [pair[0] for pair in places], example, given, complete=False)
            self._back = halved(models[1], [pair[1] for pair in places], example, given, complete=True)
            self._spots: dict[Any, tuple[Spot, ...]] = {}
            small = self._small(example)
            begun = [half.run.start(small, range(len(places)), range(len(places))) for half in self._halves]
            self._kinds = [[_kind(x) for x in begun[1][i].around] for i in range(len(places))]
            self._copying = copyings(self._back, small, begun[1])
            self.cuts = tuple(self._cut(i, pair, skip, begun) for i, pair in enumerate(places))
            self.front(small)  # features that cannot meet are told of now

    @property
    def _halves(self) -> tuple[Half, Half]:
        return self._front, self._back

    @contextmanager
    def running(self) -> Iterator[None]:
        """Both networks in evaluation mode, their weights without gradients; all flags are put back behind.

        Every method enters it by itself; around a loop it is entered once.
        """
        with self._hold.held():
            yield

    # -- halves --------------------------------------------------------------------------------------------------------

    def front(self, call: Call, cuts: Sequence[int] | None = None) -> tuple[Arrived, ...]:
        """What arrives at every cut, or at some: one run of the front up to the deepest, without gradients."""
        wanted = range(len(self.cuts)) if cuts is None else cuts
        with self.running(), torch.no_grad():
            own = [i for i in wanted if self.cuts[i].skip == "front"]
            begun = self._front.run.start(call, wanted, own)
            beside = [i for i in wanted if self.cuts[i].skip == "back" and self.cuts[i].crossing]
            others = self._back.run.start(call, beside, beside) if beside else {}
            spots = self._spots_of(call)
            found = []
            for i in wanted:
                around = (others[i] if i in others else begun[i]).around
                found.append(Arrived(self._met(i, begun[i].tensor, spots[i]), _fitted(around, self._kinds[i])))
        return tuple(found)

    def targets(self, call: Call) -> tuple[Float[Tensor, "samples positions outputs"], ...]:
        """What the back itself has at its cuts, as rows: one run up to the deepest, without gradients."""
        with self.running(), torch.no_grad():
            begun = self._back.run.start(call, range(len(self.cuts)))
            return tuple(to_rows(begun[i].tensor, layout) for i, layout in enumerate(self._back.layouts))

    def back(
        self,
        cut: int,
        rows: Float[Tensor, "samples positions outputs"],
        arrived: Arrived,
        call: Call,
        copies: int = 1,
    ) -> Any:
        """The back from a cut on, given rows there. Gradients flow to the rows.

        Args:
            rows: (copies · samples, positions, outputs); with several copies all samples of the first come first.
            arrived: what the front brought to this cut for the same call; the values around the cut are in it.
            copies: how many sets of rows pass at once.
        """
        self._check_rows(cut, rows, arrived, copies)
        with self.running():
            spot = self._spots_of(call)[cut]
            around = self._copying[cut].around(arrived.around, copies)
            return self._back.run.finish(cut, from_rows(rows, spot), around, call, copies)

    def _check_rows(self, cut: int, rows: Tensor, arrived: Arrived, copies: int) -> None:
        samples, positions, _ = arrived.rows.shape
        wanted = (copies * samples, positions, self.cuts[cut].outputs)
        if tuple(rows.shape) != wanted:
            raise MismatchError(
                f"The back was given rows {tuple(rows.shape)} at {self.cuts[cut].back!r}, where {copies} × {samples} "
                f"samples have {wanted}. Map the rows that arrived, one set behind the other, to {wanted[2]} channels."
            )
        if copies > 1 and (problem := self._copying[cut].problem):
            raise InputError(
                f"{copies} copies were to pass the back behind {self.cuts[cut].back!r} at once, but {problem}. Pass "
                "them one by one, with copies=1."
            )

    # -- preparation ---------------------------------------------------------------------------------------------------

    def _small(self, call: Call) -> Call:
        """Few samples of a call, where both networks take few."""
        return few(call) if self._front.by_few and self._back.by_few else call

    def _spots_of(self, call: Call) -> tuple[Spot, ...]:
        """The forms of the back's features at its cuts, for calls of these sizes; the number of samples is free."""
        key = signature(call)
        if key not in self._spots:
            begun = self._back.run.start(self._small(call), range(len(self._back.layouts)))
            shapes = (tuple(begun[i].tensor.shape) for i in range(len(self._back.layouts)))
            self._spots[key] = tuple(Spot(*pair) for pair in zip(self._back.layouts, shapes, strict=True))
        return self._spots[key]

    def _met(self, cut: int, x: Tensor, back: Spot) -> Tensor:
        layout = self._front.layouts[cut]
        rows = to_rows(x, layout).to(self._back.device, self._back.dtypes[cut])
        return meet(rows, Spot(layout, tuple(x.shape)), back, self._resize)

    def _cut(self, i: int, pair: tuple[Site, Site], skip: str | None, begun: Sequence[Mapping[int, Taken]]) -> Cut:
        front, back = (str(site) for site in pair)
        spots = [
            Spot(half.layouts[i], tuple(taken[i].tensor.shape)) for half, taken in zip(self._halves, begun, strict=True)
        ]
        chosen, crossing = (
            choose_skip(self._front, self._back, i, skip, [taken[i] for taken in begun]),
            self._back.run.crossing[i],
        )
        return Cut(front, back, chosen, crossing, spots[0].channels, spots[1].channels)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Splice:
        """The same splice: the networks are shared and frozen."""
        return self

    def __copy__(self) -> Splice:
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            "A splice cannot be pickled: it holds two networks that belong to somebody else. Save the state_dict() of "
            "the stitched network, and build it again from the networks."
        )

    def __repr__(self) -> str:
        cuts = "; ".join(f"{cut.front} → {cut.back}" for cut in self.cuts)
        return f"Splice({type(self.front_model).__name__} → {type(self.back_model).__name__}, at {cuts})"


def _kind(value: Any) -> Any:
    return tree_map(lambda x: (x.device, x.dtype), value, is_leaf=lambda x: isinstance(x, Tensor))


def _fitted(around: tuple[Any, ...], kinds: Sequence[Any]) -> tuple[Any, ...]:
    """Values around a cut on the back's device and in its precision."""
    return tuple(tree_map(lambda x, kind: x.to(*kind), value, kind) for value, kind in zip(around, kinds, strict=True))
