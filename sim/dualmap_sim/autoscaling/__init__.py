"""A pool with an autoscaler, in virtual time. ``loop`` runs the pool; the other modules are its components."""
