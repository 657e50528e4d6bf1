"""The architectures of the papers, as plain torch modules; `registry.build` makes one by its name."""

from intertwine.zoo.architectures.registry import Architecture as Architecture
from intertwine.zoo.architectures.registry import architectures as architectures
from intertwine.zoo.architectures.registry import build as build
