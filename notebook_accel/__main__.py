"""The entry point of ``python -m notebook_accel``, the same as ``notebook-accel``."""

import sys

from notebook_accel.cli import main

sys.exit(main())
