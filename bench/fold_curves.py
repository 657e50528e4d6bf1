"""Accuracy against parameters: a trained network folded and pruned by every method, at a grid of settings.

A method is one line of METHODS. Nothing is trained after it, and no labels are used. Accuracy is measured on the
result, and again with BatchNorm statistics re-estimated on training images.
"""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from align_quality import batches_on
from safetensors.torch import save_file
from torch import Tensor, nn

import intertwine as it
from intertwine.data.batchnorm import batch_norms, reset_statistics
from intertwine.fold.budget import fold_to
from intertwine.fold.clustering import fold_activations, fold_kmeans
from intertwine.fold.fold import fold
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.fold.prune import prune
from intertwine.fold.result import count_flops, count_parameters
from intertwine.lab.papers.work import PublishedNetworks

PEER = Path(__file__).with_name("fold_peer.py")
#: The grids: the printed betas and larger ones; kept shares of features or of parameters.
BETAS = (0.01, 0.03, 0.05, 0.07, 0.1, 0.12, 0.14, 0.15, 0.18, 0.2, 0.25, 0.3)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
#: The normalisation of the published Tiny-10 networks: mean and deviation of pixels from 0 to 1.
Batches = list[tuple[Tensor, Tensor]]


class PeerFailed(Exception):
    """torch-pruning could not prune a network."""


@dataclass(frozen=True)
class Case:
    """A trained network and its data; `about` identifies the network in results."""

    model: nn.Module
    built: tuple[str, Mapping[str, Any]]  # architecture and its options
    about: dict[str, Any]
    train: Batches
    test: Batches
    device: str
    peer: str | None = None  # an interpreter with torch-pruning
    reset: bool = True  # whether accuracy is also measured with re-estimated statistics

    @property
    def example(self) -> Tensor:
        """One example image."""
        return self.train[0][0][:1].cpu()


# -- methods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """`make` returns the smaller network for a value of `knob`: "beta", or the kept "share"."""

    knob: str
    make: Callable[[Case, float], nn.Module]


def folded(case: Case, beta: float, **options: Any) -> nn.Module:
    return fold(case.model, case.example, beta=beta, **options).model


def pruned(case: Case, share: float, **options: Any) -> nn.Module:
    return prune(case.model, case.example, widths=share, **options).model


def absorbed(case: Case, share: float, **options: Any) -> nn.Module:
    return fold_to(case.model, case.example, parameters=share, **options).model


def absorbed_seen(case: Case, share: float) -> nn.Module:
    """With training images, without labels, instead of random inputs."""
    data = [(x.cpu(), None) for x, _ in case.train]
    return fold_to(case.model, case.example, parameters=share, data=data).model


def clustered(case: Case, share: float, **options: Any) -> nn.Module:
    return fold_kmeans(case.model, case.example, widths=share, **options).model


def by_activations(case: Case, share: float) -> nn.Module:
    return fold_activations(case.model, [(x.cpu(), None) for x, _ in case.train], widths=share).model


def by_torch_pruning(case: Case, share: float) -> nn.Module:
    """The network pruned by torch-pruning with its default score, in its environment."""
    if case.peer is None:
        raise PeerFailed("--peers PYTHON is missing")
    name, options = case.built
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / x) for x in ("whole.safetensors", "pruned.pt")]
        save_file({n: t.contiguous() for n, t in case.model.state_dict().items()}, files[0])
        call = [case.peer, str(PEER), name, json.dumps(dict(options)), str(case.example.shape[-1]), str(share), *files]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerFailed(done.stderr.strip().splitlines()[-1])
        return torch.load(files[1], weights_only=False)  # a pickled module, written by bench/fold_peer.py


