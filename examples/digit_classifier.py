"""A small network, its checkpoints and data, used by the three example scripts in place of your own.

`network` and `example_inputs` are the functions that the command line calls in a file of yours:
intertwine inspect examples/digit_classifier.py:network
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import intertwine as it

WIDTH = 96
torch.set_num_threads(1)  # such small networks are slower on several threads


def network() -> nn.Module:
    """A classifier of 8 × 8 images, with random weights."""
    layers: dict[str, nn.Module] = {
        "flat": nn.Flatten(),
        "hidden1": nn.Linear(64, WIDTH),
        "relu1": nn.ReLU(),
        "hidden2": nn.Linear(WIDTH, WIDTH),
        "relu2": nn.ReLU(),
        "hidden3": nn.Linear(WIDTH, WIDTH),
        "relu3": nn.ReLU(),
        "answer": nn.Linear(WIDTH, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def example_inputs() -> Tensor:
    """Only the shape matters."""
    return torch.zeros(1, 1, 8, 8)


def train_checkpoints(folder: Path, count: int) -> list[Path]:
    """Train networks on handwritten digits with different seeds, and return their safetensors files."""
    zoo = it.zoo.train(network, seeds=range(count), data="digits", out=folder, epochs=20)
    return [folder / record.file for record in zoo.records]


def restore(file: Path) -> nn.Module:
    """Load the network of a checkpoint."""
    model = network()
    model.load_state_dict(load_file(file))
    return model.eval()


def digits(part: str) -> list[tuple[Tensor, Tensor]]:
    """Batches of (images, classes) from the part "train" or "test". Any iterable of such pairs can be used as data."""
    return list(it.zoo.data("digits").batches(part, 250))


def accuracy(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """The fraction of correctly classified images."""
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == classes).sum()) for images, classes in data)
    return right / sum(len(classes) for _, classes in data)


def out_folder() -> Path:
    """The folder for pictures: the first argument of the script, or out/. Arguments of a notebook start with -."""
    given = [word for word in sys.argv[1:2] if not word.startswith("-")]
    folder = Path(given[0] if given else "out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
