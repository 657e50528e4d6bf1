"""The check that the engine is not silently wrong on a network, and the search for a smaller one that fails alike."""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_networks import Block, Network, build
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import RuleError

TOLERANCE = 1e-9
OWN_TOLERANCE = 1e-8
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
    except RuleError as error:
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
        if name in sym.geometry.graph.sites:
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
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        y = model(x.double() if x.is_floating_point() else x.clone())
    return list(y) if isinstance(y, tuple) else [y]


def _gap(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest difference between two lists of tensors, each relative to its largest entry (or to 1e-3)."""
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        if left.is_floating_point() and left.numel():
            gap = float((left - right).abs().max()) / max(float(left.abs().max()), 1e-3)
            worst = max(worst, gap) if gap == gap else float("inf")
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
    for plainer in (
        replace(network, ends=0),
        replace(network, takes="image"),
        replace(network, takes="tokens"),
        replace(network, side=4),
        replace(network, width=3),
    ):
        if plainer != network and (plainer.takes, network.takes) != ("tokens", "image"):
            yield plainer
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
