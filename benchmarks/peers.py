"""Other JAX libraries' attention and grouped matmul, each under `library:variant`.

A loader imports its library and returns the implementation; it raises ImportError with what is not
installed. For a device or a case that a library cannot run, loader or implementation raise
NotImplementedError with the reason. Every library is asked for one implementation by name, so that
none of them can fall back to another one unseen. Peers of PyTorch run in a process of their own,
`torch_peers`.
"""

import functools
import importlib.util
import logging
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import torch_libraries
from benchmarks.operations import Products
from benchmarks.shapes import AttentionShape
from benchmarks.torch_libraries import refuse, require

Operands = dict[str, jax.Array]
Attention = Callable[[Operands, AttentionShape], jax.Array]

_CONTRACT_K = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_CONTRACT_N = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_CONTRACT_M = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
_NO_SEGMENTS = "no segment ids but as a mask of T x S"
_TUNED_BY_TOKAMAX = "NVIDIA H100 80GB HBM3"


def _require_gpu() -> None:
    backend = jax.default_backend()
    refuse(backend != "gpu", f"needs an NVIDIA GPU, this is {backend}")


def _jax_nn(implementation: str) -> Attention:
    if implementation == "cudnn":
        _require_gpu()

    def attend(operands: Operands, shape: AttentionShape) -> jax.Array:
        refuse(shape.v_head_dim != shape.head_dim, "jax.nn takes one head dim for key and value")
        if implementation == "cudnn" and shape.window and not shape.causal:
            refuse(shape.window[1] > 0, "cuDNN takes no right side of a window but a causal one")
        mask = None
        if "q_segment_ids" in operands:
            refuse(implementation == "cudnn", _NO_SEGMENTS)
            q_ids, kv_ids = operands["q_segment_ids"], operands["kv_segment_ids"]
            mask = (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]  # [b, 1, t, s]
        attention: Any = jax.nn.dot_product_attention
        return attention(
            operands["query"],
            operands["key"],
            operands["value"],
            mask=mask,
            is_causal=shape.causal,
            query_seq_lengths=operands.get("query_seq_lengths"),
            key_value_seq_lengths=operands.get("key_value_seq_lengths"),
            local_window_size=shape.window,
            implementation=implementation,
        )

    return attend


def _tokamax() -> Any:
    if "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None:
        tools = "xprof.cli.tools"  # needed for tokamax's own benchmarks alone
        for name in ("xprof", "xprof.cli", tools, tools + ".get_kernel_stats_tool"):
            sys.modules[name] = types.ModuleType(name)
    tokamax = require("tokamax", "tokamax")
    _require_gpu()
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of each shape without tuning
    return tokamax


def _take_over_tuning(op: Any) -> None:
    """Gives a Hopper card that tokamax has no tuning for that of the H100, the kinder setting."""
    device = jax.devices()[0]
    if str(getattr(device, "compute_capability", "")) == "9.0":
        own = op.get_autotuning_cache(device.device_kind)
        if not own:
            own.update(op.get_autotuning_cache(_TUNED_BY_TOKAMAX))


def _tokamax_attention() -> Attention:
    tokamax = _tokamax()
    api = require("tokamax._src.ops.attention.api", "tokamax")
    op = api.IMPLEMENTATIONS["mosaic_gpu"]
    _take_over_tuning(op)
    _take_over_tuning(op.vjp)

    def attend(operands: Operands, shape: AttentionShape) -> jax.Array:
        refuse("q_segment_ids" in operands, _NO_SEGMENTS)
        return tokamax.dot_product_attention(
            operands["query"],
            operands["key"],
            operands["value"],
            is_causal=shape.causal,
            query_seq_lengths=operands.get("query_seq_lengths"),
            key_value_seq_lengths=operands.get("key_value_seq_lengths"),
            local_window_size=shape.window,
            implementation="mosaic_gpu",
        )

    return attend


def _tokamax_grouped() -> Products:
    tokamax = _tokamax()
    api = require("tokamax._src.ops.ragged_dot.api", "tokamax")
    _take_over_tuning(api.IMPLEMENTATIONS["mosaic_gpu"].replace(bypass_device_check=True))

    def product(lhs, rhs, group_sizes, dimensions, result_type=None):
        # Its tuning is found by the number of rows and the type that a gradient asks for.
        sizes = tokamax.RaggedDotGroupSizes(group_sizes, lhs.shape[0])
        return tokamax.ragged_dot_general(
            lhs,
            rhs,
            sizes,
            dimensions,
            preferred_element_type=result_type,
            implementation="mosaic_gpu",
        )

    return Products(
        lambda lhs, rhs, group_sizes: product(lhs, rhs, group_sizes, _CONTRACT_K),
        lambda ct, rhs, group_sizes: product(ct, rhs, group_sizes, _CONTRACT_N, ct.dtype),
        lambda lhs, ct, group_sizes: product(lhs, ct, group_sizes, _CONTRACT_M, ct.dtype),
    )


