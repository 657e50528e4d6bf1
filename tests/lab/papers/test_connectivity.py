"""Reproducing Zhou et al. 2023: the plans name what exists, one pair agrees with plain numpy, every name runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from intertwine.errors import InputError
from intertwine.lab.papers import connectivity as home
from intertwine.lab.papers.connectivity import ConnectivitySettings, numbers
from intertwine.lab.papers.experiments import ExperimentResult, find, plans_folder, reproduce
from intertwine.lab.papers.work import networks_of, read_data
from intertwine.lab.zoo.folder import load
from intertwine.lab.zoo.networks.registry import build

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = sorted(path.stem for path in plans_folder().glob("zhou-*.toml"))
FAST = ("zhou-fig3-mlp", "zhou-conditions", "zhou-eq2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all experiments here, as they share their networks."""
    return tmp_path_factory.mktemp("zhou")


@pytest.fixture(scope="module")
def features(folder: Path) -> ExperimentResult:
    return reproduce("zhou-fig3-mlp", "cpu", folder=folder)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_of_networks_and_layers_that_exist(name: str) -> None:
    plan = find(name)
    networks = networks_of(plan)
    model = build(networks.architecture, **networks.options)
    modules = dict(model.named_modules())
    assert {type(module).__name__ for module in modules.values()} & set(plan.settings.layers)
    for scale in ("paper", "gpu"):
        scaled = find(name, scale)
        assert len(scaled.claims) == len(plan.claims) > 0
        assert set(scaled.settings.ways) == {"spawned", "independent", "weights", "activations"}
    for claim in plan.claims:
        layers = set(claim.get("labels", ())) - {"error"}
        assert layers <= set(modules), claim["says"]


def test_spawned_networks_share_their_recipe_but_not_their_folder_with_independent_ones() -> None:
    plan = find("zhou-fig3-mlp", "gpu")
    apart = networks_of(home.independent(plan))
    assert (apart.name, apart.recipe, apart.changes) == ("zhou-mlp-independent", "zhou-independent", {"epochs": 10})
    assert apart.options == networks_of(plan).options


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"form": "feature"},
            "Unknown form 'feature'. Did you mean 'features', 'factors'? Choose one of: features",
        ),
        (
            {"form": "features", "ways": ["spawn"]},
            "Unknown way 'spawn'. Did you mean 'spawned'? Choose one of: spawned, independent, weights",
        ),
        (
            {"form": "features", "independent": {"name": "x"}},
            "independent: Unknown entry 'name'. Choose one of: recipe, changes",
        ),
    ],
)
def test_words_that_nothing_is_known_of_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        ConnectivitySettings(**settings).check(find("zhou-fig3-mlp"), "plan")
    assert says in str(error.value)


# -- one pair, by hand -------------------------------------------------------------------------------------------------


