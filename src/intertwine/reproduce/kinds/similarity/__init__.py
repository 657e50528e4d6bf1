"""Kind "similarity": how alike layers of networks are that were trained alike (Godfrey et al. 2022, section 5)."""

from __future__ import annotations

from intertwine.reproduce.kinds.similarity.kind import KIND as KIND
