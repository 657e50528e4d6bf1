"""The zoo: the architectures of the papers, data sets, and the training of many networks at once."""
