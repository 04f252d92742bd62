"""The modules of farandole.torch.GlobalBatch.

beginning.py      arguments; that all ranks begin alike
numbers.py        the samples of each batch; the position of a pass, to resume it
reading.py        a rank's part of every batch, in micro-batches
agreement.py      that all ranks read the same batches
passes.py         these together: passes over the data
sums.py           adds and gathers the values of all parts
ahead.py          notices a program that fetches batches ahead
kept.py           notices a program that drops gradients of earlier micro-batches
losses.py         the weight of the loss of a part of a batch
normalization.py  layers that look at other samples of a batch
logical.py        logical ranks: the parts of a batch that a rank computes one by one
statistics.py     merges layers' running statistics over parts
"""
