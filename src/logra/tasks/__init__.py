# SPDX-License-Identifier: Apache-2.0
"""Prompts and rewards. Read in this order: task, answers, generated."""
