"""Two networks split at stitch points: the front runs up to a point, the back from a point on, and values of skip
connections go around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.argument_types import Float
from intertwine.data.batches import Call
from intertwine.data.layers import LayerPath, layer_paths
from intertwine.errors import InputError, MismatchError, did_you_mean
from intertwine.stitch.halves import ReentrantFreeze, SplitNetwork, split_network, unwrapped
from intertwine.stitch.resize import FeatureForm, check_resize, from_rows, resize_rows, to_rows
from intertwine.stitch.tracing import (
    NoSampleAxis,
    PointValues,
    TracedNetwork,
    first_samples,
    repeat_samples,
    sample_axis,
    signature,
)

# ----------------------------------------------------------------------------------------------------
# Where two networks are cut, how that is written, and what arrives at a cut.


#: One place of both networks, a pair of places (a tuple), or several of these (a list).
At = str | tuple[str, str] | Sequence[str | tuple[str, str]]


@dataclass(frozen=True)
class StitchPoint:
    """One cut: the front runs up to one place, the back goes on behind another.

    Attributes:
        front, back: the places, as `intertwine.data.layers` writes them.
        skip: whose values go around the cut, as the skip path of a residual block does: "front", "back", or "none"
            where nothing goes around it. The inputs of the networks do not count: both have the same.
        crossing: the back's values that go around the cut, by name; empty for a back that could only be run whole.
        inputs, outputs: channels of the front at its place, and of the back at its own.
    """

    front: str
    back: str
    skip: str
    crossing: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, eq=False)
class FrontFeatures:
    """What one run of the front brought to a cut: the features as rows, and the values that go around the cut."""

    rows: Float[Tensor, "samples positions inputs"]
    around: tuple[Any, ...] = ()


def point_pairs(at: At) -> tuple[tuple[str, str], ...]:
    """The places to cut at, as pairs of front and back.

    >>> point_pairs("relu"), point_pairs(("relu", "act")), point_pairs(["conv", ("relu", "act")])
    ((('relu', 'relu'),), (('relu', 'act'),), (('conv', 'conv'), ('relu', 'act')))
    """
    several: list[Any] = [at] if isinstance(at, (str, tuple)) else list(at)
    found = tuple((one, one) if isinstance(one, str) else tuple(one) for one in several)
    if not found or not all(len(pair) == 2 for pair in found):
        raise InputError(
            f'at={at!r} was asked for. Give a module path of both networks ("layer1.0.relu"), a pair of paths, first '
            'the front\'s ("layer1", "blocks.2"), or a list of these for several cuts.'
        )
    return tuple((front, back) for front, back in found)


def point_sites(front: nn.Module, back: nn.Module, at: At) -> list[tuple[LayerPath, LayerPath]]:
    """The places of every pair; a pattern that stands for both networks gives one pair for each path that fits."""
    found: list[tuple[LayerPath, LayerPath]] = []
    for first, second in point_pairs(at):
        ones, twos = layer_paths(front, first), layer_paths(back, second)
        if len(ones) != len(twos):
            raise MismatchError(
                f"The pair {first!r} and {second!r} was asked for, but it stands for {len(ones)} places of the front "
                f"and {len(twos)} of the back. Name the places one by one."
            )
        found += list(zip(ones, twos, strict=True))
    for site in (site for pair in found for site in pair):
        if not site.path:
            raise InputError(
                f"The place {str(site)!r} is the {site.side} of the whole network, where nothing is to be cut off. "
                "Give the path of a module inside, as model.named_modules() prints it."
            )
    return found


def check_layouts(layouts: Mapping[str, str], places: Sequence[tuple[LayerPath, LayerPath]]) -> None:
    """Refuse a layout of a place where nothing is cut."""
    known = {str(site) for pair in places for site in pair}
    for name in layouts:
        if name not in known:
            raise InputError(
                f"A layout was given for {name!r}, where nothing is cut. {did_you_mean(name, known)}The cuts are at "
                f"{', '.join(sorted(known))}."
            )


# ----------------------------------------------------------------------------------------------------
# Whose values go around a cut, as the skip path of a residual block does: the front's or the back's.


SKIPS = ("front", "back")


def check_skip(skip: str | None) -> None:
    """Refuse a choice that there is not."""
    if skip not in (None, *SKIPS):
        raise InputError(
            f"skip={skip!r} was asked for. {did_you_mean(str(skip), SKIPS)}It is whose values go around a cut: "
            '"front", "back", or None to choose.'
        )


def choose_skip(
    front: SplitNetwork, back: SplitNetwork, cut: int, asked: str | None, begun: Sequence[PointValues]
) -> str:
    """Whose values go around a cut, or "none". `begun`: what the front and the back have there."""
    if isinstance(back.run, TracedNetwork) and not back.run.crossing[cut]:
        return "none"
    problem = _not_the_front(front, back, cut, begun)
    if asked == "front" and problem:
        raise MismatchError(
            f'skip="front" was asked for at {str(back.run.places[cut])!r}, but {problem}. Use skip="back", or cut '
            "outside of the block."
        )
    return asked or ("back" if problem else "front")


def _not_the_front(front: SplitNetwork, back: SplitNetwork, cut: int, begun: Sequence[PointValues]) -> str:
    """Why the front's values cannot go around a cut of the back."""
    if not isinstance(front.run, TracedNetwork) or not isinstance(back.run, TracedNetwork):
        reason = back.reason or front.reason
        return f"a network that cannot be traced is run whole, and what goes around the cut is then its own ({reason})"
    if not front.run.same_as(back.run, cut, cut):
        return "the networks do not take the same steps, or are not cut behind the same one"
    if [tree_map(_shape, x) for x in begun[0].around] != [tree_map(_shape, x) for x in begun[1].around]:
        return "the values that go around it have other sizes in the front"
    return ""


