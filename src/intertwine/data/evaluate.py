"""Mean loss and error of networks on data: of one batch of outputs, and of many points of a path in one reading of the
data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from intertwine.data.batches import Fingerprint, Hasher, LabelledBatch, kind_of, labelled_batches
from intertwine.data.layers import evaluating
from intertwine.data.weights import LinearPath
from intertwine.errors import InputError

# ----------------------------------------------------------------------------------------------------
# Loss and error of one batch of outputs, as sums that can be added up over batches.


Loss = Callable[[Any, Any], Tensor]  # of outputs and targets: one number, or one per sample
IGNORE_INDEX = -100  # the target that torch's cross-entropy leaves out
LOSS_ADVICE = "Pass loss=, a function of (outputs, targets)."  # what to do where there is no cross-entropy


def score(outputs: Any, targets: Any, samples: int, loss: Loss | None, advice: str = LOSS_ADVICE) -> Tensor:
    """Four sums: losses, what to divide them by, wrong answers, and answers (0 where the targets are no classes).

    Cross-entropy is averaged over targets, any other loss over samples. `advice` says how whoever asks takes a loss.

    >>> score(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), 2, None)[2:]
    tensor([1., 2.], dtype=torch.float64)
    """
    outputs = getattr(outputs, "logits", outputs)
    classes = classes_second(outputs, targets)
    if loss is None:
        if classes is None:
            raise InputError(f"{no_classes(outputs, targets)} {advice}")
        wanted = targets.long()
        kept = (wanted != IGNORE_INDEX).sum()
        total, weight = functional.cross_entropy(classes, wanted, reduction="none").double().sum(), kept
    else:
        total, weight = mean_loss(loss, outputs, targets) * samples, torch.tensor(samples)
    wrong, answers = _wrong(classes, targets)
    return torch.stack([x.double().to(total.device) for x in (total, weight, wrong, answers)])


def classes_second(outputs: Any, targets: Any) -> Tensor | None:
    """The outputs with classes on the second axis, as torch has them; last axis too, as language models have them."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.dim() != targets.dim() + 1:
        return None
    if targets.is_floating_point() or targets.is_complex() or targets.dim() == 0:
        return None
    if outputs.shape[0] == targets.shape[0] and outputs.shape[2:] == targets.shape[1:]:
        return outputs
    return outputs.movedim(-1, 1) if outputs.shape[:-1] == targets.shape else None


def no_classes(outputs: Any, targets: Any) -> str:
    """Why there is no cross-entropy.

    >>> no_classes(torch.zeros(2, 3), None)
    'Cross-entropy needs outputs with one axis ...; found outputs float32 (2, 3) and targets NoneType.'
    """
    return (
        "Cross-entropy needs outputs with one axis of classes more than the targets, and targets that are whole "
        f"numbers; found outputs {_kind(outputs)} and targets {_kind(targets)}."
    )


