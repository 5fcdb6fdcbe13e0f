"""The processes of a fleet and what its leader does: supervisor, recovery, reconciling, pruning."""
