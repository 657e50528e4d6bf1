"""BatchNorm statistics re-estimated: exact mean and variance over the data, in one pass per network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from intertwine.data.batches import Fingerprint, Hasher, labelled_batches
from intertwine.data.layers import evaluating
from intertwine.data.weights import LinearPath, path_between
from intertwine.errors import InputError
from intertwine.graph.model import refuse_scripted


@dataclass
class ChannelMoments:
    """Count, mean and sum of squared deviations per channel, updated batch by batch in float64 without cancellation."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, x: Tensor, channels: int) -> None:
        """Add a tensor whose axis `channels` holds the channels."""
        rows = x.detach().movedim(channels, 0).flatten(1).double()
        mean = rows.mean(1)
        self.join(rows.shape[1], mean, (rows - mean[:, None]).square().sum(1))

    def join(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Add the count, mean and sum of squared deviations of other values."""
        shift = mean - self.mean.to(mean.device)
        total = self.count + count
        self.squares = self.squares.to(mean.device) + squares + shift.square() * (self.count * count / total)
        self.mean = self.mean.to(mean.device) + shift * (count / total)
        self.count = total

    def variance(self, correction: int = 0) -> Tensor:
        """Per channel; correction 1 gives the unbiased variance."""
        return self.squares / (self.count - correction)


def reset_statistics(model: nn.Module, data: Any) -> nn.Module:
    """A new network with BatchNorm statistics re-estimated on the data.

    Layers normalise by the statistics of each batch while the data passes, as in training; dropout stays off. The new
    statistics are the exact mean and unbiased variance over all batches, whatever their sizes, not a moving average.

    Args:
        model: a network with BatchNorm; not changed. data: batches of (inputs, targets), each of two samples or more.

    Raises:
        InputError: no BatchNorm with running statistics, no data, or a batch too small to have a variance.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> x = torch.randn(16, 3)
        >>> after = reset_statistics(model, [(x, torch.zeros(16))])
        >>> torch.allclose(after[1].running_mean, model[0](x).mean(0), atol=1e-6)
        True
    """
    path, _ = reset_statistics_along(path_between(model, model, [0.0]), data)
    return path.network(0)


def reset_statistics_along(path: LinearPath, data: Any) -> tuple[LinearPath, Fingerprint]:
    """The same path with statistics re-estimated at every point; and the data's fingerprint. The data is read once."""
    refuse_scripted(path.scratch)
    norms = batch_norms(path.scratch)
    if not norms:
        raise InputError(
            "The network has no BatchNorm layer with running statistics, so there is nothing to reset. Leave "
            "reset_statistics out; intertwine.connect.repair.repair handles networks without BatchNorm."
        )
    hasher, batches = Hasher(), 0
    moments = [{name: ChannelMoments() for name in norms} for _ in path.ts]
    with evaluating(path.scratch):
        for batch in labelled_batches(data, path.scratch, hasher, purpose="data for the statistics"):
            batches += 1
            for point, of_point in enumerate(moments):
                args, kwargs = batch.call
                network = path.network(point)
                with _recording(norms, of_point):
                    network(*args, **kwargs)
    own: dict[str, Tensor] = {}
    for name, norm in norms.items():
        found = [of_point[name] for of_point in moments]
        if not found[0].count:
            continue  # the forward never calls this layer, so its statistics do not matter
        prefix = f"{name}." if name else ""
        means, variances = [m.mean for m in found], [m.variance(correction=1) for m in found]
        for buffer, values in (("running_mean", means), ("running_var", variances)):
            own[prefix + buffer] = torch.stack(values).to(norm.get_buffer(buffer))
        if norm.num_batches_tracked is not None:
            own[prefix + "num_batches_tracked"] = torch.full_like(norm.num_batches_tracked, batches).expand(len(found))
    return path.with_own(own), hasher.fingerprint


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a model that keep running statistics."""
    named = model.named_modules()
    return {name: m for name, m in named if isinstance(m, _BatchNorm) and m.running_mean is not None}


@contextmanager
def _recording(norms: dict[str, _BatchNorm], moments: dict[str, ChannelMoments]) -> Iterator[None]:
    """BatchNorm layers in training mode; the statistics of every call are added to the moments."""

    def restore(norm: _BatchNorm, momentum: float | None) -> None:
        norm.training, norm.momentum = False, momentum

    with ExitStack() as stack:
        for name, norm in norms.items():
            stack.callback(restore, norm, norm.momentum)
            for handle in _attach(name, norm, moments[name]):
                stack.callback(handle.remove)
            norm.training, norm.momentum = True, 1.0  # the layer then stores the statistics of the batch
        yield


def _attach(name: str, norm: _BatchNorm, moments: ChannelMoments) -> tuple[RemovableHandle, RemovableHandle]:
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_varies(name, args[0] if args else kwargs["input"], channels=1)
        mean.zero_()  # NaN would survive even full momentum
        variance.zero_()

    def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        x = args[0] if args else kwargs["input"]
        if mean.dtype in (torch.float32, torch.float64):
            count = x.numel() // x.shape[1]
            moments.join(count, mean.double(), variance.double() * (count - 1))
        else:
            moments.add(x, channels=1)  # half precision would round every batch

    hook = norm.register_forward_hook(after, with_kwargs=True)
    return norm.register_forward_pre_hook(before, with_kwargs=True), hook


def check_varies(name: str, x: Tensor, channels: int) -> None:
    """Refuse a batch that has no variance."""
    if x.numel() == x.shape[channels]:
        raise InputError(
            f"A batch gives the layer {name!r} one value per channel, which has no variance. Use larger batches, or "
            "leave the last small one out (drop_last=True)."
        )
