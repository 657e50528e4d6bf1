"""The kind "similarity": its plans, their runs in small, and values recomputed with plain numpy."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import intertwine as it
from intertwine.errors import InputError
from intertwine.lab.papers.experiments import ExperimentResult, find, names, plans_folder, reproduce
from intertwine.lab.papers.plan import Data, read_plan
from intertwine.lab.papers.similarity import (
    KERNELS,
    MEASURES,
    SimilaritySettings,
    cka_rows,
    gram_matrices,
    numbers,
    procrustes_rows,
)
from intertwine.lab.papers.work import networks_of, read_data
from intertwine.lab.zoo.datasets.dataset import Dataset

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = ["godfrey-table2", "godfrey-fig5", "godfrey-fig10"]
SLOW = ["godfrey-table4", "godfrey-fig2", "godfrey-fig9", "godfrey-fig11", "godfrey-fig16"]
PLACES = {"3": "2", "10": "9"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks of all plans, so that those which share a zoo train it once."""
    return tmp_path_factory.mktemp("similarity")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return read_data(Data("digits", enlarge=4, train=16, test=24))


@pytest.fixture(scope="module")
def networks() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """Two small networks, the second with a channel that is zero on all images at the first ReLU."""
    made: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(it.zoo.build("myrtle", widths=(5, 4, 6, 4), in_channels=1).eval())
    with torch.no_grad():
        made[1][1].weight[2], made[1][1].bias[2] = 0.0, -1.0
    return made[0], made[1]


def seen(model: torch.nn.Sequential, data: Dataset, at: str) -> np.ndarray:
    """What a Sequential computes up to a place: (images, channels, positions)."""
    with torch.no_grad():
        return model[: int(at) + 1](data.inputs(data.test_images)).flatten(2).double().numpy()


def rows_of(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAST + SLOW)
@pytest.mark.parametrize("scale", ["paper", "gpu", "cpu"])
def test_a_plan_names_what_there_is(name: str, scale: str) -> None:
    plan = find(name, scale)
    asked: SimilaritySettings = plan.settings
    network = it.zoo.build(networks_of(plan).architecture, **networks_of(plan).options)
    modules = dict(network.named_modules())
    kinds = {type(modules[place]).__name__ for place in asked.at.values()}
    assert kinds == {"ReLU"}
    relus = [place for place, module in modules.items() if isinstance(module, torch.nn.ReLU)]
    assert list(asked.at.values()) == relus, "every ReLU, in the order of the network"
    assert all(label.endswith("*") == place.endswith("relu1") for label, place in asked.at.items())
    if asked.family == "procrustes":
        assert plan.labels == tuple(asked.at)
        assert set(plan.printed) <= set(MEASURES)
    else:
        ends = [*asked.at, "whole matrix"]
        assert set(plan.printed) <= {f"{series}, {end}" for series in KERNELS for end in ends}


def test_plans_that_share_networks_ask_for_the_same_ones() -> None:
    """A folder of networks that was trained otherwise is refused, so all plans must agree."""
    for scale in ("paper", "gpu", "cpu"):
        found: dict[str, tuple[str, object]] = {}
        for name in names():
            if not name.startswith("godfrey"):
                continue
            plan = find(name, scale)
            if plan.networks is None:
                continue
            asked = {key: value for key, value in asdict(plan.networks).items() if key not in ("pool", "vary")}
            other, same = found.setdefault(plan.networks.name, (name, (asked, plan.data)))
            assert (asked, plan.data) == same, f"{name} and {other} at scale {scale}"


@pytest.mark.parametrize("wrong", [("procrustes", "procrustean"), ("similarity]", "similar]")])
def test_a_plan_that_is_wrong_is_refused(tmp_path: Path, wrong: tuple[str, str]) -> None:
    text = (plans_folder() / "godfrey-table2.toml").read_text(encoding="utf-8")
    file = tmp_path / "wrong.toml"
    file.write_text(text.replace(f'"{wrong[0]}"', f'"{wrong[1]}"').replace(f"[{wrong[0]}", f"[{wrong[1]}"))
    said = "Unknown family 'procrustean'. Did you mean 'procrustes'?" if wrong[0] == "procrustes" else "entry 'similar'"
    with pytest.raises(InputError, match=re.escape(said)):
        read_plan(file)


