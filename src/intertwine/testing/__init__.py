"""Conformance suites: what everything built on the engine must obey, for its own tests and for those of users."""

from intertwine.testing.aligner import AlignerError as AlignerError
from intertwine.testing.aligner import AlignerReport as AlignerReport
from intertwine.testing.aligner import check_aligner as check_aligner
from intertwine.testing.dense import DenseAction as DenseAction
from intertwine.testing.group import check_group as check_group
from intertwine.testing.laws import LAWS as LAWS
from intertwine.testing.laws import ConformanceError as ConformanceError
from intertwine.testing.laws import GroupReport as GroupReport
from intertwine.testing.measure import MeasureError as MeasureError
from intertwine.testing.measure import MeasureReport as MeasureReport
from intertwine.testing.measure import check_measure as check_measure
