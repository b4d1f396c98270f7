# SPDX-License-Identifier: Apache-2.0
"""`logra report`: one HTML file that shows what runs did. Read in this order: runs, plots, page."""
