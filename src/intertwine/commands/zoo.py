"""`intertwine zoo train | list | evaluate | download`: networks from many seeds, and what they are trained on."""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from intertwine.commands.document import print_json
from intertwine.commands.progress import aside, bar, column
from intertwine.commands.show import duration, human, terminal
from intertwine.commands.words import option
from intertwine.zoo.datasets.download import download
from intertwine.zoo.datasets.sources import NAMES
from intertwine.zoo.folder import Zoo, load
from intertwine.zoo.manifest import Record, read_manifest
from intertwine.zoo.networks.registry import architecture, architectures, build
from intertwine.zoo.progress import Progress
from intertwine.zoo.recipe import RECIPES
from intertwine.zoo.seeds import seeds
from intertwine.zoo.trainer import Score
from intertwine.zoo.training import train


def run(options: Namespace) -> int:
    """Carry out the command."""
    return {"train": _train, "list": _list, "evaluate": _evaluate, "download": _download}[options.verb](options)


# -- train -------------------------------------------------------------------------------------------------------------


def _train(options: Namespace) -> int:
    changes = {name: getattr(options, name) for name in ("epochs", "batch", "rate", "spawn")}
    changes = {name: value for name, value in changes.items() if value is not None}
    columns = (
        column("{task.description}"), BarColumn(), column("{task.percentage:>3.0f}%"),
        column("{task.fields[accuracy]}"), TimeElapsedColumn(), column("{task.fields[left]}"),
    )  # fmt: skip
    with bar(*columns) as shown:
        task = shown.add_task("reading the data", total=1.0, accuracy="", left="")

        def show(progress: Progress) -> None:
            first, last = progress.seeds[0], progress.seeds[-1]
            named = f"seed {first}" if first == last else f"seeds {first} to {last}"
            shown.update(
                task, completed=progress.done,
                description=f"{named}, epoch {min(progress.epoch + 1, progress.epochs)} of {progress.epochs}",
                accuracy="" if progress.accuracy is None else f"accuracy {progress.accuracy:.1%}",
                left="" if progress.left is None else f"{duration(progress.left)} left",
            )  # fmt: skip

        zoo = train(
            options.architecture, seeds=seeds(options.seeds), data=options.data, out=options.out, recipe=options.recipe,
            options=dict(map(option, options.option)), device=options.device, precision=options.precision,
            together=options.together, save_every=options.save_every, score_every=options.score_every,
            select=options.select, data_folder=options.data_folder, report=show, **changes,
        )  # fmt: skip
    _show(zoo, options.json)
    return 0


# -- list, evaluate, download ------------------------------------------------------------------------------------------


def _list(options: Namespace) -> int:
    if options.folder is None:
        _list_names(options.json)
    else:
        place = Path(options.folder)
        _show(Zoo(place, read_manifest(place), torch.nn.Module), options.json)  # no network is built for a list
    return 0


def _list_names(as_json: bool) -> None:
    if as_json:
        names = {"architectures": architectures(), "recipes": list(RECIPES), "data": NAMES}
        print_json(names)
        return
    networks = _table("architecture", "parameters", "what it is")
    for name in architectures():
        with torch.device("meta"):  # shapes alone are enough to count
            parameters = sum(p.numel() for p in build(name).parameters())
        networks.add_row(name, human(parameters), architecture(name).about)
    recipes = _table("recipe", "epochs", "batch", "optimizer", "source")
    for recipe in RECIPES.values():
        named = f"{recipe.optimizer} {recipe.rate:g}"
        recipes.add_row(recipe.name, str(recipe.epochs), str(recipe.batch), named, recipe.source)
    console = terminal()
    console.print(networks, Text(), recipes, Text(), Text(f"data sets: {', '.join(NAMES)}"), sep="\n")


def _show(zoo: Zoo, as_json: bool, again: Score | None = None) -> None:
    """The networks of a zoo; `again` is what was measured now."""
    accuracies = [r.accuracy for r in zoo.records] if again is None else again.accuracy.tolist()
    losses = [r.loss for r in zoo.records] if again is None else again.loss.tolist()
    if as_json:
        rows = [_row(*parts, again is not None) for parts in zip(zoo.records, accuracies, losses, strict=True)]
        print_json({"folder": str(zoo.folder), "networks": rows})
        return
    table = _table("seed", "accuracy", "loss", "best epoch", "seconds", "file")
    if again is not None:
        table.add_column("in the manifest", justify="right")
    for record, now, loss in zip(zoo.records, accuracies, losses, strict=True):
        best = f"{record.best_accuracy:.2%} at {record.best_epoch}"
        row = [str(record.seed), f"{now:.2%}", f"{loss:.4f}", best, f"{record.seconds:.1f}", record.file]
        table.add_row(*row, *([] if again is None else [f"{record.accuracy:.2%}"]))
    console = terminal()
    console.print(Text(zoo.words(), style="bold"))
    if zoo.records:
        console.print(table)
    if len(accuracies) > 1:
        mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
        console.print(Text(f"mean accuracy {mean:.2%}, standard deviation {spread:.2%}", style="bold"))


def _row(record: Record, accuracy: float, loss: float, again: bool) -> dict[str, Any]:
    """One network; what the manifest says stands beside what was measured `again`."""
    row = {"seed": record.seed, "file": record.file, "accuracy": accuracy, "loss": loss}
    manifest = {"accuracy": record.accuracy, "loss": record.loss}
    return row | ({"manifest": manifest} if again else {})


def _evaluate(options: Namespace) -> int:
    zoo = load(options.folder)
    score = zoo.evaluate(zoo.dataset(options.data_folder), options.device)
    _show(zoo, options.json, score)
    return 0


def _download(options: Namespace) -> int:
    place = download(options.name, Path(options.folder) if options.folder else None, aside().print)
    if options.json:
        print_json({"data": options.name, "folder": str(place)})
    else:
        sys.stdout.write(f"{place}\n")
    return 0


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        number = head in ("parameters", "epochs", "batch", "seed")
        typed = head in ("architecture", "recipe", "file")  # which must be there in full to be used
        table.add_column(head, justify="right" if number else "left", no_wrap=number or typed, overflow="fold")
    return table
