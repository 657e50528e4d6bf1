"""intertwine: find, prove and use the symmetries of any PyTorch network.

The public names are loaded on first use, so that `import intertwine` and `intertwine --help` stay quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from intertwine.version import VERSION

if TYPE_CHECKING:
    from intertwine import report as report
    from intertwine import study as study
    from intertwine import zoo as zoo
    from intertwine.align.align import align as align
    from intertwine.align.correlations import matched_correlations as matched_correlations
    from intertwine.align.many import align_many as align_many
    from intertwine.align.widths import align_widths as align_widths
    from intertwine.canonical.canonicalize import canonicalize as canonicalize
    from intertwine.canonical.equivalence import equivalent as equivalent
    from intertwine.canonical.fingerprint import fingerprint as fingerprint
    from intertwine.canonical.naturality import naturality as naturality
    from intertwine.connect.averaging import average as average
    from intertwine.connect.barrier import barrier as barrier
    from intertwine.connect.connectivity import connectivity as connectivity
    from intertwine.connect.diagnosis import diagnose as diagnose
    from intertwine.connect.interpolation import interpolate as interpolate
    from intertwine.connect.merging import merge as merge
    from intertwine.errors import CaptureError as CaptureError
    from intertwine.errors import InputError as InputError
    from intertwine.errors import IntertwineError as IntertwineError
    from intertwine.errors import MismatchError as MismatchError
    from intertwine.errors import RuleError as RuleError
    from intertwine.features.features import features as features
    from intertwine.fold.activations import fold_activations as fold_activations
    from intertwine.fold.budget import fold_to as fold_to
    from intertwine.fold.complexity import complexity as complexity
    from intertwine.fold.fold import fold as fold
    from intertwine.fold.heatmaps import distance_maps as distance_maps
    from intertwine.fold.kmeans import fold_kmeans as fold_kmeans
    from intertwine.fold.pruning import prune as prune
    from intertwine.fold.swaps import swap_barrier as swap_barrier
    from intertwine.fold.variances import repair_variances as repair_variances
    from intertwine.graph.registry import rule as rule
    from intertwine.inspect.dissect import dissect as dissect
    from intertwine.inspect.guided import guided_backprop as guided_backprop
    from intertwine.inspect.rotation import rotation as rotation
    from intertwine.inspect.rotation_penalty import rotation_penalty as rotation_penalty
    from intertwine.inspect.rotation_scan import rotation_scan as rotation_scan
    from intertwine.inspect.top_images import top_images as top_images
    from intertwine.measure.calibrate import calibrate as calibrate
    from intertwine.measure.compare import compare as compare
    from intertwine.measure.similarity import measure as measure
    from intertwine.measure.similarity import measures as measures
    from intertwine.stitch.many import stitches as stitches
    from intertwine.stitch.stitch import stitch as stitch
    from intertwine.symmetry.activation import activation_group as activation_group
    from intertwine.symmetry.element import Element as Element
    from intertwine.symmetry.symmetry import symmetry as symmetry

__version__ = VERSION

_HOMES = {
    "CaptureError": "errors",
    "InputError": "errors",
    "IntertwineError": "errors",
    "MismatchError": "errors",
    "RuleError": "errors",
    "canonicalize": "canonical.canonicalize",
    "align": "align.align",
    "align_many": "align.many",
    "align_widths": "align.widths",
    "matched_correlations": "align.correlations",
    "equivalent": "canonical.equivalence",
    "fingerprint": "canonical.fingerprint",
    "naturality": "canonical.naturality",
    "barrier": "connect.barrier",
    "connectivity": "connect.connectivity",
    "diagnose": "connect.diagnosis",
    "interpolate": "connect.interpolation",
    "average": "connect.averaging",
    "merge": "connect.merging",
    "features": "features.features",
    "complexity": "fold.complexity",
    "distance_maps": "fold.heatmaps",
    "fold": "fold.fold",
    "fold_activations": "fold.activations",
    "fold_kmeans": "fold.kmeans",
    "fold_to": "fold.budget",
    "prune": "fold.pruning",
    "repair_variances": "fold.variances",
    "swap_barrier": "fold.swaps",
    "rule": "graph.registry",
    "dissect": "inspect.dissect",
    "guided_backprop": "inspect.guided",
    "rotation": "inspect.rotation",
    "rotation_penalty": "inspect.rotation_penalty",
    "rotation_scan": "inspect.rotation_scan",
    "top_images": "inspect.top_images",
    "calibrate": "measure.calibrate",
    "compare": "measure.compare",
    "measure": "measure.similarity",
    "measures": "measure.similarity",
    "stitch": "stitch.stitch",
    "stitches": "stitch.many",
    "activation_group": "symmetry.activation",
    "Element": "symmetry.element",
    "symmetry": "symmetry.symmetry",
}


#: Rooms with several verbs, which users reach through the room: `intertwine.zoo.train`.
_ROOMS = {"report", "study", "zoo"}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"intertwine.{name}")
    if name in _HOMES:
        return getattr(import_module(f"intertwine.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'intertwine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_ROOMS, "__version__"])


class _Package(ModuleType):
    """Some rooms bear the name of their main verb (`intertwine.symmetry`); users reach the verb, not the room."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
