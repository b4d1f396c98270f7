# SPDX-License-Identifier: Apache-2.0
"""What is done with a sketch. Read in this order: row_adam, factors, storage, merge, proposal, optimizer."""
