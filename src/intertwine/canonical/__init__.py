"""Normal forms: canonical order and scale, fingerprints, equivalence of two networks, naturality."""
