"""The shapes that are measured and tested, by name. NumPy only."""

import dataclasses
from typing import Any

import numpy as np

FORWARD_AND = {"fwd": (1, 0), "bwd": (0, 1), "fwdbwd": (1, 1)}
PRODUCTS = {
    "fwd": ("out",),
    "dlhs": ("dlhs",),
    "drhs": ("drhs",),
    "bwd": ("dlhs", "drhs"),
    "fwdbwd": ("out", "dlhs", "drhs"),
}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Attention of [batch, q_len, heads, head_dim] to [batch, kv_len, kv_heads, ...].

    `window` is (left, right) beside the query's own position, `documents` the number of packed ones
    in each row, `lengths` says that rows are shorter than their buffers.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None
    documents: int | None = None
    lengths: bool = False

    op = "attention"
    directions = tuple(FORWARD_AND)

    @property
    def case(self) -> str:
        parts = [f"b{self.batch} t{self.q_len}"]
        parts += [f"s{self.kv_len}"] * (self.kv_len != self.q_len)
        parts += [f"n{self.heads}" + f"/{self.kv_heads}" * (self.kv_heads != self.heads)]
        parts += [f"h{self.head_dim}" + f"/{self.v_head_dim}" * (self.v_head_dim != self.head_dim)]
        parts += ["causal"] * self.causal
        parts += [f"window{self.window[0]},{self.window[1]}"] if self.window else []
        parts += [f"documents{self.documents}"] if self.documents else []
        return " ".join([*parts, *["lengths"] * self.lengths, self.dtype])

    def fields(self) -> dict[str, Any]:
        window = None if self.window is None else list(self.window)
        return {**dataclasses.asdict(self), "window": window}

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Segment ids [batch, length] and lengths [batch], int32, of what the shape has."""
        rng = np.random.default_rng(seed)
        arrays = {}
        if self.documents:
            # The same for queries and keys. Sizes differ much; no document is empty.
            weights = rng.dirichlet(np.ones(self.documents), self.batch)
            sizes = 1 + rng.multinomial(self.q_len - self.documents, weights)
            ids = np.arange(1, self.documents + 1, dtype=np.int32)
            rows = np.stack([np.repeat(ids, row) for row in sizes])
            arrays |= {"q_segment_ids": rows, "kv_segment_ids": rows}
        if self.lengths:
            queries = rng.integers(self.q_len // 2, self.q_len, self.batch, np.int32)
            keys = rng.integers(self.kv_len // 2, self.kv_len, self.batch, np.int32)
            keys = queries if self.q_len == self.kv_len else keys
            arrays |= {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
        return arrays

    def visible(self) -> tuple[np.ndarray, np.ndarray]:
        """First key that each query sees and the one after the last, [batch, q_len] each."""
        t = np.arange(self.q_len)
        first = np.zeros((self.batch, self.q_len), np.int64)
        end = np.full_like(first, self.kv_len)
        if self.causal:
            end = np.minimum(end, t + 1)
        if self.window is not None:
            first = np.maximum(first, t - self.window[0])
            end = np.minimum(end, t + self.window[1] + 1)
        arrays = self.arrays()
        if self.documents:
            pairs = list(zip(arrays["q_segment_ids"], arrays["kv_segment_ids"]))
            starts = np.stack([np.searchsorted(kv, q, "left") for q, kv in pairs])
            ends = np.stack([np.searchsorted(kv, q, "right") for q, kv in pairs])
            first, end = np.maximum(first, starts), np.minimum(end, ends)
        if self.lengths:
            end = np.minimum(end, arrays["key_value_seq_lengths"][:, None])
            end = np.where(t < arrays["query_seq_lengths"][:, None], end, 0)
        return first, np.maximum(first, end)

    def flops(self, direction: str) -> int:
        """Counted operations: two products forward, five backward; half of T*S where causal."""
        plain = self.window is None and not self.documents and not self.lengths
        if plain and not (self.causal and self.q_len != self.kv_len):
            pairs = self.batch * self.q_len * self.kv_len / (2 if self.causal else 1)
        else:
            first, end = self.visible()
            pairs = int((end - first).sum())
        forward, backward = FORWARD_AND[direction]
        products = forward + 2.5 * backward
        return round(2 * self.heads * pairs * (self.head_dim + self.v_head_dim) * products)

    def bytes(self, direction: str) -> int:
        """The fewest bytes to move: each operand read once, each result written once."""
        size = _ITEM_BYTES[self.dtype]
        queries = self.batch * self.q_len * self.heads
        keys = self.batch * self.kv_len * self.kv_heads
        inputs = queries * self.head_dim + keys * (self.head_dim + self.v_head_dim)
        out = queries * self.v_head_dim
        integers = sum(x.nbytes for x in self.arrays().values())
        forward, backward = FORWARD_AND[direction]
        total = forward * (size * (inputs + out) + integers)
        # Backward: inputs, out, its cotangent and the float32 lse; the inputs' gradients.
        return total + backward * (size * (2 * inputs + 2 * out) + 4 * queries + integers)


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """[m, k] rows of g groups times [g, k, n]; `model` names the case and nothing else."""

    m: int
    k: int
    n: int
    g: int
    dtype: str = "bfloat16"
    distribution: str = "dirichlet"
    model: str = ""

    op = "grouped_matmul"
    directions = tuple(PRODUCTS)

    @property
    def case(self) -> str:
        dims = f"m{self.m} k{self.k} n{self.n} g{self.g} {self.distribution} {self.dtype}"
        return f"{self.model} {dims}".strip()

    def fields(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        del fields["model"]
        return fields

    def group_sizes(self, seed: int = 0) -> np.ndarray:
        """Rows of each group, int32 [g]."""
        return _DISTRIBUTIONS[self.distribution](
            np.random.default_rng(seed), self.m, self.g
        ).astype(np.int32)

    @property
    def rows(self) -> int:
        """Rows that belong to a group."""
        return int(self.group_sizes().sum())

    def flops(self, direction: str) -> int:
        return 2 * self.rows * self.k * self.n * len(PRODUCTS[direction])

    def bytes(self, direction: str) -> int:
        """The fewest bytes to move: each row and matrix in use read once, each result written."""
        used = int((self.group_sizes() > 0).sum()) * self.k * self.n
        every = self.g * self.k * self.n
        elements = {
            "out": self.rows * self.k + used + self.m * self.n,
            "dlhs": self.rows * self.n + used + self.m * self.k,
            "drhs": self.rows * (self.k + self.n) + every,
        }
        products = PRODUCTS[direction]
        integers = 4 * self.g * len(products)
        return _ITEM_BYTES[self.dtype] * sum(elements[p] for p in products) + integers


def _zipf(r, m, g):
    weights = r.permutation(1 / np.arange(1, g + 1))
    return r.multinomial(m, weights / weights.sum())


def _one_hot(r, m, g):
    sizes = np.zeros(g, int)
    sizes[r.integers(g)] = m
    return sizes


def _half_empty(r, m, g):
    used = r.permutation(np.arange(g) % 2)
    return r.multinomial(m, used / used.sum())


def _ragged(r, m, g):
    """Each one row more than a multiple of 128, which wastes the most of a tile."""
    return 128 * r.multinomial(max(m - g, 0) // 128, np.full(g, 1 / g)) + 1


_DISTRIBUTIONS = {
    "uniform": lambda r, m, g: r.multinomial(m, np.full(g, 1 / g)),
    "zipf": _zipf,
    "dirichlet": lambda r, m, g: r.multinomial(m, r.dirichlet(np.ones(g))),
    "one_hot": _one_hot,
    "half_empty": _half_empty,
    "ragged": _ragged,
    "tail": lambda r, m, g: r.multinomial(7 * m // 10, r.dirichlet(np.ones(g))),
}
DISTRIBUTIONS = tuple(_DISTRIBUTIONS)


def _own(tokens: int, t: int, heads: int, kv_heads: int, h: int, hv: int = 0, **options):
    """Self-attention over `tokens` tokens in rows of `t`."""
    return AttentionShape(tokens // t, t, t, heads, kv_heads, h, hv or h, **options)


def _tokens_16k(t: int, heads: int, kv_heads: int, h: int, hv: int = 0, **options):
    return _own(16384, t, heads, kv_heads, h, hv, **options)


def _attention_sets() -> dict[str, tuple[AttentionShape, ...]]:
    return {
        # The grid of FlashAttention-3's paper.
        "fa3": tuple(
            _tokens_16k(t, 2048 // h, 2048 // h, h, causal=causal)
            for h in (64, 128, 256)
            for causal in (False, True)
            for t in (512, 1024, 2048, 4096, 8192, 16384)
        ),
        "gqa": tuple(
            _tokens_16k(t, heads, kv_heads, 128, causal=True)
            for heads, kv_heads in ((32, 8), (64, 8), (32, 4))
            for t in (4096, 16384)
        ),
        "mla": tuple(_tokens_16k(t, 16, 16, 192, 128, causal=True) for t in (4096, 16384)),
        "packed": tuple(
            _own(t, t, 32, 8, 128, causal=True, documents=12) for t in (8192, 16384, 32768, 65536)
        ),
        "window": tuple(
            _tokens_16k(16384, 16, 16, 128, causal=window[1] == 0, window=window)
            for window in ((1023, 0), (4095, 0), (511, 511))
        ),
        "unaligned": (
            AttentionShape(4, 4001, 4001, 16, 16, 128, 128, causal=True),
            AttentionShape(8, 1000, 3333, 16, 16, 128, 128),
            _tokens_16k(4096, 16, 16, 72, causal=True),
            _tokens_16k(4096, 16, 16, 80, causal=True),
            _tokens_16k(4096, 16, 16, 128, lengths=True),
        ),
    }


# Rows, width of the model, columns of the first product, rows of the second one's matrices, groups.
# Rows are tokens times experts for each; the two halves of a gated first product are one, but for
# Mixtral's. Widths are those of the published configurations.
_MODELS = {
    "mixtral": {"mixtral": (32768, 4096, 14336, 14336, 8)},
    "qwen3_30b": {"qwen3_30b": (65536, 2048, 1536, 768, 128)},
    "olmoe": {"olmoe": (65536, 2048, 2048, 1024, 64)},
    "mixtral_8x22b": {"mixtral_8x22b": (16384, 6144, 32768, 16384, 8)},
    "dbrx": {"dbrx": (32768, 6144, 21504, 10752, 16)},
    "granite": {"granite": (131072, 1024, 1024, 512, 32)},
    "qwen3_235b": {"qwen3_235b": (131072, 4096, 3072, 1536, 128)},
    "qwen3_next": {"qwen3_next": (163840, 2048, 1024, 512, 512)},
    "gpt_oss": {
        "gpt_oss_20b": (32768, 2880, 5760, 2880, 32),
        "gpt_oss_120b": (131072, 2880, 5760, 2880, 128),
    },
    "deepseek_v3": {"deepseek_v3_ep8": (32768, 7168, 4096, 2048, 32)},
    "dsv2_lite": {"dsv2_lite": (49152, 2048, 2816, 1408, 64)},
    "kimi_k2": {"kimi_k2": (131072, 7168, 4096, 2048, 384)},
}


def _model(name: str, m: int, width: int, up: int, down: int, g: int, distributions):
    dims = {"up": (width, up), "down": (down, width)}
    return tuple(
        GroupedShape(m, k, n, g, distribution=distribution, model=f"{name}_{product}")
        for product, (k, n) in dims.items()
        for distribution in distributions
    )


def _grouped_sets() -> dict[str, tuple[GroupedShape, ...]]:
    every = ("uniform", "zipf", "dirichlet")
    sets = {
        name: tuple(s for n, dims in models.items() for s in _model(n, *dims, every))
        for name, models in _MODELS.items()
    }
    qwen = _model("qwen3_30b", *_MODELS["qwen3_30b"]["qwen3_30b"], DISTRIBUTIONS[3:])
    sets["distributions"] = tuple(s for s in qwen if s.model.endswith("up"))
    mixtral, qwen = sets["mixtral"][2], sets["qwen3_30b"][2]
    sets["decode"] = tuple(dataclasses.replace(mixtral, m=m) for m in (8, 128, 1024)) + tuple(
        dataclasses.replace(qwen, m=m) for m in (8, 64, 512, 1024)
    )
    return sets


# Small enough for tests on a CPU.
_TINY = (
    AttentionShape(2, 33, 33, 4, 2, 16, 16, "float32", causal=True),
    AttentionShape(1, 24, 56, 2, 2, 24, 16, "float32"),
    AttentionShape(2, 64, 64, 4, 1, 16, 16, "float32", causal=True, documents=3),
    AttentionShape(1, 37, 37, 2, 2, 8, 8, "float32", window=(5, 3)),
    AttentionShape(3, 32, 32, 2, 1, 8, 8, "float32", lengths=True),
    AttentionShape(1, 64, 64, 2, 2, 16, 16, causal=True, window=(7, 0)),
    *(GroupedShape(60, 16, 24, 4, "float32", d) for d in DISTRIBUTIONS),
    GroupedShape(60, 16, 24, 4),
)
# Small enough for two cores.
_CPU = (
    AttentionShape(1, 1024, 1024, 4, 4, 64, 64, "float32"),
    AttentionShape(1, 1024, 1024, 4, 4, 64, 64, "float32", causal=True),
    AttentionShape(1, 2048, 2048, 4, 2, 64, 64, "float32", causal=True, window=(255, 0)),
    AttentionShape(1, 2048, 2048, 4, 2, 64, 64, "float32", causal=True, documents=12),
    GroupedShape(1024, 256, 256, 8, "float32", "dirichlet"),
    GroupedShape(4096, 512, 512, 64, "float32", "uniform"),
)

_ATTENTION, _GROUPED = _attention_sets(), _grouped_sets()
# What a set that gathers others holds, in order.
GATHERED = {
    "attention": tuple(_ATTENTION),
    "grouped": ("mixtral", "qwen3_30b", "olmoe", "distributions", "decode"),
}
SETS: dict[str, tuple[AttentionShape | GroupedShape, ...]] = {
    **_ATTENTION,
    **_GROUPED,
    "tiny": _TINY,
    "cpu": _CPU,
}
SETS |= {name: tuple(s for part in parts for s in SETS[part]) for name, parts in GATHERED.items()}
