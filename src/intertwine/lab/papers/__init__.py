"""The papers: plans of their tables and figures, the experiments that carry them out, and what only they need."""
