"""Kinds of experiment: what a plan may say, how its rows are found, what its numbers are, how it is drawn."""

from __future__ import annotations

from intertwine.reproduce.kinds.registry import Kind as Kind
from intertwine.reproduce.kinds.registry import kind as kind
from intertwine.reproduce.kinds.registry import names as names
