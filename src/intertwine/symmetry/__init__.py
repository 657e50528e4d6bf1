"""Graph → Symmetry: wires and their groups, elements and their action, certificates."""
