"""Rules for recurrent layers. Gates are stacked on one axis, (gate, hidden); the hidden axis stands on both sides of W_hh.

The state must move as the output does, so the two are tied; a plain RNN passes what its activation allows, the gates
of an LSTM or a GRU pass permutations alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intertwine.graph.registry import rule
from intertwine.graph.tape import PINNED, Tape, Value


@rule("aten.lstm.input")
def lstm(t: Tape, x: Value, state: Sequence[Value], params: Sequence[Value], has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Value, Value, Value]:
    y, finals = _recurrent(t, x, state, params, has_biases, layers, bidirectional, gates=4, fn=None)
    return y, finals[0], finals[1]


@rule("aten.gru.input")
def gru(t: Tape, x: Value, state: Value, params: Sequence[Value], has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Value, Value]:
    y, finals = _recurrent(t, x, [state], params, has_biases, layers, bidirectional, gates=3, fn=None)
    return y, finals[0]


@rule("aten.rnn_tanh.input")
def rnn_tanh(t: Tape, x: Value, state: Value, params: Sequence[Value], has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Value, Value]:
    y, finals = _recurrent(t, x, [state], params, has_biases, layers, bidirectional, gates=1, fn=torch.tanh)
    return y, finals[0]


@rule("aten.rnn_relu.input")
def rnn_relu(t: Tape, x: Value, state: Value, params: Sequence[Value], has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Value, Value]:
    y, finals = _recurrent(t, x, [state], params, has_biases, layers, bidirectional, gates=1, fn=torch.relu)
    return y, finals[0]


def _recurrent(t: Tape, x: Value, states: Sequence[Value], params: Sequence[Value], has_biases: bool, layers: int, bidirectional: bool, gates: int, fn: Any) -> tuple[Value, list[Value]]:
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)  # 2 weights, 2 biases, perhaps a projection
    finals: list[list[Value]] = [[] for _ in states]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            own = params[k * each : (k + 1) * each]
            start = [t.narrow(s, 0, k, 1) for s in states]
            y, last = _one_layer(t, x, start, own, has_biases, gates, fn)
            outputs.append(y)
            for collected, value in zip(finals, last, strict=True):
                collected.append(value)
        x = t.concat(outputs, -1) if len(outputs) > 1 else outputs[0]
    return x, [t.concat(collected, 0) for collected in finals]


def _one_layer(t: Tape, x: Value, states: Sequence[Value], own: Sequence[Value], has_biases: bool, gates: int, fn: Any) -> tuple[Value, list[Value]]:
    """One direction of one layer; `x` is (time, batch, features) or (batch, time, features)."""
    weights, biases = own[:2], own[2:4] if has_biases else []
    projection = own[-1] if len(own) in (3, 5) else None
    hidden = weights[0].shape[0] // gates
    read = states[0].shape[-1]
    w_in, w_hh = t.reshape(weights[0], (gates, hidden, weights[0].shape[1])), t.reshape(weights[1], (gates, hidden, read))
    shape = (*x.shape[:-1], gates, hidden)
    lead = t.labels(x, 1)
    # along time and batch the state is another tensor than the input, so those axes are pinned
    pinned: list[Any] = [PINNED] * len(lead)
    first = t.multilinear([[(x, [*lead, "in"]), (w_in, [PINNED, "unit", "in"])], *([(t.reshape(b, (gates, hidden)), [PINNED, "unit"])] for b in biases)], [*lead, PINNED, "unit"], shape)
    past = t.uniform((*x.shape[:-1], read), zero=True)
    summed = t.multilinear([[(first, [*pinned, PINNED, "unit"])], [(past, [*pinned, "state"]), (w_hh, [PINNED, "unit", "state"])]], [*pinned, PINNED, "unit"], shape)
    out_shape = (*x.shape[:-1], hidden)
    if fn is not None:
        cell = t.pointwise(fn, t.reshape(summed, out_shape), fn.__name__)
    else:
        cell = t.joint([(summed, [*pinned, PINNED, "unit"])], [*pinned, "unit"], out_shape)
    y = cell if projection is None else t.multilinear([[(cell, [*pinned, "unit"]), (projection, ["out", "unit"])]], [*pinned, "out"], (*x.shape[:-1], read))
    # what is read from the past at the next step is what was written: the state moves as the output does
    y = t.multilinear([[(y, [*pinned, "unit"])], [(past, [*pinned, "unit"])]], [*pinned, "unit"], y.shape)
    return y, _final_states(t, y, cell, states)


def _final_states(t: Tape, y: Value, cell: Value, states: Sequence[Value]) -> list[Value]:
    finals = []
    for state, like in zip(states, (y, cell), strict=False):
        lead: list[Any] = [PINNED] * (state.ndim - 1)
        read = t.multilinear([[(like, [*[PINNED] * (like.ndim - 1), "unit"])]], [*lead, "unit"], state.shape)
        finals.append(t.multilinear([[(read, [*lead, "unit"])], [(state, [*lead, "unit"])]], [*lead, "unit"], state.shape))
    return finals
