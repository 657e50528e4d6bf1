"""Arguments of `intertwine canonicalize`."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from intertwine.commands.arguments.shared import CERTIFICATE, add_exit_codes, add_json, add_model


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
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
        "--certify", action=BooleanOptionalAction, default=True, help="prove the symmetry first (default)"
    )
    add_json(command)
