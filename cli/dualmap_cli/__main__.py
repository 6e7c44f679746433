"""``python -m dualmap_cli``: the same as ``dualmap``."""

from dualmap_cli.main import main

main()
