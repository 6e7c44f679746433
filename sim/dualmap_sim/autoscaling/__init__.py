"""A pool that an autoscaler sizes, in virtual time: ``loop`` runs it, the other modules are its parts."""
