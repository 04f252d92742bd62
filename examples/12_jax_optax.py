"""Data-parallel training with JAX and optax: handwritten digits.

    farandole run -np 2 -- python examples/12_jax_optax.py

The lines marked with (fd) are all that differs from training on one rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import farandole.jax as fdj

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


Params = dict[str, dict[str, jax.Array]]


def network(key: jax.Array) -> Params:
    first, second = jax.random.split(key)
    return {
        "layer_1": {"w": 0.1 * jax.random.normal(first, (64, 128)), "b": jnp.zeros(128)},
        "layer_2": {"w": 0.1 * jax.random.normal(second, (128, 10)), "b": jnp.zeros(10)},
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ params["layer_1"]["w"] + params["layer_1"]["b"])
    return hidden @ params["layer_2"]["w"] + params["layer_2"]["b"]


def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def main() -> None:
    fdj.init()  # (fd)
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    train, test = slice(0, 1536), slice(1536, None)

    params = network(jax.random.key(fdj.rank()))
    params = fdj.broadcast_parameters(params, root=0)  # (fd)
    optimizer = fdj.distributed(optax.sgd(0.2, momentum=0.9))  # (fd)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):  # type: ignore[no-untyped-def]
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)  # of all ranks' gradients
        loss = fdj.allreduce(loss, name="loss")  # (fd)
        return optax.apply_updates(params, updates), state, loss

    for epoch in range(EPOCHS):
        # The same shuffle on every rank; of every batch, each rank takes its own part.
        order = np.random.default_rng(epoch).permutation(1536)
        for batch in order.reshape(-1, BATCH):
            mine = batch[fdj.rank() :: fdj.size()]  # (fd)
            params, state, loss = step(params, state, images[train][mine], labels[train][mine])
        if fdj.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")

    accuracy = (logits(params, images[test]).argmax(1) == labels[test]).mean()
    if fdj.rank() == 0:
        print(f"accuracy on unseen digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
