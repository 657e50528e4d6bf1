"""Zoos: the papers' architectures, real data, and networks trained many at once.

    zoo.build("myrtle", width=64)                                   # an architecture by name
    zoo.data("cifar10")                                             # a data set by name
    zoo.train("myrtle", seeds=range(32), data="cifar10", out=dir)   # one network per seed, into a folder
    zoo.load(dir)[3]                                                # one of them

The names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from intertwine.lazy import lazy_names

if TYPE_CHECKING:
    from intertwine.lab.zoo.datasets.concepts import concept_images as concept_images
    from intertwine.lab.zoo.datasets.dataset import Dataset as Dataset
    from intertwine.lab.zoo.datasets.downloads import download as download
    from intertwine.lab.zoo.datasets.loading import data as data
    from intertwine.lab.zoo.folder import Zoo as Zoo
    from intertwine.lab.zoo.folder import load as load
    from intertwine.lab.zoo.networks.registry import architectures as architectures
    from intertwine.lab.zoo.networks.registry import build as build
    from intertwine.lab.zoo.recipe import Recipe as Recipe
    from intertwine.lab.zoo.training import train as train

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "architectures": "networks.registry",
        "build": "networks.registry",
        "concept_images": "datasets.concepts",
        "Dataset": "datasets.dataset",
        "download": "datasets.downloads",
        "data": "datasets.loading",
        "Zoo": "folder",
        "load": "folder",
        "Recipe": "recipe",
        "train": "training",
    },
)
