"""intertwine: find, prove and use the symmetries of any PyTorch network.

What most users need are names of the package itself. They are loaded on first use, so that `import intertwine` and
`intertwine --help` stay quick. Everything else is imported from the module that defines it, as in
`from intertwine.fold.clustering import fold_kmeans`; the reference (docs/api) says where.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from intertwine.lazy import lazy_names
from intertwine.version import VERSION

if TYPE_CHECKING:
    from intertwine.align.align import align as align
    from intertwine.align.many import align_many as align_many
    from intertwine.canonical.equivalence import equivalent as equivalent
    from intertwine.canonical.fingerprint import fingerprint as fingerprint
    from intertwine.canonical.form import canonicalize as canonicalize
    from intertwine.connect.arithmetic import interpolate as interpolate
    from intertwine.connect.barrier import barrier as barrier
    from intertwine.connect.connectivity import connectivity as connectivity
    from intertwine.connect.diagnose import diagnose as diagnose
    from intertwine.connect.merge import merge as merge
    from intertwine.data.features import features as features
    from intertwine.errors import InputError as InputError
    from intertwine.errors import IntertwineError as IntertwineError
    from intertwine.fold.budget import fold_to as fold_to
    from intertwine.fold.complexity import complexity as complexity
    from intertwine.fold.fold import fold as fold
    from intertwine.graph.builder import rule as rule
    from intertwine.inspect.dissect import dissect as dissect
    from intertwine.inspect.guided import guided_backprop as guided_backprop
    from intertwine.inspect.rotation import rotation as rotation
    from intertwine.lab import report as report
    from intertwine.lab import study as study
    from intertwine.lab import zoo as zoo
    from intertwine.measure.calibrate import calibrate as calibrate
    from intertwine.measure.compare import compare as compare
    from intertwine.measure.measure import measure as measure
    from intertwine.measure.measure import measures as measures
    from intertwine.stitch.stitch import stitch as stitch
    from intertwine.stitch.stitch import stitches as stitches
    from intertwine.symmetry.activation import activation_group as activation_group
    from intertwine.symmetry.element import Element as Element
    from intertwine.symmetry.symmetry import symmetry as symmetry

__version__ = VERSION

_HOMES = {
    "InputError": "errors",
    "IntertwineError": "errors",
    "align": "align.align",
    "align_many": "align.many",
    "canonicalize": "canonical.form",
    "equivalent": "canonical.equivalence",
    "fingerprint": "canonical.fingerprint",
    "barrier": "connect.barrier",
    "connectivity": "connect.connectivity",
    "diagnose": "connect.diagnose",
    "interpolate": "connect.arithmetic",
    "merge": "connect.merge",
    "features": "data.features",
    "complexity": "fold.complexity",
    "fold": "fold.fold",
    "fold_to": "fold.budget",
    "rule": "graph.builder",
    "dissect": "inspect.dissect",
    "guided_backprop": "inspect.guided",
    "rotation": "inspect.rotation",
    "calibrate": "measure.calibrate",
    "compare": "measure.compare",
    "measure": "measure.measure",
    "measures": "measure.measure",
    "stitch": "stitch.stitch",
    "stitches": "stitch.stitch",
    "activation_group": "symmetry.activation",
    "Element": "symmetry.element",
    "symmetry": "symmetry.symmetry",
}

#: Rooms with several verbs, which users reach through the room: `intertwine.zoo.train`.
_ROOMS = {"report": "lab.report", "study": "lab.study", "zoo": "lab.zoo"}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _ROOMS)


class _Package(ModuleType):
    """Some rooms bear the name of their main verb (`intertwine.symmetry`); users reach the verb, not the room."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
