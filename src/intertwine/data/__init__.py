"""What all verbs build on: batches, layers and their activations, BatchNorm statistics, evaluation, weights."""
