"""`fold`: merges features of a network that are nearly the same; the result is a smaller module of the same classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from intertwine.errors import InputError
from intertwine.fold.cutting import check_outputs, cut_model
from intertwine.fold.merging import MergeState, run_schedule
from intertwine.fold.options import Beta, Options
from intertwine.fold.prepare import PreparedModel, Skipped, prepare
from intertwine.fold.result import Fold, Groups, Reduction, count_flops, count_parameters


def fold(
    model: nn.Module,
    *example_args: Any,
    beta: Beta = 0.1,
    schedule: str = "layerwise",
    terms: str = "in",
    bias: bool = True,
    rows: str = "effect",
    maximum: str = "typical",
    norm: str = "fold",
    max_ratio: float | int | None = None,
    **example_kwargs: Any,
) -> Fold:
    """Merge the features of a network that are nearly the same, without data and without training.

    The function in evaluation mode is unchanged where merged features are the same. Algorithm 1 of the paper is
    `**options.PRINTED`, its published code `**options.PAPER_CODE` (both in `intertwine.fold.options`).

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        beta: in (0, 1). A layer stops when its smallest distance exceeds beta times the one that `maximum` names; more
            merges more. A mapping gives every wire its own, and leaves out those it does not name.
        schedule: "layerwise", or "round-robin": one merge per layer and sweep.
        terms: what makes two features differ: "in", their incoming rows, which is all that equivalence needs; "in+out"
            (Eq. 6), their outgoing columns too. bias: whether biases count as part of the rows.
        rows: "effect" compares features by what a merge would change in the layers that read them; features that differ
            by a scale that passes the activation are the same (see `intertwine.fold.merging`). "ward" compares rows
            alone, a group by its mean, larger groups as farther apart. "mean" treats groups as single features, so that
            everything is merged once beta is not small. "sum" compares sums (as printed), so that a sum of features is
            far from its like, and of three equal features one is left over.
        maximum: what beta is a share of: "typical", the median of all distances at the start; the largest one then
            ("fixed"), or as it is at every step ("recompute", as printed). The largest says little where a few
            features are far from all others, and one beta then ruins such layers before others have begun.
        norm: "fold" takes BatchNorm as part of the layer before it, which is exact; "sum" adds its vectors up and
            leaves them out of distances, as the paper's code does, which is not.
        max_ratio: the largest share of the features of a wire that may be merged away.

    Returns:
        A `Fold`: `.model`, `.groups`, `.parameters`, `.flops`, `.rules`, `.skipped`, `.latency()`.

    Raises:
        InputError: an option is out of range, or the forward of the model has a width written into it.

    Example:
        >>> import torch
        >>> from intertwine.fold.fold import fold
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[5], model[0].bias[5] = model[0].weight[2], model[0].bias[2]
        >>> folded = fold(model, torch.zeros(1, 3), beta=1e-6)
        >>> folded.model[0].out_features, folded.groups["0"][2]
        (7, (2, 5))

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Section 4.
    """
    options = Options(beta, schedule, terms, bias, rows, maximum, norm, max_ratio)
    prepared = prepare(model, (example_args, example_kwargs), norm)
    return build_fold(prepared, merge_all(prepared, options))


def merge_all(prepared: PreparedModel, options: Options) -> MergeState:
    """Merge features until every wire has stopped."""
    options.check_wires([wire.name for wire in prepared.wires])
    merging = MergeState(prepared.wires, options)
    run_schedule(merging)
    return merging


def fold_groups(
    model: nn.Module,
    *example_args: Any,
    groups: Mapping[str, Sequence[Sequence[int]]],
    norm: str = "fold",
    **example_kwargs: Any,
) -> Fold:
    """Merge given groups of features.

    Args:
        model, *example_args, **example_kwargs, norm: as for `fold`.
        groups: wire → groups of its features. Each becomes one feature, features in no group stay.

    Raises:
        InputError: a wire cannot be folded, or its groups overlap or name features it does not have.

    Example:
        >>> import torch
        >>> from intertwine.fold.fold import fold_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> fold_groups(model, torch.zeros(1, 3), groups={"0": [(1, 4, 6)]}).model[0].out_features
        6
    """
    prepared = prepare(model, (example_args, example_kwargs), norm)
    Options(beta=dict.fromkeys(groups, 0.5)).check_wires([wire.name for wire in prepared.wires])
    merging = MergeState(prepared.wires, Options(rows="ward", norm=norm))
    for w, wire in enumerate(prepared.wires):
        named = [sorted(group) for group in groups.get(wire.name, ())]
        flat = [i for group in named for i in group]
        if len(set(flat)) < len(flat) or not set(flat) <= set(range(wire.size)):
            raise InputError(
                f"The groups of the wire {wire.name!r} name a feature twice, or one that it does not have. It has "
                f"features 0 to {wire.size - 1}, and each may be in one group."
            )
        for first, *others in filter(None, named):
            for other in others:
                merging.merge(w, first, other)
    return build_fold(prepared, merging)


def build_fold(prepared: PreparedModel, merging: MergeState, betas: Mapping[str, float] | None = None) -> Fold:
    """Build the smaller module, check it, and count. `betas`: those at which the wires stopped, if they were chosen."""
    merging.finish()
    kept = {wire.index: merging.kept(w) for w, wire in enumerate(prepared.wires)}
    groups = {wire.name: merging.merged(w) for w, wire in enumerate(prepared.wires)}
    rules = {wire.name: wire.rule for wire in merging.wires}
    return replace(assemble_fold(prepared, prepared.widened(kept), kept, groups, rules), betas=betas or {})


def assemble_fold(
    prepared: PreparedModel,
    wide: nn.Module,
    kept: Mapping[int, Sequence[int]],
    groups: Groups,
    rules: Mapping[str, str],
    skipped: Sequence[Skipped] = (),
) -> Fold:
    """Cut a network that has its new weights at full width, check that this changes nothing, and count."""
    model, example = prepared.model, prepared.example
    small = cut_model(wide, prepared.symmetry, kept)
    error = check_outputs(wide, small, example)  # before the counting, which needs a forward that works
    parameters = Reduction(count_parameters(model), count_parameters(small))
    flops = Reduction(count_flops(model, example), count_flops(small, example))
    return Fold(small, groups, rules, parameters, flops, (*prepared.skipped, *skipped), error, model, example)
