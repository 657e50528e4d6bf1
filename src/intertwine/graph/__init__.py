"""Model → Graph: capture, the algebra of axes, one rule per op."""
