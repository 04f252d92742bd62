"""Digits, as a TensorFlow 2 program for Horovod is written: nothing here knows farandole.

farandole run --horovod -np 2 -- python examples/09_tensorflow_gradient_tape.py
"""

import argparse

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32, help="of every rank")
parser.add_argument("--steps", type=int, default=600, help="of one rank; N ranks take 1/N each")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
args = parser.parse_args()

hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.keras.utils.set_random_seed(42 + hvd.rank())

digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
labels = digits.target.astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000).batch(args.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))

    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # After the first step, when the optimizer has its state, everybody gets rank 0's.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss_value


for batch, (x, y) in enumerate(dataset.take(args.steps // hvd.size())):
    loss_value = training_step(x, y, batch == 0)
    if batch % 50 == 0:
        mean = hvd.allreduce(loss_value, name="mean loss")
        if hvd.rank() == 0:
            print(f"step {batch}: loss {float(mean):.4f}")

correct = tf.argmax(model(images[1437:][hvd.rank() :: hvd.size()]), 1)
correct = tf.cast(correct == labels[1437:][hvd.rank() :: hvd.size()], tf.float32)
accuracy = hvd.allreduce(tf.reduce_sum(correct), op=hvd.Sum, name="correct") / 360
if hvd.rank() == 0:
    print(f"accuracy {float(accuracy):.3f}")
