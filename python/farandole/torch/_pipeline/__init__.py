"""What farandole.torch.Pipeline is made of, besides farandole.pipeline.

layers    the layers of a model, of which a rank makes its own
costs     what layers cost, measured
tensors   what is sent between stages, and its gradients
work      a step on one rank
state     the whole model's state, in serial form
refusals  layers that cannot be in a pipeline, or not as in serial training
"""

from __future__ import annotations
