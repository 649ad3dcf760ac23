"""What joins collectors and trainer: who may begin when, which groups a step takes, and what lies ready."""
