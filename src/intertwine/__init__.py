"""intertwine: find, prove and use the symmetries of any PyTorch network.

What most users need are names of the package itself. They are loaded on first use, so that `import intertwine` and
`intertwine --help` stay quick. Everything else is imported from the module that defines it, as in
`from intertwine.fold.kmeans import fold_kmeans`; the reference (docs/api) says where.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from intertwine.lazy_names import lazy_names
from intertwine.version import VERSION

if TYPE_CHECKING:
    from intertwine import report as report
    from intertwine import study as study
    from intertwine import zoo as zoo
    from intertwine.align.align import align as align
    from intertwine.align.many import align_many as align_many
    from intertwine.canonical.canonicalize import canonicalize as canonicalize
    from intertwine.canonical.equivalence import equivalent as equivalent
    from intertwine.canonical.fingerprint import fingerprint as fingerprint
    from intertwine.connect.barrier import barrier as barrier
    from intertwine.connect.connectivity import connectivity as connectivity
    from intertwine.connect.diagnosis import diagnose as diagnose
    from intertwine.connect.interpolation import interpolate as interpolate
    from intertwine.connect.merging import merge as merge
    from intertwine.errors import InputError as InputError
    from intertwine.errors import IntertwineError as IntertwineError
    from intertwine.features.features import features as features
    from intertwine.fold.budget import fold_to as fold_to
    from intertwine.fold.complexity import complexity as complexity
    from intertwine.fold.fold import fold as fold
    from intertwine.graph.registry import rule as rule
    from intertwine.inspect.dissect import dissect as dissect
    from intertwine.inspect.guided import guided_backprop as guided_backprop
    from intertwine.inspect.rotation import rotation as rotation
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
    "InputError": "errors",
    "IntertwineError": "errors",
    "align": "align.align",
    "align_many": "align.many",
    "canonicalize": "canonical.canonicalize",
    "equivalent": "canonical.equivalence",
    "fingerprint": "canonical.fingerprint",
    "barrier": "connect.barrier",
    "connectivity": "connect.connectivity",
    "diagnose": "connect.diagnosis",
    "interpolate": "connect.interpolation",
    "merge": "connect.merging",
    "features": "features.features",
    "complexity": "fold.complexity",
    "fold": "fold.fold",
    "fold_to": "fold.budget",
    "rule": "graph.registry",
    "dissect": "inspect.dissect",
    "guided_backprop": "inspect.guided",
    "rotation": "inspect.rotation",
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
_ROOMS = ("report", "study", "zoo")

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _ROOMS)


class _Package(ModuleType):
    """Some rooms bear the name of their main verb (`intertwine.symmetry`); users reach the verb, not the room."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
