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
from intertwine.errors import InputError, MismatchError, did_you_mean, unknown_name
from intertwine.stitch.resize import RESIZES, FeatureForm, from_rows, resize_rows, to_rows
from intertwine.stitch.split_network import ReentrantFreeze, SplitNetwork, split_network, unwrapped
from intertwine.stitch.tracing import (
    NoSampleAxis,
    PointValues,
    TracedNetwork,
    first_samples,
    repeat_samples,
    sample_axis,
    signature,
)

#: One path for both networks, a pair of paths (a tuple), or several of these (a list).
At = str | tuple[str, str] | Sequence[str | tuple[str, str]]
SKIPS = ("front", "back")


@dataclass(frozen=True)
class StitchPoint:
    """A stitch point: the front runs up to one layer, the back continues after another.

    Attributes:
        front, back: the layers, written as in `intertwine.data.layers`.
        skip: the network that feeds the skip connection of a residual block around the point: "front", "back", or
            "none" where there is none. The inputs of the networks do not count: both get the same.
        crossing: the back's values that go around the point, by name; empty if the back can only be run whole.
        inputs, outputs: channels of the front at its layer, and of the back at its layer.
    """

    front: str
    back: str
    skip: str
    crossing: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, eq=False)
class FrontFeatures:
    """What one run of the front gives at a stitch point: features as rows, and the values of skip connections."""

    rows: Float[Tensor, "samples positions inputs"]
    skip_values: tuple[Any, ...] = ()


def point_pairs(at: At) -> tuple[tuple[str, str], ...]:
    """The stitch points as pairs of paths in the front and in the back.

    >>> point_pairs("relu"), point_pairs(("relu", "act")), point_pairs(["conv", ("relu", "act")])
    ((('relu', 'relu'),), (('relu', 'act'),), (('conv', 'conv'), ('relu', 'act')))
    """
    several: list[Any] = [at] if isinstance(at, (str, tuple)) else list(at)
    found = tuple((one, one) if isinstance(one, str) else tuple(one) for one in several)
    if not found or not all(len(pair) == 2 for pair in found):
        raise InputError(
            f'at={at!r} names no stitch point. Give a module path of both networks ("layer1.0.relu"), a pair of paths, '
            'the front\'s first ("layer1", "blocks.2"), or a list of these for several points.'
        )
    return tuple((front, back) for front, back in found)


def point_sites(front: nn.Module, back: nn.Module, at: At) -> list[tuple[LayerPath, LayerPath]]:
    """The layers of every stitch point; a pattern for both networks gives one pair per matching path."""
    found: list[tuple[LayerPath, LayerPath]] = []
    for first, second in point_pairs(at):
        ones, twos = layer_paths(front, first), layer_paths(back, second)
        if len(ones) != len(twos):
            raise MismatchError(
                f"{first!r} stands for {len(ones)} layers of the front, but {second!r} for {len(twos)} of the back. "
                "Name the layers one by one."
            )
        found += zip(ones, twos, strict=True)
    for site in (site for pair in found for site in pair):
        if not site.path:
            raise InputError(
                f"{str(site)!r} is the {site.side} of the whole network, which cannot be a stitch point. Give the "
                "path of a module inside, as model.named_modules() prints it."
            )
    return found


# -- skip connections --------------------------------------------------------------------------------------------------


def choose_skip(
    front: SplitNetwork, back: SplitNetwork, point: int, skip: str | None, values: Sequence[PointValues]
) -> str:
    """Which network feeds the skip connection, or "none". `values`: of the front and of the back at the point."""
    if isinstance(back.run, TracedNetwork) and not back.run.crossing[point]:
        return "none"
    problem = _front_problem(front, back, point, values)
    if skip == "front" and problem:
        raise MismatchError(
            f'skip="front" is impossible at {str(back.run.places[point])!r}: {problem}. Use skip="back", or a stitch '
            "point outside of the block."
        )
    return skip or ("back" if problem else "front")


