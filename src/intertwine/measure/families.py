"""The modules that hold measures; importing this one makes all of them known."""

from __future__ import annotations

from intertwine.measure import cka as cka
