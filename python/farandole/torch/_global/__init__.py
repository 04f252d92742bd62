"""What farandole.torch.GlobalBatch is made of.

numbers.py        which samples come in which batch; where a pass stands and goes on
reading.py        a rank's part of every batch, in micro-batches
agreement.py      that all ranks read the same batches
passes.py         these together: passes over the data
losses.py         what a loss of a part of a batch weighs
normalization.py  layers that look at other samples of a batch
"""
