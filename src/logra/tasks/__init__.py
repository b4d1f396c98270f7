# SPDX-License-Identifier: Apache-2.0
"""Prompts and rewards. Read in this order: task, answers, math_answers, generated, rewards, dataset, choose."""
