"""The `dualmap` command line and the demo: the only layer that knows all the others."""