def mean_loss(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """A loss of one's own on one batch, as one number in double precision."""
    value = loss(outputs, targets)
    if not isinstance(value, Tensor):
        raise InputError(f"The loss must give a tensor: one number, or one per sample; found {type(value).__name__}.")
    return value.double().mean()


def _wrong(classes: Tensor | None, targets: Any) -> tuple[Tensor, Tensor]:
    if classes is None:
        return torch.tensor(0), torch.tensor(0)
    kept = targets != IGNORE_INDEX
    return ((classes.argmax(1) != targets) & kept).sum(), kept.sum()


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return kind_of(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


# ----------------------------------------------------------------------------------------------------
# Mean loss and error at many points of a path, in one reading of the data: many at once on a GPU, else one by one.


GIB = 2**30
#: Tensors of the size of the widest layer that live at once in a forward: input, output, a shortcut, a copy to work on.
LIVE_TENSORS = 4
#: What torch raises where a network cannot be run for many weights at once; a real mistake raises again one by one.
VMAP_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, UserWarning, AttributeError)


@dataclass(frozen=True)
class PathScores:
    """Mean loss and fraction of wrong answers at every point; error is None where the targets are no classes."""

    loss: tuple[float, ...]
    error: tuple[float, ...] | None
    data: Fingerprint


def evaluate(
    paths: Sequence[LinearPath], data: Any, loss: Loss | None = None, memory: float | int = 1.0
) -> list[PathScores]:
    """The loss and the error at every point of some paths, networks in evaluation mode.

    The data is read once for all paths. On a GPU points run together in groups that fit into `memory` (GiB of weights
    and features). They run one after another on a CPU, where together was measured not to be quicker, and where the
    network does not allow it.

    Args:
        paths: of one architecture. data: batches of (inputs, targets). loss: of (outputs, targets); cross-entropy where
            None.

    Example:
        >>> import torch
        >>> from intertwine.data.weights import path_between
        >>> a = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.zeros(8).long())]
        >>> (scores,) = evaluate([path_between(a, a, [0.0, 0.5, 1.0])], data)
        >>> scores.loss[0] == scores.loss[1]
        True
    """
    hasher, network = Hasher(), paths[0].scratch
    totals: list[Tensor] = []
    group = None
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(evaluating(path.scratch))
        for batch in labelled_batches(data, network, hasher):
            group = _group_size(paths[0], batch, memory) if group is None else group
            found = []
            for path in paths:
                scores, group = _batch(path, batch, loss, group)
                found.append(scores)
            totals = [old + new for old, new in zip(totals, found, strict=True)] if totals else found
    return [_scores(path, total.cpu(), hasher.fingerprint) for path, total in zip(paths, totals, strict=True)]


def _scores(path: LinearPath, totals: Tensor, data: Fingerprint) -> PathScores:
    total, weight, wrong, answers = totals.unbind(1)
    if not bool((weight > 0).all()):
        raise InputError("Every target of the data is marked as ignored (-100), so there is no loss to average.")
    loss = total / weight
    bad = [t for t, value in zip(path.ts, loss.tolist(), strict=True) if not abs(value) < torch.inf]
    if bad:
        raise InputError(
            f"The loss is not finite at {len(bad)} of {len(path.ts)} points, first at t = {bad[0]:.4g}, so there is no "
            "barrier. At t = 0 or 1, look for weights, inputs or targets that are not finite; between, the mixed "
            "network overflows: align the networks or reset the statistics first."
        )
    error = tuple((wrong / answers).tolist()) if bool((answers > 0).all()) else None
    return PathScores(tuple(loss.tolist()), error, data)


# -- one batch ---------------------------------------------------------------------------------------------------------


def _batch(path: LinearPath, batch: LabelledBatch, loss: Loss | None, group: int) -> tuple[Tensor, int]:
    """The scores of all points on one batch, and how many points to run together from now on."""
    points = range(len(path.ts))
    if group > 1:
        try:
            groups = [points[i : i + group] for i in range(0, len(points), group)]
            return torch.cat([_together(path, batch, loss, some) for some in groups]), group
        except VMAP_ERRORS:
            pass  # run one by one; a mistake in the network or the data is raised there
    return torch.stack([_alone(path, batch, loss, point) for point in points]), 1


def _alone(path: LinearPath, batch: LabelledBatch, loss: Loss | None, point: int) -> Tensor:
    args, kwargs = batch.call
    return score(path.network(point)(*args, **kwargs), batch.targets, batch.samples, loss)


def _together(path: LinearPath, batch: LabelledBatch, loss: Loss | None, points: Sequence[int]) -> Tensor:
    args, kwargs = batch.call

    def one(state: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(path.scratch, state, args, kwargs)
        return score(outputs, batch.targets, batch.samples, loss)

    with warnings.catch_warnings():
        # torch warns where it would secretly loop; then our own loop is the better one.
        warnings.filterwarnings("error", message=".*performance drop.*")
        return vmap(one)(path.state(points))


# -- how many at once --------------------------------------------------------------------------------------------------


def _group_size(path: LinearPath, batch: LabelledBatch, memory: float | int) -> int:
    """How many points to run together: as many as fit, one on a CPU, where the loop is as quick."""
    if all(tensor.device.type == "cpu" for tensor in path.first.values()):
        return 1
    return _fitting(path, batch, memory)


def _fitting(path: LinearPath, batch: LabelledBatch, memory: float | int) -> int:
    """How many points fit into the memory at once."""
    weights = sum(_bytes(tensor) for tensor in path.first.values())
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in path.scratch.modules())  # runs as it is
    if scripted or weights * 2 > memory * GIB:
        return 1
    with _widest(path.scratch) as widest:
        args, kwargs = batch.call
        path.network(0)(*args, **kwargs)
    return max(1, min(len(path.ts), int(memory * GIB / (weights + LIVE_TENSORS * max(widest) + 1))))


@contextmanager
def _widest(model: nn.Module) -> Iterator[list[int]]:
    """The bytes that the modules of a model give out while it runs."""
    sizes = [0]

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        sizes.append(sum(_bytes(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
