# SPDX-License-Identifier: Apache-2.0
"""How a gradient becomes small. Read in this order: projection, targets, layer_sketch, hooks."""
