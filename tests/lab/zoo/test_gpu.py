"""Training on a GPU: recorded steps and fused kernels against training on the CPU; repeated and resumed runs.

Skipped without a GPU. The functions need only torch, so they can also be called without pytest.
"""

import pytest
import torch

from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.group import initial
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.precision import precision
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.trainer import StackTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SEEDS = [3, 1, 4]
HOW = Recipe("own", "sgd", 0.001, epochs=4, batch=32, momentum=0.9, weight_decay=1e-4, shift=2, flip=True)
#: Largest relative distance of the weights' change after one epoch from what the CPU finds.
BOUNDS = {"float32": 0.01, "tf32": 0.1, "bfloat16": 0.25}
NETWORKS = {"myrtle": {}, "myrtle, no BN": {"norm": False}, "resnet20": {}, "tiny10": {}}


def images() -> Dataset:
    """Images of one colour each and some noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 10
        colours = torch.randint(40, 216, (10, 1, 1, 3), generator=torch.Generator().manual_seed(1))
        noise = torch.randint(-40, 40, (count, 32, 32, 3), generator=generator)
        return (colours[labels] + noise).to(torch.uint8), labels

    return Dataset.of("colours", some(168), some(100), (128.0,) * 3, (64.0,) * 3, [str(i) for i in range(10)])


def trainer(network: str, numbers: str, device: str = "cuda", seeds: list[int] = SEEDS) -> StackTrainer:
    name, options = network.partition(",")[0], NETWORKS[network]
    models = [initial(lambda: build(name, **options), seed) for seed in seeds]
    return StackTrainer(models, seeds, images(), HOW, precision(numbers, torch.device(device)))


def weights(of: StackTrainer) -> dict[str, torch.Tensor]:
    return {name: t.detach().double().cpu().clone() for name, t in of.stack.parameters.items()}


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """How far the found weights are from the expected ones, relative to how far those went."""
    gone = sum(float((expected[name] - start[name]).square().sum()) for name in start)
    return (sum(float((found[name] - expected[name]).square().sum()) for name in start) / gone) ** 0.5


@pytest.mark.parametrize("numbers", BOUNDS)
@pytest.mark.parametrize("network", NETWORKS)
def test_one_epoch_is_that_of_the_cpu(network: str, numbers: str) -> None:
    slow, fast = trainer(network, "float64", "cpu"), trainer(network, numbers)
    start = weights(slow)
    losses = slow.run_epoch().double(), fast.run_epoch().double()
    assert apart(weights(fast), weights(slow), start) < BOUNDS[numbers]
    assert float((losses[0] - losses[1]).abs().max()) < BOUNDS[numbers] / 4


@pytest.mark.parametrize("network", NETWORKS)
def test_repeated_and_taken_up_again_gives_the_same_bits(network: str) -> None:
    through, again = trainer(network, "bfloat16"), trainer(network, "bfloat16")
    for _ in range(3):
        through.run_epoch()
        again.run_epoch()
    last = trainer(network, "bfloat16")
    last.restore({name: t.clone() for name, t in again.state().items()}, 3)
    through.run_epoch()
    last.run_epoch()
    assert all(torch.equal(t, last.state()[name]) for name, t in through.state().items())


def test_a_network_learns_the_same_alone() -> None:
    together, alone = trainer("myrtle", "bfloat16"), trainer("myrtle", "bfloat16", seeds=SEEDS[:1])
    start = weights(alone)
    together.run_epoch()
    alone.run_epoch()
    first = {name: t[:1] for name, t in weights(together).items()}
    assert apart(first, weights(alone), start) < 0.05  # sums are cut into other parts


def test_networks_learn() -> None:
    fast = trainer("myrtle", "bfloat16")
    for _ in range(4):
        fast.run_epoch()
    assert float(fast.score().accuracy.min()) > 0.5
