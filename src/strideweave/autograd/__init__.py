"""Gradient mode: whether operations note down how to compute gradients."""

from strideweave.autograd.mode import is_grad_enabled, no_grad, set_grad_enabled

__all__ = ["is_grad_enabled", "no_grad", "set_grad_enabled"]