# -- runs --------------------------------------------------------------------------------------------------------------


def check_run(name: str, folder: Path) -> ExperimentResult:
    result = reproduce(name, "cpu", folder=folder)
    asked = find(name, "cpu").settings
    series = MEASURES if asked.family == "procrustes" else [f"{kernel}, diagonal" for kernel in KERNELS]
    for one in series:
        assert list(result.numbers[one]) == list(asked.at)
        assert all(-1 <= value <= 1 for some in result.numbers[one].values() for value in some)
    # drawn with the printed numbers too, which a small run does not have
    full = ExperimentResult(result.manifest | {"plan": find(name).to_dict()}, result.rows)
    assert full.plot(folder / f"{name}.svg").stat().st_size > 10_000
    assert {line.verdict for line in full.lines()} <= {"agrees", "differs", "no interval"}
    assert all(not claim.seen.startswith("no numbers to test it on") for claim in full.claims())
    return result


@pytest.mark.parametrize("name", FAST)
def test_a_plan_runs_in_small(name: str, folder: Path) -> None:
    first = check_run(name, folder)
    assert reproduce(name, "cpu", folder=folder).rows == first.rows, "taken up again"


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_plan_runs_in_small(name: str, folder: Path) -> None:
    check_run(name, folder)


# -- values ------------------------------------------------------------------------------------------------------------


def matched(x: np.ndarray, y: np.ndarray) -> float:
    """The largest sum of products over permutations of columns."""
    products = x.T @ y
    i, j = linear_sum_assignment(products, maximize=True)
    return float(products[i, j].sum())


def unit(x: np.ndarray, center: bool) -> np.ndarray:
    x = x - x.mean(0) if center else x
    lengths = np.linalg.norm(x, axis=0)
    return x / np.where(lengths > 1e-12, lengths, 1.0)


def nuclear(x: np.ndarray, y: np.ndarray) -> float:
    """1 − δ/2 of the best rotation, by the nuclear norm, as in section D.7.1."""
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(1 - np.sqrt(2 - 2 * np.linalg.svd(x.T @ y, compute_uv=False).sum()) / 2)


def test_procrustes_values_are_those_of_numpy(
    networks: tuple[torch.nn.Sequential, torch.nn.Sequential], data: Dataset
) -> None:
    found = procrustes_rows(*networks, data, SimilaritySettings("procrustes", PLACES, batch=10))
    for row in found:
        x, y = (rows_of(seen(model, data, PLACES[row["label"]])) for model in networks)
        d, dead = x.shape[1], [int((side == 0).all(0).sum()) for side in (x, y)]
        live = 2 * d - sum(dead)
        left = live - 2 * matched(unit(x, False), unit(y, False))
        expected = {"G_ReLU, as printed": 1 - np.sqrt(left) / (2 * np.sqrt(d))}
        expected["G_ReLU, without dead channels"] = 1 - np.sqrt(left / (2 * live))
        expected["orthogonal, as printed"] = nuclear(x, y)
        a, b = (unit(side[:, (side != 0).any(0)], True) for side in (x, y))
        expected["G_ReLU, corrected"] = 1 - np.sqrt((live - 2 * matched(a, b)) / (2 * live))
        expected["orthogonal, corrected"] = nuclear(a, b)
        assert row["values"] == pytest.approx(expected, abs=1e-6)
        assert row["dead"] == pytest.approx([count / d for count in dead])
    first = found[0]
    assert first["dead"][1] > 0
    assert first["values"]["G_ReLU, as printed"] > first["values"]["G_ReLU, without dead channels"]
    assert first["unrelated"]["G_ReLU, corrected"] < first["values"]["G_ReLU, corrected"]


