"""What farandole.torch.GlobalBatch is made of.

beginning.py      arguments; that all ranks begin alike
numbers.py        which samples come in which batch; where a pass stands and goes on
reading.py        a rank's part of every batch, in micro-batches
agreement.py      that all ranks read the same batches
passes.py         these together: passes over the data
sums.py           what ranks have of parts, to what there is of all
losses.py         what a loss of a part of a batch weighs
normalization.py  layers that look at other samples of a batch
logical.py        logical ranks: the parts of a batch that a rank computes one by one
statistics.py     what layers remember of parts: joined
"""
