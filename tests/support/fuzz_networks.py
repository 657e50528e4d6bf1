"""Random networks made of every hazard the engine should survive.

A network is data: a `Network` with a tuple of `Block`s, each a kind (`fuzz_pieces.HAZARDS`), a whole number from which
all its choices are read, and the lists of blocks inside it. `networks()` is a hypothesis strategy of them and shrinks
towards short lists of plain blocks with their plainest choices; `random_network` draws one from a seed; `build` makes
the module. What the engine makes of it is looked at in `fuzz_check`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fuzz_layers  # noqa: F401 - each of these enters its hazards in the list
import fuzz_nests  # noqa: F401
import fuzz_recent  # noqa: F401
import fuzz_shapes  # noqa: F401
import fuzz_tokens  # noqa: F401
import torch
from fuzz_pieces import HAZARDS, Grow, Pick, axis_of, head, to_image, to_tokens
from hypothesis import strategies as st
from torch import Tensor, nn

BATCH = 2
CHOICES = 2**40
KINDS = tuple(HAZARDS)


@dataclass(frozen=True)
class Block:
    """One block: its kind, the number its choices are read from, and the lists of blocks it holds."""

    kind: str
    choices: int = 0
    inner: tuple[tuple[Block, ...], ...] = ()

    def __repr__(self) -> str:
        inner = f", {self.inner!r}" if self.inner else ""
        return f"Block({self.kind!r}, {self.choices}{inner})"


@dataclass(frozen=True)
class Network:
    """A whole network: its blocks, its input ("image", "tokens" or "ids"), stem, head, and the seed of its weights.

    `taps` are positions in `blocks` after which a further output is read off; `continuous` asks for matrix groups too.
    """

    blocks: tuple[Block, ...]
    takes: str = "image"
    width: int = 3
    side: int = 4
    ends: int = 0
    taps: tuple[int, ...] = ()
    continuous: bool = False
    seed: int = 0

    @property
    def hazards(self) -> frozenset[str]:
        """The kinds of blocks in it, those inside others included."""
        return frozenset(b.kind for b in walk(self.blocks)) | ({"several_outputs"} if self.taps else set())

    @property
    def size(self) -> int:
        return sum(1 for _ in walk(self.blocks))


def walk(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        for inside in block.inner:
            yield from walk(inside)


# -- drawing -----------------------------------------------------------------------------------------------------------


def _blocks(nesting: int) -> st.SearchStrategy[tuple[Block, ...]]:
    kinds = st.sampled_from([k for k in KINDS if nesting or not HAZARDS[k].nests])
    least, most = (1, 4) if nesting == 2 else (0, 2)
    return st.lists(kinds.flatmap(lambda kind: _block(kind, nesting)), min_size=least, max_size=most).map(tuple)


def _block(kind: str, nesting: int) -> st.SearchStrategy[Block]:
    inner = st.tuples(*[_blocks(nesting - 1)] * HAZARDS[kind].nests)
    byte = st.integers(0, 255)  # five small numbers are drawn more evenly than a large one, and shrink one by one
    choices = st.tuples(*[byte] * 5).map(bytes).map(lambda digits: int.from_bytes(digits, "little"))
    return st.builds(Block, st.just(kind), choices, inner)


def networks() -> st.SearchStrategy[Network]:
    """Networks of up to four blocks, each with up to two blocks inside, twice over."""
    return st.builds(
        Network,
        blocks=_blocks(2),
        takes=st.sampled_from(["image", "tokens", "ids"]),
        width=st.sampled_from([3, 4, 6, 5, 8]),
        side=st.integers(4, 7),
        ends=st.integers(0, 200),
        taps=st.one_of(st.just(()), st.just(()), st.tuples(st.integers(0, 2))),
        continuous=st.booleans(),
        seed=st.just(0),
    )


def random_network(seed: int) -> Network:
    """The network of a seed: the same distribution as `networks`, but flat and quick to draw."""
    rng = random.Random(seed)
    blocks = _random_blocks(rng, 2, rng.randint(1, 4))
    taps = (rng.randrange(len(blocks)),) if rng.random() < 0.15 else ()
    takes = rng.choice(["image", "image", "image", "tokens", "tokens", "ids"])
    return Network(
        blocks,
        takes,
        rng.choice([3, 4, 6, 5, 8]),
        rng.randint(4, 7),
        rng.randrange(500),
        taps,
        rng.random() < 0.33,
        seed,
    )


def _random_blocks(rng: random.Random, nesting: int, count: int) -> tuple[Block, ...]:
    found = []
    kinds = [k for k in KINDS if nesting or not HAZARDS[k].nests]
    for _ in range(count):
        kind = (
            rng.choice([k for k in kinds if HAZARDS[k].nests]) if nesting and rng.random() < 0.25 else rng.choice(kinds)
        )
        inner = tuple(_random_blocks(rng, nesting - 1, rng.randint(0, 2)) for _ in range(HAZARDS[kind].nests))
        found.append(Block(kind, rng.randrange(CHOICES), inner))
    return tuple(found)


# -- building ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A stem, blocks, further outputs after some of them, and a head."""

    def __init__(
        self, stem: nn.Module, blocks: Sequence[nn.Module], taps: dict[int, nn.Module], head: nn.Module
    ) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.taps = nn.ModuleDict({str(i): tap for i, tap in taps.items()})
        self.head = head

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        more = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if str(i) in self.taps:
                more.append(self.taps[str(i)](x))
        y = self.head(x)
        return (y, *more) if more else y


