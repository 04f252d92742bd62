"""What farandole.torch.GlobalBatch is made of.

numbers.py     which samples come in which batch; where a pass stands, and how it goes on from there
reading.py     a rank's part of every batch, in micro-batches
agreement.py   that all ranks read the same batches
losses.py      what a loss of a part of a batch weighs
"""
