"""The inner products that weight matching keeps between visits: always those of the present weights."""

import pytest
import torch
from orbits import made, symmetry_of

from intertwine.align import inner_products
from intertwine.align.assignment import assign
from intertwine.align.objective import counted
from intertwine.align.pair import Pair
from intertwine.align.scales import rescale
from intertwine.canonical.blocks import weights_of

KINDS = ["MLP with ReLU", "MLP with tanh", "residual with batch norm", "depthwise convolution", "attention"]


def paired(kind: str) -> Pair:
    sym = symmetry_of(kind)
    models = [made(kind, seed=i)[0].requires_grad_(False) for i in (0, 1)]
    a, b = (counted(sym, m, weights_of(sym, m), buffers=False) for m in models)
    return Pair(sym, a, b, range(len(sym.wires)))


def check(pair: Pair) -> None:
    """Against plain products of the slices as they are now, in double precision."""
    for places in pair.places:
        if places:
            rows = [(pair.rows_of_a(p).double(), p.rows(pair.b[p.block]).double()) for p in places]
            plain = torch.stack([x @ y.mT for x, y in rows]).sum(0)
            assert torch.allclose(pair.products.total(places).double(), plain, atol=1e-5)


@pytest.mark.parametrize("short", [0, inner_products.SHORT])
@pytest.mark.parametrize("kind", KINDS)
def test_they_follow_every_step(kind: str, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_products, "SHORT", short)  # these networks are small: 0 keeps all of their products
    pair = paired(kind)
    check(pair)
    moved = 0
    for sweep in range(3):
        for s, strand in enumerate(pair.strands[: len(pair.symmetry.wires)]):
            moved += assign(pair, s, signs=sweep == 1)
            check(pair)
            if strand.scales and sweep == 2:
                moved += rescale(pair, s)
                check(pair)
    assert moved
    pair.start_at(pair.symmetry.random(seed=4))
    check(pair)


def test_what_is_kept_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_products, "SHORT", 0)
    pair = paired("residual with batch norm")
    places = pair.places[0]
    first = [pair.products._of(p) for p in places]
    assert all(pair.products._of(p) is x for p, x in zip(places, first, strict=True))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_products, "SHORT", 0)
    monkeypatch.setattr(inner_products, "MOST", 0)
    pair = paired("residual with batch norm")
    check(pair)
    assert not pair.products._kept


def test_old_products_are_not_reordered_into_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire is reordered after its neighbour has moved, without a look at its products in between."""
    monkeypatch.setattr(inner_products, "SHORT", 0)
    pair = paired("MLP with ReLU")
    check(pair)
    assert assign(pair, 0)
    before = tuple(pair.b)
    pair.products.reordered(pair.places[1], torch.arange(pair.strands[1].size)[None], before)
    check(pair)
