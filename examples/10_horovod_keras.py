"""Digits, as a Keras program for Horovod is written: nothing here knows farandole.

farandole run --horovod -np 2 -- python examples/10_horovod_keras.py
"""

import argparse
from pathlib import Path
from tempfile import mkdtemp

import horovod.keras as hvd
import keras
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Digits with Horovod and Keras")
parser.add_argument("--batch-size", type=int, default=32, help="of every rank")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.02, help="of one rank")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())

digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
labels = digits.target.astype("int32")
train = slice(hvd.rank(), 1436, hvd.size())  # as many for each rank
test = slice(1436, None)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)

# More ranks see more samples in a step, and take larger ones.
scaled_lr = args.base_lr * hvd.size()
optimizer = keras.optimizers.SGD(scaled_lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
)
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

callbacks = [
    # All ranks begin with rank 0's weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Metrics of all ranks, before other callbacks look at them.
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs, verbose=int(hvd.rank() == 0)
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=scaled_lr, multiplier=0.5, start_epoch=args.epochs - 2
    ),
]
checkpoint = Path(mkdtemp()) / "checkpoint.keras"
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint))

model.fit(
    images[train],
    labels[train],
    batch_size=args.batch_size,
    epochs=args.epochs,
    callbacks=callbacks,
    validation_data=(images[test], labels[test]),
    verbose=2 if hvd.rank() == 0 else 0,
)

loss, accuracy = model.evaluate(images[test], labels[test], verbose=0)
accuracy = hvd.allreduce(accuracy, name="accuracy")
if hvd.rank() == 0:
    resumed = hvd.load_model(checkpoint)  # its optimizer is distributed again
    print(f"{type(resumed.optimizer).__name__} after {int(resumed.optimizer.iterations)} steps")
    print(f"accuracy {accuracy:.3f}")
