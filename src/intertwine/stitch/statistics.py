"""BatchNorm of stitched networks: batch statistics while training, and statistics of each stitch's own.

The two networks are shared, so their running statistics must stay as they are. Every call of `F.batch_norm` inside the
mode below is answered instead: with batch statistics, taken for each stitch apart, or with statistics held here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

#: Of `F.batch_norm`.
ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class Statistics(nn.Module):
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Statistics:
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

    def load(self, tensors: Mapping[str, Tensor]) -> Statistics:
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


class PairStatistics(nn.Module):
    """The statistics of one stitched network: of the front, and of the back."""

    def __init__(self, front: Statistics, back: Statistics) -> None:
        super().__init__()
        self.front, self.back = front, back


class _Norms(TorchFunctionMode):
    """Answers `F.batch_norm` of layers whose statistics are held."""

    def __init__(self, statistics: Statistics, how: str) -> None:
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
