"""Data sets as tensors: found in a folder, checked against their published sums, the same from every layout."""

from intertwine.zoo.datasets.dataset import Batches as Batches
from intertwine.zoo.datasets.dataset import Dataset as Dataset
from intertwine.zoo.datasets.download import download as download
from intertwine.zoo.datasets.find import data as data
