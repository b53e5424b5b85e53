"""What one sample of a dataset has: its clip and what is heard of it, its pictures, its tokens."""
