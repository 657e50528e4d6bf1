"""A visit: one strand brought to its best by whatever acts on it, all others held still."""

from __future__ import annotations

from intertwine.align.assignment import assign
from intertwine.align.heads import match_heads
from intertwine.align.matrices import turn
from intertwine.align.pair import Pair


def improve(pair: Pair, s: int, signs: bool = False) -> bool:
    """Give a strand its best matrix, or its best order (with `signs`: order and signs); whether anything moved."""
    if pair.strands[s].matrix:
        return turn(pair, s)
    matched = match_heads(pair, s)
    return assign(pair, s, signs) or matched
