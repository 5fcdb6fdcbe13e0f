"""What runs in a peer's own virtual environment; needs nothing but that peer. Imported there without a package."""
