"""Episodes of robots."""
