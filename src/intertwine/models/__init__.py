"""Models named in text (`file.py:factory`, `timm:resnet18`): found, built, filled with a checkpoint, given an input."""

from intertwine.models.load import Loaded as Loaded
from intertwine.models.load import load as load
