"""How flash attention and its backward are cut on Hopper, and which calls their kernels take.

Imports nothing of Pallas, so that the package can be imported without it.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pallas_ops import chips, toolchain, tuning
from pallas_ops.attention.validate import Spec

ROWS = 64  # of a warpgroup, by wgmma
READ_BY_TILE = ("bias", "mask")  # operands that come without TMA, straight into registers
UNEVEN = {"q_segments", "query_lengths", "kv_lengths"}  # tiles differ in length, nobody knows how
_SHARED_MEMORY = 221 * 1024  # for tiles: Mosaic, barriers and vectors take some of the 227 KiB


def banded(spec: Spec) -> bool:
    return spec.left is not None or spec.right is not None


def registers(consumers: int) -> tuple[int, int]:
    """A consumer's and the producer's: together what a block is launched with, or less.

    That is the same number for each thread, a multiple of 8: one more and setmaxnreg waits for
    ever.
    """
    return (160, 32) if consumers == 3 else (240, 24)


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
        if self.block_kv not in (64, 128):
            raise ValueError(f"block_kv must be 64 or 128, got {self}")
        if not 1 <= self.consumers <= 3 or self.stages < 2 or self.blocks < 0:
            raise ValueError(f"1 to 3 consumers, 2 stages or more, blocks >= 0, got {self}")
        if self.blocks and not self.producer:
            raise ValueError(f"without a producer blocks must be 0, got {self}")

    @property
    def rows(self) -> int:
        return ROWS * self.consumers


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How the work of `flash_attention_bwd` is cut on Hopper.

    A block of the grid takes 128 keys, or 64 where heads are over 128 or values wider, and
    `block_q` queries a step. `stages` steps of queries and `do_stages` of cotangents are in shared
    memory. With `producer` a warpgroup of its own issues the loads; without it the first consumer
    does, one step later, so that a third stage pays: for toolchains that ignore setmaxnreg.
    `blocks` of the grid stay on the card and share the tiles; 0 launches one for each tile.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    producer: bool = True
    blocks: int = 0

    def __post_init__(self):
        tuning.check_fields(self)
        if self.block_q not in (64, 128) or self.stages < 2 or self.do_stages < 1:
            raise ValueError(
                f"block_q must be 64 or 128, stages 2 or more, do_stages 1 or more, got {self}"
            )
        if self.blocks < 0 or (self.blocks and not self.producer):
            raise ValueError(f"blocks >= 0, and 0 without a producer, got {self}")


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
        return self.hvp <= self.hp and whole > _SHARED_MEMORY

    def shared_memory(self, config: Config) -> int:
        output = 0 if self.shares_output(config) else 2 * config.rows * self.hvp
        return self.bytes_of_inputs(config) + output

    def refuse(self, config: Config) -> str | None:
        """Why a config does not fit."""
        if self.shared_memory(config) > _SHARED_MEMORY:
            return f"{config} needs {self.shared_memory(config)} bytes of shared memory"
        # Scores and results in float32, weights in 16 bits and masks, of 64 rows shared by 128
        # threads. The rest of a thread's registers goes to addresses, maxima and sums.
        tiles = self.hvp // 2 + 7 * config.block_kv // 8
        most = 144 if config.consumers == 3 else 184
        if tiles > most:
            return f"{config} needs {tiles} registers a thread for its tiles, of {most}"
        return None

    @property
    def by_role(self) -> bool:
        """Whether the backward's consumers share 64 keys, one for each gradient's registers."""
        return max(self.hp, self.hvp) > 128 or self.hp < self.hvp

    def backward_shared_memory(self, config: BackwardConfig) -> int:
        """Keys, values; queries, cotangents; two tiles of scores; parts of queries' gradient."""
        keys = ROWS if self.by_role else 2 * ROWS
        tiles = keys * (self.hp + self.hvp) + 2 * keys * config.block_q
        tiles += config.block_q * (config.stages * self.hp + config.do_stages * self.hvp)
        return 2 * tiles + 4 * 2 * ROWS * 64

    def refuse_backward(self, config: BackwardConfig) -> str | None:
        """Why a config does not fit."""
        if self.backward_shared_memory(config) > _SHARED_MEMORY:
            return f"{config} needs {self.backward_shared_memory(config)} bytes of shared memory"
        if not self.by_role and self.hp < 128 and config.block_q < 128:
            return f"{config} needs heads over 64, not H={self.h}"
        if self.by_role and (config.block_q > 64 or config.blocks):
            return f"{config} does not fit H={self.h} and Hv={self.hv}"
        if not self.by_role and not config.producer and config.do_stages < 2:
            return f"{config} needs do_stages of 2 or more"
        return None


