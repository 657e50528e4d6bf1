"""You have two networks of one architecture, trained apart. Make one network of them that works.

Run it as a script (`python examples/merge_models.py`) or cell by cell in an editor that knows `# %%`.
"""

# %% [markdown]
# ## The files
#
# Two networks are trained here in a few seconds, from different seeds. With checkpoints of your own, begin below.

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
print(f"right answers: {parents[0]:.1%} and {parents[1]:.1%}")

# %% [markdown]
# ## The plain mean fails
#
# Unit 7 of one network has nothing to do with unit 7 of the other, so the mean of their weights is a mean of
# unrelated things.

# %%
plain = accuracy(it.interpolate(a, b, 0.5), test)
print(f"the mean of the weights: {plain:.1%}")

# %% [markdown]
# ## Aligned first, it works
#
# `merge` moves both networks into one frame by elements of their symmetry, which changes neither of them as a
# function, and then takes the mean. It scores the result beside its parents on the data it is given, here training
# images, and says in its notes where it is worse than they are. Test images are kept for the end.

# %%
merged = it.merge([a, b], x, data=train)
print(merged)
aligned = accuracy(merged.model, test)
print(f"merged after alignment: {aligned:.1%}")

# %% [markdown]
# The mean of two units varies less than each of them. REPAIR (Jordan et al. 2023) gives every unit its spread back,
# by the training images, without labels and without training.

# %%
mended = it.merge([a, b], x, data=train, repair="repair")
repaired = accuracy(mended.model, test)
print(f"merged and mended: {repaired:.1%}")

# %% [markdown]
# ## The line between the two
#
# The mean is the middle of a straight line. Along the line, before and after alignment: the barrier is how far the
# error rises above the line between the ends.

# %%
moved = it.align(a, b, x).model
as_trained, after = (it.barrier(a, model, test, points=11) for model in (b, moved))
print(f"error barrier as trained: {as_trained.error_barrier:.3f}, after alignment: {after.error_barrier:.3f}")
figure = Figure(figsize=(5, 3), layout="constrained")
axes = figure.subplots()
for line, label in ((as_trained, "as trained"), (after, "after alignment")):
    axes.plot(line.ts, line.error or (), label=label)
axes.set(xlabel="from the first network (0) to the second (1)", ylabel="wrong answers", ylim=(0, None))
axes.legend()
figure.savefig(out_folder() / "merge_models.png", dpi=150)

# %% [markdown]
# ## Keep it
#
# The merged network is an ordinary module of your own class. It can be trained further, and saved.

# %%
file = files[0].with_name("merged.safetensors")
save_file(mended.model.state_dict(), file)
assert accuracy(restore(file), test) == repaired
print(f"wrote {file}")
