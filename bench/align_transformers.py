"""Alignment of transformers trained from different seeds: the effect of each part of the symmetry on the loss barrier.

    python bench/align_transformers.py                  # two pairs of language models, one of vision transformers (CPU)
    python bench/align_transformers.py --quick          # the same in a minute or two: small, few steps
    python bench/align_transformers.py --device cuda --dim 256 --depth 4 --heads 8 --steps 6000 --batch 256
    python bench/align_transformers.py page             # the table of all results

The language models read bytes of the source of Python's standard library, which every Python has; the vision
transformers read digits (or MNIST from INTERTWINE_DATA). All have RMS norms and untied heads, so that their residual
stream may be rotated. For every pair, the barrier on held-out data is measured as trained, and after alignment by
`weights` with the MLP units only, with all permutations, and with matched heads, a matrix inside every head and a
rotation of the residual stream; the last two also with the option `relative`. Alignment uses no data. Rows are added to
bench/results/align_transformers.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import header, write_results
from torch import Tensor, nn

from intertwine.align.align import align
from intertwine.connect.barrier import barrier
from intertwine.lab.zoo.datasets.loading import data as dataset
from intertwine.lab.zoo.networks.registry import build
from intertwine.symmetry.symmetry import Symmetry, symmetry

RESULTS = Path(__file__).parent / "results" / "align_transformers.json"
HELD_OUT = 10  # every tenth file of the library is held out

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """Sizes of one experiment."""

    dim: int = 96
    depth: int = 2
    heads: int = 4
    context: int = 64
    steps: int = 1500
    batch: int = 32
    rate: float = 2e-3
    decay: float = 0.1
    points: int = 25
    samples: int = 512  # number of held-out texts or images
    megabytes: float = 6.0  # of source text
    device: str = "cpu"


QUICK: dict[str, Any] = {
    "dim": 32, "depth": 1, "heads": 2, "context": 32, "steps": 150, "points": 11, "samples": 128, "megabytes": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A kind of network with its data: `draw` gives a training batch, `held_out` the batches to measure on."""

    name: str
    make: Callable[[], nn.Module]
    example: Tensor
    draw: Callable[[torch.Generator], Batch]
    held_out: list[Batch]


# -- tasks -------------------------------------------------------------------------------------------------------------


