"""Random networks made of every hazard the engine should survive, and the check that none is silently wrong.

A network is data: a `Network` with a tuple of `Block`s, each a kind (`fuzz_blocks.HAZARDS`), a whole number from which
all its choices are read, and the lists of blocks inside it. `networks()` is a hypothesis strategy of them and shrinks
towards short lists of plain blocks with their plainest choices; `random_network` draws one from a seed; `build` makes
the module; `check` says how the engine did on it; `shrink` looks for a smaller network that fails in the same way.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_blocks import HAZARDS, Grow, Pick, axis_of, head, to_image, to_tokens
from hypothesis import strategies as st
from torch import Tensor, nn

import intertwine as it

BATCH = 2
CHOICES = 2**40
KINDS = tuple(HAZARDS)
TOLERANCE = 1e-9
OWN_TOLERANCE = 1e-8


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
    with torch.random.fork_rng(devices=[]), torch.no_grad():
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
        layer = getattr(last, "last", None)
        if (
            isinstance(stem, nn.Embedding)
            and layer is not None
            and layer.in_features == stem.embedding_dim
            and pick(True, False)
        ):
            last.last = nn.Linear(layer.in_features, stem.num_embeddings, bias=False)
            last.last.weight = stem.weight
        return Net(stem, blocks, taps, last).eval(), x


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
        if not 0.1 < size < 10:
            factor = float(f"{1 / max(size, 1e-3):.1g}")
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


# -- checking ----------------------------------------------------------------------------------------------------------

OUTCOMES = ("right", "caught", "refused", "crashed", "silently wrong")


@dataclass(frozen=True)
class Verdict:
    """How the engine did on one network.

    "right": the symmetry holds as found. "caught": it was wrong, but the certificate froze the op at fault. "refused":
    one of intertwine's own errors. "crashed": any other error. "silently wrong": wrong and nothing said so.
    `control`: whether the function changed when one moved parameter was put back (None where it was not tried).
    """

    outcome: str
    detail: str = ""
    error: float = 0.0
    coverage: float = 0.0
    wires: int = 0
    control: bool | None = None


def check(network: Network, control: bool = False) -> Verdict:
    """Find the symmetry of a network, certify it, and test it once more without the certificate's code."""
    model, x = build(network)
    try:
        return check_module(model, x, network.seed, control, network.continuous)
    except it.RuleError as error:
        return Verdict("crashed", f"RuleError: {error}")
    except it.IntertwineError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - any other error is what is looked for here
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        return Verdict("crashed", f"{type(error).__name__} at {where}: {str(error).splitlines()[:1]}")


def check_module(
    model: nn.Module, x: Tensor, seed: int = 0, control: bool = False, continuous: bool = False
) -> Verdict:
    """The same check on any module with one input; errors pass through."""
    before, given, mode = {k: v.clone() for k, v in model.state_dict().items()}, x.clone(), model.training
    sym = it.symmetry(model, x, continuous=continuous)
    cert = sym.certify(model, x, trials=2, seed=seed)
    coverage, wires = sym.coverage(model), len(sym.wires)
    touched = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    if touched or not torch.equal(x, given) or model.training != mode:
        return Verdict("silently wrong", f"the model or its input was changed: {touched}")
    if cert.broken:
        detail = "; ".join(f"{b.op} at {b.place}: {b.error:.1e}" for b in cert.broken)
        return Verdict("caught", detail, cert.max_error, coverage, wires)
    if not cert.ok or cert.max_error > TOLERANCE:
        return Verdict("silently wrong", f"the certificate does not hold: {cert}", cert.max_error, coverage, wires)
    own = copy.deepcopy(model).double()
    g = sym.random(seed=seed + 7)
    moved = sym.act(g, own)
    reference = _outputs(own, x)
    error = _gap(reference, _outputs(moved, x))
    if not error <= OWN_TOLERANCE:
        return Verdict("silently wrong", f"plain forwards differ by {error:.1e}", error, coverage, wires)
    law = _law(sym, g, own, seed)
    if law > OWN_TOLERANCE:
        return Verdict("silently wrong", f"the group law fails on the parameters by {law:.1e}", law, coverage, wires)
    if not continuous:  # with folded norm weights the features of the model itself are others
        name, off = _features(sym, g, own, moved, x)
        if off > 1e3 * OWN_TOLERANCE:
            return Verdict("silently wrong", f"the features at {name} are off by {off:.1e}", off, coverage, wires)
    return Verdict("right", "", error, coverage, wires, _control(own, moved, x, reference, seed) if control else None)


