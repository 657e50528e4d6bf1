"""Make a trained network smaller without training.

Run it as a script (`python examples/shrink_model.py`) or cell by cell in an editor that knows `# %%`.
"""

# %% [markdown]
# ## The file
#
# This cell trains a network in a few seconds. To use your own checkpoint, load it here.

# %%
import tempfile
from pathlib import Path

from digit_classifier import accuracy, digits, example_inputs, network, out_folder, restore, train_checkpoints
from matplotlib.figure import Figure

import intertwine as it
from intertwine.fold.prune import prune
from intertwine.fold.result import load_folded, save_folded

(file,) = train_checkpoints(Path(tempfile.mkdtemp()), count=1)
model = restore(file)
x, train, test = example_inputs(), digits("train"), digits("test")
whole = accuracy(model, test)
print(f"accuracy: {whole:.1%}")

# %% [markdown]
# ## A given size
#
# `fold_to` removes features that others can express, in the layers where that costs least. It needs no labels and, as
# here, no data. The result is a smaller module of the same classes.

# %%
small = it.fold_to(model, x, parameters=0.25)
print(small)
folded = accuracy(small.model, test)
print(f"accuracy with a quarter of the parameters: {folded:.1%}")

# %% [markdown]
# A common baseline is pruning the units with the smallest weights, here to about the same size:

# %%
pruned = prune(model, x, widths=0.43)
cut = accuracy(pruned.model, test)
print(f"pruned to {pruned.parameters.share:.0%} of the parameters: {cut:.1%}")

# %% [markdown]
# ## A given accuracy
#
# With `floor`, `fold_to` finds the smallest network with that accuracy on held-out images. Here they are the last batch
# of the training images, so the accuracy on the test images is a little lower.

# %%
least = it.fold_to(model, x, floor=0.98, held_out=train[-1:], data=train[:2])
print(least)
chosen = accuracy(least.model, test)
print(f"accuracy with {least.parameters.share:.0%} of the parameters: {chosen:.1%}")

# %% [markdown]
# ## Accuracy by size

# %%
shares = (0.5, 0.25, 0.1, 0.05, 0.02)
curve = [accuracy(it.fold_to(model, x, parameters=share, data=train[:2]).model, test) for share in shares]
for share, right in zip(shares, curve, strict=True):
    print(f"{share:4.0%} of the parameters: {right:.1%}")

figure = Figure(figsize=(5, 3), layout="constrained")
axes = figure.subplots()
axes.plot([1.0, *shares], [whole, *curve], "o-")
axes.set(xlabel="share of the parameters", ylabel="accuracy", ylim=(0, 1))
figure.savefig(out_folder() / "shrink_model.png", dpi=150)

# %% [markdown]
# ## Keep it
#
# The smaller network has other shapes than your class creates, so its folder also contains how it was folded.

# %%
folder = file.with_name("small")
save_folded(folder, small, "examples/digit_classifier.py:network")
again = load_folded(folder, network(), x).model
assert accuracy(again, test) == folded
print(f"wrote {folder}")
