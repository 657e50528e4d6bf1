"""Arguments of `intertwine zoo`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import add_device, add_json, number, positive, whole


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
    testing.add_argument("--data-folder", metavar="DIR", help="where the data is (default: INTERTWINE_DATA)")
    add_device(testing)
    fetching = verbs.add_parser("download", help="fetch a data set and check it")
    fetching.add_argument("name", metavar="NAME", help="mnist, fashion-mnist or cifar10")
    fetching.add_argument("--folder", metavar="DIR", help="where it goes (default: the user's cache)")
    for verb in (listing, testing, fetching):
        add_json(verb)


def _add_train(command: ArgumentParser) -> None:
    command.description = (
        "Train one network per seed, many at once, each with its own start, data order and augmentation. A run that "
        "was stopped goes on where it was when the same command is given again."
    )
    command.add_argument("architecture", metavar="NAME", help="see `intertwine zoo list`")
    command.add_argument("--data", metavar="NAME", default="digits", help="a data set (default: digits)")
    command.add_argument("--data-folder", metavar="DIR", help="where it is (default: INTERTWINE_DATA)")
    command.add_argument(
        "--seeds", metavar="A:B", default="0:8", help="seeds from A to below B, or A,B,C (default 0:8)"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the folder of the zoo")
    command.add_argument(
        "--recipe", metavar="NAME", help="how to train, see `zoo list` (default: fast for colour images, else plain)"
    )
    command.add_argument("--epochs", metavar="N", type=positive, help="instead of the recipe's")
    command.add_argument("--batch", metavar="N", type=positive, help="images in a batch, instead of the recipe's")
    command.add_argument("--rate", metavar="R", type=number, help="learning rate, instead of the recipe's")
    command.add_argument("--spawn", metavar="N", type=whole, help="share the first N epochs, then split")
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of the architecture; repeat it for several"
    )
    add_device(command)
    command.add_argument(
        "--precision", metavar="P", help="float64, float32 (default), tf32 or bfloat16 (default on a GPU)"
    )
    command.add_argument("--together", metavar="N", type=positive, help="networks at once (32 on a GPU, else 8)")
    command.add_argument("--save-every", metavar="N", type=positive, help="epochs between states (default: a tenth)")
    command.add_argument(
        "--score-every", metavar="N", type=positive, default=1, help="epochs between tests (default 1)"
    )
    command.add_argument(
        "--select",
        choices=("last", "best-on-test"),
        default="last",
        help="whose weights are kept (default: last epoch)",
    )
    add_json(command)
