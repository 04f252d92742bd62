"""Digits with Keras 3, written for one process: the batch is that of all ranks together.

farandole run -np 2 -- python examples/13_global_batch.py

A program for Tarantella looks like this, but for the import. The lines that a program of one
process has not are marked.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import farandole.keras as fd  # (1)

BATCH = 64  # of all ranks together

fd.init()  # (2)
keras.utils.set_random_seed(0)


def lenet() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(20, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(50, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(100, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
train = tf.data.Dataset.from_tensor_slices((images[:1200], digits.target[:1200]))
validation = tf.data.Dataset.from_tensor_slices((images[1200:1500], digits.target[1200:1500]))
test = tf.data.Dataset.from_tensor_slices((images[1500:], digits.target[1500:]))
train = train.shuffle(len(train), seed=42).batch(BATCH)  # the last batch has 48

model = fd.Model(lenet())  # (3)
model.compile(
    optimizer=keras.optimizers.Adam(0.002),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
)
history = model.fit(train, validation_data=validation.batch(BATCH), epochs=8, verbose=0)
loss, accuracy = model.evaluate(test.batch(BATCH), verbose=0)  # the same on every rank
if fd.rank() == 0:
    for epoch, (seen, held_out) in enumerate(
        zip(history.history["loss"], history.history["val_loss"], strict=True)
    ):
        print(f"epoch {epoch}: loss {seen:.4f}, on held-out digits {held_out:.4f}")
    print(f"test loss {loss:.4f}, accuracy {accuracy:.4f}")
