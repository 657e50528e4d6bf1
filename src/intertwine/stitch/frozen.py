"""Both networks of a stitch as they are run: in evaluation mode and without gradients for their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from intertwine.features.capture import NOT_RUN, evaluating
from intertwine.features.places import WRAPPERS


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of DataParallel and compile, which hooks and traces cannot pass.

    >>> type(unwrapped(nn.DataParallel(nn.ReLU()))).__name__
    'ReLU'
    """
    while type(model).__name__ in NOT_RUN:
        model = getattr(model, WRAPPERS[type(model).__name__])
    return model


@contextmanager
def frozen(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode, and weights that take no gradient; gradients still flow through. All flags are put back behind.

    >>> layer = nn.Linear(2, 1)
    >>> with frozen([layer]):
    ...     print(layer.training, layer.weight.requires_grad, torch.is_grad_enabled())
    False False True
    >>> layer.training, layer.weight.requires_grad
    (True, True)
    """
    gradients = torch.is_grad_enabled()
    weights = [weight for model in models for weight in model.parameters() if weight.requires_grad]
    with ExitStack() as stack:
        for model in {id(model): model for model in models}.values():
            stack.enter_context(evaluating(model))
        for weight in weights:
            stack.callback(weight.requires_grad_, True)
            weight.requires_grad_(False)
        with torch.set_grad_enabled(gradients):
            yield


class Hold:
    """Networks that can be frozen again and again; only the outermost of nested holds does anything."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Frozen inside."""
        with ExitStack() as stack:
            if self._depth == 0:
                stack.enter_context(frozen(self.models))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
