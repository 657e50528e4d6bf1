"""Figures of papers on linear mode connectivity that no verb needs: principal angles between the weights of two
networks, and the layers of several pairs side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.linalg import subspace_angles
from torch import nn

from intertwine.connect.connectivity import connectivity
from intertwine.data.batches import check_readable_again
from intertwine.data.weights import check_same_architecture
from intertwine.errors import InputError

TIE = 1e-9  # of the largest singular value: nearer ones have no order, so the first k have no subspace


@dataclass(frozen=True)
class PrincipalAngles:
    """One weight, its first axis against all others.

    Attributes:
        k: how many main directions. left: the k angles in degrees, largest first, between the spaces of the first axis,
            outputs for most layers; right: between those of the other axes. Both None with a `reason`.
    """

    weight: str
    k: int
    left: tuple[float, ...] | None
    right: tuple[float, ...] | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def principal_angles(a: nn.Module, b: nn.Module, k: int = 5) -> list[PrincipalAngles]:
    """The angles between the spaces of the first k singular vectors, for every weight with two axes or more.

    0° means that both networks use the same directions there, 90° that they have one direction that shares nothing.

    Args:
        a, b: two networks of one architecture. k: less where a weight has fewer directions.

    Raises:
        MismatchError: the networks differ in more than the values of their weights. InputError: k below 1.

    Example:
        >>> import torch
        >>> a = torch.nn.Linear(4, 3)
        >>> [[round(angle) for angle in one.left] for one in principal_angles(a, a, k=2)]
        [[0, 0]]
    """
    if k < 1:
        raise InputError(f"k={k} main directions were asked for; give 1 or more.")
    check_same_architecture(a, b)
    other = dict(b.named_parameters())
    return [_angles(name, w, other[name], k) for name, w in a.named_parameters() if w.dim() >= 2]


def _angles(name: str, first: nn.Parameter, second: nn.Parameter, k: int) -> PrincipalAngles:
    matrices = [w.detach().flatten(1).cpu().double().numpy() for w in (first, second)]
    k = min(k, *matrices[0].shape)
    left, right = [], []
    for which, matrix in zip(("first", "second"), matrices, strict=True):
        if not np.isfinite(matrix).all():
            return PrincipalAngles(name, k, None, None, f"the weight of the {which} network is not finite")
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        after = s[k] if k < len(s) else 0.0
        if s[k - 1] - after <= TIE * s[0]:
            return PrincipalAngles(
                name, k, None, None,
                f"in the {which} network singular value {k} is {s[k - 1]:.3g} and the next {after:.3g}, so the first "
                f"{k} directions are not determined",
            )  # fmt: skip
        left.append(u[:, :k])
        right.append(v[:k].T)
    return PrincipalAngles(name, k, _degrees(*left), _degrees(*right))


def _degrees(first: np.ndarray, second: np.ndarray) -> tuple[float, ...]:
    return tuple(np.degrees(subspace_angles(first, second)).tolist())


def side_by_side(
    pairs: Mapping[str, tuple[nn.Module, nn.Module]], data: Any, alpha: float = 0.5, **options: Any
) -> list[dict[str, Any]]:
    """The same figures for several pairs of one architecture: one row per layer, columns such as "after: llfc".

    It answers what an alignment did: `{"before": (a, b), "after": (a, aligned.model)}`. For a linear layer the residual
    of commutativity stands beside its two factors: matching weights shrinks one, matching activations the other.

    Args:
        pairs: name → two networks. data: batches of (inputs, targets), read once per pair, so no generator.
        alpha: the weight of the first network. options: of `connectivity`.

    Example:
        >>> import torch
        >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> rows = side_by_side({"one": (a, b), "same": (a, a)}, [(torch.randn(8, 3), torch.zeros(8).long())])
        >>> rows[0]["one: weights_apart"] > rows[0]["same: weights_apart"]
        True
    """
    check_readable_again(data, "The data is read once per pair")
    if not pairs:
        raise InputError("No pair was given. Pass name → (first network, second network).")
    kept = ("llfc", "c", "baseline", "additivity", "sign_agreement", "commutativity", "weights_apart", "inputs_apart")
    table: dict[str, dict[str, Any]] = {}
    for name, (a, b) in pairs.items():
        for row in connectivity(a, b, data, (alpha,), **options).to_rows():
            entry = table.setdefault(row["layer"], {"layer": row["layer"], "kind": row["kind"]})
            entry.update({f"{name}: {key}": row[key] for key in kept})
    return list(table.values())
