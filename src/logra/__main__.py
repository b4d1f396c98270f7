# SPDX-License-Identifier: Apache-2.0
"""`python -m logra` is `logra`."""

from logra.cli import main

raise SystemExit(main())
