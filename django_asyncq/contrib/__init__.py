"""What needs an optional library, each in a module of its own."""
