"""Where pools come from: one module for each source. Each hands whole tuples of Pool values to the router."""
