"""The modules of farandole.torch.Pipeline, besides farandole.pipeline.

layers    the layers of a model; a rank makes only its own
costs     the cost of layers, counted or measured
tensors   tensors sent between stages, and their gradients
work      a step on one rank
state     the whole model's state, in serial form
refusals  layers that cannot be in a pipeline, or not as in serial training
"""

from __future__ import annotations
