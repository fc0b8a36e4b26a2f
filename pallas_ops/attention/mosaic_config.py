"""How flash attention's forward is cut on Hopper, and which calls its kernel takes.

Imports nothing of Pallas, so that the package can be imported without it.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pallas_ops import tuning
from pallas_ops.attention.validate import Spec

ROWS = 64  # of a warpgroup, by wgmma
READ_BY_TILE = ("bias", "mask")  # operands that come without TMA, straight into registers
_SHARED_MEMORY = 223 * 1024  # for tiles: Mosaic and the barriers take some of the 227 KiB


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of `flash_attention_fwd` is cut on Hopper.

    A block of the grid takes 64 * `consumers` queries at a time and `block_kv` keys a step, and
    holds `stages` steps in shared memory. `blocks` of them stay on the card and share the tiles; 0
    launches one for each tile. With `producer` a warpgroup of its own issues the loads, and
    setmaxnreg gives its registers to the consumers; without it the first consumer does, and blocks
    must be 0: for toolchains that ignore setmaxnreg.
    """

    block_kv: int = 128
    consumers: int = 2
    stages: int = 2
    blocks: int = 132
    producer: bool = True

    def __post_init__(self):
        tuning.check_fields(self)
        if self.block_kv not in (64, 128, 192, 256):
            raise ValueError(f"block_kv must be 64, 128, 192 or 256, got {self}")
        if not 1 <= self.consumers <= 3 or self.stages < 2 or self.blocks < 0:
            raise ValueError(f"1 to 3 consumers, 2 stages or more, blocks >= 0, got {self}")
        if self.blocks and not self.producer:
            raise ValueError(f"without a producer blocks must be 0, got {self}")

    @property
    def rows(self) -> int:
        return ROWS * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        """A consumer's and the producer's, of 65536."""
        return (160, 32) if self.consumers == 3 else (240, 32)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How the work of `flash_attention_bwd` is cut on Hopper.

    A block of the grid takes 128 keys, 64 for each of two consumers, and `block_q` queries a step,
    of which `stages` steps are in shared memory.
    """

    block_q: int = 64
    stages: int = 2

    def __post_init__(self):
        tuning.check_fields(self)
        if self.block_q not in (64, 128) or self.stages < 2:
            raise ValueError(f"block_q must be 64 or 128 and stages 2 or more, got {self}")


class Sizes(NamedTuple):
    """What is static of a call; `hp` and `hvp` are head dimensions in whole swizzled lines."""

    b: int
    t: int
    s: int
    n: int
    group: int
    h: int
    hv: int

    @classmethod
    def of(cls, query, key, value) -> "Sizes":
        b, t, n, h = query.shape
        s, kv_heads, hv = value.shape[1:]
        return cls(b, t, s, n, n // kv_heads if kv_heads else 1, h, hv)

    @property
    def hp(self) -> int:
        return -(-self.h // 64) * 64

    @property
    def hvp(self) -> int:
        return -(-self.hv // 64) * 64

    def bytes_of_inputs(self, config: Config) -> int:
        steps = config.stages * config.block_kv * (self.hp + self.hvp)
        return 2 * (config.rows * self.hp + steps)

    def shares_output(self, config: Config) -> bool:
        """Whether results take the queries' place, for want of room of their own."""
        whole = self.bytes_of_inputs(config) + 2 * config.rows * self.hvp
        return self.hvp == self.hp and whole > _SHARED_MEMORY

    def shared_memory(self, config: Config) -> int:
        output = 0 if self.shares_output(config) else 2 * config.rows * self.hvp
        return self.bytes_of_inputs(config) + output

    def backward_shared_memory(self, config: BackwardConfig) -> int:
        """Keys, values; queries, cotangents; gradients of scores, twice; a gradient of queries."""
        lines = (2 * ROWS + config.stages * config.block_q) * (self.hp + self.hvp)
        return 2 * lines + 8 * ROWS * config.block_q + 4 * config.block_q * self.hp

    def refuse_backward(self, config: BackwardConfig) -> str | None:
        """Why a config does not fit."""
        if self.backward_shared_memory(config) > _SHARED_MEMORY:
            return f"{config} needs {self.backward_shared_memory(config)} bytes of shared memory"
        if self.hp < 128 and config.block_q < 128:
            return f"{config} needs heads over 64, not H={self.h}"
        return None


