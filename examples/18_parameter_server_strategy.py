"""TensorFlow's tutorial of ParameterServerStrategy, with a custom training loop.

    farandole run -np 4 -- python examples/18_parameter_server_strategy.py

Rank 0 is the chief, the last rank a server, and those between are workers. Here is what differs
from the tutorial (https://www.tensorflow.org/tutorials/distribute/parameter_server_training): the
strategy's and the coordinator's classes, no code that starts TensorFlow's servers, and Keras 3.
"""

from __future__ import annotations

import random

import keras
import tensorflow as tf

import farandole as fd
from farandole.strategy import ClusterCoordinator, ParameterServerStrategy

partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=256 << 10, max_shards=2
)
strategy = ParameterServerStrategy(variable_partitioner=partitioner)
coordinator = ClusterCoordinator(strategy)

# ---- data: three tastes, and whether there is ice cream among them ----

FEATURES = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
LABELS = ["yes", "no"]

with strategy.scope():
    feature_lookup = keras.layers.StringLookup(vocabulary=FEATURES, mask_token=None)
    label_lookup = keras.layers.StringLookup(vocabulary=LABELS, num_oov_indices=0, mask_token=None)


def examples(number: int = 200) -> dict[str, list]:
    features, labels = [], []
    for _ in range(number):
        chosen = random.sample(FEATURES, 3)
        features.append(chosen)
        labels.append(["yes"] if "avenger" in chosen else ["no"])
    return {"features": features, "label": labels}


def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
    del context
    random.seed(fd.rank())  # each worker has samples of its own
    raw = tf.data.Dataset.from_tensor_slices(examples())
    return (
        raw.map(lambda x: (feature_lookup(x["features"]), label_lookup(x["label"])))
        .shuffle(200)
        .batch(32)
        .repeat()
    )


# ---- the model ----

with strategy.scope():
    inputs = keras.layers.Input((3,), dtype="int64")
    embedded = keras.layers.Embedding(feature_lookup.vocabulary_size(), 16384)(inputs)
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.ops.mean(embedded, axis=1))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.RMSprop(learning_rate=0.01)
    accuracy = keras.metrics.BinaryAccuracy()


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = keras.losses.BinaryCrossentropy(reduction=None)(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


# ---- the training loop ----


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

for epoch in range(4):
    accuracy.reset_state()
    for _ in range(5):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()  # at the end of an epoch
    if fd.rank() == 0:
        print(f"Finished epoch {epoch}, accuracy is {accuracy.result().numpy():.4f}.")

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
final = loss.fetch()
if fd.rank() == 0:
    print(f"Final loss is {final:.4f}, after {int(optimizer.iterations)} updates")
