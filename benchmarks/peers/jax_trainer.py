"""JAX: one process with one device a rank, jax.jit over XLA's gloo collectives. Imports no torch."""

import math
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .job import Job
from .sizes import Config

Params = dict[str, Any]
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 1e-2  # torch's defaults


class JaxTrainer:
    """Parameters and optimizer state on every rank, the batch cut over ranks."""

    def __init__(self, job: Job) -> None:
        self.note, self.update_seconds = f"jax {jax.__version__}", 0.0
        _join(job)
        mesh = Mesh(np.array(jax.devices()), ("data",))
        whole, self._cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        given = np.load(job.weights)
        params = {name: jax.make_array_from_callback(v.shape, whole, partial(_part, v)) for name, v in given.items()}
        count = jax.device_put(jnp.zeros((), jnp.float32), whole)
        zeros = partial(jax.tree.map, jnp.zeros_like)
        self._state = (params, zeros(params), zeros(params), count)
        like = jax.tree.map(lambda _: whole, self._state)
        self._parameter_bytes = sum(value.nbytes for value in params.values())
        self._run = jax.jit(
            partial(_step, job.config),
            donate_argnums=0,
            in_shardings=(like, self._cut, self._cut),
            out_shardings=(whole, like),
        )

    def prepare(self, x: Any, y: Any) -> tuple[Any, Any]:
        """This rank's rows as part of arrays over all ranks."""
        make = jax.make_array_from_process_local_data
        return make(self._cut, x.astype(np.int32)), make(self._cut, y.astype(np.int32))

    def step(self, batch: tuple[Any, Any]) -> float:
        """One step."""
        loss, self._state = self._run(self._state, *batch)
        jax.block_until_ready(self._state)
        return float(loss)

    def finish(self) -> None:
        """Every step is complete when it returns."""

    def rest_bytes(self) -> int:
        """What this rank's device holds of parameters and optimizer state."""
        arrays = jax.tree.leaves(self._state)
        return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)

    def parameter_bytes(self) -> int:
        """Of the whole model."""
        return self._parameter_bytes

    def tensor_bytes(self, batch: tuple[Any, Any]) -> int:
        """Not counted: one kernel of XLA is the whole step."""
        return 0

    def hardware(self) -> str:
        """Nothing simulates this peer."""
        return ""

    def simulated_ms(self, hardware: Sequence[str]) -> list[float]:
        """Nothing simulates this peer."""
        return []

    def collectives(self, batch: tuple[Any, Any]) -> dict[str, int]:
        """As the compiled program has them."""
        text = self._run.lower(self._state, *batch).compile().as_text()
        self.step(batch)
        found = {kind: len(re.findall(rf"^.* = .*? {kind}(?:-start)?\(", text, re.MULTILINE)) for kind in KINDS}
        return {kind: count for kind, count in found.items() if count}


def _part(value: Any, index: Any) -> Any:
    return value[index]


def _join(job: Job) -> None:
    """Form the job. XLA's gloo has to be told which interface to use; no public name does that."""
    from jax._src.lib import _jax

    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, job.world, job.rank, local_device_ids=[0])
    make = _jax.make_gloo_tcp_collectives
    where = {"hostname": os.environ["PEERS_ADDRESS"], "interface": os.environ["GLOO_SOCKET_IFNAME"]}
    _jax.make_gloo_tcp_collectives = lambda distributed_client: make(distributed_client=distributed_client, **where)


def _step(config: Config, state: tuple[Params, Params, Params, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Forward, backward and AdamW, as torch's defaults have it."""
    params, mean, square, count = state
    loss, grads = jax.value_and_grad(partial(_loss, config))(params, x, y)
    count = count + 1
    rate, tree = config.learning_rate, jax.tree.map
    # not 1 - beta ** count: in float32 that cancels, to 5 digits for BETA2
    c1, c2 = -jnp.expm1(count * math.log(BETA1)), -jnp.expm1(count * math.log(BETA2))
    mean = tree(lambda m, g: BETA1 * m + (1 - BETA1) * g, mean, grads)
    square = tree(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, square, grads)

    def update(p: Any, m: Any, v: Any) -> Any:
        return p * (1 - rate * DECAY) - rate / c1 * m / (jnp.sqrt(v / c2) + EPSILON)

    return loss, (tree(update, params, mean, square), mean, square, count)


def _loss(config: Config, params: Params, x: Any, y: Any) -> Any:
    logits = _gpt(config, params, x) if config.kind == "gpt" else _mlp(config, params, x)
    logs = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
    return -jnp.take_along_axis(logs, y.reshape(-1, 1), 1).mean()


def _norm(p: Params, name: str, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    spread = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred / spread * p[f"{name}.weight"] + p[f"{name}.bias"]


def _linear(p: Params, name: str, x: Any) -> Any:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _gpt(config: Config, p: Params, x: Any) -> Any:
    (b, t), d = x.shape, config.width
    h = p["bytes.weight"][x] + p["positions.weight"][jnp.arange(t)]
    seen = jnp.tril(jnp.ones((t, t), bool))
    for i in range(config.layers):
        at = f"blocks.{i}"
        parts = jnp.split(_linear(p, f"{at}.qkv", _norm(p, f"{at}.norm1", h)), 3, 2)
        q, k, v = (z.reshape(b, t, config.heads, -1).transpose(0, 2, 1, 3) for z in parts)
        scores = jnp.where(seen, q @ k.transpose(0, 1, 3, 2) / (d // config.heads) ** 0.5, -jnp.inf)
        mixed = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(b, t, d)
        h = h + _linear(p, f"{at}.proj", mixed)
        up = jax.nn.gelu(_linear(p, f"{at}.up", _norm(p, f"{at}.norm2", h)), approximate=False)
        h = h + _linear(p, f"{at}.down", up)
    return _linear(p, "head", _norm(p, "norm", h))


def _mlp(config: Config, p: Params, x: Any) -> Any:
    h = p["bytes.weight"][x].reshape(x.shape[0], -1)
    for i in range(config.layers):
        h = jax.nn.relu(_linear(p, f"blocks.{i}", h))
    return _linear(p, "head", h)
