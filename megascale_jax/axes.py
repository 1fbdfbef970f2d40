"""The only place where mesh axes and logical dims are spelled.

An *axis* belongs to the device mesh; a *dim* belongs to a tensor. ``parallel/rules.py`` maps one to the other.
"""

PIPE = "pipe"
DATA = "data"
TENSOR = "tensor"
MESH_AXES = (PIPE, DATA, TENSOR)
"""Outermost first: ``tensor`` is innermost, so that its ranks share one NVLink domain."""

EMBED = "embed"
HEADS = "heads"
KV_HEADS = "kv_heads"
HEAD_DIM = "head_dim"
MLP = "mlp"
VOCAB = "vocab"
POSITION = "position"
STAGE = "stage"
CHUNK = "chunk"
LAYER = "layer"
