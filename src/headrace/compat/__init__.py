"""Import paths of other packages, resolved by headrace; each is opt-in: `import headrace.compat.nemo_rl`."""
