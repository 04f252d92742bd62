"""Optimizers that step alike on all ranks, behind ``farandole.torch.DistributedOptimizer``.

exchange.py, sparse_gradients.py    gradients on their way to the mean of all ranks
plan.py                             what is made for the parameters as they are now
shards.py, sharded.py               a part of the parameters updated on every rank
adasum.py                           moves instead of gradients
hooked.py, passes.py                what autograd tells of a backward pass
parameters.py, wrapped.py           what is looked at before
silence.py, weights.py, names.py    what nobody would notice otherwise
parts.py                            gradients of a batch that a rank computes in several parts
weighing.py                         whether losses have the weight of a part of a batch
join.py                             a rank without further batches
"""