class Rescale(nn.Module):
    """Multiply by a plain number, so that deep networks neither explode nor vanish."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def build(network: Network) -> tuple[Net, Tensor]:
    """The module of a network, in evaluation mode and with random parameters everywhere, and an example input."""
    quiet = warnings.catch_warnings(action="ignore")  # torch tells of slow paths when a layer first runs
    with quiet, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(network.seed)
        x = _input(network)
        pick = Pick(network.ends)
        stem = _stem(pick, x)
        y = _draw(stem)(x.clone())
        blocks, taps = [], {}
        for i, block in enumerate(network.blocks):
            module, y = grow([block], y)
            blocks.append(module)
            if i in network.taps:
                taps[i] = _draw(head(Pick(network.ends), y))
        last = _draw(head(pick, y))
        if isinstance(stem, nn.Embedding) and pick(True, False):
            _tie(last, stem)
        return Net(stem, blocks, taps, last).eval(), x


def _tie(last: nn.Module, stem: nn.Embedding) -> None:
    """Let the head read with the table of the stem, where the sizes allow it."""
    layer = getattr(last, "last", None)
    if isinstance(layer, nn.Linear) and layer.in_features == stem.embedding_dim:
        tied = nn.Linear(layer.in_features, stem.num_embeddings, bias=False)
        tied.weight = stem.weight
        last.last = tied


def _input(network: Network) -> Tensor:
    if network.takes == "ids":
        return torch.randint(0, 10, (BATCH, network.side))
    if network.takes == "tokens":
        return torch.randn(BATCH, network.side, network.width)
    return torch.randn(BATCH, network.width, network.side, network.side)


def _stem(pick: Pick, x: Tensor) -> nn.Module:
    out = pick(6, 8, 4, 12, 9)
    if not x.is_floating_point():
        return nn.Embedding(10, out, padding_idx=pick(None, 3))
    if x.ndim == 3:
        return pick(nn.Linear(x.shape[2], out), nn.Linear(x.shape[2], out), nn.Identity())
    return pick(nn.Conv2d(x.shape[1], out, 3, padding=1), nn.Conv2d(x.shape[1], out, 2, 2), nn.Identity())


def grow(blocks: Sequence[Block], x: Tensor) -> tuple[nn.Module, Tensor]:
    """A module for a list of blocks that starts from `x`, and what it returns for it."""
    parts: list[nn.Module] = []
    for block in blocks:
        takes = HAZARDS[block.kind].takes
        if takes == "image" and x.ndim == 3:
            parts.append(to_image(x))
        elif takes == "tokens" and x.ndim == 4:
            parts.append(to_tokens())
        if takes not in ("any", "image" if x.ndim == 4 else "tokens"):
            x = parts[-1](x)
        inner = [_grower(inside) for inside in block.inner]
        module = _draw(HAZARDS[block.kind].build(Pick(block.choices), x, inner)).eval()
        parts.append(module)
        x = module(x.clone())
        size = float(x.std()) if x.numel() > 1 else 1.0
        if not 0.1 < size < 10 and size > 1e-5:  # what cancels out exactly stays at zero
            factor = float(f"{1 / size:.1g}")
            parts.append(Rescale(factor))
            x = x * factor
        if x.shape[axis_of(x)] > 24 or x[0].numel() > 800:
            parts.append(_draw(_narrower(x)))
            x = parts[-1](x)
    return nn.Sequential(*parts), x


def _grower(blocks: Sequence[Block]) -> Grow:
    return lambda x: grow(blocks, x)


def _narrower(x: Tensor) -> nn.Module:
    if x.ndim == 3:
        return nn.Sequential(nn.Linear(x.shape[2], 6), nn.Identity())
    return nn.Sequential(nn.Conv2d(x.shape[1], 6, 1), nn.AdaptiveAvgPool2d(min(4, x.shape[2])))


def _draw(module: nn.Module) -> nn.Module:
    """Give every parameter and every statistic random values, none of them special."""
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("running_var"):
            p.copy_((0.3 * torch.randn(p.shape)).exp())
        elif name.endswith("running_mean") or (isinstance(p, nn.Parameter) and name.endswith("bias")):
            p.copy_(0.3 * torch.randn(p.shape))
        elif isinstance(p, nn.Parameter) and p.ndim > 1 and p[0].numel() > 1:
            p.copy_(torch.randn(p.shape) / p[0].numel() ** 0.5)
        elif isinstance(p, nn.Parameter):
            p.copy_(1 + 0.3 * torch.randn(p.shape))
    return module
