"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy" on digits: only the
strategy's class is farandole's.

farandole run -np 2 -- python examples/15_mirrored_loop.py
"""

import os
import tempfile

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from farandole.strategy import MirroredStrategy

keras.utils.set_random_seed(0)
strategy = MirroredStrategy()  # here: tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
labels = digits.target
BATCH_SIZE_PER_REPLICA = 64 // strategy.num_replicas_in_sync
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 6

train_dataset = tf.data.Dataset.from_tensor_slices((images[:1200], labels[:1200]))
train_dataset = train_dataset.shuffle(1200, seed=42).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((images[1200:], labels[1200:]))
test_dataset = test_dataset.batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


# Every rank has the same folder, and rank 0 writes.
checkpoint_dir = os.environ.get("CHECKPOINTS") or tempfile.mkdtemp()
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")  # noqa: PTH118

with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    optimizer = keras.optimizers.Adam(learning_rate=0.002)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


for epoch in range(EPOCHS):
    total_loss, num_batches = 0.0, 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    train_loss = total_loss / num_batches
    for x in test_dist_dataset:
        distributed_test_step(x)
    if epoch % 2 == 0:
        checkpoint.save(checkpoint_prefix)
    print(
        f"Epoch {epoch + 1}, Loss: {train_loss:.4f}, Accuracy: {train_accuracy.result():.4f}, "
        f"Test Loss: {test_loss.result():.4f}, Test Accuracy: {test_accuracy.result():.4f}"
    )
    test_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()

eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model, new_optimizer = create_model(), keras.optimizers.Adam()
checkpoint = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
checkpoint.restore(tf.train.latest_checkpoint(checkpoint_dir)).expect_partial()
for images, labels in test_dataset:
    eval_accuracy.update_state(labels, new_model(images, training=False))
print(f"Accuracy after restoring the saved model without strategy: {eval_accuracy.result():.4f}")
