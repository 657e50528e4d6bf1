"""The floor under all verbs: batches, layers and their activations, BatchNorm statistics, evaluation, sets of weights."""
