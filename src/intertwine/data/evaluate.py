"""Mean loss and error of networks on data: of one batch of outputs, and of many points of a path in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets: one number, or one per sample
IGNORE_INDEX = -100  # the target that torch's cross-entropy leaves out
LOSS_ADVICE = "Pass loss=, a function of (outputs, targets)."  # if there is no cross-entropy
GIB = 2**30
#: Tensors of the size of the widest layer that are alive at once in a forward: input, output, a shortcut, a copy.
LIVE_TENSORS = 4
#: What torch raises if a network cannot run for many weights at once; a real mistake is raised again one by one.
VMAP_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, UserWarning, AttributeError)


def score(outputs: Any, targets: Any, samples: int, loss: Loss | None, advice: str = LOSS_ADVICE) -> Tensor:
    """Four sums to add up over batches: losses, their divisor, wrong answers, and answers (0 without classes).

    Cross-entropy is averaged over targets, any other loss over samples. `advice` ends the error about a missing loss.

    >>> score(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), 2, None)[2:]
    tensor([1., 2.], dtype=torch.float64)
    """
    outputs = getattr(outputs, "logits", outputs)
    classes = classes_second(outputs, targets)
    if loss is None:
        if classes is None:
            raise InputError(f"{no_classes(outputs, targets)} {advice}")
        wanted = targets.long()
        total = functional.cross_entropy(classes, wanted, reduction="none").double().sum()
        weight = (wanted != IGNORE_INDEX).sum()
    else:
        total, weight = mean_loss(loss, outputs, targets) * samples, torch.tensor(samples)
    wrong = answers = torch.tensor(0)
    if classes is not None:
        kept = targets != IGNORE_INDEX
        wrong, answers = ((classes.argmax(1) != targets) & kept).sum(), kept.sum()
    return torch.stack([x.double().to(total.device) for x in (total, weight, wrong, answers)])


def classes_second(outputs: Any, targets: Any) -> Tensor | None:
    """The outputs with classes on the second axis, where torch has them; language models have them on the last."""
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
    'Cross-entropy needs integer targets and outputs with one ...; found outputs float32 (2, 3) and targets NoneType.'
    """
    found = [
        f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" if isinstance(x, Tensor) else kind_of(x)
        for x in (outputs, targets)
    ]
    return (
        "Cross-entropy needs integer targets and outputs with one axis more, that of the classes; found outputs "
        f"{found[0]} and targets {found[1]}."
    )


def mean_loss(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """A loss given by the user, on one batch: one number in double precision."""
    value = loss(outputs, targets)
    if not isinstance(value, Tensor):
        raise InputError(f"The loss must give a tensor: one number, or one per sample; found {type(value).__name__}.")
    return value.double().mean()


# -- Many points of a path ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathScores:
    """Mean loss and fraction of wrong answers at every point; error is None if the targets are not classes."""

    loss: tuple[float, ...]
    error: tuple[float, ...] | None
    data: Fingerprint


def evaluate(
    paths: Sequence[LinearPath], data: Any, loss: Loss | None = None, memory: float | int = 1.0
) -> list[PathScores]:
    """The loss and the error at every point of some paths, networks in evaluation mode.

    The data is read once for all paths. On a GPU points run together in groups that fit into `memory` (GiB of weights
    and features). They run one after another on a CPU, where running together is no faster, and if the network does
    not allow it.

    Args:
        paths: of one architecture. data: batches of (inputs, targets).
        loss: of (outputs, targets); cross-entropy if None. memory: GiB for points that run together.

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
            "barrier. At t = 0 or 1, look for weights, inputs or targets that are not finite; in between, the mixed "
            "network overflows: align the networks or reset the statistics first."
        )
    error = tuple((wrong / answers).tolist()) if bool((answers > 0).all()) else None
    return PathScores(tuple(loss.tolist()), error, data)


def _batch(path: LinearPath, batch: LabelledBatch, loss: Loss | None, group: int) -> tuple[Tensor, int]:
    """The scores of all points on one batch, and how many points to run together from now on."""
    points = range(len(path.ts))
    if group > 1:
        try:
            groups = [points[i : i + group] for i in range(0, len(points), group)]
            return torch.cat([_together(path, batch, loss, some) for some in groups]), group
        except VMAP_ERRORS:
            pass  # run one by one; a mistake in the network or the data is raised there
    return _one_by_one(path, batch, loss), 1


def _one_by_one(path: LinearPath, batch: LabelledBatch, loss: Loss | None) -> Tensor:
    scores = []
    for point in range(len(path.ts)):
        args, kwargs = batch.call
        scores.append(score(path.network(point)(*args, **kwargs), batch.targets, batch.samples, loss))
    return torch.stack(scores)


def _together(path: LinearPath, batch: LabelledBatch, loss: Loss | None, points: Sequence[int]) -> Tensor:
    args, kwargs = batch.call

    def one(state: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(path.scratch, state, args, kwargs)
        return score(outputs, batch.targets, batch.samples, loss)

    with warnings.catch_warnings():
        # torch warns if it falls back to a slow loop; then our own loop is the better one
        warnings.filterwarnings("error", message=".*performance drop.*")
        return vmap(one)(path.state(points))


def _group_size(path: LinearPath, batch: LabelledBatch, memory: float | int) -> int:
    """How many points to run together: as many as fit, one on a CPU, where the loop is as fast."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in path.first.values())
    return 1 if on_cpu else _fitting(path, batch, memory)


def _fitting(path: LinearPath, batch: LabelledBatch, memory: float | int) -> int:
    """How many points fit into the memory at once."""
    weights = sum(_bytes(tensor) for tensor in path.first.values())
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in path.scratch.modules())  # runs as it is
    if scripted or weights * 2 > memory * GIB:
        return 1
    sizes = [0]  # bytes of the outputs of all modules

    def measure(_module: nn.Module, _args: Any, output: Any) -> None:
        sizes.append(sum(_bytes(value) for value in tree_leaves(output) if isinstance(value, Tensor)))

    with ExitStack() as stack:
        for module in path.scratch.modules():
            stack.callback(module.register_forward_hook(measure).remove)
        args, kwargs = batch.call
        path.network(0)(*args, **kwargs)
    return max(1, min(len(path.ts), int(memory * GIB / (weights + LIVE_TENSORS * max(sizes) + 1))))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
