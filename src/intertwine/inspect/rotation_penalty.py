"""Rotation penalty: what a network loses when a layer's features are transformed and the layers behind trained again.

The sanity test of intertwiners of paper 0, section 3.3: the layers behind can undo a member of G_ReLU, but no rotation.
Rows 000-G41 and 000-G63.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.checkpoint import digest
from intertwine.errors import InputError
from intertwine.features.batches import fresh
from intertwine.features.labelled import labelled
from intertwine.files import only_writer, write_json
from intertwine.inspect.halves import Features, Halves, accuracy
from intertwine.inspect.penalties import RotationPenalty, Trial
from intertwine.inspect.transforms import KINDS, check_kind, random_element, random_transform
from intertwine.stitch.batching import alike, few
from intertwine.stitch.frozen import frozen, unwrapped
from intertwine.stitch.many import Progress
from intertwine.stitch.passes import check_readable_again
from intertwine.symmetry.symmetry import Symmetry, symmetry

DROPS, FACTOR = 4, 0.5  # of the learning rate, evenly spaced over the epochs, as in paper 0
GIGABYTE = 2**30


def rotation_penalty(
    model: nn.Module,
    at: str | Sequence[str],
    data: Any,
    test: Any,
    *,
    kind: str | Sequence[str] = ("identity", "relu", "orthogonal"),
    seeds: Iterable[int] = (0,),
    epochs: int = 50,
    rate: float | int = 1e-3,
    memory: float | int = 4 * GIGABYTE,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> RotationPenalty:
    """Transform the features of a layer at random, train the layers behind, and see what accuracy is lost.

    A fixed matrix is put behind the layer, over its channels. Everything up to it is frozen, everything behind is
    trained with Adam in a copy; dropout and BatchNorm modules there work as in training. The model stays as it was.

    Args:
        model: any network that torch.fx can trace. at: a layer before its activation, or several; see
            `intertwine.features.places`.
        data: batches of (inputs, classes) to train on, read once per epoch. A list of batches is the same in every
            epoch: its features at the layer are computed once where they take no more than `memory` bytes, and its
            batches come in a random order. Anything else is run through the front in every epoch.
        test: batches to score on.
        kind: of transform, one or several of `intertwine.inspect.transforms.KINDS`. "identity" is the control: what
            fine-tuning alone does. "element" is undone exactly in the layers behind before they are trained.
        seeds: one trial each. epochs, rate: of the fine-tuning; the rate is halved four times, evenly spaced.
        out: a folder from which a killed run goes on, trial by trial.
        progress: called with what is being done and which part of all work is behind.

    Raises:
        InputError: layers, kinds or data that cannot be used.

    Example:
        >>> import torch
        >>> from intertwine.inspect.rotation_penalty import rotation_penalty
        >>> _ = torch.manual_seed(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> batches = [(x, net(x).argmax(1))]
        >>> found = rotation_penalty(net, "0", batches, batches, kind=["element", "orthogonal"], epochs=1)
        >>> [(trial.kind, trial.before, trial.inserted == 1) for trial in found.trials]
        [('element', 1.0, True), ('orthogonal', 1.0, False)]
    """
    places, kinds, numbers = _asked(at, kind, seeds, epochs)
    check_readable_again(data)
    check_readable_again(test)
    given, model, tell = model, unwrapped(model), progress or (lambda doing, part: None)
    example = next(iter(labelled(data, model)))
    folder = None if out is None else Path(out)

    @cache
    def own_symmetry() -> Symmetry:  # found only where a kind needs it
        args, kwargs = fresh(few(example.call))
        with frozen([model]):
            return symmetry(model, *args, **kwargs)

    shared = {"epochs": epochs, "rate": rate, "weights": digest(model)}
    total, trials = len(places) * len(kinds) * len(numbers), []
    with nullcontext() if folder is None else only_writer(folder):
        for i, place in enumerate(places):
            halves = Halves(given, place, example)
            learn, judge = Features(halves, data, memory), Features(halves, test, memory)
            before = accuracy(halves, judge, torch.eye(halves.channels, dtype=torch.float64))
            for one, seed in product(kinds, numbers):
                plan = {"at": place, "kind": one, "seed": seed, "before": before, **shared}
                file = None if folder is None else folder / f"layer{i}-{one}-{seed}.json"
                found, doing = _left(file, plan), f"{one} at {place}"
                if found is None:
                    matrix, moved = _transform(halves, one, seed, own_symmetry)
                    heard = _part_of(tell, doing, len(trials), total)
                    found = _fine_tune(halves, moved, matrix, learn, judge, epochs, rate, seed, heard)
                    if file is not None:
                        write_json(file, {"plan": plan, "found": found})
                history = tuple(found["history"])
                trials.append(Trial(place, one, seed, before, found["inserted"], history, found["loss"]))
                tell(doing, len(trials) / total)
    return RotationPenalty(tuple(trials), shared)


def _part_of(tell: Progress, doing: str, behind: int, total: int) -> Callable[[float], None]:
    """What hears of one trial, as a part of all."""
    return lambda part: tell(doing, (behind + part) / total)


def _asked(
    at: str | Sequence[str], kind: str | Sequence[str], seeds: Iterable[int], epochs: int
) -> tuple[list[str], list[str], list[int]]:
    """Layers, kinds and seeds, each once."""
    places = [at] if isinstance(at, str) else list(dict.fromkeys(at))
    kinds = [kind] if isinstance(kind, str) else list(dict.fromkeys(kind))
    numbers = list(dict.fromkeys(seeds))
    for one in kinds:
        check_kind(one)
    if not (places and kinds and numbers) or epochs < 0:
        raise InputError(
            f"Rotation penalties were asked for at {len(places)} layers, of {len(kinds)} kinds, with {len(numbers)} "
            f"seeds and {epochs} epochs. Give at least one layer, one kind ({', '.join(KINDS)}) and one seed, and no "
            "negative number of epochs."
        )
    return places, kinds, numbers


def _transform(
    halves: Halves, kind: str, seed: int, own_symmetry: Callable[[], Symmetry]
) -> tuple[Tensor, nn.Module | None]:
    """The matrix of a trial, and the network that undoes it where there is one."""
    if kind != "element":
        return random_transform(kind, halves.channels, seed), None
    matrix, moved = random_element(
        own_symmetry(), halves.model, halves.at.removesuffix(":output"), halves.layout, halves.channels, seed
    )
    halves.start(moved)
    first = halves.example
    with torch.no_grad(), frozen([halves.model]):
        args, kwargs = fresh(first.batch.call)
        if not alike(halves.outputs(first, matrix), halves.model(*args, **kwargs)):
            raise InputError(
                f"An element of the network's group was asked for at {halves.at!r}, but the layers behind do not undo "
                "it there: values that it moves too go around the layer, as in a residual block. Use a layer inside "
                "the block, or one behind its sum."
            )
    return matrix, moved


def _fine_tune(
    halves: Halves,
    moved: nn.Module | None,
    matrix: Tensor,
    learn: Features,
    judge: Features,
    epochs: int,
    rate: float | int,
    seed: int,
    heard: Callable[[float], None],
) -> dict[str, Any]:
    """Train the layers behind on transformed features: accuracy before, after every epoch, and the last mean loss."""
    halves.start(moved)
    inserted = accuracy(halves, judge, matrix)
    optimizer = torch.optim.Adam(halves.weights, rate)
    generator = torch.Generator().manual_seed(seed)
    history, loss = [], None
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)  # of dropout
        for epoch in range(epochs):
            optimizer.param_groups[0]["lr"] = rate * FACTOR ** ((DROPS + 1) * epoch // epochs)
            halves.rest.train()
            total = torch.zeros(4, dtype=torch.float64, device=halves.weights[0].device)
            for passed in learn.read(epoch, generator):
                optimizer.zero_grad()
                one, sums = halves.loss(passed, matrix)
                one.backward()
                optimizer.step()
                total += sums
            history.append(accuracy(halves, judge, matrix))
            mean = float(total[0] / total[1])
            loss = mean if isfinite(mean) else None
            heard((epoch + 1) / epochs)
    optimizer.zero_grad()
    return {"history": history, "loss": loss, "inserted": inserted}


def _left(file: Path | None, plan: dict[str, Any]) -> dict[str, Any] | None:
    """What a run before left of a trial; a trial of another plan is refused."""
    if file is None or not file.exists():
        return None
    held = json.loads(file.read_text(encoding="utf-8"))
    differ = [key for key in plan if held["plan"].get(key) != plan[key]]
    if differ:
        raise InputError(
            f"A trial was to be taken up again from {file}, but it holds one of another plan, which differs in "
            f"{', '.join(differ)}. Give another folder, or remove this one."
        )
    return held["found"]
