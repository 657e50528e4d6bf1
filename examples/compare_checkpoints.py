"""Compare two checkpoints of one architecture: are they the same network, and if not, how similar is each layer?

Run it as a script (`python examples/compare_checkpoints.py`) or cell by cell in an editor that knows `# %%`.
"""

# %% [markdown]
# ## The files
#
# This cell trains two networks in a few seconds: `seed0.safetensors` and `seed1.safetensors`. To use checkpoints of
# your own, replace `restore` by a function that loads them.

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
print(f"accuracy: {accuracy(a, test):.1%} and {accuracy(b, test):.1%}")

# %% [markdown]
# ## The symmetry of the architecture
#
# The symmetry is the set of weight changes that keep the function. The certificate checks random elements of it in
# double precision.

# %%
sym = it.symmetry(a, x)
print(sym)
certificate = sym.certify(a, x)
print(certificate)

# %% [markdown]
# ## The same network?
#
# A moved copy of `a` has other weights and computes the same function. `equivalent` finds the element that maps one to
# the other. There is none between `a` and `b`, which were trained from different seeds. Fingerprints give the same
# answer, and can be stored beside the files.

# %%
copy = sym.act(sym.random(seed=0), a)
old, new = (model.state_dict()["hidden1.weight"] for model in (a, copy))
moved_by = float((new - old).norm() / old.norm())
print(f"change of the first layer's weights in the moved copy: {moved_by:.0%} of their norm")
print("a and its moved copy are equivalent:", it.equivalent(a, copy, x) is not None)
print("a and b are equivalent:", it.equivalent(a, b, x) is not None)
print("fingerprints:", *(it.fingerprint(model, x) for model in (a, copy, b)))

# %% [markdown]
# ## How similar, layer by layer?
#
# `compare` measures the similarity of the features of both networks on the same test images, for every pair of layers.
# `linear_cka` is invariant to rotations; `relu_procrustes` only to the symmetry of a ReLU layer, permutations and
# positive scales.

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
# `align` moves `b` by an element of its symmetry, which keeps its function and puts its units in the positions of their
# counterparts in `a`. The correlations of matched units show how much of the two networks is equal up to symmetry.

# %%
aligned = it.align(a, b, x)
with torch.no_grad():
    kept = max(float((aligned.model(images) - b(images)).abs().max()) for images, _ in test)
print(aligned)
print(f"largest change of the outputs of b: {kept:.1e}")
before, after = (matched_correlations(a, model, test, x) for model in (b, aligned.model))
print(before)
print(after)
