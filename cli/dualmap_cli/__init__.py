"""The `dualmap` command line and the demo: the only layer that imports all other layers."""