def _flash_attn3() -> Attention:
    fa3 = require("flash_attn3_jax", "flash-attn3-jax")
    _require_gpu()

    def attend(operands: Operands, shape: AttentionShape) -> jax.Array:
        refuse(shape.dtype not in ("bfloat16", "float16"), "bfloat16 and float16 only")
        refuse(shape.head_dim > 128, "this build takes head dims to 128")
        refuse(shape.v_head_dim != shape.head_dim, "one head dim for key and value")
        refuse(shape.lengths, "no lengths in a padded batch")
        if shape.causal or shape.window or shape.documents:
            refuse(shape.q_len != shape.kv_len, "aligns the last query with the last key")
        qkv = [operands[name] for name in ("query", "key", "value")]
        options = dict(is_causal=shape.causal, window_size=shape.window or (-1, -1))
        if not shape.documents:
            return fa3.flash_mha(*qkv, **options)
        starts = torch_libraries.document_starts(shape)
        longest = int(np.diff(starts).max())
        out = fa3.flash_mha_varlen(
            *(x.reshape(-1, *x.shape[2:]) for x in qkv),
            jnp.asarray(starts),
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return out.reshape(qkv[0].shape)

    return attend


def _attention_mgpu() -> Attention:
    mgpu = require("jax.experimental.pallas.ops.gpu.attention_mgpu", "JAX's attention_mgpu")
    _require_gpu()

    def attend(operands: Operands, shape: AttentionShape) -> jax.Array:
        refuse(shape.dtype != "float16", "float16 only: so its shared memory is declared")
        refuse(shape.window is not None, "no windows")
        refuse("q_segment_ids" in operands, "no segment ids")
        refuse(shape.lengths, "no lengths")
        refuse(shape.v_head_dim != shape.head_dim, "one head dim for key and value")
        refuse(shape.head_dim % 64 != 0, "head dims that are multiples of 64")
        block_kv = 128 if shape.head_dim <= 128 else 64  # larger ones exceed shared memory
        refuse(shape.q_len % 128 != 0, "query lengths that are multiples of 128")
        refuse(shape.kv_len % 128 != 0, "key lengths that are multiples of 128")
        refuse(shape.causal and shape.q_len > shape.kv_len, "causal with more queries than keys")
        config = mgpu.TuningConfig(
            block_q=64,
            block_kv=block_kv,
            max_concurrent_steps=2,
            causal=shape.causal,
            compute_wgs_bwd=2 if shape.head_dim <= 128 else 1,
            **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64),
        )
        # The kernel has no scale: a user multiplies the query.
        query = operands["query"] * jnp.float16(1 / math.sqrt(shape.head_dim))
        return mgpu.attention(query, operands["key"], operands["value"], config)

    return attend


def _ragged_dot_mgpu() -> Products:
    folder = "jax.experimental.pallas.ops.gpu."
    mgpu = require(folder + "ragged_dot_mgpu", "JAX's ragged_dot_mgpu")
    transposed = require(folder + "transposed_ragged_dot_mgpu", "JAX's transposed_ragged_dot_mgpu")
    _require_gpu()
    tiles = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=8)

    def product(lhs, rhs, group_sizes, transpose_rhs):
        refuse(lhs.dtype not in (jnp.bfloat16, jnp.float16), "bfloat16 and float16 only")
        tiled = [lhs.shape[1], *rhs.shape[1:]]
        refuse(any(size % 64 for size in tiled), "sizes K and N that are multiples of 64")
        return mgpu.ragged_dot(
            lhs, rhs, group_sizes=group_sizes, transpose_rhs=transpose_rhs, **tiles
        )

    def drhs(lhs, ct, group_sizes):
        refuse(lhs.dtype not in (jnp.bfloat16, jnp.float16), "bfloat16 and float16 only")
        whole = lhs.shape[1] % 128 == 0 and ct.shape[1] % 128 == 0
        refuse(not whole, "sizes K and N that are multiples of 128")
        return transposed.transposed_ragged_dot(lhs, ct, group_sizes=group_sizes, **tiles)

    return Products(
        functools.partial(product, transpose_rhs=False),
        functools.partial(product, transpose_rhs=True),
        drhs,
    )


def _lax() -> Products:
    def dlhs(ct, rhs, group_sizes):
        lhs = jnp.zeros((ct.shape[0], rhs.shape[1]), ct.dtype)  # no gradient depends on it
        return jax.vjp(lambda lhs: lax.ragged_dot(lhs, rhs, group_sizes), lhs)[1](ct)[0]

    def drhs(lhs, ct, group_sizes):
        return lax.ragged_dot_general(lhs, ct, group_sizes, _CONTRACT_M)

    return Products(lax.ragged_dot, dlhs, drhs)


ATTENTION: dict[str, Callable[[], Attention]] = {
    "jax.nn:cudnn": functools.partial(_jax_nn, "cudnn"),
    "jax.nn:xla": functools.partial(_jax_nn, "xla"),
    "tokamax:mosaic": _tokamax_attention,
    "jax:attention_mgpu": _attention_mgpu,
    "flash-attn3-jax:fa3": _flash_attn3,
}
GROUPED: dict[str, Callable[[], Products]] = {
    "jax.lax:ragged_dot": _lax,
    "tokamax:mosaic": _tokamax_grouped,
    "jax:ragged_dot_mgpu": _ragged_dot_mgpu,
}
ALIASES: dict[str, tuple[str, ...]] = {
    "jax": tuple(dict.fromkeys([*ATTENTION, *GROUPED])),
    "cudnn": ("jax.nn:cudnn",),
    "nn": ("jax.nn:cudnn", "jax.nn:xla"),
    "lax": ("jax.lax:ragged_dot",),
    "tokamax": ("tokamax:mosaic",),
    "mgpu": ("jax:attention_mgpu", "jax:ragged_dot_mgpu"),
    "fa3": ("flash-attn3-jax:fa3",),
    **torch_libraries.ALIASES,
}
