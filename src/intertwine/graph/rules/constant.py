"""Rules for tensors made on the spot: filled with one number they are alike along every axis, else constants."""

from __future__ import annotations

from typing import Any

from intertwine.graph.registry import rule
from intertwine.graph.tape import Tape, Value


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero", "aten.zero_")
def zeros(t: Tape, *_: Any, **__: Any) -> Value:
    return t.uniform(t.shape, zero=True)


@rule(
    "aten.ones",
    "aten.ones_like",
    "aten.new_ones",
    "aten.full",
    "aten.full_like",
    "aten.new_full",
    "aten.fill",
    "aten.fill_",
)
def full(t: Tape, *_: Any, **__: Any) -> Value:
    return t.uniform(t.shape)


@rule(
    "aten.empty", "aten.empty_like", "aten.new_empty", "aten.arange", "aten.eye", "aten.linspace", "aten.scalar_tensor"
)
def constant(t: Tape, *_: Any, **__: Any) -> Value:
    return t.fixed(t.shape, "it meets a constant")


@rule(
    "aten._assert_tensor_metadata",
    "aten._assert_async",
    "aten.sym_size",
    "aten.size",
    "aten.sym_numel",
    "aten._assert_scalar",
)
def nothing(t: Tape, *_: Any, **__: Any) -> None:
    return None


for _rule in (zeros, full):
    _rule.creates = True  # type: ignore[attr-defined]  # these are run although no tensor goes in