METHODS = {
    "fold": Method("beta", folded),
    "fold-largest": Method("beta", partial(folded, maximum="fixed")),
    "fold-printed": Method("beta", partial(folded, **PRINTED)),
    "fold-paper-code": Method("beta", partial(folded, **PAPER_CODE)),
    "fold-to": Method("share", absorbed),
    "fold-to-seen": Method("share", absorbed_seen),
    "fold-to-merge": Method("share", partial(absorbed, how="merge")),
    "k-means": Method("share", clustered),
    "k-means-repair": Method("share", partial(clustered, repair="variances")),
    "activations": Method("share", by_activations),
    "prune-l1": Method("share", pruned),
    "prune-gamma": Method("share", partial(pruned, score="gamma")),
    "prune-random": Method("share", partial(pruned, score="random")),
    "prune-l1-across": Method("share", partial(pruned, across=True)),
    "prune-gamma-across": Method("share", partial(pruned, score="gamma", across=True)),
    "torch-pruning": Method("share", by_torch_pruning),
}


# -- networks ----------------------------------------------------------------------------------------------------------


def opened(name: str, zoo: str | None, number: int, seen: int, test: int, device: str, peer: str | None) -> Case:
    """A network of a zoo, or without one of the published Tiny-10 networks, and its images."""
    if zoo is None and name != "tiny10":
        raise SystemExit(f"The trained {name} networks are missing. Pass --zoo FOLDER; `train` makes one.")
    if zoo is None:
        published = PublishedNetworks("tiny10")
        model, data = published.seed(number), published.normalised(it.zoo.data("cifar10"))
        built: tuple[str, Mapping[str, Any]] = "tiny10", {}
        about: dict[str, Any] = {"architecture": "tiny10", "recipe": "published", "weight_decay": 1e-4, "seed": number}
    else:
        held = it.zoo.load(zoo)
        plan = held.manifest.plan
        if plan.architecture["name"] != name:
            raise SystemExit(f"{zoo} holds networks of {plan.architecture['name']}, not of {name}.")
        model, data = held[number], held.dataset()
        built = name, plan.architecture["options"]
        about = {key: plan.recipe[key] for key in ("weight_decay", "epochs")}
        about |= {"architecture": name, "recipe": plan.recipe["name"], "seed": held.seeds[number]}
    data = data.subset(min(seen, len(data.labels)), min(test, len(data.test_labels)))
    train, held_out = (batches_on(data, split, device) for split in ("train", "test"))
    about |= {"test": len(data.test_labels), "seen": len(data.labels)}
    return Case(model, built, about, train, held_out, device, peer)


# -- rows --------------------------------------------------------------------------------------------------------------


def accuracy(model: nn.Module, batches: Batches) -> float:
    """The accuracy."""
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


def scored(model: nn.Module, case: Case) -> dict[str, Any]:
    """The remaining parameters and the accuracy of a network."""
    costs = [(count_parameters(m), count_flops(m, ((case.example,), {}))) for m in (case.model, model)]
    placed = model.to(case.device).eval()
    reset = reset_statistics(placed, case.train).eval() if case.reset and batch_norms(placed) else None
    return {
        "parameters": costs[1][0], "parameters_share": costs[1][0] / costs[0][0],
        "flops_share": costs[1][1] / costs[0][1], "accuracy": accuracy(placed, case.test),
        "accuracy_reset": None if reset is None else accuracy(reset, case.test),
    }  # fmt: skip


def measure(case: Case, method: str, value: float | None) -> dict[str, Any]:
    """One row; the method "none" does not change the network."""
    said = case.about | {"method": method, "value": value}
    start = time.perf_counter()
    if method == "none" or value is None:
        return said | {"knob": None, "seconds": 0.0} | scored(copy.deepcopy(case.model), case)
    said["knob"] = METHODS[method].knob
    try:
        model = METHODS[method].make(case, value)
    except (PeerFailed, it.InputError) as error:  # an unreachable share or a failed peer is noted in its row
        return said | {"failed": str(error)}
    seconds = time.perf_counter() - start
    return said | {"seconds": seconds} | scored(model, case)


def settings(methods: list[str], betas: tuple[float, ...], shares: tuple[float, ...]) -> Iterator[tuple[str, Any]]:
    """(method, value) of every row."""
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise SystemExit(f"There is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    yield "none", None
    for method in methods:
        yield from ((method, value) for value in (betas if METHODS[method].knob == "beta" else shares))
