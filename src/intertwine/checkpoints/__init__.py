"""Models by name (`file.py:factory`, `timm:resnet18`) and files of weights: found, built, filled, given an input."""

from intertwine.checkpoints.load import Loaded as Loaded
from intertwine.checkpoints.load import load as load