def _shape(x: Tensor) -> torch.Size:
    return x.shape


# ----------------------------------------------------------------------------------------------------
# Several copies of the samples at once: whether the back takes them apart, and the values around a cut for them.


@dataclass(frozen=True, eq=False)
class CopyAxes:
    """Along which axes the values around a cut are repeated for several copies; or why several cannot pass at once."""

    axes: tuple[Any, ...] = ()
    problem: str = ""

    def around(self, values: tuple[Any, ...], copies: int) -> tuple[Any, ...]:
        """Values around a cut for so many copies; always new tensors, as the back may overwrite them."""

        def several(x: Tensor, axis: int | None) -> Tensor:
            return x.clone() if axis is None else torch.cat([x] * copies, axis)

        if copies == 1:
            return tuple(tree_map(torch.clone, value) for value in values)
        return tuple(tree_map(several, value, axis) for value, axis in zip(values, self.axes, strict=True))


def find_copy_axes(back: SplitNetwork, small: Call, begun: Mapping[int, PointValues]) -> list[CopyAxes]:
    """How a back takes several copies of the samples at each of its cuts. `begun`: what it has there for the call."""
    try:
        double = back.run.start(repeat_samples(small, 2), begun, begun)
    except Exception as reason:  # noqa: BLE001 - foreign code that does not take twice the samples
        return [CopyAxes(problem=f"it does not take its example twice over ({reason})")] * len(begun)
    return [_proved(back, cut, small, begun[cut], double[cut]) for cut in sorted(begun)]


def _proved(back: SplitNetwork, cut: int, call: Call, own: PointValues, twice: PointValues) -> CopyAxes:
    """How a back takes copies at one cut, proved by passing two that differ at once and one by one."""
    try:
        found = CopyAxes(tuple(tree_map(sample_axis, a, a, b) for a, b in zip(own.around, twice.around, strict=True)))
        _check_axis(back, cut, own.tensor, sample_axis(own.tensor, own.tensor, twice.tensor))
        pair = own.tensor, 1.5 * own.tensor
        both = torch.cat(pair, back.layouts[cut].index("n"))
        with torch.no_grad():
            alone = [back.run.finish(cut, x.clone(), found.around(own.around, 1), call) for x in pair]
            together = back.run.finish(cut, both, found.around(own.around, 2), call, copies=2)
        for leaves in zip(*(tree_leaves(y) for y in (*alone, together)), strict=True):
            if isinstance(leaves[-1], Tensor):
                sample_axis(*leaves)
    except NoSampleAxis as reason:
        return CopyAxes(problem=f"a value of it does not hold sample after sample: {reason}")
    return found


