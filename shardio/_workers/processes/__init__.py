"""Start worker processes, share memory and exchange messages with them."""
