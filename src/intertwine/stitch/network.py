"""The stitched network as one module, and BatchNorm statistics of its own that leave the two shared networks
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from intertwine.errors import MismatchError
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.split import SplitPair

# ----------------------------------------------------------------------------------------------------
# BatchNorm of stitched networks: batch statistics while training, and statistics of each stitch's own.
#
# The two networks are shared, so their running statistics must stay as they are. Every call of `F.batch_norm` inside the
# mode below is answered instead: with batch statistics, taken for each stitch apart, or with statistics held here.


#: Of `F.batch_norm`.
ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class BatchNormStatistics(nn.Module):
    """Means and variances of the BatchNorm layers of one network, for so many stitches.

    Args:
        model: whose layers they are; it is not changed. copies: how many stitches pass side by side.
    """

    def __init__(self, model: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.copies = copies
        self._layers: list[tuple[str, nn.Module]] = []  # in pairs, so that torch does not take them for parts of this
        self._names: dict[int, str] = {}  # id of a layer's own running mean → its name here
        self.collected = 0
        for path, layer in model.named_modules():
            mean, var = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and mean is not None and var is not None:
                name = path.replace(".", "/") or "self"
                self._layers.append((name, layer))
                exact = torch.promote_types(mean.dtype, torch.float32)
                self.register_buffer(f"{name}:mean", mean.detach().to(exact).repeat(copies, 1))
                self.register_buffer(f"{name}:var", var.detach().to(exact).repeat(copies, 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchNormStatistics:
        """Numbers of its own for the same layers: the network is shared."""
        found = object.__new__(type(self))
        memo[id(self)] = found
        found.__dict__ = {
            **self.__dict__,
            "_buffers": {name: t.clone() for name, t in self._buffers.items() if t is not None},
        }
        return found

    def of(self, copy: int) -> dict[str, Tensor]:
        """The statistics of one stitch, by names."""
        return {name: tensor[copy : copy + 1].clone() for name, tensor in self.named_buffers()}

    def load(self, tensors: Mapping[str, Tensor]) -> BatchNormStatistics:
        """Take over statistics that `of` gave."""
        with torch.no_grad():
            for name, tensor in self.named_buffers():
                tensor.copy_(tensors[name])
        return self

    @contextmanager
    def applied(self, how: str = "own") -> Iterator[None]:
        """Inside, the layers use the statistics "own" here, those of the "batch", or the batch's, which they "collect".

        Collected statistics are plain averages over all batches since `forget`.
        """
        if how == "collect":
            self.collected += 1
        # anew each time: moving a network to another device gives it other tensors
        self._names = {id(layer.running_mean): name for name, layer in self._layers}
        with _Norms(self, how):
            yield

    def forget(self) -> None:
        """Begin collecting anew."""
        self.collected = 0

    def answer(self, how: str, x: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        """One BatchNorm layer, on the stitches that stand one behind another along the samples."""
        name = self._names[id(mean)]
        held = getattr(self, f"{name}:mean"), getattr(self, f"{name}:var")
        parts = []
        for k, part in enumerate(x.chunk(self.copies)):
            if how == "own":
                parts.append(F.batch_norm(part, held[0][k], held[1][k], weight, bias, False, 0.0, eps))
            elif how == "batch":
                parts.append(F.batch_norm(part, None, None, weight, bias, True, 0.0, eps))
            else:  # momentum 1/t makes an average of all batches
                share = 1.0 / self.collected
                parts.append(F.batch_norm(part, held[0][k], held[1][k], weight, bias, True, share, eps))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def __contains__(self, mean: object) -> bool:
        return id(mean) in self._names


class PairBatchNormStatistics(nn.Module):
    """The statistics of one stitched network: of the front, and of the back."""

    def __init__(self, front: BatchNormStatistics, back: BatchNormStatistics) -> None:
        super().__init__()
        self.front, self.back = front, back


class _Norms(TorchFunctionMode):
    """Answers `F.batch_norm` of layers whose statistics are held."""

    def __init__(self, statistics: BatchNormStatistics, how: str) -> None:
        super().__init__()
        self.statistics, self.how = statistics, how

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        call = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        if call["running_mean"] not in self.statistics:
            return func(*args, **kwargs)
        x, mean, var = call["input"], call["running_mean"], call["running_var"]
        return self.statistics.answer(
            self.how, x, mean, var, call.get("weight"), call.get("bias"), call.get("eps", 1e-5)
        )


# ----------------------------------------------------------------------------------------------------
# The stitched network: the front of one network, a map, and the back of another, as one module.


class StitchedNetwork(nn.Module):
    """T ∘ S ∘ R: the front R up to its cut, the map S, and the back T from its cut on.

    Its parameters are those of the map alone, `weight` and, where the map has one, `bias`. The two networks are neither
    copied nor registered: `.to()`, `.train()`, `.parameters()` and `state_dict()` leave them alone, and a deep copy
    shares them. They run in evaluation mode, and gradients reach the map only, not the inputs.

    Args:
        splice: the networks and their cuts. cut: number of the cut. map: from the front's channels to the back's.
        statistics: of BatchNorm layers, in place of those of the networks; kept in the `state_dict()` too.

    Example:
        >>> import torch
        >>> a = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> x = torch.randn(5, 3)
        >>> stitched = StitchedNetwork(SplitPair(a, a, "1", ((x,), {})), 0, LinearMap(torch.eye(4)))
        >>> torch.equal(stitched(x), a(x)), list(stitched.state_dict())
        (True, ['weight'])
    """

    def __init__(
        self, splice: SplitPair, cut: int, map: LinearMap, statistics: PairBatchNormStatistics | None = None
    ) -> None:
        super().__init__()
        place = splice.cuts[cut]
        if (map.inputs, map.outputs) != (place.inputs, place.outputs):
            raise MismatchError(
                f"A map of {map.inputs} features to {map.outputs} was given for the cut {place.front!r} → "
                f"{place.back!r}, where {place.inputs} channels meet {place.outputs}. Fit a map for this cut."
            )
        self.splice, self.number = splice, cut
        self.weight = nn.Parameter(map.matrix.detach().clone())
        self.bias = None if map.bias is None else nn.Parameter(map.bias.detach().clone())
        self.statistics = statistics

    @property
    def map(self) -> LinearMap:
        """The map as it stands."""
        return LinearMap(self.weight, self.bias)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call, own = (args, kwargs), self.statistics
        with self.splice.running():
            with nullcontext() if own is None else own.front.applied():
                (arrived,) = self.splice.front(call, [self.number])
            rows = self.map(arrived.rows)
            with nullcontext() if own is None else own.back.applied():
                return self.splice.back(self.number, rows, arrived, call)

    def extra_repr(self) -> str:
        cut = self.splice.cuts[self.number]
        names = type(self.splice.front_model).__name__, type(self.splice.back_model).__name__
        bias = "" if self.bias is None else ", with bias"
        return f"{names[0]} {cut.front} → {names[1]} {cut.back}, {cut.inputs} → {cut.outputs}{bias}"