def library_text(megabytes: float) -> tuple[Tensor, Tensor]:
    """Bytes of the files of the standard library: (training, held out)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for i, file in enumerate(files):
        sides[i % HELD_OUT == 0].append(file.read_bytes())
    limit = int(megabytes * 1e6)
    first, second = (np.frombuffer(b"\n".join(side)[:limit], dtype=np.uint8).copy() for side in sides)
    return torch.from_numpy(first), torch.from_numpy(second)


def text_task(plan: Plan) -> Task:
    """Predict the next byte."""
    train, test = (t.to(plan.device) for t in library_text(plan.megabytes))
    reach = torch.arange(plan.context + 1, device=plan.device)

    def windows(text: Tensor, starts: Tensor) -> Batch:
        ids = text[starts.to(plan.device)[:, None] + reach].long()
        return ids[:, :-1], ids[:, 1:]

    def draw(generator: torch.Generator) -> Batch:
        return windows(train, torch.randint(len(train) - plan.context - 1, (plan.batch,), generator=generator))

    def make() -> nn.Module:
        sizes = {"dim": plan.dim, "depth": plan.depth, "heads": plan.heads, "context": plan.context}
        return build("gpt", **sizes, tied=False, norm="rms")

    places = torch.linspace(0, len(test) - plan.context - 2, plan.samples).long()
    held_out = [windows(test, part) for part in places.split(64)]
    return Task("GPT on source text", make, torch.zeros(1, plan.context, dtype=torch.long), draw, held_out)


def image_task(plan: Plan, name: str) -> Task:
    """Classify digits."""
    found = dataset(name).to(plan.device)
    side = found.shape[-1]
    images, labels = found.inputs(found.images), found.labels
    tests, answers = found.inputs(found.test_images[: plan.samples]), found.test_labels[: plan.samples]

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(images), (plan.batch,), generator=generator).to(plan.device)
        return images[chosen], labels[chosen]

    def make() -> nn.Module:
        sizes = {"dim": plan.dim, "depth": plan.depth, "heads": plan.heads}
        return build("vit", **sizes, patch=side // 4, side=side, in_channels=1, norm="rms")

    held_out = list(zip(tests.split(64), answers.split(64), strict=True))
    return Task(f"ViT on {name}", make, torch.zeros(1, 1, side, side), draw, held_out)


# -- training and measuring --------------------------------------------------------------------------------------------


def trained(task: Task, plan: Plan, seed: int) -> nn.Module:
    """A network from one seed, which decides its initial weights and the order of its data."""
    torch.manual_seed(seed)
    model = task.make().to(plan.device).train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, (0.9, 0.95), weight_decay=plan.decay)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, plan.rate, plan.steps + 1)
    for _ in range(plan.steps):
        inputs, targets = task.draw(generator)
        with torch.autocast("cuda", torch.bfloat16, enabled=plan.device == "cuda"):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pace.step()
    return model.eval().cpu()


def stages(example: Tensor, model: nn.Module) -> Iterator[tuple[str, Symmetry, dict[str, Any]]]:
    """(name, symmetry, options of `align`): growing parts of the symmetry, and all of it with relative weights."""
    plain, whole = (symmetry(model, example, continuous=c) for c in (False, True))
    relative = {"options": {"relative": True}}
    yield "MLP units", plain, {"wires": [w.name for w in plain.wires if w.name.endswith("linear1")]}
    yield "all permutations", plain, {}
    yield "all permutations, relative", plain, relative
    yield "heads, GL inside, rotation", whole, {}
    yield "heads, GL inside, rotation, relative", whole, relative


def measure(task: Task, plan: Plan, seeds: tuple[int, int]) -> list[dict[str, Any]]:
    """The rows of one pair."""
    start = time.perf_counter()
    a, b = (trained(task, plan, seed) for seed in seeds)
    seconds = time.perf_counter() - start
    rows = [_row(task, plan, seeds, "as trained", a, b, {"seconds": seconds})]
    for name, found, told in stages(task.example, a):
        start = time.perf_counter()
        result = align(a, b, symmetry=found, starts=2 if found.continuous else 4, **told)
        seconds = time.perf_counter() - start
        share = {"before": result.before, "after": result.after, "seconds": seconds}
        rows.append(_row(task, plan, seeds, name, result.reference, result.model, share))
    return rows


def _row(
    task: Task, plan: Plan, seeds: Sequence[int], stage: str, a: nn.Module, b: nn.Module, more: dict[str, float]
) -> dict[str, Any]:
    a, b = (copy.deepcopy(model).to(plan.device) for model in (a, b))
    found = barrier(a, b, task.held_out, points=plan.points)
    row = {
        "task": task.name, "seeds": list(seeds), "stage": stage,
        "loss_barrier": found.loss_barrier, "error_barrier": found.error_barrier,
        "loss_of_ends": [found.loss[0], found.loss[-1]], "loss_in_the_middle": found.loss[plan.points // 2],
        **more, "plan": asdict(plan), "torch": torch.__version__, "made": header(),
    }  # fmt: skip
    print(_line(row), flush=True)
    return row


# -- tables ------------------------------------------------------------------------------------------------------------

HEAD = "| task | seeds | stage | loss barrier | error barrier | squared distance | seconds |\n" + "|---" * 7 + "|"


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The table of all results."""
    return "\n".join([HEAD, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    moved = f"{row['before']:.4g} → {row['after']:.4g}" if "after" in row else ""
    error = "" if row["error_barrier"] is None else f"{row['error_barrier']:.3f}"
    return (
        f"| {row['task']}, {row['plan']['dim']} wide | {row['seeds'][0]}, {row['seeds'][1]} | {row['stage']} "
        f"| {row['loss_barrier']:.3f} | {error} | {moved} | {row['seconds']:.1f} |"
    )


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row["task"], row["seeds"], row["stage"], row["plan"]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="measure", choices=("measure", "page"))
    parser.add_argument("--quick", action="store_true", help="small networks, few steps")
    parser.add_argument(
        "--data", default="digits", choices=("digits", "mnist"), help="the data of the vision transformers"
    )
    parser.add_argument("--task", default="both", choices=("both", "text", "images"))
    parser.add_argument("--pairs", type=int, default=2, help="pairs of language models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name}", type=type(value), default=None)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    known = json.loads(options.out.read_text()) if options.out.exists() else []
    if options.what == "measure":
        given = {name: getattr(options, name) for name in asdict(Plan()) if getattr(options, name) is not None}
        plan = Plan(**((QUICK if options.quick else {}) | given))
        print(HEAD, flush=True)
        tasks: list[tuple[Task, int]] = []
        if options.task in ("both", "text"):
            tasks.append((text_task(plan), options.pairs))
        if options.task in ("both", "images"):
            tasks.append((image_task(plan, options.data), 1))
        rows = [row for task, pairs in tasks for p in range(pairs) for row in measure(task, plan, (2 * p, 2 * p + 1))]
        known = list({_key(row): row for row in [*known, *rows]}.values())
        write_results(options.out, known)
    else:
        print(page(known))


if __name__ == "__main__":
    main()
