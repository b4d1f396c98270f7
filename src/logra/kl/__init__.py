# SPDX-License-Identifier: Apache-2.0
"""How far a step moves the policy, and how large it may be. In this order: displacement, measure,
step_control, controlled_step.
"""
