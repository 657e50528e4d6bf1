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

#: The parameters of `F.batch_norm`.
ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class BatchNormStatistics(nn.Module):
    """Means and variances of the BatchNorm layers of one network, for one or several stitches.

    The network is shared, so its running statistics must not change. Inside `applied`, calls of `F.batch_norm` use the
    statistics of the batch, for each stitch separately, or the statistics kept here.

    Args:
        model: the network; it is not changed. copies: how many stitches run side by side.
    """

    def __init__(self, model: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.copies = copies
        self._layers: list[tuple[str, nn.Module]] = []  # in pairs, so that torch does not register them as submodules
        self._names: dict[int, str] = {}  # id of a layer's running mean → its name here
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
        """Copies of the statistics for the same layers: the network is shared."""
        found = object.__new__(type(self))
        memo[id(self)] = found
        buffers = {name: t.clone() for name, t in self._buffers.items() if t is not None}
        found.__dict__ = {**self.__dict__, "_buffers": buffers}
        return found

    def of(self, copy: int) -> dict[str, Tensor]:
        """The statistics of one stitch, by name."""
        return {name: tensor[copy : copy + 1].clone() for name, tensor in self.named_buffers()}

    def load(self, tensors: Mapping[str, Tensor]) -> BatchNormStatistics:
        """Set the statistics to those that `of` returned."""
        with torch.no_grad():
            for name, tensor in self.named_buffers():
                tensor.copy_(tensors[name])
        return self

    @contextmanager
    def applied(self, how: str = "own") -> Iterator[None]:
        """Inside, the layers use the statistics kept here ("own"), those of the "batch", or "collect" the batch's.

        Collected statistics are plain averages over all batches since `forget`.
        """
        if how == "collect":
            self.collected += 1
        # each time, as moving a network to another device replaces its tensors
        self._names = {id(layer.running_mean): name for name, layer in self._layers}
        with _BatchNormMode(self, how):
            yield

    def forget(self) -> None:
        """Restart collecting."""
        self.collected = 0

    def normalise(self, how: str, x: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        """One BatchNorm layer, on stitches stacked along the samples."""
        name = self._names[id(mean)]
        means, variances = getattr(self, f"{name}:mean"), getattr(self, f"{name}:var")
        parts = []
        for k, part in enumerate(x.chunk(self.copies)):
            if how == "own":
                parts.append(F.batch_norm(part, means[k], variances[k], weight, bias, False, 0.0, eps))
            elif how == "batch":
                parts.append(F.batch_norm(part, None, None, weight, bias, True, 0.0, eps))
            else:  # momentum 1/t gives the average of all batches
                momentum = 1.0 / self.collected
                parts.append(F.batch_norm(part, means[k], variances[k], weight, bias, True, momentum, eps))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def __contains__(self, mean: object) -> bool:
        return id(mean) in self._names


class PairBatchNormStatistics(nn.Module):
    """The statistics of one stitched network: of the front, and of the back."""

    def __init__(self, front: BatchNormStatistics, back: BatchNormStatistics) -> None:
        super().__init__()
        self.front, self.back = front, back


class _BatchNormMode(TorchFunctionMode):
    """Redirects `F.batch_norm` of known layers to their statistics."""

    def __init__(self, statistics: BatchNormStatistics, how: str) -> None:
        super().__init__()
        self.statistics, self.how = statistics, how

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {}) if func is F.batch_norm else {}
        if not call or call["running_mean"] not in self.statistics:
            return func(*args, **(kwargs or {}))
        x, mean, var = call["input"], call["running_mean"], call["running_var"]
        weight, bias, eps = call.get("weight"), call.get("bias"), call.get("eps", 1e-5)
        return self.statistics.normalise(self.how, x, mean, var, weight, bias, eps)


class StitchedNetwork(nn.Module):
    """T ∘ S ∘ R: the front R up to its layer, the map S, and the back T from its layer on.

    Its parameters are those of the map alone, `weight` and, if the map has one, `bias`. The two networks are neither
    copied nor registered: `.to()`, `.train()`, `.parameters()` and `state_dict()` ignore them, and a deep copy shares
    them. They run in evaluation mode, and gradients reach the map only, not the inputs.

    Args:
        split: the networks and their stitch points. index: of the stitch point. map: from the front's channels to the
            back's. statistics: of BatchNorm layers, instead of those of the networks; kept in the `state_dict()` too.

    Example:
        >>> import torch
        >>> a = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> x = torch.randn(5, 3)
        >>> stitched = StitchedNetwork(SplitPair(a, a, "1", ((x,), {})), 0, LinearMap(torch.eye(4)))
        >>> torch.equal(stitched(x), a(x)), list(stitched.state_dict())
        (True, ['weight'])
    """

    def __init__(
        self, split: SplitPair, index: int, map: LinearMap, statistics: PairBatchNormStatistics | None = None
    ) -> None:
        super().__init__()
        point = split.points[index]
        if (map.inputs, map.outputs) != (point.inputs, point.outputs):
            raise MismatchError(
                f"The map is {map.inputs} → {map.outputs}, but the stitch point {point.front!r} → {point.back!r} has "
                f"{point.inputs} → {point.outputs} channels. Fit a map for this point."
            )
        self.split, self.index = split, index
        self.weight = nn.Parameter(map.matrix.detach().clone())
        self.bias = None if map.bias is None else nn.Parameter(map.bias.detach().clone())
        self.statistics = statistics

    @property
    def map(self) -> LinearMap:
        """The current map."""
        return LinearMap(self.weight, self.bias)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call, own = (args, kwargs), self.statistics
        with self.split.running():
            with nullcontext() if own is None else own.front.applied():
                (features,) = self.split.front(call, [self.index])
            rows = self.map(features.rows)
            with nullcontext() if own is None else own.back.applied():
                return self.split.back(self.index, rows, features, call)

    def extra_repr(self) -> str:
        point = self.split.points[self.index]
        names = type(self.split.front_model).__name__, type(self.split.back_model).__name__
        bias = "" if self.bias is None else ", with bias"
        return f"{names[0]} {point.front} → {names[1]} {point.back}, {point.inputs} → {point.outputs}{bias}"
