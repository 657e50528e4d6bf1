"""The command line: `intertwine COMMAND …`. Arguments are read here; torch is loaded by the command that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from intertwine.commands.arguments import (
    ZOO,
    add_align,
    add_barrier,
    add_data,
    add_exit_codes,
    add_json,
    add_merge,
    add_model,
    add_pair,
    add_stitch,
    positive,
)
from intertwine.commands.feature_arguments import add_dissect, add_fold
from intertwine.commands.reproduce_arguments import add_reproduce
from intertwine.commands.study_arguments import add_report, add_study
from intertwine.errors import IntertwineError
from intertwine.version import VERSION

#: Packages that commands need beyond the core, and the extra of intertwine that installs each.
EXTRAS = {"rich": "cli", "sklearn": "data", "PIL": "data", "matplotlib": "plot", "polars": "frames"}
#: When a command that proves a symmetry has the exit code 1.
CERTIFICATE = "the certificate fails"


class Parser(argparse.ArgumentParser):
    """Help that ends with the exit codes. Sub-commands are of the same class, so that none can forget them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        add_exit_codes(self)


def parser() -> Parser:
    """All commands and their options."""
    top = Parser("intertwine", description="Find, prove and use the symmetries of any PyTorch network.")
    add_exit_codes(top, "the answer is no, or some of the work failed: see the help of the command")
    top.add_argument("--version", action="version", version=f"intertwine {VERSION}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    _add_inspect(commands.add_parser("inspect", help="what is the symmetry of this network, and does it hold?"))
    _add_canonicalize(commands.add_parser("canonicalize", help="its canonical form; which checkpoints are the same?"))
    _add_compare(commands.add_parser("compare", help="how similar are the layers of two networks, on real data?"))
    add_align(commands.add_parser("align", help="move one network onto another by a symmetry of both"))
    add_barrier(commands.add_parser("barrier", help="how much worse are the networks between two networks?"))
    add_merge(commands.add_parser("merge", help="one network out of several: aligned, averaged, mended"))
    add_stitch(commands.add_parser("stitch", help="join the front of one network to the back of another"))
    add_fold(commands.add_parser("fold", help="merge features that are nearly the same: a smaller network"))
    add_dissect(commands.add_parser("dissect", help="which concepts do single units stand for, in which basis?"))
    _add_zoo(commands.add_parser("zoo", help="train networks from many seeds at once; list and test them"))
    add_study(commands.add_parser("study", help="many networks, pairs, layers and verbs: one plan, one table"))
    add_reproduce(commands.add_parser("reproduce", help="tables and figures of the papers, beside the printed ones"))
    add_report(commands.add_parser("report", help="the results of a study as one HTML page"))
    _add_demo(commands.add_parser("demo", help="the whole story on real handwritten digits, in under two minutes"))
    return top


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.description = "Read the symmetry off a network, prove it on random elements, and show it."
    add_exit_codes(command, CERTIFICATE)
    add_model(command)
    command.add_argument(
        "--certify", action=argparse.BooleanOptionalAction, default=True, help="prove the symmetry in float64 (default)"
    )
    command.add_argument(
        "--trials", metavar="N", type=positive, default=3, help="random elements to prove it on (default 3)"
    )
    command.add_argument("--continuous", action="store_true", help="let whole matrices act where only linear maps meet")
    command.add_argument("--frozen", action="store_true", help="list every frozen axis with its reason")
    command.add_argument("--slots", action="store_true", help="list where each wire acts")
    add_json(command)
    command.add_argument("--svg", metavar="FILE", help="write a picture of the wires")


def _add_canonicalize(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Bring a network to its canonical form, which it shares with all networks that differ from it only by a "
        "symmetry. With --dedupe: find the checkpoints of a folder that are one network up to its symmetry."
    )
    add_exit_codes(command, CERTIFICATE)
    add_model(command)
    command.add_argument(
        "--order",
        choices=("lexicographic", "nodesort", "nodesort-printed"),
        default="lexicographic",
        help="how units are sorted (default lexicographic)",
    )
    command.add_argument(
        "--base", metavar="P", type=float, default=1.1, help="base of the NodeSort orders (default 1.1)"
    )
    command.add_argument("--out", metavar="FILE", help="write the canonical weights (safetensors)")
    command.add_argument(
        "--element", metavar="FILE", help="write the element that takes the model to its canonical form"
    )
    command.add_argument("--dedupe", metavar="DIR", help="compare all checkpoints of a folder")
    command.add_argument(
        "--tol", metavar="T", type=float, default=1e-6, help="relative difference up to which a copy counts (1e-6)"
    )
    command.add_argument(
        "--certify", action=argparse.BooleanOptionalAction, default=True, help="prove the symmetry first (default)"
    )
    add_json(command)


def _add_compare(command: argparse.ArgumentParser) -> None:
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
        "--policy", choices=("channels", "flatten", "pool", "tokens"), default="channels", help="what a feature is"
    )
    command.add_argument("--svg", metavar="FILE", help="write a heat map of the first measure")
    add_json(command)


def _add_zoo(command: argparse.ArgumentParser) -> None:
    command.description = "Networks of one architecture from many seeds, in a folder with a manifest."
    verbs = command.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="verb")
    _add_zoo_train(verbs.add_parser("train", help="train one network per seed, many at once"))
    listing = verbs.add_parser(
        "list", help="the networks of a zoo; without a folder: architectures, recipes, data sets"
    )
    listing.add_argument("folder", metavar="DIR", nargs="?", help="a folder that `zoo train` wrote")
    testing = verbs.add_parser("evaluate", help="measure the accuracy of a zoo's networks again")
    testing.add_argument("folder", metavar="DIR", help="a folder that `zoo train` wrote")
    testing.add_argument("--data-folder", metavar="DIR", help="where the data is (default: INTERTWINE_DATA)")
    testing.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    fetching = verbs.add_parser("download", help="fetch a data set and check it")
    fetching.add_argument("name", metavar="NAME", help="mnist, fashion-mnist or cifar10")
    fetching.add_argument("--folder", metavar="DIR", help="where it goes (default: the user's cache)")
    for verb in (listing, testing, fetching):
        add_json(verb)


def _add_zoo_train(command: argparse.ArgumentParser) -> None:
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
    command.add_argument("--recipe", metavar="NAME", help="how to train, see `zoo list` (default: fast, or plain)")
    command.add_argument("--epochs", metavar="N", type=positive, help="instead of the recipe's")
    command.add_argument("--batch", metavar="N", type=positive, help="images in a batch, instead of the recipe's")
    command.add_argument("--rate", metavar="R", type=float, help="learning rate, instead of the recipe's")
    command.add_argument("--spawn", metavar="N", type=int, help="share the first N epochs, then split")
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of the architecture; repeat it for several"
    )
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    command.add_argument("--precision", metavar="P", help="float64, float32, tf32 or bfloat16 (default on a GPU)")
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


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Train three small networks on 1,797 real handwritten digits, find and prove their symmetry, align, average, "
        "compare, stitch, fold and dissect them, and write a report that opens from disk. The plan is left beside the "
        "report. A second run into the same folder does only what is missing and writes the report again; delete "
        "the folder to begin anew."
    )
    add_exit_codes(command, "a certificate or a task fails")
    command.add_argument("--out", metavar="DIR", default="out", help="where the report goes (default: out)")
    add_json(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        return import_module(f"intertwine.commands.{options.command}").run(options)
    except IntertwineError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _fail(f"This command needs the package {error.name}: pip install 'intertwine[{EXTRAS[error.name]}]'.")
    except KeyboardInterrupt:
        print("intertwine: stopped", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"intertwine: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
