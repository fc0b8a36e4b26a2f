"""PyTorch's attention and grouped matmul and those of libraries for it, under `library:variant`.

Imports nothing but NumPy: a loader imports its library, and raises ImportError with what is not
installed. What it returns makes an implementation of a shape. Both raise NotImplementedError with
the reason where the library cannot run on this device, or this shape.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.shapes import AttentionShape, GroupedShape


class Attention(NamedTuple):
    """`call(query, key, value)` on what `enter` makes of [batch, length, heads, dim].

    `leave` brings a result, or a gradient, back to that layout.
    """

    enter: Callable[[Any], Any]
    call: Callable[[Any, Any, Any], Any]
    leave: Callable[[Any], Any]


class Grouped(NamedTuple):
    """The three products of a grouped matmul with `rhs` [G, K, N] and rows sorted by group."""

    forward: Callable[[Any, Any], Any]  # lhs [M, K], rhs -> [M, N]
    dlhs: Callable[[Any, Any], Any]  # ct [M, N], rhs -> [M, K]
    drhs: Callable[[Any, Any], Any]  # lhs, ct -> [G, K, N]


def document_starts(shape: AttentionShape) -> np.ndarray:
    """Where each document of the batch, laid end to end, starts, and the last one ends: int32."""
    ids = shape.arrays()["q_segment_ids"]
    first = np.ones(ids.shape, bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return np.append(np.flatnonzero(first), ids.size).astype(np.int32)


def refuse(when: bool, reason: str) -> None:
    """Says why a library cannot run here, or cannot run a case."""
    if when:
        raise NotImplementedError(reason)


def require(module: str, package: str) -> Any:
    """Imports a module, or says what is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if module.startswith(str(error.name)):
            raise ImportError(f"{package} is not installed") from error
        raise ImportError(f"{package} needs {error.name}, which is not installed") from error


def _torch() -> Any:
    torch = require("torch", "torch")
    refuse(not torch.cuda.is_available(), "needs an NVIDIA GPU")
    return torch


def _same(x: Any) -> Any:
    return x


def _sdpa(backend: str) -> Callable[[AttentionShape], Attention]:
    torch = _torch()
    kernels = require("torch.nn.attention", "torch")
    chosen = getattr(kernels.SDPBackend, backend)

    def make(shape: AttentionShape) -> Attention:
        refuse(shape.window is not None, "no windows")
        refuse(bool(shape.documents), "no packed documents but as a mask of T x S")
        refuse(shape.lengths, "no lengths but as a mask of T x S")
        refuse(shape.dtype not in ("bfloat16", "float16"), "bfloat16 and float16 only")
        options: dict[str, Any] = dict(is_causal=shape.causal)
        if shape.heads != shape.kv_heads:
            options["enable_gqa"] = True

        def call(query, key, value):
            with kernels.sdpa_kernel([chosen]):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, **options
                )

        return Attention(
            lambda x: x.transpose(1, 2).contiguous(), call, lambda x: x.transpose(1, 2)
        )

    return make


def _flash_attn4() -> Callable[[AttentionShape], Attention]:
    torch = _torch()
    cute = require("flash_attn.cute", "flash-attn-4")

    def make(shape: AttentionShape) -> Attention:
        refuse(shape.dtype not in ("bfloat16", "float16"), "bfloat16 and float16 only")
        if shape.causal or shape.window or shape.documents:
            refuse(shape.q_len != shape.kv_len, "aligns the last query with the last key")
        options: dict[str, Any] = dict(causal=shape.causal)
        if shape.window:
            options["window_size"] = shape.window
        if not shape.documents and not shape.lengths:
            return Attention(_same, lambda *qkv: cute.flash_attn_func(*qkv, **options)[0], _same)
        if shape.documents:
            refuse(shape.lengths, "documents and lengths together")
            starts = document_starts(shape)
            longest = int(np.diff(starts).max())
            on_device = torch.tensor(starts, device="cuda")
            options |= dict(cu_seqlens_q=on_device, cu_seqlens_k=on_device)
            options |= dict(max_seqlen_q=longest, max_seqlen_k=longest)
            enter = lambda x: x.reshape(-1, *x.shape[2:])
            leave = lambda x: x.reshape(shape.batch, -1, *x.shape[1:])
        else:
            arrays = shape.arrays()
            options["seqused_q"] = torch.tensor(arrays["query_seq_lengths"], device="cuda")
            options["seqused_k"] = torch.tensor(arrays["key_value_seq_lengths"], device="cuda")
            enter = leave = _same
        return Attention(enter, lambda *qkv: cute.flash_attn_varlen_func(*qkv, **options)[0], leave)

    return make


def _aligned(shape: GroupedShape) -> None:
    refuse(shape.dtype != "bfloat16", "bfloat16 only")
    refuse(shape.k % 8 != 0 or shape.n % 8 != 0, "sizes K and N that are multiples of 8")


def _grouped_mm() -> Callable[[GroupedShape], Grouped]:
    torch = _torch()
    product = getattr(torch, "_grouped_mm", None) or torch.nn.functional.grouped_mm

    def make(shape: GroupedShape) -> Grouped:
        _aligned(shape)
        ends = torch.tensor(np.cumsum(shape.group_sizes()), dtype=torch.int32, device="cuda")
        return Grouped(
            lambda lhs, rhs: product(lhs, rhs, offs=ends),
            lambda ct, rhs: product(ct, rhs.transpose(-2, -1), offs=ends),
            lambda lhs, ct: product(lhs.t(), ct, offs=ends),
        )

    return make


def _quack() -> Callable[[GroupedShape], Grouped]:
    torch = _torch()
    gemm = require("quack.gemm_interface", "quack-kernels").gemm

    def make(shape: GroupedShape) -> Grouped:
        _aligned(shape)
        starts = np.append(0, np.cumsum(shape.group_sizes()))
        starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        return Grouped(
            lambda lhs, rhs: gemm(lhs, rhs, cu_seqlens_m=starts, tuned=False),
            lambda ct, rhs: gemm(ct, rhs.mT, cu_seqlens_m=starts, tuned=False),
            lambda lhs, ct: gemm(lhs.mT, ct, cu_seqlens_k=starts, tuned=False),
        )

    return make


# A kernel that faults takes the process with it: the least tried ones come last.
LOADERS: dict[str, dict[str, Callable[[], Callable[[Any], Any]]]] = {
    "attention": {
        "torch:sdpa_flash": lambda: _sdpa("FLASH_ATTENTION"),
        "torch:sdpa_cudnn": lambda: _sdpa("CUDNN_ATTENTION"),
        "flash-attn-4:cute": _flash_attn4,
    },
    "grouped_matmul": {
        "torch:grouped_mm": _grouped_mm,
        "quack:gemm": _quack,
    },
}
ALIASES: dict[str, tuple[str, ...]] = {
    "torch": tuple(name for loaders in LOADERS.values() for name in loaders),
    "sdpa": ("torch:sdpa_flash", "torch:sdpa_cudnn"),
    "grouped_mm": ("torch:grouped_mm",),
    "fa4": ("flash-attn-4:cute",),
    "quack": ("quack:gemm",),
}
