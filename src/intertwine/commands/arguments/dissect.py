"""Arguments of `intertwine dissect`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import ZOO, add_device, add_json, add_model, number, positive, whole


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Which concepts the units of a layer stand for, in the network's own basis and in rotated ones, and what "
        "chance gives." + ZOO
    )
    add_model(command)
    command.add_argument(
        "--at", metavar="PATH", required=True, help="a module path that gives maps, such as layer4 or layer4.1.relu"
    )
    command.add_argument(
        "--concepts",
        metavar="FOLDER",
        default="synthetic",
        help="a folder in the layout of Broden, or synthetic: drawn pictures of colours, textures, shapes and parts "
        "(default)",
    )
    command.add_argument("--split", metavar="NAME", help="the part of a Broden folder, such as train or val")
    command.add_argument(
        "--rotation",
        metavar="α,…",
        default="0,0.5,1",
        help="powers of a random rotation of the units: 0 is the network's own basis, 1 all of it (default 0,0.5,1)",
    )
    command.add_argument("--seeds", metavar="A:B", default="0", help="of the rotations, one each (default 0)")
    command.add_argument("--samples", metavar="N", type=positive, default=1000, help="images (default 1000)")
    command.add_argument("--batch", metavar="N", type=positive, default=32, help="images at once (default 32)")
    command.add_argument("--mean", metavar="R,G,B", help="of the network's inputs, for pixels from 0 to 1")
    command.add_argument(
        "--std",
        metavar="R,G,B",
        help="likewise (default of both: the zoo's for a network of a zoo, else ImageNet's for a folder and the "
        "pictures' own for synthetic)",
    )
    command.add_argument("--level", metavar="L", type=number, default=0.04, help="overlap that counts (default 0.04)")
    command.add_argument(
        "--share", metavar="S", type=number, default=0.005, help="of a unit's activations that are high (default 0.005)"
    )
    command.add_argument(
        "--null", metavar="N", type=whole, default=1, help="how often chance is drawn; 0 for not (default 1)"
    )
    command.add_argument("--units", metavar="N", type=positive, default=6, help="best units in pictures (default 6)")
    add_device(command)
    command.add_argument("--out", metavar="DIR", help="write the account, the curve, bars and the best units")
    add_json(command)
