"""The architectures of the papers, as plain torch modules; `registry.build` makes one by its name."""

from intertwine.zoo.networks.registry import Architecture as Architecture
from intertwine.zoo.networks.registry import architectures as architectures
from intertwine.zoo.networks.registry import build as build
