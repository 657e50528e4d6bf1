"""Arguments of `intertwine compare`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import ZOO, add_data, add_json, add_pair


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Every layer of one network against every layer of another, on test images of a data set." + ZOO
    )
    add_pair(command)
    add_data(command, "test images", default="digits")
    command.add_argument(
        "--layer", metavar="PATH", action="append", help="a layer or a pattern such as layer1.*.relu2; repeat it"
    )
    command.add_argument("--layer-b", metavar="PATH", action="append", help="of B, where they are not the same")
    command.add_argument(
        "--measure", metavar="NAME", action="append", help="repeat it for several (default linear_cka)"
    )
    command.add_argument(
        "--policy",
        choices=("channels", "flatten", "pool", "tokens"),
        default="channels",
        help="what a sample is: every position of an image (channels, the default) or every token (tokens), or the "
        "whole image, all its positions being features (flatten) or their mean (pool)",
    )
    command.add_argument("--svg", metavar="FILE", help="write a heat map of the first measure")
    add_json(command)
