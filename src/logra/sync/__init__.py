# SPDX-License-Identifier: Apache-2.0
"""From the trainer to rollout replicas: messages of factors, replicas with the same bits, and recovery."""
