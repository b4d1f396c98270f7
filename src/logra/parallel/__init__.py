# SPDX-License-Identifier: Apache-2.0
"""Several processes: who they are, what they agree on, which rows of a weight each of them holds."""
