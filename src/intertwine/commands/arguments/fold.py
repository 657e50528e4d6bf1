"""Arguments of `intertwine fold`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import ZOO, add_data, add_json, add_model, number
from intertwine.fold.options import CHOICES

#: What the options of `fold` that are a choice of words decide.
WORDS = {
    "schedule": "one layer after the other, or one merge per layer and sweep",
    "terms": "distances look at incoming weights, or at outgoing ones too",
    "rows": "features are compared by what a merge changes in the layers behind; or by rows, those of a group by "
    "their mean, with larger groups farther apart (ward) or not (mean); or by sums of rows as printed",
    "maximum": "what beta is a share of: the usual distance of two features, the largest, or that at every step",
    "norm": "BatchNorm is taken into the layer before it, which is exact, or summed as the paper's code does",
}


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Merge the features of a network that are nearly the same, or take out those that others can express, without "
        "training; the result is a smaller network of the same kind. Say how much: by --beta, by --parameters, by "
        "--floor or by --widths. With --data, both networks are scored on test images." + ZOO
    )
    add_model(command)
    _add_how_far(command)
    _add_ways(command)
    _add_distances(command)
    add_data(command, "test images to score on, and at most so many training images for what looks at those")
    command.add_argument(
        "--reset",
        action="store_true",
        help="estimate the BatchNorm statistics of the smaller network again on training images, without labels; it "
        "is scored before and after",
    )
    command.add_argument(
        "--out",
        metavar="DIR",
        help="write the smaller network and the account; and a picture, unless features were absorbed",
    )
    add_json(command)


def _add_how_far(command: ArgumentParser) -> None:
    """A number of parameters, an accuracy, a width or a distance: one of them says where to stop."""
    command.add_argument(
        "--parameters",
        metavar="SHARE|NUMBER",
        type=number,
        help="fold to so many parameters, each layer as far as costs least: a share below 1, or a number",
    )
    command.add_argument(
        "--floor",
        metavar="ACCURACY",
        type=number,
        help="fold as far as this accuracy allows, such as 0.9. It is measured on half of the training images that "
        "--samples allows, never on test images; a network that has learnt them does better on them than on new ones",
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
    command.add_argument(
        "--max-ratio", metavar="R", type=number, help="the largest share of a layer's features that may go"
    )


def _add_ways(command: ArgumentParser) -> None:
    """How features go: absorbed by others, merged in pairs, in clusters, or by what they give on images."""
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


def _add_distances(command: ArgumentParser) -> None:
    """What makes two features differ, where pairs are merged; the paper's choices have a name."""
    for name, known in CHOICES.items():
        command.add_argument(f"--{name}", choices=known, help=f"{WORDS[name]} (default {known[0]})")
    command.add_argument(
        "--no-bias", dest="bias", action="store_const", const=False, help="leave biases out of distances"
    )
    command.add_argument(
        "--preset",
        choices=("printed", "paper-code"),
        help="options of Chen, Zhou and Yan (2024): Algorithm 1 as printed, or what their code does; options that are "
        "given beside it count",
    )
