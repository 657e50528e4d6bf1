"""You have two checkpoints of one architecture. Are they the same network? If not, how similar are they, and where?

Run it as a script (`python examples/compare_checkpoints.py`) or cell by cell in an editor that knows `# %%`.
"""

# %% [markdown]
# ## The files
#
# Two networks are trained here in a few seconds, to have files to compare: `seed0.safetensors` and
# `seed1.safetensors`. With checkpoints of your own, write a `restore` of your own and begin below it.

# %%
import tempfile
from pathlib import Path

import torch
from digit_classifier import accuracy, digits, example_inputs, out_folder, restore, train_checkpoints

import intertwine as it
from intertwine.align.correlations import matched_correlations
from intertwine.figures import write_cells

files = train_checkpoints(Path(tempfile.mkdtemp()), count=2)
a, b = (restore(file) for file in files)
x, test = example_inputs(), digits("test")
print(f"right answers: {accuracy(a, test):.1%} and {accuracy(b, test):.1%}")

# %% [markdown]
# ## What may differ without any difference
#
# The symmetry of the architecture says which changes of the weights leave the function as it is, and the certificate
# proves it on random elements, in double precision.

# %%
sym = it.symmetry(a, x)
print(sym)
certificate = sym.certify(a, x)
print(certificate)

# %% [markdown]
# ## The same network?
#
# A moved copy of `a` has other weights and computes the same. `equivalent` finds the element between the two. Between
# `a` and `b`, which were trained from different seeds, there is none. The fingerprints say the same, and they can be
# kept beside the files.

# %%
twin = sym.act(sym.random(seed=0), a)
old, new = (model.state_dict()["hidden1.weight"] for model in (a, twin))
moved_by = float((new - old).norm() / old.norm())
print(f"weights of the twin's first layer: changed by {moved_by:.0%} of their length")
print("a and its twin are one network:", it.equivalent(a, twin, x) is not None)
print("a and b are one network:", it.equivalent(a, b, x) is not None)
print("fingerprints:", *(it.fingerprint(model, x) for model in (a, twin, b)))

# %% [markdown]
# ## How similar, layer by layer?
#
# Features of both networks on the same test images, every layer against every layer. `linear_cka` does not see
# rotations; `relu_procrustes` sees everything but what a ReLU layer is free to do, permutations and positive scales.

# %%
layers = ["hidden1", "relu1", "hidden2", "relu2", "hidden3", "relu3", "answer"]
found = it.compare(a, b, test, layers, ["linear_cka", "relu_procrustes"])
for layer in layers:
    values = (found.result(layer, layer, measure).value for measure in found.measures)
    print(f"{layer:8}", *(f"{value:.2f}" for value in values))
picture = found.plot("linear_cka", names=("network a", "network b"))
axes = picture.axes[0]
axes.images[0].set_clim(0.7, 1)
write_cells(axes)
picture.savefig(out_folder() / "compare_checkpoints.png", dpi=150)

# %% [markdown]
# ## Unit by unit
#
# `align` moves `b` by an element of the symmetry, so that it still computes what it did, with units in the places of
# their counterparts in `a`. How well matched units correlate says how much of the two networks is the same up to
# symmetry.

# %%
aligned = it.align(a, b, x)
with torch.no_grad():
    kept = max(float((aligned.model(images) - b(images)).abs().max()) for images, _ in test)
print(aligned)
print(f"largest change of an output of b: {kept:.1e}")
before, after = (matched_correlations(a, model, test, x) for model in (b, aligned.model))
print(before)
print(after)
