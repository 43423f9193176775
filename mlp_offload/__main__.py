"""``python -m mlp_offload`` is the ``mlp-offload`` command."""

import sys

from .cli.main import main

sys.exit(main())