def _front_problem(front: SplitNetwork, back: SplitNetwork, point: int, values: Sequence[PointValues]) -> str:
    """Why the front cannot feed the skip connection of the back."""
    if not isinstance(front.run, TracedNetwork) or not isinstance(back.run, TracedNetwork):
        reason = back.reason or front.reason
        return f"a network that cannot be traced runs whole and feeds its own skip connections ({reason})"
    if not front.run.same_as(back.run, point, point):
        return "the networks have different programs, or different steps at the stitch point"
    if [tree_map(_shape, x) for x in values[0].skip_values] != [tree_map(_shape, x) for x in values[1].skip_values]:
        return "the values of the skip connection have other sizes in the front"
    return ""


def _shape(x: Tensor) -> torch.Size:
    return x.shape


# -- several copies of the samples at once -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CopyAxes:
    """Along which axes skip values are repeated for several copies, or why several copies cannot run at once."""

    axes: tuple[Any, ...] = ()
    problem: str = ""

    def repeated(self, values: tuple[Any, ...], copies: int) -> tuple[Any, ...]:
        """Skip values for several copies; always new tensors, as the back may overwrite them."""

        def repeat(x: Tensor, axis: int | None) -> Tensor:
            return x.clone() if axis is None else torch.cat([x] * copies, axis)

        if copies == 1:
            return tuple(tree_map(torch.clone, value) for value in values)
        return tuple(tree_map(repeat, value, axis) for value, axis in zip(values, self.axes, strict=True))


def find_copy_axes(back: SplitNetwork, small: Call, values: Mapping[int, PointValues]) -> list[CopyAxes]:
    """How a back takes several copies of the samples at each of its points. `values`: of the back for the call."""
    try:
        double = back.run.start(repeat_samples(small, 2), values, values)
    except Exception as reason:  # noqa: BLE001 - foreign code that does not take twice the samples
        return [CopyAxes(problem=f"the network does not run on its example repeated twice ({reason})")] * len(values)
    return [_proved(back, point, small, values[point], double[point]) for point in sorted(values)]


def _proved(back: SplitNetwork, point: int, call: Call, own: PointValues, twice: PointValues) -> CopyAxes:
    """The axes at one point, proved by running two different copies at once and one by one."""
    pairs = zip(own.skip_values, twice.skip_values, strict=True)
    try:
        found = CopyAxes(tuple(tree_map(sample_axis, a, a, b) for a, b in pairs))
        _check_axis(back, point, own.tensor, sample_axis(own.tensor, own.tensor, twice.tensor))
        pair = own.tensor, 1.5 * own.tensor
        both = torch.cat(pair, back.layouts[point].index("n"))
        with torch.no_grad():
            alone = [back.run.finish(point, x.clone(), found.repeated(own.skip_values, 1), call) for x in pair]
            together = back.run.finish(point, both, found.repeated(own.skip_values, 2), call, copies=2)
        for leaves in zip(*(tree_leaves(y) for y in (*alone, together)), strict=True):
            if isinstance(leaves[-1], Tensor):
                sample_axis(*leaves)
    except NoSampleAxis as reason:
        return CopyAxes(problem=f"one of its values does not hold sample after sample: {reason}")
    return found


def _check_axis(back: SplitNetwork, point: int, x: Tensor, axis: int | None) -> None:
    layout, site = back.layouts[point], str(back.run.places[point])
    if axis is not None and axis != layout.index("n"):
        raise InputError(
            f"At {site!r} the samples are on axis {axis} of a tensor {tuple(x.shape)}, which contradicts its layout "
            f"{layout!r}. Name the axes with layouts={{{site!r}: 'tnc'}}, and give inputs with samples on their first "
            "axis."
        )


# -- the pair ----------------------------------------------------------------------------------------------------------


