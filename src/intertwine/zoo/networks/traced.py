"""The type of what passes through a network: a tensor, or its stand-in while `torch.fx` traces the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, fx

if TYPE_CHECKING:
    Traced = Tensor  # a stand-in answers to everything that a tensor does
else:
    Traced = Tensor | fx.Proxy  # annotations are enforced while the tests run, and the trainer traces what it trains
