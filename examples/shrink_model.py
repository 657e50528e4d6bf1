"""You have a trained network and want a smaller one that does the same, without training.

Run it as a script (`python examples/shrink_model.py`) or cell by cell in an editor that knows `# %%`.
"""

# %% [markdown]
# ## The file
#
# A network is trained here in a few seconds. With a checkpoint of your own, begin below.

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
print(f"right answers: {whole:.1%}")

# %% [markdown]
# ## To a size
#
# `fold_to` takes out features that the others can express, each layer as far as costs least. It needs no labels and,
# as here, no data. What comes out is a smaller module of the same classes.

# %%
small = it.fold_to(model, x, parameters=0.25)
print(small)
folded = accuracy(small.model, test)
print(f"right answers with a quarter of the parameters: {folded:.1%}")

# %% [markdown]
# Pruning the units with the smallest weights to about the same size is the usual thing to try first:

# %%
pruned = prune(model, x, widths=0.43)
cut = accuracy(pruned.model, test)
print(f"pruned to {pruned.parameters.share:.0%} of the parameters: {cut:.1%}")

# %% [markdown]
# ## To an accuracy
#
# Or name the accuracy, and let it look for the smallest network that has it. It is chosen on images that are held out
# for this and nothing else; here the last batch of the training images, which the network has learnt, so the test
# images are a little harder.

# %%
least = it.fold_to(model, x, floor=0.98, held_out=train[-1:], data=train[:2])
print(least)
chosen = accuracy(least.model, test)
print(f"right answers with {least.parameters.share:.0%} of the parameters: {chosen:.1%}")

# %% [markdown]
# ## How small can it get?

# %%
shares = (0.5, 0.25, 0.1, 0.05, 0.02)
curve = [accuracy(it.fold_to(model, x, parameters=share, data=train[:2]).model, test) for share in shares]
for share, right in zip(shares, curve, strict=True):
    print(f"{share:4.0%} of the parameters: {right:.1%}")

figure = Figure(figsize=(5, 3), layout="constrained")
axes = figure.subplots()
axes.plot([1.0, *shares], [whole, *curve], "o-")
axes.set(xlabel="share of the parameters", ylabel="right answers", ylim=(0, 1))
figure.savefig(out_folder() / "shrink_model.png", dpi=150)

# %% [markdown]
# ## Keep it
#
# The smaller network has other shapes than your class makes by itself, so its folder also says how it was cut.

# %%
folder = file.with_name("small")
save_folded(folder, small, "examples/digit_classifier.py:network")
again = load_folded(folder, network(), x).model
assert accuracy(again, test) == folded
print(f"wrote {folder}")
