"""Rules for recurrent layers and cells, spelled out gate by gate.

Gates are blocks of one axis, in each of which the hidden axis stands, as it does on the other side of W_hh. What is
read from the past is what was written, so state and output are tied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from intertwine.graph.builder import PINNED, GraphBuilder, rule
from intertwine.graph.constraints import Label, Value

#: (x, states, parameters) → new states
Step = Callable[[GraphBuilder, Value, list[Value], Sequence[Value]], list[Value]]


def _gate(t: GraphBuilder, x: Value, weight: Value, bias: Value | None, k: int, size: int) -> Value:
    """Row block k of a stacked linear map."""
    block = t.narrow(weight, 0, k * size, size)
    own = t.narrow(bias, 0, k * size, size) if bias is not None else None
    lead = t.labels(x, 1)
    return t.multilinear(
        [[(x, [*lead, "in"]), (block, ["out", "in"])], [(own, ["out"])]], [*lead, "out"], (*x.shape[:-1], size)
    )


def _sum(t: GraphBuilder, *xs: Value) -> Value:
    return t.multilinear([[(x, t.labels(x))] for x in xs], t.labels(xs[0]), xs[0].shape)


def _times(t: GraphBuilder, *xs: Value) -> Value:
    return t.multilinear([[(x, t.labels(x)) for x in xs]], t.labels(xs[0]), xs[0].shape)


def _gates(t: GraphBuilder, x: Value, h: Value, own: Sequence[Value], count: int) -> list[tuple[Value, Value]]:
    """What each gate reads of the input and of the hidden state."""
    w_in, w_hh, b_in, b_hh = own[0], own[1], own[2] if len(own) > 3 else None, own[3] if len(own) > 3 else None
    size = w_in.shape[0] // count
    return [(_gate(t, x, w_in, b_in, k, size), _gate(t, h, w_hh, b_hh, k, size)) for k in range(count)]


def lstm_step(t: GraphBuilder, x: Value, states: list[Value], own: Sequence[Value]) -> list[Value]:
    """Gates input, forget, cell, output; an odd fifth (or third) parameter projects the output."""
    h, c = states
    sums = [_sum(t, *parts) for parts in _gates(t, x, h, own, 4)]
    functions = [(torch.tanh, "tanh") if k == 2 else (torch.sigmoid, "sigmoid") for k in range(4)]
    enter, forget, cell, leave = (t.pointwise(fn, g, key) for (fn, key), g in zip(functions, sums, strict=True))
    c = _sum(t, _times(t, forget, c), _times(t, enter, cell))
    y = _times(t, leave, t.pointwise(torch.tanh, c, "tanh"))
    if len(own) in (3, 5):
        y = _gate(t, y, own[-1], None, 0, own[-1].shape[0])
    return [y, c]


def gru_step(t: GraphBuilder, x: Value, states: list[Value], own: Sequence[Value]) -> list[Value]:
    """Gates reset, update, new."""
    (h,) = states
    gates = _gates(t, x, h, own, 3)
    reset, update = (t.pointwise(torch.sigmoid, _sum(t, *parts), "sigmoid") for parts in gates[:2])
    new = t.pointwise(torch.tanh, _sum(t, gates[2][0], _times(t, reset, gates[2][1])), "tanh")
    keep = t.pointwise(lambda v: 1 - v, update, "1 - x")
    return [_sum(t, _times(t, keep, new), _times(t, update, h))]


def _plain_step(fn: Callable[[torch.Tensor], torch.Tensor], name: str) -> Step:
    def step(t: GraphBuilder, x: Value, states: list[Value], own: Sequence[Value]) -> list[Value]:
        return [t.pointwise(fn, _sum(t, *_gates(t, x, states[0], own, 1)[0]), name)]

    return step


tanh_step, relu_step = _plain_step(torch.tanh, "tanh"), _plain_step(torch.relu, "relu")


@rule("aten.lstm.input")
def lstm(
    t: GraphBuilder, x: Value, state: Sequence[Value], params: Sequence[Value], *options: Any
) -> tuple[Value, ...]:
    return _layers(t, x, state, params, lstm_step, *options)


@rule("aten.gru.input")
def gru(t: GraphBuilder, x: Value, state: Value, params: Sequence[Value], *options: Any) -> tuple[Value, ...]:
    return _layers(t, x, [state], params, gru_step, *options)


@rule("aten.rnn_tanh.input")
def rnn_tanh(t: GraphBuilder, x: Value, state: Value, params: Sequence[Value], *options: Any) -> tuple[Value, ...]:
    return _layers(t, x, [state], params, tanh_step, *options)


@rule("aten.rnn_relu.input")
def rnn_relu(t: GraphBuilder, x: Value, state: Value, params: Sequence[Value], *options: Any) -> tuple[Value, ...]:
    return _layers(t, x, [state], params, relu_step, *options)


@rule("aten.lstm_cell")
def lstm_cell(t: GraphBuilder, x: Value, state: Sequence[Value], *own: Value | None) -> tuple[Value, ...]:
    return tuple(lstm_step(t, x, list(state), [v for v in own if v is not None]))


@rule("aten.gru_cell")
def gru_cell(t: GraphBuilder, x: Value, state: Value, *own: Value | None) -> Value:
    return gru_step(t, x, [state], [v for v in own if v is not None])[0]


@rule("aten.rnn_tanh_cell")
def rnn_tanh_cell(t: GraphBuilder, x: Value, state: Value, *own: Value | None) -> Value:
    return tanh_step(t, x, [state], [v for v in own if v is not None])[0]


@rule("aten.rnn_relu_cell")
def rnn_relu_cell(t: GraphBuilder, x: Value, state: Value, *own: Value | None) -> Value:
    return relu_step(t, x, [state], [v for v in own if v is not None])[0]


def _layers(
    t: GraphBuilder, x: Value, states: Sequence[Value], params: Sequence[Value], step: Step, has_biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Value, ...]:  # fmt: skip
    """A stack of layers, each in one or two directions."""
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    finals: list[list[Value]] = [[] for _ in states]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            first = [_initial(t, s, k) for s in states]
            y, last = _sequence(t, x, first, params[k * each : (k + 1) * each], step)
            outputs.append(y)
            for collected, value in zip(finals, last, strict=True):
                collected.append(value)
        x = t.concat(outputs, -1)
    return x, *(t.concat(collected, 0) for collected in finals)


def _initial(t: GraphBuilder, state: Value, k: int) -> Value:
    """The state a layer starts from; a fresh zero state is a tensor of its own for every layer."""
    if state.zero:
        return t.uniform((1, *state.shape[1:]), zero=True)
    return t.narrow(state, 0, k, 1)


def _sequence(
    t: GraphBuilder, x: Value, first: list[Value], own: Sequence[Value], step: Step
) -> tuple[Value, list[Value]]:
    """One direction of one layer over all times: one step whose past is tied to what it writes."""
    past = [t.uniform((*x.shape[:-1], s.shape[-1]), zero=True) for s in first]
    written = step(t, x, past, own)
    lead: list[Label] = [PINNED] * (x.ndim - 1)
    tied = [_tie(t, [new, old], lead, new.shape) for new, old in zip(written, past, strict=True)]
    last = []
    for value, start in zip(tied, first, strict=True):
        rest: list[Label] = [PINNED] * (start.ndim - 1)
        read = t.linear(value, [*lead, "unit"], [*rest, "unit"], start.shape)
        last.append(_tie(t, [read, start], rest, start.shape))
    return tied[0], last


def _tie(t: GraphBuilder, xs: Sequence[Value], lead: Sequence[Label], shape: tuple[int, ...]) -> Value:
    """Tensors that stand for one another: they must move alike along their last axis."""
    return t.multilinear([[(x, [*lead, "unit"])] for x in xs], [*lead, "unit"], shape)
