"""Arguments of `fold` and `dissect`, the commands on the single features of one network; none loads torch."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments import ZOO, add_data, add_json, add_model, positive
from intertwine.fold.options import CHOICES


def add_fold(command: ArgumentParser) -> None:
    """Arguments of `fold`."""
    command.description = (
        "Merge the features of a network that are nearly the same, or take out those that others can express, without "
        "training; the result is a smaller network of the same kind. Say how much: by --beta, by --parameters, by "
        "--floor or by --widths. With --data, both networks are scored on test images." + ZOO
    )
    add_model(command)
    command.add_argument(
        "--parameters",
        metavar="SHARE|NUMBER",
        type=float,
        help="fold to so many parameters, each layer as far as costs least: a share below 1, or a number",
    )
    command.add_argument(
        "--floor",
        metavar="ACCURACY",
        type=float,
        help="fold as far as this accuracy allows, such as 0.9. It is measured on half of the training images that "
        "--samples allows, never on test images; a network that has learnt them does better on them than on new ones",
    )
    command.add_argument(
        "--how",
        choices=("absorb", "merge"),
        help="with --parameters or --floor: take out features that others can express, which changes the layers that "
        "read them (absorb, the default), or merge pairs, each layer with a beta of its own (merge)",
    )
    command.add_argument(
        "--with-data",
        action="store_const",
        const=True,
        help="let absorb look at training images, without labels, instead of random ones; so it does in any case with "
        "--floor and --reset together",
    )
    command.add_argument(
        "--method",
        choices=("iterative", "kmeans", "activations"),
        help="how features are put together: the nearest two again and again (iterative, the default), in clusters of "
        "rows (kmeans, needs --widths), or by what they give on training images (activations, --beta or --widths)",
    )
    command.add_argument(
        "--widths",
        metavar="SHARE",
        action="append",
        help="the share of its features that every layer keeps; LAYER=NUMBER for one layer, repeated for several",
    )
    command.add_argument(
        "--beta",
        metavar="B",
        action="append",
        help="a layer stops when its smallest distance exceeds B times the usual one; above 0, below 1, and the larger "
        "the more merges (default 0.1). LAYER=B for one layer; repeat it for several, all others are then left alone",
    )
    words = {
        "schedule": "one layer after the other, or one merge per layer and sweep",
        "terms": "distances look at incoming weights, or at outgoing ones too",
        "rows": "features are compared by what a merge changes in the layers behind; or by rows, those of a group by "
        "their mean, with larger groups farther apart (ward) or not (mean); or by sums of rows as printed",
        "maximum": "what beta is a share of: the usual distance of two features, the largest, or that at every step",
        "norm": "BatchNorm is taken into the layer before it, which is exact, or summed as the paper's code does",
    }
    for name, known in CHOICES.items():
        command.add_argument(f"--{name}", choices=known, help=f"{words[name]} (default {known[0]})")
    command.add_argument(
        "--no-bias", dest="bias", action="store_const", const=False, help="leave biases out of distances"
    )
    command.add_argument(
        "--preset",
        choices=("printed", "paper-code"),
        help="options of Chen, Zhou and Yan (2024): Algorithm 1 as printed, or what their code does; options that are "
        "given beside it count",
    )
    command.add_argument(
        "--max-ratio", metavar="R", type=float, help="the largest share of a layer's features that may go"
    )
    add_data(command, "test images to score on, and at most so many training images for what looks at those")
    command.add_argument(
        "--reset",
        action="store_true",
        help="estimate the BatchNorm statistics of the smaller network again on training images, without labels; it "
        "is scored before and after",
    )
    command.add_argument("--out", metavar="DIR", help="write the smaller network, the account and a picture")
    add_json(command)


def add_dissect(command: ArgumentParser) -> None:
    """Arguments of `dissect`."""
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
    command.add_argument("--level", metavar="L", type=float, default=0.04, help="overlap that counts (default 0.04)")
    command.add_argument(
        "--share", metavar="S", type=float, default=0.005, help="of a unit's activations that are high (default 0.005)"
    )
    command.add_argument(
        "--null", metavar="N", type=int, default=1, help="how often chance is drawn; 0 for not (default 1)"
    )
    command.add_argument("--units", metavar="N", type=positive, default=6, help="best units in pictures (default 6)")
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    command.add_argument("--out", metavar="DIR", help="write the account, the curve, bars and the best units")
    add_json(command)
