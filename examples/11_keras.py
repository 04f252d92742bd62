"""Digits with Keras 3, on the backend that KERAS_BACKEND names: tensorflow, torch or jax.

KERAS_BACKEND=jax farandole run -np 2 -- python examples/11_keras.py
"""

import keras
from sklearn.datasets import load_digits

import farandole.keras as hvd

hvd.init()
keras.utils.set_random_seed(0)

digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
labels = digits.target.astype("int32")
mine = slice(hvd.rank(), 1436, hvd.size())  # as many for each rank

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
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.002)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    images[mine],
    labels[mine],
    batch_size=64 // hvd.size(),
    epochs=8,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
)

loss, accuracy = model.evaluate(images[1436:], labels[1436:], verbose=0)
if hvd.rank() == 0:
    for epoch, mean in enumerate(history.history["loss"]):
        print(f"epoch {epoch}: loss {mean:.3f}")
    print(f"accuracy on {keras.backend.backend()}: {accuracy:.3f}")
