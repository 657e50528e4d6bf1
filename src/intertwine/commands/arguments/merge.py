"""Arguments of `intertwine merge`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import MODEL, ZOO, add_data, add_input, add_json, add_method


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "One network out of several of one architecture: moved into a common frame, averaged, mended. With --data, it "
        "is compared with the given networks and with their plain mean, as it is and mended alike, on test images."
        + ZOO
    )
    command.add_argument("models", metavar="MODEL", nargs="+", help=f"two or more: {MODEL}")
    command.add_argument(
        "--weights",
        metavar="FILE",
        action="append",
        default=[],
        help="a checkpoint; repeat it, one for each network in their order, - for a network that needs none",
    )
    add_input(command)
    add_method(command, "as for align; also none (the plain mean), sorted (the mean of NodeSort forms)")
    add_data(command, "at most so many training images to align and mend on, and test images to score on")
    command.add_argument(
        "--repair",
        choices=("reset", "repair", "scales", "none"),
        default="none",
        help="reset: BatchNorm statistics, on data. repair: REPAIR, on data. scales: sizes of units, without data",
    )
    command.add_argument("--weights-of", metavar="W,…", help="shares of the mean, such as 0.7,0.3 (default: equal)")
    command.add_argument("--out", metavar="FILE", help="write the merged weights (safetensors)")
    add_json(command)
