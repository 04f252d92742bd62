"""The collectives on tensors, behind ``farandole.torch.ops``.

allreduce.py, reducescatter.py, movements.py    what programs call
autograd.py                                     how PyTorch records them
calls.py                                        checked, laid out and submitted by name
handles.py                                      waited for
"""
