"""Arguments that several commands share, and those of `align`, `barrier`, `merge` and `stitch`; none loads torch."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser

MODEL = (
    "path/to/file.py:factory, timm:NAME, torchvision:NAME, hf:CONFIG (a transformers model type or a config.json), or "
    "zoo:NAME (such as zoo:myrtle)"
)
ZOO = " A network is also named by a zoo's folder and a seed: zoos/myrtle:3."


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def add_model(command: ArgumentParser) -> None:
    """How a command is given one model."""
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument("--weights", metavar="FILE", help="a checkpoint: safetensors, or a torch.save file of tensors")
    add_input(command)


def add_pair(command: ArgumentParser) -> None:
    """How a command is given two."""
    command.add_argument("first", metavar="A", help=MODEL)
    command.add_argument("second", metavar="B", help="likewise")
    command.add_argument("--weights", metavar="FILE", help="a checkpoint of A")
    command.add_argument("--weights-b", metavar="FILE", help="a checkpoint of B")


def add_input(command: ArgumentParser) -> None:
    """How a command is told what a model is called with."""
    command.add_argument(
        "--input",
        metavar="SHAPE",
        action="append",
        default=[],
        help="an example input such as 1x3x224x224, int:1x16 for integer ids, NAME=SHAPE by keyword; repeat it for "
        "several inputs. Found automatically for timm, torchvision, hf and zoo, and through a function "
        "example_inputs() in your file",
    )


def add_data(command: ArgumentParser, samples: str, default: str | None = None, needed: bool = False) -> None:
    """How a command is given images; `samples` says what they are for, which a number limits."""
    words = "a data set: digits, mnist, fashion-mnist, cifar10 or folder:PATH"
    words += f" (default: {default})" if default else ""
    command.add_argument("--data", metavar="NAME", default=default, required=needed, help=words)
    command.add_argument("--data-folder", metavar="DIR", help="where it is (default: INTERTWINE_DATA)")
    command.add_argument("--samples", metavar="N", type=positive, default=1000, help=f"{samples} (default 1000)")
    command.add_argument("--batch", metavar="N", type=positive, default=250, help="images at once (default 250)")


def add_json(command: ArgumentParser) -> None:
    """How a command is asked for JSON."""
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_exit_codes(command: ArgumentParser, one: str = "a fault in intertwine itself, with a traceback") -> None:
    """What a command's help ends with; `one` says when its exit code is 1."""
    command.epilog = (
        f"Exit code: 0 done; 1 {one}; 2 not carried out, standard error says why and what to do; 130 stopped by hand."
    )


# -- align, barrier, merge, stitch -------------------------------------------------------------------------------------


def add_align(command: ArgumentParser) -> None:
    """Arguments of `align`."""
    command.description = (
        "Move network B onto network A by an element of their symmetry, which does not change its function. With "
        "--data, the barrier between the two is measured before and after, on test images." + ZOO
    )
    add_pair(command)
    add_input(command)
    _add_method(
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


def add_barrier(command: ArgumentParser) -> None:
    """Arguments of `barrier`."""
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
        action=argparse.BooleanOptionalAction,
        default=None,
        help="estimate BatchNorm statistics again at every point, on training images (default where there is "
        "BatchNorm); the line without is shown beside it",
    )
    command.add_argument("--plot", metavar="FILE", help="draw both curves (svg or png)")
    add_json(command)


def add_merge(command: ArgumentParser) -> None:
    """Arguments of `merge`."""
    command.description = (
        "One network out of several of one architecture: moved into a common frame, averaged, mended. With --data, it "
        "is compared with the given networks and with their plain mean, on test images." + ZOO
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
    _add_method(command, "as for align; also none (the plain mean), sorted (the mean of NodeSort forms)")
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


def add_stitch(command: ArgumentParser) -> None:
    """Arguments of `stitch`."""
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
        "--recipe", metavar="NAME", default="intertwine", help="or godfrey, csiszarik: those of papers"
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
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    command.add_argument(
        "--out", metavar="DIR", help="write maps, records and a picture; a run that was stopped goes on from there"
    )
    add_json(command)


def _add_method(command: ArgumentParser, methods: str) -> None:
    command.add_argument("--method", metavar="NAME", default="weights", help=methods)
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of the method; repeat it for several"
    )
    command.add_argument("--seed", metavar="N", type=int, default=0, help="of the search (default 0)")
