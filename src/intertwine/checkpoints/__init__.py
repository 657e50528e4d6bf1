"""Models by name (`file.py:factory`, `timm:resnet18`), and the files that hold their weights."""

from intertwine.checkpoints.load import Loaded as Loaded
from intertwine.checkpoints.load import load as load
