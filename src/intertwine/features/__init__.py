"""Features: what a network computes at its hidden layers, captured and brought to samples × features."""
