"""The kind `dissection` on its tiny plans: one network of each kind, one epoch; and the results that were measured."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from intertwine.errors import InputError
from intertwine.inspect.rotation import rotation
from intertwine.reproduce.experiments import Result, find, read_result, reproduce
from intertwine.reproduce.kinds.dissection import KIND
from intertwine.reproduce.kinds.dissection.fractions import WITH, WITHOUT
from intertwine.zoo.concepts import CATEGORIES, concept_images
from intertwine.zoo.folder import load
from intertwine.zoo.networks.registry import build

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
NAMES = ("godfrey-fig3", "godfrey-fig18", "godfrey-fig19")


@cache
def tiny() -> tuple[dict[str, Result], nn.Module, list[str]]:
    """All plans at scale cpu in one folder, run once per process; the network with the ReLU; what was done."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        found = {name: reproduce(name, "cpu", folder=folder, tell=said.append) for name in NAMES}
        zoo = load(next(path for path in Path(folder).rglob("resnet20-concepts-residual_relu1")))
        return found, zoo.seed(0), said


# -- the whole run -----------------------------------------------------------------------------------------------------


def test_000_g73_every_plan_runs_and_draws(tmp_path: Path) -> None:
    for name, result in tiny()[0].items():
        assert len(result.rows) == 2 * 3 * 2, "kinds, powers, rotations"
        assert {row["kind"] for row in result.rows} == {WITH, WITHOUT}
        assert all(0 <= row["fraction"] <= 1 for row in result.rows)
        assert result.plot(tmp_path / f"{name}.svg").stat().st_size > 1000


def test_the_figures_share_networks_and_dissections() -> None:
    """Figure 18 looks at what figure 3 found, figure 19 at another place of the same networks."""
    found, _, said = tiny()
    assert found["godfrey-fig18"].rows == found["godfrey-fig3"].rows
    assert {row["at"] for row in found["godfrey-fig19"].rows} == {"layer3.2.relu1"}
    accuracies = [{row["accuracy"] for row in found[name].rows} for name in ("godfrey-fig3", "godfrey-fig19")]
    assert accuracies[0] == accuracies[1]
    assert [line for line in said if line.startswith("dissection, pair")] == [
        *("dissection, pair 1 of 2", "dissection, pair 2 of 2") * 3,
    ]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_000_g73_a_fraction_is_that_of_brute_force(alpha: float) -> None:
    """Thresholds by numpy.quantile and overlaps one unit and concept at a time, on the network of the run."""
    results, model, _ = tiny()
    settings = results["godfrey-fig3"].plan["settings"]
    seen = concept_images(settings["seen"], settings["seen_seed"])
    maps: list[torch.Tensor] = []
    hook = model.get_submodule("layer3").register_forward_hook(lambda module, args, out: maps.append(out))
    with torch.no_grad():
        model(seen.inputs())
    hook.remove()
    turned = torch.einsum("ij,njhw->nihw", rotation(16, alpha, 1, torch.float32), maps[0])
    masks = torch.cat(list(seen.concepts.batches))
    large = functional.interpolate(turned, (32, 32), mode="bilinear", align_corners=False).numpy()
    best = np.zeros(16)
    for unit in range(16):
        above = large[:, unit] > np.quantile(turned[:, unit].double().numpy(), 0.995)
        for concept in range(masks.shape[1]):
            same = [i for i, kind in enumerate(CATEGORIES) if kind == CATEGORIES[concept]]
            labelled = masks[:, same].flatten(1).any(1).numpy()
            a, b = above[labelled], masks[:, concept].numpy()[labelled]
            best[unit] = max(best[unit], (a & b).sum() / max(1, (a | b).sum()))
    (row,) = (
        row for row in results["godfrey-fig3"].rows if (row["kind"], row["alpha"], row["seed"]) == (WITH, alpha, 1)
    )
    assert row["fraction"] == np.mean(best > 0.04)


def test_numbers_are_per_cent_per_network_and_changes() -> None:
    rows = [
        {"kind": kind, "network": network, "alpha": alpha, "fraction": start - alpha * (0.1 + 0.1 * network)}
        for kind, start in ((WITH, 0.8), (WITHOUT, 0.5)) for network in (0, 1) for alpha in (0.0, 1.0) for _ in range(2)
    ]  # fmt: skip
    found = KIND.numbers({}, rows)
    assert found[WITH] == {"α = 0": pytest.approx([80, 80]), "α = 1": pytest.approx([70, 60])}
    assert found["change"] == {WITH: pytest.approx([-10, -20]), WITHOUT: pytest.approx([-10, -20])}


def test_000_g74_categories_are_stacked_to_all_concepts() -> None:
    result = read_result(EXPERIMENTS / "results" / "godfrey-fig18.gpu.json")
    left = KIND.draw(result.plan, result.rows).axes[0]
    tops: dict[float, float] = {}
    for bar in left.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
    own = [row for row in result.rows if row["kind"] == WITH]
    wanted = [np.mean([row["concepts"] for row in own if row["alpha"] == a]) for a in (0, 0.25, 0.5, 0.75, 1)]
    assert [tops[x] for x in sorted(tops)] == pytest.approx(wanted)


# -- what was measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_committed_results_are_of_their_plans(name: str) -> None:
    result, plan = read_result(EXPERIMENTS / "results" / f"{name}.gpu.json"), find(name, "gpu").to_dict()
    for table in ("settings", "networks", "pairs"):
        now = {entry: plan[table][entry] for entry in result.plan[table]}  # an entry that is new since has its default
        assert result.plan[table] == now, "the plan has changed since; run it again"
    assert {row["network"] for row in result.rows} == {0, 1, 2}
    assert len(result.rows) == 2 * 3 * 5 * 3


def test_000_g73_what_the_paper_says_and_what_holds() -> None:
    holds = {
        name: [claim.holds for claim in read_result(EXPERIMENTS / "results" / f"{name}.gpu.json").claims()]
        for name in NAMES
    }
    assert holds == {"godfrey-fig3": [True] * 3, "godfrey-fig18": [], "godfrey-fig19": [False]}


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["paper", "gpu", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_places_are_in_the_networks(name: str, scale: str) -> None:
    plan = find(name, scale)
    assert plan.networks is not None
    with torch.device("meta"):
        model = build(plan.networks.architecture, **plan.networks.options, residual_relu=True)
    places = {place for place, _ in model.named_modules()}
    assert set(plan.settings.at) <= places


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[dissection]",
            '[dissection]\nform = "bars"',
            "the form 'bars' was asked for; there are fractions, categories",
        ),
        ("residual_relu = [true, false]", "width = [1, 2]", r"vary residual_relu in \[networks\]"),
        ('"self"', '"disjoint"', r'networks are dissected one by one; choose = "self" in \[pairs\]'),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (EXPERIMENTS / "godfrey-fig3.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "plan.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        find(str(tmp_path / "plan.toml"))
