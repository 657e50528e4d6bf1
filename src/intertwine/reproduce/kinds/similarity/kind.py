"""The kind "similarity": pairs of networks, compared layer by layer (Procrustes) or all layers with all (CKA)."""

from __future__ import annotations

from functools import lru_cache

from intertwine.reproduce.kinds.registry import Kind, Row
from intertwine.reproduce.kinds.similarity.cka import Shown, cka_rows, gram_matrices, kept
from intertwine.reproduce.kinds.similarity.numbers import numbers
from intertwine.reproduce.kinds.similarity.pictures import draw
from intertwine.reproduce.kinds.similarity.procrustes import procrustes_rows
from intertwine.reproduce.kinds.similarity.settings import Settings
from intertwine.reproduce.work import Work


def run(work: Work) -> list[Row]:
    """The rows of all pairs."""
    asked: Settings = work.plan.settings
    data = work.placed if asked.images is None else work.data.subset(test=asked.images).to(work.device)

    @lru_cache(maxsize=kept(len(data.test_labels), len(asked.at)))
    def grams(end: tuple[int, int]) -> Shown:
        return gram_matrices(work.network(end), data, asked)

    if asked.family == "cka":
        return work.per_pair(lambda pair, folder: cka_rows(grams(pair.front), grams(pair.back), asked))
    return work.per_pair(
        lambda pair, folder: procrustes_rows(work.network(pair.front), work.network(pair.back), data, asked)
    )


KIND = Kind(Settings, run, numbers, draw)
