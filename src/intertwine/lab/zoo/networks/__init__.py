"""The architectures of the papers, as plain torch modules; `registry.build` makes one by its name."""
