"""The laboratory on top of the library: zoos of trained networks, studies, their report, and the five papers."""
