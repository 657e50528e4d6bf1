"""`intertwine zoo train | list | evaluate | download`: networks from many seeds, and their data sets."""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output

if TYPE_CHECKING:
    from rich.table import Table

    from intertwine.lab.zoo.folder import Zoo
    from intertwine.lab.zoo.manifest import Record
    from intertwine.lab.zoo.trainer import StackScore
    from intertwine.lab.zoo.training import TrainingProgress


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Networks of one architecture from many seeds, in a folder with a manifest."
    verbs = command.add_subparsers(title="commands", metavar="COMMAND", dest="verb")
    _add_train(verbs.add_parser("train", help="train one network per seed, many at once"))
    listing = verbs.add_parser(
        "list", help="the networks of a zoo; without a folder: architectures, recipes, data sets"
    )
    listing.add_argument("folder", metavar="DIR", nargs="?", help="a folder that `zoo train` wrote")
    testing = verbs.add_parser("evaluate", help="measure the accuracy of a zoo's networks again")
    testing.add_argument("folder", metavar="DIR", help="a folder that `zoo train` wrote")
    testing.add_argument("--data-folder", metavar="DIR", help="the folder of the data set (default: INTERTWINE_DATA)")
    arguments.add_device(testing)
    fetching = verbs.add_parser("download", help="download a data set and check it")
    fetching.add_argument("name", metavar="NAME", help="mnist, fashion-mnist or cifar10")
    fetching.add_argument("--folder", metavar="DIR", help="where to store it (default: the user's cache)")
    for verb in (listing, testing, fetching):
        arguments.add_json(verb)


def _add_train(command: ArgumentParser) -> None:
    command.description = (
        "Train one network per seed, many at once, each with its own initialisation, data order and augmentation. The "
        "same command resumes a run that was stopped."
    )
    command.add_argument("architecture", metavar="NAME", help="see `intertwine zoo list`")
    command.add_argument("--data", metavar="NAME", default="digits", help="a data set (default: digits)")
    command.add_argument("--data-folder", metavar="DIR", help="the folder of the data set (default: INTERTWINE_DATA)")
    command.add_argument(
        "--seeds", metavar="A:B", default="0:8", help="seeds from A to below B, or A,B,C (default 0:8)"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the folder of the zoo")
    command.add_argument(
        "--recipe", metavar="NAME", help="how to train, see `zoo list` (default: fast for colour images, else plain)"
    )
    command.add_argument("--epochs", metavar="N", type=arguments.positive, help="instead of the recipe's")
    command.add_argument(
        "--batch", metavar="N", type=arguments.positive, help="images in a batch, instead of the recipe's"
    )
    command.add_argument("--rate", metavar="R", type=arguments.number, help="learning rate, instead of the recipe's")
    command.add_argument("--spawn", metavar="N", type=arguments.whole, help="share the first N epochs, then split")
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="an option of the architecture; repeatable"
    )
    arguments.add_device(command)
    command.add_argument(
        "--precision", metavar="P", help="float64, float32 (default), tf32 or bfloat16 (default on a GPU)"
    )
    command.add_argument(
        "--together", metavar="N", type=arguments.positive, help="networks at once (32 on a GPU, else 8)"
    )
    command.add_argument(
        "--save-every", metavar="N", type=arguments.positive, help="epochs between states (default: a tenth)"
    )
    command.add_argument(
        "--score-every", metavar="N", type=arguments.positive, default=1, help="epochs between tests (default 1)"
    )
    command.add_argument(
        "--select", choices=("last", "best-on-test"), default="last", help="which weights to keep (default: last epoch)"
    )
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    {"train": _train, "list": _list, "evaluate": _evaluate, "download": _download}[options.verb](options)
    return 0


def _train(options: Namespace) -> None:
    from rich.progress import BarColumn, TimeElapsedColumn

    from intertwine.lab.zoo.recipe import seeds
    from intertwine.lab.zoo.training import train

    changes = {name: getattr(options, name) for name in ("epochs", "batch", "rate", "spawn")}
    changes = {name: value for name, value in changes.items() if value is not None}
    columns = (
        output.text_column("{task.description}"), BarColumn(), output.text_column("{task.percentage:>3.0f}%"),
        output.text_column("{task.fields[accuracy]}"), TimeElapsedColumn(), output.text_column("{task.fields[left]}"),
    )  # fmt: skip
    with output.progress_bar(*columns) as bar:
        task = bar.add_task("reading the data", total=1.0, accuracy="", left="")

        def update(now: TrainingProgress) -> None:
            first, last = now.seeds[0], now.seeds[-1]
            named = f"seed {first}" if first == last else f"seeds {first} to {last}"
            bar.update(
                task, completed=now.done,
                description=f"{named}, epoch {min(now.epoch + 1, now.epochs)} of {now.epochs}",
                accuracy="" if now.accuracy is None else f"accuracy {now.accuracy:.1%}",
                left="" if now.left is None else f"{output.duration(now.left)} left",
            )  # fmt: skip

        zoo = train(
            options.architecture, seeds=seeds(options.seeds), data=options.data, out=options.out, recipe=options.recipe,
            options=dict(map(arguments.parse_option, options.option)), device=options.device,
            precision=options.precision, together=options.together, save_every=options.save_every,
            score_every=options.score_every, select=options.select, data_folder=options.data_folder, progress=update,
            **changes,
        )  # fmt: skip
    _show(zoo, options.json)


