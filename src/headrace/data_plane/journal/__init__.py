"""An append-only journal of what goes into a store, and the way back: see docs/durability.md."""
