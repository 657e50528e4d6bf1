"""Arguments of `intertwine barrier`."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from intertwine.commands.arguments.shared import ZOO, add_data, add_input, add_json, add_pair, positive


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Loss and error on the straight line from A to B, and how far they rise above the line of the two ends." + ZOO
    )
    add_pair(command)
    add_input(command)
    add_data(command, "images to score on, and training images for a reset", needed=True)
    command.add_argument("--split", choices=("test", "train"), default="test", help="images to score on (default test)")
    command.add_argument(
        "--points", metavar="N", type=positive, default=25, help="networks on the line, both ends too (default 25)"
    )
    command.add_argument(
        "--reset",
        action=BooleanOptionalAction,
        default=None,
        help="estimate BatchNorm statistics again at every point, on training images (default where there is "
        "BatchNorm); the line without is shown beside it",
    )
    command.add_argument("--plot", metavar="FILE", help="draw both curves (svg or png)")
    add_json(command)
