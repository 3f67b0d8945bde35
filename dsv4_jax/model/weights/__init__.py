"""The model's weights: what they are called, how they are stored, where they come from and where they lie.

`params.py` has the tree, `quantised.py` its leaves in FP8 and FP4, `names.py` the names of tensors; `loading.py` and
`saving.py` read and write checkpoints (`sources.py` checks their tensors, `safetensors.py` knows the file format), and
`initialisation.py` makes random ones. Arrays that are still to be made are `deferred.py`'s. `stacking.py` and
`packing.py` give the form to decode with, `split.py` says how a model is divided among devices, and `placement.py` puts
each part where it belongs.
"""
