"""Merge two independently trained networks of one architecture into one.

Run it as a script (`python examples/merge_models.py`) or cell by cell in an editor that knows `# %%`.
"""

# %% [markdown]
# ## The files
#
# This cell trains two networks from different seeds in a few seconds. To use your own checkpoints, load them here.

# %%
import tempfile
from pathlib import Path

from digit_classifier import accuracy, digits, example_inputs, out_folder, restore, train_checkpoints
from matplotlib.figure import Figure
from safetensors.torch import save_file

import intertwine as it

files = train_checkpoints(Path(tempfile.mkdtemp()), count=2)
a, b = (restore(file) for file in files)
x, train, test = example_inputs(), digits("train"), digits("test")
parents = [accuracy(model, test) for model in (a, b)]
print(f"accuracy: {parents[0]:.1%} and {parents[1]:.1%}")

# %% [markdown]
# ## The average of the weights fails
#
# Unit 7 of one network is unrelated to unit 7 of the other, so the average of their weights is meaningless.

# %%
plain = accuracy(it.interpolate(a, b, 0.5), test)
print(f"accuracy of the average: {plain:.1%}")

# %% [markdown]
# ## Alignment before averaging
#
# `merge` aligns the networks by elements of their symmetry, which keeps their functions, and averages the weights. It
# evaluates the result and its parents on the given data, here training images, and adds a note if the result is worse.
# The test images are used only for the final accuracy.

# %%
merged = it.merge([a, b], x, data=train)
print(merged)
aligned = accuracy(merged.model, test)
print(f"accuracy after alignment: {aligned:.1%}")

# %% [markdown]
# The average of two units has a smaller variance than each of them. REPAIR (Jordan et al. 2023) restores the variance
# of every unit with training images, without labels and without training.

# %%
repaired_merge = it.merge([a, b], x, data=train, repair="repair")
repaired = accuracy(repaired_merge.model, test)
print(f"accuracy after repair: {repaired:.1%}")

# %% [markdown]
# ## The line between the two
#
# The average is the midpoint of the straight line between the weights. The barrier is the largest rise of the error
# above the straight line between its ends, here before and after alignment.

# %%
moved = it.align(a, b, x).model
as_trained, after = (it.barrier(a, model, test, points=11) for model in (b, moved))
print(f"error barrier as trained: {as_trained.error_barrier:.3f}, after alignment: {after.error_barrier:.3f}")
figure = Figure(figsize=(5, 3), layout="constrained")
axes = figure.subplots()
for line, label in ((as_trained, "as trained"), (after, "after alignment")):
    axes.plot(line.ts, line.error or (), label=label)
axes.set(xlabel="from the first network (0) to the second (1)", ylabel="error", ylim=(0, None))
axes.legend()
figure.savefig(out_folder() / "merge_models.png", dpi=150)

# %% [markdown]
# ## Keep it
#
# The merged network is a module of your own class. It can be trained further and saved.

# %%
file = files[0].with_name("merged.safetensors")
save_file(repaired_merge.model.state_dict(), file)
assert accuracy(restore(file), test) == repaired
print(f"wrote {file}")
