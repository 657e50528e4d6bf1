"""Rule for scaled dot-product attention, with masks, grouped query heads and causal order.

It is spelled out as scores = q·k, softmax, weights·v, so that heads, head dimensions and tokens each meet where they
really meet.
"""

from __future__ import annotations

import torch

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Label, Value


@rule("aten.scaled_dot_product_attention")
def scaled_dot_product_attention(
    t: GraphBuilder, q: Value, k: Value, v: Value, attn_mask: Value | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        return _grouped(t, q, k, v, attn_mask, is_causal)
    # a single key head (or batch) is spread over those of the queries
    lead_shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    shapes = [(*lead_shape, *x.shape[-2:]) for x in (q, k, v)]
    labels: list[Label] = [("lead", i) for i in range(len(shapes[0]))]
    q, k, v = (
        x if x.shape == shape else t.linear(x, t.spread(x, shape), labels, shape)
        for x, shape in zip((q, k, v), shapes, strict=True)
    )
    return _attend(t, q, k, v, attn_mask, is_causal, labels[:-2], labels[:-2], t.shape)


def _grouped(t: GraphBuilder, q: Value, k: Value, v: Value, mask: Value | None, causal: bool) -> Value:
    """Query heads read as (key head, query within the group): each group attends with one key head."""
    heads = k.shape[-3]
    each = q.shape[-3] // heads
    grouped_q = t.reshape(q, (*q.shape[:-3], heads, each, *q.shape[-2:]))
    batch: list[Label] = [("batch", i) for i in range(q.ndim - 3)]
    if mask is not None and mask.ndim > 2:
        own = (heads, each) if mask.shape[-3] == heads * each else (1, 1)
        mask = t.reshape(mask, (*mask.shape[:-3], *own, *mask.shape[-2:]))
    shape = (*t.shape[:-3], heads, each, *t.shape[-2:])
    out = _attend(t, grouped_q, k, v, mask, causal, [*batch, "head", "each"], [*batch, "head"], shape)
    return t.reshape(out, t.shape)


def _attend(
    t: GraphBuilder, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, lead_q: list[Label],
    lead_k: list[Label], shape: tuple[int, ...],
) -> Value:  # fmt: skip
    rows, columns = (PINNED, PINNED) if causal else ("query", "key")
    scores_shape = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    terms = [[(q, [*lead_q, "query", "dim"]), (k, [*lead_k, "key", "dim"])]]
    scores = t.multilinear(terms, [*lead_q, "query", "key"], scores_shape)
    if mask is not None:
        plain = t.labels(scores)
        scores = t.multilinear([[(scores, plain)], [(mask, t.spread(mask, scores_shape))]], plain, scores_shape)
    weights = t.joint([(scores, [*lead_q, rows, columns])], [*lead_q, rows, columns], scores_shape, mixes=["key"])
    terms = [[(weights, [*lead_q, "query", "key"]), (v, [*lead_k, "key", "value"])]]
    return t.multilinear(terms, [*lead_q, "query", "value"], shape)
