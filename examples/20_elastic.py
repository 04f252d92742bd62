"""Training that goes on when ranks are lost, and takes in new ones.

    farandole run -np 3 --min-np 1 -- python examples/20_elastic.py --lose 4 --slow 0.1

Rank 1 is killed in epoch 4. The others go on from the last commit; another one is started, gets
their state and joins them. The lines marked with (fd) are what that needs.
"""

import argparse
import os
import signal
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import farandole.torch as hvd

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together

parser = argparse.ArgumentParser()
parser.add_argument("--lose", type=int, help="epoch in which rank 1 is killed")
parser.add_argument("--slow", type=float, default=0, help="seconds that each batch takes longer")
arguments = parser.parse_args()

hvd.init()  # a rank that comes later waits here for its place
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1536), slice(1536, None)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)  # (fd)


@hvd.elastic.run  # (fd) calls it again in every world
def learn(state: hvd.elastic.TorchState) -> None:
    print(f"epoch {state.epoch}, batch {state.batch}: rank {hvd.rank()} of {hvd.size()}")
    while state.epoch < EPOCHS:
        order = torch.randperm(1536, generator=torch.Generator().manual_seed(state.epoch))
        batches = order.split(BATCH)
        while state.batch < len(batches):
            mine = batches[state.batch][hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            cross_entropy(model(images[train][mine]), labels[train][mine]).backward()
            optimizer.step()
            time.sleep(arguments.slow)
            state.batch += 1
            if state.batch % 8 == 0:
                state.commit()  # (fd) what is lost with a rank: seven batches at most
            if state.epoch == arguments.lose and state.batch == 12:
                be_lost()
        state.epoch, state.batch = state.epoch + 1, 0
    state.commit()


def be_lost() -> None:
    """As rank 1, the first time."""
    if hvd.rank() == 1 and os.environ["FARANDOLE_RESTART_COUNT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


learn(state)
with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
if hvd.rank() == 0:
    print(f"accuracy on unseen digits: {accuracy:.3f}")