def heuristic(
    device_kind: str | None, query, key, value, *rest, fields, spec: Spec, **params
) -> Config:
    """The widest tiles for which there is room.

    A tile of a bias, and heads of more than 128 columns, take the registers of 64 keys. Tiles of
    three consumers waste most at the ends of 1024 keys, and at both edges of a window; up to 512
    causal keys two were slower all the same. Blocks stay where tiles, or pairs of them
    under a band, can be shared out evenly; others, and long ones, the card deals out better.
    """
    del rest, params
    sizes = Sizes.of(query, key, value)
    producer = not toolchain.ignores_setmaxnreg()
    wide = sizes.hvp > 128 or (sizes.hp > 128 and not producer)
    widths = (64,) if "bias" in fields or wide else (128, 64)
    # Keys that a tile of 128 queries sees at most.
    seen = sizes.s
    if spec.left is not None and spec.right is not None:
        seen = min(seen, spec.left + spec.right + 128)
    short = banded(spec) and seen <= 1024 and (spec.left is not None or seen > 512)
    narrow = max(sizes.hp, sizes.hvp) == 64 and producer and "bias" not in fields
    consumers = 1 if sizes.t <= ROWS else 3 if narrow and not short else 2
    stages = 3 if narrow and short else 2
    blocks = chips.processors(device_kind)
    even = UNEVEN.isdisjoint(fields)
    if banded(spec):
        pairs, odd = divmod(sizes.b * sizes.n, 2)
        shares = pairs * -(-sizes.t // (ROWS * consumers))
        even &= not odd and shares > 0.9 * blocks * -(-shares // blocks)
        even &= seen <= 16 * widths[0]
    blocks = blocks if even and producer else 0
    made = [Config(block_kv, consumers, stages, blocks, producer) for block_kv in widths]
    return next((c for c in made if sizes.refuse(c) is None), made[-1])


def candidates(query, key, value, *rest, fields, spec: Spec, **params) -> list[Config]:
    del rest, params
    sizes = Sizes.of(query, key, value)
    made = [
        Config(block_kv, consumers, stages, blocks, producer)
        for consumers in (2, 3)
        for block_kv in (64, 128)
        for stages in (2, 3)
        for producer, blocks in ((True, 132), (True, 0), (False, 0))
        if producer or consumers == 2
    ]
    return [c for c in made if sizes.refuse(c) is None]


def refuse(
    query, key, value, *rest, config: Config | None, fields, spec: Spec, **params
) -> str | None:
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
    return None if config is None else sizes.refuse(config)


def backward_heuristic(device_kind, query, key, value, *rest, **params) -> BackwardConfig:
    """The first that fits: two consumers share a gradient of queries by 64 rows or 64 columns each.

    Without a producer two stages of queries would make the next scores wait for their load.
    """
    del device_kind, rest, params
    sizes, producer = Sizes.of(query, key, value), not toolchain.ignores_setmaxnreg()
    made = [
        BackwardConfig(block_q, stages, do_stages, producer)
        for stages in ((2,) if producer or sizes.by_role else (3, 2))
        for block_q in (64, 128)
        for do_stages in (2, 1)
    ]
    return next((c for c in made if sizes.refuse_backward(c) is None), made[0])


def backward_candidates(query, key, value, *rest, spec: Spec, **params) -> list[BackwardConfig]:
    del rest, params
    sizes = Sizes.of(query, key, value)
    stay = ((True, 132),) if not spec.deterministic else ()
    made = [
        BackwardConfig(block_q, stages, do_stages, producer, blocks)
        for block_q in (64, 128)
        for stages in (2, 3)
        for do_stages in (1, 2, 3)
        for producer, blocks in (*stay, (True, 0), (False, 0))
        if do_stages <= stages
    ]
    return [c for c in made if sizes.refuse_backward(c) is None]


def refuse_backward(
    query, key, value, *rest, config: BackwardConfig | None, fields, spec: Spec, **params
) -> str | None:
    """Why a call's gradients can't be served."""
    reason = refuse(query, key, value, *rest, config=None, fields=fields, spec=spec, **params)
    if reason is not None:
        return reason
    if spec.deterministic and params["bias_gradient"] and "bias" in fields:
        bias = rest[fields[3:].index("bias")].shape
        if 1 not in bias[2:] and bias[:2] != (query.shape[0], query.shape[2]):
            return f"a bias of shape {bias} has no deterministic gradient: heads or rows share it"
    if config is None:
        return None
    if config.blocks and spec.deterministic:
        return f"{config} has no deterministic gradient: blocks that stay take tiles in no order"
    return Sizes.of(query, key, value).refuse_backward(config)
