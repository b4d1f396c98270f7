# SPDX-License-Identifier: Apache-2.0
"""Drawing completions. Read in this order: sampling, engine, transformers_engine."""
