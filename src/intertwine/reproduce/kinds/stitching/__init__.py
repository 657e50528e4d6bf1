"""Stitching: what Godfrey et al. 2022 and Csiszárik et al. 2021 show of stitched networks."""

from __future__ import annotations

from intertwine.reproduce.kinds.registry import Kind
from intertwine.reproduce.kinds.stitching.forms import draw, numbers
from intertwine.reproduce.kinds.stitching.runs import run
from intertwine.reproduce.kinds.stitching.settings import Stitching

KIND = Kind(Stitching, run, numbers, draw)
