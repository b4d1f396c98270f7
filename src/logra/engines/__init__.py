# SPDX-License-Identifier: Apache-2.0
"""Rollout engines in processes of their own: where they run, how they are reached, and how work is spread over them."""
