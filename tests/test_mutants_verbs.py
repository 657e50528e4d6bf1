"""Verbs, where changed code went unnoticed: small differences, defaults, precision, starts, memory, words."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import intertwine as it
from intertwine.data.features import features
from intertwine.errors import InputError
from intertwine.fold.clustering import kmeans_labels
from intertwine.inspect.dissect import Maps
from intertwine.inspect.rotation_scan import ALPHAS
from intertwine.lab.papers.mode_connectivity import principal_angles
from intertwine.lab.papers.naturality import naturality
from intertwine.lab.report.charts import Dot
from intertwine.lab.report.sections import _told
from intertwine.lab.study.tasks import peak_mib
from intertwine.measure.compare import STREAMED
from intertwine.measure.measure import represent
from intertwine.stitch.network import BatchNormStatistics
from intertwine.stitch.tracing import NoSampleAxis, number_for_one_size, sample_axis
from intertwine.stitch.training import CudaGraphStep


def network(seed: int, activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), activation or nn.ReLU(), nn.Linear(6, 2)).eval()


def test_a_batch_of_three_parts_is_not_guessed_at() -> None:
    a = network(0)
    x = torch.randn(4, 3)
    with pytest.raises(InputError, match="A batch is a tuple of 3, and which part of it the model takes is not clear"):
        naturality(a, a, it.symmetry(a, x).identity(), [(x, x, x)])


def test_a_merge_tells_its_frame() -> None:
    told = it.merge([network(0), network(1)], torch.zeros(1, 3)).to_dict()
    assert told["frame"]["method"] == "weights"
    assert it.merge([network(0), network(1)], torch.zeros(1, 3), method="none").to_dict()["frame"] is None


def test_fingerprints_see_the_smallest_weight() -> None:
    """Where nothing but order is free, weights are told bit by bit: 1e-9 is not 2e-9, although 1 + 1e-9 is 1."""
    one, two = network(0, nn.GELU()), network(0, nn.GELU())
    with torch.no_grad():
        one.get_parameter("0.weight")[0, 0], two.get_parameter("0.weight")[0, 0] = 1e-9, 2e-9
    x = torch.zeros(1, 3)
    assert it.fingerprint(one, x) != it.fingerprint(two, x)


def test_five_directions_are_compared_where_nothing_is_said() -> None:
    a, b = nn.Linear(9, 9), nn.Linear(9, 9)
    assert {one.k for one in principal_angles(a, b)} == {5}


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_measures_are_the_measures(name: str) -> None:
    a, b, x = network(0), network(1), torch.randn(50, 3)
    data = [(part, torch.zeros(len(part))) for part in x.split(20)]
    found = it.compare(a, b, data, layers=["1"], measures=(name,)).result("1", "1").value
    (one, other) = (features(model, data, ["1"]).collect()["1"] for model in (a, b))
    assert found == pytest.approx(it.measure(one, other, name).value, abs=1e-6)


def test_features_far_from_zero_are_centred_without_loss() -> None:
    x = 1e5 + torch.randn(100, 4)
    exact = x.double() - x.double().mean(0)
    assert (represent(x, "x").centred - exact).abs().max() < 1e-6


def test_clusters_far_apart_are_all_found_at_the_first_start() -> None:
    """k-means++ draws by squared distance: with twelve tight clusters a start by chance would miss some."""
    rng = np.random.default_rng(0)
    centers = 100 * rng.standard_normal((12, 5))
    truth = np.repeat(np.arange(12), 9)
    rows = centers[truth] + 0.01 * rng.standard_normal((len(truth), 5))
    for seed in range(5):
        labels = kmeans_labels(rows, 12, seed, restarts=1)
        assert len({(int(a), int(b)) for a, b in zip(truth, labels, strict=True)}) == 12


def test_maps_are_kept_as_long_as_they_fit() -> None:
    model, x = nn.Conv2d(3, 4, 1), torch.randn(10, 3, 6, 6)
    size = 4 * 10 * 4 * 6 * 6  # bytes in single precision
    model = nn.Sequential(model)
    assert Maps(model, "0", x, memory=size).keeps
    assert not Maps(model, "0", x, memory=size - 1).keeps


def test_scans_begin_at_the_basis_of_the_network() -> None:
    assert ALPHAS[0] == 0.0
    assert ALPHAS[-1] == 1.0


def test_positions_of_gpt_begin_small() -> None:
    assert 0.015 < float(it.zoo.build("gpt").get_parameter("positions").detach().std()) < 0.025


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_most_memory_is_that_of_the_system() -> None:
    status = Path("/proc/self/status").read_text()
    most = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_mib() == pytest.approx(most / 1024, rel=0.02)


def test_the_report_names_the_highest_and_the_lowest_pair() -> None:
    cells = {("a", "b"): dot(0.2), ("a", "c"): dot(0.9), ("d", "c"): dot(None)}
    assert _told(cells) == (
        "Highest 0.9 at a × c, lowest 0.2 at a × b. 1 of 3 have no value; point at them for the reason."
    )


def dot(value: float | None) -> Dot:
    return Dot(0.0, value, None, None, 1, None, ())


# -- stitching ---------------------------------------------------------------------------------------------------------


def test_norms_without_running_statistics_are_left_out() -> None:
    kept, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    assert [name for name, _ in BatchNormStatistics(nn.Sequential(kept, plain)).named_buffers()] == ["0:mean", "0:var"]


def test_a_number_known_for_one_batch_size_is_not_used_for_another() -> None:
    number = number_for_one_size(7, 4)
    assert number(4) == 7
    with pytest.raises(InputError, match="known for 4 samples alone, but 5 were given"):
        number(5)


def test_what_depends_on_the_other_samples_has_no_axis_of_samples() -> None:
    x, y = torch.randn(3), torch.randn(3)
    for first, second in ((x, y), (y, x)):
        with pytest.raises(NoSampleAxis, match="depends on the other samples"):
            sample_axis(first, second, x)


def test_a_recorded_step_takes_batches_of_its_own_kind_alone() -> None:
    """A recording on a GPU is made for one shape; whether a batch fits is asked before it is replayed."""
    step = CudaGraphStep(lambda call, targets: None, torch.device("cpu"))
    step.held = [torch.zeros(4, 3), 2, torch.zeros(4)]
    assert step._fits([torch.ones(4, 3), 2, torch.ones(4)])
    others = (
        [torch.ones(4, 3), 2],
        [torch.ones(4, 3), 2, torch.ones(4), 1],
        [torch.ones(3, 3), 2, torch.ones(3)],
        [torch.ones(4, 3), 3, torch.ones(4)],
        [torch.ones(4, 3), 2, torch.ones(4).long()],
    )
    assert not any(step._fits(other) for other in others)