def _law(sym: Any, g: Any, model: nn.Module, seed: int) -> float:
    """Acting with g ∘ h is acting with h and then with g, and g⁻¹ undoes g: how far the parameters are from that."""
    h = sym.random(seed=seed + 8)
    start = sym.act(sym.identity(), model)
    pairs = [(sym.act(g @ h, model), sym.act(g, sym.act(h, model))), (start, sym.act(g.inverse(), sym.act(g, model)))]
    return max(_gap(list(a.state_dict().values()), list(b.state_dict().values())) for a, b in pairs)


def _features(sym: Any, g: Any, own: nn.Module, moved: nn.Module, x: Tensor) -> tuple[str, float]:
    """The module at which hidden features are furthest from what `act_on_features` says they should be, and how far."""
    before, after = _record(own, x), _record(moved, x)
    worst = ("", 0.0)
    for name, features in before.items():
        if name in sym._discovery.graph.sites:
            gap = _gap([sym.act_on_features(g, name, features)], [after[name]])
            worst = max(worst, (name, gap), key=lambda pair: pair[1])
    return worst


def _record(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What every module that is called once returns, by its path."""
    seen: dict[str, list[Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _in, out, name=name: seen.setdefault(name, []).append(
                out.clone() if isinstance(out, Tensor) else None
            )
        )
        for name, module in model.named_modules()
        if name
    ]
    _outputs(model, x)
    for hook in hooks:
        hook.remove()
    return {name: outs[0] for name, outs in seen.items() if len(outs) == 1 and isinstance(outs[0], Tensor)}


def _outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = model(x.double() if x.is_floating_point() else x.clone())
    return list(y) if isinstance(y, tuple) else [y]


def _gap(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest difference between two lists of tensors, each relative to its largest entry."""
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        if left.is_floating_point() and left.numel():
            gap, top = float((left - right).abs().max()), float(left.abs().max())
            worst = max(worst, gap / top if top > 0 else gap)
            worst = float("inf") if gap != gap else worst
    return worst


def _control(own: nn.Module, moved: nn.Module, x: Tensor, reference: Sequence[Tensor], seed: int) -> bool | None:
    """Put one moved parameter back: does the function change? None when nothing was moved."""
    old = dict(own.named_parameters())
    changed = [name for name, p in moved.named_parameters() if not torch.equal(p, old[name])]
    if not changed:
        return None
    broken = copy.deepcopy(moved)
    name = random.Random(seed).choice(changed)
    with torch.no_grad():
        dict(broken.named_parameters())[name].copy_(old[name])
    return _gap(reference, _outputs(broken, x)) > 1e-6


# -- shrinking ---------------------------------------------------------------------------------------------------------


def shrink(network: Network, tries: int = 150) -> Network:
    """A smaller network with the same outcome, found greedily: fewer blocks, plainer choices."""
    wanted = check(network).outcome
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in _smaller(network):
            tries -= 1
            if tries < 0:
                break
            if _outcome(candidate) == wanted:
                network, smaller = candidate, True
                break
    return network


def _outcome(network: Network) -> str:
    try:
        return check(network).outcome
    except RuntimeError:  # the network itself does not fit together
        return "none"


def _smaller(network: Network) -> Iterator[Network]:
    if network.taps:
        yield replace(network, taps=())
    if network.continuous:
        yield replace(network, continuous=False)
    for blocks in _smaller_lists(network.blocks):
        yield replace(network, blocks=blocks)
    for plain in ({"ends": 0}, {"takes": "image"}, {"takes": "tokens"}, {"side": 4}, {"width": 3}):
        if any(getattr(network, k) != v for k, v in plain.items()):
            yield replace(network, **plain)
    for n in _smaller_numbers(network.ends):
        yield replace(network, ends=n)


def _smaller_lists(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    for i in range(len(blocks)):
        yield blocks[:i] + blocks[i + 1 :]
    for i, block in enumerate(blocks):
        for inside in block.inner:
            yield blocks[:i] + inside + blocks[i + 1 :]
        for k, inside in enumerate(block.inner):
            for less in _smaller_lists(inside):
                yield (
                    *blocks[:i],
                    replace(block, inner=(*block.inner[:k], less, *block.inner[k + 1 :])),
                    *blocks[i + 1 :],
                )
        for n in _smaller_numbers(block.choices):
            yield (*blocks[:i], replace(block, choices=n), *blocks[i + 1 :])


def _smaller_numbers(n: int) -> Iterator[int]:
    """Fewer choices first: leave out the last ones, then make single ones plainer."""
    seen = {n}
    for base in (1, 2, 8, 64, 512, 4096, 2**16, 2**20, 2**26):
        if n % base not in seen:
            seen.add(n % base)
            yield n % base
    for less in (n // 2, n - 1):
        if 0 <= less < n and less not in seen:
            seen.add(less)
            yield less
