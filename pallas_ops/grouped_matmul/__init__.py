"""Ragged grouped matrix products."""

from pallas_ops.grouped_matmul.api import ragged_dot, ragged_dot_contracting

__all__ = ["ragged_dot", "ragged_dot_contracting"]
