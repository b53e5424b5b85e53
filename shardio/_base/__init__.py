"""What every part of the library uses, and what knows of none of them."""
