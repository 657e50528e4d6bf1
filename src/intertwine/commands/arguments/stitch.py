"""Arguments of `intertwine stitch`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import ZOO, add_data, add_device, add_input, add_json, add_pair, positive


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Join the front of network A to the back of network B by a map of features, and see how much accuracy that "
        "costs. All places and families are fitted in one run; both networks stay as they are." + ZOO
    )
    add_pair(command)
    add_input(command)
    command.add_argument(
        "--at",
        metavar="PATH,…",
        required=True,
        help="where to cut: module paths such as layer2 or layer1.0.relu:input; FRONT=BACK where they differ",
    )
    command.add_argument(
        "--family",
        metavar="NAME,…",
        default="relu,linear",
        help="of the map: identity, permutation, relu, softsort, orthogonal, linear, affine, lowrank:4, sparse:0.01 or "
        "another (default relu,linear)",
    )
    command.add_argument(
        "--fit", choices=("direct", "task", "both"), default="task", help="in closed form, or trained (default task)"
    )
    add_data(command, "at most so many training images to fit on, and test images to score on", needed=True)
    command.add_argument(
        "--recipe",
        metavar="NAME",
        default="intertwine",
        help="how to train: intertwine (default), godfrey or csiszarik, the last two as in their papers",
    )
    command.add_argument("--epochs", metavar="N", type=positive, help="instead of the recipe's")
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of the training; repeat it for several"
    )
    command.add_argument(
        "--seeds", metavar="A:B", default="0", help="of random starts, one stitch for each (default 0)"
    )
    command.add_argument(
        "--skip", choices=("front", "back"), help="whose values go around a cut inside a residual block"
    )
    add_device(command)
    command.add_argument(
        "--out", metavar="DIR", help="write maps, records and a picture; a run that was stopped goes on from there"
    )
    add_json(command)
