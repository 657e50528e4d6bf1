"""Zoos: the papers' architectures, real data, and networks trained many at once.

    zoo.build("myrtle", width=64)                                   # an architecture by name
    zoo.data("cifar10")                                             # a data set by name
    zoo.train("myrtle", seeds=range(32), data="cifar10", out=dir)   # one network per seed, into a folder
    zoo.load(dir)[3]                                                # one of them

The names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from intertwine.lazy_names import lazy_names

if TYPE_CHECKING:
    from intertwine.zoo.concepts import concept_images as concept_images
    from intertwine.zoo.datasets.dataset import Dataset as Dataset
    from intertwine.zoo.datasets.download import download as download
    from intertwine.zoo.datasets.find import data as data
    from intertwine.zoo.folder import Zoo as Zoo
    from intertwine.zoo.folder import load as load
    from intertwine.zoo.networks.registry import architectures as architectures
    from intertwine.zoo.networks.registry import build as build
    from intertwine.zoo.recipe import Recipe as Recipe
    from intertwine.zoo.training import train as train

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "architectures": "networks.registry",
        "build": "networks.registry",
        "concept_images": "concepts",
        "Dataset": "datasets.dataset",
        "download": "datasets.download",
        "data": "datasets.find",
        "Zoo": "folder",
        "load": "folder",
        "Recipe": "recipe",
        "train": "training",
    },
)
