"""Rule for scaled dot-product attention, with masks, grouped query heads and causal order.

It is spelled out as scores = q·k, softmax, weights·v, so that heads, head dimensions and tokens each meet where they
really meet.
"""

from __future__ import annotations

import torch

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Label, Value
from intertwine.graph.rules.elementwise import spread


@rule("aten.scaled_dot_product_attention")
def scaled_dot_product_attention(
    t: GraphBuilder,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    out_shape = t.shape
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        return _grouped(t, q, k, v, attn_mask, is_causal)
    q, k, v = _broadcast(t, q, k, v)
    lead: list[Label] = [("lead", i) for i in range(q.ndim - 2)]
    return _attend(t, q, k, v, attn_mask, is_causal, lead, lead, out_shape)


def _broadcast(t: GraphBuilder, *operands: Value) -> list[Value]:
    """The operands with one lead shape: a single key head (or batch) is spread over those of the queries."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in operands))
    spread_out = []
    for x in operands:
        shape = (*lead, *x.shape[-2:])
        labels: list[Label] = [("lead", i) for i in range(len(shape))]
        spread_out.append(x if x.shape == shape else t.multilinear([[(x, spread(t, x, shape))]], labels, shape))
    return spread_out


def _grouped(t: GraphBuilder, q: Value, k: Value, v: Value, mask: Value | None, causal: bool) -> Value:
    """Query heads read as (key head, query within the group): each group attends with one key head."""
    heads = k.shape[-3]
    each = q.shape[-3] // heads
    grouped_q = t.reshape(q, (*q.shape[:-3], heads, each, *q.shape[-2:]))
    batch: list[Label] = [("batch", i) for i in range(q.ndim - 3)]
    if mask is not None:
        mask = _group_mask(t, mask, heads, each)
    shape = (*t.shape[:-3], heads, each, *t.shape[-2:])
    out = _attend(t, grouped_q, k, v, mask, causal, [*batch, "head", "each"], [*batch, "head"], shape)
    return t.reshape(out, t.shape)


def _group_mask(t: GraphBuilder, mask: Value, heads: int, each: int) -> Value:
    if mask.ndim < 3:
        return mask
    own = (heads, each) if mask.shape[-3] == heads * each else (1, 1)
    return t.reshape(mask, (*mask.shape[:-3], *own, *mask.shape[-2:]))


def _attend(
    t: GraphBuilder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    causal: bool,
    lead_q: list[Label],
    lead_k: list[Label],
    shape: tuple[int, ...],
) -> Value:
    rows, columns = (PINNED, PINNED) if causal else ("query", "key")
    scores_shape = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    scores_labels = [*lead_q, "query", "key"]
    terms = [[(q, [*lead_q, "query", "dim"]), (k, [*lead_k, "key", "dim"])]]
    scores = t.multilinear(terms, scores_labels, scores_shape)
    if mask is not None:
        plain: list[Label] = [("lead", i) for i in range(len(scores_shape))]
        terms = [[(scores, plain)], [(mask, spread(t, mask, scores_shape))]]
        scores = t.multilinear(terms, plain, scores_shape)
    weights = t.joint([(scores, [*lead_q, rows, columns])], [*lead_q, rows, columns], scores_shape, mixes=["key"])
    terms = [[(weights, [*lead_q, "query", "key"]), (v, [*lead_k, "key", "value"])]]
    return t.multilinear(terms, [*lead_q, "query", "value"], shape)
