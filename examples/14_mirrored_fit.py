"""TensorFlow's tutorial "Distributed training with Keras" on digits: only the strategy's class is
farandole's.

farandole run -np 2 -- python examples/14_mirrored_fit.py
"""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from farandole.strategy import MirroredStrategy

keras.utils.set_random_seed(0)
strategy = MirroredStrategy()  # here: tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
labels = digits.target
BUFFER_SIZE, BATCH_SIZE = 1200, 64  # of all replicas together; the last batch has 48
train_dataset = tf.data.Dataset.from_tensor_slices((images[:1200], labels[:1200]))
train_dataset = train_dataset.cache().shuffle(BUFFER_SIZE, seed=42).batch(BATCH_SIZE)
eval_dataset = tf.data.Dataset.from_tensor_slices((images[1200:], labels[1200:])).batch(BATCH_SIZE)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(0.001),
        metrics=["accuracy"],
    )

# Every rank has the same folder, and rank 0 writes.
checkpoint_dir = os.environ.get("CHECKPOINTS") or tempfile.mkdtemp()
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}.weights.h5")  # noqa: PTH118


def decay(epoch: int) -> float:
    if epoch < 3:
        return 1e-3
    return 5e-4 if epoch < 7 else 1e-4


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        rate = float(np.asarray(model.optimizer.learning_rate))
        loss = (logs or {})["loss"]
        print(f"Learning rate for epoch {epoch + 1} is {rate:.4f}, loss {loss:.4f}")


callbacks = [
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
model.fit(train_dataset, epochs=8, callbacks=callbacks, verbose=0)
eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
print(f"Eval loss: {eval_loss:.4f}, eval accuracy: {eval_acc:.4f}")

path = os.path.join(checkpoint_dir, "my_model.keras")  # noqa: PTH118
model.save(path)
with strategy.scope():
    replicated_model = keras.models.load_model(path)
eval_loss, eval_acc = replicated_model.evaluate(eval_dataset, verbose=0)
print(f"Loaded: loss {eval_loss:.4f}, accuracy: {eval_acc:.4f}")