def heuristic(device_kind: str | None, query, key, value, *rest, fields, **params) -> Config:
    """Tiles by head dimension; a tile of a bias needs registers, too."""
    del device_kind, rest, params
    sizes = Sizes.of(query, key, value)
    widest = max(sizes.hp, sizes.hvp)
    block_kv = 64 if "bias" in fields or widest > 128 else 128
    return Config(block_kv, consumers=3 if widest <= 64 else 2)


def candidates(query, key, value, *rest, **params) -> list[Config]:
    del rest, params
    sizes = Sizes.of(query, key, value)
    made = [
        Config(block_kv, consumers, stages, blocks, producer)
        for consumers in (2, 3)
        for block_kv in (64, 128, 192, 256)
        for stages in (2, 3)
        for producer, blocks in ((True, 132), (True, 0), (False, 0))
        if producer or consumers == 2
    ]
    return [c for c in made if sizes.shared_memory(c) <= _SHARED_MEMORY]


def refuse(query, key, value, *rest, config: Config | None, **params) -> str | None:
    """Why a call can't be served."""
    del rest, params
    dtypes = [jnp.dtype(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in (jnp.bfloat16, jnp.float16):
        given = ", ".join(map(str, dtypes))
        return f"it takes query, key and value all in bfloat16 or all in float16, not {given}"
    if not all(isinstance(d, int) for x in (query, key, value) for d in x.shape):
        return f"it needs static shapes, not {query.shape}, {key.shape}, {value.shape}"
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "it takes no empty operands"
    sizes = Sizes.of(query, key, value)
    for name, size in (("H", sizes.h), ("Hv", sizes.hv)):
        if size % 8 or size > 256:
            return f"it takes head dimensions that are multiples of 8 up to 256, not {name}={size}"
    if config is not None and sizes.shared_memory(config) > _SHARED_MEMORY:
        return f"{config} needs {sizes.shared_memory(config)} bytes of shared memory"
    return None


def backward_heuristic(device_kind, query, key, value, *rest, **params) -> BackwardConfig:
    """What fits: two consumers share a gradient of queries by 64 rows or 64 columns each."""
    del device_kind, rest, params
    return BackwardConfig(block_q=128 if Sizes.of(query, key, value).hp == 64 else 64)


def backward_candidates(query, key, value, *rest, **params) -> list[BackwardConfig]:
    del rest, params
    sizes = Sizes.of(query, key, value)
    made = [BackwardConfig(block_q, stages) for block_q in (64, 128) for stages in (2, 3)]
    return [c for c in made if sizes.refuse_backward(c) is None]


def refuse_backward(
    query, key, value, *rest, config: BackwardConfig | None, fields, spec: Spec, **params
) -> str | None:
    """Why a call's gradients can't be served."""
    reason = refuse(query, key, value, *rest, config=None, **params)
    if reason is not None:
        return reason
    for name, what in (("bias", "a bias"), ("mask", "a mask array"), ("seeds", "dropout")):
        if name in fields:
            return f"its gradients take no {what.removeprefix('a ')} yet"
    if spec.deterministic:
        return "its gradients are not deterministic yet"
    sizes = Sizes.of(query, key, value)
    if max(sizes.hp, sizes.hvp) > 128:
        return f"its gradients take heads up to 128 yet, not H={sizes.h} and Hv={sizes.hv}"
    return None if config is None else sizes.refuse_backward(config)
