"""Built-in rules, one file per family of ops. Importing this package registers them all."""

from intertwine.graph.rules import (  # noqa: F401
    attention,
    blocks,
    constant,
    convolution,
    elementwise,
    indexing,
    linear,
    norm,
    pooling,
    recurrent,
    reduce,
    shape,
)
