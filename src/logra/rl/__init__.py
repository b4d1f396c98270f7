# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on plain tensors. Read in this order: batch, advantages, losses, logprobs."""