def weights(folder: Path, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of the linear layers of a perceptron, in float64."""
    model = load(folder / "cpu" / "zhou-mlp").seed(seed)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [(m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in linear]


def layers(network: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> list[np.ndarray]:
    """What every layer gives out: linear, ReLU, linear, …"""
    found = []
    for i, (weight, bias) in enumerate(network):
        x = x @ weight.T + bias
        found.append(x)
        if i + 1 < len(network):
            x = np.maximum(x, 0)
            found.append(x)
    return found


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The mean of 1 − cos over the samples that have an angle: features of zero have none."""
    sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    live = sizes > 0
    return float((1 - (a * b).sum(1)[live] / sizes[live]).mean())


def relative(found: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(2 * (found**2).sum() / ((first**2).sum() + (second**2).sum())))


def test_layers_and_line_agree_with_plain_numpy(features: ExperimentResult, folder: Path) -> None:
    data = read_data(find("zhou-fig3-mlp", "cpu").data or pytest.fail("no data"))
    x = data.inputs(data.test_images, torch.float64).flatten(1).numpy()
    a, b = weights(folder, 0), weights(folder, 1)
    mixed = [(0.25 * wa + 0.75 * wb, 0.25 * ba + 0.75 * bb) for (wa, ba), (wb, bb) in zip(a, b, strict=True)]
    seen_a, seen_b, seen = layers(a, x), layers(b, x), layers(mixed, x)
    rows = [r for r in features.rows if r["way"] == "spawned" and r.get("alpha") == 0.25]
    assert [row["layer"] for row in rows] == ["1", "2", "3", "4", "5", "6", "7"]
    for row, of_a, of_b, of_mix in zip(rows, seen_a, seen_b, seen, strict=True):
        # the networks run in single precision, so very small distances carry its rounding
        assert row["baseline"] == pytest.approx(apart(of_a, of_b), rel=1e-3, abs=1e-8)
        assert row["llfc"] == pytest.approx(apart(of_mix, 0.25 * of_a + 0.75 * of_b), rel=1e-2, abs=1e-9)
    (point,) = [r for r in features.rows if r["way"] == "spawned" and r.get("t") == 0.75]
    assert point["error"] == pytest.approx((seen[-1].argmax(1) != data.test_labels.numpy()).mean(), abs=1 / len(x))


def test_conditions_and_factors_agree_with_plain_numpy(features: ExperimentResult, folder: Path) -> None:
    conditions, factors = (reproduce(name, "cpu", folder=folder) for name in FAST[1:])
    data = read_data(find("zhou-fig3-mlp", "cpu").data or pytest.fail("no data"))
    x = data.inputs(data.test_images, torch.float64).flatten(1).numpy()
    a, b = weights(folder, 0), weights(folder, 1)
    seen_a, seen_b = layers(a, x), layers(b, x)
    found = conditions.numbers
    (agree,) = found["spawned: sign agreement"]["4"]
    assert agree == pytest.approx((seen_a[2] * seen_b[2] >= 0).mean(), abs=1e-3)
    weight, inputs = a[1][0] - b[1][0], seen_a[1] - seen_b[1]
    (residual,) = found["spawned: commutativity"]["3"]
    assert residual == pytest.approx(
        relative(inputs @ weight.T, seen_a[1] @ a[1][0].T, seen_b[1] @ b[1][0].T), rel=0.01
    )
    (first,), (second,) = (factors.numbers[f"spawned: {what} apart"]["3"] for what in ("weights", "inputs"))
    assert first == pytest.approx(relative(weight, a[1][0], b[1][0]), rel=1e-3)
    assert second == pytest.approx(relative(inputs, seen_a[1], seen_b[1]), rel=1e-3)


def test_results_hold_what_their_form_needs_and_no_more(features: ExperimentResult, folder: Path) -> None:
    about = {"pair", "front_seed", "back_seed", "front_group", "back_group", "way", "statistics"}
    layer = {"layer", "kind", "alpha"}
    factors = reproduce("zhou-eq2", "cpu", folder=folder)
    assert set().union(*factors.rows) == about | layer | {"weights_apart", "inputs_apart", "commutativity"}
    assert set().union(*features.rows) == about | layer | {"llfc", "baseline", "c", "c_std", "t", "loss", "error"}


def test_what_was_found_is_kept(features: ExperimentResult, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(home, "connectivity", never)
    assert reproduce("zhou-fig3-mlp", "cpu", folder=folder).rows == features.rows
    assert reproduce("zhou-conditions", "cpu", folder=folder).rows


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_matching_brings_the_independent_pair_nearer(features: ExperimentResult) -> None:
    found = features.numbers
    logits = {way: found[f"{way}: mix"]["7"][0] for way in ("spawned", "independent", "weights", "activations")}
    assert logits["spawned"] < logits["weights"] < logits["independent"]
    assert found["spawned: networks"]["5"][0] < 0.5 * found["independent: networks"]["5"][0]


def test_barriers_and_the_bound_of_the_lemma() -> None:
    about = {"way": "spawned", "pair": 0, "statistics": "reset"}
    line = [(0.0, 0.02, 1.0), (0.5, 0.07, 3.0), (1.0, 0.04, 2.0)]
    rows = [about | {"t": t, "error": error, "loss": loss} for t, error, loss in line]
    found = numbers({"settings": {"form": "features"}}, rows)
    assert found["spawned, statistics reset: barrier"] == {"error": [pytest.approx(4.0)], "loss": [1.5]}
    assert found["spawned, statistics reset: error above Err_A + Err_B"]["largest"] == [pytest.approx(1.0)]


def test_of_several_mixes_the_furthest_counts() -> None:
    about = {"way": "weights", "pair": 0, "statistics": "mixed", "layer": "1", "baseline": 0.5}
    rows = [about | {"alpha": alpha, "llfc": llfc} for alpha, llfc in ((0.25, 0.1), (0.5, 0.2), (0.75, 0.05))]
    found = numbers({"settings": {"form": "features"}}, rows)
    assert found["weights: mix"] == {"1": [0.2]}
    assert found["weights: mix / networks"] == {"1": [0.4]}


# -- every name --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_name_runs_at_scale_cpu(name: str, folder: Path, tmp_path: Path) -> None:
    found = reproduce(name, "cpu", folder=folder)
    for claim in find(name, "gpu").claims:
        series = claim.get("rising") or [claim["series"]]
        assert all(found.numbers.get(one) for one in series), claim["says"]
    picture = found.plot(tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert "spawned" in picture
    assert found.save(tmp_path / "result.json").stat().st_size < 500_000
