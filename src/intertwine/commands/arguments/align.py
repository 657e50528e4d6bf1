"""Arguments of `intertwine align`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import ZOO, add_data, add_input, add_json, add_method, add_pair, positive


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Move network B onto network A by an element of their symmetry, which does not change its function. With "
        "--data, the barrier between the two is measured before and after, on test images." + ZOO
    )
    add_pair(command)
    add_input(command)
    add_method(
        command,
        "weights (default) or scale-aware; with --data also activations, commutativity, straight-through or sinkhorn",
    )
    add_data(command, "at most so many training images for the method, and test images for the barrier")
    command.add_argument("--starts", metavar="N", type=positive, default=3, help="starts, the best is kept (default 3)")
    command.add_argument("--wires", metavar="W,…", help="names of the only wires to move, with commas between")
    command.add_argument("--continuous", action="store_true", help="let whole matrices act where only linear maps meet")
    command.add_argument("--out", metavar="FILE", help="write B as moved (safetensors)")
    command.add_argument("--element", metavar="FILE", help="write the element that moves B (safetensors)")
    command.add_argument("--plot", metavar="FILE", help="draw how units correlate, before and after (svg or png)")
    add_json(command)