def hsic(k: np.ndarray, m: np.ndarray) -> float:
    """HSIC₁ term by term, as printed by Song et al. 2012."""
    k, m, n = k - np.diag(np.diag(k)), m - np.diag(np.diag(m)), len(k)
    middle = k.sum() * m.sum() / ((n - 1) * (n - 2))
    return float((np.trace(k @ m) + middle - 2 / (n - 2) * (k.sum(0) @ m.sum(0))) / (n * (n - 3)))


def gram(x: np.ndarray, series: str) -> np.ndarray:
    if series == "orthogonal, corrected":
        return x.reshape(len(x), -1) @ x.reshape(len(x), -1).T
    x = x - x.mean((0, 2), keepdims=True)
    lengths = np.sqrt((x**2).sum((0, 2), keepdims=True))
    if series.endswith("corrected"):
        x, lengths = (part[:, lengths[0, :, 0] > 1e-12] for part in (x, lengths))
    each = np.einsum("icp,jcp->ijc", *[x / np.where(lengths > 1e-12, lengths, 1.0)] * 2)
    return each.max(2) if series.startswith("G_ReLU") else each.sum(2)


def test_cka_values_are_those_of_numpy(
    networks: tuple[torch.nn.Sequential, torch.nn.Sequential], data: Dataset
) -> None:
    asked = SimilaritySettings("cka", PLACES)
    shown = [gram_matrices(model, data, asked) for model in networks]
    *found, dead = cka_rows(shown[0], shown[1], asked)
    assert [row["series"] for row in found] == list(KERNELS)
    for row in found:
        sides = [[gram(seen(model, data, at), row["series"]) for at in PLACES.values()] for model in networks]
        expected = [[hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m)) for m in sides[1]] for k in sides[0]]
        assert np.array(row["matrix"]) == pytest.approx(np.array(expected), abs=5e-6)
    counted = [[(seen(model, data, at) == 0).all((0, 2)).mean() for model in networks] for at in PLACES.values()]
    assert np.array(dead["dead"]) == pytest.approx(np.array(counted))
    assert counted[0][1] > 0


def test_only_true_linear_cka_forgives_rotations(data: Dataset, networks: tuple[torch.nn.Module, ...]) -> None:
    """Behind the rotation of channels, "orthogonal" CKA as printed is below 1."""
    q = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))[0]
    mix = torch.nn.Conv2d(5, 5, 1, bias=False)
    mix.weight.data = q[:, :, None, None]
    turned = torch.nn.Sequential(*deepcopy(list(networks[0].children()))[:3], mix)
    still = torch.nn.Sequential(*deepcopy(list(networks[0].children()))[:3], torch.nn.Identity())
    asked = SimilaritySettings("cka", {"3": "3"})
    *found, _ = cka_rows(gram_matrices(still, data, asked), gram_matrices(turned, data, asked), asked)
    values = {row["series"]: row["matrix"][0][0] for row in found}
    assert values["orthogonal, corrected"] == pytest.approx(1, abs=1e-5)
    assert values["orthogonal, as printed"] < 0.99


def test_the_numbers_of_matrices() -> None:
    plan = {"settings": {"family": "cka", "at": {"1": "a", "2*": "b", "3": "c"}}}
    matrix = [[0.9, 0.2, 0.4], [0.1, 0.5, None], [0.3, 0.2, 0.7]]
    found = numbers(plan, [{"series": "G", "matrix": matrix}, {"series": "dead channels", "dead": [[0, 0.5]] * 3}])
    assert found["G, 2*"] == {"1": [0.1], "2*": [0.5]}
    assert found["G, diagonal"] == {"1": [0.9], "2*": [0.5], "3": [0.7]}
    assert found["G, diagonal, around"] == {"2*": [pytest.approx(0.8)]}
    assert found["G, other layers"]["1"] == [pytest.approx(0.3)]
    assert found["G, whole matrix"] == {"largest": [0.9], "smallest": [0.1]}
    assert found["dead channels"]["3"] == [0.25]