def _check_axis(back: SplitNetwork, cut: int, x: Tensor, axis: int | None) -> None:
    layout, site = back.layouts[cut], str(back.run.places[cut])
    if axis is not None and axis != layout.index("n"):
        raise InputError(
            f"At {site!r} the samples lie along axis {axis} of a tensor {tuple(x.shape)}, and not where its layout "
            f"{layout!r} has them. Say what the axes are with layouts={{{site!r}: 'tnc'}}, and give inputs that "
            "have their samples first."
        )


# ----------------------------------------------------------------------------------------------------
# A pair of networks and the places where they are cut: the front up to a cut, the back from a cut on.


class SplitPair:
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
        layouts: place → its axes, one letter each, where they are not what they seem; see `intertwine.data.layouts`.

    Raises:
        InputError: a place that the forward never reaches, or an option that there is not. MismatchError: features that
            cannot meet.

    Example:
        >>> a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
        >>> call = (torch.randn(5, 3),), {}
        >>> splice = SplitPair(a, b, "1", call)
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
        places = point_sites(front, back, at)
        check_layouts(layouts or {}, places)
        models = unwrapped(front), unwrapped(back)
        self._hold = ReentrantFreeze(models)
        given = layouts or {}
        with self.running():
            self._front = split_network(models[0], [pair[0] for pair in places], example, given, complete=False)
            self._back = split_network(models[1], [pair[1] for pair in places], example, given, complete=True)
            self._spots: dict[Any, tuple[FeatureForm, ...]] = {}
            small = self._small(example)
            begun = [half.run.start(small, range(len(places)), range(len(places))) for half in self._halves]
            self._kinds = [[_kind(x) for x in begun[1][i].around] for i in range(len(places))]
            self._copying = find_copy_axes(self._back, small, begun[1])
            self.cuts = tuple(self._cut(i, pair, skip, begun) for i, pair in enumerate(places))
            self.front(small)  # features that cannot meet are told of now

    @property
    def _halves(self) -> tuple[SplitNetwork, SplitNetwork]:
        return self._front, self._back

    @contextmanager
    def running(self) -> Iterator[None]:
        """Both networks in evaluation mode, their weights without gradients; all flags are put back behind.

        Every method enters it by itself; around a loop it is entered once.
        """
        with self._hold.held():
            yield

    # -- halves --------------------------------------------------------------------------------------------------------

    def front(self, call: Call, cuts: Sequence[int] | None = None) -> tuple[FrontFeatures, ...]:
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
                found.append(FrontFeatures(self._met(i, begun[i].tensor, spots[i]), _fitted(around, self._kinds[i])))
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
        arrived: FrontFeatures,
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

    def _check_rows(self, cut: int, rows: Tensor, arrived: FrontFeatures, copies: int) -> None:
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
        return first_samples(call) if self._front.by_few and self._back.by_few else call

    def _spots_of(self, call: Call) -> tuple[FeatureForm, ...]:
        """The forms of the back's features at its cuts, for calls of these sizes; the number of samples is free."""
        key = signature(call)
        if key not in self._spots:
            begun = self._back.run.start(self._small(call), range(len(self._back.layouts)))
            shapes = (tuple(begun[i].tensor.shape) for i in range(len(self._back.layouts)))
            self._spots[key] = tuple(FeatureForm(*pair) for pair in zip(self._back.layouts, shapes, strict=True))
        return self._spots[key]

    def _met(self, cut: int, x: Tensor, back: FeatureForm) -> Tensor:
        layout = self._front.layouts[cut]
        rows = to_rows(x, layout).to(self._back.device, self._back.dtypes[cut])
        return resize_rows(rows, FeatureForm(layout, tuple(x.shape)), back, self._resize)

    def _cut(
        self, i: int, pair: tuple[LayerPath, LayerPath], skip: str | None, begun: Sequence[Mapping[int, PointValues]]
    ) -> StitchPoint:
        front, back = (str(site) for site in pair)
        spots = [
            FeatureForm(half.layouts[i], tuple(taken[i].tensor.shape))
            for half, taken in zip(self._halves, begun, strict=True)
        ]
        chosen, crossing = (
            choose_skip(self._front, self._back, i, skip, [taken[i] for taken in begun]),
            self._back.run.crossing[i],
        )
        return StitchPoint(front, back, chosen, crossing, spots[0].channels, spots[1].channels)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitPair:
        """The same splice: the networks are shared and frozen."""
        return self

    def __copy__(self) -> SplitPair:
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
