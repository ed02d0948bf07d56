"""``python -m notebook_accel`` is ``notebook-accel``."""

import sys

from notebook_accel.cli import main

sys.exit(main())