def _list(options: Namespace) -> None:
    from torch import nn

    from intertwine.lab.zoo.folder import Zoo
    from intertwine.lab.zoo.manifest import read_manifest

    if options.folder is None:
        _list_names(options.json)
    else:
        place = Path(options.folder)
        _show(Zoo(place, read_manifest(place), nn.Module), options.json)  # no network is built for a list


def _list_names(as_json: bool) -> None:
    import torch

    from intertwine.lab.zoo.datasets.downloads import NAMES
    from intertwine.lab.zoo.networks.registry import architecture, architectures, build
    from intertwine.lab.zoo.recipe import RECIPES

    if as_json:
        output.print_json({"architectures": architectures(), "recipes": list(RECIPES), "data": NAMES})
        return
    networks = _table("architecture", "parameters", "what it is")
    for name in architectures():
        with torch.device("meta"):  # shapes are enough to count
            parameters = sum(p.numel() for p in build(name).parameters())
        networks.add_row(name, output.human_count(parameters), architecture(name).about)
    recipes = _table("recipe", "epochs", "batch", "optimizer", "source")
    for recipe in RECIPES.values():
        optimizer = f"{recipe.optimizer} {recipe.rate:g}"
        recipes.add_row(recipe.name, str(recipe.epochs), str(recipe.batch), optimizer, recipe.source)
    output.terminal().print(
        networks, output.text(), recipes, output.text(), output.text(f"data sets: {', '.join(NAMES)}"), sep="\n"
    )


def _show(zoo: Zoo, as_json: bool, measured: StackScore | None = None) -> None:
    """The networks of a zoo; `measured`: their scores of now, shown beside those of the manifest."""
    accuracies = [r.accuracy for r in zoo.records] if measured is None else measured.accuracy.tolist()
    losses = [r.loss for r in zoo.records] if measured is None else measured.loss.tolist()
    if as_json:
        rows = [_row(*parts, measured is not None) for parts in zip(zoo.records, accuracies, losses, strict=True)]
        output.print_json({"folder": str(zoo.folder), "networks": rows})
        return
    table = _table("seed", "accuracy", "loss", "best epoch", "seconds", "file")
    if measured is not None:
        table.add_column("in the manifest", justify="right")
    for record, accuracy, loss in zip(zoo.records, accuracies, losses, strict=True):
        best = f"{record.best_accuracy:.2%} at {record.best_epoch}"
        row = [str(record.seed), output.percent(accuracy), f"{loss:.4f}", best, f"{record.seconds:.1f}", record.file]
        table.add_row(*row, *([] if measured is None else [output.percent(record.accuracy)]))
    console = output.terminal()
    console.print(output.text(zoo.words(), style="bold"))
    if zoo.records:
        console.print(table)
    if len(accuracies) > 1:
        mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
        console.print(output.text(f"mean accuracy {mean:.2%}, standard deviation {spread:.2%}", style="bold"))


def _row(record: Record, accuracy: float, loss: float, measured: bool) -> dict[str, Any]:
    row = {"seed": record.seed, "file": record.file, "accuracy": accuracy, "loss": loss}
    manifest = {"accuracy": record.accuracy, "loss": record.loss}
    return row | ({"manifest": manifest} if measured else {})


def _evaluate(options: Namespace) -> None:
    from intertwine.lab.zoo.folder import load

    zoo = load(options.folder)
    _show(zoo, options.json, zoo.evaluate(zoo.dataset(options.data_folder), options.device))


def _download(options: Namespace) -> None:
    from intertwine.lab.zoo.datasets.downloads import download

    place = download(options.name, Path(options.folder) if options.folder else None, output.error_console().print)
    if options.json:
        output.print_json({"data": options.name, "folder": str(place)})
    else:
        sys.stdout.write(f"{place}\n")


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        number = head in ("parameters", "epochs", "batch", "seed")
        typed = head in ("architecture", "recipe", "file")  # names that the user types must not be cut
        table.add_column(head, justify="right" if number else "left", no_wrap=number or typed, overflow="fold")
    return table
