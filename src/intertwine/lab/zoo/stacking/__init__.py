"""Stacks: many networks of one architecture as one program, so that one launch does the work of all."""