class SplitPair:
    """A pair of networks and their stitch points. Neither network is copied or changed.

    Each network is traced once and run step by step, so that half a network costs half a run. A network that cannot be
    traced runs with hooks, a back then always whole. Skip connections that cross a stitch point, as in a residual
    block, are fed by the network that `skip` names.

    Args:
        front, back: the networks; both may be the same. at: a path for both, a pair (front, back), or a list of these.
        example: arguments of one call; later calls have the same form.
        skip: which network feeds skip connections: "front" (needs two networks with the same program, split at the same
            step) or "back". None takes "front" where that is possible, and "back" elsewhere.
        resize: how features of another resolution are resized to the back's: "bilinear", "nearest", "area".
        layouts: path → its axes, one letter each, where they cannot be inferred; see `intertwine.data.layouts`.

    Raises:
        InputError: a layer that the forward never reaches, or an unknown option. MismatchError: features that do not
            match.

    Example:
        >>> a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
        >>> call = (torch.randn(5, 3),), {}
        >>> split = SplitPair(a, b, "1", call)
        >>> split.points
        (StitchPoint(front='1', back='1', skip='none', crossing=(), inputs=4, outputs=4),)
        >>> (features,) = split.front(call)
        >>> y = split.back(0, features.rows, features, call)
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
        if skip not in (None, *SKIPS):
            raise InputError(f"{unknown_name('skip', skip, SKIPS)} None chooses one.")
        if resize not in RESIZES:
            raise InputError(unknown_name("resize", resize, RESIZES))
        self.front_model, self.back_model, self._resize = front, back, resize
        places, layouts = point_sites(front, back, at), layouts or {}
        known = {str(site) for pair in places for site in pair}
        for name in layouts:
            if name not in known:
                raise InputError(
                    f"layouts names {name!r}, which is no stitch point. {did_you_mean(name, known)}The stitch points "
                    f"are {', '.join(sorted(known))}."
                )
        models = unwrapped(front), unwrapped(back)
        self._freeze = ReentrantFreeze(models)
        numbers = range(len(places))
        with self.running():
            self._front = split_network(models[0], [pair[0] for pair in places], example, layouts, complete=False)
            self._back = split_network(models[1], [pair[1] for pair in places], example, layouts, complete=True)
            self._forms: dict[Any, tuple[FeatureForm, ...]] = {}
            small = self._small(example)
            values = [network.run.start(small, numbers, numbers) for network in (self._front, self._back)]
            self._kinds = [[_kind(x) for x in values[1][i].skip_values] for i in numbers]
            self._copying = find_copy_axes(self._back, small, values[1])
            self.points = tuple(self._point(i, skip, [one[i] for one in values]) for i in numbers)
            self.front(small)  # raises if features do not match

    @contextmanager
    def running(self) -> Iterator[None]:
        """Both networks in evaluation mode, their weights without gradients; all flags are restored afterwards.

        Every method enters it by itself; around a loop it is entered once.
        """
        with self._freeze.held():
            yield

    def front(self, call: Call, points: Sequence[int] | None = None) -> tuple[FrontFeatures, ...]:
        """The front's features at all or some stitch points: one run up to the deepest, without gradients."""
        wanted = range(len(self.points)) if points is None else points
        with self.running(), torch.no_grad():
            own = [i for i in wanted if self.points[i].skip == "front"]
            values = self._front.run.start(call, wanted, own)
            by_back = [i for i in wanted if self.points[i].skip == "back" and self.points[i].crossing]
            others = self._back.run.start(call, by_back, by_back) if by_back else {}
            forms = self._forms_of(call)
            found = []
            for i in wanted:
                layout, x = self._front.layouts[i], values[i].tensor
                rows = to_rows(x, layout).to(self._back.device, self._back.dtypes[i])
                rows = resize_rows(rows, FeatureForm(layout, tuple(x.shape)), forms[i], self._resize)
                skip_values = (others[i] if i in others else values[i]).skip_values
                found.append(FrontFeatures(rows, _converted(skip_values, self._kinds[i])))
        return tuple(found)

    def targets(self, call: Call) -> tuple[Float[Tensor, "samples positions outputs"], ...]:
        """The back's own features at its points, as rows: one run up to the deepest, without gradients."""
        with self.running(), torch.no_grad():
            values = self._back.run.start(call, range(len(self.points)))
            return tuple(to_rows(values[i].tensor, layout) for i, layout in enumerate(self._back.layouts))

    def back(
        self,
        point: int,
        rows: Float[Tensor, "samples positions outputs"],
        features: FrontFeatures,
        call: Call,
        copies: int = 1,
    ) -> Any:
        """The back from a stitch point on, given rows there. Gradients flow to the rows.

        Args:
            point: the number of the stitch point.
            rows: (copies · samples, positions, outputs); with several copies all samples of the first come first.
            features: of the front at this point for the same call; they hold the skip values.
            call: the arguments of the whole network. copies: how many sets of rows run at once.
        """
        samples, positions, _ = features.rows.shape
        wanted = (copies * samples, positions, self.points[point].outputs)
        name, problem = self.points[point].back, self._copying[point].problem
        if tuple(rows.shape) != wanted:
            raise MismatchError(
                f"The rows at {name!r} are {tuple(rows.shape)}, but {copies} × {samples} samples need {wanted}. Map "
                f"the front's rows, one set after the other, to {wanted[2]} channels."
            )
        if copies > 1 and problem:
            raise InputError(
                f"The back cannot run {copies} copies at once from {name!r} on: {problem}. Run them one by one, with "
                "copies=1."
            )
        with self.running():
            skip_values = self._copying[point].repeated(features.skip_values, copies)
            return self._back.run.finish(point, from_rows(rows, self._forms_of(call)[point]), skip_values, call, copies)

    def _small(self, call: Call) -> Call:
        """The first few samples of a call, if both networks take few."""
        return first_samples(call) if self._front.by_few and self._back.by_few else call

    def _forms_of(self, call: Call) -> tuple[FeatureForm, ...]:
        """The forms of the back's features at its points, for calls of these sizes; the number of samples is free."""
        key = signature(call)
        if key not in self._forms:
            layouts = self._back.layouts
            values = self._back.run.start(self._small(call), range(len(layouts)))
            self._forms[key] = tuple(FeatureForm(one, tuple(values[i].tensor.shape)) for i, one in enumerate(layouts))
        return self._forms[key]

    def _point(self, i: int, skip: str | None, values: Sequence[PointValues]) -> StitchPoint:
        networks = self._front, self._back
        front, back = (str(network.run.places[i]) for network in networks)
        channels = [
            FeatureForm(network.layouts[i], tuple(one.tensor.shape)).channels
            for network, one in zip(networks, values, strict=True)
        ]
        chosen = choose_skip(*networks, i, skip, values)
        return StitchPoint(front, back, chosen, self._back.run.crossing[i], *channels)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitPair:
        """The same pair: the networks are shared and frozen."""
        return self

    def __copy__(self) -> SplitPair:
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            "A SplitPair cannot be pickled, as it shares the two networks. Save the state_dict() of the stitched "
            "network, and build it again from the networks."
        )

    def __repr__(self) -> str:
        points = "; ".join(f"{point.front} → {point.back}" for point in self.points)
        return f"SplitPair({type(self.front_model).__name__} → {type(self.back_model).__name__}, at {points})"


def _kind(value: Any) -> Any:
    return tree_map(lambda x: (x.device, x.dtype), value, is_leaf=lambda x: isinstance(x, Tensor))


def _converted(skip_values: tuple[Any, ...], kinds: Sequence[Any]) -> tuple[Any, ...]:
    """Skip values on the back's device and in its precision."""
    pairs = zip(skip_values, kinds, strict=True)
    return tuple(tree_map(lambda x, kind: x.to(*kind), value, kind) for value, kind in pairs)
