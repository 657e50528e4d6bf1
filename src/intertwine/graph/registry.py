"""The registry of rules: which function says what an op does to axes.

A rule for an op of your own, in a few lines, kept for the whole process:

    import intertwine as it

    @it.rule("mylib::swish_gate")            # torch.ops.mylib.swish_gate
    def swish_gate(t, x, gate):
        same = t.labels(x)
        return t.joint([(x, same), (gate, same)], same)   # permutations pass, scales do not

`intertwine.graph.tape.Tape` lists what `t` offers; `certify` proves the rule right or names the op it failed at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from intertwine.errors import RuleError

Rule = Callable[..., Any]
_RULES: dict[str, Rule] = {}


def rule(*ops: str, replace: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for one or more ops, written `aten.relu` (all overloads), `aten.add.Tensor` or `library::op`.

    Args:
        ops: names of the ops the decorated function speaks for.
        replace: allow a rule to take the place of an existing one.

    Returns:
        A decorator; the rule's arguments are a `Tape` and then the op's own arguments, tensors given as `Value`.

    Example:
        >>> from intertwine.graph.registry import rule, find_rule
        >>> @rule("demo::double")
        ... def double(t, x):
        ...     return t.pointwise(lambda v: 2 * v, x, key="demo::double")
        >>> find_rule("demo.double.default") is double
        True
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            name = op.replace("::", ".")
            if name in _RULES and not replace:
                raise RuleError(
                    f"A rule for {op} exists already ({_RULES[name].__module__}). Pass replace=True to put "
                    f"yours in its place."
                )
            _RULES[name] = function
        return function

    return register


def find_rule(op: str) -> Rule | None:
    """The rule for `library.op.overload`: an exact match first, then one for all overloads of the op."""
    return _RULES.get(op) or _RULES.get(op.rpartition(".")[0]) or _RULES.get(_functional(op))


def _functional(op: str) -> str:
    """`aten.relu_.default` → `aten.relu`: an in-place op does to axes what its functional twin does."""
    name = op.rpartition(".")[0]
    return name.removesuffix("_") if name.endswith("_") and not name.endswith("__") else name


def known_ops() -> tuple[str, ...]:
    """Names of all ops that have a rule."""
    return tuple(sorted(_RULES))
