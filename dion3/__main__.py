"""`python -m dion3`: see `dion3.cli`."""

import sys

from dion3.cli import main

sys.exit(main())
